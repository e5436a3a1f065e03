/* A ring of records in memory shared by two processes: one writes, the other reads.
 *
 * The functions make no system calls except for mapping and unmapping. Each side keeps its own
 * position in private memory and only publishes it. It copies the other side's position and a
 * record's header once and checks the copy. A side that violates the format causes EPROTO and can
 * do no other harm. The payload that soft_ring_next returns may change while it is read.
 *
 * The bytes are mapped twice in a row, so that every record is contiguous. While the reader keeps
 * up, the writer reuses the first pages. They stay in the caches, and the rest of a quiet ring's
 * memory is never touched.
 *
 * Wake-ups: the reader sets `notify_wanted` before it sleeps, and the writer sets `room_wanted`
 * before it waits for room. No wake-up is lost, because the side that sets its flag then checks the
 * other's position, and the side that moves its position then checks the other's flag. All four are
 * operations in one total order (atomics.h), so either the flag is set before it is checked, or the
 * position is moved before it is checked. Operations are used instead of fences because the thread
 * sanitizer understands them.
 *
 * Fuzzed on arbitrary memory: soft_ring_next, soft_ring_done and soft_ring_arm as the reader;
 * soft_ring_room, soft_ring_put and soft_ring_request_room as the writer.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct iovec;

enum {
	SOFT_RING_SIZE = 1024 * 1024, /* a power of two, and a multiple of the page size */
	SOFT_RECORD_HEADER = 16,
	SOFT_RECORD_MOST = SOFT_RING_SIZE / 2, /* maximum payload of a record */
};

/* The shared positions in bytes. Zeros are an empty ring. */
struct soft_ring_shared {
	_Alignas(64) uint64_t tail; /* written by the writer */
	uint32_t room_wanted;
	_Alignas(64) uint64_t head; /* written by the reader */
	_Alignas(64) uint32_t
		notify_wanted; /* on its own cache line because it is rarely written */
};

/* One side of a ring. */
struct soft_ring {
	struct soft_ring_shared *shared;
	uint8_t *bytes;
	uint64_t mine;   /* tail or head */
	uint64_t theirs; /* last valid value seen */
};

struct soft_record {
	uint32_t kind; /* not 0 */
	uint32_t to;
	uint32_t from;
	uint32_t length;
	const uint8_t *payload;
};

/* Map SOFT_RING_SIZE bytes of the file at `offset` twice in a row, and not in children of a fork.
 * Returns NULL and sets errno on failure. */
uint8_t *soft_ring_map(int fd, off_t offset);
void soft_ring_unmap(uint8_t *bytes);

/* Initialize one side at the beginning of the ring. */
void soft_ring_init(struct soft_ring *ring, struct soft_ring_shared *shared, uint8_t *bytes);

/* ---- writing ------------------------------------------------------------------------------- */

/* Returns the maximum payload of the next record, or -EPROTO. A result below `least` is up to
 * date. */
ssize_t soft_ring_room(struct soft_ring *ring, size_t least);
/* Write a record whose payload fits. The reader may see it immediately. */
void soft_ring_put(struct soft_ring *ring, const struct soft_record *record,
		   const struct iovec *payload, int count);
/* Called when everything has been written for now. Returns true once if the reader must be
 * notified. */
bool soft_ring_flush(struct soft_ring *ring);
/* Request a notification when there is room. Returns the room that has become available, or
 * -EPROTO. */
ssize_t soft_ring_request_room(struct soft_ring *ring);

/* Create a view of what a reader that has ended had not read, for soft_ring_next_unread() only.
 * Returns false if its position is impossible. */
bool soft_ring_unread(const struct soft_ring *ring, struct soft_ring *rest);
/* Get the next unread record. Returns 1, 0 if there is none, or -EPROTO. */
int soft_ring_next_unread(struct soft_ring *rest, struct soft_record *record);

/* ---- reading ------------------------------------------------------------------------------- */

/* Get the next record. Returns 1, 0 if there is none, or -EPROTO. */
int soft_ring_next(struct soft_ring *ring, struct soft_record *record);
/* Release the room of a record. */
void soft_ring_done(struct soft_ring *ring, const struct soft_record *record);
/* Returns whether there is a record, even an invalid one. */
bool soft_ring_has_input(const struct soft_ring *ring);
/* Request a notification and check again. Returns true if there is a record. */
bool soft_ring_arm(struct soft_ring *ring);
bool soft_ring_is_armed(
	const struct soft_ring *ring); /* whether a requested notification is pending */
/* Cancel the request for a notification because this side polls. */
void soft_ring_disarm(struct soft_ring *ring);
/* Called when room has been released. Returns true if the writer waits for it. */
bool soft_ring_room_requested(struct soft_ring *ring);

/* Returns whether the reader of our ring must be notified for a reason other than a record. */
bool soft_ring_must_notify(struct soft_ring *ring);
