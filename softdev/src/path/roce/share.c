/* Sharing of an address among the processes of one user. The owner opens the UDP port and forwards
 * packets to the guests.
 *
 * The upper bits of a queue pair number identify its process (objects/qp_numbers.c), so the owner
 * can find the process that a packet is for. A process that needs the address first tries to bind a
 * Unix socket to an abstract name. If this succeeds, the process is the owner and opens the port.
 * Otherwise it becomes a guest and connects to that name, from a name that contains its own number.
 * Packets to queue pair 1 go to all processes. If the connection ends, each guest starts over.
 * Guests send through their own sockets. Both sides check that the other process belongs to the
 * same user.
 */
#define _GNU_SOURCE /* accept4 */
#include <sched.h>
#include <sys/epoll.h>
#include <sys/un.h>

#include "roce_internal.h"

enum {
	BACKLOG = 1024,
	MAX_TRIES = 1000, /* maximum number of attempts while the owner does not accept guests */
	QPN_OFFSET = 5, /* offset of the destination queue pair number in the BTH */
};

/* An abstract socket name, which starts with a zero byte. */
struct name {
	sa_family_t family;
	char prefix[14];
	union ibv_gid gid;
	uint16_t ip_port; /* number of the guest; 0 for the owner */
};

#define NAME_LENGTH (offsetof(struct name, ip_port) + sizeof(uint16_t))

static struct name name_of(const union ibv_gid *gid, uint16_t ip_port)
{
	return (struct name){AF_UNIX, "\0aiordma/roce", *gid, ip_port};
}

/* Create a socket and bind it to this name. Returns -1 and sets errno on failure. EADDRINUSE means
 * that the name is taken. */
static int bind_name(const union ibv_gid *gid, uint16_t ip_port)
{
	const struct name name = name_of(gid, ip_port);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd >= 0 && bind(fd, (const struct sockaddr *)&name, NAME_LENGTH))
		soft_close_fd(&fd);
	return fd;
}

/* ---- the owner ------------------------------------------------------------------------------- */

static void remove_guest(struct soft_roce_guest *guest)
{
	soft_watch_close(&guest->watch);
	soft_list_remove(&guest->node);
	free(guest);
}

/* Remove a guest whose connection has ended. Guests send nothing, so any input event means the end
 * of the connection. */
static void guest_disconnected(struct soft_fd_watch *watch)
{
	remove_guest(soft_container(watch, struct soft_roce_guest, watch));
}

/* Accept a process of the same user as a guest, to which this process forwards the packets for its
 * queue pairs. */
static void accept_guest(struct soft_acceptor *acceptor, int fd,
			 const struct sockaddr_storage *from)
{
	struct soft_roce_address *address =
		soft_container(acceptor, struct soft_roce_address, acceptor);
	const struct name *name = (const void *)from;
	const struct name expected_name = name_of(&address->gid, name->ip_port);
	struct soft_roce_guest *guest = calloc(1, sizeof(*guest));
	pid_t pid;

	if (!guest || !name->ip_port || memcmp(name, &expected_name, NAME_LENGTH) ||
	    !soft_is_same_user(fd, &pid)) {
		free(guest);
		soft_close_fd(&fd);
		return;
	}
	guest->watch = (struct soft_fd_watch){
		.fd = fd, .ready = guest_disconnected, .ports = soft_gid_port_bit(&address->gid)};
	guest->ip_port = name->ip_port;
	soft_set_send_buffer(fd, SOFT_ROCE_BUFFER);
	soft_list_append(&address->guests, &guest->node);
	if (soft_watch(&guest->watch, EPOLLIN))
		remove_guest(guest);
}

bool soft_roce_forward(struct soft_roce_address *address, struct sockaddr_storage *from,
		       uint8_t *bytes, size_t length, uint8_t traffic_class)
{
	if (soft_list_empty(&address->guests) || length < QPN_OFFSET + 3)
		return false;
	const uint8_t *at = bytes + QPN_OFFSET;
	const uint32_t qpn = (uint32_t)at[0] << 16 | (uint32_t)at[1] << 8 | at[2];
	struct iovec iov[] = {{from, SOFT_ROCE_GUEST_PREFIX}, {bytes, length}};
	const struct msghdr record = {.msg_iov = iov, .msg_iovlen = 2};

	if (qpn != SOFT_ROCE_GSI && soft_qpn_ip_port(qpn) == soft_ip_port())
		return false;
	((uint8_t *)from)[SOFT_ROCE_GUEST_PREFIX - 1] = traffic_class;
	soft_list_each (struct soft_roce_guest, guest, &address->guests, node)
		if (qpn == SOFT_ROCE_GSI || soft_qpn_ip_port(qpn) == guest->ip_port)
			/* Drop the packet if the guest's socket is full, as a network would. */
			(void)sendmsg(guest->watch.fd, &record, MSG_DONTWAIT | MSG_NOSIGNAL);
	return qpn != SOFT_ROCE_GSI;
}

bool soft_roce_is_shared(const union ibv_gid *gid)
{
	const struct soft_roce_address *address = soft_roce_find_address(gid);

	return address && (soft_roce_is_guest(address) || !soft_list_empty(&address->guests));
}

/* ---- joining as a guest ---------------------------------------------------------------------- */

/* Connect to the process that owns the address. Returns 0, ECONNREFUSED if the owner is not
 * listening yet or any more, or another errno value. */
static int join_as_guest(struct soft_roce_address *address)
{
	const struct name owner = name_of(&address->gid, 0);
	int fd = bind_name(&address->gid, soft_ip_port()), error;
	pid_t pid;

	if (fd < 0)
		return errno;
	error = connect(fd, (const struct sockaddr *)&owner, NAME_LENGTH) ? errno : 0;
	if (!error && !soft_is_same_user(fd, &pid))
		error = EADDRINUSE; /* packets must not pass through another user's process */
	if (error)
		soft_close_fd(&fd);
	else
		soft_set_receive_buffer(fd, SOFT_ROCE_BUFFER);
	address->watch.fd = fd;
	return error;
}

int soft_roce_share(struct soft_roce_address *address)
{
	/* soft_ip_port() sets errno if it fails. Otherwise, ECONNREFUSED enters the loop. */
	int error = soft_ip_port() ? ECONNREFUSED : errno;

	soft_assert_locked();
	address->acceptor.watch.fd = -1;
	for (int i = 0; error == ECONNREFUSED && i < MAX_TRIES; i++) {
		int fd = bind_name(&address->gid, 0);

		if (fd >= 0) {
			error = listen(fd, BACKLOG) ? errno : 0;
			if (error)
				soft_close_fd(&fd);
			else
				error = soft_accept_start(&address->acceptor, fd,
							  soft_gid_port_bit(&address->gid),
							  accept_guest);
		} else {
			error = errno == EADDRINUSE ? join_as_guest(address) : errno;
			if (error == ECONNREFUSED)
				sched_yield();
		}
	}
	if (error == ECONNREFUSED) /* another process has bound the name but does not listen */
		error = EADDRINUSE;
	if (error)
		soft_roce_unshare(address);
	return error;
}

void soft_roce_unshare(struct soft_roce_address *address)
{
	soft_assert_locked();
	soft_accept_stop(&address->acceptor);
	soft_list_drain (struct soft_roce_guest, guest, &address->guests, node)
		remove_guest(guest);
}
