/* Listeners: rdma_listen(3), and connections without a whole REQ.
 *
 * Any process can connect to the TCP port.  A connection becomes the application's business with a
 * whole REQ only; until then it is half open: few of them (fair_share.h says which goes when there are
 * too many; a peer of this protocol sends REQ at once, and gives its place up), for a short time, and
 * at the cost of about a kilobyte.  A request that the application's backlog has no room for gets
 * MRA and waits, in another place.
 */
#define _GNU_SOURCE /* accept4 */
#include "cm_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "engine/engine.h"

enum {
	BACKLOG_MAX = 1024, /* also for 0 and less, as the kernel's rdma_ucm has it */
	ACCEPTS_PER_STEP = 64,
};

struct soft_cm_listener {
	struct soft_fd_watch watch;
	struct soft_timer pause;
	struct soft_cm_id *id;
	struct soft_places parked; /* requests without room in the backlog */
	unsigned untaken; /* requests reported and not taken by the application */
	unsigned backlog;
};

struct incoming {
	struct soft_place place; /* half open, or parked */
	struct soft_cm_listener *listener;
	struct soft_cm_link *link;
	struct sockaddr_storage peer;
	struct soft_cm_message request;
};

/* Of all listeners. */
static struct soft_places half_open = {.peers = {&half_open.peers, &half_open.peers}};
static unsigned fork_generation; /* the process (of a fork) that these belong to */

static void drop(struct incoming *incoming)
{
	soft_place_release(&incoming->place);
	if (incoming->link)
		soft_cm_link_free(incoming->link);
	free(incoming);
}

static struct incoming *incoming_of(struct soft_place *place)
{
	return soft_container(place, struct incoming, place);
}

static unsigned half_open_limit(void)
{
	return soft_places_limit(soft_cm_limits.half_open);
}

/* ---- requests ------------------------------------------------------------------------------ */

/* The request becomes an id and an event; `incoming` is gone, the link is the id's.  False: there
 * is no link any more. */
static bool report(struct incoming *incoming)
{
	struct soft_cm_listener *listener = incoming->listener;
	struct soft_cm_link *link = incoming->link;
	bool reported;

	incoming->link = NULL;
	reported = !soft_cm_request(listener->id, link, &incoming->peer, &incoming->request);
	listener->untaken += reported;
	drop(incoming);
	return reported;
}

static void refuse(struct incoming *incoming, uint16_t reason)
{
	struct soft_cm_link *link = incoming->link;

	incoming->link = NULL;
	soft_cm_link_reject(link, reason, NULL, 0);
	drop(incoming);
}

/* IBTA 12.6.7.2: what a request can be refused for before the application sees it. */
static uint16_t objection(const struct incoming *incoming)
{
	if (incoming->request.port_space != incoming->listener->id->id.ps)
		return SOFT_CM_REASON_INVALID_SERVICE_ID;
	if (incoming->request.qp_type != IBV_QPT_RC)
		return SOFT_CM_REASON_INVALID_TRANSPORT;
	return 0;
}

/* False: there is no link any more.  True also where it is another's: what has come behind the
 * request is for that one. */
static bool take_request(struct incoming *incoming, const struct soft_cm_message *request)
{
	const struct soft_cm_message wait = {.type = SOFT_CM_MRA};
	struct soft_cm_listener *listener = incoming->listener;
	struct soft_place *excess;
	uint16_t reason;

	incoming->request = *request;
	soft_cm_link_expect_nothing(incoming->link);
	soft_place_release(&incoming->place);
	reason = objection(incoming);
	if (reason) {
		refuse(incoming, reason);
		return false;
	}
	if (soft_cm_link_send(incoming->link, &wait)) {
		drop(incoming);
		return false;
	}
	if (listener->untaken < listener->backlog)
		return report(incoming);
	soft_places_add(&listener->parked, &incoming->place, &incoming->peer);
	excess = soft_places_evicted(&listener->parked, half_open_limit());
	if (excess) /* never this one */
		refuse(incoming_of(excess), SOFT_CM_REASON_NO_RESOURCES);
	return true;
}

/* The first message is REQ; nothing follows until there has been an answer, except that the active
 * side may withdraw it.  The end of the stream tells everything else. */
static bool message(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	struct incoming *incoming = link->owner;

	if (incoming->place.places == &half_open && message->type == SOFT_CM_REQ)
		return take_request(incoming, message);
	drop(incoming);
	return false;
}

static void failed(struct soft_cm_link *link, int error)
{
	struct incoming *incoming = link->owner;

	/* A peer of another version: the only invalid input that is answered. */
	if (error == EPROTONOSUPPORT)
		refuse(incoming, SOFT_CM_REASON_INVALID_VERSION);
	else
		drop(incoming);
}

static const struct soft_cm_link_calls calls = {.message = message, .failed = failed};

void soft_cm_listener_taken(struct soft_cm_id *id)
{
	struct soft_cm_listener *listener = id->listener;

	if (!listener) {
		soft_cm_service_taken(id);
		return;
	}
	listener->untaken--;
	while (listener->untaken < listener->backlog && listener->parked.count)
		(void)report(incoming_of(soft_places_oldest(&listener->parked)));
}

/* ---- accepting ---------------------------------------------------------------------------- */

static void admit(struct soft_cm_listener *listener, int fd, const struct sockaddr_storage *peer)
{
	struct soft_place *excess;
	struct incoming *incoming;
	int error;

	incoming = calloc(1, sizeof(*incoming));
	if (!incoming) {
		close(fd);
		return;
	}
	incoming->link = soft_cm_link_new(fd, false, &calls, incoming, &error);
	if (!incoming->link) {
		free(incoming);
		return;
	}
	incoming->listener = listener;
	incoming->peer = *peer;
	soft_places_add(&half_open, &incoming->place, peer);
	soft_cm_link_expect(incoming->link, soft_cm_limits.request_ms);
	excess = soft_places_evicted(&half_open, half_open_limit());
	if (excess)
		drop(incoming_of(excess));
}

static void accept_ready(struct soft_fd_watch *watch, uint32_t events)
{
	struct soft_cm_listener *listener = soft_container(watch, struct soft_cm_listener, watch);

	(void)events;
	for (int i = 0; i < ACCEPTS_PER_STEP; i++) {
		struct sockaddr_storage peer = {0};
		socklen_t length = sizeof(peer);
		int fd = accept4(watch->fd, (struct sockaddr *)&peer, &length,
				 SOCK_NONBLOCK | SOCK_CLOEXEC);

		if (fd >= 0) {
			admit(listener, fd, &peer);
		} else if (errno == EAGAIN) {
			return;
		} else if (soft_is_shortage(errno) && half_open.count) {
			drop(incoming_of(soft_places_oldest(&half_open)));
		} else if (soft_is_shortage(errno)) {
			soft_unwatch(watch);
			soft_timer_start(&listener->pause, soft_cm_in(soft_cm_limits.pause_ms));
			return;
		} /* else: an error of the connection that was to be accepted (accept(2)) */
	}
}

static void pause_over(struct soft_timer *timer)
{
	struct soft_cm_listener *listener = soft_container(timer, struct soft_cm_listener, pause);

	if (soft_watch(&listener->watch, EPOLLIN))
		soft_timer_start(timer, soft_cm_in(soft_cm_limits.pause_ms));
}

/* ---- opening and closing ------------------------------------------------------------------- */

unsigned soft_cm_backlog(int wanted)
{
	return wanted <= 0 || wanted > BACKLOG_MAX ? BACKLOG_MAX : (unsigned)wanted;
}

static int open_listener(struct soft_cm_id *id, int backlog)
{
	struct soft_cm_listener *listener = calloc(1, sizeof(*listener));
	const int on = 1;
	int error = 0;

	if (!listener)
		return ENOMEM;
	if (fork_generation != soft_engine_fork_generation()) {
		soft_places_init(&half_open); /* those in it are the parent's */
		fork_generation = soft_engine_fork_generation();
	}
	listener->id = id;
	listener->watch.fd = id->sock;
	listener->watch.ready = accept_ready;
	listener->pause.expired = pause_over;
	soft_places_init(&listener->parked);
	listener->backlog = soft_cm_backlog(backlog);
	/* Its connections must not keep the port from the next listener (cm_address.c).  The queue
	 * in the kernel is as long as it may be: the backlog counts requests, not connections. */
	if (setsockopt(id->sock, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) ||
	    listen(id->sock, SOMAXCONN))
		error = soft_cm_port_error(&id->id.route.addr.src_addr, SOCK_STREAM, errno);
	if (!error)
		error = soft_watch(&listener->watch, EPOLLIN);
	if (error) {
		free(listener);
		return error;
	}
	id->listener = listener;
	id->sock = -1;
	id->state = SOFT_CM_LISTENING;
	return 0;
}

void soft_cm_listener_close(struct soft_cm_id *id)
{
	struct soft_cm_listener *listener = id->listener;
	struct soft_node *node = half_open.peers.next;

	if (!listener)
		return;
	id->listener = NULL;
	soft_watch_close(&listener->watch);
	soft_timer_stop(&listener->pause);
	while (listener->parked.count)
		refuse(incoming_of(soft_places_oldest(&listener->parked)), SOFT_CM_REASON_CONSUMER);
	while (node != &half_open.peers) {
		struct incoming *incoming = soft_list_entry(node, struct incoming, place.node);

		node = node->next;
		if (incoming->listener == listener)
			drop(incoming);
	}
	free(listener);
}

static int start_listening(struct soft_cm_id *id, int backlog)
{
	const struct sockaddr_in any = {.sin_family = AF_INET};
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_LISTEN);

	if (!error && id->state == SOFT_CM_IDLE)
		error = soft_cm_bind(id, (const struct sockaddr *)&any);
	if (!error)
		error = soft_cm_datagrams(id) ? soft_cm_service_open(id, backlog)
					      : open_listener(id, backlog);
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
