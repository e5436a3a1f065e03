/* RoCE v2: packets of the specification over UDP, to this device in another process, to the kernel's
 * rdma_rxe, and to cards (IBTA volume 1, annexes A16 and A17).
 *
 * Each device has one path, which carries the frames of all its queue pairs: it splits them into
 * packets of at most a path MTU, and makes a frame of each packet that comes.  A queue pair has a peer
 * from RTR on, without any introduction: its peer's address and number are what the application says.
 * Packets may get lost; the transport sends them again.
 */
#pragma once

#include "path/path.h"

/* The queue pair has come to RTR: open its channel, whose `calls` are set.  0 or an errno value;
 * EADDRINUSE, which is told on stderr: the UDP port of RoCE is another one's. */
int soft_roce_open(struct soft_chan *chan, struct soft_qp *qp);

/* The largest path MTU whose packets fit into those of every network of the device. */
enum ibv_mtu soft_roce_active_mtu(const struct soft_hca *hca);

/* ---- datagrams.c ------------------------------------------------------------------------------- */

/* Higher folders, to which datagrams go: those for queue pairs, and those for queue pair 1. */
struct soft_roce_takers {
	void (*datagram)(const struct soft_datagram *datagram, const uint8_t *payload,
			 uint32_t length);
	void (*mad)(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *mad,
		    size_t length);
};
void soft_roce_use(const struct soft_roce_takers *takers);

/* Datagrams for the addresses of all devices come as long as there is a holder: 0, or an errno value, and
 * this is none. */
int soft_roce_hold(void);
void soft_roce_release(void);
/* Do other processes of this user get packets for that address too? */
bool soft_roce_is_shared(const union ibv_gid *gid);
/* From an address that is held.  False: not now, try again a little later. */
bool soft_roce_send_datagram(const struct soft_datagram *datagram, const struct iovec *payload,
			     int count);
/* From queue pair 1 to queue pair 1. */
void soft_roce_send_mad(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *mad,
			size_t length);

/* A simulated network brings a datagram, before which 64 bytes may be overwritten. */
void soft_roce_arrived(const union ibv_gid *at, const union ibv_gid *from, uint16_t port,
		       uint8_t *bytes, size_t length);

extern const struct soft_subsystem soft_roce_subsystem;
