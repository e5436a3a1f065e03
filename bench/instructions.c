/* instructions.py preloads this library into the process whose instructions it counts. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>

#include <valgrind/callgrind.h>

/* Start counting instructions from zero. */
void begin(void)
{
	CALLGRIND_START_INSTRUMENTATION;
	CALLGRIND_ZERO_STATS;
}

/* Stop counting, and write the counts and `name` to a new file. */
void end(const char *name)
{
	CALLGRIND_DUMP_STATS_AT(name);
	CALLGRIND_STOP_INSTRUMENTATION;
}

/* Replace libc's random numbers with the sequence 1, 2, 3 and so on, as 32-bit integers.
 *
 * Memory keys and queue pair numbers are random. The device looks them up in hash tables for each
 * piece of a transfer, and a hash collision adds 1 % to the instructions of a small write.
 */
ssize_t getrandom(void *buffer, size_t length, unsigned int flags)
{
	static atomic_uint last;

	(void)flags;
	for (size_t done = 0; done < length; done += sizeof(uint32_t)) {
		uint32_t next = atomic_fetch_add(&last, 1) + 1;
		size_t left = length - done;

		memcpy((char *)buffer + done, &next, left < sizeof(next) ? left : sizeof(next));
	}
	return (ssize_t)length;
}
