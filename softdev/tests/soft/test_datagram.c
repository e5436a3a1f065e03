/* Test datagrams between processes, and invalid datagrams from other sockets. */
#include "ud/ud.h"
#include "ud_side.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "objects/objects.h"

/* ---- between processes --------------------------------------------------------------------- */

/* Returns the index of a GID, or -1 if this host does not have it. */
static int gid_index_of(struct ibv_context *context, const char *ip)
{
	union ibv_gid wanted = {.raw = {[10] = 0xff, [11] = 0xff}}, gid;

	if (strchr(ip, ':'))
		CHECK_EQUAL(inet_pton(AF_INET6, ip, wanted.raw), 1);
	else
		CHECK_EQUAL(inet_pton(AF_INET, ip, &wanted.raw[12]), 1);
	for (int i = 0; verbs->ibv_query_gid(context, 1, i, &gid) == 0; i++)
		if (!memcmp(&gid, &wanted, sizeof(gid)))
			return i;
	return -1;
}

static void check_grh(const uint8_t *grh, const struct address *from, const struct address *to,
		      uint32_t length)
{
	static const uint8_t nothing[20];

	if (from->gid.raw[10] == 0xff) {
		uint32_t sum = 0;

		CHECK(!memcmp(grh, nothing, 20));
		CHECK_EQUAL(grh[20], 0x45);
		CHECK_EQUAL(grh[21], 33);
		/* The length includes IPv4, UDP, BTH, DETH with immediate data, the padded payload,
		 * and ICRC. */
		CHECK_EQUAL(grh[22] << 8 | grh[23], 20 + 8 + 12 + 8 + 4 + ((length + 3) & ~3u) + 4);
		CHECK_EQUAL(grh[28], 17);
		CHECK_EQUAL(grh[29], IPPROTO_UDP);
		CHECK(!memcmp(grh + 32, &from->gid.raw[12], 4));
		CHECK(!memcmp(grh + 36, &to->gid.raw[12], 4));
		for (int i = 20; i < 40; i += 2)
			sum += (uint32_t)(grh[i] << 8 | grh[i + 1]);
		CHECK_EQUAL((sum & 0xffff) + (sum >> 16), 0xffff);
	} else {
		CHECK_EQUAL(ntohl(*(const uint32_t *)(const void *)grh),
			    6u << 28 | 33 << 20 | 0x54321);
		CHECK_EQUAL(grh[4] << 8 | grh[5], 8 + 12 + 8 + 4 + ((length + 3) & ~3u) + 4);
		CHECK_EQUAL(grh[6], IPPROTO_UDP);
		CHECK_EQUAL(grh[7], 17);
		CHECK(!memcmp(grh + 8, &from->gid, 16));
		CHECK(!memcmp(grh + 24, &to->gid, 16));
	}
}

/* Let two processes take turns sending messages. The child sends to the source address of the first
 * message it received. */
static void processes_exchange_datagrams_with_valid_grh(const char *ip)
{
	enum { ROUNDS = 100 };
	struct process process = process_split();
	struct side side;
	struct ibv_context *context = open_device();
	int index = ip ? gid_index_of(context, ip) : 0;

	limit_seconds(60);
	CHECK_OK(verbs->ibv_close_device(context));
	CHECK(index >= 0);
	UD_OPEN(&side, .gid = gid_at(index));
	struct address own = address_of_side(&side), peer = exchange_addresses(&process, &side);
	struct ibv_ah *ah = process.child ? ud_path(&side, &peer, index) : NULL;

	post_receive_at(&side, 1, 8192, GRH + MTU);
	process_barrier(&process);
	for (unsigned round = 0; round < ROUNDS; round++) {
		uint32_t length = round == 0 ? 0 : round == 2 ? MTU : (round * 7919u) % (MTU + 1);

		if ((round & 1) == (process.child == 0)) {
			fill(side.memory, length, round);
			UD_POST(&side, .ah = ah, .qpn = peer.qpn, .qkey = QKEY, .wr_id = 2,
				.length = length, .with_imm = true, .imm = round);
			CHECK_EQUAL(expect_done(&side, 2).opcode, IBV_WC_SEND);
			continue;
		}
		struct ibv_wc wc = expect_done(&side, 1);

		CHECK_EQUAL(wc.opcode, IBV_WC_RECV);
		CHECK_EQUAL(wc.wc_flags, IBV_WC_GRH | IBV_WC_WITH_IMM);
		CHECK_EQUAL(wc.imm_data, round);
		CHECK_EQUAL(wc.byte_len, GRH + length);
		CHECK_EQUAL(wc.src_qp, peer.qpn);
		CHECK(is_filled(side.memory + 8192 + GRH, length, round));
		if (ip)
			check_grh(side.memory + 8192, &peer, &own, length);
		if (!ah)
			CHECK(ah = verbs->ibv_create_ah_from_wc(side.pd, &wc,
								(void *)(side.memory + 8192), 1));
		post_receive_at(&side, 1, 8192, GRH + MTU);
	}
	process_barrier(&process);
	CHECK_OK(verbs->ibv_destroy_ah(ah));
	close_side(&side);
	process_join(&process);
}

/* Send from each address of the host to each address that it can reach. The receiver must see the
 * source address that the sender chose, even if the kernel would choose another one. */
static void datagram_keeps_the_chosen_source_address(void)
{
	struct process process = process_split();
	struct side side;
	union ibv_gid from, to;

	limit_seconds(60);
	UD_OPEN(&side);
	struct address peer = exchange_addresses(&process, &side);

	post_receive_at(&side, 1, 4096, GRH);
	process_barrier(&process);
	for (int i = 0; verbs->ibv_query_gid(side.context, 1, i, &from) == 0; i++)
		for (int k = 0; verbs->ibv_query_gid(side.context, 1, k, &to) == 0; k++) {
			bool ipv4 = from.raw[10] == 0xff;

			if (ipv4 != (to.raw[10] == 0xff) ||
			    (from.raw[0] == 0xfe) != (to.raw[0] == 0xfe)) /* link-local */
				continue;
			peer.gid = to;
			if (process.child) {
				struct ibv_ah *ah = ud_path(&side, &peer, i);

				UD_POST(&side, .ah = ah, .qpn = peer.qpn, .qkey = QKEY, .wr_id = 2);
				expect_done(&side, 2);
				CHECK_OK(verbs->ibv_destroy_ah(ah));
			} else {
				expect_done(&side, 1);
				CHECK(!memcmp(side.memory + 4096 + (ipv4 ? 32 : 8),
					      ipv4 ? &from.raw[12] : from.raw, ipv4 ? 4 : 16));
				post_receive_at(&side, 1, 4096, GRH);
			}
			process_barrier(&process);
		}
	close_side(&side);
	process_join(&process);
}

/* ---- what no peer would send --------------------------------------------------------------- */

/* Changes that make a datagram invalid. ud.h describes the header. */
static const struct {
	uint8_t at, length, value;
} wrong[] = {
	{0, 1, 'x'},        {4, 1, 99},           /* magic, version */
	{6, 1, 1},            /* service level other than 0 */
	{8, 3, 0xff},         /* multicast receiver */
	{8 + 3, 1, 1},        /* receiver above 24 bits */
	{12, 4, 0xff},        /* sender above 24 bits */
	{12 + 2, 1, 0x7a},    /* sender of another process */
	{24 + 3, 1, 0x10},    /* bits above traffic class and flow label */
	{28, 16, 0xff},       /* invalid source GID */
	{28 + 15, 1, 9},      /* source GID other than the address */
	{44 + 12, 1, 0xe0},   /* multicast GID at a unicast socket */
	{44 + 15, 1, 9},      /* destination GID of another host */
};

static void invalid_datagrams_are_dropped(struct side *side)
{
	static const size_t wrong_sizes[] = {SOFT_DATAGRAM_HEADER + MTU + 1,
					     SOFT_DATAGRAM_HEADER - 1, 0};
	uint8_t good[SOFT_DATAGRAM_HEADER + 5000] = {0}, bytes[SOFT_DATAGRAM_HEADER + 100];
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct address own = address_of_side(side);
	struct sockaddr_in to = {.sin_family = AF_INET,
				 .sin_port = htons(own.port),
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	uint32_t number = number_at(bind_device_port(fd), 5);

	CHECK_OK(connect(fd, (struct sockaddr *)&to, sizeof(to)));
	post_receive_at(side, 1, 0, GRH + MTU);
	soft_datagram_encode(good, &(struct soft_datagram){.source = own.gid,
							   .destination = own.gid,
							   .dest_qpn = own.qpn,
							   .src_qpn = number,
							   .qkey = QKEY});
	FOR_EACH (i, wrong) {
		memcpy(bytes, good, sizeof(bytes));
		memset(bytes + wrong[i].at, wrong[i].value, wrong[i].length);
		CHECK(memcmp(bytes, good, sizeof(bytes)));
		CHECK_EQUAL(send(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
	}
	for (int i = 0; i < 3; i++)
		CHECK_EQUAL(send(fd, good, wrong_sizes[i], 0), wrong_sizes[i]);
	/* Datagrams from one socket arrive in order, so this valid one follows all invalid ones. */
	CHECK_EQUAL(send(fd, good, SOFT_DATAGRAM_HEADER + 3, 0), SOFT_DATAGRAM_HEADER + 3);
	struct ibv_wc wc = expect_done(side, 1);

	CHECK_EQUAL(wc.byte_len, GRH + 3);
	CHECK_EQUAL(wc.src_qp, number);
	expect_no_wc(side);
	close(fd);
}

/* ---- the port ------------------------------------------------------------------------------ */

/* Check that without a UD queue pair, the port stays reserved but the socket accepts no
 * datagrams. */
static void socket_drops_datagrams_without_a_ud_queue_pair(void)
{
	struct side rc;

	OPEN(&rc);
	struct address own = address_of_side(&rc);
	struct sockaddr_in to = {.sin_family = AF_INET,
				 .sin_port = htons(own.port),
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	CHECK_FAILS(bind(fd, (struct sockaddr *)&to, sizeof(to)), EADDRINUSE);
	for (int round = 0; round < 2; round++) {
		struct side ud;

		CHECK_EQUAL(sendto(fd, "hello", 5, 0, (struct sockaddr *)&to, sizeof(to)), 5);
		CHECK_EQUAL(queued_at("/proc/net/udp", own.port) +
				    queued_at("/proc/net/udp6", own.port),
			    0);

		/* The second round tests the state after a UD queue pair has been closed. */
		UD_OPEN(&ud);
		close_side(&ud);
	}
	close(fd);
	close_side(&rc);
}

static bool has_ipv6(void)
{
	const struct sockaddr_in6 address = {.sin6_family = AF_INET6,
					     .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	int fd = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	bool bound = fd >= 0 && !bind(fd, (const struct sockaddr *)&address, sizeof(address));

	close(fd);
	return bound;
}

int main(void)
{
	limit_seconds(60);
	STEP(processes_exchange_datagrams_with_valid_grh(
		NULL)); /* the step forks, so no device may be open */
	STEP(processes_exchange_datagrams_with_valid_grh("127.0.0.1"));
	if (has_ipv6())
		STEP(processes_exchange_datagrams_with_valid_grh("::1"));
	else
		fprintf(stderr, "this host has no ::1: IPv4 only\n");
	STEP(datagram_keeps_the_chosen_source_address());
	UD_SIDE(invalid_datagrams_are_dropped);
	STEP(socket_drops_datagrams_without_a_ud_queue_pair());
	return 0;
}
