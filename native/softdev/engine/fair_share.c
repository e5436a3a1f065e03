/* Which peer goes for a new one: fair_share.h. */
#include "fair_share.h"

#include <netinet/in.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

enum {
	SHARE = 8, /* a network that has more than one in so many of all loses its own first */
	SHARE_OF_FILES = 8,
	IPV4 = 4,
	IPV6 = 16, /* bytes */
	LEVELS = SOFT_CROWD_LEVELS
};

/* Bytes of the networks: of IPv6 what a provider assigns to one customer (RFC 6177), and the network
 * of a host, which has all the rest (RFC 4291). */
static const uint8_t ipv4_networks[LEVELS] = {3, IPV4, IPV4};
static const uint8_t ipv6_networks[LEVELS] = {6, 7, 8};
static const uint8_t alone[LEVELS] = {IPV6, IPV6, IPV6};
static const uint8_t unknown[LEVELS];

void soft_crowd_init(struct soft_crowd *crowd)
{
	memset(crowd, 0, sizeof(*crowd));
	soft_list_init(&crowd->peers);
}

unsigned soft_crowd_limit(unsigned most)
{
	struct rlimit files;

	if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur / SHARE_OF_FILES < most)
		most = (unsigned)(files.rlim_cur / SHARE_OF_FILES);
	return most ? most : 1;
}

/* ---- networks ------------------------------------------------------------------------------ */

/* The lengths of the networks that the address is in.  A link-local or loopback address of IPv6 is
 * alone: its network is the same for all of them. */
static const uint8_t *networks_of(const struct sockaddr_storage *address, uint8_t raw[IPV6])
{
	if (address->ss_family == AF_INET) {
		memcpy(raw, &((const struct sockaddr_in *)(const void *)address)->sin_addr, IPV4);
		return ipv4_networks;
	}
	if (address->ss_family != AF_INET6)
		return unknown;
	const struct in6_addr *in6 =
		&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;

	memcpy(raw, in6, sizeof(*in6));
	if (IN6_IS_ADDR_V4MAPPED(in6)) {
		memmove(raw, raw + 12, IPV4);
		return ipv4_networks;
	}
	return IN6_IS_ADDR_LINKLOCAL(in6) || IN6_IS_ADDR_LOOPBACK(in6) ? alone : ipv6_networks;
}

static uint64_t seed(void)
{
	static uint64_t random;

	if (!random && getrandom(&random, sizeof(random), GRND_NONBLOCK) != sizeof(random))
		random = soft_now(); /* no entropy yet, at boot */
	return random |= 1;
}

static uint16_t bucket_of(const uint8_t *network, size_t length)
{
	uint64_t hash = seed();

	/* Each step mixes the whole word: splitmix64's finalizer. */
	for (size_t i = 0; i < length; i++) {
		hash = (hash ^ network[i]) * UINT64_C(0xbf58476d1ce4e5b9);
		hash = (hash ^ hash >> 27) * UINT64_C(0x94d049bb133111eb);
		hash ^= hash >> 31;
	}
	return (uint16_t)(hash % SOFT_CROWD_BUCKETS);
}

/* ---- peers --------------------------------------------------------------------------------- */

void soft_crowd_add(struct soft_crowd *crowd, struct soft_stranger *stranger,
		    const struct sockaddr_storage *address)
{
	uint8_t raw[IPV6] = {0};
	const uint8_t *networks = networks_of(address, raw);

	stranger->crowd = crowd;
	soft_list_append(&crowd->peers, &stranger->node);
	for (unsigned level = 0; level < LEVELS; level++) {
		stranger->bucket[level] = bucket_of(raw, networks[level]);
		crowd->of_bucket[level][stranger->bucket[level]]++;
	}
	crowd->count++;
}

void soft_crowd_remove(struct soft_stranger *stranger)
{
	struct soft_crowd *crowd = stranger->crowd;

	if (!crowd)
		return;
	stranger->crowd = NULL;
	soft_list_remove(&stranger->node);
	for (unsigned level = 0; level < LEVELS; level++)
		crowd->of_bucket[level][stranger->bucket[level]]--;
	crowd->count--;
}

static struct soft_stranger *stranger_at(struct soft_node *node)
{
	return soft_list_entry(node, struct soft_stranger, node);
}

struct soft_stranger *soft_crowd_oldest(const struct soft_crowd *crowd)
{
	return soft_list_empty(&crowd->peers) ? NULL : stranger_at(crowd->peers.next);
}

/* Whether it is in the same networks as the other, down to the last level before `level`. */
static bool is_beside(const struct soft_stranger *one, const struct soft_stranger *other,
		      unsigned level)
{
	return !memcmp(one->bucket, other->bucket, level * sizeof(one->bucket[0]));
}

struct soft_stranger *soft_crowd_excess(const struct soft_crowd *crowd, unsigned limit)
{
	unsigned share = limit / SHARE ? limit / SHARE : 1;
	struct soft_stranger *goes = soft_crowd_oldest(crowd);

	if (crowd->count <= limit)
		return NULL;
	for (unsigned level = 0; level < LEVELS; level++) {
		struct soft_stranger *fullest = NULL;
		unsigned most = share;

		for (struct soft_node *node = crowd->peers.next; node != &crowd->peers;
		     node = node->next) {
			struct soft_stranger *peer = stranger_at(node);
			unsigned count = crowd->of_bucket[level][peer->bucket[level]];

			if (count > most && is_beside(peer, goes, level)) {
				most = count;
				fullest = peer;
			}
		}
		if (!fullest)
			break;
		goes = fullest;
	}
	return goes;
}
