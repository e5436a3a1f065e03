/* Where counting begins and ends, for valgrind's callgrind: see instructions.py. */
#include <valgrind/callgrind.h>

void begin(void)
{
	CALLGRIND_START_INSTRUMENTATION;
	CALLGRIND_ZERO_STATS;
}

/* The counts so far go to a file that bears the name. */
void end(const char *name)
{
	CALLGRIND_DUMP_STATS_AT(name);
	CALLGRIND_STOP_INSTRUMENTATION;
}
