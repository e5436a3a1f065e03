/* The engine: one lock, one epoll set, one thread for everything the device does in this process.
 *
 * Who makes progress.  The device's work (reading streams, answering, completing, timers) is a
 * "step": collect ready sources, serve each within a bounded number of bytes, then do what was put
 * off to the end.  Any thread may run a step if it gets the lock without waiting.  A thread of the
 * application that polls an empty CQ or waits for an event runs it itself, because being woken by
 * another thread costs 10 to 25 us a message.  The engine's own thread is for the time when no
 * thread of the application comes by: a peer's RDMA reads must be served while the application
 * computes.
 *
 * How the engine's own thread keeps out of the way: thread.c.  What it watches: fd_watch.c.
 *
 * What is asked.  A step looks into the rings of local peers first (wakeup.c), without a system
 * call, then into the epoll set; a thread that polls, while there are such rings, asks epoll every
 * two microseconds, and one that was woken and has found in a ring what it was woken for asks now
 * and then only.  Local peers need not ring as long as somebody is sure to come by.  That is so
 * while the engine's thread stands back or works, unless a completion queue is armed, because then
 * a thread of the application may go to sleep without telling us; and while a thread looks again
 * and again before it sleeps.  Where the first of these ends and the next begins,
 * soft_engine_update_notify_need is called before anybody sleeps: with the sleep of the engine's
 * thread, with arming, with the end of looking.  A polling application finds its work in the rings,
 * which wakes nobody: so the engine's thread is roused once, to stand back for as long as that goes
 * on.
 *
 * Why one lock.  A step is short (at most about a megabyte copied), queue pairs of one process
 * mostly talk to each other's threads anyway, and one lock makes "no access after dereg_mr returns"
 * and "no callback after unwatch" true by construction.
 */
#include <time.h>
#include <unistd.h>

#include "engine_internal.h"

enum {
	ASK_NS = 2000,
	FIND_NS = SOFT_TICK_NS,
};

/* In place of a folder that is not there, as in tests of those below it. */
static bool nothing_to_poll(void)
{
	return false;
}

static void need_not_notify(bool on)
{
	(void)on;
}

static void nothing_delayed(uint64_t age_ns)
{
	(void)age_ns;
}

static const struct soft_subsystem no_subsystem = {
	.poll = nothing_to_poll,
	.has_input = nothing_to_poll,
	.need_notify = need_not_notify,
	.send_delayed = nothing_delayed,
};
static const struct soft_subsystem *const no_subsystems[] = {NULL};

struct soft_engine engine = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.epoll_fd = -1,
	.shared_epoll_fd = -1,
	.wake_fd = -1,
	.watches = {&engine.watches, &engine.watches},
	.deferred = {&engine.deferred, &engine.deferred},
	.share = SOFT_STEP_BYTES,
	.subsystems = no_subsystems,
	.poller = &no_subsystem,
	.delayer = &no_subsystem,
};

/* ---- subsystems ---------------------------------------------------------------------------- */

void soft_engine_use(const struct soft_subsystem *const subsystems[])
{
	engine.subsystems = subsystems;
	for (const struct soft_subsystem *const *it = subsystems; *it; it++) {
		if ((*it)->poll)
			engine.poller = *it;
		if ((*it)->send_delayed)
			engine.delayer = *it;
	}
}

void soft_engine_port_changed(enum soft_port_change change)
{
	for (const struct soft_subsystem *const *it = engine.subsystems; *it; it++)
		if ((*it)->port_changed)
			(*it)->port_changed(change);
}

void soft_engine_set_polls(bool polls)
{
	__atomic_store_n(&engine.polls, polls, __ATOMIC_RELAXED);
}

void soft_engine_set_delayed(bool delayed)
{
	__atomic_store_n(&engine.delayed, delayed, __ATOMIC_RELAXED);
}

void soft_engine_before_sleep(void)
{
	if (!soft_engine_has_delayed())
		return;
	soft_lock();
	engine.delayer->send_delayed(0);
	soft_unlock();
}

/* ---- the lock ------------------------------------------------------------------------------ */

void soft_lock(void)
{
	if (pthread_mutex_trylock(&engine.lock) == 0)
		return;
	__atomic_fetch_add(&engine.waiting, 1, __ATOMIC_RELAXED);
	pthread_mutex_lock(&engine.lock);
	__atomic_fetch_sub(&engine.waiting, 1, __ATOMIC_RELAXED);
}

bool soft_lock_soon(void)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec++;
	return pthread_mutex_timedlock(&engine.lock, &until) == 0;
}

void soft_unlock(void)
{
	while (!soft_list_empty(&engine.deferred)) {
		struct soft_deferred *deferred =
			soft_list_entry(engine.deferred.next, struct soft_deferred, node);

		soft_list_remove(&deferred->node);
		if (engine.running) /* not with what a child has inherited */
			deferred->run(deferred);
	}
	engine.current = NULL;
	engine.unlocks++;
	pthread_mutex_unlock(&engine.lock);
}

unsigned soft_lock_turn(void)
{
	return engine.unlocks;
}

void soft_defer(struct soft_deferred *deferred)
{
	if (soft_list_empty(&deferred->node))
		soft_list_append(&engine.deferred, &deferred->node);
}

void soft_deferred_cancel(struct soft_deferred *deferred)
{
	soft_list_remove(&deferred->node);
}

bool soft_engine_ticks(void)
{
	return engine.ticking;
}

struct soft_scratch *soft_scratch(void)
{
	return engine.scratch;
}

size_t soft_step_share(void)
{
	return engine.share;
}

/* ---- steps --------------------------------------------------------------------------------- */

/* Must local peers ring?  Not when somebody is sure to come by.  Who stays may take longer than he
 * thought, so he counts only while the engine's thread comes by every tick. */
void soft_engine_update_notify_need(void)
{
	bool armed = __atomic_load_n(&engine.armed, __ATOMIC_RELAXED);
	bool spinning = __atomic_load_n(&engine.spinning, __ATOMIC_RELAXED);
	bool holding = engine.holding && !engine.asleep;

	engine.poller->need_notify(!spinning && !holding && (armed || engine.asleep));
}

/* The engine's thread shall come by every tick. */
static void wake_thread(void)
{
	const uint64_t one = 1;

	if (!engine.running || !engine.asleep || soft_now() < engine.trust_at)
		return;
	engine.asleep = false;
	(void)!write(engine.wake_fd, &one, sizeof(one));
}

/* A thread of the application polls and has found something, while the engine's thread sleeps: that
 * shall come by every tick, so that local peers need not ring. */
static void start_ticking(void)
{
	if (!__atomic_load_n(&engine.armed, __ATOMIC_RELAXED))
		wake_thread();
}

/* The rings are looked into every time, and epoll, which is a system call, is asked every so often by
 * who polls, and by who has been woken and found in a ring what he was woken for.  What else is ready
 * stays so: it wakes him again. */
static bool need_not_ask(bool polling, bool found)
{
	uint64_t patience = polling ? ASK_NS : found ? FIND_NS : 0;

	if (!patience || !soft_engine_polls())
		return false;
	uint64_t now = soft_now();

	if (now - engine.asked_at < patience)
		return true;
	engine.asked_at = now;
	return false;
}

bool soft_engine_step(enum soft_step_by who)
{
	if (!engine.running)
		return false;
	bool found = engine.poller->poll();

	if (who != SOFT_BY_ENGINE && need_not_ask(who == SOFT_BY_POLLING, found))
		return found;
	int count = epoll_wait(engine.epoll_fd, engine.events, SOFT_STEP_EVENTS, 0);

	if (count <= 0)
		return found;
	engine.event_count = count;
	engine.share = SOFT_STEP_BYTES / (size_t)count;
	for (int i = 0; i < count; i++) {
		struct soft_fd_watch *watch = engine.events[i].data.ptr;

		if (watch)
			watch->ready(watch, engine.events[i].events);
	}
	engine.event_count = 0;
	engine.share = SOFT_STEP_BYTES;
	return true;
}

static void progress(struct soft_channel *channel, enum soft_step_by who)
{
	engine.current = channel;
	soft_engine_update_notify_need();
	if (soft_engine_has_delayed())
		engine.delayer->send_delayed(SOFT_DELAY_NS);
	if (soft_engine_step(who)) {
		__atomic_fetch_add(&engine.served, 1, __ATOMIC_RELAXED);
		if (soft_engine_polls())
			start_ticking();
	}
	soft_unlock();
}

void soft_progress_for(struct soft_channel *channel)
{
	/* Waiting for the lock, not trying: the caller may have been woken by work that another
	 * thread is doing at this moment, and would be woken for it again and again. */
	soft_lock();
	progress(channel, __atomic_load_n(&engine.spinning, __ATOMIC_RELAXED) ? SOFT_BY_POLLING
									      : SOFT_BY_WOKEN);
}

void soft_progress(void)
{
	soft_progress_for(NULL);
}

void soft_progress_try(void)
{
	/* A polling thread would take the lock again and again before a waiting one wakes up. */
	if (__atomic_load_n(&engine.waiting, __ATOMIC_RELAXED) == 0 &&
	    pthread_mutex_trylock(&engine.lock) == 0)
		progress(NULL, SOFT_BY_POLLING);
}

void soft_engine_armed(int change)
{
	__atomic_fetch_add(&engine.armed, (unsigned)change, __ATOMIC_RELAXED);
}

/* Also when no local peer is attended now: what is put before one later, by a call that makes no
 * progress, is announced only if it is known then that nobody comes by. */
void soft_engine_may_sleep(void)
{
	soft_lock();
	soft_engine_update_notify_need();
	soft_unlock();
}

void aiordma_embedded_spin(int begins)
{
	__atomic_fetch_add(&engine.spinning, begins ? 1u : -1u, __ATOMIC_RELAXED);
	if (!begins)
		soft_engine_may_sleep();
}

void aiordma_embedded_stay(int change)
{
	soft_lock();
	if (change >= 0 || engine.holding) /* else it was said before a fork */
		engine.holding += (unsigned)change;
	if (change >= 0)
		wake_thread();
	soft_engine_update_notify_need();
	soft_unlock();
}

unsigned aiordma_embedded_steps(void)
{
	return __atomic_load_n(&engine.served, __ATOMIC_RELAXED);
}

unsigned aiordma_embedded_parts(void)
{
	return __atomic_load_n(&engine.parts, __ATOMIC_RELAXED);
}

unsigned aiordma_embedded_woke(void)
{
	return __atomic_load_n(&engine.met[true], __ATOMIC_RELAXED);
}

unsigned aiordma_embedded_met_awake(void)
{
	return __atomic_load_n(&engine.met[false], __ATOMIC_RELAXED);
}

void soft_engine_count_write(bool asleep)
{
	__atomic_store_n(&engine.met[asleep], engine.met[asleep] + 1, __ATOMIC_RELAXED);
}

void soft_engine_count_part(void)
{
	__atomic_store_n(&engine.parts, engine.parts + 1, __ATOMIC_RELAXED);
}

bool soft_channel_is_current(const struct soft_channel *channel)
{
	return engine.current == channel;
}
