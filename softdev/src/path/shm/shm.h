/* Shared memory with local peers: the other processes of this host that have the device, and this
 * process itself.
 *
 * Two processes of one user attach to each other once for each pair of their devices (attach.c) and
 * from then on share two rings (ring.h), which are a path (path.h) between them.  Everything here is
 * called with the engine's lock.
 */
#pragma once

#include <sys/types.h>

#include "cma.h"
#include "copy.h"
#include "path/path.h"

struct soft_shm_peer;

/* From the device of this process with that port's bit to the device with that number of the process
 * at that TCP port of this network namespace, attached or attaching; this process for its own.  NULL:
 * there is none, or it is of another user, or has no shared memory: there is only TCP. */
struct soft_path *soft_shm_path_at(uint16_t ip_port, uint32_t own_port, int hca_number);
/* Is it the rings of a process of this host and user? */
bool soft_shm_path_is_self(const struct soft_path *path);

/* NULL if there was no memory for it: then everything goes through the rings; and of other paths. */
struct soft_cma *soft_shm_path_cma(const struct soft_path *path);
/* Of every peer, one after the other: that after `cma`, NULL the first; NULL: no more. */
struct soft_cma *soft_cma_next(const struct soft_cma *cma);
/* A link to the peer is up, so both sides have the segment: find out what can be copied. */
void soft_cma_probe_path(struct soft_path *path);

/* A channel that begins and ends at that device, open at once.  0 or an errno value. */
int soft_shm_chan_to_self(struct soft_chan *chan, uint32_t own_port);

extern const struct soft_subsystem soft_shm_subsystem;

/* Let peers attach at this port; no more.  False (EADDRINUSE): its name is taken.  Should anything
 * else fail, no process can attach to this one, and links use TCP. */
bool soft_attach_listen(uint16_t port);
void soft_attach_unlisten(void);
