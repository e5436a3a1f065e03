/* The responder handles request frames: it writes memory, fills receives, and queues responses.
 *
 * Requests execute in PSN order. A request is checked when its header has arrived, and again for
 * every chunk of its payload, because the application may deregister the memory in the meantime.
 * The NAK for a refused request is sent after the responses to all earlier requests. It ends the
 * queue pair (responder class C and others, IBTA 9.9.3), because the application must learn of the
 * error. NAKs that only request a retransmission do not end it.
 *
 * resp_retransmit.c handles requests whose PSN is not the expected one.
 *
 * A UC queue pair does not respond. It silently drops requests that an RC queue pair would refuse,
 * and continues with the next message that begins, whatever its PSN is (responder class D, IBTA
 * 9.8.2, 9.9.3).
 */
#include <sys/uio.h>

#include "inject/inject.h"
#include "rc.h"
#include "trace/trace.h"

int soft_responder_resize(struct soft_qp *qp, uint32_t depth)
{
	soft_assert_locked();
	struct soft_responder *responder = &qp->responder;
	uint32_t before = responder->responses ? responder->response_mask + 1 : 0;
	uint32_t slots = soft_slots_for(depth);

	if (slots <= before)
		return 0;
	struct soft_response *responses = calloc(slots, sizeof(*responses));
	struct soft_rd_atomic *rd_atomics = calloc(slots, sizeof(*rd_atomics));
	uint32_t kept = soft_stored_rd_atomics(responder);

	if (!responses || !rd_atomics) {
		free(responses);
		free(rd_atomics);
		return ENOMEM;
	}
	/* Copy all slots, because abandoned responses beyond the tail may still own memory. */
	for (uint32_t i = responder->response_head; i != responder->response_head + before; i++)
		responses[i & (slots - 1)] = responder->responses[i & responder->response_mask];
	for (uint32_t i = 0; i < kept; i++)
		rd_atomics[i] =
			*soft_rd_atomic_at(responder, responder->rd_atomic_count - kept + i);
	free(responder->responses);
	free(responder->latest_rd_atomics);
	responder->responses = responses;
	responder->response_mask = slots - 1;
	responder->latest_rd_atomics = rd_atomics;
	responder->rd_atomic_count = kept;
	return 0;
}

/* Prepare the responder for the transition to RTR. Returns 0 or an errno value. */
int soft_responder_prepare_rtr(struct soft_qp *qp, uint32_t depth, uint32_t psn)
{
	soft_assert_locked();
	struct soft_responder *responder = &qp->responder;
	int rc = soft_responder_resize(qp, depth);

	if (rc)
		return rc;
	responder->expected_psn = psn & SOFT_PSN_MASK;
	responder->acked_psn = soft_psn_prev(psn); /* PSN before the first one */
	return 0;
}

void soft_responder_undo_prepare_rtr(struct soft_qp *qp)
{
	struct soft_responder *responder = &qp->responder;

	/* copied_bytes is 0 when every copy has been freed. */
	for (uint32_t i = 0; responder->copied_bytes; i++)
		soft_responder_free_copy(responder, &responder->responses[i]);
	free(qp->responder.responses);
	free(qp->responder.latest_rd_atomics);
	memset(&qp->responder, 0, sizeof(qp->responder));
}

/* ---- refusing ------------------------------------------------------------------------------ */

void soft_responder_nak(struct soft_qp *qp, uint8_t opcode, uint8_t syndrome)
{
	soft_assert_locked();
	qp->link->nak_opcode = opcode;
	qp->link->nak_syndrome = syndrome;
	qp->link->nak_psn = qp->responder.expected_psn;
	soft_qp_link_output(qp->link);
}

void soft_responder_fail(struct soft_qp *qp, enum soft_nak nak, uint32_t psn)
{
	soft_assert_locked();
	struct soft_responder *responder = &qp->responder;

	responder->failed = true;
	responder->in_message = false;
	responder->expected_psn = psn; /* first PSN that will not be acknowledged */
	/* Raise an affiliated event, because these errors cause no completion at the responder
	 * (IBTA 11.6.3.2). */
	if (nak == SOFT_NAK_REMOTE_ACCESS)
		soft_qp_event(qp, IBV_EVENT_QP_ACCESS_ERR);
	else if (nak == SOFT_NAK_INVALID_REQUEST)
		soft_qp_event(qp, IBV_EVENT_QP_REQ_ERR);
	soft_responder_nak(qp, SOFT_NAK, nak);
}

/* Drop the current message of a UC queue pair. If the message was assigned a receive, the next
 * message uses that receive. */
static enum soft_sink drop_message(struct soft_qp *qp)
{
	qp->responder.in_message = false;
	return SOFT_SINK_DISCARD;
}

/* Refuse a request, or drop it on a UC queue pair. `reason` is recorded in the trace, and is NULL
 * if the caller has already recorded a reason. */
static enum soft_sink refuse(struct soft_qp *qp, enum soft_nak nak, const char *reason)
{
	if (reason)
		SOFT_TRACE(request_refused, qp, reason);
	if (soft_qp_is_uc(qp))
		return drop_message(qp);
	soft_responder_fail(qp, nak, qp->responder.expected_psn);
	return SOFT_SINK_DISCARD;
}

/* Record in the trace why access was refused. The NAK does not tell the peer the reason. */
static void trace_refusal(const struct soft_qp *qp, uint32_t srq_num, uint32_t rkey,
			  uint64_t address, uint64_t length, unsigned rights)
{
	const char *reason = soft_remote_denial_reason(qp, soft_remote_pd(qp, srq_num), rkey,
						       address, length, rights);

	/* The reason is NULL if the region has been registered again in the meantime and now allows
	 * the access. */
	soft_trace_access_refused(qp, reason ? reason : "KEY", rkey, address, length, rights);
}

/* Refuse a request that the queue pair's access flags do not allow (IBTA 9.7.4.1.4). */
static enum soft_sink refuse_right(struct soft_qp *qp, const struct soft_frame *frame,
				   unsigned rights)
{
	SOFT_TRACE(access_refused, qp, "QUEUE_PAIR", frame->rkey, frame->address, frame->dma_length,
		   rights);
	return refuse(qp, SOFT_NAK_INVALID_REQUEST, NULL);
}

static enum soft_sink refuse_access(struct soft_qp *qp, const struct soft_frame *frame,
				    uint64_t length, unsigned rights)
{
	if (soft_trace_on)
		trace_refusal(qp, qp->responder.srq_num, frame->rkey, frame->address, length,
			      rights);
	return refuse(qp, SOFT_NAK_REMOTE_ACCESS, NULL);
}

/* Complete the receive of the current message with an error, and end the queue pair. */
static void fail_receive(struct soft_qp *qp, enum ibv_wc_status status, enum soft_nak nak)
{
	soft_fail_receive(qp, status);
	if (soft_qp_is_uc(qp))
		soft_qp_error(qp); /* UC sends no NAKs */
	else
		refuse(qp, nak, NULL);
}

/* Send an RNR NAK, because no receive is posted. The requester waits and then repeats the packet
 * (IBTA 9.7.5.2.8). A UC queue pair drops the message instead. */
static enum soft_sink send_rnr_nak(struct soft_qp *qp)
{
	SOFT_TRACE(request_refused, qp, "NO_RECEIVE");
	if (soft_qp_is_uc(qp))
		return drop_message(qp);
	qp->responder.awaiting_resend = true;
	soft_responder_nak(qp, SOFT_RNR_NAK, qp->attr.min_rnr_timer);
	return SOFT_SINK_DISCARD;
}

/* ---- requests ------------------------------------------------------------------------------ */

static bool has_room_for_response(const struct soft_qp *qp)
{
	return qp->responder.response_tail - qp->responder.response_head <
	       qp->attr.max_dest_rd_atomic;
}

/* Treat the packet as lost, so that the requester retransmits it. */
static enum soft_sink drop_as_lost(struct soft_qp *qp)
{
	soft_responder_report_gap(qp);
	return SOFT_SINK_DISCARD;
}

/* Refuse a request that exceeds the maximum number of outstanding READs and atomics. Treat it as
 * lost instead if a slot holds a repeated response, or the response to a FLUSH or an ATOMIC WRITE,
 * because the requester may not count these requests. For example, rdma_rxe counts ATOMIC WRITEs
 * but not FLUSHes. */
static enum soft_sink refuse_excess_read(struct soft_qp *qp)
{
	const struct soft_responder *responder = &qp->responder;

	for (uint32_t i = responder->response_head; i != responder->response_tail; i++) {
		if (soft_response_at(qp, i)->may_be_uncounted)
			return drop_as_lost(qp);
	}
	return refuse(qp, SOFT_NAK_INVALID_REQUEST, "READS"); /* IBTA 9.7.4.3.1 */
}

/* Returns whether the peer may access the memory that the frame addresses. A request of length 0
 * does not require a valid key (IBTA 9.4.3, 9.4.4: C9-88). */
static bool is_accessible(const struct soft_qp *qp, const struct soft_frame *frame, unsigned right)
{
	return frame->dma_length == 0 ||
	       soft_remote_range(qp, soft_remote_pd(qp, qp->responder.srq_num), frame->rkey,
				 frame->address, frame->dma_length, right);
}

/* Returns the message offset at which the frame ends. */
static uint64_t message_end(const struct soft_qp *qp, const struct soft_frame *frame)
{
	return soft_message_offset(qp, frame->psn, qp->responder.first_psn) + frame->length;
}

/* Accept a SEND packet, unless the message is longer than the receive. */
static enum soft_sink accept_send(struct soft_qp *qp, const struct soft_frame *frame)
{
	uint64_t end = message_end(qp, frame);

	if (end > SOFT_MAX_MESSAGE || end > soft_receive_at(&qp->rq, qp->rq.head)->length) {
		/* The receive completes with a local length error, and the sender gets a NAK for an
		 * invalid request (IBTA 9.9.3.1). */
		if (!soft_qp_is_uc(qp))
			soft_complete_receive(qp, IBV_WC_LOC_LEN_ERR, 0);
		return refuse(qp, SOFT_NAK_INVALID_REQUEST, "LENGTH");
	}
	return frame->length ? SOFT_SINK_RECEIVE : SOFT_SINK_NONE;
}

/* Accept a WRITE packet. The last packet of a WRITE with immediate consumes a receive. */
static enum soft_sink accept_write(struct soft_qp *qp, const struct soft_frame *frame)
{
	uint64_t end = message_end(qp, frame), total = qp->responder.dma_length;

	if (soft_is_last(frame) ? end != total : end >= total)
		return refuse(qp, SOFT_NAK_INVALID_REQUEST, "PACKET"); /* IBTA 9.7.4.1.6 */
	if (frame->flags & SOFT_FRAME_IMMEDIATE) {
		if (!soft_acquire_receive(qp) || soft_fault_should_refuse(qp))
			return send_rnr_nak(qp);
		qp->responder.has_receive = true;
	}
	return frame->length ? SOFT_SINK_WRITE : SOFT_SINK_NONE;
}

static enum soft_sink begin_send(struct soft_qp *qp, const struct soft_frame *frame)
{
	if (!soft_acquire_receive(qp) || soft_fault_should_refuse(qp))
		return send_rnr_nak(qp);
	qp->responder.has_receive = true;
	return accept_send(qp, frame);
}

static enum soft_sink begin_write(struct soft_qp *qp, const struct soft_frame *frame)
{
	if (!(qp->attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE))
		return refuse_right(qp, frame, IBV_ACCESS_REMOTE_WRITE);
	if (!is_accessible(qp, frame, IBV_ACCESS_REMOTE_WRITE))
		return refuse_access(qp, frame, frame->dma_length, IBV_ACCESS_REMOTE_WRITE);
	return accept_write(qp, frame);
}

static enum soft_sink begin_read(struct soft_qp *qp, const struct soft_frame *frame)
{
	if (!(qp->attr.qp_access_flags & IBV_ACCESS_REMOTE_READ))
		return refuse_right(qp, frame, IBV_ACCESS_REMOTE_READ);
	if (!has_room_for_response(qp))
		return refuse_excess_read(qp);
	if (!is_accessible(qp, frame, IBV_ACCESS_REMOTE_READ))
		return refuse_access(qp, frame, frame->dma_length, IBV_ACCESS_REMOTE_READ);
	return SOFT_SINK_NONE;
}

/* Returns the access right that an atomic needs. An ATOMIC WRITE needs only the right to write,
 * because it does not return the old value (IBTA annex A19). */
static unsigned atomic_right(const struct soft_frame *frame)
{
	return frame->opcode == SOFT_ATOMIC_WRITE ? IBV_ACCESS_REMOTE_WRITE
						  : IBV_ACCESS_REMOTE_ATOMIC;
}

/* Returns the word on which an atomic operates, or NULL if the peer may not access it. */
static uint64_t *atomic_target(const struct soft_qp *qp, const struct soft_frame *frame)
{
	return soft_remote_memory(qp, soft_remote_pd(qp, qp->responder.srq_num), frame->rkey,
				  frame->address, sizeof(uint64_t), atomic_right(frame));
}

static enum soft_sink begin_atomic(struct soft_qp *qp, const struct soft_frame *frame)
{
	if (soft_is_read(frame->opcode) && !has_room_for_response(qp))
		return refuse_excess_read(qp);
	if (!(qp->attr.qp_access_flags & atomic_right(frame)))
		return refuse_right(qp, frame, atomic_right(frame));
	if (frame->address % sizeof(uint64_t)) /* IBTA 9.4.5 (C9-104) */
		return refuse(qp, SOFT_NAK_INVALID_REQUEST, "ALIGNMENT");
	uint64_t *at = atomic_target(qp, frame);

	if (!at)
		return refuse_access(qp, frame, sizeof(uint64_t), atomic_right(frame));
	/* If the region's iova differs from its address, an aligned remote address may refer to a
	 * misaligned word. */
	if ((uintptr_t)at % sizeof(uint64_t))
		return refuse(qp, SOFT_NAK_INVALID_REQUEST, "ALIGNMENT");
	return SOFT_SINK_SMALL;
}

/* Accept a FLUSH (IBTA annex A19). It takes effect immediately, because earlier writes are already
 * in memory, and publishing the response makes them visible to other processors. A FLUSH to
 * persistence is refused, because no region grants that right. */
static enum soft_sink begin_flush(struct soft_qp *qp, const struct soft_frame *frame)
{
	unsigned types = frame->syndrome & SOFT_FLUSH_TYPES;
	unsigned level = frame->syndrome >> SOFT_FLUSH_LEVEL_SHIFT;
	unsigned rights = (types & IBV_FLUSH_GLOBAL ? IBV_ACCESS_FLUSH_GLOBAL : 0u) |
			  (types & IBV_FLUSH_PERSISTENT ? IBV_ACCESS_FLUSH_PERSISTENT : 0u);
	const struct ibv_pd *pd = soft_remote_pd(qp, qp->responder.srq_num);

	if (!rights || types & ~(unsigned)(IBV_FLUSH_GLOBAL | IBV_FLUSH_PERSISTENT) ||
	    level > IBV_FLUSH_MR)
		return refuse(qp, SOFT_NAK_INVALID_REQUEST, "PACKET");
	if (rights & ~qp->attr.qp_access_flags)
		return refuse_right(qp, frame, rights);
	if (level == IBV_FLUSH_MR ? !soft_remote_key_allows(qp, pd, frame->rkey, rights)
				  : !soft_remote_range(qp, pd, frame->rkey, frame->address,
						       frame->dma_length, rights))
		return refuse_access(qp, frame, frame->dma_length, rights);
	return SOFT_SINK_NONE;
}

/* Returns whether the frame's fields are valid for its opcode. */
static bool is_well_formed(const struct soft_qp *qp, const struct soft_frame *frame)
{
	/* An XRC initiator accepts no requests. A request must specify a shared receive queue if
	 * and only if it is sent to an XRC target. */
	if (qp->ibv.qp_type == IBV_QPT_XRC_SEND || !(frame->flags & SOFT_FRAME_SRQ) != !qp->xrcd)
		return false;
	unsigned flags = frame->flags & (SOFT_FRAME_CONTINUES | SOFT_FRAME_MORE |
					 SOFT_FRAME_IMMEDIATE | SOFT_FRAME_INVALIDATE);

	switch (frame->opcode) {
	case SOFT_WRITE:
		if (flags & SOFT_FRAME_INVALIDATE)
			return false; /* valid only for SEND */
		/* fall through */
	case SOFT_SEND:
		if (!soft_is_last(frame) && flags & (SOFT_FRAME_IMMEDIATE | SOFT_FRAME_INVALIDATE))
			return false;
		return soft_has_valid_length(qp, frame);
	case SOFT_READ:
	case SOFT_FLUSH:
		return frame->length == 0 && !flags;
	case SOFT_ATOMIC_WRITE:
		return frame->length == SOFT_ATOMIC_WORD && !flags;
	default:
		return frame->length == SOFT_ATOMIC_ARGUMENTS && !flags;
	}
}

/* Select the shared receive queue of an XRC message. Returns 0, or a NAK if the domain has no such
 * queue or the queue's CQ has overrun. */
static enum soft_nak select_srq(struct soft_qp *qp, uint32_t number)
{
	const struct soft_srq *srq = soft_xrc_find_srq(qp->xrcd, number);

	qp->responder.srq_num = number;
	if (!srq)
		return SOFT_NAK_INVALID_REQUEST;
	return soft_cq_of(srq->cq)->overrun ? SOFT_NAK_REMOTE_OPERATION : 0;
}

/* Cancel an unsent sequence NAK after the expected request has arrived. */
static void cancel_sequence_nak(struct soft_qp *qp)
{
	struct soft_qp_link *link = qp->link;

	qp->responder.awaiting_resend = false;
	if (link->nak_opcode == SOFT_NAK && link->nak_syndrome == SOFT_NAK_SEQUENCE)
		link->nak_opcode = 0;
}

/* Handle the next packet of the current SEND or WRITE. */
static enum soft_sink continue_message(struct soft_qp *qp, const struct soft_frame *frame)
{
	struct soft_responder *responder = &qp->responder;

	/* A first packet is valid only if it repeats the start of this message. */
	if (frame->opcode != responder->opcode ||
	    (soft_is_first(frame) && frame->psn != responder->first_psn))
		return refuse(qp, SOFT_NAK_INVALID_REQUEST, "PACKET");
	responder->flags = frame->flags;
	responder->immediate = frame->immediate;
	if (frame->opcode == SOFT_WRITE)
		return accept_write(qp, frame);
	responder->rkey = frame->rkey;
	return accept_send(qp, frame);
}

enum soft_sink soft_request_begin(struct soft_qp *qp, struct soft_frame *frame)
{
	soft_assert_locked();
	struct soft_responder *responder = &qp->responder;

	if (!is_well_formed(qp, frame))
		return SOFT_SINK_BROKEN;
	if (responder->failed)
		return SOFT_SINK_DISCARD;
	if (soft_qp_is_uc(qp)) {
		if (frame->opcode != SOFT_SEND && frame->opcode != SOFT_WRITE)
			return SOFT_SINK_BROKEN;
		if (soft_is_first(frame)) {
			responder->in_message = false;
			responder->expected_psn = frame->psn;
		} else if (!responder->in_message) {
			return SOFT_SINK_DISCARD; /* an earlier part of the message was dropped */
		}
	}
	if (frame->psn != responder->expected_psn &&
	    !soft_trim(qp, frame, responder->expected_psn)) {
		if (!soft_qp_is_uc(qp))
			return soft_responder_unexpected_psn(qp, frame);
		SOFT_TRACE_DROPPED(.reason = "PSN", .qp_num = qp->ibv.qp_num,
				   .remote_qpn = qp->attr.dest_qp_num, .has_psn = true,
				   .psn = frame->psn, .expected_psn = responder->expected_psn);
		return drop_message(qp);
	}
	cancel_sequence_nak(qp);
	const bool starts_message = soft_is_first(frame) && !frame->skip;

	if (responder->in_message == starts_message)
		return refuse(qp, SOFT_NAK_INVALID_REQUEST, "PACKET"); /* IBTA 9.7.4.1.2 */
	if (responder->in_message)
		return continue_message(qp, frame);
	/* If the peer used a different path MTU, its PSNs would correspond to different offsets.
	 * The MTU is checked here because a CM stream has no handshake that compares the MTUs. */
	if (frame->syndrome && frame->opcode != SOFT_FLUSH && frame->syndrome != qp->attr.path_mtu)
		return refuse(qp, SOFT_NAK_INVALID_REQUEST, "PATH_MTU");
	if (!qp->comm_established) {
		qp->comm_established = true;
		/* Raise the event only in RTR (IBTA 11.6.3.1). In RTS, the queue pair's own
		 * requests show that communication is established. */
		if (qp->ibv.state == IBV_QPS_RTR)
			soft_qp_event(qp, IBV_EVENT_COMM_EST);
	}
	responder->has_receive = false;
	responder->opcode = frame->opcode;
	responder->flags = frame->flags;
	responder->immediate = frame->immediate;
	responder->first_psn = frame->psn;
	responder->dma_length = frame->dma_length;
	responder->address = frame->address;
	responder->rkey = frame->rkey;
	if (qp->xrcd) {
		enum soft_nak nak = select_srq(qp, frame->ack);

		if (nak)
			return refuse(qp, nak, "SRQ");
	}
	if (soft_is_empty_read(frame->opcode) && soft_responder_is_full(responder))
		return drop_as_lost(qp);
	switch (frame->opcode) {
	case SOFT_SEND:
		return begin_send(qp, frame);
	case SOFT_WRITE:
		return begin_write(qp, frame);
	case SOFT_READ:
		return begin_read(qp, frame);
	case SOFT_FLUSH:
		return begin_flush(qp, frame);
	default:
		return begin_atomic(qp, frame);
	}
}

void soft_request_refuse_unwritable(struct soft_qp *qp, const struct soft_frame *frame)
{
	soft_assert_locked();
	if (frame->opcode == SOFT_SEND)
		/* The receive fails with a local protection error, and the peer gets a remote
		 * operational error (IBTA 9.9.3). */
		fail_receive(qp, IBV_WC_LOC_PROT_ERR, SOFT_NAK_REMOTE_OPERATION);
	else {
		/* Only the message's first frame contains the key and the address. */
		struct soft_frame first = *frame;

		first.rkey = qp->responder.rkey;
		first.address = qp->responder.address;
		refuse_access(qp, &first, qp->responder.dma_length, IBV_ACCESS_REMOTE_WRITE);
	}
}

static void copy_overwritten_reads(struct soft_qp *qp, const struct iovec *iov, int count)
{
	if (qp->responder.response_head != qp->responder.response_tail)
		soft_responder_copy_reads(qp, iov, count);
}

int soft_request_scatter(struct soft_qp *qp, const struct soft_frame *frame, uint32_t from,
			 uint32_t length, struct iovec *iov, int room)
{
	soft_assert_locked();
	struct soft_responder *responder = &qp->responder;
	uint64_t offset = soft_message_offset(qp, frame->psn, responder->first_psn) + from;

	if (frame->opcode == SOFT_SEND) {
		const struct soft_recv_wqe *receive = soft_receive_at(&qp->rq, qp->rq.head);
		int count = soft_sge_to_iovecs(
			soft_receive_pd(qp), soft_receive_sges(&qp->rq, qp->rq.head),
			receive->num_sge, offset, length, IBV_ACCESS_LOCAL_WRITE, iov, room);

		if (count < 0)
			soft_request_refuse_unwritable(qp, frame);
		else
			copy_overwritten_reads(qp, iov, count);
		return count;
	}
	/* Use the saved address and key of the message's first frame, because later frames do not
	 * contain them. */
	void *memory =
		soft_remote_memory(qp, soft_remote_pd(qp, responder->srq_num), responder->rkey,
				   responder->address + offset, length, IBV_ACCESS_REMOTE_WRITE);

	if (!memory) {
		soft_request_refuse_unwritable(qp, frame);
		return -1;
	}
	*iov = (struct iovec){.iov_base = memory, .iov_len = length};
	copy_overwritten_reads(qp, iov, 1);
	return 1;
}

struct soft_response *soft_responder_queue_response(struct soft_qp *qp,
						    const struct soft_frame *frame, uint8_t opcode,
						    uint32_t length)
{
	soft_assert_locked();
	struct soft_responder *responder = &qp->responder;
	struct soft_response *response = soft_response_at(qp, responder->response_tail++);

	soft_responder_free_copy(responder, response); /* the slot may hold an abandoned response */
	*response = (struct soft_response){
		.psn = frame->psn,
		.length = length,
		.address = frame->address,
		.rkey = frame->rkey,
		.srq_num = frame->ack, /* a request has the SRQ number in this field */
		.msn = responder->msn + 1,
		.opcode = opcode,
	};
	return response;
}

/* Queue the response to a FLUSH or an ATOMIC WRITE, which looks like an empty READ response (IBTA
 * annex A19), and remember the request's PSN to recognize a duplicate. */
static void queue_empty_response(struct soft_qp *qp, const struct soft_frame *frame)
{
	struct soft_responder *responder = &qp->responder;

	soft_responder_queue_response(qp, frame, SOFT_READ_DATA, 0)->may_be_uncounted = true;
	responder->empty_read_psns[responder->empty_read_count++ % SOFT_KNOWN_EMPTY_READS] =
		frame->psn;
}

/* Remember an executed READ or atomic, so that a duplicate of it can be repeated. */
static struct soft_rd_atomic *remember_rd_atomic(struct soft_responder *responder,
						 const struct soft_frame *frame, uint32_t psns)
{
	struct soft_rd_atomic *request = soft_rd_atomic_at(responder, responder->rd_atomic_count++);

	*request = (struct soft_rd_atomic){
		.psn = frame->psn,
		.psns = psns,
		.rkey = frame->rkey,
		.opcode = frame->opcode,
	};
	return request;
}

/* Execute an atomic operation (IBTA 9.4.5.1). The operation is also atomic with respect to other
 * threads of this process. Returns false if the memory is no longer accessible. */
static bool execute_atomic(struct soft_qp *qp, const struct soft_frame *frame,
			   const uint8_t *arguments)
{
	struct soft_responder *responder = &qp->responder;
	uint64_t operand = soft_get64(arguments), old_value;
	uint64_t *at = atomic_target(qp, frame);

	if (!at)
		return false;
	copy_overwritten_reads(qp, &(struct iovec){.iov_base = at, .iov_len = sizeof(*at)}, 1);
	if (frame->opcode == SOFT_ATOMIC_WRITE) {
		uint64_t value; /* the bytes as they arrived */

		memcpy(&value, arguments, sizeof(value));
		__atomic_store_n(at, value, __ATOMIC_SEQ_CST);
		queue_empty_response(qp, frame);
		return true;
	}
	if (frame->opcode == SOFT_FETCH_ADD) {
		old_value = __atomic_fetch_add(at, operand, __ATOMIC_SEQ_CST);
	} else {
		/* The built-in replaces the value to compare with by the value that it has found. */
		old_value = operand;
		__atomic_compare_exchange_n(at, &old_value, soft_get64(arguments + 8), false,
					    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	}
	struct soft_response *response =
		soft_responder_queue_response(qp, frame, SOFT_ATOMIC_DATA, SOFT_ATOMIC_RESULT);

	soft_put64(response->result, old_value);
	/* Keep the result for a retransmitted request, because the atomic must not execute twice. */
	memcpy(remember_rd_atomic(responder, frame, 1)->result, response->result,
	       sizeof(response->result));
	return true;
}

void soft_request_end(struct soft_qp *qp, const struct soft_frame *frame,
		      const uint8_t *atomic_payload)
{
	soft_assert_locked();
	struct soft_responder *responder = &qp->responder;
	const char *reason;

	switch (frame->opcode) {
	case SOFT_SEND:
	case SOFT_WRITE:
		responder->in_message = !soft_is_last(frame);
		if (responder->in_message) {
			responder->expected_psn =
				soft_psn_add(frame->psn, soft_psn_count(qp, frame->length));
			return;
		}
		/* Invalidate the key after the whole message has arrived and before it is completed
		 * (IBTA 9.4.1.1.2). */
		reason = responder->flags & SOFT_FRAME_INVALIDATE
				 ? soft_invalidate(qp, responder->rkey)
				 : NULL;
		if (reason) {
			SOFT_TRACE(access_refused, qp, reason, responder->rkey, 0, 0, 0);
			fail_receive(qp, IBV_WC_REM_INV_REQ_ERR, SOFT_NAK_REMOTE_ACCESS);
			return;
		}
		responder->expected_psn =
			soft_psn_add(frame->psn, soft_psn_count(qp, frame->length));
		responder->msn++;
		if (frame->opcode == SOFT_WRITE)
			soft_count_written(qp, responder->dma_length);
		if (responder->has_receive)
			soft_complete_receive(qp, IBV_WC_SUCCESS, (uint32_t)message_end(qp, frame));
		if (soft_qp_is_uc(qp))
			return;
		/* The application may reply to the message, and the reply can carry the
		 * acknowledgement. */
		if (responder->has_receive)
			soft_links->acknowledge(qp->link);
		else
			soft_qp_link_output(qp->link);
		return;
	case SOFT_READ:
		soft_responder_queue_response(qp, frame, SOFT_READ_DATA, frame->dma_length);
		remember_rd_atomic(responder, frame, soft_psn_count(qp, frame->dma_length))
			->uncounted_bytes =
			soft_counts_reads_of(qp, frame->rkey) ? frame->dma_length : 0;
		/* Advance to the last PSN of the READ. The common code below adds one more. */
		responder->expected_psn =
			soft_psn_add(frame->psn, soft_psn_count(qp, frame->dma_length) - 1);
		break;
	case SOFT_FLUSH:
		/* Publishing the response makes earlier writes visible (begin_flush). */
		queue_empty_response(qp, frame);
		break;
	default:
		if (!execute_atomic(qp, frame, atomic_payload)) {
			refuse_access(qp, frame, sizeof(uint64_t), atomic_right(frame));
			return;
		}
	}
	responder->expected_psn = soft_psn_add(responder->expected_psn, 1);
	responder->msn++;
	soft_qp_link_output(qp->link);
}

/* ---- responses ------------------------------------------------------------------------------- */

uint32_t soft_responder_ack_psn(const struct soft_qp *qp, const struct soft_tx_cursor *cursor)
{
	soft_assert_locked();
	const struct soft_responder *responder = &qp->responder;

	if (soft_qp_is_uc(qp))
		return cursor->acked_psn; /* UC sends no acknowledgements */
	uint32_t next = cursor->response == responder->response_tail ? responder->expected_psn
								     : cursor->response_psn;
	uint32_t done = soft_psn_prev(next);

	/* A repeated response may precede PSNs that have already been acknowledged. */
	return soft_psn_before(done, cursor->acked_psn) ? cursor->acked_psn : done;
}

uint32_t soft_responder_msn(const struct soft_qp *qp, const struct soft_tx_cursor *cursor)
{
	const struct soft_responder *responder = &qp->responder;
	/* A request counts as completed only when its response is sent. */
	uint32_t msn = cursor->response == responder->response_tail
			       ? responder->msn
			       : soft_response_at(qp, cursor->response)->msn - 1;

	return msn & SOFT_PSN_MASK;
}

/* Returns the later of the last acknowledged PSN and a response's PSN. A response also acknowledges
 * all earlier PSNs (IBTA 9.7.5.1.2). */
static uint32_t later_psn(uint32_t acked, uint32_t psn)
{
	return soft_psn_before(acked, psn) ? psn : acked;
}

bool soft_responder_next(struct soft_qp *qp, struct soft_tx_cursor *cursor,
			 struct soft_tx_packet *out)
{
	soft_assert_locked();
	if (cursor->response == qp->responder.response_tail)
		return false;
	const struct soft_response *response = soft_response_at(qp, cursor->response);
	bool first = cursor->response_psn == response->psn, by_cma;
	uint32_t offset = (uint32_t)soft_message_offset(qp, cursor->response_psn, response->psn);

	/* A CMA descriptor can only refer to registered memory, and not to a copy. */
	if (response->opcode == SOFT_READ_DATA && response->copy)
		cursor->cma_max = 0;
	uint32_t length = soft_next_frame_length(
		cursor, response->refused ? 0 : response->length - offset, &by_cma);
	bool last = response->refused || offset + length == response->length;

	*out = (struct soft_tx_packet){
		.index = cursor->response,
		.by_cma = by_cma,
		.is_response = true,
		.frame =
			{
				.opcode = response->refused ? SOFT_NAK : response->opcode,
				.syndrome = response->refused ? SOFT_NAK_REMOTE_ACCESS : 0,
				.flags = (first && !response->partly_sent ? 0
									  : SOFT_FRAME_CONTINUES) |
					 (last ? 0 : SOFT_FRAME_MORE),
				.length = length,
				.psn = cursor->response_psn,
				.msn = response->msn & SOFT_PSN_MASK,
			},
	};
	cursor->response_psn = soft_psn_add(cursor->response_psn, soft_psn_count(qp, length));
	cursor->acked_psn = later_psn(cursor->acked_psn, soft_psn_prev(cursor->response_psn));
	if (last)
		soft_responder_seek(qp, cursor, cursor->response + 1);
	return true;
}

/* Count the bytes of a READ when the last packet of its response is sent. A repeated READ is
 * counted only once. */
static void count_read_bytes(struct soft_qp *qp, uint32_t psn)
{
	struct soft_rd_atomic *read = soft_responder_find_rd_atomic(&qp->responder, SOFT_READ, psn);

	if (read) {
		soft_count_read(qp, read->uncounted_bytes);
		read->uncounted_bytes = 0;
	}
}

void soft_responder_commit(struct soft_qp *qp, const struct soft_tx_packet *out)
{
	soft_assert_locked();
	struct soft_responder *responder = &qp->responder;
	struct soft_response *response = soft_response_at(qp, out->index);

	response->psn = soft_psn_add(response->psn, soft_psn_count(qp, out->frame.length));
	responder->acked_psn = later_psn(responder->acked_psn, soft_psn_prev(response->psn));
	if (soft_is_last(&out->frame)) {
		if (qp->served && out->frame.opcode == SOFT_READ_DATA)
			count_read_bytes(qp, out->frame.psn);
		soft_responder_free_copy(responder, response);
		responder->response_head++;
		return;
	}
	response->address += out->frame.length;
	response->length -= out->frame.length;
	response->partly_sent = true;
}

static void trace_withdrawn(const struct soft_qp *qp, const struct soft_response *response)
{
	if (soft_trace_on)
		trace_refusal(qp, response->srq_num, response->rkey, response->address,
			      response->length, IBV_ACCESS_REMOTE_READ);
}

void soft_responder_refuse_repeated(struct soft_qp *qp, struct soft_response *response)
{
	soft_assert_locked();
	response->refused = true;
	trace_withdrawn(qp, response);
}

bool soft_responder_withdraw_repeated(struct soft_qp *qp, uint32_t index)
{
	soft_assert_locked();
	struct soft_response *response = soft_response_at(qp, index);

	/* The other responses that are marked, to a FLUSH or an ATOMIC WRITE, contain no data. */
	if (response->may_be_uncounted)
		soft_responder_refuse_repeated(qp, response);
	return response->may_be_uncounted;
}

void soft_responder_withdraw(struct soft_qp *qp, uint32_t index, uint32_t psn,
			     const struct soft_response *withdrawn)
{
	soft_assert_locked();
	trace_withdrawn(qp, withdrawn);
	qp->responder.response_tail = index;
	soft_responder_fail(qp, SOFT_NAK_REMOTE_ACCESS, psn);
}

int soft_responder_gather(struct soft_qp *qp, const struct soft_tx_packet *out, struct iovec *iov)
{
	soft_assert_locked();
	struct soft_response *response = soft_response_at(qp, out->index);
	uint64_t offset = soft_message_offset(qp, out->frame.psn, response->psn);
	void *memory;

	if (response->opcode == SOFT_ATOMIC_DATA)
		memory = response->result;
	else
		memory = soft_remote_memory(
			qp, soft_remote_pd(qp, response->srq_num), response->rkey,
			response->address + offset, out->frame.length,
			IBV_ACCESS_REMOTE_READ | (out->by_cma ? SOFT_ACCESS_PROCESS_VM : 0));
	if (!memory)
		return -1;
	/* If the data was copied because a later request overwrites it, send the copy. The check
	 * above ensures that the key is still valid (read_order.c). `length` decreases as parts are
	 * sent, while `copy` always contains all of the data. */
	if (response->opcode == SOFT_READ_DATA && response->copy)
		memory = response->copy + response->copy_length - response->length + offset;
	*iov = (struct iovec){.iov_base = memory, .iov_len = out->frame.length};
	return 1;
}
