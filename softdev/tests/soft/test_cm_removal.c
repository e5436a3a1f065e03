/* Test the removal of a device (RDMA_CM_EVENT_DEVICE_REMOVAL) and a change of its address
 * (RDMA_CM_EVENT_ADDR_CHANGE). */
#include "cm_side.h"

static void raise_event(enum ibv_event_type type)
{
	CHECK_OK(aiordma_embedded_raise(type));
}

static void expect_success_event(struct side *side, enum rdma_cm_event_type type)
{
	expect_status(side->channel, type, side->id, 0);
}

static void try_bind(const char *text, int error)
{
	struct side side = side_with_id();
	union address address = address_of(text, 0);

	if (error)
		CHECK_FAILS(rdma->rdma_bind_addr(side.id, &address.any), error);
	else
		CHECK_OK(rdma->rdma_bind_addr(side.id, &address.any));
	side_close(&side);
}

/* Check that ids of a removed device can no longer be used, only destroyed. New ids work when all
 * old ones are gone. */
static void removed_device_fails_calls_until_ids_are_destroyed(void)
{
	struct connection it = open_connection();
	struct side service = open_bound_side(RDMA_PS_UDP, host, 0);
	struct side anywhere = listen_at("0.0.0.0", 0);
	struct side asking, asked, untouched = side_with_id();
	struct side *removed[] = {&it.client,   &asking,   &service,
				  &it.listener, &anywhere, &it.server};
	struct rdma_conn_param ask_again = parameters(NULL, 0);
	struct ibv_qp_attr state;
	struct ibv_qp_init_attr initial;

	CHECK_OK(rdma->rdma_listen(service.id, 0));
	asking = start_connecting(host, port_of(it.listener.id));
	asked = take_request(&it.listener);
	raise_event(IBV_EVENT_DEVICE_FATAL);
	FOR_EACH (i, removed)
		expect_success_event(removed[i], RDMA_CM_EVENT_DEVICE_REMOVAL);
	expect_nothing(it.listener.channel); /* no event for `asked`, a request not yet accepted */
	expect_nothing(it.client.channel);
	expect_nothing(untouched.channel);
	CHECK_OK(rdma->ibv_query_qp(it.client.id->qp, &state, IBV_QP_STATE, &initial));
	CHECK_EQUAL(state.qp_state, IBV_QPS_ERR);
	CHECK_FAILS(rdma->rdma_connect(it.client.id, &ask_again), EINVAL);
	CHECK_FAILS(rdma->rdma_accept(asked.id, &ask_again), EINVAL);
	CHECK_FAILS(rdma->rdma_listen(it.listener.id, 1), ENODEV);
	try_bind(host, ENODEV);
	side_drop(&asked);
	side_close(&asking);
	connection_close(&it);
	side_close(&service);
	try_bind(host, ENODEV); /* the wildcard listener still uses the device */
	side_close(&anywhere);
	try_bind(host, 0);
	side_close(&untouched);
}

static void address_change_is_reported_to_bound_ids(void)
{
	struct connection it = open_connection();
	struct side unbound = side_with_id();

	raise_event(IBV_EVENT_LID_CHANGE);
	expect_success_event(&it.client, RDMA_CM_EVENT_ADDR_CHANGE);
	expect_success_event(&it.listener, RDMA_CM_EVENT_ADDR_CHANGE);
	expect_success_event(&it.server, RDMA_CM_EVENT_ADDR_CHANGE);
	expect_nothing(unbound.channel);
	send_message(&it.client, &it.server, 3); /* the connection is still up */
	connection_close(&it);
	side_close(&unbound);
}

static void removing_one_device_spares_ids_of_the_other(void)
{
	struct ibv_context **list;
	int count;

	CHECK_OK(setenv("AIORDMA_EMBEDDED_DEVICES", "2", 1));
	CHECK(list = rdma->rdma_get_devices(&count));
	CHECK(count == 2 && !list[2]);
	struct side stays = listen_at("127.0.0.1", 0), goes = listen_at("127.0.0.2", 0);
	struct side anywhere = listen_at("0.0.0.0", 0), asking;

	CHECK(stays.id->verbs == list[0] && goes.id->verbs == list[1] && !anywhere.id->verbs);
	rdma->rdma_free_devices(list);
	CHECK_OK(aiordma_embedded_raise_on("embedded1", IBV_EVENT_DEVICE_FATAL));
	expect_success_event(&goes, RDMA_CM_EVENT_DEVICE_REMOVAL);
	expect_nothing(stays.channel);
	expect_nothing(anywhere.channel);
	try_bind("127.0.0.2", ENODEV);
	try_bind("127.0.0.1", 0);
	asking = start_connecting("127.0.0.1", port_of(anywhere.id));
	struct side asked = take_request(&anywhere);

	CHECK(asked.id->verbs == asking.id->verbs && asked.id->verbs == stays.id->verbs);
	side_drop(&asked);
	side_close(&asking);
	/* The wildcard listener cannot be reached at the address of the removed device. */
	asking = open_bound_side(RDMA_PS_TCP, "127.0.0.1", 0);
	side_ask(&asking, "127.0.0.2", port_of(anywhere.id));
	expect_status(asking.channel, RDMA_CM_EVENT_REJECTED, asking.id,
		      8); /* invalid service id */
	expect_nothing(anywhere.channel);
	side_close(&asking);
	side_close(&goes);
	side_close(&anywhere);
	side_close(&stays);
	try_bind("127.0.0.2", 0);
}

int main(void)
{
	int before;

	cm_begin(60);
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		STEP(removing_one_device_spares_ids_of_the_other());
		exit(0);
	}
	CHECK_EQUAL(waitpid(child, &before, 0), child);
	CHECK_EQUAL(before, 0);
	STEP(address_change_is_reported_to_bound_ids());
	before = count_resources();
	STEP(removed_device_fails_calls_until_ids_are_destroyed());
	STEP(address_change_is_reported_to_bound_ids());
	expect_resources(before);
	return 0;
}
