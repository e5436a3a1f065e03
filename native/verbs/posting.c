/* Posts many work requests to send and receive queues with one call from Python. Sends use
 * ibv_post_send, or the ibv_wr_* builders if the queue pair was created for them (ibv_wr_post(3)).
 * struct aiordma_send describes a request in either case. */
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#include "boundary.h"

/* Maximum length of a chain. Chains are built on the stack, where 64 send requests use 8 KiB. */
enum { MAX_CHAIN = 64 };

/* Maximum length of an inline message with several SGEs, which is joined on the stack. This is more
 * than any known device accepts (max_inline_data). */
enum { MAX_INLINE = 4096 };

static void *pointer(uint64_t number)
{
	return (void *)(uintptr_t)number;
}

static struct ibv_mw_bind_info bind_info(const struct aiordma_send *send)
{
	return (struct ibv_mw_bind_info){
		.mr = pointer(send->mr),
		.addr = send->bind_addr,
		.length = send->bind_length,
		.mw_access_flags = send->bind_access,
	};
}

static int invalidates(uint32_t opcode)
{
	return opcode == IBV_WR_SEND_WITH_INV || opcode == IBV_WR_LOCAL_INV;
}

/* ---- the classic way ----------------------------------------------------------------------- */

/* Set the members that say where the request goes, which depend on the transport. */
static void fill_address(struct ibv_send_wr *wr, enum ibv_qp_type type,
			 const struct aiordma_send *send)
{
	if (type == IBV_QPT_UD) {
		wr->wr.ud.ah = pointer(send->ah);
		wr->wr.ud.remote_qpn = send->remote_qpn;
		wr->wr.ud.remote_qkey = send->remote_qkey;
		return;
	}
	if (type == IBV_QPT_XRC_SEND)
		wr->qp_type.xrc.remote_srqn = send->remote_srqn;
	if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr->wr.atomic.remote_addr = send->remote_addr;
		wr->wr.atomic.rkey = send->rkey;
		wr->wr.atomic.compare_add = send->compare_add;
		wr->wr.atomic.swap = send->swap;
	} else {
		wr->wr.rdma.remote_addr = send->remote_addr;
		wr->wr.rdma.rkey = send->rkey;
	}
}

static void fill_send(struct ibv_send_wr *wr, enum ibv_qp_type type,
		      const struct aiordma_send *send, const struct ibv_sge *sges)
{
	memset(wr, 0, sizeof(*wr));
	wr->wr_id = send->wr_id;
	wr->sg_list = (struct ibv_sge *)&sges[send->first_sge];
	wr->num_sge = (int)send->num_sge;
	wr->opcode = (enum ibv_wr_opcode)send->opcode;
	wr->send_flags = send->send_flags;
	if (invalidates(send->opcode))
		wr->invalidate_rkey = send->invalidate_rkey;
	else
		wr->imm_data = htonl(send->imm_data);
	if (wr->opcode == IBV_WR_BIND_MW) {
		wr->bind_mw.mw = pointer(send->mw);
		wr->bind_mw.rkey = send->rkey;
		wr->bind_mw.bind_info = bind_info(send);
		return;
	}
	fill_address(wr, type, send);
	if (wr->opcode == IBV_WR_TSO) {
		wr->tso.hdr = pointer(send->tso_header);
		wr->tso.hdr_sz = (uint16_t)send->tso_header_size;
		wr->tso.mss = (uint16_t)send->tso_mss;
	}
}

/* Post requests with ibv_post_send, which takes linked lists. */
static int post_chains(struct ibv_qp *qp, const struct aiordma_send *sends, uint32_t count,
		       const struct ibv_sge *sges, uint32_t *posted)
{
	while (*posted < count) {
		struct ibv_send_wr chain[MAX_CHAIN];
		struct ibv_send_wr *bad = NULL;
		uint32_t length = count - *posted < MAX_CHAIN ? count - *posted : MAX_CHAIN;

		for (uint32_t i = 0; i < length; i++) {
			fill_send(&chain[i], qp->qp_type, &sends[*posted + i], sges);
			chain[i].next = i + 1 < length ? &chain[i + 1] : NULL;
		}
		int rc = qp->context->ops.post_send(qp, chain, &bad);
		if (rc) {
			*posted += bad ? (uint32_t)(bad - chain) : 0;
			return rc;
		}
		*posted += length;
	}
	return 0;
}

/* ---- the builders -------------------------------------------------------------------------- */

/* Call a builder of `qp`, or make the enclosing function return EOPNOTSUPP if the builder is NULL.
 * A queue pair may lack the builders of operations that it was not created for. */
#define BUILD(builder, ...)                                                                        \
	do {                                                                                       \
		if (!qp->builder)                                                                  \
			return EOPNOTSUPP;                                                         \
		qp->builder(qp, ##__VA_ARGS__);                                                    \
	} while (0)

/* Set the inline data of the current request. Several SGEs are copied into one buffer first,
 * because wr_set_inline_data_list of rdma_rxe sends an empty message (rdma-core 44). */
static int set_inline(struct ibv_qp_ex *qp, const struct ibv_sge *sge, uint32_t num_sge)
{
	uint8_t joined[MAX_INLINE];
	size_t length = 0;

	if (num_sge == 1) {
		BUILD(wr_set_inline_data, pointer(sge->addr), sge->length);
		return 0;
	}
	for (uint32_t i = 0; i < num_sge; i++) {
		if (sge[i].length > sizeof(joined) - length)
			return EINVAL;
		memcpy(joined + length, pointer(sge[i].addr), sge[i].length);
		length += sge[i].length;
	}
	BUILD(wr_set_inline_data, joined, length);
	return 0;
}

static int set_data(struct ibv_qp_ex *qp, const struct aiordma_send *send,
		    const struct ibv_sge *sges)
{
	const struct ibv_sge *sge = &sges[send->first_sge];

	/* An empty message is not sent inline, because not every provider accepts it. */
	if (send->send_flags & IBV_SEND_INLINE && send->num_sge)
		return set_inline(qp, sge, send->num_sge);
	if (send->num_sge == 1)
		BUILD(wr_set_sge, sge->lkey, sge->addr, sge->length);
	else
		BUILD(wr_set_sge_list, send->num_sge, sge);
	return 0;
}

/* Build a FLUSH request. The cast is valid only for a queue pair that was created for FLUSH. */
static int build_flush(struct ibv_qp_ex *qp, const struct aiordma_send *send)
{
	const struct ibv_qp_ex_newer *newer = (const struct ibv_qp_ex_newer *)qp;

	if (!newer->wr_flush)
		return EOPNOTSUPP;
	newer->wr_flush(qp, send->rkey, send->remote_addr, send->flush_length,
			(uint8_t)send->flush_types, (uint8_t)send->flush_level);
	return 0;
}

/* The peer of a request on a vendor-specific queue pair. */
struct peer {
	struct mlx5dv_qp_ex *dc;
	struct ibv_ah *ah;
	uint32_t number;
	uint64_t key;
};

/* Address the current request. On a vendor-specific queue pair, `peer` is the address. Otherwise,
 * `peer` is NULL, and only datagrams and XRC sends have an address, which is part of `send`. */
static int set_peer(struct ibv_qp_ex *qp, const struct aiordma_send *send, const struct peer *peer)
{
	if (peer && peer->dc)
		peer->dc->wr_set_dc_addr(peer->dc, peer->ah, peer->number, peer->key);
	else if (peer)
		BUILD(wr_set_ud_addr, peer->ah, peer->number, (uint32_t)peer->key);
	else if (qp->qp_base.qp_type == IBV_QPT_UD)
		BUILD(wr_set_ud_addr, pointer(send->ah), send->remote_qpn, send->remote_qkey);
	else if (qp->qp_base.qp_type == IBV_QPT_XRC_SEND)
		BUILD(wr_set_xrc_srqn, send->remote_srqn);
	return 0;
}

/* Add one request to the queue pair's current batch, by calling the ibv_wr_* builder of its opcode.
 * `peer` is NULL unless the queue pair is vendor-specific. Returns 0 or an errno value. */
static int build_send(struct ibv_qp_ex *qp, const struct aiordma_send *send,
		      const struct ibv_sge *sges, const struct peer *peer)
{
	struct ibv_mw_bind_info info;
	int rc;

	qp->wr_id = send->wr_id;
	/* Keep IBV_SEND_INLINE. With most providers, the setter for inline data is sufficient, but
	 * rdma_rxe also requires the flag. */
	qp->wr_flags = send->send_flags;
	if (!send->num_sge)
		qp->wr_flags &= ~(unsigned int)IBV_SEND_INLINE;
	switch (send->opcode) {
	case IBV_WR_RDMA_WRITE:
		BUILD(wr_rdma_write, send->rkey, send->remote_addr);
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		BUILD(wr_rdma_write_imm, send->rkey, send->remote_addr, htonl(send->imm_data));
		break;
	case IBV_WR_SEND:
		BUILD(wr_send);
		break;
	case IBV_WR_SEND_WITH_IMM:
		BUILD(wr_send_imm, htonl(send->imm_data));
		break;
	case IBV_WR_SEND_WITH_INV:
		BUILD(wr_send_inv, send->invalidate_rkey);
		break;
	case IBV_WR_RDMA_READ:
		BUILD(wr_rdma_read, send->rkey, send->remote_addr);
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		BUILD(wr_atomic_cmp_swp, send->rkey, send->remote_addr, send->compare_add,
		      send->swap);
		break;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		BUILD(wr_atomic_fetch_add, send->rkey, send->remote_addr, send->compare_add);
		break;
	case IBV_WR_TSO:
		BUILD(wr_send_tso, pointer(send->tso_header), (uint16_t)send->tso_header_size,
		      (uint16_t)send->tso_mss);
		break;
	/* The remaining operations do not use set_data(), and only FLUSH uses set_peer(). */
	case IBV_WR_LOCAL_INV:
		BUILD(wr_local_inv, send->invalidate_rkey);
		return 0;
	case IBV_WR_BIND_MW:
		info = bind_info(send);
		BUILD(wr_bind_mw, pointer(send->mw), send->rkey, &info);
		return 0;
	case IBV_WR_ATOMIC_WRITE:
		if (send->num_sge != 1)
			return EINVAL;
		BUILD(wr_atomic_write, send->rkey, send->remote_addr,
		      pointer(sges[send->first_sge].addr));
		return 0;
	case IBV_WR_FLUSH:
		rc = build_flush(qp, send);
		return rc ? rc : set_peer(qp, send, peer);
	default:
		return EOPNOTSUPP;
	}
	rc = set_peer(qp, send, peer);
	return rc ? rc : set_data(qp, send, sges);
}

/* Post requests with the ibv_wr_* builders. All are posted or none, because wr_complete either
 * accepts everything since wr_start or drops it. */
static int post_built(struct ibv_qp_ex *qp, const struct aiordma_send *sends, uint32_t count,
		      const struct ibv_sge *sges, const struct peer *peer, uint32_t *posted)
{
	qp->wr_start(qp);
	for (uint32_t i = 0; i < count; i++) {
		int rc = build_send(qp, &sends[i], sges, peer);
		if (rc) {
			qp->wr_abort(qp);
			return rc;
		}
	}
	int rc = qp->wr_complete(qp);
	if (!rc)
		*posted = count;
	return rc;
}

/* ---- sends --------------------------------------------------------------------------------- */

int aiordma_post_send(struct ibv_qp *qp, struct ibv_qp_ex *extended,
		      const struct aiordma_send *sends, uint32_t count, const struct ibv_sge *sges,
		      uint32_t *posted)
{
	*posted = 0;
	return extended ? post_built(extended, sends, count, sges, NULL, posted)
			: post_chains(qp, sends, count, sges, posted);
}

int aiordma_post_addressed(struct ibv_qp_ex *qp, struct mlx5dv_qp_ex *dc,
			   const struct aiordma_send *send, const struct ibv_sge *sges,
			   struct ibv_ah *ah, uint32_t number, uint64_t key)
{
	const struct peer peer = {.dc = dc, .ah = ah, .number = number, .key = key};
	uint32_t posted;

	return post_built(qp, send, 1, sges, &peer, &posted);
}

/* ---- receives ------------------------------------------------------------------------------- */

int aiordma_post_recv(struct ibv_qp *qp, struct ibv_srq *srq, const struct aiordma_recv *recvs,
		      uint32_t count, const struct ibv_sge *sges, uint32_t *posted)
{
	*posted = 0;
	while (*posted < count) {
		struct ibv_recv_wr chain[MAX_CHAIN];
		struct ibv_recv_wr *bad = NULL;
		uint32_t length = count - *posted < MAX_CHAIN ? count - *posted : MAX_CHAIN;

		for (uint32_t i = 0; i < length; i++) {
			const struct aiordma_recv *recv = &recvs[*posted + i];

			chain[i] = (struct ibv_recv_wr){
				.wr_id = recv->wr_id,
				.next = i + 1 < length ? &chain[i + 1] : NULL,
				.sg_list = (struct ibv_sge *)&sges[recv->first_sge],
				.num_sge = (int)recv->num_sge,
			};
		}
		int rc = srq ? srq->context->ops.post_srq_recv(srq, chain, &bad)
			     : qp->context->ops.post_recv(qp, chain, &bad);
		if (rc) {
			*posted += bad ? (uint32_t)(bad - chain) : 0;
			return rc;
		}
		*posted += length;
	}
	return 0;
}
