/* States of an rdma_cm_id, and the calls allowed in each state.
 *
 * All API calls look up the id's state in a single table (cm_states.c) instead of testing the state
 * themselves. As in librdmacm, a call in the wrong state fails with EINVAL. The manual pages do not
 * always mention this error.
 */
#pragma once

enum soft_cm_state {
	SOFT_CM_IDLE,           /* rdma_create_id */
	SOFT_CM_BOUND,          /* rdma_bind_addr */
	SOFT_CM_ADDR_RESOLVED,  /* rdma_resolve_addr */
	SOFT_CM_ROUTE_RESOLVED, /* rdma_resolve_route */
	SOFT_CM_LISTENING,      /* rdma_listen */
	SOFT_CM_CONNECTING,     /* active: waiting for REP after rdma_connect */
	SOFT_CM_RESPONDED,      /* active, no id->qp: CONNECT_RESPONSE reported */
	SOFT_CM_REQUESTED,      /* passive: CONNECT_REQUEST reported */
	SOFT_CM_ACCEPTED,       /* passive: waiting for RTU after rdma_accept */
	SOFT_CM_CONNECTED,
	SOFT_CM_DISCONNECTED,   /* connection ended */
	SOFT_CM_FAILED,         /* rejected, unreachable, or lost before being connected */
	SOFT_CM_STATES
};

enum soft_cm_call {
	SOFT_CM_CALL_BIND,
	SOFT_CM_CALL_RESOLVE_ADDR,
	SOFT_CM_CALL_RESOLVE_ROUTE,
	SOFT_CM_CALL_LISTEN,
	SOFT_CM_CALL_CONNECT,
	SOFT_CM_CALL_ESTABLISH,
	SOFT_CM_CALL_ACCEPT,
	SOFT_CM_CALL_REJECT,
	SOFT_CM_CALL_DISCONNECT,
	SOFT_CM_CALL_NOTIFY,
	SOFT_CM_CALL_JOIN, /* join a multicast group */
	SOFT_CM_CALL_SET_REUSEADDR,
	SOFT_CM_CALL_SET_AFONLY,
	SOFT_CM_CALLS
};

/* Returns 0 if the state allows the call, otherwise the errno value with which the call fails. */
int soft_cm_allowed(enum soft_cm_state state, enum soft_cm_call call);
