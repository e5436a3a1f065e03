/* Established connections: handing the stream over to the queue pair, and disconnecting.
 *
 * Implements rdma_disconnect(3), rdma_notify(3), and the events ESTABLISHED, DISCONNECTED and
 * TIMEWAIT_EXIT.
 */
#include "cm_internal.h"

#include "link/link.h"

/* Returns the id's queue pair if it still uses the stream of this id, otherwise NULL. */
static struct soft_qp *stream_owner(struct soft_cm_id *id)
{
	struct soft_qp *qp = soft_qp_find(id->qpn);

	return qp && qp->link_owner == id ? qp : NULL;
}

/* ---- disconnecting ------------------------------------------------------------------------ */

static void disconnected(struct soft_cm_id *id, int error)
{
	id->state = SOFT_CM_DISCONNECTED;
	soft_cm_id_set_awaits_peer(id, false);
	soft_cm_report(id, RDMA_CM_EVENT_DISCONNECTED, -error, NULL);
	soft_timer_start(&id->timewait, soft_cm_deadline(soft_device.cm->limits.timewait_ms));
}

static void link_down(struct soft_qp *qp, void *owner, int error)
{
	(void)qp;
	disconnected(owner, error);
}

static void leave_link(struct soft_cm_id *id)
{
	struct soft_cm_link *link = id->link;

	soft_list_remove(&id->awaiting_adoption);
	id->keeps_link = false;
	id->link = NULL;
	if (link)
		soft_cm_link_leave(link);
}

/* Disconnect the id after its link has ended. This can happen before our queue pair is ready,
 * because the peer does not wait for it. */
static void failed(struct soft_cm_link *link, int error)
{
	struct soft_cm_id *id = link->owner;

	leave_link(id);
	disconnected(id, error);
}

/* Handle a message on a link that the id keeps after the handshake. Only DREQ is expected. */
static bool handle_message(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	failed(link, message->type == SOFT_CM_DREQ ? 0 : ECONNRESET);
	return false;
}

static const struct soft_cm_link_calls kept_link_calls = {.message = handle_message,
							  .failed = failed};

/* Send DREQ, except on a stream. On a stream, the peer may not be ready for DREQ because it still
 * waits for RTU, and it detects the disconnect when the stream is closed. */
static void send_dreq(struct soft_cm_id *id)
{
	if (id->link && !id->link->carrier->hand_over)
		(void)soft_cm_link_send(id->link, &(struct soft_cm_message){.type = SOFT_CM_DREQ});
}

void soft_cm_reject(struct soft_cm_id *id, uint16_t reason, const void *private_data,
		    uint8_t private_data_len)
{
	struct soft_cm_message message = {.type = SOFT_CM_REJ, .reason = reason};

	(void)soft_cm_put_private(&message, private_data, private_data_len);
	(void)soft_cm_link_send(id->link, &message); /* best effort */
	leave_link(id);
}

void soft_cm_detach(struct soft_cm_id *id)
{
	struct soft_qp *qp = stream_owner(id);

	if (qp)
		soft_qp_set_on_link_down(qp, NULL, NULL);
	leave_link(id);
}

void soft_cm_close(struct soft_cm_id *id)
{
	struct soft_qp *qp = stream_owner(id);

	if (qp) {
		soft_qp_set_on_link_down(qp, NULL, NULL);
		(void)soft_qp_disconnect(qp); /* ENOTCONN if the link is already down */
	}
	send_dreq(id);
	leave_link(id);
}

/* ---- handing over -------------------------------------------------------------------------- */

/* Hand the link over to `qp`, which is NULL if the queue pair is not ready yet. In this case, or if
 * the carrier cannot hand links over, the id keeps the link. */
static void hand_over(struct soft_cm_id *id, struct soft_qp *qp)
{
	const struct soft_cm_carrier *carrier = id->link->carrier;
	int error = 0;

	id->link->calls = &kept_link_calls;
	id->keeps_link = !qp || !carrier->hand_over;
	if (!id->keeps_link) {
		soft_list_remove(&id->awaiting_adoption);
		soft_qp_set_on_link_down(qp, link_down, id);
	}
	if (carrier->hand_over)
		error = carrier->hand_over(id, qp);
	if (!id->keeps_link)
		id->link = NULL;
	/* If the handover itself has broken the stream, link_down has already reported it. */
	if (error && id->state == SOFT_CM_CONNECTED) {
		soft_cm_detach(id);
		disconnected(id, error);
	}
}

int soft_cm_established(struct soft_cm_id *id, const struct soft_cm_message *established)
{
	struct soft_qp *qp = soft_qp_find(id->qpn);
	enum ibv_qp_state state = qp ? qp->ibv.state : IBV_QPS_RESET;

	if (state == IBV_QPS_ERR || state == IBV_QPS_SQE) {
		send_dreq(id);
		return ENOTCONN;
	}
	id->state = SOFT_CM_CONNECTED;
	soft_cm_id_set_awaits_peer(id, false);
	soft_cm_link_clear_deadline(id->link);
	if (established && !id->established_early)
		soft_cm_report(id, RDMA_CM_EVENT_ESTABLISHED, 0, established);
	hand_over(id, state >= IBV_QPS_RTR ? qp : NULL);
	return 0;
}

void soft_cm_await_adoption(struct soft_cm_id *id)
{
	if (soft_list_empty(&id->awaiting_adoption) && id->link->carrier->hand_over)
		soft_list_append(&soft_device.cm->awaiting_adoption, &id->awaiting_adoption);
}

void soft_cm_reserve_stream(const struct soft_cm_id *id)
{
	struct soft_qp *qp = soft_qp_find(id->qpn);

	if (qp && id->link->carrier->hand_over &&
	    (qp->ibv.state == IBV_QPS_RTR || qp->ibv.state == IBV_QPS_RTS))
		soft_qp_await_adoption(qp);
}

/* Returns whether the id establishes the connection of this queue pair. An application may move its
 * queue pair to RTR before it passes the number to rdma_accept(3). Until then, the id is identified
 * by the PSN that the queue pair expects. */
static bool connects_qp(const struct soft_cm_id *id, const struct soft_qp *qp)
{
	const struct ibv_ah_attr *ah = &qp->attr.ah_attr;

	return id->remote_qpn == qp->attr.dest_qp_num &&
	       (id->qpn ? id->qpn == qp->ibv.qp_num : id->psn == qp->attr.rq_psn) &&
	       (!ah->is_global ||
		!memcmp(&ah->grh.dgid, &id->id.route.addr.addr.ibaddr.dgid, sizeof(ah->grh.dgid)));
}

bool soft_cm_handle_rtr(struct soft_qp *qp)
{
	soft_list_each (struct soft_cm_id, id, &soft_device.cm->awaiting_adoption,
			awaiting_adoption) {
		if (!connects_qp(id, qp))
			continue;
		/* If the handshake is not over yet, soft_cm_established() will hand the stream
		 * over. */
		if (id->keeps_link)
			hand_over(id, qp);
		return true;
	}
	return false;
}

/* ---- failed handshakes -------------------------------------------------------------------- */

void soft_cm_failed(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		    const struct soft_cm_message *message)
{
	leave_link(id);
	id->state = SOFT_CM_FAILED;
	soft_cm_id_set_awaits_peer(id, false);
	/* Like librdmacm, move the queue pair to ERR unless the event is UNREACHABLE. */
	if (type != RDMA_CM_EVENT_UNREACHABLE && !id->unaccepted)
		soft_cm_qp_error(id);
	soft_cm_report(id, type, status, message);
}

/* ---- calls --------------------------------------------------------------------------------- */

static int disconnect(struct soft_cm_id *id)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_DISCONNECT);

	if (soft_cm_is_datagram_id(id)) {
		if (!error) /* there is no connection to end */
			soft_cm_qp_error(id);
		return error;
	}
	if (!error && (id->state == SOFT_CM_CONNECTED || id->state == SOFT_CM_ACCEPTED)) {
		soft_cm_close(id);
		disconnected(id, 0);
	}
	soft_cm_qp_error(id); /* documented in rdma_disconnect(3) */
	return error;
}

int soft_rdma_disconnect(struct rdma_cm_id *application)
{
	struct soft_cm_id *id;
	bool event;
	int error;

	/* Do not close a descriptor that the application has closed and may have reused. */
	soft_engine_handle_lost_descriptors();
	id = soft_cm_enter(application);
	if (!id)
		return -1;
	error = disconnect(id);
	/* A repeated call queues no event, so a synchronous id must not wait for one. */
	event = id->synchronous && soft_cm_has_event(id);
	if (soft_cm_leave(error))
		return -1;
	return event ? soft_cm_wait_if_synchronous(id) : 0;
}

/* Complete rdma_notify(3), by which the application says that its queue pair has received data
 * (COMM_EST). The peer has therefore sent RTU, although the RTU has not arrived yet. */
static int notify(struct soft_cm_id *id, enum ibv_event_type event)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_NOTIFY);

	if (error)
		return error;
	if (event != IBV_EVENT_COMM_EST)
		return EINVAL;
	if (id->established_early)
		return EISCONN;
	id->established_early = true;
	soft_cm_report(id, RDMA_CM_EVENT_ESTABLISHED, 0, NULL);
	return 0;
}

int soft_rdma_notify(struct rdma_cm_id *application, enum ibv_event_type event)
{
	struct soft_cm_id *id = soft_cm_enter(application);

	return id ? soft_cm_leave(notify(id, event)) : -1;
}
