/* Device memory: ibv_alloc_dm(3). A software device has no memory of its own, so it uses host
 * memory without giving the application a pointer to it. */

#include "extended.h"
#include "trace/trace.h"

enum { MAX_ALIGNMENT_LOG = 20 };

struct soft_dm {
	struct ibv_dm ibv;
	struct soft_node node; /* in the list of all device memory */
	struct soft_dm *original; /* original of an import, or NULL */
	uint8_t *memory;
	size_t length;
	unsigned users; /* number of regions and imports */
};

static struct soft_dm *dm_of(struct ibv_dm *dm)
{
	return soft_container(dm, struct soft_dm, ibv);
}

static bool contains(const struct soft_dm *dm, uint64_t offset, size_t length)
{
	return offset <= dm->length && length <= dm->length - offset;
}

/* Copy `length` bytes between host memory and device memory. The direction depends on which of
 * `from` and `to` is not NULL. Offset and length must be multiples of four bytes, as on cards with
 * device memory. Copying under the lock keeps the device from accessing the memory at the same
 * time. Returns 0 or an errno value. */
static int copy(struct soft_dm *dm, uint64_t offset, size_t length, const void *from, void *to)
{
	if ((offset | length) % sizeof(uint32_t))
		return EINVAL;
	if (!contains(dm, offset, length) || (length && !from && !to))
		return EFAULT;
	soft_lock();
	memcpy(to ? to : dm->memory + offset, from ? from : dm->memory + offset, length);
	soft_unlock();
	return 0;
}

static int memcpy_to_dm(struct ibv_dm *dm, uint64_t offset, const void *host_addr, size_t length)
{
	return copy(dm_of(dm), offset, length, host_addr, NULL);
}

static int memcpy_from_dm(void *host_addr, struct ibv_dm *dm, uint64_t offset, size_t length)
{
	return copy(dm_of(dm), offset, length, NULL, host_addr);
}

static int allocate(struct soft_dm *dm, const struct ibv_alloc_dm_attr *attr)
{
	size_t alignment = (size_t)1 << attr->log_align_req;
	void *memory;

	if (alignment < sizeof(void *))
		alignment = sizeof(void *);
	int rc = posix_memalign(&memory, alignment, attr->length);

	if (rc)
		return rc;
	memset(memory, 0, attr->length);
	dm->memory = memory;
	dm->length = attr->length;
	return 0;
}

/* Fill in the public struct and add the memory to the list. The caller holds the lock. */
static void publish(struct soft_dm *dm, struct ibv_context *context)
{
	dm->ibv = (struct ibv_dm){
		.context = context,
		.memcpy_to_dm = memcpy_to_dm,
		.memcpy_from_dm = memcpy_from_dm,
		.handle = ++soft_device.objects->handles.dm,
	};
	soft_list_append(&soft_device.objects->dms, &dm->node);
	soft_context_hold(soft_context_of(context));
}

struct ibv_dm *soft_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr)
{
	/* soft_alloc_unless_failed() would fail in a forked child, but rdma-core's tests allocate
	 * device memory there. */
	struct soft_dm *dm = calloc(1, sizeof(*dm));
	int rc = dm ? 0 : ENOMEM;

	const struct soft_limit limits[] = {
		{"length", attr->length, SOFT_DM_SIZE},
		{"log_align_req", attr->log_align_req, MAX_ALIGNMENT_LOG},
	};

	if (attr->comp_mask)
		rc = soft_refuse_value("FLAGS", "comp_mask", attr->comp_mask);
	else if (!attr->length)
		rc = soft_refuse(EINVAL, "EMPTY");
	else if (!rc)
		rc = soft_check_limits(limits, sizeof(limits) / sizeof(limits[0]));
	if (!rc)
		rc = allocate(dm, attr);
	if (rc)
		return soft_call_pointer_result("ibv_alloc_dm", NULL, 0,
						soft_finish_create(rc, dm));
	soft_lock();
	if (attr->length > SOFT_DM_SIZE - soft_device.objects->dm_allocated) {
		rc = ENOMEM; /* all device memory is in use (ibv_alloc_dm(3)) */
	} else {
		soft_device.objects->dm_allocated += attr->length;
		publish(dm, context);
	}
	soft_unlock();
	if (rc)
		free(dm->memory);
	return soft_call_pointer_result("ibv_alloc_dm", NULL, 0, soft_finish_create(rc, dm));
}

int soft_free_dm(struct ibv_dm *ibv)
{
	struct soft_dm *dm = dm_of(ibv);

	soft_lock();
	bool busy = dm->users > 0;

	if (!busy) {
		soft_list_remove(&dm->node);
		if (dm->original)
			dm->original->users--;
		else
			soft_device.objects->dm_allocated -= dm->length;
	}
	soft_unlock();
	if (busy)
		return soft_call_result("ibv_free_dm", NULL, 0, soft_refuse(EBUSY, "IN_USE"));
	soft_context_release(soft_context_of(ibv->context));
	if (!dm->original)
		free(dm->memory);
	free(dm);
	return 0;
}

/* ---- under another context: ibv_import_dm(3) ----------------------------------------------- */

struct ibv_dm *soft_ibv_import_dm(struct ibv_context *context, uint32_t dm_handle)
{
	struct soft_dm *dm = calloc(1, sizeof(*dm));
	int rc = EINVAL; /* unless the handle is found */

	if (!dm)
		return soft_fail_create(ENOMEM);
	soft_lock();
	soft_list_each (struct soft_dm, found, &soft_device.objects->dms, node) {
		if (found->ibv.handle != dm_handle ||
		    !soft_contexts_related(found->ibv.context, context))
			continue;
		dm->original = found->original ? found->original : found;
		dm->original->users++;
		dm->memory = found->memory;
		dm->length = found->length;
		publish(dm, context);
		rc = 0;
		break;
	}
	soft_unlock();
	return soft_finish_create(rc, dm);
}

/* Release an import, unless a region still uses it. */
void soft_ibv_unimport_dm(struct ibv_dm *dm)
{
	soft_free_dm(dm);
}

/* ---- regions ------------------------------------------------------------------------------- */

void soft_dm_release(struct soft_dm *dm)
{
	soft_assert_locked();
	dm->users--;
}

struct ibv_mr *soft_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *ibv, uint64_t dm_offset,
			      size_t length, unsigned int access)
{
	struct soft_dm *dm = dm_of(ibv);
	int rc = soft_mr_access(&access, SOFT_COMMON_RIGHTS | IBV_ACCESS_ZERO_BASED);

	/* Regions of device memory must be zero-based (ibv_alloc_dm(3)). */
	if (!rc && !(access & IBV_ACCESS_ZERO_BASED))
		rc = soft_refuse_value("ZERO_BASED", "access", access);
	if (!rc && !contains(dm, dm_offset, length))
		rc = soft_refuse_value("RANGE", "dm_offset", dm_offset);
	if (!rc && pd->context != ibv->context)
		rc = soft_refuse(EINVAL, "FOREIGN_OBJECT");
	if (rc)
		return soft_call_pointer_result("ibv_reg_dm_mr", "pd", soft_pd_root(pd)->handle,
						soft_fail_create(rc));
	const struct soft_mr mr = {
		.cannot_rereg = true,
		.dm = dm,
		.range =
			{
				.access = access | SOFT_ACCESS_PROCESS_VM,
				.memory = dm->memory + dm_offset,
				.length = length,
			},
	};

	soft_lock();
	dm->users++;
	soft_unlock();
	struct ibv_mr *region = soft_mr_register(pd, &mr);

	if (!region) {
		soft_lock();
		dm->users--;
		soft_unlock();
	}
	return soft_call_pointer_result("ibv_reg_dm_mr", "pd", soft_pd_root(pd)->handle, region);
}
