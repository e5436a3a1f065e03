/* The data listener, where peers without a connection manager reach this process's queue pairs.
 *
 * The GID identifies the host, and the upper bits of a queue pair number select one of 1,000 ports
 * on that host (objects/qp_numbers.c). Each process reserves one of these ports that is free at
 * every address. The reservation is a socket that is bound to the unspecified address but does not
 * listen. The process listens only at addresses of its queue pairs: at loopback from the start, and
 * at other addresses when a queue pair selects another GID. It also reserves the UDP port of the
 * same number for datagrams (datagram.c), and the name at which local peers attach (attach.c).
 */
#define _GNU_SOURCE /* accept4 */
#include <stdio.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "link_internal.h"
#include "ud/ud.h"

enum { BACKLOG = 1024 };

static void accepted(struct soft_acceptor *acceptor, int fd, const struct sockaddr_storage *peer)
{
	(void)acceptor;
	soft_tcp_path_accepted(fd, peer);
}

/* Bind a TCP socket. If `reuse` is set, `address` is one address with a port that this process has
 * reserved. Otherwise, `address` is a wildcard address, which reserves the port. An IPv6 wildcard
 * reserves it at all IPv4 addresses too. Returns the fd, or -1 and sets errno. */
static int bind_socket(const struct sockaddr *address, socklen_t length, bool reuse)
{
	int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	if (address->sa_family == AF_INET6)
		soft_set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, reuse);
	/* This does not let another process steal the port: only one socket can listen at an
	 * address, even with SO_REUSEADDR. */
	if (reuse)
		soft_set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
	if (bind(fd, address, length)) {
		close(fd);
		return -1;
	}
	/* The reserving socket allows reuse only after bind(), which therefore fails if another
	 * process has reserved the port. */
	soft_set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
	return fd;
}

/* Reserve the port for this process by binding a socket at the wildcard address. IPv4 is the
 * fallback where IPv6 is not available. Returns false and sets errno on failure. */
static bool reserve(void)
{
	const uint16_t port = htons(soft_device.links->port);
	struct sockaddr_in6 any6 = {.sin6_family = AF_INET6, .sin6_port = port};
	struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = port};
	int fd = bind_socket((struct sockaddr *)&any6, sizeof(any6), false);

	if (fd < 0 && errno != EADDRINUSE)
		fd = bind_socket((struct sockaddr *)&any4, sizeof(any4), false);
	soft_device.links->reserved = fd;
	return fd >= 0;
}

/* Listen at this address. Returns false on failure, and sets errno unless SOFT_MAX_LISTENING
 * addresses are in use. */
static bool listen_at(const union ibv_gid *gid)
{
	struct soft_listening *slot =
		&soft_device.links->listening[soft_device.links->listening_count];
	struct sockaddr_storage address;
	socklen_t length = soft_gid_to_sockaddr(gid, gid, soft_device.links->port, &address);
	int fd;

	if (soft_device.links->listening_count == SOFT_MAX_LISTENING)
		return false;
	fd = bind_socket((struct sockaddr *)&address, length, true);
	if (fd < 0)
		return false;
	slot->gid = *gid;
	if (listen(fd, BACKLOG)) {
		close(fd);
		return false;
	}
	if (soft_accept_start(&slot->acceptor, fd, soft_gid_port_bit(gid), accepted)) {
		soft_accept_stop(&slot->acceptor);
		return false;
	}
	soft_device.links->listening_count++;
	return true;
}

void soft_listener_stop(void)
{
	soft_assert_locked();
	while (soft_device.links->listening_count)
		soft_accept_stop(&soft_device.links->listening[--soft_device.links->listening_count]
					  .acceptor);
	soft_attach_unlisten();
	soft_datagram_shutdown();
	soft_close_fd(&soft_device.links->reserved);
	soft_device.links->port = 0;
}

/* Reserve a port and start listening. Returns 0, or an errno value such as EADDRINUSE. */
static int reserve_and_listen(uint16_t number)
{
	soft_device.links->port = number;
	if (soft_device.platform->network)
		return 0; /* a simulated host has no other process */
	errno = 0;
	/* Tolerate a missing loopback address, as in a new network namespace. Until the address is
	 * added, peers cannot connect to it anyway. */
	if (reserve() && soft_datagram_reserve(number) &&
	    (listen_at(&soft_gid_loopback) || errno == EADDRNOTAVAIL) &&
	    (!soft_links_may_use_shm() || soft_attach_listen(number)))
		return 0;
	int error = errno ? errno : ENOMEM;

	soft_listener_stop();
	return error;
}

uint16_t soft_listener_port(void)
{
	soft_assert_locked();
	uint32_t first;
	int error = EADDRINUSE;

	if (soft_device.links->port)
		return soft_device.links->port;
	if (soft_device.platform->random(&first, sizeof(first), 0) != sizeof(first))
		return 0;
	/* Start at a random port, so that processes rarely try the same ones. */
	for (uint32_t i = 0; i < SOFT_IP_PORTS && error == EADDRINUSE; i++)
		error = reserve_and_listen(
			(uint16_t)(SOFT_IP_PORT_FIRST + (first + i) % SOFT_IP_PORTS));
	if (error == EADDRINUSE)
		fprintf(stderr,
			"aiordma: all ports from %d to %d are in use (TCP or UDP), but each "
			"process "
			"needs one for its queue pairs\n",
			SOFT_IP_PORT_FIRST, SOFT_IP_PORT_FIRST + SOFT_IP_PORTS - 1);
	errno = error;
	return soft_device.links->port;
}

void soft_listener_open(const union ibv_gid *gid)
{
	soft_assert_locked();
	if (!soft_listener_port() || soft_device.platform->network)
		return;
	for (int i = 0; i < soft_device.links->listening_count; i++)
		if (!memcmp(&soft_device.links->listening[i].gid, gid, sizeof(*gid)))
			return;
	(void)listen_at(gid); /* after a failure, only this side can connect */
}
