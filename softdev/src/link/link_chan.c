/* The callbacks that a path uses for a link's channel, and the functions that open this channel. */
#include <sys/uio.h>

#include "link_internal.h"

enum {
	/* size in bytes at which copying a record through a ring begins to take longer than
	 * sending a response */
	LONG_RECORD = 16 * 1024,
	STREAM_CHAN = 1, /* channel number at both ends of a stream from the CM */
};

static struct soft_link *link_of(struct soft_chan *chan)
{
	return soft_container(chan, struct soft_link, chan);
}

/* Handle the peer's response to the channel that this link has requested. */
static void handle_accepted(struct soft_chan *chan, const uint8_t handshake[SOFT_HANDSHAKE_SIZE])
{
	struct soft_link *link = link_of(chan);

	link->hello_valid = soft_hello_decode(handshake, &link->peer_hello);
	if (!link->hello_valid)
		link->peer_hello.kind = 0; /* not a valid kind */
	if (link->base.state == SOFT_LINK_SELECTING)
		soft_selection_response_received(link);
	else
		soft_connect_response_received(link);
}

/* Finish the link with EPROTO if a record ends in the middle of a frame. */
static void check_record_end(struct soft_link *link)
{
	if (link->base.state == SOFT_LINK_UP && (link->remaining || link->header_received))
		soft_link_finish(link, EPROTO);
}

static void handle_data(struct soft_chan *chan, const uint8_t *bytes, size_t length,
			size_t remaining_in_record)
{
	struct soft_link *link = link_of(chan);

	if (link->base.state != SOFT_LINK_UP) /* a closing link ignores the remaining frames */
		return;
	link->has_received = true;
	link->busy = true;
	soft_link_input(link, bytes, length);
	if (!remaining_in_record)
		check_record_end(link);
	/* Respond to a long record now, so that the sender can continue while this side handles the
	 * rest of its input. Also send a NAK now, before this record is marked as read. If this
	 * process ended after marking the record, but before sending the NAK, the peer would
	 * complete the refused request (peer_exit.c). */
	bool respond_now = (length >= LONG_RECORD || link->base.nak_opcode) &&
			   soft_link_has_output(link) && soft_path_is_local(chan->path);

	soft_link_release(link);
	if (respond_now) /* a link with output is up, so soft_link_release() has not freed it */
		soft_link_output_now(link);
}

/* Let the path store the next payload bytes directly in the application's memory
 * (soft_chan_ops.map_payload). Returns the number of iovecs, or 0 if the bytes must be copied. */
static int map_payload(struct soft_chan *chan, size_t length, struct iovec *iov, int room)
{
	struct soft_link *link = link_of(chan);
	int count;

	/* Only TCP paths call this function. A frame with pieces carries a descriptor instead of a
	 * payload, and begin_frame() in link_input.c rejects it on a TCP path. */
	if (link->base.state != SOFT_LINK_UP || link->remaining < SOFT_DIRECT_MIN ||
	    link->frame.pieces)
		return 0;
	link->busy = true;
	count = soft_link_map_payload(
		link, length < link->remaining ? (uint32_t)length : link->remaining, iov, room);
	soft_link_release(link);
	return count;
}

static void payload_stored(struct soft_chan *chan, size_t length, size_t remaining_in_record)
{
	struct soft_link *link = link_of(chan);

	link->busy = true;
	soft_link_payload_consumed(link, (uint32_t)length);
	if (!remaining_in_record)
		check_record_end(link);
	soft_link_release(link);
}

static void writable(struct soft_chan *chan)
{
	struct soft_link *link = link_of(chan);

	/* Write now: other channels would use up the room before the lock is released. */
	link->base.blocked = false;
	soft_link_flush(link);
}

static void report_unread(struct soft_chan *chan, const uint8_t *bytes, size_t length)
{
	soft_peer_exit_unread(link_of(chan), bytes, length);
}

/* Complete the requests that the peer's process had read before it ended. */
static void peer_exited(struct soft_chan *chan, uint64_t missing)
{
	struct soft_link *link = link_of(chan);

	link->busy = true;
	if (soft_path_is_local(chan->path))
		soft_peer_exit_shm(link);
	else
		soft_peer_exit_tcp(link, missing);
	soft_link_release(link);
}

/* React to the end of the link's channel, which depends on how far the link had come. */
static void channel_closed(struct soft_chan *chan, int error)
{
	struct soft_link *link = link_of(chan);

	switch (link->base.state) {
	case SOFT_LINK_SELECTING:
		soft_selection_use_tcp(link, true);
		break;
	case SOFT_LINK_HANDSHAKE:
		/* A process that refuses to share memory may still accept a TCP stream. */
		link->attach_refused = !link->over_tcp && error == ECONNREFUSED;
		soft_connect_retry_later(link);
		break;
	case SOFT_LINK_UP:
		/* An end without DISCONNECT is an error, unless the peer has not sent anything on
		 * this link. */
		soft_link_lost(link, error || !link->has_received ? error : ECONNRESET);
		break;
	default:
		soft_link_finish(link, 0);
	}
}

/* Returns whether the path must probe the peer's machine for this link. If `waiting` is set, only
 * an unanswered reliable request requires a probe. Otherwise, the handshake requires one. After the
 * handshake, a probe is required if the queue pair must notice that its peer has ended. */
static bool needs_probe(struct soft_chan *chan, bool waiting)
{
	const struct soft_qp *qp = link_of(chan)->qp;

	if (!qp)
		return false;
	return waiting ? !soft_qp_is_uc(qp) && qp->sq.oldest != qp->sq.next
		       : link_of(chan)->base.state != SOFT_LINK_UP || qp->ends_with_peer ||
				 qp->on_link_down;
}

/* Give up on the channel, because the peer's machine has been silent for too long. */
static void end_after_silence(struct soft_chan *chan)
{
	struct soft_link *link = link_of(chan);

	if (link->base.state == SOFT_LINK_HANDSHAKE)
		soft_connect_retry_later(link);
	else if (link->base.state == SOFT_LINK_SELECTING)
		soft_selection_use_tcp(link, true);
	else
		soft_link_finish(link, ETIMEDOUT);
}

const struct soft_chan_ops soft_link_chan_calls = {
	.accepted = handle_accepted,
	.data = handle_data,
	.map_payload = map_payload,
	.payload_stored = payload_stored,
	.writable = writable,
	.report_unread = report_unread,
	.peer_exited = peer_exited,
	.needs_probe = needs_probe,
	.end_after_silence = end_after_silence,
	.closed = channel_closed,
};

void soft_link_set_liveness_limit(struct soft_link *link)
{
	const struct soft_qp *qp = link->qp;
	struct soft_path *path = link->chan.path;
	uint64_t limit = soft_liveness_limit();

	if (!soft_qp_is_uc(qp) && qp->ibv.state == IBV_QPS_RTS) {
		if (qp->attr.timeout == 0)
			limit = 0;
		else if (limit < soft_qp_retry_time(qp))
			limit = soft_qp_retry_time(qp);
	}
	link->chan.silence_limit_ns = limit;
	if (path && path->calls->silence_limit_changed)
		path->calls->silence_limit_changed(path);
}

/* ---- channels for links ---------------------------------------------------------------------- */

bool soft_link_open_chan(struct soft_link *link, const struct soft_qp *qp, struct soft_path *path)
{
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];

	if (!path)
		return false;
	soft_handshake_write(handshake, qp, SOFT_HELLO);
	return soft_chan_open(&link->chan, path, handshake) == 0;
}

bool soft_link_accept_chan(struct soft_link *link, struct soft_link *pending_link,
			   const struct soft_qp *qp)
{
	struct soft_path *path = pending_link->request_path;
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];

	pending_link->request_path = NULL;
	soft_handshake_write(handshake, qp, SOFT_HELLO_ACK);
	return soft_chan_accept(&link->chan, path, pending_link->request_chan, handshake) == 0;
}

int soft_link_over_stream(struct soft_link *link, int fd)
{
	struct soft_tcp_path *tcp = soft_tcp_path_adopt(fd);
	int rc = tcp ? soft_chan_attach(&link->chan, &tcp->path, STREAM_CHAN, STREAM_CHAN) : ENOMEM;

	if (rc && tcp) /* close the stream, which has no channel */
		tcp->path.calls->idle(&tcp->path, false);
	return rc;
}

struct soft_path *soft_link_shm_path(const struct soft_qp *qp, uint16_t ip_port)
{
	const union ibv_gid peer = soft_qp_peer_gid(qp);

	return soft_shm_path_at(ip_port, soft_qp_hca(qp)->port_bit, soft_gid_hca_number(&peer));
}
