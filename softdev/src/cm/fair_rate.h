/* Rate limit for messages from unauthenticated hosts.
 *
 *   rate   2,000 units per second in total, and bursts of up to 1,024 units after a pause
 *   share  an eighth of both for each network (engine/fair_share.h). It applies only while less
 *          than half of the 1,024 units remain, so a single network can use the whole rate but
 *          cannot exhaust it. The share shrinks with what remains, for the benefit of networks
 *          that have not used anything yet.
 *
 * Called under the engine's lock.
 */
#pragma once

#include "engine/engine.h"

/* Each time says when the rate, or the network's share of it, will have made up for the units used
 * so far. */
struct soft_fair_rate {
	uint64_t seed; /* for soft_hash */
	uint64_t used_until;
	uint64_t network_used_until[SOFT_PLACES_LEVELS][SOFT_PLACES_BUCKETS];
};

/* Use one unit for a peer from `address`. Returns false if none is left for it. */
bool soft_fair_rate_use(struct soft_fair_rate *rate, const struct sockaddr_storage *address);
