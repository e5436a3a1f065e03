/* The life of ids and channels: destroyed in every state and at any moment, moved between channels,
 * used without a channel, called in the wrong state. */
#define _GNU_SOURCE /* pthread_timedjoin_np */
#include "cm_silent_end.h"

/* ---- destroyed in each state --------------------------------------------------------------- */

static void before_connecting(void)
{
	struct side side = side_with_id();
	union address address = address_of(host, 0);

	side_drop(&side); /* idle */
	CHECK_EQUAL(rdma->rdma_create_id(side.channel, &side.id, NULL, RDMA_PS_TCP), 0);
	CHECK_EQUAL(rdma->rdma_bind_addr(side.id, &address.any), 0);
	side_drop(&side); /* bound */
	address = address_of(host, 7777);
	CHECK_EQUAL(rdma->rdma_create_id(side.channel, &side.id, NULL, RDMA_PS_TCP), 0);
	CHECK_EQUAL(rdma->rdma_resolve_addr(side.id, NULL, &address.any, 1000), 0);
	side_drop(&side); /* resolved, and the event not taken: it is dropped */
	expect_nothing(side.channel);
	CHECK_EQUAL(rdma->rdma_create_id(side.channel, &side.id, NULL, RDMA_PS_TCP), 0);
	resolve_to(&side, host, 7777);
	side_close(&side);
}

/* The client goes while its request waits, taken by the application or not. */
static void while_asking(bool taken)
{
	struct side listener = listen_at(host, 0);
	struct side client = ask(host, port_of(listener.id));
	struct side server;

	if (taken) {
		server = take_request(&listener);
		side_close(&client);
	} else {
		struct pollfd readable = {.fd = listener.channel->fd, .events = POLLIN};

		CHECK_EQUAL(poll(&readable, 1, -1), 1);
		side_close(&client);
		/* The request is there all the same, as with the real thing. */
		server = take_request(&listener);
	}
	expect_silent_end(&listener, &server);
	side_close(&listener);
}

/* The server's id goes instead of answering. */
static void instead_of_answering(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = ask(host, port_of(listener.id));
	struct side server = take_request(&listener);

	side_drop(&server);
	expect_status(client.channel, RDMA_CM_EVENT_REJECTED, client.id, 28);
	side_close(&client);
	side_close(&listener);
}

/* The listener goes with requests that the application has not taken. */
static void listener_with_requests(void)
{
	struct side listener = listen_at(host, 0);
	struct side first = ask(host, port_of(listener.id));
	struct side second = ask(host, port_of(listener.id));
	struct pollfd readable = {.fd = listener.channel->fd, .events = POLLIN};

	CHECK_EQUAL(poll(&readable, 1, -1), 1);
	side_drop(&listener);
	expect_nothing(listener.channel);
	/* The one is rejected by the consumer; the other may have been too late for it. */
	acknowledge(expect(first.channel, RDMA_CM_EVENT_REJECTED, first.id));
	acknowledge(expect(second.channel, RDMA_CM_EVENT_REJECTED, second.id));
	side_close(&first);
	side_close(&second);
	side_close(&listener);
}

/* Accepted, and gone before RTU; or the client goes at the same point. */
static void after_accepting(bool client_goes)
{
	struct side listener = listen_at(host, 0);
	struct side client = ask(host, port_of(listener.id));
	struct side server = take_request(&listener);
	struct rdma_cm_event *event;

	accept_side(&server);
	if (client_goes) {
		side_close(&client);
		/* Depending on how far it had come. */
		CHECK_EQUAL(rdma->rdma_get_cm_event(listener.channel, &event), 0);
		if (event->event == RDMA_CM_EVENT_ESTABLISHED) {
			acknowledge(event);
			event = expect(listener.channel, RDMA_CM_EVENT_DISCONNECTED, server.id);
		}
		CHECK(event->event == RDMA_CM_EVENT_DISCONNECTED ||
		      event->event == RDMA_CM_EVENT_REJECTED);
		acknowledge(event);
		side_drop(&server);
	} else {
		side_drop(&server);
		CHECK_EQUAL(rdma->rdma_get_cm_event(client.channel, &event), 0);
		if (event->event == RDMA_CM_EVENT_ESTABLISHED) {
			acknowledge(event);
			event = expect(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id);
		}
		CHECK(event->event == RDMA_CM_EVENT_DISCONNECTED ||
		      event->event == RDMA_CM_EVENT_REJECTED);
		acknowledge(event);
		side_close(&client);
	}
	side_close(&listener);
}

/* Connected: the other side learns it, whichever goes, and whatever goes first. */
static void while_connected(bool queue_pair_first)
{
	struct side listener = listen_at(host, 0);
	struct side client, server;
	struct ibv_qp *qp;

	connect_sides(&listener, host, &client, &server);
	if (queue_pair_first) {
		side_drop(&server);
		expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
	} else {
		struct rdma_cm_id *id = server.id;

		qp = id->qp;
		CHECK_EQUAL(rdma->rdma_destroy_id(id), 0); /* the queue pair is left over */
		expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
		CHECK_EQUAL(rdma->ibv_destroy_qp(qp), 0);
		server.id = NULL;
		side_forget_memory(&server);
	}
	side_close(&client);
	side_close(&listener);
}

/* The queue pair goes, the id stays: the connection ends when the application says so. */
static void queue_pair_goes(void)
{
	struct side listener = listen_at(host, 0);
	struct side client, server;

	connect_sides(&listener, host, &client, &server);
	rdma->rdma_destroy_qp(server.id);
	expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
	CHECK_EQUAL(rdma->rdma_disconnect(server.id), 0);
	expect_end(&server);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* Destroyed behind the id's back, with a failure still to come that would have moved it. */
static void queue_pair_goes_unnoticed(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = ask(host, port_of(listener.id));
	struct side server = take_request(&listener);

	CHECK_EQUAL(rdma->ibv_destroy_qp(client.id->qp), 0);
	CHECK_EQUAL(rdma->rdma_reject(server.id, NULL, 0), 0);
	expect_status(client.channel, RDMA_CM_EVENT_REJECTED, client.id, 28);
	client.id->qp = NULL;
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* id->verbs is one for all ids, and an application may use it longer than the id. */
static void the_device_context(void)
{
	struct side side = side_with_id();
	struct ibv_context *verbs;
	struct ibv_device_attr attr;
	struct ibv_cq *cq;
	int before = resources();

	resolve_to(&side, host, 7777);
	verbs = side.id->verbs;
	CHECK_EQUAL(rdma->ibv_close_device(verbs), EINVAL); /* not ours to close */
	side_drop(&side);
	expect_resources(before); /* unused, it costs nothing... */
	CHECK_EQUAL(rdma->ibv_query_device(verbs, &attr), 0); /* ...and is not dangling */
	CHECK_EQUAL(rdma->rdma_create_id(side.channel, &side.id, NULL, RDMA_PS_TCP), 0);
	resolve_to(&side, host, 7777);
	CHECK(side.id->verbs == verbs);
	cq = rdma->ibv_create_cq(verbs, 1, NULL, NULL, 0);
	side_drop(&side);
	CHECK(resources() > before); /* something is on it: it works on */
	CHECK_EQUAL(rdma->ibv_destroy_cq(cq), 0);
	expect_resources(before);
	side_close(&side);
}

/* rdma_disconnect between rdma_accept and RTU: whatever comes first, both sides learn the end. */
static void disconnect_after_accepting(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = ask(host, port_of(listener.id));
	struct side server = take_request(&listener);
	struct rdma_cm_event *event;

	accept_side(&server);
	CHECK_EQUAL(rdma->rdma_disconnect(server.id), 0);
	CHECK_EQUAL(rdma->rdma_get_cm_event(listener.channel, &event), 0);
	if (event->event == RDMA_CM_EVENT_ESTABLISHED) { /* RTU was there before */
		acknowledge(event);
		CHECK_EQUAL(rdma->rdma_get_cm_event(listener.channel, &event), 0);
	}
	CHECK_EQUAL(event->event, RDMA_CM_EVENT_DISCONNECTED);
	acknowledge(event);
	acknowledge(expect(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id));
	acknowledge(expect(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id));
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* ---- events keep what they are about ------------------------------------------------------- */

static void *destroy(void *id)
{
	CHECK_EQUAL(rdma->rdma_destroy_id(id), 0);
	return NULL;
}

/* rdma_destroy_id(3) waits until what was taken of the id's events is acknowledged. */
static void destroy_waits(void)
{
	struct side side = side_with_id();
	union address address = address_of(host, 7777);
	struct rdma_cm_event *event;
	struct timespec soon;
	pthread_t thread;

	CHECK_EQUAL(rdma->rdma_resolve_addr(side.id, NULL, &address.any, 1000), 0);
	event = expect(side.channel, RDMA_CM_EVENT_ADDR_RESOLVED, side.id);
	CHECK_EQUAL(pthread_create(&thread, NULL, destroy, side.id), 0);
	clock_gettime(CLOCK_REALTIME, &soon);
	soon.tv_nsec += 50000000;
	if (soon.tv_nsec >= 1000000000) {
		soon.tv_nsec -= 1000000000;
		soon.tv_sec++;
	}
	CHECK_EQUAL(pthread_timedjoin_np(thread, NULL, &soon), ETIMEDOUT);
	CHECK_EQUAL(event->event, RDMA_CM_EVENT_ADDR_RESOLVED);
	acknowledge(event);
	CHECK_EQUAL(pthread_join(thread, NULL), 0);
	side.id = NULL;
	side_close(&side);
}

/* A CONNECT_REQUEST belongs to the listener: the new id can go before it is acknowledged. */
static void request_outlives_its_id(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = ask(host, port_of(listener.id));
	struct rdma_cm_event *event = expect(listener.channel, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);

	CHECK_EQUAL(rdma->rdma_destroy_id(event->id), 0);
	CHECK_EQUAL(event->param.conn.private_data_len, 56);
	CHECK_EQUAL(*(const uint8_t *)event->param.conn.private_data, 0);
	acknowledge(event);
	expect_status(client.channel, RDMA_CM_EVENT_REJECTED, client.id, 28);
	side_close(&client);
	side_close(&listener);
}

/* ---- channels ------------------------------------------------------------------------------ */

/* The fd: blocking by default, readable exactly while there is an event, O_NONBLOCK honoured. */
static void the_descriptor(void)
{
	struct side side = side_with_id();
	union address address = address_of(host, 7777);
	struct pollfd readable = {.fd = side.channel->fd, .events = POLLIN};
	struct rdma_cm_event *event;

	CHECK_EQUAL(fcntl(side.channel->fd, F_GETFL) & O_NONBLOCK, 0);
	CHECK_EQUAL(fcntl(side.channel->fd, F_GETFD) & FD_CLOEXEC, on_system ? 0 : FD_CLOEXEC);
	CHECK_EQUAL(poll(&readable, 1, 0), 0);
	CHECK_EQUAL(fcntl(side.channel->fd, F_SETFL, O_NONBLOCK), 0);
	CHECK_FAILS(rdma->rdma_get_cm_event(side.channel, &event), EAGAIN);
	CHECK_EQUAL(rdma->rdma_resolve_addr(side.id, NULL, &address.any, 1000), 0);
	CHECK_EQUAL(poll(&readable, 1, -1), 1);
	CHECK_EQUAL(poll(&readable, 1, 0), 1); /* level triggered */
	acknowledge(expect(side.channel, RDMA_CM_EVENT_ADDR_RESOLVED, side.id));
	CHECK_EQUAL(poll(&readable, 1, 0), 0);
	CHECK_FAILS(rdma->rdma_get_cm_event(NULL, &event), EINVAL);
	CHECK_FAILS(rdma->rdma_get_cm_event(side.channel, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_ack_cm_event(NULL), EINVAL);
	side_close(&side);
}

static void *resolve_later(void *argument)
{
	struct side *side = argument;
	union address address = address_of(host, 7777);

	CHECK_EQUAL(rdma->rdma_resolve_addr(side->id, NULL, &address.any, 1000), 0);
	return NULL;
}

/* A thread blocked in rdma_get_cm_event is woken. */
static void blocked_thread(void)
{
	struct side side = side_with_id();
	pthread_t thread;

	CHECK_EQUAL(pthread_create(&thread, NULL, resolve_later, &side), 0);
	expect_status(side.channel, RDMA_CM_EVENT_ADDR_RESOLVED, side.id, 0);
	CHECK_EQUAL(pthread_join(thread, NULL), 0);
	side_close(&side);
}

static void ignore(int number)
{
	(void)number;
}

static void *wait_in_vain(void *channel)
{
	struct rdma_cm_event *event;

	CHECK_FAILS(rdma->rdma_get_cm_event(channel, &event), EINTR);
	return NULL;
}

static void in_one_moment(struct timespec *moment)
{
	clock_gettime(CLOCK_REALTIME, moment);
	moment->tv_nsec += 20000000;
	if (moment->tv_nsec >= 1000000000) {
		moment->tv_nsec -= 1000000000;
		moment->tv_sec++;
	}
}

/* Destroying the channel leaves a thread that waits for an event waiting, and one that only comes
 * then as well; a signal ends it. */
static void channel_under_a_thread(bool late)
{
	struct sigaction interrupt = {.sa_handler = ignore}, before;
	struct side side = side_open();
	struct timespec soon;
	pthread_t thread;
	int rc;

	CHECK_EQUAL(sigaction(SIGUSR1, &interrupt, &before), 0);
	if (late)
		rdma->rdma_destroy_event_channel(side.channel);
	CHECK_EQUAL(pthread_create(&thread, NULL, wait_in_vain, side.channel), 0);
	in_one_moment(&soon);
	CHECK_EQUAL(pthread_timedjoin_np(thread, NULL, &soon), ETIMEDOUT);
	if (!late)
		rdma->rdma_destroy_event_channel(side.channel);
	in_one_moment(&soon);
	CHECK_EQUAL(pthread_timedjoin_np(thread, NULL, &soon), ETIMEDOUT);
	do { /* until it is where a signal interrupts it */
		CHECK_EQUAL(pthread_kill(thread, SIGUSR1), 0);
		in_one_moment(&soon);
		rc = pthread_timedjoin_np(thread, NULL, &soon);
	} while (rc == ETIMEDOUT);
	CHECK_EQUAL(rc, 0);
	CHECK_EQUAL(sigaction(SIGUSR1, &before, NULL), 0);
}

/* The wrong order of cleaning up: the channel first.  The other side learns that we are gone. */
static void channel_first(void)
{
	struct side listener = listen_at(host, 0);
	struct side client, server, asking;

	connect_sides(&listener, host, &client, &server);
	asking = ask(host, port_of(listener.id));
	rdma->rdma_destroy_event_channel(listener.channel);
	expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
	acknowledge(expect(asking.channel, RDMA_CM_EVENT_REJECTED, asking.id));
	CHECK_FAILS(rdma->rdma_listen(listener.id, 1), EINVAL);
	CHECK_EQUAL(rdma->rdma_disconnect(server.id), 0);
	side_drop(&server);
	CHECK_EQUAL(rdma->rdma_destroy_id(listener.id), 0);
	side_close(&client);
	side_close(&asking);
}

/* rdma_migrate_id(3): what is queued moves along, and later events go to the new channel. */
static void migrate(void)
{
	struct side listener = listen_at(host, 0);
	struct side client, server;
	struct side other = side_open();

	client = ask(host, port_of(listener.id));
	server = take_request(&listener);
	CHECK_EQUAL(rdma->rdma_migrate_id(server.id, other.channel), 0);
	server.channel = other.channel;
	CHECK(server.id->channel == other.channel);
	accept_side(&server);
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	expect_status(other.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	CHECK_EQUAL(rdma->rdma_disconnect(server.id), 0);
	expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
	CHECK_EQUAL(rdma->rdma_migrate_id(server.id, listener.channel), 0);
	server.channel = listener.channel;
	expect_end(&server);
	expect_nothing(other.channel);
	side_drop(&server);
	side_close(&client);
	/* A listener moves with its requests. */
	client = ask(host, port_of(listener.id));
	{
		struct pollfd readable = {.fd = listener.channel->fd, .events = POLLIN};

		CHECK_EQUAL(poll(&readable, 1, -1), 1);
	}
	CHECK_EQUAL(rdma->rdma_migrate_id(listener.id, other.channel), 0);
	expect_nothing(listener.channel);
	rdma->rdma_destroy_event_channel(listener.channel);
	listener.channel = other.channel;
	server = take_request(&listener);
	CHECK(server.id->channel == other.channel);
	accept_side(&server);
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	expect_status(other.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	side_drop(&server);
	side_close(&client);
	side_close(&listener);
}

/* NULL makes an id synchronous, and a channel makes it asynchronous again. */
static void migrate_to_no_channel(void)
{
	struct side side = side_with_id();
	union address address = address_of(host, 7777);

	CHECK_EQUAL(rdma->rdma_migrate_id(side.id, NULL), 0);
	CHECK(side.id->channel != side.channel);
	CHECK_EQUAL(rdma->rdma_resolve_addr(side.id, NULL, &address.any, 1000), 0);
	CHECK_EQUAL(side.id->event->event, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK_EQUAL(rdma->rdma_migrate_id(side.id, side.channel), 0);
	CHECK(side.id->channel == side.channel);
	CHECK(!side.id->event);
	CHECK_EQUAL(rdma->rdma_resolve_route(side.id, 1000), 0);
	expect_status(side.channel, RDMA_CM_EVENT_ROUTE_RESOLVED, side.id, 0);
	CHECK_EQUAL(rdma->rdma_migrate_id(side.id, side.channel), 0);
	side_close(&side);
}

/* ---- without a channel: every call waits for its event ------------------------------------- */

struct accepting {
	struct side listener;
	int connections;
};

static void *accept_all(void *argument)
{
	struct accepting *accepting = argument;

	for (int i = 0; i < accepting->connections; i++) {
		struct side server = take_request(&accepting->listener);

		if (i == 0) {
			CHECK_EQUAL(rdma->rdma_reject(server.id, NULL, 0), 0);
		} else {
			accept_side(&server);
			expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
			expect_status(server.channel, RDMA_CM_EVENT_DISCONNECTED, server.id, 0);
		}
		side_drop(&server);
	}
	return NULL;
}

static struct side synchronous_client(uint16_t port)
{
	struct side client = {0};
	union address address = address_of(host, port);

	CHECK_EQUAL(rdma->rdma_create_id(NULL, &client.id, NULL, RDMA_PS_TCP), 0);
	client.channel = client.id->channel;
	CHECK(client.channel);
	CHECK_EQUAL(rdma->rdma_resolve_addr(client.id, NULL, &address.any, 1000), 0);
	CHECK_EQUAL(client.id->event->event, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK_EQUAL(rdma->rdma_resolve_route(client.id, 1000), 0);
	CHECK_EQUAL(client.id->event->event, RDMA_CM_EVENT_ROUTE_RESOLVED);
	side_queue_pair(&client);
	return client;
}

static void synchronous(void)
{
	struct accepting accepting = {listen_at(host, 0), 2};
	uint16_t port = port_of(accepting.listener.id);
	struct rdma_conn_param asked = parameters(NULL, 0);
	struct side client;
	pthread_t thread;

	CHECK_EQUAL(pthread_create(&thread, NULL, accept_all, &accepting), 0);
	client = synchronous_client(port);
	CHECK_FAILS(rdma->rdma_connect(client.id, &asked), ECONNREFUSED);
	CHECK_EQUAL(client.id->event->event, RDMA_CM_EVENT_REJECTED);
	CHECK_EQUAL(client.id->event->status, 28);
	side_drop(&client);
	client = synchronous_client(port);
	CHECK_EQUAL(rdma->rdma_connect(client.id, &asked), 0);
	CHECK_EQUAL(client.id->event->event, RDMA_CM_EVENT_ESTABLISHED);
	CHECK_EQUAL(rdma->rdma_disconnect(client.id), 0);
	CHECK_EQUAL(client.id->event->event, RDMA_CM_EVENT_DISCONNECTED);
	side_drop(&client);
	CHECK_EQUAL(pthread_join(thread, NULL), 0);
	side_close(&accepting.listener);
}

/* ---- calls in the wrong state -------------------------------------------------------------- */

/* Every call that the state does not allow, on an id in that state. */
static void wrong_calls(struct rdma_cm_id *id, const char *allowed)
{
	union address address = address_of(host, 0), to = address_of(host, 7777);
	struct rdma_conn_param any = {.qp_num = 1};

	if (!strchr(allowed, 'b'))
		CHECK_FAILS(rdma->rdma_bind_addr(id, &address.any), EINVAL);
	if (!strchr(allowed, 'a'))
		CHECK_FAILS(rdma->rdma_resolve_addr(id, NULL, &to.any, 1000), EINVAL);
	if (!strchr(allowed, 'r'))
		CHECK_FAILS(rdma->rdma_resolve_route(id, 1000), EINVAL);
	if (!strchr(allowed, 'l'))
		CHECK_FAILS(rdma->rdma_listen(id, 1), EINVAL);
	if (!strchr(allowed, 'c'))
		CHECK_FAILS(rdma->rdma_connect(id, &any), EINVAL);
	if (!strchr(allowed, 'A'))
		CHECK_FAILS(rdma->rdma_accept(id, &any), EINVAL);
	if (!strchr(allowed, 'R'))
		CHECK_FAILS(rdma->rdma_reject(id, NULL, 0), EINVAL);
	if (!strchr(allowed, 'd'))
		CHECK_FAILS(rdma->rdma_disconnect(id), EINVAL);
	if (!strchr(allowed, 'e'))
		CHECK_FAILS(rdma->rdma_establish(id), EINVAL);
	if (!strchr(allowed, 'n'))
		CHECK_FAILS(rdma->rdma_notify(id, IBV_EVENT_COMM_EST), EINVAL);
}

static void wrong_states(void)
{
	struct side side = side_with_id();
	struct side listener = listen_at(host, 0);
	struct side client, server;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT};
	int mask;

	wrong_calls(side.id, "bal");
	CHECK_FAILS(rdma->rdma_init_qp_attr(side.id, &attr, &mask), EINVAL);
	wrong_calls(listener.id, "");
	resolve_to(&side, host, 7777);
	wrong_calls(side.id, "c");
	CHECK_EQUAL(rdma->rdma_init_qp_attr(side.id, &attr, &mask), 0);
	CHECK_EQUAL(attr.port_num, 1);
	attr.qp_state = IBV_QPS_RTR;
	CHECK_FAILS(rdma->rdma_init_qp_attr(side.id, &attr, &mask), EINVAL);
	attr.qp_state = IBV_QPS_SQD;
	CHECK_FAILS(rdma->rdma_init_qp_attr(side.id, &attr, &mask), EINVAL);
	client = ask(host, port_of(listener.id));
	wrong_calls(client.id, "Rd");
	server = take_request(&listener);
	wrong_calls(server.id, "ARd");
	accept_side(&server);
	expect_status(client.channel, RDMA_CM_EVENT_ESTABLISHED, client.id, 0);
	expect_status(server.channel, RDMA_CM_EVENT_ESTABLISHED, server.id, 0);
	wrong_calls(client.id, "dn");
	wrong_calls(server.id, "dn");
	CHECK_EQUAL(rdma->rdma_disconnect(client.id), 0);
	expect_status(server.channel, RDMA_CM_EVENT_DISCONNECTED, server.id, 0);
	expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
	wrong_calls(client.id, "d");
	wrong_calls(server.id, "d");
	attr.qp_state = IBV_QPS_INIT;
	CHECK_FAILS(rdma->rdma_init_qp_attr(client.id, &attr, &mask), EINVAL);
	side_drop(&server);
	side_close(&client);
	side_close(&side);
	side_close(&listener);
}

static void wrong_arguments(void)
{
	struct side side = side_with_id();
	struct rdma_cm_id *id;

	CHECK_FAILS(rdma->rdma_create_id(side.channel, NULL, NULL, RDMA_PS_TCP), EINVAL);
	CHECK_FAILS(rdma->rdma_create_id(side.channel, &id, NULL, (enum rdma_port_space)1), EINVAL);
	CHECK_FAILS(rdma->rdma_create_id(side.channel, &id, NULL, RDMA_PS_IPOIB), EPROTONOSUPPORT);
	CHECK_FAILS(rdma->rdma_destroy_id(NULL), EINVAL);
	rdma->rdma_destroy_event_channel(NULL);

	/* No id, and no more than one of what an id has. */
	struct rdma_conn_param parameters = {0};
	struct ibv_qp_init_attr qp = {0};
	struct ibv_srq_init_attr srq = {0};
	union address address = address_of(host, 0);
	struct rdma_cm_event *event;

	CHECK_FAILS(rdma->rdma_get_cm_event(NULL, &event), EINVAL);
	CHECK_FAILS(rdma->rdma_get_cm_event(side.channel, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_ack_cm_event(NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_bind_addr(NULL, &address.any), EINVAL);
	CHECK_FAILS(rdma->rdma_resolve_addr(NULL, NULL, &address.any, 1), EINVAL);
	CHECK_FAILS(rdma->rdma_resolve_route(NULL, 1), EINVAL);
	CHECK_FAILS(rdma->rdma_listen(NULL, 1), EINVAL);
	CHECK_FAILS(rdma->rdma_connect(NULL, &parameters), EINVAL);
	CHECK_FAILS(rdma->rdma_accept(NULL, &parameters), EINVAL);
	CHECK_FAILS(rdma->rdma_reject(NULL, NULL, 0), EINVAL);
	CHECK_FAILS(rdma->rdma_establish(NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_notify(NULL, IBV_EVENT_COMM_EST), EINVAL);
	CHECK_FAILS(rdma->rdma_disconnect(NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_migrate_id(NULL, side.channel), EINVAL);
	CHECK_FAILS(rdma->rdma_set_option(NULL, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, "", 1), EINVAL);
	CHECK_FAILS(rdma->rdma_create_ep(NULL, NULL, NULL, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_get_request(NULL, &id), EINVAL);
	CHECK_FAILS(rdma->rdma_create_qp(NULL, NULL, &qp), EINVAL);
	CHECK_FAILS(rdma->rdma_create_qp(side.id, NULL, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_create_qp(side.id, NULL, &qp), EINVAL); /* no device yet */
	CHECK_FAILS(rdma->rdma_create_srq(NULL, NULL, &srq), EINVAL);
	CHECK_FAILS(rdma->rdma_create_srq(side.id, NULL, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_create_srq(side.id, NULL, &srq), EINVAL);
	rdma->rdma_destroy_ep(NULL);
	rdma->rdma_destroy_qp(NULL);
	rdma->rdma_destroy_srq(NULL);
	rdma->rdma_free_devices(NULL);
	rdma->rdma_freeaddrinfo(NULL);
	CHECK(!strcmp(rdma->rdma_event_str(RDMA_CM_EVENT_ESTABLISHED),
		      "RDMA_CM_EVENT_ESTABLISHED"));
	CHECK(!strcmp(rdma->rdma_event_str((enum rdma_cm_event_type)99), "UNKNOWN EVENT"));
	side_close(&side);
}

/* ---- any moment ---------------------------------------------------------------------------- */

static void *connect_and_go(void *argument)
{
	uint16_t port = *(const uint16_t *)argument;

	for (int i = 0; i < 40; i++) {
		struct side client = ask(host, port);
		int flags = fcntl(client.channel->fd, F_GETFL);
		struct rdma_cm_event *event;

		/* Some at once, others after as many looks as it takes to be further on. */
		CHECK_EQUAL(fcntl(client.channel->fd, F_SETFL, flags | O_NONBLOCK), 0);
		for (int look = 0; look < i * 5; look++)
			if (!rdma->rdma_get_cm_event(client.channel, &event))
				acknowledge(event);
		side_close(&client);
	}
	return NULL;
}

/* Two of them, then one that says that it is the last. */
static void *many_connect_and_go(void *argument)
{
	struct side last = side_with_id();
	struct rdma_conn_param ask = parameters("last", 4);
	pthread_t threads[2];

	for (int i = 0; i < 2; i++)
		CHECK_EQUAL(pthread_create(&threads[i], NULL, connect_and_go, argument), 0);
	for (int i = 0; i < 2; i++)
		CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
	resolve_to(&last, host, *(const uint16_t *)argument);
	side_queue_pair(&last);
	CHECK_EQUAL(rdma->rdma_connect(last.id, &ask), 0);
	expect_status(last.channel, RDMA_CM_EVENT_REJECTED, last.id, 28);
	side_close(&last);
	return NULL;
}

static struct side *serve(struct rdma_cm_event *event)
{
	struct rdma_conn_param answer = parameters(NULL, 0);
	struct side *server = calloc(1, sizeof(*server));

	CHECK(server);
	server->id = event->id;
	server->channel = event->id->channel;
	server->id->context = server;
	acknowledge(event);
	side_queue_pair(server);
	(void)rdma->rdma_accept(server->id, &answer); /* the active side may be gone */
	return server;
}

/* Clients that go at any moment, and a server that accepts every request. */
static void any_moment(void)
{
	struct side listener = listen_at(host, 0);
	uint16_t port = port_of(listener.id);
	struct side *servers[128] = {NULL};
	struct rdma_cm_event *event;
	int asked = 0;
	pthread_t clients;
	bool last = false;

	CHECK_EQUAL(pthread_create(&clients, NULL, many_connect_and_go, &port), 0);
	while (!last) {
		CHECK_EQUAL(rdma->rdma_get_cm_event(listener.channel, &event), 0);
		if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST) {
			acknowledge(event); /* ESTABLISHED, and every kind of end */
			continue;
		}
		last = !memcmp(event->param.conn.private_data, "last", 4);
		if (last) {
			CHECK_EQUAL(rdma->rdma_reject(event->id, NULL, 0), 0);
			CHECK_EQUAL(rdma->rdma_destroy_id(event->id), 0);
			acknowledge(event);
		} else {
			servers[asked++] = serve(event);
		}
	}
	CHECK_EQUAL(pthread_join(clients, NULL), 0);
	for (int i = 0; i < asked; i++) {
		side_drop(servers[i]);
		free(servers[i]);
	}
	CHECK(asked > 0);
	side_close(&listener);
}

int main(void)
{
	int before;

	cm_begin(100);
	STEP(before_connecting());
	before = resources();
	STEP(while_asking(true));
	STEP(while_asking(false));
	STEP(instead_of_answering());
	STEP(listener_with_requests());
	STEP(after_accepting(true));
	STEP(after_accepting(false));
	STEP(while_connected(true));
	STEP(while_connected(false));
	STEP(queue_pair_goes());
	STEP(queue_pair_goes_unnoticed());
	STEP(the_device_context());
	STEP(disconnect_after_accepting());
	STEP(destroy_waits());
	STEP(request_outlives_its_id());
	STEP(the_descriptor());
	STEP(blocked_thread());
	STEP(channel_under_a_thread(false));
	STEP(channel_under_a_thread(true));
	STEP(channel_first());
	STEP(migrate());
	STEP(migrate_to_no_channel());
	STEP(synchronous());
	STEP(wrong_states());
	STEP(wrong_arguments());
	STEP(any_moment());
	expect_resources(before);
	return 0;
}
