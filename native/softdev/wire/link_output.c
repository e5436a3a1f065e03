/* Sending: frames are gathered and given to the wire together.
 *
 * A batch takes answers and requests in turns, then a NAK if one waits, and an acknowledgement if
 * no other frame carries it.  Headers and small payloads are put one behind the other into scratch
 * memory; long payloads are sent from the application's memory.  The batch is built on a cursor, a
 * copy of the positions; only what the wire has taken moves the positions themselves.  A frame that
 * it has taken in part is continued before anything else.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "cma_descriptor.h"

enum {
	IOVECS = 256,
	COPY_MAX = 1024, /* payload that is copied behind its header rather than given an iovec */
};

struct batch {
	struct soft_link *link;
	struct soft_tx_cursor cursor;
	int frame_count;
	int iov_count;
	size_t used;  /* of the scratch memory */
	size_t bytes; /* in all */
	size_t room;  /* of the wire */
	size_t cma_bytes; /* bytes that are not among these */
	bool closed; /* to requests: the next one cannot be sent */
	struct soft_tx_packet frames[SOFT_LINK_FRAMES];
	struct iovec iov[IOVECS];
};

static bool is_answer(const struct soft_tx_packet *out)
{
	return out->frame.opcode == SOFT_READ_DATA || out->frame.opcode == SOFT_ATOMIC_DATA;
}

static int gather(struct soft_qp *qp, const struct soft_tx_packet *out, uint32_t from,
		  uint32_t length, struct iovec *iov, int room)
{
	if (length == 0)
		return 0;
	if (is_answer(out))
		return soft_responder_gather(qp, out, from, length, iov, room);
	return soft_requester_gather(qp, out, from, length, iov, room);
}

/* Room without which no frame is begun.  All frames of a message but the last are of the same
 * length, so that they are the same ones when they have to be sent again. */
static size_t frame_room(const struct soft_link *link)
{
	return SOFT_FRAME_HEADER + (size_t)link->wire->frame_most;
}

static bool has_room(const struct batch *batch)
{
	return batch->frame_count < batch->link->wire->frames_most &&
	       batch->bytes < SOFT_STEP_BYTES &&
	       batch->cma_bytes < SOFT_CMA_FRAME_MAX && /* see soft_cma_desc_receive */
	       batch->room - batch->bytes >= frame_room(batch->link) &&
	       batch->iov_count + SOFT_MAX_SGE + 2 <= IOVECS &&
	       batch->used + SOFT_FRAME_HEADER + COPY_MAX <= SOFT_STAGING_SIZE;
}

/* Adds bytes that are in scratch memory already; adjoining ones share an iovec. */
static void add_scratch(struct batch *batch, size_t length)
{
	uint8_t *at = soft_scratch()->output + batch->used;
	struct iovec *last = batch->iov_count ? &batch->iov[batch->iov_count - 1] : NULL;

	if (last && (uint8_t *)last->iov_base + last->iov_len == at)
		last->iov_len += length;
	else
		batch->iov[batch->iov_count++] = (struct iovec){.iov_base = at, .iov_len = length};
	batch->used += length;
	batch->bytes += length;
}

/* Zeros in place of payload that is not needed any more, for a frame that must have its length. */
static int zero_fill(uint32_t length, struct iovec *iov)
{
	static const uint8_t zeros[SOFT_FRAME_MAX];

	*iov = (struct iovec){.iov_base = (void *)(uintptr_t)zeros, .iov_len = length};
	return length ? 1 : 0;
}

/* Adds a frame with a descriptor of its payload; false: this payload cannot have one. */
static bool add_cma_desc(struct batch *batch, struct soft_tx_packet *out)
{
	uint8_t *at = soft_scratch()->output + batch->used;
	struct iovec pieces[SOFT_CMA_PIECES];
	int count = gather(batch->link->qp, out, 0, out->frame.length, pieces, SOFT_CMA_PIECES);

	if (count < 0 ||
	    !soft_cma_desc_send(batch->link, out, pieces, count, at + SOFT_FRAME_HEADER))
		return false;
	soft_frame_encode(at, &out->frame);
	add_scratch(batch, SOFT_FRAME_HEADER + soft_frame_rest(&out->frame));
	batch->cma_bytes += out->frame.length;
	batch->frames[batch->frame_count++] = *out;
	return true;
}

/* Adds a frame from its byte `from` on (header included).  False: its memory may not be read. */
static bool add(struct batch *batch, const struct soft_tx_packet *out, uint32_t from)
{
	struct soft_qp *qp = batch->link->qp;
	uint32_t skip = from > SOFT_FRAME_HEADER ? from - SOFT_FRAME_HEADER : 0;
	uint32_t length = out->frame.length - skip;
	struct iovec payload[SOFT_MAX_SGE];
	int count = from && batch->link->base.zero_fill
			    ? zero_fill(length, payload)
			    : gather(qp, out, skip, length, payload, SOFT_MAX_SGE);
	size_t copied = 0;

	if (count < 0)
		return false;
	if (from < SOFT_FRAME_HEADER) {
		uint8_t header[SOFT_FRAME_HEADER];

		soft_frame_encode(header, &out->frame);
		copied = SOFT_FRAME_HEADER - from;
		memcpy(soft_scratch()->output + batch->used, header + from, copied);
	}
	if (length <= COPY_MAX) {
		for (int i = 0; i < count; i++) {
			memcpy(soft_scratch()->output + batch->used + copied, payload[i].iov_base,
			       payload[i].iov_len);
			copied += payload[i].iov_len;
		}
		count = 0;
	}
	add_scratch(batch, copied);
	for (int i = 0; i < count; i++) {
		batch->iov[batch->iov_count++] = payload[i];
		batch->bytes += payload[i].iov_len;
	}
	batch->frames[batch->frame_count++] = *out;
	return true;
}

/* Adds a whole frame, with the acknowledgement if one is due at this place. */
static bool add_whole(struct batch *batch, struct soft_tx_packet *out, uint32_t done,
		      uint32_t acked)
{
	if (done != acked) {
		out->frame.flags |= SOFT_FRAME_ACK;
		out->frame.ack = done;
	}
	return out->by_cma ? add_cma_desc(batch, out) : add(batch, out, 0);
}

/* Adds the next frame of one of the two kinds, with the acknowledgement that is due: as a
 * descriptor of its payload, or else with the payload.  False: there is none, or (*there) its
 * memory may not be read. */
static bool add_next(struct batch *batch,
		     bool (*next)(struct soft_qp *qp, struct soft_tx_cursor *cursor,
				  struct soft_tx_packet *out),
		     struct soft_tx_packet *out, bool *there)
{
	struct soft_qp *qp = batch->link->qp;
	const struct soft_tx_cursor before = batch->cursor;
	uint32_t done = soft_responder_done(qp, &before);

	for (int with_cma = 1; with_cma >= 0; with_cma--) {
		batch->cursor = before;
		batch->cursor.cma_most =
			with_cma ? soft_cma_desc_most(batch->link, &batch->cursor.cma_least) : 0;
		*there = next(qp, &batch->cursor, out);
		if (!*there)
			return false;
		if (add_whole(batch, out, done, before.acked)) {
			if (!is_answer(out) || !out->last)
				batch->cursor.acked = done;
			return true;
		}
		if (!out->by_cma)
			break;
	}
	batch->cursor = before;
	return false;
}

static bool add_answer(struct batch *batch)
{
	struct soft_qp *qp = batch->link->qp;
	struct soft_tx_packet out;
	bool there;

	if (add_next(batch, soft_responder_next, &out, &there))
		return true;
	if (there)
		soft_responder_withdrawn(qp, out.index, out.frame.psn);
	return false;
}

static bool add_request(struct batch *batch)
{
	struct soft_tx_packet out;
	bool there;

	if (batch->closed)
		return false;
	if (add_next(batch, soft_requester_next, &out, &there))
		return true;
	if (there) {
		soft_send_at(batch->link->qp, out.index)->status = IBV_WC_LOC_PROT_ERR;
		batch->closed = true;
	}
	return false;
}

/* Adds LOSSY, before any frame that is a protocol error on a link that is not lossy. */
static void add_warning(struct batch *batch)
{
	const struct soft_tx_packet out = {.last = true, .frame.opcode = SOFT_LOSSY};

	if (batch->link->base.lossy_pending && has_room(batch))
		add(batch, &out, 0);
}

/* Adds a NAK or an acknowledgement, after the answers to all requests that came before. */
static void add_control(struct batch *batch)
{
	struct soft_link *link = batch->link;
	struct soft_qp *qp = link->qp;
	struct soft_tx_packet out = {.last = true};
	uint32_t done = soft_responder_done(qp, &batch->cursor);

	if (!has_room(batch))
		return;
	if (link->base.nak_opcode && batch->cursor.response == qp->responder.response_tail) {
		out.frame.opcode = link->base.nak_opcode;
		out.frame.syndrome = link->base.nak_syndrome;
		out.frame.psn = link->base.nak_psn;
		out.frame.total = out.frame.offset = link->base.nak_offset;
	} else if (done != batch->cursor.acked) {
		out.frame.opcode = SOFT_ACK;
	} else {
		return;
	}
	add_whole(batch, &out, done, batch->cursor.acked);
	batch->cursor.acked = done;
}

/* ---- one batch ----------------------------------------------------------------------------- */

/* The positions as they will be when `out` has been sent. */
static void advance_cursor(struct soft_tx_cursor *cursor, const struct soft_tx_packet *out)
{
	const struct soft_frame *frame = &out->frame;

	if (frame->flags & SOFT_FRAME_ACK)
		cursor->acked = frame->ack;
	if (is_answer(out) && out->index == cursor->response) {
		cursor->response_offset = out->last ? 0 : cursor->response_offset + frame->length;
		cursor->response += out->last;
		if (out->last && soft_psn_before(cursor->acked, frame->psn))
			cursor->acked = frame->psn;
	} else if (frame->opcode < SOFT_ACK && !out->refused && out->index == cursor->next &&
		   frame->offset == cursor->next_offset) {
		cursor->next_offset = out->last ? 0 : cursor->next_offset + frame->length;
		cursor->next += out->last;
		cursor->reads += out->last && soft_is_read(frame->opcode);
	}
}

/* Gathers a batch for `room` bytes.  False: a frame that was sent in part cannot be continued. */
static bool build(struct batch *batch, struct soft_link *link, size_t room)
{
	struct soft_qp *qp = link->qp;
	bool answered, requested;

	batch->link = link;
	batch->room = room;
	batch->frame_count = batch->iov_count = 0;
	batch->used = batch->bytes = batch->cma_bytes = 0;
	batch->closed = false;
	batch->cursor = (struct soft_tx_cursor){
		.next = qp->sq.next,
		.next_offset = qp->sq.next_offset,
		.reads = qp->sq.reads,
		.response = qp->responder.response_head,
		.response_offset = qp->responder.response_offset,
		.acked = qp->responder.acked,
		.most = link->wire->frame_most,
	};
	if (link->base.partial) {
		if (!add(batch, &link->base.packet, link->sent))
			return false;
		advance_cursor(&batch->cursor, &link->base.packet);
	}
	add_warning(batch);
	do {
		answered = batch->cursor.response != qp->responder.response_tail &&
			   has_room(batch) && add_answer(batch);
		requested =
			batch->cursor.next != qp->sq.tail && has_room(batch) && add_request(batch);
	} while (answered || requested);
	add_control(batch);
	return true;
}

/* No frame follows this NAK. */
static bool is_last(enum soft_nak syndrome)
{
	/* A gap will be filled; what the requester did not have is no error of ours. */
	return syndrome != SOFT_NAK_SEQUENCE && syndrome != SOFT_NAK_REQUESTERS_MEMORY;
}

/* The wire has taken the whole frame: moves the positions. */
static void commit(struct soft_link *link, const struct soft_tx_packet *out)
{
	struct soft_qp *qp = link->qp;

	if (!out->last)
		soft_engine_count_part();
	if (out->frame.flags & SOFT_FRAME_ACK) {
		qp->responder.acked = out->frame.ack;
		if (!soft_list_empty(&link->delayed))
			soft_ack_settled(link);
	}
	switch (out->frame.opcode) {
	case SOFT_READ_DATA:
	case SOFT_ATOMIC_DATA:
		soft_responder_commit(qp, out);
		break;
	case SOFT_RNR_NAK:
	case SOFT_NAK:
		/* While it was going out, another one may have taken its place. */
		if (link->base.nak_opcode == out->frame.opcode &&
		    link->base.nak_syndrome == out->frame.syndrome)
			link->base.nak_opcode = 0;
		if (out->frame.opcode == SOFT_NAK && is_last(out->frame.syndrome))
			soft_qp_error(qp);
		break;
	case SOFT_LOSSY:
		link->base.lossy_pending = false;
		break;
	case SOFT_ACK:
		break;
	default:
		soft_requester_commit(qp, out);
		soft_ack_replied(link);
	}
}

static void account(struct soft_link *link, const struct batch *batch, size_t sent)
{
	for (int i = 0; i < batch->frame_count; i++) {
		const struct soft_tx_packet *out = &batch->frames[i];
		uint32_t already = i == 0 && link->base.partial ? link->sent : 0;
		size_t left = SOFT_FRAME_HEADER + (size_t)soft_frame_rest(&out->frame) - already;

		if (sent < left) {
			if (sent || already) {
				link->base.packet = *out;
				link->sent = already + (uint32_t)sent;
				link->base.partial = true;
				if (out->frame.opcode < SOFT_ACK)
					soft_requester_began(link->qp, out->index);
			}
			return;
		}
		sent -= left;
		link->base.partial = link->base.zero_fill = false;
		commit(link, out);
		if (link->base.state != SOFT_LINK_UP)
			return;
	}
}

/* ---- the wire ------------------------------------------------------------------------------ */

/* Come back when the wire takes more: which may be at once, if only the step is over. */
static void block(struct soft_link *link)
{
	int rc = link->wire->wait(link);

	link->base.blocked = true;
	if (rc)
		soft_link_finish(link, rc);
}

static bool has_more(const struct soft_qp *qp)
{
	return qp->sq.next != qp->sq.tail ||
	       qp->responder.response_head != qp->responder.response_tail;
}

void soft_link_write(struct soft_link *link)
{
	soft_assert_locked();
	struct soft_qp *qp = link->qp;
	size_t total = 0;

	while (link->base.state == SOFT_LINK_UP && !link->base.blocked) {
		struct batch batch;
		size_t room = link->wire->room(link, frame_room(link));

		if (!room) {
			block(link);
			break;
		}
		if (!build(&batch, link, room)) {
			if (!is_answer(&link->base.packet))
				soft_send_at(qp, link->base.packet.index)->status =
					IBV_WC_LOC_PROT_ERR;
			soft_send_settle(qp);
			if (soft_link_of(qp))
				soft_link_finish(soft_link_of(qp), ECONNABORTED);
			return;
		}
		if (batch.bytes == 0)
			break;
		ssize_t n = link->wire->send(link, batch.iov, batch.iov_count);

		if (n < 0) {
			soft_link_finish(link, (int)-n);
			return;
		}
		link->busy = true;
		account(link, &batch, (size_t)n);
		link->busy = false;
		if (link->base.state == SOFT_LINK_DEAD) {
			free(link);
			return;
		}
		total += (size_t)n;
		if (link->base.state == SOFT_LINK_UP &&
		    ((size_t)n < batch.bytes || (total >= SOFT_STEP_BYTES && has_more(qp)))) {
			block(link);
			break;
		}
	}
	if (qp->ibv.state != IBV_QPS_ERR) {
		soft_send_settle(qp);
		soft_qp_check_drained(qp);
	}
}

/* The last frame, then the end of our direction.  Its bytes are in link->header, which no input
 * needs any more. */
void soft_link_write_end(struct soft_link *link)
{
	soft_assert_locked();
	if (link->ended || link->base.state != SOFT_LINK_CLOSING)
		return;
	if (link->sent == 0 && link->qp) {
		struct soft_frame frame = {
			.opcode = SOFT_DISCONNECT,
			.flags = soft_qp_is_responder(link->qp) ? SOFT_FRAME_ACK : 0,
		};
		const struct soft_tx_cursor cursor = {
			.response = link->qp->responder.response_head,
			.acked = link->qp->responder.acked,
		};

		frame.ack = soft_responder_done(link->qp, &cursor);
		soft_frame_encode(link->header, &frame);
	}
	if (!link->wire->room(link, SOFT_FRAME_HEADER)) {
		block(link);
		return;
	}
	struct iovec rest = {
		.iov_base = link->header + link->sent,
		.iov_len = SOFT_FRAME_HEADER - link->sent,
	};
	ssize_t n = link->wire->send(link, &rest, 1);

	if (n < 0) {
		soft_link_finish(link, 0);
		return;
	}
	link->sent += (uint32_t)n;
	if (link->sent < SOFT_FRAME_HEADER) {
		block(link);
		return;
	}
	link->ended = true;
	link->wire->end(link);
}
