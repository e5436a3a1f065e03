/* The inside of this folder: path.c has the pairs of queue pairs, packets.c makes packets of frames and
 * frames of packets, sockets.c sends and receives, share.c shares an address among processes. */
#pragma once

#include <string.h>
#include <sys/socket.h>

#include "headers.h"
#include "icrc.h"
#include "roce.h"

enum {
	SOFT_ROCE_PKEY = 0xffff, /* the default partition, full member: IBTA 10.9.1.2 */
	SOFT_ROCE_GSI = 1, /* the queue pair: IBTA 3.5.10 */
	SOFT_ROCE_BUFFER = 8 << 20, /* bytes of a socket in the kernel, as far as it allows */
	SOFT_ROCE_SENDERS = 16, /* source ports of an address: networks spread flows by them */
	SOFT_ROCE_CE = 3, /* RFC 3168, of a traffic class: it has met congestion, or: the bits */
	SOFT_ROCE_PACKET_MAX = SOFT_ROCE_HEADERS_MAX + 4096 + SOFT_ROCE_PAD_MAX + SOFT_ROCE_ICRC,
};

/* A socket that sends.  It is never connected: then the identification of its packets is 0. */
struct soft_roce_sender {
	struct soft_fd_watch watch;
	uint16_t port; /* of the source */
	bool one_by_one; /* the kernel splits no runs here */
};

/* Another process, for which this one receives at an address. */
struct soft_roce_guest {
	struct soft_fd_watch watch;
	uint16_t ip_port; /* in the numbers of its queue pairs */
	struct soft_node node;
};

/* An address of this host, where packets arrive. */
struct soft_roce_address {
	struct soft_fd_watch watch; /* of the UDP port, or of the connection to its owner */
	union ibv_gid gid;
	unsigned users; /* pairs, and all holders of datagrams.c together */
	bool held; /* by those */
	uint32_t room; /* bytes of packets that it takes before they are read */
	bool busy; /* it is read from: it must not be freed */
	bool left; /* by the process that had the port */
	struct soft_node node;
	struct soft_acceptor door; /* where guests come; without one this process is a guest */
	struct soft_node guests;
	struct soft_roce_sender senders[SOFT_ROCE_SENDERS]; /* without a port: not open yet */
};

/* Where packets go, and from where. */
struct soft_roce_flow {
	struct soft_roce_sender *sender;
	union ibv_gid from;
	struct sockaddr_storage to;
	socklen_t to_length;
	uint8_t traffic_class; /* but for its last two bits, which say ECT(0) */
	struct soft_icrc_flow icrc;
};

/* A queue pair of ours and its peer. */
struct soft_roce_pair {
	struct soft_chan *chan;
	struct soft_qp *qp;
	struct soft_roce_address *address;
	union ibv_gid peer;
	uint8_t service; /* enum soft_roce_service */
	uint16_t peer_port; /* from which it sends */
	struct soft_roce_flow out;
	struct soft_icrc_flow in;
	/* of the requests; PSNs as in the send queue */
	struct soft_window psns;
	bool begun;
	uint32_t unacked; /* when the window was last looked at */
	uint32_t recovered; /* until that one is acknowledged, what is lost is of one loss */
	uint64_t window; /* bytes that may be under way */
	uint64_t threshold; /* below it the window grows quickly */
	uint64_t notifies_at; /* no congestion notification before that time */
};

/* Packets that one system call sends: all to the same place, and but for the last of the same length. */
struct soft_roce_run {
	struct soft_roce_sender *sender;
	union ibv_gid from;
	struct sockaddr_storage to;
	socklen_t to_length;
	uint8_t traffic_class;
	uint32_t offset, length; /* of `staged` */
	uint16_t segment; /* length of its first packet */
	uint16_t count;
};

struct soft_roce {
	struct soft_path paths[SOFT_HCAS_MOST]; /* one for each device */
	struct soft_table pairs; /* by the numbers of our queue pairs */
	struct soft_timer again; /* paths have let others go first */

	/* datagrams.c */
	const struct soft_roce_takers *takers;
	unsigned holders;

	/* sockets.c */
	struct soft_node addresses;
	uint8_t *input, *staged; /* NULL: there is no pair yet */
	uint32_t staged_length;
	struct soft_roce_run *runs;
	uint32_t run_count, run_sent;
	bool blocked; /* a socket takes no more */
	bool too_long_told;
};

/* packets.c */
/* What a frame says in all its packets, but for their operations; false: it stands for none. */
bool soft_roce_from_frame(struct soft_roce_packet *packet, const struct soft_frame *frame,
			  const uint8_t *small);
/* The operation of a packet of the frame's message: its first, its last, both or neither. */
uint8_t soft_roce_operation(const struct soft_frame *frame, bool first, bool last);
/* The frame that the packet is, if it can be one with that path MTU.  Of an atomic, its payload is in
 * `small`; false: no such packet is taken in. */
bool soft_roce_to_frame(struct soft_frame *frame, const struct soft_roce_packet *packet,
			uint32_t mtu, uint8_t small[SOFT_ATOMIC_ARGUMENTS]);

/* sockets.c */
/* That address, open; NULL and errno if it cannot be. */
struct soft_roce_address *soft_roce_address(const union ibv_gid *gid);
void soft_roce_address_release(struct soft_roce_address *address);
/* The same one, if it is open already. */
static inline struct soft_roce_address *soft_roce_address_at(const union ibv_gid *gid)
{
	soft_list_each (struct soft_roce_address, address, &soft_device.roce->addresses, node)
		if (!memcmp(&address->gid, gid, sizeof(*gid)))
			return address;
	return NULL;
}
/* From there to the peer, for queue pairs with these numbers, which choose the socket; false and errno if
 * there is none to be had. */
bool soft_roce_flow(struct soft_roce_flow *flow, struct soft_roce_address *address,
		    const union ibv_gid *peer, uint32_t qpn, uint32_t peer_qpn,
		    uint8_t traffic_class);
/* Bytes of packets that may be staged; 0: not before the socket takes more. */
size_t soft_roce_room(void);
/* Where the next packet is to be written, or NULL; and the same packet is complete up to its pad. */
uint8_t *soft_roce_stage(void);
void soft_roce_staged(const struct soft_roce_flow *flow, uint32_t length);
void soft_roce_flush(void);
void soft_roce_sockets_close(bool flush);

/* share.c */
/* Before a packet for a guest: the address of its sender, and its traffic class. */
enum { SOFT_ROCE_FROM = sizeof(struct sockaddr_in6) + 1 };
static inline bool soft_roce_is_guest(const struct soft_roce_address *address)
{
	return address->door.watch.fd < 0;
}
/* Be the owner of the address, with a door, or a guest, with the watch's descriptor; 0 or errno. */
int soft_roce_share(struct soft_roce_address *address);
void soft_roce_unshare(struct soft_roce_address *address);
/* To whom a packet belongs; false: it is for this process (too). */
bool soft_roce_pass(struct soft_roce_address *address, struct sockaddr_storage *from,
		    uint8_t *bytes, size_t length, uint8_t traffic_class);

/* path.c: a packet; SOFT_FRAME_HEADER bytes before it may be overwritten. */
void soft_roce_take(struct soft_roce_address *at, const struct sockaddr_storage *from,
		    uint8_t *bytes, size_t length, uint8_t traffic_class);
/* A socket takes more. */
void soft_roce_unblocked(void);

/* path.c: trace that a packet is dropped for that reason; `packet` is NULL if it has no valid header. */
void soft_roce_dropped(const char *reason, const struct soft_roce_packet *packet,
		       const struct sockaddr_storage *from);

/* datagrams.c: a packet of UD */
void soft_roce_take_datagram(const struct soft_roce_address *at,
			     const struct sockaddr_storage *from,
			     const struct soft_roce_packet *packet, const uint8_t *bytes,
			     size_t length, uint8_t traffic_class);
/* `port_changed` of soft_roce_subsystem. */
void soft_roce_port_changed(enum soft_port_change change, uint32_t ports);
