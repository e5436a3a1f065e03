/* Cross-memory attach (CMA): copies bulk data directly from the memory of another process
 * (process_vm_readv(2)), or within this process.
 *
 * Only the receiving process copies, into its own memory and under its own lock. No process writes
 * to another's memory. The kernel does not check memory keys. For each frame, the owner of the
 * memory therefore exports the part that may be copied. It revokes the export before it returns the
 * memory to the application:
 *
 *   owner   exports: sends the number of a slot, its generation and the addresses in the frame
 *   peer    marks itself busy with the slot, checks the generation, copies, and checks it again;
 *           if it has changed, the copy is discarded
 *   owner   revokes: changes the generation, and waits while the peer is busy with the slot
 *
 * After an export has been revoked, no copy from it is in progress, and later copies are discarded.
 * The owner waits for a limited time only, because the peer may have been stopped in the middle of
 * a copy. When the peer continues, it finishes this copy and discards it.
 *
 * All functions require the engine's lock of the calling process.
 */
#pragma once

#include <sys/types.h>

#include "objects/objects.h"

struct iovec;
struct soft_link;

enum {
	SOFT_CMA_SLOTS = 128, /* maximum number of exports from one process to another */
	SOFT_CMA_PAGE = 4096,
};

/* One side's page in shared memory, initially zeros. Only its owner writes to it. The other side
 * does not trust the contents: wrong values affect only the messages of their writer. */
struct soft_cma_page {
	/* Random bytes that distinguish the owner of the page from a later process with the same
	 * PID. The owner's private memory contains a copy, and only the peer gets its address. */
	uint64_t secret[2];
	/* CLOCK_MONOTONIC time until which the peer should not send descriptors, because copying
	 * was slow. */
	uint64_t backoff_until;
	uint32_t can_copy; /* whether the owner of the page may copy from the peer's memory */
	uint32_t busy; /* 1 + number of the peer's slot being copied, or 0 */
	uint32_t generation[SOFT_CMA_SLOTS]; /* current generations of the owner's exports */
	uint32_t done[SOFT_CMA_SLOTS]; /* last finished generation of each of the peer's slots */
	/* Mean time in ns to write 1 MiB to the ring, or 0 if unknown. */
	uint64_t ring_write_ns;
};

_Static_assert(sizeof(struct soft_cma_page) <= SOFT_CMA_PAGE, "one page for each side");

/* An export, and the request or response whose payload it covers. The owner uses these fields to
 * select the exports to revoke, and to refuse a READ if the export of its response is revoked. */
struct soft_cma_export {
	bool used;
	bool is_response; /* response to a READ, not a SEND or WRITE request */
	struct soft_link *link;
	uint32_t index; /* slot of the request in the send queue */
	uint32_t psn;
	struct soft_response response; /* part of the response that the export covers */
	uint32_t slot;
	uint32_t generation;
	uint64_t order; /* increases with each new export */
};

/* State of cross-memory attach between this process and one peer. */
struct soft_cma {
	struct soft_cma_page *own;
	struct soft_cma_page *peer; /* equal to `own` if the peer is this process */
	struct soft_node node; /* in the list of all peers' states (cma.c) */
	bool probed;
	pid_t pid; /* PID of the peer */
	uint64_t secret[2]; /* own secret, whose address is sent to the peer (attach.c) */
	uint64_t peer_secret_at; /* address of the peer's secret; not trusted */
	uint64_t next_order;
	unsigned used_slots; /* number of exports, including those that the peer has finished */
	unsigned next_slot; /* slot after the latest export */
	unsigned timeouts; /* number of revocations that timed out */
	bool was_slow; /* whether the previous measured copy was slow */
	uint64_t ring_read_ns; /* mean time in ns to read 1 MiB from the ring, or 0 if unknown */
	struct soft_cma_export exports[SOFT_CMA_SLOTS];
};

/* Initialize the state and this side's page. The caller has mapped both pages. Returns 0 or an
 * errno value. */
int soft_cma_init(struct soft_cma *cma, struct soft_cma_page *own, struct soft_cma_page *peer);
/* Find out whether this process may copy from the peer, and publish the result for the peer. The
 * peer must have initialized its page. `pid` is the peer's process, or 0 if unknown. Returns
 * whether copying is possible. */
bool soft_cma_probe(struct soft_cma *cma, pid_t pid);
/* Stop the peer from copying this process's memory. Call this before unmapping the pages. */
void soft_cma_end(struct soft_cma *cma);

/* ---- the owner of the memory --------------------------------------------------------------- */

/* Returns whether memory may be exported to the peer. The peer must be able to copy it, and must
 * not have delayed too many revocations. */
bool soft_cma_is_open(const struct soft_cma *cma);
/* Returns whether the peer has recently found copying slower than the ring. */
bool soft_cma_backs_off(const struct soft_cma *cma);
/* Create an export in a free slot. Returns NULL if all slots are in use. */
struct soft_cma_export *soft_cma_export_new(struct soft_cma *cma);
/* Revoke the exports for which `must_revoke` returns true. Waits for a limited time if the peer is
 * copying from one of them. Stores the exports that the peer has not finished in `unfinished`, in
 * order of creation, and returns their number. The peer discards what it copies from them. */
unsigned soft_cma_revoke(struct soft_cma *cma,
			 bool (*must_revoke)(const struct soft_cma_export *export,
					     const void *context),
			 const void *context, struct soft_cma_export unfinished[SOFT_CMA_SLOTS]);

/* ---- the copying side ---------------------------------------------------------------------- */

/* A descriptor of the other process's memory, received in a frame. */
struct soft_cma_desc {
	uint32_t slot;
	uint32_t generation;
	uint32_t count;
	uint32_t length; /* total length of the pieces */
	struct {
		uint64_t address;
		uint64_t length;
	} pieces[SOFT_CMA_PIECES];
};

enum { SOFT_CMA_DESC_MAX = SOFT_CMA_DESC_HEAD + SOFT_CMA_PIECES * SOFT_CMA_DESC_PIECE };

/* Encode a descriptor. Returns the number of bytes written. */
uint32_t soft_cma_desc_encode(uint8_t *at, const struct soft_cma_desc *desc);
/* Decode a descriptor of `count` pieces with `length` bytes in total. Returns false if the number,
 * the lengths or the slot are invalid. */
bool soft_cma_desc_decode(const uint8_t *at, uint32_t count, uint32_t length,
			  struct soft_cma_desc *desc);

enum soft_cma_result {
	SOFT_CMA_COPIED,
	SOFT_CMA_REVOKED, /* the copy must be discarded */
	SOFT_CMA_UNREADABLE, /* the peer's memory is not mapped */
	SOFT_CMA_UNWRITABLE, /* the destination in this process is not mapped */
	SOFT_CMA_FORBIDDEN, /* the kernel no longer allows copies; the peer stops exporting */
	SOFT_CMA_GONE, /* the process no longer exists */
};

/* Fill `to` with data from the descriptor's memory, starting at `offset`. Marks the descriptor as
 * done after its last byte has been copied, or after a failure other than SOFT_CMA_REVOKED. */
enum soft_cma_result soft_cma_copy(struct soft_cma *cma, const struct soft_cma_desc *desc,
				   uint32_t offset, const struct iovec *to, int count);
/* Start measuring the ring, for comparison with copies. Returns a start time for
 * soft_cma_ring_wrote() or soft_cma_ring_read(), or 0 if the record is too short to be measured. */
uint64_t soft_cma_ring_start(size_t length);
/* Finish measuring a write of `length` bytes to the peer's ring. */
void soft_cma_ring_wrote(struct soft_cma *cma, uint64_t start_ns, size_t length);
/* Finish measuring a read of `length` bytes from this side's ring. */
void soft_cma_ring_read(struct soft_cma *cma, uint64_t start_ns, size_t length);
/* Mark a descriptor as done, so that the owner can reuse its slot. */
void soft_cma_mark_done(struct soft_cma *cma, const struct soft_cma_desc *desc);
