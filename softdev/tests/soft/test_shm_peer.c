/* Tests of shared memory channels within this process and between two processes. */
#include <sys/mman.h>
#include "engine/engine_internal.h"
#include "path/shm/shm_internal.h"
#include "shm_side.h"

static struct soft_shm_peer *peer_of(const struct soft_chan *chan)
{
	return soft_container(chan->path, struct soft_shm_peer, path);
}

static struct process process;

static bool is_filled_with(const uint8_t *handshake, uint8_t byte)
{
	return handshake[0] == byte && handshake[SOFT_HANDSHAKE_SIZE - 1] == byte;
}

/* ---- this process -------------------------------------------------------------------------- */

static void connect_to_self(struct end *a, struct end *b)
{
	end_init(a);
	end_init(b);
	/* Use one eventfd for both ends, so that the test can wait for both. */
	CHECK(dup2(a->told, b->told) >= 0);
	accept_next(b);
	CHECK_OK(open_channel_to(a, own_port(), 5));
	/* Records to this process are delivered before the lock is released. */
	CHECK(a->accepted && b->accepted && !callee);
	CHECK(is_filled_with(b->handshake, 5) && is_filled_with(a->handshake, 6));
}

static void channel_to_own_process_delivers_immediately(void)
{
	struct end a, b;

	connect_to_self(&a, &b);
	b.echo = true;
	send_now(&a, 1);
	CHECK_EQUAL(b.bytes, 1);
	CHECK_EQUAL(a.bytes, 1);
	soft_lock();
	CHECK(soft_shm_path_is_self(a.chan.path) && a.chan.path == b.chan.path);
	CHECK_EQUAL(peer_of(&a.chan)->pid, getpid());
	CHECK(peer_of(&a.chan)->own_area == peer_of(&a.chan)->peer_area);
	/* The peer receives all data that was sent before the channel was ended. */
	a.to_send = 3;
	send_more(&a);
	soft_chan_end(&a.chan);
	soft_chan_end(&a.chan);
	soft_unlock();
	CHECK_EQUAL(b.bytes, 3);
	CHECK(b.gone && b.error == 0 && !a.gone);
	end_done(&a);
	end_done(&b);
}

static void request_can_be_refused_or_withdrawn(void)
{
	struct end a, b;

	end_init(&a);
	refused = 0;
	CHECK_OK(open_channel_to(&a, own_port(), REFUSE_ME));
	CHECK(a.gone && a.error == 0 && !a.accepted && refused == 1);
	end_done(&a);
	end_init(&a);
	end_init(&b);
	CHECK_OK(open_channel_to(&a, own_port(), HOLD_ME));
	CHECK(!a.accepted && !a.gone);
	CHECK_EQUAL(held_id, a.chan.id);
	soft_lock();
	CHECK_EQUAL(soft_chan_room(&a.chan, 1), 0);
	soft_chan_end(&a.chan);
	soft_unlock();
	CHECK_EQUAL(withdrawn_id, held_id);
	/* A withdrawn request cannot be accepted. */
	uint8_t handshake[SOFT_HANDSHAKE_SIZE] = {0};

	CHECK_EQUAL(LOCKED(soft_chan_accept(&b.chan, soft_shm_path_at(soft_ip_port(), 1, 0),
					    held_id, handshake)),
		    0);
	CHECK(b.gone && b.error == 0);
	end_done(&a);
	end_done(&b);
}

/* Send far more than the ring holds from both ends, with records of several sizes. The device's
 * thread continues the transfer while this thread sleeps. */
static void own_ring_transfers_more_than_it_holds(void)
{
	static const uint32_t sizes[] = {1, 40, 4096, 32768 + 17, SOFT_CHAN_MIN_ROOM};

	FOR_EACH (i, sizes) {
		struct end a, b;
		uint64_t amount = sizes[i] < 100 ? 1000000 : 3000000;

		connect_to_self(&a, &b);
		a.most = b.most = sizes[i];
		soft_lock();
		a.to_send = b.to_send = amount;
		send_more(&a);
		send_more(&b);
		CHECK(a.sent < amount); /* more than the ring has room for */
		soft_unlock();
		UNTIL(&a, i % 2, a.bytes == amount && b.bytes == amount);
		CHECK_EQUAL(b.records, (amount + sizes[i] - 1) / sizes[i]);
		end_done(&a);
		end_done(&b);
	}
}

/* ---- another process ----------------------------------------------------------------------- */

/* Open a channel from the parent to the child. */
static void connect_to_child(struct end *end, bool polling)
{
	uint16_t port;

	end_init(end);
	if (!process.child) {
		accept_next(end);
		port = own_port();
		process_send(&process, &port, sizeof(port));
	} else {
		process_receive(&process, &port, sizeof(port));
		CHECK_OK(open_channel_to(end, port, 7));
	}
	UNTIL(end, polling, end->accepted);
	CHECK(is_filled_with(end->handshake, process.child ? 8 : 7));
	soft_lock();
	CHECK(!soft_shm_path_is_self(end->chan.path));
	CHECK_EQUAL(peer_of(&end->chan)->pid, process.child ? process.child : getppid());
	soft_unlock();
}

static void close_channel(struct end *end, bool polling)
{
	process_barrier(&process);
	if (process.child)
		end_done(end);
	else
		UNTIL(end, polling, end->gone);
	CHECK(!end->gone || end->error == 0);
	if (!process.child)
		end_done(end);
}

enum waiting { ASLEEP, POLLING, EITHER };

/* A missed wake-up would hang the test. */
static void no_wake_up_is_missed_in_ping_pong(enum waiting waiting)
{
	enum { ROUNDS = 3000 };
	struct end end;

	connect_to_child(&end, waiting != ASLEEP);
	end.most = 1;
	for (unsigned i = 1; i <= ROUNDS; i++) {
		bool polling = waiting == EITHER
				       ? (i * 2654435761u + (unsigned)process.child) >> 16 & 1
				       : waiting == POLLING;

		if (process.child)
			send_now(&end, 1);
		UNTIL(&end, polling, end.bytes == i);
		if (!process.child)
			send_now(&end, 1);
	}
	close_channel(&end, waiting != ASLEEP);
}

/* Send in both directions at the same time. Both sides measure the time for long records, to
 * compare rings with cross-memory copies. */
static void both_directions_transfer_concurrently(bool polling)
{
	static const uint32_t sizes[] = {100, 5000, 32768 + 40, SOFT_CHAN_MIN_ROOM};
	struct end end;

	connect_to_child(&end, polling);
	for (uint64_t i = 0, amount = 2000000; i < 4; i++) {
		end.most = sizes[i];
		send_now(&end, amount);
		UNTIL(&end, polling, end.bytes >= (i + 1) * amount && end.sent == (i + 1) * amount);
	}
	CHECK(LOCKED(soft_hint_get(&peer_of(&end.chan)->cma->own->ring_write_ns)));
	CHECK(LOCKED(peer_of(&end.chan)->cma->ring_read_ns));
	close_channel(&end, polling);
}

static void each_side_writes_only_its_own_area(void)
{
	uint64_t mine = process.child ? 11 : 22;
	struct end end;

	connect_to_child(&end, true);
	uint64_t *own = LOCKED((uint64_t *)(void *)peer_of(&end.chan)->own_area);
	uint64_t *their = LOCKED((uint64_t *)(void *)peer_of(&end.chan)->peer_area);

	CHECK(__atomic_load_n(&their[SOFT_SHM_AREA / 8 - 1], __ATOMIC_RELAXED) == 0);
	process_barrier(&process);
	__atomic_store_n(&own[SOFT_SHM_AREA / 8 - 1], mine, __ATOMIC_RELAXED);
	process_barrier(&process);
	CHECK_EQUAL(__atomic_load_n(&their[SOFT_SHM_AREA / 8 - 1], __ATOMIC_RELAXED), 33 - mine);
	process_barrier(&process);
	__atomic_store_n(&own[SOFT_SHM_AREA / 8 - 1], 0, __ATOMIC_RELAXED);
	/* The area must not contain any address of the heap, a stack or code. */
	for (size_t i = 0; i < SOFT_SHM_AREA / 8; i++) {
		uint64_t word = __atomic_load_n(&own[i], __ATOMIC_RELAXED);
		unsigned char there;

		CHECK(!word || mincore((void *)(uintptr_t)(word & ~UINT64_C(4095)), 4096, &there));
	}
	close_channel(&end, true);
}

static struct soft_shm_peer *written; /* peer of sleeping_peer_is_notified_after_lock_release() */

static bool is_notified(void)
{
	struct pollfd ready = {.fd = written->pipe.read_fd, .events = POLLIN};

	return poll(&ready, 1, 0) == 1;
}

static bool is_notification_wanted(void)
{
	return soft_hint_get(&written->out.shared->notify_wanted);
}

static bool is_sleeping(void)
{
	return is_notification_wanted() && !is_notified();
}

static void check_not_yet_notified(struct soft_deferred *deferred)
{
	(void)deferred;
	CHECK(!is_notification_wanted());
	CHECK(!is_notified());
	written = NULL;
}

/* A sleeping peer is notified only after the lock has been released, so that an application that
 * responds immediately does not find the lock held. The test stops the peer while it sleeps,
 * because the peer would otherwise read the notification from the pipe. */
static void sleeping_peer_is_notified_after_lock_release(void)
{
	struct soft_deferred later = {.run = check_not_yet_notified};
	struct end end;
	int status;

	connect_to_child(&end, true);
	if (process.child) {
		struct soft_shm_peer *peer = written = peer_of(&end.chan);

		for (;;) {
			while (!is_sleeping())
				poll(NULL, 0, 1);
			CHECK_OK(kill(process.child, SIGSTOP));
			CHECK_EQUAL(waitpid(process.child, &status, WUNTRACED), process.child);
			if (is_sleeping())
				break;
			CHECK_OK(kill(process.child, SIGCONT));
		}
		soft_list_init(&later.node);
		soft_lock();
		end.to_send++;
		send_more(&end);
		soft_defer(&later);
		soft_unlock();
		CHECK(!written);
		written = peer;
		CHECK(is_notified());
		CHECK_OK(kill(process.child, SIGCONT));
	} else {
		UNTIL(&end, false, end.bytes == 1);
	}
	close_channel(&end, true);
}

__typeof__(soft_ring_arm) __real_soft_ring_arm, __wrap_soft_ring_arm;
static struct soft_shm_peer *stopped; /* peer whose process is stopped, or NULL */

bool __wrap_soft_ring_arm(struct soft_ring *ring)
{
	struct soft_shm_peer *peer = stopped;

	if (peer && ring == &peer->in) {
		stopped = NULL;
		CHECK_OK(kill(process.child, SIGCONT));
		while (soft_hint_get(&peer->out.shared->room_wanted))
			poll(NULL, 0, 1);
	}
	return __real_soft_ring_arm(ring);
}

/* The peer does not send a notification if it frees room before this side arms its ring. Rearming
 * must therefore check for room, because nothing else would wake this side. */
static void room_freed_before_arming_wakes_the_writer(void)
{
	struct end end;
	int status;

	connect_to_child(&end, true);
	if (process.child) {
		struct soft_shm_peer *peer = peer_of(&end.chan);

		CHECK_OK(kill(process.child, SIGSTOP));
		CHECK_EQUAL(waitpid(process.child, &status, WUNTRACED), process.child);
		while (!LOCKED(soft_device.engine->thread_sleeps))
			poll(NULL, 0, 1);
		send_now(&end, 2 * SOFT_RING_SIZE);
		soft_lock();
		CHECK(end.sent < end.to_send);
		soft_ring_disarm(&peer->in);
		stopped = peer;
		soft_wakeup_poll_or_arm(peer);
		CHECK(!stopped);
		struct pollfd step = {.fd = soft_device.engine->epoll_fd, .events = POLLIN};

		CHECK_EQUAL(poll(&step, 1, 0), 1);
		soft_unlock();
		UNTIL(&end, false, end.sent == end.to_send);
	} else {
		UNTIL(&end, false, end.bytes == 2 * SOFT_RING_SIZE);
	}
	close_channel(&end, true);
}

int main(void)
{
	limit_seconds(60);
	process = process_split();
	limit_seconds(60);
	CHECK_OK(soft_engine_get());
	if (process.child) {
		STEP(channel_to_own_process_delivers_immediately());
		STEP(request_can_be_refused_or_withdrawn());
		STEP(own_ring_transfers_more_than_it_holds());
	}
	STEP(no_wake_up_is_missed_in_ping_pong(POLLING));
	STEP(no_wake_up_is_missed_in_ping_pong(ASLEEP));
	STEP(no_wake_up_is_missed_in_ping_pong(EITHER));
	STEP(both_directions_transfer_concurrently(true));
	STEP(both_directions_transfer_concurrently(false));
	STEP(each_side_writes_only_its_own_area());
	STEP(sleeping_peer_is_notified_after_lock_release());
	STEP(room_freed_before_arming_wakes_the_writer());
	process_barrier(&process);
	soft_engine_put();
	process_join(&process);
	return 0;
}
