/* XRC domains (IBTA volume 1, annex A14; ibv_open_xrcd(3)).
 *
 * The receiving queue pair of an extended reliable connection has neither queues nor a protection
 * domain. Each request names a shared receive queue by number. This queue provides the receive, the
 * completion queue and the protection domain, and must belong to the queue pair's XRC domain.
 *
 * A domain is shared by all contexts of a device in this process that open the same file. Another
 * process that opens the file gets its own domain. Queue pairs and shared receive queues are memory
 * of one process here, so a queue pair cannot fill another process's receives.
 *
 * A shared receive queue may be destroyed while a message for it arrives, so its number is looked
 * up for each use.
 */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "objects.h"
#include "trace/trace.h"

struct soft_xrc_domain {
	struct soft_node node;
	const struct ibv_device *ibv_device;
	int file; /* descriptor that prevents reuse of the inode number; -1 if private */
	dev_t file_device;
	ino_t file_inode;
	unsigned fork_generation; /* a forked child does not inherit domains */
	unsigned users; /* number of open handles (struct soft_xrcd) */
};

static struct soft_xrc_domain *find_domain(const struct ibv_device *ibv_device,
					   const struct stat *file)
{
	soft_list_each (struct soft_xrc_domain, domain, &soft_device.objects->xrc_domains, node)
		if (domain->ibv_device == ibv_device && domain->file >= 0 &&
		    domain->file_device == file->st_dev && domain->file_inode == file->st_ino &&
		    domain->fork_generation == soft_engine_fork_generation())
			return domain;
	return NULL;
}

/* Create a domain for the file `fd`, or a private domain if `fd` is -1, and store it in *created.
 * Returns 0 or an errno value. */
static int create_domain(int fd, const struct stat *file, struct soft_xrc_domain **created)
{
	struct soft_xrc_domain *domain = calloc(1, sizeof(*domain));

	if (!domain)
		return ENOMEM;
	domain->file = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (fd >= 0 && domain->file < 0) {
		int rc = errno;

		free(domain);
		return rc;
	}
	domain->file_device = file->st_dev;
	domain->file_inode = file->st_ino;
	domain->fork_generation = soft_engine_fork_generation();
	soft_list_append(&soft_device.objects->xrc_domains, &domain->node);
	*created = domain;
	return 0;
}

/* Attach `xrcd` to an existing or new domain. All combinations of flags have the same result as in
 * the kernel. Returns 0 or an errno value. */
static int join_domain(struct soft_xrcd *xrcd, const struct ibv_xrcd_init_attr *attr)
{
	struct soft_xrc_domain *domain = NULL;
	struct stat file = {0};
	int rc = 0;

	if (attr->fd >= 0 && fstat(attr->fd, &file))
		return errno;
	if (attr->fd >= 0)
		domain = find_domain(xrcd->ibv.context->device, &file);
	if (domain && attr->oflags & O_EXCL)
		return EINVAL;
	if (!domain && !(attr->oflags & O_CREAT))
		return attr->fd < 0 ? EINVAL : EAGAIN;
	if (!domain)
		rc = create_domain(attr->fd, &file, &domain);
	if (rc)
		return rc;
	domain->ibv_device = xrcd->ibv.context->device;
	domain->users++;
	xrcd->domain = domain;
	return 0;
}

struct ibv_xrcd *soft_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr)
{
	const uint32_t all = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
	int rc = attr->comp_mask != all || attr->fd < -1 || attr->oflags & ~(O_CREAT | O_EXCL)
			 ? EINVAL
			 : 0;
	struct soft_xrcd *xrcd = soft_alloc_unless_failed(context, sizeof(*xrcd), &rc);

	if (!rc) {
		xrcd->ibv.context = context;
		soft_lock();
		rc = join_domain(xrcd, attr);
		if (!rc)
			soft_context_hold(soft_context_of(context));
		soft_unlock();
	}
	return soft_finish_create(rc, xrcd);
}

int soft_close_xrcd(struct ibv_xrcd *ibv)
{
	struct soft_xrcd *xrcd = soft_xrcd_of(ibv);
	struct soft_xrc_domain *domain = xrcd->domain;

	soft_engine_handle_lost_descriptors();
	/* If the application has closed all descriptors, domain->file may be another file. */
	bool descriptors_lost =
		soft_channel_has_lost_descriptors(&soft_context_of(ibv->context)->async);

	soft_lock();
	if (xrcd->users) {
		soft_unlock();
		/* Queue pairs or shared receive queues still use the domain (ibv_open_xrcd(3)). */
		return soft_call_result("ibv_close_xrcd", NULL, 0, soft_refuse(EBUSY, "IN_USE"));
	}
	if (--domain->users == 0) {
		soft_list_remove(&domain->node);
		if (domain->file >= 0 && !descriptors_lost)
			close(domain->file);
		free(domain);
	}
	soft_unlock();
	soft_context_release(soft_context_of(ibv->context));
	free(xrcd);
	return 0;
}

/* ---- shared receive queues by number --------------------------------------------------------- */

int soft_xrc_add_srq(struct soft_srq *srq)
{
	soft_assert_locked();
	struct soft_objects *objects = soft_device.objects;
	int rc = objects->xrc_srqs.count < SOFT_MAX_OBJECTS
			 ? soft_table_add(&objects->xrc_srqs, srq, SOFT_PSN_MASK, &srq->number)
			 : ENOMEM;

	if (!rc)
		srq->xrcd->users++;
	return rc;
}

void soft_xrc_remove_srq(struct soft_srq *srq)
{
	soft_assert_locked();
	soft_table_remove(&soft_device.objects->xrc_srqs, srq->number);
	srq->xrcd->users--;
}

struct soft_srq *soft_xrc_find_srq(const struct soft_xrcd *xrcd, uint32_t number)
{
	soft_assert_locked();
	struct soft_srq *srq = soft_table_find(&soft_device.objects->xrc_srqs, number);

	return srq && srq->xrcd->domain == xrcd->domain ? srq : NULL;
}
