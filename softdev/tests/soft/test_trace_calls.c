/* Tests of the trace lines for refused calls, which contain the call's name, the errno value and
 * the reason. */
#include "trace/trace.h"
#include "trace_side.h"
#include "ud_side.h"

static char folder[64], path[128];

static const char *last_refused_call(void)
{
	const char *last = NULL;

	read_trace(path);
	EACH_LINE ("call_refused")
		last = line;
	CHECK(last);
	return last;
}

static const char *expect_refused(const char *call, int error, const char *reason)
{
	const char *line = last_refused_call();

	if (!field_is(line, "call", call) || !field_is(line, "reason", reason))
		fprintf(stderr, "expected %s %s: %s\n", call, reason, line);
	CHECK(field_is(line, "call", call));
	CHECK(field_is(line, "reason", reason));
	CHECK_EQUAL(number_field(line, "errno"), error);
	CHECK(field_is(line, "error", strerror(error)));
	return line;
}

/* Expect the last refused call to be traced with the argument `name`, its value and its limit. If
 * `limit` is 0, no limit is expected. */
static void expect_field(const char *name, uint64_t value, uint64_t limit)
{
	const char *line = last_refused_call();

	CHECK(field_is(line, "field", name));
	CHECK_EQUAL(number_field(line, "value"), value);
	CHECK_EQUAL(field(line, "limit") ? number_field(line, "limit") : 0, limit);
}

/* ---- ibv_modify_qp --------------------------------------------------------------------------- */

enum { TO_INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS };
enum {
	TO_RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
	IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER
};

static void expect_modify_refused(struct side *side, struct ibv_qp_attr attr, int mask, int error,
				  const char *reason)
{
	const enum ibv_qp_state before = state_of(side);

	CHECK_EQUAL(verbs->ibv_modify_qp(side->qp, &attr, mask), error);
	const char *line = expect_refused("ibv_modify_qp", error, reason);

	CHECK_EQUAL(number_field(line, "qp_num"), side->qp->qp_num);
	CHECK(field_is(line, "cur_qp_state", before == IBV_QPS_RESET ? "RESET" : "INIT"));
	expect_state(side, before);
}

static void refused_transition_to_init_is_traced(struct side *side)
{
	struct ibv_qp_attr good = {.qp_state = IBV_QPS_INIT, .port_num = 1}, attr;

	attr = good;
	attr.port_num = 2;
	expect_modify_refused(side, attr, TO_INIT, EINVAL, "PORT");
	expect_field("port_num", 2, 0);
	attr = good;
	attr.pkey_index = 1;
	expect_modify_refused(side, attr, TO_INIT, EINVAL, "PKEY_INDEX");
	attr = good;
	attr.qp_access_flags = 1u << 19;
	expect_modify_refused(side, attr, TO_INIT, EINVAL, "ACCESS");
	expect_modify_refused(side, good, TO_INIT & ~(IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), EINVAL,
			      "MASK_MISSING");
	CHECK(strstr(last_refused_call(), "\"attributes\":[\"ACCESS_FLAGS\",\"PORT\"]"));
	expect_modify_refused(side, good, TO_INIT | IBV_QP_QKEY, EINVAL, "MASK_UNEXPECTED");
	CHECK(strstr(last_refused_call(), "\"attributes\":[\"QKEY\"]"));
	expect_modify_refused(side, good, TO_INIT | 1 << 30, EINVAL, "MASK_UNEXPECTED");
	CHECK(!field(last_refused_call(), "attributes")); /* this bit has no name */
	attr.qp_state = IBV_QPS_RTS;
	expect_modify_refused(side, attr, IBV_QP_STATE, EINVAL, "TRANSITION");
	CHECK(field_is(last_refused_call(), "qp_state", "RTS"));
	attr = good;
	attr.cur_qp_state = IBV_QPS_RTR;
	expect_modify_refused(side, attr, TO_INIT | IBV_QP_CUR_STATE, EINVAL, "CUR_STATE");
}

static void refused_transition_to_rtr_is_traced(struct side *side)
{
	const struct ibv_qp_attr good = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = 5,
		.ah_attr = {.grh = {.dgid = address_of_side(side).gid},
			    .is_global = 1,
			    .port_num = 1},
		.max_dest_rd_atomic = 1,
	};
	struct ibv_qp_attr attr = good;

	CHECK_OK(to_init(side));
	attr.ah_attr.is_global = 0;
	attr.ah_attr.dlid = ANY_DLID; /* not the port's LID */
	expect_modify_refused(side, attr, TO_RTR, EINVAL, "GRH");
	attr = good;
	attr.ah_attr.grh.sgid_index = 200;
	expect_modify_refused(side, attr, TO_RTR, EINVAL, "SGID_INDEX");
	expect_field("sgid_index", 200, 0);
	attr = good;
	attr.ah_attr.port_num = 0;
	expect_modify_refused(side, attr, TO_RTR, EINVAL, "PORT");
	attr = good;
	memset(&attr.ah_attr.grh.dgid, 0x20, 16);
	expect_modify_refused(side, attr, TO_RTR, EINVAL, "GID_FAMILY");
	attr = good;
	attr.path_mtu = (enum ibv_mtu)(IBV_MTU_4096 + 1);
	expect_modify_refused(side, attr, TO_RTR, EINVAL, "MTU");
	attr.path_mtu = (enum ibv_mtu)(IBV_MTU_256 - 1);
	expect_modify_refused(side, attr, TO_RTR, EINVAL, "MTU");
	attr = good;
	attr.max_dest_rd_atomic = 255;
	expect_modify_refused(side, attr, TO_RTR, EINVAL, "LIMIT");
	expect_field("max_dest_rd_atomic", 255, 128);
	attr = good;
	attr.dest_qp_num = 1u << 24;
	expect_modify_refused(side, attr, TO_RTR, EINVAL, "LIMIT");
	attr = good;
	attr.min_rnr_timer = 32;
	expect_modify_refused(side, attr, TO_RTR, EINVAL, "LIMIT");
	expect_field("min_rnr_timer", 32, 31);
	expect_modify_refused(side, good, TO_RTR | IBV_QP_ALT_PATH, EOPNOTSUPP, "ALT_PATH");
	expect_modify_refused(side, good, TO_RTR & ~IBV_QP_AV, EINVAL, "MASK_MISSING");
}

/* ---- other calls ----------------------------------------------------------------------------- */

static void expect_create_qp_refused(struct side *side, struct ibv_qp_init_attr attr, int error,
				     const char *reason)
{
	attr.send_cq = attr.send_cq ? attr.send_cq : side->cq;
	errno = 0;
	CHECK(!verbs->ibv_create_qp(side->pd, &attr));
	CHECK_EQUAL(errno, error);
	CHECK_EQUAL(number_field(expect_refused("ibv_create_qp", error, reason), "pd"),
		    side->pd->handle);
}

static void refused_create_qp_is_traced(struct side *side)
{
	struct ibv_cq *cq = side->cq;

#define QP(error, reason, ...)                                                                     \
	expect_create_qp_refused(side,                                                             \
				 (struct ibv_qp_init_attr){.qp_type = IBV_QPT_RC, __VA_ARGS__},    \
				 error, reason)
	QP(EINVAL, "LIMIT", .recv_cq = cq, .cap.max_send_wr = 16385);
	expect_field("max_send_wr", 16385, 16384);
	QP(EINVAL, "LIMIT", .recv_cq = cq, .cap.max_recv_wr = 16385);
	expect_field("max_recv_wr", 16385, 16384);
	QP(EINVAL, "LIMIT", .recv_cq = cq, .cap.max_send_sge = 33);
	QP(EINVAL, "LIMIT", .recv_cq = cq, .cap.max_recv_sge = 33);
	QP(EINVAL, "LIMIT", .recv_cq = cq, .cap.max_inline_data = 513);
	expect_field("max_inline_data", 513, 512);
	QP(EINVAL, "NULL_OBJECT", .recv_cq = NULL);
#undef QP
	expect_create_qp_refused(side, (struct ibv_qp_init_attr){.qp_type = IBV_QPT_RAW_PACKET},
				 EOPNOTSUPP, "QP_TYPE");
	expect_create_qp_refused(side, (struct ibv_qp_init_attr){.qp_type = IBV_QPT_DRIVER},
				 EOPNOTSUPP, "QP_TYPE");
	expect_create_qp_refused(side, (struct ibv_qp_init_attr){.qp_type = (enum ibv_qp_type)77},
				 EINVAL, "QP_TYPE");
}

static void expect_reg_mr_refused(struct side *side, void *addr, size_t length, unsigned access,
				  int error, const char *reason)
{
	errno = 0;
	CHECK(!verbs->ibv_reg_mr(side->pd, addr, length, (int)access));
	CHECK_EQUAL(errno, error);
	CHECK_EQUAL(number_field(expect_refused("ibv_reg_mr", error, reason), "pd"),
		    side->pd->handle);
}

static void refused_registrations_are_traced(struct side *side)
{
	expect_reg_mr_refused(side, side->memory, 64, IBV_ACCESS_REMOTE_WRITE, EINVAL,
			      "LOCAL_WRITE");
	expect_field("access", IBV_ACCESS_REMOTE_WRITE, 0);
	expect_reg_mr_refused(side, side->memory, 64, 1u << 19, EINVAL, "ACCESS");
	expect_reg_mr_refused(side, side->memory, 0, 0, EINVAL, "EMPTY");
	expect_reg_mr_refused(side, side->memory, SIZE_MAX, 0, EINVAL, "PAGES");
	expect_reg_mr_refused(side, side->memory, 64, IBV_ACCESS_FLUSH_PERSISTENT, EOPNOTSUPP,
			      "UNSUPPORTED");
	/* Memory without read access cannot be registered. */
	void *hole = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	expect_reg_mr_refused(side, hole, 64, 0, EFAULT, "PAGES");
	munmap(hole, 4096);

	CHECK_EQUAL(verbs->ibv_rereg_mr(side->mr, 0, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_INPUT);
	CHECK_EQUAL(errno, EINVAL);
	CHECK_EQUAL(number_field(expect_refused("ibv_rereg_mr", EINVAL, "FLAGS"), "key"),
		    side->mr->lkey);
	CHECK_EQUAL(verbs->ibv_rereg_mr(side->mr, IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0),
		    IBV_REREG_MR_ERR_INPUT);
	expect_refused("ibv_rereg_mr", EINVAL, "NULL_OBJECT");

	CHECK(!side->context->ops.alloc_mw(side->pd, (enum ibv_mw_type)3));
	expect_refused("ibv_alloc_mw", EINVAL, "MW_TYPE");
}

static void refused_queue_calls_are_traced(struct side *side)
{
	struct ibv_srq_init_attr init = {.attr = {.max_wr = 8, .max_sge = 1}};
	struct ibv_srq *srq = verbs->ibv_create_srq(side->pd, &init);

	CHECK(srq);
	CHECK_EQUAL(
		verbs->ibv_modify_srq(srq, &(struct ibv_srq_attr){.srq_limit = 9}, IBV_SRQ_LIMIT),
		EINVAL);
	CHECK_EQUAL(number_field(expect_refused("ibv_modify_srq", EINVAL, "LIMIT"), "srq"),
		    srq->handle);
	expect_field("srq_limit", 9, 8);
	CHECK_EQUAL(verbs->ibv_modify_srq(srq, &(struct ibv_srq_attr){0}, 1 << 7), EINVAL);
	expect_refused("ibv_modify_srq", EINVAL, "FLAGS");
	CHECK_OK(verbs->ibv_destroy_srq(srq));
	init.attr.max_wr = 0;
	CHECK(!verbs->ibv_create_srq(side->pd, &init));
	expect_refused("ibv_create_srq", EINVAL, "NO_ENTRIES");
	init.attr.max_wr = 1 << 20;
	CHECK(!verbs->ibv_create_srq(side->pd, &init));
	expect_refused("ibv_create_srq", EINVAL, "LIMIT");

	CHECK(!verbs->ibv_create_cq(side->context, 0, NULL, NULL, 0));
	expect_refused("ibv_create_cq", EINVAL, "NO_ENTRIES");
	CHECK(!verbs->ibv_create_cq(side->context, (1 << 20) + 1, NULL, NULL, 0));
	expect_refused("ibv_create_cq", EINVAL, "LIMIT");
	expect_field("cqe", (1 << 20) + 1, 1 << 20);
	CHECK(!verbs->ibv_create_cq(side->context, 1, NULL, NULL, 4000));
	CHECK(field_is(expect_refused("ibv_create_cq", EINVAL, "LIMIT"), "field", "comp_vector"));
	CHECK_EQUAL(verbs->ibv_resize_cq(side->cq, 0), EINVAL);
	CHECK_EQUAL(number_field(expect_refused("ibv_resize_cq", EINVAL, "NO_ENTRIES"), "cq"),
		    side->cq->handle);
	CHECK_EQUAL(verbs->ibv_destroy_cq(side->cq), EBUSY);
	expect_refused("ibv_destroy_cq", EBUSY, "IN_USE");
	CHECK_EQUAL(verbs->ibv_dealloc_pd(side->pd), EBUSY);
	expect_refused("ibv_dealloc_pd", EBUSY, "IN_USE");
}

static void refused_address_calls_are_traced(struct side *side)
{
	const union ibv_gid gid = address_of_side(side).gid;
	struct ibv_port_attr port;
	struct ibv_ah_attr attr = {.port_num = 1};

	CHECK(!verbs->ibv_create_ah(side->pd, &attr));
	CHECK_EQUAL(number_field(expect_refused("ibv_create_ah", EINVAL, "GRH"), "pd"),
		    side->pd->handle);
	attr = (struct ibv_ah_attr){.port_num = 3, .is_global = 1, .grh.dgid = gid};
	CHECK(!verbs->ibv_create_ah(side->pd, &attr));
	expect_refused("ibv_create_ah", EINVAL, "PORT");
	CHECK_EQUAL(verbs->ibv_attach_mcast(side->qp, &gid, 0), EINVAL);
	expect_refused("ibv_attach_mcast", EINVAL, "QP_TYPE");
	CHECK_EQUAL(verbs->ibv_detach_mcast(side->qp, &gid, 0), EINVAL);
	expect_refused("ibv_detach_mcast", EINVAL, "NOT_ATTACHED");
	CHECK_EQUAL(verbs->ibv_query_port(side->context, 2, (void *)&port), EINVAL);
	expect_refused("ibv_query_port", EINVAL, "PORT");
}

/* The reason for one failure must not be reported with a later failure, whether or not calls in
 * between succeed. */
static void trace_does_not_reuse_an_earlier_reason(struct side *side)
{
	CHECK_EQUAL(to_state(side, IBV_QPS_RTS), EINVAL);
	expect_refused("ibv_modify_qp", EINVAL, "TRANSITION");
	CHECK_OK(to_init(side));
	read_trace(path);
	const size_t before = count_type("call_refused");

	aiordma_trace_stop();
	CHECK_EQUAL(verbs->ibv_resize_cq(side->cq, 0), EINVAL);
	unlink(path);
	CHECK_OK(aiordma_trace_start(path, (char[4097]){0}, 4097));
	CHECK_EQUAL(verbs->ibv_destroy_cq(side->cq), EBUSY);
	expect_refused("ibv_destroy_cq", EBUSY, "IN_USE");
	CHECK_EQUAL(count_type("call_refused"), 1);
	CHECK_EQUAL(before, 1);
}

/* The note left by a successful call must not be reported as the reason when a later call fails. */
static void successful_call_clears_the_reason(struct side *side)
{
	soft_refuse(EINVAL, "IN_USE");
	CHECK(soft_call_pointer_result("ibv_reg_mr", NULL, 0, side) == side);
	CHECK(!soft_refusal_take(EINVAL).reason);
}

static void traced(const char *name, void (*step)(struct side *side))
{
	struct side side;

	current_step = name;
	CHECK_OK(aiordma_trace_start(path, (char[4097]){0}, 4097));
	OPEN(&side);
	step(&side);
	close_side(&side);
	aiordma_trace_stop();
	CHECK_OK(unlink(path));
}

#define TRACED(step) traced(#step, step)

int main(void)
{
	limit_seconds(60);
	snprintf(path, sizeof(path), "%s/trace", new_folder(folder));
	TRACED(refused_transition_to_init_is_traced);
	TRACED(refused_transition_to_rtr_is_traced);
	TRACED(refused_create_qp_is_traced);
	TRACED(refused_registrations_are_traced);
	TRACED(refused_queue_calls_are_traced);
	TRACED(refused_address_calls_are_traced);
	TRACED(trace_does_not_reuse_an_earlier_reason);
	TRACED(successful_call_clears_the_reason);
	CHECK_OK(rmdir(folder));
	return 0;
}
