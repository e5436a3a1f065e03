/* A device without its own thread. The test controls its clock, its alarm and its random numbers
 * (struct soft_platform). */
#pragma once

#include "engine/engine.h"

static uint64_t fuzz_now_ns = UINT64_C(1) << 60;
static uint64_t fuzz_alarm_ns; /* time at which the device wants to run its timers */
static uint64_t fuzz_clock_step_ns; /* time by which each reading advances the clock */
static uint64_t fuzz_random = 1;

static int fuzz_clock(clockid_t clock, struct timespec *now)
{
	(void)clock;
	fuzz_now_ns += fuzz_clock_step_ns;
	now->tv_sec = (time_t)(fuzz_now_ns / 1000000000u);
	now->tv_nsec = (long)(fuzz_now_ns % 1000000000u);
	return 0;
}

static void fuzz_alarm(uint64_t deadline_ns)
{
	fuzz_alarm_ns = deadline_ns;
}

static inline uint64_t fuzz_next(uint64_t *state)
{
	uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */

	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	return z ^ z >> 31;
}

static ssize_t fuzz_chance(void *to, size_t length, unsigned flags)
{
	uint8_t *at = to;

	(void)flags;
	for (size_t i = 0; i < length; i++)
		at[i] = (uint8_t)fuzz_next(&fuzz_random);
	return (ssize_t)length;
}

__attribute__((constructor)) static void fuzz_platform(void)
{
	static const struct soft_platform platform = {
		.clock = fuzz_clock,
		.random = fuzz_chance,
		.alarm = fuzz_alarm,
	};

	soft_device.platform = &platform;
}

void soft_timers_run(void);

static inline void fuzz_pass_time(uint64_t ns)
{
	fuzz_now_ns += ns;
	soft_lock();
	soft_timers_run();
	soft_unlock();
}
