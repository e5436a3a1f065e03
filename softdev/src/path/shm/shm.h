/* Shared memory with local peers: other processes of this host that use the device, and this
 * process itself.
 *
 * Two processes of one user attach to each other once for each pair of their devices (attach.c).
 * From then on they share two rings (ring.h), which form a path (path.h) between them. All
 * functions require the engine's lock.
 */
#pragma once

#include <sys/types.h>

#include "cma.h"
#include "copy.h"
#include "path/path.h"

struct soft_shm_peer;

/* Returns the path from our device with this port bit to device `hca_number` of the process at a
 * TCP port of this network namespace, which may still be attaching. For our own port, the peer is
 * this process. Returns NULL if there is no such process, or it belongs to another user, or has no
 * shared memory, so that only TCP is possible. */
struct soft_path *soft_shm_path_at(uint16_t ip_port, uint32_t own_port, int hca_number);
/* Returns whether the path is over shared memory. */
bool soft_shm_path_is_self(const struct soft_path *path);

/* Returns NULL if there was no memory for it, so that everything goes through the rings, and for
 * other kinds of paths. */
struct soft_cma *soft_shm_path_cma(const struct soft_path *path);
/* Iterate over the state of all peers: returns the one after `cma`, or the first one for NULL.
 * Returns NULL at the end. */
struct soft_cma *soft_cma_next(const struct soft_cma *cma);
/* Find out what can be copied when a link to the peer is up, so that both sides have the
 * segment. */
void soft_cma_probe_path(struct soft_path *path);

/* Open a channel that begins and ends at the same device. Returns 0 or an errno value. */
int soft_shm_chan_to_self(struct soft_chan *chan, uint32_t own_port);

extern const struct soft_subsystem soft_shm_subsystem;

/* Start and stop accepting peers at a port. Returns false with EADDRINUSE if the name is in use.
 * After any other failure, no process can attach to this one, and links use TCP. */
bool soft_attach_listen(uint16_t port);
void soft_attach_unlisten(void);
