/* Which peer goes for a new one: fair_share.h. */
#include "fair_share.h"

#include <netinet/in.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

enum {
	SHARE = 8, /* a host that has more than one in so many of all loses its own first */
	SHARE_OF_FILES = 8,
	IPV6_NETWORK = 8 /* bytes; a host has all the rest (RFC 4291) */
};

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

/* ---- hosts --------------------------------------------------------------------------------- */

/* An IPv4 address, or the network of an IPv6 address, but for link-local ones and loopback. */
static size_t host_of(const struct sockaddr_storage *address, uint8_t host[16])
{
	if (address->ss_family == AF_INET) {
		memcpy(host, &((const struct sockaddr_in *)(const void *)address)->sin_addr, 4);
		return 4;
	}
	if (address->ss_family != AF_INET6)
		return 0;
	const struct in6_addr *in6 =
		&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;

	memcpy(host, in6, sizeof(*in6));
	if (IN6_IS_ADDR_V4MAPPED(in6)) {
		memmove(host, host + 12, 4);
		return 4;
	}
	return IN6_IS_ADDR_LINKLOCAL(in6) || IN6_IS_ADDR_LOOPBACK(in6) ? 16 : IPV6_NETWORK;
}

static uint64_t seed(void)
{
	static uint64_t random;

	if (!random && getrandom(&random, sizeof(random), GRND_NONBLOCK) != sizeof(random))
		random = soft_now(); /* no entropy yet, at boot */
	return random |= 1;
}

static uint16_t bucket_of(const struct sockaddr_storage *address)
{
	uint8_t host[16];
	size_t length = host_of(address, host);
	uint64_t hash = seed();

	/* Each step mixes the whole word: splitmix64's finalizer. */
	for (size_t i = 0; i < length; i++) {
		hash = (hash ^ host[i]) * UINT64_C(0xbf58476d1ce4e5b9);
		hash = (hash ^ hash >> 27) * UINT64_C(0x94d049bb133111eb);
		hash ^= hash >> 31;
	}
	return (uint16_t)(hash % SOFT_CROWD_BUCKETS);
}

/* ---- peers --------------------------------------------------------------------------------- */

void soft_crowd_add(struct soft_crowd *crowd, struct soft_stranger *stranger,
		    const struct sockaddr_storage *address)
{
	stranger->crowd = crowd;
	stranger->bucket = bucket_of(address);
	soft_list_append(&crowd->peers, &stranger->node);
	crowd->of_bucket[stranger->bucket]++;
	crowd->count++;
}

void soft_crowd_remove(struct soft_stranger *stranger)
{
	struct soft_crowd *crowd = stranger->crowd;

	if (!crowd)
		return;
	stranger->crowd = NULL;
	soft_list_remove(&stranger->node);
	crowd->of_bucket[stranger->bucket]--;
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

struct soft_stranger *soft_crowd_excess(const struct soft_crowd *crowd, unsigned limit)
{
	unsigned share = limit / SHARE ? limit / SHARE : 1;
	unsigned heaviest = 0;
	struct soft_node *node = crowd->peers.next;

	if (crowd->count <= limit)
		return NULL;
	for (unsigned i = 1; i < SOFT_CROWD_BUCKETS; i++)
		if (crowd->of_bucket[i] > crowd->of_bucket[heaviest])
			heaviest = i;
	if (crowd->of_bucket[heaviest] > share)
		while (stranger_at(node)->bucket != heaviest)
			node = node->next;
	return stranger_at(node);
}
