/* The interface of links between queue pairs for the connection manager and softdev.c.
 * link_internal.h contains the rest. */
#pragma once

#include "inject/inject.h"
#include "objects/objects.h"
#include "path/shm/shm.h"

extern const struct soft_subsystem soft_links_subsystem;
extern const struct soft_link_calls soft_links_calls;
extern const struct soft_fault_hooks soft_delay_hooks;

/* Set the callback of the connection manager for each queue pair that enters RTR. It returns true
 * if it has handed over the queue pair's stream, or will do so. */
void soft_links_use_cm(bool (*offer)(struct soft_qp *qp));

/* callbacks of soft_path_acceptor */
void soft_handshake_requested(struct soft_path *path, uint32_t remote_id,
			      const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
void soft_handshake_withdrawn(struct soft_path *path, uint32_t remote_id);

/* Returns whether the environment allows shared memory between queue pairs of this host. */
bool soft_links_may_use_shm(void);
/* Returns whether links use RoCE v2. */
bool soft_links_are_roce(void);

/* Stop searching for the peer of a queue pair in RTR or RTS, because the CM has meanwhile taken
 * charge of it. */
void soft_qp_await_adoption(struct soft_qp *qp);

/* Adopt a connected TCP socket from the CM (non-blocking, TCP_NODELAY) as the stream of a queue
 * pair in RTR or RTS, with the data that the CM has read beyond its own handshake. Takes ownership
 * of the fd even on failure. Returns 0, EISCONN if there is a stream already, EINVAL in another
 * state, or another errno value. */
int soft_qp_adopt(struct soft_qp *qp, int fd, const void *already_read, size_t length);
/* Adopt a socket from which nothing has been read, unless there is a path that can replace the
 * stream. The side that `opens` tries to attach at `shm_port` unless it is 0, and otherwise looks
 * for a path to the process with `path_port` that an earlier stream has become. The other side
 * waits for its selection. */
int soft_qp_adopt_or_attach(struct soft_qp *qp, int fd, uint16_t shm_port, uint16_t path_port,
			    bool opens);

/* implements aiordma_device_calls.wire */
enum aiordma_wire soft_qp_wire(struct ibv_qp *qp);
