/* Connect ten thousand queue pairs between two processes. Each one carries its own message, and
 * none needs its own file descriptor. The test also prints their cost (docs/scale.md). */
#include "leaks.h"
#include "verbs_side.h"

enum {
	FILES = 16, /* maximum for a device with a local peer */
	QPS = 10000,
	MOST_BYTES = 8192, /* maximum memory per queue pair, including its link and CQ entries */
};

static struct side side; /* provides the domain, CQ and memory of all queue pairs */
static struct ibv_qp *qps[QPS];
static uint32_t numbers[QPS], peers[QPS];
static int left; /* outstanding completions; negative if some of the next batch arrived early */

static size_t resident_bytes(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	size_t all, pages;

	CHECK(file);
	CHECK_EQUAL(fscanf(file, "%zu %zu", &all, &pages), 2);
	fclose(file);
	return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void open_all(void)
{
	OPEN(&side, .sends = 1, .receives = 1, .sges = 1, .cqe = 2 * QPS, .memory = QPS * 16);
	destroy_qp(&side);
	for (int i = 0; i < QPS; i++) {
		qps[i] = create_qp(&side);
		numbers[i] = qps[i]->qp_num;
	}
}

static uint64_t *words(int of)
{
	return (uint64_t *)(void *)side.memory + of * QPS;
}

static void connect_all(void)
{
	side.psn = 100;
	for (size_t i = 0; i < QPS; i++) {
		side.qp = qps[i];
		bring_up(&side, &(struct address){.qpn = peers[i], .psn = 100});
		post_receive_at(&side, i, (QPS + i) * 8, 8);
	}
}

static void wait_for_completions(int count)
{
	struct ibv_wc wc[64];

	for (left += count; left > 0;) {
		int n = poll_cq(&side, 64, wc);

		CHECK(n >= 0);
		for (int i = 0; i < n; i++) {
			CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
			CHECK_EQUAL(wc[i].qp_num, numbers[wc[i].wr_id]);
		}
		left -= n;
		if (!n)
			sched_yield();
	}
}

/* Send each queue pair's index, so that a misdirected message is detected. */
static void send_all(void)
{
	for (size_t i = 0; i < QPS; i++) {
		side.qp = qps[i];
		words(0)[i] = i;
		POST(&side, IBV_WR_SEND, .length = 8, .wr_id = i, .offset = i * 8);
		if (i % 100 == 99)
			wait_for_completions(100);
	}
	wait_for_completions(QPS);
	for (int i = 0; i < QPS; i++)
		CHECK_EQUAL(words(1)[i], i);
}

/* Wait until the device has finished its work and uses less than a fifth of a CPU. */
static void check_idle(void)
{
	uint64_t cpu, time;

	do {
		cpu = now_ns(CLOCK_PROCESS_CPUTIME_ID);
		time = now_ns(CLOCK_MONOTONIC);
		poll(NULL, 0, 500); /* measuring interval in ms */
		cpu = now_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu;
		time = now_ns(CLOCK_MONOTONIC) - time;
	} while (cpu > time / 5);
	printf("idle: %.1f ms of CPU in %.1f s\n", (double)cpu / 1e6, (double)time / 1e9);
}

static void ten_thousand_queue_pairs_connect_and_communicate(void)
{
	struct process process = process_split();
	struct side first;

	limit_seconds(100);
	OPEN(&first); /* allocates what any process needs */
	size_t before = resident_bytes();
	int files = count_entries("/proc/self/fd");

	open_all();
	if (process.child)
		process_send(&process, numbers, sizeof(numbers));
	process_receive(&process, peers, sizeof(peers));
	if (!process.child)
		process_send(&process, numbers, sizeof(numbers));
	connect_all();
	process_barrier(&process);
	send_all();
	process_barrier(&process);
	CHECK(count_entries("/proc/self/fd") <= files + FILES);
	if (process.child) {
		size_t bytes = (resident_bytes() - before) / QPS;

		printf("%d queue pairs, %.1f KiB each\n", QPS, (double)bytes / 1024);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
		CHECK(bytes <= MOST_BYTES);
#endif
		check_idle();
	}
	process_barrier(&process);
	for (int i = 0; i < QPS; i++)
		CHECK_OK(verbs->ibv_destroy_qp(qps[i]));
	side.qp = NULL;
	close_pair(&side, &first);
	process_join(&process);
}

int main(void)
{
	limit_seconds(100);
	STEP(ten_thousand_queue_pairs_connect_and_communicate());
	return 0;
}
