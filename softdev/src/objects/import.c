/* Imports of devices and regions into another context: ibv_import_device(3), ibv_import_mr(3).
 * Imports of protection domains are in pd.c, and imports of device memory in dm.c.
 *
 * The context of a hardware device accesses its objects in the kernel through cmd_fd, which can be
 * passed to other processes. Here, cmd_fd is an empty file, and contexts whose files have the same
 * inode share their objects. The objects exist only in this process, so a cmd_fd from another
 * process is rejected.
 */
#include <sys/stat.h>

#include "extended.h"

/* ---- contexts ------------------------------------------------------------------------------ */

/* Make the open file `fd` the context's command file, by which other contexts can import its
 * device. Returns 0 or an errno value. */
static int set_command_file(struct soft_context *context, int fd)
{
	struct stat status;

	if (fd < 0 || fstat(fd, &status))
		return errno;
	soft_lock();
	context->extended.context.cmd_fd = fd;
	context->command_device = status.st_dev;
	context->command_inode = status.st_ino;
	soft_unlock();
	return 0;
}

int soft_context_open_command_file(struct soft_context *context)
{
	return set_command_file(context,
				soft_open_identity(context->extended.context.device->name));
}

static bool has_command_file(const struct soft_context *context, dev_t dev, ino_t inode)
{
	return context->extended.context.cmd_fd >= 0 && context->command_device == dev &&
	       context->command_inode == inode;
}

bool soft_contexts_related(struct ibv_context *a, struct ibv_context *b)
{
	const struct soft_context *other = soft_context_of(b);

	return has_command_file(soft_context_of(a), other->command_device, other->command_inode);
}

/* Find the device of the context whose command file `cmd_fd` refers to. Stores it in `*device`,
 * which must be NULL before. Returns 0 or an errno value. */
static int find_device(int cmd_fd, struct ibv_device **device)
{
	struct stat status;

	if (fstat(cmd_fd, &status))
		return errno;
	soft_lock();
	for (int i = 0; i < soft_hca_count(); i++)
		soft_list_each (struct soft_context, it, &soft_hca_at(i)->contexts, hca_node)
			if (has_command_file(it, status.st_dev, status.st_ino))
				*device = it->extended.context.device;
	soft_unlock();
	return *device ? 0 : EOPNOTSUPP;
}

/* Import a device. On success, the new context owns `cmd_fd`. */
struct ibv_context *soft_ibv_import_device(int cmd_fd)
{
	struct soft_context *context = NULL;
	struct ibv_device *device = NULL;
	int rc = find_device(cmd_fd, &device);

	if (!rc) {
		context = calloc(1, sizeof(*context));
		rc = context ? soft_context_start(context, device) : ENOMEM;
	}
	if (rc)
		return soft_finish_create(rc, context);
	set_command_file(context, cmd_fd);
	return &context->extended.context;
}

/* ---- regions ------------------------------------------------------------------------------- */

/* Find the region with the handle, which ibv_import_mr(3) receives from another part of the
 * program. The handle of a region is its key. Returns NULL if `pd` has no such region. */
static struct soft_mr *find_region(uint32_t handle, const struct ibv_pd *pd)
{
	struct soft_range *range = soft_range_find(handle);

	return range && !range->is_window && range->pd == soft_pd_root(pd)
		       ? soft_container(range, struct soft_mr, range)
		       : NULL;
}

struct soft_mr *soft_mr_original(const struct soft_mr *mr)
{
	soft_assert_locked();
	return find_region(mr->ibv.handle, mr->ibv.pd);
}

/* Import a region. The import shares the keys of the original. Deregistering either of them removes
 * the keys (mr.c). */
struct ibv_mr *soft_ibv_import_mr(struct ibv_pd *pd, uint32_t mr_handle)
{
	struct soft_mr *mr = calloc(1, sizeof(*mr));
	int rc = mr ? EINVAL : ENOMEM;

	soft_lock();
	const struct soft_mr *original = mr ? find_region(mr_handle, pd) : NULL;

	if (original) {
		rc = 0;
		mr->ibv = original->ibv;
		mr->ibv.context = pd->context;
		mr->ibv.pd = pd;
		mr->ibv.addr = NULL; /* an import has no address (ibv_import_mr(3)) */
		/* The keys belong to the original. `closed` makes ibv_rereg_mr(3) refuse the
		 * import. */
		mr->imported = mr->closed = true;
		soft_pd_of(pd)->users++;
	}
	soft_unlock();
	return soft_finish_create(rc, mr);
}

void soft_ibv_unimport_mr(struct ibv_mr *ibv)
{
	struct soft_mr *mr = soft_container(ibv, struct soft_mr, ibv);

	/* An application may deregister the import, which frees it, and then free the original by
	 * unimporting it (ibv_import_mr(3)). */
	if (!mr->imported) {
		soft_ibv_dereg_mr(ibv);
		return;
	}
	soft_lock();
	soft_pd_of(ibv->pd)->users--;
	soft_unlock();
	free(mr);
}
