/* Destinations of datagrams: address handles and datagram headers. */
#pragma once

#include <netinet/in.h>

#include "device.h"

/* Returns the port in host byte order. IPv4 and IPv6 addresses store the port at the same
 * offset. */
static inline uint16_t soft_address_port(const struct sockaddr_storage *address)
{
	return ntohs(((const struct sockaddr_in *)(const void *)address)->sin_port);
}

/* ---- where a queue pair is: its number, beside the GID (qp_numbers.c) ----------------------- */

enum {
	SOFT_QPN_MASK = 0xffffff,
	SOFT_QPN_LOCAL_BITS = 14,
	/* Ports of TCP and UDP links, below the ephemeral range. The same numbers appear in the
	 * names of the Unix sockets through which processes attach to shared memory. */
	SOFT_IP_PORT_FIRST = 14792,
	SOFT_IP_PORTS = 1000, /* below 1024, because queue pair number 0xffffff means multicast */
};

/* Returns the IP port of the process that owns the queue pair, on the host that the queue pair's
 * GID identifies. */
static inline uint16_t soft_qpn_ip_port(uint32_t qp_num)
{
	return (uint16_t)(SOFT_IP_PORT_FIRST + ((qp_num & SOFT_QPN_MASK) >> SOFT_QPN_LOCAL_BITS));
}

/* ---- datagrams ----------------------------------------------------------------------------- */

enum {
	SOFT_DATAGRAM_MAX = 4096, /* maximum message length; equals the port's MTU (IBTA 9.8.3) */
	SOFT_GRH = 40, /* bytes reserved at the start of a receive buffer */
	SOFT_TRAFFIC_FLOW = (1 << 28) - 1, /* mask of the traffic class and the flow label */
	SOFT_CLASS_SHIFT = 20,
};

enum soft_datagram_flag {
	SOFT_DATAGRAM_IMMEDIATE = 1 << 0,
	SOFT_DATAGRAM_SOLICITED = 1 << 1,
};

struct soft_datagram {
	union ibv_gid source;
	union ibv_gid destination;
	uint32_t dest_qpn;
	uint32_t src_qpn;
	uint32_t qkey;
	uint32_t immediate; /* network byte order */
	uint32_t psn; /* used by RoCE packets only */
	uint32_t traffic_flow; /* traffic class << SOFT_CLASS_SHIFT | flow label */
	uint8_t flags;
	uint8_t hop_limit;
};

/* Returns whether the datagram has an IPv4 header. An IPv4 sender uses an IPv6 header for an IPv6
 * multicast group. */
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

/* Get the GID table entry that an address vector selects as its source. Returns 0, or an errno
 * value if the address vector is invalid or has no route. */
int soft_ah_get_source(struct soft_hca *hca, const struct ibv_ah_attr *attr, struct soft_gid *own);

/* Returns the ones' complement sum of the 16-bit words of an IPv4 header without options. The sum
 * is 0xffff if the checksum is correct. */
uint16_t soft_ipv4_sum(const uint8_t *header);

static inline struct soft_ah *soft_ah_of(struct ibv_ah *ah)
{
	return soft_container(ah, struct soft_ah, ibv);
}
