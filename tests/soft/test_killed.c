/* A survivor whose peers are killed, stopped or leave at any moment, in the middle of traffic of
 * every kind in both directions: it learns of it, nothing else of its own suffers, nothing is left.
 * Over every wire that two processes of one machine can have.
 *
 * test_killed_cm.c does the same with the connection manager.
 */
#include "killing.h"

enum {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	ROUNDS = 60,
	MANY_ROUNDS = 3,
#else
	ROUNDS = 100,
	MANY_ROUNDS = 5,
#endif
	MESSAGE = 128 << 10, /* the longest */
	SLOTS = 4,           /* messages each way, and requests under way */
	ZONE = 512 << 10,
	WARM_UP = 10,
	MANY = 16,   /* connections with one peer */

	/* What one side's memory is for. */
	OUT = 0,
	IN = SLOTS * MESSAGE,
	LANDING = 2 * SLOTS * MESSAGE, /* of READs */
	WORDS = LANDING + ZONE,        /* a pattern: read by the peer, and written to it */
	EXPOSED = WORDS + ZONE, /* written by the peer: its words, in their places, or zeros */
	MEMORY = EXPOSED + ZONE,
};

enum {
	SEND = 1,
	RECV,
	WRITE,
	READ,
	ADD
};

/* ---- one end of a connection --------------------------------------------------------------- */

/* What two ends tell each other. */
struct line {
	struct address address;
	uint32_t words_key, exposed_key;
};

struct end {
	struct side side;
	struct ibv_mr *words, *exposed;
	struct line peer;
	bool up, failed, reading;
	bool talked; /* something of the peer's has come */
	uint32_t longest;
	uint32_t sent, received, outstanding, receives;
	uint64_t added;
};

static uint64_t word(uint32_t at)
{
	return (uint64_t)at << 32 | 0x5a5a5a5a;
}

static uint64_t *words_of(struct end *end, size_t zone)
{
	return (uint64_t *)(void *)(end->side.memory + zone);
}

static struct ibv_mr *expose(struct end *end, size_t zone, int rights)
{
	struct ibv_mr *mr = verbs->ibv_reg_mr(end->side.pd, end->side.memory + zone, ZONE, rights);

	CHECK(mr);
	return mr;
}

/* Time ends the requests of one that gives up, for which there may never have been a peer; else it
 * is the peer's end alone that ends them. */
static void open_end(struct end *end, uint32_t longest, bool gives_up)
{
	memset(end, 0, sizeof(*end));
	end->longest = longest;
	/* 1 s four times, or never. */
	open_side(&end->side, (struct options){.memory = MEMORY,
					       .timeout = gives_up ? 18 : 255,
					       .retry_cnt = 3,
					       .ends_with_peer = true});
	end->words = expose(end, WORDS, IBV_ACCESS_REMOTE_READ);
	end->exposed =
		expose(end, EXPOSED,
		       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
	for (uint32_t i = 0; i < ZONE / 8; i++)
		words_of(end, WORDS)[i] = word(i);
}

/* The exposed bytes are the peer's or unchanged (a write that breaks off does so anywhere, in the
 * middle of a word too); the rest was open to no peer. */
static void close_end(struct end *end)
{
	destroy_qp(&end->side);
	for (uint32_t i = 1; i < ZONE / 8; i++) { /* the first one is for addition */
		uint64_t found = words_of(end, EXPOSED)[i], whole = word(i);

		for (int byte = 0; byte < 8; byte++, found >>= 8, whole >>= 8)
			CHECK((uint8_t)found == 0 || (uint8_t)found == (uint8_t)whole);
		CHECK(words_of(end, WORDS)[i] == word(i));
	}
	CHECK_EQUAL(verbs->ibv_dereg_mr(end->words), 0);
	CHECK_EQUAL(verbs->ibv_dereg_mr(end->exposed), 0);
	close_side(&end->side);
}

static struct line line_of(const struct end *end)
{
	return (struct line){
		.address = address_of_side(&end->side),
		.words_key = end->words->rkey,
		.exposed_key = end->exposed->rkey,
	};
}

static void receive_next(struct end *end, uint32_t slot)
{
	CHECK_EQUAL(post_recv_at(&end->side, RECV << 8 | slot, IN + slot * MESSAGE, MESSAGE), 0);
	end->receives++;
}

static void bring_up_end(struct end *end, const struct line *peer)
{
	end->peer = *peer;
	CHECK_EQUAL(to_init(&end->side), 0);
	CHECK_EQUAL(to_rtr(&end->side, &peer->address), 0);
	/* It may be dead again by now, and the queue pair in ERR. */
	if (to_rts(&end->side))
		CHECK_EQUAL(state_of(&end->side), IBV_QPS_ERR);
	end->up = true;
	for (uint32_t slot = 0; slot < SLOTS; slot++)
		receive_next(end, slot);
}

/* A part of a zone, of whole words. */
static void choose(struct end *end, struct request *request, uint32_t wr_id, size_t from, size_t to,
		   uint32_t key)
{
	uint32_t length = 8 * (1 + chance(end->longest / 8 - 1));
	uint32_t offset = 8 * (1 + chance((ZONE - length) / 8)); /* the first one counts */

	request->wr_id = wr_id | (uint64_t)offset << 32;
	request->offset = from + offset;
	request->length = length;
	request->remote = end->peer.address.memory + to + offset;
	request->rkey = key;
}

static void post_next(struct end *end)
{
	struct request request = {.opcode = IBV_WR_SEND};
	uint8_t *message = end->side.memory + OUT + end->sent % SLOTS * MESSAGE;

	switch (chance(4)) {
	case 0:
		request.opcode = IBV_WR_RDMA_WRITE;
		choose(end, &request, WRITE, WORDS, EXPOSED, end->peer.exposed_key);
		break;
	case 1:
		if (end->reading)
			return;
		end->reading = true;
		request.opcode = IBV_WR_RDMA_READ;
		choose(end, &request, READ, LANDING, WORDS, end->peer.words_key);
		memset(end->side.memory + LANDING, 0, ZONE);
		break;
	case 2:
		request = (struct request){
			.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
			.wr_id = ADD,
			.offset = LANDING + ZONE - 8,
			.length = 8,
			.remote = end->peer.address.memory + EXPOSED,
			.rkey = end->peer.exposed_key,
			.compare_add = 1,
		};
		if (end->reading)
			return;
		end->reading = true;
		break;
	default:
		request.wr_id = SEND;
		request.offset = (size_t)(message - end->side.memory);
		request.length = 4 + chance(end->longest - 4);
		memcpy(message, &end->sent, 4);
		fill(message + 4, request.length - 4, end->sent++);
	}
	CHECK_EQUAL(post(&end->side, request), 0);
	end->outstanding++;
}

static void take_message(struct end *end, uint32_t slot, uint32_t length)
{
	uint8_t *message = end->side.memory + IN + slot * MESSAGE;
	uint32_t number;

	memcpy(&number, message, 4);
	CHECK_EQUAL(number, end->received);
	CHECK(filled(message + 4, length - 4, end->received++));
	receive_next(end, slot);
}

static void check_read(struct end *end, const struct ibv_wc *wc)
{
	uint32_t first = (uint32_t)(wc->wr_id >> 32) / 8;

	for (uint32_t i = first; i < first + wc->byte_len / 8; i++)
		CHECK(words_of(end, LANDING)[i] == word(i));
}

static void take(struct end *end, const struct ibv_wc *wc)
{
	bool receive = wc->opcode & IBV_WC_RECV;

	if (wc->status != IBV_WC_SUCCESS) { /* then the opcode is not defined: ibv_poll_cq(3) */
		end->failed = true;
		receive = (wc->wr_id & 0xffff) >> 8 == RECV;
	}
	if (receive)
		end->receives--;
	else
		end->outstanding--;
	if (wc->status != IBV_WC_SUCCESS)
		return;
	end->talked = true;
	if (receive) {
		take_message(end, wc->wr_id & 0xff, wc->byte_len);
		return;
	}
	if ((uint8_t)wc->wr_id == READ)
		check_read(end, wc);
	if ((uint8_t)wc->wr_id == ADD)
		CHECK_EQUAL(words_of(end, LANDING)[ZONE / 8 - 1], end->added++);
	if ((uint8_t)wc->wr_id == READ || (uint8_t)wc->wr_id == ADD)
		end->reading = false;
}

/* A little of everything; false once it has failed. */
static bool step_end(struct end *end)
{
	struct ibv_wc wc[8];
	int count = poll_cq(&end->side, 8, wc);

	CHECK(count >= 0);
	for (int i = 0; i < count; i++)
		take(end, &wc[i]);
	if (!end->failed && end->outstanding < SLOTS)
		post_next(end);
	return !end->failed;
}

/* ---- the peer ------------------------------------------------------------------------------ */

struct order {
	int count; /* connections */
	uint32_t longest;
	uint64_t leaves_ns; /* by itself, after so long; 0: never */
	struct line lines[MANY];
};

static void obey(int fd)
{
	static struct end ends[MANY];
	static struct order order;
	uint64_t start;

	if (recv(fd, &order, sizeof(order), MSG_WAITALL) != sizeof(order))
		_exit(0); /* it is not needed */
	start = now_ns(CLOCK_MONOTONIC);
	for (int i = 0; i < order.count; i++) {
		struct line own;

		open_end(&ends[i], order.longest, false);
		own = line_of(&ends[i]);
		CHECK_EQUAL(send(fd, &own, sizeof(own), MSG_NOSIGNAL), sizeof(own));
		bring_up_end(&ends[i], &order.lines[i]);
	}
	for (;;) {
		for (int i = 0; i < order.count; i++)
			if (!ends[i].failed)
				step_end(&ends[i]);
		if (order.leaves_ns && now_ns(CLOCK_MONOTONIC) - start > order.leaves_ns)
			exit(0); /* without an orderly end */
	}
}

/* ---- the survivor -------------------------------------------------------------------------- */

static void give_order(struct peer *peer, struct end *ends, int count, uint32_t longest,
		       uint64_t leaves_ns, bool gives_up)
{
	static struct order order;

	order = (struct order){.count = count, .longest = longest, .leaves_ns = leaves_ns};
	for (int i = 0; i < count; i++) {
		open_end(&ends[i], longest, gives_up);
		order.lines[i] = line_of(&ends[i]);
	}
	CHECK_EQUAL(send(peer->fd, &order, sizeof(order), MSG_NOSIGNAL), sizeof(order));
}

/* The peer's next line, if it has told it. */
static bool hear_line(const struct peer *peer, struct line *line)
{
	return recv(peer->fd, line, sizeof(*line), MSG_PEEK | MSG_DONTWAIT) == sizeof(*line) &&
	       recv(peer->fd, line, sizeof(*line), MSG_WAITALL) == sizeof(*line);
}

static struct end witness;

static void see_witness(void)
{
	CHECK(step_end(&witness));
}

/* It goes on as before. */
static void see_witness_go_on(void)
{
	uint32_t received = witness.received, sent = witness.sent;

	while (witness.received < received + 3 || witness.sent < sent + 3)
		see_witness();
}

static struct round {
	struct fated fated;
	bool closed, patient;
	struct end end;
} at[AT_ONCE];

static struct fated *fated_at(int i)
{
	return &at[i].fated;
}

static void begin(int i)
{
	struct round *round = &at[i];

	round->fated = next_fated(LEFT_BEHIND + 1);
	round->closed = false;
	round->patient = chance(16) == 0;
	give_order(round->fated.peer, &round->end, 1, MESSAGE,
		   round->fated.fate == LEAVES ? moment_ns() : 0, round->patient);
}

/* Everything that waited has been told, in time. */
static bool all_told(struct round *round)
{
	struct end *end = &round->end;
	uint64_t since = watched_ns() - round->fated.gone_ns;

	CHECK(since < PATIENCE);
	if (!end->failed || end->outstanding || end->receives)
		return false;
	CHECK_EQUAL(state_of(&end->side), IBV_QPS_ERR);
	if (end->talked)
		noticed_after(since);
	return true;
}

/* False: it is over. */
static bool step_round(int i)
{
	struct round *round = &at[i];
	struct fated *fated = &round->fated;
	struct end *end = &round->end;
	bool was_alive = fated->gone_ns == 0;
	struct line line;

	if (fated->peer->fd >= 0 && !end->up && !round->closed && hear_line(fated->peer, &line))
		bring_up_end(end, &line);
	if (fated->peer->fd >= 0 && peer_is_gone(fated->peer) && was_alive)
		fated->gone_ns = watched_ns(); /* has left */
	/* The link to a slow peer may take longer than one that gives up waits for it. */
	if (!round->closed && end->up && !step_end(end))
		CHECK(fated->gone_ns || fated->fate == LEAVES || (round->patient && !end->talked));
	if (!fated->gone_ns && now_ns(CLOCK_MONOTONIC) > fated->next_ns) {
		if (fated->fate == LEFT_BEHIND) {
			close_end(end);
			round->closed = true;
		}
		act(fated, end->talked);
	}
	if (!fated->gone_ns || fated->peer->fd >= 0)
		return true;
	/* One that had not been reached yet is not waited for, except now and then. */
	if (!round->closed && end->up && (end->talked || round->patient) && !all_told(round))
		return true;
	if (!round->closed)
		close_end(end);
	return false;
}

static void go_through(int count)
{
	rounds(count, fated_at, begin, step_round, see_witness);
	see_witness_go_on();
}

/* One peer that all our connections lead to is killed: every one of them is told. */
static void server_of_many(void)
{
	static struct end ends[MANY];
	struct peer *peer = next_peer();
	uint64_t killed_at;
	int up = 0, talked = 0, told = 0;

	give_order(peer, ends, MANY, 4096, 0, false);
	/* Until each has its link: one that has none learns of no end. */
	while (talked < MANY) {
		if (up < MANY && hear_line(peer, &ends[up].peer)) {
			struct line line = ends[up].peer;

			bring_up_end(&ends[up++], &line);
		}
		talked = 0;
		for (int i = 0; i < up; i++) {
			CHECK(step_end(&ends[i]));
			talked += ends[i].talked;
		}
		see_witness();
	}
	CHECK_EQUAL(kill(peer->pid, SIGKILL), 0);
	killed_at = watched_ns();
	while (told < MANY) {
		told = 0;
		for (int i = 0; i < MANY; i++) {
			step_end(&ends[i]);
			told += ends[i].failed && !ends[i].outstanding && !ends[i].receives;
		}
		see_witness();
		CHECK(watched_ns() - killed_at < PATIENCE);
	}
	noticed_after(watched_ns() - killed_at);
	for (int i = 0; i < MANY; i++)
		close_end(&ends[i]);
	while (!peer_is_gone(peer))
		see_witness();
}

static void survive(const char *wire)
{
	struct held before, with_witness;
	struct peer *peer;
	struct line line;

	prepare_peers(1 + WARM_UP + ROUNDS + MANY_ROUNDS, obey);
	CHECK_EQUAL(verbs->ibv_close_device(open_device()),
		    0); /* sanitizers start a thread with ours */
	before = held_now();
	peer = next_peer();
	give_order(peer, &witness, 1, 4096, 0, false);
	while (!hear_line(peer, &line))
		sched_yield();
	bring_up_end(&witness, &line);
	STEP(see_witness_go_on());
	STEP(go_through(WARM_UP));
	with_witness = held_now();
	CHECK_EQUAL(with_witness.shared > 0, strcmp(wire, "shared") == 0);
	notice_count = 0;
	STEP(go_through(ROUNDS));
	STEP(expect_held(&with_witness));
	tell_notices(wire);
	notice_count = 0;
	for (int i = 0; i < MANY_ROUNDS; i++)
		STEP(server_of_many());
	STEP(expect_held(&with_witness));
	tell_notices("the server of many");
	STEP(see_witness_go_on());
	dismiss_peers();
	close_end(&witness);
	before.memory = SIZE_MAX / 2; /* what a library keeps for the next time */
	STEP(expect_held(&before));
	STEP(expect_nothing_left());
}

int main(void)
{
	survive_on_each_wire(survive, 100);
	return 0;
}
