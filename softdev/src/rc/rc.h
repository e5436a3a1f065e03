/* Reliable connections (RC), and unreliable connections (UC), which differ only in that they have
 * no responses.
 *
 * This folder converts between work requests and frames. link/ transports the frames.
 */
#pragma once

#include "objects/objects.h"

extern const struct soft_transport soft_rc_transport;

/* ---- frames being built and taken in ------------------------------------------------------- */

/* Position of the next frame while a batch of frames is built. The queue pair itself changes only
 * when the frames are sent. */
struct soft_tx_cursor {
	uint32_t next; /* index of the next request in the send queue */
	uint32_t next_psn;
	uint32_t reads; /* unanswered requests that count against max_rd_atomic */
	uint32_t response; /* index of the next response in the response queue */
	uint32_t response_psn;
	uint32_t acked_psn; /* last PSN acknowledged to the peer */
	/* maximum payload of the next frame in bytes; divisible by every MTU */
	uint32_t max_payload;
	uint32_t cma_max; /* maximum payload of a frame with a descriptor; 0 if disabled */
	uint32_t cma_min; /* minimum payload of a frame with a descriptor */
};

/* Returns the payload length of the next frame if `remaining` bytes of the message are left. Stores
 * in `*by_cma` whether the frame describes the payload instead of containing it. */
static inline uint32_t soft_next_frame_length(const struct soft_tx_cursor *cursor,
					      uint32_t remaining, bool *by_cma)
{
	*by_cma = cursor->cma_max && remaining >= cursor->cma_min;
	uint32_t max = *by_cma ? cursor->cma_max : cursor->max_payload;

	return remaining < max ? remaining : max;
}

/* Build the next frame of the send queue (requester.c). Returns false if nothing may be sent
 * now. */
bool soft_requester_next(struct soft_qp *qp, struct soft_tx_cursor *cursor,
			 struct soft_tx_packet *out);
/* Update the send queue after the path has accepted the frame `out`. */
void soft_requester_commit(struct soft_qp *qp, const struct soft_tx_packet *out);
/* Store iovecs for the frame's payload. Returns the number of iovecs, or -1 if the memory is no
 * longer readable. */
int soft_requester_gather(struct soft_qp *qp, const struct soft_tx_packet *out, struct iovec *iov,
			  int room);

/* ---- req_retransmit.c (IBTA 9.7.6.1) --------------------------------------------------------- */

/* Move the transmit position back to the first unacknowledged PSN. */
void soft_requester_go_back(struct soft_qp *qp);
/* Retransmit after a loss, or fail the oldest request if no retries are left. */
void soft_requester_retry(struct soft_qp *qp);
/* Retransmit after an implied NAK, which is a response to a later request. Further implied NAKs of
 * the same loss are ignored. */
void soft_requester_implied_nak(struct soft_qp *qp);
/* Update the transmit position before the oldest request completes. If the request was about to be
 * retransmitted, it is skipped. */
void soft_requester_skip_oldest(struct soft_qp *qp);
/* Expect a NAK for the oldest request, whose response the peer has withdrawn. Until the NAK arrives
 * or the link ends, responses to later requests do not cause a retransmission. */
void soft_requester_await_nak(struct soft_qp *qp);
/* Reset the retry count and restart the retransmission timer after a response. */
void soft_requester_reset_retries(struct soft_qp *qp);
/* Start the retransmission timer if a response is outstanding on a link that may lose it. */
void soft_requester_start_timer(struct soft_qp *qp);

/* Returns how many READs and atomics are still stored. */
static inline uint32_t soft_stored_rd_atomics(const struct soft_responder *responder)
{
	const uint32_t slots = responder->response_mask + 1;

	return responder->rd_atomic_count < slots ? (uint32_t)responder->rd_atomic_count : slots;
}

static inline struct soft_rd_atomic *soft_rd_atomic_at(const struct soft_responder *responder,
						       uint64_t index)
{
	return &responder->latest_rd_atomics[index & responder->response_mask];
}

static inline bool soft_responder_is_full(const struct soft_responder *responder)
{
	return responder->response_tail - responder->response_head > responder->response_mask;
}

/* ---- resp_retransmit.c (IBTA 9.7.4.1.2, 9.7.5.1) --------------------------------------------- */

/* Handle a request whose PSN is not the expected one. */
enum soft_sink soft_responder_unexpected_psn(struct soft_qp *qp, const struct soft_frame *frame);
/* Returns the latest executed READ or atomic with `opcode` that includes `psn`, or NULL. Only
 * requests that may still be unanswered are remembered (IBTA 9.4.5). */
struct soft_rd_atomic *soft_responder_find_rd_atomic(const struct soft_responder *responder,
						     uint8_t opcode, uint32_t psn);
void soft_responder_report_gap(struct soft_qp *qp); /* sends one NAK per gap */
/* Queue a NAK for the expected PSN. */
void soft_responder_nak(struct soft_qp *qp, uint8_t opcode, uint8_t syndrome);
/* Queue the response to a request that counts against max_rd_atomic. At least one slot must be
 * free. */
struct soft_response *soft_responder_queue_response(struct soft_qp *qp,
						    const struct soft_frame *frame, uint8_t opcode,
						    uint32_t length);

void soft_retry_expired(struct soft_timer *timer); /* callback of soft_qp.retry_timer */

/* ---- read_order.c ---------------------------------------------------------------------------- */

/* Copy the data of queued READ responses before a request overwrites it. */
void soft_responder_copy_reads(struct soft_qp *qp, const struct iovec *iov, int count);
void soft_responder_free_copy(struct soft_responder *responder, struct soft_response *response);

/* ---- responder.c ----------------------------------------------------------------------------- */

int soft_responder_prepare_rtr(struct soft_qp *qp, uint32_t depth, uint32_t psn);
int soft_responder_resize(struct soft_qp *qp,
			  uint32_t depth); /* implements soft_transport.resize */
/* Free the responder's memory. Does not require the lock. */
void soft_responder_undo_prepare_rtr(struct soft_qp *qp);
/* Send a NAK that ends the connection. Requests from `psn` on are not acknowledged. */
void soft_responder_fail(struct soft_qp *qp, enum soft_nak nak, uint32_t psn);
/* Send a NAK for the accepted request with PSN `psn`, because its memory has been deregistered.
 * This refuses all later requests as well, and drops the responses from `index` on. `withdrawn` is
 * the response to the request, and is recorded in the trace. */
void soft_responder_withdraw(struct soft_qp *qp, uint32_t index, uint32_t psn,
			     const struct soft_response *withdrawn);
/* Replace a repeated response with a NAK, because its memory has been deregistered. Other requests
 * are not affected. Returns false if this is not a repeated response. */
bool soft_responder_withdraw_repeated(struct soft_qp *qp, uint32_t index);
/* Mark a repeated response, so that a NAK is sent in its place. */
void soft_responder_refuse_repeated(struct soft_qp *qp, struct soft_response *response);
/* Build the frame with the next part of the queued response at `cursor`, or with the NAK that
 * replaces it. Returns false if no more responses are queued. */
bool soft_responder_next(struct soft_qp *qp, struct soft_tx_cursor *cursor,
			 struct soft_tx_packet *out);
/* Update the response after the path has accepted its frame `out`, and remove a response that has
 * been sent completely. */
void soft_responder_commit(struct soft_qp *qp, const struct soft_tx_packet *out);
int soft_responder_gather(struct soft_qp *qp, const struct soft_tx_packet *out, struct iovec *iov);
/* Move the cursor to `response`, which may be the tail of the queue. */
static inline void soft_responder_seek(const struct soft_qp *qp, struct soft_tx_cursor *cursor,
				       uint32_t response)
{
	const struct soft_responder *responder = &qp->responder;

	cursor->response = response;
	if (response != responder->response_tail)
		cursor->response_psn = soft_response_at(qp, response)->psn;
}
/* Returns the last PSN that a frame sent at `cursor` may acknowledge. */
uint32_t soft_responder_ack_psn(const struct soft_qp *qp, const struct soft_tx_cursor *cursor);
/* Returns the number of messages (MSN) that a frame sent at `cursor` may acknowledge. */
uint32_t soft_responder_msn(const struct soft_qp *qp, const struct soft_tx_cursor *cursor);

/* Destination of a received frame's payload. */
enum soft_sink {
	SOFT_SINK_NONE, /* valid frame without a payload */
	SOFT_SINK_DISCARD, /* nowhere; the rest of the frame is ignored */
	SOFT_SINK_SMALL, /* the link's small buffer */
	SOFT_SINK_RECEIVE, /* receive at the head of the queue */
	SOFT_SINK_WRITE, /* memory that the peer's request addresses */
	SOFT_SINK_READ, /* memory of the oldest send request */
	SOFT_SINK_BROKEN, /* invalid frame, after which the stream cannot continue */
};

/* Handle the header of a request (responder.c). */
enum soft_sink soft_request_begin(struct soft_qp *qp, struct soft_frame *frame);
/* Execute a request whose payload has arrived. */
void soft_request_end(struct soft_qp *qp, const struct soft_frame *frame,
		      const uint8_t *atomic_payload);
/* Handle the header of a response (completer.c). */
enum soft_sink soft_response_begin(struct soft_qp *qp, struct soft_frame *frame);
/* Handle a response whose payload has arrived. */
void soft_response_end(struct soft_qp *qp, const struct soft_frame *frame,
		       const uint8_t *atomic_payload);
/* Complete all requests up to `psn`. Returns false if the PSN is invalid. */
bool soft_complete_acknowledged(struct soft_qp *qp, uint32_t psn);

/* Refuse a SEND or WRITE whose payload cannot be stored in this side's memory. */
void soft_request_refuse_unwritable(struct soft_qp *qp, const struct soft_frame *frame);
/* Store iovecs for the bytes [from, from + length) of a request's payload. Returns the number of
 * iovecs, or -1 if the memory is not writable and the request has been refused. */
int soft_request_scatter(struct soft_qp *qp, const struct soft_frame *frame, uint32_t from,
			 uint32_t length, struct iovec *iov, int room);
/* Store iovecs for part of a response's payload. Returns their number, or -1 if the memory is not
 * writable and the request has failed. */
int soft_response_scatter(struct soft_qp *qp, const struct soft_frame *frame, uint32_t from,
			  uint32_t length, struct iovec *iov, int room);
