/* Cross-memory attach (CMA): copies bulk data directly from the memory of one process to that of
 * another (process_vm_readv(2)), or within this process.
 *
 * Only the receiving process copies, into its own memory and under its own lock. No process writes
 * to another's memory. The kernel does not check keys, so the owner of the memory exports for each
 * frame what may be copied, and revokes the export before the memory belongs to the application
 * again:
 *
 *   owner   exports: sends the number of a slot, its generation and the addresses in the frame
 *   peer    marks itself busy with the slot, checks the generation, copies, and checks it again;
 *           if it has changed, the copy is discarded
 *   owner   revokes: changes the generation, and waits while the peer is busy with the slot
 *
 * After an export has been revoked, no copy from it is in progress, and later ones are discarded.
 * The wait is limited because the peer may be stopped in the middle of a copy. It then finishes the
 * copy when it continues, and discards it.
 *
 * All functions require the engine's lock, in each of the two processes.
 */
#pragma once

#include <sys/types.h>

#include "objects/objects.h"

struct iovec;
struct soft_link;

enum {
	SOFT_CMA_SLOTS = 128, /* maximum exports in use from one process to another */
	SOFT_CMA_PAGE = 4096,
};

/* One side's page in shared memory, initially zeros. Only its owner writes to it, and the other
 * side does not trust its contents: wrong values only affect their writer's messages. */
struct soft_cma_page {
	/* Random bytes that are also in the memory of this process, at an address known only to the
	 * peer. Another process that gets the same PID does not have them. */
	uint64_t secret[2];
	/* CLOCK_MONOTONIC time before which the peer should not send descriptors, because copying
	 * was slow. */
	uint64_t backoff_until;
	uint32_t copies; /* whether this process may copy from the peer's memory */
	uint32_t busy; /* 1 + the slot that it is copying from, or 0 */
	uint32_t generation[SOFT_CMA_SLOTS]; /* generations of its own exports */
	uint32_t done[SOFT_CMA_SLOTS]; /* last generations of the peer's slots not needed */
	/* Mean time in ns for which this process puts a MiB into the ring; 0 if unknown. */
	uint64_t put_ns;
};

_Static_assert(sizeof(struct soft_cma_page) <= SOFT_CMA_PAGE, "one page for each side");

/* An export in use, with what its owner needs to know when it is revoked. */
struct soft_cma_export {
	bool used;
	bool answer; /* response to a READ; otherwise a SEND or WRITE */
	struct soft_link *link;
	uint32_t index; /* slot of the request in the send queue */
	uint32_t psn;
	struct soft_response response; /* the part of it that a response refers to */
	uint32_t slot;
	uint32_t generation;
	uint64_t order; /* order in which exports were created */
};

/* State of cross-memory attach with one other process. */
struct soft_cma {
	struct soft_cma_page *own;
	struct soft_cma_page *peer; /* equal to `own` if the peer is this process */
	struct soft_node node; /* in the list of cma.c */
	bool probed;
	pid_t pid; /* PID of the peer */
	uint64_t secret[2]; /* same as in `own`; its address is sent to the peer (attach.c) */
	uint64_t peer_secret_at; /* address in the peer's memory; not trusted */
	uint64_t order;
	unsigned used; /* exports, including those that the peer has marked as done */
	unsigned cursor; /* slot after the last export */
	unsigned timeouts; /* revocations that stopped waiting for the peer */
	bool was_slow; /* whether the last copy was slow */
	uint64_t took_ns; /* like `put_ns`, for taking a MiB out of the ring */
	struct soft_cma_export exports[SOFT_CMA_SLOTS];
};

/* Initialize the state and this side's page. Both pages are mapped. Returns 0 or an errno value. */
int soft_cma_init(struct soft_cma *cma, struct soft_cma_page *own, struct soft_cma_page *peer);
/* Find out whether this process may copy, and tell the peer. The peer's page is initialized, and
 * `pid` is its process, or 0 if unknown. */
bool soft_cma_probe(struct soft_cma *cma, pid_t pid);
/* Called before the pages are unmapped. */
void soft_cma_end(struct soft_cma *cma);

/* ---- the owner of the memory --------------------------------------------------------------- */

/* Returns whether the peer can copy, so that memory may be exported. */
bool soft_cma_is_open(const struct soft_cma *cma);
/* Returns whether the peer has found that copying is slower than the ring. */
bool soft_cma_backs_off(const struct soft_cma *cma);
/* Create an export with a slot and a generation. Returns NULL if all slots are in use. */
struct soft_cma_export *soft_cma_export_new(struct soft_cma *cma);
/* Revoke the exports for which `concerned` returns true. On return, the peer discards any copy of
 * them. Stores the exports that the peer had not used in `lost`, in the order of their creation,
 * and returns their number. */
unsigned soft_cma_revoke(struct soft_cma *cma,
			 bool (*concerned)(const struct soft_cma_export *export, const void *what),
			 const void *what, struct soft_cma_export lost[SOFT_CMA_SLOTS]);

/* ---- the one that copies ------------------------------------------------------------------- */

/* A descriptor received in a frame: memory of the other process. */
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

/* Encode a descriptor. Returns the number of bytes. */
uint32_t soft_cma_desc_encode(uint8_t *at, const struct soft_cma_desc *desc);
/* Decode a descriptor of `count` pieces with `length` bytes in total. Returns false if the lengths
 * differ or the slot does not exist. */
bool soft_cma_desc_decode(const uint8_t *at, uint32_t count, uint32_t length,
			  struct soft_cma_desc *desc);

enum soft_cma_result {
	SOFT_CMA_COPIED,
	SOFT_CMA_REVOKED, /* the copy must be discarded */
	SOFT_CMA_UNREADABLE, /* the peer's memory does not exist */
	SOFT_CMA_UNWRITABLE, /* the destination in this process does not exist */
	SOFT_CMA_FORBIDDEN, /* the kernel does not allow copies any more; the peer can see that */
	SOFT_CMA_GONE, /* the process no longer exists */
};

/* Copy bytes from `offset` of the descriptor's memory until `to` is full. Copying the last bytes
 * marks the descriptor as done. */
enum soft_cma_result soft_cma_copy(struct soft_cma *cma, const struct soft_cma_desc *desc,
				   uint32_t offset, const struct iovec *to, int count);
/* Measure the ring, with which copies are compared: putting a record of `length` bytes into the
 * peer's ring, or taking it out of our own. `since` is the result of soft_cma_ring_begins(), which
 * is 0 for a record too short to be measured. */
uint64_t soft_cma_ring_begins(size_t length);
void soft_cma_ring_put(struct soft_cma *cma, uint64_t since, size_t length);
void soft_cma_ring_took(struct soft_cma *cma, uint64_t since, size_t length);
/* Mark a descriptor that is not needed, or no longer needed, as done. */
void soft_cma_done(struct soft_cma *cma, const struct soft_cma_desc *desc);
