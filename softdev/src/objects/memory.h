/* Memory with keys: regions and windows. */
#pragma once

#include "device.h"

/* ---- keys.c: what opens memory ------------------------------------------------------------- */

/* Memory that a key gives access to: a registered region, or the part of a region to which a window
 * is bound. The upper 24 bits of a key identify the range. The lower 8 bits are part of the secret
 * and change with every bind of a window. */
struct soft_range {
	uint32_t key;
	bool window; /* the key is valid for remote access only */
	bool bound; /* for a window: whether it is bound */
	bool on_demand; /* pages are requested when they are needed */
	bool not_served; /* see aiordma_device_calls.exclude_from_served */
	bool null; /* a null region, which reads as zeros and discards writes */
	unsigned access; /* enum ibv_access_flags, SOFT_ACCESS_CMA */
	uint32_t qp_num; /* the only queue pair that may use a type 2B window; otherwise 0 */
	const struct ibv_pd *pd;
	uint8_t *memory;
	uint64_t start; /* the address of `memory` in work requests */
	uint64_t length;
};

/* The rights that every region can have. */
#define SOFT_RIGHTS                                                                                \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |               \
	 IBV_ACCESS_REMOTE_ATOMIC)

/* An additional right: the memory is ordinary memory that another process can copy from. */
#define SOFT_ACCESS_CMA (1u << 31)

/* Add a range with a random key. Returns 0 or an errno value. */
int soft_range_add(struct soft_range *range);
void soft_range_remove(struct soft_range *range);
/* Find a range by the upper 24 bits of the key, which may be the next key of a window. Returns NULL
 * if there is none. */
struct soft_range *soft_range_at(uint32_t key);
/* Find a range by its whole key. Returns NULL if there is none. */
struct soft_range *soft_range_find(uint32_t key);
/* Returns whether `length` bytes at `address` are inside the range. Safe for all values. */
bool soft_range_holds(const struct soft_range *range, uint64_t address, uint64_t length);

/* Find the range that allows access to `length` bytes at `address`. Returns NULL if the key does
 * not exist, belongs to another PD, lacks one of the rights, or does not cover the bytes. */
const struct soft_range *soft_local_range(uint32_t lkey, const struct ibv_pd *pd, uint64_t address,
					  uint64_t length, unsigned rights);
/* Returns the trace's reason why the device may not access the memory of the SGEs, and stores the
 * first key for which this is so. Returns NULL if it may. */
const char *soft_local_objection(const struct ibv_pd *pd, const struct ibv_sge *sges,
				 uint32_t num_sge, unsigned rights, uint32_t *lkey);
/* Find the range for a request of the queue pair's peer. `pd` comes from soft_remote_pd(). */
const struct soft_range *soft_remote_range(const struct soft_qp *qp, const struct ibv_pd *pd,
					   uint32_t rkey, uint64_t address, uint64_t length,
					   unsigned right);
/* Returns the trace's reason why the peer may not access the memory (docs/trace.md), or NULL if it
 * may. */
const char *soft_remote_objection(const struct soft_qp *qp, const struct ibv_pd *pd, uint32_t rkey,
				  uint64_t address, uint64_t length, unsigned right);
/* Returns whether the key is valid for all of its range. */
bool soft_remote_key(const struct soft_qp *qp, const struct ibv_pd *pd, uint32_t rkey,
		     unsigned right);
enum { SOFT_PLACE_MAX = 256 * 1024 };

/* Return a pointer to `length` bytes, at most SOFT_PLACE_MAX, or NULL if access is not allowed or
 * on-demand pages are missing. The pointer is valid until the lock is released. For an SGE, only
 * the part from `offset` is checked. */
void *soft_sge_memory(const struct ibv_sge *sge, const struct ibv_pd *pd, uint32_t offset,
		      uint32_t length, unsigned rights);
void *soft_remote_memory(const struct soft_qp *qp, const struct ibv_pd *pd, uint32_t rkey,
			 uint64_t address, uint64_t length, unsigned right);

/* ---- pages.c ------------------------------------------------------------------------------- */

/* Bring pages into memory with the given right. Returns 0, EFAULT if they do not exist, or another
 * errno value. Always returns 0 if the kernel does not offer this. */
int soft_pages_fault(const void *memory, size_t length, bool writable);
bool soft_pages_can_fault(void);

/* ---- mr.c ---------------------------------------------------------------------------------- */

struct soft_mr {
	struct ibv_mr ibv;
	struct soft_range range;
	unsigned windows; /* number of windows bound to it */
	bool fixed; /* not based on an address of the application, so rereg_mr is not possible */
	bool closed; /* rereg_mr has failed, or the region is imported; the keys give no access */
	bool imported;
	struct soft_dm *dm;
	void *mapping; /* our mapping of a dma-buf */
	size_t mapped;
};

/* Returns the region that an imported region refers to, or NULL if it has been deregistered
 * (import.c). */
struct soft_mr *soft_mr_original(const struct soft_mr *mr);
/* Register a copy of `mr` with new keys. Returns the region that the application sees, or NULL and
 * sets errno. */
struct ibv_mr *soft_mr_register(struct ibv_pd *pd, const struct soft_mr *mr);
/* Implements `reg_own_mr` of the device's table, and `reg_local_dma` with NULL, SIZE_MAX and no
 * rights for peers. */
struct ibv_mr *soft_reg_own_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
/* Check a combination of access flags and remove the optional ones. Returns 0 or an errno value. */
int soft_mr_access(unsigned *access, unsigned allowed);

/* ---- mw.c: memory windows ------------------------------------------------------------------ */

struct soft_send_wqe;

/* A bind in the send queue. It contains keys instead of pointers, because region and window may be
 * gone when it is executed. */
struct soft_bind {
	uint32_t window;
	uint32_t region;
	uint64_t address;
	uint64_t length;
	unsigned access;
};

struct ibv_mw *soft_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int soft_dealloc_mw(struct ibv_mw *mw);
int soft_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
/* Convert an IBV_WR_BIND_MW to a slot of the send queue. Returns false if it is invalid. */
bool soft_bind_prepare(struct soft_send_wqe *send, const struct ibv_send_wr *wr);
/* Execute a bind. Returns false if it is not allowed. */
bool soft_bind(const struct soft_qp *qp, const struct soft_send_wqe *send);
/* Unbind the type 2 window with this key. Returns NULL, or the reason if the queue pair has no such
 * window, as in soft_remote_objection(). */
const char *soft_invalidate(const struct soft_qp *qp, uint32_t rkey);
