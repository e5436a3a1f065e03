/* The completer handles responses and completes requests.
 *
 * A response also acknowledges all earlier requests. An acknowledgement of PSN n, data with PSN
 * n + 1 and a NAK with PSN n + 1 each acknowledge everything up to PSN n (IBTA 9.7.5.1.2).
 * Responses arrive in the order of their requests. Once the earlier requests have been completed, a
 * response therefore belongs to the oldest outstanding request.
 */
#include <sys/uio.h>

#include "rc.h"
#include "trace/trace.h"

/* Continue sending after requests have been acknowledged or completed. This may have lifted a
 * fence, freed a slot for a READ, or drained the send queue. */
static void continue_sending(struct soft_qp *qp)
{
	qp->rnr_retries_remaining = qp->attr.rnr_retry;
	qp->rnr_nak_since_progress = false;
	soft_send_advance(qp);
	soft_requester_reset_retries(qp);
	if (qp->ibv.state == IBV_QPS_ERR)
		return;
	soft_qp_check_drained(qp);
	if (qp->sq.next != qp->sq.tail)
		soft_qp_link_output(qp->link);
}

/* Remove the READ parts that end at or before `psn`, because their data has arrived. A part that
 * has not been requested again since soft_requester_go_back() is not counted in `reads`. */
static void remove_answered_parts(struct soft_qp *qp, uint32_t psn)
{
	struct soft_window *window = qp->window;

	while (window->part_head != window->part_tail) {
		const uint32_t end = window->part_ends[window->part_head % SOFT_READ_PARTS];

		if ((int32_t)(psn - end) < 0)
			return;
		qp->sq.reads -= (int32_t)(qp->sq.next_psn - end) >= 0;
		window->part_head++;
	}
}

/* Record that all PSNs before `psn` have been answered. They are not retransmitted. */
static void mark_answered(struct soft_qp *qp, uint32_t psn)
{
	struct soft_send_queue *sq = &qp->sq;

	if (qp->window)
		remove_answered_parts(qp, psn);
	sq->unacked = psn;
	if ((int32_t)(sq->next_psn - psn) < 0)
		sq->next_psn = psn;
}

/* Complete the oldest request, whose PSNs end before `end` and have all been answered. */
static void complete_answered(struct soft_qp *qp, uint32_t end)
{
	mark_answered(qp, end);
	/* soft_complete_send() advances to the next request, so the requester must first stop
	 * counting or retransmitting this one. */
	soft_requester_skip_oldest(qp);
	soft_complete_send(qp, IBV_WC_SUCCESS);
}

bool soft_complete_acknowledged(struct soft_qp *qp, uint32_t psn)
{
	soft_assert_locked();
	struct soft_send_queue *sq = &qp->sq;
	uint32_t old_unacked = sq->unacked;
	uint32_t count = (psn + 1 - old_unacked) & SOFT_PSN_MASK;
	uint32_t until = old_unacked + count;

	if (!soft_qp_is_requester(qp))
		return false; /* no requests to acknowledge */
	/* If the PSN is not outstanding, it is valid only in a duplicate response, whose PSN comes
	 * before all outstanding ones. */
	if (count > sq->unsent - old_unacked)
		return soft_psn_before(until, old_unacked);
	while (sq->unacked != until) {
		/* Local requests have no PSN. Complete those that precede the next sent request. */
		soft_send_complete_local(qp);
		const struct soft_send_wqe *send = soft_send_at(qp, sq->oldest);
		uint32_t end = send->psn + send->psns;

		if (soft_send_expects_data(send))
			break;
		if ((int32_t)(until - end) < 0) {
			mark_answered(qp, until);
			break;
		}
		complete_answered(qp, end);
	}
	if (sq->unacked != old_unacked)
		continue_sending(qp);
	/* Only data completes a READ or an atomic. An acknowledgement of a later PSN means that the
	 * data was lost. */
	if (sq->unacked != until && qp->ibv.state != IBV_QPS_ERR)
		soft_requester_implied_nak(qp);
	return true;
}

/* ---- NAKs ---------------------------------------------------------------------------------- */

/* Convert an RNR timer code to nanoseconds. The table is in units of 10 us (IBTA 9.7.5.2.8, table
 * 45). */
static uint64_t rnr_delay_ns(uint8_t code)
{
	static const uint32_t delays[32] = {
		65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,    32,
		48,    64,   96,   128,  192,  256,   384,   512,   768,   1024,  1536,
		2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
	};

	return (uint64_t)delays[code & 31] * 10000u;
}

/* Pause sending after an RNR NAK, because the responder is not ready to receive. Fail the oldest
 * request if it has no retries left. */
static enum soft_sink handle_rnr_nak(struct soft_qp *qp, const struct soft_frame *frame)
{
	if (qp->rnr_paused)
		return SOFT_SINK_NONE; /* a duplicate */
	/* A retry count of 7 means to retry forever (IBTA 9.7.5.2.8). continue_sending() resets
	 * the count when a request has been acknowledged or completed. */
	if (qp->attr.rnr_retry != 7) {
		if (qp->rnr_retries_remaining == 0) {
			soft_send_fail(qp, IBV_WC_RNR_RETRY_EXC_ERR);
			return SOFT_SINK_DISCARD;
		}
		qp->rnr_retries_remaining--;
	}
	SOFT_TRACE(retry, qp, "RNR");
	/* The responder has not accepted this PSN or any later one. */
	soft_requester_go_back(qp);
	qp->rnr_nak_since_progress = qp->rnr_paused = true;
	soft_timer_start(&qp->rnr_timer, soft_now() + rnr_delay_ns(frame->syndrome));
	return SOFT_SINK_NONE;
}

/* Handle a sequence NAK, which reports that the first unacknowledged PSN is missing (IBTA
 * 9.7.5.2.3). */
static enum soft_sink handle_sequence_nak(struct soft_qp *qp)
{
	/* If the requester waits after an RNR NAK, or has already gone back, the NAK refers to
	 * packets that will be sent again in any case. */
	if (!qp->rnr_paused && qp->sq.next_psn != qp->sq.unacked)
		soft_requester_retry(qp);
	return SOFT_SINK_NONE;
}

static enum soft_sink handle_nak(struct soft_qp *qp, const struct soft_frame *frame)
{
	static const enum ibv_wc_status statuses[] = {
		[SOFT_NAK_INVALID_REQUEST] = IBV_WC_REM_INV_REQ_ERR,
		[SOFT_NAK_REMOTE_ACCESS] = IBV_WC_REM_ACCESS_ERR,
		[SOFT_NAK_REMOTE_OPERATION] = IBV_WC_REM_OP_ERR,
		[SOFT_NAK_REQUESTERS_MEMORY] = IBV_WC_LOC_PROT_ERR,
	};

	if (frame->syndrome == SOFT_NAK_SEQUENCE)
		return handle_sequence_nak(qp);
	if (frame->syndrome > SOFT_NAK_REQUESTERS_MEMORY || !statuses[frame->syndrome])
		return SOFT_SINK_BROKEN;
	soft_send_fail(qp, statuses[frame->syndrome]);
	return SOFT_SINK_DISCARD;
}

/* ---- data ---------------------------------------------------------------------------------- */

static enum soft_sink begin_read_data(struct soft_qp *qp, struct soft_frame *frame)
{
	const struct soft_send_wqe *send = soft_send_at(qp, qp->sq.oldest);
	uint64_t end = soft_message_offset(qp, frame->psn, send->psn) + frame->length;

	/* The response to a FLUSH or an ATOMIC WRITE contains no data. An acknowledgement
	 * completes these requests as well. */
	if (soft_send_is_empty_read(send))
		return frame->length || !soft_is_last(frame) ? SOFT_SINK_BROKEN : SOFT_SINK_NONE;
	if (qp->window && end < send->length)
		frame->flags |= SOFT_FRAME_MORE; /* last packet of a part, but not of the READ */
	if (send->opcode != IBV_WR_RDMA_READ || !soft_has_valid_length(qp, frame) ||
	    (soft_is_last(frame) ? end != send->length : end >= send->length))
		return SOFT_SINK_BROKEN;
	return frame->length ? SOFT_SINK_READ : SOFT_SINK_NONE;
}

/* Check the header of an atomic's response, whose payload is the old value of the memory. */
static enum soft_sink begin_atomic_data(struct soft_qp *qp, const struct soft_frame *frame)
{
	const struct soft_send_wqe *send = soft_send_at(qp, qp->sq.oldest);

	if (!soft_send_expects_data(send) || send->opcode == IBV_WR_RDMA_READ ||
	    frame->length != SOFT_ATOMIC_RESULT)
		return SOFT_SINK_BROKEN;
	return SOFT_SINK_SMALL;
}

enum soft_sink soft_response_begin(struct soft_qp *qp, struct soft_frame *frame)
{
	soft_assert_locked();
	const struct soft_send_queue *sq = &qp->sq;
	bool data = frame->opcode == SOFT_READ_DATA || frame->opcode == SOFT_ATOMIC_DATA;
	uint32_t acked_psn = frame->opcode == SOFT_ACK ? frame->psn : soft_psn_prev(frame->psn);

	if (!soft_qp_is_requester(qp) || (!data && frame->length))
		return SOFT_SINK_BROKEN;
	/* In RTR, the first PSN to send is not known yet, and no request can be acknowledged. The
	 * peer sends this acknowledgement only to select the stream (selection.c). */
	if (frame->opcode == SOFT_ACK && qp->ibv.state == IBV_QPS_RTR)
		return SOFT_SINK_NONE;
	if (!soft_complete_acknowledged(qp, acked_psn))
		return SOFT_SINK_BROKEN;
	if (frame->opcode == SOFT_ACK)
		return SOFT_SINK_NONE;
	if (qp->ibv.state == IBV_QPS_ERR)
		return SOFT_SINK_DISCARD;
	/* Discard duplicate responses and responses that follow a missing one. */
	if (((sq->unacked - frame->psn) & SOFT_PSN_MASK) &&
	    (frame->opcode != SOFT_READ_DATA || !soft_trim(qp, frame, sq->unacked)))
		return SOFT_SINK_DISCARD;
	if (sq->unacked == sq->unsent)
		return SOFT_SINK_BROKEN; /* no outstanding request */
	switch (frame->opcode) {
	case SOFT_READ_DATA:
		return begin_read_data(qp, frame);
	case SOFT_ATOMIC_DATA:
		return begin_atomic_data(qp, frame);
	case SOFT_RNR_NAK:
		return handle_rnr_nak(qp, frame);
	default:
		return handle_nak(qp, frame);
	}
}

int soft_response_scatter(struct soft_qp *qp, const struct soft_frame *frame, uint32_t from,
			  uint32_t length, struct iovec *iov, int room)
{
	soft_assert_locked();
	const struct soft_send_wqe *send = soft_send_at(qp, qp->sq.oldest);
	int count = soft_sge_to_iovecs(qp->ibv.pd, soft_send_sges(qp, qp->sq.oldest), send->num_sge,
				       soft_message_offset(qp, frame->psn, send->psn) + from,
				       length, IBV_ACCESS_LOCAL_WRITE, iov, room);

	if (count < 0)
		soft_send_fail(qp, IBV_WC_LOC_PROT_ERR);
	return count;
}

/* Complete the oldest request, a READ or an atomic whose response has arrived. */
static void complete_oldest(struct soft_qp *qp)
{
	const struct soft_send_wqe *send = soft_send_at(qp, qp->sq.oldest);

	complete_answered(qp, send->psn + send->psns);
	continue_sending(qp);
}

/* Complete an atomic operation. The old value arrives in little-endian byte order and is stored in
 * host byte order. */
static void complete_atomic(struct soft_qp *qp, const uint8_t *atomic_payload)
{
	struct soft_send_wqe *send = soft_send_at(qp, qp->sq.oldest);
	struct iovec iov[SOFT_ATOMIC_RESULT]; /* each byte may belong to another SGE */
	uint64_t old_value = soft_get64(atomic_payload);
	const uint8_t *from = (const uint8_t *)&old_value;
	int count = soft_sge_to_iovecs(qp->ibv.pd, soft_send_sges(qp, qp->sq.oldest), send->num_sge,
				       0, SOFT_ATOMIC_RESULT, IBV_ACCESS_LOCAL_WRITE, iov,
				       SOFT_ATOMIC_RESULT);

	if (count < 0) {
		soft_send_fail(qp, IBV_WC_LOC_PROT_ERR);
		return;
	}
	for (int i = 0; i < count; from += iov[i].iov_len, i++)
		memcpy(iov[i].iov_base, from, iov[i].iov_len);
	complete_oldest(qp);
}

void soft_response_end(struct soft_qp *qp, const struct soft_frame *frame,
		       const uint8_t *atomic_payload)
{
	soft_assert_locked();
	uint32_t end = frame->psn + soft_psn_count(qp, frame->length); /* may exceed 24 bits */

	if (frame->opcode == SOFT_ATOMIC_DATA) {
		complete_atomic(qp, atomic_payload);
	} else if (frame->opcode == SOFT_READ_DATA && soft_is_last(frame)) {
		complete_oldest(qp);
	} else if (frame->opcode == SOFT_READ_DATA) {
		mark_answered(qp, qp->sq.unacked + ((end - qp->sq.unacked) & SOFT_PSN_MASK));
		soft_requester_reset_retries(qp);
		if (qp->sq.next != qp->sq.tail) /* requests may have waited for these PSNs */
			soft_qp_link_output(qp->link);
	}
}
