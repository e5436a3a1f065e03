/* Watching the host's addresses, which are the port's GIDs: rtnetlink(7) says when they change. */
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "objects.h"

static void ready(struct soft_fd_watch *watch, uint32_t events)
{
	/* What exactly has changed is read from the source itself; that messages have been lost
	 * (ENOBUFS) is news of the same kind. */
	(void)events;
	while (recv(watch->fd, soft_scratch()->input, SOFT_STAGING_SIZE, MSG_DONTWAIT) > 0)
		;
	soft_port_addresses();
}

static struct soft_fd_watch watch = {.fd = -1, .ready = ready};

void soft_addresses_watch(void)
{
	struct sockaddr_nl address = {
		.nl_family = AF_NETLINK,
		.nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR,
	};

	if (watch.watched)
		return;
	/* Where that is not allowed, the table is read again with every device that is opened. */
	watch.fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	if (watch.fd >= 0 && (bind(watch.fd, (struct sockaddr *)&address, sizeof(address)) ||
			      soft_watch(&watch, EPOLLIN)))
		soft_addresses_unwatch();
}

void soft_addresses_unwatch(void)
{
	soft_watch_close(&watch);
}
