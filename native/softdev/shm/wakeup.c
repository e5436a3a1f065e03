/* Who looks into which ring, and who must be woken.
 *
 * Steps look into the rings of the local peers that are attended: those from which something has come
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
 * soft_shm_need_notify, which asks every attended local peer and looks once more.  What that finds,
 * or what a bounded visit leaves, is announced by soft_engine_schedule_step, which is readable in epoll as
 * well.  The same holds for room in a ring that we write: who waits for it asks, and looks again.
 *
 * Who finds in the ring what it was rung for hears the bell at once, without asking epoll who it was.
 */
#include "shm_internal.h"
#include "objects/objects.h"

enum {
	MAX_POLLED = 32,   /* attended at the same time */
	MAX_IDLE_POLLS = 2000, /* looks for nothing, after which one is attended no more */
};

static struct soft_node poll_set = {&poll_set, &poll_set};
static unsigned count;
static bool need_notify;

static bool is_polled(const struct soft_shm_peer *peer)
{
	return !soft_list_empty(&peer->poll_set);
}

static void add_to_poll_set(struct soft_shm_peer *peer)
{
	if (is_polled(peer))
		return;
	soft_list_append(&poll_set, &peer->poll_set);
	soft_engine_set_polls(++count);
}

void soft_wakeup_remove(struct soft_shm_peer *peer)
{
	if (!is_polled(peer))
		return;
	soft_list_remove(&peer->poll_set);
	soft_engine_set_polls(--count);
}

/* There is more to do: somebody must come by. */
static void poll_again(struct soft_shm_peer *peer)
{
	add_to_poll_set(peer);
	if (need_notify)
		soft_engine_schedule_step();
}

/* True if there is something after all.  Nobody but us writes to ourselves: that is just looked at. */
static bool arm(struct soft_shm_peer *peer)
{
	if (soft_shm_peer_is_self(peer))
		return soft_ring_has_input(&peer->in);
	if (soft_ring_awaits(&peer->in))
		return false;
	peer->armed = true;
	return soft_ring_await(&peer->in);
}

/* It was asked to ring and has: its bell need not wake anybody any more. */
static void ack_notify(struct soft_shm_peer *peer)
{
	if (!peer->armed || soft_ring_awaits(&peer->in))
		return;
	soft_attach_ack_notify(peer);
}

/* Somebody comes by without being asked to. */
static void disarm(struct soft_shm_peer *peer)
{
	if (!soft_ring_awaits(&peer->in))
		return; /* or it has rung */
	peer->armed = false;
	soft_ring_attend(&peer->in);
}

void soft_wakeup_rearm(struct soft_shm_peer *peer)
{
	if (soft_port_is_down())
		return; /* soft_shm_resume */
	if (soft_ring_has_input(&peer->in) || soft_shm_peer_wants_room(peer)) {
		poll_again(peer);
		return;
	}
	if (peer->idle_polls > MAX_IDLE_POLLS || count > MAX_POLLED || soft_shm_peer_is_self(peer))
		soft_wakeup_remove(peer);
	if (is_polled(peer) && !need_notify)
		disarm(peer);
	else if (arm(peer))
		poll_again(peer);
}

/* A look for nothing at a ring of which everything is known. */
static bool is_idle(struct soft_shm_peer *peer)
{
	return is_polled(peer) && peer->idle_polls <= MAX_IDLE_POLLS &&
	       need_notify == soft_ring_awaits(&peer->in) && soft_list_empty(&peer->waiting) &&
	       !peer->ctrl_count;
}

static bool visit(struct soft_shm_peer *peer, size_t share)
{
	soft_shm_peer_hold(peer);
	bool any = soft_shm_peer_receive(peer, share);

	peer->idle_polls = any ? 0 : peer->idle_polls + 1;
	if (any && !peer->dead) {
		add_to_poll_set(peer);
		ack_notify(peer);
		if (soft_ring_is_starved(&peer->in) && soft_ring_wakes(&peer->out))
			soft_attach_notify(peer);
	}
	if (!peer->dead && (any || !is_idle(peer))) {
		soft_shm_peer_offer_room(peer);
		if (!peer->dead)
			soft_wakeup_rearm(peer);
	}
	soft_shm_peer_release(peer);
	return any;
}

void soft_wakeup_visit(struct soft_shm_peer *peer)
{
	visit(peer, soft_step_share());
}

bool soft_shm_poll(void)
{
	size_t share = SOFT_STEP_BYTES / (count + 1);
	bool any = false;

	for (unsigned left = count; left && count; left--) {
		struct soft_shm_peer *peer =
			soft_list_entry(poll_set.next, struct soft_shm_peer, poll_set);

		/* To the end of the line: of many, none comes last every time. */
		soft_list_remove(&peer->poll_set);
		soft_list_append(&poll_set, &peer->poll_set);
		any = visit(peer, share) || any;
	}
	return any;
}

bool soft_shm_has_input(void)
{
	if (soft_port_is_down())
		return false;
	for (struct soft_node *node = poll_set.next; node != &poll_set; node = node->next) {
		struct soft_shm_peer *peer = soft_list_entry(node, struct soft_shm_peer, poll_set);

		if (soft_ring_has_input(&peer->in) || soft_shm_peer_wants_room(peer))
			return true;
	}
	return false;
}

void soft_shm_need_notify(bool on)
{
	bool more = false;

	if (need_notify == on)
		return;
	need_notify = on;
	for (struct soft_node *node = poll_set.next; node != &poll_set; node = node->next) {
		struct soft_shm_peer *peer = soft_list_entry(node, struct soft_shm_peer, poll_set);

		if (!on)
			disarm(peer);
		else if (arm(peer) || soft_shm_peer_wants_room(peer))
			more = true;
	}
	if (more)
		soft_engine_schedule_step();
}

static void resume(struct soft_shm_peer *peer)
{
	if (peer->up)
		poll_again(peer);
}

void soft_shm_resume(void)
{
	soft_shm_each_peer(resume);
}
