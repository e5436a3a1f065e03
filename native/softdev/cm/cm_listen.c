/* Listeners: rdma_listen(3), and requests that the application has not seen.
 *
 * A request that the application's backlog has no room for gets MRA and waits; fair_share.h says which
 * one goes when there are too many.
 */
#include "cm_internal.h"

#include <errno.h>
#include <stdlib.h>

enum {
	BACKLOG_MAX = 1024, /* also for 0 and less, as the kernel's rdma_ucm has it */
};

/* A request without room in the backlog. */
struct parked {
	struct soft_place place; /* of the listener */
	struct soft_cm_link *link;
	struct soft_cm_message request;
};

static struct parked *parked_of(struct soft_place *place)
{
	return soft_container(place, struct parked, place);
}

/* The link, which is nobody's any more. */
static struct soft_cm_link *unpark(struct parked *parked)
{
	struct soft_cm_link *link = parked->link;

	soft_place_release(&parked->place);
	free(parked);
	return link;
}

/* Nothing follows a request until there has been an answer, except that the active side may withdraw
 * it. */
static void failed(struct soft_cm_link *link, int error)
{
	(void)error;
	(void)unpark(link->owner);
	link->carrier->end(link);
}

static bool message(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	(void)message;
	failed(link, EPROTO);
	return false;
}

static const struct soft_cm_link_calls calls = {.message = message, .failed = failed};

/* The request becomes an id and an event.  False: there is no link any more. */
static bool report(struct soft_cm_id *id, struct soft_cm_link *link,
		   const struct soft_cm_message *request)
{
	bool reported = !soft_cm_request(id, link, request);

	id->untaken += reported;
	return reported;
}

static bool park(struct soft_cm_listener *listener, struct soft_cm_link *link,
		 const struct soft_cm_message *request)
{
	struct parked *parked = calloc(1, sizeof(*parked));
	struct sockaddr_storage local, peer = {0};
	struct soft_place *excess;

	if (!parked) {
		soft_cm_link_refuse(link, SOFT_CM_REASON_NO_RESOURCES);
		return false;
	}
	parked->link = link;
	parked->request = *request;
	link->calls = &calls;
	link->owner = parked;
	link->carrier->who(link, &local, &peer);
	soft_places_add(&listener->parked, &parked->place, &peer);
	excess = soft_places_evicted(&listener->parked, soft_cm_half_open());
	if (excess) /* never this one */
		soft_cm_link_refuse(unpark(parked_of(excess)), SOFT_CM_REASON_NO_RESOURCES);
	return true;
}

/* IBTA 12.6.7.2: what a request can be refused for before the application sees it. */
static uint16_t objection(const struct soft_cm_listener *listener,
			  const struct soft_cm_message *request)
{
	if (request->port_space != listener->id->id.ps)
		return SOFT_CM_REASON_INVALID_SERVICE_ID;
	if (request->qp_type != IBV_QPT_RC)
		return SOFT_CM_REASON_INVALID_TRANSPORT;
	return 0;
}

bool soft_cm_asked(struct soft_cm_listener *listener, struct soft_cm_link *link,
		   const struct soft_cm_message *request)
{
	const struct soft_cm_message received = {.type = SOFT_CM_MRA};
	uint16_t reason = objection(listener, request);

	link->heard = request->type;
	if (reason) {
		soft_cm_link_refuse(link, reason);
		return false;
	}
	if (soft_cm_link_say(link, &received)) {
		link->carrier->end(link);
		return false;
	}
	if (listener->id->untaken < listener->id->backlog)
		return report(listener->id, link, request);
	return park(listener, link, request);
}

void soft_cm_listener_taken(struct soft_cm_id *id)
{
	struct soft_cm_listener *listener = id->listener;

	id->untaken--;
	while (listener && id->untaken < id->backlog && listener->parked.count) {
		struct parked *parked = parked_of(soft_places_oldest(&listener->parked));
		struct soft_cm_message request = parked->request;

		(void)report(id, unpark(parked), &request);
	}
}

/* ---- opening and closing ------------------------------------------------------------------- */

void soft_cm_listener_close(struct soft_cm_id *id)
{
	struct soft_cm_listener *listener = id->listener;

	if (!listener)
		return;
	id->listener = NULL;
	while (listener->parked.count)
		soft_cm_link_refuse(unpark(parked_of(soft_places_oldest(&listener->parked))),
				    SOFT_CM_REASON_CONSUMER);
	listener->carrier->unlisten(listener);
}

static int open_listener(struct soft_cm_id *id, int backlog)
{
	const struct soft_cm_carrier *carrier =
		soft_cm_datagrams(id) ? &soft_cm_answering : soft_device.cm->carrier;
	int error = 0;

	id->listener = carrier->listen(id, &error);
	if (!id->listener)
		return error;
	id->listener->carrier = carrier;
	id->listener->id = id;
	soft_places_init(&id->listener->parked);
	id->backlog = backlog <= 0 || backlog > BACKLOG_MAX ? BACKLOG_MAX : (unsigned)backlog;
	id->state = SOFT_CM_LISTENING;
	return 0;
}

static int start_listening(struct soft_cm_id *id, int backlog)
{
	const struct sockaddr_in any = {.sin_family = AF_INET};
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_LISTEN);

	if (!error && id->state == SOFT_CM_IDLE)
		error = soft_cm_bind(id, (const struct sockaddr *)&any);
	if (!error)
		error = open_listener(id, backlog);
	/* Unlike in the kernel, whose listener on all addresses has other devices to wait for. */
	if (!error && !id->attached)
		soft_cm_device_attach(id);
	return error;
}

int soft_rdma_listen(struct rdma_cm_id *application, int backlog)
{
	struct soft_cm_id *id = soft_cm_enter_device(application);

	return id ? soft_cm_leave_device(start_listening(id, backlog)) : -1;
}
