/* Test which path a CM connection uses. It uses shared memory if both sides support it and a
 * channel is available. Otherwise, it uses the TCP stream of the handshake. */
#include "cm_stranger.h"
#include "record_side.h"

#include <sys/prctl.h>

#include "link/link_internal.h"

/* ---- what it is ---------------------------------------------------------------------------- */

static bool is_over_shm(const struct side *side)
{
	soft_lock();
	const struct soft_link *link = soft_link_of(soft_qp_of(side->id->qp));
	bool local = link->chan.path->calls->name == AIORDMA_WIRE_SHARED_MEMORY;

	CHECK_EQUAL(link->base.state, SOFT_LINK_UP);
	CHECK(link->watch.fd < 0); /* the link no longer owns the handshake's socket */
	soft_unlock();
	return local;
}

static void connection_within_a_process_uses_shared_memory(void)
{
	struct connection it = open_connection();

	send_message(&it.client, &it.server, 0x5a);
	send_message(&it.server, &it.client, 0x5b);
	CHECK(is_over_shm(&it.client));
	CHECK(is_over_shm(&it.server));
	CHECK_OK(rdma->rdma_disconnect(it.client.id));
	expect_status(it.server.channel, RDMA_CM_EVENT_DISCONNECTED, it.server.id, 0);
	connection_close(&it);
}

/* Connect two processes. The client connects from `source`, and the server sends first. */
static void processes_use_shared_memory_if_both_support_it(const char *of_server,
							   const char *of_client,
							   const char *source)
{
	bool chan = strcmp(of_server, "tcp") && strcmp(of_client, "tcp");
	int ports[2], status;

	CHECK_OK(pipe(ports));
	pid_t child = fork();

	CHECK(child >= 0);
	CHECK_OK(setenv("AIORDMA_EMBEDDED_LINKS", child ? of_client : of_server, 1));
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		limit_seconds(30);
		struct side listener = listen_at(host, 0);
		uint16_t port = port_of(listener.id);

		CHECK_EQUAL(write(ports[1], &port, sizeof(port)), sizeof(port));
		struct side server = take_request(&listener);

		accept_side(&server);
		expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
		side_post_send(&server);
		side_completion(&server, 1, IBV_WC_SUCCESS);
		CHECK_EQUAL(is_over_shm(&server), chan);
		CHECK_EQUAL(write(ports[1], &port, sizeof(port)), sizeof(port)); /* path checked */
		expect_status(server.channel, RDMA_CM_EVENT_DISCONNECTED, server.id, 0);
		side_drop(&server);
		side_close(&listener);
		_exit(0);
	}
	uint16_t port;

	CHECK_EQUAL(read(ports[0], &port, sizeof(port)), sizeof(port));
	struct side client = open_bound_side(RDMA_PS_TCP, source, 0);

	side_ask(&client, host, port);
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	side_completion(&client, 2, IBV_WC_SUCCESS);
	CHECK_EQUAL(is_over_shm(&client), chan);
	CHECK_EQUAL(read(ports[0], &port, sizeof(port)), sizeof(port));
	CHECK_OK(rdma->rdma_disconnect(client.id));
	expect_end(&client);
	side_close(&client);
	CHECK_EQUAL(waitpid(child, &status, 0), child);
	CHECK_EQUAL(status, 0);
	close(ports[0]);
	close(ports[1]);
	CHECK_OK(unsetenv("AIORDMA_EMBEDDED_LINKS"));
}

/* Check that connections to the same port of a process share one stream, which outlives the first
 * connection. */
static void connections_to_one_port_share_a_stream(void)
{
	enum { COUNT = 4 };
	struct side listener, clients[COUNT], servers[COUNT];
	int sockets = 0;

	CHECK_OK(setenv("AIORDMA_EMBEDDED_LINKS", "tcp", 1));
	listener = listen_at(host, 0);
	for (int i = 0; i < COUNT; i++) {
		connect_sides(&listener, host, &clients[i], &servers[i]);
		send_message(&clients[i], &servers[i], 1);
		send_message(&servers[i], &clients[i], 2);
		CHECK(!is_over_shm(&clients[i]));
		if (i == 0)
			sockets = open_sockets();
		CHECK_EQUAL(open_sockets(), sockets);
	}
	for (int i = 0; i < COUNT; i++) {
		CHECK_OK(rdma->rdma_disconnect(clients[i].id));
		expect_status(servers[i].channel, RDMA_CM_EVENT_DISCONNECTED, servers[i].id, 0);
		for (int other = i + 1; other < COUNT; other++) {
			side_post_receive(&clients[other]);
			send_message(&servers[other], &clients[other], 3);
		}
		side_drop(&servers[i]);
		side_close(&clients[i]);
	}
	side_close(&listener);
	CHECK_OK(unsetenv("AIORDMA_EMBEDDED_LINKS"));
}

/* ---- a peer in our hands ------------------------------------------------------------------- */

/* Encode the record that selects the handshake's stream: SOFT_RECORD_END for channel 0. */
static void encode_path_selection(uint8_t at[RECORD_HEADER])
{
	record_header(at, SOFT_RECORD_END, 0, 0, 0);
}

/* Check that the client uses the stream if no process owns the server's shared-memory port. The
 * client must send a selection record on the stream. */
static void client_falls_back_to_stream_without_shm_peer(void)
{
	uint8_t expected[RECORD_HEADER], record[RECORD_HEADER], bytes[SOFT_FRAME_HEADER];
	uint16_t port;
	int door = tcp_listen(&port, 1);
	struct side client = start_connecting(host, port);
	int fd = accept(door, NULL, NULL);

	CHECK(expect_cm_message(fd, SOFT_CM_REQ).shm_port);
	send_cm_message(fd, (struct soft_cm_message){
				    .type = SOFT_CM_REP, .qpn = 77, .psn = 5, .shm_port = 1});
	expect_cm_message(fd, SOFT_CM_RTU);
	CHECK(receive_exactly(fd, record, sizeof(record)));
	encode_path_selection(expected);
	CHECK(!memcmp(record, expected, sizeof(record)));
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	CHECK(!is_over_shm(&client));
	soft_frame_encode(bytes, &(struct soft_frame){.opcode = SOFT_DISCONNECT});
	send_record_bytes(fd, bytes, sizeof(bytes));
	expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
	close_records(fd);
	close(door);
	side_close(&client);
}

/* Connect as a client that supports shared memory. The client has sent RTU but has not selected a
 * path yet. Returns its socket. */
static int connect_without_selecting_path(struct side *listener, struct side *server)
{
	int fd = connect_tcp(port_of(listener->id));
	struct soft_cm_message willing = good_request;

	willing.shm_port = 1;
	send_cm_message(fd, willing);
	*server = take_request(listener);
	accept_side(server);
	CHECK(expect_cm_message(fd, SOFT_CM_REP).shm_port);
	send_cm_message(fd, (struct soft_cm_message){.type = SOFT_CM_RTU});
	expect_status(listener->channel, RDMA_CM_EVENT_ESTABLISHED, server->id, 0);
	return fd;
}

enum what { CHOOSES_STREAM, DIES, IS_LEFT, WHATS };

static void server_waits_for_client_to_select_a_path(enum what what)
{
	struct side listener = listen_at(host, 0), server;
	int fd = connect_without_selecting_path(&listener, &server);
	uint8_t byte, record[RECORD_HEADER];

	side_post_send(&server);
	/* The server sends nothing until the client has selected a path. */
	CHECK_EQUAL(recv(fd, &byte, 1, MSG_DONTWAIT), -1);
	CHECK_EQUAL(errno, EAGAIN);
	switch (what) {
	case CHOOSES_STREAM:
		encode_path_selection(record);
		CHECK_EQUAL(send(fd, record, sizeof(record), MSG_NOSIGNAL), sizeof(record));
		CHECK_EQUAL(receive_frame_header(fd).opcode, SOFT_SEND);
		CHECK(!is_over_shm(&server));
		break;
	case DIES:
		shutdown(fd, SHUT_WR);
		expect_status(server.channel, RDMA_CM_EVENT_DISCONNECTED, server.id, -ECONNRESET);
		break;
	default:
		CHECK_OK(rdma->rdma_disconnect(server.id));
		CHECK_EQUAL(receive_frame_header(fd).opcode, SOFT_DISCONNECT);
	}
	close_records(fd);
	side_drop(&server);
	side_close(&listener);
}

int main(void)
{
	cm_begin(100);
	STEP(processes_use_shared_memory_if_both_support_it("shared", "shared", host));
	STEP(processes_use_shared_memory_if_both_support_it("shared", "shared", "127.0.0.2"));
	STEP(processes_use_shared_memory_if_both_support_it("shared", "tcp", host));
	STEP(processes_use_shared_memory_if_both_support_it("tcp", "shared", host));
	STEP(connection_within_a_process_uses_shared_memory());
	STEP(connections_to_one_port_share_a_stream());
	STEP(client_falls_back_to_stream_without_shm_peer());
	for (enum what what = 0; what < WHATS; what++)
		STEP(server_waits_for_client_to_select_a_path(what));
	return 0;
}
