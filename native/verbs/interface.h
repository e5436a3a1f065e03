/* The functions of native/verbs, for cffi and for the compiler (through boundary.h): no preprocessor
 * here. */

/* ---- system.c -------------------------------------------------------------------------------- */

/* The system's libibverbs.so.1 and librdmacm.so.1, opened at the first call (thread-safe).
 * Returns 0 and the table, or an errno value with a text in `error` that names the library or
 * symbol that is missing.  A failure is not remembered: the next call tries again. */
int aiordma_system_calls(const struct aiordma_calls **calls, char *error, size_t error_size);

/* ---- posting.c ------------------------------------------------------------------------------- */

/* One send-queue work request of any kind: members that no kind has in common share their place.
 * imm_data is in host byte order here.  The SGEs are sges[first_sge .. first_sge + num_sge) of the
 * array given beside; an atomic and an atomic write have one, BIND_MW, LOCAL_INV and FLUSH none. */
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
		uint32_t invalidate_rkey; /* SEND_WITH_INV, LOCAL_INV: as it is, not swapped */
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

/* Posts `count` work requests with as few doorbells as the chain allows (blocks of 64).
 * Returns 0, or the errno value of ibv_post_send; *posted says how many were accepted.
 * With `extended` (what ibv_qp_to_qp_ex gave for qp) they go through the ibv_wr_* builders, with one
 * doorbell, and *posted is all or nothing. */
int aiordma_post_send(struct ibv_qp *qp, struct ibv_qp_ex *extended,
		      const struct aiordma_send *sends, uint32_t count, const struct ibv_sge *sges,
		      uint32_t *posted);

/* Posts one request, without an address of its own, to a peer of a queue pair of a single vendor's kind: by
 * wr_set_dc_addr with `dc`, else by wr_set_ud_addr.  0 or an errno value. */
int aiordma_post_addressed(struct ibv_qp_ex *qp, struct mlx5dv_qp_ex *dc,
			   const struct aiordma_send *send, const struct ibv_sge *sges,
			   struct ibv_ah *ah, uint32_t number, uint64_t key);

/* One receive; its SGEs as above. */
struct aiordma_recv {
	uint64_t wr_id;
	uint32_t first_sge;
	uint32_t num_sge;
};

/* Posts `count` receives to the shared receive queue, or without one (NULL) to the queue pair.  Returns 0, or
 * the errno value of the call; *posted says how many were accepted. */
int aiordma_post_recv(struct ibv_qp *qp, struct ibv_srq *srq, const struct aiordma_recv *recvs,
		      uint32_t count, const struct ibv_sge *sges, uint32_t *posted);

/* ---- completion.c ---------------------------------------------------------------------------- */

/* A work completion, packed without holes for struct.iter_unpack("=Q8I"): imm_data in host order. */
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

/* The rest of it, for "=3Q7I4x".  Fields that the CQ was not made to tell are 0: pkey_index is told by
 * classic CQs alone, those before slid and after dlid_path_bits by extended ones alone. */
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

/* The cq_context by which all of the following know an extended CQ. */
void *aiordma_extended_cq_context(void);

/* Up to `capacity` completions of one CQ; the number, or a negative errno value.  `more` may be NULL.
 * Polls for up to `spin_us` while there is nothing. */
int aiordma_poll(struct ibv_cq *cq, struct aiordma_completion *out,
		 struct aiordma_completion_more *more, int capacity, uint32_t spin_us);

/* ---- drain.c --------------------------------------------------------------------------------- */

/* Arms a CQ: ibv_req_notify_cq(3).  0 or an errno value. */
int aiordma_req_notify(struct ibv_cq *cq, int solicited_only);

/* A completion channel being drained.  `ready` holds the CQs whose event has been taken and acknowledged,
 * which are armed again, and which have not yet been seen empty. */
struct aiordma_drain {
	const struct aiordma_calls *calls;
	struct ibv_comp_channel *channel; /* its fd is non-blocking */
	uint32_t ready_count;
	struct ibv_cq *ready[64];
	uint64_t events; /* completion events taken so far */
	uint64_t drains, completions; /* calls of aiordma_drain, and what they found */
	uint32_t spin_us; /* poll for so long before answering that there is nothing */
	int polls_again; /* 1: the caller polls again soon if something is found; 2: in any case */
	int holds; /* the device has been told so: `hold_polling` */
	int busy; /* there was nothing, but the device made progress */
};

/* Takes every event, acknowledges, arms, polls: one crossing for one iteration of the event loop.
 * Returns the number of completions, or a negative errno value.  `more` is set when `out` was full
 * before every ready CQ was seen empty: call again. */
int aiordma_drain(struct aiordma_drain *drain, struct aiordma_completion *out, int capacity,
		  int *more);

/* Before the channel is destroyed. */
void aiordma_drain_end(struct aiordma_drain *drain);

/* Before a CQ is destroyed, which drops its events that have not been taken. */
void aiordma_drain_forget(struct aiordma_drain *drain, struct ibv_cq *cq);

/* `peer_wakeups` of abi/device_calls.h; 0 where the device lacks it. */
uint64_t aiordma_peer_wakeups(const struct aiordma_calls *calls);

/* ---- fd.c ------------------------------------------------------------------------------------ */

/* Sets O_NONBLOCK; 0 or an errno value.  For the fd of an event channel: from now on "nothing there"
 * (EAGAIN) is normal for the caller, so the device may wake it early. */
int aiordma_set_nonblocking(const struct aiordma_calls *calls, int fd);

/* A new descriptor that becomes readable, 8 bytes, at the time that it is set for; it never blocks.
 * Or -errno.  The caller closes it. */
int aiordma_timer_open(void);
/* Sets the time, in nanoseconds of CLOCK_MONOTONIC, not 0, in place of an earlier one.  0 or an errno
 * value. */
int aiordma_timer_set(int fd, uint64_t at_ns);

/* ---- bring_up.c ------------------------------------------------------------------------------ */

/* Brings a queue pair from RESET to INIT, RTR and RTS by three calls of ibv_modify_qp(3).  Each takes the
 * attributes of its mask from `attr`; the states are set here.  Returns 0, or what the first call
 * returned that failed, with its errno, and its state in `attr`. */
int aiordma_bring_up(const struct aiordma_calls *calls, struct ibv_qp *qp, struct ibv_qp_attr *attr,
		     int to_init, int to_rtr, int to_rts);

/* ---- extended.c: calls that no library exports ----------------------------------------------
 *
 * Each is the inline call of the same name in <infiniband/verbs.h>: it goes through the context.
 * EOPNOTSUPP (or NULL with that errno) where the context, the library or the provider lacks it. */

/* All that the library knows; what it does not know is left as it was, so zero it. */
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

/* For other than basic ones; those are ibv_create_srq's. */
struct ibv_srq *aiordma_ibv_create_srq_ex(struct ibv_context *context,
					  struct ibv_srq_init_attr_ex *init_attr);
int aiordma_ibv_get_srq_num(struct ibv_srq *srq, uint32_t *srq_num);
/* For those that need more than a PD; the others are ibv_create_qp's. */
struct ibv_qp *aiordma_ibv_create_qp_ex(struct ibv_context *context,
					struct ibv_qp_init_attr_ex *init_attr);
struct ibv_qp *aiordma_ibv_open_qp(struct ibv_context *context, struct ibv_qp_open_attr *attr);
int aiordma_ibv_modify_qp_rate_limit(struct ibv_qp *qp, struct ibv_qp_rate_limit_attr *attr);

struct ibv_mw *aiordma_ibv_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int aiordma_ibv_dealloc_mw(struct ibv_mw *mw);
int aiordma_ibv_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);

/* ---- providers.c ----------------------------------------------------------------------------- */

/* The calls of single providers' libraries (abi/provider_calls.h) for contexts of that table: NULL each
 * that is not installed, or that the device lacks.  Thread-safe. */
const struct aiordma_provider_calls *aiordma_provider_calls(const struct aiordma_calls *calls);
/* Those that are installed, whatever the table: system.c's entry of device_calls.h. */
const struct aiordma_provider_calls *aiordma_installed_providers(void);
