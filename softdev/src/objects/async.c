/* Asynchronous events of a context (ibv_get_async_event(3)).
 *
 * An event waits in the context's queue until the application retrieves it. Destroying an object
 * drops its events that have not been retrieved, and waits until the application has acknowledged
 * the others.
 */

#include "objects.h"
#include "trace/trace.h"

struct entry {
	struct soft_node node;
	struct ibv_async_event event;
};

void soft_async_queue_event(struct soft_context *context, const struct ibv_async_event *event)
{
	soft_assert_locked();
	/* An event is dropped if the context is closed or the event cannot be allocated. The
	 * completions of the failed requests still report an error. */
	struct entry *entry = context->closed ? NULL : malloc(sizeof(*entry));

	if (!entry)
		return;
	SOFT_TRACE(event, event);
	entry->event = *event;
	soft_list_append(&context->async_events, &entry->node);
	soft_channel_signal(&context->async);
}

void soft_async_drop_events(struct soft_context *context, const void *element)
{
	soft_list_each_safe (struct entry, entry, &context->async_events, node) {
		/* `element` is a union, so any of its pointers can be compared. */
		if (element && entry->event.element.qp != element)
			continue;
		soft_list_remove(&entry->node);
		free(entry);
	}
	if (soft_list_empty(&context->async_events))
		soft_channel_clear_signal(&context->async);
}

/* Counters of an object's retrieved and acknowledged events, the mutex that protects the counters,
 * and the condition variable that signals acknowledgements. */
struct event_counters {
	pthread_mutex_t *mutex; /* NULL for port events, which are not counted */
	pthread_cond_t *cond;
	uint32_t *retrieved, *acknowledged;
};

static struct event_counters event_counters_of(const struct ibv_async_event *event)
{
	/* Only the pointer that matches the type of the event is valid. */
	struct soft_cq *cq = soft_cq_of(event->element.cq);
	struct soft_qp *qp = soft_qp_of(event->element.qp);
	struct soft_srq *srq = soft_srq_of(event->element.srq);

	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		return (struct event_counters){&cq->ibv.mutex, &cq->ibv.cond,
					       &cq->async_events_retrieved,
					       &cq->ibv.async_events_completed};
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		return (struct event_counters){&qp->ibv.mutex, &qp->ibv.cond,
					       &qp->async_events_retrieved,
					       &qp->ibv.events_completed};
	case IBV_EVENT_SRQ_LIMIT_REACHED:
		return (struct event_counters){&srq->ibv.mutex, &srq->ibv.cond,
					       &srq->async_events_retrieved,
					       &srq->ibv.events_completed};
	default:
		return (struct event_counters){0};
	}
}

/* Count an event before returning it, so that destroying the object waits for the
 * acknowledgement. */
static void count_retrieved(const struct ibv_async_event *event)
{
	const struct event_counters counted = event_counters_of(event);

	if (!counted.mutex)
		return;
	pthread_mutex_lock(counted.mutex);
	++*counted.retrieved;
	pthread_mutex_unlock(counted.mutex);
}

void soft_async_await_acks(const struct soft_context *context, pthread_mutex_t *mutex,
			   pthread_cond_t *cond, const uint32_t *acknowledged,
			   const uint32_t *retrieved)
{
	if (soft_context_is_inherited(context))
		return; /* the thread that acknowledges may exist only in the parent */
	pthread_mutex_lock(mutex);
	while (*acknowledged != *retrieved)
		pthread_cond_wait(cond, mutex);
	pthread_mutex_unlock(mutex);
}

int soft_ibv_get_async_event(struct ibv_context *ibv, struct ibv_async_event *event)
{
	struct soft_context *context = soft_context_of(ibv);

	for (;;) {
		struct entry *entry = NULL;

		soft_progress();
		soft_lock();
		if (!soft_list_empty(&context->async_events)) {
			entry = soft_list_first(&context->async_events, struct entry, node);
			soft_list_remove(&entry->node);
			count_retrieved(&entry->event);
		}
		if (soft_list_empty(&context->async_events))
			soft_channel_clear_signal(&context->async);
		soft_unlock();
		if (entry) {
			*event = entry->event;
			free(entry);
			return 0;
		}
		int rc = soft_channel_nonblocking(&context->async)
				 ? EAGAIN
				 : soft_channel_wait(&context->async);
		if (rc) {
			errno = rc;
			return -1;
		}
	}
}

void soft_ibv_ack_async_event(struct ibv_async_event *event)
{
	const struct event_counters counted = event_counters_of(event);

	if (!counted.mutex)
		return;
	pthread_mutex_lock(counted.mutex);
	++*counted.acknowledged;
	pthread_cond_signal(counted.cond);
	pthread_mutex_unlock(counted.mutex);
}
