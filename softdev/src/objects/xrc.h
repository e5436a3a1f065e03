/* Extended reliable connections: domains, and the shared receive queues in them. */
#pragma once

#include "queue_pair.h"

struct soft_xrc_domain;

/* The result of ibv_open_xrcd(3): several of them can stand for one domain. */
struct soft_xrcd {
	struct ibv_xrcd ibv;
	struct soft_xrc_domain *domain;
	unsigned users; /* queue pairs and shared receive queues */
};

static inline struct soft_xrcd *soft_xrcd_of(struct ibv_xrcd *xrcd)
{
	return soft_container(xrcd, struct soft_xrcd, ibv);
}

struct ibv_xrcd *soft_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr);
int soft_close_xrcd(struct ibv_xrcd *xrcd);

/* Give a shared receive queue, whose `xrcd` is set, the number by which requests name it; 0 or an
 * errno value. */
int soft_xrc_add(struct soft_srq *srq);
void soft_xrc_remove(struct soft_srq *srq);
/* The one of that number in the domain, or NULL. */
struct soft_srq *soft_xrc_find(const struct soft_xrcd *xrcd, uint32_t number);

/* The protection domain whose keys a peer's request may use: that of the queue pair; with XRC, that
 * of the shared receive queue which the request names (IBTA annex A14), or NULL. */
static inline const struct ibv_pd *soft_remote_pd(const struct soft_qp *qp, uint32_t srq_num)
{
	const struct soft_srq *srq;

	if (!qp->xrcd)
		return qp->ibv.pd;
	srq = soft_xrc_find(qp->xrcd, srq_num);
	return srq ? srq->ibv.pd : NULL;
}

/* The domain whose keys the receives use: IBTA 10.2.9.1, a shared queue has one of its own. */
static inline const struct ibv_pd *soft_receive_pd(const struct soft_qp *qp)
{
	return qp->ibv.srq ? qp->ibv.srq->pd : soft_remote_pd(qp, qp->taken_from);
}
