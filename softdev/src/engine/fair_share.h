/* Admission control: limits the number of places for unverified peers, and selects the peer to
 * evict. Called under the engine's lock.
 *
 *   places      each kind of place has its own `limit`, which is at most an eighth of the process's
 *               descriptor limit. A new peer always gets a place.
 *   host share  an eighth of the places per network. IPv6 networks are the /48 (which a provider
 *               assigns to one customer, RFC 6177), the /56 and the /64 (which a single host
 *               controls, RFC 4291). IPv4 networks are the /24 and the address. Link-local and
 *               loopback addresses of IPv6 count individually, because they all share one network.
 *   eviction    evicts the oldest peer of the fullest network that exceeds its share. If smaller
 *               networks within it also exceed their share, the peer is chosen from the fullest
 *               of these, down to the smallest level. If no network exceeds its share, evicts the
 *               oldest of all peers. One network therefore cannot keep others out.
 *
 * The transport applies the same rules (aiordma/_transport/admission_control.py), but evicts at
 * random. Random eviction is not needed here, because a peer's first message follows before others
 * can take that many places.
 */
#pragma once

#include <sys/socket.h>

#include "engine.h"

enum {
	SOFT_PLACES_BUCKETS = 1024,
	SOFT_PLACES_LEVELS = 3 /* nested networks, largest first */
};

/* Hash data chosen by peers. The seed is random, so peers cannot construct collisions. Initialises
 * `*seed` if it is 0. */
uint64_t soft_hash(uint64_t *seed, const void *bytes, size_t length);

/* Compute the buckets of the networks that contain `address`, largest network first, in a table
 * with SOFT_PLACES_BUCKETS buckets per level. `seed` is passed to soft_hash. */
void soft_network_buckets(uint64_t *seed, const struct sockaddr_storage *address,
			  uint16_t bucket[SOFT_PLACES_LEVELS]);

struct soft_places {
	struct soft_node peers; /* soft_place.node, oldest first */
	unsigned count;
	uint64_t seed; /* for soft_hash */
	/* Number of peers in each bucket. Networks are hashed into buckets, so no network needs a
	 * record. Two networks may share a bucket, but peers cannot cause this on purpose, because
	 * the seed of the hash is random. */
	uint16_t peer_counts[SOFT_PLACES_LEVELS][SOFT_PLACES_BUCKETS];
	/* Bucket of the next larger network that contains a bucket's network. */
	uint16_t parent_bucket[SOFT_PLACES_LEVELS][SOFT_PLACES_BUCKETS];
};

struct soft_place {
	struct soft_node node;
	struct soft_places *places; /* NULL if it holds no place */
	uint16_t bucket[SOFT_PLACES_LEVELS];
};

void soft_places_init(struct soft_places *places);
/* Returns `max_places`, or an eighth of the descriptor limit if that is less, but at least 1. */
unsigned soft_places_limit(unsigned max_places);
/* Give a new peer a place, and count the peer in the buckets of the networks that contain its
 * address. AF_UNSPEC stands for a peer on this host. */
void soft_places_add(struct soft_places *places, struct soft_place *place,
		     const struct sockaddr_storage *address);
/* Release the place. Safe to repeat. */
void soft_place_release(struct soft_place *place);
/* Returns the peer to evict after soft_places_add, or NULL if there are at most `limit` peers. The
 * peer added last is never evicted. The caller must release the place of the evicted peer. */
struct soft_place *soft_places_find_victim(const struct soft_places *places, unsigned limit);
/* Returns the peer to serve next, or NULL if there are no peers. This is the oldest peer whose
 * networks do not exceed their share. If all peers exceed it, this is the newest peer of the
 * emptiest network. Within that network, it is the newest peer of the emptiest smaller network,
 * down to the smallest level. The newest peer is chosen because the oldest ones have given up or
 * will soon lose their places. */
struct soft_place *soft_places_next(const struct soft_places *places, unsigned limit);
/* Returns the oldest peer, or NULL. */
struct soft_place *soft_places_oldest(const struct soft_places *places);
