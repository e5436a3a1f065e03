/* The wire between UD queue pairs: one message is one UDP datagram, a header and up to 4096 bytes.
 *
 * It comes from the UDP port that the sender's QP number says (qp_numbers.c) and from the IP address
 * that is its GID.  It goes to the port that the receiver's QP number says, or, for a multicast GID,
 * to the IP multicast group and port that multicast.c says.  Numbers are little-endian, immediate
 * data is as the application gave it.
 *
 *   offset
 *        0  u8[4] "aiUD"
 *        4  u8   version
 *        5  u8   flags             enum soft_datagram_flag
 *        6  u8   service level
 *        7  u8   hop limit         of the address handle
 *        8  u32  to                QP number; all ones (24 bits) for a multicast GID
 *       12  u32  from              QP number
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
	bool six; /* it is an IPv6 socket, for both */
	unsigned holders;

	const struct soft_ud_packets *packets;

	struct soft_node groups; /* multicast.c */
	unsigned attachment_count;
};

void soft_datagram_encode(uint8_t *at, const struct soft_datagram *datagram);
/* False when no datagram of ours looks like that. */
bool soft_datagram_decode(const uint8_t *at, struct soft_datagram *datagram);

/* ---- datagram.c: the socket ---------------------------------------------------------------- */

/* Keep the UDP port of that number instead of the one before, with all input filtered out until
 * soft_datagram_hold; false if it is taken. */
bool soft_datagram_reserve(uint16_t port);
/* While at least one UD queue pair exists, datagrams are received. */
void soft_datagram_hold(void);
void soft_datagram_release(void);
void soft_datagram_shutdown(void);

/* One more control message: from this address, which the receiver checks, and through this interface if
 * it is not 0. */
void soft_put_source(struct msghdr *message, bool ipv4, const union ibv_gid *source,
		     uint32_t ifindex);

/* To the process that has the queue pair `datagram->to`.  False: not now, try again a little later.
 * What cannot be sent at all is lost, like any datagram. */
bool soft_datagram_send(const struct soft_datagram *datagram, const struct soft_ud_address *path,
			const struct iovec *payload, int count);
/* The same to an IPv4 address and port, from an interface.  Zero or an errno value. */
int soft_datagram_send_to(const struct soft_datagram *datagram, uint32_t address, uint16_t port,
			  uint32_t ifindex, const struct iovec *payload, int count);

/* Some of what has come to the socket, each checked and given to `take`. */
void soft_datagram_read(struct soft_fd_watch *watch,
			void (*take)(struct soft_fd_watch *watch,
				     const struct soft_datagram *datagram, const uint8_t *payload,
				     uint32_t length));

/* What carries datagrams in place of datagram.c, except to groups: packets of RoCE. */
struct soft_ud_packets {
	/* A queue pair can be reached from now on: 0 or an errno value. */
	int (*hold)(void);
	void (*release)(void);
	/* As soft_datagram_send. */
	bool (*send)(const struct soft_datagram *datagram, const struct iovec *payload, int count);
};
/* From now on; NULL: datagram.c. */
void soft_ud_use(const struct soft_ud_packets *packets);

/* ---- multicast.c --------------------------------------------------------------------------- */

/* The host's addresses have changed: join where there are new ones. */
void soft_multicast_addresses(void);
void soft_multicast_reset_after_fork(void);
bool soft_multicast_send(const struct soft_datagram *datagram, const struct soft_ud_address *path,
			 const struct iovec *payload, int count);

/* ---- ud.c ---------------------------------------------------------------------------------- */

/* Receive it, if the queue pair is there, ready, and has the same Q_Key. */
void soft_ud_input(const struct soft_datagram *datagram, const uint8_t *payload, uint32_t length);
void soft_ud_receive(struct soft_qp *qp, const struct soft_datagram *datagram,
		     const uint8_t *payload, uint32_t length);
/* The same behind all faults. */
void soft_ud_take(struct soft_qp *qp, const struct soft_datagram *datagram, const uint8_t *payload,
		  uint32_t length);

extern const struct soft_transport soft_ud_transport;
extern const struct soft_subsystem soft_ud_subsystem;
