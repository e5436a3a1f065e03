/* Test objects imported into another context: ibv_import_device(3), ibv_import_pd(3),
 * ibv_import_mr(3), ibv_import_dm(3). */
#define _GNU_SOURCE /* memfd_create */
#include "extended_side.h"
#include "leaks.h"

#include <fcntl.h>
#include <sys/mman.h>

static struct ibv_context *import_device(const struct ibv_context *of)
{
	int fd = dup(of->cmd_fd);

	CHECK(of->cmd_fd >= 0 && fd >= 0);
	struct ibv_context *context = verbs->ibv_import_device(fd);

	CHECK(context && context != of && context->cmd_fd == fd);
	return context;
}

static enum ibv_wc_status write_to(struct side *side, const struct ibv_mr *mr, const void *remote)
{
	POST(side, IBV_WR_RDMA_WRITE, .wr_id = 1, .length = 8, .remote = (uintptr_t)remote,
	     .rkey = mr->rkey);
	return next_wc(side).status;
}

/* Check that a queue pair in the imported domain gives its peer access to memory that was
 * registered in the original domain. */
static void imported_domain_and_region_act_like_the_originals(struct side *a, struct side *b)
{
	struct ibv_context *context = import_device(b->context), *stranger = open_device();
	struct ibv_pd *pd = verbs->ibv_import_pd(context, b->pd->handle), *own = b->pd;

	CHECK(pd && pd != b->pd && pd->context == context);
	REFUSED(verbs->ibv_import_pd(stranger, b->pd->handle), EINVAL);
	REFUSED(verbs->ibv_import_pd(context, a->pd->handle), EINVAL);
	REFUSED(verbs->ibv_import_pd(context, UINT32_MAX), EINVAL);
	struct ibv_mr *mr = verbs->ibv_import_mr(pd, b->mr->handle);

	CHECK(mr && !mr->addr && mr->pd == pd && mr->context == context);
	CHECK(mr->length == b->mr->length && mr->lkey == b->mr->lkey && mr->rkey == b->mr->rkey);
	REFUSED(verbs->ibv_import_mr(pd, a->mr->handle), EINVAL); /* region of another domain */
	REFUSED(verbs->ibv_import_mr(pd, 0), EINVAL);
	CHECK_EQUAL(verbs->ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0),
		    IBV_REREG_MR_ERR_INPUT);

	struct ibv_cq *cq = verbs->ibv_create_cq(context, 8, NULL, NULL, 0), *own_cq = b->cq;

	CHECK(cq);
	CHECK_OK(verbs->ibv_destroy_qp(b->qp));
	b->pd = pd;
	b->cq = cq;
	b->qp = create_qp(b);
	CHECK_OK(to_state(a, IBV_QPS_RESET));
	connect_pair(a, b);
	CHECK_EQUAL(write_to(a, mr, b->memory), IBV_WC_SUCCESS);
	CHECK_EQUAL(write_to(b, a->mr, a->memory), IBV_WC_SUCCESS); /* local access works, too */

	/* A window bound to the original region also prevents deregistration through an import. */
	struct ibv_mr *bound =
		verbs->ibv_reg_mr(own, b->memory, 64, ALL_RIGHTS | IBV_ACCESS_MW_BIND);
	struct ibv_mr *import_of_it = bound ? verbs->ibv_import_mr(pd, bound->handle) : NULL;
	struct ibv_mw *mw = b->context->ops.alloc_mw(own, IBV_MW_TYPE_1);
	struct ibv_mw_bind bind = {
		.wr_id = 1,
		.send_flags = IBV_SEND_SIGNALED,
		.bind_info = {bound, (uintptr_t)b->memory, 64, IBV_ACCESS_REMOTE_READ},
	};

	CHECK(mw && import_of_it);
	CHECK_OK(b->context->ops.bind_mw(b->qp, mw, &bind));
	expect_done(b, 1);
	CHECK_EQUAL(verbs->ibv_dereg_mr(import_of_it), EBUSY);
	CHECK_OK(b->context->ops.dealloc_mw(mw));
	verbs->ibv_unimport_mr(import_of_it);
	dereg(bound);

	/* Deregistering one import ends access through every handle of the region. The other
	 * handles still have to be released with ibv_unimport_mr(). */
	struct ibv_mr *other = verbs->ibv_import_mr(pd, b->mr->handle);

	CHECK(other);
	dereg(mr);
	CHECK_EQUAL(write_to(a, b->mr, b->memory), IBV_WC_REM_ACCESS_ERR);
	REFUSED(verbs->ibv_import_mr(pd, b->mr->handle), EINVAL);
	verbs->ibv_unimport_mr(other);
	verbs->ibv_unimport_mr(b->mr);
	b->mr = NULL;

	/* A queue pair that was created in an import keeps the original domain busy, even after the
	 * import has been released. */
	struct ibv_pd *unused = verbs->ibv_import_pd(context, own->handle);

	CHECK(unused);
	verbs->ibv_unimport_pd(unused);
	verbs->ibv_unimport_pd(pd);
	CHECK_EQUAL(verbs->ibv_dealloc_pd(own), EBUSY);
	destroy_qp(b);
	CHECK_OK(verbs->ibv_destroy_cq(cq));
	b->cq = own_cq;
	b->pd = own;
	CHECK_OK(verbs->ibv_close_device(context));
	CHECK_OK(verbs->ibv_close_device(stranger));
}

static void imported_device_memory_shares_its_contents(void)
{
	struct ibv_context *context = open_device(), *stranger = open_device();
	struct ibv_context *imported = import_device(context);
	struct ibv_dm *dm =
		extended(context)->alloc_dm(context, &(struct ibv_alloc_dm_attr){.length = 64});
	uint64_t word = 5, seen = 0;

	CHECK(dm);
	REFUSED(verbs->ibv_import_dm(stranger, dm->handle), EINVAL);
	REFUSED(verbs->ibv_import_dm(imported, dm->handle + 1), EINVAL);
	struct ibv_dm *view = verbs->ibv_import_dm(imported, dm->handle);

	CHECK(view && view != dm && view->context == imported);
	CHECK_OK(dm->memcpy_to_dm(dm, 8, &word, 8));
	CHECK_OK(view->memcpy_from_dm(&seen, view, 8, 8));
	CHECK_EQUAL(seen, 5);
	CHECK_EQUAL(view->memcpy_from_dm(&seen, view, 64, 8), EFAULT);
	CHECK_EQUAL(extended(context)->free_dm(dm), EBUSY);
	verbs->ibv_unimport_dm(view);
	CHECK_OK(extended(context)->free_dm(dm));
	CHECK_OK(verbs->ibv_close_device(imported));
	CHECK_OK(verbs->ibv_close_device(context));
	CHECK_OK(verbs->ibv_close_device(stranger));
}

/* Check that ibv_import_device rejects a descriptor that does not belong to an open context of this
 * process, and leaves the descriptor open. */
static void import_device_rejects_unrelated_descriptors(void)
{
	struct ibv_context *context = open_device();
	int files[2] = {memfd_create("embedded0", 0), open("/dev/null", O_RDONLY)};

	for (int i = 0; i < 2; i++) {
		CHECK(files[i] >= 0);
		REFUSED(verbs->ibv_import_device(files[i]), EOPNOTSUPP);
		CHECK_OK(close(files[i]));
	}
	REFUSED(verbs->ibv_import_device(-1), EBADF);
	int late = dup(context->cmd_fd);

	CHECK(late >= 0);
	CHECK_OK(verbs->ibv_close_device(context));
	REFUSED(verbs->ibv_import_device(late), EOPNOTSUPP);
	CHECK_OK(close(late));
}

int main(void)
{
	limit_seconds(60);
	/* A sanitizer starts a thread of its own when the program creates its first thread. Open a
	 * device before counting, so that the count includes the sanitizer's thread. */
	CHECK_OK(verbs->ibv_close_device(open_device()));
	int before = count_resources();

	PAIR(imported_domain_and_region_act_like_the_originals);
	STEP(imported_device_memory_shares_its_contents());
	STEP(import_device_rejects_unrelated_descriptors());
	expect_resources(before);
	return 0;
}
