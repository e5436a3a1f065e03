/* Queue pairs created by ibv_create_qp_ex(3). */

#include "extended.h"
#include "trace/trace.h"

/* Returns the operations that a queue pair type supports (ibv_wr_post(3), "QP Type Supported"). */
static uint64_t operations_of(enum ibv_qp_type type)
{
	const uint64_t send = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
	const uint64_t write = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
	const uint64_t reads = IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
			       IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;

	const uint64_t windows =
		IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV;

	switch (type) {
	case IBV_QPT_RC:
	case IBV_QPT_XRC_SEND:
		return send | write | windows | reads | IBV_QP_EX_WITH_ATOMIC_WRITE |
		       IBV_QP_EX_WITH_FLUSH;
	case IBV_QPT_UC:
		return send | write | windows;
	case IBV_QPT_UD:
		return send;
	default:
		return 0;
	}
}

static uint32_t flags_of(const struct ibv_qp_init_attr_ex *attr)
{
	return attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS ? attr->create_flags : 0;
}

/* Check that the domain belongs to this context. XRC_RECV requires an XRC domain, and all other
 * types require a protection domain. Returns 0 or EINVAL. */
static int check_domain(const struct ibv_context *context, const struct ibv_qp_init_attr_ex *attr)
{
	const uint32_t domains = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD;

	if (attr->qp_type == IBV_QPT_XRC_RECV)
		return attr->comp_mask & IBV_QP_INIT_ATTR_XRCD && attr->xrcd &&
				       attr->xrcd->context == context
			       ? 0
			       : soft_refuse(EINVAL, "FOREIGN_OBJECT");
	return (attr->comp_mask & domains) == IBV_QP_INIT_ATTR_PD && attr->pd &&
			       attr->pd->context == context
		       ? 0
		       : soft_refuse(EINVAL, "FOREIGN_OBJECT");
}

static int check_attr(const struct ibv_context *context, const struct ibv_qp_init_attr_ex *attr)
{
	uint32_t supported_flags =
		attr->qp_type == IBV_QPT_UD ? IBV_QP_CREATE_BLOCK_SELF_MCAST_LB : 0;
	const uint32_t known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD |
			       IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_MAX_TSO_HEADER |
			       IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH |
			       IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;

	if (attr->comp_mask & ~known)
		return soft_refuse_value("FLAGS", "comp_mask", attr->comp_mask);
	if (attr->comp_mask & (IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH))
		return soft_refuse(EOPNOTSUPP, "UNSUPPORTED");
	if (flags_of(attr) & ~supported_flags ||
	    (attr->comp_mask & IBV_QP_INIT_ATTR_MAX_TSO_HEADER && attr->max_tso_header))
		return soft_refuse(EOPNOTSUPP, "UNSUPPORTED");
	if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS &&
	    attr->send_ops_flags & ~operations_of(attr->qp_type))
		return soft_refuse(EOPNOTSUPP, "OPCODE");
	return check_domain(context, attr);
}

struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	struct ibv_qp_init_attr init = {
		.qp_context = attr->qp_context,
		.send_cq = attr->send_cq,
		.recv_cq = attr->recv_cq,
		.srq = attr->srq,
		.cap = attr->cap,
		.qp_type = attr->qp_type,
		.sq_sig_all = attr->sq_sig_all,
	};
	struct soft_batch *batch = NULL;
	struct ibv_qp *ibv = NULL;
	bool is_xrc_recv = attr->qp_type == IBV_QPT_XRC_RECV;
	int rc = check_attr(context, attr);

	if (!rc && attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) {
		batch = soft_batch_create(attr->send_ops_flags);
		rc = batch ? 0 : ENOMEM;
	}
	if (!rc) {
		ibv = soft_qp_create(context, is_xrc_recv ? NULL : attr->pd,
				     is_xrc_recv ? soft_xrcd_of(attr->xrcd) : NULL, &init);
		rc = ibv ? 0 : errno;
	}
	if (rc) {
		soft_batch_destroy(batch);
		return soft_call_pointer_result("ibv_create_qp_ex", NULL, 0, soft_fail_create(rc));
	}
	attr->cap = init.cap;
	soft_qp_of(ibv)->block_self_multicast = flags_of(attr); /* the only supported flag */
	if (batch) {
		soft_qp_of(ibv)->batch = batch;
		soft_batch_set_calls(&soft_qp_of(ibv)->ex);
	}
	return ibv;
}

/* Returns the extended queue pair, or NULL if it was created without
 * IBV_QP_INIT_ATTR_SEND_OPS_FLAGS. */
struct ibv_qp_ex *soft_ibv_qp_to_qp_ex(struct ibv_qp *ibv)
{
	struct soft_qp *qp = soft_qp_of(ibv);

	return qp->batch ? &qp->ex : NULL;
}
