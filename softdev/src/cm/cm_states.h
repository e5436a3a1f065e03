/* The states of an rdma_cm_id, and which calls are allowed in which state.
 *
 * A single table (cm_states.c) decides, so that no call checks states on its own. The real library
 * reports a call in the wrong state as EINVAL, even if the manual pages do not say so.
 */
#pragma once

enum soft_cm_state {
	SOFT_CM_IDLE,           /* rdma_create_id */
	SOFT_CM_BOUND,          /* rdma_bind_addr */
	SOFT_CM_ADDR_RESOLVED,  /* rdma_resolve_addr */
	SOFT_CM_ROUTE_RESOLVED, /* rdma_resolve_route */
	SOFT_CM_LISTENING,      /* rdma_listen */
	SOFT_CM_CONNECTING,     /* active: rdma_connect, waiting for REP */
	SOFT_CM_RESPONDED,      /* active without its own QP: reported CONNECT_RESPONSE */
	SOFT_CM_REQUESTED,      /* passive: reported CONNECT_REQUEST */
	SOFT_CM_ACCEPTED,       /* passive: rdma_accept, waiting for RTU */
	SOFT_CM_CONNECTED,
	SOFT_CM_DISCONNECTED,   /* was connected */
	SOFT_CM_FAILED,         /* rejected, unreachable, or lost before it was connected */
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

/* Returns 0, or the errno value of the call in this state. */
int soft_cm_allowed(enum soft_cm_state state, enum soft_cm_call call);
