/* The engine's own thread, which makes progress while no application thread does.
 *
 * The thread sleeps without a timeout, so an idle process uses no CPU time. When it wakes up, it
 * leaves the work to the application if two conditions hold. An application thread must have served
 * work since the last check, and no application thread may be asleep that only the engine's thread
 * can wake. The engine's thread then ticks: it polls every half millisecond and serves only work
 * that has been ready for a whole tick. Once it has had to serve such work, it serves all work
 * immediately until the application serves work again. If that happens several times in a row, it
 * stops ticking for a while.
 */
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>

#include "engine_internal.h"

enum {
	MAX_QUIET_TICKS = 8, /* idle ticks before the thread sleeps again */
	MAX_TICKS_OF_FAILURE = 3,
	FAILURES_BEFORE_PAUSE = 8,
};

#define MIN_PAUSE_NS 50000000u
#define MAX_PAUSE_NS 1000000000u

static bool is_stopping(void)
{
	return soft_observe(&soft_device.engine->stopping);
}

/* Let waiting threads take the lock first. Otherwise, this thread would starve them by reacquiring
 * the lock before they wake up. */
static void yield_to_waiters(void)
{
	for (int i = 0; i < 50 && soft_counter_get(&soft_device.engine->lock_waiters); i++)
		sched_yield();
}

/* Run a step of the engine's thread. */
static void run_step(void)
{
	yield_to_waiters();
	soft_lock();
	soft_engine_step(SOFT_BY_ENGINE);
	soft_unlock();
}

/* Returns whether a step would find work. */
static bool work_is_ready(void)
{
	struct epoll_event event;

	if (epoll_wait(soft_device.engine->epoll_fd, &event, 1, 0) > 0)
		return true;
	if (!soft_engine_has_polled_rings())
		return false;
	soft_lock();
	bool ready = soft_device.engine->poller->has_input();

	soft_unlock();
	return ready;
}

/* Record whether the thread sleeps. Before it sleeps, request notifications from local peers. */
static void set_asleep(bool asleep)
{
	soft_lock();
	soft_device.engine->thread_sleeps = asleep;
	if (asleep)
		soft_engine_update_notify_need();
	soft_unlock();
}

/* Stop the engine if the program has closed the engine's descriptors. Returns whether it has.
 * Without this check, the thread would poll descriptors that are always or never ready. */
static bool stop_if_descriptors_lost(void)
{
	soft_lock();
	bool lost = soft_engine_lost_descriptors();

	if (lost)
		soft_device.engine->running = false;
	soft_unlock();
	return lost;
}

/* Sleep until there is work or wake_fd tells the thread to stop. */
static void sleep_until_work(void)
{
	/* wake_fd is not in the epoll set, because it would wake application threads there. */
	struct pollfd fds[2] = {
		{.fd = soft_device.engine->epoll_fd, .events = POLLIN},
		{.fd = soft_device.engine->wake_fd, .events = POLLIN},
	};

	set_asleep(true);
	/* soft_engine_handle_lost_descriptors() cancels the thread, but only while it sleeps. */
	pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
	poll(fds, 2, -1);
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
	set_asleep(false);
}

/* Start ticking, which means polling at intervals and leaving the work to the application. Does
 * nothing if a sleeping application thread can only be woken by the engine's thread. Returns
 * whether the thread ticks. */
static bool try_start_ticking(void)
{
	soft_lock();
	soft_device.engine->thread_ticks =
		!soft_engine_may_have_sleeper() || !soft_channels_depend_on_engine();
	bool ticks = soft_device.engine->thread_ticks;

	soft_unlock();
	return ticks;
}

/* Tick until the application leaves work unserved for a whole tick, or is idle for MAX_QUIET_TICKS
 * ticks. Returns whether it left work unserved, and stores the number of ticks in `*ticks`. */
static bool tick(unsigned *seen_app_steps, unsigned *ticks)
{
	const struct timespec interval = {.tv_nsec = SOFT_TICK_NS};
	bool left_unserved = false;

	*ticks = 0;
	for (int quiet = 0; quiet < MAX_QUIET_TICKS && !left_unserved && !is_stopping();) {
		nanosleep(&interval, NULL);
		++*ticks;
		unsigned served = soft_counter_get(&soft_device.engine->served_app_steps);

		if (soft_engine_has_delayed_output()) {
			soft_lock();
			soft_device.engine->delayer->send_delayed(SOFT_DELAY_TICK_NS);
			soft_unlock();
		}
		if (served != *seen_app_steps) {
			*seen_app_steps = served;
			quiet = 0;
		} else if (work_is_ready()) {
			left_unserved = true;
		} else {
			quiet++;
		}
	}
	soft_lock();
	soft_device.engine->thread_ticks = false;
	if (left_unserved) /* the application has stopped polling (soft_engine_may_have_sleeper) */
		soft_device.engine->polls_since_armed = 0;
	/* Without ticks, nothing sends this output until the application's next step. */
	soft_device.engine->delayer->send_delayed(0);
	soft_unlock();
	return left_unserved;
}

/* History from which the engine's thread decides whether to tick or to serve work immediately. */
struct tick_history {
	unsigned seen_app_steps; /* engine.served_app_steps at the last check */
	bool app_served; /* whether the application has served work since this thread last did */
	unsigned failures; /* consecutive failures of ticking (leave_to_application) */
	uint64_t no_tick_until; /* time before which the thread does not tick */
	uint64_t pause_ns; /* length of the pause that follows FAILURES_BEFORE_PAUSE failures */
};

/* Tick while the application serves the work that is ready, if it has served work before and no
 * sleeping thread depends on the engine's thread. Returns false if the engine's thread must serve
 * the work. */
static bool leave_to_application(struct tick_history *tick_history)
{
	unsigned served = soft_counter_get(&soft_device.engine->served_app_steps);

	if (served != tick_history->seen_app_steps) {
		tick_history->seen_app_steps = served;
		tick_history->app_served = true;
	}
	if (!tick_history->app_served || soft_now() < tick_history->no_tick_until ||
	    !try_start_ticking())
		return false;
	unsigned ticks;
	bool left_unserved = tick(&tick_history->seen_app_steps, &ticks);

	/* Count a failure if the application soon stops serving work. For example, it may poll
	 * the CQ while it has outstanding requests, and then only read its memory until a peer's
	 * write arrives. Ticking would delay that write. An application that stops serving after
	 * more than MAX_TICKS_OF_FAILURE ticks has probably just been interrupted. */
	if (!left_unserved || ticks > MAX_TICKS_OF_FAILURE) {
		tick_history->failures = 0;
		tick_history->pause_ns = MIN_PAUSE_NS;
	} else if (++tick_history->failures >= FAILURES_BEFORE_PAUSE) {
		tick_history->failures = 0;
		tick_history->no_tick_until = soft_now() + tick_history->pause_ns;
		if (tick_history->pause_ns < MAX_PAUSE_NS)
			tick_history->pause_ns *= 2;
	}
	return !left_unserved;
}

/* Sleep until there is work, and serve it unless the application does, until the engine stops. */
static void run(void)
{
	struct tick_history tick_history = {
		.seen_app_steps = soft_counter_get(&soft_device.engine->served_app_steps),
		.pause_ns = MIN_PAUSE_NS,
	};

	prctl(PR_SET_NAME, "aiordma-device");
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
	while (!is_stopping()) {
		sleep_until_work();
		if (stop_if_descriptors_lost())
			return;
		if (is_stopping() || leave_to_application(&tick_history))
			continue;
		tick_history.app_served = false;
		run_step();
	}
}

#ifdef __SANITIZE_ADDRESS__
void __asan_handle_no_return(void);

/* Tell AddressSanitizer that the cancelled thread has abandoned its stack frames. Otherwise, it
 * would consider the frames still in use. */
static void cancelled(void *unused)
{
	(void)unused;
	__asan_handle_no_return();
}
#endif

void *soft_engine_run(void *unused)
{
	(void)unused;
#ifdef __SANITIZE_ADDRESS__
	/* The thread may be cancelled (soft_engine_handle_lost_descriptors). */
	pthread_cleanup_push(cancelled, NULL);
	run();
	pthread_cleanup_pop(0);
#else
	run();
#endif
	return NULL;
}
