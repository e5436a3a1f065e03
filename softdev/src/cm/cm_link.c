/* Links: message exchanges with a deadline over any carrier. If the carrier may lose messages, a
 * link also retransmits them.
 *
 * The message types of an exchange are in ascending order (cm_message.h). A message whose type is
 * not greater than all earlier ones is therefore a duplicate or late, and is not passed to the
 * owner. If a duplicate expects a response, our response was lost and is sent again.
 *
 * When its owner leaves a link with a final message, the link lingers as long as duplicates may
 * arrive, even if the message was answered. Otherwise a late REQ of a finished exchange would start
 * a new exchange. Lingering links expire after a timeout (IBTA 12.9.8, timewait).
 */
#include "cm_internal.h"

#define TYPE(name) (1u << SOFT_##name)
#define FINAL_TYPES (TYPE(CM_REJ) | TYPE(CM_DREP) | TYPE(SIDR_REP))
#define FIRST_RETRY_NS                                                                             \
	UINT64_C(1000000) /* pause after the first rejection by a port without a listener */
#define FIRST_PAUSE_NS UINT64_C(50000000)
/* Longest pause between retransmissions. A message is then retransmitted at most 15 times before
 * the longest deadline. A REQ cannot allow more retries (IBTA 12.6.5, maximum of CM retries).
 * Without a limit, a forged REQ could direct any number of REPs at a victim. */
#define LONGEST_PAUSE_NS UINT64_C(8000000000)
#define ONLY_DEADLINE_NS INT64_MAX /* longer than any deadline, and cannot overflow */
#define WAITING_PAUSE_NS UINT64_C(1000000000) /* minimum pause after MRA */
#define TIMEOUT_NS UINT64_C(4096) /* base of the service timeout, 4.096 us * 2^n (IBTA 12.6.6) */

static bool is_one_of(unsigned type, unsigned types)
{
	return types & 1u << type;
}

static bool expects_response(unsigned type)
{
	return is_one_of(type, TYPE(CM_REQ) | TYPE(CM_REP) | TYPE(CM_DREQ) | TYPE(SIDR_REQ));
}

static void start_timer(struct soft_cm_link *link, uint64_t pause_ns)
{
	uint64_t next = soft_now() + pause_ns;

	soft_timer_start(&link->timer, next < link->deadline ? next : link->deadline);
}

/* Start the timer for the next retransmission or the deadline, whichever comes first. After the
 * peer's final message, nothing is retransmitted. */
static void start_response_timer(struct soft_cm_link *link)
{
	bool retransmits = link->carrier->is_lossy && expects_response(link->last_sent.type) &&
			   !is_one_of(link->highest_received, FINAL_TYPES);

	start_timer(link, retransmits ? link->pause_ns : ONLY_DEADLINE_NS);
	if (link->pause_ns < LONGEST_PAUSE_NS)
		link->pause_ns = link->pause_ns * 2 < LONGEST_PAUSE_NS ? link->pause_ns * 2
								       : LONGEST_PAUSE_NS;
}

static void expired(struct soft_timer *timer)
{
	struct soft_cm_link *link = soft_container(timer, struct soft_cm_link, timer);
	bool deadline_passed = soft_now() >= link->deadline;
	int error = deadline_passed ? ETIMEDOUT : link->carrier->send(link, &link->last_sent);

	if (error)
		soft_cm_link_failed(link, error);
	else
		start_response_timer(link);
}

void soft_cm_link_init(struct soft_cm_link *link, const struct soft_cm_carrier *carrier)
{
	link->carrier = carrier;
	link->timer.expired = expired;
}

void soft_cm_link_stop(struct soft_cm_link *link)
{
	soft_assert_locked();
	soft_timer_stop(&link->timer);
	soft_place_release(&link->place);
}

int soft_cm_link_send(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	link->last_sent = *message;
	return link->carrier->send(link, message);
}

int soft_cm_link_connect(struct soft_cm_id *id, const struct soft_cm_carrier *carrier,
			 const struct soft_cm_link_calls *calls,
			 const struct soft_cm_message *message)
{
	int error = 0;
	struct soft_cm_link *link = carrier->connect(id, &error);

	if (!link)
		return error;
	link->calls = calls;
	link->owner = id;
	id->link = link;
	id->state = SOFT_CM_CONNECTING;
	soft_cm_id_set_awaits_peer(id, true);
	link->started_at = soft_now();
	link->last_sent = *message;
	/* Datagram services do not use MRA, so wait for the response of the peer's application. */
	soft_cm_link_set_deadline(link, soft_cm_is_datagram_id(id)
						? soft_device.cm->limits.service_ms
						: soft_device.cm->limits.response_ms);
	return link->carrier->send(link, message);
}

static void set_deadline(struct soft_cm_link *link, uint32_t milliseconds, uint64_t pause_ns)
{
	link->deadline = soft_cm_deadline(milliseconds);
	link->pause_ns = pause_ns;
	start_response_timer(link);
}

void soft_cm_link_set_deadline(struct soft_cm_link *link, uint32_t milliseconds)
{
	set_deadline(link, milliseconds, FIRST_PAUSE_NS);
}

void soft_cm_link_clear_deadline(struct soft_cm_link *link)
{
	link->deadline = 0;
	soft_timer_stop(&link->timer);
}

/* Retry the request after a short pause if the peer has no listener at the port. A server may be
 * replacing its listener, as perftest does between its two connections. Each pause is
 * FIRST_RETRY_NS plus half of the time since the first attempt, which limits the number of attempts
 * to about ten. Returns false once `no_listener_ms` have passed since the first attempt. */
bool soft_cm_link_retry(struct soft_cm_link *link)
{
	const uint64_t limit_ns = soft_device.cm->limits.no_listener_ms * UINT64_C(1000000);
	const uint64_t elapsed_ns = soft_now() - link->started_at;
	uint64_t pause_ns = FIRST_RETRY_NS + elapsed_ns / 2;

	if (elapsed_ns >= limit_ns)
		return false;
	if (pause_ns > limit_ns - elapsed_ns)
		pause_ns = limit_ns - elapsed_ns;
	link->pause_ns = FIRST_PAUSE_NS;
	start_timer(link, pause_ns);
	return true;
}

/* ---- ending ------------------------------------------------------------------------------- */

struct soft_cm_link *soft_cm_link_assign_place(struct soft_cm_link *link,
					       struct soft_places *places, unsigned max_places)
{
	struct sockaddr_storage local, peer = {0};
	struct soft_place *evicted;

	link->carrier->get_addresses(link, &local, &peer);
	soft_places_add(places, &link->place, &peer);
	evicted = soft_places_find_victim(places, max_places);
	return evicted ? soft_container(evicted, struct soft_cm_link, place) : NULL;
}

/* Keep the link so that it can respond to duplicates. The number of lingering links is limited
 * because a peer may start and end any number of exchanges. */
static void linger(struct soft_cm_link *link)
{
	struct soft_cm_link *evicted;

	soft_cm_link_set_deadline(link, soft_device.cm->limits.linger_ms);
	evicted = soft_cm_link_assign_place(link, &soft_device.cm->lingering,
					    soft_cm_max_half_open());
	if (evicted)
		evicted->carrier->end(evicted);
}

void soft_cm_link_leave(struct soft_cm_link *link)
{
	soft_assert_locked();
	link->calls = NULL;
	if (link->carrier->is_lossy &&
	    (is_one_of(link->last_sent.type, FINAL_TYPES | TYPE(CM_DREQ)) ||
	     link->highest_received == SOFT_CM_REJ))
		linger(link);
	else
		link->carrier->end(link);
}

void soft_cm_link_reject(struct soft_cm_link *link, uint16_t reason)
{
	(void)soft_cm_link_send(link,
				&(struct soft_cm_message){.type = SOFT_CM_REJ, .reason = reason});
	link->carrier->end(link);
}

void soft_cm_link_failed(struct soft_cm_link *link, int error)
{
	if (link->calls)
		link->calls->failed(link, error);
	else
		link->carrier->end(link);
}

/* ---- receiving ---------------------------------------------------------------------------- */

bool soft_cm_link_received(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	const struct soft_cm_message disconnected = {.type = SOFT_CM_DREP};
	unsigned type = message->type, before = link->highest_received;
	uint64_t service_ns = TIMEOUT_NS << message->service_timeout;
	bool is_lossy = link->carrier->is_lossy;

	soft_assert_locked();
	link->highest_received = type > before ? type : before;
	if (is_lossy && type <= before) { /* a duplicate, or late */
		if (expects_response(type) && link->last_sent.type > type)
			(void)link->carrier->send(link, &link->last_sent);
		return true;
	}
	if (is_lossy && type == SOFT_CM_DREQ)
		(void)soft_cm_link_send(link, &disconnected);
	if (!link->calls && !is_lossy) {
		link->carrier->end(link);
		return false;
	}
	if (!link->calls) { /* the link lingers, or its request is parked */
		/* After the peer's final message, only wait for the deadline. Respond to any other
		 * message by repeating the last one; DREP has already been sent to DREQ. */
		if (is_one_of(type, FINAL_TYPES))
			start_response_timer(link);
		else if (type != SOFT_CM_DREQ)
			(void)link->carrier->send(link, &link->last_sent);
		return true;
	}
	if (link->deadline && type == SOFT_CM_MRA) {
		if (type > before) /* a repeated MRA must not extend the deadline */
			set_deadline(link, soft_device.cm->limits.service_ms,
				     service_ns > WAITING_PAUSE_NS ? service_ns : WAITING_PAUSE_NS);
		return true;
	}
	return link->calls->message(link, message);
}
