/* Fuzz the connection manager's MADs. A host that has listeners, clients and established
 * connections receives arbitrary bytes and nearly valid messages. They come from its peer and from
 * other hosts.
 *
 * The application makes any call at any time. The host must send only valid MADs, and a limited
 * number in response to each MAD that it receives. All resources must be freed at the end, and the
 * host must still respond.
 */
#include "../soft/cm_side.h"
#include "fuzz.h"

#include "cm/cm_internal.h"
#include "cm/cm_mad.h"

enum { IDS = 4, PLACES = 3, PEERS = 4, HEARD = 8 };

static struct world {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener, *service;
	struct rdma_cm_id *ids[IDS];
	struct soft_cm_mad heard[HEARD]; /* the last MADs that the host sent */
	unsigned said, held;
} world;

static int hold(void)
{
	world.held++;
	return 0;
}

static void release(void)
{
	CHECK(world.held-- > 0);
}

static void record_mad(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *mad,
		       size_t length)
{
	(void)from;
	(void)to;
	CHECK(soft_cm_mad_decode(mad, length, &world.heard[world.said++ % HEARD]));
}

static bool is_shared(const union ibv_gid *gid)
{
	(void)gid;
	return false;
}

static const struct soft_gsi_calls gsi = {
	.hold = hold, .release = release, .is_shared = is_shared, .send = record_mad};

static struct rdma_cm_id *open_listener(enum rdma_port_space space)
{
	union address any = address_of("127.0.0.1", 0);
	struct rdma_cm_id *id;

	CHECK_OK(rdma->rdma_create_id(world.channel, &id, NULL, space));
	CHECK_OK(rdma->rdma_bind_addr(id, &any.any));
	CHECK_OK(rdma->rdma_listen(id, 4));
	return id;
}

static void open_world(void)
{
	rdma = aiordma_embedded_calls();
	CHECK(world.channel = rdma->rdma_create_event_channel());
	CHECK_OK(fcntl(world.channel->fd, F_SETFL, O_NONBLOCK));
	soft_lock();
	soft_cm_use_gsi(&gsi);
	soft_unlock();
	soft_device.cm->limits.half_open = PLACES;
	world.listener = open_listener(RDMA_PS_TCP);
	world.service = open_listener(RDMA_PS_UDP);
}

/* ---- the application ------------------------------------------------------------------------- */

static void destroy(struct rdma_cm_id **id)
{
	if (*id)
		CHECK_OK(rdma->rdma_destroy_id(*id));
	*id = NULL;
}

static void connect_to_peer(struct rdma_cm_id **id, bool datagrams)
{
	struct rdma_conn_param said = {.qp_num = 0xffff00};
	union address to = address_of("127.0.0.1", 7);

	destroy(id);
	CHECK_OK(rdma->rdma_create_id(world.channel, id, NULL,
				      datagrams ? RDMA_PS_UDP : RDMA_PS_TCP));
	CHECK_OK(rdma->rdma_resolve_addr(*id, NULL, &to.any, 1));
	CHECK_OK(rdma->rdma_resolve_route(*id, 1));
	CHECK_OK(rdma->rdma_connect(*id, &said));
}

static void make_call(struct rdma_cm_id **id, const uint8_t *r)
{
	struct rdma_conn_param said = {
		.qp_num = 0xffff80, .private_data = r, .private_data_len = r[1] & 8};

	if (!*id || (r[0] & 7) > 5) {
		connect_to_peer(id, r[1] & 1);
		return;
	}
	switch (r[0] & 7) {
	case 0:
	case 1:
		(void)rdma->rdma_accept(*id, &said);
		break;
	case 2:
		(void)rdma->rdma_reject(*id, r, r[1] & 8);
		break;
	case 3:
		(void)rdma->rdma_disconnect(*id);
		break;
	case 4:
		destroy(id);
		break;
	case 5:
		(void)rdma->rdma_establish(*id);
		break;
	}
}

/* Take an event. The id of a connect request is added to world.ids, or destroyed if world.ids is
 * full. Returns false if no event is pending. */
static bool take_event(void)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *request;
	int i = 0;

	if (rdma->rdma_get_cm_event(world.channel, &event))
		return false;
	request = event->event == RDMA_CM_EVENT_CONNECT_REQUEST ? event->id : NULL;
	CHECK_OK(rdma->rdma_ack_cm_event(event));
	while (request && i < IDS && world.ids[i])
		i++;
	if (request && i < IDS)
		world.ids[i] = request;
	else
		destroy(&request);
	return true;
}

/* ---- the network ----------------------------------------------------------------------------- */

static void deliver(uint8_t peer, const uint8_t *bytes, size_t length)
{
	union ibv_gid from = soft_gid_loopback, to = soft_gid_loopback;

	from.raw[15] ^= peer % PEERS;
	soft_lock();
	soft_cm_mad_received(&from, &to, bytes, length);
	soft_unlock();
}

/* Send a nearly valid message to the host. Bytes of `r`: 0 type, 1 MAD that it responds to, 2
 * sender, 3 sender's ID, 4 QP number, 5 reason or status, 6 whether it is for a listener, 7-8 and
 * 9-10 position and XOR mask of two corrupted bytes. */
static void send_mad(const uint8_t *r)
{
	const struct soft_cm_mad *to = &world.heard[r[1] % HEARD];
	struct soft_cm_mad mad = *to;
	uint8_t bytes[SOFT_MAD_SIZE];
	bool datagrams = r[0] % SOFT_SIDR_REP >= SOFT_SIDR_REQ - 1;

	mad.message.type = (enum soft_cm_type)(1 + r[0] % SOFT_SIDR_REP);
	mad.local_id = to->remote_id ? to->remote_id : r[3];
	mad.remote_id = to->local_id;
	mad.message.qpn = r[4];
	mad.message.reason = mad.message.status = r[5] & 31;
	mad.message.private_data_len = 0;
	mad.message.qp_type = IBV_QPT_RC;
	mad.message.path_mtu = IBV_MTU_1024;
	mad.peer_qpn = r[4] & 1 ? 0xffff00 : 0xffff80;
	if (r[6] & 1) {
		mad.local_id = r[3];
		mad.transaction = r[3];
		mad.message.port_space = datagrams ? RDMA_PS_UDP : RDMA_PS_TCP;
		mad.service_prefix = 0;
		mad.service_port =
			ntohs(rdma->rdma_get_src_port(datagrams ? world.service : world.listener));
	}
	memcpy(mad.source, &soft_gid_loopback, sizeof(mad.source));
	memcpy(mad.destination, &soft_gid_loopback, sizeof(mad.destination));
	mad.source[15] ^= r[2] % PEERS;
	soft_cm_mad_encode(&mad, bytes);
	bytes[r[7]] ^= r[8];
	bytes[r[9]] ^= r[10];
	deliver(r[2], bytes, sizeof(bytes));
}

static void execute_record(const uint8_t *r)
{
	unsigned said = world.said;
	uint8_t bytes[SOFT_MAD_SIZE + 1] = {1, 7, 2, 3};

	switch (r[0] & 7) {
	case 0: /* arbitrary bytes in a MAD */
		memcpy(bytes + (r[1] & 31), r + 2, RECORD - 2);
		deliver(r[1] >> 5, bytes, sizeof(bytes) - (r[1] != 0xff));
		break;
	case 1:
	case 2:
	case 3:
	case 4:
		send_mad(r + 1);
		CHECK(world.said - said <= 2); /* a REQ may also end an old connection */
		break;
	case 5:
		make_call(&world.ids[r[1] % IDS], r + 2);
		break;
	case 6:
		take_event();
		break;
	case 7:
		fuzz_pass_time(fuzz16(r + 1) * UINT64_C(2000000));
		break;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	fuzz_seed(data, size);
	if (!world.channel)
		open_world();
	memset(world.heard, 0, sizeof(world.heard));
	soft_device.cm->lingering.seed = 0;
	soft_cm_id_of(world.listener)->listener->parked.seed = 0;
	for (size_t at = 0; at + RECORD <= size; at += RECORD)
		execute_record(data + at);
	for (int rounds = 0; rounds < 3; rounds++) {
		while (take_event())
			;
		for (int i = 0; i < IDS; i++)
			destroy(&world.ids[i]);
		for (int i = 0; i < 200; i++)
			fuzz_pass_time(UINT64_C(1000000000));
	}
	CHECK_EQUAL(soft_device.cm->gsi.ids.count, 0);
	CHECK_EQUAL(world.held, 2); /* one per listener */
	unsigned said = world.said;

	send_mad((const uint8_t[RECORD]){SOFT_CM_REQ - 1, 0, 0, 9, 9, 0, 1, 0, 0, 0, 0});
	CHECK_EQUAL(world.said - said, 1); /* MRA */
	CHECK(take_event() && world.ids[0]);
	destroy(&world.ids[0]);
	fuzz_pass_time(UINT64_C(100000000000));
	return 0;
}
