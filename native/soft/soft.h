/* The rooms of the embedded device, and what they share.
 *
 * The device is one engine per process (engine.c): one lock, one epoll set, one thread.  Everything
 * in this directory runs under that lock, except the insides of completion queues and of channels,
 * which have small locks of their own.  The order is: engine lock, then CQ lock, then channel lock.
 *
 * This header is the seam between the verbs part (objects.h has its structures) and the connection
 * manager (cm*.c).  Nothing here includes Python or calls libibverbs.
 */
#ifndef AIORDMA_SOFT_H
#define AIORDMA_SOFT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "embedded.h"

/* Every call of the table is a function soft_<name>; the table is put together in calls.c.  They alone
 * are visible outside: the library of preload.c gives each of them the public name of the call. */
#define CALL(library, result, name, arguments)                                                     \
	__attribute__((visibility("default"))) result soft_##name arguments;
#include "abi/calls.h"
#undef CALL

#define soft_container(pointer, type, member)                                                      \
	((type *)(void *)((char *)(pointer) - offsetof(type, member)))

/* ---- intrusive doubly linked lists (list.h would be a room of five lines) ------------------ */

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

#define soft_list_entry(node, type, member) soft_container(node, type, member)

/* ---- engine.c, engine_life.c, sources.c -------------------------------------------------------- */

/* Users of the engine are what an application holds open: device contexts and event channels.
 * The first one starts the engine and its thread, the last one stops them.  Not under the lock.
 * Returns 0 or an errno value. */
int soft_engine_get(void);
void soft_engine_put(void);

void soft_lock(void);
void soft_unlock(void);

/* A file descriptor that the engine watches; `ready` is called under the lock with the epoll events
 * and may unwatch, close and free its source or any other. */
struct soft_source {
	int fd;
	void (*ready)(struct soft_source *source, uint32_t events);
	uint32_t interest; /* of the engine: what epoll was told; 0 and !watched before */
	bool watched;
	bool of_port; /* silent while the port is down */
	bool apart;   /* sources.c: who sleeps watches it himself */
	struct soft_node node; /* of the engine: all sources, for the child of a fork */
};

/* Add the source or change its interest (level triggered).  Returns 0 or an errno value. */
int soft_watch(struct soft_source *source, uint32_t events);
/* Take it out; does not close the fd (close it afterwards, not before).  Safe to repeat. */
void soft_unwatch(struct soft_source *source);

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

uint64_t soft_now(void); /* CLOCK_MONOTONIC in nanoseconds */

/* Runs `expired` once, under the lock, at or after the deadline; a running timer is moved.
 * A zeroed struct with `expired` set is a stopped timer.  Cannot fail. */
void soft_timer_start(struct soft_timer *timer, uint64_t deadline_ns);
void soft_timer_stop(struct soft_timer *timer); /* safe to repeat */

/* ---- channel.c: the fd that an application waits on ---------------------------------------- */

/* A channel tells the application that its queue (of completion events, CM events, asynchronous
 * events) is not empty.  The queue belongs to the channel's owner.
 *
 * `fd` is readable exactly while the channel is signalled, unless the application has asked for
 * early wake-ups (aiordma_wake_early): then also as soon as any work is there for the engine, so
 * that the waiting thread does it itself instead of being woken after the engine's thread has. */
struct soft_channel {
	int fd; /* the application's: an epoll instance, whose O_NONBLOCK flag is honoured */
	int event_fd; /* inside it */
	int flat_fd; /* for who watches this and event_fd instead, and bells: or -1 */
	bool completions; /* of the data path: its waiting threads do the device's work themselves */
	bool early; /* the application takes "nothing there" as normal */
	bool nested; /* who sleeps is woken by what the engine watches: */
	bool inside; /* the engine's epoll instance is inside `fd` */
	unsigned bells; /* bells.c: of those that are watched beside flat_fd */
	bool signalled; /* this and the next are under whatever keeps writers of the queue out */
	bool deferred;
	unsigned wanted; /* atomic, the owner's: CQs armed to wake somebody through it */
	unsigned sleepers; /* atomic: threads in soft_channel_wait */
	struct soft_node node; /* of the engine */
};

/* The engine must be held (soft_engine_get) from init to destroy.  Neither of the two is called
 * under the lock.  Returns 0 or an errno value. */
int soft_channel_init(struct soft_channel *channel);
void soft_channel_destroy(struct soft_channel *channel);

void soft_channel_signal(struct soft_channel *channel); /* the queue is not empty; under the lock */
void soft_channel_consume(struct soft_channel *channel); /* the queue has been seen empty; the
							  * caller keeps writers out meanwhile */

bool soft_channel_nonblocking(const struct soft_channel *channel); /* O_NONBLOCK on the fd */

/* Sleep until the channel is signalled, or, with `completions`, until the engine has work (then
 * call soft_progress and look again); without the lock.  Returns 0, or EINTR. */
int soft_channel_wait(struct soft_channel *channel);

/* ---- qp.c, link.c: what the connection manager needs of a queue pair ------------------------ */

struct soft_qp;

struct soft_qp *soft_qp_of(struct ibv_qp *qp);

/* The queue pair of this device with that number, or NULL (an application may make and move its
 * queue pairs itself and give the CM only the number).  Under the lock. */
struct soft_qp *soft_qp_find(uint32_t qp_num);

/* The CM hands over a connected TCP socket (non-blocking, TCP_NODELAY) as the queue pair's stream,
 * with what it has read beyond its own handshake.  The queue pair is in RTR or RTS, brought there
 * with an address whose dlid is 0 (which means: the stream comes from the CM).  Takes ownership of
 * the fd, also on failure.  Under the lock.  Returns 0 or an errno value: EISCONN when there is a
 * stream already, EINVAL in another state. */
int soft_qp_adopt(struct soft_qp *qp, int fd, const void *already_read, size_t length);
/* The same where both sides are willing to meet in shared memory instead, and nothing has been read:
 * the side that `opens` tries that at the peer's `lid`, the other one waits for its choice. */
int soft_qp_adopt_or_meet(struct soft_qp *qp, int fd, uint16_t lid, bool opens);

/* Called once, under the lock, when an adopted stream is gone: `error` is 0 when the other side (or
 * we) ended it in an orderly way, else an errno value.  Not called after soft_qp_on_link_down(qp,
 * NULL, NULL), nor once the queue pair is destroyed or reset. */
void soft_qp_on_link_down(struct soft_qp *qp,
			  void (*link_down)(struct soft_qp *qp, void *owner, int error),
			  void *owner);

/* Orderly end: the queue pair goes to ERR (everything is flushed), the other side is told, and
 * link_down follows once it has closed its end, at the latest after two seconds.  Under the lock.
 * Returns 0, or ENOTCONN when there is no stream. */
int soft_qp_disconnect(struct soft_qp *qp);

/* cm_stream.c: the queue pair has come to RTR with a stream from the CM; which adopts it at once if
 * the other side was quicker than the application. */
void soft_cm_offer(struct soft_qp *qp);

/* cm_device.c: something of the CM's device context has gone; closes it if nobody needs it any more.
 * Not under the lock. */
void soft_cm_device_sweep(void);

/* cm_device_events.c.  The device has failed: its ids are over.  The process has another LID.  Under
 * the lock. */
void soft_cm_device_removed(void);
void soft_cm_device_moved(void);

/* The verbs calls take the lock themselves; these are their bodies for callers that hold it. */
int soft_modify_qp_locked(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask);

#endif
