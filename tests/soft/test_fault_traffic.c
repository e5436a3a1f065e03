/* A reliable connection between two processes over a way that loses and doubles: everything happens
 * once and in order all the same (IBTA vol 1, 9.7).  tests/pair has the same within a process, in
 * virtual time.
 *
 * A request fails when its eight tries in a row do, each by the loss of the request or of its answer.
 * Where a tenth of the frames gets lost, that is 1 request of 600,000. */
#include "fault_side.h"

enum {
	ROUNDS = 24,
	MOST = 600000, /* of a message: several frames */
	ROOM = 1 << 20,
	COUNTER = 0, /* in the responder's memory: counted up by atomics */
	WORD = 8, /* swapped */
	ADDED = 16, /* in the requester's: what the atomics answered */
	SWAPPED = 24,
	WRITTEN = 4096, /* by RDMA writes */
	RECEIVED = WRITTEN + ROOM,
	SENT = RECEIVED + ROOM, /* in the requester's memory */
	READ = SENT + ROOM,
	MEMORY = READ + ROOM,
};

/* A word that the device counts in. */
static uint64_t word(const struct side *side, size_t offset)
{
	return __atomic_load_n((uint64_t *)(void *)(side->memory + offset), __ATOMIC_ACQUIRE);
}

static uint32_t length_of(unsigned round)
{
	return 1 + (round * 7919u + round * round * 131u) % (round % 4 ? 3000 : MOST);
}

/* What the requester does in one round, and what the responder must see of it. */
static void requests_of(struct side *side, const struct address *peer, unsigned round)
{
	uint32_t length = length_of(round);
	bool write = round % 3 == 0;
	const struct request requests[] = {
		{.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		 .wr_id = 1,
		 .offset = ADDED,
		 .length = 8,
		 AT(peer, COUNTER),
		 .compare_add = 1},
		{.opcode = write ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND_WITH_IMM,
		 .wr_id = 2,
		 .offset = SENT,
		 .length = length,
		 .imm = round,
		 AT(peer, WRITTEN)},
		{.opcode = IBV_WR_RDMA_WRITE,
		 .wr_id = 3,
		 .offset = SENT,
		 .length = length,
		 AT(peer, WRITTEN)},
		{.opcode = IBV_WR_ATOMIC_CMP_AND_SWP,
		 .wr_id = 4,
		 .offset = SWAPPED,
		 .length = 8,
		 AT(peer, WORD),
		 .compare_add = round,
		 .swap = round + 1},
		{.opcode = IBV_WR_RDMA_READ,
		 .wr_id = 5,
		 .offset = READ,
		 .length = length,
		 AT(peer, WRITTEN)},
	};

	fill(side->memory + SENT, length, round);
	memset(side->memory + READ, 0, length);
	CHECK_EQUAL(post_chain(side, requests, 5), 0);
}

static void post_receive(struct side *side)
{
	CHECK_EQUAL(post_recv_at(side, 6, RECEIVED, ROOM), 0);
}

static void responded(struct side *side, unsigned round)
{
	uint32_t length = length_of(round);
	struct ibv_wc wc = expect_wc(side, 6, IBV_WC_SUCCESS);
	bool write = round % 3 == 0;

	CHECK_EQUAL(wc.imm_data, round);
	CHECK_EQUAL(wc.opcode, write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV);
	CHECK_EQUAL(wc.byte_len, length);
	if (!write)
		CHECK(filled(side->memory + RECEIVED, length, round));
}

/* Only one of the two has a spec; the other one learns that from it.  The spec may come late. */
static void between_processes(unsigned seed, bool late)
{
	struct process process = split();
	struct side side;

	limit_seconds(60);
	if (process.child && !late)
		spec("seed=%u,loss=0.1,duplicate=0.05", seed);
	/* Eight times a quarter of a second: another process may have to wait for its turn. */
	open_side(&side, (struct options){.memory = MEMORY, .timeout = 16});
	struct address peer = exchange(&process, &side);

	CHECK_EQUAL(to_init(&side), 0);
	post_receive(&side);
	CHECK_EQUAL(to_rtr(&side, &peer), 0);
	CHECK_EQUAL(to_rts(&side), 0);
	process_barrier(&process);
	/* Both ways: each is requester and responder. */
	for (unsigned round = 0; round < ROUNDS; round++) {
		if (process.child && late && round == 5)
			spec("seed=%u,loss=0.1", seed);
		if ((round & 1) == !process.child) {
			requests_of(&side, &peer, round);
			for (uint64_t wr_id = 1; wr_id <= 5; wr_id++)
				expect_wc(&side, wr_id, IBV_WC_SUCCESS);
			CHECK(filled(side.memory + READ, length_of(round), round));
		} else {
			responded(&side, round);
			post_receive(&side);
		}
		process_barrier(&process);
	}
	CHECK_EQUAL(word(&side, COUNTER), ROUNDS / 2);
	if (process.child)
		CHECK(counts().lost > 0);
	close_side(&side);
	join(&process);
	no_faults();
}

int main(void)
{
	limit_seconds(110);
	for (unsigned seed = 1; seed <= 4; seed++) { /* on either wire, early and late */
		links_of(seed % 4 < 2 ? "shared" : "tcp");
		STEP(between_processes(seed, seed & 1));
	}
	return 0;
}
