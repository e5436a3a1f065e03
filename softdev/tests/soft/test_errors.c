/* Test errors at both ends: completion status, the order of flushed requests, asynchronous events,
 * and states. */
#include "objects/objects.h"
#include "verbs_side.h"

/* Post a request to `a` that `b` refuses. It must complete with `status`, later work of both sides
 * must be flushed, and `b` must get an event of `type`. */
static void expect_refused(struct options options, struct request request,
			   enum ibv_wc_status status, enum ibv_event_type type)
{
	struct side a, b;

	open_pair(&a, &b, options);
	if (request.remote < b.options.memory)
		request.remote += (uintptr_t)b.memory;
	request.rkey ^= b.mr->rkey; /* 0 becomes the correct key */
	request.wr_id = 2;
	post_receive_at(&a, 10, 0, 8);
	post_recvs(&b, 11, 2, 8);
	/* A valid request comes first, so the invalid one has to wait for its turn. */
	struct request requests[3] = {
		{.opcode = IBV_WR_SEND, .wr_id = 1, .length = 8},
		request,
		{.opcode = IBV_WR_SEND, .wr_id = 3, .length = 8},
	};

	CHECK_OK(post_chain(&a, requests, 3));
	expect_done(&a, 1);
	expect_wc(&a, 2, status);
	expect_wc(&a, 3, IBV_WC_WR_FLUSH_ERR);
	expect_wc(&a, 10, IBV_WC_WR_FLUSH_ERR);
	expect_state(&a, IBV_QPS_ERR);
	expect_done(&b, 11);
	expect_wc(&b, 12, IBV_WC_WR_FLUSH_ERR);
	expect_state(&b, IBV_QPS_ERR);
	expect_event(&b, type);
	/* In the error state, work requests are still accepted, and then flushed
	 * (IBTA 10.3.1.7). */
	RUN(&a, IBV_WC_WR_FLUSH_ERR, IBV_WR_SEND, .wr_id = 4, .length = 8);
	post_receive_at(&a, 5, 0, 8);
	expect_wc(&a, 5, IBV_WC_WR_FLUSH_ERR);
	close_pair(&a, &b);
}

static void expect_access_refused(struct request request)
{
	expect_refused((struct options){0}, request, IBV_WC_REM_ACCESS_ERR,
		       IBV_EVENT_QP_ACCESS_ERR);
}

static void expect_invalid_refused(struct options options, struct request request)
{
	expect_refused(options, request, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
}

/* Check that a request is refused if a single bit of its key is wrong, or if its range exceeds the
 * region. */
static void wrong_key_or_range_is_a_remote_access_error(void)
{
	static const enum ibv_wr_opcode opcodes[] = {
		IBV_WR_RDMA_WRITE,           IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ,
		IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP,
	};

	for (uint32_t bit = 1; bit; bit <<= 1)
		expect_access_refused(
			(struct request){.opcode = IBV_WR_RDMA_READ, .length = 8, .rkey = bit});
	FOR_EACH (i, opcodes) {
		struct request request = {.opcode = opcodes[i], .length = 8, .rkey = 1u << 31};

		expect_access_refused(request);
		request.rkey = 0;
		request.remote = 65536 - 7; /* one byte beyond the end */
		if (opcodes[i] < IBV_WR_ATOMIC_CMP_AND_SWP)
			expect_access_refused(request);
		request.remote = UINT64_MAX - 7; /* the range wraps around */
		expect_access_refused(request);
	}
}

/* Test rights missing at the queue pair, and regions of another protection domain.
 * tests/verbs/test_posting_failures.py tests rights missing at the region. */
static void request_without_remote_rights_fails(void)
{
	static const struct {
		enum ibv_wr_opcode opcode;
		unsigned right;
	} cases[] = {
		{IBV_WR_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE},
		{IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ},
		{IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_REMOTE_ATOMIC},
	};

	for (int i = 0; i < 3; i++) {
		struct side a, b;

		expect_invalid_refused((struct options){.rights = ALL_RIGHTS & ~cases[i].right},
				       (struct request){.opcode = cases[i].opcode, .length = 8});
		OPEN_PAIR(&a, &b);
		struct ibv_pd *pd = verbs->ibv_alloc_pd(b.context);
		struct ibv_mr *mr = verbs->ibv_reg_mr(pd, b.memory, 4096, ALL_RIGHTS);

		CHECK(mr);
		RUN(&a, IBV_WC_REM_ACCESS_ERR, cases[i].opcode, .length = 8,
		    .remote = (uintptr_t)b.memory, .rkey = mr->rkey);
		dereg(mr);
		CHECK_OK(verbs->ibv_dealloc_pd(pd));
		close_pair(&a, &b);
	}
}

static void misaligned_or_short_atomic_fails(void)
{
	struct side a, b;

	for (uint64_t off = 1; off < 8; off += 3)
		expect_invalid_refused((struct options){0},
				       (struct request){.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
							.length = 8,
							.remote = off});
	OPEN_PAIR(&a, &b);
	RUN(&a, IBV_WC_LOC_LEN_ERR, IBV_WR_ATOMIC_FETCH_AND_ADD, .length = 4, REMOTE(&b, 0));
	close_pair(&a, &b);
}

/* Test an invalid local key at the receiver. test_rules.c tests one at the sender. */
static void invalid_receive_lkey_is_a_local_protection_error(struct side *a, struct side *b)
{
	post_wrong_recv(b, 4, 100);
	POST(a, IBV_WR_SEND, .wr_id = 5, .length = 8);
	expect_wc(b, 4, IBV_WC_LOC_PROT_ERR);
	expect_wc(a, 5, IBV_WC_REM_OP_ERR);
}

/* Check that a receive whose SGE is longer than its region accepts messages that fit into the
 * region. */
static void long_receive_accepts_messages_that_fit_its_region(struct side *a, struct side *b)
{
	const uint32_t room = 64;
	struct ibv_mr *mr =
		verbs->ibv_reg_mr(b->pd, b->memory + 4096, room, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sges[] = {
		{(uintptr_t)b->memory, 8, b->mr->lkey},
		{(uintptr_t)mr->addr, 1 << 20, mr->lkey},
		{(uintptr_t)b->memory, 8, 0x12345}, /* never reached */
	};
	struct ibv_recv_wr wr = {.sg_list = sges, .num_sge = 3};

	CHECK(mr);
	memset(a->memory, 7, 8 + room);
	memset(b->memory, 0, 8192);
	for (unsigned i = 0; i < 2; i++)
		CHECK_OK(post_recv_wr(b, &wr));
	DO(a, IBV_WR_SEND, .wr_id = 1, .length = 8 + room);
	CHECK_EQUAL(expect_wc(b, 0, IBV_WC_SUCCESS).byte_len, 8 + room);
	CHECK(!memcmp(a->memory, b->memory, 8) && !memcmp(a->memory + 8, mr->addr, room));
	RUN(a, IBV_WC_REM_OP_ERR, IBV_WR_SEND, .wr_id = 2, .length = 8 + room + 1);
	expect_wc(b, 0, IBV_WC_LOC_PROT_ERR);
	CHECK_EQUAL(b->memory[4096 + room], 0);
	CHECK_OK(verbs->ibv_dereg_mr(mr));
}

static void reads_beyond_responder_depth_are_refused(void)
{
	struct side a, b;

	/* The requester's READ depth is greater than the responder's. */
	OPEN(&a, .depth = 16, .memory = 1 << 20);
	OPEN(&b, .depth = 16, .answers = 1, .memory = 1 << 20);
	connect_pair(&a, &b);
	struct request reads[8];

	for (uint64_t i = 0; i < 8; i++)
		reads[i] = (struct request){
			.opcode = IBV_WR_RDMA_READ, .wr_id = i, .length = 1 << 20, REMOTE(&b, 0)};
	CHECK_OK(post_chain(&a, reads, 8));
	/* Over RoCE, one READ consists of several requests, the second of which exceeds the
	 * depth. */
	const unsigned whole = links_are("roce") ? 0 : 1;

	if (whole)
		expect_done(&a, 0);
	expect_wc(&a, whole, IBV_WC_REM_INV_REQ_ERR);
	for (unsigned i = whole + 1; i < 8; i++)
		expect_wc(&a, i, IBV_WC_WR_FLUSH_ERR);
	close_pair(&a, &b);

	/* The value 255 sets the READ depth to 0, so this READ could never be sent. */
	OPEN_PAIR(&a, &b, .depth = 255);
	RUN(&a, IBV_WC_LOC_QP_OP_ERR, IBV_WR_RDMA_READ, .wr_id = 1, .length = 8, REMOTE(&b, 0));
	close_pair(&a, &b);
}

static void post_rejects_wrong_state_sge_count_and_full_queue(void)
{
	struct side a, b;
	struct ibv_sge sges[5] = {{0}};
	struct ibv_send_wr wr = {.sg_list = sges, .num_sge = 5, .opcode = IBV_WR_SEND}, *bad = NULL;
	struct ibv_recv_wr recv = {.sg_list = sges, .num_sge = 5}, *bad_recv = NULL;
	const struct request send = {.opcode = IBV_WR_SEND, .length = 8};

	OPEN(&a, .sends = 4, .receives = 4);
	OPEN(&b);
	struct address address_a = address_of_side(&a), address_b = address_of_side(&b);

	/* Sends are refused until RTS, and receives until INIT (IBTA 10.3.1). */
	CHECK_EQUAL(post(&a, send), EINVAL);
	CHECK_EQUAL(post_recv_at(&a, 0, 0, 8), EINVAL);
	CHECK_OK(to_init(&a));
	CHECK_EQUAL(post(&a, send), EINVAL);
	post_receive_at(&a, 0, 0, 8);
	CHECK_OK(to_rtr(&a, &address_b));
	CHECK_EQUAL(post(&a, send), EINVAL);
	CHECK_OK(to_rts(&a));

	/* The number of SGEs is too high or negative. */
	CHECK_EQUAL(a.context->ops.post_send(a.qp, &wr, &bad), EINVAL);
	CHECK(bad == &wr);
	CHECK_EQUAL(a.context->ops.post_recv(a.qp, &recv, &bad_recv), EINVAL);
	CHECK(bad_recv == &recv);
	wr.num_sge = -1;
	CHECK_EQUAL(a.context->ops.post_send(a.qp, &wr, &bad), EINVAL);

	/* The queue has room for four requests of the chain. `bad` points to the fifth. */
	struct ibv_send_wr chain[6];

	for (int i = 0; i < 6; i++)
		chain[i] = (struct ibv_send_wr){.wr_id = (uint64_t)i,
						.opcode = IBV_WR_SEND,
						.next = i < 5 ? &chain[i + 1] : NULL};
	CHECK_EQUAL(a.context->ops.post_send(a.qp, chain, &bad), ENOMEM);
	CHECK(bad == &chain[4]);
	post_recvs(&a, 0, 3, 8);
	CHECK_EQUAL(post_recv_at(&a, 0, 0, 8), ENOMEM);

	bring_up(&b, &address_a);
	post_recvs(&b, 0, 4, 8);
	for (unsigned i = 0; i < 4; i++)
		expect_done(&a, i);
	close_pair(&a, &b);
}

/* Check that a CQ overrun stops all further completions and moves the CQ's queue pair to the error
 * state (IBTA 11.6.3.2). The CQ and the queue pair each raise one event, and the CQ remains
 * unusable. */
static void cq_overrun_stops_cq_and_fails_its_queue_pairs(void)
{
	struct side a, b;
	struct ibv_wc wc[8];

	OPEN(&a, .cqe = 4);
	OPEN(&b);
	connect_pair(&a, &b);
	for (unsigned i = 0; i < 5; i++) {
		post_receive_at(&b, i, 0, 8);
		POST(&a, IBV_WR_SEND, .wr_id = i, .length = 8);
	}
	for (unsigned i = 0; i < 5; i++)
		expect_done(&b, i);
	expect_event(&a, IBV_EVENT_CQ_ERR);
	expect_event(&a, IBV_EVENT_QP_FATAL);
	expect_no_event(&a);
	expect_state(&a, IBV_QPS_ERR);
	CHECK_EQUAL(poll_cq(&a, 8, wc), 4);
	for (unsigned i = 0; i < 4; i++)
		CHECK_EQUAL(wc[i].wr_id, i);
	for (int again = 0; again < 2; again++)
		CHECK_EQUAL(poll_cq(&a, 8, wc), -1);
	close_pair(&a, &b);
}

/* Check that resetting or destroying a queue pair removes its unpolled completions from a shared
 * CQ. Events already raised for them remain. */
static void reset_or_destroy_removes_unpolled_completions(bool destroyed)
{
	struct side a, b;
	struct ibv_wc wc[8];
	struct ibv_cq *cq;
	void *context;

	OPEN(&a, .cqe = 7);
	OPEN(&b);
	CHECK_OK(verbs->ibv_destroy_qp(b.qp));
	struct ibv_cq *spare = b.cq;

	b.cq = a.cq; /* one CQ for both queue pairs */
	b.qp = create_qp(&b);
	connect_pair(&a, &b);
	/* Advance the ring, so that the completions below wrap around its end. */
	for (unsigned i = 0; i < 5; i++) {
		DO(&a, IBV_WR_RDMA_WRITE, .wr_id = i);
	}
	CHECK_OK(a.context->ops.req_notify_cq(a.cq, 0));
	for (unsigned i = 0; i < 3; i++) {
		post_receive_at(&b, 10 + i, 0, 8);
		POST(&a, IBV_WR_SEND, .wr_id = i, .length = 8);
	}
	/* Wait for the event, and then for all six completions, without polling the CQ. */
	CHECK_OK(verbs->ibv_get_cq_event(a.channel, &cq, &context));
	verbs->ibv_ack_cq_events(cq, 1);
	while (__atomic_load_n(&soft_cq_of(a.cq)->count, __ATOMIC_ACQUIRE) != 6)
		sched_yield();
	CHECK_OK(a.context->ops.req_notify_cq(a.cq, 0));
	if (destroyed)
		CHECK_OK(verbs->ibv_destroy_qp(a.qp));
	else
		CHECK_OK(to_state(&a, IBV_QPS_RESET));
	CHECK_EQUAL(poll_cq(&b, 8, wc), 3);
	for (unsigned i = 0; i < 3; i++) {
		CHECK_EQUAL(wc[i].wr_id, 10 + i);
		CHECK_EQUAL(wc[i].qp_num, b.qp->qp_num);
	}
	CHECK_EQUAL(poll_cq(&b, 1, wc), 0);
	if (destroyed)
		a.qp = NULL;
	CHECK_OK(to_state(&b, IBV_QPS_RESET));
	destroy_qp(&b);
	b.cq = spare;
	close_pair(&b, &a);
}

static void reset_removes_completions_from_both_cqs(struct side *a)
{
	struct ibv_cq *receives = verbs->ibv_create_cq(a->context, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr init = {.send_cq = a->cq,
					.recv_cq = receives,
					.qp_type = IBV_QPT_RC,
					.cap = {4, 4, 1, 1, 0}};

	destroy_qp(a);
	CHECK(a->qp = verbs->ibv_create_qp(a->pd, &init));
	bring_up(a, &(struct address){.qpn = 1});
	CHECK_OK(to_state(a, IBV_QPS_ERR));
	POST(a, IBV_WR_SEND, .length = 8);
	post_receive_at(a, 1, 0, 8);
	CHECK_OK(to_state(a, IBV_QPS_RESET));
	expect_no_wc(a);
	CHECK_EQUAL(a->context->ops.poll_cq(receives, 1, &(struct ibv_wc){0}), 0);
	destroy_qp(a);
	CHECK_OK(verbs->ibv_destroy_cq(receives));
}

int main(void)
{
	limit_seconds(90);
	STEP(wrong_key_or_range_is_a_remote_access_error());
	STEP(request_without_remote_rights_fails());
	STEP(misaligned_or_short_atomic_fails());
	PAIR(invalid_receive_lkey_is_a_local_protection_error);
	PAIR(long_receive_accepts_messages_that_fit_its_region);
	STEP(reads_beyond_responder_depth_are_refused());
	STEP(post_rejects_wrong_state_sge_count_and_full_queue());
	STEP(cq_overrun_stops_cq_and_fails_its_queue_pairs());
	STEP(reset_or_destroy_removes_unpolled_completions(false));
	STEP(reset_or_destroy_removes_unpolled_completions(true));
	SIDE(reset_removes_completions_from_both_cqs);
	return 0;
}
