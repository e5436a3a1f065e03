/* The wire format of the stream between two queue pairs.
 *
 * A stream carries frames in both directions: requests of one side's requester, and responses of
 * its responder. A frame is a header of 40 bytes and `length` bytes of payload. All numbers are
 * little-endian except immediate data, which verbs define as opaque bytes in network byte order.
 *
 * Packet sequence numbers count units of the queue pairs' path MTU, as in IBTA 9.7.1, but a frame
 * may stand for many packets: a frame with `length` bytes has max(1, ceil(length / MTU)) PSNs,
 * starting with `psn`. All frames of a message except the last contain whole units, so the offset
 * of a frame in its message follows from its PSN. A READ has as many PSNs as its response. A
 * message longer than SOFT_FRAME_MAX is split into several frames, so that acknowledgements and
 * responses can be sent in between.
 *
 * Two UC queue pairs exchange only SEND, WRITE and DISCONNECT, without responses. With XRC, one
 * side sends only requests, each with SOFT_FRAME_SRQ, and the other side only responses.
 *
 * A stream loses nothing, so responses have no timeout. A side whose fault spec loses or duplicates
 * input (fault.c) sends LOSES first, and both sides use a timer from then on.
 *
 * If two queue pairs were not introduced by a connection manager, each first sends a handshake in
 * the record that requests or grants their channel (path/path.h). A TCP stream that was not created
 * by a connection manager begins with a handshake of kind STREAM.
 *
 *   offset  header of a frame
 *        0  u8   opcode            enum soft_opcode
 *        1  u8   flags             enum soft_frame_flag
 *        2  u8   syndrome          NAK: enum soft_nak; RNR_NAK: timer code (IBTA 9.7.5.2.8, table 45);
 *                                  FLUSH: enum ibv_placement_type in the lower half, enum
 *                                  ibv_selectivity_level in the upper half (IBTA annex A19: FETH);
 *                                  other requests: path MTU of the requester, enum ibv_mtu, or 0;
 *                                  DISCONNECT: SOFT_LEFT_PSN or 0
 *        3  u8   pieces            0: the payload follows; otherwise a descriptor follows, and this
 *                                  many pieces of the sender's memory contain the payload (SEND,
 *                                  WRITE, READ_DATA between processes of one host)
 *        4  u32  length            of the payload
 *        8  u32  psn               first PSN (24 bits); ACK: acknowledges all up to this PSN;
 *                                  NAK, RNR_NAK: everything before it
 *       12  u32  ack               with SOFT_FRAME_ACK: also acknowledges all up to this PSN;
 *                                  with SOFT_FRAME_SRQ: number of the shared receive queue
 *       16  u64  address           READ, atomics, FLUSH, first frame of a WRITE: remote address
 *       24  u32  rkey              for the same; with SOFT_FRAME_INVALIDATE the key to invalidate
 *       28  u32  immediate         with SOFT_FRAME_IMMEDIATE
 *       32  u32  dma_length        READ, first frame of a WRITE: length of the message; FLUSH: of
 *                                  the range (RETH)
 *       36  u32  msn               in responses: number of messages that the responder has
 *                                  completed, in 24 bits (AETH)
 *
 *   offset  descriptor (cma.h)
 *        0  u32  slot of the export
 *        4  u32  its generation
 *        8  for each piece: u64 address, u64 length; the lengths add up to `length`
 *
 *   offset  handshake (48 bytes)
 *        0  u8[8] "aiordma" and a zero
 *        8  u16  version
 *       10  u16  kind              enum soft_hello_kind
 *       12  u32  from              queue pair number of the sender
 *       16  u32  to                queue pair number of the receiver
 *       20  u32  receive_psn       first PSN that the sender will accept
 *       24  u32  send_psn          first PSN that it will send, if `flags` has SOFT_HELLO_SENDS
 *       28  u32  flags
 *       32  u32  mtu               path MTU, enum ibv_mtu; must be the same on both sides
 *       36  12 zeros
 *
 * The PSNs are random numbers that the two applications have exchanged by their own means. A
 * process that connects without knowing them is not the peer.
 */
#pragma once

#include <endian.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum {
	SOFT_FRAME_HEADER = 40,
	SOFT_FRAME_MAX = 64 * 1024, /* maximum payload */
	SOFT_CMA_FRAME_MAX = 1024 * 1024, /* maximum payload of a frame with a descriptor */
	SOFT_CMA_PIECES = 16,             /* maximum pieces in a descriptor */
	SOFT_CMA_DESC_HEAD = 8,           /* slot and generation */
	SOFT_CMA_DESC_PIECE = 16,
	SOFT_HANDSHAKE_SIZE = 48,
	SOFT_WIRE_VERSION = 3, /* version of this wire format, not of the CM protocol */
	SOFT_PSN_MASK = 0xffffff,
	SOFT_PSN_HALF = 1 << 23, /* half of the PSN circle (IBTA 9.7.4.1.2) */
	SOFT_MAX_MESSAGE = 1 << 30, /* half the maximum in flight at the smallest MTU */
	SOFT_ATOMIC_ARGUMENTS = 16, /* payload of an atomic request: compare or add, swap */
	SOFT_ATOMIC_RESULT = 8,     /* payload of an atomic response: old value */
	SOFT_ATOMIC_WORD = 8,       /* payload of an atomic write */
};

enum soft_opcode {
	/* requests */
	SOFT_SEND = 1,
	SOFT_WRITE,
	SOFT_READ,
	SOFT_COMPARE_SWAP,
	SOFT_FETCH_ADD,
	SOFT_ATOMIC_WRITE,
	SOFT_FLUSH,
	/* responses */
	SOFT_ACK = 16,
	SOFT_NAK,
	SOFT_RNR_NAK,
	SOFT_READ_DATA,
	SOFT_ATOMIC_DATA,
	/* control frames of the stream */
	SOFT_DISCONNECT = 32,
	SOFT_LOSES,
};

enum soft_frame_flag {
	SOFT_FRAME_IMMEDIATE = 1 << 0,
	SOFT_FRAME_SOLICITED = 1 << 1,
	SOFT_FRAME_ACK = 1 << 2,
	SOFT_FRAME_INVALIDATE = 1 << 3, /* SEND: `rkey` is the key of a window to invalidate */
	SOFT_FRAME_SRQ = 1 << 4, /* XRC requests: `ack` is the number of a shared receive queue */
	/* A frame without CONTINUES and MORE is an ONLY packet. IMMEDIATE and INVALIDATE are set on
	 * the last frame of a message. */
	SOFT_FRAME_CONTINUES = 1 << 5, /* not the first frame of its message: MIDDLE or LAST */
	SOFT_FRAME_MORE = 1 << 6, /* not the last frame: FIRST or MIDDLE */
};

/* Syndromes of NAKs (IBTA vol 1, 9.7.5.2.2, table 46). */
enum soft_nak {
	SOFT_NAK_SEQUENCE = 0,
	SOFT_NAK_INVALID_REQUEST = 1,
	SOFT_NAK_REMOTE_ACCESS = 2,
	SOFT_NAK_REMOTE_OPERATION = 3,
	/* not in the specification: the responder cannot access the requester's memory (CMA); a
	 * hardware requester would detect this error itself */
	SOFT_NAK_REQUESTERS_MEMORY = 31,
};

/* `syndrome` of a DISCONNECT: the first PSN of the sender differs from the PSN that the receiver
 * expects. `psn` contains the sender's PSN. Only the trace uses this. */
enum { SOFT_LEFT_PSN = 1 };

/* Layout of the `syndrome` of a FLUSH. */
enum { SOFT_FLUSH_TYPES = 0xf, SOFT_FLUSH_LEVEL_SHIFT = 4 };

struct soft_frame {
	uint8_t opcode;
	uint8_t flags;
	uint8_t syndrome;
	uint8_t pieces;
	uint32_t length;
	uint32_t psn;
	uint32_t ack;
	uint64_t address;
	uint32_t rkey;
	uint32_t immediate; /* network byte order */
	uint32_t dma_length;
	uint32_t msn;
	uint32_t skip; /* not sent: leading bytes that have already been received */
};

enum soft_hello_kind {
	SOFT_HELLO = 1,
	SOFT_HELLO_ACK,
	SOFT_HELLO_STREAM, /* handshake of a path (path/tcp/path.c); all other fields are 0 */
};
enum soft_hello_flag {
	SOFT_HELLO_SENDS = 1 << 0,
	SOFT_HELLO_UNRELIABLE = 1 << 1, /* the sender is a UC queue pair */
	SOFT_HELLO_XRC_SEND = 1 << 2, /* the sender is an XRC_SEND queue pair */
	SOFT_HELLO_XRC_RECV = 1 << 3,
	SOFT_HELLO_TYPES = SOFT_HELLO_UNRELIABLE | SOFT_HELLO_XRC_SEND | SOFT_HELLO_XRC_RECV,
};

/* A handshake message of a link. */
struct soft_hello {
	uint16_t kind;
	uint32_t from;
	uint32_t to;
	uint32_t receive_psn;
	uint32_t send_psn;
	uint32_t flags;
	uint32_t mtu;
};

/* Returns whether the response to the request contains data. */
static inline bool soft_is_read(uint8_t opcode)
{
	return opcode == SOFT_READ || opcode == SOFT_COMPARE_SWAP || opcode == SOFT_FETCH_ADD;
}

/* Returns whether the request is answered in the same format as a zero-length READ
 * (IBTA annex A19). */
static inline bool soft_is_empty_read(uint8_t opcode)
{
	return opcode == SOFT_FLUSH || opcode == SOFT_ATOMIC_WRITE;
}

/* Returns whether the request counts toward max_rd_atomic. */
static inline bool soft_is_counted(uint8_t opcode)
{
	return soft_is_read(opcode) || soft_is_empty_read(opcode);
}

static inline bool soft_is_request(const struct soft_frame *frame)
{
	return frame->opcode < SOFT_ACK;
}

static inline bool soft_is_first(const struct soft_frame *frame)
{
	return !(frame->flags & SOFT_FRAME_CONTINUES);
}

static inline bool soft_is_last(const struct soft_frame *frame)
{
	return !(frame->flags & SOFT_FRAME_MORE);
}

static inline void soft_put32(uint8_t *at, uint32_t value)
{
	value = htole32(value);
	memcpy(at, &value, sizeof(value));
}

static inline void soft_put64(uint8_t *at, uint64_t value)
{
	value = htole64(value);
	memcpy(at, &value, sizeof(value));
}

static inline uint32_t soft_get32(const uint8_t *at)
{
	uint32_t value;

	memcpy(&value, at, sizeof(value));
	return le32toh(value);
}

static inline uint64_t soft_get64(const uint8_t *at)
{
	uint64_t value;

	memcpy(&value, at, sizeof(value));
	return le64toh(value);
}

static inline void soft_frame_encode(uint8_t *at, const struct soft_frame *frame)
{
	at[0] = frame->opcode;
	at[1] = frame->flags;
	at[2] = frame->syndrome;
	at[3] = frame->pieces;
	soft_put32(at + 4, frame->length);
	soft_put32(at + 8, frame->psn);
	soft_put32(at + 12, frame->ack);
	soft_put64(at + 16, frame->address);
	soft_put32(at + 24, frame->rkey);
	memcpy(at + 28, &frame->immediate, sizeof(frame->immediate));
	soft_put32(at + 32, frame->dma_length);
	soft_put32(at + 36, frame->msn);
}

/* Decode a frame header. Returns false if a field has a value that is invalid for every opcode. */
static inline bool soft_frame_decode(const uint8_t *at, struct soft_frame *frame)
{
	frame->opcode = at[0];
	frame->flags = at[1];
	frame->syndrome = at[2];
	frame->pieces = at[3];
	frame->length = soft_get32(at + 4);
	frame->psn = soft_get32(at + 8);
	frame->ack = soft_get32(at + 12);
	frame->address = soft_get64(at + 16);
	frame->rkey = soft_get32(at + 24);
	memcpy(&frame->immediate, at + 28, sizeof(frame->immediate));
	frame->dma_length = soft_get32(at + 32);
	frame->msn = soft_get32(at + 36);
	frame->skip = 0;
	return frame->length <= (frame->pieces ? SOFT_CMA_FRAME_MAX : SOFT_FRAME_MAX) &&
	       frame->pieces <= SOFT_CMA_PIECES && (!frame->pieces || frame->length) &&
	       frame->psn <= SOFT_PSN_MASK && frame->ack <= SOFT_PSN_MASK &&
	       frame->msn <= SOFT_PSN_MASK && frame->dma_length <= SOFT_MAX_MESSAGE;
}

/* Returns the number of bytes that follow the header. */
static inline uint32_t soft_frame_body_size(const struct soft_frame *frame)
{
	return frame->pieces ? SOFT_CMA_DESC_HEAD + frame->pieces * (uint32_t)SOFT_CMA_DESC_PIECE
			     : frame->length;
}

/* Returns the version of a handshake, even if it is not supported. Returns 0 if the bytes are not a
 * handshake. */
uint32_t soft_hello_version(const uint8_t *at);
void soft_hello_encode(uint8_t *at, const struct soft_hello *hello);
bool soft_hello_decode(const uint8_t *at, struct soft_hello *hello);
