/* The inside of a neighbour, for the rooms that make it: peer.c (ways and records), segment.c
 * (what is shared), attach.c (how two processes come to share it, and how they part), wakeup.c
 * (who looks into which ring, and who is woken). */
#ifndef AIORDMA_SOFT_MEETING_H
#define AIORDMA_SOFT_MEETING_H

#include "notify_pipe.h"
#include "shm.h"
#include "ring.h"

enum {
	SOFT_MOST_NEIGHBOURS = 4096,
};

struct soft_neighbour {
	struct soft_node node;
	bool up;       /* both sides have the memory */
	bool dead;
	bool broken; /* it has written nonsense, and will be ended when the lock is given back */
	unsigned busy; /* it must not be freed */
	uint16_t lid;
	pid_t pid;

	/* attach.c */
	struct soft_source socket;
	struct soft_source process; /* a pidfd */
	struct soft_bell bell;
	struct soft_timer patience;
	struct soft_node stranger; /* it has said nothing yet */

	/* segment.c */
	void *memory; /* what is shared beside the rings */
	uint8_t *own_area, *their_area;
	struct soft_reach *reach; /* cma_descriptor.c; NULL if there was no memory for it */
	struct soft_ring in, out;

	/* peer.c */
	struct soft_node ways;
	struct soft_node waiting; /* ways that wait for room */
	uint32_t round; /* of offering it */
	struct soft_deferred flush; /* something was written */
	unsigned turn; /* of the lock, ourselves: */
	size_t allowance; /* what may still be taken in during it */
	struct soft_word *words; /* records other than data that found no room */
	uint32_t word_count, word_room;

	/* wakeup.c */
	struct soft_node attended;
	unsigned vain; /* looks in a row that found nothing */
	bool asked; /* to ring, and its bell has not been heard */
};

/* ---- segment.c ------------------------------------------------------------------------------ */

/* Make the shared memory: an fd, or -1 and errno; look at that which somebody else has made: 0 or
 * EPROTO; map it, into the neighbour: 0 or an errno value (`made`: by us).  The fd is not needed
 * after that. */
int soft_memory_make(void);
int soft_memory_check(int fd);
int soft_memory_enter(struct soft_neighbour *neighbour, int fd, bool made);
/* What we share with ourselves. */
int soft_memory_private(struct soft_neighbour *neighbour);
void soft_memory_leave(struct soft_neighbour *neighbour);

/* ---- peer.c --------------------------------------------------------------------------- */

/* One more, without rings; NULL: out of memory, or too many. */
struct soft_neighbour *soft_neighbour_create(void);
/* All its ways are gone; it is freed when nobody is busy with it any more. */
void soft_neighbour_finish(struct soft_neighbour *neighbour, int error);
/* The same once everything has been taken in that it has written. */
void soft_neighbour_part(struct soft_neighbour *neighbour);
void soft_neighbour_hold(struct soft_neighbour *neighbour);
void soft_neighbour_release(struct soft_neighbour *neighbour);
/* Take in at most about `budget` bytes.  Was there anything? */
bool soft_neighbour_take_in(struct soft_neighbour *neighbour, size_t budget);
/* There may be room for what waits for it. */
void soft_neighbour_offer_room(struct soft_neighbour *neighbour);
/* Something waits for room.  Ask for it; true if there is some after all. */
bool soft_neighbour_starves(struct soft_neighbour *neighbour);
/* Call for each; it may end that one. */
void soft_neighbours_all(void (*what)(struct soft_neighbour *neighbour));

/* ---- attach.c ----------------------------------------------------------------------------- */

/* Go and meet whoever has that LID; NULL: nobody that could be met. */
struct soft_neighbour *soft_meeting_begin(uint16_t lid);
/* Wake it. */
void soft_meeting_ring(struct soft_neighbour *neighbour);
/* What it rings for has been seen: hear its bell now, if it is there yet.  It may end that one. */
void soft_meeting_hush(struct soft_neighbour *neighbour);
/* One that has just been made. */
void soft_meeting_init(struct soft_neighbour *neighbour);
/* Close what is open, of one that is over. */
void soft_meeting_end(struct soft_neighbour *neighbour);
void soft_meeting_forget(void);

/* ---- wakeup.c --------------------------------------------------------------------------- */

/* Look into the ring of one that has rung, or of ourselves. */
void soft_attention_visit(struct soft_neighbour *neighbour);
/* It has no room, or asks for it: somebody must come by again if there is something now. */
void soft_attention_see(struct soft_neighbour *neighbour);
void soft_attention_forget(struct soft_neighbour *neighbour);

#endif
