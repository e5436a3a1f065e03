/* Test streams that are late, break, or carry data that no correct peer would send. */
#include "adopted_side.h"
#include "ud_side.h"

#include <arpa/inet.h>

#include "link/link_internal.h"

#define SECOND 1000000000ull

/* ---- making the stream --------------------------------------------------------------------- */

/* Check that queue pairs with different path MTUs do not connect, and that the message on stderr
 * names both MTUs. */
static void queue_pairs_with_different_mtus_do_not_connect(void)
{
	struct side a, b;
	char text[1024], expected[64];

	OPEN(&a, .timeout = 10, .retry_cnt = 1, .mtu = IBV_MTU_1024);
	OPEN(&b, .mtu = IBV_MTU_2048);
	struct capture capture = capture_stderr();

	connect_pair(&a, &b);
	struct ibv_wc wc;

	CHECK_OK(post(&a, (struct request){.opcode = IBV_WR_SEND, .wr_id = 1, .length = 8}));
	wc = next_wc(&a);
	end_capture(&capture, text, sizeof(text));
	CHECK_EQUAL(wc.status, IBV_WC_RETRY_EXC_ERR);
	snprintf(expected, sizeof(expected), "0x%06x has a path MTU of 1024", a.qp->qp_num);
	CHECK(strstr(text, expected));
	snprintf(expected, sizeof(expected), "0x%06x has a path MTU of 2048", b.qp->qp_num);
	CHECK(strstr(text, expected));
	close_pair(&a, &b);
}

/* Check that a queue pair in RTR accepts the empty acknowledgement that its peer sends to choose a
 * stream. The acknowledgement may have any PSN, because the queue pair does not know its own send
 * PSN yet. */
static void queue_pair_in_rtr_accepts_acknowledgement_of_any_psn(void)
{
	for (uint32_t psn = 5; psn < 1u << 24; psn += 1u << 23) {
		struct side side;

		OPEN(&side);
		CHECK_OK(to_init(&side));
		CHECK_OK(to_rtr(&side, &absent));
		post_recvs(&side, 1, 1, 8);
		int fd = adopt_stream(&side, 0);

		send_stream_frame(fd, (struct soft_frame){.opcode = SOFT_ACK, .psn = psn}, NULL);
		send_stream_frame(fd, (struct soft_frame){.opcode = SOFT_SEND, .psn = PEER_PSN},
				  NULL);
		expect_done(&side, 1);
		close_side(&side);
		close_records(fd);
	}
}

/* ---- hostile peers -----------------------------------------------------------------------------
 */

static int connect_to(uint16_t port)
{
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_port = htons(port),
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	CHECK_OK(connect(fd, (struct sockaddr *)&address, sizeof(address)));
	return fd;
}

static void expect_closed(int fd)
{
	char byte;
	ssize_t n = recv(fd, &byte, 1, 0);

	CHECK(n == 0 || (n < 0 && errno == ECONNRESET));
	close(fd);
}

/* Connect to the port and exchange stream handshakes. Returns the socket. */
static int open_stream(uint16_t port)
{
	uint8_t bytes[SOFT_HANDSHAKE_SIZE];
	struct soft_hello hello;
	int fd = connect_to(port);

	soft_hello_encode(bytes, &(struct soft_hello){.kind = SOFT_HELLO_STREAM});
	CHECK_EQUAL(send(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
	CHECK(receive_exactly(fd, bytes, sizeof(bytes)));
	CHECK(soft_hello_decode(bytes, &hello));
	CHECK_EQUAL(hello.kind, SOFT_HELLO_STREAM);
	return fd;
}

static void send_hello(int fd, const struct soft_hello *hello, uint32_t number)
{
	uint8_t bytes[RECORD_HEADER + SOFT_HANDSHAKE_SIZE];

	record_header(bytes, SOFT_RECORD_OPEN, SOFT_HANDSHAKE_SIZE, 0, number);
	soft_hello_encode(bytes + RECORD_HEADER, hello);
	CHECK_EQUAL(send(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
}

static void malformed_streams_and_hellos_do_not_disturb_others(void)
{
	static const struct {
		uint32_t word, length; /* header word and length of a record */
	} nonsense[] = {
		{0, 0}, /* invalid kinds */
		{5u << 24, 0},
		{SOFT_RECORD_OPEN << 24 | 47, 47}, /* invalid lengths for the kind */
		{SOFT_RECORD_ACCEPT << 24, 0},
		{SOFT_RECORD_END << 24 | 4, 4},
		{SOFT_RECORD_DATA << 24, 0},
		{SOFT_RECORD_DATA << 24 | 0xffffff, 0},
	};
	struct side a, b;
	uint8_t bytes[SOFT_HANDSHAKE_SIZE];
	int guesses[4];

	OPEN_PAIR(&a, &b);
	struct address address = address_of_side(&b);

	/* Send garbage, and then the request of a web browser. */
	int fd = connect_to(address.port);

	fill(bytes, sizeof(bytes), 3);
	CHECK_EQUAL(send(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
	expect_closed(fd);
	fd = connect_to(address.port);
	static const char get[] =
		"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n\r\n\r\n";

	CHECK(send(fd, get, sizeof(get) - 1, 0) > 0);
	expect_closed(fd);
	/* The device responds to a peer of another version with its own version, so that the peer
	 * can report the mismatch. */
	fd = connect_to(address.port);
	soft_hello_encode(bytes, &(struct soft_hello){.kind = SOFT_HELLO_STREAM});
	bytes[8]++;
	CHECK_EQUAL(send(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
	CHECK(receive_exactly(fd, bytes, sizeof(bytes)));
	CHECK_EQUAL(soft_hello_version(bytes), SOFT_WIRE_VERSION);
	expect_closed(fd);
	FOR_EACH (i, nonsense) {
		uint8_t record[RECORD_HEADER + 64] = {0};

		fd = open_stream(address.port);
		soft_put32(record, nonsense[i].word);
		soft_put32(record + 4, 1);
		CHECK(send(fd, record, RECORD_HEADER + nonsense[i].length, 0) > 0);
		expect_closed(fd);
	}
	/* Send HELLOs with one fault each. */
	for (int wrong = 0; wrong < 4; wrong++) {
		struct soft_hello hello = {
			.kind = SOFT_HELLO,
			.from = a.qp->qp_num,
			.to = b.qp->qp_num,
			.receive_psn = b.psn,
			.send_psn = a.psn,
			.flags = SOFT_HELLO_SENDS,
			.mtu = IBV_MTU_4096,
		};

		if (wrong == 0)
			hello.kind = SOFT_HELLO_ACK;
		if (wrong == 1)
			hello.to ^= 0x800000;
		if (wrong == 2)
			hello.receive_psn ^= 1;
		/* If `wrong` is 3, the HELLO is correct, but its queue pair already has a peer. */
		fd = open_stream(address.port);
		send_hello(fd, &hello, 5);
		if (wrong == 0) {
			CHECK(receive_exactly(fd, bytes, RECORD_HEADER));
			CHECK_EQUAL(bytes[3], SOFT_RECORD_END);
			close(fd);
		} else {
			guesses[wrong] = fd;
		}
	}
	/* The device does not respond to the other HELLOs, because a response would reveal whether
	 * the queue pair exists. By the time a later stream completes its handshake, the device has
	 * handled all of them. */
	close(open_stream(address.port));
	for (int wrong = 1; wrong < 4; wrong++)
		CHECK(recv(guesses[wrong], bytes, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
	/* Many streams that send nothing or part of a handshake must not lock out other peers. */
	int fds[300];

	soft_hello_encode(bytes, &(struct soft_hello){.kind = SOFT_HELLO_STREAM});
	for (int i = 0; i < 300; i++) {
		fds[i] = connect_to(address.port);
		CHECK_EQUAL(send(fds[i], bytes, (size_t)(i % 40), MSG_NOSIGNAL), i % 40);
	}
	expect_closed(fds[0]); /* evicted as the oldest */
	/* The device has also evicted the streams with a wrong HELLO, because they have no
	 * channel. */
	for (int wrong = 1; wrong < 4; wrong++)
		expect_closed(guesses[wrong]);
	struct side c, d;

	OPEN_PAIR(&c, &d);
	send_one_message(&c, &d);
	close_pair(&c, &d);
	for (int i = 1; i < 300; i++)
		close(fds[i]);

	/* The first pair still works. */
	send_one_message(&a, &b);
	close_pair(&a, &b);
}

/* Check that a UD queue pair refuses streams. Its peer fields are zero, but zeros in a HELLO must
 * not match them. */
static void ud_queue_pair_refuses_streams(void)
{
	for (uint8_t opcode = SOFT_SEND; opcode <= SOFT_ATOMIC_DATA; opcode++) {
		uint8_t bytes[RECORD_HEADER + SOFT_FRAME_HEADER + SOFT_ATOMIC_ARGUMENTS] = {0};
		struct side side;

		UD_OPEN(&side);
		int fd = open_stream(port_of_number(side.qp->qp_num));

		send_hello(fd,
			   &(struct soft_hello){.kind = SOFT_HELLO,
						.to = side.qp->qp_num,
						.receive_psn = side.psn,
						.flags = SOFT_HELLO_SENDS},
			   1);
		record_header(bytes, SOFT_RECORD_DATA, sizeof(bytes) - RECORD_HEADER, 1, 0);
		soft_frame_encode(bytes + RECORD_HEADER,
				  &(struct soft_frame){.opcode = opcode,
						       .length = SOFT_ATOMIC_ARGUMENTS,
						       .dma_length = SOFT_ATOMIC_ARGUMENTS});
		CHECK_EQUAL(send(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
		/* By the time a later stream completes its handshake, the device has read
		 * everything that was sent above. */
		close(open_stream(port_of_number(side.qp->qp_num)));
		CHECK_EQUAL(verbs->device->wire(side.qp), AIORDMA_WIRE_NONE);
		CHECK(recv(fd, bytes, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
		soft_lock(); /* the CM cannot attach a stream either */
		CHECK_EQUAL(soft_qp_adopt(soft_qp_of(side.qp), fd, NULL, 0), EINVAL);
		soft_unlock();
		close_side(&side);
	}
}

static uint64_t stands_at; /* atomic: time of the stopped clock in ns, or 0 to use the real clock */

static int stoppable_clock(clockid_t clock, struct timespec *now)
{
	uint64_t ns = __atomic_load_n(&stands_at, __ATOMIC_SEQ_CST);

	if (!ns || clock != CLOCK_MONOTONIC)
		return clock_gettime(clock, now);
	*now = (struct timespec){.tv_sec = (time_t)(ns / SECOND), .tv_nsec = (long)(ns % SECOND)};
	return 0;
}

/* Check whether the device refuses a correct HELLO that follows `wrong` incorrect ones on the same
 * stream. If the stream has guesses left, the device holds the HELLO until the queue pair is ready.
 * A new stream has only one guess, because a peer can open any number of streams. A stream with
 * full credit, such as one from the CM, has a thousand more. */
static void hello_is_refused_unchecked_after_too_many_guesses(bool created_by_cm, uint32_t wrong,
							      bool unseen)
{
	uint8_t record[RECORD_HEADER];
	struct side side, other;
	bool refused = false;
	uint32_t number;

	OPEN(&side);
	CHECK_OK(to_init(&side));
	struct address address = address_of_side(&side);
	struct soft_hello hello = {.kind = SOFT_HELLO, .from = 1, .to = side.qp->qp_num ^ 0x1fff};
	OPEN(&other);
	__atomic_store_n(&stands_at, now_ns(CLOCK_MONOTONIC), __ATOMIC_SEQ_CST);
	int fd = created_by_cm ? adopt(&other) : open_stream(address.port);

	for (uint32_t i = 1; i <= wrong; i++)
		send_hello(fd, &hello, i);
	hello.to = side.qp->qp_num;
	send_hello(fd, &hello, 5000);
	hello.kind = SOFT_HELLO_ACK; /* always refused, so its END is the last one */
	send_hello(fd, &hello, 5001);
	do {
		CHECK(receive_exactly(fd, record, sizeof(record)));
		CHECK_EQUAL(record[3], SOFT_RECORD_END);
		number = soft_get32(record + 4);
		refused |= number == 5000;
	} while (number != 5001);
	CHECK_EQUAL(refused, unseen);
	__atomic_store_n(&stands_at, 0, __ATOMIC_SEQ_CST);
	close(fd);
	close_side(&other);
	close_side(&side);
}

/* Bring up a side that connects to a listening socket of the test. The queue pair with the smaller
 * number opens the stream, so the test uses a number higher than that of any device. Returns the
 * socket, and stores the test's number in `*highest`. */
static int open_side_towards_listener(struct side *side, uint32_t *highest)
{
	int door = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(door >= 0);
	*highest = number_at(bind_device_port(door), 0x3ffe);
	CHECK_OK(listen(door, 1));
	OPEN(side);
	bring_up(side, &(struct address){.qpn = *highest, .psn = 5});
	return door;
}

/* Check that a queue pair withdraws its HELLO if it enters ERR before the peer responds. */
static void queue_pair_in_error_withdraws_its_hello(void)
{
	uint8_t bytes[SOFT_HANDSHAKE_SIZE], record[RECORD_HEADER];
	struct soft_hello hello;
	struct side side;
	uint32_t highest;
	int door = open_side_towards_listener(&side, &highest);
	int fd = accept(door, NULL, NULL);

	CHECK(fd >= 0);
	CHECK(receive_exactly(fd, bytes, sizeof(bytes)));
	CHECK(soft_hello_decode(bytes, &hello));
	CHECK_EQUAL(hello.kind, SOFT_HELLO_STREAM);
	/* The device sends nothing more before the response. */
	CHECK(recv(fd, record, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
	CHECK_EQUAL(send(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
	CHECK(receive_exactly(fd, record, sizeof(record)));
	CHECK_EQUAL(record[3], SOFT_RECORD_OPEN);
	uint32_t number = soft_get32(record + 8);

	CHECK(receive_exactly(fd, bytes, sizeof(bytes)));
	CHECK(soft_hello_decode(bytes, &hello));
	CHECK_EQUAL(hello.to, highest);
	/* The device refuses every HELLO on a stream that it opened, including a correct one. */
	struct soft_hello right = {
		.kind = SOFT_HELLO,
		.from = highest,
		.to = hello.from,
		.receive_psn = side.psn,
		.send_psn = 5,
		.flags = SOFT_HELLO_SENDS,
		.mtu = IBV_MTU_4096,
	};

	send_hello(fd, &right, 9);
	right.kind = SOFT_HELLO_ACK;
	send_hello(fd, &right, 10);
	for (uint32_t refused = 9; refused <= 10; refused++) {
		CHECK(receive_exactly(fd, record, sizeof(record)));
		CHECK_EQUAL(record[3], SOFT_RECORD_END);
		CHECK_EQUAL(soft_get32(record + 4), refused);
	}
	CHECK_OK(to_state(&side, IBV_QPS_ERR));
	CHECK(receive_exactly(fd, record, sizeof(record)));
	CHECK_EQUAL(record[3], SOFT_RECORD_END);
	CHECK_EQUAL(soft_get32(record + 4), 0);
	CHECK_EQUAL(soft_get32(record + 8), number);
	expect_closed(fd); /* a stream without a channel is closed */
	close(door);
	close_side(&side);
}

/* Check that a request fails if the peer withdraws its HELLO before it handles the response. The
 * request's data has reached the peer's kernel by then, but not its queue pair. */
static void request_fails_if_the_peer_withdraws_its_hello(struct side *side)
{
	uint8_t bytes[SOFT_HANDSHAKE_SIZE], record[RECORD_HEADER];
	struct soft_frame frame;
	struct address address = address_of_side(side);
	const struct soft_hello hello = {
		.kind = SOFT_HELLO,
		.from = 77,
		.to = side->qp->qp_num,
		.receive_psn = side->psn,
		.send_psn = 5,
		.flags = SOFT_HELLO_SENDS,
		.mtu = IBV_MTU_4096,
	};

	bring_up(side, &(struct address){.qpn = 77, .psn = 5});
	int fd = open_stream(address.port);

	send_hello(fd, &hello, 6);
	CHECK(receive_exactly(fd, record, sizeof(record)));
	CHECK_EQUAL(record[3], SOFT_RECORD_ACCEPT);
	CHECK(receive_exactly(fd, bytes, sizeof(bytes)));
	POST(side, IBV_WR_SEND, .wr_id = 1, .length = 8);
	CHECK(receive_exactly(fd, record, sizeof(record)));
	CHECK_EQUAL(record[3], SOFT_RECORD_DATA);
	CHECK(receive_exactly(fd, bytes, SOFT_FRAME_HEADER + 8));
	CHECK(soft_frame_decode(bytes, &frame));
	CHECK_EQUAL(frame.syndrome, IBV_MTU_4096); /* checked by a peer without a handshake */
	record_header(record, SOFT_RECORD_END, 0, 0, 6);
	CHECK_EQUAL(send(fd, record, sizeof(record), 0), sizeof(record));
	expect_closed(fd); /* its only channel has ended */
	expect_wc(side, 1, IBV_WC_RETRY_EXC_ERR);
}

/* ---- the end of a stream ------------------------------------------------------------------- */

/* State of the peer process when killed: in the middle of its transfer, with a living child, or
 * stopped before serving a READ. */
enum way { IN_TRANSFER, WITH_CHILD, STOPPED, WAYS };

static void peer_death_flushes_requests_and_raises_fatal_event(enum way way)
{
	enum { BIG = 64 << 20 };
	struct process process;
	struct side side;
	struct address peer = open_peers(&process, &side,
					 (struct options){.memory = BIG,
							  .timeout = 255, /* never times out */
							  .ends_with_peer = true},
					 2, 8);

	process_barrier(&process);
	/* Exchange a message to ensure that the stream exists. */
	POST(&side, IBV_WR_SEND_WITH_IMM, .wr_id = 4);
	expect_two(&side);
	process_barrier(&process);
	if (!process.child) {
		if (way == WITH_CHILD) {
			pid_t child = fork_asleep();

			CHECK(child >= 0);
			if (child == 0) {
				/* Wait until the test process closes its socket. */
				char byte;

				while (read(process.fd, &byte, 1) > 0)
					;
				_exit(0);
			}
		}
		process_send(&process, "", 1);
		if (way == IN_TRANSFER)
			post(&side, (struct request){.opcode = IBV_WR_RDMA_WRITE,
						     .wr_id = 2,
						     .length = BIG,
						     AT(&peer, 0)});
		for (;;)
			pause();
	}
	char byte;

	process_receive(&process, &byte, 1);
	if (way == STOPPED) {
		CHECK_OK(kill(process.child, SIGSTOP));
		CHECK_EQUAL(waitpid(process.child, NULL, WUNTRACED), process.child);
		POST(&side, IBV_WR_RDMA_READ, .wr_id = 3, .length = BIG, AT(&peer, 0));
	}
	CHECK_OK(kill(process.child, SIGKILL));
	if (way == STOPPED)
		expect_wc(&side, 3, IBV_WC_RETRY_EXC_ERR);
	expect_wc(&side, 1, IBV_WC_WR_FLUSH_ERR);
	expect_event(&side, IBV_EVENT_QP_FATAL);
	expect_state(&side, IBV_QPS_ERR);
	close_side(&side);
	close(process.fd);
	CHECK_EQUAL(waitpid(process.child, NULL, 0), process.child);
}

/* ---- hostile frames ------------------------------------------------------------------------ */

/* Check that a frame moves the queue pair to ERR and has no other effect. If `refused` is true, the
 * device must respond with a NAK. Otherwise, it must respond with END. */
static void expect_frame_fails_qp(const struct soft_frame *said, bool refused)
{
	struct soft_frame frame = *said;
	struct side side;

	OPEN(&side);
	int fd = adopt(&side);

	frame.ack = side.psn;
	if (!frame.psn)
		frame.psn = frame.opcode < SOFT_ACK ? PEER_PSN : side.psn;
	frame.address = (uintptr_t)side.memory;
	frame.rkey = side.mr->rkey;
	post_receive_at(&side, 1, 0, 64);
	send_stream_frame(fd, frame, NULL);
	expect_event(&side, refused ? IBV_EVENT_QP_REQ_ERR : IBV_EVENT_QP_FATAL);
	expect_wc(&side, 1, IBV_WC_WR_FLUSH_ERR);
	expect_state(&side, IBV_QPS_ERR);
	if (refused)
		CHECK_EQUAL(receive_frame_header(fd).opcode, SOFT_NAK);
	else
		expect_record_end(fd);
	close_records(fd);
	close_side(&side);
}

/* Check that the device sends END after a malformed frame, and a NAK after a request that is
 * invalid only in its context. Some of the malformed frames are responses, although no request was
 * posted. */
static void malformed_frame_moves_the_queue_pair_to_error(void)
{
	static const struct soft_frame ends[] = {
		{.opcode = 0},
		{.opcode = 99},
		{.opcode = 255, .length = 0xffffffff, .psn = 0xffffffff},
		{.opcode = SOFT_SEND, .length = SOFT_FRAME_MAX + 1},
		{.opcode = SOFT_SEND, .psn = 1 << 24, .length = 8},
		{.opcode = SOFT_SEND, .length = 8, .msn = 1 << 24},
		{.opcode = SOFT_SEND, .length = 8, .dma_length = 0x40000001},
		/* parts that are empty or not a multiple of the path MTU */
		{.opcode = SOFT_SEND, .length = 8, .flags = SOFT_FRAME_MORE},
		{.opcode = SOFT_SEND, .flags = SOFT_FRAME_MORE},
		{.opcode = SOFT_SEND, .flags = SOFT_FRAME_CONTINUES},
		/* a flag that only the last frame may have */
		{.opcode = SOFT_SEND,

		 .length = 4096,
		 .flags = SOFT_FRAME_MORE | SOFT_FRAME_IMMEDIATE},
		{.opcode = SOFT_WRITE, .flags = SOFT_FRAME_INVALIDATE},
		{.opcode = SOFT_READ, .length = 8, .dma_length = 8},
		{.opcode = SOFT_READ, .dma_length = 8, .flags = SOFT_FRAME_MORE},
		{.opcode = SOFT_FETCH_ADD, .length = 8},
		{.opcode = SOFT_COMPARE_SWAP, .length = 64},
		{.opcode = SOFT_ATOMIC_WRITE, .length = 16},
		{.opcode = SOFT_ATOMIC_WRITE, .length = 8, .flags = SOFT_FRAME_MORE},
		{.opcode = SOFT_ATOMIC_WRITE,

		 .length = 8,
		 .flags = SOFT_FRAME_INVALIDATE},
		{.opcode = SOFT_ACK, .length = 4},
		{.opcode = SOFT_ACK},
		{.opcode = SOFT_SEND, .length = 8, .flags = SOFT_FRAME_ACK},
		{.opcode = SOFT_NAK, .syndrome = SOFT_NAK_REMOTE_ACCESS},
		{.opcode = SOFT_RNR_NAK},
		{.opcode = SOFT_READ_DATA, .length = 8},
		{.opcode = SOFT_ATOMIC_DATA, .length = 8},
	};
	static const struct soft_frame refused[] = {
		{.opcode = SOFT_SEND, .length = 8, .flags = SOFT_FRAME_CONTINUES},
		{.opcode = SOFT_WRITE, .length = 8, .flags = SOFT_FRAME_CONTINUES},
		/* a path MTU that differs from this side's, so that the same PSNs refer to
		 * different offsets; a handshake would detect the mismatch */
		{.opcode = SOFT_SEND, .length = 8, .syndrome = IBV_MTU_256},
		/* a length that contradicts the message's length */
		{.opcode = SOFT_WRITE, .length = 8, .dma_length = 4},
		{.opcode = SOFT_WRITE, .length = 8, .dma_length = 16},
		{.opcode = SOFT_WRITE,

		 .length = 4096,
		 .dma_length = 4096,
		 .flags = SOFT_FRAME_MORE},
	};

	FOR_EACH (i, ends)
		expect_frame_fails_qp(&ends[i], false);
	FOR_EACH (i, refused)
		expect_frame_fails_qp(&refused[i], true);
}

static void malformed_response_completes_with_bad_resp_err(void)
{
	const struct {
		enum ibv_wr_opcode opcode;
		struct soft_frame frame;
	} cases[] = {
		{IBV_WR_SEND, {.opcode = SOFT_READ_DATA, .length = 8}},
		{IBV_WR_SEND, {.opcode = SOFT_ATOMIC_DATA, .length = 8}},
		{IBV_WR_SEND, {.opcode = SOFT_NAK, .syndrome = 77}},
		{IBV_WR_RDMA_READ, {.opcode = SOFT_READ_DATA, .length = 16}},
		{IBV_WR_RDMA_READ, {.opcode = SOFT_READ_DATA, .length = 4}},
		{IBV_WR_RDMA_READ, {.opcode = SOFT_READ_DATA, .length = 0}},
		{IBV_WR_RDMA_READ,
		 {.opcode = SOFT_READ_DATA, .length = 8, .flags = SOFT_FRAME_MORE}},
		{IBV_WR_RDMA_READ,
		 {.opcode = SOFT_READ_DATA, .length = 4096, .flags = SOFT_FRAME_MORE}},
		{IBV_WR_RDMA_READ, {.opcode = SOFT_ATOMIC_DATA, .length = 8}},
		{IBV_WR_ATOMIC_FETCH_AND_ADD, {.opcode = SOFT_READ_DATA, .length = 8}},
		{IBV_WR_ATOMIC_FETCH_AND_ADD, {.opcode = SOFT_ATOMIC_DATA, .length = 4}},
	};

	FOR_EACH (i, cases) {
		struct soft_frame frame = cases[i].frame;
		struct side side;

		OPEN(&side);
		int fd = adopt(&side);

		POST(&side, cases[i].opcode, .wr_id = 1, .length = 8);
		frame.psn = side.psn;
		send_stream_frame(fd, frame, NULL);
		expect_wc(&side, 1, IBV_WC_BAD_RESP_ERR);
		expect_state(&side, IBV_QPS_ERR);
		close(fd);
		close_side(&side);
	}
}

int main(void)
{
	static struct soft_platform platform; /* static because the device's threads outlive main */

	platform = *soft_device.platform;
	platform.clock = stoppable_clock;
	soft_device.platform = &platform;
	limit_seconds(100);
	for (enum way way = 0; way < WAYS; way++)
		STEP(peer_death_flushes_requests_and_raises_fatal_event(way));
	STEP(queue_pairs_with_different_mtus_do_not_connect());
	STEP(queue_pair_in_rtr_accepts_acknowledgement_of_any_psn());
	STEP(queue_pair_in_error_withdraws_its_hello());
	SIDE(request_fails_if_the_peer_withdraws_its_hello, .timeout = 8, .retry_cnt = 1);
	STEP(malformed_streams_and_hellos_do_not_disturb_others());
	STEP(ud_queue_pair_refuses_streams());
	STEP(hello_is_refused_unchecked_after_too_many_guesses(false, 0, false));
	STEP(hello_is_refused_unchecked_after_too_many_guesses(false, 1, true));
	STEP(hello_is_refused_unchecked_after_too_many_guesses(true, 1000, false));
	STEP(hello_is_refused_unchecked_after_too_many_guesses(true, 1001, true));
	STEP(malformed_frame_moves_the_queue_pair_to_error());
	STEP(malformed_response_completes_with_bad_resp_err());
	return 0;
}
