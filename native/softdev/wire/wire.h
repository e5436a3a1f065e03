/* Links between queue pairs, as the connection manager and softdev.c know them. link.h is the
 * inside. */
#ifndef AIORDMA_SOFTDEV_WIRE_H
#define AIORDMA_SOFTDEV_WIRE_H

#include "inject/inject.h"
#include "objects/objects.h"
#include "shm/shm.h"

extern const struct soft_subsystem soft_wire_subsystem;
extern const struct soft_link_calls soft_wire_links;
extern const struct soft_fault_hooks soft_delay_hooks;

/* The connection manager: it is told of each queue pair that has come to RTR with an address whose
 * dlid is 0, which means that the CM has its stream. */
void soft_wire_use_cm(void (*offer)(struct soft_qp *qp));

/* soft_shm_acceptor. */
void soft_handshake_requested(struct soft_shm_peer *peer, uint32_t remote_id,
			      const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
void soft_handshake_withdrawn(struct soft_shm_peer *peer, uint32_t remote_id);

/* May queue pairs of this host use shared memory?  What the environment says. */
bool soft_links_may_use_shm(void);

/* The CM hands over a connected TCP socket (non-blocking, TCP_NODELAY) as the queue pair's stream,
 * with what it has read beyond its own handshake.  The queue pair is in RTR or RTS, brought there
 * with an address whose dlid is 0 (which means: the stream comes from the CM).  Takes ownership of
 * the fd, also on failure.  Returns 0 or an errno value: EISCONN when there is a stream already,
 * EINVAL in another state. */
int soft_qp_adopt(struct soft_qp *qp, int fd, const void *already_read, size_t length);
/* The same where both sides can use shared memory instead, and nothing has been read: the side that
 * `opens` tries to attach to `lid`, the other one waits for its selection. */
int soft_qp_adopt_or_attach(struct soft_qp *qp, int fd, uint16_t lid, bool opens);

/* aiordma_device_calls.wire */
enum aiordma_wire soft_qp_wire(struct ibv_qp *qp);

#endif
