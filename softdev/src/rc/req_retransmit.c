/* Retransmission of requests, the requester's part of the reliability protocol.
 *
 * The requester detects a loss in one of three ways (IBTA 9.7.6.1). The responder reports a gap
 * (sequence NAK), the response to a later request arrives first (implied NAK), or no response
 * arrives within 4.096 us * 2^timeout. After each loss, the requester retransmits everything from
 * the first unacknowledged PSN. It does so at most retry_cnt times in a row, and every response
 * resets the count.
 *
 * The timer is not used on links that never lose frames. A peer that does not respond on such a
 * link is merely slow.
 */
#include "inject/inject.h"
#include "rc.h"
#include "trace/trace.h"

/* Minimum retransmission timeout in ns. A card's timer expires after one to four times the queue
 * pair's timeout (IBTA 9.7.6.1.3). A very short timeout is increased to this minimum, because
 * the peer's thread may not be scheduled soon enough. */
#define MIN_TIMEOUT_NS 1000000u

/* Returns whether a response is outstanding on a link that may lose it. */
static bool may_lose_response(const struct soft_qp *qp)
{
	return qp->sq.unacked != qp->sq.unsent && !qp->rnr_paused && qp->link &&
	       qp->link->state == SOFT_LINK_UP && qp->link->is_lossy;
}

void soft_requester_go_back(struct soft_qp *qp)
{
	soft_assert_locked();
	qp->sq.next = qp->sq.oldest;
	qp->sq.next_psn = qp->sq.unacked;
	qp->sq.reads = 0;
	soft_timer_stop(&qp->retry_timer);
}

void soft_requester_retry(struct soft_qp *qp)
{
	soft_assert_locked();
	if (!qp->retries_remaining) {
		soft_send_fail(qp, IBV_WC_RETRY_EXC_ERR);
		return;
	}
	qp->retries_remaining--;
	soft_fault_counts.retried++;
	SOFT_TRACE(retry, qp, "LOSS");
	if (qp->window)
		qp->window->on_loss(qp->window);
	soft_requester_go_back(qp);
	soft_qp_link_output(qp->link);
}

void soft_requester_implied_nak(struct soft_qp *qp)
{
	soft_assert_locked();
	/* Several responses in flight may report the same loss. Retransmit only once. */
	if (qp->loss_reported)
		return;
	qp->loss_reported = true;
	soft_requester_retry(qp);
}

void soft_requester_await_nak(struct soft_qp *qp)
{
	soft_assert_locked();
	qp->loss_reported = true;
}

void soft_requester_skip_oldest(struct soft_qp *qp)
{
	soft_assert_locked();
	struct soft_send_queue *sq = &qp->sq;

	if (sq->oldest != sq->next)
		sq->reads -= soft_send_is_counted(soft_send_at(qp, sq->oldest));
	else
		sq->next++; /* no longer due for retransmission */
}

void soft_requester_reset_retries(struct soft_qp *qp)
{
	soft_assert_locked();
	qp->retries_remaining = qp->attr.retry_cnt;
	qp->loss_reported = false;
	soft_timer_stop(&qp->retry_timer);
	soft_requester_start_timer(qp);
}

void soft_requester_start_timer(struct soft_qp *qp)
{
	soft_assert_locked();
	uint64_t time = (uint64_t)4096 << qp->attr.timeout;

	/* A timeout of 0 disables the timer (IBTA 9.7.6.1.3). */
	if (!may_lose_response(qp) || soft_qp_is_uc(qp) || !qp->attr.timeout ||
	    qp->retry_timer.running)
		return;
	soft_timer_start(&qp->retry_timer,
			 soft_now() + (time < MIN_TIMEOUT_NS ? MIN_TIMEOUT_NS : time));
}

void soft_retry_expired(struct soft_timer *timer)
{
	soft_assert_locked();
	struct soft_qp *qp = soft_container(timer, struct soft_qp, retry_timer);

	if (!may_lose_response(qp))
		return;
	/* Packets that are still waiting to be sent cannot be lost. */
	if (soft_port_is_down(qp) || qp->link->blocked) {
		soft_requester_start_timer(qp);
		return;
	}
	qp->loss_reported = false;
	soft_requester_retry(qp);
}
