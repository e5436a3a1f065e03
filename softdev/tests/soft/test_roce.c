/* Packet-level tests of RoCE v2 paths. */
#define _GNU_SOURCE /* sendmmsg */
#include <netinet/udp.h>
#include <sys/syscall.h>

#include "engine/engine.h"
#include "extended_side.h"
#include "leaks.h"
#include "roce_stage.h"

/* ---- what comes in --------------------------------------------------------------------------- */

/* Receive messages of one and of three packets across the PSN wrap-around. Each acknowledgement
 * contains the MSN. */
static void incoming_messages_are_received_and_acknowledged(struct stage *stage)
{
	post_receive_at(&stage->side, 1, 0, 1000);
	post_receive_at(&stage->side, 2, 1000, 1000);
	send_request(stage, SOFT_ROCE_SEND_ONLY, 7);
	CHECK_EQUAL(expect_response(stage, PEER_PSN, DONE).msn, 1);
	CHECK_EQUAL(expect_wc(&stage->side, 1, IBV_WC_SUCCESS).byte_len, 7);
	CHECK(!memcmp(stage->side.memory, payload, 7));
	send_request(stage, SOFT_ROCE_SEND_FIRST, MTU);
	send_request(stage, SOFT_ROCE_SEND_MIDDLE, MTU);
	send_request(stage, SOFT_ROCE_SEND_LAST_IMMEDIATE, 3);
	struct ibv_wc wc = expect_wc(&stage->side, 2, IBV_WC_SUCCESS);

	CHECK_EQUAL(wc.byte_len, 2 * MTU + 3);
	CHECK_EQUAL(wc.imm_data, htonl(78));
	CHECK(!memcmp(stage->side.memory + 1000 + MTU, payload, MTU));
	while (next_packet(stage, SOFT_ROCE_ACKNOWLEDGE).psn != ((PEER_PSN + 3) & 0xffffff))
		;
	expect_no_response(stage);
}

/* A gap causes a single NAK, a duplicate is acknowledged again, and a missing receive causes an RNR
 * NAK. */
static void gap_causes_one_nak_and_duplicates_are_acknowledged(struct stage *stage)
{
	send_request(stage, SOFT_ROCE_SEND_ONLY, 7);
	expect_response(stage, PEER_PSN, SOFT_ROCE_RNR_NAK | 9);
	post_receive_at(&stage->side, 1, 0, 1000);
	send_request(stage, SOFT_ROCE_SEND_ONLY, 7); /* follows a refused request: discarded */
	expect_no_response(stage);
	stage->psn = PEER_PSN;
	send_request(stage, SOFT_ROCE_SEND_ONLY, 7);
	expect_response(stage, PEER_PSN, DONE);
	stage->psn += 3;
	send_request(stage, SOFT_ROCE_SEND_ONLY, 7);
	send_request(stage, SOFT_ROCE_SEND_ONLY, 7);
	expect_response(stage, PEER_PSN + 1, SOFT_ROCE_NAK | 0);
	expect_no_response(stage);
	stage->psn = PEER_PSN;
	send_request(stage, SOFT_ROCE_SEND_ONLY, 7);
	expect_response(stage, PEER_PSN, DONE);
	expect_wc(&stage->side, 1, IBV_WC_SUCCESS);
	CHECK_EQUAL(state_of(&stage->side), IBV_QPS_RTS);
}

static void invalid_packets_are_dropped_without_response(void)
{
	static const struct {
		uint8_t opcode;
		uint32_t length;
	} impossible[] = {
		{SOFT_ROCE_UC | SOFT_ROCE_SEND_ONLY, 7},
		{SOFT_ROCE_UD | SOFT_ROCE_SEND_ONLY, 7},
		{SOFT_ROCE_XRC | SOFT_ROCE_SEND_ONLY, 7},
		{SOFT_ROCE_CNP, SOFT_ROCE_CNP_PAYLOAD},
		{SOFT_ROCE_ACKNOWLEDGE, 0}, /* acknowledges a packet that was never sent */
		{SOFT_ROCE_ATOMIC_ACKNOWLEDGE, 0},
		{SOFT_ROCE_READ_RESPONSE_ONLY, 7},
		{SOFT_ROCE_READ_RESPONSE_FIRST, MTU},
	};
	struct stage stage;
	struct soft_roce_packet packet;
	uint8_t bytes[LONGEST];
	size_t length;

	open_stage(&stage, (struct options){0});
	post_receive_at(&stage.side, 1, 0, 1000);
	FOR_EACH (i, impossible)
		send_packet(&stage, packet_of(&stage, impossible[i].opcode, impossible[i].length));
	packet = packet_of(&stage, SOFT_ROCE_SEND_ONLY, 7);
	packet.dest_qpn ^= 1;
	send_packet(&stage, packet);
	packet = packet_of(&stage, SOFT_ROCE_SEND_ONLY, 7);
	packet.pkey = 0x1234;
	send_packet(&stage, packet);
	/* Packets from another host are dropped, whether their ICRC is valid for the address of
	 * that host or for the address of the peer. */
	packet = packet_of(&stage, SOFT_ROCE_SEND_ONLY, 7);
	send_bytes(stage.stranger, bytes, build(bytes, stranger_gid, &packet));
	send_bytes(stage.stranger, bytes, build(bytes, peer_gid, &packet));
	/* Send the packet with each bit flipped, except FECN, BECN and the reserved bits next to
	 * them, which a network may change. */
	length = build(bytes, peer_gid, &packet);
	for (size_t bit = 0; bit < 8 * length; bit++) {
		if (bit / 8 == 4)
			continue;
		bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
		send_bytes(stage.peer, bytes, length);
		bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
	}
	/* Send the packet truncated to each length. */
	for (size_t cut = 1; cut < length; cut++)
		send_bytes(stage.peer, bytes, cut);
	expect_no_response(&stage);
	send_request(&stage, SOFT_ROCE_SEND_ONLY, 7);
	CHECK_EQUAL(expect_response(&stage, PEER_PSN, DONE).msn, 1);
	expect_wc(&stage.side, 1, IBV_WC_SUCCESS);
	CHECK_EQUAL(state_of(&stage.side), IBV_QPS_RTS);
	close_stage(&stage);
}

/* A request whose length does not fit its position in the message puts an RC queue pair in the
 * error state, but only if the request has the expected PSN (IBTA 9.7.4.1.6). A UC queue pair drops
 * the request. */
static void request_of_wrong_length_is_refused_or_dropped(void)
{
	static const struct {
		uint8_t opcode;
		uint32_t length, dma_length;
		bool goes_on; /* follows the first packet of a SEND */
	} wrong[] = {
		{SOFT_ROCE_SEND_FIRST, MTU - 1, 0, false},
		{SOFT_ROCE_SEND_FIRST, 2 * MTU, 0, false},
		{SOFT_ROCE_SEND_MIDDLE, MTU + 1, 0, true},
		{SOFT_ROCE_SEND_LAST, 0, 0, true},
		{SOFT_ROCE_SEND_ONLY, MTU + 1, 0, false},
		{SOFT_ROCE_WRITE_ONLY, 7, UINT32_MAX, false},
		{SOFT_ROCE_READ_REQUEST, 0, UINT32_MAX, false},
		{SOFT_ROCE_FLUSH, 0, UINT32_MAX, false},
	};

	for (size_t i = 0; i < 2 * COUNT_OF(wrong); i++) {
		const uint8_t service = i % 2 ? SOFT_ROCE_UC : SOFT_ROCE_RC;
		struct stage stage;
		struct soft_roce_packet packet;

		if (soft_roce_headers(service | wrong[i / 2].opcode) < 0)
			continue;
		open_stage(&stage, (struct options){.uc = service});
		post_receive_at(&stage.side, 1, 0, 1000);
		if (wrong[i / 2].goes_on)
			send_request(&stage, service | SOFT_ROCE_SEND_FIRST, MTU);
		if (wrong[i / 2].goes_on && !service)
			expect_response(&stage, PEER_PSN, DONE);
		packet = packet_of(&stage, service | wrong[i / 2].opcode, wrong[i / 2].length);
		packet.dma_length = wrong[i / 2].dma_length;
		packet.psn++;
		if (!service) { /* a gap */
			send_packet(&stage, packet);
			expect_response(&stage, stage.psn, SOFT_ROCE_NAK | 0);
		}
		packet.psn--;
		send_packet(&stage, packet);
		if (service) {
			send_request(&stage, SOFT_ROCE_UC | SOFT_ROCE_SEND_ONLY, 7);
			CHECK_EQUAL(expect_wc(&stage.side, 1, IBV_WC_SUCCESS).byte_len, 7);
		} else {
			expect_response(&stage, stage.psn, SOFT_ROCE_NAK | 1);
			expect_wc(&stage.side, 1, IBV_WC_WR_FLUSH_ERR);
			CHECK_EQUAL(state_of(&stage.side), IBV_QPS_ERR);
		}
		expect_no_response(&stage);
		close_stage(&stage);
	}
}

/* A READ is answered with one packet per MTU. A READ with a wrong key is answered only with a
 * NAK. */
static void read_response_has_one_packet_per_mtu(struct stage *stage)
{
	struct soft_roce_packet packet;

	memset(stage->side.memory, 0x5a, 3 * MTU);
	packet = packet_of(stage, SOFT_ROCE_READ_REQUEST, 0);
	packet.address = (uintptr_t)stage->side.memory;
	packet.rkey = stage->side.mr->rkey;
	packet.dma_length = 2 * MTU + 5;
	send_packet(stage, packet);
	packet = next_packet(stage, SOFT_ROCE_READ_RESPONSE_FIRST);
	CHECK_EQUAL(packet.length, MTU);
	CHECK_EQUAL(packet.payload[MTU - 1], 0x5a);
	CHECK_EQUAL(packet.msn, 1);
	packet = next_packet(stage, SOFT_ROCE_READ_RESPONSE_MIDDLE);
	CHECK_EQUAL(packet.psn, (PEER_PSN + 1) & 0xffffff);
	packet = next_packet(stage, SOFT_ROCE_READ_RESPONSE_LAST);
	CHECK_EQUAL(packet.length, 5);
	CHECK_EQUAL(packet.syndrome, DONE);
	stage->psn = (PEER_PSN + 3) & 0xffffff;
	packet = packet_of(stage, SOFT_ROCE_READ_REQUEST, 0);
	packet.address = (uintptr_t)stage->side.memory;
	packet.rkey = stage->side.mr->rkey ^ 0x100;
	packet.dma_length = 1 << 20;
	send_packet(stage, packet);
	expect_response(stage, PEER_PSN + 3, SOFT_ROCE_NAK | 2);
	expect_no_response(stage);
}

/* Open a stage whose queue pair and memory allow FLUSH. */
static void open_flush_stage(struct stage *stage, struct options options)
{
	options.rights = ALL_RIGHTS | IBV_ACCESS_FLUSH_GLOBAL;
	open_stage(stage, options);
	CHECK_OK(verbs->ibv_dereg_mr(stage->side.mr));
	CHECK(stage->side.mr = verbs->ibv_reg_mr(stage->side.pd, stage->side.memory, 65536,
						 (int)options.rights));
}

/* Build a request that accesses the side's memory. Its PSN is the peer's first PSN plus
 * `number`. */
static struct soft_roce_packet remote_request(const struct stage *stage, uint8_t opcode,
					      uint32_t number)
{
	struct soft_roce_packet packet =
		packet_of(stage, opcode, opcode == SOFT_ROCE_ATOMIC_WRITE ? 8 : 0);

	packet.psn = (PEER_PSN + number) & 0xffffff;
	packet.address = (uintptr_t)stage->side.memory;
	packet.rkey = stage->side.mr->rkey;
	packet.dma_length = 8;
	packet.flush = IBV_FLUSH_GLOBAL;
	return packet;
}

/* Expect a "READ response only" packet without data (IBTA annex A19). */
static void expect_empty(const struct stage *stage, uint32_t number, uint32_t msn)
{
	const uint32_t psn = (PEER_PSN + number) & 0xffffff;
	const uint8_t right[] = {
		0x10,
		0x40,
		0xff,
		0xff,
		0,
		0x12,
		0x34,
		0x56,
		0,
		(uint8_t)(psn >> 16),
		(uint8_t)(psn >> 8),
		(uint8_t)psn,
		0x1f,
		0,
		0,
		(uint8_t)msn,
	};
	uint8_t bytes[LONGEST];

	CHECK(has_packet_within(stage->peer, WAIT_MS));
	CHECK_EQUAL(recv(stage->peer, bytes, sizeof(bytes), MSG_PEEK), sizeof(right) + 4);
	CHECK(!memcmp(bytes, right, sizeof(right)));
	next_packet(stage, SOFT_ROCE_READ_RESPONSE_ONLY);
}

/* Each ATOMIC WRITE and each FLUSH gets its own response. Duplicates are answered again, but a
 * duplicate ATOMIC WRITE does not write again. */
static void atomic_write_and_flush_get_empty_read_responses(void)
{
	struct stage stage;

	open_flush_stage(&stage, (struct options){0});
	send_packet(&stage, remote_request(&stage, SOFT_ROCE_ATOMIC_WRITE, 0));
	send_packet(&stage, remote_request(&stage, SOFT_ROCE_FLUSH, 1));
	expect_empty(&stage, 0, 1);
	expect_empty(&stage, 1, 2);
	stage.psn = (PEER_PSN + 2) & 0xffffff;
	post_receive_at(&stage.side, 1, 0, 1000);
	send_request(&stage, SOFT_ROCE_SEND_ONLY, 0);
	CHECK_EQUAL(expect_response(&stage, PEER_PSN + 2, DONE).msn, 3);
	expect_wc(&stage.side, 1, IBV_WC_SUCCESS);
	CHECK(!memcmp(stage.side.memory, payload, 8));
	memset(stage.side.memory, 0, 8);
	send_packet(&stage, remote_request(&stage, SOFT_ROCE_ATOMIC_WRITE, 0));
	expect_empty(&stage, 0, 3);
	send_packet(&stage, remote_request(&stage, SOFT_ROCE_FLUSH, 1));
	expect_empty(&stage, 1, 3);
	expect_no_response(&stage);
	CHECK_EQUAL(stage.side.memory[0], 0);
	close_stage(&stage);
}

/* Send packets as one run. All packets except the last must have the same length. */
static void send_packets_together(const struct stage *stage, const struct soft_roce_packet *packets,
				  int count)
{
	uint8_t bytes[3 * LONGEST];
	size_t length = 0;

	for (int i = 0; i < count; i++) {
		length += build(bytes + length, peer_gid, &packets[i]);
		if (i == 0)
			set_option(stage->peer, IPPROTO_UDP, UDP_SEGMENT, (int)length);
	}
	send_bytes(stage->peer, bytes, length);
}

/* A FLUSH whose PSN is in the past, but which does not match an earlier request, must not drop
 * waiting responses. */
static void forged_duplicate_flush_keeps_waiting_responses(struct stage *stage)
{
	send_packets_together(
		stage,
		(struct soft_roce_packet[]){remote_request(stage, SOFT_ROCE_FETCH_ADD, 0),
					    remote_request(stage, SOFT_ROCE_FLUSH, 0x800001)},
		2);
	next_packet(stage, SOFT_ROCE_ATOMIC_ACKNOWLEDGE);
}

/* Some requesters do not count FLUSHes as READs, so they may send more requests than the responder
 * has slots for. The responder treats the excess requests as lost instead of reporting an error. */
static void requests_beyond_response_slots_are_requested_again(void)
{
	struct stage stage;

	open_flush_stage(&stage, (struct options){.answers = 1});
	const struct soft_roce_packet first = remote_request(&stage, SOFT_ROCE_FLUSH, 0),
				      second = remote_request(&stage, SOFT_ROCE_FLUSH, 1),
				      third = remote_request(&stage, SOFT_ROCE_READ_REQUEST, 2);

	send_packets_together(&stage, (struct soft_roce_packet[]){first, second, third}, 3);
	expect_empty(&stage, 0, 1);
	expect_response(&stage, PEER_PSN + 1, SOFT_ROCE_NAK | 0);
	send_packets_together(&stage, (struct soft_roce_packet[]){second, third}, 2);
	expect_empty(&stage, 1, 2);
	expect_response(&stage, PEER_PSN + 2, SOFT_ROCE_NAK | 0);
	send_packet(&stage, third);
	CHECK_EQUAL(next_packet(&stage, SOFT_ROCE_READ_RESPONSE_ONLY).length, 8);
	expect_no_response(&stage);
	CHECK_EQUAL(state_of(&stage.side), IBV_QPS_RTS);
	close_stage(&stage);
}

/* ---- what goes out --------------------------------------------------------------------------- */

/* A NAK reports that the second of three packets has been lost. */
static void write_is_resent_from_the_lost_packet(struct stage *stage)
{
	const uint8_t opcodes[] = {SOFT_ROCE_WRITE_FIRST, SOFT_ROCE_WRITE_MIDDLE,
				   SOFT_ROCE_WRITE_LAST_IMMEDIATE};
	struct soft_roce_packet packet;

	const uint32_t psn = stage->side.psn;

	POST(&stage->side, IBV_WR_RDMA_WRITE_WITH_IMM, .wr_id = 5, .length = 2 * MTU + 1,
	     .imm = htonl(77), .remote = 0x1000, .rkey = 0x2000);
	for (uint32_t i = 0; i < 3; i++) {
		packet = next_packet(stage, opcodes[i]);
		CHECK_EQUAL(packet.psn, (psn + i) & 0xffffff);
		CHECK_EQUAL(packet.length, i < 2 ? MTU : 1);
		CHECK_EQUAL(packet.ack_request, i == 2);
		if (i == 0)
			CHECK(packet.address == 0x1000 && packet.rkey == 0x2000 &&
			      packet.dma_length == 2 * MTU + 1);
	}
	CHECK_EQUAL(packet.immediate, 77);
	acknowledge(stage, psn, SOFT_ROCE_NAK | 31); /* NAK code that only this device uses */
	acknowledge(stage, psn + 1, SOFT_ROCE_NAK | 0);
	CHECK_EQUAL(next_packet(stage, opcodes[1]).psn, (psn + 1) & 0xffffff);
	next_packet(stage, opcodes[2]);
	acknowledge(stage, psn + 2, DONE);
	expect_wc(&stage->side, 5, IBV_WC_SUCCESS);
	expect_no_response(stage);
}

/* The response to an ATOMIC WRITE or a FLUSH is an empty READ response (IBTA annex A19). A READ
 * response with data is dropped. Both operations count towards max_rd_atomic, which is `depth`. A
 * value of 255 stands for 0, which allows one operation at a time. */
static void atomic_write_and_flush_complete_on_empty_response(uint8_t depth)
{
	const struct address peer = address_of_peer();
	struct stage stage = {.peer = bind_udp_socket(peer_gid),
			      .stranger = bind_udp_socket(stranger_gid),
			      .psn = PEER_PSN};
	uint64_t word = 5;

	open_extended_side(
		&stage.side, (struct options){.timeout = 255, .mtu = IBV_MTU_256, .depth = depth},
		(struct extras){.operations = IBV_QP_EX_WITH_ATOMIC_WRITE | IBV_QP_EX_WITH_FLUSH});
	bring_up(&stage.side, &peer);
	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(stage.side.qp);

	qp->wr_start(qp);
	qp->wr_id = 1;
	qp->wr_atomic_write(qp, 0x2000, 0x1000, &word);
	qp->wr_id = 2;
	((struct ibv_qp_ex_newer *)qp)
		->wr_flush(qp, 0x2000, 0x1000, MTU, IBV_FLUSH_GLOBAL, IBV_FLUSH_RANGE);
	CHECK_OK(qp->wr_complete(qp));
	stage.psn = next_packet(&stage, SOFT_ROCE_ATOMIC_WRITE).psn;
	if (depth == 2)
		CHECK_EQUAL(next_packet(&stage, SOFT_ROCE_FLUSH).psn, (stage.psn + 1) & 0xffffff);
	expect_no_response(&stage);
	send_packet(&stage, packet_of(&stage, SOFT_ROCE_READ_RESPONSE_ONLY, 8));
	send_packet(&stage, packet_of(&stage, SOFT_ROCE_READ_RESPONSE_FIRST, MTU));
	for (uint64_t id = 1; id <= 2; id++) {
		expect_no_wc(&stage.side);
		send_request(&stage, SOFT_ROCE_READ_RESPONSE_ONLY, 0);
		expect_wc(&stage.side, id, IBV_WC_SUCCESS);
		if (id == 1 && depth != 2)
			CHECK_EQUAL(next_packet(&stage, SOFT_ROCE_FLUSH).psn, stage.psn);
	}
	expect_no_response(&stage);
	close_stage(&stage);
}

/* Nothing reads the sockets that send packets, so packets that arrive at their ports must not
 * accumulate in memory. */
static void source_port_sockets_queue_no_packets(struct stage *stage)
{
	struct sockaddr_in from;
	socklen_t length = sizeof(from);

	uint8_t byte;

	POST(&stage->side, IBV_WR_SEND, .wr_id = 5, .length = 1);
	CHECK(has_packet_within(stage->peer, WAIT_MS));
	CHECK_EQUAL(recvfrom(stage->peer, &byte, 1, MSG_PEEK, (struct sockaddr *)&from, &length),
		    1);
	const uint32_t psn = next_packet(stage, SOFT_ROCE_SEND_ONLY).psn;

	for (int i = 0; i < 100; i++)
		CHECK_EQUAL(sendto(stage->stranger, payload, sizeof(payload), 0,
				   (const struct sockaddr *)&from, length),
			    sizeof(payload));
	CHECK(queued_at("/proc/net/udp", ntohs(from.sin_port)) < 16 * 1024);
	acknowledge(stage, psn, DONE);
	expect_wc(&stage->side, 5, IBV_WC_SUCCESS);
}

/* The requester retries after the delay in an RNR NAK, and ignores reserved syndromes (IBTA table
 * 45). */
static void rnr_nak_delays_the_retry(struct stage *stage)
{
	const uint32_t psn = stage->side.psn;

	POST(&stage->side, IBV_WR_SEND_WITH_INV, .wr_id = 5, .length = MTU, .imm = 0x1234);
	CHECK_EQUAL(next_packet(stage, SOFT_ROCE_SEND_ONLY_INVALIDATE).rkey, 0x1234);
	acknowledge(stage, psn, 0x40);
	expect_no_response(stage);
	acknowledge(stage, psn, SOFT_ROCE_RNR_NAK | 1);
	CHECK_EQUAL(next_packet(stage, SOFT_ROCE_SEND_ONLY_INVALIDATE).psn, psn & 0xffffff);
	acknowledge(stage, psn, DONE);
	expect_wc(&stage->side, 5, IBV_WC_SUCCESS);
}

/* `refusal` makes the next sendmmsg() in any thread fail with this errno value. `splits` counts the
 * messages that the kernel must split into packets. */
static int refusal, splits;

int sendmmsg(int fd, struct mmsghdr *messages, unsigned count, int flags)
{
	const int error = __atomic_exchange_n(&refusal, 0, __ATOMIC_SEQ_CST);

	for (unsigned i = 0; i < count; i++)
		__atomic_fetch_add(&splits, messages[i].msg_hdr.msg_controllen > 0,
				   __ATOMIC_SEQ_CST);
	if (!error)
		return (int)syscall(SYS_sendmmsg, fd, messages, count, flags);
	errno = error;
	return -1;
}

/* Packets are delayed after EAGAIN, and dropped after any other error. EIO means that the kernel
 * cannot split a run into packets. The socket then sends single packets. Other sockets still send
 * runs, because they may use other network interfaces. */
static void failed_sendmmsg_delays_or_resends_packets(int error, uint32_t packets)
{
	struct stage stage;

	open_stage(&stage, (struct options){0});
	const uint32_t psn = stage.side.psn;

	__atomic_store_n(&splits, 0, __ATOMIC_SEQ_CST);
	__atomic_store_n(&refusal, error, __ATOMIC_SEQ_CST);
	POST(&stage.side, IBV_WR_SEND, .wr_id = 5, .length = packets * MTU);
	CHECK_EQUAL(__atomic_load_n(&refusal, __ATOMIC_SEQ_CST), 0);
	if (error != EAGAIN) {
		POST(&stage.side, IBV_WR_SEND, .wr_id = 6, .length = 1);
		next_packet(&stage, SOFT_ROCE_SEND_ONLY);
		acknowledge(&stage, psn, SOFT_ROCE_NAK | 0);
	}
	for (uint32_t i = 0; i < packets; i++)
		expect_send(&stage, i, packets);
	acknowledge(&stage, psn + packets - 1, DONE);
	expect_wc(&stage.side, 5, IBV_WC_SUCCESS);
	if (error == EIO)
		CHECK_EQUAL(__atomic_load_n(&splits, __ATOMIC_SEQ_CST), 1);
	close_stage(&stage);
}

/* ---- the port -------------------------------------------------------------------------------- */

struct owner_name {
	sa_family_t family;
	char prefix[14];
	uint8_t gid[16], ip_port[2];
};

/* Returns the socket name of the process that owns the port at the device's address (share.c). */
static struct owner_name owner_socket_name(void)
{
	struct owner_name name = {.family = AF_UNIX, .prefix = "\0aiordma/roce"};

	memcpy(name.gid, device_gid, sizeof(name.gid));
	return name;
}

/* The error message names the port and says how to free it. */
static void rtr_fails_with_explanation_if_port_is_in_use(struct side *side)
{
	const struct address peer = address_of_peer();
	int fd = bind_udp_socket(device_gid);
	char text[1000];

	CHECK_OK(to_init(side));
	struct capture capture = capture_stderr();
	int rc = to_rtr(side, &peer);

	end_capture(&capture, text, sizeof(text));
	CHECK_EQUAL(rc, EADDRINUSE);
	CHECK(strstr(text, "127.0.0.1, UDP port 4791") && strstr(text, "rdma link delete"));
	CHECK_EQUAL(state_of(side), IBV_QPS_INIT);
	close(fd);
	/* Another user's process may bind the owner's name without listening on it (share.c). */
	const struct owner_name name = owner_socket_name();

	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	CHECK_OK(bind(fd, (const struct sockaddr *)&name, sizeof(name)));
	CHECK_EQUAL(to_rtr(side, &peer), EADDRINUSE);
	close(fd);
	CHECK_OK(to_rtr(side, &peer));
	/* The port is closed when no queue pair needs it. */
	destroy_qp(side);
	close(bind_udp_socket(device_gid));
}

static void guest_closes_unexpected_descriptors(struct side *side)
{
	const struct address peer = address_of_peer();
	const struct owner_name name = owner_socket_name();
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(2 * sizeof(int))];
	} control = {0};
	struct msghdr message = {.msg_control = &control};
	int door = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	CHECK_OK(bind(door, (const struct sockaddr *)&name, sizeof(name)));
	CHECK_OK(listen(door, 2));
	CHECK_OK(to_init(side));
	CHECK_OK(to_rtr(side, &peer));
	int guest = accept4(door, NULL, NULL, SOCK_CLOEXEC), before = count_resources();

	CHECK(guest >= 0);
	soft_put_control(&message, SOL_SOCKET, SCM_RIGHTS, (int[]){door, door}, 2 * sizeof(int));
	CHECK_EQUAL(sendmsg(guest, &message, 0), 0);
	/* The guest treats the empty message as the end of the connection, and looks for the owner
	 * again. */
	int again = accept4(door, NULL, NULL, SOCK_CLOEXEC);

	CHECK(again >= 0);
	close(guest);
	expect_resources(before);
	destroy_qp(side);
	close(again);
	close(door);
}

int main(void)
{
	limit_seconds(120);
	for (size_t i = 0; i < sizeof(payload); i++)
		payload[i] = (uint8_t)(i * 7 + 1);
	STAGE(incoming_messages_are_received_and_acknowledged);
	STAGE(gap_causes_one_nak_and_duplicates_are_acknowledged, .rnr_timer = 9);
	STEP(invalid_packets_are_dropped_without_response());
	spec("delay=1us");
	STEP(invalid_packets_are_dropped_without_response());
	no_faults();
	STEP(request_of_wrong_length_is_refused_or_dropped());
	STAGE(read_response_has_one_packet_per_mtu);
	STEP(atomic_write_and_flush_get_empty_read_responses());
	STAGE(forged_duplicate_flush_keeps_waiting_responses);
	STEP(requests_beyond_response_slots_are_requested_again());
	STAGE(write_is_resent_from_the_lost_packet);
	STAGE(rnr_nak_delays_the_retry);
	STEP(atomic_write_and_flush_complete_on_empty_response(2));
	STEP(atomic_write_and_flush_complete_on_empty_response(1));
	STEP(atomic_write_and_flush_complete_on_empty_response(255));
	STEP(failed_sendmmsg_delays_or_resends_packets(EAGAIN, 1));
	STEP(failed_sendmmsg_delays_or_resends_packets(EMSGSIZE, 1));
	STEP(failed_sendmmsg_delays_or_resends_packets(EIO, 3));
	STEP(failed_sendmmsg_delays_or_resends_packets(EIO, 3));
	STAGE(source_port_sockets_queue_no_packets);
	SIDE(rtr_fails_with_explanation_if_port_is_in_use, 0);
	SIDE(guest_closes_unexpected_descriptors, 0);
	return 0;
}
