/* Queue pairs: their queues, state machine and work completions; shared receive queues. */
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
	uint32_t psn; /* first PSN, as in soft_send_queue */
	uint32_t psns; /* number of PSNs */
	uint32_t immediate; /* network byte order */
	uint32_t length;
	uint32_t request; /* request number in the trace, or 0 */
	uint8_t opcode; /* enum ibv_wr_opcode */
	uint8_t flags; /* enum ibv_send_flags */
	uint8_t num_sge;
	uint8_t status; /* enum ibv_wc_status: why it cannot be sent, if already known */
	bool local; /* BIND_MW and LOCAL_INV, which are not sent and have no PSN */
	bool done; /* whether a local request has been executed */
};

/* The destination of a UD request. */
struct soft_destination {
	struct soft_ud_address path;
	uint32_t qpn;
	uint32_t qkey; /* as in the request */
};

/* Indices increase forever; a slot is index & mask. PSNs increase forever as well and are cut to 24
 * bits on the wire. */
struct soft_send_queue {
	struct soft_send_wqe *slots;
	uint8_t *lists; /* for each slot, its SGEs or its inline data */
	struct soft_destination *destinations; /* UD: one per slot */
	uint32_t mask;
	uint32_t oldest; /* oldest request that has not completed */
	uint32_t next; /* next request to transmit */
	uint32_t tail; /* first free slot */
	uint32_t next_psn; /* next PSN to transmit */
	uint32_t unacked; /* first unanswered PSN, which belongs to the oldest request */
	uint32_t unsent; /* first PSN that has never been transmitted */
	uint32_t psn; /* PSN of the next request to be posted */
	uint32_t reads; /* requests with soft_is_counted that were transmitted but not answered */
};

/* The number of PSNs that a requester may have in flight on a path that loses packets
 * (path/roce/). */
struct soft_window {
	uint32_t psns;
	uint32_t read_psns; /* limit if the last packets are the response to a READ */
	void (*lost)(struct soft_window
			     *window); /* called when packets are lost and will be retransmitted */
	/* Ends of the READ requests in flight that do not complete their READ. */
	uint32_t part_head, part_tail;
	uint32_t part_ends[SOFT_READ_PARTS];
};

struct soft_recv_wqe {
	uint64_t wr_id;
	uint64_t length; /* total length of all SGEs */
	uint32_t num_sge;
	uint32_t request; /* request number in the trace, or 0 */
};

/* The receive queue of a queue pair, or a shared one. A queue pair with a shared receive queue has
 * a queue with one slot, for the receive of the current message. */
struct soft_receive_queue {
	struct soft_recv_wqe *slots;
	struct ibv_sge *sges; /* max_sge per slot */
	uint32_t max_wr;
	uint32_t max_sge;
	uint32_t mask;
	uint32_t head;
	uint32_t tail;
};

/* The unsent part of a response to an accepted request with soft_is_counted. */
struct soft_response {
	/* the part that has not been sent */
	uint32_t psn;
	uint32_t length;
	uint64_t address;
	uint32_t rkey;
	uint32_t srq_num; /* XRC: as in the request */
	uint32_t msn; /* MSN when the request was accepted */
	uint8_t opcode; /* SOFT_READ_DATA or SOFT_ATOMIC_DATA */
	bool begun; /* part of it has been sent */
	bool again; /* the request was repeated, or the peer may not count it */
	bool refused; /* a NAK replaces the rest */
	union {
		struct {
			uint32_t kept_length;
			uint8_t *kept; /* copy of a READ's bytes that were overwritten, or NULL */
		};
		uint8_t result[SOFT_ATOMIC_RESULT];
	};
};

enum { SOFT_KNOWN_EMPTY = 16 };

/* A READ or an atomic that has been executed and may be repeated. */
struct soft_known_read {
	uint32_t psn;
	uint32_t psns;
	uint32_t rkey;
	uint32_t uncounted; /* bytes of a READ whose response has not been sent completely */
	uint8_t opcode; /* SOFT_READ, or the kind of atomic */
	uint8_t result[SOFT_ATOMIC_RESULT]; /* old value of an atomic */
};

struct soft_responder {
	uint32_t psn; /* next expected PSN */
	uint32_t acked; /* last PSN acknowledged to the requester */
	uint32_t msn; /* number of messages completed */
	bool resend_wanted; /* a NAK was sent: discard input until the message is repeated */
	bool failed; /* a NAK that ends the queue pair is queued */
	/* the current message, of which more frames will arrive */
	bool active;
	bool has_receive; /* the message uses the receive at the head of the queue */
	uint8_t opcode;
	uint8_t flags; /* flags of the last frame so far */
	uint32_t first; /* first PSN */
	uint32_t dma_length;
	uint32_t rkey; /* key of a WRITE, or the key that a SEND invalidates */
	uint64_t address;
	uint32_t immediate;
	uint32_t srq_num; /* XRC: number of the shared receive queue */
	/* responses in the order of the requests */
	struct soft_response *responses;
	uint32_t response_mask;
	uint32_t response_head;
	uint32_t response_tail;
	uint32_t kept; /* total bytes of READs kept (read_order.c) */
	struct soft_known_read *known; /* the last requests, as many as there are response slots */
	uint32_t known_count;
	uint32_t empty[SOFT_KNOWN_EMPTY]; /* PSNs of the last READs of 0 bytes */
	uint32_t empty_count;
};

/* A frame to be sent. The queue pair is updated when the path has accepted it (`commit`), because
 * frames that do not fit are built again later. */
struct soft_tx_packet {
	struct soft_frame frame;
	uint32_t index; /* slot of the send queue (requester) or of the responses (responder) */
	bool by_cma; /* contains a descriptor instead of the payload */
	bool answer; /* a response, in the order of the responses */
};

enum soft_link_state {
	SOFT_LINK_CONNECTING, /* waits for the next attempt */
	SOFT_LINK_HANDSHAKE, /* waits for HELLO or HELLO_ACK */
	SOFT_LINK_HELD, /* a HELLO whose queue pair is not in RTR yet */
	SOFT_LINK_SELECTING, /* has the CM's stream, which a channel may replace */
	SOFT_LINK_UP,
	SOFT_LINK_CLOSING, /* the last frames and DISCONNECT wait for room */
	SOFT_LINK_DEAD,
};

/* The part of a link that its queue pair uses; struct soft_link (link/) contains the rest. */
struct soft_qp_link {
	enum soft_link_state state;
	struct soft_deferred output;
	bool loses; /* one of the sides loses or duplicates frames */
	bool loses_pending; /* LOSES has to be sent */
	bool blocked; /* waits for room on its path */
	/* There is at most one pending NAK, because the responder accepts nothing after it. */
	uint8_t nak_opcode; /* 0 if none */
	uint8_t nak_syndrome;
	uint32_t nak_psn;
};

/* Schedule output, because there may be something to send. */
static inline void soft_qp_link_output(struct soft_qp_link *link)
{
	if (link->state == SOFT_LINK_UP && !link->blocked)
		soft_defer(&link->output);
}

struct soft_transport;
struct soft_xrcd;

struct soft_qp {
	union { /* each begins like the one before; all are complete if there is a batch */
		struct ibv_qp ibv;
		struct ibv_qp_ex ex;
		struct ibv_qp_ex_newer newer;
	};
	struct soft_batch *batch; /* for the wr_* calls (wr.c); NULL if they were not requested */
	struct soft_node of_context;
	struct ibv_qp_attr attr;
	struct ibv_qp_cap cap;
	bool sq_sig_all;
	bool block_own; /* UD: does not receive its own messages to a group */
	bool stream_from_cm; /* the connection manager has, or had, its stream */
	bool stream_lost; /* there will be no stream any more, so nothing can be sent */
	bool ends_with_peer; /* see aiordma_device_calls.end_with_peer */
	bool no_peer; /* UC without a peer: what is sent is lost immediately */
	bool communicated; /* the first request has arrived (COMM_EST) */
	bool draining; /* SQD was requested, and requests are still in flight */
	const struct soft_transport *transport;
	struct soft_xrcd *xrcd; /* XRC_RECV: its domain; otherwise NULL */
	uint32_t taken_from; /* number of the shared queue whose receive is in `rq` */
	struct soft_qp_link *link; /* or NULL */
	struct soft_send_queue sq;
	struct soft_receive_queue rq;
	struct soft_responder responder;
	struct aiordma_served *served; /* NULL until count_served is called */
	uint8_t rnr_left; /* remaining retries; 7 means forever */
	bool rnr_refused; /* whether an RNR NAK has arrived since the last completed request */
	bool rnr_waiting;
	struct soft_window *window; /* of its path; NULL if unlimited */
	struct soft_timer rnr_timer;
	uint8_t retries_left; /* see req_retransmit.c */
	bool answer_missed; /* a loss has been reported; later responses do not report it again */
	struct soft_timer retry_timer;
	struct soft_timer reach_timer; /* runs while requests cannot be sent or answered */
	struct soft_node attachments; /* multicast groups (multicast.c) */
	void (*link_down)(struct soft_qp *qp, void *owner, int error);
	void *link_owner;
	uint32_t async_events_taken; /* protected by ibv.mutex */
};

static inline bool soft_qp_is_uc(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_UC;
}

static inline bool soft_qp_is_ud(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_UD;
}

/* Returns whether the type is XRC (IBTA annex A14), where one side sends requests and the other
 * responds. */
static inline bool soft_is_xrc(enum ibv_qp_type type)
{
	return type == IBV_QPT_XRC_SEND || type == IBV_QPT_XRC_RECV;
}

static inline bool soft_qp_is_reliable(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_RC || soft_is_xrc(qp->ibv.qp_type);
}

/* Returns whether the queue pair sends requests that have responses. soft_qp_is_responder() returns
 * whether it responds to its peer's requests. */
static inline bool soft_qp_is_requester(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_RC || qp->ibv.qp_type == IBV_QPT_XRC_SEND;
}

static inline bool soft_qp_is_responder(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_RC || qp->ibv.qp_type == IBV_QPT_XRC_RECV;
}

static inline uint32_t soft_psn_add(uint32_t psn, uint32_t count)
{
	return (psn + count) & SOFT_PSN_MASK;
}

/* Returns whether `psn` is in the half of the circle behind `other` (IBTA 9.7.4.1.2). */
static inline bool soft_psn_before(uint32_t psn, uint32_t other)
{
	return ((psn - other) & SOFT_PSN_MASK) >= SOFT_PSN_HALF;
}

/* Returns the logarithm of the path MTU, in units of which PSNs count. For UD it is the maximum
 * message length. Valid from RTR on. */
static inline uint32_t soft_mtu_shift(const struct soft_qp *qp)
{
	return 7u + qp->attr.path_mtu; /* enum ibv_mtu: 1 is 256 */
}

/* Returns the number of PSNs of `length` bytes (IBTA 9.7.1). */
static inline uint32_t soft_psns(const struct soft_qp *qp, uint32_t length)
{
	return length ? ((length - 1) >> soft_mtu_shift(qp)) + 1 : 1;
}

/* Returns the offset of a PSN's bytes in a message that begins with `first`. */
static inline uint64_t soft_place_of(const struct soft_qp *qp, uint32_t psn, uint32_t first)
{
	return (uint64_t)((psn - first) & SOFT_PSN_MASK) << soft_mtu_shift(qp);
}

/* Returns whether the frame contains whole units of the MTU or ends its message. */
static inline bool soft_is_whole_or_last(const struct soft_qp *qp, const struct soft_frame *frame)
{
	if (soft_is_last(frame))
		return frame->length || soft_is_first(frame);
	return frame->length && !(frame->length & ((1u << soft_mtu_shift(qp)) - 1));
}

/* Skip the bytes of a frame before the expected PSN, which have arrived before: a retransmitted
 * message may be split differently. Returns false if the frame contains nothing new. */
static inline bool soft_trim(const struct soft_qp *qp, struct soft_frame *frame, uint32_t expected)
{
	uint32_t behind = (expected - frame->psn) & SOFT_PSN_MASK;

	if (behind >= soft_psns(qp, frame->length))
		return false;
	frame->skip = behind << soft_mtu_shift(qp);
	return true;
}

static inline struct soft_send_wqe *soft_send_at(const struct soft_qp *qp, uint32_t index)
{
	return &qp->sq.slots[index & qp->sq.mask];
}

/* Returns the size of a slot in `lists`. SGEs have to be aligned, and inline_room bytes always
 * fit. */
static inline size_t soft_send_list_size(const struct soft_qp *qp)
{
	enum { ALIGNED = sizeof(uint64_t) };

	return ((size_t)qp->cap.max_inline_data + ALIGNED - 1) / ALIGNED * ALIGNED;
}

static inline uint8_t *soft_send_inline(const struct soft_qp *qp, uint32_t index)
{
	return &qp->sq.lists[(index & qp->sq.mask) * soft_send_list_size(qp)];
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

/* Returns whether the response contains data. */
static inline bool soft_send_is_read(const struct soft_send_wqe *send)
{
	return send->opcode == IBV_WR_RDMA_READ || send->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
	       send->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* Returns whether the response is that of a READ of 0 bytes (IBTA annex A19). */
static inline bool soft_send_is_empty_read(const struct soft_send_wqe *send)
{
	return send->opcode == IBV_WR_FLUSH || send->opcode == IBV_WR_ATOMIC_WRITE;
}

/* Returns whether the request's frame is one with soft_is_counted. */
static inline bool soft_send_is_counted(const struct soft_send_wqe *send)
{
	return soft_send_is_read(send) || soft_send_is_empty_read(send);
}

/* Returns the PSN of the message in a slot, or of the first message after it. */
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
/* Reasons for which a posting call fails: the name in a trace, which REASONS of
 * aiordma/_core/trace_records.py explains, and the errno value. */
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
	SOFT_TAKEN,
#define R(name, error) SOFT_REFUSED_##name,
	SOFT_REFUSALS(R)
#undef R
};

extern const struct soft_refused {
	const char *reason;
	int error;
} soft_refusals[];

/* Returns the number of slots for `count` requests: a power of two, because 32-bit indices wrap. */
uint32_t soft_slots_for(uint32_t count);
/* Returns 0 or an errno value. */
int soft_receive_queue_create(struct soft_receive_queue *rq, struct ibv_pd *pd, uint32_t max_wr,
			      uint32_t max_sge);
void soft_receive_queue_destroy(struct soft_receive_queue *rq);
/* Post receives up to the first one that is refused, to which *wr points then. */
enum soft_refusal soft_receive_queue_post(struct soft_receive_queue *rq, struct ibv_recv_wr **wr);
/* Move the first receive of `from` to the end of `to`, which has room for it. */
void soft_receive_queue_move(struct soft_receive_queue *from, struct soft_receive_queue *to);

/* ---- srq.c: shared receive queues ---------------------------------------------------------- */

struct soft_srq {
	struct ibv_srq ibv;
	struct soft_receive_queue rq;
	uint32_t limit; /* 0 if not armed */
	unsigned users; /* number of queue pairs */
	struct soft_xrcd *xrcd; /* XRC: its domain; otherwise NULL */
	struct ibv_cq *cq; /* where its receives complete */
	uint32_t number; /* number by which requests name it */
	uint32_t async_events_taken; /* protected by ibv.mutex */
};

static inline struct soft_srq *soft_srq_of(struct ibv_srq *srq)
{
	return soft_container(srq, struct soft_srq, ibv);
}

int soft_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
struct ibv_srq *soft_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr);
int soft_get_srq_num(struct ibv_srq *srq, uint32_t *srq_num);

/* Make sure that there is a receive for a message: at the head of the queue pair's own queue, or
 * taken from the shared one, so that no other queue pair gets it. Returns false if there is
 * none. */
bool soft_receive_ready(struct soft_qp *qp);

struct soft_qp *soft_qp_of(struct ibv_qp *qp);

/* Find the queue pair of this device with a number, or return NULL. An application may create and
 * move its queue pairs itself and only pass their numbers to the CM. */
struct soft_qp *soft_qp_find(uint32_t qp_num);

/* Set a callback that is called once when an adopted stream is gone. `error` is 0 after an orderly
 * end of either side, otherwise an errno value. It is not called after soft_qp_on_link_down(qp,
 * NULL, NULL), or when the queue pair has been destroyed or reset. */
void soft_qp_on_link_down(struct soft_qp *qp,
			  void (*link_down)(struct soft_qp *qp, void *owner, int error),
			  void *owner);

/* End the stream in order: move the queue pair to ERR, which flushes everything, and notify the
 * peer. link_down is called when the peer has closed its end, or after two seconds. Returns 0, or
 * ENOTCONN if there is no stream. */
int soft_qp_disconnect(struct soft_qp *qp);

/* Implements ibv_modify_qp(3) for callers that hold the lock. `has_route` skips asking the kernel
 * for a route to the peer. */
int soft_modify_qp_locked(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask,
			  bool has_route);

/* qp.c */
/* Create a queue pair in a protection domain (ibv_create_qp(3)), or an XRC_RECV queue pair in an
 * XRC domain. The other domain is NULL. */
struct ibv_qp *soft_qp_create(struct ibv_context *context, struct ibv_pd *pd,
			      struct soft_xrcd *xrcd, struct ibv_qp_init_attr *attr);
int soft_queues_create(struct soft_qp *qp);
void soft_queues_destroy(struct soft_qp *qp);
void soft_queues_reset(struct soft_qp *qp);
void soft_qp_enter_reset(struct soft_qp *qp);
/* Move to ERR: flush both queues in order and end the stream. Safe to repeat. */
void soft_qp_error(struct soft_qp *qp);
/* Move to SQE: flush the send queue. */
void soft_qp_send_error(struct soft_qp *qp);
void soft_qp_event(struct soft_qp *qp, enum ibv_event_type type);
/* Send what may be sent now, or start connecting. */
void soft_qp_kick(struct soft_qp *qp);
/* The port is down: let the queue pair and its peer fail when their retries are used up. */
void soft_qp_stall(struct soft_qp *qp);
/* implements aiordma_device_calls.end_with_peer */
void soft_qp_end_with_peer(struct ibv_qp *qp);
/* served.c: implements count_served, release_served and exclude_from_served of
 * aiordma_device_calls */
const struct aiordma_served *soft_qp_count_served(struct ibv_qp *qp);
void soft_served_release(const struct aiordma_served *served);
void soft_exclude_from_served(uint32_t rkey);
/* Returns whether the queue pair counts reads of the memory with this key. */
bool soft_counts_reads_of(const struct soft_qp *qp, uint32_t rkey);
/* Count bytes that the peer has read or written. */
void soft_count_read(struct soft_qp *qp, uint64_t bytes);
void soft_count_written(struct soft_qp *qp, uint64_t bytes);
/* Handle the end of a queue pair's stream. */
void soft_qp_link_gone(struct soft_qp *qp, int error);
void soft_qp_check_drained(struct soft_qp *qp);
/* Returns how long the queue pair waits for a response with all retries, in ns (IBTA 9.7.6.1.3). */
uint64_t soft_qp_retry_time(const struct soft_qp *qp);

/* qp_numbers.c */
/* Assign a number by which the queue pair can be found. Returns 0, EADDRINUSE if the process cannot
 * get a port, or another errno value. */
int soft_qp_number_take(struct soft_qp *qp);
void soft_qp_number_give_back(uint32_t number);

/* qp_ex.c */
struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

/* post.c */
int soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
int soft_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
/* Post the whole chain, or nothing if a request is refused, to which *bad_wr points then. */
enum soft_refusal soft_post_batch(struct soft_qp *qp, struct ibv_send_wr *wr,
				  struct ibv_send_wr **bad_wr);

/* cqe.c: work completions */
void soft_complete_send(struct soft_qp *qp,
			enum ibv_wc_status status); /* completes the oldest request */
void soft_complete_receive(struct soft_qp *qp, enum ibv_wc_status status, uint32_t byte_len);
/* Complete the oldest request or receive with an error of its own. */
void soft_fail_send(struct soft_qp *qp, enum ibv_wc_status status);
void soft_fail_receive(struct soft_qp *qp, enum ibv_wc_status status);
void soft_complete_datagram(struct soft_qp *qp, const struct soft_datagram *datagram,
			    uint32_t byte_len);
void soft_flush_sends(struct soft_qp *qp);
void soft_flush(struct soft_qp *qp);

/* Convert bytes [offset, offset + length) of a list of SGEs to iovecs. Returns their number, or -1
 * (scatter.c). */
int soft_sge_walk(const struct ibv_pd *pd, const struct ibv_sge *sges, uint32_t num_sge,
		  uint64_t offset, uint32_t length, unsigned rights, struct iovec *iov, int room);

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
/* Execute a bind or an invalidation. Returns false if it has to wait or has failed. `reads` is the
 * number of unanswered READs and atomics before it. */
bool soft_send_carry_out(struct soft_qp *qp, struct soft_send_wqe *send, uint32_t reads);
/* Execute the local requests that are next, and complete those that are oldest. Fail the oldest
 * request if it cannot be transmitted. */
void soft_send_settle(struct soft_qp *qp);
/* Complete executed local requests that have become the oldest. */
void soft_send_pass(struct soft_qp *qp);
/* Fail the oldest request together with the queue pair. */
void soft_send_fail(struct soft_qp *qp, enum ibv_wc_status status);
