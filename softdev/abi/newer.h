/* Declarations that were added to libibverbs in rdma-core 45 or later. `make abi` does not read
 * this file, because the distribution's headers may be too old to compare with. New constants of
 * existing enums are in verbs.h. This file must not contain preprocessor directives, because cffi
 * reads it. */

/* The guarantee for data that an RDMA FLUSH has flushed (ibv_wr_post(3)): globally visible, or
 * persistent. */
enum ibv_placement_type { IBV_FLUSH_GLOBAL = 1 << 0, IBV_FLUSH_PERSISTENT = 1 << 1 };

/* The memory that an RDMA FLUSH covers: an address range, or the whole memory region. */
enum ibv_selectivity_level { IBV_FLUSH_RANGE, IBV_FLUSH_MR };

/* struct ibv_qp_ex, followed by the members that newer versions of libibverbs append. */
struct ibv_qp_ex_newer {
	struct ibv_qp_ex before;
	void (*wr_flush)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, size_t len,
			 uint8_t type, uint8_t level);
};
