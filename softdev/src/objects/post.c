/* Adds work requests to the send and receive rings, in the thread that posts them.
 *
 * An invalid call (state, full queue, counts, unknown opcode) fails with an errno value and sets
 * *bad_wr. Errors during execution (keys, bounds, the peer's response) are reported in the
 * completion.
 *
 * Sending starts before the call returns. The whole chain is added to the ring first. Releasing the
 * lock (soft_unlock) then passes all requests to the path together.
 */

#include "objects.h"
#include "trace/trace.h"

enum request_source { FROM_POST_SEND, FROM_BUILDERS /* the ibv_wr_*() calls */ };

static enum soft_refusal check_opcode(const struct soft_qp *qp, const struct ibv_send_wr *wr,
				      enum request_source source)
{
	switch (wr->opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
		return SOFT_ACCEPTED;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
	case IBV_WR_BIND_MW:
		return soft_qp_is_ud(qp) ? SOFT_REFUSED_OPCODE
					 : SOFT_ACCEPTED; /* ibv_post_send(3) */
	case IBV_WR_RDMA_READ:
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		/* READs and atomics need a reliable connection. The response is written to their
		 * SGEs, so they cannot be inline (ibv_post_send(3)). */
		if (wr->send_flags & IBV_SEND_INLINE)
			return SOFT_REFUSED_FLAGS;
		__attribute__((fallthrough));
	case IBV_WR_ATOMIC_WRITE:
		return soft_qp_is_requester(qp) ? SOFT_ACCEPTED : SOFT_REFUSED_OPCODE;
	case IBV_WR_FLUSH: /* only ibv_wr_flush() can build it */
		return source == FROM_BUILDERS ? SOFT_ACCEPTED : SOFT_REFUSED_UNSUPPORTED;
	case IBV_WR_TSO:
	case IBV_WR_DRIVER1:
		return SOFT_REFUSED_UNSUPPORTED;
	}
	return SOFT_REFUSED_OPCODE;
}

static uint64_t length_of(const struct ibv_sge *sges, int count)
{
	uint64_t length = 0;

	for (int i = 0; i < count; i++)
		length += sges[i].length;
	return length;
}

/* Returns whether the destination is valid. Its address handle must belong to the queue pair's
 * protection domain (IBTA 10.2.2.2). */
static bool has_destination(const struct soft_qp *qp, const struct ibv_send_wr *wr)
{
	return wr->wr.ud.ah && soft_pd_root(wr->wr.ud.ah->pd) == soft_pd_root(qp->ibv.pd) &&
	       wr->wr.ud.remote_qpn <= SOFT_PSN_MASK;
}

/* Returns the maximum size of inline data. An atomic write can always store its word inline. */
static uint32_t max_inline_size(const struct soft_qp *qp, enum ibv_wr_opcode opcode)
{
	return opcode == IBV_WR_ATOMIC_WRITE ? SOFT_ATOMIC_WORD : qp->cap.max_inline_data;
}

/* Check a send request. `local` is true for a request that the device executes without sending
 * anything (LOCAL_INV, BIND_MW). */
static enum soft_refusal check_send(const struct soft_qp *qp, const struct ibv_send_wr *wr,
				    enum request_source source, bool local, int num_sge)
{
	/* An inline request from the builders has its data in the batch, so max_send_sge does not
	 * limit its SGEs. */
	bool data_in_batch = source == FROM_BUILDERS && wr->send_flags & IBV_SEND_INLINE;
	enum soft_refusal refusal = check_opcode(qp, wr, source);

	if (refusal)
		return refusal;
	if (soft_qp_is_ud(qp) && !has_destination(qp, wr))
		return SOFT_REFUSED_DESTINATION;
	if (qp->ibv.qp_type == IBV_QPT_XRC_SEND && !local &&
	    wr->qp_type.xrc.remote_srqn > SOFT_PSN_MASK)
		return SOFT_REFUSED_DESTINATION;
	if (num_sge < 0 || (!data_in_batch && (uint32_t)num_sge > qp->cap.max_send_sge))
		return SOFT_REFUSED_SGES;
	if (wr->send_flags &
	    ~(unsigned)(IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE))
		return SOFT_REFUSED_FLAGS;
	return qp->sq.tail - qp->sq.oldest >= qp->cap.max_send_wr ? SOFT_REFUSED_FULL
								  : SOFT_ACCEPTED;
}

/* Fill in the members that depend on the opcode. For a FLUSH, `*length` becomes the length of the
 * flushed range. */
static enum soft_refusal fill_operation(struct soft_send_wqe *send, const struct ibv_send_wr *wr,
					uint64_t *length)
{
	switch (wr->opcode) {
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		send->remote_address = wr->wr.atomic.remote_addr;
		send->rkey = wr->wr.atomic.rkey;
		soft_put64(send->arguments, wr->wr.atomic.compare_add);
		soft_put64(send->arguments + 8, wr->wr.atomic.swap);
		/* An atomic operates on exactly 64 bits (IBTA 9.4.5). */
		if (*length != SOFT_ATOMIC_RESULT)
			send->status = IBV_WC_LOC_LEN_ERR;
		return SOFT_ACCEPTED;
	case IBV_WR_ATOMIC_WRITE:
		send->remote_address = wr->wr.rdma.remote_addr;
		send->rkey = wr->wr.rdma.rkey;
		if (*length != SOFT_ATOMIC_WORD)
			send->status = IBV_WC_LOC_LEN_ERR;
		return SOFT_ACCEPTED;
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_RDMA_READ:
		send->remote_address = wr->wr.rdma.remote_addr;
		send->rkey = wr->wr.rdma.rkey;
		return SOFT_ACCEPTED;
	case IBV_WR_FLUSH:
		/* wr_flush() passes the type and level in `swap`, and the length in
		 * `compare_add`. */
		send->remote_address = wr->wr.atomic.remote_addr;
		send->rkey = wr->wr.atomic.rkey;
		send->flush = (uint8_t)wr->wr.atomic.swap;
		*length = wr->wr.atomic.compare_add;
		send->length = (uint32_t)*length;
		send->psns = 1;
		return SOFT_ACCEPTED;
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
		send->rkey = wr->invalidate_rkey;
		return SOFT_ACCEPTED;
	case IBV_WR_BIND_MW:
		return soft_bind_prepare(send, wr) ? SOFT_ACCEPTED : SOFT_REFUSED_BIND;
	default:
		return SOFT_ACCEPTED;
	}
}

static void fill_destination(struct soft_qp *qp, struct soft_send_wqe *send,
			     const struct ibv_send_wr *wr)
{
	if (qp->ibv.qp_type == IBV_QPT_XRC_SEND && !send->local)
		send->remote_srqn = wr->qp_type.xrc.remote_srqn;
	if (soft_qp_is_ud(qp))
		*soft_send_destination(qp, qp->sq.tail) = (struct soft_destination){
			.path = soft_ah_of(wr->wr.ud.ah)->path,
			.qpn = wr->wr.ud.remote_qpn,
			.qkey = wr->wr.ud.remote_qkey,
		};
}

/* Copy the data of an inline request, because the program may reuse its memory after the call. For
 * other requests, copy only the SGEs. */
static void copy_data(struct soft_qp *qp, struct soft_send_wqe *send, const struct ibv_send_wr *wr,
		      int num_sge)
{
	if (wr->send_flags & IBV_SEND_INLINE) {
		uint8_t *to = wr->opcode == IBV_WR_ATOMIC_WRITE ? send->arguments
								: soft_send_inline(qp, qp->sq.tail);

		for (int i = 0; i < num_sge; i++) {
			if (wr->sg_list[i].length)
				memcpy(to, (void *)(uintptr_t)wr->sg_list[i].addr,
				       wr->sg_list[i].length);
			to += wr->sg_list[i].length;
		}
	} else if (num_sge) {
		memcpy(soft_send_sges(qp, qp->sq.tail), wr->sg_list,
		       sizeof(*wr->sg_list) * (size_t)num_sge);
	}
}

static enum soft_refusal post_one_send(struct soft_qp *qp, const struct ibv_send_wr *wr,
				       enum request_source source)
{
	bool local = wr->opcode == IBV_WR_LOCAL_INV || wr->opcode == IBV_WR_BIND_MW;
	int num_sge = local ? 0 : wr->num_sge;
	enum soft_refusal refusal = check_send(qp, wr, source, local, num_sge);

	if (refusal)
		return refusal;
	uint64_t length = length_of(wr->sg_list, num_sge);
	struct soft_send_wqe *send = soft_send_at(qp, qp->sq.tail);

	if (wr->send_flags & IBV_SEND_INLINE && length > max_inline_size(qp, wr->opcode))
		return SOFT_REFUSED_INLINE;
	*send = (struct soft_send_wqe){
		.wr_id = wr->wr_id,
		.immediate = wr->imm_data,
		.length = (uint32_t)length,
		.opcode = (uint8_t)wr->opcode,
		.flags = (uint8_t)wr->send_flags,
		.num_sge = (uint8_t)num_sge,
		.psn = qp->sq.psn,
		.psns = local ? 0 : soft_psn_count(qp, (uint32_t)length),
		.local = local,
	};
	refusal = fill_operation(send, wr, &length);
	if (refusal)
		return refusal;
	fill_destination(qp, send, wr);
	if (length > (soft_qp_is_ud(qp) ? 1u << soft_mtu_shift(qp) : SOFT_MAX_MESSAGE))
		send->status = IBV_WC_LOC_LEN_ERR; /* IBTA 9.7.2, 10.7.2.2 */
	copy_data(qp, send, wr, num_sge);
	qp->sq.psn += send->psns;
	qp->sq.tail++;
	return SOFT_ACCEPTED;
}

/* Post requests until one is refused, and set *bad_wr to that request. */
static enum soft_refusal post_chain(struct soft_qp *qp, struct ibv_send_wr *wr,
				    struct ibv_send_wr **bad_wr, enum request_source source)
{
	enum soft_refusal refusal = SOFT_ACCEPTED;

	/* Requests are refused in RESET, INIT and RTR, kept in SQD until the queue resumes, and
	 * flushed in SQE and ERR (IBTA 10.3.1). An XRC_RECV queue pair has no send queue. */
	if (qp->xrcd)
		refusal = SOFT_REFUSED_NO_QUEUE;
	else if (qp->ibv.state < IBV_QPS_RTS)
		refusal = SOFT_REFUSED_STATE;
	for (; wr && !refusal; wr = wr->next) {
		refusal = post_one_send(qp, wr, source);
		if (refusal)
			break;
	}
	if (refusal)
		*bad_wr = wr;
	return refusal;
}

int soft_post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
	struct soft_qp *qp = soft_qp_of(ibv);

	soft_lock();
	uint32_t old_tail = qp->sq.tail;
	enum soft_refusal refusal = post_chain(qp, wr, bad_wr, FROM_POST_SEND);

	SOFT_TRACE(sends, qp, old_tail);
	if (refusal)
		SOFT_TRACE(refused, "qp_num", ibv->qp_num, (*bad_wr)->opcode, (*bad_wr)->wr_id,
			   &soft_refusals[refusal]);
	soft_qp_kick(qp);
	soft_unlock();
	return soft_refusals[refusal].error;
}

enum soft_refusal soft_post_batch(struct soft_qp *qp, struct ibv_send_wr *wr,
				  struct ibv_send_wr **bad_wr)
{
	soft_assert_locked();
	uint32_t old_tail = qp->sq.tail, old_psn = qp->sq.psn;
	enum soft_refusal refusal = post_chain(qp, wr, bad_wr, FROM_BUILDERS);

	if (refusal) { /* a batch is posted completely or not at all */
		qp->sq.tail = old_tail;
		qp->sq.psn = old_psn;
	} else {
		SOFT_TRACE(sends, qp, old_tail);
		soft_qp_kick(qp);
	}
	return refusal;
}

int soft_post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
	struct soft_qp *qp = soft_qp_of(ibv);

	soft_lock();
	uint32_t old_tail = qp->rq.tail;
	/* Receives are refused in RESET (IBTA 10.3.1.1). XRC queue pairs, and queue pairs with a
	 * shared receive queue, have no receive queue of their own (IBTA 10.2.9). */
	enum soft_refusal refusal = ibv->srq || soft_is_xrc(ibv->qp_type) ? SOFT_REFUSED_NO_QUEUE
				    : ibv->state == IBV_QPS_RESET
					    ? SOFT_REFUSED_STATE
					    : soft_receive_queue_post(&qp->rq, &wr);

	SOFT_TRACE(receives, qp, old_tail);
	if (refusal) {
		*bad_wr = wr;
		SOFT_TRACE(refused, "qp_num", ibv->qp_num, -1, wr->wr_id, &soft_refusals[refusal]);
	}
	if (ibv->state == IBV_QPS_ERR)
		soft_flush(qp);
	soft_unlock();
	return soft_refusals[refusal].error;
}
