/* A device without a thread of its own, with a clock, an alarm and random numbers that belong to the
 * test.  Its objects are linked with some of their calls renamed to those below (meson.build).
 */
#ifndef AIORDMA_TESTS_VIRTUAL_TIME_H
#define AIORDMA_TESTS_VIRTUAL_TIME_H

#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

int fuzz_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *),
			void *argument);
int fuzz_pthread_join(pthread_t thread, void **result);
int fuzz_clock_gettime(clockid_t clock, struct timespec *now);
int fuzz_timerfd_settime(int fd, int flags, const struct itimerspec *when,
			 struct itimerspec *before);
ssize_t fuzz_getrandom(void *to, size_t length, unsigned flags);

static uint64_t fuzz_now_ns = UINT64_C(1) << 60;
static uint64_t fuzz_alarm_ns; /* when the device wants its timers to be run; the test may look */
static uint64_t fuzz_clock_step_ns; /* that passes with every look at the clock */
static uint64_t fuzz_random = 1;

int fuzz_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *),
			void *argument)
{
	(void)attr, (void)run, (void)argument;
	*thread = pthread_self();
	return 0;
}

int fuzz_pthread_join(pthread_t thread, void **result)
{
	(void)thread, (void)result;
	return 0;
}

int fuzz_clock_gettime(clockid_t clock, struct timespec *now)
{
	(void)clock;
	fuzz_now_ns += fuzz_clock_step_ns;
	now->tv_sec = (time_t)(fuzz_now_ns / 1000000000u);
	now->tv_nsec = (long)(fuzz_now_ns % 1000000000u);
	return 0;
}

int fuzz_timerfd_settime(int fd, int flags, const struct itimerspec *when,
			 struct itimerspec *before)
{
	(void)fd, (void)flags, (void)before;
	fuzz_alarm_ns =
		(uint64_t)when->it_value.tv_sec * 1000000000u + (uint64_t)when->it_value.tv_nsec;
	return 0;
}

static inline uint64_t fuzz_next(uint64_t *state)
{
	uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */

	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	return z ^ z >> 31;
}

ssize_t fuzz_getrandom(void *to, size_t length, unsigned flags)
{
	uint8_t *at = to;

	(void)flags;
	for (size_t i = 0; i < length; i++)
		at[i] = (uint8_t)fuzz_next(&fuzz_random);
	return (ssize_t)length;
}

void soft_lock(void);
void soft_unlock(void);
void soft_progress(void);
void soft_timers_run(void);

static inline void fuzz_pass_time(uint64_t ns)
{
	fuzz_now_ns += ns;
	soft_lock();
	soft_timers_run();
	soft_unlock();
}

#endif
