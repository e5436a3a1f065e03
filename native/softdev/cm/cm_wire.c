/* The connection manager's messages to bytes and back; layout and rules in cm_wire.h. */
#include "cm_wire.h"

#include <errno.h>
#include <string.h>

static const uint8_t magic[4] = {'A', 'R', 'C', 'M'};

enum {
	FLAG_FLOW_CONTROL = 1,
	FLAG_SRQ = 2,
	FLAGS_KNOWN = FLAG_FLOW_CONTROL | FLAG_SRQ
};
enum {
	MAX_24_BITS = 0xffffff,
	MAX_3_BITS = 7
};
enum {
	REQ_FIXED = 26,
	REP_FIXED = 22,
	REJ_FIXED = 4
};

static void put16(uint8_t *out, uint16_t value)
{
	out[0] = (uint8_t)value;
	out[1] = (uint8_t)(value >> 8);
}

static void put32(uint8_t *out, uint32_t value)
{
	put16(out, (uint16_t)value);
	put16(out + 2, (uint16_t)(value >> 16));
}

static uint16_t get16(const uint8_t *in)
{
	return (uint16_t)(in[0] | in[1] << 8);
}

static uint32_t get32(const uint8_t *in)
{
	return get16(in) | (uint32_t)get16(in + 2) << 16;
}

uint8_t soft_cm_private_room(enum soft_cm_type type)
{
	switch (type) {
	case SOFT_CM_REQ:
		return SOFT_CM_REQ_PRIVATE;
	case SOFT_CM_REP:
		return SOFT_CM_REP_PRIVATE;
	case SOFT_CM_REJ:
		return SOFT_CM_REJ_PRIVATE;
	case SOFT_CM_MRA:
	case SOFT_CM_RTU:
		break;
	}
	return 0;
}

/* Bytes of the body before the private data. */
static size_t fixed_part(enum soft_cm_type type)
{
	switch (type) {
	case SOFT_CM_REQ:
		return REQ_FIXED;
	case SOFT_CM_REP:
		return REP_FIXED;
	case SOFT_CM_REJ:
		return REJ_FIXED;
	case SOFT_CM_MRA:
	case SOFT_CM_RTU:
		break;
	}
	return 0;
}

static void put_ece(uint8_t *out, const struct soft_cm_ece *ece)
{
	put32(out, ece->vendor_id);
	put32(out + 4, ece->options);
}

static struct soft_cm_ece get_ece(const uint8_t *in)
{
	return (struct soft_cm_ece){get32(in), get32(in + 4)};
}

static uint8_t flags_of(const struct soft_cm_message *message)
{
	return (uint8_t)((message->flow_control ? FLAG_FLOW_CONTROL : 0) |
			 (message->srq ? FLAG_SRQ : 0));
}

size_t soft_cm_encode(const struct soft_cm_message *message, uint8_t out[SOFT_CM_MESSAGE_MAX])
{
	uint8_t *body = out + SOFT_CM_HEADER;
	size_t fixed = fixed_part(message->type);
	size_t length = fixed + soft_cm_private_room(message->type);

	memset(out, 0, SOFT_CM_HEADER + length);
	memcpy(out, magic, sizeof(magic));
	out[4] = SOFT_CM_VERSION;
	out[5] = (uint8_t)message->type;
	put16(out + 6, (uint16_t)length);
	if (message->type == SOFT_CM_REQ) {
		put32(body, message->qpn);
		put32(body + 4, message->psn);
		put16(body + 8, message->port_space);
		body[10] = message->qp_type;
		body[11] = message->responder_resources;
		body[12] = message->initiator_depth;
		body[13] = flags_of(message);
		body[14] = message->retry_count;
		body[15] = message->rnr_retry_count;
		put_ece(body + 16, &message->ece);
		put16(body + 24, message->shm_port);
	} else if (message->type == SOFT_CM_REP) {
		put32(body, message->qpn);
		put32(body + 4, message->psn);
		body[8] = message->responder_resources;
		body[9] = message->initiator_depth;
		body[10] = flags_of(message);
		body[11] = message->rnr_retry_count;
		put_ece(body + 12, &message->ece);
		put16(body + 20, message->shm_port);
	} else if (message->type == SOFT_CM_REJ) {
		put16(body, message->reason);
	}
	memcpy(body + fixed, message->private_data, message->private_data_len);
	return SOFT_CM_HEADER + length;
}

/* The header as far as it is there.  0: right so far. */
static int check_header(const uint8_t *bytes, size_t length)
{
	size_t known = length < sizeof(magic) ? length : sizeof(magic);

	if (memcmp(bytes, magic, known) != 0)
		return EPROTO;
	if (length > 4 && bytes[4] != SOFT_CM_VERSION)
		return EPROTONOSUPPORT;
	if (length > 5 && (bytes[5] < SOFT_CM_REQ || bytes[5] > SOFT_CM_REJ))
		return EPROTO;
	if (length >= SOFT_CM_HEADER) {
		enum soft_cm_type type = (enum soft_cm_type)bytes[5];

		if (get16(bytes + 6) != fixed_part(type) + soft_cm_private_room(type))
			return EPROTO;
	}
	return 0;
}

static int take_flags(struct soft_cm_message *message, uint8_t flags)
{
	if (flags & ~FLAGS_KNOWN)
		return EPROTO;
	message->flow_control = flags & FLAG_FLOW_CONTROL ? 1 : 0;
	message->srq = flags & FLAG_SRQ ? 1 : 0;
	return 0;
}

/* The body's fields; EPROTO for a value that no sender of this version writes. */
static int take_body(struct soft_cm_message *message, const uint8_t *body)
{
	if (message->type == SOFT_CM_REQ) {
		message->qpn = get32(body);
		message->psn = get32(body + 4);
		message->port_space = get16(body + 8);
		message->qp_type = body[10];
		message->responder_resources = body[11];
		message->initiator_depth = body[12];
		message->retry_count = body[14];
		message->rnr_retry_count = body[15];
		message->ece = get_ece(body + 16);
		message->shm_port = get16(body + 24);
		if (take_flags(message, body[13]))
			return EPROTO;
	} else if (message->type == SOFT_CM_REP) {
		message->qpn = get32(body);
		message->psn = get32(body + 4);
		message->responder_resources = body[8];
		message->initiator_depth = body[9];
		message->rnr_retry_count = body[11];
		message->ece = get_ece(body + 12);
		message->shm_port = get16(body + 20);
		if (take_flags(message, body[10]))
			return EPROTO;
	} else if (message->type == SOFT_CM_REJ) {
		message->reason = get16(body);
		if (get16(body + 2) != 0)
			return EPROTO;
	}
	if (message->qpn > MAX_24_BITS || message->psn > MAX_24_BITS ||
	    message->retry_count > MAX_3_BITS || message->rnr_retry_count > MAX_3_BITS)
		return EPROTO;
	return 0;
}

int soft_cm_decode(const uint8_t *bytes, size_t length, struct soft_cm_message *message,
		   size_t *used)
{
	size_t fixed;
	size_t total;
	int error = check_header(bytes, length);

	if (error)
		return error;
	if (length < SOFT_CM_HEADER)
		return EAGAIN;
	memset(message, 0, sizeof(*message));
	message->type = (enum soft_cm_type)bytes[5];
	message->private_data_len = soft_cm_private_room(message->type);
	fixed = fixed_part(message->type);
	total = SOFT_CM_HEADER + fixed + message->private_data_len;
	if (length < total)
		return EAGAIN;
	error = take_body(message, bytes + SOFT_CM_HEADER);
	if (error)
		return error;
	memcpy(message->private_data, bytes + SOFT_CM_HEADER + fixed, message->private_data_len);
	*used = total;
	return 0;
}
