/* The requester converts the send queue to request frames.
 *
 * Requests are sent in the order in which they were posted. The next request waits:
 *
 *   - while the RNR timer runs
 *   - while the queue pair is in SQD
 *   - with a fence, until all READs, atomics and similar requests (soft_is_counted) have been
 *     answered (IBTA 10.8.3.3)
 *   - for a free slot, if it is such a request and max_rd_atomic of them are outstanding
 *     (ibv_modify_qp(3))
 *   - for room in the path's congestion window
 *
 * A request that turns out to be invalid is only marked. It fails after all requests before it have
 * completed, so that completions keep the posting order.
 */
#include <sys/uio.h>

#include "rc.h"

enum { WINDOW_PARTS = 4 }; /* acknowledgements requested per window */

static const uint8_t wire_opcodes[] = {
	[IBV_WR_RDMA_WRITE] = SOFT_WRITE,
	[IBV_WR_RDMA_WRITE_WITH_IMM] = SOFT_WRITE,
	[IBV_WR_SEND] = SOFT_SEND,
	[IBV_WR_SEND_WITH_IMM] = SOFT_SEND,
	[IBV_WR_RDMA_READ] = SOFT_READ,
	[IBV_WR_ATOMIC_CMP_AND_SWP] = SOFT_COMPARE_SWAP,
	[IBV_WR_ATOMIC_FETCH_AND_ADD] = SOFT_FETCH_ADD,
	[IBV_WR_SEND_WITH_INV] = SOFT_SEND,
	[IBV_WR_FLUSH] = SOFT_FLUSH,
	[IBV_WR_ATOMIC_WRITE] = SOFT_ATOMIC_WRITE,
};

/* Returns whether the memory of all SGEs of a request may be accessed with `rights`. Checking all
 * SGEs before the first frame is sent prevents a local protection error (IBTA 10.7.2.2) in the
 * middle of a message. */
static bool is_memory_allowed(const struct soft_qp *qp, uint32_t index, unsigned rights)
{
	const struct soft_send_wqe *send = soft_send_at(qp, index);
	const struct ibv_sge *sges = soft_send_sges(qp, index);

	if (send->flags & IBV_SEND_INLINE)
		return true;
	for (uint32_t i = 0; i < send->num_sge; i++)
		if (sges[i].length && !soft_local_range(sges[i].lkey, qp->ibv.pd, sges[i].addr,
							sges[i].length, rights))
			return false;
	return true;
}

/* Returns whether the message at cursor->next may be started or continued. If it can never be sent,
 * stores the error in send->status. */
static bool may_begin(struct soft_qp *qp, const struct soft_tx_cursor *cursor,
		      struct soft_send_wqe *send, uint8_t opcode)
{
	const bool read = soft_is_read(opcode);

	/* In SQD, no new message is started, but partly sent messages are completed (IBTA
	 * 10.3.1.5). */
	if (qp->ibv.state != IBV_QPS_RTS &&
	    (qp->ibv.state != IBV_QPS_SQD || !soft_send_has_begun(qp, send)))
		return false;
	/* If more PSNs were in flight, the peer could not distinguish new packets from duplicates
	 * (IBTA 9.7.4.1.2). */
	if (send->psn + send->psns - qp->sq.unacked >= SOFT_PSN_HALF)
		return false;
	/* A fence waits for all earlier READs, and max_rd_atomic limits READs and atomics. */
	if (cursor->reads && (send->flags & IBV_SEND_FENCE ||
			      (soft_is_counted(opcode) && cursor->reads >= qp->attr.max_rd_atomic)))
		return false;
	/* These requests can never be sent: READs and atomics if max_rd_atomic is 0, and SEND with
	 * Invalidate on UC (IBTA table 38). */
	if ((read && qp->attr.max_rd_atomic == 0) ||
	    (soft_qp_is_uc(qp) && send->opcode == IBV_WR_SEND_WITH_INV))
		send->status = IBV_WC_LOC_QP_OP_ERR;
	else if (!is_memory_allowed(qp, cursor->next, read ? IBV_ACCESS_LOCAL_WRITE : 0))
		send->status = IBV_WC_LOC_PROT_ERR;
	return !send->status;
}

static uint32_t min_u32(uint32_t one, uint32_t other)
{
	return one < other ? one : other;
}

/* Returns how many of a READ's remaining `psns` the next request covers, or 0 if it has to wait. A
 * retransmitted request must end where the original one ended. A responder can repeat a single
 * response, but it cannot combine parts of two responses (IBTA 9.7.4.1.2). */
static uint32_t psns_of_read(const struct soft_qp *qp, uint32_t psn, uint32_t psns,
			     uint32_t max_part_psns)
{
	const struct soft_window *window = qp->window;

	for (uint32_t i = window->part_head; i != window->part_tail; i++) {
		const uint32_t end = window->part_ends[i % SOFT_READ_PARTS];

		if ((int32_t)(end - psn) > 0)
			return min_u32(psns, end - psn);
	}
	/* The last part of a READ has no entry in part_ends, because it ends with the READ. */
	if (psns <= max_part_psns || (int32_t)(psn - qp->sq.unsent) < 0)
		return psns;
	/* Leave room for the parts that this batch builds before it records any of them. */
	return window->part_tail - window->part_head <= SOFT_READ_PARTS - WINDOW_PARTS
		       ? max_part_psns
		       : 0;
}

/* Returns how many of a request's remaining `psns` fit into the congestion window. They are sent in
 * parts, usually of a quarter of the window, so that acknowledgements arrive steadily. A large READ
 * is split into several requests, because the response to a single request would arrive in one
 * burst. */
static uint32_t psns_allowed(const struct soft_qp *qp, const struct soft_tx_cursor *cursor,
			     bool read, uint32_t psns)
{
	const uint32_t in_flight = cursor->next_psn - qp->sq.unacked;
	const uint32_t window_psns = read ? qp->window->read_psns : qp->window->psns;
	const uint32_t room = window_psns > in_flight ? window_psns - in_flight : 0;
	const uint32_t parts = read ? min_u32(WINDOW_PARTS, qp->attr.max_rd_atomic) : WINDOW_PARTS;
	const uint32_t max_part_psns = (window_psns + parts - 1) / parts;

	if (!read)
		return min_u32(psns, min_u32(max_part_psns, room));
	psns = psns_of_read(qp, cursor->next_psn, psns, max_part_psns);
	/* If nothing is in flight, the part may exceed the window, or it would wait forever. */
	return cursor->reads < qp->attr.max_rd_atomic && (psns <= room || !in_flight) ? psns : 0;
}

bool soft_requester_next(struct soft_qp *qp, struct soft_tx_cursor *cursor,
			 struct soft_tx_packet *out)
{
	soft_assert_locked();
	while (cursor->next != qp->sq.tail && soft_send_at(qp, cursor->next)->local) {
		if (qp->rnr_paused ||
		    !soft_send_execute_local(qp, soft_send_at(qp, cursor->next), cursor->reads))
			return false;
		cursor->next++;
	}
	struct soft_send_wqe *send = soft_send_at(qp, cursor->next);
	uint8_t opcode = wire_opcodes[send->opcode];
	bool by_cma = false;

	if (cursor->next == qp->sq.tail || qp->rnr_paused || send->status)
		return false;
	bool first = cursor->next_psn == send->psn;

	if (first && !may_begin(qp, cursor, send, opcode))
		return false;
	uint32_t offset = (uint32_t)soft_message_offset(qp, cursor->next_psn, send->psn);
	uint32_t remaining = send->length - offset;
	uint32_t share = remaining; /* bytes of the message that this frame sends or requests */
	uint32_t length = 0; /* payload of this frame */

	if (qp->window) {
		uint32_t psns = send->psn + send->psns - cursor->next_psn;
		uint32_t allowed = psns_allowed(qp, cursor, opcode == SOFT_READ, psns);

		if (!allowed)
			return false;
		if (allowed < psns)
			share = allowed << soft_mtu_shift(qp);
	}
	if (opcode == SOFT_SEND || opcode == SOFT_WRITE || opcode == SOFT_ATOMIC_WRITE) {
		length = share = soft_next_frame_length(cursor, share, &by_cma);
	} else if (opcode != SOFT_READ && opcode != SOFT_FLUSH) {
		length = SOFT_ATOMIC_ARGUMENTS;
	}
	bool last = share == remaining;

	*out = (struct soft_tx_packet){
		.index = cursor->next,
		.by_cma = by_cma,
		.frame =
			{
				.opcode = opcode,
				.syndrome = (uint8_t)qp->attr.path_mtu, /* checked by the peer */
				.length = length,
				.psn = cursor->next_psn & SOFT_PSN_MASK,
				.address = send->remote_address,
				.rkey = send->rkey,
				.dma_length = send->length,
			},
	};
	if (opcode == SOFT_READ) { /* request only the bytes that have not arrived */
		out->frame.address += offset;
		out->frame.dma_length = share;
		out->frame.flags = last ? 0 : SOFT_FRAME_MORE;
	} else {
		out->frame.flags =
			(first ? 0 : SOFT_FRAME_CONTINUES) | (last ? 0 : SOFT_FRAME_MORE);
	}
	if (opcode == SOFT_FLUSH)
		out->frame.syndrome = send->flush;
	if (qp->ibv.qp_type == IBV_QPT_XRC_SEND) {
		out->frame.flags |= SOFT_FRAME_SRQ;
		out->frame.ack = send->remote_srqn; /* an XRC requester acknowledges nothing */
	}
	if (!last) {
		cursor->next_psn += share >> soft_mtu_shift(qp);
		cursor->reads += soft_is_read(opcode);
		return true;
	}
	if (send->flags & IBV_SEND_SOLICITED)
		out->frame.flags |= SOFT_FRAME_SOLICITED;
	if (send->opcode == IBV_WR_SEND_WITH_IMM || send->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
		out->frame.flags |= SOFT_FRAME_IMMEDIATE;
		out->frame.immediate = send->immediate;
	}
	if (send->opcode == IBV_WR_SEND_WITH_INV)
		out->frame.flags |= SOFT_FRAME_INVALIDATE;
	cursor->next++;
	cursor->next_psn = send->psn + send->psns;
	cursor->reads += soft_is_counted(opcode);
	return true;
}

/* Record that a request for `length` bytes of a READ has been sent. */
static void commit_part(struct soft_qp *qp, uint32_t length)
{
	struct soft_send_queue *sq = &qp->sq;
	struct soft_window *window = qp->window;

	sq->next_psn += length >> soft_mtu_shift(qp);
	sq->reads++;
	/* A retransmitted part is already in the ring. */
	if ((int32_t)(sq->next_psn - sq->unsent) > 0)
		window->part_ends[window->part_tail++ % SOFT_READ_PARTS] = sq->next_psn;
}

void soft_requester_commit(struct soft_qp *qp, const struct soft_tx_packet *out)
{
	soft_assert_locked();
	struct soft_send_queue *sq = &qp->sq;

	/* Skip the local requests that were executed while the frame was built. */
	soft_send_complete_local(qp);
	if (soft_is_last(&out->frame)) {
		const struct soft_send_wqe *send = soft_send_at(qp, sq->next++);

		sq->next_psn = send->psn + send->psns;
		sq->reads += soft_is_counted(out->frame.opcode);
	} else if (out->frame.opcode == SOFT_READ) {
		commit_part(qp, out->frame.dma_length);
	} else {
		sq->next_psn += out->frame.length >> soft_mtu_shift(qp);
	}
	if ((int32_t)(sq->next_psn - sq->unsent) > 0)
		sq->unsent = sq->next_psn;
	if (soft_qp_is_uc(qp)) { /* a UC message completes when it is sent (IBTA 9.8.2) */
		sq->unacked = sq->next_psn;
		if (soft_is_last(&out->frame))
			soft_complete_send(qp, IBV_WC_SUCCESS);
	}
	soft_requester_start_timer(qp);
}

int soft_requester_gather(struct soft_qp *qp, const struct soft_tx_packet *out, struct iovec *iov,
			  int room)
{
	soft_assert_locked();
	struct soft_send_wqe *send = soft_send_at(qp, out->index);
	bool inlined = send->flags & IBV_SEND_INLINE;

	if (!inlined && !soft_is_read(out->frame.opcode))
		return soft_sge_to_iovecs(qp->ibv.pd, soft_send_sges(qp, out->index), send->num_sge,
					  soft_message_offset(qp, out->frame.psn, send->psn),
					  out->frame.length,
					  out->by_cma ? SOFT_ACCESS_PROCESS_VM : 0, iov, room);
	/* Atomics send their arguments, and an inline ATOMIC WRITE has its data there as well. */
	*iov = (struct iovec){.iov_base = send->arguments, .iov_len = out->frame.length};
	if (inlined && (out->frame.opcode == SOFT_SEND || out->frame.opcode == SOFT_WRITE))
		iov->iov_base = soft_send_inline(qp, out->index);
	return 1;
}

/* Complete all requests of a UC queue pair without a peer, as if the network had lost them. Each
 * frame is built and committed, but not sent. */
static void discard_sends(struct soft_qp *qp)
{
	struct soft_tx_packet out;

	for (;;) {
		struct soft_tx_cursor cursor = {
			.next = qp->sq.next,
			.next_psn = qp->sq.next_psn,
			.max_payload = SOFT_FRAME_MAX,
		};

		if (!soft_requester_next(qp, &cursor, &out))
			break;
		soft_requester_commit(qp, &out);
	}
	soft_send_advance(qp);
	soft_qp_check_drained(qp);
}

static void output(struct soft_qp *qp)
{
	soft_qp_link_output(qp->link);
}

const struct soft_transport soft_rc_transport = {
	.prepare_rtr = soft_responder_prepare_rtr,
	.resize = soft_responder_resize,
	.undo_prepare_rtr = soft_responder_undo_prepare_rtr,
	.output = output,
	.discard_sends = discard_sends,
	.retry_expired = soft_retry_expired,
};
