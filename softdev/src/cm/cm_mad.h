/* The connection manager's messages as management datagrams (MADs): what goes to queue pair 1 of another
 * host (IBTA vol 1, 12.6, 12.11, 13.4; the header in private data: annex A11).
 *
 * A MAD has 256 bytes: a header, the fields of the message, private data.  Everything is big-endian.  Of
 * the private data of REQ and SIDR_REQ, rdma_cm's header takes 36 bytes: addresses and ports.
 *
 * Pure functions: no socket, no allocation, no clock.
 */
#pragma once

#include "cm_message.h"

enum { SOFT_MAD_SIZE = 256, SOFT_MAD_HEADER = 24 };

/* One MAD, decoded: the message, and what the connection manager needs besides.  Fields that a type does
 * not carry are zero. */
struct soft_cm_mad {
	struct soft_cm_message message;
	uint64_t transaction; /* ID */
	uint64_t guid; /* of the sender's device */
	/* Communication IDs of the sender and the receiver; of SIDR, the request's ID. */
	uint32_t local_id, remote_id;
	uint32_t peer_qpn; /* DREQ: the receiver's queue pair */
	uint32_t service_prefix; /* the service ID: 0 for those of rdma_cm, */
	uint16_t service_port; /* and then the port space of the message, and this */
	uint16_t source_port;
	uint8_t answered; /* MRA, REJ: enum soft_cm_answered */
	uint8_t guid_length; /* REJ: 8, or no GUID is said */
	uint8_t source[16], destination[16]; /* REQ, SIDR_REQ: GIDs */
};

/* Which message MRA and REJ answer (IBTA 12.6.6, 12.6.7). */
enum soft_cm_answered { SOFT_CM_ANSWERS_REQ, SOFT_CM_ANSWERS_REP, SOFT_CM_ANSWERS_OTHER };

/* The caller has checked the private data's length. */
void soft_cm_mad_encode(const struct soft_cm_mad *mad, uint8_t out[SOFT_MAD_SIZE]);
/* False: not a MAD of this protocol. */
bool soft_cm_mad_decode(const uint8_t *bytes, size_t length, struct soft_cm_mad *mad);

/* ---- where a carrier knows both ends: a TCP stream, a datagram between two sockets ------------ */

/* Of what follows on the stream, and of these messages: a side says its own, and its ports, in place of the
 * GUID of its device, which such a carrier needs not. */
enum { SOFT_CM_VERSION = 6 };

void soft_cm_encode(const struct soft_cm_message *message, uint8_t out[SOFT_MAD_SIZE]);
/* Reads the message at the front of bytes[0 .. length). 0; EAGAIN: right so far, more bytes are needed.
 * EPROTONOSUPPORT: another version.  EPROTO: not this protocol, which shows with its first bytes. */
int soft_cm_decode(const uint8_t *bytes, size_t length, struct soft_cm_message *message);
