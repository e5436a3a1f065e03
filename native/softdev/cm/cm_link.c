/* One handshake's socket: reads messages, writes messages, has a deadline.
 *
 * What comes from the socket is not trusted: at most SOFT_CM_INPUT bytes of it are kept, a byte
 * that does not belong to a message ends it, and reading stops with the handshake, since what
 * follows is the queue pair's.
 */
#include "cm_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "inject/inject.h"

static const uint32_t reading = EPOLLIN | EPOLLRDHUP;

/* Messages at the front of the input.  False: read no more, the link may be gone. */
static bool take_messages(struct soft_cm_link *link)
{
	while (link->have) {
		struct soft_cm_message message;
		size_t used;
		int error = soft_cm_decode(link->input, link->have, &message, &used);

		if (error == EAGAIN)
			return true;
		if (error) {
			link->calls->failed(link, error);
			return false;
		}
		link->have -= used;
		memmove(link->input, link->input + used, link->have);
		if (soft_fault_handshake())
			continue;
		if (!link->calls->message(link, &message))
			return false;
	}
	return true;
}

static void read_messages(struct soft_cm_link *link)
{
	for (;;) {
		ssize_t got = recv(link->watch.fd, link->input + link->have,
				   sizeof(link->input) - link->have, 0);

		if (got > 0) {
			link->have += (size_t)got;
			if (!take_messages(link))
				return;
			continue;
		}
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EAGAIN)
			return;
		link->calls->failed(link, got ? errno : ECONNRESET);
		return;
	}
}

static void connect_again(struct soft_timer *timer)
{
	struct soft_cm_link *link = soft_container(timer, struct soft_cm_link, again);
	const struct sockaddr *to = (const struct sockaddr *)&link->to;
	int error;

	do /* Linux: after a connection that failed, the first call only reports that */
		error = connect(link->watch.fd, to, soft_cm_address_length(to)) ? errno : 0;
	while (error == ECONNABORTED);
	if (error == EINPROGRESS || error == ECONNREFUSED)
		error = 0;
	if (!error) /* the outcome makes the socket ready, if it is not already */
		error = soft_watch(&link->watch, EPOLLOUT);
	if (error)
		link->calls->failed(link, error);
}

/* A server may be between two listeners, as perftest's is between its two connections: on a network
 * the request would still be on its way.  True: there will be another try. */
static bool insist(struct soft_cm_link *link, int error)
{
	if ((error != ECONNREFUSED && error != ECONNRESET) || soft_now() >= link->insists_until)
		return false;
	soft_unwatch(&link->watch);
	soft_timer_start(&link->again, soft_now() + SOFT_CM_AGAIN_NS);
	return true;
}

/* False when the link is gone, or not there yet. */
static bool finish_connecting(struct soft_cm_link *link)
{
	struct sockaddr_storage local = {0}, peer = {0};
	socklen_t local_length = sizeof(local), peer_length = sizeof(peer);
	int error = 0;
	socklen_t length = sizeof(error);

	if (getsockopt(link->watch.fd, SOL_SOCKET, SO_ERROR, &error, &length))
		error = errno;
	if (!error && (getpeername(link->watch.fd, (struct sockaddr *)&peer, &peer_length) ||
		       getsockname(link->watch.fd, (struct sockaddr *)&local, &local_length)))
		error = errno == ENOTCONN ? ECONNRESET : errno; /* it ended after the check above */
	if (insist(link, error))
		return false;
	/* TCP connects a socket to itself where its own port is the one asked for (RFC 9293,
	 * simultaneous open); there is no listener. */
	if (!error && local_length == peer_length && !memcmp(&local, &peer, local_length))
		error = ECONNREFUSED;
	if (!error)
		error = soft_watch(&link->watch, reading);
	if (error) {
		link->calls->failed(link, error);
		return false;
	}
	link->connecting = false;
	return true;
}

static void ready(struct soft_fd_watch *watch, uint32_t events)
{
	struct soft_cm_link *link = soft_container(watch, struct soft_cm_link, watch);

	if (link->connecting) {
		if (finish_connecting(link))
			link->calls->connected(link);
		return;
	}
	if (link->held) {
		/* Messages before the end are not read: it counts as orderly. */
		if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
			link->calls->failed(link, events & EPOLLERR ? ECONNRESET : 0);
		return;
	}
	read_messages(link);
}

static void deadline_over(struct soft_timer *timer)
{
	struct soft_cm_link *link = soft_container(timer, struct soft_cm_link, deadline);

	link->calls->failed(link, ETIMEDOUT);
}

struct soft_cm_link *soft_cm_link_new(int fd, bool connecting,
				      const struct soft_cm_link_calls *calls, void *owner,
				      int *error)
{
	soft_assert_locked();
	struct soft_cm_link *link = calloc(1, sizeof(*link));
	const int on = 1;

	if (!link) {
		close(fd);
		*error = ENOMEM;
		return NULL;
	}
	/* The stream's frames are whole requests and answers: none may wait for the next. */
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	link->watch.fd = fd;
	link->watch.ready = ready;
	link->deadline.expired = deadline_over;
	link->again.expired = connect_again;
	link->calls = calls;
	link->owner = owner;
	link->connecting = connecting;
	*error = soft_watch(&link->watch, connecting ? EPOLLOUT : reading);
	if (*error) {
		soft_cm_link_free(link);
		return NULL;
	}
	return link;
}

void soft_cm_link_insist(struct soft_cm_link *link, const struct sockaddr *to,
			 uint32_t milliseconds)
{
	memcpy(&link->to, to, soft_cm_address_length(to));
	link->insists_until = soft_cm_in(milliseconds);
}

void soft_cm_link_free(struct soft_cm_link *link)
{
	soft_assert_locked();
	int fd = soft_cm_link_take(link);

	if (fd >= 0)
		close(fd);
}

int soft_cm_link_take(struct soft_cm_link *link)
{
	int fd = link->watch.fd;

	soft_timer_stop(&link->deadline);
	soft_timer_stop(&link->again);
	soft_unwatch(&link->watch);
	free(link);
	return fd;
}

void soft_cm_link_expect(struct soft_cm_link *link, uint32_t milliseconds)
{
	soft_timer_start(&link->deadline, soft_cm_in(milliseconds));
}

void soft_cm_link_expect_nothing(struct soft_cm_link *link)
{
	soft_timer_stop(&link->deadline);
}

int soft_cm_link_hold(struct soft_cm_link *link)
{
	soft_timer_stop(&link->deadline);
	link->held = true;
	return soft_watch(&link->watch, EPOLLRDHUP);
}

int soft_cm_link_send(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	uint8_t bytes[SOFT_CM_MESSAGE_MAX];
	size_t length = soft_cm_encode(message, bytes);
	ssize_t sent;

	do
		sent = send(link->watch.fd, bytes, length, MSG_NOSIGNAL | MSG_DONTWAIT);
	while (sent < 0 && errno == EINTR);
	if (sent < 0)
		return errno == EAGAIN ? ENOBUFS : errno;
	return (size_t)sent == length ? 0 : ENOBUFS;
}

void soft_cm_link_reject(struct soft_cm_link *link, uint16_t reason, const void *private_data,
			 uint8_t private_data_len)
{
	struct soft_cm_message message = {.type = SOFT_CM_REJ, .reason = reason};

	(void)soft_cm_put_private(&message, private_data, private_data_len);
	if (!link->connecting)
		(void)soft_cm_link_send(link, &message); /* gone or not, we leave */
	soft_cm_link_free(link);
}
