/* Wrappers for calls that no library exports. Programs reach these calls through function pointers,
 * most of them in struct verbs_context. This struct embeds the struct ibv_context as its last
 * member. New pointers are added at its head, and `sz` is the size in the installed library.
 *
 * A wrapper fails with EOPNOTSUPP if an old context is not part of a struct verbs_context, if the
 * library is too old for the call, or if the provider does not implement it.
 */
#include <errno.h>

#include "boundary.h"

/* Returns the struct verbs_context that contains `context`, or NULL if there is none or if the
 * installed library's struct is too short for the member at `member_offset`. */
static struct verbs_context *extended_context(struct ibv_context *context, size_t member_offset)
{
	if (context->abi_compat != AIORDMA_ABI_EXTENDED)
		return NULL;
	struct verbs_context *found =
		(struct verbs_context *)((char *)context - offsetof(struct verbs_context, context));

	return found->sz >= sizeof(*found) - member_offset ? found : NULL;
}

/* Returns the struct verbs_context of `context`, or NULL if it does not provide `call`. */
#define OFFERS(context, call)                                                                      \
	({                                                                                         \
		struct verbs_context *_x =                                                         \
			extended_context((context), offsetof(struct verbs_context, call));         \
		_x && _x->call ? _x : NULL;                                                        \
	})

/* Define a function that passes the variable arguments to `call` of the extended context. The
 * function returns EOPNOTSUPP if the context does not provide `call`. */
#define ERRNO_CALL(name, parameters, context, call, ...)                                           \
	int name parameters                                                                        \
	{                                                                                          \
		struct verbs_context *offers = OFFERS((context), call);                            \
		return offers ? offers->call(__VA_ARGS__) : EOPNOTSUPP;                            \
	}

/* Define a function like ERRNO_CALL, but for a call that returns a pointer. If the context does not
 * provide `call`, the function returns NULL and sets errno to EOPNOTSUPP. */
#define POINTER_CALL(type, name, parameters, context, call, ...)                                   \
	struct type *name parameters                                                               \
	{                                                                                          \
		struct verbs_context *offers = OFFERS((context), call);                            \
		if (offers)                                                                        \
			return offers->call(__VA_ARGS__);                                          \
		errno = EOPNOTSUPP;                                                                \
		return NULL;                                                                       \
	}

/* clang-format would mistake the parameters for multiplications. */
/* clang-format off */
ERRNO_CALL(aiordma_ibv_query_device_ex,
	(struct ibv_context *context, struct ibv_device_attr_ex *attr),
	context, query_device_ex, context, NULL, attr, sizeof(*attr))
ERRNO_CALL(aiordma_query_port,
	(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr),
	context, query_port, context, port_num, attr, sizeof(*attr))
ERRNO_CALL(aiordma_ibv_query_rt_values_ex,
	(struct ibv_context *context, struct ibv_values_ex *values),
	context, query_rt_values, context, values)
POINTER_CALL(ibv_cq_ex, aiordma_ibv_create_cq_ex,
	(struct ibv_context *context, struct ibv_cq_init_attr_ex *init_attr),
	context, create_cq_ex, context, init_attr)
ERRNO_CALL(aiordma_ibv_modify_cq, (struct ibv_cq *cq, struct ibv_modify_cq_attr *attr),
	cq->context, modify_cq, cq, attr)
ERRNO_CALL(aiordma_ibv_advise_mr,
	(struct ibv_pd *pd, enum ib_uverbs_advise_mr_advice advice, uint32_t flags,
	 struct ibv_sge *sg_list, uint32_t num_sge),
	pd->context, advise_mr, pd, advice, flags, sg_list, num_sge)
POINTER_CALL(ibv_mr, aiordma_ibv_alloc_null_mr, (struct ibv_pd *pd),
	pd->context, alloc_null_mr, pd)
POINTER_CALL(ibv_dm, aiordma_ibv_alloc_dm,
	(struct ibv_context *context, struct ibv_alloc_dm_attr *attr),
	context, alloc_dm, context, attr)
ERRNO_CALL(aiordma_ibv_free_dm, (struct ibv_dm *dm),
	dm->context, free_dm, dm)
POINTER_CALL(ibv_mr, aiordma_ibv_reg_dm_mr,
	(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t dm_offset, size_t length,
	 unsigned int access),
	pd->context, reg_dm_mr, pd, dm, dm_offset, length, access)
POINTER_CALL(ibv_td, aiordma_ibv_alloc_td,
	(struct ibv_context *context, struct ibv_td_init_attr *init_attr),
	context, alloc_td, context, init_attr)
ERRNO_CALL(aiordma_ibv_dealloc_td, (struct ibv_td *td),
	td->context, dealloc_td, td)
POINTER_CALL(ibv_pd, aiordma_ibv_alloc_parent_domain,
	(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr),
	context, alloc_parent_domain, context, attr)
POINTER_CALL(ibv_xrcd, aiordma_ibv_open_xrcd,
	(struct ibv_context *context, struct ibv_xrcd_init_attr *attr),
	context, open_xrcd, context, attr)
ERRNO_CALL(aiordma_ibv_close_xrcd, (struct ibv_xrcd *xrcd),
	xrcd->context, close_xrcd, xrcd)
POINTER_CALL(ibv_srq, aiordma_ibv_create_srq_ex,
	(struct ibv_context *context, struct ibv_srq_init_attr_ex *init_attr),
	context, create_srq_ex, context, init_attr)
ERRNO_CALL(aiordma_ibv_get_srq_num, (struct ibv_srq *srq, uint32_t *srq_num),
	srq->context, get_srq_num, srq, srq_num)
POINTER_CALL(ibv_qp, aiordma_ibv_create_qp_ex,
	(struct ibv_context *context, struct ibv_qp_init_attr_ex *init_attr),
	context, create_qp_ex, context, init_attr)
POINTER_CALL(ibv_qp, aiordma_ibv_open_qp,
	(struct ibv_context *context, struct ibv_qp_open_attr *attr),
	context, open_qp, context, attr)
ERRNO_CALL(aiordma_ibv_modify_qp_rate_limit,
	(struct ibv_qp *qp, struct ibv_qp_rate_limit_attr *attr),
	qp->context, modify_qp_rate_limit, qp, attr)
/* clang-format on */

int aiordma_ibv_memcpy_to_dm(struct ibv_dm *dm, uint64_t dm_offset, const void *host_addr,
			     size_t length)
{
	return dm->memcpy_to_dm ? dm->memcpy_to_dm(dm, dm_offset, host_addr, length) : EOPNOTSUPP;
}

int aiordma_ibv_memcpy_from_dm(void *host_addr, struct ibv_dm *dm, uint64_t dm_offset,
			       size_t length)
{
	return dm->memcpy_from_dm ? dm->memcpy_from_dm(host_addr, dm, dm_offset, length)
				  : EOPNOTSUPP;
}

/* ---- memory windows: these are in the context itself ---------------------------------------- */

struct ibv_mw *aiordma_ibv_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	if (pd->context->ops.alloc_mw)
		return pd->context->ops.alloc_mw(pd, type);
	errno = EOPNOTSUPP;
	return NULL;
}

int aiordma_ibv_dealloc_mw(struct ibv_mw *mw)
{
	return mw->context->ops.dealloc_mw ? mw->context->ops.dealloc_mw(mw) : EOPNOTSUPP;
}

/* Bind a type 1 window. Type 2 windows are bound by a work request (ibv_bind_mw(3)). */
int aiordma_ibv_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	if (mw->type != IBV_MW_TYPE_1)
		return EINVAL;
	return qp->context->ops.bind_mw ? qp->context->ops.bind_mw(qp, mw, bind) : EOPNOTSUPP;
}
