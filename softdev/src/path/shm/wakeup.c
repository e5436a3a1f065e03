/* Wake-ups: which rings are polled, and which peers must notify this process.
 *
 * A step polls the rings of the peers in the poll set: those that have written lately.  There are
 * few of them, and polling costs one memory access each.  All other rings, and all rings while no
 * thread polls, are armed (soft_ring_arm): the peer's next write is followed by a byte in a pipe
 * (notify_pipe.h), which is readable in the engine's epoll set.
 *
 * `need_notify`: no thread polls the rings unprompted, so peers must notify.  That is so while the
 * engine's thread sleeps in epoll_wait, or a completion queue is armed, because an application
 * thread may then sleep on the channel's fd without a further call; but not while an application
 * thread spins (as drains of completions do). engine.c decides.
 *
 * Why no record stays unread.  A ring is either armed, or in the poll set with need_notify off.  In
 * the first case its writer notifies, unless it has done so since the last visit: every visit reads
 * until the ring is empty, arms it, and reads once more (ring.h has the proof for the two
 * memories).  The pipe is readable in epoll, level-triggered, for the thread that sleeps or comes
 * next; and a visit that finds no record, because the byte was about room, arms again all the same.
 * In the second case the engine's thread polls at every tick, or an application thread polls now;
 * before either stops, it calls soft_shm_need_notify, which arms every ring of the poll set and
 * reads once more.  What that finds, or what a bounded visit leaves, is announced by
 * soft_engine_schedule_step, which is readable in epoll as well.  The same holds for room in a ring
 * that this process writes: it asks for room, arms, and only then looks for the last time.
 *
 * A visit that finds the record it was notified of empties the pipe at once, without epoll.
 */
#include "shm_internal.h"
#include "objects/objects.h"

enum {
	MAX_POLLED = 32, /* in the poll set at the same time */
	/* polls in a row that find nothing, after which a peer leaves the poll set */
	MAX_IDLE_POLLS = 2000,
};

static bool is_polled(const struct soft_shm_peer *peer)
{
	return !soft_list_empty(&peer->poll_set);
}

static void add_to_poll_set(struct soft_shm_peer *peer)
{
	if (is_polled(peer))
		return;
	soft_list_append(&soft_device.shm->poll_set, &peer->poll_set);
	soft_engine_set_polls(++soft_device.shm->polled);
}

void soft_wakeup_remove(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	if (!is_polled(peer))
		return;
	soft_list_remove(&peer->poll_set);
	soft_engine_set_polls(--soft_device.shm->polled);
}

/* There is more to read: make some thread poll. */
static void poll_again(struct soft_shm_peer *peer)
{
	add_to_poll_set(peer);
	if (soft_device.shm->need_notify)
		soft_engine_schedule_step();
}

/* True if there is something after all.  Only this process writes to itself: that ring is just
 * checked. */
static bool arm(struct soft_shm_peer *peer)
{
	if (peer->self)
		return soft_ring_has_input(&peer->in);
	if (soft_ring_is_armed(&peer->in))
		return false;
	peer->armed = true;
	return soft_ring_arm(&peer->in);
}

/* The ring was armed and the peer has notified: empty the pipe, so that it wakes no thread. */
static void ack_notify(struct soft_shm_peer *peer)
{
	if (peer->armed && !soft_ring_is_armed(&peer->in))
		soft_attach_ack_notify(peer);
}

/* Some thread polls unprompted. */
static void disarm(struct soft_shm_peer *peer)
{
	if (!soft_ring_is_armed(&peer->in))
		return; /* or the peer has notified */
	peer->armed = false;
	soft_ring_disarm(&peer->in);
}

void soft_wakeup_rearm(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	if (soft_ports_down & peer->path.ports)
		return; /* soft_shm_resume */
	if (soft_ring_has_input(&peer->in) || soft_shm_peer_wants_room(peer)) {
		poll_again(peer);
		return;
	}
	if (peer->idle_polls > MAX_IDLE_POLLS || soft_device.shm->polled > MAX_POLLED || peer->self)
		soft_wakeup_remove(peer);
	if (is_polled(peer) && !soft_device.shm->need_notify)
		disarm(peer);
	else if (arm(peer) || soft_shm_peer_wants_room(peer))
		poll_again(peer);
}

/* True if the last polls were empty and the ring is armed as `need_notify` wants it. */
static bool is_idle(struct soft_shm_peer *peer)
{
	return is_polled(peer) && peer->idle_polls <= MAX_IDLE_POLLS &&
	       soft_device.shm->need_notify == soft_ring_is_armed(&peer->in) &&
	       !soft_path_waits(&peer->path);
}

static bool visit(struct soft_shm_peer *peer, size_t share)
{
	peer->busy++;
	bool any = soft_shm_peer_receive(peer, share);

	peer->idle_polls = any ? 0 : peer->idle_polls + 1;
	if (any && !peer->path.dead) {
		add_to_poll_set(peer);
		ack_notify(peer);
		if (soft_ring_room_requested(&peer->in) && soft_ring_must_notify(&peer->out))
			soft_notify_pipe_notify(&peer->pipe);
	}
	if (!peer->path.dead && (any || !is_idle(peer))) {
		soft_path_offer_room(&peer->path);
		if (!peer->path.dead)
			soft_wakeup_rearm(peer);
	}
	soft_shm_peer_release(peer);
	return any;
}

void soft_wakeup_visit(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	visit(peer, soft_step_share());
}

bool soft_shm_poll(void)
{
	soft_assert_locked();
	size_t share = SOFT_STEP_BYTES / (soft_device.shm->polled + 1);
	bool any = false;

	for (unsigned left = soft_device.shm->polled; left && soft_device.shm->polled; left--) {
		struct soft_shm_peer *peer =
			soft_list_first(&soft_device.shm->poll_set, struct soft_shm_peer, poll_set);

		/* To the end of the list: of many, none comes last every time. */
		soft_list_remove(&peer->poll_set);
		soft_list_append(&soft_device.shm->poll_set, &peer->poll_set);
		any = visit(peer, share) || any;
	}
	return any;
}

bool soft_shm_has_input(void)
{
	soft_assert_locked();
	soft_list_each (struct soft_shm_peer, peer, &soft_device.shm->poll_set, poll_set) {
		if (!(soft_ports_down & peer->path.ports) &&
		    (soft_ring_has_input(&peer->in) || soft_shm_peer_wants_room(peer)))
			return true;
	}
	return false;
}

void soft_shm_need_notify(bool on)
{
	soft_assert_locked();
	bool more = false;

	if (soft_device.shm->need_notify == on)
		return;
	soft_device.shm->need_notify = on;
	soft_list_each (struct soft_shm_peer, peer, &soft_device.shm->poll_set, poll_set) {
		if (!on)
			disarm(peer);
		else if (arm(peer) || soft_shm_peer_wants_room(peer))
			more = true;
	}
	if (more)
		soft_engine_schedule_step();
}

void soft_shm_resume(void)
{
	soft_assert_locked();
	soft_list_each (struct soft_shm_peer, peer, &soft_device.shm->peers, node)
		if (peer->up)
			poll_again(peer);
}
