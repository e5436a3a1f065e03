/* Test the connection managers of two hosts in virtual time (wire.h). The network loses,
 * duplicates, delays and reorders their MADs, and may be cut for a while. Copies of some MADs
 * arrive from another address.
 *
 * The applications on both hosts respond, disconnect and destroy their ids at random times. A
 * listener may be closed, and a host may die and restart. Events must arrive once and in order,
 * every wait must end, private data and messages must be intact, and no resources may be left. If
 * the network recovers and the applications cooperate, every connection must succeed.
 */
#include "seeds.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "cm/cm_internal.h"
#include "cm/cm_mad.h"

enum {
	CLIENTS = 6,
	SIDR = 3, /* the client that requests the datagram service */
	PARTIES = 8 * CLIENTS, /* retries last a minute; rejections are forgotten after 10 s */
	MADS = 256, /* maximum number in flight */
	CLIENT_QPN = 0xffff00, /* QP numbers of applications; the device never assigns them */
	SERVER_QPN = 0xffff80,
	MESSAGE = 600, /* bytes; several packets */
	TRIES = 16, /* the first transmission and the maximum of 15 retries */
};

#define MS UINT64_C(1000000)
#define NEVER UINT64_MAX
#define LONG (100 * SECOND) /* longer than any timeout of the connection manager */

static struct {
	unsigned loss, doubling; /* per mille */
	uint64_t delay; /* maximum */
	uint64_t cut_at, heals_at;
	uint64_t closes_at; /* when host 1 closes its listeners */
	uint64_t dies_at; /* when host 1 dies */
	bool unruly; /* applications destroy ids and reject requests */
	bool hostile; /* a host on the path modifies MADs */
	bool quick; /* applications take events immediately */
	bool tcp; /* use real TCP streams instead of MADs */
	bool dead;
	bool v6; /* use IPv6 addresses */
} plan;

/* Returns whether every connection attempt must succeed. */
static bool is_peaceful(void)
{
	return !plan.unruly && plan.cut_at == NEVER && plan.dies_at == NEVER && !plan.dead;
}

/* ---- the network of MADs ----------------------------------------------------------------------- */

static const union ibv_gid stranger = {.raw = {[10] = 0xff, [11] = 0xff, 192, 0, 2, 1}};

static struct mad {
	uint64_t due; /* 0 if the entry is free */
	int to;
	union ibv_gid from_gid, to_gid;
	uint8_t bytes[SOFT_MAD_SIZE];
} mads[MADS];

static int mad_counts[16]; /* MADs sent, by message type */

/* Returns whether a GID belongs to no simulated host, because it is an IPv4 address outside of
 * 127.0.0.0/8. */
static bool is_unknown_host(const union ibv_gid *gid)
{
	return !memcmp(gid, &stranger, 12) && gid->raw[12] != 127;
}

static void queue_mad(struct mad mad)
{
	for (int i = 0; i < MADS; i++)
		if (!mads[i].due) {
			mads[i] = mad;
			mads[i].due = fuzz_now_ns + 1 + draw((uint32_t)plan.delay);
			return;
		}
	CHECK(!"a MAD too many is under way");
}

static void send_mad(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *bytes,
		     size_t length)
{
	struct mad mad = {.to = 1 - wire.entered, .from_gid = *from, .to_gid = *to};
	bool lost = chance(plan.loss) ||
		    (fuzz_now_ns >= plan.cut_at && fuzz_now_ns < plan.heals_at) ||
		    is_unknown_host(to);

	CHECK_EQUAL(length, SOFT_MAD_SIZE);
	memcpy(mad.bytes, bytes, length);
	mad_counts[bytes[17] & 15]++;
	note("%c sends MAD %x%s", "ab"[wire.entered], bytes[17], lost ? ", lost" : "");
	if (!lost)
		queue_mad(mad);
	if (!lost && chance(plan.doubling))
		queue_mad(mad);
	if (plan.hostile && chance(200)) {
		for (uint32_t i = draw(3); i < 3; i++)
			mad.bytes[draw(SOFT_MAD_SIZE)] = (uint8_t)draw(256);
		queue_mad(mad);
	}
	if (chance(50)) { /* another host sends a copy of the MAD, or a REJ */
		mad.from_gid = stranger;
		mad.bytes[17] = chance(500) ? bytes[17] : 0x12;
		queue_mad(mad);
	}
}

static int held[SIDES], hold_error;

static int hold(void)
{
	if (!hold_error)
		held[wire.entered]++;
	return hold_error;
}

static void release(void)
{
	held[wire.entered]--;
}

static bool is_shared(const union ibv_gid *gid)
{
	(void)gid;
	return false;
}

static const struct soft_gsi_calls gsi = {
	.hold = hold, .release = release, .is_shared = is_shared, .send = send_mad};

static enum ibv_mtu least_mtu(const struct soft_hca *hca)
{
	(void)hca;
	return IBV_MTU_256;
}

static void deliver(struct mad *mad)
{
	struct mad got = *mad;

	mad->due = 0;
	enter(got.to);
	note("%c gets MAD %x", "ab"[got.to], got.bytes[17]);
	soft_lock();
	soft_cm_mad_received(&got.from_gid, &got.to_gid, got.bytes, sizeof(got.bytes));
	soft_unlock();
}

/* ---- hosts ------------------------------------------------------------------------------------- */

static struct soft_link_calls links[SIDES];

static struct application {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listening, *service; /* listeners for connections and for datagrams */
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	uint16_t port, service_port;
} applications[SIDES];

static struct application *at(int host)
{
	enter(host);
	return &applications[host];
}

static struct sockaddr_in local_address(uint16_t port)
{
	return (struct sockaddr_in){.sin_family = AF_INET,
				    .sin_port = htons(port),
				    .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static struct rdma_cm_id *open_listener(int host, enum rdma_port_space space, int backlog)
{
	struct sockaddr_in address = local_address(0);
	struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	struct rdma_cm_id *id;

	CHECK_OK(verbs->rdma_create_id(at(host)->channel, &id, NULL, space));
	CHECK_OK(verbs->rdma_bind_addr(id, plan.v6 ? (struct sockaddr *)&v6
						   : (struct sockaddr *)&address));
	CHECK_OK(verbs->rdma_listen(id, backlog));
	return id;
}

static void open_host(int host, int backlog)
{
	struct application *it = at(host);

	CHECK(it->channel = verbs->rdma_create_event_channel());
	soft_lock();
	soft_cm_use_gsi(plan.tcp ? NULL : &gsi);
	links[host] = *soft_links;
	links[host].active_mtu = least_mtu;
	soft_links = &links[host];
	soft_unlock();
	CHECK_OK(fcntl(it->channel->fd, F_SETFL, O_NONBLOCK));
	it->listening = open_listener(host, RDMA_PS_TCP, backlog);
	it->service = open_listener(host, RDMA_PS_UDP, backlog);
	it->port = ntohs(verbs->rdma_get_src_port(it->listening));
	it->service_port = ntohs(verbs->rdma_get_src_port(it->service));
	CHECK(it->pd = verbs->ibv_alloc_pd(it->listening->verbs));
	CHECK(it->cq = verbs->ibv_create_cq(it->listening->verbs, 64, NULL, NULL, 0));
}

static void close_listeners(int host)
{
	struct application *it = at(host);

	if (!it->listening)
		return;
	CHECK_OK(verbs->rdma_destroy_id(it->listening));
	CHECK_OK(verbs->rdma_destroy_id(it->service));
	it->listening = it->service = NULL;
}

static void close_host(int host)
{
	struct application *it = at(host);

	close_listeners(host);
	CHECK_OK(verbs->ibv_destroy_cq(it->cq));
	CHECK_OK(verbs->ibv_dealloc_pd(it->pd));
	verbs->rdma_destroy_event_channel(it->channel);
	CHECK_EQUAL(soft_device.cm->gsi.ids.count, 0);
	CHECK_EQUAL(held[host], 0);
	CHECK(soft_list_empty(&soft_device.cm->gsi.conversations));
}

/* ---- the applications -------------------------------------------------------------------------- */

/* State of an id from the application's point of view. */
enum phase {
	NONE,
	RESOLVES,
	ROUTES,
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
	{RESOLVES, RDMA_CM_EVENT_ADDR_RESOLVED, ROUTES},
	{ROUTES, RDMA_CM_EVENT_ROUTE_RESOLVED, ASKED},
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
	{ACCEPTED, RDMA_CM_EVENT_CONNECT_ERROR, FAILED},
	{ACCEPTED, RDMA_CM_EVENT_DISCONNECTED, DOWN}, /* only if the application disconnects */
	{UP, RDMA_CM_EVENT_DISCONNECTED, DOWN},
	{DOWN, RDMA_CM_EVENT_TIMEWAIT_EXIT, GONE},
};

static struct party {
	struct rdma_cm_id *id;
	enum phase phase;
	int host;
	bool was_up, received;
	bool ends; /* whether it has called rdma_disconnect() */
	unsigned number; /* the client's number, on both sides */
	uint32_t qpn; /* QP number that the application reports */
	uint64_t acts_at;
	struct ibv_mr *mr; /* registration of `memory` */
	uint8_t memory[2 * MESSAGE];
} parties[PARTIES]; /* the clients come first */

static void act_later(struct party *party, uint64_t most)
{
	party->acts_at = fuzz_now_ns + fuzz_next(&wire.random) % most;
}

/* One client asks for the datagram service. */
static bool wants_datagrams(unsigned number)
{
	return number == SIDR;
}

/* Returns whether the party creates a queue pair with rdma_create_qp(). Both sides of
 * every connection with an odd number do so. */
static bool has_queue_pair(const struct party *party)
{
	return party->number % 2 && !wants_datagrams(party->number);
}

static bool is_client(const struct party *party)
{
	return party < parties + CLIENTS;
}

/* Returns the fill pattern of the private data and messages that the party sends, or that it
 * expects if `own` is false. */
static unsigned pattern_of(const struct party *party, bool own)
{
	return party->number + (is_client(party) == own ? 0 : 100);
}

static void destroy(struct party *party)
{
	enter(party->host);
	if (party->id->qp)
		verbs->rdma_destroy_qp(party->id);
	if (party->mr)
		CHECK_OK(verbs->ibv_dereg_mr(party->mr));
	CHECK_OK(verbs->rdma_destroy_id(party->id));
	note("%c destroys %u", "ab"[party->host], party->number);
	party->id = NULL;
	party->mr = NULL;
	party->phase = DESTROYED;
}

static void make_queue_pair(struct party *party)
{
	const struct application *it = at(party->host);
	struct ibv_qp_init_attr attr = {
		.send_cq = it->cq, .recv_cq = it->cq, .qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1}};
	struct ibv_recv_wr receive = {.wr_id = (uint64_t)(party - parties) * 2, .num_sge = 1};
	struct ibv_recv_wr *bad;

	if (!has_queue_pair(party))
		return;
	CHECK_OK(verbs->rdma_create_qp(party->id, it->pd, &attr));
	CHECK(party->mr = verbs->ibv_reg_mr(it->pd, party->memory, sizeof(party->memory),
					    IBV_ACCESS_LOCAL_WRITE));
	fill(party->memory, MESSAGE, pattern_of(party, true));
	receive.sg_list =
		&(struct ibv_sge){(uintptr_t)party->memory + MESSAGE, MESSAGE, party->mr->lkey};
	CHECK_OK(party->id->verbs->ops.post_recv(party->id->qp, &receive, &bad));
}

static void send_message(struct party *party)
{
	struct ibv_send_wr send = {.wr_id = (uint64_t)(party - parties) * 2 + 1,
				   .num_sge = 1,
				   .opcode = IBV_WR_SEND,
				   .send_flags = IBV_SEND_SIGNALED};
	struct ibv_send_wr *bad;

	if (!has_queue_pair(party))
		return;
	send.sg_list = &(struct ibv_sge){(uintptr_t)party->memory, MESSAGE, party->mr->lkey};
	CHECK_OK(party->id->verbs->ops.post_send(party->id->qp, &send, &bad));
}

static bool poll_completions(int host)
{
	struct application *it = at(host);
	struct ibv_wc wc;
	bool any = false;

	while (it->cq->context->ops.poll_cq(it->cq, 1, &wc)) {
		struct party *party = &parties[wc.wr_id / 2];

		any = true;
		if (!party->id || wc.status != IBV_WC_SUCCESS) /* destroyed queue pairs flush */
			continue;
		note("%c completes %u", "ab"[host], (unsigned)wc.wr_id);
		if (wc.wr_id % 2)
			continue;
		CHECK(!party->received && wc.byte_len == MESSAGE);
		CHECK(plan.hostile ||
		      is_filled(party->memory + MESSAGE, MESSAGE, pattern_of(party, false)));
		party->received = true;
		if (party->phase == UP)
			act_later(party, LONG);
	}
	return any;
}

static struct rdma_conn_param parameters(const struct party *party, uint8_t *room, uint8_t length)
{
	fill(room, length, pattern_of(party, true));
	return (struct rdma_conn_param){.qp_num = party->qpn,
					.private_data = room,
					.private_data_len = length,
					.responder_resources = 1,
					.initiator_depth = 1,
					.retry_count = 7,
					.rnr_retry_count = 7};
}

static void send_connect_request(struct party *party)
{
	uint8_t room[SOFT_SIDR_REQ_PRIVATE];
	struct rdma_conn_param said = parameters(
		party, room, wants_datagrams(party->number) ? sizeof(room) : SOFT_CM_REQ_PRIVATE);

	make_queue_pair(party);
	CHECK_OK(verbs->rdma_connect(party->id, &said));
	if (plan.unruly && chance(500))
		act_later(party, 20 * SECOND);
}

static void start_client(int number, int host, uint16_t port)
{
	struct party *party = &parties[number];
	const struct application *other = &applications[1 - host];
	bool datagrams = wants_datagrams((unsigned)number);
	struct sockaddr_storage address =
		(datagrams ? other->service : other->listening)->route.addr.src_storage;

	*party = (struct party){.phase = RESOLVES,
				.host = host,
				.number = (unsigned)number,
				.qpn = CLIENT_QPN + (uint32_t)number,
				.acts_at = NEVER};
	CHECK_OK(verbs->rdma_create_id(at(party->host)->channel, &party->id, NULL,
				       datagrams ? RDMA_PS_UDP : RDMA_PS_TCP));
	if (port)
		((struct sockaddr_in *)&address)->sin_port = htons(port);
	CHECK_OK(verbs->rdma_resolve_addr(party->id, NULL, (struct sockaddr *)&address, 1));
}

static void on_established(struct party *party)
{
	party->was_up = true;
	if (is_client(party))
		send_message(party);
	/* In a peaceful run, a party that expects a message stays connected until it arrives. */
	if (!has_queue_pair(party) || party->received || !is_peaceful())
		act_later(party, LONG);
}

/* Finish a service lookup. No further events are expected. */
static void on_service_found(struct party *party)
{
	party->was_up = true;
	party->phase = GONE;
}

static void answer_request(struct party *party)
{
	uint8_t room[SOFT_CM_REP_PRIVATE];
	bool datagrams = wants_datagrams(party->number);
	struct rdma_conn_param said =
		parameters(party, room, datagrams ? SOFT_SIDR_REP_PRIVATE : SOFT_CM_REP_PRIVATE);

	if (plan.unruly && chance(200)) {
		/* The call fails if the request was withdrawn. */
		(void)verbs->rdma_reject(party->id, room, SOFT_SIDR_REP_PRIVATE);
		party->phase = FAILED;
		return;
	}
	if (datagrams) {
		CHECK_OK(verbs->rdma_accept(party->id, &said));
		on_service_found(party);
		if (chance(500))
			destroy(party);
		return;
	}
	make_queue_pair(party);
	if (verbs->rdma_accept(party->id, &said)) { /* the request was withdrawn */
		CHECK_EQUAL(errno, EINVAL);
		CHECK(!is_peaceful());
		party->phase = FAILED;
		return;
	}
	party->phase = ACCEPTED;
	send_message(party);
	if (plan.unruly && chance(500))
		act_later(party, LONG);
}

/* Make the party's next call. The call may fail if the peer has already acted and the event that
 * reports this is still pending. */
static void act(struct party *party)
{
	enter(party->host);
	party->acts_at = NEVER;
	note("%c acts on %u in phase %d", "ab"[party->host], party->number, party->phase);
	if (plan.unruly && chance(250)) {
		destroy(party);
	} else if (party->phase == RESPONDED) {
		if (!verbs->rdma_establish(party->id)) {
			party->phase = UP;
			on_established(party);
		} else {
			CHECK_EQUAL(errno, EINVAL);
		}
	} else if (party->phase == REQUESTED) {
		answer_request(party);
	} else if (party->phase == ACCEPTED || party->phase == UP) {
		CHECK_OK(verbs->rdma_disconnect(party->id));
		party->ends = true;
	}
}

/* ---- events ------------------------------------------------------------------------------------ */

/* Returns whether a service request may be reported twice. This happens if all responses are lost
 * until the server has forgotten the request. */
static bool may_be_requested_twice(void)
{
	return plan.cut_at < NEVER || plan.dead || plan.loss > 50 || plan.tcp;
}

/* Take an event for an unknown id, which must be a connect request. */
static void take_request(int host, const struct rdma_cm_event *event)
{
	struct party *party = parties + CLIENTS;
	const uint8_t *said = event->param.conn.private_data; /* param.ud begins the same way */
	bool datagrams = event->listen_id == applications[host].service;
	uint8_t length = datagrams ? SOFT_SIDR_REQ_PRIVATE : SOFT_CM_REQ_PRIVATE;

	CHECK_EQUAL(event->event, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(datagrams || event->listen_id == applications[host].listening);
	CHECK_EQUAL(event->param.conn.private_data_len, length);
	CHECK(plan.hostile || (said[0] < CLIENTS && is_filled(said, length, said[0])));
	unsigned number = datagrams ? SIDR : said[0] % CLIENTS;

	if (plan.hostile && wants_datagrams(number) != datagrams)
		number--; /* modified on the path */
	CHECK_EQUAL(wants_datagrams(number), datagrams);
	/* A second request from a client is valid only if the first was rejected or has ended. */
	for (; party->phase != NONE; party++)
		CHECK(party->number != number || plan.hostile ||
		      (datagrams ? may_be_requested_twice() : party->phase >= DOWN));
	CHECK(party < parties + PARTIES - 1);
	*party = (struct party){.id = event->id,
				.phase = REQUESTED,
				.host = host,
				.number = number,
				.qpn = SERVER_QPN + number};

	CHECK(has_queue_pair(party) || plan.hostile || datagrams ||
	      event->param.conn.qp_num == parties[number].qpn);
	CHECK(!parties[number].id || plan.hostile ||
	      verbs->rdma_get_dst_port(event->id) == verbs->rdma_get_src_port(parties[number].id));
	note("%c is asked by %u", "ab"[host], party->number);
	act_later(party, 5 * SECOND);
}

/* Check that an action of the peer explains the rejection reason (IBTA 12.6.7.2). */
static void check_rejection(const struct party *party, const struct rdma_cm_event *event)
{
	if (plan.hostile)
		return;
	switch (event->status) {
	case SOFT_CM_REASON_INVALID_SERVICE_ID:
		CHECK(plan.closes_at < NEVER || plan.dead);
		break;
	case SOFT_CM_REASON_TIMEOUT:
		CHECK(plan.unruly && !is_client(party));
		break;
	case SOFT_CM_REASON_CONSUMER:
		CHECK(plan.unruly || plan.closes_at < NEVER || plan.dead);
		break;
	default:
		CHECK(event->status == SOFT_CM_REASON_INVALID_ID ||
		      event->status == SOFT_CM_REASON_STALE);
		CHECK(plan.dead || plan.unruly || plan.cut_at < NEVER);
	}
}

/* Check that the status of a failed service lookup is plausible: a SIDR status (IBTA 12.11.2), or
 * -ETIMEDOUT without a response. */
static void check_not_found(const struct rdma_cm_event *event)
{
	if (plan.hostile)
		return;
	if (event->status == SOFT_SIDR_NO_SERVICE)
		CHECK(plan.closes_at < NEVER || plan.dead);
	else if (event->status == SOFT_SIDR_REJECTED)
		CHECK(plan.unruly || plan.closes_at < NEVER || plan.dead);
	else
		CHECK(event->status == -ETIMEDOUT && (plan.cut_at < NEVER || plan.dead));
}

static void check_private_data(const struct party *party, const struct rdma_cm_event *event)
{
	const struct rdma_ud_param *ud = &event->param.ud;

	if (plan.hostile)
		return;
	if (wants_datagrams(party->number)) {
		if (event->event != RDMA_CM_EVENT_ESTABLISHED)
			return;
		CHECK_EQUAL(ud->private_data_len, SOFT_SIDR_REP_PRIVATE);
		CHECK(is_filled(ud->private_data, SOFT_SIDR_REP_PRIVATE, pattern_of(party, false)));
		CHECK_EQUAL(ud->qp_num, SERVER_QPN + party->number);
		CHECK_EQUAL(ud->qkey, RDMA_UDP_QKEY);
		return;
	}
	if (event->event == RDMA_CM_EVENT_CONNECT_RESPONSE ||
	    (event->event == RDMA_CM_EVENT_ESTABLISHED && is_client(party))) {
		CHECK_EQUAL(event->param.conn.private_data_len, SOFT_CM_REP_PRIVATE);
		CHECK(is_filled(event->param.conn.private_data, SOFT_CM_REP_PRIVATE,
				pattern_of(party, false)));
		CHECK(has_queue_pair(party) ||
		      event->param.conn.qp_num == SERVER_QPN + party->number);
	}
}

static enum phase phase_after(const struct party *party, const struct rdma_cm_event *event)
{
	FOR_EACH (i, allowed)
		if (allowed[i].before == party->phase && allowed[i].event == event->event)
			return allowed[i].after;
	fprintf(stderr, "phase %d: %s %d\n", party->phase, verbs->rdma_event_str(event->event),
		event->status);
	CHECK(!"an event that may come now");
	return party->phase;
}

static void take_event(int host, const struct rdma_cm_event *event)
{
	struct party *party = parties;
	enum phase before;

	while (party < parties + PARTIES && party->id != event->id)
		party++;
	note("%c: %s %d of %d", "ab"[host], verbs->rdma_event_str(event->event), event->status,
	     party < parties + PARTIES ? (int)party->number : -1);
	if (party == parties + PARTIES) {
		take_request(host, event);
		return;
	}
	before = party->phase;
	party->phase = phase_after(party, event);
	CHECK(before != ACCEPTED || party->phase != DOWN || party->ends);
	check_private_data(party, event);
	if (event->event == RDMA_CM_EVENT_REJECTED)
		check_rejection(party, event);
	else if (party->phase == FAILED || (party->phase == DOWN && event->status))
		CHECK(!is_peaceful());
	if (party->phase == FAILED && wants_datagrams(party->number))
		check_not_found(event);
	if (party->phase == ROUTES)
		CHECK_OK(verbs->rdma_resolve_route(party->id, 1));
	else if (party->phase == ASKED)
		send_connect_request(party);
	else if (party->phase == RESPONDED)
		act_later(party, 5 * SECOND);
	else if (party->phase == UP && wants_datagrams(party->number))
		on_service_found(party);
	else if (party->phase == UP)
		on_established(party);
}

/* Take all pending events and completions. Returns whether there were any. */
static bool take_events(void)
{
	struct rdma_cm_event *event;
	bool any = false;

	for (int host = 0; host < SIDES; host++) {
		any |= poll_completions(host);
		for (int i = 0; plan.tcp && i < 8; i++)
			soft_progress();
		while (!verbs->rdma_get_cm_event(at(host)->channel, &event)) {
			struct rdma_cm_event seen = *event;
			uint8_t said[SOFT_CM_PRIVATE_MAX];

			if (event->param.conn.private_data_len)
				seen.param.conn.private_data =
					memcpy(said, event->param.conn.private_data,
					       event->param.conn.private_data_len);
			CHECK_OK(verbs->rdma_ack_cm_event(event));
			take_event(host, &seen);
			any = true;
		}
		CHECK_EQUAL(errno, EAGAIN);
	}
	return any;
}

/* ---- a run ------------------------------------------------------------------------------------- */

static uint64_t next_event_time(void)
{
	uint64_t next = wire_next();

	for (int i = 0; i < MADS; i++)
		if (mads[i].due && mads[i].due < next)
			next = mads[i].due;
	for (int i = 0; i < PARTIES; i++)
		if (parties[i].id && parties[i].acts_at < next)
			next = parties[i].acts_at;
	if (plan.dies_at < next)
		next = plan.dies_at;
	return applications[1].listening && plan.closes_at < next ? plan.closes_at : next;
}

static void restart_host(void)
{
	bury(&applications[1], sizeof(applications[1]));
	held[1] = 0;
	die(1, chance(500));
	note("b begins anew");
	plan.dead = true;
	plan.dies_at = NEVER; /* the host dies only once */
	for (int i = 0; i < PARTIES; i++)
		if (parties[i].id && parties[i].host == 1) {
			parties[i].id = NULL;
			parties[i].phase = DESTROYED;
		}
	open_host(1, 0);
	plan.closes_at = NEVER;
	start_client(CLIENTS - 1, (int)draw(SIDES), 0);
}

/* Advance the hosts and the network, but not the applications. */
static void network_step(uint64_t next)
{
	if (wire_next() <= next)
		wire_step();
	else if (next > fuzz_now_ns)
		fuzz_now_ns = next;
	for (int i = 0; i < MADS; i++)
		if (mads[i].due && mads[i].due <= fuzz_now_ns)
			deliver(&mads[i]);
}

static void one_step(uint64_t next)
{
	network_step(next);
	if (plan.quick || chance(500)) /* sometimes applications act before they see the events */
		take_events();
	if (plan.closes_at <= fuzz_now_ns)
		close_listeners(1);
	if (plan.dies_at <= fuzz_now_ns)
		restart_host();
	for (int i = 0; i < PARTIES; i++)
		if (parties[i].id && parties[i].acts_at <= fuzz_now_ns)
			act(&parties[i]);
}

/* Run until nothing is pending. */
static void run_until_idle(void)
{
	uint64_t end = fuzz_now_ns + 4 * LONG, next;

	take_events();
	while ((next = next_event_time()) < NEVER || take_events())
		if (next < NEVER) {
			CHECK(next <= end);
			one_step(next);
		}
}

static uint64_t random_time_or_never(unsigned per_mille, uint64_t most)
{
	return chance(per_mille) ? fuzz_now_ns + fuzz_next(&wire.random) % most : NEVER;
}

static void draw_plan(void)
{
	static const uint64_t delays[] = {1, MS, 100 * MS, SECOND};

	/* Keep the loss below 200 per mille. At 300 per mille, all 13 attempts to exchange a REP
	 * and an RTU would fail for about one connection in 10,000. */
	plan.loss = chance(500) ? draw(200) : 0;
	plan.doubling = chance(500) ? draw(500) : 0;
	plan.delay = delays[draw(4)];
	plan.cut_at = random_time_or_never(200, 20 * SECOND);
	plan.heals_at = chance(500) ? NEVER : plan.cut_at + fuzz_next(&wire.random) % LONG;
	plan.tcp = chance(100);
	if (plan.tcp)
		plan.cut_at = NEVER;
	plan.quick = plan.tcp;
	plan.unruly = plan.tcp || chance(500);
	plan.closes_at = plan.unruly ? random_time_or_never(200, 10 * SECOND) : NEVER;
	plan.hostile = plan.unruly && !plan.tcp && chance(400);
	plan.dies_at = plan.tcp ? NEVER : random_time_or_never(200, 20 * SECOND);
	plan.v6 = chance(200);
	calls.max_frame = (1 + draw(FRAME_MOST / UNIT)) * UNIT;
}

/* Destroy all ids and close the hosts. The second round handles requests that arrive during the
 * first. */
static void close_all(void)
{
	for (int rounds = 0; rounds < 2; rounds++) {
		for (int i = 0; i < PARTIES; i++)
			if (parties[i].id)
				destroy(&parties[i]);
		run_until_idle();
	}
	for (int i = 0; i < SIDES; i++)
		close_host(i);
}

static void random_connections_follow_the_event_order(void)
{
	draw_plan();
	for (int i = 0; i < SIDES; i++)
		open_host(i, chance(200) ? 1 : 0);
	for (int i = 0; i < CLIENTS - 1; i++)
		start_client(i, (int)draw(SIDES), 0);
	run_until_idle();
	for (int i = 0; i < PARTIES; i++) {
		const struct party *party = &parties[i];

		CHECK(party->phase == NONE || party->phase == REQUESTED || party->phase >= GONE);
		CHECK(party->phase == NONE || party->was_up || !is_peaceful());
		CHECK(party->phase == NONE || party->received || !is_peaceful() ||
		      !has_queue_pair(party));
	}
	close_all();
	if (plan.tcp) /* the kernel's timing is not deterministic */
		wire.trace_hash = 0;
}

/* ---- one thing at a time ----------------------------------------------------------------------- */

/* Start a client on host 0. The network loses nothing, and applications take events immediately. */
static struct party *start_one_client(void)
{
	plan.delay = MS;
	plan.cut_at = plan.heals_at = plan.closes_at = plan.dies_at = NEVER;
	plan.quick = true;
	for (int i = 0; i < SIDES; i++)
		open_host(i, 0);
	start_client(0, 0, 0);
	return &parties[0];
}

/* Returns the party that serves the first connect request. */
static struct party *server(void)
{
	return &parties[CLIENTS];
}

static void wait_until(const struct party *party, enum phase phase, bool acts)
{
	uint64_t end = fuzz_now_ns + LONG;

	while (take_events(), party->phase != phase) {
		uint64_t next = next_event_time();

		CHECK(next <= end);
		one_step(next);
		for (int i = 0; i < PARTIES && !acts; i++)
			parties[i].acts_at = NEVER;
	}
}

/* Cut the network, and check that the party fails exactly `milliseconds` later. */
static void expect_gives_up_after(const struct party *party, uint32_t milliseconds)
{
	uint64_t asked = fuzz_now_ns;

	plan.cut_at = fuzz_now_ns;
	plan.unruly = true; /* allow any later outcome */
	wait_until(party, FAILED, false);
	CHECK_EQUAL(fuzz_now_ns - asked, milliseconds * MS);
}

/* Test a server that never responds, or that sends only an MRA. The MRA asks the client to give the
 * server's application more time. */
static void client_gives_up_on_a_silent_server(void)
{
	struct party *client = start_one_client();
	bool heard = chance(500);

	client->acts_at = NEVER;
	plan.cut_at = heard ? NEVER : fuzz_now_ns;
	wait_until(client, ASKED, false);
	while (heard && !mad_counts[1])
		one_step(next_event_time());
	while (heard && soft_cm_id_of(client->id)->link->highest_received != SOFT_CM_MRA)
		one_step(next_event_time());
	expect_gives_up_after(client, heard ? soft_device.cm->limits.service_ms
					    : soft_device.cm->limits.response_ms);
	close_all();
}

/* Check that a client that has received an MRA does not repeat its REQ during the time named in the
 * MRA (IBTA 12.6.6). The rejection is lost at first, and is sent again in response to the repeated
 * REQ. */
static void mra_delays_the_repeated_request(void)
{
	struct party *client = start_one_client();
	uint64_t told;
	int asked;

	wait_until(client, ASKED, false);
	while (soft_cm_id_of(client->id)->link->highest_received != SOFT_CM_MRA)
		one_step(next_event_time());
	told = fuzz_now_ns;
	asked = mad_counts[0];
	wait_until(server(), REQUESTED, false);
	plan.unruly = true;
	plan.cut_at = fuzz_now_ns;
	plan.heals_at = fuzz_now_ns + SECOND;
	enter(1);
	CHECK_OK(verbs->rdma_reject(server()->id, NULL, 0));
	server()->phase = FAILED;
	while (mad_counts[0] == asked)
		one_step(next_event_time());
	CHECK_EQUAL(fuzz_now_ns - told, UINT64_C(4096) << 20);
	wait_until(client, FAILED, false);
	CHECK(fuzz_now_ns - told < 5 * SECOND);
	close_all();
}

/* Request a datagram service at a port that offers only connections. The client must retry, because
 * the server may be replacing its listener, as perftest's does. Each request gets one response, and
 * the server keeps no state. */
static void lookup_retries_while_port_has_no_service(void)
{
	struct party *client = &parties[SIDR];

	start_one_client();
	destroy(&parties[0]);
	start_client(SIDR, 0, applications[1].port); /* port of the connection listener */
	plan.dead = true; /* allows "no service" */
	wait_until(client, FAILED, false);
	CHECK(mad_counts[8] > 1 && mad_counts[8] <= 12); /* the retry interval grows */
	enter(1);
	CHECK_EQUAL(soft_device.cm->gsi.ids.count, 0);
	close_all();
}

/* Open a UDP socket for the test, and store its port in `port`. */
static int open_udp_socket(uint16_t *port)
{
	struct sockaddr_in address = local_address(0);
	socklen_t length = sizeof(address);
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	CHECK_OK(bind(fd, (struct sockaddr *)&address, length));
	CHECK_OK(getsockname(fd, (struct sockaddr *)&address, &length));
	*port = ntohs(address.sin_port);
	return fd;
}

/* Test a datagram service that floods the client with invalid responses. Each step reads only some
 * of them. */
static void valid_response_is_found_among_a_flood(void)
{
	enum {
		MANY = 65 /* more than one step reads */
	};
	struct soft_cm_message question, answer = {.type = SOFT_SIDR_REP};
	uint8_t bytes[SOFT_MAD_SIZE];
	struct sockaddr_in to, from;
	socklen_t length = sizeof(from);
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	uint16_t port;
	int fd = open_udp_socket(&port);

	plan.tcp = true;
	open_host(0, 0);
	to = local_address(port);
	CHECK_OK(verbs->rdma_create_id(at(0)->channel, &id, NULL, RDMA_PS_UDP));
	CHECK_OK(verbs->rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1));
	CHECK_OK(verbs->rdma_resolve_route(id, 1));
	for (int i = 0; i < 2; i++) {
		CHECK_OK(verbs->rdma_get_cm_event(at(0)->channel, &event));
		CHECK_OK(verbs->rdma_ack_cm_event(event));
	}
	CHECK_OK(verbs->rdma_connect(id, NULL));
	ssize_t got = recvfrom(fd, bytes, sizeof(bytes), 0, (struct sockaddr *)&from, &length);

	CHECK_EQUAL(soft_cm_decode(bytes, (size_t)got, &question), 0);
	for (int i = 0; i < MANY; i++)
		CHECK_EQUAL(sendto(fd, "?", 1, 0, (struct sockaddr *)&from, length), 1);
	answer.number = question.number;
	soft_cm_encode(&answer, bytes);
	CHECK(sendto(fd, bytes, sizeof(bytes), 0, (struct sockaddr *)&from, length) > 0);
	CHECK_FAILS(verbs->rdma_get_cm_event(at(0)->channel, &event), EAGAIN); /* after one step */
	CHECK_OK(verbs->rdma_get_cm_event(at(0)->channel, &event));
	CHECK_EQUAL(event->event, RDMA_CM_EVENT_ESTABLISHED);
	CHECK_OK(verbs->rdma_ack_cm_event(event));
	CHECK_OK(verbs->rdma_destroy_id(id));
	close(fd);
	close_host(0);
}

/* Test a client that never sends an RTU. The server repeats its REP as often as the REQ allows
 * (IBTA 12.7.27). */
static void server_gives_up_on_a_silent_client(void)
{
	start_one_client();
	wait_until(server(), REQUESTED, false);
	enter(server()->host);
	answer_request(server());
	expect_gives_up_after(server(), soft_device.cm->limits.service_ms);
	CHECK(mad_counts[3] > 5 && mad_counts[3] <= TRIES);
	CHECK(mad_counts[0] <= TRIES);
	close_all();
}

/* Destroy a client that has not received a response, and so does not know the server's
 * communication ID. A late copy of its request must not be reported. */
static void late_copy_of_withdrawn_request_is_ignored(void)
{
	struct party *client = start_one_client();
	struct mad request;

	plan.delay = 1;
	wait_until(client, ASKED, false);
	request = mads[0]; /* the first MAD sent */
	plan.unruly = true;
	plan.delay = 100 * MS;
	destroy(client);
	wait_until(server(), REQUESTED, false);
	while (soft_cm_id_of(server()->id)->state == SOFT_CM_REQUESTED) {
		for (int i = 0; i < MADS; i++) /* drop MADs to the client */
			mads[i].due = mads[i].to ? mads[i].due : 0;
		one_step(next_event_time());
	}
	deliver(&request);
	take_events();
	CHECK_EQUAL(server()[1].phase, NONE);
	enter(1);
	CHECK_FAILS(verbs->rdma_accept(server()->id, &(struct rdma_conn_param){.qp_num = 7}),
		    EINVAL);
	close_all();
}

static void connect_and_establish(struct party *client)
{
	wait_until(server(), REQUESTED, false);
	act(server());
	wait_until(client, RESPONDED, false);
	act(client);
	wait_until(server(), UP, false);
}

/* Deliver a copy of a request after its connection has ended. It must not be reported. */
static void late_copy_of_ended_request_is_ignored(void)
{
	struct party *client = start_one_client();
	struct mad request;

	wait_until(client, ASKED, false);
	request = mads[0]; /* the first MAD sent */
	connect_and_establish(client);
	act(server());
	wait_until(server(), GONE, false);
	deliver(&request);
	take_events();
	CHECK_EQUAL(server()[1].phase, NONE);
	close_all();
}

/* Reject the first REQ of a client after its second REQ has been accepted, as if a listener was
 * opened between the two. The client must ignore the late rejection. */
static void late_rejection_is_ignored(void)
{
	struct party *client = start_one_client();
	struct mad request, rejection;
	struct soft_cm_mad said;

	wait_until(client, ASKED, false);
	request = mads[0];
	wait_until(server(), REQUESTED, false);
	act(server());
	wait_until(client, RESPONDED, false);
	CHECK(soft_cm_mad_decode(request.bytes, sizeof(request.bytes), &said));
	said.message = (struct soft_cm_message){.type = SOFT_CM_REJ,
						.reason = SOFT_CM_REASON_INVALID_SERVICE_ID};
	said.responds_to = SOFT_CM_RESPONDS_TO_REQ;
	said.remote_id = said.local_id;
	said.local_id = 0;
	rejection = (struct mad){.from_gid = request.to_gid, .to_gid = request.from_gid};
	soft_cm_mad_encode(&said, rejection.bytes);
	deliver(&rejection);
	client->acts_at = NEVER;
	for (const uint64_t until = fuzz_now_ns + 10 * MS; next_event_time() <= until;)
		one_step(next_event_time());
	take_events();
	CHECK_EQUAL(client->phase, RESPONDED);
	act(client);
	wait_until(server(), UP, false);
	close_all();
}

/* Disconnect from a host that has restarted. It has no record of the connection, but confirms the
 * disconnect immediately. */
static void restarted_host_confirms_a_disconnect(void)
{
	struct party *client = start_one_client();

	connect_and_establish(client);
	restart_host();
	parties[CLIENTS - 1].acts_at = NEVER;
	enter(0);
	CHECK_OK(verbs->rdma_disconnect(client->id));
	wait_until(client, GONE, false);
	while (next_event_time() < fuzz_now_ns + SECOND)
		one_step(next_event_time());
	CHECK_EQUAL(mad_counts[5], 1);
	CHECK(mad_counts[6] > 0); /* more than 1 if a copied DREQ is confirmed as well */
	plan.unruly = true;
	close_all();
}

/* Request a connection for a queue pair that is already connected here, as a restarted peer does.
 * The old connection ends and the request is rejected, but the next request succeeds (IBTA
 * 12.9.8.3.1). */
static void request_for_connected_qp_ends_the_stale_connection(void)
{
	struct party *client = start_one_client();
	const int host = (int)draw(SIDES); /* appears to have restarted */
	const struct party *old = host ? server() : client, *peer = host ? client : server();

	plan.dead = true; /* allows "stale" */
	plan.doubling = 1000; /* every MAD arrives twice */
	connect_and_establish(client);
	for (int i = 1; i < 3; i++) {
		start_client(2 * i, host, 0);
		parties[2 * i].qpn = old->qpn;
		if (i == 1) {
			wait_until(&parties[2], FAILED, false);
			CHECK(peer->phase == DOWN || peer->phase == GONE);
			wait_until(old, GONE, false); /* the old party is notified */
		}
	}
	wait_until(&parties[CLIENTS + 1], REQUESTED, false);
	close_all();
}

/* Deliver a copy of a MAD with other IDs and the changes that `change` makes. */
static void deliver_forged(struct mad mad, void (*change)(struct soft_cm_mad *mad))
{
	struct soft_cm_mad said;

	CHECK(soft_cm_mad_decode(mad.bytes, sizeof(mad.bytes), &said));
	said.local_id++;
	said.transaction++;
	change(&said);
	soft_cm_mad_encode(&said, mad.bytes);
	deliver(&mad);
}

static void clear_qpn(struct soft_cm_mad *mad)
{
	mad->message.qpn = 0;
}

static void set_invalid_mtu(struct soft_cm_mad *mad)
{
	mad->message.qpn++;
	mad->message.path_mtu = IBV_MTU_256 + 1;
}

static void clear_mtu(struct soft_cm_mad *mad)
{
	mad->message.qpn++;
	mad->message.path_mtu = 0;
}

/* Turn a REQ into a SIDR_REQ with the same ID. It is not a duplicate, because the IDs of service
 * requests form a separate space. */
static void turn_into_sidr_req(struct soft_cm_mad *mad)
{
	mad->message.type = SOFT_SIDR_REQ;
	mad->local_id--;
	mad->transaction--;
}

static void turn_into_sidr_req_at_other_port(struct soft_cm_mad *mad)
{
	mad->message.type = SOFT_SIDR_REQ;
	mad->service_port = applications[1].service_port; /* in another port space */
}

static void turn_into_sidr_rep(struct soft_cm_mad *mad)
{
	mad->message.type = SOFT_SIDR_REP;
	mad->remote_id = mad->local_id - 1;
}

/* Deliver messages with an invalid MTU, without a QP number, or of another type with the same ID.
 * They must not affect the client's connection. */
static void odd_requests_do_not_affect_a_connection(void)
{
	struct party *client = start_one_client();
	struct mad request;

	wait_until(client, ASKED, false);
	request = mads[0];
	deliver_forged(request, set_invalid_mtu);
	deliver_forged(request, clear_mtu);
	CHECK_EQUAL(mad_counts[2], 2);
	request.to = 0;
	deliver_forged(request, clear_qpn);
	deliver_forged(request, turn_into_sidr_rep);
	connect_and_establish(client);
	request.to = 1;
	deliver_forged(request, turn_into_sidr_req);
	deliver_forged(request, turn_into_sidr_req_at_other_port);
	CHECK_EQUAL(mad_counts[8], 2); /* no such service */
	take_events();
	CHECK_EQUAL(client->phase, UP);
	plan.unruly = true;
	close_all();
}

static void turn_into_dreq(struct soft_cm_mad *mad)
{
	mad->message.type = SOFT_CM_DREQ;
	mad->remote_id = mad->local_id;
}

static void turn_into_rep(struct soft_cm_mad *mad)
{
	mad->message.type = SOFT_CM_REP;
	mad->remote_id = mad->local_id;
}

static void change_port(struct soft_cm_mad *mad)
{
	mad->service_port++;
}

/* Returns whether the rate limiter of host 1 assigns two addresses to the same bucket. */
static bool is_counted_together(const union ibv_gid *first, const union ibv_gid *second)
{
	const union ibv_gid *gids[] = {first, second};
	uint16_t buckets[2][SOFT_PLACES_LEVELS];

	enter(1);
	for (int i = 0; i < 2; i++) {
		struct sockaddr_storage address;

		(void)soft_gid_to_sockaddr(gids[i], gids[i], 0, &address);
		soft_network_buckets(&soft_device.cm->gsi.request_rate.seed, &address, buckets[i]);
	}
	for (int level = 0; level < SOFT_PLACES_LEVELS; level++)
		if (buckets[0][level] == buckets[1][level])
			return true;
	return false;
}

/* Send messages of each kind to host 1 for a second. Their source addresses are in at most
 * `networks` different networks. The applications take no events during that second. */
static void send_flood(const struct mad *request, unsigned networks, int per_second)
{
	void (*const kinds[])(struct soft_cm_mad *mad) = {clear_mtu, turn_into_dreq, turn_into_rep,
							  change_port,
							  turn_into_sidr_req_at_other_port};
	const uint64_t begun = fuzz_now_ns;

	for (int i = 0; i < PARTIES; i++)
		parties[i].acts_at = NEVER;
	for (int i = 0; i < per_second; i++) {
		const uint64_t due = begun + (uint64_t)i * SECOND / (unsigned)per_second;
		struct mad mad = {.to = 1, .from_gid = stranger, .to_gid = request->to_gid};
		struct soft_cm_mad said;

		while (next_event_time() <= due)
			network_step(next_event_time());
		fuzz_now_ns = due;
		CHECK(soft_cm_mad_decode(request->bytes, sizeof(request->bytes), &said));
		do {
			const unsigned network = draw(networks);

			mad.from_gid.raw[12] = 10;
			mad.from_gid.raw[13] = (uint8_t)(network >> 8);
			mad.from_gid.raw[14] = (uint8_t)network;
			mad.from_gid.raw[15] = (uint8_t)draw(256);
		} while (is_counted_together(&mad.from_gid, &request->from_gid));
		memcpy(said.source, &mad.from_gid, sizeof(said.source));
		said.transaction = said.local_id = said.message.qpn = 1 + (unsigned)i;
		if (i % 2)
			kinds[(size_t)i / 2 % (sizeof(kinds) / sizeof(*kinds))](&said);
		soft_cm_mad_encode(&said, mad.bytes);
		deliver(&mad);
	}
}

/* Flood a host with every kind of message that any host can send. The flood may cause only a
 * limited number of responses and pending connections, and must not end an established connection.
 * If the flood comes from only a few networks, the first request from another network must be
 * accepted. */
static void flood_of_requests_is_rate_limited(void)
{
	enum { FLOOD = 60000, RATE = 2000, BURST = 1024, REPETITIONS = 5 };
	struct party *open = start_one_client(), *honest = &parties[2];
	struct mad request;

	wait_until(open, ASKED, false);
	request = mads[0];
	connect_and_establish(open);
	plan.unruly = true;
	plan.cut_at = fuzz_now_ns;
	/* Heal the network between two retries, during the second flood. */
	plan.heals_at = fuzz_now_ns + 1300 * MS;
	start_client(2, 0, 0);
	wait_until(honest, ASKED, false);
	memset(mad_counts, 0, sizeof(mad_counts));
	send_flood(&request, 1 << 16, FLOOD);
	/* MRA, REJ, DREP and SIDR_REP */
	int responses = mad_counts[1] + mad_counts[2] + mad_counts[6] + mad_counts[8];

	CHECK(responses > RATE);
	CHECK(responses <= 2 * (RATE + BURST)); /* an MRA and a later REJ for each request */
	send_flood(&request, 16, FLOOD);
	CHECK_EQUAL(mad_counts[0], REPETITIONS);
	CHECK_EQUAL(soft_cm_id_of(honest->id)->link->highest_received, SOFT_CM_MRA);
	CHECK_EQUAL(soft_cm_id_of(open->id)->state, SOFT_CM_CONNECTED);
	CHECK_EQUAL(soft_cm_id_of(server()->id)->state, SOFT_CM_CONNECTED);
	close_listeners(1);
	close_all();
}

/* Reject a request after accepting it. The client may have the REP, so the REJ names neither the
 * REQ nor the REP as the rejected message (IBTA 12.6.7). */
static void rejection_after_accept_responds_to_other(void)
{
	struct party *client = start_one_client();
	struct soft_cm_mad said;

	wait_until(server(), REQUESTED, false);
	answer_request(server());
	for (int i = 0; i < MADS; i++)
		mads[i].due = 0;
	plan.unruly = true;
	CHECK_OK(verbs->rdma_reject(server()->id, NULL, 0));
	CHECK(soft_cm_mad_decode(mads[0].bytes, sizeof(mads[0].bytes), &said));
	CHECK_EQUAL(said.message.type, SOFT_CM_REJ);
	CHECK_EQUAL(said.responds_to, SOFT_CM_RESPONDS_TO_OTHER);
	wait_until(client, FAILED, false);
	close_all();
}

/* Check that only a limited number of destroyed ids linger to respond to retransmissions. */
static void few_destroyed_ids_linger(void)
{
	enum { FEW = 2 };

	start_one_client();
	enter(0);
	soft_device.cm->limits.half_open = FEW;
	for (int i = 1; i < CLIENTS; i++)
		start_client(i, 0, 0);
	for (int i = 0; i < CLIENTS; i++)
		wait_until(&parties[i], ASKED, false);
	for (int i = 0; i < CLIENTS; i++)
		destroy(&parties[i]);
	CHECK_EQUAL(soft_device.cm->gsi.ids.count, FEW);
	plan.unruly = true;
	close_all();
}

/* Check that listening and connecting fail while another program uses the RoCE port, and succeed
 * when they are repeated later. */
static void listen_and_connect_fail_while_port_is_in_use(void)
{
	struct rdma_conn_param said = {.qp_num = 7};
	struct rdma_cm_id *ids[SIDES]; /* a listener and a client */
	struct sockaddr_in address = local_address(0);

	start_one_client();
	enter(0);
	for (int i = 0; i < SIDES; i++)
		CHECK_OK(
			verbs->rdma_create_id(applications[0].channel, &ids[i], NULL, RDMA_PS_TCP));
	CHECK_OK(verbs->rdma_bind_addr(ids[0], (struct sockaddr *)&address));
	CHECK_OK(verbs->rdma_resolve_addr(ids[1], NULL,
					  &applications[0].listening->route.addr.src_addr, 1));
	CHECK_OK(verbs->rdma_resolve_route(ids[1], 1));
	hold_error = EADDRINUSE;
	CHECK_FAILS(verbs->rdma_listen(ids[0], 0), EADDRINUSE);
	CHECK_FAILS(verbs->rdma_connect(ids[1], &said), EADDRINUSE);
	hold_error = 0;
	CHECK_OK(verbs->rdma_listen(ids[0], 0));
	CHECK_OK(verbs->rdma_connect(ids[1], &said));
	for (int i = 0; i < SIDES; i++)
		CHECK_OK(verbs->rdma_destroy_id(ids[i]));
	plan.unruly = true;
	close_all();
}

/* ---- seeds ------------------------------------------------------------------------------------- */

#define TEST(name, weight) {#name, name, weight}

static const struct {
	const char *name;
	void (*run)(void);
	uint32_t weight;
} tests[] = {
	TEST(random_connections_follow_the_event_order, 90),
	TEST(flood_of_requests_is_rate_limited, 2),
	TEST(valid_response_is_found_among_a_flood, 2),
	TEST(few_destroyed_ids_linger, 2),
	TEST(listen_and_connect_fail_while_port_is_in_use, 2),
	TEST(lookup_retries_while_port_has_no_service, 2),
	TEST(client_gives_up_on_a_silent_server, 2),
	TEST(server_gives_up_on_a_silent_client, 2),
	TEST(late_copy_of_withdrawn_request_is_ignored, 2),
	TEST(restarted_host_confirms_a_disconnect, 2),
	TEST(request_for_connected_qp_ends_the_stale_connection, 2),
	TEST(late_copy_of_ended_request_is_ignored, 2),
	TEST(late_rejection_is_ignored, 2),
	TEST(odd_requests_do_not_affect_a_connection, 2),
	TEST(rejection_after_accept_responds_to_other, 2),
	TEST(mra_delays_the_repeated_request, 2),
};

static void run(void)
{
	uint32_t test = 0, total = 0, at;

	FOR_EACH (i, tests)
		total += tests[i].weight;
	at = draw(total);
	while (at >= tests[test].weight)
		at -= tests[test++].weight;
	current_step = tests[test].name;
	verbs = aiordma_embedded_calls();
	CHECK_OK(setenv("AIORDMA_EMBEDDED_LINKS", "tcp", 1));
	wire_vary(true);
	wire.per_mille = 0;
	tests[test].run();
}

int main(int argc, char **argv)
{
	return run_seeds(run, 10, argc, argv);
}
