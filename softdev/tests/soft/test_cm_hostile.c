/* Test hostile peers, which are plain TCP clients and servers. Each must be handled in bounded time
 * and space, without affecting other connections. */
#include "cm_stranger.h"
#include "engine/engine_internal.h"

#include <sys/resource.h>

/* Read into `bytes` until the peer closes the connection. Returns the number of bytes read. */
static size_t read_to_end(int fd, uint8_t *bytes, size_t room)
{
	size_t have = 0;
	ssize_t got;

	while ((got = recv(fd, bytes + have, room - have, 0)) > 0)
		have += (size_t)got;
	CHECK(got == 0 || errno == ECONNRESET);
	return have;
}

static void expect_closed(int fd)
{
	uint8_t bytes[1024];

	CHECK_EQUAL(read_to_end(fd, bytes, sizeof(bytes)), 0);
	close(fd);
}

/* Check that the listener still serves clients that follow the protocol. */
static void expect_listener_works(struct side *listener)
{
	struct side client, server;

	connect_sides(listener, host, &client, &server);
	send_message(&client, &server, 0x5a);
	side_drop(&server);
	side_close(&client);
}

/* ---- clients ------------------------------------------------------------------------------- */

static void listener_disconnects_clients_that_send_garbage(void)
{
	static const struct {
		const char *bytes;
		size_t length;
	} cases[] = {
		{"GET / HTTP/1.1\r\n\r\n", 18},
		{"\x01\x07\x02\x83", 4}, /* invalid MAD method */
	};
	struct side listener = listen_at(host, 0);
	int fd;

	FOR_EACH (i, cases) {
		fd = connect_tcp(port_of(listener.id));
		write_all(fd, cases[i].bytes, cases[i].length);
		expect_closed(fd);
	}
	fd = connect_tcp(port_of(listener.id));
	send_cm_message(fd,
			(struct soft_cm_message){.type = SOFT_CM_RTU}); /* instead of a request */
	expect_closed(fd);
	fd = connect_tcp(port_of(listener.id)); /* closed without sending anything */
	close(fd);
	fd = connect_tcp(port_of(listener.id));
	CHECK_OK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0},
			    sizeof(struct linger)));
	close(fd);
	expect_listener_works(&listener);
	side_close(&listener);
}

/* Check that a client that sends nothing or only half a request is disconnected after
 * request_ms. */
static void listener_disconnects_silent_clients_after_timeout(void)
{
	struct soft_cm_limits before = soft_device.cm->limits;
	struct side listener = listen_at(host, 0);
	uint8_t bytes[SOFT_MAD_SIZE];
	int silent, half;

	soft_cm_encode(&good_request, bytes);
	soft_device.cm->limits.request_ms = 100;
	silent = connect_tcp(port_of(listener.id));
	half = connect_tcp(port_of(listener.id));
	write_all(half, bytes, sizeof(bytes) / 2);
	expect_listener_works(&listener);
	expect_closed(silent);
	expect_closed(half);
	soft_device.cm->limits = before;
	side_close(&listener);
}

/* Check that the listener rejects invalid requests with the correct reason, without reporting them
 * to the application. */
static void invalid_requests_are_rejected_with_the_right_reason(void)
{
	static const struct {
		size_t at;
		uint8_t value;
		int reason;
	} cases[] = {
		{16 + 3, SOFT_CM_VERSION - 1, SOFT_CM_REASON_INVALID_VERSION},
		{13, 0x11, SOFT_CM_REASON_INVALID_SERVICE_ID}, /* RDMA_PS_UDP */
		{43, 20 << 3 | 1 << 1, SOFT_CM_REASON_INVALID_TRANSPORT}, /* UC */
	};
	struct side listener = listen_at(host, 0);

	FOR_EACH (i, cases) {
		uint8_t bytes[SOFT_MAD_SIZE];
		int fd = connect_tcp(port_of(listener.id));

		soft_cm_encode(&good_request, bytes);
		bytes[SOFT_MAD_HEADER + cases[i].at] = cases[i].value;
		write_all(fd, bytes, sizeof(bytes));
		CHECK_EQUAL(expect_cm_message(fd, SOFT_CM_REJ).reason, cases[i].reason);
		/* The listener may close the connection with unread data, which makes TCP send a
		 * reset. Nothing else may follow the rejection. */
		expect_closed(fd);
	}
	expect_listener_works(&listener);
	side_close(&listener);
}

/* Test clients that close the connection or violate the protocol after their request. */
static void request_fails_silently_when_client_leaves(void)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	int fd = send_good_request(&listener, &server);

	close(fd); /* may cause a reset, because MRA is unread */
	expect_silent_end(&listener, &server);

	fd = send_good_request(&listener, &server);
	send_cm_message(fd, good_request); /* a second request */
	expect_silent_end(&listener, &server);
	close(fd);

	fd = connect_tcp(port_of(listener.id));
	send_cm_message(fd, good_request);
	send_cm_message(fd, (struct soft_cm_message){.type = SOFT_CM_REJ,
						     .reason = SOFT_CM_REASON_TIMEOUT});
	server = take_request(&listener);
	expect_silent_end(&listener, &server);
	close(fd);

	expect_listener_works(&listener);
	side_close(&listener);
}

static const struct soft_cm_message ready_to_use = {.type = SOFT_CM_RTU};

/* Connect as a client, but stop after receiving REP. By then, the server has called rdma_accept()
 * and waits for RTU. Returns the client's socket. */
static int accept_client(struct side *listener, struct side *server)
{
	int fd = send_good_request(listener, server);

	accept_side(server);
	CHECK_EQUAL(expect_cm_message(fd, SOFT_CM_REP).qpn, server->id->qp->qp_num);
	return fd;
}

/* Check that data after RTU is passed to the queue pair, which fails because the data is not a
 * frame. */
static void garbage_after_rtu_disconnects_the_queue_pair(void)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	uint8_t bytes[SOFT_MAD_SIZE + 64];
	struct rdma_cm_event *event;
	int fd = accept_client(&listener, &server);

	soft_cm_encode(&ready_to_use, bytes);
	memset(bytes + SOFT_MAD_SIZE, 0xff, 64);
	write_all(fd, bytes, sizeof(bytes)); /* one write, so the garbage arrives with RTU */
	expect_status(listener.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	event = expect(listener.channel, RDMA_CM_EVENT_DISCONNECTED, server.id);
	CHECK(event->status < 0);
	acknowledge(event);
	close(fd);
	side_drop(&server);
	expect_listener_works(&listener);
	side_close(&listener);
}

/* Check that ESTABLISHED is reported if rdma_notify(3) is called before RTU arrives, and that it is
 * not reported again for RTU. */
static void notify_reports_established_once_before_rtu(void)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	int fd = send_good_request(&listener, &server);

	CHECK_FAILS(rdma->rdma_notify(server.id, IBV_EVENT_COMM_EST), EINVAL);
	accept_side(&server);
	CHECK_FAILS(rdma->rdma_notify(server.id, IBV_EVENT_QP_FATAL), EINVAL);
	CHECK_OK(rdma->rdma_notify(server.id, IBV_EVENT_COMM_EST));
	CHECK_FAILS(rdma->rdma_notify(server.id, IBV_EVENT_COMM_EST), EISCONN);
	expect_status(listener.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	expect_cm_message(fd, SOFT_CM_REP);
	send_cm_message(fd, ready_to_use); /* then close without a DISCONNECT frame */
	close(fd);
	expect_status(listener.channel, RDMA_CM_EVENT_DISCONNECTED, server.id, -ECONNRESET);
	side_drop(&server);
	side_close(&listener);
}

static void second_mra_instead_of_rtu_is_a_connect_error(void)
{
	static const struct soft_cm_message wait = {.type = SOFT_CM_MRA};
	struct side listener = listen_at(host, 0);
	struct side server;
	int fd = accept_client(&listener, &server);

	send_cm_message(fd, wait);
	send_cm_message(fd, wait);
	expect_closed(fd);
	expect_status(listener.channel, RDMA_CM_EVENT_CONNECT_ERROR, server.id, -EPROTO);
	side_drop(&server);
	side_close(&listener);
}

static void server_can_end_connection_before_rtu(void)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
	int fd;

	fd = accept_client(&listener, &server); /* the application disconnects */
	CHECK_OK(rdma->rdma_disconnect(server.id));
	expect_closed(fd);
	expect_end(&server);
	side_drop(&server);

	fd = accept_client(&listener, &server); /* the application rejects after accepting */
	CHECK_OK(rdma->rdma_reject(server.id, NULL, 0));
	expect_cm_message(fd, SOFT_CM_REJ);
	expect_closed(fd);
	side_drop(&server);

	fd = accept_client(&listener, &server); /* the server's queue pair fails */
	CHECK_OK(rdma->ibv_modify_qp(server.id->qp, &attr, IBV_QP_STATE));
	send_cm_message(fd, ready_to_use);
	expect_closed(fd);
	expect_status(listener.channel, RDMA_CM_EVENT_CONNECT_ERROR, server.id, -ENOTCONN);
	side_drop(&server);
	side_close(&listener);
}

static bool has_channels_depending_on_engine(void)
{
	soft_lock();
	bool depend = soft_channels_depend_on_engine();

	soft_unlock();
	return depend;
}

/* Check that no channel needs the engine's thread once the application accepts early wake-ups.
 * Otherwise, each incoming frame would have to wake up the thread. */
static void channels_with_early_wake_up_need_no_engine_thread(void)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	int fd = accept_client(&listener, &server);
	struct ibv_comp_channel *completions = rdma->ibv_create_comp_channel(server.id->verbs);

	CHECK(completions);
	CHECK(has_channels_depending_on_engine());
	soft_wake_early(listener.channel->fd);
	CHECK(!has_channels_depending_on_engine()); /* frames wake up the application directly */
	soft_wake_early(completions->fd);
	CHECK(!has_channels_depending_on_engine()); /* frames now wake up only the completion channel */
	CHECK_OK(rdma->ibv_destroy_comp_channel(completions));
	CHECK(!has_channels_depending_on_engine());
	close(fd);
	expect_status(listener.channel, RDMA_CM_EVENT_CONNECT_ERROR, server.id, -ECONNRESET);
	side_drop(&server);
	side_close(&listener);
}

static void destroyed_listener_closes_half_open_connections(void)
{
	struct side listener = listen_at(host, 0);
	int fds[3];

	for (int i = 0; i < 3; i++)
		fds[i] = connect_tcp(port_of(listener.id));
	expect_listener_works(&listener); /* the others have been accepted by now */
	side_close(&listener);
	for (int i = 0; i < 3; i++)
		expect_closed(fds[i]);
}

/* Open more silent connections than the half-open limit allows. The listener must close the excess
 * connections and still accept requests, and the process must keep free file descriptors. */
static void flood_of_silent_clients_is_limited(bool few_descriptors)
{
	enum {
		CLIENTS = 400,
		LIMIT = 64,
		CLOSING = 16 /* connections that expect_listener_works() may leave behind */
	};
	struct soft_cm_limits before = soft_device.cm->limits;
	struct side listener = listen_at(host, 0);
	static int clients[CLIENTS];
	int alive = 0, resources_before, at_most;
	struct rlimit files, low;

	CHECK_OK(getrlimit(RLIMIT_NOFILE, &files));
	low = files;
	/* Half-open connections may use an eighth of the process's descriptors. */
	low.rlim_cur = 8 * LIMIT;
	if (few_descriptors)
		CHECK_OK(setrlimit(RLIMIT_NOFILE, &low));
	else
		soft_device.cm->limits.half_open = LIMIT;
	expect_listener_works(&listener);
	resources_before = count_resources();
	for (int i = 0; i < CLIENTS; i++)
		clients[i] = connect_tcp(port_of(listener.id));
	expect_listener_works(&listener); /* all earlier connections have been handled */
	at_most = resources_before + (CLIENTS + LIMIT + CLOSING) * 1000;
	CHECK(count_resources() <= at_most);
	for (int i = 0; i < CLIENTS; i++) {
		uint8_t byte;

		if (recv(clients[i], &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN)
			alive++;
	}
	CHECK(alive <= LIMIT);
	CHECK(alive > 0);
	for (int i = 0; i < CLIENTS; i++)
		close(clients[i]);
	expect_listener_works(&listener);
	soft_device.cm->limits = before;
	CHECK_OK(setrlimit(RLIMIT_NOFILE, &files));
	side_close(&listener);
}

/* Test a flood of complete requests that the application does not take. Eight are reported, and up
 * to `waiting` more are parked. Each further request evicts the oldest parked one, which is
 * rejected. */
static void flood_of_requests_evicts_the_oldest_parked_one(int backlog, int waiting)
{
	enum { CLIENTS = 100, REPORTED = 8, LIMIT = 16 };
	struct soft_cm_limits before = soft_device.cm->limits;
	struct side listener = open_bound_side(RDMA_PS_TCP, host, 0);
	static int clients[CLIENTS];

	soft_device.cm->limits.half_open = LIMIT;
	CHECK_OK(rdma->rdma_listen(listener.id, backlog));
	for (int i = 0; i < CLIENTS; i++) {
		clients[i] = connect_tcp(port_of(listener.id));
		send_cm_message(clients[i], good_request);
		expect_cm_message(clients[i], SOFT_CM_MRA);
	}
	for (int i = 0; i < CLIENTS; i++) {
		uint8_t byte;

		if (i < REPORTED || i >= CLIENTS - waiting)
			CHECK(recv(clients[i], &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
		else
			CHECK_EQUAL(expect_cm_message(clients[i], SOFT_CM_REJ).reason,
				    SOFT_CM_REASON_NO_RESOURCES);
	}
	soft_device.cm->limits = before;
	side_close(&listener); /* requests still pending */
	for (int i = 0; i < CLIENTS; i++)
		close(clients[i]);
}

/* Check that at most FEW requests are reported at a time, regardless of the backlog. When the
 * application takes one of them, the next one reported is from a host with few requests. */
static void reported_requests_are_capped_and_shared_fairly(void)
{
	enum { CLIENTS = 20, BACKLOG = 64, LIMIT = 32, FEW = 8 };
	const struct sockaddr_in elsewhere = {.sin_family = AF_INET,
					      .sin_addr.s_addr = htonl(0x7f090901)};
	struct soft_cm_limits before = soft_device.cm->limits;
	struct side listener = open_bound_side(RDMA_PS_TCP, host, 0);
	const union address to = address_of(host, port_of(listener.id));
	int clients[CLIENTS + 1], last = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	soft_device.cm->limits.half_open = LIMIT;
	CHECK_OK(rdma->rdma_listen(listener.id, BACKLOG));
	for (int i = 0; i < CLIENTS; i++)
		clients[i] = connect_tcp(port_of(listener.id));
	CHECK_OK(bind(last, (const struct sockaddr *)&elsewhere, sizeof(elsewhere)));
	CHECK_OK(connect(last, &to.any, sizeof(to.v4)));
	clients[CLIENTS] = last;
	for (int i = 0; i <= CLIENTS; i++) {
		send_cm_message(clients[i], good_request);
		expect_cm_message(clients[i], SOFT_CM_MRA);
	}
	for (int taken = 0; taken <= CLIENTS; taken++) {
		const unsigned left = (unsigned)(CLIENTS + 1 - taken);

		CHECK_EQUAL(soft_cm_id_of(listener.id)->undelivered, left < FEW ? left : FEW);
		struct side request = take_request(&listener);
		const struct sockaddr_in *peer = (const void *)&request.id->route.addr.dst_addr;

		CHECK_EQUAL(peer->sin_addr.s_addr == elsewhere.sin_addr.s_addr, taken == FEW);
		side_drop(&request);
	}
	soft_device.cm->limits = before;
	side_close(&listener);
	for (int i = 0; i <= CLIENTS; i++)
		close(clients[i]);
}

/* Check that a listener without free file descriptors waits without using the CPU, and accepts
 * connections again later. */
static void listener_without_free_descriptors_does_not_spin(void)
{
	struct side listener = listen_at(host, 0);
	struct rlimit limit, low;
	int clients[4], first, spare;
	struct pollfd wait = {.events = POLLIN};
	struct side server;

	CHECK_OK(getrlimit(RLIMIT_NOFILE, &limit));
	for (int i = 0; i < 4; i++)
		clients[i] = socket(AF_INET, SOCK_STREAM, 0);
	first = dup(0); /* lowest free descriptor */
	close(first);
	low = limit;
	low.rlim_cur = (rlim_t)first;
	CHECK_OK(setrlimit(RLIMIT_NOFILE, &low));
	for (int i = 0; i < 4; i++) {
		union address address = address_of(host, port_of(listener.id));

		CHECK_OK(connect(clients[i], &address.any, sizeof(address.v4)));
	}
	send_cm_message(clients[3], good_request);
	uint64_t start = now_ns(CLOCK_MONOTONIC), used = now_ns(CLOCK_PROCESS_CPUTIME_ID);

	wait.fd = listener.channel->fd;
	CHECK_EQUAL(poll(&wait, 1, 200), 0); /* no connection can be accepted */
	used = now_ns(CLOCK_PROCESS_CPUTIME_ID) - used;
	CHECK(used < (now_ns(CLOCK_MONOTONIC) - start) / 2); /* no busy loop of accept() calls */
	CHECK_OK(setrlimit(RLIMIT_NOFILE, &limit));
	spare = dup(0);
	server = take_request(&listener);
	close(spare);
	for (int i = 0; i < 4; i++)
		close(clients[i]);
	side_drop(&server);
	expect_listener_works(&listener);
	side_close(&listener);
}

/* ---- servers ------------------------------------------------------------------------------- */

static struct side connect_to_fake_server(int server, uint16_t port, int *connection)
{
	struct side client = start_connecting(host, port);

	*connection = accept(server, NULL, NULL);
	CHECK(*connection >= 0);
	CHECK_EQUAL(expect_cm_message(*connection, SOFT_CM_REQ).qpn, client.id->qp->qp_num);
	return client;
}

static void expect_connect_fails_after(int server, uint16_t port, const void *bytes, size_t length,
				       enum rdma_cm_event_type type, int status)
{
	int connection;
	struct side client = connect_to_fake_server(server, port, &connection);

	if (length)
		write_all(connection, bytes, length);
	else
		close(connection);
	expect_status(client.channel, type, client.id, status);
	expect_nothing(client.channel);
	if (length)
		expect_closed(connection);
	CHECK_FAILS(rdma->rdma_connect(client.id, NULL), EINVAL); /* the id cannot connect again */
	side_close(&client);
}

static void server_protocol_violation_is_a_connect_error(void)
{
	uint16_t port;
	int server = tcp_listen(&port, 8);
	uint8_t reply[SOFT_MAD_SIZE], early[SOFT_MAD_SIZE], waits[2][SOFT_MAD_SIZE];

	soft_cm_encode(&(struct soft_cm_message){.type = SOFT_CM_REP}, reply);
	reply[SOFT_MAD_HEADER + 28 + 3] = SOFT_CM_VERSION - 1;
	soft_cm_encode(&ready_to_use, early);
	for (int i = 0; i < 2; i++)
		soft_cm_encode(&(struct soft_cm_message){.type = SOFT_CM_MRA}, waits[i]);
	expect_connect_fails_after(server, port, "HTTP/1.1 400 Bad Request\r\n\r\n", 28,
				   RDMA_CM_EVENT_CONNECT_ERROR, -EPROTO);
	expect_connect_fails_after(server, port, reply, sizeof(reply), RDMA_CM_EVENT_CONNECT_ERROR,
				   -EPROTONOSUPPORT);
	expect_connect_fails_after(server, port, early, sizeof(early), RDMA_CM_EVENT_CONNECT_ERROR,
				   -EPROTO);
	expect_connect_fails_after(server, port, waits, sizeof(waits), RDMA_CM_EVENT_CONNECT_ERROR,
				   -EPROTO);
	expect_connect_fails_after(server, port, NULL, 0, RDMA_CM_EVENT_REJECTED,
				   8); /* no response at all */
	close(server);
}

static void server_close_after_mra_is_a_connect_error(void)
{
	uint16_t port;
	int server = tcp_listen(&port, 8);
	int connection;
	struct side client = connect_to_fake_server(server, port, &connection);

	send_cm_message(connection, (struct soft_cm_message){.type = SOFT_CM_MRA});
	close(connection);
	expect_status(client.channel, RDMA_CM_EVENT_CONNECT_ERROR, client.id, -ECONNRESET);
	side_close(&client);
	close(server);
}

int main(void)
{
	int before;

	cm_begin(100);
	STEP(listener_disconnects_clients_that_send_garbage());
	before = count_resources();
	STEP(listener_disconnects_silent_clients_after_timeout());
	STEP(invalid_requests_are_rejected_with_the_right_reason());
	STEP(request_fails_silently_when_client_leaves());
	STEP(garbage_after_rtu_disconnects_the_queue_pair());
	STEP(notify_reports_established_once_before_rtu());
	STEP(second_mra_instead_of_rtu_is_a_connect_error());
	STEP(server_can_end_connection_before_rtu());
	STEP(channels_with_early_wake_up_need_no_engine_thread());
	STEP(destroyed_listener_closes_half_open_connections());
	STEP(flood_of_silent_clients_is_limited(false));
	STEP(flood_of_silent_clients_is_limited(true));
	STEP(flood_of_requests_evicts_the_oldest_parked_one(8, 16));
	STEP(flood_of_requests_evicts_the_oldest_parked_one(40, 40));
	STEP(flood_of_requests_evicts_the_oldest_parked_one(1000, 64));
	STEP(reported_requests_are_capped_and_shared_fairly());
	STEP(listener_without_free_descriptors_does_not_spin());
	STEP(server_protocol_violation_is_a_connect_error());
	STEP(server_close_after_mra_is_a_connect_error());
	expect_resources(before);
	return 0;
}
