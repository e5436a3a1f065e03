/* Attach: how two processes come to share memory, and how they part.
 *
 * Every process with a data listener listens on a Unix socket in the abstract name space, which
 * belongs to the network name space as LIDs do, under a name made of its LID.  Nothing of it is in
 * the file system.  The process that wants to share memory connects there; both sides ask the
 * kernel for the other's user, which must be their own; then it makes the segment and hands it
 * over.  The socket stays open: its end is the end of the peer.
 *
 *   the client    HELLO, its LID, the segment, and its pipe; it may write into its ring at once
 *   the host      READY and its pipe, or the end of the socket
 *   both          LID: its own is another one now
 *
 * The kernel tells of a process's death by its pidfd, also where a child still holds the socket.
 */
#define _GNU_SOURCE /* accept4, struct ucred */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "shm_internal.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

enum {
	BACKLOG = 256,
	MAX_UNIDENTIFIED = 64, /* connected, and have sent nothing yet */
	ACCEPTS_PER_STEP = 16,
};

#define ATTACH_TIMEOUT_NS 10000000000u
#define PAUSE_NS 100000000u

enum ctrl {
	HELLO = 1,
	READY,
	LID
};

enum {
	MEMORY,
	PIPE,
	FDS
}; /* that come with HELLO; with READY the second one */

struct message {
	uint32_t ctrl;
	uint32_t lid;
};

static void accept_ready(struct soft_fd_watch *watch, uint32_t events);
static void pause_over(struct soft_timer *timer);

static struct soft_fd_watch listener = {.fd = -1, .ready = accept_ready, .of_port = true};
static struct soft_timer rest = {.expired = pause_over};
static uint16_t own_lid;

static struct soft_node unidentified_peers = {
	&unidentified_peers, &unidentified_peers}; /* in the order of their coming */
static unsigned stranger_count;

/* ---- messages ------------------------------------------------------------------------------ */

static bool tell(const struct soft_shm_peer *peer, enum ctrl ctrl, const int *fds, int count)
{
	struct message message = {ctrl, own_lid};
	struct iovec bytes = {&message, sizeof(message)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(FDS * sizeof(int))];
	} control = {0};
	struct msghdr letter = {.msg_iov = &bytes, .msg_iovlen = 1};

	if (count) {
		size_t length = (size_t)count * sizeof(*fds);

		letter.msg_control = &control;
		letter.msg_controllen = CMSG_LEN(length);
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN(length);
		memcpy(CMSG_DATA(&control.header), fds, length);
	}
	return sendmsg(peer->socket.fd, &letter, MSG_NOSIGNAL | MSG_DONTWAIT) ==
	       (ssize_t)sizeof(message);
}

static void close_fds(int fds[FDS])
{
	for (int i = 0; i < FDS; i++)
		if (fds[i] >= 0)
			close(fds[i]);
}

/* 1: a message, with the fds that came with it or -1; 0: none now; -1: the end. */
static int hear(const struct soft_shm_peer *peer, struct message *message, int fds[FDS])
{
	struct iovec bytes = {message, sizeof(*message)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(FDS * sizeof(int))];
	} control;
	struct msghdr letter = {
		.msg_iov = &bytes,
		.msg_iovlen = 1,
		.msg_control = peer->up ? NULL : &control,
		.msg_controllen = peer->up ? 0 : sizeof(control),
	};
	ssize_t n = recvmsg(peer->socket.fd, &letter, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	for (int i = 0; i < FDS; i++)
		fds[i] = -1;
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n <= 0)
		return -1;
	struct cmsghdr *header = CMSG_FIRSTHDR(&letter);

	/* There is room for so many, and the kernel has closed what was beyond it. */
	if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
		size_t length = header->cmsg_len - CMSG_LEN(0);

		memcpy(fds, CMSG_DATA(header),
		       length < FDS * sizeof(*fds) ? length : FDS * sizeof(*fds));
	}
	return n == (ssize_t)sizeof(*message) && message->lid <= UINT16_MAX ? 1 : -1;
}

/* ---- the two of them ----------------------------------------------------------------------- */

static void leave_strangers(struct soft_shm_peer *peer)
{
	if (!soft_list_empty(&peer->unidentified))
		stranger_count--;
	soft_list_remove(&peer->unidentified);
}

void soft_attach_end(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	leave_strangers(peer);
	soft_timer_stop(&peer->timeout);
	soft_watch_close(&peer->socket);
	soft_watch_close(&peer->process);
	soft_notify_pipe_close(&peer->pipe);
}

static void waited_in_vain(struct soft_timer *timer)
{
	soft_shm_peer_finish(soft_container(timer, struct soft_shm_peer, timeout), ECONNREFUSED);
}

static void died(struct soft_fd_watch *watch, uint32_t events)
{
	(void)events;
	soft_shm_peer_drain_and_finish(soft_container(watch, struct soft_shm_peer, process));
}

/* One of our user?  Then we shall be told when it dies; if it lives where we cannot see it (another
 * process name space), by its socket alone. */
static bool look_at(struct soft_shm_peer *peer)
{
	struct ucred who;
	socklen_t length = sizeof(who);
	int fd = -1;

	if (getsockopt(peer->socket.fd, SOL_SOCKET, SO_PEERCRED, &who, &length) ||
	    who.uid != geteuid())
		return false;
	peer->pid = who.pid;
	length = sizeof(fd);
	if (getsockopt(peer->socket.fd, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) && who.pid)
		fd = (int)syscall(SYS_pidfd_open, who.pid, 0);
	peer->process.fd = fd;
	return true;
}

static void heard(struct soft_fd_watch *watch, uint32_t events);

static struct soft_shm_peer *with_socket(int fd)
{
	struct soft_shm_peer *peer = soft_shm_peer_create();

	if (!peer) {
		close(fd);
		return NULL;
	}
	peer->socket = (struct soft_fd_watch){.fd = fd, .ready = heard, .of_port = true};
	peer->process = (struct soft_fd_watch){.fd = -1, .ready = died, .of_port = true};
	peer->timeout.expired = waited_in_vain;
	soft_timer_start(&peer->timeout, soft_now() + ATTACH_TIMEOUT_NS);
	if (look_at(peer) && !soft_watch(&peer->socket, EPOLLIN))
		return peer;
	soft_shm_peer_finish(peer, ECONNREFUSED);
	return NULL;
}

/* Both have the memory. */
static bool come_up(struct soft_shm_peer *peer)
{
	soft_timer_stop(&peer->timeout);
	peer->up = true;
	return peer->process.fd < 0 || !soft_watch(&peer->process, EPOLLIN);
}

static bool hang_bell(struct soft_shm_peer *peer, int fds[FDS])
{
	int fd = fds[PIPE];

	fds[PIPE] = -1;
	return fd >= 0 && soft_notify_pipe_receive(&peer->pipe, fd);
}

static bool hello(struct soft_shm_peer *peer, const struct message *message, int fds[FDS])
{
	leave_strangers(peer);
	peer->lid = (uint16_t)message->lid;
	if (fds[MEMORY] < 0 || soft_segment_check(fds[MEMORY]) ||
	    soft_segment_map(peer, fds[MEMORY], false) || !hang_bell(peer, fds) ||
	    soft_notify_pipe_make(&peer->pipe))
		return false;
	return tell(peer, READY, &peer->pipe.read_fd, 1) && come_up(peer);
}

/* The only one that comes with READY. */
static bool ready(struct soft_shm_peer *peer, int fds[FDS])
{
	int first = fds[0];

	fds[0] = fds[PIPE];
	fds[PIPE] = first;
	return hang_bell(peer, fds) && come_up(peer);
}

/* False: it does not belong here. */
static bool understood(struct soft_shm_peer *peer, const struct message *message, int fds[FDS])
{
	bool visitor = !peer->memory; /* the host has made nothing */

	switch (message->ctrl) {
	case HELLO:
		return visitor && hello(peer, message, fds);
	case READY:
		return !visitor && !peer->up && ready(peer, fds);
	case LID:
		peer->lid = (uint16_t)message->lid;
		return peer->up;
	default:
		return false;
	}
}

static void heard(struct soft_fd_watch *watch, uint32_t events)
{
	struct soft_shm_peer *peer = soft_container(watch, struct soft_shm_peer, socket);
	struct message message;
	int fds[FDS];

	(void)events;
	/* One: if there are more, epoll says so. */
	int rc = hear(peer, &message, fds);

	if (rc == 1 && !understood(peer, &message, fds))
		rc = -1;
	close_fds(fds);
	if (rc < 0)
		soft_shm_peer_drain_and_finish(peer);
	else if (peer->up)
		soft_wakeup_visit(peer);
}

/* ---- notify pipes
 * --------------------------------------------------------------------------------- */

static bool listen_to(struct soft_shm_peer *peer)
{
	bool rings = soft_notify_pipe_drain(&peer->pipe);

	peer->armed = false;
	if (!rings)
		soft_shm_peer_drain_and_finish(peer);
	return rings;
}

static void notified(struct soft_fd_watch *watch, uint32_t events)
{
	struct soft_shm_peer *peer = soft_container(watch, struct soft_shm_peer, pipe.in.watch);

	(void)events;
	if (listen_to(peer) && peer->up)
		soft_wakeup_visit(peer);
}

void soft_attach_ack_notify(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	listen_to(peer);
}

void soft_attach_notify(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	soft_notify_pipe_notify(&peer->pipe);
}

void soft_attach_init(struct soft_shm_peer *peer)
{
	peer->socket.fd = peer->process.fd = -1;
	soft_notify_pipe_init(&peer->pipe, notified);
}

/* ---- the visitor --------------------------------------------------------------------------- */

static socklen_t name_of(uint16_t lid, struct sockaddr_un *address)
{
	*address = (struct sockaddr_un){.sun_family = AF_UNIX};
	/* The first byte stays zero: an abstract name. */
	int length =
		snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "aiordma/%u", lid);

	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static bool bring_memory(struct soft_shm_peer *peer)
{
	int fd = soft_segment_make();
	bool done = false;

	if (fd < 0)
		return false;
	if (!soft_segment_map(peer, fd, true) && !soft_notify_pipe_make(&peer->pipe)) {
		const int fds[FDS] = {[MEMORY] = fd, [PIPE] = peer->pipe.read_fd};

		done = tell(peer, HELLO, fds, FDS);
	}
	close(fd);
	return done;
}

struct soft_shm_peer *soft_attach_begin(uint16_t lid)
{
	soft_assert_locked();
	struct sockaddr_un address;
	socklen_t length = name_of(lid, &address);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return NULL;
	if (connect(fd, (struct sockaddr *)&address, length)) {
		close(fd);
		return NULL;
	}
	struct soft_shm_peer *peer = with_socket(fd);

	if (!peer)
		return NULL;
	if (!bring_memory(peer)) {
		soft_shm_peer_finish(peer, ECONNREFUSED);
		return NULL;
	}
	peer->lid = lid;
	return peer;
}

/* ---- the host ------------------------------------------------------------------------------ */

static void pause_over(struct soft_timer *timer)
{
	(void)timer;
	soft_watch(&listener, EPOLLIN);
}

static void let_in(int fd)
{
	if (stranger_count == MAX_UNIDENTIFIED)
		soft_shm_peer_finish(soft_list_entry(unidentified_peers.next, struct soft_shm_peer,
						     unidentified),
				     0);
	struct soft_shm_peer *peer = with_socket(fd);

	if (!peer)
		return;
	soft_list_append(&unidentified_peers, &peer->unidentified);
	stranger_count++;
}

static void accept_ready(struct soft_fd_watch *watch, uint32_t events)
{
	(void)events;
	for (int i = 0; i < ACCEPTS_PER_STEP; i++) {
		int fd = accept4(watch->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

		if (fd >= 0) {
			let_in(fd);
			continue;
		}
		if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
			/* Ready for ever, and nothing could be done about it. */
			soft_unwatch(watch);
			soft_timer_start(&rest, soft_now() + PAUSE_NS);
		}
		return;
	}
}

static void tell_lid(struct soft_shm_peer *peer)
{
	if (peer->up && peer->socket.fd >= 0)
		tell(peer, LID, NULL, 0);
}

/* Without a listening socket there is TCP. */
void soft_attach_listen(uint16_t lid)
{
	soft_assert_locked();
	struct sockaddr_un address;
	socklen_t length = name_of(lid, &address);

	soft_attach_unlisten();
	own_lid = lid;
	soft_shm_each_peer(tell_lid);
	listener.fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (listener.fd < 0)
		return;
	if (bind(listener.fd, (struct sockaddr *)&address, length) ||
	    listen(listener.fd, BACKLOG) || soft_watch(&listener, EPOLLIN))
		soft_attach_unlisten();
}

void soft_attach_unlisten(void)
{
	soft_assert_locked();
	soft_timer_stop(&rest);
	soft_watch_close(&listener);
}

/* The sockets are closed already. */
void soft_attach_reset_after_fork(void)
{
	soft_list_init(&unidentified_peers);
	stranger_count = 0;
}
