/* Taking in a stream: bytes to frames, payload to where it belongs.
 *
 * One recv reads many small frames into the engine's scratch memory, from where their payload is
 * copied.  A long payload is received straight into its target: one readv whose first parts are the
 * application's memory and whose last part is scratch for what follows.  While long payloads are
 * coming, only a header's worth is read beyond each, so that the next payload needs no copy either.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "objects.h"

enum {
	DIRECT_MIN = 4096,        /* less than this is copied: an iovec costs as much */
	BULK_PAYLOAD = 16 * 1024, /* frames like this one are expected to be followed by more */
};

static int scatter(struct soft_link *link, uint32_t length, struct iovec *iov, int room)
{
	int count = link->sink == SOFT_SINK_READ ?
			    soft_answer_scatter(link->qp, &link->frame, link->taken, length, iov, room) :
			    soft_request_scatter(link->qp, &link->frame, link->taken, length, iov, room);

	if (count < 0)
		link->sink = SOFT_SINK_DISCARD;
	return count;
}

static bool is_request(const struct soft_frame *frame)
{
	return frame->opcode < SOFT_ACK;
}

/* The frame is there, payload and all. */
static void end(struct soft_link *link)
{
	if (link->sink == SOFT_SINK_DISCARD)
		return;
	if (is_request(&link->frame))
		soft_request_end(link->qp, &link->frame, link->small);
	else
		soft_answer_end(link->qp, &link->frame, link->small);
}

static void advance(struct soft_link *link, uint32_t length)
{
	link->taken += length;
	link->left -= length;
	if (link->left == 0)
		end(link);
}

/* The header is there.  Returns what may not be: false ends the stream. */
static bool begin(struct soft_link *link, const uint8_t *header)
{
	struct soft_frame *frame = &link->frame;

	link->header_have = 0;
	if (!soft_frame_decode(header, frame))
		return false;
	if (frame->flags & SOFT_FRAME_ACK && !soft_acknowledged(link->qp, frame->ack))
		return false;
	if (link->state != SOFT_LINK_UP)
		return true; /* a completion has ended the queue pair */
	if (frame->opcode == SOFT_DISCONNECT) {
		soft_link_finish(link, 0);
		return true;
	}
	switch (frame->opcode) {
	case SOFT_SEND:
	case SOFT_WRITE:
	case SOFT_READ:
	case SOFT_COMPARE_SWAP:
	case SOFT_FETCH_ADD:
	case SOFT_ATOMIC_WRITE:
		link->sink = soft_request_begin(link->qp, frame);
		break;
	case SOFT_ACK:
	case SOFT_NAK:
	case SOFT_RNR_NAK:
	case SOFT_READ_DATA:
	case SOFT_ATOMIC_DATA:
		link->sink = soft_answer_begin(link->qp, frame);
		break;
	default:
		return false;
	}
	if (link->sink == SOFT_SINK_BROKEN)
		return false;
	link->bulk = frame->length >= BULK_PAYLOAD;
	link->taken = 0;
	link->left = frame->length;
	if (link->left == 0 && link->state == SOFT_LINK_UP)
		end(link);
	return true;
}

/* Payload that is in scratch memory. */
static void deliver(struct soft_link *link, const uint8_t *data, uint32_t length)
{
	while (length && link->state == SOFT_LINK_UP) {
		struct iovec iov[SOFT_MAX_SGE];
		uint32_t moved = 0;

		switch (link->sink) {
		case SOFT_SINK_RECEIVE:
		case SOFT_SINK_WRITE:
		case SOFT_SINK_READ: {
			int count = scatter(link, length, iov, SOFT_MAX_SGE);

			for (int i = 0; i < count; i++) {
				memcpy(iov[i].iov_base, data + moved, iov[i].iov_len);
				moved += (uint32_t)iov[i].iov_len;
			}
			break;
		}
		case SOFT_SINK_SMALL: /* its length was checked when the frame began */
			memcpy(link->small + link->taken, data, length);
			moved = length;
			break;
		default:
			moved = length;
		}
		if (!moved)
			continue; /* the target is gone: now it is discarded */
		data += moved;
		length -= moved;
		advance(link, moved);
	}
}

static void parse(struct soft_link *link, const uint8_t *data, size_t length)
{
	while (length && link->state == SOFT_LINK_UP) {
		const uint8_t *header = data;
		size_t part;

		if (link->left) {
			part = link->left < length ? link->left : length;
			deliver(link, data, (uint32_t)part);
			data += part;
			length -= part;
			continue;
		}
		if (link->header_have || length < SOFT_FRAME_HEADER) {
			part = SOFT_FRAME_HEADER - link->header_have;
			if (part > length)
				part = length;
			memcpy(link->header + link->header_have, data, part);
			link->header_have += (uint32_t)part;
			if (link->header_have < SOFT_FRAME_HEADER)
				return;
			header = link->header;
		} else {
			part = SOFT_FRAME_HEADER;
		}
		data += part;
		length -= part;
		if (!begin(link, header)) {
			soft_link_finish(link, EPROTO);
			return;
		}
	}
}

/* Who is called back may finish the link; it is freed when we are done with it. */
static void release(struct soft_link *link)
{
	link->busy = false;
	if (link->state == SOFT_LINK_DEAD)
		free(link);
}

/* What the next read may fill.  Returns the number of iovecs, and how many of their bytes are
 * payload on its way to its target. */
static int targets(struct soft_link *link, size_t budget, struct iovec *iov, size_t *direct,
		   size_t *room)
{
	int count = 0;
	size_t tail = SOFT_STAGING_SIZE;

	*direct = 0;
	if (link->left >= DIRECT_MIN && link->sink != SOFT_SINK_DISCARD) {
		uint32_t want = link->left < budget ? link->left : (uint32_t)budget;

		count = scatter(link, want, iov, SOFT_MAX_SGE);
		for (int i = 0; i < count; i++)
			*direct += iov[i].iov_len;
		if (count < 0)
			count = 0;
	}
	if (*direct && *direct < link->left)
		tail = 0; /* more payload of this frame follows */
	else if (link->bulk && (link->left == 0 || *direct))
		tail = SOFT_FRAME_HEADER - link->header_have;
	if (tail)
		iov[count++] = (struct iovec){.iov_base = soft_scratch()->input, .iov_len = tail};
	*room = *direct + tail;
	return count;
}

/* Closing: the other side's last frames mean nothing any more, only its end does. */
static void discard(struct soft_link *link)
{
	size_t budget = soft_step_share();

	while (budget) {
		ssize_t n = recv(link->in.fd, soft_scratch()->input, SOFT_STAGING_SIZE, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return;
		if (n <= 0) {
			soft_link_finish(link, 0);
			return;
		}
		budget -= (size_t)n < budget ? (size_t)n : budget;
	}
}

void soft_link_read(struct soft_link *link)
{
	size_t budget = soft_step_share();

	if (link->state == SOFT_LINK_CLOSING) {
		discard(link);
		return;
	}
	link->busy = true;
	while (budget && link->state == SOFT_LINK_UP) {
		struct iovec iov[SOFT_MAX_SGE + 1];
		size_t direct, room;
		int count = targets(link, budget, iov, &direct, &room);

		if (link->state != SOFT_LINK_UP)
			break;
		ssize_t n = readv(link->in.fd, iov, count);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n <= 0) {
			/* An end without DISCONNECT is a process that died. */
			soft_link_finish(link, n ? errno : ECONNRESET);
			break;
		}
		budget -= (size_t)n < budget ? (size_t)n : budget;
		size_t placed = (size_t)n < direct ? (size_t)n : direct;

		if (placed)
			advance(link, (uint32_t)placed);
		parse(link, soft_scratch()->input, (size_t)n - placed);
		if ((size_t)n < room)
			break; /* that was all; if more comes, epoll tells */
	}
	release(link);
}

void soft_link_take(struct soft_link *link, const uint8_t *data, size_t length)
{
	link->busy = true;
	parse(link, data, length);
	release(link);
}
