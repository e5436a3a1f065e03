/* Shared receive queues: receives that any of several queue pairs may use (IBTA 10.2.9).
 *
 * When a message needs a receive, the receive moves from the shared queue to the queue pair, where
 * it completes or is flushed. Receives that remain in the shared queue are never flushed, not even
 * when a queue pair fails.
 */

#include "objects.h"
#include "trace/trace.h"

/* Returns the shared receive queue for the queue pair's current message, or NULL. */
static struct soft_srq *message_srq(const struct soft_qp *qp)
{
	if (qp->xrcd)
		return soft_xrc_find_srq(qp->xrcd, qp->responder.srq_num);
	return qp->ibv.srq ? soft_srq_of(qp->ibv.srq) : NULL;
}

bool soft_acquire_receive(struct soft_qp *qp)
{
	/* An XRC message cannot use a receive that came from another shared receive queue. */
	if (qp->rq.head != qp->rq.tail)
		return !qp->xrcd || qp->receive_srq_num == qp->responder.srq_num;
	struct soft_srq *srq = message_srq(qp);

	if (!srq || srq->rq.head == srq->rq.tail)
		return false;
	soft_receive_queue_move(&srq->rq, &qp->rq);
	qp->receive_srq_num = srq->number;
	/* Raise the event once when the number of receives drops below the limit
	 * (ibv_modify_srq(3), ibv_query_srq(3)). */
	if (srq->rq.tail - srq->rq.head < srq->limit) {
		struct ibv_async_event event = {
			.element.srq = &srq->ibv,
			.event_type = IBV_EVENT_SRQ_LIMIT_REACHED,
		};

		srq->limit = 0;
		soft_async_queue_event(soft_context_of(srq->ibv.context), &event);
	}
	return true;
}

/* Release everything except the structure itself. */
static void destroy_members(struct soft_srq *srq)
{
	pthread_cond_destroy(&srq->ibv.cond);
	pthread_mutex_destroy(&srq->ibv.mutex);
	soft_receive_queue_destroy(&srq->rq);
}

/* Create a shared receive queue. `xrcd` and `cq` are NULL unless it is an XRC queue. Returns NULL
 * with errno set on failure. */
static struct ibv_srq *create(struct ibv_pd *pd, const struct ibv_srq_init_attr *init,
			      struct soft_xrcd *xrcd, struct ibv_cq *cq)
{
	const struct soft_limit limits[] = {
		{"max_wr", init->attr.max_wr, SOFT_MAX_SRQ_WR},
		{"max_sge", init->attr.max_sge, SOFT_MAX_SGE},
	};
	int rc = init->attr.max_wr < 1
			 ? soft_refuse_value("NO_ENTRIES", "max_wr", 0)
			 : soft_check_limits(limits, sizeof(limits) / sizeof(limits[0]));
	struct soft_srq *srq = soft_alloc_unless_failed(pd->context, sizeof(*srq), &rc);

	if (!rc)
		rc = soft_receive_queue_create(&srq->rq, pd, init->attr.max_wr, init->attr.max_sge);
	if (rc)
		return soft_finish_create(rc, srq);
	srq->ibv = (struct ibv_srq){
		.context = pd->context,
		.srq_context = init->srq_context,
		.pd = pd,
	};
	srq->xrcd = xrcd;
	srq->cq = cq;
	pthread_mutex_init(&srq->ibv.mutex, NULL);
	pthread_cond_init(&srq->ibv.cond, NULL);
	soft_lock();
	srq->ibv.handle = ++soft_device.objects->handles.srq;
	rc = xrcd ? soft_xrc_add_srq(srq) : 0;
	if (!rc) {
		soft_pd_of(pd)->users++;
		if (cq)
			soft_cq_of(cq)->users++;
	}
	soft_unlock();
	if (rc)
		destroy_members(srq);
	return soft_finish_create(rc, srq);
}

struct ibv_srq *soft_ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
	return soft_call_pointer_result("ibv_create_srq", "pd", soft_pd_root(pd)->handle,
					create(pd, init, NULL, NULL));
}

struct ibv_srq *soft_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
	const struct ibv_srq_init_attr init = {.srq_context = attr->srq_context,
					       .attr = attr->attr};
	enum ibv_srq_type type =
		attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE ? attr->srq_type : IBV_SRQT_BASIC;
	uint32_t needed = IBV_SRQ_INIT_ATTR_PD;
	struct ibv_srq *srq;
	int rc = 0;

	if (type == IBV_SRQT_XRC)
		needed |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
	if ((type != IBV_SRQT_BASIC && type != IBV_SRQT_XRC) ||
	    attr->comp_mask & ~(needed | IBV_SRQ_INIT_ATTR_TYPE))
		rc = soft_refuse(EOPNOTSUPP, "UNSUPPORTED");
	else if ((attr->comp_mask & needed) != needed || !attr->pd ||
		 attr->pd->context != context ||
		 (type == IBV_SRQT_XRC && (!attr->xrcd || attr->xrcd->context != context ||
					   !attr->cq || attr->cq->context != context)))
		rc = soft_refuse(EINVAL, "FOREIGN_OBJECT");
	if (rc)
		srq = soft_fail_create(rc);
	else if (type == IBV_SRQT_XRC)
		srq = create(attr->pd, &init, soft_xrcd_of(attr->xrcd), attr->cq);
	else
		srq = create(attr->pd, &init, NULL, NULL);
	return soft_call_pointer_result("ibv_create_srq_ex", NULL, 0, srq);
}

int soft_get_srq_num(struct ibv_srq *ibv, uint32_t *srq_num)
{
	const struct soft_srq *srq = soft_srq_of(ibv);

	/* Peers address only XRC queues by number. Any other queue is identified by its handle. */
	*srq_num = srq->xrcd ? srq->number : ibv->handle;
	return 0;
}

/* Move all receives to the empty queue `fresh`, and swap it with the current queue. */
static void resize(struct soft_srq *srq, struct soft_receive_queue *fresh)
{
	struct soft_receive_queue old = srq->rq;

	while (old.head != old.tail)
		soft_receive_queue_move(&old, fresh);
	srq->rq = *fresh;
	*fresh = old;
}

/* Change the queue's size or limit, as `mask` says. `fresh` is an empty queue of the new size. If
 * the size changes, then `fresh` contains the old queue afterwards. The caller must destroy `fresh`
 * in any case. Returns 0 or EINVAL. */
static int modify(struct soft_srq *srq, const struct ibv_srq_attr *attr, int mask,
		  struct soft_receive_queue *fresh)
{
	uint32_t max_wr = mask & IBV_SRQ_MAX_WR ? attr->max_wr : srq->rq.max_wr;
	uint32_t limit = mask & IBV_SRQ_LIMIT ? attr->srq_limit : srq->limit;

	/* The queue must have room for the outstanding receives, and the limit must be reachable
	 * (IBTA 11.2.4.3). Check everything before changing anything (ibv_modify_srq(3)). */
	const struct soft_limit limits[] = {
		{"max_wr", max_wr, SOFT_MAX_SRQ_WR},
		{"srq_limit", limit, max_wr},
	};

	if (mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT))
		return soft_refuse_value("FLAGS", "srq_attr_mask", (unsigned)mask);
	if (max_wr < 1)
		return soft_refuse_value("NO_ENTRIES", "max_wr", 0);
	if (max_wr < srq->rq.tail - srq->rq.head)
		return soft_refuse_value("OUTSTANDING", "max_wr", max_wr);
	int rc = soft_check_limits(limits, sizeof(limits) / sizeof(limits[0]));

	if (rc)
		return rc;
	if (max_wr != srq->rq.max_wr)
		resize(srq, fresh);
	srq->limit = limit;
	return 0;
}

int soft_ibv_modify_srq(struct ibv_srq *ibv, struct ibv_srq_attr *srq_attr, int srq_attr_mask)
{
	struct soft_srq *srq = soft_srq_of(ibv);
	struct soft_receive_queue fresh = {0};
	int rc = 0;

	/* Allocate the new queue before taking the lock. If the requested size is too large,
	 * allocate nothing, because modify() will refuse it. */
	if (srq_attr_mask & IBV_SRQ_MAX_WR && srq_attr->max_wr <= SOFT_MAX_SRQ_WR)
		rc = soft_receive_queue_create(&fresh, ibv->pd, srq_attr->max_wr, srq->rq.max_sge);
	if (!rc) {
		soft_lock();
		rc = modify(srq, srq_attr, srq_attr_mask, &fresh);
		soft_unlock();
		soft_receive_queue_destroy(&fresh);
	}
	return soft_call_result("ibv_modify_srq", "srq", ibv->handle, rc);
}

int soft_ibv_query_srq(struct ibv_srq *ibv, struct ibv_srq_attr *srq_attr)
{
	const struct soft_srq *srq = soft_srq_of(ibv);

	soft_lock();
	*srq_attr = (struct ibv_srq_attr){
		.max_wr = srq->rq.max_wr,
		.max_sge = srq->rq.max_sge,
		.srq_limit = srq->limit,
	};
	soft_unlock();
	return 0;
}

int soft_post_srq_recv(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	struct soft_srq *srq = soft_srq_of(ibv);

	soft_lock();
	uint32_t tail = srq->rq.tail;
	enum soft_refusal refusal = soft_receive_queue_post(&srq->rq, &wr);

	SOFT_TRACE(shared_receives, srq, tail);
	if (refusal) {
		*bad_wr = wr;
		SOFT_TRACE(refused, "srq", ibv->handle, -1, wr->wr_id, &soft_refusals[refusal]);
	}
	soft_unlock();
	return soft_refusals[refusal].error;
}

int soft_ibv_destroy_srq(struct ibv_srq *ibv)
{
	struct soft_srq *srq = soft_srq_of(ibv);

	soft_lock();
	if (srq->users) {
		soft_unlock();
		/* A queue pair still uses the shared receive queue (ibv_destroy_srq(3)). */
		return soft_call_result("ibv_destroy_srq", "srq", ibv->handle,
					soft_refuse(EBUSY, "IN_USE"));
	}
	soft_pd_of(ibv->pd)->users--;
	if (srq->xrcd) {
		soft_xrc_remove_srq(srq);
		soft_cq_of(srq->cq)->users--;
	}
	soft_async_drop_events(soft_context_of(ibv->context), ibv);
	soft_unlock();

	soft_async_await_acks(soft_context_of(ibv->context), &ibv->mutex, &ibv->cond,
			      &ibv->events_completed, &srq->async_events_retrieved);
	destroy_members(srq);
	free(srq);
	return 0;
}
