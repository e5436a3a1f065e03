/* Passive side of a connection: creates ids for connection requests, implements rdma_accept(3) and
 * rdma_reject(3), and handles RTU. */
#include "cm_internal.h"

#include "link/link.h"

static void failed(struct soft_cm_link *link, int error)
{
	struct soft_cm_id *id = link->owner;

	soft_cm_failed(id,
		       error == ETIMEDOUT ? RDMA_CM_EVENT_UNREACHABLE : RDMA_CM_EVENT_CONNECT_ERROR,
		       -error, NULL);
}

/* Handle a message on a request's link, which should be RTU after rdma_accept(3). */
static bool handle_message(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	static const struct soft_cm_message no_parameters; /* RTU carries no parameters */
	struct soft_cm_id *id = link->owner;
	int error = EPROTO;

	if (message->type == SOFT_CM_REJ) { /* the active side withdraws the request */
		soft_cm_failed(id, RDMA_CM_EVENT_REJECTED, message->reason, message);
		return false;
	}
	if (id->state == SOFT_CM_ACCEPTED &&
	    (message->type == SOFT_CM_RTU || message->type == SOFT_CM_DREQ)) {
		error = soft_cm_established(id, &no_parameters);
	}
	if (error)
		failed(link, error);
	else if (message->type == SOFT_CM_DREQ) /* the preceding RTU was lost */
		/* soft_cm_established() has replaced link->calls (cm_connection.c). */
		return link->calls->message(link, message);
	return false;
}

static const struct soft_cm_link_calls calls = {.message = handle_message, .failed = failed};

int soft_cm_create_request(struct soft_cm_id *listener, struct soft_cm_link *link)
{
	const struct soft_cm_message *request = &link->request;
	struct sockaddr_storage local = {0}, peer = {0};

	/* A listener on all addresses outlives the removal of a single device, so a request may
	 * arrive for a removed device. */
	link->carrier->get_addresses(link, &local, &peer);
	if (soft_cm_device_error((struct sockaddr *)&local)) {
		soft_cm_link_reject(link, SOFT_CM_REASON_INVALID_SERVICE_ID);
		return ENODEV;
	}
	struct soft_cm_id *id = soft_cm_request_new(listener);

	if (!id || soft_cm_report_request(listener, id, request)) {
		free(id);
		soft_cm_link_reject(link, SOFT_CM_REASON_NO_RESOURCES);
		return ENOMEM;
	}
	id->psn = soft_cm_random_psn();
	id->remote_qpn = request->qpn;
	id->remote_psn = request->psn;
	/* Our responder serves the other side's initiator, and vice versa. */
	id->responder_resources = soft_cm_depth(request->initiator_depth, SOFT_MAX_RD_ATOMIC);
	id->initiator_depth = soft_cm_depth(request->responder_resources, SOFT_MAX_RD_ATOMIC);
	id->retry_count = request->retry_count;
	id->rnr_retry_count = request->rnr_retry_count;
	id->remote_ece = request->ece;
	id->shm_port = request->shm_port;
	id->path_mtu = request->path_mtu;
	if (request->traffic_class)
		id->tos = request->traffic_class;
	link->calls = &calls;
	link->owner = id;
	id->link = link;
	soft_cm_update_addresses(id);
	soft_cm_await_adoption(id);
	if (id->tos && link->carrier->apply_tos)
		link->carrier->apply_tos(link, id->tos);
	soft_cm_request_join(id);
	return 0;
}

int soft_cm_withdrawn(struct rdma_cm_id *application)
{
	const struct soft_cm_id *id = soft_cm_id_of(application);
	int withdrawn;

	soft_lock();
	withdrawn = id->unaccepted && id->state == SOFT_CM_FAILED;
	soft_unlock();
	return withdrawn;
}

/* ---- calls --------------------------------------------------------------------------------- */

static int accept_request(struct soft_cm_id *id, const struct rdma_conn_param *parameters)
{
	struct soft_cm_message reply = {.type = SOFT_CM_REP};
	const struct ibv_qp *qp;
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_ACCEPT);

	if (!error)
		error = soft_cm_check_parameters(id, parameters, SOFT_CM_REP);
	if (error)
		return error;
	if (parameters) {
		id->responder_resources =
			soft_cm_depth(parameters->responder_resources, id->responder_resources);
		id->initiator_depth =
			soft_cm_depth(parameters->initiator_depth, id->initiator_depth);
	}
	qp = soft_cm_qp(id);
	id->qpn = qp ? qp->qp_num : parameters->qp_num;
	if (qp) {
		error = soft_cm_qp_start(id, id->id.qp, true);
		if (error)
			return error;
	}
	soft_cm_reserve_stream(id);
	soft_cm_fill_message(id, parameters, &reply);
	/* Use shared memory only if the peer has offered it in REQ and this side can use it. */
	if (id->shm_port && soft_links_may_use_shm())
		reply.shm_port = soft_ip_port();
	if (!reply.shm_port)
		id->shm_port = 0;
	id->path_port = reply.path_port = soft_ip_port();
	error = soft_cm_link_send(id->link, &reply);
	if (error) {
		soft_cm_qp_error(id);
		return error;
	}
	id->unaccepted = false;
	id->state = SOFT_CM_ACCEPTED;
	soft_cm_id_set_awaits_peer(id, true);
	soft_cm_link_set_deadline(id->link, soft_device.cm->limits.service_ms);
	return 0;
}

/* Acknowledge the CONNECT_REQUEST event, which a synchronous id keeps until the request is accepted
 * or rejected (rdma_get_request(3)). */
static void ack_kept_request_event(struct soft_cm_id *id)
{
	if (id->synchronous)
		soft_cm_ack_event(id);
}

int soft_rdma_accept(struct rdma_cm_id *application, struct rdma_conn_param *conn_param)
{
	struct soft_cm_id *id = soft_cm_enter(application);
	int error;

	if (!id)
		return -1;
	error = soft_cm_is_datagram_id(id) ? soft_cm_service_accept(id, conn_param)
					   : accept_request(id, conn_param);
	if (soft_cm_leave(error))
		return -1;
	if (!soft_cm_is_datagram_id(id))
		return soft_cm_wait_if_synchronous(id);
	ack_kept_request_event(id); /* no RTU to wait for in a datagram service */
	return 0;
}

static int reject(struct soft_cm_id *id, uint16_t reason, const void *private_data,
		  uint8_t private_data_len)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_REJECT);

	if (!error && private_data_len > SOFT_CM_REJ_PRIVATE)
		error = EINVAL;
	if (error)
		return error;
	soft_cm_reject(id, reason, private_data, private_data_len);
	id->state = SOFT_CM_FAILED;
	soft_cm_id_set_awaits_peer(id, false);
	return 0;
}

static int reject_any(struct rdma_cm_id *application, uint16_t reason, const void *private_data,
		      uint8_t private_data_len)
{
	struct soft_cm_id *id = soft_cm_enter(application);
	int error;

	if (!id)
		return -1;
	if (!private_data)
		private_data_len = 0;
	error = soft_cm_is_datagram_id(id)
			? soft_cm_service_reject(id, private_data, private_data_len)
			: reject(id, reason, private_data, private_data_len);
	if (soft_cm_leave(error))
		return -1;
	ack_kept_request_event(id);
	return 0;
}

int soft_rdma_reject(struct rdma_cm_id *application, const void *private_data,
		     uint8_t private_data_len)
{
	return reject_any(application, SOFT_CM_REASON_CONSUMER, private_data, private_data_len);
}

int soft_rdma_reject_ece(struct rdma_cm_id *application, const void *private_data,
			 uint8_t private_data_len)
{
	return reject_any(application, SOFT_CM_REASON_VENDOR_OPTION, private_data,
			  private_data_len);
}
