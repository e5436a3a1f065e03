/* Timers, kept in a pairing heap of structs that are embedded in their owners. Starting a timer
 * therefore allocates no memory and cannot fail. A timerfd in the engine's epoll set expires at the
 * earliest deadline.
 *
 * The device has no periodic work, so an idle process does not wake up for timers.
 */

#include "engine_internal.h"

uint64_t soft_now(void)
{
	struct timespec now;

	soft_device.platform->clock(CLOCK_MONOTONIC, &now);
	return soft_nanoseconds(&now);
}

/* Merge two heaps and return the root. `previous` points to the preceding sibling, or to the parent
 * of a first child. */
static struct soft_timer *meld(struct soft_timer *a, struct soft_timer *b)
{
	if (!a || !b)
		return a ? a : b;
	if (b->deadline_ns < a->deadline_ns) {
		struct soft_timer *swap = a;

		a = b;
		b = swap;
	}
	b->next = a->child;
	if (b->next)
		b->next->previous = b;
	b->previous = a;
	a->child = b;
	return a;
}

/* Merge a list of siblings in two passes. The first pass merges pairs of siblings from left to
 * right. The second pass merges the resulting heaps from right to left. */
static struct soft_timer *meld_siblings(struct soft_timer *first)
{
	struct soft_timer *pairs = NULL;

	while (first) {
		struct soft_timer *a = first;
		struct soft_timer *b = a->next;

		first = b ? b->next : NULL;
		a->next = a->previous = NULL;
		if (b)
			b->next = b->previous = NULL;
		a = meld(a, b);
		a->next = pairs;
		pairs = a;
	}
	struct soft_timer *heap = NULL;

	while (pairs) {
		struct soft_timer *rest = pairs->next;

		pairs->next = NULL;
		heap = meld(heap, pairs);
		pairs = rest;
	}
	return heap;
}

static void remove_from_heap(struct soft_timer *timer)
{
	struct soft_timer *children = meld_siblings(timer->child);

	if (timer == soft_device.engine->timers) {
		soft_device.engine->timers = children;
	} else {
		if (timer->previous->child == timer)
			timer->previous->child = timer->next;
		else
			timer->previous->next = timer->next;
		if (timer->next)
			timer->next->previous = timer->previous;
		soft_device.engine->timers = meld(soft_device.engine->timers, children);
	}
	timer->child = timer->next = timer->previous = NULL;
	timer->running = false;
}

static void set_alarm(void)
{
	/* Leave an earlier alarm as it is. Waking up too early is harmless, and costs less than
	 * setting the alarm again. */
	if (!soft_device.engine->timers ||
	    (soft_device.engine->alarm_deadline_ns &&
	     soft_device.engine->alarm_deadline_ns <= soft_device.engine->timers->deadline_ns))
		return;
	soft_device.engine->alarm_deadline_ns = soft_device.engine->timers->deadline_ns;
	soft_device.platform->alarm(soft_device.engine->alarm_deadline_ns);
}

void soft_timer_start(struct soft_timer *timer, uint64_t deadline_ns)
{
	soft_assert_locked();
	if (timer->running)
		remove_from_heap(timer);
	timer->deadline_ns = deadline_ns ? deadline_ns : 1; /* 0 means that no alarm is set */
	timer->child = timer->next = timer->previous = NULL;
	timer->running = true;
	soft_device.engine->timers = meld(soft_device.engine->timers, timer);
	set_alarm();
}

void soft_timer_stop(struct soft_timer *timer)
{
	soft_assert_locked();
	if (timer->running)
		remove_from_heap(timer);
}

void soft_timers_run(void)
{
	uint64_t now = soft_now();

	soft_device.engine->alarm_deadline_ns = 0;
	while (soft_device.engine->timers && soft_device.engine->timers->deadline_ns <= now) {
		struct soft_timer *timer = soft_device.engine->timers;

		remove_from_heap(timer);
		timer->expired(timer);
	}
	set_alarm();
}

void soft_timers_stop_all(void)
{
	while (soft_device.engine->timers)
		remove_from_heap(soft_device.engine->timers);
	soft_device.engine->alarm_deadline_ns = 0;
}
