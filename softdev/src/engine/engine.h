/* The engine: one lock, one epoll set and one thread for the whole device in this process
 * (engine.c).
 *
 * The engine's lock protects everything in the device, except the internals of completion queues
 * and channels, which have small locks of their own. There are nine kinds of locks. A thread that
 * holds one may only acquire locks further down in this list:
 *
 *   1  soft_batch.mutex          a queue pair's batch, held from wr_start to wr_complete
 *                                or wr_abort, with the application's calls in between
 *   2  soft_cq_reader.mutex      a completion queue's read position, held from start_poll to
 *                                end_poll
 *   3  soft_cm.open_mutex        opening and closing the connection manager's own context
 *   4  soft_engine.users_mutex   the number of users; starting and stopping the engine
 *   5  the engine's (soft_lock)  objects, links, peers, ids, timers, watches, the trace
 *   6  soft_cq.lock              a completion queue's ring, armed state and moderation
 *   7  soft_comp_channel.mutex   the list of completion queues with events, and the signal
 *   8  ibv_cq.mutex, ibv_qp.mutex, ibv_srq.mutex
 *                                delivered and acknowledged events, for destroy calls; a leaf
 *   9  soft_cm.ack_mutex         acknowledged events of the connection manager; a leaf, so that
 *                                acknowledging never waits for the engine
 *
 * Using one lock for nearly everything is deliberate. A step is short (it copies at most about a
 * megabyte), and queue pairs of one process mostly talk to each other's threads anyway. One lock
 * also guarantees by construction that no access happens after ibv_dereg_mr returns and no callback
 * runs after soft_unwatch. A thread that finds the lock taken spins for some microseconds before it
 * sleeps. Peers are notified after the lock has been released (soft_notify_later), because a
 * notification takes longer than the rest of a step. Memory that is accessed without a lock is
 * accessed through atomics.h.
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

/* Remove the node from its list and reinitialise it, so that removing it again does nothing. */
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
/* Iterate over the list. The loop body must not remove any element. */
#define soft_list_each(type, name, list, member)                                                   \
	for (type *name = soft_list_first(list, type, member); &name->member != (list);            \
	     name = soft_list_first(&name->member, type, member))
/* Iterate over the list. The loop body may remove the current element, but no other. */
#define soft_list_each_safe(type, name, list, member)                                              \
	for (type *name = soft_list_first(list, type, member), *name##_next;                       \
	     name##_next = soft_list_first(&name->member, type, member), &name->member != (list);  \
	     name = name##_next)
/* Repeat the loop body for the first element until the list is empty. The loop body must remove the
 * element. */
#define soft_list_drain(type, name, list, member)                                                  \
	for (type * name; name = soft_list_first(list, type, member), &name->member != (list);)

/* ---- the device's state ---------------------------------------------------------------------- */

/* A simulated host's network, which replaces the kernel's (sim/). All functions are called
 * under the lock. */
struct soft_network {
	union ibv_gid (*address)(int device); /* the device's non-loopback address */
	int (*device_to)(const union ibv_gid *gid); /* device that reaches it; negative if none */
	/* Send a datagram from the source port `port` to the RoCE UDP port of `to`. */
	void (*send)(const union ibv_gid *from, uint16_t port, const union ibv_gid *to,
		     const uint8_t *bytes, size_t length);
	/* Reserve the port that `address` specifies. Returns a descriptor that holds the port until
	 * it is closed, or a negative errno value. If the port is 0, the network chooses one and
	 * stores it in `address`. */
	int (*reserve)(struct sockaddr *address, int type);
};

/* Platform services used by the device. Simulations and tests replace them. */
struct soft_platform {
	int (*clock)(clockid_t clock, struct timespec *now); /* clock_gettime(3) */
	ssize_t (*random)(void *to, size_t length, unsigned flags); /* getrandom(2) */
	void (*alarm)(uint64_t deadline_ns); /* sets the time to run the timers */
	bool threads; /* whether the engine has its own thread; if not, callers run all steps */
	const struct soft_network *network; /* NULL for the kernel's network */
};

/* State of a device. Each part belongs to one folder, and only that folder accesses it. */
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
	struct soft_part *parts; /* list of all parts */
};

/* The device of the current call. */
extern struct soft_device soft_device;

/* Create the device's parts (softdev.c). The process's own device is created when the process
 * starts. A simulation creates one device per host, and switches devices before it calls into
 * another host. Switching is safe because a simulation has no engine threads. */
void soft_device_make(void);
/* Free the parts of a simulated host's device. All objects of the device must have been closed
 * (engine.c). */
void soft_device_free(void);

/* Allocate zeroed memory for a part. Aborts if there is not enough memory. The parts of the
 * process's own device are never freed. */
void *soft_alloc_part(size_t size);

/* ---- engine.c, lifecycle.c, fd_watch.c ------------------------------------------------------- */

/* Add a user of the engine. Each open device context and event channel is a user. The first user
 * starts the engine and its thread. The caller must not hold the lock. Returns 0 or an errno
 * value. */
int soft_engine_get(void);
/* Remove a user. Removing the last user stops the engine. The caller must not hold the lock. */
void soft_engine_put(void);
/* Returns whether the engine has any users. */
bool soft_engine_is_used(void);

/* Acquire the lock. A polling thread lets the waiting threads go first. */
void soft_lock(void);
/* Run the deferred work, release the lock, and then write the pending notifications. */
void soft_unlock(void);

/* Abort if this thread does not hold the lock. The check exists only in builds with sanitizers, for
 * coverage, or for fuzzing (src/meson.build). */
#ifdef AIORDMA_CHECK_LOCKS
void soft_check_locked(const char *function);
#define soft_assert_locked() soft_check_locked(__func__)
#else
#define soft_assert_locked() ((void)0)
#endif

/* A file descriptor watched by the engine. `ready` is called under the lock. The function may stop,
 * close and free any watch, including its own. */
struct soft_fd_watch {
	int fd;
	void (*ready)(struct soft_fd_watch *watch);
	uint32_t events; /* events for which `ready` was called */
	uint32_t interest; /* events registered with epoll, maintained by the engine; initially 0 */
	bool watched;
	uint32_t ports; /* ports of which at least one must be up; 0 to serve always */
	struct soft_node node; /* node in soft_engine.watches */
};

/* Open a descriptor with a unique inode. Returns -1 and sets errno on failure. */
int soft_open_identity(const char *name);
/* Close `*fd` unless it is -1, and set it to -1. Preserves errno. */
void soft_close_fd(int *fd);
/* Set a socket option with an int value. Returns 0 or an errno value. */
int soft_set_option(int fd, int level, int option, int value);
/* Set the size of a socket's receive buffer in bytes. Only a privileged process can exceed
 * net.core.rmem_max. */
void soft_set_receive_buffer(int fd, int size);
/* Set the size of a socket's send buffer in bytes. Only a privileged process can exceed
 * net.core.wmem_max. */
void soft_set_send_buffer(int fd, int size);
/* Append a control message. The buffer must be zeroed and have enough space left. */
void soft_put_control(struct msghdr *message, int level, int type, const void *data, size_t length);

/* Returns true only if the peer of a Unix socket is known to run as this user. In this case, sets
 * `*pid` to the peer's process ID, or to 0 if the peer is in another PID namespace. */
bool soft_is_same_user(int fd, pid_t *pid);

/* Add the watch, or change its events (level-triggered). Returns 0 or an errno value. */
int soft_watch(struct soft_fd_watch *watch, uint32_t events);
/* Stop watching the descriptor without closing it. The descriptor must still be open. Safe to
 * repeat. */
void soft_unwatch(struct soft_fd_watch *watch);
/* Stop watching the descriptor, close it, and set it to -1. Safe to repeat. */
void soft_watch_close(struct soft_fd_watch *watch);

/* Run one bounded step of the device's work in an application thread. The caller must not hold the
 * lock. May wait for another thread's step, but never for work to arrive. */
void soft_progress(void);

/* ---- timer.c (under the lock) -------------------------------------------------------------- */

struct soft_timer {
	uint64_t deadline_ns; /* time as returned by soft_now() */
	void (*expired)(struct soft_timer *timer);
	/* node of a pairing heap, private to timer.c */
	bool running;
	struct soft_timer *child, *next, *previous;
};

static inline uint64_t soft_nanoseconds(const struct timespec *time)
{
	return (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
}

/* Returns the time of CLOCK_MONOTONIC in nanoseconds. */
uint64_t soft_now(void);

/* Schedule one call of `expired` under the lock, at or after the deadline. If the timer is already
 * running, change its deadline. A zeroed struct with `expired` set is a stopped timer. Cannot
 * fail. */
void soft_timer_start(struct soft_timer *timer, uint64_t deadline_ns);
/* Stop the timer without calling `expired`. Safe to repeat. */
void soft_timer_stop(struct soft_timer *timer);
/* Call `expired` of all timers whose deadline has passed. Called when soft_platform.alarm fires. */
void soft_timers_run(void);

/* ---- accept.c: listening sockets (under the lock) ------------------------------------------- */

struct sockaddr_storage;
struct soft_acceptor;
/* Handle a new connection, taking ownership of the non-blocking `fd`. */
typedef void soft_accepted(struct soft_acceptor *acceptor, int fd,
			   const struct sockaddr_storage *peer);

struct soft_acceptor {
	struct soft_fd_watch watch;
	struct soft_timer pause;
	soft_accepted *accepted;
	/* Release a descriptor after accept4(2) has failed for lack of descriptors or memory.
	 * Returns whether a descriptor was released. NULL if the owner has nothing to release. */
	bool (*release_descriptor)(void);
};

/* Start accepting connections on the listening socket `fd`. `ports` has the meaning of
 * soft_fd_watch.ports. Returns 0 or an errno value. The acceptor owns the socket in both cases, and
 * soft_accept_stop closes it. */
int soft_accept_start(struct soft_acceptor *acceptor, int fd, uint32_t ports,
		      soft_accepted *accepted);
/* Stop accepting connections and close the listening socket. Safe to repeat. */
void soft_accept_stop(struct soft_acceptor *acceptor);

/* ---- channel.c: the fd that an application waits on ---------------------------------------- */

/* A channel signals to the application that a queue of completion, CM or asynchronous events is not
 * empty. The queue belongs to the channel's owner.
 *
 * `fd` is readable while the channel is signalled. After soft_wake_early, it may also be readable
 * when the engine has work. The waiting thread then does this work itself, which avoids a switch
 * from the engine's thread to the waiting thread.
 */
struct soft_channel {
	int fd; /* the application's epoll instance; its O_NONBLOCK flag is honoured */
	int event_fd; /* eventfd registered in `fd` */
	bool completions; /* completion channel, whose waiting threads do the device's work */
	bool accepts_early_wakeup; /* whether a wake-up without an event is acceptable */
	bool nested; /* the engine's epoll instance is in `fd` and wakes sleeping threads */
	bool signalled; /* `event_fd` has been written; protected by the lock of the queue */
	bool signal_deferred; /* `event_fd` is written only if the current step leaves events */
	unsigned
		armed_sources; /* atomic: number of armed CQs or waiting CM ids; set by the owner */
	unsigned sleepers; /* atomic: threads in soft_channel_wait */
	/* value of soft_engine.descriptor_losses when the channel was created */
	unsigned descriptor_losses;
	struct soft_node node; /* managed by the engine */
};

/* Create a channel. The caller must be a user of the engine (soft_engine_get) until it destroys the
 * channel, and must not hold the lock. Returns 0 or an errno value. */
int soft_channel_init(struct soft_channel *channel);
/* Destroy the channel. The caller must not hold the lock. */
void soft_channel_destroy(struct soft_channel *channel);
/* Returns whether the program has closed the channel's descriptors. Their numbers may belong to
 * other files by now. */
bool soft_channel_has_lost_descriptors(const struct soft_channel *channel);

/* Make `fd` readable because the queue is not empty. If the channel's owner runs the current step,
 * the signal waits until the owner has checked the queue. Called under the lock. */
void soft_channel_signal(struct soft_channel *channel);
/* Clear the signal of an empty queue. The caller must hold the queue's lock, and must not have
 * released it since it found the queue empty. */
void soft_channel_clear_signal(struct soft_channel *channel);

/* Returns whether O_NONBLOCK or `accepts_early_wakeup` is set. */
bool soft_channel_nonblocking(const struct soft_channel *channel);

/* Sleep until the channel is signalled. On a completion channel, also wake up when the engine has
 * work. The caller must then call soft_progress and check the queue again. The caller must not hold
 * the lock. Returns 0, EINTR, or EBADF if the program has closed the descriptors. */
int soft_channel_wait(struct soft_channel *channel);

enum {
	SOFT_STAGING_SIZE = 32 * 1024, /* buffer size for small frames of one recv or send */
	SOFT_STEP_BYTES = 1024 * 1024, /* total byte limit per step and direction */
	SOFT_STEP_EVENTS = 8, /* maximum number of descriptors served per step */
	SOFT_TICK_NS = 500 * 1000, /* poll interval of the engine's thread */
};

/* Scratch memory for the thread that holds the lock. Its contents are not kept between calls. */
struct soft_scratch {
	uint8_t input[SOFT_STAGING_SIZE];
	uint8_t output[SOFT_STAGING_SIZE];
};

/* Acquire the lock during process exit, when the thread that holds it may no longer exist. Returns
 * false if the lock is not released within a second. */
bool soft_lock_timed(void);

struct soft_scratch *soft_scratch(void);

/* Returns the maximum number of bytes that one stream may transfer in this step. */
size_t soft_step_byte_budget(void);

/* Work that is deferred until the lock is released. Requests posted together can thus be sent
 * together, and one acknowledgement can cover everything received in a step. `run` may defer it
 * again. */
struct soft_deferred {
	void (*run)(struct soft_deferred *deferred);
	struct soft_node node; /* initialise with soft_list_init */
};

void soft_defer(struct soft_deferred *deferred);
void soft_deferred_cancel(struct soft_deferred *deferred);

/* Write a byte to a non-blocking descriptor after the lock has been released. Waking another
 * process takes longer than handling a short message, and the lock would be held all that time. */
void soft_notify_later(int fd);
/* Flush pending notifications and wait for other threads that are writing theirs. Must be called
 * before closing a descriptor that was passed to soft_notify_later. */
void soft_notify_finish(void);

/* Returns a number that changes each time the lock is released. A function can use it to limit its
 * work while the lock is held, even if it is called repeatedly. */
unsigned soft_unlock_count(void);

/* A set of device ports is a bit mask. Bit 0 is the port of `embedded0`. */
#define SOFT_ANY_PORT UINT32_MAX
/* Stop serving watches whose ports are all in `ports`, and serve all others. */
void soft_watches_set_down_ports(uint32_t ports);

/* Run a step for a polling thread. Does nothing if another thread holds or awaits the lock. */
void soft_progress_try(void);
/* Yield the CPU or sleep after a number of unsuccessful polls. `misses` counts these polls. */
void soft_progress_missed(unsigned misses);

/* Run a step like soft_progress, but do not signal `channel` through its fd, because the caller is
 * about to check the queue. The caller must then call soft_channel_clear_signal or
 * soft_channel_flush_signal. */
void soft_progress_for(struct soft_channel *channel);
/* Returns whether the owner of the channel runs the current step (soft_progress_for). */
bool soft_channel_is_current(const struct soft_channel *channel);
void soft_channel_flush_signal(struct soft_channel *channel);

/* Add `change` to the number of CQs armed to signal a channel. Does not require the lock. */
void soft_engine_count_armed(int change);
/* Prepare for the calling thread to go to sleep without calling the device again. The caller must
 * not hold the lock. */
void soft_engine_prepare_sleep(void);

/* Returns whether an application thread is polling, so that no thread needs to be woken. Called
 * under the lock. */
bool soft_application_polls(void);

/* Make the epoll set readable, so that a thread runs a step soon. */
void soft_engine_schedule_step(void);

/* Count a complete frame that is not the last one of its message, after sending or receiving it. A
 * thread that polls for completions thus sees that a long message makes progress
 * (soft_engine_progress_count). */
void soft_engine_count_mid_message_frame(void);
/* Count a write to another process. `notified` is true if that process had to be notified. */
void soft_engine_count_write(bool notified);

/* Returns whether the engine's thread is ticking, that is, polling every SOFT_TICK_NS. */
bool soft_engine_ticks(void);

/* Returns the fork generation, which is incremented in the child of a fork and when descriptors are
 * lost. Objects of an earlier generation are invalid. */
unsigned soft_engine_fork_generation(void);
/* Discard the device's state if the application has closed the device's descriptors. A daemon, for
 * example, closes all files when it starts. Existing objects can then only be destroyed, but the
 * application can open a device again. Call this function before closing or writing descriptors on
 * behalf of an application. The caller must not hold any lock. */
void soft_engine_handle_lost_descriptors(void);

/* ---- entries of the device's table (abi/device_calls.h) -------------------------------------- */

/* Returns the number of steps in which an application thread found work, plus the number counted by
 * soft_engine_count_mid_message_frame. */
unsigned soft_engine_progress_count(void);
/* Returns two counts of writes to peers. The upper 32 bits count writes that required a
 * notification, and the lower 32 bits count all others. */
uint64_t soft_peer_wakeups(void);
/* Returns the number counted by soft_engine_count_mid_message_frame. */
unsigned soft_engine_mid_message_frames(void);
/* Returns the number of calls of soft_engine_count_write with this value of `notified`. */
unsigned soft_engine_writes(bool notified);
/* Count the calling thread as one that spins before it sleeps, or no longer if `starts` is 0.
 * Implements aiordma_device_calls.busy_poll. */
void soft_busy_poll(int starts);
/* Add `change` to the number of threads that have announced that they will poll again soon.
 * Implements aiordma_device_calls.hold_polling. */
void soft_announce_poll(int change);
/* Returns whether output may be delayed until the next step or tick calls `send_delayed`. This
 * requires that an application thread has announced its next poll (soft_announce_poll) and that the
 * engine's thread is ticking. During a step, the result is false. The first call after a step also
 * returns false, so that a single message is sent without delay. To recognize this call, each
 * caller must keep its own `*seen_step`, which identifies the step before the previous call. */
bool soft_engine_may_delay_output(unsigned *seen_step);
/* Let the channel's `fd` become readable when the engine has work, and not only when the queue is
 * not empty. Implements aiordma_device_calls.wake_early. */
void soft_wake_early(int fd);

/* ---- subsystems ---------------------------------------------------------------------------- */

/* A change of a port or its device (port.c). */
enum soft_port_change {
	SOFT_PORT_UP,
	SOFT_PORT_ADDRESSES, /* changed addresses of the host */
	SOFT_PORT_LID, /* simulated LID change */
	SOFT_PORT_FATAL, /* fatal device error */
};

/* Callbacks by which the engine calls a higher-level folder. Each callback may be NULL. All
 * callbacks except `create`, `destroy` and `outer` are called under the lock. */
struct soft_subsystem {
	/* Create the folder's part of soft_device. Called before anything else. */
	void (*create)(void);
	/* Read the configuration from the environment when the engine starts. Returns 0, or an
	 * errno value after printing the reason to stderr. */
	int (*start)(void);
	/* Close all resources when the engine stops, after the last user has been removed. */
	void (*stop)(void);
	/* Free the memory to which the folder's part of soft_device points. Called before the
	 * device of a simulated host is freed. */
	void (*destroy)(void);
	/* Reset the folder in the child of a fork, or after the program has closed the device's
	 * descriptors. All watched descriptors are already closed. */
	void (*forked)(void);
	/* Returns the mutex that the subsystem acquires before the engine's lock. The forking
	 * thread holds this mutex across a fork. If another thread held it at that moment, the
	 * child could never acquire it, because that thread does not exist in the child. */
	pthread_mutex_t *(*outer)(void);
	/* Returns the subsystem's leaf mutex, which is also held across a fork. */
	pthread_mutex_t *(*leaf)(void);
	/* Handle a change of the ports in the bit mask `ports`. */
	void (*port_changed)(enum soft_port_change change, uint32_t ports);

	/* Handle input that does not make a descriptor readable. Returns whether any input was
	 * found. Only one subsystem may provide `poll` and the next two functions. */
	bool (*poll)(void);
	/* Returns whether `poll` has input to handle. */
	bool (*has_input)(void);
	/* Set whether peers must notify this process because no thread is polling. */
	void (*set_need_notify)(bool on);

	/* Send output that has been delayed for at least `age_ns`, or all output if `age_ns` is 0.
	 * Only one subsystem may provide this function. */
	void (*send_delayed)(uint64_t age_ns);
};

/* Report an invalid environment variable that prevents the engine from starting. The message
 * contains the variable's value and the expected values. It is printed to stderr and returned by
 * soft_start_failure. Returns `error`. */
__attribute__((format(printf, 4, 5))) int
soft_misconfigured(int error, const char *variable, const char *value, const char *expected, ...);

/* Check the result of a system call that the engine needs. Returns 0 if the call succeeded or
 * failed with EBADF, because both results show that the kernel allows the call. Otherwise returns
 * its errno value. If a seccomp filter denies the call, the function also reports the error, as
 * soft_misconfigured does. */
int soft_check_call(const char *name, long result);

/* Check the system calls that only RoCE packets need. Returns 0 or an errno value. */
int soft_check_packet_calls(void);

/* Returns the reason why this thread's latest attempt to start the engine failed. The string is
 * empty if only an errno value is known. */
const char *soft_start_failure(void);

/* Set the NULL-terminated list of subsystems, in the order in which they are called. Must be called
 * once, before anything else. */
void soft_engine_set_subsystems(const struct soft_subsystem *const subsystems[]);
/* Report a change of the ports in the bit mask `ports` to all subsystems. */
void soft_engine_port_changed(enum soft_port_change change, uint32_t ports);

/* Set the hint that at least one ring must be polled. Called under the lock, although the hint is
 * read without it. */
void soft_engine_set_has_polled_rings(bool has_polled_rings);
/* Set the hint that output may be delayed. Called under the lock, although the hint is read without
 * it. */
void soft_engine_set_has_delayed_output(bool has_delayed_output);

/* Send all delayed output before an application thread goes to sleep. The caller must not hold the
 * lock. */
void soft_engine_send_delayed_output(void);

/* fair_share.h uses the lists defined above. */
#include "fair_share.h"
