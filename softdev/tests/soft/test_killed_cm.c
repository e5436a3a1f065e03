/* Peers that connect by the connection manager, say something and end it,
 * again and again, in either role, are killed, stopped or leave in the middle of any of it.
 */
#include "killing.h"

#include <arpa/inet.h>

enum {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	ROUNDS = 50,
#else
	ROUNDS = 75,
#endif
	WARM_UP = 10,
	CONNECTIONS = 64,
	EACH = 2, /* connections that one peer makes at a time */
	MESSAGE = 32 << 10,
	WITNESS = 0, /* the first peer, whose connection never ends */
};

/* ---- one connection ------------------------------------------------------------------------ */

struct connection {
	struct rdma_cm_id *id; /* NULL: free */
	struct side
		side; /* what is made for the id; its memory has what is sent, then what comes */
	uint32_t peer;
	bool active, up, sending;
	uint32_t messages, echoes; /* sent (or answered), and so many before it is ended */
};

/* Of this process, which is the survivor or a peer. */
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener;
static struct connection connections[CONNECTIONS];
static uint32_t self; /* the peer's number */
static uint64_t made, ended; /* connections */

static struct connection *connection_of(const struct rdma_cm_id *id)
{
	for (struct connection *it = connections; it < connections + CONNECTIONS; it++)
		if (it->id == id)
			return it;
	return NULL;
}

/* With that peer; the last of them in *found, unless NULL. */
static int connections_with(uint32_t peer, struct connection **found)
{
	int count = 0;

	for (struct connection *it = connections; it < connections + CONNECTIONS; it++)
		if (it->id && it->peer == peer) {
			count++;
			if (found)
				*found = it;
		}
	return count;
}

static struct connection *new_connection(struct rdma_cm_id *id, uint32_t peer, bool active)
{
	struct connection *it = connection_of(NULL);

	CHECK(it);
	*it = (struct connection){.id = id,
				  .peer = peer,
				  .active = active,
				  .echoes = active ? 1 + chance(4) : UINT32_MAX};
	return it;
}

static void post_receive(struct connection *it)
{
	CHECK_EQUAL(post_recv_at(&it->side, 2, MESSAGE, MESSAGE), 0);
}

static void make_queue_pair(struct connection *it)
{
	struct side *side = &it->side;

	side->context = it->id->verbs;
	CHECK(side->cq = verbs->ibv_create_cq(side->context, 16, NULL, NULL, 0));
	CHECK(side->memory = calloc(2, MESSAGE));
	CHECK(side->mr = verbs->ibv_reg_mr(it->id->pd, side->memory, 2 * MESSAGE,
					   IBV_ACCESS_LOCAL_WRITE));
	struct ibv_qp_init_attr attr = {
		.send_cq = side->cq,
		.recv_cq = side->cq,
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
	};

	CHECK_EQUAL(verbs->rdma_create_qp(it->id, NULL, &attr), 0);
	side->qp = it->id->qp;
	post_receive(it);
}

static void drop(struct connection *it)
{
	if (it->side.qp) {
		verbs->rdma_destroy_qp(it->id);
		CHECK_EQUAL(verbs->ibv_dereg_mr(it->side.mr), 0);
		CHECK_EQUAL(verbs->ibv_destroy_cq(it->side.cq), 0);
		free(it->side.memory);
	}
	CHECK_EQUAL(verbs->rdma_destroy_id(it->id), 0);
	it->id = NULL;
	ended++;
}

static void send_message(struct connection *it, uint32_t length)
{
	it->sending = true;
	CHECK_EQUAL(post(&it->side,
			 (struct request){.wr_id = 1, .opcode = IBV_WR_SEND, .length = length}),
		    0);
}

static void next_message(struct connection *it)
{
	uint32_t length = 1 + chance(MESSAGE - 1);

	fill(it->side.memory, length, it->messages);
	send_message(it, length);
}

/* What came is the next message, or what we have sent. */
static void take(struct connection *it, const struct ibv_wc *wc)
{
	if (wc->wr_id == 1) {
		it->sending = false;
		return;
	}
	CHECK(filled(it->side.memory + MESSAGE, wc->byte_len, it->messages));
	it->messages++;
	if (!it->active)
		memcpy(it->side.memory, it->side.memory + MESSAGE, wc->byte_len);
	post_receive(it);
	if (!it->active)
		send_message(it, wc->byte_len);
	else if (it->messages < it->echoes)
		next_message(it);
}

/* A little of its traffic.  Its end is told by events. */
static void step_connection(struct connection *it)
{
	struct ibv_wc wc;

	while (it->up && poll_cq(&it->side, 1, &wc) == 1)
		if (wc.status == IBV_WC_SUCCESS)
			take(it, &wc);
	if (it->up && it->active && it->messages == it->echoes && !it->sending) {
		it->up = false;
		/* EINVAL: the other side has been quicker. */
		CHECK(verbs->rdma_disconnect(it->id) == 0 || errno == EINVAL);
	}
}

/* ---- events -------------------------------------------------------------------------------- */

static struct rdma_conn_param parameters(const uint32_t *number)
{
	return (struct rdma_conn_param){
		.private_data = number,
		.private_data_len = sizeof(*number),
		.responder_resources = 1,
		.initiator_depth = 1,
		.retry_count = 7,
		.rnr_retry_count = 7,
	};
}

/* To a listener on that port of this host. */
static void connect_to(uint16_t port, uint32_t peer)
{
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_port = htons(port),
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct rdma_cm_id *id;

	CHECK_EQUAL(verbs->rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), 0);
	new_connection(id, peer, true);
	CHECK_EQUAL(verbs->rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000), 0);
}

/* False: the connection is over. */
static bool happens(struct connection *it, enum rdma_cm_event_type type)
{
	struct rdma_conn_param ask = parameters(&self);

	switch (type) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		CHECK_EQUAL(verbs->rdma_resolve_route(it->id, 2000), 0);
		return true;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		make_queue_pair(it);
		return verbs->rdma_connect(it->id, &ask) == 0;
	case RDMA_CM_EVENT_ESTABLISHED:
		it->up = true;
		made++;
		if (it->active)
			next_message(it);
		return true;
	case RDMA_CM_EVENT_TIMEWAIT_EXIT:
		return true;
	case RDMA_CM_EVENT_DISCONNECTED:
	case RDMA_CM_EVENT_CONNECT_ERROR:
	case RDMA_CM_EVENT_REJECTED:
	case RDMA_CM_EVENT_UNREACHABLE:
		return false;
	default:
		fprintf(stderr, "in %s: %s\n", current_step, verbs->rdma_event_str(type));
		exit(1);
	}
}

static void requested(struct rdma_cm_id *id, uint32_t peer)
{
	struct connection *it = new_connection(id, peer, false);
	struct rdma_conn_param answer = parameters(&self);

	make_queue_pair(it);
	if (verbs->rdma_accept(id, &answer)) /* the active side is gone already */
		drop(it);
}

static bool step_events(void)
{
	struct rdma_cm_event *event;

	if (verbs->rdma_get_cm_event(channel, &event))
		return false;
	enum rdma_cm_event_type type = event->event;
	struct rdma_cm_id *id = event->id;
	uint32_t number = 0;

	if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
		memcpy(&number, event->param.conn.private_data, sizeof(number));
	CHECK_EQUAL(verbs->rdma_ack_cm_event(event), 0);
	if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
		requested(id, number);
		return true;
	}
	struct connection *it = connection_of(id);

	CHECK(it);
	/* What was received before the end is not lost by it. */
	step_connection(it);
	if (!happens(it, type))
		drop(it);
	return true;
}

static void step(void)
{
	while (step_events())
		;
	for (struct connection *it = connections; it < connections + CONNECTIONS; it++)
		if (it->id)
			step_connection(it);
}

/* An event channel that does not block, and a listener; its port. */
static uint16_t open_machine(void)
{
	struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

	CHECK(channel = verbs->rdma_create_event_channel());
	CHECK_EQUAL(fcntl(channel->fd, F_SETFL, O_NONBLOCK), 0);
	CHECK_EQUAL(verbs->rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), 0);
	CHECK_EQUAL(verbs->rdma_bind_addr(listener, (struct sockaddr *)&any), 0);
	CHECK_EQUAL(verbs->rdma_listen(listener, 64), 0);
	return ntohs(verbs->rdma_get_src_port(listener));
}

/* ---- the peer ------------------------------------------------------------------------------ */

struct order {
	uint32_t number;
	uint16_t port; /* connect there; 0: be connected to */
	uint64_t leaves_ns; /* by itself, after so long; 0: never */
};

static void obey(int fd)
{
	struct order order;
	uint64_t start;
	uint16_t port;

	if (recv(fd, &order, sizeof(order), MSG_WAITALL) != sizeof(order))
		_exit(0); /* it is not needed */
	start = now_ns(CLOCK_MONOTONIC);
	self = order.number;
	port = open_machine();
	CHECK_EQUAL(send(fd, &port, sizeof(port), MSG_NOSIGNAL), sizeof(port));
	for (;;) {
		while (order.port && connections_with(0, NULL) < EACH)
			connect_to(order.port, 0);
		step();
		if (order.leaves_ns && now_ns(CLOCK_MONOTONIC) - start > order.leaves_ns)
			exit(0); /* without an orderly end */
	}
}

/* ---- the survivor -------------------------------------------------------------------------- */

static struct round {
	struct fated fated;
	uint32_t number;
	uint16_t port; /* of its listener, once it has told; 0: it connects to us */
	bool serves;
} at[AT_ONCE];

static struct fated *fated_at(int i)
{
	return &at[i].fated;
}

static uint16_t own_port;

static struct connection *witness(void)
{
	struct connection *it;

	CHECK_EQUAL(connections_with(WITNESS, &it), 1);
	return it;
}

static void begin(int i)
{
	struct round *round = &at[i];
	struct order order;

	*round = (struct round){.fated = next_fated(LEAVES + 1), .serves = chance(2)};
	round->number = (uint32_t)peers_used;
	order = (struct order){
		.number = round->number,
		.port = round->serves ? 0 : own_port,
		.leaves_ns = round->fated.fate == LEAVES ? moment_ns() : 0,
	};
	CHECK_EQUAL(send(round->fated.peer->fd, &order, sizeof(order), MSG_NOSIGNAL),
		    sizeof(order));
}

/* False: it is over. */
static bool step_round(int i)
{
	struct round *round = &at[i];
	struct fated *fated = &round->fated;
	const struct peer *peer = fated->peer;

	if (peer->fd >= 0 && round->serves && !round->port)
		(void)!recv(peer->fd, &round->port, sizeof(round->port), MSG_DONTWAIT);
	if (peer->fd >= 0 && peer_is_gone(fated->peer) && !fated->gone_ns)
		fated->gone_ns = watched_ns(); /* has left */
	if (!fated->gone_ns) {
		while (round->port && connections_with(round->number, NULL) < EACH)
			connect_to(round->port, round->number);
		if (now_ns(CLOCK_MONOTONIC) > fated->next_ns)
			act(fated, true);
		return true;
	}
	CHECK(watched_ns() - fated->gone_ns < PATIENCE);
	if (peer->fd >= 0 || connections_with(round->number, NULL))
		return true;
	noticed_after(watched_ns() - fated->gone_ns);
	return false;
}

static void step_all(void)
{
	step();
	CHECK(witness()->up);
}

static void see_witness_go_on(void)
{
	uint32_t messages = witness()->messages;

	while (witness()->messages < messages + 3)
		step_all();
}

static void go_through(int count)
{
	rounds(count, fated_at, begin, step_round, step_all);
	see_witness_go_on();
	/* Requests of the dead may have been in the listener's queue. */
	for (uint32_t peer = 1; peer <= (uint32_t)peers_used; peer++)
		while (connections_with(peer, NULL))
			step_all();
}

static void meet_witness(void)
{
	struct order order = {.number = WITNESS};
	struct peer *peer = next_peer();
	uint16_t port;

	CHECK_EQUAL(send(peer->fd, &order, sizeof(order), MSG_NOSIGNAL), sizeof(order));
	CHECK_EQUAL(recv(peer->fd, &port, sizeof(port), MSG_WAITALL), sizeof(port));
	connect_to(port, WITNESS);
	witness()->echoes = UINT32_MAX;
	while (!witness()->up)
		step();
}

static void survive(const char *wire)
{
	struct held before, with_witness;

	prepare_peers(1 + WARM_UP + ROUNDS, obey);
	CHECK_EQUAL(verbs->ibv_close_device(open_device()),
		    0); /* sanitizers start a thread with ours */
	before = held_now();
	own_port = open_machine();
	STEP(meet_witness());
	STEP(go_through(WARM_UP));
	with_witness = held_now();
	CHECK_EQUAL(with_witness.shared > 0, strcmp(wire, "shared") == 0);
	notice_count = 0;
	made = ended = 0;
	STEP(go_through(ROUNDS));
	STEP(expect_held(&with_witness));
	printf("%llu connections made, %llu ended; ", (unsigned long long)made,
	       (unsigned long long)ended);
	tell_notices(wire);
	dismiss_peers();
	drop(witness());
	CHECK_EQUAL(verbs->rdma_destroy_id(listener), 0);
	verbs->rdma_destroy_event_channel(channel);
	before.memory = SIZE_MAX / 2; /* what a library keeps for the next time */
	STEP(expect_held(&before));
	STEP(expect_nothing_left());
}

int main(void)
{
	survive_on_each_wire(survive, 100);
	return 0;
}
