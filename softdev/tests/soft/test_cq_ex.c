/* Test extended completion queues (ibv_create_cq_ex(3)), moderation (ibv_modify_cq(3)), and the
 * extended queries. */
#include "extended_side.h"

static void extended_queries_fill_only_the_given_struct_size(void)
{
	struct ibv_context *context = open_device();
	struct verbs_context *ex = extended(context);
	struct ibv_query_device_ex_input input = {0};
	struct {
		struct ibv_device_attr_ex attr;
		uint8_t after[16];
	} device;
	struct {
		struct ibv_port_attr attr;
		uint8_t after[16];
	} port;
	struct ibv_device_attr plain;

	CHECK_OK(verbs->ibv_query_device(context, &plain));
	memset(&device, 0xee, sizeof(device));
	CHECK_OK(ex->query_device_ex(context, &input, &device.attr, sizeof(device.attr)));
	CHECK(!memcmp(&device.attr.orig_attr, &plain, sizeof(plain)));
	CHECK_EQUAL(device.attr.phys_port_cnt_ex, 1);
	CHECK(device.attr.completion_timestamp_mask == UINT64_MAX);
	CHECK_EQUAL(device.attr.hca_core_clock, 1000000);
	CHECK_EQUAL(device.attr.cq_mod_caps.max_cq_count, 65535);
	CHECK_EQUAL(device.attr.cq_mod_caps.max_cq_period, 65535);
	CHECK_EQUAL(device.attr.comp_mask, 0);
	CHECK_EQUAL(device.after[0], 0xee);

	/* An older or newer caller passes a shorter or longer struct. */
	memset(&device, 0xee, sizeof(device));
	CHECK_OK(ex->query_device_ex(context, NULL, &device.attr,
				     offsetof(struct ibv_device_attr_ex, hca_core_clock)));
	CHECK(device.attr.completion_timestamp_mask == UINT64_MAX);
	CHECK(device.attr.hca_core_clock == 0xeeeeeeeeeeeeeeeeu);
	CHECK_OK(ex->query_device_ex(context, NULL, &device.attr, sizeof(device)));
	CHECK_EQUAL(device.after[0], 0);
	CHECK_EQUAL(ex->query_device_ex(context, NULL, &device.attr, sizeof(plain) - 1), EINVAL);
	input.comp_mask = 1;
	CHECK_EQUAL(ex->query_device_ex(context, &input, &device.attr, sizeof(device.attr)),
		    EINVAL);

	memset(&port, 0xee, sizeof(port));
	CHECK_OK(ex->query_port(context, 1, &port.attr, sizeof(port.attr)));
	CHECK_EQUAL(port.attr.state, IBV_PORT_ACTIVE);
	CHECK_EQUAL(port.attr.port_cap_flags2, 0);
	CHECK_EQUAL(port.after[0], 0xee);
	CHECK_OK(ex->query_port(context, 1, &port.attr, sizeof(port)));
	CHECK_EQUAL(port.after[0], 0);
	CHECK_EQUAL(ex->query_port(context, 2, &port.attr, sizeof(port.attr)), EINVAL);

	struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK | 0x80};
	uint64_t before = now_ns(CLOCK_MONOTONIC);

	CHECK_OK(ex->query_rt_values(context, &values));
	CHECK_EQUAL(values.comp_mask, IBV_VALUES_MASK_RAW_CLOCK); /* supported values only */
	CHECK_EQUAL(values.raw_clock.tv_sec, 0);
	CHECK((uint64_t)values.raw_clock.tv_nsec >= before &&
	      (uint64_t)values.raw_clock.tv_nsec <= now_ns(CLOCK_MONOTONIC));
	CHECK_OK(verbs->ibv_close_device(context));
}

static struct ibv_cq_ex *try_create_cq(struct ibv_context *context, struct ibv_cq_init_attr_ex attr,
				       int error)
{
	errno = 0;
	struct ibv_cq_ex *cq = extended(context)->create_cq_ex(context, &attr);

	CHECK(!cq == (error != 0));
	CHECK_EQUAL(cq ? 0 : errno, error);
	return cq;
}

static void create_cq_ex_rejects_unsupported_attributes(void)
{
	struct ibv_context *context = open_device();
	struct ibv_cq_init_attr_ex attr = {.cqe = 4};

	static const struct {
		uint64_t wc_flags;
		uint32_t comp_mask, flags, cqe, comp_vector;
		int error;
	} refused[] = {
		{IBV_WC_EX_WITH_CVLAN, 0, 0, 4, 0, EOPNOTSUPP},
		{IBV_WC_EX_WITH_FLOW_TAG, 0, 0, 4, 0, EOPNOTSUPP},
		{IBV_WC_EX_WITH_TM_INFO, 0, 0, 4, 0, EOPNOTSUPP},
		{1 << 12, 0, 0, 4, 0, EOPNOTSUPP},
		{0, IBV_CQ_INIT_ATTR_MASK_FLAGS, 1 << 2, 4, 0, EOPNOTSUPP},
		{0, 1 << 5, 0, 4, 0, EINVAL},
		{0, 0, 0, 0, 0, EINVAL},
		{0, 0, 0, UINT32_MAX, 0, EINVAL},
		{0, 0, 0, 4, INT32_MAX, EINVAL},
		{0, 0, 0, 4, UINT32_MAX, EINVAL},
	};

	FOR_EACH (i, refused)
		try_create_cq(context,
			      (struct ibv_cq_init_attr_ex){.cqe = refused[i].cqe,
							   .comp_vector = refused[i].comp_vector,
							   .wc_flags = refused[i].wc_flags,
							   .comp_mask = refused[i].comp_mask,
							   .flags = refused[i].flags},
			      refused[i].error);
	attr.flags = UINT32_MAX; /* ignored unless comp_mask contains its bit */
	struct ibv_cq_ex *bare = try_create_cq(context, attr, 0);

	CHECK(bare->read_opcode && bare->read_vendor_err && bare->read_wc_flags);
	CHECK(!bare->read_byte_len && !bare->read_completion_ts && !bare->read_imm_data);
	CHECK_EQUAL(bare->cqe, 4);
	attr.wc_flags = IBV_WC_STANDARD_FLAGS;
	struct ibv_cq_ex *usual = try_create_cq(context, attr, 0);

	CHECK(usual->read_byte_len && !usual->read_completion_ts && !usual->read_cvlan);
	CHECK_EQUAL(usual->start_poll(usual, &(struct ibv_poll_cq_attr){.comp_mask = 1}), EINVAL);
	CHECK_EQUAL(usual->start_poll(usual, &(struct ibv_poll_cq_attr){0}), ENOENT);
	CHECK_OK(verbs->ibv_destroy_cq((struct ibv_cq *)bare));
	CHECK_OK(verbs->ibv_destroy_cq((struct ibv_cq *)usual));
	CHECK_OK(verbs->ibv_close_device(context));
}

static int start_poll_when_ready(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr attr = {0};
	int rc;

	while ((rc = cq->start_poll(cq, &attr)) == ENOENT)
		sched_yield();
	return rc;
}

static int next_poll_when_ready(struct ibv_cq_ex *cq)
{
	int rc;

	while ((rc = cq->next_poll(cq)) == ENOENT)
		sched_yield();
	return rc;
}

static void send_with_imm(struct side *from, uint64_t wr_id, uint32_t number)
{
	POST(from, IBV_WR_SEND_WITH_IMM, .wr_id = wr_id, .length = (uint32_t)wr_id, .imm = number);
}

static void extended_poll_reads_every_completion_field(struct side *a, struct side *b)
{
	struct ibv_poll_cq_attr attr = {0};

	struct ibv_cq_ex *cq = as_extended(b->cq);
	uint64_t before = now_ns(CLOCK_MONOTONIC), wall_before = now_ns(CLOCK_REALTIME);
	uint64_t last = before;

	for (unsigned i = 1; i <= 3; i++) {
		post_receive_at(b, 100 + i, 0, 4096);
		send_with_imm(a, i, 0x01020300 + i);
		expect_done(a, i);
	}
	CHECK_OK(start_poll_when_ready(cq));
	CHECK_EQUAL(cq->start_poll(cq, &attr), EDEADLK); /* an error instead of a deadlock */
	for (unsigned i = 1; i <= 3; i++) {
		CHECK_EQUAL(cq->wr_id, 100 + i);
		CHECK_EQUAL(cq->status, IBV_WC_SUCCESS);
		CHECK_EQUAL(cq->read_opcode(cq), IBV_WC_RECV);
		CHECK_EQUAL(cq->read_byte_len(cq), i);
		CHECK_EQUAL(cq->read_imm_data(cq), 0x01020300 + i);
		CHECK_EQUAL(cq->read_wc_flags(cq), IBV_WC_WITH_IMM);
		CHECK_EQUAL(cq->read_qp_num(cq), b->qp->qp_num);
		CHECK_EQUAL(cq->read_src_qp(cq), a->qp->qp_num);
		CHECK_EQUAL(cq->read_vendor_err(cq), 0);
		CHECK_EQUAL(cq->read_slid(cq) | cq->read_sl(cq) | cq->read_dlid_path_bits(cq), 0);
		CHECK(cq->read_completion_ts(cq) >= last);
		last = cq->read_completion_ts(cq);
		CHECK(cq->read_completion_wallclock_ns(cq) >= wall_before);
		/* Between start_poll and end_poll, the application may post work, and the device
		 * may add completions. */
		post_receive_at(b, 200 + i, 0, 4096);
		POST(b, IBV_WR_RDMA_WRITE, .wr_id = 7, REMOTE(a, 0));
		CHECK_OK(next_poll_when_ready(cq));
	}
	/* The completions of the WRITEs follow those of the receives. */
	for (unsigned i = 1; i <= 3; i++) {
		CHECK_EQUAL(cq->wr_id, 7);
		CHECK_EQUAL(cq->read_opcode(cq), IBV_WC_RDMA_WRITE);
		CHECK_EQUAL(i < 3 ? next_poll_when_ready(cq) : cq->next_poll(cq),
			    i < 3 ? 0 : ENOENT);
	}
	CHECK(last <= now_ns(CLOCK_MONOTONIC));
	cq->end_poll(cq);
	CHECK_EQUAL(cq->start_poll(cq, &attr), ENOENT);
}

/* ibv_cq_ex_to_cq() is only a cast, so the basic calls must work on an extended CQ. Each completion
 * is returned once, through either interface. */
static void basic_calls_work_on_an_extended_cq(struct side *a, struct side *b)
{
	struct ibv_cq *found;
	void *context;

	struct ibv_cq_ex *cq = as_extended(b->cq);

	CHECK_OK(b->context->ops.req_notify_cq(b->cq, 0));
	for (unsigned i = 1; i <= 4; i++) {
		post_receive_at(b, i, 0, 64);
		send_with_imm(a, i, 0);
		expect_done(a, i);
	}
	CHECK_OK(verbs->ibv_get_cq_event(b->channel, &found, &context));
	CHECK(found == b->cq && context == b);
	verbs->ibv_ack_cq_events(found, 1);
	CHECK_EQUAL(verbs->ibv_resize_cq(b->cq, 3), EINVAL);
	CHECK_OK(verbs->ibv_resize_cq(b->cq, 100));
	CHECK_EQUAL(cq->cqe, 100);
	expect_done(b, 1);
	CHECK_OK(start_poll_when_ready(cq));
	CHECK_EQUAL(cq->wr_id, 2);
	uint64_t second = cq->read_completion_ts(cq);

	CHECK(second > 0); /* timestamp preserved by the resize */
	expect_done(b, 3);
	CHECK_OK(cq->next_poll(cq));
	CHECK_EQUAL(cq->wr_id, 4);
	CHECK(cq->read_completion_ts(cq) >= second);
	cq->end_poll(cq);
}

static void overrun_loses_oldest_completions_or_stops_the_cq(void)
{
	struct side a, b;

	/* If overruns are ignored, the oldest completions are lost without an error. */
	open_extended_pair(&a, &b, (struct options){0},
			   (struct extras){.cqe = 2,
					   .cq_flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN |
						       IBV_CREATE_CQ_ATTR_SINGLE_THREADED});
	for (unsigned i = 1; i <= 5; i++) {
		post_receive_at(&b, i, 0, 64);
		send_with_imm(&a, i, 0);
		expect_done(&a, i);
	}
	struct ibv_cq_ex *cq = as_extended(b.cq);

	CHECK_OK(start_poll_when_ready(cq));
	CHECK_EQUAL(cq->wr_id, 4);
	CHECK_OK(cq->next_poll(cq));
	CHECK_EQUAL(cq->wr_id, 5);
	CHECK_EQUAL(cq->next_poll(cq), ENOENT);
	cq->end_poll(cq);
	expect_state(&b, IBV_QPS_RTS);
	close_pair(&a, &b);

	/* If overruns are not ignored, the stored completions are returned first. After that,
	 * start_poll fails and needs no end_poll. */
	open_extended_pair(&a, &b, (struct options){0}, (struct extras){.cqe = 1});
	post_receive_at(&b, 1, 0, 64);
	post_receive_at(&b, 2, 0, 64);
	send_with_imm(&a, 1, 0);
	expect_done(&a, 1);
	send_with_imm(&a, 2, 0);
	expect_event(&b, IBV_EVENT_CQ_ERR);
	cq = as_extended(b.cq);
	CHECK_OK(start_poll_when_ready(cq));
	CHECK_EQUAL(cq->wr_id, 1);
	cq->end_poll(cq);
	CHECK_EQUAL(start_poll_when_ready(cq), EIO);
	CHECK_EQUAL(start_poll_when_ready(cq), EIO);
	close_pair(&a, &b);
}

/* ---- moderation ---------------------------------------------------------------------------- */

static int moderate(struct side *side, uint16_t count, uint16_t period)
{
	struct ibv_modify_cq_attr attr = {IBV_CQ_ATTR_MODERATE, {count, period}};

	return extended(side->context)->modify_cq(side->cq, &attr);
}

static bool has_event(struct side *side)
{
	struct pollfd fd = {.fd = side->channel->fd, .events = POLLIN};

	CHECK(poll(&fd, 1, 0) >= 0);
	return fd.revents;
}

static void take_event(struct side *side)
{
	struct ibv_cq *cq;
	void *context;

	CHECK_OK(verbs->ibv_get_cq_event(side->channel, &cq, &context));
	verbs->ibv_ack_cq_events(cq, 1);
	CHECK_OK(side->context->ops.req_notify_cq(side->cq, 0));
}

/* Send a message from `a` to `b`, and leave the receive's completion in the CQ. */
static void deliver_message(struct side *a, struct side *b)
{
	post_receive_at(b, 1, 0, 64);
	DO(a, IBV_WR_SEND, .wr_id = 1, .length = 1);
}

static void moderation_delays_events_by_count_and_period(void)
{
	const uint16_t never = 65535; /* microseconds; longer than the steps below take */
	struct ibv_modify_cq_attr attr = {.attr_mask = 2};
	struct side a, b;

	OPEN_PAIR(&a, &b);
	CHECK_EQUAL(extended(b.context)->modify_cq(b.cq, &attr), EINVAL);
	CHECK_OK(b.context->ops.req_notify_cq(b.cq, 0));

	/* The third completion reaches the count and raises an event. */
	CHECK_OK(moderate(&b, 3, never));
	uint64_t begin = now_ns(CLOCK_MONOTONIC);

	deliver_message(&a, &b);
	deliver_message(&a, &b);
	bool early = has_event(&b);

	CHECK(!early || now_ns(CLOCK_MONOTONIC) - begin > never * 1000u);
	deliver_message(&a, &b);
	CHECK(has_event(&b));
	take_event(&b);

	/* A single completion raises an event when the period has elapsed. */
	CHECK_OK(moderate(&b, 100, 20000));
	begin = now_ns(CLOCK_MONOTONIC);
	deliver_message(&a, &b);
	take_event(&b);
	CHECK(now_ns(CLOCK_MONOTONIC) - begin >= 20000 * 1000u);

	/* Changing the moderation raises the delayed event. */
	CHECK_OK(moderate(&b, 100, never));
	deliver_message(&a, &b);
	CHECK_OK(moderate(&b, 0, 0));
	CHECK(has_event(&b));
	take_event(&b);

	/* Moderation is off unless both the count and the period are set. */
	CHECK_OK(moderate(&b, 100, 0));
	deliver_message(&a, &b);
	CHECK(has_event(&b));
	take_event(&b);
	CHECK_OK(moderate(&b, 0, never));
	deliver_message(&a, &b);
	CHECK(has_event(&b));
	take_event(&b);

	/* Destroy a CQ while its event is delayed. Its period is shorter than that of the other CQ,
	 * so a timer left behind would expire during the test. */
	struct side c, d;

	OPEN_PAIR(&c, &d);
	CHECK_OK(d.context->ops.req_notify_cq(d.cq, 0));
	CHECK_OK(moderate(&d, 100, 20000));
	CHECK_OK(moderate(&b, 100, 5000));
	deliver_message(&a, &b);
	close_pair(&a, &b);
	deliver_message(&c, &d);
	take_event(&d);
	close_pair(&c, &d);
}

int main(void)
{
	limit_seconds(60);
	STEP(extended_queries_fill_only_the_given_struct_size());
	STEP(create_cq_ex_rejects_unsupported_attributes());
	EXTENDED_PAIR(extended_poll_reads_every_completion_field,
		      .wc_flags = IBV_WC_STANDARD_FLAGS | all_times);
	EXTENDED_PAIR(basic_calls_work_on_an_extended_cq,
		      .wc_flags = IBV_WC_EX_WITH_BYTE_LEN | all_times, .cqe = 8);
	STEP(overrun_loses_oldest_completions_or_stops_the_cq());
	STEP(moderation_delays_events_by_count_and_period());
	return 0;
}
