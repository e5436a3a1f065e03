/* Rings of records (ring.h). A position is the number of bytes written or read so far, and never
 * wraps. A record starts at its position modulo the ring size.
 *
 *   offset  record, in native byte order because both sides run on one machine
 *        0  u32  kind    0: padding up to the end of the ring
 *        4  u32  to
 *        8  u32  from
 *       12  u32  length  of the payload that follows, padded to a multiple of 16
 */
#define _GNU_SOURCE /* MADV_DONTFORK */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include "copy.h"
#include "ring.h"
#include "engine/engine.h"

enum {
	SKIP = 0,
	WARM = 64 * 1024,   /* bytes at the start of the ring that stay in the caches */
	PAGE = 4096,        /* bytes between checks of the reader's position */
	PLENTY_OF_ROOM = 64 * 1024, /* room above which the reader's position is not checked */
};

struct header {
	uint32_t kind, to, from, length;
};

_Static_assert(sizeof(struct header) == SOFT_RECORD_HEADER, "the record's header has no holes");

static uint64_t record_size(uint64_t length)
{
	return SOFT_RECORD_HEADER + ((length + 15) & ~(uint64_t)15);
}

static uint8_t *ring_address(const struct soft_ring *ring, uint64_t position)
{
	return ring->bytes + (position & (SOFT_RING_SIZE - 1));
}

/* ---- memory -------------------------------------------------------------------------------- */

uint8_t *soft_ring_map(int fd, off_t offset)
{
	uint8_t *bytes = mmap(NULL, 2 * (size_t)SOFT_RING_SIZE, PROT_NONE,
			      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (bytes == MAP_FAILED)
		return NULL;
	for (int half = 0; half < 2; half++)
		if (mmap(bytes + half * SOFT_RING_SIZE, SOFT_RING_SIZE, PROT_READ | PROT_WRITE,
			 MAP_SHARED | MAP_FIXED, fd, offset) == MAP_FAILED) {
			int rc = errno;

			soft_ring_unmap(bytes);
			errno = rc;
			return NULL;
		}
	madvise(bytes, 2 * (size_t)SOFT_RING_SIZE, MADV_DONTFORK);
	return bytes;
}

void soft_ring_unmap(uint8_t *bytes)
{
	munmap(bytes, 2 * (size_t)SOFT_RING_SIZE);
}

void soft_ring_init(struct soft_ring *ring, struct soft_ring_shared *shared, uint8_t *bytes)
{
	*ring = (struct soft_ring){.shared = shared, .bytes = bytes};
}

/* ---- writing ------------------------------------------------------------------------------- */

/* Read the reader's position from the shared memory. Returns false if it is invalid. */
static bool read_head(struct soft_ring *ring)
{
	uint64_t head = soft_total_get(&ring->shared->head);

	if (ring->position - head > SOFT_RING_SIZE)
		return false;
	ring->peer_position = head;
	return true;
}

static size_t room(const struct soft_ring *ring)
{
	uint64_t left = SOFT_RING_SIZE - (ring->position - ring->peer_position);

	if (left <= SOFT_RECORD_HEADER)
		return 0;
	left -= SOFT_RECORD_HEADER;
	return left < SOFT_MAX_RECORD ? left : SOFT_MAX_RECORD;
}

ssize_t soft_ring_room(struct soft_ring *ring, size_t min_room)
{
	size_t known = room(ring);

	if ((known < PLENTY_OF_ROOM || known < min_room) && !read_head(ring))
		return -EPROTO;
	return (ssize_t)room(ring);
}

static void put_header(struct soft_ring *ring, const struct header *header)
{
	memcpy(ring_address(ring, ring->position), header, sizeof(*header));
}

/* Skip to the start of the ring if the reader has read everything, because the first WARM bytes are
 * likely to be in the caches. */
static void return_to_start(struct soft_ring *ring, uint64_t size)
{
	uint64_t offset = ring->position & (SOFT_RING_SIZE - 1);
	uint64_t rest = SOFT_RING_SIZE - offset;
	/* Reading the reader's position is slow, so read it about once per page. */
	bool is_first_in_page = (offset & (PAGE - 1)) < size;
	bool fits_after_skip = rest + size <= SOFT_RING_SIZE;

	if (offset < WARM || !is_first_in_page || !fits_after_skip || !read_head(ring) ||
	    ring->peer_position != ring->position)
		return;
	put_header(ring,
		   &(struct header){.kind = SKIP, .length = (uint32_t)rest - SOFT_RECORD_HEADER});
	ring->position += rest;
}

void soft_ring_put(struct soft_ring *ring, const struct soft_record *record,
		   const struct iovec *payload, int count)
{
	uint64_t size = record_size(record->length);

	return_to_start(ring, size);
	put_header(ring, &(struct header){record->kind, record->to, record->from, record->length});
	uint8_t *to = ring_address(ring, ring->position) + SOFT_RECORD_HEADER;

	for (int i = 0; i < count; i++) {
		soft_copy(to, payload[i].iov_base, payload[i].iov_len);
		to += payload[i].iov_len;
	}
	ring->position += size;
	soft_publish(&ring->shared->tail, ring->position);
}

bool soft_ring_take_notify_request(struct soft_ring *ring)
{
	return soft_total_get(&ring->shared->notify_wanted) &&
	       soft_total_take(&ring->shared->notify_wanted);
}

bool soft_ring_flush(struct soft_ring *ring)
{
	soft_total_set(&ring->shared->tail, ring->position);
	return soft_ring_take_notify_request(ring);
}

ssize_t soft_ring_request_room(struct soft_ring *ring)
{
	soft_total_set(&ring->shared->room_wanted, 1);
	return read_head(ring) ? (ssize_t)room(ring) : -EPROTO;
}

/* ---- reading ------------------------------------------------------------------------------- */

static uint64_t tail_of(const struct soft_ring *ring)
{
	return soft_total_get(&ring->shared->tail);
}

bool soft_ring_has_input(const struct soft_ring *ring)
{
	return ring->position != tail_of(ring);
}

static void release(struct soft_ring *ring, uint64_t size)
{
	ring->position += size;
	soft_publish(&ring->shared->head, ring->position);
}

/* Get the record at the reader's position, which may be of kind SKIP, without releasing it. Returns
 * 1 on success, 0 if there is no record, or -EPROTO. */
static int peek(const struct soft_ring *ring, struct soft_record *record)
{
	uint64_t available = ring->peer_position - ring->position;
	struct header header;

	if (available == 0)
		return 0;
	if (available < SOFT_RECORD_HEADER)
		return -EPROTO;
	memcpy(&header, ring_address(ring, ring->position), sizeof(header));
	if (record_size(header.length) > available)
		return -EPROTO; /* writers publish only complete records */
	*record = (struct soft_record){
		.kind = header.kind,
		.to = header.to,
		.from = header.from,
		.length = header.length,
		.payload = ring_address(ring, ring->position) + SOFT_RECORD_HEADER,
	};
	return 1;
}

int soft_ring_next(struct soft_ring *ring, struct soft_record *record)
{
	for (;;) {
		if (ring->peer_position == ring->position) {
			uint64_t tail = tail_of(ring);

			if (tail - ring->position > SOFT_RING_SIZE)
				return -EPROTO;
			ring->peer_position = tail;
		}
		int rc = peek(ring, record);

		if (rc != 1 || record->kind != SKIP)
			return rc;
		release(ring, record_size(record->length));
	}
}

bool soft_ring_view_unread(const struct soft_ring *ring, struct soft_ring *rest)
{
	*rest = (struct soft_ring){.bytes = ring->bytes, .peer_position = ring->position};
	rest->position = soft_total_get(&ring->shared->head);
	return rest->peer_position - rest->position <= SOFT_RING_SIZE;
}

int soft_ring_next_unread(struct soft_ring *rest, struct soft_record *record)
{
	for (;;) {
		int rc = peek(rest, record);

		if (rc != 1)
			return rc;
		rest->position += record_size(record->length);
		if (record->kind != SKIP)
			return 1;
	}
}

void soft_ring_release(struct soft_ring *ring, const struct soft_record *record)
{
	release(ring, record_size(record->length));
}

bool soft_ring_arm(struct soft_ring *ring)
{
	soft_total_set(&ring->shared->notify_wanted, 1);
	return soft_ring_has_input(ring);
}

bool soft_ring_is_armed(const struct soft_ring *ring)
{
	return soft_hint_get(&ring->shared->notify_wanted);
}

void soft_ring_disarm(struct soft_ring *ring)
{
	if (soft_ring_is_armed(ring))
		soft_hint_set(&ring->shared->notify_wanted, 0);
}

bool soft_ring_take_room_request(struct soft_ring *ring)
{
	soft_total_set(&ring->shared->head, ring->position);
	return soft_total_get(&ring->shared->room_wanted) &&
	       soft_total_take(&ring->shared->room_wanted);
}
