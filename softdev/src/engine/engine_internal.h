/* The engine's state, for the sources of this folder.  Under the lock, except for members marked
 * atomic. */
#pragma once

#include <sys/epoll.h>

#include "engine.h"

enum {
	SOFT_NOTIFY_MOST = 8 /* the rest is written under the lock */
};

struct soft_engine {
	pthread_mutex_t users_mutex; /* starting and stopping */
	unsigned users; /* under it, as the next */
	bool has_started; /* once, in this process or in one that forked it */
	/* An empty file.  A program that closes all descriptors, as daemons do when they start, closes
	 * this one as well, and its number may then be another file's. */
	struct {
		int fd; /* -1: none */
		dev_t device;
		ino_t inode;
	} mark;

	pthread_mutex_t lock;
	unsigned unlocks; /* how often the lock has been given back */
	unsigned waiting; /* atomic: threads blocked in soft_lock; progress makes room for them */
	unsigned served; /* atomic: steps of application threads that found something to do */
	unsigned parts; /* atomic: soft_engine_count_part */
	unsigned writes[2]; /* atomic: writes to peers, to awake ones and to notified ones */
	unsigned armed; /* atomic: CQs that are armed to signal a channel */
	unsigned spinning; /* atomic: threads that spin before they sleep */
	unsigned stepped; /* the value of `unlocks` at the last step */
	unsigned holding; /* spinning threads that have gone to work and will poll again */
	unsigned polls_since_armed; /* steps of polling threads; see soft_engine_armed_counts */
	unsigned fork_generation; /* grows in the child of a fork, and with `losses` */
	unsigned losses; /* of the descriptors: soft_engine_check_descriptors */
	bool descriptors_lost; /* none is closed, since each may be another file's by now */
	bool running;
	bool stopping; /* atomic */
	bool ticking; /* the thread leaves the work to the application, and polls every tick */
	bool asleep; /* the thread is in epoll_wait, or on its way */
	unsigned turns_lost; /* atomic: to others, in a row: soft_progress_missed */
	uint64_t crowded_until; /* atomic: no thread yields before that time */
	uint64_t epoll_at; /* the last epoll_wait of a thread that skips it at times */
	uint32_t silent; /* ports whose watches are not served */

	int epoll_fd; /* all that is watched */
	int wake_fd; /* eventfd that ends the engine's thread, should it sleep */
	struct soft_fd_watch step_event; /* eventfd: there is work that no other descriptor shows */
	struct soft_fd_watch alarm; /* timerfd of timer.c */
	pthread_t thread;

	struct soft_node watches; /* everything watched */
	struct soft_node channels;
	struct soft_timer *timers; /* the first to expire: the root of the heap */
	uint64_t alarm_at; /* what the timerfd is set to; 0 for off */
	struct soft_node deferred; /* to be done before the lock is given back */
	struct soft_channel *current; /* whose owner runs the step under way */
	/* Descriptors to be written when the lock has been given back. */
	int notify[SOFT_NOTIFY_MOST];
	int notify_count;
	unsigned notifying; /* atomic: threads that write to such descriptors now */

	struct epoll_event events[SOFT_STEP_EVENTS]; /* of the step under way */
	int event_count;
	size_t share;
	struct soft_scratch *scratch;

	const struct soft_subsystem *const *subsystems;
	const struct soft_subsystem *poller; /* has poll, has_input and need_notify */
	const struct soft_subsystem *delayer; /* has send_delayed */
	bool polls; /* atomic: soft_engine_set_polls */
	bool delayed; /* atomic: soft_engine_set_delayed */
};

/* getrandom(2), or the same from /dev/urandom where that call is denied. */
ssize_t soft_read_random(void *to, size_t length, unsigned flags);

/* calls.c: 0, or the errno value of a system call that the engine needs and the kernel denies. */
int soft_check_calls(void);

#define EACH_SUBSYSTEM(it)                                                                         \
	for (const struct soft_subsystem *const *it = soft_device.engine->subsystems; *it; it++)

/* For soft_assert_locked: this thread has the lock from now on, or no more. */
#ifdef AIORDMA_CHECK_LOCKS
void soft_note_locked(bool locked);
#else
static inline void soft_note_locked(bool locked)
{
	(void)locked;
}
#endif

/* How long a subsystem's output may be delayed: for a step of an application thread, and for a tick
 * of the engine's thread. */
#define SOFT_DELAY_NS 20000u
#define SOFT_DELAY_TICK_NS 100000u

/* The thread that makes a step: the engine's, one that has been woken, one that polls. */
enum soft_step_by { SOFT_BY_ENGINE, SOFT_BY_WOKEN, SOFT_BY_POLLING };

/* engine.c.  The end of the step is in soft_unlock.  Returns whether there was work. */
bool soft_engine_step(enum soft_step_by who);
/* Is there something to be polled?  Without the lock: a hint. */
static inline bool soft_engine_polls(void)
{
	return soft_hint_get(&soft_device.engine->polls);
}

static inline bool soft_engine_has_delayed(void)
{
	return soft_hint_get(&soft_device.engine->delayed);
}

/* Tell the poller whether peers must notify this process.  Called before any thread sleeps. */
void soft_engine_update_notify_need(void);

/* engine.c.  May a thread sleep on the channel of an armed CQ without another one that polls?  While
 * some thread polls, its steps bring the event of any CQ. */
bool soft_engine_armed_counts(void);

/* channel.c.  Is a thread possibly asleep on a channel that only the engine's thread can
 * signal?  That is so when the application has armed a CQ and waits with its own poll() on a
 * channel whose fd shows nothing but signals. */
bool soft_channels_depend_on_engine(void);
/* soft_platform.alarm: when the first timer is due. */
void soft_engine_alarm(uint64_t deadline_ns);
void soft_timers_forget(void);

/* lifecycle.c: registers the fork hook.  0 or an errno value; safe to repeat. */
int soft_engine_guard_fork(void);
bool soft_engine_lost_descriptors(void);

/* thread.c: what the engine's thread runs. */
void *soft_engine_run(void *unused);
