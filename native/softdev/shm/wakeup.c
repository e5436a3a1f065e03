/* Who looks into which ring, and who must be woken.
 *
 * Steps look into the rings of the neighbours that are attended: those from which something has come
 * lately.  A few of them are, and looking costs a memory access each; the others, and all of them
 * while nobody comes by by himself, have been asked to ring (ring.h: soft_ring_await), which is a
 * byte in a pipe (notify_pipe.h), and shows in the engine's epoll set.
 *
 * Nobody comes by (`alert`) when the engine's thread sleeps in epoll_wait, or when a completion queue
 * is armed: then a thread of the application may be asleep with the channel's fd, without a word to
 * us.  But not while one looks again and again for a while before that (aiordma_drain).  engine.c
 * says which of these it is.
 *
 * Why no record is left lying.  A ring is either awaited, or it is attended and there is no alert.
 * In the first case its writer rings, unless it has rung before and we have not looked since: every
 * visit looks until the ring is empty, asks to be woken, and looks once more (ring.h has the proof for
 * the two memories).  A ring that rings is readable in epoll, level-triggered, for whoever sleeps or
 * comes next; and a visit that finds nothing, because the bell was for room, asks again all the same.
 * In the second case the engine's thread is awake and looks at every tick, or a thread of the
 * application is looking now; and before either of them stops doing so, it calls
 * soft_neighbours_alert, which asks every attended neighbour and looks once more.  What that finds,
 * or what a bounded visit leaves, is announced by soft_engine_nudge, which is readable in epoll as
 * well.  The same holds for room in a ring that we write: who waits for it asks, and looks again.
 *
 * Who finds in the ring what it was rung for hears the bell at once, without asking epoll who it was.
 */
#include "shm_internal.h"
#include "objects/objects.h"

enum {
	MOST = 32,   /* attended at the same time */
	VAIN = 2000, /* looks for nothing, after which one is attended no more */
};

static struct soft_node attended = {&attended, &attended};
static unsigned count; /* atomic */
static bool alert;

static bool is_attended(const struct soft_neighbour *neighbour)
{
	return !soft_list_empty(&neighbour->attended);
}

static void attend(struct soft_neighbour *neighbour)
{
	if (is_attended(neighbour))
		return;
	soft_list_append(&attended, &neighbour->attended);
	__atomic_store_n(&count, count + 1, __ATOMIC_RELAXED);
}

void soft_attention_forget(struct soft_neighbour *neighbour)
{
	if (!is_attended(neighbour))
		return;
	soft_list_remove(&neighbour->attended);
	__atomic_store_n(&count, count - 1, __ATOMIC_RELAXED);
}

bool soft_neighbours_attended(void)
{
	return __atomic_load_n(&count, __ATOMIC_RELAXED);
}

/* There is more to do: somebody must come by. */
static void come_again(struct soft_neighbour *neighbour)
{
	attend(neighbour);
	if (alert)
		soft_engine_nudge();
}

/* True if there is something after all.  Nobody but us writes to ourselves: that is just looked at. */
static bool await(struct soft_neighbour *neighbour)
{
	if (soft_neighbour_is_self(neighbour))
		return soft_ring_has_input(&neighbour->in);
	if (soft_ring_awaits(&neighbour->in))
		return false;
	neighbour->asked = true;
	return soft_ring_await(&neighbour->in);
}

/* It was asked to ring and has: its bell need not wake anybody any more. */
static void hush(struct soft_neighbour *neighbour)
{
	if (!neighbour->asked || soft_ring_awaits(&neighbour->in))
		return;
	soft_meeting_hush(neighbour);
}

/* Somebody comes by without being asked to. */
static void unask(struct soft_neighbour *neighbour)
{
	if (!soft_ring_awaits(&neighbour->in))
		return; /* or it has rung */
	neighbour->asked = false;
	soft_ring_attend(&neighbour->in);
}

void soft_attention_see(struct soft_neighbour *neighbour)
{
	if (soft_port_is_down())
		return; /* soft_neighbours_resume */
	if (soft_ring_has_input(&neighbour->in) || soft_neighbour_starves(neighbour)) {
		come_again(neighbour);
		return;
	}
	if (neighbour->vain > VAIN || count > MOST || soft_neighbour_is_self(neighbour))
		soft_attention_forget(neighbour);
	if (is_attended(neighbour) && !alert)
		unask(neighbour);
	else if (await(neighbour))
		come_again(neighbour);
}

/* A look for nothing at a ring of which everything is known. */
static bool is_idle(struct soft_neighbour *neighbour)
{
	return is_attended(neighbour) && neighbour->vain <= VAIN &&
	       alert == soft_ring_awaits(&neighbour->in) && soft_list_empty(&neighbour->waiting) &&
	       !neighbour->word_count;
}

static bool visit(struct soft_neighbour *neighbour, size_t share)
{
	soft_neighbour_hold(neighbour);
	bool any = soft_neighbour_take_in(neighbour, share);

	neighbour->vain = any ? 0 : neighbour->vain + 1;
	if (any && !neighbour->dead) {
		attend(neighbour);
		hush(neighbour);
		if (soft_ring_is_starved(&neighbour->in) && soft_ring_wakes(&neighbour->out))
			soft_meeting_ring(neighbour);
	}
	if (!neighbour->dead && (any || !is_idle(neighbour))) {
		soft_neighbour_offer_room(neighbour);
		if (!neighbour->dead)
			soft_attention_see(neighbour);
	}
	soft_neighbour_release(neighbour);
	return any;
}

void soft_attention_visit(struct soft_neighbour *neighbour)
{
	visit(neighbour, soft_step_share());
}

bool soft_neighbours_serve(void)
{
	size_t share = SOFT_STEP_BYTES / (count + 1);
	bool any = false;

	for (unsigned left = count; left && count; left--) {
		struct soft_neighbour *neighbour =
			soft_list_entry(attended.next, struct soft_neighbour, attended);

		/* To the end of the line: of many, none comes last every time. */
		soft_list_remove(&neighbour->attended);
		soft_list_append(&attended, &neighbour->attended);
		any = visit(neighbour, share) || any;
	}
	return any;
}

bool soft_neighbours_have_input(void)
{
	if (soft_port_is_down())
		return false;
	for (struct soft_node *node = attended.next; node != &attended; node = node->next) {
		struct soft_neighbour *neighbour =
			soft_list_entry(node, struct soft_neighbour, attended);

		if (soft_ring_has_input(&neighbour->in) || soft_neighbour_starves(neighbour))
			return true;
	}
	return false;
}

void soft_neighbours_alert(bool on)
{
	bool more = false;

	if (alert == on)
		return;
	alert = on;
	for (struct soft_node *node = attended.next; node != &attended; node = node->next) {
		struct soft_neighbour *neighbour =
			soft_list_entry(node, struct soft_neighbour, attended);

		if (!on)
			unask(neighbour);
		else if (await(neighbour) || soft_neighbour_starves(neighbour))
			more = true;
	}
	if (more)
		soft_engine_nudge();
}

static void resume(struct soft_neighbour *neighbour)
{
	if (neighbour->up)
		come_again(neighbour);
}

void soft_neighbours_resume(void)
{
	soft_neighbours_all(resume);
}
