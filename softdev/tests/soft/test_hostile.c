/* A peer that has a connection and means harm: keys that it guesses, was told once, or that are not
 * for it; ranges that wrap; answers that it never fetches.  What it may not do is refused and
 * changes nothing, and what it costs is bounded.  (Nonsense in frames: test_link, and the fuzzers.)
 */
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "link/link.h"
#include "extended_side.h"
#include "record_side.h"

#include "objects/objects.h"

enum { PEER_PSN = 100, SECRET = 0x5a };

struct scene {
	struct side side;
	int fd; /* of the peer */
	uint32_t psn;
};

static void open_scene(struct scene *scene, struct options options)
{
	const struct address peer = {.psn = PEER_PSN, .qpn = 77};
	int fds[2];

	open_side(&scene->side, options);
	memset(scene->side.memory, SECRET, scene->side.options.memory);
	bring_up(&scene->side, &peer);
	CHECK_OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds));
	soft_lock();
	CHECK_OK(soft_qp_adopt(soft_qp_of(scene->side.qp), fds[1], NULL, 0));
	soft_unlock();
	scene->fd = fds[0];
	scene->psn = PEER_PSN;
}

static void close_scene(struct scene *scene)
{
	close_records(scene->fd);
	close_side(&scene->side);
}

static void say(struct scene *scene, struct soft_frame frame)
{
	uint8_t bytes[SOFT_FRAME_HEADER + 64] = {0};

	frame.psn = scene->psn;
	scene->psn = soft_psn_add(scene->psn,
				  soft_psns(soft_qp_of(scene->side.qp),
					    frame.opcode == SOFT_READ ? frame.dma_length : 0));
	soft_frame_encode(bytes, &frame);
	CHECK(frame.length <= 64);
	say_bytes(scene->fd, bytes, SOFT_FRAME_HEADER + frame.length);
}

static struct soft_frame answer_of(const struct scene *scene)
{
	return hear_header(scene->fd);
}

/* At the scene's own memory. */
static struct soft_frame aimed(const struct scene *scene, uint8_t opcode, uint32_t rkey,
			       uint32_t total)
{
	return (struct soft_frame){.opcode = opcode,
				   .address = (uintptr_t)scene->side.memory,
				   .rkey = rkey,
				   .dma_length = total,
				   .length = opcode == SOFT_READ ? 0 : total};
}

/* Refused with that NAK; nothing of the memory has been told or changed, and the connection is
 * over: each attempt costs one. */
static void refused(struct scene *scene, struct soft_frame frame)
{
	struct soft_frame answer;

	say(scene, frame);
	answer = answer_of(scene);
	CHECK_EQUAL(answer.opcode, SOFT_NAK);
	CHECK_EQUAL(answer.syndrome, SOFT_NAK_REMOTE_ACCESS);
	CHECK_EQUAL(answer.length, 0);
	while (state_of(&scene->side) != IBV_QPS_ERR)
		soft_progress();
	for (size_t i = 0; i < scene->side.options.memory; i++)
		CHECK_EQUAL(scene->side.memory[i], SECRET);
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Every bit of a key is a part of it, and so are all of them for a region that is no more. */
static void guessed(void)
{
	for (int bit = 0; bit <= 32; bit++) {
		struct scene scene;

		open_scene(&scene, (struct options){.memory = 4096});
		uint32_t key = scene.side.mr->rkey;

		if (bit == 32) {
			dereg_own(&scene.side);
		} else {
			key ^= 1u << bit;
		}
		refused(&scene, aimed(&scene, bit & 1 ? SOFT_READ : SOFT_WRITE, key, 8));
		close_scene(&scene);
	}
}

/* One key says nothing about the next: all differ, in their upper bits and in their lower ones, and
 * do not count up. */
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
	CHECK(same <= 1); /* one of 8,600 runs draws a number twice */
	CHECK(rising > KEYS / 4 && rising < KEYS - KEYS / 4);
}

/* ---- ranges ---------------------------------------------------------------------------------- */

static void ranges_that_wrap(void)
{
	const struct {
		int64_t offset; /* from the region's start */
		uint64_t address; /* in its place, if not 0 */
		uint32_t total;
	} cases[] = {
		{.offset = -1, .total = 8},
		{.offset = 4089, .total = 8},
		{.offset = 4096, .total = 1},
		{.offset = 0, .total = 4097},
		{.offset = 1, .total = 4096},
		{.offset = 0, .total = SOFT_MAX_MESSAGE},
		{.address = UINT64_MAX, .total = 1},
		{.address = UINT64_MAX - 3, .total = 8},
		{.address = 1, .total = SOFT_MAX_MESSAGE},
		{.offset = -0x7fffffff, .total = SOFT_MAX_MESSAGE},
	};

	FOR_EACH (i, cases)
		for (int read = 0; read < 2; read++) {
			struct scene scene;

			open_scene(&scene, (struct options){.memory = 4096});
			struct soft_frame frame = aimed(&scene, read ? SOFT_READ : SOFT_WRITE,
							scene.side.mr->rkey, cases[i].total);

			frame.address = cases[i].address
						? cases[i].address
						: frame.address + (uint64_t)cases[i].offset;
			frame.length = read ? 0 : 1;
			refused(&scene, frame);
			close_scene(&scene);
		}
}

/* ---- frames for another wire ------------------------------------------------------------------- */

/* All that was said has been read, or the other end is closed. */
static void await_reading(const struct scene *scene)
{
	int unread = 1;

	while (unread) {
		soft_progress();
		CHECK_EQUAL(ioctl(scene->fd, SIOCOUTQ, &unread), 0);
	}
}

/* A frame that refers to its payload, which only a process of this host may send, and through
 * shared memory: it may be longer than what a socket carries.  Nothing of what follows is taken for
 * its payload, neither what comes with the header nor what comes after it was read. */
static void payload_elsewhere(void)
{
	static const uint32_t lengths[] = {8192, SOFT_FRAME_MAX + 1};
	static uint8_t bytes[RECORD_HEADER + SOFT_FRAME_HEADER + SOFT_CMA_FRAME_MAX];

	FOR_EACH (i, lengths)
		for (int way = 0; way < 4; way++) {
			bool apart = way & 1;
			struct scene scene;

			open_scene(&scene, (struct options){.memory = SOFT_CMA_FRAME_MAX});
			struct side *side = &scene.side;
			/* Chunks of a null region are all at the same place. */
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

			CHECK_EQUAL(side->context->ops.post_recv(side->qp, &receive, &bad), 0);
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
				await_reading(&scene);
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

/* READs of much, none of whose answers is fetched: no more than were agreed on, and no memory for
 * the answers.  Another queue pair does not wait for that one. */
static void unread_answers(void)
{
	enum { BIG = 8 << 20, DEPTH = 4 };
	struct scene scene;
	struct side a, b;

	open_scene(&scene, (struct options){.memory = BIG, .depth = DEPTH});
	for (int i = 0; i < DEPTH; i++)
		say(&scene, aimed(&scene, SOFT_READ, scene.side.mr->rkey, BIG));
	for (int i = 0; i < 100; i++)
		soft_progress();
	CHECK_EQUAL(state_of(&scene.side), IBV_QPS_RTS);
	open_pair(&a, &b, (struct options){0});
	one_message(&a, &b);
	close_pair(&a, &b);

	/* One more than was agreed on: IBTA 9.7.4.3.1. */
	say(&scene, aimed(&scene, SOFT_READ, scene.side.mr->rkey, 8));
	expect_event(&scene.side, IBV_EVENT_QP_REQ_ERR);
	close_scene(&scene);
}

/* Short READs that wait for the answer to a long one, and WRITEs over what they read: of their bytes
 * a bounded number is kept (read_order.c), and none is given away once the key has gone. */
static void kept_answers(void)
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
		say(&scene, aimed(&scene, SOFT_READ, i ? other->rkey : scene.side.mr->rkey,
				  i ? SHORT : BIG));
	for (int i = 0; i < DEPTH; i++)
		say(&scene, aimed(&scene, SOFT_WRITE, scene.side.mr->rkey, 8));
	for (bool written = false; !written;) {
		soft_progress();
		soft_lock();
		written = scene.side.memory[0] != SECRET;
		if (written)
			CHECK_EQUAL(responder->kept, 2 * SHORT);
		soft_unlock();
	}
	dereg(other);
	for (;;) {
		frame = answer_of(&scene);
		if (frame.opcode != SOFT_READ_DATA)
			break;
		CHECK(frame.psn < PEER_PSN + BIG / 4096);
		CHECK(hear_bytes(scene.fd, payload, frame.length));
	}
	CHECK_EQUAL(frame.opcode, SOFT_NAK);
	CHECK_EQUAL(frame.syndrome, SOFT_NAK_REMOTE_ACCESS);
	close_scene(&scene);
}

/* Messages for which there is no receive: a NAK each, nothing is kept. */
static void unreceived_messages(void)
{
	struct scene scene;

	open_scene(&scene, (struct options){.memory = 4096});
	for (int i = 0; i < 1000; i++) {
		scene.psn = PEER_PSN;
		say(&scene, (struct soft_frame){.opcode = SOFT_SEND, .length = 8});
		CHECK_EQUAL(answer_of(&scene).opcode, SOFT_RNR_NAK);
	}
	CHECK_EQUAL(state_of(&scene.side), IBV_QPS_RTS);
	close_scene(&scene);
}

int main(void)
{
	limit_seconds(100);
	STEP(guessed());
	SIDE(keys_are_random);
	STEP(ranges_that_wrap());
	STEP(payload_elsewhere());
	STEP(unread_answers());
	STEP(kept_answers());
	STEP(unreceived_messages());
	return 0;
}
