/* Liveness of the path to another machine, which can be lost without a sign.
 *
 * While nothing is under way, the kernel probes the other machine (keep-alive), for
 * AIORDMA_EMBEDDED_PATH_TIMEOUT seconds.  While something is, a timer checks whether anything at all
 * comes back.  That is not TCP_USER_TIMEOUT, which also gives up a peer whose machine answers every
 * probe and whose process has merely been stopped: that is no failure to a card, nor to this device.
 *
 * A queue pair whose owner would not hear of it, the transport or the connection manager, is probed
 * only while a request of it waits for the peer's device, whose kernel has confirmed it already.
 * Otherwise nothing would follow, and on a card it outlives any pause of the path.
 *
 * A queue pair that may wait longer for an answer, by its timeout and retry count, is given its
 * time then (IBTA 9.7.6.1.3); one whose timeout is 0 waits for ever, which is as long as the kernel
 * does, and is not probed.
 *
 * The time in which this process itself was stopped does not count: no answer could be seen.
 *
 * Within a machine nothing gets lost: a silent peer is a process that has been stopped, and its end
 * would close the socket.
 */
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <linux/sockios.h>

#include "link.h"

#define SECOND_NS 1000000000u

enum {
	DEFAULT = 20, /* seconds: TCP tries about seven times in that time */
	MAX = 3600,
	CHECKS = 4, /* in the time after which silence counts */
	PROBES = 5, /* of the kernel's, in half that time */
	UNANSWERED = 2,
};

static uint64_t seconds = DEFAULT;

int soft_liveness_configure(void)
{
	const char *text = getenv("AIORDMA_EMBEDDED_PATH_TIMEOUT");
	char *end;

	seconds = DEFAULT;
	if (!text || !*text)
		return 0;
	unsigned long value = strtoul(text, &end, 10);

	if (!*end && value >= 1 && value <= MAX) {
		seconds = value;
		return 0;
	}
	fprintf(stderr,
		"aiordma: AIORDMA_EMBEDDED_PATH_TIMEOUT is '%s': it is a number of seconds, 1 to "
		"%d\n",
		text, MAX);
	return EINVAL;
}

uint64_t soft_liveness_limit(void)
{
	return seconds * SECOND_NS;
}

/* Both ends have the same address: nothing between them can get lost. */
static bool is_same_host(int fd)
{
	struct sockaddr_storage own = {0}, peer = {0};
	socklen_t own_length = sizeof(own), peer_length = sizeof(peer);

	if (getsockname(fd, (struct sockaddr *)&own, &own_length) ||
	    getpeername(fd, (struct sockaddr *)&peer, &peer_length))
		return false;
	if (own.ss_family == AF_INET6)
		return !memcmp(&((struct sockaddr_in6 *)&own)->sin6_addr,
			       &((struct sockaddr_in6 *)&peer)->sin6_addr, 16);
	return ((struct sockaddr_in *)&own)->sin_addr.s_addr ==
	       ((struct sockaddr_in *)&peer)->sin_addr.s_addr;
}

static void keep_alive(int fd, int on)
{
	const int limit = (int)seconds;
	const int idle = (limit + 1) / 2, interval = (idle + PROBES - 1) / PROBES;
	const int probes = limit > idle + interval ? (limit - idle) / interval : 1;

	setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
	if (!on)
		return;
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
	/* Last: it counts from when something came, and not from now (tcp_sock_set_keepidle_locked). */
	setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
}

static bool is_always_probed(const struct soft_qp *qp)
{
	return qp->ends_with_peer || qp->link_down;
}

/* Everything that was sent has come to the peer's kernel. */
static void nothing_under_way(struct soft_link *link, uint64_t next_check)
{
	const struct soft_qp *qp = link->qp;

	if (!qp || is_always_probed(qp))
		return;
	bool waits = !soft_qp_is_uc(qp) && qp->sq.oldest != qp->sq.next;

	keep_alive(link->watch.fd, waits);
	if (waits)
		soft_timer_start(&link->liveness_timer, next_check);
}

/* Something has been under way since then: has anything come back?  An answer to a probe counts,
 * and so does what the peer sends of its own. */
static void check(struct soft_timer *timer)
{
	struct soft_link *link = soft_container(timer, struct soft_link, liveness_timer);
	struct tcp_info info = {0};
	socklen_t length = sizeof(info);
	uint64_t now = soft_now(), interval = link->liveness_limit / CHECKS, quiet, answered;
	int outstanding = 0;

	/* A check that comes so late: this process or its machine was stopped. */
	if (now - timer->deadline_ns > interval)
		link->liveness_since = now;
	quiet = now - link->liveness_since;

	if (ioctl(link->watch.fd, SIOCOUTQ, &outstanding) ||
	    getsockopt(link->watch.fd, IPPROTO_TCP, TCP_INFO, &info, &length))
		return;
	if (outstanding == 0) {
		nothing_under_way(link, now + interval);
		return;
	}
	answered = info.tcpi_last_ack_recv * UINT64_C(1000000);
	if (answered < quiet)
		quiet = answered;
	/* The kernel probes a closed receive window at growing intervals (tcp(7)): then silence
	 * counts only when probes have remained unanswered. */
	bool probing = info.tcpi_unacked == 0;

	if (quiet >= link->liveness_limit && (!probing || info.tcpi_probes >= UNANSWERED))
		soft_link_finish(link, ETIMEDOUT);
	else
		soft_timer_start(timer, now + interval);
}

void soft_liveness_watch(struct soft_link *link)
{
	const int on = 1;
	const struct soft_qp *qp = link->qp;
	uint64_t limit = soft_liveness_limit();

	/* Not a TCP socket: nothing to be set. */
	if (link->watch.fd < 0 ||
	    setsockopt(link->watch.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) ||
	    is_same_host(link->watch.fd))
		return;
	if (!soft_qp_is_uc(qp) && qp->ibv.state == IBV_QPS_RTS) {
		if (qp->attr.timeout == 0)
			limit = 0;
		else if (limit < soft_qp_retry_time(qp))
			limit = soft_qp_retry_time(qp);
	}
	link->liveness_limit = limit;
	link->liveness_timer.expired = check;
	if (limit && is_always_probed(qp))
		keep_alive(link->watch.fd, 1);
	if (!limit)
		soft_timer_stop(&link->liveness_timer);
}

/* How long the peer has been silent while the kernel's probes ask it: what is sent meanwhile, such as
 * a keep-alive of the application's, begins no time of its own. */
static uint64_t unanswered_ns(int fd)
{
	struct tcp_info info = {0};
	socklen_t length = sizeof(info);

	if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) || !info.tcpi_probes)
		return 0;
	return info.tcpi_last_ack_recv * UINT64_C(1000000);
}

void soft_liveness_sent(struct soft_link *link)
{
	if (!link->liveness_limit || link->liveness_timer.running)
		return;
	link->liveness_since = soft_now() - unanswered_ns(link->watch.fd);
	soft_timer_start(&link->liveness_timer, soft_now() + link->liveness_limit / CHECKS);
}
