/* Support for packet-level tests of RoCE v2, which act as the peer, the network and an unrelated
 * host. */
#pragma once

#include "fault_side.h"
#include "roce_bytes.h"

enum {
	MTU = 256,
	PEER_PSN = 0xfffffe, /* wraps around soon */
};

static const uint8_t stranger_gid[16] = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 10};

struct stage {
	struct side side;
	int peer, stranger; /* sockets */
	uint32_t psn; /* PSN of the peer's next request */
};

static uint8_t payload[2 * MTU];

static inline struct sockaddr_in port_at(const uint8_t gid[16])
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(SOFT_ROCE_PORT)};

	memcpy(&address.sin_addr, gid + 12, 4);
	return address;
}

static inline int bind_udp_socket(const uint8_t gid[16])
{
	const struct sockaddr_in here = port_at(gid);
	const int discover = IP_PMTUDISC_DO, room = 1 << 20;
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	CHECK_OK(setsockopt(fd, IPPROTO_IP, IP_MTU_DISCOVER, &discover, sizeof(discover)));
	CHECK_OK(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof(room)));
	CHECK_OK(bind(fd, (const struct sockaddr *)&here, sizeof(here)));
	return fd;
}

static inline void set_option(int fd, int level, int name, int value)
{
	CHECK_OK(setsockopt(fd, level, name, &value, sizeof(value)));
}

/* Returns the peer's address as known to the device. */
static inline struct address address_of_peer(void)
{
	struct address peer = {.qpn = PEER_QPN, .psn = PEER_PSN};

	memcpy(peer.gid.raw, peer_gid, sizeof(peer_gid));
	return peer;
}

static inline void open_stage(struct stage *stage, struct options options)
{
	const struct address peer = address_of_peer();

	stage->peer = bind_udp_socket(peer_gid);
	stage->stranger = bind_udp_socket(stranger_gid);
	stage->psn = PEER_PSN;
	options.timeout = 255; /* no timeout, so that a slow test causes no retransmission */
	if (!options.mtu)
		options.mtu = IBV_MTU_256;
	open_side(&stage->side, options);
	bring_up(&stage->side, &peer);
}

static inline void close_stage(struct stage *stage)
{
	close_side(&stage->side);
	close(stage->peer);
	close(stage->stranger);
}

/* ---- packets --------------------------------------------------------------------------------- */

static inline size_t build(uint8_t *bytes, const uint8_t source[16],
			   const struct soft_roce_packet *packet)
{
	return build_from(SOFT_ROCE_PORT, bytes, source, device_gid, packet);
}

static inline void send_bytes(int fd, const uint8_t *bytes, size_t length)
{
	const struct sockaddr_in to = port_at(device_gid);

	CHECK_EQUAL(sendto(fd, bytes, length, 0, (const struct sockaddr *)&to, sizeof(to)), length);
}

static inline struct soft_roce_packet packet_of(const struct stage *stage, uint8_t opcode,
						uint32_t length)
{
	return (struct soft_roce_packet){
		.opcode = opcode,
		.pkey = 0xffff,
		.dest_qpn = stage->side.qp->qp_num,
		.psn = stage->psn,
		.ack_request = true,
		.immediate = 78,
		.length = length,
		.payload = payload,
	};
}

static inline void send_packet(const struct stage *stage, struct soft_roce_packet packet)
{
	uint8_t bytes[LONGEST];

	send_bytes(stage->peer, bytes, build(bytes, peer_gid, &packet));
}

/* Send the peer's next request. */
static inline void send_request(struct stage *stage, uint8_t opcode, uint32_t length)
{
	send_packet(stage, packet_of(stage, opcode, length));
	stage->psn = (stage->psn + 1) & 0xffffff;
}

static inline struct soft_roce_packet next_packet(const struct stage *stage, uint8_t opcode)
{
	struct soft_roce_packet packet = packet_at(stage->peer);

	CHECK_EQUAL(packet.opcode, opcode);
	CHECK_EQUAL(packet.dest_qpn, PEER_QPN);
	return packet;
}

/* Expect an acknowledgement or a NAK with this PSN and syndrome. */
static inline struct soft_roce_packet expect_response(const struct stage *stage, uint32_t psn,
						      uint8_t syndrome)
{
	struct soft_roce_packet packet = next_packet(stage, SOFT_ROCE_ACKNOWLEDGE);

	CHECK_EQUAL(packet.psn, psn & 0xffffff);
	CHECK_EQUAL(packet.syndrome, syndrome);
	return packet;
}

enum { DONE = SOFT_ROCE_ACK | SOFT_ROCE_NO_CREDITS };

static inline void expect_no_response(const struct stage *stage)
{
	CHECK(!has_packet_within(stage->peer, QUIET_MS));
	CHECK(!has_packet_within(stage->stranger, 0));
}

static inline void acknowledge(struct stage *stage, uint32_t psn, uint8_t syndrome)
{
	struct soft_roce_packet packet = packet_of(stage, SOFT_ROCE_ACKNOWLEDGE, 0);

	packet.psn = psn & 0xffffff;
	packet.syndrome = syndrome;
	send_packet(stage, packet);
}

/* Expect packet `i` of the first message, which is a SEND of `packets` packets. */
static inline void expect_send(const struct stage *stage, uint32_t i, uint32_t packets)
{
	const uint8_t opcode = packets == 1       ? SOFT_ROCE_SEND_ONLY
			       : i == 0           ? SOFT_ROCE_SEND_FIRST
			       : i == packets - 1 ? SOFT_ROCE_SEND_LAST
						  : SOFT_ROCE_SEND_MIDDLE;

	CHECK_EQUAL(next_packet(stage, opcode).psn, (stage->side.psn + i) & 0xffffff);
}
