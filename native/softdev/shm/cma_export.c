/* The owner's side of cma.h: what the other process may copy, and how that ends. */
#include <string.h>
#include <time.h>

#include "objects/objects.h"
#include "cma.h"

enum {
	SPINS = 200,    /* looks at the busy mark before sleeping in between */
	LET_DOWNS = 8,  /* waits in vain after which nothing is granted any more */
};

#define PAUSE_NS 20000u
#define TAKE_BACK_NS 5000000u /* many times what a copy takes that is not held up */

bool soft_reach_is_open(const struct soft_reach *reach)
{
	/* Who is always busy when memory is taken back would make every such call wait. */
	return reach->let_downs < LET_DOWNS &&
	       __atomic_load_n(&reach->peer->copies, __ATOMIC_ACQUIRE);
}

static bool is_done(const struct soft_reach *reach, const struct soft_grant *grant)
{
	return __atomic_load_n(&reach->peer->done[grant->slot], __ATOMIC_ACQUIRE) ==
	       grant->generation;
}

/* Each slot's generations count up, so that nothing said about one is taken for another. */
static void renew(struct soft_reach *reach, const struct soft_grant *grant)
{
	__atomic_store_n(&reach->own->generation[grant->slot], grant->generation + 1,
			 __ATOMIC_RELEASE);
}

struct soft_grant *soft_reach_grant(struct soft_reach *reach)
{
	/* They are done with about in the order in which they are given. */
	for (unsigned i = 0; i < SOFT_REACH_SLOTS; i++) {
		uint32_t slot = (reach->cursor + i) % SOFT_REACH_SLOTS;
		struct soft_grant *grant = &reach->grants[slot];

		if (grant->used && !is_done(reach, grant))
			continue;
		reach->used += !grant->used;
		*grant = (struct soft_grant){
			.used = true,
			.slot = slot,
			.generation = grant->generation + 1,
			.order = reach->order++,
		};
		__atomic_store_n(&reach->own->generation[slot], grant->generation,
				 __ATOMIC_RELEASE);
		reach->cursor = slot + 1;
		return grant;
	}
	return NULL;
}

void soft_reach_cancel(struct soft_reach *reach, struct soft_grant *grant)
{
	renew(reach, grant);
	grant->generation++;
	grant->used = false;
	reach->used--;
}

/* Until the other side is not busy with one of these. */
static void wait_for(struct soft_reach *reach, const bool taken[SOFT_REACH_SLOTS])
{
	const struct timespec pause = {.tv_nsec = PAUSE_NS};
	uint64_t deadline = 0;

	if (reach->own == reach->peer)
		return; /* we copy ourselves, under the same lock */
	for (unsigned looks = 0;; looks++) {
		uint32_t busy = __atomic_load_n(&reach->peer->busy, __ATOMIC_ACQUIRE);

		if (busy == 0 || busy > SOFT_REACH_SLOTS || !taken[busy - 1])
			return;
		if (looks < SPINS)
			continue;
		if (!deadline)
			deadline = soft_now() + TAKE_BACK_NS;
		if (soft_now() >= deadline) {
			reach->let_downs++;
			return;
		}
		nanosleep(&pause, NULL);
	}
}

/* By `order`, which few of them are out of. */
static void sort(struct soft_grant *grants, unsigned count)
{
	for (unsigned i = 1; i < count; i++) {
		struct soft_grant grant = grants[i];
		unsigned at = i;

		for (; at && grants[at - 1].order > grant.order; at--)
			grants[at] = grants[at - 1];
		grants[at] = grant;
	}
}

unsigned soft_reach_take_back(struct soft_reach *reach,
			      bool (*concerned)(const struct soft_grant *grant, const void *what),
			      const void *what, struct soft_grant lost[SOFT_REACH_SLOTS])
{
	bool taken[SOFT_REACH_SLOTS] = {false};
	unsigned count = 0;

	for (unsigned slot = 0; slot < SOFT_REACH_SLOTS && reach->used; slot++) {
		struct soft_grant *grant = &reach->grants[slot];

		if (!grant->used)
			continue;
		if (is_done(reach, grant)) {
			grant->used = false;
			reach->used--;
		} else if (concerned(grant, what)) {
			taken[slot] = true;
			lost[count++] = *grant;
			soft_reach_cancel(reach, grant);
		}
	}
	if (!count)
		return 0;
	/* Before the mark is looked at: see soft_reach_copy. */
	__sync_synchronize();
	wait_for(reach, taken);

	unsigned left = 0;

	for (unsigned i = 0; i < count; i++)
		if (!is_done(reach, &lost[i]))
			lost[left++] = lost[i];
	sort(lost, left);
	return left;
}
