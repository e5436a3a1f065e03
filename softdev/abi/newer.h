/* Declarations added to libibverbs in rdma-core 45 and later, except for the constants in verbs.h.
 * `make abi` compares only what the distribution's headers declare, so it does not read this file.
 * Must not contain preprocessor directives, because cffi reads it. */

/* RDMA FLUSH (ibv_wr_post(3)): where the data is after completion, and which memory is flushed. */
enum ibv_placement_type { IBV_FLUSH_GLOBAL = 1 << 0, IBV_FLUSH_PERSISTENT = 1 << 1 };

enum ibv_selectivity_level { IBV_FLUSH_RANGE, IBV_FLUSH_MR };

/* struct ibv_qp_ex with the members added at its end. */
struct ibv_qp_ex_newer {
	struct ibv_qp_ex before;
	void (*wr_flush)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, size_t len,
			 uint8_t type, uint8_t level);
};
