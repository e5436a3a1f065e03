/* Protection domains. A queue pair can only access memory in its own domain.
 *
 * A parent domain (ibv_alloc_parent_domain(3)) is an alias for another domain, optionally with an
 * allocator for its queues (queue_memory.c). A thread domain allows a device to omit locks. This
 * device has a single lock, so thread domains have no effect.
 */

#include "extended.h"
#include "trace/trace.h"

struct soft_td {
	struct ibv_td ibv;
	unsigned users;
};

static struct soft_pd *root_of(struct ibv_pd *pd)
{
	return soft_pd_of(pd)->underlying ? soft_pd_of(pd)->underlying : soft_pd_of(pd);
}

/* Fill in the public struct and add the domain to the list. The caller holds the lock. */
static void publish(struct soft_pd *pd, struct ibv_context *context)
{
	pd->ibv = (struct ibv_pd){.context = context, .handle = ++soft_device.objects->handles.pd};
	if (pd->underlying)
		pd->underlying->users++;
	if (pd->td)
		pd->td->users++;
	soft_list_append(&soft_device.objects->pds, &pd->node);
	soft_context_hold(soft_context_of(context));
}

/* Create a copy of `prototype`, or fail with `rc` if it is already an errno value. */
static struct ibv_pd *create(struct ibv_context *context, const struct soft_pd *prototype, int rc)
{
	struct soft_pd *pd = soft_alloc_unless_failed(context, sizeof(*pd), &rc);

	if (!rc) {
		*pd = *prototype;
		soft_lock();
		publish(pd, context);
		soft_unlock();
	}
	return soft_finish_create(rc, pd);
}

struct ibv_pd *soft_ibv_alloc_pd(struct ibv_context *context)
{
	return create(context, &(struct soft_pd){0}, 0);
}

/* Move imports of domain `root` to `list` if the application has released them and they have no
 * users left. The caller holds the lock, and frees the imports after unlocking. */
static void collect_unimported(struct soft_pd *root, struct soft_node *list)
{
	soft_list_each_safe (struct soft_pd, pd, &soft_device.objects->pds, node) {
		if (!pd->unimported || pd->underlying != root || pd->users)
			continue;
		soft_list_remove(&pd->node);
		soft_list_append(list, &pd->node);
		root->users--;
	}
}

int soft_ibv_dealloc_pd(struct ibv_pd *ibv)
{
	struct soft_pd *pd = soft_pd_of(ibv);
	struct soft_node unimported;

	soft_list_init(&unimported);
	soft_lock();
	collect_unimported(pd, &unimported);
	bool busy = pd->users > 0;

	if (!busy && pd->underlying)
		pd->underlying->users--;
	if (!busy && pd->td)
		pd->td->users--;
	if (!busy)
		soft_list_remove(&pd->node);
	soft_unlock();
	soft_list_drain (struct soft_pd, import, &unimported, node) {
		soft_list_remove(&import->node);
		soft_context_release(soft_context_of(import->ibv.context));
		free(import);
	}
	if (busy) /* objects still use it (ibv_alloc_pd(3)) */
		return soft_call_result("ibv_dealloc_pd", "pd", ibv->handle,
					soft_refuse(EBUSY, "IN_USE"));
	soft_context_release(soft_context_of(ibv->context));
	free(pd);
	return 0;
}

/* ---- parent domains ------------------------------------------------------------------------ */

/* A flag from newer versions of the library. It requests memory that a confidential guest shares
 * with its devices. The flag has no effect, because this device does not need shared memory
 * (IBV_DEVICE_CC_DMA_BOUNCE is not set). */
#define ALLOW_CC_UNPROTECTED_ALLOC (1u << 2)

static int check_parent_domain(const struct ibv_context *context,
			       const struct ibv_parent_domain_init_attr *attr)
{
	const uint32_t known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS |
			       IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT | ALLOW_CC_UNPROTECTED_ALLOC;

	if (attr->comp_mask & ~known)
		return EOPNOTSUPP; /* programs fall back if a flag is unknown */
	if (!attr->pd || attr->pd->context != context || soft_pd_is_parent(attr->pd) ||
	    (attr->td && attr->td->context != context))
		return EINVAL;
	if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS &&
	    (!attr->alloc || !attr->free))
		return EINVAL;
	return 0;
}

struct ibv_pd *soft_alloc_parent_domain(struct ibv_context *context,
					struct ibv_parent_domain_init_attr *attr)
{
	int rc = check_parent_domain(context, attr);
	struct soft_pd parent = {
		.underlying = rc ? NULL : root_of(attr->pd),
		.td = attr->td ? soft_container(attr->td, struct soft_td, ibv) : NULL,
	};

	if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) {
		parent.alloc = attr->alloc;
		parent.free = attr->free;
	}
	if (attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT)
		parent.pd_context = attr->pd_context;
	return create(context, &parent, rc);
}

bool soft_pd_is_parent(struct ibv_pd *pd)
{
	return soft_pd_of(pd)->underlying && !soft_pd_of(pd)->imported;
}

/* ---- under another context: ibv_import_pd(3) ----------------------------------------------- */

struct ibv_pd *soft_ibv_import_pd(struct ibv_context *context, uint32_t pd_handle)
{
	int rc = 0;
	struct soft_pd *pd = soft_alloc_unless_failed(context, sizeof(*pd), &rc);

	if (rc)
		return soft_finish_create(rc, pd);
	rc = EINVAL;
	soft_lock();
	soft_list_each (struct soft_pd, found, &soft_device.objects->pds, node) {
		if (found->ibv.handle != pd_handle ||
		    !soft_contexts_related(found->ibv.context, context))
			continue;
		*pd = (struct soft_pd){.underlying = root_of(&found->ibv), .imported = true};
		publish(pd, context);
		rc = 0;
		break;
	}
	soft_unlock();
	return soft_finish_create(rc, pd);
}

/* Release an import. If it is still in use, it is freed when the original is deallocated. */
void soft_ibv_unimport_pd(struct ibv_pd *ibv)
{
	soft_lock();
	bool busy = soft_pd_of(ibv)->users > 0;

	soft_pd_of(ibv)->unimported = busy;
	soft_unlock();
	if (!busy)
		soft_ibv_dealloc_pd(ibv);
}

/* ---- thread domains: ibv_alloc_td(3) ------------------------------------------------------- */

struct ibv_td *soft_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
	int rc = attr->comp_mask ? EINVAL : 0;
	struct soft_td *td = soft_alloc_unless_failed(context, sizeof(*td), &rc);

	if (!rc) {
		td->ibv.context = context;
		soft_lock();
		soft_context_hold(soft_context_of(context));
		soft_unlock();
	}
	return soft_finish_create(rc, td);
}

int soft_dealloc_td(struct ibv_td *ibv)
{
	struct soft_td *td = soft_container(ibv, struct soft_td, ibv);

	soft_lock();
	bool busy = td->users > 0;

	soft_unlock();
	if (busy)
		return soft_call_result("ibv_dealloc_td", NULL, 0, soft_refuse(EBUSY, "IN_USE"));
	soft_context_release(soft_context_of(ibv->context));
	free(td);
	return 0;
}
