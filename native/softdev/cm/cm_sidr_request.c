/* rdma_connect(3) of a datagram service: repeats its request until there is an answer.
 *
 * The same times as for connections: the other side's connection manager must answer within
 * soft_cm_limits.response_ms, its application has soft_cm_limits.service_ms from then on.
 * A port where no service is is refused by the host itself (ICMP).  When that has been so for
 * soft_cm_limits.refused_ms, it is reported as the status that an InfiniBand host answers with
 * (rdma_get_cm_event(3), RDMA_CM_EVENT_UNREACHABLE).
 */
#include "cm_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/random.h>

#include "objects/objects.h"

#define FIRST_PAUSE_NS UINT64_C(50000000)
#define LONGEST_PAUSE_NS UINT64_C(1000000000)

/* The request of an id, until it is answered. */
struct soft_cm_sidr_query {
	struct soft_fd_watch watch; /* the id's socket, connected to the service's port */
	struct soft_timer again;
	struct soft_cm_id *id;
	uint64_t deadline;
	uint64_t insists_until; /* as soft_cm_link_insist */
	uint64_t pause_ns; /* until it is repeated; doubles */
	uint64_t number;
	bool heard;
	size_t length;
	uint8_t bytes[SOFT_CM_MESSAGE_MAX];
};

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
	soft_cm_report_ud(id, RDMA_CM_EVENT_UNREACHABLE, status,
			  &(struct rdma_ud_param){
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

static void established(struct soft_cm_id *id, const struct soft_cm_message *answer)
{
	struct rdma_ud_param there = {.qp_num = answer->qpn,
				      .qkey = answer->qkey,
				      .private_data = answer->private_data,
				      .private_data_len = answer->private_data_len};

	soft_cm_fill_vector(id, &there.ah_attr);
	soft_cm_sidr_request_end(id);
	id->state = SOFT_CM_CONNECTED;
	soft_cm_report_ud(id, RDMA_CM_EVENT_ESTABLISHED, 0, &there);
}

/* False: the request is gone. */
static bool take(struct soft_cm_sidr_query *query, const struct soft_cm_message *message)
{
	if (message->number != query->number || message->type == SOFT_SIDR_REQ)
		return true;
	if (message->type == SOFT_SIDR_WAIT) {
		if (!query->heard)
			query->deadline = soft_cm_in(soft_cm_limits.service_ms);
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
		uint8_t bytes[SOFT_CM_MESSAGE_MAX];
		struct soft_cm_message message;
		ssize_t got = recv(watch->fd, bytes, sizeof(bytes), MSG_DONTWAIT);
		int error = got < 0 ? errno : 0;

		if (error == EAGAIN)
			return;
		if (error == ECONNREFUSED && soft_now() < query->insists_until) {
			query->pause_ns = FIRST_PAUSE_NS;
			soft_timer_start(&query->again, soft_now() + SOFT_CM_AGAIN_NS);
		} else if (error == ECONNREFUSED) {
			unanswered(query->id, SOFT_SIDR_NO_SERVICE, nothing);
			return;
		} else if (error && error != EINTR) {
			unanswered(query->id, -error, NULL);
			return;
		} else if (!error && soft_cm_decode_datagram(bytes, (size_t)got, &message) &&
			   !take(query, &message)) {
			return;
		}
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
	query->deadline = soft_cm_in(soft_cm_limits.response_ms);
	query->insists_until = soft_cm_in(soft_cm_limits.refused_ms);
	query->pause_ns = FIRST_PAUSE_NS;
	send_request(query);
	return 0;
}

int soft_cm_sidr_request(struct soft_cm_id *id, const struct rdma_conn_param *parameters)
{
	struct soft_cm_message message = {.type = SOFT_SIDR_REQ};
	struct soft_cm_sidr_query *query;
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_CONNECT);

	if (error)
		return error;
	if (parameters &&
	    !soft_cm_put_private(&message, parameters->private_data, parameters->private_data_len))
		return EINVAL;
	if (getrandom(&message.number, sizeof(message.number), 0) != sizeof(message.number))
		return EAGAIN;
	query = calloc(1, sizeof(*query));
	if (!query)
		return ENOMEM;
	query->number = message.number;
	query->length = soft_cm_encode(&message, query->bytes);
	error = start(id, query);
	if (error)
		free(query);
	return error;
}
