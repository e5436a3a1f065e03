/* Fuzz UD queue pairs with datagrams from any host that can reach the process's UDP port.
 *
 * Two queue pairs receive messages. One of them uses a shared receive queue. Only a message with
 * the right queue pair number, Q_Key and source address may fill a receive. No datagram is
 * answered, and the process's own queue pairs can still send to each other.
 */
#define _GNU_SOURCE /* memmem */
#include <arpa/inet.h>
#include <netinet/in.h>

#include "arena.h"

#include "ud/ud.h"
#include "objects/objects.h"

enum { VICTIMS = 2, QUEUE = 16, QKEY = 0x1234567, GRH = 40 };

static struct world {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	struct ibv_ah *ah;
	struct side victims[VICTIMS];
	int unknown; /* the fuzzer's UDP socket on 127.0.0.1 */
	uint32_t number; /* first QP number of that socket's port */
	struct sockaddr_in device;
	union ibv_gid own, other;
	uint64_t posted, right; /* posted receives and acceptable messages */
	uint64_t received;
	uint8_t corrupt_at, corrupt_by;
} world;

static void bring_up_ud(struct side *side)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};

	CHECK_OK(verbs->ibv_modify_qp(
		side->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	CHECK_OK(to_state(side, IBV_QPS_RTR));
	attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS};
	CHECK_OK(verbs->ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static void open_world(void)
{
	struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct ibv_ah_attr path = {.is_global = 1, .port_num = 1};

	world.own = (union ibv_gid){.raw = {[10] = 0xff, [11] = 0xff, [12] = 127, [15] = 1}};
	path.grh.dgid = world.own;
	world.context = open_device();
	CHECK(world.pd = verbs->ibv_alloc_pd(world.context));
	CHECK(world.cq = verbs->ibv_create_cq(world.context, 256, NULL, NULL, 0));
	CHECK(world.ah = verbs->ibv_create_ah(world.pd, &path));
	world.unknown = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	world.number = number_at(bind_device_port(world.unknown), 0);
	soft_lock();
	any.sin_port = htons(soft_ip_port());
	soft_unlock();
	world.device = any;
	world.other = (union ibv_gid){.raw = {[10] = 0xff, [11] = 0xff, [12] = 10, [15] = 9}};
}

static void open_scene(void)
{
	world.posted = world.right = world.received = 0;
	world.corrupt_by = 0;
	CHECK(world.mr = verbs->ibv_reg_mr(world.pd, area_at(AREA_LOCAL), areas[AREA_LOCAL].length,
					   IBV_ACCESS_LOCAL_WRITE));
	CHECK(world.srq = verbs->ibv_create_srq(
		      world.pd,
		      &(struct ibv_srq_init_attr){.attr = {.max_wr = QUEUE, .max_sge = 4}}));
	for (int i = 0; i < VICTIMS; i++) {
		world.victims[i] = (struct side){
			.options = {.ud = true, .sends = QUEUE, .receives = QUEUE},
			.context = world.context,
			.pd = world.pd,
			.cq = world.cq,
			.srq = i ? world.srq : NULL,
			.mr = world.mr,
			.memory = area_at(AREA_LOCAL),
		};
		world.victims[i].qp = create_qp(&world.victims[i]);
		bring_up_ud(&world.victims[i]);
	}
}

static void take_completions(void)
{
	struct ibv_wc wc[16];
	int n;

	while ((n = world.context->ops.poll_cq(world.cq, 16, wc)) > 0)
		for (int i = 0; i < n; i++) {
			if (wc[i].wr_id)
				continue; /* one of our own sends */
			world.received++;
			CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
			CHECK(wc[i].byte_len >= GRH && wc[i].byte_len <= 4 * 255);
		}
	CHECK_EQUAL(n, 0);
	/* Every received message must be acceptable, and must have filled a posted receive. */
	CHECK(world.received <= world.right);
	CHECK(world.received <= world.posted);
}

static void post_receive(struct side *side, const uint8_t *r)
{
	struct ibv_sge sges[4];
	struct ibv_recv_wr *bad, wr = {.sg_list = sges, .num_sge = r[1] & 3};

	for (int i = 0; i < wr.num_sge; i++)
		sges[i] = (struct ibv_sge){.addr = (uintptr_t)area_at(AREA_LOCAL) + r[2 + i] * 4u,
					   .length = r[6 + i],
					   .lkey = world.mr->lkey};
	world.posted += !(side->srq ? world.context->ops.post_srq_recv(side->srq, &wr, &bad)
				    : world.context->ops.post_recv(side->qp, &wr, &bad));
}

/* Check that the process's own queue pairs can still send to each other. */
static void expect_messages_pass(void)
{
	struct side *from = &world.victims[0], *to = &world.victims[1];
	static const uint8_t enough[RECORD] = {[1] = 1, [6] = 255};
	uint64_t before = world.received;
	struct ibv_sge sge = {
		.addr = (uintptr_t)area_at(AREA_LOCAL), .length = 8, .lkey = world.mr->lkey};
	struct ibv_send_wr *bad, wr = {
					 .wr_id = 1,
					 .sg_list = &sge,
					 .num_sge = 1,
					 .opcode = IBV_WR_SEND,
					 .wr.ud = {.ah = world.ah,
						   .remote_qpn = to->qp->qp_num,
						   .remote_qkey = QKEY},
				 };

	post_receive(to, enough);
	world.right++;
	CHECK_OK(world.context->ops.post_send(from->qp, &wr, &bad));
	fuzz_steps(1);
	take_completions();
	/* An earlier receive may be too short for the message. The message is then dropped, and the
	 * receive stays posted. */
	CHECK(world.received == before + 1 || world.posted > world.received);
}

static void close_scene(void)
{
	uint8_t byte;

	fuzz_steps(4);
	take_completions();
	expect_messages_pass();
	CHECK(recv(world.unknown, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
	for (int i = 0; i < VICTIMS; i++)
		CHECK_OK(verbs->ibv_destroy_qp(world.victims[i].qp));
	CHECK_OK(verbs->ibv_destroy_srq(world.srq));
	dereg(world.mr);
	while (world.context->ops.poll_cq(world.cq, 1, &(struct ibv_wc){0}) > 0)
		;
}

/* Send a datagram. Bytes of `r`: 1 receiver and error in the QP number, 2 error in the Q_Key, 3
 * flags, 4 unused, 5 hop limit, 6-7 traffic class, flow label and immediate data, 8 sender, 9
 * addresses and whether to truncate the datagram, 10-11 length, 12 payload, 13 length after
 * truncation. */
static void send_datagram(const uint8_t *r)
{
	static uint8_t bytes[SOFT_DATAGRAM_HEADER + SOFT_DATAGRAM_MAX + 4096];
	const struct side *to = &world.victims[r[1] & 1];
	size_t length = fuzz16(r + 10);
	bool wrong_number = r[1] & 0x80, wrong_key = r[2] != 0;
	struct soft_datagram datagram = {
		.dest_qpn = to->qp->qp_num ^ (wrong_number ? 1u << (r[1] >> 1 & 31) : 0),
		.src_qpn = world.number ^ r[8],
		.qkey = QKEY ^ (wrong_key ? 1u << (r[2] & 31) : 0),
		.flags = r[3],
		.hop_limit = r[5],
		.traffic_flow = (uint32_t)fuzz16(r + 6) << 12,
		.source = r[9] & 1 ? world.other : world.own,
		.destination = r[9] & 2 ? world.other : world.own,
		.immediate = fuzz16(r + 6),
	};

	if (r[9] & 4) {
		datagram.destination.raw[0] = 0xff; /* an IPv6 or IPv4 multicast GID */
		datagram.destination.raw[12] = 224;
	}
	length = length & 0x8000 ? length & 0xfff : length & 0xff;
	soft_datagram_encode(bytes, &datagram);
	memset(bytes + SOFT_DATAGRAM_HEADER, r[12], length);
	if (world.corrupt_by)
		bytes[world.corrupt_at % SOFT_DATAGRAM_HEADER] ^= world.corrupt_by;
	/* A corrupted datagram counts as acceptable, because the corruption may have made it
	 * valid. */
	world.right += world.corrupt_by || (!wrong_number && !wrong_key && !(r[9] & 3));
	world.corrupt_by = 0;
	length += SOFT_DATAGRAM_HEADER;
	if (r[9] & 0x80)
		length = r[13]; /* truncated */
	(void)!sendto(world.unknown, bytes, length, MSG_DONTWAIT, (struct sockaddr *)&world.device,
		      sizeof(world.device));
}

static void execute_record(const uint8_t *r)
{
	switch (r[0] & 7) {
	case 0:
	case 1:
	case 2:
		send_datagram(r);
		break;
	case 3:
		post_receive(&world.victims[0], r);
		break;
	case 4:
		post_receive(&world.victims[1], r);
		break;
	case 5:
		world.corrupt_at = r[1];
		world.corrupt_by = r[2];
		break;
	case 6:
		(void)!sendto(world.unknown, r + 2, r[1] % (RECORD - 1u), MSG_DONTWAIT,
			      (struct sockaddr *)&world.device, sizeof(world.device));
		break;
	case 7:
		take_completions();
		break;
	}
	if (!(r[0] & 8))
		fuzz_steps(1);
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
