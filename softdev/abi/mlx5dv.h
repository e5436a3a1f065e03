/* The part of libmlx5.so.1 that is used: dynamically connected queue pairs (DC) of mlx5 devices.
 * Read by cffi and by the compiler, like verbs.h. */

enum mlx5dv_qp_init_attr_mask { MLX5DV_QP_INIT_ATTR_MASK_DC = 1 << 1 };

enum mlx5dv_dc_type { MLX5DV_DCTYPE_DCT = 1, MLX5DV_DCTYPE_DCI = 2 };

struct mlx5dv_dci_streams {
	uint8_t log_num_concurent;
	uint8_t log_num_errored;
};

struct mlx5dv_dc_init_attr {
	enum mlx5dv_dc_type dc_type;
	union {
		uint64_t dct_access_key;
		struct mlx5dv_dci_streams dci_streams;
	};
};

struct mlx5dv_qp_init_attr {
	uint64_t comp_mask; /* enum mlx5dv_qp_init_attr_mask */
	uint32_t create_flags;
	struct mlx5dv_dc_init_attr dc_init_attr;
	uint64_t send_ops_flags;
};

/* Only the first two members are called, so the types of the others do not matter. */
struct mlx5dv_qp_ex {
	uint64_t comp_mask;
	void (*wr_set_dc_addr)(struct mlx5dv_qp_ex *qp, struct ibv_ah *ah, uint32_t remote_dctn,
			       uint64_t remote_dc_key);
	void *wr_mr_interleaved;
	void *wr_mr_list;
	void *wr_mkey_configure;
	void *wr_set_mkey_access_flags;
	void *wr_set_mkey_layout_list;
	void *wr_set_mkey_layout_interleaved;
	void *wr_set_mkey_sig_block;
	void *wr_raw_wqe;
	void *wr_set_dc_addr_stream;
	void *wr_memcpy;
	void *wr_set_mkey_crypto;
};
