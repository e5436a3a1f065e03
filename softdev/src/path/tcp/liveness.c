/* Liveness of TCP streams to another machine, which can disappear without a sign.
 *
 * While nothing is in flight, the kernel probes the other machine (keep-alive) for
 * AIORDMA_EMBEDDED_PATH_TIMEOUT seconds. While something is, a timer checks whether anything comes
 * back. TCP_USER_TIMEOUT is not used, because it also gives up a peer whose machine answers every
 * probe and whose process has only been stopped. That is not a failure for a card, and not for this
 * device.
 *
 * If neither the transport nor the connection manager would report the loss to a queue pair's
 * owner, the machine is probed only while a request that its kernel has already confirmed waits for
 * the peer's device. Otherwise nothing would follow from the loss, and on a card the queue pair
 * outlives any pause of the path.
 *
 * A queue pair that may wait longer for a response, according to its timeout and retry count, gets
 * this time (IBTA 9.7.6.1.3). A queue pair whose timeout is 0 waits as long as the kernel does, and
 * is not probed.
 *
 * The time during which this process itself was stopped does not count, because it could not see
 * responses.
 *
 * The channels of a stream share a timer with the shortest of their times. It fails the channels
 * whose time is over. A stream that has been silent for so long is not used for other channels.
 *
 * Within a machine nothing is lost: a silent peer is a stopped process, and its end would close the
 * socket.
 */
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <linux/sockios.h>

#include "tcp.h"

#define VARIABLE "AIORDMA_EMBEDDED_PATH_TIMEOUT"
#define SECOND_NS 1000000000u

enum {
	DEFAULT = 20, /* seconds, in which TCP makes about seven attempts */
	MAX = 3600,
	CHECKS = 4, /* checks within the time limit */
	PROBES = 5, /* keep-alive probes within half of the time limit */
	UNANSWERED = 2,
};

int soft_liveness_configure(void)
{
	const char *text = getenv(VARIABLE);
	char *end;

	soft_device.tcp->liveness_seconds = DEFAULT;
	if (!text || !*text)
		return 0;
	unsigned long value = strtoul(text, &end, 10);

	/* strtoul would accept a sign. */
	if (*text >= '0' && *text <= '9' && !*end && value >= 1 && value <= MAX) {
		soft_device.tcp->liveness_seconds = value;
		return 0;
	}
	return soft_misconfigured(EINVAL, VARIABLE, text,
				  "expected a number of seconds from 1 to %d", MAX);
}

uint64_t soft_liveness_limit(void)
{
	return soft_device.tcp->liveness_seconds * SECOND_NS;
}

static void keep_alive(int fd, int on)
{
	const int limit = (int)soft_device.tcp->liveness_seconds;
	const int idle = (limit + 1) / 2, interval = (idle + PROBES - 1) / PROBES;
	const int probes = limit > idle + interval ? (limit - idle) / interval : 1;

	soft_set_option(fd, SOL_SOCKET, SO_KEEPALIVE, on);
	if (!on)
		return;
	soft_set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, interval);
	soft_set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, probes);
	/* Set this option last: its time starts at the last input, not now
	 * (tcp_sock_set_keepidle_locked). */
	soft_set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle);
}

static bool any_is_probed(const struct soft_tcp_path *tcp, bool waiting)
{
	soft_list_each (struct soft_chan, chan, &tcp->path.chans, node)
		if (chan->patience && chan->calls->probes(chan, waiting))
			return true;
	return false;
}

static void nothing_under_way(struct soft_tcp_path *tcp, uint64_t next_check)
{
	if (any_is_probed(tcp, false))
		return;
	bool waits = any_is_probed(tcp, true);

	keep_alive(tcp->watch.fd, waits);
	if (waits)
		soft_timer_start(&tcp->liveness_timer, next_check);
}

/* Returns a channel whose time is over, or NULL. */
static struct soft_chan *overdue(const struct soft_tcp_path *tcp, uint64_t quiet)
{
	soft_list_each (struct soft_chan, chan, &tcp->path.chans, node)
		if (chan->patience && quiet >= chan->patience)
			return chan;
	return NULL;
}

/* Check whether anything has come back since something was sent. Answers to probes count, and so
 * does everything else that the peer sends. */
void soft_liveness_check(struct soft_timer *timer)
{
	struct soft_tcp_path *tcp = soft_container(timer, struct soft_tcp_path, liveness_timer);
	struct tcp_info info = {0};
	socklen_t length = sizeof(info);
	uint64_t now = soft_now(), interval = tcp->liveness_limit / CHECKS, quiet, answered;
	struct soft_chan *chan;
	int outstanding = 0;

	/* A check that runs this late means that this process or its machine was stopped. */
	if (now - timer->deadline_ns > interval)
		tcp->liveness_since = now;
	quiet = now - tcp->liveness_since;

	if (ioctl(tcp->watch.fd, SIOCOUTQ, &outstanding) ||
	    getsockopt(tcp->watch.fd, IPPROTO_TCP, TCP_INFO, &info, &length))
		return;
	if (outstanding == 0) {
		tcp->liveness_probes = 0;
		nothing_under_way(tcp, now + interval);
		return;
	}
	uint32_t before = tcp->liveness_probes;

	tcp->liveness_probes = info.tcpi_probes;
	answered = info.tcpi_last_ack_recv * UINT64_C(1000000);
	if (answered < quiet)
		quiet = answered;
	/* The kernel probes a closed receive window at growing intervals (tcp(7)). Silence counts
	 * only if probes, including the latest, have been unanswered for a whole interval. A single
	 * one often is, because a kernel answers at most two per second (tcp_invalid_ratelimit). */
	bool probing = info.tcpi_unacked == 0;

	soft_timer_start(timer, now + interval);
	if (probing && (before < UNANSWERED || info.tcpi_probes < UNANSWERED))
		return;
	tcp->stale |= quiet >= soft_liveness_limit();
	tcp->busy++;
	while ((chan = overdue(tcp, quiet)))
		chan->calls->silent(chan);
	soft_tcp_path_release(tcp);
}

void soft_liveness_watch(struct soft_path *path)
{
	struct soft_tcp_path *tcp = soft_tcp_path_of(path);

	if (!tcp->watched)
		return;
	tcp->liveness_limit = 0;
	soft_list_each (struct soft_chan, chan, &path->chans, node)
		if (!tcp->liveness_limit ||
		    (chan->patience && chan->patience < tcp->liveness_limit))
			tcp->liveness_limit = chan->patience;
	keep_alive(tcp->watch.fd, any_is_probed(tcp, false));
	if (!tcp->liveness_limit)
		soft_timer_stop(&tcp->liveness_timer);
}

/* Returns how long the peer has not answered the kernel's probes. What is sent in the meantime,
 * such as the application's keep-alive messages, does not restart this time. */
static uint64_t unanswered_ns(int fd)
{
	struct tcp_info info = {0};
	socklen_t length = sizeof(info);

	if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) || !info.tcpi_probes)
		return 0;
	return info.tcpi_last_ack_recv * UINT64_C(1000000);
}

void soft_liveness_sent(struct soft_tcp_path *tcp)
{
	if (!tcp->liveness_limit || tcp->liveness_timer.running)
		return;
	tcp->liveness_probes = 0;
	tcp->liveness_since = soft_now() - unanswered_ns(tcp->watch.fd);
	soft_timer_start(&tcp->liveness_timer, soft_now() + tcp->liveness_limit / CHECKS);
}
