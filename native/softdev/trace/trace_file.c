/* The file of a trace, which survives whatever ends the process.
 *
 * The end of the file is mapped, a window at a time, and lines are copied into it: the kernel has
 * them from then on, so that a process that is killed, even by SIGKILL, loses none, and the data
 * path makes no system call but at the end of a window.  What the file has beyond the last line is
 * zeros, until it is trimmed.
 *
 * The disk may be full: the window's blocks are asked for before it is used.  The file may be
 * truncated meanwhile, or a file system may promise blocks that it does not have: then the kernel
 * raises SIGBUS, and our handler puts memory in the place of the file's.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "trace.h"

enum {
	WINDOW = 256 * 1024, /* a multiple of every page size */
	RESERVE = 256,       /* of each, for the last line */
};

static struct {
	char path[PATH_MAX];
	int fd; /* -1: none */
	pid_t pid;
	char *window; /* NULL: not mapped at the moment */
	off_t start;  /* of the window in the file */
	size_t used;  /* of the window */
	int error;
	struct sigaction previous; /* for SIGBUS */
} file = {.fd = -1};

/* For the signal handler. */
static char *volatile guarded;
static volatile sig_atomic_t broken;

/* ---- SIGBUS ---------------------------------------------------------------------------------- */

static void guard(int signal, siginfo_t *info, void *context)
{
	const char *at = info->si_addr;
	char *window = guarded;

	if (window && at >= window && at < window + WINDOW &&
	    mmap(window, WINDOW, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
		 -1, 0) == window) {
		broken = true;
		return;
	}
	/* Not ours. */
	if (file.previous.sa_flags & SA_SIGINFO) {
		file.previous.sa_sigaction(signal, info, context);
	} else if (file.previous.sa_handler != SIG_DFL && file.previous.sa_handler != SIG_IGN) {
		file.previous.sa_handler(signal);
	} else {
		sigaction(SIGBUS, &file.previous, NULL); /* the access is tried again */
	}
}

static void stand_guard(void)
{
	struct sigaction action = {.sa_sigaction = guard, .sa_flags = SA_SIGINFO | SA_ONSTACK};

	sigemptyset(&action.sa_mask);
	sigaction(SIGBUS, &action, &file.previous);
}

static void stand_down(void)
{
	struct sigaction now;

	if (!sigaction(SIGBUS, NULL, &now) && now.sa_flags & SA_SIGINFO &&
	    now.sa_sigaction == guard)
		sigaction(SIGBUS, &file.previous, NULL);
}

/* ---- the window ------------------------------------------------------------------------------ */

/* Make sure of the blocks; not beyond the limit, where the kernel would send SIGXFSZ. */
static int reserve(off_t start)
{
	struct rlimit limit;
	int rc;

	if (!getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur != RLIM_INFINITY &&
	    (rlim_t)start + WINDOW > limit.rlim_cur)
		return EFBIG;
	do
		rc = posix_fallocate(file.fd, start, WINDOW);
	while (rc == EINTR);
	return rc;
}

static void unmap(void)
{
	guarded = NULL;
	if (file.window)
		munmap(file.window, WINDOW);
	file.window = NULL;
}

/* So that the next line goes to `end` of the file. */
static int map(off_t end)
{
	off_t start = end - end % sysconf(_SC_PAGESIZE);
	int rc = reserve(start);
	char *window = rc ? MAP_FAILED
			  : mmap(NULL, WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, start);

	if (window == MAP_FAILED)
		return rc ? rc : errno;
	unmap();
	madvise(window, WINDOW, MADV_DONTFORK);
	file.window = window;
	file.start = start;
	file.used = (size_t)(end - start);
	guarded = window;
	return 0;
}

void soft_trace_file_trim(void)
{
	if (file.fd < 0 || !file.window)
		return;
	off_t end = file.start + (off_t)file.used;

	unmap();
	if (!broken && ftruncate(file.fd, end))
		file.error = errno; /* the zeros stay, which a reader takes for the end */
	file.start = end;
	file.used = 0;
}

/* ---- lines ----------------------------------------------------------------------------------- */

static void put(const char *line, size_t length)
{
	memcpy(file.window + file.used, line, length);
	file.used += length;
}

static bool make_room(size_t length)
{
	if (file.window && file.used + length <= WINDOW - RESERVE)
		return true;
	file.error = map(file.start + (off_t)file.used);
	return !file.error;
}

bool soft_trace_file_add(const char *line, size_t length)
{
	if (!make_room(length))
		return false;
	put(line, length);
	if (broken)
		file.error = EIO;
	return !broken;
}

void soft_trace_file_close(const char *line, size_t length)
{
	if (file.fd < 0)
		return;
	if (!broken && (file.window || make_room(length)) && file.used + length <= WINDOW)
		put(line, length);
	soft_trace_file_trim();
	stand_down();
	close(file.fd);
	file.fd = -1;
}

/* ---- open ------------------------------------------------------------------------------------ */

/* With %p replaced. */
static int expand(const char *pattern, const char *suffix)
{
	size_t at = 0;

	for (; *pattern && at < sizeof(file.path); pattern++) {
		if (pattern[0] == '%' && pattern[1] == 'p') {
			at += (size_t)snprintf(file.path + at, sizeof(file.path) - at, "%d",
					       (int)file.pid);
			pattern++;
		} else {
			file.path[at++] = *pattern;
		}
	}
	if (at < sizeof(file.path))
		at += (size_t)snprintf(file.path + at, sizeof(file.path) - at, "%s", suffix);
	return at < sizeof(file.path) ? 0 : ENAMETOOLONG;
}

/* Ours alone, as long as it is open: 0, EWOULDBLOCK when it is another's, or why not. */
static int take(void)
{
	struct stat status;
	int rc = 0;

	/* Readable by its owner only: the trace has keys and addresses.  O_NONBLOCK: a FIFO is
	 * refused at once. */
	file.fd = open(file.path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0600);
	if (file.fd < 0)
		return errno;
	if (fstat(file.fd, &status))
		rc = errno;
	else if (!S_ISREG(status.st_mode))
		rc = ESPIPE; /* it cannot be mapped */
	else if (flock(file.fd, LOCK_EX | LOCK_NB))
		rc = errno;
	if (rc) {
		close(file.fd);
		file.fd = -1;
	}
	return rc;
}

/* Where the next line goes: behind what was there, without the zeros that a process has left that
 * was killed.  -1 and errno. */
static off_t find_end(void)
{
	off_t end = lseek(file.fd, 0, SEEK_END);
	char last[4096];

	while (end > 0) {
		off_t from = end > (off_t)sizeof(last) ? end - (off_t)sizeof(last) : 0;
		ssize_t got = pread(file.fd, last, (size_t)(end - from), from);

		if (got <= 0)
			return -1;
		while (got && !last[got - 1])
			got--;
		end = from + got;
		if (got)
			break;
	}
	return end;
}

/* After the line that a process has left half done. */
static int begin_line(off_t end)
{
	char last = '\n';

	if (end > 0 && pread(file.fd, &last, 1, end - 1) != 1)
		return EIO;
	int rc = map(end);

	if (!rc && last != '\n')
		put("\n", 1);
	return rc;
}

int soft_trace_file_open(const char *path)
{
	char suffix[16];
	int rc;

	file.pid = getpid();
	snprintf(suffix, sizeof(suffix), ".%d", (int)file.pid);
	rc = expand(path, "");
	if (!rc)
		rc = take();
	if (rc == EWOULDBLOCK) {
		rc = expand(path, suffix);
		if (!rc)
			rc = take();
	}
	if (rc)
		return rc;
	broken = false;
	stand_guard();
	off_t end = find_end();

	rc = end < 0 ? errno : begin_line(end);
	if (rc) {
		stand_down();
		close(file.fd);
		file.fd = -1;
	}
	return rc;
}

void soft_trace_file_forget(void)
{
	if (file.fd < 0)
		return;
	/* The window has not come along (MADV_DONTFORK), and the parent keeps the lock. */
	guarded = NULL;
	file.window = NULL;
	stand_down();
	close(file.fd);
	file.fd = -1;
}

const char *soft_trace_file_path(void)
{
	return file.fd >= 0 && file.pid == getpid() ? file.path : NULL;
}

int soft_trace_file_error(void)
{
	return file.error;
}
