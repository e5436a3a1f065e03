/* The engine's own thread, for the time when no thread of the application comes by.
 *
 * It sleeps without a timeout, so an idle process costs nothing.  When woken it asks: did a thread
 * of the application do work since I last looked, and is nobody asleep who can only be woken by me?
 * Then it stands back: it looks again every half millisecond and serves what has been left lying
 * for a whole tick.  Once it has had to serve, it serves at once from then on, until the
 * application does work again; and if that happens time after time, it does not stand back at all
 * for a while.
 */
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "engine_internal.h"

enum {
	QUIET_TICKS = 8, /* without work or application before the thread sleeps again */
	SOON = 3,
	LET_DOWNS = 8,
};

#define DISTRUST_NS 50000000u
#define DISTRUST_MOST_NS 1000000000u

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
	bool worked = soft_engine_step(SOFT_BY_ENGINE);
	soft_unlock();
	return worked;
}

static bool work_is_ready(void)
{
	struct epoll_event event;

	if (epoll_wait(engine.epoll_fd, &event, 1, 0) > 0)
		return true;
	if (!soft_engine_polls())
		return false;
	soft_lock();
	bool ready = engine.poller->has_input();

	soft_unlock();
	return ready;
}

static void set_asleep(bool asleep)
{
	soft_lock();
	engine.asleep = asleep;
	if (asleep)
		soft_engine_update_notify_need();
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
	engine.ticking = !soft_channels_depend_on_engine();
	bool may = engine.ticking;

	soft_unlock();
	return may;
}

/* The application is at work.  Returns true if it left something lying; *ticks is how long that
 * took it. */
static bool stand_back(unsigned *seen, unsigned *ticks)
{
	const struct timespec tick = {.tv_nsec = SOFT_TICK_NS};
	bool left_lying = false;

	*ticks = 0;
	for (int quiet = 0; quiet < QUIET_TICKS && !left_lying && !stopping();) {
		nanosleep(&tick, NULL);
		++*ticks;
		unsigned served = __atomic_load_n(&engine.served, __ATOMIC_RELAXED);

		if (soft_engine_has_delayed()) {
			soft_lock();
			engine.delayer->send_delayed(SOFT_DELAY_TICK_NS);
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
	engine.delayer->send_delayed(0);
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

void *soft_engine_run(void *unused)
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
