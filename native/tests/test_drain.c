/* aiordma_drain (native/verbs/drain.c) on the embedded device. */
#include "verbs_side.h"

#include "verbs/boundary.h"

/* Check that a drain without completions sets `busy` if it makes progress on a message. The
 * device's thread may do all the work for a message, so repeat the test until a drain has set
 * `busy`. */
static void drain_sets_busy_during_a_message(struct side *a, struct side *b)
{
	enum { LONG = 16 * 1024 * 1024 };
	struct aiordma_completion completion;
	bool heard = false;
	int more, n;

	struct aiordma_drain state = {.calls = aiordma_embedded_calls(), .channel = a->channel};

	CHECK_EQUAL(aiordma_set_nonblocking(verbs, a->channel->fd), 0);
	CHECK_EQUAL(a->context->ops.req_notify_cq(a->cq, 0), 0);
	while (!heard) {
		POST(a, IBV_WR_RDMA_WRITE, .wr_id = 1, .length = LONG, REMOTE(b, 0));
		while (!(n = aiordma_drain(&state, &completion, 1, &more)))
			heard = heard || state.busy;
		CHECK_EQUAL(n, 1);
		CHECK_EQUAL(completion.status, IBV_WC_SUCCESS);
		CHECK(!state.busy);
	}
	state.spin_us = 1000;
	do /* the last acknowledgement may still be in flight */
		CHECK_EQUAL(aiordma_drain(&state, &completion, 1, &more), 0);
	while (state.busy);
	aiordma_drain_end(&state);
}

int main(void)
{
	limit_seconds(100);
	PAIR(drain_sets_busy_during_a_message, .memory = 16 << 20);
	return 0;
}
