/* Queue pairs: their queues, their state machine, work completions; shared receive queues. */
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
			uint8_t arguments[SOFT_ATOMIC_ARGUMENTS]; /* as they go on the wire */
			uint32_t remote_srqn; /* XRC */
			uint8_t flush; /* FLUSH: types and level as they go on the wire */
		};
		struct soft_bind bind;
	};
	uint32_t rkey; /* BIND_MW: the window's next one; *_INV: that which shall end */
	uint32_t psn; /* its first one, as in soft_send_queue */
	uint32_t psns; /* how many it has */
	uint32_t immediate; /* network order */
	uint32_t length;
	uint32_t request; /* its number in the trace, or 0 */
	uint8_t opcode; /* enum ibv_wr_opcode */
	uint8_t flags; /* enum ibv_send_flags */
	uint8_t num_sge;
	uint8_t status; /* enum ibv_wc_status: why it cannot be sent, known before its turn */
	bool local; /* BIND_MW, LOCAL_INV: the peer never hears of it, so it has no PSN */
	bool done; /* a local one that has been carried out */
};

/* Where it goes: UD. */
struct soft_destination {
	struct soft_ud_address path;
	uint32_t qpn;
	uint32_t qkey; /* as in the request */
};

/* Indices count up for ever; a slot is index & mask.  So do the PSNs here: on the wire they have 24
 * bits. */
struct soft_send_queue {
	struct soft_send_wqe *slots;
	uint8_t *lists; /* for each slot: its SGEs, or its inline data in their place */
	struct soft_destination *destinations; /* UD: one for each slot */
	uint32_t mask;
	uint32_t oldest; /* not completed */
	uint32_t next; /* to be transmitted... */
	uint32_t tail; /* free */
	uint32_t next_psn; /* ...from this PSN on */
	uint32_t unacked; /* the first PSN that is not answered; it is the oldest request's */
	uint32_t unsent; /* the first PSN that was never transmitted */
	uint32_t psn; /* of the next request that is posted */
	uint32_t reads; /* transmitted and not answered, of those with soft_is_counted */
};

/* What a path that loses packets (path/roce/) lets a requester have under way, in PSNs. */
struct soft_window {
	uint32_t psns;
	uint32_t read_psns; /* the same where the answer to a READ is the last of it */
	void (*lost)(struct soft_window *window); /* and will be sent again */
	/* Where READ requests end that are under way and not the last ones of their READs. */
	uint32_t part_head, part_tail;
	uint32_t part_ends[SOFT_READ_PARTS];
};

struct soft_recv_wqe {
	uint64_t wr_id;
	uint64_t length; /* of all SGEs */
	uint32_t num_sge;
	uint32_t request; /* its number in the trace, or 0 */
};

/* Of a queue pair or shared.  That of a queue pair with a shared one has a single place, for the
 * receive that it has taken for the message under way. */
struct soft_receive_queue {
	struct soft_recv_wqe *slots;
	struct ibv_sge *sges; /* max_sge for each slot */
	uint32_t max_wr;
	uint32_t max_sge;
	uint32_t mask;
	uint32_t head;
	uint32_t tail;
};

/* A request with soft_is_counted that the responder has accepted and not wholly answered. */
struct soft_response {
	/* of what has not been sent yet */
	uint32_t psn;
	uint32_t length;
	uint64_t address;
	uint32_t rkey;
	uint32_t srq_num; /* XRC: as in the request */
	uint32_t msn; /* when it was accepted */
	uint8_t opcode; /* SOFT_READ_DATA or SOFT_ATOMIC_DATA */
	bool begun; /* some of it has been sent */
	bool again; /* to a request that came again, or that the peer may not count */
	bool refused; /* a NAK takes the place of the rest */
	union {
		struct {
			uint32_t kept_length;
			uint8_t *
				kept; /* of a READ: its bytes if they have been overwritten, or NULL */
		};
		uint8_t result[SOFT_ATOMIC_RESULT];
	};
};

enum { SOFT_KNOWN_EMPTY = 16 };

/* A READ or an atomic that was carried out, in case the request comes again. */
struct soft_known_read {
	uint32_t psn;
	uint32_t psns;
	uint32_t rkey;
	uint32_t uncounted; /* bytes of a READ whose answer has not been sent to its end yet */
	uint8_t opcode; /* SOFT_READ, or which atomic */
	uint8_t result[SOFT_ATOMIC_RESULT]; /* of an atomic */
};

struct soft_responder {
	uint32_t psn; /* expected next */
	uint32_t acked; /* last PSN acknowledged to the requester */
	uint32_t msn; /* messages completed */
	bool resend_wanted; /* a NAK is out: discard until the message comes again */
	bool failed; /* a NAK is out that ends the queue pair as soon as it has been sent */
	/* the message under way, of which more frames are to come */
	bool active;
	bool has_receive; /* it took the receive at the head of the queue */
	uint8_t opcode;
	uint8_t flags; /* of its last frame so far */
	uint32_t first; /* its first PSN */
	uint32_t dma_length;
	uint32_t rkey; /* of a WRITE; or that which a SEND ends */
	uint64_t address;
	uint32_t immediate;
	uint32_t srq_num; /* XRC: of the shared receive queue that it names */
	/* answers, in the order of the requests */
	struct soft_response *responses;
	uint32_t response_mask;
	uint32_t response_head;
	uint32_t response_tail;
	uint32_t kept; /* bytes of READs, in all: read_order.c */
	struct soft_known_read *known; /* the last ones; as many as there are responses */
	uint32_t known_count;
	uint32_t empty[SOFT_KNOWN_EMPTY]; /* PSNs of the last empty READs, for the same reason */
	uint32_t empty_count;
};

/* A frame on its way out; what sending it means for the queue pair is done when the path has it
 * (`commit`), because frames that do not fit are built anew later. */
struct soft_tx_packet {
	struct soft_frame frame;
	uint32_t index; /* requester: slot of the send queue; responder: of the responses */
	bool by_cma; /* a descriptor in place of its payload */
	bool answer; /* the responder's, in the order of its responses */
};

enum soft_link_state {
	SOFT_LINK_CONNECTING, /* waits to be tried again */
	SOFT_LINK_HANDSHAKE, /* HELLO or HELLO_ACK is awaited */
	SOFT_LINK_HELD, /* a HELLO whose queue pair is not in RTR yet */
	SOFT_LINK_SELECTING, /* the CM's stream is there, but a channel may take its place */
	SOFT_LINK_UP,
	SOFT_LINK_CLOSING, /* what is owed and DISCONNECT wait for room */
	SOFT_LINK_DEAD,
};

/* A link as its queue pair knows it; struct soft_link (link/) has the rest. */
struct soft_qp_link {
	enum soft_link_state state;
	struct soft_deferred output;
	bool loses; /* frames get lost or doubled, here or there */
	bool loses_pending; /* LOSES is to be sent */
	bool blocked; /* waits for room in its path */
	/* at most one NAK is ever waiting: the responder takes nothing in after it */
	uint8_t nak_opcode; /* 0: none */
	uint8_t nak_syndrome;
	uint32_t nak_psn;
};

/* There may be something to send. */
static inline void soft_qp_link_output(struct soft_qp_link *link)
{
	if (link->state == SOFT_LINK_UP && !link->blocked)
		soft_defer(&link->output);
}

struct soft_transport;
struct soft_xrcd;

struct soft_qp {
	union { /* each begins as the one before; all are whole if there is a batch */
		struct ibv_qp ibv;
		struct ibv_qp_ex ex;
		struct ibv_qp_ex_newer newer;
	};
	struct soft_batch *batch; /* wr.c: of the wr_* calls; NULL if they are not wanted */
	struct soft_node of_context;
	struct ibv_qp_attr attr;
	struct ibv_qp_cap cap;
	bool sq_sig_all;
	bool block_own; /* UD: what it sends to a group does not come back to it */
	bool stream_from_cm; /* the connection manager has its stream, or had */
	bool stream_lost; /* there will be none any more: nothing can be sent */
	bool ends_with_peer; /* aiordma_device_calls.end_with_peer */
	bool no_peer; /* UC: there is no peer, so what is sent is lost at once */
	bool communicated; /* the first request has been seen (COMM_EST) */
	bool draining; /* SQD was asked for, requests are still under way */
	const struct soft_transport *transport;
	struct soft_xrcd *xrcd; /* XRC_RECV: its domain; else NULL */
	uint32_t taken_from; /* and the number of the shared queue that the receive in `rq` is of */
	struct soft_qp_link *link; /* or NULL */
	struct soft_send_queue sq;
	struct soft_receive_queue rq;
	struct soft_responder responder;
	struct aiordma_served *served; /* NULL until count_served is called */
	uint8_t rnr_left; /* retries; 7 means for ever */
	bool rnr_refused; /* since a request was completed */
	bool rnr_waiting;
	struct soft_window *window; /* of its path; NULL: there is no bound */
	struct soft_timer rnr_timer;
	uint8_t retries_left; /* of req_retransmit.c */
	bool answer_missed; /* later answers do not ask for it again; until something is answered */
	struct soft_timer retry_timer;
	struct soft_timer
		reach_timer; /* requests wait for a stream, for the socket, or for an answer
					* that cannot come */
	struct soft_node attachments; /* multicast.c */
	void (*link_down)(struct soft_qp *qp, void *owner, int error);
	void *link_owner;
	uint32_t async_events_taken; /* under ibv.mutex */
};

static inline bool soft_qp_is_uc(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_UC;
}

static inline bool soft_qp_is_ud(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_UD;
}

/* XRC (IBTA annex A14): one side of a connection requests, the other one answers. */
static inline bool soft_is_xrc(enum ibv_qp_type type)
{
	return type == IBV_QPT_XRC_SEND || type == IBV_QPT_XRC_RECV;
}

static inline bool soft_qp_is_reliable(const struct soft_qp *qp)
{
	return qp->ibv.qp_type == IBV_QPT_RC || soft_is_xrc(qp->ibv.qp_type);
}

/* Does it send requests that are answered, and does it answer those of its peer? */
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

/* In the half of the circle behind: IBTA 9.7.4.1.2. */
static inline bool soft_psn_before(uint32_t psn, uint32_t other)
{
	return ((psn - other) & SOFT_PSN_MASK) >= SOFT_PSN_HALF;
}

/* PSNs count units of the path MTU, which is, of UD and from RTR on, the longest message. */
static inline uint32_t soft_mtu_shift(const struct soft_qp *qp)
{
	return 7u + qp->attr.path_mtu; /* enum ibv_mtu: 1 is 256 */
}

/* How many PSNs so many bytes have: IBTA 9.7.1. */
static inline uint32_t soft_psns(const struct soft_qp *qp, uint32_t length)
{
	return length ? ((length - 1) >> soft_mtu_shift(qp)) + 1 : 1;
}

/* Where the bytes of that PSN are in a message that begins with `first`. */
static inline uint64_t soft_place_of(const struct soft_qp *qp, uint32_t psn, uint32_t first)
{
	return (uint64_t)((psn - first) & SOFT_PSN_MASK) << soft_mtu_shift(qp);
}

/* Is this as much as a frame in the middle of a message has, or at its end? */
static inline bool soft_is_whole_or_last(const struct soft_qp *qp, const struct soft_frame *frame)
{
	if (soft_is_last(frame))
		return frame->length || soft_is_first(frame);
	return frame->length && !(frame->length & ((1u << soft_mtu_shift(qp)) - 1));
}

/* A frame that begins before the expected PSN and ends behind it, because it is sent again and was
 * cut elsewhere: the bytes that have come are skipped.  False: nothing of it is new. */
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

/* Bytes of what each slot has in `lists`, whose SGEs have to be aligned: as inline_room has it,
 * there is always room for all of them. */
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

/* Is it answered with data? */
static inline bool soft_send_is_read(const struct soft_send_wqe *send)
{
	return send->opcode == IBV_WR_RDMA_READ || send->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
	       send->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* Or as a READ of nothing is (IBTA annex A19)? */
static inline bool soft_send_is_empty_read(const struct soft_send_wqe *send)
{
	return send->opcode == IBV_WR_FLUSH || send->opcode == IBV_WR_ATOMIC_WRITE;
}

/* Is its frame one with soft_is_counted? */
static inline bool soft_send_is_counted(const struct soft_send_wqe *send)
{
	return soft_send_is_read(send) || soft_send_is_empty_read(send);
}

/* Of the message in that slot, or of the first one after it. */
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
/* Why a call that posts returns an error: the name in a trace, which REASONS of
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

/* Slots for that many requests: a power of two, because the indices count up and wrap as 32 bits. */
uint32_t soft_slots_for(uint32_t count);
/* Zero or an errno value. */
int soft_receive_queue_create(struct soft_receive_queue *rq, struct ibv_pd *pd, uint32_t max_wr,
			      uint32_t max_sge);
void soft_receive_queue_destroy(struct soft_receive_queue *rq);
/* Those of the list up to the first that is refused, which *wr is then. */
enum soft_refusal soft_receive_queue_post(struct soft_receive_queue *rq, struct ibv_recv_wr **wr);
/* Move the first one of `from` to the end of `to`, which has room for it. */
void soft_receive_queue_move(struct soft_receive_queue *from, struct soft_receive_queue *to);

/* ---- srq.c: shared receive queues ---------------------------------------------------------- */

struct soft_srq {
	struct ibv_srq ibv;
	struct soft_receive_queue rq;
	uint32_t limit; /* 0: not armed */
	unsigned users; /* queue pairs */
	struct soft_xrcd *xrcd; /* XRC: its domain; else NULL */
	struct ibv_cq *cq; /* where its receives complete */
	uint32_t number; /* by which requests name it */
	uint32_t async_events_taken; /* under ibv.mutex */
};

static inline struct soft_srq *soft_srq_of(struct ibv_srq *srq)
{
	return soft_container(srq, struct soft_srq, ibv);
}

int soft_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
struct ibv_srq *soft_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr);
int soft_get_srq_num(struct ibv_srq *srq, uint32_t *srq_num);

/* A message needs a receive: is there one at the head of the queue pair's own queue, or can one be
 * taken from the shared one (which no other queue pair will then get)? */
bool soft_receive_ready(struct soft_qp *qp);

struct soft_qp *soft_qp_of(struct ibv_qp *qp);

/* The queue pair of this device with that number, or NULL (an application may make and move its
 * queue pairs itself and give the CM only the number). */
struct soft_qp *soft_qp_find(uint32_t qp_num);

/* Called once when an adopted stream is gone: `error` is 0 when the other side (or we) ended it in
 * an orderly way, else an errno value.  Not called after soft_qp_on_link_down(qp, NULL, NULL), nor
 * once the queue pair is destroyed or reset. */
void soft_qp_on_link_down(struct soft_qp *qp,
			  void (*link_down)(struct soft_qp *qp, void *owner, int error),
			  void *owner);

/* Orderly end: the queue pair goes to ERR (everything is flushed), the other side is told, and
 * link_down follows once it has closed its end, at the latest after two seconds.  Returns 0, or
 * ENOTCONN when there is no stream. */
int soft_qp_disconnect(struct soft_qp *qp);

/* The body of ibv_modify_qp(3), for callers that hold the lock.  has_route: the kernel is not asked for a
 * route to the peer. */
int soft_modify_qp_locked(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask,
			  bool has_route);

/* qp.c */
/* ibv_create_qp(3) in a protection domain, or XRC_RECV in a domain of XRC; else that is NULL. */
struct ibv_qp *soft_qp_create(struct ibv_context *context, struct ibv_pd *pd,
			      struct soft_xrcd *xrcd, struct ibv_qp_init_attr *attr);
int soft_queues_create(struct soft_qp *qp);
void soft_queues_destroy(struct soft_qp *qp);
void soft_queues_reset(struct soft_qp *qp);
void soft_qp_enter_reset(struct soft_qp *qp);
/* To ERR: flush both queues in order, end the stream.  Safe to repeat. */
void soft_qp_error(struct soft_qp *qp);
/* To SQE: flush the send queue. */
void soft_qp_send_error(struct soft_qp *qp);
void soft_qp_event(struct soft_qp *qp, enum ibv_event_type type);
/* Send what may be sent now, or see to it that there will be a stream. */
void soft_qp_kick(struct soft_qp *qp);
/* The port is down: the queue pair and its peer give each other up when their retries are over. */
void soft_qp_stall(struct soft_qp *qp);
/* aiordma_device_calls.end_with_peer */
void soft_qp_end_with_peer(struct ibv_qp *qp);
/* served.c: aiordma_device_calls.count_served, release_served and exclude_from_served */
const struct aiordma_served *soft_qp_count_served(struct ibv_qp *qp);
void soft_served_release(const struct aiordma_served *served);
void soft_exclude_from_served(uint32_t rkey);
/* Returns whether reads of the memory with that key are counted on the queue pair. */
bool soft_counts_reads_of(const struct soft_qp *qp, uint32_t rkey);
/* Count bytes that the peer has read or written. */
void soft_count_read(struct soft_qp *qp, uint64_t bytes);
void soft_count_written(struct soft_qp *qp, uint64_t bytes);
/* The stream of a queue pair is gone. */
void soft_qp_link_gone(struct soft_qp *qp, int error);
void soft_qp_check_drained(struct soft_qp *qp);
/* How long it waits for an answer, all retries counted, in ns: IBTA 9.7.6.1.3. */
uint64_t soft_qp_retry_time(const struct soft_qp *qp);

/* qp_numbers.c */
/* A number for the queue pair, which is found by it from now on; 0 or an errno value: EADDRINUSE if
 * there is no port for the process. */
int soft_qp_number_take(struct soft_qp *qp);
void soft_qp_number_give_back(uint32_t number);

/* qp_ex.c */
struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

/* post.c */
int soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
int soft_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
/* All of the chain, or, when one of it is refused, which is *bad_wr then, nothing. */
enum soft_refusal soft_post_batch(struct soft_qp *qp, struct ibv_send_wr *wr,
				  struct ibv_send_wr **bad_wr);

/* cqe.c: work completions */
void soft_complete_send(struct soft_qp *qp, enum ibv_wc_status status); /* the oldest one */
void soft_complete_receive(struct soft_qp *qp, enum ibv_wc_status status, uint32_t byte_len);
/* The oldest one, with an error that is its own. */
void soft_fail_send(struct soft_qp *qp, enum ibv_wc_status status);
void soft_fail_receive(struct soft_qp *qp, enum ibv_wc_status status);
void soft_complete_datagram(struct soft_qp *qp, const struct soft_datagram *datagram,
			    uint32_t byte_len);
void soft_flush_sends(struct soft_qp *qp);
void soft_flush(struct soft_qp *qp);

/* scatter.c: walk a list of SGEs.  Bytes [offset, offset + length) as iovecs; their number, or -1.
 */
int soft_sge_walk(const struct ibv_pd *pd, const struct ibv_sge *sges, uint32_t num_sge,
		  uint64_t offset, uint32_t length, unsigned rights, struct iovec *iov, int room);

/* Was something of that request ever transmitted? */
static inline bool soft_send_has_begun(const struct soft_qp *qp, const struct soft_send_wqe *send)
{
	return (int32_t)(qp->sq.unsent - send->psn) > 0;
}

static inline bool soft_oldest_has_begun(const struct soft_qp *qp)
{
	return qp->sq.oldest != qp->sq.tail &&
	       soft_send_has_begun(qp, soft_send_at(qp, qp->sq.oldest));
}

/* send_queue.c: requests that are carried out or fail on this side */
/* Bind or invalidate, when its turn has come; false: it has not, or that has failed.  `reads`:
 * READs and atomics before it that are not answered. */
bool soft_send_carry_out(struct soft_qp *qp, struct soft_send_wqe *send, uint32_t reads);
/* Carry out the local requests that are next, and complete those that are the oldest; fail the
 * oldest request if it cannot be transmitted. */
void soft_send_settle(struct soft_qp *qp);
/* Complete local requests that were carried out and have nothing before them any more. */
void soft_send_pass(struct soft_qp *qp);
/* The oldest request fails, and with it the queue pair. */
void soft_send_fail(struct soft_qp *qp, enum ibv_wc_status status);
