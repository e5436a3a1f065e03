/* Queue pairs of an id (rdma_create_qp(3)), the completion queues created with them, and shared
 * receive queues (rdma_create_srq(3)). */
#include "cm_internal.h"

static void destroy_cqs(struct rdma_cm_id *id)
{
	if (id->recv_cq)
		soft_ibv_destroy_cq(id->recv_cq);
	if (id->send_cq && id->send_cq != id->recv_cq)
		soft_ibv_destroy_cq(id->send_cq);
	if (id->recv_cq_channel)
		soft_ibv_destroy_comp_channel(id->recv_cq_channel);
	if (id->send_cq_channel && id->send_cq_channel != id->recv_cq_channel)
		soft_ibv_destroy_comp_channel(id->send_cq_channel);
	id->recv_cq = id->send_cq = NULL;
	id->recv_cq_channel = id->send_cq_channel = NULL;
}

static int create_cq(struct rdma_cm_id *id, uint32_t entries, struct ibv_comp_channel **channel,
		     struct ibv_cq **cq)
{
	*channel = soft_ibv_create_comp_channel(id->verbs);
	if (!*channel)
		return errno;
	*cq = soft_ibv_create_cq(id->verbs, entries ? (int)entries : 1, id, *channel, 0);
	return *cq ? 0 : errno;
}

/* Create the completion queues that the caller has not provided, and store them in the id. */
static int create_cqs(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attr)
{
	int error = 0;

	if (!attr->recv_cq && !id->recv_cq)
		error = create_cq(id, attr->cap.max_recv_wr, &id->recv_cq_channel, &id->recv_cq);
	if (!error && !attr->send_cq && !id->send_cq)
		error = create_cq(id, attr->cap.max_send_wr, &id->send_cq_channel, &id->send_cq);
	if (error) {
		destroy_cqs(id);
		return error;
	}
	if (!attr->recv_cq)
		attr->recv_cq = id->recv_cq;
	if (!attr->send_cq)
		attr->send_cq = id->send_cq;
	return 0;
}

static int start_qp(struct soft_cm_id *id, struct ibv_qp *qp)
{
	int error;

	soft_lock();
	error = soft_cm_qp_start(id, qp, false);
	if (!error) {
		id->id.qp = qp;
		id->id.pd = qp->pd;
		id->created_qpn = qp->qp_num;
	}
	soft_unlock();
	return error;
}

static int create_qp(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attr)
{
	struct ibv_qp *qp;
	int error = create_cqs(id, attr);

	if (error)
		return error;
	if (id->srq && !attr->srq)
		attr->srq = id->srq;
	qp = soft_create_qp_ex(id->verbs, attr);
	error = qp ? start_qp(soft_cm_id_of(id), qp) : errno;
	if (error) {
		if (qp)
			soft_ibv_destroy_qp(qp);
		destroy_cqs(id);
	}
	return error;
}

/* Set `*pd` to the id's protection domain if the application has not provided one. Returns EINVAL
 * if the domain does not belong to the id's device. */
static int choose_pd(const struct rdma_cm_id *id, struct ibv_pd **pd)
{
	if (!*pd)
		*pd = id->pd;
	return *pd && (*pd)->context == id->verbs ? 0 : EINVAL;
}

/* Returns whether the id's port space supports the queue pair type. The port space determines the
 * transport (rdma_cm(7)), except that RDMA_PS_IB supports every type. */
static bool type_fits(const struct rdma_cm_id *id, enum ibv_qp_type type)
{
	return id->ps == RDMA_PS_IB || (type == IBV_QPT_UD) == (id->qp_type == IBV_QPT_UD);
}

int soft_rdma_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attr)
{
	int error;

	if (!id || !attr || id->qp || !id->verbs || !type_fits(id, attr->qp_type))
		return soft_cm_fail(EINVAL);
	if (soft_is_xrc(attr->qp_type)) /* XRC needs one connection per direction */
		return soft_cm_fail(EOPNOTSUPP);
	if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD))
		attr->pd = NULL; /* the application may have left it uninitialized */
	attr->comp_mask |= IBV_QP_INIT_ATTR_PD;
	error = choose_pd(id, &attr->pd);
	if (!error)
		error = create_qp(id, attr);
	return error ? soft_cm_fail(error) : 0;
}

int soft_rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr_ex full = {.comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd};

	if (!attr)
		return soft_cm_fail(EINVAL);
	/* The extended struct begins with the members of struct ibv_qp_init_attr. */
	memcpy(&full, attr, offsetof(struct ibv_qp_init_attr_ex, comp_mask));
	if (soft_rdma_create_qp_ex(id, &full))
		return -1;
	memcpy(attr, &full, offsetof(struct ibv_qp_init_attr_ex, comp_mask)); /* actual sizes */
	return 0;
}

void soft_rdma_destroy_qp(struct rdma_cm_id *id)
{
	struct ibv_qp *qp;

	if (!id)
		return;
	soft_cm_detach_groups(soft_cm_id_of(id));
	soft_lock();
	qp = id->qp;
	id->qp = NULL;
	soft_cm_id_of(id)->created_qpn = 0;
	soft_unlock();
	if (qp)
		soft_ibv_destroy_qp(qp);
	destroy_cqs(id);
}

/* ---- shared receive queues ----------------------------------------------------------------- */

int soft_rdma_create_srq_ex(struct rdma_cm_id *id, struct ibv_srq_init_attr_ex *attr)
{
	struct ibv_srq *srq;
	int error;

	if (!id || !attr || id->srq || !id->verbs)
		return soft_cm_fail(EINVAL);
	if (!(attr->comp_mask & IBV_SRQ_INIT_ATTR_PD))
		attr->pd = NULL;
	error = choose_pd(id, &attr->pd);
	if (error)
		return soft_cm_fail(error);
	attr->comp_mask |= IBV_SRQ_INIT_ATTR_PD;
	srq = soft_create_srq_ex(id->verbs, attr);
	if (!srq)
		return -1;
	id->srq = srq;
	id->pd = srq->pd;
	return 0;
}

int soft_rdma_create_srq(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	struct ibv_srq_init_attr_ex full = {.comp_mask = IBV_SRQ_INIT_ATTR_PD, .pd = pd};

	if (!attr)
		return soft_cm_fail(EINVAL);
	full.srq_context = attr->srq_context;
	full.attr = attr->attr;
	if (soft_rdma_create_srq_ex(id, &full))
		return -1;
	attr->attr = full.attr;
	return 0;
}

void soft_rdma_destroy_srq(struct rdma_cm_id *id)
{
	struct ibv_srq *srq = id ? id->srq : NULL;

	if (!srq || soft_ibv_destroy_srq(srq))
		return; /* a queue pair still uses it */
	id->srq = NULL;
}
