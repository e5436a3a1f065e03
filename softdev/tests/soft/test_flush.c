/* Test RDMA FLUSH (IBTA volume 1, annex A19; ibv_wr_post(3)): the completion of earlier WRITEs, the
 * required access rights, and invalid requests. */
#include "extended_side.h"

#include "adopted_side.h"

enum {
	LENGTH = 1 << 20, /* many frames */
	RIGHTS = ALL_RIGHTS | IBV_ACCESS_FLUSH_GLOBAL,
	OPERATIONS = IBV_QP_EX_WITH_FLUSH | IBV_QP_EX_WITH_RDMA_WRITE,
	/* Rights of a queue pair. No region has the persistent right, as in programs that only
	 * sometimes use persistent memory. */
	EVERYTHING = RIGHTS | IBV_ACCESS_FLUSH_PERSISTENT,
};

struct flush {
	uint32_t rkey;
	uint64_t address;
	size_t length;
	uint8_t types, level;
};

static struct ibv_qp_ex_newer *newer_qp_of(const struct side *side)
{
	return (struct ibv_qp_ex_newer *)verbs->ibv_qp_to_qp_ex(side->qp);
}

static int flush(struct side *side, struct flush what)
{
	struct ibv_qp_ex *qp = &newer_qp_of(side)->before;

	qp->wr_start(qp);
	qp->wr_id = 9;
	qp->wr_flags = IBV_SEND_SIGNALED;
	newer_qp_of(side)->wr_flush(qp, what.rkey, what.address, what.length, what.types,
				    what.level);
	return qp->wr_complete(qp);
}

static void write_all(struct side *side, const struct side *peer)
{
	POST(side, IBV_WR_RDMA_WRITE, .wr_id = 8, .length = LENGTH, REMOTE(peer, 0));
}

/* Connect two sides. The region of `b` may be flushed. */
static void open_flush_pair(struct side *a, struct side *b, struct options options)
{
	options.memory = LENGTH;
	if (!options.rights)
		options.rights = RIGHTS;
	open_extended_side(a, options, (struct extras){.operations = OPERATIONS});
	open_side(b, options);
	dereg(b->mr);
	CHECK(b->mr = verbs->ibv_reg_mr(b->pd, b->memory, LENGTH, RIGHTS));
	connect_pair(a, b);
}

static struct flush flush_of_whole_region(const struct side *side)
{
	return (struct flush){.rkey = side->mr->rkey,
			      .address = (uintptr_t)side->memory,
			      .length = LENGTH,
			      .types = IBV_FLUSH_GLOBAL};
}

/* Check that all earlier WRITEs are complete when a FLUSH completes, and that the FLUSH changes no
 * bytes. */
static void flush_completes_after_earlier_writes(void)
{
	struct side a, b;

	open_flush_pair(&a, &b, (struct options){0});
	for (unsigned i = 1; i < 6; i++) {
		fill(a.memory, LENGTH, i);
		write_all(&a, &b);
		struct flush what = flush_of_whole_region(&b);

		if (i % 2)
			what = (struct flush){.rkey = what.rkey,
					      .address = 1, /* ignored, like the length */
					      .length = SIZE_MAX,
					      .types = IBV_FLUSH_GLOBAL,
					      .level = IBV_FLUSH_MR};
		CHECK_OK(flush(&a, what));
		expect_done(&a, 8);
		CHECK_EQUAL(expect_done(&a, 9).opcode, IBV_WC_FLUSH);
		CHECK(is_filled(b.memory, LENGTH, i));
	}
	/* An empty range is valid anywhere in the region, even at its end. */
	struct flush what = flush_of_whole_region(&b);

	what.address += LENGTH;
	what.length = 0;
	CHECK_OK(flush(&a, what));
	expect_done(&a, 9);
	close_pair(&a, &b);
}

/* Check that each of these requests completes with the expected error and raises the corresponding
 * event at the peer. */
static void flush_without_valid_key_or_right_fails_at_the_peer(void)
{
	enum {
		NO_KEY,
		NO_RIGHT,
		PERSISTENT,
		BEFORE,
		BEHIND,
		NO_KEY_AT_ALL_LEVELS,
		QP_WITHOUT,
		QP_WITHOUT_PERSISTENT,
		COUNT
	};

	for (int way = 0; way < COUNT; way++) {
		struct side a, b;
		bool invalid = way == QP_WITHOUT || way == QP_WITHOUT_PERSISTENT;

		open_flush_pair(&a, &b,
				(struct options){.rights = way == QP_WITHOUT ? ALL_RIGHTS
							   : way == QP_WITHOUT_PERSISTENT
								   ? RIGHTS
								   : EVERYTHING});
		struct flush what = flush_of_whole_region(&b);

		if (way == NO_KEY || way == NO_KEY_AT_ALL_LEVELS)
			what.rkey ^= 1;
		if (way == NO_KEY_AT_ALL_LEVELS)
			what.level = IBV_FLUSH_MR;
		if (way == NO_RIGHT) {
			dereg(b.mr);
			CHECK(b.mr = verbs->ibv_reg_mr(b.pd, b.memory, LENGTH, ALL_RIGHTS));
			what.rkey = b.mr->rkey;
		}
		if (way == PERSISTENT || way == QP_WITHOUT_PERSISTENT)
			what.types |= IBV_FLUSH_PERSISTENT;
		what.address += way == BEHIND ? 1 : way == BEFORE ? (uint64_t)-1 : 0;
		CHECK_OK(flush(&a, what));
		expect_wc(&a, 9, invalid ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_ACCESS_ERR);
		expect_event(&b, invalid ? IBV_EVENT_QP_REQ_ERR : IBV_EVENT_QP_ACCESS_ERR);
		close_pair(&a, &b);
	}
}

/* Test FLUSH requests that cannot be posted, and regions that cannot be registered. */
static void invalid_flush_cannot_be_posted(void)
{
	struct side a, b;
	const struct {
		uint8_t types, level;
	} wrong[] = {{0, 0}, {4, 0}, {IBV_FLUSH_GLOBAL, 2}, {0xff, 0}};

	open_flush_pair(&a, &b, (struct options){0});
	const struct ibv_device_attr_ex device = device_of(a.context);

	CHECK(device.device_cap_flags_ex & UINT64_C(1) << 38);
	CHECK(!(device.device_cap_flags_ex & UINT64_C(1) << 39)); /* persistence */
	CHECK(device.odp_caps.per_transport_caps.rc_odp_caps & IBV_ODP_SUPPORT_FLUSH);
	FOR_EACH (i, wrong) {
		struct flush what = flush_of_whole_region(&b);

		what.types = wrong[i].types;
		what.level = wrong[i].level;
		CHECK_EQUAL(flush(&a, what), EINVAL);
	}
	/* wr_flush() has no effect outside wr_start() and wr_complete(). */
	newer_qp_of(&a)->wr_flush(&newer_qp_of(&a)->before, 1, 1, 1, 0, 0);
	CHECK_EQUAL(post(&a, (struct request){.opcode = IBV_WR_FLUSH}), EOPNOTSUPP);
	/* A FLUSH cannot have data. */
	struct ibv_qp_ex *qp = &newer_qp_of(&a)->before;

	qp->wr_start(qp);
	newer_qp_of(&a)->wr_flush(qp, 1, 1, 1, IBV_FLUSH_GLOBAL, IBV_FLUSH_RANGE);
	qp->wr_set_sge(qp, a.mr->lkey, (uintptr_t)a.memory, 8);
	CHECK_EQUAL(qp->wr_complete(qp), EINVAL);
	/* The device cannot make any memory persistent. */
	REFUSED(verbs->ibv_reg_mr(a.pd, a.memory, LENGTH, EVERYTHING), EOPNOTSUPP);
	/* The length of a range is limited to 1 GiB, like that of a message. */
	struct flush what = flush_of_whole_region(&b);

	what.length = (size_t)3 << 30;
	CHECK_OK(flush(&a, what));
	expect_wc(&a, 9, IBV_WC_LOC_LEN_ERR);
	close_pair(&a, &b);

	static const enum ibv_qp_type without[] = {IBV_QPT_UC, IBV_QPT_UD};

	for (int i = 0; i < 2; i++) {
		OPEN(&a);
		struct ibv_qp_init_attr_ex attr =
			qp_attr_ex(&a, (struct extras){.operations = IBV_QP_EX_WITH_FLUSH});

		attr.qp_type = without[i];
		REFUSED(extended(a.context)->create_qp_ex(a.context, &attr), EOPNOTSUPP);
		close_side(&a);
	}
}

/* ---- frames of a peer that means harm ------------------------------------------------------------ */

static void malformed_flush_frames_are_refused(void)
{
	static const struct {
		uint8_t syndrome;
		uint32_t length;
		uint8_t flags;
		enum soft_nak nak; /* 0 if the stream ends */
	} cases[] = {
		{.syndrome = 0, .nak = SOFT_NAK_INVALID_REQUEST},
		{.syndrome = 8 | IBV_FLUSH_GLOBAL, .nak = SOFT_NAK_INVALID_REQUEST},
		{.syndrome = 2 << SOFT_FLUSH_LEVEL_SHIFT | IBV_FLUSH_GLOBAL,
		 .nak = SOFT_NAK_INVALID_REQUEST},
		{.syndrome = 0xff, .nak = SOFT_NAK_INVALID_REQUEST},
		{.syndrome = IBV_FLUSH_GLOBAL, .nak = SOFT_NAK_REMOTE_ACCESS}, /* invalid key 0 */
		{.syndrome = IBV_FLUSH_GLOBAL, .length = 8},
		{.syndrome = IBV_FLUSH_GLOBAL, .flags = SOFT_FRAME_MORE},
	};

	FOR_EACH (i, cases) {
		struct side side;

		OPEN(&side, .rights = EVERYTHING);
		int fd = adopt(&side);

		send_stream_frame(fd,
				  (struct soft_frame){.opcode = SOFT_FLUSH,
						      .syndrome = cases[i].syndrome,
						      .psn = PEER_PSN,
						      .length = cases[i].length,
						      .flags = cases[i].flags,
						      .dma_length = 8},
				  NULL);
		wait_for_state(&side, IBV_QPS_ERR);
		expect_event(&side, cases[i].nak == SOFT_NAK_INVALID_REQUEST ? IBV_EVENT_QP_REQ_ERR
				    : cases[i].nak ? IBV_EVENT_QP_ACCESS_ERR
						   : IBV_EVENT_QP_FATAL);
		if (cases[i].nak) {
			struct soft_frame frame = receive_stream_frame(fd, NULL, 0);

			CHECK_EQUAL(frame.opcode, SOFT_NAK);
			CHECK_EQUAL(frame.syndrome, cases[i].nak);
		}
		close(fd);
		close_side(&side);
	}
}

int main(void)
{
	limit_seconds(120);
	STEP(flush_completes_after_earlier_writes());
	STEP(flush_without_valid_key_or_right_fails_at_the_peer());
	STEP(invalid_flush_cannot_be_posted());
	STEP(malformed_flush_frames_are_refused());
	return 0;
}
