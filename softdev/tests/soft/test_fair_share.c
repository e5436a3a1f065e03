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

static void come(const char *host)
{
	struct sockaddr_storage address = {.ss_family = strchr(host, ':') ? AF_INET6 : AF_INET};
	void *raw = address.ss_family == AF_INET
			    ? (void *)&((struct sockaddr_in *)&address)->sin_addr
			    : (void *)&((struct sockaddr_in6 *)&address)->sin6_addr;

	CHECK_EQUAL(inet_pton(address.ss_family, host, raw), 1);
	soft_places_add(&places, &peers[used++], &address);
}

static void come_from(const char *format, int number)
{
	char host[64];

	snprintf(host, sizeof(host), format, number);
	come(host);
}

/* Evict a peer and release its place. Returns its index in `peers`, or -1 if no peer is evicted. */
static int evicted(void)
{
	struct soft_place *place = soft_places_evicted(&places, LIMIT);

	if (!place)
		return -1;
	soft_place_release(place);
	return (int)(place - peers);
}

/* Returns whether the two peers share a bucket on one of the levels. */
static bool meet(const struct soft_place *one, const struct soft_place *other, int first, int last)
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
		come(hosts[count]);
		for (int i = 0; i < count; i++)
			fresh = fresh && !meet(&found[i], &peers[0], 0, 2);
		if (fresh)
			found[count++] = peers[0];
	}
}

static void oldest_of_all(void)
{
	begin();
	for (int i = 0; i < LIMIT + 2; i++) {
		come(hosts[i]);
		CHECK_EQUAL(evicted(), i < LIMIT ? -1 : i - LIMIT);
	}
	CHECK(soft_places_oldest(&places) == &peers[2]);
}

static void oldest_of_the_fullest(void)
{
	static const int comes[] = {11 /* a new host */, 20 /* the fullest host */, 0};

	begin();
	for (int i = 0; i < LIMIT; i++)
		come(hosts[i < 10 ? i : 20]);
	for (int i = 0; i < 3; i++) {
		come(hosts[comes[i]]);
		CHECK_EQUAL(evicted(), 10 + i);
	}
}

/* Returns whether a host shares no bucket with the hosts of a flood. */
static bool is_apart_from(const char *host, const char *format)
{
	begin();
	come(host);
	for (int i = 0; i < FLOOD; i++) {
		come_from(format, i);
		if (meet(&peers[0], &peers[1 + i], 0, 2))
			return false;
	}
	return true;
}

/* Check that a flood from one network evicts only peers of this network. */
static void a_network(const char *format)
{
	const char *before[2];

	for (int i = 0, found = 0; found < 2; i++) {
		CHECK(i < HOSTS);
		if (is_apart_from(hosts[i], format))
			before[found++] = hosts[i];
	}
	begin();
	come(before[0]);
	come(before[1]);
	for (int i = 0; i < FLOOD; i++) {
		come_from(format, i);
		CHECK_EQUAL(evicted() < 0, i < LIMIT - 2);
	}
	CHECK(peers[0].places && peers[1].places);
}

/* Check that the newest peer is never evicted, because the caller that has just added it still uses
 * it. Here it belongs to the fullest network, and shares a bucket with a host elsewhere that
 * exceeds its share. */
static void never_the_newest(void)
{
	char host[32];

	for (int tried = 0; tried < 1 << 16; tried++) {
		snprintf(host, sizeof(host), "10.%d.%d.1", tried >> 8, tried & 255);
		begin();
		come("192.0.2.1");
		come(host);
		if (meet(&peers[0], &peers[1], 2, 2) && !meet(&peers[0], &peers[1], 0, 0))
			break;
	}
	begin();
	for (int i = 0; i < 4; i++)
		come(host);
	for (int i = LIMIT; i > 4; i--)
		come_from("192.0.2.%d", i);
	come("192.0.2.1");
	int gone = evicted();

	CHECK(gone >= 0 && gone < LIMIT);
}

/* Returns how many of 99 pairs of addresses share a bucket on the last level. A few pairs may do so
 * by chance. */
static int in_one_network(const char *format)
{
	int count = 0;

	for (int i = 1; i < 100; i++) {
		begin();
		come_from(format, i);
		come_from(format, 100 + i);
		count += meet(&peers[0], &peers[1], 2, 2);
	}
	return count;
}

static void what_a_network_is(void)
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

	CHECK_EQUAL(in_one_network("2001:db8:1:2::%d"), 99);
	CHECK(in_one_network("2001:db8:1:%d::1") < 10);
	CHECK(in_one_network("fe80::%d") < 10);
	CHECK(in_one_network("192.0.2.%d") < 10);
	FOR_EACH (i, alike) {
		begin();
		come(alike[i].one);
		come(alike[i].other);
		CHECK(meet(&peers[0], &peers[1], alike[i].level, alike[i].level));
	}
}

static void is_next(int number)
{
	CHECK_EQUAL(soft_places_next(&places, LIMIT) - peers, number);
}

/* Check that the oldest peer whose networks do not exceed their share is served first. If all peers
 * exceed it, the newest peer of the emptiest network is served. */
static void served_next(void)
{
	char alike[64];
	int last = 1;

	begin();
	CHECK(!soft_places_next(&places, LIMIT));
	for (int i = 0; i < 2; i++) {
		come(hosts[0]);
		come(hosts[1]);
	}
	is_next(0);
	come(hosts[0]);
	is_next(1);
	soft_place_release(&peers[1]);
	soft_place_release(&peers[3]);
	is_next(4);
	soft_place_release(&peers[2]);
	is_next(0);
	come(hosts[0]);
	is_next(5);
	do { /* find another host of its network */
		CHECK(++last < 255);
		snprintf(alike, sizeof(alike), "%.*s%d", (int)strlen(hosts[0]) - 1, hosts[0], last);
		come(alike);
		soft_place_release(&peers[--used]);
	} while (meet(&peers[0], &peers[used], 1, 2));
	come(alike);
	is_next(used - 1);
	come(hosts[1]);
	is_next(used - 1);
}

static void gone_twice(void)
{
	begin();
	come("192.0.2.1");
	soft_place_release(&peers[0]);
	soft_place_release(&peers[0]);
	CHECK_EQUAL(places.count, 0);
	CHECK(!soft_places_oldest(&places));
}

static void limits(void)
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
	STEP(oldest_of_all());
	STEP(oldest_of_the_fullest());
	STEP(a_network("192.0.2.%d"));
	STEP(a_network("2001:db8:1:2::%d"));
	STEP(a_network("2001:db8:1:%d::1"));
	STEP(a_network("2001:db8:1:%d00::1"));
	STEP(never_the_newest());
	STEP(what_a_network_is());
	STEP(served_next());
	STEP(gone_twice());
	STEP(limits());
	return 0;
}
