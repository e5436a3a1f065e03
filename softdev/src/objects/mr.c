/* Memory regions, which give the device and peers access to the application's memory.
 *
 * Registration faults in all pages with the requested rights, as pinning would, and fails if pages
 * are missing. Without this check, the error would not appear until a peer accesses the pages. An
 * on-demand region (IBV_ACCESS_ON_DEMAND) is checked on each access instead. soft_reg_own_mr()
 * skips the check, because its caller has mapped or allocated the memory and knows that it has no
 * holes. The first access then creates the pages.
 */
#include <sys/mman.h>

#include "extended.h"
#include "inject/inject.h"
#include "trace/trace.h"

enum {
	/* Bits 20 to 29 are hints that are ignored if they do not apply (ibv_reg_mr(3)). */
	OPTIONAL_RIGHTS = 0x3ff00000,
	RIGHTS = SOFT_COMMON_RIGHTS | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED |
		IBV_ACCESS_HUGETLB | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_FLUSH_GLOBAL,
};

int soft_mr_access(unsigned *access, unsigned allowed)
{
	const unsigned needs_local_write = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

	*access &= ~(unsigned)OPTIONAL_RIGHTS;
	/* The device cannot guarantee that data has reached persistent storage. */
	if (*access & IBV_ACCESS_FLUSH_PERSISTENT)
		return soft_refuse(EOPNOTSUPP, "UNSUPPORTED");
	if (*access & ~allowed)
		return soft_refuse_value("ACCESS", "access", *access);
	/* ibv_reg_mr(3) */
	return *access & needs_local_write && !(*access & IBV_ACCESS_LOCAL_WRITE)
		       ? soft_refuse_value("LOCAL_WRITE", "access", *access)
		       : 0;
}

/* With SKIP_PAGE_CHECK, the caller guarantees that the memory has no holes (soft_reg_own_mr). */
enum page_check { CHECK_PAGES, SKIP_PAGE_CHECK };

/* Check the arguments of a registration and fill in its range. Returns 0 or an errno value. */
static int init_range(struct soft_range *range, void *addr, size_t length, uint64_t iova,
		      unsigned access, enum page_check page_check)
{
	int rc = soft_mr_access(&access, RIGHTS);

	if (rc)
		return rc;
	/* Implicit on-demand paging covers the whole address space (ibv_reg_mr(3)). Huge pages are
	 * available "in explicit mode only", and the iova must be 0. */
	bool implicit = access & IBV_ACCESS_ON_DEMAND && !addr && length == SIZE_MAX;

	if (implicit && (access & IBV_ACCESS_HUGETLB || iova))
		return soft_refuse_value("ACCESS", "access", access);
	/* A region of all process memory must not give peers access, except through windows bound
	 * to it. */
	if (page_check == SKIP_PAGE_CHECK && length == SIZE_MAX &&
	    (addr || access & ~(unsigned)(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND)))
		return soft_refuse_value("ACCESS", "access", access);
	if (!length)
		return soft_refuse(EINVAL, "EMPTY");
	if (!implicit && (uintptr_t)addr + length < (uintptr_t)addr)
		return soft_refuse(EINVAL, "PAGES");
	if (access & IBV_ACCESS_ON_DEMAND)
		rc = soft_pages_can_fault() ? 0 : soft_refuse(EOPNOTSUPP, "UNSUPPORTED");
	else if (page_check == CHECK_PAGES)
		rc = soft_pages_fault(addr, length, access & IBV_ACCESS_LOCAL_WRITE);
	if (rc == EFAULT)
		rc = soft_refuse(rc, "PAGES");
	*range = (struct soft_range){
		.access = access | SOFT_ACCESS_PROCESS_VM,
		.memory = addr,
		.start = access & IBV_ACCESS_ZERO_BASED ? 0 : iova,
		.length = length,
		.on_demand = access & IBV_ACCESS_ON_DEMAND,
	};
	return rc;
}

struct ibv_mr *soft_mr_register(struct ibv_pd *pd, const struct soft_mr *template)
{
	int rc = 0;
	struct soft_mr *mr = soft_alloc_unless_failed(pd->context, sizeof(*mr), &rc);

	if (rc)
		return soft_finish_create(rc, mr);
	*mr = *template;
	mr->ibv.context = pd->context;
	mr->ibv.pd = pd;
	mr->ibv.length = mr->range.length;
	mr->range.pd = soft_pd_root(pd);
	soft_lock();
	rc = soft_fault_should_inject(SOFT_FAULT_REGISTER, soft_hca_of(pd->context)->port_bit, 0)
		     ? ENOMEM
		     : soft_range_add(&mr->range);
	if (!rc) {
		SOFT_TRACE(registered, &mr->range);
		mr->ibv.lkey = mr->ibv.rkey = mr->ibv.handle = mr->range.key;
		soft_pd_of(pd)->users++;
	}
	soft_unlock();
	return soft_finish_create(rc, mr);
}

/* Register memory. SKIP_PAGE_CHECK is for memory that the caller knows to have no holes. */
static struct ibv_mr *reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
			     unsigned access, enum page_check page_check)
{
	struct soft_mr mr = {.ibv.addr = addr};
	int rc = init_range(&mr.range, addr, length, iova, access, page_check);

	return soft_call_pointer_result("ibv_reg_mr", "pd", soft_pd_root(pd)->handle,
					rc ? soft_fail_create(rc) : soft_mr_register(pd, &mr));
}

struct ibv_mr *soft_ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
				     unsigned int access)
{
	return reg_mr(pd, addr, length, iova, access, CHECK_PAGES);
}

struct ibv_mr *soft_ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return reg_mr(pd, addr, length, (uintptr_t)addr, (unsigned)access, CHECK_PAGES);
}

struct ibv_mr *soft_reg_own_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return reg_mr(pd, addr, length, (uintptr_t)addr, (unsigned)access, SKIP_PAGE_CHECK);
}

static void remove_key(struct soft_mr *mr)
{
	SOFT_TRACE(key_ended, mr->range.key);
	soft_range_remove(&mr->range);
}

int soft_ibv_dereg_mr(struct ibv_mr *ibv)
{
	struct soft_mr *mr = soft_container(ibv, struct soft_mr, ibv);

	soft_lock();
	/* Deregistering either the original or an import removes the key that they share
	 * (ibv_import_mr(3)). */
	struct soft_mr *key_owner = mr->imported ? soft_mr_original(mr) : mr->closed ? NULL : mr;

	if (key_owner && key_owner->windows) {
		soft_unlock();
		/* A window is still bound to the region (ibv_alloc_mw(3)). */
		return soft_call_result("ibv_dereg_mr", "key", ibv->lkey,
					soft_refuse(EBUSY, "IN_USE"));
	}
	if (key_owner) {
		remove_key(key_owner);
		key_owner->closed = true;
	}
	soft_links->revoke_key(ibv->lkey);
	soft_pd_of(ibv->pd)->users--;
	if (mr->dm)
		soft_dm_release(mr->dm);
	soft_unlock();
	if (mr->mapping)
		munmap(mr->mapping, mr->mapping_size);
	free(mr);
	return 0;
}

/* ---- ibv_rereg_mr(3) ----------------------------------------------------------------------- */

static int check_rereg(const struct soft_mr *mr, int flags, const struct ibv_pd *pd,
		       const void *addr, size_t length, int access)
{
	if (!flags || flags & ~(IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD |
				IBV_REREG_MR_CHANGE_ACCESS))
		return soft_refuse_value("FLAGS", "flags", (unsigned)flags);
	if (mr->cannot_rereg || mr->closed)
		return soft_refuse(EINVAL, "FIXED"); /* ibv_alloc_null_mr(3) */
	if (mr->windows)
		return soft_refuse(EBUSY, "IN_USE"); /* IBTA 11.2.8.7 */
	if (flags & IBV_REREG_MR_CHANGE_TRANSLATION && (!addr || !length))
		return soft_refuse(EINVAL, "EMPTY");
	if (flags & IBV_REREG_MR_CHANGE_PD && !pd)
		return soft_refuse(EINVAL, "NULL_OBJECT");
	if (flags & IBV_REREG_MR_CHANGE_PD && pd->context != mr->ibv.context)
		return soft_refuse(EINVAL, "FOREIGN_OBJECT");
	return access && !(flags & IBV_REREG_MR_CHANGE_ACCESS)
		       ? soft_refuse_value("FLAGS", "flags", (unsigned)flags)
		       : 0;
}

/* Change a region but keep its keys (ibv_rereg_mr(3)). Returns 0 on success. On failure, sets errno
 * and returns IBV_REREG_MR_ERR_INPUT if the region is unchanged, or IBV_REREG_MR_ERR_CMD if its
 * keys have been removed. */
int soft_ibv_rereg_mr(struct ibv_mr *ibv, int flags, struct ibv_pd *pd, void *addr, size_t length,
		      int access)
{
	struct soft_mr *mr = soft_container(ibv, struct soft_mr, ibv);
	bool moved = flags & IBV_REREG_MR_CHANGE_TRANSLATION;
	struct soft_range range;

	soft_lock();
	int rc = check_rereg(mr, flags, pd, addr, length, access);

	soft_unlock();
	bool input_error = rc;
	/* init_range() adds SOFT_ACCESS_PROCESS_VM again. */
	const unsigned old_rights = mr->range.access & ~SOFT_ACCESS_PROCESS_VM;

	if (!rc) /* without the lock, because faulting in pages can take a long time */
		rc = init_range(&range, moved ? addr : ibv->addr, moved ? length : ibv->length,
				moved ? (uintptr_t)addr : mr->range.start,
				flags & IBV_REREG_MR_CHANGE_ACCESS ? (unsigned)access : old_rights,
				CHECK_PAGES);
	soft_lock();
	if (!input_error && mr->windows) {
		rc = soft_refuse(EBUSY, "IN_USE"); /* a window was bound in the meantime */
		input_error = true;
	}
	if (!rc) {
		if (flags & IBV_REREG_MR_CHANGE_PD) {
			soft_pd_of(ibv->pd)->users--;
			soft_pd_of(pd)->users++;
			ibv->pd = pd;
		}
		range.key = mr->range.key;
		range.pd = soft_pd_root(ibv->pd);
		mr->range = range;
		SOFT_TRACE(registered, &mr->range);
		ibv->addr = moved ? addr : ibv->addr;
		ibv->length = range.length;
		soft_links->revoke_key(ibv->lkey);
	} else if (!input_error) {
		remove_key(mr);
		mr->closed = true;
		soft_links->revoke_key(ibv->lkey);
	}
	soft_unlock();
	if (!rc)
		return 0;
	errno = soft_call_result("ibv_rereg_mr", "key", ibv->lkey, rc);
	return input_error ? IBV_REREG_MR_ERR_INPUT : IBV_REREG_MR_ERR_CMD;
}
