/* The active side: rdma_connect(3), rdma_establish(3), and the answers to REQ.
 *
 * How long it may take: the other side's connection manager must answer (MRA, REP or REJ) within
 * soft_cm_limits.response_ms of the call, or it is UNREACHABLE; once it has, its application has
 * soft_cm_limits.service_ms.  A port without a listener for soft_cm_limits.refused_ms, or where a
 * connection is closed without an answer, is REJECTED with "invalid service ID", as the real CM
 * answers for it.
 */
#include "cm_internal.h"

#include <errno.h>
#include <unistd.h>

#include "objects/objects.h"

static bool is_unreachable(int error)
{
	return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
	       error == EHOSTDOWN || error == ENETDOWN;
}

static void connect_failed(struct soft_cm_id *id, int error)
{
	const struct soft_cm_message no_listener = {.type = SOFT_CM_REJ,
						    .private_data_len = SOFT_CM_REJ_PRIVATE};
	bool closed = error == ECONNRESET || error == EPIPE;

	if (error == ECONNREFUSED || (closed && !id->heard))
		soft_cm_failed(id, RDMA_CM_EVENT_REJECTED, SOFT_CM_REASON_INVALID_SERVICE_ID,
			       &no_listener);
	else if (is_unreachable(error))
		soft_cm_failed(id, RDMA_CM_EVENT_UNREACHABLE, -error, NULL);
	else
		soft_cm_failed(id, RDMA_CM_EVENT_CONNECT_ERROR, -error, NULL);
}

static void failed(struct soft_cm_link *link, int error)
{
	connect_failed(link->owner, error);
}

static void connected(struct soft_cm_link *link)
{
	struct soft_cm_id *id = link->owner;
	int error;

	if (!soft_rdma_get_src_port(&id->id)) /* chosen by connect() */
		soft_cm_take_addresses(id, link->watch.fd, NULL);
	error = soft_cm_link_send(link, &id->request);
	if (error)
		connect_failed(id, error);
}

static int say_ready(struct soft_cm_id *id)
{
	const struct soft_cm_message ready = {.type = SOFT_CM_RTU};

	return soft_cm_link_send(id->link, &ready);
}

static bool take_reply(struct soft_cm_id *id, const struct soft_cm_message *reply)
{
	int error;

	id->remote_qpn = reply->qpn;
	id->remote_psn = reply->psn;
	id->remote_ece = reply->ece;
	id->shm_port = id->request.shm_port ? reply->shm_port : 0;
	/* rdma_accept(3): the other side may have adjusted both. */
	id->responder_resources = soft_cm_depth(reply->initiator_depth, SOFT_MAX_RD_ATOMIC);
	id->initiator_depth = soft_cm_depth(reply->responder_resources, SOFT_MAX_RD_ATOMIC);
	id->rnr_retry_count = reply->rnr_retry_count;
	soft_cm_link_expect_nothing(id->link);
	soft_cm_stream_agreed(id);
	if (!soft_cm_qp(id)) {
		id->state = SOFT_CM_RESPONDED;
		soft_cm_report(id, RDMA_CM_EVENT_CONNECT_RESPONSE, 0, reply);
		return true;
	}
	error = soft_cm_qp_ready(id);
	if (error) {
		soft_cm_link_reject(id->link, SOFT_CM_REASON_CONSUMER, NULL, 0);
		id->link = NULL;
	} else {
		error = say_ready(id);
	}
	if (!error)
		error = soft_cm_hand_over(id, reply);
	if (error)
		soft_cm_failed(id, RDMA_CM_EVENT_CONNECT_ERROR, -error, NULL);
	return false;
}

static bool message(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	struct soft_cm_id *id = link->owner;
	bool first = !id->heard;

	id->heard = true;
	if (message->type == SOFT_CM_REJ) {
		soft_cm_failed(id, RDMA_CM_EVENT_REJECTED, message->reason, message);
		return false;
	}
	if (id->state == SOFT_CM_CONNECTING && message->type == SOFT_CM_MRA) {
		if (first) /* repeated, it would hold the id for ever */
			soft_cm_link_expect(link, soft_cm_limits.service_ms);
		return true;
	}
	if (id->state == SOFT_CM_CONNECTING && message->type == SOFT_CM_REP)
		return take_reply(id, message);
	connect_failed(id, EPROTO);
	return false;
}

static const struct soft_cm_link_calls calls = {
	.connected = connected, .message = message, .failed = failed};

/* ---- calls --------------------------------------------------------------------------------- */

/* 0: the socket is connecting; or an errno value, and everything is as before. */
static int start_connecting(struct soft_cm_id *id)
{
	const struct sockaddr *to = &id->id.route.addr.dst_addr;
	const int on = 1;
	int fd = id->sock;
	int error = 0;

	/* What is left of this connection must not keep the port from a listener. */
	if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)))
		return errno;
	if (connect(fd, to, soft_cm_address_length(to)))
		error = errno;
	if (error && error != EINPROGRESS && error != ECONNREFUSED && !is_unreachable(error))
		return error;
	id->sock = -1;
	if (is_unreachable(error)) {
		close(fd);
		connect_failed(id, error);
		return 0;
	}
	id->link = soft_cm_link_new(fd, true, &calls, id, &error);
	if (!id->link)
		return error;
	soft_cm_link_expect(id->link, soft_cm_limits.response_ms);
	soft_cm_link_insist(id->link, to, soft_cm_limits.refused_ms);
	id->state = SOFT_CM_CONNECTING;
	soft_cm_id_waits(id, true);
	return 0;
}

static int start(struct soft_cm_id *id, const struct rdma_conn_param *parameters)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_CONNECT);
	const struct ibv_qp *qp;
	union ibv_gid peer;

	if (!error)
		error = soft_cm_check_parameters(id, parameters, SOFT_CM_REQ);
	if (error)
		return error;
	if (id->sock < 0)
		return EINVAL; /* an earlier call came as far as losing the socket */
	qp = soft_cm_qp(id);
	id->qpn = qp ? qp->qp_num : parameters->qp_num;
	id->psn = soft_cm_random_psn();
	id->responder_resources =
		soft_cm_depth(parameters ? parameters->responder_resources : RDMA_MAX_RESP_RES,
			      SOFT_MAX_RD_ATOMIC);
	id->initiator_depth = soft_cm_depth(
		parameters ? parameters->initiator_depth : RDMA_MAX_INIT_DEPTH, SOFT_MAX_RD_ATOMIC);
	id->request = (struct soft_cm_message){
		.type = SOFT_CM_REQ, .port_space = (uint16_t)id->id.ps, .qp_type = IBV_QPT_RC};
	soft_cm_fill_message(id, parameters, &id->request);
	soft_cm_gid_from(&peer, &id->id.route.addr.dst_addr);
	id->request.shm_port = soft_cm_own_port(&peer);
	id->opens_chan = true;
	id->retry_count = id->request.retry_count;
	return start_connecting(id);
}

int soft_rdma_connect(struct rdma_cm_id *application, struct rdma_conn_param *conn_param)
{
	struct soft_cm_id *id = soft_cm_enter(application);
	int error;

	if (!id)
		return -1;
	error = soft_cm_datagrams(id) ? soft_cm_sidr_request(id, conn_param)
				      : start(id, conn_param);
	return soft_cm_leave(error) ? -1 : soft_cm_complete(id);
}

/* For an application with a queue pair of its own, after CONNECT_RESPONSE. */
static int establish(struct soft_cm_id *id)
{
	int error = id->id.qp ? EINVAL : soft_cm_allowed(id->state, SOFT_CM_CALL_ESTABLISH);

	if (!error)
		error = say_ready(id);
	return error ? error : soft_cm_hand_over(id, NULL);
}

int soft_rdma_establish(struct rdma_cm_id *application)
{
	struct soft_cm_id *id = soft_cm_enter(application);

	return id ? soft_cm_leave(establish(id)) : -1;
}
