/* The connection manager: what the rest of the device knows of it.  Its calls are those of
 * librdmacm (abi/calls.h); cm_internal.h has what its sources share. */
#ifndef AIORDMA_SOFTDEV_CM_H
#define AIORDMA_SOFTDEV_CM_H

#include "engine/engine.h"

struct soft_qp;

/* For soft_wire_use_cm: the queue pair has come to RTR with an address whose LID is 0.  It adopts
 * the stream of its handshake at once if the other side was quicker than the application. */
void soft_cm_offer(struct soft_qp *qp);

extern const struct soft_subsystem soft_cm_subsystem;

#endif
