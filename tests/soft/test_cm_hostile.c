/* Hostile peers: plain TCP clients that connect to a listener, plain TCP servers that rdma_connect
 * is aimed at.  Each is handled in bounded time and space, without effect on the others. */
#include "cm_silent_end.h"

#include <sys/resource.h>

/* ---- plain sockets ------------------------------------------------------------------------- */

static int tcp_to(uint16_t port)
{
	union address address = address_of(host, port);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	CHECK_EQUAL(connect(fd, &address.any, sizeof(address.v4)), 0);
	return fd;
}

static void write_all(int fd, const void *bytes, size_t length)
{
	CHECK_EQUAL(send(fd, bytes, length, MSG_NOSIGNAL), length);
}

/* Waits until the other side has closed; what it said before goes to `bytes`. */
static size_t read_to_end(int fd, uint8_t *bytes, size_t room)
{
	size_t have = 0;
	ssize_t got;

	while ((got = recv(fd, bytes + have, room - have, 0)) > 0)
		have += (size_t)got;
	CHECK(got == 0 || errno == ECONNRESET);
	return have;
}

static void is_closed(int fd)
{
	uint8_t bytes[1024];

	CHECK_EQUAL(read_to_end(fd, bytes, sizeof(bytes)), 0);
	close(fd);
}

static size_t request_bytes(uint8_t bytes[SOFT_CM_MESSAGE_MAX])
{
	struct soft_cm_message request = {.type = SOFT_CM_REQ,
					  .port_space = RDMA_PS_TCP,
					  .qp_type = IBV_QPT_RC,
					  .qpn = 77,
					  .psn = 1};

	return soft_cm_encode(&request, bytes);
}

static size_t read_message(int fd, uint8_t bytes[SOFT_CM_MESSAGE_MAX],
			   struct soft_cm_message *message)
{
	size_t have = 0, used;

	while (soft_cm_decode(bytes, have, message, &used) == EAGAIN) {
		ssize_t got = recv(fd, bytes + have, 1, 0);

		CHECK_EQUAL(got, 1);
		have++;
	}
	CHECK_EQUAL(soft_cm_decode(bytes, have, message, &used), 0);
	return have;
}

/* The listener still serves a peer of this protocol. */
static void still_works(struct side *listener)
{
	struct side client, server;

	connect_sides(listener, host, &client, &server);
	send_message(&client, &server, 0x5a);
	side_drop(&server);
	side_close(&client);
}

/* ---- clients ------------------------------------------------------------------------------- */

static void garbage_clients(void)
{
	struct side listener = listen_at(host, 0);
	uint8_t request[SOFT_CM_MESSAGE_MAX];
	size_t length = request_bytes(request);
	int fd;

	fd = tcp_to(port_of(listener.id)); /* HTTP */
	write_all(fd, "GET / HTTP/1.1\r\n\r\n", 18);
	is_closed(fd);
	fd = tcp_to(port_of(listener.id)); /* our magic, then something else */
	write_all(fd, "ARCM\x02\x09", 6);
	is_closed(fd);
	fd = tcp_to(port_of(listener.id)); /* a body longer than there is */
	request[7] = 0xff;
	write_all(fd, request, length);
	is_closed(fd);
	request[7] = 0;
	request[11] = 0xff; /* a queue pair number of 32 bits */
	fd = tcp_to(port_of(listener.id));
	write_all(fd, request, length);
	is_closed(fd);
	fd = tcp_to(port_of(listener.id)); /* an answer where a request belongs */
	write_all(fd, "ARCM\x02\x04\x00\x00", 8);
	is_closed(fd);
	fd = tcp_to(port_of(listener.id)); /* nothing at all, closed and reset */
	close(fd);
	fd = tcp_to(port_of(listener.id));
	CHECK_EQUAL(setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0},
			       sizeof(struct linger)),
		    0);
	close(fd);
	still_works(&listener);
	side_close(&listener);
}

/* Says nothing, or half a request: closed after request_ms. */
static void silent_clients(void)
{
	struct soft_cm_limits before = soft_cm_limits;
	struct side listener = listen_at(host, 0);
	uint8_t request[SOFT_CM_MESSAGE_MAX];
	size_t length = request_bytes(request);
	int silent, half;

	soft_cm_limits.request_ms = 100;
	silent = tcp_to(port_of(listener.id));
	half = tcp_to(port_of(listener.id));
	write_all(half, request, length / 2);
	still_works(&listener);
	is_closed(silent);
	is_closed(half);
	soft_cm_limits = before;
	side_close(&listener);
}

/* A request in single bytes is a request all the same. */
static void slow_client(void)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	struct soft_cm_message message;
	uint8_t request[SOFT_CM_MESSAGE_MAX], answer[SOFT_CM_MESSAGE_MAX];
	size_t length = request_bytes(request);
	int fd = tcp_to(port_of(listener.id));

	CHECK_EQUAL(setsockopt(fd, IPPROTO_TCP, 1 /* TCP_NODELAY */, &(int){1}, sizeof(int)), 0);
	for (size_t i = 0; i < length; i++)
		write_all(fd, request + i, 1);
	server = take_request(&listener);
	read_message(fd, answer, &message);
	CHECK_EQUAL(message.type, SOFT_CM_MRA);
	CHECK_EQUAL(rdma->rdma_reject(server.id, "no", 2), 0);
	read_message(fd, answer, &message);
	CHECK_EQUAL(message.type, SOFT_CM_REJ);
	CHECK_EQUAL(message.reason, 28);
	CHECK(memcmp(message.private_data, "no", 3) == 0);
	is_closed(fd);
	side_drop(&server);
	side_close(&listener);
}

/* Refused by the listener itself, with the reason. */
static void refused_requests(void)
{
	struct side listener = listen_at(host, 0);
	struct soft_cm_message message;
	uint8_t request[SOFT_CM_MESSAGE_MAX], answer[SOFT_CM_MESSAGE_MAX];
	size_t length = request_bytes(request);
	static const struct {
		size_t at;
		uint8_t value;
		int reason;
	} cases[] = {
		{4, 3, SOFT_CM_REASON_INVALID_VERSION},
		{16, 0x11, SOFT_CM_REASON_INVALID_SERVICE_ID}, /* RDMA_PS_UDP */
		{18, IBV_QPT_UD, SOFT_CM_REASON_INVALID_TRANSPORT},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		int fd = tcp_to(port_of(listener.id));

		length = request_bytes(request);
		request[cases[i].at] = cases[i].value;
		write_all(fd, request, length);
		read_message(fd, answer, &message);
		CHECK_EQUAL(message.type, SOFT_CM_REJ);
		CHECK_EQUAL(message.reason, cases[i].reason);
		/* What was not read may turn the end into a reset; nothing more is said. */
		is_closed(fd);
	}
	still_works(&listener);
	side_close(&listener);
}

/* Gone, or talking nonsense, between its request and our answer. */
static void client_leaves(void)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	uint8_t request[SOFT_CM_MESSAGE_MAX];
	size_t length = request_bytes(request);
	int fd = tcp_to(port_of(listener.id));

	write_all(fd, request, length);
	server = take_request(&listener);
	close(fd); /* with MRA unread: a reset, or an end */
	expect_silent_end(&listener, &server);

	fd = tcp_to(port_of(listener.id));
	write_all(fd, request, length);
	server = take_request(&listener);
	write_all(fd, request, length); /* a second request */
	expect_silent_end(&listener, &server);
	close(fd);

	fd = tcp_to(port_of(listener.id));
	write_all(fd, request, length);
	write_all(fd, "ARCM\x02\x05\x98\x00\x04\x00\x00\x00", 12); /* taken back: REJ "timeout" */
	{
		uint8_t zeros[148] = {0};

		write_all(fd, zeros, sizeof(zeros));
	}
	server = take_request(&listener);
	expect_silent_end(&listener, &server);
	close(fd);

	/* Accepted, and no RTU comes. */
	soft_cm_limits.service_ms = 100;
	fd = tcp_to(port_of(listener.id));
	write_all(fd, request, length);
	server = take_request(&listener);
	accept_side(&server);
	expect_status(listener.channel, RDMA_CM_EVENT_UNREACHABLE, server.id, -ETIMEDOUT);
	close(fd);
	side_drop(&server);
	soft_cm_limits.service_ms = 60000;
	still_works(&listener);
	side_close(&listener);
}

/* After RTU the stream is the queue pair's, and what comes is not a frame. */
static void garbage_after_rtu(void)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	struct soft_cm_message message;
	uint8_t request[SOFT_CM_MESSAGE_MAX + 8 + 64], answer[SOFT_CM_MESSAGE_MAX];
	size_t length = request_bytes(request);
	struct soft_cm_message ready = {.type = SOFT_CM_RTU};
	struct rdma_cm_event *event;
	int fd = tcp_to(port_of(listener.id));

	write_all(fd, request, length);
	server = take_request(&listener);
	accept_side(&server);
	read_message(fd, answer, &message); /* MRA */
	read_message(fd, answer, &message);
	CHECK_EQUAL(message.type, SOFT_CM_REP);
	CHECK_EQUAL(message.qpn, server.id->qp->qp_num);
	length = soft_cm_encode(&ready, request);
	memset(request + length, 0xff, 64);
	write_all(fd, request, length + 64); /* in one piece: the rest must reach the queue pair */
	expect_status(listener.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	event = expect(listener.channel, RDMA_CM_EVENT_DISCONNECTED, server.id);
	CHECK(event->status < 0);
	acknowledge(event);
	close(fd);
	side_drop(&server);
	still_works(&listener);
	side_close(&listener);
}

/* rdma_notify(3): the application knows before RTU comes; it is told once. */
static void established_early(void)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	struct soft_cm_message message;
	uint8_t request[SOFT_CM_MESSAGE_MAX], answer[SOFT_CM_MESSAGE_MAX];
	size_t length = request_bytes(request);
	int fd = tcp_to(port_of(listener.id));

	write_all(fd, request, length);
	server = take_request(&listener);
	CHECK_FAILS(rdma->rdma_notify(server.id, IBV_EVENT_COMM_EST), EINVAL);
	accept_side(&server);
	CHECK_FAILS(rdma->rdma_notify(server.id, IBV_EVENT_QP_FATAL), EINVAL);
	CHECK_EQUAL(rdma->rdma_notify(server.id, IBV_EVENT_COMM_EST), 0);
	CHECK_FAILS(rdma->rdma_notify(server.id, IBV_EVENT_COMM_EST), EISCONN);
	expect_status(listener.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	read_message(fd, answer, &message); /* MRA */
	read_message(fd, answer, &message);
	CHECK_EQUAL(message.type, SOFT_CM_REP);
	write_all(fd, "ARCM\x02\x04\x00\x00", 8); /* RTU, and the end without a goodbye */
	close(fd);
	expect_status(listener.channel, RDMA_CM_EVENT_DISCONNECTED, server.id, -ECONNRESET);
	side_drop(&server);
	side_close(&listener);
}

/* Up to REP, on a plain socket; the server side is in between rdma_accept and RTU. */
static int accepted_client(struct side *listener, struct side *server)
{
	struct soft_cm_message message;
	uint8_t bytes[SOFT_CM_MESSAGE_MAX];
	size_t length = request_bytes(bytes);
	int fd = tcp_to(port_of(listener->id));

	write_all(fd, bytes, length);
	*server = take_request(listener);
	accept_side(server);
	read_message(fd, bytes, &message); /* MRA */
	read_message(fd, bytes, &message);
	CHECK_EQUAL(message.type, SOFT_CM_REP);
	return fd;
}

static void ends_before_rtu(void)
{
	struct side listener = listen_at(host, 0);
	struct side server;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
	uint8_t bytes[SOFT_CM_MESSAGE_MAX];
	struct soft_cm_message message;
	int fd;

	fd = accepted_client(&listener, &server); /* the application disconnects */
	CHECK_EQUAL(rdma->rdma_disconnect(server.id), 0);
	is_closed(fd);
	expect_end(&server);
	side_drop(&server);

	fd = accepted_client(&listener, &server); /* it takes its answer back */
	CHECK_EQUAL(rdma->rdma_reject(server.id, NULL, 0), 0);
	read_message(fd, bytes, &message);
	CHECK_EQUAL(message.type, SOFT_CM_REJ);
	is_closed(fd);
	side_drop(&server);

	fd = accepted_client(&listener, &server); /* its queue pair has failed */
	CHECK_EQUAL(rdma->ibv_modify_qp(server.id->qp, &attr, IBV_QP_STATE), 0);
	write_all(fd, "ARCM\x02\x04\x00\x00", 8);
	is_closed(fd);
	expect_status(listener.channel, RDMA_CM_EVENT_CONNECT_ERROR, server.id, -ENOTCONN);
	side_drop(&server);
	side_close(&listener);
}

/* A listener goes while connections are half open. */
static void door_closes(void)
{
	struct side listener = listen_at(host, 0);
	int fds[3];

	for (int i = 0; i < 3; i++)
		fds[i] = tcp_to(port_of(listener.id));
	still_works(&listener); /* they have been let in */
	side_close(&listener);
	for (int i = 0; i < 3; i++)
		is_closed(fds[i]);
}

/* More silent connections than may be half open: the oldest go, requests come through, and the
 * process keeps its file descriptors. */
static void flood(bool few_descriptors)
{
	enum {
		CLIENTS = 400,
		LIMIT = 64,
		CLOSING = 16
	}; /* of still_works, on their way out */
	struct soft_cm_limits before = soft_cm_limits;
	struct side listener = listen_at(host, 0);
	static int clients[CLIENTS];
	int alive = 0, resources_before, at_most;
	struct rlimit files, low;

	CHECK_EQUAL(getrlimit(RLIMIT_NOFILE, &files), 0);
	low = files;
	/* an eighth of the process's descriptors is for half-open connections */
	low.rlim_cur = 8 * LIMIT;
	if (few_descriptors)
		CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &low), 0);
	else
		soft_cm_limits.half_open = LIMIT;
	still_works(&listener);
	resources_before = resources();
	for (int i = 0; i < CLIENTS; i++)
		clients[i] = tcp_to(port_of(listener.id));
	still_works(&listener); /* all connections before this one have been looked at */
	at_most = resources_before + (CLIENTS + LIMIT + CLOSING) * 1000;
	CHECK(resources() <= at_most);
	for (int i = 0; i < CLIENTS; i++) {
		uint8_t byte;

		if (recv(clients[i], &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN)
			alive++;
	}
	CHECK(alive <= LIMIT);
	CHECK(alive > 0);
	for (int i = 0; i < CLIENTS; i++)
		close(clients[i]);
	still_works(&listener);
	soft_cm_limits = before;
	CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &files), 0);
	side_close(&listener);
}

/* Whole requests in numbers, none of which the application takes: the backlog fills, then as many
 * wait as may, of which the oldest is refused for each further one. */
static void flood_of_requests(void)
{
	enum {
		CLIENTS = 100,
		BACKLOG = 8,
		LIMIT = 16
	};
	struct soft_cm_limits before = soft_cm_limits;
	struct side listener = side_with_id();
	union address address = address_of(host, 0);
	uint8_t request[SOFT_CM_MESSAGE_MAX];
	size_t length = request_bytes(request);
	static int clients[CLIENTS];

	soft_cm_limits.half_open = LIMIT;
	CHECK_EQUAL(rdma->rdma_bind_addr(listener.id, &address.any), 0);
	CHECK_EQUAL(rdma->rdma_listen(listener.id, BACKLOG), 0);
	for (int i = 0; i < CLIENTS; i++) {
		uint8_t answer[SOFT_CM_MESSAGE_MAX];
		struct soft_cm_message message;

		clients[i] = tcp_to(port_of(listener.id));
		write_all(clients[i], request, length);
		read_message(clients[i], answer, &message);
		CHECK_EQUAL(message.type, SOFT_CM_MRA);
	}
	for (int i = 0; i < CLIENTS; i++) {
		uint8_t answer[SOFT_CM_MESSAGE_MAX];
		struct soft_cm_message message;

		if (i < BACKLOG || i >= CLIENTS - LIMIT) {
			CHECK(recv(clients[i], answer, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
			continue;
		}
		read_message(clients[i], answer, &message);
		CHECK_EQUAL(message.type, SOFT_CM_REJ);
		CHECK_EQUAL(message.reason, SOFT_CM_REASON_NO_RESOURCES);
	}
	soft_cm_limits = before;
	side_close(&listener); /* with all of them in it */
	for (int i = 0; i < CLIENTS; i++)
		close(clients[i]);
}

/* No file descriptors left: the listener waits without burning the CPU, and comes back. */
static void out_of_descriptors(void)
{
	struct side listener = listen_at(host, 0);
	struct rlimit limit, low;
	int clients[4], first, spare;
	struct pollfd wait = {.events = POLLIN};
	uint8_t request[SOFT_CM_MESSAGE_MAX];
	size_t length = request_bytes(request);
	struct side server;

	CHECK_EQUAL(getrlimit(RLIMIT_NOFILE, &limit), 0);
	for (int i = 0; i < 4; i++)
		clients[i] = socket(AF_INET, SOCK_STREAM, 0);
	first = dup(0); /* the lowest free one */
	close(first);
	low = limit;
	low.rlim_cur = (rlim_t)first;
	CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &low), 0);
	for (int i = 0; i < 4; i++) {
		union address address = address_of(host, port_of(listener.id));

		CHECK_EQUAL(connect(clients[i], &address.any, sizeof(address.v4)), 0);
	}
	write_all(clients[3], request, length);
	uint64_t start = now_ns(CLOCK_MONOTONIC), used = now_ns(CLOCK_PROCESS_CPUTIME_ID);

	wait.fd = listener.channel->fd;
	CHECK_EQUAL(poll(&wait, 1, 200), 0); /* no connection can be accepted */
	used = now_ns(CLOCK_PROCESS_CPUTIME_ID) - used;
	CHECK(used < (now_ns(CLOCK_MONOTONIC) - start) / 2); /* nor is it tried without a pause */
	CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &limit), 0);
	spare = dup(0);
	server = take_request(&listener);
	close(spare);
	for (int i = 0; i < 4; i++)
		close(clients[i]);
	side_drop(&server);
	still_works(&listener);
	side_close(&listener);
}

/* ---- servers ------------------------------------------------------------------------------- */

static int tcp_listen(uint16_t *port)
{
	union address address = address_of(host, 0);
	socklen_t length = sizeof(address.v4);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK_EQUAL(bind(fd, &address.any, length), 0);
	CHECK_EQUAL(listen(fd, 8), 0);
	CHECK_EQUAL(getsockname(fd, &address.any, &length), 0);
	*port = ntohs(address.v4.sin_port);
	return fd;
}

static struct side asking(int server, uint16_t port, int *connection)
{
	struct side client = ask(host, port);
	uint8_t bytes[SOFT_CM_MESSAGE_MAX];
	struct soft_cm_message message;

	*connection = accept(server, NULL, NULL);
	CHECK(*connection >= 0);
	read_message(*connection, bytes, &message);
	CHECK_EQUAL(message.type, SOFT_CM_REQ);
	CHECK_EQUAL(message.qpn, client.id->qp->qp_num);
	return client;
}

static void answered_with(int server, uint16_t port, const void *bytes, size_t length,
			  enum rdma_cm_event_type type, int status)
{
	int connection;
	struct side client = asking(server, port, &connection);

	if (length)
		write_all(connection, bytes, length);
	else
		close(connection);
	expect_status(client.channel, type, client.id, status);
	expect_nothing(client.channel);
	if (length)
		is_closed(connection);
	CHECK_FAILS(rdma->rdma_connect(client.id, NULL), EINVAL); /* it had its chance */
	side_close(&client);
}

static void strange_servers(void)
{
	uint16_t port;
	int server = tcp_listen(&port);

	answered_with(server, port, "HTTP/1.1 400 Bad Request\r\n\r\n", 28,
		      RDMA_CM_EVENT_CONNECT_ERROR, -EPROTO);
	answered_with(server, port, "ARCM\x03\x03", 6, RDMA_CM_EVENT_CONNECT_ERROR,
		      -EPROTONOSUPPORT);
	answered_with(server, port, "ARCM\x02\x04\x00\x00", 8, /* RTU is not an answer */
		      RDMA_CM_EVENT_CONNECT_ERROR, -EPROTO);
	answered_with(server, port, NULL, 0, RDMA_CM_EVENT_REJECTED, 8); /* closed without a word */
	close(server);
}

static bool has_heard(const struct side *client)
{
	bool heard;

	soft_lock();
	heard = soft_cm_id_of(client->id)->heard;
	soft_unlock();
	return heard;
}

/* Not a word, and only the first one. */
static void silent_servers(void)
{
	struct soft_cm_limits before = soft_cm_limits;
	uint16_t port;
	int server = tcp_listen(&port);
	int connection;
	struct side client;

	soft_cm_limits.response_ms = 100;
	client = asking(server, port, &connection);
	expect_status(client.channel, RDMA_CM_EVENT_UNREACHABLE, client.id, -ETIMEDOUT);
	close(connection);
	side_close(&client);

	soft_cm_limits.service_ms = 100;
	soft_cm_limits.response_ms = 60000;
	client = asking(server, port, &connection);
	write_all(connection, "ARCM\x02\x02\x00\x00", 8); /* MRA */
	expect_status(client.channel, RDMA_CM_EVENT_UNREACHABLE, client.id, -ETIMEDOUT);
	close(connection);
	side_close(&client);

	/* The first word again and again: the time runs from the first one. */
	client = asking(server, port, &connection);
	write_all(connection, "ARCM\x02\x02\x00\x00", 8);
	while (!has_heard(&client))
		CHECK_EQUAL(poll(NULL, 0, 1), 0); /* limit_seconds bounds it */
	soft_lock();
	soft_cm_limits.service_ms = UINT32_MAX;
	soft_unlock();
	write_all(connection, "ARCM\x02\x02\x00\x00", 8);
	expect_status(client.channel, RDMA_CM_EVENT_UNREACHABLE, client.id, -ETIMEDOUT);
	close(connection);
	side_close(&client);

	/* After its first word it goes. */
	soft_cm_limits = before;
	client = asking(server, port, &connection);
	write_all(connection, "ARCM\x02\x02\x00\x00", 8);
	close(connection);
	expect_status(client.channel, RDMA_CM_EVENT_CONNECT_ERROR, client.id, -ECONNRESET);
	side_close(&client);
	close(server);
}

/* A connection that TCP never completes: the server's queue is full, its SYNs are not answered. */
static void no_tcp_connection(void)
{
	struct soft_cm_limits before = soft_cm_limits;
	union address address = address_of(host, 0);
	socklen_t length = sizeof(address.v4);
	int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int fillers[4];
	struct side client;

	CHECK_EQUAL(bind(server, &address.any, length), 0);
	CHECK_EQUAL(listen(server, 0), 0);
	CHECK_EQUAL(getsockname(server, &address.any, &length), 0);
	for (int i = 0; i < 4; i++) {
		fillers[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
		(void)connect(fillers[i], &address.any, length);
	}
	soft_cm_limits.response_ms = 200;
	client = ask(host, ntohs(address.v4.sin_port));
	expect_status(client.channel, RDMA_CM_EVENT_UNREACHABLE, client.id, -ETIMEDOUT);
	side_close(&client);
	for (int i = 0; i < 4; i++)
		close(fillers[i]);
	close(server);
	soft_cm_limits = before;
}

int main(void)
{
	int before;

	cm_begin(100);
	STEP(garbage_clients());
	before = resources();
	STEP(silent_clients());
	STEP(slow_client());
	STEP(refused_requests());
	STEP(client_leaves());
	STEP(garbage_after_rtu());
	STEP(established_early());
	STEP(ends_before_rtu());
	STEP(door_closes());
	STEP(flood(false));
	STEP(flood(true));
	STEP(flood_of_requests());
	STEP(out_of_descriptors());
	STEP(strange_servers());
	STEP(silent_servers());
	STEP(no_tcp_connection());
	expect_resources(before);
	return 0;
}
