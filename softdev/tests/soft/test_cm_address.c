/* Test binding to addresses and ports, address resolution, and the options of an id. */
#include "cm_side.h"

static void expect_bind_fails(const char *text, uint16_t port, int error)
{
	struct side side = side_with_id();
	union address address = address_of(text, port);

	CHECK_FAILS(rdma->rdma_bind_addr(side.id, &address.any), error);
	CHECK_EQUAL(rdma->rdma_get_src_port(side.id), 0);
	side_close(&side);
}

/* Check that binding to a specific address also binds to a device, and that binding to the wildcard
 * does not (rdma_bind_addr(3)). */
static void only_a_specific_address_binds_to_a_device(void)
{
	struct side specific = open_bound_side(RDMA_PS_TCP, host, 0);
	struct side any = open_bound_side(RDMA_PS_TCP, "0.0.0.0", 0);

	CHECK(specific.id->verbs && specific.id->pd);
	CHECK_EQUAL(specific.id->port_num, 1);
	CHECK_EQUAL(specific.id->route.addr.addr.ibaddr.sgid.raw[11], 0xff);
	CHECK(!any.id->verbs);
	side_close(&specific);
	side_close(&any);
	/* Without a channel, binding to a loopback address does not select a device, but resolving
	 * an address does. */
	for (int six = 0; six < 2; six++) {
		union address address = address_of(six ? "::1" : host, 0);
		struct rdma_cm_id *id;

		CHECK_OK(rdma->rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
		CHECK_OK(rdma->rdma_bind_addr(id, &address.any));
		CHECK(!id->verbs);
		address.v4.sin_port = htons(7777);
		CHECK_OK(rdma->rdma_resolve_addr(id, NULL, &address.any, 1000));
		CHECK(id->verbs);
		CHECK_OK(rdma->rdma_destroy_id(id));
	}
}

static void invalid_addresses_are_rejected(void)
{
	struct side side = side_with_id();
	union address strange = {.any = {.sa_family = AF_UNIX}};
	union address here = address_of(host, 0);

	CHECK_FAILS(rdma->rdma_bind_addr(side.id, &strange.any), EINVAL);
	CHECK_FAILS(rdma->rdma_resolve_addr(side.id, NULL, &strange.any, 1000), EINVAL);
	CHECK_FAILS(rdma->rdma_resolve_addr(side.id, &strange.any, &here.any, 1000), EINVAL);
	side_close(&side);
	expect_bind_fails("203.0.113.1", 0, EADDRNOTAVAIL); /* unassigned address (TEST-NET-3) */
	expect_bind_fails("2001:db8::1", 0, EADDRNOTAVAIL);
}

/* Check that a port is in use while an id is bound to it or listens on it. */
static void bound_port_cannot_be_bound_again(void)
{
	struct side first = open_bound_side(RDMA_PS_TCP, host, 0);
	uint16_t port = port_of(first.id);

	expect_bind_fails(host, port, EADDRINUSE);
	expect_bind_fails("0.0.0.0", port, EADDRNOTAVAIL);
	CHECK_OK(rdma->rdma_listen(first.id, 1));
	expect_bind_fails(host, port, EADDRINUSE);
	side_close(&first);
	first = listen_at(host, port); /* the port is free again */
	side_close(&first);
	for (int v6 = 0; v6 < 2; v6++) {
		const char *all = v6 ? "::" : "0.0.0.0";

		first = open_bound_side(RDMA_PS_TCP, all, 0);
		port = port_of(first.id);
		expect_bind_fails(all, port, EADDRNOTAVAIL);
		expect_bind_fails(v6 ? "::1" : host, port, EADDRNOTAVAIL);
		side_close(&first);
	}
}

/* Check that a new listener can use the port while connections of an earlier listener are open or
 * in TIME_WAIT. */
static void port_can_be_reused_while_connections_remain(void)
{
	struct connection first = open_connection(), second = {0};
	uint16_t port = port_of(first.listener.id);

	side_drop(&first.listener);
	second.listener = listen_at(host, port);
	expect_bind_fails(host, port, EADDRINUSE);
	connect_sides(&second.listener, host, &second.client, &second.server);
	send_message(&first.client, &first.server, 1);
	send_message(&second.client, &second.server, 2);
	side_drop(&first.server); /* the server closes first, so its socket enters TIME_WAIT */
	connection_close(&second);
	connection_close(&first);
	second.listener = listen_at(host, port);
	connect_sides(&second.listener, host, &second.client, &second.server);
	connection_close(&second);
}

static int set_id_option(struct rdma_cm_id *id, int option, int value)
{
	uint8_t byte = (uint8_t)value;
	bool is_byte = option == RDMA_OPTION_ID_TOS || option == RDMA_OPTION_ID_ACK_TIMEOUT;

	return rdma->rdma_set_option(id, RDMA_OPTION_ID, option, is_byte ? (void *)&byte : &value,
				     is_byte ? sizeof(byte) : sizeof(value));
}

/* Check that a listener on the IPv6 wildcard also accepts IPv4 connections and reports IPv4
 * addresses for them. With RDMA_OPTION_ID_AFONLY, set before or after binding, it rejects them. */
static void ipv6_wildcard_accepts_ipv4_unless_afonly(bool v6_only, bool before_binding)
{
	struct connection it = {.listener = side_with_id()};
	union address any = address_of("::", 0);

	if (v6_only && before_binding)
		CHECK_OK(set_id_option(it.listener.id, RDMA_OPTION_ID_AFONLY, 1));
	CHECK_OK(rdma->rdma_bind_addr(it.listener.id, &any.any));
	if (v6_only && !before_binding)
		CHECK_OK(set_id_option(it.listener.id, RDMA_OPTION_ID_AFONLY, 1));
	CHECK_OK(rdma->rdma_listen(it.listener.id, 4));
	if (v6_only) {
		it.client = start_connecting("127.0.0.1", port_of(it.listener.id));
		expect_status(it.client.channel, RDMA_CM_EVENT_REJECTED, it.client.id, 8);
	} else {
		connect_sides(&it.listener, "127.0.0.1", &it.client, &it.server);
		CHECK_EQUAL(it.server.id->route.addr.src_addr.sa_family, AF_INET);
		CHECK_EQUAL(it.server.id->route.addr.dst_addr.sa_family, AF_INET);
		send_message(&it.client, &it.server, 1);
		side_drop(&it.server);
	}
	side_close(&it.client);
	connect_sides(&it.listener, "::1", &it.client, &it.server);
	CHECK_EQUAL(it.server.id->route.addr.src_addr.sa_family, AF_INET6);
	connection_close(&it);
}

static void set_option_rejects_invalid_values(void)
{
	struct side side = side_with_id();
	uint8_t byte = 8;
	int number = 1;

	CHECK_FAILS(rdma->rdma_set_option(side.id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &number,
					  sizeof(number)),
		    EINVAL);
	CHECK_FAILS(rdma->rdma_set_option(side.id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &byte,
					  sizeof(byte)),
		    EINVAL);
	CHECK_FAILS(rdma->rdma_set_option(side.id, 99, RDMA_OPTION_ID_TOS, &byte, sizeof(byte)),
		    ENOSYS);
	CHECK_FAILS(set_id_option(side.id, 99, 8), ENOSYS);
	CHECK_FAILS(set_id_option(side.id, RDMA_OPTION_ID_ACK_TIMEOUT, 32), EINVAL);
	side_close(&side);
}

/* Check that the options of an id are applied to its queue pair. */
static void options_apply_to_the_queue_pair(void)
{
	struct connection it = {.listener = listen_at(host, 0), .client = side_with_id()};
	struct rdma_conn_param ask = parameters(NULL, 0);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	CHECK_OK(set_id_option(it.client.id, RDMA_OPTION_ID_TOS, 8));
	CHECK_OK(set_id_option(it.client.id, RDMA_OPTION_ID_ACK_TIMEOUT, 11));
	resolve_to(&it.client, host, port_of(it.listener.id));
	CHECK_OK(set_id_option(it.client.id, RDMA_OPTION_ID_TOS, 0x20));
	side_queue_pair(&it.client);
	CHECK_OK(rdma->rdma_connect(it.client.id, &ask));
	it.server = take_request(&it.listener);
	accept_side(&it.server);
	expect_established(&it.client, &it.server);
	CHECK_OK(rdma->ibv_query_qp(it.client.id->qp, &attr, IBV_QP_TIMEOUT | IBV_QP_AV, &init));
	CHECK_EQUAL(attr.timeout, 11);
	CHECK_EQUAL(attr.ah_attr.grh.traffic_class, 0x20);
	connection_close(&it);
}

static void resolve_addr_selects_a_source_address(void)
{
	struct side side = side_with_id();
	union address to = address_of(host, 7777);
	union address from = address_of(host, 0);
	union address elsewhere = address_of("203.0.113.1", 0);
	union address other_family = address_of("::1", 7777);

	CHECK_FAILS(rdma->rdma_resolve_addr(side.id, &elsewhere.any, &to.any, 1000), EADDRNOTAVAIL);
	CHECK_OK(rdma->rdma_resolve_addr(side.id, &from.any, &to.any, 1000));
	expect_status(side.channel, RDMA_CM_EVENT_ADDR_RESOLVED, side.id, 0);
	CHECK(port_of(side.id) != 0);
	CHECK_EQUAL(ntohs(rdma->rdma_get_dst_port(side.id)), 7777);
	CHECK_FAILS(rdma->rdma_resolve_addr(side.id, NULL, &to.any, 1000), EINVAL);
	side_close(&side);

	/* The id is bound to the wildcard, so the route determines the source address. */
	side = open_bound_side(RDMA_PS_TCP, "0.0.0.0", 0);
	CHECK_FAILS(rdma->rdma_resolve_addr(side.id, NULL, &other_family.any, 1000), EINVAL);
	CHECK_OK(rdma->rdma_resolve_addr(side.id, NULL, &to.any, 1000));
	expect_status(side.channel, RDMA_CM_EVENT_ADDR_RESOLVED, side.id, 0);
	CHECK_EQUAL(side.id->route.addr.src_sin.sin_addr.s_addr, to.v4.sin_addr.s_addr);
	CHECK(port_of(side.id) != 0);
	CHECK(side.id->verbs != NULL);
	side_close(&side);
}

/* Check that rdma_listen() binds an unbound id to the IPv4 wildcard and a free port. The client
 * connects to `asked`. If that is the wildcard, the device uses the loopback address instead. */
static void listen_binds_an_unbound_id_to_the_wildcard(const char *asked)
{
	struct connection it = {.listener = side_with_id()};

	CHECK_OK(rdma->rdma_listen(it.listener.id, 1));
	connect_sides(&it.listener, asked, &it.client, &it.server);
	connection_close(&it);
}

int main(void)
{
	int before;

	cm_begin(100);
	STEP(only_a_specific_address_binds_to_a_device());
	before = count_resources();
	STEP(invalid_addresses_are_rejected());
	STEP(bound_port_cannot_be_bound_again());
	STEP(port_can_be_reused_while_connections_remain());
	STEP(ipv6_wildcard_accepts_ipv4_unless_afonly(false, false));
	STEP(ipv6_wildcard_accepts_ipv4_unless_afonly(true, true));
	STEP(ipv6_wildcard_accepts_ipv4_unless_afonly(true, false));
	STEP(listen_binds_an_unbound_id_to_the_wildcard("0.0.0.0"));
	STEP(set_option_rejects_invalid_values());
	STEP(options_apply_to_the_queue_pair());
	STEP(resolve_addr_selects_a_source_address());
	STEP(listen_binds_an_unbound_id_to_the_wildcard(host));
	expect_resources(before);
	return 0;
}
