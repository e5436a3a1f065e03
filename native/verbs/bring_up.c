/* Moves a queue pair from RESET through INIT and RTR to RTS in one call from Python. */
#include <errno.h>

#include "boundary.h"

int aiordma_bring_up(const struct aiordma_calls *calls, struct ibv_qp *qp, struct ibv_qp_attr *attr,
		     int to_init, int to_rtr, int to_rts)
{
	const int masks[] = {to_init, to_rtr, to_rts};
	static const enum ibv_qp_state states[] = {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS};

	for (int step = 0; step < 3; step++) {
		attr->qp_state = states[step];
		/* If the provider returns -1 without setting errno, the caller must not report
		 * the errno of an earlier failure. */
		errno = 0;
		int code = calls->ibv_modify_qp(qp, attr, masks[step]);

		if (code)
			return code;
	}
	return 0;
}
