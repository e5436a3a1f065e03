/* Datagram services: receives requests, implements rdma_accept(3) and rdma_reject(3) for them, and
 * provides the carrier that sends the responses over UDP.
 *
 * An RDMA_PS_UDP port is a UDP port of the host. A client repeats a request if the response is lost
 * or late. A repeated request is recognised by its number and gets the same response, even for a
 * while after its id has been destroyed (cm_link.c). A request that cannot be queued is dropped,
 * because the client will repeat it.
 */
#define _GNU_SOURCE /* struct in6_pktinfo */
#include "cm_internal.h"

#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include "ud/ud.h"

enum { REQUESTS_PER_STEP = 64 };

/* A service's socket. It stays open until the listener is closed and every request has a
 * response. */
struct service {
	struct soft_cm_listener listener;
	struct soft_fd_watch watch;
	bool has_listener;
	struct soft_node requests;
};

struct server_request {
	struct soft_cm_link link;
	struct soft_node node; /* node in service.requests */
	struct service *service; /* NULL once the service has been freed */
	uint64_t number;
	struct sockaddr_storage address;
	struct sockaddr_storage local; /* destination address of the request */
	unsigned interface; /* network interface that received the request */
};

static struct server_request *server_request_of(const struct soft_cm_link *link)
{
	return soft_container(link, struct server_request, link);
}

static bool is_answered(const struct server_request *server_request)
{
	return server_request->link.last_sent.type == SOFT_SIDR_REP;
}

/* A buffer for the control message that contains the local address (IP_PKTINFO or IPV6_PKTINFO). */
union control {
	struct cmsghdr align;
	uint8_t room[CMSG_SPACE(sizeof(struct in6_pktinfo))];
};

/* Free the service if its listener is closed and every request has a response. The requests may
 * linger for longer, but then they cannot repeat their responses. */
static void free_if_unused(struct service *service)
{
	if (service->has_listener)
		return;
	soft_list_each (struct server_request, server_request, &service->requests, node)
		if (!is_answered(server_request))
			return;
	soft_list_drain (struct server_request, server_request, &service->requests, node) {
		soft_list_remove(&server_request->node);
		server_request->service = NULL;
	}
	close(service->watch.fd);
	free(service);
}

/* ---- datagrams ----------------------------------------------------------------------------- */

static int send_message(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	struct server_request *server_request = server_request_of(link);
	struct soft_cm_message copy = *message;
	uint8_t bytes[SOFT_MAD_SIZE];
	struct iovec iov = {.iov_base = bytes, .iov_len = sizeof(bytes)};
	union control control = {0};
	struct msghdr header = {.msg_name = &server_request->address,
				.msg_iov = &iov,
				.msg_iovlen = 1,
				.msg_control = &control};
	union ibv_gid source;

	/* The service has been freed, so a lingering request cannot repeat its response. */
	if (!server_request->service)
		return 0;
	copy.number = server_request->number;
	soft_cm_encode(&copy, bytes);
	header.msg_namelen =
		soft_cm_address_length((const struct sockaddr *)&server_request->address);
	/* Send from the address that received the request, because the requester's connected socket
	 * drops datagrams from any other address. */
	soft_gid_from_sockaddr(&source, (const struct sockaddr *)&server_request->local);
	soft_put_source(&header, server_request->local.ss_family == AF_INET, &source,
			server_request->interface);
	(void)sendmsg(server_request->service->watch.fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
	free_if_unused(server_request->service);
	return 0;
}

/* Store the request's destination address and the service's port in server_request->local. */
static void set_local_address(struct service *service, struct msghdr *header,
			      struct server_request *server_request)
{
	server_request->local = service->listener.id->id.route.addr.src_storage;
	for (struct cmsghdr *info = CMSG_FIRSTHDR(header); info; info = CMSG_NXTHDR(header, info)) {
		if (info->cmsg_level == IPPROTO_IP && info->cmsg_type == IP_PKTINFO) {
			struct in_pktinfo v4;

			memcpy(&v4, CMSG_DATA(info), sizeof(v4));
			((struct sockaddr_in *)(void *)&server_request->local)->sin_addr =
				v4.ipi_addr;
		} else if (info->cmsg_level == IPPROTO_IPV6 && info->cmsg_type == IPV6_PKTINFO) {
			struct in6_pktinfo v6;

			memcpy(&v6, CMSG_DATA(info), sizeof(v6));
			((struct sockaddr_in6 *)(void *)&server_request->local)->sin6_addr =
				v6.ipi6_addr;
			server_request->interface = v6.ipi6_ifindex;
		}
	}
}

/* Receive a request and its source address. Returns 0, EAGAIN if there is nothing to read, or
 * EPROTO if the datagram is not a request. */
static int receive(struct service *service, struct server_request *server_request,
		   struct soft_cm_message *message)
{
	uint8_t bytes[SOFT_MAD_SIZE + 1]; /* a longer datagram is not a request */
	struct iovec iov = {.iov_base = bytes, .iov_len = sizeof(bytes)};
	union control control = {0};
	struct msghdr header = {.msg_name = &server_request->address,
				.msg_namelen = sizeof(server_request->address),
				.msg_iov = &iov,
				.msg_iovlen = 1,
				.msg_control = &control,
				.msg_controllen = sizeof(control)};
	ssize_t got = recvmsg(service->watch.fd, &header, MSG_DONTWAIT);

	if (got < 0)
		return EAGAIN; /* or a transient socket error */
	if (got != SOFT_MAD_SIZE || soft_cm_decode(bytes, (size_t)got, message) ||
	    message->type != SOFT_SIDR_REQ)
		return EPROTO;
	server_request->number = message->number;
	set_local_address(service, &header, server_request);
	return 0;
}

/* Returns the service's earlier request of which this one is a repetition, or NULL. */
static struct server_request *find_request(struct service *service,
					   const struct server_request *server_request)
{
	soft_list_each (struct server_request, other, &service->requests, node)
		if (other->number == server_request->number &&
		    !memcmp(&other->address, &server_request->address,
			    sizeof(server_request->address)))
			return other;
	return NULL;
}

static void handle_request(struct service *service, const struct server_request *received,
			   const struct soft_cm_message *message)
{
	struct server_request *server_request = find_request(service, received);

	if (server_request) {
		(void)soft_cm_link_received(&server_request->link, message);
		return;
	}
	server_request = malloc(sizeof(*server_request));
	if (!server_request)
		return; /* the request will be repeated */
	*server_request = *received;
	server_request->service = service;
	soft_cm_link_init(&server_request->link, &soft_cm_sidr_server);
	soft_list_append(&service->requests, &server_request->node);
	(void)soft_cm_sidr_request_received(&service->listener, &server_request->link, message);
}

static void ready(struct soft_fd_watch *watch)
{
	struct service *service = soft_container(watch, struct service, watch);

	for (int i = 0; i < REQUESTS_PER_STEP; i++) {
		struct server_request server_request = {0};
		struct soft_cm_message message;
		int error = receive(service, &server_request, &message);

		if (error == EAGAIN)
			return;
		if (!error)
			handle_request(service, &server_request, &message);
	}
}

static void end(struct soft_cm_link *link)
{
	struct server_request *server_request = server_request_of(link);

	soft_cm_link_stop(link);
	soft_list_remove(&server_request->node);
	free(server_request);
}

/* ---- requests and responses --------------------------------------------------------------- */

/* Create an id for the request and report the request. Returns false if there is not enough memory,
 * or if the device that received the request has been removed. */
static bool report(struct soft_cm_id *listener, struct soft_cm_link *link,
		   const struct soft_cm_message *message)
{
	struct sockaddr_storage local = {0}, peer = {0};

	link->carrier->get_addresses(link, &local, &peer);
	struct soft_cm_id *id = soft_cm_device_error((const struct sockaddr *)&local)
					? NULL
					: soft_cm_request_new(listener);

	if (!id || soft_cm_report_request(listener, id, message)) {
		free(id);
		return false;
	}
	listener->undelivered++;
	id->link = link;
	soft_cm_update_addresses(id);
	soft_cm_request_join(id);
	return true;
}

bool soft_cm_sidr_request_received(struct soft_cm_listener *listener, struct soft_cm_link *link,
				   const struct soft_cm_message *request)
{
	bool reported = listener->id->undelivered < listener->id->backlog &&
			report(listener->id, link, request);

	link->highest_received = request->type;
	if (!reported)
		link->carrier->end(link);
	return reported;
}

int soft_cm_service_accept(struct soft_cm_id *id, const struct rdma_conn_param *parameters)
{
	struct soft_cm_message message = {
		.type = SOFT_SIDR_REP, .port_space = (uint16_t)id->id.ps, .qkey = RDMA_UDP_QKEY};
	const struct ibv_qp *qp = soft_cm_qp(id);
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_ACCEPT);

	if (!error && !qp && (!parameters || parameters->qp_num > SOFT_PSN_MASK))
		error = EINVAL;
	if (!error && parameters &&
	    !soft_cm_put_private(&message, parameters->private_data, parameters->private_data_len))
		error = EINVAL;
	if (error)
		return error;
	message.qpn = qp ? qp->qp_num : parameters->qp_num;
	id->unaccepted = false;
	id->state = SOFT_CM_CONNECTED;
	return soft_cm_link_send(id->link, &message);
}

int soft_cm_service_reject(struct soft_cm_id *id, const void *private_data, uint8_t length)
{
	struct soft_cm_message message = {.type = SOFT_SIDR_REP,
					  .port_space = (uint16_t)id->id.ps,
					  .status = SOFT_SIDR_REJECTED};

	/* Unlike a connection (cm_states.c), a datagram request cannot be rejected after it has
	 * been accepted, because its only response has already been sent. */
	if (id->state != SOFT_CM_REQUESTED || !soft_cm_put_private(&message, private_data, length))
		return EINVAL;
	id->state = SOFT_CM_FAILED;
	return soft_cm_link_send(id->link, &message);
}

/* ---- opening and closing ------------------------------------------------------------------- */

static void get_addresses(const struct soft_cm_link *link, struct sockaddr_storage *local,
			  struct sockaddr_storage *peer)
{
	*local = server_request_of(link)->local;
	*peer = server_request_of(link)->address;
}

/* Create a service that receives requests on the socket of the listening id. */
static struct soft_cm_listener *start(struct soft_cm_id *id, int *error)
{
	struct service *service = calloc(1, sizeof(*service));
	bool v4 = id->id.route.addr.src_addr.sa_family == AF_INET;

	*error = ENOMEM;
	if (!service)
		return NULL;
	service->watch.fd = id->sock;
	service->watch.ready = ready;
	service->has_listener = true;
	soft_list_init(&service->requests);
	/* Get the destination address of each request, from which the response must be sent. */
	*error = soft_set_option(id->sock, v4 ? IPPROTO_IP : IPPROTO_IPV6,
				 v4 ? IP_PKTINFO : IPV6_RECVPKTINFO, 1);
	if (!*error)
		*error = soft_watch(&service->watch, EPOLLIN);
	if (*error) {
		free(service);
		return NULL;
	}
	id->sock = -1; /* owned by the service now */
	return &service->listener;
}

static void stop(struct soft_cm_listener *listener)
{
	struct service *service = soft_container(listener, struct service, listener);

	soft_unwatch(&service->watch);
	service->has_listener = false;
	free_if_unused(service);
}

const struct soft_cm_carrier soft_cm_sidr_server = {
	.is_lossy = true,
	.listen = start,
	.unlisten = stop,
	.send = send_message,
	.end = end,
	.get_addresses = get_addresses,
};
