/* Tests of the contents of a trace: each work request and each completion must appear once and in
 * order.
 *
 * The test wraps the calls of each context and records them. The trace must match these records.
 */
#include "extended_side.h"
#include "fault_side.h"
#include "trace_side.h"
#include "ud_side.h"

enum { MOST = 4096 };

struct posted {
	const char *type;
	uint64_t wr_id;
	uint32_t number; /* of the queue pair or shared receive queue */
};

static struct {
	struct posted posts[MOST];
	int post_count;
	struct ibv_wc wcs[MOST];
	uint32_t cqs[MOST]; /* completion queue of each work completion */
	int wc_count;
	int refused;
} model;

static struct ibv_context_ops device;
static char folder[64], path[128];

/* ---- the calls, wrapped ---------------------------------------------------------------------- */

static void record_post(const char *type, uint64_t wr_id, uint32_t number)
{
	CHECK(model.post_count < MOST);
	model.posts[model.post_count++] = (struct posted){type, wr_id, number};
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	int rc = device.post_send(qp, wr, bad);

	for (; wr && !(rc && wr == *bad); wr = wr->next)
		record_post("post_send", wr->wr_id, qp->qp_num);
	model.refused += rc != 0;
	return rc;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	int rc = device.post_recv(qp, wr, bad);

	for (; wr && !(rc && wr == *bad); wr = wr->next)
		record_post("post_recv", wr->wr_id, qp->qp_num);
	model.refused += rc != 0;
	return rc;
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	int rc = device.post_srq_recv(srq, wr, bad);

	for (; wr && !(rc && wr == *bad); wr = wr->next)
		record_post("post_srq_recv", wr->wr_id, srq->handle);
	model.refused += rc != 0;
	return rc;
}

static int poll_wrapped(struct ibv_cq *cq, int room, struct ibv_wc *wc)
{
	int count = device.poll_cq(cq, room, wc);

	for (int i = 0; i < count; i++) {
		CHECK(model.wc_count < MOST);
		model.cqs[model.wc_count] = cq->handle;
		model.wcs[model.wc_count++] = wc[i];
	}
	return count;
}

static void wrap_calls(struct side *side)
{
	device = side->context->ops;
	side->context->ops.post_send = post_send;
	side->context->ops.post_recv = post_recv;
	side->context->ops.post_srq_recv = post_srq_recv;
	side->context->ops.poll_cq = poll_wrapped;
}

/* ---- comparing ------------------------------------------------------------------------------- */

static bool is_post(const char *line)
{
	return is_type(line, "post_send") || is_type(line, "post_recv") ||
	       is_type(line, "post_srq_recv");
}

static void compare_posts(void)
{
	int at = 0;

	for (size_t i = 0; i < trace.count; i++) {
		const char *line = trace.lines[i];

		if (!is_post(line))
			continue;
		CHECK(at < model.post_count);
		const struct posted *post = &model.posts[at];

		CHECK(is_type(line, post->type));
		CHECK_EQUAL(number_field(line, "wr_id"), post->wr_id);
		CHECK_EQUAL(number_field(line, is_type(line, "post_srq_recv") ? "srq" : "qp_num"),
			    post->number);
		CHECK_EQUAL(number_field(line, "request"), at + 1); /* request numbers are unique */
		at++;
	}
	CHECK_EQUAL(at, model.post_count);
}

static const char *const statuses[] = {
	[IBV_WC_SUCCESS] = "SUCCESS",
	[IBV_WC_LOC_PROT_ERR] = "LOC_PROT_ERR",
	[IBV_WC_WR_FLUSH_ERR] = "WR_FLUSH_ERR",
	[IBV_WC_REM_ACCESS_ERR] = "REM_ACCESS_ERR",
};
static const char *const opcodes[] = {
	[IBV_WC_SEND] = "SEND",
	[IBV_WC_RDMA_WRITE] = "RDMA_WRITE",
	[IBV_WC_RDMA_READ] = "RDMA_READ",
	[IBV_WC_COMP_SWAP] = "COMP_SWAP",
	[IBV_WC_FETCH_ADD] = "FETCH_ADD",
	[IBV_WC_RECV] = "RECV",
	[IBV_WC_RECV_RDMA_WITH_IMM] = "RECV_RDMA_WITH_IMM",
};

static void compare_completion(const char *line, const struct ibv_wc *wc)
{
	CHECK_EQUAL(number_field(line, "wr_id"), wc->wr_id);
	CHECK_EQUAL(number_field(line, "qp_num"), wc->qp_num);
	CHECK(field_is(line, "status", statuses[wc->status]));
	CHECK(field_is(line, "opcode", opcodes[wc->opcode]));
	CHECK_EQUAL(wc->status == IBV_WC_SUCCESS, field(line, "byte_len") != NULL);
	if (field(line, "byte_len"))
		CHECK_EQUAL(number_field(line, "byte_len"), wc->byte_len);
	if (field(line, "imm_data"))
		CHECK_EQUAL(number_field(line, "imm_data"), ntohl(wc->imm_data));
	CHECK_EQUAL((wc->wc_flags & IBV_WC_WITH_IMM) && wc->status == IBV_WC_SUCCESS,
		    field(line, "imm_data") != NULL);
	/* The line must name a posted request with this wr_id, and each request has only one
	 * completion. */
	uint64_t request = number_field(line, "request");

	CHECK(request >= 1 && request <= (uint64_t)model.post_count);
	CHECK_EQUAL(model.posts[request - 1].wr_id, wc->wr_id);
	CHECK(model.posts[request - 1].type);
	model.posts[request - 1].type = NULL;
}

/* Compare the completions, whose order is defined only within a completion queue. */
static void compare_completions(void)
{
	int next_of_cq[64] = {0}, seen = 0;

	EACH_LINE ("completion") {
		seen++;
		uint64_t cq = number_field(line, "cq");

		CHECK(cq < 64);
		int *at = &next_of_cq[cq];

		while (*at < model.wc_count && model.cqs[*at] != cq)
			++*at;
		CHECK(*at < model.wc_count);
		compare_completion(line, &model.wcs[(*at)++]);
	}
	CHECK_EQUAL(seen, model.wc_count);
}

/* Compare the trace with the records. The caller must have polled all completions. */
static void compare_trace_and_model(void)
{
	uint64_t before = 0;

	read_trace(path);
	CHECK(is_type(trace.lines[0], "trace"));
	CHECK_EQUAL(trace.text[trace.size - 1], '\0'); /* replaces a newline */
	/* Request numbers start at 1 only in the first trace of a process. */
	uint64_t first = 0;

	for (size_t i = 0; i < trace.count; i++) {
		char *line = trace.lines[i];

		CHECK(line[0] == '{' && line[strlen(line) - 1] == '}');
		CHECK(number_field(line, "t") >= before);
		before = number_field(line, "t");
		if (is_post(line) && !first)
			first = number_field(line, "request");
	}
	CHECK_EQUAL(count_type("refused"), model.refused);
	CHECK_EQUAL(first, 1);
	compare_posts();
	compare_completions();
}

static void drain_cq(struct side *side)
{
	struct ibv_wc wc[16];

	while (poll_cq(side, 16, wc) > 0)
		;
}

/* ---- in a process of its own each, so that the numbers begin with 1 -------------------------- */

static void (*traced_call)(void);

static void run_traced(void)
{
	start_trace(path);
	traced_call();
	aiordma_trace_stop();
}

static void traced(void (*call)(void))
{
	traced_call = call;
	in_child(run_traced);
	unlink(path);
}

static void operations_are_traced_once_and_in_order(void)
{
	struct side a, b;

	OPEN_PAIR(&a, &b, .signal_none = true);
	wrap_calls(&a);
	wrap_calls(&b);
	for (unsigned round = 0; round < 20; round++) {
		const struct request requests[] = {
			{.opcode = IBV_WR_SEND, .wr_id = 100, .length = 10},
			{.opcode = IBV_WR_RDMA_WRITE,
			 .wr_id = UINT64_MAX,
			 .length = 8,
			 REMOTE(&b, 1024)},
			{.opcode = IBV_WR_RDMA_READ,
			 .flags = IBV_SEND_SIGNALED,
			 .wr_id = 102,
			 .offset = 64,
			 .length = 5000,
			 REMOTE(&b, 0)},
			{.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
			 .flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE,
			 .wr_id = 103,
			 .length = 8,
			 REMOTE(&b, 0),
			 .compare_add = 1},
			{.opcode = IBV_WR_ATOMIC_CMP_AND_SWP,
			 .wr_id = 100,
			 .length = 8,
			 REMOTE(&b, 0)},
			{.opcode = IBV_WR_SEND_WITH_IMM,
			 .flags = IBV_SEND_SOLICITED,
			 .wr_id = 105,
			 .imm = htonl(77)},
			{.opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
			 .flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
			 .wr_id = 106,
			 .length = 16,
			 .imm = htonl(UINT32_MAX),
			 REMOTE(&b, 0)},
		};

		for (unsigned i = 0; i < 3; i++)
			post_receive_at(&b, round * 10 + i, 256 * i, 64);
		CHECK_OK(post_chain(&a, requests, 7));
		expect_wc(&a, 102, IBV_WC_SUCCESS);
		expect_wc(&a, 103, IBV_WC_SUCCESS);
		expect_wc(&a, 106, IBV_WC_SUCCESS);
		for (unsigned i = 0; i < 3; i++)
			expect_wc(&b, round * 10 + i, IBV_WC_SUCCESS);
	}
	compare_trace_and_model();
	/* Check how the trace represents requests. */
	size_t at = 0;

	CHECK(next_of("post_send", &at));
	char **lines = &trace.lines[at - 1];

	CHECK(field_is(lines[0], "opcode", "SEND") && !field(lines[0], "send_flags"));
	CHECK_EQUAL(number_field(lines[0], "length"), 10);
	CHECK_EQUAL(number_field(lines[1], "wr_id"), UINT64_MAX);
	CHECK_EQUAL(number_field(lines[1], "remote_addr"), (uintptr_t)b.memory + 1024);
	CHECK_EQUAL(number_field(lines[1], "rkey"), b.mr->rkey);
	CHECK(strstr(lines[3], "\"send_flags\":[\"FENCE\",\"SIGNALED\"],"));
	CHECK(field_is(lines[4], "opcode", "ATOMIC_CMP_AND_SWP"));
	CHECK_EQUAL(number_field(lines[5], "imm_data"), 77);
	CHECK_EQUAL(number_field(lines[6], "imm_data"), UINT32_MAX);
	close_pair(&a, &b);
}

/* Trace an error, the requests that it flushes on both sides, and requests posted afterwards. */
static void errors_and_flushed_requests_are_traced(void)
{
	struct side a, b;
	int errors = 0, events = 0;

	OPEN_PAIR(&a, &b, .signal_none = true, .sends = 8);
	wrap_calls(&a);
	wrap_calls(&b);
	post_recvs(&b, 0, 8, 64);
	const struct request requests[] = {
		{.opcode = IBV_WR_SEND, .wr_id = 1, .length = 10},
		{.opcode = IBV_WR_RDMA_READ, .wr_id = 2, .length = 8, REMOTE(&b, 0) + 256},
		{.opcode = IBV_WR_SEND, .wr_id = 3, .length = 10},
		{.opcode = IBV_WR_SEND, .flags = IBV_SEND_SIGNALED, .wr_id = 4, .length = 10},
	};

	CHECK_OK(post_chain(&a, requests, 4));
	expect_wc(&a, 2, IBV_WC_REM_ACCESS_ERR);
	expect_wc(&a, 3, IBV_WC_WR_FLUSH_ERR);
	expect_wc(&a, 4, IBV_WC_WR_FLUSH_ERR);
	RUN(&a, IBV_WC_WR_FLUSH_ERR, IBV_WR_SEND, .wr_id = 5);
	expect_wc(&b, 0, IBV_WC_SUCCESS);
	for (unsigned i = 1; i < 8; i++)
		expect_wc(&b, i, IBV_WC_WR_FLUSH_ERR);
	/* Refused requests appear in the trace, too. */
	enter_state(&a, IBV_QPS_RESET);
	CHECK_EQUAL(post(&a, (struct request){.opcode = IBV_WR_SEND, .wr_id = 6}), EINVAL);
	CHECK_OK(to_init(&a));
	post_recvs(&a, 0, 64, 64);
	CHECK_EQUAL(post_recv_at(&a, 64, 0, 64), ENOMEM);
	drain_cq(&a);
	drain_cq(&b);
	compare_trace_and_model();
	EACH_LINE ("refused")
		CHECK_EQUAL(number_field(line, "errno"),
			    number_field(line, "wr_id") == 64 ? ENOMEM : EINVAL);
	EACH_LINE ("qp_state")
		errors +=
			field_is(line, "cur_qp_state", "RTS") && field_is(line, "qp_state", "ERR");
	EACH_LINE ("async_event")
		events += field_is(line, "event_type", "QP_ACCESS_ERR") &&
			  number_field(line, "qp_num") == b.qp->qp_num;
	CHECK_EQUAL(errors, 2);
	CHECK_EQUAL(events, 1);
	close_pair(&a, &b);
}

/* Expect a single line that explains why `b` refused `request` from its peer `a`. */
static void expect_refusal(struct side *a, struct side *b, struct request request,
			   enum ibv_wc_status status, const char *reason)
{
	int found = 0;

	run_request(a, status, request);
	read_trace(path);
	EACH_LINE ("access_refused") {
		if (number_field(line, "qp_num") != b->qp->qp_num)
			continue;
		found++;
		CHECK(field_is(line, "reason", reason));
		CHECK_EQUAL(number_field(line, "rkey"), request.rkey);
		if (request.opcode == IBV_WR_SEND_WITH_INV) {
			CHECK(!field(line, "access"));
			continue;
		}
		CHECK(!strncmp(field(line, "access"), "[\"REMOTE_WRITE\"]", 16));
		CHECK_EQUAL(number_field(line, "remote_addr"), request.remote);
		CHECK_EQUAL(number_field(line, "length"), request.length);
	}
	CHECK_EQUAL(found, 1);
}

enum obstacle {
	UNKNOWN_KEY,
	REVOKED_KEY,
	OTHER_DOMAIN,
	LACKING_RIGHT,
	BEYOND,
	UNBOUND_WINDOW,
	WINDOW_OF_ANOTHER,
	QUEUE_PAIR_WITHOUT_RIGHT,
	INVALID_KEY,
	INVALIDATED_REGION,
	OBSTACLES
};

static const char *const reasons[OBSTACLES] = {
	[UNKNOWN_KEY] = "KEY",
	[REVOKED_KEY] = "KEY",
	[OTHER_DOMAIN] = "DOMAIN",
	[LACKING_RIGHT] = "RIGHT",
	[BEYOND] = "RANGE",
	[UNBOUND_WINDOW] = "WINDOW_UNBOUND",
	[WINDOW_OF_ANOTHER] = "WINDOW_QP",
	[QUEUE_PAIR_WITHOUT_RIGHT] = "QUEUE_PAIR",
	[INVALID_KEY] = "KEY",
	[INVALIDATED_REGION] = "REGION",
};

/* Bind a type 2 window to the queue pair of `owner`. Returns the window's key. */
static uint32_t bind_window_of(struct side *owner, struct ibv_mr *mr, struct ibv_mw *mw)
{
	struct ibv_send_wr *bad,
		wr = {
			.wr_id = 9,
			.opcode = IBV_WR_BIND_MW,
			.send_flags = IBV_SEND_SIGNALED,
			.bind_mw = {.mw = mw,
				    .rkey = next_key(mw->rkey),
				    .bind_info = {.mr = mr,
						  .addr = (uintptr_t)owner->memory,
						  .length = 64,
						  .mw_access_flags = IBV_ACCESS_REMOTE_WRITE}},
		};

	CHECK_OK(owner->context->ops.post_send(owner->qp, &wr, &bad));
	expect_wc(owner, 9, IBV_WC_SUCCESS);
	return wr.bind_mw.rkey;
}

static void expect_refusal_by(enum obstacle obstacle)
{
	const bool without = obstacle == QUEUE_PAIR_WITHOUT_RIGHT;
	const bool ends = obstacle == INVALID_KEY || obstacle == INVALIDATED_REGION;
	struct side a, b, other_a, other_b;

	OPEN_PAIR(&a, &b, .rights = without ? IBV_ACCESS_REMOTE_READ : 0);
	OPEN(&other_a);
	other_b = b;
	other_b.qp = create_qp(&other_b);
	other_b.options.rights = 0;
	connect_pair(&other_a, &other_b);
	struct ibv_pd *pd = verbs->ibv_alloc_pd(b.context);
	struct ibv_mr *mr =
		verbs->ibv_reg_mr(obstacle == OTHER_DOMAIN ? pd : b.pd, b.memory, 64,
				  IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND |
					  (obstacle == LACKING_RIGHT ? IBV_ACCESS_REMOTE_READ
								     : IBV_ACCESS_REMOTE_WRITE));
	struct ibv_mw *mw = b.context->ops.alloc_mw(
		b.pd, obstacle == UNBOUND_WINDOW ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2);
	struct request request = {
		.opcode = ends ? IBV_WR_SEND_WITH_INV : IBV_WR_RDMA_WRITE,
		.wr_id = 1,
		.length = 8,
		.remote = (uintptr_t)b.memory + (obstacle == BEYOND ? 60 : 8),
	};

	CHECK(pd && mr && mw);
	request.rkey = mr->rkey;
	if (obstacle == REVOKED_KEY || obstacle == UNKNOWN_KEY || obstacle == INVALID_KEY)
		CHECK_OK(verbs->ibv_dereg_mr(mr));
	if (obstacle == UNKNOWN_KEY)
		request.rkey = b.mr->rkey ^ 1;
	if (obstacle == UNBOUND_WINDOW)
		request.rkey = mw->rkey;
	if (obstacle == WINDOW_OF_ANOTHER)
		request.rkey = bind_window_of(&other_b, mr, mw);
	if (ends) {
		request.imm = request.rkey; /* same field as invalidate_rkey */
		post_receive_at(&b, 1, 0, 64);
	}
	expect_refusal(&a, &b, request, without ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_ACCESS_ERR,
		       reasons[obstacle]);
	CHECK_OK(b.context->ops.dealloc_mw(mw));
	if (obstacle != REVOKED_KEY && obstacle != UNKNOWN_KEY && obstacle != INVALID_KEY)
		CHECK_OK(verbs->ibv_dereg_mr(mr));
	CHECK_OK(verbs->ibv_dealloc_pd(pd));
	CHECK_OK(verbs->ibv_destroy_qp(other_b.qp));
	close_side(&other_a);
	close_pair(&a, &b);
}

static void refused_accesses_are_traced_with_their_reason(void)
{
	for (enum obstacle obstacle = 0; obstacle < OBSTACLES; obstacle++)
		expect_refusal_by(obstacle);
}

static void shared_receives_are_traced(void)
{
	struct side a, b;

	OPEN_PAIR(&a, &b, .shared = 8);
	wrap_calls(&a);
	wrap_calls(&b);
	for (unsigned i = 0; i < 8; i++)
		post_receive_at(&b, 50 + i, 0, 64);
	CHECK_EQUAL(post_recv_at(&b, 58, 0, 64), ENOMEM);
	for (unsigned i = 0; i < 8; i++) {
		RUN(&a, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = i, .length = i);
		CHECK_EQUAL(expect_wc(&b, 50 + i, IBV_WC_SUCCESS).byte_len, i);
	}
	for (unsigned i = 0; i < 4; i++) /* left in the queue */
		post_receive_at(&b, 60 + i, 0, 64);
	compare_trace_and_model();
	close_pair(&a, &b);
}

static void datagrams_are_traced_with_both_queue_pairs(void)
{
	struct side a, b;
	int lines = 0;

	open_ud_pair(&a, &b);
	wrap_calls(&a);
	wrap_calls(&b);
	struct ibv_ah *ah = path_to(&a, &b);

	for (unsigned i = 0; i < 10; i++) {
		post_receive_at(&b, i, 0, 100);
		CHECK_OK(ud_post(&a, (struct ud_request){.ah = ah,
							 .qpn = b.qp->qp_num,
							 .qkey = QKEY,
							 .wr_id = 20 + i,
							 .length = i,
							 .with_imm = i % 2,
							 .imm = htonl(i)}));
		expect_wc(&a, 20 + i, IBV_WC_SUCCESS);
		CHECK_EQUAL(expect_wc(&b, i, IBV_WC_SUCCESS).byte_len, GRH + i);
	}
	compare_trace_and_model();
	EACH_LINE ("post_send")
		CHECK_EQUAL(number_field(line, "remote_qpn"), b.qp->qp_num);
	EACH_LINE ("completion") {
		if (!field_is(line, "opcode", "RECV"))
			continue;
		CHECK_EQUAL(number_field(line, "src_qp"), a.qp->qp_num);
		lines++;
	}
	CHECK_EQUAL(lines, 10);
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	close_pair(&a, &b);
}

/* Poll an extended queue for `count` completions, one at a time, and record them. */
static void take_extended(struct side *side, int count)
{
	struct ibv_cq_ex *cq = as_extended(side->cq);
	struct ibv_poll_cq_attr attr = {0};

	for (int i = 0; i < count; i++) {
		while (cq->start_poll(cq, &attr))
			sched_yield();
		model.cqs[model.wc_count] = side->cq->handle;
		model.wcs[model.wc_count++] = (struct ibv_wc){
			.wr_id = cq->wr_id,
			.status = cq->status,
			.opcode = cq->read_opcode(cq),
			.byte_len = cq->read_byte_len(cq),
			.qp_num = cq->read_qp_num(cq),
		};
		cq->end_poll(cq);
	}
}

/* Trace extended completion queues and requests built with wr_* calls. A batch is posted completely
 * or not at all. */
static void extended_calls_are_traced(void)
{
	struct side a, b;

	open_extended_pair(
		&a, &b, (struct options){.signal_none = true},
		(struct extras){.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_QP_NUM,
				.operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE});
	wrap_calls(&b);
	struct ibv_qp_ex *ex = verbs->ibv_qp_to_qp_ex(a.qp);

	for (unsigned round = 0; round < 4; round++) {
		post_receive_at(&b, 40 + round, 0, 64);
		ex->wr_start(ex);
		ex->wr_id = 10 + round;
		ex->wr_flags = 0;
		ex->wr_rdma_write(ex, b.mr->rkey, (uintptr_t)b.memory);
		ex->wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.memory, 8);
		ex->wr_id = 20 + round;
		ex->wr_flags = IBV_SEND_SIGNALED;
		ex->wr_send(ex);
		ex->wr_set_inline_data(ex, "hello", 5);
		record_post("post_send", 10 + round, a.qp->qp_num);
		record_post("post_send", 20 + round, a.qp->qp_num);
		CHECK_OK(ex->wr_complete(ex));
		take_extended(&a, 1);
		take_extended(&b, 1);
	}
	/* A refused batch posts none of its requests. */
	ex->wr_start(ex);
	ex->wr_id = 90;
	ex->wr_flags = 0;
	ex->wr_send(ex);
	ex->wr_id = 91;
	ex->wr_flags = 1u << 20;
	ex->wr_send(ex);
	CHECK_EQUAL(ex->wr_complete(ex), EINVAL);
	/* The calls that build a batch report their errors in wr_complete(). */
	ex->wr_start(ex);
	ex->wr_id = 92;
	ex->wr_rdma_read(ex, b.mr->rkey, (uintptr_t)b.memory);
	CHECK_EQUAL(ex->wr_complete(ex), EOPNOTSUPP);
	ex->wr_start(ex);
	ex->wr_id = 93;
	ex->wr_send(ex);
	ex->wr_set_inline_data(ex, a.memory, 257);
	CHECK_EQUAL(ex->wr_complete(ex), EINVAL);
	ex->wr_start(ex);
	ex->wr_id = 94;
	ex->wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.memory, 8);
	CHECK_EQUAL(ex->wr_complete(ex), EINVAL);
	model.refused += 4;
	compare_trace_and_model();
	static const char *const expected[] = {"FLAGS", "UNSUPPORTED", "INLINE", "SETTER"};
	unsigned seen = 0;

	EACH_LINE ("refused") {
		CHECK(field_is(line, "reason", expected[seen]));
		CHECK_EQUAL(number_field(line, "wr_id"), 91 + seen++);
	}
	close_pair(&a, &b);
}

/* ---- why a call refuses ----------------------------------------------------------------------- */

/* Expect that the last line of type `type` contains `reason`. */
static void expect_reason(const char *type, const char *reason)
{
	const char *last = NULL;

	read_trace(path);
	EACH_LINE (type)
		last = line;
	CHECK(last);
	CHECK(field_is(last, "reason", reason));
}

static void expect_post_refused(struct side *side, const char *reason, int error,
				struct ibv_send_wr wr)
{
	struct ibv_sge sges[5] = {{(uintptr_t)side->memory, 257, side->mr->lkey}};

	wr.sg_list = sges;
	CHECK_EQUAL(post_wr(side, &wr), error);
	expect_reason("refused", reason);
}

#define REFUSED_POST(side, reason, error, ...)                                                     \
	expect_post_refused(side, reason, error, (struct ibv_send_wr){.opcode = __VA_ARGS__})

static void refused_posts_are_traced_with_their_reason(void)
{
	struct side a, b, ud;

	OPEN_PAIR(&a, &b, .sends = 2, .receives = 2, .shared = 2);
	REFUSED_POST(&a, "INLINE", EINVAL, IBV_WR_SEND, .num_sge = 1,
		     .send_flags = IBV_SEND_INLINE);
	REFUSED_POST(&a, "SGES", EINVAL, IBV_WR_SEND, .num_sge = 5);
	REFUSED_POST(&a, "FLAGS", EINVAL, IBV_WR_SEND, .send_flags = 1u << 20);
	REFUSED_POST(&a, "FLAGS", EINVAL, IBV_WR_RDMA_READ, .send_flags = IBV_SEND_INLINE);
	REFUSED_POST(&a, "OPCODE", EINVAL, (enum ibv_wr_opcode)99);
	REFUSED_POST(&a, "UNSUPPORTED", EOPNOTSUPP, IBV_WR_TSO);
	REFUSED_POST(&a, "UNSUPPORTED", EOPNOTSUPP, IBV_WR_DRIVER1);
	REFUSED_POST(&a, "BIND", EINVAL, IBV_WR_BIND_MW);
	POST(&a, IBV_WR_SEND, .wr_id = 1);
	POST(&a, IBV_WR_SEND, .wr_id = 2);
	REFUSED_POST(&a, "FULL", ENOMEM, IBV_WR_SEND);
	post_recvs(&a, 0, 2, 8);
	CHECK_EQUAL(post_recv_at(&a, 2, 0, 8), ENOMEM);
	expect_reason("refused", "FULL");
	struct ibv_recv_wr *bad, wr = {.num_sge = 5};

	CHECK_EQUAL(b.context->ops.post_recv(b.qp, &wr, &bad), EINVAL);
	expect_reason("refused", "NO_QUEUE");
	CHECK_EQUAL(b.context->ops.post_srq_recv(b.srq, &wr, &bad), EINVAL);
	expect_reason("refused", "SGES");
	enter_state(&a, IBV_QPS_RESET);
	REFUSED_POST(&a, "STATE", EINVAL, IBV_WR_SEND);
	UD_OPEN(&ud);
	REFUSED_POST(&ud, "OPCODE", EINVAL, IBV_WR_RDMA_WRITE);
	REFUSED_POST(&ud, "DESTINATION", EINVAL, IBV_WR_SEND);
	close_side(&ud);
	close_pair(&a, &b);
}

static void refused_messages_are_traced_at_the_receiver(void)
{
	struct side a, b;

	OPEN_PAIR(&a, &b, .rnr_retry = 1);
	RUN(&a, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WR_SEND, .wr_id = 1, .length = 8);
	expect_reason("request_refused", "NO_RECEIVE");
	close_pair(&a, &b);
	OPEN_PAIR(&a, &b);
	post_receive_at(&b, 1, 0, 7);
	RUN(&a, IBV_WC_REM_INV_REQ_ERR, IBV_WR_SEND, .wr_id = 1, .length = 8);
	expect_reason("request_refused", "LENGTH");
	close_pair(&a, &b);
	OPEN_PAIR(&a, &b);
	RUN(&a, IBV_WC_REM_INV_REQ_ERR, IBV_WR_ATOMIC_FETCH_AND_ADD, .wr_id = 1, .length = 8,
	    REMOTE(&b, 4));
	expect_reason("request_refused", "ALIGNMENT");
	close_pair(&a, &b);
	open_ud_pair(&a, &b);
	struct ibv_ah *ah = path_to(&a, &b);

	for (unsigned i = 0; i < 2; i++) {
		UD_POST(&a, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY + i);
		next_wc(&a);
		expect_reason("request_refused", i ? "QKEY" : "NO_RECEIVE");
	}
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	close_pair(&a, &b);
}

/* The completion in the trace reports the key that the request was not allowed to use, and the
 * reason. */
static void expect_memory_refused(const char *reason, bool receive)
{
	struct side a, b;

	OPEN_PAIR(&a, &b);
	struct side *side = receive ? &b : &a;
	const bool other = !strcmp(reason, "DOMAIN"), beyond = !strcmp(reason, "RANGE");
	struct ibv_pd *pd = other ? verbs->ibv_alloc_pd(side->context) : side->pd;
	struct ibv_mr *mr = verbs->ibv_reg_mr(pd, side->memory, beyond ? 7 : 64,
					      strcmp(reason, "RIGHT") ? IBV_ACCESS_LOCAL_WRITE : 0);
	struct ibv_mw *mw = side->context->ops.alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_sge sge = {(uintptr_t)side->memory, 8, mr->lkey};

	if (!strcmp(reason, "WINDOW"))
		sge.lkey = mw->rkey;
	if (!strcmp(reason, "KEY"))
		CHECK_OK(verbs->ibv_dereg_mr(mr));
	if (receive) {
		CHECK_OK(post_recv_wr(&b, &(struct ibv_recv_wr){.sg_list = &sge, .num_sge = 1}));
		RUN(&a, IBV_WC_REM_OP_ERR, IBV_WR_SEND, .wr_id = 1, .length = 8);
		expect_wc(&b, 0, IBV_WC_LOC_PROT_ERR);
	} else {
		RUN(&a, IBV_WC_LOC_PROT_ERR, IBV_WR_RDMA_READ, .wr_id = 1, .length = 8,
		    REMOTE(&b, 0), .lkey = sge.lkey);
	}
	read_trace(path);
	const char *found = NULL, *registered = NULL;

	EACH_LINE ("completion")
		if (field_is(line, "status", "LOC_PROT_ERR") &&
		    number_field(line, "qp_num") == side->qp->qp_num)
			found = line;
		else if (field_is(line, "status", "REM_OP_ERR"))
			CHECK(!field(line, "reason"));
	CHECK(found && field_is(found, "reason", reason));
	CHECK_EQUAL(number_field(found, "lkey"), sge.lkey);
	/* The trace shows when the region was registered and when its key became invalid. It also
	 * shows the protection domains of the region and the queue pair. */
	EACH_LINE ("reg_mr")
		if (number_field(line, "key") == sge.lkey)
			registered = line;
	CHECK_EQUAL(!registered, !strcmp(reason, "WINDOW"));
	EACH_LINE ("create_qp")
		if (registered && number_field(line, "qp_num") == side->qp->qp_num)
			CHECK_EQUAL(number_field(line, "pd") != number_field(registered, "pd"),
				    other);
	size_t ends = 0;

	EACH_LINE ("key_ended")
		ends += number_field(line, "key") == sge.lkey;
	CHECK_EQUAL(ends, !strcmp(reason, "KEY"));
	CHECK_OK(side->context->ops.dealloc_mw(mw));
	if (strcmp(reason, "KEY"))
		CHECK_OK(verbs->ibv_dereg_mr(mr));
	if (other)
		CHECK_OK(verbs->ibv_dealloc_pd(pd));
	close_pair(&a, &b);
}

static void protection_errors_are_traced_with_key_and_reason(void)
{
	static const char *const all[] = {"KEY", "DOMAIN", "RIGHT", "RANGE", "WINDOW"};

	FOR_EACH (i, all) {
		expect_memory_refused(all[i], false);
		expect_memory_refused(all[i], true);
	}
}

/* Completions that do not fit into the queue are reported as lost. */
static void lost_completions_are_traced(void)
{
	struct side a, b;
	int kept = 0, lost = 0, events = 0;

	OPEN_PAIR(&a, &b, .cqe = 4);
	for (unsigned i = 0; i < 6; i++)
		POST(&a, IBV_WR_RDMA_WRITE, .wr_id = i, .length = 8, REMOTE(&b, 0));
	expect_event(&a, IBV_EVENT_CQ_ERR);
	read_trace(path);
	EACH_LINE ("completion") {
		kept += !field(line, "lost");
		lost += field(line, "lost") != NULL;
	}
	EACH_LINE ("async_event")
		events += field_is(line, "event_type", "CQ_ERR") &&
			  number_field(line, "cq") == a.cq->handle;
	CHECK_EQUAL(kept, 4);
	CHECK_EQUAL(lost, 2);
	CHECK_EQUAL(events, 1);
	close_pair(&a, &b);
}

static void send_rounds(struct side *a, struct side *b, unsigned rounds)
{
	for (unsigned i = 0; i < rounds; i++) {
		post_receive_at(b, i, 0, 64);
		RUN(a, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = i, .length = 8);
		expect_wc(b, i, IBV_WC_SUCCESS);
	}
}

static void injected_faults_are_traced_and_match_counters(void)
{
	struct side a, b, lonely;

	OPEN_PAIR(&a, &b, .timeout = 8);
	spec("seed=7,loss=0.1,duplicate=0.2,rnr=0.2");
	send_rounds(&a, &b, 60);
	struct aiordma_fault_counts found = fault_counts();

	CHECK(found.lost && found.duplicated && found.not_ready && found.retried);
	spec("register=@1,cut=1,cut_after=100");
	CHECK(!verbs->ibv_reg_mr(a.pd, a.memory, 64, 0));
	POST(&a, IBV_WR_RDMA_WRITE, .wr_id = 1, .length = 500, REMOTE(&b, 0));
	CHECK(next_wc(&a).status != IBV_WC_SUCCESS);
	struct aiordma_fault_counts cuts = fault_counts();

	OPEN(&lonely);
	spec("overrun=@1,cq=%u", lonely.cq->handle);
	CHECK_OK(to_init(&lonely));
	enter_state(&lonely, IBV_QPS_ERR);
	post_receive_at(&lonely, 1, 0, 64);
	expect_event(&lonely, IBV_EVENT_CQ_ERR);
	no_faults();
	read_trace(path);
	CHECK_EQUAL(count_of("fault", "fault", "LOSS"), found.lost);
	CHECK_EQUAL(count_of("fault", "fault", "DUPLICATE"), found.duplicated);
	CHECK_EQUAL(count_of("fault", "fault", "RNR"), found.not_ready);
	CHECK_EQUAL(count_of("retry", "cause", "LOSS"), found.retried);
	CHECK(count_of("retry", "cause", "RNR") > 0);
	CHECK(count_of("retry", "cause", "RNR") <= found.not_ready); /* some RNR NAKs are lost */
	CHECK_EQUAL(count_of("fault", "fault", "REGISTER"), 1);
	CHECK(cuts.cut > 0);
	CHECK_EQUAL(count_of("fault", "fault", "CUT"), cuts.cut);
	CHECK_EQUAL(count_of("fault", "fault", "OVERRUN"), 1);
	EACH_LINE ("retry")
		CHECK_EQUAL(number_field(line, "qp_num"), a.qp->qp_num);
	EACH_LINE ("fault") {
		if (field_is(line, "fault", "RNR"))
			CHECK_EQUAL(number_field(line, "qp_num"), b.qp->qp_num);
		if (field_is(line, "fault", "OVERRUN"))
			CHECK_EQUAL(number_field(line, "cq"), lonely.cq->handle);
	}
	close_side(&lonely);
	close_pair(&a, &b);
}

static void lost_datagram_is_traced_with_its_receiver(void)
{
	struct side a, b;

	open_ud_pair(&a, &b);
	struct ibv_ah *ah = path_to(&a, &b);

	spec("loss=@1-3");
	for (unsigned i = 0; i < 4; i++)
		send_with(&a, ah, &b, QKEY);
	no_faults();
	read_trace(path);
	CHECK_EQUAL(count_of("fault", "fault", "LOSS"), 3);
	EACH_LINE ("fault")
		CHECK_EQUAL(number_field(line, "qp_num"), b.qp->qp_num);
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	close_pair(&a, &b);
}

static void requests_posted_before_the_trace_have_no_number(void)
{
	struct side a, b;

	aiordma_trace_stop();
	OPEN_PAIR(&a, &b);
	post_receive_at(&b, 1, 0, 64);
	unlink(path);
	start_trace(path);
	RUN(&a, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = 2, .length = 8);
	expect_wc(&b, 1, IBV_WC_SUCCESS);
	close_pair(&a, &b);
	aiordma_trace_stop();
	read_trace(path);
	EACH_LINE ("completion")
		CHECK_EQUAL(!number_field(line, "request"), number_field(line, "wr_id") == 1);
	CHECK_EQUAL(count_type("completion"), 2);
	CHECK(has_end_line());
}

int main(void)
{
	limit_seconds(60);
	snprintf(path, sizeof(path), "%s/trace", new_folder(folder));
	STEP(traced(operations_are_traced_once_and_in_order));
	STEP(traced(errors_and_flushed_requests_are_traced));
	STEP(traced(refused_accesses_are_traced_with_their_reason));
	STEP(traced(shared_receives_are_traced));
	STEP(traced(datagrams_are_traced_with_both_queue_pairs));
	STEP(traced(extended_calls_are_traced));
	STEP(traced(refused_posts_are_traced_with_their_reason));
	STEP(traced(refused_messages_are_traced_at_the_receiver));
	STEP(traced(protection_errors_are_traced_with_key_and_reason));
	STEP(traced(lost_completions_are_traced));
	STEP(traced(injected_faults_are_traced_and_match_counters));
	STEP(traced(lost_datagram_is_traced_with_its_receiver));
	STEP(traced(requests_posted_before_the_trace_have_no_number));
	CHECK_OK(rmdir(folder));
	return 0;
}
