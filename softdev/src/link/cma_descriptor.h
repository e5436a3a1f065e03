/* Frames that refer to their payload instead of carrying it (cma.h).
 *
 * Long SENDs, WRITEs and READ responses between RC queue pairs of one host refer to the sender's
 * memory if the kernel allows the other side to copy it. Both sides check the frame like any other.
 * If the memory is deregistered in the meantime, the request is refused as if this had been found
 * out before: with a local protection error of the request (IBTA 10.7.2.2), or a remote access
 * error of a READ (9.7.4.1.5). A queue pair in error does not respond, so the peer's READ fails
 * when its retries are used up (IBTA 9.7.6.1.3).
 */
#pragma once

#include "link_internal.h"

enum {
	SOFT_CMA_DESC_LEAST = 128 * 1024 /* minimum payload between processes (measured) */
};

/* Returns the maximum payload that the link's next frame may refer to, or 0 if descriptors are not
 * possible. Stores the minimum in `least`. */
uint32_t soft_cma_desc_most(const struct soft_link *link, uint32_t *least);
/* Write a descriptor of the frame's whole payload to `at`, which has room for SOFT_CMA_DESC_MAX
 * bytes. Returns false if the payload has to be sent instead. */
bool soft_cma_desc_send(struct soft_link *link, struct soft_tx_packet *out,
			const struct iovec *pieces, int count, uint8_t *at);
/* Returns whether the other side may refer to the payload of link->frame. This is limited to shared
 * memory, because a descriptor of another host's memory is meaningless here. */
bool soft_cma_desc_allowed(const struct soft_link *link);
/* Copy the payload of link->frame from the memory that the descriptor names. The peer may change
 * `bytes` at any time. Returns false after a protocol error. The descriptors of one record
 * (link->cma_bytes is 0 for the first) cover less than twice SOFT_CMA_FRAME_MAX bytes, which limits
 * the time under the lock. */
bool soft_cma_desc_receive(struct soft_link *link, const uint8_t *bytes);

/* Revoke the exports of a queue pair's requests, which complete without a response. Their memory
 * then belongs to the application again. */
void soft_cma_flush(const struct soft_qp *qp);
/* Revoke the exports of a key that is invalidated or rebound. On return, no peer copies from the
 * memory that the key covered. */
void soft_cma_withdraw_key(uint32_t key);
/* Forget a link that no longer exists. */
void soft_cma_forget_link(const struct soft_link *link);
