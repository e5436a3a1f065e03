/* How long a message takes there and back, and how much goes through, between two processes: the
 * embedded device beside plain TCP of the same sizes, in turns, so that both see the same machine.
 *
 *   meson test -C build/plain --benchmark --verbose bench_pingpong [--test-args sleeping]
 *
 * Prints for each: microseconds for 64 B there and back, GB/s of RDMA writes of 64 KiB and of 1
 * MiB, four under way (medians of rounds), and how many times better the device is.  The two
 * processes share memory; with AIORDMA_EMBEDDED_LINKS=tcp in the environment the device goes over
 * TCP too.
 */
#define _GNU_SOURCE /* CPU_SET */
#include "bench_side.h"

enum {
	BIG = 1 << 20,
	WINDOW = 4,
	BATCH = 500,
	ROUNDS = 9,
	STREAM = 128 << 20
};

/* ---- plain TCP ----------------------------------------------------------------------------- */

static void tcp_64(const struct process *process, int fd, bool polling)
{
	uint8_t bytes[64] = {0};

	for (int i = 0; i < BATCH; i++) {
		if (process->child)
			tcp_send(fd, bytes, sizeof(bytes));
		tcp_recv(fd, bytes, sizeof(bytes), polling);
		if (!process->child)
			tcp_send(fd, bytes, sizeof(bytes));
	}
}

static void tcp_stream(const struct process *process, int fd, uint8_t *memory, uint32_t size,
		       bool polling)
{
	uint8_t byte = 0;

	for (uint32_t i = 0; i < STREAM / size; i++) {
		if (process->child)
			tcp_send(fd, memory, size);
		else
			tcp_recv(fd, memory, size, polling);
	}
	if (process->child)
		tcp_recv(fd, &byte, 1, polling);
	else
		tcp_send(fd, &byte, 1);
}

/* ---- the device ---------------------------------------------------------------------------- */

/* At least one completion, polling or asleep in between. */
static int completions(struct side *side, struct ibv_wc *wc, int room, bool polling)
{
	for (;;) {
		int n = poll_cq(side, room, wc);

		if (n)
			return n;
		if (polling)
			continue;
		CHECK_EQUAL(side->context->ops.req_notify_cq(side->cq, 0), 0);
		n = poll_cq(side, room, wc);
		if (n)
			return n;
		struct ibv_cq *cq;
		void *context;

		CHECK_EQUAL(verbs->ibv_get_cq_event(side->channel, &cq, &context), 0);
		verbs->ibv_ack_cq_events(cq, 1);
	}
}

enum {
	SENT = 1,
	RECEIVED = 2
};

static void rdma_64(const struct process *process, struct side *side, bool polling)
{
	int received = 0, sent = 0, posted = 0;

	if (process->child) {
		CHECK_EQUAL(post(side, (struct request){.opcode = IBV_WR_SEND,
							.wr_id = SENT,
							.length = 64,
							.flags = IBV_SEND_INLINE}),
			    0);
		posted++;
	}
	while (received < BATCH || sent < BATCH) {
		struct ibv_wc wc[16];
		int n = completions(side, wc, 16, polling);

		for (int i = 0; i < n; i++) {
			CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
			if (wc[i].wr_id == SENT) {
				sent++;
				continue;
			}
			received++;
			CHECK_EQUAL(post_recv_at(side, RECEIVED, 4096, 64), 0);
			if (posted < BATCH) {
				CHECK_EQUAL(post(side, (struct request){.opcode = IBV_WR_SEND,
									.wr_id = SENT,
									.length = 64,
									.flags = IBV_SEND_INLINE}),
					    0);
				posted++;
			}
		}
	}
}

static void rdma_stream(const struct process *process, struct side *side,
			const struct address *peer, uint32_t size, bool polling)
{
	uint32_t count = STREAM / size, posted = 0, done = 0;

	if (!process->child) {
		struct ibv_wc wc;

		completions(side, &wc, 1, polling); /* the last one says so */
		CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
		CHECK_EQUAL(post_recv_at(side, RECEIVED, 4096, 64), 0);
		return;
	}
	while (done < count) {
		while (posted < count && posted - done < WINDOW) {
			posted++;
			CHECK_EQUAL(
				post(side,
				     (struct request){.opcode = posted == count
									? IBV_WR_RDMA_WRITE_WITH_IMM
									: IBV_WR_RDMA_WRITE,
						      .wr_id = SENT,
						      .length = size,
						      .offset = 8192,
						      .remote = peer->memory + 8192,
						      .rkey = peer->rkey}),
				0);
		}
		struct ibv_wc wc[16];
		int n = completions(side, wc, 16, polling);

		for (int i = 0; i < n; i++)
			CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
		done += (uint32_t)n;
	}
}

static void report(const char *waiting, double times[6][ROUNDS])
{
	static const char *const what[] = {"64 B there and back", "64 KiB", "1 MiB"};

	for (int row = 0; row < 3; row++) {
		double tcp = median(times[2 * row], ROUNDS),
		       device = median(times[2 * row + 1], ROUNDS);

		if (row == 0)
			printf("%-8s  %-19s  TCP %6.1f us    device %6.1f us    %5.1f times\n",
			       waiting, what[row], tcp / BATCH / 1e3, device / BATCH / 1e3,
			       tcp / device);
		else
			printf("%-8s  %-19s  TCP %6.1f GB/s  device %6.1f GB/s  %5.1f times\n",
			       waiting, what[row], STREAM / tcp, STREAM / device, tcp / device);
	}
}

int main(int count, char **arguments)
{
	/* Polling on a busy machine measures its scheduler: it can be left out, or done alone. */
	const char *only = count > 1 ? arguments[1] : "";
	struct process process = split();
	static uint8_t memory[BIG];
	struct side side;

	limit_seconds(120);
	settle(&process);
	int fd = tcp_pair(&process);

	open_side(&side, (struct options){.memory = BIG + 8192, .receives = 128});
	CHECK_EQUAL(to_init(&side), 0);
	for (int i = 0; i < 64; i++)
		CHECK_EQUAL(post_recv_at(&side, RECEIVED, 4096, 64), 0);
	struct address peer = exchange(&process, &side);

	CHECK_EQUAL(to_rtr(&side, &peer), 0);
	CHECK_EQUAL(to_rts(&side), 0);
	for (int polling = 1; polling >= 0; polling--) {
		double times[6][ROUNDS];

		if (*only && strcmp(only, polling ? "polling" : "sleeping"))
			continue;
		for (int round = 0; round < ROUNDS; round++)
			for (int way = 0; way < 6; way++) {
				uint32_t size = way < 4 ? 65536 : BIG;

				process_barrier(&process);
				uint64_t start = now_ns(CLOCK_MONOTONIC);

				if (way == 0)
					tcp_64(&process, fd, polling);
				else if (way == 1)
					rdma_64(&process, &side, polling);
				else if (way % 2 == 0)
					tcp_stream(&process, fd, memory, size, polling);
				else
					rdma_stream(&process, &side, &peer, size, polling);
				times[way][round] = (double)(now_ns(CLOCK_MONOTONIC) - start);
			}
		if (process.child)
			report(polling ? "polling" : "sleeping", times);
	}
	process_barrier(&process);
	close(fd);
	close_side(&side);
	join(&process);
	return 0;
}
