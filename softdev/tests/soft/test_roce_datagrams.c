/* Packet-level tests of RoCE v2 datagrams: UD queue pairs, and the MADs of queue pair 1. The test
 * acts as the peer. */
#define _GNU_SOURCE /* gettid */
#include "cm/cm_internal.h"
#include "cm/cm_mad.h"
#include "roce_bytes.h"
#include "ud_side.h"

#include <stdatomic.h>

enum {
	GSI = 1,
	PORT = 7471,
	SEND = SOFT_ROCE_UD | SOFT_ROCE_SEND_ONLY,
	SEND_IMMEDIATE = SOFT_ROCE_UD | SOFT_ROCE_SEND_ONLY_IMMEDIATE,
};

#define GSI_QKEY 0x80010000u

/* The GID of the second device. */
static const uint8_t second_gid[16] = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 2};
static const uint8_t ipv6_gid[16] = {[15] = 1};

static uint8_t payload[MTU + 4];

static bool is_ipv4(const uint8_t gid[16])
{
	return gid[10] == 0xff;
}

static socklen_t address_at(const uint8_t gid[16], uint16_t port, struct sockaddr_storage *address)
{
	struct sockaddr_in *in = (void *)address;
	struct sockaddr_in6 *in6 = (void *)address;

	memset(address, 0, sizeof(*address));
	if (is_ipv4(gid)) {
		*in = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port)};
		memcpy(&in->sin_addr, gid + 12, 4);
		return sizeof(*in);
	}
	*in6 = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = htons(port)};
	memcpy(&in6->sin6_addr, gid, 16);
	return sizeof(*in6);
}

/* Create a socket bound to this address. Returns -1 and sets errno on failure. */
static int bind_udp_socket(const uint8_t gid[16], uint16_t port)
{
	struct sockaddr_storage here;
	const socklen_t length = address_at(gid, port, &here);
	const int discover = IP_PMTUDISC_DO;
	int fd = socket(here.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &discover, sizeof(discover));
	if (!bind(fd, (const struct sockaddr *)&here, length))
		return fd;
	const int error = errno;

	close(fd);
	errno = error;
	return -1;
}

static bool is_free(const uint8_t gid[16])
{
	int fd = bind_udp_socket(gid, SOFT_ROCE_PORT);

	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

/* ---- packets --------------------------------------------------------------------------------- */

/* Build a packet whose ICRC is valid if the packet is sent from UDP port 4790 at `source`. Returns
 * the length of the packet. */
static size_t build(uint8_t *bytes, const uint8_t source[16], const uint8_t destination[16],
		    const struct soft_roce_packet *packet)
{
	return build_from(SOFT_ROCE_PORT - 1, bytes, source, destination, packet);
}

static void send_bytes(const uint8_t source[16], const uint8_t destination[16],
		       const uint8_t *bytes, size_t length)
{
	struct sockaddr_storage to;
	const socklen_t to_length = address_at(destination, SOFT_ROCE_PORT, &to);
	int fd = bind_udp_socket(source, SOFT_ROCE_PORT - 1);

	CHECK(fd >= 0);
	CHECK_EQUAL(sendto(fd, bytes, length, 0, (const struct sockaddr *)&to, to_length), length);
	close(fd);
}

static void send_packet(const uint8_t source[16], const uint8_t destination[16],
			struct soft_roce_packet packet)
{
	uint8_t bytes[LONGEST];

	send_bytes(source, destination, bytes, build(bytes, source, destination, &packet));
}

static struct soft_roce_packet packet_to(const struct side *side, uint8_t opcode, uint32_t length)
{
	return (struct soft_roce_packet){
		.opcode = opcode,
		.pkey = 0xffff,
		.dest_qpn = side->qp->qp_num,
		.src_qpn = PEER_QPN,
		.qkey = QKEY,
		.immediate = 78,
		.length = length,
		.payload = payload,
	};
}

/* ---- what comes in --------------------------------------------------------------------------- */

static void check_grh(const uint8_t *grh, const uint8_t source[16], const uint8_t destination[16],
		      uint32_t after_ip)
{
	const uint8_t *ipv4 = grh + 20;
	uint32_t sum = 0;

	if (!is_ipv4(source)) {
		CHECK_EQUAL(grh[0] >> 4, 6);
		CHECK_EQUAL(grh[4] << 8 | grh[5], after_ip);
		CHECK_EQUAL(grh[6], IPPROTO_UDP);
		CHECK(!memcmp(grh + 8, source, 16));
		CHECK(!memcmp(grh + 24, destination, 16));
		return;
	}
	CHECK_EQUAL(ipv4[0], 0x45);
	CHECK_EQUAL(ipv4[2] << 8 | ipv4[3], 20 + after_ip);
	CHECK_EQUAL(ipv4[9], IPPROTO_UDP);
	CHECK(!memcmp(ipv4 + 12, source + 12, 4));
	CHECK(!memcmp(ipv4 + 16, destination + 12, 4));
	for (int i = 0; i < 20; i += 2)
		sum += (uint32_t)ipv4[i] << 8 | ipv4[i + 1];
	CHECK_EQUAL(sum % 0xffff, 0);
}

static void incoming_datagrams_have_correct_completion_and_grh(const uint8_t source[16],
							       const uint8_t destination[16])
{
	static const uint32_t lengths[] = {0, 7, MTU};
	struct side side;

	UD_OPEN(&side, .shared = 8);
	for (uint32_t i = 0; i < 6; i++) {
		const uint8_t opcode = i % 2 ? SEND_IMMEDIATE : SEND;
		struct soft_roce_packet packet = packet_to(&side, opcode, lengths[i / 2]);

		if (i == 3)
			packet.pkey = 0x7fff; /* limited membership */
		post_receive_at(&side, i, 0, 8192);
		send_packet(source, destination, packet);
		struct ibv_wc wc = expect_wc(&side, i, IBV_WC_SUCCESS);

		CHECK_EQUAL(wc.byte_len, GRH + packet.length);
		CHECK_EQUAL(wc.src_qp, PEER_QPN);
		CHECK_EQUAL(wc.wc_flags, IBV_WC_GRH | (i % 2 ? IBV_WC_WITH_IMM : 0));
		CHECK_EQUAL(wc.imm_data, i % 2 ? htonl(78) : 0);
		CHECK(!memcmp(side.memory + GRH, payload, packet.length));
		check_grh(side.memory, source, destination,
			  8 + 12 + 8 + (i % 2 ? 4 : 0) + ((packet.length + 3) & ~3u) + 4);
	}
	close_side(&side);
}

static void invalid_datagrams_are_dropped_without_response(void)
{
	int peer = bind_udp_socket(peer_gid, SOFT_ROCE_PORT);
	struct side side, other, witness;
	uint8_t bytes[LONGEST];

	UD_OPEN(&side);
	OPEN(&other, .ud = true);
	CHECK_OK(ud_to_init(&other, QKEY));
	struct soft_roce_packet packet = packet_to(&side, SEND, 7);

	/* A datagram is dropped if no receive is posted. When `witness` receives a later datagram,
	 * the device has already processed this one. */
	send_packet(peer_gid, device_gid, packet);
	UD_OPEN(&witness);
	post_receive_at(&witness, 1, 0, GRH + 7);
	send_packet(peer_gid, device_gid, packet_to(&witness, SEND, 7));
	expect_wc(&witness, 1, IBV_WC_SUCCESS);
	close_side(&witness);
	post_receive_at(&side, 1, 0, GRH + 2 * MTU);
	post_receive_at(&other, 1, 0, GRH + MTU);
	packet.dest_qpn = other.qp->qp_num; /* not yet in RTR */
	send_packet(peer_gid, device_gid, packet);
	packet.dest_qpn ^= 1;
	send_packet(peer_gid, device_gid, packet);
	packet = packet_to(&side, SEND, 7);
	packet.qkey++;
	send_packet(peer_gid, device_gid, packet);
	packet = packet_to(&side, SEND, 7);
	packet.pkey = 0x1234;
	send_packet(peer_gid, device_gid, packet);
	packet = packet_to(&side, SEND, MTU + 4);
	send_packet(peer_gid, device_gid, packet);
	packet = packet_to(&side, SOFT_ROCE_RC | SOFT_ROCE_SEND_ONLY, 7);
	send_packet(peer_gid, device_gid, packet);
	/* Send the packet with each bit flipped, except those that a network may change, and then
	 * truncated to each length. */
	packet = packet_to(&side, SEND, 7);
	size_t length = build(bytes, peer_gid, device_gid, &packet);

	for (size_t bit = 0; bit < 8 * length; bit++) {
		if (bit / 8 == 4)
			continue;
		bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
		send_bytes(peer_gid, device_gid, bytes, length);
		bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
	}
	for (size_t cut = 1; cut < length; cut++)
		send_bytes(peer_gid, device_gid, bytes, cut);
	/* to the address of another device */
	send_packet(peer_gid, second_gid, packet);
	CHECK(!has_packet_within(peer, QUIET_MS));
	packet.length = 5;
	send_packet(peer_gid, device_gid, packet);
	CHECK_EQUAL(expect_wc(&side, 1, IBV_WC_SUCCESS).byte_len, GRH + 5);
	expect_no_wc(&side);
	expect_no_wc(&other);
	close_side(&other);
	close_side(&side);
	close(peer);
}

/* ---- what goes out --------------------------------------------------------------------------- */

static void sent_datagrams_have_correct_headers(void)
{
	int peer = bind_udp_socket(peer_gid, SOFT_ROCE_PORT);
	struct address to = {.qpn = PEER_QPN};
	struct side side;

	memcpy(to.gid.raw, peer_gid, sizeof(peer_gid));
	UD_OPEN(&side);
	struct ibv_ah *ah = ud_path(&side, &to, side.options.gid);

	memcpy(side.memory, payload, MTU);
	for (uint32_t i = 0; i < 3; i++) {
		const uint32_t length = (uint32_t[]){MTU, 7, 0}[i];

		UD_POST(&side, .ah = ah, .qpn = PEER_QPN, .qkey = i == 1 ? OWN_QKEY : QKEY + 1,
			.wr_id = i, .length = length, .with_imm = i == 1, .imm = htonl(78),
			.flags = i == 1 ? IBV_SEND_SOLICITED : 0);
		expect_wc(&side, i, IBV_WC_SUCCESS);
		struct soft_roce_packet packet = packet_at(peer);

		CHECK_EQUAL(packet.opcode, i == 1 ? SEND_IMMEDIATE : SEND);
		CHECK_EQUAL(packet.dest_qpn, PEER_QPN);
		CHECK_EQUAL(packet.src_qpn, side.qp->qp_num);
		CHECK_EQUAL(packet.qkey, i == 1 ? QKEY : QKEY + 1);
		CHECK_EQUAL(packet.psn, (side.psn + i) & 0xffffff);
		CHECK_EQUAL(packet.solicited, i == 1);
		CHECK(i != 1 || packet.immediate == 78);
		CHECK_EQUAL(packet.length, length);
		CHECK(!memcmp(packet.payload, payload, length));
		CHECK(i != 1 || !packet.payload[7]); /* padding */
	}
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	close_side(&side);
	close(peer);
}

/* Post a chain to two address handles with different traffic classes. */
static void datagrams_use_the_traffic_class_of_their_handle(void)
{
	const int peer = bind_udp_socket(peer_gid, SOFT_ROCE_PORT), on = 1;
	struct ibv_send_wr wrs[4] = {0};
	struct ibv_ah *ahs[2];
	struct side side;

	CHECK_OK(setsockopt(peer, IPPROTO_IP, IP_RECVTOS, &on, sizeof(on)));
	UD_OPEN(&side);
	for (int i = 0; i < 2; i++) {
		struct ibv_ah_attr attr = {
			.grh = {.traffic_class = i ? 0x20 : 0x61},
			.is_global = 1,
			.port_num = 1,
		};

		memcpy(attr.grh.dgid.raw, peer_gid, sizeof(peer_gid));
		CHECK(ahs[i] = verbs->ibv_create_ah(side.pd, &attr));
	}
	for (int i = 0; i < 4; i++)
		wrs[i] = (struct ibv_send_wr){
			.opcode = IBV_WR_SEND,
			.next = i < 3 ? &wrs[i + 1] : NULL,
			.wr.ud = {.ah = ahs[i / 2], .remote_qpn = PEER_QPN, .remote_qkey = QKEY},
		};
	CHECK_OK(post_wr(&side, wrs));
	for (int i = 0; i < 4; i++) {
		CHECK_EQUAL(traffic_class_at(peer), i < 2 ? 0x62 : 0x22);
		packet_at(peer);
	}
	for (int i = 0; i < 2; i++)
		CHECK_OK(verbs->ibv_destroy_ah(ahs[i]));
	close_side(&side);
	close(peer);
}

#ifndef __SANITIZE_THREAD__
/* Expect a receive whose GRH contains the packet's traffic class, with the ECN bits set to
 * ECT(0). */
static struct ibv_wc expect_class(struct side *side, bool ipv4)
{
	const struct ibv_wc wc = expect_wc(side, 1, IBV_WC_SUCCESS);
	const uint8_t *grh = side->memory;

	CHECK_EQUAL(ipv4 ? grh[21] : (grh[0] & 15) << 4 | grh[1] >> 4, (33 & 0xfc) | 2);
	return wc;
}

/* Exchange datagrams between two processes that share an address. The parent creates the address
 * handle for its response from the work completion and the GRH. */
static void grh_reports_the_traffic_class(int index)
{
	struct side side, own;

	UD_OPEN(&side, .gid = gid_at(index));
	post_receive_at(&side, 1, 0, GRH);
	const struct address to = address_of_side(&side);
	const bool ipv4 = is_ipv4(to.gid.raw);
	pid_t child = fork_asleep();

	if (!child) {
		UD_OPEN(&own, .gid = gid_at(index));
		post_receive_at(&own, 1, 0, GRH);
		UD_POST(&own, .ah = ud_path(&own, &to, index), .qpn = to.qpn, .qkey = QKEY,
			.wr_id = 2);
		expect_wc(&own, 2, IBV_WC_SUCCESS);
		expect_class(&own, ipv4);
		_exit(0);
	}
	struct ibv_wc wc = expect_class(&side, ipv4);
	struct ibv_ah *ah =
		verbs->ibv_create_ah_from_wc(side.pd, &wc, (struct ibv_grh *)side.memory, 1);

	UD_POST(&side, .ah = ah, .qpn = wc.src_qp, .qkey = QKEY, .wr_id = 2);
	expect_wc(&side, 2, IBV_WC_SUCCESS);
	expect_exit_success(child);
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	close_side(&side);
}
#endif

/* ---- queue pair 1 ---------------------------------------------------------------------------- */

static void encode_request(const uint8_t source[16], uint32_t id, uint16_t port,
			   uint8_t bytes[SOFT_MAD_SIZE])
{
	struct soft_cm_mad mad = {
		.message = {.type = SOFT_CM_REQ,
			    .port_space = RDMA_PS_TCP,
			    .qp_type = IBV_QPT_RC,
			    .qpn = PEER_QPN,
			    .psn = 0xfedcba,
			    .path_mtu = IBV_MTU_1024,
			    .traffic_class = 0x28},
		.transaction = id,
		.local_id = id,
		.service_port = port,
		.source_port = 4711,
	};

	memcpy(mad.source, source, sizeof(mad.source));
	memcpy(mad.destination, device_gid, sizeof(mad.destination));
	soft_cm_mad_encode(&mad, bytes);
}

/* Build the peer's request to connect to `port`. */
static struct soft_roce_packet request_for(uint16_t port, uint8_t bytes[SOFT_MAD_SIZE])
{
	encode_request(peer_gid, port, port, bytes);
	return (struct soft_roce_packet){
		.opcode = SEND,
		.pkey = 0xffff,
		.dest_qpn = GSI,
		.src_qpn = GSI,
		.qkey = GSI_QKEY,
		.length = SOFT_MAD_SIZE,
		.payload = bytes,
	};
}

static struct soft_cm_mad next_mad(int peer, unsigned type)
{
	struct soft_roce_packet packet = packet_at(peer);
	struct soft_cm_mad mad;

	CHECK_EQUAL(packet.opcode, SEND);
	CHECK_EQUAL(packet.dest_qpn, GSI);
	CHECK_EQUAL(packet.src_qpn, GSI);
	CHECK_EQUAL(packet.qkey, GSI_QKEY);
	CHECK(soft_cm_mad_decode(packet.payload, packet.length, &mad));
	CHECK_EQUAL(mad.message.type, type);
	return mad;
}

static void cm_requests_arrive_at_qp_1_and_bad_mads_are_dropped(void)
{
	int peer = bind_udp_socket(peer_gid, SOFT_ROCE_PORT);
	struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(PORT)};
	uint8_t bytes[SOFT_MAD_SIZE];
	struct rdma_event_channel *channel;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	CHECK(channel = verbs->rdma_create_event_channel());
	CHECK_OK(verbs->rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK_OK(verbs->rdma_bind_addr(id, (struct sockaddr *)&any));
	/* Another process uses one of the addresses, so rdma_listen() fails and releases the
	 * others. */
	int taken = bind_udp_socket(second_gid, SOFT_ROCE_PORT);

	CHECK_FAILS(verbs->rdma_listen(id, 0), EADDRINUSE);
	CHECK(is_free(device_gid));
	close(taken);
	CHECK_OK(verbs->rdma_listen(id, 0));
	CHECK(!is_free(device_gid));

	struct soft_roce_packet packet = request_for(PORT, bytes);

	packet.qkey = QKEY;
	send_packet(peer_gid, device_gid, packet);
	packet = request_for(PORT, bytes);
	packet.src_qpn = PEER_QPN;
	send_packet(peer_gid, device_gid, packet);
	packet = request_for(PORT, bytes);
	packet.length -= 4;
	send_packet(peer_gid, device_gid, packet);
	packet = request_for(PORT, bytes);
	packet.dest_qpn = 0;
	send_packet(peer_gid, device_gid, packet);
	CHECK(!has_packet_within(peer, QUIET_MS));
	send_packet(peer_gid, device_gid, request_for(PORT + 1, bytes));
	CHECK_EQUAL(next_mad(peer, SOFT_CM_REJ).message.reason, SOFT_CM_REASON_INVALID_SERVICE_ID);
	send_packet(peer_gid, device_gid, request_for(PORT, bytes));
	next_mad(peer, SOFT_CM_MRA);
	CHECK_OK(verbs->rdma_get_cm_event(channel, &event));
	CHECK_EQUAL(event->event, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *asked = event->id;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS};
	int mask;

	/* The request contains the first PSN that the peer sends (IBTA 12.7.31). */
	CHECK_OK(verbs->rdma_init_qp_attr(asked, &attr, &mask));
	CHECK(mask & IBV_QP_SQ_PSN);
	CHECK_EQUAL(attr.sq_psn, 0xfedcba);
	/* The path has the traffic class that the requester has chosen. */
	attr.qp_state = IBV_QPS_RTR;
	CHECK_OK(verbs->rdma_init_qp_attr(asked, &attr, &mask));
	CHECK_EQUAL(attr.ah_attr.grh.traffic_class, 0x28);

	CHECK_OK(verbs->rdma_ack_cm_event(event));
	/* A conversation outlives its listener. A finished conversation is kept to answer repeated
	 * messages, but only until the device is closed. */
	CHECK_OK(verbs->rdma_destroy_id(id));
	CHECK(!is_free(device_gid));
	CHECK_OK(verbs->rdma_destroy_id(asked));
	next_mad(peer, SOFT_CM_REJ);
	verbs->rdma_destroy_event_channel(channel);
	CHECK(soft_list_empty(&soft_device.cm->gsi.conversations));
	CHECK(is_free(device_gid));
	close(peer);
}

static void expect_event_of(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;

	CHECK_OK(verbs->rdma_get_cm_event(channel, &event));
	CHECK_EQUAL(event->event, type);
	CHECK_OK(verbs->rdma_ack_cm_event(event));
}

/* A request contains the traffic class of its path, but is itself sent with class 0. */
static void connection_request_contains_its_traffic_class(void)
{
	const int peer = bind_udp_socket(peer_gid, SOFT_ROCE_PORT), on = 1;
	struct rdma_conn_param parameters = {.qp_num = PEER_QPN};
	struct sockaddr_storage to;
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	uint8_t traffic_class = 0x28;

	address_at(peer_gid, PORT, &to);
	CHECK_OK(setsockopt(peer, IPPROTO_IP, IP_RECVTOS, &on, sizeof(on)));
	CHECK(channel = verbs->rdma_create_event_channel());
	CHECK_OK(verbs->rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK_OK(verbs->rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &traffic_class, 1));
	CHECK_OK(verbs->rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1000));
	expect_event_of(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK_OK(verbs->rdma_resolve_route(id, 1000));
	expect_event_of(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK_OK(verbs->rdma_connect(id, &parameters));
	CHECK_EQUAL(traffic_class_at(peer), 2);
	CHECK_EQUAL(next_mad(peer, SOFT_CM_REQ).message.traffic_class, traffic_class);
	CHECK_OK(verbs->rdma_destroy_id(id));
	verbs->rdma_destroy_event_channel(channel);
	close(peer);
}

static unsigned kernel_calls;

int __real_socket(int domain, int type, int protocol);
int __wrap_socket(int domain, int type, int protocol);
int __wrap_socket(int domain, int type, int protocol)
{
	__atomic_add_fetch(&kernel_calls, 1, __ATOMIC_RELAXED);
	return __real_socket(domain, type, protocol);
}

static void connection_requests_cause_few_kernel_queries(void)
{
	const union ibv_gid from = {.raw = {[10] = 0xff, 0xff, 203, 0, 113, 1}};
	struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(PORT)};
	struct rdma_event_channel *channel;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	union ibv_gid to;

	memcpy(to.raw, device_gid, sizeof(to));
	CHECK(channel = verbs->rdma_create_event_channel());
	CHECK_OK(verbs->rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK_OK(verbs->rdma_bind_addr(id, (struct sockaddr *)&any));
	CHECK_OK(verbs->rdma_listen(id, 0));
	kernel_calls = 0;
	for (uint32_t i = 1; i <= 100; i++) {
		uint8_t bytes[SOFT_MAD_SIZE];

		encode_request(from.raw, i, PORT, bytes);
		soft_lock();
		soft_cm_mad_received(&from, &to, bytes, sizeof(bytes));
		soft_unlock();
		CHECK_OK(verbs->rdma_get_cm_event(channel, &event));
		struct rdma_cm_id *asked = event->id;
		struct ibv_cq *cq = verbs->ibv_create_cq(asked->verbs, 1, NULL, NULL, 0);
		struct ibv_qp_init_attr attr = {
			.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};

		CHECK_OK(verbs->rdma_ack_cm_event(event));
		CHECK_OK(verbs->rdma_create_qp(asked, NULL, &attr));
		CHECK_OK(verbs->rdma_accept(asked, NULL));
		verbs->rdma_destroy_qp(asked);
		CHECK_OK(verbs->ibv_destroy_cq(cq));
		CHECK_OK(verbs->rdma_destroy_id(asked));
	}
	CHECK(kernel_calls <= 16); /* source ports per address */
	CHECK_OK(verbs->rdma_destroy_id(id));
	verbs->rdma_destroy_event_channel(channel);
}

/* ---- the port -------------------------------------------------------------------------------- */

static void port_in_use_affects_only_its_address(void)
{
	const struct address peer = {.qpn = PEER_QPN, .gid.raw = {[10] = 0xff, 0xff, 127, 0, 0, 9}};
	int taken = bind_udp_socket(device_gid, SOFT_ROCE_PORT);
	struct side connected, side;

	OPEN(&connected, .device = 1);
	CHECK_OK(to_init(&connected));
	CHECK_OK(to_rtr(&connected, &peer));
	OPEN(&side, .ud = true);
	CHECK_OK(ud_to_init(&side, QKEY));
	CHECK_EQUAL(to_state(&side, IBV_QPS_RTR), EADDRINUSE);
	CHECK_EQUAL(state_of(&side), IBV_QPS_INIT);
	destroy_qp(&side);
	CHECK(!is_free(second_gid));
	close(taken);
	side.qp = create_qp(&side);
	ud_bring_up(&side, QKEY);
	CHECK(!is_free(device_gid));
	destroy_qp(&connected);
	CHECK(!is_free(second_gid));
	enter_state(&side, IBV_QPS_RESET);
	CHECK(is_free(device_gid) && is_free(second_gid));
	close_side(&side);
	close_side(&connected);
}

/* Whether to stop the device's thread before it handles events. */
static atomic_bool is_stopped;

int __real_poll(struct pollfd *fds, nfds_t count, int timeout);
int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout);

/* Stop the device's thread in poll, where it holds no lock. */
int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout)
{
	int ready = __real_poll(fds, count, timeout);

	while (is_stopped && gettid() != getpid())
		pause();
	return ready;
}

#ifndef __SANITIZE_THREAD__ /* TSan cannot start threads in a forked child */
/* The child owns the UDP port and forwards the parent's datagrams. It exits while a datagram for
 * the parent is still queued in its own socket. */
static void last_datagram_of_exiting_owner_is_delivered(bool closes)
{
	struct process process = process_split();
	struct side side;
	char byte = 0;

	if (process.child)
		process_receive(&process, &byte, 1);
	UD_OPEN(&side);
	if (!process.child)
		process_send(&process, &byte, 1);
	struct address peer = exchange_addresses(&process, &side);

	if (!process.child) {
		struct ibv_ah *ah = ud_path(&side, &peer, 0);

		process_receive(&process, &byte, 1);
		while (!are_others_asleep())
			sched_yield();
		is_stopped = true;
		UD_POST(&side, .ah = ah, .qpn = peer.qpn, .qkey = QKEY, .length = 8);
		CHECK_OK(verbs->ibv_destroy_ah(ah));
		if (closes)
			CHECK_OK(verbs->ibv_destroy_qp(side.qp));
		exit(0);
	}
	post_receive_at(&side, 1, 0, GRH + 8);
	process_send(&process, &byte, 1);
	expect_wc(&side, 1, IBV_WC_SUCCESS);
	process_join(&process);
	close_side(&side);
}

static void forked_child_and_parent_both_receive_datagrams(void)
{
	struct side side, own[2];

	UD_OPEN(&side);
	pid_t child = fork_asleep();

	if (!child) {
		CHECK_OK(verbs->ibv_destroy_qp(side.qp));
		OPEN(&own[0], .ud = true);
		CHECK_OK(ud_to_init(&own[0], QKEY));
		enter_state(&own[0], IBV_QPS_RTR); /* the parent receives for the child */
		post_receive_at(&own[0], 1, 0, GRH + 7);
		send_packet(peer_gid, device_gid, packet_to(&own[0], SEND, 7));
		expect_wc(&own[0], 1, IBV_WC_SUCCESS);
		close_side(&own[0]);
		CHECK_OK(setenv("AIORDMA_EMBEDDED_LINKS", "tcp", 1));
		open_ud_pair(&own[0], &own[1]);
		struct ibv_ah *ah = path_to(&own[0], &own[1]);

		post_receive_at(&own[1], 1, 0, GRH);
		send_with(&own[0], ah, &own[1], QKEY);
		expect_wc(&own[1], 1, IBV_WC_SUCCESS);
		_exit(0);
	}
	expect_exit_success(child);
	post_receive_at(&side, 1, 0, GRH + 7);
	send_packet(peer_gid, device_gid, packet_to(&side, SEND, 7));
	expect_wc(&side, 1, IBV_WC_SUCCESS);
	close_side(&side);
}
#endif

int main(void)
{
	limit_seconds(120);
	CHECK_OK(setenv("AIORDMA_EMBEDDED_DEVICES", "2", 1));
	for (size_t i = 0; i < sizeof(payload); i++)
		payload[i] = (uint8_t)(i * 7 + 1);
#ifndef __SANITIZE_THREAD__
	STEP(last_datagram_of_exiting_owner_is_delivered(false));
	STEP(last_datagram_of_exiting_owner_is_delivered(true));
#endif
	STEP(incoming_datagrams_have_correct_completion_and_grh(peer_gid, device_gid));
	if (is_free(ipv6_gid))
		STEP(incoming_datagrams_have_correct_completion_and_grh(ipv6_gid, ipv6_gid));
	STEP(invalid_datagrams_are_dropped_without_response());
	STEP(sent_datagrams_have_correct_headers());
	STEP(datagrams_use_the_traffic_class_of_their_handle());
	STEP(cm_requests_arrive_at_qp_1_and_bad_mads_are_dropped());
	STEP(connection_requests_cause_few_kernel_queries());
	STEP(connection_request_contains_its_traffic_class());
	STEP(port_in_use_affects_only_its_address());
#ifndef __SANITIZE_THREAD__
	STEP(forked_child_and_parent_both_receive_datagrams());
	STEP(grh_reports_the_traffic_class(0));
	if (is_free(ipv6_gid))
		STEP(grh_reports_the_traffic_class(1));
#endif
	return 0;
}
