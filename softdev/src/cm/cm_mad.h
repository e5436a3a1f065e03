/* Encodes connection manager messages as management datagrams (MADs), which are sent to queue pair
 * 1 of another host (IBTA vol 1, 12.6, 12.11, 13.4). IBTA annex A11 defines the rdma_cm header.
 *
 * A MAD is 256 bytes long and consists of the MAD header, the message's fields, and private data.
 * All numbers are big-endian. In REQ and SIDR_REQ, the first 36 bytes of the private data are the
 * rdma_cm header with addresses and ports.
 *
 * All functions are pure. They do not use sockets, allocate memory or read a clock.
 */
#pragma once

#include "cm_message.h"

enum { SOFT_MAD_SIZE = 256, SOFT_MAD_HEADER = 24 };

/* A decoded MAD, which contains the message and other fields that the connection manager needs.
 * Fields that the message type does not have are zero. */
struct soft_cm_mad {
	struct soft_cm_message message;
	uint64_t transaction; /* transaction ID */
	uint64_t guid; /* GUID of the sender's device */
	/* Communication IDs of the sender and the receiver. The request ID of SIDR is stored in
	 * local_id for SIDR_REQ, and in remote_id for SIDR_REP. */
	uint32_t local_id, remote_id;
	uint32_t peer_qpn; /* DREQ: the receiver's queue pair */
	uint32_t service_prefix; /* upper 32 bits of the service ID; 0 for rdma_cm */
	uint16_t service_port; /* lower 16 bits of the service ID, after the port space */
	uint16_t source_port;
	uint8_t responds_to; /* MRA, REJ: enum soft_cm_responds_to */
	uint8_t guid_length; /* REJ: 8, or 0 without a GUID */
	uint8_t source[16], destination[16]; /* REQ, SIDR_REQ: GIDs */
};

/* The message to which MRA or REJ responds (IBTA 12.6.6, 12.6.7). */
enum soft_cm_responds_to {
	SOFT_CM_RESPONDS_TO_REQ,
	SOFT_CM_RESPONDS_TO_REP,
	SOFT_CM_RESPONDS_TO_OTHER
};

/* Encode a MAD. The caller must have checked the length of the private data. */
void soft_cm_mad_encode(const struct soft_cm_mad *mad, uint8_t out[SOFT_MAD_SIZE]);
/* Decode a MAD. Returns false if the data is not a valid connection manager message. */
bool soft_cm_mad_decode(const uint8_t *bytes, size_t length, struct soft_cm_mad *mad);

/* ---- carriers that know both ends: TCP streams, datagrams between two sockets ------------- */

/* Version of the protocol over TCP and plain UDP, including the data that follows the messages on a
 * TCP stream. The version and the sender's ports are encoded in the GUID field, because carriers
 * over TCP and plain UDP do not need a GUID. */
enum { SOFT_CM_VERSION = 6 };

void soft_cm_encode(const struct soft_cm_message *message, uint8_t out[SOFT_MAD_SIZE]);
/* Decode the message at the start of `bytes`. Returns 0, or EAGAIN if the message is incomplete.
 * Returns EPROTONOSUPPORT if the message has another version. Returns EPROTO if the data is not a
 * message of this protocol, which the first bytes are enough to detect. */
int soft_cm_decode(const uint8_t *bytes, size_t length, struct soft_cm_message *message);
