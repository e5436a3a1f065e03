/* Shared memory with local peers. A peer is another process on this host that uses the device, or
 * this process itself.
 *
 * Two processes of one user attach to each other once for each pair of their devices (attach.c).
 * After that they share two rings (ring.h), which form a path (path.h) between them. All functions
 * require the engine's lock.
 */
#pragma once

#include <sys/types.h>

#include "cma.h"
#include "copy.h"
#include "path/path.h"

struct soft_shm_peer;

/* Get the path from our device with port bit `own_port` to device `hca_number` of the process with
 * TCP port `ip_port` in this network namespace. `ip_port` may be our own port. Starts attaching to
 * another process if necessary, and may return the path before both sides are attached. Returns
 * NULL if only TCP can be used, because `ip_port` is 0, or because the process does not exist,
 * belongs to another user, or cannot share memory. */
struct soft_path *soft_shm_path_at(uint16_t ip_port, uint32_t own_port, int hca_number);
/* Returns whether the path leads through shared memory to this process itself. */
bool soft_shm_path_is_self(const struct soft_path *path);

/* Returns the path's cross-memory attach state. Returns NULL if the path does not use shared
 * memory, or if all its data goes through the rings because the state could not be created. */
struct soft_cma *soft_shm_path_cma(const struct soft_path *path);
/* Iterate over the cross-memory attach states of all peers. Returns the state after `cma`, the
 * first one if `cma` is NULL, or NULL at the end. */
struct soft_cma *soft_cma_next(const struct soft_cma *cma);
/* Find out whether this process may copy from the peer. Call this when a link to the peer is up,
 * because both sides have mapped the segment by then. */
void soft_cma_probe_path(struct soft_path *path);

/* Open a loopback channel on our device with port bit `own_port`. Returns 0 or an errno value. */
int soft_shm_chan_to_self(struct soft_chan *chan, uint32_t own_port);

extern const struct soft_subsystem soft_shm_subsystem;

/* Start accepting peers at a port. Returns false and sets errno to EADDRINUSE if the name is in
 * use. After any other failure, no process can attach to this one, and links use TCP. */
bool soft_attach_listen(uint16_t port);
void soft_attach_unlisten(void);
