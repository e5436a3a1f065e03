/* Conversion between frames and packets. A frame becomes one or more packets, and a received packet
 * becomes one frame. */
#include <arpa/inet.h>

#include "roce_internal.h"

enum { WRONG_MTU = 0xff }; /* not an enum ibv_mtu */

/* Frame flags for the position of a packet in its message. */
enum {
	FIRST = SOFT_FRAME_MORE,
	MIDDLE = SOFT_FRAME_CONTINUES | SOFT_FRAME_MORE,
	LAST = SOFT_FRAME_CONTINUES,
	ONLY = 0,
	IMMEDIATE = SOFT_FRAME_IMMEDIATE,
	INVALIDATE = SOFT_FRAME_INVALIDATE,
};

static const struct {
	uint8_t opcode; /* 0 for an unused operation */
	uint8_t flags;
} frames[SOFT_ROCE_OPERATION + 1] = {
	[SOFT_ROCE_SEND_FIRST] = {SOFT_SEND, FIRST},
	[SOFT_ROCE_SEND_MIDDLE] = {SOFT_SEND, MIDDLE},
	[SOFT_ROCE_SEND_LAST] = {SOFT_SEND, LAST},
	[SOFT_ROCE_SEND_LAST_IMMEDIATE] = {SOFT_SEND, LAST | IMMEDIATE},
	[SOFT_ROCE_SEND_ONLY] = {SOFT_SEND, ONLY},
	[SOFT_ROCE_SEND_ONLY_IMMEDIATE] = {SOFT_SEND, ONLY | IMMEDIATE},
	[SOFT_ROCE_SEND_LAST_INVALIDATE] = {SOFT_SEND, LAST | INVALIDATE},
	[SOFT_ROCE_SEND_ONLY_INVALIDATE] = {SOFT_SEND, ONLY | INVALIDATE},
	[SOFT_ROCE_WRITE_FIRST] = {SOFT_WRITE, FIRST},
	[SOFT_ROCE_WRITE_MIDDLE] = {SOFT_WRITE, MIDDLE},
	[SOFT_ROCE_WRITE_LAST] = {SOFT_WRITE, LAST},
	[SOFT_ROCE_WRITE_LAST_IMMEDIATE] = {SOFT_WRITE, LAST | IMMEDIATE},
	[SOFT_ROCE_WRITE_ONLY] = {SOFT_WRITE, ONLY},
	[SOFT_ROCE_WRITE_ONLY_IMMEDIATE] = {SOFT_WRITE, ONLY | IMMEDIATE},
	[SOFT_ROCE_READ_REQUEST] = {SOFT_READ, ONLY},
	[SOFT_ROCE_READ_RESPONSE_FIRST] = {SOFT_READ_DATA, FIRST},
	[SOFT_ROCE_READ_RESPONSE_MIDDLE] = {SOFT_READ_DATA, MIDDLE},
	[SOFT_ROCE_READ_RESPONSE_LAST] = {SOFT_READ_DATA, LAST},
	[SOFT_ROCE_READ_RESPONSE_ONLY] = {SOFT_READ_DATA, ONLY},
	[SOFT_ROCE_ACKNOWLEDGE] = {SOFT_ACK, ONLY},
	[SOFT_ROCE_ATOMIC_ACKNOWLEDGE] = {SOFT_ATOMIC_DATA, ONLY},
	[SOFT_ROCE_COMPARE_SWAP] = {SOFT_COMPARE_SWAP, ONLY},
	[SOFT_ROCE_FETCH_ADD] = {SOFT_FETCH_ADD, ONLY},
	[SOFT_ROCE_FLUSH] = {SOFT_FLUSH, ONLY},
	[SOFT_ROCE_ATOMIC_WRITE] = {SOFT_ATOMIC_WRITE, ONLY},
};

uint8_t soft_roce_operation(const struct soft_frame *frame, bool first, bool last)
{
	const uint8_t flags = (first ? 0 : SOFT_FRAME_CONTINUES) |
			      (last ? frame->flags & (IMMEDIATE | INVALIDATE) : SOFT_FRAME_MORE);
	/* A NAK is an ACKNOWLEDGE packet with a different syndrome. */
	const bool is_nak = frame->opcode == SOFT_NAK || frame->opcode == SOFT_RNR_NAK;
	const uint8_t opcode = is_nak ? SOFT_ACK : frame->opcode;
	uint8_t operation = 0;

	/* Find the operation in the table that converts operations to frames. */
	while (operation < SOFT_ROCE_OPERATION &&
	       (frames[operation].opcode != opcode || frames[operation].flags != flags))
		operation++;
	return operation;
}

bool soft_roce_from_frame(struct soft_roce_packet *packet, const struct soft_frame *frame,
			  const uint8_t *atomic_payload)
{
	*packet = (struct soft_roce_packet){
		.pkey = SOFT_ROCE_PKEY,
		.migreq = true,
		.psn = frame->psn,
		.srq = frame->flags & SOFT_FRAME_SRQ ? frame->ack : 0,
		.address = frame->address,
		.rkey = frame->rkey,
		.dma_length = frame->dma_length,
		.msn = frame->msn,
		.immediate = ntohl(frame->immediate),
	};
	switch (frame->opcode) {
	case SOFT_SEND:
	case SOFT_WRITE:
	case SOFT_READ:
	case SOFT_ATOMIC_WRITE:
		return true;
	case SOFT_READ_DATA:
	case SOFT_ACK:
		packet->syndrome = SOFT_ROCE_ACK | SOFT_ROCE_NO_CREDITS;
		return true;
	case SOFT_FLUSH:
		packet->flush = frame->syndrome;
		return true;
	case SOFT_COMPARE_SWAP:
		packet->compare = soft_get64(atomic_payload);
		packet->swap_add = soft_get64(atomic_payload + 8);
		return true;
	case SOFT_FETCH_ADD:
		packet->swap_add = soft_get64(atomic_payload);
		return true;
	case SOFT_ATOMIC_DATA:
		packet->syndrome = SOFT_ROCE_ACK | SOFT_ROCE_NO_CREDITS;
		packet->original = soft_get64(atomic_payload);
		return true;
	case SOFT_NAK:
		packet->syndrome = SOFT_ROCE_NAK | frame->syndrome;
		return true;
	case SOFT_RNR_NAK:
		packet->syndrome = SOFT_ROCE_RNR_NAK | frame->syndrome;
		return true;
	default:
		return false;
	}
}

/* ---- packets to frames ----------------------------------------------------------------------- */

/* Returns whether the length is valid. Every packet of a message except the last one must be as
 * long as the path MTU (IBTA 9.7.4.1.6, 9.7.5.2.2). */
static bool has_valid_length(const struct soft_frame *frame, uint32_t mtu)
{
	if (frame->dma_length > SOFT_MAX_MESSAGE)
		return false;
	if (!soft_is_last(frame))
		return frame->length == mtu;
	return frame->length <= mtu && (frame->length || soft_is_first(frame));
}

/* Turn a request of invalid length into an empty request with an invalid path MTU, which the
 * responder refuses in PSN order. Returns false if the frame is a response. */
static bool make_refused_request(struct soft_frame *frame)
{
	frame->flags &= SOFT_FRAME_SRQ;
	frame->length = frame->dma_length = 0;
	frame->syndrome = WRONG_MTU;
	return frame->opcode < SOFT_ACK;
}

/* Convert the syndrome of an acknowledgement (IBTA 9.7.5.2.1). Returns false if it is invalid. */
static bool decode_syndrome(struct soft_frame *frame, uint8_t syndrome)
{
	const uint8_t value = syndrome & SOFT_ROCE_NO_CREDITS;

	switch (syndrome & SOFT_ROCE_SYNDROME) {
	case SOFT_ROCE_ACK:
		return true;
	case SOFT_ROCE_RNR_NAK:
		frame->opcode = SOFT_RNR_NAK;
		frame->syndrome = value;
		return true;
	case SOFT_ROCE_NAK:
		frame->opcode = SOFT_NAK;
		frame->syndrome = value;
		return value <= SOFT_NAK_REMOTE_OPERATION;
	default:
		return false;
	}
}

bool soft_roce_to_frame(struct soft_frame *frame, const struct soft_roce_packet *packet,
			uint32_t mtu, uint8_t atomic_payload[SOFT_ATOMIC_ARGUMENTS])
{
	const uint8_t operation = packet->opcode & SOFT_ROCE_OPERATION;
	const unsigned has = (unsigned)soft_roce_headers(packet->opcode);

	*frame = (struct soft_frame){
		.opcode = frames[operation].opcode,
		.flags = frames[operation].flags |
			 (packet->solicited ? (uint8_t)SOFT_FRAME_SOLICITED : 0),
		.length = packet->length,
		.psn = packet->psn,
		.address = packet->address,
		.rkey = packet->rkey,
		.dma_length = packet->dma_length,
		.immediate = htonl(packet->immediate),
		.msn = packet->msn,
	};
	if (has & SOFT_ROCE_XRCETH) {
		frame->flags |= SOFT_FRAME_SRQ;
		frame->ack = packet->srq;
	}
	switch (frame->opcode) {
	case SOFT_ACK:
		return decode_syndrome(frame, packet->syndrome);
	case SOFT_COMPARE_SWAP:
		soft_put64(atomic_payload, packet->compare);
		soft_put64(atomic_payload + 8, packet->swap_add);
		frame->length = SOFT_ATOMIC_ARGUMENTS;
		return true;
	case SOFT_FETCH_ADD:
		soft_put64(atomic_payload, packet->swap_add);
		soft_put64(atomic_payload + 8, 0);
		frame->length = SOFT_ATOMIC_ARGUMENTS;
		return true;
	case SOFT_ATOMIC_DATA:
		soft_put64(atomic_payload, packet->original);
		frame->length = SOFT_ATOMIC_RESULT;
		return true;
	case SOFT_FLUSH:
		frame->syndrome = packet->flush;
		return frame->dma_length <= SOFT_MAX_MESSAGE || make_refused_request(frame);
	default:
		return has_valid_length(frame, mtu) || make_refused_request(frame);
	}
}
