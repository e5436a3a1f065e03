/* Declarations for the files that implement the function pointers in struct verbs_context. */
#pragma once

#include "objects.h"

/* Fill in the function table of an open context (device_ex.c). */
void soft_extend_context(struct verbs_context *context);

/* Query a port (device.c). Writes exactly `length` bytes, with zeros after the known attributes. */
int soft_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr,
		    size_t length);

/* mr_ex.c */
struct ibv_mr *soft_alloc_null_mr(struct ibv_pd *pd);
int soft_advise_mr(struct ibv_pd *pd, enum ib_uverbs_advise_mr_advice advice, uint32_t flags,
		   struct ibv_sge *sg_list, uint32_t num_sges);

/* dm.c */
enum { SOFT_DM_SIZE = 1 << 20 }; /* bytes shared by all contexts */
struct ibv_dm *soft_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr);
int soft_free_dm(struct ibv_dm *dm);
struct ibv_mr *soft_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t dm_offset,
			      size_t length, unsigned int access);
void soft_dm_release(struct soft_dm *dm); /* called with the lock held when a region is removed */

/* pd.c */
struct ibv_pd *soft_alloc_parent_domain(struct ibv_context *context,
					struct ibv_parent_domain_init_attr *attr);
bool soft_pd_is_parent(struct ibv_pd *pd);
struct ibv_td *soft_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr);
int soft_dealloc_td(struct ibv_td *td);

/* cq_ex.c: iterator over the completions of a CQ (start_poll, next_poll) */
struct soft_cq_reader;
struct ibv_cq_ex *soft_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
void soft_cq_reader_destroy(struct soft_cq_reader *reader); /* may be NULL */

/* Initialize a mutex that returns EDEADLK if its owner locks it again (device_ex.c). */
void soft_mutex_init_checked(pthread_mutex_t *mutex);

/* wr.c: requests collected between wr_start and wr_complete, and the functions that build them.
 * `operations` is a mask of enum ibv_qp_create_send_ops_flags. */
struct soft_batch *soft_batch_create(uint64_t operations); /* returns NULL if there is no memory */
void soft_batch_destroy(struct soft_batch *batch); /* may be NULL */
void soft_batch_set_calls(struct ibv_qp_ex *qp);
