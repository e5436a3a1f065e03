/* Connection setup without a connection manager.
 *
 * The queue pair with the smaller number connects first. If the numbers are equal, the smaller GID
 * decides. The other queue pair pauses and then connects as well if it has not been reached,
 * because the first one's pauses may have grown long. If both connect, the attempt of the first one
 * is used (handshake.c).
 *
 * A peer on this host is reached through shared memory if possible, and otherwise over TCP like any
 * other peer. The peer's process may not be running yet, or its queue pair may not be ready.
 * Attempts therefore continue until the local queue pair leaves RTR and RTS. The pauses grow
 * because the peer chooses the address, and the host at that address must not be flooded.
 */
#include <sys/epoll.h>

#include "link_internal.h"

/* Values of soft_link.attempts. A failed attempt is followed by a pause of 4^attempts ms and
 * increments the count, up to MAX_ATTEMPTS. A side that starts at 0 retries eight times in the
 * first ten seconds. */
enum {
	SECOND_SIDE_ATTEMPTS = 2, /* initial count of the side that connects second */
	RECONNECT_ATTEMPTS = 3,
	MAX_ATTEMPTS = 6
};

#define FIRST_PAUSE_NS UINT64_C(1000000)

static void start_attempt(struct soft_link *link);

static void retry_timer_expired(struct soft_timer *timer)
{
	start_attempt(soft_container(timer, struct soft_link, timer));
}

void soft_connect_retry_later(struct soft_link *link)
{
	soft_assert_locked();
	uint64_t delay = FIRST_PAUSE_NS << 2 * link->attempts;

	if (link->attempts < MAX_ATTEMPTS)
		link->attempts++;
	soft_link_detach(link);
	link->base.state = SOFT_LINK_CONNECTING;
	link->timer.expired = retry_timer_expired;
	soft_timer_start(&link->timer, soft_now() + delay);
	soft_handshake_accept_pending(link->qp); /* the peer may have connected in the meantime */
}

/* ---- opening a channel --------------------------------------------------------------------- */

/* Try to open a shared-memory channel. Returns false if TCP should be tried instead. */
static bool attempt_shm(struct soft_link *link)
{
	const union ibv_gid peer = soft_qp_peer_gid(link->qp);

	return !link->attach_refused && soft_links_may_use_shm() &&
	       soft_gid_is_on_this_host(&peer) &&
	       soft_link_open_chan(
		       link, link->qp,
		       soft_link_shm_path(link->qp, soft_qpn_ip_port(link->qp->attr.dest_qp_num)));
}

/* Request a channel on a TCP path to the peer. Returns false if there is no such path. */
static bool attempt_tcp(struct soft_link *link)
{
	const struct soft_qp *qp = link->qp;
	struct soft_gid own;

	link->over_tcp = true;
	if (soft_qp_gid(qp, &own))
		return false; /* the GID table entry currently has no address */
	const struct soft_tcp_addresses ends = {
		.own = own.gid,
		.peer = soft_qp_peer_gid(qp),
		.port = soft_qpn_ip_port(qp->attr.dest_qp_num),
	};
	struct soft_tcp_path *tcp = ends.port ? soft_tcp_path_to(&ends) : NULL;

	return tcp && soft_link_open_chan(link, qp, &tcp->path);
}

static bool attempt_simulated(struct soft_link *link)
{
	uint16_t port = soft_qpn_ip_port(link->qp->attr.dest_qp_num);

	return soft_link_open_chan(link, link->qp, soft_device.paths->simulated(port));
}

/* Try to open a channel to the peer, first through shared memory and then over TCP. If neither is
 * possible, try again later. */
static void start_attempt(struct soft_link *link)
{
	link->base.state = SOFT_LINK_HANDSHAKE;
	link->over_tcp = false;
	if (soft_device.paths->simulated ? !attempt_simulated(link)
					 : !attempt_shm(link) && !attempt_tcp(link))
		soft_connect_retry_later(link);
	else
		soft_link_set_liveness_limit(link);
}

/* ---- the response -------------------------------------------------------------------------- */

void soft_connect_response_received(struct soft_link *link)
{
	soft_assert_locked();
	struct soft_qp *qp = link->qp;

	const char *reason = link->peer_hello.kind != SOFT_HELLO_ACK
				     ? "PACKET"
				     : soft_hello_mismatch(&link->peer_hello, qp);

	if (reason) {
		soft_handshake_trace_drop(link, qp, reason);
		soft_connect_retry_later(link); /* the response does not match the queue pair */
		return;
	}
	if (soft_link_up(link, qp))
		soft_link_finish(link, ECONNABORTED);
}

void soft_links_use_cm(bool (*handle_rtr)(struct soft_qp *qp))
{
	soft_device.links->cm_handle_rtr = handle_rtr;
}

/* ---- the queue pair's side ----------------------------------------------------------------- */

/* Returns whether the queue pair is its own peer. */
static bool is_self(const struct soft_qp *qp)
{
	const union ibv_gid peer = soft_qp_peer_gid(qp);

	return qp->attr.dest_qp_num == qp->ibv.qp_num && soft_gid_is_on_this_host(&peer);
}

bool soft_connects_first(const struct soft_qp *qp)
{
	const union ibv_gid peer = soft_qp_peer_gid(qp);
	struct soft_gid own = {0};

	if (qp->ibv.qp_num != qp->attr.dest_qp_num)
		return qp->ibv.qp_num < qp->attr.dest_qp_num;
	(void)soft_qp_gid(qp, &own);
	return memcmp(&own.gid, &peer, sizeof(own.gid)) < 0;
}

/* Connect without a handshake. This works if the queue pair is its own peer, and over RoCE, where
 * the application provides the peer's address. Returns 0 or an errno value. */
static int connect_immediately(struct soft_qp *qp)
{
	struct soft_link *link = soft_link_create(SOFT_LINK_CONNECTING);
	int rc;

	if (!link)
		return ENOMEM;
	link->to_self = is_self(qp);
	rc = link->to_self ? soft_shm_chan_to_self(&link->chan, soft_qp_hca(qp)->port_bit)
			   : soft_roce_open(&link->chan, qp);
	if (!rc)
		rc = soft_link_up(link, qp);
	if (rc)
		soft_link_finish(link, rc);
	return rc;
}

/* Start connecting, unless a pending link from the peer can be accepted. `attempts` is the initial
 * attempt count. If `attempts` is 0, the first attempt is made immediately. */
static void start_connecting(struct soft_qp *qp, unsigned attempts)
{
	struct soft_link *link;

	if (soft_handshake_accept_pending(qp))
		return;
	link = soft_link_create(SOFT_LINK_CONNECTING);
	if (!link)
		return;
	link->qp = qp;
	qp->link = &link->base;
	link->attempts = attempts;
	if (attempts)
		soft_connect_retry_later(link);
	else
		start_attempt(link);
}

int soft_connect_begin(struct soft_qp *qp)
{
	soft_assert_locked();
	struct soft_gid own;

	qp->stream_from_cm = soft_device.links->cm_handle_rtr(qp);
	if (qp->stream_from_cm)
		return 0;
	if (soft_device.links->roce || is_self(qp))
		return connect_immediately(qp);
	if (!soft_qp_gid(qp, &own))
		soft_listener_open(&own.gid);
	start_connecting(qp, soft_connects_first(qp) ? 0 : SECOND_SIDE_ATTEMPTS);
	return 0;
}

void soft_reconnect(struct soft_qp *qp)
{
	soft_assert_locked();
	if (is_self(qp))
		(void)connect_immediately(qp);
	else
		start_connecting(qp, RECONNECT_ATTEMPTS);
}
