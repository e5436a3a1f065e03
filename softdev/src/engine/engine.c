/* The engine: one lock, one epoll set and one thread for everything the device does in this
 * process.
 *
 * Progress. The device's work (reading streams, sending responses, completing requests, running
 * timers) is done in steps. A step collects the ready sources, serves each of them within a limit
 * of bytes, and then runs the work deferred to its end. Any thread may run a step if it gets the
 * lock without waiting. An application thread that polls an empty CQ or waits for an event runs
 * steps itself, because being woken by another thread costs 10 to 25 us per message. The engine's
 * own thread works while no application thread runs steps, for example because a peer's RDMA READs
 * must be served while the application computes.
 *
 * See thread.c for how the engine's own thread stays out of the way, and fd_watch.c for what it
 * watches.
 *
 * What a step polls. A step first polls the rings of local peers (path/shm/wakeup.c), which needs
 * no system call, and then the epoll set. While there are rings to poll, a polling thread calls
 * epoll_wait only every two microseconds. A thread that was woken and found the cause in a ring
 * calls it only now and then. Peers need not notify this process while some thread polls anyway.
 * This thread may be an application thread that spins before it sleeps. It may also be the engine's
 * thread while it ticks or works, unless a completion queue is armed, because then an application
 * thread may sleep without another call. soft_engine_update_notify_need is called whenever this
 * changes: before the engine's thread sleeps, when a queue is armed, and when a thread stops
 * spinning.
 *
 * Why there is one lock. A step is short (it copies at most about a megabyte), and queue pairs of
 * one process mostly talk to each other's threads anyway. One lock also guarantees by construction
 * that no access happens after dereg_mr returns and no callback runs after unwatch.
 *
 * An application that polls memory written by a peer sees the data before the step is over, and
 * posts its reply while the engine's thread holds the lock. If it then went to sleep, it would
 * have to be woken for every message, and would wait for a processor on a busy machine. Therefore
 * peers are notified after the lock has been released (soft_notify_later), and a thread that finds
 * the lock taken spins for a moment.
 */
#define _GNU_SOURCE /* PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP, ppoll */
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine_internal.h"

enum {
	EPOLL_INTERVAL_POLLING_NS = 2000,
	EPOLL_INTERVAL_AFTER_RING_INPUT_NS = SOFT_TICK_NS,
	/* A thread is expected to keep polling after this number of polls without arming a CQ. */
	POLLS_TO_TRUST_POLLER = 1000,
	/* Number of fruitless polls between two yields. */
	MISSES_PER_YIELD = 64,
	/* Number of fruitless polls between two yields if each poll is a system call. */
	MISSES_PER_YIELD_EPOLL = 8,
	/* A yield of at least this duration counts as a lost time slice. The value is an
	 * estimate. */
	SLOW_YIELD_NS = 200 * 1000,
	/* After consecutive slow yields, polling threads sleep instead of yielding. They do so for
	 * the duration of the latest yield, multiplied by this factor. */
	NO_YIELD_FACTOR = 8,
	/* Attempts of soft_lock_timed, which are a millisecond apart. */
	TIMED_LOCK_ATTEMPTS = 1000,
};

static const struct soft_platform host_platform = {
	.clock = clock_gettime,
	.random = soft_read_random,
	.alarm = soft_engine_alarm,
	.threads = true,
};

struct soft_device soft_device = {.platform = &host_platform};

/* ---- subsystems ---------------------------------------------------------------------------- */

struct soft_part {
	struct soft_part *previous;
	max_align_t bytes[];
};

void *soft_alloc_part(size_t size)
{
	struct soft_part *part = calloc(1, sizeof(*part) + size);

	if (!part) {
		fputs("aiordma: not enough memory for the embedded device\n", stderr);
		abort();
	}
	part->previous = soft_device.parts;
	soft_device.parts = part;
	return part->bytes;
}

static void create_engine(void)
{
	soft_device.engine = soft_alloc_part(sizeof(struct soft_engine));
	*soft_device.engine = (struct soft_engine){
		.users_mutex = PTHREAD_MUTEX_INITIALIZER,
		.lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP,
		.sentinel.fd = -1,
		.epoll_fd = -1,
		.wake_fd = -1,
		.step_event.fd = -1,
		.alarm.fd = -1,
		.step_byte_budget = SOFT_STEP_BYTES,
	};
	soft_list_init(&soft_device.engine->watches);
	soft_list_init(&soft_device.engine->deferred);
	soft_list_init(&soft_device.engine->channels);
}

void soft_engine_set_subsystems(const struct soft_subsystem *const subsystems[])
{
	create_engine();
	soft_device.engine->subsystems = subsystems;
	(void)soft_engine_guard_fork(); /* on failure, retried by the first start */
	EACH_SUBSYSTEM (it) {
		if ((*it)->create)
			(*it)->create();
		if ((*it)->poll)
			soft_device.engine->poller = *it;
		if ((*it)->send_delayed)
			soft_device.engine->delayer = *it;
	}
}

void soft_device_free(void)
{
	EACH_SUBSYSTEM (it)
		if ((*it)->destroy)
			(*it)->destroy();
	while (soft_device.parts) {
		struct soft_part *part = soft_device.parts;

		soft_device.parts = part->previous;
		free(part);
	}
}

void soft_engine_port_changed(enum soft_port_change change, uint32_t ports)
{
	soft_assert_locked();
	EACH_SUBSYSTEM (it)
		if ((*it)->port_changed)
			(*it)->port_changed(change, ports);
}

void soft_engine_set_has_polled_rings(bool has_polled_rings)
{
	soft_assert_locked();
	soft_hint_set(&soft_device.engine->has_polled_rings, has_polled_rings);
}

void soft_engine_set_has_delayed_output(bool has_delayed_output)
{
	soft_assert_locked();
	soft_hint_set(&soft_device.engine->has_delayed_output, has_delayed_output);
}

void soft_engine_send_delayed_output(void)
{
	if (!soft_engine_has_delayed_output())
		return;
	soft_lock();
	soft_device.engine->delayer->send_delayed(0);
	soft_unlock();
}

/* ---- the lock ------------------------------------------------------------------------------ */

#ifdef AIORDMA_CHECK_LOCKS
static _Thread_local bool held;

void soft_note_locked(bool locked)
{
	held = locked;
}

void soft_check_locked(const char *function)
{
	if (held)
		return;
	fprintf(stderr, "aiordma: %s is called without the engine's lock\n", function);
	abort();
}
#endif

void soft_lock(void)
{
	if (pthread_mutex_trylock(&soft_device.engine->lock)) {
		soft_counter_add(&soft_device.engine->lock_waiters, 1);
		pthread_mutex_lock(&soft_device.engine->lock);
		soft_counter_add(&soft_device.engine->lock_waiters, -1u);
	}
	soft_note_locked(true);
}

bool soft_lock_timed(void)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	bool locked = false;

	for (int i = 0; i < TIMED_LOCK_ATTEMPTS && !locked; i++) {
		locked = !pthread_mutex_trylock(&soft_device.engine->lock);
		if (!locked)
			nanosleep(&pause, NULL);
	}
	soft_note_locked(locked);
	return locked;
}

static void notify(const int *fds, int count)
{
	for (int i = 0; i < count; i++)
		(void)!write(fds[i], "", 1); /* if the pipe is full, it is readable anyway */
}

/* Release the lock, and only then write the pending notifications. */
static void unlock_and_notify(void)
{
	int fds[SOFT_MAX_NOTIFY_FDS], count = soft_device.engine->notify_count;

	memcpy(fds, soft_device.engine->notify_fds, sizeof(fds));
	soft_device.engine->notify_count = 0;
	soft_counter_add(&soft_device.engine->notifying_threads, 1);
	pthread_mutex_unlock(&soft_device.engine->lock);
	notify(fds, count);
	soft_publish_decrement(&soft_device.engine->notifying_threads);
}

void soft_notify_later(int fd)
{
	soft_assert_locked();
	if (soft_device.engine->notify_count < SOFT_MAX_NOTIFY_FDS)
		soft_device.engine->notify_fds[soft_device.engine->notify_count++] = fd;
	else
		notify(&fd, 1);
}

void soft_notify_finish(void)
{
	soft_assert_locked();
	notify(soft_device.engine->notify_fds, soft_device.engine->notify_count);
	soft_device.engine->notify_count = 0;
	/* The count only falls, because a thread needs the lock to increment it. */
	while (soft_observe(&soft_device.engine->notifying_threads))
		sched_yield();
}

void soft_unlock(void)
{
	soft_list_drain (struct soft_deferred, deferred, &soft_device.engine->deferred, node) {
		soft_list_remove(&deferred->node);
		if (soft_device.engine->running) /* false for work inherited by a fork */
			deferred->run(deferred);
	}
	soft_device.engine->current_channel = NULL;
	soft_device.engine->unlocks++;
	soft_note_locked(false);
	if (soft_device.engine->notify_count)
		unlock_and_notify();
	else
		pthread_mutex_unlock(&soft_device.engine->lock);
}

unsigned soft_unlock_count(void)
{
	return soft_device.engine->unlocks;
}

void soft_defer(struct soft_deferred *deferred)
{
	soft_assert_locked();
	if (soft_list_empty(&deferred->node))
		soft_list_append(&soft_device.engine->deferred, &deferred->node);
}

void soft_deferred_cancel(struct soft_deferred *deferred)
{
	soft_assert_locked();
	soft_list_remove(&deferred->node);
}

bool soft_engine_ticks(void)
{
	return soft_device.engine->thread_ticks;
}

struct soft_scratch *soft_scratch(void)
{
	return soft_device.engine->scratch;
}

size_t soft_step_byte_budget(void)
{
	return soft_device.engine->step_byte_budget;
}

/* ---- steps --------------------------------------------------------------------------------- */

/* Returns whether a thread may be asleep until an armed CQ gets a completion. After
 * POLLS_TO_TRUST_POLLER polls without arming a CQ, the answer is no, because the polling thread
 * also runs steps on behalf of sleeping threads. This is for applications that arm one CQ for a
 * sleeping thread and poll other CQs forever, as UCX does. If the polling thread stops, the
 * engine's thread notices at the next tick. Arming a CQ resets the count, so an application that
 * polls for a while, arms a CQ and goes to sleep does not have to wait for that tick. */
bool soft_engine_may_have_sleeper(void)
{
	soft_assert_locked();
	return soft_counter_get(&soft_device.engine->armed_cqs) &&
	       soft_device.engine->polls_since_armed < POLLS_TO_TRUST_POLLER;
}

/* Returns whether an application thread polls, or has announced that it will poll soon
 * (soft_announce_poll). It may poll later than announced. Rely on the announcement only while the
 * engine's thread is awake and handles the input that arrives until then. */
static bool polls_now_or_soon(void)
{
	return soft_counter_get(&soft_device.engine->spinning_threads) ||
	       (soft_device.engine->announced_polls && !soft_device.engine->thread_sleeps);
}

bool soft_application_polls(void)
{
	return polls_now_or_soon() ||
	       soft_device.engine->polls_since_armed >= POLLS_TO_TRUST_POLLER;
}

/* Request notifications from local peers if a thread may be asleep and no application thread is
 * polling. */
void soft_engine_update_notify_need(void)
{
	soft_assert_locked();
	bool may_sleep = soft_device.engine->thread_sleeps || soft_engine_may_have_sleeper();

	soft_device.engine->poller->set_need_notify(may_sleep && !polls_now_or_soon());
}

/* Decide whether a step calls epoll_wait or skips it to save a system call. Every step polls the
 * rings. A polling thread calls epoll_wait only once per EPOLL_INTERVAL_POLLING_NS, and a woken
 * thread that found input in a ring only once per EPOLL_INTERVAL_AFTER_RING_INPUT_NS. No event is
 * lost, because a ready descriptor stays ready and wakes the thread again. Returns true if the call
 * is due, and then restarts the interval. */
static bool take_epoll_turn(bool polling, bool found_ring_input)
{
	uint64_t interval = polling            ? EPOLL_INTERVAL_POLLING_NS
			    : found_ring_input ? EPOLL_INTERVAL_AFTER_RING_INPUT_NS
					       : 0;

	if (!interval || !soft_engine_has_polled_rings())
		return true;
	uint64_t now = soft_now();

	if (now - soft_device.engine->last_epoll_ns < interval)
		return false;
	soft_device.engine->last_epoll_ns = now;
	return true;
}

bool soft_engine_step(enum soft_step_runner runner)
{
	soft_assert_locked();
	if (!soft_device.engine->running)
		return false;
	soft_device.engine->last_step_unlocks = soft_device.engine->unlocks;
	bool found = soft_device.engine->poller->poll();

	if (runner != SOFT_BY_ENGINE && !take_epoll_turn(runner == SOFT_BY_POLLING, found))
		return found;
	int count = epoll_wait(soft_device.engine->epoll_fd, soft_device.engine->events,
			       SOFT_STEP_EVENTS, 0);

	if (count <= 0)
		return found;
	soft_device.engine->event_count = count;
	soft_device.engine->step_byte_budget = SOFT_STEP_BYTES / (size_t)count;
	for (int i = 0; i < count; i++) {
		struct soft_fd_watch *watch = soft_device.engine->events[i].data.ptr;

		if (!watch) /* stopped by an earlier callback of this step (soft_unwatch) */
			continue;
		watch->events = soft_device.engine->events[i].events;
		watch->ready(watch);
	}
	soft_device.engine->event_count = 0;
	soft_device.engine->step_byte_budget = SOFT_STEP_BYTES;
	return true;
}

/* Run a step in an application thread that holds the lock, and release the lock. `channel` is the
 * channel whose owner runs the step, or NULL. */
static void run_step_and_unlock(struct soft_channel *channel, enum soft_step_runner runner)
{
	soft_device.engine->current_channel = channel;
	if (runner == SOFT_BY_POLLING &&
	    soft_device.engine->polls_since_armed < POLLS_TO_TRUST_POLLER)
		soft_device.engine->polls_since_armed++;
	soft_engine_update_notify_need();
	if (soft_engine_has_delayed_output())
		soft_device.engine->delayer->send_delayed(SOFT_DELAY_NS);
	if (soft_engine_step(runner))
		soft_counter_add(&soft_device.engine->served_app_steps, 1);
	soft_unlock();
}

void soft_progress_for(struct soft_channel *channel)
{
	/* Wait for the lock instead of returning without a step. Another thread may already be
	 * doing the work that woke the caller. Without this wait, the caller would be woken
	 * repeatedly until that work is done. */
	soft_lock();
	/* A thread that spins before it sleeps (soft_busy_poll) polls with this function. */
	run_step_and_unlock(channel, soft_counter_get(&soft_device.engine->spinning_threads)
					     ? SOFT_BY_POLLING
					     : SOFT_BY_WOKEN);
}

void soft_progress(void)
{
	soft_progress_for(NULL);
}

void soft_progress_try(void)
{
	/* Let waiting threads go first. A polling thread would otherwise take the lock repeatedly
	 * before a waiting thread wakes up. */
	if (soft_counter_get(&soft_device.engine->lock_waiters) == 0 &&
	    pthread_mutex_trylock(&soft_device.engine->lock) == 0) {
		soft_note_locked(true);
		run_step_and_unlock(NULL, SOFT_BY_POLLING);
	}
}

/* Sleep until a descriptor is ready, but at most for a tick, and then run a step. */
static void sleep_and_run_step(void)
{
	struct pollfd fd = {.fd = soft_device.engine->epoll_fd, .events = POLLIN};
	const struct timespec tick = {.tv_nsec = SOFT_TICK_NS};
	int old_cancel_state;

	/* ppoll is a cancellation point, but ibv_poll_cq(3) must not be one. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &old_cancel_state);
	ppoll(&fd, 1, &tick, NULL);
	pthread_setcancelstate(old_cancel_state, NULL);
	soft_progress_try();
}

/* Yield now and then while polling finds nothing, because the thread of the peer's device may
 * need the same processor. A yield costs almost nothing if no other thread needs the
 * processor. If other threads are computing, however, the kernel may not run the yielding
 * thread again for milliseconds, and the next message has to wait. After consecutive slow
 * yields, the thread therefore sleeps instead. A sleeping thread keeps its time slice, and the
 * next message wakes it. */
void soft_progress_missed(unsigned misses)
{
	/* Stay awake if there are rings to poll, because peers do not notify a polling thread, or
	 * if a thread is spinning, because it is about to sleep anyway. */
	const bool stays_awake = soft_engine_has_polled_rings() ||
				 soft_counter_get(&soft_device.engine->spinning_threads);

	if (misses % (stays_awake ? MISSES_PER_YIELD : MISSES_PER_YIELD_EPOLL))
		return;
	if (stays_awake) {
		sched_yield();
		return;
	}
	const uint64_t now = soft_now();

	if (now < soft_hint_get(&soft_device.engine->no_yield_until)) {
		sleep_and_run_step();
		return;
	}
	sched_yield();
	const uint64_t took = soft_now() - now;

	/* A single slow yield may have been caused by the hypervisor. */
	if (took < SLOW_YIELD_NS)
		soft_hint_set(&soft_device.engine->slow_yields, 0);
	else if (soft_counter_add(&soft_device.engine->slow_yields, 1) > 1)
		soft_hint_set(&soft_device.engine->no_yield_until,
			      now + took + NO_YIELD_FACTOR * took);
}

void soft_engine_count_armed(int change)
{
	soft_counter_add(&soft_device.engine->armed_cqs, (unsigned)change);
}

/* Update whether local peers must notify this process, even if there are no rings to poll now. If
 * the process connects to itself, a later call that runs no step may write a record to a ring of
 * this process. The record wakes a sleeping thread only if notifications were requested before it
 * was written. */
void soft_engine_prepare_sleep(void)
{
	soft_lock();
	soft_device.engine->polls_since_armed = 0;
	soft_engine_update_notify_need();
	soft_unlock();
}

void soft_busy_poll(int starts)
{
	soft_counter_add(&soft_device.engine->spinning_threads, starts ? 1u : -1u);
	if (!starts)
		soft_engine_prepare_sleep();
}

void soft_announce_poll(int change)
{
	soft_lock();
	/* A fork resets the count, so a matching decrement in the child may find it at 0. */
	if (change >= 0 || soft_device.engine->announced_polls)
		soft_device.engine->announced_polls += (unsigned)change;
	if (!soft_device.engine->announced_polls && soft_engine_has_delayed_output())
		soft_device.engine->delayer->send_delayed(SOFT_DELAY_NS);
	soft_engine_update_notify_need();
	soft_unlock();
}

bool soft_engine_may_delay_output(unsigned *seen_step)
{
	soft_assert_locked();
	/* The lock has not been released since the last step began. */
	const bool in_step = soft_device.engine->last_step_unlocks == soft_device.engine->unlocks;

	if (!soft_device.engine->announced_polls || !soft_device.engine->thread_ticks || in_step)
		return false;
	bool is_first_call = *seen_step != soft_device.engine->last_step_unlocks;

	*seen_step = soft_device.engine->last_step_unlocks;
	return !is_first_call;
}

unsigned soft_engine_mid_message_frames(void)
{
	return soft_counter_get(&soft_device.engine->mid_message_frames);
}

unsigned soft_engine_progress_count(void)
{
	return soft_counter_get(&soft_device.engine->served_app_steps) +
	       soft_engine_mid_message_frames();
}

unsigned soft_engine_writes(bool notified)
{
	return soft_counter_get(&soft_device.engine->writes[notified]);
}

uint64_t soft_peer_wakeups(void)
{
	const uint64_t notified = soft_engine_writes(true), unnotified = soft_engine_writes(false);

	return notified << 32 | unnotified;
}

void soft_engine_count_write(bool notified)
{
	soft_assert_locked();
	soft_counter_bump(&soft_device.engine->writes[notified]);
}

void soft_engine_count_mid_message_frame(void)
{
	soft_assert_locked();
	soft_counter_bump(&soft_device.engine->mid_message_frames);
}

bool soft_channel_is_current(const struct soft_channel *channel)
{
	return soft_device.engine->current_channel == channel;
}
