/* Wake-ups: which rings are polled, and which peers must notify this process.
 *
 * A step polls the rings of the peers in the poll set, which have written recently. There are few
 * of them, and polling a ring costs one memory access. All other rings, and all rings while no
 * thread polls, are armed (soft_ring_arm): after its next write, the peer writes a byte to a pipe
 * (notify_pipe.h), which is readable in the engine's epoll set.
 *
 * `need_notify` means that no thread polls the rings on its own, so peers must notify. This is the
 * case while the engine's thread sleeps in poll, or a completion queue is armed, because an
 * application thread may then sleep on the channel's fd without another call. It is not the case
 * while an application thread spins, as when it drains completions. engine.c decides.
 *
 * Why no record stays unread: a ring is either armed, or in the poll set with need_notify off. In
 * the first case, its writer notifies unless it has done so since the last visit. Every visit reads
 * until the ring is empty, arms it, and reads once more (ring.h proves that no wake-up is lost).
 * The pipe is readable in epoll, level-triggered, for the thread that sleeps or comes next. A visit
 * that finds no record, because the byte was about room, arms the ring again all the same. In the
 * second case, the engine's thread polls at every tick, or an application thread polls now. Before
 * either stops, it calls soft_shm_need_notify, which arms every ring of the poll set and reads once
 * more. soft_engine_schedule_step, which is also readable in epoll, announces what this finds and
 * what a bounded visit leaves. The same holds for room in a ring that this process writes to: it
 * requests room, arms, and only then checks for the last time.
 *
 * A visit that finds the record it was notified of empties the pipe immediately, without epoll.
 */
#include "shm_internal.h"
#include "objects/objects.h"

enum {
	MAX_POLLED = 32, /* maximum size of the poll set */
	/* consecutive polls without input after which a peer leaves the poll set */
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

/* Make a thread poll, because there is more to read. */
static void poll_again(struct soft_shm_peer *peer)
{
	add_to_poll_set(peer);
	if (soft_device.shm->need_notify)
		soft_engine_schedule_step();
}

/* Arm the ring. Returns true if there is input. The ring of this process is only checked, because
 * no other process writes to it. */
static bool arm(struct soft_shm_peer *peer)
{
	if (peer->self)
		return soft_ring_has_input(&peer->in);
	if (soft_ring_is_armed(&peer->in))
		return false;
	peer->armed = true;
	return soft_ring_arm(&peer->in);
}

/* Empty the pipe of a peer that has notified since its ring was armed, so that it wakes no
 * thread. */
static void ack_notify(struct soft_shm_peer *peer)
{
	if (peer->armed && !soft_ring_is_armed(&peer->in))
		soft_attach_ack_notify(peer);
}

/* Disarm the ring because a thread polls on its own. */
static void disarm(struct soft_shm_peer *peer)
{
	if (!soft_ring_is_armed(&peer->in))
		return; /* not armed, or the peer has notified */
	peer->armed = false;
	soft_ring_disarm(&peer->in);
}

void soft_wakeup_rearm(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	if (soft_ports_down & peer->path.ports)
		return; /* soft_shm_resume() polls again */
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

/* Returns whether the last polls found nothing and the ring is armed as `need_notify` requires. */
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

		/* Move the peer to the end of the list, so that no peer is always last. */
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
