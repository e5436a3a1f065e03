/* Event channels and events: rdma_get_cm_event(3), rdma_ack_cm_event(3), rdma_migrate_id(3).
 *
 * Every event belongs to an id. As in librdmacm, a CONNECT_REQUEST belongs to the listener, so that
 * the new id can be destroyed before the event is acknowledged. rdma_destroy_id drops the queued
 * events of the id, and waits until the application has acknowledged the delivered ones.
 */
#include "cm_internal.h"

#include <poll.h>

struct rdma_event_channel *soft_rdma_create_event_channel(void)
{
	struct soft_cm_channel *channel = calloc(1, sizeof(*channel));
	int error;

	if (!channel)
		return NULL;
	error = soft_engine_get();
	if (!error) {
		error = soft_channel_init(&channel->wake);
		if (error)
			soft_engine_put();
	}
	if (error)
		return soft_finish_create(error, channel);
	channel->fork_generation = soft_engine_fork_generation();
	soft_list_init(&channel->events);
	soft_list_init(&channel->ids);
	channel->channel.fd = channel->wake.fd;
	return &channel->channel;
}

/* Close the channel, and free the channel destroyed before it. The channel itself is kept until the
 * next one is destroyed, because a thread may only now enter rdma_get_cm_event(3) for it
 * (begin_reading). */
static void free_channel(struct soft_cm_channel *channel)
{
	struct soft_cm_channel *previous;

	soft_channel_destroy(&channel->wake);
	soft_lock();
	previous = soft_device.cm->last_destroyed;
	soft_device.cm->last_destroyed = channel;
	soft_unlock();
	free(previous);
	soft_engine_put();
}

/* Destroy the channel. The application must destroy the channel's ids first
 * (rdma_destroy_event_channel(3)). Any remaining ids are silenced and can still be destroyed later,
 * as in the kernel when the channel's fd is closed. */
void soft_rdma_destroy_event_channel(struct rdma_event_channel *application)
{
	struct soft_cm_channel *channel;
	struct soft_node dropped_requests;

	if (!application)
		return;
	channel = soft_cm_channel_of(application);
	/* Do not close a descriptor that the application has closed and may have reused. */
	soft_engine_handle_lost_descriptors();
	if (channel->fork_generation != soft_engine_fork_generation())
		return; /* a forked child must not free its parent's channel */
	soft_list_init(&dropped_requests);
	soft_lock();
	soft_list_drain (struct soft_cm_id, id, &channel->ids, in_channel) {
		soft_list_remove(&id->in_channel);
		soft_cm_id_cancel(id, &dropped_requests);
		id->id.channel = NULL;
	}
	soft_cm_free_dropped_requests(&dropped_requests);
	channel->destroyed = true;
	bool unused = channel->active_readers == 0;

	soft_unlock();
	soft_cm_device_close_unused();
	if (unused)
		free_channel(channel);
}

/* ---- reporting ----------------------------------------------------------------------------- */

static void fill_ud(struct soft_cm_event *event, const struct rdma_ud_param *source)
{
	struct rdma_ud_param *ud = &event->event.param.ud;

	*ud = *source;
	if (ud->private_data_len)
		ud->private_data =
			memcpy(event->private_data, ud->private_data, ud->private_data_len);
}

static void fill_parameters(struct soft_cm_event *event, const struct soft_cm_message *message)
{
	const struct soft_cm_id *id = soft_cm_id_of(event->event.id);
	struct rdma_conn_param *conn = &event->event.param.conn;
	struct rdma_ud_param ud = {.qp_num = message->qpn,
				   .qkey = message->qkey,
				   .private_data = message->private_data,
				   .private_data_len = message->private_data_len};

	if (soft_cm_is_datagram_id(id)) {
		soft_cm_fill_address_vector(id, &ud.ah_attr);
		fill_ud(event, &ud);
		return;
	}
	/* The peer's initiator depth applies to our responder, and vice versa
	 * (rdma_get_cm_event(3)). */
	conn->responder_resources = message->initiator_depth;
	conn->initiator_depth = message->responder_resources;
	conn->flow_control = message->flow_control;
	conn->retry_count = message->retry_count;
	conn->rnr_retry_count = message->rnr_retry_count;
	conn->srq = message->srq;
	conn->qp_num = message->qpn;
	conn->private_data_len = message->private_data_len;
	if (message->private_data_len)
		conn->private_data = memcpy(event->private_data, message->private_data,
					    message->private_data_len);
}

/* Queue an event for the application. `event_id` is the id that the event concerns. `owner` is the
 * same id, except for a request, whose event belongs to the listener. Returns 0 or ENOMEM. */
static int report(struct soft_cm_id *owner, struct soft_cm_id *event_id,
		  enum rdma_cm_event_type type, int status, const struct soft_cm_message *message,
		  const struct rdma_ud_param *ud)
{
	struct soft_cm_channel *channel;
	struct soft_cm_event *event;

	soft_assert_locked();
	/* Report nothing after the channel has been destroyed. For unaccepted requests, see
	 * soft_cm_report. */
	if (!owner->id.channel || (owner == event_id && event_id->unaccepted))
		return 0;
	event = calloc(1, sizeof(*event));
	if (!event)
		return ENOMEM;
	event->owner = owner;
	event->event.id = &event_id->id;
	event->event.listen_id = owner == event_id ? NULL : &owner->id;
	event->event.event = type;
	event->event.status = status;
	if (message)
		fill_parameters(event, message);
	if (ud)
		fill_ud(event, ud);
	channel = soft_cm_channel_of(owner->id.channel);
	soft_list_append(&channel->events, &event->node);
	soft_channel_signal(&channel->wake);
	return 0;
}

int soft_cm_report(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		   const struct soft_cm_message *message)
{
	return report(id, id, type, status, message, NULL);
}

int soft_cm_report_ud(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		      const struct rdma_ud_param *ud)
{
	return report(id, id, type, status, NULL, ud);
}

int soft_cm_report_request(struct soft_cm_id *listener, struct soft_cm_id *request,
			   const struct soft_cm_message *message)
{
	return report(listener, request, RDMA_CM_EVENT_CONNECT_REQUEST, 0, message, NULL);
}

static bool is_join(const struct soft_cm_event *event, const union ibv_gid *group)
{
	return event->event.event == RDMA_CM_EVENT_MULTICAST_JOIN &&
	       !memcmp(&event->event.param.ud.ah_attr.grh.dgid, group, sizeof(*group));
}

bool soft_cm_has_event(const struct soft_cm_id *id)
{
	const struct soft_cm_channel *channel = soft_cm_channel_of(id->id.channel);

	soft_list_each (const struct soft_cm_event, event, &channel->events, node)
		if (event->owner == id)
			return true;
	return false;
}

void soft_cm_drop_events(struct soft_cm_id *id, const union ibv_gid *group,
			 struct soft_node *dropped_requests)
{
	struct soft_cm_channel *channel;

	if (!id->id.channel)
		return;
	channel = soft_cm_channel_of(id->id.channel);
	soft_list_each_safe (struct soft_cm_event, event, &channel->events, node) {
		if (event->owner != id || (group && !is_join(event, group)))
			continue;
		soft_list_remove(&event->node);
		if (event->event.listen_id) {
			struct soft_cm_id *request = soft_cm_id_of(event->event.id);

			soft_list_remove(&request->in_channel);
			soft_list_append(dropped_requests, &request->in_channel);
		}
		free(event);
	}
	if (soft_list_empty(&channel->events))
		soft_channel_clear_signal(&channel->wake);
}

/* ---- taking and acknowledging -------------------------------------------------------------- */

static struct soft_cm_event *dequeue_event(struct soft_cm_channel *channel)
{
	struct soft_cm_event *event = NULL;

	soft_lock();
	if (!soft_list_empty(&channel->events)) {
		event = soft_list_first(&channel->events, struct soft_cm_event, node);
		soft_list_remove(&event->node);
		event->owner->delivered++;
		if (event->event.listen_id) { /* a request */
			soft_cm_id_of(event->event.id)->request_listener = NULL;
			soft_cm_request_delivered(event->owner);
		}
	}
	if (soft_list_empty(&channel->events))
		soft_channel_clear_signal(&channel->wake);
	soft_unlock();
	return event;
}

/* Wait for the next event. Returns NULL and sets `*error` on failure, or if the channel is
 * non-blocking and has no event (EAGAIN). */
static struct soft_cm_event *wait_for_event(struct soft_cm_channel *channel, int *error)
{
	struct soft_cm_event *taken = dequeue_event(channel);

	for (*error = 0; !taken && !*error;) {
		soft_progress();
		taken = dequeue_event(channel);
		if (!taken)
			*error = soft_channel_nonblocking(&channel->wake)
					 ? EAGAIN
					 : soft_channel_wait(&channel->wake);
	}
	return taken;
}

/* Count this thread as a reader of the channel. If another thread has already destroyed the
 * channel, block forever instead. The kernel does the same, and some programs (rping) destroy a
 * channel while a thread waits for its events. Returns 0, or an errno value if a signal interrupts
 * the wait. */
static int begin_reading(struct soft_cm_channel *channel)
{
	soft_lock();
	bool destroyed = channel->destroyed;

	channel->active_readers += !destroyed;
	soft_unlock();
	return destroyed && poll(NULL, 0, -1) < 0 ? errno : 0;
}

static void end_reading(struct soft_cm_channel *channel)
{
	soft_lock();
	bool last = --channel->active_readers == 0 && channel->destroyed;

	soft_unlock();
	if (last)
		free_channel(channel);
}

int soft_rdma_get_cm_event(struct rdma_event_channel *application, struct rdma_cm_event **event)
{
	struct soft_cm_channel *channel;
	struct soft_cm_event *taken;
	int error;

	if (!application || !event)
		return soft_cm_fail(EINVAL);
	channel = soft_cm_channel_of(application);
	error = begin_reading(channel);
	if (error)
		return soft_cm_fail(error);
	taken = wait_for_event(channel, &error);
	end_reading(channel);
	if (!taken)
		return soft_cm_fail(error);
	if (taken->event.event == RDMA_CM_EVENT_MULTICAST_JOIN) {
		error = soft_cm_multicast_joined(taken->owner,
						 &taken->event.param.ud.ah_attr.grh.dgid);
		if (error) {
			taken->event.event = RDMA_CM_EVENT_MULTICAST_ERROR;
			taken->event.status = -error;
		}
	}
	/* Requests of a synchronous listener have synchronous ids (rdma_get_request(3)). */
	if (taken->event.listen_id && taken->owner->synchronous &&
	    soft_rdma_migrate_id(taken->event.id, NULL)) {
		error = errno;
		soft_rdma_destroy_id(taken->event.id);
		soft_rdma_ack_cm_event(&taken->event);
		return soft_cm_fail(error);
	}
	*event = &taken->event;
	return 0;
}

int soft_rdma_ack_cm_event(struct rdma_cm_event *application)
{
	struct soft_cm_event *event;

	if (!application)
		return soft_cm_fail(EINVAL);
	event = soft_container(application, struct soft_cm_event, event);
	pthread_mutex_lock(&soft_device.cm->ack_mutex);
	event->owner->acked++;
	pthread_cond_broadcast(&soft_device.cm->ack_cond);
	pthread_mutex_unlock(&soft_device.cm->ack_mutex);
	free(event);
	return 0;
}

void soft_cm_ack_event(struct soft_cm_id *id)
{
	if (id->id.event)
		soft_rdma_ack_cm_event(id->id.event);
	id->id.event = NULL;
}

void soft_cm_wait_acknowledged(struct soft_cm_id *id)
{
	unsigned delivered;

	soft_lock();
	delivered = id->delivered;
	soft_unlock();
	pthread_mutex_lock(&soft_device.cm->ack_mutex);
	while (id->acked != delivered)
		pthread_cond_wait(&soft_device.cm->ack_cond, &soft_device.cm->ack_mutex);
	pthread_mutex_unlock(&soft_device.cm->ack_mutex);
}

/* ---- migrating to another channel: rdma_migrate_id(3) ------------------------------------- */

/* Move the id's queued events to another channel, together with the ids of queued requests. */
static void move_events(struct soft_cm_id *id, struct soft_cm_channel *from,
			struct soft_cm_channel *to)
{
	soft_list_each_safe (struct soft_cm_event, event, &from->events, node) {
		struct soft_cm_id *event_id = soft_cm_id_of(event->event.id);

		if (event->owner != id)
			continue;
		soft_list_remove(&event->node);
		soft_list_append(&to->events, &event->node);
		soft_channel_signal(&to->wake);
		if (event_id != id) { /* a request for this listener */
			soft_cm_id_leave(event_id);
			soft_cm_id_join(event_id, to);
		}
	}
	if (soft_list_empty(&from->events))
		soft_channel_clear_signal(&from->wake);
}

int soft_rdma_migrate_id(struct rdma_cm_id *application, struct rdma_event_channel *channel)
{
	struct soft_cm_id *id;
	struct rdma_event_channel *old;
	bool synchronous = !channel;
	bool was_synchronous;

	if (synchronous && application) {
		channel = soft_rdma_create_event_channel();
		if (!channel)
			return -1;
	}
	id = soft_cm_enter(application);
	if (!id)
		return -1;
	old = id->id.channel; /* NULL if the application has destroyed the channel */
	if (!old || old == channel) {
		soft_unlock();
		if (synchronous)
			soft_rdma_destroy_event_channel(channel);
		return old ? 0 : soft_cm_fail(EINVAL);
	}
	move_events(id, soft_cm_channel_of(old), soft_cm_channel_of(channel));
	soft_cm_id_leave(id);
	soft_cm_id_join(id, soft_cm_channel_of(channel));
	was_synchronous = id->synchronous;
	id->synchronous = synchronous;
	soft_unlock();
	if (was_synchronous) { /* the id owned its old channel */
		soft_cm_ack_event(id);
		soft_rdma_destroy_event_channel(old);
	}
	soft_cm_wait_acknowledged(id);
	return 0;
}
