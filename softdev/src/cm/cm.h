/* The connection manager: what the rest of the device knows of it.  Its calls are those of
 * librdmacm (abi/calls.h); cm_internal.h has what its sources share. */
#pragma once

#include "engine/engine.h"

union ibv_gid;
struct rdma_cm_id;
struct soft_qp;

/* For soft_links_use_cm: the queue pair has come to RTR.  True: it and its peer are the two that an id
 * connects.  It adopts the stream of the handshake at once if the other side was quicker than the
 * application. */
bool soft_cm_offer(struct soft_qp *qp);

/* `withdrawn` of abi/device_calls.h. */
int soft_cm_withdrawn(struct rdma_cm_id *application);

/* Queue pair 1 of this host, where a path has one: MADs that are sent may get lost, and come doubled, late
 * and in another order. */
struct soft_gsi_calls {
	/* What listens or converses holds this host's addresses open: 0, or an errno value. */
	int (*hold)(void);
	void (*release)(void);
	/* Do other processes get what comes for this address too? */
	bool (*is_shared)(const union ibv_gid *gid);
	void (*send)(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *mad,
		     size_t length);
};

/* From now on connections are made, and datagram services found, by MADs; NULL: by streams, and the device's
 * own datagrams.  With the lock. */
void soft_cm_use_gsi(const struct soft_gsi_calls *calls);
/* A datagram has come to queue pair 1.  With the lock. */
void soft_cm_mad_received(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *bytes,
			  size_t length);

extern const struct soft_subsystem soft_cm_subsystem;

/* From the beginning on: once the connection manager has opened the device, that stays open until the
 * process ends, with the engine and its thread. */
void soft_cm_keep_device(bool keep);
