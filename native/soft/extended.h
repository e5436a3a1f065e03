/* The calls that hang in struct verbs_context, and what the rest of the device knows of them. */
#ifndef AIORDMA_SOFT_EXTENDED_H
#define AIORDMA_SOFT_EXTENDED_H

#include "objects.h"

/* device_ex.c.  The calls of an open context. */
void soft_extend_context(struct verbs_context *context);

/* device.c.  Fills in up to `length` bytes; what is beyond our struct becomes zero. */
int soft_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr,
		    size_t length);

/* cq_ex.c.  The place in a CQ that an application has come to with start_poll and next_poll. */
struct soft_cq_reader;
struct ibv_cq_ex *soft_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
void soft_cq_reader_destroy(struct soft_cq_reader *reader); /* may be NULL */

/* qp_ex.c.  The requests between wr_start and wr_complete. */
struct soft_batch;
struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
void soft_batch_destroy(struct soft_batch *batch); /* may be NULL */

#endif
