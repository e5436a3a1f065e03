/* A peer and the owner update the same word with atomic operations. No update may be lost, and no
 * two operations may return the same value (IBTA 9.4.5.1; IBV_ATOMIC_GLOB). */
#include "verbs_side.h"

enum { EACH = 40000, WINDOW = 4 };

static uint64_t *word;
static uint8_t seen[1 << 24];
static bool done; /* atomic */

static void record_value(uint64_t before)
{
	CHECK(before < sizeof(seen));
	CHECK_EQUAL(__atomic_fetch_add(&seen[before], 1, __ATOMIC_SEQ_CST), 0);
}

/* Increment the word with the CPU instead of the device, as the owner's application may do.
 * Alternate between bursts and a rate close to the peer's. */
static void *update_by_cpu(void *count)
{
	for (; !__atomic_load_n(&done, __ATOMIC_SEQ_CST); ++*(uint64_t *)count) {
		record_value(__atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST));
		for (volatile uint32_t wait =
			     next_random() % (*(uint64_t *)count & 512 ? 2000 : 20);
		     wait; wait--)
			;
	}
	return NULL;
}

/* Increment the word EACH times, with at most WINDOW requests in flight. */
static void fetch_and_add(struct side *a, struct side *b)
{
	for (uint64_t posted = 0, got = 0; got < EACH; got++) {
		uint64_t before;

		for (; posted < EACH && posted - got < WINDOW; posted++)
			POST(a, IBV_WR_ATOMIC_FETCH_AND_ADD, .wr_id = posted,
			     .offset = posted % WINDOW * 8, .length = 8, REMOTE(b, 0),
			     .compare_add = 1);
		expect_done(a, got);
		memcpy(&before, a->memory + got % WINDOW * 8, 8);
		record_value(before);
	}
}

/* Increment the word EACH times by compare-and-swap, which fails when the owner was faster. */
static void compare_and_swap(struct side *a, struct side *b)
{
	uint64_t expected = 0, before;

	for (int swapped = 0; swapped < EACH; expected = before) {
		DO(a, IBV_WR_ATOMIC_CMP_AND_SWP, .length = 8, REMOTE(b, 0), .compare_add = expected,
		   .swap = expected + 1);
		memcpy(&before, a->memory, 8);
		if (before == expected) {
			record_value(before++);
			swapped++;
		}
	}
}

static void concurrent_atomics_lose_no_update(struct side *a, struct side *b)
{
	uint64_t count = 0;
	pthread_t thread;

	word = (uint64_t *)(void *)b->memory;
	CHECK_OK(pthread_create(&thread, NULL, update_by_cpu, &count));
	fetch_and_add(a, b);
	compare_and_swap(a, b);
	__atomic_store_n(&done, true, __ATOMIC_SEQ_CST);
	CHECK_OK(pthread_join(thread, NULL));
	CHECK_EQUAL(*word, count + 2 * EACH);
}

int main(void)
{
	limit_seconds(100);
	PAIR(concurrent_atomics_lose_no_update);
	return 0;
}
