/* Test device and port events (ibv_get_async_event(3)), which aiordma_embedded_raise simulates. */
#define _GNU_SOURCE /* unshare */
#include <arpa/inet.h>
#include <net/if.h>
#include <net/route.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>

#include "extended_side.h"
#include "ud_side.h"

static struct ibv_port_attr port_of(const struct side *side)
{
	struct ibv_port_attr port;

	CHECK_OK(extended(side->context)->query_port(side->context, 1, &port, sizeof(port)));
	return port;
}

static void expect_port_event(struct side *side, enum ibv_event_type type)
{
	struct ibv_async_event event;

	CHECK_OK(verbs->ibv_get_async_event(side->context, &event));
	CHECK_EQUAL(event.event_type, type);
	CHECK_EQUAL(event.element.port_num, 1);
	verbs->ibv_ack_async_event(&event);
}

static bool has_event(struct side *side)
{
	struct pollfd fd = {.fd = side->context->async_fd, .events = POLLIN};

	CHECK(poll(&fd, 1, 0) >= 0);
	return fd.revents;
}

static void send_one(struct side *from, struct side *to, uint64_t wr_id)
{
	post_receive_at(to, wr_id, 0, 64);
	RUN(from, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = wr_id, .length = 8);
	expect_wc(to, wr_id, IBV_WC_SUCCESS);
}

static void short_port_failure_delays_but_loses_no_messages(void)
{
	struct side a, b;

	OPEN_PAIR(&a, &b, .timeout = 20);
	send_one(&a, &b, 1);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ERR));
	CHECK_EQUAL(port_of(&a).state, IBV_PORT_DOWN);
	CHECK_EQUAL(port_of(&a).phys_state, 3);
	expect_port_event(&a, IBV_EVENT_PORT_ERR);
	expect_port_event(&b, IBV_EVENT_PORT_ERR);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ERR));
	CHECK(!has_event(&a)); /* the port is already down */

	post_receive_at(&b, 2, 0, 64);
	POST(&a, IBV_WR_SEND, .wr_id = 2, .length = 8);
	for (int i = 0; i < 1000; i++) {
		struct ibv_wc wc;

		CHECK_EQUAL(poll_cq(&a, 1, &wc) + poll_cq(&b, 1, &wc), 0);
	}
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ACTIVE));
	CHECK_EQUAL(port_of(&a).state, IBV_PORT_ACTIVE);
	CHECK_EQUAL(port_of(&a).phys_state, 5);
	expect_port_event(&a, IBV_EVENT_PORT_ACTIVE);
	expect_port_event(&b, IBV_EVENT_PORT_ACTIVE);
	expect_wc(&a, 2, IBV_WC_SUCCESS);
	expect_wc(&b, 2, IBV_WC_SUCCESS);
	send_one(&b, &a, 3);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ACTIVE));
	CHECK(!has_event(&a));
	/* Close the pair while the port is down. The port must be active when the device is opened
	 * again. */
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ERR));
	close_pair(&a, &b);
	OPEN_PAIR(&a, &b);
	CHECK_EQUAL(port_of(&a).state, IBV_PORT_ACTIVE);
	send_one(&a, &b, 4);
	close_pair(&a, &b);
}

/* Check that a queue pair brought up while the port is down connects once the port is active. */
static void queue_pair_connects_once_the_port_is_active(void)
{
	struct side a, b;

	OPEN(&a, .timeout = 20);
	OPEN(&b, .timeout = 20);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ERR));
	connect_pair(&a, &b);
	post_receive_at(&b, 1, 0, 64);
	POST(&a, IBV_WR_SEND, .wr_id = 1, .length = 8);
	for (int i = 0; i < 1000; i++)
		expect_no_wc(&b);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ACTIVE));
	expect_wc(&a, 1, IBV_WC_SUCCESS);
	expect_wc(&b, 1, IBV_WC_SUCCESS);
	close_pair(&a, &b);
}

/* Check that requests fail when a port failure outlasts their retries (IBTA 9.7.6.1.3). */
static void requests_fail_when_port_failure_outlasts_retries(struct side *a, struct side *b)
{
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ERR));
	expect_port_event(a, IBV_EVENT_PORT_ERR);
	expect_port_event(b, IBV_EVENT_PORT_ERR);
	RUN(a, IBV_WC_RETRY_EXC_ERR, IBV_WR_SEND, .wr_id = 1, .length = 8);
	CHECK_EQUAL(state_of(a), IBV_QPS_ERR);
	/* The peer had no request in flight, so it detects the failure with its next request. */
	CHECK_EQUAL(state_of(b), IBV_QPS_RTS);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ACTIVE));
	expect_port_event(b, IBV_EVENT_PORT_ACTIVE);
	RUN(b, IBV_WC_RETRY_EXC_ERR, IBV_WR_SEND, .wr_id = 2, .length = 8);
	CHECK(!has_event(b));
}

static void requests_fail_when_only_the_peers_port_is_down(void)
{
	struct process process = process_split();
	struct side side;

	OPEN(&side, .timeout = 1, .retry_cnt = 1);
	struct address peer = exchange_addresses(&process, &side);

	bring_up(&side, &peer);
	process_barrier(&process);
	if (process.child) {
		RUN(&side, IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE, .wr_id = 1, .length = 8,
		    .remote = peer.memory, .rkey = peer.rkey);
	}
	process_barrier(&process);
	if (!process.child)
		CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ERR));
	process_barrier(&process);
	if (process.child) {
		CHECK_EQUAL(port_of(&side).state, IBV_PORT_ACTIVE);
		RUN(&side, IBV_WC_RETRY_EXC_ERR, IBV_WR_RDMA_WRITE, .wr_id = 2, .length = 8,
		    .remote = peer.memory, .rkey = peer.rkey);
	}
	process_barrier(&process);
	close_side(&side);
	process_join(&process);
}

/* Check that UC queue pairs lose messages while the port is down, but continue to work. */
static void uc_loses_messages_while_the_port_is_down(struct side *a, struct side *b)
{
	send_one(a, b, 1);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ERR));
	RUN(a, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = 2, .length = 8);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ACTIVE));
	send_one(a, b, 3);
	send_one(b, a, 4);
}

/* Check that a LID change affects no connections. The device does not use LIDs to find peers. */
static void connections_survive_a_lid_change(struct side *a, struct side *b)
{
	struct side c, d;

	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_LID_CHANGE));
	expect_port_event(a, IBV_EVENT_LID_CHANGE);
	send_one(a, b, 1);
	OPEN_PAIR(&c, &d);
	send_one(&c, &d, 1);
	close_pair(&c, &d);
}

static void fatal_event_fails_all_queue_pairs_of_the_device(struct side *a, struct side *b)
{
	struct ibv_qp_init_attr init = {.cap = {1, 1, 1, 1, 0}, .qp_type = IBV_QPT_RC};

	post_receive_at(b, 1, 0, 64);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_DEVICE_FATAL));
	expect_port_event(a, IBV_EVENT_DEVICE_FATAL);
	expect_port_event(b, IBV_EVENT_DEVICE_FATAL);
	expect_wc(b, 1, IBV_WC_WR_FLUSH_ERR);
	CHECK_EQUAL(state_of(a), IBV_QPS_ERR);
	CHECK_EQUAL(to_state(a, IBV_QPS_RESET), EIO);
	init.send_cq = init.recv_cq = a->cq;
	REFUSED(verbs->ibv_create_qp(a->pd, &init), EIO);
	/* A newly opened device works. */
	struct side c, d;

	OPEN_PAIR(&c, &d);
	send_one(&c, &d, 1);
	close_pair(&c, &d);
}

static void port_change_events_are_reported_and_others_rejected(void)
{
	static const enum ibv_event_type told[] = {
		IBV_EVENT_PKEY_CHANGE,
		IBV_EVENT_SM_CHANGE,
		IBV_EVENT_CLIENT_REREGISTER,
		IBV_EVENT_GID_CHANGE,
	};
	static const enum ibv_event_type refused[] = {
		IBV_EVENT_CQ_ERR,   IBV_EVENT_QP_FATAL,      IBV_EVENT_SRQ_ERR,
		IBV_EVENT_WQ_FATAL, (enum ibv_event_type)99,
	};
	struct side a;

	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_SM_CHANGE)); /* no context is open */
	OPEN(&a);
	FOR_EACH (i, told) {
		CHECK_OK(aiordma_embedded_raise(told[i]));
		expect_port_event(&a, told[i]);
	}
	FOR_EACH (i, refused)
		CHECK_EQUAL(aiordma_embedded_raise(refused[i]), EINVAL);
	CHECK(!has_event(&a));
	close_side(&a);
}

/* ---- addresses ----------------------------------------------------------------------------- */

static void change_interface(const char *name, const char *address, short flags)
{
	struct sockaddr_in in = {.sin_family = AF_INET};
	struct ifreq request = {0};
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	CHECK(fd >= 0);
	strncpy(request.ifr_name, name, sizeof(request.ifr_name) - 1);
	if (address) {
		CHECK_EQUAL(inet_pton(AF_INET, address, &in.sin_addr), 1);
		memcpy(&request.ifr_addr, &in, sizeof(in));
		CHECK_OK(ioctl(fd, SIOCSIFADDR, &request));
	} else {
		request.ifr_flags = flags;
		CHECK_OK(ioctl(fd, SIOCSIFFLAGS, &request));
	}
	close(fd);
}

static bool has_gid_at(struct side *side, int index, const char *address)
{
	union ibv_gid gid, expected = {.raw = {0}};

	CHECK_OK(verbs->ibv_query_gid(side->context, 1, index, &gid));
	if (address) {
		expected.raw[10] = expected.raw[11] = 0xff;
		CHECK_EQUAL(inet_pton(AF_INET, address, &expected.raw[12]), 1);
	}
	return !memcmp(&gid, &expected, sizeof(gid));
}

static int try_gid(struct side *side, int index)
{
	struct address own = address_of_side(side);

	side->options.gid = (uint8_t)index;
	enter_state(side, IBV_QPS_RESET);
	CHECK_OK(to_init(side));
	return to_rtr(side, &own);
}

/* Check that the GID table follows address changes, in a network namespace that no other process
 * uses. */
static void gid_table_follows_address_changes(void)
{
	struct process process = process_split();
	struct ibv_gid_entry entries[8];
	struct side side;

	if (!process.child) {
		CHECK(unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0);
		change_interface("lo", NULL, IFF_UP);
		OPEN(&side);
		int fixed = port_of(&side).gid_tbl_len; /* 127.0.0.1, and ::1 if IPv6 is enabled */

		change_interface("lo:1", "127.9.9.1", 0);
		expect_port_event(&side, IBV_EVENT_GID_CHANGE);
		change_interface("lo:2", "127.9.9.2", 0);
		expect_port_event(&side, IBV_EVENT_GID_CHANGE);
		CHECK_EQUAL(port_of(&side).gid_tbl_len, fixed + 2);
		CHECK(has_gid_at(&side, fixed, "127.9.9.1"));
		CHECK(has_gid_at(&side, fixed + 1, "127.9.9.2"));
		CHECK_OK(try_gid(&side, fixed));

		/* A removed address leaves an empty entry, so that the other entries keep their
		 * index. */
		change_interface("lo:1", NULL, 0);
		expect_port_event(&side, IBV_EVENT_GID_CHANGE);
		CHECK_EQUAL(port_of(&side).gid_tbl_len, fixed + 2);
		CHECK(has_gid_at(&side, fixed, NULL));
		CHECK(has_gid_at(&side, fixed + 1, "127.9.9.2"));
		CHECK_EQUAL(try_gid(&side, fixed), EINVAL);
		side.options.gid = 0;
		CHECK_EQUAL(verbs->_ibv_query_gid_ex(side.context, 1, (uint32_t)fixed, entries, 0,
						     sizeof(entries[0])),
			    ENODATA);
		CHECK_EQUAL(verbs->_ibv_query_gid_table(side.context, entries, 8, 0,
							sizeof(entries[0])),
			    fixed + 1);
		CHECK_EQUAL(entries[fixed].gid_index, fixed + 1);
		change_interface("lo:3", "127.9.9.3", 0);
		expect_port_event(&side, IBV_EVENT_GID_CHANGE);
		CHECK(has_gid_at(&side, fixed, "127.9.9.3"));
		change_interface("lo:2", NULL, 0);
		expect_port_event(&side, IBV_EVENT_GID_CHANGE);
		CHECK_EQUAL(port_of(&side).gid_tbl_len, fixed + 1);
		CHECK(!has_event(&side));
		close_side(&side);
	}
	process_join(&process);
}

static int rtr_without_a_gid(struct side *side)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = side->qp->qp_num,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 1,
		.ah_attr = {.dlid = port_of(side).lid, .port_num = 1},
	};

	enter_state(side, IBV_QPS_RESET);
	CHECK_OK(to_init(side));
	return verbs->ibv_modify_qp(side->qp, &attr,
				    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
					    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
					    IBV_QP_MIN_RNR_TIMER);
}

/* Check the order of the GID table. Loopback addresses come last, because many programs use the
 * first GID, which must reach other hosts. Later changes do not move entries. An address vector
 * without a GID refers to this device, even if the first entry is empty. */
static void loopback_addresses_come_last_in_the_gid_table(void)
{
	struct process process = process_split();
	struct side side;

	if (!process.child) {
		CHECK(unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0);
		change_interface("lo", NULL, IFF_UP);
		change_interface("lo:1", "127.9.9.1", 0);
		change_interface("lo:2", "10.9.9.2", 0);
		OPEN(&side);
		CHECK_EQUAL(side.options.gid, 1);
		CHECK(has_gid_at(&side, 0, "10.9.9.2"));
		CHECK(has_gid_at(&side, 1, "127.0.0.1"));
		CHECK(has_gid_at(&side, 2, "127.9.9.1"));
		int count = port_of(&side).gid_tbl_len; /* the last entry may be ::1 */

		change_interface("lo:3", "10.9.9.3", 0);
		expect_port_event(&side, IBV_EVENT_GID_CHANGE);
		CHECK(has_gid_at(&side, 1, "127.0.0.1"));
		CHECK(has_gid_at(&side, count, "10.9.9.3"));

		change_interface("lo:2", NULL, 0);
		expect_port_event(&side, IBV_EVENT_GID_CHANGE);
		CHECK(has_gid_at(&side, 0, NULL));
		CHECK_OK(rtr_without_a_gid(&side));
		change_interface("lo:4", "10.9.9.4", 0);
		expect_port_event(&side, IBV_EVENT_GID_CHANGE);
		CHECK(has_gid_at(&side, 0, "10.9.9.4"));
		close_side(&side);
	}
	process_join(&process);
}

/* ---- an interface of its own ----------------------------------------------------------------- */

/* Check the next event and the port's state. GID changes are skipped, because ::1 comes and goes
 * with the interface. */
static void expect_change(struct side *side, enum ibv_event_type type, enum ibv_port_state state)
{
	struct ibv_async_event event;

	do {
		CHECK_OK(verbs->ibv_get_async_event(side->context, &event));
		verbs->ibv_ack_async_event(&event);
	} while (event.event_type == IBV_EVENT_GID_CHANGE);
	CHECK_EQUAL(event.event_type, type);
	CHECK_EQUAL(port_of(side).state, state);
}

static void port_state_follows_its_interface(void)
{
	struct side side, later;
	int index = 0;

	CHECK(unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0);
	CHECK_OK(setenv("AIORDMA_EMBEDDED_DEVICES", "lo", 1));
	for (int i = 0; i < 2; i++) { /* the second time with a new device */
		OPEN(&side);
		CHECK_EQUAL(port_of(&side).state, IBV_PORT_DOWN);
		CHECK(!has_event(&side));
		close_side(&side);
	}
	OPEN(&side);
	change_interface("lo", NULL, IFF_UP);
	expect_change(&side, IBV_EVENT_PORT_ACTIVE, IBV_PORT_ACTIVE);
	change_interface("lo:1", "127.9.9.1", 0); /* address with a label */
	while (!has_gid_at(&side, index, "127.9.9.1"))
		index = (index + 1) % port_of(&side).gid_tbl_len;

	/* A port that a test has taken down stays down until the interface changes. */
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ERR));
	expect_change(&side, IBV_EVENT_PORT_ERR, IBV_PORT_DOWN);
	OPEN(&later); /* reads the interface's state again */
	CHECK_EQUAL(port_of(&later).state, IBV_PORT_DOWN);
	close_side(&later);
	CHECK_OK(aiordma_embedded_raise(IBV_EVENT_PORT_ACTIVE));
	expect_change(&side, IBV_EVENT_PORT_ACTIVE, IBV_PORT_ACTIVE);

	change_interface("lo", NULL, 0);
	expect_change(&side, IBV_EVENT_PORT_ERR, IBV_PORT_DOWN);
	CHECK(has_gid_at(&side, index, "127.9.9.1"));
	change_interface("lo", NULL, IFF_UP);
	expect_change(&side, IBV_EVENT_PORT_ACTIVE, IBV_PORT_ACTIVE);
	close_side(&side);
}

/* ---- routes -------------------------------------------------------------------------------- */

static void change_route(unsigned long request, unsigned short flags)
{
	struct rtentry route = {.rt_flags = RTF_UP | flags, .rt_dev = (char[]){"lo"}};
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0xcb007100)};
	struct sockaddr_in mask = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0xffffff00)};
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	CHECK(fd >= 0);
	memcpy(&route.rt_dst, &to, sizeof(to));
	memcpy(&route.rt_genmask, &mask, sizeof(mask));
	CHECK_OK(ioctl(fd, request, &route));
	close(fd);
}

/* Enter RTR with 203.0.113.1 (TEST-NET-3) as the peer, and create an address handle for this
 * address. Both must return `expected`, which depends on the routing table. */
static void expect_route_result(struct side *side, int expected)
{
	struct address there = address_of_side(side);
	struct ibv_ah *ah;

	there.gid.raw[12] = 203;
	there.gid.raw[13] = 0;
	there.gid.raw[14] = 113;
	CHECK_EQUAL(to_rtr(side, &there), expected);
	CHECK_EQUAL(state_of(side), expected ? IBV_QPS_INIT : IBV_QPS_RTR);
	ah = ud_path(side, &there, 0);
	CHECK_EQUAL(ah ? 0 : errno, expected);
	if (ah)
		CHECK_OK(verbs->ibv_destroy_ah(ah));
}

/* Reduce the ephemeral UDP ports to a single one, and occupy it. */
static void take_all_ports(void)
{
	struct sockaddr_in any = {.sin_family = AF_INET};
	int range = open("/proc/sys/net/ipv4/ip_local_port_range", O_WRONLY | O_CLOEXEC);

	CHECK(range >= 0);
	CHECK_EQUAL(write(range, "40000 40000", 11), 11);
	close(range);
	CHECK_OK(bind(socket(AF_INET, SOCK_DGRAM, 0), (struct sockaddr *)&any, sizeof(any)));
}

static void rtr_and_create_ah_fail_without_a_route(void)
{
	struct process process = process_split();
	struct side side;

	if (!process.child) {
		CHECK(unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0);
		change_interface("lo", NULL, IFF_UP);
		OPEN(&side);
		CHECK_OK(to_init(&side));
		expect_route_result(&side, ENETUNREACH);
		change_route(SIOCADDRT, RTF_REJECT);
		expect_route_result(&side, EHOSTUNREACH);
		change_route(SIOCDELRT, RTF_REJECT);
		change_route(SIOCADDRT, 0);
		expect_route_result(&side, 0);
		close_side(&side);
		take_all_ports();
		OPEN(&side);
		CHECK_OK(to_init(&side));
		expect_route_result(&side, 0);
		close_side(&side);
	}
	process_join(&process);
}

int main(void)
{
	STEP(in_child(port_state_follows_its_interface));
	limit_seconds(60);
	STEP(short_port_failure_delays_but_loses_no_messages());
	STEP(queue_pair_connects_once_the_port_is_active());
	PAIR(requests_fail_when_port_failure_outlasts_retries, .timeout = 1, .retry_cnt = 1);
	STEP(requests_fail_when_only_the_peers_port_is_down());
	PAIR(uc_loses_messages_while_the_port_is_down, .uc = true);
	PAIR(connections_survive_a_lid_change);
	PAIR(fatal_event_fails_all_queue_pairs_of_the_device);
	STEP(port_change_events_are_reported_and_others_rejected());
	STEP(gid_table_follows_address_changes());
	STEP(loopback_addresses_come_last_in_the_gid_table());
	STEP(rtr_and_create_ah_fail_without_a_route());
	return 0;
}
