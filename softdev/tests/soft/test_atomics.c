/* Atomics from several processes at once, and the owner's own on the same word: no update is lost,
 * and no two see the same word before theirs (IBTA 9.4.5.1; IBV_ATOMIC_GLOB). */
#define _GNU_SOURCE
#include "verbs_side.h"

enum { PROCESSES = 3, EACH = 2000, WINDOW = 4, ALL = EACH * (PROCESSES + 1) };

/* The owner's application, which does not ask the device. */
struct owner {
	uint64_t *word;
	uint64_t seen[EACH];
};

static void *own_updates(void *argument)
{
	struct owner *owner = argument;

	for (int i = 0; i < EACH; i++) {
		owner->seen[i] = __atomic_fetch_add(owner->word, 1, __ATOMIC_SEQ_CST);
		/* Not all before the first of the others comes. */
		while (i % 10 == 0 && __atomic_load_n(owner->word, __ATOMIC_SEQ_CST) <
					      (uint64_t)i + (uint64_t)i * PROCESSES / 2)
			sched_yield();
	}
	return NULL;
}

/* Add one, EACH times, some of them under way at a time; what was there before each. */
static void fetch_and_add(struct side *side, const struct address *owner, uint64_t *seen)
{
	int posted = 0, done = 0;

	while (done < EACH) {
		for (; posted < EACH && posted - done < WINDOW; posted++)
			POST(side, IBV_WR_ATOMIC_FETCH_AND_ADD, .wr_id = (uint64_t)posted,
			     .offset = (size_t)(posted % WINDOW) * 8, .length = 8,
			     .remote = owner->memory, .rkey = owner->rkey, .compare_add = 1);
		expect_wc(side, (uint64_t)done, IBV_WC_SUCCESS);
		memcpy(&seen[done], side->memory + done % WINDOW * 8, 8);
		done++;
	}
}

/* The same by compare and swap, which must be tried again when another thread was quicker. */
static void compare_and_swap(struct side *side, const struct address *owner, uint64_t *seen)
{
	uint64_t expected = 0;

	for (int done = 0; done < EACH;) {
		uint64_t before;

		RUN(side, IBV_WC_SUCCESS, IBV_WR_ATOMIC_CMP_AND_SWP, .wr_id = 1, .length = 8,
		    .remote = owner->memory, .rkey = owner->rkey, .compare_add = expected,
		    .swap = expected + 1);
		memcpy(&before, side->memory, 8);
		if (before == expected)
			seen[done++] = before++;
		expected = before;
	}
}

static void count_seen(const uint64_t *seen, uint8_t *times)
{
	for (int i = 0; i < EACH; i++) {
		CHECK(seen[i] < ALL);
		CHECK_EQUAL(times[seen[i]]++, 0);
		/* Each sees its own in their order. */
		CHECK(i == 0 || seen[i] > seen[i - 1]);
	}
}

static void other_process(const struct process *process, int which)
{
	struct side side;
	uint64_t seen[EACH];

	open_side(&side, (struct options){0});
	struct address owner = exchange(process, &side);

	bring_up(&side, &owner);
	process_barrier(process);
	if (which == 0)
		compare_and_swap(&side, &owner, seen);
	else
		fetch_and_add(&side, &owner, seen);
	tell(process, seen, sizeof(seen));
	process_barrier(process);
	close_side(&side);
	join(process);
}

int main(void)
{
	struct process processes[PROCESSES];
	struct side sides[PROCESSES];
	static struct owner owner;
	static uint8_t times[ALL];
	uint64_t seen[EACH];
	pthread_t thread;

	limit_seconds(100);
	for (int i = 0; i < PROCESSES; i++) {
		processes[i] = split();
		if (!processes[i].child)
			other_process(&processes[i], i);
	}
	for (int i = 0; i < PROCESSES; i++) {
		open_side(&sides[i], (struct options){0});
		/* All on the same word: the first one's. */
		struct address own = address_of_side(&sides[i]), peer;

		if (i == 0)
			owner.word = (uint64_t *)(void *)sides[0].memory;
		struct ibv_mr *mr = verbs->ibv_reg_mr(sides[i].pd, owner.word, 8, ALL_RIGHTS);

		CHECK(mr);
		CHECK_EQUAL(verbs->ibv_dereg_mr(sides[i].mr), 0);
		sides[i].mr = mr;
		own.memory = (uintptr_t)owner.word;
		own.rkey = mr->rkey;
		tell(&processes[i], &own, sizeof(own));
		hear(&processes[i], &peer, sizeof(peer));
		bring_up(&sides[i], &peer);
	}
	CHECK_EQUAL(pthread_create(&thread, NULL, own_updates, &owner), 0);
	for (int i = 0; i < PROCESSES; i++)
		process_barrier(&processes[i]);
	for (int i = 0; i < PROCESSES; i++) {
		hear(&processes[i], seen, sizeof(seen));
		count_seen(seen, times);
	}
	CHECK_EQUAL(pthread_join(thread, NULL), 0);
	count_seen(owner.seen, times);
	CHECK_EQUAL(__atomic_load_n(owner.word, __ATOMIC_SEQ_CST), ALL);
	for (int i = 0; i < PROCESSES; i++) {
		process_barrier(&processes[i]);
		close_side(&sides[i]);
		join(&processes[i]);
	}
	return 0;
}
