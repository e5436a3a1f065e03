/* Calls of the ABI that the embedded device does not have: each says so. */
#include <errno.h>

#include "soft.h"

int soft_ibv_fork_init(void)
{
	return EOPNOTSUPP;
}

enum ibv_fork_status soft_ibv_is_fork_initialized(void)
{
	return 0;
}

int soft_ibv_get_device_index(struct ibv_device *device)
{
	(void)device;
	return EOPNOTSUPP;
}

int soft_ibv_get_pkey_index(struct ibv_context *context, uint8_t port_num, uint16_t pkey)
{
	(void)context;
	(void)port_num;
	(void)pkey;
	return EOPNOTSUPP;
}

int soft_ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	(void)mr;
	(void)flags;
	(void)pd;
	(void)addr;
	(void)length;
	(void)access;
	return EOPNOTSUPP;
}

struct ibv_mr *soft_ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	(void)pd;
	(void)offset;
	(void)length;
	(void)iova;
	(void)fd;
	(void)access;
	errno = EOPNOTSUPP;
	return NULL;
}

struct ibv_ah *soft_ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	(void)pd;
	(void)attr;
	errno = EOPNOTSUPP;
	return NULL;
}

int soft_ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc, struct ibv_grh *grh, struct ibv_ah_attr *ah_attr)
{
	(void)context;
	(void)port_num;
	(void)wc;
	(void)grh;
	(void)ah_attr;
	return EOPNOTSUPP;
}

struct ibv_ah *soft_ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port_num)
{
	(void)pd;
	(void)wc;
	(void)grh;
	(void)port_num;
	errno = EOPNOTSUPP;
	return NULL;
}

int soft_ibv_destroy_ah(struct ibv_ah *ah)
{
	(void)ah;
	return EOPNOTSUPP;
}

int soft_ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)qp;
	(void)gid;
	(void)lid;
	return EOPNOTSUPP;
}

int soft_ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)qp;
	(void)gid;
	(void)lid;
	return EOPNOTSUPP;
}

int soft_ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp;
	(void)ece;
	return EOPNOTSUPP;
}

int soft_ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp;
	(void)ece;
	return EOPNOTSUPP;
}

int soft_ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	(void)qp;
	(void)op;
	(void)flags;
	return EOPNOTSUPP;
}

struct ibv_context *soft_ibv_import_device(int cmd_fd)
{
	(void)cmd_fd;
	errno = EOPNOTSUPP;
	return NULL;
}

struct ibv_pd *soft_ibv_import_pd(struct ibv_context *context, uint32_t pd_handle)
{
	(void)context;
	(void)pd_handle;
	errno = EOPNOTSUPP;
	return NULL;
}

void soft_ibv_unimport_pd(struct ibv_pd *pd)
{
	(void)pd;
}

struct ibv_mr *soft_ibv_import_mr(struct ibv_pd *pd, uint32_t mr_handle)
{
	(void)pd;
	(void)mr_handle;
	errno = EOPNOTSUPP;
	return NULL;
}

void soft_ibv_unimport_mr(struct ibv_mr *mr)
{
	(void)mr;
}

struct ibv_dm *soft_ibv_import_dm(struct ibv_context *context, uint32_t dm_handle)
{
	(void)context;
	(void)dm_handle;
	errno = EOPNOTSUPP;
	return NULL;
}

void soft_ibv_unimport_dm(struct ibv_dm *dm)
{
	(void)dm;
}

const char *soft_ibv_node_type_str(enum ibv_node_type node_type)
{
	(void)node_type;
	errno = EOPNOTSUPP;
	return NULL;
}

const char *soft_ibv_port_state_str(enum ibv_port_state port_state)
{
	(void)port_state;
	errno = EOPNOTSUPP;
	return NULL;
}

int soft_ibv_rate_to_mult(enum ibv_rate rate)
{
	(void)rate;
	return EOPNOTSUPP;
}

enum ibv_rate soft_mult_to_ibv_rate(int mult)
{
	(void)mult;
	return 0;
}

int soft_ibv_rate_to_mbps(enum ibv_rate rate)
{
	(void)rate;
	return EOPNOTSUPP;
}

enum ibv_rate soft_mbps_to_ibv_rate(int mbps)
{
	(void)mbps;
	return 0;
}

int soft_rdma_create_ep(struct rdma_cm_id **id, struct rdma_addrinfo *res, struct ibv_pd *pd, struct ibv_qp_init_attr *qp_init_attr)
{
	(void)id;
	(void)res;
	(void)pd;
	(void)qp_init_attr;
	errno = EOPNOTSUPP;
	return -1;
}

void soft_rdma_destroy_ep(struct rdma_cm_id *id)
{
	(void)id;
}

int soft_rdma_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *qp_init_attr)
{
	(void)id;
	(void)qp_init_attr;
	errno = EOPNOTSUPP;
	return -1;
}

int soft_rdma_create_srq(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	(void)id;
	(void)pd;
	(void)attr;
	errno = EOPNOTSUPP;
	return -1;
}

int soft_rdma_create_srq_ex(struct rdma_cm_id *id, struct ibv_srq_init_attr_ex *attr)
{
	(void)id;
	(void)attr;
	errno = EOPNOTSUPP;
	return -1;
}

void soft_rdma_destroy_srq(struct rdma_cm_id *id)
{
	(void)id;
}

int soft_rdma_get_request(struct rdma_cm_id *listen, struct rdma_cm_id **id)
{
	(void)listen;
	(void)id;
	errno = EOPNOTSUPP;
	return -1;
}

int soft_rdma_join_multicast(struct rdma_cm_id *id, struct sockaddr *addr, void *context)
{
	(void)id;
	(void)addr;
	(void)context;
	errno = EOPNOTSUPP;
	return -1;
}

int soft_rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *mc_join_attr, void *context)
{
	(void)id;
	(void)mc_join_attr;
	(void)context;
	errno = EOPNOTSUPP;
	return -1;
}

int soft_rdma_leave_multicast(struct rdma_cm_id *id, struct sockaddr *addr)
{
	(void)id;
	(void)addr;
	errno = EOPNOTSUPP;
	return -1;
}

int soft_rdma_getaddrinfo(const char *node, const char *service, const struct rdma_addrinfo *hints, struct rdma_addrinfo **res)
{
	(void)node;
	(void)service;
	(void)hints;
	(void)res;
	errno = EOPNOTSUPP;
	return -1;
}

void soft_rdma_freeaddrinfo(struct rdma_addrinfo *res)
{
	(void)res;
}

struct ibv_context **soft_rdma_get_devices(int *num_devices)
{
	(void)num_devices;
	errno = EOPNOTSUPP;
	return NULL;
}

void soft_rdma_free_devices(struct ibv_context **list)
{
	(void)list;
}

int soft_rdma_reject_ece(struct rdma_cm_id *id, const void *private_data, uint8_t private_data_len)
{
	(void)id;
	(void)private_data;
	(void)private_data_len;
	errno = EOPNOTSUPP;
	return -1;
}

int soft_rdma_set_local_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
	(void)id;
	(void)ece;
	errno = EOPNOTSUPP;
	return -1;
}

int soft_rdma_get_remote_ece(struct rdma_cm_id *id, struct ibv_ece *ece)
{
	(void)id;
	(void)ece;
	errno = EOPNOTSUPP;
	return -1;
}
