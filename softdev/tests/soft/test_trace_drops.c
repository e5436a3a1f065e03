/* Tests of the trace lines for packets that are dropped without a response. */
#include "trace_side.h"
#include "ud_side.h"

static char folder[64], path[128];

static void traced(void (*step)(void))
{
	CHECK_OK(aiordma_trace_start(path, (char[4097]){0}, 4097));
	step();
	aiordma_trace_stop();
	CHECK_OK(unlink(path));
}

/* ---- connected queue pairs ------------------------------------------------------------------- */

/* Options that make a request fail after about half a second, including retries. */
#define SHORT .timeout = 14, .retry_cnt = 1

/* Make `b` expect a PSN that is `distance` (modulo 2^24) ahead of the first PSN of `a`. The request
 * of `a` must fail, but `b` must not. If `late` is set, the link is established before either side sets its send PSN. Only the
 * transition to RTS sets it, so the mismatch cannot be found earlier. */
static void expect_psn_drop(uint32_t distance, bool late)
{
	struct side a, b;

	OPEN(&a, SHORT);
	OPEN(&b, SHORT);
	struct address wrong = address_of_side(&a), right = address_of_side(&b);

	wrong.psn = (wrong.psn + distance) & 0xffffff;
	CHECK_OK(to_init(&b));
	CHECK_OK(to_init(&a));
	CHECK_OK(to_rtr(&b, &wrong));
	CHECK_OK(to_rtr(&a, &right));
	/* Wait for the link. */
	while (late && !(verbs->device->wire(a.qp) && verbs->device->wire(b.qp)))
		sched_yield();
	CHECK_OK(to_rts(&b));
	CHECK_OK(to_rts(&a));
	post_receive_at(&b, 1, 0, 64);
	RUN(&a, IBV_WC_RETRY_EXC_ERR, IBV_WR_SEND, .wr_id = 2, .length = 8);
	const char *line = expect_drop(path, b.qp->qp_num, "PSN");

	CHECK_EQUAL(number_field(line, "remote_qpn"), a.qp->qp_num);
	CHECK_EQUAL(number_field(line, "psn"), a.psn);
	CHECK_EQUAL(number_field(line, "expected_psn"), wrong.psn);
	expect_state(&b, IBV_QPS_RTS);
	close_pair(&a, &b);
}

static void psn_behind_expected_is_traced(void)
{
	expect_psn_drop(5, false);
}

static void psn_ahead_of_expected_is_traced(void)
{
	expect_psn_drop(0xfffffb, false);
}

static void psn_mismatch_found_after_rts_is_traced(void)
{
	expect_psn_drop(5, true);
}

static void unused_queue_pair_number_is_traced(void)
{
	struct side a, b;

	OPEN(&a, SHORT);
	OPEN(&b, SHORT);
	struct address wrong = address_of_side(&b), right = address_of_side(&a);

	wrong.qpn ^= 0x1555;
	CHECK(wrong.qpn != a.qp->qp_num);
	bring_up(&a, &wrong);
	bring_up(&b, &right);
	RUN(&a, IBV_WC_RETRY_EXC_ERR, IBV_WR_SEND, .wr_id = 2, .length = 8);
	expect_drop(path, wrong.qpn, "QPN");
	close_pair(&a, &b);
}

/* Connect `a` to `b`, but `b` to another queue pair. */
static void unexpected_peer_is_traced(void)
{
	struct side a, b, c;

	OPEN(&a, SHORT);
	OPEN(&b, SHORT);
	OPEN(&c, SHORT);
	const struct address address_b = address_of_side(&b), address_c = address_of_side(&c);

	bring_up(&a, &address_b);
	bring_up(&b, &address_c);
	RUN(&a, IBV_WC_RETRY_EXC_ERR, IBV_WR_SEND, .wr_id = 2, .length = 8);
	const char *line = expect_drop(path, b.qp->qp_num, "SOURCE");

	CHECK_EQUAL(number_field(line, "remote_qpn"), a.qp->qp_num);
	close_side(&c);
	close_pair(&a, &b);
}

static void transport_mismatch_is_traced(void)
{
	struct side a, b;

	OPEN(&a, SHORT);
	OPEN(&b, .uc = true);
	connect_pair(&a, &b);
	RUN(&a, IBV_WC_RETRY_EXC_ERR, IBV_WR_SEND, .wr_id = 2, .length = 8);
	expect_drop(path, b.qp->qp_num, "TRANSPORT");
	close_pair(&a, &b);
}

/* ---- datagrams ------------------------------------------------------------------------------- */

static void dropped_datagrams_are_traced_with_their_reason(void)
{
	struct side a, connected, unready;

	UD_OPEN(&a);
	OPEN(&connected);
	OPEN(&unready, .ud = true);
	const struct address own = address_of_side(&a);
	struct ibv_ah *ah = ud_path(&a, &own, a.options.gid);
	const struct {
		uint32_t qpn;
		const char *reason;
	} wrong[] = {
		{connected.qp->qp_num, "TRANSPORT"},
		{unready.qp->qp_num, "QP_STATE"},
		{unready.qp->qp_num ^ 0x1555, "QPN"},
	};

	CHECK(ah);
	FOR_EACH (i, wrong) {
		CHECK_OK(ud_post(&a, (struct ud_request){.ah = ah,
							 .qpn = wrong[i].qpn,
							 .qkey = QKEY,
							 .wr_id = i,
							 .length = 8}));
		expect_wc(&a, i, IBV_WC_SUCCESS);
		const char *line = expect_drop(path, wrong[i].qpn, wrong[i].reason);

		CHECK_EQUAL(number_field(line, "remote_qpn"), a.qp->qp_num);
		CHECK(field_is(line, "remote", "127.0.0.1"));
	}
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	close_side(&unready);
	close_pair(&a, &connected);
}

int main(void)
{
	limit_seconds(60);
	snprintf(path, sizeof(path), "%s/trace", new_folder(folder));
	STEP(traced(psn_behind_expected_is_traced));
	STEP(traced(psn_ahead_of_expected_is_traced));
	STEP(traced(psn_mismatch_found_after_rts_is_traced));
	STEP(traced(unused_queue_pair_number_is_traced));
	STEP(traced(dropped_datagrams_are_traced_with_their_reason));
	if (!links_are("roce")) { /* RoCE packets lack the sender's queue pair number */
		STEP(traced(unexpected_peer_is_traced));
		STEP(traced(transport_mismatch_is_traced));
	}
	CHECK_OK(rmdir(folder));
	return 0;
}
