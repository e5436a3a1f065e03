/* Connection manager messages. The names and their order follow the InfiniBand communication
 * management protocol (IBTA vol 1, 12.6, 12.9, 12.11). See cm_mad.h for the encoding. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Message types. Within an exchange, each side sends its messages in strictly ascending order of
 * type. Only retransmissions repeat an earlier type. */
enum soft_cm_type {
	SOFT_CM_REQ = 1,
	SOFT_CM_MRA,
	SOFT_CM_REP,
	SOFT_CM_RTU,
	SOFT_CM_REJ,
	SOFT_CM_DREQ,
	SOFT_CM_DREP,
	SOFT_SIDR_REQ,
	SOFT_SIDR_REP
};

/* Maximum sizes of the application's private data (rdma_connect(3), rdma_accept(3); for REJ see
 * IBTA 12.6.7). */
enum {
	SOFT_CM_REQ_PRIVATE = 56,
	SOFT_CM_REP_PRIVATE = 196,
	SOFT_CM_REJ_PRIVATE = 148,
	SOFT_SIDR_REQ_PRIVATE = 180,
	SOFT_SIDR_REP_PRIVATE = 136,
	SOFT_CM_PRIVATE_MAX = SOFT_CM_REP_PRIVATE
};

/* Rejection reasons (IBTA vol 1, 12.6.7.2). */
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

/* Status of SIDR_REP (IBTA vol 1, 12.11.2). */
enum soft_sidr_status { SOFT_SIDR_VALID = 0, SOFT_SIDR_NO_SERVICE = 1, SOFT_SIDR_REJECTED = 2 };

/* Vendor options for enhanced connection establishment. vendor_id is 0 if no options are set. */
struct soft_cm_ece {
	uint32_t vendor_id;
	uint32_t options;
};

/* A decoded message. Fields that the message type does not have are zero. Before encoding,
 * private_data_len is the number of bytes to send. After decoding, it is the maximum size for
 * the type, because the sender pads private data with zeros, as on InfiniBand
 * (rdma_get_cm_event(3)). */
struct soft_cm_message {
	enum soft_cm_type type;
	uint32_t qpn; /* 24 bits */
	uint32_t psn; /* 24 bits; first PSN that the sender expects */
	uint16_t port_space;
	uint8_t qp_type;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t flow_control; /* 0 or 1 */
	uint8_t srq; /* 0 or 1 */
	uint8_t retry_count; /* 3 bits */
	uint8_t rnr_retry_count; /* 3 bits */
	uint8_t path_mtu; /* enum ibv_mtu; 0 for a stream */
	uint8_t service_timeout; /* MRA: pause before a retransmission, 4.096 us * 2^n */
	uint8_t traffic_class; /* 0 if none */
	uint16_t reason;
	/* Ports of the sender, sent only over TCP. shm_port is the port for shared memory, or 0 if
	 * shared memory cannot be used. path_port identifies the sender's process, because a TCP
	 * path to that process may already exist. */
	uint16_t shm_port, path_port;
	struct soft_cm_ece ece;
	/* A random number that identifies a SIDR_REQ sent over plain UDP (not over RoCE). A process
	 * that has not seen the request cannot forge a response. */
	uint64_t number;
	uint32_t qkey;
	uint8_t status;
	uint8_t private_data_len;
	uint8_t private_data[SOFT_CM_PRIVATE_MAX];
};

/* Returns the maximum size of a message type's private data. */
uint8_t soft_cm_max_private_data(enum soft_cm_type type);

/* Copy the application's private data, if any, into the message. Returns false if it is too
 * long. */
bool soft_cm_put_private(struct soft_cm_message *message, const void *data, uint8_t length);
