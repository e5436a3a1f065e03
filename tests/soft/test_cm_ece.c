/* Enhanced connection establishment: rdma_set_local_ece(3), rdma_get_remote_ece(3),
 * rdma_reject_ece(3) (docs of librdmacm; reason 35 is "vendor option not supported", IBTA
 * 12.6.7.2). */
#include "cm_side.h"

enum {
	VENDOR_OPTION = 35
};

/* A client that has offered, and the request that came of it. */
static struct connection offered(struct ibv_ece options)
{
	struct connection it = {.listener = listen_at(host, 0), .client = side_with_id()};
	struct rdma_conn_param ask = {.qp_num = 0x123456};
	struct ibv_ece heard = {0};

	resolve_to(&it.client, host, port_of(it.listener.id));
	CHECK_EQUAL(rdma->rdma_set_local_ece(it.client.id, &options), 0);
	CHECK_EQUAL(rdma->rdma_connect(it.client.id, &ask), 0);
	it.server = take_request(&it.listener);
	CHECK_EQUAL(rdma->rdma_get_remote_ece(it.server.id, &heard), 0);
	CHECK_EQUAL(heard.vendor_id, options.vendor_id);
	CHECK_EQUAL(heard.options, options.options);
	CHECK_EQUAL(heard.comp_mask, 0);
	return it;
}

static void choose(void)
{
	struct connection it =
		offered((struct ibv_ece){.vendor_id = 0xffffffff, .options = 0x10000001});
	struct ibv_ece choice = {.vendor_id = 0x15b3, .options = 0x10}, heard = {0};
	struct rdma_conn_param answer = {.qp_num = 0x654321};

	CHECK_EQUAL(rdma->rdma_set_local_ece(it.server.id, &choice), 0);
	CHECK_EQUAL(rdma->rdma_accept(it.server.id, &answer), 0);
	expect_status(it.client.channel, RDMA_CM_EVENT_CONNECT_RESPONSE, it.client.id, 0);
	CHECK_EQUAL(rdma->rdma_get_remote_ece(it.client.id, &heard), 0);
	CHECK_EQUAL(heard.vendor_id, 0x15b3);
	CHECK_EQUAL(heard.options, 0x10);
	connection_close(&it);
}

static void refuse(void)
{
	struct connection it = offered((struct ibv_ece){.vendor_id = 1});
	struct rdma_cm_event *event;

	CHECK_EQUAL(rdma->rdma_reject_ece(it.server.id, "no", 2), 0);
	event = expect(it.client.channel, RDMA_CM_EVENT_REJECTED, it.client.id);
	CHECK_EQUAL(event->status, VENDOR_OPTION);
	CHECK(!memcmp(event->param.conn.private_data, "no", 2));
	acknowledge(event);
	CHECK_FAILS(rdma->rdma_reject_ece(it.server.id, NULL, 0), EINVAL); /* once is enough */
	connection_close(&it);
}

/* Only where the application makes its queue pair itself; a vendor must be named; nothing that
 * is not known yet. */
static void wrong(void)
{
	struct side listener = listen_at(host, 0), client = side_with_id();
	struct ibv_ece ece = {.vendor_id = 1}, absent = {0}, more = {1, 0, 1};

	CHECK_FAILS(rdma->rdma_set_local_ece(NULL, &ece), EINVAL);
	CHECK_FAILS(rdma->rdma_set_local_ece(client.id, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_set_local_ece(client.id, &absent), EINVAL);
	CHECK_FAILS(rdma->rdma_set_local_ece(client.id, &more), EINVAL);
	CHECK_FAILS(rdma->rdma_get_remote_ece(NULL, &ece), EINVAL);
	CHECK_FAILS(rdma->rdma_get_remote_ece(client.id, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_reject_ece(NULL, NULL, 0), EINVAL);
	resolve_to(&client, host, port_of(listener.id));
	side_queue_pair(&client);
	CHECK_FAILS(rdma->rdma_set_local_ece(client.id, &ece), EINVAL);
	CHECK_FAILS(rdma->rdma_get_remote_ece(client.id, &ece), EINVAL);
	side_close(&client);
	side_close(&listener);
}

int main(void)
{
	cm_begin(20);
	STEP(choose());
	STEP(refuse());
	STEP(wrong());
	return 0;
}
