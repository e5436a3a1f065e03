/* Connections within one process: every step, what the events carry, and the end from each side. */
#include "cm_side.h"

static uint8_t pattern[255];

static void check_padded(const struct rdma_cm_event *event, int sent, int room)
{
	const uint8_t *got = event->param.conn.private_data;

	CHECK_EQUAL(event->param.conn.private_data_len, room);
	CHECK(memcmp(got, pattern, (size_t)sent) == 0);
	for (int i = sent; i < room; i++)
		CHECK_EQUAL(got[i], 0);
}

static void check_request(const struct rdma_cm_event *event, const struct side *client)
{
	const struct rdma_conn_param *conn = &event->param.conn;

	CHECK_EQUAL(event->status, 0);
	CHECK_EQUAL(conn->responder_resources, 3); /* the other side's initiator depth */
	CHECK_EQUAL(conn->initiator_depth, 5);
	CHECK_EQUAL(conn->retry_count, 6);
	CHECK_EQUAL(conn->rnr_retry_count, 4);
	CHECK_EQUAL(conn->flow_control, 1);
	CHECK_EQUAL(conn->srq, 0);
	CHECK_EQUAL(conn->qp_num, client->id->qp->qp_num);
}

static void check_addresses(const struct side *client, const struct side *server)
{
	const struct rdma_addr *ours = &client->id->route.addr;
	const struct rdma_addr *theirs = &server->id->route.addr;

	CHECK(server->id->verbs);
	CHECK_EQUAL(server->id->port_num, 1);
	CHECK_EQUAL(ours->src_addr.sa_family, theirs->dst_addr.sa_family);
	CHECK_EQUAL(ours->dst_addr.sa_family, theirs->src_addr.sa_family);
	CHECK_EQUAL(rdma->rdma_get_src_port(client->id), rdma->rdma_get_dst_port(server->id));
	CHECK_EQUAL(rdma->rdma_get_dst_port(client->id), rdma->rdma_get_src_port(server->id));
	CHECK(rdma->rdma_get_src_port(client->id) != 0);
	CHECK(memcmp(&ours->addr.ibaddr.sgid, &theirs->addr.ibaddr.dgid, 16) == 0);
	CHECK(memcmp(&ours->addr.ibaddr.dgid, &theirs->addr.ibaddr.sgid, 16) == 0);
}

/* What the connection manager sets in a queue pair that it brings up. */
static void check_queue_pair(struct side *side, const struct side *other, int responder,
			     int initiator, int retry, int rnr_retry)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	CHECK_EQUAL(rdma->ibv_query_qp(side->id->qp, &attr,
				       IBV_QP_STATE | IBV_QP_DEST_QPN | IBV_QP_MAX_QP_RD_ATOMIC |
					       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_RETRY_CNT |
					       IBV_QP_RNR_RETRY | IBV_QP_ACCESS_FLAGS,
				       &init),
		    0);
	CHECK_EQUAL(attr.qp_state, IBV_QPS_RTS);
	CHECK_EQUAL(attr.dest_qp_num, other->id->qp->qp_num);
	CHECK_EQUAL(attr.max_dest_rd_atomic, responder);
	CHECK_EQUAL(attr.max_rd_atomic, initiator);
	CHECK_EQUAL(attr.retry_cnt, retry);
	CHECK_EQUAL(attr.rnr_retry, rnr_retry);
	CHECK(attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE);
}

static void qp_state_is(struct side *side, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	CHECK_EQUAL(rdma->ibv_query_qp(side->id->qp, &attr, IBV_QP_STATE, &init), 0);
	CHECK_EQUAL(attr.qp_state, state);
}

/* The whole way, with private data of the given lengths; the client ends it, or the server. */
static void whole_way(const char *text, int asked, int answered, bool client_ends)
{
	static int context;
	struct side listener = listen_at(text, 0);
	struct side client = side_with_id();
	struct side server = {.channel = listener.channel};
	struct rdma_conn_param ask = parameters(pattern, (uint8_t)asked);
	struct rdma_conn_param answer = parameters(pattern, (uint8_t)answered);
	struct side *ends = client_ends ? &client : &server;
	struct side *learns = client_ends ? &server : &client;
	struct rdma_cm_event *event;

	listener.id->context = &context;
	resolve_to(&client, text, port_of(listener.id));
	CHECK(client.id->verbs && client.id->pd);
	CHECK_EQUAL(client.id->port_num, 1);
	side_queue_pair(&client);
	qp_state_is(&client, IBV_QPS_INIT);
	ask.responder_resources = 5;
	ask.initiator_depth = 3;
	ask.retry_count = 6;
	ask.rnr_retry_count = 4;
	ask.flow_control = 1;
	CHECK_EQUAL(rdma->rdma_connect(client.id, &ask), 0);

	event = expect(listener.channel, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
	CHECK(event->listen_id == listener.id);
	server.id = event->id;
	CHECK(server.id != listener.id && server.id->channel == listener.channel);
	CHECK(server.id->context == &context);
	CHECK_EQUAL(server.id->ps, RDMA_PS_TCP);
	check_request(event, &client);
	check_padded(event, asked, 56);
	check_addresses(&client, &server);
	acknowledge(event);

	side_queue_pair(&server);
	answer.responder_resources = 2;
	answer.initiator_depth = 4;
	answer.rnr_retry_count = 5;
	CHECK_EQUAL(rdma->rdma_accept(server.id, &answer), 0);
	event = expect(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id);
	CHECK_EQUAL(event->status, 0);
	check_padded(event, answered, 196);
	CHECK_EQUAL(event->param.conn.responder_resources, 4);
	CHECK_EQUAL(event->param.conn.initiator_depth, 2);
	CHECK_EQUAL(event->param.conn.qp_num, server.id->qp->qp_num);
	acknowledge(event);
	event = expect(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id);
	CHECK_EQUAL(event->status, 0);
	CHECK_EQUAL(event->param.conn.private_data_len, 0);
	acknowledge(event);
	check_queue_pair(&client, &server, 4, 2, 6, 5);
	check_queue_pair(&server, &client, 2, 4, 6, 4);

	send_message(&client, &server, 0x11);
	send_message(&server, &client, 0x22);

	CHECK_EQUAL(rdma->rdma_disconnect(ends->id), 0);
	qp_state_is(ends, IBV_QPS_ERR);
	expect_status(learns->channel, RDMA_CM_EVENT_DISCONNECTED, learns->id, 0);
	CHECK_EQUAL(rdma->rdma_disconnect(learns->id), 0);
	qp_state_is(learns, IBV_QPS_ERR);
	expect_status(ends->channel, RDMA_CM_EVENT_DISCONNECTED, ends->id, 0);
	expect_status(ends->channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, ends->id, 0);
	expect_status(learns->channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, learns->id, 0);
	CHECK_EQUAL(rdma->rdma_disconnect(ends->id), 0); /* again: nothing to do, no event */
	expect_nothing(ends->channel);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

static void reject(int length)
{
	struct side listener = listen_at(host, 0);
	struct side client = ask(host, port_of(listener.id));
	struct side server = take_request(&listener);
	struct rdma_cm_event *event;

	CHECK_FAILS(rdma->rdma_reject(server.id, pattern, 149), EINVAL);
	CHECK_EQUAL(rdma->rdma_reject(server.id, length ? pattern : NULL, (uint8_t)length), 0);
	event = expect(client.channel, RDMA_CM_EVENT_REJECTED, client.id);
	CHECK_EQUAL(event->status, 28);
	check_padded(event, length, 148);
	acknowledge(event);
	qp_state_is(&client, IBV_QPS_ERR);
	CHECK_FAILS(rdma->rdma_accept(server.id, &(struct rdma_conn_param){.qp_num = 1}), EINVAL);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* Too much private data is an error of the call, and nothing has been sent. */
static void private_data_limits(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = side_with_id();
	struct side server;
	struct rdma_conn_param ask = parameters(pattern, 57);
	struct rdma_conn_param answer = parameters(pattern, 197);

	resolve_to(&client, host, port_of(listener.id));
	side_queue_pair(&client);
	CHECK_FAILS(rdma->rdma_connect(client.id, &ask), EINVAL);
	ask.private_data_len = 56;
	ask.initiator_depth = 254; /* more than the device has; 255 is "as many as there are" */
	CHECK_FAILS(rdma->rdma_connect(client.id, &ask), EINVAL);
	ask.initiator_depth = RDMA_MAX_INIT_DEPTH;
	CHECK_EQUAL(rdma->rdma_connect(client.id, &ask), 0);
	server = take_request(&listener);
	side_queue_pair(&server);
	CHECK_FAILS(rdma->rdma_accept(server.id, &answer), EINVAL);
	if (!on_system) { /* the kernel rejects the request when accepting fails */
		answer.private_data_len = 196;
		CHECK_EQUAL(rdma->rdma_accept(server.id, &answer), 0);
		expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
		expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	} else {
		expect_status(client.channel, RDMA_CM_EVENT_REJECTED, client.id, 28);
	}
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* Without parameters both sides take what the device has. */
static void no_parameters(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = side_with_id();
	struct side server;

	resolve_to(&client, host, port_of(listener.id));
	CHECK_FAILS(rdma->rdma_connect(client.id, NULL), EINVAL); /* which queue pair? */
	side_queue_pair(&client);
	CHECK_EQUAL(rdma->rdma_connect(client.id, NULL), 0);
	server = take_request(&listener);
	if (!on_system) /* librdmacm 44 crashes */
		CHECK_FAILS(rdma->rdma_accept(server.id, NULL), EINVAL);
	side_queue_pair(&server);
	CHECK_EQUAL(rdma->rdma_accept(server.id, NULL), 0);
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	send_message(&client, &server, 0x33);
	side_drop(&server);
	expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
	side_close(&client);
	side_close(&listener);
}

/* The accepting side may send at once: it goes out when the connection is there. */
static void send_before_established(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = ask(host, port_of(listener.id));
	struct side server = take_request(&listener);

	accept_side(&server);
	send_message(&server, &client, 0x3c);
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* ---- queue pairs that the application makes and moves itself ------------------------------- */

static bool own_psns; /* of the application's choice, not the library's */

static void move(struct side *side, struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = {.qp_state = state};
	int mask;

	CHECK_EQUAL(rdma->rdma_init_qp_attr(side->id, &attr, &mask), 0);
	CHECK(mask & IBV_QP_STATE);
	if (own_psns)
		attr.rq_psn = attr.sq_psn = 5;
	if (!on_system)
		attr.ah_attr.dlid = 0xbeef; /* RoCE leaves it to applications */
	CHECK_EQUAL(rdma->ibv_modify_qp(qp, &attr, mask), 0);
}

static struct ibv_qp *own_queue_pair(struct side *side)
{
	struct ibv_qp_init_attr attr;
	struct ibv_qp *qp;

	side_memory(side);
	attr = side_attributes(side);
	qp = rdma->ibv_create_qp(side->pd, &attr);
	CHECK(qp);
	move(side, qp, IBV_QPS_INIT);
	return qp;
}

/* The helpers want the queue pair in the id, the library must not find it there. */
static void exchange(struct side *client, struct ibv_qp *client_qp, struct side *server,
		     struct ibv_qp *server_qp)
{
	client->id->qp = client_qp;
	server->id->qp = server_qp;
	side_post_receive(client);
	side_post_receive(server);
	send_message(client, server, 0x44);
	send_message(server, client, 0x55);
	client->id->qp = NULL;
	server->id->qp = NULL;
}

enum moment {
	BEFORE_ACCEPT,
	BEFORE_ESTABLISHED,
	AFTER_ESTABLISHED
};

static void own_queue_pairs(enum moment server_moves, bool with_own_psns)
{
	own_psns = with_own_psns;
	struct side listener = listen_at(host, 0);
	struct side client = side_with_id();
	struct side server;
	struct ibv_qp *client_qp, *server_qp;
	struct rdma_conn_param ask = parameters(pattern, 7);
	struct rdma_conn_param answer = parameters(pattern, 9);
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
	struct rdma_cm_event *event;
	int mask;

	resolve_to(&client, host, port_of(listener.id));
	client_qp = own_queue_pair(&client);
	ask.qp_num = client_qp->qp_num;
	CHECK_EQUAL(rdma->rdma_connect(client.id, &ask), 0);
	CHECK_FAILS(rdma->rdma_init_qp_attr(client.id, &attr, &mask), EINVAL); /* too early */
	if (!on_system) /* the kernel rejects what cannot be accepted yet */
		CHECK_FAILS(rdma->rdma_establish(client.id), EINVAL);

	server = take_request(&listener);
	server_qp = own_queue_pair(&server);
	answer.qp_num = server_qp->qp_num;
	if (server_moves == BEFORE_ACCEPT) {
		move(&server, server_qp, IBV_QPS_RTR);
		move(&server, server_qp, IBV_QPS_RTS);
	}
	CHECK_EQUAL(rdma->rdma_accept(server.id, &answer), 0);

	event = expect(client.channel, RDMA_CM_EVENT_CONNECT_RESPONSE, client.id);
	CHECK_EQUAL(event->status, 0);
	CHECK_EQUAL(event->param.conn.qp_num, server_qp->qp_num);
	check_padded(event, 9, 196);
	acknowledge(event);
	move(&client, client_qp, IBV_QPS_RTR);
	move(&client, client_qp, IBV_QPS_RTS);
	if (server_moves == BEFORE_ESTABLISHED)
		move(&server, server_qp, IBV_QPS_RTR);
	CHECK_EQUAL(rdma->rdma_establish(client.id), 0);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	if (server_moves == AFTER_ESTABLISHED)
		move(&server, server_qp, IBV_QPS_RTR);
	if (server_moves != BEFORE_ACCEPT)
		move(&server, server_qp, IBV_QPS_RTS);
	expect_nothing(client.channel);
	exchange(&client, client_qp, &server, server_qp);

	CHECK_EQUAL(rdma->rdma_disconnect(server.id), 0);
	expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
	CHECK_EQUAL(rdma->rdma_disconnect(client.id), 0);
	expect_end(&server);
	expect_status(client.channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, client.id, 0);
	CHECK_EQUAL(rdma->ibv_destroy_qp(client_qp), 0);
	CHECK_EQUAL(rdma->ibv_destroy_qp(server_qp), 0);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* The connection manager without any queue pair: it connects and disconnects all the same. */
static void no_queue_pair(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = side_with_id();
	struct side server;
	struct rdma_conn_param ask = {.qp_num = 0x123456};
	struct rdma_conn_param answer = {.qp_num = 0x654321};

	resolve_to(&client, host, port_of(listener.id));
	CHECK_EQUAL(rdma->rdma_connect(client.id, &ask), 0);
	server = take_request(&listener);
	CHECK_EQUAL(rdma->rdma_accept(server.id, &answer), 0);
	expect_status(client.channel, RDMA_CM_EVENT_CONNECT_RESPONSE, client.id, 0);
	CHECK_EQUAL(rdma->rdma_establish(client.id), 0);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	CHECK_EQUAL(rdma->rdma_disconnect(client.id), 0);
	expect_status(server.channel, RDMA_CM_EVENT_DISCONNECTED, server.id, 0);
	CHECK_EQUAL(rdma->rdma_disconnect(server.id), 0);
	expect_end(&client);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* ---- completion queues and protection domain of the library's ------------------------------ */

static void everything_from_the_library(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = side_with_id();
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
	};

	if (!on_system) /* no device yet: librdmacm 44 crashes */
		CHECK_FAILS(rdma->rdma_create_qp(client.id, NULL, &attr), EINVAL);
	resolve_to(&client, host, port_of(listener.id));
	CHECK_EQUAL(rdma->rdma_create_qp(client.id, NULL, &attr), 0);
	CHECK(client.id->pd == client.id->qp->pd);
	CHECK(client.id->send_cq && client.id->recv_cq);
	CHECK(client.id->send_cq_channel && client.id->recv_cq_channel);
	CHECK(attr.send_cq == client.id->send_cq && attr.recv_cq == client.id->recv_cq);
	CHECK_FAILS(rdma->rdma_create_qp(client.id, NULL, &attr), EINVAL); /* one is enough */
	rdma->rdma_destroy_qp(client.id);
	attr.recv_cq = attr.send_cq = NULL;
	attr.cap.max_send_sge = 1 << 20;
	CHECK_FAILS(rdma->rdma_create_qp(client.id, NULL, &attr), EINVAL);
	CHECK(!client.id->qp && !client.id->send_cq && !client.id->recv_cq_channel);
	side_close(&client);
	side_close(&listener);
}

/* Many listeners, and ids of different listeners, on one channel. */
static void several_listeners(void)
{
	struct side channel = side_open();
	struct rdma_cm_id *listeners[3];
	struct side clients[3], servers[3];
	union address address = address_of(host, 0);

	for (int i = 0; i < 3; i++) {
		CHECK_EQUAL(rdma->rdma_create_id(channel.channel, &listeners[i], NULL, RDMA_PS_TCP),
			    0);
		CHECK_EQUAL(rdma->rdma_bind_addr(listeners[i], &address.any), 0);
		CHECK_EQUAL(rdma->rdma_listen(listeners[i], 0), 0);
	}
	for (int i = 2; i >= 0; i--) {
		channel.id = listeners[i];
		connect_sides(&channel, host, &clients[i], &servers[i]);
	}
	for (int i = 0; i < 3; i++)
		send_message(&clients[i], &servers[i], (uint8_t)i);
	/* A listener that goes leaves its connections alone. */
	CHECK_EQUAL(rdma->rdma_destroy_id(listeners[1]), 0);
	send_message(&servers[1], &clients[1], 0x66);
	channel.id = NULL;
	for (int i = 0; i < 3; i++) {
		side_drop(&servers[i]);
		side_close(&clients[i]);
		if (i != 1)
			CHECK_EQUAL(rdma->rdma_destroy_id(listeners[i]), 0);
	}
	side_close(&channel);
}

/* Requests wait their turn behind a small backlog; none is lost. */
static void small_backlog(void)
{
	enum {
		CLIENTS = 6
	};
	struct side listener = side_with_id();
	struct side clients[CLIENTS], servers[CLIENTS];
	union address address = address_of(host, 0);

	CHECK_EQUAL(rdma->rdma_bind_addr(listener.id, &address.any), 0);
	CHECK_EQUAL(rdma->rdma_listen(listener.id, 2), 0);
	for (int i = 0; i < CLIENTS; i++)
		clients[i] = ask(host, port_of(listener.id));
	for (int i = 0; i < CLIENTS; i++) {
		servers[i] = take_request(&listener);
		side_queue_pair(&servers[i]);
	}
	for (int i = 0; i < CLIENTS; i++) {
		struct rdma_conn_param answer = parameters(NULL, 0);

		CHECK_EQUAL(rdma->rdma_accept(servers[i].id, &answer), 0);
		acknowledge(expect(listener.channel, RDMA_CM_EVENT_ESTABLISHED, servers[i].id));
	}
	for (int i = 0; i < CLIENTS; i++)
		expect_status(clients[i].channel, RDMA_CM_EVENT_ESTABLISHED, clients[i].id, 0);
	for (int i = 0; i < CLIENTS; i++) {
		side_drop(&servers[i]);
		side_close(&clients[i]);
	}
	side_close(&listener);
}

/* A TCP socket that is bound to the port it connects to would be connected to itself. */
static void to_itself(void)
{
	struct side client = side_with_id();
	struct rdma_conn_param ask = parameters(NULL, 0);
	union address address = address_of(host, 0);

	CHECK_EQUAL(rdma->rdma_bind_addr(client.id, &address.any), 0);
	resolve_to(&client, host, port_of(client.id));
	side_queue_pair(&client);
	CHECK_EQUAL(rdma->rdma_connect(client.id, &ask), 0);
	expect_status(client.channel, RDMA_CM_EVENT_REJECTED, client.id, 8);
	side_close(&client);
}

/* Between two listeners of a server there is none for a moment: that alone is no refusal. */
static void listener_comes_late(void)
{
	struct side listener = side_with_id();
	union address address = address_of(host, 0);

	CHECK_EQUAL(rdma->rdma_bind_addr(listener.id, &address.any), 0);
	struct side client = ask(host, port_of(listener.id));

	expect_nothing(client.channel); /* which has seen that there is no listener */
	CHECK_EQUAL(rdma->rdma_listen(listener.id, 1), 0);
	struct side server = take_request(&listener);

	accept_side(&server);
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* The queue pair is in error when REP comes: there is no connection, and the server is told. */
static void queue_pair_in_error(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = ask(host, port_of(listener.id));
	struct side server = take_request(&listener);
	struct rdma_cm_event *event;

	CHECK_EQUAL(rdma->rdma_disconnect(client.id), 0);
	qp_state_is(&client, IBV_QPS_ERR);
	accept_side(&server);
	event = expect(client.channel, RDMA_CM_EVENT_CONNECT_ERROR, client.id);
	CHECK(event->status < 0);
	acknowledge(event);
	expect_status(server.channel, RDMA_CM_EVENT_REJECTED, server.id, 28);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

static void no_listener(void)
{
	struct side taken = side_with_id(); /* bound, so that the port is free, and not listening */
	union address address = address_of(host, 0);
	struct side client;
	struct rdma_cm_event *event;

	CHECK_EQUAL(rdma->rdma_bind_addr(taken.id, &address.any), 0);
	client = ask(host, port_of(taken.id));
	event = expect(client.channel, RDMA_CM_EVENT_REJECTED, client.id);
	CHECK_EQUAL(event->status, 8); /* invalid service ID */
	CHECK_EQUAL(event->param.conn.private_data_len, 148);
	CHECK(event->param.conn.private_data);
	acknowledge(event);
	side_close(&client);
	side_close(&taken);
}

/* rdma_notify(3): only for an id that waits for RTU. */
static void notify(void)
{
	struct side listener = listen_at(host, 0);
	struct side client, server;

	CHECK_FAILS(rdma->rdma_notify(listener.id, IBV_EVENT_COMM_EST), EINVAL);
	connect_sides(&listener, host, &client, &server);
	CHECK_FAILS(rdma->rdma_notify(server.id, IBV_EVENT_COMM_EST), EISCONN);
	CHECK_FAILS(rdma->rdma_notify(client.id, IBV_EVENT_COMM_EST), EISCONN);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

int main(void)
{
	int before;

	cm_begin(100);
	for (int i = 0; i < (int)sizeof(pattern); i++)
		pattern[i] = (uint8_t)(i + 1);
	STEP(no_listener()); /* what is made once is made now */
	before = resources();
	STEP(whole_way(host, 56, 196, true));
	STEP(whole_way(host, 0, 0, false));
	if (!on_system) {
		STEP(whole_way("::1", 1, 195, true));
		STEP(whole_way("::1", 55, 1, false));
	}
	STEP(reject(148));
	STEP(reject(0));
	STEP(private_data_limits());
	STEP(no_parameters());
	if (!on_system) /* librdmacm needs rdma_get_cm_event to bring the client up */
		STEP(send_before_established());
	for (int psns = 0; psns < 2; psns++) {
		STEP(own_queue_pairs(BEFORE_ACCEPT, psns));
		STEP(own_queue_pairs(BEFORE_ESTABLISHED, psns));
		if (!on_system) /* there, nothing says when the kernel has seen RTU */
			STEP(own_queue_pairs(AFTER_ESTABLISHED, psns));
	}
	STEP(no_queue_pair());
	STEP(everything_from_the_library());
	STEP(several_listeners());
	if (!on_system) /* there, a request without room is dropped, and asked again after 6 s */
		STEP(small_backlog());
	STEP(no_listener());
	STEP(to_itself());
	if (!on_system) /* there, a network is between them */
		STEP(listener_comes_late());
	if (!on_system) /* there, the server is left to its timeout of a minute */
		STEP(queue_pair_in_error());
	STEP(notify());
	if (!on_system)
		expect_resources(before);
	return 0;
}
