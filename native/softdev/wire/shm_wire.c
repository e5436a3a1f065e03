/* The shared-memory wire: a channel, to another process of this host or to ourselves.
 *
 * A channel carries records, and each record whole frames: payload is copied from the application's
 * memory into the ring, and out of it to where it belongs.  Frames and records are short enough
 * that the other side can copy out while we copy in.
 */
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "link.h"

enum {
	CHAN_FRAME_MAX = 32 * 1024,
	CHAN_RECORD_MAX = 4 * CHAN_FRAME_MAX,
	CHAN_FRAMES_MAX = 24, /* small ones: a quicker start for the other side is worth a record */
	LONG_RECORD = 16 * 1024, /* takes longer to copy than an answer to it */
};

/* ---- callbacks of the channel --------------------------------------------------------------- */

static void accepted(struct soft_shm_chan *chan, const uint8_t handshake[SOFT_HANDSHAKE_SIZE])
{
	struct soft_link *link = soft_container(chan, struct soft_link, chan);
	uint8_t bytes[SOFT_HANDSHAKE_SIZE];

	memcpy(bytes, handshake, sizeof(bytes)); /* which it could change while we look */
	link->hello_valid = soft_hello_decode(bytes, &link->peer_hello);
	if (!link->hello_valid)
		link->peer_hello.kind = 0; /* matches no peer */
	if (link->base.state == SOFT_LINK_SELECTING)
		soft_wire_selection_answered(link);
	else
		soft_connect_answered(link);
}

static void data(struct soft_shm_chan *chan, const uint8_t *bytes, size_t length)
{
	struct soft_link *link = soft_container(chan, struct soft_link, chan);

	if (link->base.state != SOFT_LINK_UP) /* closing: its last frames mean nothing any more */
		return;
	link->heard = true;
	link->busy = true;
	soft_link_parse(link, bytes, length);
	if (link->base.state == SOFT_LINK_UP && (link->left || link->header_have))
		soft_link_finish(link, EPROTO);
	/* More of them may have come, as many as a step takes: the sender shall go on meanwhile.  A
	 * refusal is there before the record counts as read (peer_exit.c). */
	bool answers = (length >= LONG_RECORD || link->base.nak_opcode) && soft_link_is_due(link);

	soft_link_release(link);
	if (answers)
		soft_link_output_now(link);
}

static void writable(struct soft_shm_chan *chan)
{
	struct soft_link *link = soft_container(chan, struct soft_link, chan);

	/* Now, and not when the lock is given back: by then other channels would have the room. */
	link->base.blocked = false;
	soft_link_flush(link);
}

static void unread(struct soft_shm_chan *chan, const uint8_t *bytes, size_t length)
{
	soft_peer_exit_unread(soft_container(chan, struct soft_link, chan), bytes, length);
}

static void gone(struct soft_shm_chan *chan, int error)
{
	struct soft_link *link = soft_container(chan, struct soft_link, chan);

	switch (link->base.state) {
	case SOFT_LINK_SELECTING:
		soft_wire_selection_use_tcp(link, true);
		break;
	case SOFT_LINK_HANDSHAKE:
		link->refused = error == ECONNREFUSED;
		soft_connect_later(link);
		break;
	case SOFT_LINK_UP:
		link->busy = true;
		if (error == ECONNRESET)
			soft_peer_exit_shm(link);
		/* An end without DISCONNECT is not orderly, except for a side that has left before
		 * it knew of us. */
		if (link->base.state == SOFT_LINK_UP)
			soft_link_lost(link, error || !link->heard ? error : ECONNRESET);
		soft_link_release(link);
		break;
	default:
		soft_link_finish(link, 0);
	}
}

static const struct soft_shm_chan_ops calls = {
	.accepted = accepted,
	.data = data,
	.writable = writable,
	.unread = unread,
	.gone = gone,
};

/* ---- the wire ------------------------------------------------------------------------------ */

static int up(struct soft_link *link)
{
	(void)link;
	return 0; /* it has been taken in from the start */
}

static size_t room(struct soft_link *link, size_t least)
{
	size_t bytes;

	if (!link->chan.peer)
		return least; /* the child of a fork has inherited it: `give` says so */
	bytes = soft_shm_chan_room(&link->chan, least);
	return bytes < CHAN_RECORD_MAX ? bytes : CHAN_RECORD_MAX;
}

static ssize_t give(struct soft_link *link, struct iovec *iov, int count)
{
	size_t bytes = 0;

	if (!link->chan.peer)
		return -ENOTCONN;
	for (int i = 0; i < count; i++)
		bytes += iov[i].iov_len;
	soft_shm_chan_write(&link->chan, iov, count, bytes);
	return (ssize_t)bytes;
}

static int wait_for_room(struct soft_link *link)
{
	soft_shm_chan_wait(&link->chan);
	return 0;
}

/* The other side will find all that was written and then the end, whatever becomes of us. */
static void end(struct soft_link *link)
{
	soft_link_finish(link, 0);
}

static const struct soft_wire wire = {
	.up = up,
	.room = room,
	.send = give,
	.wait = wait_for_room,
	.end = end,
	.name = AIORDMA_WIRE_SHARED_MEMORY,
	.frame_most = CHAN_FRAME_MAX,
	.frames_most = CHAN_FRAMES_MAX,
};

/* ---- channels for links ---------------------------------------------------------------------- */

bool soft_link_open_chan(struct soft_link *link, const struct soft_qp *qp, uint16_t port)
{
	struct soft_shm_peer *peer = soft_links_may_use_shm() ? soft_shm_peer_at(port) : NULL;
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];

	if (!peer)
		return false;
	soft_handshake_write(handshake, qp, SOFT_HELLO);
	link->chan.calls = &calls;
	if (soft_shm_chan_open(&link->chan, peer, handshake))
		return false;
	link->wire = &wire;
	return true;
}

bool soft_link_accept_chan(struct soft_link *link, struct soft_link *pending_link,
			   const struct soft_qp *qp)
{
	struct soft_shm_peer *from_peer = pending_link->from_peer;
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];

	pending_link->from_peer = NULL;
	soft_handshake_write(handshake, qp, SOFT_HELLO_ACK);
	link->chan.calls = &calls;
	link->wire = &wire;
	return soft_shm_chan_accept(&link->chan, from_peer, pending_link->from_chan, handshake) ==
	       0;
}

int soft_link_over_itself(struct soft_link *link)
{
	link->chan.calls = &calls;
	link->wire = &wire;
	link->to_self = true;
	return soft_shm_chan_to_self(&link->chan);
}
