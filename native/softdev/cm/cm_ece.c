/* Enhanced connection establishment: what the vendors of two devices agree on beyond the standard,
 * as rdma_set_local_ece(3), rdma_get_remote_ece(3) and rdma_reject_ece(3) carry it.
 *
 * This device has no options of its own, so a queue pair of rdma_create_qp says nothing; what an
 * application says for a queue pair that it makes itself is carried in REQ and REP. */
#include "cm_internal.h"

#include <errno.h>

int soft_rdma_set_local_ece(struct rdma_cm_id *application, struct ibv_ece *ece)
{
	struct soft_cm_id *id;

	if (!application || application->qp || !ece || !ece->vendor_id || ece->comp_mask)
		return soft_cm_fail(EINVAL);
	id = soft_cm_id_of(application);
	soft_lock();
	id->local_ece = (struct soft_cm_ece){ece->vendor_id, ece->options};
	soft_unlock();
	return 0;
}

int soft_rdma_get_remote_ece(struct rdma_cm_id *application, struct ibv_ece *ece)
{
	const struct soft_cm_id *id;

	if (!application || application->qp || !ece)
		return soft_cm_fail(EINVAL);
	id = soft_cm_id_of(application);
	soft_lock();
	*ece = (struct ibv_ece){.vendor_id = id->remote_ece.vendor_id,
				.options = id->remote_ece.options};
	soft_unlock();
	return 0;
}

int soft_rdma_reject_ece(struct rdma_cm_id *application, const void *private_data,
			 uint8_t private_data_len)
{
	int error = soft_cm_reject(application, SOFT_CM_REASON_VENDOR_OPTION, private_data,
				   private_data_len);

	return error ? soft_cm_fail(error) : 0;
}
