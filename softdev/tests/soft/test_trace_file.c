/* Tests of the trace file: how it is named, how a trace ends, and how file errors and forks are
 * handled. */
#include <stdarg.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "trace_side.h"

static char folder[64], path[128], other[160], longer[300];

/* Post `count` WRITEs, each of which adds two lines to the trace. */
static void post_writes(struct side *a, const struct side *b, unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		RUN(a, IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE, .wr_id = i, .length = 8, REMOTE(b, 0));
	}
}

static void open_and_post_writes(unsigned count)
{
	struct side a, b;

	OPEN_PAIR(&a, &b);
	post_writes(&a, &b, count);
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

static void trace_contains_only_calls_between_start_and_stop(void)
{
	char used[8];
	struct stat status;

	start_trace(path);
	CHECK_EQUAL(aiordma_trace_start(path, used, sizeof(used)), EBUSY);
	open_and_post_writes(3);
	aiordma_trace_stop();
	aiordma_trace_stop();
	open_and_post_writes(3); /* not traced */
	read_trace(path);
	CHECK_EQUAL(count_type("trace"), 1);
	CHECK_EQUAL(count_type("post_send"), 3);
	CHECK_EQUAL(count_type("completion"), 3);
	CHECK(has_end_line());
	CHECK_OK(stat(path, &status));
	CHECK_EQUAL(status.st_mode & 0777, 0600); /* readable by its owner only */
	/* The next trace is appended to the file. */
	start_trace(path);
	open_and_post_writes(2);
	aiordma_trace_stop();
	read_trace(path);
	CHECK_EQUAL(count_type("trace"), 2);
	CHECK_EQUAL(count_type("post_send"), 5);
	unlink(path);
}

static void trace_is_started_by_environment_variable(void)
{
	char name[200];

	snprintf(name, sizeof(name), "%s/%%p.%%p", folder);
	snprintf(path, sizeof(path), "%s/%d.%d", folder, (int)getpid(), (int)getpid());
	CHECK_OK(setenv("AIORDMA_TRACE", "", 1));
	open_and_post_writes(1);
	CHECK_OK(setenv("AIORDMA_TRACE", name, 1));
	open_and_post_writes(1);
	open_and_post_writes(2); /* part of the same trace */
	read_trace(path);
	CHECK_EQUAL(count_type("trace"), 1);
	CHECK_EQUAL(count_type("post_send"), 3);
	aiordma_trace_stop();
	open_and_post_writes(1); /* a stopped trace does not restart */
	read_trace(path);
	CHECK_EQUAL(count_type("post_send"), 3);
	CHECK(has_end_line());
	unlink(path);
}

/* ---- what was in the file -------------------------------------------------------------------- */

static void trace_is_appended_to_existing_lines(void)
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
		open_and_post_writes(2);
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
	open_and_post_writes(1);
	aiordma_trace_stop();
	read_trace(path);
	CHECK(!strcmp(trace.lines[0], "{\"before\":1}"));
	CHECK(!strcmp(trace.lines[1], "{\"late\":1}"));
	CHECK(is_type(trace.lines[2], "trace"));
	unlink(path);
}

static void start_own_trace(void)
{
	char used[160];

	CHECK_OK(aiordma_trace_start(path, used, sizeof(used)));
	snprintf(other, sizeof(other), "%s.%d", path, (int)getpid());
	CHECK(!strcmp(used, other));
	open_and_post_writes(1);
	aiordma_trace_stop();
	CHECK_OK(unlink(other));
}

static void start_own_trace_by_environment(void)
{
	CHECK_OK(setenv("AIORDMA_TRACE", path, 1));
	open_and_post_writes(7);
	snprintf(other, sizeof(other), "%s.%d", path, (int)getpid());
	read_trace(other);
	CHECK_EQUAL(count_type("post_send"), 7);
	CHECK_OK(unlink(other));
}

static void post_without_trace(void)
{
	open_and_post_writes(3);
	aiordma_trace_stop();
}

/* A forked child never writes into its parent's trace, but it can start its own. */
static void forked_children_do_not_write_to_the_parents_trace(void)
{
	start_trace(path);
	in_child(post_without_trace);
	in_child(start_own_trace);
	in_child(start_own_trace_by_environment);
	open_and_post_writes(1);
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
	post_without_trace();
	start_own_trace();
	start_own_trace_by_environment();
	/* A child may destroy the objects that it has inherited (ibv_fork_init(3)). */
	CHECK_OK(verbs->ibv_destroy_qp(inherited[0].qp));
	_exit(0);
}

/* Fork while the parent's engine is running. */
static void children_of_a_running_engine_do_not_write_its_trace(void)
{
	start_trace(path);
	OPEN_PAIR(&inherited[0], &inherited[1]);
	post_writes(&inherited[0], &inherited[1], 1);
	in_child(use_inherited);
	post_writes(&inherited[0], &inherited[1], 1);
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

/* Expect that a trace cannot be started in file `name`. `why` is the explanation that must
 * accompany the errno value, or NULL if there is none. */
static void expect_refused(const char *name, int error, const char *why)
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
	open_and_post_writes(1); /* the device still works */
}

static void unusable_files_are_rejected_with_a_reason(void)
{
	char longest[5000];

	expect_refused(folder, EISDIR, NULL);
	snprintf(other, sizeof(other), "%s/nowhere/trace", folder);
	expect_refused(other, ENOENT, NULL);
	expect_refused("/dev/null", ESPIPE, "it is not a regular file");
	snprintf(other, sizeof(other), "%s/fifo", folder);
	CHECK_OK(mkfifo(other, 0600));
	expect_refused(other, ESPIPE, "it is not a regular file");
	CHECK_OK(unlink(other));
	memset(longest, 'a', sizeof(longest));
	longest[sizeof(longest) - 1] = '\0';
	expect_refused(longest, ENAMETOOLONG, NULL);
	/* Both files are locked. */
	snprintf(other, sizeof(other), "%s.%d", path, (int)getpid());
	int first = open(path, O_CREAT | O_RDWR, 0600),
	    second = open(other, O_CREAT | O_RDWR, 0600);

	CHECK_OK(flock(first, LOCK_EX));
	CHECK_OK(flock(second, LOCK_EX));
	snprintf(longer, sizeof(longer),
		 "another process writes to it, and %s cannot be used instead: %s", other,
		 strerror(EWOULDBLOCK));
	expect_refused(path, EWOULDBLOCK, longer);
	close(second);
	/* The second file is no longer locked, but it is refused because others may access it. */
	CHECK_OK(chmod(other, 0604));
	snprintf(longer, sizeof(longer),
		 "%s cannot be used instead: others may access it (mode 0604)", other);
	expect_refused(path, EPERM, longer);
	close(first);
	unlink(other);
	unlink(path);
}

/* Another user must not be able to choose the file or to read the trace. */
static void files_accessible_to_others_are_rejected(void)
{
	struct stat status;

	write_file("", 0);
	CHECK_OK(chmod(path, 0666));
	expect_refused(path, EPERM, "others may access it (mode 0666)");
	CHECK_OK(chmod(path, 0640));
	expect_refused(path, EPERM, "others may access it (mode 0640)");
	CHECK_OK(chmod(path, 0600));
	snprintf(other, sizeof(other), "%s/other", folder);
	CHECK_OK(link(path, other));
	expect_refused(path, EMLINK, "it has other names (2 hard links)");
	CHECK_OK(unlink(other));
	CHECK_OK(symlink(path, other));
	expect_refused(other, ELOOP, "it is a symbolic link");
	CHECK_OK(unlink(other));
	snprintf(longer, sizeof(longer), "%s/missing", folder);
	CHECK_OK(symlink(longer, other));
	expect_refused(other, ELOOP, "it is a symbolic link");
	CHECK_OK(unlink(other));
	if (geteuid())
		fprintf(stderr, "test_trace_file: needs root for a file of another user\n");
	else
		CHECK_OK(chown(path, 65533, 65533));
	if (!geteuid())
		expect_refused(path, EPERM, "it belongs to user 65533, and this process to user 0");
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
static void new_file_with_wrong_mode_or_owner_is_removed(void)
{
	added_mode = 0055;
	expect_refused(
		path, EPERM,
		"its file system gives new files mode 0655 instead of 0600, and a trace contains");
	CHECK(access(path, F_OK) && errno == ENOENT);
	added_mode = 0;
	added_uid = 65534 - geteuid();
	snprintf(longer, sizeof(longer),
		 "its file system assigns new files to user 65534 instead of user %u", geteuid());
	expect_refused(path, EPERM, longer);
	CHECK(access(path, F_OK) && errno == ENOENT);
	write_file("", 0);
	expect_refused(path, EPERM, "it belongs to user 65534");
	CHECK_OK(access(path, F_OK));
	added_uid = 0;
	unlink(path);
}

static void limit_file_size(rlim_t bytes)
{
	const struct rlimit limit = {bytes, RLIM_INFINITY};

	CHECK_OK(setrlimit(RLIMIT_FSIZE, &limit));
}

/* Start a trace without room for its first line, as on a full disk. */
static void trace_start_fails_on_a_full_disk(void)
{
	limit_file_size(100);
	expect_refused(path, EFBIG, NULL);
	limit_file_size(RLIM_INFINITY);
	unlink(path);
}

/* Exceed the file size limit during a trace. The trace ends with an error line, and requests still
 * complete. */
static void full_disk_ends_the_trace_with_an_error_line(void)
{
	struct side a, b;

	limit_file_size(300000);
	start_trace(path);
	OPEN_PAIR(&a, &b);
	post_writes(&a, &b, 3000);
	close_pair(&a, &b);
	aiordma_trace_stop();
	limit_file_size(RLIM_INFINITY);
	read_trace(path);
	CHECK(trace.size > 299000 && trace.size <= 300000);
	CHECK(is_type(trace.lines[trace.count - 1], "end"));
	CHECK(field_is(trace.lines[trace.count - 1], "error", "File too large"));
	CHECK_EQUAL(count_type("end"), 1);
	CHECK(is_type(trace.lines[trace.count - 2], "completion") ||
	      is_type(trace.lines[trace.count - 2], "post_send"));
	/* A new trace can start afterwards. */
	unlink(path);
	start_trace(path);
	open_and_post_writes(1);
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

static void protected_file_of_another_user_is_reported(void)
{
	write_file("", 0);
	added_uid = 65534 - geteuid();
	is_protected = true;
	expect_refused(path, EPERM, "it belongs to user 65534");
	is_protected = false;
	added_uid = 0;
	unlink(path);
}

/* If an existing file vanishes before it is opened, a new file is created. It is checked like any
 * new file, and removed if it cannot be used. */
static void vanished_file_is_created_again(void)
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
	open_and_post_writes(1);
	aiordma_trace_stop();
	read_trace(path);
	CHECK(has_end_line());
	unlink(path);
}

int main(void)
{
	limit_seconds(110);
	snprintf(path, sizeof(path), "%s/trace", new_folder(folder));
	STEP(in_child(trace_contains_only_calls_between_start_and_stop));
	STEP(in_child(trace_is_started_by_environment_variable));
	STEP(in_child(trace_is_appended_to_existing_lines));
	STEP(in_child(lines_added_before_the_lock_are_kept));
	STEP(in_child(forked_children_do_not_write_to_the_parents_trace));
#ifndef __SANITIZE_THREAD__
	STEP(in_child(children_of_a_running_engine_do_not_write_its_trace));
#endif
	STEP(in_child(unusable_files_are_rejected_with_a_reason));
	STEP(in_child(files_accessible_to_others_are_rejected));
	STEP(in_child(new_file_with_wrong_mode_or_owner_is_removed));
	STEP(in_child(trace_start_fails_on_a_full_disk));
	STEP(in_child(full_disk_ends_the_trace_with_an_error_line));
	STEP(in_child(protected_file_of_another_user_is_reported));
	STEP(in_child(vanished_file_is_created_again));
	CHECK_OK(rmdir(folder));
	return 0;
}
