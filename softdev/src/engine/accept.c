/* Accepts connections on listening sockets, up to a limit per step.
 *
 * If accept4 fails because descriptors or memory have run out, the listening socket stays readable.
 * To avoid a busy loop, the acceptor then pauses for RETRY_PAUSE_NS, unless its owner can release a
 * descriptor.
 */
#define _GNU_SOURCE /* accept4 */
#include <errno.h>

#include "engine_internal.h"

enum { ACCEPTS_PER_STEP = 16 };

#define RETRY_PAUSE_NS 50000000u

static bool is_shortage(int error)
{
	return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

static void pause_expired(struct soft_timer *timer)
{
	if (soft_watch(&soft_container(timer, struct soft_acceptor, pause)->watch, EPOLLIN))
		soft_timer_start(timer, soft_now() + RETRY_PAUSE_NS);
}

/* Accept a limited number of connections. If descriptors or memory have run out, the owner may
 * release a descriptor. Otherwise, pause. */
static void accept_ready(struct soft_fd_watch *watch)
{
	struct soft_acceptor *acceptor = soft_container(watch, struct soft_acceptor, watch);

	for (int i = 0; i < ACCEPTS_PER_STEP; i++) {
		struct sockaddr_storage peer = {0};
		socklen_t length = sizeof(peer);
		int fd = accept4(watch->fd, (struct sockaddr *)&peer, &length,
				 SOCK_NONBLOCK | SOCK_CLOEXEC);

		if (fd >= 0) {
			acceptor->accepted(acceptor, fd, &peer);
		} else if (!is_shortage(errno)) {
			return;
		} else if (!acceptor->release_descriptor || !acceptor->release_descriptor()) {
			soft_unwatch(watch);
			soft_timer_start(&acceptor->pause, soft_now() + RETRY_PAUSE_NS);
			return;
		}
	}
}

int soft_accept_start(struct soft_acceptor *acceptor, int fd, uint32_t ports,
		      soft_accepted *accepted)
{
	acceptor->watch = (struct soft_fd_watch){.fd = fd, .ready = accept_ready, .ports = ports};
	acceptor->pause = (struct soft_timer){.expired = pause_expired};
	acceptor->accepted = accepted;
	return soft_watch(&acceptor->watch, EPOLLIN);
}

void soft_accept_stop(struct soft_acceptor *acceptor)
{
	soft_timer_stop(&acceptor->pause);
	soft_watch_close(&acceptor->watch);
}
