/* The engine: one lock, one epoll set and one thread for the whole device in this process
 * (engine.c).
 *
 * Everything of the device runs under that lock, except the insides of completion queues and of
 * channels, which have small locks of their own.  There are nine; a thread that holds one takes only
 * those below it:
 *
 *   1  soft_batch.mutex          the batch of a queue pair, from wr_start to wr_complete or wr_abort: the
 *                                application's calls are in between
 *   2  soft_cq_reader.mutex      the position in a completion queue, likewise from start_poll to end_poll
 *   3  soft_cm.opening           opening and closing of the connection manager's own context
 *   4  soft_engine.users_mutex   the number of the engine's users; its start and stop
 *   5  the engine's (soft_lock)  objects, links, peers, ids, timers, watches, the trace
 *   6  soft_cq.lock              the ring of a completion queue, whether it is armed, its moderation
 *   7  soft_comp_channel.mutex   the completion queues with events, and the channel's signal
 *   8  ibv_cq.mutex, ibv_qp.mutex, ibv_srq.mutex
 *                                events taken and acknowledged, for the calls that destroy; a leaf
 *   9  soft_cm.acknowledge       acknowledged events of the connection manager; a leaf, so that
 *                                acknowledging never waits for the engine
 *
 * One lock for nearly everything is a choice: a step is short (about a megabyte copied at most), queue
 * pairs of one process mostly talk to each other's threads anyway, and it makes "no access after
 * ibv_dereg_mr returns" and "no callback after soft_unwatch" true by construction.  A thread that finds
 * it taken tries for some microseconds before it sleeps, and peers are notified without it
 * (soft_notify_later): that takes longer than the rest of a step.  What is read or written without a
 * lock goes through atomics.h.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "atomics.h"
#include "softdev.h"

#define soft_container(pointer, type, member)                                                      \
	((type *)(void *)((char *)(pointer) - offsetof(type, member)))

/* ---- intrusive doubly linked lists ------------------ */

struct soft_node {
	struct soft_node *next, *previous;
};

static inline void soft_list_init(struct soft_node *list)
{
	list->next = list->previous = list;
}

static inline bool soft_list_empty(const struct soft_node *list)
{
	return list->next == list;
}

static inline void soft_list_append(struct soft_node *list, struct soft_node *node)
{
	node->previous = list->previous;
	node->next = list;
	list->previous->next = node;
	list->previous = node;
}

/* Safe to repeat: a removed node is a list of its own. */
static inline void soft_list_remove(struct soft_node *node)
{
	node->previous->next = node->next;
	node->next->previous = node->previous;
	soft_list_init(node);
}

static inline void soft_list_clear(struct soft_node *list)
{
	while (!soft_list_empty(list))
		soft_list_remove(list->next);
}

static inline unsigned soft_list_count(const struct soft_node *list)
{
	unsigned count = 0;

	for (const struct soft_node *node = list->next; node != list; node = node->next)
		count++;
	return count;
}

#define soft_list_first(list, type, member) soft_container((list)->next, type, member)
/* Each of them, by name; none is removed meanwhile. */
#define soft_list_each(type, name, list, member)                                                   \
	for (type *name = soft_list_first(list, type, member); &name->member != (list);            \
	     name = soft_list_first(&name->member, type, member))
/* The one at hand may be removed, and no other. */
#define soft_list_each_safe(type, name, list, member)                                              \
	for (type *name = soft_list_first(list, type, member), *name##_next;                       \
	     name##_next = soft_list_first(&name->member, type, member), &name->member != (list);  \
	     name = name##_next)
/* The first one as long as there is one: each is removed. */
#define soft_list_drain(type, name, list, member)                                                  \
	for (type * name; name = soft_list_first(list, type, member), &name->member != (list);)

/* ---- the device's state ---------------------------------------------------------------------- */

/* The network of a simulated host, in place of the kernel's (path/sim/).  Under the lock. */
struct soft_network {
	union ibv_gid (*address)(int device); /* of that device, beside its loopback address */
	int (*device_to)(const union ibv_gid *gid); /* from which it is reached; negative: none */
	/* A datagram to the UDP port of RoCE, from that source port. */
	void (*send)(const union ibv_gid *from, uint16_t port, const union ibv_gid *to,
		     const uint8_t *bytes, size_t length);
	/* A descriptor that has the port of the address to itself until it is closed, or a negative
	 * errno value.  0 is a port of the network's choice, which then is in the address. */
	int (*reserve)(struct sockaddr *address, int type);
};

/* What the device asks its machine for; tests have their own. */
struct soft_platform {
	int (*clock)(clockid_t clock, struct timespec *now); /* clock_gettime(3) */
	ssize_t (*random)(void *to, size_t length, unsigned flags); /* getrandom(2) */
	void (*alarm)(uint64_t deadline_ns); /* then run the timers */
	bool threads; /* false: the engine has none, and other threads make all steps */
	const struct soft_network *network; /* NULL: the kernel's */
};

/* A part for each folder, into which that folder alone looks. */
struct soft_device {
	const struct soft_platform *platform;
	struct soft_engine *engine;
	struct soft_trace *trace;
	struct soft_inject *inject;
	struct soft_objects *objects;
	struct soft_paths *paths;
	struct soft_shm *shm;
	struct soft_tcp *tcp;
	struct soft_roce *roce;
	struct soft_ud *ud;
	struct soft_links_state *links;
	struct soft_cm *cm;
	struct soft_part *parts; /* all of these */
};

/* The device that calls are for. */
extern struct soft_device soft_device;

/* softdev.c: makes the parts.  The process's device is made at its start; a simulation, which has no
 * threads, makes one for each host and exchanges them before it calls into another one. */
void soft_device_make(void);
/* engine.c: frees the parts of one that is not the process's; nothing is open there any more. */
void soft_device_free(void);

/* Zeroed memory for a part, which the process's device never frees.  Ends the program where there is none. */
void *soft_part(size_t size);

/* ---- engine.c, lifecycle.c, fd_watch.c ------------------------------------------------------- */

/* Users of the engine are what an application holds open: device contexts and event channels.
 * The first one starts the engine and its thread, the last one stops them.  Not under the lock.
 * Returns 0 or an errno value. */
int soft_engine_get(void);
void soft_engine_put(void);
bool soft_engine_is_used(void);

void soft_lock(void);
void soft_unlock(void);

/* Ends the program where this thread does not hold the lock.  In builds with sanitizers, for
 * coverage or for fuzzing (src/meson.build); nothing in others. */
#ifdef AIORDMA_CHECK_LOCKS
void soft_check_locked(const char *function);
#define soft_assert_locked() soft_check_locked(__func__)
#else
#define soft_assert_locked() ((void)0)
#endif

/* A file descriptor that the engine watches; `ready` is called under the lock, and may unwatch, close and free its watch or any other. */
struct soft_fd_watch {
	int fd;
	void (*ready)(struct soft_fd_watch *watch);
	uint32_t events; /* those that `ready` is called for */
	uint32_t interest; /* of the engine: what epoll was told; 0 and !watched before */
	bool watched;
	uint32_t ports; /* silent while all of these are down; 0: never */
	struct soft_node node; /* of the engine: all watches, for the child of a fork */
};

/* A new descriptor, whose inode no other file has.  Returns -1 and errno if there is none. */
int soft_open_identity(const char *name);
/* Close an fd unless it is -1, which it is then; errno stays. */
void soft_close_fd(int *fd);
/* 0 or an errno value. */
int soft_set_option(int fd, int level, int option, int value);
/* The kernel's buffers of a socket, in bytes: as large as the system's limit allows, or larger if we are
 * privileged. */
void soft_set_receive_buffer(int fd, int size);
void soft_set_send_buffer(int fd, int size);
/* One more control message, for which there is room, zeroed. */
void soft_put_control(struct msghdr *message, int level, int type, const void *data, size_t length);

/* Is the process at the other end of a Unix socket certainly of this user?  Its number, 0 if it lives in
 * another process namespace. */
bool soft_is_same_user(int fd, pid_t *pid);

/* Add the watch or change its interest (level triggered).  Returns 0 or an errno value. */
int soft_watch(struct soft_fd_watch *watch, uint32_t events);
/* Take it out; does not close the fd (close it afterwards, not before).  Safe to repeat. */
void soft_unwatch(struct soft_fd_watch *watch);
/* Take it out and close its fd, which is -1 then.  Safe to repeat. */
void soft_watch_close(struct soft_fd_watch *watch);

/* One bounded step of the device's work, by a thread of the application that does not hold the
 * lock.  Waits at most for the step of another thread, never for work. */
void soft_progress(void);

/* ---- timer.c (under the lock) -------------------------------------------------------------- */

struct soft_timer {
	uint64_t deadline_ns; /* of soft_now() */
	void (*expired)(struct soft_timer *timer);
	/* of timer.c: a pairing heap */
	bool running;
	struct soft_timer *child, *next, *previous;
};

static inline uint64_t soft_nanoseconds(const struct timespec *time)
{
	return (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
}

uint64_t soft_now(void); /* CLOCK_MONOTONIC in nanoseconds */

/* Runs `expired` once, under the lock, at or after the deadline; a running timer is moved.
 * A zeroed struct with `expired` set is a stopped timer.  Cannot fail. */
void soft_timer_start(struct soft_timer *timer, uint64_t deadline_ns);
void soft_timer_stop(struct soft_timer *timer); /* safe to repeat */
void soft_timers_run(void); /* those that are due: what soft_platform.alarm asks for */

/* ---- accept.c: listening sockets (under the lock) ------------------------------------------- */

struct sockaddr_storage;
struct soft_acceptor;
/* A connection has come; `fd` does not block, and is the function's. */
typedef void soft_accepted(struct soft_acceptor *acceptor, int fd,
			   const struct sockaddr_storage *peer);

struct soft_acceptor {
	struct soft_fd_watch watch;
	struct soft_timer pause;
	soft_accepted *accepted;
	/* Without descriptors or memory: has one been given back?  NULL: none can be. */
	bool (*make_room)(void);
};

/* From now on connections to that socket, which listens, are accepted; 0 or an errno value.  The socket is the
 * acceptor's in any case: soft_accept_stop closes it.  `ports` as of a watch. */
int soft_accept_start(struct soft_acceptor *acceptor, int fd, uint32_t ports,
		      soft_accepted *accepted);
void soft_accept_stop(struct soft_acceptor *acceptor); /* safe to repeat */

/* ---- channel.c: the fd that an application waits on ---------------------------------------- */

/* A channel tells the application that its queue (of completion events, CM events, asynchronous
 * events) is not empty.  The queue belongs to the channel's owner.
 *
 * `fd` is readable exactly while the channel is signalled, unless the application has asked for
 * early wake-ups (soft_wake_early): then also as soon as any work is there for the engine, so
 * that the waiting thread does it itself instead of being woken after the engine's thread has. */
struct soft_channel {
	int fd; /* the application's: an epoll instance, whose O_NONBLOCK flag is honoured */
	int event_fd; /* inside it */
	bool completions; /* of the data path: its waiting threads do the device's work themselves */
	bool early; /* the application takes "nothing there" as normal */
	bool nested; /* the engine's epoll instance is inside `fd`, and wakes a sleeping thread */
	bool signalled; /* this and the next are under whatever keeps writers of the queue out */
	bool deferred;
	unsigned wanted; /* atomic, the owner's: CQs that are armed to signal it */
	unsigned sleepers; /* atomic: threads in soft_channel_wait */
	unsigned losses; /* of the engine, when the descriptors were made */
	struct soft_node node; /* of the engine */
};

/* The engine must be held (soft_engine_get) from init to destroy.  Neither of the two is called
 * under the lock.  Returns 0 or an errno value. */
int soft_channel_init(struct soft_channel *channel);
void soft_channel_destroy(struct soft_channel *channel);
/* Its descriptors have been closed by the program, and may be other files by now. */
bool soft_channel_lost(const struct soft_channel *channel);

void soft_channel_signal(struct soft_channel *channel); /* the queue is not empty; under the lock */
void soft_channel_consume(struct soft_channel *channel); /* the queue has been seen empty; the
							  * caller keeps writers out meanwhile */

bool soft_channel_nonblocking(const struct soft_channel *channel); /* O_NONBLOCK on the fd */

/* Sleep until the channel is signalled, or, with `completions`, until the engine has work (then
 * call soft_progress and look again); without the lock.  Returns 0, or EINTR. */
int soft_channel_wait(struct soft_channel *channel);

enum {
	SOFT_STAGING_SIZE = 32 * 1024, /* small frames read by one recv, or gathered for one send */
	SOFT_STEP_BYTES = 1024 * 1024, /* of one stream in one step, in each direction */
	SOFT_STEP_EVENTS = 8, /* streams served in one step */
	SOFT_TICK_NS = 500 * 1000, /* between two polls of the engine's thread while it ticks */
};

/* Scratch memory of the thread that holds the lock; nothing in it outlives a call. */
struct soft_scratch {
	uint8_t input[SOFT_STAGING_SIZE];
	uint8_t output[SOFT_STAGING_SIZE];
};

/* The lock, or false after a second: at the end of the process, when the thread that held it may be
 * gone. */
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

/* Write a byte to a non-blocking descriptor once the lock has been given back: to wake another
 * process takes longer than all else that is done for a short message. */
void soft_notify_later(int fd);
/* Before such a descriptor is closed: now, and wait for other threads that are about to write. */
void soft_notify_finish(void);

/* Another number each time the lock is taken: to bound work that is deferred again and again. */
unsigned soft_lock_turn(void);

/* Ports of devices are bits of a word: the one of `embedded0` is 1. */
#define SOFT_ANY_PORT UINT32_MAX
/* Watches of these ports alone are not served from now on, and those of all others are. */
void soft_watches_silence(uint32_t ports);

/* For polling: does nothing when another thread has the lock or waits for it. */
void soft_progress_try(void);
/* It brought nothing that many times: now and then, let other threads have the processor. */
void soft_progress_missed(unsigned misses);

/* As soft_progress; an event of `channel` that comes up in this step is not announced through its
 * fd, because the caller looks at the queue itself right after.  The caller then calls
 * soft_channel_consume or soft_channel_announce. */
void soft_progress_for(struct soft_channel *channel);
bool soft_channel_is_current(const struct soft_channel *channel);
void soft_channel_announce(struct soft_channel *channel);

/* One more CQ, or one less, is armed to signal a channel.  Without the lock. */
void soft_engine_armed(int change);
/* A thread of the application may go to sleep now, without another call.  Without the lock. */
void soft_engine_may_sleep(void);

/* Does a thread of the application poll, so that none has to be woken?  Under the lock. */
bool soft_application_polls(void);

/* Makes the epoll set readable, so that a thread does a step soon. */
void soft_engine_schedule_step(void);

/* Part of a message has been moved, and more of it is to follow. */
void soft_engine_count_part(void);
/* Another process has been written to, and had to be notified, or not. */
void soft_engine_count_write(bool asleep);

/* Does the engine's thread tick (every SOFT_TICK_NS)? */
bool soft_engine_ticks(void);

/* Grows when this process turns out to be the child of a fork: what was made before is not ours. */
unsigned soft_engine_fork_generation(void);
/* Before descriptors are closed or written in the name of an application: if it has closed them itself,
 * as daemons close all, the process has none of the device any more, like the child of a fork.  What
 * it made can be destroyed, and a device be opened anew.  Without any lock. */
void soft_engine_check_descriptors(void);

/* ---- entries of the device's table (abi/device_calls.h) -------------------------------------- */

/* Steps of application threads that found work, and parts of messages. */
unsigned soft_engine_progress(void);
uint64_t soft_peer_wakeups(void);
/* What these are made of: soft_engine_count_part, soft_engine_count_write. */
unsigned soft_engine_parts(void);
unsigned soft_engine_writes(bool asleep);
void soft_busy_poll(int starts);
void soft_hold_polling(int change);
/* Between two steps of an application thread that holds its turn: false for the first call after a step
 * (`*since` remembers that one); later, what is to be sent may wait for the next step or tick, which
 * calls `send_delayed`. */
bool soft_engine_may_gather(unsigned *since);
void soft_wake_early(int fd);

/* ---- subsystems ---------------------------------------------------------------------------- */

/* A change of ports, or of their devices (port.c). */
enum soft_port_change {
	SOFT_PORT_UP,
	SOFT_PORT_ADDRESSES, /* the host's addresses are other ones */
	SOFT_PORT_LID, /* as if the port had another LID */
	SOFT_PORT_FATAL, /* the device has failed */
};

/* A higher folder, as the engine sees it: the calls that it makes there.  Each may be
 * NULL; all are made under the lock. */
struct soft_subsystem {
	/* Before anything else: make the folder's part of soft_device. */
	void (*create)(void);
	/* The engine starts: what the environment asks for. 0 or an errno value, and the reason is
	 * on stderr. */
	int (*start)(void);
	/* The engine stops, with no user left: close what is open. */
	void (*stop)(void);
	/* The device goes, as a simulated host's does: free what is left of the folder's. */
	void (*destroy)(void);
	/* In the child of a fork, where all watched descriptors are closed already. */
	void (*forked)(void);
	/* The subsystem's own mutexes, held during a fork, so that the child does not find them locked
	 * by a thread that it does not have: one that is taken before the engine's, and a leaf. */
	pthread_mutex_t *(*outer)(void);
	pthread_mutex_t *(*leaf)(void);
	void (*port_changed)(enum soft_port_change change, uint32_t ports);

	/* At most one subsystem has these three: input that no descriptor tells of. poll: take it
	 * in; was there any? has_input: is there any? need_notify: from now on no thread polls
	 * unprompted, or one does. */
	bool (*poll)(void);
	bool (*has_input)(void);
	void (*need_notify)(bool on);

	/* At most one subsystem has this: send what has been delayed for so long; 0: all of it. */
	void (*send_delayed)(uint64_t age_ns);
};

/* A variable of the environment does not let the engine start: says which, what it is and is to be, to
 * standard error and to aiordma_device_calls.  Returns `error`. */
__attribute__((format(printf, 4, 5))) int
soft_misconfigured(int error, const char *variable, const char *value, const char *expected, ...);

/* Check the result of a system call without which the engine cannot start.  Returns 0 if the kernel
 * allows it, as the result or EBADF shows, otherwise its errno value.  If the call was denied, as by
 * the seccomp filter of a container, its name is reported like a wrong variable. */
int soft_check_call(const char *name, long result);

/* The same for the calls that only packets of RoCE need. */
int soft_check_packet_calls(void);

/* The reason for which this thread's latest start of the engine failed; empty if only errno says it. */
const char *soft_start_failure(void);

/* Called once, before anything else: a list that ends with NULL, in the order of the calls. */
void soft_engine_use(const struct soft_subsystem *const subsystems[]);
void soft_engine_port_changed(enum soft_port_change change, uint32_t ports);

/* Hints of the subsystems, which are read without the lock: is there something to be polled; has
 * something been delayed?  Under the lock. */
void soft_engine_set_polls(bool polls);
void soft_engine_set_delayed(bool delayed);

/* A thread of the application goes to sleep: nothing stays delayed for its sake.  Without the lock.
 */
void soft_engine_before_sleep(void);

/* On top of the lists above. */
#include "fair_share.h"
