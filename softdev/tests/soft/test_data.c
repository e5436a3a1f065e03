/* Test which bytes a READ returns. tests/pair, tests/verbs and test_cma_frames test the data of
 * other operations. */
#include "verbs_side.h"

/* Check that a READ does not return bytes written by the requests posted after it, even without a
 * fence (read_order.c). */
static void read_excludes_bytes_of_later_requests(struct side *a, struct side *b)
{
	static const struct request behind[] = {
		{.opcode = IBV_WR_RDMA_WRITE, .length = 24000, .remote = 8000},
		{.opcode = IBV_WR_RDMA_WRITE, .length = 8, .remote = 0},
		{.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		 .length = 8,
		 .remote = 16,
		 .compare_add = 1},
		{.opcode = IBV_WR_SEND, .length = 100}, /* received at offset 500 */
	};
	enum { LARGE = 32000 };

	/* Repeat so often that the copied bytes would exceed the device's limit if the device did
	 * not release them. */
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
			post_receive_at(b, 3, 500, 100);
		CHECK_OK(post_chain(a, chain, 2));
		expect_done(a, 1);
		expect_done(a, 2);
		CHECK(is_filled(a->memory, chain[0].length, round));
		CHECK(!is_filled(b->memory, LARGE, round));
		if (chain[1].opcode == IBV_WR_SEND)
			expect_done(b, 3);
	}
}

int main(void)
{
	limit_seconds(60);
	PAIR(read_excludes_bytes_of_later_requests);
	return 0;
}
