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

static void put(const struct stage *stage, struct soft_frame frame, const void *payload)
{
	say_frame(stage->fd, frame, payload);
}

static struct soft_frame get(const struct stage *stage, uint8_t *payload)
{
	return hear_frame(stage->fd, payload, 4 * PIECE);
}

/* Expect a NAK for a repeated READ whose memory can no longer be read. */
static void get_refusal(const struct stage *stage, uint32_t psn)
{
	struct soft_frame frame = get(stage, NULL);

	CHECK_EQUAL(frame.opcode, SOFT_NAK);
	CHECK_EQUAL(frame.syndrome, SOFT_NAK_REMOTE_ACCESS);
	CHECK_EQUAL(frame.psn, psn);
}

/* Check that the device processes all frames without responding. */
static void get_nothing(const struct stage *stage)
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

static struct soft_frame remote(const struct stage *stage, uint8_t opcode, uint32_t psn,
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
static uint64_t word(const struct stage *stage)
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
static void reads(struct stage *stage)
{
	uint8_t data[4 * PIECE];
	struct soft_frame frame;

	fill(stage->side.memory, 2 * PIECE, 1);
	put(stage, remote(stage, SOFT_READ, FIRST, 0, 2 * PIECE), NULL);
	frame = get(stage, data);
	CHECK_EQUAL(frame.opcode, SOFT_READ_DATA);
	CHECK_EQUAL(frame.length, 2 * PIECE);
	CHECK(filled(data, 2 * PIECE, 1));
	fill(stage->side.memory, 2 * PIECE, 2);
	frame = remote(stage, SOFT_READ, FIRST + 1, 0, PIECE);
	frame.address += PIECE;
	put(stage, frame, NULL);
	frame = get(stage, data);
	CHECK_EQUAL(frame.psn, FIRST + 1);
	CHECK_EQUAL(frame.length, PIECE);
	CHECK(!memcmp(data, stage->side.memory + PIECE, PIECE));
	/* Each duplicate makes the responder drop the unsent responses to later requests, because
	 * the requester will repeat those requests, too. */
	for (int again = 0; again < 4; again++)
		put(stage, remote(stage, SOFT_READ, FIRST, 0, PIECE), NULL);
	put(stage, remote(stage, SOFT_READ, FIRST + 2, 0, PIECE), NULL);
	do {
		frame = get(stage, data);
	} while (frame.psn != FIRST + 2 || frame.opcode != SOFT_READ_DATA);
	/* Request more data than the first time. */
	put(stage, remote(stage, SOFT_READ, FIRST + 2, 0, PIECE + 1), NULL);
	frame = remote(stage, SOFT_READ, FIRST, 0, PIECE);
	frame.rkey ^= 1;
	put(stage, frame, NULL);
	/* A duplicate with another key is ignored even if that key is valid, so that duplicates
	 * cannot be used to guess keys. */
	struct ibv_mr *other = verbs->ibv_reg_mr(stage->side.pd, stage->side.memory, PIECE,
						 IBV_ACCESS_REMOTE_READ);

	CHECK(other);
	frame.rkey = other->rkey;
	put(stage, frame, NULL);
	get_nothing(stage);
	CHECK_OK(verbs->ibv_dereg_mr(other));
	CHECK_EQUAL(state_of(&stage->side), IBV_QPS_RTS);
}

/* ---- the requester ------------------------------------------------------------------------- */

static struct soft_frame answer(uint8_t opcode, uint32_t psn)
{
	return (struct soft_frame){.opcode = opcode, .psn = psn};
}

/* A queue pair on a stream does not run a retry timer, because streams are reliable. */
static void no_timer(struct stage *stage)
{
	POST(&stage->side, IBV_WR_SEND);
	get(stage, NULL);
	CHECK(LOCKED(!soft_qp_of(stage->side.qp)->retry_timer.running));
}

/* At most half of the PSN space is in flight, including the PSNs of READ responses. */
static void window(struct stage *stage)
{
	struct side *side = &stage->side;
	struct ibv_mr *null = extended(side->context)->alloc_null_mr(side->pd);

	CHECK(null);
	struct ibv_sge sge = {.length = SOFT_MAX_MESSAGE, .lkey = null->lkey};
	struct ibv_send_wr *bad,
		second = {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ},
		first = second;
	const uint32_t psns = SOFT_MAX_MESSAGE / PIECE;
	struct soft_frame frame = answer(SOFT_READ_DATA, side->psn);

	first.next = &second;
	CHECK_OK(side->context->ops.post_send(side->qp, &first, &bad));
	CHECK_EQUAL(get(stage, NULL).psn, side->psn);
	get_nothing(stage);
	frame.length = PIECE;
	frame.flags = BEGIN;
	put(stage, frame, NULL);
	frame = get(stage, NULL);
	CHECK_EQUAL(frame.psn, soft_psn_add(side->psn, psns));
	CHECK_EQUAL(frame.dma_length, SOFT_MAX_MESSAGE);
	enter_state(side, IBV_QPS_ERR);
	CHECK_OK(verbs->ibv_dereg_mr(null));
}

/* ---- frames that the wire has in part ------------------------------------------------------ */

enum { LONG = SOFT_FRAME_MAX + 1000, PSNS = (LONG + PIECE - 1) / PIECE };

static uint8_t long_payload[SOFT_FRAME_MAX];

static struct soft_frame get_long(const struct stage *stage)
{
	return hear_frame(stage->fd, long_payload, sizeof(long_payload));
}

static bool is_partial(struct stage *stage)
{
	soft_lock();
	const struct soft_link *link = soft_link_of(soft_qp_of(stage->side.qp));
	bool partial = soft_tcp_path_of(link->chan.path)->output_length;

	soft_unlock();
	return partial;
}

/* Repeated responses occupy response slots. If this leaves no slot for a new READ, the responder
 * treats the READ as lost. It does not report that the requester has exceeded the limit on
 * READs. */
static void no_place(struct stage *stage)
{
	memset(stage->side.memory, 0xaa, LONG);
	put(stage, remote(stage, SOFT_READ, FIRST, 0, LONG), NULL);
	while (!is_partial(stage))
		soft_progress();
	for (int again = 0; again < 2; again++)
		put(stage, remote(stage, SOFT_READ, FIRST, 0, LONG), NULL);
	put(stage, remote(stage, SOFT_READ, FIRST + PSNS, 0, PIECE), NULL);
	while (get_long(stage).opcode != SOFT_NAK)
		;
	put(stage, remote(stage, SOFT_READ, FIRST + PSNS, 0, PIECE), NULL);
	CHECK_EQUAL(get_long(stage).psn, FIRST + PSNS);
	CHECK_EQUAL(state_of(&stage->side), IBV_QPS_RTS);
}

/* The requester may already have received the data, so the owner may have deregistered the memory.
 * In that case, the responder refuses the rest of a repeated response, but the queue pair stays
 * usable. */
static void closed_before_again(struct stage *stage)
{
	struct side *side = &stage->side;

	memset(side->memory, 0xaa, LONG);
	for (int time = 0; time < 2; time++) {
		put(stage, remote(stage, SOFT_READ, FIRST, 0, LONG), NULL);
		while (!is_partial(stage))
			soft_progress();
		if (time == 0)
			get_long(stage), get_long(stage);
	}
	CHECK_OK(verbs->ibv_dereg_mr(side->mr));
	CHECK_EQUAL(get_long(stage).psn, FIRST);
	get_refusal(stage, FIRST + SOFT_FRAME_MAX / PIECE);
	CHECK(side->mr = verbs->ibv_reg_mr(side->pd, side->memory, LONG, ALL_RIGHTS));
	put(stage, remote(stage, SOFT_READ, FIRST + PSNS, 0, PIECE), NULL);
	CHECK_EQUAL(get_long(stage).psn, FIRST + PSNS);
	CHECK_EQUAL(state_of(side), IBV_QPS_RTS);
}

static uint32_t waiting_answers(struct stage *stage)
{
	soft_progress();
	soft_lock();
	const struct soft_responder *responder = &soft_qp_of(stage->side.qp)->responder;
	uint32_t waiting = responder->response_tail - responder->response_head;

	soft_unlock();
	return waiting;
}

static void get_words(const struct stage *stage, uint32_t psn, uint64_t first)
{
	struct soft_frame frame = get_long(stage);

	CHECK_EQUAL(frame.opcode, SOFT_READ_DATA);
	CHECK_EQUAL(frame.psn, psn);
	CHECK_EQUAL(soft_take64(long_payload), first);
}

/* Raise max_dest_rd_atomic in SQD while responses are waiting (ibv_modify_qp(3)). The waiting
 * responses are still sent, and contain the data as it was before a later WRITE. READs up to the
 * new limit are answered, too. */
static void more_at_a_time(void)
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
	put(&stage, remote(&stage, SOFT_FETCH_ADD, FIRST, sizeof(arguments), 8), arguments);
	CHECK_EQUAL(get_long(&stage).opcode, SOFT_ATOMIC_DATA);
	frame = remote(&stage, SOFT_READ, FIRST + 1, 0, LONG); /* response in two frames */
	frame.address += SOURCE;
	put(&stage, frame, NULL);
	put(&stage, remote(&stage, SOFT_READ, BEHIND, 0, 8), NULL);
	put(&stage, remote(&stage, SOFT_WRITE, BEHIND + 1, 8, 8), changed);
	while (word(&stage) != changed[0])
		soft_progress();
	CHECK_EQUAL(waiting_answers(&stage), BEFORE);

	enter_state(&stage.side, IBV_QPS_SQD);
	CHECK_OK(verbs->ibv_modify_qp(stage.side.qp, &attr, IBV_QP_MAX_DEST_RD_ATOMIC));
	enter_state(&stage.side, IBV_QPS_RTS);
	for (uint32_t i = BEFORE; i < AFTER; i++) {
		frame = remote(&stage, SOFT_READ, BEHIND + i, 0, 8);
		frame.address += SOURCE + 8 * i;
		put(&stage, frame, NULL);
	}
	while (waiting_answers(&stage) != AFTER)
		;
	get_words(&stage, FIRST + 1, 1000);
	CHECK_EQUAL(get_long(&stage).psn, FIRST + 1 + SOFT_FRAME_MAX / PIECE);
	get_words(&stage, BEHIND, LEFT);
	for (uint32_t i = BEFORE; i < AFTER; i++)
		get_words(&stage, BEHIND + i, 1000 + i);
	/* A duplicate of a READ received before the limit was raised is still recognized. */
	put(&stage, remote(&stage, SOFT_READ, BEHIND, 0, 8), NULL);
	get_words(&stage, BEHIND, changed[0]);
	/* Lower the limit. Existing slots remain usable. */
	attr.max_dest_rd_atomic = BEFORE;
	enter_state(&stage.side, IBV_QPS_SQD);
	CHECK_OK(verbs->ibv_modify_qp(stage.side.qp, &attr, IBV_QP_MAX_DEST_RD_ATOMIC));
	put(&stage, remote(&stage, SOFT_READ, BEHIND + AFTER, 0, 8), NULL);
	get_words(&stage, BEHIND + AFTER, changed[0]);
	close_stage(&stage);
}

int main(void)
{
	limit_seconds(60);
	STAGE(reads);
	STAGE(no_timer, .timeout = 24, .retry_cnt = 8);
	STAGE(window);
	STAGE(no_place, .memory = LONG, .depth = 1);
	STAGE(closed_before_again, .memory = LONG);
	STEP(more_at_a_time());
	return 0;
}
