/* The wire format between UD queue pairs: one message is one UDP datagram with a header and up to
 * 4096 bytes.
 *
 * The source port encodes the sender's queue pair number (qp_numbers.c), and the source address is
 * the sender's GID. The destination port encodes the receiver's queue pair number. A message to a
 * multicast GID goes to an IP multicast group and port instead (multicast.c). Numbers are
 * little-endian; immediate data is sent as the application passed it.
 *
 *   offset
 *        0  u8[4] "aiUD"
 *        4  u8   version
 *        5  u8   flags             enum soft_datagram_flag
 *        6  u8   service level
 *        7  u8   hop limit         from the address handle
 *        8  u32  to                queue pair number; 24 one bits for a multicast GID
 *       12  u32  from              queue pair number
 *       16  u32  Q_Key
 *       20  u32  immediate
 *       24  u32  traffic class << 20 | flow label
 *       28  u8[16] source GID
 *       44  u8[16] destination GID
 */
#pragma once

#include "objects/objects.h"

enum {
	SOFT_DATAGRAM_HEADER = 60,
	SOFT_DATAGRAM_VERSION = 2,
	SOFT_MULTICAST_QPN = 0xffffff,
};

struct soft_ud {
	struct soft_fd_watch socket; /* datagram.c */
	bool is_ipv6; /* whether `socket` is an IPv6 socket, which handles both families */
	unsigned holders;

	const struct soft_ud_packets *packets;

	struct soft_node groups; /* multicast.c */
	unsigned attachment_count;
};

void soft_datagram_encode(uint8_t *at, const struct soft_datagram *datagram);
/* Decode a header. Returns false if it is not valid. */
bool soft_datagram_decode(const uint8_t *at, struct soft_datagram *datagram);

/* ---- datagram.c: the socket ---------------------------------------------------------------- */

/* Bind the UDP port `port` in place of the previous one, and drop all input until
 * soft_datagram_hold(). Returns false if the port is in use. */
bool soft_datagram_reserve(uint16_t port);
/* Hold the socket for a new UD queue pair. Datagrams are received while at least one queue pair
 * holds it. */
void soft_datagram_hold(void);
/* Release the socket when a UD queue pair is destroyed. The last one to release it drops all input
 * from then on, but the port stays bound. */
void soft_datagram_release(void);
void soft_datagram_shutdown(void);

/* Append a control message that selects the source address and, unless `ifindex` is 0, the outgoing
 * interface. The receiver verifies the source address. */
void soft_put_source(struct msghdr *message, bool ipv4, const union ibv_gid *source,
		     uint32_t ifindex);

/* Send a datagram to the process of the queue pair `datagram->dest_qpn`. Returns false if the
 * socket is full and the caller must retry. A datagram that fails for another reason is lost. */
bool soft_datagram_send(const struct soft_datagram *datagram, const struct soft_ud_address *path,
			const struct iovec *payload, int count);
/* Send a datagram to an IPv4 address and port through an interface. Returns 0 or an errno value. */
int soft_datagram_send_to(const struct soft_datagram *datagram, uint32_t address, uint16_t port,
			  uint32_t ifindex, const struct iovec *payload, int count);

/* Read some of the pending datagrams, and pass each valid one to `handle`. */
void soft_datagram_read(struct soft_fd_watch *watch,
			void (*handle)(struct soft_fd_watch *watch,
				       const struct soft_datagram *datagram, const uint8_t *payload,
				       uint32_t length));

/* Functions that replace those of datagram.c when datagrams are RoCE packets. Multicast groups
 * always use datagram.c. */
struct soft_ud_packets {
	/* Keep the addresses of all devices open to receive packets, until the matching
	 * release_addresses(). Returns 0 or an errno value. */
	int (*hold_addresses)(void);
	void (*release_addresses)(void);
	/* like soft_datagram_send() */
	bool (*send)(const struct soft_datagram *datagram, const struct iovec *payload, int count);
};
/* Use `packets` in place of datagram.c, or datagram.c again if it is NULL. */
void soft_ud_set_packets(const struct soft_ud_packets *packets);

/* ---- multicast.c --------------------------------------------------------------------------- */

/* Join all groups on new interfaces after the host's addresses have changed. */
void soft_multicast_rejoin(void);
void soft_multicast_reset_after_fork(void);
bool soft_multicast_send(const struct soft_datagram *datagram, const struct soft_ud_address *path,
			 const struct iovec *payload, int count);

/* ---- ud.c ---------------------------------------------------------------------------------- */

/* Pass a datagram to the queue pair that it is addressed to, which receives it if it is ready and
 * has the same Q_Key. */
void soft_ud_dispatch(const struct soft_datagram *datagram, const uint8_t *payload,
		      uint32_t length);
/* Apply the fault spec to a datagram, and deliver the datagram now or later. */
void soft_ud_receive(struct soft_qp *qp, const struct soft_datagram *datagram,
		     const uint8_t *payload, uint32_t length);
/* Deliver a datagram without injecting faults. */
void soft_ud_deliver(struct soft_qp *qp, const struct soft_datagram *datagram,
		     const uint8_t *payload, uint32_t length);

extern const struct soft_transport soft_ud_transport;
extern const struct soft_subsystem soft_ud_subsystem;
