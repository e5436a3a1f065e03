/* rdma_migrate_id(3): an id's events come on another channel from now on. */
#include "cm_internal.h"

#include <errno.h>

/* The id's queued events, and the requests that they bring, to another channel. */
static void move_events(struct soft_cm_id *id, struct soft_cm_channel *from,
			struct soft_cm_channel *to)
{
	struct soft_node *node = from->events.next;

	while (node != &from->events) {
		struct soft_cm_event *event = soft_list_entry(node, struct soft_cm_event, node);
		struct soft_cm_id *about = soft_cm_id_of(event->event.id);

		node = node->next;
		if (event->owner != id && about->request_of != id)
			continue;
		soft_list_remove(&event->node);
		soft_list_append(&to->events, &event->node);
		soft_channel_signal(&to->wake);
		if (about != id) {
			soft_cm_id_leave(about);
			soft_cm_id_join(about, to);
		}
	}
	if (soft_list_empty(&from->events))
		soft_channel_consume(&from->wake);
}

int soft_rdma_migrate_id(struct rdma_cm_id *application, struct rdma_event_channel *channel)
{
	struct soft_cm_id *id;
	struct rdma_event_channel *old;
	bool synchronous = !channel;
	bool was_synchronous;

	if (!application)
		return soft_cm_fail(EINVAL);
	id = soft_cm_id_of(application);
	if (synchronous) {
		channel = soft_rdma_create_event_channel();
		if (!channel)
			return -1;
	}
	soft_lock();
	old = id->id.channel;
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
	if (was_synchronous) {
		if (id->id.event)
			soft_rdma_ack_cm_event(id->id.event);
		id->id.event = NULL;
		soft_rdma_destroy_event_channel(old);
	}
	soft_cm_wait_acknowledged(id);
	return 0;
}
