/* Calls of single providers' libraries, found when first needed, and work for queue pairs of theirs. */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>

#include "boundary.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct aiordma_provider_calls found;

static void find(const char *soname, const char *name, void **place)
{
	/* Never closed, as libibverbs keeps its providers.  A library that is not installed is
	 * looked for again the next time. */
	void *library = dlopen(soname, RTLD_NOW | RTLD_LOCAL);

	*place = library ? dlsym(library, name) : NULL;
}

const struct aiordma_provider_calls *aiordma_installed_providers(void)
{
	pthread_mutex_lock(&mutex);
#define OPTIONAL(library, result, name, arguments)                                                 \
	if (!found.name)                                                                           \
		find("lib" #library ".so.1", #name, (void **)&found.name);
#include "abi/provider_calls.h"
#undef OPTIONAL
	pthread_mutex_unlock(&mutex);
	return &found;
}

const struct aiordma_provider_calls *aiordma_provider_calls(const struct aiordma_calls *calls)
{
	static const struct aiordma_provider_calls none;

	return calls->device->provider_calls ? calls->device->provider_calls() : &none;
}

static int begin(struct ibv_qp_ex *qp, uint32_t opcode, uint32_t imm_data, uint64_t remote_addr,
		 uint32_t rkey)
{
	switch (opcode) {
	case IBV_WR_SEND:
		qp->wr_send(qp);
		return 0;
	case IBV_WR_SEND_WITH_IMM:
		qp->wr_send_imm(qp, htonl(imm_data));
		return 0;
	case IBV_WR_RDMA_WRITE:
		qp->wr_rdma_write(qp, rkey, remote_addr);
		return 0;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		qp->wr_rdma_write_imm(qp, rkey, remote_addr, htonl(imm_data));
		return 0;
	case IBV_WR_RDMA_READ:
		qp->wr_rdma_read(qp, rkey, remote_addr);
		return 0;
	default:
		return EOPNOTSUPP;
	}
}

int aiordma_post_addressed(struct ibv_qp_ex *qp, struct mlx5dv_qp_ex *dc, uint64_t wr_id,
			   uint32_t opcode, uint32_t send_flags, uint32_t imm_data,
			   uint64_t remote_addr, uint32_t rkey, const struct ibv_sge *sges,
			   uint32_t num_sge, struct ibv_ah *ah, uint32_t remote_number,
			   uint64_t remote_key)
{
	int rc;

	qp->wr_start(qp);
	qp->wr_id = wr_id;
	qp->wr_flags = send_flags;
	rc = begin(qp, opcode, imm_data, remote_addr, rkey);
	if (rc) {
		qp->wr_abort(qp);
		return rc;
	}
	if (dc)
		dc->wr_set_dc_addr(dc, ah, remote_number, remote_key);
	else
		qp->wr_set_ud_addr(qp, ah, remote_number, (uint32_t)remote_key);
	qp->wr_set_sge_list(qp, num_sge, sges);
	return qp->wr_complete(qp);
}
