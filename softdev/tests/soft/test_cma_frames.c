/* Test long messages, for which the receiving process copies the data directly from the sender's
 * memory. Some tests deregister this memory before the copy. The results must be the same if the
 * kernel forbids copying. */
#define _GNU_SOURCE
#include "cma_side.h"
#include "trace_side.h"

#include "path/shm/shm_internal.h"
#include "link/cma_descriptor.h"

enum { MIB = 1 << 20, PAGE = 4096, PIECES = 20 };

static bool forbidden; /* whether copying is forbidden from the start */

/* The parent is the requester and the child the responder, except for the READs of
 * transfers_continue_when_copying_is_forbidden(). */
struct scene {
	struct process process;
	struct side side;
	struct address peer;
};

static bool is_parent(const struct scene *scene)
{
	return scene->process.child;
}

/* Bring up the queue pairs, and connect them by exchanging a message in each direction. */
static void bring_scene_up(struct scene *scene)
{
	struct side *side = &scene->side;

	scene->peer = exchange_addresses(&scene->process, side);
	bring_up_receiving(side, &scene->peer, 99, 1, 8);
	if (!is_parent(scene))
		expect_done(side, 99);
	DO(side, IBV_WR_SEND, .wr_id = 98);
	if (is_parent(scene))
		expect_done(side, 99);
	process_barrier(&scene->process);
}

static void open_scene(struct scene *scene, struct options options)
{
	memset(scene, 0, sizeof(*scene));
	scene->process = process_split();
	options.sges = PIECES;
	if (!options.timeout)
		options.timeout = 255; /* no timeout, because some steps keep one side waiting */
	open_side(&scene->side, options);
	bring_scene_up(scene);
}

static void close_scene(struct scene *scene)
{
	process_barrier(&scene->process);
	close_side(&scene->side);
	process_join(&scene->process);
}

/* Returns how many bytes of a message are copied directly. Only a short last frame uses the
 * rings. */
static uint64_t cma_bytes(uint32_t length)
{
	return forbidden ? 0
			 : length - (length % MIB < SOFT_CMA_DESC_MIN_PAYLOAD ? length % MIB : 0);
}

/* Split a message into `count` pieces of about the same length, with small gaps between them. */
static void split_message(const struct side *side, size_t at, uint32_t length, int count,
			  struct ibv_sge *sges)
{
	for (int i = 0; i < count; i++) {
		uint32_t part = i < count - 1 ? length / (uint32_t)count : length;

		sges[i] = (struct ibv_sge){
			.addr = (uintptr_t)side->memory + at,
			.length = part,
			.lkey = side->mr->lkey,
		};
		length -= part;
		at += part + 7;
	}
}

static void fill_pieces(const struct ibv_sge *sges, int count, unsigned seed)
{
	for (size_t done = 0; count; done += sges->length, sges++, count--)
		for (uint32_t i = 0; i < sges->length; i++)
			((uint8_t *)(uintptr_t)sges->addr)[i] =
				(uint8_t)(seed + (done + i) * 7 + ((done + i) >> 8));
}

static bool pieces_filled(const struct ibv_sge *sges, int count, unsigned seed)
{
	for (size_t done = 0; count; done += sges->length, sges++, count--)
		for (uint32_t i = 0; i < sges->length; i++)
			if (((uint8_t *)(uintptr_t)sges->addr)[i] !=
			    (uint8_t)(seed + (done + i) * 7 + ((done + i) >> 8)))
				return false;
	return true;
}

static void post_receive(struct side *side, struct ibv_sge *sges, int count)
{
	struct ibv_recv_wr wr = {.wr_id = 2, .sg_list = sges, .num_sge = count}, *bad;

	CHECK_OK(side->context->ops.post_recv(side->qp, &wr, &bad));
}

static void post_pieces(struct scene *scene, enum ibv_wr_opcode opcode, struct ibv_sge *sges,
			int count, uint64_t remote)
{
	struct ibv_send_wr *bad,
		wr = {
			.wr_id = 1,
			.sg_list = sges,
			.num_sge = count,
			.opcode = opcode,
			.wr.rdma = {.remote_addr = remote, .rkey = scene->peer.rkey},
		};

	CHECK_OK(scene->side.context->ops.post_send(scene->side.qp, &wr, &bad));
}

/* Acquire the device's lock, so that ThreadSanitizer sees the order of accesses by the test and by
 * the device's thread. */
static void sync_with_device(struct side *side)
{
	CHECK(state_of(side) != IBV_QPS_RESET);
}

static uint64_t bytes_copied(void)
{
	return LOCKED(soft_device.shm->cma_copied_bytes);
}

static uint64_t descriptors_sent(void)
{
	return LOCKED(soft_device.links->descriptors_sent);
}

/* ---- every byte ---------------------------------------------------------------------------- */

/* Transfer one message. The requester's memory is split into `pieces` SGEs, and for a SEND, the
 * responder's memory is split as well. The receiving side must copy all long frames directly, and
 * no other data. */
static void transfer_message(struct scene *scene, enum ibv_wr_opcode opcode, uint32_t length,
			     int pieces, size_t at, unsigned seed)
{
	bool read = opcode == IBV_WR_RDMA_READ, send = opcode == IBV_WR_SEND;
	bool copies = read == is_parent(scene);
	uint64_t expected = copies ? cma_bytes(length) : 0;
	uint64_t copied = bytes_copied();
	struct side *side = &scene->side;
	struct ibv_sge sges[PIECES], whole;

	split_message(side, at, length, pieces, sges);
	split_message(side, at + 3, length, 1, &whole);
	sync_with_device(side);
	memset(side->memory, 0xee, side->options.memory);
	if (!is_parent(scene)) {
		if (read)
			fill_pieces(&whole, 1, seed);
		else
			post_receive(side, sges, send ? pieces : 1);
	} else if (!read) {
		fill_pieces(sges, pieces, seed);
	}
	sync_with_device(side);
	process_barrier(&scene->process);
	if (is_parent(scene)) {
		post_pieces(scene, opcode, sges, pieces, scene->peer.memory + at + 3);
		struct ibv_wc wc = expect_done(side, 1);

		if (read)
			CHECK_EQUAL(wc.byte_len, length);
		CHECK(pieces_filled(sges, pieces, seed));
	} else if (!read) {
		expect_done(side, 2);
		CHECK(send ? pieces_filled(sges, pieces, seed) : pieces_filled(&whole, 1, seed));
	}
	process_barrier(&scene->process);
	if (read || pieces <= SOFT_CMA_PIECES)
		CHECK_EQUAL(bytes_copied() - copied, expected);
	else /* too many pieces for one descriptor, so the ring carries some data */
		CHECK(bytes_copied() - copied <= expected);
	/* The memory before, between and after the pieces is unchanged. */
	CHECK(side->memory[at - 1] == 0xee);
	if (!is_parent(scene) && !send)
		CHECK(side->memory[at + 2] == 0xee && side->memory[at + 3 + length] == 0xee);
	else
		for (int i = 0; i < pieces; i++)
			CHECK(((uint8_t *)(uintptr_t)sges[i].addr)[sges[i].length] == 0xee);
}

static void long_messages_transfer_every_byte(void)
{
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND,
						     IBV_WR_RDMA_READ};
	static const int pieces[] = {1, 2, 7, SOFT_CMA_PIECES, PIECES};
	const uint32_t least = SOFT_CMA_DESC_MIN_PAYLOAD;
	const uint32_t lengths[] = {1,   least - 1, least,       least + 1,   MIB - 1,
				    MIB, MIB + 1,   MIB + least, 3 * MIB + 17};
	struct scene scene;
	unsigned seed = 0;

	open_scene(&scene, (struct options){.memory = 4 * MIB});
	FOR_EACH (i, opcodes)
		FOR_EACH (j, lengths)
			FOR_EACH (k, pieces)
				if ((uint32_t)pieces[k] <= lengths[j])
					transfer_message(&scene, opcodes[i], lengths[j], pieces[k],
							 1 + next_random() % 5000, ++seed);
	close_scene(&scene);
}

/* Forbid copying in the child after the first round. Transfers that have started are repeated
 * through the ring. */
static void transfers_continue_when_copying_is_forbidden(void)
{
	enum { EACH = 4 * MIB };

	for (int read = 0; read < 2; read++) {
		struct scene scene;
		struct side *side = &scene.side;

		open_scene(&scene, (struct options){.memory = 2 * EACH + PAGE});
		bool asks = read ? !is_parent(&scene) : is_parent(&scene);

		for (unsigned late = 0; late < 2; late++) {
			uint64_t copied = bytes_copied();

			sync_with_device(side);
			if (is_parent(&scene))
				fill(side->memory, 2 * EACH, 10 + late);
			else if (late)
				forbid_copying();
			if (!asks)
				post_receive_at(side, 2, 2 * EACH, 8);
			sync_with_device(side);
			process_barrier(&scene.process);
			for (unsigned i = 0; asks && i < 2; i++)
				POST(side, read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, .wr_id = i,
				     .offset = i * EACH, .length = EACH, AT(&scene.peer, i * EACH));
			if (asks) {
				POST(side, IBV_WR_SEND, .wr_id = 5);
				expect_done(side, 0);
				expect_done(side, 1);
				expect_done(side, 5);
			} else {
				expect_done(side, 2);
			}
			process_barrier(&scene.process);
			if (is_parent(&scene))
				continue;
			CHECK(is_filled(side->memory, 2 * EACH, 10 + late));
			CHECK_EQUAL(bytes_copied() - copied, late || forbidden ? 0 : 2 * EACH);
		}
		close_scene(&scene);
	}
}

/* ---- taken away in the middle -------------------------------------------------------------- */

/* Set this process's port up or down. While it is down, the process does not handle its peer's
 * messages. */
static void set_port(bool up)
{
	CHECK_OK(aiordma_embedded_raise(up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR));
}

static void deregister(struct side *side)
{
	dereg_own(side);
	CHECK_OK(mprotect(side->memory, side->options.memory, PROT_NONE));
}

/* Deregister the requester's memory. Its request fails with a local protection error
 * (IBTA 10.7.2.2), and later requests are flushed. The responder executes the earlier requests and
 * reports no error. */
static void requester_deregistration_causes_local_prot_error(void)
{
	for (int send = 0; send < 2; send++) {
		struct scene scene;
		struct side *side = &scene.side;

		open_scene(&scene, (struct options){.memory = 2 * MIB});
		if (!is_parent(&scene)) {
			post_receive_at(side, 7, 0, 8);
			post_receive_at(side, 8, 0, MIB);
			set_port(false);
			process_barrier(&scene.process);
			process_barrier(&scene.process);
			set_port(true);
			expect_done(side, 7);
			process_barrier(&scene.process);
			expect_state(side, IBV_QPS_RTS);
			CHECK_OK(to_state(side, IBV_QPS_ERR));
			expect_wc(side, 8, IBV_WC_WR_FLUSH_ERR);
			CHECK_EQUAL(poll_cq(side, 1, &(struct ibv_wc){0}), 0);
			close_scene(&scene);
			continue;
		}
		uint64_t given = descriptors_sent();

		process_barrier(&scene.process);
		POST(side, IBV_WR_SEND, .wr_id = 1, .length = 8, .flags = IBV_SEND_INLINE);
		POST(side, send ? IBV_WR_SEND : IBV_WR_RDMA_WRITE_WITH_IMM, .wr_id = 2,
		     .length = MIB, AT(&scene.peer, MIB));
		POST(side, IBV_WR_RDMA_WRITE, .wr_id = 3, .length = MIB, AT(&scene.peer, 0));
		CHECK_EQUAL(descriptors_sent() - given, forbidden ? 0 : 2);
		deregister(side);
		process_barrier(&scene.process);
		expect_done(side, 1);
		expect_wc(side, 2, IBV_WC_LOC_PROT_ERR);
		expect_wc(side, 3, IBV_WC_WR_FLUSH_ERR);
		expect_state(side, IBV_QPS_ERR);
		process_barrier(&scene.process);
		close_scene(&scene);
	}
}

/* Wait for IBV_EVENT_QP_ACCESS_ERR, skipping the earlier events of the port and the connection. */
static void expect_access_error(struct side *side)
{
	struct ibv_async_event event = {0};

	while (event.event_type != IBV_EVENT_QP_ACCESS_ERR) {
		CHECK_OK(verbs->ibv_get_async_event(side->context, &event));
		verbs->ibv_ack_async_event(&event);
	}
	expect_state(side, IBV_QPS_ERR);
}

/* Deregister the responder's memory after the responder has sent its responses. The requester must
 * get a remote access error (IBTA 9.7.4.1.5), and the responder's application must get an event.
 * Revoked responses use up no retries, so the status must be the same if `retry_cnt` is 0. */
static void responder_deregistration_causes_access_error(uint8_t retry_cnt, unsigned reads)
{
	struct scene scene;
	struct side *side = &scene.side;

	open_scene(&scene, (struct options){.memory = 2 * MIB, .retry_cnt = retry_cnt});
	if (is_parent(&scene)) {
		process_barrier(&scene.process); /* the peer's port is down now */
		for (unsigned i = 1; i <= reads; i++)
			POST(side, IBV_WR_RDMA_READ, .wr_id = i, .length = 2 * MIB,
			     AT(&scene.peer, 0));
		set_port(false);
		process_barrier(&scene.process);
		process_barrier(&scene.process);
		set_port(true);
		expect_wc(side, 1, IBV_WC_REM_ACCESS_ERR);
		if (reads == 2)
			expect_wc(side, 2, IBV_WC_WR_FLUSH_ERR);
	} else {
		const uint32_t rkey = side->mr->rkey;
		uint64_t given = descriptors_sent();
		char folder[64], path[96];
		size_t at = 0;
		struct ibv_wc wc;

		snprintf(path, sizeof(path), "%s/trace", new_folder(folder));
		CHECK_OK(aiordma_trace_start(path, (char[4097]){0}, 4097));
		post_receive_at(side, 7, 0, 8);
		set_port(false);
		process_barrier(&scene.process);
		process_barrier(&scene.process);
		set_port(true);
		while (!forbidden && descriptors_sent() - given < 2)
			CHECK_EQUAL(poll_cq(side, 1, &wc), 0);
		deregister(side);
		process_barrier(&scene.process);
		expect_wc(side, 7, IBV_WC_WR_FLUSH_ERR);
		expect_access_error(side);
		aiordma_trace_stop();
		read_trace(path);
		const char *line = next_of("access_refused", &at);

		CHECK(line);
		CHECK_EQUAL(number_field(line, "rkey"), rkey);
		CHECK_OK(unlink(path));
		CHECK_OK(rmdir(folder));
	}
	close_scene(&scene);
}

/* Acquire the child's device lock. The child handles no messages until the step releases the
 * lock. */
static void hold_child_lock(struct scene *scene)
{
	if (!is_parent(scene))
		soft_lock();
	process_barrier(&scene->process);
}

/* Deregister the source of a WRITE at the requester. When the responder has refused the WRITE,
 * deregister the responder's memory as well, so that an earlier READ fails, too. The requester must
 * report the error of the READ, because the READ was posted first. */
static void first_error_wins_when_both_sides_deregister(void)
{
	struct scene scene;
	struct side *side = &scene.side;
	struct ibv_mr *source = NULL;

	if (forbidden)
		return; /* data in the ring cannot be revoked */
	open_scene(&scene, (struct options){.memory = 2 * MIB});
	hold_child_lock(&scene);
	if (is_parent(&scene)) {
		CHECK(source = verbs->ibv_reg_mr(side->pd, side->memory + MIB, MIB, ALL_RIGHTS));
		POST(side, IBV_WR_RDMA_READ, .wr_id = 1, .length = MIB, AT(&scene.peer, 0));
		POST(side, IBV_WR_RDMA_WRITE, .wr_id = 2, .length = MIB, .offset = MIB,
		     .lkey = source->lkey, AT(&scene.peer, MIB));
		dereg(source);
		soft_lock();
		process_barrier(&scene.process);
		process_barrier(&scene.process);
		soft_unlock();
		expect_wc(side, 1, IBV_WC_REM_ACCESS_ERR);
		expect_wc(side, 2, IBV_WC_WR_FLUSH_ERR);
	} else {
		process_barrier(&scene.process);
		soft_unlock();
		while (!LOCKED(soft_qp_of(side->qp)->responder.failed))
			CHECK_EQUAL(poll_cq(side, 1, &(struct ibv_wc){0}), 0);
		deregister(side);
		process_barrier(&scene.process);
		expect_access_error(side);
	}
	close_scene(&scene);
}

/* Wait until the link to the failed peer is gone. By then, the side has handled all frames that the
 * peer sent. */
static void await_disconnect(struct side *side)
{
	while (LOCKED(soft_qp_of(side->qp)->link != NULL))
		CHECK_EQUAL(poll_cq(side, 1, &(struct ibv_wc){0}), 0);
}

/* Run the handler of the timer that limits how long a queue pair may take to connect to its
 * peer. */
static void expire_reach_timer(struct side *side)
{
	struct soft_timer *timer = &soft_qp_of(side->qp)->reach_timer;

	soft_lock();
	CHECK(timer->running);
	soft_timer_stop(timer);
	timer->expired(timer);
	soft_unlock();
}

/* Before the peer copies the owner's memory, move the owner's queue pair to the error state and
 * deregister the memory. A queue pair in the error state sends no responses, so the peer must not
 * get an access error. A READ fails when the peer's retries are exhausted (IBTA 9.7.6.1.3). For
 * other requests, the peer's receive stays posted. */
static void failed_owner_sends_no_access_error(enum ibv_wr_opcode opcode)
{
	const bool read = opcode == IBV_WR_RDMA_READ;
	struct scene scene;
	struct side *side = &scene.side;

	open_scene(&scene, (struct options){.memory = 4 * MIB, .timeout = 20});
	const bool is_owner = read != is_parent(&scene);
	uint64_t given = descriptors_sent();

	if (!is_parent(&scene))
		post_receive_at(side, 2, 0, 2 * MIB);
	hold_child_lock(&scene);
	if (is_parent(&scene))
		POST(side, opcode, .wr_id = 1, .length = 2 * MIB, AT(&scene.peer, 2 * MIB));
	if (is_parent(&scene) && read)
		soft_lock();
	process_barrier(&scene.process);
	if (is_owner) {
		if (read)
			soft_unlock();
		while (!forbidden && descriptors_sent() - given < 2)
			CHECK_EQUAL(poll_cq(side, 1, &(struct ibv_wc){0}), 0);
		enter_state(side, IBV_QPS_ERR);
		deregister(side);
		expect_wc(side, read ? 2 : 1, IBV_WC_WR_FLUSH_ERR);
		process_barrier(&scene.process);
	} else {
		process_barrier(&scene.process);
		soft_unlock();
		await_disconnect(side);
		expect_state(side, IBV_QPS_RTS);
		if (read) {
			expire_reach_timer(side);
			expect_wc(side, 1, IBV_WC_RETRY_EXC_ERR);
		} else {
			enter_state(side, IBV_QPS_ERR);
			expect_wc(side, 2, IBV_WC_WR_FLUSH_ERR);
		}
	}
	close_scene(&scene);
}

/* Move the responder's queue pair to the error state and deregister its memory. The responder must
 * not have handled the request for this memory yet. */
static void failed_responder_exhausts_requester_retries(enum ibv_wr_opcode opcode, uint32_t length)
{
	struct scene scene;
	struct side *side = &scene.side;

	open_scene(&scene, (struct options){.memory = MIB, .timeout = 20});
	if (!is_parent(&scene))
		set_port(false);
	process_barrier(&scene.process);
	if (is_parent(&scene))
		POST(side, opcode, .wr_id = 1, .length = length, AT(&scene.peer, 0));
	process_barrier(&scene.process);
	if (is_parent(&scene)) {
		await_disconnect(side);
		expect_state(side, IBV_QPS_RTS);
		expire_reach_timer(side);
		expect_wc(side, 1, IBV_WC_RETRY_EXC_ERR);
	} else {
		enter_state(side, IBV_QPS_ERR);
		deregister(side);
		set_port(true);
	}
	close_scene(&scene);
}

/* Deregister, unmap and reuse the memory of one side at random times. Requests that succeed must
 * have transferred the original bytes. */
static void successful_copies_have_original_bytes_when_unmapped(enum ibv_wr_opcode opcode)
{
	enum { ROUNDS = 40, WINDOW = 4 };
	bool read = opcode == IBV_WR_RDMA_READ;
	struct scene scene;
	struct side *side = &scene.side;

	open_scene(&scene, (struct options){.memory = WINDOW * MIB});
	for (unsigned round = 0; round < ROUNDS; round++) {
		bool owner = read != is_parent(&scene); /* owner of the memory to be copied */
		size_t length = side->options.memory;
		struct ibv_wc wc = {0};

		if (owner) {
			fill(side->memory, MIB, round);
			for (int i = 1; i < WINDOW; i++)
				memcpy(side->memory + i * MIB, side->memory, MIB);
		}
		sync_with_device(side);
		if (!is_parent(&scene))
			for (unsigned i = 0; i < WINDOW; i++)
				post_receive_at(side, i, i * MIB, MIB);
		process_barrier(&scene.process);
		if (is_parent(&scene))
			for (unsigned i = 0; i < WINDOW; i++)
				POST(side, opcode, .wr_id = i, .offset = i * MIB, .length = MIB,
				     AT(&scene.peer, 0));
		if (owner) {
			for (volatile unsigned wait = next_random() % 400000; wait; wait--)
				;
			dereg(side->mr);
			munmap(side->memory, length);
			CHECK(mmap(side->memory, length, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == side->memory);
			memset(side->memory, 0xff, length / 2);
			CHECK(side->mr = verbs->ibv_reg_mr(side->pd, side->memory, length,
							   ALL_RIGHTS));
		}
		/* The parent's requests complete in order. */
		for (unsigned i = 0; is_parent(&scene) && i < WINDOW; i++) {
			wc = next_wc(side);
			CHECK_EQUAL(wc.wr_id, i);
			if (wc.status != IBV_WC_SUCCESS)
				break;
			if (read)
				CHECK(is_filled(side->memory + i * MIB, MIB, round));
		}
		if (is_parent(&scene) && wc.status != IBV_WC_SUCCESS)
			CHECK_EQUAL(wc.status, read ? IBV_WC_REM_ACCESS_ERR : IBV_WC_LOC_PROT_ERR);
		process_barrier(&scene.process);
		/* The child's receives complete in order, and the remaining ones are flushed. */
		if (!is_parent(&scene))
			CHECK_OK(to_state(side, IBV_QPS_ERR));
		for (unsigned i = 0; !is_parent(&scene) && i < WINDOW; i++) {
			wc = next_wc(side);
			CHECK_EQUAL(wc.wr_id, i);
			if (wc.status == IBV_WC_SUCCESS)
				CHECK(is_filled(side->memory + i * MIB, MIB, round));
			else
				CHECK_EQUAL(wc.status, IBV_WC_WR_FLUSH_ERR);
		}
		process_barrier(&scene.process);
		CHECK_OK(to_state(side, IBV_QPS_RESET));
		while (poll_cq(side, 1, &wc))
			;
		bring_scene_up(&scene);
	}
	close_scene(&scene);
}

int main(void)
{
	limit_seconds(110);
	/* No copy counts as slow, even on a busy machine. */
	soft_device.shm->min_slow_copy_ns = UINT64_MAX;
	for (int way = 0; way < 2; way++) {
		forbidden = way;
		if (forbidden)
			forbid_copying();
		STEP(long_messages_transfer_every_byte());
		STEP(transfers_continue_when_copying_is_forbidden());
		STEP(requester_deregistration_causes_local_prot_error());
		STEP(responder_deregistration_causes_access_error(7, 1));
		STEP(responder_deregistration_causes_access_error(7, 2));
		STEP(responder_deregistration_causes_access_error(8, 1));
		STEP(responder_deregistration_causes_access_error(8, 2));
		STEP(first_error_wins_when_both_sides_deregister());
		STEP(failed_owner_sends_no_access_error(IBV_WR_RDMA_READ));
		STEP(failed_owner_sends_no_access_error(IBV_WR_SEND));
		STEP(failed_owner_sends_no_access_error(IBV_WR_RDMA_WRITE_WITH_IMM));
		STEP(failed_responder_exhausts_requester_retries(IBV_WR_RDMA_READ, MIB));
		STEP(failed_responder_exhausts_requester_retries(IBV_WR_RDMA_WRITE, MIB));
		STEP(failed_responder_exhausts_requester_retries(IBV_WR_ATOMIC_FETCH_AND_ADD, 8));
		STEP(successful_copies_have_original_bytes_when_unmapped(IBV_WR_SEND));
		STEP(successful_copies_have_original_bytes_when_unmapped(IBV_WR_RDMA_READ));
	}
	return 0;
}
