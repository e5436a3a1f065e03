/* Memory regions and windows, and their keys. */
#pragma once

#include "device.h"

/* ---- keys.c: memory keys ------------------------------------------------------------------- */

/* A range of memory that a key gives access to: a registered region, or the part of a region that a
 * window is bound to. The upper 24 bits of the key identify the range. The lower 8 bits are random
 * at first, and binding a window can change them. */
struct soft_range {
	uint32_t key;
	bool is_window; /* whether this is a window, whose key only peers can use */
	bool bound; /* whether the window is bound */
	bool on_demand; /* pages are faulted in on access */
	bool excluded_from_served; /* see aiordma_device_calls.exclude_from_served */
	bool is_null; /* a null region, which reads as zeros and discards writes */
	unsigned access; /* enum ibv_access_flags, SOFT_ACCESS_PROCESS_VM */
	uint32_t qp_num; /* the only queue pair that may use a type 2B window; otherwise 0 */
	const struct ibv_pd *pd;
	uint8_t *memory;
	uint64_t start; /* address of `memory` as used in work requests */
	uint64_t length;
};

/* Access rights that all kinds of regions support. */
#define SOFT_COMMON_RIGHTS                                                                         \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |               \
	 IBV_ACCESS_REMOTE_ATOMIC)

/* Additional access flag for memory that another process can copy with process_vm_readv(2). */
#define SOFT_ACCESS_PROCESS_VM (1u << 31)

/* Add a range with a random key. Returns 0 or an errno value. */
int soft_range_add(struct soft_range *range);
void soft_range_remove(struct soft_range *range);
/* Find a range by the upper 24 bits of its key, which stay the same when a window is bound. Returns
 * NULL if no range matches. */
struct soft_range *soft_range_find_by_index(uint32_t key);
/* Find a range by its full key. Returns NULL if no range has the key. */
struct soft_range *soft_range_find(uint32_t key);
/* Returns whether the range contains `length` bytes at `address`. Handles arithmetic overflow. */
bool soft_range_contains(const struct soft_range *range, uint64_t address, uint64_t length);

/* Find the range that allows local access to `length` bytes at `address`. Returns NULL if the key
 * does not exist, is the key of a window, belongs to another PD, or lacks one of the rights, or if
 * the range does not contain all bytes. */
const struct soft_range *soft_local_range(uint32_t lkey, const struct ibv_pd *pd, uint64_t address,
					  uint64_t length, unsigned rights);
/* Returns the trace's reason for a failed access to the SGEs (docs/trace.md). Stores the first key
 * that does not allow the access. If all keys allow it, returns "PAGES" and stores the key of the
 * last nonempty SGE. */
const char *soft_local_denial_reason(const struct ibv_pd *pd, const struct ibv_sge *sges,
				     uint32_t num_sge, unsigned rights, uint32_t *lkey);
/* Find the range that the queue pair's peer may access with `rkey`. `pd` comes from
 * soft_remote_pd(). Returns NULL if the access is not allowed. */
const struct soft_range *soft_remote_range(const struct soft_qp *qp, const struct ibv_pd *pd,
					   uint32_t rkey, uint64_t address, uint64_t length,
					   unsigned right);
/* Returns the trace's reason for a failed access by the peer (docs/trace.md). Returns NULL if the
 * key allows the access and the range is not on demand. */
const char *soft_remote_denial_reason(const struct soft_qp *qp, const struct ibv_pd *pd,
				      uint32_t rkey, uint64_t address, uint64_t length,
				      unsigned right);
/* Returns whether the key gives the peer this right. Does not check any addresses. */
bool soft_remote_key_allows(const struct soft_qp *qp, const struct ibv_pd *pd, uint32_t rkey,
			    unsigned right);
enum { SOFT_PLACE_MAX = 256 * 1024 };

/* Returns a pointer to `length` bytes of an SGE, starting at `offset`. Only these bytes are
 * checked. `length` is at most SOFT_PLACE_MAX. Returns NULL if access is not allowed or on-demand
 * pages are missing. The pointer is valid until the lock is released. */
void *soft_sge_memory(const struct ibv_sge *sge, const struct ibv_pd *pd, uint32_t offset,
		      uint32_t length, unsigned rights);
/* Returns a pointer to `length` bytes at the peer's `address`. `length` is at most SOFT_PLACE_MAX.
 * Returns NULL if access is not allowed or on-demand pages are missing. The pointer is valid until
 * the lock is released. */
void *soft_remote_memory(const struct soft_qp *qp, const struct ibv_pd *pd, uint32_t rkey,
			 uint64_t address, uint64_t length, unsigned right);

/* ---- pages.c ------------------------------------------------------------------------------- */

/* Fault in pages for reading, or for writing if `writable`. Returns 0, EFAULT if pages do not exist
 * or do not allow the access, or another errno value. Before Linux 5.14, the pages cannot be
 * checked, and 0 is returned. */
int soft_pages_fault(const void *memory, size_t length, bool writable);
bool soft_pages_can_fault(void);

/* ---- mr.c ---------------------------------------------------------------------------------- */

struct soft_mr {
	struct ibv_mr ibv;
	struct soft_range range;
	unsigned windows; /* number of bound windows */
	bool cannot_rereg; /* true for null, dma-buf and device memory */
	bool closed; /* true for imports, and after the key has been removed */
	bool imported;
	struct soft_dm *dm;
	void *mapping; /* mapping of a dma-buf or file, or NULL */
	size_t mapping_size;
};

/* Returns the original of an imported region, or NULL if the original has been deregistered
 * (import.c). */
struct soft_mr *soft_mr_original(const struct soft_mr *mr);
/* Register a copy of `mr` with new keys. Returns the new region, or NULL with errno set. */
struct ibv_mr *soft_mr_register(struct ibv_pd *pd, const struct soft_mr *mr);
/* Register memory that the caller knows to have no holes (`reg_own_mr` in the device's table). With
 * NULL and SIZE_MAX, registers all memory without rights for peers (`reg_local_dma`). */
struct ibv_mr *soft_reg_own_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
/* Clear the optional access flags, which this device ignores, and check the others against
 * `allowed`. Returns 0 or an errno value. */
int soft_mr_access(unsigned *access, unsigned allowed);

/* ---- mw.c: memory windows ------------------------------------------------------------------ */

struct soft_send_wqe;

/* A bind request in the send queue. It stores keys instead of pointers, because the region and the
 * window may be destroyed before it is executed. */
struct soft_bind {
	uint32_t window_key;
	uint32_t region_key;
	uint64_t address;
	uint64_t length;
	unsigned access;
};

struct ibv_mw *soft_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int soft_dealloc_mw(struct ibv_mw *mw);
int soft_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
/* Fill in a send queue slot for an IBV_WR_BIND_MW. Returns false if the request is invalid. */
bool soft_bind_prepare(struct soft_send_wqe *send, const struct ibv_send_wr *wr);
/* Execute a bind request. Returns false if the bind is not allowed. */
bool soft_bind_execute(const struct soft_qp *qp, const struct soft_send_wqe *send);
/* Unbind the queue pair's type 2 window with this key. Returns NULL on success, or the trace's
 * reason for refusing (docs/trace.md). */
const char *soft_invalidate(const struct soft_qp *qp, uint32_t rkey);
