/* Test memory windows and invalidation: ibv_alloc_mw(3), ibv_bind_mw(3), ibv_post_send(3); IBTA
 * 9.4.1.1, 10.6.6, 10.6.7. The access that a window grants, and its end, are tested on every device
 * in tests/verbs/test_memory_window.py. */
#include "adopted_side.h"

enum {
	REMOTE_RIGHTS = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	MR_RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND, /* no direct access for peers */
};

/* A connected pair. Peers can access b's memory region only through a window. */
struct scene {
	struct side a, b;
	struct ibv_mr *mr;
	struct ibv_mw *mw;
};

static void open_scene_with(struct scene *scene, enum ibv_mw_type type, struct options options)
{
	const size_t length = options.memory ? options.memory : 8192;

	open_pair(&scene->a, &scene->b, options);
	CHECK(scene->mr = verbs->ibv_reg_mr(scene->b.pd, scene->b.memory, length, MR_RIGHTS));
	CHECK(scene->mw = scene->b.context->ops.alloc_mw(scene->b.pd, type));
}

static void open_scene(struct scene *scene, enum ibv_mw_type type)
{
	open_scene_with(scene, type, (struct options){0});
}

static int dealloc(struct ibv_mw *mw)
{
	return mw->context->ops.dealloc_mw(mw);
}

static void close_scene(struct scene *scene)
{
	if (scene->mw)
		CHECK_OK(dealloc(scene->mw));
	if (scene->mr)
		dereg(scene->mr);
	close_pair(&scene->a, &scene->b);
}

/* Run a test with its own scene. */
#define SCENE(test, type)                                                                          \
	do {                                                                                       \
		struct scene scene;                                                                \
		current_step = #test;                                                              \
		open_scene(&scene, type);                                                          \
		test(&scene);                                                                      \
		close_scene(&scene);                                                               \
	} while (0)

static struct ibv_mw_bind_info bind_info_of(struct ibv_mr *mr, size_t offset, uint64_t length,
					    unsigned access)
{
	return (struct ibv_mw_bind_info){
		.mr = mr,
		.addr = (uintptr_t)mr->addr + offset,
		.length = length,
		.mw_access_flags = access,
	};
}

static int bind_type_1(struct side *side, struct ibv_mw *mw, uint64_t wr_id,
		       struct ibv_mw_bind_info info)
{
	struct ibv_mw_bind bind = {.wr_id = wr_id, .bind_info = info};

	return side->context->ops.bind_mw(side->qp, mw, &bind);
}

static struct ibv_send_wr bind_wr(struct ibv_mw *mw, uint64_t wr_id, uint32_t rkey,
				  struct ibv_mw_bind_info info)
{
	return (struct ibv_send_wr){
		.wr_id = wr_id,
		.opcode = IBV_WR_BIND_MW,
		.bind_mw = {.mw = mw, .rkey = rkey, .bind_info = info},
	};
}

static int bind_type_2(struct side *side, struct ibv_mw *mw, uint64_t wr_id, uint32_t rkey,
		       struct ibv_mw_bind_info info)
{
	struct ibv_send_wr wr = bind_wr(mw, wr_id, rkey, info);

	return post_wr(side, &wr);
}

/* Bind the window. Returns its new key. */
static uint32_t bind_window(struct scene *scene, struct ibv_mw_bind_info info)
{
	uint32_t key = next_key(scene->mw->rkey);

	if (scene->mw->type == IBV_MW_TYPE_1)
		CHECK_OK(bind_type_1(&scene->b, scene->mw, 70, info));
	else
		CHECK_OK(bind_type_2(&scene->b, scene->mw, 70, key, info));
	CHECK_EQUAL(expect_done(&scene->b, 70).opcode, IBV_WC_BIND_MW);
	if (scene->mw->type == IBV_MW_TYPE_1)
		CHECK_EQUAL(scene->mw->rkey, key);
	return key;
}

static int invalidate(struct side *side, uint64_t wr_id, uint32_t rkey, unsigned flags)
{
	struct ibv_send_wr wr = {.wr_id = wr_id,
				 .opcode = IBV_WR_LOCAL_INV,
				 .invalidate_rkey = rkey,
				 .send_flags = flags};

	return post_wr(side, &wr);
}

static struct request write_to(struct scene *scene, size_t offset, uint32_t length, uint32_t rkey)
{
	return (struct request){.opcode = IBV_WR_RDMA_WRITE,
				.wr_id = 1,
				.length = length,
				.remote = (uintptr_t)scene->b.memory + offset,
				.rkey = rkey};
}

static void expect_allowed(struct scene *scene, struct request request)
{
	run_request(&scene->a, IBV_WC_SUCCESS, request);
}

/* ---- allocation ---------------------------------------------------------------------------- */

/* Check the device's window capabilities. The windows themselves are tested in
 * tests/verbs/test_memory_window.py. */
static void device_reports_window_capabilities(struct side *side)
{
	const unsigned flags = IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B |
			       IBV_DEVICE_MEM_MGT_EXTENSIONS;
	struct ibv_device_attr device;

	CHECK_OK(verbs->ibv_query_device(side->context, &device));
	CHECK_EQUAL(device.device_cap_flags & flags, flags);
	CHECK(!(device.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2A)); /* excludes type 2B */
	CHECK(device.max_mw > 0);
	REFUSED(side->context->ops.alloc_mw(side->pd, (enum ibv_mw_type)3), EINVAL);
	struct ibv_mw *mw = side->context->ops.alloc_mw(side->pd, IBV_MW_TYPE_1);

	destroy_qp(side);
	dereg_own(side);
	CHECK_EQUAL(verbs->ibv_dealloc_pd(side->pd), EBUSY);
	CHECK_OK(dealloc(mw));
}

static void window_key_cannot_be_used_as_an_lkey(struct scene *scene)
{
	uint32_t key = bind_window(scene, bind_info_of(scene->mr, 0, 4096, REMOTE_RIGHTS));

	RUN(&scene->b, IBV_WC_LOC_PROT_ERR, IBV_WR_SEND, .wr_id = 5, .length = 8, .lkey = key);
}

/* ---- the end of a window ------------------------------------------------------------------- */

/* Check that a peer can invalidate only a bound type 2 window of the queue pair that it is
 * connected to. With any other key, the owner's receive and the peer's request fail
 * (IBTA 9.9.3). */
static void peer_can_invalidate_only_its_bound_type_2_window(void)
{
	for (int way = 0; way < 6; way++) {
		struct scene scene;

		open_scene(&scene, way == 0 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2);
		uint32_t key = bind_window(&scene, bind_info_of(scene.mr, 0, 64, REMOTE_RIGHTS));
		struct ibv_qp *first = scene.b.qp;
		struct side c;

		OPEN(&c);
		if (way == 1)
			key = scene.mr->rkey;
		if (way == 2)
			key ^= 1; /* the window's previous or next key */
		if (way == 3)
			key ^= 0x10000; /* another object */
		if (way == 4) {
			CHECK_OK(invalidate(&scene.b, 71, key, 0));
			expect_done(&scene.b, 71);
		}
		if (way == 5) { /* a window of another queue pair */
			scene.b.qp = create_qp(&scene.b);
			connect_pair(&scene.b, &c);
		}
		struct side *from = way == 5 ? &c : &scene.a;

		post_receive_at(&scene.b, 60, 8192, 8);
		RUN(from, IBV_WC_REM_ACCESS_ERR, IBV_WR_SEND_WITH_INV, .wr_id = 4, .length = 8,
		    .imm = key);
		CHECK_EQUAL(expect_wc(&scene.b, 60, IBV_WC_REM_INV_REQ_ERR).wc_flags, 0);
		expect_event(&scene.b, IBV_EVENT_QP_ACCESS_ERR);
		expect_state(&scene.b, IBV_QPS_ERR);
		if (way == 5) {
			CHECK_OK(verbs->ibv_destroy_qp(scene.b.qp));
			scene.b.qp = first;
			expect_allowed(&scene, write_to(&scene, 0, 8, key));
		}
		close_side(&c);
		close_scene(&scene);
	}
}

static void local_invalidate_fails_without_a_bound_window(void)
{
	for (int way = 0; way < 4; way++) {
		struct scene scene;

		open_scene(&scene, way == 0 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2);
		uint32_t key =
			way == 3 ? scene.mw->rkey : /* not bound */
				bind_window(&scene, bind_info_of(scene.mr, 0, 64, REMOTE_RIGHTS));

		if (way == 1)
			key = scene.mr->lkey; /* valid until the region is deregistered */
		if (way == 2)
			key ^= 1;
		post_receive_at(&scene.b, 60, 8192, 8);
		CHECK_OK(invalidate(&scene.b, 71, key, 0));
		expect_wc(&scene.b, 71, IBV_WC_MW_BIND_ERR);
		expect_wc(&scene.b, 60, IBV_WC_WR_FLUSH_ERR);
		expect_state(&scene.b, IBV_QPS_ERR);
		close_scene(&scene);
	}
}

/* Check that an invalidation stops a transfer in progress, and that nothing accesses the memory
 * after the invalidation has completed. */
static void invalidation_stops_a_transfer_in_progress(void)
{
	enum { BIG = 64 << 20 };

	/* This thread may be scheduled too late to invalidate the window before the transfer
	 * finishes. In this case, repeat the round. */
	for (int round = 0, late = 0; round < 2;) {
		struct scene scene;

		open_scene_with(&scene, IBV_MW_TYPE_2, (struct options){.memory = BIG});
		uint32_t key = bind_window(&scene, bind_info_of(scene.mr, 0, BIG, REMOTE_RIGHTS));
		struct request request = write_to(&scene, 0, BIG, key);
		struct ibv_wc wc;

		request.opcode = round ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
		CHECK_OK(post(&scene.a, request));
		CHECK_OK(invalidate(&scene.b, 71, key, 0));
		expect_done(&scene.b, 71);
		CHECK_OK(mprotect(scene.b.memory, BIG, PROT_NONE)); /* exposes late accesses */
		wc = next_wc(&scene.a);
		close_scene(&scene);
		if (wc.status == IBV_WC_SUCCESS) {
			CHECK(++late < 50);
			continue;
		}
		/* If a response frame was only partly sent, the device cannot finish it and closes
		 * the stream. The READ then fails with IBV_WC_RETRY_EXC_ERR. */
		CHECK(wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_RETRY_EXC_ERR);
		round++;
	}
}

/* ---- binds that fail ----------------------------------------------------------------------- */

/* Post a type 2 bind. Check that it fails and that the posted receive is flushed, and close the
 * scene. */
static void expect_bind_of_fails(struct scene *scene, struct ibv_mw *mw, uint32_t rkey,
				 struct ibv_mw_bind_info info)
{
	post_receive_at(&scene->b, 60, 8192, 8);
	CHECK_OK(bind_type_2(&scene->b, mw, 72, rkey, info));
	expect_wc(&scene->b, 72, IBV_WC_MW_BIND_ERR);
	expect_wc(&scene->b, 60, IBV_WC_WR_FLUSH_ERR);
	expect_state(&scene->b, IBV_QPS_ERR);
	close_scene(scene);
}

static void expect_bind_fails(struct scene *scene, uint32_t rkey, struct ibv_mw_bind_info info)
{
	expect_bind_of_fails(scene, scene->mw, rkey, info);
}

static void bind_outside_the_region_fails(void)
{
	static const struct {
		size_t offset;
		uint64_t length;
	} outside[] = {{8192 - 63, 64}, {(size_t)-1, 64}, {0, 8193}, {8192, UINT64_MAX}, {9000, 1}};

	FOR_EACH (i, outside) {
		struct scene scene;

		open_scene(&scene, IBV_MW_TYPE_1 + i % 2);
		expect_bind_fails(&scene, next_key(scene.mw->rkey),
				  bind_info_of(scene.mr, outside[i].offset, outside[i].length,
					       REMOTE_RIGHTS));
	}
}

static void bind_beyond_the_regions_rights_fails(void)
{
	static const struct {
		unsigned region, window;
		bool fine;
	} cases[] = {
		{IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_WRITE, false},
		{IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_WRITE, false}, /* C10-74 */
		{IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_ATOMIC, false}, /* C10-74 */
		{IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_READ, true},
		{IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED, IBV_ACCESS_REMOTE_READ, false},
	};

	FOR_EACH (i, cases) {
		struct scene scene;

		open_scene(&scene, IBV_MW_TYPE_2);
		dereg(scene.mr);
		CHECK(scene.mr = verbs->ibv_reg_mr(scene.b.pd, scene.b.memory, 4096,
						   (int)cases[i].region));
		struct ibv_mw_bind_info info = bind_info_of(scene.mr, 0, 64, cases[i].window);

		if (cases[i].fine) {
			bind_window(&scene, info);
			close_scene(&scene);
			continue;
		}
		if (cases[i].region & IBV_ACCESS_ZERO_BASED)
			info.addr = 0;
		expect_bind_fails(&scene, next_key(scene.mw->rkey), info);
	}
}

static void bind_with_wrong_region_window_or_key_fails(void)
{
	struct scene scene, other;

	/* The region or the window belongs to another domain (C10-72). */
	open_scene(&other, IBV_MW_TYPE_2);
	open_scene(&scene, IBV_MW_TYPE_2);
	expect_bind_fails(&scene, next_key(scene.mw->rkey),
			  bind_info_of(other.mr, 0, 64, REMOTE_RIGHTS));
	open_scene(&scene, IBV_MW_TYPE_2);
	expect_bind_of_fails(&scene, other.mw, next_key(other.mw->rkey),
			     bind_info_of(scene.mr, 0, 64, REMOTE_RIGHTS));
	close_scene(&other);
	/* The bind names a window's key instead of a region's. */
	open_scene(&scene, IBV_MW_TYPE_2);
	struct ibv_mr imposter = *scene.mr;

	imposter.lkey = scene.mw->rkey;
	expect_bind_fails(&scene, next_key(scene.mw->rkey),
			  bind_info_of(&imposter, 0, 64, REMOTE_RIGHTS));
	/* The key has the wrong upper bits, the length is 0 (o10-37.2.40), or the window is already
	 * bound (o10-37.2.30). */
	open_scene(&scene, IBV_MW_TYPE_2);
	expect_bind_fails(&scene, scene.mw->rkey ^ 0x100,
			  bind_info_of(scene.mr, 0, 64, REMOTE_RIGHTS));
	open_scene(&scene, IBV_MW_TYPE_2);
	expect_bind_fails(&scene, next_key(scene.mw->rkey),
			  bind_info_of(scene.mr, 0, 0, REMOTE_RIGHTS));
	open_scene(&scene, IBV_MW_TYPE_2);
	uint32_t key = bind_window(&scene, bind_info_of(scene.mr, 0, 64, REMOTE_RIGHTS));

	expect_bind_fails(&scene, next_key(key), bind_info_of(scene.mr, 0, 64, REMOTE_RIGHTS));
}

static void invalid_bind_is_rejected_when_posted(struct scene *scene)
{
	struct ibv_mw_bind_info info = bind_info_of(scene->mr, 0, 64, REMOTE_RIGHTS);

	CHECK_EQUAL(bind_type_1(&scene->b, scene->mw, 1, info), EINVAL); /* ibv_bind_mw(3) */
	CHECK_EQUAL(bind_type_2(&scene->b, NULL, 1, 1, info), EINVAL);
	info.mw_access_flags |= IBV_ACCESS_MW_BIND; /* not valid for a window */
	CHECK_EQUAL(bind_type_2(&scene->b, scene->mw, 1, 1, info), EINVAL);
	info = bind_info_of(scene->mr, 0, 64, REMOTE_RIGHTS);
	info.mr = NULL;
	CHECK_EQUAL(bind_type_2(&scene->b, scene->mw, 1, 1, info), EINVAL);
	expect_no_wc(&scene->b);
}

/* Check that a bind fails if its window is deallocated before the bind executes. The queue pair is
 * in SQD, which delays the bind (IBTA 10.3.1.5). */
static void bind_of_a_deallocated_window_fails(struct scene *scene)
{
	CHECK_OK(to_state(&scene->b, IBV_QPS_SQD));
	CHECK_OK(bind_type_1(&scene->b, scene->mw, 72, bind_info_of(scene->mr, 0, 64, 0)));
	CHECK_OK(dealloc(scene->mw));
	scene->mw = NULL;
	expect_no_wc(&scene->b);
	CHECK_OK(to_state(&scene->b, IBV_QPS_RTS));
	expect_wc(&scene->b, 72, IBV_WC_MW_BIND_ERR);
}

/* ---- order --------------------------------------------------------------------------------- */

/* Check that a request waits for earlier READs only if it is fenced (IBTA 10.8.3.3). The test plays
 * the peer and decides when to respond. */
static void only_a_fenced_bind_waits_for_earlier_reads(void)
{
	for (int fenced = 0; fenced < 2; fenced++) {
		struct side side;

		OPEN(&side);
		int fd = adopt(&side);
		struct ibv_mr *mr = verbs->ibv_reg_mr(side.pd, side.memory, 4096, MR_RIGHTS);
		struct ibv_mw *mw = side.context->ops.alloc_mw(side.pd, IBV_MW_TYPE_1);
		struct ibv_mw_bind bind = {.wr_id = 2,
					   .bind_info = bind_info_of(mr, 0, 64, REMOTE_RIGHTS),
					   .send_flags = fenced ? IBV_SEND_FENCE : 0};

		POST(&side, IBV_WR_RDMA_READ, .wr_id = 1, .length = 8);
		receive_stream_frame(fd, NULL, 0);
		CHECK_OK(side.context->ops.bind_mw(side.qp, mw, &bind));
		expect_no_wc(&side);
		/* A region with a bound window is busy, which shows whether the bind has
		 * executed. */
		CHECK_EQUAL(verbs->ibv_dereg_mr(mr), fenced ? 0 : EBUSY);
		send_stream_frame(
			fd,
			(struct soft_frame){.opcode = SOFT_READ_DATA, .length = 8, .psn = side.psn},
			NULL);
		expect_done(&side, 1);
		/* A fenced bind executes only after the region has been deregistered. */
		expect_wc(&side, 2, fenced ? IBV_WC_MW_BIND_ERR : IBV_WC_SUCCESS);
		CHECK_OK(dealloc(mw));
		if (!fenced)
			dereg(mr);
		close(fd);
		close_side(&side);
	}
}

int main(void)
{
	limit_seconds(90);
	SIDE(device_reports_window_capabilities);
	SCENE(window_key_cannot_be_used_as_an_lkey, IBV_MW_TYPE_1);
	STEP(peer_can_invalidate_only_its_bound_type_2_window());
	STEP(local_invalidate_fails_without_a_bound_window());
	STEP(invalidation_stops_a_transfer_in_progress());
	STEP(bind_outside_the_region_fails());
	STEP(bind_beyond_the_regions_rights_fails());
	STEP(bind_with_wrong_region_window_or_key_fails());
	SCENE(invalid_bind_is_rejected_when_posted, IBV_MW_TYPE_2);
	SCENE(bind_of_a_deallocated_window_fails, IBV_MW_TYPE_1);
	STEP(only_a_fenced_bind_waits_for_earlier_reads());
	return 0;
}
