/* rdma_connect(3) of a datagram service: asks until there is an answer.
 *
 * The same times as for connections: the other side's connection manager must say a first word
 * within soft_cm_limits.response_ms, its application has soft_cm_limits.service_ms from then on.
 * A port where no service is is refused by the host itself (ICMP).  When that has been so for
 * soft_cm_limits.refused_ms, it is reported as the status with which an InfiniBand host says so
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
	struct soft_cm_sidr_query *question = id->question;

	if (!question)
		return;
	id->question = NULL;
	id->sock = question->source.fd; /* its port is the id's until that is destroyed */
	soft_unwatch(&question->source);
	soft_timer_stop(&question->again);
	free(question);
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

static void say(struct soft_cm_sidr_query *question)
{
	/* A datagram that is not sent now goes out next time; a missing service shows when reading.
	 */
	(void)send(question->source.fd, question->bytes, question->length,
		   MSG_NOSIGNAL | MSG_DONTWAIT);
	soft_timer_start(&question->again, soft_now() + question->pause_ns);
	question->pause_ns *= 2;
	if (question->pause_ns > LONGEST_PAUSE_NS)
		question->pause_ns = LONGEST_PAUSE_NS;
}

static void say_again(struct soft_timer *timer)
{
	struct soft_cm_sidr_query *question =
		soft_container(timer, struct soft_cm_sidr_query, again);

	if (soft_now() >= question->deadline)
		unanswered(question->id, -ETIMEDOUT, NULL);
	else
		say(question);
}

static void established(struct soft_cm_id *id, const struct soft_sidr_message *answer)
{
	struct soft_cm_destination there = {.qpn = answer->qpn,
					    .qkey = answer->qkey,
					    .private_data = answer->private_data,
					    .private_data_len = answer->private_data_len};

	soft_cm_fill_vector(id, &there.vector);
	there.vector.dlid = answer->lid;
	soft_cm_sidr_request_end(id);
	id->state = SOFT_CM_CONNECTED;
	soft_cm_report_datagrams(id, id, RDMA_CM_EVENT_ESTABLISHED, 0, &there);
}

/* False: the question is gone. */
static bool take(struct soft_cm_sidr_query *question, const struct soft_sidr_message *message)
{
	if (message->number != question->number || message->type == SOFT_SIDR_REQ)
		return true;
	if (message->type == SOFT_SIDR_WAIT) {
		if (!question->heard)
			question->deadline =
				soft_now() + soft_cm_limits.service_ms * UINT64_C(1000000);
		question->heard = true;
		question->pause_ns = LONGEST_PAUSE_NS;
		return true;
	}
	if (message->status == SOFT_SIDR_VALID)
		established(question->id, message);
	else
		unanswered(question->id, message->status, message->private_data);
	return false;
}

static void ready(struct soft_fd_watch *source, uint32_t events)
{
	static const uint8_t nothing[SOFT_SIDR_REP_PRIVATE];
	struct soft_cm_sidr_query *question =
		soft_container(source, struct soft_cm_sidr_query, source);

	(void)events;
	for (;;) {
		uint8_t bytes[SOFT_SIDR_MAX + 1]; /* one more: a longer one is none of ours */
		struct soft_sidr_message message;
		ssize_t got = recv(source->fd, bytes, sizeof(bytes), MSG_DONTWAIT);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EAGAIN)
			return;
		if (got < 0 && errno == ECONNREFUSED && soft_now() < question->insists_until) {
			question->pause_ns = FIRST_PAUSE_NS;
			soft_timer_start(&question->again, soft_now() + SOFT_CM_AGAIN_NS);
			continue;
		}
		if (got < 0 && errno == ECONNREFUSED) {
			unanswered(question->id, SOFT_SIDR_NO_SERVICE, nothing);
			return;
		}
		if (got < 0) {
			unanswered(question->id, -errno, NULL);
			return;
		}
		if (!soft_sidr_decode(bytes, (size_t)got, &message) && !take(question, &message))
			return;
	}
}

/* The socket is connected, so that only the service's port is heard, and its host's "no". */
static int ask(struct soft_cm_id *id, struct soft_cm_sidr_query *question)
{
	const struct sockaddr *to = &id->id.route.addr.dst_addr;
	int error;

	if (connect(id->sock, to, soft_cm_address_length(to)))
		return errno;
	question->source.fd = id->sock;
	question->source.ready = ready;
	question->again.expired = say_again;
	question->id = id;
	error = soft_watch(&question->source, EPOLLIN);
	if (error)
		return error;
	id->question = question;
	id->sock = -1;
	id->state = SOFT_CM_CONNECTING;
	soft_cm_id_waits(id, true);
	question->deadline = soft_now() + soft_cm_limits.response_ms * UINT64_C(1000000);
	question->insists_until = soft_now() + soft_cm_limits.refused_ms * UINT64_C(1000000);
	question->pause_ns = FIRST_PAUSE_NS;
	say(question);
	return 0;
}

int soft_cm_sidr_request(struct soft_cm_id *id, const struct rdma_conn_param *parameters)
{
	struct soft_sidr_message message = {.type = SOFT_SIDR_REQ};
	struct soft_cm_sidr_query *question;
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
	question = calloc(1, sizeof(*question));
	if (!question)
		return ENOMEM;
	question->number = message.number;
	question->length = soft_sidr_encode(&message, question->bytes);
	error = ask(id, question);
	if (error)
		free(question);
	return error;
}
