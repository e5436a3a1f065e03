/* Memory that keys open: regions and windows. */
#pragma once

#include "device.h"

/* ---- keys.c: what opens memory ------------------------------------------------------------- */

/* Memory that a key opens: a registered region, or the part of one that a window is bound to.  The
 * upper 24 bits of a key say which one it is; the lower eight are part of the secret, and change
 * with every bind of a window. */
struct soft_range {
	uint32_t key;
	bool window; /* its key is good for remote access only */
	bool bound; /* window: it opens anything at all */
	bool on_demand; /* pages are asked for when they are needed */
	bool not_served; /* aiordma_device_calls.exclude_from_served */
	bool null; /* no memory: zeros to read, and nothing kept of what is written */
	unsigned access; /* enum ibv_access_flags, SOFT_ACCESS_CMA */
	uint32_t qp_num; /* window of type 2B: of the only queue pair it is for; else 0 */
	const struct ibv_pd *pd;
	uint8_t *memory;
	uint64_t start; /* the address that stands for `memory` in work requests */
	uint64_t length;
};

/* Those that every region can give. */
#define SOFT_RIGHTS                                                                                \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |               \
	 IBV_ACCESS_REMOTE_ATOMIC)

/* A right beside those of enum ibv_access_flags: it is memory like any other, of which another
 * process can copy. */
#define SOFT_ACCESS_CMA (1u << 31)

/* Give it a random key; 0 or an errno value. */
int soft_range_add(struct soft_range *range);
void soft_range_remove(struct soft_range *range);
/* By the upper 24 bits, or NULL: the window whose next key this might be. */
struct soft_range *soft_range_at(uint32_t key);
/* By the whole key, or NULL. */
struct soft_range *soft_range_find(uint32_t key);
/* Are `length` bytes at `address` inside?  Without an overflow, whatever the numbers. */
bool soft_range_holds(const struct soft_range *range, uint64_t address, uint64_t length);

/* Where `length` bytes at `address` may be used; NULL if the key does not exist, belongs to another PD,
 * lacks one of the rights, or does not reach that far. */
const struct soft_range *soft_local_range(uint32_t lkey, const struct ibv_pd *pd, uint64_t address,
					  uint64_t length, unsigned rights);
/* Why the device may not reach what the SGEs name, and the key of the first of them for which that is so. */
const char *soft_local_objection(const struct ibv_pd *pd, const struct ibv_sge *sges,
				 uint32_t num_sge, unsigned rights, uint32_t *lkey);
/* The same for a request of the queue pair's peer; `pd` is of soft_remote_pd. */
const struct soft_range *soft_remote_range(const struct soft_qp *qp, const struct ibv_pd *pd,
					   uint32_t rkey, uint64_t address, uint64_t length,
					   unsigned right);
/* Why not, as a trace names it (docs/trace.md); NULL if they may. */
const char *soft_remote_objection(const struct soft_qp *qp, const struct ibv_pd *pd, uint32_t rkey,
				  uint64_t address, uint64_t length, unsigned right);
/* Whether there is one, for all that the key opens. */
bool soft_remote_key(const struct soft_qp *qp, const struct ibv_pd *pd, uint32_t rkey,
		     unsigned right);
enum { SOFT_PLACE_MAX = 256 * 1024 };

/* Where they are, or NULL if that is not allowed (or on demand and not there); at most
 * SOFT_PLACE_MAX.  Valid until the lock is given back.  Of an SGE it is the part at `offset`:
 * the rest, to which no message has come, is not checked. */
void *soft_sge_memory(const struct ibv_sge *sge, const struct ibv_pd *pd, uint32_t offset,
		      uint32_t length, unsigned rights);
void *soft_remote_memory(const struct soft_qp *qp, const struct ibv_pd *pd, uint32_t rkey,
			 uint64_t address, uint64_t length, unsigned right);

/* ---- pages.c ------------------------------------------------------------------------------- */

/* Bring the pages into memory, with that right; 0, or an errno value: EFAULT when there are none.
 * Where the kernel cannot do that for us it is 0. */
int soft_pages_fault(const void *memory, size_t length, bool writable);
bool soft_pages_can_fault(void);

/* ---- mr.c ---------------------------------------------------------------------------------- */

struct soft_mr {
	struct ibv_mr ibv;
	struct soft_range range;
	unsigned windows; /* bound to it */
	bool fixed; /* there is no address of the application behind it: not for rereg_mr */
	bool closed; /* rereg_mr has failed, or it is imported: its keys open nothing by it */
	bool imported;
	struct soft_dm *dm;
	void *mapping; /* ours, of a dma-buf */
	size_t mapped;
};

/* import.c: what an imported region refers to, if that is still registered; else NULL. */
struct soft_mr *soft_mr_original(const struct soft_mr *mr);
/* Copy it, give it keys; the region that the application knows, or NULL and errno. */
struct ibv_mr *soft_mr_register(struct ibv_pd *pd, const struct soft_mr *mr);
/* `reg_own_mr` of the device's table; NULL and SIZE_MAX, without rights for peers, are
 * `reg_local_dma`. */
struct ibv_mr *soft_reg_own_mr(struct ibv_pd *pd, void *addr, size_t length, int access);
/* Checks that the flags can go together: 0 or an errno value; takes the optional ones out. */
int soft_mr_access(unsigned *access, unsigned allowed);

/* ---- mw.c: memory windows ------------------------------------------------------------------ */

struct soft_send_wqe;

/* A bind as it waits in the send queue.  Keys and not pointers: region and window may be gone when
 * its turn comes. */
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
/* An IBV_WR_BIND_MW becomes a slot of the send queue, if it can be. */
bool soft_bind_prepare(struct soft_send_wqe *send, const struct ibv_send_wr *wr);
/* Carry it out; false if that may not be. */
bool soft_bind(const struct soft_qp *qp, const struct soft_send_wqe *send);
/* The window of type 2 that has this key opens nothing any more: NULL.  Or the queue pair has no such
 * window, and why: as soft_remote_objection. */
const char *soft_invalidate(const struct soft_qp *qp, uint32_t rkey);
