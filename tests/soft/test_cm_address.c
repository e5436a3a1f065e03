/* Addresses and ports: binding, resolving, what is refused, options. */
#include "cm_side.h"

static struct side bound_to(const char *text, uint16_t port)
{
	struct side side = side_with_id();
	union address address = address_of(text, port);

	CHECK_EQUAL(rdma->rdma_bind_addr(side.id, &address.any), 0);
	return side;
}

static void bind_fails(const char *text, uint16_t port, int error)
{
	struct side side = side_with_id();
	union address address = address_of(text, port);

	CHECK_FAILS(rdma->rdma_bind_addr(side.id, &address.any), error);
	CHECK_EQUAL(rdma->rdma_get_src_port(side.id), 0);
	side_close(&side);
}

static void port_zero(const char *text)
{
	struct side side = bound_to(text, 0);
	union address shown = {.storage = side.id->route.addr.src_storage};

	CHECK(port_of(side.id) != 0);
	if (shown.any.sa_family == AF_INET)
		CHECK_EQUAL(ntohs(shown.v4.sin_port), port_of(side.id));
	else
		CHECK_EQUAL(ntohs(shown.v6.sin6_port), port_of(side.id));
	CHECK_EQUAL(rdma->rdma_get_dst_port(side.id), 0);
	side_close(&side);
}

/* rdma_bind_addr(3): a specific address binds to a device, the wildcard does not. */
static void device_binding(void)
{
	struct side specific = bound_to(host, 0);
	struct side any = bound_to("0.0.0.0", 0);

	CHECK(specific.id->verbs && specific.id->pd);
	CHECK_EQUAL(specific.id->port_num, 1);
	CHECK_EQUAL(specific.id->route.addr.addr.ibaddr.sgid.raw[11], 0xff);
	CHECK(!any.id->verbs);
	side_close(&specific);
	side_close(&any);
}

static void wrong_addresses(void)
{
	struct side side = side_with_id();
	union address strange = {.any = {.sa_family = AF_UNIX}};
	union address here = address_of(host, 0);

	CHECK_FAILS(rdma->rdma_bind_addr(side.id, &strange.any), EINVAL);
	CHECK_FAILS(rdma->rdma_resolve_addr(side.id, NULL, &strange.any, 1000), EINVAL);
	CHECK_FAILS(rdma->rdma_resolve_addr(side.id, &strange.any, &here.any, 1000), EINVAL);
	side_close(&side);
	bind_fails("203.0.113.1", 0, EADDRNOTAVAIL); /* TEST-NET-3: no host's */
	bind_fails("2001:db8::1", 0, EADDRNOTAVAIL);
}

/* A port is taken while a socket is bound to it, or listens. */
static void port_taken(void)
{
	struct side first = bound_to(host, 0);
	uint16_t port = port_of(first.id);

	bind_fails(host, port, EADDRINUSE);
	bind_fails("0.0.0.0", port, EADDRNOTAVAIL);
	CHECK_EQUAL(rdma->rdma_listen(first.id, 1), 0);
	bind_fails(host, port, EADDRINUSE);
	side_close(&first);
	first = listen_at(host, port); /* and free at once afterwards */
	side_close(&first);
	for (int v6 = 0; v6 < (on_system ? 1 : 2); v6++) {
		const char *all = v6 ? "::" : "0.0.0.0";

		first = bound_to(all, 0);
		port = port_of(first.id);
		bind_fails(all, port, EADDRNOTAVAIL);
		bind_fails(v6 ? "::1" : host, port, EADDRNOTAVAIL);
		side_close(&first);
	}
}

/* Connections of an earlier listener, alive or in TIME_WAIT, do not keep a port. */
static void port_after_connections(void)
{
	struct side listener = listen_at(host, 0);
	uint16_t port = port_of(listener.id);
	struct side client, server, second, other_client, other_server;

	connect_sides(&listener, host, &client, &server);
	CHECK_EQUAL(rdma->rdma_destroy_id(listener.id), 0);
	listener.id = NULL;
	second = listen_at(host, port);
	bind_fails(host, port, EADDRINUSE);
	connect_sides(&second, host, &other_client, &other_server);
	send_message(&client, &server, 1);
	send_message(&other_client, &other_server, 2);
	side_drop(&server); /* the server ends first: its side is in TIME_WAIT */
	side_drop(&other_server);
	side_close(&second);
	side_close(&client);
	side_close(&other_client);
	second = listen_at(host, port);
	connect_sides(&second, host, &client, &server);
	side_drop(&server);
	side_close(&client);
	side_close(&second);
	side_close(&listener);
}

static void set_int(struct rdma_cm_id *id, int option, int value)
{
	CHECK_EQUAL(rdma->rdma_set_option(id, RDMA_OPTION_ID, option, &value, sizeof(value)), 0);
}

/* REUSEADDR: two may be bound, one may listen. */
static void reuse(void)
{
	struct side first = side_with_id(), second = side_with_id();
	union address address = address_of(host, 0);

	set_int(first.id, RDMA_OPTION_ID_REUSEADDR, 1);
	set_int(second.id, RDMA_OPTION_ID_REUSEADDR, 1);
	CHECK_EQUAL(rdma->rdma_bind_addr(first.id, &address.any), 0);
	address = address_of(host, port_of(first.id));
	CHECK_EQUAL(rdma->rdma_bind_addr(second.id, &address.any), 0);
	CHECK_EQUAL(rdma->rdma_listen(first.id, 1), 0);
	CHECK_FAILS(rdma->rdma_listen(second.id, 1), EADDRINUSE);
	side_close(&first);
	CHECK_EQUAL(rdma->rdma_listen(second.id, 1), 0);
	side_close(&second);
}

/* The IPv6 wildcard takes IPv4 as well, shown as IPv4; with AFONLY it does not. */
static void both_families(void)
{
	struct side listener = side_with_id();
	union address any = address_of("::", 0);
	struct side client, server;

	CHECK_EQUAL(rdma->rdma_bind_addr(listener.id, &any.any), 0);
	CHECK_EQUAL(rdma->rdma_listen(listener.id, 4), 0);
	connect_sides(&listener, "127.0.0.1", &client, &server);
	CHECK_EQUAL(server.id->route.addr.src_addr.sa_family, AF_INET);
	CHECK_EQUAL(server.id->route.addr.dst_addr.sa_family, AF_INET);
	send_message(&client, &server, 1);
	side_drop(&server);
	side_close(&client);
	connect_sides(&listener, "::1", &client, &server);
	CHECK_EQUAL(server.id->route.addr.src_addr.sa_family, AF_INET6);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

static void one_family(bool before_binding)
{
	struct side listener = side_with_id();
	union address any = address_of("::", 0);
	struct side client, server;

	if (before_binding)
		set_int(listener.id, RDMA_OPTION_ID_AFONLY, 1);
	CHECK_EQUAL(rdma->rdma_bind_addr(listener.id, &any.any), 0);
	if (!before_binding)
		set_int(listener.id, RDMA_OPTION_ID_AFONLY, 1);
	CHECK_EQUAL(rdma->rdma_listen(listener.id, 4), 0);
	client = ask("127.0.0.1", port_of(listener.id));
	expect_status(client.channel, RDMA_CM_EVENT_REJECTED, client.id, 8);
	side_close(&client);
	connect_sides(&listener, "::1", &client, &server);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

static void options(void)
{
	struct side side = side_with_id();
	uint8_t byte = 8, too_much = 32;
	int number = 1;

	CHECK_FAILS(rdma->rdma_set_option(side.id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &number,
					  sizeof(number)),
		    EINVAL);
	CHECK_FAILS(rdma->rdma_set_option(side.id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &byte,
					  sizeof(byte)),
		    EINVAL);
	if (!on_system) /* the kernel takes it, and fails when it is used */
		CHECK_FAILS(rdma->rdma_set_option(side.id, RDMA_OPTION_ID,
						  RDMA_OPTION_ID_ACK_TIMEOUT, &too_much,
						  sizeof(too_much)),
			    EINVAL);
	CHECK_FAILS(rdma->rdma_set_option(side.id, RDMA_OPTION_ID, 99, &byte, sizeof(byte)),
		    ENOSYS);
	CHECK_FAILS(rdma->rdma_set_option(side.id, 99, RDMA_OPTION_ID_TOS, &byte, sizeof(byte)),
		    ENOSYS);
	CHECK_EQUAL(rdma->rdma_set_option(side.id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &byte,
					  sizeof(byte)),
		    0);
	CHECK_EQUAL(rdma->rdma_set_option(side.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT,
					  &byte, sizeof(byte)),
		    0);
	side_close(&side);
}

/* What is set arrives at the queue pair. */
static void options_arrive(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = side_with_id(), server;
	struct rdma_conn_param ask = parameters(NULL, 0);
	uint8_t tos = 0x20, timeout = 11;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	CHECK_EQUAL(rdma->rdma_set_option(client.id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1),
		    0);
	CHECK_EQUAL(rdma->rdma_set_option(client.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT,
					  &timeout, 1),
		    0);
	resolve_to(&client, host, port_of(listener.id));
	CHECK_EQUAL(rdma->rdma_set_option(client.id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, 1),
		    0);
	side_queue_pair(&client);
	CHECK_EQUAL(rdma->rdma_connect(client.id, &ask), 0);
	server = take_request(&listener);
	accept_side(&server);
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	CHECK_EQUAL(rdma->ibv_query_qp(client.id->qp, &attr, IBV_QP_TIMEOUT | IBV_QP_AV, &init), 0);
	CHECK_EQUAL(attr.timeout, timeout);
	CHECK_EQUAL(attr.ah_attr.grh.traffic_class, tos);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

static void resolving(void)
{
	struct side side = side_with_id();
	union address to = address_of(host, 7777);
	union address from = address_of(host, 0);
	union address elsewhere = address_of("203.0.113.1", 0);
	union address other_family = address_of("::1", 7777);

	CHECK_FAILS(rdma->rdma_resolve_addr(side.id, &elsewhere.any, &to.any, 1000), EADDRNOTAVAIL);
	CHECK_EQUAL(rdma->rdma_resolve_addr(side.id, &from.any, &to.any, 1000), 0);
	expect_status(side.channel, RDMA_CM_EVENT_ADDR_RESOLVED, side.id, 0);
	CHECK(port_of(side.id) != 0);
	CHECK_EQUAL(ntohs(rdma->rdma_get_dst_port(side.id)), 7777);
	CHECK_FAILS(rdma->rdma_resolve_addr(side.id, NULL, &to.any, 1000), EINVAL);
	side_drop(&side);

	/* Bound to any address: the route decides which. */
	CHECK_EQUAL(rdma->rdma_create_id(side.channel, &side.id, NULL, RDMA_PS_TCP), 0);
	from = address_of("0.0.0.0", 0);
	CHECK_EQUAL(rdma->rdma_bind_addr(side.id, &from.any), 0);
	CHECK_FAILS(rdma->rdma_resolve_addr(side.id, NULL, &other_family.any, 1000), EINVAL);
	CHECK_EQUAL(rdma->rdma_resolve_addr(side.id, NULL, &to.any, 1000), 0);
	expect_status(side.channel, RDMA_CM_EVENT_ADDR_RESOLVED, side.id, 0);
	CHECK_EQUAL(side.id->route.addr.src_sin.sin_addr.s_addr, to.v4.sin_addr.s_addr);
	CHECK(port_of(side.id) != 0);
	CHECK(side.id->verbs != NULL);
	side_close(&side);
}

/* The wildcard as a destination is this host. */
static void to_any_address(void)
{
	struct side listener = listen_at("0.0.0.0", 0);
	struct side client = ask("0.0.0.0", port_of(listener.id));
	struct side server = take_request(&listener);

	accept_side(&server);
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* rdma_listen without an address: any IPv4 address, any port. */
static void listen_unbound(void)
{
	struct side listener = side_with_id();
	struct side client, server;

	CHECK_EQUAL(rdma->rdma_listen(listener.id, 1), 0);
	connect_sides(&listener, host, &client, &server);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

int main(void)
{
	int before;

	cm_begin(100);
	STEP(port_zero(host));
	before = resources();
	STEP(port_zero("0.0.0.0"));
	STEP(port_zero("::"));
	STEP(device_binding());
	STEP(wrong_addresses());
	STEP(port_taken());
	STEP(port_after_connections());
	if (!on_system) { /* there, no socket may listen while two are bound */
		STEP(reuse());
		STEP(port_zero("::1"));
		STEP(both_families());
		STEP(one_family(true));
		STEP(one_family(false));
		STEP(to_any_address());
	}
	STEP(options());
	STEP(options_arrive());
	STEP(resolving());
	STEP(listen_unbound());
	if (!on_system)
		expect_resources(before);
	return 0;
}
