/* XRC (extended reliable connection) domains and their shared receive queues. */
#pragma once

#include "queue_pair.h"

struct soft_xrc_domain;

/* A handle that ibv_open_xrcd(3) returns. Several handles can refer to one domain. */
struct soft_xrcd {
	struct ibv_xrcd ibv;
	struct soft_xrc_domain *domain;
	unsigned users; /* number of queue pairs and shared receive queues */
};

static inline struct soft_xrcd *soft_xrcd_of(struct ibv_xrcd *xrcd)
{
	return soft_container(xrcd, struct soft_xrcd, ibv);
}

struct ibv_xrcd *soft_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr);
int soft_close_xrcd(struct ibv_xrcd *xrcd);

/* Assign the SRQ number that requests use to address the queue. `srq->xrcd` must be set. Returns 0
 * or an errno value. */
int soft_xrc_add_srq(struct soft_srq *srq);
void soft_xrc_remove_srq(struct soft_srq *srq);
/* Find a shared receive queue of the domain by its number. It may have been created with another
 * handle of the same domain. Returns NULL if there is none. */
struct soft_srq *soft_xrc_find_srq(const struct soft_xrcd *xrcd, uint32_t number);

/* Returns the protection domain whose keys a peer's request may use, or NULL. XRC uses the domain
 * of the shared receive queue that the request names (IBTA annex A14), and other types use the
 * queue pair's domain. */
static inline const struct ibv_pd *soft_remote_pd(const struct soft_qp *qp, uint32_t srq_num)
{
	const struct soft_srq *srq;

	if (!qp->xrcd)
		return qp->ibv.pd;
	srq = soft_xrc_find_srq(qp->xrcd, srq_num);
	return srq ? srq->ibv.pd : NULL;
}

/* Returns the protection domain for the keys in the queue pair's receives, or NULL. A shared
 * receive queue has its own protection domain (IBTA 10.2.9.1). */
static inline const struct ibv_pd *soft_receive_pd(const struct soft_qp *qp)
{
	return qp->ibv.srq ? qp->ibv.srq->pd : soft_remote_pd(qp, qp->receive_srq_num);
}
