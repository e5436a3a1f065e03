/* RoCE v2: standard packets over UDP, to this device in another process, to the kernel's rdma_rxe,
 * and to cards (IBTA volume 1, annexes A16 and A17).
 *
 * Each device has one path for the frames of all its queue pairs. It splits frames into packets of
 * at most a path MTU, and converts each received packet to a frame. From RTR on, a queue pair has a
 * peer without any handshake, because the application gives the peer's address and number. Packets
 * may be lost; the transport retransmits them.
 */
#pragma once

#include "path/path.h"

/* Open the channel of a queue pair that has entered RTR. The channel's `calls` are set. Returns 0
 * or an errno value. EADDRINUSE, which is also reported on stderr, means that another process uses
 * the UDP port of RoCE. */
int soft_roce_open(struct soft_chan *chan, struct soft_qp *qp);

/* Returns the largest path MTU whose packets fit into the MTU of every network of the device. */
enum ibv_mtu soft_roce_active_mtu(const struct soft_hca *hca);

/* ---- datagrams.c ------------------------------------------------------------------------------- */

/* Callbacks of higher folders that receive datagrams for queue pairs and for queue pair 1. */
struct soft_roce_takers {
	void (*datagram)(const struct soft_datagram *datagram, const uint8_t *payload,
			 uint32_t length);
	void (*mad)(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *mad,
		    size_t length);
};
void soft_roce_use(const struct soft_roce_takers *takers);

/* Receive datagrams at the addresses of all devices while there is a holder. Returns 0, or an errno
 * value if the caller does not hold them. */
int soft_roce_hold(void);
void soft_roce_release(void);
/* Returns whether other processes of this user also receive packets for the address. */
bool soft_roce_is_shared(const union ibv_gid *gid);
/* Send a datagram from a held address. Returns false to try again a little later. */
bool soft_roce_send_datagram(const struct soft_datagram *datagram, const struct iovec *payload,
			     int count);
/* Send a MAD from queue pair 1 to queue pair 1. */
void soft_roce_send_mad(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *mad,
			size_t length);

/* Receive a datagram from a simulated network. The 64 bytes before it may be overwritten. */
void soft_roce_arrived(const union ibv_gid *at, const union ibv_gid *from, uint16_t port,
		       uint8_t *bytes, size_t length);

extern const struct soft_subsystem soft_roce_subsystem;
