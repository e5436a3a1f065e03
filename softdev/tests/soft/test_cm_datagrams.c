/* Test datagram services: lookup, rejection and repeated requests, and hostile or lost
 * datagrams. */
#include "cm_side.h"

#include "cm/cm_internal.h"

static struct side serve_at(const char *text, uint16_t port, int backlog)
{
	struct side side = open_bound_side(RDMA_PS_UDP, text, port);

	CHECK_EQUAL(side.id->qp_type, IBV_QPT_UD);
	CHECK_OK(rdma->rdma_listen(side.id, backlog));
	return side;
}

static struct side look_up_service(const char *text, uint16_t port, const char *question)
{
	struct side side = side_of(RDMA_PS_UDP);
	struct rdma_conn_param asked = {.private_data = question,
					.private_data_len = (uint8_t)strlen(question)};

	resolve_to(&side, text, port);
	CHECK_OK(rdma->rdma_connect(side.id, &asked));
	return side;
}

static struct rdma_cm_id *take_lookup(struct side *service, const char *question)
{
	struct rdma_cm_event *event = expect(service->channel, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
	struct rdma_cm_id *id = event->id;

	CHECK(event->listen_id == service->id);
	CHECK_EQUAL(event->param.ud.private_data_len, SOFT_SIDR_REQ_PRIVATE);
	CHECK(memcmp(event->param.ud.private_data, question, strlen(question)) == 0);
	acknowledge(event);
	return id;
}

static void accept_lookup(struct rdma_cm_id *id, uint32_t qpn, const char *text)
{
	struct rdma_conn_param said = {
		.private_data = text, .private_data_len = (uint8_t)strlen(text), .qp_num = qpn};

	CHECK_OK(rdma->rdma_accept(id, &said));
}

/* Check that the lookup returned `qpn` and the private data `text`. Then close `asker`, and destroy
 * `request` unless it is NULL. */
static void expect_found(struct side *asker, uint32_t qpn, const char *text,
			 struct rdma_cm_id *request)
{
	struct rdma_cm_event *event = expect(asker->channel, RDMA_CM_EVENT_ESTABLISHED, asker->id);

	CHECK_EQUAL(event->param.ud.qp_num, qpn);
	CHECK_EQUAL(event->param.ud.qkey, RDMA_UDP_QKEY);
	CHECK_EQUAL(event->param.ud.private_data_len, SOFT_SIDR_REP_PRIVATE);
	CHECK(memcmp(event->param.ud.private_data, text, strlen(text)) == 0);
	CHECK_EQUAL(event->param.ud.ah_attr.is_global, 1);
	CHECK(memcmp(&event->param.ud.ah_attr.grh.dgid, &asker->id->route.addr.addr.ibaddr.dgid,
		     16) == 0);
	acknowledge(event);
	side_close(asker);
	if (request)
		CHECK_OK(rdma->rdma_destroy_id(request));
}

static void service_lookup_returns_qpn_and_private_data(const char *listens, const char *asked)
{
	struct side service = serve_at(listens, 0, 0);
	struct side asker = look_up_service(asked, port_of(service.id), "where?");
	struct rdma_cm_id *request = take_lookup(&service, "where?");

	CHECK(request->verbs);
	CHECK_EQUAL(port_of(request), port_of(service.id));
	CHECK_EQUAL(rdma->rdma_get_dst_port(request), rdma->rdma_get_src_port(asker.id));
	CHECK_EQUAL(request->route.addr.src_addr.sa_family,
		    asker.id->route.addr.dst_addr.sa_family);
	accept_lookup(request, 0x1234, "here");
	expect_found(&asker, 0x1234, "here", request);
	expect_nothing(service.channel);
	side_close(&service);
}

static void rejected_lookup_reports_unreachable(void)
{
	struct side service = serve_at(host, 0, 0);
	struct side asker = look_up_service(host, port_of(service.id), "?");
	struct rdma_cm_id *request = take_lookup(&service, "?");
	struct rdma_cm_event *event;
	uint8_t data[SOFT_SIDR_REP_PRIVATE + 1] = {'n', 'o'};

	CHECK_FAILS(rdma->rdma_reject(request, data, sizeof(data)), EINVAL);
	CHECK_OK(rdma->rdma_reject(request, data, 2));
	CHECK_FAILS(rdma->rdma_reject(request, data, 2), EINVAL);
	event = expect(asker.channel, RDMA_CM_EVENT_UNREACHABLE, asker.id);
	CHECK_EQUAL(event->status, SOFT_SIDR_REJECTED);
	CHECK(memcmp(event->param.ud.private_data, "no", 3) == 0);
	acknowledge(event);
	CHECK_OK(rdma->rdma_destroy_id(request));
	side_close(&asker);
	asker = look_up_service(host, port_of(service.id), "?"); /* never taken by the service */
	wait_for_event(service.channel);
	side_close(&service);
	expect_status(asker.channel, RDMA_CM_EVENT_UNREACHABLE, asker.id, SOFT_SIDR_REJECTED);
	side_close(&asker);
}

/* Check that a lookup is repeated for a while if the port has no service. The server may be
 * replacing its service. */
static void lookup_retries_while_port_has_no_service(bool comes_late)
{
	struct side service = serve_at(host, 0, 0);
	uint16_t port = port_of(service.id);

	side_close(&service);
	struct side asker = look_up_service(host, port, "?");

	if (comes_late) {
		expect_nothing(asker.channel); /* not failed yet */
		service = serve_at(host, port, 0);
		struct rdma_cm_id *request = take_lookup(&service, "?");

		accept_lookup(request, 5, "late");
		expect_found(&asker, 5, "late", request);
		side_close(&service);
		return;
	}
	expect_status(asker.channel, RDMA_CM_EVENT_UNREACHABLE, asker.id, SOFT_SIDR_NO_SERVICE);
	CHECK_FAILS(rdma->rdma_connect(asker.id, NULL), EINVAL);
	side_close(&asker);
}

static void request_outlives_its_listener_and_asker(void)
{
	struct side service = serve_at(host, 0, 0);
	struct side asker = look_up_service(host, port_of(service.id), "?");
	struct rdma_cm_id *request = take_lookup(&service, "?");

	side_drop(&service);
	accept_lookup(request, 7, "");
	expect_found(&asker, 7, "", request);
	side_close(&service);

	service = serve_at(host, 0, 0);
	asker = look_up_service(host, port_of(service.id), "?");
	request = take_lookup(&service, "?");
	side_close(&asker); /* before the response */
	accept_lookup(request, 7, "");
	side_drop(&service);
	CHECK_OK(rdma->rdma_destroy_id(request));
	side_close(&service);
}

/* Check that with a backlog of one, the second client repeats its request until the application has
 * taken the first request. */
static void second_request_waits_while_backlog_is_full(void)
{
	struct side service = serve_at(host, 0, 1);
	struct side first = look_up_service(host, port_of(service.id), "1");
	struct side second = look_up_service(host, port_of(service.id), "2");

	wait_for_event(service.channel);
	expect_nothing(first.channel);
	soft_lock();
	CHECK_EQUAL(soft_cm_id_of(service.id)->undelivered, 1);
	soft_unlock();
	struct rdma_cm_event *event = expect(service.channel, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
	struct rdma_cm_id *request = event->id;
	bool first_came = memcmp(event->param.ud.private_data, "1", 1) == 0;

	acknowledge(event);
	accept_lookup(request, 1, "");
	expect_found(first_came ? &first : &second, 1, "", request);
	request = take_lookup(&service, first_came ? "2" : "1");
	accept_lookup(request, 2, "");
	expect_found(first_came ? &second : &first, 2, "", request);
	side_close(&service);
}

/* ---- the datagrams themselves -------------------------------------------------------------- */

static int udp_socket(union address *own)
{
	socklen_t length = sizeof(own->storage);
	struct timeval limit = {.tv_sec = 20};
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	*own = address_of("127.0.0.1", 0);
	CHECK(fd >= 0);
	CHECK_OK(bind(fd, &own->any, sizeof(own->v4)));
	CHECK_OK(getsockname(fd, &own->any, &length));
	CHECK_OK(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)));
	return fd;
}

static void send_bytes(int fd, const union address *to, const void *bytes, size_t length)
{
	CHECK_EQUAL(sendto(fd, bytes, length, 0, &to->any, address_length(to)), (ssize_t)length);
}

static void send_cm_message(int fd, const union address *to, const struct soft_cm_message *message)
{
	uint8_t bytes[SOFT_MAD_SIZE];

	soft_cm_encode(message, bytes);
	send_bytes(fd, to, bytes, sizeof(bytes));
}

static struct soft_cm_message receive_cm_message(int fd, union address *from)
{
	struct soft_cm_message message;
	uint8_t bytes[SOFT_MAD_SIZE];
	socklen_t length = sizeof(from->storage);

	CHECK_EQUAL(recvfrom(fd, bytes, sizeof(bytes), MSG_TRUNC, &from->any, &length),
		    SOFT_MAD_SIZE);
	CHECK_EQUAL(soft_cm_decode(bytes, sizeof(bytes), &message), 0);
	return message;
}

/* Check that a repeated request gets the same response and is not reported again. */
static void repeated_request_gets_the_same_response(void)
{
	struct side service = serve_at("127.0.0.1", 0, 0);
	union address there = address_of("127.0.0.1", port_of(service.id)), own, from;
	int fd = udp_socket(&own);
	struct soft_cm_message question = {.type = SOFT_SIDR_REQ, .number = 77}, got;
	struct rdma_cm_id *request;

	send_cm_message(fd, &there, &question);
	send_cm_message(fd, &there, &question);
	request = take_lookup(&service, "");
	expect_nothing(service.channel);
	accept_lookup(request, 0x99, "x");
	for (int i = 0; i < 2; i++) {
		got = receive_cm_message(fd, &from);
		CHECK_EQUAL(got.type, SOFT_SIDR_REP);
		CHECK_EQUAL(got.number, 77);
		CHECK_EQUAL(got.qpn, 0x99);
		CHECK_EQUAL(got.private_data[0], 'x');
		CHECK_EQUAL(ntohs(from.v4.sin_port), port_of(service.id));
		send_cm_message(fd, &there, &question);
	}
	expect_nothing(service.channel);
	CHECK_OK(rdma->rdma_destroy_id(request));
	close(fd);
	side_close(&service);
}

/* Check that datagrams other than a complete SIDR_REQ are ignored, without a response or an event.
 * The last datagram is valid and has another number. Its response shows that the service has read
 * all the earlier ones. */
static void malformed_datagrams_are_ignored(void)
{
	struct side service = serve_at("127.0.0.1", 0, 0);
	union address there = address_of("127.0.0.1", port_of(service.id)), own, from;
	int fd = udp_socket(&own);
	struct soft_cm_message question = {.type = SOFT_SIDR_REQ, .number = 5};
	static const uint8_t checked[] = {0, 1, 2, 3, 16, 17};
	uint8_t bytes[2000];

	soft_cm_encode(&question, bytes);
	for (size_t cut = 0; cut < SOFT_MAD_SIZE; cut += 13)
		send_bytes(fd, &there, bytes, cut);
	send_bytes(fd, &there, bytes, SOFT_MAD_SIZE + 1);
	send_bytes(fd, &there, bytes, sizeof(bytes));
	for (size_t i = 0; i < sizeof(checked); i++) {
		bytes[checked[i]] ^= 0x55;
		send_bytes(fd, &there, bytes, SOFT_MAD_SIZE);
		bytes[checked[i]] ^= 0x55;
	}
	send_cm_message(fd, &there, &(struct soft_cm_message){.type = SOFT_SIDR_REP, .number = 5});
	question.number = 6;
	send_cm_message(fd, &there, &question);
	/* Destroying the id of the valid request rejects it. */
	CHECK_OK(rdma->rdma_destroy_id(take_lookup(&service, "")));
	struct soft_cm_message got = receive_cm_message(fd, &from);

	CHECK_EQUAL(got.type, SOFT_SIDR_REP);
	CHECK_EQUAL(got.number, 6);
	CHECK_FAILS(recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT), EAGAIN);
	expect_nothing(service.channel);
	close(fd);
	side_close(&service);
}

/* Check that the client repeats an unanswered request, ignores responses to other requests, and
 * finally gives up. */
static void unanswered_lookup_is_retried_until_it_times_out(void)
{
	union address own, from;
	int fd = udp_socket(&own);
	struct side asker = look_up_service("127.0.0.1", ntohs(own.v4.sin_port), "lost");
	struct soft_cm_message first = receive_cm_message(fd, &from),
			       again = receive_cm_message(fd, &from);

	CHECK_EQUAL(first.type, SOFT_SIDR_REQ);
	CHECK_EQUAL(again.number, first.number);
	CHECK(memcmp(again.private_data, "lost", 4) == 0);
	send_cm_message(fd, &from,
			&(struct soft_cm_message){
				.type = SOFT_SIDR_REP, .number = first.number + 1, .status = 2});
	send_cm_message(fd, &from,
			&(struct soft_cm_message){.type = SOFT_SIDR_REP,
						  .qpn = 3,
						  .qkey = RDMA_UDP_QKEY,
						  .number = first.number});
	expect_found(&asker, 3, "", NULL);

	soft_device.cm->limits.service_ms = 100;
	asker = look_up_service("127.0.0.1", ntohs(own.v4.sin_port), "");
	expect_status(asker.channel, RDMA_CM_EVENT_UNREACHABLE, asker.id, -ETIMEDOUT);
	side_close(&asker);
	close(fd);
}

/* ---- the calls ----------------------------------------------------------------------------- */

static void datagram_service_calls_reject_invalid_use(void)
{
	struct side service = serve_at(host, 0, 0);
	struct side asker = side_of(RDMA_PS_UDP);
	uint8_t data[SOFT_SIDR_REQ_PRIVATE + 1] = {0};
	struct rdma_conn_param question = {.private_data = data, .private_data_len = sizeof(data)};
	struct rdma_cm_id *request;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT};
	int mask;

	CHECK_FAILS(rdma->rdma_connect(asker.id, &question), EINVAL);
	resolve_to(&asker, host, port_of(service.id));
	CHECK_FAILS(rdma->rdma_connect(asker.id, &question), EINVAL);
	CHECK_OK(rdma->rdma_init_qp_attr(asker.id, &attr, &mask));
	CHECK_EQUAL(mask, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
	CHECK_EQUAL(attr.qkey, RDMA_UDP_QKEY);
	CHECK_OK(rdma->rdma_connect(asker.id, NULL));
	CHECK_FAILS(rdma->rdma_connect(asker.id, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_reject(asker.id, NULL, 0), EINVAL);
	request = take_lookup(&service, "");
	CHECK_FAILS(rdma->rdma_accept(request, NULL), EINVAL); /* no queue pair given */
	question.private_data_len = SOFT_SIDR_REP_PRIVATE + 1;
	CHECK_FAILS(rdma->rdma_accept(request, &question), EINVAL);
	accept_lookup(request, 1, "");
	CHECK_FAILS(rdma->rdma_reject(request, NULL, 0), EINVAL);
	expect_status(asker.channel, RDMA_CM_EVENT_ESTABLISHED, asker.id, 0);
	CHECK_OK(rdma->rdma_disconnect(asker.id));
	expect_nothing(asker.channel);
	CHECK_OK(rdma->rdma_destroy_id(request));
	side_close(&asker);
	side_close(&service);
}

/* Check that ids of different port spaces can use the same port, but two ids of one port space
 * cannot. */
static void port_spaces_have_separate_port_numbers(void)
{
	struct side connections = listen_at(host, 0);
	struct side service = serve_at(host, port_of(connections.id), 0);
	struct side other = side_of(RDMA_PS_UDP);
	union address address = address_of(host, port_of(service.id));
	int on = 1;

	CHECK_EQUAL(port_of(service.id), port_of(connections.id));
	CHECK_OK(rdma->rdma_set_option(other.id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on,
				       sizeof(on)));
	CHECK_FAILS(rdma->rdma_bind_addr(other.id, &address.any), EADDRINUSE);
	address = address_of("0.0.0.0", port_of(service.id));
	CHECK_FAILS(rdma->rdma_bind_addr(other.id, &address.any), EADDRNOTAVAIL);
	side_close(&other);
	side_close(&service);
	side_close(&connections);
}

int main(void)
{
	int before;

	cm_begin(60);
	STEP(lookup_retries_while_port_has_no_service(false));
	before = count_resources(); /* the sanitizer's thread has started by now */
	STEP(service_lookup_returns_qpn_and_private_data(host, host));
	STEP(service_lookup_returns_qpn_and_private_data("::1", "::1"));
	STEP(service_lookup_returns_qpn_and_private_data("0.0.0.0", "127.0.0.3"));
	STEP(service_lookup_returns_qpn_and_private_data("::", "::1"));
	STEP(service_lookup_returns_qpn_and_private_data("::", "127.0.0.3"));
	STEP(rejected_lookup_reports_unreachable());
	STEP(lookup_retries_while_port_has_no_service(true));
	STEP(request_outlives_its_listener_and_asker());
	STEP(second_request_waits_while_backlog_is_full());
	STEP(repeated_request_gets_the_same_response());
	STEP(malformed_datagrams_are_ignored());
	STEP(unanswered_lookup_is_retried_until_it_times_out());
	STEP(datagram_service_calls_reject_invalid_use());
	STEP(port_spaces_have_separate_port_numbers());
	expect_resources(before);
	return 0;
}
