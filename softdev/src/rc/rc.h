/* Reliable connections (RC) and unreliable connections (UC), which work the same but without
 * responses.
 *
 * Converts work requests to frames and back. link/ transports the frames.
 */
#pragma once

#include "objects/objects.h"

extern const struct soft_transport soft_rc_transport;

/* ---- frames being built and taken in ------------------------------------------------------- */

/* The progress of transmission while a batch of frames is built but not yet sent. */
struct soft_tx_cursor {
	uint32_t next, next_psn, reads;
	uint32_t response, response_psn;
	uint32_t acked;
	uint32_t most; /* maximum payload of the next frame in bytes; a multiple of every MTU */
	uint32_t
		cma_most; /* maximum payload of a frame with a descriptor; 0 if descriptors are not possible */
	uint32_t cma_least; /* minimum payload for which a descriptor is worthwhile */
};

/* Returns how many of the `left` bytes of a message the next frame carries. Sets `by_cma` if the
 * frame contains a descriptor of them. */
static inline uint32_t soft_frame_share(const struct soft_tx_cursor *cursor, uint32_t left,
					bool *by_cma)
{
	*by_cma = cursor->cma_most && left >= cursor->cma_least;
	uint32_t most = *by_cma ? cursor->cma_most : cursor->most;

	return left < most ? left : most;
}

/* Build the next frame of the send queue. Returns false if nothing may be sent now
 * (requester.c). */
bool soft_requester_next(struct soft_qp *qp, struct soft_tx_cursor *cursor,
			 struct soft_tx_packet *out);
void soft_requester_commit(struct soft_qp *qp, const struct soft_tx_packet *out);
/* Collect the frame's payload in iovecs. Returns their number, or -1 if the memory is no longer
 * readable. */
int soft_requester_gather(struct soft_qp *qp, const struct soft_tx_packet *out, struct iovec *iov,
			  int room);

/* req_retransmit.c (IBTA 9.7.6.1) */
/* Resume transmission at the first unacknowledged PSN. */
void soft_requester_go_back(struct soft_qp *qp);
/* Retransmit after a loss, or fail the oldest request if its retries are exhausted. */
void soft_requester_retry(struct soft_qp *qp);
/* Handle an implied NAK: a later request has been answered first. */
void soft_requester_missed(struct soft_qp *qp);
/* Remove the oldest request, which may not have been retransmitted yet. */
void soft_requester_done(struct soft_qp *qp);
/* Wait until the oldest request, whose response was withdrawn, gets a NAK or the link ends. Until
 * then, responses to later requests do not cause a retransmission. */
void soft_requester_await_nak(struct soft_qp *qp);
/* Reset the retry counter after a response. */
void soft_requester_progress(struct soft_qp *qp);
/* Start the retransmission timer if a response is expected. */
void soft_requester_await(struct soft_qp *qp);

/* Returns whether all slots for responses are in use. */
static inline bool soft_responder_is_full(const struct soft_responder *responder)
{
	return responder->response_tail - responder->response_head > responder->response_mask;
}

/* resp_retransmit.c (IBTA 9.7.4.1.2, 9.7.5.1) */
enum soft_sink soft_responder_out_of_turn(struct soft_qp *qp, const struct soft_frame *frame);
/* Returns the latest request with `opcode` that contains the packet `psn`, among those that may
 * still be unanswered (IBTA 9.4.5), or NULL. */
struct soft_known_read *soft_responder_find(const struct soft_responder *responder, uint8_t opcode,
					    uint32_t psn);
void soft_responder_missed(struct soft_qp *qp); /* reports a gap */
void soft_responder_nak(struct soft_qp *qp, uint8_t opcode, uint8_t syndrome);
struct soft_response *soft_responder_answer(struct soft_qp *qp, const struct soft_frame *frame,
					    uint8_t opcode, uint32_t length);

void soft_retry_expired(struct soft_timer *timer); /* callback of soft_qp.retry_timer */

/* read_order.c: READs whose responses are still queued */
/* Copy the bytes of queued READ responses that a request is about to overwrite. */
void soft_responder_keep_reads(struct soft_qp *qp, const struct iovec *iov, int count);
void soft_responder_unkeep(struct soft_responder *responder, struct soft_response *response);

/* responder.c */
int soft_responder_prepare(struct soft_qp *qp, uint32_t depth, uint32_t psn);
int soft_responder_resize(struct soft_qp *qp,
			  uint32_t depth); /* implements soft_transport.resize */
void soft_responder_forget(
	struct soft_qp *qp); /* frees memory; the caller need not hold the lock */
void soft_responder_fail(struct soft_qp *qp, enum soft_nak nak, uint32_t psn);
/* Refuse the request `psn` and those after it, because the memory of its response with the given
 * index was deregistered after the request had been accepted. `withdrawn` is recorded in the trace. */
void soft_responder_withdrawn(struct soft_qp *qp, uint32_t index, uint32_t psn,
			      const struct soft_response *withdrawn);
/* Send a NAK instead of a repeated response whose memory was deregistered. Other requests are not
 * affected. Returns false if the response is not a repeated one. */
bool soft_responder_withdrawn_again(struct soft_qp *qp, uint32_t index);
void soft_responder_refuse_again(struct soft_qp *qp, struct soft_response *response);
bool soft_responder_next(struct soft_qp *qp, struct soft_tx_cursor *cursor,
			 struct soft_tx_packet *out);
void soft_responder_commit(struct soft_qp *qp, const struct soft_tx_packet *out);
int soft_responder_gather(struct soft_qp *qp, const struct soft_tx_packet *out, struct iovec *iov);
/* Set the cursor to a response, if it exists. */
static inline void soft_responder_answer_at(const struct soft_qp *qp, struct soft_tx_cursor *cursor,
					    uint32_t response)
{
	const struct soft_responder *responder = &qp->responder;

	cursor->response = response;
	if (response != responder->response_tail)
		cursor->response_psn = soft_response_at(qp, response)->psn;
}
/* Return the last PSN, and the number of messages, that a frame sent after `cursor` may
 * acknowledge. */
uint32_t soft_responder_done(const struct soft_qp *qp, const struct soft_tx_cursor *cursor);
uint32_t soft_responder_msn(const struct soft_qp *qp, const struct soft_tx_cursor *cursor);

/* Where the payload of a received frame goes. */
enum soft_sink {
	SOFT_SINK_NONE, /* the frame has no payload */
	SOFT_SINK_DISCARD, /* the frame and its payload are read and dropped */
	SOFT_SINK_SMALL, /* the link's small buffer */
	SOFT_SINK_RECEIVE, /* the receive at the head of the queue */
	SOFT_SINK_WRITE, /* the memory that the peer named */
	SOFT_SINK_READ, /* the memory of the oldest request */
	SOFT_SINK_BROKEN, /* the frame is invalid and the stream cannot continue */
};

/* Handle a request (responder.c) or a response (completer.c): `begin` when its header has been
 * read, and `end` when its payload is complete. */
enum soft_sink soft_request_begin(struct soft_qp *qp, struct soft_frame *frame);
void soft_request_end(struct soft_qp *qp, const struct soft_frame *frame, const uint8_t *small);
enum soft_sink soft_answer_begin(struct soft_qp *qp, struct soft_frame *frame);
void soft_answer_end(struct soft_qp *qp, const struct soft_frame *frame, const uint8_t *small);
/* Complete everything up to `psn`. Returns false if the PSN is invalid. */
bool soft_acknowledged(struct soft_qp *qp, uint32_t psn);

void soft_request_unwritable(struct soft_qp *qp,
			     const struct soft_frame *frame); /* refuses the request */
/* Return iovecs for the payload bytes [from, from + length) of a frame. Returns their number, or -1
 * if the memory is not writable; soft_request_unwritable has been called then. */
int soft_request_scatter(struct soft_qp *qp, const struct soft_frame *frame, uint32_t from,
			 uint32_t length, struct iovec *iov, int room);
int soft_answer_scatter(struct soft_qp *qp, const struct soft_frame *frame, uint32_t from,
			uint32_t length, struct iovec *iov, int room);
