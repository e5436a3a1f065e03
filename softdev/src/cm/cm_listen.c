/* Listeners: rdma_listen(3), and requests that have not been delivered to the application yet.
 *
 * Each request is answered with MRA immediately. Only a few requests are reported as events at a
 * time, and the others are parked. fair_share.h selects the request to report next, and the request
 * to evict if too many are parked.
 */
#include "cm_internal.h"

enum {
	BACKLOG_MAX = 1024, /* also used for values <= 0, as in the kernel's rdma_ucm */
	MAX_REPORTED = 8, /* heuristic */
	/* 4.096 us * 2^20 = 4.3 s. After this time, Linux 6.1 waits another 2 s before it
	 * retransmits REQ. The link lingers for longer than both together (limits.linger_ms), so it
	 * can resend a lost response. */
	SERVICE_TIMEOUT = 20,
};

/* Create an id for the request and report it. Returns false if the link has been freed. */
static bool report(struct soft_cm_id *id, struct soft_cm_link *link)
{
	bool reported = !soft_cm_create_request(id, link);

	id->undelivered += reported;
	return reported;
}

/* Returns whether another request may be reported. Applications read events in order, so a flood of
 * requests would delay all other events. */
static bool has_room(const struct soft_cm_id *id)
{
	return id->undelivered < id->backlog && id->undelivered < MAX_REPORTED;
}

/* Returns the maximum number of parked requests. This is the backlog, clamped to between one and
 * four times the half-open limit. The half-open limit is at most an eighth of the descriptor limit,
 * so parked requests use at most half of the descriptors. */
static unsigned max_parked(const struct soft_cm_id *id)
{
	unsigned half_open_limit = soft_cm_max_half_open();
	unsigned limit = id->backlog < 4 * half_open_limit ? id->backlog : 4 * half_open_limit;

	return limit > half_open_limit ? limit : half_open_limit;
}

/* Remove the parked request to report next. It is the oldest one, unless its network has parked
 * more requests than its share of max_parked() (fair_share.h). */
static struct soft_cm_link *unpark_next(struct soft_cm_listener *listener)
{
	struct soft_cm_link *link =
		soft_container(soft_places_next(&listener->parked, max_parked(listener->id)),
			       struct soft_cm_link, place);

	soft_place_release(&link->place);
	return link;
}

/* Park the request until the application has read enough of the listener's earlier requests
 * (has_room). A parked link has no owner, so it is freed when it fails or receives REJ. */
static void park(struct soft_cm_listener *listener, struct soft_cm_link *link)
{
	struct soft_cm_link *evicted =
		soft_cm_link_assign_place(link, &listener->parked, max_parked(listener->id));

	if (evicted)
		soft_cm_link_reject(evicted, SOFT_CM_REASON_NO_RESOURCES);
}

/* Returns the reason for rejecting a request without reporting it to the application (IBTA
 * 12.6.7.2), or 0 if the request is valid. */
static uint16_t rejection_reason(const struct soft_cm_listener *listener,
				 const struct soft_cm_message *request)
{
	if (request->port_space != listener->id->id.ps)
		return SOFT_CM_REASON_INVALID_SERVICE_ID;
	if (request->qp_type != IBV_QPT_RC)
		return SOFT_CM_REASON_INVALID_TRANSPORT;
	return 0;
}

bool soft_cm_request_received(struct soft_cm_listener *listener, struct soft_cm_link *link,
			      const struct soft_cm_message *request)
{
	const struct soft_cm_message mra = {.type = SOFT_CM_MRA,
					    .service_timeout = SERVICE_TIMEOUT};
	uint16_t reason = rejection_reason(listener, request);

	link->highest_received = request->type;
	link->request = *request;
	if (reason) {
		soft_cm_link_reject(link, reason);
		return false;
	}
	/* Tell the peer that the request has arrived and that its response may take a while. */
	if (soft_cm_link_send(link, &mra)) {
		link->carrier->end(link);
		return false;
	}
	if (has_room(listener->id))
		return report(listener->id, link);
	park(listener, link);
	return true;
}

void soft_cm_request_delivered(struct soft_cm_id *id)
{
	struct soft_cm_listener *listener = id->listener;

	id->undelivered--;
	while (listener && listener->parked.count && has_room(id))
		(void)report(id, unpark_next(listener));
}

/* ---- opening and closing ------------------------------------------------------------------- */

void soft_cm_listener_close(struct soft_cm_id *id)
{
	struct soft_cm_listener *listener = id->listener;

	if (!listener)
		return;
	id->listener = NULL;
	while (listener->parked.count)
		soft_cm_link_reject(unpark_next(listener), SOFT_CM_REASON_CONSUMER);
	listener->carrier->unlisten(listener);
}

static int open_listener(struct soft_cm_id *id, int backlog)
{
	const struct soft_cm_carrier *carrier =
		soft_cm_is_datagram_id(id) ? soft_device.cm->sidr_server : soft_device.cm->carrier;
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
	/* Attach a listener on all addresses to all devices, so that it is notified when the last
	 * device is removed. A listener of the kernel's rdma_cm would wait for new devices
	 * instead. */
	if (!error && !id->attached)
		soft_cm_device_attach(id, NULL);
	return error;
}

int soft_rdma_listen(struct rdma_cm_id *application, int backlog)
{
	struct soft_cm_id *id = soft_cm_enter_device(application);

	return id ? soft_cm_leave_device(start_listening(id, backlog)) : -1;
}
