/* Reaching a peer without a connection manager: the side that connects.
 *
 * A peer on this host is reached through shared memory if it can be, else, and on other hosts, by
 * TCP.  It may not be there yet, nor its queue pair be ready: we try again until our queue pair leaves
 * RTR and RTS, after pauses that grow: the address is the peer's word, and whatever is there must
 * not be flooded.
 */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "link.h"

/* Attempts, each of which makes the pause four times as long: 1, 4, 16 ms and so on.  So there are
 * eight in the first ten seconds. */
enum {
	SECOND_ROUND = 3,
	LONGEST_PAUSE = 6
};

#define CONNECTING_NS 20000000000u
#define PAUSE_NS UINT64_C(1000000)

static void attempt(struct soft_link *link);

static void try_again(struct soft_timer *timer)
{
	attempt(soft_container(timer, struct soft_link, timer));
}

void soft_connect_later(struct soft_link *link)
{
	soft_assert_locked();
	uint64_t delay = PAUSE_NS << 2 * link->attempts;

	if (link->attempts < LONGEST_PAUSE)
		link->attempts++;
	soft_link_close_wires(link);
	link->base.state = SOFT_LINK_CONNECTING;
	link->header_have = 0;
	link->timer.expired = try_again;
	soft_timer_start(&link->timer, soft_now() + delay);
}

static const union ibv_gid *peer_gid(const struct soft_qp *qp)
{
	/* An address without a GID is one of the same host. */
	return qp->attr.ah_attr.is_global ? &qp->attr.ah_attr.grh.dgid : &soft_gid_loopback;
}

/* ---- through shared memory ----------------------------------------------------------------- */

/* False: no channel to the peer can be opened; TCP may do. */
static bool attempt_shm(struct soft_link *link)
{
	if (link->refused || !soft_gid_is_of_host(peer_gid(link->qp)) ||
	    !soft_link_open_chan(link, link->qp, soft_qpn_ip_port(link->qp->attr.dest_qp_num)))
		return false;
	link->base.state = SOFT_LINK_HANDSHAKE;
	return true;
}

static struct soft_gid own_gid(const struct soft_qp *qp)
{
	struct soft_gid own = {.gid = soft_gid_loopback};

	if (qp->attr.ah_attr.is_global)
		soft_gid_at(qp->attr.ah_attr.grh.sgid_index, &own);
	return own;
}

/* ---- by TCP -------------------------------------------------------------------------------- */

static void attempt_tcp(struct soft_link *link)
{
	const struct soft_qp *qp = link->qp;
	const struct ibv_ah_attr *ah = &qp->attr.ah_attr;
	struct sockaddr_storage address;
	struct soft_gid own = own_gid(qp);
	socklen_t length = soft_gid_address(peer_gid(qp), &own.gid,
					    soft_qpn_ip_port(qp->attr.dest_qp_num), &address);
	int fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	soft_link_over_socket(link, fd);
	link->refused = false;
	/* From the address that the queue pair has chosen: of several networks, that one is used. */
	if (fd < 0 || (ah->is_global && soft_gid_bind(fd, ah->grh.sgid_index)) ||
	    (connect(fd, (struct sockaddr *)&address, length) && errno != EINPROGRESS) ||
	    soft_watch(&link->watch, EPOLLOUT)) {
		soft_connect_later(link);
		return;
	}
	soft_timer_start(&link->timer, soft_now() + CONNECTING_NS);
}

static void attempt(struct soft_link *link)
{
	soft_link_close_wires(link); /* of an attempt that has taken too long */
	if (!attempt_shm(link))
		attempt_tcp(link);
}

void soft_connect_established(struct soft_link *link)
{
	soft_assert_locked();
	int error = 0;
	socklen_t length = sizeof(error);

	if (getsockopt(link->watch.fd, SOL_SOCKET, SO_ERROR, &error, &length) || error ||
	    !soft_handshake_send(link, link->qp, SOFT_HELLO) || soft_watch(&link->watch, EPOLLIN)) {
		soft_connect_later(link);
		return;
	}
	/* Within this machine the end of the other process closes the socket, so no timeout is
	 * needed: a slow peer answers one day, and a second HELLO would only be a pending link. */
	soft_liveness_watch(link);
	if (!link->liveness_limit)
		soft_timer_stop(&link->timer);
	link->base.state = SOFT_LINK_HANDSHAKE;
}

/* ---- the answer ---------------------------------------------------------------------------- */

void soft_connect_answered(struct soft_link *link)
{
	soft_assert_locked();
	struct soft_qp *qp = link->qp;

	if (link->peer_hello.kind != SOFT_HELLO_ACK || !soft_hello_matches(&link->peer_hello, qp)) {
		/* It takes us for its peer, but we know better. */
		soft_connect_abandon(link);
		soft_connect_later(link);
		return;
	}
	if (soft_link_up(link, qp))
		soft_link_finish(link, ECONNABORTED);
}

void soft_connect_abandon(struct soft_link *link)
{
	soft_assert_locked();
	uint8_t bytes[SOFT_FRAME_HEADER];

	/* A channel needs no DISCONNECT: its END tells the peer the same. */
	if (link->watch.fd < 0)
		return;
	soft_frame_encode(bytes, &(struct soft_frame){.opcode = SOFT_DISCONNECT});
	(void)!send(link->watch.fd, bytes, sizeof(bytes), MSG_NOSIGNAL | MSG_DONTWAIT);
}

static bool no_cm(struct soft_qp *qp)
{
	(void)qp;
	return false;
}

static bool (*cm_offer)(struct soft_qp *qp) = no_cm;

void soft_wire_use_cm(bool (*offer)(struct soft_qp *qp))
{
	cm_offer = offer;
}

/* ---- the queue pair's side ----------------------------------------------------------------- */

static bool is_self(const struct soft_qp *qp)
{
	return qp->attr.dest_qp_num == qp->ibv.qp_num && soft_gid_is_of_host(peer_gid(qp));
}

static bool we_connect(const struct soft_qp *qp)
{
	struct soft_gid own = own_gid(qp);

	if (qp->ibv.qp_num != qp->attr.dest_qp_num)
		return qp->ibv.qp_num < qp->attr.dest_qp_num;
	return memcmp(&own.gid, peer_gid(qp), sizeof(own.gid)) < 0;
}

static struct soft_link *connecting(struct soft_qp *qp)
{
	struct soft_link *link = soft_link_create(-1, SOFT_LINK_CONNECTING);

	if (!link)
		return NULL;
	link->qp = qp;
	qp->link = &link->base;
	return link;
}

static void to_self(struct soft_qp *qp)
{
	struct soft_link *link = soft_link_create(-1, SOFT_LINK_CONNECTING);

	if (link && (soft_link_over_itself(link) || soft_link_up(link, qp)))
		soft_link_finish(link, ECONNABORTED);
}

/* RTR.  Whatever fails here is as if the peer could not be reached: requests will fail. */
void soft_connect_begin(struct soft_qp *qp)
{
	soft_assert_locked();
	const struct ibv_ah_attr *ah = &qp->attr.ah_attr;
	struct soft_gid own;
	struct soft_link *link;

	qp->stream_from_cm = cm_offer(qp);
	if (qp->stream_from_cm)
		return;
	if (is_self(qp)) {
		to_self(qp);
		return;
	}
	if (ah->is_global && !soft_gid_at(ah->grh.sgid_index, &own))
		soft_listener_open(&own.gid);
	if (!we_connect(qp)) {
		soft_handshake_find_pending(qp);
		return;
	}
	link = connecting(qp);
	if (link)
		attempt(link);
}

/* Not at once, or the two would keep each other busy.  The other side may have been quicker. */
void soft_connect_again(struct soft_qp *qp)
{
	soft_assert_locked();
	struct soft_link *link;

	if (is_self(qp)) {
		to_self(qp);
		return;
	}
	if (!we_connect(qp)) {
		soft_handshake_find_pending(qp);
		return;
	}
	link = connecting(qp);
	if (!link)
		return;
	link->attempts = SECOND_ROUND;
	soft_connect_later(link);
}
