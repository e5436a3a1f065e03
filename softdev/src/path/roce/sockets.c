/* RoCE v2 sockets. Each local address has one socket that receives packets, and several sockets
 * that send them from different source ports.
 *
 * Packets are staged until the lock is released or the staging buffer is nearly full. Consecutive
 * packets of the same length to the same destination form a run, which the kernel splits
 * (UDP_SEGMENT). If a socket is full, all staged packets wait until it is writable.
 */
#define _GNU_SOURCE /* sendmmsg */
#include <arpa/inet.h>
#include <netinet/udp.h>
#include <stdio.h>
#include <sys/epoll.h>

#include "roce_internal.h"
#include "trace/trace.h"

enum {
	MAX_STAGED = 256 * 1024,
	MAX_RUNS = 1024,
	/* Frames of MAX_ROOM bytes in total grow by at most SLACK bytes when they are converted to
	 * packets. The packet of a short frame is longer than the frame. An acknowledgement in a
	 * frame header becomes a separate packet. */
	MAX_ROOM = 32 * 1024 + SOFT_FRAME_HEADER,
	SLACK = MAX_ROOM / 2 + SOFT_ROCE_PACKET_MAX,
	RUNS_SLACK = 512,
	MAX_SEGMENTS = 64, /* the kernel's limit (udp(7), UDP_SEGMENT) */
	MAX_RUN = 60000, /* bytes */
	SENDS_PER_CALL = 32,

	READS_PER_CALL = 8,
	READS_PER_STEP = 64,
	HEADROOM = 64, /* space for a frame header before a packet */
	INPUT = HEADROOM + 64 * 1024,

	PORT_FIRST = 0xc000, /* source port range, as in Linux (A17.4.5.2) */
	PORTS = 0x4000,
	PORT_TRIES = 32,

	ECT0 = 2, /* ECN-capable transport (RFC 3168): routers may mark packets */
};

/* ---- sending --------------------------------------------------------------------------------- */

static void writable(struct soft_fd_watch *watch)
{
	soft_watch(watch, 0);
	soft_roce_unblocked();
}

static void discard_staged(void)
{
	soft_device.roce->staged_length = soft_device.roce->run_count = soft_device.roce->run_sent =
		0;
}

static void report_too_long(uint32_t length)
{
	if (soft_device.roce->too_long_reported)
		return;
	soft_device.roce->too_long_reported = true;
	fprintf(stderr,
		"aiordma: a RoCE packet of %u bytes exceeds the MTU of the network; reduce the "
		"path_mtu of the queue pairs, or increase the MTU of the network interface\n",
		length);
}

/* Handle the error of a system call that has sent none of its runs. Returns true if the first run
 * stays staged until its socket is writable, and false if the caller must drop it. */
static bool handle_send_error(const struct soft_roce_run *run, int error)
{
	switch (error) {
	case EAGAIN:
		/* If the socket cannot be watched, nothing would report that it is writable. */
		return soft_watch(&run->sender->watch, EPOLLOUT) == 0;
	case EMSGSIZE:
		report_too_long(run->segment);
		return false;
	case EIO:
	case EINVAL:
		/* The kernel cannot split runs if the network device lacks checksum offload
		 * (udp(7)). Later packets are sent one by one. */
		run->sender->no_segmentation |= run->count > 1;
		return false;
	default:
		return false;
	}
}

/* Set the traffic class of a message, marked as ECN-capable. */
static void put_traffic_class(struct msghdr *message, const struct soft_roce_run *run)
{
	const int value = run->traffic_class | ECT0;

	if (run->to.ss_family == AF_INET)
		soft_put_control(message, IPPROTO_IP, IP_TOS, &value, sizeof(value));
	else
		soft_put_control(message, IPPROTO_IPV6, IPV6_TCLASS, &value, sizeof(value));
}

/* Send a run to a simulated network, which never blocks. */
static void send_run_to_simulation(const struct soft_network *network,
				   const struct soft_roce_run *run)
{
	union ibv_gid to;
	uint32_t part;

	soft_gid_from_sockaddr(&to, (const struct sockaddr *)&run->to);
	for (uint32_t at = 0; at < run->length; at += part) {
		part = run->length - at < run->segment ? run->length - at : run->segment;
		network->send(&run->from, run->sender->port, &to,
			      soft_device.roce->staged + run->offset + at, part);
	}
	soft_device.roce->run_sent++;
}

/* Drop a run that the kernel has rejected. It counts as sent, so that the runs behind it can
 * follow. */
static void drop_run(const struct soft_roce_run *run)
{
	union ibv_gid to;

	soft_gid_from_sockaddr(&to, (const struct sockaddr *)&run->to);
	SOFT_TRACE_DROPPED(.reason = "UNSENT", .remote = &to);
	soft_device.roce->run_sent++;
}

/* Send up to SENDS_PER_CALL runs of one socket with a single system call. The kernel splits each
 * run into packets (UDP_SEGMENT). */
static void send_runs(const struct soft_roce_run *runs, unsigned count)
{
	union {
		struct cmsghdr alignment;
		uint8_t bytes[CMSG_SPACE(sizeof(uint16_t)) + CMSG_SPACE(sizeof(int))];
	} controls[SENDS_PER_CALL];
	struct mmsghdr messages[SENDS_PER_CALL] = {0};
	struct iovec iov[SENDS_PER_CALL];
	int sent;

	for (unsigned i = 0; i < count; i++) {
		struct msghdr *message = &messages[i].msg_hdr;

		iov[i] = (struct iovec){soft_device.roce->staged + runs[i].offset, runs[i].length};
		message->msg_name = (void *)&runs[i].to;
		message->msg_namelen = runs[i].to_length;
		message->msg_iov = &iov[i];
		message->msg_iovlen = 1;
		if (runs[i].count == 1 && !runs[i].traffic_class)
			continue;
		memset(&controls[i], 0, sizeof(controls[i]));
		message->msg_control = &controls[i];
		if (runs[i].count > 1)
			soft_put_control(message, IPPROTO_UDP, UDP_SEGMENT, &runs[i].segment,
					 sizeof(runs[i].segment));
		if (runs[i].traffic_class)
			put_traffic_class(message, &runs[i]);
	}
	do
		sent = sendmmsg(runs->sender->watch.fd, messages, count,
				MSG_DONTWAIT | MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
	if (sent > 0)
		soft_device.roce->run_sent += (uint32_t)sent;
	else if (handle_send_error(runs, errno))
		soft_device.roce->blocked = true;
	else
		drop_run(runs);
}

void soft_roce_flush(void)
{
	soft_assert_locked();
	while (!soft_device.roce->blocked &&
	       soft_device.roce->run_sent < soft_device.roce->run_count) {
		const struct soft_roce_run *runs =
			&soft_device.roce->runs[soft_device.roce->run_sent];
		const uint32_t left = soft_device.roce->run_count - soft_device.roce->run_sent;
		unsigned count = 1;

		if (soft_device.platform->network) {
			send_run_to_simulation(soft_device.platform->network, runs);
			continue;
		}
		while (count < left && count < SENDS_PER_CALL && runs[count].sender == runs->sender)
			count++;
		send_runs(runs, count);
	}
	if (!soft_device.roce->blocked)
		discard_staged();
}

size_t soft_roce_room(void)
{
	if (soft_device.roce->staged_length > MAX_STAGED - MAX_ROOM - SLACK ||
	    soft_device.roce->run_count > MAX_RUNS - RUNS_SLACK)
		soft_roce_flush();
	return soft_device.roce->blocked ? 0 : MAX_ROOM;
}

uint8_t *soft_roce_staging_space(void)
{
	return soft_device.roce->staged_length + SOFT_ROCE_PACKET_MAX <= MAX_STAGED &&
			       soft_device.roce->run_count < MAX_RUNS
		       ? soft_device.roce->staged + soft_device.roce->staged_length
		       : NULL;
}

/* Returns the last run if it can include another packet of this length and flow, or NULL. */
static struct soft_roce_run *find_run(const struct soft_roce_flow *flow, uint32_t length)
{
	struct soft_roce_run *run =
		soft_device.roce->run_count > soft_device.roce->run_sent
			? &soft_device.roce->runs[soft_device.roce->run_count - 1]
			: NULL;

	return run && !soft_device.roce->blocked && run->sender == flow->sender &&
			       !run->sender->no_segmentation &&
			       run->length == (uint32_t)run->segment * run->count &&
			       run->traffic_class == flow->traffic_class &&
			       length <= run->segment && run->count < MAX_SEGMENTS &&
			       run->length + length <= MAX_RUN &&
			       !memcmp(&run->to, &flow->to, flow->to_length)
		       ? run
		       : NULL;
}

void soft_roce_commit_staged(const struct soft_roce_flow *flow, uint32_t length)
{
	uint8_t *at = soft_device.roce->staged + soft_device.roce->staged_length;
	const uint32_t packet_length = length + SOFT_ROCE_ICRC;
	struct soft_roce_run *run = find_run(flow, packet_length);

	if (!run) {
		run = &soft_device.roce->runs[soft_device.roce->run_count++];
		*run = (struct soft_roce_run){
			.sender = flow->sender,
			.from = flow->from,
			.to = flow->to,
			.to_length = flow->to_length,
			.traffic_class = flow->traffic_class,
			.offset = soft_device.roce->staged_length,
			.segment = (uint16_t)packet_length,
		};
	}
	/* The kernel numbers the packets of a run from 0 in the IPv4 identification field, which
	 * the ICRC covers. */
	soft_put32(at + length, soft_icrc(&flow->icrc, run->count, &(struct iovec){at, length}, 1));
	run->count++;
	run->length += packet_length;
	soft_device.roce->staged_length += packet_length;
}

/* ---- receiving ------------------------------------------------------------------------------- */

/* Returns the value of the control message of this type, or 0 if not found. */
static int control_value(struct msghdr *message, int level, int type)
{
	for (struct cmsghdr *at = CMSG_FIRSTHDR(message); at; at = CMSG_NXTHDR(message, at)) {
		int value;

		if (at->cmsg_level != level || at->cmsg_type != type)
			continue;
		if (at->cmsg_len < CMSG_LEN(sizeof(value)))
			return *CMSG_DATA(at); /* IP_TOS has only one byte */
		memcpy(&value, CMSG_DATA(at), sizeof(value));
		return value;
	}
	return 0;
}

/* Returns the length of the packets that the kernel merged into one message (udp(7), UDP_GRO). The
 * last packet may be shorter. All of them have the same traffic class. */
static size_t segment_of(struct msghdr *message, size_t length)
{
	const int segment = control_value(message, IPPROTO_UDP, UDP_GRO);

	return segment > 0 ? (size_t)segment : length;
}

static uint8_t traffic_class_of(struct msghdr *message)
{
	return (uint8_t)(control_value(message, IPPROTO_IP, IP_TOS) |
			 control_value(message, IPPROTO_IPV6, IPV6_TCLASS));
}

enum { HANDLE_OR_FORWARD = false, ONLY_FORWARD = true };

/* Read packets, and handle them or forward them to guests. If `only_forward` is set, packets for
 * this process are dropped. Returns the number of bytes read plus the number of messages. Returns 0
 * after reading fewer than READS_PER_CALL messages, because the socket is then empty and reading it
 * again would only delay small messages. */
static size_t read_packets(struct soft_roce_address *address, bool only_forward)
{
	union {
		struct cmsghdr alignment;
		uint8_t bytes[2 * CMSG_SPACE(sizeof(int))];
	} controls[READS_PER_CALL];
	struct sockaddr_storage from[READS_PER_CALL];
	struct mmsghdr messages[READS_PER_CALL] = {0};
	struct iovec iov[READS_PER_CALL][2];
	const bool guest = soft_roce_is_guest(address);
	size_t bytes = 0;

	for (int i = 0; i < READS_PER_CALL; i++) {
		iov[i][0] = (struct iovec){&from[i], SOFT_ROCE_GUEST_PREFIX};
		iov[i][1] = (struct iovec){soft_device.roce->input + (size_t)i * INPUT + HEADROOM,
					   INPUT - HEADROOM};
		messages[i].msg_hdr = (struct msghdr){
			.msg_name = guest ? NULL : &from[i],
			.msg_namelen = guest ? 0 : sizeof(from[i]),
			.msg_iov = guest ? iov[i] : &iov[i][1],
			.msg_iovlen = guest ? 2 : 1,
			/* The owner sends no control messages. Without a buffer for them, the
			 * kernel closes any descriptors received. */
			.msg_control = guest ? NULL : &controls[i],
			.msg_controllen = guest ? 0 : sizeof(controls[i]),
		};
	}
	int count = recvmmsg(address->watch.fd, messages, READS_PER_CALL, MSG_DONTWAIT, NULL);

	for (int i = 0; i < count; i++) {
		if (guest && messages[i].msg_len <= SOFT_ROCE_GUEST_PREFIX) {
			/* The port's owner has closed the connection. */
			address->owner_closed = true;
			return 0;
		}
		const size_t length = messages[i].msg_len - (guest ? SOFT_ROCE_GUEST_PREFIX : 0);
		const size_t segment = segment_of(&messages[i].msg_hdr, length);
		const uint8_t traffic_class =
			guest ? ((uint8_t *)&from[i])[SOFT_ROCE_GUEST_PREFIX - 1]
			      : traffic_class_of(&messages[i].msg_hdr);

		for (size_t done = 0; done < length; done += segment) {
			uint8_t *at = (uint8_t *)iov[i][1].iov_base + done;
			const size_t packet_length =
				length - done < segment ? length - done : segment;

			if (!soft_roce_forward(address, &from[i], at, packet_length,
					       traffic_class) &&
			    !only_forward)
				soft_roce_receive(address, &from[i], at, packet_length,
						  traffic_class);
		}
		bytes += length + 1;
	}
	return count == READS_PER_CALL ? bytes : 0;
}

/* Forward unread packets to the guests, which are other processes that receive through this one,
 * before the socket is closed. Packets that this process sends to its guests, such as the last
 * acknowledgements, also arrive at this socket. */
static void forward_unread(struct soft_roce_address *address)
{
	/* The input buffer is in use while a packet is handled. */
	soft_list_each (struct soft_roce_address, it, &soft_device.roce->addresses, node)
		if (it->is_reading)
			return;
	while (!soft_list_empty(&address->guests) && read_packets(address, ONLY_FORWARD))
		;
}

/* Close and free an address. Drops all staged packets, because some may refer to its sockets. */
static void close_address(struct soft_roce_address *address)
{
	discard_staged();
	if (soft_device.roce->blocked)
		soft_timer_start(&soft_device.roce->room_timer, soft_now());
	soft_device.roce->blocked = false;
	for (int i = 0; i < SOFT_ROCE_SENDERS; i++)
		if (address->senders[i].port)
			soft_watch_close(&address->senders[i].watch);
	soft_watch_close(&address->watch);
	soft_roce_unshare(address);
	soft_list_remove(&address->node);
	free(address);
}

/* Open the UDP port, or become a guest of the process that owns it. Returns 0 or an errno value.
 * All errors except EADDRNOTAVAIL are reported on stderr. */
static int open_receiver(struct soft_roce_address *address);

/* Read a limited number of packets after the socket has become readable. If the process that owns
 * the port has closed its connection, compete for the ownership. */
static void readable(struct soft_fd_watch *watch)
{
	struct soft_roce_address *address = soft_container(watch, struct soft_roce_address, watch);
	size_t budget = soft_step_byte_budget(), bytes = 1;

	address->is_reading = true;
	for (int i = 0; i < READS_PER_STEP && budget && bytes; i++) {
		bytes = read_packets(address, HANDLE_OR_FORWARD);
		budget -= bytes < budget ? bytes : budget;
	}
	address->is_reading = false;
	if (address->owner_closed && address->users) {
		soft_watch_close(&address->watch);
		(void)open_receiver(address);
	}
	address->owner_closed = false;
	soft_roce_close_unused_addresses();
}

enum ibv_mtu soft_roce_active_mtu(const struct soft_hca *hca)
{
	enum {
		HEADERS = 40 + 8 + SOFT_ROCE_HEADERS_MAX +
		SOFT_ROCE_ICRC /* IPv6, UDP and RoCE headers */
	};
	int most = 4096;
	enum ibv_mtu mtu = IBV_MTU_256;

	for (int i = 0; i < hca->gid_count; i++)
		if (hca->gids[i].ifindex && hca->gids[i].mtu - HEADERS < most)
			most = hca->gids[i].mtu - HEADERS;
	while (mtu < IBV_MTU_4096 && 256 << mtu <= most)
		mtu++;
	return mtu;
}

/* ---- sockets --------------------------------------------------------------------------------- */

/* Create a UDP socket that is bound to this address and port and never fragments packets. Returns
 * -1 and sets errno on failure. */
static int bind_socket(const union ibv_gid *gid, uint16_t port)
{
	struct sockaddr_storage address;
	const socklen_t length = soft_gid_to_sockaddr(gid, gid, port, &address);
	/* PMTUDISC_PROBE prevents fragmentation. It also ignores ICMP messages that reduce the MTU,
	 * which are easily forged. */
	static const struct {
		int family, level, name, value;
	} options[] = {
		{AF_INET, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE},
		{AF_INET, IPPROTO_IP, IP_TOS, ECT0},
		{AF_INET, IPPROTO_IP, IP_RECVTOS, 1},
		{AF_INET6, IPPROTO_IPV6, IPV6_V6ONLY, 1},
		{AF_INET6, IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE},
		{AF_INET6, IPPROTO_IPV6, IPV6_TCLASS, ECT0},
		{AF_INET6, IPPROTO_IPV6, IPV6_RECVTCLASS, 1},
		/* Accept packets without a UDP checksum. RDMA NICs and rxe omit the checksum over
		 * IPv6, because the ICRC covers more of the packet. */
		{AF_INET6, IPPROTO_UDP, UDP_NO_CHECK6_RX, 1},
	};
	int fd = socket(address.ss_family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	for (size_t i = 0; i < sizeof(options) / sizeof(*options); i++)
		if (options[i].family == address.ss_family)
			soft_set_option(fd, options[i].level, options[i].name, options[i].value);
	if (bind(fd, (struct sockaddr *)&address, length)) {
		soft_close_fd(&fd);
		return -1;
	}
	/* Sending sockets are never read. A minimal receive buffer keeps packets from other hosts
	 * from using memory. */
	soft_set_receive_buffer(fd, port == SOFT_ROCE_PORT ? SOFT_ROCE_BUFFER : 0);
	soft_set_send_buffer(fd, SOFT_ROCE_BUFFER);
	return fd;
}

static void report_not_open(const union ibv_gid *gid, int error)
{
	char text[INET6_ADDRSTRLEN] = "";

	if (soft_gid_is_ipv4(gid))
		inet_ntop(AF_INET, gid->raw + 12, text, sizeof(text));
	else
		inet_ntop(AF_INET6, gid->raw, text, sizeof(text));
	fprintf(stderr, "aiordma: cannot receive RoCE at %s, UDP port %d: %s%s\n", text,
		SOFT_ROCE_PORT, strerror(error),
		error == EADDRINUSE
			? ". If the kernel's rdma_rxe uses the port in this network namespace, "
			  "remove its device with `rdma link delete`, or use another namespace "
			  "(`ip netns`). If another user's process uses the port, give this "
			  "process another address"
			: "");
}

/* Open the socket that receives packets at the address, or become a guest of the process that owns
 * it. Returns 0 or an errno value. */
static int open_receiver(struct soft_roce_address *address)
{
	if (soft_device.platform->network) {
		address->acceptor.watch.fd = -1;
		address->receive_room = SOFT_ROCE_BUFFER / 4;
		return 0;
	}
	int error = soft_roce_share(address), room = 0;
	socklen_t length = sizeof(room);

	if (!error && !soft_roce_is_guest(address)) {
		address->watch.fd = bind_socket(&address->gid, SOFT_ROCE_PORT);
		error = address->watch.fd < 0 ? errno : 0;
		soft_set_option(address->watch.fd, IPPROTO_UDP, UDP_GRO, 1);
	}
	/* SO_RCVBUF includes the kernel's overhead, which exceeds the payload of a short packet.
	 * Assume that a quarter of the buffer is available for payload. */
	getsockopt(address->watch.fd, SOL_SOCKET, SO_RCVBUF, &room, &length);
	address->receive_room = (uint32_t)room / 4;
	if (!error)
		error = soft_watch(&address->watch, EPOLLIN);
	if (error) {
		if (error != EADDRNOTAVAIL) /* an error that the caller may expect */
			report_not_open(&address->gid, error);
		soft_watch_close(&address->watch);
		soft_roce_unshare(address);
	}
	return error;
}

/* Allocate the buffers for packets on first use. Returns false and sets errno to ENOMEM on
 * failure. */
static bool allocate(void)
{
	if (!soft_device.roce->input)
		soft_device.roce->input = malloc((size_t)READS_PER_CALL * INPUT);
	if (!soft_device.roce->staged)
		soft_device.roce->staged = malloc(MAX_STAGED);
	if (!soft_device.roce->runs)
		soft_device.roce->runs = malloc(MAX_RUNS * sizeof(*soft_device.roce->runs));
	errno = ENOMEM;
	return soft_device.roce->input && soft_device.roce->staged && soft_device.roce->runs;
}

struct soft_roce_address *soft_roce_open_address(const union ibv_gid *gid)
{
	soft_assert_locked();
	struct soft_roce_address *address = soft_roce_find_address(gid);

	if (address) {
		address->users++;
		return address;
	}
	address = allocate() ? calloc(1, sizeof(*address)) : NULL;
	if (!address)
		return NULL;
	address->gid = *gid;
	address->users = 1;
	address->watch = (struct soft_fd_watch){
		.fd = -1, .ready = readable, .ports = soft_gid_port_bit(gid)};
	soft_list_init(&address->guests);
	int error = open_receiver(address);

	if (error)
		return soft_finish_create(error, address);
	soft_list_append(&soft_device.roce->addresses, &address->node);
	return address;
}

void soft_roce_close_unused_addresses(void)
{
	soft_assert_locked();
	soft_list_each_safe (struct soft_roce_address, it, &soft_device.roce->addresses, node) {
		if (it->users || it->is_reading)
			continue;
		soft_roce_flush();
		forward_unread(it);
		close_address(it);
	}
}

void soft_roce_address_release(struct soft_roce_address *address)
{
	address->users--;
	soft_roce_close_unused_addresses();
}

/* Get the sending socket that `hash` selects, and open it on first use. Returns NULL and sets errno
 * on failure. */
static struct soft_roce_sender *sender_of(struct soft_roce_address *address, uint32_t hash)
{
	struct soft_roce_sender *sender = &address->senders[hash % SOFT_ROCE_SENDERS];
	uint16_t number;
	int fd = -1;

	if (sender->port)
		return sender;
	for (int i = 0; i < PORT_TRIES && fd < 0; i++) {
		if (soft_device.platform->random(&number, sizeof(number), 0) != sizeof(number))
			return NULL;
		number = PORT_FIRST + number % PORTS;
		if (soft_device.platform->network) {
			sender->watch.fd = -1;
			sender->port = number;
			return sender;
		}
		fd = bind_socket(&address->gid, number);
	}
	if (fd < 0)
		return NULL;
	sender->watch = (struct soft_fd_watch){
		.fd = fd, .ready = writable, .ports = soft_gid_port_bit(&address->gid)};
	errno = soft_watch(&sender->watch, 0);
	if (errno) {
		soft_close_fd(&sender->watch.fd);
		return NULL;
	}
	sender->port = number;
	return sender;
}

bool soft_roce_flow_init(struct soft_roce_flow *flow, struct soft_roce_address *address,
			 const union ibv_gid *peer, uint32_t qpn, uint32_t peer_qpn,
			 uint8_t traffic_class)
{
	const uint32_t hash = (qpn ^ peer_qpn) * UINT32_C(2654435761) >> 16;

	flow->sender = sender_of(address, hash);
	if (!flow->sender)
		return false;
	flow->from = address->gid;
	flow->traffic_class = traffic_class & ~SOFT_ROCE_CE;
	flow->to_length = soft_gid_to_sockaddr(peer, &address->gid, SOFT_ROCE_PORT, &flow->to);
	soft_icrc_flow_init(&flow->icrc, address->gid.raw, peer->raw, flow->sender->port,
			    SOFT_ROCE_PORT);
	return true;
}

void soft_roce_receive_simulated(const union ibv_gid *at, const union ibv_gid *from, uint16_t port,
				 uint8_t *bytes, size_t length)
{
	struct soft_roce_address *address = soft_roce_find_address(at);
	struct sockaddr_storage sender;

	if (!address)
		return;
	soft_gid_to_sockaddr(from, at, port, &sender);
	address->is_reading = true;
	soft_roce_receive(address, &sender, bytes, length, 0);
	address->is_reading = false;
	soft_roce_close_unused_addresses();
}

/* Send staged packets and forward unread packets to the guests. A process may exit without closing
 * its devices. */
__attribute__((destructor)) static void at_exit(void)
{
	if (!soft_device.roce || !soft_lock_timed())
		return;
	soft_roce_flush();
	soft_list_each (struct soft_roce_address, it, &soft_device.roce->addresses, node)
		forward_unread(it);
	soft_unlock();
}

void soft_roce_sockets_close(bool send_staged)
{
	soft_assert_locked();
	if (send_staged)
		soft_roce_flush();
	soft_list_drain (struct soft_roce_address, address, &soft_device.roce->addresses, node) {
		if (send_staged)
			forward_unread(address);
		close_address(address);
	}
	discard_staged();
	soft_device.roce->blocked = false;
	soft_device.roce->address_holders = 0;
	free(soft_device.roce->input);
	free(soft_device.roce->staged);
	free(soft_device.roce->runs);
	soft_device.roce->input = soft_device.roce->staged = NULL;
	soft_device.roce->runs = NULL;
}
