/* Attaching: how two processes start and stop sharing memory.
 *
 * Every process with a data listener also listens on a Unix socket in the abstract namespace, under
 * a name that contains its port. Like ports, abstract names belong to the network namespace, and
 * they do not appear in the file system. To share memory, one process (the client) connects to the
 * other (the host). Each side asks the kernel for the other's user, and accepts only its own. The
 * client then creates the segment and passes it to the host. The socket stays open. When it closes,
 * the peer has ended.
 *
 *   client    sends HELLO: its port, the device of each side, the segment, and its pipe;
 *             it may write to its ring immediately
 *   host      sends READY and its pipe, or closes the socket
 *
 * HELLO and READY also contain the address of the secret in cma.h. The socket connects only
 * processes of the same user, while the shared memory could be passed on to another process.
 *
 * The kernel reports the death of a process through its pidfd, even if a child still holds the
 * socket.
 */
#define _GNU_SOURCE /* accept4, struct ucred */
#include <fcntl.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "shm_internal.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* since Linux 6.5 */
#endif

enum {
	BACKLOG = 256,
	MAX_UNIDENTIFIED = 64, /* maximum number of connections waiting for HELLO */
};

#define ATTACH_TIMEOUT_NS 10000000000u
#define PAUSE_NS 100000000u

enum message_type { HELLO = 1, READY };

/* Indexes of the descriptors in a HELLO. READY contains only PIPE. */
enum { MEMORY, PIPE, FDS };

struct message {
	uint32_t type; /* enum message_type */
	uint16_t port; /* 0 if the process has no data listener */
	uint8_t from_hca, to_hca; /* device numbers (HELLO only) */
	uint64_t secret_at; /* address of the sender's soft_cma.secret */
};

/* ---- messages ------------------------------------------------------------------------------ */

static bool send_message(const struct soft_shm_peer *peer, enum message_type type, const int *fds,
			 int count)
{
	struct message message = {
		.type = type,
		.port = soft_device.shm->own_port,
		.from_hca = (uint8_t)__builtin_ctz(peer->path.ports), /* a single bit */
		.to_hca = (uint8_t)peer->path.peer_hca,
		.secret_at = peer->cma ? (uintptr_t)peer->cma->secret : 0,
	};
	struct iovec bytes = {&message, sizeof(message)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(FDS * sizeof(int))];
	} control = {0};
	struct msghdr msg = {.msg_iov = &bytes, .msg_iovlen = 1, .msg_control = &control};

	soft_put_control(&msg, SOL_SOCKET, SCM_RIGHTS, fds, (size_t)count * sizeof(*fds));
	return sendmsg(peer->socket.fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) ==
	       (ssize_t)sizeof(message);
}

static void close_fds(int fds[FDS])
{
	for (int i = 0; i < FDS; i++)
		if (fds[i] >= 0)
			close(fds[i]);
}

/* Move a message's descriptors to `fds`, and close any that do not fit. */
static void take_fds(struct msghdr *msg, int fds[FDS])
{
	size_t count = 0;

	for (struct cmsghdr *header = CMSG_FIRSTHDR(msg); header;
	     header = CMSG_NXTHDR(msg, header)) {
		const size_t length = header->cmsg_len - CMSG_LEN(0);

		if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t at = 0; at < length; at += sizeof(int)) {
			int fd;

			memcpy(&fd, CMSG_DATA(header) + at, sizeof(fd));
			if (count < FDS)
				fds[count++] = fd;
			else
				close(fd);
		}
	}
}

/* Receive one message. Returns 1 on success, 0 if no message is waiting, and -1 if the connection
 * has ended or the message is invalid. The caller must always close the valid `fds`. */
static int receive_message(const struct soft_shm_peer *peer, struct message *message, int fds[FDS])
{
	struct iovec bytes = {message, sizeof(*message)};
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(FDS * sizeof(int))];
	} control;
	struct msghdr msg = {
		.msg_iov = &bytes,
		.msg_iovlen = 1,
		/* An attached peer has no reason to send descriptors. Without a buffer for them, the
		 * kernel closes any that arrive. */
		.msg_control = peer->is_attached ? NULL : &control,
		.msg_controllen = peer->is_attached ? 0 : sizeof(control),
	};
	ssize_t n = recvmsg(peer->socket.fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	for (int i = 0; i < FDS; i++)
		fds[i] = -1;
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	/* An empty message looks like the end of the connection, but it may contain descriptors to
	 * close. */
	take_fds(&msg, fds);
	return n == (ssize_t)sizeof(*message) && !(msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) ? 1
											     : -1;
}

/* ---- both sides ---------------------------------------------------------------------------- */

void soft_attach_end(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	soft_list_remove(&peer->unidentified);
	soft_timer_stop(&peer->timeout);
	soft_watch_close(&peer->socket);
	soft_watch_close(&peer->process);
	soft_notify_pipe_close(&peer->pipe);
}

static void attach_timed_out(struct soft_timer *timer)
{
	soft_shm_peer_finish(soft_container(timer, struct soft_shm_peer, timeout), ECONNREFUSED);
}

static void process_died(struct soft_fd_watch *watch)
{
	soft_shm_peer_drain_and_finish(soft_container(watch, struct soft_shm_peer, process));
}

/* Get the peer's PID and a pidfd that reports its death. Returns false unless the peer is known to
 * belong to this process's user. If the peer's PID namespace is not visible here, a pidfd may not
 * be available. In that case, only the socket reports the peer's death. */
static bool identify(struct soft_shm_peer *peer)
{
	int fd = -1;
	socklen_t length = sizeof(fd);

	if (!soft_is_same_user(peer->socket.fd, &peer->pid))
		return false;
	if (getsockopt(peer->socket.fd, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) && peer->pid)
		fd = (int)syscall(SYS_pidfd_open, peer->pid, 0);
	peer->process.fd = fd;
	return true;
}

static void socket_ready(struct soft_fd_watch *watch);

/* Assign the peer and its descriptors to these device ports. Returns 0 or an errno value. */
static int set_ports(struct soft_shm_peer *peer, uint32_t ports)
{
	soft_unwatch(&peer->socket);
	peer->path.ports = ports;
	peer->socket.ports = peer->process.ports = peer->pipe.in.ports = ports;
	return soft_watch(&peer->socket, EPOLLIN);
}

/* Create a peer that is not attached yet, and watch its socket. Takes ownership of `fd`. Returns
 * NULL if the process at the other end does not belong to this user, or on another failure. */
static struct soft_shm_peer *create_peer(int fd, uint32_t ports)
{
	struct soft_shm_peer *peer = soft_shm_peer_create();

	if (!peer) {
		close(fd);
		return NULL;
	}
	peer->socket = (struct soft_fd_watch){.fd = fd, .ready = socket_ready};
	peer->process = (struct soft_fd_watch){.fd = -1, .ready = process_died};
	peer->timeout.expired = attach_timed_out;
	soft_timer_start(&peer->timeout, soft_now() + ATTACH_TIMEOUT_NS);
	if (identify(peer) && !set_ports(peer, ports))
		return peer;
	soft_shm_peer_finish(peer, ECONNREFUSED);
	return NULL;
}

/* Start using the segment after both sides have mapped it. Returns false on failure. */
static bool start_using_segment(struct soft_shm_peer *peer, const struct message *message)
{
	soft_timer_stop(&peer->timeout);
	peer->is_attached = true;
	if (peer->cma)
		peer->cma->peer_secret_at = message->secret_at;
	soft_cma_probe_peer(peer);
	return peer->process.fd < 0 || !soft_watch(&peer->process, EPOLLIN);
}

static bool receive_pipe(struct soft_shm_peer *peer, int fds[FDS])
{
	int fd = fds[PIPE];

	fds[PIPE] = -1;
	return fd >= 0 && soft_notify_pipe_receive(&peer->pipe, fd);
}

/* Map the segment that the peer has created, and respond with READY. Returns false on failure. */
static bool handle_hello(struct soft_shm_peer *peer, const struct message *message, int fds[FDS])
{
	soft_list_remove(&peer->unidentified);
	peer->port = message->port;
	peer->path.peer_hca = message->from_hca;
	if (set_ports(peer, soft_hca_at(message->to_hca)->port_bit) || fds[MEMORY] < 0 ||
	    soft_segment_check(fds[MEMORY]) ||
	    soft_segment_map(peer, fds[MEMORY], SOFT_SEGMENT_RECEIVER) ||
	    !receive_pipe(peer, fds) || soft_notify_pipe_make(&peer->pipe))
		return false;
	return send_message(peer, READY, &peer->pipe.read_fd, 1) &&
	       start_using_segment(peer, message);
}

/* Handle READY, whose only descriptor is the pipe. Returns false on failure. */
static bool handle_ready(struct soft_shm_peer *peer, const struct message *message, int fds[FDS])
{
	int first = fds[0];

	/* Move the pipe to its index in a HELLO. A surplus descriptor takes its place, so that the
	 * caller closes it. */
	fds[0] = fds[PIPE];
	fds[PIPE] = first;
	return receive_pipe(peer, fds) && start_using_segment(peer, message);
}

/* Handle a message. Returns false if the message is invalid or attaching has failed. */
static bool handle_message(struct soft_shm_peer *peer, const struct message *message, int fds[FDS])
{
	switch (message->type) {
	case HELLO:
		return !peer->memory && handle_hello(peer, message, fds);
	case READY:
		return peer->memory && !peer->is_attached && handle_ready(peer, message, fds);
	default:
		return false;
	}
}

/* Handle a message from the peer, or the end of its connection. */
static void socket_ready(struct soft_fd_watch *watch)
{
	struct soft_shm_peer *peer = soft_container(watch, struct soft_shm_peer, socket);
	struct message message;
	int fds[FDS];

	/* Read only one message. The socket stays readable if there are more. */
	int rc = receive_message(peer, &message, fds);

	if (rc == 1 && !handle_message(peer, &message, fds))
		rc = -1;
	close_fds(fds);
	if (rc < 0)
		soft_shm_peer_drain_and_finish(peer);
	else if (peer->is_attached)
		soft_wakeup_visit(peer);
}

/* ---- notify pipes -------------------------------------------------------------------------- */

bool soft_attach_ack_notify(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	bool is_open = soft_notify_pipe_drain(&peer->pipe);

	peer->may_be_notified = false;
	if (!is_open)
		soft_shm_peer_drain_and_finish(peer);
	return is_open;
}

/* Handle input after the peer has sent a notification. */
static void notified(struct soft_fd_watch *watch)
{
	struct soft_shm_peer *peer = soft_container(watch, struct soft_shm_peer, pipe.in);

	if (soft_attach_ack_notify(peer) && peer->is_attached)
		soft_wakeup_visit(peer);
}

void soft_attach_init(struct soft_shm_peer *peer)
{
	peer->socket.fd = peer->process.fd = -1;
	soft_notify_pipe_init(&peer->pipe, notified);
}

/* ---- the client ---------------------------------------------------------------------------- */

static socklen_t make_socket_name(uint16_t port, struct sockaddr_un *address)
{
	*address = (struct sockaddr_un){.sun_family = AF_UNIX};
	/* An abstract name starts with a zero byte. */
	int length =
		snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "aiordma/%u", port);

	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

/* Create and map a segment, and send it to the peer together with this side's notify pipe. */
static bool send_hello(struct soft_shm_peer *peer)
{
	int fd = soft_segment_make();
	bool done = false;

	if (fd < 0)
		return false;
	if (!soft_segment_map(peer, fd, SOFT_SEGMENT_CREATOR) &&
	    !soft_notify_pipe_make(&peer->pipe)) {
		const int fds[FDS] = {[MEMORY] = fd, [PIPE] = peer->pipe.read_fd};

		done = send_message(peer, HELLO, fds, FDS);
	}
	close(fd);
	return done;
}

struct soft_shm_peer *soft_attach_begin(uint16_t ip_port, uint32_t own_port, int hca_number)
{
	soft_assert_locked();
	struct sockaddr_un address;
	socklen_t length = make_socket_name(ip_port, &address);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return NULL;
	if (connect(fd, (struct sockaddr *)&address, length)) {
		close(fd);
		return NULL;
	}
	struct soft_shm_peer *peer = create_peer(fd, own_port);

	if (!peer)
		return NULL;
	peer->path.peer_hca = hca_number;
	if (!send_hello(peer)) {
		soft_shm_peer_finish(peer, ECONNREFUSED);
		return NULL;
	}
	peer->port = ip_port;
	return peer;
}

/* ---- the host ------------------------------------------------------------------------------ */

/* Wait for the HELLO of a new connection. If too many connections have not sent one, close the
 * oldest of them. */
static void accepted(struct soft_acceptor *acceptor, int fd, const struct sockaddr_storage *address)
{
	(void)acceptor;
	(void)address; /* a Unix socket has no address */
	if (soft_list_count(&soft_device.shm->unidentified) == MAX_UNIDENTIFIED)
		soft_shm_peer_finish(soft_list_first(&soft_device.shm->unidentified,
						     struct soft_shm_peer, unidentified),
				     0);
	struct soft_shm_peer *peer = create_peer(fd, SOFT_ANY_PORT);

	if (!peer)
		return;
	soft_list_append(&soft_device.shm->unidentified, &peer->unidentified);
}

bool soft_attach_listen(uint16_t port)
{
	soft_assert_locked();
	struct soft_shm *shm = soft_device.shm;
	struct sockaddr_un address;
	socklen_t length = make_socket_name(port, &address);

	soft_attach_unlisten();
	shm->own_port = port;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return true;
	if (bind(fd, (struct sockaddr *)&address, length)) {
		soft_close_fd(&fd);
		return errno != EADDRINUSE;
	}
	if (listen(fd, BACKLOG))
		soft_close_fd(&fd);
	else if (soft_accept_start(&shm->acceptor, fd, SOFT_ANY_PORT, accepted))
		soft_attach_unlisten();
	return true;
}

void soft_attach_unlisten(void)
{
	soft_assert_locked();
	soft_accept_stop(&soft_device.shm->acceptor);
}
