/* Wake-ups: choosing between polling a ring and requesting a notification.
 *
 * Each step polls the rings of the poll set, which contains the peers that have written recently.
 * The poll set is small, and polling a ring costs one memory access. All other rings are armed
 * (soft_ring_arm), and so are the rings of the poll set while no thread polls. After its next
 * write to an armed ring, the peer writes a byte to a pipe (notify_pipe.h), which makes the
 * engine's epoll set readable.
 *
 * `need_notify` is set while no thread polls the rings, so that peers must notify this process. It
 * is set while the engine's thread sleeps in poll, and while a completion queue is armed. In the
 * latter case, an application thread may sleep on the channel's fd without calling the device
 * first. The flag is clear while an application thread spins, for example to drain completions.
 * engine.c decides.
 *
 * No record stays unread, because each ring is either armed, or in the poll set with `need_notify`
 * clear.
 *
 * The writer of an armed ring notifies, unless it has already done so since the last visit. Every
 * visit reads until the ring is empty, arms it, and then reads once more. ring.h proves that this
 * loses no wake-up. The pipe is level-triggered in epoll, so it wakes the sleeping thread or the
 * next one to poll. A visit that finds no record, because the notification was about room, arms the
 * ring again.
 *
 * A ring that is not armed is polled by the engine's thread at every tick, or by an application
 * thread. Before such a thread stops polling, it calls soft_shm_set_need_notify, which arms every
 * ring of the poll set and then reads once more. If records are found, or a bounded visit leaves
 * some unread, soft_engine_schedule_step makes the epoll set readable.
 *
 * Room in a ring that this process writes to is handled in the same way: this process requests
 * room, arms its own ring, and only then checks for room once more.
 *
 * A visit that finds the record of a notification empties the pipe immediately, without epoll.
 */
#include "shm_internal.h"
#include "objects/objects.h"

enum {
	MAX_POLLED = 32, /* maximum size of the poll set */
	/* consecutive polls without input before a peer leaves the poll set */
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
	soft_engine_set_has_polled_rings(++soft_device.shm->polled_count);
}

void soft_wakeup_remove(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	if (!is_polled(peer))
		return;
	soft_list_remove(&peer->poll_set);
	soft_engine_set_has_polled_rings(--soft_device.shm->polled_count);
}

/* Add the peer to the poll set, and schedule a step if no thread polls. */
static void poll_again(struct soft_shm_peer *peer)
{
	add_to_poll_set(peer);
	if (soft_device.shm->need_notify)
		soft_engine_schedule_step();
}

/* Arm the ring. Returns true if the ring has input. A ring within this process is only checked for
 * input, because no other process writes to it. */
static bool arm(struct soft_shm_peer *peer)
{
	if (peer->is_self)
		return soft_ring_has_input(&peer->in);
	if (soft_ring_is_armed(&peer->in))
		return false; /* the peer will send a notification of any input */
	peer->may_be_notified = true;
	return soft_ring_arm(&peer->in);
}

/* Empty the pipe if the peer has sent a notification since the ring was armed. The pipe would
 * otherwise wake another thread. */
static void ack_notify(struct soft_shm_peer *peer)
{
	if (peer->may_be_notified && !soft_ring_is_armed(&peer->in))
		soft_attach_ack_notify(peer);
}

/* Disarm the ring, because a thread that polls needs no notification. */
static void disarm(struct soft_shm_peer *peer)
{
	if (!soft_ring_is_armed(&peer->in))
		return; /* never armed, or the peer has already notified */
	peer->may_be_notified = false;
	soft_ring_disarm(&peer->in);
}

void soft_wakeup_poll_or_arm(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	if (soft_ports_down & peer->path.ports)
		return; /* soft_shm_resume() polls again */
	if (soft_ring_has_input(&peer->in) || soft_shm_peer_request_room(peer)) {
		poll_again(peer);
		return;
	}
	/* A ring within this process needs no polling, because it is visited after each write
	 * (flush() in path.c). */
	if (peer->idle_polls > MAX_IDLE_POLLS || soft_device.shm->polled_count > MAX_POLLED ||
	    peer->is_self)
		soft_wakeup_remove(peer);
	if (is_polled(peer) && !soft_device.shm->need_notify)
		disarm(peer);
	else if (arm(peer) || soft_shm_peer_request_room(peer))
		poll_again(peer);
}

/* Returns whether a peer without input needs more than another poll. Its channels may be waiting
 * for room, it may have to join or leave the poll set, or its ring may have to be armed or
 * disarmed. */
static bool needs_update(struct soft_shm_peer *peer)
{
	return soft_path_has_waiting(&peer->path) || !is_polled(peer) ||
	       peer->idle_polls > MAX_IDLE_POLLS ||
	       soft_ring_is_armed(&peer->in) != soft_device.shm->need_notify;
}

/* Handle up to `budget` bytes of input from the peer, and then keep polling its ring or arm it.
 * Returns whether there was input. */
static bool visit(struct soft_shm_peer *peer, size_t budget)
{
	peer->use_count++;
	bool received = soft_shm_peer_receive(peer, budget);

	peer->idle_polls = received ? 0 : peer->idle_polls + 1;
	if (received && !peer->path.dead) {
		add_to_poll_set(peer);
		ack_notify(peer);
		/* Reading has made room in `in`, for which the peer may be waiting. Like a record,
		 * this is worth a notification only if the peer has armed `out`, which it reads.
		 * Otherwise the peer polls, or has already been notified. */
		if (soft_ring_take_room_request(&peer->in) &&
		    soft_ring_take_notify_request(&peer->out))
			soft_notify_pipe_notify(&peer->pipe);
	}
	if (!peer->path.dead && (received || needs_update(peer))) {
		soft_path_offer_room(&peer->path);
		if (!peer->path.dead)
			soft_wakeup_poll_or_arm(peer);
	}
	soft_shm_peer_release(peer);
	return received;
}

void soft_wakeup_visit(struct soft_shm_peer *peer)
{
	soft_assert_locked();
	visit(peer, soft_step_byte_budget());
}

bool soft_shm_poll(void)
{
	soft_assert_locked();
	size_t budget = SOFT_STEP_BYTES / (soft_device.shm->polled_count + 1);
	bool received = false;

	/* Visit each peer once. A visit may also remove peers from the poll set. */
	for (unsigned remaining = soft_device.shm->polled_count;
	     remaining && soft_device.shm->polled_count; remaining--) {
		struct soft_shm_peer *peer =
			soft_list_first(&soft_device.shm->poll_set, struct soft_shm_peer, poll_set);

		/* Rotate the poll set, so that no peer is always served last. */
		soft_list_remove(&peer->poll_set);
		soft_list_append(&soft_device.shm->poll_set, &peer->poll_set);
		received = visit(peer, budget) || received;
	}
	return received;
}

bool soft_shm_has_input(void)
{
	soft_assert_locked();
	soft_list_each (struct soft_shm_peer, peer, &soft_device.shm->poll_set, poll_set) {
		if (!(soft_ports_down & peer->path.ports) &&
		    (soft_ring_has_input(&peer->in) || soft_shm_peer_request_room(peer)))
			return true;
	}
	return false;
}

void soft_shm_set_need_notify(bool on)
{
	soft_assert_locked();
	bool has_work = false;

	if (soft_device.shm->need_notify == on)
		return;
	soft_device.shm->need_notify = on;
	soft_list_each (struct soft_shm_peer, peer, &soft_device.shm->poll_set, poll_set) {
		if (!on)
			disarm(peer);
		else if (arm(peer) || soft_shm_peer_request_room(peer))
			has_work = true;
	}
	if (has_work)
		soft_engine_schedule_step();
}

void soft_shm_resume(void)
{
	soft_assert_locked();
	soft_list_each (struct soft_shm_peer, peer, &soft_device.shm->peers, node)
		if (peer->is_attached)
			poll_again(peer);
}
