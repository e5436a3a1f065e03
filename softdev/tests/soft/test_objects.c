/* Test devices, ports, GIDs, protection domains, memory regions, CQs and their events: what the
 * calls return, when they fail, and when they wait. */
#define _GNU_SOURCE /* unshare */
#include <sched.h>

#include "extended_side.h"

#include "objects/objects.h"

/* Check that all processes in a network namespace have the same GUID, and that another namespace
 * with the same host name has a different one. */
static void guid_identifies_the_network_namespace(void)
{
	struct ibv_context *context = open_device();
	const uint64_t guid = verbs->ibv_get_device_guid(context->device);

	pid_t child = fork_asleep();

	if (!child) {
		CHECK(verbs->ibv_get_device_guid(context->device) == guid);
		if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET))
			fprintf(stderr, "test_objects: needs a network namespace: "
					"guid_identifies_the_network_namespace left out\n");
		else
			CHECK(verbs->ibv_get_device_guid(context->device) != guid);
		_exit(0);
	}
	expect_exit_success(child);
	CHECK_OK(verbs->ibv_close_device(context));
}

static void device_and_port_queries_return_expected_values(void)
{
	struct ibv_context *context = open_device();
	struct ibv_device_attr device;
	struct {
		struct ibv_port_attr attr;
	} port;
	union ibv_gid gid;
	uint16_t pkey;

	CHECK(!strcmp(verbs->ibv_get_device_name(context->device), "embedded0"));
	CHECK_EQUAL(context->device->node_type, IBV_NODE_CA);
	CHECK_EQUAL(context->device->transport_type, IBV_TRANSPORT_IB);
	CHECK(context->cmd_fd >= 0);
	CHECK(context->async_fd >= 0);
	long processors = sysconf(_SC_NPROCESSORS_ONLN);

	CHECK_EQUAL(context->num_comp_vectors, processors > 2 ? processors : 2);
	CHECK(context->abi_compat == AIORDMA_ABI_EXTENDED);
	CHECK_OK(verbs->ibv_query_device(context, &device));
	CHECK_EQUAL(device.phys_port_cnt, 1);
	CHECK(device.max_qp_wr >= 4096 && device.max_sge >= 16 && device.max_cqe >= 65536);
	CHECK(device.node_guid == verbs->ibv_get_device_guid(context->device));

	/* The older struct does not include port_cap_flags2, so the call must not write it. */
	memset(&port, 0xee, sizeof(port));
	CHECK_OK(verbs->ibv_query_port(context, 1, (void *)&port.attr));
	CHECK_EQUAL(port.attr.port_cap_flags2, 0xeeee);
	CHECK_EQUAL(port.attr.state, IBV_PORT_ACTIVE);
	CHECK_EQUAL(port.attr.link_layer, IBV_LINK_LAYER_ETHERNET);
	CHECK_EQUAL(port.attr.active_mtu, IBV_MTU_4096);
	CHECK_EQUAL(port.attr.active_width, 2);
	CHECK_EQUAL(port.attr.active_speed, 64);
	CHECK(port.attr.lid && port.attr.lid < 0xc000); /* not a multicast LID */
	CHECK(port.attr.gid_tbl_len >= 1);
	CHECK_EQUAL(verbs->ibv_query_port(context, 0, (void *)&port.attr), EINVAL);
	CHECK_EQUAL(verbs->ibv_query_port(context, 2, (void *)&port.attr), EINVAL);

	CHECK_FAILS(verbs->ibv_query_gid(context, 1, port.attr.gid_tbl_len, &gid), EINVAL);
	CHECK_FAILS(verbs->ibv_query_gid(context, 1, -1, &gid), EINVAL);
	CHECK_FAILS(verbs->ibv_query_gid(context, 2, 0, &gid), EINVAL);
	CHECK_OK(verbs->ibv_query_pkey(context, 1, 0, &pkey));
	CHECK_EQUAL(pkey, 0xffff);
	CHECK_FAILS(verbs->ibv_query_pkey(context, 1, 1, &pkey), EINVAL);

	struct ibv_gid_entry entries[255];
	ssize_t count = verbs->_ibv_query_gid_table(context, entries, 255, 0, sizeof(entries[0]));

	CHECK_EQUAL(count, port.attr.gid_tbl_len);
	for (ssize_t i = 0; i < count; i++) {
		struct ibv_gid_entry entry;

		CHECK_EQUAL(entries[i].gid_index, i);
		CHECK_EQUAL(entries[i].gid_type, IBV_GID_TYPE_ROCE_V2);
		CHECK_OK(verbs->_ibv_query_gid_ex(context, 1, (uint32_t)i, &entry, 0,
						  sizeof(entry)));
		CHECK(!memcmp(&entry, &entries[i], sizeof(entry)));
		CHECK_OK(verbs->ibv_query_gid(context, 1, (int)i, &gid));
		CHECK(!memcmp(&gid, &entry.gid, sizeof(gid)));
	}
	CHECK_EQUAL(verbs->_ibv_query_gid_table(context, entries, 0, 0, sizeof(entries[0])),
		    -EINVAL);
	CHECK_EQUAL(verbs->_ibv_query_gid_ex(context, 1, 255, entries, 0, sizeof(entries[0])),
		    EINVAL);
	CHECK_EQUAL(verbs->_ibv_query_gid_ex(context, 1, 0, entries, 1, sizeof(entries[0])),
		    EINVAL);
	CHECK_OK(verbs->ibv_close_device(context));
}

static void reg_mr_rejects_invalid_memory_and_returns_unique_keys(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = verbs->ibv_alloc_pd(context);
	uint8_t *memory =
		mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK_OK(munmap(memory + 4096, 4096));
	CHECK_OK(mprotect(memory + 2 * 4096, 4096, PROT_READ));
	const struct {
		size_t offset, length;
		int access, error;
	} refused[] = {
		{0, 0, 0, EINVAL},
		{0, 4096, IBV_ACCESS_REMOTE_WRITE, EINVAL}, /* ibv_reg_mr(3) */
		{0, 4096, IBV_ACCESS_REMOTE_ATOMIC, EINVAL},
		{0, 4096, 1 << 15, EINVAL},
		{0, 4097, IBV_ACCESS_LOCAL_WRITE, EFAULT},
		{4096, 1, 0, EFAULT},
		{0, SIZE_MAX, 0, EINVAL},
		{8192, 4096, IBV_ACCESS_LOCAL_WRITE, EFAULT},
	};

	FOR_EACH (i, refused)
		REFUSED(verbs->ibv_reg_mr(pd, memory + refused[i].offset, refused[i].length,
					  refused[i].access),
			refused[i].error);
	struct ibv_mr *mrs[200];

	CHECK(mrs[0] = verbs->ibv_reg_mr(pd, memory + 8192, 4096, IBV_ACCESS_REMOTE_READ));
	for (int i = 1; i < 200; i++)
		CHECK(mrs[i] = verbs->ibv_reg_mr(pd, memory, 4096,
						 ALL_RIGHTS | IBV_ACCESS_RELAXED_ORDERING));
	CHECK(mrs[1]->addr == memory && mrs[1]->length == 4096 && mrs[1]->pd == pd);
	for (int i = 0; i < 200; i++)
		for (int j = 0; j < i; j++)
			CHECK(mrs[i]->rkey != mrs[j]->rkey && mrs[i]->lkey != mrs[j]->lkey);
	CHECK_EQUAL(verbs->ibv_dealloc_pd(pd), EBUSY);
	for (int i = 0; i < 200; i++)
		CHECK_OK(verbs->ibv_dereg_mr(mrs[i * 77 % 200]));
	CHECK_OK(verbs->ibv_dealloc_pd(pd));
	CHECK_OK(verbs->ibv_close_device(context));
}

static void create_calls_reject_invalid_attributes(struct side *a)
{
	struct ibv_qp_init_attr init;

	static const struct {
		int cqe, vector;
	} no_cqs[] = {{0, 0}, {1 << 30, 0}, {1, 99}, {1, -1}};

	FOR_EACH (i, no_cqs)
		REFUSED(verbs->ibv_create_cq(a->context, no_cqs[i].cqe, NULL, NULL,
					     no_cqs[i].vector),
			EINVAL);
	/* Objects in use cannot be destroyed. */
	CHECK_EQUAL(verbs->ibv_destroy_cq(a->cq), EBUSY);
	CHECK_EQUAL(verbs->ibv_dealloc_pd(a->pd), EBUSY);
	CHECK_EQUAL(verbs->ibv_destroy_comp_channel(a->channel), EBUSY);

	/* A query returns the values given at creation. */
	struct ibv_qp_attr attr;

	CHECK_OK(verbs->ibv_query_qp(a->qp, &attr, IBV_QP_CAP, &init));
	CHECK_EQUAL(attr.qp_state, IBV_QPS_RESET);
	CHECK_EQUAL(init.cap.max_send_wr, 64);
	CHECK_EQUAL(attr.cap.max_recv_sge, 4);
	CHECK(init.send_cq == a->cq && init.qp_context == a && init.qp_type == IBV_QPT_RC);
	CHECK(init.sq_sig_all);
}

static int modify(struct side *side, struct ibv_qp_attr attr, int mask)
{
	return verbs->ibv_modify_qp(side->qp, &attr, mask);
}

/* Check that invalid attribute values of RTS are rejected without any change. Those of INIT and RTR
 * are tested in test_trace_calls.c, and each transition with each attribute in
 * tests/verbs/test_transitions.py. */
static void modify_qp_rejects_invalid_attributes_without_change(struct side *a)
{
	const int init_mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	const int rtr_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			     IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	static const struct options no_rts[] = {
		{.timeout = 32}, {.rnr_retry = 9}, {.retry_cnt = 9}, {.depth = 129}};
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	struct address own = address_of_side(a);
	const struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.rq_psn = 5,
		.dest_qp_num = own.qpn,
		.ah_attr = {.grh.dgid = own.gid, .dlid = ANY_DLID, .is_global = 1, .port_num = 1},
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
	};

	CHECK_OK(to_init(a));
	/* A queue pair ignores access flags that only apply to memory regions. */
	attr = (struct ibv_qp_attr){
		.port_num = 1,
		.qp_state = IBV_QPS_INIT,
		.qp_access_flags =
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB,
	};
	CHECK_OK(modify(a, attr, init_mask));
	CHECK_OK(modify(a, rtr, rtr_mask));

	FOR_EACH (i, no_rts) {
		a->options = no_rts[i];
		CHECK_EQUAL(to_rts(a), EINVAL);
		CHECK_EQUAL(state_of(a), IBV_QPS_RTR);
	}
	a->options = (struct options){.memory = 65536};
	CHECK_OK(to_rts(a));
	CHECK_OK(verbs->ibv_query_qp(a->qp, &attr, IBV_QP_STATE, &init));
	CHECK_EQUAL(attr.qp_state, IBV_QPS_RTS);
	CHECK_EQUAL(attr.path_mtu, IBV_MTU_1024);
	CHECK_EQUAL(attr.rq_psn, 5);
	CHECK_EQUAL(attr.dest_qp_num, own.qpn);
	CHECK_EQUAL(attr.min_rnr_timer, 12);
	CHECK_EQUAL(attr.timeout, 20);
	attr.cur_qp_state = IBV_QPS_SQD; /* not the current state */
	CHECK_EQUAL(modify(a, attr, IBV_QP_STATE | IBV_QP_CUR_STATE), EINVAL);
	attr.cur_qp_state = IBV_QPS_RTS;
	CHECK_OK(modify(a, attr, IBV_QP_STATE | IBV_QP_CUR_STATE));
}

/* ---- completion queues and their events ----------------------------------------------------- */

static bool is_readable(int fd)
{
	struct pollfd at = {.fd = fd, .events = POLLIN};

	return poll(&at, 1, 0) == 1;
}

static void send_one(struct side *a, struct side *b, unsigned flags)
{
	post_receive_at(b, 1, 0, 8);
	RUN(a, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = 2, .length = 8, .flags = flags);
}

static void expect_no_cq_event(struct side *side)
{
	struct ibv_cq *cq;
	void *context;

	CHECK(!is_readable(side->channel->fd));
	CHECK_FAILS(verbs->ibv_get_cq_event(side->channel, &cq, &context), EAGAIN);
}

static void expect_cq_event(struct side *side)
{
	struct ibv_cq *cq;
	void *context;

	CHECK(is_readable(side->channel->fd));
	CHECK_OK(verbs->ibv_get_cq_event(side->channel, &cq, &context));
	CHECK(cq == side->cq && context == side);
	verbs->ibv_ack_cq_events(cq, 1);
}

/* Check that the child of a fork cannot create objects in the inherited device, except for device
 * memory, but can open its own device. */
static void child_cannot_create_objects_on_inherited_device(void)
{
	struct ibv_srq_init_attr shared = {.attr = {.max_wr = 4, .max_sge = 1}};
	struct ibv_ah_attr path = {.is_global = 1, .port_num = 1};
	struct ibv_td_init_attr thread = {0};
	struct ibv_alloc_dm_attr memory = {.length = 64};
	struct ibv_xrcd_init_attr domain = {.comp_mask = IBV_XRCD_INIT_ATTR_FD |
							 IBV_XRCD_INIT_ATTR_OFLAGS,
					    .fd = -1,
					    .oflags = O_CREAT};
	struct side side;
	OPEN(&side);
	struct ibv_context *context = side.context;
	struct ibv_qp_init_attr queue_pair = {.send_cq = side.cq,
					      .recv_cq = side.cq,
					      .cap = {.max_send_wr = 1, .max_send_sge = 1},
					      .qp_type = IBV_QPT_RC};

	pid_t child = fork_asleep();

	if (!child) {
		limit_seconds(30);
		REFUSED(verbs->ibv_alloc_pd(context), ENODEV);
		REFUSED(verbs->ibv_import_pd(context, side.pd->handle), ENODEV);
		REFUSED(verbs->ibv_create_comp_channel(context), ENODEV);
		REFUSED(verbs->ibv_create_cq(context, 4, NULL, NULL, 0), ENODEV);
		REFUSED(verbs->ibv_reg_mr(side.pd, side.memory, 64, ALL_RIGHTS), ENODEV);
		REFUSED(context->ops.alloc_mw(side.pd, IBV_MW_TYPE_1), ENODEV);
		REFUSED(verbs->ibv_create_srq(side.pd, &shared), ENODEV);
		REFUSED(verbs->ibv_create_qp(side.pd, &queue_pair), ENODEV);
		REFUSED(verbs->ibv_create_ah(side.pd, &path), ENODEV);
		REFUSED(extended(context)->alloc_td(context, &thread), ENODEV);
		struct ibv_dm *dm = extended(context)->alloc_dm(context, &memory);

		CHECK(dm); /* required by rdma-core's test_multi_process_alloc_dm */
		CHECK_OK(extended(context)->free_dm(dm));
		REFUSED(extended(context)->open_xrcd(context, &domain), ENODEV);
		CHECK_EQUAL(to_init(&side), ENODEV);
#if defined(__SANITIZE_THREAD__) /* ThreadSanitizer allows no new threads here */
		close_side(&side);
#else
		struct side own;

		OPEN(&own);
		close_side(&side); /* does not affect the child's own device */
		verbs->device->wake_early(own.channel->fd);
		CHECK(soft_container(own.channel, struct soft_comp_channel, ibv)
			      ->channel.accepts_early_wakeup);
		close_side(&own);
#endif
		exit(0);
	}
	expect_exit_success(child);
	close_side(&side);
}

static void armed_cq_raises_a_single_event(int comp_vector)
{
	struct side a, b;

	OPEN_PAIR(&a, &b, .comp_vector = comp_vector);
	CHECK_OK(fcntl(b.channel->fd, F_SETFL, O_NONBLOCK));
	expect_no_cq_event(&b);
	send_one(&a, &b, 0); /* not armed */
	expect_wc(&b, 1, IBV_WC_SUCCESS);
	expect_no_cq_event(&b);

	/* Arming a CQ has no effect on completions that are already in it, and raises only one
	 * event. */
	send_one(&a, &b, 0);
	CHECK_OK(b.context->ops.req_notify_cq(b.cq, 0));
	expect_no_cq_event(&b);
	expect_wc(&b, 1, IBV_WC_SUCCESS);
	send_one(&a, &b, 0);
	send_one(&a, &b, 0);
	expect_cq_event(&b);
	expect_no_cq_event(&b);
	expect_wc(&b, 1, IBV_WC_SUCCESS);
	expect_wc(&b, 1, IBV_WC_SUCCESS);

	/* A request for solicited events does not revoke an earlier request for all events. */
	CHECK_OK(b.context->ops.req_notify_cq(b.cq, 1));
	send_one(&a, &b, 0);
	expect_no_cq_event(&b);
	send_one(&a, &b, IBV_SEND_SOLICITED);
	expect_cq_event(&b);
	CHECK_OK(b.context->ops.req_notify_cq(b.cq, 0));
	CHECK_OK(b.context->ops.req_notify_cq(b.cq, 1));
	send_one(&a, &b, 0);
	expect_cq_event(&b);
	for (int i = 0; i < 3; i++)
		expect_wc(&b, 1, IBV_WC_SUCCESS);

	/* An error is always solicited. */
	CHECK_OK(b.context->ops.req_notify_cq(b.cq, 1));
	post_receive_at(&b, 9, 0, 8);
	enter_state(&b, IBV_QPS_ERR);
	expect_cq_event(&b);
	expect_wc(&b, 9, IBV_WC_WR_FLUSH_ERR);

	/* An unread event does not block destruction. */
	CHECK_OK(a.context->ops.req_notify_cq(a.cq, 0));
	post_receive_at(&a, 9, 0, 8);
	enter_state(&a, IBV_QPS_ERR);
	CHECK(is_readable(a.channel->fd));
	close_pair(&a, &b);
}

/* Check that two CQs on one channel take turns when one of them has several events. */
static void cqs_sharing_a_channel_take_turns(struct side *a, struct side *b)
{
	struct ibv_cq *cq;
	void *context;

	CHECK_OK(fcntl(b->channel->fd, F_SETFL, O_NONBLOCK));
	struct side other = *b;

	CHECK(other.cq = verbs->ibv_create_cq(b->context, 4, &other, b->channel, 0));
	other.qp = create_qp(&other);
	CHECK_OK(to_init(&other));
	for (int i = 0; i < 3; i++) {
		CHECK_OK(b->context->ops.req_notify_cq(b->cq, 0));
		send_one(a, b, 0);
	}
	CHECK_OK(b->context->ops.req_notify_cq(other.cq, 0));
	post_receive_at(&other, 1, 0, 8);
	enter_state(&other, IBV_QPS_ERR);
	/* A busy CQ does not delay the other CQ's event. */
	CHECK_OK(verbs->ibv_get_cq_event(b->channel, &cq, &context));
	CHECK(cq == b->cq && context == b);
	CHECK_OK(verbs->ibv_get_cq_event(b->channel, &cq, &context));
	CHECK(cq == other.cq && context == &other);
	for (int i = 0; i < 2; i++) {
		CHECK_OK(verbs->ibv_get_cq_event(b->channel, &cq, &context));
		CHECK(cq == b->cq);
	}
	CHECK_FAILS(verbs->ibv_get_cq_event(b->channel, &cq, &context), EAGAIN);
	verbs->ibv_ack_cq_events(b->cq, 3); /* all events in one call */
	verbs->ibv_ack_cq_events(other.cq, 1);
	CHECK_EQUAL(verbs->ibv_destroy_cq(other.cq), EBUSY);
	CHECK_OK(verbs->ibv_destroy_qp(other.qp));
	CHECK_OK(verbs->ibv_destroy_cq(other.cq));
}

static struct side *acking;

/* Acknowledge the event once the main thread sleeps in ibv_destroy_cq(). `tid_file` is the path of
 * that thread's stat file in /proc. */
static void *ack_later(void *tid_file)
{
	for (;;) {
		char state[512] = "";
		FILE *file = fopen(tid_file, "r");

		CHECK(file);
		CHECK(fread(state, 1, sizeof(state) - 1, file) > 0);
		fclose(file);
		char *end = strrchr(state, ')');

		CHECK(end);
		if (end[2] == 'S')
			break;
		sched_yield();
	}
	verbs->ibv_ack_cq_events(acking->cq, 1);
	return NULL;
}

static void destroy_cq_waits_for_unacknowledged_events(struct side *a, struct side *b)
{
	struct ibv_cq *cq;
	void *context;
	pthread_t thread;
	char file[64];

	CHECK_OK(b->context->ops.req_notify_cq(b->cq, 0));
	send_one(a, b, 0);
	CHECK_OK(verbs->ibv_get_cq_event(b->channel, &cq, &context));
	acking = b;
	snprintf(file, sizeof(file), "/proc/self/task/%d/stat", getpid());
	destroy_qp(b);
	CHECK_OK(pthread_create(&thread, NULL, ack_later, file));
	CHECK_OK(verbs->ibv_destroy_cq(b->cq));
	b->cq = NULL;
	CHECK_OK(pthread_join(thread, NULL));
}

static void resize_cq_keeps_unpolled_completions(void)
{
	struct side a, b;
	struct ibv_wc wc[8];

	OPEN(&a);
	OPEN(&b, .cqe = 5);
	connect_pair(&a, &b);
	/* The rounds make the completions wrap around the end of the CQ's ring. */
	for (int round = 0; round < 3; round++) {
		for (unsigned i = 0; i < 4; i++)
			send_one(&a, &b, 0);
		CHECK_EQUAL(verbs->ibv_resize_cq(b.cq, 3), EINVAL);
		CHECK_OK(verbs->ibv_resize_cq(b.cq, round == 1 ? 4 : 6));
		CHECK_EQUAL(b.cq->cqe, round == 1 ? 4 : 6);
		CHECK_EQUAL(poll_cq(&b, 8, wc), 4);
	}
	CHECK_EQUAL(verbs->ibv_resize_cq(b.cq, 0), EINVAL);
	close_pair(&a, &b);
}

/* Check that objects left open when the device is closed remain valid until they are destroyed, but
 * no longer respond to peers. */
static void objects_stay_valid_after_close_but_do_not_respond(struct side *a, struct side *b)
{
	send_one(a, b, 0);
	CHECK_OK(verbs->ibv_close_device(b->context));
	b->context = NULL;
	uint64_t start = now_ns(CLOCK_MONOTONIC);

	RUN(a, IBV_WC_RETRY_EXC_ERR, IBV_WR_RDMA_WRITE, .wr_id = 1, .length = 8, REMOTE(b, 0));
	/* The request fails only after eight attempts of 4.096 us * 2^14 each (IBTA 9.7.6.1.3). */
	CHECK(now_ns(CLOCK_MONOTONIC) - start >= 8 * (4096ull << 14));
}

int main(void)
{
	limit_seconds(60);
	STEP(device_and_port_queries_return_expected_values());
	STEP(guid_identifies_the_network_namespace());
	STEP(reg_mr_rejects_invalid_memory_and_returns_unique_keys());
	SIDE(create_calls_reject_invalid_attributes);
	SIDE(modify_qp_rejects_invalid_attributes_without_change);
	STEP(armed_cq_raises_a_single_event(0));
	STEP(armed_cq_raises_a_single_event(1));
	PAIR(cqs_sharing_a_channel_take_turns);
	PAIR(destroy_cq_waits_for_unacknowledged_events);
	STEP(resize_cq_keeps_unpolled_completions());
	PAIR(objects_stay_valid_after_close_but_do_not_respond, .timeout = 14);
	STEP(child_cannot_create_objects_on_inherited_device());
	return 0;
}
