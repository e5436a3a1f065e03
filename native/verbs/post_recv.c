/* Work for receive queues, many requests per call from Python. */
#include "boundary.h"

/* Chains are built on the stack. */
enum {
	BLOCK = 64
};

int aiordma_post_recv(struct ibv_qp *qp, struct ibv_srq *srq, const struct aiordma_recv *recvs,
		      uint32_t count, const struct ibv_sge *sges, uint32_t *posted)
{
	*posted = 0;
	while (*posted < count) {
		struct ibv_recv_wr chain[BLOCK];
		struct ibv_recv_wr *bad = NULL;
		uint32_t length = count - *posted < BLOCK ? count - *posted : BLOCK;

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
