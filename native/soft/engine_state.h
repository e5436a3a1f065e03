/* The engine's state, for its own rooms only: engine.c, engine_thread.c, engine_life.c, sources.c,
 * nesting.c and bells.c.  Under the lock, but for what says that it is atomic. */
#ifndef AIORDMA_SOFT_ENGINE_STATE_H
#define AIORDMA_SOFT_ENGINE_STATE_H

#include <sys/epoll.h>

#include "engine.h"

struct soft_engine {
	pthread_mutex_t lock;
	unsigned turns;       /* how often the lock has been given back */
	unsigned waiting; /* atomic: threads blocked in soft_lock; progress makes room for them */
	unsigned served; /* atomic: steps of application threads that found something to do */
	unsigned parts; /* atomic: see embedded.h */
	unsigned met[2]; /* atomic: the same, awake and asleep */
	unsigned armed; /* atomic: CQs that are to wake somebody through a channel */
	unsigned spinning; /* atomic: threads that look again and again for a moment */
	unsigned staying; /* those that have something else to do, and come back */
	unsigned incarnation; /* grows in the child of a fork */
	bool running;
	bool stopping; /* atomic */
	bool ticking; /* the thread stands back, and looks around every tick */
	bool asleep; /* the thread is in epoll_wait, or on its way */
	uint64_t trust_at; /* it does not stand back before that */
	uint64_t asked_at; /* epoll was asked, by a thread that polls */
	bool silent; /* sources of the port are not served */

	int epoll_fd; /* all that is watched */
	int rest_fd; /* but for bells that event loops watch themselves (bells.c) */
	int wake_fd; /* eventfd that ends the thread's sleep, and nobody else's */
	struct soft_source nudge; /* eventfd: there is work that no other fd tells of */
	struct soft_source alarm; /* timerfd of timer.c */
	pthread_t thread;

	struct soft_node sources; /* everything watched */
	struct soft_node deferred; /* to be done before the lock is given back */
	struct soft_channel *current; /* whose owner runs the step under way */

	struct epoll_event events[SOFT_STEP_EVENTS]; /* of the step under way */
	int event_count;
	size_t share;
	struct soft_scratch *scratch;
};

extern struct soft_engine engine;

/* Who makes a step: the engine's thread, a thread that has been woken, one that polls. */
enum soft_who {
	SOFT_ENGINE,
	SOFT_WOKEN,
	SOFT_POLLING
};

/* engine.c.  Under the lock; the end of the step is in soft_unlock.  Returns whether there was work. */
bool soft_engine_step(enum soft_who who);
/* Must neighbours ring?  To be asked anew before anybody sleeps. */
void soft_engine_mind_neighbours(void);

/* nesting.c.  Is a thread possibly asleep on a channel that only the engine's thread can signal?
 * That is so when the application has armed a CQ and waits with its own poll() on a channel whose
 * fd shows nothing but signals. */
bool soft_channels_depend_on_engine(void);
void soft_channels_forget(void); /* in the child of a fork */
/* Has every event loop that watches bells itself asked for them since that change? */
bool soft_channels_know_bells(unsigned change);

/* sources.c.  It need not wake those who watch engine.rest_fd, or it must. */
void soft_source_set_apart(struct soft_source *source, bool apart);

/* bells.c.  Loops must ask for them anew; there is one loop less that has to. */
void soft_bells_changed(void);
void soft_bells_settle(void);
/* For a channel's loop: descriptors that become its own.  Returns their number. */
int soft_bells_open(struct soft_channel *channel, int fds[AIORDMA_BELLS]);

/* engine_thread.c: what the engine's thread runs. */
void *soft_engine_run(void *unused);

#endif
