/* ABI calls that the embedded device does not support. */
#include <errno.h>

#include "softdev.h"

int soft_ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp;
	(void)ece;
	return EOPNOTSUPP;
}

int soft_ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
	(void)qp;
	*ece = (struct ibv_ece){0};
	return EOPNOTSUPP;
}
