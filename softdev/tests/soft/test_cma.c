/* Test copies between two processes (src/path/shm/cma.c, cma_export.c) without queue pairs. Unless
 * stated otherwise, the parent owns the memory and the child copies. */
#define _GNU_SOURCE
#include "cma_side.h"

#include <sys/uio.h>

#include "objects/objects.h"
#include "path/shm/shm_internal.h"

enum { MIB = 1 << 20, PAGE = 4096 };

static struct soft_cma_page *pages; /* the parent's page, then the child's */

/* Two processes with private memory. They share two pages, one for each side, as local peers do. */
struct scene {
	struct process process;
	struct soft_cma cma;
	uint8_t *memory;
	size_t length;
};

static struct soft_cma_page *page_of(bool parent)
{
	return (struct soft_cma_page *)((uint8_t *)pages + (parent ? 0 : SOFT_CMA_PAGE));
}

static uint8_t *map(size_t length)
{
	uint8_t *memory =
		mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(memory != MAP_FAILED);
	return memory;
}

static void begin(struct scene *scene, size_t length)
{
	*scene = (struct scene){.memory = map(length), .length = length};
	if (!pages)
		pages = mmap(NULL, 2 * SOFT_CMA_PAGE, PROT_READ | PROT_WRITE,
			     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(pages != MAP_FAILED);
	memset(pages, 0, 2 * SOFT_CMA_PAGE);
	scene->process = process_split();
	CHECK_OK(soft_cma_init(&scene->cma, page_of(scene->process.child),
			       page_of(!scene->process.child)));
	scene->cma.peer_secret_at = (uintptr_t)scene->cma.secret; /* same in both processes */
	process_barrier(&scene->process);
}

static bool probe(struct scene *scene)
{
	return soft_cma_probe(&scene->cma, scene->process.child ? scene->process.child : getppid());
}

/* Start a scene in which each process may copy from the other. */
static void begin_with_access(struct scene *scene, size_t length)
{
	begin(scene, length);
	CHECK(probe(scene));
	process_barrier(&scene->process);
}

static void end(struct scene *scene)
{
	soft_cma_end(&scene->cma);
	process_join(&scene->process);
	munmap(scene->memory, scene->length);
}

static struct soft_cma_desc descriptor_of(const struct soft_cma_export *export,
					  const uint8_t *memory, uint32_t length)
{
	return (struct soft_cma_desc){
		.slot = export->slot,
		.generation = export->generation,
		.count = 1,
		.length = length,
		.pieces = {{.address = (uintptr_t)memory, .length = length}},
	};
}

static struct soft_cma_desc export_memory(struct soft_cma *cma, const uint8_t *memory,
					  uint32_t length)
{
	struct soft_cma_export *export = soft_cma_export_new(cma);

	CHECK(export);
	return descriptor_of(export, memory, length);
}

/* Copy in steps of `step` bytes, as when a frame's payload is received in parts. */
static enum soft_cma_result copy_all(struct soft_cma *cma, const struct soft_cma_desc *desc,
				     uint8_t *to, uint32_t step)
{
	for (uint32_t at = 0; at < desc->length; at += step) {
		uint32_t part = desc->length - at < step ? desc->length - at : step;
		struct iovec iov = {.iov_base = to + at, .iov_len = part};
		enum soft_cma_result reached = soft_cma_copy(cma, desc, at, &iov, 1);

		if (reached != SOFT_CMA_COPIED)
			return reached;
	}
	return SOFT_CMA_COPIED;
}

static bool match_every_export(const struct soft_cma_export *export, const void *what)
{
	(void)export;
	(void)what;
	return true;
}

static unsigned revoke_all(struct soft_cma *cma)
{
	struct soft_cma_export lost[SOFT_CMA_SLOTS];

	return soft_cma_revoke(cma, match_every_export, NULL, lost);
}

/* ---- copying ------------------------------------------------------------------------------- */

static void copy_fails_on_unmapped_or_read_only_memory(void)
{
	struct scene scene;
	struct soft_cma_desc desc;

	begin_with_access(&scene, 8 * PAGE);
	uint8_t *memory = scene.memory;

	if (scene.process.child) {
		munmap(memory + 3 * PAGE, PAGE);
		fill(memory, PAGE, 1);
		for (int i = 0; i < 3; i++) {
			desc = export_memory(&scene.cma, memory, i < 2 ? 8 * PAGE : PAGE);
			process_send(&scene.process, &desc, sizeof(desc));
		}
	} else {
		process_receive(&scene.process, &desc, sizeof(desc));
		CHECK_EQUAL(copy_all(&scene.cma, &desc, memory, 8 * PAGE), SOFT_CMA_UNREADABLE);
		/* Make the second page read-only. The next copy fails at this page, and the copy
		 * after it fails immediately because it starts there. */
		CHECK_OK(mprotect(memory + PAGE, PAGE, PROT_READ));
		process_receive(&scene.process, &desc, sizeof(desc));
		CHECK_EQUAL(copy_all(&scene.cma, &desc, memory, 2 * PAGE), SOFT_CMA_UNWRITABLE);
		process_receive(&scene.process, &desc, sizeof(desc));
		CHECK_EQUAL(copy_all(&scene.cma, &desc, memory + PAGE, PAGE), SOFT_CMA_UNWRITABLE);
		CHECK_OK(mprotect(memory + PAGE, PAGE, PROT_READ | PROT_WRITE));
		CHECK_EQUAL(copy_all(&scene.cma, &desc, memory + PAGE, 100), SOFT_CMA_COPIED);
		CHECK(is_filled(memory + PAGE, PAGE, 1));
	}
	process_barrier(&scene.process);
	if (scene.process.child) /* failed copies release their exports as well */
		CHECK_EQUAL(revoke_all(&scene.cma), 0);
	end(&scene);
}

/* ThreadSanitizer may allocate memory during a copy. Its page faults would be mistaken for faults
 * in fresh pages. */
#ifdef __SANITIZE_THREAD__
#define COUNTS_PAGES false
#else
#define COUNTS_PAGES true
#endif

/* Copy `count` times from the parent to the child. Check that the child asks the parent to back off
 * between the last two copies, and not before. The child calls `prepare` before each copy. */
static void expect_back_off_at_last_copy(int count, void (*prepare)(int number, uint8_t *to))
{
	struct scene scene;
	struct soft_cma_desc desc;
	const int last = count - 1;

	begin_with_access(&scene, MIB);
	for (int number = 0; number <= last; number++) {
		if (scene.process.child) {
			CHECK_EQUAL(soft_cma_backs_off(&scene.cma), number == last);
			desc = export_memory(&scene.cma, scene.memory, MIB);
			process_send(&scene.process, &desc, sizeof(desc));
		} else {
			prepare(number, scene.memory);
			process_receive(&scene.process, &desc, sizeof(desc));
			/* The last copy is short, so it is not measured. */
			CHECK_EQUAL(copy_all(&scene.cma, &desc, scene.memory,
					     number < last ? MIB : PAGE),
				    SOFT_CMA_COPIED);
		}
		process_barrier(&scene.process);
	}
	if (scene.process.child) {
		/* The request to back off expires. A time too far in the future is ignored,
		 * because the peer may be in another time namespace. */
		page_of(false)->backoff_until = soft_now() - 1;
		CHECK(!soft_cma_backs_off(&scene.cma));
		page_of(false)->backoff_until = UINT64_MAX;
		CHECK(!soft_cma_backs_off(&scene.cma));
	}
	end(&scene);
}

/* Make every copy slow except the second. One slow copy alone has no effect. */
static void make_second_copy_quick(int number, uint8_t *to)
{
	(void)to;
	soft_device.shm->min_slow_copy_ns = number == 1 ? UINT64_MAX : 0;
}

static void drop_pages_of_first_four(int number, uint8_t *to)
{
	soft_device.shm->min_slow_copy_ns = 0;
	if (number < 4)
		CHECK_OK(madvise(to, MIB, MADV_DONTNEED));
}

/* Check that the copying side asks the owner to back off after two slow copies in a row. */
static void owner_backs_off_after_two_slow_copies(void)
{
	expect_back_off_at_last_copy(5, make_second_copy_quick);
}

/* Check that slow copies into fresh pages do not count, because the ring would also wait for the
 * kernel to allocate the pages. */
static void slow_copies_into_fresh_pages_do_not_count(void)
{
	expect_back_off_at_last_copy(6, drop_pages_of_first_four);
}

/* Read from the ring once, with a simulated interruption of one second. Returns the new mean read
 * time. */
static uint64_t mean_after_interrupted_read(uint64_t mean)
{
	struct soft_cma cma = {.ring_read_ns = mean};

	soft_cma_ring_read(&cma, soft_now() - 1000000000, MIB);
	return cma.ring_read_ns;
}

static int clock_advancing_1_ms(clockid_t clock, struct timespec *time)
{
	static long milliseconds;

	(void)clock;
	milliseconds++;
	*time = (struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000};
	return 0;
}

/* Check when a copy counts as slow. It does if it takes longer than a write to the ring plus a read
 * from the ring. If the application sleeps while it waits, the limit is 16 times as long, because
 * the ring would wake it up repeatedly. In this test, the parent copies, and each copy of 1 MiB
 * takes 1 ms. */
static void copies_back_off_only_if_the_ring_is_faster(void)
{
	static const struct {
		uint64_t ring_ns;
		bool sleeps, slow;
	} sides[] = {{600000, false, false},
		     {400000, false, true},
		     {400000, true, false},
		     {20000, true, true}};
	struct soft_platform slow = *soft_device.platform;
	struct scene scene;

	soft_device.shm->min_slow_copy_ns = 0;
	CHECK(!soft_cma_ring_start(PAGE) && soft_cma_ring_start(MIB));
	CHECK_EQUAL(mean_after_interrupted_read(800), 900);
	slow.clock = clock_advancing_1_ms;
	FOR_EACH (side, sides) {
		begin_with_access(&scene, MIB);
		memset(scene.memory, 1, MIB);
		scene.cma.ring_read_ns = scene.cma.own->ring_write_ns = sides[side].ring_ns;
		if (sides[side].sleeps)
			soft_busy_poll(0);
		process_barrier(&scene.process);
		for (int copies = 0; copies < 2; copies++) {
			struct soft_cma_desc desc = export_memory(&scene.cma, scene.memory, MIB);

			if (!scene.process.child) {
				process_send(&scene.process, &desc, sizeof(desc));
			} else {
				process_receive(&scene.process, &desc, sizeof(desc));
				const struct soft_platform *real = soft_device.platform;

				soft_device.platform = &slow;
				CHECK_EQUAL(copy_all(&scene.cma, &desc, scene.memory, MIB),
					    SOFT_CMA_COPIED);
				soft_device.platform = real;
			}
			process_barrier(&scene.process);
		}
		CHECK_EQUAL(page_of(true)->backoff_until != 0, sides[side].slow);
		process_barrier(&scene.process);
		if (sides[side].sleeps && scene.process.child)
			soft_busy_poll(1);
		end(&scene);
	}
}

/* ---- what the kernel says ------------------------------------------------------------------ */

/* Check that a process without the peer's secret is not mistaken for the peer. Another process may
 * be using the peer's PID by now, or the peer may have called execve(2). */
static void probe_rejects_a_process_without_the_secret(void)
{
	struct scene scene;
	struct soft_cma_desc desc;

	begin(&scene, PAGE);
	if (!scene.process.child) {
		process_receive(&scene.process, &desc, sizeof(desc));
		CHECK(!soft_cma_probe(&scene.cma, 0)); /* unknown peer */
		/* This process has memory at the same address, but not the peer's secret. */
		CHECK(!soft_cma_probe(&scene.cma, getpid()));
		CHECK_EQUAL(copy_all(&scene.cma, &desc, scene.memory, PAGE), SOFT_CMA_GONE);
		CHECK(probe(&scene));
		scene.cma.peer_secret_at = 8; /* unmapped address */
		CHECK(!probe(&scene));
	} else {
		desc = export_memory(&scene.cma, scene.memory, PAGE);
		process_send(&scene.process, &desc, sizeof(desc));
	}
	process_barrier(&scene.process);
	end(&scene);
}

/* ---- taking back --------------------------------------------------------------------------- */

/* Stop the peer in the middle of a copy. The revocation must time out, and the copy must be
 * discarded. Other memory can be revoked without waiting. After several timeouts, exporting
 * stops. */
static void revocation_times_out_if_the_peer_is_stopped(void)
{
	struct scene scene;
	struct soft_cma_desc descs[2];

	begin_with_access(&scene, MIB);
	uint8_t *memory = scene.memory;

	if (!scene.process.child) {
		process_receive(&scene.process, descs, sizeof(descs));
		/* Set the busy mark, as soft_cma_copy() does before copying. */
		__atomic_store_n(&scene.cma.own->busy, descs[0].slot + 1, __ATOMIC_SEQ_CST);
		process_barrier(&scene.process);
		raise(SIGSTOP);
		CHECK_EQUAL(copy_all(&scene.cma, &descs[0], memory, MIB), SOFT_CMA_REVOKED);
		CHECK_EQUAL(copy_all(&scene.cma, &descs[1], memory, MIB), SOFT_CMA_REVOKED);
		process_barrier(&scene.process);
		end(&scene);
	}
	int status;

	descs[0] = export_memory(&scene.cma, memory, MIB / 2);
	process_send(&scene.process, descs, sizeof(descs[0]));
	descs[1] = export_memory(&scene.cma, memory, MIB / 2);
	process_send(&scene.process, descs + 1, sizeof(descs[0]));
	process_barrier(&scene.process);
	CHECK_EQUAL(waitpid(scene.process.child, &status, WUNTRACED), scene.process.child);
	CHECK(WIFSTOPPED(status));
	uint64_t start = now_ns(CLOCK_MONOTONIC), used = now_ns(CLOCK_PROCESS_CPUTIME_ID);

	CHECK_EQUAL(revoke_all(&scene.cma), 2);
	CHECK_EQUAL(scene.cma.timeouts, 1);
	used = now_ns(CLOCK_PROCESS_CPUTIME_ID) - used;
	CHECK(used < (now_ns(CLOCK_MONOTONIC) - start) / 2); /* sleeps instead of spinning */
	/* The peer is busy with a slot that is not in use, so revoking does not wait. */
	for (int i = 0; i < 3; i++) {
		struct soft_cma_desc next = export_memory(&scene.cma, memory, MIB);

		CHECK(next.slot != descs[0].slot);
		CHECK_EQUAL(revoke_all(&scene.cma), 1);
	}
	CHECK_EQUAL(scene.cma.timeouts, 1);
	while (soft_cma_is_open(&scene.cma)) {
		while (export_memory(&scene.cma, memory, MIB).slot != descs[0].slot)
			;
		CHECK(revoke_all(&scene.cma) > 0);
	}
	CHECK(scene.cma.timeouts > 1 && scene.cma.timeouts < 100);
	memset(memory, 0xff, MIB);
	kill(scene.process.child, SIGCONT);
	process_barrier(&scene.process);
	end(&scene);
}

static bool has_psn(const struct soft_cma_export *export, const void *what)
{
	return export->psn == *(const uint32_t *)what;
}

/* Use all slots, and reuse them in any order. */
static void export_slots_are_reused_with_new_generations(void)
{
	struct soft_cma cma;
	struct soft_cma_desc descs[SOFT_CMA_SLOTS];
	struct soft_cma_export lost[SOFT_CMA_SLOTS], *export;
	struct soft_cma_page *page = calloc(1, sizeof(*page));
	uint8_t byte = 7, copy = 0;

	CHECK_OK(soft_cma_init(&cma, page, page));
	CHECK(soft_cma_probe(&cma, getpid()));
	for (uint32_t i = 0; i < SOFT_CMA_SLOTS; i++) {
		CHECK(export = soft_cma_export_new(&cma));
		export->psn = i % 3;
		descs[i] = descriptor_of(export, &byte, 1);
	}
	CHECK(!soft_cma_export_new(&cma));
	soft_cma_mark_done(&cma, &descs[77]);
	CHECK(export = soft_cma_export_new(&cma));
	CHECK_EQUAL(export->slot, descs[77].slot);
	CHECK(export->generation != descs[77].generation);
	CHECK(!soft_cma_export_new(&cma));
	/* Releasing the older generation of the slot has no effect. */
	soft_cma_mark_done(&cma, &descs[77]);
	CHECK(!soft_cma_export_new(&cma));
	CHECK_EQUAL(copy_all(&cma, &descs[77], &copy, 1), SOFT_CMA_REVOKED);
	export->psn = 1;
	uint32_t last = export->slot, which = 1;

	CHECK_EQUAL(copy_all(&cma, &descs[1], &copy, 1), SOFT_CMA_COPIED);
	CHECK_EQUAL(copy, 7);
	unsigned count = soft_cma_revoke(&cma, has_psn, &which, lost);

	CHECK_EQUAL(count, (SOFT_CMA_SLOTS + 1) / 3); /* without descs[1], plus the latest one */
	for (unsigned i = 1; i < count; i++)
		CHECK(lost[i - 1].order < lost[i].order);
	CHECK_EQUAL(lost[count - 1].slot, last);
	CHECK_EQUAL(soft_cma_revoke(&cma, has_psn, &which, lost), 0);
	CHECK_EQUAL(copy_all(&cma, &descs[2], &copy, 1), SOFT_CMA_COPIED);
	CHECK_EQUAL(copy_all(&cma, &descs[4], &copy, 1), SOFT_CMA_REVOKED);
	soft_cma_end(&cma);
	free(page);
}

/* Check that a descriptor is rejected if the lengths of its pieces add up to the payload's length
 * only because the sum overflows. fuzz_cma tests other invalid descriptors. */
static void descriptor_with_overflowing_lengths_is_rejected(void)
{
	const struct soft_cma_desc desc = {
		.count = 2, .length = 300, .pieces = {{1, 100}, {2, 200}}};
	struct soft_cma_desc got;
	uint8_t bytes[SOFT_CMA_DESC_MAX] = {0};

	soft_cma_desc_encode(bytes, &desc);
	CHECK(soft_cma_desc_decode(bytes, 2, 300, &got));
	soft_put64(bytes + 16, 1ull << 32 | 100);
	CHECK(!soft_cma_desc_decode(bytes, 2, 300, &got));
	soft_put64(bytes + 16, (uint64_t)-100);
	CHECK(!soft_cma_desc_decode(bytes, 2, 100, &got));
}

int main(void)
{
	limit_seconds(100);
	soft_busy_poll(1);
	STEP(descriptor_with_overflowing_lengths_is_rejected());
	STEP(export_slots_are_reused_with_new_generations());
	STEP(copy_fails_on_unmapped_or_read_only_memory());
	if (COUNTS_PAGES) {
		STEP(owner_backs_off_after_two_slow_copies());
		STEP(slow_copies_into_fresh_pages_do_not_count());
	}
	STEP(copies_back_off_only_if_the_ring_is_faster());
	STEP(probe_rejects_a_process_without_the_secret());
	STEP(revocation_times_out_if_the_peer_is_stopped());
	return 0;
}
