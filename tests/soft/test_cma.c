/* One copy between two processes (native/softdev/shm/cma.c, cma_export.c), without queue pairs: the owner of
 * the memory is the parent, the child copies. */
#define _GNU_SOURCE
#include "cma_side.h"

#include <sys/uio.h>

#include "objects/objects.h"
#include "shm/cma.h"

enum {
	MIB = 1 << 20,
	PAGE = 4096
};

static struct soft_reach_page *pages; /* of the parent, of the child */

/* Two processes with a page for each, as two neighbours have them. */
static struct process part(void)
{
	if (!pages)
		pages = mmap(NULL, 2 * SOFT_REACH_PAGE, PROT_READ | PROT_WRITE,
			     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(pages != MAP_FAILED);
	memset(pages, 0, 2 * SOFT_REACH_PAGE);
	return split();
}

static struct soft_reach_page *page_of(bool parent)
{
	return (struct soft_reach_page *)((uint8_t *)pages + (parent ? 0 : SOFT_REACH_PAGE));
}

static void open_reach(const struct process *process, struct soft_reach *reach)
{
	CHECK_EQUAL(soft_reach_init(reach, page_of(process->child), page_of(!process->child)), 0);
	meet(process);
}

static bool probe(const struct process *process, struct soft_reach *reach)
{
	return soft_reach_probe(reach, process->child ? process->child : getppid());
}

static uint8_t *map(size_t length)
{
	uint8_t *memory =
		mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(memory != MAP_FAILED);
	return memory;
}

static struct soft_reference refer(const struct soft_grant *grant, const uint8_t *memory,
				   uint32_t length)
{
	return (struct soft_reference){
		.slot = grant->slot,
		.generation = grant->generation,
		.count = 1,
		.length = length,
		.pieces = {{.address = (uintptr_t)memory, .length = length}},
	};
}

static struct soft_reference grant_of(struct soft_reach *reach, const uint8_t *memory,
				      uint32_t length)
{
	struct soft_grant *grant = soft_reach_grant(reach);

	CHECK(grant);
	return refer(grant, memory, length);
}

/* As a frame's payload is taken in: piece by piece. */
static enum soft_reached copy_all(struct soft_reach *reach, const struct soft_reference *reference,
				  uint8_t *to, uint32_t step)
{
	for (uint32_t at = 0; at < reference->length; at += step) {
		uint32_t part = reference->length - at < step ? reference->length - at : step;
		struct iovec iov = {.iov_base = to + at, .iov_len = part};
		enum soft_reached reached = soft_reach_copy(reach, reference, at, &iov, 1);

		if (reached != SOFT_REACH_COPIED)
			return reached;
	}
	return SOFT_REACH_COPIED;
}

static bool every(const struct soft_grant *grant, const void *what)
{
	(void)grant;
	(void)what;
	return true;
}

static unsigned take_all_back(struct soft_reach *reach)
{
	struct soft_grant lost[SOFT_REACH_SLOTS];

	return soft_reach_take_back(reach, every, NULL, lost);
}

/* ---- copying ------------------------------------------------------------------------------- */

/* Sizes, offsets, and lists of pieces on both sides, every byte of them. */
static void every_byte(void)
{
	struct process process = part();
	struct soft_reach reach;
	uint8_t *memory = map(MIB);
	enum {
		ROUNDS = 300
	};

	open_reach(&process, &reach);
	if (process.child)
		fill(memory, MIB, 5);
	CHECK(probe(&process, &reach));
	meet(&process);
	CHECK(soft_reach_is_open(&reach));
	for (int round = 0; round < ROUNDS; round++) {
		struct soft_reference reference = {0};
		uint8_t result = 0;

		if (process.child) {
			struct soft_grant *grant = soft_reach_grant(&reach);

			CHECK(grant);
			reference.slot = grant->slot;
			reference.generation = grant->generation;
			reference.count = 1 + next_random() % SOFT_REACH_PIECES;
			for (uint32_t i = 0; i < reference.count; i++) {
				uint32_t length = 1 + next_random() % (MIB / SOFT_REACH_PIECES);
				uint32_t at = next_random() % (MIB - length);

				reference.pieces[i].address = (uintptr_t)memory + at;
				reference.pieces[i].length = length;
				reference.length += length;
			}
			tell(&process, &reference, sizeof(reference));
			tell(&process, &memory, sizeof(memory));
			hear(&process, &result, 1);
			CHECK(result);
			continue;
		}
		uint8_t *theirs;

		hear(&process, &reference, sizeof(reference));
		hear(&process, &theirs, sizeof(theirs));
		/* What was there before, to see that nothing else is written. */
		memset(memory, 0xee, MIB);
		for (uint32_t at = 0; at < reference.length;) {
			struct iovec to[3];
			uint32_t part, bytes = 0;
			int count = 0;

			for (; count < 3 && at + bytes < reference.length; count++) {
				part = 1 + next_random() % 100000;
				if (part > reference.length - at - bytes)
					part = reference.length - at - bytes;
				to[count] = (struct iovec){.iov_base = memory + at + bytes,
							   .iov_len = part};
				bytes += part;
			}
			CHECK_EQUAL(soft_reach_copy(&reach, &reference, at, to, count),
				    SOFT_REACH_COPIED);
			at += bytes;
		}
		const uint8_t *at = memory;

		for (uint32_t i = 0; i < reference.count; i++) {
			size_t from = reference.pieces[i].address - (uintptr_t)theirs;

			for (size_t j = 0; j < reference.pieces[i].length; j++)
				CHECK_EQUAL(*at++,
					    (uint8_t)(5 + (from + j) * 7 + ((from + j) >> 8)));
		}
		CHECK_EQUAL(at - memory, reference.length);
		CHECK(at == memory + MIB || *at == 0xee);
		result = 1;
		tell(&process, &result, 1);
	}
	if (process.child) /* all were made use of */
		CHECK_EQUAL(take_all_back(&reach), 0);
	soft_reach_end(&reach);
	join(&process);
	munmap(memory, MIB);
}

/* Memory that is not there, or may not be written, on either side; in the middle of a piece. */
static void holes(void)
{
	struct process process = part();
	struct soft_reach reach;
	struct soft_reference reference;
	uint8_t *memory = map(8 * PAGE);

	open_reach(&process, &reach);
	CHECK(probe(&process, &reach));
	meet(&process);
	if (process.child) {
		munmap(memory + 3 * PAGE, PAGE);
		fill(memory, PAGE, 1);
		for (int i = 0; i < 2; i++) {
			reference = grant_of(&reach, memory, 8 * PAGE);
			tell(&process, &reference, sizeof(reference));
		}
		reference = grant_of(&reach, memory, PAGE);
		tell(&process, &reference, sizeof(reference));
	} else {
		hear(&process, &reference, sizeof(reference));
		CHECK_EQUAL(copy_all(&reach, &reference, memory, 8 * PAGE), SOFT_REACH_UNREADABLE);
		/* Not at all where it is, and after a good part. */
		CHECK_EQUAL(mprotect(memory + PAGE, PAGE, PROT_READ), 0);
		hear(&process, &reference, sizeof(reference));
		CHECK_EQUAL(copy_all(&reach, &reference, memory, 2 * PAGE), SOFT_REACH_UNWRITABLE);
		hear(&process, &reference, sizeof(reference));
		CHECK_EQUAL(copy_all(&reach, &reference, memory + PAGE, PAGE),
			    SOFT_REACH_UNWRITABLE);
		CHECK_EQUAL(mprotect(memory + PAGE, PAGE, PROT_READ | PROT_WRITE), 0);
		CHECK_EQUAL(copy_all(&reach, &reference, memory + PAGE, 100), SOFT_REACH_COPIED);
		CHECK(filled(memory + PAGE, PAGE, 1));
	}
	meet(&process);
	if (process.child) /* each was done with, also where it failed */
		CHECK_EQUAL(take_all_back(&reach), 0);
	soft_reach_end(&reach);
	join(&process);
	munmap(memory, 8 * PAGE);
}

static void within_one_process(void)
{
	struct soft_reach_page *page = calloc(1, sizeof(*page));
	struct soft_reach reach;
	uint8_t *memory = map(MIB);

	CHECK_EQUAL(soft_reach_init(&reach, page, page), 0);
	CHECK(soft_reach_probe(&reach, getpid()));
	CHECK(soft_reach_is_open(&reach));
	fill(memory, 1000, 9);
	struct soft_reference reference = grant_of(&reach, memory, 1000);

	reference.count = 2;
	reference.pieces[0].length = 300;
	reference.pieces[1].address = (uintptr_t)memory + 300;
	reference.pieces[1].length = 700;
	struct iovec to[] = {{.iov_base = memory + 2000, .iov_len = 1},
			     {.iov_base = memory + 2001, .iov_len = 999}};

	CHECK_EQUAL(soft_reach_copy(&reach, &reference, 0, to, 2), SOFT_REACH_COPIED);
	CHECK(filled(memory + 2000, 1000, 9));
	CHECK_EQUAL(memory[3000], 0);
	CHECK_EQUAL(take_all_back(&reach), 0);
	/* Onto itself, moved by a little. */
	reference = grant_of(&reach, memory, 1000);
	CHECK_EQUAL(copy_all(&reach, &reference, memory + 10, 1000), SOFT_REACH_COPIED);
	CHECK(filled(memory + 10, 1000, 9));
	reference = grant_of(&reach, memory, 1000);
	CHECK_EQUAL(take_all_back(&reach), 1);
	CHECK_EQUAL(copy_all(&reach, &reference, memory, 1000), SOFT_REACH_TAKEN_BACK);
	soft_reach_end(&reach);
	free(page);
	munmap(memory, MIB);
}

/* Who finds twice in a row that it takes too long says so, and the other side knows. */
static void too_slow(void)
{
	struct process process = part();
	struct soft_reach reach;
	struct soft_reference reference;
	uint8_t *memory = map(MIB);

	open_reach(&process, &reach);
	CHECK(probe(&process, &reach));
	for (int copies = 0; copies < 5; copies++) {
		if (process.child) {
			CHECK_EQUAL(soft_reach_rests(&reach), copies == 4);
			reference = grant_of(&reach, memory, MIB);
			tell(&process, &reference, sizeof(reference));
		} else {
			/* One alone says nothing, and short ones are not measured. */
			soft_reach_slow = copies == 1 ? UINT64_MAX : 0;
			hear(&process, &reference, sizeof(reference));
			CHECK_EQUAL(copy_all(&reach, &reference, memory, copies < 4 ? MIB : PAGE),
				    SOFT_REACH_COPIED);
		}
		meet(&process);
	}
	if (process.child) { /* in time it is over; and a clock of another world is not believed */
		page_of(false)->rests = soft_now() - 1;
		CHECK(!soft_reach_rests(&reach));
		page_of(false)->rests = UINT64_MAX;
		CHECK(!soft_reach_rests(&reach));
	}
	soft_reach_end(&reach);
	join(&process);
	munmap(memory, MIB);
}

/* ---- what the kernel says ------------------------------------------------------------------ */

/* Forbidden from the beginning, or from some time on. */
static void forbidden(void)
{
	for (int late = 0; late < 2; late++) {
		struct process process = part();
		struct soft_reach reach;
		struct soft_reference reference;
		uint8_t *memory = map(MIB);

		open_reach(&process, &reach);
		if (!process.child && !late)
			forbid_copying();
		CHECK_EQUAL(probe(&process, &reach), process.child || late);
		meet(&process);
		CHECK_EQUAL(soft_reach_is_open(&reach), !process.child || late);
		if (process.child) {
			reference = grant_of(&reach, memory, MIB);
			tell(&process, &reference, sizeof(reference));
		} else {
			forbid_copying();
			hear(&process, &reference, sizeof(reference));
			CHECK_EQUAL(copy_all(&reach, &reference, memory, MIB),
				    SOFT_REACH_FORBIDDEN);
		}
		meet(&process);
		CHECK_EQUAL(soft_reach_is_open(&reach), !process.child); /* now it is known */
		soft_reach_end(&reach);
		join(&process);
		munmap(memory, MIB);
	}
}

/* A process with the right number that is not the one: the secret says so.  One that has become
 * another program is the same. */
static void somebody_else(void)
{
	struct process process = part();
	struct soft_reach reach;
	struct soft_reference reference;
	uint8_t *memory = map(PAGE);

	open_reach(&process, &reach);
	if (!process.child) {
		hear(&process, &reference, sizeof(reference));
		CHECK(!soft_reach_probe(&reach, 0)); /* it is not known who it is */
		/* The memory is there too, but not the secret. */
		CHECK(!soft_reach_probe(&reach, getpid()));
		CHECK_EQUAL(copy_all(&reach, &reference, memory, PAGE), SOFT_REACH_GONE);
		CHECK(probe(&process, &reach));
		page_of(true)->secret_at = 8; /* nothing is there */
		CHECK(!probe(&process, &reach));
	} else {
		reference = grant_of(&reach, memory, PAGE);
		tell(&process, &reference, sizeof(reference));
	}
	meet(&process);
	join(&process);
	munmap(memory, PAGE);
}

/* The owner is killed while its memory is copied: what has been copied is right, and then it is
 * known to be gone. */
static void owner_dies(void)
{
	for (int round = 0; round < 20; round++) {
		struct soft_reach reach;
		struct soft_reference reference;
		uint8_t *memory = map(MIB);
		unsigned copied = 0;
		struct process process = part(); /* this time the child is the owner */

		if (!process.child) {
			fill(memory, MIB, (unsigned)round);
			CHECK_EQUAL(soft_reach_init(&reach, page_of(false), page_of(true)), 0);
			reference = grant_of(&reach, memory, MIB);
			tell(&process, &reference, sizeof(reference));
			pause();
		}
		hear(&process, &reference, sizeof(reference));
		CHECK_EQUAL(soft_reach_init(&reach, page_of(true), page_of(false)), 0);
		CHECK(soft_reach_probe(&reach, process.child));
		for (;; copied++) {
			memset(memory, 0, MIB);
			if (copied == (unsigned)round)
				CHECK_EQUAL(kill(process.child, SIGKILL), 0);
			enum soft_reached reached = copy_all(&reach, &reference, memory, MIB / 4);

			if (reached == SOFT_REACH_GONE)
				break;
			CHECK_EQUAL(reached, SOFT_REACH_COPIED);
			CHECK(filled(memory, MIB, (unsigned)round));
		}
		CHECK(copied >= (unsigned)round);
		soft_reach_end(&reach);
		CHECK_EQUAL(waitpid(process.child, NULL, 0), process.child);
		close(process.fd);
		munmap(memory, MIB);
	}
}

/* ---- taking back --------------------------------------------------------------------------- */

/* The memory is unmapped, and other memory is there, as soon as it has been taken back: whatever the
 * moment, a copy that counts is of what was there before. */
static void unmapped_at_once(void)
{
	struct process process = part();
	struct soft_reach reach;
	uint8_t *own = map(MIB);
	unsigned made_use = 0, lost_some = 0;
	enum {
		ROUNDS = 2000,
		LENGTH = 256 * 1024
	};

	open_reach(&process, &reach);
	CHECK(probe(&process, &reach));
	meet(&process);
	for (unsigned round = 0; round < ROUNDS; round++) {
		struct soft_reference reference;
		uint8_t result;

		if (!process.child) {
			hear(&process, &reference, sizeof(reference));
			result = copy_all(&reach, &reference, own, PAGE << round % 6);
			if (result == SOFT_REACH_COPIED)
				CHECK(filled(own, LENGTH, round));
			tell(&process, &result, 1);
			continue;
		}
		uint8_t *memory = map(LENGTH);
		unsigned let_downs = reach.let_downs;

		fill(memory, LENGTH, round);
		reference = grant_of(&reach, memory, LENGTH);
		bool early = round % 50 == 0, late = round % 50 == 1;
		unsigned lost = early ? take_all_back(&reach) : 0;

		tell(&process, &reference, sizeof(reference));
		if (late) {
			hear(&process, &result, 1);
			CHECK_EQUAL(result, SOFT_REACH_COPIED);
		}
		for (volatile unsigned wait = next_random() % 60000; wait; wait--)
			;
		if (!early)
			lost = take_all_back(&reach);
		munmap(memory, LENGTH);
		CHECK(mmap(memory, LENGTH / 2, PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == memory);
		memset(memory, 0xff, LENGTH / 2);
		if (!late)
			hear(&process, &result, 1);
		/* Both know the same, unless one was kept waiting for too long. */
		if (reach.let_downs == let_downs)
			CHECK_EQUAL(result, lost ? SOFT_REACH_TAKEN_BACK : SOFT_REACH_COPIED);
		CHECK(result == SOFT_REACH_TAKEN_BACK || result == SOFT_REACH_COPIED);
		made_use += result == SOFT_REACH_COPIED;
		lost_some += lost;
		reach.let_downs = 0;
		munmap(memory, LENGTH / 2);
	}
	if (process.child)
		CHECK(made_use >= ROUNDS / 50 && lost_some >= ROUNDS / 50);
	soft_reach_end(&reach);
	join(&process);
	munmap(own, MIB);
}

/* The other side is stopped while it is busy: taking back does not wait for it longer than bounded,
 * and what it copies when it goes on counts as nothing.  Other memory can still be taken back
 * without waiting, and after some such waits nothing is granted any more. */
static void stopped_while_busy(void)
{
	struct process process = part();
	struct soft_reach reach;
	struct soft_reference references[2];
	uint8_t *memory = map(MIB);

	open_reach(&process, &reach);
	CHECK(probe(&process, &reach));
	meet(&process);
	if (!process.child) {
		hear(&process, references, sizeof(references));
		/* Where soft_reach_copy is between its mark and its copy. */
		__atomic_store_n(&reach.own->busy, references[0].slot + 1, __ATOMIC_SEQ_CST);
		meet(&process);
		raise(SIGSTOP);
		CHECK_EQUAL(copy_all(&reach, &references[0], memory, MIB), SOFT_REACH_TAKEN_BACK);
		CHECK_EQUAL(copy_all(&reach, &references[1], memory, MIB), SOFT_REACH_TAKEN_BACK);
		meet(&process);
		soft_reach_end(&reach);
		join(&process);
	}
	int status;

	references[0] = grant_of(&reach, memory, MIB / 2);
	tell(&process, references, sizeof(references[0]));
	references[1] = grant_of(&reach, memory, MIB / 2);
	tell(&process, references + 1, sizeof(references[0]));
	meet(&process);
	CHECK_EQUAL(waitpid(process.child, &status, WUNTRACED), process.child);
	CHECK(WIFSTOPPED(status));
	uint64_t start = now_ns(CLOCK_MONOTONIC), used = now_ns(CLOCK_PROCESS_CPUTIME_ID);

	CHECK_EQUAL(take_all_back(&reach), 2);
	CHECK_EQUAL(reach.let_downs, 1);
	used = now_ns(CLOCK_PROCESS_CPUTIME_ID) - used;
	CHECK(used < (now_ns(CLOCK_MONOTONIC) - start) / 2); /* asleep, not spinning */
	/* The slot that it is busy with is not in use, so nobody waits for it. */
	for (int i = 0; i < 3; i++) {
		struct soft_reference next = grant_of(&reach, memory, MIB);

		CHECK(next.slot != references[0].slot);
		CHECK_EQUAL(take_all_back(&reach), 1);
	}
	CHECK_EQUAL(reach.let_downs, 1);
	while (soft_reach_is_open(&reach)) {
		while (grant_of(&reach, memory, MIB).slot != references[0].slot)
			;
		CHECK(take_all_back(&reach) > 0);
	}
	CHECK(reach.let_downs > 1 && reach.let_downs < 100);
	memset(memory, 0xff, MIB);
	kill(process.child, SIGCONT);
	meet(&process);
	soft_reach_end(&reach);
	join(&process);
	munmap(memory, MIB);
}

static bool is_psn(const struct soft_grant *grant, const void *what)
{
	return grant->psn == *(const uint32_t *)what;
}

/* All slots in use, used again in any order, given back without having been used. */
static void bookkeeping(void)
{
	struct soft_reach reach;
	struct soft_reference references[SOFT_REACH_SLOTS];
	struct soft_grant lost[SOFT_REACH_SLOTS], *grant;
	struct soft_reach_page *page = calloc(1, sizeof(*page));
	uint8_t byte = 7, copy = 0;

	CHECK_EQUAL(soft_reach_init(&reach, page, page), 0);
	CHECK(soft_reach_probe(&reach, getpid()));
	for (uint32_t i = 0; i < SOFT_REACH_SLOTS; i++) {
		CHECK(grant = soft_reach_grant(&reach));
		grant->psn = i % 3;
		references[i] = refer(grant, &byte, 1);
	}
	CHECK(!soft_reach_grant(&reach));
	soft_reach_done(&reach, &references[77]);
	CHECK(grant = soft_reach_grant(&reach));
	CHECK_EQUAL(grant->slot, references[77].slot);
	CHECK(grant->generation != references[77].generation);
	CHECK(!soft_reach_grant(&reach));
	/* What was said of an older generation means nothing now. */
	soft_reach_done(&reach, &references[77]);
	CHECK(!soft_reach_grant(&reach));
	CHECK_EQUAL(copy_all(&reach, &references[77], &copy, 1), SOFT_REACH_TAKEN_BACK);
	struct soft_reference cancelled = refer(grant, &byte, 1);

	soft_reach_cancel(&reach, grant);
	CHECK_EQUAL(copy_all(&reach, &cancelled, &copy, 1), SOFT_REACH_TAKEN_BACK);
	CHECK(grant = soft_reach_grant(&reach)); /* given last, in a slot in the middle */
	grant->psn = 1;
	uint32_t last = grant->slot, which = 1;

	CHECK_EQUAL(copy_all(&reach, &references[1], &copy, 1), SOFT_REACH_COPIED);
	CHECK_EQUAL(copy, 7);
	unsigned count = soft_reach_take_back(&reach, is_psn, &which, lost);

	CHECK_EQUAL(count, (SOFT_REACH_SLOTS + 1) / 3); /* but [1]; and the last one more */
	for (unsigned i = 1; i < count; i++)
		CHECK(lost[i - 1].order < lost[i].order);
	CHECK_EQUAL(lost[count - 1].slot, last);
	CHECK_EQUAL(soft_reach_take_back(&reach, is_psn, &which, lost), 0);
	CHECK_EQUAL(copy_all(&reach, &references[2], &copy, 1), SOFT_REACH_COPIED);
	CHECK_EQUAL(copy_all(&reach, &references[4], &copy, 1), SOFT_REACH_TAKEN_BACK);
	soft_reach_end(&reach);
	free(page);
}

/* ---- as bytes ------------------------------------------------------------------------------ */

static void as_bytes(void)
{
	struct soft_reference reference = {.slot = 5,
					   .generation = 0xfffffffe,
					   .count = 2,
					   .length = 300,
					   .pieces = {{1ull << 63, 100}, {4096, 200}}};
	struct soft_reference got;
	uint8_t bytes[SOFT_REFERENCE_MOST] = {0};

	CHECK_EQUAL(soft_reference_encode(bytes, &reference), 40);
	CHECK(soft_reference_decode(bytes, 2, 300, &got));
	CHECK_EQUAL(memcmp(&got, &reference, sizeof(got)), 0);
	/* Lengths that do not add up, too many pieces, an empty one, no such slot. */
	CHECK(!soft_reference_decode(bytes, 2, 299, &got));
	CHECK(!soft_reference_decode(bytes, 2, 301, &got));
	CHECK(!soft_reference_decode(bytes, 1, 300, &got));
	CHECK(!soft_reference_decode(bytes, 3, 300, &got));
	CHECK(!soft_reference_decode(bytes, 0, 0, &got));
	CHECK(!soft_reference_decode(bytes, SOFT_REACH_PIECES + 1, 300, &got));
	soft_put64(bytes + 16, 1ull << 32 | 100);
	CHECK(!soft_reference_decode(bytes, 2, 300, &got));
	soft_put64(bytes + 16, (uint64_t)-100);
	CHECK(!soft_reference_decode(bytes, 2, 100, &got));
	soft_put64(bytes + 16, 100);
	soft_put32(bytes, SOFT_REACH_SLOTS);
	CHECK(!soft_reference_decode(bytes, 2, 300, &got));
	/* Whatever comes: what is accepted holds together. */
	for (int round = 0; round < 200000; round++) {
		uint64_t sum = 0;
		uint32_t count = next_random() % (SOFT_REACH_PIECES + 2);
		uint32_t length = next_random() % 64;

		for (size_t i = 0; i < sizeof(bytes); i++)
			bytes[i] = i % 8 && next_random() % 64 ? 0 : (uint8_t)(next_random() % 32);
		if (!soft_reference_decode(bytes, count, length, &got))
			continue;
		CHECK(got.count == count && got.slot < SOFT_REACH_SLOTS && count &&
		      count <= SOFT_REACH_PIECES);
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
	STEP(too_slow());
	STEP(forbidden());
	STEP(somebody_else());
	STEP(owner_dies());
	STEP(unmapped_at_once());
	STEP(stopped_while_busy());
	return 0;
}
