/* Unreliable datagrams (IBTA vol 1, 9.8.3) and address handles. */
#include "ud_side.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "objects.h"

/* The path from one side to the other, by the GIDs that both use. */
static struct ibv_ah *path_to(struct side *side, const struct side *to)
{
	const struct address address = address_of_side(to);

	return ud_path(side, &address, side->options.gid ? side->options.gid - 1 : 0);
}

static void open_two(struct side *a, struct side *b)
{
	ud_open(a, (struct options){0});
	ud_open(b, (struct options){0});
}

static struct ibv_wc poll_one(struct side *side)
{
	struct ibv_wc wc;

	CHECK_EQUAL(poll_cq(side, 1, &wc), 1); /* within a process it is there at once */
	return wc;
}

static void nothing(struct side *side)
{
	struct ibv_wc wc;

	CHECK_EQUAL(poll_cq(side, 1, &wc), 0);
}

/* The index of a GID that this host has, or -1. */
static int index_of(struct ibv_context *context, const char *ip)
{
	union ibv_gid wanted = {.raw = {[10] = 0xff, [11] = 0xff}}, gid;

	if (strchr(ip, ':'))
		CHECK_EQUAL(inet_pton(AF_INET6, ip, wanted.raw), 1);
	else
		CHECK_EQUAL(inet_pton(AF_INET, ip, &wanted.raw[12]), 1);
	for (int i = 0; verbs->ibv_query_gid(context, 1, i, &gid) == 0; i++)
		if (!memcmp(&gid, &wanted, sizeof(gid)))
			return i;
	return -1;
}

/* ---- messages ------------------------------------------------------------------------------ */

static void check_grh(const uint8_t *grh, const struct address *from, const struct address *to,
		      uint32_t length)
{
	static const uint8_t nothing[20];

	if (from->gid.raw[10] == 0xff) {
		uint32_t sum = 0;

		CHECK(!memcmp(grh, nothing, 20));
		CHECK_EQUAL(grh[20], 0x45);
		CHECK_EQUAL(grh[21], 33);
		/* IPv4, UDP, BTH, DETH with immediate data, payload, ICRC. */
		CHECK_EQUAL(grh[22] << 8 | grh[23], 20 + 8 + 12 + 8 + 4 + ((length + 3) & ~3u) + 4);
		CHECK_EQUAL(grh[28], 17);
		CHECK_EQUAL(grh[29], IPPROTO_UDP);
		CHECK(!memcmp(grh + 32, &from->gid.raw[12], 4));
		CHECK(!memcmp(grh + 36, &to->gid.raw[12], 4));
		for (int i = 20; i < 40; i += 2)
			sum += (uint32_t)(grh[i] << 8 | grh[i + 1]);
		CHECK_EQUAL((sum & 0xffff) + (sum >> 16), 0xffff);
	} else {
		CHECK_EQUAL(ntohl(*(const uint32_t *)(const void *)grh), 6u << 28 | 33 << 20 | 0x54321);
		CHECK_EQUAL(grh[4] << 8 | grh[5], 8 + 12 + 8 + 4 + ((length + 3) & ~3u) + 4);
		CHECK_EQUAL(grh[6], IPPROTO_UDP);
		CHECK_EQUAL(grh[7], 17);
		CHECK(!memcmp(grh + 8, &from->gid, 16));
		CHECK(!memcmp(grh + 24, &to->gid, 16));
	}
}

/* Two processes in turns. The child answers to where the message came from. */
static void between_processes(const char *ip)
{
	enum { ROUNDS = 100 };
	struct process process = split();
	struct side side;
	struct ibv_context *context = open_device();
	int index = ip ? index_of(context, ip) : 0;

	limit_seconds(60);
	CHECK_EQUAL(verbs->ibv_close_device(context), 0);
	CHECK(index >= 0);
	ud_open(&side, (struct options){.gid = index + 1});
	struct address own = address_of_side(&side), peer = exchange(&process, &side);
	struct ibv_ah *ah = process.child ? ud_path(&side, &peer, ip ? index : -1) : NULL;

	CHECK_EQUAL(post_recv_at(&side, 1, 8192, GRH + MTU), 0);
	meet(&process);
	for (unsigned round = 0; round < ROUNDS; round++) {
		uint32_t length = round == 0 ? 0 : round == 2 ? MTU : (round * 7919u) % (MTU + 1);

		if ((round & 1) == (process.child == 0)) {
			fill(side.memory, length, round);
			CHECK_EQUAL(ud_post(&side, (struct ud_request){
							   .ah = ah, .qpn = peer.qpn, .qkey = QKEY,
							   .wr_id = 2, .length = length,
							   .with_imm = true, .imm = round}), 0);
			CHECK_EQUAL(expect_wc(&side, 2, IBV_WC_SUCCESS).opcode, IBV_WC_SEND);
			continue;
		}
		struct ibv_wc wc = expect_wc(&side, 1, IBV_WC_SUCCESS);

		CHECK_EQUAL(wc.opcode, IBV_WC_RECV);
		CHECK_EQUAL(wc.wc_flags, IBV_WC_GRH | IBV_WC_WITH_IMM);
		CHECK_EQUAL(wc.imm_data, round);
		CHECK_EQUAL(wc.byte_len, GRH + length);
		CHECK_EQUAL(wc.src_qp, peer.qpn);
		CHECK_EQUAL(wc.slid, peer.lid);
		CHECK(filled(side.memory + 8192 + GRH, length, round));
		if (ip)
			check_grh(side.memory + 8192, &peer, &own, length);
		if (!ah)
			CHECK(ah = verbs->ibv_create_ah_from_wc(side.pd, &wc,
								(void *)(side.memory + 8192), 1));
		CHECK_EQUAL(post_recv_at(&side, 1, 8192, GRH + MTU), 0);
	}
	meet(&process);
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	close_side(&side);
	join(&process);
}

/* Many of the longest at once, as many as every system's limit of a socket's buffer (rmem_max) has
 * room for: UDP may lose them, but not needlessly. */
static void burst(void)
{
	enum { MANY = 32, ROUNDS = 10 };
	struct process process = split();
	struct side side;

	limit_seconds(60);
	ud_open(&side, (struct options){.sends = MANY, .receives = MANY, .cqe = MANY,
					.memory = MANY * 8192});
	struct address peer = exchange(&process, &side);
	struct ibv_ah *ah = ud_path(&side, &peer, 0);

	CHECK(ah);
	for (unsigned n = 0; n < MANY * ROUNDS; n++) {
		unsigned i = n % MANY;

		if (i == 0) {
			for (unsigned k = 0; k < MANY && !process.child; k++)
				CHECK_EQUAL(post_recv_at(&side, k, k * 8192u, GRH + MTU), 0);
			meet(&process);
		}
		if (process.child) {
			fill(side.memory + i * 8192u, MTU, i);
			CHECK_EQUAL(ud_post(&side, (struct ud_request){
							   .ah = ah, .qpn = peer.qpn, .qkey = QKEY,
							   .wr_id = i, .offset = i * 8192u,
							   .length = MTU}), 0);
			expect_wc(&side, i, IBV_WC_SUCCESS);
		} else {
			CHECK_EQUAL(expect_wc(&side, i, IBV_WC_SUCCESS).byte_len, GRH + MTU);
			CHECK(filled(side.memory + i * 8192u + GRH, MTU, i));
		}
	}
	meet(&process);
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	close_side(&side);
	join(&process);
}

/* More than is sent in one turn. */
static void long_chain(void)
{
	enum { MANY = 1000 };
	struct side a, b;
	struct ibv_wc wc;
	unsigned sent = 0, received = 0;

	ud_open(&a, (struct options){.sends = MANY, .cqe = MANY});
	ud_open(&b, (struct options){.receives = MANY, .cqe = MANY});
	struct ibv_ah *ah = path_to(&a, &b);
	struct ibv_send_wr wrs[MANY] = {0}, *bad;

	for (unsigned i = 0; i < MANY; i++) {
		CHECK_EQUAL(post_recv_at(&b, i, 0, GRH), 0);
		wrs[i].wr_id = i;
		wrs[i].next = i + 1 < MANY ? &wrs[i + 1] : NULL;
		wrs[i].opcode = IBV_WR_SEND;
		wrs[i].wr.ud.ah = ah;
		wrs[i].wr.ud.remote_qpn = b.qp->qp_num;
		wrs[i].wr.ud.remote_qkey = QKEY;
	}
	CHECK_EQUAL(a.context->ops.post_send(a.qp, wrs, &bad), 0);
	while (sent < MANY || received < MANY) {
		if (poll_cq(&a, 1, &wc) == 1)
			CHECK_EQUAL(wc.wr_id, sent++);
		if (poll_cq(&b, 1, &wc) == 1)
			CHECK_EQUAL(wc.wr_id, received++);
	}
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	close_pair(&a, &b);
}

/* Inline data, several SGEs, unsignaled, to itself. */
static void shapes(void)
{
	struct side side;

	ud_open(&side, (struct options){.signal_none = true});
	struct ibv_ah *ah = path_to(&side, &side);
	struct ibv_sge sges[3] = {
		{.addr = (uintptr_t)side.memory, .length = 10, .lkey = side.mr->lkey},
		{.addr = (uintptr_t)side.memory + 10, .length = 20, .lkey = side.mr->lkey},
		{.addr = (uintptr_t)side.memory + 30, .length = 70, .lkey = side.mr->lkey},
	};
	struct ibv_send_wr wr = {
		.wr_id = 2, .sg_list = sges, .num_sge = 3, .opcode = IBV_WR_SEND,
		.wr.ud = {.ah = ah, .remote_qpn = side.qp->qp_num, .remote_qkey = QKEY},
	}, *bad;
	struct ibv_sge parts[2] = {
		{.addr = (uintptr_t)side.memory + 4096, .length = 33, .lkey = side.mr->lkey},
		{.addr = (uintptr_t)side.memory + 5000, .length = 107, .lkey = side.mr->lkey},
	};
	struct ibv_recv_wr receive = {.wr_id = 1, .sg_list = parts, .num_sge = 2}, *bad_receive;

	fill(side.memory, 100, 3);
	for (int as_inline = 0; as_inline < 2; as_inline++) {
		wr.send_flags = as_inline ? IBV_SEND_INLINE : 0;
		memset(side.memory + 4096, 0, 4096);
		CHECK_EQUAL(side.context->ops.post_recv(side.qp, &receive, &bad_receive), 0);
		CHECK_EQUAL(side.context->ops.post_send(side.qp, &wr, &bad), 0);
		CHECK_EQUAL(poll_one(&side).byte_len, GRH + 100);
		nothing(&side);
		CHECK(filled(side.memory + 5000 + 7, 100, 3)); /* the GRH takes 33 + 7 */
	}
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	close_side(&side);
}

/* An address that names no process means the own one. */
static void without_a_lid(void)
{
	struct side side;

	ud_open(&side, (struct options){0});
	struct address own = address_of_side(&side);

	own.lid = 0;
	for (int index = -1; index < 1; index++) {
		struct ibv_ah *ah = ud_path(&side, &own, index);

		CHECK_EQUAL(post_recv_at(&side, 1, 0, GRH), 0);
		CHECK_EQUAL(ud_post(&side, (struct ud_request){.ah = ah, .qpn = own.qpn, .qkey = QKEY,
							       .wr_id = 2}), 0);
		CHECK_EQUAL(poll_one(&side).wr_id, 1);
		CHECK_EQUAL(poll_one(&side).wr_id, 2);
		CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	}
	close_side(&side);
}

/* A request that is solicited wakes who waits for that only: ibv_req_notify_cq(3). */
static void solicited(void)
{
	struct side a, b;

	open_two(&a, &b);
	struct ibv_ah *ah = path_to(&a, &b);
	struct pollfd fd = {.fd = b.channel->fd, .events = POLLIN};

	CHECK_EQUAL(b.context->ops.req_notify_cq(b.cq, 1), 0);
	for (int i = 0; i < 2; i++) {
		CHECK_EQUAL(post_recv_at(&b, 1, 0, GRH), 0);
		CHECK_EQUAL(ud_post(&a, (struct ud_request){
						.ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY,
						.flags = i ? IBV_SEND_SOLICITED : 0}), 0);
		CHECK_EQUAL(poll(&fd, 1, 0), i);
	}
	struct ibv_cq *cq;
	void *cq_context;

	CHECK_EQUAL(verbs->ibv_get_cq_event(b.channel, &cq, &cq_context), 0);
	verbs->ibv_ack_cq_events(cq, 1);
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	close_pair(&a, &b);
}

/* ---- what is dropped ----------------------------------------------------------------------- */

static uint32_t bad_qkeys(struct side *side)
{
	struct ibv_port_attr port;

	CHECK_EQUAL(verbs->ibv_query_port(side->context, 1, (struct _compat_ibv_port_attr *)&port),
		    0);
	return port.qkey_viol_cntr;
}

static void send_with(struct side *a, struct ibv_ah *ah, const struct side *b, uint32_t qkey)
{
	CHECK_EQUAL(ud_post(a, (struct ud_request){.ah = ah, .qpn = b->qp->qp_num, .qkey = qkey,
						   .wr_id = 2}), 0);
	CHECK_EQUAL(poll_one(a).status, IBV_WC_SUCCESS);
}

/* IBTA 10.2.5 and 9.8.3.2: a wrong key is dropped and counted; with its highest bit set the request
 * uses the sender's own. */
static void keys(void)
{
	struct side a, b;
	struct ibv_qp_attr attr = {.qkey = 99};

	open_two(&a, &b);
	struct ibv_ah *ah = path_to(&a, &b);
	uint32_t before = bad_qkeys(&a);

	CHECK_EQUAL(post_recv_at(&b, 1, 0, GRH), 0);
	send_with(&a, ah, &b, QKEY + 1);
	nothing(&b);
	CHECK_EQUAL(bad_qkeys(&a) - before, 1);
	send_with(&a, ah, &b, QKEY);
	poll_one(&b);
	CHECK_EQUAL(post_recv_at(&b, 1, 0, GRH), 0);
	send_with(&a, ah, &b, OWN_QKEY | 5);
	poll_one(&b);
	CHECK_EQUAL(verbs->ibv_modify_qp(a.qp, &attr, IBV_QP_QKEY), 0);
	CHECK_EQUAL(post_recv_at(&b, 1, 0, GRH), 0);
	send_with(&a, ah, &b, OWN_QKEY);
	nothing(&b);
	CHECK_EQUAL(verbs->ibv_modify_qp(b.qp, &attr, IBV_QP_QKEY), 0);
	send_with(&a, ah, &b, OWN_QKEY);
	poll_one(&b);
	struct ibv_qp_init_attr init;

	CHECK_EQUAL(verbs->ibv_query_qp(b.qp, &attr, IBV_QP_QKEY, &init), 0);
	CHECK_EQUAL(attr.qkey, 99);
	CHECK_EQUAL(init.qp_type, IBV_QPT_UD);
	CHECK_EQUAL(bad_qkeys(&a) - before, 2);
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	close_pair(&a, &b);
}

/* No such queue pair, none of this service, no receive, one that is too small: nobody is told, and
 * the receive is there for the next message. */
static void dropped(void)
{
	struct side a, b, rc;

	open_two(&a, &b);
	open_side(&rc, (struct options){0});
	struct ibv_ah *ah = path_to(&a, &b);
	struct ud_request request = {.ah = ah, .qkey = QKEY, .wr_id = 2, .length = 64};

	CHECK_EQUAL(post_recv_at(&rc, 1, 0, 4096), EINVAL); /* RESET */
	request.qpn = rc.qp->qp_num;
	CHECK_EQUAL(ud_post(&a, request), 0);
	request.qpn = b.qp->qp_num ^ 0x5555;
	CHECK_EQUAL(ud_post(&a, request), 0);
	request.qpn = b.qp->qp_num;
	CHECK_EQUAL(ud_post(&a, request), 0); /* no receive */
	CHECK_EQUAL(post_recv_at(&b, 1, 0, GRH + 63), 0);
	CHECK_EQUAL(ud_post(&a, request), 0); /* too small */
	for (int i = 0; i < 4; i++)
		CHECK_EQUAL(poll_one(&a).status, IBV_WC_SUCCESS);
	nothing(&b);
	request.length = 63;
	CHECK_EQUAL(ud_post(&a, request), 0);
	CHECK_EQUAL(poll_one(&b).byte_len, GRH + 63);
	CHECK_EQUAL(state_of(&b), IBV_QPS_RTS);
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	close_side(&rc);
	close_pair(&a, &b);
}

/* RTR and what follows it receive, what comes before and ERR do not (IBTA 10.3.1). */
static void states(void)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};
	struct side a, b;

	ud_open(&a, (struct options){0});
	open_side(&b, (struct options){.ud = true});
	struct ibv_ah *ah = path_to(&a, &b), *back = path_to(&b, &a);

	CHECK_EQUAL(ud_to_init(&b, QKEY), 0);
	CHECK_EQUAL(post_recv_at(&b, 1, 0, GRH), 0);
	CHECK_EQUAL(post_recv_at(&b, 2, 0, GRH), 0);
	send_with(&a, ah, &b, QKEY);
	nothing(&b);
	CHECK_EQUAL(to_state(&b, IBV_QPS_RTR), 0);
	send_with(&a, ah, &b, QKEY);
	CHECK_EQUAL(poll_one(&b).wr_id, 1);
	struct ud_request answer = {.ah = back, .qpn = a.qp->qp_num, .qkey = QKEY, .wr_id = 3};

	CHECK_EQUAL(ud_post(&b, answer), EINVAL); /* RTR */
	attr.qp_state = IBV_QPS_RTS;
	CHECK_EQUAL(verbs->ibv_modify_qp(b.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), 0);
	attr.qp_state = IBV_QPS_SQD;
	CHECK_EQUAL(verbs->ibv_modify_qp(b.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
	expect_event(&b, IBV_EVENT_SQ_DRAINED);
	CHECK_EQUAL(post_recv_at(&a, 5, 0, GRH), 0);
	CHECK_EQUAL(ud_post(&b, answer), 0);
	nothing(&a);
	CHECK_EQUAL(to_state(&b, IBV_QPS_RTS), 0);
	CHECK_EQUAL(poll_one(&b).wr_id, 3);
	CHECK_EQUAL(poll_one(&a).wr_id, 5);
	CHECK_EQUAL(to_state(&b, IBV_QPS_ERR), 0);
	CHECK_EQUAL(expect_wc(&b, 2, IBV_WC_WR_FLUSH_ERR).opcode, IBV_WC_RECV);
	send_with(&a, ah, &b, QKEY);
	CHECK_EQUAL(post_recv_at(&b, 6, 0, GRH), 0);
	expect_wc(&b, 6, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQUAL(ud_post(&b, answer), 0);
	expect_wc(&b, 3, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQUAL(to_state(&b, IBV_QPS_RESET), 0);
	send_with(&a, ah, &b, QKEY);
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	CHECK_EQUAL(verbs->ibv_destroy_ah(back), 0);
	close_pair(&a, &b);
}

/* ---- errors -------------------------------------------------------------------------------- */

/* A request that cannot be carried out stops the send queue (IBTA 10.3.1.6), not the receives. */
static void send_queue_error(void)
{
	for (int way = 0; way < 2; way++) {
		struct side a, b;

		open_two(&a, &b);
		struct ibv_ah *ah = path_to(&a, &b), *back = path_to(&b, &a);
		struct ud_request good = {.ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY, .wr_id = 1,
					  .length = 8}, bad = good;

		if (way == 0)
			bad.length = MTU + 1;
		else
			bad.lkey = 0x12345;
		bad.wr_id = 2;
		CHECK_EQUAL(post_recv_at(&b, 10, 0, GRH + MTU), 0);
		CHECK_EQUAL(ud_post(&a, bad), 0);
		expect_wc(&a, 2, way ? IBV_WC_LOC_PROT_ERR : IBV_WC_LOC_LEN_ERR);
		CHECK_EQUAL(state_of(&a), IBV_QPS_SQE);
		CHECK_EQUAL(ud_post(&a, good), 0);
		expect_wc(&a, 1, IBV_WC_WR_FLUSH_ERR);
		nothing(&b);
		CHECK_EQUAL(post_recv_at(&a, 11, 0, GRH), 0);
		send_with(&b, back, &a, QKEY);
		CHECK_EQUAL(poll_one(&a).wr_id, 11);
		CHECK_EQUAL(to_state(&a, IBV_QPS_RTS), 0);
		CHECK_EQUAL(ud_post(&a, good), 0);
		expect_wc(&a, 1, IBV_WC_SUCCESS);
		CHECK_EQUAL(poll_one(&b).byte_len, GRH + 8);
		CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
		CHECK_EQUAL(verbs->ibv_destroy_ah(back), 0);
		close_pair(&a, &b);
	}
}

static void refused_requests(void)
{
	static const enum ibv_wr_opcode opcodes[] = {
		IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ,
		IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP,
	};
	struct side a, b;

	open_two(&a, &b);
	struct ibv_ah *ah = path_to(&a, &b), *foreign = path_to(&b, &a);
	struct ibv_send_wr wr = {.wr.ud = {.ah = ah, .remote_qpn = 5, .remote_qkey = QKEY}}, *bad;

	for (int i = 0; i < 5; i++) {
		wr.opcode = opcodes[i];
		CHECK_EQUAL(a.context->ops.post_send(a.qp, &wr, &bad), EINVAL);
		CHECK(bad == &wr);
	}
	CHECK_EQUAL(ud_post(&a, (struct ud_request){.qpn = 5}), EINVAL);
	CHECK_EQUAL(ud_post(&a, (struct ud_request){.ah = foreign, .qpn = 5}), EINVAL);
	CHECK_EQUAL(ud_post(&a, (struct ud_request){.ah = ah, .qpn = 1 << 24}), EINVAL);
	nothing(&a);
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	CHECK_EQUAL(verbs->ibv_destroy_ah(foreign), 0);
	close_pair(&a, &b);
}

/* The receive's own memory is wrong: its queue pair's fault, and end. */
static void bad_receive(void)
{
	struct side a, b;
	struct ibv_sge sges[2];
	struct ibv_recv_wr wr = {.wr_id = 10, .sg_list = sges, .num_sge = 2}, *bad;

	open_two(&a, &b);
	struct ibv_ah *ah = path_to(&a, &b);

	sges[0] = (struct ibv_sge){(uintptr_t)b.memory, GRH, b.mr->lkey};
	sges[1] = (struct ibv_sge){(uintptr_t)b.memory + GRH, 64, 0x12345};
	CHECK_EQUAL(b.context->ops.post_recv(b.qp, &wr, &bad), 0);
	CHECK_EQUAL(post_recv_at(&b, 11, 0, 64), 0);
	CHECK_EQUAL(ud_post(&a, (struct ud_request){.ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY,
						    .length = 64}), 0);
	expect_wc(&b, 10, IBV_WC_LOC_PROT_ERR);
	expect_wc(&b, 11, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQUAL(state_of(&b), IBV_QPS_ERR);
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	close_pair(&a, &b);
}

/* ---- address handles ----------------------------------------------------------------------- */

static void address_handles(void)
{
	struct side side;
	struct ibv_device_attr device;
	struct ibv_ah_attr attr;

	open_side(&side, (struct options){.ud = true});
	struct address address = address_of_side(&side);
	const struct ibv_ah_attr good = {
		.grh = {.dgid = address.gid}, .dlid = address.lid, .is_global = 1, .port_num = 1};

	CHECK_EQUAL(verbs->ibv_query_device(side.context, &device), 0);
	CHECK(device.max_ah > 0 && device.max_mcast_grp > 0 && device.max_mcast_qp_attach > 0 &&
	      device.max_total_mcast_qp_attach > 0);
	for (int wrong = 0; wrong < 2; wrong++) {
		attr = good;
		if (wrong == 0)
			attr.port_num = 2;
		if (wrong == 1)
			attr.grh.sgid_index = 254;
		errno = 0;
		CHECK(!verbs->ibv_create_ah(side.pd, &attr) && errno == EINVAL);
	}
	attr = good;
	struct ibv_ah *ah = verbs->ibv_create_ah(side.pd, &attr);

	CHECK(ah && ah->pd == side.pd && ah->context == side.context);
	CHECK_EQUAL(verbs->ibv_destroy_qp(side.qp), 0);
	side.qp = NULL;
	CHECK_EQUAL(verbs->ibv_dereg_mr(side.mr), 0);
	side.mr = NULL;
	CHECK_EQUAL(verbs->ibv_dealloc_pd(side.pd), EBUSY); /* ibv_alloc_pd(3) */
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);

	/* As many as the device says, and no more. */
	struct ibv_ah **all = calloc((size_t)device.max_ah, sizeof(*all));

	CHECK(all);
	for (int i = 0; i < device.max_ah; i++)
		CHECK(all[i] = verbs->ibv_create_ah(side.pd, &attr));
	errno = 0;
	CHECK(!verbs->ibv_create_ah(side.pd, &attr) && errno == ENOMEM);
	for (int i = 0; i < device.max_ah; i++)
		CHECK_EQUAL(verbs->ibv_destroy_ah(all[i]), 0);
	free(all);
	close_side(&side);
}

/* ibv_init_ah_from_wc(3). */
static void address_from_wc(void)
{
	struct side side;
	struct ibv_grh grh = {.version_tclass_flow = htonl(6u << 28 | 7 << 20 | 9), .hop_limit = 3};
	struct ibv_wc wc = {.slid = 77, .sl = 5, .wc_flags = IBV_WC_GRH, .dlid_path_bits = 2};
	struct ibv_ah_attr attr;

	open_side(&side, (struct options){.ud = true});
	CHECK_EQUAL(verbs->ibv_query_gid(side.context, 1, 0, &grh.dgid), 0);
	fill(grh.sgid.raw, 16, 1);
	CHECK_EQUAL(verbs->ibv_init_ah_from_wc(side.context, 1, &wc, &grh, &attr), 0);
	CHECK_EQUAL(attr.dlid, 77);
	CHECK_EQUAL(attr.sl, 5);
	CHECK_EQUAL(attr.src_path_bits, 2);
	CHECK_EQUAL(attr.port_num, 1);
	CHECK_EQUAL(attr.is_global, 1);
	CHECK_EQUAL(attr.grh.sgid_index, 0);
	CHECK_EQUAL(attr.grh.traffic_class, 7);
	CHECK_EQUAL(attr.grh.flow_label, 9);
	CHECK_EQUAL(attr.grh.hop_limit, 3);
	CHECK(!memcmp(&attr.grh.dgid, &grh.sgid, 16));
	/* Not an address of this host, a multicast one, neither version of IP. */
	for (int wrong = 0; wrong < 3; wrong++) {
		struct ibv_grh bad = grh;

		if (wrong == 0)
			bad.dgid.raw[15] = 99;
		if (wrong == 1)
			bad.dgid.raw[0] = 0xff;
		if (wrong == 2)
			bad.version_tclass_flow = 0;
		CHECK_FAILS(verbs->ibv_init_ah_from_wc(side.context, 1, &wc, &bad, &attr),
			    wrong == 2 ? EPROTONOSUPPORT : EINVAL);
		CHECK(!verbs->ibv_create_ah_from_wc(side.pd, &wc, &bad, 1));
	}
	wc.wc_flags = 0;
	CHECK_EQUAL(verbs->ibv_init_ah_from_wc(side.context, 1, &wc, NULL, &attr), 0);
	CHECK_EQUAL(attr.is_global, 0);
	CHECK_EQUAL(attr.dlid, 77);
	close_side(&side);
}

/* ---- what no peer would send --------------------------------------------------------------- */

static void hostile(void)
{
	struct side side;
	uint8_t bytes[SOFT_DATAGRAM_HEADER + 5000] = {0};
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	ud_open(&side, (struct options){0});
	struct address own = address_of_side(&side);
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(own.lid),
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof(from);

	CHECK_EQUAL(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
	CHECK_EQUAL(getsockname(fd, (struct sockaddr *)&from, &length), 0);
	CHECK_EQUAL(post_recv_at(&side, 1, 0, GRH + MTU), 0);
	for (int wrong = 0; wrong < 14; wrong++) {
		struct soft_datagram datagram = {
			.source = own.gid, .destination = own.gid, .to = own.qpn, .from = 5,
			.qkey = QKEY,
		};
		size_t size = SOFT_DATAGRAM_HEADER + 100;

		if (wrong == 0)
			datagram.source.raw[15] = 9; /* not who it is */
		if (wrong == 1)
			datagram.destination.raw[15] = 9; /* not us */
		if (wrong == 2)
			datagram.destination.raw[12] = 0xe0; /* a group, not to its socket */
		if (wrong == 3)
			datagram.to |= 1u << 24;
		if (wrong == 4)
			datagram.from = UINT32_MAX;
		if (wrong == 5)
			datagram.traffic_flow = 1u << 28;
		if (wrong == 6)
			datagram.sl = 16;
		if (wrong == 7)
			datagram.to = SOFT_MULTICAST_QPN;
		if (wrong == 8)
			memset(&datagram.source, 0xff, 16);
		soft_datagram_encode(bytes, &datagram);
		if (wrong == 9)
			bytes[0] = 'x';
		if (wrong == 10)
			bytes[4] = 99;
		if (wrong == 11)
			size = SOFT_DATAGRAM_HEADER + MTU + 1;
		if (wrong == 12)
			size = SOFT_DATAGRAM_HEADER - 1;
		if (wrong == 13)
			size = 0;
		CHECK_EQUAL(send(fd, bytes, size, 0), size);
	}
	/* All in one socket: what is right comes after all of those. */
	soft_datagram_encode(bytes, &(struct soft_datagram){
					    .source = own.gid, .destination = own.gid,
					    .to = own.qpn, .from = 5, .qkey = QKEY});
	CHECK_EQUAL(send(fd, bytes, SOFT_DATAGRAM_HEADER + 3, 0), SOFT_DATAGRAM_HEADER + 3);
	struct ibv_wc wc = expect_wc(&side, 1, IBV_WC_SUCCESS);

	CHECK_EQUAL(wc.byte_len, GRH + 3);
	CHECK_EQUAL(wc.slid, ntohs(from.sin_port));
	CHECK_EQUAL(wc.src_qp, 5);
	nothing(&side);
	close(fd);
	close_side(&side);
}

/* Bytes that wait in the sockets of that port. */
static unsigned queued_at(const char *path, uint16_t lid)
{
	unsigned port, queued, sum = 0;
	char line[512];
	FILE *sockets = fopen(path, "r");

	while (sockets && fgets(line, sizeof(line), sockets))
		if (sscanf(line, " %*d: %*[0-9A-F]:%x %*s %*s %*x:%x", &port, &queued) == 2 &&
		    port == lid)
			sum += queued;
	if (sockets)
		fclose(sockets);
	return sum;
}

/* While there is no UD queue pair the port is kept, but nothing is let in. */
static void deaf(void)
{
	struct side rc;

	open_side(&rc, (struct options){0});
	struct address own = address_of_side(&rc);
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(own.lid),
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	CHECK_FAILS(bind(fd, (struct sockaddr *)&to, sizeof(to)), EADDRINUSE);
	for (int round = 0; round < 2; round++) {
		struct side ud;

		CHECK_EQUAL(sendto(fd, "hello", 5, 0, (struct sockaddr *)&to, sizeof(to)), 5);
		CHECK_EQUAL(queued_at("/proc/net/udp", own.lid) +
				    queued_at("/proc/net/udp6", own.lid), 0);

		/* The second round comes after one that listened. */
		ud_open(&ud, (struct options){0});
		close_side(&ud);
	}
	close(fd);
	close_side(&rc);
}

/* While the port is down, what is sent is lost; at another LID the old address is nobody's. */
static void port_changes(void)
{
	struct side a, b;
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	uint8_t bytes[SOFT_DATAGRAM_HEADER];
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	open_two(&a, &b);
	struct ibv_ah *ah = path_to(&a, &b);

	CHECK_EQUAL(post_recv_at(&b, 1, 0, GRH), 0);
	CHECK_EQUAL(aiordma_embedded_raise(IBV_EVENT_PORT_ERR), 0);
	send_with(&a, ah, &b, QKEY);
	CHECK_EQUAL(aiordma_embedded_raise(IBV_EVENT_PORT_ACTIVE), 0);
	nothing(&b);
	send_with(&a, ah, &b, QKEY);
	poll_one(&b);

	struct address before = address_of_side(&b);

	CHECK_EQUAL(aiordma_embedded_raise(IBV_EVENT_LID_CHANGE), 0);
	struct address after = address_of_side(&b);

	CHECK(before.lid != after.lid);
	CHECK_EQUAL(post_recv_at(&b, 1, 0, GRH), 0);
	send_with(&a, ah, &b, QKEY);
	nothing(&b);
	soft_datagram_encode(bytes, &(struct soft_datagram){
					    .source = after.gid, .destination = after.gid,
					    .to = after.qpn, .from = 5, .qkey = QKEY});
	to.sin_port = htons(after.lid);
	CHECK_EQUAL(sendto(fd, bytes, sizeof(bytes), 0, (struct sockaddr *)&to, sizeof(to)),
		    sizeof(bytes));
	expect_wc(&b, 1, IBV_WC_SUCCESS);
	close(fd);
	CHECK_EQUAL(verbs->ibv_destroy_ah(ah), 0);
	close_pair(&a, &b);
}

static bool has_ipv6(void)
{
	const struct sockaddr_in6 address = {.sin6_family = AF_INET6,
					     .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	int fd = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool bound = fd >= 0 && !bind(fd, (const struct sockaddr *)&address, sizeof(address));

	close(fd);
	return bound;
}

int main(void)
{
	limit_seconds(60);
	STEP(between_processes(NULL)); /* first: they fork, and no device has been opened */
	STEP(between_processes("127.0.0.1"));
	if (has_ipv6())
		STEP(between_processes("::1"));
	else
		fprintf(stderr, "this host has no ::1: IPv4 only\n");
	STEP(burst());
	STEP(long_chain());
	STEP(shapes());
	STEP(without_a_lid());
	STEP(solicited());
	STEP(keys());
	STEP(dropped());
	STEP(states());
	STEP(send_queue_error());
	STEP(refused_requests());
	STEP(bad_receive());
	STEP(address_handles());
	STEP(address_from_wc());
	STEP(hostile());
	STEP(deaf());
	STEP(port_changes());
	return 0;
}
