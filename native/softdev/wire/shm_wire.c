/* The wire that is a way through shared memory, to another process of this host or to ourselves.
 *
 * A way carries records, and each record whole frames: payload is copied from the application's
 * memory into the ring, and out of it to where it belongs.  Frames and records are short enough that
 * the other side can copy out while we copy in.
 */
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "link.h"

enum {
	WAY_FRAME_MOST = 32 * 1024,
	WAY_RECORD_MOST = 4 * WAY_FRAME_MOST,
	WAY_FRAMES_MOST = 24, /* small ones: a quicker start for the other side is worth a record */
	LONG_RECORD = 16 * 1024, /* takes longer to copy than an answer to it */
};

/* ---- what the neighbour says --------------------------------------------------------------- */

static void accepted(struct soft_way *way, const uint8_t greeting[SOFT_GREETING])
{
	struct soft_link *link = soft_container(way, struct soft_link, way);
	uint8_t bytes[SOFT_GREETING];

	memcpy(bytes, greeting, sizeof(bytes)); /* which it could change while we look */
	link->greeted = soft_greeting_decode(bytes, &link->greeting);
	if (!link->greeted)
		link->greeting.kind = 0; /* agrees with nobody */
	if (link->state == SOFT_LINK_CHOOSING)
		soft_choice_welcome(link);
	else
		soft_dial_welcome(link);
}

static void data(struct soft_way *way, const uint8_t *bytes, size_t length)
{
	struct soft_link *link = soft_container(way, struct soft_link, way);

	if (link->state != SOFT_LINK_UP) /* closing: its last frames mean nothing any more */
		return;
	link->heard = true;
	link->busy = true;
	soft_link_parse(link, bytes, length);
	if (link->state == SOFT_LINK_UP && (link->left || link->header_have))
		soft_link_finish(link, EPROTO);
	/* More of them may have come, as many as a step takes: the sender shall go on meanwhile. */
	bool answers = length >= LONG_RECORD && soft_link_is_due(link);

	soft_link_release(link);
	if (answers)
		soft_link_output_now(link);
}

static void writable(struct soft_way *way)
{
	struct soft_link *link = soft_container(way, struct soft_link, way);

	/* Now, and not when the lock is given back: then it would be another way's turn. */
	link->blocked = false;
	soft_link_flush(link);
}

static void gone(struct soft_way *way, int error)
{
	struct soft_link *link = soft_container(way, struct soft_link, way);

	switch (link->state) {
	case SOFT_LINK_CHOOSING:
		soft_choice_stream(link, true);
		break;
	case SOFT_LINK_GREETING:
		link->refused = error == ECONNREFUSED;
		soft_dial_later(link);
		break;
	case SOFT_LINK_UP:
		/* An end without DISCONNECT is one that nobody wanted, but for that of a side which
		 * has left before it knew of us. */
		soft_link_lost(link, error || !link->heard ? error : ECONNRESET);
		break;
	default:
		soft_link_finish(link, 0);
	}
}

static const struct soft_way_calls calls = {
	.accepted = accepted,
	.data = data,
	.writable = writable,
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

	if (!link->way.neighbour)
		return least; /* the child of a fork has inherited it: `give` says so */
	bytes = soft_way_room(&link->way, least);
	return bytes < WAY_RECORD_MOST ? bytes : WAY_RECORD_MOST;
}

static ssize_t give(struct soft_link *link, struct iovec *iov, int count)
{
	size_t bytes = 0;

	if (!link->way.neighbour)
		return -ENOTCONN;
	for (int i = 0; i < count; i++)
		bytes += iov[i].iov_len;
	soft_way_write(&link->way, iov, count, bytes);
	return (ssize_t)bytes;
}

static int wait_for_room(struct soft_link *link)
{
	soft_way_wait(&link->way);
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
	.frame_most = WAY_FRAME_MOST,
	.frames_most = WAY_FRAMES_MOST,
};

/* ---- ways for links ------------------------------------------------------------------------ */

bool soft_link_open_way(struct soft_link *link, const struct soft_qp *qp, uint16_t lid)
{
	struct soft_neighbour *neighbour = soft_links_meet() ? soft_neighbour_at(lid) : NULL;
	uint8_t greeting[SOFT_GREETING];

	if (!neighbour)
		return false;
	soft_greeting_write(greeting, qp, SOFT_GREETING_HELLO);
	link->way.calls = &calls;
	if (soft_way_open(&link->way, neighbour, greeting))
		return false;
	link->wire = &wire;
	return true;
}

bool soft_link_answer_way(struct soft_link *link, struct soft_link *stranger,
			  const struct soft_qp *qp)
{
	struct soft_neighbour *caller = stranger->caller;
	uint8_t greeting[SOFT_GREETING];

	stranger->caller = NULL;
	soft_greeting_write(greeting, qp, SOFT_GREETING_WELCOME);
	link->way.calls = &calls;
	link->wire = &wire;
	return soft_way_accept(&link->way, caller, stranger->caller_way, greeting) == 0;
}

int soft_link_over_itself(struct soft_link *link)
{
	link->way.calls = &calls;
	link->wire = &wire;
	link->to_self = true;
	return soft_way_to_self(&link->way);
}
