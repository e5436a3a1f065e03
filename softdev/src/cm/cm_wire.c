/* The connection manager's messages to bytes and back; layout and rules in cm_wire.h. */
#include "cm_wire.h"

#include <errno.h>
#include <string.h>

static const char magic[] = "ARCM";

/* Bytes of the body before the private data, and room for that. */
static const struct {
	uint8_t fixed, private_room;
} sizes[] = {
	[SOFT_CM_REQ] = {26, SOFT_CM_REQ_PRIVATE},
	[SOFT_CM_MRA] = {0, 0},
	[SOFT_CM_REP] = {24, SOFT_CM_REP_PRIVATE},
	[SOFT_CM_RTU] = {0, 0},
	[SOFT_CM_REJ] = {4, SOFT_CM_REJ_PRIVATE},
	[SOFT_CM_DREQ] = {0, 0},
	[SOFT_CM_DREP] = {0, 0},
	[SOFT_SIDR_REQ] = {8, SOFT_SIDR_REQ_PRIVATE},
	[SOFT_SIDR_WAIT] = {8, 0},
	[SOFT_SIDR_REP] = {20, SOFT_SIDR_REP_PRIVATE},
};

enum { FLAG_FLOW_CONTROL = 1, FLAG_SRQ = 2, FLAGS_KNOWN = FLAG_FLOW_CONTROL | FLAG_SRQ };

/* What a field can be at most. */
#define MAX_24_BITS 0xffffffu
#define MAX_3_BITS 7
#define ANY UINT64_MAX

uint8_t soft_cm_private_room(enum soft_cm_type type)
{
	return sizes[type].private_room;
}

bool soft_cm_put_private(struct soft_cm_message *message, const void *data, uint8_t length)
{
	if (!data || !length)
		return true;
	if (length > sizes[message->type].private_room)
		return false;
	message->private_data_len = length;
	memcpy(message->private_data, data, length);
	return true;
}

/* ---- fields -------------------------------------------------------------------------------- */

/* Through the fixed part of a body, number by number, to write it or to read it. */
struct walk {
	uint8_t *at;
	bool reads;
	bool wrong; /* a value that no sender of this version writes */
};

static uint64_t number(struct walk *walk, uint64_t value, int bytes, uint64_t most)
{
	if (walk->reads)
		value = 0;
	for (int i = 0; i < bytes; i++, walk->at++)
		if (walk->reads)
			value |= (uint64_t)*walk->at << 8 * i;
		else
			*walk->at = (uint8_t)(value >> 8 * i);
	walk->wrong |= value > most;
	return value;
}

#define FIELD(name, bytes, most)                                                                   \
	message->name = (typeof(message->name))number(walk, message->name, bytes, most)

static void flags_field(struct walk *walk, struct soft_cm_message *message)
{
	uint64_t flags =
		(message->flow_control ? FLAG_FLOW_CONTROL : 0) | (message->srq ? FLAG_SRQ : 0);

	flags = number(walk, flags, 1, FLAGS_KNOWN);
	message->flow_control = flags & FLAG_FLOW_CONTROL ? 1 : 0;
	message->srq = flags & FLAG_SRQ ? 1 : 0;
}

static void fields(struct walk *walk, struct soft_cm_message *message)
{
	switch (message->type) {
	case SOFT_CM_REQ:
	case SOFT_CM_REP:
		FIELD(qpn, 4, MAX_24_BITS);
		FIELD(psn, 4, MAX_24_BITS);
		if (message->type == SOFT_CM_REQ) {
			FIELD(port_space, 2, ANY);
			FIELD(qp_type, 1, ANY);
		}
		FIELD(responder_resources, 1, ANY);
		FIELD(initiator_depth, 1, ANY);
		flags_field(walk, message);
		if (message->type == SOFT_CM_REQ)
			FIELD(retry_count, 1, MAX_3_BITS);
		FIELD(rnr_retry_count, 1, MAX_3_BITS);
		FIELD(ece.vendor_id, 4, ANY);
		FIELD(ece.options, 4, ANY);
		FIELD(shm_port, 2, ANY);
		if (message->type == SOFT_CM_REP)
			FIELD(path_port, 2, ANY);
		break;
	case SOFT_CM_REJ:
		FIELD(reason, 2, ANY);
		(void)number(walk, 0, 2, 0);
		break;
	case SOFT_CM_MRA:
	case SOFT_CM_RTU:
	case SOFT_CM_DREQ:
	case SOFT_CM_DREP:
		break;
	case SOFT_SIDR_REQ:
	case SOFT_SIDR_WAIT:
	case SOFT_SIDR_REP:
		FIELD(number, 8, ANY);
		if (message->type != SOFT_SIDR_REP)
			break;
		FIELD(qpn, 4, MAX_24_BITS);
		FIELD(qkey, 4, ANY);
		(void)number(walk, 0, 2, ANY);
		FIELD(status, 1, SOFT_SIDR_STATUS_MAX);
		(void)number(walk, 0, 1, 0);
		break;
	}
}

/* ---- messages ------------------------------------------------------------------------------ */

size_t soft_cm_encode(const struct soft_cm_message *message, uint8_t out[SOFT_CM_MESSAGE_MAX])
{
	struct soft_cm_message copy = *message;
	struct walk walk = {.at = out + 6};
	size_t fixed = sizes[message->type].fixed;
	size_t body = fixed + sizes[message->type].private_room;

	memset(out, 0, SOFT_CM_HEADER + body);
	memcpy(out, magic, 4);
	out[4] = SOFT_CM_VERSION;
	out[5] = (uint8_t)message->type;
	(void)number(&walk, body, 2, ANY);
	fields(&walk, &copy);
	memcpy(out + SOFT_CM_HEADER + fixed, message->private_data, message->private_data_len);
	return SOFT_CM_HEADER + body;
}

int soft_cm_decode(const uint8_t *bytes, size_t length, struct soft_cm_message *message,
		   size_t *used)
{
	struct walk walk = {.at = (uint8_t *)(uintptr_t)bytes + 6, .reads = true};
	size_t fixed, body;

	if (memcmp(bytes, magic, length < 4 ? length : 4) != 0)
		return EPROTO;
	if (length > 4 && bytes[4] != SOFT_CM_VERSION)
		return EPROTONOSUPPORT;
	if (length > 5 && (bytes[5] < 1 || bytes[5] > SOFT_SIDR_REP))
		return EPROTO;
	if (length < SOFT_CM_HEADER)
		return EAGAIN;
	memset(message, 0, sizeof(*message));
	message->type = (enum soft_cm_type)bytes[5];
	message->private_data_len = sizes[message->type].private_room;
	fixed = sizes[message->type].fixed;
	body = fixed + message->private_data_len;
	if (number(&walk, 0, 2, ANY) != body)
		return EPROTO;
	if (length < SOFT_CM_HEADER + body)
		return EAGAIN;
	fields(&walk, message);
	if (walk.wrong)
		return EPROTO;
	memcpy(message->private_data, bytes + SOFT_CM_HEADER + fixed, message->private_data_len);
	*used = SOFT_CM_HEADER + body;
	return 0;
}
