/* Channels of a path (see path.h).
 *
 * Data stays with its owner until the path has room. Control records are queued here and sent
 * before any data.
 */
#include <sys/uio.h>

#include "path.h"

enum {
	/* The queue of control records can grow to MAX_CTRL_RECORDS. This bounds the memory in use
	 * for a peer that stops reading. */
	CTRL_RECORDS = 96, /* initial size, doubled when full */
	MAX_CTRL_RECORDS = SOFT_MAX_QP,
};
_Static_assert(MAX_CTRL_RECORDS == CTRL_RECORDS << 7, "an OPEN of each queue pair may wait");

enum { ALL_REQUESTS = 0 }; /* see soft_path_acceptor.withdrawn */

struct soft_ctrl_record {
	enum soft_record_kind kind;
	uint32_t to, from, length;
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];
};

static void create(void)
{
	soft_device.paths = soft_alloc_part(sizeof(struct soft_paths));
}

const struct soft_subsystem soft_paths_subsystem = {.create = create};

void soft_path_init(struct soft_path *path, const struct soft_path_calls *calls,
		    void (*flush)(struct soft_deferred *deferred))
{
	path->calls = calls;
	soft_list_init(&path->chans);
	soft_list_init(&path->waiting);
	soft_list_init(&path->flush.node);
	path->flush.run = flush;
}

void soft_path_schedule_failure(struct soft_path *path, int error)
{
	path->pending_error = error;
	soft_defer(&path->flush);
}

/* Remove the channel from its path without notifying its owner or the peer. */
static void detach(struct soft_chan *chan)
{
	struct soft_path *path = chan->path;

	soft_table_remove(&path->chans_by_id, chan->id);
	soft_list_remove(&chan->node);
	soft_list_remove(&chan->waiting);
	if (path->receiving == chan)
		path->receiving = NULL;
	chan->path = NULL;
	chan->id = chan->remote_id = 0;
}

void soft_path_forget(struct soft_path *path)
{
	soft_list_drain (struct soft_chan, chan, &path->chans, node)
		detach(chan);
	free(path->ctrl_records);
}

void soft_path_finish(struct soft_path *path, int error, int64_t missing)
{
	soft_assert_locked();
	path->dead = true;
	soft_deferred_cancel(&path->flush);
	soft_device.paths->acceptor->withdrawn(path, ALL_REQUESTS);
	soft_list_drain (struct soft_chan, chan, &path->chans, node) {
		int64_t written_later = (int64_t)(path->position - chan->position);

		if (missing >= 0 && chan->remote_id) {
			chan->calls->peer_exited(chan, missing > written_later
							       ? (uint64_t)(missing - written_later)
							       : 0);
			/* The callback may have ended and freed the channel. */
			if (soft_list_first(&path->chans, struct soft_chan, node) != chan)
				continue;
		}
		detach(chan);
		chan->calls->closed(chan, error);
	}
	soft_deferred_cancel(&path->flush); /* the callbacks may have scheduled it again */
	free(path->ctrl_records);
	path->ctrl_records = NULL;
	path->ctrl_count = path->ctrl_capacity = 0;
}

/* ---- control records ------------------------------------------------------------------------ */

/* Write a control record to the path. Returns false if there is no room. */
static bool put_ctrl(struct soft_path *path, const struct soft_ctrl_record *ctrl)
{
	const struct iovec payload = {(void *)ctrl->handshake, ctrl->length};
	const struct soft_record_end end = {.iovecs = 1, .bytes = ctrl->length};
	ssize_t room = path->calls->room(path, SOFT_HANDSHAKE_SIZE);

	if (room < 0)
		soft_path_schedule_failure(path, EPROTO);
	if (room < SOFT_HANDSHAKE_SIZE)
		return false;
	path->calls->put(path, ctrl->kind, ctrl->to, ctrl->from, &payload, &end, 1);
	path->position += ctrl->length;
	return true;
}

/* Write the queued control records for which there is room. */
static void flush_ctrl(struct soft_path *path)
{
	uint32_t sent = 0;

	while (sent < path->ctrl_count && put_ctrl(path, &path->ctrl_records[sent]))
		sent++;
	path->ctrl_count -= sent;
	if (sent)
		memmove(path->ctrl_records, path->ctrl_records + sent,
			path->ctrl_count * sizeof(*path->ctrl_records));
}

/* Append a control record to the queue of records that wait for room. Returns false if there are
 * too many or not enough memory. */
static bool grow_and_store_ctrl(struct soft_path *path, const struct soft_ctrl_record *ctrl)
{
	if (path->ctrl_count == path->ctrl_capacity) {
		uint32_t capacity = path->ctrl_capacity ? 2 * path->ctrl_capacity : CTRL_RECORDS;
		struct soft_ctrl_record *ctrl_records =
			capacity > MAX_CTRL_RECORDS
				? NULL
				: realloc(path->ctrl_records, capacity * sizeof(*ctrl_records));

		if (!ctrl_records)
			return false;
		path->ctrl_records = ctrl_records;
		path->ctrl_capacity = capacity;
	}
	path->ctrl_records[path->ctrl_count++] = *ctrl;
	return true;
}

/* Write a control record, or queue it behind others if the path has no room. */
static void send_ctrl(struct soft_path *path, enum soft_record_kind kind, uint32_t to,
		      uint32_t from, const uint8_t *handshake)
{
	struct soft_ctrl_record ctrl = {
		.kind = kind,
		.to = to,
		.from = from,
		.length = handshake ? SOFT_HANDSHAKE_SIZE : 0,
	};

	if (path->dead)
		return;
	if (handshake)
		memcpy(ctrl.handshake, handshake, SOFT_HANDSHAKE_SIZE);
	if ((path->ctrl_count || !put_ctrl(path, &ctrl)) && !grow_and_store_ctrl(path, &ctrl))
		soft_path_schedule_failure(path, ENOMEM);
	soft_defer(&path->flush);
}

int soft_chan_attach(struct soft_chan *chan, struct soft_path *path, uint32_t id,
		     uint32_t remote_id)
{
	int rc = path->dead ? ECONNRESET
		 : id       ? soft_table_put(&path->chans_by_id, id, chan)
			    : soft_table_add(&path->chans_by_id, chan, UINT32_MAX, &id);

	if (rc)
		return rc;
	chan->id = id;
	chan->path = path;
	chan->remote_id = remote_id;
	chan->position = path->position;
	soft_list_append(&path->chans, &chan->node);
	soft_list_init(&chan->waiting);
	return 0;
}

int soft_chan_open(struct soft_chan *chan, struct soft_path *path,
		   const uint8_t handshake[SOFT_HANDSHAKE_SIZE])
{
	soft_assert_locked();
	int rc = soft_chan_attach(chan, path, 0, 0);

	if (!rc)
		send_ctrl(path, SOFT_RECORD_OPEN, 0, chan->id, handshake);
	return rc;
}

int soft_chan_accept(struct soft_chan *chan, struct soft_path *path, uint32_t remote_id,
		     const uint8_t handshake[SOFT_HANDSHAKE_SIZE])
{
	soft_assert_locked();
	int rc = soft_chan_attach(chan, path, 0, remote_id);

	if (rc)
		soft_path_refuse(path, remote_id);
	else
		send_ctrl(path, SOFT_RECORD_ACCEPT, remote_id, chan->id, handshake);
	return rc;
}

void soft_path_refuse(struct soft_path *path, uint32_t remote_id)
{
	soft_assert_locked();
	send_ctrl(path, SOFT_RECORD_END, remote_id, 0, NULL);
}

enum { BY_THIS_SIDE = false, BY_PEER = true };

/* End a path that has no channels left. Pending channel requests from the peer are dropped, because
 * the peer repeats them on another path. */
static void end_if_unused(struct soft_path *path, bool by_peer)
{
	if (!soft_list_empty(&path->chans) || path->dead || !path->calls->idle)
		return;
	soft_device.paths->acceptor->withdrawn(path, ALL_REQUESTS);
	path->calls->idle(path, by_peer);
}

void soft_chan_end(struct soft_chan *chan)
{
	soft_assert_locked();
	struct soft_path *path = chan->path;
	uint32_t id = chan->id, remote_id = chan->remote_id;

	if (!path)
		return;
	detach(chan);
	send_ctrl(path, SOFT_RECORD_END, remote_id, remote_id ? 0 : id, NULL);
	end_if_unused(path, BY_THIS_SIDE);
}

/* ---- data ---------------------------------------------------------------------------------- */

/* Append the channel to the channels that wait for room, unless it waits already. */
static void wait_for_room(struct soft_chan *chan, size_t min_room)
{
	struct soft_path *path = chan->path;

	chan->min_room = min_room;
	if (soft_list_empty(&chan->waiting)) {
		soft_list_append(&path->waiting, &chan->waiting);
		/* A channel that waits again within a round is served in the next one. */
		chan->wait_round = path->offer_round;
	}
	soft_defer(&path->flush);
}

size_t soft_chan_room(struct soft_chan *chan, size_t min_room)
{
	soft_assert_locked();
	struct soft_path *path = chan->path;

	if (!path || !chan->remote_id)
		return 0;
	ssize_t room = path->ctrl_count ? 0 : path->calls->room(path, min_room);

	if (room > 0 && (size_t)room >= min_room)
		return (size_t)room;
	if (room < 0)
		soft_path_schedule_failure(path, EPROTO);
	wait_for_room(chan, min_room);
	return 0;
}

int soft_chan_write(struct soft_chan *chan, const struct iovec *iov,
		    const struct soft_record_end *ends, int count)
{
	soft_assert_locked();
	struct soft_path *path = chan->path;

	count = path->calls->put(path, SOFT_RECORD_DATA, chan->remote_id, 0, iov, ends, count);
	chan->position = path->position += ends[count - 1].bytes;
	soft_defer(&path->flush);
	return count;
}

void soft_chan_wait(struct soft_chan *chan)
{
	soft_assert_locked();
	if (soft_list_empty(&chan->waiting))
		wait_for_room(chan, 1);
}

bool soft_path_has_waiting(const struct soft_path *path)
{
	return path->ctrl_count || !soft_list_empty(&path->waiting);
}

ssize_t soft_path_min_room(const struct soft_path *path)
{
	if (path->ctrl_count)
		return SOFT_HANDSHAKE_SIZE;
	return (ssize_t)soft_list_first(&path->waiting, struct soft_chan, waiting)->min_room;
}

/* Serve each waiting channel at most once per call, so that the first channel does not use up all
 * the room. */
void soft_path_offer_room(struct soft_path *path)
{
	path->offer_round++;
	flush_ctrl(path);
	while (!soft_list_empty(&path->waiting) && !path->ctrl_count &&
	       path->calls->room(path, SOFT_CHAN_MIN_ROOM) >= soft_path_min_room(path)) {
		struct soft_chan *chan = soft_list_first(&path->waiting, struct soft_chan, waiting);

		if (chan->wait_round == path->offer_round)
			break; /* already served in this round */
		soft_list_remove(&chan->waiting);
		chan->calls->writable(chan);
	}
}

/* ---- receiving ----------------------------------------------------------------------------- */

/* Find the accepted channel whose number at the peer is `remote_id`. Search from the newest
 * channel, because a peer that withdraws an OPEN does so soon after sending it. */
static struct soft_chan *find_accepted(const struct soft_path *path, uint32_t remote_id)
{
	for (struct soft_node *at = path->chans.previous; at != &path->chans; at = at->previous) {
		struct soft_chan *chan = soft_container(at, struct soft_chan, node);

		if (chan->remote_id == remote_id)
			return chan;
	}
	return NULL;
}

/* Handle OPEN, ACCEPT or END. Returns false after a protocol error. */
static bool receive_ctrl(struct soft_path *path, enum soft_record_kind kind, uint32_t from,
			 struct soft_chan *chan, const uint8_t *payload, size_t length)
{
	bool has_handshake = kind == SOFT_RECORD_OPEN || kind == SOFT_RECORD_ACCEPT;
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];

	if (has_handshake && (length != SOFT_HANDSHAKE_SIZE || !from))
		return false;
	if (has_handshake)
		memcpy(handshake, payload, SOFT_HANDSHAKE_SIZE);
	switch (kind) {
	case SOFT_RECORD_OPEN:
		soft_device.paths->acceptor->requested(path, from, handshake);
		return true;
	case SOFT_RECORD_ACCEPT:
		if (!chan) {
			soft_path_refuse(path, from);
			return true;
		}
		if (chan->remote_id)
			return false;
		chan->remote_id = from;
		chan->calls->accepted(chan, handshake);
		return true;
	case SOFT_RECORD_END:
		/* With `from`, the peer withdraws its OPEN with that number. This side may have
		 * accepted the channel by now, or may still be deciding. */
		if (from && !chan)
			chan = find_accepted(path, from);
		if (from && !chan)
			soft_device.paths->acceptor->withdrawn(path, from);
		if (chan) {
			detach(chan);
			chan->calls->closed(chan, 0);
			end_if_unused(path, BY_PEER);
		}
		return true;
	default:
		return false;
	}
}

bool soft_path_receive(struct soft_path *path, enum soft_record_kind kind, uint32_t to,
		       uint32_t from, const uint8_t *payload, size_t length)
{
	struct soft_chan *chan = soft_table_find(&path->chans_by_id, to);

	if (kind != SOFT_RECORD_DATA)
		return receive_ctrl(path, kind, from, chan, payload, length);
	if (!length || (chan && !chan->remote_id))
		return false;
	/* If only the header has arrived, the path passes the payload to `receiving` later. DATA for
	 * an unknown channel is dropped. */
	if (!chan || payload == NULL)
		path->receiving = chan;
	else
		chan->calls->data(chan, payload, length, 0);
	return true;
}
