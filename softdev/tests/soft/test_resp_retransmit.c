/* Frame-level tests of the reliability protocol for cases that tests/pair cannot produce: a slow
 * reader, guessed keys, and half of the PSN space in flight (IBTA vol 1, 9.7.4.1.2, 9.7.5.1,
 * 9.7.6.1). The test acts as the peer. */
#include "adopted_side.h"
#include "extended_side.h"
#include "link/link_internal.h"

enum {
	FIRST = PEER_PSN,
	PIECE = 256, /* path MTU, the payload of one PSN */
	BEGIN = SOFT_FRAME_MORE,
};

struct stage {
	struct side side;
	int fd; /* the other end of the stream */
};

static void send_frame(const struct stage *stage, struct soft_frame frame, const void *payload)
{
	send_stream_frame(stage->fd, frame, payload);
}

static struct soft_frame receive_frame(const struct stage *stage, uint8_t *payload)
{
	return receive_stream_frame(stage->fd, payload, 4 * PIECE);
}

static void expect_refusal(const struct stage *stage, uint32_t psn)
{
	struct soft_frame frame = receive_frame(stage, NULL);

	CHECK_EQUAL(frame.opcode, SOFT_NAK);
	CHECK_EQUAL(frame.syndrome, SOFT_NAK_REMOTE_ACCESS);
	CHECK_EQUAL(frame.psn, psn);
}

/* Check that the device processes all frames without responding. */
static void expect_no_response(const struct stage *stage)
{
	uint8_t byte;

	soft_progress();
	soft_progress();
	CHECK_EQUAL(recv(stage->fd, &byte, 1, MSG_DONTWAIT), -1);
	CHECK_EQUAL(errno, EAGAIN);
}

static void open_stage(struct stage *stage, struct options options)
{
	options.mtu = IBV_MTU_256;
	open_side(&stage->side, options);
	/* Limit the send buffer, so that most output waits until the test reads it. */
	stage->fd = adopt_narrow(&stage->side, 4096);
}

static void close_stage(struct stage *stage)
{
	close(stage->fd);
	close_side(&stage->side);
}

static struct soft_frame remote_request(const struct stage *stage, uint8_t opcode, uint32_t psn,
					uint32_t length, uint32_t dma_length)
{
	return (struct soft_frame){.opcode = opcode,
				   .psn = psn,
				   .length = length,
				   .dma_length = dma_length,
				   .address = (uintptr_t)stage->side.memory,
				   .rkey = stage->side.mr->rkey};
}

/* Read the first word of the memory with the lock held, because a WRITE may be changing it. */
static uint64_t first_word(const struct stage *stage)
{
	uint64_t value;

	soft_lock();
	memcpy(&value, stage->side.memory, sizeof(value));
	soft_unlock();
	return value;
}

/* ---- the responder ------------------------------------------------------------------------- */

/* A duplicate READ of all or part of the original range is executed again and returns the current
 * data. A duplicate that asks for more data or uses another key is ignored. */
static void duplicate_read_is_executed_again_within_its_range(struct stage *stage)
{
	uint8_t data[4 * PIECE];
	struct soft_frame frame;

	fill(stage->side.memory, 2 * PIECE, 1);
	send_frame(stage, remote_request(stage, SOFT_READ, FIRST, 0, 2 * PIECE), NULL);
	frame = receive_frame(stage, data);
	CHECK_EQUAL(frame.opcode, SOFT_READ_DATA);
	CHECK_EQUAL(frame.length, 2 * PIECE);
	CHECK(is_filled(data, 2 * PIECE, 1));
	fill(stage->side.memory, 2 * PIECE, 2);
	frame = remote_request(stage, SOFT_READ, FIRST + 1, 0, PIECE);
	frame.address += PIECE;
	send_frame(stage, frame, NULL);
	frame = receive_frame(stage, data);
	CHECK_EQUAL(frame.psn, FIRST + 1);
	CHECK_EQUAL(frame.length, PIECE);
	CHECK(!memcmp(data, stage->side.memory + PIECE, PIECE));
	/* Each duplicate makes the responder drop the unsent responses to later requests, because
	 * the requester will repeat those requests, too. */
	for (int again = 0; again < 4; again++)
		send_frame(stage, remote_request(stage, SOFT_READ, FIRST, 0, PIECE), NULL);
	send_frame(stage, remote_request(stage, SOFT_READ, FIRST + 2, 0, PIECE), NULL);
	do {
		frame = receive_frame(stage, data);
	} while (frame.psn != FIRST + 2 || frame.opcode != SOFT_READ_DATA);
	/* Request more data than the first time. */
	send_frame(stage, remote_request(stage, SOFT_READ, FIRST + 2, 0, PIECE + 1), NULL);
	frame = remote_request(stage, SOFT_READ, FIRST, 0, PIECE);
	frame.rkey ^= 1;
	send_frame(stage, frame, NULL);
	/* A duplicate with another key is ignored even if that key is valid, so that duplicates
	 * cannot be used to guess keys. */
	struct ibv_mr *other = verbs->ibv_reg_mr(stage->side.pd, stage->side.memory, PIECE,
						 IBV_ACCESS_REMOTE_READ);

	CHECK(other);
	frame.rkey = other->rkey;
	send_frame(stage, frame, NULL);
	expect_no_response(stage);
	CHECK_OK(verbs->ibv_dereg_mr(other));
	CHECK_EQUAL(state_of(&stage->side), IBV_QPS_RTS);
}

/* ---- the requester ------------------------------------------------------------------------- */

static struct soft_frame response_frame(uint8_t opcode, uint32_t psn)
{
	return (struct soft_frame){.opcode = opcode, .psn = psn};
}

/* A queue pair on a stream does not run a retry timer, because streams are reliable. */
static void stream_queue_pair_runs_no_retry_timer(struct stage *stage)
{
	POST(&stage->side, IBV_WR_SEND);
	receive_frame(stage, NULL);
	CHECK(LOCKED(!soft_qp_of(stage->side.qp)->retry_timer.running));
}

/* The PSNs reserved for READ responses count as in flight. */
static void at_most_half_of_the_psn_space_is_in_flight(struct stage *stage)
{
	struct side *side = &stage->side;
	struct ibv_mr *null = extended(side->context)->alloc_null_mr(side->pd);

	CHECK(null);
	struct ibv_sge sge = {.length = SOFT_MAX_MESSAGE, .lkey = null->lkey};
	struct ibv_send_wr *bad,
		second = {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ},
		first = second;
	const uint32_t psns = SOFT_MAX_MESSAGE / PIECE;
	struct soft_frame frame = response_frame(SOFT_READ_DATA, side->psn);

	first.next = &second;
	CHECK_OK(side->context->ops.post_send(side->qp, &first, &bad));
	CHECK_EQUAL(receive_frame(stage, NULL).psn, side->psn);
	expect_no_response(stage);
	frame.length = PIECE;
	frame.flags = BEGIN;
	send_frame(stage, frame, NULL);
	frame = receive_frame(stage, NULL);
	CHECK_EQUAL(frame.psn, soft_psn_add(side->psn, psns));
	CHECK_EQUAL(frame.dma_length, SOFT_MAX_MESSAGE);
	enter_state(side, IBV_QPS_ERR);
	CHECK_OK(verbs->ibv_dereg_mr(null));
}

/* ---- frames that the wire has in part ------------------------------------------------------ */

enum { LONG = SOFT_FRAME_MAX + 1000, PSNS = (LONG + PIECE - 1) / PIECE };

static uint8_t long_payload[SOFT_FRAME_MAX];

static struct soft_frame receive_long_frame(const struct stage *stage)
{
	return receive_stream_frame(stage->fd, long_payload, sizeof(long_payload));
}

static bool is_partial(struct stage *stage)
{
	soft_lock();
	const struct soft_link *link = soft_link_of(soft_qp_of(stage->side.qp));
	bool partial = soft_tcp_path_of(link->chan.path)->output_length;

	soft_unlock();
	return partial;
}

/* Repeated responses occupy response slots. A new READ that finds no free slot is treated as lost.
 * It is not reported as an error, because the requester has not exceeded its limit on READs. */
static void read_without_response_slot_is_treated_as_lost(struct stage *stage)
{
	memset(stage->side.memory, 0xaa, LONG);
	send_frame(stage, remote_request(stage, SOFT_READ, FIRST, 0, LONG), NULL);
	while (!is_partial(stage))
		soft_progress();
	for (int again = 0; again < 2; again++)
		send_frame(stage, remote_request(stage, SOFT_READ, FIRST, 0, LONG), NULL);
	send_frame(stage, remote_request(stage, SOFT_READ, FIRST + PSNS, 0, PIECE), NULL);
	while (receive_long_frame(stage).opcode != SOFT_NAK)
		;
	send_frame(stage, remote_request(stage, SOFT_READ, FIRST + PSNS, 0, PIECE), NULL);
	CHECK_EQUAL(receive_long_frame(stage).psn, FIRST + PSNS);
	CHECK_EQUAL(state_of(&stage->side), IBV_QPS_RTS);
}

/* The memory of a READ may be deregistered once the requester has the data. If the requester
 * repeats the READ, it receives a NAK, but the queue pair stays usable. */
static void repeated_read_of_deregistered_memory_is_refused(struct stage *stage)
{
	struct side *side = &stage->side;

	memset(side->memory, 0xaa, LONG);
	for (int time = 0; time < 2; time++) {
		send_frame(stage, remote_request(stage, SOFT_READ, FIRST, 0, LONG), NULL);
		while (!is_partial(stage))
			soft_progress();
		if (time == 0)
			receive_long_frame(stage), receive_long_frame(stage);
	}
	CHECK_OK(verbs->ibv_dereg_mr(side->mr));
	CHECK_EQUAL(receive_long_frame(stage).psn, FIRST);
	expect_refusal(stage, FIRST + SOFT_FRAME_MAX / PIECE);
	CHECK(side->mr = verbs->ibv_reg_mr(side->pd, side->memory, LONG, ALL_RIGHTS));
	send_frame(stage, remote_request(stage, SOFT_READ, FIRST + PSNS, 0, PIECE), NULL);
	CHECK_EQUAL(receive_long_frame(stage).psn, FIRST + PSNS);
	CHECK_EQUAL(state_of(side), IBV_QPS_RTS);
}

static uint32_t count_waiting_responses(struct stage *stage)
{
	soft_progress();
	soft_lock();
	const struct soft_responder *responder = &soft_qp_of(stage->side.qp)->responder;
	uint32_t waiting = responder->response_tail - responder->response_head;

	soft_unlock();
	return waiting;
}

static void expect_read_data(const struct stage *stage, uint32_t psn, uint64_t first)
{
	struct soft_frame frame = receive_long_frame(stage);

	CHECK_EQUAL(frame.opcode, SOFT_READ_DATA);
	CHECK_EQUAL(frame.psn, psn);
	CHECK_EQUAL(soft_get64(long_payload), first);
}

/* Raise max_dest_rd_atomic in SQD while responses are waiting (ibv_modify_qp(3)). These responses
 * must return the data from before the WRITE. READs up to the new limit must be accepted. */
static void waiting_responses_survive_a_higher_read_limit(void)
{
	enum {
		BEFORE = 2,
		AFTER = 16,
		LEFT = 100, /* value of the word after the atomic */
		SOURCE = 8192,
		BEHIND = FIRST + 1 + PSNS, /* first PSN after the long READ */
	};
	struct ibv_qp_attr attr = {.max_dest_rd_atomic = AFTER};
	uint8_t arguments[SOFT_ATOMIC_ARGUMENTS] = {LEFT}, changed[8] = {7};
	struct soft_frame frame;
	struct stage stage;

	open_stage(&stage, (struct options){.memory = SOURCE + LONG, .answers = BEFORE});
	uint64_t *words = (uint64_t *)(void *)(stage.side.memory + SOURCE);

	for (uint32_t i = 0; i < AFTER; i++)
		words[i] = 1000 + i;
	send_frame(&stage, remote_request(&stage, SOFT_FETCH_ADD, FIRST, sizeof(arguments), 8),
		   arguments);
	CHECK_EQUAL(receive_long_frame(&stage).opcode, SOFT_ATOMIC_DATA);
	frame = remote_request(&stage, SOFT_READ, FIRST + 1, 0, LONG); /* response in two frames */
	frame.address += SOURCE;
	send_frame(&stage, frame, NULL);
	send_frame(&stage, remote_request(&stage, SOFT_READ, BEHIND, 0, 8), NULL);
	send_frame(&stage, remote_request(&stage, SOFT_WRITE, BEHIND + 1, 8, 8), changed);
	while (first_word(&stage) != changed[0])
		soft_progress();
	CHECK_EQUAL(count_waiting_responses(&stage), BEFORE);

	enter_state(&stage.side, IBV_QPS_SQD);
	CHECK_OK(verbs->ibv_modify_qp(stage.side.qp, &attr, IBV_QP_MAX_DEST_RD_ATOMIC));
	enter_state(&stage.side, IBV_QPS_RTS);
	for (uint32_t i = BEFORE; i < AFTER; i++) {
		frame = remote_request(&stage, SOFT_READ, BEHIND + i, 0, 8);
		frame.address += SOURCE + 8 * i;
		send_frame(&stage, frame, NULL);
	}
	while (count_waiting_responses(&stage) != AFTER)
		;
	expect_read_data(&stage, FIRST + 1, 1000);
	CHECK_EQUAL(receive_long_frame(&stage).psn, FIRST + 1 + SOFT_FRAME_MAX / PIECE);
	expect_read_data(&stage, BEHIND, LEFT);
	for (uint32_t i = BEFORE; i < AFTER; i++)
		expect_read_data(&stage, BEHIND + i, 1000 + i);
	/* A duplicate of a READ received before the limit was raised is still recognized. */
	send_frame(&stage, remote_request(&stage, SOFT_READ, BEHIND, 0, 8), NULL);
	expect_read_data(&stage, BEHIND, changed[0]);
	/* Lower the limit. Existing slots remain usable. */
	attr.max_dest_rd_atomic = BEFORE;
	enter_state(&stage.side, IBV_QPS_SQD);
	CHECK_OK(verbs->ibv_modify_qp(stage.side.qp, &attr, IBV_QP_MAX_DEST_RD_ATOMIC));
	send_frame(&stage, remote_request(&stage, SOFT_READ, BEHIND + AFTER, 0, 8), NULL);
	expect_read_data(&stage, BEHIND + AFTER, changed[0]);
	close_stage(&stage);
}

int main(void)
{
	limit_seconds(60);
	STAGE(duplicate_read_is_executed_again_within_its_range);
	STAGE(stream_queue_pair_runs_no_retry_timer, .timeout = 24, .retry_cnt = 8);
	STAGE(at_most_half_of_the_psn_space_is_in_flight);
	STAGE(read_without_response_slot_is_treated_as_lost, .memory = LONG, .depth = 1);
	STAGE(repeated_read_of_deregistered_memory_is_refused, .memory = LONG);
	STEP(waiting_responses_survive_a_higher_read_limit());
	return 0;
}
