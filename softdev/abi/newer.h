/* What libibverbs has had since rdma-core 45 and later, beside the constants in verbs.h.  `make abi`
 * compares no more than the distribution's headers declare, so this file is none of those that it
 * reads.  No preprocessor here: cffi reads it too. */

/* RDMA FLUSH (ibv_wr_post(3)): where the data is when it completes, and of which memory. */
enum ibv_placement_type { IBV_FLUSH_GLOBAL = 1 << 0, IBV_FLUSH_PERSISTENT = 1 << 1 };

enum ibv_selectivity_level { IBV_FLUSH_RANGE, IBV_FLUSH_MR };

/* struct ibv_qp_ex with the members that have been added to its end. */
struct ibv_qp_ex_newer {
	struct ibv_qp_ex before;
	void (*wr_flush)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, size_t len,
			 uint8_t type, uint8_t level);
};
