/* The objects behind the verbs: what the application sees of each is its first member.
 *
 * Everything here is under the engine's lock, but for the members that say otherwise.
 */
#ifndef AIORDMA_SOFT_OBJECTS_H
#define AIORDMA_SOFT_OBJECTS_H

#include "engine/engine.h"
#include "frame.h"

struct iovec;
struct soft_qp;

/* What the device offers; ibv_query_device(3) tells it, the create calls hold to it. */
enum {
	SOFT_MAX_QP = 65536,
	SOFT_MAX_QP_WR = 16384,
	SOFT_MAX_SRQ_WR = 65536,
	SOFT_MAX_SGE = 32,
	SOFT_MAX_INLINE = 512,
	SOFT_MAX_CQE = 1 << 20,
	SOFT_MAX_RD_ATOMIC = 128,
	SOFT_MAX_OBJECTS = 1 << 20, /* PDs, CQs, MRs, MWs, SRQs */
	SOFT_COMP_VECTORS = 1,
	SOFT_MAX_AH = 65536,
	SOFT_MAX_MCAST_GRP = 256,
	SOFT_MAX_MCAST_QP = 256,       /* in one group */
	SOFT_MAX_MCAST_ATTACH = 16384, /* in all */
};
#define SOFT_MAX_MESSAGE (1u << 31)

/* ---- table.c: 32-bit numbers to objects ---------------------------------------------------- */

struct soft_table {
	struct soft_table_slot {
		uint32_t key; /* 0: empty */
		void *object;
	} *slots;
	uint32_t capacity; /* a power of two, or 0 */
	uint32_t count;
};

void *soft_table_find(const struct soft_table *table, uint32_t key);
/* Under a new random key from 1 to `mask`; 0 or an errno value. */
int soft_table_add(struct soft_table *table, void *object, uint32_t mask, uint32_t *key);
void soft_table_remove(struct soft_table *table, uint32_t key);

/* ---- device.c, pd.c ------------------------------------------------------------------------ */

struct soft_context {
	struct verbs_context extended; /* the application's pointer is to its last member */
	unsigned fork_generation; /* of the engine that it holds */
	bool closed;
	/* of the connection manager, or NULL: nothing but its own PD is left; without the lock */
	void (*only_pd_left)(void);
	unsigned children; /* objects that point here; the last one frees a closed context */
	struct soft_channel async;
	struct soft_node async_events;
	struct soft_node qps;
	struct soft_node of_device; /* port.c: every one that is open */
	bool fatal;                 /* the device has failed: nothing works here any more */
};

struct soft_pd {
	struct ibv_pd ibv;
	unsigned users;
	/* of a parent domain: */
	struct soft_pd *of; /* the domain that it stands for */
	struct soft_td *td;
};

/* What is compared: a parent domain and that which it was made of are the same one. */
static inline const struct ibv_pd *soft_pd_root(const struct ibv_pd *ibv)
{
	const struct soft_pd *pd = soft_container(ibv, struct soft_pd, ibv);

	return pd->of ? &pd->of->ibv : ibv;
}

static inline struct soft_context *soft_context_of(struct ibv_context *context)
{
	return soft_container(context, struct soft_context, extended.context);
}

/* Is this the child of a fork, and the context its parent's?  What hangs on that may only be dropped
 * (ibv_fork_init(3)): threads that are not here may hold its locks, or owe acknowledgements. */
static inline bool soft_context_inherited(const struct soft_context *context)
{
	return context->fork_generation != soft_engine_fork_generation();
}

/* Release frees a closed context with its last child, after unlocking: so it is called without the
 * lock. */
void soft_context_hold(struct soft_context *context);
void soft_context_release(struct soft_context *context);

/* Make a zeroed or stopped struct an open context, and the reverse; not under the lock. */
int soft_context_start(struct soft_context *context, struct ibv_device *of);
void soft_context_stop(struct soft_context *context);

/* ---- gid.c --------------------------------------------------------------------------------- */

struct soft_gid {
	union ibv_gid gid;
	uint32_t ifindex;
};

/* The entry at an index; 0 or EINVAL. */
int soft_gid_at(int index, struct soft_gid *gid);
int soft_gid_count(void);
bool soft_gid_refresh(void); /* read the host's addresses again; has anything changed? */
void soft_gid_forget(void);
int soft_gid_index(const union ibv_gid *gid); /* -1: not of this host */
/* The source at an index, if packets can go from there to `to`: not between IPv4 and IPv6. */
int soft_gid_source(int index, const union ibv_gid *to, struct soft_gid *gid);
bool soft_gid_is_local(const union ibv_gid *gid); /* one of ours */
/* One of ours, or any of 127.0.0.0/8: a Debian finds itself at 127.0.1.1, which no interface has. */
bool soft_gid_is_of_host(const union ibv_gid *gid);
bool soft_gid_is_multicast(const union ibv_gid *gid);
/* The interface that a link-local address is on, as seen from our entry `own`; else 0. */
uint32_t soft_gid_scope(const union ibv_gid *gid, const union ibv_gid *own);
/* The socket address that a GID stands for, as seen from there; port in host order.  Returns its
 * length. */
socklen_t soft_gid_address(const union ibv_gid *gid, const union ibv_gid *own, uint16_t port,
			   struct sockaddr_storage *address);
enum {
	SOFT_GID_LOOPBACK = 0
}; /* its index */
extern const union ibv_gid soft_gid_loopback;

/* ---- port.c: what can happen to the device and its port ------------------------------------ */

/* An open context is told; not under the lock. */
void soft_port_attach(struct soft_context *context);
void soft_port_detach(struct soft_context *context);
bool soft_port_is_down(void);
/* The addresses of the host have changed, or may have. */
void soft_port_addresses(void);
/* Messages that came with a wrong Q_Key: ibv_query_port(3). */
extern uint32_t soft_port_bad_qkeys;
extern const struct soft_subsystem soft_port_subsystem;

/* addresses.c: calls soft_port_addresses when the kernel says so, from one call to the other */
void soft_addresses_watch(void);
void soft_addresses_unwatch(void);

/* ---- async.c: asynchronous events of a context --------------------------------------------- */

/* Queue an event; element is the CQ, QP or port it is about. */
void soft_async_event(struct soft_context *context, const struct ibv_async_event *event);
/* Forget those that the application has not taken yet, before their object goes. */
void soft_async_forget(struct soft_context *context, const void *element);
/* Wait, without the lock, until the application has acknowledged all events that it has taken of an
 * object, whose members these are: ibv_get_async_event(3), ibv_get_cq_event(3). */
void soft_async_wait(const struct soft_context *context, pthread_mutex_t *mutex,
		     pthread_cond_t *cond, const uint32_t *acknowledged, const uint32_t *taken);

/* ---- keys.c: what opens memory ------------------------------------------------------------- */

/* Memory that a key opens: a registered region, or the part of one that a window is bound to.  The
 * upper 24 bits of a key say which one it is; the lower eight are part of the secret, and change
 * with every bind of a window. */
struct soft_range {
	uint32_t key;
	bool window; /* its key is good for remote access only */
	bool bound; /* window: it opens anything at all */
	bool on_demand; /* pages are asked for when they are needed */
	bool null; /* no memory: zeros to read, and nothing kept of what is written */
	unsigned access; /* enum ibv_access_flags, SOFT_ACCESS_CMA */
	uint32_t qp_num; /* window of type 2B: of the only queue pair it is for; else 0 */
	const struct ibv_pd *pd;
	uint8_t *memory;
	uint64_t start; /* the address that stands for `memory` in work requests */
	uint64_t length;
};

/* A right beside those of enum ibv_access_flags: it is memory like any other, of which another process
 * can copy. */
#define SOFT_ACCESS_CMA (1u << 31)

/* Give it a random key; 0 or an errno value. */
int soft_range_add(struct soft_range *range);
void soft_range_remove(struct soft_range *range);
/* By the upper 24 bits, or NULL: the window whose next key this might be. */
struct soft_range *soft_range_at(uint32_t key);
/* By the whole key, or NULL. */
struct soft_range *soft_range_find(uint32_t key);
/* Are `length` bytes at `address` inside?  Without an overflow, whatever the numbers. */
bool soft_range_holds(const struct soft_range *range, uint64_t address, uint64_t length);

/* May `length` bytes at `address` be used?  Not if the key does not exist, belongs to another PD,
 * lacks one of the rights, or does not reach that far. */
bool soft_memory_allowed(uint32_t lkey, const struct ibv_pd *pd, uint64_t address, uint64_t length,
			 unsigned rights);
/* The same for a request of the queue pair's peer. */
bool soft_remote_allowed(const struct soft_qp *qp, uint32_t rkey, uint64_t address, uint64_t length,
			 unsigned right);
/* Where they are, or NULL if that is not allowed (or on demand and not there); at most
 * SOFT_FRAME_MAX.  Valid until the lock is given back.  Of an SGE, which must be allowed as a whole,
 * the part at `offset`. */
void *soft_sge_memory(const struct ibv_sge *sge, const struct ibv_pd *pd, uint32_t offset,
		      uint32_t length, unsigned rights);
void *soft_remote_memory(const struct soft_qp *qp, uint32_t rkey, uint64_t address, uint64_t length,
			 unsigned right);

/* ---- pages.c ------------------------------------------------------------------------------- */

/* Bring the pages into memory, with that right; 0, or an errno value: EFAULT when there are none.
 * Where the kernel cannot do that for us it is 0. */
int soft_pages_fault(const void *memory, size_t length, bool writable);
bool soft_pages_can_fault(void);

/* ---- mr.c ---------------------------------------------------------------------------------- */

struct soft_mr {
	struct ibv_mr ibv;
	struct soft_range range;
	unsigned windows; /* bound to it */
	bool fixed; /* there is no address of the application behind it: not for rereg_mr */
	bool closed; /* rereg_mr has failed: its keys open nothing */
	struct soft_dm *dm;
	void *mapping; /* ours, of a dma-buf */
	size_t mapped;
};

/* Copy it, give it keys; the region that the application knows, or NULL and errno. */
struct ibv_mr *soft_mr_register(struct ibv_pd *pd, const struct soft_mr *mr);
/* Which flags can go together: 0 or an errno value; the optional ones are taken out. */
int soft_mr_access(unsigned *access, unsigned allowed);

/* ---- mw.c: memory windows ------------------------------------------------------------------ */

struct soft_send_wqe;

/* A bind as it waits in the send queue.  Keys and not pointers: region and window may be gone when
 * its turn comes. */
struct soft_bind {
	uint32_t window;
	uint32_t region;
	uint64_t address;
	uint64_t length;
	unsigned access;
};

struct ibv_mw *soft_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int soft_dealloc_mw(struct ibv_mw *mw);
int soft_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
/* An IBV_WR_BIND_MW becomes a slot of the send queue; 0 or an errno value. */
int soft_bind_prepare(struct soft_send_wqe *send, const struct ibv_send_wr *wr);
/* Carry it out; false if that may not be. */
bool soft_bind(const struct soft_qp *qp, const struct soft_send_wqe *send);
/* The window of type 2 that has this key opens nothing any more; false if the queue pair has no
 * such window. */
bool soft_invalidate(const struct soft_qp *qp, uint32_t rkey);

/* ---- comp_channel.c, cq.c ------------------------------------------------------------------ */

struct soft_comp_channel {
	struct ibv_comp_channel ibv;
	struct soft_channel channel;
	pthread_mutex_t mutex; /* protects what follows; taken inside a CQ's lock */
	struct soft_node ready; /* CQs with events that have not been taken */
	bool any; /* atomic: are there?  Read without the mutex: a hint */
};

enum soft_armed {
	SOFT_UNARMED,
	SOFT_ARMED_SOLICITED,
	SOFT_ARMED
};

/* When a completion came: CLOCK_MONOTONIC, which is the device's clock, and CLOCK_REALTIME. */
struct soft_stamp {
	uint64_t clock_ns;
	uint64_t wallclock_ns;
};

struct soft_cq {
	union { /* one begins as the other; `ex` is whole if made by create_cq_ex */
		struct ibv_cq ibv;
		struct ibv_cq_ex ex;
	};
	pthread_mutex_t lock; /* protects the ring, `armed` and the moderation */
	struct ibv_wc *ring;
	struct soft_stamp *stamps; /* of what is in the ring, if the CQ tells the times */
	uint32_t capacity;
	uint32_t first;
	uint32_t count; /* also read without the lock, to see that it is empty */
	enum soft_armed armed;
	bool just_armed; /* atomic */
	unsigned empty_polls; /* atomic */
	bool overrun;
	bool ignore_overrun; /* the oldest completions are lost, and nothing is said */
	unsigned users; /* send and receive queues that complete here */
	struct soft_deferred overrun_work;
	struct ibv_moderate_cq moderation;
	uint32_t held_back; /* completions that would have made an event but for the moderation */
	struct soft_timer moderation_timer;
	struct soft_cq_reader *reader; /* cq_ex.c; NULL if made by create_cq */
	/* under the comp channel's mutex: */
	struct soft_node ready_node;
	uint32_t events_waiting;
	uint32_t events_taken;
	/* under ibv.mutex: */
	uint32_t async_events_taken;
};

static inline struct soft_cq *soft_cq_of(struct ibv_cq *cq)
{
	return soft_container(cq, struct soft_cq, ibv);
}

/* A completion queue that is not published yet, or NULL and errno; `stamped`: with timestamps.  The
 * application knows it from soft_cq_publish on. */
struct soft_cq *soft_cq_make(struct ibv_context *context, int cqe, struct ibv_comp_channel *channel,
			     int comp_vector, bool stamped);
void soft_cq_publish(struct soft_cq *cq, void *cq_context);
/* Take up to `room` completions, with their times if wanted; their number, or -1 for a CQ that has
 * overflowed.  Does a step of the device's work if there are none. */
int soft_cq_take(struct soft_cq *cq, int room, struct ibv_wc *wc, struct soft_stamp *stamps);
int soft_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
/* Add a completion; false when it is lost, because the queue has overflowed.  `solicited` as in
 * ibv_req_notify_cq(3). */
bool soft_cq_push(struct soft_cq *cq, const struct ibv_wc *wc, bool solicited);
/* Take back completions of a queue pair that the application has not polled. */
void soft_cq_forget(struct soft_cq *cq, uint32_t qp_num);
int soft_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
int soft_req_notify_cq(struct ibv_cq *cq, int solicited_only);

void soft_comp_channel_event(struct soft_comp_channel *channel, struct soft_cq *cq);
void soft_comp_channel_forget(struct soft_comp_channel *channel, struct soft_cq *cq);

/* ---- datagrams ----------------------------------------------------------------------------- */

enum {
	SOFT_DATAGRAM_MAX = 4096, /* of the message: the port's MTU (IBTA 9.8.3) */
	SOFT_GRH = 40, /* what a receive begins with */
	SOFT_TRAFFIC_FLOW = (1 << 28) - 1,
};

enum soft_datagram_flag {
	SOFT_DATAGRAM_IMMEDIATE = 1 << 0,
	SOFT_DATAGRAM_SOLICITED = 1 << 1,
};

struct soft_datagram {
	union ibv_gid source;
	union ibv_gid destination;
	uint32_t to;
	uint32_t from;
	uint32_t qkey;
	uint32_t immediate; /* network order */
	uint32_t traffic_flow; /* class << 20 | label */
	uint16_t lid; /* not in the header: of the sender's process */
	uint8_t flags;
	uint8_t sl;
	uint8_t hop_limit;
};

/* Where a UD message goes: what an address handle stands for (ah.c). */
struct soft_ud_address {
	union ibv_gid source;
	union ibv_gid destination;
	uint32_t traffic_flow;
	uint32_t ifindex; /* of the source GID */
	uint16_t lid;
	uint8_t sl;
	uint8_t hop_limit;
};

/* ---- ah.c: address handles ----------------------------------------------------------------- */

struct soft_ah {
	struct ibv_ah ibv;
	struct soft_ud_address path;
};

static inline struct soft_ah *soft_ah_of(struct ibv_ah *ah)
{
	return soft_container(ah, struct soft_ah, ibv);
}

/* ---- queue pairs --------------------------------------------------------------------------- */

/* A work request in the send queue. */
struct soft_send_wqe {
	uint64_t wr_id;
	uint64_t remote_address;
	union {
		uint8_t arguments[SOFT_ATOMIC_ARGUMENTS]; /* as they go on the wire */
		struct soft_bind bind;
	};
	uint32_t rkey; /* BIND_MW: the window's next one; *_INV: that which shall end */
	uint32_t sequence; /* messages before it: its PSN, counted from the queue pair's first */
	uint32_t immediate; /* network order */
	uint32_t length;
	uint32_t received; /* READ: bytes of the answer so far */
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

/* Indices count up for ever; a slot is index & mask. */
struct soft_send_queue {
	struct soft_send_wqe *slots;
	uint8_t *lists; /* for each slot: its SGEs, or its inline data in their place */
	struct soft_destination *destinations; /* UD: one for each slot */
	uint32_t mask;
	uint32_t oldest; /* not completed */
	uint32_t next; /* to be transmitted... */
	uint32_t next_offset; /* ...from here on */
	uint32_t begun; /* nothing of this one and those after it was ever transmitted */
	uint32_t tail; /* free */
	uint32_t reads; /* READs and atomics transmitted and not answered */
	uint32_t resumed; /* of the oldest: the farthest gap that the responder has told of */
	uint32_t sequence; /* messages posted */
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

/* A READ or an atomic that the responder has accepted and not wholly answered. */
struct soft_response {
	uint32_t psn;
	uint32_t rkey;
	uint64_t address;
	uint32_t total;
	uint8_t opcode; /* SOFT_READ_DATA or SOFT_ATOMIC_DATA */
	uint8_t result[SOFT_ATOMIC_RESULT];
};

/* What an atomic has answered, in case that it is asked again. */
struct soft_atomic_answer {
	uint32_t psn;
	uint8_t result[SOFT_ATOMIC_RESULT];
};

struct soft_responder {
	uint32_t psn; /* expected next */
	uint32_t acked; /* last PSN told to the requester */
	bool resend_wanted; /* a NAK is out: discard until the message comes again */
	bool failed; /* a NAK is out that ends the queue pair as soon as it has been sent */
	/* the message under way, of which more frames are to come */
	bool active;
	bool has_receive; /* it took the receive at the head of the queue */
	uint8_t opcode;
	uint8_t flags;
	uint32_t total;
	uint32_t offset;
	uint32_t rkey;
	uint64_t address;
	uint32_t immediate;
	/* answers, in the order of the requests */
	struct soft_response *responses;
	uint32_t response_mask;
	uint32_t response_head;
	uint32_t response_offset; /* of the first one: what has been sent */
	uint32_t response_tail;
	struct soft_atomic_answer *atomics; /* the last ones; as many as there are responses */
	uint32_t atomics_done;
};

/* A frame on its way out; what sending it means for the queue pair is done when its last byte is
 * with the kernel (`commit`), because frames that do not fit are built anew later. */
struct soft_tx_packet {
	struct soft_frame frame;
	uint32_t index; /* requester: slot of the send queue; responder: of the responses */
	bool last; /* of its message */
	bool by_cma; /* a descriptor in place of its payload */
};

enum soft_link_state {
	SOFT_LINK_CONNECTING, /* connect() is under way, or waits to be tried again */
	SOFT_LINK_HANDSHAKE, /* HELLO or HELLO_ACK is awaited */
	SOFT_LINK_HELD, /* a HELLO whose queue pair is not in RTR yet */
	SOFT_LINK_SELECTING, /* the CM's stream is there, but a channel may take its place */
	SOFT_LINK_UP,
	SOFT_LINK_CLOSING, /* the last frames go out, then we wait for the other side's end */
	SOFT_LINK_DEAD,
};

/* A link as its queue pair knows it; struct soft_link (wire/) has the rest. */
struct soft_qp_link {
	enum soft_link_state state;
	struct soft_deferred output;
	bool lossy; /* frames get lost or doubled, here or there */
	bool lossy_pending; /* LOSSY is to be sent */
	bool blocked; /* waits for room on the wire */
	bool partial; /* `packet` has been sent in part */
	bool zero_fill; /* `packet` is not needed any more: zeros in place of what is left of it */
	struct soft_tx_packet packet;
	/* at most one NAK is ever waiting: the responder takes nothing in after it */
	uint8_t nak_opcode; /* 0: none */
	uint8_t nak_syndrome;
	uint32_t nak_psn;
	uint32_t nak_offset;
};

/* There may be something to send. */
static inline void soft_qp_link_output(struct soft_qp_link *link)
{
	if (link->state == SOFT_LINK_UP && !link->blocked)
		soft_defer(&link->output);
}

struct soft_transport;

struct soft_qp {
	union { /* one begins as the other; `ex` is whole if there is a batch */
		struct ibv_qp ibv;
		struct ibv_qp_ex ex;
	};
	struct soft_batch *batch; /* wr.c: of the wr_* calls; NULL if they are not wanted */
	struct soft_node of_context;
	struct ibv_qp_attr attr;
	struct ibv_qp_cap cap;
	bool sq_sig_all;
	bool block_own; /* UD: what it sends to a group does not come back to it */
	bool stream_from_cm; /* the address has dlid 0 */
	bool stream_lost; /* there was one, and it is gone: nothing can be sent any more */
	bool no_peer; /* UC: there is no peer, so what is sent is lost at once */
	bool communicated; /* the first request has been seen (COMM_EST) */
	bool draining; /* SQD was asked for, requests are still under way */
	const struct soft_transport *transport;
	struct soft_qp_link *link; /* or NULL */
	struct soft_send_queue sq;
	struct soft_receive_queue rq;
	struct soft_responder responder;
	uint8_t rnr_left; /* retries; 7 means for ever */
	bool rnr_waiting;
	struct soft_timer rnr_timer;
	uint8_t retries_left; /* on a lossy link: req_retransmit.c */
	bool answer_missed; /* and asked for again; until something is answered */
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

/* PSNs count messages, in 24 bits. */
static inline uint32_t soft_psn_add(uint32_t psn, uint32_t count)
{
	return (psn + count) & SOFT_PSN_MASK;
}

/* In the half of the circle behind: IBTA 9.7.4.1.2. */
static inline bool soft_psn_before(uint32_t psn, uint32_t other)
{
	return ((psn - other) & SOFT_PSN_MASK) >= 1u << 23;
}

static inline struct soft_send_wqe *soft_send_at(const struct soft_qp *qp, uint32_t index)
{
	return &qp->sq.slots[index & qp->sq.mask];
}

/* Bytes of what each slot has in `lists`, whose SGEs have to be aligned: as inline_room has it, there is
 * always room for all of them. */
static inline size_t soft_send_list_size(const struct soft_qp *qp)
{
	enum {
		ALIGNED = sizeof(uint64_t)
	};

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

/* Of the message in that slot, or of the first one after it. */
static inline uint32_t soft_send_psn(const struct soft_qp *qp, uint32_t index)
{
	return soft_psn_add(qp->attr.sq_psn, index == qp->sq.tail
						     ? qp->sq.sequence
						     : soft_send_at(qp, index)->sequence);
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

/* queues.c; zero or an errno value */
int soft_receive_queue_create(struct soft_receive_queue *rq, uint32_t max_wr, uint32_t max_sge);
void soft_receive_queue_destroy(struct soft_receive_queue *rq);
int soft_receive_queue_post(struct soft_receive_queue *rq, const struct ibv_recv_wr *wr);
/* Move the first one of `from` to the end of `to`, which has room for it. */
void soft_receive_queue_move(struct soft_receive_queue *from, struct soft_receive_queue *to);

/* ---- srq.c: shared receive queues ---------------------------------------------------------- */

struct soft_srq {
	struct ibv_srq ibv;
	struct soft_receive_queue rq;
	uint32_t limit; /* 0: not armed */
	unsigned users; /* queue pairs */
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

/* The domain whose keys the receives use: IBTA 10.2.9.1, the shared queue has one of its own. */
static inline struct ibv_pd *soft_receive_pd(const struct soft_qp *qp)
{
	return qp->ibv.srq ? qp->ibv.srq->pd : qp->ibv.pd;
}

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

/* The verbs calls take the lock themselves; these are their bodies for callers that hold it. */
int soft_modify_qp_locked(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask);

/* qp.c */
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
/* The stream of a queue pair is gone. */
void soft_qp_link_gone(struct soft_qp *qp, int error);
void soft_qp_check_drained(struct soft_qp *qp);
/* How long it waits for an answer, all retries counted, in ns: IBTA 9.7.6.1.3. */
uint64_t soft_qp_retry_time(const struct soft_qp *qp);

/* qp_ex.c */
struct ibv_qp *soft_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

/* post.c */
int soft_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
int soft_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
/* All of the chain, or, when one of it is refused, nothing; 0 or an errno value. */
int soft_post_batch(struct soft_qp *qp, struct ibv_send_wr *wr);

/* cqe.c: work completions */
void soft_complete_send(struct soft_qp *qp, enum ibv_wc_status status); /* the oldest one */
void soft_complete_receive(struct soft_qp *qp, enum ibv_wc_status status, uint32_t byte_len);
void soft_complete_datagram(struct soft_qp *qp, const struct soft_datagram *datagram,
			    uint32_t byte_len);
void soft_flush_sends(struct soft_qp *qp);
void soft_flush(struct soft_qp *qp);

/* scatter.c: walk a list of SGEs.  Bytes [offset, offset + length) as iovecs; their number, or -1. */
int soft_sge_walk(const struct ibv_pd *pd, const struct ibv_sge *sges, uint32_t num_sge,
		  uint64_t offset, uint32_t length, unsigned rights, struct iovec *iov, int room);

/* Was something of the oldest request ever transmitted? */
static inline bool soft_oldest_has_begun(const struct soft_qp *qp)
{
	return (int32_t)(qp->sq.begun - qp->sq.oldest) > 0;
}

/* send_queue.c: requests that are carried out or fail on this side */
/* Bind or invalidate, when its turn has come; false: it has not, or that has failed.  `reads`: READs and
 * atomics before it that are not answered. */
bool soft_send_carry_out(struct soft_qp *qp, struct soft_send_wqe *send, uint32_t reads);
/* Carry out the local requests whose turn has come, complete those whose turn to complete has come;
 * if the oldest request is one that cannot be transmitted, its turn to fail has come. */
void soft_send_settle(struct soft_qp *qp);
/* Complete local requests that were carried out and have nothing before them any more. */
void soft_send_pass(struct soft_qp *qp);
/* The oldest request fails, and with it the queue pair. */
void soft_send_fail(struct soft_qp *qp, enum ibv_wc_status status);

/* ---- what is above --------------------------------------------------------------------------- */

/* The transport of a queue pair's type (rc/, ud/); what may be NULL says so. */
struct soft_transport {
	void (*created)(void); /* or NULL: one more of these queue pairs, and one less */
	void (*destroyed)(void); /* or NULL */
	/* INIT to RTR, or NULL: READs and atomics that the peer may have under way, the first PSN that is
	 * expected.  0 or an errno value. */
	int (*prepare)(struct soft_qp *qp, uint32_t depth, uint32_t psn);
	void (*forget)(struct soft_qp *qp); /* or NULL: the reverse, safe to repeat */
	void (*output)(struct soft_qp *qp); /* send what may be sent now */
	/* UC: nothing can be sent; everything in the send queue counts as sent. */
	void (*lose)(struct soft_qp *qp);
	void (*retry_expired)(struct soft_timer *timer); /* soft_qp.retry_timer */
};

/* Links between queue pairs (wire/). */
struct soft_link_calls {
	/* The queue pair has come to RTR: connect, or wait for the peer.  UC: the link is gone, likewise. */
	void (*begin)(struct soft_qp *qp);
	void (*again)(struct soft_qp *qp);
	/* The queue pair has come to RTS, from RTR (`first`) or SQD: PSNs and the timeout are known. */
	void (*ready)(struct soft_qp *qp, bool first);
	/* The queue pair is in error: send what must still go, then end. */
	void (*close)(struct soft_qp_link *link);
	/* End now. */
	void (*finish)(struct soft_qp_link *link, int error);
	/* The queue pair goes without its link, which closes. */
	void (*leave)(struct soft_qp_link *link);
	/* An acknowledgement is due, at once or with company. */
	void (*acknowledge)(struct soft_qp_link *link);
	/* How long a path to another machine may be silent, in ns. */
	uint64_t (*silence_limit)(void);
	/* The requests of the queue pair complete without being answered; the key opens nothing any more,
	 * or something else: what was exported for them is not copied any more when this returns. */
	void (*revoke_requests)(const struct soft_qp *qp);
	void (*revoke_key)(uint32_t key);
	/* The number of this process at the port, its LID; 0 if there is none to be had. */
	uint16_t (*lid)(void);
	/* Another one; 0 or an errno value. */
	int (*change_lid)(void);
};

extern const struct soft_link_calls *soft_links;

/* Of RC and UC, and of UD; and the links: softdev.c gives them, before anything else is called. */
void soft_objects_use(const struct soft_transport *connected,
		      const struct soft_transport *datagrams, const struct soft_link_calls *links);

static inline uint16_t soft_port_lid(void)
{
	return soft_links->lid();
}

#endif
