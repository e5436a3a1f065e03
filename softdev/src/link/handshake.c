/* Handshake and passive side of links without a connection manager.
 *
 * The applications of two queue pairs have exchanged addresses (queue pair number and GID), and the
 * queue pairs need one link between them. Either side connects to the other's process
 * (active_connect.c) and sends HELLO. The other side responds with HELLO_ACK when it is ready to
 * receive from exactly this peer. If both sides send HELLO, the one from the smaller queue pair
 * number is accepted; if the numbers are equal, the smaller GID decides. Both messages contain the
 * PSNs, which the applications chose at random. A process that does not know the PSNs is not the
 * peer.
 *
 * A HELLO for a queue pair that is not ready yet is held for a while. Over TCP, a HELLO is also
 * held if its queue pair does not exist or has another peer. A process that guesses numbers
 * therefore learns nothing until all of its numbers match. The number and the age of pending links
 * are limited, regardless of their origin.
 */
#include <stdio.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "link_internal.h"
#include "trace/trace.h"

enum {
	MAX_PENDING = 256, /* links requested by peers but not yet accepted */
};
#define GUESS_COST_NS 1000000u
#define MAX_GUESS_CREDIT_NS 1000000000u

#define PENDING_TIMEOUT_NS 10000000000u

/* ---- the handshake -------------------------------------------------------------------------- */

/* Returns the HELLO flags of a queue pair type. */
static uint32_t type_flags(enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_UC:
		return SOFT_HELLO_UNRELIABLE;
	case IBV_QPT_XRC_SEND:
		return SOFT_HELLO_XRC_SEND;
	case IBV_QPT_XRC_RECV:
		return SOFT_HELLO_XRC_RECV;
	default:
		return 0;
	}
}

static enum ibv_qp_type peer_type(const struct soft_qp *qp)
{
	switch (qp->ibv.qp_type) {
	case IBV_QPT_XRC_SEND:
		return IBV_QPT_XRC_RECV;
	case IBV_QPT_XRC_RECV:
		return IBV_QPT_XRC_SEND;
	default:
		return qp->ibv.qp_type;
	}
}

/* Returns whether the queue pair sends requests and its first PSN has been set. */
static bool has_send_psn(const struct soft_qp *qp)
{
	return qp->ibv.state != IBV_QPS_RTR && !qp->xrcd;
}

const char *soft_hello_mismatch(const struct soft_hello *hello, const struct soft_qp *qp)
{
	if (hello->to != qp->ibv.qp_num)
		return "QPN";
	if ((hello->flags & SOFT_HELLO_TYPES) != type_flags(peer_type(qp)))
		return "TRANSPORT";
	if (hello->from != qp->attr.dest_qp_num)
		return "SOURCE";
	if ((hello->flags & SOFT_HELLO_SENDS && hello->send_psn != qp->attr.rq_psn) ||
	    (has_send_psn(qp) && hello->receive_psn != qp->attr.sq_psn))
		return "PSN";
	return NULL;
}

bool soft_hello_matches(const struct soft_hello *hello, const struct soft_qp *qp)
{
	return !soft_hello_mismatch(hello, qp);
}

void soft_handshake_trace_drop(struct soft_link *link, const struct soft_qp *qp, const char *reason)
{
	const struct soft_hello *hello = &link->peer_hello;
	const struct soft_tcp_path *tcp = soft_tcp_path_of(link->request_path);
	/* Trace the peer's send PSN if it differs from the PSN expected here. Otherwise, trace this
	 * side's send PSN, which differs from the PSN that the peer expects. */
	const bool send_psn_differs =
		qp && hello->flags & SOFT_HELLO_SENDS && hello->send_psn != qp->attr.rq_psn;
	const bool is_psn_mismatch = qp && !strcmp(reason, "PSN");
	uint32_t psn = 0, expected_psn = 0;

	if (link->drop_traced)
		return;
	link->drop_traced = true;
	if (is_psn_mismatch) {
		psn = send_psn_differs ? hello->send_psn : qp->attr.sq_psn;
		expected_psn = send_psn_differs ? qp->attr.rq_psn : hello->receive_psn;
	}
	SOFT_TRACE_DROPPED(.reason = reason, .qp_num = qp ? qp->ibv.qp_num : hello->to,
			   .remote_qpn = hello->from,
			   .remote = tcp ? &tcp->socket_addresses.peer : NULL,
			   .has_psn = is_psn_mismatch, .psn = psn, .expected_psn = expected_psn);
}

void soft_handshake_write(uint8_t *at, const struct soft_qp *qp, enum soft_hello_kind kind)
{
	soft_hello_encode(at, &(struct soft_hello){
				      .kind = (uint16_t)kind,
				      .from = qp->ibv.qp_num,
				      .to = qp->attr.dest_qp_num,
				      .receive_psn = qp->attr.rq_psn,
				      .send_psn = has_send_psn(qp) ? qp->attr.sq_psn : 0,
				      .flags = (has_send_psn(qp) ? SOFT_HELLO_SENDS : 0u) |
					       type_flags(qp->ibv.qp_type),
				      .mtu = qp->attr.path_mtu,
			      });
}

static unsigned mtu_bytes(uint32_t mtu)
{
	return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128u << mtu : 0;
}

bool soft_handshake_check_mtu(struct soft_link *link, struct soft_qp *qp)
{
	if (!link->hello_valid || link->peer_hello.mtu == qp->attr.path_mtu)
		return true;
	soft_handshake_trace_drop(link, qp, "PATH_MTU");
	fprintf(stderr,
		"aiordma: queue pair 0x%06x has a path MTU of %u bytes, but its peer 0x%06x has a "
		"path MTU of %u bytes; set the same path_mtu on both (ibv_modify_qp)\n",
		qp->ibv.qp_num, mtu_bytes(qp->attr.path_mtu), link->peer_hello.from,
		mtu_bytes(link->peer_hello.mtu));
	qp->stream_lost = true; /* requests will fail as if the peer did not respond */
	return false;
}

void soft_handshake_check_psn(struct soft_qp *qp)
{
	soft_assert_locked();
	struct soft_link *link = soft_link_of(qp);

	if (!link || link->base.state != SOFT_LINK_UP || !link->hello_valid || !has_send_psn(qp) ||
	    link->peer_hello.receive_psn == qp->attr.sq_psn)
		return;
	/* The peer would reject all requests. Close the link, so that they fail as if the peer did
	 * not respond. */
	soft_handshake_trace_drop(link, qp, "PSN");
	link->psn_refused = true;
	soft_link_close(qp);
	qp->stream_lost = true;
}

/* ---- pending links --------------------------------------------------------------------------- */

static struct soft_link *pending_link(struct soft_place *place)
{
	return soft_container(place, struct soft_link, pending);
}

/* Refuse the channel that a pending link requested, and free the link. */
static void drop_pending(struct soft_link *link)
{
	soft_place_release(&link->pending);
	if (link->request_path)
		soft_path_refuse(link->request_path, link->request_chan);
	soft_link_finish(link, 0);
}

/* Returns whether the attributes of the queue pair's peer are known. */
static bool is_ready(const struct soft_qp *qp)
{
	return qp->ibv.state == IBV_QPS_RTR || qp->ibv.state == IBV_QPS_RTS ||
	       qp->ibv.state == IBV_QPS_SQD || qp->ibv.state == IBV_QPS_SQE;
}

static void pending_expired(struct soft_timer *timer)
{
	struct soft_link *link = soft_container(timer, struct soft_link, timer);
	soft_handshake_trace_drop(link, soft_qp_find(link->peer_hello.to), "QP_STATE");
	drop_pending(link);
}

/* Keep a pending link until its queue pair becomes ready. Evicts another pending link if there are
 * too many. */
static void add_pending(struct soft_link *link)
{
	const struct soft_tcp_path *tcp = soft_tcp_path_of(link->request_path);
	struct sockaddr_storage peer = {0}; /* all zeros means this host */
	struct soft_place *evicted;

	link->base.state = SOFT_LINK_PENDING;
	if (tcp)
		soft_gid_to_sockaddr(&tcp->socket_addresses.peer, &tcp->socket_addresses.own, 0,
				     &peer);
	soft_places_add(&soft_device.links->pending_links, &link->pending, &peer);
	link->timer.expired = pending_expired;
	soft_timer_start(&link->timer, soft_now() + PENDING_TIMEOUT_NS);
	evicted = soft_places_find_victim(&soft_device.links->pending_links,
					  soft_places_limit(MAX_PENDING));
	if (evicted)
		drop_pending(pending_link(evicted));
}

/* Returns whether a channel on the path may replace the stream that the CM created for the queue
 * pair. `link` is NULL if the CM has not handed the stream over yet. */
static bool may_replace_stream(const struct soft_path *path, const struct soft_link *link)
{
	const struct soft_tcp_path *tcp = soft_tcp_path_of(path);

	if (!tcp)
		return true; /* shared memory with a process of the same user */
	/* Queue pairs can share the CM stream of an earlier one if both connect the same addresses
	 * (selection.c). */
	return tcp->created_by_cm && (!link || soft_tcp_path_has_addresses_of(tcp, link->watch.fd));
}

/* Returns whether to refuse an unexpected HELLO immediately, which reveals that no queue pair
 * expects it. This is safe if the peer can use the CM stream instead, or is a process of the same
 * user. */
static bool may_reveal(const struct soft_path *path)
{
	const struct soft_tcp_path *tcp = soft_tcp_path_of(path);

	return !tcp || tcp->created_by_cm;
}

/* Returns whether the path connects the queue pair's device with its peer's device. A process may
 * have fewer devices than its peer. Its first device then also has the addresses of the devices it
 * lacks, so device 0 matches any device number on the same host. */
static bool connects_devices(const struct soft_path *path, const struct soft_qp *qp)
{
	const union ibv_gid peer = soft_qp_peer_gid(qp);
	const int number = soft_gid_hca_number(&peer);
	const uint32_t own = soft_qp_hca(qp)->port_bit;

	/* A path within this process connects two of its own devices, so it uses both ports. */
	if (soft_shm_path_is_self(path))
		return path->ports == (own | soft_hca_at(number)->port_bit);
	return path->ports == own && (path->peer_hca == number ||
				      ((!path->peer_hca || !number) && soft_path_is_local(path)));
}

/* Returns the trace reason why the pending link can never become the queue pair's link, or NULL. */
static const char *rejection_reason(const struct soft_link *link, const struct soft_qp *qp)
{
	const char *reason;

	if (!qp)
		return "QPN";
	/* A UD queue pair has no peer, but a HELLO of zeros could match its unset attributes. */
	if (soft_qp_is_ud(qp))
		return "TRANSPORT";
	if (qp->ibv.state == IBV_QPS_RESET || qp->ibv.state == IBV_QPS_INIT)
		return NULL;
	if (!is_ready(qp))
		return "QP_STATE";
	reason = soft_hello_mismatch(&link->peer_hello, qp);
	if (reason)
		return reason;
	if (!connects_devices(link->request_path, qp))
		return "SOURCE";
	/* A queue pair that has lost its stream for good gets no other one. */
	return qp->stream_lost ? "QP_STATE" : NULL;
}

/* Returns whether the queue pair can accept the pending link now or later. */
static bool is_expected(const struct soft_link *link, const struct soft_qp *qp)
{
	if (rejection_reason(link, qp))
		return false;
	if (!is_ready(qp))
		return true;
	/* With the CM, the channel must replace the CM's socket before a path has been selected.
	 * Without the CM, it must come before the queue pair has a link that is up. */
	if (qp->stream_from_cm)
		return may_replace_stream(link->request_path, soft_link_of(qp)) &&
		       (!qp->link || soft_selection_is_open(soft_link_of(qp)));
	return !qp->link || qp->link->state < SOFT_LINK_SELECTING;
}

/* Returns whether the queue pair may respond to a HELLO now. With the CM, the queue pair must have
 * received its stream. Without the CM, the side that connects first does not respond after it has
 * sent its own HELLO. */
static bool can_respond(const struct soft_qp *qp)
{
	if (!is_ready(qp))
		return false;
	if (qp->stream_from_cm)
		return qp->link;
	return !qp->link || qp->link->state == SOFT_LINK_CONNECTING || !soft_connects_first(qp);
}

/* Accept a pending link. Without the CM, it becomes the queue pair's link. With the CM, its channel
 * is passed to the existing link. */
static void accept_pending(struct soft_link *link, struct soft_qp *qp)
{
	struct soft_link *own = soft_link_of(qp);

	soft_place_release(&link->pending);
	if (qp->stream_from_cm) {
		soft_selection_use_chan(own, link);
		soft_link_finish(link, 0);
		return;
	}
	if (own)
		soft_link_finish(own, 0);
	if (!soft_link_accept_chan(link, link, qp) || soft_link_up(link, qp))
		soft_link_finish(link, ECONNABORTED);
}

/* Returns whether a stream has used up its guesses. Each wrong guess costs one millisecond, and at
 * most one second of credit accumulates. Without credit, a HELLO is refused unchecked. Guessing on
 * one stream is therefore not faster than with one connection per guess (docs/security.md). `tcp`
 * is NULL on a shared-memory path, where the peer belongs to the same user and may guess freely. */
static bool is_out_of_guesses(struct soft_tcp_path *tcp)
{
	uint64_t now = soft_now();

	if (!tcp)
		return false;
	if (tcp->guesses_paid_at + MAX_GUESS_CREDIT_NS < now)
		tcp->guesses_paid_at = now - MAX_GUESS_CREDIT_NS;
	return tcp->guesses_paid_at > now;
}

/* Handle the HELLO of a pending link. */
static void handle_hello(struct soft_link *link)
{
	struct soft_tcp_path *tcp = soft_tcp_path_of(link->request_path);
	/* A correct peer does not send HELLO on a stream that this side opened. */
	bool unchecked = is_out_of_guesses(tcp) || (tcp && tcp->is_initiator);
	struct soft_qp *qp = unchecked ? NULL : soft_qp_find(link->peer_hello.to);
	bool expected = qp && is_expected(link, qp);
	const char *reason = link->peer_hello.kind != SOFT_HELLO ? "PACKET"
			     : unchecked                         ? "GUESSES"
								 : rejection_reason(link, qp);

	if (reason)
		soft_handshake_trace_drop(link, qp, reason);
	if (tcp && !expected && !unchecked)
		tcp->guesses_paid_at += GUESS_COST_NS;
	if (link->peer_hello.kind != SOFT_HELLO || unchecked ||
	    (may_reveal(link->request_path) && !expected))
		drop_pending(link);
	else if (expected && can_respond(qp))
		accept_pending(link, qp);
	else
		add_pending(link);
}

bool soft_handshake_accept_pending(struct soft_qp *qp)
{
	soft_assert_locked();
	struct soft_node *node = soft_device.links->pending_links.peers.next;

	while (node != &soft_device.links->pending_links.peers) {
		struct soft_link *link = soft_container(node, struct soft_link, pending.node);

		node = node->next;
		if (link->peer_hello.to != qp->ibv.qp_num)
			continue;
		if (is_expected(link, qp) && can_respond(qp)) {
			accept_pending(link, qp);
			return true;
		}
		const char *reason = rejection_reason(link, qp);

		if (reason)
			soft_handshake_trace_drop(link, qp, reason);
		/* On other paths, an unexpected HELLO stays pending, so that a guess reveals
		 * nothing. */
		if (may_reveal(link->request_path) && !is_expected(link, qp)) {
			drop_pending(link);
			/* Start over, because drop_pending() may have removed `node` too. */
			node = soft_device.links->pending_links.peers.next;
		}
	}
	return false;
}

/* ---- requests from peers ------------------------------------------------------------------- */

void soft_handshake_requested(struct soft_path *path, uint32_t remote_id,
			      const uint8_t handshake[SOFT_HANDSHAKE_SIZE])
{
	soft_assert_locked();
	struct soft_link *link = soft_link_create(SOFT_LINK_HANDSHAKE);

	if (!link) {
		soft_path_refuse(path, remote_id);
		return;
	}
	link->request_path = path;
	link->request_chan = remote_id;
	link->hello_valid = soft_hello_decode(handshake, &link->peer_hello);
	if (link->hello_valid) {
		handle_hello(link);
	} else {
		SOFT_TRACE_DROPPED(.reason = "HEADER");
		drop_pending(link);
	}
}

void soft_handshake_withdrawn(struct soft_path *path, uint32_t remote_id)
{
	soft_assert_locked();
	soft_list_each_safe (struct soft_link, link, &soft_device.links->pending_links.peers,
			     pending.node)
		if (link->request_path == path &&
		    (remote_id == 0 || link->request_chan == remote_id)) {
			link->request_path = NULL; /* a withdrawn request needs no refusal */
			drop_pending(link);
		}
}
