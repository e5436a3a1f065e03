/* Support for tests in C: checks that end the test if they fail, time limits, and random
 * numbers. */
#pragma once

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define FOR_EACH(i, table) for (size_t i = 0; i < sizeof(table) / sizeof((table)[0]); i++)

/* The current step of the test. It is printed when the test hangs. */
static const char *current_step = "start";
#define STEP(call)                                                                                 \
	do {                                                                                       \
		current_step = #call;                                                              \
		call;                                                                              \
	} while (0)

static inline void fail_on_timeout(int signal)
{
	(void)signal;
	if (write(2, current_step, strlen(current_step)) < 0 || write(2, " hangs\n", 7) < 0)
		_exit(2);
	_exit(1);
}

/* Kill the test after ten times `seconds`, because a busy machine may be that slow. */
static inline void limit_seconds(unsigned seconds)
{
	signal(SIGALRM, fail_on_timeout);
	alarm(seconds * 10);
}

static inline uint64_t now_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Returns the next number of a sequence that is the same in each run. */
static inline uint32_t next_random(void)
{
	static uint64_t state = 1;

	state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (uint32_t)(state >> 32);
}

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "%s:%d: in %s: not so: %s (errno %d: %s)\n", __FILE__,     \
				__LINE__, current_step, #condition, errno, strerror(errno));       \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

#define CHECK_EQUAL(got, expected)                                                                 \
	do {                                                                                       \
		long long got_ = (long long)(got);                                                 \
		long long expected_ = (long long)(expected);                                       \
		if (got_ != expected_) {                                                           \
			fprintf(stderr,                                                            \
				"%s:%d: in %s: %s is %lld, expected %s = %lld (errno "             \
				"%d)\n",                                                           \
				__FILE__, __LINE__, current_step, #got, got_, #expected,           \
				expected_, errno);                                                 \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/* Check that a call succeeds with 0. */
#define CHECK_OK(call) CHECK_EQUAL(call, 0)

/* Check that a call fails with -1 and sets errno to `error`. */
#define CHECK_FAILS(call, error)                                                                   \
	do {                                                                                       \
		errno = 0;                                                                         \
		CHECK_EQUAL(call, -1);                                                             \
		CHECK_EQUAL(errno, error);                                                         \
	} while (0)

/* Check that a call returns NULL and sets errno to `error`. */
#define REFUSED(call, error)                                                                       \
	do {                                                                                       \
		errno = 0;                                                                         \
		CHECK(!(call));                                                                    \
		CHECK_EQUAL(errno, error);                                                         \
	} while (0)
