/* No wake-up may be lost. Two threads sleep in ibv_get_cq_event() between their messages, and only
 * the other thread's message wakes them. A third thread changes the size and moderation of their
 * completion queues, which are basic or extended. */
#include "extended_side.h"

enum { ROUNDS = 3000 };

static bool over;

struct player {
	struct side side;
	bool begins, extended;
	pthread_t thread;
};

/* Number of completions so far. */
struct counts {
	int receives, sends;
};

static void count_completion(struct counts *counts, enum ibv_wc_status status, uint64_t wr_id)
{
	CHECK_EQUAL(status, IBV_WC_SUCCESS);
	if (wr_id == 1)
		counts->receives++;
	else
		counts->sends++;
}

static void poll_completions(struct player *player, struct counts *counts)
{
	struct ibv_cq_ex *cq = as_extended(player->side.cq);
	struct ibv_poll_cq_attr attr = {0};
	struct ibv_wc wc;

	if (!player->extended) {
		while (poll_cq(&player->side, 1, &wc) == 1)
			count_completion(counts, wc.status, wc.wr_id);
		return;
	}
	int rc = cq->start_poll(cq, &attr);

	if (rc) {
		CHECK_EQUAL(rc, ENOENT);
		return;
	}
	do
		count_completion(counts, cq->status, cq->wr_id);
	while (!cq->next_poll(cq));
	cq->end_poll(cq);
}

/* Arm the queue, poll it again, and then sleep (ibv_get_cq_event(3)). */
static void wait_for_completions(struct player *player, struct counts *counts, int receives,
				 int sends)
{
	struct side *side = &player->side;
	struct ibv_cq *cq;
	void *context;

	for (;;) {
		CHECK_OK(side->context->ops.req_notify_cq(side->cq, 0));
		poll_completions(player, counts);
		if (counts->receives >= receives && counts->sends >= sends)
			return;
		CHECK_OK(verbs->ibv_get_cq_event(side->channel, &cq, &context));
		CHECK(cq == side->cq);
		verbs->ibv_ack_cq_events(cq, 1);
	}
}

static void *run_player(void *argument)
{
	struct player *player = argument;
	struct counts counts = {0};

	for (int round = 1; round <= ROUNDS; round++) {
		if (!player->begins)
			wait_for_completions(player, &counts, round, 0);
		post_receive_at(&player->side, 1, 0, 8);
		POST(&player->side, IBV_WR_SEND, .wr_id = 2, .length = 8);
		if (player->begins)
			wait_for_completions(player, &counts, round, round);
	}
	wait_for_completions(player, &counts, ROUNDS, ROUNDS);
	return NULL;
}

/* Keep resizing both queues and switching their moderation between a period of 20 us and none. */
static void *resize_and_moderate(void *argument)
{
	struct player *players = argument;
	struct ibv_modify_cq_attr attr = {.attr_mask = IBV_CQ_ATTR_MODERATE};

	for (unsigned i = 0; !__atomic_load_n(&over, __ATOMIC_RELAXED); i++) {
		struct ibv_cq *cq = players[i & 1].side.cq;

		attr.moderate =
			(struct ibv_moderate_cq){(uint16_t)(i & 2), (uint16_t)(10 * (i & 2))};
		CHECK_OK(extended(cq->context)->modify_cq(cq, &attr));
		CHECK_OK(verbs->ibv_resize_cq(cq, 16 + (int)(i & 15)));
		sched_yield();
	}
	return NULL;
}

static void no_wake_up_is_lost_while_cqs_change(bool is_extended)
{
	struct player players[2] = {{.begins = true, .extended = is_extended},
				    {.extended = is_extended}};
	pthread_t third;

	over = false;
	for (int i = 0; i < 2; i++) {
		if (is_extended)
			open_extended_side(&players[i].side, (struct options){0},
					   (struct extras){.wc_flags = all_times});
		else
			OPEN(&players[i].side);
	}
	connect_pair(&players[0].side, &players[1].side);
	post_receive_at(&players[1].side, 1, 0, 8);
	CHECK_OK(pthread_create(&third, NULL, resize_and_moderate, players));
	for (int i = 0; i < 2; i++)
		CHECK_OK(pthread_create(&players[i].thread, NULL, run_player, &players[i]));
	for (int i = 0; i < 2; i++)
		CHECK_OK(pthread_join(players[i].thread, NULL));
	__atomic_store_n(&over, true, __ATOMIC_RELAXED);
	CHECK_OK(pthread_join(third, NULL));
	close_pair(&players[0].side, &players[1].side);
}

int main(void)
{
	limit_seconds(100);
	STEP(no_wake_up_is_lost_while_cqs_change(false));
	STEP(no_wake_up_is_lost_while_cqs_change(true));
	return 0;
}
