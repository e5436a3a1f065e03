/* Where datagrams go: address handles, and what a datagram says. */
#ifndef AIORDMA_SOFTDEV_OBJECTS_ADDRESS_H
#define AIORDMA_SOFTDEV_OBJECTS_ADDRESS_H

#include "device.h"

/* ---- datagrams ----------------------------------------------------------------------------- */

enum {
	SOFT_DATAGRAM_MAX = 4096, /* of the message: the port's MTU (IBTA 9.8.3) */
	SOFT_GRH = 40, /* what a receive begins with */
	SOFT_TRAFFIC_FLOW = (1 << 28) - 1,
};

enum soft_datagram_flag {
	SOFT_DATAGRAM_IMMEDIATE = 1 << 0,
	SOFT_DATAGRAM_SOLICITED = 1 << 1,
};

struct soft_datagram {
	union ibv_gid source;
	union ibv_gid destination;
	uint32_t to;
	uint32_t from;
	uint32_t qkey;
	uint32_t immediate; /* network order */
	uint32_t traffic_flow; /* class << 20 | label */
	uint16_t lid; /* not in the header: of the sender's process */
	uint8_t flags;
	uint8_t sl;
	uint8_t hop_limit;
};

/* Where a UD message goes: what an address handle stands for (ah.c). */
struct soft_ud_address {
	union ibv_gid source;
	union ibv_gid destination;
	uint32_t traffic_flow;
	uint32_t ifindex; /* of the source GID */
	uint16_t lid;
	uint8_t sl;
	uint8_t hop_limit;
};

/* ---- ah.c: address handles ----------------------------------------------------------------- */

struct soft_ah {
	struct ibv_ah ibv;
	struct soft_ud_address path;
};

static inline struct soft_ah *soft_ah_of(struct ibv_ah *ah)
{
	return soft_container(ah, struct soft_ah, ibv);
}

#endif
