/* The inside of the connection manager: what its sources share.
 *
 *   cm_mad.c       bytes of the messages           cm_states.c   state x call -> allowed or errno
 *   cm_event.c     event channels and events       cm_device.c   the context behind id->verbs
 *   cm_id.c        ids: create, destroy, options   cm_address.c  addresses: bind, resolve
 *   cm_link.c      timers, repetition              cm_listen.c   listeners, the backlog
 *   cm_active.c    rdma_connect, rdma_establish    cm_passive.c  rdma_accept, rdma_reject
 *   cm_qp.c        the queue pair's states         cm_create.c   queue pairs and SRQs of an id
 *   cm_connection.c  connected, disconnected       cm_endpoint.c rdma_create_ep, rdma_get_request
 *   cm_lookup.c    names                           cm_multicast.c groups
 *   cm_sidr_request.c  datagram services: asked    cm_sidr_service.c  and answered
 *   carriers: cm_stream.c connections, over TCP; cm_sidr_request.c and cm_sidr_service.c datagram
 *   services, over UDP; cm_gsi.c both, by MADs, whose bytes are cm_mad.c
 *
 * Everything here is called with the engine's lock unless it says otherwise; an int is 0 or an errno
 * value.  What happens by itself (a message, the end of a stream, a timeout) happens in the engine's
 * step; the application may destroy an id at any moment, since both hold the lock.
 */
#pragma once

#include "cm.h"
#include "cm_mad.h"
#include "cm_states.h"
#include "fair_rate.h"
#include "objects/objects.h"

/* How long the other side may take, and how many handshakes may be half open.  A variable, so that
 * the tests need not wait as long as a slow network may take. */
struct soft_cm_limits {
	uint32_t response_ms; /* rdma_connect until the other side's first message */
	uint32_t refused_ms;  /* a port without a listener: how long it is tried again */
	uint32_t service_ms;  /* then until its application's answer; REP until RTU */
	uint32_t request_ms;  /* a listener: from the TCP connection until the whole REQ */
	uint32_t timewait_ms; /* DISCONNECTED until TIMEWAIT_EXIT */
	uint32_t linger_ms; /* an ended exchange over a carrier that loses: answers repetitions */
	uint32_t half_open; /* handshakes without a whole REQ; likewise those that linger */
};

enum { SOFT_GSI_BUCKETS = 256 };

struct soft_cm {
	/* Of connections; of datagram services, for requests and for answers. */
	const struct soft_cm_carrier *carrier, *asking, *answering;
	struct soft_cm_limits limits;

	/* cm_device.c */
	pthread_mutex_t opening;
	bool device_stays;
	struct soft_cm_device {
		bool is_open;
		struct soft_context own; /* what is behind id->verbs */
		struct ibv_pd *pd;
		unsigned holds;
	} devices[SOFT_HCAS_MOST];
	struct soft_node attached; /* soft_cm_id.on_device */

	/* cm_event.c */
	pthread_mutex_t acknowledge; /* soft_cm_id.acked alone: it never waits for the engine */
	pthread_cond_t acknowledged;
	struct soft_cm_channel *remains; /* the last one that was destroyed: rdma_get_cm_event */

	/* cm_connection.c: ids that know the other side's queue pair, and whose stream no queue pair
	 * has yet */
	struct soft_node agreed;
	struct soft_places half_open; /* cm_stream.c: of all listeners */
	struct soft_places lingering; /* cm_link.c: without an owner */

	/* cm_gsi.c */
	struct soft_gsi {
		const struct soft_gsi_calls *calls;
		struct soft_table ids; /* communication IDs */
		struct soft_node conversations, listeners;
		/* Conversations by how the peer names them, in buckets. */
		struct soft_node by_remote_id[SOFT_GSI_BUCKETS], by_peer_qpn[SOFT_GSI_BUCKETS];
		uint64_t seed; /* of soft_hash */
		struct soft_fair_rate strangers; /* messages that any host can send */
	} gsi;
};

static inline uint64_t soft_cm_in(uint32_t milliseconds)
{
	return soft_now() + milliseconds * UINT64_C(1000000);
}

struct soft_cm_id;
struct soft_qp;
struct soft_cm_link;
struct soft_cm_listener;

/* ---- cm_event.c ---------------------------------------------------------------------------- */

struct soft_cm_channel {
	struct rdma_event_channel channel; /* the application's; first */
	unsigned fork_generation; /* the process (of a fork) that made it */
	struct soft_channel wake;
	struct soft_node events; /* soft_cm_event.node, oldest first */
	struct soft_node ids; /* soft_cm_id.in_channel */
	unsigned inside; /* threads in rdma_get_cm_event */
	bool destroyed; /* with threads inside: the last one frees it */
};

static inline struct soft_cm_channel *soft_cm_channel_of(struct rdma_event_channel *channel)
{
	return soft_container(channel, struct soft_cm_channel, channel);
}

struct soft_cm_event {
	struct rdma_cm_event event; /* the application's; first */
	struct soft_node node;
	struct soft_cm_id *owner; /* whose rdma_destroy_id waits for the acknowledgement */
	uint8_t private_data[SOFT_CM_PRIVATE_MAX];
};

/* Puts an event into the id's queue; `message`: whose parameters and private data it carries, or NULL.
 * 0, or ENOMEM: then it is lost, and the call that it would have answered fails, if there is one.
 * Of a request that is not accepted nothing is reported, since its id may have no context of the
 * application yet; as with the kernel, rdma_accept fails when the request is over. */
int soft_cm_report(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		   const struct soft_cm_message *message);
/* Of a group: where to send; private data without a length is a pointer of the application's
 * (rdma_join_multicast(3)). */
int soft_cm_report_ud(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		      const struct rdma_ud_param *ud);
/* A CONNECT_REQUEST, of either kind, which belongs to the listener. */
int soft_cm_report_request(struct soft_cm_id *listener, struct soft_cm_id *request,
			   const struct soft_cm_message *message);
bool soft_cm_has_event(const struct soft_cm_id *id);
/* Drops what is queued for the id, or of it what is about joining `group`.  Requests that the
 * application has not seen go to `orphans` (by in_channel), for soft_cm_free_orphans. */
void soft_cm_drop_events(struct soft_cm_id *id, const union ibv_gid *group,
			 struct soft_node *orphans);
/* Acknowledges what a synchronous call has left in id->event, if anything.  Not under the lock. */
void soft_cm_forget_event(struct soft_cm_id *id);
/* Waits until what was reported of the id has been acknowledged.  Not under the lock. */
void soft_cm_wait_acknowledged(struct soft_cm_id *id);

/* ---- cm_device.c --------------------------------------------------------------------------- */

/* Opens the devices for the connection manager unless they are open, and holds them: 0 or an errno
 * value; gives up the hold.  Not under the lock. */
int soft_cm_device_get(void);
void soft_cm_device_put(void);
/* 0, or ENODEV: the device that has that address is gone. */
int soft_cm_device_error(const struct sockaddr *address);
/* The id is told of the device's removal, and holds the device, which is open.  NULL: of all. */
void soft_cm_device_attach(struct soft_cm_id *id, struct soft_cm_device *device);
void soft_cm_device_detach(struct soft_cm_id *id);
/* Attaches the id and binds it to the device that has its address: id->verbs, id->pd, id->port_num. */
void soft_cm_device_bind(struct soft_cm_id *id);
/* That is attached to the devices with these ports. */
void soft_cm_device_each(uint32_t ports, void (*what)(struct soft_cm_id *id));

/* ---- cm_id.c ------------------------------------------------------------------------------- */

struct soft_cm_id {
	struct rdma_cm_id id; /* the application's; first */
	unsigned fork_generation; /* the process (of a fork) that made it */
	struct soft_node in_channel;
	enum soft_cm_state state;
	bool synchronous; /* the channel belongs to the id */
	unsigned reported, acked; /* events taken and acknowledged; of cm_event.c */
	bool bound; /* to the device */
	bool attached; /* to the device: bound, or listening on all addresses */
	struct soft_cm_device *device; /* to which; NULL: to all */
	struct soft_node on_device; /* while it is attached */
	bool waits;

	/* address */
	int sock; /* bound, not yet connected: the id's port; or -1 */
	bool reuse;
	bool v6_only;
	uint8_t tos;
	uint8_t ack_timeout;
	bool ack_timeout_set;

	struct soft_cm_listener *listener; /* LISTENING */
	unsigned untaken, backlog; /* requests reported and not taken by the application; at most */
	struct soft_cm_id *request_of; /* the listener, until the application sees the request */
	bool unaccepted; /* a request that rdma_accept has not answered: see soft_cm_report */

	struct soft_node groups; /* of a datagram id: that it has joined (cm_multicast.c) */

	/* the exchange with the other side, as long as no queue pair has its stream */
	struct soft_cm_link *link;
	struct soft_cm_ece local_ece, remote_ece;
	bool early; /* rdma_notify has reported ESTABLISHED before RTU came */
	uint32_t made_qpn; /* of id->qp, if rdma_create_qp made it */
	uint32_t qpn; /* of this side, as the other side knows it */
	uint32_t psn; /* that the other side begins with (IBTA 12.7.31) */
	uint32_t remote_qpn;
	uint32_t remote_psn; /* that this side begins with */
	uint8_t responder_resources; /* what this side's queue pair is set to */
	uint8_t initiator_depth;
	uint8_t retry_count;
	uint8_t rnr_retry_count;
	uint8_t path_mtu; /* enum ibv_mtu; 0: the carrier does not say it */

	/* what rdma_get_request makes the queue pairs with, or NULL */
	struct ibv_qp_init_attr *request_attr;
	struct ibv_pd *request_pd;

	/* Of the other side, on this host, if both can use shared memory; 0: only the stream is
	 * left.  The side that asked for the connection opens the channel. */
	uint16_t shm_port;
	uint16_t path_port; /* of the side that accepted; 0: the stream is used in any case */
	bool opens_chan;

	struct soft_node agreed; /* in cm_connection.c: the stream will be the queue pair's */
	bool held; /* and waits for it */
	struct soft_timer timewait;
};

static inline struct soft_cm_id *soft_cm_id_of(struct rdma_cm_id *id)
{
	return soft_container(id, struct soft_cm_id, id);
}

/* Whether it is a datagram service's: addresses are resolved, there is no connection. */
static inline bool soft_cm_datagrams(const struct soft_cm_id *id)
{
	return id->id.qp_type == IBV_QPT_UD;
}

/* A new id in state IDLE, in no channel's list yet; NULL without memory. */
struct soft_cm_id *soft_cm_id_new(enum rdma_port_space port_space, void *context);
void soft_cm_id_join(struct soft_cm_id *id, struct soft_cm_channel *channel);
void soft_cm_id_leave(struct soft_cm_id *id);
/* Whether the id waits for the other side: then the engine serves the application's channel without
 * delay (soft_channel.wanted). */
void soft_cm_id_waits(struct soft_cm_id *id, bool waits);

/* Ends whatever the id is doing, tells the other side, drops its events; the id is in state FAILED
 * and silent from here on. */
void soft_cm_id_silence(struct soft_cm_id *id, struct soft_node *orphans);
void soft_cm_free_orphans(struct soft_node *orphans);

/* `return soft_cm_fail(EINVAL)`: -1, and errno set. */
int soft_cm_fail(int error);
/* How a call of the application begins: with the lock, or with NULL and errno, without an id. */
struct soft_cm_id *soft_cm_enter(struct rdma_cm_id *application);
/* And ends: what it returns, with errno. */
int soft_cm_leave(int error);
/* The same of a call that needs the device, which is open in between. */
struct soft_cm_id *soft_cm_enter_device(struct rdma_cm_id *application);
int soft_cm_leave_device(int error);

/* A new id for a request, or NULL without memory; once it has been reported it is in the listener's
 * channel and on the device. */
struct soft_cm_id *soft_cm_request_new(struct soft_cm_id *listener);
void soft_cm_request_join(struct soft_cm_id *id);

/* ---- cm_address.c -------------------------------------------------------------------------- */

/* Bytes of an IPv4 or IPv6 address; 0 for anything else. */
socklen_t soft_cm_address_length(const struct sockaddr *address);
/* Of an IPv4 or IPv6 address: is it the wildcard? */
bool soft_cm_is_any(const struct sockaddr *address);
/* Binds an id that is IDLE; the device is the caller's business. */
int soft_cm_bind(struct soft_cm_id *id, const struct sockaddr *address);
/* The error of the kernel's rdma_cm for a taken port: EADDRNOTAVAIL, instead of EADDRINUSE, where
 * one of the two is on all addresses.  Other errors as they are. */
int soft_cm_port_error(const struct sockaddr *address, int type, int error);
void soft_cm_apply_tos(int fd, uint8_t tos);
/* The id's addresses and GIDs, as the carrier of its link has them; IPv4 in IPv6 becomes IPv4. */
void soft_cm_take_addresses(struct soft_cm_id *id);
/* Changes V6ONLY of an id that is bound already. */
int soft_cm_rebind(struct soft_cm_id *id, bool v6_only);

/* ---- carriers ------------------------------------------------------------------------------ */

/* What brings messages to the other side.  States and timers know no sockets: a carrier makes links
 * and gives them what comes (soft_cm_link_received, soft_cm_link_failed; soft_cm_asked). */
struct soft_cm_carrier {
	bool loses; /* messages may be lost, doubled and late: those that want an answer are repeated */
	/* A link to the destination of an id, over which nothing has been said yet; it has the id's
	 * socket, if it needs that.  NULL and *error. */
	struct soft_cm_link *(*connect)(struct soft_cm_id *id, int *error);
	/* At the port of an id; NULL and *error. */
	struct soft_cm_listener *(*listen)(struct soft_cm_id *id, int *error);
	void (*unlisten)(struct soft_cm_listener *listener); /* frees it */
	/* 0 or an errno value, after which nothing can be said any more. */
	int (*send)(struct soft_cm_link *link, const struct soft_cm_message *message);
	void (*end)(struct soft_cm_link *link); /* frees it; nothing comes any more */
	/* Both addresses; what is not known stays as it is. */
	void (*who)(const struct soft_cm_link *link, struct sockaddr_storage *local,
		    struct sockaddr_storage *peer);
	void (*apply_tos)(struct soft_cm_link *link, uint8_t tos);
	/* The link of a connected id becomes the queue pair's stream, and is freed; or waits for
	 * the queue pair (NULL) and reads nothing.  NULL: the link stays with the id, for DREQ. */
	int (*hand_over)(struct soft_cm_id *id, struct soft_qp *qp);
};

extern const struct soft_cm_carrier soft_cm_stream, soft_cm_gsi, soft_cm_asking, soft_cm_answering;

void soft_cm_gsi_stop(void); /* cm_gsi.c: the engine stops */

/* ---- cm_link.c ----------------------------------------------------------------------------- */

struct soft_cm_link_calls {
	/* False: the link may be gone. */
	bool (*message)(struct soft_cm_link *link, const struct soft_cm_message *message);
	/* The carrier ended, or delivered bytes that are no CM message: an errno value; ETIMEDOUT: the
	 * deadline is over.  The link is still there; the callee ends it. */
	void (*failed)(struct soft_cm_link *link, int error);
};

/* One exchange of messages with the other side's connection manager; carriers extend it. */
struct soft_cm_link {
	const struct soft_cm_carrier *carrier;
	const struct soft_cm_link_calls *calls; /* NULL: it has no owner */
	void *owner;
	struct soft_cm_message said; /* the last message of this side */
	struct soft_cm_message request; /* of the passive side: REQ */
	struct soft_place place; /* of the passive side: half open, or parked */
	unsigned heard; /* the greatest type of the other side's; 0: it has not spoken */
	struct soft_timer timer; /* the deadline, or the next repetition before it */
	uint64_t deadline; /* 0: none */
	uint64_t begun_at;
	uint64_t pause_ns; /* until the next repetition; doubles */
};

void soft_cm_link_init(struct soft_cm_link *link, const struct soft_cm_carrier *carrier);
/* For carriers, when a link ends. */
void soft_cm_link_stop(struct soft_cm_link *link);
int soft_cm_link_say(struct soft_cm_link *link, const struct soft_cm_message *message);
/* The first message of an id, REQ or SIDR_REQ, over a new link, and its timers: 0 or an errno value;
 * there is a link all the same, if there could be one. */
int soft_cm_link_ask(struct soft_cm_id *id, const struct soft_cm_carrier *carrier,
		     const struct soft_cm_link_calls *calls, const struct soft_cm_message *message);
/* Repeats what was said, if the carrier loses, until the deadline. */
void soft_cm_link_expect(struct soft_cm_link *link, uint32_t milliseconds);
void soft_cm_link_expect_nothing(struct soft_cm_link *link);
/* The owner leaves the link, which may stay for repetitions of its last word. */
void soft_cm_link_leave(struct soft_cm_link *link);
/* Of a REQ that no id is made for.  What is refused here is refused again, should it be repeated:
 * nothing is kept for that. */
void soft_cm_link_refuse(struct soft_cm_link *link, uint16_t reason);
/* Its peer takes one of so many places, fairly (fair_share.h): the link that loses its own, never this
 * one, or NULL. */
struct soft_cm_link *soft_cm_link_place(struct soft_cm_link *link, struct soft_places *places,
					unsigned most);
/* Of the carrier.  False: the link may be gone. */
bool soft_cm_link_received(struct soft_cm_link *link, const struct soft_cm_message *message);
void soft_cm_link_failed(struct soft_cm_link *link, int error);
/* Of the carrier: nothing listens there.  True: there will be another try. */
bool soft_cm_link_insist(struct soft_cm_link *link);

/* ---- cm_listen.c --------------------------------------------------------------------------- */

struct soft_cm_listener {
	const struct soft_cm_carrier *carrier;
	struct soft_cm_id *id;
	struct soft_places parked; /* requests without room in the backlog */
};

/* Of the carrier: a REQ over a link without an owner.  False: the link is gone. */
bool soft_cm_asked(struct soft_cm_listener *listener, struct soft_cm_link *link,
		   const struct soft_cm_message *request);
/* Safe to repeat. */
void soft_cm_listener_close(struct soft_cm_id *id);
/* The application has taken a request, of either kind: the next may be reported. */
void soft_cm_listener_taken(struct soft_cm_id *id);
/* Handshakes without a whole REQ, and links that linger: at most so many. */
static inline unsigned soft_cm_half_open(void)
{
	return soft_places_limit(soft_device.cm->limits.half_open);
}

/* ---- cm_passive.c -------------------------------------------------------------------------- */

/* An id for a request that has come over `link`, which is its own from here on, also on failure. */
int soft_cm_request(struct soft_cm_id *listener, struct soft_cm_link *link);

/* ---- cm_sidr_request.c, cm_sidr_service.c ---------------------------------------------------- */

/* rdma_connect, rdma_accept, rdma_reject of a datagram id. */
int soft_cm_sidr_request(struct soft_cm_id *id, const struct rdma_conn_param *parameters);
int soft_cm_service_accept(struct soft_cm_id *id, const struct rdma_conn_param *parameters);
int soft_cm_service_reject(struct soft_cm_id *id, const void *private_data, uint8_t length);
/* Of the carrier: a SIDR_REQ over a new link.  False: the link is gone. */
bool soft_cm_service_asked(struct soft_cm_listener *listener, struct soft_cm_link *link,
			   const struct soft_cm_message *request);

/* ---- cm_multicast.c ------------------------------------------------------------------------ */

/* The application takes the event of a join: attaches the queue pair.  Not under the lock. */
int soft_cm_multicast_joined(struct soft_cm_id *id, const union ibv_gid *gid);
void soft_cm_leave_groups(struct soft_cm_id *id);
/* Before the queue pair goes, which cannot while it is attached.  Not under the lock. */
void soft_cm_detach_groups(struct soft_cm_id *id);

/* ---- cm_endpoint.c ------------------------------------------------------------------------- */

/* For ids without a channel of their own (rdma_create_id(3): synchronous operation): waits for the
 * event that ends the call and leaves it in id->event.  0, or -1 and errno.  Not under the lock. */
int soft_cm_complete(struct soft_cm_id *id);

/* ---- cm_qp.c ------------------------------------------------------------------------------- */

/* The parameters of rdma_connect and rdma_accept, for a message of that type. */
int soft_cm_check_parameters(const struct soft_cm_id *id, const struct rdma_conn_param *parameters,
			     enum soft_cm_type type);
/* id->qp, unless the application has destroyed it behind the id's back; or NULL. */
struct ibv_qp *soft_cm_qp(const struct soft_cm_id *id);
/* Fills the common part of REQ and REP from the id and the application's parameters (or NULL). */
void soft_cm_fill_message(const struct soft_cm_id *id, const struct rdma_conn_param *parameters,
			  struct soft_cm_message *message);
/* The depth to ask for (RDMA_MAX_...: as much as there is), within the device's limit. */
uint8_t soft_cm_depth(uint8_t wanted, uint8_t otherwise);
/* A new queue pair to INIT; one for datagrams, or what REQ and REP have agreed on, to RTS, through INIT again:
 * only now is known what the other side may do. */
int soft_cm_qp_start(struct soft_cm_id *id, struct ibv_qp *qp, bool agreed);
/* The way to the other side, from the id's addresses. */
void soft_cm_fill_vector(const struct soft_cm_id *id, struct ibv_ah_attr *vector);
/* To ERR, if there is one. */
void soft_cm_qp_error(struct soft_cm_id *id);
uint32_t soft_cm_random_psn(void);

/* ---- cm_connection.c ----------------------------------------------------------------------- */

/* The handshake is over, the id CONNECTED: `established`, unless NULL, is the message whose content
 * the ESTABLISHED event carries.  A stream goes to the queue pair; where that is not in RTR yet,
 * it is held for it.  ENOTCONN, and nothing has happened, when the queue pair is in error. */
int soft_cm_established(struct soft_cm_id *id, const struct soft_cm_message *established);
/* REQ or REP has told the other side's queue pair number: when this side's comes to RTR for that one,
 * the id's stream is its stream (soft_cm_offer). */
void soft_cm_agreed(struct soft_cm_id *id);
/* The application's own queue pair may be in RTR already, with other PSNs than the id's. */
void soft_cm_claim(const struct soft_cm_id *id);
/* Before CONNECTED: the link is left, the event reported, the id FAILED. */
void soft_cm_failed(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		    const struct soft_cm_message *message);
/* Leaves the id's link, after REJ. */
void soft_cm_reject(struct soft_cm_id *id, uint16_t reason, const void *private_data,
		    uint8_t private_data_len);
/* Leaves the id's link, and what the queue pair has of it. */
void soft_cm_forget(struct soft_cm_id *id);
/* Ends a connection and tells the other side; no event. */
void soft_cm_close(struct soft_cm_id *id);

/* cm_device.c: something of the CM's device context has gone; closes it if it is not used any more.
 * Not under the lock. */
void soft_cm_device_sweep(void);
