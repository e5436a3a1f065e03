/* Stream output: collects frames and passes them to the path in batches.
 *
 * A batch alternates between responses and requests. It ends with a pending NAK, or with an
 * acknowledgement if no other frame carries it. Headers and small payloads are copied to scratch
 * memory, and long payloads are sent directly from the application's memory. The batch is built
 * with a cursor, which is a copy of the queue pair's positions. The queue pair's own positions
 * advance for each frame that the path accepts.
 */
#include <sys/uio.h>

#include "cma_descriptor.h"

enum {
	COPY_MAX = 1024, /* maximum payload copied to scratch memory */
};

struct batch {
	struct soft_link *link;
	struct soft_tx_cursor cursor;
	int frame_count;
	int iov_count;
	size_t scratch_used; /* bytes of scratch memory in use */
	size_t bytes; /* total length of the batch */
	size_t room; /* bytes that the path accepts */
	size_t cma_bytes; /* bytes covered by descriptors, not included in `bytes` */
	bool requests_stopped; /* set when a request cannot be sent; no later requests are added */
	int record_count;
	struct soft_record_end ends[SOFT_PATH_RECORDS];
	struct soft_tx_packet frames[SOFT_PATH_FRAMES];
	struct iovec iov[SOFT_PATH_IOVECS];
};

/* Store iovecs for the frame's payload. Returns their number, or a negative value if the memory is
 * not readable. */
static int gather(struct soft_qp *qp, const struct soft_tx_packet *out, struct iovec *iov, int room)
{
	if (out->frame.length == 0)
		return 0;
	if (out->is_response)
		return soft_responder_gather(qp, out, iov);
	return soft_requester_gather(qp, out, iov, room);
}

/* Returns the room required for the longest possible frame. */
static size_t frame_room(const struct soft_link *link)
{
	return SOFT_FRAME_HEADER + (size_t)link->chan.path->calls->max_frame;
}

static bool has_room(const struct batch *batch)
{
	return batch->frame_count < batch->link->chan.path->calls->max_frames &&
	       batch->bytes < SOFT_STEP_BYTES &&
	       batch->cma_bytes < SOFT_CMA_FRAME_MAX && /* see soft_cma_desc_receive */
	       batch->room - batch->bytes >= frame_room(batch->link) &&
	       batch->iov_count + SOFT_MAX_SGE + 2 <= SOFT_PATH_IOVECS &&
	       batch->scratch_used + SOFT_FRAME_HEADER + COPY_MAX <= SOFT_STAGING_SIZE;
}

static struct soft_record_end last_end(const struct batch *batch)
{
	return batch->record_count ? batch->ends[batch->record_count - 1]
				   : (struct soft_record_end){0};
}

/* End the current record, unless it is empty. */
static void end_record(struct batch *batch)
{
	if (batch->bytes > last_end(batch).bytes)
		batch->ends[batch->record_count++] = (struct soft_record_end){
			.iovecs = batch->iov_count,
			.frames = batch->frame_count,
			.bytes = batch->bytes,
		};
}

/* Add bytes that are already in scratch memory. Contiguous bytes share an iovec. */
static void add_scratch(struct batch *batch, size_t length)
{
	uint8_t *at = soft_scratch()->output + batch->scratch_used;
	const struct soft_record_end end = last_end(batch);
	struct iovec *last =
		batch->iov_count > end.iovecs ? &batch->iov[batch->iov_count - 1] : NULL;

	if (last && (uint8_t *)last->iov_base + last->iov_len == at)
		last->iov_len += length;
	else
		batch->iov[batch->iov_count++] = (struct iovec){.iov_base = at, .iov_len = length};
	batch->scratch_used += length;
	batch->bytes += length;
}

/* Add a frame with a descriptor of its payload instead of the payload. Returns false if the payload
 * cannot be described. */
static bool add_cma_desc(struct batch *batch, struct soft_tx_packet *out)
{
	uint8_t *at = soft_scratch()->output + batch->scratch_used;
	struct iovec pieces[SOFT_CMA_PIECES];
	int count = gather(batch->link->qp, out, pieces, SOFT_CMA_PIECES);

	if (count < 0 ||
	    !soft_cma_desc_send(batch->link, out, pieces, count, at + SOFT_FRAME_HEADER))
		return false;
	soft_frame_encode(at, &out->frame);
	add_scratch(batch, SOFT_FRAME_HEADER + soft_frame_body_size(&out->frame));
	batch->cma_bytes += out->frame.length;
	batch->frames[batch->frame_count++] = *out;
	return true;
}

/* Add a frame that carries its payload. Returns false if the memory is not readable. */
static bool add_payload_frame(struct batch *batch, const struct soft_tx_packet *out)
{
	struct iovec payload[SOFT_MAX_SGE];
	int count = gather(batch->link->qp, out, payload, SOFT_MAX_SGE);
	size_t copied = SOFT_FRAME_HEADER;

	if (count < 0)
		return false;
	soft_frame_encode(soft_scratch()->output + batch->scratch_used, &out->frame);
	if (out->frame.length <= COPY_MAX) {
		for (int i = 0; i < count; i++) {
			memcpy(soft_scratch()->output + batch->scratch_used + copied,
			       payload[i].iov_base, payload[i].iov_len);
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

/* Add a frame, in a new record if necessary. The frame also acknowledges all requests up to
 * `ack_psn`, unless this PSN is equal to `acked`, the last PSN that has already been acknowledged.
 * Returns false if adding the payload or its descriptor fails. */
static bool add_with_ack(struct batch *batch, struct soft_tx_packet *out, uint32_t ack_psn,
			 uint32_t acked)
{
	if (ack_psn != acked) {
		out->frame.flags |= SOFT_FRAME_ACK;
		out->frame.ack = ack_psn;
	}
	if (batch->bytes - last_end(batch).bytes + frame_room(batch->link) >
	    batch->link->chan.path->calls->max_record)
		end_record(batch);
	return out->by_cma ? add_cma_desc(batch, out) : add_payload_frame(batch, out);
}

/* Add the next request or response, with any acknowledgement that is due. `next` builds the frame:
 * it is soft_requester_next() or soft_responder_next(). If possible, the frame contains a
 * descriptor instead of the payload. Returns false and sets `*has_frame` to false if there is no
 * frame. Returns false and sets `*has_frame` to true if the memory of the frame is not
 * readable. */
static bool add_next(struct batch *batch,
		     bool (*next)(struct soft_qp *qp, struct soft_tx_cursor *cursor,
				  struct soft_tx_packet *out),
		     struct soft_tx_packet *out, bool *has_frame)
{
	struct soft_qp *qp = batch->link->qp;
	const struct soft_tx_cursor before = batch->cursor;
	uint32_t ack_psn = soft_responder_ack_psn(qp, &before);

	for (int with_cma = 1; with_cma >= 0; with_cma--) {
		batch->cursor = before;
		batch->cursor.cma_max =
			with_cma ? soft_cma_desc_max(batch->link, &batch->cursor.cma_min) : 0;
		*has_frame = next(qp, &batch->cursor, out);
		if (!*has_frame)
			return false;
		if (add_with_ack(batch, out, ack_psn, before.acked_psn)) {
			if (!out->is_response)
				batch->cursor.acked_psn = ack_psn;
			return true;
		}
		if (!out->by_cma)
			break;
	}
	batch->cursor = before;
	return false;
}

/* Add the next pending response. Returns false if no response was added. */
static bool add_response(struct batch *batch)
{
	struct soft_qp *qp = batch->link->qp;
	struct soft_tx_packet out;
	bool has_frame;

	while (!add_next(batch, soft_responder_next, &out, &has_frame)) {
		if (!has_frame)
			return false;
		/* The memory of the response has been deregistered, so send a NAK in its place. A
		 * NAK for a new response also drops all later responses. */
		if (!soft_responder_withdraw_repeated(qp, out.index)) {
			soft_responder_withdraw(qp, out.index, out.frame.psn,
						soft_response_at(qp, out.index));
			return false;
		}
	}
	return true;
}

/* Add the next pending request. Returns false if no request was added. */
static bool add_request(struct batch *batch)
{
	struct soft_tx_packet out;
	bool has_frame;

	if (batch->requests_stopped)
		return false;
	if (add_next(batch, soft_requester_next, &out, &has_frame))
		return true;
	if (has_frame) {
		/* The memory of the request is not readable. The request fails with this status
		 * when all earlier requests have completed (soft_send_advance). */
		soft_send_at(batch->link->qp, out.index)->status = IBV_WC_LOC_PROT_ERR;
		batch->requests_stopped = true;
	}
	return false;
}

/* Add a LOSES frame if one is pending. It makes the peer use its retransmission timer. */
static void add_loses(struct batch *batch)
{
	const struct soft_tx_packet out = {.frame.opcode = SOFT_LOSES};

	if (batch->link->base.loses_pending && has_room(batch))
		add_payload_frame(batch, &out);
}

/* Add a NAK or an acknowledgement. A NAK is sent only after the responses to all earlier
 * requests. */
static void add_control(struct batch *batch)
{
	struct soft_link *link = batch->link;
	struct soft_qp *qp = link->qp;
	uint32_t ack_psn = soft_responder_ack_psn(qp, &batch->cursor);
	bool nak = link->base.nak_opcode && batch->cursor.response == qp->responder.response_tail;

	if ((!nak && ack_psn == batch->cursor.acked_psn) || !has_room(batch))
		return;
	struct soft_tx_packet out = {.frame.msn = soft_responder_msn(qp, &batch->cursor)};

	if (nak) {
		out.frame.opcode = link->base.nak_opcode;
		out.frame.syndrome = link->base.nak_syndrome;
		out.frame.psn = link->base.nak_psn;
		add_with_ack(batch, &out, ack_psn, batch->cursor.acked_psn);
	} else {
		out.frame.opcode = SOFT_ACK;
		out.frame.psn = ack_psn;
		add_with_ack(batch, &out, ack_psn, ack_psn); /* `psn` already acknowledges */
	}
}

/* ---- one batch ----------------------------------------------------------------------------- */

/* Build a batch of at most `room` bytes. */
static void build_batch(struct batch *batch, struct soft_link *link, size_t room)
{
	struct soft_qp *qp = link->qp;
	bool added_response, added_request;

	batch->link = link;
	batch->room = room;
	batch->frame_count = batch->iov_count = batch->record_count = 0;
	batch->scratch_used = batch->bytes = batch->cma_bytes = 0;
	batch->requests_stopped = false;
	batch->cursor = (struct soft_tx_cursor){
		.next = qp->sq.next,
		.next_psn = qp->sq.next_psn,
		.reads = qp->sq.reads,
		.acked_psn = qp->responder.acked_psn,
		.max_payload = link->chan.path->calls->max_frame,
	};
	soft_responder_seek(qp, &batch->cursor, qp->responder.response_head);
	add_loses(batch);
	do {
		added_response = batch->cursor.response != qp->responder.response_tail &&
				 has_room(batch) && add_response(batch);
		added_request =
			batch->cursor.next != qp->sq.tail && has_room(batch) && add_request(batch);
	} while (added_response || added_request);
	add_control(batch);
	end_record(batch);
}

/* Returns whether sending the NAK moves this side's queue pair to ERR. A sequence error does not,
 * because retransmission corrects it. Unreadable memory at the requester is not an error of this
 * side either. */
static bool is_fatal_nak(enum soft_nak syndrome)
{
	return syndrome != SOFT_NAK_SEQUENCE && syndrome != SOFT_NAK_REQUESTERS_MEMORY;
}

/* Record that all requests up to this PSN have been acknowledged. */
static void record_acknowledged(struct soft_link *link, uint32_t psn)
{
	link->qp->responder.acked_psn = psn;
	link->unacknowledged = 0;
	if (!soft_list_empty(&link->delayed))
		soft_ack_cancel(link);
}

/* Advance the queue pair's positions after the path has accepted a frame. */
static void commit(struct soft_link *link, const struct soft_tx_packet *out)
{
	struct soft_qp *qp = link->qp;

	if (!soft_is_last(&out->frame))
		soft_engine_count_mid_message_frame();
	if (out->frame.flags & SOFT_FRAME_ACK)
		record_acknowledged(link, out->frame.ack);
	if (out->is_response) {
		soft_responder_commit(qp, out);
		return;
	}
	switch (out->frame.opcode) {
	case SOFT_RNR_NAK:
	case SOFT_NAK:
		/* Clear the pending NAK only if it is still the NAK just sent, because a newer NAK
		 * may have replaced it. */
		if (link->base.nak_opcode == out->frame.opcode &&
		    link->base.nak_syndrome == out->frame.syndrome)
			link->base.nak_opcode = 0;
		if (out->frame.opcode == SOFT_NAK && is_fatal_nak(out->frame.syndrome))
			soft_qp_error(qp);
		break;
	case SOFT_LOSES:
		link->base.loses_pending = false;
		break;
	case SOFT_ACK:
		record_acknowledged(link, out->frame.psn);
		break;
	default:
		soft_requester_commit(qp, out);
		soft_ack_request_sent(link);
	}
}

/* ---- the path ------------------------------------------------------------------------------ */

/* Stop writing until the path calls writable(), which it does when it has room and other links have
 * had their turn. */
static void stop_until_writable(struct soft_link *link)
{
	soft_chan_wait(&link->chan);
	link->base.blocked = true;
}

static bool has_pending_output(const struct soft_qp *qp)
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

		if (!link->chan.path) { /* the link was inherited by the child of a fork */
			soft_link_finish(link, ENOTCONN);
			return;
		}
		size_t room = soft_chan_room(&link->chan, frame_room(link));

		if (!room) {
			link->base.blocked = true;
			break;
		}
		build_batch(&batch, link, room);
		if (batch.bytes == 0)
			break;
		int written =
			soft_chan_write(&link->chan, batch.iov, batch.ends, batch.record_count);
		const struct soft_record_end end = batch.ends[written - 1];

		link->busy = true;
		for (int i = 0; i < end.frames && link->base.state == SOFT_LINK_UP; i++)
			commit(link, &batch.frames[i]);
		link->busy = false;
		if (link->base.state == SOFT_LINK_DEAD) {
			free(link);
			return;
		}
		total += end.bytes;
		if (link->base.state == SOFT_LINK_UP &&
		    (written < batch.record_count ||
		     (has_pending_output(qp) &&
		      (total >= SOFT_STEP_BYTES || soft_path_has_waiting(link->chan.path))))) {
			stop_until_writable(link);
			break;
		}
		if (has_room(&batch))
			break; /* the batch had room for more frames, so none is ready */
	}
	if (qp->ibv.state != IBV_QPS_ERR) {
		soft_send_advance(qp);
		soft_qp_check_drained(qp);
	}
}

void soft_link_write_end(struct soft_link *link)
{
	soft_assert_locked();
	const struct iovec iov = {.iov_base = link->header, .iov_len = SOFT_FRAME_HEADER};
	const struct soft_record_end end = {.iovecs = 1, .frames = 1, .bytes = iov.iov_len};

	if (link->base.state != SOFT_LINK_CLOSING)
		return;
	/* The first call encodes the frame. The queue pair is detached before later calls, which
	 * send the frame that is still in link->header. */
	if (link->qp && link->chan.path) {
		struct soft_frame frame = {
			.opcode = SOFT_DISCONNECT,
			.flags = soft_qp_is_responder(link->qp) ? SOFT_FRAME_ACK : 0,
			.syndrome = link->psn_refused ? SOFT_LEFT_PSN : 0,
			.psn = link->psn_refused ? link->qp->attr.sq_psn : 0,
		};
		struct soft_tx_cursor cursor = {.acked_psn = link->qp->responder.acked_psn};

		soft_responder_seek(link->qp, &cursor, link->qp->responder.response_head);
		frame.ack = soft_responder_ack_psn(link->qp, &cursor);
		soft_frame_encode(link->header, &frame);
	}
	if (link->chan.path && !soft_chan_room(&link->chan, iov.iov_len)) {
		link->base.blocked = true;
		return;
	}
	if (link->chan.path)
		soft_chan_write(&link->chan, &iov, &end, 1);
	soft_link_finish(link, 0);
}
