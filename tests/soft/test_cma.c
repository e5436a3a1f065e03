/* One copy between two processes (native/softdev/shm/cma.c, cma_export.c), without queue pairs: the
 * owner of the memory is the parent, the child copies. */
#define _GNU_SOURCE
#include "cma_side.h"

#include <sys/uio.h>

#include "objects/objects.h"
#include "shm/cma.h"

enum {
	MIB = 1 << 20,
	PAGE = 4096
};

static struct soft_cma_page *pages; /* of the parent, of the child */

/* Two processes with a page for each, as two local peers have them. */
static struct process part(void)
{
	if (!pages)
		pages = mmap(NULL, 2 * SOFT_CMA_PAGE, PROT_READ | PROT_WRITE,
			     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(pages != MAP_FAILED);
	memset(pages, 0, 2 * SOFT_CMA_PAGE);
	return split();
}

static struct soft_cma_page *page_of(bool parent)
{
	return (struct soft_cma_page *)((uint8_t *)pages + (parent ? 0 : SOFT_CMA_PAGE));
}

static void open_reach(const struct process *process, struct soft_cma *cma)
{
	CHECK_EQUAL(soft_cma_init(cma, page_of(process->child), page_of(!process->child)), 0);
	cma->peer_secret_at = (uintptr_t)cma->secret; /* the same place after a fork */
	process_barrier(process);
}

static bool probe(const struct process *process, struct soft_cma *cma)
{
	return soft_cma_probe(cma, process->child ? process->child : getppid());
}

static uint8_t *map(size_t length)
{
	uint8_t *memory =
		mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(memory != MAP_FAILED);
	return memory;
}

static struct soft_cma_desc refer(const struct soft_cma_export *export, const uint8_t *memory,
				  uint32_t length)
{
	return (struct soft_cma_desc){
		.slot = export->slot,
		.generation = export->generation,
		.count = 1,
		.length = length,
		.pieces = {{.address = (uintptr_t)memory, .length = length}},
	};
}

static struct soft_cma_desc grant_of(struct soft_cma *cma, const uint8_t *memory, uint32_t length)
{
	struct soft_cma_export *export = soft_cma_export_new(cma);

	CHECK(export);
	return refer(export, memory, length);
}

/* As a frame's payload is taken in: piece by piece. */
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

static bool every(const struct soft_cma_export *export, const void *what)
{
	(void)export;
	(void)what;
	return true;
}

static unsigned take_all_back(struct soft_cma *cma)
{
	struct soft_cma_export lost[SOFT_CMA_SLOTS];

	return soft_cma_revoke(cma, every, NULL, lost);
}

/* ---- copying ------------------------------------------------------------------------------- */

/* Sizes, offsets, and lists of pieces on both sides, every byte of them. */
static void every_byte(void)
{
	struct process process = part();
	struct soft_cma cma;
	uint8_t *memory = map(MIB);
	enum {
		ROUNDS = 300
	};

	open_reach(&process, &cma);
	if (process.child)
		fill(memory, MIB, 5);
	CHECK(probe(&process, &cma));
	process_barrier(&process);
	CHECK(soft_cma_is_open(&cma));
	for (int round = 0; round < ROUNDS; round++) {
		struct soft_cma_desc desc = {0};
		uint8_t result = 0;

		if (process.child) {
			struct soft_cma_export *export = soft_cma_export_new(&cma);

			CHECK(export);
			desc.slot = export->slot;
			desc.generation = export->generation;
			desc.count = 1 + next_random() % SOFT_CMA_PIECES;
			for (uint32_t i = 0; i < desc.count; i++) {
				uint32_t length = 1 + next_random() % (MIB / SOFT_CMA_PIECES);
				uint32_t at = next_random() % (MIB - length);

				desc.pieces[i].address = (uintptr_t)memory + at;
				desc.pieces[i].length = length;
				desc.length += length;
			}
			tell(&process, &desc, sizeof(desc));
			tell(&process, &memory, sizeof(memory));
			hear(&process, &result, 1);
			CHECK(result);
			continue;
		}
		uint8_t *theirs;

		hear(&process, &desc, sizeof(desc));
		hear(&process, &theirs, sizeof(theirs));
		/* What was there before, to see that nothing else is written. */
		memset(memory, 0xee, MIB);
		for (uint32_t at = 0; at < desc.length;) {
			struct iovec to[3];
			uint32_t part, bytes = 0;
			int count = 0;

			for (; count < 3 && at + bytes < desc.length; count++) {
				part = 1 + next_random() % 100000;
				if (part > desc.length - at - bytes)
					part = desc.length - at - bytes;
				to[count] = (struct iovec){.iov_base = memory + at + bytes,
							   .iov_len = part};
				bytes += part;
			}
			CHECK_EQUAL(soft_cma_copy(&cma, &desc, at, to, count), SOFT_CMA_COPIED);
			at += bytes;
		}
		const uint8_t *at = memory;

		for (uint32_t i = 0; i < desc.count; i++) {
			size_t from = desc.pieces[i].address - (uintptr_t)theirs;

			for (size_t j = 0; j < desc.pieces[i].length; j++)
				CHECK_EQUAL(*at++,
					    (uint8_t)(5 + (from + j) * 7 + ((from + j) >> 8)));
		}
		CHECK_EQUAL(at - memory, desc.length);
		CHECK(at == memory + MIB || *at == 0xee);
		result = 1;
		tell(&process, &result, 1);
	}
	if (process.child) /* all were made use of */
		CHECK_EQUAL(take_all_back(&cma), 0);
	soft_cma_end(&cma);
	join(&process);
	munmap(memory, MIB);
}

/* Memory that is not there, or may not be written, on either side; in the middle of a piece. */
static void holes(void)
{
	struct process process = part();
	struct soft_cma cma;
	struct soft_cma_desc desc;
	uint8_t *memory = map(8 * PAGE);

	open_reach(&process, &cma);
	CHECK(probe(&process, &cma));
	process_barrier(&process);
	if (process.child) {
		munmap(memory + 3 * PAGE, PAGE);
		fill(memory, PAGE, 1);
		for (int i = 0; i < 2; i++) {
			desc = grant_of(&cma, memory, 8 * PAGE);
			tell(&process, &desc, sizeof(desc));
		}
		desc = grant_of(&cma, memory, PAGE);
		tell(&process, &desc, sizeof(desc));
	} else {
		hear(&process, &desc, sizeof(desc));
		CHECK_EQUAL(copy_all(&cma, &desc, memory, 8 * PAGE), SOFT_CMA_UNREADABLE);
		/* Not at all where it is, and after a good part. */
		CHECK_EQUAL(mprotect(memory + PAGE, PAGE, PROT_READ), 0);
		hear(&process, &desc, sizeof(desc));
		CHECK_EQUAL(copy_all(&cma, &desc, memory, 2 * PAGE), SOFT_CMA_UNWRITABLE);
		hear(&process, &desc, sizeof(desc));
		CHECK_EQUAL(copy_all(&cma, &desc, memory + PAGE, PAGE), SOFT_CMA_UNWRITABLE);
		CHECK_EQUAL(mprotect(memory + PAGE, PAGE, PROT_READ | PROT_WRITE), 0);
		CHECK_EQUAL(copy_all(&cma, &desc, memory + PAGE, 100), SOFT_CMA_COPIED);
		CHECK(filled(memory + PAGE, PAGE, 1));
	}
	process_barrier(&process);
	if (process.child) /* each was done with, also where it failed */
		CHECK_EQUAL(take_all_back(&cma), 0);
	soft_cma_end(&cma);
	join(&process);
	munmap(memory, 8 * PAGE);
}

static void within_one_process(void)
{
	struct soft_cma_page *page = calloc(1, sizeof(*page));
	struct soft_cma cma;
	uint8_t *memory = map(MIB);

	CHECK_EQUAL(soft_cma_init(&cma, page, page), 0);
	CHECK(soft_cma_probe(&cma, getpid()));
	CHECK(soft_cma_is_open(&cma));
	fill(memory, 1000, 9);
	struct soft_cma_desc desc = grant_of(&cma, memory, 1000);

	desc.count = 2;
	desc.pieces[0].length = 300;
	desc.pieces[1].address = (uintptr_t)memory + 300;
	desc.pieces[1].length = 700;
	struct iovec to[] = {{.iov_base = memory + 2000, .iov_len = 1},
			     {.iov_base = memory + 2001, .iov_len = 999}};

	CHECK_EQUAL(soft_cma_copy(&cma, &desc, 0, to, 2), SOFT_CMA_COPIED);
	CHECK(filled(memory + 2000, 1000, 9));
	CHECK_EQUAL(memory[3000], 0);
	CHECK_EQUAL(take_all_back(&cma), 0);
	/* Onto itself, moved by a little. */
	desc = grant_of(&cma, memory, 1000);
	CHECK_EQUAL(copy_all(&cma, &desc, memory + 10, 1000), SOFT_CMA_COPIED);
	CHECK(filled(memory + 10, 1000, 9));
	desc = grant_of(&cma, memory, 1000);
	CHECK_EQUAL(take_all_back(&cma), 1);
	CHECK_EQUAL(copy_all(&cma, &desc, memory, 1000), SOFT_CMA_REVOKED);
	soft_cma_end(&cma);
	free(page);
	munmap(memory, MIB);
}

/* ---- what the kernel says ------------------------------------------------------------------ */

/* A process with the right number that is not the one: the secret says so.  One that has become
 * another program is the same. */
static void another_process(void)
{
	struct process process = part();
	struct soft_cma cma;
	struct soft_cma_desc desc;
	uint8_t *memory = map(PAGE);

	open_reach(&process, &cma);
	if (!process.child) {
		hear(&process, &desc, sizeof(desc));
		CHECK(!soft_cma_probe(&cma, 0)); /* the peer is not known */
		/* The memory is there too, but not the secret. */
		CHECK(!soft_cma_probe(&cma, getpid()));
		CHECK_EQUAL(copy_all(&cma, &desc, memory, PAGE), SOFT_CMA_GONE);
		CHECK(probe(&process, &cma));
		cma.peer_secret_at = 8; /* nothing is there */
		CHECK(!probe(&process, &cma));
	} else {
		desc = grant_of(&cma, memory, PAGE);
		tell(&process, &desc, sizeof(desc));
	}
	process_barrier(&process);
	join(&process);
	munmap(memory, PAGE);
}

/* The owner is killed while its memory is copied: what has been copied is right, and then it is
 * known to be gone. */
static void owner_dies(void)
{
	for (int round = 0; round < 20; round++) {
		struct soft_cma cma;
		struct soft_cma_desc desc;
		uint8_t *memory = map(MIB);
		unsigned copied = 0;
		struct process process = part(); /* this time the child is the owner */

		if (!process.child) {
			fill(memory, MIB, (unsigned)round);
			CHECK_EQUAL(soft_cma_init(&cma, page_of(false), page_of(true)), 0);
			desc = grant_of(&cma, memory, MIB);
			tell(&process, &desc, sizeof(desc));
			pause();
		}
		hear(&process, &desc, sizeof(desc));
		CHECK_EQUAL(soft_cma_init(&cma, page_of(true), page_of(false)), 0);
		cma.peer_secret_at = (uintptr_t)cma.secret;
		CHECK(soft_cma_probe(&cma, process.child));
		for (;; copied++) {
			memset(memory, 0, MIB);
			if (copied == (unsigned)round)
				CHECK_EQUAL(kill(process.child, SIGKILL), 0);
			enum soft_cma_result reached = copy_all(&cma, &desc, memory, MIB / 4);

			if (reached == SOFT_CMA_GONE)
				break;
			CHECK_EQUAL(reached, SOFT_CMA_COPIED);
			CHECK(filled(memory, MIB, (unsigned)round));
		}
		CHECK(copied >= (unsigned)round);
		soft_cma_end(&cma);
		CHECK_EQUAL(waitpid(process.child, NULL, 0), process.child);
		close(process.fd);
		munmap(memory, MIB);
	}
}

/* ---- taking back --------------------------------------------------------------------------- */

/* The memory is unmapped, and other memory is there, as soon as it has been taken back: whatever
 * the moment, a copy that counts is of what was there before. */
static void unmapped_at_once(void)
{
	struct process process = part();
	struct soft_cma cma;
	uint8_t *own = map(MIB);
	unsigned made_use = 0, lost_some = 0;
	enum {
		ROUNDS = 2000,
		LENGTH = 256 * 1024
	};

	open_reach(&process, &cma);
	CHECK(probe(&process, &cma));
	process_barrier(&process);
	for (unsigned round = 0; round < ROUNDS; round++) {
		struct soft_cma_desc desc;
		uint8_t result;

		if (!process.child) {
			hear(&process, &desc, sizeof(desc));
			result = copy_all(&cma, &desc, own, PAGE << round % 6);
			if (result == SOFT_CMA_COPIED)
				CHECK(filled(own, LENGTH, round));
			tell(&process, &result, 1);
			continue;
		}
		uint8_t *memory = map(LENGTH);
		unsigned timeouts = cma.timeouts;

		fill(memory, LENGTH, round);
		desc = grant_of(&cma, memory, LENGTH);
		bool early = round % 50 == 0, late = round % 50 == 1;
		unsigned lost = early ? take_all_back(&cma) : 0;

		tell(&process, &desc, sizeof(desc));
		if (late) {
			hear(&process, &result, 1);
			CHECK_EQUAL(result, SOFT_CMA_COPIED);
		}
		for (volatile unsigned wait = next_random() % 60000; wait; wait--)
			;
		if (!early)
			lost = take_all_back(&cma);
		munmap(memory, LENGTH);
		CHECK(mmap(memory, LENGTH / 2, PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
		memset(memory, 0xff, LENGTH / 2);
		if (!late)
			hear(&process, &result, 1);
		/* Both know the same, unless one was kept waiting for too long. */
		if (cma.timeouts == timeouts)
			CHECK_EQUAL(result, lost ? SOFT_CMA_REVOKED : SOFT_CMA_COPIED);
		CHECK(result == SOFT_CMA_REVOKED || result == SOFT_CMA_COPIED);
		made_use += result == SOFT_CMA_COPIED;
		lost_some += lost;
		cma.timeouts = 0;
		munmap(memory, LENGTH / 2);
	}
	if (process.child)
		CHECK(made_use >= ROUNDS / 50 && lost_some >= ROUNDS / 50);
	soft_cma_end(&cma);
	join(&process);
	munmap(own, MIB);
}

/* The other side is stopped while it is busy: taking back does not wait for it longer than bounded,
 * and what it copies when it goes on counts as nothing.  Other memory can still be taken back
 * without waiting, and after some such waits nothing is exported any more. */
static void stopped_while_busy(void)
{
	struct process process = part();
	struct soft_cma cma;
	struct soft_cma_desc descs[2];
	uint8_t *memory = map(MIB);

	open_reach(&process, &cma);
	CHECK(probe(&process, &cma));
	process_barrier(&process);
	if (!process.child) {
		hear(&process, descs, sizeof(descs));
		/* Where soft_cma_copy is between its mark and its copy. */
		__atomic_store_n(&cma.own->busy, descs[0].slot + 1, __ATOMIC_SEQ_CST);
		process_barrier(&process);
		raise(SIGSTOP);
		CHECK_EQUAL(copy_all(&cma, &descs[0], memory, MIB), SOFT_CMA_REVOKED);
		CHECK_EQUAL(copy_all(&cma, &descs[1], memory, MIB), SOFT_CMA_REVOKED);
		process_barrier(&process);
		soft_cma_end(&cma);
		join(&process);
	}
	int status;

	descs[0] = grant_of(&cma, memory, MIB / 2);
	tell(&process, descs, sizeof(descs[0]));
	descs[1] = grant_of(&cma, memory, MIB / 2);
	tell(&process, descs + 1, sizeof(descs[0]));
	process_barrier(&process);
	CHECK_EQUAL(waitpid(process.child, &status, WUNTRACED), process.child);
	CHECK(WIFSTOPPED(status));
	uint64_t start = now_ns(CLOCK_MONOTONIC), used = now_ns(CLOCK_PROCESS_CPUTIME_ID);

	CHECK_EQUAL(take_all_back(&cma), 2);
	CHECK_EQUAL(cma.timeouts, 1);
	used = now_ns(CLOCK_PROCESS_CPUTIME_ID) - used;
	CHECK(used < (now_ns(CLOCK_MONOTONIC) - start) / 2); /* asleep, not spinning */
	/* The slot that it is busy with is not in use, so the revocation does not wait. */
	for (int i = 0; i < 3; i++) {
		struct soft_cma_desc next = grant_of(&cma, memory, MIB);

		CHECK(next.slot != descs[0].slot);
		CHECK_EQUAL(take_all_back(&cma), 1);
	}
	CHECK_EQUAL(cma.timeouts, 1);
	while (soft_cma_is_open(&cma)) {
		while (grant_of(&cma, memory, MIB).slot != descs[0].slot)
			;
		CHECK(take_all_back(&cma) > 0);
	}
	CHECK(cma.timeouts > 1 && cma.timeouts < 100);
	memset(memory, 0xff, MIB);
	kill(process.child, SIGCONT);
	process_barrier(&process);
	soft_cma_end(&cma);
	join(&process);
	munmap(memory, MIB);
}

static bool is_psn(const struct soft_cma_export *export, const void *what)
{
	return export->psn == *(const uint32_t *)what;
}

/* All slots in use, used again in any order, given back without having been used. */
static void bookkeeping(void)
{
	struct soft_cma cma;
	struct soft_cma_desc descs[SOFT_CMA_SLOTS];
	struct soft_cma_export lost[SOFT_CMA_SLOTS], *export;
	struct soft_cma_page *page = calloc(1, sizeof(*page));
	uint8_t byte = 7, copy = 0;

	CHECK_EQUAL(soft_cma_init(&cma, page, page), 0);
	CHECK(soft_cma_probe(&cma, getpid()));
	for (uint32_t i = 0; i < SOFT_CMA_SLOTS; i++) {
		CHECK(export = soft_cma_export_new(&cma));
		export->psn = i % 3;
		descs[i] = refer(export, &byte, 1);
	}
	CHECK(!soft_cma_export_new(&cma));
	soft_cma_done(&cma, &descs[77]);
	CHECK(export = soft_cma_export_new(&cma));
	CHECK_EQUAL(export->slot, descs[77].slot);
	CHECK(export->generation != descs[77].generation);
	CHECK(!soft_cma_export_new(&cma));
	/* What was said of an older generation means nothing now. */
	soft_cma_done(&cma, &descs[77]);
	CHECK(!soft_cma_export_new(&cma));
	CHECK_EQUAL(copy_all(&cma, &descs[77], &copy, 1), SOFT_CMA_REVOKED);
	struct soft_cma_desc cancelled = refer(export, &byte, 1);

	soft_cma_cancel(&cma, export);
	CHECK_EQUAL(copy_all(&cma, &cancelled, &copy, 1), SOFT_CMA_REVOKED);
	CHECK(export = soft_cma_export_new(&cma)); /* given last, in a slot in the middle */
	export->psn = 1;
	uint32_t last = export->slot, which = 1;

	CHECK_EQUAL(copy_all(&cma, &descs[1], &copy, 1), SOFT_CMA_COPIED);
	CHECK_EQUAL(copy, 7);
	unsigned count = soft_cma_revoke(&cma, is_psn, &which, lost);

	CHECK_EQUAL(count, (SOFT_CMA_SLOTS + 1) / 3); /* but [1]; and the last one more */
	for (unsigned i = 1; i < count; i++)
		CHECK(lost[i - 1].order < lost[i].order);
	CHECK_EQUAL(lost[count - 1].slot, last);
	CHECK_EQUAL(soft_cma_revoke(&cma, is_psn, &which, lost), 0);
	CHECK_EQUAL(copy_all(&cma, &descs[2], &copy, 1), SOFT_CMA_COPIED);
	CHECK_EQUAL(copy_all(&cma, &descs[4], &copy, 1), SOFT_CMA_REVOKED);
	soft_cma_end(&cma);
	free(page);
}

/* ---- as bytes ------------------------------------------------------------------------------ */

static void as_bytes(void)
{
	struct soft_cma_desc desc = {.slot = 5,
				     .generation = 0xfffffffe,
				     .count = 2,
				     .length = 300,
				     .pieces = {{1ull << 63, 100}, {4096, 200}}};
	struct soft_cma_desc got;
	uint8_t bytes[SOFT_CMA_DESC_MAX] = {0};

	CHECK_EQUAL(soft_cma_desc_encode(bytes, &desc), 40);
	CHECK(soft_cma_desc_decode(bytes, 2, 300, &got));
	CHECK_EQUAL(memcmp(&got, &desc, sizeof(got)), 0);
	/* Lengths that do not add up, too many pieces, an empty one, no such slot. */
	CHECK(!soft_cma_desc_decode(bytes, 2, 299, &got));
	CHECK(!soft_cma_desc_decode(bytes, 2, 301, &got));
	CHECK(!soft_cma_desc_decode(bytes, 1, 300, &got));
	CHECK(!soft_cma_desc_decode(bytes, 3, 300, &got));
	CHECK(!soft_cma_desc_decode(bytes, 0, 0, &got));
	CHECK(!soft_cma_desc_decode(bytes, SOFT_CMA_PIECES + 1, 300, &got));
	soft_put64(bytes + 16, 1ull << 32 | 100);
	CHECK(!soft_cma_desc_decode(bytes, 2, 300, &got));
	soft_put64(bytes + 16, (uint64_t)-100);
	CHECK(!soft_cma_desc_decode(bytes, 2, 100, &got));
	soft_put64(bytes + 16, 100);
	soft_put32(bytes, SOFT_CMA_SLOTS);
	CHECK(!soft_cma_desc_decode(bytes, 2, 300, &got));
	/* Whatever comes: what is accepted holds together. */
	for (int round = 0; round < 200000; round++) {
		uint64_t sum = 0;
		uint32_t count = next_random() % (SOFT_CMA_PIECES + 2);
		uint32_t length = next_random() % 64;

		for (size_t i = 0; i < sizeof(bytes); i++)
			bytes[i] = i % 8 && next_random() % 64 ? 0 : (uint8_t)(next_random() % 32);
		if (!soft_cma_desc_decode(bytes, count, length, &got))
			continue;
		CHECK(got.count == count && got.slot < SOFT_CMA_SLOTS && count &&
		      count <= SOFT_CMA_PIECES);
		for (uint32_t i = 0; i < count; i++)
			sum += got.pieces[i].length;
		CHECK_EQUAL(sum, length);
	}
}

int main(void)
{
	limit_seconds(100);
	STEP(as_bytes());
	STEP(bookkeeping());
	STEP(within_one_process());
	STEP(every_byte());
	STEP(holes());
	STEP(another_process());
	STEP(owner_dies());
	STEP(unmapped_at_once());
	STEP(stopped_while_busy());
	return 0;
}
