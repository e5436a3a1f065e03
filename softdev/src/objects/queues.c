/* Send and receive rings of queue pairs and shared receive queues. The memory for all work requests
 * of a ring is allocated when the ring is created. */

#include "objects.h"

const struct soft_refused soft_refusals[] = {{NULL, 0},
#define R(name, error) {#name, error},
					     SOFT_REFUSALS(R)
#undef R
};

uint32_t soft_slots_for(uint32_t count)
{
	uint32_t slots = 1;

	while (slots < count)
		slots *= 2;
	return slots;
}

int soft_receive_queue_create(struct soft_receive_queue *rq, struct ibv_pd *pd, uint32_t max_wr,
			      uint32_t max_sge)
{
	uint32_t slots = soft_slots_for(max_wr);

	/* One more SGE is allocated, so that `sges` points into its block even if max_sge is 0. */
	*rq = (struct soft_receive_queue){
		.slots = soft_queue_alloc(pd, slots, sizeof(*rq->slots), SOFT_RECEIVE_QUEUE),
		.sges = soft_queue_alloc(pd, (size_t)slots * max_sge + 1, sizeof(*rq->sges),
					 SOFT_RECEIVE_QUEUE),
		.max_wr = max_wr,
		.max_sge = max_sge,
		.mask = slots - 1,
	};
	if (rq->slots && rq->sges)
		return 0;
	soft_receive_queue_destroy(rq);
	return ENOMEM;
}

void soft_receive_queue_destroy(struct soft_receive_queue *rq)
{
	soft_queue_free(rq->slots);
	soft_queue_free(rq->sges);
	rq->slots = NULL;
	rq->sges = NULL;
}

static enum soft_refusal post_one(struct soft_receive_queue *rq, const struct ibv_recv_wr *wr)
{
	uint64_t length = 0;

	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > rq->max_sge)
		return SOFT_REFUSED_SGES;
	if (rq->tail - rq->head >= rq->max_wr)
		return SOFT_REFUSED_FULL;
	for (int i = 0; i < wr->num_sge; i++)
		length += wr->sg_list[i].length;
	*soft_receive_at(rq, rq->tail) = (struct soft_recv_wqe){
		.wr_id = wr->wr_id,
		.length = length,
		.num_sge = (uint32_t)wr->num_sge,
	};
	if (wr->num_sge)
		memcpy(soft_receive_sges(rq, rq->tail), wr->sg_list,
		       sizeof(*wr->sg_list) * (size_t)wr->num_sge);
	rq->tail++;
	return SOFT_ACCEPTED;
}

enum soft_refusal soft_receive_queue_post(struct soft_receive_queue *rq, struct ibv_recv_wr **wr)
{
	enum soft_refusal refusal = SOFT_ACCEPTED;

	while (*wr) {
		refusal = post_one(rq, *wr);
		if (refusal)
			break;
		*wr = (*wr)->next;
	}
	return refusal;
}

void soft_receive_queue_move(struct soft_receive_queue *from, struct soft_receive_queue *to)
{
	const struct soft_recv_wqe *receive = soft_receive_at(from, from->head);

	*soft_receive_at(to, to->tail) = *receive;
	memcpy(soft_receive_sges(to, to->tail), soft_receive_sges(from, from->head),
	       sizeof(*to->sges) * receive->num_sge);
	from->head++;
	to->tail++;
}

int soft_queues_create(struct soft_qp *qp)
{
	uint32_t sends = soft_slots_for(qp->cap.max_send_wr);
	struct ibv_pd *pd = qp->ibv.pd; /* or NULL */
	int rc;

	if (qp->ibv.srq) /* room for the receive of the current message */
		rc = soft_receive_queue_create(&qp->rq, pd, 1,
					       soft_srq_of(qp->ibv.srq)->rq.max_sge);
	else if (qp->xrcd) /* room for one receive taken from any SRQ of the XRC domain */
		rc = soft_receive_queue_create(&qp->rq, pd, 1, SOFT_MAX_SGE);
	else
		rc = soft_receive_queue_create(&qp->rq, pd, qp->cap.max_recv_wr,
					       qp->cap.max_recv_sge);

	if (rc)
		return rc;
	qp->sq.mask = sends - 1;
	qp->sq.slots = soft_queue_alloc(pd, sends, sizeof(*qp->sq.slots), SOFT_SEND_QUEUE);
	qp->sq.slot_data =
		soft_queue_alloc(pd, sends, soft_send_slot_data_size(qp), SOFT_SEND_QUEUE);
	if (soft_qp_is_ud(qp))
		qp->sq.destinations =
			soft_queue_alloc(pd, sends, sizeof(*qp->sq.destinations), SOFT_SEND_QUEUE);
	if (qp->sq.slots && qp->sq.slot_data && (qp->sq.destinations || !soft_qp_is_ud(qp)))
		return 0;
	soft_queues_destroy(qp);
	return ENOMEM;
}

void soft_queues_destroy(struct soft_qp *qp)
{
	soft_queue_free(qp->sq.slots);
	soft_queue_free(qp->sq.slot_data);
	soft_queue_free(qp->sq.destinations);
	soft_receive_queue_destroy(&qp->rq);
	if (qp->transport->undo_prepare_rtr)
		qp->transport->undo_prepare_rtr(qp);
}

/* Discard all posted requests. In RESET, they generate no completions (IBTA 10.3.1.1). */
void soft_queues_reset(struct soft_qp *qp)
{
	qp->sq.oldest = qp->sq.next = qp->sq.tail = qp->sq.reads = 0;
	qp->rq.head = qp->rq.tail = 0;
	if (qp->transport->undo_prepare_rtr)
		qp->transport->undo_prepare_rtr(qp);
}
