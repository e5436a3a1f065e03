/* The wire between UD queue pairs: one message is one UDP datagram, a header and up to 4096 bytes.
 *
 * The sending process's port (its LID) is the UDP source port, and its GID the IP source address.
 * They go to the UDP port that is the receiving process's LID, or, for a multicast GID, to the IP
 * multicast group and port that multicast.c says.  Numbers are little-endian, immediate data is as
 * the application gave it.
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
#ifndef AIORDMA_SOFT_DATAGRAM_H
#define AIORDMA_SOFT_DATAGRAM_H

#include <stdbool.h>
#include <stdint.h>

#include "abi/abi.h"

struct iovec;
struct soft_source;

enum {
	SOFT_DATAGRAM_HEADER = 60,
	SOFT_DATAGRAM_VERSION = 1,
	SOFT_DATAGRAM_MAX = 4096, /* of the message: the port's MTU (IBTA 9.8.3) */
	SOFT_GRH = 40,            /* what a receive begins with */
	SOFT_MULTICAST_QPN = 0xffffff,
	SOFT_TRAFFIC_FLOW = (1 << 28) - 1,
};

enum soft_datagram_flag {
	SOFT_DATAGRAM_IMMEDIATE = 1 << 0,
	SOFT_DATAGRAM_SOLICITED = 1 << 1,
};

struct soft_datagram {
	union ibv_gid source;
	union ibv_gid destination;
	uint32_t to;
	uint32_t from;
	uint32_t qkey;
	uint32_t immediate;    /* network order */
	uint32_t traffic_flow; /* class << 20 | label */
	uint16_t lid;          /* not in the header: of the sender's process */
	uint8_t flags;
	uint8_t sl;
	uint8_t hop_limit;
};

void soft_datagram_encode(uint8_t *at, const struct soft_datagram *datagram);
/* False when no datagram of ours looks like that. */
bool soft_datagram_decode(const uint8_t *at, struct soft_datagram *datagram);

/* Where a UD message goes: what an address handle stands for (ah.c). */
struct soft_path {
	union ibv_gid source;
	union ibv_gid destination;
	uint32_t traffic_flow;
	uint32_t ifindex; /* of the source GID */
	uint16_t lid;
	uint8_t sl;
	uint8_t hop_limit;
};

/* ---- datagram.c: the socket ---------------------------------------------------------------- */

/* Keep the UDP port of that number instead of the one before, deaf while nobody holds it; false if it
 * is taken. */
bool soft_datagram_reserve(uint16_t port);
/* While at least one UD queue pair exists, datagrams are received. */
void soft_datagram_hold(void);
void soft_datagram_release(void);
void soft_datagram_shutdown(void);

/* To the process at the path's LID.  False: not now, try again a little later.  What cannot be sent
 * at all is lost, like any datagram. */
bool soft_datagram_send(const struct soft_datagram *datagram, const struct soft_path *path,
			const struct iovec *payload, int count);
/* The same to an IPv4 address and port, from an interface.  Zero or an errno value. */
int soft_datagram_send_to(const struct soft_datagram *datagram, uint32_t address, uint16_t port,
			  uint32_t ifindex, const struct iovec *payload, int count);

/* Some of what has come to the socket, each checked and given to `take`. */
void soft_datagram_read(struct soft_source *source,
			void (*take)(struct soft_source *source,
				     const struct soft_datagram *datagram, const uint8_t *payload,
				     uint32_t length));

/* ---- multicast.c --------------------------------------------------------------------------- */

bool soft_gid_is_multicast(const union ibv_gid *gid);
/* The host's addresses have changed: join where there are new ones. */
void soft_multicast_addresses(void);
bool soft_multicast_send(const struct soft_datagram *datagram, const struct soft_path *path,
			 const struct iovec *payload, int count);

/* ---- ud.c ---------------------------------------------------------------------------------- */

struct soft_qp;

/* Send what is in the send queue. */
void soft_ud_output(struct soft_qp *qp);
/* Receive it, if the queue pair is there, ready, and has the same Q_Key. */
void soft_ud_input(const struct soft_datagram *datagram, const uint8_t *payload, uint32_t length);
void soft_ud_receive(struct soft_qp *qp, const struct soft_datagram *datagram,
		     const uint8_t *payload, uint32_t length);
/* The same behind all faults. */
void soft_ud_take(struct soft_qp *qp, const struct soft_datagram *datagram, const uint8_t *payload,
		  uint32_t length);
/* Messages that came with a wrong Q_Key: ibv_query_port(3). */
uint32_t soft_ud_bad_qkeys(void);

#endif
