/* Asking where a datagram service is: the messages and their bytes.
 *
 * Service ID resolution (IBTA vol 1, 12.11): SIDR_REQ asks for the queue pair behind a port of
 * RDMA_PS_UDP, SIDR_REP answers.  Each is one UDP datagram between the two ports; the client
 * repeats the request until there is an answer.  WAIT, which InfiniBand does not have for this,
 * says that the request has arrived and that the application has yet to answer.  Everything is
 * little-endian.
 *
 *   header  8   magic "ARCS", version, type, u16 length of the body
 *   REQ   188   number u64, private data [180]
 *   WAIT    8   number u64
 *   REP   156   number u64, qpn u32, Q_Key u32, u16 not used, status, zero, private data [136]
 *
 * The number is random: only a process that has seen the request can answer it.
 *
 * Pure functions: no socket, no allocation, no clock.
 */
#ifndef AIORDMA_SOFTDEV_CM_SIDR_WIRE_H
#define AIORDMA_SOFTDEV_CM_SIDR_WIRE_H

#include <stddef.h>
#include <stdint.h>

enum soft_sidr_type {
	SOFT_SIDR_REQ = 1,
	SOFT_SIDR_WAIT = 2,
	SOFT_SIDR_REP = 3
};

/* Room for the application's private data: rdma_connect(3), rdma_accept(3). */
enum {
	SOFT_SIDR_VERSION = 1,
	SOFT_SIDR_REQ_PRIVATE = 180,
	SOFT_SIDR_REP_PRIVATE = 136,
	SOFT_SIDR_HEADER = 8,
	SOFT_SIDR_MAX = SOFT_SIDR_HEADER + 8 + SOFT_SIDR_REQ_PRIVATE
};

/* IBTA vol 1, 12.11.2. */
enum soft_sidr_status {
	SOFT_SIDR_VALID = 0,
	SOFT_SIDR_NO_SERVICE = 1,
	SOFT_SIDR_REJECTED = 2,
	SOFT_SIDR_STATUS_MAX = 5
};

/* private_data_len: what is to be sent, or the type's room when decoded (padded with zeros). */
struct soft_sidr_message {
	enum soft_sidr_type type;
	uint64_t number;
	uint32_t qpn; /* 24 bits */
	uint32_t qkey;
	uint8_t status;
	uint8_t private_data_len;
	uint8_t private_data[SOFT_SIDR_REQ_PRIVATE];
};

/* Writes the datagram; returns its length. */
size_t soft_sidr_encode(const struct soft_sidr_message *message, uint8_t out[SOFT_SIDR_MAX]);
/* Reads one.  0, or EPROTO for what is not exactly one of these messages. */
int soft_sidr_decode(const uint8_t *bytes, size_t length, struct soft_sidr_message *message);

#endif
