/* Internal declarations of the RoCE path. path.c connects queue pairs to their peers, packets.c
 * converts frames to packets and back, sockets.c sends and receives packets, share.c shares an
 * address among processes, and datagrams.c handles UD packets. */
#pragma once

#include <string.h>
#include <sys/socket.h>

#include "headers.h"
#include "icrc.h"
#include "roce.h"

enum {
	SOFT_ROCE_PKEY = 0xffff, /* default partition, full member (IBTA 10.9.1.2) */
	SOFT_ROCE_GSI = 1, /* number of queue pair 1 (IBTA 3.5.10) */
	SOFT_ROCE_BUFFER = 8 << 20, /* socket buffer size requested from the kernel, in bytes */
	SOFT_ROCE_SENDERS = 16, /* source ports per address; networks spread flows by source port */
	SOFT_ROCE_CE = 3, /* congestion experienced (RFC 3168); also the ECN mask */
	SOFT_ROCE_PACKET_MAX = SOFT_ROCE_HEADERS_MAX + 4096 + SOFT_ROCE_PAD_MAX + SOFT_ROCE_ICRC,
};

/* A sending socket. It is not connected, because the kernel sets the IPv4 identification to 0 only
 * for unconnected sockets. */
struct soft_roce_sender {
	struct soft_fd_watch watch;
	uint16_t port; /* source port */
	bool no_segmentation; /* the kernel cannot split runs on this socket */
};

/* A guest: another process that receives packets through this one. */
struct soft_roce_guest {
	struct soft_fd_watch watch;
	uint16_t ip_port; /* part of the guest's queue pair numbers */
	struct soft_node node;
};

/* A local address that receives packets. */
struct soft_roce_address {
	struct soft_fd_watch watch; /* UDP socket, or connection to the port's owner */
	union ibv_gid gid;
	unsigned users; /* number of pairs, plus one if `held` */
	bool held; /* in use by datagrams.c */
	uint32_t receive_room; /* bytes of packets that the receive buffer holds */
	bool is_reading; /* packets are being read; do not free */
	bool owner_closed; /* whether the port's owner has closed the connection */
	struct soft_node node;
	struct soft_acceptor acceptor; /* listening socket for guests; closed in a guest */
	struct soft_node guests;
	struct soft_roce_sender senders[SOFT_ROCE_SENDERS]; /* port is 0 until opened */
};

/* Source and destination of packets. */
struct soft_roce_flow {
	struct soft_roce_sender *sender;
	union ibv_gid from;
	struct sockaddr_storage to;
	socklen_t to_length;
	uint8_t traffic_class; /* without the ECN bits, which are sent as ECT(0) */
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
	struct soft_roce_flow flow_out;
	struct soft_icrc_flow icrc_in;
	/* Request window, counted in PSNs. */
	struct soft_window psn_window;
	bool has_sent_request;
	uint32_t last_unacked; /* `sq.unacked` at the last window update */
	/* first PSN not yet sent at the last loss event; further losses belong to the same event
	 * until all earlier PSNs are acknowledged */
	uint32_t recovery_psn;
	uint64_t window; /* congestion window in bytes */
	uint64_t slow_start_threshold; /* slow start threshold in bytes */
	uint64_t next_notification_ns; /* earliest time of the next congestion notification */
};

/* Packets for one destination that are sent with a single system call. All of them have the same
 * length, except that the last one may be shorter. */
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
	struct soft_path paths[SOFT_MAX_HCAS]; /* one per device */
	struct soft_table pairs; /* by local queue pair number */
	struct soft_timer room_timer; /* offers room to waiting channels in the next step */

	/* datagrams.c */
	const struct soft_roce_datagram_ops *datagram_ops;
	unsigned address_holders;

	/* sockets.c */
	struct soft_node addresses;
	uint8_t *input, *staged; /* NULL until an address is opened */
	uint32_t staged_length;
	struct soft_roce_run *runs;
	uint32_t run_count, run_sent;
	bool blocked; /* a socket's send buffer is full */
	bool too_long_reported;
};

/* packets.c */
/* Initialize `packet` as the first packet of a frame. `atomic_payload` is the payload of an atomic
 * operation's request or response, and is not used for other frames. The caller sets the opcode,
 * the length, and the bits that request an event or an acknowledgement. Returns false if frames of
 * this kind are not sent as packets. */
bool soft_roce_from_frame(struct soft_roce_packet *packet, const struct soft_frame *frame,
			  const uint8_t *atomic_payload);
/* Returns the operation of the first, middle, last or only packet of a frame. */
uint8_t soft_roce_operation(const struct soft_frame *frame, bool first, bool last);
/* Convert a packet to a frame. If a request's length is invalid for the path MTU, the frame makes
 * the responder refuse the request. Stores the payload of an atomic operation's request or response
 * in `atomic_payload`. Returns false if a response is invalid. */
bool soft_roce_to_frame(struct soft_frame *frame, const struct soft_roce_packet *packet,
			uint32_t mtu, uint8_t atomic_payload[SOFT_ATOMIC_ARGUMENTS]);

/* sockets.c */
/* Start receiving at an address. If the address is already open, only count another user. Returns
 * NULL and sets errno on failure. */
struct soft_roce_address *soft_roce_open_address(const union ibv_gid *gid);
/* Remove a user of the address. Then close all addresses without users. */
void soft_roce_address_release(struct soft_roce_address *address);
/* Close all addresses without users, except those whose packets are being read. */
void soft_roce_close_unused_addresses(void);
/* Returns the address if it is open, or NULL. */
static inline struct soft_roce_address *soft_roce_find_address(const union ibv_gid *gid)
{
	soft_list_each (struct soft_roce_address, address, &soft_device.roce->addresses, node)
		if (!memcmp(&address->gid, gid, sizeof(*gid)))
			return address;
	return NULL;
}
/* Set up a flow to the peer. The queue pair numbers select the sending socket. Returns false and
 * sets errno on failure. */
bool soft_roce_flow_init(struct soft_roce_flow *flow, struct soft_roce_address *address,
			 const union ibv_gid *peer, uint32_t qpn, uint32_t peer_qpn,
			 uint8_t traffic_class);
/* Returns how many bytes of frames may be staged now, which is 0 while a socket is full. If little
 * room is left, sends the staged packets first. */
size_t soft_roce_room(void);
/* Returns a pointer to the space for the next packet, or NULL if no more packets can be staged. */
uint8_t *soft_roce_staging_space(void);
/* Add the packet that the caller has written at soft_roce_staging_space() to a run, and append its
 * ICRC. `length` includes the padding. */
void soft_roce_commit_staged(const struct soft_roce_flow *flow, uint32_t length);
/* Send the staged packets until a socket is full. */
void soft_roce_flush(void);
enum { SOFT_ROCE_DISCARD_STAGED = false, SOFT_ROCE_SEND_STAGED = true };
/* Close all sockets and free the buffers. `send_staged` is false in a forked child, which must not
 * send its parent's packets. */
void soft_roce_sockets_close(bool send_staged);

/* share.c */
/* Size of the sender's address and traffic class, which precede each packet sent to a guest. */
enum { SOFT_ROCE_GUEST_PREFIX = sizeof(struct sockaddr_in6) + 1 };
static inline bool soft_roce_is_guest(const struct soft_roce_address *address)
{
	return address->acceptor.watch.fd < 0;
}
/* Become the owner of the address and accept guests. If another process owns the address, become
 * its guest and store the connection in `address->watch.fd`. Returns 0 or an errno value. */
int soft_roce_share(struct soft_roce_address *address);
/* Stop accepting guests, and disconnect the processes that receive through this one. */
void soft_roce_unshare(struct soft_roce_address *address);
/* Forward a packet to the guests that it is addressed to (struct soft_roce_guest). Returns false if
 * this process must handle the packet too. */
bool soft_roce_forward(struct soft_roce_address *address, struct sockaddr_storage *from,
		       uint8_t *bytes, size_t length, uint8_t traffic_class);

/* Handle a received packet (path.c). May overwrite the SOFT_FRAME_HEADER bytes before `bytes`. */
void soft_roce_receive(struct soft_roce_address *at, const struct sockaddr_storage *from,
		       uint8_t *bytes, size_t length, uint8_t traffic_class);
/* Resume sending after a full socket has become writable (path.c). */
void soft_roce_unblocked(void);

/* Record a dropped packet in the trace (path.c). `packet` is NULL if its header is invalid. */
void soft_roce_trace_dropped(const char *reason, const struct soft_roce_packet *packet,
			     const struct sockaddr_storage *from);

/* Handle a UD packet (datagrams.c). */
void soft_roce_receive_datagram(const struct soft_roce_address *at,
				const struct sockaddr_storage *from,
				const struct soft_roce_packet *packet, const uint8_t *bytes,
				size_t length, uint8_t traffic_class);
/* Implements `port_changed` of soft_roce_subsystem. */
void soft_roce_port_changed(enum soft_port_change change, uint32_t ports);
