/* Destinations of datagrams: address handles, and the contents of a datagram's header. */
#pragma once

#include <netinet/in.h>

#include "device.h"

/* Returns the port in host byte order. It has the same offset in both families. */
static inline uint16_t soft_address_port(const struct sockaddr_storage *address)
{
	return ntohs(((const struct sockaddr_in *)(const void *)address)->sin_port);
}

/* ---- where a queue pair is: its number, beside the GID (qp_numbers.c) ----------------------- */

enum {
	SOFT_QPN_MASK = 0xffffff,
	SOFT_QPN_LOCAL_BITS = 14,
	/* Ports of TCP and UDP links, also used in the names at which shared memory is attached.
	 * They are below the range of ephemeral ports. */
	SOFT_IP_PORT_FIRST = 14792,
	SOFT_IP_PORTS = 1000, /* the highest numbers stay unused: all ones means multicast */
};

/* Returns the port of the process that owns the queue pair, on the host of its GID. */
static inline uint16_t soft_qpn_ip_port(uint32_t qp_num)
{
	return (uint16_t)(SOFT_IP_PORT_FIRST + ((qp_num & SOFT_QPN_MASK) >> SOFT_QPN_LOCAL_BITS));
}

/* ---- datagrams ----------------------------------------------------------------------------- */

enum {
	SOFT_DATAGRAM_MAX = 4096, /* maximum message length: the port's MTU (IBTA 9.8.3) */
	SOFT_GRH = 40, /* bytes at the start of a receive */
	SOFT_TRAFFIC_FLOW = (1 << 28) -
		1, /* mask of the traffic class and the flow label below it */
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
	uint32_t immediate; /* network byte order */
	uint32_t psn; /* used by packets only */
	uint32_t traffic_flow; /* class << SOFT_CLASS_SHIFT | label */
	uint8_t flags;
	uint8_t hop_limit;
};

/* Returns whether the datagram has an IPv4 header. A sender with an IPv4 address does not use one
 * for an IPv6 group. */
bool soft_datagram_is_ipv4(const struct soft_datagram *datagram);

/* The destination of a UD message, as stored in an address handle (ah.c). */
struct soft_ud_address {
	union ibv_gid source;
	union ibv_gid destination;
	uint32_t traffic_flow;
	uint32_t ifindex; /* interface of the source GID */
	uint8_t hop_limit;
};

/* ---- ah.c: address handles ----------------------------------------------------------------- */

struct soft_ah {
	struct ibv_ah ibv;
	struct soft_ud_address path;
};

/* Get the GID table entry that an address vector names as its source. Returns 0, or an errno value
 * if the address vector leads nowhere. */
int soft_ah_source(struct soft_hca *hca, const struct ibv_ah_attr *attr, struct soft_gid *own);

/* Returns the sum of the 16-bit words of an IPv4 header without options: all ones if the checksum
 * is correct. */
uint16_t soft_ipv4_sum(const uint8_t *header);

static inline struct soft_ah *soft_ah_of(struct ibv_ah *ah)
{
	return soft_container(ah, struct soft_ah, ibv);
}
