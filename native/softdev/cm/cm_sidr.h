/* Datagram services: what cm_sidr_request.c (the client) and cm_sidr_service.c (the service) have
 * in common. */
#ifndef AIORDMA_SOFTDEV_CM_SIDR_H
#define AIORDMA_SOFTDEV_CM_SIDR_H

#include "cm_internal.h"
#include "cm_sidr_wire.h"

/* The request of an id, until it is answered. */
struct soft_cm_sidr_query {
	struct soft_fd_watch watch; /* the id's socket, connected to the service's port */
	struct soft_timer again;
	struct soft_cm_id *id;
	uint64_t deadline;
	uint64_t insists_until; /* as soft_cm_link_insist */
	uint64_t pause_ns; /* until it is repeated; doubles */
	uint64_t number;
	bool heard;
	size_t length;
	uint8_t bytes[SOFT_SIDR_MAX];
};

/* A service's socket; it is there as long as the listener, or a request that waits for its answer.
 */
struct soft_cm_service;

/* A received request, kept in order to be answered. */
struct soft_cm_sidr_client {
	struct soft_node node; /* of the service: all requests whose id is there */
	struct soft_cm_service *service; /* NULL: answered, and the listener is gone */
	bool answered;
	uint64_t number;
	struct sockaddr_storage address;
	struct sockaddr_storage local; /* where the request came to */
	unsigned interface; /* and through which network interface (IPv6) */
	size_t length; /* of the answer */
	uint8_t bytes[SOFT_SIDR_MAX];
};

#endif
