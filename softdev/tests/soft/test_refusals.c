/* Test requests that the responder refuses. It refuses a request before executing any part of it,
 * and reports the first error that applies (IBTA 9.7.4.1). */
#include "verbs_side.h"

/* Post a chain whose last request is refused with `status`, and expect `event` at the responder. */
static void expect_last_refused(struct side *a, struct side *b, const struct request *requests,
				int count, enum ibv_wc_status status, enum ibv_event_type event)
{
	CHECK_OK(post_chain(a, requests, count));
	for (int i = 0; i < count; i++)
		expect_wc(a, requests[i].wr_id, i + 1 < count ? IBV_WC_SUCCESS : status);
	expect_event(b, event);
	CHECK_EQUAL(state_of(b), IBV_QPS_ERR);
}

/* An atomic counts towards max_dest_rd_atomic, like a READ (IBTA 9.7.4.3.1). */
static void atomic_beyond_responder_depth_is_refused(void)
{
	struct side a, b;

	OPEN(&a, .depth = 16, .memory = 2 << 20);
	OPEN(&b, .depth = 16, .answers = 1, .memory = 2 << 20);
	connect_pair(&a, &b);
	const struct request requests[] = {
		{.opcode = IBV_WR_RDMA_READ, .wr_id = 1, .length = 1 << 20, REMOTE(&b, 0)},
		{.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		 .wr_id = 2,
		 .length = 8,
		 .offset = 1 << 20,
		 REMOTE(&b, (1 << 20)),
		 .compare_add = 1},
	};

	expect_last_refused(&a, &b, requests, 2, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
	CHECK_EQUAL(*(uint64_t *)(void *)(b.memory + (1 << 20)), 0); /* not executed */
	close_pair(&a, &b);
}

/* A WRITE writes nothing and consumes no receive if it exceeds its region or if the region does not
 * allow remote writes. */
static void refused_write_changes_no_memory(bool immediate)
{
	enum { BIG = 1 << 20 };
	struct side a, b;

	for (int round = 0; round < 2; round++) {
		OPEN_PAIR(&a, &b, .memory = BIG, .rnr_retry = 8);
		struct ibv_mr *mr = verbs->ibv_reg_mr(b.pd, b.memory, round ? BIG : BIG - 1,
						      round ? 0 : (int)ALL_RIGHTS);

		CHECK(mr);
		memset(a.memory, 1, BIG);
		const struct request request = {
			.opcode = immediate ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE,
			.wr_id = 1,
			.length = BIG,
			.remote = (uintptr_t)b.memory,
			.rkey = mr->rkey,
		};

		/* No receive is posted, but the access error takes precedence over the RNR NAK. */
		expect_last_refused(&a, &b, &request, 1, IBV_WC_REM_ACCESS_ERR,
				    IBV_EVENT_QP_ACCESS_ERR);
		for (size_t i = 0; i < BIG; i++)
			CHECK_EQUAL(b.memory[i], 0);
		CHECK_OK(verbs->ibv_dereg_mr(mr));
		close_pair(&a, &b);
	}
}

/* The remote address of an atomic must be aligned (C9-104). On this device, the memory at that
 * address must be aligned, too. If the region has its own IOVA, one can be aligned without the
 * other. */
static void misaligned_atomic_is_refused(void)
{
	static const uint64_t addresses[2] = {0x10000, 0x10004};
	struct side a, b;

	for (int i = 0; i < 2; i++) {
		OPEN_PAIR(&a, &b);
		struct ibv_mr *mr =
			verbs->ibv_reg_mr_iova2(b.pd, b.memory + 4, 4096, 0x10000, ALL_RIGHTS);

		CHECK(mr);
		const struct request request = {
			.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
			.wr_id = 1,
			.length = 8,
			.remote = addresses[i],
			.rkey = mr->rkey,
			.compare_add = 1,
		};

		expect_last_refused(&a, &b, &request, 1, IBV_WC_REM_INV_REQ_ERR,
				    IBV_EVENT_QP_REQ_ERR);
		for (int at = 0; at < 32; at++)
			CHECK_EQUAL(b.memory[at], 0);
		CHECK_OK(verbs->ibv_dereg_mr(mr));
		close_pair(&a, &b);
	}
}

int main(void)
{
	limit_seconds(60);
	STEP(atomic_beyond_responder_depth_is_refused());
	STEP(refused_write_changes_no_memory(false));
	STEP(refused_write_changes_no_memory(true));
	STEP(misaligned_atomic_is_refused());
	return 0;
}
