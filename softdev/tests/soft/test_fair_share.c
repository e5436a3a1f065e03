/* Test which unverified peer is evicted for a new one (engine/fair_share.h). */
#include "cm_check.h"
#include "engine/engine.h"

#include <arpa/inet.h>
#include <sys/resource.h>

enum {
	LIMIT = 16, /* a network's share is 2 */
	HOSTS = LIMIT + 9,
	FLOOD = 40
};

static struct soft_places places;
static struct soft_place peers[64];
static int used;

/* Remove all peers. The hash seed stays the same, so known bucket collisions remain valid. */
static void begin(void)
{
	uint64_t seed = places.seed;

	soft_places_init(&places);
	places.seed = seed;
	used = 0;
}

static void add_peer(const char *host)
{
	struct sockaddr_storage address = {.ss_family = strchr(host, ':') ? AF_INET6 : AF_INET};
	void *raw = address.ss_family == AF_INET
			    ? (void *)&((struct sockaddr_in *)&address)->sin_addr
			    : (void *)&((struct sockaddr_in6 *)&address)->sin6_addr;

	CHECK_EQUAL(inet_pton(address.ss_family, host, raw), 1);
	soft_places_add(&places, &peers[used++], &address);
}

static void add_peer_from(const char *format, int number)
{
	char host[64];

	snprintf(host, sizeof(host), format, number);
	add_peer(host);
}

/* Evict a peer and release its place. Returns its index in `peers`, or -1 if no peer is evicted. */
static int evict_peer(void)
{
	struct soft_place *place = soft_places_find_victim(&places, LIMIT);

	if (!place)
		return -1;
	soft_place_release(place);
	return (int)(place - peers);
}

/* Returns whether the peers share a bucket on any level from `first` to `last`. */
static bool share_bucket(const struct soft_place *one, const struct soft_place *other, int first,
			 int last)
{
	for (int level = first; level <= last; level++)
		if (one->bucket[level] == other->bucket[level])
			return true;
	return false;
}

/* Hosts in different networks that share no bucket. They are found at run time, because the hash
 * has a random seed. */
static char hosts[HOSTS][32];

static void find_hosts(void)
{
	struct soft_place found[HOSTS];

	for (int count = 0, tried = 0; count < HOSTS; tried++) {
		bool fresh = true;

		snprintf(hosts[count], sizeof(hosts[0]), "10.%d.%d.1", tried / 200, tried % 200);
		begin();
		add_peer(hosts[count]);
		for (int i = 0; i < count; i++)
			fresh = fresh && !share_bucket(&found[i], &peers[0], 0, 2);
		if (fresh)
			found[count++] = peers[0];
	}
}

static void oldest_peer_is_evicted_at_the_limit(void)
{
	begin();
	for (int i = 0; i < LIMIT + 2; i++) {
		add_peer(hosts[i]);
		CHECK_EQUAL(evict_peer(), i < LIMIT ? -1 : i - LIMIT);
	}
	CHECK(soft_places_oldest(&places) == &peers[2]);
}

static void oldest_peer_of_the_fullest_host_is_evicted(void)
{
	static const int comes[] = {11 /* a new host */, 20 /* the fullest host */, 0};

	begin();
	for (int i = 0; i < LIMIT; i++)
		add_peer(hosts[i < 10 ? i : 20]);
	for (int i = 0; i < 3; i++) {
		add_peer(hosts[comes[i]]);
		CHECK_EQUAL(evict_peer(), 10 + i);
	}
}

/* Returns whether `host` shares no bucket with FLOOD hosts, whose addresses are made from
 * `format`. */
static bool shares_no_bucket_with(const char *host, const char *format)
{
	begin();
	add_peer(host);
	for (int i = 0; i < FLOOD; i++) {
		add_peer_from(format, i);
		if (share_bucket(&peers[0], &peers[1 + i], 0, 2))
			return false;
	}
	return true;
}

static void flood_from_a_network_evicts_only_its_own_peers(const char *format)
{
	const char *before[2];

	for (int i = 0, found = 0; found < 2; i++) {
		CHECK(i < HOSTS);
		if (shares_no_bucket_with(hosts[i], format))
			before[found++] = hosts[i];
	}
	begin();
	add_peer(before[0]);
	add_peer(before[1]);
	for (int i = 0; i < FLOOD; i++) {
		add_peer_from(format, i);
		CHECK_EQUAL(evict_peer() < 0, i < LIMIT - 2);
	}
	CHECK(peers[0].places && peers[1].places);
}

/* Check that the newest peer is never evicted, because the caller that has just added it still uses
 * it. In this test, its network is the fullest, and it also shares a bucket with another network's
 * host, which exceeds its share. */
static void newest_peer_is_never_evicted(void)
{
	char host[32];

	for (int tried = 0; tried < 1 << 16; tried++) {
		snprintf(host, sizeof(host), "10.%d.%d.1", tried >> 8, tried & 255);
		begin();
		add_peer("192.0.2.1");
		add_peer(host);
		if (share_bucket(&peers[0], &peers[1], 2, 2) &&
		    !share_bucket(&peers[0], &peers[1], 0, 0))
			break;
	}
	begin();
	for (int i = 0; i < 4; i++)
		add_peer(host);
	for (int i = LIMIT; i > 4; i--)
		add_peer_from("192.0.2.%d", i);
	add_peer("192.0.2.1");
	int gone = evict_peer();

	CHECK(gone >= 0 && gone < LIMIT);
}

/* Returns how many of 99 pairs of addresses share a bucket on the last level. A few pairs may do so
 * by chance. */
static int count_sharing_network_bucket(const char *format)
{
	int count = 0;

	for (int i = 1; i < 100; i++) {
		begin();
		add_peer_from(format, i);
		add_peer_from(format, 100 + i);
		count += share_bucket(&peers[0], &peers[1], 2, 2);
	}
	return count;
}

static void addresses_are_grouped_by_network_prefix(void)
{
	static const struct {
		const char *one, *other;
		int level;
	} alike[] = {
		{"192.0.2.1", "::ffff:192.0.2.1", 2},
		{"192.0.2.1", "192.0.2.99", 0},
		{"2001:db8:1::1", "2001:db8:1:ffff::1", 0},
		{"2001:db8:1::1", "2001:db8:1:ff::1", 1},
	};

	CHECK_EQUAL(count_sharing_network_bucket("2001:db8:1:2::%d"), 99);
	CHECK(count_sharing_network_bucket("2001:db8:1:%d::1") < 10);
	CHECK(count_sharing_network_bucket("fe80::%d") < 10);
	CHECK(count_sharing_network_bucket("192.0.2.%d") < 10);
	FOR_EACH (i, alike) {
		begin();
		add_peer(alike[i].one);
		add_peer(alike[i].other);
		CHECK(share_bucket(&peers[0], &peers[1], alike[i].level, alike[i].level));
	}
}

static void expect_next(int number)
{
	CHECK_EQUAL(soft_places_next(&places, LIMIT) - peers, number);
}

/* Check that the oldest peer whose networks do not exceed their share is served first. If all peers
 * exceed it, the newest peer of the emptiest network is served. */
static void oldest_peer_within_its_share_is_served_first(void)
{
	char alike[64];
	int last = 1;

	begin();
	CHECK(!soft_places_next(&places, LIMIT));
	for (int i = 0; i < 2; i++) {
		add_peer(hosts[0]);
		add_peer(hosts[1]);
	}
	expect_next(0);
	add_peer(hosts[0]);
	expect_next(1);
	soft_place_release(&peers[1]);
	soft_place_release(&peers[3]);
	expect_next(4);
	soft_place_release(&peers[2]);
	expect_next(0);
	add_peer(hosts[0]);
	expect_next(5);
	do { /* find another host of its network */
		CHECK(++last < 255);
		snprintf(alike, sizeof(alike), "%.*s%d", (int)strlen(hosts[0]) - 1, hosts[0], last);
		add_peer(alike);
		soft_place_release(&peers[--used]);
	} while (share_bucket(&peers[0], &peers[used], 1, 2));
	add_peer(alike);
	expect_next(used - 1);
	add_peer(hosts[1]);
	expect_next(used - 1);
}

static void releasing_a_place_twice_is_harmless(void)
{
	begin();
	add_peer("192.0.2.1");
	soft_place_release(&peers[0]);
	soft_place_release(&peers[0]);
	CHECK_EQUAL(places.count, 0);
	CHECK(!soft_places_oldest(&places));
}

static void limit_is_an_eighth_of_the_descriptors(void)
{
	struct rlimit files, low;

	CHECK_OK(getrlimit(RLIMIT_NOFILE, &files));
	low = files;
	low.rlim_cur = 80;
	CHECK_OK(setrlimit(RLIMIT_NOFILE, &low));
	CHECK_EQUAL(soft_places_limit(256), 10);
	CHECK_EQUAL(soft_places_limit(5), 5);
	CHECK_OK(setrlimit(RLIMIT_NOFILE, &files));
}

int main(void)
{
	STEP(find_hosts());
	STEP(oldest_peer_is_evicted_at_the_limit());
	STEP(oldest_peer_of_the_fullest_host_is_evicted());
	STEP(flood_from_a_network_evicts_only_its_own_peers("192.0.2.%d"));
	STEP(flood_from_a_network_evicts_only_its_own_peers("2001:db8:1:2::%d"));
	STEP(flood_from_a_network_evicts_only_its_own_peers("2001:db8:1:%d::1"));
	STEP(flood_from_a_network_evicts_only_its_own_peers("2001:db8:1:%d00::1"));
	STEP(newest_peer_is_never_evicted());
	STEP(addresses_are_grouped_by_network_prefix());
	STEP(oldest_peer_within_its_share_is_served_first());
	STEP(releasing_a_place_twice_is_harmless());
	STEP(limit_is_an_eighth_of_the_descriptors());
	return 0;
}
