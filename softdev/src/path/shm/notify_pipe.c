/* Notify pipes (notify_pipe.h). */
#define _GNU_SOURCE /* pipe2 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "notify_pipe.h"

enum { DRAIN_SIZE = 4096 };

void soft_notify_pipe_init(struct soft_notify_pipe *pipe,
			   void (*notified)(struct soft_fd_watch *watch))
{
	*pipe = (struct soft_notify_pipe){
		.write_fd = -1,
		.read_fd = -1,
		.in = {.fd = -1, .ready = notified},
	};
}

int soft_notify_pipe_make(struct soft_notify_pipe *pipe)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK))
		return errno;
	pipe->read_fd = ends[0];
	pipe->write_fd = ends[1];
	return 0;
}

/* Open the same pipe with a separate open file description, whose flags no other process can
 * change. Returns -1 if this is not possible, as without /proc. */
static int reopen(int fd)
{
	char path[sizeof("/proc/self/fd/") + 3 * sizeof(fd)];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
}

bool soft_notify_pipe_receive(struct soft_notify_pipe *pipe, int fd)
{
	struct stat stat;

	bool is_read_end = pipe->in.fd < 0 && !fstat(fd, &stat) && S_ISFIFO(stat.st_mode) &&
			   (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY;

	if (is_read_end)
		pipe->in.fd = reopen(fd);
	close(fd);
	return is_read_end && pipe->in.fd >= 0 && !soft_watch(&pipe->in, EPOLLIN);
}

void soft_notify_pipe_notify(const struct soft_notify_pipe *pipe)
{
	if (pipe->write_fd >= 0)
		soft_notify_later(pipe->write_fd);
}

bool soft_notify_pipe_drain(const struct soft_notify_pipe *pipe)
{
	char discarded[DRAIN_SIZE];

	if (pipe->in.fd < 0)
		return true;
	ssize_t n = read(pipe->in.fd, discarded, sizeof(discarded));

	return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

void soft_notify_pipe_close(struct soft_notify_pipe *pipe)
{
	/* Notifications that are still to be written must not go to a file that reuses the number
	 * of the closed descriptor. */
	soft_notify_finish();
	soft_watch_close(&pipe->in);
	soft_close_fd(&pipe->read_fd);
	soft_close_fd(&pipe->write_fd);
}
