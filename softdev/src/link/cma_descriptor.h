/* Frames that describe their payload instead of carrying it (cma.h).
 *
 * A long SEND, WRITE or READ response between RC queue pairs of one host describes the sender's
 * memory if the kernel allows the receiver to copy it. Both sides check the frame like any other.
 * If the memory is deregistered before it has been copied, the request fails as if the memory had
 * been invalid from the start. A SEND or WRITE gets a local protection error (IBTA 10.7.2.2), and a
 * READ gets a remote access error (IBTA 9.7.4.1.5). A queue pair in error does not respond, so the
 * peer's READ fails when its retries are exhausted (IBTA 9.7.6.1.3).
 */
#pragma once

#include "link_internal.h"

enum {
	SOFT_CMA_DESC_MIN_PAYLOAD = 128 * 1024 /* minimum payload between processes (measured) */
};

/* Returns the maximum payload in bytes that the link's next frame may describe, or 0 if the frame
 * must carry its payload. Stores the minimum in `*min_payload`. */
uint32_t soft_cma_desc_max(const struct soft_link *link, uint32_t *min_payload);
/* Write a descriptor of the frame's payload to `at`, which has room for SOFT_CMA_DESC_MAX bytes.
 * Returns false if the frame must carry its payload. */
bool soft_cma_desc_send(struct soft_link *link, struct soft_tx_packet *out,
			const struct iovec *pieces, int count, uint8_t *at);
/* Returns whether link->frame may describe its payload. This requires shared memory, because a
 * descriptor of another host's memory is meaningless here. */
bool soft_cma_desc_allowed(const struct soft_link *link);
/* Copy the payload of link->frame from the memory that the descriptor in `bytes` names. The peer
 * may change `bytes` at any time. Returns false after a protocol error. The descriptors in one
 * record must cover less than 2 * SOFT_CMA_FRAME_MAX bytes, which limits the time spent under the
 * lock. link->cma_bytes must be 0 before the first descriptor of a record. */
bool soft_cma_desc_receive(struct soft_link *link, const uint8_t *bytes);

/* Revoke all exports of a queue pair's requests, because these requests are completed without a
 * response. Afterwards, the exported memory belongs to the application again. */
void soft_cma_flush(const struct soft_qp *qp);
/* Revoke the exports of a key that is invalidated or rebound. On return, the peers discard any copy
 * from the key's memory. */
void soft_cma_revoke_key(uint32_t key);
/* Revoke the exports of a link's requests when the link ends. The exports of its responses stay
 * until their key is invalidated, because the peer may still be copying from them. */
void soft_cma_forget_link(const struct soft_link *link);
