/* Neighbours: the other processes of this host that have the device, and this process itself.
 *
 * Two processes of one user meet once (attach.c) and from then on share two rings (ring.h).  All
 * links between them are ways through these rings: a way has no file descriptor, only a number at
 * each end, so that queue pairs cost memory and nothing else.  A way carries records: blocks of
 * bytes that arrive whole, in order, or not at all.
 *
 * What comes from a neighbour is not trusted: whoever writes nonsense loses all its ways, and nobody
 * else does.  Everything here is under the engine's lock.
 */
#ifndef AIORDMA_SOFT_NEIGHBOUR_H
#define AIORDMA_SOFT_NEIGHBOUR_H

#include <sys/types.h>

#include "engine/engine.h"
#include "objects/frame.h"

struct iovec;
struct soft_neighbour;
struct soft_way;

/* What a way tells its owner.  Each of them may end this way or others, and free its owner. */
struct soft_way_calls {
	/* The other side has accepted what soft_way_open asked for. */
	void (*accepted)(struct soft_way *way, const uint8_t greeting[SOFT_GREETING]);
	/* One record, as it was written; memory that the other side can change meanwhile. */
	void (*data)(struct soft_way *way, const uint8_t *bytes, size_t length);
	/* There was no room, and now there is.  Ways that wait are called in turns. */
	void (*writable)(struct soft_way *way);
	/* The way is no more; do not end it.  0: the other side has ended or refused it.  ECONNRESET:
	 * its process is gone.  ECONNREFUSED: it would not meet us.  EPROTO: it wrote nonsense.
	 * ENOMEM: we could not keep what was to be said. */
	void (*gone)(struct soft_way *way, int error);
};

/* One end of a link's way; zeroed, with nothing but `calls` set, it is one that is not open. */
struct soft_way {
	const struct soft_way_calls *calls;
	struct soft_neighbour *neighbour; /* NULL: not open */
	uint32_t id;                      /* ours */
	uint32_t peer;                    /* theirs; 0 until accepted */
	struct soft_node node;            /* of the neighbour's ways */
	struct soft_node waiting;         /* for room */
	size_t least;                     /* that is of use to it */
	uint32_t round;                   /* in which it began to wait */
};

/* Whoever has that LID in this network namespace, or is being met there; ourselves for our own LID.
 * NULL: nobody is there, or it is not of our user, or has no shared memory: there is only TCP. */
struct soft_neighbour *soft_neighbour_at(uint16_t lid);
bool soft_neighbour_is_self(const struct soft_neighbour *neighbour);
/* 0: not known, because it lives in another process namespace. */
pid_t soft_neighbour_pid(const struct soft_neighbour *neighbour);

/* SOFT_NEIGHBOUR_AREA bytes that both can write, for what is agreed upon beside the rings: by
 * convention we write to our own and read theirs.  Of ourselves, both are the same.  The first
 * bytes of it are zero at the beginning.  NULL in the middle of meeting. */
enum {
	SOFT_NEIGHBOUR_AREA = 8192
};
void *soft_neighbour_own_area(struct soft_neighbour *neighbour);
void *soft_neighbour_their_area(struct soft_neighbour *neighbour);

/* Ask the other side for a way.  `accepted` or `gone` follows, never at once.  0 or an errno value,
 * and then it is not open. */
int soft_way_open(struct soft_way *way, struct soft_neighbour *neighbour,
		  const uint8_t greeting[SOFT_GREETING]);

/* A way that begins and ends here, open at once.  0 or an errno value. */
int soft_way_to_self(struct soft_way *way);

/* handshake.c.  A neighbour asks for a way, under its number `peer`: answer with soft_way_accept or
 * soft_neighbour_refuse, now or later.  If the neighbour goes, or takes back what it asked for,
 * before that: soft_greeting_uncalled (for a peer of 0, everything from that neighbour). */
void soft_greeting_called(struct soft_neighbour *neighbour, uint32_t peer,
			  const uint8_t greeting[SOFT_GREETING]);
void soft_greeting_uncalled(struct soft_neighbour *neighbour, uint32_t peer);
/* 0 or an errno value, and then the other side has been refused. */
int soft_way_accept(struct soft_way *way, struct soft_neighbour *neighbour, uint32_t peer,
		    const uint8_t greeting[SOFT_GREETING]);
void soft_neighbour_refuse(struct soft_neighbour *neighbour, uint32_t peer);

/* Bytes that one record may carry now; 0: less than `least`, and `writable` will be called (or
 * `accepted`, before which there is no room).  `least` is at most SOFT_WAY_LEAST. */
enum {
	SOFT_WAY_LEAST = 64 * 1024
};
size_t soft_way_room(struct soft_way *way, size_t least);
/* There is room, but it is for others to use it first: `writable` will be called in another step.
 * Nothing when it will be called anyway. */
void soft_way_wait(struct soft_way *way);
/* One record, copied.  At least 1 byte, at most what soft_way_room has just said. */
void soft_way_write(struct soft_way *way, const struct iovec *iov, int count, size_t bytes);
/* Say the end, after all that was written, and forget the way.  Safe to repeat. */
void soft_way_end(struct soft_way *way);

#endif
