/* The connection manager over a network of the test's, in virtual time, without threads.
 *
 * The network loses, doubles, delays and reorders messages, and may be cut for good; some runs are over
 * TCP instead.  Applications on both sides answer, disconnect and destroy their ids when it pleases them.
 * Whatever happens: events come once and in order, every wait ends, both sides see one connection, and
 * nothing is left over.  Where the network heals what it does, an application that wants a connection gets
 * it.
 *
 * seeds_cm FIRST COUNT: a seed does the same things every time.
 */
#include "../soft/cm_side.h"
#include "virtual_time.h"

#include "cm/cm_internal.h"

enum {
	CLIENTS = 4,
	PARTIES = 4 * CLIENTS, /* a request that is withdrawn may come once more */
	FLIGHTS = 256,
};

#define MS UINT64_C(1000000)
#define SECOND (1000 * MS)
#define NEVER UINT64_MAX
#define LONG (100 * SECOND) /* more than any limit of the connection manager */

static struct {
	uint64_t chance;
	unsigned loss, doubling; /* percent */
	uint64_t delay; /* at most */
	uint64_t cut_at;
	uint64_t closes_at; /* the listener */
	bool unruly; /* applications destroy and reject */
	bool tcp; /* over real streams, some with queue pairs */
} run;

static uint64_t until(uint64_t most)
{
	return fuzz_next(&run.chance) % most;
}

static bool percent(unsigned chance)
{
	return until(100) < chance;
}

/* ---- the network ------------------------------------------------------------------------------ */

/* One side of a conversation. */
struct end {
	struct soft_cm_link link;
	int conversation, side; /* 0: the active one */
};

static struct conversation {
	struct end *ends[2]; /* NULL: gone, or not there yet */
	uint16_t port; /* of the active side, by which the test knows it */
	int ended[2]; /* how often each has said DREQ */
} conversations[CLIENTS];
static int conversation_count, end_count;
static struct soft_cm_listener *listener;

static struct flight {
	uint64_t due; /* 0: none */
	int conversation, to;
	struct soft_cm_message message;
} flights[FLIGHTS];

static void throw(int conversation, int to, const struct soft_cm_message *message)
{
	int copies = fuzz_now_ns >= run.cut_at || percent(run.loss) ? 0
		     : percent(run.doubling)                        ? 2
								    : 1;

	for (int i = 0; i < FLIGHTS && copies; i++)
		if (!flights[i].due) {
			flights[i] = (struct flight){fuzz_now_ns + 1 + until(run.delay),
						     conversation, to, *message};
			copies--;
		}
	CHECK_EQUAL(copies, 0);
}

static int send_over(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	struct end *end = soft_container(link, struct end, link);
	int *ended = &conversations[end->conversation].ended[end->side];

	/* Once, where nothing gets lost and an answer is quick. */
	*ended += message->type == SOFT_CM_DREQ;
	CHECK(*ended < 2 || run.loss || run.delay > MS || run.cut_at < NEVER);
	throw(end->conversation, !end->side, message);
	return 0;
}

static void end_link(struct soft_cm_link *link)
{
	struct end *end = soft_container(link, struct end, link);

	conversations[end->conversation].ends[end->side] = NULL;
	soft_cm_link_stop(link);
	free(end);
	end_count--;
}

static struct soft_cm_carrier network;

static struct end *end_new(int conversation, int side)
{
	struct end *end = calloc(1, sizeof(*end));

	CHECK(end);
	end->conversation = conversation;
	end->side = side;
	soft_cm_link_init(&end->link, &network);
	conversations[conversation].ends[side] = end;
	end_count++;
	return end;
}

static struct soft_cm_link *start_connecting(struct soft_cm_id *id, int *error)
{
	CHECK(conversation_count < CLIENTS);
	*error = 0;
	conversations[conversation_count].port = port_of(&id->id);
	return &end_new(conversation_count++, 0)->link;
}

static struct soft_cm_listener *start_listening(struct soft_cm_id *id, int *error)
{
	(void)id;
	*error = 0;
	CHECK(listener = calloc(1, sizeof(*listener)));
	return listener;
}

static void stop_listening(struct soft_cm_listener *stopped)
{
	CHECK(stopped == listener);
	free(listener);
	listener = NULL;
}

static void who(const struct soft_cm_link *link, struct sockaddr_storage *local,
		struct sockaddr_storage *peer)
{
	const struct end *end = soft_container(link, struct end, link);

	if (end->side) {
		local->ss_family = AF_INET;
		*(union address *)peer = address_of(host, conversations[end->conversation].port);
	}
}

static struct soft_cm_carrier network = {
	.connect = start_connecting,
	.listen = start_listening,
	.unlisten = stop_listening,
	.send = send_over,
	.end = end_link,
	.who = who,
};

/* IBTA 12.9: what comes for a side that is not there is refused, and an end is confirmed. */
static void refuse(const struct flight *flight)
{
	struct soft_cm_message answer = {.type = SOFT_CM_REJ,
					 .reason = SOFT_CM_REASON_INVALID_SERVICE_ID};
	unsigned type = flight->message.type;

	if (type == SOFT_CM_DREQ)
		answer.type = SOFT_CM_DREP;
	if (type <= SOFT_CM_REP || type == SOFT_CM_DREQ)
		throw(flight->conversation, !flight->to, &answer);
}

static void deliver(struct flight flight)
{
	struct end *end = conversations[flight.conversation].ends[flight.to];

	soft_lock();
	if (end)
		(void)soft_cm_link_received(&end->link, &flight.message);
	else if (flight.to && flight.message.type == SOFT_CM_REQ && listener)
		(void)soft_cm_asked(listener, &end_new(flight.conversation, 1)->link,
				    &flight.message);
	else
		refuse(&flight);
	soft_unlock();
}

/* ---- the applications -------------------------------------------------------------------------- */

/* What the application knows of its id. */
enum phase {
	NONE,
	ASKED,
	RESPONDED,
	REQUESTED,
	ACCEPTED,
	UP,
	DOWN,
	GONE,
	FAILED,
	DESTROYED,
};

static const struct {
	enum phase before;
	enum rdma_cm_event_type event;
	enum phase after;
} allowed[] = {
	{ASKED, RDMA_CM_EVENT_CONNECT_RESPONSE, RESPONDED},
	{ASKED, RDMA_CM_EVENT_ESTABLISHED, UP},
	{ASKED, RDMA_CM_EVENT_REJECTED, FAILED},
	{ASKED, RDMA_CM_EVENT_UNREACHABLE, FAILED},
	{ASKED, RDMA_CM_EVENT_CONNECT_ERROR, FAILED},
	{RESPONDED, RDMA_CM_EVENT_REJECTED, FAILED},
	{RESPONDED, RDMA_CM_EVENT_CONNECT_ERROR, FAILED},
	{ACCEPTED, RDMA_CM_EVENT_ESTABLISHED, UP},
	{ACCEPTED, RDMA_CM_EVENT_REJECTED, FAILED},
	{ACCEPTED, RDMA_CM_EVENT_UNREACHABLE, FAILED},
	{ACCEPTED, RDMA_CM_EVENT_DISCONNECTED, DOWN}, /* if it ends it itself */
	{UP, RDMA_CM_EVENT_DISCONNECTED, DOWN},
	{DOWN, RDMA_CM_EVENT_TIMEWAIT_EXIT, GONE},
};

static struct party {
	struct rdma_cm_id *id;
	enum phase phase;
	bool was_up;
	bool ends; /* it has called rdma_disconnect */
	int number; /* the client, or whom it serves; also the number of its queue pair */
	uint64_t acts_at;
} parties[PARTIES]; /* the clients first */

static struct rdma_event_channel *channel;
static struct rdma_cm_id *listening;
static struct ibv_pd *pd;
static struct ibv_cq *cq;

static void act_later(struct party *party, uint64_t most)
{
	party->acts_at = fuzz_now_ns + until(most);
}

static void destroy(struct party *party)
{
	if (party->id->qp)
		rdma->rdma_destroy_qp(party->id);
	CHECK_EQUAL(rdma->rdma_destroy_id(party->id), 0);
	party->id = NULL;
	party->phase = DESTROYED;
}

static void make_queue_pair(struct party *party)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1}};

	if (run.tcp && percent(50))
		CHECK_EQUAL(rdma->rdma_create_qp(party->id, pd, &attr), 0);
}

static void close_listener(void)
{
	if (listening)
		CHECK_EQUAL(rdma->rdma_destroy_id(listening), 0);
	listening = NULL;
}

/* A call of the application, which fails if the other side was quicker and the event is not taken. */
static void act(struct party *party)
{
	struct rdma_conn_param said = {.qp_num = 100 + (unsigned)party->number,
				       .private_data = &party->number,
				       .private_data_len = sizeof(party->number)};

	party->acts_at = NEVER;
	if (run.unruly && percent(25)) {
		destroy(party);
		return;
	}
	switch (party->phase) {
	case RESPONDED:
		if (rdma->rdma_establish(party->id))
			CHECK_EQUAL(errno, EINVAL);
		else
			party->phase = UP;
		break;
	case REQUESTED:
		make_queue_pair(party);
		if (run.unruly && percent(20)) {
			(void)rdma->rdma_reject(party->id, NULL, 0); /* it may be withdrawn */
			party->phase = FAILED;
		} else if (rdma->rdma_accept(party->id, &said)) { /* it was withdrawn */
			CHECK_EQUAL(errno, EINVAL);
			CHECK(run.unruly || run.cut_at < NEVER);
			party->phase = FAILED;
		} else {
			party->phase = ACCEPTED;
		}
		break;
	case ACCEPTED:
	case UP:
		CHECK_EQUAL(rdma->rdma_disconnect(party->id), 0);
		party->ends = true;
		return;
	default:
		return;
	}
	party->was_up |= party->phase == UP;
	if (party->phase == UP || (run.unruly && percent(50)))
		act_later(party, LONG);
}

/* What comes for an id that is not known is a request. */
static struct party *request_of(const struct rdma_cm_event *event)
{
	struct party *party = parties + CLIENTS;
	int number, count = 0;

	CHECK_EQUAL(event->event, RDMA_CM_EVENT_CONNECT_REQUEST);
	memcpy(&number, event->param.conn.private_data, sizeof(number));
	CHECK(number >= 0 && number < CLIENTS);
	CHECK(run.tcp || event->param.conn.qp_num == 100 + (unsigned)number);
	CHECK(run.tcp || rdma->rdma_get_dst_port(event->id) == htons(conversations[number].port));
	for (; party->phase != NONE; party++)
		count += party->number == number;
	/* Once; but who knows when it has been withdrawn. */
	CHECK(!count || parties[number].phase >= FAILED);
	CHECK(party < parties + PARTIES);
	*party = (struct party){.id = event->id, .phase = REQUESTED, .number = number};
	return party;
}

static void take_event(const struct rdma_cm_event *event)
{
	struct party *party = parties;
	size_t i = 0;

	while (party < parties + PARTIES && party->id != event->id)
		party++;
	if (party == parties + PARTIES) {
		act_later(request_of(event), 5 * SECOND);
		return;
	}
	while (i < sizeof(allowed) / sizeof(allowed[0]) &&
	       (allowed[i].before != party->phase || allowed[i].event != event->event))
		i++;
	if (i == sizeof(allowed) / sizeof(allowed[0]))
		fprintf(stderr, "phase %d: %s %d\n", party->phase,
			rdma->rdma_event_str(event->event), event->status);
	CHECK(i < sizeof(allowed) / sizeof(allowed[0]));
	CHECK(party->phase != ACCEPTED || allowed[i].after != DOWN || party->ends);
	party->phase = allowed[i].after;
	party->was_up |= party->phase == UP;
	CHECK(party->phase != FAILED || run.unruly || run.cut_at < NEVER);
	if (party->phase == RESPONDED) {
		CHECK(run.tcp || event->param.conn.qp_num == 100 + (unsigned)party->number);
		act_later(party, 5 * SECOND);
	} else if (party->phase == UP) {
		act_later(party, LONG);
	} else if (party->phase == DOWN) {
		CHECK(!event->status || run.unruly || run.cut_at < NEVER);
	}
}

/* Was there any? */
static bool take_events(void)
{
	struct rdma_cm_event *event;
	bool any = false;

	for (int i = 0; run.tcp && i < 8; i++)
		soft_progress();
	while (!rdma->rdma_get_cm_event(channel, &event)) {
		take_event(event);
		CHECK_EQUAL(rdma->rdma_ack_cm_event(event), 0);
		any = true;
	}
	CHECK_EQUAL(errno, EAGAIN);
	return any;
}

/* ---- a run ----------------------------------------------------------------------------------- */

static uint64_t next_due(void)
{
	uint64_t next = fuzz_alarm_ns ? fuzz_alarm_ns : NEVER;

	for (int i = 0; i < FLIGHTS; i++)
		if (flights[i].due && flights[i].due < next)
			next = flights[i].due;
	for (int i = 0; i < PARTIES; i++)
		if (parties[i].id && parties[i].acts_at < next)
			next = parties[i].acts_at;
	return listening && run.closes_at < next ? run.closes_at : next;
}

/* Until nothing is to come. */
static void run_on(uint64_t limit)
{
	uint64_t end = fuzz_now_ns + limit, next;

	take_events();
	while ((next = next_due()) != NEVER || take_events()) {
		if (next == NEVER)
			continue;
		CHECK(next <= end);
		if (fuzz_alarm_ns <= next)
			fuzz_alarm_ns = 0; /* it goes off once */
		fuzz_pass_time(next > fuzz_now_ns ? next - fuzz_now_ns : 0);
		for (int i = 0; i < FLIGHTS; i++) {
			struct flight flight = flights[i];

			if (!flight.due || flight.due > fuzz_now_ns)
				continue;
			flights[i].due = 0;
			deliver(flight);
		}
		if (run.tcp || percent(50)) /* else applications act before they look */
			take_events();
		if (run.closes_at <= fuzz_now_ns)
			close_listener();
		for (int i = 0; i < PARTIES; i++)
			if (parties[i].id && parties[i].acts_at <= fuzz_now_ns)
				act(&parties[i]);
		if (run.tcp)
			take_events();
	}
}

static void begin(uint64_t seed)
{
	static const uint64_t delays[] = {1, MS, 100 * MS, SECOND};

	fuzz_random = run.chance = seed;
	run.loss = percent(50) ? (unsigned)until(30) : 0;
	run.doubling = percent(50) ? (unsigned)until(50) : 0;
	run.delay = delays[until(4)];
	run.cut_at = percent(20) ? fuzz_now_ns + until(20 * SECOND) : NEVER;
	run.tcp = percent(20);
	run.unruly = run.tcp || percent(50);
	soft_device.cm->carrier = run.tcp ? &soft_cm_stream : &network;
	run.closes_at = NEVER;
	memset(conversations, 0, sizeof(conversations));
	conversation_count = 0;
	memset(parties, 0, sizeof(parties));
}

static struct rdma_cm_id *bound_id(void)
{
	union address address = address_of(host, 0);
	struct rdma_cm_id *id;

	CHECK_EQUAL(rdma->rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), 0);
	CHECK_EQUAL(rdma->rdma_bind_addr(id, &address.any), 0);
	return id;
}

static void one_run(void)
{
	listening = bound_id();
	CHECK_EQUAL(rdma->rdma_listen(listening, percent(20) ? 1 : 0), 0);
	CHECK(pd = rdma->ibv_alloc_pd(listening->verbs));
	CHECK(cq = rdma->ibv_create_cq(listening->verbs, 64, NULL, NULL, 0));
	if (run.unruly && percent(20))
		run.closes_at = fuzz_now_ns + until(10 * SECOND);
	for (int i = 0; i < CLIENTS; i++) {
		struct side side = {.channel = channel};
		struct rdma_conn_param asked = {.qp_num = 100 + (unsigned)i,
						.private_data = &i,
						.private_data_len = sizeof(i)};

		CHECK_EQUAL(rdma->rdma_create_id(channel, &side.id, NULL, RDMA_PS_TCP), 0);
		resolve_to(&side, host, port_of(listening));
		parties[i] = (struct party){
			.id = side.id, .phase = ASKED, .number = i, .acts_at = NEVER};
		make_queue_pair(&parties[i]);
		CHECK_EQUAL(rdma->rdma_connect(side.id, &asked), 0);
		if (run.unruly && percent(50))
			act_later(&parties[i], 20 * SECOND);
	}
	run_on(300 * SECOND);
	for (int i = 0; i < PARTIES; i++) {
		CHECK(parties[i].phase == NONE || parties[i].phase >= GONE);
		CHECK(parties[i].phase == NONE || parties[i].was_up || run.unruly ||
		      run.cut_at < NEVER);
		if (parties[i].id)
			destroy(&parties[i]);
	}
	close_listener();
	CHECK_EQUAL(rdma->ibv_destroy_cq(cq), 0);
	CHECK_EQUAL(rdma->ibv_dealloc_pd(pd), 0);
	run_on(2 * soft_device.cm->limits.linger_ms * MS);
	CHECK_EQUAL(end_count, 0);
}

/* ---- silence, to the millisecond --------------------------------------------------------------- */

/* UNREACHABLE after so long. */
static void gives_up_after(struct rdma_cm_id *id, uint32_t milliseconds)
{
	struct rdma_cm_event *event;

	fuzz_pass_time((milliseconds - 1) * MS);
	CHECK_FAILS(rdma->rdma_get_cm_event(channel, &event), EAGAIN);
	fuzz_pass_time(MS);
	expect_status(channel, RDMA_CM_EVENT_UNREACHABLE, id, -ETIMEDOUT);
	CHECK_EQUAL(rdma->rdma_destroy_id(id), 0);
}

static void silence(bool loses)
{
	const struct soft_cm_message wait = {.type = SOFT_CM_MRA};
	const struct soft_cm_message request = {
		.type = SOFT_CM_REQ, .port_space = RDMA_PS_TCP, .qp_type = IBV_QPT_RC};
	struct rdma_conn_param said = {.qp_num = 100};
	struct side side = {.channel = channel};
	struct rdma_cm_event *event;

	begin(0);
	run.cut_at = 0;
	network.loses = loses;
	soft_device.cm->carrier = &network;
	listening = bound_id();
	/* Not a word; the first one; and that again, which changes nothing. */
	for (int words = 0; words < 3; words++) {
		side.id = bound_id();
		resolve_to(&side, host, port_of(listening));
		CHECK_EQUAL(rdma->rdma_connect(side.id, &said), 0);
		for (int i = 0; i < words; i++) {
			fuzz_pass_time(SECOND);
			deliver((struct flight){.conversation = words, .message = wait});
		}
		gives_up_after(side.id,
			       !words ? soft_device.cm->limits.response_ms
				      : soft_device.cm->limits.service_ms - 1000 * (words - 1));
	}
	/* Accepted, and no RTU comes. */
	CHECK_EQUAL(rdma->rdma_listen(listening, 0), 0);
	deliver((struct flight){.to = 1, .message = request});
	event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
	side.id = event->id;
	acknowledge(event);
	CHECK_EQUAL(rdma->rdma_accept(side.id, &said), 0);
	gives_up_after(side.id, soft_device.cm->limits.service_ms);
	close_listener();
	CHECK_EQUAL(end_count, 0);
}

/* A service that answers with nonsense, as fast as it can: some of it in each step. */
static void flood_of_answers(void)
{
	enum {
		MANY = 65 /* more than in one step */
	};
	union address own = address_of(host, 0), from;
	socklen_t length = sizeof(own.v4);
	struct side side = {.channel = channel};
	struct soft_cm_message question, answer = {.type = SOFT_SIDR_REP};
	uint8_t bytes[SOFT_CM_MESSAGE_MAX];
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct rdma_cm_event *event;
	size_t used;

	begin(0);
	CHECK_EQUAL(bind(fd, &own.any, length), 0);
	CHECK_EQUAL(getsockname(fd, &own.any, &length), 0);
	CHECK_EQUAL(rdma->rdma_create_id(channel, &side.id, NULL, RDMA_PS_UDP), 0);
	resolve_to(&side, host, ntohs(own.v4.sin_port));
	CHECK_EQUAL(rdma->rdma_connect(side.id, NULL), 0);
	ssize_t got = recvfrom(fd, bytes, sizeof(bytes), 0, &from.any, &length);

	CHECK_EQUAL(soft_cm_decode(bytes, (size_t)got, &question, &used), 0);
	for (int i = 0; i < MANY; i++)
		CHECK_EQUAL(sendto(fd, "?", 1, 0, &from.any, length), 1);
	answer.number = question.number;
	used = soft_cm_encode(&answer, bytes);
	CHECK_EQUAL(sendto(fd, bytes, used, 0, &from.any, length), (ssize_t)used);
	CHECK_FAILS(rdma->rdma_get_cm_event(channel, &event), EAGAIN); /* a step */
	expect_status(channel, RDMA_CM_EVENT_ESTABLISHED, side.id, 0);
	CHECK_EQUAL(rdma->rdma_destroy_id(side.id), 0);
	close(fd);
}

int main(int argc, char **argv)
{
	uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
	uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
	static char step[32];
	int before;

	cm_begin(100);
	CHECK(channel = rdma->rdma_create_event_channel());
	CHECK_EQUAL(fcntl(channel->fd, F_SETFL, O_NONBLOCK), 0);
	STEP(silence(false));
	STEP(flood_of_answers());
	STEP(silence(true)); /* as in the runs that follow */
	before = resources();
	current_step = step;
	for (uint64_t seed = first; seed < first + count; seed++) {
		snprintf(step, sizeof(step), "seed %llu", (unsigned long long)seed);
		begin(seed);
		one_run();
	}
	expect_resources(before);
	return 0;
}
