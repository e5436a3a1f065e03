/* Memory keys, which give the device and peers access to the application's memory.
 *
 * For each chunk that it moves, the device calls soft_sge_memory() or soft_remote_memory(), which
 * check the key. It finishes the access before it releases the engine's lock. Deregistering a
 * region or invalidating a window removes the key under the same lock. Afterwards, no access is in
 * progress and none can begin.
 *
 * All 32 bits of a key are random, so that peers cannot guess it.
 */

#include "objects.h"

enum { TAG_BITS = 8, INDEX_MASK = 0xffffff };

int soft_range_add(struct soft_range *range)
{
	soft_assert_locked();
	uint8_t tag;
	uint32_t index;

	if (soft_device.platform->random(&tag, sizeof(tag), 0) != sizeof(tag))
		return errno;
	int rc = soft_table_add(&soft_device.objects->ranges, range, INDEX_MASK, &index);

	if (!rc)
		range->key = index << TAG_BITS | tag;
	return rc;
}

void soft_range_remove(struct soft_range *range)
{
	soft_assert_locked();
	soft_table_remove(&soft_device.objects->ranges, range->key >> TAG_BITS);
}

struct soft_range *soft_range_find_by_index(uint32_t key)
{
	return soft_table_find(&soft_device.objects->ranges, key >> TAG_BITS);
}

struct soft_range *soft_range_find(uint32_t key)
{
	soft_assert_locked();
	struct soft_range *range = soft_range_find_by_index(key);

	return range && range->key == key ? range : NULL;
}

bool soft_range_contains(const struct soft_range *range, uint64_t address, uint64_t length)
{
	uint64_t offset = address - range->start; /* a huge value if address is below start */

	return offset <= range->length && length <= range->length - offset;
}

/* Check the domain, rights and bounds of an access (IBTA 10.6.3.1, 10.6.7.2.2). Returns NULL, or
 * the reason why it is not allowed. */
static const char *denial_reason(const struct soft_range *range, const struct ibv_pd *pd,
				 uint64_t address, uint64_t length, unsigned rights)
{
	if (!range)
		return "KEY";
	if (!pd || range->pd != soft_pd_root(pd))
		return "DOMAIN";
	if ((range->access & rights) != rights)
		return "RIGHT";
	return soft_range_contains(range, address, length) ? NULL : "RANGE";
}

/* Check that a window is bound and, if it is of type 2B, belongs to this queue pair
 * (IBTA 10.6.7.2.4). Returns NULL, or the reason why access is not allowed. */
static const char *window_denial_reason(const struct soft_range *range, const struct soft_qp *qp)
{
	if (!range || !range->is_window)
		return NULL;
	if (!range->bound)
		return "WINDOW_UNBOUND";
	return range->qp_num && range->qp_num != qp->ibv.qp_num ? "WINDOW_QP" : NULL;
}

static const char *local_denial_reason(const struct soft_range *range, const struct ibv_pd *pd,
				       uint64_t address, uint64_t length, unsigned rights)
{
	return range && range->is_window ? "WINDOW"
					 : denial_reason(range, pd, address, length, rights);
}

const struct soft_range *soft_local_range(uint32_t lkey, const struct ibv_pd *pd, uint64_t address,
					  uint64_t length, unsigned rights)
{
	const struct soft_range *range = soft_range_find(lkey);

	return local_denial_reason(range, pd, address, length, rights) ? NULL : range;
}

const char *soft_local_denial_reason(const struct ibv_pd *pd, const struct ibv_sge *sges,
				     uint32_t num_sge, unsigned rights, uint32_t *lkey)
{
	*lkey = 0;
	for (uint32_t i = 0; i < num_sge; i++) {
		const struct ibv_sge *sge = &sges[i];
		const char *denial = local_denial_reason(soft_range_find(sge->lkey), pd, sge->addr,
							 sge->length, rights);

		if (!sge->length)
			continue;
		*lkey = sge->lkey;
		if (denial)
			return denial;
	}
	return "PAGES"; /* all keys allow the access, so pages must be missing */
}

const struct soft_range *soft_remote_range(const struct soft_qp *qp, const struct ibv_pd *pd,
					   uint32_t rkey, uint64_t address, uint64_t length,
					   unsigned right)
{
	const struct soft_range *range = soft_range_find(rkey);

	return window_denial_reason(range, qp) || denial_reason(range, pd, address, length, right)
		       ? NULL
		       : range;
}

const char *soft_remote_denial_reason(const struct soft_qp *qp, const struct ibv_pd *pd,
				      uint32_t rkey, uint64_t address, uint64_t length,
				      unsigned right)
{
	const struct soft_range *range = soft_range_find(rkey);
	const char *denial = window_denial_reason(range, qp);

	if (!denial)
		denial = denial_reason(range, pd, address, length, right);
	return !denial && range->on_demand ? "PAGES" : denial;
}

static void *range_memory(const struct soft_range *range, uint64_t address, uint64_t length,
			  unsigned rights)
{
	const unsigned write_rights =
		IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
	uint8_t *memory;

	if (!range)
		return NULL;
	if (range->is_null) /* reads return zeros, and writes have no effect */
		return rights & write_rights ? soft_device.objects->sink
					     : soft_device.objects->zeros;
	memory = range->memory + (address - range->start);
	/* The pages may be missing. */
	return range->on_demand && soft_pages_fault(memory, length, rights & write_rights) ? NULL
											   : memory;
}

void *soft_sge_memory(const struct ibv_sge *sge, const struct ibv_pd *pd, uint32_t offset,
		      uint32_t length, unsigned rights)
{
	uint64_t address = sge->addr + offset;

	return range_memory(soft_local_range(sge->lkey, pd, address, length, rights), address,
			    length, rights);
}

bool soft_remote_key_allows(const struct soft_qp *qp, const struct ibv_pd *pd, uint32_t rkey,
			    unsigned right)
{
	const struct soft_range *range = soft_range_find(rkey);

	return range && soft_remote_range(qp, pd, rkey, range->start, 0, right);
}

void *soft_remote_memory(const struct soft_qp *qp, const struct ibv_pd *pd, uint32_t rkey,
			 uint64_t address, uint64_t length, unsigned right)
{
	return range_memory(soft_remote_range(qp, pd, rkey, address, length, right), address,
			    length, right);
}
