/* Queue pairs: creation, destruction, and the state machine (IBTA vol 1, 10.3.1).
 *
 * The table in abi/qp_states.h lists the transitions with their required and optional attributes;
 * Python uses the same table to explain errors. This file checks the values and executes the
 * transitions.
 */

#include "extended.h"
#include "trace/trace.h"

struct soft_qp *soft_qp_of(struct ibv_qp *qp)
{
	return soft_container(qp, struct soft_qp, ibv);
}

void soft_qp_event(struct soft_qp *qp, enum ibv_event_type type)
{
	soft_async_queue_event(
		soft_context_of(qp->ibv.context),
		&(struct ibv_async_event){.element.qp = &qp->ibv, .event_type = type});
}

/* ---- create and destroy -------------------------------------------------------------------- */

/* Returns a copy of `attr` with ignored members cleared. A queue pair with a shared receive queue
 * ignores the receive limits (ibv_create_qp(3)), and an XRC queue pair ignores the attributes of
 * queues that it does not have. */
static struct ibv_qp_init_attr normalize_attr(const struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr normalized = *attr;

	if (soft_is_xrc(normalized.qp_type)) {
		normalized.recv_cq = NULL;
		normalized.srq = NULL;
	}
	if (normalized.qp_type == IBV_QPT_XRC_RECV) {
		normalized.send_cq = NULL;
		normalized.cap = (struct ibv_qp_cap){0};
	}
	if (normalized.srq || soft_is_xrc(normalized.qp_type))
		normalized.cap.max_recv_wr = normalized.cap.max_recv_sge = 0;
	return normalized;
}

static bool is_of_other_device(const struct ibv_context *context, const struct ibv_cq *cq)
{
	return cq && cq->context->device != context->device;
}

static int check_create(const struct ibv_context *context, const struct ibv_pd *pd,
			const struct soft_xrcd *xrcd, const struct ibv_qp_init_attr *attr)
{
	const struct ibv_qp_cap *cap = &attr->cap;

	switch (attr->qp_type) {
	case IBV_QPT_RC:
	case IBV_QPT_UC:
	case IBV_QPT_UD:
		if (!attr->recv_cq)
			return soft_refuse(EINVAL, "NULL_OBJECT");
		break;
	case IBV_QPT_XRC_SEND:
		break;
	case IBV_QPT_XRC_RECV:
		return xrcd ? 0 : soft_refuse(EINVAL, "NULL_OBJECT");
	case IBV_QPT_RAW_PACKET:
	case IBV_QPT_DRIVER:
		return soft_refuse(EOPNOTSUPP, "QP_TYPE");
	default:
		return soft_refuse_value("QP_TYPE", "qp_type", attr->qp_type);
	}
	if (!pd || !attr->send_cq)
		return soft_refuse(EINVAL, "NULL_OBJECT");
	if (is_of_other_device(context, attr->send_cq) ||
	    is_of_other_device(context, attr->recv_cq) ||
	    (attr->srq && (attr->srq->context != context || soft_srq_of(attr->srq)->xrcd)))
		return soft_refuse(EINVAL, "FOREIGN_OBJECT");
	const struct soft_limit limits[] = {
		{"max_send_wr", cap->max_send_wr, SOFT_MAX_QP_WR},
		{"max_recv_wr", cap->max_recv_wr, SOFT_MAX_QP_WR},
		{"max_send_sge", cap->max_send_sge, SOFT_MAX_SGE},
		{"max_recv_sge", cap->max_recv_sge, SOFT_MAX_SGE},
		{"max_inline_data", cap->max_inline_data, SOFT_MAX_INLINE},
	};

	return soft_check_limits(limits, sizeof(limits) / sizeof(limits[0]));
}

/* Add `change` (1 or -1) to the user count of each object that the queue pair uses. */
static void count_users(const struct soft_qp *qp, int change)
{
	const struct ibv_qp *ibv = &qp->ibv;

	if (ibv->pd)
		soft_pd_of(ibv->pd)->users += (unsigned)change;
	if (ibv->send_cq)
		soft_cq_of(ibv->send_cq)->users += (unsigned)change;
	if (ibv->recv_cq)
		soft_cq_of(ibv->recv_cq)->users += (unsigned)change;
	if (ibv->srq)
		soft_srq_of(ibv->srq)->users += (unsigned)change;
	if (qp->xrcd)
		qp->xrcd->users += (unsigned)change;
}

static void rnr_expired(struct soft_timer *timer)
{
	struct soft_qp *qp = soft_container(timer, struct soft_qp, rnr_timer);

	qp->rnr_paused = false;
	soft_qp_kick(qp);
}

/* Give up on a peer that could not be reached in time. RC and XRC requests fail as if all retries
 * had timed out (IBTA 9.7.6.1.3). UC has no acknowledgements, so its requests complete as if the
 * network had lost them. UD uses the timer only to try sending again. */
static void reach_expired(struct soft_timer *timer)
{
	struct soft_qp *qp = soft_container(timer, struct soft_qp, reach_timer);

	if (soft_qp_is_ud(qp)) {
		soft_qp_kick(qp);
	} else if (soft_qp_is_uc(qp)) {
		qp->no_peer = true;
		soft_qp_kick(qp);
	} else if (qp->sq.oldest != qp->sq.tail) {
		soft_send_fail(qp, IBV_WC_RETRY_EXC_ERR);
	} else if (qp->link && qp->link->state == SOFT_LINK_UP && soft_port_is_down(qp)) {
		/* The peer's own requests should have timed out by now, but the peer cannot detect
		 * that the port on this side is down. Close the link to notify it. */
		soft_links->close(qp);
	}
}

/* Returns the inline data limit to grant. Inline data is stored in place of the SGEs, so the limit
 * may exceed the requested one (ibv_create_qp(3)). Hardware devices also grant more, and
 * rdma_xclient(1) relies on it. */
static uint32_t granted_inline_data(const struct ibv_qp_cap *cap)
{
	uint32_t sge_bytes = cap->max_send_sge * (uint32_t)sizeof(struct ibv_sge);

	return cap->max_inline_data > sge_bytes ? cap->max_inline_data : sge_bytes;
}

struct ibv_qp *soft_ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	return soft_call_pointer_result("ibv_create_qp", "pd", soft_pd_root(pd)->handle,
					soft_qp_create(pd->context, pd, NULL, attr));
}

struct ibv_qp *soft_qp_create(struct ibv_context *context, struct ibv_pd *pd,
			      struct soft_xrcd *xrcd, struct ibv_qp_init_attr *attr)
{
	const struct ibv_qp_init_attr normalized = normalize_attr(attr);
	int rc = soft_context_of(context)->fatal ? soft_refuse(EIO, "FATAL")
						 : soft_refuse_if_inherited(context);

	if (!rc)
		rc = check_create(context, pd, xrcd, &normalized);
	struct soft_qp *qp = soft_alloc_unless_failed(context, sizeof(*qp), &rc);

	if (!rc) {
		qp->transport = attr->qp_type == IBV_QPT_UD ? soft_device.objects->datagrams
							    : soft_device.objects->connected;
		qp->cap = normalized.cap;
		qp->cap.max_inline_data = granted_inline_data(&normalized.cap);
		qp->xrcd = xrcd;
		qp->ibv = (struct ibv_qp){
			.context = context,
			.qp_context = normalized.qp_context,
			.pd = pd,
			.send_cq = normalized.send_cq,
			.recv_cq = normalized.recv_cq,
			.srq = normalized.srq,
			.state = IBV_QPS_RESET,
			.qp_type = normalized.qp_type,
		};
		rc = soft_queues_create(qp);
	}
	if (rc)
		return soft_finish_create(rc, qp);
	qp->sq_sig_all = attr->sq_sig_all;
	qp->rnr_timer.expired = rnr_expired;
	qp->reach_timer.expired = reach_expired;
	qp->retry_timer.expired = qp->transport->retry_expired;
	soft_list_init(&qp->attachments);
	pthread_mutex_init(&qp->ibv.mutex, NULL);
	pthread_cond_init(&qp->ibv.cond, NULL);

	soft_lock();
	rc = soft_qp_number_assign(qp);
	if (!rc) {
		qp->ibv.handle = qp->ibv.qp_num;
		soft_list_append(&soft_context_of(context)->qps, &qp->context_node);
		count_users(qp, 1);
		if (qp->transport->qp_created)
			qp->transport->qp_created();
		SOFT_TRACE(created, qp);
	}
	soft_unlock();
	if (rc)
		soft_queues_destroy(qp);
	else
		attr->cap = qp->cap; /* the granted values (ibv_create_qp(3)) */
	return soft_finish_create(rc, qp);
}

int soft_ibv_destroy_qp(struct ibv_qp *ibv)
{
	struct soft_qp *qp = soft_qp_of(ibv);

	soft_engine_handle_lost_descriptors();
	soft_lock();
	if (!soft_list_empty(&qp->attachments)) {
		soft_unlock();
		/* The queue pair is still attached to a multicast group (ibv_destroy_qp(3)). */
		return soft_call_result("ibv_destroy_qp", "qp_num", ibv->qp_num,
					soft_refuse(EBUSY, "IN_USE"));
	}
	/* The transport counts its queue pairs, to receive only while it has any. In a forked child,
	 * the count does not include the parent's queue pairs. */
	if (qp->transport->qp_destroyed &&
	    !soft_context_is_inherited(soft_context_of(ibv->context)))
		qp->transport->qp_destroyed();
	soft_qp_enter_reset(qp);
	SOFT_TRACE(destroyed, qp);
	soft_qp_number_release(ibv->qp_num);
	soft_list_remove(&qp->context_node);
	count_users(qp, -1);
	soft_async_drop_events(soft_context_of(ibv->context), ibv);
	soft_unlock();

	soft_async_await_acks(soft_context_of(ibv->context), &ibv->mutex, &ibv->cond,
			      &ibv->events_completed, &qp->async_events_retrieved);
	pthread_cond_destroy(&ibv->cond);
	pthread_mutex_destroy(&ibv->mutex);
	soft_batch_destroy(qp->batch);
	soft_queues_destroy(qp);
	if (qp->served)
		soft_served_release(qp->served);
	free(qp);
	return 0;
}

/* ---- states -------------------------------------------------------------------------------- */

static void set_state(struct soft_qp *qp, enum ibv_qp_state to)
{
	SOFT_TRACE(state, qp, to);
	qp->ibv.state = to;
}

static void stop_timers(struct soft_qp *qp)
{
	soft_timer_stop(&qp->rnr_timer);
	soft_timer_stop(&qp->reach_timer);
	soft_timer_stop(&qp->retry_timer);
	qp->rnr_paused = qp->loss_reported = false;
}

void soft_qp_enter_reset(struct soft_qp *qp)
{
	soft_assert_locked();
	qp->on_link_down = NULL;
	stop_timers(qp);
	set_state(qp, IBV_QPS_RESET); /* set first, because no completions are reported in RESET */
	soft_links->revoke_requests(qp);
	soft_links->detach(qp);
	soft_queues_reset(qp);
	/* Remove the queue pair's completions, as cards do, because its number may soon be used
	 * again. Completions of XRC shared receive queues stay, because the application would lose
	 * their receives. */
	if (qp->ibv.send_cq)
		soft_cq_discard(soft_cq_of(qp->ibv.send_cq), qp->ibv.qp_num);
	if (qp->ibv.recv_cq)
		soft_cq_discard(soft_cq_of(qp->ibv.recv_cq), qp->ibv.qp_num);
	memset(&qp->attr, 0, sizeof(qp->attr));
	qp->stream_from_cm = qp->stream_lost = qp->no_peer = false;
	qp->comm_established = qp->draining = false;
}

/* End the draining of the send queue, and report SQ_DRAINED if the application requested it. The
 * event is also reported if the queue fails while it is draining. */
static void end_draining(struct soft_qp *qp)
{
	if (qp->draining && qp->attr.en_sqd_async_notify)
		soft_qp_event(qp, IBV_EVENT_SQ_DRAINED);
	qp->draining = false;
}

void soft_qp_error(struct soft_qp *qp)
{
	soft_assert_locked();
	if (qp->ibv.state == IBV_QPS_RESET || qp->ibv.state == IBV_QPS_ERR)
		return;
	set_state(qp, IBV_QPS_ERR);
	stop_timers(qp);
	soft_flush(qp);
	end_draining(qp);
	/* The queue pair will not take any more receives from its shared receive queue. The
	 * application can now destroy it without losing a receive (IBTA 11.6.3.1). */
	if (qp->ibv.srq)
		soft_qp_event(qp, IBV_EVENT_QP_LAST_WQE_REACHED);
	soft_links->close(qp);
}

/* Move to SQE after a UC or UD request has failed. Only the send queue is in error, and messages
 * are still received (IBTA 10.3.1.6). */
void soft_qp_send_error(struct soft_qp *qp)
{
	set_state(qp, IBV_QPS_SQE);
	soft_timer_stop(&qp->reach_timer);
	soft_flush_sends(qp);
	end_draining(qp);
}

void soft_qp_check_drained(struct soft_qp *qp)
{
	/* The send queue is drained when every request whose transmission has begun is complete
	 * (IBTA 10.3.1.5). */
	if (!qp->draining || qp->ibv.state != IBV_QPS_SQD || qp->sq.oldest != qp->sq.next ||
	    soft_oldest_has_begun(qp))
		return;
	end_draining(qp);
}

/* Connection timeouts for peers on this host and on other hosts. Between hosts, the first packets
 * may be lost, and TCP retransmits them after 1, 3 and 7 s. */
#define CONNECT_TIMEOUT_NS 500000000u
#define REMOTE_CONNECT_TIMEOUT_NS 5000000000u

uint64_t soft_qp_retry_time(const struct soft_qp *qp)
{
	return ((uint64_t)4096 << qp->attr.timeout) * (qp->attr.retry_cnt + 1u);
}

/* Returns how long the queue pair tries to reach its peer before its requests fail, in ns. */
static uint64_t connect_timeout(const struct soft_qp *qp)
{
	const struct ibv_ah_attr *ah = &qp->attr.ah_attr;

	if (!ah->is_global || soft_gid_is_on_this_host(&ah->grh.dgid))
		return CONNECT_TIMEOUT_NS;
	return soft_links->silence_limit() < REMOTE_CONNECT_TIMEOUT_NS ? soft_links->silence_limit()
								       : REMOTE_CONNECT_TIMEOUT_NS;
}

/* Start the timer after which the queue pair gives up on an unreachable peer, if the timer is not
 * already running. It covers all attempts, each of which takes 4.096 us * 2^timeout
 * (IBTA 9.7.6.1.3), but at least `min_ns` and at most a minute. If the timeout attribute is 0,
 * there is no timer and requests wait forever. UC does not have this attribute and uses
 * `min_ns`. */
static void start_reach_timer(struct soft_qp *qp, uint64_t min_ns)
{
	const uint64_t max_ns = 60000000000u;
	uint64_t time = soft_qp_retry_time(qp);

	if ((qp->attr.timeout || soft_qp_is_uc(qp)) && !qp->reach_timer.running)
		soft_timer_start(&qp->reach_timer, soft_now() + (time < min_ns   ? min_ns
								 : time > max_ns ? max_ns
										 : time));
}

void soft_qp_kick(struct soft_qp *qp)
{
	soft_assert_locked();
	if (qp->ibv.state == IBV_QPS_ERR) {
		soft_flush(qp);
		return;
	}
	if (qp->ibv.state == IBV_QPS_SQE) {
		soft_flush_sends(qp);
		return;
	}
	if (qp->ibv.state == IBV_QPS_SQD && qp->link && soft_oldest_has_begun(qp))
		soft_qp_link_output(qp->link); /* complete the requests that have begun */
	if (qp->ibv.state != IBV_QPS_RTS)
		return;
	soft_send_advance(qp); /* local requests need no stream */
	if (qp->ibv.state != IBV_QPS_RTS || qp->sq.oldest == qp->sq.tail)
		return;
	if (soft_qp_is_ud(qp))
		qp->transport->output(qp);
	else if (qp->link && qp->link->state == SOFT_LINK_UP && !soft_port_is_down(qp))
		soft_qp_link_output(qp->link);
	else if (soft_qp_is_uc(qp) && (qp->no_peer || qp->stream_lost))
		/* UC has no acknowledgements, so its messages are lost unnoticed. */
		qp->transport->discard_sends(qp);
	else if (!qp->link || qp->link->state != SOFT_LINK_SELECTING)
		/* A link in SELECTING needs no timer, because it already has a peer. */
		start_reach_timer(qp, qp->stream_lost ? 0 : connect_timeout(qp));
}

void soft_qp_stall(struct soft_qp *qp)
{
	if (qp->link && qp->link->state == SOFT_LINK_UP && !soft_qp_is_uc(qp))
		start_reach_timer(qp, CONNECT_TIMEOUT_NS);
}

void soft_qp_end_with_peer(struct ibv_qp *ibv)
{
	soft_lock();
	soft_qp_of(ibv)->ends_with_peer = true;
	soft_unlock();
}

/* Returns whether `error` means that the peer or the path has disappeared. Other errors mean that
 * one side has aborted the connection. */
static bool is_peer_loss(int error)
{
	switch (error) {
	case 0:
	case ECONNRESET:
	case EPIPE:
	case ETIMEDOUT:
	case EHOSTUNREACH:
	case ENETUNREACH:
	case ENETDOWN:
		return true;
	default:
		return false;
	}
}

void soft_qp_link_ended(struct soft_qp *qp, int error)
{
	void (*on_link_down)(struct soft_qp *qp, void *owner, int error) = qp->on_link_down;

	bool alive = qp->ibv.state != IBV_QPS_ERR && qp->ibv.state != IBV_QPS_RESET;

	qp->on_link_down = NULL;
	if (soft_qp_is_uc(qp) && !qp->stream_from_cm) {
		/* UC raises no event when it loses its link (IBTA 9.8.2). Messages are lost until a
		 * new link is established. */
		qp->no_peer = true;
		if (alive) {
			soft_links->reconnect(qp);
			qp->transport->discard_sends(qp);
		}
		return;
	}
	qp->stream_lost = true;
	if (alive && soft_qp_is_uc(qp)) {
		qp->transport->discard_sends(qp);
	} else if (alive) {
		bool outstanding = qp->sq.oldest != qp->sq.tail;
		/* Losing the peer alone changes no state, as on a card, unless the application has
		 * requested it (aiordma_device_calls.end_with_peer). */
		bool fails_now = !is_peer_loss(error) || (error && qp->ends_with_peer);

		if (fails_now)
			soft_qp_event(qp, IBV_EVENT_QP_FATAL);
		if (fails_now && !outstanding)
			soft_qp_error(qp);
		else if (fails_now || (outstanding && error == ETIMEDOUT)) /* retries exhausted */
			soft_send_fail(qp, error == EPROTO ? IBV_WC_BAD_RESP_ERR
							   : IBV_WC_RETRY_EXC_ERR);
		else if (outstanding)
			/* The peer has destroyed its queue pair, or its process has ended, so it
			 * will not respond. Keep this queue pair in its current state, and fail its
			 * requests when their retries are exhausted (IBTA 9.7.6.1.3). Until then,
			 * frames that the peer sent earlier on other streams are still handled. */
			start_reach_timer(qp, 0);
	}
	if (on_link_down)
		on_link_down(qp, qp->link_owner, error);
}

/* ---- modify -------------------------------------------------------------------------------- */

/* Check that the mask contains every attribute that abi/qp_states.h requires for the transition,
 * and no attribute that it does not allow. Returns 0 or EINVAL. */
static int check_transition(const struct soft_qp *qp, enum ibv_qp_state to, uint32_t mask)
{
	static const struct step {
		uint8_t type, from, to;
		uint32_t required, optional;
	} steps[] = {
#define QP_STEP(type, from, to, required, optional)                                                \
	{IBV_QPT_##type, IBV_QPS_##from, IBV_QPS_##to, required, optional},
#include "abi/qp_states.h"
#undef QP_STEP
	};
	static const struct step end = {0}; /* transition to RESET or ERR */
	const struct step *step = NULL;
	enum ibv_qp_state from = qp->ibv.state;

	mask &= ~(uint32_t)IBV_QP_STATE;
	if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET))
		step = &end;
	for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]) && !step; i++)
		if (steps[i].type == qp->ibv.qp_type && steps[i].from == from && steps[i].to == to)
			step = &steps[i];
	if (!step)
		return soft_refuse(EINVAL, "TRANSITION");
	if (step->required & ~mask)
		return soft_refuse_attributes("MASK_MISSING", step->required & ~mask);
	mask &= ~(step->required | step->optional);
	return mask ? soft_refuse_attributes("MASK_UNEXPECTED", mask) : 0;
}

/* Validate the attribute values (ibv_modify_qp(3)). If `skip_route_check` is set, skip the check
 * that the kernel has a route to the peer. Returns 0 or an errno value. */
static int check_values(struct soft_hca *hca, const struct ibv_qp_attr *attr, int mask,
			bool skip_route_check)
{
	struct soft_gid own;
	/* Accept rights that only apply to regions, because programs pass the same rights here as
	 * at registration. */
	const unsigned rights = SOFT_COMMON_RIGHTS | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED |
				IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB |
				IBV_ACCESS_FLUSH_GLOBAL | IBV_ACCESS_FLUSH_PERSISTENT |
				IBV_ACCESS_RELAXED_ORDERING;

	/* Automatic path migration needs a second path, which a stream does not have. */
	if (mask & IBV_QP_ALT_PATH ||
	    (mask & IBV_QP_PATH_MIG_STATE && attr->path_mig_state != IBV_MIG_MIGRATED))
		return soft_refuse(EOPNOTSUPP, "ALT_PATH");
	if (mask & IBV_QP_PORT && attr->port_num != 1)
		return soft_refuse_value("PORT", "port_num", attr->port_num);
	if (mask & IBV_QP_PKEY_INDEX && attr->pkey_index != 0)
		return soft_refuse_value("PKEY_INDEX", "pkey_index", attr->pkey_index);
	if (mask & IBV_QP_ACCESS_FLAGS && attr->qp_access_flags & ~rights)
		return soft_refuse_value("ACCESS", "qp_access_flags", attr->qp_access_flags);
	if (mask & IBV_QP_PATH_MTU &&
	    (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096))
		return soft_refuse_value("MTU", "path_mtu", attr->path_mtu);
#define GIVEN(bit, member) #member, (mask & IBV_QP_##bit ? attr->member : 0u)
	const struct soft_limit limits[] = {
		{GIVEN(DEST_QPN, dest_qp_num), SOFT_PSN_MASK},
		{GIVEN(MAX_QP_RD_ATOMIC, max_rd_atomic), SOFT_MAX_RD_ATOMIC},
		{GIVEN(MAX_DEST_RD_ATOMIC, max_dest_rd_atomic), SOFT_MAX_RD_ATOMIC},
		{GIVEN(MIN_RNR_TIMER, min_rnr_timer), 31},
		{GIVEN(TIMEOUT, timeout), 31},
		{GIVEN(RETRY_CNT, retry_cnt), 7},
		{GIVEN(RNR_RETRY, rnr_retry), 7},
	};
#undef GIVEN
	int rc = soft_check_limits(limits, sizeof(limits) / sizeof(limits[0]));

	if (rc || !(mask & IBV_QP_AV))
		return rc;
	if (!skip_route_check)
		return soft_ah_get_source(hca, &attr->ah_attr, &own);
	return soft_gid_at(hca, attr->ah_attr.grh.sgid_index, &own)
		       ? soft_refuse_value("SGID_INDEX", "sgid_index", attr->ah_attr.grh.sgid_index)
		       : 0;
}

#define COPY(bit, member)                                                                          \
	do {                                                                                       \
		if (mask & (bit))                                                                  \
			own->member = attr->member;                                                \
	} while (0)

static void apply_attr(struct ibv_qp_attr *own, const struct ibv_qp_attr *attr, int mask)
{
	COPY(IBV_QP_EN_SQD_ASYNC_NOTIFY, en_sqd_async_notify);
	COPY(IBV_QP_ACCESS_FLAGS, qp_access_flags);
	COPY(IBV_QP_PKEY_INDEX, pkey_index);
	COPY(IBV_QP_QKEY, qkey);
	COPY(IBV_QP_PORT, port_num);
	COPY(IBV_QP_AV, ah_attr);
	COPY(IBV_QP_PATH_MTU, path_mtu);
	COPY(IBV_QP_TIMEOUT, timeout);
	COPY(IBV_QP_RETRY_CNT, retry_cnt);
	COPY(IBV_QP_RNR_RETRY, rnr_retry);
	COPY(IBV_QP_RQ_PSN, rq_psn);
	COPY(IBV_QP_SQ_PSN, sq_psn);
	COPY(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
	COPY(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
	COPY(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
	COPY(IBV_QP_DEST_QPN, dest_qp_num);
	own->rq_psn &= SOFT_PSN_MASK;
	own->sq_psn &= SOFT_PSN_MASK;
}
#undef COPY

/* Returns whether the queue pair connects in RTS instead of RTR. An XRC_SEND queue pair receives no
 * requests, and must tell its peer the PSN of its first request, which is unknown before RTS. */
static bool connects_in_rts(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_XRC_SEND;
}

/* Returns the mask without the attributes that only apply to the other end of an XRC connection.
 * Programs set these attributes, and the kernel ignores them. */
static int relevant_mask(enum ibv_qp_type type, int mask)
{
	switch (type) {
	case IBV_QPT_XRC_SEND:
		return mask & ~(IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	case IBV_QPT_XRC_RECV:
		return mask & ~(IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY);
	default:
		return mask;
	}
}

/* Connect the queue pair after a transition, or restore the state `from` on failure. Returns 0 or
 * an errno value. */
static int begin_link(struct soft_qp *qp, enum ibv_qp_state from)
{
	int rc = soft_links->connect(qp);

	if (rc)
		set_state(qp, from);
	return rc ? soft_refuse(rc, "LINK") : 0;
}

static int modify(struct ibv_qp *ibv, const struct ibv_qp_attr *attr, int attr_mask,
		  enum ibv_qp_state to, bool skip_route_check)
{
	struct soft_qp *qp = soft_qp_of(ibv);
	enum ibv_qp_state from = ibv->state;
	int rc;

	if (soft_context_of(ibv->context)->fatal)
		return soft_refuse(EIO, "FATAL");
	rc = soft_refuse_if_inherited(ibv->context);
	if (rc)
		return rc;
	if (attr_mask & IBV_QP_CUR_STATE && attr->cur_qp_state != from)
		return soft_refuse_value("CUR_STATE", "cur_qp_state", attr->cur_qp_state);
	rc = check_transition(qp, to, (uint32_t)attr_mask);
	if (rc)
		return rc;
	rc = check_values(soft_hca_of(ibv->context), attr, attr_mask, skip_route_check);
	if (rc)
		return rc;
	if (from == IBV_QPS_INIT && to == IBV_QPS_RTR && qp->transport->prepare_rtr) {
		rc = qp->transport->prepare_rtr(
			qp, attr_mask & IBV_QP_MAX_DEST_RD_ATOMIC ? attr->max_dest_rd_atomic : 0,
			attr->rq_psn);
	} else if (attr_mask & IBV_QP_MAX_DEST_RD_ATOMIC && qp->transport->resize) { /* in SQD */
		rc = qp->transport->resize(qp, attr->max_dest_rd_atomic);
	}
	if (rc)
		return soft_refuse(rc, "LINK");
	apply_attr(&qp->attr, attr, attr_mask);
	if (attr_mask & IBV_QP_RNR_RETRY)
		qp->rnr_retries_remaining = qp->attr.rnr_retry;
	if (attr_mask & IBV_QP_RETRY_CNT)
		qp->retries_remaining = qp->attr.retry_cnt;
	if (attr_mask & IBV_QP_SQ_PSN)
		qp->sq.psn = qp->sq.next_psn = qp->sq.unacked = qp->sq.unsent = qp->attr.sq_psn;

	switch (to) {
	case IBV_QPS_RESET:
		soft_qp_enter_reset(qp);
		return 0;
	case IBV_QPS_ERR:
		soft_qp_error(qp);
		return 0;
	case IBV_QPS_SQD:
		set_state(qp, to);
		if (from == IBV_QPS_RTS)
			qp->draining = true;
		soft_qp_check_drained(qp);
		return 0;
	case IBV_QPS_RTR:
		set_state(qp, to);
		if (from == IBV_QPS_INIT && !soft_qp_is_ud(qp) && !connects_in_rts(qp))
			rc = begin_link(qp, from);
		return rc;
	case IBV_QPS_RTS:
		set_state(qp, to);
		qp->draining = false;
		if (from == IBV_QPS_RTR && connects_in_rts(qp))
			rc = begin_link(qp, from);
		if (rc)
			return rc;
		soft_links->entered_rts(qp, from == IBV_QPS_RTR);
		soft_qp_kick(qp);
		return 0;
	default:
		set_state(qp, to);
		return 0;
	}
}

int soft_modify_qp_locked(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int attr_mask,
			  bool skip_route_check)
{
	soft_assert_locked();
	enum ibv_qp_state to = attr_mask & IBV_QP_STATE ? attr->qp_state : ibv->state;
	int rc = modify(ibv, attr, relevant_mask(ibv->qp_type, attr_mask), to, skip_route_check);

	if (rc) {
		const struct soft_refusal_note note = soft_refusal_take(rc);

		SOFT_TRACE(modify_refused, soft_qp_of(ibv), to, rc, &note);
	}
	return rc;
}

int soft_ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask)
{
	const bool skip_route_check = false;

	soft_engine_handle_lost_descriptors();
	soft_lock();
	int rc = soft_modify_qp_locked(qp, attr, attr_mask, skip_route_check);

	soft_unlock();
	return rc;
}

/* Store all attributes regardless of the mask, as ibv_query_qp(3) allows. */
int soft_ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int attr_mask,
		      struct ibv_qp_init_attr *init_attr)
{
	struct soft_qp *qp = soft_qp_of(ibv);

	(void)attr_mask;
	soft_lock();
	*attr = qp->attr;
	attr->qp_state = attr->cur_qp_state = ibv->state;
	attr->cap = qp->cap;
	attr->sq_draining = qp->draining;
	if (ibv->state != IBV_QPS_RESET && ibv->state != IBV_QPS_INIT) {
		attr->rq_psn = qp->responder.expected_psn;
		attr->sq_psn = soft_send_psn(qp, qp->sq.next);
	}
	soft_unlock();
	*init_attr = (struct ibv_qp_init_attr){
		.qp_context = ibv->qp_context,
		.send_cq = ibv->send_cq,
		.recv_cq = ibv->recv_cq,
		.srq = ibv->srq,
		.cap = qp->cap,
		.qp_type = ibv->qp_type,
		.sq_sig_all = qp->sq_sig_all,
	};
	return 0;
}

/* ---- for the connection manager ------------------------------------------------------------ */

void soft_qp_set_on_link_down(struct soft_qp *qp,
			      void (*on_link_down)(struct soft_qp *qp, void *owner, int error),
			      void *owner)
{
	soft_assert_locked();
	qp->on_link_down = on_link_down;
	qp->link_owner = owner;
}

int soft_qp_disconnect(struct soft_qp *qp)
{
	soft_assert_locked();
	soft_qp_error(qp);
	return qp->link ? 0 : ENOTCONN;
}
