/* Admission control: places for peers that have proved nothing yet, and who loses one.
 *
 *   places      of a kind there are `limit`, and no more than an eighth of the descriptors that the
 *               process may have; a new peer always gets one
 *   host share  an eighth of them, of each network: of IPv6 the /48 (what a provider assigns to one
 *               customer, RFC 6177), /56 and /64 (of a host, which has all the rest, RFC 4291), of
 *               IPv4 the /24 and the address; a link-local or loopback address of IPv6 is alone,
 *               because its network is the same for all of them
 *   eviction    of the oldest one of the fullest network that has more than its share, and in it of
 *               the fullest smaller one that has more than a share, and so on; else of the oldest of
 *               all: so one network cannot keep others out
 *
 * The transport has the same rules (aiordma/_transport/admission_control.py), but evicts by lot; here
 * the first message follows at once, and so many places are not taken by others in between.  Under
 * the engine's lock.
 */
#pragma once

#include <sys/socket.h>

#include "engine.h"

enum {
	SOFT_PLACES_BUCKETS = 1024,
	SOFT_PLACES_LEVELS =
		3 /* nested networks of an address, largest first; the last is a host */
};

/* Of what peers choose: they cannot find out what has the same hash.  *seed becomes random; 0: it is not yet. */
uint64_t soft_hash(uint64_t *seed, const void *bytes, size_t length);

/* Fill in the buckets of the networks that contain `address`, largest first, as a table with
 * SOFT_PLACES_BUCKETS buckets for each level has them.  `seed` is that of soft_hash. */
void soft_networks(uint64_t *seed, const struct sockaddr_storage *address,
		   uint16_t bucket[SOFT_PLACES_LEVELS]);

struct soft_places {
	struct soft_node peers; /* soft_place.node, oldest first */
	unsigned count;
	uint64_t seed; /* of soft_hash */
	/* Peers by a hash of their network, so that networks need no records.  Two of them share a
	 * bucket now and then, which the outside cannot arrange: the hash has a random seed. */
	uint16_t of_bucket[SOFT_PLACES_LEVELS][SOFT_PLACES_BUCKETS];
	uint16_t larger[SOFT_PLACES_LEVELS]
		       [SOFT_PLACES_BUCKETS]; /* the bucket of the network around it */
};

struct soft_place {
	struct soft_node node;
	struct soft_places *places; /* NULL: it has none */
	uint16_t bucket[SOFT_PLACES_LEVELS];
};

void soft_places_init(struct soft_places *places);
/* `most`, or the eighth of the descriptors. */
unsigned soft_places_limit(unsigned most);
/* For a peer from that address; AF_UNSPEC: of this host. */
void soft_places_add(struct soft_places *places, struct soft_place *place,
		     const struct sockaddr_storage *address);
/* Safe to repeat. */
void soft_place_release(struct soft_place *place);
/* After `add`: the peer to be evicted, whose owner then releases the place, never the one added last;
 * NULL if there are no more than `limit`. */
struct soft_place *soft_places_evicted(const struct soft_places *places, unsigned limit);
/* The one to be served next, or NULL: the oldest one of those whose networks have no more than their share; if
 * there is none, of the emptiest network, and in it of its emptiest smaller one, and so on, the newest one,
 * since the oldest have been given up, or soon lose their places. */
struct soft_place *soft_places_next(const struct soft_places *places, unsigned limit);
/* The oldest one, or NULL. */
struct soft_place *soft_places_oldest(const struct soft_places *places);
