/* Implements the work request builders of ibv_wr_post(3).
 *
 * Requests built between wr_start and wr_complete are collected in a batch that is not visible to
 * the device or to other threads. wr_complete posts all of them, or none if one is invalid.
 */

#include "extended.h"
#include "trace/trace.h"

#define NO_OPCODE ((enum ibv_wr_opcode)UINT8_MAX)

struct soft_batch {
	pthread_mutex_t mutex; /* held from wr_start to wr_complete or wr_abort */
	bool open;
	enum soft_refusal refusal; /* the first refusal since wr_start */
	struct ibv_send_wr refused; /* request at fault; only wr_id and opcode are valid */
	uint64_t allowed_operations; /* enum ibv_qp_create_send_ops_flags */
	bool accepts_data;  /* whether data setters apply to the last request */
	bool accepts_destination; /* whether destination setters apply to the last request */
	uint32_t count;
	uint32_t capacity;
	/* The arrays have space for `capacity` requests. */
	struct ibv_send_wr *wrs;
	struct ibv_sge *sges;
	uint8_t *inline_data;
};

static struct soft_qp *qp_of(struct ibv_qp_ex *ex)
{
	return soft_container(ex, struct soft_qp, ex);
}

/* Let the whole batch fail because of `wr`. Only the first refusal is reported. */
static void refuse(struct soft_batch *batch, struct ibv_send_wr wr, enum soft_refusal refusal)
{
	if (batch->refusal)
		return;
	batch->refusal = refusal;
	batch->refused = wr;
}

/* Record a refusal for the last request, or for the current wr_id if the batch is empty. */
static void refuse_latest(struct ibv_qp_ex *ex, enum soft_refusal refusal)
{
	struct soft_batch *batch = qp_of(ex)->batch;

	refuse(batch,
	       batch->count ? batch->wrs[batch->count - 1]
			    : (struct ibv_send_wr){.wr_id = ex->wr_id, .opcode = NO_OPCODE},
	       refusal);
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Returns the number of SGEs to allocate per request. It is at least 1, because an inline request
 * needs an SGE for the copy of its data. */
static size_t sges_per_request(const struct soft_qp *qp)
{
	return qp->cap.max_send_sge ? qp->cap.max_send_sge : 1;
}

static struct ibv_sge *sges_at(const struct soft_qp *qp, uint32_t index)
{
	return qp->batch->sges + index * sges_per_request(qp);
}

/* Returns the number of bytes to allocate for inline data per request. Even if max_inline_data is
 * smaller, an atomic write needs SOFT_ATOMIC_WORD bytes. */
static size_t inline_size_per_request(const struct soft_qp *qp)
{
	return qp->cap.max_inline_data < SOFT_ATOMIC_WORD ? SOFT_ATOMIC_WORD
							  : qp->cap.max_inline_data;
}

static uint8_t *inline_at(const struct soft_qp *qp, uint32_t index)
{
	return qp->batch->inline_data + index * inline_size_per_request(qp);
}

static bool grow_array(void **memory, size_t size)
{
	void *bigger = realloc(*memory, size);

	if (bigger)
		*memory = bigger;
	return bigger;
}

static bool make_room(struct soft_qp *qp)
{
	struct soft_batch *batch = qp->batch;
	size_t capacity = batch->capacity ? (size_t)batch->capacity * 2 : 4;

	if (batch->count < batch->capacity)
		return true;
	if (!grow_array((void **)&batch->wrs, capacity * sizeof(*batch->wrs)) ||
	    !grow_array((void **)&batch->sges,
			capacity * sges_per_request(qp) * sizeof(*batch->sges)) ||
	    !grow_array((void **)&batch->inline_data, capacity * inline_size_per_request(qp)))
		return false;
	batch->capacity = (uint32_t)capacity;
	return true;
}

/* ---- start, complete, abort ---------------------------------------------------------------- */

static void wr_start(struct ibv_qp_ex *ex)
{
	struct soft_batch *batch = qp_of(ex)->batch;

	if (pthread_mutex_lock(&batch->mutex)) { /* this thread has already called wr_start */
		refuse_latest(ex, SOFT_REFUSED_UNFINISHED);
		return;
	}
	batch->open = true;
	batch->refusal = SOFT_ACCEPTED;
	batch->count = 0;
}

static void close_batch(struct soft_batch *batch)
{
	batch->open = false;
	pthread_mutex_unlock(&batch->mutex);
}

/* Link the requests and set their SGE lists. Pointers cannot be set earlier, because the arrays
 * move when they grow. */
static void link_requests(const struct soft_qp *qp)
{
	struct soft_batch *batch = qp->batch;

	for (uint32_t i = 0; i < batch->count; i++) {
		struct ibv_send_wr *wr = &batch->wrs[i];

		wr->next = i + 1 < batch->count ? wr + 1 : NULL;
		wr->sg_list = sges_at(qp, i);
		if (wr->send_flags & IBV_SEND_INLINE)
			wr->sg_list->addr = (uintptr_t)inline_at(qp, i);
	}
}

static int wr_complete(struct ibv_qp_ex *ex)
{
	struct soft_qp *qp = qp_of(ex);
	struct soft_batch *batch = qp->batch;

	if (!batch->open)
		return EINVAL;
	enum soft_refusal refusal = batch->refusal;
	struct ibv_send_wr *refused = &batch->refused;

	link_requests(qp);
	soft_lock();
	if (!refusal && batch->count)
		refusal = soft_post_batch(qp, batch->wrs, &refused);
	if (refusal)
		SOFT_TRACE(refused, "qp_num", qp->ibv.qp_num, refused->opcode, refused->wr_id,
			   &soft_refusals[refusal]);
	soft_unlock();
	close_batch(batch);
	return soft_refusals[refusal].error;
}

static void wr_abort(struct ibv_qp_ex *ex)
{
	struct soft_batch *batch = qp_of(ex)->batch;

	if (batch->open)
		close_batch(batch); /* the next wr_start() empties the batch */
}

/* ---- builders ------------------------------------------------------------------------------ */

/* Returns the bit of an opcode in enum ibv_qp_create_send_ops_flags. The bit number equals the
 * opcode, except for FLUSH and ATOMIC WRITE. */
static uint64_t operation_of(enum ibv_wr_opcode opcode)
{
	return opcode == IBV_WR_FLUSH          ? IBV_QP_EX_WITH_FLUSH
	       : opcode == IBV_WR_ATOMIC_WRITE ? IBV_QP_EX_WITH_ATOMIC_WRITE
					       : UINT64_C(1) << opcode;
}

static void build(struct ibv_qp_ex *ex, struct ibv_send_wr wr)
{
	uint64_t operation = operation_of(wr.opcode);
	struct soft_qp *qp = qp_of(ex);
	struct soft_batch *batch = qp->batch;

	if (!batch->open)
		return; /* wr_complete reports the error */
	wr.wr_id = ex->wr_id;
	/* The queue pair's send_ops_flags must include the operation. */
	if (!(batch->allowed_operations & operation))
		refuse(batch, wr, SOFT_REFUSED_UNSUPPORTED);
	else if (batch->count == qp->cap.max_send_wr)
		refuse(batch, wr, SOFT_REFUSED_FULL);
	else if (!make_room(qp))
		refuse(batch, wr, SOFT_REFUSED_NO_MEMORY);
	if (batch->refusal)
		return;
	/* Ignore IBV_SEND_INLINE in wr_flags, because callers request inline data by calling
	 * wr_set_inline_data() or wr_set_inline_data_list(). */
	wr.send_flags = ex->wr_flags & ~(unsigned)IBV_SEND_INLINE;
	batch->wrs[batch->count++] = wr;
	batch->accepts_destination =
		operation & ~(uint64_t)(IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW);
	batch->accepts_data = batch->accepts_destination &&
			      operation != IBV_QP_EX_WITH_ATOMIC_WRITE &&
			      operation != IBV_QP_EX_WITH_FLUSH;
}

static void wr_send(struct ibv_qp_ex *ex)
{
	build(ex, (struct ibv_send_wr){.opcode = IBV_WR_SEND});
}

static void wr_send_imm(struct ibv_qp_ex *ex, uint32_t imm_data)
{
	build(ex, (struct ibv_send_wr){.opcode = IBV_WR_SEND_WITH_IMM, .imm_data = imm_data});
}

static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t invalidate_rkey)
{
	build(ex, (struct ibv_send_wr){.opcode = IBV_WR_SEND_WITH_INV,
				       .invalidate_rkey = invalidate_rkey});
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr)
{
	build(ex,
	      (struct ibv_send_wr){.opcode = IBV_WR_RDMA_WRITE, .wr.rdma = {remote_addr, rkey}});
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr,
			      uint32_t imm_data)
{
	build(ex, (struct ibv_send_wr){.opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
				       .imm_data = imm_data,
				       .wr.rdma = {remote_addr, rkey}});
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr)
{
	build(ex, (struct ibv_send_wr){.opcode = IBV_WR_RDMA_READ, .wr.rdma = {remote_addr, rkey}});
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr,
			      uint64_t compare, uint64_t swap)
{
	build(ex, (struct ibv_send_wr){.opcode = IBV_WR_ATOMIC_CMP_AND_SWP,
				       .wr.atomic = {remote_addr, compare, swap, rkey}});
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr,
				uint64_t add)
{
	build(ex, (struct ibv_send_wr){.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
				       .wr.atomic = {remote_addr, add, 0, rkey}});
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t invalidate_rkey)
{
	build(ex,
	      (struct ibv_send_wr){.opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = invalidate_rkey});
}

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey,
		       const struct ibv_mw_bind_info *bind_info)
{
	build(ex,
	      (struct ibv_send_wr){.opcode = IBV_WR_BIND_MW, .bind_mw = {mw, rkey, *bind_info}});
}

/* Refuse TSO. The device does not segment packets, so no queue pair can be created with this
 * operation. */
static void wr_send_tso(struct ibv_qp_ex *ex, void *hdr, uint16_t hdr_sz, uint16_t mss)
{
	build(ex, (struct ibv_send_wr){.opcode = IBV_WR_TSO, .tso = {hdr, hdr_sz, mss}});
}

static void wr_atomic_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr,
			    const void *atomic_wr)
{
	const struct soft_qp *qp = qp_of(ex);

	build(ex,
	      (struct ibv_send_wr){.opcode = IBV_WR_ATOMIC_WRITE, .wr.rdma = {remote_addr, rkey}});
	if (!qp->batch->open || qp->batch->refusal)
		return;
	uint32_t index = qp->batch->count - 1;

	qp->batch->wrs[index].send_flags |= IBV_SEND_INLINE;
	qp->batch->wrs[index].num_sge = 1;
	*sges_at(qp, index) = (struct ibv_sge){.length = SOFT_ATOMIC_WORD};
	memcpy(inline_at(qp, index), atomic_wr, SOFT_ATOMIC_WORD);
}

/* Build a FLUSH, which has no data. At level IBV_FLUSH_MR it applies to the whole memory region, so
 * the address and length are ignored. */
static void wr_flush(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr, size_t len,
		     uint8_t type, uint8_t level)
{
	if (!type || type & ~(IBV_FLUSH_GLOBAL | IBV_FLUSH_PERSISTENT) || level > IBV_FLUSH_MR) {
		if (qp_of(ex)->batch->open)
			refuse(qp_of(ex)->batch,
			       (struct ibv_send_wr){.wr_id = ex->wr_id, .opcode = IBV_WR_FLUSH},
			       SOFT_REFUSED_FLAGS);
		return;
	}
	const bool whole_region = level == IBV_FLUSH_MR;
	const unsigned type_and_level = type | (unsigned)level << SOFT_FLUSH_LEVEL_SHIFT;

	/* struct ibv_send_wr has no members for a FLUSH, so the members of an atomic carry its
	 * arguments to fill_operation() in post.c. */
	build(ex, (struct ibv_send_wr){.opcode = IBV_WR_FLUSH,
				       .wr.atomic = {.remote_addr = whole_region ? 0 : remote_addr,
						     .compare_add = whole_region ? 0 : len,
						     .swap = type_and_level,
						     .rkey = rkey}});
}

/* ---- setters ------------------------------------------------------------------------------- */

/* Returns the last request of the batch for a setter to modify. `accepts` says whether the setter
 * applies to this request. If it does not, or if the batch is empty, the batch fails. Returns NULL
 * if the batch has failed or no batch is open. */
static struct ibv_send_wr *last_request(struct ibv_qp_ex *ex, bool accepts)
{
	struct soft_batch *batch = qp_of(ex)->batch;

	if (!batch->open)
		return NULL;
	if (!batch->count || !accepts)
		refuse_latest(ex, SOFT_REFUSED_SETTER);
	return batch->refusal ? NULL : &batch->wrs[batch->count - 1];
}

/* Returns the last request, as last_request() does, for a setter that identifies its receiver. The
 * setter applies only to requests that are sent to a peer, and only to queue pairs of this type. */
static struct ibv_send_wr *last_request_of_type(struct ibv_qp_ex *ex, enum ibv_qp_type type)
{
	struct soft_batch *batch = qp_of(ex)->batch;

	return last_request(ex, batch->accepts_destination && ex->qp_base.qp_type == type);
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t num_sge, const struct ibv_sge *sg_list)
{
	struct soft_qp *qp = qp_of(ex);
	struct ibv_send_wr *wr = last_request(ex, qp->batch->accepts_data);

	if (!wr)
		return;
	if (num_sge > qp->cap.max_send_sge) {
		refuse_latest(ex, SOFT_REFUSED_SGES);
		return;
	}
	wr->send_flags &= ~(unsigned)IBV_SEND_INLINE;
	wr->num_sge = (int)num_sge;
	if (num_sge)
		memcpy(sges_at(qp, qp->batch->count - 1), sg_list, num_sge * sizeof(*sg_list));
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
	const struct ibv_sge sge = {.addr = addr, .length = length, .lkey = lkey};

	wr_set_sge_list(ex, 1, &sge);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t num_buf,
				    const struct ibv_data_buf *buf_list)
{
	struct soft_qp *qp = qp_of(ex);
	struct ibv_send_wr *wr = last_request(ex, qp->batch->accepts_data);
	size_t length = 0;

	if (!wr)
		return;
	for (size_t i = 0; i < num_buf; i++) {
		if (buf_list[i].length > qp->cap.max_inline_data - length) {
			refuse_latest(ex, SOFT_REFUSED_INLINE);
			return;
		}
		if (buf_list[i].length)
			memcpy(inline_at(qp, qp->batch->count - 1) + length, buf_list[i].addr,
			       buf_list[i].length);
		length += buf_list[i].length;
	}
	wr->send_flags |= IBV_SEND_INLINE;
	wr->num_sge = length ? 1 : 0;
	*sges_at(qp, qp->batch->count - 1) = (struct ibv_sge){.length = (uint32_t)length};
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *addr, size_t length)
{
	const struct ibv_data_buf buffer = {.addr = addr, .length = length};

	wr_set_inline_data_list(ex, 1, &buffer);
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t remote_qpn,
			   uint32_t remote_qkey)
{
	struct ibv_send_wr *wr = last_request_of_type(ex, IBV_QPT_UD);

	if (!wr)
		return;
	wr->wr.ud.ah = ah;
	wr->wr.ud.remote_qpn = remote_qpn;
	wr->wr.ud.remote_qkey = remote_qkey;
}

static void wr_set_xrc_srqn(struct ibv_qp_ex *ex, uint32_t remote_srqn)
{
	struct ibv_send_wr *wr = last_request_of_type(ex, IBV_QPT_XRC_SEND);

	if (wr)
		wr->qp_type.xrc.remote_srqn = remote_srqn;
}

/* ---- life ---------------------------------------------------------------------------------- */

void soft_batch_set_calls(struct ibv_qp_ex *ex)
{
	ex->wr_start = wr_start;
	ex->wr_complete = wr_complete;
	ex->wr_abort = wr_abort;
	ex->wr_send = wr_send;
	ex->wr_send_imm = wr_send_imm;
	ex->wr_send_inv = wr_send_inv;
	ex->wr_send_tso = wr_send_tso;
	ex->wr_rdma_write = wr_rdma_write;
	ex->wr_rdma_write_imm = wr_rdma_write_imm;
	ex->wr_rdma_read = wr_rdma_read;
	ex->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
	ex->wr_atomic_fetch_add = wr_atomic_fetch_add;
	ex->wr_atomic_write = wr_atomic_write;
	qp_of(ex)->newer.wr_flush = wr_flush;
	ex->wr_local_inv = wr_local_inv;
	ex->wr_bind_mw = wr_bind_mw;
	ex->wr_set_sge = wr_set_sge;
	ex->wr_set_sge_list = wr_set_sge_list;
	ex->wr_set_inline_data = wr_set_inline_data;
	ex->wr_set_inline_data_list = wr_set_inline_data_list;
	ex->wr_set_ud_addr = wr_set_ud_addr;
	ex->wr_set_xrc_srqn = wr_set_xrc_srqn;
}

struct soft_batch *soft_batch_create(uint64_t operations)
{
	struct soft_batch *batch = calloc(1, sizeof(*batch));

	if (!batch)
		return NULL;
	batch->allowed_operations = operations;
	soft_mutex_init_checked(&batch->mutex);
	return batch;
}

void soft_batch_destroy(struct soft_batch *batch)
{
	if (!batch)
		return;
	pthread_mutex_destroy(&batch->mutex);
	free(batch->wrs);
	free(batch->sges);
	free(batch->inline_data);
	free(batch);
}
