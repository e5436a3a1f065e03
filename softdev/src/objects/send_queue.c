/* Send queue operations that all transports share.
 *
 * Local requests (memory window binds and invalidations) are executed in order, after all earlier
 * requests have begun and before any later request begins. A peer can therefore never learn a key
 * before it is valid (IBTA 10.8.3.3). Local requests have no PSNs. Like all other requests, they
 * complete in order.
 */
#include "objects.h"

bool soft_send_execute_local(struct soft_qp *qp, struct soft_send_wqe *send, uint32_t reads)
{
	if (send->executed)
		return true;
	if (qp->ibv.state != IBV_QPS_RTS || send->status || (reads && send->flags & IBV_SEND_FENCE))
		return false;
	send->executed = send->opcode == IBV_WR_BIND_MW ? soft_bind_execute(qp, send)
							: !soft_invalidate(qp, send->rkey);
	if (!send->executed)
		send->status =
			IBV_WC_MW_BIND_ERR; /* memory management operation error (IBTA 11.6.2) */
	return send->executed;
}

void soft_send_complete_local(struct soft_qp *qp)
{
	struct soft_send_queue *sq = &qp->sq;

	while (sq->next != sq->tail && soft_send_at(qp, sq->next)->executed)
		sq->next++;
	while (sq->oldest != sq->next && soft_send_at(qp, sq->oldest)->local)
		soft_complete_send(qp, IBV_WC_SUCCESS);
}

/* Returns whether the oldest request may fail now. In SQD, it may fail only if it has already
 * begun, because no request begins in that state. */
static bool may_fail_oldest(const struct soft_qp *qp)
{
	return qp->ibv.state == IBV_QPS_RTS ||
	       (qp->ibv.state == IBV_QPS_SQD && soft_oldest_has_begun(qp));
}

void soft_send_advance(struct soft_qp *qp)
{
	struct soft_send_queue *sq = &qp->sq;

	while (sq->next != sq->tail && soft_send_at(qp, sq->next)->local &&
	       soft_send_execute_local(qp, soft_send_at(qp, sq->next), sq->reads))
		sq->next++;
	soft_send_complete_local(qp);
	if (sq->oldest != sq->tail && sq->oldest == sq->next &&
	    soft_send_at(qp, sq->oldest)->status && may_fail_oldest(qp))
		soft_send_fail(qp, soft_send_at(qp, sq->oldest)->status);
}

void soft_send_fail(struct soft_qp *qp, enum ibv_wc_status status)
{
	soft_links->revoke_requests(qp);
	soft_fail_send(qp, status);
	if (soft_qp_is_reliable(qp))
		soft_qp_error(qp);
	else
		soft_qp_send_error(qp);
}
