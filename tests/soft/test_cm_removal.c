/* The device goes, or gets another address: RDMA_CM_EVENT_DEVICE_REMOVAL,
 * RDMA_CM_EVENT_ADDR_CHANGE. */
#include "cm_side.h"

static void raise_event(enum ibv_event_type type)
{
	CHECK_EQUAL(aiordma_embedded_raise(type), 0);
}

static struct side serving(void)
{
	union address address = address_of(host, 0);
	struct side side = side_open();

	CHECK_EQUAL(rdma->rdma_create_id(side.channel, &side.id, NULL, RDMA_PS_UDP), 0);
	CHECK_EQUAL(rdma->rdma_bind_addr(side.id, &address.any), 0);
	CHECK_EQUAL(rdma->rdma_listen(side.id, 0), 0);
	return side;
}

static void bind_answers(int error)
{
	struct side side = side_with_id();
	union address address = address_of(host, 0);

	if (error)
		CHECK_FAILS(rdma->rdma_bind_addr(side.id, &address.any), error);
	else
		CHECK_EQUAL(rdma->rdma_bind_addr(side.id, &address.any), 0);
	side_close(&side);
}

/* An id that is removed can only be destroyed; what comes after it is healthy. */
static void removal(void)
{
	struct side listener = listen_at(host, 0), service = serving(), client, server;
	struct side anywhere = listen_at("0.0.0.0", 0);
	struct side asking, asked, untouched = side_with_id();
	struct rdma_conn_param ask_again = parameters(NULL, 0);
	struct ibv_qp_attr state;
	struct ibv_qp_init_attr initial;

	connect_sides(&listener, host, &client, &server);
	asking = ask(host, port_of(listener.id));
	asked = take_request(&listener);
	raise_event(IBV_EVENT_DEVICE_FATAL);
	expect_status(client.channel, RDMA_CM_EVENT_DEVICE_REMOVAL, client.id, 0);
	expect_status(asking.channel, RDMA_CM_EVENT_DEVICE_REMOVAL, asking.id, 0);
	expect_status(service.channel, RDMA_CM_EVENT_DEVICE_REMOVAL, service.id, 0);
	expect_status(listener.channel, RDMA_CM_EVENT_DEVICE_REMOVAL, listener.id, 0);
	expect_status(anywhere.channel, RDMA_CM_EVENT_DEVICE_REMOVAL, anywhere.id, 0);
	expect_status(server.channel, RDMA_CM_EVENT_DEVICE_REMOVAL, server.id, 0);
	expect_nothing(listener.channel); /* of `asked`, which is not accepted */
	expect_nothing(client.channel);
	expect_nothing(untouched.channel);
	CHECK_EQUAL(rdma->ibv_query_qp(client.id->qp, &state, IBV_QP_STATE, &initial), 0);
	CHECK_EQUAL(state.qp_state, IBV_QPS_ERR);
	CHECK_FAILS(rdma->rdma_connect(client.id, &ask_again), EINVAL);
	CHECK_FAILS(rdma->rdma_accept(asked.id, &ask_again), EINVAL);
	CHECK_FAILS(rdma->rdma_listen(listener.id, 1), ENODEV);
	bind_answers(ENODEV);
	side_drop(&server);
	side_drop(&asked);
	side_close(&client);
	side_close(&asking);
	side_close(&listener);
	side_close(&service);
	bind_answers(ENODEV); /* what listens on all addresses is on the device as well */
	side_close(&anywhere);
	bind_answers(0);
	side_close(&untouched);
}

static void another_address(void)
{
	struct side listener = listen_at(host, 0), client, server, unbound = side_with_id();

	connect_sides(&listener, host, &client, &server);
	raise_event(IBV_EVENT_LID_CHANGE);
	expect_status(client.channel, RDMA_CM_EVENT_ADDR_CHANGE, client.id, 0);
	expect_status(listener.channel, RDMA_CM_EVENT_ADDR_CHANGE, listener.id, 0);
	expect_status(server.channel, RDMA_CM_EVENT_ADDR_CHANGE, server.id, 0);
	expect_nothing(unbound.channel);
	send_message(&client, &server, 3); /* the connection stays */
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
	side_close(&unbound);
}

int main(void)
{
	int before;

	cm_begin(60);
	STEP(another_address());
	before = resources();
	STEP(removal());
	STEP(another_address());
	expect_resources(before);
	return 0;
}
