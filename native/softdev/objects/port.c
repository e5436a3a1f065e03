/* What can happen to the device and its port, and the events that tell contexts:
 * ibv_get_async_event(3).
 *
 * A change of the host's addresses happens by itself.  Everything else is brought about by tests
 * (aiordma_embedded_raise), and really happens: more than the event.
 */
#include <errno.h>

#include "objects.h"

static struct soft_node contexts = {&contexts, &contexts};
static bool down;
uint32_t soft_port_bad_qkeys;

bool soft_port_is_down(void)
{
	return down;
}

static void tell(enum ibv_event_type type)
{
	const struct ibv_async_event event = {.element.port_num = 1, .event_type = type};

	soft_list_each (struct soft_context, context, &contexts, of_device)
		soft_async_event(context, &event);
}

/* Every queue pair of every context. */
static void for_queue_pairs(void (*what)(struct soft_qp *qp))
{
	soft_list_each (struct soft_context, context, &contexts, of_device)
		soft_list_each (struct soft_qp, qp, &context->qps, of_context)
			what(qp);
}

/* ---- contexts ------------------------------------------------------------------------------ */

void soft_port_attach(struct soft_context *context)
{
	soft_lock();
	soft_addresses_watch();
	soft_port_addresses();
	soft_list_append(&contexts, &context->of_device);
	soft_unlock();
}

void soft_port_detach(struct soft_context *context)
{
	soft_lock();
	soft_list_remove(&context->of_device);
	if (soft_list_empty(&contexts))
		soft_addresses_unwatch();
	soft_unlock();
}

struct soft_context *soft_port_next_context(struct soft_context *context)
{
	soft_assert_locked();
	struct soft_node *next = context ? context->of_device.next : contexts.next;

	return next == &contexts ? NULL : soft_list_entry(next, struct soft_context, of_device);
}

static void reset(void)
{
	while (!soft_list_empty(&contexts))
		soft_list_remove(contexts.next);
	soft_gid_forget();
	down = false;
}

const struct soft_subsystem soft_port_subsystem = {.stop = reset, .forked = reset};

/* ---- what can happen ----------------------------------------------------------------------- */

void soft_port_addresses(void)
{
	if (!soft_gid_refresh())
		return;
	soft_engine_port_changed(SOFT_PORT_ADDRESSES);
	tell(IBV_EVENT_GID_CHANGE);
}

/* Nothing is taken in, nothing goes out.  Reliable queue pairs try for as long as their attributes
 * say, and so do their peers. */
static void go_down(void)
{
	if (down)
		return;
	down = true;
	soft_watches_silence(true);
	for_queue_pairs(soft_qp_stall);
	tell(IBV_EVENT_PORT_ERR);
}

static void go_up(void)
{
	if (!down)
		return;
	down = false;
	soft_watches_silence(false);
	soft_engine_port_changed(SOFT_PORT_UP);
	tell(IBV_EVENT_PORT_ACTIVE);
}

static void fail(void)
{
	soft_engine_port_changed(
		SOFT_PORT_FATAL); /* rdma_get_cm_event(3), before their queue pairs fail */
	for_queue_pairs(soft_qp_error);
	soft_list_each (struct soft_context, context, &contexts, of_device)
		context->fatal = true;
	tell(IBV_EVENT_DEVICE_FATAL);
}

int aiordma_embedded_raise(enum ibv_event_type event)
{
	int rc = 0;

	soft_lock();
	switch (event) {
	case IBV_EVENT_PORT_ERR:
		go_down();
		break;
	case IBV_EVENT_PORT_ACTIVE:
		go_up();
		break;
	case IBV_EVENT_LID_CHANGE:
		tell(event);
		soft_engine_port_changed(SOFT_PORT_LID);
		break;
	case IBV_EVENT_DEVICE_FATAL:
		fail();
		break;
	case IBV_EVENT_GID_CHANGE:
		soft_gid_refresh();
		tell(event);
		break;
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
		tell(event);
		break;
	default:
		rc = EINVAL;
	}
	soft_unlock();
	return rc;
}
