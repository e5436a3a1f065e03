/* rdma_connect(3) of a datagram service: repeats its request until there is an answer.
 *
 * The same times as for connections: the other side's connection manager must answer within
 * soft_cm_limits.response_ms, its application has soft_cm_limits.service_ms from then on.
 * A port where no service is is refused by the host itself (ICMP).  When that has been so for
 * soft_cm_limits.refused_ms, it is reported as the status that an InfiniBand host answers with
 * (rdma_get_cm_event(3), RDMA_CM_EVENT_UNREACHABLE).
 */
#include "cm_sidr.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>

#include "objects/objects.h"

#define FIRST_PAUSE_NS UINT64_C(50000000)
#define LONGEST_PAUSE_NS UINT64_C(1000000000)

void soft_cm_sidr_request_end(struct soft_cm_id *id)
{
	struct soft_cm_sidr_query *query = id->query;

	if (!query)
		return;
	id->query = NULL;
	id->sock = query->watch.fd; /* its port is the id's until that is destroyed */
	soft_unwatch(&query->watch);
	soft_timer_stop(&query->again);
	free(query);
	soft_cm_id_waits(id, false);
}

static void unanswered(struct soft_cm_id *id, int status, const void *private_data)
{
	soft_cm_sidr_request_end(id);
	id->state = SOFT_CM_FAILED;
	soft_cm_report_datagrams(
		id, id, RDMA_CM_EVENT_UNREACHABLE, status,
		&(struct soft_cm_destination){
			.private_data = private_data,
			.private_data_len = private_data ? SOFT_SIDR_REP_PRIVATE : 0,
		});
}

static void send_request(struct soft_cm_sidr_query *query)
{
	/* A datagram that is not sent now goes out next time; a missing service shows when reading.
	 */
	(void)send(query->watch.fd, query->bytes, query->length, MSG_NOSIGNAL | MSG_DONTWAIT);
	soft_timer_start(&query->again, soft_now() + query->pause_ns);
	query->pause_ns *= 2;
	if (query->pause_ns > LONGEST_PAUSE_NS)
		query->pause_ns = LONGEST_PAUSE_NS;
}

static void resend(struct soft_timer *timer)
{
	struct soft_cm_sidr_query *query = soft_container(timer, struct soft_cm_sidr_query, again);

	if (soft_now() >= query->deadline)
		unanswered(query->id, -ETIMEDOUT, NULL);
	else
		send_request(query);
}

static void established(struct soft_cm_id *id, const struct soft_sidr_message *answer)
{
	struct soft_cm_destination there = {.qpn = answer->qpn,
					    .qkey = answer->qkey,
					    .private_data = answer->private_data,
					    .private_data_len = answer->private_data_len};

	soft_cm_fill_vector(id, &there.vector);
	soft_cm_sidr_request_end(id);
	id->state = SOFT_CM_CONNECTED;
	soft_cm_report_datagrams(id, id, RDMA_CM_EVENT_ESTABLISHED, 0, &there);
}

/* False: the request is gone. */
static bool take(struct soft_cm_sidr_query *query, const struct soft_sidr_message *message)
{
	if (message->number != query->number || message->type == SOFT_SIDR_REQ)
		return true;
	if (message->type == SOFT_SIDR_WAIT) {
		if (!query->heard)
			query->deadline =
				soft_now() + soft_cm_limits.service_ms * UINT64_C(1000000);
		query->heard = true;
		query->pause_ns = LONGEST_PAUSE_NS;
		return true;
	}
	if (message->status == SOFT_SIDR_VALID)
		established(query->id, message);
	else
		unanswered(query->id, message->status, message->private_data);
	return false;
}

static void ready(struct soft_fd_watch *watch, uint32_t events)
{
	static const uint8_t nothing[SOFT_SIDR_REP_PRIVATE];
	struct soft_cm_sidr_query *query = soft_container(watch, struct soft_cm_sidr_query, watch);

	(void)events;
	for (;;) {
		uint8_t bytes[SOFT_SIDR_MAX + 1]; /* one more: a longer one is none of ours */
		struct soft_sidr_message message;
		ssize_t got = recv(watch->fd, bytes, sizeof(bytes), MSG_DONTWAIT);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EAGAIN)
			return;
		if (got < 0 && errno == ECONNREFUSED && soft_now() < query->insists_until) {
			query->pause_ns = FIRST_PAUSE_NS;
			soft_timer_start(&query->again, soft_now() + SOFT_CM_AGAIN_NS);
			continue;
		}
		if (got < 0 && errno == ECONNREFUSED) {
			unanswered(query->id, SOFT_SIDR_NO_SERVICE, nothing);
			return;
		}
		if (got < 0) {
			unanswered(query->id, -errno, NULL);
			return;
		}
		if (!soft_sidr_decode(bytes, (size_t)got, &message) && !take(query, &message))
			return;
	}
}

/* The socket is connected, so that only the service's port is heard, and its host's "no". */
static int start(struct soft_cm_id *id, struct soft_cm_sidr_query *query)
{
	const struct sockaddr *to = &id->id.route.addr.dst_addr;
	int error;

	if (connect(id->sock, to, soft_cm_address_length(to)))
		return errno;
	query->watch.fd = id->sock;
	query->watch.ready = ready;
	query->again.expired = resend;
	query->id = id;
	error = soft_watch(&query->watch, EPOLLIN);
	if (error)
		return error;
	id->query = query;
	id->sock = -1;
	id->state = SOFT_CM_CONNECTING;
	soft_cm_id_waits(id, true);
	query->deadline = soft_now() + soft_cm_limits.response_ms * UINT64_C(1000000);
	query->insists_until = soft_now() + soft_cm_limits.refused_ms * UINT64_C(1000000);
	query->pause_ns = FIRST_PAUSE_NS;
	send_request(query);
	return 0;
}

int soft_cm_sidr_request(struct soft_cm_id *id, const struct rdma_conn_param *parameters)
{
	struct soft_sidr_message message = {.type = SOFT_SIDR_REQ};
	struct soft_cm_sidr_query *query;
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_CONNECT);

	if (error)
		return error;
	if (parameters && parameters->private_data) {
		if (parameters->private_data_len > SOFT_SIDR_REQ_PRIVATE)
			return EINVAL;
		message.private_data_len = parameters->private_data_len;
		memcpy(message.private_data, parameters->private_data, message.private_data_len);
	}
	if (getrandom(&message.number, sizeof(message.number), 0) != sizeof(message.number))
		return EAGAIN;
	query = calloc(1, sizeof(*query));
	if (!query)
		return ENOMEM;
	query->number = message.number;
	query->length = soft_sidr_encode(&message, query->bytes);
	error = start(id, query);
	if (error)
		free(query);
	return error;
}
