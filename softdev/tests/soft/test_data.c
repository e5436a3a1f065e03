/* Every operation moves the right bytes, of all sizes, also between two processes; a READ those from
 * before what was posted behind it.  Inline data, atomics and memory in pieces: tests/pair, tests/verbs. */
#include "verbs_side.h"

/* A READ has the bytes from before the requests that were posted with it, behind it, without a
 * fence: read_order.c. */
static void read_before(struct side *a, struct side *b)
{
	static const struct request behind[] = {
		{.opcode = IBV_WR_RDMA_WRITE, .length = 24000, .remote = 8000},
		{.opcode = IBV_WR_RDMA_WRITE, .length = 8, .remote = 0},
		{.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		 .length = 8,
		 .remote = 16,
		 .compare_add = 1},
		{.opcode = IBV_WR_SEND, .length = 100}, /* to 500 */
	};
	enum { LARGE = 32000 };

	/* What is kept for a READ is given back: often enough for any bound. */
	for (unsigned round = 0; round < 40; round++) {
		struct request chain[2] = {
			{.opcode = IBV_WR_RDMA_READ,
			 .wr_id = 1,
			 .length = round % 2 ? LARGE : 700,
			 .remote = (uintptr_t)b->memory,
			 .rkey = b->mr->rkey},
			behind[round / 2 % 4],
		};

		chain[1].wr_id = 2;
		chain[1].offset = LARGE;
		chain[1].remote += (uintptr_t)b->memory;
		chain[1].rkey = b->mr->rkey;
		fill(b->memory, LARGE, round);
		fill(a->memory + LARGE, 24000, round + 1);
		if (chain[1].opcode == IBV_WR_SEND)
			receive_at(b, 3, 500, 100);
		CHECK_OK(post_chain(a, chain, 2));
		expect_wc(a, 1, IBV_WC_SUCCESS);
		expect_wc(a, 2, IBV_WC_SUCCESS);
		CHECK(filled(a->memory, chain[0].length, round));
		CHECK(!filled(b->memory, LARGE, round));
		if (chain[1].opcode == IBV_WR_SEND)
			expect_wc(b, 3, IBV_WC_SUCCESS);
	}
}

/* All sizes around the borders of frames, copies and reads; both directions at once. */
static void sizes(struct side *a, struct side *b)
{
	static const uint32_t lengths[] = {1,     39,     40,     41,     1023,   1024,    1025,
					   4095,  4096,   4097,   16384,  32727,  32728,   32729,
					   65536, 262143, 262144, 262145, 524288, 1000000, 3000000};
	enum { HALF = 3 << 20 };

	FOR_EACH (i, lengths) {
		uint32_t length = lengths[i];

		fill(a->memory, length, (unsigned)i);
		fill(b->memory, length, (unsigned)i + 100);
		receive_at(a, 1, HALF, HALF);
		receive_at(b, 1, HALF, HALF);
		POST(a, IBV_WR_SEND, .wr_id = 2, .length = length);
		POST(b, IBV_WR_SEND, .wr_id = 2, .length = length);
		for (int side = 0; side < 2; side++) {
			struct side *at = side ? b : a;
			uint64_t seen = 0;

			for (int n = 0; n < 2; n++) {
				struct ibv_wc wc = next_wc(at);

				CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
				CHECK_EQUAL(wc.byte_len, length);
				seen |= wc.wr_id;
			}
			CHECK_EQUAL(seen, 3);
		}
		CHECK(filled(b->memory + HALF, length, (unsigned)i));
		CHECK(filled(a->memory + HALF, length, (unsigned)i + 100));

		memset(a->memory + HALF, 0, length);
		POST(a, IBV_WR_RDMA_READ, .wr_id = 3, .length = length, .offset = HALF,
		     REMOTE(b, 0));
		POST(b, IBV_WR_RDMA_WRITE, .wr_id = 4, .length = length, REMOTE(a, 0));
		expect_wc(a, 3, IBV_WC_SUCCESS);
		expect_wc(b, 4, IBV_WC_SUCCESS);
		CHECK(filled(a->memory + HALF, length, (unsigned)i + 100));
		CHECK(filled(a->memory, length, (unsigned)i + 100));
	}
}

/* Two processes: messages of changing sizes there and back, sends and writes, with immediate data; on RC
 * atomics in between. */
static void between_processes(bool uc)
{
	enum { ROUNDS = 2000, ROOM = 1 << 20, WORD = 2 * ROOM };
	struct process process = split();
	struct side side;

	limit_seconds(60);
	open_side(&side, (struct options){.memory = WORD + 64, .uc = uc});
	struct address peer = exchange(&process, &side);

	CHECK_OK(to_init(&side));
	receive_at(&side, 1, ROOM, ROOM);
	CHECK_OK(to_rtr(&side, &peer));
	CHECK_OK(to_rts(&side));
	process_barrier(&process); /* UC loses what comes before */
	for (unsigned round = 0; round < ROUNDS; round++) {
		uint32_t length = 1 + (round * 7919u) % (round % 50 ? 5000 : ROOM);
		bool mine = (round & 1) == (process.child != 0), write = round % 3 == 0;

		if (mine) {
			fill(side.memory, length, round);
			if (!uc)
				POST(&side, IBV_WR_ATOMIC_FETCH_AND_ADD, .wr_id = 3, .length = 8,
				     .offset = WORD + 8, .remote = peer.memory + WORD,
				     .rkey = peer.rkey, .compare_add = 1);
			POST(&side, write ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND_WITH_IMM,
			     .wr_id = 2, .length = length, .imm = round,
			     .remote = peer.memory + ROOM, .rkey = peer.rkey);
			if (!uc)
				expect_wc(&side, 3, IBV_WC_SUCCESS);
			expect_wc(&side, 2, IBV_WC_SUCCESS);
			CHECK(uc || *(uint64_t *)(void *)(side.memory + WORD + 8) == round / 2);
		} else {
			struct ibv_wc wc = expect_wc(&side, 1, IBV_WC_SUCCESS);

			CHECK_EQUAL(wc.opcode, write ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV);
			CHECK_EQUAL(wc.byte_len, length);
			CHECK_EQUAL(wc.wc_flags, IBV_WC_WITH_IMM);
			CHECK_EQUAL(wc.imm_data, round);
			CHECK_EQUAL(wc.src_qp, peer.qpn);
			CHECK(filled(side.memory + ROOM, length, round));
			receive_at(&side, 1, ROOM, ROOM);
		}
	}
	process_barrier(&process);
	close_side(&side);
	join(&process);
}

int main(void)
{
	limit_seconds(60);
	STEP(between_processes(false)); /* first: they fork, and no device has been opened */
	STEP(between_processes(true));
	PAIR(read_before);
	PAIR(sizes, .memory = 6 << 20);
	return 0;
}
