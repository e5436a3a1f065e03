/* Measures the device through the verbs API, as a baseline that shows how much time Python adds in
 * aiordma.
 *
 *   verbs WAITING WAITING CORE CORE KIND SIZE WINDOW
 *
 * The program consists of a client process and a server process. Each pair of arguments applies to
 * the client first and to the server second. WAITING is "polling" if the process polls for
 * completions. For any other word, it sleeps until a completion arrives. CORE is the core on which
 * the process runs. KIND is a name in `kinds`. SIZE is the size of each operation in bytes. WINDOW
 * is the number of operations in flight or in a batch.
 *
 * The client reads the number of operations, a multiple of WINDOW, from each line of its input. It
 * prints the time per operation in seconds.
 */
#define _GNU_SOURCE /* CPU_SET */
#include "abi/abi.h"

#include <err.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CALL(library, result, name, arguments) result name arguments;
#include "abi/calls.h"
#undef CALL

enum {
	MEMORY = 128 << 20, /* maximum size of the registered memory in bytes */
	LONGEST = 64 << 20,
	RECEIVES = 256,
	SENDS = 128,
	INLINE = 64,
	BATCH = 64,
	SENT = 1,
	RECEIVED = 2,
};

struct job {
	uint32_t size, window, count;
};

static struct {
	bool polling, asks;
	int other; /* a socket to the other process */
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	uint8_t *memory;
	uint64_t remote;
	uint32_t rkey;
} side;

static void check(int rc, const char *what)
{
	if (rc)
		errx(1, "%s: %d", what, rc);
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* ---- two processes ------------------------------------------------------------------------- */

static void tell(const void *data, size_t length)
{
	if (send(side.other, data, length, MSG_NOSIGNAL) != (ssize_t)length)
		exit(0); /* the other process has exited */
}

static void hear(void *data, size_t length)
{
	if (recv(side.other, data, length, MSG_WAITALL) != (ssize_t)length)
		exit(0);
}

static void settle(const char *core)
{
	cpu_set_t own;

	CPU_ZERO(&own);
	CPU_SET((size_t)atoi(core), &own);
	if (sched_setaffinity(0, sizeof(own), &own))
		err(1, "core %s", core);
}

/* ---- verbs --------------------------------------------------------------------------------- */

/* Returns the number of slots of `size` bytes in the registered memory. */
static uint32_t places(uint32_t size)
{
	return RECEIVES < MEMORY / size ? RECEIVES : MEMORY / size;
}

static struct ibv_qp *make_qp(void)
{
	struct ibv_qp_init_attr init = {
		.send_cq = side.cq,
		.recv_cq = side.cq,
		.cap = {.max_send_wr = SENDS,
			.max_recv_wr = RECEIVES,
			.max_send_sge = 1,
			.max_recv_sge = 1,
			.max_inline_data = INLINE},
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = ibv_create_qp(side.pd, &init);

	if (!qp)
		err(1, "no queue pair");
	return qp;
}

static void open_side(uint32_t size)
{
	size_t length = (size_t)places(size) * size;
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);

	if (!list || !count || !(side.context = ibv_open_device(list[0])))
		err(1, "no device");
	ibv_free_device_list(list);
	side.pd = ibv_alloc_pd(side.context);
	side.channel = ibv_create_comp_channel(side.context);
	side.cq = ibv_create_cq(side.context, SENDS + RECEIVES, NULL, side.channel, 0);
	side.memory =
		mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!side.pd || !side.channel || !side.cq || side.memory == MAP_FAILED)
		err(1, "no completion queue, or no memory");
	side.mr = ibv_reg_mr(side.pd, side.memory, length,
			     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	if (!side.mr)
		err(1, "no memory region");
	side.qp = make_qp();
}

struct endpoint {
	uint64_t memory;
	uint32_t rkey, qp_num;
	uint16_t lid;
};

static void connect_side(void)
{
	struct ibv_port_attr port;
	struct endpoint own, peer;

	check(ibv_query_port(side.context, 1, (struct _compat_ibv_port_attr *)&port), "query_port");
	own = (struct endpoint){.memory = (uintptr_t)side.memory,
				.rkey = side.mr->rkey,
				.qp_num = side.qp->qp_num,
				.lid = port.lid};
	tell(&own, sizeof(own));
	hear(&peer, sizeof(peer));
	side.remote = peer.memory;
	side.rkey = peer.rkey;

	struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT,
				   .port_num = 1,
				   .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
	struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
				  .path_mtu = IBV_MTU_4096,
				  .dest_qp_num = peer.qp_num,
				  .max_dest_rd_atomic = 1,
				  .min_rnr_timer = 1,
				  .ah_attr = {.dlid = peer.lid, .port_num = 1}};
	struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS,
				  .timeout = 14,
				  .retry_cnt = 6,
				  .rnr_retry = 7,
				  .max_rd_atomic = 1};

	check(ibv_modify_qp(side.qp, &init,
			    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
	      "INIT");
	check(ibv_modify_qp(side.qp, &rtr,
			    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				    IBV_QP_MIN_RNR_TIMER),
	      "RTR");
	check(ibv_modify_qp(side.qp, &rts,
			    IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
				    IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC),
	      "RTS");
}

static void post_recv(uint64_t at, uint32_t length)
{
	struct ibv_sge sge = {
		.addr = (uintptr_t)side.memory + at, .length = length, .lkey = side.mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = RECEIVED, .sg_list = &sge, .num_sge = 1}, *bad;

	check(side.context->ops.post_recv(side.qp, &wr, &bad), "post_recv");
}

/* Post `count` requests with a single call. Only the last request is signaled. */
static void post_send(enum ibv_wr_opcode opcode, uint32_t length, int count)
{
	struct ibv_sge sge = {
		.addr = (uintptr_t)side.memory, .length = length, .lkey = side.mr->lkey};
	struct ibv_send_wr wrs[BATCH], *bad;

	for (int i = 0; i < count; i++) {
		wrs[i] = (struct ibv_send_wr){
			.wr_id = SENT,
			.next = &wrs[i + 1],
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = opcode,
			.send_flags = length <= INLINE ? IBV_SEND_INLINE : 0,
		};
		wrs[i].wr.rdma.remote_addr = side.remote;
		wrs[i].wr.rdma.rkey = side.rkey;
	}
	wrs[count - 1].next = NULL;
	wrs[count - 1].send_flags |= IBV_SEND_SIGNALED;
	check(side.context->ops.post_send(side.qp, wrs, &bad), "post_send");
}

static int poll_cq(struct ibv_wc *wc, int room)
{
	int n = side.context->ops.poll_cq(side.cq, room, wc);

	for (int i = 0; i < n; i++)
		if (wc[i].status != IBV_WC_SUCCESS) {
			char byte;

			/* If the other process has exited, the requests that it has
			 * not acknowledged fail. This is not an error. */
			if (recv(side.other, &byte, 1, MSG_PEEK) == 0)
				exit(0);
			errx(1, "a completion with %s", ibv_wc_status_str(wc[i].status));
		}
	return n;
}

/* Wait for completions. Returns their number, which is at least one and at most `room`. */
static int completions(struct ibv_wc *wc, int room)
{
	int n;

	while (!(n = poll_cq(wc, room))) {
		if (side.polling)
			continue;
		check(side.context->ops.req_notify_cq(side.cq, 0), "req_notify_cq");
		if ((n = poll_cq(wc, room)))
			break;
		struct ibv_cq *cq;
		void *context;

		check(ibv_get_cq_event(side.channel, &cq, &context), "get_cq_event");
		ibv_ack_cq_events(cq, 1);
	}
	return n;
}

/* The numbers of completed sends and receives that the job has not processed yet. A receive may
 * complete before the job waits for it. */
static uint32_t sent, received;

static void progress(void)
{
	struct ibv_wc wc[32];
	int n = completions(wc, 32);

	for (int i = 0; i < n; i++)
		*(wc[i].wr_id == SENT ? &sent : &received) += 1;
}

static void expect(const uint32_t *counter, uint32_t count)
{
	while (*counter < count)
		progress();
}

/* ---- jobs: what one process does, and the other one meanwhile -------------------------------- */

/* Let the server continue after one-sided writes by sending an empty message. */
static void release_other(void)
{
	post_send(IBV_WR_SEND, 0, 1);
	expect(&sent, 1);
	sent = 0;
}

/* Post `count` receives of `size` bytes, using the slots of the registered memory in rotation. */
static void post_receives(uint32_t size, uint32_t count)
{
	static uint32_t next;

	for (uint32_t i = 0; i < count; i++)
		post_recv((uint64_t)(next++ % places(size)) * size, size);
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void nothing(void)
{
}

/* Call `before` and then `once` for each operation. Returns the median duration of `once` in
 * seconds. */
static double each(const struct job *job, void (*before)(void), void (*once)(const struct job *job))
{
	double *times = calloc(job->count, sizeof(*times)), start, typical;

	for (uint32_t i = 0; i < job->count; i++) {
		before();
		start = now();
		once(job);
		times[i] = now() - start;
	}
	qsort(times, job->count, sizeof(*times), by_value);
	typical = times[job->count / 2];
	free(times);
	return typical;
}

/* Send a message and wait for its echo. */
static void echo_one(const struct job *job)
{
	post_send(IBV_WR_SEND, job->size, 1);
	expect(&received, 1);
	post_receives(job->size, 1);
	expect(&sent, 1);
	received = sent = 0;
}

static double echo(const struct job *job)
{
	return each(job, nothing, echo_one);
}

/* Send messages and receive their echoes, with up to `window` messages in flight. Returns the
 * time per message in seconds. */
static double echo_many(const struct job *job)
{
	uint32_t posted = 0, answered = 0, outstanding = 0;
	double start = now();

	while (answered < job->count) {
		for (;
		     posted < job->count && posted - answered < job->window && outstanding < SENDS;
		     posted++, outstanding++)
			post_send(IBV_WR_SEND, job->size, 1);
		progress();
		post_receives(job->size, received);
		answered += received;
		outstanding -= sent;
		received = sent = 0;
	}
	expect(&sent, outstanding);
	sent = 0;
	return (now() - start) / job->count;
}

static void answer(const struct job *job)
{
	uint32_t answered = 0, outstanding = 0;

	while (answered < job->count || outstanding) {
		progress();
		uint32_t here = received;

		received = 0;
		post_receives(job->size, here);
		for (uint32_t i = 0; i < here; i++, outstanding++) {
			while (outstanding >= SENDS - 1) {
				progress();
				outstanding -= sent;
				sent = 0;
			}
			post_send(IBV_WR_SEND, job->size, 1);
		}
		answered += here;
		outstanding -= sent;
		sent = 0;
	}
}

/* Post `count` batches, keeping up to `under_way` of them in flight. Returns the total time in
 * seconds.
 *
 * Only the last request of a batch is signaled. Its completion also frees the send queue entries
 * of the unsignaled requests before it.
 */
static double keep_under_way(enum ibv_wr_opcode opcode, uint32_t size, uint32_t batch,
			     uint32_t under_way, uint32_t count)
{
	uint32_t posted = 0, done = 0;
	double start = now();

	while (done < count) {
		for (; posted < count && posted - done < under_way; posted++)
			post_send(opcode, size, (int)batch);
		progress();
		done += sent;
		sent = 0;
	}
	return now() - start;
}

/* Send messages to the server, which does not echo them. Returns the time per message in
 * seconds. The completion of a send means that the message has arrived. */
static double send_many(const struct job *job)
{
	return keep_under_way(IBV_WR_SEND, job->size, 1, job->window, job->count) / job->count;
}

static void take(const struct job *job)
{
	for (uint32_t taken = 0; taken < job->count;) {
		progress();
		taken += received;
		post_receives(job->size, received);
		received = 0;
	}
}

/* Write to the server's memory, and wait for the completion. In the meantime, the server polls or
 * sleeps. */
static void write_one(const struct job *job)
{
	post_send(IBV_WR_RDMA_WRITE, job->size, 1);
	expect(&sent, 1);
	sent = 0;
}

static double write_each(const struct job *job)
{
	double typical = each(job, nothing, write_one);

	release_other();
	return typical;
}

/* Write to the server's memory, with up to `window` writes in flight. Returns the total time
 * divided by the number of writes, in seconds. */
static double write_many(const struct job *job)
{
	double taken = keep_under_way(IBV_WR_RDMA_WRITE, job->size, 1, job->window, job->count);

	release_other();
	return taken / job->count;
}

/* Write in batches of `window` requests, waiting for each batch before posting the next one.
 * Returns the time per write in seconds. */
static double write_batch(const struct job *job)
{
	double taken = keep_under_way(IBV_WR_RDMA_WRITE, job->size, job->window, 1,
				      job->count / job->window);

	release_other();
	return taken / job->count;
}

static void be_written_to(const struct job *job)
{
	expect(&received, 1);
	received = 0;
	post_receives(job->size, 1);
}

/* Create and connect another queue pair, call `then` while `side.qp` refers to it, and destroy
 * it. Both processes call this function. The client's `then` writes to the server's memory. The
 * completion of this write shows that both ends are connected. */
static void connect_and(const struct job *job, void (*then)(const struct job *job))
{
	struct ibv_qp *first = side.qp;

	side.qp = make_qp();
	connect_side();
	then(job);
	check(ibv_destroy_qp(side.qp), "destroy_qp");
	side.qp = first;
}

static void write_and_tell(const struct job *job)
{
	write_one(job);
	tell("", 1);
}

static void connect_one(const struct job *job)
{
	connect_and(job, write_and_tell);
}

static double connect_each(const struct job *job)
{
	return each(job, nothing, connect_one);
}

static void hear_of_it(const struct job *job)
{
	char byte;

	(void)job;
	hear(&byte, 1);
}

static void be_connected(const struct job *job)
{
	for (uint32_t i = 0; i < job->count; i++)
		connect_and(job, hear_of_it);
}

/* The kinds "copy" and "copy_across" use no device. The client copies within memory that it
 * shares with the server. With "copy", the client's cache holds the memory if it fits. With
 * "copy_across", the server has just written to the destination. The time then includes the cache
 * coherence traffic between the two cores, as the time of an RDMA write does. */
enum turn { OURS, THEIRS };

static struct {
	volatile uint8_t *turn; /* in shared memory, like `from` and `to` */
	uint8_t *from, *to;
} both;

static void share(uint32_t size)
{
	enum { PAGE = 4096 };
	uint8_t *memory = mmap(NULL, PAGE + 2 * (size_t)size, PROT_READ | PROT_WRITE,
			       MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (memory == MAP_FAILED)
		err(1, "mmap");
	both.turn = memory;
	both.from = memory + PAGE;
	both.to = both.from + size;
}

static void await_turn(enum turn turn)
{
	while (__atomic_load_n(both.turn, __ATOMIC_ACQUIRE) != turn)
		sched_yield();
}

static void have_it_written(void)
{
	__atomic_store_n(both.turn, THEIRS, __ATOMIC_RELEASE);
	await_turn(OURS);
}

static void write_before(const struct job *job)
{
	for (uint32_t i = 0; i < job->count; i++) {
		await_turn(THEIRS);
		memset(both.to, (int)i, job->size);
		__atomic_store_n(both.turn, OURS, __ATOMIC_RELEASE);
	}
}

static void copy_one(const struct job *job)
{
	memcpy(both.to, both.from, job->size);
	__asm__ volatile("" : : : "memory");
}

static double copy(const struct job *job)
{
	return each(job, nothing, copy_one);
}

static double copy_across(const struct job *job)
{
	return each(job, have_it_written, copy_one);
}

static void do_nothing(const struct job *job)
{
	(void)job;
}

static const struct kind {
	const char *name;
	double (*ask)(const struct job *job);
	void (*serve)(const struct job *job);
} kinds[] = {
	{"echo", echo, answer},
	{"echo_many", echo_many, answer},
	{"send_many", send_many, take},
	{"write", write_each, be_written_to},
	{"write_many", write_many, be_written_to},
	{"write_batch", write_batch, be_written_to},
	{"connect", connect_each, be_connected},
	{"copy", copy, do_nothing},
	{"copy_across", copy_across, write_before},
	{NULL, NULL, NULL},
};

int main(int argc, char **argv)
{
	int sockets[2];

	if (argc != 8)
		errx(2, "usage: verbs WAITING WAITING CORE CORE KIND SIZE WINDOW");
	const struct kind *kind = kinds;
	struct job job = {.size = (uint32_t)atoi(argv[6]), .window = (uint32_t)atoi(argv[7])};

	while (kind->name && strcmp(kind->name, argv[5]))
		kind++;
	if (!kind->name || !job.size || job.size > LONGEST || !job.window || job.window > BATCH)
		errx(2, "what is %s %s %s?", argv[5], argv[6], argv[7]);
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets))
		err(1, "socketpair");
	share(job.size);
	side.asks = fork();
	side.other = sockets[side.asks];
	close(sockets[!side.asks]);
	side.polling = !strcmp(argv[side.asks ? 1 : 2], "polling");
	settle(argv[side.asks ? 3 : 4]);
	open_side(job.size);
	connect_side();
	post_receives(job.size, 2 * job.window);
	if (!side.asks && !prctl(PR_SET_PDEATHSIG, SIGKILL)) /* also ends a polling server */
		for (;;) {
			hear(&job.count, sizeof(job.count));
			kind->serve(&job);
		}
	char line[32];

	while (fgets(line, sizeof(line), stdin)) {
		job.count = (uint32_t)atoi(line);
		if (!job.count || job.count % job.window)
			errx(2, "how many are %s?", line);
		tell(&job.count, sizeof(job.count));
		printf("%.9g\n", kind->ask(&job));
		fflush(stdout);
	}
	return 0;
}
