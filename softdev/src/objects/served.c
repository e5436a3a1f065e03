/* Counters of the bytes that peers have read and written, for aiordma_device_calls.count_served.
 *
 * The queue pair and the caller of `count_served` each hold a reference. The caller can therefore
 * read the counters from any thread, even while another thread destroys the queue pair.
 */
#include "objects.h"

struct soft_served {
	struct aiordma_served counts;
	unsigned references;
};

void soft_served_release(const struct aiordma_served *counts)
{
	struct soft_served *served = soft_container(counts, struct soft_served, counts);

	if (!__atomic_sub_fetch(&served->references, 1, __ATOMIC_ACQ_REL))
		free(served);
}

const struct aiordma_served *soft_qp_count_served(struct ibv_qp *ibv)
{
	struct soft_qp *qp = soft_qp_of(ibv);
	struct soft_served *served;

	soft_lock();
	if (qp->served)
		served = soft_container(qp->served, struct soft_served, counts);
	else
		served = calloc(1, sizeof(*served));
	if (served) {
		/* one reference for the caller, and at the first call another for the queue pair */
		__atomic_add_fetch(&served->references, qp->served ? 1 : 2, __ATOMIC_RELAXED);
		qp->served = &served->counts;
	}
	soft_unlock();
	return served ? &served->counts : NULL;
}

void soft_exclude_from_served(uint32_t rkey)
{
	struct soft_range *range;

	soft_lock();
	range = soft_range_find(rkey);
	if (range)
		range->excluded_from_served = true;
	soft_unlock();
}

bool soft_counts_reads_of(const struct soft_qp *qp, uint32_t rkey)
{
	soft_assert_locked();
	const struct soft_range *range = qp->served ? soft_range_find(rkey) : NULL;

	return range && !range->excluded_from_served;
}

/* Add to a counter. Writers hold the lock but readers do not, so the store is atomic. */
static void add_bytes(uint64_t *count, uint64_t bytes)
{
	__atomic_store_n(count, *count + bytes, __ATOMIC_RELAXED);
}

void soft_count_read(struct soft_qp *qp, uint64_t bytes)
{
	soft_assert_locked();
	if (qp->served)
		add_bytes(&qp->served->bytes_read, bytes);
}

void soft_count_written(struct soft_qp *qp, uint64_t bytes)
{
	soft_assert_locked();
	if (qp->served)
		add_bytes(&qp->served->bytes_written, bytes);
}
