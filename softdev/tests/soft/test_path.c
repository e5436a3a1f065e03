/* Test the path between two processes, which carries the frames of all their queue pairs. The tests
 * apply to every kind of path. */
#include "leaks.h"
#include "verbs_side.h"
#include "link/link_internal.h"

static void additional_queue_pairs_need_no_sockets(void)
{
	enum { MANY = 20 };
	static struct side sides[MANY];
	struct process process = process_split();
	int sockets = 0;

	limit_seconds(20);
	for (int i = 0; i < MANY; i++) {
		OPEN(&sides[i]);
		struct address peer = exchange_addresses(&process, &sides[i]);

		bring_up_receiving(&sides[i], &peer, 1, 1, 64);
		fill(sides[i].memory + 64, 64, (unsigned)i);
		POST(&sides[i], IBV_WR_SEND, .wr_id = 2, .offset = 64, .length = 64);
		/* The send and the receive complete in either order. */
		expect_two(&sides[i]);
		CHECK(is_filled(sides[i].memory, 64, (unsigned)i));
		process_barrier(&process);
		if (i == 0)
			sockets = open_sockets();
		CHECK(open_sockets() <= sockets + 1); /* at most one stream each way */
	}
	for (int i = 0; i < MANY; i++)
		close_side(&sides[i]);
	process_join(&process);
}

/* Check that a queue pair whose application posts no receives does not block others on the same
 * path. Its messages wait in the sender's queue. */
static void queue_pair_without_receives_does_not_block_others(void)
{
	enum { SIZE = 1 << 20, MESSAGES = 16, ROUNDS = 100 };
	struct process process = process_split();
	struct side slow, quick;

	limit_seconds(60);
	OPEN(&slow, .memory = SIZE);
	struct address slow_peer = exchange_addresses(&process, &slow);

	OPEN(&quick, .receives = 2 * ROUNDS);
	struct address quick_peer = exchange_addresses(&process, &quick);

	bring_up(&slow, &slow_peer);
	bring_up_receiving(&quick, &quick_peer, 0, ROUNDS, 64);
	process_barrier(&process);
	if (process.child)
		for (uint64_t i = 0; i < MESSAGES; i++)
			POST(&slow, IBV_WR_SEND, .wr_id = i, .length = SIZE);
	for (uint64_t i = 0; i < ROUNDS; i++) {
		if (process.child)
			POST(&quick, IBV_WR_SEND, .wr_id = 1000, .length = 64);
		for (int more = process.child ? 2 : 1; more; more--)
			CHECK_EQUAL(next_wc(&quick).status, IBV_WC_SUCCESS);
		if (!process.child)
			RUN(&quick, IBV_WC_SUCCESS, IBV_WR_SEND, .wr_id = 1000, .length = 64);
	}
	expect_no_wc(&slow);
	process_barrier(&process);
	if (!process.child)
		post_recvs(&slow, 0, MESSAGES, SIZE);
	for (uint64_t i = 0; i < MESSAGES; i++)
		expect_wc(&slow, i, IBV_WC_SUCCESS);
	process_barrier(&process);
	close_side(&quick);
	close_peers(&process, &slow);
}

static const struct soft_path_calls *counted;
static size_t bytes_counted;

static int count_bytes_and_put(struct soft_path *path, enum soft_record_kind kind, uint32_t to,
			       uint32_t from, const struct iovec *iov,
			       const struct soft_record_end *ends, int count)
{
	int taken = counted->put(path, kind, to, from, iov, ends, count);

	bytes_counted += ends[taken - 1].bytes;
	return taken;
}

/* Check that replacing `put` in a copy of a path's table makes its traffic observable, as described
 * in docs/how-to-add.md. */
static void path_traffic_can_be_observed_by_replacing_put(void)
{
	static struct soft_path_calls counting;
	struct process process = process_split();
	struct side side;

	limit_seconds(20);
	OPEN(&side);
	struct address peer = exchange_addresses(&process, &side);

	bring_up_receiving(&side, &peer, 1, 1, 64);
	process_barrier(&process);
	RUN(&side, IBV_WC_SUCCESS, IBV_WR_RDMA_WRITE, .wr_id = 3, .length = 8, AT(&peer, 128));
	process_barrier(&process);
	soft_lock();
	struct soft_path *path = soft_link_of(soft_qp_of(side.qp))->chan.path;

	counted = path->calls;
	counting = *counted;
	counting.put = count_bytes_and_put;
	path->calls = &counting;
	soft_unlock();
	POST(&side, IBV_WR_SEND, .wr_id = 2, .length = 64);
	expect_two(&side);
	CHECK(LOCKED(bytes_counted) >= SOFT_FRAME_HEADER + 64);
	close_peers(&process, &side);
}

static bool connects = true; /* whether connect() works in this process */

int __real_connect(int fd, const struct sockaddr *address, socklen_t length);
int __wrap_connect(int fd, const struct sockaddr *address, socklen_t length);
int __wrap_connect(int fd, const struct sockaddr *address, socklen_t length)
{
	if (connects)
		return __real_connect(fd, address, length);
	errno = ECONNREFUSED;
	return -1;
}

/* Check that two queue pairs connect even if only one of them can open a connection. */
static void queue_pairs_connect_if_only_one_side_can(bool smaller)
{
	struct process process = process_split();
	struct side side;

	limit_seconds(20);
	OPEN(&side, .timeout = 255); /* never times out */
	struct address peer = exchange_addresses(&process, &side);

	connects = (side.qp->qp_num < peer.qpn) == smaller;
	bring_up_receiving(&side, &peer, 1, 1, 64);
	POST(&side, IBV_WR_SEND, .wr_id = 2, .length = 64);
	expect_two(&side);
	connects = true;
	close_peers(&process, &side);
}

int main(void)
{
	STEP(queue_pairs_connect_if_only_one_side_can(true));
	STEP(queue_pairs_connect_if_only_one_side_can(false));
	STEP(additional_queue_pairs_need_no_sockets());
	STEP(queue_pair_without_receives_does_not_block_others());
	STEP(path_traffic_can_be_observed_by_replacing_put());
	return 0;
}
