/* Test blocking endpoints (rdma_create_ep(3)), address lookup with hints only, the lifetime of
 * librdmacm devices, and the shared receive queue of an id. tests/cm tests the other lookups. */
#include "cm_side.h"

#include <netdb.h>

#include "cm/cm.h"

struct peer {
	char port[8];
	struct rdma_addrinfo *answer;
	struct rdma_cm_id *id;
	int result;
};

static struct rdma_addrinfo *look_up(const char *node, const char *service, int flags)
{
	struct rdma_addrinfo hints = {.ai_flags = flags, .ai_port_space = RDMA_PS_TCP};
	struct rdma_addrinfo *answer;

	CHECK_OK(rdma->rdma_getaddrinfo(node, service, &hints, &answer));
	return answer;
}

static struct ibv_qp_init_attr small_queues(void)
{
	return (struct ibv_qp_init_attr){
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
		.cap = {.max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1}};
}

/* ---- names and devices --------------------------------------------------------------------- */

/* Test rdma_getaddrinfo(3) without a host name, as libfabric calls it. The hints contain both
 * addresses. */
static void getaddrinfo_without_name_copies_addresses_from_hints(void)
{
	union address source = address_of(host, 0), destination = address_of(host, 7471);
	struct rdma_addrinfo hints = {.ai_flags = RAI_NUMERICHOST,
				      .ai_port_space = RDMA_PS_TCP,
				      .ai_src_addr = &source.any,
				      .ai_src_len = sizeof(source.v4),
				      .ai_dst_addr = &destination.any,
				      .ai_dst_len = sizeof(destination.v4)};
	struct rdma_addrinfo *answer;

	CHECK_FAILS(rdma->rdma_getaddrinfo(NULL, NULL, NULL, &answer), EINVAL);
	CHECK_OK(rdma->rdma_getaddrinfo(NULL, NULL, &hints, &answer));
	CHECK_EQUAL(answer->ai_flags, RAI_NUMERICHOST);
	CHECK_EQUAL(answer->ai_port_space, RDMA_PS_TCP);
	CHECK_EQUAL(answer->ai_qp_type, 0); /* not set in the hints */
	CHECK_EQUAL(answer->ai_src_len, sizeof(source.v4));
	CHECK(memcmp(answer->ai_src_addr, &source, sizeof(source.v4)) == 0);
	CHECK_EQUAL(answer->ai_dst_len, sizeof(destination.v4));
	CHECK(memcmp(answer->ai_dst_addr, &destination, sizeof(destination.v4)) == 0);
	CHECK(!answer->ai_next);
	rdma->rdma_freeaddrinfo(answer);

	hints = (struct rdma_addrinfo){.ai_flags = RAI_PASSIVE};
	CHECK_OK(rdma->rdma_getaddrinfo(NULL, NULL, &hints, &answer));
	CHECK_EQUAL(answer->ai_flags, RAI_PASSIVE);
	CHECK(!answer->ai_src_addr && !answer->ai_dst_addr && !answer->ai_next);
	rdma->rdma_freeaddrinfo(answer);
	hints.ai_src_addr = &source.any;
	hints.ai_src_len = 1000;
	CHECK_FAILS(rdma->rdma_getaddrinfo(NULL, NULL, &hints, &answer), EINVAL);
	CHECK_FAILS(rdma->rdma_getaddrinfo(host, NULL, &hints, &answer), EINVAL);
}

static void create_and_destroy_qp(struct ibv_context *context)
{
	struct ibv_pd *pd = rdma->ibv_alloc_pd(context);
	struct ibv_cq *cq = rdma->ibv_create_cq(context, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr attr = small_queues();
	struct ibv_qp *qp;

	CHECK(pd && cq);
	attr.send_cq = attr.recv_cq = cq;
	qp = rdma->ibv_create_qp(pd, &attr);
	CHECK(qp);
	CHECK_OK(rdma->ibv_destroy_qp(qp));
	CHECK_OK(rdma->ibv_destroy_cq(cq));
	CHECK_OK(rdma->ibv_dealloc_pd(pd));
}

/* Check that the CM's devices stay open after rdma_free_devices(), and after their last id is
 * destroyed. A program may still be using them. */
static void device_stays_open_after_free_devices(void)
{
	struct ibv_context **list, *context;
	struct side side;

	soft_cm_keep_device(true);
	list = rdma->rdma_get_devices(NULL);
	CHECK(list);
	context = list[0];
	rdma->rdma_free_devices(list);
	create_and_destroy_qp(context);
	create_and_destroy_qp(context);
	side = listen_at(host, 0);
	CHECK(side.id->verbs == context);
	side_close(&side);
	create_and_destroy_qp(context);
	soft_cm_keep_device(false);
	list = rdma->rdma_get_devices(NULL);
	rdma->rdma_free_devices(list);
}

/* ---- endpoints ----------------------------------------------------------------------------- */

static void *connect_in_thread(void *argument)
{
	struct peer *peer = argument;
	struct ibv_qp_init_attr attr = small_queues();
	struct rdma_conn_param ask = parameters("hello", 5);

	peer->answer = look_up(host, peer->port, 0);
	peer->result = rdma->rdma_create_ep(&peer->id, peer->answer, NULL, &attr);
	rdma->rdma_freeaddrinfo(peer->answer);
	if (peer->result)
		return NULL;
	CHECK(peer->id->qp && peer->id->send_cq && peer->id->recv_cq);
	CHECK_EQUAL(attr.qp_type, IBV_QPT_RC);
	peer->result = rdma->rdma_connect(peer->id, &ask) ? errno : 0;
	return NULL;
}

/* Disconnect in a thread, because the call waits for the other side's response
 * (rdma_disconnect(3)). */
static void *disconnect_in_thread(void *argument)
{
	struct peer *peer = argument;

	peer->result = rdma->rdma_disconnect(peer->id) ? errno : 0;
	return NULL;
}

static struct rdma_cm_id *open_listening_endpoint(struct ibv_qp_init_attr *attr, struct peer *peer)
{
	struct rdma_addrinfo *answer = look_up(host, "0", RAI_PASSIVE);
	struct rdma_cm_id *id;

	CHECK_OK(rdma->rdma_create_ep(&id, answer, NULL, attr));
	rdma->rdma_freeaddrinfo(answer);
	CHECK_OK(rdma->rdma_listen(id, 0));
	snprintf(peer->port, sizeof(peer->port), "%u", port_of(id));
	return id;
}

static void join_peer(pthread_t thread, struct peer *peer, int result)
{
	CHECK_OK(pthread_join(thread, NULL));
	CHECK_EQUAL(peer->result, result);
}

/* Connect and disconnect two endpoints, as the rdma_client and rdma_server examples do. Each call
 * blocks until it has completed. */
static void endpoint_calls_block_until_complete(void)
{
	struct ibv_qp_init_attr attr = small_queues();
	struct peer peer = {0};
	struct rdma_cm_id *listener = open_listening_endpoint(&attr, &peer);
	struct rdma_cm_id *server;
	struct ibv_qp_attr state;
	struct ibv_qp_init_attr initial;
	pthread_t thread;

	CHECK_OK(pthread_create(&thread, NULL, connect_in_thread, &peer));
	CHECK_OK(rdma->rdma_get_request(listener, &server));
	CHECK(server->qp && server->event && server->channel != listener->channel);
	CHECK_EQUAL(server->event->event, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(memcmp(server->event->param.conn.private_data, "hello", 5) == 0);
	CHECK_OK(rdma->rdma_accept(server, NULL));
	CHECK_EQUAL(server->event->event, RDMA_CM_EVENT_ESTABLISHED);
	join_peer(thread, &peer, 0);
	CHECK_EQUAL(peer.id->event->event, RDMA_CM_EVENT_ESTABLISHED);
	CHECK_OK(rdma->ibv_query_qp(server->qp, &state, IBV_QP_STATE, &initial));
	CHECK_EQUAL(state.qp_state, IBV_QPS_RTS);
	CHECK_OK(pthread_create(&thread, NULL, disconnect_in_thread, &peer));
	CHECK_OK(rdma->rdma_disconnect(server));
	join_peer(thread, &peer, 0);
	CHECK_EQUAL(server->event->event, RDMA_CM_EVENT_DISCONNECTED);
	rdma->rdma_destroy_ep(peer.id);
	rdma->rdma_destroy_ep(server);
	rdma->rdma_destroy_ep(listener);
}

static void rejected_endpoint_connect_fails_with_econnrefused(void)
{
	struct peer peer = {0};
	struct rdma_cm_id *listener = open_listening_endpoint(NULL, &peer);
	struct rdma_cm_id *server;
	pthread_t thread;

	CHECK_OK(pthread_create(&thread, NULL, connect_in_thread, &peer));
	CHECK_OK(rdma->rdma_get_request(listener, &server));
	CHECK(!server->qp);
	CHECK_OK(rdma->rdma_reject(server, "no", 2));
	join_peer(thread, &peer, ECONNREFUSED);
	CHECK_EQUAL(peer.id->event->event, RDMA_CM_EVENT_REJECTED);
	CHECK_EQUAL(peer.id->event->status, 28);
	CHECK(memcmp(peer.id->event->param.conn.private_data, "no", 2) == 0);
	rdma->rdma_destroy_ep(peer.id);
	CHECK(!server->event);
	rdma->rdma_destroy_ep(listener);
	rdma->rdma_destroy_ep(server);
}

static void endpoint_calls_reject_invalid_arguments(void)
{
	struct side side = listen_at(host, 0);
	struct rdma_addrinfo *answer = look_up(host, "7", 0);
	struct rdma_cm_id *id = NULL;
	int before;

	CHECK_FAILS(rdma->rdma_get_request(side.id, &id), EINVAL); /* the id is not synchronous */
	answer->ai_dst_addr->sa_family = AF_UNIX;
	before = count_resources();
	CHECK_FAILS(rdma->rdma_create_ep(&id, answer, NULL, NULL), EINVAL);
	expect_resources(before);
	answer->ai_dst_addr->sa_family = AF_INET;
	rdma->rdma_freeaddrinfo(answer);
	side_close(&side);
}

/* ---- what an id makes ---------------------------------------------------------------------- */

static void queue_pair_uses_the_srq_of_its_id(void)
{
	struct side listener = listen_at(host, 0), side = side_with_id();
	struct ibv_srq_init_attr attr = {.attr = {.max_wr = 8, .max_sge = 1}};
	struct ibv_qp_init_attr queues = small_queues();
	struct ibv_srq_attr got;

	resolve_to(&side, host, port_of(listener.id));
	CHECK_OK(rdma->rdma_create_srq(side.id, NULL, &attr));
	CHECK(side.id->srq);
	CHECK_OK(rdma->ibv_query_srq(side.id->srq, &got));
	CHECK(got.max_wr >= 8);
	CHECK_FAILS(rdma->rdma_create_srq(side.id, NULL, &attr), EINVAL);
	CHECK_OK(rdma->rdma_create_qp(side.id, NULL, &queues));
	CHECK(side.id->qp->srq == side.id->srq);
	rdma->rdma_destroy_qp(side.id);
	rdma->rdma_destroy_srq(side.id);
	CHECK(!side.id->srq);
	side_close(&side);
	side_close(&listener);
}

int main(void)
{
	int before;

	cm_begin(60);
	STEP(device_stays_open_after_free_devices());
	before = count_resources(); /* the sanitizer's thread has started by now */
	STEP(getaddrinfo_without_name_copies_addresses_from_hints());
	STEP(endpoint_calls_block_until_complete());
	STEP(rejected_endpoint_connect_fails_with_econnrefused());
	STEP(endpoint_calls_reject_invalid_arguments());
	STEP(queue_pair_uses_the_srq_of_its_id());
	expect_resources(before);
	return 0;
}
