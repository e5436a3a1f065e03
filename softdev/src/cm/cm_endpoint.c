/* Synchronous endpoints: rdma_create_ep(3), rdma_get_request(3), rdma_destroy_ep(3). */
#include "cm_internal.h"

enum { RESOLVE_MS = 2000 };

int soft_cm_wait_if_synchronous(struct soft_cm_id *id)
{
	const struct rdma_cm_event *event;

	if (!id->synchronous)
		return 0;
	soft_cm_ack_event(id); /* the event of the previous call */
	if (soft_rdma_get_cm_event(id->id.channel, &id->id.event))
		return -1;
	event = id->id.event;
	if (!event->status)
		return 0;
	if (event->event == RDMA_CM_EVENT_REJECTED)
		return soft_cm_fail(ECONNREFUSED);
	return soft_cm_fail(event->status < 0 ? -event->status : event->status);
}

static int make_active(struct rdma_cm_id *id, struct rdma_addrinfo *res, struct ibv_pd *pd,
		       struct ibv_qp_init_attr *attr)
{
	if (soft_rdma_resolve_addr(id, res->ai_src_addr, res->ai_dst_addr, RESOLVE_MS) ||
	    soft_rdma_resolve_route(id, RESOLVE_MS))
		return -1;
	if (!attr)
		return 0;
	attr->qp_type = (enum ibv_qp_type)res->ai_qp_type;
	return soft_rdma_create_qp(id, pd, attr);
}

/* Bind the id to the address to listen on. Keep the attributes with which rdma_get_request(3) is to
 * create the queue pairs of requests. */
static int make_passive(struct rdma_cm_id *id, struct rdma_addrinfo *res, struct ibv_pd *pd,
			const struct ibv_qp_init_attr *attr)
{
	struct soft_cm_id *listener = soft_cm_id_of(id);

	if (soft_rdma_bind_addr(id, res->ai_src_addr))
		return -1;
	if (!attr)
		return 0;
	listener->request_attr = malloc(sizeof(*listener->request_attr));
	if (!listener->request_attr)
		return soft_cm_fail(ENOMEM);
	*listener->request_attr = *attr;
	listener->request_attr->qp_type = (enum ibv_qp_type)res->ai_qp_type;
	listener->request_pd = pd;
	return 0;
}

int soft_rdma_create_ep(struct rdma_cm_id **id, struct rdma_addrinfo *res, struct ibv_pd *pd,
			struct ibv_qp_init_attr *qp_init_attr)
{
	struct rdma_cm_id *made;
	int rc, error;

	if (!id || !res)
		return soft_cm_fail(EINVAL);
	if (soft_rdma_create_id(NULL, &made, NULL, (enum rdma_port_space)res->ai_port_space))
		return -1;
	if (res->ai_flags & RAI_PASSIVE)
		rc = make_passive(made, res, pd, qp_init_attr);
	else
		rc = make_active(made, res, pd, qp_init_attr);
	if (rc) {
		error = errno;
		soft_rdma_destroy_ep(made);
		return soft_cm_fail(error);
	}
	*id = made;
	return 0;
}

void soft_rdma_destroy_ep(struct rdma_cm_id *id)
{
	if (!id)
		return;
	if (id->qp)
		soft_rdma_destroy_qp(id);
	if (id->srq)
		soft_rdma_destroy_srq(id);
	(void)soft_rdma_destroy_id(id);
}

/* Wait for a request and return its id. Like the listener, this id is synchronous and has its own
 * event channel. */
int soft_rdma_get_request(struct rdma_cm_id *listen, struct rdma_cm_id **id)
{
	struct soft_cm_id *listener;
	struct rdma_cm_event *event;
	struct rdma_cm_id *request;
	int error;

	if (!listen || !id)
		return soft_cm_fail(EINVAL);
	listener = soft_cm_id_of(listen);
	if (!listener->synchronous || listener->state != SOFT_CM_LISTENING)
		return soft_cm_fail(EINVAL);
	soft_cm_ack_event(listener);
	if (soft_rdma_get_cm_event(listen->channel, &event))
		return -1;
	if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST) {
		error = event->status < 0 ? -event->status : EINVAL;
		soft_rdma_ack_cm_event(event);
		return soft_cm_fail(error);
	}
	request = event->id;
	if (listener->request_attr) {
		struct ibv_qp_init_attr attr = *listener->request_attr;

		if (soft_rdma_create_qp(request, listener->request_pd, &attr)) {
			error = errno;
			soft_rdma_ack_cm_event(event);
			(void)soft_rdma_destroy_id(request);
			return soft_cm_fail(error);
		}
	}
	request->event = event;
	*id = request;
	return 0;
}
