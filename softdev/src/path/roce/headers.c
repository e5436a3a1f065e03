/* Encode and decode packet headers (headers.h).
 *
 * Both directions use the same two tables: one lists the fields of each header, the other the
 * headers of each opcode.
 */
#include "headers.h"

#include <endian.h>
#include <string.h>

/* ---- headers ------------------------------------------------------------------------------- */

/* Call HEADER(name, bytes, fields) for each extended header, in wire order. */
#define EXTENDED_HEADERS(HEADER, FIELD, ZEROS)                                                     \
	/* 9.3.2 */                                                                                \
	HEADER(DETH, 8, FIELD(u32, qkey) ZEROS(u8) FIELD(u24, src_qpn))                            \
	/* annex A14 */                                                                            \
	HEADER(XRCETH, 4, ZEROS(u8) FIELD(u24, srq))                                               \
	/* annex A19 */                                                                            \
	HEADER(FETH, 4, ZEROS(u24) FIELD(u8, flush))                                               \
	/* 9.3.3 */                                                                                \
	HEADER(RETH, 16, FIELD(u64, address) FIELD(u32, rkey) FIELD(u32, dma_length))              \
	/* 9.3.4 */                                                                                \
	HEADER(ATOMICETH, 28,                                                                      \
	       FIELD(u64, address) FIELD(u32, rkey) FIELD(u64, swap_add) FIELD(u64, compare))      \
	/* 9.3.5 */                                                                                \
	HEADER(AETH, 4, FIELD(u8, syndrome) FIELD(u24, msn))                                       \
	/* 9.3.5.3 */                                                                              \
	HEADER(ATOMICACKETH, 8, FIELD(u64, original))                                              \
	/* 9.3.6 */                                                                                \
	HEADER(IMMDT, 4, FIELD(u32, immediate))                                                    \
	/* 9.3.7 */                                                                                \
	HEADER(IETH, 4, FIELD(u32, rkey))

enum {
	/* bits in bytes 1, 4 and 8 of the BTH (9.2) */
	SOLICITED = 0x80,
	MIGREQ = 0x40,
	PAD_SHIFT = 4,
	PAD = 3 << PAD_SHIFT,
	VERSION = 0x0f,
	FECN = 0x80,
	BECN = 0x40,
	ACK_REQUEST = 0x80,
	FLUSH_BITS = 0x3f,
};

enum { /* field sizes in bytes */
       u8 = 1,
       u16 = 2,
       u24 = 3,
       u32 = 4,
       u64 = 8,
};

/* Encode a big-endian number of `bytes` bytes. Returns the end. */
static inline uint8_t *put_number(uint8_t *at, uint64_t value, int bytes)
{
	value = htobe64(value << (64 - 8 * bytes));
	memcpy(at, &value, (size_t)bytes);
	return at + bytes;
}

/* Decode a big-endian number of `bytes` bytes. */
static inline uint64_t number(const uint8_t *at, int bytes)
{
	uint64_t value = 0;

	memcpy(&value, at, (size_t)bytes);
	return be64toh(value) >> (64 - 8 * bytes);
}

/* ---- opcodes ------------------------------------------------------------------------------- */

/* The payload length of an opcode plus one, so that 0 can mark an unused opcode. */
enum payload {
	NO_OPCODE, /* not in the table */
	NONE,
	WORD = 1 + 8, /* annex A19 */
	RESERVED = 1 + SOFT_ROCE_CNP_PAYLOAD,
	ANY = 0xff, /* limited by the path MTU of the queue pair */
};

struct layout {
	uint16_t headers;
	uint8_t payload;
};

#define ROW(service, operation, headers, payload)                                                  \
	[(int)(service) | (int)SOFT_ROCE_##operation] = {headers, payload}
/* Only XRC requests have an XRCETH, which contains the number of the shared receive queue
 * (annex A14). */
#define RELIABLE_REQUEST(operation, headers, payload)                                              \
	ROW(SOFT_ROCE_RC, operation, headers, payload),                                            \
		ROW(SOFT_ROCE_XRC, operation, SOFT_ROCE_XRCETH | (headers), payload)
#define REQUEST(operation, headers, payload)                                                       \
	RELIABLE_REQUEST(operation, headers, payload),                                             \
		ROW(SOFT_ROCE_UC, operation, headers, payload)
#define RESPONSE(operation, headers, payload)                                                      \
	ROW(SOFT_ROCE_RC, operation, headers, payload),                                            \
		ROW(SOFT_ROCE_XRC, operation, headers, payload)
#define DATAGRAM(operation, headers, payload)                                                      \
	ROW(SOFT_ROCE_UD, operation, SOFT_ROCE_DETH | (headers), payload)

/* See table 38 in 9.2.1, annex A14 for XRC, annex A19 for FLUSH and ATOMIC WRITE, and annex A17.9.3
 * for CNP. */
static const struct layout layouts[256] = {
	REQUEST(SEND_FIRST, 0, ANY),
	REQUEST(SEND_MIDDLE, 0, ANY),
	REQUEST(SEND_LAST, 0, ANY),
	REQUEST(SEND_LAST_IMMEDIATE, SOFT_ROCE_IMMDT, ANY),
	REQUEST(SEND_ONLY, 0, ANY),
	REQUEST(SEND_ONLY_IMMEDIATE, SOFT_ROCE_IMMDT, ANY),
	REQUEST(WRITE_FIRST, SOFT_ROCE_RETH, ANY),
	REQUEST(WRITE_MIDDLE, 0, ANY),
	REQUEST(WRITE_LAST, 0, ANY),
	REQUEST(WRITE_LAST_IMMEDIATE, SOFT_ROCE_IMMDT, ANY),
	REQUEST(WRITE_ONLY, SOFT_ROCE_RETH, ANY),
	REQUEST(WRITE_ONLY_IMMEDIATE, SOFT_ROCE_RETH | SOFT_ROCE_IMMDT, ANY),
	RELIABLE_REQUEST(READ_REQUEST, SOFT_ROCE_RETH, NONE),
	RESPONSE(READ_RESPONSE_FIRST, SOFT_ROCE_AETH, ANY),
	RESPONSE(READ_RESPONSE_MIDDLE, 0, ANY),
	RESPONSE(READ_RESPONSE_LAST, SOFT_ROCE_AETH, ANY),
	RESPONSE(READ_RESPONSE_ONLY, SOFT_ROCE_AETH, ANY),
	RESPONSE(ACKNOWLEDGE, SOFT_ROCE_AETH, NONE),
	RESPONSE(ATOMIC_ACKNOWLEDGE, SOFT_ROCE_AETH | SOFT_ROCE_ATOMICACKETH, NONE),
	RELIABLE_REQUEST(COMPARE_SWAP, SOFT_ROCE_ATOMICETH, NONE),
	RELIABLE_REQUEST(FETCH_ADD, SOFT_ROCE_ATOMICETH, NONE),
	RELIABLE_REQUEST(SEND_LAST_INVALIDATE, SOFT_ROCE_IETH, ANY),
	RELIABLE_REQUEST(SEND_ONLY_INVALIDATE, SOFT_ROCE_IETH, ANY),
	RELIABLE_REQUEST(FLUSH, SOFT_ROCE_FETH | SOFT_ROCE_RETH, NONE),
	RELIABLE_REQUEST(ATOMIC_WRITE, SOFT_ROCE_RETH, WORD),
	DATAGRAM(SEND_ONLY, 0, ANY),
	DATAGRAM(SEND_ONLY_IMMEDIATE, SOFT_ROCE_IMMDT, ANY),
	ROW(0, CNP, 0, RESERVED),
};

int soft_roce_headers(uint8_t opcode)
{
	return layouts[opcode].payload == NO_OPCODE ? -1 : layouts[opcode].headers;
}

/* ---- both directions ----------------------------------------------------------------------- */

size_t soft_roce_encode(uint8_t *headers, const struct soft_roce_packet *packet)
{
	const unsigned has = layouts[packet->opcode].headers;
	uint8_t *at = headers;

	*at++ = packet->opcode;
	*at++ = (uint8_t)((packet->solicited ? SOLICITED : 0) | (packet->migreq ? MIGREQ : 0) |
			  soft_roce_pad(packet->length) << PAD_SHIFT);
	at = put_number(at, packet->pkey, u16);
	*at++ = (packet->fecn ? FECN : 0) | (packet->becn ? BECN : 0);
	at = put_number(at, packet->dest_qpn, u24);
	*at++ = packet->ack_request ? ACK_REQUEST : 0;
	at = put_number(at, packet->psn, u24);
#define PUT_ZEROS(type) at = put_number(at, 0, type);
#define PUT(type, name) at = put_number(at, packet->name, type);
#define PUT_HEADER(header, bytes, fields)                                                          \
	if (has & SOFT_ROCE_##header) {                                                            \
		fields                                                                             \
	}
	EXTENDED_HEADERS(PUT_HEADER, PUT, PUT_ZEROS)
	return (size_t)(at - headers);
}

enum soft_roce_malformed soft_roce_decode(struct soft_roce_packet *packet, const uint8_t *bytes,
					  size_t length)
{
	const struct layout *layout;
	const uint8_t *at, *end;
	uint32_t pad;

	if (length < SOFT_ROCE_BTH + SOFT_ROCE_ICRC)
		return SOFT_ROCE_SHORT;
	at = bytes + SOFT_ROCE_BTH;
	end = bytes + length - SOFT_ROCE_ICRC;
	*packet = (struct soft_roce_packet){
		.opcode = bytes[0],
		.solicited = bytes[1] & SOLICITED,
		.migreq = bytes[1] & MIGREQ,
		.pkey = (uint16_t)number(bytes + 2, u16),
		.fecn = bytes[4] & FECN,
		.becn = bytes[4] & BECN,
		.dest_qpn = (uint32_t)number(bytes + 5, u24),
		.ack_request = bytes[8] & ACK_REQUEST,
		.psn = (uint32_t)number(bytes + 9, u24),
	};
	layout = &layouts[packet->opcode];
	if (bytes[1] & VERSION)
		return SOFT_ROCE_BAD_VERSION;
	if (layout->payload == NO_OPCODE)
		return SOFT_ROCE_BAD_OPCODE;
#define TAKE_ZEROS(type) at += (type);
#define TAKE(type, name)                                                                           \
	packet->name = (typeof(packet->name))number(at, type);                                     \
	at += (type);
#define TAKE_HEADER(header, bytes, fields)                                                         \
	if (layout->headers & SOFT_ROCE_##header) {                                                \
		if (end - at < (bytes))                                                            \
			return SOFT_ROCE_SHORT;                                                    \
		fields                                                                             \
	}
	EXTENDED_HEADERS(TAKE_HEADER, TAKE, TAKE_ZEROS)
	packet->flush &= FLUSH_BITS;
	pad = (bytes[1] & PAD) >> PAD_SHIFT;
	if ((end - at) % 4 || pad > end - at)
		return SOFT_ROCE_BAD_PAD;
	packet->payload = at;
	packet->length = (uint32_t)(end - at) - pad;
	/* The table contains the required length plus one (enum payload). */
	return layout->payload == ANY || layout->payload == packet->length + 1
		       ? SOFT_ROCE_WELL_FORMED
		       : SOFT_ROCE_BAD_PAYLOAD;
}
