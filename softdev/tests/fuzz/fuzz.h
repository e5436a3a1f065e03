/* Common code of the fuzz targets. The device's clock and random numbers depend only on the input,
 * so every run of an input behaves the same.
 *
 * An input is a sequence of 16-byte records. Each record is one event, such as an incoming frame, a
 * work request or an advance of the clock. Selectors represent values that are known only at run
 * time (keys, addresses, sequence numbers), so inputs remain useful when the device changes.
 */
#pragma once

#include <dirent.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "../soft/cm_check.h"
#include "virtual_time.h"

enum { RECORD = 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed);

/* Seed the device's random numbers from the input. Returns a secret that is also derived from the
 * input, so that no input can contain it. */
static inline uint64_t fuzz_seed(const uint8_t *data, size_t size)
{
	uint64_t hash = UINT64_C(0xcbf29ce484222325) ^ size;

	for (size_t i = 0; i < size; i++)
		hash = (hash ^ data[i]) * UINT64_C(0x100000001b3);
	fuzz_random = hash;
	return fuzz_next(&hash) | 1;
}

/* Run `steps` steps of the engine. Each step serves a limited number of ready descriptors. */
static inline void fuzz_steps(int steps)
{
	while (steps--)
		soft_progress();
}

/* Returns the number of open sockets and anonymous inodes (such as eventfds). libFuzzer opens only
 * pipes and files. */
static inline int fuzz_sockets(void)
{
	DIR *folder = opendir("/proc/self/fd");
	struct dirent *entry;
	char what[64];
	int count = 0;

	CHECK(folder);
	while ((entry = readdir(folder)))
		if (readlinkat(dirfd(folder), entry->d_name, what, sizeof(what)) > 6)
			count += !memcmp(what, "socket", 6) || !memcmp(what, "anon_i", 6);
	closedir(folder);
	return count;
}

/* ---- records --------------------------------------------------------------------------------- */

static inline uint16_t fuzz16(const uint8_t *at)
{
	return (uint16_t)(at[0] | at[1] << 8);
}

/* Mutate an input by copying, removing or swapping whole records, or let libFuzzer change its
 * bytes. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned int seed)
{
	uint64_t state = seed;
	size_t count = size / RECORD, room = max_size / RECORD;
	size_t from, to;
	uint8_t record[RECORD];

	if (!count || !room)
		return LLVMFuzzerMutate(data, size, max_size);
	from = fuzz_next(&state) % count;
	to = fuzz_next(&state) % count;
	memcpy(record, data + from * RECORD, RECORD);
	switch (fuzz_next(&state) % 8) {
	case 0: /* insert a copy at another position */
		if (count == room)
			break;
		memmove(data + (to + 1) * RECORD, data + to * RECORD, (count - to) * RECORD);
		memcpy(data + to * RECORD, record, RECORD);
		return (count + 1) * RECORD;
	case 1:
		if (count == 1)
			break;
		memmove(data + from * RECORD, data + (from + 1) * RECORD,
			(count - from - 1) * RECORD);
		return (count - 1) * RECORD;
	case 2:
		memcpy(data + from * RECORD, data + to * RECORD, RECORD);
		memcpy(data + to * RECORD, record, RECORD);
		return count * RECORD;
	case 3:
		return LLVMFuzzerMutate(data, size, max_size);
	case 4: /* change the record's type */
		data[from * RECORD] = (uint8_t)fuzz_next(&state);
		return count * RECORD;
	}
	LLVMFuzzerMutate(data + to * RECORD, RECORD, RECORD);
	return count * RECORD;
}

#ifdef FUZZ_CORPUS
#include "replay.h"
#endif
