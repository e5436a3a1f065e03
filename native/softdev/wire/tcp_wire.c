/* The wire that is a socket: TCP, or a pair in tests.
 *
 * One recv reads many small frames into the engine's scratch memory, from where their payload is
 * copied.  A long payload is received straight into its target: one readv whose first parts are the
 * application's memory and whose last part is scratch for what follows.  While long payloads are
 * coming, only a header's worth is read beyond each, so that the next payload needs no copy either.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "link.h"

enum {
	DIRECT_MIN = 4096
}; /* less than this is copied: an iovec costs as much */

/* ---- taking in ----------------------------------------------------------------------------- */

/* What the next read may fill.  Returns the number of iovecs, and how many of their bytes are
 * payload on its way to its target. */
static int targets(struct soft_link *link, size_t budget, struct iovec *iov, size_t *direct,
		   size_t *room)
{
	int count = 0;
	size_t tail = SOFT_STAGING_SIZE;

	*direct = 0;
	/* What follows a frame with pieces would be their descriptor; begin() in link_input.c has
	 * refused it. */
	if (link->left >= DIRECT_MIN && !link->frame.pieces) {
		uint32_t want = link->left < budget ? link->left : (uint32_t)budget;

		count = soft_link_place(link, want, iov, SOFT_MAX_SGE);
		for (int i = 0; i < count; i++)
			*direct += iov[i].iov_len;
	}
	if (*direct && *direct < link->left)
		tail = 0; /* more payload of this frame follows */
	else if (link->bulk && !link->delay_queue && (link->left == 0 || *direct))
		tail = SOFT_FRAME_HEADER - link->header_have;
	if (tail)
		iov[count++] = (struct iovec){.iov_base = soft_scratch()->input, .iov_len = tail};
	*room = *direct + tail;
	return count;
}

static void take_in(struct soft_link *link)
{
	size_t budget = soft_step_share();

	link->busy = true;
	while (budget && link->base.state == SOFT_LINK_UP && link->watch.fd >= 0) {
		struct iovec iov[SOFT_MAX_SGE + 1];
		size_t direct, room;
		int count = targets(link, budget, iov, &direct, &room);

		if (link->base.state != SOFT_LINK_UP)
			break;
		ssize_t n = readv(link->watch.fd, iov, count);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n <= 0) {
			int error = n ? errno : ECONNRESET;

			/* An end without DISCONNECT is a process that died. */
			if (n == 0)
				soft_peer_exit_tcp(link);
			if (link->base.state == SOFT_LINK_UP)
				soft_link_lost(link, error);
			break;
		}
		budget -= (size_t)n < budget ? (size_t)n : budget;
		size_t placed = (size_t)n < direct ? (size_t)n : direct;

		if (placed)
			soft_link_placed(link, (uint32_t)placed);
		soft_link_parse(link, soft_scratch()->input, (size_t)n - placed);
		if ((size_t)n < room)
			break; /* that was all; if more comes, epoll reports it */
	}
	soft_link_release(link);
}

/* Closing: the other side's last frames mean nothing any more, only its end does. */
static void discard(struct soft_link *link)
{
	size_t budget = soft_step_share();

	while (budget) {
		ssize_t n = recv(link->watch.fd, soft_scratch()->input, SOFT_STAGING_SIZE, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return;
		if (n <= 0) {
			soft_link_finish(link, 0);
			return;
		}
		budget -= (size_t)n < budget ? (size_t)n : budget;
	}
}

static void ready(struct soft_fd_watch *watch, uint32_t events)
{
	struct soft_link *link = soft_container(watch, struct soft_link, watch);

	if (link->base.state == SOFT_LINK_SELECTING) {
		soft_wire_selection_received(link);
		return;
	}
	if (link->base.state != SOFT_LINK_UP && link->base.state != SOFT_LINK_CLOSING) {
		soft_handshake_received(link);
		return;
	}
	if (events & EPOLLOUT) {
		soft_watch(watch, EPOLLIN);
		soft_link_writable(link);
	}
	if (!(events & ~(uint32_t)EPOLLOUT))
		return;
	if (link->base.state == SOFT_LINK_CLOSING)
		discard(link);
	else
		take_in(link); /* which also finds out about errors */
}

/* ---- the wire ------------------------------------------------------------------------------ */

static int up(struct soft_link *link)
{
	return soft_watch(&link->watch, EPOLLIN);
}

static size_t room(struct soft_link *link, size_t least)
{
	(void)link;
	(void)least;
	return SIZE_MAX; /* it takes what it takes */
}

static void drop_rest(struct soft_link *link)
{
	free(link->rest);
	link->rest = NULL;
	link->rest_length = link->rest_sent = 0;
}

/* The rest of a frame goes first, and with what follows it, since each packet costs. */
static ssize_t give(struct soft_link *link, struct iovec *iov, int count)
{
	struct iovec both[1 + SOFT_LINK_IOVECS];
	struct msghdr message = {.msg_iov = iov, .msg_iovlen = (size_t)count};
	size_t rest = link->rest_length - link->rest_sent;
	ssize_t n;

	if (rest) {
		both[0] = (struct iovec){.iov_base = link->rest + link->rest_sent, .iov_len = rest};
		memcpy(both + 1, iov, (size_t)count * sizeof(*iov));
		message = (struct msghdr){.msg_iov = both, .msg_iovlen = (size_t)count + 1};
	}
	do
		n = sendmsg(link->watch.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	/* Frames that the other side sent before it closed, such as DISCONNECT, are still to be
	 * read; reading finds the end as well. */
	if (n < 0)
		return errno == EAGAIN || errno == EPIPE || errno == ECONNRESET ? 0 : -errno;
	soft_liveness_sent(link);
	if ((size_t)n < rest) {
		link->rest_sent += (size_t)n;
		return 0;
	}
	drop_rest(link);
	return n - (ssize_t)rest;
}

static int keep(struct soft_link *link, const struct iovec *iov, size_t from, size_t length)
{
	uint8_t *rest = malloc(length);

	if (!rest)
		return ENOMEM;
	link->rest = rest;
	link->rest_length = length;
	link->rest_sent = 0;
	for (; length; iov++) {
		size_t skip = from < iov->iov_len ? from : iov->iov_len;
		size_t part = iov->iov_len - skip < length ? iov->iov_len - skip : length;

		memcpy(rest, (const uint8_t *)iov->iov_base + skip, part);
		rest += part;
		from -= skip;
		length -= part;
	}
	return 0;
}

static int wait_for_room(struct soft_link *link)
{
	return soft_watch(&link->watch, EPOLLIN | EPOLLOUT);
}

static void end(struct soft_link *link)
{
	shutdown(link->watch.fd, SHUT_WR);
}

const struct soft_wire soft_tcp_wire = {
	.up = up,
	.room = room,
	.send = give,
	.keep = keep,
	.wait = wait_for_room,
	.end = end,
	.name = AIORDMA_WIRE_TCP,
	.frame_most = SOFT_FRAME_MAX,
	.frames_most = SOFT_LINK_FRAMES,
};

void soft_link_over_socket(struct soft_link *link, int fd)
{
	link->wire = &soft_tcp_wire;
	link->watch = (struct soft_fd_watch){.fd = fd, .ready = ready, .of_port = true};
}

void soft_link_reset_socket(struct soft_link *link)
{
	const struct linger at_once = {.l_onoff = 1};

	if (link->watch.fd >= 0)
		setsockopt(link->watch.fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
}

void soft_link_close_socket(struct soft_link *link)
{
	soft_timer_stop(&link->liveness_timer);
	drop_rest(link);
	soft_watch_close(&link->watch);
}
