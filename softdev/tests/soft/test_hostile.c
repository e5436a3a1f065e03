/* Test hostile peers of connected queue pairs. These peers guess keys, announce payload without
 * sending it, and never read responses. The cost to the device must be bounded. Wrong keys and
 * ranges are tested in test_errors, and malformed frames in test_link and by the fuzzers. */
#include <linux/sockios.h>
#include <sys/ioctl.h>

#include "adopted_side.h"
#include "extended_side.h"

enum { SECRET = 0x5a };

struct scene {
	struct side side;
	int fd; /* the peer's end of the stream */
	uint32_t psn;
};

static void open_scene(struct scene *scene, struct options options)
{
	open_side(&scene->side, options);
	memset(scene->side.memory, SECRET, scene->side.options.memory);
	scene->fd = adopt(&scene->side);
	scene->psn = PEER_PSN;
}

static void close_scene(struct scene *scene)
{
	close_records(scene->fd);
	close_side(&scene->side);
}

/* Send a request for the scene's memory from the peer. */
static void send_peer_request(struct scene *scene, uint8_t opcode, uint32_t rkey, uint32_t total)
{
	const bool read = opcode == SOFT_READ;

	send_stream_frame(scene->fd,
			  (struct soft_frame){.opcode = opcode,
					      .psn = scene->psn,
					      .address = (uintptr_t)scene->side.memory,
					      .rkey = rkey,
					      .dma_length = total,
					      .length = read ? 0 : total},
			  NULL);
	scene->psn = soft_psn_add(scene->psn,
				  soft_psn_count(soft_qp_of(scene->side.qp), read ? total : 0));
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Check that keys are unpredictable: they differ, do not count up, and have no constant bits. */
static void keys_are_random(struct side *side)
{
	enum { KEYS = 1000 };
	static uint32_t keys[KEYS];
	uint32_t ones = 0, zeros = 0;
	int rising = 0, same = 0;

	for (int i = 0; i < KEYS; i++) {
		struct ibv_mr *mr = verbs->ibv_reg_mr(side->pd, side->memory, 4096, ALL_RIGHTS);

		CHECK(mr);
		keys[i] = mr->rkey;
		ones |= mr->rkey;
		zeros |= ~mr->rkey;
		dereg(mr);
		for (int k = 0; k < i; k++)
			same += keys[k] == keys[i];
		rising += i && keys[i] > keys[i - 1];
	}
	CHECK_EQUAL(ones, 0xffffffff);
	CHECK_EQUAL(zeros, 0xffffffff);
	CHECK(same <= 1); /* about one run in 8,600 repeats a random key */
	CHECK(rising > KEYS / 4 && rising < KEYS - KEYS / 4);
}

/* ---- frames for another wire ------------------------------------------------------------------- */

/* Drive the device until it has read everything sent to it, or has closed the connection. */
static void wait_until_all_is_read(const struct scene *scene)
{
	int unread = 1;

	while (unread) {
		soft_progress();
		CHECK_OK(ioctl(scene->fd, SIOCOUTQ, &unread));
	}
}

/* Check that a frame with descriptors of its payload ends the connection if it arrives on a socket.
 * Descriptors are allowed only through shared memory, from a process on this host, and their frames
 * may be longer than a socket record. The device must not treat the bytes after the header as
 * payload, whether they arrive with the header or later. */
static void payload_descriptor_on_a_socket_ends_the_connection(void)
{
	static const uint32_t lengths[] = {8192, SOFT_FRAME_MAX + 1};
	static uint8_t bytes[RECORD_HEADER + SOFT_FRAME_HEADER + SOFT_CMA_FRAME_MAX];

	FOR_EACH (i, lengths)
		for (int way = 0; way < 4; way++) {
			bool apart = way & 1;
			struct scene scene;

			open_scene(&scene, (struct options){.memory = SOFT_CMA_FRAME_MAX});
			struct side *side = &scene.side;
			/* All chunks of a null region use the same memory. */
			struct ibv_mr *null = extended(side->context)->alloc_null_mr(side->pd);
			CHECK(null);
			struct ibv_sge sge = {
				.addr = way & 2 ? 0 : (uintptr_t)side->memory,
				.length = SOFT_CMA_FRAME_MAX,
				.lkey = way & 2 ? null->lkey : side->mr->lkey,
			};
			struct ibv_recv_wr *bad,
				receive = {.wr_id = 1, .sg_list = &sge, .num_sge = 1};
			const struct soft_frame frame = {
				.opcode = SOFT_SEND,
				.pieces = 1,
				.psn = PEER_PSN,
				.length = lengths[i],
			};
			size_t length = RECORD_HEADER + SOFT_FRAME_HEADER + lengths[i], at = 0;

			CHECK_OK(side->context->ops.post_recv(side->qp, &receive, &bad));
			record_header(bytes, SOFT_RECORD_DATA, SOFT_FRAME_HEADER + lengths[i],
				      STREAM_CHAN, 0);
			soft_frame_encode(bytes + RECORD_HEADER, &frame);
			while (at < length) {
				size_t part = apart && !at ? RECORD_HEADER + SOFT_FRAME_HEADER
							   : length - at;
				ssize_t n = send(scene.fd, bytes + at, part, MSG_NOSIGNAL);

				if (n < 0 && errno != EAGAIN)
					break;
				at += n > 0 ? (size_t)n : 0;
				wait_until_all_is_read(&scene);
			}
			expect_wc(side, 1, IBV_WC_WR_FLUSH_ERR);
			expect_event(side, IBV_EVENT_QP_FATAL);
			for (size_t k = 0; k < side->options.memory; k++)
				CHECK_EQUAL(side->memory[k], SECRET);
			dereg(null);
			close_scene(&scene);
		}
}

/* ---- what it costs --------------------------------------------------------------------------- */

/* Check that large READs whose responses the peer never reads do not block another queue pair.
 * Their responses are not buffered, and their number is limited to the negotiated depth. */
static void unread_read_responses_do_not_block_other_qps(void)
{
	enum { BIG = 8 << 20, DEPTH = 4 };
	struct scene scene;
	struct side a, b;

	open_scene(&scene, (struct options){.memory = BIG, .depth = DEPTH});
	for (int i = 0; i < DEPTH; i++)
		send_peer_request(&scene, SOFT_READ, scene.side.mr->rkey, BIG);
	for (int i = 0; i < 100; i++)
		soft_progress();
	expect_state(&scene.side, IBV_QPS_RTS);
	OPEN_PAIR(&a, &b);
	send_one_message(&a, &b);
	close_pair(&a, &b);

	/* One READ more than the negotiated depth is an error (IBTA 9.7.4.3.1). */
	send_peer_request(&scene, SOFT_READ, scene.side.mr->rkey, 8);
	expect_event(&scene.side, IBV_EVENT_QP_REQ_ERR);
	close_scene(&scene);
}

/* Check that the device copies only a limited number of bytes for READs (read_order.c). Short READs
 * wait behind a long one while WRITEs overwrite their bytes, so the device copies these bytes
 * first. It must not send the copies after the region has been deregistered. */
static void copies_for_delayed_reads_are_limited(void)
{
	enum { BIG = 8 << 20, SHORT = 32 * 1024, DEPTH = 4 };
	static uint8_t payload[SOFT_FRAME_MAX];
	struct scene scene;
	struct soft_frame frame;

	open_scene(&scene, (struct options){.memory = BIG, .depth = DEPTH});
	const struct soft_responder *responder = &soft_qp_of(scene.side.qp)->responder;
	struct ibv_mr *other = verbs->ibv_reg_mr(scene.side.pd, scene.side.memory, BIG, ALL_RIGHTS);

	CHECK(other);
	for (uint32_t i = 0; i < DEPTH; i++)
		send_peer_request(&scene, SOFT_READ, i ? other->rkey : scene.side.mr->rkey,
				  i ? SHORT : BIG);
	for (int i = 0; i < DEPTH; i++)
		send_peer_request(&scene, SOFT_WRITE, scene.side.mr->rkey, 8);
	for (bool written = false; !written;) {
		soft_progress();
		soft_lock();
		written = scene.side.memory[0] != SECRET;
		if (written)
			CHECK_EQUAL(responder->copied_bytes, 2 * SHORT);
		soft_unlock();
	}
	dereg(other);
	for (;;) {
		frame = receive_frame_header(scene.fd);
		if (frame.opcode != SOFT_READ_DATA)
			break;
		CHECK(frame.psn < PEER_PSN + BIG / 4096);
		CHECK(receive_record_bytes(scene.fd, payload, frame.length));
	}
	CHECK_EQUAL(frame.opcode, SOFT_NAK);
	CHECK_EQUAL(frame.syndrome, SOFT_NAK_REMOTE_ACCESS);
	close_scene(&scene);
}

/* Check that messages without a posted receive are not stored. Each one only causes an RNR NAK. */
static void message_without_receive_causes_rnr_nak(void)
{
	struct scene scene;

	open_scene(&scene, (struct options){.memory = 4096});
	for (int i = 0; i < 1000; i++) {
		scene.psn = PEER_PSN;
		send_peer_request(&scene, SOFT_SEND, 0, 8);
		CHECK_EQUAL(receive_frame_header(scene.fd).opcode, SOFT_RNR_NAK);
	}
	expect_state(&scene.side, IBV_QPS_RTS);
	close_scene(&scene);
}

int main(void)
{
	limit_seconds(100);
	SIDE(keys_are_random);
	STEP(payload_descriptor_on_a_socket_ends_the_connection());
	STEP(unread_read_responses_do_not_block_other_qps());
	STEP(copies_for_delayed_reads_are_limited());
	STEP(message_without_receive_causes_rnr_nak());
	return 0;
}
