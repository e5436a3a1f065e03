/* A timer of the kernel's behind a descriptor, for what is due in seconds (timerfd_create(2)). */
#include <errno.h>
#include <sys/timerfd.h>

#include "native.h"

int aiordma_alarm_open(void)
{
	int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);

	return fd < 0 ? -errno : fd;
}

int aiordma_alarm_set(int fd, uint64_t at_ns)
{
	const uint64_t second = 1000000000u;
	struct itimerspec when = {
		.it_value = {.tv_sec = (time_t)(at_ns / second), .tv_nsec = (long)(at_ns % second)},
	};

	return timerfd_settime(fd, TFD_TIMER_ABSTIME, &when, NULL) ? errno : 0;
}
