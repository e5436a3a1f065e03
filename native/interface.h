/* Functions of the C part, for cffi and for the compiler (through native.h): no preprocessor here. */

/* The system's libibverbs.so.1 and librdmacm.so.1, opened at the first call (thread-safe).
 * Returns 0 and the table, or an errno value with a text in `error` that names the library or
 * symbol that is missing.  A failure is not remembered: the next call tries again. */
int aiordma_system_calls(const struct aiordma_calls **calls, char *error, size_t error_size);

/* The embedded software device, always there; it starts working when a device or an event channel
 * is opened and stops when the last one is closed. */
const struct aiordma_calls *aiordma_embedded_calls(void);

/* One send-queue work request.  imm_data is in host byte order here; the SGEs are
 * sges[first_sge .. first_sge + num_sge) of the array given beside. */
struct aiordma_send {
	uint64_t wr_id;
	uint64_t remote_addr;
	uint64_t compare_add;
	uint64_t swap;
	uint32_t rkey;
	uint32_t opcode;     /* enum ibv_wr_opcode */
	uint32_t send_flags; /* enum ibv_send_flags */
	uint32_t imm_data;
	uint32_t first_sge;
	uint32_t num_sge;
};

struct aiordma_recv {
	uint64_t wr_id;
	uint32_t first_sge;
	uint32_t num_sge;
};

/* Post `count` work requests with as few doorbells as the chain allows (blocks of 64).
 * Returns 0, or the errno value of ibv_post_send; *posted says how many were accepted. */
int aiordma_post_send(struct ibv_qp *qp, const struct aiordma_send *sends, uint32_t count,
		      const struct ibv_sge *sges, uint32_t *posted);
int aiordma_post_recv(struct ibv_qp *qp, const struct aiordma_recv *recvs, uint32_t count,
		      const struct ibv_sge *sges, uint32_t *posted);

/* One work request with one SGE, all in the arguments: the common case without an array. */
int aiordma_post_send_one(struct ibv_qp *qp, uint64_t wr_id, uint32_t opcode, uint32_t send_flags,
			  uint32_t imm_data, uint64_t addr, uint32_t length, uint32_t lkey,
			  uint64_t remote_addr, uint32_t rkey);
int aiordma_post_recv_one(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t length,
			  uint32_t lkey);

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

/* Up to `capacity` completions of one CQ; the number, or a negative errno value. */
int aiordma_poll(struct ibv_cq *cq, struct aiordma_completion *out, int capacity);

int aiordma_req_notify(struct ibv_cq *cq, int solicited_only);

/* A completion channel being drained.  `ready` holds the CQs whose event has been taken (and
 * acknowledged and answered by re-arming) but which have not yet been seen empty. */
struct aiordma_drain {
	const struct aiordma_calls *calls;
	struct ibv_comp_channel *channel; /* its fd is non-blocking */
	uint32_t ready_count;
	struct ibv_cq *ready[64];
	uint64_t events; /* completion events taken so far */
	uint32_t spin_us; /* look again for so long before answering that there is nothing */
};

/* Grows whenever a thread of the application has found work to do for the embedded device. */
unsigned aiordma_embedded_steps(void);

/* Get every event, acknowledge, re-arm, poll: one crossing for a turn of the event loop.
 * Returns the number of completions, or a negative errno value.  `more` is set when `out` was full
 * before every ready CQ was seen empty: call again. */
int aiordma_drain(struct aiordma_drain *drain, struct aiordma_completion *out, int capacity,
		  int *more);

/* Before a CQ is destroyed: take its pending events so that ibv_destroy_cq does not wait for them. */
void aiordma_drain_forget(struct aiordma_drain *drain, struct ibv_cq *cq);

/* O_NONBLOCK on; 0 or an errno value.  For the fd of a channel of events: from now on "nothing
 * there" (EAGAIN) is normal for the caller, so the embedded device may wake it early. */
int aiordma_set_nonblocking(int fd);

/* The embedded device makes this channel's fd readable as soon as there is work for the device, not
 * only when there is an event: the thread that then looks for one does the work itself, which saves
 * waking it by another thread.  Nothing happens if the fd is not one of its channels. */
void aiordma_wake_early(int fd);
