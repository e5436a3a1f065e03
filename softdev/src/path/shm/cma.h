/* Cross-memory attach (CMA): bulk data in one copy, from the memory of one process into that of
 * another (process_vm_readv(2)), or within this one.
 *
 * Only the receiving process copies, into its own memory, under its own lock; no process writes
 * into another's memory.  The kernel asks for no key, so the owner of the bytes exports for each
 * frame what may be copied, and revokes that before the memory is the application's again:
 *
 *   the owner   exports: a slot and its generation, which go with the addresses into the frame
 *   the other   marks itself busy with the slot, sees that the generation is still that one, copies,
 *               and looks at the generation again: if it has changed, what was copied counts as
 *               nothing
 *   the owner   takes back: changes the generation, and waits while the other is busy with the slot
 *
 * So when an export has been revoked, no copy from it is under way, and none that comes later
 * counts.  The wait is bounded, because the other process may have been stopped in the middle: then
 * it copies once more when it goes on, and discards what it got.
 *
 * Everything here is called with the engine's lock, in each of the two processes.
 */
#pragma once

#include <sys/types.h>

#include "objects/objects.h"

struct iovec;
struct soft_link;

enum {
	SOFT_CMA_SLOTS = 128, /* exports in use at a time, from one process to another */
	SOFT_CMA_PAGE = 4096,
};

/* One side's page in shared memory for the other, zeros to begin with.  Only its owner writes it,
 * and nothing in it is trusted: wrong values here cost their writer its own messages. */
struct soft_cma_page {
	/* random: is found in the memory of this process, at a place that only the other one knows,
	 * and of no other that might come to have its number */
	uint64_t secret[2];
	/* until that time of CLOCK_MONOTONIC no descriptors, please: copying was slow */
	uint64_t backoff_until;
	uint32_t copies; /* this process may copy from the other's memory */
	uint32_t busy; /* 1 + the slot that it is copying from at this moment, or 0 */
	uint32_t generation[SOFT_CMA_SLOTS]; /* of the slots that it exports */
	uint32_t done[SOFT_CMA_SLOTS]; /* of the other's slots: the last generation that it
						* needs no more */
	/* mean time in which this process puts a MiB into the ring, in ns; 0: not known */
	uint64_t put_ns;
};

_Static_assert(sizeof(struct soft_cma_page) <= SOFT_CMA_PAGE, "one page for each side");

/* An export in use: what its owner must know when it is revoked. */
struct soft_cma_export {
	bool used;
	bool answer; /* to a READ; else a SEND or WRITE */
	struct soft_link *link;
	uint32_t index; /* request: of its slot in the send queue */
	uint32_t psn;
	uint32_t rkey; /* answer: what opens the memory */
	uint32_t slot;
	uint32_t generation;
	uint64_t order; /* exports were given in */
};

/* The state of copies between this process and one other. */
struct soft_cma {
	struct soft_cma_page *own;
	struct soft_cma_page *peer; /* the same one if the other is this process */
	struct soft_node node; /* cma.c */
	bool probed;
	pid_t pid; /* of the other */
	uint64_t secret[2]; /* as in `own`; its address is sent to the other side (attach.c) */
	uint64_t peer_secret_at; /* in the memory of the other side, which may say what it likes */
	uint64_t order;
	unsigned used; /* exports, some of which the other side may be done with */
	unsigned cursor; /* the slot after the last one exported */
	unsigned timeouts; /* revocations that did not wait to the end for the other side */
	bool was_slow; /* the last copy took too long */
	uint64_t took_ns; /* as `put_ns`: of taking a MiB out of the ring */
	struct soft_cma_export exports[SOFT_CMA_SLOTS];
};

/* Both pages are mapped; the own one gets its contents.  0 or an errno value. */
int soft_cma_init(struct soft_cma *cma, struct soft_cma_page *own, struct soft_cma_page *peer);
/* The other side's page has its contents, and its process this number (0: not known): may this
 * process copy?  Told to the other side. */
bool soft_cma_probe(struct soft_cma *cma, pid_t pid);
/* Before the pages are unmapped. */
void soft_cma_end(struct soft_cma *cma);

/* ---- the owner of the memory --------------------------------------------------------------- */

/* May something be exported: can the other side copy? */
bool soft_cma_is_open(const struct soft_cma *cma);
/* Has the other side found that copying costs more than it saves? */
bool soft_cma_backs_off(const struct soft_cma *cma);
/* An export to be filled in, with its slot and generation; or NULL: all are in use. */
struct soft_cma_export *soft_cma_export_new(struct soft_cma *cma);
/* Take back the exports that are `concerned`.  On return the peer copies no more of their bytes into
 * anything that counts.  Those that it had not used go into `lost`, in the order in which they were given;
 * returns how many. */
unsigned soft_cma_revoke(struct soft_cma *cma,
			 bool (*concerned)(const struct soft_cma_export *export, const void *what),
			 const void *what, struct soft_cma_export lost[SOFT_CMA_SLOTS]);

/* ---- the one that copies ------------------------------------------------------------------- */

/* As it came in a frame: memory of the other process. */
struct soft_cma_desc {
	uint32_t slot;
	uint32_t generation;
	uint32_t count;
	uint32_t length; /* of the pieces together */
	struct {
		uint64_t address;
		uint64_t length;
	} pieces[SOFT_CMA_PIECES];
};

enum { SOFT_CMA_DESC_MAX = SOFT_CMA_DESC_HEAD + SOFT_CMA_PIECES * SOFT_CMA_DESC_PIECE };

/* As bytes; returns their number. */
uint32_t soft_cma_desc_encode(uint8_t *at, const struct soft_cma_desc *desc);
/* Of so many pieces that make `length` bytes; false when that is not so, or the slot does not
 * exist. */
bool soft_cma_desc_decode(const uint8_t *at, uint32_t count, uint32_t length,
			  struct soft_cma_desc *desc);

enum soft_cma_result {
	SOFT_CMA_COPIED,
	SOFT_CMA_REVOKED, /* what may have been copied counts as nothing */
	SOFT_CMA_UNREADABLE, /* there is no such memory */
	SOFT_CMA_UNWRITABLE, /* nor here, where it should go to */
	SOFT_CMA_FORBIDDEN, /* by the kernel, from now on; the other side can see that */
	SOFT_CMA_GONE, /* the process is not there any more */
};

/* Bytes from `offset` of what is referred to, as many as `to` has room for; the last ones also say
 * that the descriptor is done with. */
enum soft_cma_result soft_cma_copy(struct soft_cma *cma, const struct soft_cma_desc *desc,
				   uint32_t offset, const struct iovec *to, int count);
/* What a copy is compared with.  A record of `length` bytes is put into the ring for the other side, or
 * taken out of the own one, from the moment `since` on, which is 0 if it is too short to be measured. */
uint64_t soft_cma_ring_begins(size_t length);
void soft_cma_ring_put(struct soft_cma *cma, uint64_t since, size_t length);
void soft_cma_ring_took(struct soft_cma *cma, uint64_t since, size_t length);
/* It is not needed, or not any more. */
void soft_cma_done(struct soft_cma *cma, const struct soft_cma_desc *desc);
