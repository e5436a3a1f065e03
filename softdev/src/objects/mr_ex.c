/* Null regions, dma-buf regions, and prefetching for on-demand regions. */
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "extended.h"
#include "trace/trace.h"

/* ---- ibv_alloc_null_mr(3) ------------------------------------------------------------------ */

/* Register a null region. Peers get no rights, because only its lkey is valid
 * (ibv_alloc_null_mr(3)). */
struct ibv_mr *soft_alloc_null_mr(struct ibv_pd *pd)
{
	const struct soft_mr mr = {
		.cannot_rereg = true,
		.range =
			{
				.is_null = true,
				.access = IBV_ACCESS_LOCAL_WRITE,
				.length = SIZE_MAX,
			},
	};
	struct ibv_mr *ibv = soft_mr_register(pd, &mr);

	if (ibv)
		ibv->rkey = 0;
	return soft_call_pointer_result("ibv_alloc_null_mr", "pd", soft_pd_root(pd)->handle, ibv);
}

/* ---- ibv_reg_dmabuf_mr(3) ------------------------------------------------------------------ */

/* Returns the size of a file, or SIZE_MAX if it has none. */
static uint64_t file_size(int fd, const struct stat *status)
{
	if (S_ISREG(status->st_mode))
		return (uint64_t)status->st_size;
	/* Seeking to the end returns the size of a dma-buf. This has no side effect, because a
	 * dma-buf has no file position. */
	off_t end = lseek(fd, 0, SEEK_END);

	return end < 0 ? SIZE_MAX : (uint64_t)end;
}

static int check_dmabuf(uint64_t offset, size_t length, uint64_t iova, int fd, unsigned *access,
			bool *is_file)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	struct stat status;
	int rc = soft_mr_access(access, SOFT_COMMON_RIGHTS);

	if (rc)
		return rc;
	if (!length)
		return soft_refuse(EINVAL, "EMPTY");
	if ((offset ^ iova) & (page - 1)) /* must match (ibv_reg_dmabuf_mr(3)) */
		return soft_refuse_value("PAGE_OFFSET", "iova", iova);
	if (fstat(fd, &status))
		return errno;
	uint64_t size = file_size(fd, &status);

	*is_file = S_ISREG(status.st_mode);
	return offset > size || length > size - offset ? soft_refuse(EINVAL, "PAGES") : 0;
}

/* Register a dma-buf, or another file that can be mapped, such as a memfd. The application may
 * close `fd` after the call. */
struct ibv_mr *soft_ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length,
				      uint64_t iova, int fd, int access)
{
	uint64_t page_offset = offset & ((uint64_t)sysconf(_SC_PAGESIZE) - 1);
	unsigned rights = (unsigned)access;
	struct soft_mr mr = {.cannot_rereg = true, .mapping_size = length + page_offset};
	struct ibv_mr *ibv = NULL;
	bool is_file = false;
	int rc = check_dmabuf(offset, length, iova, fd, &rights, &is_file);

	if (!rc) {
		mr.mapping = mmap(NULL, mr.mapping_size,
				  PROT_READ | (rights & IBV_ACCESS_LOCAL_WRITE ? PROT_WRITE : 0),
				  MAP_SHARED, fd, (off_t)(offset - page_offset));
		rc = mr.mapping == MAP_FAILED ? errno : 0;
	}
	if (!rc) {
		mr.ibv.addr = (void *)(uintptr_t)offset; /* like libibverbs */
		mr.range = (struct soft_range){
			/* A dma-buf may be device memory, which process_vm_readv(2) cannot copy. */
			.access = rights | (is_file ? SOFT_ACCESS_PROCESS_VM : 0),
			.memory = (uint8_t *)mr.mapping + page_offset,
			.start = iova,
			.length = length,
			/* Check the pages of a file on each access, because truncating the file
			 * removes them. A dma-buf keeps its size and has no pages to fault in. */
			.on_demand = is_file,
		};
		ibv = soft_mr_register(pd, &mr);
		rc = ibv ? 0 : errno;
		if (rc)
			munmap(mr.mapping, mr.mapping_size);
	}
	if (rc)
		errno = rc;
	return soft_call_pointer_result("ibv_reg_dmabuf_mr", "pd", soft_pd_root(pd)->handle, ibv);
}

/* ---- ibv_advise_mr(3) ---------------------------------------------------------------------- */

/* Find the memory that an SGE refers to, and store its address in `*memory`. Stores NULL if the
 * region is not on demand, because its pages already exist. Returns 0 or an errno value. */
static int find_prefetch_memory(const struct ibv_pd *pd, const struct ibv_sge *sge, bool writing,
				uint8_t **memory)
{
	const struct soft_range *range = soft_range_find(sge->lkey);

	if (!range)
		return ENOENT;
	if (range->is_window)
		return EINVAL;
	if (range->pd != soft_pd_root(pd) || (writing && !(range->access & IBV_ACCESS_LOCAL_WRITE)))
		return EPERM;
	if (!soft_range_contains(range, sge->addr, sge->length))
		return EFAULT;
	*memory = range->access & IBV_ACCESS_ON_DEMAND ? range->memory + (sge->addr - range->start)
						       : NULL;
	return 0;
}

/* Prefetch the pages of SGEs in on-demand regions. Missing pages are an error only with
 * IB_UVERBS_ADVISE_MR_FLAG_FLUSH, which makes the caller wait for the pages. Otherwise, the advice
 * is best-effort (ibv_advise_mr(3)). */
int soft_advise_mr(struct ibv_pd *pd, enum ib_uverbs_advise_mr_advice advice, uint32_t flags,
		   struct ibv_sge *sg_list, uint32_t num_sges)
{
	bool writing = advice == IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE;
	int rc = 0;

	if (advice > IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT)
		return ENOTSUP;
	if (flags & ~(uint32_t)IB_UVERBS_ADVISE_MR_FLAG_FLUSH || !num_sges)
		return EINVAL;
	soft_lock();
	for (uint32_t i = 0; i < num_sges && !rc; i++) {
		uint8_t *memory;

		rc = find_prefetch_memory(pd, &sg_list[i], writing, &memory);
		if (rc || !memory || advice == IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT)
			continue;
		int fault_rc = soft_pages_fault(memory, sg_list[i].length, writing);

		if (flags & IB_UVERBS_ADVISE_MR_FLAG_FLUSH)
			rc = fault_rc;
	}
	soft_unlock();
	return rc;
}
