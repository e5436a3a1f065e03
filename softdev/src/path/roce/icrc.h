/* The invariant CRC of a RoCE v2 packet (IBTA vol 1, 7.8.1, and annex A17): Ethernet's CRC-32 of
 * all fields that routers do not change. It follows the payload and padding, least significant byte
 * first.
 *
 * The CRC also covers the IP header, which a datagram socket does not return. The receiver knows
 * the addresses, the lengths and DF. The traffic class, flow label, hop limit and checksum are
 * excluded. Only the 16-bit IPv4 identification is unknown. The receiver has to compute it from the
 * CRC, so only 16 bits of the CRC are left to detect errors.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The headers before the BTH in the form that the ICRC covers, for all packets between two
 * addresses and ports. They consist of eight bytes of ones in place of the LRH, the IP header and
 * the UDP header. Lengths and identification are zero. */
struct soft_icrc_flow {
	uint8_t bytes[8 + 40 + 8];
	uint8_t length;
	bool ipv4;
};

/* Initialize a flow. The addresses are GIDs, and IPv4 addresses are IPv4-mapped. The ports are in
 * host byte order. */
void soft_icrc_flow_init(struct soft_icrc_flow *flow, const uint8_t source[16],
			 const uint8_t destination[16], uint16_t source_port,
			 uint16_t destination_port);

/* Returns the ICRC of a packet. Its pieces extend from the BTH to the padding, and the first one
 * contains the whole BTH. `identification` is the IPv4 identification: 0 for packets that a socket
 * sends with DF, or 0, 1, 2... for the segments of one UDP_SEGMENT send. */
uint32_t soft_icrc(const struct soft_icrc_flow *flow, uint16_t identification,
		   const struct iovec *pieces, int count);

/* Returns whether the ICRC of a packet in this flow is correct. `bytes` extends from the BTH to the
 * ICRC. Accepts any IPv4 identification. */
bool soft_icrc_check(const struct soft_icrc_flow *flow, const uint8_t *bytes, size_t length);
