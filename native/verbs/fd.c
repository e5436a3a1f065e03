/* File descriptors that an event loop watches: event channels and timers (timerfd_create(2)). */
#include <errno.h>
#include <fcntl.h>
#include <sys/timerfd.h>

#include "boundary.h"

int aiordma_set_nonblocking(const struct aiordma_calls *calls, int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return errno;
	/* Let an event channel's descriptor also become readable when the embedded device has work
	 * to do. The program then does this work when it asks for an event. */
	if (calls->device->wake_early)
		calls->device->wake_early(fd);
	return 0;
}

int aiordma_timer_open(void)
{
	int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);

	return fd < 0 ? -errno : fd;
}

int aiordma_timer_set(int fd, uint64_t at_ns)
{
	const uint64_t second = 1000000000u;
	struct itimerspec when = {
		.it_value = {.tv_sec = (time_t)(at_ns / second), .tv_nsec = (long)(at_ns % second)},
	};

	return timerfd_settime(fd, TFD_TIMER_ABSTIME, &when, NULL) ? errno : 0;
}
