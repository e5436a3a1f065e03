/* From the handshake to the queue pair and back: handing the stream over, and its end.
 *
 * rdma_disconnect(3), rdma_notify(3), the events ESTABLISHED, DISCONNECTED and TIMEWAIT_EXIT.
 */
#include "cm_internal.h"

#include <errno.h>
#include <string.h>

#include "wire/wire.h"

/* Ids that know the other side's queue pair, and whose stream no queue pair has yet; those of them
 * whose stream waits for their queue pair to reach RTR. */
static struct soft_node agreed = {&agreed, &agreed};
static struct soft_node held = {&held, &held};

/* The id's queue pair, if it (still) has the stream that it got from this id. */
static struct soft_qp *stream_owner(struct soft_cm_id *id)
{
	struct soft_qp *qp = soft_qp_find(id->qpn);

	return qp && qp->link_owner == id ? qp : NULL;
}

/* ---- the end ------------------------------------------------------------------------------- */

static void disconnected(struct soft_cm_id *id, int error)
{
	id->state = SOFT_CM_DISCONNECTED;
	soft_cm_id_waits(id, false);
	soft_cm_report(id, RDMA_CM_EVENT_DISCONNECTED, -error, NULL);
	soft_timer_start(&id->timewait, soft_cm_in(soft_cm_limits.timewait_ms));
}

static void link_down(struct soft_qp *qp, void *owner, int error)
{
	(void)qp;
	disconnected(owner, error);
}

static void drop_held(struct soft_cm_id *id)
{
	soft_list_remove(&id->held);
	soft_list_remove(&id->agreed);
	soft_cm_drop_link(id);
}

/* Of a held stream: the other side does not wait for our queue pair. */
static void failed(struct soft_cm_link *link, int error)
{
	struct soft_cm_id *id = link->owner;

	drop_held(id);
	disconnected(id, error);
}

static const struct soft_cm_link_calls held_calls = {.failed = failed};

void soft_cm_stream_forget(struct soft_cm_id *id)
{
	struct soft_qp *qp = stream_owner(id);

	if (qp)
		soft_qp_on_link_down(qp, NULL, NULL);
	drop_held(id);
}

void soft_cm_stream_close(struct soft_cm_id *id)
{
	struct soft_qp *qp = stream_owner(id);

	if (qp) {
		soft_qp_on_link_down(qp, NULL, NULL);
		(void)soft_qp_disconnect(qp); /* ENOTCONN: it is gone already */
	}
	drop_held(id);
}

/* ---- handing over -------------------------------------------------------------------------- */

uint16_t soft_cm_own_port(const union ibv_gid *of_peer)
{
	return soft_links_may_use_shm() && soft_gid_is_of_host(of_peer) ? soft_ip_port() : 0;
}

static void adopt(struct soft_cm_id *id, struct soft_qp *qp)
{
	uint8_t rest[SOFT_CM_INPUT];
	size_t length = id->link->have;
	int error, fd;

	memcpy(rest, id->link->input, length);
	soft_qp_on_link_down(qp, link_down, id);
	soft_list_remove(&id->held);
	soft_list_remove(&id->agreed);
	fd = soft_cm_link_take(id->link);
	/* Data on the stream means that the other side has selected it. */
	error = id->shm_port && !length
			? soft_qp_adopt_or_attach(qp, fd, id->shm_port, id->opens_chan)
			: soft_qp_adopt(qp, fd, rest, length);
	id->link = NULL;
	if (error && id->state == SOFT_CM_CONNECTED) {
		soft_qp_on_link_down(qp, NULL, NULL);
		disconnected(id, error);
	}
}

static void hold(struct soft_cm_id *id)
{
	int error = soft_cm_link_hold(id->link);

	id->link->calls = &held_calls;
	soft_list_append(&held, &id->held);
	if (error)
		failed(id->link, error);
}

int soft_cm_hand_over(struct soft_cm_id *id, const struct soft_cm_message *established)
{
	struct soft_qp *qp = soft_qp_find(id->qpn);
	enum ibv_qp_state state = qp ? qp->ibv.state : IBV_QPS_RESET;

	if (state == IBV_QPS_ERR || state == IBV_QPS_SQE)
		return ENOTCONN;
	id->state = SOFT_CM_CONNECTED;
	soft_cm_id_waits(id, false);
	if (established && !id->early)
		soft_cm_report(id, RDMA_CM_EVENT_ESTABLISHED, 0, established);
	if (qp && state >= IBV_QPS_RTR)
		adopt(id, qp);
	else
		hold(id);
	return 0;
}

void soft_cm_stream_agreed(struct soft_cm_id *id)
{
	if (soft_list_empty(&id->agreed))
		soft_list_append(&agreed, &id->agreed);
}

void soft_cm_stream_claim(const struct soft_cm_id *id)
{
	struct soft_qp *qp = soft_qp_find(id->qpn);

	if (qp && (qp->ibv.state == IBV_QPS_RTR || qp->ibv.state == IBV_QPS_RTS))
		soft_qp_await_adoption(qp);
}

/* Are the queue pair and its peer the two that the id connects?  An application may bring its queue
 * pair to RTR before it calls rdma_accept(3) with its number: then it has the PSN of the request. */
static bool is_of(const struct soft_cm_id *id, const struct soft_qp *qp)
{
	const struct ibv_ah_attr *ah = &qp->attr.ah_attr;

	return id->fork_generation == soft_engine_fork_generation() &&
	       id->remote_qpn == qp->attr.dest_qp_num &&
	       (id->qpn ? id->qpn == qp->ibv.qp_num : id->remote_psn == qp->attr.rq_psn) &&
	       (!ah->is_global ||
		!memcmp(&ah->grh.dgid, &id->id.route.addr.addr.ibaddr.dgid, sizeof(ah->grh.dgid)));
}

bool soft_cm_offer(struct soft_qp *qp)
{
	for (struct soft_node *node = agreed.next; node != &agreed; node = node->next) {
		struct soft_cm_id *id = soft_list_entry(node, struct soft_cm_id, agreed);

		if (!is_of(id, qp))
			continue;
		if (!soft_list_empty(&id->held))
			adopt(id, qp);
		return true;
	}
	return false;
}

/* ---- before there was a connection --------------------------------------------------------- */

void soft_cm_failed(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		    const struct soft_cm_message *message)
{
	soft_cm_drop_link(id);
	soft_list_remove(&id->agreed);
	id->state = SOFT_CM_FAILED;
	soft_cm_id_waits(id, false);
	/* As librdmacm does with the event; a queue pair without an answer stays in INIT. */
	if (type != RDMA_CM_EVENT_UNREACHABLE && !id->unaccepted)
		soft_cm_qp_error(id);
	soft_cm_report(id, type, status, message);
}

/* ---- calls --------------------------------------------------------------------------------- */

static int disconnect(struct soft_cm_id *id)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_DISCONNECT);

	if (soft_cm_datagrams(id)) {
		if (!error) /* there is nothing to end */
			soft_cm_qp_error(id);
		return error;
	}
	if (!error && id->state == SOFT_CM_CONNECTED) {
		soft_cm_stream_close(id);
		disconnected(id, 0);
	} else if (!error && id->state == SOFT_CM_ACCEPTED) {
		/* RTU may be on its way: the other side finds a connection that has ended. */
		soft_cm_drop_link(id);
		disconnected(id, 0);
	}
	soft_cm_qp_error(id); /* rdma_disconnect(3): "transitions any associated QP" */
	return error;
}

int soft_rdma_disconnect(struct rdma_cm_id *application)
{
	struct soft_cm_id *id;
	bool event;
	int error;

	soft_engine_check_descriptors();
	id = soft_cm_enter(application);
	if (!id)
		return -1;
	error = disconnect(id);
	/* Of a synchronous id: the second call has nothing to wait for. */
	event = id->synchronous && soft_cm_has_event(id);
	if (soft_cm_leave(error))
		return -1;
	return event ? soft_cm_complete(id) : 0;
}

static int notify(struct soft_cm_id *id, enum ibv_event_type event)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_NOTIFY);

	if (error)
		return error;
	if (event != IBV_EVENT_COMM_EST)
		return EINVAL;
	if (id->early)
		return EISCONN;
	id->early = true;
	soft_cm_report(id, RDMA_CM_EVENT_ESTABLISHED, 0, NULL);
	return 0;
}

int soft_rdma_notify(struct rdma_cm_id *application, enum ibv_event_type event)
{
	struct soft_cm_id *id = soft_cm_enter(application);

	return id ? soft_cm_leave(notify(id, event)) : -1;
}
