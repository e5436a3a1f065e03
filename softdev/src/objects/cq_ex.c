/* Extended completion queues: ibv_create_cq_ex(3).
 *
 * Hardware drivers let the application read each completion in place. This device copies the
 * completion, because holding the CQ's lock from start_poll to end_poll could deadlock. Between
 * these calls, the application may post requests, and the device may add completions to the same
 * CQ.
 */
#include <limits.h>

#include "extended.h"
#include "trace/trace.h"

enum {
	TIMESTAMPS = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
		IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
	/* VLANs, flow steering and tag matching are not supported. */
	SUPPORTED = IBV_WC_STANDARD_FLAGS | TIMESTAMPS,
	SUPPORTED_FLAGS = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
};

struct soft_cq_reader {
	struct ibv_wc wc;
	struct soft_stamp stamp;
	bool single_threaded;
	pthread_mutex_t mutex; /* held from start_poll to end_poll, unless single_threaded */
};

static struct soft_cq_reader *reader_of(struct ibv_cq_ex *cq)
{
	return soft_container(cq, struct soft_cq, ex)->reader;
}

/* ---- the iterator -------------------------------------------------------------------------- */

static int next_poll(struct ibv_cq_ex *ex)
{
	struct soft_cq *cq = soft_container(ex, struct soft_cq, ex);
	struct soft_cq_reader *reader = cq->reader;

	switch (soft_cq_pop(cq, 1, &reader->wc, &reader->stamp)) {
	case 1:
		ex->wr_id = reader->wc.wr_id;
		ex->status = reader->wc.status;
		return 0;
	case 0:
		return ENOENT;
	default:
		return EIO; /* the CQ has overflowed */
	}
}

static void end_poll(struct ibv_cq_ex *ex)
{
	struct soft_cq_reader *reader = reader_of(ex);

	if (!reader->single_threaded)
		pthread_mutex_unlock(&reader->mutex);
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
	struct soft_cq_reader *reader = reader_of(ex);
	int rc;

	if (attr && attr->comp_mask)
		return EINVAL;
	if (!reader->single_threaded) {
		rc = pthread_mutex_lock(&reader->mutex);
		if (rc)
			return rc; /* EDEADLK if this thread already holds the mutex */
	}
	rc = next_poll(ex);
	if (rc)
		end_poll(ex); /* the application does not call it after an error */
	return rc;
}

/* ---- the fields ---------------------------------------------------------------------------- */

#define READ(type, name, member)                                                                   \
	static type read_##name(struct ibv_cq_ex *cq)                                              \
	{                                                                                          \
		return reader_of(cq)->member;                                                      \
	}

READ(enum ibv_wc_opcode, opcode, wc.opcode)
READ(uint32_t, vendor_err, wc.vendor_err)
READ(uint32_t, byte_len, wc.byte_len)
/* ibv_wc_read_invalidated_rkey() also calls this function, because the key and imm_data share a
 * union in struct ibv_wc. */
READ(uint32_t, imm_data, wc.imm_data)
READ(uint32_t, qp_num, wc.qp_num)
READ(uint32_t, src_qp, wc.src_qp)
READ(unsigned int, wc_flags, wc.wc_flags)
READ(uint32_t, slid, wc.slid)
READ(uint8_t, sl, wc.sl)
READ(uint8_t, dlid_path_bits, wc.dlid_path_bits)
READ(uint64_t, completion_ts, stamp.clock_ns)
READ(uint64_t, completion_wallclock_ns, stamp.wallclock_ns)
#undef READ

#define SET_READ_CALL(field, name)                                                                 \
	do {                                                                                       \
		if (wanted & IBV_WC_EX_WITH_##field)                                               \
			cq->read_##name = read_##name;                                             \
	} while (0)

/* Set the calls that read the requested fields. The others stay NULL, because the application must
 * not use them (ibv_create_cq_ex(3)). */
static void set_calls(struct ibv_cq_ex *cq, uint64_t wanted)
{
	cq->start_poll = start_poll;
	cq->next_poll = next_poll;
	cq->end_poll = end_poll;
	cq->read_opcode = read_opcode;
	cq->read_vendor_err = read_vendor_err;
	cq->read_wc_flags = read_wc_flags;
	SET_READ_CALL(BYTE_LEN, byte_len);
	SET_READ_CALL(IMM, imm_data);
	SET_READ_CALL(QP_NUM, qp_num);
	SET_READ_CALL(SRC_QP, src_qp);
	SET_READ_CALL(SLID, slid);
	SET_READ_CALL(SL, sl);
	SET_READ_CALL(DLID_PATH_BITS, dlid_path_bits);
	SET_READ_CALL(COMPLETION_TIMESTAMP, completion_ts);
	SET_READ_CALL(COMPLETION_TIMESTAMP_WALLCLOCK, completion_wallclock_ns);
}

/* ---- life ---------------------------------------------------------------------------------- */

static int check_attr(const struct ibv_cq_init_attr_ex *attr)
{
	if (attr->comp_mask & ~(uint32_t)(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD))
		return soft_refuse_value("FLAGS", "comp_mask", attr->comp_mask);
	if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD &&
	    (!attr->parent_domain || !soft_pd_is_parent(attr->parent_domain)))
		return soft_refuse(EINVAL, "FOREIGN_OBJECT");
	if (attr->wc_flags & ~(uint64_t)SUPPORTED)
		return soft_refuse(EOPNOTSUPP, "UNSUPPORTED");
	if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS &&
	    attr->flags & ~(uint32_t)SUPPORTED_FLAGS)
		return soft_refuse(EOPNOTSUPP, "UNSUPPORTED");
	/* soft_cq_make() checks the real limit of comp_vector, but takes an int. */
	const struct soft_limit limits[] = {
		{"cqe", attr->cqe, SOFT_MAX_CQE},
		{"comp_vector", attr->comp_vector, INT_MAX},
	};

	return soft_check_limits(limits, sizeof(limits) / sizeof(limits[0]));
}

static struct soft_cq_reader *make_reader(uint32_t flags)
{
	struct soft_cq_reader *reader = calloc(1, sizeof(*reader));

	if (!reader)
		return NULL;
	reader->single_threaded = flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
	soft_mutex_init_checked(&reader->mutex);
	return reader;
}

void soft_cq_reader_destroy(struct soft_cq_reader *reader)
{
	if (!reader)
		return;
	pthread_mutex_destroy(&reader->mutex);
	free(reader);
}

struct ibv_cq_ex *soft_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	uint32_t flags = attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS ? attr->flags : 0;
	struct ibv_pd *pd = attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD ? attr->parent_domain : NULL;
	struct soft_cq_reader *reader = NULL;
	struct soft_cq *cq = NULL;
	int rc = check_attr(attr);

	if (!rc) {
		reader = make_reader(flags);
		rc = reader ? 0 : ENOMEM;
	}
	if (!rc) {
		cq = soft_cq_make(context, (int)attr->cqe, attr->channel, (int)attr->comp_vector,
				  attr->wc_flags & TIMESTAMPS, pd);
		rc = cq ? 0 : errno;
	}
	if (rc) {
		soft_cq_reader_destroy(reader);
		return soft_call_pointer_result("ibv_create_cq_ex", NULL, 0, soft_fail_create(rc));
	}
	cq->reader = reader;
	cq->ignore_overrun = flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
	set_calls(&cq->ex, attr->wc_flags);
	soft_cq_publish(cq, attr->cq_context);
	return &cq->ex;
}
