/* The invariant CRC of a RoCE v2 packet (IBTA vol 1, 7.8.1, and annex A17): Ethernet's CRC-32 over what no
 * router changes.  A packet carries it behind its payload and pad, least significant byte first.
 *
 * It covers the IP header too, which a datagram socket does not show.  All of it is known (addresses,
 * lengths, DF) or left out (class, flow label, hop limit, checksum), but for the 16 bits of IPv4's
 * identification, which a receiver has to solve for: that leaves 16 bits of the check.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The headers below the BTH of the packets from one address and port to another, as the ICRC sees them:
 * eight ones for the LRH, IP, UDP; with length and identification zero. */
struct soft_icrc_flow {
	uint8_t bytes[8 + 40 + 8];
	uint8_t length;
	bool ipv4;
};

/* Addresses as GIDs: an IPv4 one is mapped into IPv6. Ports in host order. */
void soft_icrc_flow(struct soft_icrc_flow *flow, const uint8_t source[16],
		    const uint8_t destination[16], uint16_t source_port, uint16_t destination_port);

/* Of a packet whose bytes from BTH to pad are these pieces; the first one holds the whole BTH.
 * `identification` is of IPv4: 0 for what a socket sends with DF, 0, 1, 2... for the segments of one send. */
uint32_t soft_icrc(const struct soft_icrc_flow *flow, uint16_t identification,
		   const struct iovec *pieces, int count);

/* Can these bytes, from BTH to ICRC, be such a packet?  With IPv4: with any identification. */
bool soft_icrc_check(const struct soft_icrc_flow *flow, const uint8_t *bytes, size_t length);
