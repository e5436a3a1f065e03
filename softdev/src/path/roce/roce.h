/* RoCE v2 (IBTA volume 1, annexes A16 and A17): standard packets over UDP. The peer may be an
 * embedded device of another process, the kernel's rdma_rxe, or an RDMA NIC.
 *
 * All queue pairs of a device share one path. The path splits frames into packets of at most the
 * path MTU, and converts each received packet to a frame. Queue pairs need no handshake, because
 * the application supplies the peer's address and queue pair number when it moves them to RTR. The
 * network may lose packets, and the transport retransmits them.
 */
#pragma once

#include "path/path.h"

/* Open the channel of a queue pair that has entered RTR. The caller has set the channel's `calls`.
 * Returns 0 or an errno value. EADDRINUSE, which is also reported on stderr, means that another
 * process uses the RoCE UDP port. */
int soft_roce_open(struct soft_chan *chan, struct soft_qp *qp);

/* Returns the largest path MTU whose packets fit into the MTU of each of the device's networks. */
enum ibv_mtu soft_roce_active_mtu(const struct soft_hca *hca);

/* ---- datagrams.c ------------------------------------------------------------------------------- */

/* Callbacks for received datagrams: `datagram` for UD queue pairs, and `mad` for queue pair 1. */
struct soft_roce_datagram_ops {
	void (*datagram)(const struct soft_datagram *datagram, const uint8_t *payload,
			 uint32_t length);
	void (*mad)(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *mad,
		    size_t length);
};
void soft_roce_set_datagram_ops(const struct soft_roce_datagram_ops *ops);

/* Open the addresses of all devices to receive datagrams, until the matching
 * soft_roce_release_addresses(). Returns 0 or an errno value. After a failure, the caller must not
 * release them. */
int soft_roce_hold_addresses(void);
void soft_roce_release_addresses(void);
/* Returns whether other processes of this user receive packets at this address too. */
bool soft_roce_is_shared(const union ibv_gid *gid);
/* Send a datagram from an address opened by soft_roce_hold_addresses(). A datagram that cannot be
 * sent is dropped. Returns false if there is no room and the caller must retry later. */
bool soft_roce_send_datagram(const struct soft_datagram *datagram, const struct iovec *payload,
			     int count);
/* Send a management datagram (MAD) from queue pair 1 to the peer's queue pair 1. */
void soft_roce_send_mad(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *mad,
			size_t length);

/* Handle a datagram from a simulated network. The 64 bytes before `bytes` may be overwritten. */
void soft_roce_receive_simulated(const union ibv_gid *at, const union ibv_gid *from, uint16_t port,
				 uint8_t *bytes, size_t length);

extern const struct soft_subsystem soft_roce_subsystem;
