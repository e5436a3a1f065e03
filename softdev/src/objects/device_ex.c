/* Extended device queries, and the table of extended calls. */

#include "extended.h"

/* Bits of device_cap_flags_ex that older headers lack (the kernel's enum
 * ib_uverbs_device_cap_flags). */
#define FLUSH_GLOBAL (UINT64_C(1) << 38)
#define ATOMIC_WRITE (UINT64_C(1) << 40)

/* frequency of the completion timestamp clock (CLOCK_MONOTONIC in nanoseconds) */
enum { CLOCK_KHZ = 1000 * 1000 };

/* All operations and queue pair types support on-demand paging, because the device faults in pages
 * in the same way for all of them. */
static const struct ibv_odp_caps on_demand = {
	.general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT,
	.per_transport_caps =
		{
			.rc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
				       IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ |
				       IBV_ODP_SUPPORT_ATOMIC | IBV_ODP_SUPPORT_SRQ_RECV |
				       IBV_ODP_SUPPORT_FLUSH,
			.uc_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
				       IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_SRQ_RECV,
			.ud_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV |
				       IBV_ODP_SUPPORT_SRQ_RECV,
		},
};

static int query_device_ex(struct ibv_context *context,
			   const struct ibv_query_device_ex_input *input,
			   struct ibv_device_attr_ex *attr, size_t attr_size)
{
	struct ibv_device_attr_ex full = {
		.completion_timestamp_mask = UINT64_MAX,
		.hca_core_clock = CLOCK_KHZ,
		.cq_mod_caps = {.max_cq_count = UINT16_MAX, .max_cq_period = UINT16_MAX},
		.max_dm_size = SOFT_DM_SIZE,
		.phys_port_cnt_ex = 1,
	};

	if (input && input->comp_mask)
		return EINVAL;
	if (attr_size < sizeof(full.orig_attr))
		return EINVAL;
	int rc = soft_ibv_query_device(context, &full.orig_attr);

	if (rc)
		return rc;
	if (soft_pages_can_fault()) {
		full.odp_caps = on_demand;
		full.xrc_odp_caps = on_demand.per_transport_caps.rc_odp_caps;
	}
	full.device_cap_flags_ex = full.orig_attr.device_cap_flags | FLUSH_GLOBAL | ATOMIC_WRITE;
	memset(attr, 0, attr_size);
	memcpy(attr, &full, attr_size < sizeof(full) ? attr_size : sizeof(full));
	return 0;
}

/* Read the values that comp_mask requests, and set comp_mask to those that are returned. */
static int query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
	(void)context;
	values->comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
	if (values->comp_mask)
		values->raw_clock = (struct timespec){.tv_nsec = (long)soft_now()};
	return 0;
}

/* ---- simple queries ------------------------------------------------------------------------ */

/* Returns 0, because a fork needs no preparation. The device accesses memory through the process's
 * page tables, so copy-on-write after a fork does no harm. The child has no device
 * (lifecycle.c). */
int soft_ibv_fork_init(void)
{
	return 0;
}

enum ibv_fork_status soft_ibv_is_fork_initialized(void)
{
	return IBV_FORK_UNNEEDED;
}

/* Returns -1, because the kernel has no index for this device (ibv_get_device_index(3)). */
int soft_ibv_get_device_index(struct ibv_device *device)
{
	(void)device;
	return -1;
}

int soft_ibv_get_pkey_index(struct ibv_context *context, uint8_t port_num, uint16_t pkey)
{
	uint16_t found;

	for (int i = 0; !soft_ibv_query_pkey(context, port_num, i, &found); i++)
		if (found == pkey)
			return i;
	return -1;
}

/* Returns 0, because data is not guaranteed to become visible in order
 * (ibv_query_qp_data_in_order(3)). The kernel does not specify such an order for its copies. */
int soft_ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	(void)qp;
	(void)op;
	(void)flags;
	return 0;
}

void soft_mutex_init_checked(pthread_mutex_t *mutex)
{
	pthread_mutexattr_t attr;

	pthread_mutexattr_init(&attr);
	pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ERRORCHECK);
	pthread_mutex_init(mutex, &attr);
	pthread_mutexattr_destroy(&attr);
}

/* ---- the table ----------------------------------------------------------------------------- */

void soft_extend_context(struct verbs_context *context)
{
	context->query_port = soft_query_port;
	context->query_device_ex = query_device_ex;
	context->query_rt_values = query_rt_values;
	context->open_xrcd = soft_open_xrcd;
	context->close_xrcd = soft_close_xrcd;
	context->create_cq_ex = soft_create_cq_ex;
	context->modify_cq = soft_modify_cq;
	context->create_qp_ex = soft_create_qp_ex;
	context->alloc_null_mr = soft_alloc_null_mr;
	context->advise_mr = soft_advise_mr;
	context->alloc_dm = soft_alloc_dm;
	context->free_dm = soft_free_dm;
	context->reg_dm_mr = soft_reg_dm_mr;
	context->alloc_parent_domain = soft_alloc_parent_domain;
	context->alloc_td = soft_alloc_td;
	context->dealloc_td = soft_dealloc_td;
}
