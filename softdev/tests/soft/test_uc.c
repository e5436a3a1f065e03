/* Tests of unreliable connections (IBTA vol 1, 9.8.2). The responder sends no responses. It drops
 * invalid requests silently, and both queue pairs stay in RTS. */
#include "adopted_side.h"

enum { ROOM = 1 << 20 };

static const struct options uc = {.uc = true};

static struct request send_request(uint64_t wr_id, uint32_t length)
{
	return (struct request){.opcode = IBV_WR_SEND, .wr_id = wr_id, .length = length};
}

/* ---- what is dropped ----------------------------------------------------------------------- */

/* Expect `request` to complete without any effect at the responder. The SEND posted after it must
 * find the receive unused. */
static void expect_dropped(struct options options, struct request request)
{
	struct side a, b;

	options.uc = true;
	open_pair(&a, &b, options);
	if (request.remote < b.options.memory)
		request.remote += (uintptr_t)b.memory;
	if (!request.rkey)
		request.rkey = b.mr->rkey;
	request.wr_id = 1;
	post_receive_at(&b, 10, 512, 64);
	memset(b.memory, 0xee, b.options.memory);
	fill(a.memory, a.options.memory, 9);
	struct request requests[2] = {request, send_request(2, 64)};

	CHECK_OK(post_chain(&a, requests, 2));
	expect_wc(&a, 1, IBV_WC_SUCCESS);
	expect_wc(&a, 2, IBV_WC_SUCCESS);
	CHECK_EQUAL(expect_wc(&b, 10, IBV_WC_SUCCESS).byte_len, 64);
	for (size_t i = 0; i < b.options.memory; i++)
		CHECK(i - 512 < 64 ? b.memory[i] == a.memory[i - 512] : b.memory[i] == 0xee);
	CHECK_EQUAL(state_of(&a), IBV_QPS_RTS);
	CHECK_EQUAL(state_of(&b), IBV_QPS_RTS);
	expect_no_event(&a);
	expect_no_event(&b);
	close_pair(&a, &b);
}

static void invalid_requests_are_dropped_without_effect(void)
{
	const struct request write = {.opcode = IBV_WR_RDMA_WRITE, .length = 100};
	struct request request = write;

	expect_dropped(uc, send_request(1, 65)); /* longer than the receive */
	expect_dropped((struct options){.memory = ROOM},
		       send_request(1, ROOM)); /* also in several frames */
	request.rkey = 0x12345;
	expect_dropped(uc, request);
	request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
	expect_dropped(uc, request);
	request = write;
	request.remote = 65536 - 99; /* one byte beyond the region */
	expect_dropped(uc, request);
	expect_dropped((struct options){.rights = IBV_ACCESS_REMOTE_READ}, write);
}

/* Read memory that the device may be writing to. The device writes with the lock held. */
static uint8_t byte_at(const uint8_t *memory)
{
	soft_lock();
	uint8_t byte = *memory;

	soft_unlock();
	return byte;
}

/* A message without a receive is lost. A later message uses a receive posted in the meantime. */
static void message_without_receive_is_lost(struct side *a, struct side *b)
{
	/* When the WRITE has arrived, so have the SENDs before it. */
	struct request requests[4] = {
		send_request(1, 8),
		{.opcode = IBV_WR_SEND_WITH_IMM, .wr_id = 2},
		{.opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .wr_id = 3, .length = 0},
		{.opcode = IBV_WR_RDMA_WRITE,
		 .wr_id = 4,
		 .length = 8,
		 .remote = (uintptr_t)b->memory,
		 .rkey = b->mr->rkey},
	};

	a->memory[0] = 77;
	CHECK_OK(post_chain(a, requests, 4));
	for (uint64_t wr_id = 1; wr_id <= 4; wr_id++)
		expect_wc(a, wr_id, IBV_WC_SUCCESS);
	while (byte_at(b->memory) != 77)
		expect_no_wc(b);
	post_receive_at(b, 10, 0, 8);
	CHECK_OK(post(a, send_request(5, 8)));
	expect_wc(b, 10, IBV_WC_SUCCESS);
	CHECK_EQUAL(state_of(b), IBV_QPS_RTS);
	expect_no_event(b);
}

/* A receive with an invalid key causes a local error, which puts the receiver's queue pair in the
 * error state. */
static void invalid_receive_key_fails_only_the_receiver(struct side *a, struct side *b)
{
	post_wrong_recv(b, 10, 64);
	post_receive_at(b, 11, 0, 64);
	run_request(a, IBV_WC_SUCCESS, send_request(1, 64));
	expect_wc(b, 10, IBV_WC_LOC_PROT_ERR);
	expect_wc(b, 11, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQUAL(state_of(b), IBV_QPS_ERR);
	CHECK_EQUAL(state_of(a), IBV_QPS_RTS);
}

/* Frames that are valid only in RC end the stream, but the queue pair stays usable. */
static void rc_only_frames_end_the_stream_but_not_the_qp(void)
{
	static const struct soft_frame frames[] = {
		{.opcode = SOFT_READ, .psn = PEER_PSN, .dma_length = 8},
		{.opcode = SOFT_FETCH_ADD, .psn = PEER_PSN, .length = SOFT_ATOMIC_ARGUMENTS},
		{.opcode = SOFT_ACK, .flags = SOFT_FRAME_ACK, .ack = 5},
		{.opcode = SOFT_NAK, .psn = 5, .syndrome = SOFT_NAK_REMOTE_ACCESS},
		{.opcode = SOFT_RNR_NAK, .psn = 5},
		{.opcode = SOFT_READ_DATA, .psn = 5, .length = 8},
		{.opcode = SOFT_SEND, .psn = PEER_PSN, .flags = SOFT_FRAME_ACK, .ack = 5},
	};

	FOR_EACH (i, frames) {
		struct side side;
		uint8_t byte;

		open_side(&side, uc);
		int fd = adopt(&side);
		struct pollfd ended = {.fd = fd, .events = POLLIN};

		post_receive_at(&side, 1, 0, 64);
		send_stream_frame(fd, frames[i], NULL);
		while (poll(&ended, 1, 0) == 0)
			expect_no_wc(&side);
		CHECK(!receive_record_bytes(fd, &byte, 1));
		CHECK_EQUAL(state_of(&side), IBV_QPS_RTS);
		expect_no_event(&side);
		close(fd);
		close_side(&side);
	}
}

int main(void)
{
	limit_seconds(60);
	STEP(invalid_requests_are_dropped_without_effect());
	PAIR(message_without_receive_is_lost, .uc = true);
	PAIR(invalid_receive_key_fails_only_the_receiver, .uc = true);
	STEP(rc_only_frames_end_the_stream_but_not_the_qp());
	return 0;
}
