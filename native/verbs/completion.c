/* Polls classic and extended CQs, and returns the completions of both as the same type of record.
 *
 * Nothing in a CQ shows whether it is extended. Extended CQs that we create therefore contain the
 * address of `extended_mark` as their cq_context. Besides the basic fields, an extended CQ provides
 * only the fields requested at its creation (ibv_create_cq_ex(3)). The function pointers for other
 * fields are NULL.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdbool.h>
#include <time.h>

#include "boundary.h"

enum {
	/* device records on the stack */
	BATCH_SIZE = 64,
	/* polls between two readings of the clock */
	POLLS_PER_CLOCK_READ = 16,
};

static const char extended_mark;

void *aiordma_extended_cq_context(void)
{
	return (void *)&extended_mark;
}

/* Returns the extended CQ, or NULL for a classic one. */
static struct ibv_cq_ex *extended_cq(struct ibv_cq *cq)
{
	return cq->cq_context == &extended_mark ? (struct ibv_cq_ex *)cq : NULL;
}

static void read_classic(const struct ibv_wc *wc, struct aiordma_completion *out,
			 struct aiordma_completion_more *more)
{
	*out = (struct aiordma_completion){
		.wr_id = wc->wr_id,
		.status = wc->status,
		.opcode = wc->opcode,
		.vendor_err = wc->vendor_err,
		.byte_len = wc->byte_len,
		.imm_data = ntohl(wc->imm_data),
		.qp_num = wc->qp_num,
		.src_qp = wc->src_qp,
		.wc_flags = wc->wc_flags,
	};
	if (more)
		*more = (struct aiordma_completion_more){
			.slid = wc->slid,
			.pkey_index = wc->pkey_index,
			.sl = wc->sl,
			.dlid_path_bits = wc->dlid_path_bits,
		};
}

static int poll_classic(struct ibv_cq *cq, struct aiordma_completion *out,
			struct aiordma_completion_more *more, int capacity)
{
	int total = 0;

	while (total < capacity) {
		struct ibv_wc wc[BATCH_SIZE];
		int room = capacity - total < BATCH_SIZE ? capacity - total : BATCH_SIZE;
		int n = cq->context->ops.poll_cq(cq, room, wc);

		if (n < 0) /* ibv_poll_cq does not define errno */
			return total ? total : -EIO;
		for (int i = 0; i < n; i++)
			read_classic(&wc[i], &out[total + i], more ? &more[total + i] : NULL);
		total += n;
		if (n < room)
			break;
	}
	return total;
}

/* Returns a field of the current completion, or 0 if the CQ was created without this field. */
#define READ(cq, field) ((cq)->read_##field ? (cq)->read_##field(cq) : 0)

static void read_extended(struct ibv_cq_ex *cq, struct aiordma_completion *out,
			  struct aiordma_completion_more *more)
{
	bool ok = cq->status == IBV_WC_SUCCESS;

	/* For a failed completion, no other fields are defined, not even the opcode
	 * (ibv_poll_cq(3)). */
	*out = (struct aiordma_completion){
		.wr_id = cq->wr_id,
		.status = cq->status,
		.vendor_err = READ(cq, vendor_err),
		.qp_num = READ(cq, qp_num),
	};
	if (ok) {
		out->opcode = READ(cq, opcode);
		out->wc_flags = READ(cq, wc_flags);
		out->byte_len = READ(cq, byte_len);
		out->src_qp = READ(cq, src_qp);
		out->imm_data = ntohl(READ(cq, imm_data));
	}
	if (!more)
		return;
	*more = (struct aiordma_completion_more){
		.timestamp = READ(cq, completion_ts),
		.wallclock_ns = READ(cq, completion_wallclock_ns),
	};
	if (ok) {
		struct ibv_wc_tm_info tm = {.tag = 0};

		if (cq->read_tm_info)
			cq->read_tm_info(cq, &tm);
		more->tm_tag = tm.tag;
		more->tm_priv = tm.priv;
		more->slid = READ(cq, slid);
		more->sl = READ(cq, sl);
		more->dlid_path_bits = READ(cq, dlid_path_bits);
		more->cvlan = READ(cq, cvlan);
		more->flow_tag = READ(cq, flow_tag);
	}
}

/* Poll up to `capacity` completions. Returns their number, or a negative errno value.
 *
 * Each completion is polled with its own start_poll and end_poll. The usual sequence with next_poll
 * (ibv_create_cq_ex(3)) would lose a completion with rdma_rxe's library (rdma-core 44). If
 * next_poll finds the CQ empty, that library's end_poll skips the next entry.
 */
static int poll_extended(struct ibv_cq_ex *cq, struct aiordma_completion *out,
			 struct aiordma_completion_more *more, int capacity)
{
	struct ibv_poll_cq_attr attr = {.comp_mask = 0};
	int total = 0;

	while (total < capacity) {
		int rc = cq->start_poll(cq, &attr);

		/* If start_poll fails, end_poll must not be called (ibv_create_cq_ex(3)). */
		if (rc)
			return total || rc == ENOENT ? total : rc > 0 ? -rc : -EIO;
		read_extended(cq, &out[total], more ? &more[total] : NULL);
		total++;
		cq->end_poll(cq);
	}
	return total;
}

uint64_t aiordma_microseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

int aiordma_poll(struct ibv_cq *cq, struct aiordma_completion *out,
		 struct aiordma_completion_more *more, int capacity, uint32_t spin_us)
{
	struct ibv_cq_ex *extended = extended_cq(cq);
	uint64_t end = spin_us ? aiordma_microseconds() + spin_us : 0;

	do {
		for (int i = 0; i < (spin_us ? POLLS_PER_CLOCK_READ : 1); i++) {
			int n = extended ? poll_extended(extended, out, more, capacity)
					 : poll_classic(cq, out, more, capacity);

			if (n)
				return n;
		}
	} while (spin_us && aiordma_microseconds() < end);
	return 0;
}
