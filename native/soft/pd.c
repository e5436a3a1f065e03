/* Protection domains: what belongs together.  A queue pair reaches the memory of its own only. */
#include <errno.h>
#include <stdlib.h>

#include "objects.h"

struct ibv_pd *soft_ibv_alloc_pd(struct ibv_context *context)
{
	static uint32_t handle;
	struct soft_pd *pd = calloc(1, sizeof(*pd));

	if (!pd) {
		errno = ENOMEM;
		return NULL;
	}
	soft_lock();
	pd->ibv = (struct ibv_pd){.context = context, .handle = ++handle};
	soft_context_hold(soft_context_of(context));
	soft_unlock();
	return &pd->ibv;
}

int soft_ibv_dealloc_pd(struct ibv_pd *ibv)
{
	struct soft_pd *pd = soft_container(ibv, struct soft_pd, ibv);

	soft_lock();
	bool busy = pd->users > 0;

	soft_unlock();
	if (busy)
		return EBUSY; /* ibv_alloc_pd(3): fails while something is still in it */
	soft_context_release(soft_context_of(ibv->context));
	free(pd);
	return 0;
}
