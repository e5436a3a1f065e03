/* RoCE v2 packet headers, which follow the UDP header (IBTA volume 1).
 *
 * A packet consists of a Base Transport Header (BTH), the opcode's extended headers in the order of
 * enum soft_roce_header, the payload, up to three zero bytes that pad the payload to a multiple of
 * four, and the invariant CRC (icrc.h). All numbers are big-endian. Reserved bits are sent as zeros
 * and ignored on receipt.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	SOFT_ROCE_PORT = 4791, /* UDP destination port (annex A17) */
	SOFT_ROCE_BTH = 12,
	SOFT_ROCE_ICRC = 4,
	SOFT_ROCE_HEADERS_MAX = SOFT_ROCE_BTH + 4 + 28, /* XRC atomic request */
	SOFT_ROCE_PAD_MAX = 3,
	SOFT_ROCE_CNP_PAYLOAD = 16, /* reserved, zeros (annex A17.9.3) */
};

/* The upper three bits of an opcode select the transport service, and the lower five bits the
 * operation (9.2.1, table 38). */
enum soft_roce_service {
	SOFT_ROCE_RC = 0x00,
	SOFT_ROCE_UC = 0x20,
	SOFT_ROCE_UD = 0x60,
	SOFT_ROCE_XRC = 0xa0,
	SOFT_ROCE_SERVICE = 0xe0, /* mask */
};

enum soft_roce_operation {
	SOFT_ROCE_SEND_FIRST = 0x00,
	SOFT_ROCE_SEND_MIDDLE = 0x01,
	SOFT_ROCE_SEND_LAST = 0x02,
	SOFT_ROCE_SEND_LAST_IMMEDIATE = 0x03,
	SOFT_ROCE_SEND_ONLY = 0x04,
	SOFT_ROCE_SEND_ONLY_IMMEDIATE = 0x05,
	SOFT_ROCE_WRITE_FIRST = 0x06,
	SOFT_ROCE_WRITE_MIDDLE = 0x07,
	SOFT_ROCE_WRITE_LAST = 0x08,
	SOFT_ROCE_WRITE_LAST_IMMEDIATE = 0x09,
	SOFT_ROCE_WRITE_ONLY = 0x0a,
	SOFT_ROCE_WRITE_ONLY_IMMEDIATE = 0x0b,
	SOFT_ROCE_READ_REQUEST = 0x0c,
	SOFT_ROCE_READ_RESPONSE_FIRST = 0x0d,
	SOFT_ROCE_READ_RESPONSE_MIDDLE = 0x0e,
	SOFT_ROCE_READ_RESPONSE_LAST = 0x0f,
	SOFT_ROCE_READ_RESPONSE_ONLY = 0x10,
	SOFT_ROCE_ACKNOWLEDGE = 0x11,
	SOFT_ROCE_ATOMIC_ACKNOWLEDGE = 0x12,
	SOFT_ROCE_COMPARE_SWAP = 0x13,
	SOFT_ROCE_FETCH_ADD = 0x14,
	SOFT_ROCE_SEND_LAST_INVALIDATE = 0x16,
	SOFT_ROCE_SEND_ONLY_INVALIDATE = 0x17,
	SOFT_ROCE_FLUSH = 0x1c,        /* annex A19 */
	SOFT_ROCE_ATOMIC_WRITE = 0x1d, /* annex A19 */
	SOFT_ROCE_OPERATION = 0x1f,    /* mask */
	SOFT_ROCE_CNP = 0x81, /* complete opcode including the service (annex A17.9.3) */
};

/* Extended headers, in their order after the BTH. */
enum soft_roce_header {
	SOFT_ROCE_DETH = 1 << 0,
	SOFT_ROCE_XRCETH = 1 << 1,
	SOFT_ROCE_FETH = 1 << 2,
	SOFT_ROCE_RETH = 1 << 3,
	SOFT_ROCE_ATOMICETH = 1 << 4,
	SOFT_ROCE_AETH = 1 << 5,
	SOFT_ROCE_ATOMICACKETH = 1 << 6,
	SOFT_ROCE_IMMDT = 1 << 7,
	SOFT_ROCE_IETH = 1 << 8,
};

/* A decoded packet. All numbers, including immediate data, are in host byte order. A field of an
 * extended header is valid only if the opcode includes that header. */
struct soft_roce_packet {
	uint8_t opcode;
	bool solicited;
	bool migreq;
	bool fecn;
	bool becn;
	bool ack_request;
	uint8_t syndrome; /* AETH: enum soft_roce_syndrome in bits 5-7, value in bits 0-4 */
	uint8_t flush; /* FETH: placement types in bits 0-3, selectivity level in bits 4-5 */
	uint16_t pkey;
	uint32_t dest_qpn; /* destination queue pair */
	uint32_t psn; /* 24 bits */
	uint32_t qkey; /* DETH */
	uint32_t src_qpn; /* DETH: source queue pair */
	uint32_t srq; /* XRCETH: number of the shared receive queue */
	uint32_t rkey; /* RETH, AtomicETH; IETH: key to invalidate */
	uint64_t address; /* RETH, AtomicETH */
	uint32_t dma_length; /* RETH */
	uint32_t msn; /* AETH */
	uint64_t swap_add; /* AtomicETH */
	uint64_t compare; /* AtomicETH */
	uint64_t original; /* AtomicAckETH */
	uint32_t immediate; /* ImmDt */
	uint32_t length; /* payload length without padding */
	const uint8_t *payload;
};

/* The type of an AETH, in bits 5-7 of its syndrome. Bits 0-4 contain the credit count, the RNR
 * timer code or the NAK code. */
enum soft_roce_syndrome {
	SOFT_ROCE_ACK = 0 << 5,
	SOFT_ROCE_RNR_NAK = 1 << 5,
	SOFT_ROCE_NAK = 3 << 5,
	SOFT_ROCE_SYNDROME = 7 << 5, /* mask */
	SOFT_ROCE_NO_CREDITS = 0x1f, /* ACK without end-to-end flow control; also the value mask */
};

/* Reasons to reject a packet. */
enum soft_roce_malformed {
	SOFT_ROCE_WELL_FORMED,
	SOFT_ROCE_SHORT, /* shorter than its headers and the ICRC */
	SOFT_ROCE_BAD_VERSION, /* TVer is not zero */
	SOFT_ROCE_BAD_OPCODE, /* reserved, or from an unsupported service */
	SOFT_ROCE_BAD_PAD, /* padding longer than the payload, or length not a multiple of four */
	SOFT_ROCE_BAD_PAYLOAD, /* payload length invalid for the opcode, whatever the path MTU */
	SOFT_ROCE_MALFORMED_COUNT,
};

/* Returns an opcode's extended headers as bits of enum soft_roce_header, or -1 if the opcode is
 * invalid. */
int soft_roce_headers(uint8_t opcode);

/* Returns the number of padding bytes for a payload, at most SOFT_ROCE_PAD_MAX. */
static inline uint32_t soft_roce_pad(uint32_t length)
{
	return -length & 3;
}

/* Write the BTH and the extended headers. Returns the number of bytes written. The caller appends
 * the payload, the padding and the ICRC. */
size_t soft_roce_encode(uint8_t *headers, const struct soft_roce_packet *packet);

/* Decode a UDP payload, from the BTH to the ICRC. Does not verify the ICRC. The packet's `payload`
 * points into `bytes`. */
enum soft_roce_malformed soft_roce_decode(struct soft_roce_packet *packet, const uint8_t *bytes,
					  size_t length);
