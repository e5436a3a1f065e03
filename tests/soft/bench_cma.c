/* From which length on is it quicker to refer to a message than to carry it through the rings?  Two
 * processes, each on a core of its own, polling: microseconds for one WRITE, READ or SEND until its
 * completion, one at a time, carried and referred to, in turns; beside them a memcpy of the same
 * length between two shared mappings, and TCP until the other side has answered with one byte.
 *
 *   meson test -C build/plain --benchmark --verbose bench_cma
 */
#define _GNU_SOURCE /* CPU_SET */
#include "verbs_side.h"
#include "wire/cma_descriptor.h"

#include <netinet/in.h>
#include <netinet/tcp.h>

enum {
	MOST = 4 << 20,
	ROUNDS = 15,
	BYTES = 32 << 20,
	SENT = 1,
	RECEIVED = 2
};

enum way {
	COPY,
	TCP,
	WRITE,
	WRITE_REFERRED,
	READ,
	READ_REFERRED,
	SEND,
	SEND_REFERRED,
	WAYS
};

static const char *const names[WAYS] = {"memcpy", "TCP",   "write", "refer",
					"read",   "refer", "send",  "refer"};

struct bench {
	struct process process;
	struct side side;
	struct address peer;
	int fd;
	uint8_t *shared[2];
};

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static double median(double *values, int count)
{
	qsort(values, (size_t)count, sizeof(*values), by_value);
	return values[count / 2];
}

static int tcp_pair(const struct process *process)
{
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof(address);
	const int on = 1;
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	if (process->child) {
		int listener = fd;

		CHECK_EQUAL(bind(listener, (struct sockaddr *)&address, sizeof(address)), 0);
		CHECK_EQUAL(listen(listener, 1), 0);
		CHECK_EQUAL(getsockname(listener, (struct sockaddr *)&address, &length), 0);
		tell(process, &address, sizeof(address));
		CHECK((fd = accept(listener, NULL, NULL)) >= 0);
		close(listener);
	} else {
		hear(process, &address, sizeof(address));
		CHECK_EQUAL(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
	}
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	return fd;
}

/* Polling. */
static void tcp_recv(int fd, uint8_t *at, size_t length)
{
	while (length) {
		ssize_t n = recv(fd, at, length, MSG_DONTWAIT);

		if (n < 0 && errno == EAGAIN)
			continue;
		CHECK(n > 0);
		at += n;
		length -= (size_t)n;
	}
}

static void tcp_send(int fd, const uint8_t *at, size_t length)
{
	while (length) {
		ssize_t n = send(fd, at, length, MSG_NOSIGNAL);

		CHECK(n > 0);
		at += n;
		length -= (size_t)n;
	}
}

/* Each process on a core of its own, if there are two. */
static void settle(const struct process *process)
{
	cpu_set_t all, own;
	int skip = process->child ? 1 : 0;

	CPU_ZERO(&own);
	if (sched_getaffinity(0, sizeof(all), &all) || CPU_COUNT(&all) < 2)
		return;
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &all) && skip-- == 0)
			CPU_SET(cpu, &own);
	sched_setaffinity(0, sizeof(own), &own);
}

static int repeats(uint32_t length)
{
	int count = BYTES / (int)length;

	return count > 200 ? 200 : count;
}

static void copy(struct bench *bench, uint32_t length)
{
	for (int i = repeats(length); i; i--) {
		memcpy(bench->shared[i & 1], bench->shared[~i & 1], length);
		__asm__ volatile("" : : : "memory");
	}
}

static void tcp(struct bench *bench, uint32_t length)
{
	uint8_t byte = 0;

	for (int i = repeats(length); i; i--) {
		if (bench->process.child) {
			tcp_send(bench->fd, bench->side.memory, length);
			tcp_recv(bench->fd, &byte, 1);
		} else {
			tcp_recv(bench->fd, bench->side.memory, length);
			tcp_send(bench->fd, &byte, 1);
		}
	}
}

static void one_sided(struct bench *bench, enum ibv_wr_opcode opcode, uint32_t length)
{
	struct side *side = &bench->side;

	for (int i = repeats(length); i; i--) {
		RUN(side, IBV_WC_SUCCESS,
		    i == 1 && opcode == IBV_WR_RDMA_WRITE ? IBV_WR_RDMA_WRITE_WITH_IMM : opcode,
		    .wr_id = SENT, .length = length, .remote = bench->peer.memory,
		    .rkey = bench->peer.rkey);
	}
	if (opcode == IBV_WR_RDMA_READ) { /* the other side may stop polling */
		POST(side, IBV_WR_SEND, .wr_id = SENT);
		expect_wc(side, SENT, IBV_WC_SUCCESS);
	}
}

static void two_sided(struct bench *bench, uint32_t length)
{
	struct side *side = &bench->side;

	for (int i = repeats(length); i; i--) {
		if (bench->process.child)
			POST(side, IBV_WR_SEND, .wr_id = SENT, .length = length);
		if (bench->process.child) {
			expect_wc(side, SENT, IBV_WC_SUCCESS);
		} else {
			expect_wc(side, RECEIVED, IBV_WC_SUCCESS);
			CHECK_EQUAL(post_recv_at(side, RECEIVED, 0, MOST), 0);
		}
	}
}

static void serve(struct bench *bench)
{
	expect_wc(&bench->side, RECEIVED, IBV_WC_SUCCESS);
	CHECK_EQUAL(post_recv_at(&bench->side, RECEIVED, 0, MOST), 0);
}

static void run(struct bench *bench, enum way way, uint32_t length)
{
	bool asks = bench->process.child;

	soft_cma_desc_least = way >= WRITE && (way - WRITE) % 2 ? 1 : UINT32_MAX;
	switch (way) {
	case COPY:
		if (asks)
			copy(bench, length);
		break;
	case TCP:
		tcp(bench, length);
		break;
	case SEND:
	case SEND_REFERRED:
		two_sided(bench, length);
		break;
	default:
		if (asks)
			one_sided(bench, way < READ ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, length);
		else
			serve(bench);
	}
}

int main(void)
{
	struct bench bench = {.process = split()};

	limit_seconds(300);
	settle(&bench.process);
	bench.fd = tcp_pair(&bench.process);
	for (int i = 0; i < 2; i++) {
		bench.shared[i] = mmap(NULL, MOST, PROT_READ | PROT_WRITE,
				       MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
		CHECK(bench.shared[i] != MAP_FAILED);
	}
	open_side(&bench.side, (struct options){.memory = MOST, .receives = 128});
	CHECK_EQUAL(to_init(&bench.side), 0);
	for (int i = 0; i < 64; i++)
		CHECK_EQUAL(post_recv_at(&bench.side, RECEIVED, 0, MOST), 0);
	bench.peer = exchange(&bench.process, &bench.side);
	CHECK_EQUAL(to_rtr(&bench.side, &bench.peer), 0);
	CHECK_EQUAL(to_rts(&bench.side), 0);
	process_barrier(&bench.process);
	if (bench.process.child) {
		printf("%9s", "bytes");
		for (int way = 0; way < WAYS; way++)
			printf("%9s", names[way]);
		printf("   us each\n");
	}
	for (uint32_t length = 4096; length <= MOST; length *= 2) {
		double times[WAYS][ROUNDS];

		for (int round = 0; round < ROUNDS; round++)
			for (int way = 0; way < WAYS; way++) {
				process_barrier(&bench.process);
				uint64_t start = now_ns(CLOCK_MONOTONIC);

				run(&bench, (enum way)way, length);
				times[way][round] = (double)(now_ns(CLOCK_MONOTONIC) - start);
			}
		if (!bench.process.child)
			continue;
		printf("%9u", length);
		for (int way = 0; way < WAYS; way++)
			printf("%9.1f", median(times[way], ROUNDS) / repeats(length) / 1e3);
		printf("\n");
	}
	process_barrier(&bench.process);
	close(bench.fd);
	close_side(&bench.side);
	join(&bench.process);
	return 0;
}
