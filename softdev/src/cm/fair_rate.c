/* Rate limit that is shared fairly between networks; see fair_rate.h.
 *
 * It uses the generic cell rate algorithm (ITU-T I.371), which represents the fill level of a token
 * bucket as a timestamp.
 */
#include "fair_rate.h"

enum {
	/* Average time between two units at the full rate. A unit stands for about 20 us of work,
	 * so the full rate uses about 4 % of a processor. */
	UNIT_NS = 500 * 1000,
	BURST_NS = 1024 * UNIT_NS,
	NETWORK_SHARE_DIVISOR = 8, /* a network gets an eighth of the rate */
};

/* Charge `cost_ns` to a bucket. A bucket never needs more than BURST_NS to recover. */
static void charge(uint64_t *used_until, uint64_t now, uint64_t cost_ns)
{
	const uint64_t until = (*used_until > now ? *used_until : now) + cost_ns;

	*used_until = until < now + BURST_NS ? until : now + BURST_NS;
}

/* Returns whether at least `cost_ns` of the bucket's burst remain. */
static bool has_room(uint64_t used_until, uint64_t now, uint64_t cost_ns)
{
	return used_until <= now || used_until - now <= BURST_NS - cost_ns;
}

/* Returns the cost of one unit, which is charged to the network's share. The cost doubles when
 * less than a quarter of the total burst remains, and again each time the remaining burst
 * halves. Each network then gets a smaller share, so more networks can be active before the
 * burst is exhausted. */
static uint64_t network_cost(uint64_t used_until, uint64_t now)
{
	uint64_t cost_ns = NETWORK_SHARE_DIVISOR * UNIT_NS;

	for (uint64_t remaining_ns = BURST_NS / 4;
	     cost_ns < BURST_NS / 2 && !has_room(used_until, now, remaining_ns); remaining_ns /= 2)
		cost_ns *= 2;
	return cost_ns;
}

bool soft_fair_rate_use(struct soft_fair_rate *rate, const struct sockaddr_storage *address)
{
	const uint64_t now = soft_now();
	const uint64_t cost_ns = network_cost(rate->used_until, now);
	uint16_t networks[SOFT_PLACES_LEVELS];

	soft_assert_locked();
	if (!has_room(rate->used_until, now, UNIT_NS))
		return false;
	soft_network_buckets(&rate->seed, address, networks);
	/* Limit each network to its share once more than half of the total burst is used. */
	if (!has_room(rate->used_until, now, BURST_NS / 2))
		for (unsigned level = 0; level < SOFT_PLACES_LEVELS; level++)
			if (!has_room(rate->network_used_until[level][networks[level]], now,
				      cost_ns))
				return false;
	charge(&rate->used_until, now, UNIT_NS);
	for (unsigned level = 0; level < SOFT_PLACES_LEVELS; level++)
		charge(&rate->network_used_until[level][networks[level]], now, cost_ns);
	return true;
}
