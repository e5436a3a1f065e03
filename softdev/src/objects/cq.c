/* Completion queues, which are rings of work completions that can be armed to raise events.
 *
 * Each CQ has its own lock, so that polling does not wait for the engine. Adding a completion takes
 * the engine's lock and the CQ's lock, while polling takes only the CQ's lock. Checking for an
 * empty CQ takes no lock. A thread that polls an empty CQ then performs a step of the device's
 * work.
 */

#include "extended.h"
#include "trace/trace.h"
#include "inject/inject.h"

static struct soft_comp_channel *channel_of(const struct soft_cq *cq)
{
	return cq->ibv.channel ? soft_container(cq->ibv.channel, struct soft_comp_channel, ibv)
			       : NULL;
}

/* Fail the queue pairs that use an overflowed CQ, because their completions have been lost (IBTA
 * 11.6.3.2, ibv_poll_cq(3)). The call is deferred to the end of the step, because adding a
 * completion must not change queue pairs that are being processed. */
static void fail_queue_pairs(struct soft_deferred *deferred)
{
	struct soft_cq *cq = soft_container(deferred, struct soft_cq, overrun_work);

	soft_list_each (struct soft_qp, qp, &soft_context_of(cq->ibv.context)->qps, context_node) {
		if ((qp->ibv.send_cq != &cq->ibv && qp->ibv.recv_cq != &cq->ibv) ||
		    qp->ibv.state == IBV_QPS_RESET || qp->ibv.state == IBV_QPS_ERR)
			continue;
		soft_qp_event(qp, IBV_EVENT_QP_FATAL);
		soft_qp_error(qp);
	}
}

/* Arm or disarm a CQ. The channel and the engine count armed CQs to decide whether the engine's
 * thread must wake sleeping threads. CQs inherited by a forked child are not counted. The caller
 * holds the CQ's lock. */
static void set_armed(struct soft_cq *cq, enum soft_armed armed)
{
	struct soft_comp_channel *channel = channel_of(cq);

	if (channel && !cq->armed != !armed &&
	    !soft_context_is_inherited(soft_context_of(cq->ibv.context))) {
		soft_counter_add(&channel->channel.armed_sources, armed ? 1u : -1u);
		soft_engine_count_armed(armed ? 1 : -1);
	}
	cq->armed = armed;
}

int soft_req_notify_cq(struct ibv_cq *ibv, int solicited_only)
{
	struct soft_cq *cq = soft_cq_of(ibv);

	pthread_mutex_lock(&cq->lock);
	soft_hint_set(&cq->just_armed, true); /* the next empty poll runs no step (poll_device) */
	/* Arming for solicited completions does not cancel an earlier request for all completions
	 * (IBTA 11.4.2.2). */
	if (!solicited_only)
		set_armed(cq, SOFT_ARMED);
	else if (cq->armed == SOFT_UNARMED)
		set_armed(cq, SOFT_ARMED_SOLICITED);
	pthread_mutex_unlock(&cq->lock);
	soft_engine_prepare_sleep();
	return 0;
}

/* Remove the `run` oldest completions, which must be contiguous in the ring. The caller holds the
 * CQ's lock. */
static void remove_oldest(struct soft_cq *cq, uint32_t run)
{
	cq->first += run;
	if (cq->first == cq->capacity)
		cq->first = 0;
	soft_hint_set(&cq->count, cq->count - run);
}

/* ---- events -------------------------------------------------------------------------------- */

/* Disarm the CQ and queue its event on the channel. The caller holds the CQ's lock and the engine's
 * lock. */
static void raise_event(struct soft_cq *cq)
{
	struct soft_comp_channel *channel = channel_of(cq);

	cq->moderated_count = 0;
	soft_timer_stop(&cq->moderation_timer);
	set_armed(cq, SOFT_UNARMED);
	if (channel)
		soft_comp_channel_queue_event(channel, cq);
}

/* Returns whether the CQ moderates its events. Moderation requires both a count and a period,
 * because a count alone could delay an event forever. */
static bool is_moderated(const struct soft_cq *cq)
{
	return cq->moderation.cq_count > 1 && cq->moderation.cq_period;
}

/* Raise an event for a new completion, or delay it if the CQ moderates its events. A delayed event
 * is raised after cq_count completions, or cq_period microseconds after the first
 * (ibv_modify_cq(3)). */
static void raise_or_moderate_event(struct soft_cq *cq)
{
	cq->moderated_count++;
	if (!is_moderated(cq) || cq->moderated_count >= cq->moderation.cq_count)
		raise_event(cq);
	else if (cq->moderated_count == 1)
		soft_timer_start(&cq->moderation_timer,
				 soft_now() + cq->moderation.cq_period * (uint64_t)1000);
}

static void moderation_expired(struct soft_timer *timer)
{
	struct soft_cq *cq = soft_container(timer, struct soft_cq, moderation_timer);

	pthread_mutex_lock(&cq->lock);
	if (cq->moderated_count)
		raise_event(cq);
	pthread_mutex_unlock(&cq->lock);
}

int soft_modify_cq(struct ibv_cq *ibv, struct ibv_modify_cq_attr *attr)
{
	struct soft_cq *cq = soft_cq_of(ibv);

	if (attr->attr_mask & ~(uint32_t)IBV_CQ_ATTR_MODERATE)
		return soft_call_result("ibv_modify_cq", "cq", ibv->handle,
					soft_refuse_value("FLAGS", "attr_mask", attr->attr_mask));
	if (!(attr->attr_mask & IBV_CQ_ATTR_MODERATE))
		return 0;
	soft_lock();
	pthread_mutex_lock(&cq->lock);
	cq->moderation = attr->moderate;
	/* Raise the event that the previous setting has delayed. */
	if (cq->moderated_count)
		raise_event(cq);
	pthread_mutex_unlock(&cq->lock);
	soft_unlock();
	return 0;
}

/* ---- completions --------------------------------------------------------------------------- */

static uint64_t wallclock(void)
{
	struct timespec now;

	soft_device.platform->clock(CLOCK_REALTIME, &now);
	return soft_nanoseconds(&now);
}

/* Returns whether fault injection makes the CQ overflow. */
static bool should_inject_overrun(const struct soft_cq *cq)
{
	return soft_faults_set &&
	       soft_fault_should_inject(SOFT_FAULT_OVERRUN, soft_hca_of(cq->ibv.context)->port_bit,
					cq->ibv.handle);
}

bool soft_cq_push(struct soft_cq *cq, const struct ibv_wc *wc, bool solicited)
{
	soft_assert_locked();
	pthread_mutex_lock(&cq->lock);
	if (cq->overrun) {
		pthread_mutex_unlock(&cq->lock);
		return false;
	}
	if ((cq->count == cq->capacity || should_inject_overrun(cq)) && !cq->ignore_overrun) {
		cq->overrun = true;
		pthread_mutex_unlock(&cq->lock);
		soft_async_queue_event(soft_context_of(cq->ibv.context),
				       &(struct ibv_async_event){.element.cq = &cq->ibv,
								 .event_type = IBV_EVENT_CQ_ERR});
		soft_defer(&cq->overrun_work);
		return false;
	}
	/* If a full CQ ignores overruns, the new completion replaces the oldest
	 * (ibv_create_cq_ex(3)). */
	if (cq->count == cq->capacity)
		remove_oldest(cq, 1);
	uint32_t at = cq->first + cq->count;

	if (at >= cq->capacity)
		at -= cq->capacity;
	cq->ring[at] = *wc;
	if (cq->stamps)
		cq->stamps[at] = (struct soft_stamp){soft_now(), wallclock()};
	soft_publish(&cq->count, cq->count + 1);
	if (cq->armed == SOFT_ARMED ||
	    (cq->armed == SOFT_ARMED_SOLICITED && (solicited || wc->status != IBV_WC_SUCCESS)))
		raise_or_moderate_event(cq);
	pthread_mutex_unlock(&cq->lock);
	return true;
}

/* Remove a queue pair's completions but keep the CQ's events. Applications must expect events
 * without completions (ibv_get_cq_event(3)). */
void soft_cq_discard(struct soft_cq *cq, uint32_t qp_num)
{
	uint32_t kept = 0;

	if (soft_context_is_inherited(soft_context_of(cq->ibv.context)))
		return; /* a thread of the parent may have held the lock */
	pthread_mutex_lock(&cq->lock);
	for (uint32_t i = 0; i < cq->count; i++) {
		uint32_t from = (cq->first + i) % cq->capacity,
			 to = (cq->first + kept) % cq->capacity;

		if (cq->ring[from].qp_num == qp_num)
			continue;
		cq->ring[to] = cq->ring[from];
		if (cq->stamps)
			cq->stamps[to] = cq->stamps[from];
		kept++;
	}
	soft_hint_set(&cq->count, kept);
	pthread_mutex_unlock(&cq->lock);
}

static int pop(struct soft_cq *cq, int room, struct ibv_wc *wc, struct soft_stamp *stamps)
{
	int popped = 0;

	pthread_mutex_lock(&cq->lock);
	while (popped < room && cq->count) {
		uint32_t run = cq->capacity - cq->first; /* up to the ring's end */

		if (run > cq->count)
			run = cq->count;
		if (run > (uint32_t)(room - popped))
			run = (uint32_t)(room - popped);
		memcpy(&wc[popped], &cq->ring[cq->first], run * sizeof(*wc));
		if (stamps && cq->stamps)
			memcpy(&stamps[popped], &cq->stamps[cq->first], run * sizeof(*stamps));
		remove_oldest(cq, run);
		popped += (int)run;
	}
	/* An overflowed CQ cannot be used (ibv_poll_cq(3)). Report the overflow only after all
	 * completions have been returned. */
	if (!popped && cq->overrun && room > 0)
		popped = -1;
	pthread_mutex_unlock(&cq->lock);
	return popped;
}

/* Perform a step of the device's work because a thread has polled an empty CQ. */
static void poll_device(struct soft_cq *cq)
{
	/* After arming the CQ, applications poll once for earlier completions and then wait for an
	 * event. Skip the step here, because waiting performs it. */
	if (soft_hint_get(&cq->just_armed)) {
		soft_hint_set(&cq->just_armed, false);
		return;
	}
	soft_progress_try();
	if (!soft_observe(&cq->count))
		soft_progress_missed(soft_counter_add(&cq->empty_polls, 1));
}

int soft_cq_pop(struct soft_cq *cq, int room, struct ibv_wc *wc, struct soft_stamp *stamps)
{
	if (soft_observe(&cq->count) == 0)
		poll_device(cq);
	return pop(cq, room, wc, stamps);
}

int soft_poll_cq(struct ibv_cq *ibv, int num_entries, struct ibv_wc *wc)
{
	return soft_cq_pop(soft_cq_of(ibv), num_entries, wc, NULL);
}

/* ---- life ---------------------------------------------------------------------------------- */

static int make_rings(struct ibv_pd *pd, uint32_t capacity, bool with_timestamps,
		      struct ibv_wc **ring, struct soft_stamp **stamps)
{
	*ring = soft_queue_alloc(pd, capacity, sizeof(**ring), SOFT_COMPLETION_QUEUE);
	*stamps = with_timestamps
			  ? soft_queue_alloc(pd, capacity, sizeof(**stamps), SOFT_COMPLETION_QUEUE)
			  : NULL;
	if (*ring && (*stamps || !with_timestamps))
		return 0;
	soft_queue_free(*ring);
	soft_queue_free(*stamps);
	return ENOMEM;
}

/* Check the requested number of entries. Returns 0 or EINVAL. */
static int check_entries(int cqe)
{
	const struct soft_limit limit = {"cqe", (uint64_t)cqe, SOFT_MAX_CQE};

	return cqe < 1 ? soft_refuse_value("NO_ENTRIES", "cqe", cqe < 0 ? (uint32_t)cqe : 0)
		       : soft_check_limits(&limit, 1);
}

static int check_create(const struct ibv_context *context, int cqe,
			const struct ibv_comp_channel *channel, int comp_vector)
{
	const struct soft_limit limit = {"comp_vector", (uint32_t)comp_vector,
					 (uint32_t)context->num_comp_vectors - 1};
	int rc = check_entries(cqe);

	if (!rc)
		rc = soft_check_limits(&limit, 1);
	if (!rc && channel && channel->context->device != context->device)
		rc = soft_refuse(EINVAL, "FOREIGN_OBJECT");
	return rc;
}

struct soft_cq *soft_cq_make(struct ibv_context *context, int cqe, struct ibv_comp_channel *channel,
			     int comp_vector, bool with_timestamps, struct ibv_pd *pd)
{
	int rc = check_create(context, cqe, channel, comp_vector);
	struct soft_cq *cq = soft_alloc_unless_failed(context, sizeof(*cq), &rc);

	if (!rc)
		rc = make_rings(pd, (uint32_t)cqe, with_timestamps, &cq->ring, &cq->stamps);
	if (rc)
		return soft_finish_create(rc, cq);
	cq->parent_domain = pd;
	cq->capacity = (uint32_t)cqe;
	cq->ibv = (struct ibv_cq){.context = context, .channel = channel, .cqe = cqe};
	pthread_mutex_init(&cq->lock, NULL);
	pthread_mutex_init(&cq->ibv.mutex, NULL);
	pthread_cond_init(&cq->ibv.cond, NULL);
	soft_list_init(&cq->ready_node);
	soft_list_init(&cq->overrun_work.node);
	cq->overrun_work.run = fail_queue_pairs;
	cq->moderation_timer.expired = moderation_expired;
	return cq;
}

void soft_cq_publish(struct soft_cq *cq, void *cq_context)
{
	soft_lock();
	cq->ibv.cq_context = cq_context;
	cq->ibv.handle = ++soft_device.objects->handles.cq;
	if (cq->ibv.channel)
		cq->ibv.channel->refcnt++;
	if (cq->parent_domain)
		soft_pd_of(cq->parent_domain)->users++;
	soft_context_hold(soft_context_of(cq->ibv.context));
	soft_unlock();
}

struct ibv_cq *soft_ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				  struct ibv_comp_channel *channel, int comp_vector)
{
	const bool with_timestamps = false;
	struct soft_cq *cq =
		soft_cq_make(context, cqe, channel, comp_vector, with_timestamps, NULL);

	if (!cq)
		return soft_call_pointer_result("ibv_create_cq", NULL, 0, NULL);
	soft_cq_publish(cq, cq_context);
	return &cq->ibv;
}

static int resize(struct ibv_cq *ibv, int cqe)
{
	struct soft_cq *cq = soft_cq_of(ibv);
	struct soft_stamp *stamps;
	struct ibv_wc *ring;
	int rc = check_entries(cqe);

	if (rc)
		return rc;
	rc = make_rings(cq->parent_domain, (uint32_t)cqe, cq->stamps, &ring, &stamps);
	if (rc)
		return rc;
	pthread_mutex_lock(&cq->lock);
	if (cq->count > (uint32_t)cqe) {
		/* The new ring must hold all outstanding completions (ibv_resize_cq(3)). */
		rc = soft_refuse_value("OUTSTANDING", "cqe", (unsigned)cqe);
	} else {
		struct soft_stamp *old_stamps = cq->stamps;
		struct ibv_wc *old_ring = cq->ring;

		for (uint32_t i = 0; i < cq->count; i++) {
			uint32_t at = (cq->first + i) % cq->capacity;

			ring[i] = old_ring[at];
			if (stamps)
				stamps[i] = old_stamps[at];
		}
		cq->ring = ring;
		cq->stamps = stamps;
		/* The old arrays are freed below, without the lock. */
		ring = old_ring;
		stamps = old_stamps;
		cq->first = 0;
		cq->capacity = (uint32_t)cqe;
		cq->ibv.cqe = cqe;
	}
	pthread_mutex_unlock(&cq->lock);
	soft_queue_free(ring);
	soft_queue_free(stamps);
	return rc;
}

int soft_ibv_resize_cq(struct ibv_cq *ibv, int cqe)
{
	return soft_call_result("ibv_resize_cq", "cq", ibv->handle, resize(ibv, cqe));
}

int soft_ibv_destroy_cq(struct ibv_cq *ibv)
{
	struct soft_cq *cq = soft_cq_of(ibv);
	struct soft_context *context = soft_context_of(ibv->context);
	struct soft_comp_channel *channel = channel_of(cq);
	uint32_t retrieved = 0;

	soft_lock();
	if (cq->users) {
		soft_unlock();
		/* A queue pair still uses the CQ (ibv_destroy_cq(3)). */
		return soft_call_result("ibv_destroy_cq", "cq", ibv->handle,
					soft_refuse(EBUSY, "IN_USE"));
	}
	soft_deferred_cancel(&cq->overrun_work);
	soft_timer_stop(&cq->moderation_timer);
	/* In a forked child, a thread of the parent may have held the locks. */
	if (!soft_context_is_inherited(context)) {
		pthread_mutex_lock(&cq->lock);
		set_armed(cq, SOFT_UNARMED);
		pthread_mutex_unlock(&cq->lock);
		if (channel) {
			soft_comp_channel_remove_cq(channel, cq);
			retrieved = cq->events_retrieved;
		}
	}
	soft_async_drop_events(context, ibv);
	soft_unlock();

	soft_async_await_acks(context, &ibv->mutex, &ibv->cond, &ibv->comp_events_completed,
			      &retrieved);
	soft_async_await_acks(context, &ibv->mutex, &ibv->cond, &ibv->async_events_completed,
			      &cq->async_events_retrieved);
	soft_lock();
	if (channel)
		channel->ibv.refcnt--;
	if (cq->parent_domain)
		soft_pd_of(cq->parent_domain)->users--;
	soft_unlock();
	soft_context_release(context);
	pthread_cond_destroy(&ibv->cond);
	pthread_mutex_destroy(&ibv->mutex);
	pthread_mutex_destroy(&cq->lock);
	soft_cq_reader_destroy(cq->reader);
	soft_queue_free(cq->ring);
	soft_queue_free(cq->stamps);
	free(cq);
	return 0;
}
