/* Devices and ports, and the events that report changes to them (ibv_get_async_event(3)).
 *
 * The host causes two kinds of changes: its addresses may change, and a port goes down or up with
 * its network interface. Tests cause all other events with aiordma_embedded_raise(), which also
 * changes the state of the device or port accordingly.
 */
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include "objects.h"

#define DEVICES_VARIABLE "AIORDMA_EMBEDDED_DEVICES"

/* ---- devices ------------------------------------------------------------------------------- */

/* Store the name of the device's network interface. Returns false if the interface does not exist
 * or belongs to an earlier device. */
static bool parse_interface(struct soft_hca *hca, const char *name, size_t length)
{
	if (length >= sizeof(hca->interface))
		return false;
	memcpy(hca->interface, name, length);
	hca->interface[length] = '\0';
	/* Each device needs its own interface. */
	for (const struct soft_hca *it = soft_device.objects->hcas; it < hca; it++)
		if (!strcmp(it->interface, hca->interface))
			return false;
	return if_nametoindex(hca->interface) != 0;
}

/* Parse AIORDMA_EMBEDDED_DEVICES, and store the interfaces that it names. Returns the number of
 * devices, or 0 if the value is invalid. */
static int parse_devices(const char *text)
{
	struct soft_hca *hcas = soft_device.objects->hcas;
	char *end = NULL;
	long count = text && *text >= '0' && *text <= '9' ? strtol(text, &end, 10) : 1;

	for (int i = 0; i < SOFT_MAX_HCAS; i++)
		hcas[i].interface[0] = '\0';
	/* The value is a number, or unset or empty, which means one device. */
	if (!text || !*text || (end && !*end))
		return count <= SOFT_MAX_HCAS ? (int)count : 0;
	for (int i = 0; i < SOFT_MAX_HCAS; i++) {
		const size_t length = strcspn(text, ",");

		if (!parse_interface(&hcas[i], text, length))
			return 0;
		if (!text[length])
			return i + 1;
		text += length + 1;
	}
	return 0;
}

static void make_hca(int number)
{
	struct soft_hca *hca = &soft_device.objects->hcas[number];

	hca->device.node_type = IBV_NODE_CA;
	hca->device.transport_type = IBV_TRANSPORT_IB;
	/* The device has no device node or sysfs path (see preload/public.c). */
	snprintf(hca->device.name, sizeof(hca->device.name), "embedded%d", number);
	memcpy(hca->device.dev_name, hca->device.name, sizeof(hca->device.name));
	hca->port_bit = 1u << number;
	soft_list_init(&hca->contexts);
}

int soft_hca_count(void)
{
	soft_assert_locked();
	struct soft_objects *objects = soft_device.objects;

	if (objects->hca_count)
		return objects->hca_count;
	int count = parse_devices(getenv(DEVICES_VARIABLE));

	/* After an invalid value, start() reports the error. Until then, there is one device. */
	objects->hcas_invalid = !count;
	objects->hca_count = count ? count : 1;
	for (int i = 0; i < objects->hca_count; i++)
		make_hca(i);
	return objects->hca_count;
}

int soft_hca_number(const struct soft_hca *hca)
{
	return (int)(hca - soft_device.objects->hcas);
}

struct soft_hca *soft_hca_at(int number)
{
	return &soft_device.objects->hcas[number < soft_hca_count() ? number : 0];
}

/* Iterate over all devices. */
#define EACH_HCA(it)                                                                               \
	for (struct soft_hca *it = soft_hca_at(0);                                                 \
	     it < soft_device.objects->hcas + soft_hca_count(); it++)

static int start(void)
{
	/* The program may have corrected the variable since the last attempt. */
	if (soft_device.objects->hcas_invalid)
		soft_device.objects->hca_count = 0;
	(void)soft_hca_count(); /* reads the variable if the count is 0 */
	if (!soft_device.objects->hcas_invalid)
		return 0;
	return soft_misconfigured(EINVAL, DEVICES_VARIABLE, getenv(DEVICES_VARIABLE),
				  "expected a number of devices from 1 to %d, or the names of as "
				  "many network interfaces of this host, such as eth0,eth1",
				  SOFT_MAX_HCAS);
}

static void dispatch_event(struct soft_hca *hca, enum ibv_event_type type)
{
	const struct ibv_async_event event = {.element.port_num = 1, .event_type = type};

	soft_list_each (struct soft_context, context, &hca->contexts, hca_node)
		soft_async_queue_event(context, &event);
}

static void for_queue_pairs(struct soft_hca *hca, void (*action)(struct soft_qp *qp))
{
	soft_list_each (struct soft_context, context, &hca->contexts, hca_node)
		soft_list_each (struct soft_qp, qp, &context->qps, context_node)
			action(qp);
}

/* ---- a port that is down ---------------------------------------------------------------------- */

bool soft_qp_has_port_down(const struct soft_qp *qp)
{
	const union ibv_gid peer = soft_qp_peer_gid(qp);
	uint32_t ports = soft_qp_hca(qp)->port_bit;

	if (soft_qpn_ip_port(qp->attr.dest_qp_num) == soft_ip_port() &&
	    soft_gid_is_on_this_host(&peer))
		ports |= soft_gid_port_bit(&peer);
	return soft_ports_down & ports;
}

static void stall_if_port_down(struct soft_qp *qp)
{
	if (soft_qp_has_port_down(qp))
		soft_qp_stall(qp);
}

/* Record which ports are down, and stop their traffic. Traffic that is not bound to a port stops
 * only when all ports are down. */
static void set_down_ports(uint32_t ports)
{
	const uint32_t all = (1u << soft_hca_count()) - 1;

	soft_ports_down = ports;
	soft_watches_set_down_ports(ports == all ? SOFT_ANY_PORT : ports);
}

/* Take a port down, which stops sending and receiving. Reliable queue pairs and their peers fail
 * when their retries are exhausted. */
static void set_port_down(struct soft_hca *hca)
{
	if (soft_ports_down & hca->port_bit)
		return;
	set_down_ports(soft_ports_down | hca->port_bit);
	/* Queue pairs of other devices stop as well if their peer uses this port. */
	EACH_HCA (each)
		for_queue_pairs(each, stall_if_port_down);
	dispatch_event(hca, IBV_EVENT_PORT_ERR);
}

static void set_port_up(struct soft_hca *hca)
{
	if (!(soft_ports_down & hca->port_bit))
		return;
	set_down_ports(soft_ports_down & ~hca->port_bit);
	soft_engine_port_changed(SOFT_PORT_UP, hca->port_bit);
	dispatch_event(hca, IBV_EVENT_PORT_ACTIVE);
}

/* ---- the host's addresses, which are the ports' GIDs ----------------------------------------- */

/* Returns whether the interface does not exist or has no carrier. Returns the previous state if the
 * query socket cannot be created. */
static bool is_link_down(const struct soft_hca *hca)
{
	struct ifreq request = {0};
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool down = hca->link_down;

	memcpy(request.ifr_name, hca->interface, sizeof(hca->interface));
	if (fd >= 0)
		down = ioctl(fd, SIOCGIFFLAGS, &request) || !(request.ifr_flags & IFF_RUNNING);
	soft_close_fd(&fd);
	return down;
}

/* Bring the port up or down if the link state of its interface has changed. Otherwise, leave the
 * port unchanged, because a test may have set its state. */
static void follow_interface(struct soft_hca *hca)
{
	const bool down = hca->interface[0] && is_link_down(hca);

	if (down == hca->link_down)
		return;
	hca->link_down = down;
	if (down)
		set_port_down(hca);
	else
		set_port_up(hca);
}

/* Update GID tables and port states from the host's addresses and interfaces, and report the
 * changes. */
static void refresh_gids_and_ports(void)
{
	EACH_HCA (hca) {
		if (soft_gid_refresh(hca)) {
			soft_engine_port_changed(SOFT_PORT_ADDRESSES, hca->port_bit);
			dispatch_event(hca, IBV_EVENT_GID_CHANGE);
		}
		follow_interface(hca);
	}
}

static void addresses_changed(struct soft_fd_watch *watch)
{
	/* Discard the messages, because all addresses are read again anyway. This also handles lost
	 * messages, which recv() reports with ENOBUFS. */
	while (recv(watch->fd, soft_scratch()->input, SOFT_STAGING_SIZE, MSG_DONTWAIT) > 0)
		;
	refresh_gids_and_ports();
}

/* Watch for changes of addresses and interfaces with rtnetlink(7). */
static void watch_addresses(void)
{
	struct sockaddr_nl address = {
		.nl_family = AF_NETLINK,
		.nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR,
	};
	struct soft_fd_watch *watch = &soft_device.objects->address_watch;

	if (watch->watched || soft_device.platform->network) /* simulated: no rtnetlink */
		return;
	/* If rtnetlink is not available, the GID tables are updated whenever a device is opened. */
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
	refresh_gids_and_ports();
	soft_list_append(&soft_hca_of(&context->extended.context)->contexts, &context->hca_node);
	soft_unlock();
}

static bool is_any_context_open(void)
{
	bool any = false;

	EACH_HCA (hca)
		any |= !soft_list_empty(&hca->contexts);
	return any;
}

void soft_port_detach(struct soft_context *context)
{
	soft_lock();
	soft_list_remove(&context->hca_node);
	if (!is_any_context_open())
		soft_watch_close(&soft_device.objects->address_watch);
	soft_unlock();
}

/* Forget all contexts, addresses and port states when the device stops or in a forked child. */
static void reset(void)
{
	EACH_HCA (hca) {
		soft_list_clear(&hca->contexts);
		soft_gid_clear(hca);
		hca->link_down = false;
	}
	soft_ports_down = 0;
}

static void create(void)
{
	struct soft_objects *objects = soft_device.objects = soft_alloc_part(sizeof(*objects));

	soft_list_init(&objects->pds);
	soft_list_init(&objects->dms);
	soft_list_init(&objects->xrc_domains);
	objects->address_watch.fd = -1;
}

const struct soft_subsystem soft_port_subsystem = {
	.create = create,
	.start = start,
	.stop = reset,
	.forked = reset,
};

/* ---- raising events ------------------------------------------------------------------------ */

static void fail_device(struct soft_hca *hca)
{
	/* Notify connection manager ids before their queue pairs fail (rdma_get_cm_event(3)). */
	soft_engine_port_changed(SOFT_PORT_FATAL, hca->port_bit);
	for_queue_pairs(hca, soft_qp_error);
	soft_list_each (struct soft_context, context, &hca->contexts, hca_node)
		context->fatal = true;
	dispatch_event(hca, IBV_EVENT_DEVICE_FATAL);
}

/* Raise an event for a test, and change the state of the port or device accordingly. Returns 0, or
 * EINVAL if the event does not concern a port or device. */
static int raise_event(struct soft_hca *hca, enum ibv_event_type event)
{
	switch (event) {
	case IBV_EVENT_PORT_ERR:
		set_port_down(hca);
		return 0;
	case IBV_EVENT_PORT_ACTIVE:
		set_port_up(hca);
		return 0;
	case IBV_EVENT_LID_CHANGE:
		dispatch_event(hca, event);
		soft_engine_port_changed(SOFT_PORT_LID, hca->port_bit);
		return 0;
	case IBV_EVENT_DEVICE_FATAL:
		fail_device(hca);
		return 0;
	case IBV_EVENT_GID_CHANGE:
		soft_gid_refresh(hca);
		dispatch_event(hca, event);
		return 0;
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
		dispatch_event(hca, event);
		return 0;
	default:
		return EINVAL;
	}
}

int aiordma_embedded_raise_on(const char *device, enum ibv_event_type event)
{
	int rc = ENODEV;

	soft_lock();
	EACH_HCA (hca)
		if (!device || !strcmp(device, hca->device.name))
			rc = raise_event(hca, event);
	soft_unlock();
	return rc;
}

int aiordma_embedded_raise(enum ibv_event_type event)
{
	return aiordma_embedded_raise_on(NULL, event);
}
