/* Two connected queue pairs do random work over a wire that loses (wire.h), each on a host of its own, in
 * virtual time, and after each step a model is asked whether that can be.
 *
 * What must hold: every work request completes once, in order, and with success unless this life of the
 * connection has been spoiled on purpose; memory holds what the completed requests say, and no byte
 * changes that no key allows; after deregistration nothing is written or sent from there; an armed
 * completion queue wakes; every wait is over in bounded time; memory is bounded.
 */
#include "seeds.h"

#include <malloc.h>

enum {
	DEPTH = 16, /* of each queue */
	LOG = 512, /* requests in one life of the connection */
	MESSAGE = 8 * UNIT, /* at most */
	GAP = 64,
	PLACES = 4, /* of a message, in the memory that the peer may reach */
	LIVES = 3,
	SECONDS = 70, /* a wait is over: the longest timeout of the device is a minute */
	TWICE = 32, /* one seed of so many */
	HEAP_MOST = 1 << 20,
	CONNECTED_NS = 100000000,
	APART_NS = 40000000, /* more than the pauses between the first attempts */
};

enum area_name {
	SENDS,
	RECEIVES,
	TARGET, /* the peer's, by its key */
	WINDOWED, /* the peer's, by the key of a window */
	AREAS
};

static const struct area {
	size_t start, length;
	unsigned rights;
} areas[AREAS] = {
	[SENDS] = {GAP, DEPTH * MESSAGE, IBV_ACCESS_LOCAL_WRITE},
	[RECEIVES] = {2 * GAP + DEPTH * MESSAGE, DEPTH * MESSAGE, IBV_ACCESS_LOCAL_WRITE},
	[TARGET] = {3 * GAP + 2 * DEPTH * MESSAGE, PLACES * MESSAGE, ALL_RIGHTS},
	[WINDOWED] = {4 * GAP + (2 * DEPTH + PLACES) * MESSAGE, MESSAGE,
		      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND},
};

enum {
	MEMORY = 5 * GAP + (2 * DEPTH + PLACES + 1) * MESSAGE,
	REACHED = (PLACES + 1) * MESSAGE, /* what a peer may reach, as the model counts it */
};

/* A request, and what the model knows of it. */
struct work {
	enum ibv_wr_opcode opcode;
	bool signaled, solicited, fenced, done;
	bool wrong; /* no key opens that memory */
	bool failed; /* perhaps it has been carried out */
	uint32_t length, immediate;
	uint32_t at; /* among the bytes that the peer may reach */
	uint64_t result, value; /* of an atomic: the word before and after it */
};

struct end {
	struct side side;
	struct ibv_mr *mrs[AREAS];
	struct ibv_mw *window;
	uint32_t window_key;
	enum {
		UNBOUND,
		BINDING,
		BOUND,
		ENDING
	} window_is; /* ENDING: being invalidated */
	bool gone[AREAS]; /* deregistered */

	struct work works[LOG];
	int posted, completed, signaled; /* and the last that is signaled */
	int messages[LOG], message_count; /* those that take a receive of the peer */
	int message; /* the next of the peer's to arrive */
	unsigned receives, received; /* over all lives */
	bool may_skip; /* a receive of a shared queue, which a reset took with it */
	uint64_t progress_at; /* something has completed */
	bool failed, was_reset, died;
	bool starves; /* it posts no receives any more */
	bool is_short, fell_short; /* it has posted one that is short; a message has been longer */
	enum {
		NEVER,
		ALWAYS,
		SOLICITED
	} armed; /* when a completion makes an event */

	/* What the peer may reach: at the beginning of this life, and when all has been done. */
	uint8_t before[REACHED], after[REACHED];
	uint8_t read[DEPTH][MESSAGE]; /* what a READ must bring */
	int readers[PLACES + 1]; /* READs of each place that are not done */
};

static struct end ends[SIDES];
static int life;
static bool spoiled; /* requests of this life may fail */
static bool may_run_out; /* of tries after RNR, which are so many at least so far apart: */
static uint64_t rnr_retry, rnr_delay_ns;
static size_t heap; /* at most HEAP_MOST less than there may be */
static const char *const steps[] = {"the beginning", "random work", "the end of a life"};

static struct end *peer_of(const struct end *end)
{
	return &ends[end == ends];
}

/* Its host is entered. */
static struct side *on(struct end *end)
{
	enter(end == &ends[1]);
	return &end->side;
}

static char name_of(const struct end *end)
{
	return "ab"[end - ends];
}

static uint8_t *memory_of(struct end *end, enum area_name area)
{
	return end->side.memory + areas[area].start;
}

/* The byte that the model counts as `at`. */
static uint8_t *reached(struct end *end, uint32_t at)
{
	return at < areas[TARGET].length ? memory_of(end, TARGET) + at
					 : memory_of(end, WINDOWED) + (at - areas[TARGET].length);
}

static unsigned pattern_of(const struct end *end, int index)
{
	return (unsigned)(index * 37 + life * 101 + (end == ends) * 59);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static const uint64_t secret = UINT64_C(0x5ec2e75ec2e7a11d);

static void share(struct end *end, enum area_name area)
{
	memset(memory_of(end, area), 0, areas[area].length);
	CHECK(end->mrs[area] = verbs->ibv_reg_mr(on(end)->pd, memory_of(end, area),
						 areas[area].length, (int)areas[area].rights));
	end->gone[area] = false;
}

/* Between the areas, and where nothing is shared any more. */
static void nothing_touched(struct end *end)
{
	size_t from = 0;

	for (int i = 0; i <= AREAS; i++) {
		size_t to = i < AREAS ? areas[i].start : MEMORY;

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

static bool any_gone(void)
{
	for (int i = 0; i < SIDES * AREAS; i++)
		if (ends[i / AREAS].gone[i % AREAS])
			return true;
	return false;
}

/* The first of a queue that fails. */
static bool may_fail(const struct end *end, const struct work *work, enum ibv_wc_status status)
{
	struct end *peer = peer_of(end);

	switch (status) {
	case IBV_WC_RETRY_EXC_ERR: /* a refusal got lost, or the responder does not answer */
		return wire.fault_count || wire.cut || peer->failed ||
		       (!work->wrong && state_of(on(peer)) != IBV_QPS_RTS);
	case IBV_WC_RNR_RETRY_EXC_ERR:
		return may_run_out && takes_receive(work->opcode) &&
		       fuzz_now_ns >= end->progress_at + rnr_retry * rnr_delay_ns;
	case IBV_WC_LOC_PROT_ERR:
	case IBV_WC_REM_OP_ERR:
		return any_gone();
	case IBV_WC_REM_INV_REQ_ERR:
		return peer->fell_short && takes_receive(work->opcode);
	case IBV_WC_REM_ACCESS_ERR:
		return any_gone() || work->wrong;
	default:
		return false;
	}
}

static void settle(struct end *end, int index, enum ibv_wc_status status)
{
	struct work *work = &end->works[index];
	const uint8_t *local = memory_of(end, SENDS) + index % DEPTH * MESSAGE;

	CHECK(!work->done);
	work->done = true;
	if (work->opcode == IBV_WR_RDMA_READ)
		end->readers[work->at / MESSAGE]--;
	if (work->opcode == IBV_WR_BIND_MW || work->opcode == IBV_WR_LOCAL_INV)
		end->window_is = status == IBV_WC_SUCCESS && work->opcode == IBV_WR_BIND_MW
					 ? BOUND
					 : UNBOUND;
	if (status != IBV_WC_SUCCESS) {
		CHECK(spoiled || (may_run_out && status == IBV_WC_RNR_RETRY_EXC_ERR));
		spoiled = true;
		CHECK(status == IBV_WC_WR_FLUSH_ERR ||
		      (!end->failed && may_fail(end, work, status)));
		end->failed = true;
		work->failed = true;
		return;
	}
	CHECK(!work->wrong && !end->failed);
	if (end->gone[SENDS])
		return;
	if (work->opcode == IBV_WR_RDMA_READ)
		CHECK(!memcmp(local, end->read[index % DEPTH], work->length));
	if (work->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
	    work->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		CHECK(!memcmp(local, &work->result, sizeof(work->result)));
}

static void sent(struct end *end, const struct ibv_wc *wc)
{
	int index = (int)(wc->wr_id & 0xffff);

	CHECK_EQUAL(wc->wr_id >> 16, life);
	CHECK(index >= end->completed && index < end->posted);
	for (; end->completed < index; end->completed++) {
		CHECK(!end->works[end->completed].signaled);
		settle(end, end->completed, IBV_WC_SUCCESS);
	}
	CHECK(wc->status != IBV_WC_SUCCESS || end->works[index].signaled);
	settle(end, end->completed++, wc->status);
	wire_progress((int)(end - ends));
	end->progress_at = fuzz_now_ns;
}

/* Whether its sender has asked for an event. */
static bool arrived(struct end *end, const struct ibv_wc *wc)
{
	struct end *peer = peer_of(end);
	unsigned index = (unsigned)(wc->wr_id & 0xffffffff);

	if (end->may_skip && index == end->received + 1)
		end->received++;
	end->may_skip = false;
	CHECK_EQUAL(index, end->received);
	CHECK(end->received++ < end->receives);
	if (wc->status != IBV_WC_SUCCESS) {
		end->fell_short |= wc->status == IBV_WC_LOC_LEN_ERR && end->is_short;
		CHECK(spoiled && (wc->status == IBV_WC_WR_FLUSH_ERR || end->gone[RECEIVES] ||
				  end->fell_short));
		return false;
	}
	CHECK(end->message < peer->message_count);
	int number = peer->messages[end->message++];
	const struct work *work = &peer->works[number];
	uint8_t *at = memory_of(end, RECEIVES) + index % DEPTH * MESSAGE;

	CHECK_EQUAL(wc->byte_len, work->length);
	CHECK_EQUAL(wc->opcode, work->opcode == IBV_WR_RDMA_WRITE_WITH_IMM
					? IBV_WC_RECV_RDMA_WITH_IMM
					: IBV_WC_RECV);
	CHECK_EQUAL(!!(wc->wc_flags & IBV_WC_WITH_IMM),
		    work->opcode == IBV_WR_SEND_WITH_IMM ||
			    work->opcode == IBV_WR_RDMA_WRITE_WITH_IMM);
	if (wc->wc_flags & IBV_WC_WITH_IMM)
		CHECK_EQUAL(wc->imm_data, work->immediate);
	CHECK_EQUAL(!!(wc->wc_flags & IBV_WC_WITH_INV), work->opcode == IBV_WR_SEND_WITH_INV);
	if (work->opcode == IBV_WR_SEND_WITH_INV)
		end->window_is = UNBOUND;
	if (wc->opcode == IBV_WC_RECV && !end->gone[RECEIVES]) {
		CHECK(filled(at, work->length, pattern_of(peer, number)));
		for (uint32_t i = work->length; i < MESSAGE; i++)
			CHECK(at[i] == 0xee);
	}
	return work->solicited;
}

/* As an application that sleeps: what comes to an armed queue wakes it. */
static void take_completions(struct end *end)
{
	struct ibv_wc wc[DEPTH];
	bool wakes = false;
	int n;

	while ((n = poll_cq(on(end), DEPTH, wc)) > 0)
		for (int i = 0; i < n; i++) {
			bool receive = wc[i].wr_id >> 32;

			note("%c completes %s %u: %s", name_of(end),
			     receive ? "receive" : "request", (unsigned)(wc[i].wr_id & 0xffff),
			     verbs->ibv_wc_status_str(wc[i].status));
			CHECK_EQUAL(wc[i].qp_num, end->side.qp->qp_num);
			if (receive)
				wakes |= arrived(end, &wc[i]);
			else
				sent(end, &wc[i]);
			wakes |= end->armed == ALWAYS || wc[i].status != IBV_WC_SUCCESS;
		}
	CHECK_EQUAL(n, 0);
	if (end->armed) {
		struct ibv_cq *cq;
		void *context;
		bool woken = !verbs->ibv_get_cq_event(on(end)->channel, &cq, &context);

		CHECK_EQUAL(woken, wakes);
		if (woken) {
			verbs->ibv_ack_cq_events(cq, 1);
			end->armed = NEVER;
		}
	} else if (chance(300)) {
		end->armed = chance(700) ? ALWAYS : SOLICITED;
		CHECK_EQUAL(
			on(end)->context->ops.req_notify_cq(end->side.cq, end->armed == SOLICITED),
			0);
	}
}

static void after_step(void)
{
	for (int i = 0; i < SIDES; i++)
		take_completions(&ends[i]);
	for (int i = 0; i < SIDES; i++) {
		const struct end *end = &ends[i], *peer = peer_of(end);

		/* A message that is acknowledged has been received. */
		for (int m = peer->message; m < end->message_count; m++)
			CHECK(!end->works[end->messages[m]].done ||
			      end->works[end->messages[m]].failed);
		nothing_touched(&ends[i]);
	}
}

static void pass(uint64_t ns)
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
	uint8_t *at = memory_of(end, RECEIVES) + end->receives % DEPTH * MESSAGE;
	uint32_t first = chance(300) ? draw(length) : length;

	if (end->receives - end->received == DEPTH || end->gone[RECEIVES] || end->was_reset ||
	    end->starves)
		return;
	struct ibv_sge sges[] = {
		{(uintptr_t)at, first, end->mrs[RECEIVES]->lkey},
		{(uintptr_t)at + first, length - first, end->mrs[RECEIVES]->lkey},
	};

	memset(at, 0xee, MESSAGE);
	CHECK_EQUAL(post_recv_wr(on(end),
				 &(struct ibv_recv_wr){.wr_id = UINT64_C(1) << 32 | end->receives,
						       .sg_list = sges,
						       .num_sge = first < length ? 2 : 1}),
		    0);
	end->receives++;
	note("%c posts a receive", name_of(end));
}

/* Length mostly around whole units. */
static uint32_t some_length(void)
{
	uint32_t length = draw(MESSAGE / UNIT) * UNIT + draw(3) - 1;

	return chance(300) ? draw(64) : length > MESSAGE ? 0 : length;
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
	IBV_WR_SEND_WITH_INV,
	IBV_WR_BIND_MW,
	IBV_WR_BIND_MW,
	IBV_WR_LOCAL_INV,
};

/* What a request does to the bytes that the peer lets it reach. */
static void perform(const struct end *end, int index, uint8_t *bytes)
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

/* The model carries the request out: all before it have been. */
static void foretell(struct end *end, int index, const struct ibv_send_wr *wr)
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
	perform(end, index, after);
}

/* A place in the peer's memory; false: there is none for that. */
static bool choose_place(struct end *end, struct work *work)
{
	struct end *peer = peer_of(end);
	uint32_t place = draw(PLACES + 1);

	work->at = place * MESSAGE + (MESSAGE - work->length ? draw(MESSAGE - work->length) : 0);
	if (work->length == sizeof(uint64_t) && work->opcode != IBV_WR_RDMA_WRITE)
		work->at &= ~7u;
	/* What a READ that may be repeated reads is not to change before: IBTA 10.8.3.3. */
	if (work->opcode != IBV_WR_RDMA_READ && end->readers[place])
		work->fenced = true;
	return (place < PLACES ? !peer->gone[TARGET] : peer->window_is == BOUND) &&
	       (!work->fenced || chance(300));
}

/* By requests that are not done. */
static bool window_is_used(const struct end *by)
{
	for (int i = by->completed; i < by->posted; i++)
		if (by->works[i].at >= areas[TARGET].length)
			return true;
	return false;
}

enum manner {
	USUAL,
	WRONG, /* with a key that opens nothing, or not so much: the peer refuses it */
	EMPTY, /* without a byte, for which no key is needed; always signaled */
};

/* Posts a request of that kind, or none if the model has no place for it now. */
static void post_some(struct end *end, enum ibv_wr_opcode opcode, enum manner manner)
{
	struct end *peer = peer_of(end);
	int index = end->posted;
	uint8_t *local = memory_of(end, SENDS) + index % DEPTH * MESSAGE;
	struct work *work = &end->works[index];
	bool atomic = opcode == IBV_WR_ATOMIC_CMP_AND_SWP ||
		      opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_WRITE;
	bool remote = atomic || opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_RDMA_WRITE ||
		      opcode == IBV_WR_RDMA_WRITE_WITH_IMM;

	bool empty = manner == EMPTY;

	if (end->posted - end->completed == DEPTH || end->was_reset ||
	    (!empty && (end->posted == LOG - 1 || end->gone[SENDS])))
		return;
	*work = (struct work){.opcode = opcode, .length = atomic ? 8 : empty ? 0 : some_length()};
	if ((remote && !empty && !choose_place(end, work)) ||
	    (opcode == IBV_WR_SEND_WITH_INV && peer->window_is != BOUND) ||
	    (opcode == IBV_WR_BIND_MW && end->window_is != UNBOUND) ||
	    (opcode == IBV_WR_LOCAL_INV && (end->window_is != BOUND || window_is_used(peer))))
		return;
	work->signaled = empty || index - end->signaled >= DEPTH / 4 || chance(700);
	/* A READ by the key that is invalidated, likewise. */
	work->fenced |= opcode == IBV_WR_SEND_WITH_INV;
	work->solicited = takes_receive(opcode) && chance(300);
	work->immediate = draw(UINT32_MAX);
	work->wrong = manner == WRONG && remote && work->length;

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
	};

	if (!atomic && opcode != IBV_WR_RDMA_READ && work->length <= 128 && chance(500))
		wr.send_flags |= IBV_SEND_INLINE;
	if (atomic && opcode != IBV_WR_ATOMIC_WRITE) {
		wr.wr.atomic.remote_addr = (uintptr_t)reached(peer, work->at);
		wr.wr.atomic.rkey = windowed ? peer->window_key : peer->mrs[TARGET]->rkey;
		wr.wr.atomic.compare_add = draw(100);
		memcpy(&wr.wr.atomic.swap, peer->after + work->at, sizeof(wr.wr.atomic.swap));
		if (chance(500)) /* the one that it will be compared with */
			wr.wr.atomic.compare_add = wr.wr.atomic.swap;
		wr.wr.atomic.swap ^= draw(UINT32_MAX);
	} else if (remote && !empty) {
		wr.wr.rdma.remote_addr = (uintptr_t)reached(peer, work->at);
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
			.length = MESSAGE,
			.mw_access_flags = ALL_RIGHTS & ~IBV_ACCESS_LOCAL_WRITE,
		};
	}
	if (opcode == IBV_WR_RDMA_READ)
		end->readers[work->at / MESSAGE]++;
	if (!work->wrong)
		foretell(end, index, &wr);
	fill(local, work->length, pattern_of(end, index));
	if (takes_receive(opcode))
		end->messages[end->message_count++] = index;
	if (work->signaled)
		end->signaled = index;
	end->posted++;
	note("%c posts %d: opcode %d, %u bytes at %u%s", name_of(end), index, opcode, work->length,
	     work->at, work->wrong ? ", wrong" : "");
	CHECK_EQUAL(post_wr(on(end), &wr), 0);
}

/* ---- a life of the connection ---------------------------------------------------------------- */

static void begin_life(bool loses)
{
	life++;
	spoiled = false;
	for (int i = 0; i < SIDES; i++) {
		struct end *end = &ends[i];

		end->posted = end->completed = end->message_count = end->message = 0;
		end->signaled = -1;
		end->progress_at = fuzz_now_ns;
		end->failed = end->was_reset = end->died = end->starves = end->is_short =
			end->fell_short = false;
		end->window_is = UNBOUND;
		memset(end->readers, 0, sizeof(end->readers));
		if (end->window)
			CHECK_EQUAL(on(end)->context->ops.dealloc_mw(end->window), 0);
		for (int area = 0; area < AREAS; area++)
			if (!end->mrs[area])
				share(end, (enum area_name)area);
		CHECK(end->window = on(end)->context->ops.alloc_mw(end->side.pd, IBV_MW_TYPE_2));
		end->window_key = end->window->rkey;
		for (uint32_t at = 0; at < REACHED; at += MESSAGE)
			memcpy(end->before + at, reached(end, at), MESSAGE);
		memcpy(end->after, end->before, REACHED);
		/* Often so that it wraps. */
		end->side.psn = chance(700) ? 0xffffff - draw(32) : draw(0x1000000);
	}
	wire_heal();
	wire_vary(loses);
	/* The second one before the first has got an answer, or when both look for each other. */
	for (int i = 0, first = chance(500); i < SIDES; i++) {
		struct address peer = address_of_side(on(&ends[i == first]));

		bring_up(on(&ends[i != first]), &peer);
		if (!i && chance(500))
			pass(draw(APART_NS));
	}
	for (uint64_t until = fuzz_now_ns + CONNECTED_NS;
	     !is_up(&ends[0].side) || !is_up(&ends[1].side);) {
		CHECK(wire_next() < until);
		wire_step();
	}
	note("life %d: frames of %u, %d together, %d under way, %d faults in 1000", life,
	     calls.frame_most, calls.frames_most, wire.window, wire.per_mille);
}

static void open_end(struct end *end, struct options options)
{
	struct side *side = on(end);

	open_side(side, options);
	CHECK_EQUAL(fcntl(side->channel->fd, F_SETFL, O_NONBLOCK), 0);
	fill_with_secret(side->memory, MEMORY);
	for (int area = 0; area < AREAS; area++)
		end->gone[area] = true;
}

/* Its requests and receives are no more. */
static void forget(struct end *end)
{
	for (; end->completed < end->posted; end->completed++)
		end->works[end->completed].failed = true;
	end->failed = end->was_reset = true;
}

/* Its host begins anew, without a connection.  Where nothing gets lost its kernel says so. */
static void end_dies(struct end *end, bool told)
{
	note("the host of %c dies%s", name_of(end), told ? "" : " without a word");
	die(end == &ends[1], told);
	forget(end);
	end->died = true;
	end->received = end->receives;
	end->armed = NEVER;
	end->window = NULL;
	memset(end->mrs, 0, sizeof(end->mrs));
	open_end(end, end->side.options);
	heap = mallinfo2().uordblks;
}

/* Once in some lives, something that a connection does not survive. */
static void spoil(bool loses)
{
	struct end *end = &ends[draw(SIDES)];
	enum area_name area = (enum area_name)draw(WINDOWED);

	spoiled = true;
	if (may_run_out && chance(300)) {
		note("%c posts no more receives", name_of(end));
		end->starves = true;
		return;
	}
	switch (draw(loses ? 7 : 6)) {
	case 0:
		note("%c posts what is refused", name_of(end));
		post_some(end, chance(500) ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, WRONG);
		post_some(end, IBV_WR_RDMA_WRITE, USUAL);
		break;
	case 1: /* receives of a shared queue would outlive the connection */
		if (area == RECEIVES && end->side.srq)
			area = TARGET;
		for (int i = 0; i < 2; i++) /* perhaps in the middle of one of these */
			post_some(peer_of(end), chance(700) ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ,
				  USUAL);
		pass(draw(8000));
		note("%c deregisters %d", name_of(end), area);
		on(end);
		CHECK_EQUAL(verbs->ibv_dereg_mr(end->mrs[area]), 0);
		end->mrs[area] = NULL;
		end->gone[area] = true;
		fill_with_secret(memory_of(end, area), areas[area].length);
		break;
	case 2:
		note("%c is put into ERR", name_of(end));
		CHECK_EQUAL(to_state(on(end), IBV_QPS_ERR), 0);
		break;
	case 3:
		note("%c is reset", name_of(end));
		CHECK_EQUAL(to_state(on(end), IBV_QPS_RESET), 0);
		forget(end);
		break;
	case 4: /* of a shared queue it would outlive the connection */
		end->is_short = !end->side.srq;
		note("%c posts a short receive", name_of(end));
		post_receive(end, end->is_short ? UNIT : MESSAGE);
		break;
	case 5:
		end_dies(end, !loses || chance(500));
		break;
	default:
		note("the wire is cut");
		wire.cut = true;
	}
}

static bool is_over(const struct end *end)
{
	const struct end *peer = peer_of(end);

	return end->completed == end->posted && (spoiled || end->message == peer->message_count);
}

/* What the peer may reach is as the completed requests have left it, but for bytes of those that have
 * failed, which may have been carried out. */
static void memory_is_right(struct end *end)
{
	static uint8_t one[REACHED];
	const struct end *peer = peer_of(end);

	for (int i = 0; i < peer->posted; i++)
		if (!peer->works[i].failed)
			perform(peer, i, end->before);
	for (uint32_t at = 0; at < REACHED; at++) {
		bool right = *reached(end, at) == end->before[at] ||
			     (end->gone[TARGET] && at < areas[TARGET].length);

		for (int i = 0; i < peer->posted && !right; i++) {
			const struct work *work = &peer->works[i];

			if (!work->failed || work->wrong || at - work->at >= work->length)
				continue;
			perform(peer, i, one);
			right = one[at] == *reached(end, at);
		}
		CHECK(right);
	}
}

/* Every wait is over in its time, and what the peer may reach is as the model says. */
static void end_life(void)
{
	static uint64_t retried;
	struct aiordma_fault_counts counts;
	uint64_t retries = 0;
	uint64_t until = fuzz_now_ns + SECONDS * (uint64_t)NS_PER_S;

	for (int i = 0; i < SIDES; i++)
		if (ends[i].gone[RECEIVES] && !ends[i].died) /* it will never be ready again */
			CHECK_EQUAL(to_state(on(&ends[i]), IBV_QPS_ERR), 0);
	for (int i = 0; i < SIDES; i++)
		if (!ends[i].failed && ends[i].signaled < ends[i].posted - 1)
			ends[i].signaled = -DEPTH; /* the last one is to be told of */
	while (!is_over(&ends[0]) || !is_over(&ends[1])) {
		for (int i = 0; i < SIDES; i++) {
			if (ends[i].signaled == -DEPTH)
				post_some(&ends[i], IBV_WR_RDMA_WRITE, EMPTY);
			post_receive(&ends[i], MESSAGE);
		}
		after_step();
		if (is_over(&ends[0]) && is_over(&ends[1]))
			break;
		CHECK(wire_next() < until);
		wire_step();
		after_step();
	}
	after_step();
	/* Nothing is sent again without a reason: a fault, which both sides may have noticed, and once
	 * more when answers from before come in. */
	for (int i = 0; i < SIDES; i++) {
		on(&ends[i]);
		aiordma_embedded_fault_counts(&counts);
		retries += counts.retried;
	}
	CHECK(wire.cut || ends[0].died || ends[1].died ||
	      retries <= retried + 4 * wire.fault_count);
	retried = retries, wire.fault_count = 0;
	for (int i = 0; i < SIDES; i++)
		if (!ends[i].died) /* nothing_touched has looked */
			memory_is_right(&ends[i]);
	for (int i = 0; i < SIDES; i++) {
		struct end *end = &ends[i];

		if (state_of(on(end)) == IBV_QPS_ERR && !end->side.srq)
			CHECK_EQUAL(end->received, end->receives);
		CHECK_EQUAL(to_state(on(end), IBV_QPS_RESET), 0);
		end->may_skip = end->side.srq;
		if (!end->side.srq)
			end->received = end->receives;
	}
}

static void one_thing(void)
{
	struct end *end = &ends[draw(SIDES)];

	switch (draw(16)) {
	case 0:
	case 1:
	case 2:
	case 3:
		post_receive(end, MESSAGE);
		break;
	case 4:
	case 5:
		pass(draw(20000) << draw(9));
		break;
	case 6: /* what has begun is brought to its end, the rest waits */
		note("%c is drained", name_of(end));
		if (!spoiled)
			CHECK_EQUAL(to_state(on(end), IBV_QPS_SQD), 0);
		post_some(end, IBV_WR_RDMA_WRITE, USUAL);
		pass(draw(20000));
		if (state_of(on(end)) == IBV_QPS_SQD)
			CHECK_EQUAL(to_state(on(end), IBV_QPS_RTS), 0);
		break;
	case 7:
	case 8: /* several at once */
		for (uint32_t count = draw(DEPTH); count; count--)
			post_some(end, opcodes[draw(sizeof(opcodes) / sizeof(opcodes[0]))], USUAL);
		break;
	default:
		post_some(end, opcodes[draw(sizeof(opcodes) / sizeof(opcodes[0]))], USUAL);
	}
	after_step();
}

/* ---- seeds ----------------------------------------------------------------------------------- */

static void run_seed(void)
{

	static const struct {
		uint8_t code;
		uint64_t delay_ns;
	} rnr_timers[] = {{1, 10000}, {5, 60000}, {12, 640000}, {20, 10240000}};
	uint32_t rnr = draw(sizeof(rnr_timers) / sizeof(rnr_timers[0]));
	struct options options = {.memory = MEMORY, .sends = DEPTH, .receives = DEPTH};

	wire.secret = secret;
	options.mtu = IBV_MTU_256;
	options.signal_none = true;
	options.timeout = (uint8_t)(8 + draw(6));
	options.retry_cnt = (uint8_t)(chance(400) ? 7 : 2 + draw(3));
	may_run_out = chance(200);
	rnr_retry = options.rnr_retry = may_run_out ? (uint8_t)(1 + draw(6)) : 7;
	options.rnr_timer = rnr_timers[rnr].code;
	rnr_delay_ns = rnr_timers[rnr].delay_ns;
	options.depth = (uint8_t)(1 + draw(4));
	wire.faults_most = options.retry_cnt - 1;
	for (int i = 0; i < SIDES; i++) {
		options.shared = chance(300) ? DEPTH : 0;
		open_end(&ends[i], options);
	}
	heap = mallinfo2().uordblks;
	for (uint32_t lives = 1 + draw(LIVES); lives; lives--) {
		uint32_t things = 10 + draw(60);
		bool loses = chance(900);
		uint32_t spoiled_at = chance(500) ? draw(things) : things;

		current_step = steps[0];
		begin_life(loses);
		current_step = steps[1];
		for (uint32_t i = 0; i < things; i++) {
			if (i == spoiled_at)
				spoil(loses);
			if (spoiled && i == spoiled_at + 5)
				break;
			one_thing();
		}
		CHECK(mallinfo2().uordblks < heap + HEAP_MOST);
		current_step = steps[2];
		end_life();
	}
	for (int i = 0; i < SIDES; i++) {
		on(&ends[i]);
		if (ends[i].window)
			CHECK_EQUAL(ends[i].side.context->ops.dealloc_mw(ends[i].window), 0);
		for (int area = 0; area < AREAS; area++)
			if (ends[i].mrs[area])
				CHECK_EQUAL(verbs->ibv_dereg_mr(ends[i].mrs[area]), 0);
		close_side(&ends[i].side);
	}
}

int main(int argc, char **argv)
{
	return run_seeds(run_seed, TWICE, argc, argv);
}
