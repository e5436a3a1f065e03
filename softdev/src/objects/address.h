/* Where datagrams go: address handles, and what a datagram says. */
#pragma once

#include <netinet/in.h>

#include "device.h"

/* In host order; at the same place in both families. */
static inline uint16_t soft_address_port(const struct sockaddr_storage *address)
{
	return ntohs(((const struct sockaddr_in *)(const void *)address)->sin_port);
}

/* ---- where a queue pair is: its number, beside the GID (qp_numbers.c) ----------------------- */

enum {
	SOFT_QPN_MASK = 0xffffff,
	SOFT_QPN_LOCAL_BITS = 14,
	/* Of TCP and UDP, and in the names that shared memory is attached at.  Below those that
	 * systems choose by themselves. */
	SOFT_IP_PORT_FIRST = 14792,
	SOFT_IP_PORTS = 1000, /* the highest numbers are no process's: all ones is multicast */
};

/* The port of the process that has it, at the host of its GID. */
static inline uint16_t soft_qpn_ip_port(uint32_t qp_num)
{
	return (uint16_t)(SOFT_IP_PORT_FIRST + ((qp_num & SOFT_QPN_MASK) >> SOFT_QPN_LOCAL_BITS));
}

/* ---- datagrams ----------------------------------------------------------------------------- */

enum {
	SOFT_DATAGRAM_MAX = 4096, /* of the message: the port's MTU (IBTA 9.8.3) */
	SOFT_GRH = 40, /* what a receive begins with */
	SOFT_TRAFFIC_FLOW = (1 << 28) - 1, /* the traffic class, and the flow label below it */
	SOFT_CLASS_SHIFT = 20,
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
	uint32_t psn; /* of packets alone */
	uint32_t traffic_flow; /* class << SOFT_CLASS_SHIFT | label */
	uint8_t flags;
	uint8_t hop_limit;
};

/* Does it travel with an IPv4 header?  To a group of IPv6 a sender of IPv4 does not. */
bool soft_datagram_is_ipv4(const struct soft_datagram *datagram);

/* Where a UD message goes: what an address handle stands for (ah.c). */
struct soft_ud_address {
	union ibv_gid source;
	union ibv_gid destination;
	uint32_t traffic_flow;
	uint32_t ifindex; /* of the source GID */
	uint8_t hop_limit;
};

/* ---- ah.c: address handles ----------------------------------------------------------------- */

struct soft_ah {
	struct ibv_ah ibv;
	struct soft_ud_address path;
};

/* The entry of the GID table that an address vector is from; 0, or an errno value: why it leads nowhere. */
int soft_ah_source(struct soft_hca *hca, const struct ibv_ah_attr *attr, struct soft_gid *own);

/* The sum of the 16-bit words of an IPv4 header without options: all ones if its checksum is right. */
uint16_t soft_ipv4_sum(const uint8_t *header);

static inline struct soft_ah *soft_ah_of(struct ibv_ah *ah)
{
	return soft_container(ah, struct soft_ah, ibv);
}
