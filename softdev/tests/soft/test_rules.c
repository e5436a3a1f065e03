/* Rules of the InfiniBand specification (docs/semantics.md) that no other test covers in detail,
 * such as message limits, SQD, access rights and events that occur only once. */
#include "objects/objects.h"

#include "verbs_side.h"

static void expect_nothing_completes(struct side *side)
{
	for (int i = 0; i < 100; i++)
		expect_no_wc(side);
}

/* ---- receiver not ready -------------------------------------------------------------------- */

static void only_requests_with_receive_get_rnr_nak(struct side *a, struct side *b)
{
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ,
						     IBV_WR_ATOMIC_FETCH_AND_ADD};

	for (int i = 0; i < 3; i++)
		RUN(a, IBV_WC_SUCCESS, opcodes[i], .length = 8, REMOTE(b, 0));
	/* A WRITE with immediate data needs a receive even if it writes no data
	 * (IBTA 9.7.5.2.8). */
	RUN(a, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WR_RDMA_WRITE_WITH_IMM, .wr_id = 4);
}

/* ---- nothing at all, and too much ---------------------------------------------------------- */

/* A message that is one byte too long fails before its keys are checked. */
static void message_beyond_maximum_length_fails(void)
{
	for (uint32_t over = 0; over < 2; over++) {
		struct side a, b;
		struct ibv_sge sge = {.length = SOFT_MAX_MESSAGE + over};
		struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND};

		OPEN_PAIR(&a, &b);
		CHECK_OK(post_wr(&a, &wr));
		expect_wc(&a, 0, over ? IBV_WC_LOC_LEN_ERR : IBV_WC_LOC_PROT_ERR);
		close_pair(&a, &b);
	}
}

/* A request for zero bytes does not require a valid key (IBTA C9-88), but the queue pair must allow
 * the operation. */
static void empty_request_needs_no_valid_key(void)
{
	static const struct {
		enum ibv_wr_opcode opcode;
		unsigned right;
	} cases[] = {
		{IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE},
		{IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ},
	};
	struct side a, b;

	for (int i = 0; i < 2; i++) {
		struct request request = {.opcode = cases[i].opcode,
					  .wr_id = 1,
					  .remote = UINT64_MAX,
					  .rkey = 0x12345};

		OPEN_PAIR(&a, &b);
		run_request(&a, IBV_WC_SUCCESS, request);
		close_pair(&a, &b);
		OPEN_PAIR(&a, &b, .rights = ALL_RIGHTS & ~cases[i].right);
		run_request(&a, IBV_WC_REM_INV_REQ_ERR, request);
		expect_event(&b, IBV_EVENT_QP_REQ_ERR);
		close_pair(&a, &b);
	}
	/* An empty WRITE with immediate data consumes a receive, but does not write to it. */
	OPEN_PAIR(&a, &b);
	memset(b.memory, 7, 8);
	post_receive_at(&b, 2, 0, 8);
	RUN(&a, IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE_WITH_IMM, .wr_id = 1, .imm = 5);
	struct ibv_wc wc = expect_wc(&b, 2, IBV_WC_SUCCESS);

	CHECK_EQUAL(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
	CHECK_EQUAL(wc.byte_len, 0);
	CHECK_EQUAL(wc.imm_data, 5);
	CHECK_EQUAL(b.memory[0], 7);
	close_pair(&a, &b);
}

/* ---- what is held back --------------------------------------------------------------------- */

/* SQD stops only the send queue (IBTA 10.3.1.5), so the responder continues to work. The SQ_DRAINED
 * event is raised once, and only if the application has requested it. */
static void sqd_stops_only_the_send_queue(bool notify)
{
	struct side a, b;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = notify};
	const int mask = IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY;

	OPEN_PAIR(&a, &b);
	CHECK_OK(verbs->ibv_modify_qp(a.qp, &attr, mask)); /* nothing in flight */
	if (notify)
		expect_event(&a, IBV_EVENT_SQ_DRAINED);
	expect_no_event(&a);
	POST(&a, IBV_WR_SEND, .wr_id = 1, .length = 8);
	post_receive_at(&a, 2, 0, 8);
	post_receive_at(&b, 3, 0, 8);
	*(uint64_t *)(void *)(a.memory + 64) = 5;
	const struct request requests[] = {
		{.opcode = IBV_WR_SEND, .wr_id = 4, .length = 8},
		{.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		 .wr_id = 5,
		 .length = 8,
		 .offset = 128,
		 .remote = (uintptr_t)a.memory + 64,
		 .rkey = a.mr->rkey,
		 .compare_add = 1},
		{.opcode = IBV_WR_RDMA_READ,
		 .wr_id = 6,
		 .length = 8,
		 .offset = 136,
		 .remote = (uintptr_t)a.memory + 64,
		 .rkey = a.mr->rkey},
	};

	CHECK_OK(post_chain(&b, requests, 3));
	for (unsigned i = 4; i <= 6; i++)
		expect_wc(&b, i, IBV_WC_SUCCESS);
	CHECK_EQUAL(*(uint64_t *)(void *)(b.memory + 128), 5);
	CHECK_EQUAL(*(uint64_t *)(void *)(b.memory + 136), 6);
	expect_wc(&a, 2, IBV_WC_SUCCESS);
	expect_nothing_completes(&b); /* requests posted in SQD have not been sent */
	CHECK_OK(verbs->ibv_modify_qp(a.qp, &attr, IBV_QP_STATE)); /* already in SQD: no event */
	expect_no_event(&a);
	enter_state(&a, IBV_QPS_RTS);
	expect_wc(&a, 1, IBV_WC_SUCCESS);
	expect_wc(&b, 3, IBV_WC_SUCCESS);
	close_pair(&a, &b);
}

/* A local error is detected before any part of the request is sent (IBTA 10.7.2.2). */
static void local_error_is_detected_before_sending(void)
{
	enum { BIG = 1 << 20 };

	for (int reading = 0; reading < 2; reading++) {
		struct side a, b;
		struct ibv_qp_init_attr init;
		struct ibv_qp_attr attr;
		bool over = false;

		OPEN_PAIR(&a, &b, .memory = BIG);
		struct ibv_mr *mr = verbs->ibv_reg_mr(a.pd, a.memory, BIG, 0); /* no write access */

		CHECK(mr);
		struct ibv_sge sges[2] = {
			{(uintptr_t)a.memory, BIG / 2, mr->lkey},
			{(uintptr_t)a.memory, BIG / 2, reading ? mr->lkey : 0x2468},
		};
		struct ibv_send_wr wr = {
			.sg_list = sges,
			.num_sge = 2,
			.opcode = reading ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
			.wr.rdma = {(uintptr_t)b.memory, b.mr->rkey},
		};

		memset(a.memory, 1, BIG);
		CHECK_OK(post_wr(&a, &wr));
		expect_wc(&a, 0, IBV_WC_LOC_PROT_ERR);
		while (!over) { /* until everything sent has arrived */
			soft_progress();
			soft_lock();
			over = !soft_qp_of(b.qp)->link;
			soft_unlock();
		}
		CHECK_OK(verbs->ibv_query_qp(b.qp, &attr, IBV_QP_RQ_PSN, &init));
		CHECK_EQUAL(attr.rq_psn, a.psn);
		CHECK_EQUAL(b.memory[0], 0);
		CHECK_OK(verbs->ibv_dereg_mr(mr));
		close_pair(&a, &b);
	}
}

/* ---- rights ------------------------------------------------------------------------------- */

/* The access rights of a queue pair can be changed while it is in use (ibv_modify_qp(3)). */
static void access_rights_can_be_changed_in_rts(struct side *a, struct side *b)
{
	struct ibv_qp_attr attr = {.qp_access_flags = IBV_ACCESS_REMOTE_READ};

	RUN(a, IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE, .length = 8, REMOTE(b, 0));
	CHECK_OK(verbs->ibv_modify_qp(b->qp, &attr, IBV_QP_ACCESS_FLAGS));
	RUN(a, IBV_WC_SUCCESS, IBV_WR_RDMA_READ, .length = 8, REMOTE(b, 0));
	RUN(a, IBV_WC_REM_INV_REQ_ERR, IBV_WR_RDMA_WRITE, .length = 8, REMOTE(b, 0));
}

/* Automatic path migration is rejected rather than ignored, because only one path exists. */
static void path_migration_is_rejected(struct side *a, struct side *b)
{
	static const struct {
		enum ibv_mig_state state;
		int error;
	} cases[] = {
		{IBV_MIG_REARM, EOPNOTSUPP},
		{IBV_MIG_ARMED, EOPNOTSUPP},
		{IBV_MIG_MIGRATED, 0}, /* the current state */
	};

	for (int i = 0; i < 6; i++) {
		struct ibv_qp_attr attr = {.path_mig_state = cases[i % 3].state};

		CHECK_EQUAL(
			verbs->ibv_modify_qp(i < 3 ? a->qp : b->qp, &attr, IBV_QP_PATH_MIG_STATE),
			cases[i % 3].error);
	}
}

/* ---- errors and events, once each ---------------------------------------------------------- */

/* COMM_EST is raised for the first message in RTR, but not in RTS (IBTA 10.3.1.3, 11.6.3.1). */
static void comm_est_is_raised_once_in_rtr(void)
{
	struct side a, b;

	OPEN(&a);
	OPEN(&b);
	struct address at = address_of_side(&a), to = address_of_side(&b);

	bring_up(&a, &to);
	CHECK_OK(to_init(&b));
	CHECK_OK(to_rtr(&b, &at));
	for (unsigned i = 0; i < 2; i++) {
		post_receive_at(&b, i, 0, 8);
		POST(&a, IBV_WR_SEND, .wr_id = i, .length = 8);
		expect_wc(&b, i, IBV_WC_SUCCESS);
		expect_wc(&a, i, IBV_WC_SUCCESS);
		if (i == 0)
			expect_event(&b, IBV_EVENT_COMM_EST);
	}
	expect_no_event(&b);
	close_pair(&a, &b);
	OPEN_PAIR(&a, &b);
	RUN(&a, IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE);
	expect_no_event(&b);
	close_pair(&a, &b);
}

int main(void)
{
	limit_seconds(60);
	PAIR(only_requests_with_receive_get_rnr_nak, .rnr_retry = 8); /* no retries */
	STEP(message_beyond_maximum_length_fails());
	STEP(empty_request_needs_no_valid_key());
	STEP(sqd_stops_only_the_send_queue(true));
	STEP(sqd_stops_only_the_send_queue(false));
	STEP(local_error_is_detected_before_sending());
	PAIR(access_rights_can_be_changed_in_rts);
	PAIR(path_migration_is_rejected);
	STEP(comm_est_is_raised_once_in_rtr());
	return 0;
}
