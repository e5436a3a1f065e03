/* One side of a connection, for those tests of the connection manager that need C. tests/cm tests
 * the same calls from Python, also on SoftRoCE. */
#pragma once

#include "embedded.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "leaks.h"

static const struct aiordma_calls *rdma;
static const char *const host = "127.0.0.1";

static inline void cm_begin(unsigned seconds)
{
	limit_seconds(seconds);
	rdma = aiordma_embedded_calls();
}

/* ---- addresses ----------------------------------------------------------------------------- */

union address {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
	struct sockaddr_storage storage;
};

static inline socklen_t address_length(const union address *address)
{
	return address->any.sa_family == AF_INET ? sizeof(address->v4) : sizeof(address->v6);
}

static inline union address address_of(const char *text, uint16_t port)
{
	union address address = {0};

	if (inet_pton(AF_INET, text, &address.v4.sin_addr) == 1) {
		address.v4.sin_family = AF_INET;
		address.v4.sin_port = htons(port);
	} else {
		CHECK_EQUAL(inet_pton(AF_INET6, text, &address.v6.sin6_addr), 1);
		address.v6.sin6_family = AF_INET6;
		address.v6.sin6_port = htons(port);
	}
	return address;
}

/* Returns the id's local port in host byte order. */
static inline uint16_t port_of(struct rdma_cm_id *id)
{
	return ntohs(rdma->rdma_get_src_port(id));
}

/* ---- events -------------------------------------------------------------------------------- */

/* Get the next event, which must have the given type. If `id` is not NULL, the event must be for
 * this id. The caller must acknowledge the event. */
static inline struct rdma_cm_event *expect(struct rdma_event_channel *channel,
					   enum rdma_cm_event_type type, struct rdma_cm_id *id)
{
	struct rdma_cm_event *event = NULL;

	CHECK_OK(rdma->rdma_get_cm_event(channel, &event));
	if (event->event != type) {
		fprintf(stderr, "event %s status %d, expected %s\n",
			rdma->rdma_event_str(event->event), event->status,
			rdma->rdma_event_str(type));
		abort();
	}
	CHECK(!id || event->id == id);
	return event;
}

static inline void acknowledge(struct rdma_cm_event *event)
{
	CHECK_OK(rdma->rdma_ack_cm_event(event));
}

/* Get and acknowledge the next event, which must have this type, id and status. */
static inline void expect_status(struct rdma_event_channel *channel, enum rdma_cm_event_type type,
				 struct rdma_cm_id *id, int status)
{
	struct rdma_cm_event *event = expect(channel, type, id);

	CHECK_EQUAL(event->status, status);
	acknowledge(event);
}

/* Wait until the channel has an event, without getting the event. */
static inline void wait_for_event(struct rdma_event_channel *channel)
{
	struct pollfd readable = {.fd = channel->fd, .events = POLLIN};

	CHECK_EQUAL(poll(&readable, 1, -1), 1);
}

static inline void expect_nothing(struct rdma_event_channel *channel)
{
	int flags = fcntl(channel->fd, F_GETFL);
	struct rdma_cm_event *event;

	CHECK_OK(fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK));
	CHECK_FAILS(rdma->rdma_get_cm_event(channel, &event), EAGAIN);
	CHECK_OK(fcntl(channel->fd, F_SETFL, flags));
}

/* ---- a side -------------------------------------------------------------------------------- */

enum { MESSAGE = 64 };

struct side {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	uint8_t *buffer; /* MESSAGE bytes to send, then MESSAGE bytes to receive */
};

static inline struct side side_open(void)
{
	struct side side = {.channel = rdma->rdma_create_event_channel()};

	CHECK(side.channel);
	return side;
}

static inline struct side side_of(enum rdma_port_space space)
{
	struct side side = side_open();

	CHECK_OK(rdma->rdma_create_id(side.channel, &side.id, NULL, space));
	return side;
}

static inline struct side side_with_id(void)
{
	return side_of(RDMA_PS_TCP);
}

static inline struct side open_bound_side(enum rdma_port_space space, const char *text,
					  uint16_t port)
{
	union address address = address_of(text, port);
	struct side side = side_of(space);

	CHECK_OK(rdma->rdma_bind_addr(side.id, &address.any));
	return side;
}

static inline struct ibv_qp_init_attr side_attributes(struct side *side)
{
	return (struct ibv_qp_init_attr){
		.send_cq = side->cq,
		.recv_cq = side->cq,
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
	};
}

static inline void side_memory(struct side *side)
{
	side->pd = rdma->ibv_alloc_pd(side->id->verbs);
	CHECK(side->pd);
	side->cq = rdma->ibv_create_cq(side->id->verbs, 16, NULL, NULL, 0);
	CHECK(side->cq);
	side->buffer = calloc(2, MESSAGE);
	CHECK(side->buffer);
	side->mr = rdma->ibv_reg_mr(side->pd, side->buffer, 2 * MESSAGE, IBV_ACCESS_LOCAL_WRITE);
	CHECK(side->mr);
}

static inline void side_post_receive(struct side *side)
{
	struct ibv_sge sge = {(uintptr_t)side->buffer + MESSAGE, MESSAGE, side->mr->lkey};
	struct ibv_recv_wr receive = {.wr_id = 2, .sg_list = &sge, .num_sge = 1};
	struct ibv_recv_wr *bad;

	CHECK_OK(side->id->verbs->ops.post_recv(side->id->qp, &receive, &bad));
}

/* Create memory and a queue pair in INIT, and post a receive. */
static inline void side_queue_pair(struct side *side)
{
	struct ibv_qp_init_attr attr;

	side_memory(side);
	attr = side_attributes(side);
	CHECK_OK(rdma->rdma_create_qp(side->id, side->pd, &attr));
	side_post_receive(side);
}

static inline void side_post_send(struct side *side)
{
	struct ibv_sge sge = {(uintptr_t)side->buffer, MESSAGE, side->mr->lkey};
	struct ibv_send_wr send = {.wr_id = 1,
				   .sg_list = &sge,
				   .num_sge = 1,
				   .opcode = IBV_WR_SEND,
				   .send_flags = IBV_SEND_SIGNALED};
	struct ibv_send_wr *bad;

	CHECK_OK(side->id->verbs->ops.post_send(side->id->qp, &send, &bad));
}

/* Poll until there is a completion, which must have the given status and `wr_id` (1 for the send, 2
 * for the receive). Returns the completion. */
static inline struct ibv_wc side_completion(struct side *side, uint64_t wr_id,
					    enum ibv_wc_status status)
{
	struct ibv_wc wc;
	int got;

	do
		got = side->id->verbs->ops.poll_cq(side->cq, 1, &wc);
	while (got == 0);
	CHECK_EQUAL(got, 1);
	CHECK_EQUAL(wc.wr_id, wr_id);
	CHECK_EQUAL(wc.status, status);
	return wc;
}

static inline void send_message(struct side *from, struct side *to, uint8_t seed)
{
	memset(from->buffer, seed, MESSAGE);
	side_post_send(from);
	CHECK_EQUAL(side_completion(to, 2, IBV_WC_SUCCESS).byte_len, MESSAGE);
	CHECK(memcmp(from->buffer, to->buffer + MESSAGE, MESSAGE) == 0);
	side_completion(from, 1, IBV_WC_SUCCESS);
}

static inline void side_forget_memory(struct side *side)
{
	if (side->mr)
		CHECK_OK(rdma->ibv_dereg_mr(side->mr));
	if (side->cq)
		CHECK_OK(rdma->ibv_destroy_cq(side->cq));
	if (side->pd)
		CHECK_OK(rdma->ibv_dealloc_pd(side->pd));
	free(side->buffer);
	side->buffer = NULL;
	side->mr = NULL;
	side->cq = NULL;
	side->pd = NULL;
}

/* Destroy the side's id and resources, if any, but keep its channel. */
static inline void side_drop(struct side *side)
{
	if (side->id && side->id->qp)
		rdma->rdma_destroy_qp(side->id);
	side_forget_memory(side);
	if (side->id)
		CHECK_OK(rdma->rdma_destroy_id(side->id));
	side->id = NULL;
}

static inline void side_close(struct side *side)
{
	side_drop(side);
	if (side->channel)
		rdma->rdma_destroy_event_channel(side->channel);
	side->channel = NULL;
}

/* ---- connecting ---------------------------------------------------------------------------- */

static inline struct side listen_at(const char *text, uint16_t port)
{
	struct side side = open_bound_side(RDMA_PS_TCP, text, port);

	CHECK_OK(rdma->rdma_listen(side.id, 16));
	return side;
}

static inline void resolve_to(struct side *side, const char *text, uint16_t port)
{
	union address address = address_of(text, port);

	CHECK_OK(rdma->rdma_resolve_addr(side->id, NULL, &address.any, 2000));
	expect_status(side->channel, RDMA_CM_EVENT_ADDR_RESOLVED, side->id, 0);
	CHECK_OK(rdma->rdma_resolve_route(side->id, 2000));
	expect_status(side->channel, RDMA_CM_EVENT_ROUTE_RESOLVED, side->id, 0);
}

static inline struct rdma_conn_param parameters(const void *private_data, uint8_t length)
{
	return (struct rdma_conn_param){.private_data = private_data,
					.private_data_len = length,
					.responder_resources = 1,
					.initiator_depth = 1,
					.retry_count = 7,
					.rnr_retry_count = 7};
}

/* Resolve the address, create a queue pair and send a connection request, without waiting for the
 * response. */
static inline void side_ask(struct side *side, const char *text, uint16_t port)
{
	struct rdma_conn_param ask = parameters(NULL, 0);

	resolve_to(side, text, port);
	side_queue_pair(side);
	CHECK_OK(rdma->rdma_connect(side->id, &ask));
}

/* Open a side and send a connection request. */
static inline struct side start_connecting(const char *text, uint16_t port)
{
	struct side side = side_with_id();

	side_ask(&side, text, port);
	return side;
}

/* Get the listener's next connection request. Returns the server side of the connection, which has
 * no queue pair yet and uses the listener's channel. */
static inline struct side take_request(struct side *listener)
{
	struct rdma_cm_event *event =
		expect(listener->channel, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
	struct side side = {.id = event->id, .channel = listener->channel};

	CHECK(event->listen_id == listener->id);
	acknowledge(event);
	return side;
}

static inline void accept_side(struct side *side)
{
	struct rdma_conn_param answer = parameters(NULL, 0);

	side_queue_pair(side);
	CHECK_OK(rdma->rdma_accept(side->id, &answer));
}

static inline void expect_established(struct side *client, struct side *server)
{
	expect_status(client->channel, RDMA_CM_EVENT_ESTABLISHED, client->id, 0);
	expect_status(server->channel, RDMA_CM_EVENT_ESTABLISHED, server->id, 0);
}

static inline void connect_sides(struct side *listener, const char *text, struct side *client,
				 struct side *server)
{
	*client = start_connecting(text, port_of(listener->id));
	*server = take_request(listener);
	accept_side(server);
	expect_established(client, server);
}

static inline void expect_end(struct side *side)
{
	expect_status(side->channel, RDMA_CM_EVENT_DISCONNECTED, side->id, 0);
	expect_status(side->channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, side->id, 0);
}

/* ---- both sides, and the listener ---------------------------------------------------------- */

struct connection {
	struct side listener, client, server; /* the server uses the listener's channel */
};

static inline struct connection open_requested_connection(void)
{
	struct connection it = {.listener = listen_at(host, 0)};

	it.client = start_connecting(host, port_of(it.listener.id));
	it.server = take_request(&it.listener);
	return it;
}

static inline struct connection open_connection(void)
{
	struct connection it = {.listener = listen_at(host, 0)};

	connect_sides(&it.listener, host, &it.client, &it.server);
	return it;
}

static inline void connection_close(struct connection *it)
{
	side_drop(&it->server);
	side_close(&it->client);
	side_close(&it->listener);
}
