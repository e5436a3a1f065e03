/* Interface of the link folder for the connection manager and softdev.c. link_internal.h declares
 * the rest. */
#pragma once

#include "inject/inject.h"
#include "objects/objects.h"
#include "path/shm/shm.h"

extern const struct soft_subsystem soft_links_subsystem;
extern const struct soft_link_calls soft_links_calls;
extern const struct soft_fault_hooks soft_delay_hooks;

/* Set the CM's callback for queue pairs that enter RTR. The callback returns true if the CM has
 * handed over the queue pair's stream or will do so later. */
void soft_links_use_cm(bool (*handle_rtr)(struct soft_qp *qp));

/* Create a pending link for a channel that a peer has requested, and accept or refuse it now or
 * later (soft_path_acceptor.requested). */
void soft_handshake_requested(struct soft_path *path, uint32_t remote_id,
			      const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
/* Drop the pending link whose channel request the peer has withdrawn. If `remote_id` is 0, drop all
 * pending links of the path (soft_path_acceptor.withdrawn). */
void soft_handshake_withdrawn(struct soft_path *path, uint32_t remote_id);

/* Returns whether the environment allows shared memory between queue pairs on this host. */
bool soft_links_may_use_shm(void);
/* Returns whether links use RoCE v2. */
bool soft_links_are_roce(void);

/* Stop connecting a queue pair in RTR or RTS to its peer, because the CM will provide the
 * stream. */
void soft_qp_await_adoption(struct soft_qp *qp);

/* Adopt a connected TCP socket from the CM (non-blocking, TCP_NODELAY) as the stream of a queue
 * pair in RTR or RTS. `already_read` contains the data that the CM has read beyond its own
 * handshake. Takes ownership of `fd`, even on failure. Returns 0, EISCONN if there is a stream
 * already, EINVAL in another state, or another errno value. */
int soft_qp_adopt(struct soft_qp *qp, int fd, const void *already_read, size_t length);
/* Adopt a CM socket from which nothing has been read, or use an existing path instead. If
 * `is_initiator` is set, this side selects the path. It attaches to shared memory at `shm_port`. If
 * `shm_port` is 0 or shared memory is disabled, it looks for a TCP path from an earlier stream to
 * the process at `path_port`. If `is_initiator` is not set, the peer selects the path. Takes
 * ownership of `fd`, even on failure. Returns 0 or an errno value. */
int soft_qp_adopt_or_attach(struct soft_qp *qp, int fd, uint16_t shm_port, uint16_t path_port,
			    bool is_initiator);

/* Returns the medium that carries the queue pair's frames. Implements aiordma_device_calls.wire. */
enum aiordma_wire soft_qp_wire(struct ibv_qp *qp);
