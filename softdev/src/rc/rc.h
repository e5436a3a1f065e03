/* Reliable connections, and unreliable ones, which are the same without answers: from work requests
 * to frames and back.  What carries the frames is in link/. */
#pragma once

#include "objects/objects.h"

extern const struct soft_transport soft_rc_transport;

/* ---- frames being built and taken in ------------------------------------------------------- */

/* Where transmission has got to, while a batch of frames is built and not yet sent. */
struct soft_tx_cursor {
	uint32_t next, next_psn, reads;
	uint32_t response, response_psn;
	uint32_t acked;
	uint32_t most; /* bytes of payload that the next frame may carry: whole units of any MTU */
	uint32_t cma_most; /* the same with a descriptor; 0: it cannot have one */
	uint32_t cma_least; /* as many as are worth it */
};

/* Of the `left` bytes of a message, those of its next frame; and is it a descriptor? */
static inline uint32_t soft_frame_share(const struct soft_tx_cursor *cursor, uint32_t left,
					bool *by_cma)
{
	*by_cma = cursor->cma_most && left >= cursor->cma_least;
	uint32_t most = *by_cma ? cursor->cma_most : cursor->most;

	return left < most ? left : most;
}

/* requester.c.  next: false when nothing may be sent now. */
bool soft_requester_next(struct soft_qp *qp, struct soft_tx_cursor *cursor,
			 struct soft_tx_packet *out);
void soft_requester_commit(struct soft_qp *qp, const struct soft_tx_packet *out);
/* The frame's payload as iovecs; their number, or -1 when its memory may not be read any more. */
int soft_requester_gather(struct soft_qp *qp, const struct soft_tx_packet *out, struct iovec *iov,
			  int room);

/* req_retransmit.c (IBTA 9.7.6.1) */
/* Back to the first PSN that is not answered. */
void soft_requester_go_back(struct soft_qp *qp);
/* The same because something was lost, or fail when that has happened too often. */
void soft_requester_retry(struct soft_qp *qp);
/* The answer to a later request is there. */
void soft_requester_missed(struct soft_qp *qp);
/* The oldest request is done, perhaps before it has been transmitted again. */
void soft_requester_done(struct soft_qp *qp);
/* Wait for the NAK of the oldest request, whose answer was withdrawn, or for the end of the link.
 * Until then answers to later requests do not cause a retransmission. */
void soft_requester_await_nak(struct soft_qp *qp);
/* Something was answered: count from the beginning. */
void soft_requester_progress(struct soft_qp *qp);
/* Wait for an answer, if there is one to be expected. */
void soft_requester_await(struct soft_qp *qp);

/* Has each place for an answer one? */
static inline bool soft_responder_is_full(const struct soft_responder *responder)
{
	return responder->response_tail - responder->response_head > responder->response_mask;
}

/* resp_retransmit.c (IBTA 9.7.4.1.2, 9.7.5.1) */
enum soft_sink soft_responder_out_of_turn(struct soft_qp *qp, const struct soft_frame *frame);
/* Returns the latest request of that kind with the packet `psn` among those that can be unanswered
 * (IBTA 9.4.5), or NULL. */
struct soft_known_read *soft_responder_find(const struct soft_responder *responder, uint8_t opcode,
					    uint32_t psn);
void soft_responder_missed(struct soft_qp *qp); /* what was expected has not come */
void soft_responder_nak(struct soft_qp *qp, uint8_t opcode, uint8_t syndrome);
struct soft_response *soft_responder_answer(struct soft_qp *qp, const struct soft_frame *frame,
					    uint8_t opcode, uint32_t length);

void soft_retry_expired(struct soft_timer *timer); /* soft_qp.retry_timer */

/* read_order.c: READs whose answers wait, and requests behind them */
/* Bytes that a request is about to write. */
void soft_responder_keep_reads(struct soft_qp *qp, const struct iovec *iov, int count);
void soft_responder_unkeep(struct soft_responder *responder, struct soft_response *response);

/* responder.c */
int soft_responder_prepare(struct soft_qp *qp, uint32_t depth, uint32_t psn);
int soft_responder_resize(struct soft_qp *qp, uint32_t depth); /* soft_transport.resize */
void soft_responder_forget(struct soft_qp *qp); /* frees memory; the lock is not needed */
void soft_responder_fail(struct soft_qp *qp, enum soft_nak nak, uint32_t psn);
/* The memory of the answer with that index was deregistered after the request had been accepted: the
 * request with that PSN, and those after it, are refused. */
void soft_responder_withdrawn(struct soft_qp *qp, uint32_t index, uint32_t psn);
/* The same for an answer that is given again; false: it is none.  A NAK takes its place, and no other
 * request is concerned. */
bool soft_responder_withdrawn_again(struct soft_qp *qp, uint32_t index);
void soft_responder_refuse_again(struct soft_qp *qp, struct soft_response *response);
bool soft_responder_next(struct soft_qp *qp, struct soft_tx_cursor *cursor,
			 struct soft_tx_packet *out);
void soft_responder_commit(struct soft_qp *qp, const struct soft_tx_packet *out);
int soft_responder_gather(struct soft_qp *qp, const struct soft_tx_packet *out, struct iovec *iov);
/* The cursor's next answer is that one, if there is one. */
static inline void soft_responder_answer_at(const struct soft_qp *qp, struct soft_tx_cursor *cursor,
					    uint32_t response)
{
	const struct soft_responder *responder = &qp->responder;

	cursor->response = response;
	if (response != responder->response_tail)
		cursor->response_psn = soft_response_at(qp, response)->psn;
}
/* The PSN up to which everything is done and may be acknowledged with a frame sent after `cursor`;
 * and how many messages that are. */
uint32_t soft_responder_done(const struct soft_qp *qp, const struct soft_tx_cursor *cursor);
uint32_t soft_responder_msn(const struct soft_qp *qp, const struct soft_tx_cursor *cursor);

/* Taking in.  What happens to the frame just begun and its payload: */
enum soft_sink {
	SOFT_SINK_NONE, /* there is no payload */
	SOFT_SINK_DISCARD, /* read and forgotten, the frame too */
	SOFT_SINK_SMALL, /* into the link's small buffer */
	SOFT_SINK_RECEIVE, /* scattered to the receive at the head of the queue */
	SOFT_SINK_WRITE, /* to the memory that the peer named */
	SOFT_SINK_READ, /* scattered to the oldest request */
	SOFT_SINK_BROKEN, /* no such frame can come here: the stream is given up */
};

/* responder.c, completer.c: a frame's header is there; its payload is there, wholly. */
enum soft_sink soft_request_begin(struct soft_qp *qp, struct soft_frame *frame);
void soft_request_end(struct soft_qp *qp, const struct soft_frame *frame, const uint8_t *small);
enum soft_sink soft_answer_begin(struct soft_qp *qp, struct soft_frame *frame);
void soft_answer_end(struct soft_qp *qp, const struct soft_frame *frame, const uint8_t *small);
/* Everything up to this PSN is done; false if that cannot be. */
bool soft_acknowledged(struct soft_qp *qp, uint32_t psn);

void soft_request_unwritable(struct soft_qp *qp, const struct soft_frame *frame); /* refuses it */
/* Memory for payload bytes [from, from + length) of the frame, as iovecs: their number; or -1, after
 * soft_request_unwritable if the memory may not be written. */
int soft_request_scatter(struct soft_qp *qp, const struct soft_frame *frame, uint32_t from,
			 uint32_t length, struct iovec *iov, int room);
int soft_answer_scatter(struct soft_qp *qp, const struct soft_frame *frame, uint32_t from,
			uint32_t length, struct iovec *iov, int room);
