/* Random work on the queue pairs of two hosts, over a lossy wire (wire.h) in virtual time. A model
 * checks the state after each step.
 *
 * A seed has one to four RC, UC or XRC connections, some of which share receive queues. The model
 * checks that:
 *  - every work request completes once, in order, and successfully unless its connection was
 *    spoiled in this life;
 *  - memory contains the data of completed requests, and no other byte changes;
 *  - nothing is written to deregistered memory or sent from it;
 *  - an armed completion queue wakes its application;
 *  - every wait ends in bounded time; and
 *  - memory use is bounded.
 */
#include "seeds.h"
#include "../soft/extended_side.h"

#include <malloc.h>

#define FLUSHED_RIGHTS (ALL_RIGHTS | IBV_ACCESS_FLUSH_GLOBAL)

enum {
	CONNECTIONS = FLOWS,
	ENDS = CONNECTIONS * SIDES,
	DEPTH = 16, /* capacity of each queue */
	LOG = 512, /* maximum number of requests in one life of a connection */
	LONGEST = 5 * UNIT_MOST, /* maximum message size for any path MTU */
	GAP = 64,
	PLACES = 4, /* messages that fit into the region accessible to the peer */
	LIVES = 3,
	SECONDS = 70, /* limit of any wait; the device's maximum timeout is a minute */
	TWICE = 32, /* one in this many seeds runs twice */
	HEAP_MOST = 1 << 20,
	CONNECTED_NS = 100000000,
	APART_NS = 40000000, /* longer than the pauses between the first connection attempts */
};

enum area_name {
	SENDS,
	RECEIVES,
	TARGET, /* accessible by the key of a region */
	WINDOWED, /* accessible by the key of a window */
	AREAS
};

static struct area {
	size_t messages; /* number of messages that fit */
	unsigned rights;
	size_t start, length;
} areas[AREAS] = {
	[SENDS] = {DEPTH, IBV_ACCESS_LOCAL_WRITE, 0, 0},
	[RECEIVES] = {DEPTH, IBV_ACCESS_LOCAL_WRITE, 0, 0},
	[TARGET] = {PLACES, FLUSHED_RIGHTS, 0, 0},
	[WINDOWED] = {1, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND, 0, 0},
};

static uint32_t unit = UNIT; /* the path MTU */
static uint32_t longest = 8 * UNIT; /* maximum message size */
static size_t memory; /* size of one end's memory, including the gaps around its areas */
static uint32_t reach; /* number of bytes accessible to a peer */

/* A work request and its state in the model. */
struct work {
	enum ibv_wr_opcode opcode;
	bool signaled, solicited, fenced, done;
	bool wrong; /* the key does not allow the access */
	const struct queue *queue; /* SRQ that an XRC request addresses */
	bool failed; /* failed, but may have been executed */
	uint32_t length, immediate;
	uint32_t at; /* offset in the bytes accessible to the peer */
	uint64_t result, value; /* of an atomic: the word before and after it */
};

/* A receive queue of one end, or an SRQ shared by ends of one host. */
struct queue {
	struct ibv_srq *srq;
	uint32_t number; /* SRQ number; 0 if not an XRC SRQ */
	struct end *owner; /* end whose memory holds the buffers */
	uint32_t users;
	uint32_t posted;
	struct {
		bool used;
		uint32_t number;
	} receives[DEPTH];
	bool starves; /* whether no more receives are posted */
};

/* One end of a connection. The two ends are adjacent in `ends`, with the end on host 0 first. */
struct end {
	char name[3];
	struct side side; /* the host's side, but with its own queue pair and memory */
	enum ibv_qp_type type;
	struct queue *queue; /* NULL if the end receives no messages */
	struct ibv_mr *mrs[AREAS];
	struct ibv_mw *window;
	uint32_t window_key;
	enum { UNBOUND, BINDING, BOUND, ENDING } window_is; /* ENDING while being invalidated */
	bool gone[AREAS]; /* deregistered */

	struct work works[LOG];
	int posted, completed, signaled; /* request counts; index of the last signaled request */
	int messages[LOG], message_count; /* requests that consume a receive of the peer */
	int message; /* next of the peer's messages to arrive */
	uint64_t progress_at; /* time of the last completion */
	bool failed, was_reset, died;
	bool is_short, fell_short; /* whether a short receive was posted, and whether it failed */

	/* Memory accessible to the peer, after the peer's completed requests, and after all of its
	 * posted requests. */
	uint8_t before[(PLACES + 1) * LONGEST], after[(PLACES + 1) * LONGEST];
	uint8_t read[DEPTH][LONGEST]; /* data that each READ must return */
	int readers[PLACES + 1]; /* outstanding READs of each place */
};

/* Resources shared by the ends of a host. */
static struct home {
	struct side side;
	struct ibv_xrcd *xrcd;
	struct queue queues[CONNECTIONS];
	enum { NEVER, ALWAYS, SOLICITED } armed; /* which completions raise an event */
} homes[SIDES];

static struct end ends[ENDS], *ends_end;
#define EACH(end) for (struct end *end = ends; end < ends_end; end++)
static int life;
static bool spoiled[CONNECTIONS]; /* whether requests may fail in this life */
static bool may_run_out; /* RNR retries may be exhausted */
static uint64_t rnr_retry, rnr_delay_ns; /* minimum number of RNR retries, and delay between them */
static uint64_t try_ns; /* the timeout of a request */
static size_t heap; /* bytes allocated at the start, which may grow by HEAP_MOST */
static const char *const steps[] = {"the beginning", "random work", "the end of a life"};

static int index_of(const struct end *end)
{
	return (int)(end - ends);
}

static struct end *peer_of(const struct end *end)
{
	return &ends[index_of(end) ^ 1];
}

static int host_of(const struct end *end)
{
	return index_of(end) % SIDES;
}

static bool *spoiled_of(const struct end *end)
{
	return &spoiled[index_of(end) / SIDES];
}

/* Enter the host of an end. */
static struct side *enter_host_of(struct end *end)
{
	enter(host_of(end));
	return &end->side;
}

static enum ibv_qp_state state(struct end *end)
{
	return end->side.qp ? state_of(enter_host_of(end)) : IBV_QPS_RESET;
}

/* Returns the index of the connection that uses a channel, or -1 if none does. Used as
 * wire.flow_of. */
static int connection_of(int host, uint32_t chan)
{
	EACH(end)
	{
		const struct soft_link *link =
			end->side.qp ? soft_link_of(soft_qp_of(end->side.qp)) : NULL;

		if (host_of(end) == host && link && link->chan.path && link->chan.id == chan)
			return index_of(end) / SIDES;
	}
	return -1;
}

static uint8_t *memory_of(struct end *end, enum area_name area)
{
	return end->side.memory + areas[area].start;
}

/* Returns the address of a byte, given its offset `at` in the memory accessible to the peer. */
static uint8_t *address_of_reachable(struct end *end, uint32_t at)
{
	return at < areas[TARGET].length ? memory_of(end, TARGET) + at
					 : memory_of(end, WINDOWED) + (at - areas[TARGET].length);
}

static unsigned pattern_of(const struct end *end, int index)
{
	return (unsigned)(index * 37 + life * 101 + index_of(end) * 59);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static const uint64_t secret = UINT64_C(0x5ec2e75ec2e7a11d);

static void register_area(struct end *end, enum area_name area)
{
	memset(memory_of(end, area), 0, areas[area].length);
	CHECK(end->mrs[area] = verbs->ibv_reg_mr(enter_host_of(end)->pd, memory_of(end, area),
						 areas[area].length, (int)areas[area].rights));
	end->gone[area] = false;
}

/* Check that deregistered areas, as well as the gaps between areas, are unchanged. */
static void expect_untouched(struct end *end)
{
	size_t from = 0;

	for (int i = 0; i <= AREAS; i++) {
		size_t to = i < AREAS ? areas[i].start : memory;

		for (; from < to; from += sizeof(secret))
			CHECK(!memcmp(end->side.memory + from, &secret, sizeof(secret)));
		if (i < AREAS && !end->gone[i])
			from += areas[i].length;
	}
}

static void fill_with_secret(uint8_t *at, size_t length)
{
	for (size_t i = 0; i < length; i += sizeof(secret))
		memcpy(at + i, &secret, sizeof(secret));
}

/* ---- completions ----------------------------------------------------------------------------- */

static bool takes_receive(enum ibv_wr_opcode opcode)
{
	return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM ||
	       opcode == IBV_WR_SEND_WITH_INV || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}

static bool is_any_area_deregistered(const struct end *end)
{
	for (int area = 0; area < AREAS; area++)
		if (end->gone[area] || peer_of(end)->gone[area])
			return true;
	return false;
}

/* Apply a request to `bytes`, the model of the peer's memory. */
static void apply_request(const struct end *end, int index, uint8_t *bytes)
{
	const struct work *work = &end->works[index];

	switch (work->opcode) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
	case IBV_WR_ATOMIC_WRITE:
		fill(bytes + work->at, work->length, pattern_of(end, index));
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		memcpy(bytes + work->at, &work->value, sizeof(work->value));
		break;
	default:
		break;
	}
}

/* Check that data written before a FLUSH is in memory, unless a later request may have overwritten
 * it. */
static void expect_flushed(struct end *end, int index)
{
	const struct work *flush = &end->works[index];
	struct end *peer = peer_of(end);

	for (uint32_t at = flush->at; at < flush->at + flush->length; at++) {
		bool right = *address_of_reachable(peer, at) == peer->before[at];

		for (int i = index + 1; i < end->posted && !right; i++)
			right = end->works[i].opcode != IBV_WR_RDMA_READ &&
				at - end->works[i].at < end->works[i].length;
		CHECK(right);
	}
}

/* Returns whether the first failed request of an end may have this status. */
static bool may_fail(const struct end *end, const struct work *work, enum ibv_wc_status status)
{
	struct end *peer = peer_of(end);

	switch (status) {
	case IBV_WC_RETRY_EXC_ERR: /* lost NAK, or no response */
		return wire.fault_count || wire.cut || peer->failed ||
		       (!work->wrong && state(peer) != IBV_QPS_RTS);
	case IBV_WC_RNR_RETRY_EXC_ERR:
		return may_run_out && takes_receive(work->opcode) &&
		       fuzz_now_ns >= end->progress_at + rnr_retry * rnr_delay_ns;
	case IBV_WC_LOC_PROT_ERR:
	case IBV_WC_REM_OP_ERR:
		return is_any_area_deregistered(end);
	case IBV_WC_REM_INV_REQ_ERR:
		return peer->fell_short && takes_receive(work->opcode);
	case IBV_WC_REM_ACCESS_ERR:
		return is_any_area_deregistered(end) || work->wrong;
	default:
		return false;
	}
}

static void settle_request(struct end *end, int index, enum ibv_wc_status status)
{
	struct work *work = &end->works[index];
	const uint8_t *local = memory_of(end, SENDS) + index % DEPTH * longest;

	CHECK(!work->done);
	work->done = true;
	if (work->opcode == IBV_WR_RDMA_READ)
		end->readers[work->at / longest]--;
	if (work->opcode == IBV_WR_BIND_MW || work->opcode == IBV_WR_LOCAL_INV)
		end->window_is = status == IBV_WC_SUCCESS && work->opcode == IBV_WR_BIND_MW
					 ? BOUND
					 : UNBOUND;
	if (status != IBV_WC_SUCCESS) {
		CHECK(*spoiled_of(end) || (may_run_out && status == IBV_WC_RNR_RETRY_EXC_ERR));
		*spoiled_of(end) = true;
		CHECK(status == IBV_WC_WR_FLUSH_ERR ||
		      (!end->failed && may_fail(end, work, status)));
		end->failed = true;
		work->failed = true;
		return;
	}
	CHECK(!work->wrong && !end->failed);
	if (end->type == IBV_QPT_UC)
		return; /* sent, but perhaps not executed; see expect_memory_matches_model */
	apply_request(end, index, peer_of(end)->before);
	if (work->opcode == IBV_WR_FLUSH && !peer_of(end)->gone[TARGET])
		expect_flushed(end, index);
	if (end->gone[SENDS])
		return;
	if (work->opcode == IBV_WR_RDMA_READ)
		CHECK(!memcmp(local, end->read[index % DEPTH], work->length));
	if (work->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
	    work->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		CHECK(!memcmp(local, &work->result, sizeof(work->result)));
}

static void on_sent(struct end *end, const struct ibv_wc *wc)
{
	int index = (int)(wc->wr_id & 0xffff);

	CHECK_EQUAL(wc->wr_id >> 16, life);
	CHECK(index >= end->completed && index < end->posted);
	for (; end->completed < index; end->completed++) {
		CHECK(!end->works[end->completed].signaled);
		settle_request(end, end->completed, IBV_WC_SUCCESS);
	}
	CHECK(wc->status != IBV_WC_SUCCESS || end->works[index].signaled);
	settle_request(end, end->completed++, wc->status);
	end->progress_at = fuzz_now_ns;
}

/* Mark a receive as completed. Returns the index of its buffer. */
static uint32_t take_receive(struct queue *queue, uint64_t wr_id)
{
	uint32_t at = wr_id % DEPTH, number = (uint32_t)wr_id / DEPTH, older = 0;

	CHECK(queue->receives[at].used);
	CHECK_EQUAL(queue->receives[at].number, number);
	queue->receives[at].used = false;
	/* Every other user of a shared queue may still hold one older receive. */
	for (int i = 0; i < DEPTH; i++)
		older += queue->receives[i].used && number - queue->receives[i].number < LOG;
	CHECK(older < queue->users);
	return at;
}

/* Returns the peer's message that a completion reports, skipping messages that UC has lost. */
static const struct work *next_message(struct end *end, const struct ibv_wc *wc, const uint8_t *at)
{
	struct end *peer = peer_of(end);

	for (;;) {
		CHECK(end->message < peer->message_count);
		int number = peer->messages[end->message++];
		const struct work *work = &peer->works[number];
		bool data = work->opcode != IBV_WR_RDMA_WRITE_WITH_IMM;
		bool immediate = work->opcode == IBV_WR_SEND_WITH_IMM || !data;
		bool same = wc->byte_len == work->length &&
			    wc->opcode == (data ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM) &&
			    !!(wc->wc_flags & IBV_WC_WITH_IMM) == immediate &&
			    (!immediate || wc->imm_data == work->immediate) &&
			    !!(wc->wc_flags & IBV_WC_WITH_INV) ==
				    (work->opcode == IBV_WR_SEND_WITH_INV) &&
			    (!data || !at || is_filled(at, work->length, pattern_of(peer, number)));

		if (same)
			return work;
		CHECK(end->type == IBV_QPT_UC);
	}
}

/* Check a receive completion. Returns whether the sender requested an event. */
static bool on_received(struct end *end, const struct ibv_wc *wc)
{
	struct queue *queue = &homes[host_of(end)].queues[(wc->wr_id >> 32) - 1];
	uint32_t place = take_receive(queue, wc->wr_id);
	const uint8_t *at = queue->owner->gone[RECEIVES]
				    ? NULL
				    : memory_of(queue->owner, RECEIVES) + place * longest;

	if (wc->status != IBV_WC_SUCCESS) {
		end->fell_short |= wc->status == IBV_WC_LOC_LEN_ERR && end->is_short;
		CHECK(*spoiled_of(end) && (wc->status == IBV_WC_WR_FLUSH_ERR ||
					   end->gone[RECEIVES] || end->fell_short));
		return false;
	}
	const struct work *work = next_message(end, wc, at);

	CHECK(queue == (work->queue ? work->queue : end->queue));
	if (work->opcode == IBV_WR_SEND_WITH_INV)
		end->window_is = UNBOUND;
	if (wc->opcode == IBV_WC_RECV && at && end->type != IBV_QPT_UC)
		for (uint32_t i = work->length; i < longest; i++)
			CHECK(at[i] == 0xee);
	return work->solicited;
}

static struct end *end_with(int host, uint32_t qp_num)
{
	EACH(end)
	{
		if (host_of(end) == host && end->side.qp && end->side.qp->qp_num == qp_num)
			return end;
	}
	CHECK(!"a completion of a queue pair");
	return NULL;
}

/* Poll all completions of a host. If the completion queue was armed, check that it raised an event
 * if and only if a completion required one. Otherwise, arm the queue at random. */
static void take_completions(int host)
{
	struct home *home = &homes[host];
	struct ibv_wc wc[DEPTH];
	bool wakes = false;
	int n;

	enter(host);
	while ((n = poll_cq(&home->side, DEPTH, wc)) > 0)
		for (int i = 0; i < n; i++) {
			struct end *end = end_with(host, wc[i].qp_num);
			bool receive = wc[i].wr_id >> 32;

			note("%s completes %s %u: %s", end->name, receive ? "receive" : "request",
			     (unsigned)(wc[i].wr_id & 0xffff),
			     verbs->ibv_wc_status_str(wc[i].status));
			if (receive)
				wakes |= on_received(end, &wc[i]);
			else
				on_sent(end, &wc[i]);
			wakes |= home->armed == ALWAYS || wc[i].status != IBV_WC_SUCCESS;
			enter(host);
		}
	CHECK_EQUAL(n, 0);
	if (home->armed) {
		struct ibv_cq *cq;
		void *context;
		bool woken = !verbs->ibv_get_cq_event(home->side.channel, &cq, &context);

		CHECK_EQUAL(woken, wakes);
		if (woken) {
			verbs->ibv_ack_cq_events(cq, 1);
			home->armed = NEVER;
		}
	} else if (chance(300)) {
		home->armed = chance(700) ? ALWAYS : SOLICITED;
		CHECK_OK(home->side.context->ops.req_notify_cq(home->side.cq,
							       home->armed == SOLICITED));
	}
}

static void after_step(void)
{
	for (int host = 0; host < SIDES; host++)
		if (!is_stopped(host))
			take_completions(host);
	EACH(end)
	{
		const struct end *peer = peer_of(end);

		if (end->completed == end->posted || end->progress_at == fuzz_now_ns)
			wire_progress(index_of(end) / SIDES, host_of(end));
		/* The peer must have received every message that was acknowledged. */
		for (int m = peer->message; m < end->message_count && end->type != IBV_QPT_UC; m++)
			CHECK(!end->works[end->messages[m]].done ||
			      end->works[end->messages[m]].failed || is_stopped(host_of(peer)));
		expect_untouched(end);
	}
}

static void advance_time(uint64_t ns)
{
	uint64_t until = fuzz_now_ns + ns;

	for (int events = 0; wire_next() <= until; events++) {
		CHECK(events < 100000);
		wire_step();
		after_step();
	}
	fuzz_now_ns = until;
}

/* ---- work ------------------------------------------------------------------------------------ */

static void post_receive(struct end *end, uint32_t length)
{
	struct queue *queue = end->queue;
	uint32_t at = 0, first = chance(300) ? draw(length) : length;

	while (queue && at < DEPTH && queue->receives[at].used)
		at++;
	if (!queue || at == DEPTH || queue->owner->gone[RECEIVES] || queue->starves ||
	    (!queue->srq && end->was_reset))
		return;
	uint8_t *to = memory_of(queue->owner, RECEIVES) + at * longest;
	uint32_t lkey = queue->owner->mrs[RECEIVES]->lkey;
	struct ibv_sge sges[] = {
		{(uintptr_t)to, first, lkey},
		{(uintptr_t)to + first, length - first, lkey},
	};
	uint64_t of = (uint64_t)(queue - homes[host_of(end)].queues + 1) << 32;

	memset(to, 0xee, longest);
	CHECK_OK(post_recv_wr(enter_host_of(end),
			      &(struct ibv_recv_wr){.wr_id = of | (queue->posted * DEPTH + at),
						    .sg_list = sges,
						    .num_sge = first < length ? 2 : 1}));
	queue->receives[at].used = true;
	queue->receives[at].number = queue->posted++;
	note("%s posts a receive", end->name);
}

/* Returns a length, usually close to a multiple of the path MTU. */
static uint32_t draw_length(void)
{
	uint32_t length = draw(longest / unit) * unit + draw(3) - 1;

	return chance(300) ? draw(64) : length > longest ? 0 : length;
}

static const enum ibv_wr_opcode opcodes[] = {
	IBV_WR_SEND,
	IBV_WR_SEND,
	IBV_WR_SEND_WITH_IMM,
	IBV_WR_RDMA_WRITE,
	IBV_WR_RDMA_WRITE,
	IBV_WR_RDMA_WRITE_WITH_IMM,
	IBV_WR_RDMA_READ,
	IBV_WR_RDMA_READ,
	IBV_WR_ATOMIC_CMP_AND_SWP,
	IBV_WR_ATOMIC_FETCH_AND_ADD,
	IBV_WR_ATOMIC_FETCH_AND_ADD,
	IBV_WR_ATOMIC_WRITE,
	IBV_WR_FLUSH,
	IBV_WR_SEND_WITH_INV,
	IBV_WR_BIND_MW,
	IBV_WR_BIND_MW,
	IBV_WR_LOCAL_INV,
};

/* Predict the result of a request from `after`, which models the peer's memory after all earlier
 * requests. Then apply the request to `after`. */
static void predict_result(struct end *end, int index, const struct ibv_send_wr *wr)
{
	struct work *work = &end->works[index];
	uint8_t *after = peer_of(end)->after;

	memcpy(&work->result, after + work->at, sizeof(work->result));
	if (work->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		work->value = work->result + wr->wr.atomic.compare_add;
	else
		work->value = work->result == wr->wr.atomic.compare_add ? wr->wr.atomic.swap
									: work->result;
	if (work->opcode == IBV_WR_RDMA_READ)
		memcpy(end->read[index % DEPTH], after + work->at, work->length);
	apply_request(end, index, after);
}

/* Choose a place in the peer's memory. Returns false if that place is not accessible now. */
static bool choose_place(struct end *end, struct work *work)
{
	struct end *peer = peer_of(end);
	uint32_t place = draw(PLACES + 1);

	work->at = place * longest + (longest - work->length ? draw(longest - work->length) : 0);
	if (work->length == sizeof(uint64_t) && work->opcode != IBV_WR_RDMA_WRITE)
		work->at &= ~7u;
	/* A READ may be repeated, so the bytes it reads must not change before it completes (IBTA
	 * 10.8.3.3). */
	if (work->opcode != IBV_WR_RDMA_READ && end->readers[place])
		work->fenced = true;
	return (place < PLACES ? !peer->gone[TARGET] : peer->window_is == BOUND) &&
	       (!work->fenced || chance(300));
}

/* Returns whether outstanding requests access the peer's window. */
static bool window_is_used(const struct end *by)
{
	for (int i = by->completed; i < by->posted; i++)
		if (by->works[i].at >= areas[TARGET].length)
			return true;
	return false;
}

enum manner {
	USUAL,
	WRONG, /* invalid key or out-of-bounds access, which the peer rejects */
	EMPTY, /* zero length, which needs no key; always signaled */
};

/* Returns whether the queue pair of an end supports an operation. */
static bool can_post(const struct end *end, enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return end->type != IBV_QPT_XRC_RECV;
	case IBV_WR_FLUSH:
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_BIND_MW:
	case IBV_WR_LOCAL_INV:
		return end->type == IBV_QPT_RC;
	default:
		return end->type == IBV_QPT_RC || end->type == IBV_QPT_XRC_SEND;
	}
}

/* Returns a random XRC SRQ of the peer's host. */
static const struct queue *xrc_queue(const struct end *end)
{
	const struct queue *queues = homes[host_of(peer_of(end))].queues;
	int i = (int)draw(CONNECTIONS);

	while (!queues[i].number)
		i = (i + 1) % CONNECTIONS;
	return &queues[i];
}

static int post_flush(struct side *side, const struct ibv_send_wr *wr, uint32_t length)
{
	struct ibv_qp_ex_newer *qp = (struct ibv_qp_ex_newer *)verbs->ibv_qp_to_qp_ex(side->qp);

	qp->before.wr_start(&qp->before);
	qp->before.wr_id = wr->wr_id;
	qp->before.wr_flags = wr->send_flags;
	qp->wr_flush(&qp->before, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, length,
		     IBV_FLUSH_GLOBAL, IBV_FLUSH_RANGE);
	return qp->before.wr_complete(&qp->before);
}

/* Post a request of the given kind, unless the model does not allow it now. */
static void post_if_allowed(struct end *end, enum ibv_wr_opcode opcode, enum manner manner)
{
	struct end *peer = peer_of(end);
	int index = end->posted;
	uint8_t *local = memory_of(end, SENDS) + index % DEPTH * longest;
	struct work *work = &end->works[index];
	bool atomic = opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
		      opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_WRITE;
	bool remote = atomic || opcode == IBV_WR_FLUSH || opcode == IBV_WR_RDMA_READ ||
		      opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;

	bool empty = manner == EMPTY;

	if (!can_post(end, opcode) || end->posted - end->completed == DEPTH || end->was_reset ||
	    (!empty && (end->posted == LOG - 1 || end->gone[SENDS])))
		return;
	*work = (struct work){.opcode = opcode, .length = atomic ? 8 : empty ? 0 : draw_length()};
	if ((remote && !empty && !choose_place(end, work)) ||
	    (opcode == IBV_WR_FLUSH && work->at >= areas[TARGET].length) ||
	    (opcode == IBV_WR_SEND_WITH_INV && peer->window_is != BOUND) ||
	    (opcode == IBV_WR_BIND_MW && end->window_is != UNBOUND) ||
	    (opcode == IBV_WR_LOCAL_INV && (end->window_is != BOUND || window_is_used(peer))))
		return;
	work->signaled = empty || index - end->signaled >= DEPTH / 4 || chance(700);
	/* An earlier READ with the invalidated key may be repeated, so the SEND is fenced. */
	work->fenced |= opcode == IBV_WR_SEND_WITH_INV;
	/* The model cannot tell which of two similar UC messages was lost. */
	work->solicited = takes_receive(opcode) && end->type != IBV_QPT_UC && chance(300);
	work->immediate = draw(UINT32_MAX);
	work->wrong = manner == WRONG && remote && work->length;
	if (end->type == IBV_QPT_XRC_SEND)
		work->queue = xrc_queue(end);

	bool windowed = remote && work->at >= areas[TARGET].length;
	uint32_t lkey = empty ? 0 : end->mrs[SENDS]->lkey;
	uint32_t first = !atomic && chance(300) ? draw(work->length + 1) : work->length;
	struct ibv_sge sges[] = {
		{(uintptr_t)local, first, lkey},
		{(uintptr_t)local + first, work->length - first, lkey},
	};
	struct ibv_send_wr wr = {
		.wr_id = (uint64_t)life << 16 | (unsigned)index,
		.sg_list = sges,
		.num_sge = empty                  ? 0
			   : first < work->length ? 2
						  : 1,
		.opcode = opcode,
		.send_flags = (work->signaled ? IBV_SEND_SIGNALED : 0u) |
			      (work->solicited ? IBV_SEND_SOLICITED : 0u) |
			      (work->fenced || chance(100) ? IBV_SEND_FENCE : 0u),
		.imm_data = work->immediate,
		.qp_type.xrc.remote_srqn = work->queue ? work->queue->number : 0,
	};

	if (!atomic && opcode != IBV_WR_FLUSH && opcode != IBV_WR_RDMA_READ &&
	    work->length <= 128 && chance(500))
		wr.send_flags |= IBV_SEND_INLINE;
	if (atomic && opcode != IBV_WR_ATOMIC_WRITE) {
		wr.wr.atomic.remote_addr = (uintptr_t)address_of_reachable(peer, work->at);
		wr.wr.atomic.rkey = windowed ? peer->window_key : peer->mrs[TARGET]->rkey;
		wr.wr.atomic.compare_add = draw(100);
		memcpy(&wr.wr.atomic.swap, peer->after + work->at, sizeof(wr.wr.atomic.swap));
		if (chance(500)) /* make the comparison succeed */
			wr.wr.atomic.compare_add = wr.wr.atomic.swap;
		wr.wr.atomic.swap ^= draw(UINT32_MAX);
	} else if (remote && !empty) {
		wr.wr.rdma.remote_addr = (uintptr_t)address_of_reachable(peer, work->at);
		wr.wr.rdma.rkey = windowed ? peer->window_key : peer->mrs[TARGET]->rkey;
		if (work->wrong && chance(500))
			wr.wr.rdma.remote_addr =
				(uintptr_t)memory_of(peer, windowed ? WINDOWED : TARGET) +
				areas[windowed ? WINDOWED : TARGET].length - work->length + 8;
		else
			wr.wr.rdma.rkey ^= work->wrong;
	} else if (opcode == IBV_WR_SEND_WITH_INV) {
		wr.invalidate_rkey = peer->window_key;
		peer->window_is = ENDING;
	} else if (opcode == IBV_WR_LOCAL_INV) {
		wr.invalidate_rkey = end->window_key;
		wr.num_sge = 0;
		end->window_is = ENDING;
	} else if (opcode == IBV_WR_BIND_MW) {
		end->window_is = BINDING;
		wr.num_sge = 0;
		end->window_key = next_key(end->window_key);
		wr.bind_mw.mw = end->window;
		wr.bind_mw.rkey = end->window_key;
		wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
			.mr = end->mrs[WINDOWED],
			.addr = (uintptr_t)memory_of(end, WINDOWED),
			.length = longest,
			.mw_access_flags = ALL_RIGHTS & ~IBV_ACCESS_LOCAL_WRITE,
		};
	}
	if (opcode == IBV_WR_RDMA_READ)
		end->readers[work->at / longest]++;
	if (!work->wrong)
		predict_result(end, index, &wr);
	fill(local, work->length, pattern_of(end, index));
	if (takes_receive(opcode))
		end->messages[end->message_count++] = index;
	if (work->signaled)
		end->signaled = index;
	end->posted++;
	note("%s posts %d: opcode %d, %u bytes at %u%s", end->name, index, opcode, work->length,
	     work->at, work->wrong ? ", wrong" : "");
	CHECK_EQUAL(opcode == IBV_WR_FLUSH ? post_flush(enter_host_of(end), &wr, work->length)
					   : post_wr(enter_host_of(end), &wr),
		    0);
}

/* ---- a life of the connections --------------------------------------------------------------- */

static void make_qp(struct end *end)
{
	struct side *side = enter_host_of(end);
	struct ibv_qp_init_attr_ex attr = {.qp_type = end->type};

	if (end->type == IBV_QPT_XRC_RECV) {
		attr.comp_mask = IBV_QP_INIT_ATTR_XRCD;
		attr.xrcd = homes[host_of(end)].xrcd;
	} else {
		attr.send_cq = side->cq;
		attr.recv_cq = end->queue ? side->cq : NULL;
		attr.srq = end->queue ? end->queue->srq : NULL;
		attr.cap = (struct ibv_qp_cap){DEPTH, end->queue ? DEPTH : 0, 4, 4, 256};
		attr.comp_mask = IBV_QP_INIT_ATTR_PD;
		attr.pd = side->pd;
		if (end->type == IBV_QPT_RC) {
			attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
			attr.send_ops_flags = IBV_QP_EX_WITH_FLUSH;
		}
	}
	CHECK(side->qp = extended(side->context)->create_qp_ex(side->context, &attr));
}

/* Remove the receives of a queue pair from the model. If the queue is shared, remove only the
 * receive in use for an incomplete message. */
static void drop_receives(struct end *end)
{
	const struct soft_receive_queue *rq = &soft_qp_of(end->side.qp)->rq;

	if (!end->queue)
		return;
	if (!end->queue->srq)
		memset(end->queue->receives, 0, sizeof(end->queue->receives));
	else if (rq->head != rq->tail) {
		uint64_t wr_id = soft_receive_at(rq, rq->head)->wr_id;

		take_receive(&homes[host_of(end)].queues[(wr_id >> 32) - 1], wr_id);
	}
}

static void reset(struct end *end)
{
	drop_receives(end);
	enter_state(enter_host_of(end), IBV_QPS_RESET);
}

static void destroy(struct end *end)
{
	drop_receives(end);
	destroy_qp(enter_host_of(end));
}

static void begin_life(bool loses)
{
	life++;
	memset(spoiled, 0, sizeof(spoiled));
	EACH(end)
	{
		end->posted = end->completed = end->message_count = end->message = 0;
		end->signaled = -1;
		end->progress_at = fuzz_now_ns;
		end->failed = end->was_reset = end->died = end->is_short = end->fell_short = false;
		if (end->queue)
			end->queue->starves = false;
		end->window_is = UNBOUND;
		memset(end->readers, 0, sizeof(end->readers));
		if (end->window)
			CHECK_OK(enter_host_of(end)->context->ops.dealloc_mw(end->window));
		for (int area = 0; area < AREAS; area++)
			if (!end->mrs[area])
				register_area(end, (enum area_name)area);
		CHECK(end->window = enter_host_of(end)->context->ops.alloc_mw(end->side.pd,
									      IBV_MW_TYPE_2));
		end->window_key = end->window->rkey;
		for (uint32_t at = 0; at < reach; at += longest)
			memcpy(end->before + at, address_of_reachable(end, at), longest);
		memcpy(end->after, end->before, reach);
		/* Often start just before the PSN wraps. */
		end->side.psn = chance(700) ? 0xffffff - draw(32) : draw(0x1000000);
	}
	wire_heal();
	wire_vary(loses);
	/* Connect the second end immediately, or after the first has had time for several
	 * connection attempts. */
	for (struct end *pair = ends; pair < ends_end; pair += SIDES)
		for (int i = 0, first = chance(500); i < SIDES; i++) {
			struct address peer = address_of_side(enter_host_of(&pair[i == first]));

			bring_up(enter_host_of(&pair[i != first]), &peer);
			if (!i && chance(500))
				advance_time(draw(APART_NS));
		}
	uint64_t until = fuzz_now_ns + CONNECTED_NS;

	EACH(end)
	{
		while (!is_up(&end->side)) {
			CHECK(wire_next() < until);
			wire_step();
		}
	}
	note("life %d: frames of %u, %d together, %d under way, %d faults in 1000", life,
	     calls.max_frame, calls.max_frames, wire.window, wire.per_mille);
}

static void make_queue(struct home *home, struct queue *queue, bool xrc)
{
	struct ibv_srq_init_attr_ex attr = {
		.attr = {.max_wr = DEPTH, .max_sge = 4},
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
		.srq_type = IBV_SRQT_BASIC,
		.pd = home->side.pd,
	};
	struct verbs_context *context = extended(home->side.context);

	if (xrc) {
		attr.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
		attr.srq_type = IBV_SRQT_XRC;
		attr.xrcd = home->xrcd;
		attr.cq = home->side.cq;
	}
	CHECK(queue->srq = context->create_srq_ex(home->side.context, &attr));
	if (xrc)
		CHECK_OK(context->get_srq_num(queue->srq, &queue->number));
}

/* Open a host's device. A restarted host gets the same kinds of queues again. */
static void open_home(int host, struct options options)
{
	struct home *home = &homes[host];
	struct ibv_xrcd_init_attr domain = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
		.fd = -1,
		.oflags = O_CREAT,
	};
	uint8_t *at;

	enter(host);
	options.memory = (size_t)(ends_end - ends) / SIDES * memory;
	options.gid = gid_at(0); /* set by take_addresses */
	open_side(&home->side, options);
	destroy_qp(&home->side);
	if (wire.roce)
		take_addresses(host);
	at = home->side.memory;
	CHECK_OK(fcntl(home->side.channel->fd, F_SETFL, O_NONBLOCK));
	CHECK(home->xrcd = extended(home->side.context)->open_xrcd(home->side.context, &domain));
	home->armed = NEVER;
	EACH(end)
	{
		if (host_of(end) != host)
			continue;
		end->side = home->side;
		end->side.memory = at;
		end->side.options.uc = end->type == IBV_QPT_UC;
		at += memory;
		fill_with_secret(end->side.memory, memory);
		for (int area = 0; area < AREAS; area++)
			end->gone[area] = true;
		memset(end->mrs, 0, sizeof(end->mrs));
		end->window = NULL;
		if (end->queue) {
			memset(end->queue->receives, 0, sizeof(end->queue->receives));
			if (end->queue->owner == end && end->queue->srq)
				make_queue(home, end->queue, end->queue->number);
			end->side.srq = end->queue->srq;
		}
		make_qp(end);
	}
}

/* Drop the outstanding requests and receives of an end. */
static void forget_requests(struct end *end)
{
	for (; end->completed < end->posted; end->completed++)
		end->works[end->completed].failed = true;
	end->failed = end->was_reset = true;
}

/* Restart a host, which ends its connections. If `told` is set, its kernel resets the path to the
 * peer (see die()). On a wire without loss, `told` must be set, because peers never time out
 * there. */
static void host_dies(int host, bool told)
{
	note("host %c dies%s", "ab"[host], told ? "" : " without a word");
	die(host, told);
	bury(&homes[host], sizeof(homes[host]));
	EACH(end)
	{
		if (host_of(end) != host)
			continue;
		bury(end, sizeof(*end));
		forget_requests(end);
		end->died = true;
	}
	open_home(host, homes[host].side.options);
	heap = mallinfo2().uordblks;
}

static void spoil_all(void)
{
	memset(spoiled, true, sizeof(spoiled));
}

/* Stop posting receives, which spoils all connections that use the queue. */
static void stop_posting_receives(struct queue *queue)
{
	note("no more receives");
	queue->starves = true;
	EACH(end)
	{
		if (end->queue == queue || (queue->number && end->type == IBV_QPT_XRC_RECV))
			*spoiled_of(end) = true;
	}
}

/* Break a connection. Called at most once per life. */
static void spoil(bool loses)
{
	struct end *end = &ends[draw((uint32_t)(ends_end - ends))];
	enum area_name area = (enum area_name)draw(WINDOWED);
	bool shared = !end->queue || end->queue->srq;

	if (may_run_out && end->queue && chance(300)) {
		stop_posting_receives(end->queue);
		return;
	}
	*spoiled_of(end) = true;
	switch (draw(loses ? 9 : 8)) {
	case 0:
		if (end->type == IBV_QPT_UC) /* UC rejects nothing */
			break;
		note("%s posts what is refused", end->name);
		post_if_allowed(end, chance(500) ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, WRONG);
		post_if_allowed(end, IBV_WR_RDMA_WRITE, USUAL);
		break;
	case 1: /* the receives of a shared queue outlive the connection */
		if (area == RECEIVES && shared)
			area = TARGET;
		for (int i = 0; i < 2; i++) /* requests that the deregistration may interrupt */
			post_if_allowed(peer_of(end),
					chance(700) ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, USUAL);
		advance_time(draw(8000));
		note("%s deregisters %d", end->name, area);
		enter_host_of(end);
		CHECK_OK(verbs->ibv_dereg_mr(end->mrs[area]));
		end->mrs[area] = NULL;
		end->gone[area] = true;
		fill_with_secret(memory_of(end, area), areas[area].length);
		break;
	case 2:
		note("%s is put into ERR", end->name);
		enter_state(enter_host_of(end), IBV_QPS_ERR);
		break;
	case 3:
	case 4:
		note("%s is reset or destroyed", end->name);
		(chance(500) ? reset : destroy)(end);
		forget_requests(end);
		break;
	case 5: /* the receives of a shared queue outlive the connection */
		end->is_short = !shared;
		note("%s posts a short receive", end->name);
		post_receive(end, end->is_short ? unit : longest);
		break;
	case 6:
		spoil_all();
		host_dies(host_of(end), !loses || chance(500));
		break;
	case 7: /* on a lossy wire, a stop that may outlast the peers' retries */
		if (loses)
			spoil_all();
		wire.fault_count++;
		wire.stopped = true;
		wire_stop(host_of(end), try_ns << draw(10));
		break;
	default:
		spoil_all();
		note("the wire is cut");
		wire.cut = true;
	}
}

static bool is_finished(const struct end *end)
{
	const struct end *peer = peer_of(end);

	return end->completed == end->posted &&
	       (*spoiled_of(end) || end->type == IBV_QPT_UC || end->message == peer->message_count);
}

/* Check the memory accessible to the peer against the peer's completed requests. Failed requests
 * may have been executed. */
static void expect_memory_matches_model(struct end *end)
{
	static uint8_t one[(PLACES + 1) * LONGEST];
	static bool right[(PLACES + 1) * LONGEST];
	struct end *peer = peer_of(end);

	/* A UC request counts as executed only if there was no fault and it needed no receive. */
	for (int i = 0; i < peer->posted && peer->type == IBV_QPT_UC; i++) {
		struct work *work = &peer->works[i];

		work->failed |= *spoiled_of(end) || wire.fault_count || takes_receive(work->opcode);
		if (!work->failed)
			apply_request(peer, i, end->before);
	}
	for (uint32_t at = 0; at < reach; at++)
		right[at] = *address_of_reachable(end, at) == end->before[at] ||
			    (end->gone[TARGET] && at < areas[TARGET].length);
	for (int i = 0; i < peer->posted; i++) {
		const struct work *work = &peer->works[i];
		const uint32_t to = work->at + work->length;

		if (!work->failed || work->wrong)
			continue;
		memcpy(one + work->at, end->before + work->at, work->length);
		apply_request(peer, i, one);
		for (uint32_t at = work->at; at < to; at++)
			right[at] |= one[at] == *address_of_reachable(end, at);
	}
	CHECK(!memchr(right, false, reach));
}

static bool are_all_finished(void)
{
	EACH(end)
	{
		if (!is_finished(end))
			return false;
	}
	return true;
}

static bool any_spoiled(void)
{
	return memchr(spoiled, true, sizeof(spoiled));
}

/* Wait for all requests to complete. Check that this takes a limited time, and that memory matches
 * the model. */
static void end_life(void)
{
	static uint64_t retried;
	struct aiordma_fault_counts counts;
	uint64_t retries = 0;
	uint64_t until = fuzz_now_ns + SECONDS * SECOND;
	bool died = false;

	EACH(end)
	{
		/* Without receives, the end would keep its peer waiting forever. */
		if (end->gone[RECEIVES] && !end->died && end->side.qp)
			enter_state(enter_host_of(end), IBV_QPS_ERR);
		if (!end->failed && end->signaled < end->posted - 1)
			end->signaled = -DEPTH; /* needs a final signaled request */
		died |= end->died;
	}
	while (!are_all_finished()) {
		EACH(end)
		{
			if (is_stopped(host_of(end)))
				continue;
			if (end->signaled == -DEPTH)
				post_if_allowed(end, IBV_WR_RDMA_WRITE, EMPTY);
			post_receive(end, longest);
		}
		after_step();
		if (are_all_finished())
			break;
		CHECK(wire_next() < until);
		wire_step();
		after_step();
	}
	advance_time(4 * LATE_NS); /* for the last UC messages to arrive */
	while (is_stopped(0) || is_stopped(1))
		advance_time(wire.hosts[is_stopped(1)].stopped_until - fuzz_now_ns);
	after_step();
	/* Each retry needs a cause. Each side may retry twice after a fault: once because of the
	 * fault, and once because of outdated responses. */
	for (int host = 0; host < SIDES; host++) {
		enter(host);
		aiordma_embedded_fault_counts(&counts);
		retries += counts.retried;
	}
	CHECK(wire.cut || wire.stopped || died || (wire.roce && any_spoiled()) ||
	      retries <= retried + 4 * wire.fault_count);
	EACH(end)
	{
		if (!end->died) /* expect_untouched has checked the others */
			expect_memory_matches_model(end);
	}
	retried = retries, wire.fault_count = 0;
	wire.stopped = false;
	EACH(end)
	{
		if (state(end) == IBV_QPS_ERR && end->queue && !end->queue->srq)
			for (int i = 0; i < DEPTH; i++)
				CHECK(!end->queue->receives[i].used);
		if (end->side.qp)
			(chance(900) ? reset : destroy)(end);
		if (!end->side.qp)
			make_qp(end);
	}
}

static void do_random_work(void)
{
	struct end *end = &ends[draw((uint32_t)(ends_end - ends))];

	if (is_stopped(host_of(end))) {
		advance_time(draw(20000));
		return;
	}
	switch (draw(16)) {
	case 0:
	case 1:
	case 2:
	case 3:
		post_receive(end, longest);
		break;
	case 4:
	case 5:
		advance_time(draw(20000) << draw(9));
		break;
	case 6: /* requests in progress complete, and later requests wait */
		if (end->type == IBV_QPT_XRC_RECV)
			break;
		note("%s is drained", end->name);
		if (!*spoiled_of(end))
			enter_state(enter_host_of(end), IBV_QPS_SQD);
		post_if_allowed(end, IBV_WR_RDMA_WRITE, USUAL);
		advance_time(draw(20000));
		if (state(end) == IBV_QPS_SQD)
			enter_state(enter_host_of(end), IBV_QPS_RTS);
		break;
	case 9:
		if (wire.per_mille && chance(100) && all_err())
			wire_stop(host_of(end), draw((uint32_t)try_ns / 2));
		break;
	case 7:
	case 8: /* several requests in a row */
		for (uint32_t count = draw(DEPTH); count; count--)
			post_if_allowed(end, opcodes[draw(COUNT_OF(opcodes))], USUAL);
		break;
	default:
		post_if_allowed(end, opcodes[draw(COUNT_OF(opcodes))], USUAL);
	}
	after_step();
}

/* ---- seeds ----------------------------------------------------------------------------------- */

/* Choose the type of each end and the receive queue that it uses. */
static void choose_ends(void)
{
	struct end *sharing[SIDES] = {0};
	uint32_t targets[SIDES] = {0};

	wire.flows = chance(400) ? 1 : 1 + (int)draw(CONNECTIONS);
	ends_end = ends + wire.flows * SIDES;
	EACH(end)
	{
		static enum ibv_qp_type type;
		struct queue *queue = &homes[host_of(end)].queues[index_of(end) / SIDES];

		end->name[0] = "ab"[host_of(end)];
		end->name[1] = "0123"[index_of(end) / SIDES];
		if (!host_of(end)) {
			uint32_t kind = draw(10);

			type = kind < 6   ? IBV_QPT_RC
			       : kind < 8 ? IBV_QPT_UC
			       : kind < 9 ? IBV_QPT_XRC_SEND
					  : IBV_QPT_XRC_RECV;
		} else if (soft_is_xrc(type)) {
			type = type == IBV_QPT_XRC_SEND ? IBV_QPT_XRC_RECV : IBV_QPT_XRC_SEND;
		}
		end->type = type;
		wire.in_order[index_of(end) / SIDES] = type == IBV_QPT_UC;
		if (type == IBV_QPT_XRC_SEND)
			continue;
		queue->owner = end;
		queue->number = type == IBV_QPT_XRC_RECV;
		targets[host_of(end)] += queue->number;
		queue->srq = NULL;
		/* Any value other than NULL tells open_home to create the SRQ. */
		if (type == IBV_QPT_XRC_RECV || (type == IBV_QPT_RC && chance(400)))
			queue->srq = (struct ibv_srq *)queue;
		if (type == IBV_QPT_RC && queue->srq) {
			if (!sharing[host_of(end)])
				sharing[host_of(end)] = end;
			queue = sharing[host_of(end)]->queue ? sharing[host_of(end)]->queue : queue;
		}
		end->queue = queue;
		queue->users++;
	}
	EACH(end)
	{
		if (end->type == IBV_QPT_XRC_RECV) /* each may use every XRC SRQ of the host */
			end->queue->users = targets[host_of(end)];
	}
}

static void lay_out_areas(void)
{
	memory = GAP;
	for (int area = 0; area < AREAS; area++) {
		areas[area].start = memory;
		areas[area].length = areas[area].messages * longest;
		memory += areas[area].length + GAP;
	}
	reach = (PLACES + 1) * longest;
}

static void run_seed(void)
{
	uint32_t code = 1 + draw(24);
	struct options options = {.sends = DEPTH, .receives = DEPTH};

	wire.secret = secret;
	wire.flow_of = connection_of;
	choose_ends();
	options.rights = FLUSHED_RIGHTS;
	options.mtu = IBV_MTU_256;
	if (wire.roce) {
		options.mtu += draw(5);
		unit = UNIT << (options.mtu - IBV_MTU_256);
		longest = 8 * unit < LONGEST ? 8 * unit : LONGEST;
		wire.ipv6 = chance(300);
	}
	lay_out_areas();
	options.signal_none = true;
	options.timeout = (uint8_t)(8 + draw(6) + (wire.flows > 1));
	try_ns = UINT64_C(4096) << options.timeout;
	options.retry_cnt = (uint8_t)(chance(400) ? 7 : 2 + draw(3));
	may_run_out = chance(200);
	rnr_retry = options.rnr_retry = may_run_out ? (uint8_t)(1 + draw(6)) : 7;
	options.rnr_timer = (uint8_t)code;
	rnr_delay_ns = rnr_timer_units[code] * UINT64_C(10000);
	options.depth = (uint8_t)(1 + draw(4));
	wire.faults_most = options.retry_cnt - 1;
	for (int host = 0; host < SIDES; host++)
		open_home(host, options);
	heap = mallinfo2().uordblks;
	for (uint32_t lives = 1 + draw(LIVES); lives; lives--) {
		uint32_t things = 10 + draw(60);
		bool loses = chance(900) || wire.roce;
		uint32_t spoiled_at = chance(500) ? draw(things) : things;

		current_step = steps[0];
		begin_life(loses);
		current_step = steps[1];
		for (uint32_t i = 0; i < things; i++) {
			if (i == spoiled_at)
				spoil(loses);
			if (i == spoiled_at + 5 && wire.flows == 1)
				break;
			do_random_work();
		}
		CHECK(mallinfo2().uordblks < heap + HEAP_MOST);
		current_step = steps[2];
		end_life();
	}
	EACH(end)
	{
		destroy(end);
		if (end->window)
			CHECK_OK(end->side.context->ops.dealloc_mw(end->window));
		for (int area = 0; area < AREAS; area++)
			if (end->mrs[area])
				CHECK_OK(verbs->ibv_dereg_mr(end->mrs[area]));
	}
	EACH(end)
	{
		if (end->queue && end->queue->owner == end && end->queue->srq)
			CHECK_OK(verbs->ibv_destroy_srq((enter_host_of(end), end->queue->srq)));
	}
	for (int host = 0; host < SIDES; host++) {
		struct home *home = &homes[host];

		enter(host);
		CHECK_OK(extended(home->side.context)->close_xrcd(home->xrcd));
		close_side(&home->side);
	}
}

int main(int argc, char **argv)
{
	return run_seeds(run_seed, TWICE, argc, argv);
}
