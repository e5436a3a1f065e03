/* The functions of native/verbs, for cffi and for the compiler (through boundary.h). Must not
 * contain preprocessor directives. */

/* ---- system.c -------------------------------------------------------------------------------- */

/* Load the system's libibverbs.so.1 and librdmacm.so.1 at the first call. Thread-safe. Returns 0
 * and the table, or an errno value with a message in `error` that names the missing library or
 * symbol. After a failure, the next call tries again. */
int aiordma_system_calls(const struct aiordma_calls **calls, char *error, size_t error_size);

/* ---- posting.c ------------------------------------------------------------------------------- */

/* A work request for a send queue. Its SGEs are sges[first_sge .. first_sge + num_sge) of a
 * separate array. Atomics and atomic writes use one SGE. BIND_MW, LOCAL_INV and FLUSH do not use
 * any. imm_data is in host byte order. */
struct aiordma_send {
	uint64_t wr_id;
	union {
		uint64_t remote_addr; /* writes, reads, atomics, FLUSH */
		uint64_t ah; /* UD: struct ibv_ah * */
		uint64_t mw; /* BIND_MW: struct ibv_mw * */
	};
	union {
		uint64_t compare_add; /* atomics */
		uint64_t mr; /* BIND_MW: struct ibv_mr * */
		uint64_t tso_header; /* TSO: address of the packet headers */
	};
	union {
		uint64_t swap; /* compare and swap */
		uint64_t bind_addr; /* BIND_MW */
	};
	union {
		uint64_t bind_length;
		uint64_t flush_length;
	};
	union {
		uint32_t rkey; /* writes, reads, atomics, FLUSH; BIND_MW: the new key */
		uint32_t remote_qpn; /* UD */
	};
	union {
		uint32_t remote_srqn; /* XRC */
		uint32_t remote_qkey; /* UD */
		uint32_t bind_access; /* BIND_MW: enum ibv_access_flags */
	};
	union {
		uint32_t imm_data;
		uint32_t invalidate_rkey; /* SEND_WITH_INV, LOCAL_INV: not byte-swapped */
	};
	uint32_t opcode; /* enum ibv_wr_opcode */
	uint32_t send_flags; /* enum ibv_send_flags */
	uint32_t first_sge;
	uint32_t num_sge;
	union {
		uint16_t tso_header_size;
		uint16_t flush_types; /* enum ibv_placement_type */
	};
	union {
		uint16_t tso_mss;
		uint16_t flush_level; /* enum ibv_selectivity_level */
	};
};

/* Post `count` work requests. If `extended` is NULL, ibv_post_send posts them in chains of up to
 * 64. Otherwise, `extended` must be the result of ibv_qp_to_qp_ex, and the ibv_wr_* builders post
 * either all requests or none. Returns 0 or an errno value. Stores the number of accepted requests
 * in `posted`, even on failure. */
int aiordma_post_send(struct ibv_qp *qp, struct ibv_qp_ex *extended,
		      const struct aiordma_send *sends, uint32_t count, const struct ibv_sge *sges,
		      uint32_t *posted);

/* Post one request to a vendor-specific queue pair. The peer is identified by `ah`, `number` and
 * `key` instead of by members of `send`. It is set with wr_set_dc_addr, or with wr_set_ud_addr if
 * `dc` is NULL. Returns 0 or an errno value. */
int aiordma_post_addressed(struct ibv_qp_ex *qp, struct mlx5dv_qp_ex *dc,
			   const struct aiordma_send *send, const struct ibv_sge *sges,
			   struct ibv_ah *ah, uint32_t number, uint64_t key);

/* A receive request. It refers to its SGEs in the same way as struct aiordma_send. */
struct aiordma_recv {
	uint64_t wr_id;
	uint32_t first_sge;
	uint32_t num_sge;
};

/* Post `count` receives to the shared receive queue, or to the queue pair if `srq` is NULL. Returns
 * 0 or an errno value, and stores the number of accepted receives in `posted`. */
int aiordma_post_recv(struct ibv_qp *qp, struct ibv_srq *srq, const struct aiordma_recv *recvs,
		      uint32_t count, const struct ibv_sge *sges, uint32_t *posted);

/* ---- completion.c ---------------------------------------------------------------------------- */

/* A work completion without padding, for struct.iter_unpack("=Q8I"). imm_data is in host byte
 * order. */
struct aiordma_completion {
	uint64_t wr_id;
	uint32_t status;
	uint32_t opcode;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm_data;
	uint32_t qp_num;
	uint32_t src_qp;
	uint32_t wc_flags;
};

/* The other fields of a work completion, for struct.iter_unpack("=3Q7I4x"). A field is 0 if the CQ
 * does not provide it. A classic CQ provides slid, pkey_index, sl and dlid_path_bits. An extended
 * CQ provides the fields that were requested when it was created, but never pkey_index. */
struct aiordma_completion_more {
	uint64_t timestamp;
	uint64_t wallclock_ns;
	uint64_t tm_tag;
	uint32_t slid;
	uint32_t pkey_index;
	uint32_t sl;
	uint32_t dlid_path_bits;
	uint32_t cvlan;
	uint32_t flow_tag;
	uint32_t tm_priv;
};

/* Returns the value that cq_context must have in every extended CQ. The functions below use it to
 * distinguish extended CQs from classic ones. */
void *aiordma_extended_cq_context(void);

/* Take up to `capacity` completions of one CQ. If the CQ is empty, poll it for up to `spin_us`.
 * `more` may be NULL. Returns the number of completions, or a negative errno value. */
int aiordma_poll(struct ibv_cq *cq, struct aiordma_completion *out,
		 struct aiordma_completion_more *more, int capacity, uint32_t spin_us);

/* ---- drain.c --------------------------------------------------------------------------------- */

/* Arm a CQ (ibv_req_notify_cq(3)). Returns 0 or an errno value. */
int aiordma_req_notify(struct ibv_cq *cq, int solicited_only);

/* The state of draining a completion channel. `ready` contains the CQs that may still contain
 * completions. Their events have been acknowledged, and the CQs have been armed again. */
struct aiordma_drain {
	const struct aiordma_calls *calls;
	struct ibv_comp_channel *channel; /* its fd is non-blocking */
	uint32_t ready_count;
	struct ibv_cq *ready[64];
	uint64_t events; /* completion events taken */
	uint64_t drains, completions; /* numbers of aiordma_drain calls and completions */
	uint32_t spin_us; /* how long to poll before returning nothing */
	int polls_again; /* whether another poll follows soon: 1 if work is found; 2 always */
	int holds; /* whether `hold_polling` has announced another poll */
	int busy; /* nothing was found, but the device made progress */
};

/* Take and acknowledge the channel's events, arm their CQs again, and poll these CQs. Called once
 * per iteration of the event loop. Returns the number of completions or a negative errno value.
 * Sets `more` if `out` became full before every ready CQ was empty. The caller must then call
 * again. */
int aiordma_drain(struct aiordma_drain *drain, struct aiordma_completion *out, int capacity,
		  int *more);

/* Tell the device not to expect another poll. Called before the channel is destroyed. */
void aiordma_drain_end(struct aiordma_drain *drain);

/* Remove a CQ from `ready`. Called before the CQ is destroyed. Destroying it discards any events
 * that are still in the channel. */
void aiordma_drain_forget(struct aiordma_drain *drain, struct ibv_cq *cq);

/* Returns `peer_wakeups` of abi/device_calls.h, or 0 if the device lacks it. */
uint64_t aiordma_peer_wakeups(const struct aiordma_calls *calls);

/* ---- fd.c ------------------------------------------------------------------------------------ */

/* Set O_NONBLOCK. Returns 0 or an errno value. If the descriptor belongs to an event channel, it
 * may then become readable without an event (`wake_early` in abi/device_calls.h), so the caller
 * must handle EAGAIN. */
int aiordma_set_nonblocking(const struct aiordma_calls *calls, int fd);

/* Create a non-blocking timer descriptor, which becomes readable (8 bytes) at the time set by
 * aiordma_timer_set. Returns the descriptor, which the caller must close, or a negative errno
 * value. */
int aiordma_timer_open(void);
/* Set the time when the timer expires, in nanoseconds of CLOCK_MONOTONIC. The time replaces any
 * earlier one and must not be 0. Returns 0 or an errno value. */
int aiordma_timer_set(int fd, uint64_t at_ns);

/* ---- bring_up.c ------------------------------------------------------------------------------ */

/* Move a queue pair from RESET through INIT and RTR to RTS with three calls of ibv_modify_qp(3).
 * `to_init`, `to_rtr` and `to_rts` are their attribute masks. This function sets attr->qp_state
 * itself. Returns 0, or the result of the call that failed. After a failure, errno is the value set
 * by that call or 0, and attr->qp_state is the state that could not be reached. */
int aiordma_bring_up(const struct aiordma_calls *calls, struct ibv_qp *qp, struct ibv_qp_attr *attr,
		     int to_init, int to_rtr, int to_rts);

/* ---- extended.c: calls that no library exports ----------------------------------------------
 *
 * These functions correspond to inline functions in <infiniband/verbs.h>. They fail with EOPNOTSUPP
 * if the context, the library or the provider lacks the call. */

/* Query all attributes that the library supports. Other members of `attr` are not changed, so the
 * caller must zero them first. */
int aiordma_ibv_query_device_ex(struct ibv_context *context, struct ibv_device_attr_ex *attr);
int aiordma_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr);
int aiordma_ibv_query_rt_values_ex(struct ibv_context *context, struct ibv_values_ex *values);

struct ibv_cq_ex *aiordma_ibv_create_cq_ex(struct ibv_context *context,
					   struct ibv_cq_init_attr_ex *init_attr);
int aiordma_ibv_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);

int aiordma_ibv_advise_mr(struct ibv_pd *pd, enum ib_uverbs_advise_mr_advice advice, uint32_t flags,
			  struct ibv_sge *sg_list, uint32_t num_sge);
struct ibv_mr *aiordma_ibv_alloc_null_mr(struct ibv_pd *pd);
struct ibv_dm *aiordma_ibv_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr);
int aiordma_ibv_free_dm(struct ibv_dm *dm);
struct ibv_mr *aiordma_ibv_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t dm_offset,
				     size_t length, unsigned int access);
int aiordma_ibv_memcpy_to_dm(struct ibv_dm *dm, uint64_t dm_offset, const void *host_addr,
			     size_t length);
int aiordma_ibv_memcpy_from_dm(void *host_addr, struct ibv_dm *dm, uint64_t dm_offset,
			       size_t length);

struct ibv_td *aiordma_ibv_alloc_td(struct ibv_context *context,
				    struct ibv_td_init_attr *init_attr);
int aiordma_ibv_dealloc_td(struct ibv_td *td);
struct ibv_pd *aiordma_ibv_alloc_parent_domain(struct ibv_context *context,
					       struct ibv_parent_domain_init_attr *attr);
struct ibv_xrcd *aiordma_ibv_open_xrcd(struct ibv_context *context,
				       struct ibv_xrcd_init_attr *attr);
int aiordma_ibv_close_xrcd(struct ibv_xrcd *xrcd);

/* Create a shared receive queue of a type other than basic. For the basic type, call
 * ibv_create_srq. */
struct ibv_srq *aiordma_ibv_create_srq_ex(struct ibv_context *context,
					  struct ibv_srq_init_attr_ex *init_attr);
int aiordma_ibv_get_srq_num(struct ibv_srq *srq, uint32_t *srq_num);
/* Create a queue pair that needs extended attributes in addition to the PD. For other queue pairs,
 * call ibv_create_qp. */
struct ibv_qp *aiordma_ibv_create_qp_ex(struct ibv_context *context,
					struct ibv_qp_init_attr_ex *init_attr);
struct ibv_qp *aiordma_ibv_open_qp(struct ibv_context *context, struct ibv_qp_open_attr *attr);
int aiordma_ibv_modify_qp_rate_limit(struct ibv_qp *qp, struct ibv_qp_rate_limit_attr *attr);

struct ibv_mw *aiordma_ibv_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int aiordma_ibv_dealloc_mw(struct ibv_mw *mw);
int aiordma_ibv_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);

/* ---- providers.c ----------------------------------------------------------------------------- */

/* Returns the calls of provider libraries (abi/provider_calls.h) for contexts of this table. A call
 * is NULL if its library is not installed or the device lacks it. Thread-safe. */
const struct aiordma_provider_calls *aiordma_provider_calls(const struct aiordma_calls *calls);
/* Returns the calls of all installed provider libraries, for system.c's entry in device_calls.h. */
const struct aiordma_provider_calls *aiordma_installed_providers(void);
