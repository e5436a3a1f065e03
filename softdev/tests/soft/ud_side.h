/* Helpers for tests of unreliable datagrams, whose sides have a UD queue pair. */
#pragma once

#include "verbs_side.h"

enum { GRH = 40, QKEY = 0x1234567, OWN_QKEY = 0x80000000u, MTU = 4096 };

static inline int ud_to_init(struct side *side, uint32_t qkey)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = qkey};

	return verbs->ibv_modify_qp(side->qp, &attr,
				    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
}

static inline void ud_bring_up(struct side *side, uint32_t qkey)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .sq_psn = side->psn};

	CHECK_OK(ud_to_init(side, qkey));
	enter_state(side, IBV_QPS_RTR);
	CHECK_OK(verbs->ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static inline void ud_open(struct side *side, struct options options)
{
	options.ud = true;
	open_side(side, options);
	ud_bring_up(side, QKEY);
}

#define UD_OPEN(side, ...) ud_open(side, (struct options){__VA_ARGS__})

/* Create an address handle for sending to `to` from the side's GID at `index`. */
static inline struct ibv_ah *ud_path(struct side *side, const struct address *to, int index)
{
	struct ibv_ah_attr attr = {
		.grh =
			{
				.dgid = to->gid,
				.sgid_index = (uint8_t)index,
				.hop_limit = 17,
				.traffic_class = 33,
				.flow_label = 0x54321,
			},
		.dlid = ANY_DLID,
		.is_global = 1,
		.port_num = 1,
	};

	return verbs->ibv_create_ah(side->pd, &attr);
}

struct ud_request {
	struct ibv_ah *ah;
	uint32_t qpn;
	uint32_t qkey;
	uint64_t wr_id;
	size_t offset;
	uint32_t length;
	unsigned flags;
	bool with_imm;
	uint32_t imm;
	uint32_t lkey; /* the side's own lkey if 0 */
};

static inline int ud_post(struct side *side, struct ud_request request)
{
	struct ibv_sge sge = {
		.addr = (uintptr_t)side->memory + request.offset,
		.length = request.length,
		.lkey = request.lkey ? request.lkey : side->mr->lkey,
	};
	struct ibv_send_wr wr = {
		.wr_id = request.wr_id,
		.sg_list = &sge,
		.num_sge = request.length ? 1 : 0,
		.opcode = request.with_imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
		.send_flags = request.flags,
		.imm_data = request.imm,
		.wr.ud = {.ah = request.ah, .remote_qpn = request.qpn, .remote_qkey = request.qkey},
	};

	return post_wr(side, &wr);
}

/* Post a message and check for success: UD_POST(&a, .ah = ah, .qpn = number, .qkey = QKEY). */
#define UD_POST(side, ...) CHECK_OK(ud_post(side, (struct ud_request){__VA_ARGS__}))

/* Create an address handle for sending from `side` to `to`, using the GIDs of both. */
static inline struct ibv_ah *path_to(struct side *side, const struct side *to)
{
	const struct address address = address_of_side(to);

	return ud_path(side, &address, side->options.gid);
}

static inline void open_ud_pair(struct side *a, struct side *b)
{
	UD_OPEN(a);
	UD_OPEN(b);
}

/* Run a test step with a new UD queue pair: UD_SIDE(step) calls step(&side). */
#define UD_SIDE(test, ...)                                                                         \
	do {                                                                                       \
		struct side side;                                                                  \
		current_step = #test;                                                              \
		UD_OPEN(&side, __VA_ARGS__);                                                       \
		test(&side);                                                                       \
		close_side(&side);                                                                 \
	} while (0)

/* Run a test step with two new UD queue pairs and an address handle from `a` to `b`. */
#define UD_PAIR(test)                                                                              \
	do {                                                                                       \
		struct side a, b;                                                                  \
		current_step = #test;                                                              \
		open_ud_pair(&a, &b);                                                              \
		struct ibv_ah *ah = path_to(&a, &b);                                               \
		test(&a, &b, ah);                                                                  \
		CHECK_OK(verbs->ibv_destroy_ah(ah));                                               \
		close_pair(&a, &b);                                                                \
	} while (0)

static inline struct ibv_wc poll_one(struct side *side)
{
	struct ibv_wc wc;

	CHECK_EQUAL(poll_cq(side, 1, &wc), 1); /* completions within a process are immediate */
	return wc;
}

/* Send an empty message with the given Q_Key, and check that it completes. */
static inline void send_with(struct side *a, struct ibv_ah *ah, const struct side *b, uint32_t qkey)
{
	UD_POST(a, .ah = ah, .qpn = b->qp->qp_num, .qkey = qkey, .wr_id = 2);
	CHECK_EQUAL(poll_one(a).status, IBV_WC_SUCCESS);
}
