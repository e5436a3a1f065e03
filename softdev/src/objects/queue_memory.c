/* Allocates memory for the device's queues from a parent domain's allocator
 * (ibv_alloc_parent_domain(3)) or from the C library.
 *
 * The allocator may decline a block (IBV_ALLOCATOR_USE_DEFAULT), so each block begins with a header
 * that records how to free it.
 */

#include "objects.h"

/* Align allocator blocks to a cache line. */
enum { ALIGNMENT = 64 };

struct block {
	struct soft_pd *pd; /* NULL for the C library */
	uint64_t resource_type;
};

/* IBV_ALLOCATOR_USE_DEFAULT */
static void *const use_default_allocator = (void *)-1;

static void count_block(struct soft_pd *pd, int change)
{
	soft_lock();
	pd->users += (unsigned)change;
	soft_unlock();
}

void *soft_queue_alloc(struct ibv_pd *domain, size_t count, size_t size,
		       enum soft_resource resource)
{
	struct soft_pd *pd = domain ? soft_pd_of(domain) : NULL;
	size_t length = sizeof(struct block) + count * size;
	struct block *block = use_default_allocator;

	if (pd && pd->alloc)
		block = pd->alloc(domain, pd->pd_context, length, ALIGNMENT, resource);
	if (block == use_default_allocator) {
		/* Allocate one more byte, so that an empty queue also points into its block. Leak
		 * sanitizers look for such pointers. */
		block = calloc(1, length + 1);
		return block ? block + 1 : NULL;
	}
	if (!block)
		return NULL;
	/* The allocator should have zeroed the block, but the device must not trust its
	 * contents. */
	memset(block, 0, length);
	*block = (struct block){.pd = pd, .resource_type = resource};
	count_block(pd, 1);
	return block + 1;
}

void soft_queue_free(void *memory)
{
	if (!memory)
		return;
	struct block *block = (struct block *)memory - 1;
	struct soft_pd *pd = block->pd;

	if (!pd) {
		free(block);
		return;
	}
	pd->free(&pd->ibv, pd->pd_context, block, block->resource_type);
	count_block(pd, -1);
}
