/* Test a stream between two addresses, which the device treats as a stream to another machine
 * (liveness.c). The tests run in a network namespace, so that they can cut the path. */
#define _GNU_SOURCE /* unshare */
#include "link/link_internal.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/ioctl.h>

#include "verbs_side.h"

enum {
	BIG = 8 << 20,
	LIMIT_US = 1000000, /* AIORDMA_EMBEDDED_PATH_TIMEOUT is 1 */
};

/* Set the namespace's loopback interface up or down. Returns false if this user is not permitted to
 * do so. */
static bool set_loopback(bool up)
{
	struct ifreq request = {.ifr_name = "lo", .ifr_flags = up ? IFF_UP : 0};
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	CHECK(fd >= 0);
	bool done = !ioctl(fd, SIOCSIFFLAGS, &request);

	close(fd);
	return done;
}

static bool enter_own_network(void)
{
	return (!unshare(CLONE_NEWNET) || !unshare(CLONE_NEWUSER | CLONE_NEWNET)) &&
	       set_loopback(true);
}

/* Connect a stream from 127.0.0.1 to 127.0.0.2. Returns the device's end, and stores the test's end
 * in `*other`. */
static int connect_streams(int *other)
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	socklen_t length = sizeof(address);
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	inet_pton(AF_INET, "127.0.0.2", &address.sin_addr);
	CHECK_OK(bind(listener, (struct sockaddr *)&address, length));
	CHECK_OK(listen(listener, 1));
	CHECK_OK(getsockname(listener, (struct sockaddr *)&address, &length));
	CHECK_OK(connect(fd, (struct sockaddr *)&address, length));
	*other = accept(listener, NULL, NULL);
	CHECK(*other >= 0);
	close(listener);
	CHECK_OK(fcntl(fd, F_SETFL, O_NONBLOCK));
	return fd;
}

/* Open a side with a stream to another address. Returns the device's end of the stream, and stores
 * the test's end in `*other`. */
static int open_side_with_remote_stream(struct side *a, int *other, struct options options)
{
	open_side(a, options);
	bring_up(a, &(struct address){.qpn = 1});
	int fd = connect_streams(other);

	soft_lock();
	CHECK_OK(soft_qp_adopt(soft_qp_of(a->qp), fd, NULL, 0));
	soft_unlock();
	return fd;
}

static int open_probed_side_with_remote_stream(struct side *a, int *other, uint8_t timeout)
{
	return open_side_with_remote_stream(
		a, other,
		(struct options){
			.memory = BIG, .timeout = timeout, .retry_cnt = 8, .ends_with_peer = true});
}

static void write_bytes(struct side *a, uint32_t length)
{
	POST(a, IBV_WR_RDMA_WRITE, .wr_id = 1, .length = length);
}

static struct soft_tcp_path path_of(const struct side *a)
{
	return LOCKED(*soft_tcp_path_of(soft_link_of(soft_qp_of(a->qp))->chan.path));
}

static int option(int fd, int level, int name)
{
	int value = -1;
	socklen_t length = sizeof(value);

	CHECK_OK(getsockopt(fd, level, name, &value, &length));
	return value;
}

/* Check that the device keeps a path whose peer has stopped reading, as long as the peer's machine
 * responds. The peer's process may only be stopped. The test lasts until the kernel's probes, whose
 * intervals grow, are further apart than the time limit. */
static void path_is_kept_while_the_peer_is_stopped(void)
{
	uint64_t last = 0;
	struct side a;
	int other;

	open_probed_side_with_remote_stream(&a, &other, 1);
	write_bytes(&a, BIG); /* more than the socket buffers hold */
	for (int looks = 0; looks < 14;) {
		struct pollfd failure = {.fd = a.context->async_fd, .events = POLLIN};
		struct soft_tcp_path path = path_of(&a);

		CHECK_EQUAL(poll(&failure, 1, 10), 0);
		looks += path.liveness_timer.deadline_ns != last;
		last = path.liveness_timer.deadline_ns;
	}
	close(other); /* as if its process had exited */
	expect_wc(&a, 1, IBV_WC_RETRY_EXC_ERR);
	close_side(&a);
}

/* Check that a connection fails if the other machine does not respond to data within the time
 * limit. Time during which this side's engine did not run must not count, because the silence may
 * be this side's fault. */
static void connection_fails_when_the_path_is_lost(bool stops)
{
	struct side a;
	int other;

	open_probed_side_with_remote_stream(&a, &other, 1);
	CHECK(set_loopback(false));
	uint64_t start = soft_now();

	write_bytes(&a, 8);
	if (stops) { /* the lock stops the engine, as in a stopped process */
		soft_lock();
		CHECK_OK(usleep(LIMIT_US * 3 / 2));
		start = soft_now();
		soft_unlock();
	}
	expect_wc(&a, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK(soft_now() - start >= LIMIT_US * UINT64_C(1000));
	struct ibv_async_event event = {.event_type = IBV_EVENT_GID_CHANGE};

	while (event.event_type == IBV_EVENT_GID_CHANGE) { /* cutting the path also removes GIDs */
		CHECK_OK(verbs->ibv_get_async_event(a.context, &event));
		verbs->ibv_ack_async_event(&event);
	}
	CHECK_EQUAL(event.event_type, IBV_EVENT_QP_FATAL);
	expect_state(&a, IBV_QPS_ERR);
	CHECK(set_loopback(true));
	close(other);
	close_side(&a);
}

/* Check the time limit of a path. It is the configured timeout, or the queue pair's total timeout
 * if that is longer (IBTA 9.7.6.1.3). A queue pair timeout of 0 disables the limit. After
 * end_with_peer, the kernel also probes idle paths. These probes use only the configured
 * timeout. */
static void path_limit_is_the_longer_of_both_timeouts(void)
{
	static const struct {
		uint8_t timeout; /* 255 stands for 0 */
		uint64_t ns;
	} cases[] = {
		{255, 0},
		{1, UINT64_C(1000000000)},
		{22, UINT64_C(4096) << 22}, /* 17 s */
	};

	FOR_EACH (i, cases) {
		struct side a;
		int other;

		int fd = open_probed_side_with_remote_stream(&a, &other, cases[i].timeout);

		CHECK(path_of(&a).liveness_limit_ns == cases[i].ns);
		CHECK_EQUAL(option(fd, SOL_SOCKET, SO_KEEPALIVE), cases[i].ns != 0);
		if (cases[i].ns) {
			CHECK_EQUAL(option(fd, IPPROTO_TCP, TCP_KEEPIDLE), 1);
			CHECK_EQUAL(option(fd, IPPROTO_TCP, TCP_KEEPINTVL), 1);
			CHECK_EQUAL(option(fd, IPPROTO_TCP, TCP_KEEPCNT), 1);
		}
		close(other);
		close_side(&a);
	}
}

/* Check that a request posted while the kernel's probes are unanswered does not restart the time
 * limit. */
static void request_does_not_restart_the_path_time_limit(void)
{
	const int first = 1, others = 30;
	struct tcp_info info = {0};
	struct side a;
	int other, fd = open_probed_side_with_remote_stream(&a, &other, 1);

	CHECK_OK(setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &others, sizeof(others)));
	CHECK_OK(setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &first, sizeof(first)));
	CHECK(set_loopback(false));
	while (!info.tcpi_probes) {
		socklen_t length = sizeof(info);

		CHECK_OK(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length));
		sched_yield();
	}
	uint64_t start = soft_now();

	write_bytes(&a, 8);
	CHECK(path_of(&a).silence_start_ns + first * UINT64_C(500000000) <= start);
	expect_wc(&a, 1, IBV_WC_RETRY_EXC_ERR);
	CHECK(set_loopback(true));
	close(other);
	close_side(&a);
}

/* Check that the CM uses the new stream if the HELLO on an existing stream gets no response. */
static void cm_uses_the_new_stream_if_hello_is_unanswered(void)
{
	struct sockaddr_in peer;
	socklen_t length = sizeof(peer);
	struct side a, b;
	int other, another;

	open_probed_side_with_remote_stream(&a, &other, 1);
	OPEN(&b, .timeout = 1);
	bring_up(&b, &(struct address){.qpn = 1});
	int fd = connect_streams(&another);

	CHECK_OK(getpeername(fd, (struct sockaddr *)&peer, &length));
	CHECK(set_loopback(false));
	soft_lock();
	struct soft_tcp_path *before = soft_tcp_path_of(soft_link_of(soft_qp_of(a.qp))->chan.path);

	before->path_port = 1;
	before->socket_addresses.port = peer.sin_port;
	CHECK_OK(soft_qp_adopt_or_attach(soft_qp_of(b.qp), fd, 0, 1, true));
	CHECK(soft_link_of(soft_qp_of(b.qp))->chan.path == &before->path);
	soft_unlock();
	while (LOCKED(soft_link_of(soft_qp_of(b.qp))->base.state != SOFT_LINK_UP))
		soft_progress();
	CHECK_EQUAL(path_of(&b).watch.fd, fd);
	CHECK(set_loopback(true));
	close(other);
	close(another);
	close_side(&b);
	close_side(&a);
}

/* Check that an idle path is not probed unless the queue pair's owner has called end_with_peer.
 * Without this call, the owner is not notified when the peer is lost, just as with a card. */
static void idle_path_is_not_probed_without_end_with_peer(void)
{
	struct side a;
	int other, fd = open_side_with_remote_stream(&a, &other, (struct options){0});

	CHECK_EQUAL(option(fd, SOL_SOCKET, SO_KEEPALIVE), 0);
	close(other);
	close_side(&a);
}

static void invalid_path_timeout_is_rejected(void)
{
	static const char *const wrong[] = {"soon", "0",  "3601", "5s",
					    "-1",   " 5", "+5",   "-18446744073709551611"};

	FOR_EACH (i, wrong) {
		char expected[60];

		snprintf(expected, sizeof(expected), "PATH_TIMEOUT is '%s'", wrong[i]);
		expect_setting_refused("AIORDMA_EMBEDDED_PATH_TIMEOUT", wrong[i], expected);
	}
}

int main(void)
{
	limit_seconds(60);
	STEP(invalid_path_timeout_is_rejected());
	CHECK_OK(setenv("AIORDMA_EMBEDDED_PATH_TIMEOUT", "1", 1));
	bool cut = enter_own_network();

	STEP(path_limit_is_the_longer_of_both_timeouts());
	STEP(idle_path_is_not_probed_without_end_with_peer());
	STEP(path_is_kept_while_the_peer_is_stopped());
	if (cut) {
		STEP(connection_fails_when_the_path_is_lost(false));
		STEP(connection_fails_when_the_path_is_lost(true));
		STEP(request_does_not_restart_the_path_time_limit());
		STEP(cm_uses_the_new_stream_if_hello_is_unanswered());
	} else {
		fprintf(stderr, "a lost path has not been tested: this user may not have a network "
				"of its own (root may)\n");
	}
	return 0;
}
