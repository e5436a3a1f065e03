/* Tests of unreliable datagrams (IBTA vol 1, 9.8.3) within a process. */
#include "extended_side.h"
#include "ud_side.h"

/* ---- messages ------------------------------------------------------------------------------ */

/* Post more requests than the device sends in one step. */
static void long_chain_completes_in_order(void)
{
	enum { MANY = 1000 };
	struct side a, b;
	struct ibv_wc wc;
	unsigned sent = 0, received = 0;

	UD_OPEN(&a, .sends = MANY, .cqe = MANY);
	UD_OPEN(&b, .receives = MANY, .cqe = MANY);
	struct ibv_ah *ah = path_to(&a, &b);
	struct ibv_send_wr wrs[MANY] = {0};

	for (unsigned i = 0; i < MANY; i++) {
		post_receive_at(&b, i, 0, GRH);
		wrs[i].wr_id = i;
		wrs[i].next = i + 1 < MANY ? &wrs[i + 1] : NULL;
		wrs[i].opcode = IBV_WR_SEND;
		wrs[i].wr.ud.ah = ah;
		wrs[i].wr.ud.remote_qpn = b.qp->qp_num;
		wrs[i].wr.ud.remote_qkey = QKEY;
	}
	CHECK_OK(post_wr(&a, wrs));
	while (sent < MANY || received < MANY) {
		if (poll_cq(&a, 1, &wc) == 1)
			CHECK_EQUAL(wc.wr_id, sent++);
		if (poll_cq(&b, 1, &wc) == 1)
			CHECK_EQUAL(wc.wr_id, received++);
	}
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	close_pair(&a, &b);
}

/* Send unsignaled messages from a queue pair to itself, from several SGEs and inline. */
static void message_can_use_several_sges_or_inline_data(struct side *side)
{
	struct ibv_ah *ah = path_to(side, side);
	struct ibv_sge sges[3] = {
		{.addr = (uintptr_t)side->memory, .length = 10, .lkey = side->mr->lkey},
		{.addr = (uintptr_t)side->memory + 10, .length = 20, .lkey = side->mr->lkey},
		{.addr = (uintptr_t)side->memory + 30, .length = 70, .lkey = side->mr->lkey},
	};
	struct ibv_send_wr wr = {
		.wr_id = 2,
		.sg_list = sges,
		.num_sge = 3,
		.opcode = IBV_WR_SEND,
		.wr.ud = {.ah = ah, .remote_qpn = side->qp->qp_num, .remote_qkey = QKEY},
	};
	struct ibv_sge parts[2] = {
		{.addr = (uintptr_t)side->memory + 4096, .length = 33, .lkey = side->mr->lkey},
		{.addr = (uintptr_t)side->memory + 5000, .length = 107, .lkey = side->mr->lkey},
	};
	struct ibv_recv_wr receive = {.wr_id = 1, .sg_list = parts, .num_sge = 2};

	fill(side->memory, 100, 3);
	for (int as_inline = 0; as_inline < 2; as_inline++) {
		wr.send_flags = as_inline ? IBV_SEND_INLINE : 0;
		memset(side->memory + 4096, 0, 4096);
		CHECK_OK(post_recv_wr(side, &receive));
		CHECK_OK(post_wr(side, &wr));
		CHECK_EQUAL(poll_one(side).byte_len, GRH + 100);
		expect_no_wc(side);
		CHECK(is_filled(side->memory + 5000 + 7, 100, 3)); /* the GRH takes 33 + 7 */
	}
	CHECK_OK(verbs->ibv_destroy_ah(ah));
}

/* Two queue pairs share a receive queue. A message that is too long leaves its receive in the
 * queue. */
static void srq_receives_are_shared_by_two_queue_pairs(void)
{
	struct side a, b;

	UD_OPEN(&a);
	UD_OPEN(&b, .shared = 8);
	struct ibv_qp *first = b.qp;
	struct ibv_recv_wr wr = {.num_sge = 1};
	struct ibv_sge sge = {.addr = (uintptr_t)b.memory, .length = GRH + 8, .lkey = b.mr->lkey};

	b.qp = create_qp(&b);
	ud_bring_up(&b, QKEY);
	struct ibv_ah *ah = path_to(&a, &b);
	struct ud_request request = {.ah = ah, .qkey = QKEY, .wr_id = 2, .length = 8};
	const uint32_t numbers[3] = {first->qp_num, b.qp->qp_num, first->qp_num};

	wr.sg_list = &sge;
	for (wr.wr_id = 10; wr.wr_id < 13; wr.wr_id++)
		CHECK_OK(post_recv_wr(&b, &wr));
	request.qpn = first->qp_num;
	request.length = 9;
	CHECK_OK(ud_post(&a, request));
	expect_no_wc(&b);
	request.length = 8;
	for (unsigned i = 0; i < 3; i++) {
		fill(a.memory, 8, i);
		request.qpn = numbers[i];
		CHECK_OK(ud_post(&a, request));
		struct ibv_wc wc = poll_one(&b);

		CHECK_EQUAL(wc.wr_id, 10 + i);
		CHECK_EQUAL(wc.qp_num, numbers[i]);
		CHECK_EQUAL(wc.byte_len, GRH + 8);
		CHECK(is_filled(b.memory + GRH, 8, i));
	}
	CHECK_OK(ud_post(&a, request)); /* the shared receive queue is empty */
	expect_no_wc(&b);
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	CHECK_OK(verbs->ibv_destroy_qp(first));
	close_pair(&a, &b);
}

/* Build requests with wr_* calls (ibv_wr_post(3)) and poll an extended CQ (ibv_create_cq_ex(3)). */
static void extended_calls_send_and_poll_datagrams(void)
{
	const uint64_t fields = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM |
				IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP |
				IBV_WC_EX_WITH_SLID | IBV_WC_EX_WITH_SL |
				IBV_WC_EX_WITH_DLID_PATH_BITS;
	struct side side;
	struct ibv_poll_cq_attr none = {0};

	open_extended_side(&side, (struct options){.ud = true, .signal_none = true},
			   (struct extras){.wc_flags = fields});
	struct ibv_qp_init_attr_ex init =
		qp_attr_ex(&side, (struct extras){.operations = IBV_QP_EX_WITH_SEND |
								IBV_QP_EX_WITH_SEND_WITH_IMM});

	init.qp_type = IBV_QPT_UD;
	CHECK_OK(verbs->ibv_destroy_qp(side.qp));
	CHECK(side.qp = extended(side.context)->create_qp_ex(side.context, &init));
	ud_bring_up(&side, QKEY);
	struct address own = address_of_side(&side);
	struct ibv_ah_attr attr = {
		.grh = {.dgid = own.gid},
		.dlid = ANY_DLID,
		.sl = 5,
		.is_global = 1,
		.port_num = 1,
	};
	struct ibv_ah *ah = verbs->ibv_create_ah(side.pd, &attr);
	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(side.qp);
	struct ibv_cq_ex *cq = as_extended(side.cq);

	CHECK(ah && qp);
	post_receive_at(&side, 1, 4096, GRH + 64);
	fill(side.memory, 64, 4);
	qp->wr_start(qp);
	qp->wr_id = 2;
	qp->wr_send_imm(qp, 77);
	qp->wr_set_ud_addr(qp, ah, own.qpn, QKEY);
	qp->wr_set_sge(qp, side.mr->lkey, (uintptr_t)side.memory, 64);
	CHECK_OK(qp->wr_complete(qp));
	CHECK_OK(cq->start_poll(cq, &none));
	CHECK_EQUAL(cq->wr_id, 1);
	CHECK_EQUAL(cq->status, IBV_WC_SUCCESS);
	CHECK_EQUAL(cq->read_byte_len(cq), GRH + 64);
	CHECK_EQUAL(cq->read_wc_flags(cq), IBV_WC_GRH | IBV_WC_WITH_IMM);
	CHECK_EQUAL(cq->read_imm_data(cq), 77);
	CHECK_EQUAL(cq->read_qp_num(cq), own.qpn);
	CHECK_EQUAL(cq->read_src_qp(cq), own.qpn);
	CHECK_EQUAL(cq->read_slid(cq), 0);
	/* The SL contains the packet type, as on ConnectX cards. The loopback GID uses UDP over
	 * IPv4. */
	CHECK_EQUAL(cq->read_sl(cq), 8 | 2);
	CHECK_EQUAL(cq->read_dlid_path_bits(cq), 0);
	cq->end_poll(cq);
	CHECK(is_filled(side.memory + 4096 + GRH, 64, 4));
	/* Use inline data, and call the setters in the opposite order. */
	post_receive_at(&side, 1, 4096, GRH + 64);
	qp->wr_start(qp);
	qp->wr_send(qp);
	qp->wr_set_inline_data(qp, side.memory, 32);
	qp->wr_set_ud_addr(qp, ah, own.qpn, QKEY);
	CHECK_OK(qp->wr_complete(qp));
	CHECK_EQUAL(expect_wc(&side, 1, IBV_WC_SUCCESS).byte_len, GRH + 32);
	/* If one request lacks an address, none of the batch is posted. */
	qp->wr_start(qp);
	qp->wr_send(qp);
	qp->wr_set_ud_addr(qp, ah, own.qpn, QKEY);
	qp->wr_send(qp);
	CHECK_EQUAL(qp->wr_complete(qp), EINVAL);
	expect_no_wc(&side);
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	close_side(&side);
}

/* ---- what is dropped ----------------------------------------------------------------------- */

static uint32_t count_bad_qkeys(struct side *side)
{
	struct ibv_port_attr port;

	CHECK_OK(verbs->ibv_query_port(side->context, 1, (struct _compat_ibv_port_attr *)&port));
	return port.qkey_viol_cntr;
}

/* A datagram with a wrong Q_Key is dropped and counted. If the highest bit of the Q_Key in a
 * request is set, the sender's own Q_Key is used instead (IBTA 10.2.5, 9.8.3.2). */
static void wrong_qkey_is_dropped_and_counted(struct side *a, struct side *b, struct ibv_ah *ah)
{
	struct ibv_qp_attr attr = {.qkey = 99};

	uint32_t before = count_bad_qkeys(a);

	post_receive_at(b, 1, 0, GRH);
	send_with(a, ah, b, QKEY + 1);
	expect_no_wc(b);
	CHECK_EQUAL(count_bad_qkeys(a) - before, 1);
	send_with(a, ah, b, QKEY);
	poll_one(b);
	post_receive_at(b, 1, 0, GRH);
	send_with(a, ah, b, OWN_QKEY | 5);
	poll_one(b);
	CHECK_OK(verbs->ibv_modify_qp(a->qp, &attr, IBV_QP_QKEY));
	post_receive_at(b, 1, 0, GRH);
	send_with(a, ah, b, OWN_QKEY);
	expect_no_wc(b);
	CHECK_OK(verbs->ibv_modify_qp(b->qp, &attr, IBV_QP_QKEY));
	send_with(a, ah, b, OWN_QKEY);
	poll_one(b);
	struct ibv_qp_init_attr init;

	CHECK_OK(verbs->ibv_query_qp(b->qp, &attr, IBV_QP_QKEY, &init));
	CHECK_EQUAL(attr.qkey, 99);
	CHECK_EQUAL(init.qp_type, IBV_QPT_UD);
	CHECK_EQUAL(count_bad_qkeys(a) - before, 2);
}

/* Datagrams are dropped if the queue pair does not exist or has another type, or if the receive is
 * missing or too small. No event is raised, and the receive stays posted. */
static void undeliverable_datagrams_are_dropped_silently(void)
{
	struct side a, b, rc;

	open_ud_pair(&a, &b);
	OPEN(&rc);
	struct ibv_ah *ah = path_to(&a, &b);
	struct ud_request request = {.ah = ah, .qkey = QKEY, .wr_id = 2, .length = 64};

	CHECK_EQUAL(post_recv_at(&rc, 1, 0, 4096), EINVAL); /* in RESET */
	request.qpn = rc.qp->qp_num;
	CHECK_OK(ud_post(&a, request));
	request.qpn = b.qp->qp_num ^ 0x5555;
	CHECK_OK(ud_post(&a, request));
	request.qpn = b.qp->qp_num;
	CHECK_OK(ud_post(&a, request)); /* no receive is posted */
	post_receive_at(&b, 1, 0, GRH + 63);
	CHECK_OK(ud_post(&a, request)); /* the receive is too small */
	for (int i = 0; i < 4; i++)
		CHECK_EQUAL(poll_one(&a).status, IBV_WC_SUCCESS);
	expect_no_wc(&b);
	request.length = 63;
	CHECK_OK(ud_post(&a, request));
	CHECK_EQUAL(poll_one(&b).byte_len, GRH + 63);
	CHECK_EQUAL(state_of(&b), IBV_QPS_RTS);
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	close_side(&rc);
	close_pair(&a, &b);
}

/* A queue pair receives in RTR and all later states except ERR (IBTA 10.3.1). */
static void queue_pair_receives_from_rtr_until_error(void)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};
	struct side a, b;

	UD_OPEN(&a);
	OPEN(&b, .ud = true);
	struct ibv_ah *ah = path_to(&a, &b), *back = path_to(&b, &a);

	CHECK_OK(ud_to_init(&b, QKEY));
	post_receive_at(&b, 1, 0, GRH);
	post_receive_at(&b, 2, 0, GRH);
	send_with(&a, ah, &b, QKEY);
	expect_no_wc(&b);
	enter_state(&b, IBV_QPS_RTR);
	send_with(&a, ah, &b, QKEY);
	CHECK_EQUAL(poll_one(&b).wr_id, 1);
	struct ud_request answer = {.ah = back, .qpn = a.qp->qp_num, .qkey = QKEY, .wr_id = 3};

	CHECK_EQUAL(ud_post(&b, answer), EINVAL); /* in RTR */
	attr.qp_state = IBV_QPS_RTS;
	CHECK_OK(verbs->ibv_modify_qp(b.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	attr.qp_state = IBV_QPS_SQD;
	CHECK_OK(verbs->ibv_modify_qp(b.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
	expect_event(&b, IBV_EVENT_SQ_DRAINED);
	post_receive_at(&a, 5, 0, GRH);
	CHECK_OK(ud_post(&b, answer));
	expect_no_wc(&a);
	enter_state(&b, IBV_QPS_RTS);
	CHECK_EQUAL(poll_one(&b).wr_id, 3);
	CHECK_EQUAL(poll_one(&a).wr_id, 5);
	enter_state(&b, IBV_QPS_ERR);
	CHECK_EQUAL(expect_wc(&b, 2, IBV_WC_WR_FLUSH_ERR).opcode, IBV_WC_RECV);
	send_with(&a, ah, &b, QKEY);
	post_receive_at(&b, 6, 0, GRH);
	expect_wc(&b, 6, IBV_WC_WR_FLUSH_ERR);
	CHECK_OK(ud_post(&b, answer));
	expect_wc(&b, 3, IBV_WC_WR_FLUSH_ERR);
	enter_state(&b, IBV_QPS_RESET);
	send_with(&a, ah, &b, QKEY);
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	CHECK_OK(verbs->ibv_destroy_ah(back));
	close_pair(&a, &b);
}

/* ---- errors -------------------------------------------------------------------------------- */

/* An invalid request stops the send queue (IBTA 10.3.1.6), but not the receive queue. */
static void invalid_request_stops_only_the_send_queue(void)
{
	for (int way = 0; way < 2; way++) {
		struct side a, b;

		open_ud_pair(&a, &b);
		struct ibv_ah *ah = path_to(&a, &b), *back = path_to(&b, &a);
		struct ud_request good = {.ah = ah,
					  .qpn = b.qp->qp_num,
					  .qkey = QKEY,
					  .wr_id = 1,
					  .length = 8},
				  bad = good;

		if (way == 0)
			bad.length = MTU + 1;
		else
			bad.lkey = 0x12345;
		bad.wr_id = 2;
		post_receive_at(&b, 10, 0, GRH + MTU);
		CHECK_OK(ud_post(&a, bad));
		expect_wc(&a, 2, way ? IBV_WC_LOC_PROT_ERR : IBV_WC_LOC_LEN_ERR);
		CHECK_EQUAL(state_of(&a), IBV_QPS_SQE);
		CHECK_OK(ud_post(&a, good));
		expect_wc(&a, 1, IBV_WC_WR_FLUSH_ERR);
		expect_no_wc(&b);
		post_receive_at(&a, 11, 0, GRH);
		send_with(&b, back, &a, QKEY);
		CHECK_EQUAL(poll_one(&a).wr_id, 11);
		enter_state(&a, IBV_QPS_RTS);
		CHECK_OK(ud_post(&a, good));
		expect_wc(&a, 1, IBV_WC_SUCCESS);
		CHECK_EQUAL(poll_one(&b).byte_len, GRH + 8);
		CHECK_OK(verbs->ibv_destroy_ah(ah));
		CHECK_OK(verbs->ibv_destroy_ah(back));
		close_pair(&a, &b);
	}
}

static void invalid_datagram_requests_are_rejected(struct side *a, struct side *b,
						   struct ibv_ah *ah)
{
	static const enum ibv_wr_opcode opcodes[] = {
		IBV_WR_RDMA_WRITE,           IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ,
		IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP,
	};

	struct ibv_ah *foreign = path_to(b, a);
	struct ibv_send_wr wr = {.wr.ud = {.ah = ah, .remote_qpn = 5, .remote_qkey = QKEY}}, *bad;

	for (int i = 0; i < 5; i++) {
		wr.opcode = opcodes[i];
		CHECK_EQUAL(a->context->ops.post_send(a->qp, &wr, &bad), EINVAL);
		CHECK(bad == &wr);
	}
	CHECK_EQUAL(ud_post(a, (struct ud_request){.qpn = 5}), EINVAL);
	CHECK_EQUAL(ud_post(a, (struct ud_request){.ah = foreign, .qpn = 5}), EINVAL);
	CHECK_EQUAL(ud_post(a, (struct ud_request){.ah = ah, .qpn = 1 << 24}), EINVAL);
	expect_no_wc(a);
	CHECK_OK(verbs->ibv_destroy_ah(foreign));
}

/* A receive with an invalid key puts the receiver's queue pair in the error state. */
static void invalid_receive_key_moves_qp_to_error(struct side *a, struct side *b, struct ibv_ah *ah)
{
	struct ibv_sge sges[2];
	struct ibv_recv_wr wr = {.wr_id = 10, .sg_list = sges, .num_sge = 2};

	sges[0] = (struct ibv_sge){(uintptr_t)b->memory, GRH, b->mr->lkey};
	sges[1] = (struct ibv_sge){(uintptr_t)b->memory + GRH, 64, 0x12345};
	CHECK_OK(post_recv_wr(b, &wr));
	post_receive_at(b, 11, 0, 64);
	UD_POST(a, .ah = ah, .qpn = b->qp->qp_num, .qkey = QKEY, .length = 64);
	expect_wc(b, 10, IBV_WC_LOC_PROT_ERR);
	expect_wc(b, 11, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQUAL(state_of(b), IBV_QPS_ERR);
}

/* A queue pair that sends to itself fails while it is sending if its receive has an invalid key.
 * The request must complete only once, and later requests are flushed. */
static void loopback_failure_completes_the_request_once(struct side *side)
{
	struct ibv_ah *ah = path_to(side, side);
	struct ud_request request = {
		.ah = ah, .qpn = side->qp->qp_num, .qkey = QKEY, .wr_id = 1, .length = 8};

	post_wrong_recv(side, 10, GRH + 8);
	CHECK_OK(ud_post(side, request));
	expect_wc(side, 10, IBV_WC_LOC_PROT_ERR);
	expect_wc(side, 1, IBV_WC_WR_FLUSH_ERR);
	expect_no_wc(side);
	CHECK_EQUAL(state_of(side), IBV_QPS_ERR);
	request.wr_id = 2;
	CHECK_OK(ud_post(side, request));
	expect_wc(side, 2, IBV_WC_WR_FLUSH_ERR);
	expect_no_wc(side);
	CHECK_OK(verbs->ibv_destroy_ah(ah));
}

int main(void)
{
	limit_seconds(60);
	STEP(long_chain_completes_in_order());
	UD_SIDE(message_can_use_several_sges_or_inline_data, .signal_none = true);
	STEP(srq_receives_are_shared_by_two_queue_pairs());
	STEP(extended_calls_send_and_poll_datagrams());
	UD_PAIR(wrong_qkey_is_dropped_and_counted);
	STEP(undeliverable_datagrams_are_dropped_silently());
	STEP(queue_pair_receives_from_rtr_until_error());
	STEP(invalid_request_stops_only_the_send_queue());
	UD_PAIR(invalid_datagram_requests_are_rejected);
	UD_PAIR(invalid_receive_key_moves_qp_to_error);
	UD_SIDE(loopback_failure_completes_the_request_once);
	return 0;
}
