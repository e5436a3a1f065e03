/* Test a process that exits right after receiving messages. Its peer's requests must succeed,
 * as with cards, which acknowledge data in memory whatever happens to the process. Idle queue pairs
 * whose peer exits are tested in tests/pair/test_hosts.c. */
#include "verbs_side.h"

#include <signal.h>

#include "path/shm/shm_internal.h"
#include "link/link_internal.h"

enum {
	ROUNDS = 5,
	TALK = 16, /* messages in each direction, enough for acknowledgements to be delayed */
	LAST = 3, /* messages received without a reply */
	FIRST_LAST = 10, /* wr_id of the first message without a reply */
	LONG = 40000,
};

enum way { EXIT, UNDERSCORE_EXIT, KILLED, WAYS };

static void exit_process(enum way way)
{
	if (way == EXIT)
		exit(0);
	if (way == UNDERSCORE_EXIT)
		_exit(0);
	CHECK_OK(kill(getpid(), SIGKILL));
}

/* Wait for the child to exit, and close the parent's side. */
static void wait_for_exit(const struct process *process, struct side *side)
{
	int status;

	CHECK_EQUAL(waitpid(process->child, &status, 0), process->child);
	close(process->fd);
	close_side(side);
}

static void post_send_of(struct side *side, uint64_t wr_id, uint32_t length)
{
	POST(side, IBV_WR_SEND, .flags = wr_id ? IBV_SEND_SIGNALED : 0, .wr_id = wr_id,
	     .length = length);
}

static void send_many(struct side *side, uint64_t first, uint64_t count, uint32_t length)
{
	for (uint64_t i = 0; i < count; i++)
		post_send_of(side, first + i, length);
}

static void expect_many(struct side *side, uint64_t first, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++)
		expect_wc(side, first + i, IBV_WC_SUCCESS);
}

static void receive_many(struct side *side, int count, enum ibv_wc_status status)
{
	for (int i = 0; i < count; i++)
		expect_wc(side, 1, status);
}

/* Connect two processes, and exchange messages until each device expects its application to reply
 * and therefore delays acknowledgements. */
static struct process open_and_exchange_messages(struct side *side)
{
	struct process process;

	open_peers(&process, side,
		   (struct options){
			   .signal_none = true, .rnr_timer = 255, .timeout = 14, .retry_cnt = 1},
		   LAST + 1, LONG);
	process_barrier(&process);
	for (int i = 0; i < TALK; i++) {
		if (process.child)
			post_send_of(side, 0, 8);
		expect_wc(side, 1, IBV_WC_SUCCESS);
		post_receive_at(side, 1, 0, LONG);
		if (!process.child)
			post_send_of(side, 0, 8);
	}
	return process;
}

/* Check that messages succeed if the child exits immediately after receiving them all. */
static void messages_succeed_if_the_receiver_then_exits(enum way way, uint32_t length)
{
	for (int round = 0; round < ROUNDS; round++) {
		struct side side;
		struct process process = open_and_exchange_messages(&side);

		if (!process.child) {
			receive_many(&side, LAST, IBV_WC_SUCCESS);
			exit_process(way);
		}
		send_many(&side, FIRST_LAST, LAST, length);
		expect_many(&side, FIRST_LAST, LAST);
		wait_for_exit(&process, &side);
	}
}

/* Check that a message succeeds if the child's device has read it, and that later messages fail.
 * The child holds the lock, so that its device reads nothing more. The test requires shared memory,
 * because a socket does not report how much the peer has read. */
static void only_messages_read_before_exit_succeed(void)
{
	struct side side;
	struct process process = open_and_exchange_messages(&side);
	char byte = 0;

	if (!process.child) {
		expect_wc(&side, 1, IBV_WC_SUCCESS);
		soft_lock();
		process_send(&process, &byte, 1);
		process_receive(&process, &byte, 1);
		exit_process(KILLED);
	}
	post_send_of(&side, FIRST_LAST, 8);
	process_receive(&process, &byte, 1);
	post_send_of(&side, FIRST_LAST + 1, LONG);
	post_send_of(&side, FIRST_LAST + 2, 8);
	process_send(&process, &byte, 1);
	expect_wc(&side, FIRST_LAST, IBV_WC_SUCCESS);
	expect_wc(&side, FIRST_LAST + 1, IBV_WC_RETRY_EXC_ERR);
	expect_wc(&side, FIRST_LAST + 2, IBV_WC_WR_FLUSH_ERR);
	wait_for_exit(&process, &side);
}

/* Check that a message that the child sends before it exits is received, even if the exit is
 * noticed first. This thread holds the lock, so that its device does not read the message
 * earlier. */
static void message_sent_before_exit_is_received(void)
{
	struct side side;
	struct process process = open_and_exchange_messages(&side);
	siginfo_t ended;
	struct ibv_wc wc;
	char byte = 0;

	if (!process.child) {
		process_receive(&process, &byte, 1);
		post_send_of(&side, 0, 8);
		exit_process(KILLED);
	}
	soft_lock();
	process_send(&process, &byte, 1);
	CHECK_OK(waitid(P_PID, (id_t)process.child, &ended, WEXITED | WNOWAIT));
	soft_shm_peer_drain_and_finish(
		soft_list_first(&soft_device.shm->peers, struct soft_shm_peer, node));
	soft_unlock();
	CHECK_EQUAL(poll_cq(&side, 1, &wc), 1);
	CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
	wait_for_exit(&process, &side);
}

static bool waits_for_a_receive(struct side *side)
{
	expect_no_wc(side);
	return LOCKED(soft_qp_of(side->qp)->rnr_paused);
}

/* Wait until the parent has sent its request again, and take the request from the child's socket
 * before the device can refuse it. Returns with the lock held. */
static void steal_next_request(struct side *side)
{
	char record[SOFT_TCP_RECORD_HEADER + SOFT_FRAME_HEADER + 8];

	soft_lock();
	const struct soft_link *link = soft_link_of(soft_qp_of(side->qp));
	struct pollfd readable = {.fd = soft_tcp_path_of(link->chan.path)->watch.fd,
				  .events = POLLIN};

	CHECK_EQUAL(poll(&readable, 1, -1), 1);
	CHECK_EQUAL(recv(readable.fd, record, sizeof(record), MSG_WAITALL), sizeof(record));
}

static void do_nothing(struct side *side)
{
	(void)side;
}

/* Check that a message refused for lack of a receive fails when the child exits, even if the
 * message was sent again and the child has read it. The child calls `before` and then exits. */
static void message_without_receive_fails_when_the_peer_exits(void (*before)(struct side *side))
{
	struct side side;
	struct process process = open_and_exchange_messages(&side);
	char byte = 0;

	if (!process.child) {
		receive_many(&side, LAST + 1, IBV_WC_SUCCESS);
		process_receive(&process, &byte, 1);
		before(&side);
		exit_process(KILLED);
	}
	send_many(&side, FIRST_LAST, LAST + 1, 8);
	expect_many(&side, FIRST_LAST, LAST + 1);
	post_send_of(&side, 99, 8);
	while (!waits_for_a_receive(&side))
		sched_yield();
	process_send(&process, &byte, 1);
	expect_wc(&side, 99, IBV_WC_RETRY_EXC_ERR);
	wait_for_exit(&process, &side);
}

static struct soft_shm_peer *peer_of(const struct soft_qp *qp)
{
	return soft_container(soft_link_of(qp)->chan.path, struct soft_shm_peer, path);
}

/* Let the child's device read records until it refuses a message, and then one more record. The
 * caller must hold the lock. */
static void refuse_one(struct side *side)
{
	const struct soft_qp *qp = soft_qp_of(side->qp);
	struct soft_shm_peer *peer = peer_of(qp);

	while (!qp->responder.awaiting_resend)
		soft_shm_peer_receive(peer, 1); /* one record */
	soft_shm_peer_receive(peer, 1);
	soft_notify_pipe_notify(&peer->pipe);
	soft_notify_finish();
}

static uint64_t bytes_written(struct side *side)
{
	return LOCKED(peer_of(soft_qp_of(side->qp))->out.position);
}

/* Check that a refused message counts as unread although the parent has sent it again. The new copy
 * is behind later messages in the ring. The child holds the lock, so that its device reads messages
 * only in refuse_one(). */
static void resent_message_fails_if_the_peer_exits_unready(void)
{
	enum { COUNT = 5, LENGTH = 8 };
	struct side side;
	struct process process = open_and_exchange_messages(&side);
	char byte = 0;

	if (!process.child) {
		receive_many(&side, LAST + 1, IBV_WC_SUCCESS);
		process_barrier(&process);
		soft_lock();
		process_barrier(&process);
		process_receive(&process, &byte, 1);
		refuse_one(&side);
		process_receive(&process, &byte, 1);
		exit_process(KILLED);
	}
	send_many(&side, FIRST_LAST, LAST + 1, LENGTH);
	expect_many(&side, FIRST_LAST, LAST + 1);
	process_barrier(&process);
	process_barrier(&process);
	send_many(&side, 99, COUNT, LENGTH);
	uint64_t before = bytes_written(&side);

	process_send(&process, &byte, 1);
	while (bytes_written(&side) - before < COUNT * (SOFT_FRAME_HEADER + LENGTH))
		expect_no_wc(&side);
	process_send(&process, &byte, 1);
	for (uint64_t i = 0; i < COUNT; i++)
		expect_wc(&side, 99 + i, i ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR);
	wait_for_exit(&process, &side);
}

/* Check that a queue pair fails when its peer exits, if its owner has called end_with_peer
 * (abi/device_calls.h). */
static void queue_pair_fails_when_its_peer_exits(enum way way)
{
	struct side side;
	struct process process = open_and_exchange_messages(&side);

	verbs->device->end_with_peer(side.qp);
	process_barrier(&process);
	if (!process.child)
		exit_process(way);
	receive_many(&side, LAST + 1, IBV_WC_WR_FLUSH_ERR);
	expect_event(&side, IBV_EVENT_QP_FATAL);
	wait_for_exit(&process, &side);
}

int main(void)
{
	for (int way = 0; way < WAYS; way++) {
		STEP(messages_succeed_if_the_receiver_then_exits((enum way)way, 8));
		STEP(messages_succeed_if_the_receiver_then_exits((enum way)way, LONG));
		STEP(queue_pair_fails_when_its_peer_exits((enum way)way));
	}
	if (!links_are("tcp")) {
		STEP(only_messages_read_before_exit_succeed());
		STEP(message_sent_before_exit_is_received());
		STEP(resent_message_fails_if_the_peer_exits_unready());
	} else {
		STEP(message_without_receive_fails_when_the_peer_exits(steal_next_request));
	}
	STEP(message_without_receive_fails_when_the_peer_exits(do_nothing));
	return 0;
}
