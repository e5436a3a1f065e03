/* Test multicast groups (IBTA vol 1, 10.5; ibv_attach_mcast(3)). Queue pairs that have left a
 * group are tested in tests/verbs/test_multicast.py. */
#include "ud/ud.h"
#include "ud_side.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "objects/objects.h"

enum { ALL_MEMBERS = 0xffffff, PORT = 14791 };

static union ibv_gid group_of(const char *ip)
{
	union ibv_gid gid;

	CHECK_EQUAL(inet_pton(AF_INET6, ip, gid.raw), 1);
	return gid;
}

static struct ibv_ah *path_to_group(struct side *side, const union ibv_gid *group, int index)
{
	struct ibv_ah_attr attr = {
		.is_global = 1,
		.port_num = 1,
		.grh = {.dgid = *group, .sgid_index = (uint8_t)index, .hop_limit = 1},
	};
	struct ibv_ah *ah = verbs->ibv_create_ah(side->pd, &attr);

	CHECK(ah);
	return ah;
}

static void send_to_group(struct side *side, const union ibv_gid *group, int index, uint64_t seed)
{
	struct ibv_ah *ah = path_to_group(side, group, index);

	fill(side->memory, 64, (unsigned)seed);
	UD_POST(side, .ah = ah, .qpn = ALL_MEMBERS, .qkey = QKEY, .wr_id = 100, .length = 64);
	CHECK_OK(verbs->ibv_destroy_ah(ah)); /* the message has been sent already */
}

static void expect_group_message(struct side *side, uint64_t seed, const struct address *from,
				 const union ibv_gid *group)
{
	struct ibv_wc wc = expect_done(side, 1);
	const uint8_t *grh = side->memory + 4096;
	bool ipv4 = group->raw[0] != 0xff;

	CHECK_EQUAL(wc.byte_len, GRH + 64);
	CHECK_EQUAL(wc.src_qp, from->qpn);
	CHECK(is_filled(side->memory + 4096 + GRH, 64, (unsigned)seed));
	if (ipv4 && from->gid.raw[10] == 0xff) {
		CHECK(!memcmp(grh + 32, &from->gid.raw[12], 4));
		CHECK(!memcmp(grh + 36, &group->raw[12], 4));
	} else {
		CHECK(!memcmp(grh + 8, &from->gid, 16));
		CHECK(!memcmp(grh + 24, group, 16));
	}
	post_receive_at(side, 1, 4096, 4096);
}

static void open_member(struct side *side)
{
	UD_OPEN(side, .signal_none = true);
	post_receive_at(side, 1, 4096, 4096);
}

/* Check that each attached queue pair of both processes receives each message once, including the
 * sender's own messages. Messages are sent from every address of this host. */
static void group_message_reaches_each_attached_qp_once(const char *ip)
{
	const union ibv_gid group = group_of(ip);
	struct process process = process_split();
	struct side a, b, sender;
	union ibv_gid gid;

	limit_seconds(60);
	open_member(&a);
	open_member(&b);
	UD_OPEN(&sender, .signal_none = true);
	for (int i = 0; i < 2; i++) /* attaching twice succeeds and adds no copy */
		CHECK_OK(verbs->ibv_attach_mcast(a.qp, &group, 0));
	CHECK_OK(verbs->ibv_attach_mcast(b.qp, &group, 0));
	struct address from[2] = {address_of_side(&a), address_of_side(&sender)};
	struct address theirs[2];

	process_send(&process, from, sizeof(from));
	process_receive(&process, theirs, sizeof(theirs));
	process_barrier(&process);
	for (int index = 0; verbs->ibv_query_gid(a.context, 1, index, &gid) == 0; index++)
		for (int turn = 0; turn < 4; turn++) {
			bool member = turn & 1, mine = (turn < 2) == (process.child != 0);
			struct address source = mine ? from[!member] : theirs[!member];

			source.gid = gid; /* both processes are on one host */
			if (mine)
				send_to_group(member ? &a : &sender, &group, index, (uint64_t)turn);
			expect_group_message(&a, (uint64_t)turn, &source, &group);
			expect_group_message(&b, (uint64_t)turn, &source, &group);
			process_barrier(&process);
		}
	expect_no_wc(&a);
	expect_no_wc(&b);
	CHECK_OK(verbs->ibv_detach_mcast(a.qp, &group, 0));
	CHECK_OK(verbs->ibv_detach_mcast(b.qp, &group, 0));
	close_pair(&a, &b);
	close_side(&sender);
	process_join(&process);
}

static void attach_mcast_rejects_invalid_qps_and_groups(void)
{
	const union ibv_gid group = group_of("::ffff:239.77.1.1");
	static const char *const unicast[] = {"::ffff:10.1.1.1", "fe80::1", "::224.1.1.1",
					      "2001::1"};
	struct side ud, rc;

	OPEN(&rc);
	UD_OPEN(&ud);
	CHECK_EQUAL(verbs->ibv_attach_mcast(rc.qp, &group, 0), EINVAL);
	CHECK_EQUAL(verbs->ibv_detach_mcast(rc.qp, &group, 0), EINVAL);
	for (int i = 0; i < 4; i++) {
		const union ibv_gid gid = group_of(unicast[i]);

		CHECK_EQUAL(verbs->ibv_attach_mcast(ud.qp, &gid, 0), EINVAL);
	}
	CHECK_EQUAL(verbs->ibv_detach_mcast(ud.qp, &group, 0), EINVAL);
	CHECK_OK(verbs->ibv_attach_mcast(ud.qp, &group, 0xc001));
	CHECK_EQUAL(verbs->ibv_detach_mcast(ud.qp, &group, 0xc002), EINVAL);
	CHECK_EQUAL(verbs->ibv_destroy_qp(ud.qp), EBUSY); /* ibv_destroy_qp(3) */
	CHECK_OK(verbs->ibv_detach_mcast(ud.qp, &group, 0xc001));
	close_side(&ud);
	close_side(&rc);
}

static void expect_group_limits(void)
{
	union ibv_gid group = group_of("ff15::");
	struct ibv_device_attr device;
	struct side side;

	UD_OPEN(&side);
	CHECK_OK(verbs->ibv_query_device(side.context, &device));
	for (int i = 0; i < device.max_mcast_grp; i++) {
		group.raw[14] = (uint8_t)(i >> 8);
		group.raw[15] = (uint8_t)i;
		CHECK_OK(verbs->ibv_attach_mcast(side.qp, &group, 0));
	}
	group.raw[13] = 1;
	CHECK_EQUAL(verbs->ibv_attach_mcast(side.qp, &group, 0), ENOMEM);
	group.raw[13] = 0;
	for (int i = 0; i < device.max_mcast_grp; i++) {
		group.raw[14] = (uint8_t)(i >> 8);
		group.raw[15] = (uint8_t)i;
		CHECK_OK(verbs->ibv_detach_mcast(side.qp, &group, 0));
	}
	for (int i = 0; i < device.max_mcast_qp_attach; i++) /* one attachment per LID */
		CHECK_OK(verbs->ibv_attach_mcast(side.qp, &group, (uint16_t)i));
	CHECK_EQUAL(verbs->ibv_attach_mcast(side.qp, &group, UINT16_MAX), ENOMEM);
	for (int i = 0; i < device.max_mcast_qp_attach; i++)
		CHECK_OK(verbs->ibv_detach_mcast(side.qp, &group, (uint16_t)i));
	close_side(&side);
}

/* Check that invalid datagrams to a group are dropped. Any host on the network can send them. */
static void invalid_group_datagrams_are_dropped(void)
{
	const union ibv_gid group = group_of("::ffff:239.77.1.3");
	const union ibv_gid other = group_of("::ffff:239.77.1.4");
	const struct ip_mreqn lo = {.imr_ifindex = 1, .imr_address.s_addr = htonl(INADDR_LOOPBACK)};
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(PORT)};
	uint8_t bytes[SOFT_DATAGRAM_HEADER + 64];
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	const uint32_t number = number_at(bind_device_port(fd), 5);
	struct side side;

	memcpy(&to.sin_addr, &group.raw[12], 4);
	CHECK_OK(setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &lo, sizeof(lo)));
	open_member(&side);
	CHECK_OK(verbs->ibv_attach_mcast(side.qp, &group, 0));
	struct address own = address_of_side(&side);

	const struct soft_datagram good = {.source = own.gid,
					   .destination = group,
					   .dest_qpn = ALL_MEMBERS,
					   .src_qpn = number,
					   .qkey = QKEY};
	struct soft_datagram said[] = {good, good, good, good, good, good};

	said[0].dest_qpn = own.qpn;
	said[1].destination = other;
	said[2].destination = own.gid;
	said[3].source.raw[15] = 77; /* another host's address */
	said[4].qkey++;
	FOR_EACH (i, said) {
		soft_datagram_encode(bytes, &said[i]);
		memset(bytes + SOFT_DATAGRAM_HEADER, (int)i, 64);
		CHECK_EQUAL(sendto(fd, bytes, sizeof(bytes), 0, (struct sockaddr *)&to, sizeof(to)),
			    sizeof(bytes));
	}
	struct ibv_wc wc = expect_done(&side, 1); /* only the last one is valid */

	CHECK_EQUAL(wc.src_qp, number);
	CHECK_EQUAL(side.memory[4096 + GRH], 5);
	post_receive_at(&side, 1, 4096, 4096);
	expect_no_wc(&side);
	CHECK_OK(verbs->ibv_detach_mcast(side.qp, &group, 0));
	close_side(&side);
	close(fd);
}

/* Check that groups inherited over fork do not count towards the child's limits, before or after it
 * detaches from them. The child can join as many groups as any other process. */
static inline void inherited_groups_do_not_count_towards_child_limits(void)
{
	const union ibv_gid group = group_of("::ffff:239.77.1.6");
	struct side parent;

	UD_OPEN(&parent);
	CHECK_OK(verbs->ibv_attach_mcast(parent.qp, &group, 0));
	struct process process = process_split();

	limit_seconds(60);
	if (!process.child) {
		expect_group_limits();
		CHECK_OK(verbs->ibv_detach_mcast(parent.qp, &group, 0));
		expect_group_limits();
	}
	process_barrier(&process);
	if (process.child)
		CHECK_OK(verbs->ibv_detach_mcast(parent.qp, &group, 0));
	close_side(&parent);
	process_join(&process);
}

int main(void)
{
	limit_seconds(60);
	STEP(group_message_reaches_each_attached_qp_once(
		"::ffff:239.77.1.2")); /* first, because it forks */
	STEP(group_message_reaches_each_attached_qp_once("ff12:401b:ffff::77"));
#ifndef __SANITIZE_THREAD__ /* ThreadSanitizer cannot follow the child */
	STEP(inherited_groups_do_not_count_towards_child_limits());
#endif
	STEP(attach_mcast_rejects_invalid_qps_and_groups());
	STEP(invalid_group_datagrams_are_dropped());
	return 0;
}
