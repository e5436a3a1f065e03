/* Peers that have proved nothing yet, bounded in number: which of them goes for a new one.
 *
 * The oldest one of the fullest network, if that has more than its share, and in it of the fullest
 * smaller network that has more than a share, and so on; else the oldest of all: so a new one always
 * gets a place, and one network cannot keep others out.  The transport has the same rule, with a
 * choice by lot (aiordma/_transport/admission_control.py); here the first message follows at once, and so
 * many places are not taken by others in between.  Under the engine's lock.
 */
#ifndef AIORDMA_SOFTDEV_FAIR_SHARE_H
#define AIORDMA_SOFTDEV_FAIR_SHARE_H

#include <sys/socket.h>

#include "engine.h"

enum {
	SOFT_CROWD_BUCKETS = 1024,
	SOFT_CROWD_LEVELS = 3 /* nested networks of an address, largest first; the last is a host */
};

struct soft_crowd {
	struct soft_node peers; /* soft_stranger.node, oldest first */
	unsigned count;
	/* Peers by a hash of their network, so that networks need no records.  Two of them share a
	 * bucket now and then, which the outside cannot arrange: the hash has a random seed. */
	uint16_t of_bucket[SOFT_CROWD_LEVELS][SOFT_CROWD_BUCKETS];
};

struct soft_stranger {
	struct soft_node node;
	struct soft_crowd *crowd; /* NULL: in none */
	uint16_t bucket[SOFT_CROWD_LEVELS];
};

/* An empty crowd. */
void soft_crowd_init(struct soft_crowd *crowd);
/* `most`, but no more than an eighth of the descriptors that this process may have. */
unsigned soft_crowd_limit(unsigned most);
/* Takes in a peer from that address; AF_UNSPEC: of this host. */
void soft_crowd_add(struct soft_crowd *crowd, struct soft_stranger *stranger,
		    const struct sockaddr_storage *address);
/* Safe to repeat. */
void soft_crowd_remove(struct soft_stranger *stranger);
/* Call after `add`: the peer to evict, which its owner then removes, never the one added last; NULL
 * if there are no more than `limit`. */
struct soft_stranger *soft_crowd_excess(const struct soft_crowd *crowd, unsigned limit);
/* The oldest one, or NULL. */
struct soft_stranger *soft_crowd_oldest(const struct soft_crowd *crowd);

#endif
