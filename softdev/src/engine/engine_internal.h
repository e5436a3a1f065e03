/* The engine's state, shared by the sources of this folder. Unless stated otherwise, members are
 * protected by the lock. */
#pragma once

#include <sys/epoll.h>

#include "engine.h"

enum {
	/* maximum number of descriptors written after the lock has been released; any others are
	 * written under the lock */
	SOFT_MAX_NOTIFY_FDS = 8
};

struct soft_engine {
	pthread_mutex_t users_mutex; /* protects starting and stopping */
	unsigned users; /* protected by `users_mutex`, like `has_started` */
	bool has_started; /* true once started in this process or an ancestor */
	/* A file that is used only to detect that a program has closed all descriptors, as daemons
	 * do when they start. If another file then reuses the number, it has a different inode. */
	struct {
		int fd; /* -1 if none */
		dev_t device;
		ino_t inode;
	} sentinel;

	pthread_mutex_t lock;
	unsigned unlocks; /* number of times the lock has been released */
	unsigned lock_waiters; /* atomic: threads blocked in soft_lock; pollers let them go first */
	unsigned served_app_steps; /* atomic: steps of application threads that found work */
	unsigned mid_message_frames; /* atomic: see soft_engine_count_mid_message_frame */
	unsigned writes[2]; /* atomic: writes to [0] awake peers, [1] peers that were notified */
	unsigned armed_cqs; /* atomic: CQs armed to signal a channel */
	unsigned spinning_threads; /* atomic: threads spinning before they sleep */
	unsigned last_step_unlocks; /* value of `unlocks` at the last step */
	unsigned announced_polls; /* threads that have called soft_announce_poll */
	unsigned polls_since_armed; /* steps of polling threads; see soft_engine_may_have_sleeper */
	unsigned fork_generation; /* incremented in a forked child and with `descriptor_losses` */
	unsigned descriptor_losses; /* number of times the program has closed the descriptors */
	bool descriptors_lost; /* set to avoid closing numbers that other files may have reused */
	bool running;
	bool stopping; /* atomic */
	bool thread_ticks; /* whether the engine's thread ticks and leaves work to applications */
	bool thread_sleeps; /* whether the engine's thread is in poll(), or about to call it */
	unsigned slow_yields; /* atomic: consecutive yields that cost a time slice */
	uint64_t no_yield_until; /* atomic: until then, pollers sleep instead of yielding */
	uint64_t last_epoll_ns; /* time when epoll_wait was last due (take_epoll_turn) */
	uint32_t down_ports; /* ports whose watches are not served */

	int epoll_fd; /* contains all watched descriptors */
	int wake_fd; /* eventfd that tells the engine's thread to exit */
	struct soft_fd_watch step_event; /* eventfd: work that no other descriptor reports */
	struct soft_fd_watch alarm; /* timerfd used by timer.c */
	pthread_t thread;

	struct soft_node watches; /* all soft_fd_watch.node */
	struct soft_node channels;
	struct soft_timer *timers; /* root of the heap, which is the first timer to expire */
	uint64_t alarm_deadline_ns; /* deadline of the timerfd; 0 if disarmed */
	struct soft_node deferred; /* work to run before the lock is released */
	struct soft_channel *current_channel; /* channel whose owner runs the current step */
	/* Descriptors to write after the lock has been released. */
	int notify_fds[SOFT_MAX_NOTIFY_FDS];
	int notify_count;
	unsigned notifying_threads; /* atomic: threads that write notifications without the lock */

	struct epoll_event events[SOFT_STEP_EVENTS]; /* events of the current step */
	int event_count;
	size_t step_byte_budget;
	struct soft_scratch *scratch;

	const struct soft_subsystem *const *subsystems;
	const struct soft_subsystem *poller; /* subsystem with a `poll` function */
	const struct soft_subsystem *delayer; /* subsystem with send_delayed */
	bool has_polled_rings; /* atomic: see soft_engine_set_has_polled_rings */
	bool has_delayed_output; /* atomic: see soft_engine_set_has_delayed_output */
};

/* Call getrandom(2), or read /dev/urandom if that call is denied. */
ssize_t soft_read_random(void *to, size_t length, unsigned flags);

/* Check the system calls that the engine needs. Returns 0, or the errno value of a call that the
 * kernel denies (calls.c). */
int soft_check_calls(void);

#define EACH_SUBSYSTEM(it)                                                                         \
	for (const struct soft_subsystem *const *it = soft_device.engine->subsystems; *it; it++)

/* Record for soft_assert_locked whether this thread holds the lock. */
#ifdef AIORDMA_CHECK_LOCKS
void soft_note_locked(bool locked);
#else
static inline void soft_note_locked(bool locked)
{
	(void)locked;
}
#endif

/* Minimum age in nanoseconds of delayed output that a step of an application thread sends. */
#define SOFT_DELAY_NS 20000u
/* Minimum age in nanoseconds of delayed output that a tick of the engine's thread sends. */
#define SOFT_DELAY_TICK_NS 100000u

/* The kind of thread that runs a step: the engine's thread, an application thread that was woken,
 * or an application thread that polls. */
enum soft_step_runner { SOFT_BY_ENGINE, SOFT_BY_WOKEN, SOFT_BY_POLLING };

/* Run a step without its deferred work, which soft_unlock runs. Returns whether there was work
 * (engine.c). */
bool soft_engine_step(enum soft_step_runner runner);
/* Returns whether there may be rings to poll. Does not need the lock. */
static inline bool soft_engine_has_polled_rings(void)
{
	return soft_hint_get(&soft_device.engine->has_polled_rings);
}

static inline bool soft_engine_has_delayed_output(void)
{
	return soft_hint_get(&soft_device.engine->has_delayed_output);
}

/* Set whether peers must notify this process (soft_subsystem.set_need_notify). Called before any
 * thread sleeps. */
void soft_engine_update_notify_need(void);

/* Returns whether a thread may be sleeping on an armed CQ's channel while no other thread polls.
 * While a thread polls, its steps find the events of all CQs (engine.c). */
bool soft_engine_may_have_sleeper(void);

/* Returns whether a thread may be asleep on a channel that only the engine's thread can signal. For
 * example, the application may wait for an event (soft_channel.armed_sources) in its own poll() on
 * a channel that is not nested (channel.c). */
bool soft_channels_depend_on_engine(void);
/* Set the timerfd. Implements soft_platform.alarm. */
void soft_engine_alarm(uint64_t deadline_ns);
/* Stop all timers. */
void soft_timers_stop_all(void);

/* Register the fork handlers. Returns 0 or an errno value. Safe to repeat (lifecycle.c). */
int soft_engine_guard_fork(void);
/* Returns whether the program has closed the engine's descriptors. Called under the lock. */
bool soft_engine_lost_descriptors(void);

/* The main function of the engine's thread (thread.c). */
void *soft_engine_run(void *unused);
