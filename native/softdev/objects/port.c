/* What can happen to the device and its port, and the events that tell contexts:
 * ibv_get_async_event(3).
 *
 * A change of the host's addresses happens by itself.  Everything else is brought about by tests
 * (aiordma_embedded_raise), and really happens: more than the event.
 */
#include <errno.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "objects.h"

bool soft_port_is_down(void)
{
	return soft_device.objects->down;
}

static void tell(enum ibv_event_type type)
{
	const struct ibv_async_event event = {.element.port_num = 1, .event_type = type};

	soft_list_each (struct soft_context, context, &soft_device.objects->contexts, of_device)
		soft_async_event(context, &event);
}

/* Every queue pair of every context. */
static void for_queue_pairs(void (*what)(struct soft_qp *qp))
{
	soft_list_each (struct soft_context, context, &soft_device.objects->contexts, of_device)
		soft_list_each (struct soft_qp, qp, &context->qps, of_context)
			what(qp);
}

/* ---- the host's addresses, which are the port's GIDs ----------------------------------------- */

/* The addresses of the host have changed, or may have. */
static void read_addresses(void)
{
	if (!soft_gid_refresh())
		return;
	soft_engine_port_changed(SOFT_PORT_ADDRESSES);
	tell(IBV_EVENT_GID_CHANGE);
}

static void addresses_changed(struct soft_fd_watch *watch, uint32_t events)
{
	/* What exactly has changed is read from the source itself; that messages have been lost
	 * (ENOBUFS) is news of the same kind. */
	(void)events;
	while (recv(watch->fd, soft_scratch()->input, SOFT_STAGING_SIZE, MSG_DONTWAIT) > 0)
		;
	read_addresses();
}

/* rtnetlink(7) says when they change. */
static void watch_addresses(void)
{
	struct sockaddr_nl address = {
		.nl_family = AF_NETLINK,
		.nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR,
	};
	struct soft_fd_watch *watch = &soft_device.objects->addresses;

	if (watch->watched)
		return;
	/* Where that is not allowed, the table is read again with every device that is opened. */
	watch->fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	watch->ready = addresses_changed;
	if (watch->fd >= 0 && (bind(watch->fd, (struct sockaddr *)&address, sizeof(address)) ||
			       soft_watch(watch, EPOLLIN)))
		soft_watch_close(watch);
}

/* ---- contexts ------------------------------------------------------------------------------ */

void soft_port_attach(struct soft_context *context)
{
	soft_lock();
	watch_addresses();
	read_addresses();
	soft_list_append(&soft_device.objects->contexts, &context->of_device);
	soft_unlock();
}

void soft_port_detach(struct soft_context *context)
{
	soft_lock();
	soft_list_remove(&context->of_device);
	if (soft_list_empty(&soft_device.objects->contexts))
		soft_watch_close(&soft_device.objects->addresses);
	soft_unlock();
}

struct soft_context *soft_port_next_context(struct soft_context *context)
{
	soft_assert_locked();
	struct soft_node *contexts = &soft_device.objects->contexts;
	struct soft_node *next = context ? context->of_device.next : contexts->next;

	return next == contexts ? NULL : soft_list_entry(next, struct soft_context, of_device);
}

static void reset(void)
{
	struct soft_objects *objects = soft_device.objects;

	while (!soft_list_empty(&objects->contexts))
		soft_list_remove(objects->contexts.next);
	soft_gid_forget();
	objects->down = false;
}

static void create(void)
{
	struct soft_objects *objects = soft_device.objects = soft_part(sizeof(*objects));

	objects->device = (struct ibv_device){
		.node_type = IBV_NODE_CA,
		.transport_type = IBV_TRANSPORT_IB,
		.name = "embedded0",
		.dev_name = "embedded0", /* no node and no sysfs path: see preload/public.c */
	};
	soft_list_init(&objects->pds);
	soft_list_init(&objects->dms);
	soft_list_init(&objects->contexts);
	soft_list_init(&objects->xrc_domains);
	objects->addresses.fd = -1;
}

const struct soft_subsystem soft_port_subsystem = {
	.create = create,
	.stop = reset,
	.forked = reset,
};

/* ---- what can happen ----------------------------------------------------------------------- */

/* Nothing is taken in, nothing goes out.  Reliable queue pairs try for as long as their attributes
 * say, and so do their peers. */
static void go_down(void)
{
	if (soft_device.objects->down)
		return;
	soft_device.objects->down = true;
	soft_watches_silence(true);
	for_queue_pairs(soft_qp_stall);
	tell(IBV_EVENT_PORT_ERR);
}

static void go_up(void)
{
	if (!soft_device.objects->down)
		return;
	soft_device.objects->down = false;
	soft_watches_silence(false);
	soft_engine_port_changed(SOFT_PORT_UP);
	tell(IBV_EVENT_PORT_ACTIVE);
}

static void fail(void)
{
	soft_engine_port_changed(
		SOFT_PORT_FATAL); /* rdma_get_cm_event(3), before their queue pairs fail */
	for_queue_pairs(soft_qp_error);
	soft_list_each (struct soft_context, context, &soft_device.objects->contexts, of_device)
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
