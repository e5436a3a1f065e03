/* Ten thousand queue pairs, connected in pairs within a process and between two: each carries its
 * own message, none needs a file descriptor, and all of it is given back.  It also says what they
 * cost (docs/scale.md). */
#include <malloc.h>

#include "leaks.h"
#include "verbs_side.h"

enum {
	FILES = 16, /* of a device with two local peers, however many queue pairs there are */
	PAIRS = 5000,
	MOST_BYTES = 8192, /* of memory for a queue pair, its link and its CQ entries */
};

struct crowd {
	struct side side; /* of which all have domain, queue and memory */
	struct ibv_qp *qps[2 * PAIRS];
	int count;
	int left; /* completions to come; below zero: some of the next ones came already */
};

static size_t resident(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	size_t all, pages;

	CHECK(file);
	CHECK_EQUAL(fscanf(file, "%zu %zu", &all, &pages), 2);
	fclose(file);
	return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static double seconds(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void open_crowd(struct crowd *crowd, int count)
{
	open_side(&crowd->side, (struct options){.sends = 1,
						 .receives = 1,
						 .sges = 1,
						 .cqe = 2 * count,
						 .memory = (size_t)count * 16});
	CHECK_OK(verbs->ibv_destroy_qp(crowd->side.qp));
	crowd->count = count;
	crowd->left = 0;
	for (int i = 0; i < count; i++)
		crowd->qps[i] = create_qp(&crowd->side);
	crowd->side.qp = NULL;
}

/* Each with that of its number among `peers`. */
static void connect_crowd(struct crowd *crowd, const uint32_t *peers)
{
	for (int i = 0; i < crowd->count; i++) {
		crowd->side.qp = crowd->qps[i];
		crowd->side.psn = 100;
		bring_up(&crowd->side, &(struct address){.qpn = peers[i], .psn = 100});
	}
	crowd->side.qp = NULL;
}

static void receive_all(struct crowd *crowd, int from, int to)
{
	for (int i = from; i < to; i++) {
		crowd->side.qp = crowd->qps[i];
		receive_at(&crowd->side, (uint64_t)i, (size_t)(crowd->count + i) * 8, 8);
	}
	crowd->side.qp = NULL;
}

static uint64_t received(const struct crowd *crowd, int i)
{
	return ((const uint64_t *)(const void *)crowd->side.memory)[crowd->count + i];
}

/* Its own number, so that a message in the wrong place is found. */
static void send_all(struct crowd *crowd, int from, int to)
{
	for (int i = from; i < to; i++) {
		crowd->side.qp = crowd->qps[i];
		*(uint64_t *)(void *)(crowd->side.memory + (size_t)i * 8) = (uint64_t)i;
		POST(&crowd->side, IBV_WR_SEND, .length = 8, .wr_id = (uint64_t)i,
		     .offset = (size_t)i * 8);
	}
	crowd->side.qp = NULL;
}

static void complete_all(struct crowd *crowd, int count)
{
	struct ibv_wc wc[64];

	crowd->left += count;
	while (crowd->left > 0) {
		int n = poll_cq(&crowd->side, 64, wc);

		CHECK(n >= 0);
		for (int i = 0; i < n; i++) {
			CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
			CHECK_EQUAL(wc[i].qp_num, crowd->qps[wc[i].wr_id]->qp_num);
		}
		crowd->left -= n;
		if (!n)
			sched_yield();
	}
}

static void close_crowd(struct crowd *crowd)
{
	for (int i = 0; i < crowd->count; i++)
		CHECK_OK(verbs->ibv_destroy_qp(crowd->qps[i]));
	close_side(&crowd->side);
}

static void check_cost(const char *where, size_t before, int files, int count)
{
	size_t bytes = (resident() - before) / (size_t)count;

	printf("%s: %d queue pairs, %.1f KiB each\n", where, count, (double)bytes / 1024);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
	CHECK(bytes <= MOST_BYTES);
#endif
	CHECK(entries_of("/proc/self/fd") <= files + FILES);
}

/* Nothing to do: nothing is done, as soon as the work before has settled. */
static void check_idle(void)
{
	double cpu, time;

	do {
		cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
		time = seconds(CLOCK_MONOTONIC);
		poll(NULL, 0,
		     500); /* not to wait for something: this is how much time is looked at */
		cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
		time = seconds(CLOCK_MONOTONIC) - time;
	} while (cpu > time / 5);
	printf("idle: %.1f ms of CPU in %.1f s\n", cpu * 1e3, time);
}

static struct crowd crowd;
static uint32_t peers[2 * PAIRS];

static void within_a_process(void)
{
	struct side first;

	open_side(&first, (struct options){0}); /* what a process needs in any case */

	malloc_trim(0); /* what the test before has left */
	size_t before = resident();
	int files = entries_of("/proc/self/fd");
	double start = seconds(CLOCK_MONOTONIC);

	open_crowd(&crowd, 2 * PAIRS);
	for (int i = 0; i < 2 * PAIRS; i++)
		peers[i] = crowd.qps[i ^ 1]->qp_num;
	connect_crowd(&crowd, peers);
	printf("made and connected in %.1f us each\n",
	       (seconds(CLOCK_MONOTONIC) - start) / (2 * PAIRS) * 1e6);
	for (int round = 0; round < 2; round++) {
		start = seconds(CLOCK_MONOTONIC);
		receive_all(&crowd, 0, 2 * PAIRS);
		for (int i = 0; i < 2 * PAIRS; i += 100) {
			send_all(&crowd, i, i + 100);
			complete_all(&crowd, 200);
		}
		printf("a message on each: %.2f us\n",
		       (seconds(CLOCK_MONOTONIC) - start) / (2 * PAIRS) * 1e6);
		for (int i = 0; i < 2 * PAIRS; i++)
			CHECK_EQUAL(received(&crowd, i), i ^ 1);
	}
	check_cost("within a process", before, files, 2 * PAIRS);
	check_idle();
	close_crowd(&crowd);
	CHECK_EQUAL(entries_of("/proc/self/fd"), files);
	close_side(&first);
}

static void between_processes(void)
{
	struct process process = split();
	struct side first;

	limit_seconds(100);
	open_side(&first, (struct options){0});
	size_t before = resident();
	int files = entries_of("/proc/self/fd");

	open_crowd(&crowd, PAIRS);
	for (int i = 0; i < PAIRS; i++)
		peers[i] = crowd.qps[i]->qp_num;
	if (process.child)
		tell(&process, peers, PAIRS * sizeof(*peers));
	static uint32_t numbers[PAIRS];

	hear(&process, numbers, sizeof(numbers));
	if (!process.child)
		tell(&process, peers, PAIRS * sizeof(*peers));
	connect_crowd(&crowd, numbers);
	receive_all(&crowd, 0, PAIRS);
	process_barrier(&process);
	for (int i = 0; i < PAIRS; i += 100) { /* what the other sends comes in between */
		send_all(&crowd, i, i + 100);
		complete_all(&crowd, 100);
	}
	complete_all(&crowd, PAIRS);
	for (int i = 0; i < PAIRS; i++)
		CHECK_EQUAL(received(&crowd, i), i);
	process_barrier(&process);
	if (process.child) {
		check_cost("between processes", before, files, PAIRS);
		check_idle();
	} else {
		CHECK(entries_of("/proc/self/fd") <= files + FILES);
	}
	process_barrier(&process);
	close_crowd(&crowd);
	close_side(&first);
	join(&process);
}

int main(void)
{
	limit_seconds(100);
	STEP(between_processes()); /* first: it forks, and no device has been opened */
	STEP(within_a_process());
	return 0;
}
