/* Frames that refer to their payload instead of carrying it; cma.h has what is behind that.
 *
 * SENDs, WRITEs and answers to READs of RC queue pairs of one host refer to what is long, where the
 * kernel allows the other side to copy it.  Everything is checked as for any other frame, on both
 * sides; what is taken back meanwhile is refused as if it had been found out before: IBTA 10.7.2.2, a
 * local protection error of the request whose memory it was, and 9.7.4.1.5, a remote access error of a
 * READ. */
#ifndef AIORDMA_SOFT_REFERENCE_H
#define AIORDMA_SOFT_REFERENCE_H

#include "link.h"

struct soft_neighbour;

/* The memory shared with a neighbour is there; or is going. */
void soft_references_meet(struct soft_neighbour *neighbour);
void soft_references_part(struct soft_neighbour *neighbour);
/* A link to it is up, so it has been there as well: what can be copied is found out. */
void soft_references_probe(struct soft_neighbour *neighbour);

/* Bytes that are worth it, to another process. */
extern uint32_t soft_reference_least;
extern uint64_t soft_references_given; /* so far, by all */

/* Bytes that the link's next frame may refer to, if there are as many as `least`; 0: it cannot. */
uint32_t soft_reference_most(const struct soft_link *link, uint32_t *least);
/* The frame refers to these pieces, which are all of its payload: the reference, `at` which there are
 * SOFT_REFERENCE_MOST bytes of room.  False: not this time. */
bool soft_reference_give(struct soft_link *link, struct soft_outgoing *out,
			 const struct iovec *pieces, int count, uint8_t *at);
/* The payload of link->frame is where this says; `bytes` may change meanwhile.  False: nonsense.
 * Frames that come together (link->referred is zero for the first) refer to less than twice
 * SOFT_REFERENCE_MAX, so that nobody keeps the lock for long. */
bool soft_reference_take(struct soft_link *link, const uint8_t *bytes);

/* The link is gone. */
void soft_references_forget(const struct soft_link *link);

#endif
