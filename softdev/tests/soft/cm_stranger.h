/* A CM peer that the test emulates with a plain socket, so that it can send any message. */
#pragma once

#include "cm_side.h"

#include "cm/cm_internal.h"

static inline int connect_tcp(uint16_t port)
{
	union address address = address_of(host, port);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	CHECK_OK(connect(fd, &address.any, sizeof(address.v4)));
	return fd;
}

static inline int tcp_listen(uint16_t *port, int backlog)
{
	union address address = address_of(host, 0);
	socklen_t length = sizeof(address.v4);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK_OK(bind(fd, &address.any, length));
	CHECK_OK(listen(fd, backlog));
	CHECK_OK(getsockname(fd, &address.any, &length));
	*port = ntohs(address.v4.sin_port);
	return fd;
}

static inline void write_all(int fd, const void *bytes, size_t length)
{
	CHECK_EQUAL(send(fd, bytes, length, MSG_NOSIGNAL), length);
}

static inline void send_cm_message(int fd, struct soft_cm_message message)
{
	uint8_t bytes[SOFT_MAD_SIZE];

	soft_cm_encode(&message, bytes);
	write_all(fd, bytes, sizeof(bytes));
}

/* Receive the next message, which must have this type. MRA messages may precede it. */
static inline struct soft_cm_message expect_cm_message(int fd, enum soft_cm_type type)
{
	uint8_t bytes[SOFT_MAD_SIZE];
	struct soft_cm_message message;

	for (;;) {
		CHECK_EQUAL(recv(fd, bytes, sizeof(bytes), MSG_WAITALL), sizeof(bytes));
		CHECK_EQUAL(soft_cm_decode(bytes, sizeof(bytes), &message), 0);
		if (message.type == type)
			return message;
		CHECK_EQUAL(message.type, SOFT_CM_MRA);
	}
}

/* A request that a listener accepts. */
static const struct soft_cm_message good_request = {
	.type = SOFT_CM_REQ, .port_space = RDMA_PS_TCP, .qp_type = IBV_QPT_RC, .qpn = 77, .psn = 5};

/* Send a request to a listener. Returns the client's socket, and stores the server side of the
 * connection in `server`. */
static inline int send_good_request(struct side *listener, struct side *server)
{
	int fd = connect_tcp(port_of(listener->id));

	send_cm_message(fd, good_request);
	*server = take_request(listener);
	return fd;
}

/* ---- a request whose client has gone before the application has answered it -------------------- */

static inline enum soft_cm_state state_of(const struct side *side)
{
	enum soft_cm_state state;

	soft_lock();
	state = soft_cm_id_of(side->id)->state;
	soft_unlock();
	return state;
}

/* Wait until the device notices that the client is gone. Check that the application gets no event
 * and cannot accept or reject the request. Then destroy the request. */
static inline void expect_silent_end(struct side *listener, struct side *request)
{
	struct rdma_conn_param answer = parameters(NULL, 0);

	while (state_of(request) == SOFT_CM_REQUESTED)
		CHECK_EQUAL(poll(NULL, 0, 1), 0); /* bounded by limit_seconds */
	CHECK_FAILS(rdma->rdma_accept(request->id, &answer), EINVAL);
	CHECK_FAILS(rdma->rdma_reject(request->id, NULL, 0), EINVAL);
	CHECK_OK(rdma->rdma_disconnect(request->id));
	expect_nothing(listener->channel);
	side_drop(request);
}
