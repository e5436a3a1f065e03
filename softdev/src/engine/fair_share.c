/* Implements admission control; see fair_share.h. */
#include "fair_share.h"

#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

enum {
	NETWORK_SHARE_DIVISOR = 8,
	DESCRIPTORS_PER_PLACE = 8,
	IPV4 = 4,
	IPV6 = 16, /* address length in bytes */
	LEVELS = SOFT_PLACES_LEVELS
};

/* Prefix lengths in bytes of the nested networks that contain an address. */
static const uint8_t ipv4_networks[LEVELS] = {3, IPV4, IPV4};
static const uint8_t ipv6_networks[LEVELS] = {6, 7, 8};
static const uint8_t host_networks[LEVELS] = {IPV6, IPV6, IPV6};
static const uint8_t unspecified[LEVELS]; /* all peers on this host share one network */

void soft_places_init(struct soft_places *places)
{
	memset(places, 0, sizeof(*places));
	soft_list_init(&places->peers);
}

unsigned soft_places_limit(unsigned max_places)
{
	struct rlimit files;

	if (!getrlimit(RLIMIT_NOFILE, &files) &&
	    files.rlim_cur / DESCRIPTORS_PER_PLACE < max_places)
		max_places = (unsigned)(files.rlim_cur / DESCRIPTORS_PER_PLACE);
	return max_places ? max_places : 1;
}

/* Copy the address to `raw`. Returns the prefix lengths of its networks. */
static const uint8_t *prefix_lengths(const struct sockaddr_storage *address, uint8_t raw[IPV6])
{
	if (address->ss_family == AF_INET) {
		memcpy(raw, &((const struct sockaddr_in *)(const void *)address)->sin_addr, IPV4);
		return ipv4_networks;
	}
	if (address->ss_family != AF_INET6)
		return unspecified;
	const struct in6_addr *in6 =
		&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;

	if (IN6_IS_ADDR_V4MAPPED(in6)) {
		memcpy(raw, in6->s6_addr + 12, IPV4);
		return ipv4_networks;
	}
	memcpy(raw, in6, sizeof(*in6));
	return IN6_IS_ADDR_LINKLOCAL(in6) || IN6_IS_ADDR_LOOPBACK(in6) ? host_networks
								       : ipv6_networks;
}

/* Mix in one byte at a time with the multiplications of splitmix64's finalizer, which spread each
 * byte over the whole word. */
uint64_t soft_hash(uint64_t *seed, const void *bytes, size_t length)
{
	uint64_t hash;

	if (!*seed &&
	    soft_device.platform->random(seed, sizeof(*seed), GRND_NONBLOCK) != sizeof(*seed))
		*seed = soft_now(); /* fallback during boot, before entropy is available */
	*seed |= 1; /* 0 means that the seed is not initialised */
	hash = *seed;
	for (size_t i = 0; i < length; i++) {
		hash = (hash ^ ((const uint8_t *)bytes)[i]) * UINT64_C(0xbf58476d1ce4e5b9);
		hash = (hash ^ hash >> 27) * UINT64_C(0x94d049bb133111eb);
		hash ^= hash >> 31;
	}
	return hash;
}

void soft_network_buckets(uint64_t *seed, const struct sockaddr_storage *address,
			  uint16_t bucket[LEVELS])
{
	uint8_t raw[IPV6] = {0};
	const uint8_t *networks = prefix_lengths(address, raw);

	for (unsigned level = 0; level < LEVELS; level++)
		bucket[level] = soft_hash(seed, raw, networks[level]) % SOFT_PLACES_BUCKETS;
}

void soft_places_add(struct soft_places *places, struct soft_place *place,
		     const struct sockaddr_storage *address)
{
	soft_network_buckets(&places->seed, address, place->bucket);
	place->places = places;
	soft_list_append(&places->peers, &place->node);
	for (unsigned level = 0; level < LEVELS; level++) {
		places->peer_counts[level][place->bucket[level]]++;
		if (level)
			places->parent_bucket[level][place->bucket[level]] =
				place->bucket[level - 1];
	}
	places->count++;
}

void soft_place_release(struct soft_place *place)
{
	struct soft_places *places = place->places;

	if (!places)
		return;
	place->places = NULL;
	soft_list_remove(&place->node);
	for (unsigned level = 0; level < LEVELS; level++)
		places->peer_counts[level][place->bucket[level]]--;
	places->count--;
}

struct soft_place *soft_places_oldest(const struct soft_places *places)
{
	return soft_list_empty(&places->peers)
		       ? NULL
		       : soft_list_first(&places->peers, struct soft_place, node);
}

static unsigned network_share(unsigned limit)
{
	return limit / NETWORK_SHARE_DIVISOR ? limit / NETWORK_SHARE_DIVISOR : 1;
}

/* Returns whether `one` is served before `other`. `other` must be the older of the two peers. */
static bool is_served_before(const struct soft_places *places, const struct soft_place *one,
			     const struct soft_place *other, unsigned share)
{
	bool crowded = false;

	for (unsigned level = 0; level < LEVELS; level++) {
		unsigned peers = places->peer_counts[level][one->bucket[level]];
		unsigned other_peers = places->peer_counts[level][other->bucket[level]];

		if (peers != other_peers && (peers > share || other_peers > share))
			return peers < other_peers;
		crowded |= peers > share;
	}
	return crowded; /* of two equally crowded peers, the newer one is served first */
}

struct soft_place *soft_places_next(const struct soft_places *places, unsigned limit)
{
	struct soft_place *next = soft_places_oldest(places);

	soft_list_each (struct soft_place, place, &places->peers, node)
		if (is_served_before(places, place, next, network_share(limit)))
			next = place;
	return next;
}

struct soft_place *soft_places_find_victim(const struct soft_places *places, unsigned limit)
{
	const struct soft_node *newest = places->peers.previous;
	uint16_t fullest[LEVELS];
	int level = 0;

	if (places->count <= limit)
		return NULL;
	for (; level < LEVELS; level++) {
		unsigned most = network_share(limit);
		bool found = false;

		for (int i = 0; i < SOFT_PLACES_BUCKETS; i++)
			if (places->peer_counts[level][i] > most &&
			    (!level || places->parent_bucket[level][i] == fullest[level - 1])) {
				most = places->peer_counts[level][i];
				fullest[level] = (uint16_t)i;
				found = true;
			}
		if (!found)
			break;
	}
	/* Different networks may share a bucket, so the newest peer may be the only one that
	 * matches at all levels. In that case, search the next larger network. The search ends at
	 * level 0, where every peer matches. */
	for (;; level--)
		soft_list_each (struct soft_place, place, &places->peers, node)
			if (&place->node != newest &&
			    !memcmp(place->bucket, fullest, (size_t)level * sizeof(fullest[0])))
				return place;
}
