/* The requester: from the send queue to request frames.
 *
 * Requests are transmitted in the order they were posted.  What holds the next one back: an RNR
 * timer, a fence behind READs and atomics that are not answered (IBTA 10.8.3.3), too many of those
 * under way (max_rd_atomic: ibv_modify_qp(3)), or SQD.
 *
 * Local requests (binds and invalidations of windows) are carried out in their place among the
 * others, when everything before them has begun, so that a peer which is told a key finds it valid
 * (IBTA 10.8.3.3).  They have no PSN, and complete in their place too.
 *
 * A request that turns out to be wrong on this side is marked, and fails when all before it have
 * completed: completions keep the order of posting.
 */
#include <sys/uio.h>

#include "objects/objects.h"

static uint8_t wire_opcode(uint8_t opcode)
{
	switch (opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return SOFT_WRITE;
	case IBV_WR_RDMA_READ:
		return SOFT_READ;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		return SOFT_COMPARE_SWAP;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return SOFT_FETCH_ADD;
	case IBV_WR_ATOMIC_WRITE:
		return SOFT_ATOMIC_WRITE;
	default:
		return SOFT_SEND;
	}
}

/* Every SGE, before anything is transmitted: a message should not fail half way if that can be
 * known (IBTA 10.7.2.2, local protection error). */
static bool memory_is_allowed(const struct soft_qp *qp, uint32_t index, unsigned rights)
{
	const struct soft_send *send = soft_send_at(qp, index);
	const struct ibv_sge *sges = soft_send_sges(qp, index);

	if (send->flags & IBV_SEND_INLINE)
		return true;
	for (uint32_t i = 0; i < send->num_sge; i++)
		if (sges[i].length && !soft_memory_allowed(sges[i].lkey, qp->ibv.pd, sges[i].addr,
							   sges[i].length, rights))
			return false;
	return true;
}

/* May the message at plan->next begin? */
static bool may_begin(struct soft_qp *qp, const struct soft_plan *plan, struct soft_send *send,
		      bool read)
{
	/* SQD begins nothing, but what has begun is brought to its end (IBTA 10.3.1.5). */
	if (qp->ibv.state != IBV_QPS_RTS &&
	    (qp->ibv.state != IBV_QPS_SQD || (int32_t)(qp->sq.begun - plan->next) <= 0))
		return false;
	if (plan->reads &&
	    (send->flags & IBV_SEND_FENCE || (read && plan->reads >= qp->attr.max_rd_atomic)))
		return false;
	if (read && qp->attr.max_rd_atomic == 0)
		send->status = IBV_WC_LOC_QP_OP_ERR; /* it could never be sent */
	else if (!memory_is_allowed(qp, plan->next, read ? IBV_ACCESS_LOCAL_WRITE : 0))
		send->status = IBV_WC_LOC_PROT_ERR;
	return !send->status;
}

/* False: its turn has not come, or it has failed. */
static bool carried_out(struct soft_qp *qp, struct soft_send *send, uint32_t reads)
{
	if (send->done)
		return true;
	if (qp->ibv.state != IBV_QPS_RTS || send->status || (reads && send->flags & IBV_SEND_FENCE))
		return false;
	send->done = send->opcode == IBV_WR_BIND_MW ? soft_bind(qp, send)
						    : soft_invalidate(qp, send->rkey);
	if (!send->done)
		send->status = IBV_WC_MW_BIND_ERR; /* IBTA 11.6.2: memory management operation */
	return send->done;
}

bool soft_requester_next(struct soft_qp *qp, struct soft_plan *plan, struct soft_outgoing *out)
{
	while (plan->next != qp->sq.tail && soft_send_at(qp, plan->next)->local) {
		if (qp->rnr_waiting || !carried_out(qp, soft_send_at(qp, plan->next), plan->reads))
			return false;
		plan->next++;
	}
	struct soft_send *send = soft_send_at(qp, plan->next);
	uint8_t opcode = wire_opcode(send->opcode);
	bool read = soft_is_read(opcode);
	uint32_t length = send->length - plan->next_offset;
	bool refers = false;

	if (plan->next == qp->sq.tail || qp->rnr_waiting || send->status)
		return false;
	if (plan->next_offset == 0 && !may_begin(qp, plan, send, read))
		return false;
	if (opcode == SOFT_READ)
		length = 0;
	else if (read)
		length = SOFT_ATOMIC_ARGUMENTS;
	else
		length = soft_frame_share(plan, length, &refers);

	*out = (struct soft_outgoing){
		.index = plan->next,
		.last = read || plan->next_offset + length == send->length,
		.refers = refers,
		.frame =
			{
				.opcode = opcode,
				.length = length,
				.psn = soft_send_psn(qp, plan->next),
				.address = send->remote_address,
				.rkey = send->rkey,
				.total = send->length,
				.offset = plan->next_offset,
			},
	};
	if (opcode == SOFT_READ) { /* what has come of it is not asked for again */
		out->frame.address += send->received;
		out->frame.total -= send->received;
	}
	if (send->flags & IBV_SEND_SOLICITED)
		out->frame.flags |= SOFT_FRAME_SOLICITED;
	if (send->opcode == IBV_WR_SEND_WITH_IMM || send->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
		out->frame.flags |= SOFT_FRAME_IMMEDIATE;
		out->frame.immediate = send->immediate;
	}
	if (send->opcode == IBV_WR_SEND_WITH_INV)
		out->frame.flags |= SOFT_FRAME_INVALIDATE;
	if (out->last) {
		plan->next++;
		plan->next_offset = 0;
		plan->reads += read;
	} else {
		plan->next_offset += length;
	}
	return true;
}

void soft_requester_commit(struct soft_qp *qp, const struct soft_outgoing *out)
{
	struct soft_send_queue *sq = &qp->sq;

	soft_requester_began(qp, out->index);
	soft_requester_pass(qp);
	/* A NAK that came in while the frame was on its way out has moved us back. */
	if (out->index != sq->next || out->frame.offset != sq->next_offset)
		return;
	if (out->last) {
		sq->next++;
		sq->next_offset = 0;
		sq->reads += soft_is_read(out->frame.opcode);
		if (soft_qp_is_uc(qp)) /* sent is done: IBTA 9.8.2 */
			soft_complete_send(qp, IBV_WC_SUCCESS);
	} else {
		sq->next_offset += out->frame.length;
	}
	soft_requester_await(qp);
}

int soft_requester_gather(struct soft_qp *qp, const struct soft_outgoing *out, uint32_t from,
			  uint32_t length, struct iovec *iov, int room)
{
	struct soft_send *send = soft_send_at(qp, out->index);

	if (soft_is_read(out->frame.opcode) ||
	    (send->flags & IBV_SEND_INLINE && out->frame.opcode == SOFT_ATOMIC_WRITE)) {
		*iov = (struct iovec){.iov_base = send->arguments + from, .iov_len = length};
		return 1;
	}
	if (send->flags & IBV_SEND_INLINE) {
		*iov = (struct iovec){.iov_base = soft_send_inline(qp, out->index) + from,
				      .iov_len = length};
		return 1;
	}
	return soft_sge_walk(qp->ibv.pd, soft_send_sges(qp, out->index), send->num_sge,
			     (uint64_t)out->frame.offset + from, length,
			     out->refers ? SOFT_ACCESS_REFERENCE : 0, iov, room);
}

void soft_requester_fail(struct soft_qp *qp, enum ibv_wc_status status)
{
	soft_references_flush(qp);
	soft_complete_send(qp, status);
	if (qp->ibv.qp_type == IBV_QPT_RC)
		soft_qp_error(qp);
	else
		soft_qp_send_error(qp);
}

void soft_requester_lose(struct soft_qp *qp)
{
	struct soft_outgoing out;

	for (;;) {
		struct soft_plan plan = {
			.next = qp->sq.next,
			.next_offset = qp->sq.next_offset,
			.most = SOFT_FRAME_MAX,
		};

		if (!soft_requester_next(qp, &plan, &out))
			break;
		soft_requester_commit(qp, &out);
	}
	soft_requester_settle(qp);
	soft_qp_check_drained(qp);
}

void soft_requester_pass(struct soft_qp *qp)
{
	struct soft_send_queue *sq = &qp->sq;

	while (sq->next != sq->tail && soft_send_at(qp, sq->next)->done)
		sq->next++;
	while (sq->oldest != sq->next && soft_send_at(qp, sq->oldest)->local)
		soft_complete_send(qp, IBV_WC_SUCCESS);
}

void soft_requester_settle(struct soft_qp *qp)
{
	struct soft_send_queue *sq = &qp->sq;

	while (sq->next != sq->tail && soft_send_at(qp, sq->next)->local &&
	       carried_out(qp, soft_send_at(qp, sq->next), sq->reads))
		sq->next++;
	soft_requester_pass(qp);
	if (qp->ibv.state == IBV_QPS_RTS && sq->oldest != sq->tail && sq->oldest == sq->next &&
	    soft_send_at(qp, sq->oldest)->status)
		soft_requester_fail(qp, soft_send_at(qp, sq->oldest)->status);
}
