/* Moves an id's queue pair through its states, and implements rdma_init_qp_attr(3).
 *
 * As in librdmacm, a queue pair created with the id is immediately moved to INIT, so that receives
 * can be posted. A connected queue pair moves to RTR and RTS in rdma_accept or when REP arrives. A
 * datagram queue pair moves to RTS immediately. An application that creates its own queue pair gets
 * the attributes from rdma_init_qp_attr and changes the state itself.
 */
#include "cm_internal.h"

#include <sys/random.h>

enum {
	RETRIES = 7,      /* maximum of the 3-bit field, and default */
	ACK_TIMEOUT = 18, /* 4.096 us * 2^18 = 1.1 s, as used by the kernel for RoCE */
};

uint32_t soft_cm_random_psn(void)
{
	uint32_t psn;

	if (soft_device.platform->random(&psn, sizeof(psn), GRND_NONBLOCK) != sizeof(psn))
		psn = (uint32_t)soft_now(); /* no entropy yet, early during boot */
	return psn & SOFT_PSN_MASK;
}

/* ---- parameters ---------------------------------------------------------------------------- */

static bool exceeds_max_depth(uint8_t depth)
{
	return depth != RDMA_MAX_RESP_RES && depth > SOFT_MAX_RD_ATOMIC;
}

struct ibv_qp *soft_cm_qp(const struct soft_cm_id *id)
{
	struct ibv_qp *qp = id->id.qp;

	if (qp && id->created_qpn && soft_qp_find(id->created_qpn) != soft_qp_of(qp))
		return NULL;
	return qp;
}

int soft_cm_check_parameters(const struct soft_cm_id *id, const struct rdma_conn_param *parameters,
			     enum soft_cm_type type)
{
	if (!parameters)
		return soft_cm_qp(id) ? 0 : EINVAL; /* queue pair number unknown */
	if (exceeds_max_depth(parameters->responder_resources) ||
	    exceeds_max_depth(parameters->initiator_depth))
		return EINVAL;
	if (!soft_cm_qp(id) && parameters->qp_num > SOFT_PSN_MASK)
		return EINVAL;
	if (parameters->private_data &&
	    parameters->private_data_len > soft_cm_max_private_data(type))
		return EINVAL;
	return 0;
}

uint8_t soft_cm_depth(uint8_t wanted, uint8_t fallback)
{
	uint8_t depth = wanted == RDMA_MAX_RESP_RES ? fallback : wanted;

	return depth < SOFT_MAX_RD_ATOMIC ? depth : SOFT_MAX_RD_ATOMIC;
}

/* Limit a retry count to 3 bits (rdma_connect(3)). */
static uint8_t clamp_retries(uint8_t wanted)
{
	return wanted < RETRIES ? wanted : RETRIES;
}

void soft_cm_fill_message(const struct soft_cm_id *id, const struct rdma_conn_param *parameters,
			  struct soft_cm_message *message)
{
	const struct ibv_qp *qp = soft_cm_qp(id);

	message->qpn = id->qpn;
	message->psn = id->psn;
	message->responder_resources = id->responder_resources;
	message->initiator_depth = id->initiator_depth;
	message->retry_count = clamp_retries(parameters ? parameters->retry_count : RETRIES);
	message->rnr_retry_count =
		clamp_retries(parameters ? parameters->rnr_retry_count : RETRIES);
	if (!qp) /* queue pairs of the embedded device have no ECE options */
		message->ece = id->local_ece;
	message->srq = qp ? qp->srq != NULL : parameters && parameters->srq;
	if (!parameters)
		return;
	message->flow_control = parameters->flow_control != 0;
	(void)soft_cm_put_private(message, parameters->private_data, parameters->private_data_len);
}

/* ---- attributes ---------------------------------------------------------------------------- */

static uint8_t gid_index(const union ibv_gid *gid)
{
	int index = soft_gid_index(soft_hca_at(soft_gid_hca_number(gid)), gid);

	return index < 0 ? 0 : (uint8_t)index;
}

void soft_cm_fill_address_vector(const struct soft_cm_id *id, struct ibv_ah_attr *vector)
{
	const struct rdma_ib_addr *gids = &id->id.route.addr.addr.ibaddr;

	memset(vector, 0, sizeof(*vector));
	vector->is_global = 1;
	vector->port_num = id->id.port_num;
	vector->grh.dgid = gids->dgid;
	vector->grh.sgid_index = gid_index(&gids->sgid);
	vector->grh.hop_limit = 64;
	vector->grh.traffic_class = id->tos;
}

/* Fill in the attributes for the transition to attr->qp_state. Returns the attribute mask. */
static int fill_attributes(const struct soft_cm_id *id, enum ibv_qp_type type,
			   struct ibv_qp_attr *attr)
{
	int mask = IBV_QP_STATE;

	switch (attr->qp_state) {
	case IBV_QPS_INIT:
		/* Allow remote writes on any connection, but reads and atomics only with responder
		 * resources. Each memory region restricts access further. */
		attr->pkey_index = 0;
		attr->port_num = id->id.port_num;
		attr->qp_access_flags = 0;
		if (id->state >= SOFT_CM_CONNECTING) {
			attr->qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
			if (id->responder_resources)
				attr->qp_access_flags |=
					IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
		}
		return mask | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	case IBV_QPS_RTR:
		soft_cm_fill_address_vector(id, &attr->ah_attr);
		attr->path_mtu = id->path_mtu ? (enum ibv_mtu)id->path_mtu : IBV_MTU_4096;
		attr->dest_qp_num = id->remote_qpn;
		attr->rq_psn = id->psn;
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
		if (type == IBV_QPT_RC) {
			attr->max_dest_rd_atomic = id->responder_resources;
			attr->min_rnr_timer = 0; /* 655 ms (rdma_connect(3)) */
			mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
		}
		return mask;
	case IBV_QPS_RTS:
		attr->sq_psn = id->remote_psn;
		mask |= IBV_QP_SQ_PSN;
		if (type == IBV_QPT_RC) {
			attr->timeout = id->ack_timeout_set ? id->ack_timeout : ACK_TIMEOUT;
			attr->retry_cnt = id->retry_count;
			attr->rnr_retry = id->rnr_retry_count;
			attr->max_rd_atomic = id->initiator_depth;
			mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				IBV_QP_MAX_QP_RD_ATOMIC;
		}
		return mask;
	default:
		return mask;
	}
}

/* Returns whether the peer's parameters, which RTR and RTS require, are known. The passive side
 * receives them in REQ, the active side in REP. */
static bool is_peer_known(const struct soft_cm_id *id)
{
	return id->state == SOFT_CM_RESPONDED || id->state == SOFT_CM_REQUESTED ||
	       id->state == SOFT_CM_ACCEPTED || id->state == SOFT_CM_CONNECTED;
}

/* Fill in the attributes of a datagram queue pair, which is not connected to a peer. The attributes
 * are therefore the same in every state (IBTA 11.2.5.2). Returns the attribute mask. */
static int datagram_attributes(const struct soft_cm_id *id, struct ibv_qp_attr *attr)
{
	attr->pkey_index = 0;
	attr->port_num = id->id.port_num;
	attr->qkey = RDMA_UDP_QKEY;
	return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
}

static bool may_enter(const struct soft_cm_id *id, enum ibv_qp_state state)
{
	if (state == IBV_QPS_INIT)
		return id->state != SOFT_CM_DISCONNECTED && id->state != SOFT_CM_FAILED;
	return (state == IBV_QPS_RTR || state == IBV_QPS_RTS) && is_peer_known(id);
}

static int init_qp_attr(const struct soft_cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
	const struct ibv_qp *qp = soft_cm_qp(id);

	if (!id->bound || (!soft_cm_is_datagram_id(id) && !may_enter(id, attr->qp_state)))
		return EINVAL;
	*mask = soft_cm_is_datagram_id(id)
			? datagram_attributes(id, attr)
			: fill_attributes(id, qp ? qp->qp_type : id->id.qp_type, attr);
	return 0;
}

int soft_rdma_init_qp_attr(struct rdma_cm_id *application, struct ibv_qp_attr *qp_attr,
			   int *qp_attr_mask)
{
	struct soft_cm_id *id;

	if (!qp_attr || !qp_attr_mask)
		return soft_cm_fail(EINVAL);
	id = soft_cm_enter(application);
	return id ? soft_cm_leave(init_qp_attr(id, qp_attr, qp_attr_mask)) : -1;
}

/* ---- states -------------------------------------------------------------------------------- */

static int move_qp(struct soft_cm_id *id, struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = {.qp_state = state};
	int mask;

	if (!soft_cm_is_datagram_id(id))
		mask = fill_attributes(id, qp->qp_type, &attr);
	else if (state == IBV_QPS_INIT)
		mask = datagram_attributes(id, &attr);
	else /* RTR requires no attributes, and RTS only a PSN (IBTA 11.2.5.2) */
		mask = IBV_QP_STATE | (state == IBV_QPS_RTS ? IBV_QP_SQ_PSN : 0);
	/* The route need not be checked again. Either address resolution found it, or a message
	 * from the peer has just arrived. */
	return soft_modify_qp_locked(qp, &attr, mask,
				     soft_gid_is_local(&id->id.route.addr.addr.ibaddr.sgid));
}

int soft_cm_qp_start(struct soft_cm_id *id, struct ibv_qp *qp, bool peer_known)
{
	const enum ibv_qp_state last =
		peer_known || soft_cm_is_datagram_id(id) ? IBV_QPS_RTS : IBV_QPS_INIT;
	int error = 0;

	for (enum ibv_qp_state state = IBV_QPS_INIT; state <= last && !error; state++)
		error = move_qp(id, qp, state);
	return error;
}

void soft_cm_qp_error(struct soft_cm_id *id)
{
	struct ibv_qp *qp = soft_cm_qp(id);

	if (qp)
		(void)move_qp(id, qp, IBV_QPS_ERR); /* allowed in every state, including ERR */
}
