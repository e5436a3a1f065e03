/* Strings for enum values (ibv_wc_status_str(3), ibv_event_type_str(3) and similar). */
#include "softdev.h"

#define TEXT_OF(texts, number, unknown)                                                            \
	((unsigned)(number) < sizeof(texts) / sizeof((texts)[0]) && (texts)[number]                \
		 ? (texts)[number]                                                                 \
		 : (unknown))

const char *soft_ibv_wc_status_str(enum ibv_wc_status status)
{
	static const char *const texts[] = {
		[IBV_WC_SUCCESS] = "success",
		[IBV_WC_LOC_LEN_ERR] = "local length error",
		[IBV_WC_LOC_QP_OP_ERR] = "local QP operation error",
		[IBV_WC_LOC_EEC_OP_ERR] = "local EE context operation error",
		[IBV_WC_LOC_PROT_ERR] = "local protection error",
		[IBV_WC_WR_FLUSH_ERR] = "work request flushed",
		[IBV_WC_MW_BIND_ERR] = "memory window bind error",
		[IBV_WC_BAD_RESP_ERR] = "bad response",
		[IBV_WC_LOC_ACCESS_ERR] = "local access error",
		[IBV_WC_REM_INV_REQ_ERR] = "remote invalid request",
		[IBV_WC_REM_ACCESS_ERR] = "remote access error",
		[IBV_WC_REM_OP_ERR] = "remote operation error",
		[IBV_WC_RETRY_EXC_ERR] = "transport retries exceeded",
		[IBV_WC_RNR_RETRY_EXC_ERR] = "receiver-not-ready retries exceeded",
		[IBV_WC_LOC_RDD_VIOL_ERR] = "local RDD violation",
		[IBV_WC_REM_INV_RD_REQ_ERR] = "remote invalid RD request",
		[IBV_WC_REM_ABORT_ERR] = "remote abort",
		[IBV_WC_INV_EECN_ERR] = "invalid EE context number",
		[IBV_WC_INV_EEC_STATE_ERR] = "invalid EE context state",
		[IBV_WC_FATAL_ERR] = "fatal error",
		[IBV_WC_RESP_TIMEOUT_ERR] = "response timeout",
		[IBV_WC_GENERAL_ERR] = "general error",
		[IBV_WC_TM_ERR] = "tag matching error",
		[IBV_WC_TM_RNDV_INCOMPLETE] = "tag matching rendezvous incomplete",
	};

	return TEXT_OF(texts, status, "unknown status");
}

const char *soft_ibv_event_type_str(enum ibv_event_type event)
{
	static const char *const texts[] = {
		[IBV_EVENT_CQ_ERR] = "completion queue error",
		[IBV_EVENT_QP_FATAL] = "fatal queue pair error",
		[IBV_EVENT_QP_REQ_ERR] = "invalid request at a queue pair",
		[IBV_EVENT_QP_ACCESS_ERR] = "access violation at a queue pair",
		[IBV_EVENT_COMM_EST] = "communication established",
		[IBV_EVENT_SQ_DRAINED] = "send queue drained",
		[IBV_EVENT_PATH_MIG] = "path migrated",
		[IBV_EVENT_PATH_MIG_ERR] = "path migration failed",
		[IBV_EVENT_DEVICE_FATAL] = "fatal device error",
		[IBV_EVENT_PORT_ACTIVE] = "port active",
		[IBV_EVENT_PORT_ERR] = "port error",
		[IBV_EVENT_LID_CHANGE] = "LID changed",
		[IBV_EVENT_PKEY_CHANGE] = "P_Key table changed",
		[IBV_EVENT_SM_CHANGE] = "subnet manager changed",
		[IBV_EVENT_SRQ_ERR] = "shared receive queue error",
		[IBV_EVENT_SRQ_LIMIT_REACHED] = "shared receive queue limit reached",
		[IBV_EVENT_QP_LAST_WQE_REACHED] = "last work request reached",
		[IBV_EVENT_CLIENT_REREGISTER] = "client must register again",
		[IBV_EVENT_GID_CHANGE] = "GID table changed",
		[IBV_EVENT_WQ_FATAL] = "fatal work queue error",
	};

	return TEXT_OF(texts, event, "unknown event");
}

const char *soft_ibv_node_type_str(enum ibv_node_type node_type)
{
	static const char *const texts[] = {
		[IBV_NODE_CA] = "InfiniBand channel adapter",
		[IBV_NODE_SWITCH] = "InfiniBand switch",
		[IBV_NODE_ROUTER] = "InfiniBand router",
		[IBV_NODE_RNIC] = "iWARP NIC",
		[IBV_NODE_USNIC] = "usNIC",
		[IBV_NODE_USNIC_UDP] = "usNIC UDP",
		[IBV_NODE_UNSPECIFIED] = "unspecified",
	};

	return TEXT_OF(texts, node_type, "unknown");
}

const char *soft_ibv_port_state_str(enum ibv_port_state port_state)
{
	static const char *const texts[] = {
		[IBV_PORT_NOP] = "no state change (NOP)",
		[IBV_PORT_DOWN] = "down",
		[IBV_PORT_INIT] = "init",
		[IBV_PORT_ARMED] = "armed",
		[IBV_PORT_ACTIVE] = "active",
		[IBV_PORT_ACTIVE_DEFER] = "active defer",
	};

	return TEXT_OF(texts, port_state, "unknown");
}

const char *soft_rdma_event_str(enum rdma_cm_event_type event)
{
#define NAME(type)                                                                                 \
	case RDMA_CM_EVENT_##type:                                                                 \
		return "RDMA_CM_EVENT_" #type
	switch (event) {
		NAME(ADDR_RESOLVED);
		NAME(ADDR_ERROR);
		NAME(ROUTE_RESOLVED);
		NAME(ROUTE_ERROR);
		NAME(CONNECT_REQUEST);
		NAME(CONNECT_RESPONSE);
		NAME(CONNECT_ERROR);
		NAME(UNREACHABLE);
		NAME(REJECTED);
		NAME(ESTABLISHED);
		NAME(DISCONNECTED);
		NAME(DEVICE_REMOVAL);
		NAME(MULTICAST_JOIN);
		NAME(MULTICAST_ERROR);
		NAME(ADDR_CHANGE);
		NAME(TIMEWAIT_EXIT);
	}
#undef NAME
	return "UNKNOWN EVENT";
}
