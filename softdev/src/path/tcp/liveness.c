/* Liveness of the stream to another machine, which can be lost without a sign.
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
 * The channels of a stream share a timer, at the shortest of their times; it fails those whose time
 * is over, and a stream that has been silent for so long is not used for more of them.
 *
 * Within a machine nothing gets lost: a silent peer is a process that has been stopped, and its end
 * would close the socket.
 */
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <linux/sockios.h>

#include "tcp.h"

#define VARIABLE "AIORDMA_EMBEDDED_PATH_TIMEOUT"
#define SECOND_NS 1000000000u

enum {
	DEFAULT = 20, /* seconds: TCP tries about seven times in that time */
	MAX = 3600,
	CHECKS = 4, /* in the time after which silence counts */
	PROBES = 5, /* of the kernel's, in half that time */
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

	/* strtoul would take a sign. */
	if (*text >= '0' && *text <= '9' && !*end && value >= 1 && value <= MAX) {
		soft_device.tcp->liveness_seconds = value;
		return 0;
	}
	return soft_misconfigured(EINVAL, VARIABLE, text, "it is a number of seconds, 1 to %d",
				  MAX);
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
	/* Last: it counts from when something came, and not from now (tcp_sock_set_keepidle_locked). */
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

/* The channel whose time is over, or NULL. */
static struct soft_chan *overdue(const struct soft_tcp_path *tcp, uint64_t quiet)
{
	soft_list_each (struct soft_chan, chan, &tcp->path.chans, node)
		if (chan->patience && quiet >= chan->patience)
			return chan;
	return NULL;
}

/* Something has been under way since then: has anything come back?  An answer to a probe counts,
 * and so does what the peer sends of its own. */
void soft_liveness_check(struct soft_timer *timer)
{
	struct soft_tcp_path *tcp = soft_container(timer, struct soft_tcp_path, liveness_timer);
	struct tcp_info info = {0};
	socklen_t length = sizeof(info);
	uint64_t now = soft_now(), interval = tcp->liveness_limit / CHECKS, quiet, answered;
	struct soft_chan *chan;
	int outstanding = 0;

	/* A check that comes so late: this process or its machine was stopped. */
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
	/* The kernel probes a closed receive window at growing intervals (tcp(7)): then silence
	 * counts only when probes have remained unanswered, also the latest for a whole interval.
	 * One before it often has: a kernel answers them twice a second at most
	 * (tcp_invalid_ratelimit). */
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

void soft_liveness_sent(struct soft_tcp_path *tcp)
{
	if (!tcp->liveness_limit || tcp->liveness_timer.running)
		return;
	tcp->liveness_probes = 0;
	tcp->liveness_since = soft_now() - unanswered_ns(tcp->watch.fd);
	soft_timer_start(&tcp->liveness_timer, soft_now() + tcp->liveness_limit / CHECKS);
}
