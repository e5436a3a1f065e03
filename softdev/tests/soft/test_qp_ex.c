/* Test create_qp_ex and the wr_* builders (ibv_wr_post(3)): what the builders reject and
 * copy. Each operation is tested in tests/verbs/test_batch.py. */
#include "extended_side.h"
#include "ud_side.h"

enum {
	RC_OPERATIONS = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
		IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
		IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
};

/* Check that create_qp_ex rejects unsupported operations, flags and limits, and requires a
 * domain. */
static void create_qp_ex_rejects_unsupported_attributes(void)
{
	const uint32_t as_usual = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS |
				  IBV_QP_INIT_ATTR_CREATE_FLAGS;
	const struct {
		enum ibv_qp_type type;
		uint64_t operations;
		uint32_t comp_mask, create_flags;
		uint16_t max_tso_header;
		uint32_t sges;
		int error;
	} cases[] = {
		/* ibv_wr_post(3), section "USAGE", column "QP Type Supported" */
		{.operations = IBV_QP_EX_WITH_TSO, .error = EOPNOTSUPP},
		{.operations = UINT64_C(1) << 40, .error = EOPNOTSUPP},
		{IBV_QPT_UC, IBV_QP_EX_WITH_RDMA_READ, .error = EOPNOTSUPP},
		{IBV_QPT_UC, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, .error = EOPNOTSUPP},
		{IBV_QPT_UC, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, .error = EOPNOTSUPP},
		{IBV_QPT_UC, IBV_QP_EX_WITH_ATOMIC_WRITE, .error = EOPNOTSUPP},
		{IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_WRITE, .error = EOPNOTSUPP},
		{IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_READ, .error = EOPNOTSUPP},
		{IBV_QPT_UD, IBV_QP_EX_WITH_BIND_MW, .error = EOPNOTSUPP},
		{IBV_QPT_UD, IBV_QP_EX_WITH_SEND_WITH_INV, .error = EOPNOTSUPP},
		{.comp_mask = as_usual & ~(uint32_t)IBV_QP_INIT_ATTR_PD, .error = EINVAL},
		{.comp_mask = as_usual | 1 << 20, .error = EINVAL},
		{.comp_mask = as_usual | IBV_QP_INIT_ATTR_IND_TABLE, .error = EOPNOTSUPP},
		{.comp_mask = as_usual | IBV_QP_INIT_ATTR_RX_HASH, .error = EOPNOTSUPP},
		{.create_flags = IBV_QP_CREATE_SCATTER_FCS, .error = EOPNOTSUPP},
		/* for UD only */
		{.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB, .error = EOPNOTSUPP},
		{.comp_mask = as_usual | IBV_QP_INIT_ATTR_MAX_TSO_HEADER,
		 .max_tso_header = 64,
		 .error = EOPNOTSUPP},
		{.sges = 1000, .error = EINVAL},
		/* The operations are ignored without their comp_mask bit, so this queue pair is not
		 * extended. */
		{.comp_mask = IBV_QP_INIT_ATTR_PD, .operations = UINT64_MAX},
	};
	struct side a;

	open_extended_side(&a, (struct options){0}, (struct extras){.operations = RC_OPERATIONS});
	CHECK((void *)verbs->ibv_qp_to_qp_ex(a.qp) == a.qp);
	CHECK(!extended(a.context)->open_qp);
	FOR_EACH (i, cases) {
		struct ibv_qp_init_attr_ex attr = qp_attr_ex(
			&a, (struct extras){.operations = cases[i].operations ? cases[i].operations
									      : IBV_QP_EX_WITH_SEND,
					    .create_flags = cases[i].create_flags});

		if (cases[i].type)
			attr.qp_type = cases[i].type;
		if (cases[i].comp_mask)
			attr.comp_mask = cases[i].comp_mask;
		if (cases[i].sges)
			attr.cap.max_send_sge = cases[i].sges;
		attr.max_tso_header = cases[i].max_tso_header;
		errno = 0;
		struct ibv_qp *qp = extended(a.context)->create_qp_ex(a.context, &attr);

		CHECK_EQUAL(qp ? 0 : errno, cases[i].error);
		if (qp) {
			CHECK(!verbs->ibv_qp_to_qp_ex(qp));
			CHECK_OK(verbs->ibv_destroy_qp(qp));
		}
	}
	close_side(&a);
}

static void set_sge(struct ibv_qp_ex *qp, struct side *side, size_t offset, uint32_t length)
{
	qp->wr_set_sge(qp, side->mr->lkey, (uintptr_t)side->memory + offset, length);
}

/* Check that ATOMIC WRITE writes eight bytes and requires the right to write (IBTA annex A19). */
static void atomic_write_writes_eight_bytes_and_checks_rights(void)
{
	const uint64_t word = 0x0102030405060708;
	struct side a, b;
	uint64_t seen;

	/* The word of an ATOMIC WRITE is not inline data, so one byte of inline space is
	 * sufficient. */
	open_extended_side(&a, (struct options){0},
			   (struct extras){.operations = IBV_QP_EX_WITH_ATOMIC_WRITE |
							 IBV_QP_EX_WITH_LOCAL_INV,
					   .inline_data = 1});
	OPEN(&b);
	connect_pair(&a, &b);
	CHECK(device_of(a.context).device_cap_flags_ex & UINT64_C(1) << 40);
	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(a.qp);

	qp->wr_start(qp);
	for (unsigned i = 0; i < 6; i++) { /* more than a batch's initial capacity */
		seen = word + i;
		qp->wr_id = i;
		qp->wr_atomic_write(qp, b.mr->rkey, (uintptr_t)b.memory + 8 * i, &seen);
	}
	seen = 0;
	CHECK_OK(qp->wr_complete(qp));
	for (unsigned i = 0; i < 6; i++)
		CHECK_EQUAL(expect_wc(&a, i, IBV_WC_SUCCESS).opcode, IBV_WC_ATOMIC_WRITE);
	for (unsigned i = 0; i < 6; i++) {
		memcpy(&seen, b.memory + 8 * i, 8);
		CHECK_EQUAL(seen, word + i);
	}
	/* ibv_post_send reads the word from memory. */
	struct request request = {.opcode = IBV_WR_ATOMIC_WRITE,
				  .wr_id = 9,
				  .length = 8,
				  .remote = (uintptr_t)b.memory + 64,
				  .rkey = b.mr->rkey};

	memcpy(a.memory, &word, 8);
	run_request(&a, IBV_WC_SUCCESS, request);
	CHECK(!memcmp(b.memory + 64, &word, 8));
	/* These operations have no setter (ibv_wr_post(3), "setters"). */
	for (int local = 0; local < 2; local++) {
		qp->wr_start(qp);
		if (local)
			qp->wr_local_inv(qp, 1);
		else
			qp->wr_atomic_write(qp, b.mr->rkey, (uintptr_t)b.memory, &word);
		set_sge(qp, &a, 0, 8);
		CHECK_EQUAL(qp->wr_complete(qp), EINVAL);
	}
	/* The word must be eight bytes long, even if it is inline. Its remote address must be
	 * aligned, and the peer must allow the write. */
	request.flags = IBV_SEND_INLINE;
	request.length = 16;
	CHECK_EQUAL(post(&a, request), EINVAL);
	request.flags = 0;
	static const enum ibv_wc_status expected[] = {
		IBV_WC_LOC_LEN_ERR,    IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR,
		IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
	};
	struct ibv_mr *readable = verbs->ibv_reg_mr(b.pd, b.memory, 4096, IBV_ACCESS_REMOTE_READ);

	for (int i = 0; i < 5; i++) {
		request.length = i == 0 ? 4 : 8;
		request.remote = (uintptr_t)b.memory + (i == 1 ? 4 : i == 2 ? 65536 : 0);
		request.rkey = i == 3 ? readable->rkey : b.mr->rkey;
		if (i == 4)
			b.options.rights = ALL_RIGHTS & ~IBV_ACCESS_REMOTE_WRITE;
		connect_again(&a, &b);
		run_request(&a, expected[i], request);
	}
	memcpy(&seen, b.memory, 8);
	CHECK_EQUAL(seen, word);
	CHECK_OK(verbs->ibv_dereg_mr(readable));
	close_pair(&a, &b);
}

static void uc_builders_send_immediate_data(void)
{
	struct side a, b;

	open_extended_pair(&a, &b, (struct options){.uc = true},
			   (struct extras){.operations = IBV_QP_EX_WITH_SEND_WITH_IMM |
							 IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM});
	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(a.qp);

	fill(a.memory, 200, 1);
	post_receive_at(&b, 1, 8192, 64);
	post_receive_at(&b, 2, 8192, 64);
	qp->wr_start(qp);
	qp->wr_rdma_write_imm(qp, b.mr->rkey, (uintptr_t)b.memory, 5);
	set_sge(qp, &a, 0, 200);
	qp->wr_send_imm(qp, 6);
	set_sge(qp, &a, 0, 64);
	CHECK_OK(qp->wr_complete(qp));
	CHECK_EQUAL(expect_wc(&b, 1, IBV_WC_SUCCESS).imm_data, 5);
	CHECK_EQUAL(expect_wc(&b, 2, IBV_WC_SUCCESS).imm_data, 6);
	CHECK(is_filled(b.memory, 200, 1) && is_filled(b.memory + 8192, 64, 1));
	close_pair(&a, &b);
}

/* Check that IBV_QP_CREATE_BLOCK_SELF_MCAST_LB hides a multicast message from its sender only. */
static void multicast_loopback_can_be_blocked_for_the_sender(void)
{
	const union ibv_gid group = {.raw = {[10] = 0xff, [11] = 0xff, [12] = 239, [15] = 77}};
	struct side a, b;

	open_extended_side(&a, (struct options){.ud = true},
			   (struct extras){.operations = IBV_QP_EX_WITH_SEND,
					   .create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB});
	open_extended_side(&b, (struct options){.ud = true},
			   (struct extras){.operations = IBV_QP_EX_WITH_SEND});
	struct side *sides[] = {&a, &b};

	for (int i = 0; i < 2; i++) {
		ud_bring_up(sides[i], QKEY);
		CHECK_OK(verbs->ibv_attach_mcast(sides[i]->qp, &group, 0));
		for (uint64_t j = 1; j <= 2; j++)
			post_receive_at(sides[i], j, 4096, 4096);
	}
	for (int i = 0; i < 2; i++) { /* a, then b */
		struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(sides[i]->qp);
		struct address to = {.gid = group};
		struct ibv_ah *ah = ud_path(sides[i], &to, 0);

		CHECK(ah);
		qp->wr_start(qp);
		qp->wr_id = 9;
		qp->wr_send(qp);
		qp->wr_set_ud_addr(qp, ah, 0xffffff, QKEY);
		qp->wr_set_inline_data(qp, "hello", 5);
		CHECK_OK(qp->wr_complete(qp));
		expect_wc(sides[i], 9, IBV_WC_SUCCESS);
		CHECK_OK(verbs->ibv_destroy_ah(ah));
		/* b receives both messages, and a receives only b's. */
		CHECK_EQUAL(expect_wc(&b, (uint64_t)i + 1, IBV_WC_SUCCESS).src_qp,
			    sides[i]->qp->qp_num);
	}
	CHECK_EQUAL(expect_wc(&a, 1, IBV_WC_SUCCESS).src_qp, b.qp->qp_num);
	for (int i = 0; i < 2; i++)
		CHECK_OK(verbs->ibv_detach_mcast(sides[i]->qp, &group, 0));
	close_pair(&a, &b);
}

/* Check that the setters copy inline data, so that the caller can reuse the buffer immediately
 * (ibv_wr_post(3)). */
static void inline_data_is_copied_when_set(void)
{
	struct side a, b;
	char first[] = "one ", second[] = "", third[] = "two";
	struct ibv_data_buf list[] = {{first, 4}, {second, 0}, {third, 3}};

	open_extended_pair(
		&a, &b, (struct options){.signal_none = true},
		(struct extras){.operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_READ,
				.inline_data = 16});
	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(a.qp);

	for (unsigned i = 1; i <= 6; i++)
		post_receive_at(&b, i, 64 * i, 64);
	qp->wr_start(qp);
	qp->wr_id = 1;
	/* Exceed the batch's initial capacity, so that its memory moves. */
	for (unsigned i = 0; i < 4; i++) {
		qp->wr_send(qp);
		qp->wr_set_inline_data(qp, first, 3);
		first[0]++;
	}
	first[0] = 'o';
	qp->wr_flags = IBV_SEND_INLINE; /* ignored, because the setter decides */
	qp->wr_send(qp);
	qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.memory, 5);
	memcpy(a.memory, "later", 5);
	qp->wr_flags = IBV_SEND_SIGNALED;
	qp->wr_send(qp);
	qp->wr_set_inline_data_list(qp, 3, list);
	memset(first, 'x', 4);
	memset(third, 'x', 3);
	CHECK_OK(qp->wr_complete(qp));
	expect_wc(&a, 1, IBV_WC_SUCCESS);
	for (unsigned i = 1; i <= 4; i++) {
		CHECK_EQUAL(expect_wc(&b, i, IBV_WC_SUCCESS).byte_len, 3);
		CHECK_EQUAL(b.memory[64 * i], 'o' + i - 1);
	}
	CHECK_EQUAL(expect_wc(&b, 5, IBV_WC_SUCCESS).byte_len, 5);
	CHECK(!memcmp(b.memory + 64 * 5, "later", 5));
	CHECK_EQUAL(expect_wc(&b, 6, IBV_WC_SUCCESS).byte_len, 7);
	/* IBV_SEND_INLINE is also ignored for a READ without data. */
	qp->wr_start(qp);
	qp->wr_id = 7;
	qp->wr_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
	qp->wr_rdma_read(qp, b.mr->rkey, (uintptr_t)b.memory);
	CHECK_OK(qp->wr_complete(qp));
	expect_wc(&a, 7, IBV_WC_SUCCESS);
	CHECK(!memcmp(b.memory + 64 * 6, "one two", 7));
	close_pair(&a, &b);
}

static void inline_data_and_atomic_write_need_no_sge(void)
{
	const uint64_t word = 0x0102030405060708;
	struct side a, b;

	OPEN(&a);
	OPEN(&b);
	struct ibv_qp_init_attr_ex attr = qp_attr_ex(
		&a, (struct extras){.operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_ATOMIC_WRITE,
				    .inline_data = 16});

	CHECK_OK(verbs->ibv_destroy_qp(a.qp));
	attr.cap.max_send_sge = 0;
	CHECK(a.qp = extended(a.context)->create_qp_ex(a.context, &attr));
	CHECK_EQUAL(attr.cap.max_send_sge, 0);
	connect_pair(&a, &b);
	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(a.qp);

	for (unsigned i = 1; i <= 2; i++)
		post_receive_at(&b, i, 64 * i, 64);
	qp->wr_start(qp);
	qp->wr_id = 1;
	qp->wr_send(qp);
	qp->wr_set_inline_data(qp, "by value", 8);
	qp->wr_id = 2;
	qp->wr_atomic_write(qp, b.mr->rkey, (uintptr_t)b.memory, &word);
	qp->wr_id = 3;
	qp->wr_send(qp);
	CHECK_OK(qp->wr_complete(qp));
	for (unsigned i = 1; i <= 3; i++)
		expect_wc(&a, i, IBV_WC_SUCCESS);
	CHECK_EQUAL(expect_wc(&b, 1, IBV_WC_SUCCESS).byte_len, 8);
	CHECK_EQUAL(expect_wc(&b, 2, IBV_WC_SUCCESS).byte_len, 0);
	CHECK(!memcmp(b.memory + 64, "by value", 8));
	CHECK(!memcmp(b.memory, &word, 8));
	/* An explicit SGE exceeds the limit of 0. */
	qp->wr_start(qp);
	qp->wr_send(qp);
	set_sge(qp, &a, 0, 8);
	CHECK_EQUAL(qp->wr_complete(qp), EINVAL);
	CHECK_EQUAL(post(&a, (struct request){.opcode = IBV_WR_SEND,
					      .flags = IBV_SEND_INLINE,
					      .length = 8}),
		    EINVAL);
	close_pair(&a, &b);
}

/* Check that the batch is empty and that none of its requests was posted. */
static void expect_empty_batch(struct side *a, struct side *b)
{
	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(a->qp);

	post_receive_at(b, 5, 0, 64);
	qp->wr_start(qp);
	qp->wr_id = 5;
	qp->wr_flags = 0;
	qp->wr_send(qp);
	CHECK_OK(qp->wr_complete(qp));
	expect_wc(a, 5, IBV_WC_SUCCESS);
	expect_wc(b, 5, IBV_WC_SUCCESS);
}

static void first_error_rejects_the_whole_batch(struct side *a, struct side *b)
{
	struct ibv_sge sges[5] = {{0}};
	uint8_t data[64] = {0};

	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(a->qp);
	struct ibv_data_buf huge = {data, SIZE_MAX};

	CHECK_EQUAL(qp->wr_complete(qp), EINVAL); /* no wr_start */
	qp->wr_send(qp);
	qp->wr_abort(qp);
	expect_empty_batch(a, b);

/* Put a mistake between valid requests. wr_complete must return the first error and post
 * nothing. */
#define MISTAKE(error, ...)                                                                        \
	do {                                                                                       \
		qp->wr_start(qp);                                                                  \
		qp->wr_id = 99;                                                                    \
		qp->wr_send(qp);                                                                   \
		__VA_ARGS__;                                                                       \
		qp->wr_send(qp);                                                                   \
		qp->wr_rdma_write(qp, 1, 1);                                                       \
		CHECK_EQUAL(qp->wr_complete(qp), error);                                           \
		expect_empty_batch(a, b);                                                          \
	} while (0)
	MISTAKE(EOPNOTSUPP, qp->wr_rdma_write(qp, 1, 1));
	MISTAKE(EOPNOTSUPP, qp->wr_rdma_write_imm(qp, 1, 1, 1));
	MISTAKE(EOPNOTSUPP, qp->wr_send_imm(qp, 1));
	MISTAKE(EOPNOTSUPP, qp->wr_send_inv(qp, 1));
	MISTAKE(EOPNOTSUPP, qp->wr_send_tso(qp, NULL, 0, 0));
	MISTAKE(EOPNOTSUPP, qp->wr_atomic_cmp_swp(qp, 1, 1, 1, 1));
	MISTAKE(EOPNOTSUPP, qp->wr_atomic_fetch_add(qp, 1, 1, 1));
	MISTAKE(EOPNOTSUPP, qp->wr_atomic_write(qp, 1, 1, data));
	MISTAKE(EOPNOTSUPP, qp->wr_local_inv(qp, 1));
	MISTAKE(EOPNOTSUPP, qp->wr_bind_mw(qp, NULL, 1, &(struct ibv_mw_bind_info){0}));
	MISTAKE(EINVAL, qp->wr_set_sge_list(qp, 5, sges));
	MISTAKE(EINVAL, qp->wr_set_inline_data(qp, data, 4 * sizeof(struct ibv_sge) + 1));
	MISTAKE(EINVAL, qp->wr_set_inline_data_list(qp, 1, &huge));
	MISTAKE(EINVAL, qp->wr_set_ud_addr(qp, NULL, 1, 1));
	MISTAKE(EINVAL, qp->wr_set_xrc_srqn(qp, 1));
	MISTAKE(EDEADLK, qp->wr_start(qp));
	MISTAKE(ENOMEM, for (int i = 0; i < 8; i++) qp->wr_send(qp)); /* max_send_wr */
#undef MISTAKE

	/* A setter without an operation is an error. */
	qp->wr_start(qp);
	qp->wr_set_sge(qp, 0, 0, 0);
	CHECK_EQUAL(qp->wr_complete(qp), EINVAL);
	/* An error that is only found when posting also rejects the whole batch. */
	qp->wr_start(qp);
	qp->wr_send(qp);
	qp->wr_rdma_read(qp, b->mr->rkey, (uintptr_t)b->memory);
	qp->wr_set_inline_data(qp, data, 4); /* a read cannot be inline */
	CHECK_EQUAL(qp->wr_complete(qp), EINVAL);
	expect_empty_batch(a, b);
	qp->wr_start(qp);
	qp->wr_send(qp);
	qp->wr_abort(qp);
	expect_empty_batch(a, b);
	/* An empty batch is valid. */
	qp->wr_start(qp);
	CHECK_OK(qp->wr_complete(qp));
	expect_empty_batch(a, b);
}

/* Check that posting depends on the queue pair's state, and on space for the whole batch. */
static void batch_needs_the_right_state_and_queue_space(void)
{
	struct side a, b;

	open_extended_side(&a, (struct options){0}, (struct extras){.operations = RC_OPERATIONS});
	OPEN(&b);
	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(a.qp);

	qp->wr_start(qp);
	qp->wr_send(qp);
	CHECK_EQUAL(qp->wr_complete(qp), EINVAL); /* RESET: IBTA 10.3.1.1 */
	connect_pair(&a, &b);
	/* Six requests wait for a receive. The queue has space for two more, but not for three. */
	for (int batch = 0; batch < 2; batch++) {
		qp->wr_start(qp);
		for (int i = 0; i < (batch ? 3 : 6); i++) {
			qp->wr_id = (unsigned)i;
			qp->wr_send(qp);
		}
		CHECK_EQUAL(qp->wr_complete(qp), batch ? ENOMEM : 0);
	}
	post_recvs(&b, 0, 6, 64);
	for (unsigned i = 0; i < 6; i++)
		expect_wc(&a, i, IBV_WC_SUCCESS);
	expect_no_wc(&a);
	/* In ERR, requests are accepted and flushed. */
	enter_state(&a, IBV_QPS_ERR);
	qp->wr_start(qp);
	qp->wr_id = 9;
	qp->wr_send(qp);
	CHECK_OK(qp->wr_complete(qp));
	expect_wc(&a, 9, IBV_WC_WR_FLUSH_ERR);
	close_pair(&a, &b);
}

/* A pair whose sender is shared by two threads. Their batches must not be mixed. */
static struct side sender, receiver;

static void *send_pairs(void *first)
{
	struct ibv_qp_ex *qp = verbs->ibv_qp_to_qp_ex(sender.qp);

	for (int i = 0; i < 100;) {
		qp->wr_start(qp);
		qp->wr_flags = 0;
		for (uintptr_t j = 0; j < 2; j++) {
			uint64_t value = (uintptr_t)first + j;

			qp->wr_id = value;
			qp->wr_send(qp);
			qp->wr_set_inline_data(qp, &value, sizeof(value));
		}
		if (qp->wr_complete(qp) == 0)
			i++;
		else
			sched_yield(); /* queue full */
	}
	return NULL;
}

static void batches_of_two_threads_are_not_mixed(void)
{
	pthread_t senders[2];
	uint64_t value, last = 0;

	open_extended_pair(&sender, &receiver, (struct options){.signal_none = false},
			   (struct extras){.operations = RC_OPERATIONS});
	for (unsigned i = 0; i < 8; i++)
		post_receive_at(&receiver, i, 64 * i, 64);
	for (uintptr_t i = 0; i < 2; i++)
		CHECK_OK(pthread_create(&senders[i], NULL, send_pairs, (void *)(i * 10)));
	for (unsigned i = 0; i < 400; i++) {
		uint64_t at = expect_wc(&receiver, i % 8, IBV_WC_SUCCESS).wr_id;

		memcpy(&value, receiver.memory + 64 * at, sizeof(value));
		CHECK(i % 2 ? value == last + 1 : value % 10 == 0);
		last = value;
		CHECK_EQUAL(next_wc(&sender).status, IBV_WC_SUCCESS);
		post_receive_at(&receiver, at, 64 * at, 64);
	}
	for (int i = 0; i < 2; i++)
		pthread_join(senders[i], NULL);
	close_pair(&sender, &receiver);
}

int main(void)
{
	limit_seconds(60);
	STEP(create_qp_ex_rejects_unsupported_attributes());
	STEP(atomic_write_writes_eight_bytes_and_checks_rights());
	STEP(uc_builders_send_immediate_data());
	STEP(multicast_loopback_can_be_blocked_for_the_sender());
	STEP(inline_data_is_copied_when_set());
	STEP(inline_data_and_atomic_write_need_no_sge());
	EXTENDED_PAIR(first_error_rejects_the_whole_batch,
		      .operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_READ,
		      .inline_data = 16);
	STEP(batch_needs_the_right_state_and_queue_space());
	STEP(batches_of_two_threads_are_not_mixed());
	return 0;
}
