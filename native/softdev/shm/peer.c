/* Ways through the rings of a neighbour; see shm.h.
 *
 * A way is opened by OPEN, whose `from` is the number that the answer shall go to; the answer is
 * ACCEPT, with the number at the other end, or END.  Then DATA goes to and fro until one side says
 * END, which is not answered.  Who has opened and does not know the other number yet takes that back
 * by an END to nobody, with its own number; an ACCEPT that crosses it is answered with END.  Data to
 * numbers that are no more was on its way when its way ended, and is dropped.
 *
 * Data waits for room with its owner.  Everything else is kept here when there is none, and goes
 * before any data.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "shm_internal.h"
#include "wire/cma_descriptor.h"

enum kind {
	OPEN = 1,
	ACCEPT,
	DATA,
	END
};

enum {
	/* A neighbour that reads nothing and makes us say more and more: */
	MOST_WORDS = SOFT_MAX_QP,
};

struct soft_word {
	uint32_t kind, to, from, length;
	uint8_t greeting[SOFT_GREETING];
};

static struct soft_node neighbours = {&neighbours, &neighbours};
static unsigned count;
static struct soft_neighbour *self;
static struct soft_table ways;

/* ---- neighbours ---------------------------------------------------------------------------- */

static void flush(struct soft_deferred *deferred);

struct soft_neighbour *soft_neighbour_create(void)
{
	struct soft_neighbour *neighbour =
		count < SOFT_MOST_NEIGHBOURS ? calloc(1, sizeof(*neighbour)) : NULL;

	if (!neighbour)
		return NULL;
	soft_meeting_init(neighbour);
	soft_list_init(&neighbour->ways);
	soft_list_init(&neighbour->waiting);
	soft_list_init(&neighbour->flush.node);
	soft_list_init(&neighbour->attended);
	soft_list_init(&neighbour->stranger);
	neighbour->flush.run = flush;
	soft_list_append(&neighbours, &neighbour->node);
	count++;
	return neighbour;
}

void soft_neighbour_hold(struct soft_neighbour *neighbour)
{
	neighbour->busy++;
}

static void release(struct soft_neighbour *neighbour)
{
	if (!neighbour->dead || neighbour->busy)
		return;
	soft_memory_leave(neighbour);
	free(neighbour->words);
	free(neighbour);
}

void soft_neighbour_release(struct soft_neighbour *neighbour)
{
	neighbour->busy--;
	release(neighbour);
}

void soft_neighbours_all(void (*what)(struct soft_neighbour *neighbour))
{
	struct soft_node *node = neighbours.next;

	while (node != &neighbours) {
		struct soft_neighbour *neighbour =
			soft_list_entry(node, struct soft_neighbour, node);

		node = node->next;
		what(neighbour);
	}
}

static void forget(struct soft_way *way)
{
	soft_table_remove(&ways, way->id);
	soft_list_remove(&way->node);
	soft_list_remove(&way->waiting);
	way->neighbour = NULL;
	way->id = way->peer = 0;
}

void soft_neighbour_finish(struct soft_neighbour *neighbour, int error)
{
	if (neighbour->dead)
		return;
	neighbour->dead = true;
	if (neighbour == self)
		self = NULL;
	soft_list_remove(&neighbour->node);
	count--;
	soft_deferred_cancel(&neighbour->flush);
	soft_attention_forget(neighbour);
	soft_meeting_end(neighbour);
	neighbour->busy++;
	soft_greeting_uncalled(neighbour, 0);
	while (!soft_list_empty(&neighbour->ways)) {
		struct soft_way *way = soft_list_entry(neighbour->ways.next, struct soft_way, node);

		forget(way);
		way->calls->gone(way, error);
	}
	neighbour->busy--;
	release(neighbour);
}

/* What it has written before it went has arrived, above all its last words.  It may be alive and
 * write on: no more than was there when it went. */
void soft_neighbour_part(struct soft_neighbour *neighbour)
{
	neighbour->busy++;
	soft_neighbour_take_in(neighbour, SOFT_RING_SIZE);
	soft_neighbour_finish(neighbour, neighbour->up ? ECONNRESET : ECONNREFUSED);
	neighbour->busy--;
	release(neighbour);
}

bool soft_neighbour_is_self(const struct soft_neighbour *neighbour)
{
	return neighbour == self;
}

pid_t soft_neighbour_pid(const struct soft_neighbour *neighbour)
{
	return neighbour->pid;
}

void *soft_neighbour_own_area(struct soft_neighbour *neighbour)
{
	return neighbour->own_area;
}

void *soft_neighbour_their_area(struct soft_neighbour *neighbour)
{
	return neighbour->their_area;
}

/* ---- what is said about ways --------------------------------------------------------------- */

/* Its positions cannot be: it is ended when nobody is in the middle of something. */
static void give_up(struct soft_neighbour *neighbour)
{
	neighbour->broken = true;
	soft_defer(&neighbour->flush);
}

static bool put_word(struct soft_neighbour *neighbour, const struct soft_word *word)
{
	const struct iovec payload = {(void *)word->greeting, word->length};
	ssize_t room = soft_ring_room(&neighbour->out, SOFT_GREETING);

	if (room < 0)
		give_up(neighbour);
	if (room < SOFT_GREETING)
		return false;
	soft_ring_put(&neighbour->out,
		      &(struct soft_record){.kind = word->kind,
					    .to = word->to,
					    .from = word->from,
					    .length = word->length},
		      &payload, 1);
	return true;
}

static void pour(struct soft_neighbour *neighbour)
{
	uint32_t said = 0;

	while (said < neighbour->word_count && put_word(neighbour, &neighbour->words[said]))
		said++;
	neighbour->word_count -= said;
	if (said)
		memmove(neighbour->words, neighbour->words + said,
			neighbour->word_count * sizeof(*neighbour->words));
}

static bool keep(struct soft_neighbour *neighbour, const struct soft_word *word)
{
	if (neighbour->word_count == neighbour->word_room) {
		uint32_t room = neighbour->word_room ? 2 * neighbour->word_room : 64;
		struct soft_word *words =
			room > MOST_WORDS ? NULL : realloc(neighbour->words, room * sizeof(*words));

		if (!words)
			return false;
		neighbour->words = words;
		neighbour->word_room = room;
	}
	neighbour->words[neighbour->word_count++] = *word;
	return true;
}

static void say(struct soft_neighbour *neighbour, enum kind kind, uint32_t to, uint32_t from,
		const uint8_t *greeting)
{
	struct soft_word word = {
		.kind = kind,
		.to = to,
		.from = from,
		.length = greeting ? SOFT_GREETING : 0,
	};

	if (neighbour->dead)
		return;
	if (greeting)
		memcpy(word.greeting, greeting, SOFT_GREETING);
	if ((neighbour->word_count || !put_word(neighbour, &word)) && !keep(neighbour, &word))
		give_up(neighbour);
	soft_defer(&neighbour->flush);
}

static int enter(struct soft_way *way, struct soft_neighbour *neighbour, uint32_t peer)
{
	int rc = neighbour->dead ? ECONNRESET : soft_table_add(&ways, way, UINT32_MAX, &way->id);

	if (rc)
		return rc;
	way->neighbour = neighbour;
	way->peer = peer;
	soft_list_append(&neighbour->ways, &way->node);
	soft_list_init(&way->waiting);
	return 0;
}

int soft_way_open(struct soft_way *way, struct soft_neighbour *neighbour,
		  const uint8_t greeting[SOFT_GREETING])
{
	int rc = enter(way, neighbour, 0);

	if (!rc)
		say(neighbour, OPEN, 0, way->id, greeting);
	return rc;
}

int soft_way_accept(struct soft_way *way, struct soft_neighbour *neighbour, uint32_t peer,
		    const uint8_t greeting[SOFT_GREETING])
{
	int rc = enter(way, neighbour, peer);

	if (rc)
		soft_neighbour_refuse(neighbour, peer);
	else
		say(neighbour, ACCEPT, peer, way->id, greeting);
	return rc;
}

void soft_neighbour_refuse(struct soft_neighbour *neighbour, uint32_t peer)
{
	say(neighbour, END, peer, 0, NULL);
}

void soft_way_end(struct soft_way *way)
{
	struct soft_neighbour *neighbour = way->neighbour;
	uint32_t id = way->id, peer = way->peer;

	if (!neighbour)
		return;
	forget(way);
	say(neighbour, END, peer, peer ? 0 : id, NULL);
}

/* ---- data ---------------------------------------------------------------------------------- */

size_t soft_way_room(struct soft_way *way, size_t least)
{
	struct soft_neighbour *neighbour = way->neighbour;

	if (!neighbour || !way->peer)
		return 0;
	ssize_t room = neighbour->word_count ? 0 : soft_ring_room(&neighbour->out, least);

	if (room > 0 && (size_t)room >= least)
		return (size_t)room;
	if (room < 0)
		give_up(neighbour);
	way->least = least;
	if (soft_list_empty(&way->waiting)) {
		soft_list_append(&neighbour->waiting, &way->waiting);
		way->round = neighbour->round;
	}
	soft_defer(&neighbour->flush);
	return 0;
}

void soft_way_write(struct soft_way *way, const struct iovec *iov, int count, size_t bytes)
{
	struct soft_neighbour *neighbour = way->neighbour;

	soft_ring_put(
		&neighbour->out,
		&(struct soft_record){.kind = DATA, .to = way->peer, .length = (uint32_t)bytes},
		iov, count);
	soft_defer(&neighbour->flush);
}

void soft_way_wait(struct soft_way *way)
{
	struct soft_neighbour *neighbour = way->neighbour;

	if (!soft_list_empty(&way->waiting))
		return;
	way->least = 1;
	soft_list_append(&neighbour->waiting, &way->waiting);
	way->round = neighbour->round;
	soft_defer(&neighbour->flush);
}

/* What the first of those who wait needs. */
static ssize_t least_of_first(const struct soft_neighbour *neighbour)
{
	if (neighbour->word_count)
		return SOFT_GREETING;
	return (ssize_t)soft_list_entry(neighbour->waiting.next, struct soft_way, waiting)->least;
}

/* There may be room: in turns, lest the first takes all of it every time. */
void soft_neighbour_offer_room(struct soft_neighbour *neighbour)
{
	neighbour->round++;
	pour(neighbour);
	while (!soft_list_empty(&neighbour->waiting) && !neighbour->word_count &&
	       soft_ring_room(&neighbour->out, SOFT_WAY_LEAST) >= least_of_first(neighbour)) {
		struct soft_way *way =
			soft_list_entry(neighbour->waiting.next, struct soft_way, waiting);

		if (way->round == neighbour->round)
			break; /* it has had its turn, and waits again */
		soft_list_remove(&way->waiting);
		way->calls->writable(way);
	}
}

bool soft_neighbour_starves(struct soft_neighbour *neighbour)
{
	if (soft_list_empty(&neighbour->waiting) && !neighbour->word_count)
		return false;
	ssize_t room = soft_ring_starve(&neighbour->out);

	if (room < 0)
		give_up(neighbour);
	return room >= least_of_first(neighbour);
}

/* ---- taking in ----------------------------------------------------------------------------- */

static struct soft_way *find(const struct soft_neighbour *neighbour, uint32_t id)
{
	struct soft_way *way = soft_table_find(&ways, id);

	return way && way->neighbour == neighbour ? way : NULL;
}

/* False: nonsense. */
static bool deliver(struct soft_neighbour *neighbour, const struct soft_record *record)
{
	struct soft_way *way = find(neighbour, record->to);
	bool greets = record->kind == OPEN || record->kind == ACCEPT;
	uint8_t greeting[SOFT_GREETING];

	if (greets && (record->length != SOFT_GREETING || !record->from))
		return false;
	if (greets)
		memcpy(greeting, record->payload, SOFT_GREETING);
	switch (record->kind) {
	case OPEN:
		soft_greeting_called(neighbour, record->from, greeting);
		return true;
	case ACCEPT:
		if (!way) {
			soft_neighbour_refuse(neighbour, record->from);
			return true;
		}
		if (way->peer)
			return false;
		way->peer = record->from;
		way->calls->accepted(way, greeting);
		return true;
	case DATA:
		if (!record->length || (way && !way->peer))
			return false;
		if (way)
			way->calls->data(way, record->payload, record->length);
		return true;
	case END:
		if (record->to == 0 && record->from != 0)
			soft_greeting_uncalled(neighbour, record->from);
		if (way) {
			forget(way);
			way->calls->gone(way, 0);
		}
		return true;
	default:
		return false;
	}
}

/* Of what goes to ourselves more is put there while we look: in one turn of the lock, no more than in
 * one step. */
static size_t within_turn(struct soft_neighbour *neighbour, size_t budget)
{
	if (neighbour->turn != soft_lock_turn()) {
		neighbour->turn = soft_lock_turn();
		neighbour->allowance = SOFT_STEP_BYTES;
	}
	return budget < neighbour->allowance ? budget : neighbour->allowance;
}

bool soft_neighbour_take_in(struct soft_neighbour *neighbour, size_t budget)
{
	struct soft_record record;
	size_t taken = 0;

	if (neighbour == self)
		budget = within_turn(neighbour, budget);
	while (taken < budget && !neighbour->dead && neighbour->up && !soft_port_is_down()) {
		int rc = soft_ring_next(&neighbour->in, &record);
		uint64_t copied = soft_reach_copied;

		if (rc == 0)
			break;
		if (rc > 0)
			taken += record.length;
		taken += SOFT_RECORD_HEADER;
		if (rc < 0 || !deliver(neighbour, &record)) {
			soft_neighbour_finish(neighbour, EPROTO);
			break;
		}
		if (neighbour->dead)
			break;
		soft_ring_done(&neighbour->in, &record);
		taken += (size_t)(soft_reach_copied - copied); /* what it referred to */
	}
	neighbour->allowance -= taken < neighbour->allowance ? taken : neighbour->allowance;
	return taken;
}

/* ---- ourselves ----------------------------------------------------------------------------- */

static struct soft_neighbour *ourselves(void)
{
	if (self)
		return self;
	struct soft_neighbour *neighbour = soft_neighbour_create();

	if (!neighbour)
		return NULL;
	if (soft_memory_private(neighbour)) {
		soft_neighbour_finish(neighbour, 0);
		return NULL;
	}
	neighbour->pid = getpid();
	neighbour->up = true;
	self = neighbour;
	return self;
}

int soft_way_to_self(struct soft_way *way)
{
	struct soft_neighbour *neighbour = ourselves();
	int rc = neighbour ? enter(way, neighbour, 0) : ENOMEM;

	way->peer = way->id;
	return rc;
}

struct soft_neighbour *soft_neighbour_at(uint16_t lid)
{
	if (!lid)
		return NULL;
	if (lid == soft_listener_port())
		return ourselves();
	for (struct soft_node *node = neighbours.next; node != &neighbours; node = node->next) {
		struct soft_neighbour *neighbour =
			soft_list_entry(node, struct soft_neighbour, node);

		if (neighbour->lid == lid)
			return neighbour;
	}
	return soft_meeting_begin(lid);
}

/* The lock is about to be given back.  What went to ourselves is there at once. */
static void flush(struct soft_deferred *deferred)
{
	struct soft_neighbour *neighbour = soft_container(deferred, struct soft_neighbour, flush);

	if (neighbour->broken) {
		soft_neighbour_finish(neighbour, EPROTO);
	} else if (neighbour == self) {
		soft_attention_visit(neighbour);
	} else {
		bool asleep = soft_ring_flush(&neighbour->out);

		if (asleep)
			soft_meeting_ring(neighbour);
		soft_engine_met(asleep);
		if (soft_neighbour_starves(neighbour))
			soft_attention_see(neighbour);
	}
}

/* ---- the end ------------------------------------------------------------------------------- */

void soft_neighbours_shutdown(void)
{
	while (!soft_list_empty(&neighbours))
		soft_neighbour_finish(soft_list_entry(neighbours.next, struct soft_neighbour, node),
				      ECONNRESET);
}

/* The rings are not mapped here.  Inherited links may still end their ways. */
void soft_neighbours_forget(void)
{
	while (!soft_list_empty(&neighbours)) {
		struct soft_neighbour *neighbour =
			soft_list_entry(neighbours.next, struct soft_neighbour, node);

		soft_list_remove(&neighbour->node);
		soft_attention_forget(neighbour);
		while (!soft_list_empty(&neighbour->ways))
			forget(soft_list_entry(neighbour->ways.next, struct soft_way, node));
		soft_references_part(neighbour);
		soft_bell_close(&neighbour->bell);
		free(neighbour->words);
		free(neighbour);
	}
	self = NULL;
	count = 0;
	soft_meeting_forget();
}
