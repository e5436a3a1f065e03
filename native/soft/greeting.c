/* Streams without a connection manager.
 *
 * Two queue pairs that were told each other's address (QP number, LID, GID) by their applications
 * need one stream between them.  The one with the smaller QP number (LID, GID if need be) connects
 * to the other's data listener when it becomes ready to receive, and says HELLO; the other answers
 * WELCOME when it is ready to receive from exactly this peer.  Both tell the PSNs they know, which
 * were random numbers of the applications' own: who does not know them is not the peer.
 *
 * Either side may be late.  The listener may not be there yet: the connecting side tries again,
 * seldom in the end, until its queue pair leaves RTR and RTS.  The queue pair may not be ready yet:
 * its HELLO is held for a while.  Strangers are bounded in number and time.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "link.h"
#include "neighbour.h"

enum {
	SECOND_ROUND = 7, /* attempts: the delay has reached its most */
	STRANGERS = 256,  /* streams accepted whose queue pair is not known or not ready */
};

#define PATIENCE_NS 10000000000u
#define RETRY_LEAST_NS 1000000u
#define RETRY_MOST_NS 100000000u
#define RETRY_SELDOM_NS 1000000000u

static const char magic[8] = "aiordma";

static struct soft_link *strangers[STRANGERS]; /* unordered */
static int stranger_count;

static void attempt(struct soft_link *link);

/* ---- the greeting -------------------------------------------------------------------------- */

void soft_greeting_encode(uint8_t *at, const struct soft_greeting *greeting)
{
	memset(at, 0, SOFT_GREETING);
	memcpy(at, magic, sizeof(magic));
	soft_put32(at + 8, SOFT_WIRE_VERSION | (uint32_t)greeting->kind << 16);
	soft_put32(at + 12, greeting->from);
	soft_put32(at + 16, greeting->to);
	soft_put32(at + 20, greeting->receive_psn);
	soft_put32(at + 24, greeting->send_psn);
	soft_put32(at + 28, greeting->flags);
}

bool soft_greeting_decode(const uint8_t *at, struct soft_greeting *greeting)
{
	uint32_t word = soft_take32(at + 8);

	greeting->kind = (uint16_t)(word >> 16);
	greeting->from = soft_take32(at + 12);
	greeting->to = soft_take32(at + 16);
	greeting->receive_psn = soft_take32(at + 20);
	greeting->send_psn = soft_take32(at + 24);
	greeting->flags = soft_take32(at + 28);
	return !memcmp(at, magic, sizeof(magic)) && (word & 0xffff) == SOFT_WIRE_VERSION;
}

/* Is it our peer who says this?  What neither side knows yet is compared in soft_greeting_check. */
static bool agrees(const struct soft_greeting *greeting, const struct soft_qp *qp)
{
	bool sends = qp->ibv.state != IBV_QPS_RTR;

	return !(greeting->flags & SOFT_GREETING_UNRELIABLE) == !soft_qp_is_uc(qp) &&
	       greeting->from == qp->attr.dest_qp_num && greeting->to == qp->ibv.qp_num &&
	       (!(greeting->flags & SOFT_GREETING_SENDS) ||
		greeting->send_psn == qp->attr.rq_psn) &&
	       (!sends || greeting->receive_psn == qp->attr.sq_psn);
}

static bool say(struct soft_link *link, const struct soft_qp *qp, enum soft_greeting_kind kind)
{
	bool sends = qp->ibv.state != IBV_QPS_RTR;
	uint8_t bytes[SOFT_GREETING];

	soft_greeting_encode(bytes, &(struct soft_greeting){
					    .kind = (uint16_t)kind,
					    .from = qp->ibv.qp_num,
					    .to = qp->attr.dest_qp_num,
					    .receive_psn = qp->attr.rq_psn,
					    .send_psn = sends ? qp->attr.sq_psn : 0,
					    .flags = (sends ? SOFT_GREETING_SENDS : 0u) |
						     (soft_qp_is_uc(qp) ? SOFT_GREETING_UNRELIABLE : 0u),
				    });
	/* The first bytes of a stream: there is room for them. */
	return send(link->out.fd, bytes, sizeof(bytes), MSG_NOSIGNAL) == (ssize_t)sizeof(bytes);
}

void soft_greeting_check(struct soft_qp *qp)
{
	struct soft_link *link = qp->link;

	if (!link || link->state != SOFT_LINK_UP || !link->greeted ||
	    link->greeting.receive_psn == qp->attr.sq_psn)
		return;
	/* Whoever that is would take none of our requests: so they fail as unanswered ones. */
	soft_link_leave(link);
	qp->stream_lost = true;
}

/* ---- strangers ----------------------------------------------------------------------------- */

static void forget_stranger(const struct soft_link *link)
{
	for (int i = 0; i < stranger_count; i++)
		if (strangers[i] == link) {
			strangers[i] = strangers[--stranger_count];
			return;
		}
}

static void drop_stranger(struct soft_link *link)
{
	forget_stranger(link);
	soft_link_finish(link, 0);
}

static void stranger_expired(struct soft_timer *timer)
{
	drop_stranger(soft_container(timer, struct soft_link, timer));
}

void soft_greeting_accepted(int fd)
{
	struct soft_link *link;

	if (stranger_count == STRANGERS) {
		/* Who has waited longest has had its chance: its timer ends first. */
		link = strangers[0];
		for (int i = 1; i < stranger_count; i++)
			if (strangers[i]->timer.deadline_ns < link->timer.deadline_ns)
				link = strangers[i];
		drop_stranger(link);
	}
	link = soft_link_create(fd, SOFT_LINK_GREETING);
	if (!link) {
		close(fd);
		return;
	}
	strangers[stranger_count++] = link;
	link->timer.expired = stranger_expired;
	soft_timer_start(&link->timer, soft_now() + PATIENCE_NS);
	if (soft_watch(&link->in, EPOLLIN))
		drop_stranger(link);
}

static bool is_ready(const struct soft_qp *qp)
{
	return qp->ibv.state == IBV_QPS_RTR || qp->ibv.state == IBV_QPS_RTS ||
	       qp->ibv.state == IBV_QPS_SQD || qp->ibv.state == IBV_QPS_SQE;
}

/* The stranger has said whom it wants.  True when it is a stranger no more. */
static bool introduce(struct soft_link *link, struct soft_qp *qp)
{
	if (!is_ready(qp) || qp->link || qp->stream_lost || qp->stream_from_cm ||
	    !agrees(&link->greeting, qp) || !say(link, qp, SOFT_GREETING_WELCOME))
		return false;
	forget_stranger(link);
	if (soft_link_up(link, qp))
		soft_link_finish(link, ECONNABORTED);
	return true;
}

static void hello(struct soft_link *link)
{
	struct soft_qp *qp = soft_qp_find(link->greeting.to);

	if (link->greeting.kind != SOFT_GREETING_HELLO || !qp) {
		drop_stranger(link);
		return;
	}
	if (introduce(link, qp))
		return;
	if (qp->ibv.state == IBV_QPS_RESET || qp->ibv.state == IBV_QPS_INIT)
		link->state = SOFT_LINK_HELD;
	else
		drop_stranger(link);
}

/* A queue pair has become ready: is its peer waiting already? */
static void look_for_peer(struct soft_qp *qp)
{
	for (int i = 0; i < stranger_count; i++)
		if (strangers[i]->state == SOFT_LINK_HELD &&
		    strangers[i]->greeting.to == qp->ibv.qp_num) {
			if (introduce(strangers[i], qp))
				return;
			drop_stranger(strangers[i--]);
		}
}

void soft_greeting_forget(void)
{
	stranger_count = 0;
}

/* ---- connecting ---------------------------------------------------------------------------- */

static void try_again(struct soft_timer *timer)
{
	attempt(soft_container(timer, struct soft_link, timer));
}

static void later(struct soft_link *link)
{
	uint64_t delay = RETRY_LEAST_NS << (link->attempts < 7 ? link->attempts : 7);

	if (delay > RETRY_MOST_NS)
		delay = RETRY_MOST_NS;
	if (link->attempts++ > 100)
		delay = RETRY_SELDOM_NS;
	soft_unwatch(&link->in);
	if (link->in.fd >= 0)
		close(link->in.fd);
	link->in.fd = link->out.fd = -1;
	link->state = SOFT_LINK_CONNECTING;
	link->header_have = 0;
	link->timer.expired = try_again;
	soft_timer_start(&link->timer, soft_now() + delay);
}

static const union ibv_gid *peer_gid(const struct soft_qp *qp)
{
	/* An address without a GID is one of the same host: nothing else has a LID alone. */
	return qp->attr.ah_attr.is_global ? &qp->attr.ah_attr.grh.dgid : &soft_gid_loopback;
}

/* From the address that the queue pair has chosen, if it says one that others can see: of several
 * networks, that is the one to go by. */
static int bind_source(int fd, const struct ibv_ah_attr *ah)
{
	struct sockaddr_storage address;
	struct soft_gid own;
	const int on = 1;

	if (!ah->is_global || ah->grh.sgid_index == SOFT_GID_LOOPBACK)
		return 0;
	if (soft_gid_at(ah->grh.sgid_index, &own))
		return EADDRNOTAVAIL;
	/* The port with connect(), so that one port serves connections to several places: ip(7). */
	setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
	return bind(fd, (struct sockaddr *)&address, soft_gid_address(&own.gid, 0, &address)) ?
		       errno :
		       0;
}

static void attempt(struct soft_link *link)
{
	const struct soft_qp *qp = link->qp;
	struct sockaddr_storage address;
	socklen_t length = soft_gid_address(peer_gid(qp), qp->attr.ah_attr.dlid, &address);
	int fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	link->in.fd = link->out.fd = fd;
	if (fd < 0 || bind_source(fd, &qp->attr.ah_attr) ||
	    (connect(fd, (struct sockaddr *)&address, length) && errno != EINPROGRESS) ||
	    soft_watch(&link->in, EPOLLOUT)) {
		later(link);
		return;
	}
	link->state = SOFT_LINK_CONNECTING;
	soft_timer_start(&link->timer, soft_now() + 2 * PATIENCE_NS);
}

static void connected(struct soft_link *link)
{
	int error = 0;
	socklen_t length = sizeof(error);

	if (getsockopt(link->in.fd, SOL_SOCKET, SO_ERROR, &error, &length) || error ||
	    !say(link, link->qp, SOFT_GREETING_HELLO) || soft_watch(&link->in, EPOLLIN)) {
		later(link);
		return;
	}
	link->state = SOFT_LINK_GREETING;
}

static void welcome(struct soft_link *link)
{
	struct soft_qp *qp = link->qp;

	if (link->greeting.kind != SOFT_GREETING_WELCOME || !agrees(&link->greeting, qp)) {
		uint8_t bytes[SOFT_FRAME_HEADER];

		/* It takes us for its peer, but we know better: an orderly end. */
		soft_frame_encode(bytes, &(struct soft_frame){.opcode = SOFT_DISCONNECT});
		(void)!send(link->out.fd, bytes, sizeof(bytes), MSG_NOSIGNAL);
		later(link);
		return;
	}
	if (soft_link_up(link, qp))
		soft_link_finish(link, ECONNABORTED);
}

void soft_greeting_ready(struct soft_link *link, uint32_t events)
{
	(void)events;
	if (link->state == SOFT_LINK_CONNECTING) {
		connected(link);
		return;
	}
	/* Exactly the greeting: what comes after it is the queue pair's.  While a HELLO is held
	 * its sender has nothing to say. */
	ssize_t n = link->state == SOFT_LINK_HELD ?
			    0 :
			    recv(link->in.fd, link->header + link->header_have,
				 SOFT_GREETING - link->header_have, 0);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n > 0) {
		link->header_have += (uint32_t)n;
		if (link->header_have < SOFT_GREETING)
			return;
		link->header_have = 0;
		if (soft_greeting_decode(link->header, &link->greeting)) {
			link->greeted = true;
			if (link->qp)
				welcome(link);
			else
				hello(link);
			return;
		}
	}
	if (link->qp)
		later(link);
	else
		drop_stranger(link);
}

/* ---- the queue pair's side ----------------------------------------------------------------- */

static bool is_self(const struct soft_qp *qp)
{
	return qp->attr.dest_qp_num == qp->ibv.qp_num &&
	       qp->attr.ah_attr.dlid == soft_listener_port() && soft_gid_is_local(peer_gid(qp));
}

static bool we_connect(const struct soft_qp *qp)
{
	struct soft_gid own = {.gid = soft_gid_loopback};
	uint16_t lid = soft_listener_port();

	if (qp->ibv.qp_num != qp->attr.dest_qp_num)
		return qp->ibv.qp_num < qp->attr.dest_qp_num;
	if (lid != qp->attr.ah_attr.dlid)
		return lid < qp->attr.ah_attr.dlid;
	if (qp->attr.ah_attr.is_global)
		soft_gid_at(qp->attr.ah_attr.grh.sgid_index, &own);
	return memcmp(&own.gid, peer_gid(qp), sizeof(own.gid)) < 0;
}

static struct soft_link *connecting(struct soft_qp *qp)
{
	struct soft_link *link = soft_link_create(-1, SOFT_LINK_CONNECTING);

	if (!link)
		return NULL;
	link->qp = qp;
	qp->link = link;
	return link;
}

/* RTR.  Whatever fails here is as if the peer could not be reached: requests will tell. */
void soft_greeting_begin(struct soft_qp *qp)
{
	const struct ibv_ah_attr *ah = &qp->attr.ah_attr;
	struct soft_gid own;
	struct soft_link *link;

	qp->stream_from_cm = ah->dlid == 0;
	if (qp->stream_from_cm) {
		soft_cm_offer(qp);
		return;
	}
	if (is_self(qp)) {
		soft_link_up_to_self(qp);
		return;
	}
	if (ah->is_global && !soft_gid_at(ah->grh.sgid_index, &own))
		soft_listener_open(&own.gid);
	if (!we_connect(qp)) {
		look_for_peer(qp);
		return;
	}
	link = connecting(qp);
	if (link)
		attempt(link);
}

/* Not at once, lest the two keep each other busy.  The other side may have been quicker. */
void soft_greeting_again(struct soft_qp *qp)
{
	struct soft_link *link;

	if (is_self(qp)) {
		soft_link_up_to_self(qp);
		return;
	}
	if (!we_connect(qp)) {
		look_for_peer(qp);
		return;
	}
	link = connecting(qp);
	if (!link)
		return;
	link->attempts = SECOND_ROUND;
	later(link);
}

/* ---- ways ---------------------------------------------------------------------------------- */

/* No link goes through shared memory yet: who asks for that finds the TCP port. */
void soft_greeting_called(struct soft_neighbour *neighbour, uint32_t peer,
			  const uint8_t greeting[SOFT_GREETING])
{
	(void)greeting;
	soft_neighbour_refuse(neighbour, peer);
}

void soft_greeting_uncalled(struct soft_neighbour *neighbour, uint32_t peer)
{
	/* All were refused at once: none is held. */
	(void)neighbour;
	(void)peer;
}
