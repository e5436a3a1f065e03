/* Memory windows. The key of a window gives peers access to part of a region. Work requests bind
 * and unbind windows (IBTA 10.6.6, 10.6.7).
 *
 * A type 1 window belongs to a protection domain. Each bind changes its key, and a bind of length 0
 * unbinds it. Binding a type 2B window also assigns it to the queue pair, and the application
 * chooses the low eight bits of its key. The window must be unbound by a local or remote
 * invalidation before it can be bound again. Labels such as C10-72 denote rules of the
 * specification. The kernel's rdma_rxe driver uses the same labels.
 */

#include "objects.h"
#include "trace/trace.h"

enum {
	WINDOW_RIGHTS = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_ZERO_BASED,
	ACCEPTED_RIGHTS = WINDOW_RIGHTS |
		IBV_ACCESS_LOCAL_WRITE, /* ignored; programs pass the region's rights */
	TAG_MASK = 0xff, /* bits of a key that a bind may change */
};

struct soft_mw {
	struct ibv_mw ibv;
	struct soft_range range;
	struct soft_mr *region; /* region that the window is bound to, or NULL */
};

static struct soft_mw *mw_of(struct soft_range *range)
{
	return range && range->is_window ? soft_container(range, struct soft_mw, range) : NULL;
}

struct ibv_mw *soft_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	int rc = type == IBV_MW_TYPE_1 || type == IBV_MW_TYPE_2
			 ? 0
			 : soft_refuse_value("MW_TYPE", "type", type);
	struct soft_mw *mw = soft_alloc_unless_failed(pd->context, sizeof(*mw), &rc);

	if (rc)
		return soft_call_pointer_result("ibv_alloc_mw", "pd", soft_pd_root(pd)->handle,
						soft_finish_create(rc, mw));
	mw->range = (struct soft_range){.is_window = true, .pd = soft_pd_root(pd)};
	soft_lock();
	rc = soft_range_add(&mw->range);
	if (!rc)
		soft_pd_of(pd)->users++;
	soft_unlock();
	mw->ibv = (struct ibv_mw){
		.context = pd->context,
		.pd = pd,
		.rkey = mw->range.key,
		.handle = mw->range.key & ~(uint32_t)TAG_MASK, /* unchanged by binds */
		.type = type,
	};
	return soft_call_pointer_result("ibv_alloc_mw", "pd", soft_pd_root(pd)->handle,
					soft_finish_create(rc, mw));
}

static void unbind(struct soft_mw *mw)
{
	if (!mw->range.bound)
		return;
	mw->region->windows--;
	mw->region = NULL;
	mw->range.bound = false;
	SOFT_TRACE(key_ended, mw->range.key);
	soft_links->revoke_key(mw->range.key);
}

/* Deallocate a window, after unbinding it if necessary (ibv_alloc_mw(3)). */
int soft_dealloc_mw(struct ibv_mw *ibv)
{
	struct soft_mw *mw = soft_container(ibv, struct soft_mw, ibv);

	soft_lock();
	unbind(mw);
	soft_range_remove(&mw->range);
	soft_pd_of(ibv->pd)->users--;
	soft_unlock();
	free(mw);
	return 0;
}

/* ---- binding ------------------------------------------------------------------------------- */

bool soft_bind_prepare(struct soft_send_wqe *send, const struct ibv_send_wr *wr)
{
	const struct ibv_mw_bind_info *info = &wr->bind_mw.bind_info;

	if (!wr->bind_mw.mw || (info->length && !info->mr) ||
	    info->mw_access_flags & ~(unsigned)ACCEPTED_RIGHTS)
		return false;
	send->rkey = wr->bind_mw.rkey;
	send->bind = (struct soft_bind){
		.window_key = wr->bind_mw.mw->handle,
		.region_key = info->length ? info->mr->lkey : 0,
		.address = info->addr,
		.length = info->length,
		.access = info->mw_access_flags & WINDOW_RIGHTS,
	};
	return true;
}

int soft_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	/* The next key, as in ibv_inc_rkey(). */
	uint32_t rkey = (mw->rkey & ~(uint32_t)TAG_MASK) | ((mw->rkey + 1) & TAG_MASK);
	struct ibv_send_wr wr = {
		.wr_id = bind->wr_id,
		.opcode = IBV_WR_BIND_MW,
		.send_flags = bind->send_flags,
		.bind_mw = {.mw = mw, .rkey = rkey, .bind_info = bind->bind_info},
	};
	struct ibv_send_wr *bad;

	if (mw->type != IBV_MW_TYPE_1) { /* ibv_bind_mw(3) */
		soft_lock();
		SOFT_TRACE(refused, "qp_num", qp->qp_num, wr.opcode, wr.wr_id,
			   &soft_refusals[SOFT_REFUSED_BIND]);
		soft_unlock();
		return EINVAL;
	}
	int rc = soft_post_send(qp, &wr, &bad);

	if (!rc)
		mw->rkey = rkey;
	return rc;
}

/* Returns whether the window may be bound to this part of the region (IBTA C10-72 to C10-75). */
static bool may_bind(const struct soft_qp *qp, const struct soft_mr *mr,
		     const struct soft_bind *bind)
{
	const unsigned write_rights = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

	return mr->range.pd == soft_pd_root(qp->ibv.pd) && /* C10-72 */
	       mr->range.access & IBV_ACCESS_MW_BIND && /* C10-73 */
	       !(mr->range.access & IBV_ACCESS_ZERO_BASED) &&
	       (!(bind->access & write_rights) ||
		mr->range.access & IBV_ACCESS_LOCAL_WRITE) && /* C10-74 */
	       soft_range_contains(&mr->range, bind->address, bind->length); /* C10-75 */
}

bool soft_bind_execute(const struct soft_qp *qp, const struct soft_send_wqe *send)
{
	const struct soft_bind *bind = &send->bind;
	struct soft_mw *mw = mw_of(soft_range_find_by_index(bind->window_key));

	if (!mw || mw->range.pd != soft_pd_root(qp->ibv.pd) ||
	    (mw->range.key ^ send->rkey) & ~(uint32_t)TAG_MASK)
		return false; /* a bind may only change the tag of the key (IBTA C10-72) */
	/* A bound type 2 window cannot be bound again (o10-37.2.30), and its length must not be 0
	 * (o10-37.2.40). */
	if (mw->ibv.type == IBV_MW_TYPE_2 && (mw->range.bound || !bind->length))
		return false;
	struct soft_range *range = bind->length ? soft_range_find(bind->region_key) : NULL;
	struct soft_mr *mr = NULL;

	if (bind->length) {
		if (!range || range->is_window)
			return false;
		mr = soft_container(range, struct soft_mr, range);
		if (!may_bind(qp, mr, bind))
			return false;
	}
	unbind(mw);
	mw->range.key = send->rkey;
	if (!mr)
		return true;
	mw->region = mr;
	mr->windows++;
	mw->range.bound = true;
	mw->range.access = bind->access | (mr->range.access & SOFT_ACCESS_PROCESS_VM);
	mw->range.qp_num = mw->ibv.type == IBV_MW_TYPE_2 ? qp->ibv.qp_num : 0;
	mw->range.on_demand = mr->range.on_demand;
	mw->range.memory = mr->range.memory + (bind->address - mr->range.start);
	mw->range.start = bind->access & IBV_ACCESS_ZERO_BASED ? 0 : bind->address;
	mw->range.length = bind->length;
	return true;
}

/* Unbind a window, but never invalidate a registered region. A work request may only invalidate
 * regions that were created by a work request (IBTA 10.6.5). Applications in user space cannot
 * create them. */
const char *soft_invalidate(const struct soft_qp *qp, uint32_t rkey)
{
	struct soft_range *range = soft_range_find(rkey);
	struct soft_mw *mw = mw_of(range);

	/* Type 1 windows cannot be invalidated (o10-37.2.26), and type 2B windows must belong to
	 * this queue pair (IBTA 10.6.7.2.4). An XRC_RECV queue pair owns no windows, because it
	 * has no send queue to bind them. */
	if (!mw)
		return range ? "REGION" : "KEY";
	if (!mw->range.bound)
		return "WINDOW_UNBOUND";
	if (!qp->ibv.pd || mw->range.pd != soft_pd_root(qp->ibv.pd))
		return "DOMAIN";
	if (mw->range.qp_num != qp->ibv.qp_num)
		return "WINDOW_QP";
	unbind(mw);
	return NULL;
}
