/* The connection manager, as seen by the rest of the device. Applications call it through the
 * functions of librdmacm (abi/calls.h). Its sources share cm_internal.h. */
#pragma once

#include "engine/engine.h"

union ibv_gid;
struct rdma_cm_id;
struct soft_qp;

/* Handle a queue pair that has moved to RTR (for soft_links_use_cm). Returns true if an id connects
 * this queue pair and its peer. If the handshake is already over, hands the id's stream over to
 * the queue pair. */
bool soft_cm_handle_rtr(struct soft_qp *qp);

/* Returns whether the peer has withdrawn the connection request of this id, which the application
 * has not accepted yet. Implements `withdrawn` of abi/device_calls.h. */
int soft_cm_withdrawn(struct rdma_cm_id *application);

/* Functions for sending MADs through queue pair 1, which only some kinds of link have. MADs may be
 * lost, duplicated, delayed or reordered. */
struct soft_gsi_calls {
	/* Keep this host's addresses open for a listener or a conversation. Returns 0 or an errno
	 * value. */
	int (*hold)(void);
	void (*release)(void);
	/* Returns whether other processes also receive the MADs sent to this address. */
	bool (*is_shared)(const union ibv_gid *gid);
	void (*send)(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *mad,
		     size_t length);
};

/* Use MADs to connect and to find datagram services. If `calls` is NULL, use streams and the
 * device's own datagrams instead. The caller must hold the lock. */
void soft_cm_use_gsi(const struct soft_gsi_calls *calls);
/* Handle a datagram received by queue pair 1. The caller must hold the lock. */
void soft_cm_mad_received(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *bytes,
			  size_t length);

extern const struct soft_subsystem soft_cm_subsystem;

/* Keep the device, the engine and its thread until the process ends, once the connection manager
 * has opened the device. Must be set before that. */
void soft_cm_keep_device(bool keep);
