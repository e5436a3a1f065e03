/* A request whose client has gone before the application has answered it. */
#ifndef AIORDMA_TESTS_CM_SILENT_END_H
#define AIORDMA_TESTS_CM_SILENT_END_H

#include "cm_side.h"

#include "cm/cm_internal.h"

static inline enum soft_cm_state state_of(const struct side *side)
{
	enum soft_cm_state state;

	soft_lock();
	state = soft_cm_id_of(side->id)->state;
	soft_unlock();
	return state;
}

/* The device knows, and the application hears nothing of it until it answers. */
static inline void expect_silent_end(struct side *listener, struct side *request)
{
	struct rdma_conn_param answer = parameters(NULL, 0);

	while (state_of(request) == SOFT_CM_REQUESTED)
		CHECK_EQUAL(poll(NULL, 0, 1), 0); /* limit_seconds bounds it */
	CHECK_FAILS(rdma->rdma_accept(request->id, &answer), EINVAL);
	CHECK_FAILS(rdma->rdma_reject(request->id, NULL, 0), EINVAL);
	CHECK_EQUAL(rdma->rdma_disconnect(request->id), 0);
	expect_nothing(listener->channel);
	side_drop(request);
}

#endif
