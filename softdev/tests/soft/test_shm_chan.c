/* Tests of links without sockets, within a process and between processes on one host. */
#include "leaks.h"
#include "verbs_side.h"

#include "path/shm/shm_internal.h"
#include "link/link_internal.h"

/* ---- within a process ---------------------------------------------------------------------- */

static void queue_pair_connected_to_itself_needs_no_socket(struct side *side)
{
	struct address own = address_of_side(side);
	int before = open_sockets();

	bring_up(side, &own);
	fill(side->memory, 100, 7);
	post_receive_at(side, 1, 1000, 100);
	POST(side, IBV_WR_SEND, .wr_id = 2, .length = 100);
	expect_wc(side, 1, IBV_WC_SUCCESS);
	expect_wc(side, 2, IBV_WC_SUCCESS);
	CHECK(is_filled(side->memory + 1000, 100, 7));
	CHECK_EQUAL(open_sockets(), before);
	enter_state(side, IBV_QPS_ERR);
}

/* ---- between processes --------------------------------------------------------------------- */

/* If one side is limited to TCP, both sides use TCP, whichever side connects. */
static void both_sides_use_tcp_if_one_is_limited_to_it(void)
{
	for (int i = 0; i < 8; i++) { /* random numbers decide which side connects */
		struct process process = process_split();
		struct side side;

		if (!process.child)
			CHECK_OK(setenv("AIORDMA_EMBEDDED_LINKS", "tcp", 1));
		OPEN(&side);
		struct address peer = exchange_addresses(&process, &side);

		bring_up_receiving(&side, &peer, 1, 1, 64);
		POST(&side, IBV_WR_SEND, .wr_id = 2, .offset = 64, .length = 64);
		expect_two(&side);
		CHECK_EQUAL(soft_qp_wire(side.qp), AIORDMA_WIRE_TCP);
		close_peers(&process, &side);
	}
}

/* Debian resolves its own host name to 127.0.1.1, an address that no interface has. */
static void address_127_0_1_1_uses_shared_memory(void)
{
	struct process process = process_split();
	struct side side;

	limit_seconds(20);
	OPEN(&side);
	struct address peer = exchange_addresses(&process, &side);

	memcpy(peer.gid.raw + 12, (const uint8_t[]){127, 0, 1, 1}, 4);
	bring_up_receiving(&side, &peer, 1, 1, 64);
	POST(&side, IBV_WR_SEND, .wr_id = 2, .offset = 64, .length = 64);
	expect_two(&side);
	CHECK_EQUAL(soft_qp_wire(side.qp), AIORDMA_WIRE_SHARED_MEMORY);
	close_peers(&process, &side);
}

/* A forked child does not poll its parent's rings, because it has not mapped them. */
static void forked_child_does_not_poll_inherited_rings(void)
{
	struct process process;
	struct side side;

	open_peers(&process, &side, (struct options){0}, 1, 64);
	POST(&side, IBV_WR_SEND, .wr_id = 2, .offset = 64, .length = 64);
	expect_two(&side);
	pid_t child = fork_asleep(); /* right after a successful poll */

	CHECK(child >= 0);
	if (!child) {
		CHECK(soft_list_empty(&soft_device.shm->poll_set));
		CHECK_EQUAL(soft_device.shm->polled_count, 0);
		_exit(0);
	}
	expect_exit_success(child);
	close_peers(&process, &side);
}

static void invalid_links_setting_is_rejected(void)
{
	expect_setting_refused(
		"AIORDMA_EMBEDDED_LINKS", "smoke",
		"AIORDMA_EMBEDDED_LINKS is 'smoke': expected 'shared', 'tcp' or 'roce'");
}

/* ---- hostile local peers -------------------------------------------------------------------- */

/* A channel that the test controls directly. */
struct raw {
	struct soft_chan chan;
	bool accepted, gone;
	unsigned records, frames; /* received */
	unsigned acks;    /* number of ACKs among `frames` */
};

static void raw_accepted(struct soft_chan *chan, const uint8_t handshake[SOFT_HANDSHAKE_SIZE])
{
	(void)handshake;
	soft_container(chan, struct raw, chan)->accepted = true;
}

static void raw_data(struct soft_chan *chan, const uint8_t *bytes, size_t length, size_t rest)
{
	struct raw *raw = soft_container(chan, struct raw, chan);

	CHECK_EQUAL(rest, 0);
	CHECK_EQUAL(length % SOFT_FRAME_HEADER, 0); /* header-only frames */
	raw->records++;
	for (; length; length -= SOFT_FRAME_HEADER, bytes += SOFT_FRAME_HEADER) {
		raw->frames++;
		raw->acks += bytes[0] == SOFT_ACK;
	}
}

static void raw_writable(struct soft_chan *chan)
{
	(void)chan;
}

static void raw_closed(struct soft_chan *chan, int error)
{
	CHECK_EQUAL(error, 0);
	soft_container(chan, struct raw, chan)->gone = true;
}

static const struct soft_chan_ops raw_calls = {
	.accepted = raw_accepted,
	.data = raw_data,
	.writable = raw_writable,
	.closed = raw_closed,
};

/* Open the channel. The caller must hold the lock. */
static void raw_open(struct raw *raw, const struct address *to, uint32_t from, uint32_t from_psn)
{
	uint8_t handshake[SOFT_HANDSHAKE_SIZE];
	struct soft_path *path = soft_shm_path_at(to->port, 1, 0);

	*raw = (struct raw){.chan.calls = &raw_calls};
	CHECK(path);
	soft_hello_encode(handshake, &(struct soft_hello){
					     .kind = SOFT_HELLO,
					     .from = from,
					     .to = to->qpn,
					     .receive_psn = to->psn,
					     .send_psn = from_psn,
					     .flags = SOFT_HELLO_SENDS,
					     .mtu = IBV_MTU_4096,
				     });
	CHECK_OK(soft_chan_open(&raw->chan, path, handshake));
}

/* Connection requests for queue pairs that are not ready are held, up to a limit. Held requests do
 * not affect other queue pairs. */
static void early_connection_requests_are_held_up_to_a_limit(void)
{
	enum { MANY = 300, HELD = 256 };
	static struct raw raws[MANY];
	struct process process = process_split();
	struct side side, other;
	int gone = 0;

	limit_seconds(20);
	OPEN(&side);
	OPEN(&other);
	struct address peer = exchange_addresses(&process, &side);
	struct address others = exchange_addresses(&process, &other);

	if (process.child) {
		CHECK_OK(to_init(&side));
		process_barrier(&process);
	} else {
		process_barrier(&process);
		soft_lock();
		for (int i = 0; i < MANY; i++)
			raw_open(&raws[i], &peer, 77, 5);
		soft_unlock();
		while (gone < MANY - HELD) {
			soft_progress();
			gone = 0;
			soft_lock();
			for (int i = 0; i < MANY; i++)
				gone += raws[i].gone;
			soft_unlock();
		}
		CHECK_EQUAL(gone, MANY - HELD);
		CHECK(raws[0].gone && !raws[MANY - 1].gone); /* the oldest requests were rejected */
	}
	bring_up_receiving(&other, &others, 1, 1, 8);
	process_barrier(&process);
	POST(&other, IBV_WR_SEND, .wr_id = 2, .length = 8);
	expect_two(&other);
	process_barrier(&process);
	soft_lock();
	for (int i = 0; i < MANY; i++)
		soft_chan_end(&raws[i].chan);
	soft_unlock();
	process_barrier(&process);
	close_side(&side);
	close_side(&other);
	process_join(&process);
}

/* If `what` is 0, the peer withdraws its connection request, which is not an error. If it is 1 or
 * 2, the peer sends an invalid or an incomplete frame, which fails the queue pair. */
static void broken_frame_fails_qp_but_withdrawn_request_does_not(int what)
{
	const struct address absent = {.psn = 100, .qpn = 1}; /* the smaller QPN connects */
	struct process process = process_split();
	struct side side;

	limit_seconds(20);
	OPEN(&side);
	struct address peer = exchange_addresses(&process, &side);

	if (process.child) {
		struct address expected = absent;

		bring_up_receiving(&side, &expected, 1, 1, 64);
		process_barrier(&process);
		process_barrier(&process);
		while (!LOCKED(soft_qp_of(side.qp)->stream_lost))
			soft_progress();
		if (what == 0) {
			expect_no_event(&side);
			CHECK_EQUAL(state_of(&side), IBV_QPS_RTS);
		} else {
			expect_event(&side, IBV_EVENT_QP_FATAL);
			expect_wc(&side, 1, IBV_WC_WR_FLUSH_ERR);
		}
	} else {
		struct raw raw;
		uint8_t bytes[SOFT_FRAME_HEADER] = {what == 1 ? 99 : SOFT_SEND};
		const struct iovec iov = {bytes, what == 2 ? 20 : sizeof(bytes)};
		const struct soft_record_end end = {.iovecs = 1, .bytes = iov.iov_len};

		process_barrier(&process);
		soft_lock();
		raw_open(&raw, &peer, absent.qpn, absent.psn);
		if (what == 0)
			soft_chan_end(&raw.chan);
		soft_unlock();
		for (bool over = what == 0; !over;) {
			soft_progress();
			soft_lock();
			over = raw.gone;
			if (raw.accepted && !over && soft_chan_room(&raw.chan, 64)) {
				soft_chan_write(&raw.chan, &iov, &end, 1);
				raw.accepted = false;
			}
			soft_unlock();
		}
		process_barrier(&process);
	}
	close_peers(&process, &side);
}

enum { RAW_QPN = 77, RAW_PSN = 5 };

/* Set up a queue pair in the parent and connect it to a raw channel of the child. Returns the
 * address of the other side. */
static struct address connect_raw_peer(struct process *process, struct side *side,
				       struct options options, unsigned receives, uint32_t length)
{
	*process = process_split();
	limit_seconds(20);
	open_side(side, options);
	struct address peer = exchange_addresses(process, side);

	if (process->child) {
		peer.qpn = RAW_QPN;
		peer.psn = RAW_PSN;
		bring_up_receiving(side, &peer, 0, receives, length);
	}
	process_barrier(process);
	return peer;
}

static void raw_end(struct raw *raw)
{
	soft_lock();
	soft_chan_end(&raw->chan);
	soft_unlock();
}

/* Connect the channel, and wait until the other side has accepted it. */
static void raw_connect(struct raw *raw, const struct address *to)
{
	soft_lock();
	raw_open(raw, to, RAW_QPN, RAW_PSN);
	soft_unlock();
	while (!LOCKED(raw->accepted))
		soft_progress();
}

/* Send a message of one frame. The caller must hold the lock. */
static void raw_send(struct raw *raw, uint32_t psn, uint32_t length)
{
	static const uint8_t payload[32 * 1024];
	uint8_t header[SOFT_FRAME_HEADER];
	const struct iovec iov[] = {{header, sizeof(header)}, {(void *)(uintptr_t)payload, length}};
	const struct soft_record_end end = {.iovecs = 2, .bytes = sizeof(header) + length};

	soft_frame_encode(header, &(struct soft_frame){
					  .opcode = SOFT_SEND,
					  .length = length,
					  .psn = psn,
				  });
	CHECK(soft_chan_room(&raw->chan, sizeof(header) + length));
	soft_chan_write(&raw->chan, iov, &end, 1);
}

/* The sender can continue as soon as its first long record is acknowledged, even if the receiver
 * still has other records to handle. */
static void each_long_record_is_acknowledged_immediately(void)
{
	enum { COUNT = 4, LENGTH = 16 * 1024 };
	static struct raw raw;
	struct process process;
	struct side side;
	struct address peer = connect_raw_peer(&process, &side, (struct options){.memory = LENGTH},
					       COUNT, LENGTH);

	if (process.child) {
		for (int i = 0; i < COUNT; i++)
			CHECK_EQUAL(next_wc(&side).byte_len, LENGTH);
	} else {
		raw_connect(&raw, &peer);
		soft_lock();
		for (uint32_t i = 0; i < COUNT; i++)
			raw_send(&raw, RAW_PSN + i * (LENGTH / 4096), LENGTH);
		soft_unlock();
		while (LOCKED(raw.acks) < COUNT)
			soft_progress();
	}
	process_barrier(&process);
	if (!process.child)
		raw_end(&raw);
	close_peers(&process, &side);
}

/* Many small requests that are posted together are sent in several records, so that the peer can
 * start before the last one is written. */
static void chained_requests_are_sent_in_several_records(void)
{
	enum { COUNT = 60 };
	static struct raw raw;
	struct process process;
	struct side side;
	struct address peer = connect_raw_peer(&process, &side, (struct options){0}, 0, 0);

	if (process.child) {
		struct ibv_send_wr wrs[COUNT] = {0}, *bad;

		for (int i = 0; i < COUNT; i++)
			wrs[i] = (struct ibv_send_wr){
				.opcode = IBV_WR_SEND,
				.next = i + 1 < COUNT ? &wrs[i + 1] : NULL,
			};
		process_barrier(&process); /* the other side is connected */
		CHECK_OK(side.context->ops.post_send(side.qp, wrs, &bad));
	} else {
		raw_connect(&raw, &peer);
		process_barrier(&process);
		while (LOCKED(raw.frames) < COUNT)
			soft_progress();
		CHECK_EQUAL(raw.frames, COUNT);
		CHECK(raw.records > 2 && raw.records < COUNT / 10);
		raw_end(&raw);
	}
	close_peers(&process, &side);
}

int main(void)
{
	limit_seconds(100);
	STEP(invalid_links_setting_is_rejected());
	STEP(both_sides_use_tcp_if_one_is_limited_to_it());
	STEP(address_127_0_1_1_uses_shared_memory());
	STEP(forked_child_does_not_poll_inherited_rings());
	STEP(early_connection_requests_are_held_up_to_a_limit());
	STEP(each_long_record_is_acknowledged_immediately());
	STEP(chained_requests_are_sent_in_several_records());
	for (int what = 0; what < 3; what++)
		STEP(broken_frame_fails_qp_but_withdrawn_request_does_not(what));
	SIDE(queue_pair_connected_to_itself_needs_no_socket);
	return 0;
}
