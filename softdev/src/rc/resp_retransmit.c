/* Handling of requests out of PSN order, the responder's part of the reliability protocol.
 *
 * PSNs are compared on a circle. A PSN in the half behind the expected PSN is a duplicate, and a
 * PSN ahead of it indicates a gap (IBTA 9.7.4.1.2). The responder reports a gap once, and discards
 * everything until the missing request arrives (9.7.5.1). A duplicate means that the response may
 * have been lost. The responder repeats the response without executing the request again (9.7.5.1):
 * it acknowledges a SEND or WRITE, responds to a FLUSH or ATOMIC WRITE, reads the current memory
 * for a READ, and returns the first result of an atomic (9.4.5).
 *
 * If the memory of a repeated READ is no longer accessible, the responder sends a NAK, but its
 * queue pair continues. The requester may have received the first response, and the application may
 * have deregistered the memory for this reason. The requester fails if it is still waiting for the
 * response, and otherwise ignores the NAK.
 */
#include "rc.h"
#include "trace/trace.h"

static void trace_dropped_psn(const struct soft_qp *qp, uint32_t psn)
{
	SOFT_TRACE_DROPPED(.reason = "PSN", .qp_num = qp->ibv.qp_num,
			   .remote_qpn = qp->attr.dest_qp_num, .has_psn = true, .psn = psn,
			   .expected_psn = qp->responder.expected_psn);
}

/* Drop the unsent responses from `psn` on. The requester will repeat their requests. */
static void drop_unsent_responses(struct soft_qp *qp, uint32_t psn)
{
	struct soft_responder *responder = &qp->responder;
	uint32_t tail = responder->response_head;

	while (tail != responder->response_tail &&
	       soft_psn_before(soft_response_at(qp, tail)->psn, psn))
		tail++;
	responder->response_tail = tail;
}

/* Queue a repeated response and drop the unsent ones after it. Returns NULL if no slot is free. */
static struct soft_response *queue_repeated_response(struct soft_qp *qp,
						     const struct soft_frame *frame, uint8_t opcode,
						     uint32_t length, const uint8_t *result)
{
	struct soft_responder *responder = &qp->responder;

	drop_unsent_responses(qp, frame->psn);
	if (soft_responder_is_full(responder))
		return NULL;
	struct soft_response *response = soft_responder_queue_response(qp, frame, opcode, length);

	response->may_be_uncounted = true;
	response->msn = responder->msn; /* the request was counted when it was executed */
	if (result)
		memcpy(response->result, result, SOFT_ATOMIC_RESULT);
	soft_qp_link_output(qp->link);
	return response;
}

struct soft_rd_atomic *soft_responder_find_rd_atomic(const struct soft_responder *responder,
						     uint8_t opcode, uint32_t psn)
{
	const uint32_t stored = soft_stored_rd_atomics(responder);

	for (uint32_t age = 1; age <= stored; age++) {
		struct soft_rd_atomic *request =
			soft_rd_atomic_at(responder, responder->rd_atomic_count - age);

		if (request->opcode == opcode &&
		    ((psn - request->psn) & SOFT_PSN_MASK) < request->psns)
			return request;
	}
	return NULL;
}

static void repeat_read(struct soft_qp *qp, const struct soft_frame *frame)
{
	const struct soft_rd_atomic *read =
		soft_responder_find_rd_atomic(&qp->responder, frame->opcode, frame->psn);
	uint32_t behind = (qp->responder.expected_psn - frame->psn) & SOFT_PSN_MASK;

	/* A duplicate cannot extend beyond the PSNs already executed. Also ignore a duplicate
	 * with a different key. A wrong key in a new request ends the queue
	 * pair, and a duplicate must not allow a sender to try keys without that risk. */
	if (!read || read->rkey != frame->rkey || soft_psn_count(qp, frame->dma_length) > behind) {
		trace_dropped_psn(qp, frame->psn);
		return;
	}
	struct soft_response *response =
		queue_repeated_response(qp, frame, SOFT_READ_DATA, frame->dma_length, NULL);

	if (response &&
	    (!(qp->attr.qp_access_flags & IBV_ACCESS_REMOTE_READ) ||
	     (frame->dma_length &&
	      !soft_remote_range(qp, soft_remote_pd(qp, frame->ack), frame->rkey, frame->address,
				 frame->dma_length, IBV_ACCESS_REMOTE_READ))))
		soft_responder_refuse_repeated(qp, response);
}

static void repeat_atomic(struct soft_qp *qp, const struct soft_frame *frame)
{
	const struct soft_rd_atomic *atomic =
		soft_responder_find_rd_atomic(&qp->responder, frame->opcode, frame->psn);

	if (atomic)
		queue_repeated_response(qp, frame, SOFT_ATOMIC_DATA, SOFT_ATOMIC_RESULT,
					atomic->result);
	else
		trace_dropped_psn(qp, frame->psn);
}

/* Returns whether the request repeats a remembered FLUSH or ATOMIC WRITE, which is answered like an
 * empty READ. A request that is not remembered may be forged, so it is only acknowledged. */
static bool repeats_empty_read(const struct soft_responder *responder,
			       const struct soft_frame *frame)
{
	for (uint32_t i = 0; i < SOFT_KNOWN_EMPTY_READS && i < responder->empty_read_count; i++)
		if (responder->empty_read_psns[i] == frame->psn)
			return soft_is_empty_read(frame->opcode);
	return false;
}

static void repeat_ack(struct soft_qp *qp)
{
	/* Step back by one PSN to acknowledge the last one again. */
	qp->responder.acked_psn = soft_psn_prev(qp->responder.acked_psn);
	soft_qp_link_output(qp->link);
}

static void repeat_response(struct soft_qp *qp, const struct soft_frame *frame)
{
	if (frame->opcode == SOFT_READ)
		repeat_read(qp, frame);
	else if (soft_is_read(frame->opcode))
		repeat_atomic(qp, frame);
	else if (repeats_empty_read(&qp->responder, frame))
		queue_repeated_response(qp, frame, SOFT_READ_DATA, 0, NULL);
	else {
		/* If no request has been accepted yet, the packet cannot be a duplicate. */
		if (!qp->comm_established)
			trace_dropped_psn(qp, frame->psn);
		/* Repeat the acknowledgement even in the middle of a message, because a requester
		 * with a congestion window may be waiting for it. */
		repeat_ack(qp);
	}
}

enum soft_sink soft_responder_unexpected_psn(struct soft_qp *qp, const struct soft_frame *frame)
{
	soft_assert_locked();
	if (soft_psn_before(frame->psn, qp->responder.expected_psn))
		repeat_response(qp, frame);
	else {
		if (!qp->responder.awaiting_resend) /* once per gap */
			trace_dropped_psn(qp, frame->psn);
		soft_responder_report_gap(qp);
	}
	return SOFT_SINK_DISCARD;
}

void soft_responder_report_gap(struct soft_qp *qp)
{
	soft_assert_locked();
	if (!qp->responder.awaiting_resend)
		soft_responder_nak(qp, SOFT_NAK, SOFT_NAK_SEQUENCE);
	qp->responder.awaiting_resend = true;
}
