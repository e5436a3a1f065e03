/* Test memory regions of all kinds (on demand, null, file-backed, device memory), reregistration,
 * and parent domains: ibv_reg_mr(3), ibv_rereg_mr(3), ibv_alloc_dm(3), ibv_advise_mr(3). */
#define _GNU_SOURCE /* memfd_create */
#include "extended_side.h"
#include "objects/objects.h"

enum { PAGE = 4096, PEER_RIGHTS = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE };

static uint8_t *map_pages(size_t count)
{
	uint8_t *memory = mmap(NULL, count * PAGE, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(memory != MAP_FAILED);
	return memory;
}

static bool is_resident(uint8_t *page)
{
	unsigned char is = 0;

	CHECK_OK(mincore(page, PAGE, &is));
	return is & 1;
}

/* Access b's region with one request from a. Returns the completion status. */
static enum ibv_wc_status access_to(struct side *a, enum ibv_wr_opcode opcode,
				    const struct ibv_mr *mr, uint64_t address, uint32_t length)
{
	POST(a, opcode, .wr_id = 1, .length = length, .remote = address, .rkey = mr->rkey);
	return next_wc(a).status;
}

static enum ibv_wc_status write_to(struct side *a, const struct ibv_mr *mr, uint64_t address,
				   uint32_t length)
{
	return access_to(a, IBV_WR_RDMA_WRITE, mr, address, length);
}

/* Check that a write is refused, and reconnect the pair, because the error ends the connection. */
static void expect_write_refused(struct side *a, struct side *b, const struct ibv_mr *mr,
				 uint64_t address, uint32_t length)
{
	CHECK_EQUAL(write_to(a, mr, address, length), IBV_WC_REM_ACCESS_ERR);
	connect_again(a, b);
}

/* ---- on demand ----------------------------------------------------------------------------- */

static void on_demand_region_checks_pages_on_access(struct side *a, struct side *b)
{
	const int rights = IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE | PEER_RIGHTS;
	const struct ibv_device_attr_ex attr = device_of(a->context);

	CHECK_EQUAL(attr.odp_caps.general_caps, IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT);
	CHECK_EQUAL(attr.odp_caps.per_transport_caps.rc_odp_caps, 0x7f);

	uint8_t *memory = map_pages(4);

	/* Registration does not check the pages. A hole causes an error only when it is
	 * accessed. */
	CHECK_OK(munmap(memory + PAGE, PAGE));
	CHECK_OK(mprotect(memory + 2 * PAGE, PAGE, PROT_READ));
	struct ibv_mr *mr = verbs->ibv_reg_mr(b->pd, memory, 4 * PAGE, rights);

	CHECK(mr);
	CHECK(!is_resident(memory) && !is_resident(memory + 3 * PAGE));
	fill(a->memory, 3 * PAGE, 5);
	CHECK_EQUAL(write_to(a, mr, (uintptr_t)memory, 100), IBV_WC_SUCCESS);
	CHECK(is_resident(memory) && is_filled(memory, 100, 5));
	CHECK(!is_resident(memory + 3 * PAGE));
	expect_write_refused(a, b, mr, (uintptr_t)memory + PAGE - 8, 16);
	expect_write_refused(a, b, mr, (uintptr_t)memory + 2 * PAGE, 8);
	CHECK_EQUAL(access_to(a, IBV_WR_RDMA_READ, mr, (uintptr_t)memory + 2 * PAGE, 8),
		    IBV_WC_SUCCESS);
	/* A long READ fails when it reaches the hole. */
	CHECK_EQUAL(access_to(a, IBV_WR_RDMA_READ, mr, (uintptr_t)memory, 4 * PAGE),
		    IBV_WC_REM_ACCESS_ERR);
	connect_again(a, b);
	/* The hole may be mapped later. */
	CHECK(mmap(memory + PAGE, PAGE, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory + PAGE);
	fill(a->memory, 16, 5); /* overwritten by the READs */
	CHECK_EQUAL(write_to(a, mr, (uintptr_t)memory + PAGE - 8, 16), IBV_WC_SUCCESS);
	CHECK(is_filled(memory + PAGE - 8, 16, 5));
	/* A window on the region respects the page protection. */
	struct ibv_mw *mw = b->context->ops.alloc_mw(b->pd, IBV_MW_TYPE_2);

	CHECK(mw);
	dereg(mr);
	CHECK(mr = verbs->ibv_reg_mr(b->pd, memory, 4 * PAGE, rights | IBV_ACCESS_MW_BIND));
	struct ibv_send_wr bind = {
		.wr_id = 6,
		.opcode = IBV_WR_BIND_MW,
		.bind_mw = {mw, next_key(mw->rkey), {mr, (uintptr_t)memory, 3 * PAGE, PEER_RIGHTS}},
	};

	CHECK_OK(post_wr(b, &bind));
	expect_done(b, 6);
	RUN(a, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, .wr_id = 1, .length = 8,
	    .remote = (uintptr_t)memory + 2 * PAGE,
	    .rkey = bind.bind_mw.rkey); /* a read-only page */
	connect_again(a, b);
	CHECK_OK(b->context->ops.dealloc_mw(mw));
	/* A local request also fails if its data is in a hole. */
	CHECK_OK(munmap(memory + PAGE, PAGE));
	struct request local = {.opcode = IBV_WR_SEND, .wr_id = 2, .length = 64, .lkey = mr->lkey};

	local.offset = (size_t)(memory + PAGE - b->memory);
	run_request(b, IBV_WC_LOC_PROT_ERR, local);
	connect_again(a, b);
	dereg(mr);

	/* A region of the whole address space gives access to mapped memory only. See also
	 * tests/verbs/test_special_regions.py. */
	CHECK(mr = verbs->ibv_reg_mr(b->pd, NULL, SIZE_MAX, rights));
	CHECK(!mr->addr && mr->length == SIZE_MAX);
	CHECK_EQUAL(write_to(a, mr, (uintptr_t)memory + 100, 8), IBV_WC_SUCCESS);
	expect_write_refused(a, b, mr, (uintptr_t)memory + PAGE, 8);
	expect_write_refused(a, b, mr, 8, 8);
	CHECK_EQUAL(write_to(a, mr, UINT64_MAX - 4, 8), IBV_WC_REM_ACCESS_ERR);
	dereg(mr);

	/* ibv_reg_mr(3) excludes these combinations. */
	REFUSED(verbs->ibv_reg_mr(b->pd, NULL, SIZE_MAX, IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB),
		EINVAL);
	REFUSED(verbs->ibv_reg_mr_iova2(b->pd, NULL, SIZE_MAX, 4096, IBV_ACCESS_ON_DEMAND), EINVAL);
	REFUSED(verbs->ibv_reg_mr(b->pd, memory, SIZE_MAX, IBV_ACCESS_ON_DEMAND), EINVAL);
	REFUSED(verbs->ibv_reg_mr(b->pd, NULL, SIZE_MAX, 0), EFAULT);
	REFUSED(verbs->ibv_reg_mr(b->pd, memory, PAGE, IBV_ACCESS_ON_DEMAND | PEER_RIGHTS), EINVAL);
	munmap(memory, 4 * PAGE);
}

/* Check that soft_reg_own_mr leaves each page unpopulated until its first access, and that
 * ibv_reg_mr populates all pages. */
static void own_region_populates_pages_on_first_access(struct side *a, struct side *b)
{
	const int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	uint8_t *memory = map_pages(4);
	struct ibv_mr *mr = soft_reg_own_mr(b->pd, memory, 4 * PAGE, rights);

	CHECK(mr);
	for (int i = 0; i < 4; i++)
		CHECK(!is_resident(memory + i * PAGE));
	fill(a->memory, PAGE, 5);
	CHECK_EQUAL(write_to(a, mr, (uintptr_t)memory + PAGE - 8, 16), IBV_WC_SUCCESS);
	CHECK(is_filled(memory + PAGE - 8, 16, 5));
	CHECK(is_resident(memory) && is_resident(memory + PAGE));
	CHECK(!is_resident(memory + 2 * PAGE) && !is_resident(memory + 3 * PAGE));
	/* Rights and bounds are still checked. */
	CHECK_EQUAL(access_to(a, IBV_WR_RDMA_READ, mr, (uintptr_t)memory, 8),
		    IBV_WC_REM_ACCESS_ERR);
	connect_again(a, b);
	CHECK_EQUAL(write_to(a, mr, (uintptr_t)memory + 4 * PAGE - 8, 16), IBV_WC_REM_ACCESS_ERR);
	dereg(mr);
	REFUSED(soft_reg_own_mr(b->pd, memory, 0, rights), EINVAL);
	REFUSED(soft_reg_own_mr(b->pd, memory, PAGE, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	CHECK(mr = verbs->ibv_reg_mr(b->pd, memory, 4 * PAGE, rights));
	CHECK(is_resident(memory + 2 * PAGE) && is_resident(memory + 3 * PAGE));
	dereg(mr);
	munmap(memory, 4 * PAGE);
}

/* Check that a region of the whole address space can be registered only for local access, and that
 * it includes memory mapped later. */
static void address_space_region_is_local_and_includes_later_maps(struct side *a, struct side *b)
{
	REFUSED(soft_reg_own_mr(a->pd, NULL, SIZE_MAX,
				IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE),
		EINVAL);
	REFUSED(soft_reg_own_mr(a->pd, NULL, SIZE_MAX, IBV_ACCESS_REMOTE_READ), EINVAL);
	REFUSED(soft_reg_own_mr(a->pd, a->memory, SIZE_MAX, 0), EINVAL);
	struct ibv_mr *mr = soft_reg_own_mr(a->pd, NULL, SIZE_MAX, 0);
	struct ibv_mr *writable = soft_reg_own_mr(a->pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE);
	uint8_t *memory = map_pages(2);

	CHECK(mr && !mr->addr && mr->length == SIZE_MAX);
	fill(memory, 2 * PAGE, 9);
	struct request request = {
		.opcode = IBV_WR_RDMA_WRITE,
		.wr_id = 1,
		.length = PAGE,
		.lkey = mr->lkey,
		.offset = (size_t)(memory - a->memory),
		.remote = (uintptr_t)b->memory,
		.rkey = b->mr->rkey,
	};

	run_request(a, IBV_WC_SUCCESS, request);
	CHECK(is_filled(b->memory, PAGE, 9));
	request.opcode = IBV_WR_RDMA_READ;
	request.lkey = writable->lkey;
	fill(b->memory, PAGE, 7);
	run_request(a, IBV_WC_SUCCESS, request);
	CHECK(is_filled(memory, PAGE, 7));
	request.lkey = mr->lkey;
	fill(b->memory, PAGE, 5);
	run_request(a, IBV_WC_LOC_PROT_ERR, request);
	CHECK(is_filled(memory, PAGE, 7));
	dereg(writable);
	dereg(mr);
	munmap(memory, 2 * PAGE);
}

static int advise(struct side *side, enum ib_uverbs_advise_mr_advice advice, uint32_t flags,
		  uint32_t lkey, void *addr, uint32_t length)
{
	struct ibv_sge sge = {.addr = (uintptr_t)addr, .length = length, .lkey = lkey};

	return extended(side->context)->advise_mr(side->pd, advice, flags, &sge, 1);
}

static void advise_mr_prefetches_and_validates_arguments(void)
{
	const enum ib_uverbs_advise_mr_advice prefetch = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
					      for_write = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
					      no_fault =
						      IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT;
	const uint32_t flush = IB_UVERBS_ADVISE_MR_FLAG_FLUSH;
	struct side a, other;
	uint8_t *memory = map_pages(4);

	OPEN(&a);
	OPEN(&other);
	struct ibv_mr *mr = verbs->ibv_reg_mr(a.pd, memory, 4 * PAGE,
					      IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mr *readable = verbs->ibv_reg_mr(a.pd, memory, 4 * PAGE, IBV_ACCESS_ON_DEMAND);

	CHECK(mr && readable);
	CHECK_OK(advise(&a, no_fault, flush, mr->lkey, memory, PAGE));
	CHECK(!is_resident(memory));
	CHECK_OK(advise(&a, for_write, flush, mr->lkey, memory, PAGE));
	CHECK(is_resident(memory) && !is_resident(memory + PAGE));
	CHECK_OK(advise(&a, for_write, 0, mr->lkey, memory + PAGE, 2 * PAGE));
	CHECK(is_resident(memory + PAGE) && is_resident(memory + 2 * PAGE));
	CHECK_OK(advise(&a, prefetch, flush, readable->lkey, memory, 4 * PAGE));

	CHECK_EQUAL(advise(&a, (enum ib_uverbs_advise_mr_advice)7, 0, mr->lkey, memory, 1),
		    ENOTSUP);
	CHECK_EQUAL(advise(&a, prefetch, 2, mr->lkey, memory, 1), EINVAL);
	CHECK_EQUAL(extended(a.context)->advise_mr(a.pd, prefetch, 0, NULL, 0), EINVAL);
	CHECK_OK(advise(&a, prefetch, 0, a.mr->lkey, a.memory, 1)); /* not an on-demand region */
	CHECK_EQUAL(advise(&a, prefetch, 0, ~mr->lkey, memory, 1), ENOENT);
	CHECK_EQUAL(advise(&other, prefetch, 0, mr->lkey, memory, 1), EPERM);
	CHECK_EQUAL(advise(&a, for_write, 0, readable->lkey, memory, 1), EPERM);
	CHECK_EQUAL(advise(&a, prefetch, 0, mr->lkey, memory + PAGE, 4 * PAGE), EFAULT);
	/* Missing pages are an error only if the caller waits for the prefetch. */
	CHECK_OK(munmap(memory + 3 * PAGE, PAGE));
	CHECK_OK(advise(&a, prefetch, 0, mr->lkey, memory, 4 * PAGE));
	CHECK_EQUAL(advise(&a, prefetch, flush, mr->lkey, memory, 4 * PAGE), EFAULT);
	dereg(mr);
	dereg(readable);
	munmap(memory, 3 * PAGE);
	close_side(&a);
	close_side(&other);
}

/* ---- nothing ------------------------------------------------------------------------------- */

static void null_region_reads_as_zeros_and_discards_writes(struct side *a, struct side *b)
{
	struct ibv_mr *mr = extended(a->context)->alloc_null_mr(a->pd);

	CHECK(mr && mr->pd == a->pd && mr->length == SIZE_MAX && mr->rkey == 0);
	/* The request's second SGE refers to the null region, and is longer than the device's block
	 * of zeros. */
	fill(a->memory, 100, 4);
	fill(b->memory, 1 << 20, 1);
	struct ibv_sge sges[3] = {
		{(uintptr_t)a->memory, 50, a->mr->lkey},
		{12345, 700000, mr->lkey},
		{(uintptr_t)a->memory + 50, 50, a->mr->lkey},
	};
	struct ibv_send_wr wr = {.wr_id = 1,
				 .sg_list = sges,
				 .num_sge = 3,
				 .opcode = IBV_WR_RDMA_WRITE,
				 .wr.rdma = {(uintptr_t)b->memory, b->mr->rkey}};

	CHECK_OK(post_wr(a, &wr));
	expect_done(a, 1);
	CHECK(is_filled(b->memory, 50, 4));
	for (int i = 0; i < 700000; i++)
		CHECK(b->memory[50 + i] == 0);
	CHECK(!memcmp(b->memory + 700050, a->memory + 50, 50));
	/* A READ discards the data for the null region, and stores only the data for the first and
	 * the last SGE. */
	fill(b->memory, 1 << 20, 7);
	wr.opcode = IBV_WR_RDMA_READ;
	CHECK_OK(post_wr(a, &wr));
	expect_done(a, 1);
	CHECK(is_filled(a->memory, 50, 7) && !memcmp(a->memory + 50, b->memory + 700050, 50));
	/* Discarded data cannot be read back. */
	wr.opcode = IBV_WR_RDMA_WRITE;
	CHECK_OK(post_wr(a, &wr));
	expect_done(a, 1);
	CHECK(b->memory[50] == 0 && b->memory[700049] == 0);
	/* A null region cannot be reregistered or accessed by peers. */
	CHECK_EQUAL(verbs->ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0),
		    IBV_REREG_MR_ERR_INPUT);
	CHECK_EQUAL(errno, EINVAL);
	RUN(b, IBV_WC_REM_ACCESS_ERR, IBV_WR_RDMA_WRITE, .wr_id = 2, .length = 8, .rkey = mr->lkey);
	CHECK_EQUAL(verbs->ibv_dealloc_pd(a->pd), EBUSY);
	dereg(mr);
}

/* ---- of a file ----------------------------------------------------------------------------- */

static void dmabuf_region_accesses_the_file_within_its_bounds(struct side *a, struct side *b)
{
	const int rights = IBV_ACCESS_LOCAL_WRITE | PEER_RIGHTS | IBV_ACCESS_RELAXED_ORDERING;
	uint8_t seen[200];

	int fd = memfd_create("test", 0);

	CHECK(fd >= 0);
	CHECK_OK(ftruncate(fd, 4 * PAGE));
	const struct {
		size_t offset, length;
		uint64_t iova;
		int fd, access, error;
	} refused[] = {
		{0, PAGE, 0, -1, rights, EBADF},
		{0, 0, 0, fd, rights, EINVAL},
		{100, PAGE, 101, fd, rights, EINVAL},
		{PAGE, 4 * PAGE, 0, fd, rights, EINVAL},
		{5 * PAGE, 1, 0, fd, rights, EINVAL},
		{0, SIZE_MAX, 0, fd, rights, EINVAL},
		{0, PAGE, 0, fd, rights | IBV_ACCESS_ON_DEMAND, EINVAL},
		{0, PAGE, 0, fd, rights | IBV_ACCESS_ZERO_BASED, EINVAL},
		{0, PAGE, 0, fd, PEER_RIGHTS, EINVAL},
		{0, PAGE, 0, b->channel->fd, rights, EINVAL},
	};

	FOR_EACH (i, refused)
		REFUSED(verbs->ibv_reg_dmabuf_mr(b->pd, refused[i].offset, refused[i].length,
						 refused[i].iova, refused[i].fd, refused[i].access),
			refused[i].error);
	struct ibv_mr *mr = verbs->ibv_reg_dmabuf_mr(b->pd, PAGE + 100, PAGE, 0x10064, fd, rights);

	CHECK(mr && mr->length == PAGE);
	int other = dup(fd);

	CHECK_OK(close(fd)); /* the region stays valid */
	fill(a->memory, 200, 3);
	CHECK_EQUAL(write_to(a, mr, 0x10064 + 10, 200), IBV_WC_SUCCESS);
	CHECK_EQUAL(pread(other, seen, 200, PAGE + 110), 200);
	CHECK(is_filled(seen, 200, 3));
	CHECK_EQUAL(verbs->ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0),
		    IBV_REREG_MR_ERR_INPUT);
	expect_write_refused(a, b, mr, 0x10063, 1);
	expect_write_refused(a, b, mr, 0x10064 + PAGE, 1);
	/* Access to a file that was truncated after registration fails, but does not kill the
	 * process. */
	CHECK_OK(ftruncate(other, PAGE));
	CHECK_EQUAL(write_to(a, mr, 0x10064, 8), IBV_WC_REM_ACCESS_ERR);
	dereg(mr);
	/* A read-only file is sufficient for a region without write access. */
	char path[64];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", other);
	int readable = open(path, O_RDONLY | O_CLOEXEC);

	CHECK(readable >= 0);
	REFUSED(verbs->ibv_reg_dmabuf_mr(b->pd, 0, PAGE, 0, readable, rights), EACCES);
	mr = verbs->ibv_reg_dmabuf_mr(b->pd, 0, PAGE, 0, readable, IBV_ACCESS_REMOTE_READ);
	CHECK(mr);
	dereg(mr);
	close(readable);
	close(other);
}

/* ---- of the device ------------------------------------------------------------------------- */

static struct ibv_dm *allocate_dm(struct side *side, struct ibv_alloc_dm_attr attr)
{
	return extended(side->context)->alloc_dm(side->context, &attr);
}

static void device_memory_is_copied_and_accessed_by_offset(struct side *a, struct side *b)
{
	const unsigned rights = IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE | PEER_RIGHTS |
				IBV_ACCESS_REMOTE_ATOMIC;
	const struct ibv_device_attr_ex attr = device_of(b->context);
	uint8_t seen[300];
	uint64_t before;

	struct verbs_context *ex = extended(b->context);

	CHECK(attr.max_dm_size >= 65536);
	const struct ibv_alloc_dm_attr refused[] = {
		{.length = 0},
		{.length = attr.max_dm_size + 1},
		{.length = 1, .comp_mask = 1},
		{.length = 1, .log_align_req = 40},
	};

	FOR_EACH (i, refused)
		REFUSED(allocate_dm(b, refused[i]), EINVAL);
	struct ibv_dm *all = allocate_dm(b, (struct ibv_alloc_dm_attr){.length = attr.max_dm_size});

	CHECK(all);
	REFUSED(allocate_dm(b, (struct ibv_alloc_dm_attr){.length = 1}), ENOMEM);
	CHECK_OK(ex->free_dm(all));
	struct ibv_dm *dm =
		allocate_dm(b, (struct ibv_alloc_dm_attr){.length = 4096, .log_align_req = 3});

	CHECK(dm && dm->context == b->context);
	fill(a->memory, 300, 2);
	CHECK_OK(dm->memcpy_to_dm(dm, 1000, a->memory, 300));
	CHECK_OK(dm->memcpy_from_dm(seen, dm, 1000, 300));
	CHECK(is_filled(seen, 300, 2));
	CHECK_EQUAL(dm->memcpy_to_dm(dm, 4000, a->memory, 100), EFAULT);
	CHECK_EQUAL(dm->memcpy_from_dm(seen, dm, UINT64_MAX - 3, 4), EFAULT);
	CHECK_EQUAL(dm->memcpy_to_dm(dm, 1000, NULL, 4), EFAULT);
	CHECK_EQUAL(dm->memcpy_from_dm(NULL, dm, 1000, 4), EFAULT);
	CHECK_EQUAL(dm->memcpy_from_dm(NULL, dm, 1000, 0), 0);
	CHECK_EQUAL(dm->memcpy_to_dm(dm, 1001, a->memory, 4), EINVAL); /* not aligned to words */
	CHECK_EQUAL(dm->memcpy_to_dm(dm, 1000, a->memory, 5), EINVAL);
	CHECK_EQUAL(dm->memcpy_from_dm(seen, dm, 1002, 4), EINVAL);
	CHECK_EQUAL(dm->memcpy_from_dm(seen, dm, 1000, 2), EINVAL);

	REFUSED(ex->reg_dm_mr(b->pd, dm, 0, 4096, rights & ~(unsigned)IBV_ACCESS_ZERO_BASED),
		EINVAL);
	REFUSED(ex->reg_dm_mr(b->pd, dm, 1, 4096, rights), EINVAL);
	REFUSED(ex->reg_dm_mr(b->pd, dm, 0, 4096, rights | IBV_ACCESS_ON_DEMAND), EINVAL);
	REFUSED(ex->reg_dm_mr(b->pd, dm, 0, 4096, IBV_ACCESS_ZERO_BASED | PEER_RIGHTS), EINVAL);
	REFUSED(ex->reg_dm_mr(a->pd, dm, 0, 4096, rights), EINVAL); /* domain of another context */
	struct ibv_mr *mr = ex->reg_dm_mr(b->pd, dm, 1000, 1000, rights);

	CHECK(mr && mr->length == 1000 && !mr->addr);
	/* A region of length zero can be registered, too. */
	struct ibv_mr *nothing = ex->reg_dm_mr(b->pd, dm, 4096, 0, rights);

	CHECK(nothing && nothing->length == 0);
	expect_write_refused(a, b, nothing, 0, 1);
	dereg(nothing);
	CHECK_EQUAL(ex->free_dm(dm), EBUSY);
	/* Addresses are offsets within the region. */
	memset(a->memory, 0, 300);
	CHECK_EQUAL(access_to(a, IBV_WR_RDMA_READ, mr, 0, 300), IBV_WC_SUCCESS);
	CHECK(is_filled(a->memory, 300, 2));
	fill(a->memory, 300, 8);
	CHECK_EQUAL(write_to(a, mr, 700, 300), IBV_WC_SUCCESS);
	CHECK_OK(dm->memcpy_from_dm(seen, dm, 1700, 300));
	CHECK(is_filled(seen, 300, 8));
	before = 41;
	CHECK_OK(dm->memcpy_to_dm(dm, 1008, &before, 8));
	DO(a, IBV_WR_ATOMIC_FETCH_AND_ADD, .wr_id = 1, .length = 8, .remote = 8, .rkey = mr->rkey,
	   .compare_add = 1);
	CHECK_OK(dm->memcpy_from_dm(&before, dm, 1008, 8));
	CHECK_EQUAL(before, 42);
	/* Use the device memory as the source of the owner's request. */
	struct ibv_sge sge = {.addr = 700, .length = 300, .lkey = mr->lkey};
	struct ibv_send_wr wr = {.wr_id = 4,
				 .sg_list = &sge,
				 .num_sge = 1,
				 .opcode = IBV_WR_RDMA_WRITE,
				 .wr.rdma = {(uintptr_t)a->memory + 4096, a->mr->rkey}};

	CHECK_OK(post_wr(b, &wr));
	expect_done(b, 4);
	CHECK(is_filled(a->memory + 4096, 300, 8));
	CHECK_EQUAL(write_to(a, mr, 701, 300), IBV_WC_REM_ACCESS_ERR);
	dereg(mr);
	CHECK_OK(ex->free_dm(dm));
}

/* ---- registered anew ----------------------------------------------------------------------- */

static int rereg(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length,
		 int access)
{
	errno = 0;
	return verbs->ibv_rereg_mr(mr, flags, pd, addr, length, access);
}

static void rereg_mr_changes_translation_domain_and_access(struct side *a, struct side *b)
{
	const int moved = IBV_REREG_MR_CHANGE_TRANSLATION, domain = IBV_REREG_MR_CHANGE_PD,
		  access = IBV_REREG_MR_CHANGE_ACCESS;

	struct ibv_pd *other = verbs->ibv_alloc_pd(b->context);
	struct ibv_mr *mr = verbs->ibv_reg_mr(b->pd, b->memory, PAGE, ALL_RIGHTS);
	uint32_t key = mr->rkey;
	uint64_t first = (uintptr_t)b->memory, second = first + 8 * PAGE;

	/* Refused calls change nothing. */
	const struct {
		int flags;
		struct ibv_pd *pd;
		void *addr;
		size_t length;
		int access;
	} refused[] = {
		{0, NULL, NULL, 0, 0},
		{8, NULL, NULL, 0, 0},
		{moved, NULL, NULL, PAGE, 0},
		{moved, NULL, b->memory, 0, 0},
		{moved, NULL, b->memory, PAGE, ALL_RIGHTS},
		{domain, NULL, NULL, 0, 0},
		{domain, a->pd, NULL, 0, 0}, /* domain of another context */
	};

	FOR_EACH (i, refused) {
		CHECK_EQUAL(rereg(mr, refused[i].flags, refused[i].pd, refused[i].addr,
				  refused[i].length, refused[i].access),
			    IBV_REREG_MR_ERR_INPUT);
		CHECK_EQUAL(errno, EINVAL);
	}
	CHECK_EQUAL(write_to(a, mr, first, 8), IBV_WC_SUCCESS);

	CHECK_OK(rereg(mr, moved, NULL, b->memory + 8 * PAGE, 2 * PAGE, 0));
	CHECK(mr->addr == b->memory + 8 * PAGE && mr->length == 2 * PAGE && mr->rkey == key);
	fill(a->memory, 2 * PAGE, 6);
	CHECK_EQUAL(write_to(a, mr, second, 2 * PAGE), IBV_WC_SUCCESS);
	CHECK(is_filled(b->memory + 8 * PAGE, 2 * PAGE, 6));
	expect_write_refused(a, b, mr, first, 8);

	CHECK_OK(rereg(mr, access, NULL, NULL, 0, IBV_ACCESS_REMOTE_READ));
	CHECK_EQUAL(access_to(a, IBV_WR_RDMA_READ, mr, second, 8), IBV_WC_SUCCESS);
	expect_write_refused(a, b, mr, second, 8);

	CHECK_OK(rereg(mr, domain | access, other, NULL, 0, ALL_RIGHTS));
	CHECK(mr->pd == other);
	CHECK_EQUAL(verbs->ibv_dealloc_pd(other), EBUSY);
	expect_write_refused(a, b, mr, second, 8);
	CHECK_OK(rereg(mr, domain | moved, b->pd, b->memory, PAGE, 0));
	CHECK_OK(verbs->ibv_dealloc_pd(other));
	CHECK_EQUAL(write_to(a, mr, first, 8), IBV_WC_SUCCESS);
	dereg(mr);

	/* If registering the new memory fails, the region becomes unusable. */
	uint8_t *memory = map_pages(2);

	CHECK_OK(munmap(memory + PAGE, PAGE));
	mr = verbs->ibv_reg_mr(b->pd, b->memory, PAGE, ALL_RIGHTS);
	CHECK_EQUAL(rereg(mr, moved, NULL, memory, 2 * PAGE, 0), IBV_REREG_MR_ERR_CMD);
	CHECK_EQUAL(errno, EFAULT);
	CHECK_EQUAL(rereg(mr, moved, NULL, memory, PAGE, 0), IBV_REREG_MR_ERR_INPUT);
	CHECK_EQUAL(write_to(a, mr, first, 8), IBV_WC_REM_ACCESS_ERR);
	dereg(mr); /* still required: ibv_rereg_mr(3) */
	connect_again(a, b);

	/* Make the region on-demand and zero-based. Changing it back fails because of the hole. */
	mr = verbs->ibv_reg_mr(b->pd, memory, PAGE, ALL_RIGHTS);
	CHECK_OK(rereg(mr, moved | access, NULL, memory, 2 * PAGE,
		       ALL_RIGHTS | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_ZERO_BASED));
	CHECK_EQUAL(write_to(a, mr, 8, 8), IBV_WC_SUCCESS);
	CHECK(is_filled(memory + 8, 8, 6));
	CHECK_EQUAL(write_to(a, mr, PAGE, 8), IBV_WC_REM_ACCESS_ERR);
	CHECK_EQUAL(rereg(mr, access, NULL, NULL, 0, ALL_RIGHTS), IBV_REREG_MR_ERR_CMD);
	CHECK_EQUAL(errno, EFAULT); /* because of the hole */
	dereg(mr);
	munmap(memory, PAGE);
}

/* ---- domains ------------------------------------------------------------------------------- */

static void parent_domain_is_interchangeable_with_its_domain(struct side *a, struct side *b)
{
	struct verbs_context *ex = extended(b->context);
	struct ibv_parent_domain_init_attr init = {.pd = b->pd};

	REFUSED(ex->alloc_td(b->context, &(struct ibv_td_init_attr){.comp_mask = 1}), EINVAL);
	struct ibv_td *td = ex->alloc_td(b->context, &(struct ibv_td_init_attr){0});

	CHECK(td && td->context == b->context);
	REFUSED(ex->alloc_parent_domain(b->context, &(struct ibv_parent_domain_init_attr){0}),
		EINVAL);
	REFUSED(ex->alloc_parent_domain(a->context, &init), EINVAL);
	init.comp_mask = 8;
	REFUSED(ex->alloc_parent_domain(b->context, &init), EOPNOTSUPP);
	init.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
	REFUSED(ex->alloc_parent_domain(b->context, &init), EINVAL); /* no allocator */
	init.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
	init.td = td;
	struct ibv_pd *parent = ex->alloc_parent_domain(b->context, &init);

	CHECK(parent && parent != b->pd && parent->context == b->context);
	REFUSED(ex->alloc_parent_domain(b->context,
					&(struct ibv_parent_domain_init_attr){.pd = parent}),
		EINVAL);
	CHECK_EQUAL(ex->dealloc_td(td), EBUSY);

	/* A queue pair of the protection domain can use a region of its parent domain ("completely
	 * interchangeable"). The reverse is tested below and in
	 * tests/verbs/test_special_regions.py. */
	struct ibv_mr *mr = verbs->ibv_reg_mr(parent, b->memory, PAGE, ALL_RIGHTS);

	CHECK(mr && mr->pd == parent);
	CHECK_EQUAL(write_to(a, mr, (uintptr_t)b->memory, 8), IBV_WC_SUCCESS);
	/* Create a CQ in the parent domain. */
	struct ibv_cq_init_attr_ex cq_init = {
		.cqe = 1, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = b->pd};

	REFUSED(ex->create_cq_ex(b->context, &cq_init), EINVAL); /* not a parent domain */
	cq_init.parent_domain = parent;
	struct ibv_cq_ex *cq = ex->create_cq_ex(b->context, &cq_init);

	CHECK(cq);
	dereg(mr);
	CHECK_EQUAL(verbs->ibv_dealloc_pd(parent), EBUSY);
	CHECK_OK(verbs->ibv_destroy_cq((struct ibv_cq *)cq));
	CHECK_OK(verbs->ibv_dealloc_pd(parent));
	CHECK_OK(ex->dealloc_td(td));
}

/* An application's allocator, with a record of its calls and the behaviour to simulate. */
struct allocator {
	struct ibv_pd *pd; /* its parent domain */
	unsigned asked, live, declined;
	uint64_t types; /* bit mask of the requested resource types */
	bool decline, fail;
};

static void *allocate(struct ibv_pd *pd, void *context, size_t size, size_t alignment,
		      uint64_t resource_type)
{
	struct allocator *allocator = context;
	union ibv_gid gid;
	void *memory;

	CHECK(pd == allocator->pd && size && alignment && resource_type < 64);
	CHECK_OK(verbs->ibv_query_gid(pd->context, 1, 0, &gid)); /* deadlocks if the lock is held */
	allocator->asked++;
	allocator->types |= 1u << resource_type;
	if (allocator->fail)
		return NULL;
	if (allocator->decline) {
		allocator->declined++;
		return (void *)-1;
	}
	CHECK_OK(posix_memalign(&memory, alignment, size));
	memset(memory, 0xee, size);
	allocator->live++;
	return memory;
}

static void release(struct ibv_pd *pd, void *context, void *memory, uint64_t resource_type)
{
	struct allocator *allocator = context;
	union ibv_gid gid;

	CHECK(pd == allocator->pd && allocator->types & 1u << resource_type);
	CHECK_OK(verbs->ibv_query_gid(pd->context, 1, 0, &gid));
	allocator->live--;
	free(memory);
}

/* Check that queue pairs, SRQs and CQs in a parent domain allocate their queues with its
 * allocator. */
static void parent_domain_allocator_provides_queues(struct side *a, struct side *b)
{
	struct verbs_context *ex = extended(b->context);
	struct allocator allocator = {0};
	struct ibv_parent_domain_init_attr init = {
		.pd = b->pd,
		.alloc = allocate,
		.free = release,
		.pd_context = &allocator,
		.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS |
			     IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
	};
	struct ibv_pd *base = b->pd, *parent = ex->alloc_parent_domain(b->context, &init);

	CHECK(parent);
	allocator.pd = parent;
	for (int decline = 0; decline < 2; decline++) {
		struct ibv_cq_init_attr_ex cq_init = {
			.cqe = 4,
			.wc_flags = all_times,
			.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD,
			.parent_domain = parent,
		};
		struct ibv_srq_init_attr srq_init = {.attr = {.max_wr = 4, .max_sge = 1}};
		struct ibv_srq_attr larger = {.max_wr = 100};

		CHECK_OK(verbs->ibv_destroy_qp(b->qp));
		CHECK_EQUAL(allocator.live, 0);
		allocator.decline = decline;
		allocator.types = 0;
		b->pd = parent;
		b->qp = create_qp(b);
		struct ibv_cq_ex *cq = ex->create_cq_ex(b->context, &cq_init);
		struct ibv_srq *srq = verbs->ibv_create_srq(parent, &srq_init);

		CHECK(cq && srq);
		CHECK_EQUAL(allocator.types, 1 << 1 | 1 << 2 | 1 << 3);
		CHECK(decline ? allocator.declined && !allocator.live
			      : allocator.live && allocator.live == allocator.asked);
		CHECK_OK(verbs->ibv_resize_cq((struct ibv_cq *)cq, 100));
		CHECK_OK(verbs->ibv_modify_srq(srq, &larger, IBV_SRQ_MAX_WR));
		CHECK_OK(to_state(a, IBV_QPS_RESET));
		connect_pair(a, b);
		CHECK_EQUAL(write_to(a, b->mr, (uintptr_t)b->memory, 8), IBV_WC_SUCCESS);
		CHECK_EQUAL(write_to(b, a->mr, (uintptr_t)a->memory, 8), IBV_WC_SUCCESS);
		CHECK_EQUAL(verbs->ibv_dealloc_pd(parent), EBUSY);
		CHECK_OK(verbs->ibv_destroy_srq(srq));
		CHECK_OK(verbs->ibv_destroy_cq((struct ibv_cq *)cq));
		CHECK(decline || allocator.live); /* the queue pair's queues */
	}
	destroy_qp(b);
	CHECK_EQUAL(allocator.live, 0);

	allocator.fail = true;
	struct ibv_qp_init_attr qp = {.send_cq = b->cq, .recv_cq = b->cq, .qp_type = IBV_QPT_UD};

	REFUSED(verbs->ibv_create_qp(parent, &qp), ENOMEM);
	CHECK_OK(verbs->ibv_dealloc_pd(parent));
	b->pd = base;
}

int main(void)
{
	limit_seconds(60);
	PAIR(on_demand_region_checks_pages_on_access);
	PAIR(own_region_populates_pages_on_first_access);
	PAIR(address_space_region_is_local_and_includes_later_maps);
	STEP(advise_mr_prefetches_and_validates_arguments());
	PAIR(null_region_reads_as_zeros_and_discards_writes, .memory = 1 << 20);
	PAIR(dmabuf_region_accesses_the_file_within_its_bounds);
	PAIR(device_memory_is_copied_and_accessed_by_offset);
	PAIR(rereg_mr_changes_translation_domain_and_access);
	PAIR(parent_domain_is_interchangeable_with_its_domain);
	PAIR(parent_domain_allocator_provides_queues);
	return 0;
}
