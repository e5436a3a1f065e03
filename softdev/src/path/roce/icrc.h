/* The invariant CRC of a RoCE v2 packet (IBTA vol 1, 7.8.1, and annex A17): Ethernet's CRC-32 over
 * everything that routers do not change. It follows the payload and padding, least significant byte
 * first.
 *
 * The CRC also covers the IP header, which a datagram socket does not return. All of it is known
 * (addresses, lengths, DF) or excluded (class, flow label, hop limit, checksum), except for the 16
 * bits of the IPv4 identification. A receiver has to solve for these, which leaves 16 bits of the
 * check.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The headers below the BTH, as the ICRC covers them, of packets from one address and port to
 * another: eight bytes of ones for the LRH, then IP and UDP, with length and identification
 * zero. */
struct soft_icrc_flow {
	uint8_t bytes[8 + 40 + 8];
	uint8_t length;
	bool ipv4;
};

/* Initialize a flow. Addresses are GIDs (IPv4 as IPv4-mapped IPv6). Ports are in host byte
 * order. */
void soft_icrc_flow(struct soft_icrc_flow *flow, const uint8_t source[16],
		    const uint8_t destination[16], uint16_t source_port, uint16_t destination_port);

/* Returns the ICRC of a packet given as pieces from BTH to padding. The first piece contains the
 * whole BTH. `identification` is that of the IPv4 header: 0 for packets that a socket sends with
 * DF, and 0, 1, 2... for the segments of one send. */
uint32_t soft_icrc(const struct soft_icrc_flow *flow, uint16_t identification,
		   const struct iovec *pieces, int count);

/* Returns whether bytes from BTH to ICRC are a valid packet of the flow. With IPv4, any
 * identification is accepted. */
bool soft_icrc_check(const struct soft_icrc_flow *flow, const uint8_t *bytes, size_t length);
