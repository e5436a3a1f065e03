/* The connection manager: what the rest of the device knows of it.  Its calls are those of
 * librdmacm (abi/calls.h); cm_internal.h has what its sources share. */
#ifndef AIORDMA_SOFTDEV_CM_H
#define AIORDMA_SOFTDEV_CM_H

#include "engine/engine.h"

struct rdma_cm_id;
struct soft_qp;

/* For soft_wire_use_cm: the queue pair has come to RTR.  True: it and its peer are the two that an id
 * connects.  It adopts the stream of the handshake at once if the other side was quicker than the
 * application. */
bool soft_cm_offer(struct soft_qp *qp);

/* `withdrawn` of abi/device_calls.h. */
int soft_cm_withdrawn(struct rdma_cm_id *application);

extern const struct soft_subsystem soft_cm_subsystem;

/* From the beginning on: once the connection manager has opened the device, that stays open until the
 * process ends, with the engine and its thread. */
void soft_cm_keep_device(bool keep);

#endif
