/* Completion queues: a ring of work completions, a lock, and the arming that makes events.
 *
 * A CQ has a lock of its own so that polling does not wait for the engine: completions are put in
 * under the engine's lock and the CQ's, and taken out under the CQ's alone.  An empty CQ is seen to
 * be empty without any lock, and then the polling thread does a step of the device's work.
 */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "objects.h"

enum { POLLS_PER_YIELD = 64 };

static struct soft_comp_channel *channel_of(const struct soft_cq *cq)
{
	return cq->ibv.channel ? soft_container(cq->ibv.channel, struct soft_comp_channel, ibv) :
				 NULL;
}

/* A CQ that has overflowed has lost completions: whoever completes there cannot go on
 * (IBTA 11.6.3.1; ibv_poll_cq(3)).  Done at the end of the step, because completions are put in
 * the middle of everything. */
static void fail_users(struct soft_deferred *deferred)
{
	struct soft_cq *cq = soft_container(deferred, struct soft_cq, overrun_work);
	struct soft_context *context = soft_context_of(cq->ibv.context);

	for (struct soft_node *node = context->qps.next; node != &context->qps; node = node->next) {
		struct soft_qp *qp = soft_list_entry(node, struct soft_qp, of_context);

		if ((qp->ibv.send_cq != &cq->ibv && qp->ibv.recv_cq != &cq->ibv) ||
		    qp->ibv.state == IBV_QPS_RESET || qp->ibv.state == IBV_QPS_ERR)
			continue;
		soft_qp_event(qp, IBV_EVENT_QP_FATAL);
		soft_qp_error(qp);
	}
}

struct ibv_cq *soft_ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				  struct ibv_comp_channel *channel, int comp_vector)
{
	static uint32_t handle;
	struct soft_cq *cq = NULL;
	int rc = 0;

	if (cqe < 1 || cqe > SOFT_MAX_CQE || comp_vector < 0 || comp_vector >= SOFT_COMP_VECTORS)
		rc = EINVAL;
	if (!rc) {
		cq = calloc(1, sizeof(*cq));
		rc = cq ? 0 : ENOMEM;
	}
	if (!rc) {
		cq->ring = calloc((size_t)cqe, sizeof(*cq->ring));
		rc = cq->ring ? 0 : ENOMEM;
	}
	if (rc) {
		free(cq);
		errno = rc;
		return NULL;
	}
	cq->capacity = (uint32_t)cqe;
	cq->ibv = (struct ibv_cq){
		.context = context,
		.channel = channel,
		.cq_context = cq_context,
		.cqe = cqe,
	};
	pthread_mutex_init(&cq->lock, NULL);
	pthread_mutex_init(&cq->ibv.mutex, NULL);
	pthread_cond_init(&cq->ibv.cond, NULL);
	soft_list_init(&cq->ready_node);
	soft_list_init(&cq->overrun_work.node);
	cq->overrun_work.run = fail_users;
	soft_lock();
	cq->ibv.handle = ++handle;
	if (channel)
		channel->refcnt++;
	soft_context_hold(soft_context_of(context));
	soft_unlock();
	return &cq->ibv;
}

/* Armed CQs are counted in their channel: the engine's thread must not leave a sleeper waiting. */
static void set_armed(struct soft_cq *cq, enum soft_armed armed)
{
	struct soft_comp_channel *channel = channel_of(cq);

	if (channel && !cq->armed != !armed)
		__atomic_fetch_add(&channel->channel.wanted, armed ? 1u : -1u, __ATOMIC_RELAXED);
	cq->armed = armed;
}

int soft_req_notify_cq(struct ibv_cq *ibv, int solicited_only)
{
	struct soft_cq *cq = soft_cq_of(ibv);

	pthread_mutex_lock(&cq->lock);
	__atomic_store_n(&cq->just_armed, true, __ATOMIC_RELAXED);
	/* Asking for less does not take back what was asked for before (IBTA 11.4.2.2). */
	if (!solicited_only)
		set_armed(cq, SOFT_ARMED);
	else if (cq->armed == SOFT_UNARMED)
		set_armed(cq, SOFT_ARMED_SOLICITED);
	pthread_mutex_unlock(&cq->lock);
	return 0;
}

void soft_cq_push(struct soft_cq *cq, const struct ibv_wc *wc, bool solicited)
{
	struct soft_comp_channel *channel = channel_of(cq);

	pthread_mutex_lock(&cq->lock);
	if (cq->overrun) {
		pthread_mutex_unlock(&cq->lock);
		return;
	}
	if (cq->count == cq->capacity) {
		cq->overrun = true;
		pthread_mutex_unlock(&cq->lock);
		soft_async_event(soft_context_of(cq->ibv.context),
				 &(struct ibv_async_event){.element.cq = &cq->ibv,
							   .event_type = IBV_EVENT_CQ_ERR});
		soft_defer(&cq->overrun_work);
		return;
	}
	uint32_t at = cq->first + cq->count;

	cq->ring[at >= cq->capacity ? at - cq->capacity : at] = *wc;
	__atomic_store_n(&cq->count, cq->count + 1, __ATOMIC_RELEASE);
	if (cq->armed == SOFT_ARMED ||
	    (cq->armed == SOFT_ARMED_SOLICITED && (solicited || wc->status != IBV_WC_SUCCESS))) {
		set_armed(cq, SOFT_UNARMED);
		if (channel)
			soft_comp_channel_event(channel, cq);
	}
	pthread_mutex_unlock(&cq->lock);
}

static int take(struct soft_cq *cq, int room, struct ibv_wc *wc)
{
	int taken = 0;

	pthread_mutex_lock(&cq->lock);
	while (taken < room && cq->count) {
		uint32_t run = cq->capacity - cq->first; /* up to the ring's end */

		if (run > cq->count)
			run = cq->count;
		if (run > (uint32_t)(room - taken))
			run = (uint32_t)(room - taken);
		memcpy(&wc[taken], &cq->ring[cq->first], run * sizeof(*wc));
		cq->first += run;
		if (cq->first == cq->capacity)
			cq->first = 0;
		__atomic_store_n(&cq->count, cq->count - run, __ATOMIC_RELAXED);
		taken += (int)run;
	}
	/* "the CQ cannot be used": ibv_poll_cq(3).  What it still had has been handed out. */
	if (!taken && cq->overrun && room > 0)
		taken = -1;
	pthread_mutex_unlock(&cq->lock);
	return taken;
}

/* Nothing there: do a step of the device's work, which may bring something. */
static void look_for_work(struct soft_cq *cq)
{
	/* The poll that follows arming only looks for what came before it, and is followed by
	 * waiting, where the work is done. */
	if (__atomic_load_n(&cq->just_armed, __ATOMIC_RELAXED)) {
		__atomic_store_n(&cq->just_armed, false, __ATOMIC_RELAXED);
		return;
	}
	soft_progress_try();
	/* Who polls and polls may be keeping the processor from the very thread it waits for: the
	 * peer's device, on this machine.  On a processor of its own this costs next to nothing. */
	if (__atomic_load_n(&cq->count, __ATOMIC_ACQUIRE) ||
	    __atomic_add_fetch(&cq->empty_polls, 1, __ATOMIC_RELAXED) % POLLS_PER_YIELD)
		return;
	sched_yield();
}

int soft_poll_cq(struct ibv_cq *ibv, int num_entries, struct ibv_wc *wc)
{
	struct soft_cq *cq = soft_cq_of(ibv);

	if (__atomic_load_n(&cq->count, __ATOMIC_ACQUIRE) == 0)
		look_for_work(cq);
	return take(cq, num_entries, wc);
}

int soft_ibv_resize_cq(struct ibv_cq *ibv, int cqe)
{
	struct soft_cq *cq = soft_cq_of(ibv);
	struct ibv_wc *ring;
	int rc = 0;

	if (cqe < 1 || cqe > SOFT_MAX_CQE)
		return EINVAL;
	ring = calloc((size_t)cqe, sizeof(*ring));
	if (!ring)
		return ENOMEM;
	pthread_mutex_lock(&cq->lock);
	if (cq->count > (uint32_t)cqe) {
		rc = EINVAL; /* ibv_resize_cq(3): not below what is waiting in it */
	} else {
		struct ibv_wc *old = cq->ring;

		for (uint32_t i = 0; i < cq->count; i++)
			ring[i] = old[(cq->first + i) % cq->capacity];
		cq->ring = ring;
		ring = old;
		cq->first = 0;
		cq->capacity = (uint32_t)cqe;
		cq->ibv.cqe = cqe;
	}
	pthread_mutex_unlock(&cq->lock);
	free(ring);
	return rc;
}

int soft_ibv_destroy_cq(struct ibv_cq *ibv)
{
	struct soft_cq *cq = soft_cq_of(ibv);
	struct soft_comp_channel *channel = channel_of(cq);
	uint32_t taken = 0;

	soft_lock();
	if (cq->users) {
		soft_unlock();
		return EBUSY; /* ibv_destroy_cq(3): a queue pair is still associated with it */
	}
	soft_deferred_cancel(&cq->overrun_work);
	pthread_mutex_lock(&cq->lock);
	set_armed(cq, SOFT_UNARMED);
	pthread_mutex_unlock(&cq->lock);
	if (channel) {
		soft_comp_channel_forget(channel, cq);
		taken = cq->events_taken;
	}
	soft_async_forget(soft_context_of(ibv->context), ibv);
	soft_unlock();

	/* Events that were taken must be acknowledged first: ibv_get_cq_event(3),
	 * ibv_get_async_event(3). */
	pthread_mutex_lock(&ibv->mutex);
	while (ibv->comp_events_completed != taken ||
	       ibv->async_events_completed != cq->async_events_taken)
		pthread_cond_wait(&ibv->cond, &ibv->mutex);
	pthread_mutex_unlock(&ibv->mutex);

	soft_lock();
	if (channel)
		channel->ibv.refcnt--;
	soft_unlock();
	soft_context_release(soft_context_of(ibv->context));
	pthread_cond_destroy(&ibv->cond);
	pthread_mutex_destroy(&ibv->mutex);
	pthread_mutex_destroy(&cq->lock);
	free(cq->ring);
	free(cq);
	return 0;
}
