/* Frames that refer to their payload instead of carrying it; cma.h has what is behind that.
 *
 * SENDs, WRITEs and answers to READs of RC queue pairs of one host refer to what is long, where the
 * kernel allows the other side to copy it.  Everything is checked as for any other frame, on both
 * sides; what is taken back meanwhile is refused as if it had been found out before: IBTA 10.7.2.2,
 * a local protection error of the request whose memory it was, and 9.7.4.1.5, a remote access error
 * of a READ.  A queue pair in error refuses nothing, because it does not answer: the peer's READ
 * fails when its retries are used up (IBTA 9.7.6.1.3). */
#pragma once

#include "link_internal.h"

enum {
	SOFT_CMA_DESC_LEAST = 128 * 1024 /* bytes that are worth it, to another process: measured */
};

/* Bytes that the link's next frame may refer to, if there are as many as `least`; 0: it cannot. */
uint32_t soft_cma_desc_most(const struct soft_link *link, uint32_t *least);
/* The frame refers to these pieces, which are all of its payload: the descriptor, `at` which there
 * are SOFT_CMA_DESC_MAX bytes of room.  False: not this time. */
bool soft_cma_desc_send(struct soft_link *link, struct soft_tx_packet *out,
			const struct iovec *pieces, int count, uint8_t *at);
/* May the other side refer to the payload of link->frame?  Only through shared memory: a peer's word
 * about memory of another host means nothing here. */
bool soft_cma_desc_allowed(const struct soft_link *link);
/* The payload of link->frame is where the descriptor says; `bytes` may change meanwhile.  False: a
 * protocol error.  The descriptors of frames that come together (link->cma_bytes is zero for the
 * first) cover less than twice SOFT_CMA_FRAME_MAX, which bounds the time under the lock. */
bool soft_cma_desc_receive(struct soft_link *link, const uint8_t *bytes);

/* The requests of the queue pair complete without being answered: their memory will be the
 * application's again. */
void soft_cma_flush(const struct soft_qp *qp);
/* Call when a key is invalidated or rebound.  On return no peer copies from the memory that the key
 * opened before. */
void soft_cma_withdraw_key(uint32_t key);
/* The link is gone. */
void soft_cma_forget_link(const struct soft_link *link);
