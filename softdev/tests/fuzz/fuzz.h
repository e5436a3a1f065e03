/* What every fuzz target stands on: a device whose clock and random numbers belong to the input, so
 * that the same input does the same things every time.
 *
 * An input is a list of records of sixteen bytes, each of which is one thing that happens: a frame
 * that comes in, a work request, time that passes.  Numbers that only a run can know (keys,
 * addresses, sequence numbers) are named by selectors, so that an input stays good when the device
 * changes.
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

/* Everything that the device does by chance follows from the input; so do the secrets, which an
 * input therefore cannot contain. */
static inline uint64_t fuzz_seed(const uint8_t *data, size_t size)
{
	uint64_t hash = UINT64_C(0xcbf29ce484222325) ^ size;

	for (size_t i = 0; i < size; i++)
		hash = (hash ^ data[i]) * UINT64_C(0x100000001b3);
	fuzz_random = hash;
	return fuzz_next(&hash) | 1;
}

/* Until nothing is ready any more: a step serves eight sources. */
static inline void fuzz_steps(int steps)
{
	while (steps--)
		soft_progress();
}

/* Open sockets and the like: not the pipes and files that the fuzzer opens. */
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

/* Whole records are moved about; what is in one is the library's to change. */
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
	case 0: /* once more, somewhere else */
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
	case 4: /* as one kind of thing into another */
		data[from * RECORD] = (uint8_t)fuzz_next(&state);
		return count * RECORD;
	}
	LLVMFuzzerMutate(data + to * RECORD, RECORD, RECORD);
	return count * RECORD;
}

#ifdef FUZZ_CORPUS
#include "replay.h"
#endif
