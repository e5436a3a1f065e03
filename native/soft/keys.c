/* Keys: what opens the application's memory to the device, and to peers.
 *
 * Every access of the device to an application's memory, for every chunk that it moves, comes
 * through soft_memory() or soft_remote_memory(), under the engine's lock.  Deregistering a region
 * and invalidating a window take the key out under the same lock: when that is done, nothing is
 * under way and nothing can begin.
 *
 * Keys are random, all 32 bits of them: a peer that has not been told one does not find it.
 */
#include <errno.h>
#include <sys/random.h>

#include "objects.h"

enum { TAG_BITS = 8, INDEX_MASK = 0xffffff };

static struct soft_table ranges; /* by the upper 24 bits of their keys */

int soft_range_add(struct soft_range *range)
{
	uint8_t tag;
	uint32_t index;

	if (getrandom(&tag, sizeof(tag), 0) != sizeof(tag))
		return errno;
	int rc = soft_table_add(&ranges, range, INDEX_MASK, &index);

	if (!rc)
		range->key = index << TAG_BITS | tag;
	return rc;
}

void soft_range_remove(struct soft_range *range)
{
	soft_table_remove(&ranges, range->key >> TAG_BITS);
}

struct soft_range *soft_range_at(uint32_t key)
{
	return soft_table_find(&ranges, key >> TAG_BITS);
}

struct soft_range *soft_range_find(uint32_t key)
{
	struct soft_range *range = soft_range_at(key);

	return range && range->key == key ? range : NULL;
}

bool soft_range_holds(const struct soft_range *range, uint64_t address, uint64_t length)
{
	uint64_t offset = address - range->start; /* huge when address is below */

	return offset <= range->length && length <= range->length - offset;
}

/* IBTA 10.6.3.1, 10.6.7.2.2: the key's domain, rights and bounds. */
static void *open_range(const struct soft_range *range, const struct ibv_pd *pd, uint64_t address,
			uint64_t length, unsigned rights)
{
	if (!range || range->pd != pd || (range->access & rights) != rights ||
	    !soft_range_holds(range, address, length))
		return NULL;
	return range->memory + (address - range->start);
}

void *soft_memory(uint32_t lkey, const struct ibv_pd *pd, uint64_t address, uint64_t length,
		  unsigned rights)
{
	const struct soft_range *range = soft_range_find(lkey);

	return range && range->window ? NULL : open_range(range, pd, address, length, rights);
}

void *soft_remote_memory(const struct soft_qp *qp, uint32_t rkey, uint64_t address, uint64_t length,
			 unsigned right)
{
	const struct soft_range *range = soft_range_find(rkey);

	/* IBTA 10.6.7.2.4: a window of type 2B is for one queue pair alone. */
	if (range && range->window &&
	    (!range->bound || (range->qp_num && range->qp_num != qp->ibv.qp_num)))
		return NULL;
	return open_range(range, qp->ibv.pd, address, length, right);
}
