#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(call)                                                                                \
	do {                                                                                       \
		if (!(call)) {                                                                     \
			perror(#call);                                                             \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

static void change(struct ibv_qp *qp, struct ibv_qp_attr *attr, enum ibv_qp_state to, int mask)
{
	attr->qp_state = to;
	CHECK(!ibv_modify_qp(qp, attr, IBV_QP_STATE | mask));
}

int main(void)
{
	static char memory[2][4096];
	struct ibv_wc wc;
	union ibv_gid gid;

	alarm(60); /* end the test if a completion never arrives */
	struct ibv_device **devices = ibv_get_device_list(NULL);
	CHECK(devices && devices[0]);
	struct ibv_context *context = ibv_open_device(devices[0]);
	CHECK(context && !ibv_query_gid(context, 1, 0, &gid));
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 1, NULL, NULL, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof(memory),
				       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(pd && cq && mr);
	struct ibv_qp_init_attr wanted = {.send_cq = cq,
					  .recv_cq = cq,
					  .qp_type = IBV_QPT_RC,
					  .cap = {.max_send_wr = 1, .max_send_sge = 1}};
	struct ibv_qp *qp = ibv_create_qp(pd, &wanted);
	CHECK(qp);

	struct ibv_qp_attr attr = {
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
		.port_num = 1,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = qp->qp_num,
		.timeout = 10,
		.retry_cnt = 3,
		.ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 64}}};
	change(qp, &attr, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	change(qp, &attr, IBV_QPS_RTR,
	       IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	change(qp, &attr, IBV_QPS_RTS,
	       IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
		       IBV_QP_MAX_QP_RD_ATOMIC);

	memset(memory[0], 'x', sizeof(memory[0]));
	struct ibv_sge sge = {(uintptr_t)memory[0], sizeof(memory[0]), mr->lkey};
	struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_RDMA_WRITE,
				       .send_flags = IBV_SEND_SIGNALED,
				       .sg_list = &sge,
				       .num_sge = 1,
				       .wr.rdma = {(uintptr_t)memory[1], mr->rkey}};
	CHECK(!ibv_post_send(qp, &wr, &bad));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	printf("%s: %s\n", ibv_get_device_name(devices[0]), ibv_wc_status_str(wc.status));
	CHECK(!ibv_destroy_qp(qp) && !ibv_dereg_mr(mr) && !ibv_destroy_cq(cq) &&
	      !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	ibv_free_device_list(devices);
	return wc.status != IBV_WC_SUCCESS || memcmp(memory[0], memory[1], sizeof(memory[0]));
}
