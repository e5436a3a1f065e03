/* Rate limit for messages from unauthenticated hosts. Called under the engine's lock.
 *
 *   rate   2,000 units per second in total, with bursts of up to 1,024 units after idle time
 *   share  an eighth of the rate and of the burst for each network (engine/fair_share.h). The share
 *          applies only while less than half of the burst remains. A single network can therefore
 *          use the whole rate but cannot exhaust the burst. The share shrinks with the remaining
 *          burst, which leaves the rest to networks that have not used anything yet.
 */
#pragma once

#include "engine/engine.h"

/* `used_until` is the time at which the total rate has fully recovered, and `network_used_until`
 * contains the same time for each network's share. */
struct soft_fair_rate {
	uint64_t seed; /* for soft_hash */
	uint64_t used_until;
	uint64_t network_used_until[SOFT_PLACES_LEVELS][SOFT_PLACES_BUCKETS];
};

/* Use one unit on behalf of a peer at `address`. Returns false if the total rate or the share of
 * the peer's network is used up. */
bool soft_fair_rate_use(struct soft_fair_rate *rate, const struct sockaddr_storage *address);
