/* A ring of records in memory that two processes share: one writes, the other reads.
 *
 * Nothing here makes a system call but mapping and unmapping.  Each side keeps its own position in
 * memory of its own and only shows it to the other; what it reads of the other's is copied once and
 * checked, and so is the header of a record.  A side that breaks the format shows as EPROTO, and
 * can do no more harm than that.  The payload that soft_ring_next points to may change while it is
 * looked at.
 *
 * The bytes are mapped twice in a row, so that no record has a seam in it.  While the reader keeps
 * up, the writer stays in the first pages: they remain in the caches, and the rest of the memory of
 * a quiet ring is never touched.
 *
 * Waking.  The reader sets `notify_wanted` before it sleeps, the writer `room_wanted` before it
 * waits for room.  No wake-up is lost: the side that sets its flag checks the other's position
 * afterwards, and the side that moves its position checks the other's flag afterwards, all four as
 * operations of one total order (atomics.h), in which either the flag is set before it is checked,
 * or the position is moved before it is checked.  (Operations and not fences: the thread sanitizer
 * understands them.)
 *
 * To be fuzzed, on any memory whatever: soft_ring_next, soft_ring_done and soft_ring_arm by the
 * reader; soft_ring_room, soft_ring_put and soft_ring_request_room by the writer.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct iovec;

enum {
	SOFT_RING_SIZE = 1024 * 1024, /* a power of two, and whole pages */
	SOFT_RECORD_HEADER = 16,
	SOFT_RECORD_MOST = SOFT_RING_SIZE / 2, /* payload of one record */
};

/* The shared positions, in bytes since the beginning; zeros are an empty ring. */
struct soft_ring_shared {
	_Alignas(64) uint64_t tail; /* the writer's */
	uint32_t room_wanted;
	_Alignas(64) uint64_t head; /* the reader's */
	_Alignas(64) uint32_t notify_wanted; /* seldom written: a line of its own */
};

/* One side of it. */
struct soft_ring {
	struct soft_ring_shared *shared;
	uint8_t *bytes;
	uint64_t mine;   /* tail or head */
	uint64_t theirs; /* as last seen, and found possible */
};

struct soft_record {
	uint32_t kind; /* not 0 */
	uint32_t to;
	uint32_t from;
	uint32_t length;
	const uint8_t *payload;
};

/* SOFT_RING_SIZE bytes of the file at `offset`, twice in a row, and not for children of a fork;
 * NULL and errno. */
uint8_t *soft_ring_map(int fd, off_t offset);
void soft_ring_unmap(uint8_t *bytes);

/* One side, at the beginning of the ring. */
void soft_ring_init(struct soft_ring *ring, struct soft_ring_shared *shared, uint8_t *bytes);

/* ---- writing ------------------------------------------------------------------------------- */

/* Payload that one record may have now, or -EPROTO; what is less than `least` is up to date. */
ssize_t soft_ring_room(struct soft_ring *ring, size_t least);
/* Write a record, whose payload is at most that; the reader may see it at once. */
void soft_ring_put(struct soft_ring *ring, const struct soft_record *record,
		   const struct iovec *payload, int count);
/* Everything is written for now: true if the reader must be notified, once. */
bool soft_ring_flush(struct soft_ring *ring);
/* There is no room: ask to be notified.  What there is of it after all, or -EPROTO. */
ssize_t soft_ring_request_room(struct soft_ring *ring);

/* The reader has gone: a view of what it has not read, for soft_ring_next_unread alone; false if its
 * position is impossible. */
bool soft_ring_unread(const struct soft_ring *ring, struct soft_ring *rest);
/* The next record of these: 1, 0 for none, or -EPROTO. */
int soft_ring_next_unread(struct soft_ring *rest, struct soft_record *record);

/* ---- reading ------------------------------------------------------------------------------- */

/* The next record: 1, 0 for none, or -EPROTO. */
int soft_ring_next(struct soft_ring *ring, struct soft_record *record);
/* Give its room back. */
void soft_ring_done(struct soft_ring *ring, const struct soft_record *record);
/* Is there anything?  Also if it breaks the format. */
bool soft_ring_has_input(const struct soft_ring *ring);
/* Ask to be notified, and check once more: true if there is something. */
bool soft_ring_arm(struct soft_ring *ring);
bool soft_ring_is_armed(const struct soft_ring *ring); /* and not notified yet */
/* No need to notify: this side polls. */
void soft_ring_disarm(struct soft_ring *ring);
/* Room was given back: true if the writer waits for it. */
bool soft_ring_room_requested(struct soft_ring *ring);

/* Must the reader of the ring that we write be notified?  For other reasons than a record. */
bool soft_ring_must_notify(struct soft_ring *ring);
