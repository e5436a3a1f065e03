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
 * How the engine's thread keeps out of the way.  It sleeps in epoll_wait without a timeout, so an
 * idle process costs nothing.  When woken it asks: did a thread of the application do work since I
 * last looked, and is nobody asleep who can only be woken by me?  Then it stands back: it looks
 * again every half millisecond and serves what has been left lying for a whole tick.  Once it has
 * had to serve, it serves at once from then on, until the application does work again; and if that
 * happens time after time, it does not stand back at all for a while.
 *
 * What is asked.  A step looks into the rings of neighbours first (attention.c), without a system
 * call, then into the epoll set; a thread that polls, while there are such rings, asks epoll every
 * two microseconds, and one that was woken and has found in a ring what it was woken for asks now and
 * then only.  Neighbours need not ring as long as somebody is sure to come by.  That is so while
 * the engine's thread stands back or works, unless a completion queue is armed, because then a thread
 * of the application may go to sleep without telling us; and while a thread looks again and again
 * before it sleeps.  Where the first of these ends and the next begins, mind_neighbours is called
 * before anybody sleeps: with the sleep of the engine's thread, with arming, with the end of looking.
 * A polling application finds its work in the rings, which wakes nobody: so the engine's thread is
 * roused once, to stand back for as long as that goes on.
 *
 * Why one lock.  A step is short (at most about a megabyte copied), queue pairs of one process
 * mostly talk to each other's threads anyway, and one lock makes "no access after dereg_mr returns"
 * and "no callback after unwatch" true by construction.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"
#include "fault.h"
#include "trace.h"

enum {
	TICK_NS = 500 * 1000,
	QUIET_TICKS = 8, /* without work or application before the thread sleeps again */
	NESTED_CHANNELS = 32,
	SOON = 3,
	LET_DOWNS = 8,
	ASK_NS = 2000,
	FIND_NS = TICK_NS,
};

#define DISTRUST_NS 50000000u
#define DISTRUST_MOST_NS 1000000000u

static pthread_mutex_t users_mutex = PTHREAD_MUTEX_INITIALIZER; /* starting and stopping */
static unsigned users;

static struct {
	pthread_mutex_t lock;
	unsigned turns;       /* how often the lock has been given back */
	unsigned waiting;     /* atomic: threads blocked in soft_lock; progress makes room for them */
	unsigned served;      /* atomic: steps of application threads that found something to do */
	unsigned parts;       /* atomic: see interface.h */
	unsigned armed;       /* atomic: CQs that are to wake somebody through a channel */
	unsigned spinning;    /* atomic: threads that look again and again for a moment */
	unsigned staying;     /* those that have something else to do, and come back */
	unsigned incarnation; /* grows in the child of a fork */
	bool running;
	bool stopping; /* atomic */
	bool ticking;  /* the thread stands back, and looks around every tick */
	bool asleep;   /* the thread is in epoll_wait, or on its way */
	uint64_t trust_at; /* it does not stand back before that */
	uint64_t asked_at; /* epoll was asked, by a thread that polls */
	bool silent;   /* sources of the port are not served */

	int epoll_fd;
	int wake_fd;              /* eventfd that ends the thread's sleep, and nobody else's */
	struct soft_source nudge; /* eventfd: there is work that no other fd tells of */
	struct soft_source alarm; /* timerfd of timer.c */
	pthread_t thread;

	struct soft_node sources;  /* everything watched */
	struct soft_node deferred; /* to be done before the lock is given back */
	struct soft_node channels;
	struct soft_channel *current; /* whose owner runs the step under way */

	struct epoll_event events[SOFT_STEP_EVENTS]; /* of the step under way */
	int event_count;
	size_t share;
	struct soft_scratch *scratch;
} engine = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.epoll_fd = -1,
	.wake_fd = -1,
	.sources = {&engine.sources, &engine.sources},
	.deferred = {&engine.deferred, &engine.deferred},
	.channels = {&engine.channels, &engine.channels},
	.share = SOFT_STEP_BYTES,
};

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
	engine.turns++;
	pthread_mutex_unlock(&engine.lock);
}

unsigned soft_lock_turn(void)
{
	return engine.turns;
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

/* ---- sources ------------------------------------------------------------------------------- */

static bool is_silent(const struct soft_source *source)
{
	return engine.silent && source->of_port;
}

static int tell_epoll(int operation, struct soft_source *source, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = source};

	return epoll_ctl(engine.epoll_fd, operation, source->fd, &event) ? errno : 0;
}

int soft_watch(struct soft_source *source, uint32_t events)
{
	int rc = 0;

	if (source->watched && source->interest == events)
		return 0;
	if (!is_silent(source))
		rc = tell_epoll(source->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, source, events);
	if (rc)
		return rc;
	if (!source->watched) {
		source->watched = true;
		soft_list_append(&engine.sources, &source->node);
	}
	source->interest = events;
	return 0;
}

/* The step under way may have collected an event that has not been served yet. */
static void forget_event(const struct soft_source *source)
{
	for (int i = 0; i < engine.event_count; i++)
		if (engine.events[i].data.ptr == source)
			engine.events[i].data.ptr = NULL;
}

void soft_unwatch(struct soft_source *source)
{
	if (!source->watched)
		return;
	if (!is_silent(source))
		tell_epoll(EPOLL_CTL_DEL, source, 0);
	source->watched = false;
	source->interest = 0;
	soft_list_remove(&source->node);
	forget_event(source);
}

void soft_sources_silence(bool silent)
{
	for (struct soft_node *node = engine.sources.next; node != &engine.sources;
	     node = node->next) {
		struct soft_source *source = soft_list_entry(node, struct soft_source, node);

		if (!source->of_port || silent == engine.silent)
			continue;
		/* What epoll had room for it has room for again. */
		tell_epoll(silent ? EPOLL_CTL_DEL : EPOLL_CTL_ADD, source, source->interest);
		if (silent)
			forget_event(source);
	}
	engine.silent = silent;
}

/* ---- steps --------------------------------------------------------------------------------- */

/* Must neighbours ring?  Not when somebody is sure to come by.  Who stays may take longer than he
 * thought, so he counts only while the engine's thread comes by every tick. */
static void mind_neighbours(void)
{
	bool armed = __atomic_load_n(&engine.armed, __ATOMIC_RELAXED);
	bool spinning = __atomic_load_n(&engine.spinning, __ATOMIC_RELAXED);
	bool staying = engine.staying && !engine.asleep;

	soft_neighbours_alert(!spinning && !staying && (armed || engine.asleep));
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
 * shall come by every tick, so that neighbours need not ring. */
static void rouse(void)
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

	if (!patience || !soft_neighbours_attended())
		return false;
	uint64_t now = soft_now();

	if (now - engine.asked_at < patience)
		return true;
	engine.asked_at = now;
	return false;
}

/* Who makes a step: the engine's thread, a thread that has been woken, one that polls. */
enum who { ENGINE, WOKEN, POLLING };

/* Under the lock; the end of the step is in soft_unlock.  Returns whether there was work. */
static bool step(enum who who)
{
	if (!engine.running)
		return false;
	bool found = soft_neighbours_serve();

	if (who != ENGINE && need_not_ask(who == POLLING, found))
		return found;
	int count = epoll_wait(engine.epoll_fd, engine.events, SOFT_STEP_EVENTS, 0);

	if (count <= 0)
		return found;
	engine.event_count = count;
	engine.share = SOFT_STEP_BYTES / (size_t)count;
	for (int i = 0; i < count; i++) {
		struct soft_source *source = engine.events[i].data.ptr;

		if (source)
			source->ready(source, engine.events[i].events);
	}
	engine.event_count = 0;
	engine.share = SOFT_STEP_BYTES;
	return true;
}

static void progress(struct soft_channel *channel, enum who who)
{
	engine.current = channel;
	mind_neighbours();
	soft_acks_step();
	if (step(who)) {
		__atomic_fetch_add(&engine.served, 1, __ATOMIC_RELAXED);
		if (soft_neighbours_attended())
			rouse();
	}
	soft_unlock();
}

void soft_progress_for(struct soft_channel *channel)
{
	/* Waiting for the lock, not trying: the caller may have been woken by work that another
	 * thread is doing at this moment, and would be woken for it again and again. */
	soft_lock();
	progress(channel, __atomic_load_n(&engine.spinning, __ATOMIC_RELAXED) ? POLLING : WOKEN);
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
		progress(NULL, POLLING);
}

void soft_engine_armed(int change)
{
	__atomic_fetch_add(&engine.armed, (unsigned)change, __ATOMIC_RELAXED);
}

/* Also when no neighbour is attended now: what is put before one later, by a call that makes no
 * progress, is announced only if it is known then that nobody comes by. */
void soft_engine_sleepy(void)
{
	soft_lock();
	mind_neighbours();
	soft_unlock();
}

void aiordma_embedded_spin(int begins)
{
	__atomic_fetch_add(&engine.spinning, begins ? 1u : -1u, __ATOMIC_RELAXED);
	if (!begins)
		soft_engine_sleepy();
}

void aiordma_embedded_stay(int change)
{
	soft_lock();
	if (change >= 0 || engine.staying) /* else it was said before a fork */
		engine.staying += (unsigned)change;
	if (change >= 0)
		wake_thread();
	mind_neighbours();
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

void soft_engine_part(void)
{
	__atomic_store_n(&engine.parts, engine.parts + 1, __ATOMIC_RELAXED);
}

bool soft_channel_is_current(const struct soft_channel *channel)
{
	return engine.current == channel;
}

/* ---- the engine's thread ------------------------------------------------------------------- */

/* Is a thread possibly asleep on a channel that only the engine's thread can signal?  That is so
 * when the application has armed a CQ and waits with its own poll() on a channel whose fd shows
 * nothing but signals. */
static bool somebody_depends_on_us(void)
{
	for (struct soft_node *node = engine.channels.next; node != &engine.channels;
	     node = node->next) {
		struct soft_channel *channel = soft_list_entry(node, struct soft_channel, node);

		if (__atomic_load_n(&channel->wanted, __ATOMIC_RELAXED) &&
		    !__atomic_load_n(&channel->nested, __ATOMIC_RELAXED) &&
		    !__atomic_load_n(&channel->sleepers, __ATOMIC_RELAXED))
			return true;
	}
	return false;
}

static bool stopping(void)
{
	return __atomic_load_n(&engine.stopping, __ATOMIC_ACQUIRE);
}

/* Let those in who have been waiting for the lock: an unlock followed at once by a lock would win
 * against a thread that first has to be woken. */
static void make_room(void)
{
	for (int i = 0; i < 50 && __atomic_load_n(&engine.waiting, __ATOMIC_RELAXED); i++)
		sched_yield();
}

static bool serve(void)
{
	make_room();
	soft_lock();
	bool worked = step(ENGINE);
	soft_unlock();
	return worked;
}

static bool work_is_ready(void)
{
	struct epoll_event event;

	if (epoll_wait(engine.epoll_fd, &event, 1, 0) > 0)
		return true;
	if (!soft_neighbours_attended())
		return false;
	soft_lock();
	bool ready = soft_neighbours_have_input();

	soft_unlock();
	return ready;
}

static void set_asleep(bool asleep)
{
	soft_lock();
	engine.asleep = asleep;
	if (asleep)
		mind_neighbours();
	soft_unlock();
}

/* Until there is work, or we are roused. */
static bool sleep_well(void)
{
	/* Not in the epoll set, where it would keep a thread of the application from its sleep. */
	struct pollfd fds[2] = {
		{.fd = engine.epoll_fd, .events = POLLIN},
		{.fd = engine.wake_fd, .events = POLLIN},
	};
	uint64_t count;

	set_asleep(true);
	poll(fds, 2, -1);
	set_asleep(false);
	if (fds[1].revents)
		(void)!read(engine.wake_fd, &count, sizeof(count));
	return fds[0].revents;
}

/* Begin to watch from the side, unless somebody depends on us. */
static bool may_stand_back(void)
{
	soft_lock();
	engine.ticking = !somebody_depends_on_us();
	bool may = engine.ticking;

	soft_unlock();
	return may;
}

/* The application is at work.  Returns true if it left something lying; *ticks is how long that
 * took it. */
static bool stand_back(unsigned *seen, unsigned *ticks)
{
	const struct timespec tick = {.tv_nsec = TICK_NS};
	bool left_lying = false;

	*ticks = 0;
	for (int quiet = 0; quiet < QUIET_TICKS && !left_lying && !stopping();) {
		nanosleep(&tick, NULL);
		++*ticks;
		unsigned served = __atomic_load_n(&engine.served, __ATOMIC_RELAXED);

		if (soft_acks_owed()) {
			soft_lock();
			soft_acks_tick();
			soft_unlock();
		}
		if (served != *seen) {
			*seen = served;
			quiet = 0;
		} else if (work_is_ready()) {
			left_lying = true;
		} else {
			quiet++;
		}
	}
	soft_lock();
	engine.ticking = false;
	soft_acks_send();
	soft_unlock();
	return left_lying;
}

/* How the thread has fared with standing back. */
struct manners {
	unsigned seen;      /* of engine.served */
	bool courteous;     /* the application has done work since we last had to */
	unsigned let_down;  /* how often in a row something was soon left lying all the same */
	uint64_t distrust;  /* for how long, next time */
};

/* True if the work at hand is for us. */
static bool is_for_us(struct manners *manners)
{
	unsigned served = __atomic_load_n(&engine.served, __ATOMIC_RELAXED);

	if (served != manners->seen) {
		manners->seen = served;
		manners->courteous = true;
	}
	if (!manners->courteous || soft_now() < engine.trust_at || !may_stand_back())
		return true;
	unsigned ticks;
	bool left_lying = stand_back(&manners->seen, &ticks);

	/* An application that polls its memory for a peer's writes and the CQ only for its own
	 * does some of the work, and each time leaves just what it waits for to us.  One that was
	 * merely kept from its work for a moment has done much of it before. */
	if (!left_lying || ticks > SOON) {
		manners->let_down = 0;
		manners->distrust = DISTRUST_NS;
	} else if (++manners->let_down >= LET_DOWNS) {
		manners->let_down = 0;
		soft_lock();
		engine.trust_at = soft_now() + manners->distrust;
		soft_unlock();
		if (manners->distrust < DISTRUST_MOST_NS)
			manners->distrust *= 2;
	}
	return left_lying;
}

static void *run(void *unused)
{
	struct manners manners = {
		.seen = __atomic_load_n(&engine.served, __ATOMIC_RELAXED),
		.distrust = DISTRUST_NS,
	};

	(void)unused;
	prctl(PR_SET_NAME, "aiordma-device");
	while (!stopping()) {
		if (!sleep_well() || stopping() || !is_for_us(&manners))
			continue;
		manners.courteous = false;
		serve();
	}
	return NULL;
}

/* ---- start, stop, fork --------------------------------------------------------------------- */

static void alarm_ready(struct soft_source *source, uint32_t events)
{
	uint64_t expirations;

	(void)events;
	if (read(source->fd, &expirations, sizeof(expirations)) == sizeof(expirations))
		soft_timers_run();
}

static void nudge_ready(struct soft_source *source, uint32_t events)
{
	uint64_t count;

	(void)events;
	if (read(source->fd, &count, sizeof(count)) == sizeof(count))
		soft_neighbours_serve();
}

void soft_engine_nudge(void)
{
	const uint64_t one = 1;

	/* It cannot be full, and were it, it would be readable. */
	(void)!write(engine.nudge.fd, &one, sizeof(one));
}

void soft_engine_alarm(uint64_t deadline_ns)
{
	struct itimerspec when = {
		.it_value = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
			     .tv_nsec = (long)(deadline_ns % 1000000000u)},
	};

	timerfd_settime(engine.alarm.fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void close_all(void)
{
	soft_unwatch(&engine.nudge);
	soft_unwatch(&engine.alarm);
	close_fd(&engine.wake_fd);
	close_fd(&engine.nudge.fd);
	close_fd(&engine.alarm.fd);
	close_fd(&engine.epoll_fd);
	free(engine.scratch);
	engine.scratch = NULL;
}

static void before_fork(void)
{
	pthread_mutex_lock(&users_mutex);
	pthread_mutex_lock(&engine.lock);
}

static void after_fork_in_parent(void)
{
	pthread_mutex_unlock(&engine.lock);
	pthread_mutex_unlock(&users_mutex);
}

/* The child has none of the parent's device: it must neither serve the parent's peers nor keep
 * their streams open after the parent's death.  It may open a device of its own.  What it inherited
 * of objects may only be forgotten (ibv_fork_init(3)). */
static void after_fork_in_child(void)
{
	while (!soft_list_empty(&engine.sources)) {
		struct soft_source *source =
			soft_list_entry(engine.sources.next, struct soft_source, node);

		soft_list_remove(&source->node);
		source->watched = false;
		source->interest = 0;
		close_fd(&source->fd);
	}
	close_fd(&engine.epoll_fd);
	close_fd(&engine.wake_fd);
	free(engine.scratch);
	engine.scratch = NULL;
	soft_timers_forget();
	soft_links_forget();
	soft_neighbours_forget();
	soft_listener_shutdown();
	soft_multicast_forget();
	soft_faults_forget();
	soft_list_init(&engine.deferred);
	soft_list_init(&engine.channels);
	soft_port_reset();
	soft_trace_forget();
	engine.running = engine.ticking = engine.silent = engine.asleep = false;
	engine.event_count = 0;
	engine.incarnation++;
	engine.waiting = 0;
	engine.staying = 0;
	users = 0;
	pthread_mutex_unlock(&engine.lock);
	pthread_mutex_unlock(&users_mutex);
}

unsigned soft_engine_incarnation(void)
{
	return engine.incarnation;
}

static int start(void)
{
	static bool fork_handled;
	sigset_t all, before;
	int rc;

	if (!fork_handled) {
		rc = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
		if (rc)
			return rc;
		fork_handled = true;
	}
	rc = soft_links_configure();
	if (!rc)
		rc = soft_path_configure();
	if (!rc)
		rc = soft_faults_of_environment();
	if (!rc)
		rc = soft_trace_begin();
	if (rc)
		return rc;
	soft_timers_forget();
	engine.wake_fd = -1;
	engine.nudge = (struct soft_source){.fd = -1, .ready = nudge_ready};
	engine.alarm = (struct soft_source){.fd = -1, .ready = alarm_ready};
	engine.scratch = malloc(sizeof(*engine.scratch));
	if (!engine.scratch)
		return ENOMEM;
	engine.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	engine.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	engine.nudge.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	engine.alarm.fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	if (engine.epoll_fd < 0 || engine.wake_fd < 0 || engine.nudge.fd < 0 ||
	    engine.alarm.fd < 0) {
		rc = errno;
		close_all();
		return rc;
	}
	rc = soft_watch(&engine.nudge, EPOLLIN);
	if (!rc)
		rc = soft_watch(&engine.alarm, EPOLLIN);
	if (!rc) {
		__atomic_store_n(&engine.stopping, false, __ATOMIC_RELEASE);
		engine.running = true;
		/* Signals are for the application's threads. */
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &before);
		rc = pthread_create(&engine.thread, NULL, run, NULL);
		pthread_sigmask(SIG_SETMASK, &before, NULL);
	}
	if (rc) {
		engine.running = false;
		close_all();
	}
	return rc;
}

int soft_engine_get(void)
{
	int rc = 0;

	pthread_mutex_lock(&users_mutex);
	if (users == 0) {
		soft_lock();
		rc = start();
		soft_unlock();
	}
	if (!rc)
		users++;
	pthread_mutex_unlock(&users_mutex);
	return rc;
}

void soft_engine_put(void)
{
	const uint64_t one = 1;

	pthread_mutex_lock(&users_mutex);
	/* No user is left in the child of a fork, whatever it inherited. */
	if (users && --users == 0) {
		__atomic_store_n(&engine.stopping, true, __ATOMIC_RELEASE);
		if (write(engine.wake_fd, &one, sizeof(one)) != sizeof(one))
			abort(); /* an eventfd that is read now and then cannot be full */
		pthread_join(engine.thread, NULL);
		soft_lock();
		soft_listener_shutdown();
		soft_links_shutdown();
		soft_neighbours_shutdown();
		soft_port_reset();
		soft_faults_forget();
		soft_timers_forget();
		soft_trace_pause();
		engine.running = engine.silent = false;
		close_all();
		soft_unlock();
	}
	pthread_mutex_unlock(&users_mutex);
}

/* ---- channels (the list; channel.c has the rest) ------------------------------------------- */

int soft_engine_epoll_fd(void)
{
	return engine.epoll_fd;
}

/* Which channels show the engine's own readiness: those of completions if any wants to, for their
 * threads do all of the device's work on the way; the others only when there is none of those, lest
 * one frame wakes an application twice.  Not more than the kernel likes: it allows 100 paths of
 * three epoll instances from a file to a waiter (fs/eventpoll.c, path_limits), and beyond that
 * refuses the application's own epoll_ctl. */
static void update_nesting(void)
{
	int leaders = 0, nested = 0;

	for (struct soft_node *node = engine.channels.next; node != &engine.channels;
	     node = node->next) {
		struct soft_channel *channel = soft_list_entry(node, struct soft_channel, node);

		leaders += channel->early && channel->completions;
	}
	for (struct soft_node *node = engine.channels.next; node != &engine.channels;
	     node = node->next) {
		struct soft_channel *channel = soft_list_entry(node, struct soft_channel, node);
		struct epoll_event event = {.events = EPOLLIN};
		bool wanted = channel->early && (channel->completions || !leaders) &&
			      nested < NESTED_CHANNELS;

		nested += wanted;
		/* Should the kernel refuse, the channel is signalled later than it could be. */
		if (wanted != channel->nested &&
		    !epoll_ctl(channel->fd, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL,
			       engine.epoll_fd, &event))
			__atomic_store_n(&channel->nested, wanted, __ATOMIC_RELAXED);
	}
}

void soft_engine_add_channel(struct soft_channel *channel)
{
	soft_list_append(&engine.channels, &channel->node);
}

void soft_engine_remove_channel(struct soft_channel *channel)
{
	soft_list_remove(&channel->node);
	update_nesting();
}

static struct soft_channel *channel_of(int fd)
{
	for (struct soft_node *node = engine.channels.next; node != &engine.channels;
	     node = node->next) {
		struct soft_channel *channel = soft_list_entry(node, struct soft_channel, node);

		if (channel->fd == fd)
			return channel;
	}
	return NULL;
}

void aiordma_wake_early(int fd)
{
	soft_lock();
	struct soft_channel *channel = channel_of(fd);

	if (channel) {
		__atomic_store_n(&channel->early, true, __ATOMIC_RELAXED);
		update_nesting();
	}
	soft_unlock();
}

int aiordma_flat_fds(int fd, int flat[2])
{
	soft_lock();
	struct soft_channel *channel = channel_of(fd);
	int count = 0;

	/* Nested once, a channel of completions stays so: those before it only become fewer. */
	if (channel && channel->completions && channel->nested) {
		/* Another number for it: a child of a fork closes the engine's, and makes new ones. */
		if (channel->flat_fd < 0)
			channel->flat_fd = fcntl(engine.epoll_fd, F_DUPFD_CLOEXEC, 0);
		if (channel->flat_fd >= 0) {
			flat[0] = channel->flat_fd;
			flat[1] = channel->event_fd;
			count = 2;
		}
	}
	soft_unlock();
	return count;
}
