/* Application memory for fuzzing with a hostile peer. It contains areas with different access
 * rights, separated by memory that is not shared.
 *
 * Memory that the peer must not read is filled with a secret word. Memory that the peer must not
 * write is compared with a copy.
 */
#pragma once

#include "../soft/verbs_side.h"
#include "fuzz.h"

enum {
	PAGE = 4096,
	GAP = 64, /* unshared bytes between an area and the page boundary */
	OPEN_SIZE = 80 * PAGE, /* larger than a frame */
};

enum area_name {
	AREA_OPEN, /* all rights; also used by our own requests */
	AREA_READ, /* remote read */
	AREA_WRITE, /* remote write */
	AREA_ATOMIC, /* remote atomic */
	AREA_LOCAL, /* local write, for our own receives */
	AREA_FOREIGN, /* all rights, but in another protection domain */
	AREA_WINDOWED, /* accessible only through memory windows */
	AREA_STALE, /* all rights, but deregistered */
	AREAS,
};

/* Position and access rights of each area. */
static const struct area {
	size_t start, length;
	unsigned rights;
	bool changes; /* whether the peer may write to it */
	bool secret;
} areas[AREAS] = {
	[AREA_OPEN] = {PAGE + GAP, OPEN_SIZE, ALL_RIGHTS | IBV_ACCESS_FLUSH_GLOBAL, true, false},
	[AREA_READ] = {OPEN_SIZE + 3 * PAGE + GAP, PAGE - 2 * GAP, IBV_ACCESS_REMOTE_READ, false,
		       false},
	[AREA_WRITE] = {OPEN_SIZE + 5 * PAGE + GAP, PAGE - 2 * GAP,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, true, true},
	[AREA_ATOMIC] = {OPEN_SIZE + 7 * PAGE + GAP, PAGE - 2 * GAP,
			 IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC, true, false},
	[AREA_LOCAL] = {OPEN_SIZE + 9 * PAGE + GAP, PAGE - 2 * GAP, IBV_ACCESS_LOCAL_WRITE, true,
			true},
	[AREA_FOREIGN] = {OPEN_SIZE + 11 * PAGE + GAP, PAGE - 2 * GAP, ALL_RIGHTS, false, true},
	[AREA_WINDOWED] = {OPEN_SIZE + 13 * PAGE + GAP, PAGE - 2 * GAP,
			   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND, false, true},
	[AREA_STALE] = {OPEN_SIZE + 15 * PAGE + GAP, PAGE - 2 * GAP, ALL_RIGHTS, false, true},
};

/* Size and offsets of the two memory windows in AREA_WINDOWED. */
enum { WINDOW_SIZE = 512, WINDOW_READ = 512, WINDOW_WRITE = 2048 };

enum { ARENA_SIZE = OPEN_SIZE + 18 * PAGE };

static struct arena {
	uint8_t *memory;
	uint8_t *before; /* earlier copy of `memory` */
	uint64_t secret;
	bool open_gone; /* whether AREA_OPEN is no longer shared */
} arena;

static inline uint8_t *area_at(enum area_name name)
{
	return arena.memory + areas[name].start;
}

static inline void arena_fill(uint8_t *from, size_t length, bool secret)
{
	for (size_t i = 0; i < length; i++)
		from[i] = secret ? ((const uint8_t *)&arena.secret)[(size_t)(from + i) % 8]
				 : (uint8_t)(i % 251);
}

static inline void arena_prepare(uint64_t secret)
{
	if (!arena.memory) {
		arena.memory = mmap(NULL, ARENA_SIZE, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(arena.memory != MAP_FAILED);
		CHECK(arena.before = malloc(ARENA_SIZE));
		arena_fill(area_at(AREA_OPEN), OPEN_SIZE, false);
	} else {
		memcpy(area_at(AREA_OPEN), arena.before + areas[AREA_OPEN].start, OPEN_SIZE);
	}
	arena.secret = secret;
	arena.open_gone = false;
	arena_fill(arena.memory, areas[AREA_OPEN].start, true);
	arena_fill(area_at(AREA_OPEN) + OPEN_SIZE, ARENA_SIZE - OPEN_SIZE - areas[AREA_OPEN].start,
		   true);
	for (int i = AREA_OPEN + 1; i < AREAS; i++)
		if (!areas[i].secret)
			arena_fill(arena.memory + areas[i].start, areas[i].length, false);
	arena_fill(area_at(AREA_WINDOWED) + WINDOW_READ, WINDOW_SIZE, false);
	memcpy(arena.before, arena.memory, ARENA_SIZE);
}

/* Include AREA_OPEN in the checks of arena_check_unharmed() until the area is shared again. */
static inline void arena_close_open(void)
{
	memcpy(arena.before + areas[AREA_OPEN].start, area_at(AREA_OPEN), OPEN_SIZE);
	arena.open_gone = true;
}

/* Check that all memory that is not shared for writing is unchanged. */
static inline void arena_check_unharmed(void)
{
	size_t from = 0;

	for (int i = 0; i < AREAS; i++) {
		size_t start = areas[i].start, length = areas[i].length;

		if (i == AREA_WINDOWED) {
			start += WINDOW_WRITE;
			length = WINDOW_SIZE;
		} else if (!areas[i].changes || (i == AREA_OPEN && arena.open_gone)) {
			continue;
		}
		CHECK(!memcmp(arena.memory + from, arena.before + from, start - from));
		from = start + length;
	}
	CHECK(!memcmp(arena.memory + from, arena.before + from, ARENA_SIZE - from));
}

/* Read at most `most` bytes from the device, and check that they do not contain the secret. Returns
 * false if no more bytes can arrive. */
static inline bool arena_drain(int fd, size_t most)
{
	static uint8_t bytes[sizeof(uint64_t) - 1 + 65536];
	size_t carried = 0; /* the secret may be split between two reads */

	while (most) {
		size_t room = sizeof(bytes) - carried;
		ssize_t n = recv(fd, bytes + carried, room < most ? room : most, MSG_DONTWAIT);

		if (n <= 0)
			return n < 0 && errno == EAGAIN;
		most -= (size_t)n;
		carried += (size_t)n;
		CHECK(!memmem(bytes, carried, &arena.secret, sizeof(arena.secret)));
		if (carried > sizeof(uint64_t) - 1) {
			memmove(bytes, bytes + carried - (sizeof(uint64_t) - 1),
				sizeof(uint64_t) - 1);
			carried = sizeof(uint64_t) - 1;
		}
	}
	return true;
}
