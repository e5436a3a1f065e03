/* Tests of the trace file: how it is named, how a trace ends, and how file errors and forks are
 * handled. */
#include <stdarg.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "trace_side.h"

static char folder[64], path[128], other[160], longer[300];

/* Post `count` WRITEs, each of which adds two lines to the trace. */
static void work(struct side *a, const struct side *b, unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		RUN(a, IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE, .wr_id = i, .length = 8, REMOTE(b, 0));
	}
}

static void one_run(unsigned count)
{
	struct side a, b;

	OPEN_PAIR(&a, &b);
	work(&a, &b, count);
	close_pair(&a, &b);
}

static void write_file(const char *text, size_t length)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);

	CHECK(fd >= 0);
	CHECK_EQUAL(write(fd, text, length), length);
	close(fd);
}

/* ---- begin and end --------------------------------------------------------------------------- */

static void started_and_stopped(void)
{
	char used[8];
	struct stat status;

	start_trace(path);
	CHECK_EQUAL(aiordma_trace_start(path, used, sizeof(used)), EBUSY);
	one_run(3);
	aiordma_trace_stop();
	aiordma_trace_stop();
	one_run(3); /* not traced */
	read_trace(path);
	CHECK_EQUAL(count_type("trace"), 1);
	CHECK_EQUAL(count_type("post_send"), 3);
	CHECK_EQUAL(count_type("completion"), 3);
	CHECK(ends_well());
	CHECK_OK(stat(path, &status));
	CHECK_EQUAL(status.st_mode & 0777, 0600); /* readable by its owner only */
	/* The next trace is appended to the file. */
	start_trace(path);
	one_run(2);
	aiordma_trace_stop();
	read_trace(path);
	CHECK_EQUAL(count_type("trace"), 2);
	CHECK_EQUAL(count_type("post_send"), 5);
	unlink(path);
}

static void by_the_environment(void)
{
	char name[200];

	snprintf(name, sizeof(name), "%s/%%p.%%p", folder);
	snprintf(path, sizeof(path), "%s/%d.%d", folder, (int)getpid(), (int)getpid());
	CHECK_OK(setenv("AIORDMA_TRACE", "", 1));
	one_run(1);
	CHECK_OK(setenv("AIORDMA_TRACE", name, 1));
	one_run(1);
	one_run(2); /* part of the same trace */
	read_trace(path);
	CHECK_EQUAL(count_type("trace"), 1);
	CHECK_EQUAL(count_type("post_send"), 3);
	aiordma_trace_stop();
	one_run(1); /* a stopped trace does not restart */
	read_trace(path);
	CHECK_EQUAL(count_type("post_send"), 3);
	CHECK(ends_well());
	unlink(path);
}

/* ---- what was in the file -------------------------------------------------------------------- */

static void behind_what_is_there(void)
{
	static const struct {
		const char *text;
		size_t lines;
	} befores[] = {
		{"{\"before\":1}\n", 1},
		{"{\"before\":1}\n{\"bef", 2}, /* process killed in the middle of a line */
		{"", 0},
	};

	FOR_EACH (i, befores) {
		write_file(befores[i].text, strlen(befores[i].text));
		start_trace(path);
		one_run(2);
		aiordma_trace_stop();
		read_trace(path);
		CHECK_EQUAL(count_type("post_send"), 2);
		CHECK(is_type(trace.lines[befores[i].lines], "trace"));
		if (befores[i].lines)
			CHECK(!strcmp(trace.lines[0], "{\"before\":1}"));
		unlink(path);
	}
}

/* ---- several processes ----------------------------------------------------------------------- */

static const char *late_line; /* another process appends this line just before the file is locked */

int __real_flock(int fd, int operation);
int __wrap_flock(int fd, int operation);
int __wrap_flock(int fd, int operation)
{
	if (late_line) {
		int writer = open(path, O_WRONLY | O_APPEND);

		CHECK(writer >= 0);
		CHECK_EQUAL(write(writer, late_line, strlen(late_line)), strlen(late_line));
		close(writer);
	}
	return __real_flock(fd, operation);
}

/* The previous owner of the lock writes its last line just before this process takes the lock. */
static void lines_added_before_the_lock_are_kept(void)
{
	write_file("{\"before\":1}\n", 13);
	late_line = "{\"late\":1}\n";
	start_trace(path);
	late_line = NULL;
	one_run(1);
	aiordma_trace_stop();
	read_trace(path);
	CHECK(!strcmp(trace.lines[0], "{\"before\":1}"));
	CHECK(!strcmp(trace.lines[1], "{\"late\":1}"));
	CHECK(is_type(trace.lines[2], "trace"));
	unlink(path);
}

static void another(void)
{
	char used[160];

	CHECK_OK(aiordma_trace_start(path, used, sizeof(used)));
	snprintf(other, sizeof(other), "%s.%d", path, (int)getpid());
	CHECK(!strcmp(used, other));
	one_run(1);
	aiordma_trace_stop();
	CHECK_OK(unlink(other));
}

static void by_environment(void)
{
	CHECK_OK(setenv("AIORDMA_TRACE", path, 1));
	one_run(7);
	snprintf(other, sizeof(other), "%s.%d", path, (int)getpid());
	read_trace(other);
	CHECK_EQUAL(count_type("post_send"), 7);
	CHECK_OK(unlink(other));
}

static void in_silence(void)
{
	one_run(3);
	aiordma_trace_stop();
}

/* A forked child never writes into its parent's trace, but it can start its own. */
static void children(void)
{
	start_trace(path);
	in_child(in_silence);
	in_child(another);
	in_child(by_environment);
	one_run(1);
	aiordma_trace_stop();
	read_trace(path);
	CHECK_EQUAL(count_type("trace"), 1);
	CHECK_EQUAL(count_type("post_send"), 1);
	CHECK_EQUAL(count_type("end"), 1);
	unlink(path);
}

#ifndef __SANITIZE_THREAD__ /* TSan cannot start threads in a forked child */
static struct side inherited[2];

static void use_inherited(void)
{
	in_silence();
	another();
	by_environment();
	/* A child may destroy the objects that it has inherited (ibv_fork_init(3)). */
	CHECK_OK(verbs->ibv_destroy_qp(inherited[0].qp));
	_exit(0);
}

/* Fork while the parent's engine is running. */
static void children_of_the_engine(void)
{
	start_trace(path);
	OPEN_PAIR(&inherited[0], &inherited[1]);
	work(&inherited[0], &inherited[1], 1);
	in_child(use_inherited);
	work(&inherited[0], &inherited[1], 1);
	read_trace(path);
	CHECK_EQUAL(count_type("trace"), 1);
	CHECK_EQUAL(count_type("post_send"), 2);
	CHECK_EQUAL(count_type("destroy_qp"), 0);
	CHECK_EQUAL(count_type("end"), 0);
	close_pair(&inherited[0], &inherited[1]);
	aiordma_trace_stop();
	unlink(path);
}
#endif

/* ---- files that will not do ------------------------------------------------------------------ */

/* Expect that no trace can be started in this file. `why` is the explanation reported in addition
 * to the errno value, or NULL if there is none. */
static void refused(const char *name, int error, const char *why)
{
	char used[400] = "";

	CHECK_EQUAL(aiordma_trace_start(name, used, sizeof(used)), error);
	CHECK(!why == !used[0]);
	CHECK(!why || strstr(used, why));
	/* Opening a device fails if AIORDMA_TRACE names this file, except when the only problem is
	 * a lack of space. The reason is printed to stderr in both cases. */
	struct ibv_device **list = verbs->ibv_get_device_list(NULL);
	char said[900];

	CHECK_OK(setenv("AIORDMA_TRACE", name, 1));
	struct capture capture = capture_stderr();

	errno = 0;
	struct ibv_context *context = verbs->ibv_open_device(list[0]);
	int found = errno;

	CHECK_OK(unsetenv("AIORDMA_TRACE"));
	end_capture(&capture, said, sizeof(said));
	CHECK(!context == (error != EFBIG));
	if (context)
		CHECK_OK(verbs->ibv_close_device(context));
	else
		CHECK_EQUAL(found, error == ESPIPE ? EINVAL : error);
	CHECK(strstr(said, "aiordma: AIORDMA_TRACE is '") == said);
	CHECK(!why || strstr(said, why));
	verbs->ibv_free_device_list(list);
	one_run(1); /* the device still works */
}

static void impossible_files(void)
{
	char longest[5000];

	refused(folder, EISDIR, NULL);
	snprintf(other, sizeof(other), "%s/nowhere/trace", folder);
	refused(other, ENOENT, NULL);
	refused("/dev/null", ESPIPE, "it is not a regular file");
	snprintf(other, sizeof(other), "%s/fifo", folder);
	CHECK_OK(mkfifo(other, 0600));
	refused(other, ESPIPE, "it is not a regular file");
	CHECK_OK(unlink(other));
	memset(longest, 'a', sizeof(longest));
	longest[sizeof(longest) - 1] = '\0';
	refused(longest, ENAMETOOLONG, NULL);
	/* Both files are locked. */
	snprintf(other, sizeof(other), "%s.%d", path, (int)getpid());
	int first = open(path, O_CREAT | O_RDWR, 0600),
	    second = open(other, O_CREAT | O_RDWR, 0600);

	CHECK_OK(flock(first, LOCK_EX));
	CHECK_OK(flock(second, LOCK_EX));
	snprintf(longer, sizeof(longer),
		 "another process writes to it, and %s cannot be used instead: %s", other,
		 strerror(EWOULDBLOCK));
	refused(path, EWOULDBLOCK, longer);
	close(second);
	/* The second file is no longer locked, but it is refused because others may access it. */
	CHECK_OK(chmod(other, 0604));
	snprintf(longer, sizeof(longer),
		 "%s cannot be used instead: others may access it (mode 0604)", other);
	refused(path, EPERM, longer);
	close(first);
	unlink(other);
	unlink(path);
}

/* Another user must not be able to choose the file or to read the trace. */
static void files_of_others(void)
{
	struct stat status;

	write_file("", 0);
	CHECK_OK(chmod(path, 0666));
	refused(path, EPERM, "others may access it (mode 0666)");
	CHECK_OK(chmod(path, 0640));
	refused(path, EPERM, "others may access it (mode 0640)");
	CHECK_OK(chmod(path, 0600));
	snprintf(other, sizeof(other), "%s/other", folder);
	CHECK_OK(link(path, other));
	refused(path, EMLINK, "it has other names (2 hard links)");
	CHECK_OK(unlink(other));
	CHECK_OK(symlink(path, other));
	refused(other, ELOOP, "it is a symbolic link");
	CHECK_OK(unlink(other));
	snprintf(longer, sizeof(longer), "%s/missing", folder);
	CHECK_OK(symlink(longer, other));
	refused(other, ELOOP, "it is a symbolic link");
	CHECK_OK(unlink(other));
	if (geteuid())
		fprintf(stderr, "test_trace_file: needs root for a file of another user\n");
	else
		CHECK_OK(chown(path, 65533, 65533));
	if (!geteuid())
		refused(path, EPERM, "it belongs to user 65533, and this process to user 0");
	CHECK_OK(stat(path, &status));
	CHECK_EQUAL(status.st_size, 0);
	unlink(path);
}

/* ---- file systems without owners or modes ---------------------------------------------------- */

static unsigned added_mode, added_uid; /* added to st_mode and st_uid */

int __real_fstat64(int fd, struct stat *status);
int __wrap_fstat64(int fd, struct stat *status);
int __wrap_fstat64(int fd, struct stat *status)
{
	int rc = __real_fstat64(fd, status);

	status->st_mode |= added_mode;
	status->st_uid += added_uid;
	return rc;
}

/* A new file that cannot be used is removed, but an existing file is kept. */
static void modes_that_are_not_stored(void)
{
	added_mode = 0055;
	refused(path, EPERM,
		"its file system gives new files mode 0655 instead of 0600, and a trace contains");
	CHECK(access(path, F_OK) && errno == ENOENT);
	added_mode = 0;
	added_uid = 65534 - geteuid();
	snprintf(longer, sizeof(longer),
		 "its file system assigns new files to user 65534 instead of user %u", geteuid());
	refused(path, EPERM, longer);
	CHECK(access(path, F_OK) && errno == ENOENT);
	write_file("", 0);
	refused(path, EPERM, "it belongs to user 65534");
	CHECK_OK(access(path, F_OK));
	added_uid = 0;
	unlink(path);
}

static void limit_files(rlim_t bytes)
{
	const struct rlimit limit = {bytes, RLIM_INFINITY};

	CHECK_OK(setrlimit(RLIMIT_FSIZE, &limit));
}

/* Start a trace without room for its first line, as on a full disk. */
static void no_room(void)
{
	limit_files(100);
	refused(path, EFBIG, NULL);
	limit_files(RLIM_INFINITY);
	unlink(path);
}

/* Exceed the file size limit during a trace. The trace ends with an error line, and requests still
 * complete. */
static void no_more_room(void)
{
	struct side a, b;

	limit_files(300000);
	start_trace(path);
	OPEN_PAIR(&a, &b);
	work(&a, &b, 3000);
	close_pair(&a, &b);
	aiordma_trace_stop();
	limit_files(RLIM_INFINITY);
	read_trace(path);
	CHECK(trace.size > 299000 && trace.size <= 300000);
	CHECK(is_type(trace.lines[trace.count - 1], "end"));
	CHECK(is(trace.lines[trace.count - 1], "error", "File too large"));
	CHECK_EQUAL(count_type("end"), 1);
	CHECK(is_type(trace.lines[trace.count - 2], "completion") ||
	      is_type(trace.lines[trace.count - 2], "post_send"));
	/* A new trace can start afterwards. */
	unlink(path);
	start_trace(path);
	one_run(1);
	aiordma_trace_stop();
	read_trace(path);
	CHECK_EQUAL(count_type("completion"), 1);
	unlink(path);
}

/* ---- files that others own or remove --------------------------------------------------------- */

static bool is_protected; /* simulates fs.protected_regular: O_CREAT fails for an existing file */
static unsigned removals; /* how often another process removes the file before it is opened */

int __real_open64(const char *name, int flags, ...);
int __wrap_open64(const char *name, int flags, ...);
int __wrap_open64(const char *name, int flags, ...)
{
	va_list values;
	mode_t mode = 0;

	if (flags & O_CREAT) {
		va_start(values, flags);
		mode = va_arg(values, mode_t);
		va_end(values);
	}
	if (strcmp(name, path))
		return __real_open64(name, flags, mode);
	if (removals && !(flags & O_EXCL)) {
		removals--;
		CHECK_OK(unlink(path));
	}
	if (is_protected && (flags & (O_CREAT | O_EXCL)) == O_CREAT && !access(path, F_OK)) {
		errno = EACCES;
		return -1;
	}
	return __real_open64(name, flags, mode);
}

static void protected_file_of_another_user_is_named(void)
{
	write_file("", 0);
	added_uid = 65534 - geteuid();
	is_protected = true;
	refused(path, EPERM, "it belongs to user 65534");
	is_protected = false;
	added_uid = 0;
	unlink(path);
}

/* A file that is created because an existing one has vanished is treated as a new file. */
static void file_is_created_when_it_vanishes(void)
{
	char used[400] = "";

	write_file("", 0);
	added_mode = 0055;
	removals = 1;
	CHECK_EQUAL(aiordma_trace_start(path, used, sizeof(used)), EPERM);
	CHECK_EQUAL(removals, 0);
	CHECK(strstr(used, "its file system gives new files mode 0655"));
	CHECK(access(path, F_OK) && errno == ENOENT);
	added_mode = 0;
	write_file("", 0);
	removals = 1;
	start_trace(path);
	one_run(1);
	aiordma_trace_stop();
	read_trace(path);
	CHECK(ends_well());
	unlink(path);
}

int main(void)
{
	limit_seconds(110);
	snprintf(path, sizeof(path), "%s/trace", new_folder(folder));
	STEP(in_child(started_and_stopped));
	STEP(in_child(by_the_environment));
	STEP(in_child(behind_what_is_there));
	STEP(in_child(lines_added_before_the_lock_are_kept));
	STEP(in_child(children));
#ifndef __SANITIZE_THREAD__
	STEP(in_child(children_of_the_engine));
#endif
	STEP(in_child(impossible_files));
	STEP(in_child(files_of_others));
	STEP(in_child(modes_that_are_not_stored));
	STEP(in_child(no_room));
	STEP(in_child(no_more_room));
	STEP(in_child(protected_file_of_another_user_is_named));
	STEP(in_child(file_is_created_when_it_vanishes));
	CHECK_OK(rmdir(folder));
	return 0;
}
