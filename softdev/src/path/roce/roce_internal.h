/* Internal declarations: path.c contains the pairs of queue pairs, packets.c converts frames and
 * packets, sockets.c sends and receives, and share.c shares an address among processes. */
#pragma once

#include <string.h>
#include <sys/socket.h>

#include "headers.h"
#include "icrc.h"
#include "roce.h"

enum {
	SOFT_ROCE_PKEY = 0xffff, /* the default partition, full member (IBTA 10.9.1.2) */
	SOFT_ROCE_GSI = 1, /* the queue pair number (IBTA 3.5.10) */
	SOFT_ROCE_BUFFER = 8 << 20, /* bytes of a socket buffer requested from the kernel */
	SOFT_ROCE_SENDERS = 16, /* source ports of an address, by which networks spread flows */
	SOFT_ROCE_CE = 3, /* RFC 3168: congestion experienced; also the mask in a traffic class */
	SOFT_ROCE_PACKET_MAX = SOFT_ROCE_HEADERS_MAX + 4096 + SOFT_ROCE_PAD_MAX + SOFT_ROCE_ICRC,
};

/* A socket that sends packets. It is never connected, so that the identification of its packets is
 * 0. */
struct soft_roce_sender {
	struct soft_fd_watch watch;
	uint16_t port; /* source port */
	bool one_by_one; /* the kernel cannot split runs here */
};

/* Another process for which this one receives at an address. */
struct soft_roce_guest {
	struct soft_fd_watch watch;
	uint16_t ip_port; /* part of its queue pair numbers */
	struct soft_node node;
};

/* A local address at which packets arrive. */
struct soft_roce_address {
	struct soft_fd_watch watch; /* the UDP port, or the connection to its owner */
	union ibv_gid gid;
	unsigned users; /* number of pairs, plus one for all holders of datagrams.c */
	bool held; /* by holders of datagrams.c */
	uint32_t room; /* bytes of packets that fit before they are read */
	bool busy; /* being read, must not be freed */
	bool left; /* whether the port's owner has ended */
	struct soft_node node;
	struct soft_acceptor door; /* where guests connect; a guest itself has none */
	struct soft_node guests;
	struct soft_roce_sender senders[SOFT_ROCE_SENDERS]; /* a port of 0 means not open yet */
};

/* The source and destination of packets. */
struct soft_roce_flow {
	struct soft_roce_sender *sender;
	union ibv_gid from;
	struct sockaddr_storage to;
	socklen_t to_length;
	uint8_t traffic_class; /* except the last two bits, which are ECT(0) */
	struct soft_icrc_flow icrc;
};

/* A local queue pair and its peer. */
struct soft_roce_pair {
	struct soft_chan *chan;
	struct soft_qp *qp;
	struct soft_roce_address *address;
	union ibv_gid peer;
	uint8_t service; /* enum soft_roce_service */
	uint16_t peer_port; /* source port of the peer */
	struct soft_roce_flow out;
	struct soft_icrc_flow in;
	/* Window of requests, with PSNs as in the send queue. */
	struct soft_window psns;
	bool begun;
	uint32_t unacked; /* value when the window was last updated */
	uint32_t recovered; /* losses belong to the same event until this PSN is acknowledged */
	uint64_t window; /* bytes that may be in flight */
	uint64_t threshold; /* the window grows quickly below this value */
	uint64_t notifies_at; /* time before which no congestion notification is sent */
};

/* Packets sent by one system call: to the same destination and, except for the last one, of the
 * same length. */
struct soft_roce_run {
	struct soft_roce_sender *sender;
	union ibv_gid from;
	struct sockaddr_storage to;
	socklen_t to_length;
	uint8_t traffic_class;
	uint32_t offset, length; /* in `staged` */
	uint16_t segment; /* length of its first packet */
	uint16_t count;
};

struct soft_roce {
	struct soft_path paths[SOFT_HCAS_MOST]; /* one per device */
	struct soft_table pairs; /* by local queue pair number */
	struct soft_timer again; /* runs while paths have yielded their turn */

	/* datagrams.c */
	const struct soft_roce_takers *takers;
	unsigned holders;

	/* sockets.c */
	struct soft_node addresses;
	uint8_t *input, *staged; /* NULL until there is a pair */
	uint32_t staged_length;
	struct soft_roce_run *runs;
	uint32_t run_count, run_sent;
	bool blocked; /* a socket is full */
	bool too_long_told;
};

/* packets.c */
/* Convert a frame to the fields common to all its packets, without the operation. Returns false if
 * it has no packets. */
bool soft_roce_from_frame(struct soft_roce_packet *packet, const struct soft_frame *frame,
			  const uint8_t *small);
/* Returns the operation of a packet: the first of the frame's message, the last, both, or
 * neither. */
uint8_t soft_roce_operation(const struct soft_frame *frame, bool first, bool last);
/* Convert a packet to a frame for this path MTU, with the payload of an atomic in `small`. Returns
 * false if such a packet is not accepted. */
bool soft_roce_to_frame(struct soft_frame *frame, const struct soft_roce_packet *packet,
			uint32_t mtu, uint8_t small[SOFT_ATOMIC_ARGUMENTS]);

/* sockets.c */
/* Open an address. Returns NULL and sets errno on failure. */
struct soft_roce_address *soft_roce_address(const union ibv_gid *gid);
void soft_roce_address_release(struct soft_roce_address *address);
/* Returns an address that is already open, or NULL. */
static inline struct soft_roce_address *soft_roce_address_at(const union ibv_gid *gid)
{
	soft_list_each (struct soft_roce_address, address, &soft_device.roce->addresses, node)
		if (!memcmp(&address->gid, gid, sizeof(*gid)))
			return address;
	return NULL;
}
/* Set up a flow to the peer for queue pairs with these numbers, which select the socket. Returns
 * false and sets errno on failure. */
bool soft_roce_flow(struct soft_roce_flow *flow, struct soft_roce_address *address,
		    const union ibv_gid *peer, uint32_t qpn, uint32_t peer_qpn,
		    uint8_t traffic_class);
/* Returns the number of bytes of packets that may be staged, or 0 until the socket accepts more. */
size_t soft_roce_room(void);
/* soft_roce_stage() returns where to write the next packet, or NULL. soft_roce_staged() is called
 * when the packet is complete up to its padding. */
uint8_t *soft_roce_stage(void);
void soft_roce_staged(const struct soft_roce_flow *flow, uint32_t length);
void soft_roce_flush(void);
void soft_roce_sockets_close(bool flush);

/* share.c */
/* Size of the sender's address and traffic class before a packet for a guest. */
enum { SOFT_ROCE_FROM = sizeof(struct sockaddr_in6) + 1 };
static inline bool soft_roce_is_guest(const struct soft_roce_address *address)
{
	return address->door.watch.fd < 0;
}
/* Become the owner of the address, which accepts guests, or a guest that uses the watch's
 * descriptor. Returns 0 or an errno value. */
int soft_roce_share(struct soft_roce_address *address);
void soft_roce_unshare(struct soft_roce_address *address);
/* Pass a packet to the guests that it is for. Returns false if it is (also) for this process. */
bool soft_roce_pass(struct soft_roce_address *address, struct sockaddr_storage *from,
		    uint8_t *bytes, size_t length, uint8_t traffic_class);

/* path.c: handle a packet. The SOFT_FRAME_HEADER bytes before it may be overwritten. */
void soft_roce_take(struct soft_roce_address *at, const struct sockaddr_storage *from,
		    uint8_t *bytes, size_t length, uint8_t traffic_class);
/* Called when a socket accepts more. */
void soft_roce_unblocked(void);

/* path.c: record in the trace that a packet was dropped. `packet` is NULL if its header is
 * invalid. */
void soft_roce_dropped(const char *reason, const struct soft_roce_packet *packet,
		       const struct sockaddr_storage *from);

/* datagrams.c: handle a UD packet */
void soft_roce_take_datagram(const struct soft_roce_address *at,
			     const struct sockaddr_storage *from,
			     const struct soft_roce_packet *packet, const uint8_t *bytes,
			     size_t length, uint8_t traffic_class);
/* implements `port_changed` of soft_roce_subsystem */
void soft_roce_port_changed(enum soft_port_change change, uint32_t ports);
