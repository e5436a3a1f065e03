/* Service ID resolution to bytes and back; layout and rules in cm_sidr_wire.h. */
#include "cm_sidr_wire.h"

#include <errno.h>
#include <string.h>

static const uint8_t magic[4] = {'A', 'R', 'C', 'S'};

enum {
	NUMBER = 8,
	REP_FIXED = 20,
	MAX_24_BITS = 0xffffff
};

static void put(uint8_t *out, uint64_t value, int bytes)
{
	for (int i = 0; i < bytes; i++)
		out[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t get(const uint8_t *in, int bytes)
{
	uint64_t value = 0;

	for (int i = 0; i < bytes; i++)
		value |= (uint64_t)in[i] << 8 * i;
	return value;
}

/* Bytes of the body before the private data, and of the private data. */
static size_t fixed_part(enum soft_sidr_type type)
{
	return type == SOFT_SIDR_REP ? REP_FIXED : NUMBER;
}

static uint8_t private_room(enum soft_sidr_type type)
{
	switch (type) {
	case SOFT_SIDR_REQ:
		return SOFT_SIDR_REQ_PRIVATE;
	case SOFT_SIDR_REP:
		return SOFT_SIDR_REP_PRIVATE;
	case SOFT_SIDR_WAIT:
		break;
	}
	return 0;
}

size_t soft_sidr_encode(const struct soft_sidr_message *message, uint8_t out[SOFT_SIDR_MAX])
{
	uint8_t *body = out + SOFT_SIDR_HEADER;
	size_t fixed = fixed_part(message->type);
	size_t length = fixed + private_room(message->type);

	memset(out, 0, SOFT_SIDR_HEADER + length);
	memcpy(out, magic, sizeof(magic));
	out[4] = SOFT_SIDR_VERSION;
	out[5] = (uint8_t)message->type;
	put(out + 6, length, 2);
	put(body, message->number, 8);
	if (message->type == SOFT_SIDR_REP) {
		put(body + 8, message->qpn, 4);
		put(body + 12, message->qkey, 4);
		body[18] = message->status;
	}
	memcpy(body + fixed, message->private_data, message->private_data_len);
	return SOFT_SIDR_HEADER + length;
}

int soft_sidr_decode(const uint8_t *bytes, size_t length, struct soft_sidr_message *message)
{
	const uint8_t *body = bytes + SOFT_SIDR_HEADER;
	enum soft_sidr_type type;

	if (length < SOFT_SIDR_HEADER || memcmp(bytes, magic, sizeof(magic)) != 0 ||
	    bytes[4] != SOFT_SIDR_VERSION || bytes[5] < SOFT_SIDR_REQ || bytes[5] > SOFT_SIDR_REP)
		return EPROTO;
	type = (enum soft_sidr_type)bytes[5];
	if (get(bytes + 6, 2) != fixed_part(type) + private_room(type) ||
	    length != SOFT_SIDR_HEADER + get(bytes + 6, 2))
		return EPROTO;
	memset(message, 0, sizeof(*message));
	message->type = type;
	message->number = get(body, 8);
	if (type == SOFT_SIDR_REP) {
		message->qpn = (uint32_t)get(body + 8, 4);
		message->qkey = (uint32_t)get(body + 12, 4);
		message->status = body[18];
		if (message->qpn > MAX_24_BITS || message->status > SOFT_SIDR_STATUS_MAX ||
		    body[19])
			return EPROTO;
	}
	message->private_data_len = private_room(type);
	memcpy(message->private_data, body + fixed_part(type), message->private_data_len);
	return 0;
}
