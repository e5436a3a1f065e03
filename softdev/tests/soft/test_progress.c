/* Test which threads do the device's work. The engine's thread does it while the application is
 * busy, and application threads do it while they poll. An idle device uses no CPU time. */
#define _GNU_SOURCE /* RUSAGE_THREAD */
#include "engine/engine_internal.h"
#include "leaks.h"
#include "objects/objects.h"
#include "verbs_side.h"
#include "link/link_internal.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>

/* Check that repeatedly closing all devices leaves no thread or file descriptor behind, with and
 * without a stream. */
static void closing_devices_leaves_no_threads_or_descriptors(void)
{
	int before = count_resources();

	for (int round = 0; round < 20; round++) {
		struct side a, b;

		OPEN_PAIR(&a, &b);
		if (round % 2)
			send_one_message(&a, &b);
		close_pair(&a, &b);
		expect_resources(before);
	}
}

/* Search the status file of the device's thread for the line with the prefix `begins`, and copy the
 * rest of this line to `value`. Returns false if the thread has not started yet. */
static bool find_status(const char *begins, char value[256])
{
	DIR *dir = opendir("/proc/self/task");
	bool found = false;

	CHECK(dir);
	for (struct dirent *entry; (entry = readdir(dir));) {
		char path[300], line[256];
		bool device = false;

		snprintf(path, sizeof(path), "/proc/self/task/%s/status", entry->d_name);
		FILE *file = fopen(path, "r");

		while (file && fgets(line, sizeof(line), file)) {
			device = device || !strcmp(line, "Name:\taiordma-device\n");
			if (device && !strncmp(line, begins, strlen(begins))) {
				strcpy(value, line + strlen(begins));
				found = true;
			}
		}
		if (file)
			fclose(file);
	}
	closedir(dir);
	return found;
}

static void wait_for_status(const char *begins, char value[256])
{
	while (!find_status(begins, value))
		sched_yield();
}

/* Returns how often the device's thread has gone to sleep. */
static long count_sleeps(void)
{
	char value[256];

	wait_for_status("voluntary_ctxt_switches:", value);
	return strtol(value, NULL, 10);
}

/* Wait until the device's thread stays asleep. After the last work, it polls for some milliseconds,
 * or longer on a busy machine. If something keeps waking it, the test times out. */
static void expect_device_sleeps(void)
{
	long before;

	do {
		before = count_sleeps();
		poll(NULL, 0, 400);
	} while (count_sleeps() != before);
}

/* Check that the device's thread blocks all signals except those for its own faults, so that the
 * application's threads receive the others. If a fault's signal were blocked, the kernel would kill
 * the process without calling the application's handler. */
static void device_thread_blocks_all_but_fault_signals(void)
{
	static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
	uint64_t expected = ~UINT64_C(0);
	char value[256];
	sigset_t others;
	struct side side;

	sigfillset(&others);
	for (int i = 0; i < 4; i++)
		sigdelset(&others, faults[i]);
	for (int number = 1; number <= 64; number++)
		if (sigismember(&others, number) != 1 || number == SIGKILL || number == SIGSTOP)
			expected &= ~(UINT64_C(1) << (number - 1));
	OPEN(&side);
	wait_for_status("SigBlk:", value);
	CHECK_EQUAL(strtoull(value, NULL, 16), expected);
	close_side(&side);
}

static void idle_connection_uses_no_cpu(struct side *a, struct side *b)
{
	send_one_message(a, b);
	expect_device_sleeps();
}

/* Returns whether processes communicate through shared memory. Over TCP, a process does not know
 * whether its peer is awake. */
static bool uses_shared_memory(void)
{
	return !links_are("tcp");
}

/* Increment a word of the peer's memory. Stores the previous value at offset 64 of the local
 * memory. */
static void increment_word(struct side *side, const struct address *peer, int word)
{
	RUN(side, IBV_WC_SUCCESS, IBV_WR_ATOMIC_FETCH_AND_ADD, .wr_id = 1, .length = 8,
	    .offset = 64, AT(peer, 8u * (unsigned)word), .compare_add = 1);
}

/* Check that two connected processes use no CPU time after both have polled and then waited. */
static void idle_processes_use_no_cpu_after_polling(void)
{
	struct process process;
	struct side side;

	open_peers(&process, &side, (struct options){0}, 0, 0);
	for (int i = 0; i < 200; i++) {
		post_receive_at(&side, 1, 0, 8);
		process_barrier(&process);
		RUN(&side, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = 1, .length = 8);
		expect_wc(&side, 1, IBV_WC_SUCCESS);
	}
	CHECK_OK(side.context->ops.req_notify_cq(side.cq, 0));
	process_barrier(&process);
	expect_device_sleeps();
	close_peers(&process, &side);
}

/* Check that a process serves its peer's requests while it computes. If `stays` is true, the
 * process has announced another poll, but computes instead of polling. */
static void requests_are_served_while_application_is_busy(bool stays)
{
	enum { WRITES = 200, POLLED = 50, DONE = 1 };
	struct process process;
	struct side side;
	struct address peer = open_peers(&process, &side, (struct options){0}, 0, 0);
	uint64_t *words = (uint64_t *)(void *)side.memory;

	if (process.child) {
		for (int i = 0; i < WRITES; i++)
			increment_word(&side, &peer, 0);
		increment_word(&side, &peer, DONE);
	} else {
		struct ibv_wc wc;

		if (stays) {
			soft_busy_poll(1);
			while (__atomic_load_n(&words[0], __ATOMIC_ACQUIRE) < POLLED)
				CHECK_EQUAL(poll_cq(&side, 1, &wc), 0);
			soft_announce_poll(1);
			soft_busy_poll(0);
		}
		/* Only read memory, as a computation does, without calling the device. */
		while (!__atomic_load_n(&words[DONE], __ATOMIC_ACQUIRE))
			;
		CHECK(__atomic_load_n(&words[0], __ATOMIC_ACQUIRE) == WRITES);
		if (stays)
			soft_announce_poll(-1);
	}
	close_peers(&process, &side);
}

/* Make the channel's fd non-blocking, and also readable when the device has work (wake_early). */
static void enable_early_wake(struct ibv_comp_channel *channel)
{
	CHECK_OK(fcntl(channel->fd, F_SETFL, O_NONBLOCK));
	verbs->device->wake_early(channel->fd);
}

/* Check that a completion wakes a thread that waits in ibv_get_cq_event, or in poll() on the
 * channel's fd, with or without wake_early. */
static void completion_wakes_a_waiting_thread(void)
{
	for (int way = 0; way < 3; way++) {
		struct process process;
		struct side side;
		struct ibv_cq *cq;
		void *context;

		open_peers(&process, &side, (struct options){0}, 1, 8);
		if (way == 1) /* the fd is readable for events only */
			CHECK_OK(fcntl(side.channel->fd, F_SETFL, O_NONBLOCK));
		if (way == 2) /* the fd is also readable for work */
			enable_early_wake(side.channel);
		for (int i = 0; i < 300; i++) {
			bool mine = (i & 1) == (process.child != 0);

			if (mine)
				POST(&side, IBV_WR_SEND, .wr_id = 2, .length = 8);
			CHECK_OK(side.context->ops.req_notify_cq(side.cq, 0));
			struct ibv_wc wc;

			while (poll_cq(&side, 1, &wc) == 0) {
				struct pollfd at = {.fd = side.channel->fd, .events = POLLIN};

				if (way)
					CHECK_EQUAL(poll(&at, 1, -1), 1);
				int rc = verbs->ibv_get_cq_event(side.channel, &cq, &context);

				/* A readable fd guarantees an event, except with wake_early. */
				CHECK(rc == 0 || (way == 2 && errno == EAGAIN));
				if (rc)
					continue;
				verbs->ibv_ack_cq_events(cq, 1);
				CHECK_OK(side.context->ops.req_notify_cq(side.cq, 0));
			}
			CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
			if (!mine)
				post_receive_at(&side, 1, 0, 8);
		}
		close_peers(&process, &side);
	}
}

/* Exchange messages on a pair that only this thread uses. */
static void *exchange_messages(void *unused)
{
	struct side a, b;

	(void)unused;
	OPEN_PAIR(&a, &b);
	for (unsigned i = 0; i < 200; i++) {
		post_receive_at(&b, i, 0, 4000);
		POST(&a, IBV_WR_SEND, .wr_id = i, .length = 1 + i * 19);
		POST(&b, IBV_WR_RDMA_READ, .wr_id = 1000, .length = 4000, .offset = 8192,
		     REMOTE(&a, 8192));
		expect_wc(&a, i, IBV_WC_SUCCESS);
		expect_two(&b);
	}
	close_pair(&a, &b);
	return NULL;
}

static void threads_can_use_separate_pairs_concurrently(void)
{
	pthread_t thread[4];

	for (int i = 0; i < 4; i++)
		CHECK_OK(pthread_create(&thread[i], NULL, exchange_messages, NULL));
	for (int i = 0; i < 20; i++) {
		struct side a, b;

		OPEN_PAIR(&a, &b);
		close_pair(&a, &b);
	}
	for (int i = 0; i < 4; i++)
		CHECK_OK(pthread_join(thread[i], NULL));
}

/* Simulate threads that a fork interrupts: locks are held, and events have been read but not
 * acknowledged. */
static void hold_locks_and_events(struct side *a, struct ibv_async_event *event)
{
	struct ibv_cq *cq;
	void *context;

	CHECK_OK(a->context->ops.req_notify_cq(a->cq, 0));
	enter_state(a, IBV_QPS_ERR);
	POST(a, IBV_WR_SEND); /* flushed */
	CHECK_OK(verbs->ibv_get_cq_event(a->channel, &cq, &context));
	CHECK_OK(verbs->ibv_get_async_event(a->context, event));
	CHECK_EQUAL(event->event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
#ifndef __SANITIZE_THREAD__ /* ThreadSanitizer reports the destruction of held locks */
	pthread_mutex_lock(&soft_cq_of(a->cq)->lock);
	pthread_mutex_lock(&a->cq->mutex);
	pthread_mutex_lock(&a->qp->mutex);
	pthread_mutex_lock(&a->srq->mutex);
#endif
}

static void release_locks_and_events(struct side *a, struct ibv_async_event *event)
{
#ifndef __SANITIZE_THREAD__
	pthread_mutex_unlock(&soft_cq_of(a->cq)->lock);
	pthread_mutex_unlock(&a->cq->mutex);
	pthread_mutex_unlock(&a->qp->mutex);
	pthread_mutex_unlock(&a->srq->mutex);
#endif
	verbs->ibv_ack_cq_events(a->cq, 1);
	verbs->ibv_ack_async_event(event);
	close_side(a);
}

static bool has_armed_cq(void)
{
	return LOCKED(soft_engine_may_have_sleeper());
}

/* Mark the side's last acknowledgement as unsent, and delay it until hurry_acknowledgement() is
 * called. */
static void delay_acknowledgement(struct side *side)
{
	soft_lock();
	struct soft_responder *responder = &soft_qp_of(side->qp)->responder;
	struct soft_link *link = soft_link_of(soft_qp_of(side->qp));
	bool ticking = soft_device.engine->thread_ticks;

	link->reply_score = 100; /* the application is known to reply */
	soft_device.engine->thread_ticks = true;
	soft_ack_delay(&link->base);
	soft_device.engine->thread_ticks = ticking;
	CHECK(!soft_list_empty(&link->delayed));
	responder->acked_psn = soft_psn_prev(responder->acked_psn);
	link->delayed_since = UINT64_MAX;
	soft_unlock();
}

static void hurry_acknowledgement(struct side *b)
{
	soft_lock();
	soft_link_of(soft_qp_of(b->qp))->delayed_since = 0;
	soft_unlock();
}

/* Check that the child of a fork cannot use its parent's device, but can open its own device and
 * close the inherited objects. The parent has delayed an acknowledgement. The child must not send
 * it, and must not cause an event in the parent. */
static void child_cannot_use_parents_device_but_opens_its_own(void)
{
	struct ibv_async_event event;
	struct side a, b, busy;

	OPEN(&busy, .shared = 1);
	bring_up(&busy, &(struct address){.qpn = 1});
	hold_locks_and_events(&busy, &event);
	OPEN_PAIR(&a, &b);
	send_one_message(&a, &b);
	delay_acknowledgement(&b);
	pid_t child = fork_asleep();

	CHECK(child >= 0);
	if (child == 0) {
		limit_seconds(60);
		hurry_acknowledgement(&b);
		CHECK(!soft_engine_has_delayed_output());
		/* The streams belong to the parent, so this message is lost but does no harm. */
		POST(&a, IBV_WR_SEND, .wr_id = 9, .length = 8);
#ifndef __SANITIZE_THREAD__ /* ThreadSanitizer cannot start threads in this child */
		struct side c, d;

		OPEN_PAIR(&c, &d);
		send_one_message(&c, &d);
		soft_progress();
		close_pair(&c, &d);
#endif
		CHECK_EQUAL(state_of(&b), IBV_QPS_RTS);
		close_pair(&a, &b);
		close_side(&busy);
		_exit(0);
	}
	expect_exit_success(child);
	/* The parent is not affected. */
	expect_no_event(&b);
	hurry_acknowledgement(&b);
	send_one_message(&a, &b);
	close_pair(&a, &b);
	release_locks_and_events(&busy, &event);
}

/* Check that the child of a fork does not count its parent's polling threads and armed CQs as its
 * own. When the process forks, it has one of each. */
static void child_does_not_inherit_pollers_or_armed_cqs(void)
{
	struct side side;

	OPEN(&side);
	CHECK_OK(side.context->ops.req_notify_cq(side.cq, 0));
	soft_busy_poll(1);
	pid_t child = fork_asleep();

	CHECK(child >= 0);
	if (child == 0) {
		CHECK(!has_armed_cq());
		close_side(&side);
#ifndef __SANITIZE_THREAD__ /* ThreadSanitizer cannot start threads in this child */
		completion_wakes_a_waiting_thread();
#endif
		CHECK(!has_armed_cq());
		_exit(0);
	}
	expect_exit_success(child);
	soft_busy_poll(0);
	close_side(&side);
}

/* Check that each transferred part of a message is counted, except for the last one. Messages of a
 * single part and READ requests are not counted. */
static void transferred_parts_are_counted_except_the_last(struct side *a, struct side *b)
{
	enum { LONG = 3 * 1024 * 1024 };
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};

	for (int i = 0; i < 2; i++) {
		unsigned before = soft_engine_mid_message_frames();

		RUN(a, IBV_WC_SUCCESS, opcodes[i], .length = 64, REMOTE(b, LONG));
		CHECK_EQUAL(soft_engine_mid_message_frames(), before);
		RUN(a, IBV_WC_SUCCESS, opcodes[i], .length = LONG, REMOTE(b, LONG));
		/* This process both sends and receives the parts. */
		CHECK(soft_engine_mid_message_frames() - before >= 4);
	}
}

/* Check that progress() counts a peer's request that an application thread has served, even if the
 * request is small and the application is idle. The peer repeats its request until one is counted,
 * because the device's thread may serve the first ones. */
static void progress_counts_requests_served_by_application(void)
{
	const uint64_t told = (uint64_t)1 << 32;
	struct process process;
	struct side side;
	struct address peer = open_peers(&process, &side, (struct options){0}, 0, 0);

	if (process.child) {
		uint64_t *before = (uint64_t *)(void *)(side.memory + 64);

		do
			increment_word(&side, &peer, 0);
		while (*before < told);
	} else {
		unsigned before = verbs->device->progress();
		struct ibv_cq *cq;
		void *context;

		enable_early_wake(side.channel);
		CHECK_OK(side.context->ops.req_notify_cq(side.cq, 0));
		while (verbs->device->progress() == before)
			CHECK_EQUAL(verbs->ibv_get_cq_event(side.channel, &cq, &context), -1);
		__atomic_fetch_add((uint64_t *)(void *)side.memory, told, __ATOMIC_ACQ_REL);
	}
	close_peers(&process, &side);
}

/* Check that a process counts its writes to an awake peer and to a sleeping peer separately, except
 * over TCP. Writes to the awake peer are repeated until one is counted. On a busy machine, the
 * peer's device thread may serve many of them before the peer's application runs. */
static void writes_to_awake_and_asleep_peers_are_counted(void)
{
	enum { TIMES = 1000, DONE = 1 };
	bool knows = uses_shared_memory();
	struct process process;
	struct side side;
	struct address peer = open_peers(&process, &side, (struct options){0}, 0, 0);
	uint64_t *words = (uint64_t *)(void *)side.memory;

	if (process.child) {
		process_barrier(&process); /* the peer now polls */
		unsigned awake = soft_engine_writes(false);

		for (int i = 0; knows ? soft_engine_writes(false) == awake : i < TIMES; i++)
			increment_word(&side, &peer, 0);
		CHECK_EQUAL(soft_engine_writes(false) > awake, knows);
		increment_word(&side, &peer, DONE);
		process_barrier(&process);
		process_barrier(&process);
		unsigned woke = soft_engine_writes(true);

		increment_word(&side, &peer, 0);
		CHECK_EQUAL(soft_engine_writes(true) > woke, knows);
	} else {
		struct ibv_wc wc;

		soft_busy_poll(1);
		process_barrier(&process);
		while (!__atomic_load_n(&words[DONE], __ATOMIC_ACQUIRE))
			CHECK_EQUAL(poll_cq(&side, 1, &wc), 0);
		soft_busy_poll(0);
		CHECK_OK(side.context->ops.req_notify_cq(side.cq, 0));
		process_barrier(&process);
		expect_device_sleeps();
		process_barrier(&process);
	}
	close_peers(&process, &side);
}

/* Check that peers no longer notify this process of completions on an armed CQ if it only polls
 * another CQ. UCX uses CQs like this for datagrams. The peers must notify the process again once
 * the CQ is armed again. */
static void armed_cq_is_ignored_while_another_cq_is_polled(struct side *side)
{
	struct ibv_wc wc;

	struct ibv_comp_channel *channel = verbs->ibv_create_comp_channel(side->context);
	struct ibv_cq *cq = verbs->ibv_create_cq(side->context, 1, NULL, channel, 0);

	CHECK(channel && cq);
	for (int i = 0; i < 2; i++) {
		CHECK_OK(side->context->ops.req_notify_cq(cq, 0));
		CHECK(has_armed_cq());
		CHECK_EQUAL(poll_cq(side, 1, &wc), 0);
		CHECK(has_armed_cq());
		while (has_armed_cq()) /* bounded by limit_seconds */
			CHECK_EQUAL(poll_cq(side, 1, &wc), 0);
	}
	CHECK_OK(verbs->ibv_destroy_cq(cq));
	CHECK_OK(verbs->ibv_destroy_comp_channel(channel));
}

/* The device's clock: REAL is the machine's clock, STANDS has stopped, and RUNS advances by one
 * millisecond with each reading. */
static enum { REAL, STANDS, RUNS } pace;

static int paced_clock(clockid_t clock, struct timespec *now)
{
	static uint64_t ns = UINT64_MAX / 4;
	int how = __atomic_load_n(&pace, __ATOMIC_RELAXED);

	if (how == REAL)
		return clock_gettime(clock, now);
	uint64_t at = __atomic_add_fetch(&ns, how == RUNS ? 1000000 : 0, __ATOMIC_RELAXED);

	*now = (struct timespec){.tv_sec = (time_t)(at / 1000000000),
				 .tv_nsec = (long)(at % 1000000000)};
	return 0;
}

/* Returns how often this thread sleeps during `polls` polls of an empty CQ. A yield does not
 * count. */
static long count_sleeps_in_polls(struct side *side, int polls)
{
	struct rusage before, after;
	struct ibv_wc wc;

	CHECK_OK(getrusage(RUSAGE_THREAD, &before));
	for (int i = 0; i < polls; i++)
		CHECK_EQUAL(poll_cq(side, 1, &wc), 0);
	CHECK_OK(getrusage(RUSAGE_THREAD, &after));
	return after.ru_nvcsw - before.ru_nvcsw;
}

/* Check that a polling thread sleeps instead of yielding if its yields are slow. By sleeping, it
 * keeps its time slice for the next message. The thread must not sleep if its yields are fast, or
 * if soft_busy_poll() has announced that it will soon stop polling and sleep. */
static void polling_thread_sleeps_if_its_yields_are_slow(struct side *side)
{
	__atomic_store_n(&pace, STANDS, __ATOMIC_RELAXED);
	CHECK(count_sleeps_in_polls(side, 800) < 50);
	__atomic_store_n(&pace, RUNS, __ATOMIC_RELAXED);
	CHECK(count_sleeps_in_polls(side, 800) >= 50);
	soft_busy_poll(1);
	CHECK(count_sleeps_in_polls(side, 8000) < 50);
	soft_busy_poll(0);
}

int main(void)
{
	static struct soft_platform platform; /* static because the device's threads outlive main */

	platform = *soft_device.platform;
	platform.clock = paced_clock;
	soft_device.platform = &platform;
	limit_seconds(100);
	STEP(completion_wakes_a_waiting_thread());
	STEP(requests_are_served_while_application_is_busy(false));
	STEP(requests_are_served_while_application_is_busy(true));
	STEP(closing_devices_leaves_no_threads_or_descriptors());
	STEP(device_thread_blocks_all_but_fault_signals());
	PAIR(idle_connection_uses_no_cpu);
	STEP(idle_processes_use_no_cpu_after_polling());
	PAIR(transferred_parts_are_counted_except_the_last, .memory = 6 << 20);
	STEP(progress_counts_requests_served_by_application());
	STEP(writes_to_awake_and_asleep_peers_are_counted());
	SIDE(armed_cq_is_ignored_while_another_cq_is_polled);
	STEP(threads_can_use_separate_pairs_concurrently());
	STEP(child_cannot_use_parents_device_but_opens_its_own());
	STEP(child_does_not_inherit_pollers_or_armed_cqs());
	SIDE(polling_thread_sleeps_if_its_yields_are_slow); /* last, because its clock is far ahead */
	return 0;
}
