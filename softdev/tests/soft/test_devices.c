/* Test several devices in one process (AIORDMA_EMBEDDED_DEVICES). */
#include "fault_side.h"
#include "ud_side.h"

#include "objects/objects.h"

/* Options for a side on device `number`. */
#define OF(number, ...)                                                                            \
	(struct options)                                                                           \
	{                                                                                          \
		.device = (number), __VA_ARGS__                                                    \
	}

static void connect_devices(struct side *a, int device_a, struct side *b, int device_b)
{
	open_side(a, OF(device_a));
	open_side(b, OF(device_b));
	connect_pair(a, b);
}

static void send_one(struct side *from, struct side *to)
{
	post_receive_at(to, 1, 0, 64);
	DO(from, IBV_WR_SEND, .wr_id = 1, .length = 8);
	expect_done(to, 1);
}

static enum ibv_port_state state_of_port(const struct side *side)
{
	struct ibv_port_attr port;

	CHECK_OK(verbs->ibv_query_port(side->context, 1, (void *)&port));
	return port.state;
}

static void single_device_is_the_default(void)
{
	int count;

	CHECK_OK(unsetenv("AIORDMA_EMBEDDED_DEVICES"));
	verbs->ibv_free_device_list(verbs->ibv_get_device_list(&count));
	CHECK_EQUAL(count, 1);
	CHECK_EQUAL(aiordma_embedded_raise_on("embedded1", IBV_EVENT_PORT_ERR), ENODEV);
}

static void invalid_device_settings_are_rejected(void)
{
	static const char *const wrong[] = {
		"0", "5", "-1", "+2", "2x", "two", "lo,", "lo,lo", "a_name_too_long_"};

	FOR_EACH (i, wrong)
		expect_setting_refused("AIORDMA_EMBEDDED_DEVICES", wrong[i],
				       "expected a number of devices from 1 to 4");
	CHECK_OK(verbs->ibv_close_device(open_device())); /* the variable is unset and read again */
}

static void fourth_device_can_be_listed_and_used(void)
{
	int count;

	CHECK_OK(setenv("AIORDMA_EMBEDDED_DEVICES", "4", 1));
	struct ibv_device **list = verbs->ibv_get_device_list(&count);

	CHECK_EQUAL(count, 4);
	CHECK(!strcmp(list[3]->name, "embedded3"));
	verbs->ibv_free_device_list(list);
	PAIR(send_one_message, .device = 3);
}

static void devices_differ_in_name_guid_and_address(void)
{
	struct side sides[2];
	struct ibv_port_attr port;
	union ibv_gid gid;

	for (int i = 0; i < 2; i++) {
		const uint8_t loopback[16] = {[10] = 0xff, 0xff, 127, [15] = (uint8_t)(1 + i)};
		struct ibv_device_attr attr;

		open_side(&sides[i], OF(i));
		CHECK_OK(verbs->ibv_query_gid(sides[i].context, 1, sides[i].options.gid, &gid));
		CHECK(!memcmp(gid.raw, loopback, sizeof(loopback)));
		CHECK_OK(verbs->ibv_query_device(sides[i].context, &attr));
		CHECK(attr.node_guid == verbs->ibv_get_device_guid(sides[i].context->device));
	}
	CHECK(!strcmp(verbs->ibv_get_device_name(sides[0].context->device), "embedded0"));
	CHECK(!strcmp(verbs->ibv_get_device_name(sides[1].context->device), "embedded1"));
	CHECK(verbs->ibv_get_device_guid(sides[0].context->device) !=
	      verbs->ibv_get_device_guid(sides[1].context->device));
	CHECK_OK(verbs->ibv_query_port(sides[1].context, 1, (void *)&port));
	CHECK_EQUAL(port.gid_tbl_len, 1); /* other host addresses belong to the first device */
	close_pair(&sides[0], &sides[1]);
}

static void devices_can_connect_to_each_other(void)
{
	struct side a, b;

	connect_devices(&a, 0, &b, 1);
	send_one(&a, &b);
	send_one(&b, &a);
	DO(&a, IBV_WR_RDMA_READ, .length = 60000, REMOTE(&b, 0));
	close_pair(&a, &b);
	/* Both sides can also be on the second device. */
	OPEN_PAIR(&a, &b, .device = 1);
	send_one(&a, &b);
	close_pair(&a, &b);
}

static void queue_pair_is_unreachable_at_another_devices_gid(void)
{
	struct side a, b;

	open_side(&a, OF(0, .timeout = 1, .retry_cnt = 1));
	open_side(&b, OF(1));
	struct address address_a = address_of_side(&a), address_b = address_of_side(&b);

	address_b.gid = address_a.gid;
	bring_up(&a, &address_b);
	bring_up(&b, &address_a);
	RUN(&a, IBV_WC_RETRY_EXC_ERR, IBV_WR_SEND, .length = 8);
	close_pair(&a, &b);
}

static void datagrams_reach_only_the_addressed_device(void)
{
	struct side a, b;
	struct ibv_port_attr port;

	ud_open(&a, OF(0));
	ud_open(&b, OF(1));
	struct address address = address_of_side(&b), wrong = address_of_side(&a);
	struct ibv_ah *ah = ud_path(&a, &address, a.options.gid),
		      *ah_wrong = ud_path(&a, &wrong, a.options.gid);

	post_receive_at(&b, 1, 0, 64);
	send_with(&a, ah_wrong, &b, QKEY);
	expect_no_wc(&b);
	send_with(&a, ah, &b, QKEY + 1);
	CHECK_OK(verbs->ibv_query_port(b.context, 1, (void *)&port));
	CHECK_EQUAL(port.qkey_viol_cntr, 1);
	CHECK_OK(verbs->ibv_query_port(a.context, 1, (void *)&port));
	CHECK_EQUAL(port.qkey_viol_cntr, 0);
	send_with(&a, ah, &b, QKEY);
	expect_done(&b, 1);
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	CHECK_OK(verbs->ibv_destroy_ah(ah_wrong));
	close_pair(&a, &b);
}

/* Check that a port that is down stops the traffic of its device, including connections from other
 * devices. */
static void port_down_stops_only_its_device(void)
{
	struct side a, b, c, d, x, y;

	connect_devices(&a, 0, &b, 0);
	connect_devices(&c, 1, &d, 1);
	connect_devices(&x, 0, &y, 1);
	send_one(&c, &d);
	send_one(&x, &y);
	CHECK_OK(aiordma_embedded_raise_on("embedded1", IBV_EVENT_PORT_ERR));
	CHECK_EQUAL(state_of_port(&a), IBV_PORT_ACTIVE);
	CHECK_EQUAL(state_of_port(&c), IBV_PORT_DOWN);
	expect_event(&c, IBV_EVENT_PORT_ERR);
	expect_event(&y, IBV_EVENT_PORT_ERR);
	expect_no_event(&a);
	expect_no_event(&x);
	post_receive_at(&d, 2, 0, 64);
	post_receive_at(&y, 2, 0, 64);
	POST(&c, IBV_WR_SEND, .wr_id = 2, .length = 8);
	POST(&x, IBV_WR_SEND, .wr_id = 2, .length = 8);
	for (int i = 0; i < 1000; i++) {
		expect_no_wc(&d);
		expect_no_wc(&y);
	}
	send_one(&a, &b);
	send_one(&b, &a);
	CHECK_OK(aiordma_embedded_raise_on("embedded1", IBV_EVENT_PORT_ACTIVE));
	expect_event(&d, IBV_EVENT_PORT_ERR);
	expect_event(&d, IBV_EVENT_PORT_ACTIVE);
	expect_done(&c, 2);
	expect_done(&d, 2);
	expect_done(&x, 2);
	expect_done(&y, 2);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ERR)); /* all ports */
	expect_event(&a, IBV_EVENT_PORT_ERR);
	expect_event(&d, IBV_EVENT_PORT_ERR);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ACTIVE));
	send_one(&a, &b);
	send_one(&y, &x);
	close_pair(&a, &b);
	close_pair(&c, &d);
	close_pair(&x, &y);
}

/* Check that taking a port of this process down does not affect queue pairs whose peer is on
 * another host, even if the peer's process uses the same IP port. */
static void port_down_spares_peers_on_other_hosts(void)
{
	struct side c, d;

	connect_devices(&c, 1, &d, 1);
	CHECK_OK(aiordma_embedded_raise_on("embedded0", IBV_EVENT_PORT_ERR));
	soft_lock();
	struct soft_qp *qp = soft_qp_of(c.qp);
	union ibv_gid *peer = &qp->attr.ah_attr.grh.dgid, known = *peer;

	peer->raw[12] = 203; /* TEST-NET-3 */
	CHECK(!soft_qp_has_port_down(qp));
	*peer = soft_gid_loopback;
	CHECK(soft_qp_has_port_down(qp));
	*peer = known;
	soft_unlock();
	CHECK_OK(aiordma_embedded_raise_on("embedded0", IBV_EVENT_PORT_ACTIVE));
	close_pair(&c, &d);
}

/* Set a device's port down in one of two processes. The other device's connection must continue. */
static void port_down_in_one_process_spares_the_other_device(void)
{
	struct process process = process_split();
	struct side sides[2];
	struct address peers[2];

	for (int i = 0; i < 2; i++) {
		open_side(&sides[i], OF(i));
		peers[i] = exchange_addresses(&process, &sides[i]);
		bring_up(&sides[i], &peers[i]);
		process_barrier(&process);
		DO(&sides[i], IBV_WR_RDMA_WRITE, .length = 8, AT(&peers[i], 0));
	}
	process_barrier(&process);
	if (process.child)
		CHECK_OK(aiordma_embedded_raise_on("embedded1", IBV_EVENT_PORT_ERR));
	process_barrier(&process);
	if (!process.child) {
		LOCKED(sides[1].memory[0] = 77);
		POST(&sides[1], IBV_WR_RDMA_WRITE, .wr_id = 1, .length = 8, AT(&peers[1], 0));
		DO(&sides[0], IBV_WR_RDMA_WRITE, .length = 8, AT(&peers[0], 0));
		expect_no_wc(&sides[1]);
	}
	process_barrier(&process);
	if (process.child) {
		CHECK_EQUAL(LOCKED(sides[1].memory[0]), 0);
		CHECK_OK(aiordma_embedded_raise_on("embedded1", IBV_EVENT_PORT_ACTIVE));
	} else {
		expect_done(&sides[1], 1);
	}
	process_barrier(&process);
	if (process.child)
		CHECK_EQUAL(LOCKED(sides[1].memory[0]), 77);
	close_pair(&sides[0], &sides[1]);
	process_join(&process);
}

/* Check that a queue pair gives up when its peer's port stays down, even if its own port changes in
 * the meantime. */
static void queue_pair_gives_up_while_peer_port_is_down(void)
{
	struct side x, y;

	/* The retries take half a second, so the first message succeeds even on a slow machine. */
	open_side(&x, OF(0, .timeout = 16, .retry_cnt = 1));
	open_side(&y, OF(1, .timeout = 16, .retry_cnt = 1));
	connect_pair(&x, &y);
	send_one(&x, &y);
	CHECK_OK(aiordma_embedded_raise_on("embedded1", IBV_EVENT_PORT_ERR));
	POST(&x, IBV_WR_SEND, .wr_id = 1, .length = 8);
	CHECK_OK(aiordma_embedded_raise_on("embedded0", IBV_EVENT_PORT_ERR));
	CHECK_OK(aiordma_embedded_raise_on("embedded0", IBV_EVENT_PORT_ACTIVE));
	expect_wc(&x, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK_OK(aiordma_embedded_raise_on("embedded1", IBV_EVENT_PORT_ACTIVE));
	close_pair(&x, &y);
}

static void fatal_error_spares_the_other_device(void)
{
	struct side a, b, c;

	connect_devices(&a, 0, &b, 0);
	open_side(&c, OF(1));
	CHECK_OK(aiordma_embedded_raise_on("embedded1", IBV_EVENT_DEVICE_FATAL));
	expect_event(&c, IBV_EVENT_DEVICE_FATAL);
	expect_no_event(&a);
	CHECK_EQUAL(to_state(&c, IBV_QPS_RESET), EIO);
	send_one(&a, &b);
	close_side(&c);
	close_pair(&a, &b);
}

static void faults_apply_only_to_the_named_device(void)
{
	struct side a, b, c, d;

	connect_devices(&a, 0, &b, 0);
	connect_devices(&c, 1, &d, 1);
	spec("rnr=1,register=1,device=embedded1");
	send_one(&a, &b);
	CHECK_EQUAL(fault_counts().not_ready, 0);
	struct ibv_mr *mr = verbs->ibv_reg_mr(a.pd, a.memory, 64, 0);

	CHECK(mr);
	dereg(mr);
	REFUSED(verbs->ibv_reg_mr(c.pd, c.memory, 64, 0), ENOMEM);
	post_receive_at(&d, 1, 0, 64);
	POST(&c, IBV_WR_SEND, .wr_id = 1, .length = 8);
	while (!fault_counts().not_ready)
		expect_no_wc(&d);
	no_faults();
	expect_done(&c, 1);
	close_pair(&a, &b);
	close_pair(&c, &d);
}

static void objects_of_different_devices_cannot_be_combined(void)
{
	struct side a, b;
	struct ibv_qp_init_attr init = {.cap = {1, 1, 1, 1, 0}, .qp_type = IBV_QPT_RC};

	open_side(&a, OF(0, .shared = 4));
	open_side(&b, OF(1));
	init.send_cq = init.recv_cq = b.cq;
	REFUSED(verbs->ibv_create_qp(a.pd, &init), EINVAL);
	init.send_cq = a.cq;
	REFUSED(verbs->ibv_create_qp(a.pd, &init), EINVAL);
	init = (struct ibv_qp_init_attr){.send_cq = b.cq,
					 .recv_cq = b.cq,
					 .srq = a.srq,
					 .cap = init.cap,
					 .qp_type = IBV_QPT_RC};
	REFUSED(verbs->ibv_create_qp(b.pd, &init), EINVAL);
	REFUSED(verbs->ibv_create_cq(b.context, 1, NULL, a.channel, 0), EINVAL);
	close_pair(&a, &b);
}

int main(void)
{
	STEP(in_child(single_device_is_the_default));
	STEP(in_child(invalid_device_settings_are_rejected));
	STEP(in_child(fourth_device_can_be_listed_and_used));
	CHECK_OK(setenv("AIORDMA_EMBEDDED_DEVICES", "2", 1));
	limit_seconds(60);
	STEP(port_down_in_one_process_spares_the_other_device());
	STEP(devices_differ_in_name_guid_and_address());
	STEP(devices_can_connect_to_each_other());
	STEP(queue_pair_is_unreachable_at_another_devices_gid());
	STEP(datagrams_reach_only_the_addressed_device());
	STEP(port_down_stops_only_its_device());
	STEP(port_down_spares_peers_on_other_hosts());
	STEP(queue_pair_gives_up_while_peer_port_is_down());
	STEP(fatal_error_spares_the_other_device());
	STEP(faults_apply_only_to_the_named_device());
	STEP(objects_of_different_devices_cannot_be_combined());
	return 0;
}
