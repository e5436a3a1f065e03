/* Test injected faults. Each kind must occur where the spec says and be counted, and the same seed
 * must select the same places. tests/pair tests how reliable connections handle faults. */
#include "fault_side.h"

#include "inject/inject.h"
#include "ud_side.h"

/* ---- fault specs -------------------------------------------------------------------------- */

static void invalid_fault_spec_error_quotes_the_invalid_part(void)
{
	static const struct {
		const char *error, *texts[10];
	} cases[] = {
		{"unknown part; expected seed, loss", {"", "losses=1", "los=1"}},
		{"expected a value", {"loss"}},
		{"expected a probability",
		 {"loss=", "loss=1.1", "loss=-1", "loss=.", "loss=1%", "cut=@0", "cut=@5-3",
		  "cut=@", "rnr=0.5@1-2-3"}},
		{"expected a time", {"delay=2", "delay=2 ms", "jitter=2h", "jitter=3601s"}},
		{"expected at least 1 byte per second", {"rate=0"}},
		{"expected a number of bytes", {"rate=10mb", "cut_after=99999999999GB"}},
		{"expected a number from 1", {"qp=0", "qp=4294967296"}},
		{"expected a number", {"seed=18446744073709551616", "seed=+1"}},
		{"expected requests, answers or all", {"frames=some"}},
	};
	char error[256], expected[128];

	FOR_EACH (i, cases)
		for (const char *const *text = cases[i].texts; *text; text++) {
			CHECK_EQUAL(aiordma_embedded_faults(*text, error, sizeof(error)), EINVAL);
			snprintf(expected, sizeof(expected), "'%s': %s", *text, cases[i].error);
			CHECK_OK(strncmp(error, expected, strlen(expected)));
			CHECK(!soft_faults_set);
		}
	CHECK_EQUAL(aiordma_embedded_faults("loss=0.1,seed=2,loss=0.2", error, sizeof(error)),
		    EINVAL);
	CHECK(!strcmp(error, "'loss=0.2': this part appears twice"));
}

static void valid_fault_spec_sets_every_field(void)
{
	const struct soft_fault_schedule *schedule = soft_faults.schedule;

	spec("seed=7,loss=0.25@3-9,duplicate=@4,frames=answers,delay=1.5ms,jitter=10us,rate=10MB,"
	     "cut=@2-,cut_after=64KiB,rnr=1,overrun=0.5,register=@1,handshake=@2,qp=12,"
	     "cq=34");
	const struct {
		uint64_t found, expected;
	} numbers[] = {
		{soft_faults_set, true},
		{soft_faults.seed, 7},
		{schedule[SOFT_FAULT_LOSS].first, 3},
		{schedule[SOFT_FAULT_LOSS].last, 9},
		{schedule[SOFT_FAULT_DUPLICATE].first, 4},
		{schedule[SOFT_FAULT_DUPLICATE].last, 4},
		{soft_faults.frames, SOFT_FAULT_RESPONSES},
		{soft_faults.delay_ns, 1500000},
		{soft_faults.jitter_ns, 10000},
		{soft_faults.rate, 10000000},
		{schedule[SOFT_FAULT_DISCONNECT].first, 2},
		{schedule[SOFT_FAULT_DISCONNECT].last, UINT64_MAX},
		{soft_faults.cut_after, 65536},
		{schedule[SOFT_FAULT_HANDSHAKE].last, 2},
		{soft_faults.qp_num, 12},
		{soft_faults.cq, 34},
	};

	FOR_EACH (i, numbers)
		CHECK_EQUAL(numbers[i].found, numbers[i].expected);
	CHECK(schedule[SOFT_FAULT_LOSS].probability == 0.25);
	CHECK(schedule[SOFT_FAULT_DUPLICATE].probability == 1);
	CHECK(schedule[SOFT_FAULT_RNR].probability == 1);
	no_faults();
	CHECK(!soft_faults_set);
}

/* Check that faults occur with the requested probability, and that they affect different frames on
 * each connection. */
static void faults_occur_with_requested_probability(void)
{
	enum { MANY = 100000 };
	unsigned struck = 0, same = 0;

	spec("seed=1,loss=0.3");
	for (unsigned i = 1; i <= MANY; i++) {
		bool strikes = soft_fault_occurs(SOFT_FAULT_LOSS, 1, 0, i, i);

		struck += strikes;
		same += strikes == soft_fault_occurs(SOFT_FAULT_LOSS, 2, 0, i, i);
	}
	CHECK(struck > MANY * 29 / 100 && struck < MANY * 31 / 100);
	CHECK(same < MANY * 60 / 100); /* 0.58 if independent */
	no_faults();
}

/* ---- datagrams ----------------------------------------------------------------------------- */

enum { DATAGRAMS = 60 };

struct pair {
	struct side a, b;
	struct ibv_ah *ah;
};

static void open_datagrams(struct pair *pair)
{
	UD_OPEN(&pair->a);
	UD_OPEN(&pair->b);
	const struct address to = address_of_side(&pair->b);

	CHECK(pair->ah = ud_path(&pair->a, &to, pair->a.options.gid));
}

static void close_datagrams(struct pair *pair)
{
	CHECK_OK(verbs->ibv_destroy_ah(pair->ah));
	close_pair(&pair->a, &pair->b);
}

static void send_datagram(struct pair *pair, uint32_t imm)
{
	CHECK_OK(ud_post(&pair->a, (struct ud_request){.ah = pair->ah,
						       .qpn = pair->b.qp->qp_num,
						       .qkey = QKEY,
						       .wr_id = 1,
						       .length = 16,
						       .with_imm = true,
						       .imm = imm}));
	expect_done(&pair->a, 1);
}

/* Send DATAGRAMS datagrams while the given faults are set. Store in `came`, as one digit for each
 * datagram, how many times it arrived. */
static void send_with_faults(const char *text, char came[DATAGRAMS + 1])
{
	struct pair pair;
	struct ibv_wc wc;

	spec("%s", text);
	open_datagrams(&pair);
	memset(came, '0', DATAGRAMS);
	came[DATAGRAMS] = 0;
	for (uint32_t i = 0; i < DATAGRAMS; i++) {
		for (unsigned n = 0; n < 2; n++)
			post_receive_at(&pair.b, 0, 0, 128);
		send_datagram(&pair, i);
		/* Within a process, a datagram arrives immediately or never. */
		while (poll_cq(&pair.b, 1, &wc) == 1) {
			CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
			came[wc.imm_data]++;
		}
		CHECK_OK(to_state(&pair.b, IBV_QPS_RESET));
		ud_bring_up(&pair.b, QKEY);
	}
	close_datagrams(&pair);
	no_faults();
}

static void seed_selects_which_datagrams_are_lost_or_duplicated(void)
{
	struct aiordma_fault_counts before = fault_counts(), after;
	char came[4][DATAGRAMS + 1];

	send_with_faults("loss=@3-5,duplicate=@7", came[0]);
	CHECK(!strncmp(came[0], "11000121111111111111", 20));
	after = fault_counts();
	CHECK_EQUAL(after.lost - before.lost, 3);
	CHECK_EQUAL(after.duplicated - before.duplicated, 1);
	send_with_faults("seed=1,loss=0.3,duplicate=0.3", came[0]);
	send_with_faults("seed=1,loss=0.3,duplicate=0.3", came[1]);
	send_with_faults("seed=2,loss=0.3,duplicate=0.3", came[2]);
	CHECK(!strcmp(came[0], came[1]));
	CHECK(strcmp(came[0], came[2]));
	CHECK(strchr(came[0], '0') && strchr(came[0], '1') && strchr(came[0], '2'));
	send_with_faults("loss=1", came[3]);
	CHECK(!strchr(came[3], '1'));
}

static void delayed_datagrams_arrive_in_order_after_the_delay(void)
{
	struct pair pair;

	open_datagrams(&pair);
	spec("delay=20ms,jitter=10ms");
	for (unsigned n = 0; n < 8; n++)
		post_receive_at(&pair.b, n, 0, 128);
	uint64_t start = now_ns(CLOCK_MONOTONIC);

	for (uint32_t i = 0; i < 8; i++)
		send_datagram(&pair, i);
	for (uint32_t i = 0; i < 8; i++)
		CHECK_EQUAL(expect_done(&pair.b, i).imm_data, i);
	CHECK(now_ns(CLOCK_MONOTONIC) - start >= 20000000);
	/* Delayed datagrams are dropped when their receiver is closed. */
	send_datagram(&pair, 9);
	close_datagrams(&pair);
	no_faults();
}

/* ---- connections --------------------------------------------------------------------------- */

static void send_number(struct side *a, struct side *b, uint8_t number)
{
	post_receive_at(b, number, 64u * number, 64);
	a->memory[0] = number;
	POST(a, IBV_WR_SEND, .wr_id = number, .flags = IBV_SEND_INLINE, .length = 8);
}

static void receive_number(struct side *b, uint8_t number)
{
	expect_done(b, number);
	CHECK_EQUAL(b->memory[64 * number], number);
}

/* Check that delayed frames arrive in order and cause no retries, although the delay is longer than
 * the timeouts of all retries together. If `up_before` is set, the delay starts when the link is
 * already up. */
static void delayed_frames_arrive_in_order_without_retries(bool up_before)
{
	struct aiordma_fault_counts before = fault_counts();
	struct side a, b;

	if (!up_before)
		spec("delay=20ms,jitter=5ms");
	OPEN_PAIR(&a, &b, .timeout = 1, .retry_cnt = 1);
	send_one_message(&a, &b);
	if (up_before)
		spec("delay=20ms,jitter=5ms");
	uint64_t start = now_ns(CLOCK_MONOTONIC);

	for (unsigned i = 1; i < 8; i++)
		send_number(&a, &b, i);
	for (unsigned i = 1; i < 8; i++) {
		receive_number(&b, i);
		CHECK(now_ns(CLOCK_MONOTONIC) - start >= 20000000);
	}
	for (unsigned i = 1; i < 8; i++)
		expect_done(&a, i);
	CHECK(now_ns(CLOCK_MONOTONIC) - start >= 40000000); /* delayed in both directions */
	CHECK(fault_counts().delayed - before.delayed >= 8);
	CHECK_EQUAL(fault_counts().retried, before.retried);
	if (up_before) { /* delayed frames stay ahead of later ones if the faults are cleared */
		send_number(&a, &b, 8);
		soft_progress();
		no_faults();
		send_number(&a, &b, 9);
		for (unsigned i = 8; i < 10; i++)
			receive_number(&b, i);
		for (unsigned i = 8; i < 10; i++)
			expect_done(&a, i);
		send_one_message(&a, &b);
	}
	close_pair(&a, &b);
	no_faults();
}

/* Check that a delayed message is received even if its sender has exited, and that the end of the
 * stream is delayed as well. */
static void delayed_message_arrives_after_sender_exit(bool killed)
{
	struct process process = process_split();
	struct side side;

	limit_seconds(30);
	if (process.child)
		spec("delay=50ms");
	OPEN(&side, .ends_with_peer = true);
	struct address peer = exchange_addresses(&process, &side);

	bring_up_receiving(&side, &peer, 0, 3, 64);
	if (!process.child) {
		DO(&side, IBV_WR_SEND, .wr_id = 7, .length = 64);
		POST(&side, IBV_WR_SEND, .wr_id = 8, .length = 64);
		soft_progress();
		process_barrier(&process);
		if (killed)
			kill(getpid(), SIGKILL);
		close_side(&side);
		_exit(0);
	}
	expect_done(&side, 0);
	process_barrier(&process);
	CHECK_EQUAL(waitpid(process.child, NULL, 0), process.child);
	expect_done(&side, 1);
	if (killed) {
		expect_wc(&side, 2, IBV_WC_WR_FLUSH_ERR);
		expect_event(&side, IBV_EVENT_QP_FATAL);
	} else {
		expect_state(&side, IBV_QPS_RTS);
	}
	close(process.fd);
	close_side(&side);
	no_faults();
}

/* Check that delayed frames use a limited amount of memory. Beyond the limit, the oldest frames are
 * handled early. */
static void delayed_frames_use_limited_memory(void)
{
	enum { LONG = 1 << 20, MANY = 70 };
	struct side a, b;

	OPEN_PAIR(&a, &b, .memory = LONG, .sends = MANY, .receives = MANY);
	spec("delay=1000s");
	post_recvs(&b, 0, MANY, LONG);
	for (unsigned i = 0; i < MANY; i++)
		POST(&a, IBV_WR_SEND, .wr_id = i, .length = LONG);
	for (unsigned i = 0; i < MANY - 65; i++)
		expect_done(&b, i);
	close_pair(&a, &b);
	no_faults();
}

static void device_does_not_exceed_the_rate(void)
{
	enum { LONG = 400000 };
	struct side a, b;

	OPEN_PAIR(&a, &b, .memory = LONG);
	spec("rate=10MB");
	post_receive_at(&b, 1, 0, LONG);
	uint64_t start = now_ns(CLOCK_MONOTONIC);

	POST(&a, IBV_WR_SEND, .wr_id = 1, .length = LONG);
	expect_done(&b, 1);
	CHECK(now_ns(CLOCK_MONOTONIC) - start >= 40000000);
	expect_done(&a, 1);
	close_pair(&a, &b);
	no_faults();
}

/* Check that the loss of a single request or response is detected by a timeout. */
static void lost_frame_is_recovered_by_retry(const char *which)
{
	struct aiordma_fault_counts before = fault_counts();
	struct side a, b;

	OPEN_PAIR(&a, &b, .timeout = 8);
	struct address peer = address_of_side(&b);

	spec("loss=@2,frames=%s", which);
	for (unsigned i = 0; i < 4; i++) {
		DO(&a, IBV_WR_ATOMIC_FETCH_AND_ADD, .wr_id = i, .length = 8, AT(&peer, 0),
		   .compare_add = 1);
		CHECK_EQUAL(*(uint64_t *)(void *)a.memory, i);
	}
	/* Each end counts the frames it receives. Only one end receives requests, and only the
	 * other receives responses. */
	CHECK_EQUAL(fault_counts().lost - before.lost, 1);
	/* A slow response may cause additional retries, because the timeout is only 1 ms. */
	CHECK(fault_counts().retried - before.retried >= 1);
	close_pair(&a, &b);
	no_faults();
}

static void fault_spec_with_qp_affects_only_that_queue_pair(void)
{
	struct side a, b, c, d;

	OPEN_PAIR(&a, &b, .timeout = 8, .retry_cnt = 1);
	OPEN_PAIR(&c, &d, .timeout = 20);
	spec("loss=1,qp=%u", b.qp->qp_num);
	send_one_message(&c, &d);
	RUN(&a, IBV_WC_RETRY_EXC_ERR, IBV_WR_SEND, .wr_id = 1, .length = 8);
	close_pair(&a, &b);
	close_pair(&c, &d);
	no_faults();
}

static void send_uc(struct side *side, uint32_t length, uint32_t imm)
{
	fill(side->memory, length, imm);
	DO(side, IBV_WR_SEND_WITH_IMM, .wr_id = 9, .length = length, .imm = imm);
}

static void receive_uc(struct side *side, uint32_t length, uint32_t imm)
{
	struct ibv_wc wc = expect_done(side, 1);

	CHECK_EQUAL(wc.imm_data, imm);
	CHECK_EQUAL(wc.byte_len, length);
	CHECK(is_filled(side->memory, length, imm));
	post_receive_at(side, 1, 0, side->options.memory);
}

/* Check that UC does not recover lost frames. If a frame is lost, the rest of its message is lost
 * as well. A duplicated message is received twice. */
static void uc_does_not_recover_lost_frames(void)
{
	enum { LONG = 600000 };
	struct side a, b;

	OPEN_PAIR(&a, &b, .uc = true, .memory = LONG);
	post_receive_at(&b, 1, 0, LONG);
	send_uc(&a, 8, 1);
	receive_uc(&b, 8, 1);
	spec("loss=@3");
	send_uc(&a, 8, 2);
	receive_uc(&b, 8, 2);
	send_uc(&a, LONG, 3); /* its second frame is lost */
	send_uc(&a, 8, 4);
	receive_uc(&b, 8, 4);
	spec("duplicate=@1");
	post_receive_at(&b, 1, 0, LONG);
	send_uc(&a, LONG / 100, 5);
	for (int i = 0; i < 2; i++)
		CHECK_EQUAL(expect_done(&b, 1).imm_data, 5);
	expect_state(&b, IBV_QPS_RTS);
	close_pair(&a, &b);
	no_faults();
}

static void cut_fails_existing_links_only(void)
{
	struct aiordma_fault_counts before = fault_counts();
	struct side a, b, c, d;

	/* The first existing link is cut. */
	OPEN_PAIR(&a, &b, .ends_with_peer = true);
	send_one_message(&a, &b);
	post_recvs(&a, 2, 1, 8);
	post_recvs(&b, 2, 1, 8);
	spec("cut=@1");
	expect_wc(&a, 2, IBV_WC_WR_FLUSH_ERR);
	expect_wc(&b, 2, IBV_WC_WR_FLUSH_ERR);
	expect_event(&a, IBV_EVENT_QP_FATAL);
	expect_event(&b, IBV_EVENT_QP_FATAL);
	CHECK_EQUAL(fault_counts().cut - before.cut, 1);
	/* Links created later are not cut. */
	OPEN_PAIR(&c, &d);
	send_one_message(&c, &d);
	close_pair(&c, &d);
	close_pair(&a, &b);
	no_faults();
}

static void link_is_cut_after_the_given_number_of_bytes(void)
{
	enum { MESSAGE = 1000 };
	struct side a, b;
	struct ibv_wc wc;
	unsigned came = 0;

	OPEN_PAIR(&a, &b, .ends_with_peer = true, .timeout = 15, .retry_cnt = 1);
	spec("cut=1,cut_after=10000,qp=%u", b.qp->qp_num);
	post_recvs(&b, 0, 20, MESSAGE);
	for (unsigned i = 0; i < 20; i++)
		POST(&a, IBV_WR_SEND, .wr_id = i, .length = MESSAGE);
	while ((wc = next_wc(&b)).status == IBV_WC_SUCCESS)
		came++;
	CHECK_EQUAL(wc.status, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQUAL(came, 9); /* 10,000 bytes with headers */
	while ((wc = next_wc(&a)).status == IBV_WC_SUCCESS)
		;
	CHECK_EQUAL(wc.status, IBV_WC_RETRY_EXC_ERR);
	close_pair(&a, &b);
	no_faults();
}

/* ---- the environment ----------------------------------------------------------------------- */

/* Check that opening the device enables the faults if the spec in the environment is valid, and
 * enables none if it is empty. */
static void fault_spec_is_read_from_the_environment(void)
{
	static const char *const texts[] = {"", "seed=3,loss=0.5"};

	expect_setting_refused("AIORDMA_EMBEDDED_FAULTS", "loss=x",
			       "aiordma: AIORDMA_EMBEDDED_FAULTS is 'loss=x': 'loss=x': expected a "
			       "probability from 0 "
			       "to 1, an occurrence such as @3, @3-5 or @3-, or both\n");
	for (int i = 0; i < 2; i++) {
		CHECK_OK(setenv("AIORDMA_EMBEDDED_FAULTS", texts[i], 1));
		CHECK_OK(verbs->ibv_close_device(open_device()));
		CHECK_EQUAL(soft_faults_set, i);
	}
}

int main(void)
{
	limit_seconds(100);
	STEP(in_child(
		fault_spec_is_read_from_the_environment)); /* the parent has never opened a device */
	for (int wire = 0; wire < 2; wire++) {
		use_links(wire ? "tcp" : "shared");
		STEP(delayed_message_arrives_after_sender_exit(false));
		STEP(delayed_message_arrives_after_sender_exit(true));
	}
	STEP(invalid_fault_spec_error_quotes_the_invalid_part());
	STEP(valid_fault_spec_sets_every_field());
	STEP(faults_occur_with_requested_probability());
	STEP(seed_selects_which_datagrams_are_lost_or_duplicated());
	STEP(delayed_datagrams_arrive_in_order_after_the_delay());
	for (int wire = 0; wire < 2; wire++) {
		use_links(wire ? "tcp" : "shared");
		STEP(delayed_frames_arrive_in_order_without_retries(false));
		STEP(delayed_frames_arrive_in_order_without_retries(true));
		STEP(delayed_frames_use_limited_memory());
		STEP(device_does_not_exceed_the_rate());
		STEP(lost_frame_is_recovered_by_retry("requests"));
		STEP(lost_frame_is_recovered_by_retry("answers"));
		STEP(fault_spec_with_qp_affects_only_that_queue_pair());
		STEP(uc_does_not_recover_lost_frames());
		STEP(cut_fails_existing_links_only());
		STEP(link_is_cut_after_the_given_number_of_bytes());
	}
	return 0;
}
