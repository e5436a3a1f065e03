/* Test programs that close all file descriptors while a device is open, as daemons do at startup.
 * The device's thread must not spin. Closing the device or forking must not close reused
 * descriptors. */
#include "engine/engine_internal.h"
#include "verbs_side.h"

#include <dirent.h>
#include <poll.h>
#include <sys/stat.h>

enum { MOST = 256 };

static bool is_device_thread(const char *number)
{
	char path[300], name[32] = "";

	snprintf(path, sizeof(path), "/proc/self/task/%s/comm", number);
	FILE *file = fopen(path, "r");

	if (!file)
		return false; /* ended since it was listed */
	(void)!fgets(name, sizeof(name), file);
	fclose(file);
	return !strcmp(name, "aiordma-device\n");
}

/* Wait until no device thread is listed. A joined thread may be listed for a moment longer. */
static void expect_no_device_thread(void)
{
	for (bool any = true; any; sched_yield()) {
		DIR *folder = opendir("/proc/self/task");
		struct dirent *entry;

		CHECK(folder);
		any = false;
		while ((entry = readdir(folder)))
			any = any || (entry->d_name[0] != '.' && is_device_thread(entry->d_name));
		closedir(folder);
	}
}

static void close_all_descriptors(void)
{
	for (int fd = 3; fd < MOST; fd++)
		close(fd);
}

/* Check that the engine's thread ends if it wakes up after its descriptors have been closed. */
static void engine_thread_ends_when_its_descriptors_are_closed(void)
{
	struct side side;

	OPEN(&side);
	soft_lock();
	soft_engine_schedule_step(); /* the thread wakes up and waits for the lock */
	while (!soft_counter_get(&soft_device.engine->lock_waiters))
		sched_yield();
	close_all_descriptors();
	soft_unlock();
	while (LOCKED(soft_device.engine->running))
		sched_yield();
	close_side(&side);
	expect_no_device_thread();
}

/* Close all descriptors and reuse them for pipes. Destroying the device's objects must not affect
 * the pipes, even if a queue pair is modified first (`modifies`). */
static void expect_reused_descriptors_stay(bool modifies)
{
	struct side a, b;
	int pipes[16][2];
	struct stat before[16][2], now;

	OPEN_PAIR(&a, &b);
	close_all_descriptors();
	for (int i = 0; i < 16; i++) {
		CHECK_OK(pipe(pipes[i]));
		for (int end = 0; end < 2; end++)
			CHECK_OK(fstat(pipes[i][end], &before[i][end]));
	}
	if (modifies)
		CHECK_EQUAL(to_state(&a, IBV_QPS_ERR), ENODEV);
	close_pair(&a, &b);
	expect_no_device_thread();
	for (int i = 0; i < 16; i++) {
		struct pollfd readable = {.fd = pipes[i][0], .events = POLLIN};

		CHECK_EQUAL(poll(&readable, 1, 0), 0); /* nothing written into the pipe */
		for (int end = 0; end < 2; end++) {
			CHECK_OK(fstat(pipes[i][end], &now));
			CHECK(now.st_ino == before[i][end].st_ino);
		}
	}
}

static void close_leaves_reused_descriptors_alone(void)
{
	expect_reused_descriptors_stay(false);
}

static void close_after_modify_leaves_reused_descriptors_alone(void)
{
	expect_reused_descriptors_stay(true);
}

static void destroying_last_object_ends_the_device_thread(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = verbs->ibv_alloc_pd(context);

	CHECK(pd);
	CHECK_OK(verbs->ibv_close_device(context));
	close_all_descriptors();
	CHECK_OK(verbs->ibv_dealloc_pd(pd));
	expect_no_device_thread();
}

static void device_can_be_reopened_after_descriptors_are_closed(void)
{
	struct side old, a, b;

	OPEN(&old);
	close_all_descriptors();
	OPEN_PAIR(&a, &b);
	send_one_message(&a, &b);
	close_pair(&a, &b);
	close_side(&old);
}

/* Check that a device that failed to start owns no descriptors. Otherwise, a forked child would
 * close them. */
static void failed_start_leaves_no_descriptors_for_a_child(void)
{
	CHECK_OK(setenv("AIORDMA_EMBEDDED_LINKS", "smoke", 1));
	struct ibv_device **list = verbs->ibv_get_device_list(NULL);

	CHECK(list && !verbs->ibv_open_device(list[0]));
	CHECK_EQUAL(errno, EINVAL);
	verbs->ibv_free_device_list(list);
	for (int fd = 0; fd < 3; fd++) /* the standard descriptors may have been closed */
		if (fcntl(fd, F_GETFD) < 0)
			CHECK_EQUAL(open("/dev/null", O_RDWR), fd);
	pid_t child = fork();

	if (!child) {
		for (int fd = 0; fd < 3; fd++)
			if (fcntl(fd, F_GETFD) < 0)
				_exit(1 + fd);
		_exit(0);
	}
	expect_exit_success(child);
}

int main(void)
{
	STEP(in_child(engine_thread_ends_when_its_descriptors_are_closed));
	STEP(in_child(close_leaves_reused_descriptors_alone));
	STEP(in_child(close_after_modify_leaves_reused_descriptors_alone));
	STEP(in_child(destroying_last_object_ends_the_device_thread));
	STEP(in_child(device_can_be_reopened_after_descriptors_are_closed));
	STEP(in_child(failed_start_leaves_no_descriptors_for_a_child));
	return 0;
}
