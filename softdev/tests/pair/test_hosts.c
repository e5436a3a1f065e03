/* Test two hosts in virtual time (wire.h) with a cut wire, a host that dies or stops, an
 * unreachable peer, and memory or state that changes during a request. Each seed draws one test. */
#include "seeds.h"

enum {
	MEMORY = 4096,
	SENT = 1024, /* offsets in each host's memory, from SENT to COUNTER */
	READ = 2048,
	ADDED = 3072,
	COUNTER = 3080,
	ROUNDS = 24,
	LENGTH = 512, /* bytes of a request */
	TRANSIT_NS = 8 * 2 * 6000, /* round trip of a few frames */
};

#define HOUR (3600 * SECOND)

static struct side sides[SIDES];
static uint64_t wait_ns; /* time until all tries have failed; set by draw_timeout */

static struct side *at(int host)
{
	enter(host);
	return &sides[host];
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* Wait up to `ns` for a completion on the host. Returns false if there is none. */
static bool wait_for_completion(int host, uint64_t ns, struct ibv_wc *wc)
{
	uint64_t until = fuzz_now_ns + ns;

	while (!poll_cq(at(host), 1, wc)) {
		if (wire_next() > until) {
			fuzz_now_ns = until;
			return false;
		}
		wire_step();
	}
	note("%c completes %u: %s", "ab"[host], (unsigned)wc->wr_id,
	     verbs->ibv_wc_status_str(wc->status));
	return true;
}

static void expect_no_completion_for(int host, uint64_t ns)
{
	struct ibv_wc wc;

	CHECK(!wait_for_completion(host, ns, &wc));
}

/* Expect a completion no earlier than `ns` nanoseconds from now, and at most TRANSIT_NS later than
 * that. */
static void expect_after(int host, uint64_t wr_id, enum ibv_wc_status status, uint64_t ns)
{
	uint64_t before = fuzz_now_ns;
	struct ibv_wc wc;

	CHECK(wait_for_completion(host, ns + TRANSIT_NS, &wc));
	CHECK_EQUAL(wc.wr_id, wr_id);
	CHECK_EQUAL(wc.status, status);
	CHECK(fuzz_now_ns - before >= ns);
}

/* ---- hosts ----------------------------------------------------------------------------------- */

/* Draw a timeout and a retry count. All tries together (`wait_ns`) take 2 ms to 9 s. */
static struct options draw_timeout(void)
{
	struct options options = {.memory = MEMORY,
				  .mtu = IBV_MTU_256,
				  .timeout = (uint8_t)(8 + draw(11)),
				  .retry_cnt = (uint8_t)(1 + draw(7))};

	wait_ns = ((uint64_t)4096 << options.timeout) * (options.retry_cnt + 1u);
	return options;
}

static void open_host(int host, struct options options)
{
	open_side(at(host), options);
	CHECK_OK(fcntl(sides[host].context->async_fd, F_SETFL, O_NONBLOCK));
	sides[host].psn = draw(0x1000000);
	fill(sides[host].memory, MEMORY, (unsigned)host);
}

static void connect_host(int host)
{
	struct address peer = address_of_side(at(1 - host));

	bring_up(at(host), &peer);
}

static void connect_hosts(void)
{
	for (int i = 0; i < SIDES; i++)
		connect_host(i);
	for (uint64_t until = fuzz_now_ns + SECOND; !is_up(&sides[0]) || !is_up(&sides[1]);) {
		CHECK(wire_next() < until);
		wire_step();
	}
}

static void open_connected_hosts(struct options options)
{
	for (int i = 0; i < SIDES; i++)
		open_host(i, options);
	connect_hosts();
}

/* Post a random request that needs no receive. */
static void post_random_request(int from, uint64_t wr_id)
{
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ,
						     IBV_WR_ATOMIC_FETCH_AND_ADD};
	uint32_t kind = draw(3);

	POST(at(from), opcodes[kind], .wr_id = wr_id, .length = kind == 2 ? 8 : LENGTH,
	     REMOTE(&sides[1 - from], 0));
}

static void expect_connection_works(void)
{
	for (int i = 0; i < SIDES; i++) {
		post_random_request(i, 100);
		expect_after(i, 100, IBV_WC_SUCCESS, 0);
		post_receive_at(at(1 - i), 101, 0, LENGTH);
		POST(at(i), IBV_WR_SEND, .wr_id = 102, .length = LENGTH);
		expect_after(i, 102, IBV_WC_SUCCESS, 0);
		expect_after(1 - i, 101, IBV_WC_SUCCESS, 0);
	}
}

static void reconnect(void)
{
	for (int i = 0; i < SIDES; i++)
		enter_state(at(i), IBV_QPS_RESET);
	connect_hosts();
	expect_connection_works();
}

/* ---- a wire that is cut ---------------------------------------------------------------------- */

/* Check that each host's request fails after the host's own timeout, which starts with the request
 * (IBTA 9.7.6.1.3). */
static void request_fails_after_its_timeout_in_a_partition(void)
{
	struct options options = draw_timeout();
	struct aiordma_fault_counts counts;

	open_connected_hosts(options);
	expect_connection_works();
	wire.cut = true;
	post_random_request(0, 1);
	expect_after(0, 1, IBV_WC_RETRY_EXC_ERR, wait_ns);
	CHECK_EQUAL(state_of(at(0)), IBV_QPS_ERR);
	aiordma_embedded_fault_counts(&counts);
	CHECK_EQUAL(counts.retried, options.retry_cnt);
	CHECK_EQUAL(state_of(at(1)), IBV_QPS_RTS);
	expect_no_completion_for(1, HOUR);
	post_random_request(1, 2);
	expect_after(1, 2, IBV_WC_RETRY_EXC_ERR, wait_ns);
	wire_heal();
	reconnect();
}

/* Check that the last retry succeeds if the wire is healed before it, and that the message is
 * received only once. */
static void last_retry_succeeds_when_the_partition_heals(void)
{
	struct options options = draw_timeout();
	uint64_t try_ns = (uint64_t)4096 << options.timeout;

	open_connected_hosts(options);
	post_recvs(at(1), 10, 2, LENGTH);
	wire.cut = true;
	POST(at(0), IBV_WR_SEND, .wr_id = 1, .length = LENGTH);
	expect_no_completion_for(0, options.retry_cnt * try_ns - try_ns / 2);
	wire_heal();
	expect_after(0, 1, IBV_WC_SUCCESS, try_ns / 2);
	expect_after(1, 10, IBV_WC_SUCCESS, 0);
	expect_no_completion_for(1, HOUR);
}

/* Check that a timeout of 0 disables the timer (IBTA 9.7.6.1.3). Requests are then retransmitted
 * only after the responder reports a gap. */
static void timeout_of_zero_disables_the_retry_timer(void)
{
	struct options options = draw_timeout();

	options.timeout = 255;
	open_connected_hosts(options);
	wire.cut = true;
	post_random_request(0, 1);
	expect_no_completion_for(0, HOUR);
	CHECK_EQUAL(wire_next(), UINT64_MAX);
	wire_heal();
	post_random_request(0, 2);
	expect_after(0, 1, IBV_WC_SUCCESS, 0);
	expect_after(0, 2, IBV_WC_SUCCESS, 0);
}

/* ---- a host that loses by its fault spec ----------------------------------------------------- */

/* Post a SEND, a READ of the same data and an atomic, and check that all succeed. */
static void exchange_every_kind(int from, unsigned round)
{
	struct side *peer = at(1 - from);
	struct ibv_wc wc;

	post_receive_at(peer, 10, SENT, LENGTH);
	fill(at(from)->memory + SENT, LENGTH, round);
	memset(sides[from].memory + READ, 0, LENGTH);
	POST(at(from), IBV_WR_SEND_WITH_IMM, .wr_id = 0, .offset = SENT, .length = LENGTH,
	     .imm = round);
	POST(at(from), IBV_WR_RDMA_READ, .wr_id = 1, .offset = READ, .length = LENGTH,
	     REMOTE(peer, SENT));
	POST(at(from), IBV_WR_ATOMIC_FETCH_AND_ADD, .wr_id = 2, .offset = ADDED, .length = 8,
	     REMOTE(peer, COUNTER), .compare_add = 1);
	for (unsigned i = 0; i < 3; i++) {
		CHECK(wait_for_completion(from, 2 * wait_ns, &wc));
		CHECK_EQUAL(wc.wr_id, i);
		CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
	}
	CHECK(is_filled(sides[from].memory + READ, LENGTH, round));
	CHECK(wait_for_completion(1 - from, 0, &wc));
	CHECK_EQUAL(wc.imm_data, round);
	CHECK(is_filled(peer->memory + SENT, LENGTH, round));
}

/* Set a fault spec on host 1 only, before or after the hosts connect. Host 0 learns from host 1
 * that frames may be lost. */
static void host_tolerates_faults_of_its_peers_spec(void)
{
	struct options options = draw_timeout();
	struct aiordma_fault_counts counts;
	bool late = chance(500);
	char spec[80], error[200];

	options.retry_cnt = 7;
	calls.is_lossy = false;
	snprintf(spec, sizeof(spec), "seed=%u,loss=0.1,duplicate=0.05", draw(UINT32_MAX));
	for (int i = 0; i < SIDES; i++) {
		open_host(i, options);
		memset(sides[i].memory + COUNTER, 0, 8);
	}
	if (!late)
		CHECK_OK(aiordma_embedded_faults(spec, error, sizeof(error)));
	connect_hosts();
	for (unsigned round = 0; round < ROUNDS; round++) {
		enter(1);
		if (late && round == 5)
			CHECK_OK(aiordma_embedded_faults(spec, error, sizeof(error)));
		exchange_every_kind(round & 1, round);
	}
	for (int i = 0; i < SIDES; i++)
		CHECK_EQUAL(*(uint64_t *)(void *)(sides[i].memory + COUNTER), ROUNDS / 2);
	enter(1);
	aiordma_embedded_fault_counts(&counts);
	CHECK(counts.lost + counts.duplicated > 0);
}

/* ---- a host that dies ------------------------------------------------------------------------ */

/* Check that the new queue pair of a restarted host ignores requests to the old one. */
static void restarted_host_ignores_requests_to_the_old_qp(void)
{
	struct options options = draw_timeout();
	bool told = chance(500), outstanding = chance(500);

	open_connected_hosts(options);
	expect_connection_works();
	if (outstanding)
		post_random_request(0, 1);
	die(1, told);
	open_host(1, options);
	if (!outstanding)
		post_random_request(0, 1);
	expect_after(0, 1, IBV_WC_RETRY_EXC_ERR, wait_ns);
	CHECK(is_filled(sides[1].memory, MEMORY, 1));
	expect_no_completion_for(1, HOUR);
	reconnect();
}

/* Check that a queue pair with `ends_with_peer` (device_calls.h) fails when its peer's host dies,
 * even without an outstanding request. */
static void qp_with_ends_with_peer_fails_when_the_host_dies(void)
{
	struct options options = draw_timeout();
	bool outstanding = chance(500);

	options.ends_with_peer = true;
	open_connected_hosts(options);
	if (outstanding)
		post_random_request(0, 1);
	die(1, true);
	if (outstanding)
		expect_after(0, 1, IBV_WC_RETRY_EXC_ERR, 0);
	CHECK_EQUAL(state_of(at(0)), IBV_QPS_ERR);
	expect_event(at(0), IBV_EVENT_QP_FATAL);
	open_host(1, options);
	reconnect();
}

/* Test requests that a peer has read before it dies. Requests before the first one that needs
 * response data must succeed. */
static void requests_read_before_peer_death_succeed(void)
{
	struct aiordma_fault_counts counts;
	struct ibv_wc wc;

	calls.is_lossy = false;
	open_connected_hosts(draw_timeout());
	wire.cut = true;
	POST(at(0), IBV_WR_RDMA_WRITE, .wr_id = 1, .length = LENGTH, REMOTE(&sides[1], 0));
	POST(at(0), IBV_WR_RDMA_READ, .wr_id = 2, .length = LENGTH, REMOTE(&sides[1], 0));
	soft_lock();
	soft_path_finish(&wire.hosts[0].path, ECONNRESET, 0);
	soft_unlock();
	CHECK(wait_for_completion(0, 0, &wc) && wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS);
	expect_after(0, 2, IBV_WC_RETRY_EXC_ERR, wait_ns);
	aiordma_embedded_fault_counts(&counts);
	CHECK_EQUAL(counts.retried, 0);
}

/* Check that a host loses its link as soon as the peer's queue pair is reset or fails, but that its
 * own queue pair stays in RTS. */
static void link_is_lost_when_the_peer_resets_or_fails(void)
{
	open_connected_hosts(draw_timeout());
	enter_state(at(1), chance(500) ? IBV_QPS_RESET : IBV_QPS_ERR);
	expect_no_completion_for(0, TRANSIT_NS);
	CHECK(!is_up(&sides[0]));
	CHECK_EQUAL(state_of(at(0)), IBV_QPS_RTS);
}

/* Close and reopen the device of host 1, which restarts its engine. Requests to the old queue pair
 * must time out. */
static void requests_to_a_reopened_device_time_out(void)
{
	struct options options = draw_timeout();
	bool outstanding = chance(500);

	open_connected_hosts(options);
	expect_connection_works();
	if (outstanding)
		post_random_request(0, 1);
	close_side(at(1));
	take_port(1); /* otherwise the new engine would bind a real port */
	open_host(1, options);
	if (!outstanding) {
		expect_no_completion_for(0, draw(2) * TRANSIT_NS);
		post_random_request(0, 1);
	}
	expect_after(0, 1, IBV_WC_RETRY_EXC_ERR, wait_ns);
	CHECK(is_filled(sides[1].memory, MEMORY, 1));
	reconnect();
}

/* ---- a host that is stopped ------------------------------------------------------------------ */

/* Stop host 1. Its outstanding request must succeed after the stop, because a stopped host does not
 * use up retries. */
static void stopped_host_does_not_use_up_retries(void)
{
	struct options options = draw_timeout();
	uint64_t try_ns = (uint64_t)4096 << options.timeout;
	bool long_enough = chance(500); /* whether the stop outlasts the peer's retries */

	options.retry_cnt = 1;
	wait_ns = 2 * try_ns;
	wire.window = WINDOW; /* room for all tries */
	open_connected_hosts(options);
	expect_connection_works();
	post_random_request(1, 1);
	wire_stop(1, long_enough ? wait_ns * (2 + draw(3)) : try_ns / 2);
	post_random_request(0, 2);
	if (long_enough)
		expect_after(0, 2, IBV_WC_RETRY_EXC_ERR, wait_ns);
	else
		expect_after(0, 2, IBV_WC_SUCCESS, try_ns / 2);
	while (is_stopped(1))
		wire_step();
	expect_after(1, 1, IBV_WC_SUCCESS, 0);
	if (long_enough) {
		post_random_request(1, 3);
		expect_after(1, 3, IBV_WC_RETRY_EXC_ERR, wait_ns);
		reconnect();
	}
}

/* ---- a peer that is not there ---------------------------------------------------------------- */

/* Check how long a request waits for an unreachable peer. With a timeout, it waits at least half a
 * second, because connecting may take that long, and at most a minute. */
static void request_to_unreachable_peer_waits_a_bounded_time(void)
{
	static const struct {
		uint8_t timeout, retry_cnt; /* 255 and 8 stand for 0 */
		uint64_t wait_ns; /* 0 if it never fails */
	} cases[] = {
		{255, 7, 0},
		{1, 7, 500000000},
		{18, 8, UINT64_C(4096) << 18},
		{18, 3, UINT64_C(4096) << 20},
		{20, 1, UINT64_C(4096) << 21},
		{31, 7, UINT64_C(60000000000)},
	};
	uint32_t i = draw(COUNT_OF(cases)), way = draw(4);

	for (int host = 0; host < SIDES; host++)
		open_host(host, (struct options){.memory = MEMORY,
						 .timeout = cases[i].timeout,
						 .retry_cnt = cases[i].retry_cnt});
	struct address peer = address_of_side(at(1)), own = address_of_side(at(0));

	peer.qpn ^= way == 0   ? 1u << 23 /* no such process */
		    : way == 1 ? 0x55u /* no such queue pair */
			       : 0;
	own.psn ^= way == 2; /* the peer expects a different PSN */
	bring_up(at(0), &peer);
	if (way == 2)
		bring_up(at(1), &own);
	post_random_request(0, 1);
	if (cases[i].wait_ns)
		expect_after(0, 1, IBV_WC_RETRY_EXC_ERR, cases[i].wait_ns);
	else
		expect_no_completion_for(0, HOUR);
}

/* Check that a host repeats its HELLO until a peer that connects late responds. The peer's process
 * discards each HELLO that has been pending for too long. */
static void hello_is_repeated_until_a_late_peer_responds(void)
{
	struct options options = draw_timeout();

	options.timeout = 20; /* a request waits half a minute */
	options.retry_cnt = 7;
	for (int i = 0; i < SIDES; i++)
		open_host(i, options);
	connect_host(0);
	post_random_request(0, 1);
	expect_no_completion_for(0, draw(25) * SECOND);
	connect_host(1);
	struct ibv_wc wc;

	CHECK(wait_for_completion(0, 5 * SECOND, &wc));
	CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
	expect_connection_works();
}

/* ---- a peer without receives ----------------------------------------------------------------- */

/* Check the number and the interval of RNR retries (IBTA 9.7.5.2.8). The timer code selects the
 * interval. A count of 7 means no limit. */
static void rnr_retries_have_the_right_count_and_interval(void)
{
	struct options options = draw_timeout();
	uint32_t code = draw(32);
	uint64_t delay_ns = rnr_timer_units[code] * UINT64_C(10000);
	struct ibv_wc wc;

	options.rnr_timer = code ? (uint8_t)code : 255;
	options.rnr_retry = (uint8_t)(1 + draw(7));
	open_connected_hosts(options);
	expect_connection_works();
	POST(at(0), IBV_WR_SEND, .wr_id = 1, .length = 8);
	if (options.rnr_retry < 7) {
		expect_after(0, 1, IBV_WC_RNR_RETRY_EXC_ERR, options.rnr_retry * delay_ns);
		CHECK_EQUAL(state_of(at(1)), IBV_QPS_RTS);
		return;
	}
	expect_no_completion_for(0, 1000 * delay_ns);
	post_receive_at(at(1), 2, 0, 8);
	CHECK(wait_for_completion(0, delay_ns + TRANSIT_NS, &wc));
	CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
}

/* ---- what changes under a request ------------------------------------------------------------ */

/* Check that SQ_DRAINED is reported when the requests in progress have completed (IBTA
 * 10.3.1.5). */
static void sq_drained_follows_the_requests_in_progress(void)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};

	open_connected_hosts(draw_timeout());
	post_random_request(0, 1);
	CHECK_OK(verbs->ibv_modify_qp(at(0)->qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
	expect_no_event(at(0));
	expect_after(0, 1, IBV_WC_SUCCESS, 0);
	expect_event(at(0), IBV_EVENT_SQ_DRAINED);
}

/* Deregister the memory for a response while the response is on its way. */
static void response_to_deregistered_memory_fails_locally(void)
{
	bool atomic = chance(500);

	open_connected_hosts(draw_timeout());
	POST(at(0), atomic ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_RDMA_READ, .wr_id = 1,
	     .length = atomic ? 8 : LENGTH, REMOTE(&sides[1], 0));
	CHECK_OK(verbs->ibv_dereg_mr(at(0)->mr));
	expect_after(0, 1, IBV_WC_LOC_PROT_ERR, 0);
	CHECK_EQUAL(state_of(at(0)), IBV_QPS_ERR);
	CHECK(is_filled(sides[0].memory, MEMORY, 0));
}

/* Check that a READ fails if the responder deregisters the memory before it has sent the
 * response. */
static void read_of_deregistered_memory_fails(void)
{
	open_connected_hosts(draw_timeout());
	POST(at(0), IBV_WR_RDMA_READ, .wr_id = 1, .length = LENGTH, REMOTE(&sides[1], 0));
	wire.blocked_until[1] = fuzz_now_ns + BLOCKED_NS;
	expect_no_completion_for(0, BLOCKED_NS / 2);
	CHECK_OK(verbs->ibv_dereg_mr(at(1)->mr));
	expect_after(0, 1, IBV_WC_REM_ACCESS_ERR, BLOCKED_NS / 2);
	CHECK(is_filled(sides[0].memory, MEMORY, 0));
	CHECK_EQUAL(state_of(at(1)), IBV_QPS_ERR);
	expect_event(at(1), IBV_EVENT_QP_ACCESS_ERR);
}

/* ---- seeds ----------------------------------------------------------------------------------- */

#define TEST(name) {#name, name}

static const struct {
	const char *name;
	void (*run)(void);
} tests[] = {
	TEST(request_fails_after_its_timeout_in_a_partition),
	TEST(last_retry_succeeds_when_the_partition_heals),
	TEST(timeout_of_zero_disables_the_retry_timer),
	TEST(host_tolerates_faults_of_its_peers_spec),
	TEST(restarted_host_ignores_requests_to_the_old_qp),
	TEST(qp_with_ends_with_peer_fails_when_the_host_dies),
	TEST(requests_read_before_peer_death_succeed),
	TEST(link_is_lost_when_the_peer_resets_or_fails),
	TEST(requests_to_a_reopened_device_time_out),
	TEST(stopped_host_does_not_use_up_retries),
	TEST(request_to_unreachable_peer_waits_a_bounded_time),
	TEST(hello_is_repeated_until_a_late_peer_responds),
	TEST(rnr_retries_have_the_right_count_and_interval),
	TEST(sq_drained_follows_the_requests_in_progress),
	TEST(response_to_deregistered_memory_fails_locally),
	TEST(read_of_deregistered_memory_fails),
};

static void run(void)
{
	uint32_t test = draw(COUNT_OF(tests));

	current_step = tests[test].name;
	wire_vary(true);
	wire.per_mille = 0;
	tests[test].run();
}

int main(int argc, char **argv)
{
	return run_seeds(run, 2, argc, argv);
}
