/* RoCE v2 paths, which send frames as packets and deliver received packets as frames.
 *
 * A congestion window limits the bytes of requests that a queue pair may have in flight. After a
 * loss, the transport retransmits everything from the first missing packet. Without a window, a
 * network that loses a few packets would therefore carry the same packets many times. The window
 * grows with acknowledgements while it is the limiting factor. A loss (as in RFC 5681) or
 * congestion (RFC 3168) halves it. A full window delays only requests, not responses or
 * acknowledgements. READs are limited by the size of their responses (rc/requester.c).
 */

#include "roce_internal.h"
#include "trace/trace.h"

enum {
	MAX_FRAME = 16 * 1024, /* a multiple of every path MTU */
	MAX_FRAMES = 32,
	INITIAL_WINDOW = 32 * 1024,
	MAX_WINDOW = 4 * 1024 * 1024,
	MIN_WINDOW_PACKETS = 4,
	/* minimum time between notifications of a queue pair, as on RDMA NICs (DCQCN: SIGCOMM 2015,
	 * 5.1) */
	NOTIFICATION_NS = 50000,
};

/* ---- the window ------------------------------------------------------------------------------ */

static uint64_t clamp(uint64_t value, uint64_t min, uint64_t max)
{
	return value < min ? min : value > max ? max : value;
}

/* Set the congestion window to `bytes`, within its limits. READs have a smaller window if the
 * receive buffer of this address cannot hold that many bytes of responses. */
static void set_window(struct soft_roce_pair *pair, uint64_t bytes)
{
	const uint32_t shift = soft_mtu_shift(pair->qp);
	const uint64_t min_window = (uint64_t)MIN_WINDOW_PACKETS << shift;
	const uint64_t window = clamp(bytes, min_window, MAX_WINDOW);
	const uint64_t read_window = clamp(pair->address->receive_room, min_window, window);

	pair->window = window;
	pair->psn_window.psns = (uint32_t)(window >> shift);
	pair->psn_window.read_psns = (uint32_t)(read_window >> shift);
}

/* Halve the window after a loss or a congestion notification. Then ignore both until all packets
 * that are now in flight have been acknowledged. */
static void shrink_window(struct soft_window *window)
{
	struct soft_roce_pair *pair = soft_container(window, struct soft_roce_pair, psn_window);

	if ((int32_t)(pair->qp->sq.unacked - pair->recovery_psn) < 0)
		return;
	pair->recovery_psn = pair->qp->sq.unsent;
	set_window(pair, pair->window / 2);
	pair->slow_start_threshold = pair->window;
}

/* Grow the window after acknowledgements. */
static void grow_window(struct soft_roce_pair *pair)
{
	struct soft_qp *qp = pair->qp;
	const uint64_t mtu = (uint64_t)1 << soft_mtu_shift(qp);
	const uint64_t acked = (uint64_t)(qp->sq.unacked - pair->last_unacked) * mtu;
	/* Grow the window only if at least half of it was used. Otherwise, acknowledgements
	 * say nothing about the network's capacity (RFC 7661). */
	const bool was_half_used =
		(uint64_t)(qp->sq.unsent - pair->last_unacked) * mtu >= pair->window / 2;

	if (!pair->has_sent_request || !acked)
		return;
	pair->last_unacked = qp->sq.unacked;
	if (was_half_used)
		set_window(pair, pair->window + (pair->window < pair->slow_start_threshold
							 ? acked
							 : acked * mtu / pair->window));
}

/* ---- frames out ------------------------------------------------------------------------------ */

/* A read position in a list of iovecs. */
struct reader {
	const struct iovec *iov;
	size_t at; /* offset in the first iovec */
};

/* Copy the next `length` bytes to `to`, and advance the read position. */
static void read_bytes(struct reader *reader, uint8_t *to, size_t length)
{
	while (length) {
		size_t part = reader->iov->iov_len - reader->at;

		part = part < length ? part : length;
		memcpy(to, (const uint8_t *)reader->iov->iov_base + reader->at, part);
		to += part;
		length -= part;
		reader->at += part;
		if (reader->at == reader->iov->iov_len) {
			reader->iov++;
			reader->at = 0;
		}
	}
}

/* Send a packet with the next `packet->length` bytes of the payload. If the staging buffer is full,
 * drop the packet, as a network might. */
static void send_packet(const struct soft_roce_pair *pair, struct soft_roce_packet *packet,
			struct reader *payload)
{
	static const uint8_t zeros[SOFT_ROCE_PAD_MAX];
	uint8_t lost[SOFT_ROCE_PACKET_MAX];
	uint8_t *staged = soft_roce_staging_space(), *at = staged ? staged : lost;
	const uint32_t pad = soft_roce_pad(packet->length);
	size_t headers;

	packet->dest_qpn = pair->qp->attr.dest_qp_num;
	headers = soft_roce_encode(at, packet);
	read_bytes(payload, at + headers, packet->length);
	memcpy(at + headers + packet->length, zeros, pad);
	if (staged)
		soft_roce_commit_staged(&pair->flow_out, (uint32_t)headers + packet->length + pad);
	else
		SOFT_TRACE_DROPPED(.reason = "NO_ROOM", .qp_num = pair->qp->ibv.qp_num,
				   .remote_qpn = packet->dest_qpn, .remote = &pair->peer);
}

/* Returns the responder's message sequence number (MSN) at this PSN. */
static uint32_t msn_at(const struct soft_qp *qp, uint32_t psn)
{
	const struct soft_responder *responder = &qp->responder;

	for (uint32_t i = responder->response_head; i != responder->response_tail; i++)
		if (soft_psn_before(psn, soft_response_at(qp, i)->psn))
			return (soft_response_at(qp, i)->msn - 1) & SOFT_PSN_MASK;
	return responder->msn & SOFT_PSN_MASK;
}

/* Send the acknowledgement from a frame's header in a separate ACK packet, because request packets
 * cannot carry acknowledgements. */
static void send_ack(const struct soft_roce_pair *pair, uint32_t psn)
{
	const struct soft_frame frame = {
		.opcode = SOFT_ACK, .psn = psn, .msn = msn_at(pair->qp, psn)};
	struct soft_roce_packet packet;

	soft_roce_from_frame(&packet, &frame, NULL);
	packet.opcode = pair->service | SOFT_ROCE_ACKNOWLEDGE;
	send_packet(pair, &packet, NULL);
}

/* Send the peer a congestion notification packet (CNP) for a packet that a router has marked
 * (annex A17.9.3). */
static void send_congestion_notification(struct soft_roce_pair *pair,
					 const struct soft_roce_packet *marked)
{
	static const uint8_t reserved[SOFT_ROCE_CNP_PAYLOAD];
	const struct iovec payload = {(void *)reserved, sizeof(reserved)};
	const uint8_t operation = marked->opcode & SOFT_ROCE_OPERATION;
	struct soft_roce_packet packet = {.opcode = SOFT_ROCE_CNP,
					  .becn = true,
					  .pkey = marked->pkey,
					  .length = SOFT_ROCE_CNP_PAYLOAD};

	/* Do not send notifications for acknowledgements, because the peer cannot relieve
	 * congestion by sending fewer acknowledgements. */
	if (operation == SOFT_ROCE_ACKNOWLEDGE || operation == SOFT_ROCE_ATOMIC_ACKNOWLEDGE ||
	    soft_now() < pair->next_notification_ns)
		return;
	pair->next_notification_ns = soft_now() + NOTIFICATION_NS;
	send_packet(pair, &packet, &(struct reader){.iov = &payload});
	soft_defer(&pair->chan->path->flush);
}

/* Returns whether packets carry the frame's payload in an extended header. */
static bool has_payload_in_header(const struct soft_frame *frame)
{
	return frame->opcode == SOFT_COMPARE_SWAP || frame->opcode == SOFT_FETCH_ADD ||
	       frame->opcode == SOFT_ATOMIC_DATA;
}

/* Returns whether the acknowledgement in the frame's header requires a separate ACK packet. Packets
 * of responses are acknowledgements themselves. The last frame of a queue pair requires an ACK
 * packet only if it acknowledges something new. */
static bool acknowledges(const struct soft_roce_pair *pair, const struct soft_frame *frame)
{
	return frame->flags & SOFT_FRAME_ACK &&
	       (soft_is_request(frame) ||
		(frame->opcode == SOFT_DISCONNECT && frame->ack != pair->qp->responder.acked_psn));
}

/* Convert a frame to packets of at most the path MTU, and send them. */
static void send_frame(struct soft_roce_pair *pair, struct soft_frame *frame,
		       struct reader *payload)
{
	const uint32_t mtu = 1u << soft_mtu_shift(pair->qp);
	uint8_t atomic_payload[SOFT_ATOMIC_ARGUMENTS] = {0};
	struct soft_roce_packet packet;
	uint32_t remaining = frame->length;

	if (has_payload_in_header(frame)) {
		read_bytes(payload, atomic_payload, remaining);
		remaining = 0;
	}
	if (!soft_roce_from_frame(&packet, frame, atomic_payload))
		return;
	if (soft_is_request(frame) && !pair->has_sent_request) {
		/* The first send PSN is known only now. */
		pair->has_sent_request = true;
		pair->last_unacked = pair->recovery_psn = pair->qp->sq.unacked;
	}
	for (bool first = soft_is_first(frame);; first = false) {
		packet.length = remaining < mtu ? remaining : mtu;
		remaining -= packet.length;
		/* On the wire, each part of a READ is a complete message. */
		bool last = !remaining && (soft_is_last(frame) || frame->opcode == SOFT_READ);

		packet.opcode = pair->service | soft_roce_operation(frame, first, last);
		packet.solicited = last && frame->flags & SOFT_FRAME_SOLICITED;
		packet.ack_request = !remaining && soft_is_request(frame);
		send_packet(pair, &packet, payload);
		packet.psn = soft_psn_add(packet.psn, 1);
		if (!remaining)
			return;
	}
}

/* Free a pair, and release its address. */
static void free_pair(struct soft_roce_pair *pair)
{
	if (pair->address)
		soft_roce_address_release(pair->address);
	free(pair);
}

/* Free the state of a queue pair whose channel ends. */
static void end_pair(struct soft_roce_pair *pair)
{
	soft_table_remove(&soft_device.roce->pairs, pair->qp->ibv.qp_num);
	pair->qp->window = NULL;
	free_pair(pair);
}

static ssize_t room(struct soft_path *path, size_t min_room)
{
	(void)path;
	/* put() sends no packet for an END, so END always fits. No other control records are
	 * sent. */
	return (ssize_t)(min_room <= SOFT_HANDSHAKE_SIZE ? min_room : soft_roce_room());
}

/* Convert the frames of the records to packets and send them (soft_path_calls.put). No packet is
 * sent for END, which only ends the queue pair. */
static int put(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
	       const struct iovec *iov, const struct soft_record_end *ends, int count)
{
	struct soft_roce_pair *pair = soft_table_find(&soft_device.roce->pairs, to);
	struct reader reader = {.iov = iov};
	uint8_t header[SOFT_FRAME_HEADER];
	struct soft_frame frame;
	bool must_acknowledge = false;
	uint32_t ack_psn = 0;

	(void)path;
	(void)from;
	if (kind == SOFT_RECORD_END)
		end_pair(pair);
	for (int i = 0; kind == SOFT_RECORD_DATA && i < ends[count - 1].frames; i++) {
		read_bytes(&reader, header, sizeof(header));
		soft_frame_decode(header, &frame);
		send_frame(pair, &frame, &reader);
		if (acknowledges(pair, &frame)) {
			must_acknowledge = true;
			ack_psn = frame.ack;
		}
	}
	/* Send one acknowledgement after the last packet. An acknowledgement between the packets
	 * would split the run that is sent with one system call. */
	if (must_acknowledge)
		send_ack(pair, ack_psn);
	return count;
}

static const struct soft_path_calls calls = {
	.name = AIORDMA_WIRE_ROCE,
	.max_frame = MAX_FRAME,
	.max_frames = MAX_FRAMES,
	.max_record = SIZE_MAX,
	.is_lossy = true,
	.room = room,
	.put = put,
};

/* ---- packets in ------------------------------------------------------------------------------ */

/* Returns the reason to drop the packet, or NULL to accept it. The packet must come from the queue
 * pair's peer, arrive at the queue pair's address, and use the queue pair's transport service. */
static const char *drop_reason(const struct soft_roce_pair *pair,
			       const struct soft_roce_address *at,
			       const struct sockaddr_storage *from,
			       const struct soft_roce_packet *packet)
{
	union ibv_gid gid;

	if (pair->address != at)
		return "DESTINATION_GID";
	if ((packet->opcode & SOFT_ROCE_SERVICE) != pair->service &&
	    packet->opcode != SOFT_ROCE_CNP)
		return "TRANSPORT";
	if (!soft_gid_from_sockaddr(&gid, (const struct sockaddr *)from) ||
	    memcmp(&gid, &pair->peer, sizeof(gid)))
		return "SOURCE";
	return NULL;
}

/* Update the flow of received packets with the peer's current source port. The ICRC covers the
 * port, which the peer may change at any time. */
static void update_peer_port(struct soft_roce_pair *pair, uint16_t port)
{
	if (pair->peer_port != port)
		soft_icrc_flow_init(&pair->icrc_in, pair->peer.raw, pair->address->gid.raw, port,
				    SOFT_ROCE_PORT);
	pair->peer_port = port;
}

void soft_roce_trace_dropped(const char *reason, const struct soft_roce_packet *packet,
			     const struct sockaddr_storage *from)
{
	union ibv_gid gid;

	if (!soft_trace_on)
		return;
	const bool known = soft_gid_from_sockaddr(&gid, (const struct sockaddr *)from);

	SOFT_TRACE_DROPPED(.reason = reason, .qp_num = packet ? packet->dest_qpn : 0,
			   .remote_qpn = packet ? packet->src_qpn : 0,
			   .remote = known ? &gid : NULL);
}

void soft_roce_receive(struct soft_roce_address *at, const struct sockaddr_storage *from,
		       uint8_t *bytes, size_t length, uint8_t traffic_class)
{
	soft_assert_locked();
	struct soft_roce_packet packet;
	struct soft_frame frame;
	uint8_t short_record[SOFT_FRAME_HEADER + SOFT_ATOMIC_ARGUMENTS], *record = short_record;
	struct soft_roce_pair *pair;
	const char *reason;

	if (soft_roce_decode(&packet, bytes, length)) {
		soft_roce_trace_dropped("HEADER", NULL, from);
		return;
	}
	/* Full and limited members of the partition are accepted. */
	if ((packet.pkey | 0x8000) != SOFT_ROCE_PKEY) {
		soft_roce_trace_dropped("PKEY", &packet, from);
		return;
	}
	if ((packet.opcode & SOFT_ROCE_SERVICE) == SOFT_ROCE_UD) {
		soft_roce_receive_datagram(at, from, &packet, bytes, length, traffic_class);
		return;
	}
	pair = soft_table_find(&soft_device.roce->pairs, packet.dest_qpn);
	if (pair)
		reason = drop_reason(pair, at, from, &packet);
	else /* only the trace distinguishes these reasons, so skip the second lookup without it */
		reason = soft_trace_on && soft_qp_find(packet.dest_qpn) ? "QP_STATE" : "QPN";
	if (!reason) {
		update_peer_port(pair, soft_address_port(from));
		if (!soft_icrc_check(&pair->icrc_in, bytes, length))
			reason = "ICRC";
	}
	if (reason) {
		soft_roce_trace_dropped(reason, &packet, from);
		return;
	}
	if (packet.opcode == SOFT_ROCE_CNP) {
		if (pair->qp->sq.unacked != pair->qp->sq.unsent && pair->qp->window)
			shrink_window(&pair->psn_window);
		return;
	}
	if (!soft_roce_to_frame(&frame, &packet, 1u << soft_mtu_shift(pair->qp),
				short_record + SOFT_FRAME_HEADER)) {
		soft_roce_trace_dropped("PACKET", &packet, from);
		return;
	}
	if ((traffic_class & SOFT_ROCE_CE) == SOFT_ROCE_CE)
		send_congestion_notification(pair, &packet);
	if (packet.length) /* position of the frame header, directly before the payload */
		record = bytes + (packet.payload - bytes) - SOFT_FRAME_HEADER;
	soft_frame_encode(record, &frame);
	pair->chan->calls->data(pair->chan, record, SOFT_FRAME_HEADER + frame.length, 0);
	/* The callback may have freed the pair. */
	pair = soft_table_find(&soft_device.roce->pairs, packet.dest_qpn);
	if (!pair)
		return;
	/* Acknowledge packets in the middle of a message too, because the requester's window may be
	 * smaller than the message. */
	if (packet.ack_request && !soft_is_last(&frame))
		soft_qp_link_output(pair->qp->link);
	grow_window(pair);
}

/* ---- opening and closing --------------------------------------------------------------------- */

static uint8_t service_of(enum ibv_qp_type type)
{
	return type == IBV_QPT_RC   ? SOFT_ROCE_RC
	       : type == IBV_QPT_UC ? SOFT_ROCE_UC
				    : SOFT_ROCE_XRC;
}

/* Create the state of a queue pair, which uses the local address `own`. Returns NULL and sets errno
 * on failure. */
static struct soft_roce_pair *create_pair(struct soft_chan *chan, struct soft_qp *qp,
					  const struct soft_gid *own)
{
	struct soft_roce_pair *pair = calloc(1, sizeof(*pair));

	if (!pair)
		return NULL;
	pair->address = soft_roce_open_address(&own->gid);
	pair->peer = soft_qp_peer_gid(qp);
	if (!pair->address ||
	    !soft_roce_flow_init(&pair->flow_out, pair->address, &pair->peer, qp->ibv.qp_num,
				 qp->attr.dest_qp_num, qp->attr.ah_attr.grh.traffic_class)) {
		free_pair(pair);
		return NULL;
	}
	pair->chan = chan;
	pair->qp = qp;
	pair->service = service_of(qp->ibv.qp_type);
	pair->slow_start_threshold = MAX_WINDOW;
	pair->psn_window.on_loss = shrink_window;
	set_window(pair, INITIAL_WINDOW);
	return pair;
}

int soft_roce_open(struct soft_chan *chan, struct soft_qp *qp)
{
	soft_assert_locked();
	const long hca = soft_qp_hca(qp) - soft_device.objects->hcas;
	struct soft_roce_pair *pair;
	struct soft_gid own;
	int rc;

	if (soft_qp_gid(qp, &own))
		return EINVAL;
	errno = ENOMEM;
	pair = create_pair(chan, qp, &own);
	if (!pair)
		return errno;
	rc = soft_table_put(&soft_device.roce->pairs, qp->ibv.qp_num, pair);
	if (rc) {
		free_pair(pair);
		return rc;
	}
	rc = soft_chan_attach(chan, &soft_device.roce->paths[hca], qp->ibv.qp_num, qp->ibv.qp_num);
	if (rc)
		end_pair(pair);
	else if (soft_qp_is_requester(qp))
		qp->window = &pair->psn_window;
	return rc;
}

static void offer_room(void)
{
	for (int i = 0; i < SOFT_MAX_HCAS; i++)
		if (soft_path_has_waiting(&soft_device.roce->paths[i]))
			soft_path_offer_room(&soft_device.roce->paths[i]);
}

void soft_roce_unblocked(void)
{
	soft_device.roce->blocked = false;
	soft_roce_flush();
	if (!soft_device.roce->blocked)
		offer_room();
}

static void room_timer_expired(struct soft_timer *timer)
{
	(void)timer;
	if (!soft_device.roce->blocked)
		offer_room();
}

/* Send the staged packets, and schedule the channels that wait for room. */
static void flush(struct soft_deferred *deferred)
{
	struct soft_path *path = soft_container(deferred, struct soft_path, flush);

	soft_roce_flush();
	if (soft_path_has_waiting(path) && !soft_device.roce->blocked)
		soft_timer_start(&soft_device.roce->room_timer, soft_now());
}

/* Initialize the path of each device, without channels. */
static void init_paths(void)
{
	soft_device.roce->room_timer = (struct soft_timer){.expired = room_timer_expired};
	for (int i = 0; i < SOFT_MAX_HCAS; i++) {
		soft_device.roce->paths[i] = (struct soft_path){.ports = 1u << i};
		soft_path_init(&soft_device.roce->paths[i], &calls, flush);
	}
}

static void create(void)
{
	soft_device.roce = soft_alloc_part(sizeof(struct soft_roce));
	soft_list_init(&soft_device.roce->addresses);
	init_paths();
}

/* Send the last packets and close the sockets. The links and their pairs have ended already. */
static void stop(void)
{
	soft_timer_stop(&soft_device.roce->room_timer);
	soft_roce_sockets_close(SOFT_ROCE_SEND_STAGED);
}

/* Drop all queue pairs and sockets in a forked child, without sending anything to the peers. */
static void forked(void)
{
	soft_device.roce->blocked = false; /* staged packets and the timer are not inherited */
	for (int i = 0; i < SOFT_MAX_HCAS; i++) {
		soft_list_each (struct soft_chan, chan, &soft_device.roce->paths[i].chans, node)
			end_pair(soft_table_find(&soft_device.roce->pairs, chan->id));
		soft_path_forget(&soft_device.roce->paths[i]);
	}
	soft_roce_sockets_close(SOFT_ROCE_DISCARD_STAGED);
	init_paths();
}

const struct soft_subsystem soft_roce_subsystem = {
	.create = create,
	.stop = stop,
	.forked = forked,
	.port_changed = soft_roce_port_changed,
};
