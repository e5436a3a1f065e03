/* Protection domains: what belongs together.  A queue pair reaches the memory of its own only.
 *
 * A parent domain (ibv_alloc_parent_domain(3)) is another name for a domain.  A thread domain would
 * let the device leave out locks; there is one lock here for everything, so it is only kept.
 */
#include <errno.h>
#include <stdlib.h>

#include "extended.h"

struct soft_td {
	struct ibv_td ibv;
	unsigned users;
};

static struct soft_pd *pd_of(struct ibv_pd *ibv)
{
	return soft_container(ibv, struct soft_pd, ibv);
}

static struct ibv_pd *create(struct ibv_context *context, struct soft_pd *of, struct soft_td *td)
{
	static uint32_t handle;
	struct soft_pd *pd = calloc(1, sizeof(*pd));

	if (!pd) {
		errno = ENOMEM;
		return NULL;
	}
	soft_lock();
	pd->ibv = (struct ibv_pd){.context = context, .handle = ++handle};
	pd->of = of;
	pd->td = td;
	if (of)
		of->users++;
	if (td)
		td->users++;
	soft_context_hold(soft_context_of(context));
	soft_unlock();
	return &pd->ibv;
}

struct ibv_pd *soft_ibv_alloc_pd(struct ibv_context *context)
{
	return create(context, NULL, NULL);
}

int soft_ibv_dealloc_pd(struct ibv_pd *ibv)
{
	struct soft_pd *pd = pd_of(ibv);

	soft_lock();
	bool busy = pd->users > 0;

	if (!busy && pd->of)
		pd->of->users--;
	if (!busy && pd->td)
		pd->td->users--;
	soft_unlock();
	if (busy)
		return EBUSY; /* ibv_alloc_pd(3): fails while something is still in it */
	soft_context_release(soft_context_of(ibv->context));
	free(pd);
	return 0;
}

/* ---- parent domains ------------------------------------------------------------------------ */

struct ibv_pd *soft_alloc_parent_domain(struct ibv_context *context,
					struct ibv_parent_domain_init_attr *attr)
{
	const uint32_t known =
		IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
	int rc = 0;

	/* Not one made of another one, nor of another device's. */
	if (attr->comp_mask & ~known || !attr->pd || attr->pd->context != context ||
	    pd_of(attr->pd)->of || (attr->td && attr->td->context != context))
		rc = EINVAL;
	else if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS)
		rc = EOPNOTSUPP; /* nothing here is shared with hardware: it comes from malloc */
	if (rc) {
		errno = rc;
		return NULL;
	}
	return create(context, pd_of(attr->pd),
		      attr->td ? soft_container(attr->td, struct soft_td, ibv) : NULL);
}

bool soft_pd_is_parent(struct ibv_pd *pd)
{
	return pd_of(pd)->of;
}

/* ---- thread domains: ibv_alloc_td(3) ------------------------------------------------------- */

struct ibv_td *soft_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
	struct soft_td *td = attr->comp_mask ? NULL : calloc(1, sizeof(*td));

	if (!td) {
		errno = attr->comp_mask ? EINVAL : ENOMEM;
		return NULL;
	}
	td->ibv.context = context;
	soft_lock();
	soft_context_hold(soft_context_of(context));
	soft_unlock();
	return &td->ibv;
}

int soft_dealloc_td(struct ibv_td *ibv)
{
	struct soft_td *td = soft_container(ibv, struct soft_td, ibv);

	soft_lock();
	bool busy = td->users > 0;

	soft_unlock();
	if (busy)
		return EBUSY;
	soft_context_release(soft_context_of(ibv->context));
	free(td);
	return 0;
}
