/* RoCE v2 datagrams of UD queue pairs and of queue pair 1. Queue pair 1 is the general services
 * interface, which receives management datagrams (MADs; IBTA vol 1, 13).
 *
 * While datagrams are in use, this process receives packets at the addresses of all devices,
 * because a datagram may arrive at any of them. Nothing is stored about its sender. Packets for
 * unknown queue pairs are dropped without a response.
 */
#include <arpa/inet.h>

#include "roce_internal.h"
#include "trace/trace.h"

enum { HOP_LIMIT = 64 }; /* hop limit for completions; the socket does not provide the actual one */

#define GSI_QKEY 0x80010000u /* IBTA 13.5.3.1 */

/* ---- addresses ------------------------------------------------------------------------------- */

/* Open an address and keep it open until release_all(). Skip an address that is not usable yet
 * because its interface has just come up. Returns 0 or an errno value. */
static int hold_address(const union ibv_gid *gid)
{
	struct soft_roce_address *address = soft_roce_open_address(gid);

	if (!address)
		return errno == EADDRNOTAVAIL ? 0 : errno;
	/* However often an address is held, datagrams count as one user, so undo the count of
	 * soft_roce_open_address(). */
	if (address->held)
		address->users--;
	address->held = true;
	return 0;
}

/* Hold the addresses of all devices. Returns 0 or the errno value of the first failure. */
static int hold_all(void)
{
	int rc = 0;

	for (int number = 0; number < soft_hca_count(); number++) {
		const struct soft_hca *hca = soft_hca_at(number);
		struct soft_gid gid;

		for (int i = 0; i < hca->gid_count && !rc; i++)
			if (!soft_gid_at(hca, i, &gid))
				rc = hold_address(&gid.gid);
	}
	return rc;
}

/* Release the addresses of all devices, and close those without other users. */
static void release_all(void)
{
	soft_list_each (struct soft_roce_address, address, &soft_device.roce->addresses, node) {
		address->users -= address->held;
		address->held = false;
	}
	soft_roce_close_unused_addresses();
}

int soft_roce_hold_addresses(void)
{
	soft_assert_locked();
	int rc = soft_device.roce->address_holders ? 0 : hold_all();

	if (rc)
		release_all();
	else
		soft_device.roce->address_holders++;
	return rc;
}

void soft_roce_release_addresses(void)
{
	soft_assert_locked();
	if (!--soft_device.roce->address_holders)
		release_all();
}

/* Open the addresses that were added to the devices, if datagrams are in use. Failures are only
 * reported on stderr. */
void soft_roce_port_changed(enum soft_port_change change, uint32_t ports)
{
	(void)ports;
	if (change == SOFT_PORT_ADDRESSES && soft_device.roce->address_holders)
		(void)hold_all();
}

/* ---- sending --------------------------------------------------------------------------------- */

bool soft_roce_send_datagram(const struct soft_datagram *datagram, const struct iovec *payload,
			     int count)
{
	soft_assert_locked();
	struct soft_roce_address *address = soft_roce_find_address(&datagram->source);
	struct soft_roce_flow flow;
	struct soft_roce_packet packet = {
		.opcode = SOFT_ROCE_UD |
			  (datagram->flags & SOFT_DATAGRAM_IMMEDIATE ? SOFT_ROCE_SEND_ONLY_IMMEDIATE
								     : SOFT_ROCE_SEND_ONLY),
		.solicited = datagram->flags & SOFT_DATAGRAM_SOLICITED,
		.migreq = true,
		.pkey = SOFT_ROCE_PKEY,
		.dest_qpn = datagram->dest_qpn,
		.psn = datagram->psn,
		.qkey = datagram->qkey,
		.src_qpn = datagram->src_qpn,
		.immediate = ntohl(datagram->immediate),
	};

	if (!address || !address->held ||
	    !soft_roce_flow_init(&flow, address, &datagram->destination, datagram->src_qpn,
				 datagram->dest_qpn,
				 (uint8_t)(datagram->traffic_flow >> SOFT_CLASS_SHIFT))) {
		SOFT_TRACE_DROPPED(.reason = "UNSENT", .qp_num = datagram->src_qpn,
				   .remote_qpn = datagram->dest_qpn,
				   .remote = &datagram->destination);
		return true;
	}
	uint8_t *staged = soft_roce_room() ? soft_roce_staging_space() : NULL;

	if (!staged)
		return false;
	for (int i = 0; i < count; i++)
		packet.length += (uint32_t)payload[i].iov_len;
	uint8_t *at = staged + soft_roce_encode(staged, &packet);

	for (int i = 0; i < count; i++) {
		memcpy(at, payload[i].iov_base, payload[i].iov_len);
		at += payload[i].iov_len;
	}
	memset(at, 0, SOFT_ROCE_PAD_MAX);
	soft_roce_commit_staged(&flow, (uint32_t)(at - staged) + soft_roce_pad(packet.length));
	soft_defer(&soft_device.roce->paths[0].flush);
	return true;
}

void soft_roce_send_mad(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *mad,
			size_t length)
{
	const struct soft_datagram datagram = {.source = *from,
					       .destination = *to,
					       .src_qpn = SOFT_ROCE_GSI,
					       .dest_qpn = SOFT_ROCE_GSI,
					       .qkey = GSI_QKEY};

	if (!(soft_ports_down & soft_gid_port_bit(from)))
		(void)soft_roce_send_datagram(&datagram, &(struct iovec){(void *)mad, length}, 1);
}

/* ---- receiving ------------------------------------------------------------------------------- */

void soft_roce_receive_datagram(const struct soft_roce_address *at,
				const struct sockaddr_storage *from,
				const struct soft_roce_packet *packet, const uint8_t *bytes,
				size_t length, uint8_t traffic_class)
{
	const bool is_mad = packet->dest_qpn == SOFT_ROCE_GSI;
	struct soft_datagram datagram = {
		.destination = at->gid,
		.dest_qpn = packet->dest_qpn,
		.src_qpn = packet->src_qpn,
		.qkey = packet->qkey,
		.immediate = htonl(packet->immediate),
		.traffic_flow = (uint32_t)traffic_class << SOFT_CLASS_SHIFT,
		.hop_limit = HOP_LIMIT,
	};
	struct soft_icrc_flow flow;

	/* Perform cheap checks first, because any host can send datagrams. */
	const char *reason = !at->held                                    ? "DESTINATION_GID"
			     : packet->length > SOFT_DATAGRAM_MAX         ? "PACKET"
			     : is_mad && packet->qkey != GSI_QKEY         ? "QKEY"
			     : is_mad && packet->src_qpn != SOFT_ROCE_GSI ? "SOURCE"
			     : !is_mad && !soft_qp_find(packet->dest_qpn) ? "QPN"
									  : NULL;

	if (!reason && !soft_gid_from_sockaddr(&datagram.source, (const struct sockaddr *)from))
		reason = "SOURCE";
	if (reason) {
		soft_roce_trace_dropped(reason, packet, from);
		return;
	}
	soft_icrc_flow_init(&flow, datagram.source.raw, at->gid.raw, soft_address_port(from),
			    SOFT_ROCE_PORT);
	if (!soft_icrc_check(&flow, bytes, length)) {
		soft_roce_trace_dropped("ICRC", packet, from);
		return;
	}
	if (packet->solicited)
		datagram.flags |= SOFT_DATAGRAM_SOLICITED;
	if (packet->opcode == (SOFT_ROCE_UD | SOFT_ROCE_SEND_ONLY_IMMEDIATE))
		datagram.flags |= SOFT_DATAGRAM_IMMEDIATE;
	if (is_mad)
		soft_device.roce->datagram_ops->mad(&datagram.source, &at->gid, packet->payload,
						    packet->length);
	else
		soft_device.roce->datagram_ops->datagram(&datagram, packet->payload,
							 packet->length);
}

void soft_roce_set_datagram_ops(const struct soft_roce_datagram_ops *ops)
{
	soft_device.roce->datagram_ops = ops;
}
