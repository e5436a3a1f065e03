/* The trace file. Each line is written immediately, so that it reaches the kernel even if SIGKILL
 * terminates the process. */
#define _GNU_SOURCE /* O_NOFOLLOW */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "trace.h"

/* ---- lines ----------------------------------------------------------------------------------- */

static int write_at(off_t at, const char *text, size_t length)
{
	/* Writing beyond RLIMIT_FSIZE would raise SIGXFSZ. */
	if ((rlim_t)at + length > soft_device.trace->file.limit)
		return EFBIG;
	while (length) {
		ssize_t written = pwrite(soft_device.trace->file.fd, text, length, at);

		if (written < 0 && errno == EINTR)
			continue;
		if (written <= 0)
			return written ? errno : EIO;
		text += written;
		length -= (size_t)written;
		at += written;
	}
	soft_device.trace->file.end = at;
	return 0;
}

/* Returns the offset of a line near the end of the file. If the disk is full, the final line
 * overwrites the file from this offset. */
static off_t final_line_offset(void)
{
	char tail[256];
	off_t from = soft_device.trace->file.end > (off_t)sizeof(tail)
			     ? soft_device.trace->file.end - (off_t)sizeof(tail)
			     : 0;
	ssize_t got = pread(soft_device.trace->file.fd, tail,
			    (size_t)(soft_device.trace->file.end - from), from);
	const char *newline = got > 0 ? memchr(tail, '\n', (size_t)got) : NULL;

	return newline ? from + (newline + 1 - tail) : soft_device.trace->file.end;
}

int soft_trace_file_add(const char *line, size_t length)
{
	return write_at(soft_device.trace->file.end, line, length);
}

void soft_trace_file_close(const char *line, size_t length)
{
	if (soft_device.trace->file.fd < 0)
		return;
	if (write_at(soft_device.trace->file.end, line, length))
		write_at(final_line_offset(), line, length);
	/* Cut off a partial line that was written before the disk became full. */
	if (ftruncate(soft_device.trace->file.fd, soft_device.trace->file.end))
		fprintf(stderr, "aiordma: the last line of the trace %s is incomplete: %s\n",
			soft_device.trace->file.path, strerror(errno));
	close(soft_device.trace->file.fd);
	soft_device.trace->file.fd = -1;
}

/* ---- open ------------------------------------------------------------------------------------ */

/* Store the path: `pattern` with %p replaced by the process ID, followed by `suffix`. Returns 0 or
 * ENAMETOOLONG. */
static int expand_path(const char *pattern, const char *suffix)
{
	size_t at = 0;

	for (; *pattern && at < sizeof(soft_device.trace->file.path); pattern++) {
		if (pattern[0] == '%' && pattern[1] == 'p') {
			at += (size_t)snprintf(soft_device.trace->file.path + at,
					       sizeof(soft_device.trace->file.path) - at, "%d",
					       (int)soft_device.trace->file.pid);
			pattern++;
		} else {
			soft_device.trace->file.path[at++] = *pattern;
		}
	}
	if (at < sizeof(soft_device.trace->file.path))
		at += (size_t)snprintf(soft_device.trace->file.path + at,
				       sizeof(soft_device.trace->file.path) - at, "%s", suffix);
	return at < sizeof(soft_device.trace->file.path) ? 0 : ENAMETOOLONG;
}

/* Store the reason why the file cannot be used. Returns `error`. */
__attribute__((format(printf, 2, 3))) static int set_refusal(int error, const char *format, ...)
{
	va_list values;

	va_start(values, format);
	vsnprintf(soft_device.trace->file.refusal, sizeof(soft_device.trace->file.refusal), format,
		  values);
	va_end(values);
	return error;
}

const char *soft_trace_file_refusal(void)
{
	return soft_device.trace->file.refusal;
}

/* Check that only this user can access the file, because a trace contains memory keys. In a
 * directory that others can write to, such as /tmp, another user may have created the file. A new
 * file fails the check only if its file system cannot store an owner or a mode. Returns 0 or an
 * errno value. */
static int check_private(const struct stat *status, bool created)
{
	if (!S_ISREG(status->st_mode))
		return set_refusal(ESPIPE,
				   "it is not a regular file"); /* pwrite() requires seeking */
	if (status->st_uid != geteuid())
		return created ? set_refusal(
					 EPERM,
					 "its file system assigns new files to user %u instead of "
					 "user %u",
					 status->st_uid, geteuid())
			       : set_refusal(EPERM,
					     "it belongs to user %u, and this process to user %u",
					     status->st_uid, geteuid());
	if (status->st_mode & 077)
		return created ? set_refusal(EPERM,
					     "its file system gives new files mode %04o instead of "
					     "0600, and a trace contains memory keys",
					     status->st_mode & 07777)
			       : set_refusal(
					 EPERM,
					 "others may access it (mode %04o), and a trace contains "
					 "memory keys: remove it or chmod 600 it",
					 status->st_mode & 07777);
	if (status->st_nlink > 1)
		return set_refusal(EMLINK, "it has other names (%lu hard links)",
				   (unsigned long)status->st_nlink);
	return 0;
}

/* Lock the file and find its end. Adds a newline if a killed process left its last line incomplete.
 * Returns 0, EWOULDBLOCK if another process has locked the file, or another errno value. */
static int lock_and_find_end(bool created)
{
	struct rlimit limit;
	struct stat status;
	char last = '\n';

	if (fstat(soft_device.trace->file.fd, &status) || getrlimit(RLIMIT_FSIZE, &limit))
		return errno;
	int rc = check_private(&status, created);

	if (rc)
		return rc;
	if (flock(soft_device.trace->file.fd, LOCK_EX | LOCK_NB))
		return errno;
	/* Another process may have added lines before it released the lock. */
	if (fstat(soft_device.trace->file.fd, &status))
		return errno;
	soft_device.trace->file.end = status.st_size;
	soft_device.trace->file.limit = limit.rlim_cur;
	if (soft_device.trace->file.end &&
	    pread(soft_device.trace->file.fd, &last, 1, soft_device.trace->file.end - 1) != 1)
		return EIO;
	return last == '\n' ? 0 : write_at(soft_device.trace->file.end, "\n", 1);
}

/* Create the file, or open it if it exists. Returns its descriptor, or -1 with errno set. */
static int create_or_open(const char *path, bool *created)
{
	/* O_NONBLOCK prevents open() from waiting for the other end of a FIFO, which is refused
	 * later. */
	const int flags = O_RDWR | O_CLOEXEC | O_NOCTTY | O_NOFOLLOW | O_NONBLOCK;
	int fd = open(path, flags | O_CREAT | O_EXCL, 0600);

	*created = fd >= 0;
	/* Without O_CREAT, fs.protected_regular does not deny access to another user's file in
	 * /tmp, and check_private() can name that user. */
	return fd < 0 && errno == EEXIST ? open(path, flags) : fd;
}

/* Open and lock the file. Removes the file if it is new but cannot be used. Returns the same values
 * as lock_and_find_end(). */
static int open_locked(void)
{
	const char *path = soft_device.trace->file.path;
	bool created;
	int fd = create_or_open(path, &created);

	/* Try again if another process removed the file between the two attempts to open it. */
	if (fd < 0 && errno == ENOENT)
		fd = create_or_open(path, &created);
	if (fd < 0)
		return errno == ELOOP ? set_refusal(ELOOP, "it is a symbolic link") : errno;
	soft_device.trace->file.fd = fd;
	int rc = lock_and_find_end(created);

	if (rc)
		soft_trace_file_abandon();
	/* Keep a file that another process has locked, because that process uses it. */
	if (rc && rc != EWOULDBLOCK && created)
		unlink(path);
	return rc;
}

/* Append the process ID to the file name and open that file, because another process writes to
 * `path`. */
static int open_with_pid(const char *path)
{
	struct soft_trace_file *file = &soft_device.trace->file;
	char suffix[16], why[sizeof(file->refusal)];

	snprintf(suffix, sizeof(suffix), ".%d", (int)file->pid);
	int rc = expand_path(path, suffix);

	if (!rc)
		rc = open_locked();
	if (!rc)
		return 0;
	snprintf(why, sizeof(why), "%s", *file->refusal ? file->refusal : strerror(rc));
	return set_refusal(rc,
			   "another process writes to it, and %.600s cannot be used instead: %s",
			   file->path, why);
}

int soft_trace_file_open(const char *path)
{
	soft_device.trace->file.pid = getpid();
	soft_device.trace->file.refusal[0] = '\0';
	int rc = expand_path(path, "");

	if (!rc)
		rc = open_locked();
	/* If another process writes its trace to the file, use a file with the PID in its name. */
	return rc == EWOULDBLOCK ? open_with_pid(path) : rc;
}

void soft_trace_file_abandon(void)
{
	if (soft_device.trace->file.fd >= 0)
		close(soft_device.trace->file.fd); /* a parent process keeps its lock */
	soft_device.trace->file.fd = -1;
}

const char *soft_trace_file_path(void)
{
	return soft_device.trace->file.fd >= 0 && soft_device.trace->file.pid == getpid()
		       ? soft_device.trace->file.path
		       : NULL;
}
