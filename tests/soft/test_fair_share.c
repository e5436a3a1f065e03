/* Which of the peers that have proved nothing goes for a new one: engine/fair_share.h. */
#include "cm_check.h"
#include "engine/engine.h"

#include <arpa/inet.h>
#include <sys/resource.h>

enum {
	LIMIT = 16, /* of which two are a network's share */
	MORE = LIMIT + 1,
	HOSTS = MORE + 8,
	FLOOD = 40
};

static struct soft_crowd crowd;
static struct soft_stranger strangers[64];
static int used;

static struct sockaddr_storage from(const char *host)
{
	struct sockaddr_storage address = {.ss_family = strchr(host, ':') ? AF_INET6 : AF_INET};

	if (address.ss_family == AF_INET)
		CHECK_EQUAL(inet_pton(AF_INET, host, &((struct sockaddr_in *)&address)->sin_addr),
			    1);
	else
		CHECK_EQUAL(
			inet_pton(AF_INET6, host, &((struct sockaddr_in6 *)&address)->sin6_addr),
			1);
	return address;
}

static void begin(void)
{
	soft_crowd_init(&crowd);
	used = 0;
}

static void come(const char *host)
{
	struct sockaddr_storage address = from(host);

	soft_crowd_add(&crowd, &strangers[used++], &address);
}

/* The number of the one that goes, which is then gone. */
static int goes(void)
{
	struct soft_stranger *excess = soft_crowd_excess(&crowd, LIMIT);

	if (!excess)
		return -1;
	soft_crowd_remove(excess);
	return (int)(excess - strangers);
}

/* Whether two of them share a bucket of these levels. */
static bool meet(const struct soft_stranger *one, const struct soft_stranger *other, int first,
		 int last)
{
	for (int level = first; level <= last; level++)
		if (one->bucket[level] == other->bucket[level])
			return true;
	return false;
}

/* Hosts of different networks that share no bucket, since the hash has a random seed. */
static char hosts[HOSTS][32];

static const char *apart(int number)
{
	return hosts[number];
}

static void find_hosts(void)
{
	struct soft_stranger found[HOSTS];
	int count = 0, tried = 0;

	while (count < HOSTS) {
		char *host = hosts[count];
		bool fresh = true;

		snprintf(host, sizeof(hosts[0]), "10.%d.%d.1", tried / 200, tried % 200);
		tried++;
		begin();
		come(host);
		for (int i = 0; i < count; i++)
			fresh = fresh && !meet(&found[i], &strangers[0], 0, 2);
		if (fresh)
			found[count++] = strangers[0];
	}
	begin();
}

static void oldest_of_all(void)
{
	for (int i = 0; i < LIMIT; i++) {
		come(apart(i));
		CHECK_EQUAL(goes(), -1);
	}
	for (int i = 0; i < 2; i++) {
		come(apart(LIMIT + i));
		CHECK_EQUAL(goes(), i);
	}
	CHECK(soft_crowd_oldest(&crowd) == &strangers[2]);
}

static void oldest_of_the_heaviest(void)
{
	begin();
	for (int i = 0; i < 10; i++)
		come(apart(i));
	for (int i = 10; i < LIMIT; i++)
		come(apart(20));
	come(apart(11)); /* a new host */
	CHECK_EQUAL(goes(), 10);
	come(apart(20)); /* the heavy one again */
	CHECK_EQUAL(goes(), 11);
	come(apart(0));
	CHECK_EQUAL(goes(), 12);
}

static void come_from(const char *format, int number)
{
	char host[64];

	snprintf(host, sizeof(host), format, number);
	come(host);
}

/* Whether a host shares no bucket with those of a flood. */
static bool is_apart_from(const char *host, const char *format)
{
	begin();
	come(host);
	for (int i = 0; i < FLOOD; i++) {
		come_from(format, i);
		if (meet(&strangers[0], &strangers[1 + i], 0, 2))
			return false;
	}
	return true;
}

/* A flood of a network of many hosts goes for itself, and for no peer that was there before. */
static void a_network(const char *format)
{
	const char *before[2];
	int found = 0;

	for (int i = 0; found < 2; i++) {
		CHECK(i < HOSTS);
		if (is_apart_from(apart(i), format))
			before[found++] = apart(i);
	}
	begin();
	come(before[0]);
	come(before[1]);
	for (int i = 0; i < FLOOD; i++) {
		come_from(format, i);
		CHECK(goes() < 0 ? i < LIMIT - 2 : true);
	}
	CHECK(strangers[0].crowd && strangers[1].crowd);
}

static bool are_in_one(const char *one, const char *other, int level)
{
	begin();
	come(one);
	come(other);
	return meet(&strangers[0], &strangers[1], level, level);
}

static bool are_one(const char *one, const char *other)
{
	return are_in_one(one, other, SOFT_CROWD_LEVELS - 1);
}

/* Two hosts may share a bucket: of so many pairs, at most a few. */
static int alike(const char *format)
{
	int count = 0;

	for (int i = 1; i < 100; i++) {
		char one[64], other[64];

		snprintf(one, sizeof(one), format, i);
		snprintf(other, sizeof(other), format, 100 + i);
		count += are_one(one, other);
	}
	return count;
}

static void what_a_host_is(void)
{
	CHECK_EQUAL(alike("2001:db8:1:2::%d"), 99);
	CHECK(alike("2001:db8:1:%d::1") < 10);
	CHECK(alike("fe80::%d") < 10);
	CHECK(alike("192.0.2.%d") < 10);
	CHECK(are_one("192.0.2.1", "::ffff:192.0.2.1"));
	CHECK(are_in_one("192.0.2.1", "192.0.2.99", 0));
	CHECK(are_in_one("2001:db8:1::1", "2001:db8:1:ffff::1", 0));
	CHECK(are_in_one("2001:db8:1::1", "2001:db8:1:ff::1", 1));
}

static void gone_twice(void)
{
	begin();
	come("192.0.2.1");
	soft_crowd_remove(&strangers[0]);
	soft_crowd_remove(&strangers[0]);
	CHECK_EQUAL(crowd.count, 0);
	CHECK(!soft_crowd_oldest(&crowd));
}

static void limits(void)
{
	struct rlimit files, low;

	CHECK_EQUAL(getrlimit(RLIMIT_NOFILE, &files), 0);
	low = files;
	low.rlim_cur = 80;
	CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &low), 0);
	CHECK_EQUAL(soft_crowd_limit(256), 10);
	CHECK_EQUAL(soft_crowd_limit(5), 5);
	CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &files), 0);
}

int main(void)
{
	STEP(find_hosts());
	STEP(oldest_of_all());
	STEP(oldest_of_the_heaviest());
	STEP(a_network("192.0.2.%d"));
	STEP(a_network("2001:db8:1:2::%d"));
	STEP(a_network("2001:db8:1:%d::1"));
	STEP(a_network("2001:db8:1:%d00::1"));
	STEP(what_a_host_is());
	STEP(gone_twice());
	STEP(limits());
	return 0;
}
