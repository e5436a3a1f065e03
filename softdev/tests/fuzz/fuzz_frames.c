/* Fuzz the frame stream of real queue pairs. The peer of a connection may send anything.
 *
 * Six queue pairs in one protection domain are connected to the fuzzer: RC, RC with a shared
 * receive queue, UC, RC in RTR, and both sides of XRC. A seventh waits for a peer to open a stream
 * and identify itself with HELLO. Memory that is not shared must not be changed or disclosed. Every
 * work request must complete once and in order. Deregistered regions must not be accessed, and two
 * other queue pairs of the process must keep working.
 */
#define _GNU_SOURCE /* memmem */
#include "link/link_internal.h"
#include "arena.h"
#include "../soft/record_side.h"

#include "objects/objects.h"

enum {
	VICTIMS = 7,
	SHARING = 1,     /* the victim with a shared receive queue */
	UNRELIABLE = 2,
	RECEIVING = 3,
	XRC_TARGET = 4,
	XRC_SOURCE = 5,
	WAITING = 6,
	QUEUE = 16,
	PEER_PSN = 100,
	HEADERS = RECORD_HEADER + SOFT_FRAME_HEADER,
};

struct victim {
	struct side side;
	int fd; /* the fuzzer's end; -1 if closed */
	struct {
		uint64_t posted, completed;
	} queues[2]; /* receives, sends */
	uint32_t lengths[2 * QUEUE]; /* receive lengths, indexed by the sequence number in wr_id */
};

static struct world {
	struct ibv_context *context;
	struct ibv_pd *pd, *foreign;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_xrcd *xrcd;
	struct ibv_srq *xrc_srq;
	uint32_t xrc_srqn;
	struct ibv_mr *mrs[AREAS];
	struct ibv_mr *null;
	uint32_t rkeys[AREAS];
	struct ibv_mw *windows[2]; /* windows for READ and WRITE, bound by the first victim */
	struct side friends[2];
	struct victim victims[VICTIMS];
	struct victim *current;
	uint8_t corrupt_at, corrupt_by; /* position and XOR mask for the next frame's headers */
	size_t piece; /* bytes per send; 0 means all at once */
} world;

/* ---- the scene ------------------------------------------------------------------------------- */

static void adopt(struct side *side, int fd)
{
	soft_lock();
	CHECK_OK(soft_qp_adopt(soft_qp_of(side->qp), fd, NULL, 0));
	soft_unlock();
}

static void socket_pair(int fds[2])
{
	CHECK_OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds));
}

/* Address of the fuzzer. Without a GID, to_rtr() uses the GID of this host. */
static const struct address elsewhere = {.psn = PEER_PSN, .qpn = 77};

static struct verbs_context *extended(void)
{
	return (struct verbs_context *)((char *)world.context -
					offsetof(struct verbs_context, context));
}

/* Create empty shared receive queues. */
static void open_shared_queues(void)
{
	struct ibv_srq_init_attr shared = {.attr = {.max_wr = QUEUE, .max_sge = 4}};
	struct ibv_srq_init_attr_ex xrc = {
		.attr = shared.attr,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
			     IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
		.srq_type = IBV_SRQT_XRC,
		.pd = world.pd,
		.xrcd = world.xrcd,
		.cq = world.cq,
	};

	CHECK(world.srq = verbs->ibv_create_srq(world.pd, &shared));
	CHECK(world.xrc_srq = extended()->create_srq_ex(world.context, &xrc));
	CHECK_OK(extended()->get_srq_num(world.xrc_srq, &world.xrc_srqn));
}

static struct ibv_qp *create_victim(int i, struct side *side)
{
	struct ibv_qp_init_attr source = {
		.send_cq = world.cq,
		.cap = {.max_send_wr = QUEUE, .max_send_sge = 4, .max_inline_data = 256},
		.qp_type = IBV_QPT_XRC_SEND,
		.sq_sig_all = 1,
	};
	struct ibv_qp_init_attr_ex target = {
		.qp_type = IBV_QPT_XRC_RECV,
		.comp_mask = IBV_QP_INIT_ATTR_XRCD,
		.xrcd = world.xrcd,
	};

	switch (i) {
	case XRC_TARGET:
		return extended()->create_qp_ex(world.context, &target);
	case XRC_SOURCE:
		return verbs->ibv_create_qp(world.pd, &source);
	default:
		return create_qp(side);
	}
}

static void open_world(void)
{
	struct ibv_xrcd_init_attr domain = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
		.fd = -1,
		.oflags = O_CREAT,
	};
	int fds[2];

	world.context = open_device();
	CHECK(world.pd = verbs->ibv_alloc_pd(world.context));
	CHECK(world.foreign = verbs->ibv_alloc_pd(world.context));
	CHECK(world.cq = verbs->ibv_create_cq(world.context, 1024, NULL, NULL, 0));
	CHECK(world.xrcd = extended()->open_xrcd(world.context, &domain));
	CHECK(world.null = extended()->alloc_null_mr(world.pd));
	open_shared_queues();
	socket_pair(fds);
	for (int i = 0; i < 2; i++)
		OPEN(&world.friends[i], .memory = 4096);
	for (int i = 0; i < 2; i++) {
		bring_up(&world.friends[i], &(struct address){.psn = world.friends[1 - i].psn});
		adopt(&world.friends[i], fds[i]);
	}
}

static void meet_victim(int i)
{
	struct victim *victim = &world.victims[i];
	struct side *side = &victim->side;
	const int room = 2 * SOFT_FRAME_MAX; /* one read can return a long frame */
	int fds[2];

	world.current = victim;
	if (side->qp)
		return;
	*side = (struct side){
		.options = {.sends = QUEUE,
			    .receives = QUEUE,
			    .rights = ALL_RIGHTS | IBV_ACCESS_FLUSH_GLOBAL,
			    .uc = i == UNRELIABLE},
		.context = world.context,
		.pd = world.pd,
		.cq = world.cq,
		.srq = i == SHARING      ? world.srq
		       : i == XRC_TARGET ? world.xrc_srq
					 : NULL,
		.memory = area_at(AREA_OPEN),
		.mr = world.mrs[AREA_OPEN],
		.psn = 0xfffffe, /* wraps around soon */
	};
	CHECK(side->qp = create_victim(i, side));
	CHECK_OK(to_init(side));
	CHECK_OK(to_rtr(side, &elsewhere));
	if (i != RECEIVING)
		CHECK_OK(to_rts(side));
	socket_pair(fds);
	CHECK_OK(setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)));
	victim->fd = fds[0];
	if (i != WAITING) {
		adopt(side, fds[1]);
		return;
	}
	soft_lock();
	soft_tcp_path_accepted(fds[1], &(struct sockaddr_storage){.ss_family = AF_INET});
	soft_unlock();
}

static void bind_window(int i, size_t start, unsigned access)
{
	struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_BIND_MW, .wr_id = 1 | (uint64_t)i << 1};
	struct victim *first = &world.victims[0];

	CHECK(world.windows[i] = world.context->ops.alloc_mw(world.pd, IBV_MW_TYPE_2));
	wr.bind_mw.mw = world.windows[i];
	wr.bind_mw.rkey = world.windows[i]->rkey ^ 1;
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
		.mr = world.mrs[AREA_WINDOWED],
		.addr = (uintptr_t)area_at(AREA_WINDOWED) + start,
		.length = WINDOW_SIZE,
		.mw_access_flags = access,
	};
	CHECK_OK(world.context->ops.post_send(first->side.qp, &wr, &bad));
	first->queues[1].posted++;
	world.windows[i]->rkey = wr.bind_mw.rkey;
}

static void share(enum area_name name)
{
	world.mrs[name] =
		verbs->ibv_reg_mr(name == AREA_FOREIGN ? world.foreign : world.pd, area_at(name),
				  areas[name].length, (int)areas[name].rights);
	CHECK(world.mrs[name]);
	world.rkeys[name] = world.mrs[name]->rkey;
}

static void take_back(enum area_name name)
{
	if (world.mrs[name])
		dereg(world.mrs[name]);
	world.mrs[name] = NULL;
	if (name == AREA_OPEN)
		arena_close_open();
}

static void open_scene(void)
{
	world.corrupt_by = 0;
	world.piece = 0;
	for (int i = 0; i < AREAS; i++)
		share((enum area_name)i);
	take_back(AREA_STALE);
	meet_victim(0);
	bind_window(0, WINDOW_READ, IBV_ACCESS_REMOTE_READ);
	bind_window(1, WINDOW_WRITE, IBV_ACCESS_REMOTE_WRITE);
}

/* ---- what must hold -------------------------------------------------------------------------- */

/* Assign a new wr_id. It encodes the victim, the queue and the number of earlier requests. */
static uint64_t next_id(struct victim *victim, int queue)
{
	return victim->queues[queue].posted++ << 1 | (unsigned)queue |
	       (uint64_t)(victim - world.victims) << 32;
}

static void take_completions(void)
{
	struct ibv_wc wc[16];
	int n;

	while ((n = world.context->ops.poll_cq(world.cq, 16, wc)) > 0)
		for (int i = 0; i < n; i++) {
			struct victim *victim = &world.victims[wc[i].wr_id >> 32];
			int queue = wc[i].wr_id & 1;

			CHECK_EQUAL((uint32_t)wc[i].wr_id >> 1, victim->queues[queue].completed);
			CHECK(victim->queues[queue].completed++ < victim->queues[queue].posted);
			CHECK_EQUAL(wc[i].qp_num, victim->side.qp->qp_num);
			if (!queue && wc[i].status == IBV_WC_SUCCESS && wc[i].opcode == IBV_WC_RECV)
				CHECK(wc[i].byte_len <=
				      victim->lengths[((uint32_t)wc[i].wr_id >> 1) % (2 * QUEUE)]);
		}
	CHECK_EQUAL(n, 0);
}

static void expect_friends_work(void)
{
	struct side *a = &world.friends[0], *b = &world.friends[1];

	a->memory[0]++;
	post_receive_at(b, 1, 8, 8);
	CHECK_OK(post(a, (struct request){.opcode = IBV_WR_SEND, .wr_id = 2, .length = 8}));
	CHECK_OK(post(a, (struct request){.opcode = IBV_WR_RDMA_READ,
					  .wr_id = 3,
					  .length = 8,
					  .offset = 16,
					  .remote = (uintptr_t)b->memory + 8,
					  .rkey = b->mr->rkey}));
	expect_wc(b, 1, IBV_WC_SUCCESS);
	expect_wc(a, 2, IBV_WC_SUCCESS);
	expect_wc(a, 3, IBV_WC_SUCCESS);
	CHECK_EQUAL(a->memory[16], a->memory[0]);
}

static void close_connection(struct victim *victim)
{
	if (victim->fd >= 0)
		close(victim->fd);
	victim->fd = -1;
}

static void close_scene(void)
{
	fuzz_steps(8);
	for (int i = 0; i < VICTIMS; i++) {
		struct victim *victim = &world.victims[i];

		if (!victim->side.qp)
			continue;
		if (victim->fd >= 0)
			arena_drain(victim->fd, SIZE_MAX);
		CHECK_OK(to_state(&victim->side, IBV_QPS_ERR));
		fuzz_steps(2);
		take_completions();
		CHECK_EQUAL(victim->queues[1].completed, victim->queues[1].posted);
		if (!victim->side.srq)
			CHECK_EQUAL(victim->queues[0].completed, victim->queues[0].posted);
		if (victim->fd >= 0)
			arena_drain(victim->fd, SIZE_MAX);
		close_connection(victim);
		CHECK_OK(verbs->ibv_destroy_qp(victim->side.qp));
	}
	memset(world.victims, 0, sizeof(world.victims));
	CHECK_OK(verbs->ibv_destroy_srq(world.srq));
	CHECK_OK(verbs->ibv_destroy_srq(world.xrc_srq));
	open_shared_queues();
	for (int i = 0; i < 2; i++)
		CHECK_OK(world.context->ops.dealloc_mw(world.windows[i]));
	for (int i = 0; i < AREAS; i++)
		take_back((enum area_name)i);
	fuzz_pass_time(UINT64_C(3000000000)); /* until lingering links have ended */
	fuzz_steps(4);
	expect_friends_work();
}

/* ---- what happens ---------------------------------------------------------------------------- */

static void send_from_unknown(const void *bytes, size_t length)
{
	struct victim *victim = world.current;
	const uint8_t *at = bytes;

	while (length && victim->fd >= 0) {
		size_t part = world.piece && world.piece < length ? world.piece : length;
		ssize_t n = send(victim->fd, at, part, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n < 0 && errno != EAGAIN)
			return;
		if (n < 0) {
			uint8_t byte;

			/* Drain the device's output, because the device stops reading while its
			 * output is blocked. */
			if (!arena_drain(victim->fd, 65536) ||
			    recv(victim->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
				return;
			soft_progress();
			continue;
		}
		at += n;
		length -= (size_t)n;
		if (world.piece)
			soft_progress();
	}
}

static uint32_t key_of(uint8_t selector)
{
	uint32_t key;

	switch (selector & 15) {
	case AREAS:
	case AREAS + 1:
		key = world.windows[(selector & 15) - AREAS]->rkey;
		break;
	default:
		key = (selector & 15) < AREAS ? world.rkeys[selector & 15] : selector;
	}
	return selector & 0x80 ? key ^ 1u << (selector >> 4 & 7) : key;
}

/* Derive an address from a record, usually near the boundary of an area, where bugs are likely. */
static uint64_t address_of_record(const uint8_t *at)
{
	static const uint64_t edges[] = {0, UINT64_MAX, UINT64_MAX - 7, INT64_MAX};
	unsigned area = at[0] & 15;
	uint64_t offset = (uint64_t)(int64_t)(at[2] & 1 ? (int16_t)fuzz16(at + 1) : (int8_t)at[1]);
	bool window = area == AREAS || area == AREAS + 1;

	if (area == AREAS + 4)
		return edges[at[0] >> 4 & 3] + offset;
	if (at[0] & 0x80)
		offset += window ? (size_t)WINDOW_SIZE : areas[area % AREAS].length;
	if (window)
		return (uintptr_t)area_at(AREA_WINDOWED) + offset +
		       (area == AREAS ? WINDOW_READ : WINDOW_WRITE);
	return (uintptr_t)area_at((enum area_name)(area % AREAS)) + offset;
}

static const uint8_t opcodes[] = {
	SOFT_SEND,        SOFT_WRITE,
	SOFT_READ,        SOFT_COMPARE_SWAP,
	SOFT_FETCH_ADD,   SOFT_ATOMIC_WRITE,
	SOFT_ACK,         SOFT_NAK,
	SOFT_RNR_NAK,     SOFT_READ_DATA,
	SOFT_ATOMIC_DATA, SOFT_DISCONNECT,
	SOFT_LOSES,       0,
	SOFT_FLUSH,
};

/* Send a frame. Bytes of `r`: 1 opcode, 2 flags, 3 error in the PSN, 4-5 length, 6 position in the
 * message, 7 length of the rest of the message, 8 key, 9-11 address, 12 error in the acknowledged
 * PSN, 13 syndrome, 14 first payload byte, 15 whether to send the header separately and whether to
 * claim that a descriptor replaces the payload. */
static void send_frame(const uint8_t *r)
{
	static uint8_t bytes[HEADERS + SOFT_FRAME_MAX + 4096];
	struct victim *victim = world.current;
	const struct soft_qp *qp = soft_qp_of(victim->side.qp);
	uint32_t length = fuzz16(r + 4);
	const uint32_t unit = 4096;
	bool answer;

	length = length & 0x8000 ? (length & 0x7fff) * 9 : length & 0x1fff;
	if (length > sizeof(bytes) - HEADERS)
		length = sizeof(bytes) - HEADERS;
	struct soft_frame frame = {
		.opcode = opcodes[r[1] % sizeof(opcodes)],
		.flags = r[2],
		.syndrome = r[13],
		.length = length,
		.address = address_of_record(r + 9),
		.rkey = key_of(r[8]),
		.immediate = fuzz16(r + 2),
		.dma_length = length,
		.ack = soft_psn_add(qp->sq.unacked, (uint32_t)(int8_t)r[12]),
	};

	answer = frame.opcode >= SOFT_ACK;
	if (!answer && frame.opcode != SOFT_FLUSH && frame.syndrome > IBV_MTU_4096)
		frame.syndrome = 0; /* most frames announce no path MTU */
	if (victim == &world.victims[XRC_TARGET] && !answer) { /* usually valid */
		frame.flags ^= SOFT_FRAME_SRQ;
		if (!(frame.flags & SOFT_FRAME_ACK))
			frame.ack = soft_psn_add(world.xrc_srqn, (uint32_t)(int8_t)r[12]);
	}
	frame.psn = soft_psn_add(answer ? qp->sq.unacked : qp->responder.expected_psn,
				 (uint32_t)(int8_t)r[3]);
	switch (r[6] & 7) {
	case 1: /* first frame of a message */
	case 2: /* middle frame of a message */
		frame.length = (length + unit) / unit * unit;
		frame.dma_length = frame.length + r[7] * 64u;
		frame.flags =
			(uint8_t)((r[2] & ~(SOFT_FRAME_IMMEDIATE | SOFT_FRAME_INVALIDATE |
					    SOFT_FRAME_CONTINUES)) |
				  SOFT_FRAME_MORE | ((r[6] & 7) == 2 ? SOFT_FRAME_CONTINUES : 0));
		break;
	case 3: /* last frame of a message, or any frame */
		frame.flags ^= SOFT_FRAME_CONTINUES;
		break;
	case 4: /* request with a long response, or a flush */
		frame.length = 0;
		break;
	case 5:
		frame.dma_length = UINT32_MAX - r[7];
		break;
	case 6: /* length of an atomic */
		frame.length = 8u << (r[7] & 1);
		break;
	}
	frame.pieces = (r[15] & 0xe) == 0xe; /* not allowed on a socket */
	soft_frame_encode(bytes + RECORD_HEADER, &frame);
	length = frame.length <= SOFT_FRAME_MAX ? frame.length : length;
	for (uint32_t i = 0; i < length; i++)
		bytes[HEADERS + i] = (uint8_t)(r[14] + i);
	if (frame.length > length)
		frame.length = length;
	record_header(bytes, SOFT_RECORD_DATA, SOFT_FRAME_HEADER + frame.length, STREAM_CHAN, 0);
	if (world.corrupt_by)
		bytes[world.corrupt_at % HEADERS] ^= world.corrupt_by;
	world.corrupt_by = 0;
	if (r[15] & 1) {
		send_from_unknown(bytes, HEADERS);
		fuzz_steps(2); /* the next read begins with the payload */
		send_from_unknown(bytes + HEADERS, frame.length);
		return;
	}
	send_from_unknown(bytes, HEADERS + frame.length);
}

/* Send a control record or a handshake. Bytes of `r`: 1 record kind, 2 destination channel, 3
 * source channel, 4 wrong fields of HELLO, 5 whether the record header or the handshake is
 * missing. */
static void send_control_record(const uint8_t *r)
{
	uint8_t bytes[RECORD_HEADER + SOFT_HANDSHAKE_SIZE];
	const struct soft_qp *qp = soft_qp_of(world.current->side.qp);
	struct soft_hello hello = {
		.kind = r[4] & 1   ? SOFT_HELLO
			: r[5] & 1 ? SOFT_HELLO_STREAM
				   : r[4] >> 6,
		.from = elsewhere.qpn + (r[4] >> 1 & 1),
		.to = qp->ibv.qp_num ^ (r[4] >> 2 & 1),
		.receive_psn = qp->attr.sq_psn ^ (r[4] >> 3 & 1),
		.send_psn = PEER_PSN ^ (r[4] >> 4 & 1),
		.flags = SOFT_HELLO_SENDS,
		.mtu = qp->attr.path_mtu ^ (r[4] >> 5 & 1),
	};
	uint32_t length = r[5] & 2 ? 0 : SOFT_HANDSHAKE_SIZE;

	record_header(bytes, r[1] % (SOFT_RECORD_END + 2), length, r[2] & 3, r[3]);
	soft_hello_encode(bytes + RECORD_HEADER, &hello);
	if (world.corrupt_by)
		bytes[world.corrupt_at % sizeof(bytes)] ^= world.corrupt_by;
	world.corrupt_by = 0;
	if (r[5] & 1)
		send_from_unknown(bytes + RECORD_HEADER, SOFT_HANDSHAKE_SIZE);
	else
		send_from_unknown(bytes, RECORD_HEADER + length);
}

static void post_receive(const uint8_t *r)
{
	struct victim *victim = world.current;
	struct ibv_sge sges[4];
	struct ibv_recv_wr *bad, wr = {.sg_list = sges, .num_sge = r[1] & 3};
	struct ibv_context *context = world.context;
	uint32_t *length = &victim->lengths[victim->queues[0].posted % (2 * QUEUE)];

	*length = 0;
	for (int i = 0; i < wr.num_sge; i++) {
		bool open = r[2] >> i & 1;

		sges[i] = (struct ibv_sge){
			.addr = (uintptr_t)area_at(open ? AREA_OPEN : AREA_LOCAL) + r[3 + i] * 4u,
			.length = open ? fuzz16(r + 8) : r[8 + i],
			/* A receive may also use an invalid key. */
			.lkey = r[12] & 1 ? world.rkeys[AREA_STALE]
				: open    ? world.rkeys[AREA_OPEN]
					  : world.rkeys[AREA_LOCAL],
		};
		/* A receive may also use the null region, with a length that exceeds the size of
		 * every other region. */
		if ((r[12] & 0xe) == 0xe)
			sges[i] = (struct ibv_sge){.length = fuzz16(r + 8) * 16u,
						   .lkey = world.null->lkey};
		*length += sges[i].length;
	}
	wr.wr_id = next_id(victim, 0);
	if (victim->side.srq ? context->ops.post_srq_recv(victim->side.srq, &wr, &bad)
			     : context->ops.post_recv(victim->side.qp, &wr, &bad))
		victim->queues[0].posted--;
}

static const enum ibv_wr_opcode work[] = {
	IBV_WR_SEND,
	IBV_WR_SEND_WITH_IMM,
	IBV_WR_RDMA_WRITE,
	IBV_WR_RDMA_WRITE_WITH_IMM,
	IBV_WR_RDMA_READ,
	IBV_WR_ATOMIC_CMP_AND_SWP,
	IBV_WR_ATOMIC_FETCH_AND_ADD,
	IBV_WR_ATOMIC_WRITE,
	IBV_WR_SEND_WITH_INV,
	IBV_WR_LOCAL_INV,
};

/* Post a request on the victim's queue pair. The fuzzer may respond to it. */
static void post_request(const uint8_t *r)
{
	struct victim *victim = world.current;
	enum ibv_wr_opcode opcode = work[r[1] % (sizeof(work) / sizeof(work[0]))];
	uint32_t length = fuzz16(r + 2);
	struct ibv_sge sges[2];
	struct ibv_send_wr *bad, wr = {
					 .sg_list = sges,
					 .num_sge = 1 + (r[4] & 1),
					 .opcode = opcode,
					 .send_flags = r[5] & (IBV_SEND_FENCE | IBV_SEND_SOLICITED |
							       IBV_SEND_INLINE),
				 };

	length = length & 0x8000 ? (length & 0x7fff) * 9 : length & 0xfff;
	if (length > OPEN_SIZE / 2)
		length = OPEN_SIZE / 2;
	if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ||
	    opcode == IBV_WR_ATOMIC_WRITE)
		length = 8u / (unsigned)wr.num_sge;
	for (int i = 0; i < wr.num_sge; i++)
		sges[i] = (struct ibv_sge){
			.addr = (uintptr_t)area_at(AREA_OPEN) + (unsigned)i * (OPEN_SIZE / 2),
			.length = length,
			.lkey = world.rkeys[AREA_OPEN],
		};
	if (opcode == IBV_WR_SEND_WITH_INV || opcode == IBV_WR_LOCAL_INV)
		wr.invalidate_rkey = key_of(r[6]);
	else
		wr.wr.rdma.rkey = r[6];
	wr.qp_type.xrc.remote_srqn = r[6];
	wr.wr_id = next_id(victim, 1);
	if (world.context->ops.post_send(victim->side.qp, &wr, &bad))
		victim->queues[1].posted--;
}

static void change_state(const uint8_t *r)
{
	static const enum ibv_qp_state states[] = {IBV_QPS_ERR, IBV_QPS_SQD, IBV_QPS_RTS};
	enum ibv_qp_state to = states[r[1] % 3];
	struct side *side = &world.current->side;

	/* The device may reject the transition. */
	if (to == IBV_QPS_RTS && state_of(side) == IBV_QPS_RTR)
		(void)to_rts(side);
	else
		(void)to_state(side, to);
}

static void execute_record(const uint8_t *r)
{
	struct victim *victim = world.current;

	switch (r[0] & 15) {
	case 0:
	case 1:
	case 2:
	case 3:
		send_frame(r);
		break;
	case 4:
		if (r[0] & 0x20)
			send_control_record(r);
		else
			send_from_unknown(r + 2, r[1] % (RECORD - 1u));
		break;
	case 5:
		world.corrupt_at = r[1];
		world.corrupt_by = r[2];
		break;
	case 6:
		world.piece = r[1];
		break;
	case 7:
		post_receive(r);
		break;
	case 8:
		post_request(r);
		break;
	case 9:
		meet_victim(r[1] % VICTIMS);
		break;
	case 10:
		if (victim->fd >= 0)
			arena_drain(victim->fd, fuzz16(r + 1) * 16u);
		break;
	case 11:
		fuzz_pass_time((uint64_t)fuzz16(r + 1) * 100000u);
		break;
	case 12:
		change_state(r);
		break;
	case 13: /* deregister AREA_OPEN, or register it again */
		if (world.mrs[AREA_OPEN])
			take_back(AREA_OPEN);
		else
			arena_check_unharmed(), arena.open_gone = false, share(AREA_OPEN);
		break;
	case 14:
		close_connection(victim);
		break;
	case 15:
		take_completions();
		break;
	}
	if (!(r[0] & 0x10))
		fuzz_steps(2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	arena_prepare(fuzz_seed(data, size));
	if (!world.context)
		open_world();
	open_scene();
	for (size_t at = 0; at + RECORD <= size; at += RECORD)
		execute_record(data + at);
	close_scene();
	arena_check_unharmed();
	return 0;
}
