/* Fuzz the connection manager with real ids and sockets. Hostile clients connect to a listener from
 * many addresses, while the device allows only a few half-open connections. Hostile servers respond
 * with arbitrary messages. Peers also connect to the data listener to reach the ids' queue pairs,
 * and request services with datagrams.
 *
 * The application makes any call at any time. All resources must be freed at the end, and the
 * listener must still accept a well-behaved client.
 */
#include <endian.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>

#include "../soft/cm_side.h"
#include "../soft/record_side.h"
#include "fuzz.h"

#include "cm/cm_internal.h"
#include "link/link_internal.h"

enum { CLIENTS = 8, IDS = 6, PLACES = 3, PEER_PSN = 100 };

static struct world {
	struct rdma_event_channel *channel; /* events of the listeners and their requests */
	struct rdma_event_channel *asking; /* events of the clients */
	struct rdma_cm_id *listener, *service;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct rdma_cm_id *ids[IDS];
	int clients[CLIENTS]; /* -1 if closed */
	int server; /* the fuzzer's listening socket, to which clients connect */
	uint16_t data; /* port of the data listener */
	int datagrams;
	int sockets;
} world;

static uint16_t tcp_port(int fd)
{
	union address address;
	socklen_t length = sizeof(address);

	CHECK_OK(getsockname(fd, &address.any, &length));
	return ntohs(address.v4.sin_port);
}

static struct rdma_cm_id *open_listener(enum rdma_port_space space)
{
	union address any = address_of(host, 0);
	struct rdma_cm_id *id;

	CHECK_OK(rdma->rdma_create_id(world.channel, &id, NULL, space));
	CHECK_OK(rdma->rdma_bind_addr(id, &any.any));
	CHECK_OK(rdma->rdma_listen(id, 4));
	return id;
}

static void open_world(void)
{
	union address any = address_of("127.0.0.1", 0);
	struct ibv_port_attr port;

	rdma = aiordma_embedded_calls();
	CHECK(world.channel = rdma->rdma_create_event_channel());
	CHECK(world.asking = rdma->rdma_create_event_channel());
	CHECK_OK(fcntl(world.channel->fd, F_SETFL, O_NONBLOCK));
	CHECK_OK(fcntl(world.asking->fd, F_SETFL, O_NONBLOCK));
	soft_device.cm->limits.half_open = PLACES;
	world.listener = open_listener(RDMA_PS_TCP);
	world.service = open_listener(RDMA_PS_UDP);
	CHECK(world.pd = rdma->ibv_alloc_pd(world.listener->verbs));
	CHECK(world.cq = rdma->ibv_create_cq(world.listener->verbs, 256, NULL, NULL, 0));
	/* soft_ip_port() opens the data listener when it is first called. */
	CHECK_OK(rdma->ibv_query_port(world.listener->verbs, 1,
				      (struct _compat_ibv_port_attr *)&port));
	soft_lock();
	world.data = soft_ip_port();
	soft_unlock();
	world.server = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	CHECK_OK(bind(world.server, &any.any, sizeof(any.v4)));
	CHECK_OK(listen(world.server, 16));
	world.datagrams = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	CHECK_OK(bind(world.datagrams, &any.any, sizeof(any.v4)));
	for (int i = 0; i < CLIENTS; i++)
		world.clients[i] = -1;
	world.sockets = 0;
}

/* ---- the application ------------------------------------------------------------------------- */

static void make_queue_pair(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = world.cq,
		.recv_cq = world.cq,
		.qp_type = id->qp_type,
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
	};

	if (!id->qp && id->verbs)
		(void)rdma->rdma_create_qp(id, world.pd, &attr);
}

static void destroy(struct rdma_cm_id **id)
{
	if (!*id)
		return;
	if ((*id)->qp)
		rdma->rdma_destroy_qp(*id);
	CHECK_OK(rdma->rdma_destroy_id(*id));
	*id = NULL;
}

static struct rdma_cm_id **free_slot(void)
{
	for (int i = 0; i < IDS; i++)
		if (!world.ids[i])
			return &world.ids[i];
	return NULL;
}

/* Make an arbitrary application call on an id. The device must reject the call if it is invalid in
 * the id's state. */
static void make_call(struct rdma_cm_id **id, const uint8_t *r)
{
	struct rdma_conn_param parameters = {.private_data = r,
					     .private_data_len = r[1] & 8,
					     .responder_resources = r[2] & 3,
					     .initiator_depth = r[3] & 3,
					     .retry_count = 7,
					     .rnr_retry_count = 7};

	if (!*id)
		return;
	switch (r[0] & 7) {
	case 0:
	case 1:
		make_queue_pair(*id);
		(void)rdma->rdma_accept(*id, &parameters);
		break;
	case 2:
		(void)rdma->rdma_reject(*id, r, r[1] & 8);
		break;
	case 3:
		(void)rdma->rdma_disconnect(*id);
		break;
	case 4:
		destroy(id);
		break;
	case 5:
		(void)rdma->rdma_notify(*id, IBV_EVENT_COMM_EST);
		break;
	case 6:
		make_queue_pair(*id);
		(void)rdma->rdma_connect(*id, &parameters);
		break;
	case 7:
		(void)rdma->rdma_establish(*id);
		break;
	}
}

/* Take an event, if any, and act on its id unless `r` is NULL. The id of a connect request is added
 * to world.ids. Returns false if no event is pending. */
static bool take_event(const uint8_t *r)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id **id = NULL;

	if (rdma->rdma_get_cm_event(world.channel, &event) &&
	    rdma->rdma_get_cm_event(world.asking, &event)) {
		CHECK_EQUAL(errno, EAGAIN);
		return false;
	}
	if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		struct rdma_cm_id *request = event->id;

		CHECK(event->listen_id == world.listener || event->listen_id == world.service);
		CHECK_OK(rdma->rdma_ack_cm_event(event));
		id = free_slot();
		if (!id) {
			destroy(&request);
			return true;
		}
		*id = request;
	} else {
		for (int i = 0; i < IDS; i++)
			if (world.ids[i] == event->id)
				id = &world.ids[i];
		CHECK(id); /* destroyed ids have no events */
		CHECK_OK(rdma->rdma_ack_cm_event(event));
	}
	if (r)
		make_call(id, r);
	return true;
}

/* Maximum number of polls for data. Polling is necessary because the kernel may deliver data after
 * the system call that sent it has returned. */
enum { TRIES = 100000 };

static void yield_and_step(void)
{
	sched_yield();
	fuzz_steps(1);
}

static bool wait_for_cm_event(struct rdma_cm_id *id, enum rdma_cm_event_type type)
{
	for (int tries = 0; tries < TRIES; tries++) {
		struct rdma_cm_event *event;
		bool right;

		yield_and_step();
		if (rdma->rdma_get_cm_event(id->channel, &event))
			continue;
		right = event->event == type && event->id == id;
		CHECK_OK(rdma->rdma_ack_cm_event(event));
		return right;
	}
	return false;
}

static struct rdma_cm_id *resolve_route(enum rdma_port_space space, uint16_t port)
{
	union address address = address_of("127.0.0.1", port);
	struct rdma_cm_id *id;

	CHECK_OK(rdma->rdma_create_id(world.asking, &id, NULL, space));
	CHECK_OK(rdma->rdma_resolve_addr(id, NULL, &address.any, 2000));
	if (!wait_for_cm_event(id, RDMA_CM_EVENT_ADDR_RESOLVED) ||
	    rdma->rdma_resolve_route(id, 2000) ||
	    !wait_for_cm_event(id, RDMA_CM_EVENT_ROUTE_RESOLVED))
		destroy(&id);
	return id;
}

static void connect_to_fuzzer(const uint8_t *r)
{
	struct rdma_conn_param parameters = {.retry_count = 7, .rnr_retry_count = 7};
	bool datagrams = r[0] & 1;
	struct rdma_cm_id **id = free_slot();

	if (!id)
		return;
	*id = resolve_route(datagrams ? RDMA_PS_UDP : RDMA_PS_TCP,
			    tcp_port(datagrams ? world.datagrams : world.server));
	if (!*id)
		return;
	if (!datagrams)
		make_queue_pair(*id);
	(void)rdma->rdma_connect(*id, &parameters);
}

/* ---- hostile peers
 * -------------------------------------------------------------------------------- */

static void close_connection(int *fd, bool politely)
{
	if (*fd < 0)
		return;
	if (!politely) /* send a reset, to avoid TIME_WAIT */
		(void)setsockopt(*fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0},
				 sizeof(struct linger));
	close(*fd);
	*fd = -1;
}

/* Connect a client. Bytes of `r`: 0 destination, 1-3 source address on this host. */
static void connect_to(int *fd, const uint8_t *r)
{
	union address from = address_of("127.0.0.1", 0);
	union address to = address_of("127.0.0.1", ntohs(rdma->rdma_get_src_port(world.listener)));

	close_connection(fd, false);
	if (r[0] & 1) {
		*fd = accept(world.server, NULL, NULL);
		return;
	}
	if (r[0] & 2)
		to.v4.sin_port = htons(world.data);
	*fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	from.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK ^ (r[1] << 16 | r[2] << 8 | r[3] << 1));
	CHECK_OK(setsockopt(*fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &(int){1}, sizeof(int)));
	CHECK_OK(bind(*fd, &from.any, sizeof(from.v4)));
	(void)connect(*fd, &to.any, sizeof(to.v4));
}

static void send_in_parts(int fd, const uint8_t *bytes, size_t length, size_t first)
{
	uint8_t heard[4096];

	if (fd < 0)
		return;
	if (first && first < length) {
		(void)!send(fd, bytes, first, MSG_NOSIGNAL | MSG_DONTWAIT);
		fuzz_steps(1);
		bytes += first;
		length -= first;
	}
	(void)!send(fd, bytes, length, MSG_NOSIGNAL | MSG_DONTWAIT);
	fuzz_steps(1);
	while (recv(fd, heard, sizeof(heard), MSG_DONTWAIT) > 0)
		;
}

/* Send a CM message. Bytes of `r`: 0 type, 1-2 QP number, 3 PSN and reason, 4 port space and QP
 * type, 5-6 responder resources and initiator depth, 7-8 retry counts, 9-10 position and XOR mask
 * of a corrupted byte, 11 number of bytes to send separately before the rest. */
static void send_cm_message(int fd, const uint8_t *r)
{
	uint8_t bytes[SOFT_MAD_SIZE];
	const size_t length = sizeof(bytes);
	struct soft_cm_message message = {
		.type = (enum soft_cm_type)(1 + r[0] % 5),
		.qpn = fuzz16(r + 1),
		.psn = PEER_PSN + r[3],
		.port_space = r[4] & 1 ? RDMA_PS_UDP : RDMA_PS_TCP,
		.qp_type = r[4] & 2 ? r[4] : IBV_QPT_RC,
		.responder_resources = r[5],
		.initiator_depth = r[6],
		.retry_count = r[7],
		.rnr_retry_count = r[8],
		.reason = r[3],
	};

	soft_cm_encode(&message, bytes);
	bytes[r[9] % length] ^= r[10];
	send_in_parts(fd, bytes, length, r[11]);
}

/* Send a record to an id's queue pair on a CM connection or on a connection to the data listener.
 * Bytes of `r`: 0 kind (0 is a HELLO without a record header), 1 index of the id whose queue pair
 * is the destination, 2-3 destination and source channels, 4 handshake type or opcode, 5 PSN, 6
 * length, 7 flags, 8 acknowledged PSN, 9 number of bytes to send separately before the rest. */
static void send_record(int fd, const uint8_t *r)
{
	struct rdma_cm_id *id = world.ids[r[1] % IDS];
	const struct soft_cm_id *own = id ? soft_cm_id_of(id) : NULL;
	uint8_t bytes[RECORD_HEADER + SOFT_FRAME_HEADER + 64] = {0};
	uint8_t *payload = bytes + RECORD_HEADER;
	enum soft_record_kind kind = (enum soft_record_kind)(r[0] % 5);
	const struct soft_hello hello = {
		.kind = kind ? r[4] & 3 : SOFT_HELLO_STREAM,
		.from = own ? own->remote_qpn : r[1],
		.to = id && id->qp ? id->qp->qp_num : r[1],
		.receive_psn = own ? own->remote_psn : 0,
		.send_psn = own ? own->psn : PEER_PSN + (uint32_t)r[5],
		.flags = SOFT_HELLO_SENDS,
		.mtu = IBV_MTU_4096 ^ (r[7] & 7),
	};
	const struct soft_frame frame = {
		.opcode = r[4],
		.flags = r[7],
		.psn = PEER_PSN + r[5],
		.length = r[6] & 63,
		.dma_length = r[6] & 63,
		.ack = r[8],
	};
	uint32_t length = kind == SOFT_RECORD_END ? 0 : SOFT_HANDSHAKE_SIZE;

	if (kind == SOFT_RECORD_DATA) {
		length = SOFT_FRAME_HEADER + frame.length;
		soft_frame_encode(payload, &frame);
	} else {
		soft_hello_encode(payload, &hello);
	}
	record_header(bytes, kind, length, r[2] & 3, r[3] & 3);
	if (kind)
		send_in_parts(fd, bytes, RECORD_HEADER + length, r[9]);
	else
		send_in_parts(fd, payload, length, r[9]);
}

/* Send a service message. Bytes of `r`: 0 type, 1 request number, 2-3 QP number, 4 status, 6-7
 * position and XOR mask of a corrupted byte, 8 number of bytes to send (0 means all). */
static void send_sidr_message(const uint8_t *r)
{
	union address to = address_of("127.0.0.1", ntohs(rdma->rdma_get_src_port(world.service)));
	uint8_t bytes[SOFT_MAD_SIZE];
	const size_t length = sizeof(bytes);
	socklen_t size = sizeof(to);
	struct soft_cm_message message = {
		.type = (enum soft_cm_type)(SOFT_SIDR_REQ + r[0] % 2),
		.number = r[1],
		.qpn = fuzz16(r + 2),
		.qkey = RDMA_UDP_QKEY,
		.status = r[4] & 7,
	};
	uint8_t heard[SOFT_MAD_SIZE];

	/* If a client's request is pending, use its number so that this message is a response. */
	if (recvfrom(world.datagrams, heard, sizeof(heard), MSG_DONTWAIT, &to.any, &size) >= 16 &&
	    r[1] & 0x80) {
		memcpy(&message.number, heard + 8, sizeof(message.number));
		message.number = be64toh(message.number);
	}
	soft_cm_encode(&message, bytes);
	bytes[r[6] % length] ^= r[7];
	(void)!sendto(world.datagrams, bytes, r[8] ? r[8] % length : length, MSG_DONTWAIT, &to.any,
		      sizeof(to.v4));
}

static void execute_record(const uint8_t *r)
{
	int *fd = &world.clients[r[1] % CLIENTS];

	switch (r[0] & 15) {
	case 0:
	case 1:
		connect_to(fd, r + 2);
		break;
	case 2:
	case 3:
	case 4:
		send_cm_message(*fd, r + 2);
		break;
	case 5:
		send_in_parts(*fd, r + 3, r[2] % (RECORD - 2u), 0);
		break;
	case 6:
		send_record(*fd, r + 2);
		break;
	case 7:
	case 8:
		take_event(r + 2);
		break;
	case 9:
	case 10:
		make_call(&world.ids[r[1] % IDS], r + 2);
		break;
	case 11:
		connect_to_fuzzer(r + 2);
		break;
	case 12:
		fuzz_pass_time(fuzz16(r + 2) * UINT64_C(2000000));
		break;
	case 13:
		close_connection(fd, r[2] & 1);
		break;
	case 14:
	case 15:
		send_sidr_message(r + 2);
		break;
	}
	if (!(r[0] & 0x10))
		fuzz_steps(2);
}

static void expect_still_serves(void)
{
	struct rdma_conn_param parameters = {.retry_count = 7, .rnr_retry_count = 7};
	struct rdma_cm_id *client =
		resolve_route(RDMA_PS_TCP, ntohs(rdma->rdma_get_src_port(world.listener)));
	bool there = false;

	CHECK(client);
	make_queue_pair(client);
	CHECK_OK(rdma->rdma_connect(client, &parameters));
	for (int tries = 0; tries < TRIES && !there; tries++) {
		yield_and_step();
		there = take_event(NULL);
	}
	CHECK(there && world.ids[0]);
	make_queue_pair(world.ids[0]);
	CHECK_OK(rdma->rdma_accept(world.ids[0], &parameters));
	CHECK(wait_for_cm_event(client, RDMA_CM_EVENT_ESTABLISHED));
	CHECK(wait_for_cm_event(world.ids[0], RDMA_CM_EVENT_ESTABLISHED));
	destroy(&client);
	fuzz_steps(2);
	destroy(&world.ids[0]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	int heard;

	fuzz_seed(data, size);
	if (!world.channel)
		open_world();
	soft_device.cm->half_open.seed = 0;
	soft_cm_id_of(world.listener)->listener->parked.seed = 0;
	for (size_t at = 0; at + RECORD <= size; at += RECORD)
		execute_record(data + at);
	for (int i = 0; i < CLIENTS; i++)
		close_connection(&world.clients[i], false);
	/* Let all remaining timers expire. */
	for (int i = 0; i < 3; i++) {
		fuzz_steps(4);
		fuzz_pass_time(UINT64_C(100000000000));
	}
	while (take_event(NULL) || (fuzz_steps(2), take_event(NULL)))
		;
	for (int i = 0; i < IDS; i++)
		destroy(&world.ids[i]);
	fuzz_pass_time(UINT64_C(100000000000));
	while ((heard = accept(world.server, NULL, NULL)) >= 0)
		close_connection(&heard, false);
	while (recv(world.datagrams, &heard, 1, MSG_DONTWAIT) >= 0)
		;
	expect_still_serves();
	for (int i = 0; i < 2; i++) {
		fuzz_steps(2);
		fuzz_pass_time(UINT64_C(100000000000));
	}
	if (!world.sockets)
		world.sockets = fuzz_sockets();
	for (int tries = 0; tries < TRIES && fuzz_sockets() != world.sockets; tries++) {
		yield_and_step();
		fuzz_pass_time(UINT64_C(100000000000));
	}
	CHECK_EQUAL(fuzz_sockets(), world.sockets);
	return 0;
}
