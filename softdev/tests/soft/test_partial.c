/* Test frames that have been partly sent when the send queue fails, a message restarts, the queue
 * pair ends, or the port goes down. The peer must receive each frame completely, with its original
 * data. The test plays the peer and decides when to read. */
#include <sys/socket.h>

#include "record_side.h"
#include "verbs_side.h"
#include "shortage.h"

#include "engine/engine_internal.h"
#include "link/link_internal.h"

enum {
	REST = 64, /* payload of a message's second frame */
	LONG = SOFT_FRAME_MAX + REST,
	UNIT = 4096, /* the path MTU */
	PSNS = SOFT_FRAME_MAX / UNIT + 1, /* number in a long message */
	CODE = 1, /* RNR timer code for 10 us */
};

struct stage {
	struct side side;
	int fd; /* the test's end of the stream */
	const struct soft_tcp_path *tcp;
};

static uint8_t payload[SOFT_FRAME_MAX];

/* This program wraps sendmsg() to limit its output. `most_at_once` is the maximum number of bytes
 * for each call. `most_in_all` is the number of bytes after which all calls fail with EAGAIN. */
static size_t most_at_once = SIZE_MAX, most_in_all = SIZE_MAX;
static int sent; /* number of successful calls since the limits were set */

ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
	size_t left = most_at_once < most_in_all ? most_at_once : most_in_all, count = 0;
	struct iovec iov[1 + SOFT_PATH_RECORDS + SOFT_PATH_IOVECS];
	struct msghdr less = *message;

	for (; count < message->msg_iovlen && left; count++) {
		iov[count] = message->msg_iov[count];
		if (iov[count].iov_len > left)
			iov[count].iov_len = left;
		left -= iov[count].iov_len;
	}
	less.msg_iov = iov;
	less.msg_iovlen = count;
	errno = EAGAIN;
	ssize_t n = most_in_all ? __real_sendmsg(fd, &less, flags) : -1;

	sent += n > 0;
	if (n > 0 && most_in_all != SIZE_MAX)
		most_in_all -= (size_t)n;
	return n;
}

/* Set the limits of sendmsg. The device's lock protects them, because the device sends while it
 * holds the lock. */
static void limit_sending(size_t at_once, size_t in_all)
{
	soft_lock();
	sent = 0;
	most_at_once = at_once;
	most_in_all = in_all;
	soft_unlock();
}

static void open_stage(struct stage *stage, struct options options)
{
	const struct address absent = {.psn = 100, .qpn = 77}; /* LID 0: the test is the peer */
	const int small = 4096; /* less than a frame */
	int fds[2];

	options.memory = LONG;
	open_side(&stage->side, options);
	memset(stage->side.memory, 0xaa, LONG);
	CHECK_OK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds));
	CHECK_OK(fcntl(fds[1], F_SETFL, O_NONBLOCK));
	CHECK_OK(setsockopt(fds[1], SOL_SOCKET, SO_SNDBUF, &small, sizeof(small)));
	bring_up(&stage->side, &absent);
	soft_lock();
	CHECK_OK(soft_qp_adopt(soft_qp_of(stage->side.qp), fds[1], NULL, 0));
	stage->tcp = soft_tcp_path_of(soft_link_of(soft_qp_of(stage->side.qp))->chan.path);
	soft_unlock();
	stage->fd = fds[0];
	record_left[stage->fd] = 0;
}

static void close_stage(struct stage *stage)
{
	close_records(stage->fd);
	close_side(&stage->side);
}

static void send_frame(const struct stage *stage, struct soft_frame frame)
{
	uint8_t bytes[SOFT_FRAME_HEADER];

	soft_frame_encode(bytes, &frame);
	send_record_bytes(stage->fd, bytes, sizeof(bytes));
}

/* Read the next frame, whose first `count` bytes are already in `begun`. */
static struct soft_frame receive_rest_of_frame(const struct stage *stage, const uint8_t *begun,
					       size_t count)
{
	struct soft_frame frame;
	size_t have = 0;

	if (count) {
		have = count - RECORD_HEADER - SOFT_FRAME_HEADER;
		CHECK(have < count);
		CHECK(soft_frame_decode(begun + RECORD_HEADER, &frame));
		memcpy(payload, begun + RECORD_HEADER + SOFT_FRAME_HEADER, have);
		record_left[stage->fd] = frame.length - (uint32_t)have;
	} else {
		frame = receive_frame_header(stage->fd);
	}
	CHECK(frame.length <= sizeof(payload));
	CHECK(receive_record_bytes(stage->fd, payload + have, frame.length - have));
	return frame;
}

static void expect_send_frame(const struct stage *stage, uint32_t psn, uint32_t offset,
			      uint32_t length)
{
	struct soft_frame frame = receive_rest_of_frame(stage, NULL, 0);

	CHECK_EQUAL(frame.opcode, SOFT_SEND);
	CHECK_EQUAL(frame.psn, soft_psn_add(stage->side.psn, psn + offset / UNIT));
	CHECK_EQUAL(soft_is_first(&frame), !offset);
	CHECK_EQUAL(frame.length, length);
	for (uint32_t i = 0; i < length; i++)
		CHECK_EQUAL(payload[i], stage->side.memory[offset + i]);
}

static bool is_partial(struct stage *stage)
{
	return LOCKED(stage->tcp->output_length > stage->tcp->output_sent);
}

/* ---- the send queue fails -------------------------------------------------------------------- */

/* Post a message of two frames. Returns the region that contains all data of the second frame. */
static struct ibv_mr *post_in_two_regions(struct stage *stage)
{
	struct side *side = &stage->side;
	struct ibv_mr *rest = verbs->ibv_reg_mr(side->pd, side->memory + SOFT_FRAME_MAX, REST, 0);
	struct ibv_sge sges[2] = {
		{.addr = (uintptr_t)side->memory, .length = SOFT_FRAME_MAX, .lkey = side->mr->lkey},
		{.addr = (uintptr_t)side->memory + SOFT_FRAME_MAX, .length = REST},
	};
	struct ibv_send_wr wr = {.wr_id = 1, .sg_list = sges, .num_sge = 2, .opcode = IBV_WR_SEND},
			   *bad;

	CHECK(rest);
	sges[1].lkey = rest->lkey;
	CHECK_OK(side->context->ops.post_send(side->qp, &wr, &bad));
	CHECK(is_partial(stage));
	return rest;
}

/* Read from the stream until the request has failed. Returns the number of bytes stored in
 * `begun`. */
static size_t read_until_failed(struct stage *stage, uint8_t *begun, size_t room)
{
	struct ibv_wc wc;
	size_t count = 0;

	while (poll_cq(&stage->side, 1, &wc) == 0) {
		ssize_t n = recv(stage->fd, begun + count, room - count, MSG_DONTWAIT);

		CHECK(n >= 0 || errno == EAGAIN);
		count += n > 0 ? (size_t)n : 0;
		soft_progress();
	}
	CHECK_EQUAL(wc.wr_id, 1);
	CHECK_EQUAL(wc.status, IBV_WC_LOC_PROT_ERR);
	return count;
}

/* Deregister the memory of a request's second frame while its first frame is being sent. The
 * request must fail. The first frame must keep its data, even if the next message of a UC queue
 * pair reuses the request's slot. If `draining` is set, the queue pair is in SQD. */
static void request_fails_when_memory_of_its_rest_is_deregistered(bool uc, bool draining)
{
	static uint8_t begun[RECORD_HEADER + SOFT_FRAME_HEADER + SOFT_FRAME_MAX];
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};
	struct stage stage;
	struct side *side = &stage.side;

	open_stage(&stage, (struct options){.uc = uc, .sends = 1});
	struct ibv_mr *rest = post_in_two_regions(&stage);

	if (draining)
		CHECK_OK(verbs->ibv_modify_qp(side->qp, &attr,
					      IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
	CHECK_OK(verbs->ibv_dereg_mr(rest));
	size_t count = read_until_failed(&stage, begun, sizeof(begun));

	if (draining)
		expect_event(side, IBV_EVENT_SQ_DRAINED);
	CHECK_EQUAL(state_of(side), uc ? IBV_QPS_SQE : IBV_QPS_ERR);
	if (uc) {
		memset(side->memory, 0xbb, LONG);
		enter_state(side, IBV_QPS_RTS);
		POST(side, IBV_WR_SEND, .wr_id = 2, .length = REST);
		struct soft_frame frame = receive_rest_of_frame(&stage, begun, count);

		CHECK_EQUAL(frame.psn, side->psn);
		CHECK_EQUAL(frame.length, SOFT_FRAME_MAX);
		for (uint32_t i = 0; i < frame.length; i++)
			CHECK_EQUAL(payload[i], 0xaa);
		expect_send_frame(&stage, PSNS, 0, REST);
		expect_wc(side, 2, IBV_WC_SUCCESS);
	}
	close_stage(&stage);
}

static void stream_closes_if_rest_of_frame_cannot_be_allocated(struct stage *stage)
{
	shortage_begin(1);
	POST(&stage->side, IBV_WR_SEND, .wr_id = 1, .length = LONG);
	CHECK_EQUAL(shortage_end(), ENOMEM);
	expect_wc(&stage->side, 1, IBV_WC_RETRY_EXC_ERR);
}

static void put_record(struct stage *stage, size_t length)
{
	const struct iovec iov = {stage->side.memory, length};
	struct soft_path *path = soft_link_of(soft_qp_of(stage->side.qp))->chan.path;
	const struct soft_record_end end = {.iovecs = 1, .bytes = length};

	path->calls->put(path, SOFT_RECORD_DATA, STREAM_CHAN, 0, &iov, &end, 1);
}

/* Check that a stream on which an allocation has failed sends no more data in the same step, even
 * for other queue pairs. */
static void stream_sends_nothing_more_after_failed_allocation(struct stage *stage)
{
	soft_lock();
	shortage_begin(1);
	put_record(stage, 100);
	CHECK_EQUAL(shortage_end(), ENOMEM);
	put_record(stage, 2 * UNIT);
	CHECK_EQUAL(recv(stage->fd, payload, 1, MSG_DONTWAIT), -1);
	soft_unlock();
}

/* ---- the requester goes back ----------------------------------------------------------------- */

static struct soft_qp *wait_for_rnr_retry(struct stage *stage, uint8_t rnr_left)
{
	struct soft_qp *qp = soft_qp_of(stage->side.qp);
	bool waits;

	do {
		soft_progress();
		soft_lock();
		waits = qp->rnr_retries_remaining == rnr_left;
		soft_unlock();
	} while (!waits);
	return qp;
}

static bool is_rnr_wait_over(struct soft_qp *qp)
{
	return LOCKED(!qp->rnr_paused);
}

/* Check that a message restarts after an RNR NAK for a frame that has been partly sent. The device
 * must finish this frame first, even if the RNR timer has already expired (`over_first`). */
static void message_restarts_after_rnr_nak_for_partly_sent_frame(bool over_first)
{
	enum { RETRIES = 3 };
	struct stage stage;
	struct side *side = &stage.side;

	open_stage(&stage, (struct options){.rnr_retry = RETRIES});
	POST(side, IBV_WR_SEND, .wr_id = 1, .length = LONG);
	POST(side, IBV_WR_SEND, .wr_id = 2, .length = REST);
	CHECK(is_partial(&stage));
	/* Code 0 stands for a delay of 655 ms, but the test expires the timer earlier. */
	send_frame(&stage, (struct soft_frame){.opcode = SOFT_RNR_NAK,
					       .psn = side->psn,
					       .syndrome = over_first ? CODE : 0});
	struct soft_qp *qp = wait_for_rnr_retry(&stage, RETRIES - 1);

	if (over_first)
		while (!is_rnr_wait_over(qp))
			soft_progress();
	expect_send_frame(&stage, 0, 0, SOFT_FRAME_MAX);
	soft_lock();
	if (qp->rnr_paused)
		soft_timer_start(&qp->rnr_timer, soft_now());
	soft_unlock();
	expect_send_frame(&stage, 0, 0, SOFT_FRAME_MAX);
	expect_send_frame(&stage, 0, SOFT_FRAME_MAX, REST);
	expect_send_frame(&stage, PSNS, 0, REST);
	send_frame(&stage,
		   (struct soft_frame){.opcode = SOFT_ACK, .psn = soft_psn_add(side->psn, PSNS)});
	expect_wc(side, 1, IBV_WC_SUCCESS);
	expect_wc(side, 2, IBV_WC_SUCCESS);
	close_stage(&stage);
}

/* ---- the queue pair ends --------------------------------------------------------------------- */

static void expect_end(const struct stage *stage)
{
	struct soft_frame frame = receive_rest_of_frame(stage, NULL, 0);

	CHECK_EQUAL(frame.opcode, SOFT_DISCONNECT);
	expect_record_end(stage->fd);
}

static void expect_original_data(const struct stage *stage, uint8_t opcode, uint32_t offset,
				 uint32_t length)
{
	struct soft_frame frame = receive_rest_of_frame(stage, NULL, 0);

	CHECK_EQUAL(frame.opcode, opcode);
	CHECK_EQUAL(soft_is_first(&frame), !offset);
	CHECK_EQUAL(frame.length, length);
	for (uint32_t i = 0; i < length; i++)
		CHECK_EQUAL(payload[i], 0xaa);
}

/* Check that each byte is sent once, wherever the socket splits the data. DISCONNECT follows the
 * data and may be split, too. */
static void each_byte_is_sent_once_across_partial_writes(size_t at_once)
{
	static const uint32_t lengths[] = {8, 0, 1100, 100};
	const int enough = 1 << 20; /* each part occupies several hundred bytes */
	struct stage stage;

	open_stage(&stage, (struct options){.uc = true});
	CHECK_OK(setsockopt(LOCKED(stage.tcp->watch.fd), SOL_SOCKET, SO_SNDBUF, &enough,
			    sizeof(enough)));
	limit_sending(at_once, SIZE_MAX);
	for (uint32_t i = 0; i < 4; i++)
		POST(&stage.side, IBV_WR_SEND, .wr_id = i, .length = lengths[i]);
	for (uint32_t i = 0; i < 4; i++)
		expect_wc(&stage.side, i, IBV_WC_SUCCESS);
	memset(stage.side.memory, 0xbb, LONG);
	destroy_qp(&stage.side);
	for (uint32_t i = 0; i < 4; i++)
		expect_original_data(&stage, SOFT_SEND, 0, lengths[i]);
	expect_end(&stage);
	limit_sending(SIZE_MAX, SIZE_MAX);
	close_stage(&stage);
}

/* Check that the first frame of a response keeps its data if the memory is deregistered while the
 * frame is being sent. A NAK follows the frame. */
static void partly_sent_response_keeps_its_data_when_deregistered(struct stage *stage)
{
	struct side *side = &stage->side;

	send_frame(stage, (struct soft_frame){.opcode = SOFT_READ,
					      .psn = 100,
					      .address = (uintptr_t)side->memory,
					      .rkey = side->mr->rkey,
					      .dma_length = LONG});
	while (!is_partial(stage))
		soft_progress();
	CHECK_OK(verbs->ibv_dereg_mr(side->mr));
	side->mr = NULL;
	memset(side->memory, 0xbb, LONG);
	expect_original_data(stage, SOFT_READ_DATA, 0, SOFT_FRAME_MAX);
	CHECK_EQUAL(receive_rest_of_frame(stage, NULL, 0).opcode, SOFT_NAK);
	expect_end(stage);
}

/* Check that a message that was sent whole succeeds when the peer closes the stream, and that a
 * partly sent message fails. */
static void partly_sent_message_fails_when_the_peer_ends(struct stage *stage)
{
	limit_sending(SIZE_MAX, 2 * (RECORD_HEADER + SOFT_FRAME_HEADER) + 8 + 100);
	POST(&stage->side, IBV_WR_SEND, .wr_id = 1, .length = 8);
	POST(&stage->side, IBV_WR_SEND, .wr_id = 2, .length = 2000);
	expect_send_frame(stage, 0, 0, 8);
	CHECK(receive_record_bytes(stage->fd, payload, SOFT_FRAME_HEADER + 100));
	CHECK(is_partial(stage));
	CHECK_OK(shutdown(stage->fd, SHUT_WR));
	expect_wc(&stage->side, 1, IBV_WC_SUCCESS);
	expect_wc(&stage->side, 2, IBV_WC_RETRY_EXC_ERR);
	limit_sending(SIZE_MAX, SIZE_MAX);
}

/* ---- records that go out together --------------------------------------------------------------- */

/* Check that two frames are sent with one call. If the socket accepts only the first frame, the
 * second must not be built yet. */
static void two_frames_are_sent_with_one_call(bool first_alone)
{
	const int enough = 2 * LONG;
	const size_t first = RECORD_HEADER + SOFT_FRAME_HEADER + SOFT_FRAME_MAX;
	struct stage stage;

	open_stage(&stage, (struct options){0});
	CHECK_OK(setsockopt(stage.tcp->watch.fd, SOL_SOCKET, SO_SNDBUF, &enough, sizeof(enough)));
	limit_sending(SIZE_MAX, first_alone ? first : SIZE_MAX);
	POST(&stage.side, IBV_WR_SEND, .wr_id = 1, .length = LONG);
	CHECK_EQUAL(LOCKED(sent), 1);
	CHECK(!is_partial(&stage));
	if (first_alone)
		memset(stage.side.memory + SOFT_FRAME_MAX, 0x55, REST);
	limit_sending(SIZE_MAX, SIZE_MAX);
	expect_send_frame(&stage, 0, 0, SOFT_FRAME_MAX);
	expect_send_frame(&stage, 0, SOFT_FRAME_MAX, REST);
	close_stage(&stage);
}

/* Check that a record does not exceed its maximum length when an acknowledgement follows
 * responses. */
static void acknowledgement_after_responses_starts_a_new_record(struct stage *stage)
{
	enum { SHORTER = SOFT_FRAME_MAX - 8 };
	static const uint32_t lengths[] = {SHORTER, SOFT_FRAME_MAX};
	const int enough = 2 * LONG;

	struct soft_frame frame;
	uint8_t write[SOFT_FRAME_HEADER + 8] = {0};

	frame = (struct soft_frame){
		.address = (uintptr_t)stage->side.memory, .rkey = stage->side.mr->rkey, .psn = 100};
	CHECK_OK(setsockopt(stage->tcp->watch.fd, SOL_SOCKET, SO_SNDBUF, &enough, sizeof(enough)));
	soft_lock();
	for (int i = 0; i < 2; i++) {
		frame.opcode = SOFT_READ;
		frame.dma_length = lengths[i];
		send_frame(stage, frame);
		frame.psn += PSNS - 1;
	}
	frame.opcode = SOFT_WRITE;
	frame.address += SOFT_FRAME_MAX;
	frame.length = frame.dma_length = 8;
	soft_frame_encode(write, &frame);
	send_record_bytes(stage->fd, write, sizeof(write));
	soft_unlock();
	soft_progress();
	for (int i = 0; i < 2; i++)
		expect_original_data(stage, SOFT_READ_DATA, 0, lengths[i]);
	CHECK_EQUAL(record_left[stage->fd], 0);
	CHECK_EQUAL(receive_rest_of_frame(stage, NULL, 0).opcode, SOFT_ACK);
}

/* ---- between two polls ------------------------------------------------------------------------ */

static void set_ticking(bool ticking)
{
	soft_lock();
	soft_device.engine->thread_ticks = ticking;
	soft_unlock();
}

/* Delay the output of all posts after the first one until the next step. */
static void begin_to_delay(void)
{
	while (!LOCKED(soft_device.engine->thread_sleeps)) /* so that it cannot end the tick */
		;
	soft_announce_poll(1);
	set_ticking(true);
	soft_progress();
}

/* Check that a thread that has announced its next poll sends only its first request immediately.
 * The others are sent at the next step, or when the thread withdraws its announcement. */
static void only_first_post_before_announced_poll_is_sent_at_once(struct stage *stage)
{
	uint8_t byte;

	for (uint32_t i = 0; i < 6; i += 3) {
		begin_to_delay();
		for (uint32_t j = 0; j < 3; j++)
			POST(&stage->side, IBV_WR_SEND, .wr_id = i + j, .length = 8);
		expect_send_frame(stage, i, 0, 8);
		CHECK_EQUAL(recv(stage->fd, &byte, 1, MSG_DONTWAIT), -1);
		if (i)
			soft_progress();
		else
			soft_announce_poll(-1);
		expect_send_frame(stage, i + 1, 0, 8);
		expect_send_frame(stage, i + 2, 0, 8);
		set_ticking(false);
	}
	soft_announce_poll(-1);
}

/* Check that a channel's END record is sent before the stream closes, even if the socket had no
 * room for the record at first. */
static void end_record_is_sent_before_the_stream_closes(struct stage *stage)
{
	uint8_t record[RECORD_HEADER];

	limit_sending(SIZE_MAX, RECORD_HEADER);
	POST(&stage->side, IBV_WR_SEND, .wr_id = 1, .length = 2000);
	CHECK(is_partial(stage));
	soft_lock();
	soft_link_finish(soft_link_of(soft_qp_of(stage->side.qp)), 0);
	most_in_all = SIZE_MAX;
	soft_unlock();
	expect_send_frame(stage, 0, 0, 2000);
	CHECK(receive_exactly(stage->fd, record, sizeof(record)));
	CHECK_EQUAL(record[3], SOFT_RECORD_END);
	CHECK_EQUAL(soft_get32(record + 4), STREAM_CHAN);
	CHECK(!receive_exactly(stage->fd, record, 1));
}

/* ---- nothing may go -------------------------------------------------------------------------- */

static void partly_sent_frame_waits_while_the_port_is_down(struct stage *stage)
{
	uint8_t byte;

	limit_sending(SIZE_MAX, RECORD_HEADER);
	POST(&stage->side, IBV_WR_SEND, .wr_id = 1, .length = 2000);
	CHECK(is_partial(stage));
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ERR));
	limit_sending(SIZE_MAX, SIZE_MAX);
	for (int i = 0; i < 1000; i++)
		soft_progress();
	CHECK_EQUAL(recv(stage->fd, payload, RECORD_HEADER, MSG_PEEK), RECORD_HEADER);
	CHECK_EQUAL(recv(stage->fd, payload, sizeof(payload), MSG_PEEK), RECORD_HEADER);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ACTIVE));
	expect_send_frame(stage, 0, 0, 2000);
	CHECK_EQUAL(recv(stage->fd, &byte, 1, MSG_DONTWAIT), -1);
}

/* Check that delayed frames are not sent while their device's port is down. The port of the other
 * device has no effect on them. */
static void delayed_frames_wait_while_their_port_is_down(struct stage *stage)
{
	uint8_t byte;

	CHECK_OK(aiordma_embedded_raise_on("embedded1", IBV_EVENT_PORT_ERR));
	begin_to_delay();
	for (uint32_t i = 0; i < 2; i++)
		POST(&stage->side, IBV_WR_SEND, .wr_id = i, .length = 8);
	expect_send_frame(stage, 0, 0, 8);
	CHECK_OK(aiordma_embedded_raise_on("embedded0", IBV_EVENT_PORT_ERR));
	soft_progress();
	CHECK(!LOCKED(soft_engine_has_delayed_output()));
	CHECK_EQUAL(recv(stage->fd, &byte, 1, MSG_DONTWAIT), -1);
	CHECK_OK(aiordma_embedded_raise_on("embedded1", IBV_EVENT_PORT_ACTIVE));
	CHECK_EQUAL(recv(stage->fd, &byte, 1, MSG_DONTWAIT), -1);
	CHECK_OK(aiordma_embedded_raise_on("embedded0", IBV_EVENT_PORT_ACTIVE));
	expect_send_frame(stage, 1, 0, 8);
	set_ticking(false);
	soft_announce_poll(-1);
}

static void forked_child_does_not_send_inherited_output(struct stage *stage)
{
	limit_sending(SIZE_MAX, RECORD_HEADER);
	POST(&stage->side, IBV_WR_SEND, .wr_id = 1, .length = 2000);
	CHECK(is_partial(stage));
	fflush(NULL);
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		limit_sending(SIZE_MAX, SIZE_MAX);
		destroy_qp(&stage->side);
		_exit(0);
	}
	expect_exit_success(child);
	limit_sending(SIZE_MAX, SIZE_MAX);
	expect_send_frame(stage, 0, 0, 2000);
	POST(&stage->side, IBV_WR_SEND, .wr_id = 2, .length = 8);
	expect_send_frame(stage, 1, 0, 8);
}

int main(void)
{
	limit_seconds(60);
	CHECK_OK(setenv("AIORDMA_EMBEDDED_DEVICES", "2", 1));
	STEP(each_byte_is_sent_once_across_partial_writes(7));
	STEP(each_byte_is_sent_once_across_partial_writes(SOFT_FRAME_HEADER - 1));
	STEP(each_byte_is_sent_once_across_partial_writes(SOFT_FRAME_HEADER));
	STEP(each_byte_is_sent_once_across_partial_writes(SOFT_FRAME_HEADER + 1));
	STEP(each_byte_is_sent_once_across_partial_writes(1000));
	STAGE(partly_sent_response_keeps_its_data_when_deregistered);
	STAGE(partly_sent_message_fails_when_the_peer_ends, .timeout = 1);
	STEP(two_frames_are_sent_with_one_call(false));
	STEP(two_frames_are_sent_with_one_call(true));
	STAGE(acknowledgement_after_responses_starts_a_new_record);
	STAGE(only_first_post_before_announced_poll_is_sent_at_once);
	STAGE(end_record_is_sent_before_the_stream_closes);
	STAGE(partly_sent_frame_waits_while_the_port_is_down);
	STAGE(delayed_frames_wait_while_their_port_is_down);
	STAGE(forked_child_does_not_send_inherited_output);
	for (int draining = 0; draining < 2; draining++) {
		STEP(request_fails_when_memory_of_its_rest_is_deregistered(true, draining));
		STEP(request_fails_when_memory_of_its_rest_is_deregistered(false, draining));
	}
	STAGE(stream_closes_if_rest_of_frame_cannot_be_allocated);
	STAGE(stream_sends_nothing_more_after_failed_allocation);
	STEP(message_restarts_after_rnr_nak_for_partly_sent_frame(false));
	STEP(message_restarts_after_rnr_nak_for_partly_sent_frame(true));
	return 0;
}
