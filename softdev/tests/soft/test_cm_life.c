/* Test the life cycle of ids and channels: destruction in every state, migration between channels,
 * synchronous ids, and calls in the wrong state. */
#define _GNU_SOURCE /* pthread_timedjoin_np */
#include "cm_side.h"

/* ---- destroyed in each state --------------------------------------------------------------- */

/* Destroy ids before they connect: an idle one, a bound one, one with an unread event (which is
 * dropped), and one with a resolved route. */
static void id_can_be_destroyed_in_every_state_before_connect(void)
{
	struct side side = side_with_id();
	union address here = address_of(host, 0), there = address_of(host, 7777);

	side_close(&side);
	side = open_bound_side(RDMA_PS_TCP, host, 0);
	side_close(&side);
	side = open_bound_side(RDMA_PS_TCP, host, 0);
	CHECK_OK(rdma->rdma_resolve_addr(side.id, &here.any, &there.any, 1000));
	side_drop(&side);
	expect_nothing(side.channel);
	CHECK_OK(rdma->rdma_create_id(side.channel, &side.id, NULL, RDMA_PS_TCP));
	resolve_to(&side, host, 7777);
	side_close(&side);
}

/* Check that a client can be rejected after its queue pair has been destroyed with
 * ibv_destroy_qp(). The CM must not try to move this queue pair to the error state. */
static void client_without_queue_pair_can_be_rejected(void)
{
	struct connection it = open_requested_connection();

	CHECK_OK(rdma->ibv_destroy_qp(it.client.id->qp));
	it.client.id->qp = NULL;
	side_drop(&it.server);
	expect_status(it.client.channel, RDMA_CM_EVENT_REJECTED, it.client.id, 28);
	connection_close(&it);
}

enum goes {
	BOTH,
	ID_ONLY, /* the queue pair remains */
	QUEUE_PAIR_ONLY, /* the id remains until rdma_disconnect() */
};

static void peer_is_notified_when_id_or_qp_is_destroyed(enum goes what)
{
	struct connection it = open_connection();
	struct ibv_qp *qp = it.server.id->qp;

	if (what == BOTH) {
		side_drop(&it.server);
	} else if (what == ID_ONLY) {
		CHECK_OK(rdma->rdma_destroy_id(it.server.id));
		it.server.id = NULL;
	} else {
		rdma->rdma_destroy_qp(it.server.id);
	}
	expect_status(it.client.channel, RDMA_CM_EVENT_DISCONNECTED, it.client.id, 0);
	if (what == ID_ONLY)
		CHECK_OK(rdma->ibv_destroy_qp(qp));
	if (what == QUEUE_PAIR_ONLY) {
		CHECK_OK(rdma->rdma_disconnect(it.server.id));
		expect_end(&it.server);
	}
	connection_close(&it);
}

static void device_context_is_shared_and_outlives_ids(void)
{
	struct side side = side_with_id();
	struct ibv_context *verbs;
	struct ibv_device_attr attr;
	struct ibv_cq *cq;
	int before = count_resources();

	resolve_to(&side, host, 7777);
	verbs = side.id->verbs;
	CHECK_EQUAL(rdma->ibv_close_device(verbs), EINVAL); /* owned by the library */
	side_drop(&side);
	expect_resources(before); /* no resources held without objects */
	CHECK_OK(rdma->ibv_query_device(verbs, &attr)); /* pointer still valid */
	CHECK_OK(rdma->rdma_create_id(side.channel, &side.id, NULL, RDMA_PS_TCP));
	resolve_to(&side, host, 7777);
	CHECK(side.id->verbs == verbs);
	cq = rdma->ibv_create_cq(verbs, 1, NULL, NULL, 0);
	side_drop(&side);
	CHECK(count_resources() > before); /* the CQ keeps the device open */
	CHECK_OK(rdma->ibv_destroy_cq(cq));
	expect_resources(before);
	side_close(&side);
}

/* ---- events keep what they are about ------------------------------------------------------- */

/* Wait 20 ms for the thread to end. Returns 0 if it has ended, or ETIMEDOUT. */
static int try_join(pthread_t thread)
{
	struct timespec soon;

	clock_gettime(CLOCK_REALTIME, &soon);
	soon.tv_nsec += 20000000;
	if (soon.tv_nsec >= 1000000000) {
		soon.tv_nsec -= 1000000000;
		soon.tv_sec++;
	}
	return pthread_timedjoin_np(thread, NULL, &soon);
}

static void *destroy_id_in_thread(void *id)
{
	CHECK_OK(rdma->rdma_destroy_id(id));
	return NULL;
}

static void destroy_id_waits_for_unacknowledged_events(void)
{
	struct side side = side_with_id();
	union address address = address_of(host, 7777);
	struct rdma_cm_event *event;
	pthread_t thread;

	CHECK_OK(rdma->rdma_resolve_addr(side.id, NULL, &address.any, 1000));
	event = expect(side.channel, RDMA_CM_EVENT_ADDR_RESOLVED, side.id);
	CHECK_OK(pthread_create(&thread, NULL, destroy_id_in_thread, side.id));
	CHECK_EQUAL(try_join(thread), ETIMEDOUT);
	CHECK_EQUAL(event->event, RDMA_CM_EVENT_ADDR_RESOLVED);
	acknowledge(event);
	CHECK_OK(pthread_join(thread, NULL));
	side.id = NULL;
	side_close(&side);
}

/* Check that the id of a request can be destroyed before its CONNECT_REQUEST event is acknowledged,
 * because the event belongs to the listener. */
static void connect_request_event_outlives_its_id(void)
{
	struct side listener = listen_at(host, 0);
	struct side client = start_connecting(host, port_of(listener.id));
	struct rdma_cm_event *event = expect(listener.channel, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);

	CHECK_OK(rdma->rdma_destroy_id(event->id));
	CHECK_EQUAL(event->param.conn.private_data_len, 56);
	CHECK_EQUAL(*(const uint8_t *)event->param.conn.private_data, 0);
	acknowledge(event);
	expect_status(client.channel, RDMA_CM_EVENT_REJECTED, client.id, 28);
	side_close(&client);
	side_close(&listener);
}

/* ---- channels ------------------------------------------------------------------------------ */

/* Check that the channel's descriptor is blocking by default, honours O_NONBLOCK, and is readable
 * if and only if an event is pending. */
static void channel_descriptor_is_readable_while_event_pending(void)
{
	struct side side = side_with_id();
	union address address = address_of(host, 7777);
	struct pollfd readable = {.fd = side.channel->fd, .events = POLLIN};
	struct rdma_cm_event *event;

	CHECK_EQUAL(fcntl(side.channel->fd, F_GETFL) & O_NONBLOCK, 0);
	CHECK_EQUAL(fcntl(side.channel->fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
	CHECK_EQUAL(poll(&readable, 1, 0), 0);
	CHECK_OK(fcntl(side.channel->fd, F_SETFL, O_NONBLOCK));
	CHECK_FAILS(rdma->rdma_get_cm_event(side.channel, &event), EAGAIN);
	CHECK_OK(rdma->rdma_resolve_addr(side.id, NULL, &address.any, 1000));
	CHECK_EQUAL(poll(&readable, 1, -1), 1);
	CHECK_EQUAL(poll(&readable, 1, 0), 1); /* level triggered */
	acknowledge(expect(side.channel, RDMA_CM_EVENT_ADDR_RESOLVED, side.id));
	CHECK_EQUAL(poll(&readable, 1, 0), 0);
	side_close(&side);
}

static void ignore_signal(int number)
{
	(void)number;
}

static void *wait_until_interrupted(void *channel)
{
	struct rdma_cm_event *event;

	CHECK_FAILS(rdma->rdma_get_cm_event(channel, &event), EINTR);
	return NULL;
}

/* Check that a thread keeps waiting for an event even if the channel is destroyed. The channel is
 * destroyed before the thread starts if `late` is set, and otherwise while the thread waits. Only a
 * signal ends the wait. */
static void wait_survives_destruction_of_its_channel(bool late)
{
	struct sigaction interrupt = {.sa_handler = ignore_signal}, before;
	struct side side = side_open();
	pthread_t thread;
	int rc;

	CHECK_OK(sigaction(SIGUSR1, &interrupt, &before));
	if (late)
		rdma->rdma_destroy_event_channel(side.channel);
	CHECK_OK(pthread_create(&thread, NULL, wait_until_interrupted, side.channel));
	CHECK_EQUAL(try_join(thread), ETIMEDOUT);
	if (!late)
		rdma->rdma_destroy_event_channel(side.channel);
	CHECK_EQUAL(try_join(thread), ETIMEDOUT);
	do { /* repeat until the signal arrives during the wait */
		CHECK_OK(pthread_kill(thread, SIGUSR1));
		rc = try_join(thread);
	} while (rc == ETIMEDOUT);
	CHECK_EQUAL(rc, 0);
	CHECK_OK(sigaction(SIGUSR1, &before, NULL));
}

/* rdma_destroy_event_channel(3) requires that all ids of a channel are destroyed first. If they are
 * not, the peers must still be notified. */
static void destroying_channel_before_ids_notifies_peers(void)
{
	struct connection it = open_connection();
	struct side asking = start_connecting(host, port_of(it.listener.id));

	rdma->rdma_destroy_event_channel(it.listener.channel);
	it.listener.channel = NULL;
	expect_status(it.client.channel, RDMA_CM_EVENT_DISCONNECTED, it.client.id, 0);
	acknowledge(expect(asking.channel, RDMA_CM_EVENT_REJECTED, asking.id));
	CHECK_FAILS(rdma->rdma_listen(it.listener.id, 1), EINVAL);
	CHECK_OK(rdma->rdma_disconnect(it.server.id));
	side_close(&asking);
	connection_close(&it);
}

static void migrate_to(struct side *side, struct rdma_event_channel *channel)
{
	CHECK_OK(rdma->rdma_migrate_id(side->id, channel));
	CHECK(side->id->channel == channel);
	side->channel = channel;
}

/* Check that rdma_migrate_id(3) moves pending events, and that later events are reported on the new
 * channel. */
static void migrated_id_moves_pending_and_later_events(void)
{
	struct connection it = open_requested_connection();
	struct side other = side_open();

	migrate_to(&it.server, other.channel);
	accept_side(&it.server);
	expect_established(&it.client, &it.server);
	CHECK_OK(rdma->rdma_disconnect(it.server.id));
	expect_status(it.client.channel, RDMA_CM_EVENT_DISCONNECTED, it.client.id, 0);
	migrate_to(&it.server, it.listener.channel);
	expect_end(&it.server);
	expect_nothing(other.channel);
	side_drop(&it.server);
	side_close(&it.client);
	/* Pending requests move with their listener. */
	it.client = start_connecting(host, port_of(it.listener.id));
	wait_for_event(it.listener.channel);
	struct rdma_event_channel *before = it.listener.channel;

	migrate_to(&it.listener, other.channel);
	expect_nothing(before);
	rdma->rdma_destroy_event_channel(before);
	it.server = take_request(&it.listener);
	CHECK(it.server.id->channel == other.channel);
	accept_side(&it.server);
	expect_established(&it.client, &it.server);
	connection_close(&it);
}

/* Check that migrating an id to NULL makes it synchronous, and migrating it to a channel makes it
 * asynchronous again. */
static void migrating_to_null_makes_id_synchronous(void)
{
	struct side side = side_with_id();
	union address address = address_of(host, 7777);

	CHECK_OK(rdma->rdma_migrate_id(side.id, NULL));
	CHECK(side.id->channel != side.channel);
	CHECK_OK(rdma->rdma_resolve_addr(side.id, NULL, &address.any, 1000));
	CHECK_EQUAL(side.id->event->event, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK_OK(rdma->rdma_migrate_id(side.id, side.channel));
	CHECK(side.id->channel == side.channel);
	CHECK(!side.id->event);
	CHECK_OK(rdma->rdma_resolve_route(side.id, 1000));
	expect_status(side.channel, RDMA_CM_EVENT_ROUTE_RESOLVED, side.id, 0);
	CHECK_OK(rdma->rdma_migrate_id(side.id, side.channel));
	side_close(&side);
}

/* ---- calls in the wrong state -------------------------------------------------------------- */

/* Check that every call fails in the current state of `id`, except the calls whose letters are in
 * `allowed`. */
static void expect_calls_fail(struct rdma_cm_id *id, const char *allowed)
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

static void calls_fail_in_wrong_id_state(void)
{
	struct side side = side_with_id();
	struct side listener = listen_at(host, 0);
	struct side client, server;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT};
	int mask;

	expect_calls_fail(side.id, "bal");
	CHECK_FAILS(rdma->rdma_init_qp_attr(side.id, &attr, &mask), EINVAL);
	expect_calls_fail(listener.id, "");
	resolve_to(&side, host, 7777);
	expect_calls_fail(side.id, "c");
	CHECK_OK(rdma->rdma_init_qp_attr(side.id, &attr, &mask));
	CHECK_EQUAL(attr.port_num, 1);
	attr.qp_state = IBV_QPS_RTR;
	CHECK_FAILS(rdma->rdma_init_qp_attr(side.id, &attr, &mask), EINVAL);
	attr.qp_state = IBV_QPS_SQD;
	CHECK_FAILS(rdma->rdma_init_qp_attr(side.id, &attr, &mask), EINVAL);
	client = start_connecting(host, port_of(listener.id));
	expect_calls_fail(client.id, "Rd");
	server = take_request(&listener);
	expect_calls_fail(server.id, "ARd");
	accept_side(&server);
	expect_established(&client, &server);
	CHECK_FAILS(rdma->rdma_notify(client.id, IBV_EVENT_COMM_EST), EISCONN);
	expect_calls_fail(client.id, "dn");
	expect_calls_fail(server.id, "dn");
	CHECK_OK(rdma->rdma_disconnect(client.id));
	expect_status(server.channel, RDMA_CM_EVENT_DISCONNECTED, server.id, 0);
	expect_status(client.channel, RDMA_CM_EVENT_DISCONNECTED, client.id, 0);
	expect_calls_fail(client.id, "d");
	expect_calls_fail(server.id, "d");
	attr.qp_state = IBV_QPS_INIT;
	CHECK_FAILS(rdma->rdma_init_qp_attr(client.id, &attr, &mask), EINVAL);
	side_drop(&server);
	side_close(&client);
	side_close(&side);
	side_close(&listener);
}

static void calls_reject_null_and_invalid_arguments(void)
{
	struct side side = side_with_id();
	struct rdma_cm_id *id;

	CHECK_FAILS(rdma->rdma_create_id(side.channel, NULL, NULL, RDMA_PS_TCP), EINVAL);
	CHECK_FAILS(rdma->rdma_create_id(side.channel, &id, NULL, (enum rdma_port_space)1), EINVAL);
	CHECK_FAILS(rdma->rdma_create_id(side.channel, &id, NULL, RDMA_PS_IPOIB), EPROTONOSUPPORT);
	CHECK_FAILS(rdma->rdma_destroy_id(NULL), EINVAL);
	rdma->rdma_destroy_event_channel(NULL);

	/* Calls fail if an argument is NULL, or if the id has no device yet. */
	struct rdma_conn_param parameters = {0};
	struct ibv_qp_init_attr qp = {0};
	struct ibv_srq_init_attr srq = {0};
	struct ibv_ece ece = {.vendor_id = 1, .comp_mask = 1};
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
	CHECK_FAILS(rdma->rdma_set_local_ece(NULL, &ece), EINVAL);
	CHECK_FAILS(rdma->rdma_set_local_ece(side.id, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_set_local_ece(side.id, &ece), EINVAL); /* unknown comp_mask bit */
	CHECK_FAILS(rdma->rdma_get_remote_ece(NULL, &ece), EINVAL);
	CHECK_FAILS(rdma->rdma_get_remote_ece(side.id, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_reject_ece(NULL, NULL, 0), EINVAL);
	rdma->rdma_destroy_ep(NULL);
	rdma->rdma_destroy_qp(NULL);
	rdma->rdma_destroy_srq(NULL);
	rdma->rdma_free_devices(NULL);
	rdma->rdma_freeaddrinfo(NULL);
	side_close(&side);
}

int main(void)
{
	int before;

	cm_begin(100);
	STEP(id_can_be_destroyed_in_every_state_before_connect());
	before = count_resources();
	STEP(client_without_queue_pair_can_be_rejected());
	for (enum goes what = BOTH; what <= QUEUE_PAIR_ONLY; what++)
		STEP(peer_is_notified_when_id_or_qp_is_destroyed(what));
	STEP(device_context_is_shared_and_outlives_ids());
	STEP(destroy_id_waits_for_unacknowledged_events());
	STEP(connect_request_event_outlives_its_id());
	STEP(channel_descriptor_is_readable_while_event_pending());
	STEP(wait_survives_destruction_of_its_channel(false));
	STEP(wait_survives_destruction_of_its_channel(true));
	STEP(destroying_channel_before_ids_notifies_peers());
	STEP(migrated_id_moves_pending_and_later_events());
	STEP(migrating_to_null_makes_id_synchronous());
	STEP(calls_fail_in_wrong_id_state());
	STEP(calls_reject_null_and_invalid_arguments());
	expect_resources(before);
	return 0;
}
