/* The inside of a neighbour, for the rooms that make it: neighbour.c (ways and records), meeting.c
 * (how two processes come to share memory, and how they part). */
#ifndef AIORDMA_SOFT_MEETING_H
#define AIORDMA_SOFT_MEETING_H

#include "neighbour.h"
#include "ring.h"

struct soft_neighbour {
	struct soft_node node;
	bool up;
	bool dead;
	bool broken;   /* it has written nonsense, and will be ended when the lock is given back */
	unsigned busy; /* it must not be freed */
	uint16_t lid;
	pid_t pid;
	void *memory; /* what is shared beside the rings */
	uint8_t *own_area, *their_area;
	struct soft_ring in, out;
	struct soft_node ways;
	struct soft_node waiting;     /* ways that wait for room */
	struct soft_deferred flush;   /* something was written */
	struct soft_word *words;      /* records other than data that found no room */
	uint32_t word_count, word_room;
};

/* memory.c.  Make the shared memory: an fd, or -1 and errno; look at that which somebody else has
 * made: 0 or EPROTO; map it, into the neighbour: 0 or an errno value (`made`: by us).  The fd is not
 * needed after that. */
int soft_memory_make(void);
int soft_memory_check(int fd);
int soft_memory_enter(struct soft_neighbour *neighbour, int fd, bool made);
/* What we share with ourselves. */
int soft_memory_private(struct soft_neighbour *neighbour);
void soft_memory_leave(struct soft_neighbour *neighbour);

/* neighbour.c.  Without rings yet; NULL: out of memory. */
struct soft_neighbour *soft_neighbour_create(void);
/* All its ways are gone; it is freed when nobody is busy with it any more. */
void soft_neighbour_finish(struct soft_neighbour *neighbour, int error);

#endif
