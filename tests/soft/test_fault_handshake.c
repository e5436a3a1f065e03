/* Messages of the connection manager that get lost on command: the waiting side gives up in time,
 * as on a network (IBTA vol 1, 12.9.8). */
#include "cm_side.h"

#include "cm/cm_internal.h"

static void spec(const char *text)
{
	char error[256];

	CHECK_EQUAL(aiordma_embedded_faults(text, error, sizeof(error)), 0);
}

static uint64_t lost(void)
{
	struct aiordma_fault_counts counts;

	aiordma_embedded_fault_counts(&counts);
	return counts.handshakes;
}

/* REQ is the first one, then come MRA and REP here, and RTU. */
static void request(void)
{
	const struct soft_cm_limits before = soft_cm_limits;
	struct side listener = listen_at(host, 0), client;

	soft_cm_limits.response_ms = 100;
	spec("handshake=@1");
	client = ask(host, port_of(listener.id));
	expect_status(client.channel, RDMA_CM_EVENT_UNREACHABLE, client.id, -ETIMEDOUT);
	expect_nothing(listener.channel);
	CHECK_EQUAL(lost(), 1);
	side_close(&client);
	soft_cm_limits = before;
	/* The next one comes through. */
	struct side again, server;

	connect_sides(&listener, host, &again, &server);
	send_message(&again, &server, 3);
	CHECK_EQUAL(lost(), 1);
	spec(NULL);
	CHECK_EQUAL(rdma->rdma_disconnect(again.id), 0);
	expect_end(&again);
	expect_end(&server);
	side_close(&again);
	side_drop(&server);
	side_close(&listener);
}

static void ready_to_use(void)
{
	const struct soft_cm_limits before = soft_cm_limits;
	struct side listener = listen_at(host, 0), client, server;

	spec("handshake=@4");
	client = ask(host, port_of(listener.id));
	server = take_request(&listener);
	soft_cm_limits.service_ms = 100;
	accept_side(&server);
	expect_status(listener.channel, RDMA_CM_EVENT_UNREACHABLE, server.id, -ETIMEDOUT);
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	CHECK_EQUAL(lost(), 2);
	spec(NULL);
	soft_cm_limits = before;
	side_close(&client);
	side_drop(&server);
	side_close(&listener);
}

int main(void)
{
	cm_begin(60);
	STEP(request());
	STEP(ready_to_use());
	return 0;
}
