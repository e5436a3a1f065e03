/* Services: listening for requests for a datagram service: rdma_listen(3), and rdma_accept(3) and
 * rdma_reject(3) of their requests.
 *
 * A port of RDMA_PS_UDP is a UDP port of the host.  A request that is repeated, because its
 * answer was lost or is late, is known by its number and gets the same answer; when its id is gone
 * it is a new one.  A request without room is answered by WAIT, and comes again.
 */
#define _GNU_SOURCE /* struct in6_pktinfo */
#include "cm_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include "objects/objects.h"

enum {
	REQUESTS_PER_STEP = 64
};

/* A service's socket; it is there as long as the listener, or a request that waits for its answer. */
struct soft_cm_service {
	struct soft_fd_watch watch;
	struct soft_cm_id *id; /* NULL when the listener is gone */
	struct soft_node callers;
	unsigned open; /* requests without an answer */
	unsigned untaken;
	unsigned backlog;
};

/* A received request, kept in order to be answered. */
struct soft_cm_sidr_client {
	struct soft_node node; /* of the service: all requests whose id is there */
	struct soft_cm_service *service; /* NULL: answered, and the listener is gone */
	bool answered;
	uint64_t number;
	struct sockaddr_storage address;
	struct sockaddr_storage local; /* where the request came to */
	unsigned interface; /* and through which network interface (IPv6) */
	size_t length; /* of the answer */
	uint8_t bytes[SOFT_CM_MESSAGE_MAX];
};

/* Room for the control message (IP_PKTINFO) with the host's own address. */
union control {
	struct cmsghdr align;
	uint8_t room[CMSG_SPACE(sizeof(struct in6_pktinfo))];
};

static void free_if_unused(struct soft_cm_service *service)
{
	if (service->id || service->open)
		return;
	while (!soft_list_empty(&service->callers)) {
		struct soft_cm_sidr_client *client =
			soft_list_entry(service->callers.next, struct soft_cm_sidr_client, node);

		soft_list_remove(&client->node);
		client->service = NULL;
	}
	close(service->watch.fd);
	free(service);
}

/* ---- datagrams ----------------------------------------------------------------------------- */

static void send_to(struct soft_cm_service *service, const struct soft_cm_sidr_client *client,
		    const void *bytes, size_t length)
{
	struct iovec iov = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = length};
	union control control = {0};
	struct msghdr header = {.msg_name = (void *)(uintptr_t)&client->address,
				.msg_iov = &iov,
				.msg_iovlen = 1,
				.msg_control = &control};
	struct cmsghdr *info = &control.align;
	bool v4 = client->local.ss_family == AF_INET;
	const struct sockaddr_in *local_v4 = (const void *)&client->local;
	const struct sockaddr_in6 *local_v6 = (const void *)&client->local;
	struct in_pktinfo from_v4 = {.ipi_spec_dst = local_v4->sin_addr};
	struct in6_pktinfo from_v6 = {.ipi6_addr = local_v6->sin6_addr,
				      .ipi6_ifindex = client->interface};
	size_t size = v4 ? sizeof(from_v4) : sizeof(from_v6);

	header.msg_namelen = soft_cm_address_length((const struct sockaddr *)&client->address);
	/* From the address that the request went to: its sender accepts no other. */
	info->cmsg_level = v4 ? IPPROTO_IP : IPPROTO_IPV6;
	info->cmsg_type = v4 ? IP_PKTINFO : IPV6_PKTINFO;
	info->cmsg_len = CMSG_LEN(size);
	memcpy(CMSG_DATA(info), v4 ? (void *)&from_v4 : &from_v6, size);
	header.msg_controllen = CMSG_SPACE(size);
	(void)sendmsg(service->watch.fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void tell_to_wait(struct soft_cm_service *service, const struct soft_cm_sidr_client *client)
{
	const struct soft_cm_message wait = {.type = SOFT_SIDR_WAIT, .number = client->number};
	uint8_t bytes[SOFT_CM_MESSAGE_MAX];

	send_to(service, client, bytes, soft_cm_encode(&wait, bytes));
}

/* Where it came to, with the service's port. */
static void take_local(struct soft_cm_service *service, struct msghdr *header,
		       struct soft_cm_sidr_client *client)
{
	client->local = service->id->id.route.addr.src_storage;
	for (struct cmsghdr *info = CMSG_FIRSTHDR(header); info; info = CMSG_NXTHDR(header, info)) {
		if (info->cmsg_level == IPPROTO_IP && info->cmsg_type == IP_PKTINFO) {
			struct in_pktinfo v4;

			memcpy(&v4, CMSG_DATA(info), sizeof(v4));
			((struct sockaddr_in *)(void *)&client->local)->sin_addr = v4.ipi_addr;
		} else if (info->cmsg_level == IPPROTO_IPV6 && info->cmsg_type == IPV6_PKTINFO) {
			struct in6_pktinfo v6;

			memcpy(&v6, CMSG_DATA(info), sizeof(v6));
			((struct sockaddr_in6 *)(void *)&client->local)->sin6_addr = v6.ipi6_addr;
			client->interface = v6.ipi6_ifindex;
		}
	}
}

/* A request and its sender; 0, EAGAIN, or EPROTO for something else. */
static int receive(struct soft_cm_service *service, struct soft_cm_sidr_client *client,
		   struct soft_cm_message *message)
{
	uint8_t bytes[SOFT_CM_MESSAGE_MAX];
	struct iovec iov = {.iov_base = bytes, .iov_len = sizeof(bytes)};
	union control control = {0};
	struct msghdr header = {.msg_name = &client->address,
				.msg_namelen = sizeof(client->address),
				.msg_iov = &iov,
				.msg_iovlen = 1,
				.msg_control = &control,
				.msg_controllen = sizeof(control)};
	ssize_t got = recvmsg(service->watch.fd, &header, MSG_DONTWAIT);

	if (got < 0)
		return EAGAIN; /* or an error of the socket, which passes */
	if (!soft_cm_decode_datagram(bytes, (size_t)got, message) || message->type != SOFT_SIDR_REQ)
		return EPROTO;
	client->number = message->number;
	take_local(service, &header, client);
	return 0;
}

/* ---- requests ------------------------------------------------------------------------------ */

static struct soft_cm_sidr_client *known(struct soft_cm_service *service,
					 const struct soft_cm_sidr_client *client)
{
	struct soft_node *node = service->callers.next;

	for (; node != &service->callers; node = node->next) {
		struct soft_cm_sidr_client *other =
			soft_list_entry(node, struct soft_cm_sidr_client, node);

		if (other->number == client->number &&
		    !memcmp(&other->address, &client->address, sizeof(client->address)))
			return other;
	}
	return NULL;
}

static int report(struct soft_cm_service *service, const struct soft_cm_sidr_client *from,
		  const struct soft_cm_message *message)
{
	const struct rdma_ud_param said = {.private_data = message->private_data,
					   .private_data_len = message->private_data_len};
	struct soft_cm_id *id = soft_cm_request_new(service->id);
	struct soft_cm_sidr_client *client = id ? malloc(sizeof(*client)) : NULL;

	if (!client || soft_cm_report_request(service->id, id, NULL, &said)) {
		free(client);
		free(id);
		return ENOMEM;
	}
	*client = *from;
	soft_list_append(&service->callers, &client->node);
	client->service = service;
	service->open++;
	service->untaken++;
	id->client = client;
	soft_cm_set_addresses(id, &client->local, &client->address);
	soft_cm_request_join(id);
	return 0;
}

static void take_request(struct soft_cm_service *service, const struct soft_cm_sidr_client *from,
			 const struct soft_cm_message *message)
{
	const struct soft_cm_sidr_client *client = known(service, from);

	if (client && client->answered) {
		send_to(service, client, client->bytes, client->length);
		return;
	}
	if (client || service->untaken >= service->backlog || !report(service, from, message))
		tell_to_wait(service, from);
}

static void ready(struct soft_fd_watch *watch, uint32_t events)
{
	struct soft_cm_service *service = soft_container(watch, struct soft_cm_service, watch);

	(void)events;
	for (int i = 0; i < REQUESTS_PER_STEP; i++) {
		struct soft_cm_sidr_client client = {0};
		struct soft_cm_message message;
		int error = receive(service, &client, &message);

		if (error == EAGAIN)
			return;
		if (!error)
			take_request(service, &client, &message);
	}
}

/* ---- answers ------------------------------------------------------------------------------- */

static void answer(struct soft_cm_sidr_client *client, struct soft_cm_message *message)
{
	struct soft_cm_service *service = client->service;

	message->number = client->number;
	client->length = soft_cm_encode(message, client->bytes);
	client->answered = true;
	send_to(service, client, client->bytes, client->length);
	service->open--;
	free_if_unused(service);
}

int soft_cm_service_accept(struct soft_cm_id *id, const struct rdma_conn_param *parameters)
{
	struct soft_cm_message message = {.type = SOFT_SIDR_REP, .qkey = RDMA_UDP_QKEY};
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
	answer(id->client, &message);
	return 0;
}

int soft_cm_service_reject(struct soft_cm_id *id, const void *private_data, uint8_t length)
{
	struct soft_cm_message message = {.type = SOFT_SIDR_REP, .status = SOFT_SIDR_REJECTED};
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_REJECT);

	if (error)
		return error;
	if (!id->client || !soft_cm_put_private(&message, private_data, length))
		return EINVAL; /* without a client the id is one */
	id->state = SOFT_CM_FAILED;
	answer(id->client, &message);
	return 0;
}

void soft_cm_sidr_client_end(struct soft_cm_id *id)
{
	struct soft_cm_sidr_client *client = id->client;

	if (!client)
		return;
	if (!client->answered) /* IBTA 12.11: an application that does not want it has rejected it */
		answer(client, &(struct soft_cm_message){.type = SOFT_SIDR_REP,
							 .status = SOFT_SIDR_REJECTED});
	soft_list_remove(&client->node);
	free(client);
	id->client = NULL;
}

/* ---- opening and closing ------------------------------------------------------------------- */

int soft_cm_service_open(struct soft_cm_id *id, int backlog)
{
	struct soft_cm_service *service = calloc(1, sizeof(*service));
	bool v4 = id->id.route.addr.src_addr.sa_family == AF_INET;
	const int on = 1;
	int error = 0;

	if (!service)
		return ENOMEM;
	service->id = id;
	service->watch.fd = id->sock;
	service->watch.ready = ready;
	soft_list_init(&service->callers);
	service->backlog = soft_cm_backlog(backlog);
	if (setsockopt(id->sock, v4 ? IPPROTO_IP : IPPROTO_IPV6, v4 ? IP_PKTINFO : IPV6_RECVPKTINFO,
		       &on, sizeof(on)))
		error = errno;
	if (!error)
		error = soft_watch(&service->watch, EPOLLIN);
	if (error) {
		free(service);
		return error;
	}
	id->service = service;
	id->sock = -1;
	id->state = SOFT_CM_LISTENING;
	return 0;
}

void soft_cm_service_close(struct soft_cm_id *id)
{
	struct soft_cm_service *service = id->service;

	if (!service)
		return;
	id->service = NULL;
	soft_unwatch(&service->watch);
	service->id = NULL;
	free_if_unused(service);
}

void soft_cm_service_taken(struct soft_cm_id *id)
{
	if (id->service)
		id->service->untaken--;
}
