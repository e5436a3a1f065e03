/* See bell.h. */
#define _GNU_SOURCE /* pipe2, splice */
#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bell.h"

enum { AT_ONCE = 4096 };

static int nowhere = -1; /* /dev/null, while there are bells */
static unsigned bells;

void soft_bell_init(struct soft_bell *bell,
		    void (*rung)(struct soft_source *source, uint32_t events))
{
	*bell = (struct soft_bell){
		.rope = -1,
		.end = -1,
		.source = {.fd = -1, .ready = rung, .of_port = true},
	};
}

static bool hear(int fd)
{
	ssize_t n = splice(fd, NULL, nowhere, NULL, AT_ONCE, SPLICE_F_NONBLOCK);

	return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
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

	if (!bells && (nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC)) < 0)
		return errno;
	if (pipe2(ends, O_CLOEXEC | O_NONBLOCK)) {
		int rc = errno;

		if (!bells)
			close_fd(&nowhere);
		return rc;
	}
	bells++;
	bell->end = ends[0];
	bell->rope = ends[1];
	/* Not every sandbox allows everything. */
	soft_bell_ring(bell);
	return hear(bell->end) ? 0 : ENOTSUP;
}

bool soft_bell_hang(struct soft_bell *bell, int fd)
{
	struct stat stat;

	if (fstat(fd, &stat) || !S_ISFIFO(stat.st_mode) ||
	    (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY || bell->source.fd >= 0) {
		close(fd);
		return false;
	}
	bell->source.fd = fd;
	return !soft_watch(&bell->source, EPOLLIN);
}

void soft_bell_ring(const struct soft_bell *bell)
{
	/* Should it be full, there is enough in it to wake somebody. */
	if (bell->rope >= 0)
		(void)!write(bell->rope, "", 1);
}

bool soft_bell_hear(const struct soft_bell *bell)
{
	return bell->source.fd < 0 || hear(bell->source.fd);
}

void soft_bell_close(struct soft_bell *bell)
{
	soft_unwatch(&bell->source);
	close_fd(&bell->source.fd);
	close_fd(&bell->end);
	if (bell->rope < 0)
		return;
	close_fd(&bell->rope);
	if (!--bells)
		close_fd(&nowhere);
}
