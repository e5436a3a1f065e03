/* What the engine offers to the device's own rooms only (softdev.h has what the CM needs too). */
#ifndef AIORDMA_SOFT_ENGINE_H
#define AIORDMA_SOFT_ENGINE_H

#include "softdev.h"

enum {
	SOFT_STAGING_SIZE = 32 * 1024, /* small frames read by one recv, or gathered for one send */
	SOFT_STEP_BYTES = 1024 * 1024, /* of one stream in one step, in each direction */
	SOFT_STEP_EVENTS = 8, /* streams served in one step */
	SOFT_TICK_NS = 500 *
		1000, /* between two looks of the engine's thread, while it stands back */
};

/* Scratch memory for whoever holds the lock; nothing in it outlives a call. */
struct soft_scratch {
	uint8_t input[SOFT_STAGING_SIZE];
	uint8_t output[SOFT_STAGING_SIZE];
};

/* The lock, or false after a second: at the end of the process, when nobody may be there any more to
 * give it back. */
bool soft_lock_soon(void);

struct soft_scratch *soft_scratch(void);

/* Bytes that a stream may still take in this step. */
size_t soft_step_share(void);

/* Work put off until the lock is given back: requests posted together go out together, and one
 * acknowledgement answers for all that a step has taken in.  `run` may defer again. */
struct soft_deferred {
	void (*run)(struct soft_deferred *deferred);
	struct soft_node node; /* initialise with soft_list_init */
};

void soft_defer(struct soft_deferred *deferred);
void soft_deferred_cancel(struct soft_deferred *deferred);

/* Another number each time that somebody has the lock: to bound what is put off again and again. */
unsigned soft_lock_turn(void);

/* No source of the port is served from now on, or all of them are again.  Under the lock. */
void soft_sources_silence(bool silent);

/* For polling: does nothing when another thread has the lock or waits for it. */
void soft_progress_try(void);

/* As soft_progress; an event of `channel` that comes up in this step is not announced through its
 * fd, because the caller looks at the queue itself right after.  The caller then calls
 * soft_channel_consume or soft_channel_announce. */
void soft_progress_for(struct soft_channel *channel);
bool soft_channel_is_current(const struct soft_channel *channel);
void soft_channel_announce(struct soft_channel *channel);

/* acks.c.  Send the acknowledgements that are owed: those that have waited long enough for a thread
 * of the application that comes by; for a tick of the engine's thread; all of them. */
bool soft_acks_owed(void); /* without the lock: a hint */
void soft_acks_step(void);
void soft_acks_tick(void);
void soft_acks_send(void);

/* wakeup.c.  Look into the rings of neighbours: of those that are attended; was there anything? */
bool soft_neighbours_serve(void);
bool soft_neighbours_have_input(void);
bool soft_neighbours_attended(void); /* is there any?  Without the lock: a hint */
/* From now on nobody comes by unless he is called, or somebody does. */
void soft_neighbours_alert(bool on);
/* Look into all of them again: the port is up. */
void soft_neighbours_resume(void);
/* attach.c.  Let neighbours meet us under this LID, which may be another than before; no more. */
void soft_meeting_open(uint16_t lid);
void soft_meeting_close(void);

/* One more CQ, or one less, is armed to wake somebody.  Without the lock. */
void soft_engine_armed(int change);
/* A thread of the application may go to sleep now, without another call.  Without the lock. */
void soft_engine_sleepy(void);

/* Somebody should do a step soon.  Under the lock. */
void soft_engine_nudge(void);

/* Part of a message has been moved, and more of it is to follow.  Under the lock. */
void soft_engine_part(void);
/* Another process has been written to, and was asleep, or not. */
void soft_engine_met(bool asleep);

/* Is the engine's thread looking around every half millisecond? */
bool soft_engine_ticks(void);

/* fd_watch.c.  For channel.c. */
int soft_engine_epoll_fd(void);
/* channel_epoll.c. */
void soft_engine_add_channel(struct soft_channel *channel);
void soft_engine_remove_channel(struct soft_channel *channel);

/* For timer.c: when the first timer is due, or 0 for none. */
void soft_engine_alarm(uint64_t deadline_ns);
void soft_timers_run(void);
void soft_timers_forget(void);

/* Grows when this process turns out to be the child of a fork: what was made before is not ours. */
unsigned soft_engine_incarnation(void);

/* Called when the engine stops (under its lock, no user left): close what is left open. */
void soft_links_shutdown(void);
void soft_neighbours_shutdown(void);
void soft_listener_shutdown(void);
/* The same, and in the child of a fork: the port is up, and no context is open. */
void soft_port_reset(void);
/* In the child of a fork, where all sockets are closed already. */
void soft_links_forget(void);
void soft_neighbours_forget(void);
/* Called when the engine starts: what the environment wants.  0 or an errno value, and it has been said
 * what is wrong. */
int soft_links_configure(void);
/* liveness.c: how long a path to another machine may be silent, by the environment; likewise. */
int soft_path_configure(void);
void soft_multicast_forget(void);

#endif
