/* Simulated sockets that replace path/roce/sockets.c, so that RoCE v2 datagrams cross the simulated
 * wire (wire.h).
 *
 * The wire may also flip a bit of a datagram, deliver several datagrams joined (UDP_GRO), and add
 * modified copies from strangers.
 */
#pragma once

enum {
	HEADROOM = 64, /* same as in sockets.c */
	JOINED = 60000, /* maximum bytes */
	ROOM = 16 * 1024 + SOFT_FRAME_HEADER, /* minimum; at least one frame */
};

static uint8_t staged[SOFT_ROCE_PACKET_MAX];

static union ibv_gid address_of_host(int host)
{
	return wire.ipv6 ? (union ibv_gid){.raw = {0xfd, [15] = (uint8_t)(1 + host)}}
			 : (union ibv_gid){
				   .raw = {[10] = 0xff, 0xff, 127, 0, 0, (uint8_t)(8 + host)}};
}

/* Give a host's device the GIDs of both hosts, its own first. */
static inline void take_addresses(int host)
{
	struct soft_hca *hca = soft_device.objects->hcas;

	for (int i = 0; i < SIDES; i++)
		hca->gids[i] = (struct soft_gid){.gid = address_of_host(i ^ host)};
	hca->gid_count = SIDES;
}

/* ---- as path/roce/path.c knows it ------------------------------------------------------------------- */

enum ibv_mtu soft_roce_active_mtu(const struct soft_hca *hca)
{
	(void)hca;
	return IBV_MTU_4096;
}

struct soft_roce_address *soft_roce_open_address(const union ibv_gid *gid)
{
	struct soft_node *addresses = &soft_device.roce->addresses;
	struct soft_roce_address *address;

	if (soft_list_empty(addresses)) {
		CHECK(address = calloc(1, sizeof(*address)));
		address->gid = *gid;
		address->receive_room = 256 * 1024;
		soft_list_append(addresses, &address->node);
	}
	address = soft_list_first(addresses, struct soft_roce_address, node);
	address->users++;
	return address;
}

void soft_roce_address_release(struct soft_roce_address *address)
{
	if (--address->users)
		return;
	soft_list_remove(&address->node);
	free(address);
}

/* Releasing an address closes it already. */
void soft_roce_close_unused_addresses(void)
{
}

bool soft_roce_flow_init(struct soft_roce_flow *flow, struct soft_roce_address *address,
			 const union ibv_gid *peer, uint32_t qpn, uint32_t peer_qpn,
			 uint8_t traffic_class)
{
	(void)traffic_class;
	flow->sender = &address->senders[(qpn ^ peer_qpn) % SOFT_ROCE_SENDERS];
	if (!flow->sender->port)
		flow->sender->port = (uint16_t)(0xc000 + draw(0x4000));
	flow->to_length = soft_gid_to_sockaddr(peer, &address->gid, SOFT_ROCE_PORT, &flow->to);
	soft_icrc_flow_init(&flow->icrc, address->gid.raw, peer->raw, flow->sender->port,
			    SOFT_ROCE_PORT);
	return true;
}

size_t soft_roce_room(void)
{
	may_block();
	soft_device.roce->blocked = !has_room(wire.entered);
	return soft_device.roce->blocked ? 0 : ROOM + draw(ROOM);
}

uint8_t *soft_roce_staging_space(void)
{
	return chance((unsigned)wire.per_mille / 16) && all_err() ? NULL : staged;
}

/* Send a forged copy of the staged packet with a valid ICRC. The copy is from another address, or
 * its opcode, P_Key or destination is wrong. */
static void forge(struct flight what, uint32_t length, const struct soft_roce_flow *flow)
{
	static const uint8_t parts[] = {0, 2, 3, 5, 7}; /* opcode, P_Key, destination */
	uint32_t part = draw(2 * sizeof(parts));

	staged[9 + draw(length - 9)] ^= (uint8_t)(1 + draw(255));
	what.is_strange = part >= sizeof(parts);
	if (!what.is_strange)
		staged[parts[part]] ^= 0x20;
	soft_put32(staged + length, soft_icrc(&flow->icrc, 0, &(struct iovec){staged, length}, 1));
	take_off(what, staged, fuzz_now_ns + 1 + draw(LATE_NS));
}

void soft_roce_commit_staged(const struct soft_roce_flow *flow, uint32_t length)
{
	const struct soft_roce_pair *pair = soft_container(flow, struct soft_roce_pair, flow_out);
	const struct iovec packet = {staged, length};
	const union ibv_gid to = address_of_host(1 - wire.entered);
	struct flight what = {
		.to = 1 - wire.entered,
		.flow = wire.carry ? 0 : wire.flow_of(wire.entered, pair->qp->ibv.qp_num),
		.kind = SOFT_RECORD_DATA,
		.port = flow->sender->port,
		.length = length + SOFT_ROCE_ICRC,
	};
	union ibv_gid gid;

	CHECK(soft_gid_from_sockaddr(&gid, (const struct sockaddr *)&flow->to));
	CHECK(!memcmp(&gid, &to, sizeof(to)));
	CHECK_EQUAL(((const struct sockaddr_in *)(const void *)&flow->to)->sin_port,
		    htons(SOFT_ROCE_PORT));
	/* The kernel or the network card chooses the IP identification, so the test draws it at
	 * random. */
	soft_put32(staged + length, soft_icrc(&flow->icrc, (uint16_t)draw(0x10000), &packet, 1));
	if (wire.carry) {
		wire.carry(&what, staged);
		return;
	}
	transmit(what, staged, false);
	if (chance(20))
		forge(what, length, flow);
}

void soft_roce_flush(void)
{
}

void soft_roce_sockets_close(bool flush)
{
	(void)flush;
	CHECK(soft_list_empty(&soft_device.roce->addresses));
	soft_device.roce->blocked = false;
}

/* ---- what the wire brings ---------------------------------------------------------------------- */

static struct soft_roce_address *open_address(void)
{
	const struct soft_node *addresses = &soft_device.roce->addresses;

	return soft_list_empty(addresses)
		       ? NULL
		       : soft_list_first(addresses, struct soft_roce_address, node);
}

/* Deliver a datagram, sometimes together with the datagrams that follow it, as UDP_GRO does. All of
 * them have the same length, except that the last may be shorter. */
static inline void take_datagrams(struct flight *flight)
{
	static uint8_t input[HEADROOM + JOINED + SOFT_ROCE_PACKET_MAX];
	const struct flight first = *flight;
	union ibv_gid from = address_of_host(1 - first.to);
	struct sockaddr_storage address;
	size_t length = 0;

	for (;;) {
		tell_frame("gets", first.to, flight, flight->bytes);
		memcpy(input + HEADROOM + length, flight->bytes, flight->length);
		length += flight->length;
		flight->to = -1;
		if (flight->length < first.length || length > JOINED || chance(500))
			break;
		flight = next_flight();
		if (!flight || flight->to != first.to || flight->port != first.port ||
		    flight->is_strange != first.is_strange || flight->length > first.length)
			break;
	}
	from.raw[14] ^= first.is_strange;
	soft_gid_to_sockaddr(&from, &from, first.port, &address);
	for (size_t at = 0; at < length && open_address(); at += first.length)
		soft_roce_receive(open_address(), &address, input + HEADROOM + at,
				  length - at < first.length ? length - at : first.length, 0);
}
