/* Work completions, which report the result of a request when it leaves its queue. */
#include "objects.h"
#include "trace/trace.h"

static const enum ibv_wc_opcode completed_opcodes[] = {
	[IBV_WR_RDMA_WRITE] = IBV_WC_RDMA_WRITE,
	[IBV_WR_RDMA_WRITE_WITH_IMM] = IBV_WC_RDMA_WRITE,
	[IBV_WR_SEND] = IBV_WC_SEND,
	[IBV_WR_SEND_WITH_IMM] = IBV_WC_SEND,
	[IBV_WR_RDMA_READ] = IBV_WC_RDMA_READ,
	[IBV_WR_ATOMIC_CMP_AND_SWP] = IBV_WC_COMP_SWAP,
	[IBV_WR_ATOMIC_FETCH_AND_ADD] = IBV_WC_FETCH_ADD,
	[IBV_WR_LOCAL_INV] = IBV_WC_LOCAL_INV,
	[IBV_WR_BIND_MW] = IBV_WC_BIND_MW,
	[IBV_WR_SEND_WITH_INV] = IBV_WC_SEND,
	[IBV_WR_FLUSH] = IBV_WC_FLUSH,
	[IBV_WR_ATOMIC_WRITE] = IBV_WC_ATOMIC_WRITE,
};

/* Add a completion to the CQ, and record it in the trace even if the CQ has overflowed. */
static void complete(struct ibv_cq *ibv, const struct ibv_wc *wc, uint32_t trace_request,
		     bool solicited)
{
	struct soft_cq *cq = soft_cq_of(ibv);
	bool reported = soft_cq_push(cq, wc, solicited);

	SOFT_TRACE(completion, cq, wc, trace_request, !reported);
}

void soft_complete_send(struct soft_qp *qp, enum ibv_wc_status status)
{
	soft_assert_locked();
	const struct soft_send_wqe *send = soft_send_at(qp, qp->sq.oldest);
	struct ibv_wc wc = {
		.wr_id = send->wr_id,
		.status = status,
		.opcode = completed_opcodes[send->opcode],
		.byte_len = send->length,
		.qp_num = qp->ibv.qp_num,
		.src_qp = qp->attr.dest_qp_num,
	};

	const bool solicited = false; /* only completions of receives can be solicited */

	qp->sq.oldest++;
	/* An error always generates a completion, even if the request is not signaled (IBTA
	 * 10.7.3.1). */
	if (status != IBV_WC_SUCCESS || qp->sq_sig_all || send->flags & IBV_SEND_SIGNALED)
		complete(qp->ibv.send_cq, &wc, send->trace_request, solicited);
}

/* Record why a request with these SGEs fails. The next completion in the trace includes the
 * reason. */
static void trace_denial_reason(const struct ibv_pd *pd, const struct ibv_sge *sges,
				uint32_t num_sge, unsigned rights)
{
	uint32_t lkey;
	const char *reason = soft_local_denial_reason(pd, sges, num_sge, rights, &lkey);

	soft_trace_failure_reason(reason, lkey);
}

void soft_fail_send(struct soft_qp *qp, enum ibv_wc_status status)
{
	const struct soft_send_wqe *send = soft_send_at(qp, qp->sq.oldest);

	if (soft_trace_on && status == IBV_WC_LOC_PROT_ERR)
		trace_denial_reason(qp->ibv.pd, soft_send_sges(qp, qp->sq.oldest),
				    send->flags & IBV_SEND_INLINE ? 0 : send->num_sge,
				    soft_send_expects_data(send) ? IBV_ACCESS_LOCAL_WRITE : 0);
	soft_complete_send(qp, status);
}

void soft_fail_receive(struct soft_qp *qp, enum ibv_wc_status status)
{
	if (soft_trace_on && status == IBV_WC_LOC_PROT_ERR)
		trace_denial_reason(soft_receive_pd(qp), soft_receive_sges(&qp->rq, qp->rq.head),
				    soft_receive_at(&qp->rq, qp->rq.head)->num_sge,
				    IBV_ACCESS_LOCAL_WRITE);
	soft_complete_receive(qp, status, 0);
}

/* Returns the CQ that reports a receive. Returns NULL if an XRC shared receive queue has been
 * destroyed, because its CQ may have been destroyed too. */
static struct ibv_cq *receive_cq(const struct soft_qp *qp)
{
	const struct soft_srq *srq;

	if (!qp->xrcd)
		return qp->ibv.recv_cq;
	srq = soft_xrc_find_srq(qp->xrcd, qp->receive_srq_num);
	return srq ? srq->cq : NULL;
}

/* Complete the receive at the head of the queue. */
static void push_receive(struct soft_qp *qp, struct ibv_wc *wc, bool solicited)
{
	const struct soft_recv_wqe *receive = soft_receive_at(&qp->rq, qp->rq.head);
	struct ibv_cq *cq = receive_cq(qp);

	wc->wr_id = receive->wr_id;
	wc->qp_num = qp->ibv.qp_num;
	qp->rq.head++;
	if (cq)
		complete(cq, wc, receive->trace_request, solicited);
}

void soft_complete_receive(struct soft_qp *qp, enum ibv_wc_status status, uint32_t byte_len)
{
	soft_assert_locked();
	const struct soft_responder *responder = &qp->responder;
	struct ibv_wc wc = {
		.status = status,
		.opcode = responder->opcode == SOFT_WRITE ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV,
		.byte_len = byte_len,
		.src_qp = qp->attr.dest_qp_num,
	};

	if (responder->flags & SOFT_FRAME_INVALIDATE) {
		wc.invalidated_rkey = responder->rkey;
		wc.wc_flags = status == IBV_WC_SUCCESS ? IBV_WC_WITH_INV : 0;
	} else if (responder->flags & SOFT_FRAME_IMMEDIATE) {
		wc.imm_data = responder->immediate;
		wc.wc_flags = IBV_WC_WITH_IMM;
	}
	push_receive(qp, &wc, responder->flags & SOFT_FRAME_SOLICITED);
}

/* Returns the packet type to report to the receiver (IBTA annex A17.4.5.1). ConnectX cards store it
 * in the service level, a field that RoCE v2 packets do not have. Bit 3 indicates a UDP header, and
 * the lower bits are 1 for IPv6 or 2 for IPv4. UCX before 1.19 drops IPv4 packets if the type is
 * missing. */
static uint8_t packet_kind(const struct soft_datagram *datagram)
{
	return 8 | (soft_datagram_is_ipv4(datagram) ? 2 : 1);
}

void soft_complete_datagram(struct soft_qp *qp, const struct soft_datagram *datagram,
			    uint32_t byte_len)
{
	soft_assert_locked();
	struct ibv_wc wc = {
		.status = IBV_WC_SUCCESS,
		.opcode = IBV_WC_RECV,
		.byte_len = byte_len,
		.src_qp = datagram->src_qpn,
		.sl = packet_kind(datagram),
		.wc_flags = IBV_WC_GRH,
	};

	if (datagram->flags & SOFT_DATAGRAM_IMMEDIATE) {
		wc.imm_data = datagram->immediate;
		wc.wc_flags |= IBV_WC_WITH_IMM;
	}
	push_receive(qp, &wc, datagram->flags & SOFT_DATAGRAM_SOLICITED);
}

/* Flush all pending sends in posting order. */
void soft_flush_sends(struct soft_qp *qp)
{
	soft_assert_locked();
	soft_links->revoke_requests(qp);
	while (qp->sq.oldest != qp->sq.tail)
		soft_complete_send(qp, IBV_WC_WR_FLUSH_ERR);
	qp->sq.next = qp->sq.tail;
	qp->sq.next_psn = qp->sq.unacked = qp->sq.psn;
	qp->sq.reads = 0;
}

/* Flush all queues (IBTA 10.3.1.7). */
void soft_flush(struct soft_qp *qp)
{
	soft_assert_locked();
	soft_flush_sends(qp);
	/* The flushed receives must not report the opcode or the immediate data of a message that
	 * has not arrived completely. */
	qp->responder.flags = 0;
	qp->responder.opcode = 0;
	while (qp->rq.head != qp->rq.tail)
		soft_complete_receive(qp, IBV_WC_WR_FLUSH_ERR, 0);
}
