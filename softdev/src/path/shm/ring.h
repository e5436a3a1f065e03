/* A ring of records in memory shared by two processes. One process writes to the ring, and the
 * other reads from it.
 *
 * Only mapping and unmapping make system calls. Each side keeps its own position in private memory
 * and only publishes it. It reads the other side's position and the header of each record once, and
 * checks the copy. A side that violates the format causes EPROTO and can do no other harm. The
 * payload that soft_ring_next returns may change while it is read.
 *
 * The ring is mapped twice in a row, so every record is contiguous. While the reader keeps up, the
 * writer reuses the first pages. These pages stay in the caches, and an idle ring never touches the
 * rest of its memory.
 *
 * Wake-ups: the reader sets `notify_wanted` before it sleeps, and the writer sets `room_wanted`
 * before it waits for room. Each side sets its flag and then checks the other side's position. Each
 * side moves its position and then checks the other side's flag. All four operations are in one
 * total order (atomics.h). Therefore, at least one side sees what the other has written, and no
 * wake-up is lost. Sequentially consistent operations are used instead of fences because the thread
 * sanitizer understands them.
 *
 * The fuzzers run on arbitrary ring memory. They call soft_ring_next, soft_ring_release and
 * soft_ring_arm as the reader, and soft_ring_room, soft_ring_put and soft_ring_request_room as the
 * writer.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct iovec;

enum {
	SOFT_RING_SIZE = 1024 * 1024, /* power of two, and multiple of the page size */
	SOFT_RECORD_HEADER = 16,
	SOFT_MAX_RECORD = SOFT_RING_SIZE / 2, /* maximum payload of a record */
};

/* Shared positions in bytes, and wake-up flags. All zeros represent an empty ring. */
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
	uint64_t position;   /* own position: tail or head */
	uint64_t peer_position; /* other side's position when last checked */
};

struct soft_record {
	uint32_t kind; /* not 0 */
	uint32_t to;
	uint32_t from;
	uint32_t length;
	const uint8_t *payload;
};

/* Map SOFT_RING_SIZE bytes at `offset` of the file twice, at consecutive addresses. A forked child
 * does not inherit the mapping. Returns NULL and sets errno on failure. */
uint8_t *soft_ring_map(int fd, off_t offset);
void soft_ring_unmap(uint8_t *bytes);

/* Initialize one side of an empty ring. */
void soft_ring_init(struct soft_ring *ring, struct soft_ring_shared *shared, uint8_t *bytes);

/* ---- writing ------------------------------------------------------------------------------- */

/* Returns the maximum payload of the next record, or -EPROTO. Checks the reader's current position
 * before it returns less than `min_room`. */
ssize_t soft_ring_room(struct soft_ring *ring, size_t min_room);
/* Write a record, which must fit. The reader may see it immediately. */
void soft_ring_put(struct soft_ring *ring, const struct soft_record *record,
		   const struct iovec *payload, int count);
/* Finish a batch of records. Returns true if the reader must be notified now, and clears its
 * request. */
bool soft_ring_flush(struct soft_ring *ring);
/* Request a notification when the reader releases room. Returns the room that is available now, or
 * -EPROTO. */
ssize_t soft_ring_request_room(struct soft_ring *ring);

/* Initialize `rest` as a view of the records that the reader had not read when it ended. Only
 * soft_ring_next_unread() accepts the view. Returns false if the reader's position is invalid. */
bool soft_ring_view_unread(const struct soft_ring *ring, struct soft_ring *rest);
/* Get the next record of the view. Returns 1 on success, 0 if there is no record, or -EPROTO. */
int soft_ring_next_unread(struct soft_ring *rest, struct soft_record *record);

/* ---- reading ------------------------------------------------------------------------------- */

/* Get the next record. Returns 1 on success, 0 if there is no record, or -EPROTO. */
int soft_ring_next(struct soft_ring *ring, struct soft_record *record);
/* Release the room of a record, whose payload must not be used afterwards. */
void soft_ring_release(struct soft_ring *ring, const struct soft_record *record);
/* Returns whether the ring contains a record, even an invalid one. */
bool soft_ring_has_input(const struct soft_ring *ring);
/* Request a notification, and then check for input. Returns true if the ring contains a record. */
bool soft_ring_arm(struct soft_ring *ring);
/* Returns whether this side has requested a notification and the peer has not sent one yet. */
bool soft_ring_is_armed(const struct soft_ring *ring);
/* Cancel the request for a notification, because this side polls now. */
void soft_ring_disarm(struct soft_ring *ring);
/* Publish the released room. Returns whether the writer has requested a notification about room,
 * and clears the request. */
bool soft_ring_take_room_request(struct soft_ring *ring);

/* Returns whether the reader has requested a notification, and clears the request. Use this for
 * events other than records. */
bool soft_ring_take_notify_request(struct soft_ring *ring);
