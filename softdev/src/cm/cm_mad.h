/* Encoding of the connection manager's messages as management datagrams (MADs), which are sent to
 * queue pair 1 of another host (IBTA vol 1, 12.6, 12.11, 13.4; annex A11 for the header in private
 * data).
 *
 * A MAD has 256 bytes: a header, the fields of the message, and private data. All numbers are
 * big-endian. In REQ and SIDR_REQ, rdma_cm's header with addresses and ports takes 36 bytes of the
 * private data.
 *
 * These are pure functions. They use no socket, no allocation and no clock.
 */
#pragma once

#include "cm_message.h"

enum { SOFT_MAD_SIZE = 256, SOFT_MAD_HEADER = 24 };

/* A decoded MAD: the message and other data that the connection manager needs. Fields that a type
 * does not carry are zero. */
struct soft_cm_mad {
	struct soft_cm_message message;
	uint64_t transaction; /* ID */
	uint64_t guid; /* of the sender's device */
	/* Communication IDs of the sender and the receiver. SIDR uses them for the request ID. */
	uint32_t local_id, remote_id;
	uint32_t peer_qpn; /* DREQ: the receiver's queue pair */
	uint32_t service_prefix; /* upper 32 bits of the service ID; 0 for rdma_cm */
	uint16_t service_port; /* lower 16 bits of the service ID, after the port space */
	uint16_t source_port;
	uint8_t answered; /* MRA, REJ: enum soft_cm_answered */
	uint8_t guid_length; /* REJ: 8, or 0 without a GUID */
	uint8_t source[16], destination[16]; /* REQ, SIDR_REQ: GIDs */
};

/* The message to which MRA or REJ responds (IBTA 12.6.6, 12.6.7). */
enum soft_cm_answered { SOFT_CM_ANSWERS_REQ, SOFT_CM_ANSWERS_REP, SOFT_CM_ANSWERS_OTHER };

/* Encode a MAD. The caller must have checked the length of the private data. */
void soft_cm_mad_encode(const struct soft_cm_mad *mad, uint8_t out[SOFT_MAD_SIZE]);
/* Decode a MAD. Returns false if it is not a MAD of this protocol. */
bool soft_cm_mad_decode(const uint8_t *bytes, size_t length, struct soft_cm_mad *mad);

/* ---- carriers that know both ends: TCP streams, datagrams between two sockets ------------- */

/* The version of these messages and of the data that follows on the stream. A side sends its
 * version and its ports in place of its device's GUID, which these carriers do not need. */
enum { SOFT_CM_VERSION = 6 };

void soft_cm_encode(const struct soft_cm_message *message, uint8_t out[SOFT_MAD_SIZE]);
/* Decode the message at the start of bytes[0 .. length). Returns 0, or EAGAIN if the message is
 * valid so far but incomplete. Returns EPROTONOSUPPORT for another version, and EPROTO for another
 * protocol, which the first bytes reveal. */
int soft_cm_decode(const uint8_t *bytes, size_t length, struct soft_cm_message *message);
