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

static void close_all(void)
{
	for (int fd = 3; fd < MOST; fd++)
		close(fd);
}

/* Check that the engine's thread ends if it wakes up after its descriptors have been closed. */
static void thread_ends(void)
{
	struct side side;

	OPEN(&side);
	soft_lock();
	soft_engine_schedule_step(); /* the thread wakes up and waits for the lock */
	while (!soft_counter_get(&soft_device.engine->waiting))
		sched_yield();
	close_all();
	soft_unlock();
	while (LOCKED(soft_device.engine->running))
		sched_yield();
	close_side(&side);
	expect_no_device_thread();
}

/* Check that destroying the device's objects leaves reused descriptors alone, even if a queue pair
 * is modified first. Nothing can wake up the device's thread, which is asleep. */
static void expect_others_stay(bool modifies)
{
	struct side a, b;
	int pipes[16][2];
	struct stat before[16][2], now;

	OPEN_PAIR(&a, &b);
	close_all();
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

static void others_stay(void)
{
	expect_others_stay(false);
}

static void others_stay_when_modified(void)
{
	expect_others_stay(true);
}

/* Check that destroying the last object also closes its context and ends the device's thread. */
static void closed_before(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = verbs->ibv_alloc_pd(context);

	CHECK(pd);
	CHECK_OK(verbs->ibv_close_device(context));
	close_all();
	CHECK_OK(verbs->ibv_dealloc_pd(pd));
	expect_no_device_thread();
}

static void opens_anew(void)
{
	struct side old, a, b;

	OPEN(&old);
	close_all();
	OPEN_PAIR(&a, &b);
	one_message(&a, &b);
	close_pair(&a, &b);
	close_side(&old);
}

/* Check that a device that failed to start owns no descriptors. Otherwise, a forked child would
 * close them. */
static void refused_before_a_fork(void)
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
	expect_ended_well(child);
}

int main(void)
{
	STEP(in_child(thread_ends));
	STEP(in_child(others_stay));
	STEP(in_child(others_stay_when_modified));
	STEP(in_child(closed_before));
	STEP(in_child(opens_anew));
	STEP(in_child(refused_before_a_fork));
	return 0;
}
