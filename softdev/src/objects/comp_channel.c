/* Completion channels, which queue the events of armed CQs. */

#include "objects.h"
#include "trace/trace.h"

static struct soft_comp_channel *channel_of(struct ibv_comp_channel *channel)
{
	return soft_container(channel, struct soft_comp_channel, ibv);
}

struct ibv_comp_channel *soft_ibv_create_comp_channel(struct ibv_context *context)
{
	int rc = 0;
	struct soft_comp_channel *channel =
		soft_alloc_unless_failed(context, sizeof(*channel), &rc);

	if (!rc)
		rc = soft_channel_init(&channel->channel);
	if (rc)
		return soft_finish_create(rc, channel);
	channel->channel.completions = true; /* threads that wait do the device's work */
	channel->ibv = (struct ibv_comp_channel){.context = context, .fd = channel->channel.fd};
	pthread_mutex_init(&channel->mutex, NULL);
	soft_list_init(&channel->ready);
	soft_lock();
	soft_context_hold(soft_context_of(context));
	soft_unlock();
	return &channel->ibv;
}

int soft_ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
	struct soft_comp_channel *channel = channel_of(ibv);

	soft_engine_handle_lost_descriptors();
	soft_lock();
	bool busy = ibv->refcnt > 0;

	soft_unlock();
	if (busy) /* the channel still has CQs (ibv_create_comp_channel(3)) */
		return soft_call_result("ibv_destroy_comp_channel", NULL, 0,
					soft_refuse(EBUSY, "IN_USE"));
	soft_channel_destroy(&channel->channel);
	pthread_mutex_destroy(&channel->mutex);
	soft_context_release(soft_context_of(ibv->context));
	free(channel);
	return 0;
}

void soft_comp_channel_queue_event(struct soft_comp_channel *channel, struct soft_cq *cq)
{
	pthread_mutex_lock(&channel->mutex);
	if (cq->events_pending++ == 0)
		soft_list_append(&channel->ready, &cq->ready_node);
	soft_hint_set(&channel->has_ready, true);
	soft_channel_signal(&channel->channel);
	pthread_mutex_unlock(&channel->mutex);
}

/* Record that all events have been retrieved. The caller holds the channel's mutex. */
static void clear_ready(struct soft_comp_channel *channel)
{
	soft_hint_set(&channel->has_ready, false);
	soft_channel_clear_signal(&channel->channel);
}

void soft_comp_channel_remove_cq(struct soft_comp_channel *channel, struct soft_cq *cq)
{
	pthread_mutex_lock(&channel->mutex);
	cq->events_pending = 0;
	soft_list_remove(&cq->ready_node);
	if (soft_list_empty(&channel->ready))
		clear_ready(channel);
	pthread_mutex_unlock(&channel->mutex);
}

static struct soft_cq *pop_ready(struct soft_comp_channel *channel)
{
	struct soft_cq *cq = NULL;

	/* If the caller's own step has queued an event, the hint is set. If another thread is just
	 * queueing an event, the hint may still be clear, but the event makes the fd readable. */
	if (!soft_hint_get(&channel->has_ready))
		return NULL;
	pthread_mutex_lock(&channel->mutex);
	if (!soft_list_empty(&channel->ready)) {
		cq = soft_list_first(&channel->ready, struct soft_cq, ready_node);
		soft_list_remove(&cq->ready_node);
		if (--cq->events_pending)
			soft_list_append(&channel->ready, &cq->ready_node);
		cq->events_retrieved++;
	}
	if (soft_list_empty(&channel->ready))
		clear_ready(channel);
	else
		/* The step may have suppressed the signal of the events that remain. */
		soft_channel_flush_signal(&channel->channel);
	pthread_mutex_unlock(&channel->mutex);
	return cq;
}

/* Send delayed acknowledgements, then sleep until the channel is ready. Returns 0 or an errno
 * value. */
static int sleep_until_work(struct soft_comp_channel *channel)
{
	soft_engine_send_delayed_output();
	return soft_channel_wait(&channel->channel);
}

int soft_ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **cq, void **cq_context)
{
	struct soft_comp_channel *channel = channel_of(ibv);
	bool nonblocking = soft_channel_nonblocking(&channel->channel);
	struct soft_cq *found;
	int rc = 0;

	/* A non-blocking caller first runs a step of the engine, which may complete requests,
	 * because it is polling or has just been woken. A blocking caller sleeps first. If the
	 * engine has work, the sleep ends immediately and takes no longer than an idle step. */
	while (!(found = pop_ready(channel))) {
		if (!nonblocking)
			rc = sleep_until_work(channel);
		if (!rc) {
			soft_progress_for(&channel->channel);
			found = pop_ready(channel);
		}
		if (found)
			break;
		if (nonblocking)
			rc = EAGAIN;
		if (rc) {
			errno = rc;
			return -1;
		}
	}
	*cq = &found->ibv;
	*cq_context = found->ibv.cq_context;
	return 0;
}

void soft_ibv_ack_cq_events(struct ibv_cq *cq, unsigned int nevents)
{
	pthread_mutex_lock(&cq->mutex);
	cq->comp_events_completed += nevents;
	pthread_cond_signal(&cq->cond);
	pthread_mutex_unlock(&cq->mutex);
}
