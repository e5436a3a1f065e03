/* The process's UDP socket, which sends and receives unreliable datagrams.
 *
 * The socket has the same port number as the data listener's TCP port and is reserved together with
 * it. A UD queue pair specifies a local address only when it sends, so the socket is bound to all
 * addresses. While there is no UD queue pair, a kernel filter drops all input. The kernel also
 * drops datagrams that do not fit in the receive buffer, so the buffer is large.
 */
#define _GNU_SOURCE /* in6_pktinfo */
#include <linux/filter.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include "trace/trace.h"
#include "ud.h"

enum {
	RECEIVE_BUFFER_BYTES = 8 << 20, /* bytes requested from the kernel */
	READS_PER_STEP = 256,
};

static const uint8_t magic[4] = {'a', 'i', 'U', 'D'};

static void ready(struct soft_fd_watch *watch);

/* ---- the header ---------------------------------------------------------------------------- */

void soft_datagram_encode(uint8_t *at, const struct soft_datagram *datagram)
{
	memcpy(at, magic, sizeof(magic));
	at[4] = SOFT_DATAGRAM_VERSION;
	at[5] = datagram->flags;
	at[6] = 0;
	at[7] = datagram->hop_limit;
	soft_put32(at + 8, datagram->dest_qpn);
	soft_put32(at + 12, datagram->src_qpn);
	soft_put32(at + 16, datagram->qkey);
	memcpy(at + 20, &datagram->immediate, sizeof(datagram->immediate));
	soft_put32(at + 24, datagram->traffic_flow);
	memcpy(at + 28, datagram->source.raw, 16);
	memcpy(at + 44, datagram->destination.raw, 16);
}

bool soft_datagram_decode(const uint8_t *at, struct soft_datagram *datagram)
{
	*datagram = (struct soft_datagram){
		.flags = at[5],
		.hop_limit = at[7],
		.dest_qpn = soft_get32(at + 8),
		.src_qpn = soft_get32(at + 12),
		.qkey = soft_get32(at + 16),
		.traffic_flow = soft_get32(at + 24),
	};
	memcpy(&datagram->immediate, at + 20, sizeof(datagram->immediate));
	memcpy(datagram->source.raw, at + 28, 16);
	memcpy(datagram->destination.raw, at + 44, 16);
	return !memcmp(at, magic, sizeof(magic)) && at[4] == SOFT_DATAGRAM_VERSION && at[6] == 0 &&
	       datagram->dest_qpn <= SOFT_PSN_MASK && datagram->src_qpn <= SOFT_PSN_MASK &&
	       datagram->traffic_flow <= SOFT_TRAFFIC_FLOW;
}

/* ---- life ---------------------------------------------------------------------------------- */

static int bind_socket(int family, uint16_t port)
{
	struct sockaddr_storage address = {.ss_family = (sa_family_t)family};
	int fd = socket(family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	/* sin_port and sin6_port have the same offset. */
	((struct sockaddr_in *)&address)->sin_port = htons(port);
	if ((family == AF_INET6 && soft_set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0)) ||
	    bind(fd, (struct sockaddr *)&address,
		 family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in))) {
		close(fd);
		return -1;
	}
	return fd;
}

/* Drop all input, including the datagrams that have already arrived. */
static bool block_input(int fd)
{
	struct sock_filter drop_all[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
	const struct sock_fprog program = {.len = 1, .filter = drop_all};
	uint8_t byte;

	if (setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program)))
		return false;
	while (recv(fd, &byte, 1, MSG_DONTWAIT) >= 0 || errno == EINTR)
		;
	return true;
}

/* Start receiving datagrams. Errors are ignored, because any datagram may be lost. */
static void start_receiving(void)
{
	soft_set_option(soft_device.ud->socket.fd, SOL_SOCKET, SO_DETACH_FILTER, 0);
	soft_watch(&soft_device.ud->socket, EPOLLIN);
}

bool soft_datagram_reserve(uint16_t port)
{
	soft_assert_locked();
	struct soft_ud *ud = soft_device.ud;

	soft_watch_close(&ud->socket);
	ud->socket.ready = ready;
	ud->socket.fd = bind_socket(AF_INET6, port);
	ud->is_ipv6 = ud->socket.fd >= 0;
	if (!ud->is_ipv6 && errno != EADDRINUSE)
		ud->socket.fd = bind_socket(AF_INET, port);
	if (ud->socket.fd < 0 || !block_input(ud->socket.fd)) {
		soft_watch_close(&ud->socket);
		return false;
	}
	soft_set_receive_buffer(ud->socket.fd, RECEIVE_BUFFER_BYTES);
	/* Let IP fragment messages that are longer than the network's MTU. */
	soft_set_option(ud->socket.fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DONT);
	if (ud->is_ipv6)
		soft_set_option(ud->socket.fd, IPPROTO_IPV6, IPV6_MTU_DISCOVER, IP_PMTUDISC_DONT);
	/* Disable the kernel's multicast loop. Members on this host receive messages through the
	 * loopback interface and would otherwise receive some of them twice. IPV6_MULTICAST_LOOP
	 * also applies to IPv4 messages that an IPv6 socket sends. */
	soft_set_option(ud->socket.fd, ud->is_ipv6 ? IPPROTO_IPV6 : IPPROTO_IP,
			ud->is_ipv6 ? IPV6_MULTICAST_LOOP : IP_MULTICAST_LOOP, 0);
	if (ud->holders)
		start_receiving();
	return true;
}

void soft_datagram_shutdown(void)
{
	soft_assert_locked();
	soft_watch_close(&soft_device.ud->socket);
	soft_device.ud->holders = 0;
}

void soft_datagram_hold(void)
{
	soft_assert_locked();
	if (soft_device.ud->packets)
		return; /* RoCE packets do not use this socket */
	if (!soft_device.ud->holders)
		start_receiving();
	soft_device.ud->holders++;
}

void soft_datagram_release(void)
{
	soft_assert_locked();
	struct soft_ud *ud = soft_device.ud;

	if (!ud->holders || --ud->holders || ud->socket.fd < 0)
		return;
	soft_unwatch(&ud->socket);
	block_input(ud->socket.fd);
}

/* ---- sending ------------------------------------------------------------------------------- */

/* Convert a GID to an address in the socket's family. Returns the length of the address, or 0 if
 * the GID cannot be converted. */
static socklen_t address_of(const union ibv_gid *gid, const union ibv_gid *own, uint16_t port,
			    struct sockaddr_storage *to)
{
	if (soft_device.ud->is_ipv6) {
		struct sockaddr_in6 *in6 = (void *)to;

		*in6 = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(port)};
		memcpy(&in6->sin6_addr, gid->raw,
		       16); /* GIDs and IPv6 sockets both use IPv4-mapped addresses */
		in6->sin6_scope_id = soft_gid_scope_id(gid, own);
		return sizeof(*in6);
	}
	return soft_gid_is_ipv4(gid) ? soft_gid_to_sockaddr(gid, own, port, to) : 0;
}

union control {
	struct cmsghdr alignment;
	uint8_t bytes[CMSG_SPACE(sizeof(struct in6_pktinfo)) + CMSG_SPACE(sizeof(int))];
};

void soft_put_source(struct msghdr *message, bool ipv4, const union ibv_gid *source,
		     uint32_t ifindex)
{
	if (ipv4) {
		struct in_pktinfo info = {.ipi_ifindex = (int)ifindex};

		if (soft_gid_is_ipv4(source))
			memcpy(&info.ipi_spec_dst, &source->raw[12], 4);
		soft_put_control(message, IPPROTO_IP, IP_PKTINFO, &info, sizeof(info));
	} else {
		struct in6_pktinfo info = {.ipi6_ifindex = ifindex};

		memcpy(&info.ipi6_addr, source->raw, 16);
		soft_put_control(message, IPPROTO_IPV6, IPV6_PKTINFO, &info, sizeof(info));
	}
}

/* Send a datagram. Returns 0 or an errno value. */
static int transmit(struct msghdr *message, const struct soft_datagram *datagram,
		    const struct iovec *payload, int count)
{
	uint8_t header[SOFT_DATAGRAM_HEADER];
	struct iovec iov[SOFT_MAX_SGE + 1] = {{.iov_base = header, .iov_len = sizeof(header)}};
	ssize_t n;

	soft_datagram_encode(header, datagram);
	memcpy(&iov[1], payload, sizeof(*payload) * (size_t)count);
	message->msg_iov = iov;
	message->msg_iovlen = (size_t)count + 1;
	/* sendmsg() may report an error of an earlier datagram (ip(7), ECONNREFUSED), so try
	 * again. */
	for (int attempt = 0; attempt < 3; attempt++) {
		n = sendmsg(soft_device.ud->socket.fd, message, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n >= 0)
			return 0;
		if (errno != EINTR && errno != ECONNREFUSED)
			break;
	}
	return errno;
}

/* Record in the trace that a datagram could not be sent. Its message is lost. */
static void trace_unsent(const struct soft_datagram *datagram)
{
	SOFT_TRACE_DROPPED(.reason = "UNSENT", .qp_num = datagram->src_qpn,
			   .remote_qpn = datagram->dest_qpn, .remote = &datagram->destination);
}

bool soft_datagram_send(const struct soft_datagram *datagram, const struct soft_ud_address *path,
			const struct iovec *payload, int count)
{
	soft_assert_locked();
	union control control = {0};
	struct sockaddr_storage to;
	struct msghdr message = {
		.msg_name = &to,
		.msg_namelen = address_of(&path->destination, &path->source,
					  soft_qpn_ip_port(datagram->dest_qpn), &to),
		.msg_control = &control,
	};

	if (soft_device.ud->socket.fd < 0 || !message.msg_namelen ||
	    soft_gid_is_ipv4(&path->destination) != soft_gid_is_ipv4(&path->source)) {
		trace_unsent(datagram);
		return true;
	}
	soft_put_source(&message, soft_gid_is_ipv4(&path->destination), &path->source, 0);
	int error = transmit(&message, datagram, payload, count);

	if (error && error != EAGAIN)
		trace_unsent(datagram);
	return error != EAGAIN;
}

int soft_datagram_send_to(const struct soft_datagram *datagram, uint32_t address, uint16_t port,
			  uint32_t ifindex, const struct iovec *payload, int count)
{
	soft_assert_locked();
	const union ibv_gid gid = soft_gid_of_ipv4(&address);
	const int hops = datagram->hop_limit;
	union control control = {0};
	struct sockaddr_storage to;
	struct msghdr message = {.msg_name = &to, .msg_control = &control};

	if (soft_device.ud->socket.fd < 0)
		return ENETDOWN;
	message.msg_namelen = address_of(&gid, &datagram->source, port, &to);
	soft_put_source(&message, true, &datagram->source, ifindex);
	soft_put_control(&message, IPPROTO_IP, IP_TTL, &hops, sizeof(hops));
	return transmit(&message, datagram, payload, count);
}

/* ---- receiving ----------------------------------------------------------------------------- */

/* Returns whether the datagram names its real sender: the source GID must be the sender's address,
 * and the port encoded in the source queue pair number must be the sender's port. An IPv6
 * GID in a multicast message is not checked, because multicast messages are sent over IPv4. */
static bool has_valid_source(const struct soft_datagram *datagram, const union ibv_gid *from,
			     uint16_t from_port)
{
	return from_port == soft_qpn_ip_port(datagram->src_qpn) &&
	       (!memcmp(from, &datagram->source, sizeof(*from)) ||
		(soft_gid_is_multicast(&datagram->destination) &&
		 !soft_gid_is_ipv4(&datagram->source)));
}

void soft_datagram_read(struct soft_fd_watch *watch,
			void (*handle)(struct soft_fd_watch *watch,
				       const struct soft_datagram *datagram, const uint8_t *payload,
				       uint32_t length))
{
	soft_assert_locked();
	uint8_t *input = soft_scratch()->input;
	size_t budget = soft_step_byte_budget();

	for (int i = 0; i < READS_PER_STEP && budget; i++) {
		struct sockaddr_storage from;
		struct iovec iov = {.iov_base = input,
				    .iov_len = SOFT_DATAGRAM_HEADER + SOFT_DATAGRAM_MAX};
		struct msghdr message = {
			.msg_name = &from,
			.msg_namelen = sizeof(from),
			.msg_iov = &iov,
			.msg_iovlen = 1,
		};
		ssize_t n = recvmsg(watch->fd, &message, MSG_DONTWAIT);
		struct soft_datagram datagram;
		union ibv_gid gid;

		if (n < 0 && errno == EAGAIN)
			return;
		if (n < 0)
			continue; /* error of a datagram sent earlier */
		budget -= (size_t)n < budget ? (size_t)n : budget;
		soft_gid_from_sockaddr(&gid, (const struct sockaddr *)&from);
		if (n < SOFT_DATAGRAM_HEADER || message.msg_flags & MSG_TRUNC ||
		    !soft_datagram_decode(input, &datagram))
			SOFT_TRACE_DROPPED(.reason = "HEADER", .remote = &gid);
		else if (!has_valid_source(&datagram, &gid, soft_address_port(&from)))
			SOFT_TRACE_DROPPED(.reason = "SOURCE", .qp_num = datagram.dest_qpn,
					   .remote_qpn = datagram.src_qpn, .remote = &gid);
		else
			handle(watch, &datagram, input + SOFT_DATAGRAM_HEADER,
			       (uint32_t)n - SOFT_DATAGRAM_HEADER);
	}
}

static void receive_datagram(struct soft_fd_watch *watch, const struct soft_datagram *datagram,
			     const uint8_t *payload, uint32_t length)
{
	(void)watch;
	soft_ud_dispatch(datagram, payload, length);
}

static void ready(struct soft_fd_watch *watch)
{
	soft_datagram_read(watch, receive_datagram);
}
