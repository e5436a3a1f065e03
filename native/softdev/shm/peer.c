/* Channels through the rings of a local peer; see shm.h.
 *
 * A channel is opened by OPEN, whose `from` is the number that the answer shall go to; the answer
 * is ACCEPT, with the number at the other end, or END.  Then DATA goes to and fro until one side
 * sends END, which is not answered.  A side that has sent OPEN and has no answer yet withdraws it
 * by an END to number 0, with its own number; an ACCEPT that crosses it is answered with END.  Data
 * to numbers that are no more crossed the END of its channel, and is dropped.
 *
 * Data waits for room with its owner.  Everything else is kept here when there is none, and goes
 * before any data.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "shm_internal.h"

enum kind {
	OPEN = 1,
	ACCEPT,
	DATA,
	END
};

enum {
	/* that wait for room; a peer that reads nothing could make them ever more */
	MAX_CTRL_RECORDS = SOFT_MAX_QP,
};

struct soft_ctrl_record {
	uint32_t kind, to, from, length;
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];
};

/* ---- local peers ---------------------------------------------------------------------------- */

static void flush(struct soft_deferred *deferred);

struct soft_shm_peer *soft_shm_peer_create(void)
{
	struct soft_shm_peer *peer =
		soft_device.shm->count < SOFT_SHM_MAX_PEERS ? calloc(1, sizeof(*peer)) : NULL;

	if (!peer)
		return NULL;
	soft_attach_init(peer);
	soft_list_init(&peer->chans);
	soft_list_init(&peer->waiting);
	soft_list_init(&peer->flush.node);
	soft_list_init(&peer->poll_set);
	soft_list_init(&peer->unidentified);
	peer->flush.run = flush;
	soft_list_append(&soft_device.shm->peers, &peer->node);
	soft_device.shm->count++;
	return peer;
}

void soft_shm_peer_release(struct soft_shm_peer *peer)
{
	if (--peer->busy || !peer->dead)
		return;
	soft_segment_unmap(peer);
	free(peer->ctrl_records);
	free(peer);
}

void soft_shm_each_peer(void (*what)(struct soft_shm_peer *peer))
{
	soft_list_each (struct soft_shm_peer, peer, &soft_device.shm->peers, node)
		what(peer);
}

static void forget(struct soft_shm_chan *chan)
{
	soft_table_remove(&soft_device.shm->chans, chan->id);
	soft_list_remove(&chan->node);
	soft_list_remove(&chan->waiting);
	chan->peer = NULL;
	chan->id = chan->remote_id = 0;
}

/* The records that the peer has not read, to their channels.  The numbers are its own choice: of two
 * channels that have the same, one is asked. */
static int tell_unread(struct soft_shm_peer *peer)
{
	struct soft_table by_number = {0};
	struct soft_ring rest;
	struct soft_record record;
	int rc = soft_ring_unread(&peer->out, &rest) ? 0 : EPROTO;

	for (struct soft_node *node = peer->chans.next; node != &peer->chans && !rc;
	     node = node->next) {
		struct soft_shm_chan *chan = soft_list_entry(node, struct soft_shm_chan, node);

		if (chan->remote_id && !soft_table_find(&by_number, chan->remote_id))
			rc = soft_table_put(&by_number, chan->remote_id, chan);
	}
	while (!rc && (rc = soft_ring_next_unread(&rest, &record)) == 1) {
		struct soft_shm_chan *chan = soft_table_find(&by_number, record.to);

		if (chan && record.kind == DATA)
			chan->calls->unread(chan, record.payload, record.length);
		rc = 0;
	}
	free(by_number.slots);
	return rc;
}

void soft_shm_peer_finish(struct soft_shm_peer *peer, int error)
{
	soft_assert_locked();
	if (peer->dead)
		return;
	peer->dead = true;
	if (peer == soft_device.shm->self)
		soft_device.shm->self = NULL;
	soft_list_remove(&peer->node);
	soft_device.shm->count--;
	soft_deferred_cancel(&peer->flush);
	soft_wakeup_remove(peer);
	soft_attach_end(peer);
	peer->busy++;
	soft_device.shm->acceptor->withdrawn(peer, 0);
	while (!soft_list_empty(&peer->chans)) {
		struct soft_shm_chan *chan =
			soft_list_first(&peer->chans, struct soft_shm_chan, node);

		forget(chan);
		chan->calls->gone(chan, error);
	}
	soft_shm_peer_release(peer);
}

/* What it wrote before its end is in the ring and is taken in first, above all the ENDs of its
 * channels.  It may be alive and write on: no more than one ring is read. */
void soft_shm_peer_drain_and_finish(struct soft_shm_peer *peer)
{
	peer->busy++;
	soft_shm_peer_receive(peer, SOFT_RING_SIZE);
	if (!peer->up)
		soft_shm_peer_finish(peer, ECONNREFUSED);
	else if (!peer->dead) /* what it had read is not known if that fails */
		soft_shm_peer_finish(peer, tell_unread(peer) ? EPROTO : ECONNRESET);
	soft_shm_peer_release(peer);
}

bool soft_shm_peer_is_self(const struct soft_shm_peer *peer)
{
	return peer == soft_device.shm->self;
}

/* ---- control records ------------------------------------------------------------------------ */

/* The ring's positions are impossible, or there is no memory: the peer is ended when the lock is
 * given back. */
static void give_up(struct soft_shm_peer *peer)
{
	peer->broken = true;
	soft_defer(&peer->flush);
}

static bool put_ctrl(struct soft_shm_peer *peer, const struct soft_ctrl_record *ctrl)
{
	const struct iovec payload = {(void *)ctrl->handshake, ctrl->length};
	ssize_t room = soft_ring_room(&peer->out, SOFT_HANDSHAKE_SIZE);

	if (room < 0)
		give_up(peer);
	if (room < SOFT_HANDSHAKE_SIZE)
		return false;
	soft_ring_put(&peer->out,
		      &(struct soft_record){.kind = ctrl->kind,
					    .to = ctrl->to,
					    .from = ctrl->from,
					    .length = ctrl->length},
		      &payload, 1);
	return true;
}

static void flush_ctrl(struct soft_shm_peer *peer)
{
	uint32_t sent = 0;

	while (sent < peer->ctrl_count && put_ctrl(peer, &peer->ctrl_records[sent]))
		sent++;
	peer->ctrl_count -= sent;
	if (sent)
		memmove(peer->ctrl_records, peer->ctrl_records + sent,
			peer->ctrl_count * sizeof(*peer->ctrl_records));
}

static bool keep(struct soft_shm_peer *peer, const struct soft_ctrl_record *ctrl)
{
	if (peer->ctrl_count == peer->ctrl_room) {
		uint32_t room = peer->ctrl_room ? 2 * peer->ctrl_room : 64;
		struct soft_ctrl_record *ctrl_records =
			room > MAX_CTRL_RECORDS
				? NULL
				: realloc(peer->ctrl_records, room * sizeof(*ctrl_records));

		if (!ctrl_records)
			return false;
		peer->ctrl_records = ctrl_records;
		peer->ctrl_room = room;
	}
	peer->ctrl_records[peer->ctrl_count++] = *ctrl;
	return true;
}

static void queue_ctrl(struct soft_shm_peer *peer, enum kind kind, uint32_t to, uint32_t from,
		       const uint8_t *handshake)
{
	struct soft_ctrl_record ctrl = {
		.kind = kind,
		.to = to,
		.from = from,
		.length = handshake ? SOFT_HANDSHAKE_SIZE : 0,
	};

	if (peer->dead)
		return;
	if (handshake)
		memcpy(ctrl.handshake, handshake, SOFT_HANDSHAKE_SIZE);
	if ((peer->ctrl_count || !put_ctrl(peer, &ctrl)) && !keep(peer, &ctrl))
		give_up(peer);
	soft_defer(&peer->flush);
}

static int enter(struct soft_shm_chan *chan, struct soft_shm_peer *peer, uint32_t remote_id)
{
	int rc = peer->dead ? ECONNRESET
			    : soft_table_add(&soft_device.shm->chans, chan, UINT32_MAX, &chan->id);

	if (rc)
		return rc;
	chan->peer = peer;
	chan->remote_id = remote_id;
	soft_list_append(&peer->chans, &chan->node);
	soft_list_init(&chan->waiting);
	return 0;
}

int soft_shm_chan_open(struct soft_shm_chan *chan, struct soft_shm_peer *peer,
		       const uint8_t handshake[SOFT_HANDSHAKE_SIZE])
{
	soft_assert_locked();
	int rc = enter(chan, peer, 0);

	if (!rc)
		queue_ctrl(peer, OPEN, 0, chan->id, handshake);
	return rc;
}

int soft_shm_chan_accept(struct soft_shm_chan *chan, struct soft_shm_peer *peer, uint32_t remote_id,
			 const uint8_t handshake[SOFT_HANDSHAKE_SIZE])
{
	soft_assert_locked();
	int rc = enter(chan, peer, remote_id);

	if (rc)
		soft_shm_peer_refuse(peer, remote_id);
	else
		queue_ctrl(peer, ACCEPT, remote_id, chan->id, handshake);
	return rc;
}

void soft_shm_peer_refuse(struct soft_shm_peer *peer, uint32_t remote_id)
{
	soft_assert_locked();
	queue_ctrl(peer, END, remote_id, 0, NULL);
}

void soft_shm_chan_end(struct soft_shm_chan *chan)
{
	soft_assert_locked();
	struct soft_shm_peer *peer = chan->peer;
	uint32_t id = chan->id, remote_id = chan->remote_id;

	if (!peer)
		return;
	forget(chan);
	queue_ctrl(peer, END, remote_id, remote_id ? 0 : id, NULL);
}

/* ---- data ---------------------------------------------------------------------------------- */

static void wait_for(struct soft_shm_chan *chan, size_t least)
{
	struct soft_shm_peer *peer = chan->peer;

	chan->least = least;
	if (soft_list_empty(&chan->waiting)) {
		soft_list_append(&peer->waiting, &chan->waiting);
		chan->round = peer->round;
	}
	soft_defer(&peer->flush);
}

size_t soft_shm_chan_room(struct soft_shm_chan *chan, size_t least)
{
	soft_assert_locked();
	struct soft_shm_peer *peer = chan->peer;

	if (!peer || !chan->remote_id)
		return 0;
	ssize_t room = peer->ctrl_count ? 0 : soft_ring_room(&peer->out, least);

	if (room > 0 && (size_t)room >= least)
		return (size_t)room;
	if (room < 0)
		give_up(peer);
	wait_for(chan, least);
	return 0;
}

void soft_shm_chan_write(struct soft_shm_chan *chan, const struct iovec *iov, int count,
			 size_t bytes)
{
	soft_assert_locked();
	struct soft_shm_peer *peer = chan->peer;
	uint64_t since = soft_cma_ring_begins(bytes);

	soft_ring_put(&peer->out,
		      &(struct soft_record){
			      .kind = DATA, .to = chan->remote_id, .length = (uint32_t)bytes},
		      iov, count);
	if (peer->cma)
		soft_cma_ring_put(peer->cma, since, bytes);
	soft_defer(&peer->flush);
}

void soft_shm_chan_wait(struct soft_shm_chan *chan)
{
	soft_assert_locked();
	if (soft_list_empty(&chan->waiting))
		wait_for(chan, 1);
}

/* The room that the first waiting channel needs. */
static ssize_t least_of_first(const struct soft_shm_peer *peer)
{
	if (peer->ctrl_count)
		return SOFT_HANDSHAKE_SIZE;
	return (ssize_t)soft_list_first(&peer->waiting, struct soft_shm_chan, waiting)->least;
}

/* There may be room: in turns, or the first would take all of it every time. */
void soft_shm_peer_offer_room(struct soft_shm_peer *peer)
{
	peer->round++;
	flush_ctrl(peer);
	while (!soft_list_empty(&peer->waiting) && !peer->ctrl_count &&
	       soft_ring_room(&peer->out, SOFT_SHM_CHAN_LEAST) >= least_of_first(peer)) {
		struct soft_shm_chan *chan =
			soft_list_first(&peer->waiting, struct soft_shm_chan, waiting);

		if (chan->round == peer->round)
			break; /* it has had its turn, and waits again */
		soft_list_remove(&chan->waiting);
		chan->calls->writable(chan);
	}
}

bool soft_shm_peer_wants_room(struct soft_shm_peer *peer)
{
	if (soft_list_empty(&peer->waiting) && !peer->ctrl_count)
		return false;
	ssize_t room = soft_ring_request_room(&peer->out);

	if (room < 0)
		give_up(peer);
	return room >= least_of_first(peer);
}

/* ---- taking in ----------------------------------------------------------------------------- */

static struct soft_shm_chan *find(const struct soft_shm_peer *peer, uint32_t id)
{
	struct soft_shm_chan *chan = soft_table_find(&soft_device.shm->chans, id);

	return chan && chan->peer == peer ? chan : NULL;
}

/* False: a protocol error. */
static bool deliver(struct soft_shm_peer *peer, const struct soft_record *record)
{
	struct soft_shm_chan *chan = find(peer, record->to);
	bool has_handshake = record->kind == OPEN || record->kind == ACCEPT;
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];

	if (has_handshake && (record->length != SOFT_HANDSHAKE_SIZE || !record->from))
		return false;
	if (has_handshake)
		memcpy(handshake, record->payload, SOFT_HANDSHAKE_SIZE);
	switch (record->kind) {
	case OPEN:
		soft_device.shm->acceptor->requested(peer, record->from, handshake);
		return true;
	case ACCEPT:
		if (!chan) {
			soft_shm_peer_refuse(peer, record->from);
			return true;
		}
		if (chan->remote_id)
			return false;
		chan->remote_id = record->from;
		chan->calls->accepted(chan, handshake);
		return true;
	case DATA:
		if (!record->length || (chan && !chan->remote_id))
			return false;
		if (chan)
			chan->calls->data(chan, record->payload, record->length);
		return true;
	case END:
		if (record->to == 0 && record->from != 0)
			soft_device.shm->acceptor->withdrawn(peer, record->from);
		if (chan) {
			forget(chan);
			chan->calls->gone(chan, 0);
		}
		return true;
	default:
		return false;
	}
}

/* The ring of this process is filled while it is read: in one turn of the lock, no more is taken in
 * than in one step. */
static size_t within_turn(struct soft_shm_peer *peer, size_t budget)
{
	if (peer->turn != soft_lock_turn()) {
		peer->turn = soft_lock_turn();
		peer->allowance = SOFT_STEP_BYTES;
	}
	return budget < peer->allowance ? budget : peer->allowance;
}

bool soft_shm_peer_receive(struct soft_shm_peer *peer, size_t budget)
{
	soft_assert_locked();
	struct soft_record record;
	size_t taken = 0;

	if (peer == soft_device.shm->self)
		budget = within_turn(peer, budget);
	while (taken < budget && !peer->dead && peer->up && !soft_port_is_down()) {
		int rc = soft_ring_next(&peer->in, &record);
		uint64_t copied = soft_device.shm->copied;
		uint64_t since = rc > 0 ? soft_cma_ring_begins(record.length) : 0;

		if (rc == 0)
			break;
		if (rc > 0)
			taken += record.length;
		taken += SOFT_RECORD_HEADER;
		if (rc < 0 || !deliver(peer, &record)) {
			soft_shm_peer_finish(peer, EPROTO);
			break;
		}
		if (peer->dead)
			break;
		if (peer->cma && soft_device.shm->copied == copied)
			soft_cma_ring_took(peer->cma, since, record.length);
		soft_ring_done(&peer->in, &record);
		taken += (size_t)(soft_device.shm->copied - copied); /* what it referred to */
	}
	peer->allowance -= taken < peer->allowance ? taken : peer->allowance;
	return taken;
}

/* ---- ourselves ----------------------------------------------------------------------------- */

static struct soft_shm_peer *ourselves(void)
{
	if (soft_device.shm->self)
		return soft_device.shm->self;
	struct soft_shm_peer *peer = soft_shm_peer_create();

	if (!peer)
		return NULL;
	if (soft_segment_private(peer)) {
		soft_shm_peer_finish(peer, 0);
		return NULL;
	}
	peer->pid = getpid();
	peer->up = true;
	soft_device.shm->self = peer;
	return soft_device.shm->self;
}

int soft_shm_chan_to_self(struct soft_shm_chan *chan)
{
	soft_assert_locked();
	struct soft_shm_peer *peer = ourselves();
	int rc = peer ? enter(chan, peer, 0) : ENOMEM;

	chan->remote_id = chan->id;
	return rc;
}

struct soft_shm_peer *soft_shm_peer_at(uint16_t port)
{
	soft_assert_locked();
	if (!port)
		return NULL;
	if (port == soft_ip_port())
		return ourselves();
	soft_list_each (struct soft_shm_peer, peer, &soft_device.shm->peers, node) {
		if (peer->port == port)
			return peer;
	}
	return soft_attach_begin(port);
}

/* The lock is about to be given back.  What went to ourselves is there at once. */
static void flush(struct soft_deferred *deferred)
{
	struct soft_shm_peer *peer = soft_container(deferred, struct soft_shm_peer, flush);

	if (peer->broken) {
		soft_shm_peer_finish(peer, EPROTO);
	} else if (peer == soft_device.shm->self) {
		soft_wakeup_visit(peer);
	} else {
		bool asleep = soft_ring_flush(&peer->out);

		if (asleep)
			soft_notify_pipe_notify(&peer->pipe);
		soft_engine_count_write(asleep);
		if (soft_shm_peer_wants_room(peer))
			soft_wakeup_rearm(peer);
	}
}

/* ---- the end ------------------------------------------------------------------------------- */

static void stop(void)
{
	while (!soft_list_empty(&soft_device.shm->peers))
		soft_shm_peer_finish(
			soft_list_first(&soft_device.shm->peers, struct soft_shm_peer, node),
			ECONNRESET);
}

/* The rings are not mapped here.  Inherited links may still end their channels. */
static void forked(void)
{
	struct soft_shm *shm = soft_device.shm;

	while (!soft_list_empty(&shm->peers)) {
		struct soft_shm_peer *peer =
			soft_list_first(&shm->peers, struct soft_shm_peer, node);

		soft_list_remove(&peer->node);
		soft_wakeup_remove(peer);
		while (!soft_list_empty(&peer->chans))
			forget(soft_list_first(&peer->chans, struct soft_shm_chan, node));
		soft_cma_detach(peer);
		soft_notify_pipe_close(&peer->pipe);
		free(peer->ctrl_records);
		free(peer);
	}
	shm->self = NULL;
	shm->count = shm->unidentified_count = 0;
	soft_list_init(&shm->unidentified);
}

static void port_changed(enum soft_port_change change)
{
	if (change == SOFT_PORT_UP)
		soft_shm_resume();
}

static void create(void)
{
	struct soft_shm *shm = soft_device.shm = soft_part(sizeof(*shm));

	soft_list_init(&shm->peers);
	soft_list_init(&shm->unidentified);
	soft_list_init(&shm->poll_set);
	soft_list_init(&shm->cmas);
	shm->listener.fd = -1;
	shm->slow = 50000;
}

const struct soft_subsystem soft_shm_subsystem = {
	.create = create,
	.stop = stop,
	.forked = forked,
	.port_changed = port_changed,
	.poll = soft_shm_poll,
	.has_input = soft_shm_has_input,
	.need_notify = soft_shm_need_notify,
};

void soft_shm_use(const struct soft_shm_acceptor *it)
{
	soft_device.shm->acceptor = it;
}
