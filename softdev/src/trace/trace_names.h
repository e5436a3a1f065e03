/* Names of enum values in traces: the verbs identifiers without prefixes such as IBV_WC_. */
#pragma once

#include "softdev.h"

#define NAMES(number, ...)                                                                         \
	static const char *const names[] = {__VA_ARGS__};                                          \
	return (unsigned)(number) < sizeof(names) / sizeof(names[0]) && names[number]              \
		       ? names[number]                                                             \
		       : "UNKNOWN"
#define N(prefix, name) [IBV_##prefix##_##name] = #name

static inline const char *soft_wr_opcode_name(unsigned opcode)
{
	NAMES(opcode, N(WR, RDMA_WRITE), N(WR, RDMA_WRITE_WITH_IMM), N(WR, SEND),
	      N(WR, SEND_WITH_IMM), N(WR, RDMA_READ), N(WR, ATOMIC_CMP_AND_SWP),
	      N(WR, ATOMIC_FETCH_AND_ADD), N(WR, LOCAL_INV), N(WR, BIND_MW), N(WR, SEND_WITH_INV),
	      N(WR, TSO), N(WR, DRIVER1), N(WR, FLUSH), N(WR, ATOMIC_WRITE));
}

static inline const char *soft_wc_opcode_name(unsigned opcode)
{
	NAMES(opcode, N(WC, SEND), N(WC, RDMA_WRITE), N(WC, RDMA_READ), N(WC, COMP_SWAP),
	      N(WC, FETCH_ADD), N(WC, BIND_MW), N(WC, LOCAL_INV), N(WC, FLUSH), N(WC, ATOMIC_WRITE),
	      N(WC, RECV), N(WC, RECV_RDMA_WITH_IMM));
}

static inline const char *soft_wc_status_name(unsigned status)
{
	NAMES(status, N(WC, SUCCESS), N(WC, LOC_LEN_ERR), N(WC, LOC_QP_OP_ERR), N(WC, LOC_PROT_ERR),
	      N(WC, WR_FLUSH_ERR), N(WC, MW_BIND_ERR), N(WC, BAD_RESP_ERR), N(WC, LOC_ACCESS_ERR),
	      N(WC, REM_INV_REQ_ERR), N(WC, REM_ACCESS_ERR), N(WC, REM_OP_ERR),
	      N(WC, RETRY_EXC_ERR), N(WC, RNR_RETRY_EXC_ERR), N(WC, REM_ABORT_ERR),
	      N(WC, FATAL_ERR), N(WC, RESP_TIMEOUT_ERR), N(WC, GENERAL_ERR));
}

static inline const char *soft_qp_state_name(unsigned state)
{
	NAMES(state, N(QPS, RESET), N(QPS, INIT), N(QPS, RTR), N(QPS, RTS), N(QPS, SQD),
	      N(QPS, SQE), N(QPS, ERR));
}

static inline const char *soft_qp_type_name(unsigned type)
{
	NAMES(type, N(QPT, RC), N(QPT, UC), N(QPT, UD), N(QPT, XRC_SEND), N(QPT, XRC_RECV));
}

static inline const char *soft_event_name(unsigned type)
{
	NAMES(type, N(EVENT, CQ_ERR), N(EVENT, QP_FATAL), N(EVENT, QP_REQ_ERR),
	      N(EVENT, QP_ACCESS_ERR), N(EVENT, COMM_EST), N(EVENT, SQ_DRAINED),
	      N(EVENT, DEVICE_FATAL), N(EVENT, PORT_ACTIVE), N(EVENT, PORT_ERR),
	      N(EVENT, LID_CHANGE), N(EVENT, PKEY_CHANGE), N(EVENT, SM_CHANGE),
	      N(EVENT, SRQ_LIMIT_REACHED), N(EVENT, QP_LAST_WQE_REACHED),
	      N(EVENT, CLIENT_REREGISTER), N(EVENT, GID_CHANGE));
}

#undef N
#undef NAMES
