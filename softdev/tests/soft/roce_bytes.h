/* RoCE v2 packets as the bytes of datagrams, for tests that act as the device's peer. */
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>

#include "path/roce/headers.h"
#include "path/roce/icrc.h"
#include "verbs_side.h"

enum {
	LONGEST = SOFT_ROCE_HEADERS_MAX + 4096 + 4 + SOFT_ROCE_PAD_MAX + SOFT_ROCE_ICRC,
	PEER_QPN = 0x123456,
	WAIT_MS = 20000,
	QUIET_MS = 100,
};

/* IPv4 addresses of the device and the peer. */
static const uint8_t device_gid[16] = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1};
static const uint8_t peer_gid[16] = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 9};

/* Encode a packet with the ICRC for source port `port`. Returns the number of bytes. */
static inline size_t build_from(uint16_t port, uint8_t *bytes, const uint8_t source[16],
				const uint8_t destination[16],
				const struct soft_roce_packet *packet)
{
	struct soft_icrc_flow flow;
	size_t length = soft_roce_encode(bytes, packet);
	uint32_t icrc;

	if (packet->length)
		memcpy(bytes + length, packet->payload, packet->length);
	length += packet->length;
	memset(bytes + length, 0, SOFT_ROCE_PAD_MAX);
	length += soft_roce_pad(packet->length);
	soft_icrc_flow_init(&flow, source, destination, port, SOFT_ROCE_PORT);
	icrc = htole32(soft_icrc(&flow, 0, &(struct iovec){bytes, length}, 1));
	memcpy(bytes + length, &icrc, sizeof(icrc));
	return length + sizeof(icrc);
}

static inline bool has_packet_within(int fd, int milliseconds)
{
	return poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, milliseconds) == 1;
}

/* Returns the traffic class of the next datagram of a socket with IP_RECVTOS. */
static inline int traffic_class_at(int fd)
{
	union {
		struct cmsghdr control;
		uint8_t bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr message = {.msg_control = &control, .msg_controllen = sizeof(control)};

	CHECK(has_packet_within(fd, WAIT_MS));
	CHECK(recvmsg(fd, &message, MSG_PEEK) >= 0);
	CHECK_EQUAL(control.control.cmsg_type, IP_TOS);
	return *CMSG_DATA(&control.control);
}

/* Receive the next packet that the device sends to the peer. The packet must be well-formed and
 * have a correct ICRC. Its payload is valid until the next call. */
static inline struct soft_roce_packet packet_at(int peer)
{
	static uint8_t bytes[LONGEST];
	struct sockaddr_in from;
	socklen_t from_length = sizeof(from);
	struct soft_roce_packet packet;
	struct soft_icrc_flow flow;

	CHECK(has_packet_within(peer, WAIT_MS));
	ssize_t length =
		recvfrom(peer, bytes, sizeof(bytes), 0, (struct sockaddr *)&from, &from_length);

	CHECK(length > 0);
	CHECK_EQUAL(soft_roce_decode(&packet, bytes, (size_t)length), SOFT_ROCE_WELL_FORMED);
	CHECK(!memcmp(&from.sin_addr, device_gid + 12, 4));
	CHECK(ntohs(from.sin_port) >= 0xc000);
	soft_icrc_flow_init(&flow, device_gid, peer_gid, ntohs(from.sin_port), SOFT_ROCE_PORT);
	CHECK(soft_icrc_check(&flow, bytes, (size_t)length));
	CHECK_EQUAL(packet.pkey, 0xffff);
	return packet;
}
