/* Test connections within one process: each step, event contents, and disconnecting from either
 * side. */
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
	CHECK_EQUAL(conn->responder_resources, 3); /* initiator depth of the client */
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

/* Check the attributes that the connection manager sets when it connects a queue pair. */
static void check_queue_pair(struct side *side, const struct side *other, int responder,
			     int initiator, int retry, int rnr_retry)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	CHECK_OK(rdma->ibv_query_qp(side->id->qp, &attr,
				    IBV_QP_STATE | IBV_QP_DEST_QPN | IBV_QP_MAX_QP_RD_ATOMIC |
					    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_RETRY_CNT |
					    IBV_QP_RNR_RETRY | IBV_QP_ACCESS_FLAGS,
				    &init));
	CHECK_EQUAL(attr.qp_state, IBV_QPS_RTS);
	CHECK_EQUAL(attr.dest_qp_num, other->id->qp->qp_num);
	CHECK_EQUAL(attr.max_dest_rd_atomic, responder);
	CHECK_EQUAL(attr.max_rd_atomic, initiator);
	CHECK_EQUAL(attr.retry_cnt, retry);
	CHECK_EQUAL(attr.rnr_retry, rnr_retry);
	CHECK(attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE);
}

static void expect_qp_state(struct side *side, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	CHECK_OK(rdma->ibv_query_qp(side->id->qp, &attr, IBV_QP_STATE, &init));
	CHECK_EQUAL(attr.qp_state, state);
}

/* Test a connection from start to end, with private data of the given lengths. Either the client or
 * the server disconnects first. */
static void connection_passes_parameters_and_private_data(const char *text, int asked, int answered,
							  bool client_ends)
{
	static int context;
	struct connection it = {.listener = listen_at(text, 0), .client = side_with_id()};
	struct side *client = &it.client, *server = &it.server;
	struct rdma_conn_param ask = parameters(pattern, (uint8_t)asked);
	struct rdma_conn_param answer = parameters(pattern, (uint8_t)answered);
	struct side *ends = client_ends ? client : server;
	struct side *learns = client_ends ? server : client;
	struct rdma_cm_event *event;

	it.listener.id->context = &context;
	resolve_to(client, text, port_of(it.listener.id));
	CHECK(client->id->verbs && client->id->pd);
	CHECK_EQUAL(client->id->port_num, 1);
	side_queue_pair(client);
	expect_qp_state(client, IBV_QPS_INIT);
	ask.responder_resources = 5;
	ask.initiator_depth = 3;
	ask.retry_count = 6;
	ask.rnr_retry_count = 4;
	ask.flow_control = 1;
	CHECK_OK(rdma->rdma_connect(client->id, &ask));

	event = expect(it.listener.channel, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
	CHECK(event->listen_id == it.listener.id);
	*server = (struct side){.id = event->id, .channel = it.listener.channel};
	CHECK(server->id != it.listener.id && server->id->channel == it.listener.channel);
	CHECK(server->id->context == &context);
	CHECK_EQUAL(server->id->ps, RDMA_PS_TCP);
	check_request(event, client);
	check_padded(event, asked, 56);
	check_addresses(client, server);
	acknowledge(event);

	side_queue_pair(server);
	answer.responder_resources = 2;
	answer.initiator_depth = 4;
	answer.rnr_retry_count = 5;
	CHECK_OK(rdma->rdma_accept(server->id, &answer));
	event = expect(client->channel, RDMA_CM_EVENT_ESTABLISHED, client->id);
	CHECK_EQUAL(event->status, 0);
	check_padded(event, answered, 196);
	CHECK_EQUAL(event->param.conn.responder_resources, 4);
	CHECK_EQUAL(event->param.conn.initiator_depth, 2);
	CHECK_EQUAL(event->param.conn.qp_num, server->id->qp->qp_num);
	acknowledge(event);
	event = expect(server->channel, RDMA_CM_EVENT_ESTABLISHED, server->id);
	CHECK_EQUAL(event->status, 0);
	CHECK_EQUAL(event->param.conn.private_data_len, 0);
	acknowledge(event);
	check_queue_pair(client, server, 4, 2, 6, 5);
	check_queue_pair(server, client, 2, 4, 6, 4);

	send_message(client, server, 0x11);
	send_message(server, client, 0x22);

	CHECK_OK(rdma->rdma_disconnect(ends->id));
	expect_qp_state(ends, IBV_QPS_ERR);
	expect_status(learns->channel, RDMA_CM_EVENT_DISCONNECTED, learns->id, 0);
	CHECK_OK(rdma->rdma_disconnect(learns->id));
	expect_qp_state(learns, IBV_QPS_ERR);
	expect_end(ends);
	expect_status(learns->channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, learns->id, 0);
	CHECK_OK(rdma->rdma_disconnect(ends->id)); /* repeating it has no effect */
	expect_nothing(ends->channel);
	connection_close(&it);
}

static void rejection_delivers_reason_and_private_data(int length)
{
	struct connection it = open_requested_connection();
	struct rdma_cm_event *event;

	CHECK_FAILS(rdma->rdma_reject(it.server.id, pattern, 149), EINVAL);
	CHECK_OK(rdma->rdma_reject(it.server.id, length ? pattern : NULL, (uint8_t)length));
	event = expect(it.client.channel, RDMA_CM_EVENT_REJECTED, it.client.id);
	CHECK_EQUAL(event->status, 28);
	check_padded(event, length, 148);
	acknowledge(event);
	expect_qp_state(&it.client, IBV_QPS_ERR);
	CHECK_FAILS(rdma->rdma_accept(it.server.id, &(struct rdma_conn_param){.qp_num = 1}),
		    EINVAL);
	connection_close(&it);
}

/* Returns a listener, and a client that has resolved its route. */
static struct connection resolved_client(void)
{
	struct connection it = {.listener = listen_at(host, 0), .client = side_with_id()};

	resolve_to(&it.client, host, port_of(it.listener.id));
	return it;
}

/* Check that a call with too much private data or too high an initiator depth fails without sending
 * anything. */
static void connect_and_accept_enforce_private_data_limits(void)
{
	struct connection it = resolved_client();
	struct rdma_conn_param ask = parameters(pattern, 57);
	struct rdma_conn_param answer = parameters(pattern, 197);

	side_queue_pair(&it.client);
	CHECK_FAILS(rdma->rdma_connect(it.client.id, &ask), EINVAL);
	ask.private_data_len = 56;
	ask.initiator_depth = 254; /* above the device's limit; 255 would mean the maximum */
	CHECK_FAILS(rdma->rdma_connect(it.client.id, &ask), EINVAL);
	ask.initiator_depth = RDMA_MAX_INIT_DEPTH;
	CHECK_OK(rdma->rdma_connect(it.client.id, &ask));
	it.server = take_request(&it.listener);
	side_queue_pair(&it.server);
	CHECK_FAILS(rdma->rdma_accept(it.server.id, &answer), EINVAL);
	answer.private_data_len = 196;
	CHECK_OK(rdma->rdma_accept(it.server.id, &answer));
	expect_established(&it.client, &it.server);
	connection_close(&it);
}

/* Check that both sides use the device's limits if no parameters are given. The accepting side may
 * post a send immediately, but the device holds it back until the connection is established. */
static void connect_and_accept_work_without_parameters(void)
{
	struct connection it = resolved_client();

	CHECK_FAILS(rdma->rdma_connect(it.client.id, NULL), EINVAL); /* no queue pair yet */
	side_queue_pair(&it.client);
	CHECK_OK(rdma->rdma_connect(it.client.id, NULL));
	it.server = take_request(&it.listener);
	CHECK_FAILS(rdma->rdma_accept(it.server.id, NULL), EINVAL);
	side_queue_pair(&it.server);
	CHECK_OK(rdma->rdma_accept(it.server.id, NULL));
	send_message(&it.server, &it.client, 0x3c);
	expect_established(&it.client, &it.server);
	send_message(&it.client, &it.server, 0x33);
	side_drop(&it.server);
	expect_status(it.client.channel, RDMA_CM_EVENT_DISCONNECTED, it.client.id, 0);
	connection_close(&it);
}

/* ---- queue pairs that the application makes and moves itself ------------------------------- */

static bool own_psns; /* whether the application chooses the PSNs */

static void move_queue_pair(struct side *side, struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = {.qp_state = state};
	int mask;

	CHECK_OK(rdma->rdma_init_qp_attr(side->id, &attr, &mask));
	CHECK(mask & IBV_QP_STATE);
	if (own_psns)
		attr.rq_psn = attr.sq_psn = 5;
	attr.ah_attr.dlid = 0xbeef; /* a LID, which RoCE ignores */
	CHECK_OK(rdma->ibv_modify_qp(qp, &attr, mask));
}

static struct ibv_qp *create_own_queue_pair(struct side *side)
{
	struct ibv_qp_init_attr attr;
	struct ibv_qp *qp;

	side_memory(side);
	attr = side_attributes(side);
	qp = rdma->ibv_create_qp(side->pd, &attr);
	CHECK(qp);
	move_queue_pair(side, qp, IBV_QPS_INIT);
	return qp;
}

/* Send a message in each direction. The ids refer to the queue pairs only during the exchange,
 * because the helpers use the ids. The application manages the queue pairs itself. */
static void exchange_messages(struct side *client, struct ibv_qp *client_qp, struct side *server,
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

enum moment { BEFORE_ACCEPT, BEFORE_ESTABLISHED, AFTER_ESTABLISHED };

static void application_can_drive_its_own_queue_pairs(enum moment server_moves, bool with_own_psns)
{
	own_psns = with_own_psns;
	struct connection it = resolved_client();
	struct side *client = &it.client, *server = &it.server;
	struct ibv_qp *client_qp, *server_qp;
	struct rdma_conn_param ask = parameters(pattern, 7);
	struct rdma_conn_param answer = parameters(pattern, 9);
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
	struct rdma_cm_event *event;
	int mask;

	client_qp = create_own_queue_pair(client);
	ask.qp_num = client_qp->qp_num;
	CHECK_OK(rdma->rdma_connect(client->id, &ask));
	CHECK_FAILS(rdma->rdma_init_qp_attr(client->id, &attr, &mask), EINVAL); /* no REP yet */
	CHECK_FAILS(rdma->rdma_establish(client->id), EINVAL);

	*server = take_request(&it.listener);
	server_qp = create_own_queue_pair(server);
	answer.qp_num = server_qp->qp_num;
	if (server_moves == BEFORE_ACCEPT) {
		move_queue_pair(server, server_qp, IBV_QPS_RTR);
		move_queue_pair(server, server_qp, IBV_QPS_RTS);
	}
	CHECK_OK(rdma->rdma_accept(server->id, &answer));

	event = expect(client->channel, RDMA_CM_EVENT_CONNECT_RESPONSE, client->id);
	CHECK_EQUAL(event->status, 0);
	CHECK_EQUAL(event->param.conn.qp_num, server_qp->qp_num);
	check_padded(event, 9, 196);
	acknowledge(event);
	move_queue_pair(client, client_qp, IBV_QPS_RTR);
	move_queue_pair(client, client_qp, IBV_QPS_RTS);
	if (server_moves == BEFORE_ESTABLISHED)
		move_queue_pair(server, server_qp, IBV_QPS_RTR);
	CHECK_OK(rdma->rdma_establish(client->id));
	expect_status(server->channel, RDMA_CM_EVENT_ESTABLISHED, server->id, 0);
	if (server_moves == AFTER_ESTABLISHED)
		move_queue_pair(server, server_qp, IBV_QPS_RTR);
	if (server_moves != BEFORE_ACCEPT)
		move_queue_pair(server, server_qp, IBV_QPS_RTS);
	expect_nothing(client->channel);
	exchange_messages(client, client_qp, server, server_qp);

	CHECK_OK(rdma->rdma_disconnect(server->id));
	expect_status(client->channel, RDMA_CM_EVENT_DISCONNECTED, client->id, 0);
	CHECK_OK(rdma->rdma_disconnect(client->id));
	expect_end(server);
	expect_status(client->channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, client->id, 0);
	CHECK_OK(rdma->ibv_destroy_qp(client_qp));
	CHECK_OK(rdma->ibv_destroy_qp(server_qp));
	connection_close(&it);
}

/* ---- completion queues and protection domain of the library's ------------------------------ */

static void create_qp_provides_missing_pd_and_cqs(void)
{
	struct connection it = {.listener = listen_at(host, 0), .client = side_with_id()};
	struct rdma_cm_id *id = it.client.id;
	struct ibv_qp_init_attr attr = side_attributes(&it.client);

	CHECK_FAILS(rdma->rdma_create_qp(id, NULL, &attr), EINVAL);
	resolve_to(&it.client, host, port_of(it.listener.id));
	CHECK_OK(rdma->rdma_create_qp(id, NULL, &attr));
	CHECK(id->pd == id->qp->pd);
	CHECK(id->send_cq && id->recv_cq);
	CHECK(id->send_cq_channel && id->recv_cq_channel);
	CHECK(attr.send_cq == id->send_cq && attr.recv_cq == id->recv_cq);
	CHECK_FAILS(rdma->rdma_create_qp(id, NULL, &attr), EINVAL); /* already has a queue pair */
	rdma->rdma_destroy_qp(id);
	attr.recv_cq = attr.send_cq = NULL;
	attr.cap.max_send_sge = 1 << 20;
	CHECK_FAILS(rdma->rdma_create_qp(id, NULL, &attr), EINVAL);
	CHECK(!id->qp && !id->send_cq && !id->recv_cq_channel);
	connection_close(&it);
}

/* Check that a client keeps trying for a while if its port has no listener, because the server may
 * be replacing it. */
static void client_retries_until_the_port_has_a_listener(void)
{
	struct connection it = {.listener = open_bound_side(RDMA_PS_TCP, host, 0)};

	it.client = start_connecting(host, port_of(it.listener.id));
	expect_nothing(it.client.channel); /* not rejected yet */
	CHECK_OK(rdma->rdma_listen(it.listener.id, 1));
	it.server = take_request(&it.listener);
	accept_side(&it.server);
	expect_established(&it.client, &it.server);
	connection_close(&it);
}

/* Check that the client reports a connection error and rejects the connection if its queue pair is
 * in error when REP arrives. */
static void rep_is_rejected_if_client_queue_pair_is_in_error(void)
{
	struct connection it = open_requested_connection();
	struct rdma_cm_event *event;

	CHECK_OK(rdma->rdma_disconnect(it.client.id));
	expect_qp_state(&it.client, IBV_QPS_ERR);
	accept_side(&it.server);
	event = expect(it.client.channel, RDMA_CM_EVENT_CONNECT_ERROR, it.client.id);
	CHECK(event->status < 0);
	acknowledge(event);
	expect_status(it.server.channel, RDMA_CM_EVENT_REJECTED, it.server.id, 28);
	connection_close(&it);
}

/* Check that a connection to a port that is bound but has no listener is rejected. The port belongs
 * to another id, or to the client itself if `own` is set. With TCP, the client would then connect
 * to itself. */
static void connect_to_port_without_listener_is_rejected(bool own)
{
	struct side taken = open_bound_side(RDMA_PS_TCP, host, 0);
	struct side client = own ? taken : side_with_id();
	struct rdma_conn_param ask = parameters(NULL, 0);
	struct rdma_cm_event *event;

	resolve_to(&client, host, port_of(taken.id));
	side_queue_pair(&client);
	CHECK_OK(rdma->rdma_connect(client.id, &ask));
	event = expect(client.channel, RDMA_CM_EVENT_REJECTED, client.id);
	CHECK_EQUAL(event->status, 8); /* invalid service ID */
	CHECK_EQUAL(event->param.conn.private_data_len, 148);
	CHECK(event->param.conn.private_data);
	acknowledge(event);
	side_close(&client);
	if (!own)
		side_close(&taken);
}

int main(void)
{
	int before;

	cm_begin(100);
	for (int i = 0; i < (int)sizeof(pattern); i++)
		pattern[i] = (uint8_t)(i + 1);
	STEP(connect_to_port_without_listener_is_rejected(
		false)); /* creates resources that later steps reuse */
	before = count_resources();
	STEP(connection_passes_parameters_and_private_data(host, 56, 196, true));
	STEP(connection_passes_parameters_and_private_data(host, 0, 0, false));
	STEP(connection_passes_parameters_and_private_data("::1", 1, 195, true));
	STEP(connection_passes_parameters_and_private_data("::1", 55, 1, false));
	STEP(rejection_delivers_reason_and_private_data(148));
	STEP(rejection_delivers_reason_and_private_data(0));
	STEP(connect_and_accept_enforce_private_data_limits());
	STEP(connect_and_accept_work_without_parameters());
	for (int psns = 0; psns < 2; psns++) {
		STEP(application_can_drive_its_own_queue_pairs(BEFORE_ACCEPT, psns));
		STEP(application_can_drive_its_own_queue_pairs(BEFORE_ESTABLISHED, psns));
		STEP(application_can_drive_its_own_queue_pairs(AFTER_ESTABLISHED, psns));
	}
	STEP(create_qp_provides_missing_pd_and_cqs());
	STEP(connect_to_port_without_listener_is_rejected(true));
	STEP(client_retries_until_the_port_has_a_listener());
	STEP(rep_is_rejected_if_client_queue_pair_is_in_error());
	expect_resources(before);
	return 0;
}
