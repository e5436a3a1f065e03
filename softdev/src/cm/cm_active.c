/* The active side: rdma_connect(3), rdma_establish(3), and the responses to REQ.
 *
 * The peer's connection manager must send MRA, REP or REJ within soft_cm_limits.response_ms of
 * rdma_connect. Otherwise the connection fails with UNREACHABLE. After MRA, the peer's application
 * must respond within soft_cm_limits.service_ms.
 *
 * The request is REJECTED with "invalid service ID" if the port still has no listener after
 * soft_cm_limits.no_listener_ms, or if the peer closes the connection without a response. On
 * InfiniBand, the connection manager of the peer's host sends this rejection.
 */
#include "cm_internal.h"

#include "link/link.h"

static bool is_unreachable(int error)
{
	return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
	       error == EHOSTDOWN || error == ENETDOWN;
}

/* Fail the id and report why. If the connection was refused, or closed before the peer had sent any
 * message, report the rejection that the peer's CM would send for a port without a listener. */
static void connect_failed(struct soft_cm_id *id, int error)
{
	const struct soft_cm_message no_listener = {.type = SOFT_CM_REJ,
						    .private_data_len = SOFT_CM_REJ_PRIVATE};
	bool closed = error == ECONNRESET || error == EPIPE;

	if (error == ECONNREFUSED || (closed && !(id->link && id->link->highest_received)))
		soft_cm_failed(id, RDMA_CM_EVENT_REJECTED, SOFT_CM_REASON_INVALID_SERVICE_ID,
			       &no_listener);
	else
		soft_cm_failed(id,
			       is_unreachable(error) ? RDMA_CM_EVENT_UNREACHABLE
						     : RDMA_CM_EVENT_CONNECT_ERROR,
			       -error, NULL);
}

static void failed(struct soft_cm_link *link, int error)
{
	connect_failed(link->owner, error);
}

static int send_rtu(struct soft_cm_id *id)
{
	const struct soft_cm_message ready = {.type = SOFT_CM_RTU};

	return soft_cm_link_send(id->link, &ready);
}

/* Handle REP: move the queue pair to RTS, send RTU and complete the handshake. If the application
 * manages its queue pair itself, only report CONNECT_RESPONSE, and leave the rest to
 * rdma_establish(3). Returns false if the link may have been freed. */
static bool handle_rep(struct soft_cm_id *id, const struct soft_cm_message *reply)
{
	int error;

	id->remote_qpn = reply->qpn;
	id->remote_psn = reply->psn;
	id->remote_ece = reply->ece;
	id->shm_port = id->link->last_sent.shm_port ? reply->shm_port : 0;
	id->path_port = reply->path_port;
	/* The peer's rdma_accept(3) may have changed both depths. */
	id->responder_resources = soft_cm_depth(reply->initiator_depth, SOFT_MAX_RD_ATOMIC);
	id->initiator_depth = soft_cm_depth(reply->responder_resources, SOFT_MAX_RD_ATOMIC);
	id->rnr_retry_count = reply->rnr_retry_count;
	soft_cm_link_clear_deadline(id->link);
	soft_cm_await_adoption(id); /* let the queue pair take over the stream when it is in RTR */
	if (!soft_cm_qp(id)) {
		id->state = SOFT_CM_RESPONDED;
		soft_cm_report(id, RDMA_CM_EVENT_CONNECT_RESPONSE, 0, reply);
		return true;
	}
	error = soft_cm_qp_start(id, soft_cm_qp(id), true);
	if (error) {
		soft_cm_reject(id, SOFT_CM_REASON_CONSUMER, NULL, 0);
	} else {
		error = send_rtu(id);
	}
	if (!error)
		error = soft_cm_established(id, reply);
	if (error)
		soft_cm_failed(id, RDMA_CM_EVENT_CONNECT_ERROR, -error, NULL);
	return false;
}

static bool handle_message(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	struct soft_cm_id *id = link->owner;

	if (!soft_rdma_get_src_port(&id->id)) /* connect() has chosen the port */
		soft_cm_update_addresses(id);
	if (message->type == SOFT_CM_REJ) {
		soft_cm_failed(id, RDMA_CM_EVENT_REJECTED, message->reason, message);
		return false;
	}
	if (id->state == SOFT_CM_CONNECTING && message->type == SOFT_CM_REP)
		return handle_rep(id, message);
	connect_failed(id, message->type == SOFT_CM_DREQ ? ECONNRESET : EPROTO);
	return false;
}

static const struct soft_cm_link_calls calls = {.message = handle_message, .failed = failed};

/* ---- calls --------------------------------------------------------------------------------- */

static int connect_id(struct soft_cm_id *id, const struct rdma_conn_param *parameters)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_CONNECT);
	struct soft_cm_message request = {
		.type = SOFT_CM_REQ,
		.port_space = (uint16_t)id->id.ps,
		.qp_type = IBV_QPT_RC,
		.traffic_class = id->tos,
	};
	const struct ibv_qp *qp;
	union ibv_gid peer;

	if (!error)
		error = soft_cm_check_parameters(id, parameters, SOFT_CM_REQ);
	if (error)
		return error;
	if (id->sock < 0)
		return EINVAL; /* an earlier call failed and closed the socket */
	qp = soft_cm_qp(id);
	id->qpn = qp ? qp->qp_num : parameters->qp_num;
	id->psn = soft_cm_random_psn();
	id->responder_resources =
		soft_cm_depth(parameters ? parameters->responder_resources : RDMA_MAX_RESP_RES,
			      SOFT_MAX_RD_ATOMIC);
	id->initiator_depth = soft_cm_depth(
		parameters ? parameters->initiator_depth : RDMA_MAX_INIT_DEPTH, SOFT_MAX_RD_ATOMIC);
	soft_cm_fill_message(id, parameters, &request);
	soft_gid_from_sockaddr(&peer, &id->id.route.addr.dst_addr);
	if (soft_links_may_use_shm() && soft_gid_is_on_this_host(&peer))
		request.shm_port = soft_ip_port();
	id->is_initiator = true;
	id->retry_count = request.retry_count;
	error = soft_cm_link_connect(id, soft_device.cm->carrier, &calls, &request);
	/* If the link was opened or the host is unreachable, the call succeeds, and the failure is
	 * reported as an event. */
	if (!error || !(id->link || is_unreachable(error)))
		return error;
	connect_failed(id, error);
	return 0;
}

int soft_rdma_connect(struct rdma_cm_id *application, struct rdma_conn_param *conn_param)
{
	struct soft_cm_id *id = soft_cm_enter(application);
	int error;

	if (!id)
		return -1;
	error = soft_cm_is_datagram_id(id) ? soft_cm_sidr_request(id, conn_param)
					   : connect_id(id, conn_param);
	return soft_cm_leave(error) ? -1 : soft_cm_wait_if_synchronous(id);
}

/* Send RTU and complete the handshake for a queue pair that the application manages. */
static int establish(struct soft_cm_id *id)
{
	int error = id->id.qp ? EINVAL : soft_cm_allowed(id->state, SOFT_CM_CALL_ESTABLISH);

	if (!error)
		error = send_rtu(id);
	return error ? error : soft_cm_established(id, NULL);
}

int soft_rdma_establish(struct rdma_cm_id *application)
{
	struct soft_cm_id *id = soft_cm_enter(application);

	return id ? soft_cm_leave(establish(id)) : -1;
}
