/* The connection manager's messages, and their bytes on a stream and in datagrams.
 *
 * The names and the order are those of the InfiniBand communication management protocol
 * (IBTA vol 1, 12.6, 12.9, 12.11), the content is what a queue pair needs to come up.  Every message
 * has a fixed size, given by its type, so that its end is known before what follows it.  Everything
 * is little-endian.
 *
 *   header    8   magic "ARCM", version, type, u16 length of the body
 *   REQ      82   qpn u32, psn u32, port space u16, qp type, responder resources, initiator depth,
 *                 flags, retry count, rnr retry count, ECE, port u16, private data [56]
 *   MRA       0   "received, the application has yet to answer" (IBTA 12.6.6)
 *   REP     220   qpn u32, psn u32, responder resources, initiator depth, flags, rnr retry count,
 *                 ECE, port u16, port of paths u16, private data [196]
 *   RTU       0
 *   REJ     152   reason u16, zero u16, private data [148]
 *   DREQ      0   where the carrier stays with the id; a stream ends instead
 *   DREP      0
 *   SIDR_REQ 188  number u64, private data [180]
 *   WAIT      8   number u64: says what MRA says, which InfiniBand does not have here
 *   SIDR_REP 156  number u64, qpn u32, Q_Key u32, u16 not used, status, zero, private data [136]
 *   ECE           vendor u32, options u32 (IBTA 12.6.5, 12.6.8: vendor ID, enhanced connection bits)
 *   port          of the sender, which can use shared memory; 0: it cannot
 *   port of paths of the sender, in any case: a stream from here to there may be there already
 *
 * Service ID resolution (SIDR_REQ, WAIT, SIDR_REP) asks for the queue pair behind a port of
 * RDMA_PS_UDP.  The number is random: only a process that has seen the request can answer it.
 *
 * Pure functions: no socket, no allocation, no clock.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In an exchange each side says each type once, in this order. */
enum soft_cm_type {
	SOFT_CM_REQ = 1,
	SOFT_CM_MRA,
	SOFT_CM_REP,
	SOFT_CM_RTU,
	SOFT_CM_REJ,
	SOFT_CM_DREQ,
	SOFT_CM_DREP,
	SOFT_SIDR_REQ,
	SOFT_SIDR_WAIT,
	SOFT_SIDR_REP
};

/* Room for the application's private data: rdma_connect(3), rdma_accept(3); REJ: IBTA 12.6.7. */
enum {
	SOFT_CM_VERSION = 5, /* counts the versions of the stream that follows, too: frame.h */
	SOFT_CM_HEADER = 8,
	SOFT_CM_REQ_PRIVATE = 56,
	SOFT_CM_REP_PRIVATE = 196,
	SOFT_CM_REJ_PRIVATE = 148,
	SOFT_SIDR_REQ_PRIVATE = 180,
	SOFT_SIDR_REP_PRIVATE = 136,
	SOFT_CM_PRIVATE_MAX = SOFT_CM_REP_PRIVATE,
	SOFT_CM_MESSAGE_MAX = SOFT_CM_HEADER + 220
};

/* Rejection reasons, IBTA vol 1, 12.6.7.2. */
enum soft_cm_reason {
	SOFT_CM_REASON_NO_RESOURCES = 3,
	SOFT_CM_REASON_TIMEOUT = 4,
	SOFT_CM_REASON_INVALID_ID = 6,
	SOFT_CM_REASON_INVALID_SERVICE_ID = 8,
	SOFT_CM_REASON_INVALID_TRANSPORT = 9,
	SOFT_CM_REASON_STALE = 10,
	SOFT_CM_REASON_INVALID_MTU = 26,
	SOFT_CM_REASON_CONSUMER = 28,
	SOFT_CM_REASON_INVALID_VERSION = 31,
	SOFT_CM_REASON_VENDOR_OPTION = 35
};

/* Of SIDR_REP, IBTA vol 1, 12.11.2. */
enum soft_sidr_status {
	SOFT_SIDR_VALID = 0,
	SOFT_SIDR_NO_SERVICE = 1,
	SOFT_SIDR_REJECTED = 2,
	SOFT_SIDR_STATUS_MAX = 5
};

/* Options of vendors; vendor 0: none. */
struct soft_cm_ece {
	uint32_t vendor_id;
	uint32_t options;
};

/* One message, decoded.  Fields that a type does not carry are zero.  private_data_len is the
 * number of bytes to send when encoding, and the room of the type when decoded: what arrives is
 * padded with zeros to that size, as on InfiniBand (rdma_get_cm_event(3)). */
struct soft_cm_message {
	enum soft_cm_type type;
	uint32_t qpn; /* 24 bits */
	uint32_t psn; /* 24 bits: the first one that the sender of the message expects */
	uint16_t port_space;
	uint8_t qp_type;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t flow_control; /* 0 or 1 */
	uint8_t srq; /* 0 or 1 */
	uint8_t retry_count; /* 3 bits */
	uint8_t rnr_retry_count; /* 3 bits */
	uint8_t path_mtu; /* enum ibv_mtu; 0: the carrier does not say it */
	uint8_t service_timeout; /* MRA: nothing is repeated for 4.096 us * 2^n, where the carrier says it */
	uint8_t traffic_class; /* 0: none, or the carrier does not say it */
	uint16_t reason;
	uint16_t shm_port;
	uint16_t path_port;
	struct soft_cm_ece ece;
	uint64_t number; /* of a question */
	uint32_t qkey;
	uint8_t status;
	uint8_t private_data_len;
	uint8_t private_data[SOFT_CM_PRIVATE_MAX];
};

/* The room for private data of a message type. */
uint8_t soft_cm_private_room(enum soft_cm_type type);

/* What the application says, if anything, into the message.  False: there is no room for it. */
bool soft_cm_put_private(struct soft_cm_message *message, const void *data, uint8_t length);

/* Writes the message's bytes; returns how many.  The caller has checked the private data's length
 * against soft_cm_private_room and the 24- and 3-bit fields. */
size_t soft_cm_encode(const struct soft_cm_message *message, uint8_t out[SOFT_CM_MESSAGE_MAX]);

/* Reads the message at the front of bytes[0 .. length). 0: complete, *used bytes of it.  EAGAIN:
 * right so far, more bytes are needed.  EPROTONOSUPPORT: our magic, another version.  EPROTO: not
 * this protocol.  A wrong byte is found as soon as it is there: the receiver does not wait for the
 * rest of an invalid message. */
int soft_cm_decode(const uint8_t *bytes, size_t length, struct soft_cm_message *message,
		   size_t *used);
