/* Encodes connection manager messages as MADs and decodes them, with one field table for both
 * directions (cm_mad.h). */
#include "cm_mad.h"

#include <errno.h>
#include <string.h>

enum {
	IPV4_PREFIX_SIZE = 12, /* length of the prefix in IPv4-mapped addresses */
	RDMA_CM_HEADER_SIZE = 36, /* size of the rdma_cm header */
};

/* Base version, management class "communication management", class version, and method "send"
 * (13.4.2). */
static const uint8_t header[] = {1, 0x07, 2, 0x03};

/* Layout of each message type: the attribute ID, the offset of the private data, whether the
 * private data begins with the rdma_cm header, and the maximum size of the application's data. */
static const struct {
	uint8_t attribute, private_offset;
	bool has_rdma_cm_header;
	uint8_t max_private_size;
} attributes[] = {
	[SOFT_CM_REQ] = {0x10, SOFT_MAD_HEADER + 140, true, SOFT_CM_REQ_PRIVATE},
	[SOFT_CM_MRA] = {0x11, SOFT_MAD_HEADER + 10, false, 0},
	[SOFT_CM_REJ] = {0x12, SOFT_MAD_HEADER + 84, false, SOFT_CM_REJ_PRIVATE},
	[SOFT_CM_REP] = {0x13, SOFT_MAD_HEADER + 36, false, SOFT_CM_REP_PRIVATE},
	[SOFT_CM_RTU] = {0x14, SOFT_MAD_HEADER + 8, false, 0},
	[SOFT_CM_DREQ] = {0x15, SOFT_MAD_HEADER + 12, false, 0},
	[SOFT_CM_DREP] = {0x16, SOFT_MAD_HEADER + 8, false, 0},
	[SOFT_SIDR_REQ] = {0x17, SOFT_MAD_HEADER + 16, true, SOFT_SIDR_REQ_PRIVATE},
	[SOFT_SIDR_REP] = {0x18, SOFT_MAD_HEADER + 96, false, SOFT_SIDR_REP_PRIVATE},
};

#define TYPE(type) (1u << SOFT_##type)
#define ALL_TYPES (~0u)
#define REQ_OR_REP (TYPE(CM_REQ) | TYPE(CM_REP))
#define LATER_TYPES                                                                                \
	(TYPE(CM_MRA) | TYPE(CM_REJ) | TYPE(CM_REP) | TYPE(CM_RTU) | TYPE(CM_DREQ) | TYPE(CM_DREP))

struct field {
	unsigned types; /* bit mask of the message types with this field */
	uint16_t byte; /* offset in the MAD */
	uint8_t bit, width;
	uint8_t size; /* member size in bytes; 0 for a fixed value */
	uint16_t member_offset; /* member offset in struct soft_cm_mad */
	uint32_t value;
};

#define FIELD(types, byte, bit, width, member)                                                     \
	{types,                                                                                    \
	 SOFT_MAD_HEADER + (byte),                                                                 \
	 bit,                                                                                      \
	 width,                                                                                    \
	 sizeof(((struct soft_cm_mad *)0)->member),                                                \
	 offsetof(struct soft_cm_mad, member),                                                     \
	 0}
#define VALUE(types, byte, bit, width, value)                                                      \
	{types, SOFT_MAD_HEADER + (byte), bit, width, 0, 0, value}

/* Timeouts are exponents n in 4.096 us * 2^n. Byte offsets are relative to the end of the MAD
 * header. */
static const struct field fields[] = {
	FIELD(ALL_TYPES, -16, 0, 64, transaction), /* 13.4.3 */
	FIELD(REQ_OR_REP, -4, 0, 32, message.ece.options), /* attribute modifier */

	FIELD(TYPE(CM_REQ) | LATER_TYPES, 0, 0, 32, local_id), /* 12.6.5 to 12.6.11 */
	FIELD(LATER_TYPES, 4, 0, 32, remote_id),

	FIELD(TYPE(CM_REQ), 5, 0, 24, message.ece.vendor_id), /* 12.6.5 */
	FIELD(TYPE(CM_REQ), 8, 0, 32, service_prefix), /* A11.2 */
	FIELD(TYPE(CM_REQ), 12, 0, 16, message.port_space),
	FIELD(TYPE(CM_REQ), 14, 0, 16, service_port),
	FIELD(TYPE(CM_REQ), 16, 0, 64, guid),
	FIELD(TYPE(CM_REQ), 32, 0, 24, message.qpn),
	FIELD(TYPE(CM_REQ), 35, 0, 8, message.responder_resources),
	FIELD(TYPE(CM_REQ), 39, 0, 8, message.initiator_depth),
	VALUE(TYPE(CM_REQ), 43, 0, 5, 20), /* remote CM response timeout */
	FIELD(TYPE(CM_REQ), 43, 5, 2, message.qp_type), /* transport service type, see below */
	FIELD(TYPE(CM_REQ), 43, 7, 1, message.flow_control),
	FIELD(TYPE(CM_REQ), 44, 0, 24, message.psn),
	VALUE(TYPE(CM_REQ), 47, 0, 5, 20), /* local CM response timeout */
	FIELD(TYPE(CM_REQ), 47, 5, 3, message.retry_count),
	VALUE(TYPE(CM_REQ), 48, 0, 16, 0xffff), /* default partition key */
	FIELD(TYPE(CM_REQ), 50, 0, 4, message.path_mtu),
	FIELD(TYPE(CM_REQ), 50, 5, 3, message.rnr_retry_count),
	VALUE(TYPE(CM_REQ), 51, 0, 4, 15), /* maximum of CM retries */
	FIELD(TYPE(CM_REQ), 51, 4, 1, message.srq),
	VALUE(TYPE(CM_REQ), 52, 0, 32, 0xffffffff), /* permissive LIDs; RoCE has none (A16) */
	VALUE(TYPE(CM_REQ), 91, 2, 6, 3), /* packet rate: 10 Gbit/s */
	FIELD(TYPE(CM_REQ), 92, 0, 8, message.traffic_class),
	VALUE(TYPE(CM_REQ), 93, 0, 8, 64), /* hop limit */
	VALUE(TYPE(CM_REQ), 95, 0, 5, 18), /* local ACK timeout */

	FIELD(TYPE(CM_MRA) | TYPE(CM_REJ), 8, 0, 2, responds_to), /* 12.6.6, 12.6.7 */
	FIELD(TYPE(CM_MRA), 9, 0, 5, message.service_timeout),
	FIELD(TYPE(CM_REJ), 9, 0, 7, guid_length),
	FIELD(TYPE(CM_REJ), 10, 0, 16, message.reason),
	FIELD(TYPE(CM_REJ), 12, 0, 64, guid), /* additional information for reason "timeout" */

	FIELD(TYPE(CM_REP), 12, 0, 24, message.qpn), /* 12.6.8 */
	FIELD(TYPE(CM_REP), 20, 0, 24, message.psn),
	FIELD(TYPE(CM_REP), 24, 0, 8, message.responder_resources),
	FIELD(TYPE(CM_REP), 25, 0, 8, message.initiator_depth),
	FIELD(TYPE(CM_REP), 26, 7, 1, message.flow_control),
	FIELD(TYPE(CM_REP), 27, 0, 3, message.rnr_retry_count),
	FIELD(TYPE(CM_REP), 27, 3, 1, message.srq),
	FIELD(TYPE(CM_REP), 28, 0, 64, guid),

	FIELD(TYPE(CM_DREQ), 8, 0, 24, peer_qpn), /* 12.6.10 */

	FIELD(TYPE(SIDR_REQ), 0, 0, 32, local_id), /* 12.11.1: request ID */
	VALUE(TYPE(SIDR_REQ), 4, 0, 16, 0xffff),
	FIELD(TYPE(SIDR_REQ), 8, 0, 32, service_prefix),
	FIELD(TYPE(SIDR_REQ), 12, 0, 16, message.port_space),
	FIELD(TYPE(SIDR_REQ), 14, 0, 16, service_port),

	FIELD(TYPE(SIDR_REP), 0, 0, 32, remote_id), /* 12.11.2 */
	FIELD(TYPE(SIDR_REP), 4, 0, 8, message.status),
	FIELD(TYPE(SIDR_REP), 8, 0, 24, message.qpn),
	FIELD(TYPE(SIDR_REP), 12, 0, 32, service_prefix),
	FIELD(TYPE(SIDR_REP), 16, 0, 16, message.port_space),
	FIELD(TYPE(SIDR_REP), 18, 0, 16, service_port),
	FIELD(TYPE(SIDR_REP), 20, 0, 32, message.qkey),
};

/* Offsets of the three bytes of the vendor ID in REP. The bytes are separated by other fields, so
 * the field table cannot describe them. */
static const uint16_t reply_vendor[] = {15, 19, 23};

/* ---- numbers ------------------------------------------------------------------------------- */

static uint64_t get(const uint8_t *bytes, const struct field *field)
{
	uint64_t value = 0;

	for (unsigned i = field->bit; i < field->bit + field->width; i++)
		value = value << 1 | (bytes[field->byte + i / 8] >> (7 - i % 8) & 1);
	return value;
}

static void put(uint8_t *bytes, const struct field *field, uint64_t value)
{
	for (unsigned i = field->bit + field->width; i-- > field->bit; value >>= 1)
		bytes[field->byte + i / 8] |= (uint8_t)((value & 1) << (7 - i % 8));
}

static uint64_t load(const struct soft_cm_mad *mad, const struct field *field)
{
	const uint8_t *at = (const uint8_t *)mad + field->member_offset;

	switch (field->size) {
	case 0: /* a field with a fixed value and no member in the struct */
		return field->value;
	case 1:
		return *at;
	case 2:
		return *(const uint16_t *)(const void *)at;
	case 4:
		return *(const uint32_t *)(const void *)at;
	default:
		return *(const uint64_t *)(const void *)at;
	}
}

static void store(struct soft_cm_mad *mad, const struct field *field, uint64_t value)
{
	uint8_t *at = (uint8_t *)mad + field->member_offset;

	switch (field->size) {
	case 0: /* the sender's fixed value is ignored */
		break;
	case 1:
		*at = (uint8_t)value;
		break;
	case 2:
		*(uint16_t *)(void *)at = (uint16_t)value;
		break;
	case 4:
		*(uint32_t *)(void *)at = (uint32_t)value;
		break;
	default:
		*(uint64_t *)(void *)at = value;
	}
}

/* ---- fields that the table does not cover ------------------------------------------------- */

/* The transport service type in REQ (12.6.5) is 0 for RC and 1 for UC. Both are two less than the
 * value in enum ibv_qp_type. RD (2) is not supported, and 3 means an extended type. */
enum {
	RC = 2, /* value in enum ibv_qp_type */
};

static bool is_ipv4(const uint8_t gid[16])
{
	static const uint8_t prefix[IPV4_PREFIX_SIZE] = {[10] = 0xff, [11] = 0xff};

	return !memcmp(gid, prefix, sizeof(prefix));
}

/* Write the rdma_cm header (A11.3) with the version, IP version, source port, source address and
 * destination address. An IPv4 address is stored in the last four bytes of its field. */
static void put_addresses(uint8_t *at, const struct soft_cm_mad *mad)
{
	size_t skip = is_ipv4(mad->source) ? IPV4_PREFIX_SIZE : 0;

	at[1] = skip ? 4 << 4 : 6 << 4;
	at[2] = (uint8_t)(mad->source_port >> 8);
	at[3] = (uint8_t)mad->source_port;
	memcpy(at + 4 + skip, mad->source + skip, 16 - skip);
	memcpy(at + 20 + skip, mad->destination + skip, 16 - skip);
}

static bool get_addresses(const uint8_t *at, struct soft_cm_mad *mad)
{
	unsigned version = at[1] >> 4;

	if (at[0] || (version != 4 && version != 6))
		return false;
	mad->source_port = (uint16_t)(at[2] << 8 | at[3]);
	memcpy(mad->source, at + 4, 16);
	memcpy(mad->destination, at + 20, 16);
	if (version == 6)
		return true;
	for (int i = 0; i < IPV4_PREFIX_SIZE; i++)
		mad->source[i] = mad->destination[i] = i < 10 ? 0 : 0xff;
	return true;
}

/* ---- MADs ---------------------------------------------------------------------------------- */

uint8_t soft_cm_max_private_data(enum soft_cm_type type)
{
	return attributes[type].max_private_size;
}

bool soft_cm_put_private(struct soft_cm_message *message, const void *data, uint8_t length)
{
	if (!data || !length)
		return true;
	if (length > attributes[message->type].max_private_size)
		return false;
	message->private_data_len = length;
	memcpy(message->private_data, data, length);
	return true;
}

void soft_cm_mad_encode(const struct soft_cm_mad *mad, uint8_t out[SOFT_MAD_SIZE])
{
	const struct soft_cm_message *message = &mad->message;
	struct soft_cm_mad copy = *mad;
	uint8_t *private_data = out + attributes[message->type].private_offset;

	memset(out, 0, SOFT_MAD_SIZE);
	memcpy(out, header, sizeof(header));
	out[17] = attributes[message->type].attribute;
	copy.message.qp_type -= RC; /* the transport service type of REQ */
	for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
		if (fields[i].types & 1u << message->type)
			put(out, &fields[i], load(&copy, &fields[i]));
	if (message->type == SOFT_CM_REP) /* the three bytes of the vendor ID are not adjacent */
		for (int i = 0; i < 3; i++)
			out[SOFT_MAD_HEADER + reply_vendor[i]] =
				(uint8_t)(message->ece.vendor_id >> (16 - 8 * i));
	if (message->type == SOFT_CM_REQ) { /* GIDs of the primary path */
		memcpy(out + SOFT_MAD_HEADER + 56, mad->source, 16);
		memcpy(out + SOFT_MAD_HEADER + 72, mad->destination, 16);
	}
	if (attributes[message->type].has_rdma_cm_header) {
		put_addresses(private_data, mad);
		private_data += RDMA_CM_HEADER_SIZE;
	}
	memcpy(private_data, message->private_data, message->private_data_len);
}

bool soft_cm_mad_decode(const uint8_t *bytes, size_t length, struct soft_cm_mad *mad)
{
	struct soft_cm_message *message = &mad->message;
	unsigned type = SOFT_CM_REQ;

	memset(mad, 0, sizeof(*mad));
	if (length != SOFT_MAD_SIZE || memcmp(bytes, header, sizeof(header)) != 0 || bytes[16])
		return false;
	while (type <= SOFT_SIDR_REP && bytes[17] != attributes[type].attribute)
		type++;
	if (type > SOFT_SIDR_REP)
		return false;
	const uint8_t *private_data = bytes + attributes[type].private_offset;

	message->type = (enum soft_cm_type)type;
	for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
		if (fields[i].types & 1u << type)
			store(mad, &fields[i], get(bytes, &fields[i]));
	if (type == SOFT_CM_REQ)
		message->qp_type += RC;
	if (type == SOFT_CM_REP)
		for (int i = 0; i < 3; i++)
			message->ece.vendor_id = message->ece.vendor_id << 8 |
						 bytes[SOFT_MAD_HEADER + reply_vendor[i]];
	if (attributes[type].has_rdma_cm_header) {
		if (!get_addresses(private_data, mad))
			return false;
		private_data += RDMA_CM_HEADER_SIZE;
	}
	message->private_data_len = attributes[type].max_private_size;
	memcpy(message->private_data, private_data, message->private_data_len);
	return true;
}

/* ---- carriers that know both ends --------------------------------------------------------- */

/* The GUID field, which these carriers do not need, contains the protocol version and the sender's
 * ports. */
void soft_cm_encode(const struct soft_cm_message *message, uint8_t out[SOFT_MAD_SIZE])
{
	soft_cm_mad_encode(&(struct soft_cm_mad){.message = *message,
						 .transaction = message->number,
						 .guid = (uint64_t)SOFT_CM_VERSION << 32 |
							 (uint32_t)message->shm_port << 16 |
							 message->path_port},
			   out);
}

int soft_cm_decode(const uint8_t *bytes, size_t length, struct soft_cm_message *message)
{
	struct soft_cm_mad mad;

	if (memcmp(bytes, header, length < sizeof(header) ? length : sizeof(header)) != 0)
		return EPROTO;
	if (length < SOFT_MAD_SIZE)
		return EAGAIN;
	if (!soft_cm_mad_decode(bytes, SOFT_MAD_SIZE, &mad))
		return EPROTO;
	*message = mad.message;
	message->number = mad.transaction;
	message->path_mtu = message->traffic_class = 0; /* not used by a stream */
	if (!(REQ_OR_REP & 1u << message->type))
		return 0;
	/* soft_cm_encode stores the ports and the protocol version in the GUID field. */
	message->shm_port = (uint16_t)(mad.guid >> 16);
	message->path_port = (uint16_t)mad.guid;
	return mad.guid >> 32 == SOFT_CM_VERSION ? 0 : EPROTONOSUPPORT;
}
