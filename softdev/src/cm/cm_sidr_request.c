/* Requests to datagram services (rdma_connect(3)), and the carrier that sends them over UDP.
 *
 * If no service uses the destination port, the destination host rejects each request with an ICMP
 * error. After soft_cm_limits.no_listener_ms, the request fails with the status that an InfiniBand
 * host would send (RDMA_CM_EVENT_UNREACHABLE in rdma_get_cm_event(3)).
 */
#include "cm_internal.h"

#include <sys/epoll.h>

enum { RESPONSES_PER_STEP = 64 };

/* An id's pending request. */
struct client_request {
	struct soft_cm_link link;
	struct soft_fd_watch watch; /* the id's socket, connected to the service's port */
};

static void end(struct soft_cm_link *link)
{
	struct client_request *client_request = soft_container(link, struct client_request, link);
	struct soft_cm_id *id = link->owner;

	id->sock = client_request->watch.fd; /* reserves the port until rdma_destroy_id */
	soft_unwatch(&client_request->watch);
	soft_cm_link_stop(link);
	free(client_request);
}

/* Fail the request. If the host has refused it by an ICMP error, report the event that a SIDR_REP
 * with status "no service" would cause, including its zero-padded private data. */
static void failed(struct soft_cm_link *link, int error)
{
	static const struct soft_cm_message no_service = {.private_data_len =
								  SOFT_SIDR_REP_PRIVATE};
	bool is_refused = error == ECONNREFUSED;

	soft_cm_failed(link->owner, RDMA_CM_EVENT_UNREACHABLE,
		       is_refused ? SOFT_SIDR_NO_SERVICE : -error, is_refused ? &no_service : NULL);
}

/* Handle SIDR_REP, the response to the request, which ends the exchange. */
static bool handle_message(struct soft_cm_link *link, const struct soft_cm_message *response)
{
	struct soft_cm_id *id = link->owner;

	if (response->status != SOFT_SIDR_VALID) {
		soft_cm_failed(id, RDMA_CM_EVENT_UNREACHABLE, response->status, response);
		return false;
	}
	soft_cm_detach(id);
	soft_cm_id_set_awaits_peer(id, false);
	id->state = SOFT_CM_CONNECTED;
	soft_cm_report(id, RDMA_CM_EVENT_ESTABLISHED, 0, response);
	return false;
}

static const struct soft_cm_link_calls calls = {.message = handle_message, .failed = failed};

/* ---- the carrier --------------------------------------------------------------------------- */

/* Send a message. Errors are ignored, because the link retransmits lost messages. If the port has
 * no service, recv() fails later. */
static int send_message(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	struct client_request *client_request = soft_container(link, struct client_request, link);
	uint8_t bytes[SOFT_MAD_SIZE];

	soft_cm_encode(message, bytes);
	(void)send(client_request->watch.fd, bytes, sizeof(bytes), MSG_NOSIGNAL | MSG_DONTWAIT);
	return 0;
}

/* Handle a received datagram. Returns false if the request may have been freed. */
static bool handle_datagram(struct soft_cm_link *link, const uint8_t *bytes, size_t length)
{
	struct soft_cm_message message;

	if (length != SOFT_MAD_SIZE || soft_cm_decode(bytes, length, &message) ||
	    message.type != SOFT_SIDR_REP || message.number != link->last_sent.number)
		return true;
	return soft_cm_link_received(link, &message);
}

static void ready(struct soft_fd_watch *watch)
{
	struct client_request *client_request = soft_container(watch, struct client_request, watch);

	for (int i = 0; i < RESPONSES_PER_STEP; i++) {
		uint8_t bytes[SOFT_MAD_SIZE + 1]; /* a longer datagram is not a response */
		ssize_t got = recv(watch->fd, bytes, sizeof(bytes), MSG_DONTWAIT);

		if (got >= 0) {
			if (!handle_datagram(&client_request->link, bytes, (size_t)got))
				return;
			continue;
		}
		if (errno == EINTR ||
		    (errno == ECONNREFUSED && soft_cm_link_retry(&client_request->link)))
			continue;
		if (errno != EAGAIN)
			soft_cm_link_failed(&client_request->link, errno);
		return;
	}
}

/* Connect the socket, so that it receives only from the service's port and reports ICMP errors from
 * the service's host. Returns NULL and sets `*error` on failure. */
static struct soft_cm_link *connect_socket(struct soft_cm_id *id, int *error)
{
	const struct sockaddr *to = &id->id.route.addr.dst_addr;
	struct client_request *client_request = calloc(1, sizeof(*client_request));

	*error = ENOMEM;
	if (!client_request)
		return NULL;
	soft_cm_link_init(&client_request->link, &soft_cm_sidr_client);
	client_request->watch.fd = id->sock;
	client_request->watch.ready = ready;
	*error = connect(id->sock, to, soft_cm_address_length(to))
			 ? errno
			 : soft_watch(&client_request->watch, EPOLLIN);
	if (!*error) {
		id->sock = -1; /* owned by the request now */
		return &client_request->link;
	}
	free(client_request);
	return NULL;
}

const struct soft_cm_carrier soft_cm_sidr_client = {
	.is_lossy = true, .connect = connect_socket, .send = send_message, .end = end};

int soft_cm_sidr_request(struct soft_cm_id *id, const struct rdma_conn_param *parameters)
{
	struct soft_cm_message message = {.type = SOFT_SIDR_REQ, .port_space = (uint16_t)id->id.ps};
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_CONNECT);

	if (error)
		return error;
	if (parameters &&
	    !soft_cm_put_private(&message, parameters->private_data, parameters->private_data_len))
		return EINVAL;
	if (soft_device.platform->random(&message.number, sizeof(message.number), 0) !=
	    sizeof(message.number))
		return EAGAIN;
	return soft_cm_link_connect(id, soft_device.cm->sidr_client, &calls, &message);
}
