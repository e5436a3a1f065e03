/* Tests for the congestion control of RoCE v2: the window, the events that reduce it, and the
 * splitting of long READs. */
#include <netinet/udp.h>

#include "roce_stage.h"

enum {
	UNIT = 4096,
	WINDOW = 32 * 1024 / UNIT, /* initial window */
	PACKETS = 256, /* length of the long message */
};

static void open_long_stage(struct stage *stage)
{
	open_stage(stage, (struct options){.memory = PACKETS * UNIT, .mtu = IBV_MTU_4096});
}

static void post_long(struct stage *stage)
{
	POST(&stage->side, IBV_WR_SEND, .wr_id = 5, .length = PACKETS * UNIT);
}

/* Expect exactly `count` packets of the long message, starting with number `from`. */
static void expect_burst(const struct stage *stage, uint32_t from, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		expect_send(stage, from + i, PACKETS);
	expect_no_response(stage);
}

/* Acknowledge all packets before number `packet`. */
static void acknowledge_before(struct stage *stage, uint32_t packet)
{
	acknowledge(stage, stage->side.psn + packet - 1, DONE);
}

/* Report packet number `packet` as lost. */
static void report_loss(struct stage *stage, uint32_t packet)
{
	acknowledge(stage, stage->side.psn + packet, SOFT_ROCE_NAK | 0);
}

/* Open a stage with a window of 16 packets, and with packets 8 to 23 of a long message in
 * flight. */
static void open_grown(struct stage *stage)
{
	open_long_stage(stage);
	post_long(stage);
	expect_burst(stage, 0, WINDOW);
	acknowledge_before(stage, WINDOW);
	expect_burst(stage, WINDOW, 2 * WINDOW);
}

/* ---- the window ------------------------------------------------------------------------------ */

/* The window grows by the number of packets acknowledged. An acknowledgement is requested for each
 * quarter of the window. */
static void packets_in_flight_never_exceed_the_window(void)
{
	struct stage stage;

	open_long_stage(&stage);
	post_long(&stage);
	for (uint32_t i = 0; i < WINDOW; i++) {
		const uint8_t opcode = i ? SOFT_ROCE_SEND_MIDDLE : SOFT_ROCE_SEND_FIRST;

		CHECK_EQUAL(next_packet(&stage, opcode).ack_request, i % 2);
	}
	expect_no_response(&stage);
	acknowledge_before(&stage, 1);
	expect_burst(&stage, WINDOW, 2);
	acknowledge_before(&stage, WINDOW + 2);
	expect_burst(&stage, WINDOW + 2, 2 * WINDOW + 2);
	close_stage(&stage);
}

static void short_messages_are_limited_by_the_window(void)
{
	enum { LENGTH = 3, MESSAGES = 4 };
	struct stage stage;

	open_long_stage(&stage);
	for (int i = 0; i < MESSAGES; i++)
		POST(&stage.side, IBV_WR_SEND, .wr_id = 5, .length = LENGTH * UNIT);
	for (uint32_t i = 0; i < LENGTH * MESSAGES; i++) {
		static const uint8_t opcodes[LENGTH] = {SOFT_ROCE_SEND_FIRST, SOFT_ROCE_SEND_MIDDLE,
							SOFT_ROCE_SEND_LAST};

		if (i == WINDOW) {
			expect_no_response(&stage);
			acknowledge_before(&stage, 1);
			expect_no_wc(&stage.side);
			acknowledge_before(&stage, WINDOW);
		}
		next_packet(&stage, opcodes[i % LENGTH]);
	}
	acknowledge_before(&stage, LENGTH * MESSAGES);
	for (int i = 0; i < MESSAGES; i++)
		expect_wc(&stage.side, 5, IBV_WC_SUCCESS);
	close_stage(&stage);
}

static void unused_window_does_not_grow(void)
{
	struct stage stage;

	open_long_stage(&stage);
	for (uint32_t i = 0; i < 20; i++) {
		POST(&stage.side, IBV_WR_SEND, .wr_id = i, .length = UNIT);
		next_packet(&stage, SOFT_ROCE_SEND_ONLY);
		acknowledge_before(&stage, i + 1);
		expect_wc(&stage.side, i, IBV_WC_SUCCESS);
	}
	stage.side.psn += 20;
	post_long(&stage);
	expect_burst(&stage, 0, WINDOW);
	close_stage(&stage);
}

/* A loss halves the window. Further losses among the packets in flight at that time do not shrink
 * it again. The window then grows by one packet for each full window that is acknowledged. */
static void loss_halves_the_window_once(void)
{
	struct stage stage;

	open_grown(&stage);
	report_loss(&stage, WINDOW);
	expect_burst(&stage, WINDOW, WINDOW);
	report_loss(&stage, WINDOW);
	expect_burst(&stage, WINDOW, WINDOW);
	acknowledge_before(&stage, 2 * WINDOW);
	expect_burst(&stage, 2 * WINDOW, WINDOW + 1);
	acknowledge_before(&stage, 3 * WINDOW + 1);
	expect_burst(&stage, 3 * WINDOW + 1, WINDOW + 2);
	report_loss(&stage, 3 * WINDOW + 1); /* a new loss */
	expect_burst(&stage, 3 * WINDOW + 1, WINDOW / 2 + 1);
	/* An RNR NAK reports a missing receive, not a lost packet, so it does not shrink the
	 * window. */
	acknowledge(&stage, stage.side.psn + 3 * WINDOW + 1, SOFT_ROCE_RNR_NAK | 1);
	expect_burst(&stage, 3 * WINDOW + 1, WINDOW / 2 + 1);
	close_stage(&stage);
}

/* ---- congestion ------------------------------------------------------------------------------ */

static void send_notification(const struct stage *stage, int from)
{
	const struct soft_roce_packet packet =
		packet_of(stage, SOFT_ROCE_CNP, SOFT_ROCE_CNP_PAYLOAD);
	uint8_t bytes[LONGEST];

	send_bytes(from, bytes, build(bytes, peer_gid, &packet));
}

/* A congestion notification from the peer halves the window like a loss, but nothing is
 * retransmitted. */
static void congestion_notification_halves_the_window(void)
{
	struct stage stage;

	open_grown(&stage);
	send_notification(&stage, stage.stranger);
	acknowledge_before(&stage, WINDOW + 1);
	expect_burst(&stage, 3 * WINDOW, 2);
	send_notification(&stage, stage.peer);
	send_notification(&stage, stage.peer);
	expect_no_response(&stage);
	/* The window shrinks from 17 packets to 8, and then grows by one for this
	 * acknowledgement. */
	acknowledge_before(&stage, 2 * WINDOW + 2);
	expect_burst(&stage, 3 * WINDOW + 2, 1);
	close_stage(&stage);
}

/* Each notification halves the window, but not below four packets. The acknowledgement that follows
 * adds at least one packet, so the window settles at five. It grows again when the notifications
 * stop. */
static void repeated_notifications_shrink_window_to_minimum(void)
{
	static const uint32_t windows[] = {WINDOW, 6, 5, 5, 5};
	struct stage stage;
	uint32_t next = 0;

	open_long_stage(&stage);
	post_long(&stage);
	for (int i = 0; i < 5; i++) {
		expect_burst(&stage, next, windows[i]);
		next += windows[i];
		if (i < 4)
			send_notification(&stage, stage.peer);
		acknowledge_before(&stage, next);
	}
	expect_burst(&stage, next, 6);
	close_stage(&stage);
}

static void notification_without_packets_in_flight_is_ignored(void)
{
	struct stage stage;

	open_long_stage(&stage);
	POST(&stage.side, IBV_WR_SEND, .wr_id = 4, .length = 1);
	next_packet(&stage, SOFT_ROCE_SEND_ONLY);
	acknowledge_before(&stage, 1);
	expect_wc(&stage.side, 4, IBV_WC_SUCCESS);
	send_notification(&stage, stage.peer);
	expect_no_response(&stage);
	stage.side.psn++;
	post_long(&stage);
	expect_burst(&stage, 0, WINDOW);
	close_stage(&stage);
}

/* Data packets that a router has marked trigger CNPs at a limited rate, but marked acknowledgements
 * do not. */
static void marked_data_packets_trigger_limited_notifications(struct stage *stage)
{
	enum { NOT_MARKED = 2, MARKED = 3, MANY = 100, BETWEEN_NS = 50000 };

	uint64_t told = 0;

	post_receive_at(&stage->side, 1, 0, 1000);
	post_receive_at(&stage->side, 2, 0, 1000);
	set_option(stage->peer, IPPROTO_IP, IP_TOS, NOT_MARKED);
	send_request(stage, SOFT_ROCE_SEND_ONLY, 7);
	expect_response(stage, PEER_PSN, DONE);
	expect_no_response(stage);

	set_option(stage->peer, IPPROTO_IP, IP_TOS, MARKED);
	send_request(stage, SOFT_ROCE_SEND_ONLY, 7);
	const struct soft_roce_packet notification = next_packet(stage, SOFT_ROCE_CNP);

	CHECK(notification.becn && !notification.fecn && !notification.migreq);
	CHECK_EQUAL(notification.psn, 0);
	expect_response(stage, PEER_PSN + 1, DONE);

	POST(&stage->side, IBV_WR_SEND, .wr_id = 3, .length = 1);
	next_packet(stage, SOFT_ROCE_SEND_ONLY);
	acknowledge_before(stage, 1);
	expect_no_response(stage);

	stage->psn = PEER_PSN; /* duplicates, which are acknowledged again */
	const uint64_t begin = now_ns(CLOCK_MONOTONIC);

	for (int i = 0; i < MANY; i++)
		send_packet(stage, packet_of(stage, SOFT_ROCE_SEND_ONLY, 7));
	while (has_packet_within(stage->peer, QUIET_MS)) {
		uint8_t bytes[LONGEST];

		CHECK(recv(stage->peer, bytes, sizeof(bytes), 0) > 0);
		told += bytes[0] == SOFT_ROCE_CNP;
	}
	CHECK(told >= 1 &&
	      told <= 1 + (now_ns(CLOCK_MONOTONIC) - begin - QUIET_MS * 1000000) / BETWEEN_NS);
}

/* Single packets, runs and responses are sent as ECN-capable, so that routers can mark them. The
 * other bits are the queue pair's traffic class. */
static void packets_are_sent_as_ecn_capable(uint8_t traffic_class)
{
	struct stage stage;

	open_stage(&stage, (struct options){.traffic_class = traffic_class});
	post_receive_at(&stage.side, 1, 0, 1000);
	set_option(stage.peer, IPPROTO_IP, IP_RECVTOS, 1);
	POST(&stage.side, IBV_WR_SEND, .wr_id = 5, .length = 1);
	POST(&stage.side, IBV_WR_SEND, .wr_id = 6, .length = 3 * MTU);
	send_request(&stage, SOFT_ROCE_SEND_ONLY, 7);
	for (int i = 0; i < 5; i++) {
		CHECK_EQUAL(traffic_class_at(stage.peer), (traffic_class & 0xfc) | 2);
		packet_at(stage.peer);
	}
	expect_no_response(&stage);
	close_stage(&stage);
}

/* An acknowledgement is sent after the packets of the same flush. If it were sent between them, it
 * would split their run. */
static void acknowledgement_follows_packets_of_the_same_flush(void)
{
	enum { ACK = SOFT_ROCE_BTH + 4 + SOFT_ROCE_ICRC };
	uint8_t bytes[2 * LONGEST];
	struct stage stage;
	struct soft_roce_packet packet;

	open_long_stage(&stage);
	post_receive_at(&stage.side, 1, 0, 1000);
	POST(&stage.side, IBV_WR_SEND, .wr_id = 5, .length = (WINDOW + 1) * UNIT);
	for (int i = 0; i < WINDOW; i++)
		next_packet(&stage, i ? SOFT_ROCE_SEND_MIDDLE : SOFT_ROCE_SEND_FIRST);
	/* Send two packets in one run. The first opens the window, and the second requests an
	 * acknowledgement. */
	packet = packet_of(&stage, SOFT_ROCE_ACKNOWLEDGE, 0);
	packet.psn = (stage.side.psn + WINDOW - 1) & 0xffffff;
	packet.syndrome = DONE;
	CHECK_EQUAL(build(bytes, peer_gid, &packet), ACK);
	packet = packet_of(&stage, SOFT_ROCE_SEND_ONLY, 0);
	set_option(stage.peer, IPPROTO_UDP, UDP_SEGMENT, ACK);
	send_bytes(stage.peer, bytes, ACK + build(bytes + ACK, peer_gid, &packet));
	next_packet(&stage, SOFT_ROCE_SEND_LAST);
	expect_response(&stage, PEER_PSN, DONE);
	expect_no_response(&stage);
	close_stage(&stage);
}

/* A duplicate from the middle of a message is acknowledged again, because the first acknowledgement
 * may have been lost and the peer's window may not allow any other packets. */
static void duplicate_within_a_message_is_acknowledged_again(struct stage *stage)
{
	post_receive_at(&stage->side, 1, 0, 1000);
	send_request(stage, SOFT_ROCE_SEND_FIRST, MTU);
	expect_response(stage, PEER_PSN, DONE);
	send_request(stage, SOFT_ROCE_SEND_MIDDLE, MTU);
	expect_response(stage, PEER_PSN + 1, DONE);
	stage->psn = PEER_PSN;
	send_request(stage, SOFT_ROCE_SEND_FIRST, MTU);
	expect_response(stage, PEER_PSN + 1, DONE);
}

/* ---- READs ----------------------------------------------------------------------------------- */

/* Expect a request for `count` response packets, starting with number `first`. */
static void expect_read(const struct stage *stage, uint32_t first, uint32_t count)
{
	const struct soft_roce_packet packet = next_packet(stage, SOFT_ROCE_READ_REQUEST);

	CHECK_EQUAL(packet.psn, (stage->side.psn + first) & 0xffffff);
	CHECK_EQUAL(packet.address, 0x1000 + first * UNIT);
	CHECK_EQUAL(packet.rkey, 0x2000);
	CHECK_EQUAL(packet.dma_length, count * UNIT);
}

/* Send response packet `number`. The contents of each packet are different. */
static void send_read_response(const struct stage *stage, uint32_t number, bool first, bool last)
{
	static uint8_t bytes[UNIT];
	struct soft_roce_packet packet = packet_of(stage,
						   first && last ? SOFT_ROCE_READ_RESPONSE_ONLY
						   : first       ? SOFT_ROCE_READ_RESPONSE_FIRST
						   : last        ? SOFT_ROCE_READ_RESPONSE_LAST
								 : SOFT_ROCE_READ_RESPONSE_MIDDLE,
						   UNIT);

	memset(bytes, (int)number + 1, sizeof(bytes));
	packet.psn = (stage->side.psn + number) & 0xffffff;
	packet.payload = bytes;
	packet.syndrome = DONE;
	send_packet(stage, packet);
}

static void send_read_responses(const struct stage *stage, uint32_t from, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		send_read_response(stage, from + i, i == 0, i == count - 1);
}

/* A long READ is split into requests whose responses fit into the window. After a loss, the missing
 * responses are requested again, but only as many as fit into the current window. */
static void long_read_is_split_to_fit_the_window(void)
{
	struct stage stage;
	struct soft_roce_packet packet;

	open_long_stage(&stage);
	const uint32_t psn = stage.side.psn;

	POST(&stage.side, IBV_WR_RDMA_READ, .wr_id = 5, .length = PACKETS * UNIT, .remote = 0x1000,
	     .rkey = 0x2000);
	POST(&stage.side, IBV_WR_SEND, .wr_id = 6, .length = 1);
	for (uint32_t i = 0; i < WINDOW; i += 2)
		expect_read(&stage, i, 2);
	expect_no_response(&stage);
	send_read_responses(&stage, 0, 2);
	expect_read(&stage, 8, 3); /* length: a quarter of the 10-packet window, rounded up */
	expect_no_response(&stage); /* max_rd_atomic is 4 */
	send_read_response(&stage, 4, true, false);
	expect_read(&stage, 2, 2);
	expect_read(&stage, 4, 2);
	expect_no_response(&stage); /* the window is 5 packets */
	send_read_response(&stage, 2, true, false);
	expect_read(&stage, 6, 2);
	send_read_response(&stage, 4, true, false);
	expect_read(&stage, 3, 1);
	expect_read(&stage, 4, 2);
	expect_read(&stage, 6, 2);
	expect_no_response(&stage);
	/* The responses to the first requests were late, not lost. */
	send_read_response(&stage, 3, false, true);
	send_read_responses(&stage, 4, 2);
	send_read_responses(&stage, 6, 2);
	send_read_responses(&stage, 8, 3);
	for (uint32_t next = 11; next < PACKETS;) {
		packet = next_packet(&stage, SOFT_ROCE_READ_REQUEST);
		const uint32_t first = (packet.psn - psn) & 0xffffff,
			       count = packet.dma_length / UNIT;

		CHECK_EQUAL(packet.address, 0x1000 + first * UNIT);
		send_read_responses(&stage, first, count);
		next = first + count > next ? first + count : next;
	}
	expect_wc(&stage.side, 5, IBV_WC_SUCCESS);
	for (uint32_t i = 0; i < PACKETS; i++)
		CHECK(stage.side.memory[i * UNIT] == (uint8_t)(i + 1) &&
		      stage.side.memory[(i + 1) * UNIT - 1] == (uint8_t)(i + 1));
	CHECK_EQUAL(next_packet(&stage, SOFT_ROCE_SEND_ONLY).psn, (psn + PACKETS) & 0xffffff);
	acknowledge(&stage, psn + PACKETS, DONE);
	expect_wc(&stage.side, 6, IBV_WC_SUCCESS);
	close_stage(&stage);
}

/* Each part of a long READ counts as one READ towards max_rd_atomic, which allows four in
 * flight. */
static void parts_of_a_read_count_towards_max_rd_atomic(void)
{
	struct stage stage;

	open_long_stage(&stage);
	for (uint32_t i = 0; i < 4; i++)
		POST(&stage.side, IBV_WR_RDMA_READ, .wr_id = i,
		     .length = i < 3 ? UNIT : PACKETS / 2 * UNIT, .remote = 0x1000 + i * UNIT,
		     .rkey = 0x2000);
	for (uint32_t i = 0; i < 3; i++)
		expect_read(&stage, i, 1);
	expect_read(&stage, 3, 2);
	expect_no_response(&stage);
	send_read_responses(&stage, 0, 1);
	expect_wc(&stage.side, 0, IBV_WC_SUCCESS);
	expect_read(&stage, 5, 3); /* length: a quarter of the 9-packet window, rounded up */
	expect_no_response(&stage);
	close_stage(&stage);
}

int main(void)
{
	limit_seconds(120);
	STEP(packets_in_flight_never_exceed_the_window());
	STEP(short_messages_are_limited_by_the_window());
	STEP(unused_window_does_not_grow());
	STEP(loss_halves_the_window_once());
	STEP(congestion_notification_halves_the_window());
	STEP(repeated_notifications_shrink_window_to_minimum());
	STEP(notification_without_packets_in_flight_is_ignored());
	STAGE(marked_data_packets_trigger_limited_notifications);
	STEP(packets_are_sent_as_ecn_capable(0));
	STEP(packets_are_sent_as_ecn_capable(0xff));
	STEP(acknowledgement_follows_packets_of_the_same_flush());
	STAGE(duplicate_within_a_message_is_acknowledged_again);
	STEP(long_read_is_split_to_fit_the_window());
	STEP(parts_of_a_read_count_towards_max_rd_atomic());
	return 0;
}
