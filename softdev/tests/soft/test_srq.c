/* Tests of shared receive queues (ibv_create_srq(3), IBTA 10.2.9). See
 * tests/verbs/test_shared_receive_queue.py for the order in which receives are consumed. */
#include "extended_side.h"

enum { SLOT = 64, MOST_QPS = 4 };

/* A side whose queue pairs share one receive queue, and a peer for each queue pair. */
struct star {
	struct side hub; /* hub.qp is qps[0] */
	struct ibv_qp *qps[MOST_QPS];
	struct side peers[MOST_QPS];
	int count;
};

static void open_star(struct star *star, int count, struct options options)
{
	struct options of_peers = options;

	of_peers.shared = 0;
	memset(star, 0, sizeof(*star));
	star->count = count;
	open_side(&star->hub, options);
	for (int i = 0; i < count; i++) {
		star->qps[i] = i ? create_qp(&star->hub) : star->hub.qp;
		star->hub.qp = star->qps[i];
		open_side(&star->peers[i], of_peers);
		connect_pair(&star->hub, &star->peers[i]);
	}
	star->hub.qp = star->qps[0];
}

static void close_star(struct star *star)
{
	for (int i = 0; i < star->count; i++) {
		if (i)
			CHECK_OK(verbs->ibv_destroy_qp(star->qps[i]));
		close_side(&star->peers[i]);
	}
	close_side(&star->hub);
}

static void send_to_hub(struct star *star, int peer, uint64_t wr_id, unsigned seed, uint32_t length)
{
	fill(star->peers[peer].memory, length, seed);
	RUN(&star->peers[peer], IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = wr_id, .length = length);
}

static struct ibv_wc expect_hub_wc(struct star *star, uint64_t wr_id, enum ibv_wc_status status,
				   int qp)
{
	struct ibv_wc wc = next_wc(&star->hub);

	CHECK_EQUAL(wc.wr_id, wr_id);
	CHECK_EQUAL(wc.status, status);
	CHECK_EQUAL(wc.qp_num, star->qps[qp]->qp_num);
	return wc;
}

static struct ibv_srq_attr query_srq(struct ibv_srq *srq)
{
	struct ibv_srq_attr attr;

	CHECK_OK(verbs->ibv_query_srq(srq, &attr));
	return attr;
}

static int set_limit(struct ibv_srq *srq, uint32_t limit)
{
	return verbs->ibv_modify_srq(srq, &(struct ibv_srq_attr){.srq_limit = limit},
				     IBV_SRQ_LIMIT);
}

static int set_max_wr(struct ibv_srq *srq, uint32_t max_wr)
{
	return verbs->ibv_modify_srq(srq, &(struct ibv_srq_attr){.max_wr = max_wr}, IBV_SRQ_MAX_WR);
}

static int set_both(struct ibv_srq *srq, uint32_t max_wr, uint32_t limit)
{
	struct ibv_srq_attr attr = {.max_wr = max_wr, .srq_limit = limit};

	return verbs->ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT);
}

static void expect_sizes(struct ibv_srq *srq, uint32_t max_wr, uint32_t limit)
{
	CHECK_EQUAL(query_srq(srq).max_wr, max_wr);
	CHECK_EQUAL(query_srq(srq).srq_limit, limit);
}

static struct ibv_srq *try_create_srq(struct ibv_pd *pd, uint32_t max_wr, uint32_t max_sge,
				      int error)
{
	struct ibv_srq_init_attr init = {.attr = {.max_wr = max_wr, .max_sge = max_sge}};

	errno = 0;
	struct ibv_srq *srq = verbs->ibv_create_srq(pd, &init);

	CHECK(!srq == (error != 0));
	CHECK_EQUAL(srq ? 0 : errno, error);
	if (srq) {
		CHECK(init.attr.max_wr >= max_wr && init.attr.max_sge >= max_sge);
		CHECK_EQUAL(query_srq(srq).max_wr, init.attr.max_wr);
		CHECK_EQUAL(query_srq(srq).max_sge, init.attr.max_sge);
		CHECK_EQUAL(query_srq(srq).srq_limit, 0);
	}
	return srq;
}

static void create_and_modify_srq_validate_sizes(void)
{
	struct ibv_context *context = open_device();
	struct ibv_device_attr device;
	struct ibv_pd *pd = verbs->ibv_alloc_pd(context);

	CHECK_OK(verbs->ibv_query_device(context, &device));
	CHECK(device.max_srq > 0 && device.max_srq_wr > 0 && device.max_srq_sge > 0);
	CHECK(device.device_cap_flags & IBV_DEVICE_SRQ_RESIZE);
	try_create_srq(pd, 0, 1, EINVAL);
	try_create_srq(pd, (uint32_t)device.max_srq_wr + 1, 1, EINVAL);
	try_create_srq(pd, 1, (uint32_t)device.max_srq_sge + 1, EINVAL);
	CHECK_OK(verbs->ibv_destroy_srq(
		try_create_srq(pd, (uint32_t)device.max_srq_wr, (uint32_t)device.max_srq_sge, 0)));

	struct ibv_srq *srq = try_create_srq(pd, 10, 2, 0);

	CHECK(srq->pd == pd && srq->context == context);
	CHECK_EQUAL(verbs->ibv_dealloc_pd(pd), EBUSY);
	CHECK_EQUAL(set_limit(srq, 11), EINVAL);
	CHECK_OK(set_limit(srq, 10));
	expect_sizes(srq, 10, 10);
	CHECK_EQUAL(set_max_wr(srq, 9), EINVAL); /* smaller than the limit */
	CHECK_EQUAL(set_max_wr(srq, (uint32_t)device.max_srq_wr + 1), EINVAL);
	CHECK_EQUAL(set_max_wr(srq, 0), EINVAL);
	/* One invalid attribute prevents all changes (ibv_modify_srq(3)). */
	CHECK_EQUAL(set_both(srq, 20, 21), EINVAL);
	CHECK_EQUAL(verbs->ibv_modify_srq(srq, &(struct ibv_srq_attr){.srq_limit = 1}, 1 << 5),
		    EINVAL);
	expect_sizes(srq, 10, 10);
	CHECK_OK(set_both(srq, 20, 20));
	expect_sizes(srq, 20, 20);
	CHECK_OK(verbs->ibv_modify_srq(srq, &(struct ibv_srq_attr){0}, 0));
	CHECK_OK(verbs->ibv_destroy_srq(srq));
	CHECK_OK(verbs->ibv_dealloc_pd(pd));
	CHECK_OK(verbs->ibv_close_device(context));
}

static void create_srq_ex_supports_basic_queues_only(struct side *side)
{
	struct verbs_context *more = extended(side->context);
	struct ibv_srq_init_attr_ex init = {
		.srq_context = &init,
		.attr = {.max_wr = 5, .max_sge = 1},
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
		.srq_type = IBV_SRQT_BASIC,
		.pd = side->pd,
	};
	uint32_t number = 0;

	CHECK(side->srq = more->create_srq_ex(side->context, &init));
	CHECK(side->srq->srq_context == &init);
	expect_sizes(side->srq, 5, 0);
	CHECK_OK(more->get_srq_num(side->srq, &number));
	CHECK(number != 0);
	init.srq_type = IBV_SRQT_TM;
	REFUSED(more->create_srq_ex(side->context, &init), EOPNOTSUPP);
	init.srq_type = IBV_SRQT_BASIC;
	init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE;
	REFUSED(more->create_srq_ex(side->context, &init), EINVAL);
}

/* Post invalid receives, and post to a queue pair without its own receive queue. */
static void invalid_receives_are_rejected_when_posted(struct side *side)
{
	struct ibv_sge sges[3] = {{0}};
	struct ibv_recv_wr wrs[4] =
		{
			{.wr_id = 1, .next = &wrs[1], .sg_list = sges, .num_sge = 2},
			{.wr_id = 2, .next = &wrs[2], .sg_list = sges, .num_sge = 3},
			{.wr_id = 3, .next = &wrs[3], .num_sge = -1},
			{.wr_id = 4},
		},
			   *bad = NULL;
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	/* Only the first receive is posted (ibv_post_srq_recv(3)). */
	CHECK_EQUAL(side->context->ops.post_srq_recv(side->srq, wrs, &bad), EINVAL);
	CHECK(bad == &wrs[1]);
	CHECK_EQUAL(side->context->ops.post_srq_recv(side->srq, &wrs[2], &bad), EINVAL);
	CHECK(bad == &wrs[2]);
	CHECK_OK(set_max_wr(side->srq, 1)); /* one receive is outstanding */
	CHECK_EQUAL(side->context->ops.post_srq_recv(side->srq, &wrs[3], &bad), ENOMEM);
	CHECK(bad == &wrs[3]);
	CHECK_OK(set_max_wr(side->srq, 2));
	CHECK_OK(post_recv_wr(side, &wrs[3]));
	CHECK_EQUAL(set_max_wr(side->srq, 1), EINVAL);

	CHECK_OK(to_init(side));
	CHECK_EQUAL(side->context->ops.post_recv(side->qp, &wrs[3], &bad), EINVAL);
	CHECK(bad == &wrs[3]);
	CHECK(side->qp->srq == side->srq);
	CHECK_OK(verbs->ibv_query_qp(side->qp, &attr, IBV_QP_CAP, &init));
	CHECK(init.srq == side->srq);
	CHECK_EQUAL(init.cap.max_recv_wr, 0);
	CHECK_EQUAL(attr.cap.max_recv_sge, 0);
	CHECK_EQUAL(verbs->ibv_destroy_srq(side->srq), EBUSY);
}

/* A queue pair with a shared receive queue ignores its own receive queue sizes (ibv_create_qp(3)).
 * A shared receive queue of another device context is rejected. */
static void qp_ignores_receive_sizes_with_an_srq(void)
{
	struct side a, b;
	struct ibv_qp_init_attr init;

	OPEN(&a, .shared = 1);
	OPEN(&b, .shared = 1);
	init = (struct ibv_qp_init_attr){
		.send_cq = a.cq,
		.recv_cq = a.cq,
		.srq = a.srq,
		.cap = {.max_send_wr = 1, .max_recv_wr = UINT32_MAX, .max_recv_sge = UINT32_MAX},
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp = verbs->ibv_create_qp(a.pd, &init);

	CHECK(qp);
	CHECK_OK(verbs->ibv_destroy_qp(qp));
	init.srq = b.srq;
	REFUSED(verbs->ibv_create_qp(a.pd, &init), EINVAL);
	close_pair(&a, &b);
}

static bool acknowledged_now; /* atomic */

static void *acknowledge_later(void *event)
{
	/* Delay the acknowledgement, so that a call that destroys the queue without waiting for it
	 * would return first. */
	nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
	__atomic_store_n(&acknowledged_now, true, __ATOMIC_SEQ_CST);
	verbs->ibv_ack_async_event(event);
	return NULL;
}

/* Destroying a queue waits until its events have been acknowledged (ibv_get_async_event(3)). */
static void destroy_srq_waits_for_unacknowledged_events(void)
{
	struct ibv_async_event event;
	struct star star;
	pthread_t thread;

	open_star(&star, 1, (struct options){.shared = 1});
	post_receive_at(&star.hub, 0, 0, SLOT);
	CHECK_OK(set_limit(star.hub.srq, 1));
	send_to_hub(&star, 0, 0, 1, 8);
	CHECK_OK(verbs->ibv_get_async_event(star.hub.context, &event));
	CHECK_EQUAL(star.hub.srq->events_completed, 0);
	CHECK_OK(pthread_create(&thread, NULL, acknowledge_later, &event));
	close_star(&star); /* hangs without the acknowledgement */
	CHECK(__atomic_load_n(&acknowledged_now, __ATOMIC_SEQ_CST));
	CHECK_OK(pthread_join(thread, NULL));
}

/* A queue pair that fails in the middle of a message flushes the receive in use. The limit event
 * shows that the message has begun. Repeat the test if the message ends too early. */
static void failed_qp_flushes_the_receive_in_use(void)
{
	enum { BIG = 64 << 20 };
	struct ibv_wc wc;
	int rounds = 0;

	do {
		struct star star;

		CHECK(++rounds < 20);
		open_star(&star, 2, (struct options){.shared = 4, .memory = BIG});
		post_receive_at(&star.hub, 1, 0, BIG);
		post_receive_at(&star.hub, 2, 0, SLOT);
		CHECK_OK(set_limit(star.hub.srq, 2));
		POST(&star.peers[0], IBV_WR_SEND, .wr_id = 9, .length = BIG);
		expect_event(&star.hub, IBV_EVENT_SRQ_LIMIT_REACHED);
		enter_state(&star.hub, IBV_QPS_ERR);
		expect_event(&star.hub, IBV_EVENT_QP_LAST_WQE_REACHED);
		enter_state(&star.hub, IBV_QPS_ERR);
		expect_no_event(&star.hub); /* already in ERR */
		wc = next_wc(&star.hub);
		CHECK_EQUAL(wc.wr_id, 1);
		CHECK_EQUAL(wc.qp_num, star.qps[0]->qp_num);
		send_to_hub(&star, 1, 9, 3, 16);
		expect_hub_wc(&star, 2, IBV_WC_SUCCESS, 1);
		close_star(&star);
	} while (wc.status == IBV_WC_SUCCESS);
	CHECK_EQUAL(wc.status, IBV_WC_WR_FLUSH_ERR);
}

/* The keys of receives belong to the shared queue's protection domain (IBTA 10.2.9.1). */
static void receive_keys_belong_to_the_srq_domain(void)
{
	for (int own = 0; own < 2; own++) {
		struct side a, b;

		OPEN(&a);
		OPEN(&b);
		struct ibv_pd *pd = verbs->ibv_alloc_pd(b.context);
		struct ibv_mr *mr = verbs->ibv_reg_mr(pd, b.memory, 4096, IBV_ACCESS_LOCAL_WRITE);

		CHECK_OK(verbs->ibv_destroy_qp(b.qp));
		b.srq = try_create_srq(pd, 2, 1, 0);
		b.qp = create_qp(&b);
		connect_pair(&a, &b);
		struct ibv_sge sge = {.addr = (uintptr_t)b.memory,
				      .length = SLOT,
				      .lkey = own ? mr->lkey : b.mr->lkey};
		struct ibv_recv_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1};

		CHECK_OK(post_recv_wr(&b, &wr));
		RUN(&a, own ? IBV_WC_SUCCESS : IBV_WC_REM_OP_ERR, IBV_WR_SEND, .wr_id = 2,
		    .length = 8);
		expect_wc(&b, 1, own ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR);
		destroy_qp(&b);
		CHECK_OK(verbs->ibv_destroy_srq(b.srq));
		b.srq = NULL;
		CHECK_OK(verbs->ibv_dereg_mr(mr));
		CHECK_OK(verbs->ibv_dealloc_pd(pd));
		close_pair(&a, &b);
	}
}

/* ---- threads ------------------------------------------------------------------------------- */

enum { MESSAGES = 500 };

static void *send_many(void *of)
{
	struct side *side = of;

	for (uint64_t i = 0; i < MESSAGES; i++) {
		memcpy(side->memory, &i, sizeof(i));
		RUN(side, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = i, .length = sizeof(i));
	}
	return NULL;
}

static void *post_many(void *of)
{
	struct side *side = of;

	for (uint64_t i = 0; i < MESSAGES;) {
		int rc = post_recv_at(side, 0, 0, SLOT);

		if (rc == 0)
			i++;
		else
			sched_yield();
		CHECK(rc == 0 || rc == ENOMEM);
	}
	return NULL;
}

static void srq_survives_concurrent_post_consume_and_resize(void)
{
	pthread_t senders[MOST_QPS], posters[MOST_QPS];
	int got[MOST_QPS] = {0};
	struct star star;

	/* The completion queue has room for all completions, so posting never waits for the polling
	 * thread. */
	open_star(&star, MOST_QPS, (struct options){.shared = 7, .cqe = MOST_QPS * MESSAGES});
	for (int i = 0; i < MOST_QPS; i++) {
		CHECK_OK(pthread_create(&senders[i], NULL, send_many, &star.peers[i]));
		CHECK_OK(pthread_create(&posters[i], NULL, post_many, &star.hub));
	}
	for (unsigned i = 0; i < MOST_QPS * MESSAGES; i++) {
		struct ibv_wc wc = next_wc(&star.hub);
		int qp = 0;

		CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
		while (star.qps[qp]->qp_num != wc.qp_num)
			CHECK(++qp < MOST_QPS);
		got[qp]++;
		if (i % 50 == 0)
			set_max_wr(star.hub.srq, 7 + i % 3);
	}
	for (int i = 0; i < MOST_QPS; i++) {
		CHECK_OK(pthread_join(senders[i], NULL));
		CHECK_OK(pthread_join(posters[i], NULL));
		CHECK_EQUAL(got[i], MESSAGES);
	}
	close_star(&star);
}

int main(void)
{
	limit_seconds(90);
	STEP(create_and_modify_srq_validate_sizes());
	SIDE(create_srq_ex_supports_basic_queues_only);
	SIDE(invalid_receives_are_rejected_when_posted, .shared = 3, .sges = 2);
	STEP(qp_ignores_receive_sizes_with_an_srq());
	STEP(destroy_srq_waits_for_unacknowledged_events());
	STEP(failed_qp_flushes_the_receive_in_use());
	STEP(receive_keys_belong_to_the_srq_domain());
	STEP(srq_survives_concurrent_post_consume_and_resize());
	return 0;
}
