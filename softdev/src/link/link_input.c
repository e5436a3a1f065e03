/* Stream input: converts bytes to frames and stores their payload. */
#include <sys/uio.h>

#include "inject/inject.h"
#include "cma_descriptor.h"
#include "trace/trace.h"

int soft_link_map_payload(struct soft_link *link, uint32_t length, struct iovec *iov, int room)
{
	if (link->sink == SOFT_SINK_DISCARD || link->received < link->frame.skip)
		return 0;
	int count = link->sink == SOFT_SINK_READ
			    ? soft_response_scatter(link->qp, &link->frame, link->received, length,
						    iov, room)
			    : soft_request_scatter(link->qp, &link->frame, link->received, length,
						   iov, room);

	if (count >= 0)
		return count;
	link->sink = SOFT_SINK_DISCARD;
	return 0;
}

/* Handle a frame whose payload is complete. */
static void end_frame(struct soft_link *link)
{
	const struct soft_frame *frame = &link->frame;

	if (!soft_is_last(frame))
		soft_engine_count_mid_message_frame();
	if (link->sink == SOFT_SINK_DISCARD)
		return;
	if (soft_is_request(&link->frame))
		soft_request_end(link->qp, &link->frame, link->small_payload);
	else
		soft_response_end(link->qp, &link->frame, link->small_payload);
}

void soft_link_payload_consumed(struct soft_link *link, uint32_t length)
{
	link->received += length;
	link->remaining -= length;
	if (link->remaining == 0)
		end_frame(link);
}

/* Handle a frame header. Returns false after a protocol error. */
static bool begin_frame(struct soft_link *link, const uint8_t *header)
{
	struct soft_frame *frame = &link->frame;

	link->header_received = 0;
	if (!soft_frame_decode(header, frame))
		return false;
	if (frame->pieces && !soft_cma_desc_allowed(link))
		return false;
	if (frame->flags & SOFT_FRAME_ACK && !soft_complete_acknowledged(link->qp, frame->ack))
		return false;
	if (link->base.state != SOFT_LINK_UP)
		return true; /* a completion has ended the queue pair */
	if (frame->opcode == SOFT_DISCONNECT) {
		/* The peer has closed the link because its first send PSN is not the one that this
		 * side expects (soft_handshake_check_psn). */
		if (frame->syndrome == SOFT_LEFT_PSN)
			SOFT_TRACE_DROPPED(.reason = "PSN", .qp_num = link->qp->ibv.qp_num,
					   .remote_qpn = link->qp->attr.dest_qp_num,
					   .has_psn = true, .psn = frame->psn,
					   .expected_psn = link->qp->attr.rq_psn);
		soft_link_finish(link, 0);
		return true;
	}
	if (frame->opcode == SOFT_LOSES) {
		link->base.is_lossy = true;
		soft_requester_start_timer(link->qp);
		return frame->length == 0;
	}
	switch (frame->opcode) {
	case SOFT_SEND:
	case SOFT_WRITE:
	case SOFT_READ:
	case SOFT_COMPARE_SWAP:
	case SOFT_FETCH_ADD:
	case SOFT_ATOMIC_WRITE:
	case SOFT_FLUSH:
		link->sink = soft_request_begin(link->qp, frame);
		break;
	case SOFT_ACK:
	case SOFT_NAK:
	case SOFT_RNR_NAK:
	case SOFT_READ_DATA:
	case SOFT_ATOMIC_DATA:
		link->sink = soft_response_begin(link->qp, frame);
		break;
	default:
		return false;
	}
	if (link->sink == SOFT_SINK_BROKEN)
		return false;
	link->received = 0;
	link->remaining = frame->length;
	if (link->remaining == 0 && link->base.state == SOFT_LINK_UP)
		end_frame(link);
	return true;
}

/* Copy received payload to its destination. */
static void store_payload(struct soft_link *link, const uint8_t *data, uint32_t length)
{
	while (length && link->base.state == SOFT_LINK_UP) {
		struct iovec iov[SOFT_MAX_SGE];
		uint32_t moved = 0;

		if (link->received < link->frame.skip) {
			moved = link->frame.skip - link->received;
			moved = moved < length ? moved : length;
			data += moved;
			length -= moved;
			soft_link_payload_consumed(link, moved);
			continue;
		}
		switch (link->sink) {
		case SOFT_SINK_RECEIVE:
		case SOFT_SINK_WRITE:
		case SOFT_SINK_READ: {
			/* Force loads and stores only for READ responses. Such a copy first fetches
			 * each cache line of the destination, which would slow down a SEND or WRITE
			 * to uncached memory by up to a third. */
			void (*copy)(uint8_t *, const uint8_t *, size_t) =
				link->sink == SOFT_SINK_READ ? soft_copy_by_loads : soft_copy;
			int count = soft_link_map_payload(link, length, iov, SOFT_MAX_SGE);

			for (int i = 0; i < count; i++) {
				copy(iov[i].iov_base, data + moved, iov[i].iov_len);
				moved += (uint32_t)iov[i].iov_len;
			}
			break;
		}
		case SOFT_SINK_SMALL: /* the length was checked when the frame began */
			memcpy(link->small_payload + link->received, data, length);
			moved = length;
			break;
		default:
			moved = length;
		}
		if (!moved)
			continue; /* the destination is gone, so the rest is discarded */
		data += moved;
		length -= moved;
		soft_link_payload_consumed(link, moved);
	}
}

void soft_link_input(struct soft_link *link, const uint8_t *data, size_t length)
{
	if (link->delay_queue)
		soft_delay_input(link, data, length);
	else
		soft_link_parse_frames(link, data, length);
}

void soft_link_parse_frames(struct soft_link *link, const uint8_t *data, size_t length)
{
	soft_assert_locked();
	link->cma_bytes = 0;
	while (length && link->base.state == SOFT_LINK_UP) {
		const uint8_t *header = data;
		size_t part;

		if (link->remaining && link->frame.pieces) {
			part = soft_frame_body_size(&link->frame);
			if (length < part || !soft_cma_desc_receive(link, data)) {
				soft_link_finish(link, EPROTO);
				return;
			}
			data += part;
			length -= part;
			continue;
		}
		if (link->remaining) {
			part = link->remaining < length ? link->remaining : length;
			store_payload(link, data, (uint32_t)part);
			data += part;
			length -= part;
			continue;
		}
		if (link->header_received || length < SOFT_FRAME_HEADER) {
			part = SOFT_FRAME_HEADER - link->header_received;
			if (part > length)
				part = length;
			memcpy(link->header + link->header_received, data, part);
			link->header_received += (uint32_t)part;
			if (link->header_received < SOFT_FRAME_HEADER)
				return;
			header = link->header;
		} else {
			part = SOFT_FRAME_HEADER;
		}
		data += part;
		length -= part;
		if (!begin_frame(link, header)) {
			SOFT_TRACE_DROPPED(.reason = "PACKET",
					   .qp_num = link->qp ? link->qp->ibv.qp_num : 0,
					   .has_psn = link->qp && soft_is_request(&link->frame),
					   .psn = link->frame.psn,
					   .expected_psn =
						   link->qp ? link->qp->responder.expected_psn : 0);
			/* Any host can send a datagram, so an invalid one does not end a RoCE
			 * link. */
			if (!link->chan.path || !link->chan.path->calls->is_lossy)
				soft_link_finish(link, EPROTO);
			return;
		}
	}
}

void soft_link_release(struct soft_link *link)
{
	link->busy = false;
	if (link->base.state == SOFT_LINK_DEAD)
		free(link);
}
