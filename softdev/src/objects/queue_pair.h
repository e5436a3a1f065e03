/* Queue pairs and shared receive queues, including their states and work completions. */
#pragma once

#include "address.h"
#include "completion.h"
#include "memory.h"

/* ---- queue pairs --------------------------------------------------------------------------- */

enum { SOFT_READ_PARTS = 16 };

/* A work request in the send queue. */
struct soft_send_wqe {
	uint64_t wr_id;
	uint64_t remote_address;
	union {
		struct {
			uint8_t arguments[SOFT_ATOMIC_ARGUMENTS]; /* as on the wire */
			uint32_t remote_srqn; /* XRC */
			uint8_t flush; /* FLUSH: types and level as on the wire */
		};
		struct soft_bind bind;
	};
	uint32_t rkey; /* BIND_MW: the window's next key; *_INV: the key to invalidate */
	uint32_t psn; /* first PSN, not truncated to 24 bits */
	uint32_t psns; /* number of PSNs */
	uint32_t immediate; /* network byte order */
	uint32_t length;
	uint32_t trace_request; /* request number in the trace, or 0 */
	uint8_t opcode; /* enum ibv_wr_opcode */
	uint8_t flags; /* enum ibv_send_flags */
	uint8_t num_sge;
	uint8_t status; /* enum ibv_wc_status; the request is not sent if this is an error */
	bool local; /* true for BIND_MW and LOCAL_INV, which have no PSNs */
	bool executed; /* whether a local request has been executed */
};

/* The destination of a UD request. */
struct soft_destination {
	struct soft_ud_address path;
	uint32_t qpn;
	uint32_t qkey; /* as in the request */
};

/* A send queue. Indices are free-running counters, and `index & mask` selects the slot. PSNs are
 * free-running too, and only their lower 24 bits are sent. */
struct soft_send_queue {
	struct soft_send_wqe *slots;
	uint8_t *slot_data; /* SGEs or inline data of each slot */
	struct soft_destination *destinations; /* one per slot for UD, otherwise NULL */
	uint32_t mask;
	uint32_t oldest; /* oldest request that has not completed */
	uint32_t next; /* next request to transmit */
	uint32_t tail; /* first free slot */
	uint32_t next_psn; /* next PSN to transmit */
	uint32_t unacked; /* first unacknowledged PSN, in the oldest request */
	uint32_t unsent; /* first PSN that has never been transmitted */
	uint32_t psn; /* PSN of the next request to be posted */
	uint32_t reads; /* number of outstanding requests counted against max_rd_atomic */
};

/* The congestion window of a requester on a lossy path (path/roce/), in PSNs. */
struct soft_window {
	uint32_t psns;
	uint32_t read_psns; /* limit if the next request is a READ */
	/* called before lost packets are retransmitted */
	void (*on_loss)(struct soft_window *window);
	/* A large READ is split into several requests. This ring buffer contains the PSN after
	 * the last one of each unanswered part. */
	uint32_t part_head, part_tail;
	uint32_t part_ends[SOFT_READ_PARTS];
};

struct soft_recv_wqe {
	uint64_t wr_id;
	uint64_t length; /* total length of all SGEs */
	uint32_t num_sge;
	uint32_t trace_request; /* request number in the trace, or 0 */
};

/* The receive queue of a queue pair, or a shared receive queue. A queue pair with a shared receive
 * queue has only one slot, for the receive of the current message. */
struct soft_receive_queue {
	struct soft_recv_wqe *slots;
	struct ibv_sge *sges; /* max_sge per slot */
	uint32_t max_wr;
	uint32_t max_sge;
	uint32_t mask;
	uint32_t head;
	uint32_t tail;
};

/* The unsent part of the response to a request that counts against max_rd_atomic. */
struct soft_response {
	uint32_t psn;
	uint32_t length;
	uint64_t address;
	uint32_t rkey;
	uint32_t srq_num; /* XRC: SRQ number in the request */
	uint32_t msn; /* MSN when the request was accepted */
	uint8_t opcode; /* SOFT_READ_DATA or SOFT_ATOMIC_DATA */
	bool partly_sent; /* whether part of the response has been sent */
	/* whether the requester may not count the request: a duplicate, FLUSH or ATOMIC WRITE */
	bool may_be_uncounted;
	bool refused; /* whether a NAK replaces the rest */
	union {
		struct {
			uint32_t copy_length;
			uint8_t *copy; /* READ data saved before it is overwritten, or NULL */
		};
		uint8_t result[SOFT_ATOMIC_RESULT];
	};
};

enum { SOFT_KNOWN_EMPTY_READS = 16 };

/* An executed READ or atomic, which the peer may request again. */
struct soft_rd_atomic {
	uint32_t psn;
	uint32_t psns;
	uint32_t rkey;
	uint32_t uncounted_bytes; /* bytes of a READ not yet counted as read by the peer */
	uint8_t opcode; /* SOFT_READ or an atomic opcode */
	uint8_t result[SOFT_ATOMIC_RESULT]; /* old value of an atomic */
};

struct soft_responder {
	uint32_t expected_psn; /* PSN of the next request */
	uint32_t acked_psn; /* last PSN acknowledged to the requester */
	uint32_t msn; /* number of messages completed */
	bool awaiting_resend; /* whether the frame that the last NAK requested is still missing */
	bool failed; /* whether a NAK that ends the queue pair is queued */
	/* The members up to `srq_num` describe the current message. */
	bool in_message; /* whether more frames of the message will arrive */
	bool has_receive; /* whether it uses the receive at the head of the queue */
	uint8_t opcode;
	uint8_t flags; /* flags of the latest frame */
	uint32_t first_psn;
	uint32_t dma_length;
	uint32_t rkey; /* key for a WRITE, or the key to invalidate after a SEND */
	uint64_t address;
	uint32_t immediate;
	uint32_t srq_num; /* XRC: number of the shared receive queue */
	/* Responses are queued in the order of their requests. */
	struct soft_response *responses;
	uint32_t response_mask; /* number of slots, which is a power of two, minus 1 */
	uint32_t response_head;
	uint32_t response_tail;
	uint32_t copied_bytes; /* total size of all `copy` buffers (read_order.c) */
	/* The latest READs and atomics, in a ring with as many slots as `responses`. */
	struct soft_rd_atomic *latest_rd_atomics;
	uint64_t rd_atomic_count; /* number ever stored, which may exceed the number of slots */
	/* PSNs of the latest FLUSHes and ATOMIC WRITEs */
	uint32_t empty_read_psns[SOFT_KNOWN_EMPTY_READS];
	uint64_t empty_read_count; /* number ever stored */
};

/* A frame to send. The queue pair is updated (`commit`) only after the path has accepted the frame,
 * because a frame that does not fit is built again later. */
struct soft_tx_packet {
	struct soft_frame frame;
	uint32_t index; /* index in the send queue (requester) or the response queue (responder) */
	bool by_cma; /* whether a CMA descriptor replaces the payload */
	bool is_response; /* whether the frame is from the response queue */
};

enum soft_link_state {
	SOFT_LINK_CONNECTING, /* waiting for the next attempt */
	SOFT_LINK_HANDSHAKE, /* waiting for HELLO or HELLO_ACK */
	SOFT_LINK_PENDING, /* HELLO received, but the queue pair is not yet in RTR */
	SOFT_LINK_SELECTING, /* connected by a CM stream that a channel may still replace */
	SOFT_LINK_UP,
	SOFT_LINK_CLOSING, /* waiting for room for the last frames and DISCONNECT */
	SOFT_LINK_DEAD,
};

/* The part of a link that its queue pair uses. struct soft_link (link/) contains the rest. */
struct soft_qp_link {
	enum soft_link_state state;
	struct soft_deferred output;
	bool is_lossy; /* whether either side may lose or duplicate frames */
	bool loses_pending; /* whether a LOSES frame is waiting to be sent */
	bool blocked; /* whether output is waiting for free space on the path */
	/* There is at most one pending NAK, because the responder accepts nothing after it. */
	uint8_t nak_opcode; /* 0 if none */
	uint8_t nak_syndrome;
	uint32_t nak_psn;
};

/* Schedule output if the link is up and has room on its path. */
static inline void soft_qp_link_output(struct soft_qp_link *link)
{
	if (link->state == SOFT_LINK_UP && !link->blocked)
		soft_defer(&link->output);
}

struct soft_transport;
struct soft_xrcd;

struct soft_qp {
	union { /* each type extends the previous one; only `ibv` is valid if `batch` is NULL */
		struct ibv_qp ibv;
		struct ibv_qp_ex ex;
		struct ibv_qp_ex_newer newer;
	};
	struct soft_batch *batch; /* state of the wr_* calls (wr.c); NULL if not requested */
	struct soft_node context_node;
	struct ibv_qp_attr attr;
	struct ibv_qp_cap cap;
	bool sq_sig_all;
	bool block_self_multicast; /* UD: whether to drop its own multicast messages */
	bool stream_from_cm; /* whether the CM provides the stream */
	bool stream_lost; /* whether the stream has been lost permanently */
	bool ends_with_peer; /* see aiordma_device_calls.end_with_peer */
	bool no_peer; /* UC: whether messages are lost because there is no peer */
	bool comm_established; /* whether a request has arrived (COMM_EST) */
	bool draining; /* whether SQD waits for requests in flight */
	const struct soft_transport *transport;
	struct soft_xrcd *xrcd; /* domain of an XRC_RECV queue pair, otherwise NULL */
	uint32_t receive_srq_num; /* number of the shared receive queue that supplied `rq` */
	struct soft_qp_link *link; /* or NULL */
	struct soft_send_queue sq;
	struct soft_receive_queue rq;
	struct soft_responder responder;
	struct aiordma_served *served; /* NULL until count_served is called */
	uint8_t rnr_retries_remaining; /* remaining RNR retries; 7 means forever */
	/* whether an RNR NAK has arrived since a request was last acknowledged or completed */
	bool rnr_nak_since_progress;
	bool rnr_paused; /* whether sending waits for `rnr_timer` after an RNR NAK */
	struct soft_window *window; /* congestion window; NULL if unlimited */
	struct soft_timer rnr_timer;
	uint8_t retries_remaining; /* see req_retransmit.c */
	bool loss_reported; /* whether to ignore further reports of the same loss */
	struct soft_timer retry_timer;
	struct soft_timer reach_timer; /* runs while requests cannot be sent or answered */
	struct soft_node attachments; /* multicast groups (multicast.c) */
	void (*on_link_down)(struct soft_qp *qp, void *owner, int error);
	void *link_owner;
	uint32_t async_events_retrieved; /* protected by ibv.mutex */
};

static inline bool soft_qp_is_uc(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_UC;
}

static inline bool soft_qp_is_ud(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_UD;
}

/* Returns whether `type` is an XRC type. An XRC connection has a requesting and a responding end
 * (IBTA annex A14). */
static inline bool soft_is_xrc(enum ibv_qp_type type)
{
	return type == IBV_QPT_XRC_SEND || type == IBV_QPT_XRC_RECV;
}

static inline bool soft_qp_is_reliable(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_RC || soft_is_xrc(qp->ibv.qp_type);
}

/* Returns whether the queue pair sends requests and expects responses to them. */
static inline bool soft_qp_is_requester(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_RC || qp->ibv.qp_type == IBV_QPT_XRC_SEND;
}

/* Returns whether the queue pair responds to its peer's requests. */
static inline bool soft_qp_is_responder(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_RC || qp->ibv.qp_type == IBV_QPT_XRC_RECV;
}

static inline uint32_t soft_psn_add(uint32_t psn, uint32_t count)
{
	return (psn + count) & SOFT_PSN_MASK;
}

static inline uint32_t soft_psn_prev(uint32_t psn)
{
	return (psn - 1) & SOFT_PSN_MASK;
}

/* Returns whether `psn` precedes `other` in the circular PSN space (IBTA 9.7.4.1.2). */
static inline bool soft_psn_before(uint32_t psn, uint32_t other)
{
	return ((psn - other) & SOFT_PSN_MASK) >= SOFT_PSN_HALF;
}

/* Returns the base-2 logarithm of the path MTU, which is the number of bytes per PSN. A UD message
 * has a single PSN, and the path MTU is its maximum length. Valid from RTR on. */
static inline uint32_t soft_mtu_shift(const struct soft_qp *qp)
{
	return 7u + qp->attr.path_mtu; /* enum ibv_mtu: 1 is 256 */
}

/* Returns the number of PSNs that `length` bytes occupy (IBTA 9.7.1). */
static inline uint32_t soft_psn_count(const struct soft_qp *qp, uint32_t length)
{
	return length ? ((length - 1) >> soft_mtu_shift(qp)) + 1 : 1;
}

/* Returns the byte offset of `psn` in a message whose first PSN is `first`. */
static inline uint64_t soft_message_offset(const struct soft_qp *qp, uint32_t psn, uint32_t first)
{
	return (uint64_t)((psn - first) & SOFT_PSN_MASK) << soft_mtu_shift(qp);
}

/* Returns whether the length of a frame is valid. It must be a multiple of the path MTU, unless the
 * frame ends its message. Only a message of one frame may be empty. */
static inline bool soft_has_valid_length(const struct soft_qp *qp, const struct soft_frame *frame)
{
	if (soft_is_last(frame))
		return frame->length || soft_is_first(frame);
	return frame->length && !(frame->length & ((1u << soft_mtu_shift(qp)) - 1));
}

/* Skip the bytes at the start of a frame that have already been received. A retransmitted message
 * may be split into frames differently, so a frame can contain both old and new bytes. Returns
 * false if the frame contains nothing new. */
static inline bool soft_trim(const struct soft_qp *qp, struct soft_frame *frame, uint32_t expected)
{
	uint32_t behind = (expected - frame->psn) & SOFT_PSN_MASK;

	if (behind >= soft_psn_count(qp, frame->length))
		return false;
	frame->skip = behind << soft_mtu_shift(qp);
	return true;
}

static inline struct soft_send_wqe *soft_send_at(const struct soft_qp *qp, uint32_t index)
{
	return &qp->sq.slots[index & qp->sq.mask];
}

/* Returns the size of a slot in `slot_data` in bytes, aligned for SGEs. The SGEs fit into the slot,
 * because soft_qp_create() makes max_inline_data at least as large as max_send_sge SGEs. */
static inline size_t soft_send_slot_data_size(const struct soft_qp *qp)
{
	enum { ALIGNED = sizeof(uint64_t) };

	return ((size_t)qp->cap.max_inline_data + ALIGNED - 1) / ALIGNED * ALIGNED;
}

static inline uint8_t *soft_send_inline(const struct soft_qp *qp, uint32_t index)
{
	return &qp->sq.slot_data[(index & qp->sq.mask) * soft_send_slot_data_size(qp)];
}

static inline struct ibv_sge *soft_send_sges(const struct soft_qp *qp, uint32_t index)
{
	return (struct ibv_sge *)(void *)soft_send_inline(qp, index);
}

static inline struct soft_destination *soft_send_destination(const struct soft_qp *qp,
							     uint32_t index)
{
	return &qp->sq.destinations[index & qp->sq.mask];
}

/* Returns whether the response to the request contains data. */
static inline bool soft_send_expects_data(const struct soft_send_wqe *send)
{
	return send->opcode == IBV_WR_RDMA_READ || send->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
	       send->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* Returns whether the request is answered in the same format as a zero-length READ
 * (IBTA annex A19). */
static inline bool soft_send_is_empty_read(const struct soft_send_wqe *send)
{
	return send->opcode == IBV_WR_FLUSH || send->opcode == IBV_WR_ATOMIC_WRITE;
}

/* Returns whether the request counts against max_rd_atomic. */
static inline bool soft_send_is_counted(const struct soft_send_wqe *send)
{
	return soft_send_expects_data(send) || soft_send_is_empty_read(send);
}

/* Returns the first PSN of the request at `index`, which may also be the tail. A local request does
 * not occupy any PSNs and has the first PSN of the request after it. */
static inline uint32_t soft_send_psn(const struct soft_qp *qp, uint32_t index)
{
	return (index == qp->sq.tail ? qp->sq.psn : soft_send_at(qp, index)->psn) & SOFT_PSN_MASK;
}

static inline struct soft_response *soft_response_at(const struct soft_qp *qp, uint32_t index)
{
	return &qp->responder.responses[index & qp->responder.response_mask];
}

static inline struct soft_recv_wqe *soft_receive_at(const struct soft_receive_queue *rq,
						    uint32_t index)
{
	return &rq->slots[index & rq->mask];
}

static inline struct ibv_sge *soft_receive_sges(const struct soft_receive_queue *rq, uint32_t index)
{
	return &rq->sges[(size_t)(index & rq->mask) * rq->max_sge];
}

/* queues.c */
/* Reasons why a posting call fails. Each has a name in the trace, which REASONS in
 * aiordma/_trace/records.py explains, and an errno value. */
#define SOFT_REFUSALS(R)                                                                           \
	R(STATE, EINVAL)                                                                           \
	R(NO_QUEUE, EINVAL)                                                                        \
	R(OPCODE, EINVAL)                                                                          \
	R(UNSUPPORTED, EOPNOTSUPP)                                                                 \
	R(DESTINATION, EINVAL)                                                                     \
	R(FLAGS, EINVAL)                                                                           \
	R(SGES, EINVAL)                                                                            \
	R(INLINE, EINVAL)                                                                          \
	R(BIND, EINVAL)                                                                            \
	R(SETTER, EINVAL)                                                                          \
	R(UNFINISHED, EDEADLK)                                                                     \
	R(NO_MEMORY, ENOMEM)                                                                       \
	R(FULL, ENOMEM)

enum soft_refusal {
	SOFT_ACCEPTED,
#define R(name, error) SOFT_REFUSED_##name,
	SOFT_REFUSALS(R)
#undef R
};

extern const struct soft_refused {
	const char *reason;
	int error;
} soft_refusals[];

/* Returns the number of slots for `count` requests. It is a power of two, because indices wrap
 * around at 32 bits. */
uint32_t soft_slots_for(uint32_t count);
/* Create a receive queue in memory from the allocator of `pd`, which may be NULL. Returns 0 or an
 * errno value. */
int soft_receive_queue_create(struct soft_receive_queue *rq, struct ibv_pd *pd, uint32_t max_wr,
			      uint32_t max_sge);
void soft_receive_queue_destroy(struct soft_receive_queue *rq);
/* Post a chain of receives until one is refused. On failure, *wr points to the refused receive. */
enum soft_refusal soft_receive_queue_post(struct soft_receive_queue *rq, struct ibv_recv_wr **wr);
/* Move the first receive of `from` to the end of `to`, which must have room. */
void soft_receive_queue_move(struct soft_receive_queue *from, struct soft_receive_queue *to);
int soft_queues_create(struct soft_qp *qp);
void soft_queues_destroy(struct soft_qp *qp);
void soft_queues_reset(struct soft_qp *qp);

/* ---- srq.c: shared receive queues ---------------------------------------------------------- */

struct soft_srq {
	struct ibv_srq ibv;
	struct soft_receive_queue rq;
	uint32_t limit; /* 0 if not armed */
	unsigned users; /* number of queue pairs */
	struct soft_xrcd *xrcd; /* domain of an XRC queue, otherwise NULL */
	struct ibv_cq *cq; /* completion queue of an XRC queue, otherwise NULL */
	uint32_t number; /* number by which requests select an XRC queue */
	uint32_t async_events_retrieved; /* protected by ibv.mutex */
};

static inline struct soft_srq *soft_srq_of(struct ibv_srq *srq)
{
	return soft_container(srq, struct soft_srq, ibv);
}

int soft_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
struct ibv_srq *soft_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr);
int soft_get_srq_num(struct ibv_srq *srq, uint32_t *srq_num);

/* Make sure that a receive for the current message is at the head of the queue pair's own queue. If
 * that queue is empty, take a receive from the shared receive queue, so that other queue pairs
 * cannot use it. Returns false if no receive is available. */
bool soft_acquire_receive(struct soft_qp *qp);

struct soft_qp *soft_qp_of(struct ibv_qp *qp);

/* Find a queue pair by its number. Returns NULL if no queue pair has the number. */
struct soft_qp *soft_qp_find(uint32_t qp_num);

/* Register a callback of the connection manager, which is called once when the stream that it has
 * handed to the queue pair ends. `error` is 0 if either side closed the stream in an orderly way,
 * otherwise an errno value. The callback is not called after
 * soft_qp_set_on_link_down(qp, NULL, NULL), or after the queue pair has been destroyed or reset. */
void soft_qp_set_on_link_down(struct soft_qp *qp,
			      void (*on_link_down)(struct soft_qp *qp, void *owner, int error),
			      void *owner);

/* Disconnect from the peer. This moves the queue pair to ERR, which flushes all work requests and
 * closes the stream. The `on_link_down` callback runs when the peer has closed its end, or after
 * two seconds. Returns 0, or ENOTCONN if there is no stream. */
int soft_qp_disconnect(struct soft_qp *qp);

/* Implement ibv_modify_qp(3) for callers that hold the lock. If `skip_route_check` is set, skips
 * the check that the kernel has a route to the peer. */
int soft_modify_qp_locked(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask,
			  bool skip_route_check);

/* qp.c */
/* Create a queue pair in the protection domain `pd` (ibv_create_qp(3)), or an XRC_RECV queue
 * pair in the XRC domain `xrcd`. The other domain must be NULL. Returns NULL with errno set on
 * failure. */
struct ibv_qp *soft_qp_create(struct ibv_context *context, struct ibv_pd *pd,
			      struct soft_xrcd *xrcd, struct ibv_qp_init_attr *attr);
/* Move the queue pair to RESET: close its stream, and discard its requests and completions. */
void soft_qp_enter_reset(struct soft_qp *qp);
/* Move the queue pair to ERR, flush the send queue and then the receive queue, and close the
 * stream. Does nothing in RESET and ERR. */
void soft_qp_error(struct soft_qp *qp);
/* Move the queue pair to SQE and flush its send queue. */
void soft_qp_send_error(struct soft_qp *qp);
void soft_qp_event(struct soft_qp *qp, enum ibv_event_type type);
/* Make progress on the send queue. Depending on the state, this flushes it, sends requests, or
 * starts the timer after which the queue pair gives up on an unreachable peer. */
void soft_qp_kick(struct soft_qp *qp);
/* Start the timer after which requests fail because the port is down. The queue pair and its peer
 * fail when their retries are exhausted. */
void soft_qp_stall(struct soft_qp *qp);
/* Implement aiordma_device_calls.end_with_peer. */
void soft_qp_end_with_peer(struct ibv_qp *qp);
/* served.c: count_served, release_served and exclude_from_served of aiordma_device_calls */
const struct aiordma_served *soft_qp_count_served(struct ibv_qp *qp);
void soft_served_release(const struct aiordma_served *served);
/* Exclude access with this key from the counts of the bytes served to peers. */
void soft_exclude_from_served(uint32_t rkey);
/* Returns whether the bytes that the peer reads with this key are counted. */
bool soft_counts_reads_of(const struct soft_qp *qp, uint32_t rkey);
void soft_count_read(struct soft_qp *qp, uint64_t bytes);
void soft_count_written(struct soft_qp *qp, uint64_t bytes);
/* Handle the end of the queue pair's stream. `error` is 0 after an orderly end, otherwise an errno
 * value. */
void soft_qp_link_ended(struct soft_qp *qp, int error);
void soft_qp_check_drained(struct soft_qp *qp);
/* Returns how long the queue pair waits for a response, including all retries, in ns
 * (IBTA 9.7.6.1.3). */
uint64_t soft_qp_retry_time(const struct soft_qp *qp);

/* qp_numbers.c */
/* Assign a number to the queue pair and register it for soft_qp_find(). Returns 0, EADDRINUSE if
 * the process cannot get a port, or another errno value. */
int soft_qp_number_assign(struct soft_qp *qp);
void soft_qp_number_release(uint32_t number);

/* qp_ex.c */
struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

/* post.c */
int soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
int soft_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
/* Post the whole chain, or nothing if any request is refused. In this case, *bad_wr points to the
 * refused request. */
enum soft_refusal soft_post_batch(struct soft_qp *qp, struct ibv_send_wr *wr,
				  struct ibv_send_wr **bad_wr);

/* cqe.c: work completions */
void soft_complete_send(struct soft_qp *qp,
			enum ibv_wc_status status); /* completes the oldest request */
void soft_complete_receive(struct soft_qp *qp, enum ibv_wc_status status, uint32_t byte_len);
/* Complete the oldest request with an error. For a protection error, trace the reason first. */
void soft_fail_send(struct soft_qp *qp, enum ibv_wc_status status);
/* Complete the oldest receive with an error. For a protection error, trace the reason first. */
void soft_fail_receive(struct soft_qp *qp, enum ibv_wc_status status);
void soft_complete_datagram(struct soft_qp *qp, const struct soft_datagram *datagram,
			    uint32_t byte_len);
void soft_flush_sends(struct soft_qp *qp);
void soft_flush(struct soft_qp *qp);

/* Convert bytes [offset, offset + length) of an SGE list to at most `room` iovecs (scatter.c).
 * Returns the number of iovecs, or -1 if access is not allowed. */
int soft_sge_to_iovecs(const struct ibv_pd *pd, const struct ibv_sge *sges, uint32_t num_sge,
		       uint64_t offset, uint32_t length, unsigned rights, struct iovec *iov,
		       int room);

/* Returns whether part of the request has been transmitted. */
static inline bool soft_send_has_begun(const struct soft_qp *qp, const struct soft_send_wqe *send)
{
	return (int32_t)(qp->sq.unsent - send->psn) > 0;
}

static inline bool soft_oldest_has_begun(const struct soft_qp *qp)
{
	return qp->sq.oldest != qp->sq.tail &&
	       soft_send_has_begun(qp, soft_send_at(qp, qp->sq.oldest));
}

/* send_queue.c: requests that are executed or fail locally */
/* Execute a memory window bind or an invalidation. `reads` is the number of earlier requests that
 * are outstanding and count against max_rd_atomic. A fenced request waits until it is 0. Returns
 * false if the request must wait or has failed. */
bool soft_send_execute_local(struct soft_qp *qp, struct soft_send_wqe *send, uint32_t reads);
/* Execute local requests until the next request is one that must be sent or has to wait. Complete
 * the executed local requests that have become the oldest. Then fail the oldest request if it
 * cannot be sent. */
void soft_send_advance(struct soft_qp *qp);
/* Complete executed local requests that have become the oldest. */
void soft_send_complete_local(struct soft_qp *qp);
/* Fail the oldest request, and move the queue pair to ERR, or to SQE for UC and UD. */
void soft_send_fail(struct soft_qp *qp, enum ibv_wc_status status);
