/* Test the throughput of RoCE v2 connections in virtual time. Their link loses packets at random,
 * carries competing TCP connections, or both.
 *
 * A link with a given rate, random loss and a round-trip time of 20 ms connects two hosts. Each
 * direction has a queue of one bandwidth-delay product, which drops packets that do not fit. The
 * TCP model uses Reno's congestion window (RFC 5681) and learns of every loss from selective
 * acknowledgements (RFC 6675). Its packets contain a packet number but no data.
 */
#include "seeds.h"

enum {
	CONNECTIONS_MOST = 64,
	DEPTH = 16, /* outstanding requests per connection */
	LENGTH = 256 * 1024, /* bytes of a request */
	BELOW = 46, /* bytes of Ethernet, IPv4 and UDP overhead per datagram */
	TCP_HEADERS = 66, /* bytes, including Ethernet */
	DELAY_NS = 10000000,
	QUEUE_NS = 2 * DELAY_NS,
	REFILL_NS = DELAY_NS, /* interval at which the application polls */
	TCP_TIMEOUT_NS = 200000000,
	BEGUN = 4, /* seconds before the measurement starts */
	TIMES = 2, /* maximum ratio between fair rates */
};

static const struct scenario {
	uint64_t mbits; /* link rate */
	enum ibv_mtu mtu;
	int connections, tcp;
	int per_mille; /* packets lost per thousand */
	int marks; /* queue level in percent above which packets are marked; 0 if never */
	int seconds;
} scenarios[] =
	{
		{1000, IBV_MTU_4096, 64, 0, 10, 0, 4}, {500, IBV_MTU_1024, 64, 0, 10, 0, 4},
		{100, IBV_MTU_1024, 1, 1, 0, 0, 40},   {1000, IBV_MTU_1024, 8, 8, 0, 0, 10},
		{100, IBV_MTU_1024, 1, 1, 0, 20, 40},  {1000, IBV_MTU_1024, 8, 8, 0, 20, 10},
		{100, IBV_MTU_1024, 8, 8, 10, 0, 40},
	},
  *scenario;

struct rates {
	double roce, tcp; /* Mbit/s of payload */
};

struct packet {
	struct packet *next;
	uint64_t due;
	int tcp; /* index of the TCP connection; -1 for a RoCE packet */
	uint32_t number;
	uint16_t port;
	bool marked;
	uint32_t length;
	uint8_t bytes[];
};

/* One direction of the link. */
static struct link {
	uint64_t free_at; /* time when the last queued packet leaves */
	struct packet *first, *last;
} links[SIDES];

static struct tcp {
	/* Packet numbers: the next one to send, the highest one acknowledged, and the first one
	 * after the current recovery phase. */
	uint32_t next, highest, recovered;
	uint32_t under_way;
	double window, threshold; /* packets */
	uint64_t deadline;
	uint64_t acked;
} tcps[CONNECTIONS_MOST];

static struct side homes[SIDES], sides[CONNECTIONS_MOST][SIDES];
static uint32_t mtu;

/* ---- the link --------------------------------------------------------------------------------- */

static void send_packet(int to, const struct packet *what, const uint8_t *bytes, uint32_t below)
{
	struct link *link = &links[to];
	uint64_t from = link->free_at > fuzz_now_ns ? link->free_at : fuzz_now_ns;
	uint64_t waits = from - fuzz_now_ns;
	struct packet *packet;

	if (waits > QUEUE_NS)
		return;
	link->free_at = from + (what->length + below) * 8000 / scenario->mbits;
	if (chance((unsigned)scenario->per_mille) && (what->tcp < 0 || to))
		return;
	CHECK(packet = malloc(sizeof(*packet) + what->length));
	*packet = *what;
	packet->next = NULL;
	packet->due = link->free_at + DELAY_NS;
	packet->marked |= scenario->marks && waits > QUEUE_NS / 100 * (unsigned)scenario->marks;
	if (bytes)
		memcpy(packet->bytes, bytes, what->length);
	if (link->first)
		link->last->next = packet;
	else
		link->first = packet;
	link->last = packet;
}

static void carry(const struct flight *what, const uint8_t *bytes)
{
	send_packet(what->to,
		    &(struct packet){.tcp = -1, .port = what->port, .length = what->length}, bytes,
		    BELOW);
}

/* ---- TCP --------------------------------------------------------------------------------------- */

static void tcp_shrink(struct tcp *tcp, double window)
{
	tcp->threshold = tcp->window / 2 > 2 ? tcp->window / 2 : 2;
	tcp->window = window ? window : tcp->threshold;
	tcp->recovered = tcp->next;
}

static void tcp_send(struct tcp *tcp)
{
	for (; tcp->under_way < (uint32_t)tcp->window; tcp->under_way++)
		send_packet(1,
			    &(struct packet){
				    .tcp = (int)(tcp - tcps), .number = tcp->next++, .length = mtu},
			    NULL, TCP_HEADERS);
}

static void tcp_acknowledged(struct tcp *tcp, uint32_t number, bool marked)
{
	/* The link does not reorder packets, so any packets missing before `number` are lost. */
	const uint32_t lost = number - tcp->highest - 1;

	tcp->deadline = fuzz_now_ns + TCP_TIMEOUT_NS;
	tcp->under_way -= 1 + lost;
	tcp->highest = number;
	tcp->acked++;
	if ((lost || marked) && (int32_t)(number - tcp->recovered) >= 0)
		tcp_shrink(tcp, 0);
	else if ((int32_t)(number - tcp->recovered) >= 0)
		tcp->window += tcp->window < tcp->threshold ? 1 : 1 / tcp->window;
	tcp_send(tcp);
}

static void tcp_expired(struct tcp *tcp)
{
	tcp_shrink(tcp, 1);
	tcp->under_way = 0;
	tcp->highest = tcp->next - 1;
	tcp->deadline = fuzz_now_ns + TCP_TIMEOUT_NS;
	tcp_send(tcp);
}

static void tcp_begin(struct tcp *tcp)
{
	*tcp = (struct tcp){.highest = UINT32_MAX, .window = 10, .threshold = 1e9};
	tcp->deadline = fuzz_now_ns + TCP_TIMEOUT_NS;
	tcp_send(tcp);
}

/* ---- connections ------------------------------------------------------------------------------ */

static void ask(int i)
{
	enter(0);
	POST(&sides[i][0], IBV_WR_RDMA_WRITE, .wr_id = (uint64_t)i, .length = LENGTH,
	     REMOTE(&sides[i][1], 0));
}

static void open_sides(void)
{
	const struct options options = {.memory = LENGTH,
					.gid = gid_at(0), /* set by take_addresses */
					.sends = DEPTH,
					.cqe = CONNECTIONS_MOST * DEPTH,
					.timeout = 14,
					.mtu = scenario->mtu};
	struct address addresses[SIDES];

	for (int host = 0; host < SIDES; host++) {
		enter(host);
		open_side(&homes[host], options);
		take_addresses(host);
	}
	for (int i = 0; i < scenario->connections; i++) {
		for (int host = 0; host < SIDES; host++) {
			enter(host);
			sides[i][host] = homes[host];
			sides[i][host].qp = create_qp(&homes[host]);
			addresses[host] = address_of_side(&sides[i][host]);
		}
		for (int host = 0; host < SIDES; host++) {
			enter(host);
			bring_up(&sides[i][host], &addresses[1 - host]);
		}
	}
	for (int i = 0; i < scenario->connections; i++)
		for (int request = 0; request < DEPTH; request++)
			ask(i);
}

static void deliver(int to, const struct packet *packet)
{
	static uint8_t input[HEADROOM + SOFT_ROCE_PACKET_MAX];
	const union ibv_gid from = address_of_host(1 - to);
	struct sockaddr_storage address;

	if (packet->tcp >= 0 && to) {
		send_packet(0,
			    &(struct packet){.tcp = packet->tcp,
					     .number = packet->number,
					     .marked = packet->marked},
			    NULL, TCP_HEADERS);
		return;
	}
	if (packet->tcp >= 0) {
		if ((int32_t)(packet->number - tcps[packet->tcp].highest) > 0)
			tcp_acknowledged(&tcps[packet->tcp], packet->number, packet->marked);
		return;
	}
	enter(to);
	memcpy(input + HEADROOM, packet->bytes, packet->length);
	soft_gid_to_sockaddr(&from, &from, packet->port, &address);
	soft_lock();
	soft_roce_receive(open_address(), &address, input + HEADROOM, packet->length,
			  packet->marked ? SOFT_ROCE_CE : 0);
	soft_unlock();
}

static void refill(void)
{
	struct ibv_wc wc;

	enter(0);
	while (poll_cq(&homes[0], 1, &wc)) {
		CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
		ask((int)wc.wr_id);
	}
}

static uint64_t next_event(void)
{
	uint64_t next = wire_next();

	for (int i = 0; i < SIDES; i++)
		if (links[i].first && links[i].first->due < next)
			next = links[i].first->due;
	for (int i = 0; i < scenario->tcp; i++)
		if (tcps[i].deadline < next)
			next = tcps[i].deadline;
	return next;
}

static void step(void)
{
	fuzz_now_ns = next_event();
	for (int i = 0; i < SIDES; i++) {
		struct packet *packet = links[i].first;

		if (packet && packet->due <= fuzz_now_ns) {
			links[i].first = packet->next;
			deliver(i, packet);
			free(packet);
		}
		if (*alarm_of(i) && *alarm_of(i) <= fuzz_now_ns)
			step_of(i, NULL);
	}
	for (int i = 0; i < scenario->tcp; i++)
		if (tcps[i].deadline <= fuzz_now_ns)
			tcp_expired(&tcps[i]);
}

static void pass(uint64_t ns)
{
	for (uint64_t until = fuzz_now_ns + ns; fuzz_now_ns < until;) {
		uint64_t part = fuzz_now_ns + REFILL_NS;

		while (next_event() < part)
			step();
		fuzz_now_ns = part;
		refill();
	}
}

/* Returns the number of packets acknowledged so far. */
static struct rates acknowledged(void)
{
	struct rates sum = {0};

	for (int i = 0; i < scenario->connections; i++)
		sum.roce += soft_qp_of(sides[i][0].qp)->sq.unacked;
	for (int i = 0; i < scenario->tcp; i++)
		sum.tcp += (double)tcps[i].acked;
	return sum;
}

static struct rates measure(void)
{
	const double mbits = 8e-6 * mtu / scenario->seconds;
	struct rates before, after;

	for (int i = 0; i < scenario->tcp; i++)
		tcp_begin(&tcps[i]);
	open_sides();
	pass(BEGUN * SECOND);
	before = acknowledged();
	pass((uint64_t)scenario->seconds * SECOND);
	after = acknowledged();
	return (struct rates){(after.roce - before.roce) * mbits, (after.tcp - before.tcp) * mbits};
}

/* Measure a scenario in a child process, because all state is static. */
static struct rates rates_of(const struct scenario *which)
{
	struct rates rates;
	int fds[2];

	CHECK_OK(pipe(fds));
	fflush(NULL);
	pid_t child = fork();

	CHECK(child >= 0);
	if (!child) {
		limit_seconds(60);
		scenario = which;
		mtu = 128u << which->mtu;
		rates = measure();
		CHECK_EQUAL(write(fds[1], &rates, sizeof(rates)), sizeof(rates));
		_exit(0);
	}
	expect_exit_success(child);
	CHECK_EQUAL(read(fds[0], &rates, sizeof(rates)), sizeof(rates));
	close(fds[0]);
	close(fds[1]);
	return rates;
}

/* Compare RoCE's rate with the rate of the TCP connections on the same link. In a scenario without
 * TCP, compare it with the rate that RoCE reaches without loss. */
static void run_seed(void)
{
	limit_seconds(400);
	wire.carry = carry;
	wire.window = 1;
	FOR_EACH (i, scenarios) {
		const struct scenario *at = &scenarios[i];
		struct scenario whole = *at;
		const struct rates rates = rates_of(at);

		whole.per_mille = 0;
		const double other = at->tcp ? rates.tcp : rates_of(&whole).roce;

		printf("%4d Mbit/s, packets of %u, loss %.1f %%, marks from %d %%: %d of RoCE %.1f "
		       "Mbit/s, "
		       "%d of TCP or without loss %.1f\n",
		       (int)at->mbits, 128u << at->mtu, at->per_mille / 10.0, at->marks,
		       at->connections, rates.roce, at->tcp, other);
		CHECK(rates.roce * TIMES >= other && rates.roce <= other * TIMES);
	}
}

int main(int argc, char **argv)
{
	return run_seeds(run_seed, UINT32_MAX, argc, argv);
}
