/* The carrier that uses MADs for connections and for datagram service requests (SIDR). MADs are
 * sent to queue pair 1 of the peer's host (the general services interface, IBTA vol 1, 12 and 13).
 *
 * Each side identifies a conversation by a random communication ID, and each message contains the
 * IDs of both sides. Only a host that has seen messages of a conversation can take part in it, and
 * only from the address that started it. A host that can forge addresses but cannot see messages
 * can do two things. It can send requests in the name of another host. It can also end a connection
 * if it guesses the peer's queue pair number, by sending a REQ that makes the connection stale.
 *
 * cm_link.c retransmits messages and responds to repeated ones. A message for an unknown
 * conversation gets at most one response, which is not longer than the message. No state is kept
 * for it.
 *
 * A host loses its conversations when it restarts. The peer detects this if the host rejects a
 * message of an old conversation, or requests a connection for a queue pair that is still connected
 * here. In the second case, the old connection is stale (12.9.8.3.1).
 */
#include "cm_internal.h"
#include "trace/trace.h"

enum { GSI_QPN = 1 }; /* IBTA 3.5.10 */

struct conversation {
	struct soft_cm_link link;
	struct soft_node node, by_remote_id, by_peer_qpn;
	uint32_t local_id, remote_id; /* 0 if not known yet */
	uint64_t transaction;
	uint64_t guid; /* GUID of the local device */
	union ibv_gid local, peer;
	uint16_t local_port, peer_port;
	uint32_t qpn; /* queue pair in the REQ or REP that this side has sent; 0 before */
	uint32_t peer_qpn; /* 0 while unknown, and always for a datagram service */
	uint8_t path_mtu; /* MTU to send in REQ; 0 on the passive side */
	bool passive;
	bool datagrams; /* for a datagram service instead of a connection */
};

struct listener {
	struct soft_cm_listener listener;
	struct soft_node node;
};

static struct conversation *conversation_of(const struct soft_cm_link *link)
{
	return soft_container(link, struct conversation, link);
}

static void transmit(const struct soft_cm_mad *mad, const union ibv_gid *from,
		     const union ibv_gid *to)
{
	uint8_t bytes[SOFT_MAD_SIZE];

	soft_cm_mad_encode(mad, bytes);
	soft_device.cm->gsi.calls->send(from, to, bytes, sizeof(bytes));
}

/* ---- conversations ------------------------------------------------------------------------- */

/* Allocate a zeroed listener or conversation of `size` bytes. As long as it exists, this host's
 * addresses stay open for MADs (soft_gsi_calls.hold). The caller must undo both with
 * free_and_release_addresses(). Returns NULL and sets `*error` on failure. */
static void *allocate_holding_addresses(size_t size, int *error)
{
	void *created = NULL;

	*error = soft_device.cm->gsi.calls->hold();
	if (!*error && !(created = calloc(1, size))) {
		*error = ENOMEM;
		soft_device.cm->gsi.calls->release();
	}
	return created;
}

static void free_and_release_addresses(void *held)
{
	soft_device.cm->gsi.calls->release();
	free(held);
}

/* Returns the bucket in `table` for an identifier that this peer has chosen. */
static struct soft_node *bucket(struct soft_node *table, const union ibv_gid *peer, uint32_t number)
{
	uint8_t key[sizeof(*peer) + sizeof(number)];

	memcpy(key, peer, sizeof(*peer));
	memcpy(key + sizeof(*peer), &number, sizeof(number));
	return &table[soft_hash(&soft_device.cm->gsi.seed, key, sizeof(key)) % SOFT_GSI_BUCKETS];
}

/* Set the peer's queue pair number, and index the conversation by it. `qpn` is 0 while the number
 * is unknown, and always for a datagram service. */
static void set_peer_qpn(struct conversation *conversation, uint32_t qpn)
{
	conversation->peer_qpn = qpn;
	soft_list_remove(&conversation->by_peer_qpn);
	if (qpn)
		soft_list_append(bucket(soft_device.cm->gsi.by_peer_qpn, &conversation->peer, qpn),
				 &conversation->by_peer_qpn);
}

static struct conversation *conversation_new(const struct conversation *initial, int *error)
{
	struct conversation *created = allocate_holding_addresses(sizeof(*created), error);

	if (!created)
		return NULL;
	*created = *initial;
	*error = soft_table_add(&soft_device.cm->gsi.ids, created, UINT32_MAX, &created->local_id);
	if (*error) {
		free_and_release_addresses(created);
		return NULL;
	}
	soft_cm_link_init(&created->link, &soft_cm_gsi);
	soft_list_append(&soft_device.cm->gsi.conversations, &created->node);
	soft_list_init(&created->by_remote_id);
	soft_list_init(&created->by_peer_qpn);
	if (created->passive)
		soft_list_append(bucket(soft_device.cm->gsi.by_remote_id, &created->peer,
					created->remote_id),
				 &created->by_remote_id);
	set_peer_qpn(created, created->peer_qpn);
	return created;
}

static void end(struct soft_cm_link *link)
{
	struct conversation *conversation = conversation_of(link);

	soft_cm_link_stop(link);
	soft_table_remove(&soft_device.cm->gsi.ids, conversation->local_id);
	soft_list_remove(&conversation->node);
	soft_list_remove(&conversation->by_remote_id);
	soft_list_remove(&conversation->by_peer_qpn);
	free_and_release_addresses(conversation);
}

static bool is_gid(const uint8_t *gid, const union ibv_gid *other)
{
	return !memcmp(gid, other, sizeof(*other));
}

static bool is_sidr(const struct soft_cm_mad *mad)
{
	return mad->message.type >= SOFT_SIDR_REQ;
}

/* Returns the conversation that the peer has started with the communication ID of this message, or
 * NULL. */
static struct conversation *find_by_remote_id(const union ibv_gid *peer,
					      const struct soft_cm_mad *mad)
{
	struct soft_node *candidates =
		bucket(soft_device.cm->gsi.by_remote_id, peer, mad->local_id);

	soft_list_each (struct conversation, it, candidates, by_remote_id)
		if (it->remote_id == mad->local_id && it->datagrams == is_sidr(mad) &&
		    is_gid(it->peer.raw, peer))
			return it;
	return NULL;
}

/* Returns the conversation that connects the peer's queue pair to this host, or NULL. The
 * connection may not be established yet. Conversations without link.calls are not considered,
 * because they have ended and only linger, or their request is parked. */
static struct conversation *find_by_peer_qpn(const union ibv_gid *peer, uint32_t qpn)
{
	struct soft_node *candidates = bucket(soft_device.cm->gsi.by_peer_qpn, peer, qpn);

	soft_list_each (struct conversation, it, candidates, by_peer_qpn)
		if (it->peer_qpn == qpn && it->link.calls && is_gid(it->peer.raw, peer))
			return it;
	return NULL;
}

/* ---- sending ------------------------------------------------------------------------------- */

/* Store the GUID of the local device, which REQ, REP and some REJs contain. The owner's id knows
 * the device, but a later message may be sent when the conversation has no owner any more. */
static void set_guid(struct conversation *conversation)
{
	const struct soft_cm_id *id = conversation->link.owner;

	if (!conversation->guid && conversation->link.calls && id->id.verbs)
		conversation->guid = be64toh(soft_ibv_get_device_guid(id->id.verbs->device));
}

static int send_message(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	struct conversation *conversation = conversation_of(link);
	struct soft_cm_mad mad = {
		.message = *message,
		.transaction = conversation->transaction,
		.local_id = conversation->local_id,
		.remote_id = conversation->remote_id,
		/* A REJ that withdraws our REP also uses OTHER (IBTA 12.9, state REP sent). */
		.responds_to = link->highest_received == SOFT_CM_REQ && !conversation->qpn
				       ? SOFT_CM_RESPONDS_TO_REQ
			       : link->highest_received == SOFT_CM_REP ? SOFT_CM_RESPONDS_TO_REP
								       : SOFT_CM_RESPONDS_TO_OTHER,
		.peer_qpn = conversation->peer_qpn,
		.service_port =
			conversation->passive ? conversation->local_port : conversation->peer_port,
		.source_port = conversation->local_port,
	};

	set_guid(conversation);
	mad.guid = conversation->guid;
	/* For this reason only, REJ contains the GUID as additional information. */
	mad.guid_length = message->reason == SOFT_CM_REASON_TIMEOUT ? sizeof(mad.guid) : 0;
	mad.message.path_mtu = conversation->path_mtu;
	memcpy(mad.source, &conversation->local, sizeof(mad.source));
	memcpy(mad.destination, &conversation->peer, sizeof(mad.destination));
	if (message->type == SOFT_CM_REQ || message->type == SOFT_CM_REP)
		conversation->qpn = message->qpn;
	transmit(&mad, &conversation->local, &conversation->peer);
	return 0;
}

/* Respond to a message that does not belong to a conversation. The response is DREP to a DREQ (IBTA
 * 12.9.8), SIDR_REP to a SIDR_REQ (IBTA 12.11), or else REJ with `reason`. */
static void respond(const union ibv_gid *from, const union ibv_gid *to,
		    const struct soft_cm_mad *received, uint16_t reason)
{
	struct soft_cm_mad mad = {
		.message = {.type = received->message.type == SOFT_CM_DREQ ? SOFT_CM_DREP
				    : is_sidr(received)                    ? SOFT_SIDR_REP
									   : SOFT_CM_REJ,
			    .port_space = received->message.port_space,
			    .reason = reason,
			    .status = SOFT_SIDR_NO_SERVICE},
		.service_prefix = received->service_prefix,
		.service_port = received->service_port,
		.transaction = received->transaction,
		.local_id = received->remote_id,
		.remote_id = received->local_id,
		.responds_to = received->message.type == SOFT_CM_REQ ? SOFT_CM_RESPONDS_TO_REQ
								     : SOFT_CM_RESPONDS_TO_REP,
	};

	transmit(&mad, to, from);
}

/* Count a message against the rate limit for messages that any host can send, even with a forged
 * address. Returns false if the limit is exceeded. The message must then be dropped before it uses
 * memory or causes a response. */
static bool use_request_rate(const union ibv_gid *from, const union ibv_gid *to)
{
	struct sockaddr_storage address;

	(void)soft_gid_to_sockaddr(from, to, 0, &address);
	if (soft_fair_rate_use(&soft_device.cm->gsi.request_rate, &address))
		return true;
	SOFT_TRACE_DROPPED(.reason = "REQUEST_RATE", .qp_num = GSI_QPN, .remote = from);
	return false;
}

/* ---- receiving ----------------------------------------------------------------------------- */

/* Returns the listener for the service ID that the request asks for, or NULL. The upper 32 bits of
 * the rdma_cm's service IDs (service_prefix) are 0. */
static struct listener *listener_at(const union ibv_gid *gid, const struct soft_cm_mad *mad)
{
	soft_list_each (struct listener, it, &soft_device.cm->gsi.listeners, node) {
		struct rdma_cm_id *id = &it->listener.id->id;
		union ibv_gid own;

		soft_gid_from_sockaddr(&own, &id->route.addr.src_addr);
		if (ntohs(soft_rdma_get_src_port(id)) == mad->service_port &&
		    soft_cm_is_datagram_id(it->listener.id) == is_sidr(mad) &&
		    id->ps == mad->message.port_space && !mad->service_prefix &&
		    (is_gid(own.raw, gid) || soft_cm_is_any(&id->route.addr.src_addr)))
			return it;
	}
	return NULL;
}

static uint8_t mtu_of(const union ibv_gid *gid)
{
	return (uint8_t)soft_links->active_mtu(soft_hca_at(soft_gid_hca_number(gid)));
}

static void handle_request(const union ibv_gid *from, const union ibv_gid *to,
			   const struct soft_cm_mad *mad)
{
	const struct soft_cm_message disconnect = {.type = SOFT_CM_DREQ};
	const bool shared = soft_device.cm->gsi.calls->is_shared(to);
	struct conversation *existing = find_by_remote_id(from, mad),
			    *stale = find_by_peer_qpn(from, mad->message.qpn), *created;
	struct listener *listener = listener_at(to, mad);
	int error;

	if (!is_gid(mad->source, from) || !is_gid(mad->destination, to) || !mad->local_id)
		return; /* forged addresses or missing ID */
	if (shared && !existing && !stale && !listener)
		return; /* for another process, which limits the rate of its own requests */
	if (!use_request_rate(from, to))
		return;
	/* If the transaction ID is also the same, the request is a retransmission. Otherwise, the
	 * peer reuses the communication ID for a new request. */
	if (existing && existing->transaction == mad->transaction) {
		(void)soft_cm_link_received(&existing->link, &mad->message);
		return;
	}
	if (stale) {
		respond(from, to, mad, SOFT_CM_REASON_STALE);
		/* Send DREQ if the old connection was established, because the peer may still use
		 * it. */
		if (stale->link.last_sent.type == SOFT_CM_RTU ||
		    stale->link.highest_received == SOFT_CM_RTU)
			(void)soft_cm_link_send(&stale->link, &disconnect);
		soft_cm_link_failed(&stale->link, ECONNRESET);
		return;
	}
	if (!listener) {
		if (!shared)
			respond(from, to, mad, SOFT_CM_REASON_INVALID_SERVICE_ID);
		return;
	}
	if (!is_sidr(mad) && (!mad->message.path_mtu || mad->message.path_mtu > mtu_of(to))) {
		respond(from, to, mad, SOFT_CM_REASON_INVALID_MTU);
		return;
	}
	created = conversation_new(&(struct conversation){.local = *to,
							  .peer = *from,
							  .local_port = mad->service_port,
							  .peer_port = mad->source_port,
							  .remote_id = mad->local_id,
							  .transaction = mad->transaction,
							  .peer_qpn = mad->message.qpn,
							  .passive = true,
							  .datagrams = is_sidr(mad)},
				   &error);
	if (!created)
		return; /* the peer will retransmit the request */
	if (is_sidr(mad))
		(void)soft_cm_sidr_request_received(&listener->listener, &created->link,
						    &mad->message);
	else
		(void)soft_cm_request_received(&listener->listener, &created->link, &mad->message);
}

/* Returns the conversation that matches the sender, type and IDs of the message, or NULL. */
static struct conversation *find_conversation(const union ibv_gid *from,
					      const struct soft_cm_mad *mad)
{
	struct conversation *it = soft_table_find(&soft_device.cm->gsi.ids, mad->remote_id);

	/* A REJ with reason "timeout" lacks the remote ID if the peer has never received our ID
	 * (12.6.7.2). */
	if (mad->message.type == SOFT_CM_REJ && !mad->remote_id)
		return find_by_remote_id(from, mad);
	if (!it || !is_gid(it->peer.raw, from) || it->datagrams != is_sidr(mad))
		return NULL;
	if (mad->message.type == SOFT_CM_REJ && !mad->local_id)
		return it; /* sent by a host that does not have this conversation */
	return it->remote_id && it->remote_id != mad->local_id ? NULL : it;
}

/* Returns whether the response reports that the requested port has no listener. */
static bool reports_no_service(const struct soft_cm_message *response, uint8_t request_type)
{
	if (request_type == SOFT_SIDR_REQ)
		return response->type == SOFT_SIDR_REP && response->status == SOFT_SIDR_NO_SERVICE;
	return request_type == SOFT_CM_REQ && response->type == SOFT_CM_REJ &&
	       response->reason == SOFT_CM_REASON_INVALID_SERVICE_ID;
}

void soft_cm_mad_received(const union ibv_gid *from, const union ibv_gid *to, const uint8_t *bytes,
			  size_t length)
{
	struct conversation *conversation;
	struct soft_cm_mad mad;

	soft_assert_locked();
	if (!soft_cm_mad_decode(bytes, length, &mad))
		return;
	if (mad.message.type == SOFT_CM_REQ || mad.message.type == SOFT_SIDR_REQ) {
		handle_request(from, to, &mad);
		return;
	}
	conversation = find_conversation(from, &mad);
	/* If other processes also receive the message, the conversation may be theirs. */
	if (!conversation) {
		if ((mad.message.type == SOFT_CM_REP || mad.message.type == SOFT_CM_DREQ) &&
		    !soft_device.cm->gsi.calls->is_shared(to) && use_request_rate(from, to))
			respond(from, to, &mad, SOFT_CM_REASON_INVALID_ID);
		return;
	}
	/* DREQ must name the queue pair of this side. */
	if (mad.message.type == SOFT_CM_DREQ && mad.peer_qpn != conversation->qpn)
		return;
	/* Ignore the rejection if the peer has already sent another response. That response shows
	 * that the port has a listener, so the rejection is for an earlier transmission. Otherwise
	 * retry for a short time. */
	if (reports_no_service(&mad.message, conversation->link.last_sent.type) &&
	    (conversation->link.highest_received || soft_cm_link_retry(&conversation->link)))
		return;
	if (!conversation->remote_id)
		conversation->remote_id = mad.local_id;
	if (mad.message.type == SOFT_CM_REP)
		set_peer_qpn(conversation, mad.message.qpn);
	(void)soft_cm_link_received(&conversation->link, &mad.message);
}

/* ---- opening and closing ------------------------------------------------------------------- */

static struct soft_cm_link *open_conversation(struct soft_cm_id *id, int *error)
{
	const struct rdma_addr *addresses = &id->id.route.addr;
	struct conversation *created = conversation_new(
		&(struct conversation){.local = addresses->addr.ibaddr.sgid,
				       .peer = addresses->addr.ibaddr.dgid,
				       .local_port = ntohs(soft_rdma_get_src_port(&id->id)),
				       .peer_port = ntohs(soft_rdma_get_dst_port(&id->id)),
				       .datagrams = soft_cm_is_datagram_id(id)},
		error);

	if (!created)
		return NULL;
	created->transaction = created->local_id;
	created->path_mtu = id->path_mtu = mtu_of(&created->local);
	return &created->link;
}

static struct soft_cm_listener *start_listening(struct soft_cm_id *id, int *error)
{
	struct listener *created = allocate_holding_addresses(sizeof(*created), error);

	(void)id;
	if (!created)
		return NULL;
	soft_list_append(&soft_device.cm->gsi.listeners, &created->node);
	return &created->listener;
}

static void stop_listening(struct soft_cm_listener *listener)
{
	struct listener *stopped = soft_container(listener, struct listener, listener);

	soft_list_remove(&stopped->node);
	free_and_release_addresses(stopped);
}

static void get_addresses(const struct soft_cm_link *link, struct sockaddr_storage *local,
			  struct sockaddr_storage *peer)
{
	const struct conversation *it = conversation_of(link);

	/* If the addresses are link-local, both are on the interface of the local one. */
	(void)soft_gid_to_sockaddr(&it->local, &it->local, it->local_port, local);
	(void)soft_gid_to_sockaddr(&it->peer, &it->local, it->peer_port, peer);
}

const struct soft_cm_carrier soft_cm_gsi = {
	.is_lossy = true,
	.connect = open_conversation,
	.listen = start_listening,
	.unlisten = stop_listening,
	.send = send_message,
	.end = end,
	.get_addresses = get_addresses,
};

void soft_cm_use_gsi(const struct soft_gsi_calls *calls)
{
	soft_device.cm->gsi.calls = calls;
	soft_device.cm->carrier = calls ? &soft_cm_gsi : &soft_cm_stream;
	soft_device.cm->sidr_client = calls ? &soft_cm_gsi : &soft_cm_sidr_client;
	soft_device.cm->sidr_server = calls ? &soft_cm_gsi : &soft_cm_sidr_server;
}

/* End the remaining conversations when the engine stops. */
void soft_cm_gsi_stop(void)
{
	soft_list_drain (struct conversation, it, &soft_device.cm->gsi.conversations, node)
		end(&it->link);
}
