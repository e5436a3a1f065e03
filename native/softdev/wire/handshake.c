/* Links without a connection manager: the greeting, and the side that is reached.
 *
 * Two queue pairs that were told each other's address (QP number, LID, GID) by their applications
 * need one link between them.  The one with the smaller QP number (LID, GID if need be) connects to
 * the other's process when it becomes ready to receive (active_connect.c), and says HELLO; the other answers
 * WELCOME when it is ready to receive from exactly this peer.  Both tell the PSNs they know, which
 * were random numbers of the applications' own: who does not know them is not the peer.
 *
 * The queue pair may not be ready yet: its HELLO is held for a while.  Strangers are bounded in
 * number and time, wherever they come from.
 */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "link.h"

enum {
	STRANGERS = 256
}; /* links asked for whose queue pair is not known or not ready */

#define PATIENCE_NS 10000000000u

static const char magic[8] = "aiordma";

static struct soft_link *strangers[STRANGERS]; /* unordered */
static int stranger_count;

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

bool soft_greeting_agrees(const struct soft_greeting *greeting, const struct soft_qp *qp)
{
	bool sends = qp->ibv.state != IBV_QPS_RTR;

	return !(greeting->flags & SOFT_GREETING_UNRELIABLE) == !soft_qp_is_uc(qp) &&
	       greeting->from == qp->attr.dest_qp_num && greeting->to == qp->ibv.qp_num &&
	       (!(greeting->flags & SOFT_GREETING_SENDS) ||
		greeting->send_psn == qp->attr.rq_psn) &&
	       (!sends || greeting->receive_psn == qp->attr.sq_psn);
}

void soft_greeting_write(uint8_t *at, const struct soft_qp *qp, enum soft_greeting_kind kind)
{
	bool sends = qp->ibv.state != IBV_QPS_RTR;

	soft_greeting_encode(at,
			     &(struct soft_greeting){
				     .kind = (uint16_t)kind,
				     .from = qp->ibv.qp_num,
				     .to = qp->attr.dest_qp_num,
				     .receive_psn = qp->attr.rq_psn,
				     .send_psn = sends ? qp->attr.sq_psn : 0,
				     .flags = (sends ? SOFT_GREETING_SENDS : 0u) |
					      (soft_qp_is_uc(qp) ? SOFT_GREETING_UNRELIABLE : 0u),
			     });
}

bool soft_greeting_say(struct soft_link *link, const struct soft_qp *qp,
		       enum soft_greeting_kind kind)
{
	uint8_t bytes[SOFT_GREETING];

	soft_greeting_write(bytes, qp, kind);
	/* The first bytes of a stream: there is room for them. */
	return send(link->source.fd, bytes, sizeof(bytes), MSG_NOSIGNAL | MSG_DONTWAIT) ==
	       (ssize_t)sizeof(bytes);
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
	if (link->caller)
		soft_neighbour_refuse(link->caller, link->caller_way);
	soft_link_finish(link, 0);
}

static void stranger_expired(struct soft_timer *timer)
{
	drop_stranger(soft_container(timer, struct soft_link, timer));
}

static void add_stranger(struct soft_link *link)
{
	if (stranger_count == STRANGERS) {
		/* Who has waited longest has had its chance: its timer ends first. */
		struct soft_link *oldest = strangers[0];

		for (int i = 1; i < stranger_count; i++)
			if (strangers[i]->timer.deadline_ns < oldest->timer.deadline_ns)
				oldest = strangers[i];
		drop_stranger(oldest);
	}
	strangers[stranger_count++] = link;
	link->timer.expired = stranger_expired;
	soft_timer_start(&link->timer, soft_now() + PATIENCE_NS);
}

static bool is_ready(const struct soft_qp *qp)
{
	return qp->ibv.state == IBV_QPS_RTR || qp->ibv.state == IBV_QPS_RTS ||
	       qp->ibv.state == IBV_QPS_SQD || qp->ibv.state == IBV_QPS_SQE;
}

/* Can the queue pair take the stranger as its peer, now or soon? */
static bool is_expected(const struct soft_link *link, const struct soft_qp *qp)
{
	if (!is_ready(qp))
		return qp->ibv.state == IBV_QPS_RESET || qp->ibv.state == IBV_QPS_INIT;
	if (qp->stream_lost || !soft_greeting_agrees(&link->greeting, qp))
		return false;
	return qp->stream_from_cm ? link->caller && (!qp->link || soft_choice_is_open(qp->link))
				  : !qp->link;
}

/* With the CM, not before the queue pair has got its stream. */
static bool may_answer(const struct soft_qp *qp)
{
	return is_ready(qp) && !qp->stream_from_cm == !qp->link;
}

/* The stranger is one no more. */
static void introduce(struct soft_link *link, struct soft_qp *qp)
{
	forget_stranger(link);
	if (qp->link) {
		soft_choice_way(qp->link, link);
		soft_link_finish(link, 0);
	} else if (!(link->caller ? soft_link_answer_way(link, link, qp)
				  : soft_greeting_say(link, qp, SOFT_GREETING_WELCOME)) ||
		   soft_link_up(link, qp)) {
		soft_link_finish(link, ECONNABORTED);
	}
}

/* The stranger has said whom it wants. */
static void hello(struct soft_link *link)
{
	struct soft_qp *qp = soft_qp_find(link->greeting.to);

	if (link->greeting.kind != SOFT_GREETING_HELLO || !qp || !is_expected(link, qp)) {
		drop_stranger(link);
	} else if (may_answer(qp)) {
		introduce(link, qp);
	} else {
		link->state = SOFT_LINK_HELD;
		if (link->caller)
			add_stranger(link);
	}
}

void soft_greeting_look(struct soft_qp *qp)
{
	for (int i = 0; i < stranger_count; i++) {
		struct soft_link *link = strangers[i];

		if (link->state != SOFT_LINK_HELD || link->greeting.to != qp->ibv.qp_num)
			continue;
		if (!is_expected(link, qp)) {
			drop_stranger(link);
			i--;
		} else if (may_answer(qp)) {
			introduce(link, qp);
			return;
		}
	}
}

void soft_greeting_forget(void)
{
	stranger_count = 0;
}

/* ---- where they come from ------------------------------------------------------------------ */

void soft_greeting_accepted(int fd)
{
	struct soft_link *link = soft_link_create(fd, SOFT_LINK_GREETING);

	if (!link) {
		close(fd);
		return;
	}
	add_stranger(link);
	if (soft_watch(&link->source, EPOLLIN))
		drop_stranger(link);
}

void soft_greeting_called(struct soft_neighbour *neighbour, uint32_t peer,
			  const uint8_t greeting[SOFT_GREETING])
{
	struct soft_link *link = soft_link_create(-1, SOFT_LINK_GREETING);

	if (!link) {
		soft_neighbour_refuse(neighbour, peer);
		return;
	}
	link->caller = neighbour;
	link->caller_way = peer;
	memcpy(link->header, greeting, SOFT_GREETING); /* which it could change while we look */
	link->greeted = soft_greeting_decode(link->header, &link->greeting);
	if (link->greeted)
		hello(link);
	else
		drop_stranger(link);
}

void soft_greeting_uncalled(struct soft_neighbour *neighbour, uint32_t peer)
{
	for (int i = stranger_count - 1; i >= 0; i--)
		if (strangers[i]->caller == neighbour &&
		    (peer == 0 || strangers[i]->caller_way == peer)) {
			strangers[i]->caller = NULL;
			drop_stranger(strangers[i]);
		}
}

/* ---- a socket has something to say --------------------------------------------------------- */

static void give_up(struct soft_link *link)
{
	if (link->qp)
		soft_dial_later(link);
	else
		drop_stranger(link);
}

void soft_greeting_ready(struct soft_link *link)
{
	ssize_t n;

	if (link->state == SOFT_LINK_CONNECTING) {
		soft_dial_connected(link);
		return;
	}
	if (link->state == SOFT_LINK_HELD) { /* its sender has nothing to say meanwhile */
		drop_stranger(link);
		return;
	}
	/* Exactly the greeting: what comes after it is the queue pair's. */
	n = recv(link->source.fd, link->header + link->header_have,
		 SOFT_GREETING - link->header_have, 0);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		give_up(link);
		return;
	}
	link->header_have += (uint32_t)n;
	if (link->header_have < SOFT_GREETING)
		return;
	link->header_have = 0;
	link->greeted = soft_greeting_decode(link->header, &link->greeting);
	if (!link->greeted)
		give_up(link);
	else if (link->qp)
		soft_dial_welcome(link);
	else
		hello(link);
}
