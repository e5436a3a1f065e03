/* Unreliable datagrams (IBTA vol 1, 9.8.3).
 *
 * A send request completes once its message has been sent. An arriving message is silently dropped
 * if no receive is posted.
 */
#include <sys/uio.h>

#include "inject/inject.h"
#include "trace/trace.h"
#include "ud.h"

enum { SENDS_PER_TURN = 256 };

/* Interval in ns at which sending is retried while the socket is full. A network card sends the
 * contents of a full socket in about this time. */
#define RETRY_NS 200000u
#define USE_OWN_QKEY 0x80000000u

/* ---- sending ------------------------------------------------------------------------------- */

static struct soft_datagram datagram_of(const struct soft_qp *qp, const struct soft_send_wqe *send,
					const struct soft_destination *to)
{
	struct soft_datagram datagram = {
		.source = to->path.source,
		.destination = to->path.destination,
		.dest_qpn = to->qpn,
		.src_qpn = qp->ibv.qp_num,
		/* If the high bit of the request's Q_Key is set, use the queue pair's own Q_Key
		 * instead (IBTA 10.2.5). */
		.qkey = to->qkey & USE_OWN_QKEY ? qp->attr.qkey : to->qkey,
		.psn = send->psn & SOFT_PSN_MASK,
		.traffic_flow = to->path.traffic_flow,
		.hop_limit = to->path.hop_limit,
	};

	if (send->opcode == IBV_WR_SEND_WITH_IMM) {
		datagram.flags |= SOFT_DATAGRAM_IMMEDIATE;
		datagram.immediate = send->immediate;
	}
	if (send->flags & IBV_SEND_SOLICITED)
		datagram.flags |= SOFT_DATAGRAM_SOLICITED;
	return datagram;
}

/* Deliver a datagram to a queue pair of this process, without a socket. The receiver needs the
 * payload in one piece. */
static void deliver_locally(const struct soft_datagram *datagram, const struct iovec *payload,
			    int count)
{
	uint8_t *copy = soft_scratch()->output;
	uint32_t length = 0;

	for (int i = 0; i < count; i++) {
		memcpy(copy + length, payload[i].iov_base, payload[i].iov_len);
		length += (uint32_t)payload[i].iov_len;
	}
	soft_ud_dispatch(datagram, copy, length);
}

/* Collect the payload in iovecs. Returns the number of iovecs, or -1 if the memory is not
 * accessible. */
static int gather(const struct soft_qp *qp, uint32_t index, struct iovec *iov)
{
	const struct soft_send_wqe *send = soft_send_at(qp, index);

	if (!(send->flags & IBV_SEND_INLINE))
		return soft_sge_to_iovecs(qp->ibv.pd, soft_send_sges(qp, index), send->num_sge, 0,
					  send->length, 0, iov, SOFT_MAX_SGE);
	*iov = (struct iovec){.iov_base = soft_send_inline(qp, index), .iov_len = send->length};
	return send->length ? 1 : 0;
}

/* Send the oldest request. Returns false to try again later. */
static bool send_oldest(struct soft_qp *qp)
{
	const struct soft_send_wqe *send = soft_send_at(qp, qp->sq.oldest);
	const struct soft_destination *to = soft_send_destination(qp, qp->sq.oldest);
	const struct soft_ud_address *path = &to->path;
	struct iovec iov[SOFT_MAX_SGE];
	int count = send->status ? 0 : gather(qp, qp->sq.oldest, iov);
	bool done = true;

	if (send->status || count < 0) {
		soft_send_fail(qp, send->status ? send->status : IBV_WC_LOC_PROT_ERR);
		return true;
	}
	const struct soft_datagram datagram = datagram_of(qp, send, to);

	if (soft_port_is_down(qp))
		SOFT_TRACE_DROPPED(.reason = "PORT_DOWN", .qp_num = qp->ibv.qp_num);
	else if (soft_gid_is_multicast(&path->destination))
		done = soft_multicast_send(&datagram, path, iov, count);
	else if (soft_qpn_ip_port(to->qpn) == soft_ip_port() &&
		 soft_gid_is_local(&path->destination))
		deliver_locally(&datagram, iov, count);
	else if (soft_device.ud->packets)
		done = soft_device.ud->packets->send(&datagram, iov, count);
	else
		done = soft_datagram_send(&datagram, path, iov, count);
	/* A queue pair that sends a message to itself may have failed on receiving it, which
	 * flushes this request. */
	if (done && qp->ibv.state == IBV_QPS_RTS) {
		qp->sq.next++;
		soft_complete_send(qp, IBV_WC_SUCCESS);
	}
	return done;
}

static void output(struct soft_qp *qp)
{
	for (int i = 0; qp->ibv.state == IBV_QPS_RTS && qp->sq.oldest != qp->sq.tail; i++) {
		/* Let other queue pairs have their turn. The timer resumes sending in the next step
		 * of the engine. */
		if (i == SENDS_PER_TURN) {
			soft_timer_start(&qp->reach_timer, soft_now());
			return;
		}
		if (!send_oldest(qp)) {
			soft_timer_start(&qp->reach_timer, soft_now() + RETRY_NS);
			return;
		}
	}
}

/* ---- receiving ----------------------------------------------------------------------------- */

static uint32_t wire_length(const struct soft_datagram *datagram, uint32_t length)
{
	/* The datagram consists of the UDP header, BTH, DETH, optional immediate data, padded
	 * payload and ICRC (Annex A17, IBTA 5.2). */
	return 8 + 12 + 8 + (datagram->flags & SOFT_DATAGRAM_IMMEDIATE ? 4 : 0) +
	       ((length + 3) & ~3u) + 4;
}

static void put_ipv4(uint8_t *at, const struct soft_datagram *datagram, uint32_t length)
{
	uint32_t total = 20 + wire_length(datagram, length);

	at[0] = 0x45; /* version 4, header of five words */
	at[1] = (uint8_t)(datagram->traffic_flow >> SOFT_CLASS_SHIFT);
	at[2] = (uint8_t)(total >> 8);
	at[3] = (uint8_t)total;
	at[8] = datagram->hop_limit;
	at[9] = IPPROTO_UDP;
	memcpy(at + 12, &datagram->source.raw[12], 4);
	memcpy(at + 16, &datagram->destination.raw[12], 4);
	unsigned sum = soft_ipv4_sum(at);

	at[10] = (uint8_t)(~sum >> 8);
	at[11] = (uint8_t)~sum;
}

/* Write the header that a RoCE v2 device puts before the message: the IPv6 header, or an IPv4
 * header in the last 20 bytes (Annex A17.4.5). */
static void put_grh(uint8_t *at, const struct soft_datagram *datagram, uint32_t length)
{
	const uint32_t version_and_flow = 6u << 28 | datagram->traffic_flow;
	const uint32_t wire = wire_length(datagram, length);

	memset(at, 0, SOFT_GRH);
	if (soft_datagram_is_ipv4(datagram)) {
		put_ipv4(at + 20, datagram, length);
		return;
	}
	for (int i = 0; i < 4; i++)
		at[i] = (uint8_t)(version_and_flow >> (24 - 8 * i));
	at[4] = (uint8_t)(wire >> 8);
	at[5] = (uint8_t)wire;
	at[6] = IPPROTO_UDP;
	at[7] = datagram->hop_limit;
	memcpy(at + 8, datagram->source.raw, 16);
	memcpy(at + 24, datagram->destination.raw, 16);
}

/* Copy bytes to the receive at the head of the queue. Returns false if its memory is not
 * writable. */
static bool copy_to_receive(struct soft_qp *qp, uint32_t offset, const uint8_t *data,
			    uint32_t length)
{
	const struct soft_recv_wqe *receive = soft_receive_at(&qp->rq, qp->rq.head);
	struct iovec iov[SOFT_MAX_SGE];
	int count = soft_sge_to_iovecs(soft_receive_pd(qp), soft_receive_sges(&qp->rq, qp->rq.head),
				       receive->num_sge, offset, length, IBV_ACCESS_LOCAL_WRITE,
				       iov, SOFT_MAX_SGE);

	for (int i = 0; i < count; i++) {
		memcpy(iov[i].iov_base, data, iov[i].iov_len);
		data += iov[i].iov_len;
	}
	return count >= 0;
}

static void trace_dropped(const struct soft_datagram *datagram, const char *reason)
{
	SOFT_TRACE_DROPPED(.reason = reason, .qp_num = datagram->dest_qpn,
			   .remote_qpn = datagram->src_qpn, .remote = &datagram->source);
}

void soft_ud_deliver(struct soft_qp *qp, const struct soft_datagram *datagram,
		     const uint8_t *payload, uint32_t length)
{
	soft_assert_locked();
	uint8_t grh[SOFT_GRH];

	const char *reason = !soft_qp_is_ud(qp) ? "TRANSPORT"
			     : qp->ibv.state < IBV_QPS_RTR || qp->ibv.state > IBV_QPS_SQE
				     ? "QP_STATE"
			     : soft_port_is_down(qp) ? "PORT_DOWN"
						     : NULL;

	if (reason) {
		trace_dropped(datagram, reason);
		return;
	}
	if (datagram->qkey != qp->attr.qkey) {
		/* Drop the message and count the Q_Key violation (IBTA 9.8.3.2, 14.2.5.6). */
		soft_qp_hca(qp)->bad_qkeys++;
		SOFT_TRACE(request_refused, qp, "QKEY");
		return;
	}
	/* A message without a receive, or longer than the receive, is silently dropped (responder
	 * class D, IBTA 9.9.3). The receive remains for the next message, as on rdma_rxe. */
	const bool ready = soft_acquire_receive(qp);

	if (!ready || length + SOFT_GRH > soft_receive_at(&qp->rq, qp->rq.head)->length) {
		SOFT_TRACE(request_refused, qp, ready ? "LENGTH" : "NO_RECEIVE");
		return;
	}
	put_grh(grh, datagram, length);
	if (!copy_to_receive(qp, 0, grh, SOFT_GRH) ||
	    !copy_to_receive(qp, SOFT_GRH, payload, length)) {
		soft_fail_receive(qp, IBV_WC_LOC_PROT_ERR);
		soft_qp_error(qp);
		return;
	}
	soft_complete_datagram(qp, datagram, length + SOFT_GRH);
}

void soft_ud_receive(struct soft_qp *qp, const struct soft_datagram *datagram,
		     const uint8_t *payload, uint32_t length)
{
	soft_assert_locked();
	if (!soft_fault_intercept_datagram(qp, datagram, payload, length))
		soft_ud_deliver(qp, datagram, payload, length);
}

void soft_ud_dispatch(const struct soft_datagram *datagram, const uint8_t *payload, uint32_t length)
{
	soft_assert_locked();
	struct soft_qp *qp = soft_qp_find(datagram->dest_qpn);

	/* The destination GID must belong to the queue pair's device. */
	if (qp && soft_gid_index(soft_qp_hca(qp), &datagram->destination) >= 0)
		soft_ud_receive(qp, datagram, payload, length);
	else
		trace_dropped(datagram, qp ? "DESTINATION_GID" : "QPN");
}

static void port_changed(enum soft_port_change change, uint32_t ports)
{
	(void)ports;
	if (change == SOFT_PORT_ADDRESSES)
		soft_multicast_rejoin();
}

/* Prepare to receive datagrams before the queue pair enters RTR. Returns 0 or an errno value. */
static int prepare_rtr(struct soft_qp *qp, uint32_t depth, uint32_t psn)
{
	const struct soft_ud_packets *packets = soft_device.ud->packets;
	/* Without `packets`, datagrams arrive at the UDP socket of datagram.c, which every UD queue
	 * pair holds from its creation. */
	int rc = packets ? packets->hold_addresses() : 0;

	(void)depth;
	(void)psn;
	if (rc)
		return rc;
	/* Applications set no path MTU for UD. The port's active MTU limits the messages instead
	 * (soft_mtu_shift). */
	qp->attr.path_mtu = soft_links->active_mtu(soft_qp_hca(qp));
	return 0;
}

/* Undo prepare_rtr(). The path MTU is 0 unless prepare_rtr() has succeeded. A forked child does not
 * hold the addresses for the queue pairs that it has inherited. */
static void undo_prepare_rtr(struct soft_qp *qp)
{
	if (qp->attr.path_mtu && soft_device.ud->packets &&
	    !soft_context_is_inherited(soft_context_of(qp->ibv.context)))
		soft_device.ud->packets->release_addresses();
	qp->attr.path_mtu = 0;
}

void soft_ud_set_packets(const struct soft_ud_packets *packets)
{
	soft_device.ud->packets = packets;
}

const struct soft_transport soft_ud_transport = {
	.prepare_rtr = prepare_rtr,
	.undo_prepare_rtr = undo_prepare_rtr,
	.qp_created = soft_datagram_hold,
	.qp_destroyed = soft_datagram_release,
	.output = output,
};

static void create(void)
{
	soft_device.ud = soft_alloc_part(sizeof(struct soft_ud));
	soft_device.ud->socket.fd = -1;
	soft_list_init(&soft_device.ud->groups);
}

const struct soft_subsystem soft_ud_subsystem = {
	.create = create,
	.forked = soft_multicast_reset_after_fork,
	.port_changed = port_changed,
};
