/* Many connections at once; nothing is left of them. */
#include "cm_side.h"

static void one(struct side *listener, int number)
{
	struct side client, server;

	connect_sides(listener, host, &client, &server);
	send_message(&client, &server, (uint8_t)number);
	CHECK_EQUAL(rdma->rdma_disconnect(client.id), 0);
	expect_status(server.channel, RDMA_CM_EVENT_DISCONNECTED, server.id, 0);
	side_drop(&server);
	side_close(&client);
}

/* All clients on one channel, as an event loop would have them. */
static void at_once(int count)
{
	struct side listener = listen_at(host, 0), channel = side_open();
	struct side *clients = calloc((size_t)count, sizeof(*clients));
	struct side *servers = calloc((size_t)count, sizeof(*servers));
	uint16_t port = port_of(listener.id);
	struct rdma_conn_param ask = parameters(NULL, 0);

	one(&listener, 0);
	int before = resources();
	int established = 0;

	CHECK(clients && servers);
	for (int i = 0; i < count; i++) {
		clients[i].channel = channel.channel;
		CHECK_EQUAL(
			rdma->rdma_create_id(channel.channel, &clients[i].id, NULL, RDMA_PS_TCP),
			0);
		resolve_to(&clients[i], host, port);
		side_queue_pair(&clients[i]);
	}
	for (int i = 0; i < count; i++)
		CHECK_EQUAL(rdma->rdma_connect(clients[i].id, &ask), 0);
	for (int asked = 0; asked < count || established < count;) {
		struct rdma_cm_event *event;

		CHECK_EQUAL(rdma->rdma_get_cm_event(listener.channel, &event), 0);
		if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
			servers[asked] =
				(struct side){.id = event->id, .channel = listener.channel};
			acknowledge(event);
			accept_side(&servers[asked++]);
		} else {
			CHECK_EQUAL(event->event, RDMA_CM_EVENT_ESTABLISHED);
			acknowledge(event);
			established++;
		}
	}
	for (int i = 0; i < count; i++)
		expect_status(channel.channel, RDMA_CM_EVENT_ESTABLISHED, NULL, 0);
	for (int i = 0; i < count; i++) { /* requests came in the order of the connections */
		struct side *server = NULL;

		for (int j = 0; j < count && !server; j++)
			if (servers[j].id->route.addr.dst_sin.sin_port ==
			    clients[i].id->route.addr.src_sin.sin_port)
				server = &servers[j];
		CHECK(server);
		send_message(&clients[i], server, (uint8_t)i);
	}
	for (int i = 0; i < count; i++) {
		side_drop(&servers[i]);
		side_drop(&clients[i]);
	}
	expect_resources(before);
	free(clients);
	free(servers);
	side_close(&channel);
	side_close(&listener);
}

int main(void)
{
	int before;

	cm_begin(100);
	STEP(at_once(1));
	before = resources();
	STEP(at_once(200));
	expect_resources(before);
	return 0;
}
