/* Liveness checks for TCP streams to another machine, which can fail without closing the stream.
 *
 * While a stream is idle, the kernel probes the other machine (keep-alive) for up to
 * AIORDMA_EMBEDDED_PATH_TIMEOUT seconds. While data is in flight, a timer checks whether the other
 * machine still responds. TCP_USER_TIMEOUT is not used, because it also gives up when the machine
 * answers every probe but the peer's process is stopped. Neither a card nor this device treats a
 * stopped process as a failure.
 *
 * The owners of some queue pairs would learn of a loss neither from the transport nor from the
 * connection manager. While idle, their peers are probed only if a request waits for the peer's
 * device although the peer's kernel has acknowledged it. At other times, nobody would notice the
 * loss, and the queue pair of a card survives any interruption of the path.
 *
 * A queue pair whose timeout and retry count allow a longer wait for a response gets that much time
 * (IBTA 9.7.6.1.3). A queue pair with a timeout of 0 waits as long as the kernel does, and its peer
 * is not probed.
 *
 * Time during which this process was stopped does not count, because the process could not see
 * responses.
 *
 * All channels of a stream share one timer, which follows the channel with the shortest limit. The
 * timer fails every channel whose limit has been exceeded. A stream that has been silent for
 * AIORDMA_EMBEDDED_PATH_TIMEOUT seconds is not used for new channels.
 *
 * Streams within a machine are not checked, because they lose nothing. A silent peer there is a
 * stopped process, and the socket is closed when the process exits.
 */
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <linux/sockios.h>

#include "tcp.h"

#define VARIABLE "AIORDMA_EMBEDDED_PATH_TIMEOUT"
#define SECOND_NS 1000000000u

enum {
	DEFAULT = 20, /* seconds, in which TCP sends an unanswered segment about seven times */
	MAX = 3600,
	CHECKS = 4, /* checks per time limit */
	PROBES = 5, /* keep-alive probes per half of the time limit */
	MIN_UNANSWERED = 2,
};

int soft_liveness_configure(void)
{
	const char *text = getenv(VARIABLE);
	char *end;

	soft_device.tcp->liveness_seconds = DEFAULT;
	if (!text || !*text)
		return 0;
	unsigned long value = strtoul(text, &end, 10);

	/* Check the first character, because strtoul() accepts spaces and a sign. */
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

/* Turn the kernel's keep-alive probes on or off. The stream may be idle for half of the time limit,
 * and up to PROBES probes then share the other half. */
static void set_keepalive(int fd, int on)
{
	const int limit = (int)soft_device.tcp->liveness_seconds;
	const int idle = (limit + 1) / 2, interval = (idle + PROBES - 1) / PROBES;
	const int probes = limit > idle + interval ? (limit - idle) / interval : 1;

	soft_set_option(fd, SOL_SOCKET, SO_KEEPALIVE, on);
	if (!on)
		return;
	soft_set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, interval);
	soft_set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, probes);
	/* Set this option after SO_KEEPALIVE, so that the kernel restarts its timer from the last
	 * input instead of from now (tcp_sock_set_keepidle_locked). */
	soft_set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle);
}

enum { WHILE_IDLE = false, WHILE_WAITING = true };

/* Returns whether any channel requires probes of the other machine, either while it is idle or
 * while it waits for a response. */
static bool has_channel_to_probe(const struct soft_tcp_path *tcp, bool waiting)
{
	soft_list_each (struct soft_chan, chan, &tcp->path.chans, node)
		if (chan->silence_limit_ns && chan->calls->needs_probe(chan, waiting))
			return true;
	return false;
}

/* Probe the other machine while a channel waits for a response, although no data is in flight. */
static void check_idle_stream(struct soft_tcp_path *tcp, uint64_t next_check)
{
	if (has_channel_to_probe(tcp, WHILE_IDLE))
		return; /* keep-alive is already on */
	bool waits = has_channel_to_probe(tcp, WHILE_WAITING);

	set_keepalive(tcp->watch.fd, waits);
	if (waits)
		soft_timer_start(&tcp->liveness_timer, next_check);
}

/* Returns a channel whose limit has been reached after `silence_ns`, or NULL. */
static struct soft_chan *find_overdue(const struct soft_tcp_path *tcp, uint64_t silence_ns)
{
	soft_list_each (struct soft_chan, chan, &tcp->path.chans, node)
		if (chan->silence_limit_ns && silence_ns >= chan->silence_limit_ns)
			return chan;
	return NULL;
}

void soft_liveness_check(struct soft_timer *timer)
{
	struct soft_tcp_path *tcp = soft_container(timer, struct soft_tcp_path, liveness_timer);
	struct tcp_info info = {0};
	socklen_t length = sizeof(info);
	uint64_t now = soft_now(), interval = tcp->liveness_limit_ns / CHECKS, silence_ns,
		 since_last_ack_ns;
	struct soft_chan *chan;
	int outstanding = 0;

	/* Restart the measurement if this check is so late that this process or its machine must
	 * have been stopped. */
	if (now - timer->deadline_ns > interval)
		tcp->silence_start_ns = now;
	silence_ns = now - tcp->silence_start_ns;

	if (ioctl(tcp->watch.fd, SIOCOUTQ, &outstanding) ||
	    getsockopt(tcp->watch.fd, IPPROTO_TCP, TCP_INFO, &info, &length))
		return;
	if (outstanding == 0) {
		tcp->unanswered_probes = 0;
		check_idle_stream(tcp, now + interval);
		return;
	}
	uint32_t previous_probes = tcp->unanswered_probes;

	tcp->unanswered_probes = info.tcpi_probes;
	/* The last ACK may be much older than the data in flight if the stream was idle before. */
	since_last_ack_ns = info.tcpi_last_ack_recv * UINT64_C(1000000);
	if (since_last_ack_ns < silence_ns)
		silence_ns = since_last_ack_ns;
	/* If no segment is in flight although data is outstanding, the peer's receive window is
	 * closed, and the kernel probes it at growing intervals (tcp(7)). A single unanswered probe
	 * is normal, because a kernel answers at most two probes per second
	 * (tcp_invalid_ratelimit). Ignore the silence unless two consecutive checks have found
	 * MIN_UNANSWERED or more unanswered probes. */
	bool window_closed = info.tcpi_unacked == 0;

	soft_timer_start(timer, now + interval);
	if (window_closed &&
	    (previous_probes < MIN_UNANSWERED || info.tcpi_probes < MIN_UNANSWERED))
		return;
	tcp->stale |= silence_ns >= soft_liveness_limit();
	tcp->use_count++;
	while ((chan = find_overdue(tcp, silence_ns)))
		chan->calls->end_after_silence(chan); /* also removes it from the stream */
	soft_tcp_path_release(tcp);
}

void soft_liveness_update(struct soft_path *path)
{
	struct soft_tcp_path *tcp = soft_tcp_path_of(path);

	if (!tcp->needs_liveness_checks)
		return;
	tcp->liveness_limit_ns = 0;
	soft_list_each (struct soft_chan, chan, &path->chans, node)
		if (!tcp->liveness_limit_ns ||
		    (chan->silence_limit_ns && chan->silence_limit_ns < tcp->liveness_limit_ns))
			tcp->liveness_limit_ns = chan->silence_limit_ns;
	set_keepalive(tcp->watch.fd, has_channel_to_probe(tcp, WHILE_IDLE));
	if (!tcp->liveness_limit_ns)
		soft_timer_stop(&tcp->liveness_timer);
}

/* Returns how long, in ns, the peer's machine has already been silent when data is sent. This is
 * the time since the last ACK if the kernel's keep-alive probes are unanswered, and 0 otherwise. If
 * it were always 0, a message from the application would delay the detection of a dead peer. */
static uint64_t silence_before_send_ns(int fd)
{
	struct tcp_info info = {0};
	socklen_t length = sizeof(info);

	if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) || !info.tcpi_probes)
		return 0;
	return info.tcpi_last_ack_recv * UINT64_C(1000000);
}

void soft_liveness_sent(struct soft_tcp_path *tcp)
{
	if (!tcp->liveness_limit_ns || tcp->liveness_timer.running)
		return;
	tcp->unanswered_probes = 0;
	tcp->silence_start_ns = soft_now() - silence_before_send_ns(tcp->watch.fd);
	soft_timer_start(&tcp->liveness_timer, soft_now() + tcp->liveness_limit_ns / CHECKS);
}
