/* Links between queue pairs, as the connection manager and softdev.c know them. link_internal.h
 * is the inside. */
#pragma once

#include "inject/inject.h"
#include "objects/objects.h"
#include "path/shm/shm.h"

extern const struct soft_subsystem soft_links_subsystem;
extern const struct soft_link_calls soft_links_calls;
extern const struct soft_fault_hooks soft_delay_hooks;

/* The connection manager: it is asked about each queue pair that comes to RTR.  True: it has the
 * queue pair's stream, and has handed it over or will. */
void soft_links_use_cm(bool (*offer)(struct soft_qp *qp));

/* soft_path_acceptor. */
void soft_handshake_requested(struct soft_path *path, uint32_t remote_id,
			      const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
void soft_handshake_withdrawn(struct soft_path *path, uint32_t remote_id);

/* May queue pairs of this host use shared memory?  What the environment says. */
bool soft_links_may_use_shm(void);
/* Are they of RoCE? */
bool soft_links_are_roce(void);

/* A queue pair in RTR or RTS that the CM did not know then, and now does, looks for its peer by
 * itself no more. */
void soft_qp_await_adoption(struct soft_qp *qp);

/* The CM hands over a connected TCP socket (non-blocking, TCP_NODELAY) as the queue pair's stream,
 * with what it has read beyond its own handshake.  The queue pair is in RTR or RTS.  Takes ownership
 * of the fd, also on failure.  Returns 0 or an errno value: EISCONN when there is a stream already,
 * EINVAL in another state. */
int soft_qp_adopt(struct soft_qp *qp, int fd, const void *already_read, size_t length);
/* The same where nothing has been read, and there may be a path that takes the stream's place: the
 * side that `opens` tries to attach at `shm_port`, if that is not 0, or else looks for a path that
 * an earlier stream of that kind has become, to the process with `path_port`.  The other side waits
 * for its selection. */
int soft_qp_adopt_or_attach(struct soft_qp *qp, int fd, uint16_t shm_port, uint16_t path_port,
			    bool opens);

/* aiordma_device_calls.wire */
enum aiordma_wire soft_qp_wire(struct ibv_qp *qp);
