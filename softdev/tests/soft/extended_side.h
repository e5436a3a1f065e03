/* A side with an extended completion queue and, if requested, an extended queue pair. */
#pragma once

#include "verbs_side.h"

static const uint64_t all_times =
	IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

/* Returns the extended context, found in the same way as by verbs_get_ctx() in the distribution's
 * <infiniband/verbs.h>. */
static inline struct verbs_context *extended(struct ibv_context *context)
{
	CHECK(context->abi_compat == AIORDMA_ABI_EXTENDED);
	struct verbs_context *found =
		(struct verbs_context *)((char *)context - offsetof(struct verbs_context, context));

	CHECK(found->sz >= sizeof(*found));
	return found;
}

static inline struct ibv_device_attr_ex device_of(struct ibv_context *context)
{
	struct ibv_device_attr_ex attr;

	CHECK_OK(extended(context)->query_device_ex(context, NULL, &attr, sizeof(attr)));
	return attr;
}

static inline struct ibv_cq_ex *as_extended(struct ibv_cq *cq)
{
	return (struct ibv_cq_ex *)cq;
}

struct extras {
	uint64_t wc_flags;
	uint32_t cq_flags;
	uint32_t cqe;         /* 256 if 0 */
	uint64_t operations;  /* send_ops_flags; 0 for a queue pair that is not extended */
	uint32_t inline_data; /* 256 if 0 */
	uint32_t create_flags;
};

static inline struct ibv_qp_init_attr_ex qp_attr_ex(struct side *side, struct extras extras)
{
	return (struct ibv_qp_init_attr_ex){
		.qp_context = side,
		.send_cq = side->cq,
		.recv_cq = side->cq,
		.cap = {8, 8, 4, 4, extras.inline_data ? extras.inline_data : 256},
		.qp_type = side->options.ud   ? IBV_QPT_UD
			   : side->options.uc ? IBV_QPT_UC
					      : IBV_QPT_RC,
		.sq_sig_all = !side->options.signal_none,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS |
			     IBV_QP_INIT_ATTR_CREATE_FLAGS,
		.create_flags = extras.create_flags,
		.pd = side->pd,
		.send_ops_flags = extras.operations,
	};
}

static inline void open_extended_side(struct side *side, struct options options,
				      struct extras extras)
{
	open_side(side, options);
	CHECK_OK(verbs->ibv_destroy_qp(side->qp));
	CHECK_OK(verbs->ibv_destroy_cq(side->cq));
	struct ibv_cq_init_attr_ex cq = {
		.cqe = extras.cqe ? extras.cqe : 256,
		.cq_context = side,
		.channel = side->channel,
		.wc_flags = extras.wc_flags,
		.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = extras.cq_flags,
	};

	side->cq = (struct ibv_cq *)extended(side->context)->create_cq_ex(side->context, &cq);
	CHECK(side->cq);
	if (extras.operations) {
		struct ibv_qp_init_attr_ex qp = qp_attr_ex(side, extras);

		side->qp = extended(side->context)->create_qp_ex(side->context, &qp);
		CHECK(side->qp);
	} else {
		side->qp = create_qp(side);
	}
}

static inline void open_extended_pair(struct side *a, struct side *b, struct options options,
				      struct extras extras)
{
	open_extended_side(a, options, extras);
	open_extended_side(b, options, extras);
	connect_pair(a, b);
}

/* Run a test with its own connected pair of extended sides: EXTENDED_PAIR(reading, .cqe = 8) calls
 * reading(&a, &b). */
#define EXTENDED_PAIR(test, ...)                                                                   \
	do {                                                                                       \
		struct side a, b;                                                                  \
		current_step = #test;                                                              \
		open_extended_pair(&a, &b, (struct options){0}, (struct extras){__VA_ARGS__});     \
		test(&a, &b);                                                                      \
		close_pair(&a, &b);                                                                \
	} while (0)
