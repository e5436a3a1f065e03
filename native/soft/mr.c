/* Memory regions: what the device may touch, and for whom.
 *
 * Registering makes sure that the pages are there with the rights asked for, as pinning would
 * (madvise(2), MADV_POPULATE_*): a hole would otherwise be found by a peer's access, too late for
 * an error code.
 */
#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "objects.h"

#ifndef MADV_POPULATE_READ /* Linux 5.14; older C libraries do not know it */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* ibv_reg_mr(3): these are hints, ignored where they mean nothing (bits 20 to 29). */
enum {
	OPTIONAL_RIGHTS = 0x3ff00000,
	RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		 IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED |
		 IBV_ACCESS_HUGETLB,
};

/* Does the kernel know the call at all (EINVAL also means a mapping without the right)? */
static bool can_populate(void)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	uintptr_t here = (uintptr_t)&page & ~(page - 1);

	return madvise((void *)here, page, MADV_POPULATE_READ) == 0;
}

static int populate(void *addr, size_t length, bool writable)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	uintptr_t start = (uintptr_t)addr & ~(page - 1);
	uintptr_t end = (uintptr_t)addr + length;

	if (end < (uintptr_t)addr)
		return EINVAL;
	/* The kernel rounds the length up to whole pages. */
	if (madvise((void *)start, end - start,
		    writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0)
		return 0;
	switch (errno) {
	case EINVAL:
		return can_populate() ? EFAULT : 0;
	case ENOMEM: /* a hole */
	case EFAULT: /* beyond the end of a mapped file */
		return EFAULT; /* as the kernel says when it cannot pin */
	default:
		return errno;
	}
}

struct ibv_mr *soft_ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
				     unsigned int access)
{
	const unsigned needs_local_write = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
	struct soft_mr *mr = NULL;
	int rc = 0;

	access &= ~(unsigned)OPTIONAL_RIGHTS;
	if (access & IBV_ACCESS_ON_DEMAND)
		rc = EOPNOTSUPP;
	else if (access & ~(unsigned)RIGHTS || length == 0)
		rc = EINVAL;
	else if ((access & needs_local_write) && !(access & IBV_ACCESS_LOCAL_WRITE))
		rc = EINVAL; /* ibv_reg_mr(3) */
	if (!rc)
		rc = populate(addr, length, access & IBV_ACCESS_LOCAL_WRITE);
	if (!rc) {
		mr = calloc(1, sizeof(*mr));
		rc = mr ? 0 : ENOMEM;
	}
	if (!rc) {
		soft_lock();
		mr->ibv = (struct ibv_mr){
			.context = pd->context,
			.pd = pd,
			.addr = addr,
			.length = length,
		};
		mr->range = (struct soft_range){
			.access = access,
			.pd = pd,
			.memory = addr,
			.start = access & IBV_ACCESS_ZERO_BASED ? 0 : iova,
			.length = length,
		};
		rc = soft_range_add(&mr->range);
		if (!rc) {
			mr->ibv.lkey = mr->ibv.rkey = mr->ibv.handle = mr->range.key;
			soft_container(pd, struct soft_pd, ibv)->users++;
		}
		soft_unlock();
	}
	if (rc) {
		free(mr);
		errno = rc;
		return NULL;
	}
	return &mr->ibv;
}

struct ibv_mr *soft_ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return soft_ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, (unsigned)access);
}

int soft_ibv_dereg_mr(struct ibv_mr *ibv)
{
	struct soft_mr *mr = soft_container(ibv, struct soft_mr, ibv);

	soft_lock();
	if (mr->windows) {
		soft_unlock();
		return EBUSY; /* ibv_alloc_mw(3): a window is still bound to it */
	}
	soft_range_remove(&mr->range);
	soft_container(ibv->pd, struct soft_pd, ibv)->users--;
	soft_unlock();
	free(mr);
	return 0;
}
