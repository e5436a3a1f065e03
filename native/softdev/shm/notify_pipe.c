/* See notify_pipe.h. */
#define _GNU_SOURCE /* pipe2 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "notify_pipe.h"

enum {
	AT_ONCE = 4096
};

void soft_bell_init(struct soft_bell *bell,
		    void (*rung)(struct soft_source *source, uint32_t events))
{
	*bell = (struct soft_bell){
		.rope = -1,
		.end = -1,
		.source = {.fd = -1, .ready = rung, .of_port = true},
	};
	soft_list_init(&bell->node);
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

int soft_bell_make(struct soft_bell *bell)
{
	int ends[2];

	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK))
		return errno;
	bell->end = ends[0];
	bell->rope = ends[1];
	return 0;
}

/* The same pipe by a description of our own, whose flags nobody else can change; -1 if the system
 * keeps it from us, as where /proc is not mounted. */
static int reopen(int fd)
{
	char path[sizeof("/proc/self/fd/") + 3 * sizeof(fd)];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
}

bool soft_bell_hang(struct soft_bell *bell, int fd)
{
	struct stat stat;

	bool right = bell->source.fd < 0 && !fstat(fd, &stat) && S_ISFIFO(stat.st_mode) &&
		     (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY;

	if (right)
		bell->source.fd = reopen(fd);
	close(fd);
	if (!right || bell->source.fd < 0 || soft_watch(&bell->source, EPOLLIN))
		return false;
	soft_bells_add(bell);
	return true;
}

void soft_bell_ring(const struct soft_bell *bell)
{
	/* Should it be full, there is enough in it to wake somebody. */
	if (bell->rope >= 0)
		(void)!write(bell->rope, "", 1);
}

bool soft_bell_hear(const struct soft_bell *bell)
{
	char rings[AT_ONCE];

	if (bell->source.fd < 0)
		return true;
	ssize_t n = read(bell->source.fd, rings, sizeof(rings));

	return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

void soft_bell_close(struct soft_bell *bell)
{
	soft_bells_remove(bell);
	soft_unwatch(&bell->source);
	close_fd(&bell->source.fd);
	close_fd(&bell->end);
	close_fd(&bell->rope);
}
