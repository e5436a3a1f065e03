/* Table of the calls that each state of an rdma_cm_id allows. */
#include "cm_states.h"

#include <errno.h>

#define CALL(name) (1u << SOFT_CM_CALL_##name)

/* Calls allowed in each state. All other calls fail with EINVAL.
 *
 *   IDLE                  rdma_listen binds to the IPv4 wildcard address, as in librdmacm.
 *   CONNECTING and later  rdma_disconnect succeeds even if there is no connection, because both
 *                         sides are expected to call it (rdma_disconnect(3)).
 *   ACCEPTED              rdma_reject may revoke an rdma_accept until RTU arrives (IBTA 12.9).
 */
static const unsigned int allowed[SOFT_CM_STATES] = {
	[SOFT_CM_IDLE] = CALL(BIND) | CALL(RESOLVE_ADDR) | CALL(LISTEN) | CALL(SET_REUSEADDR) |
			 CALL(SET_AFONLY),
	[SOFT_CM_BOUND] = CALL(RESOLVE_ADDR) | CALL(LISTEN) | CALL(JOIN) | CALL(SET_REUSEADDR) |
			  CALL(SET_AFONLY),
	[SOFT_CM_ADDR_RESOLVED] = CALL(RESOLVE_ROUTE) | CALL(JOIN) | CALL(SET_REUSEADDR),
	[SOFT_CM_ROUTE_RESOLVED] = CALL(CONNECT) | CALL(JOIN) | CALL(SET_REUSEADDR),
	[SOFT_CM_LISTENING] = 0,
	[SOFT_CM_CONNECTING] = CALL(REJECT) | CALL(DISCONNECT) | CALL(SET_REUSEADDR),
	[SOFT_CM_RESPONDED] =
		CALL(ESTABLISH) | CALL(REJECT) | CALL(DISCONNECT) | CALL(SET_REUSEADDR),
	[SOFT_CM_REQUESTED] = CALL(ACCEPT) | CALL(REJECT) | CALL(DISCONNECT) | CALL(SET_REUSEADDR),
	[SOFT_CM_ACCEPTED] = CALL(REJECT) | CALL(DISCONNECT) | CALL(NOTIFY) | CALL(SET_REUSEADDR),
	[SOFT_CM_CONNECTED] = CALL(DISCONNECT) | CALL(SET_REUSEADDR),
	[SOFT_CM_DISCONNECTED] = CALL(DISCONNECT) | CALL(SET_REUSEADDR),
	[SOFT_CM_FAILED] = CALL(DISCONNECT) | CALL(SET_REUSEADDR),
};

int soft_cm_allowed(enum soft_cm_state state, enum soft_cm_call call)
{
	/* rdma_notify(3) fails with EISCONN if the connection is already established. */
	if (state == SOFT_CM_CONNECTED && call == SOFT_CM_CALL_NOTIFY)
		return EISCONN;
	return allowed[state] & 1u << call ? 0 : EINVAL;
}
