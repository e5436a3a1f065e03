/* The internals of the connection manager, shared by its sources.
 *
 *   cm_mad.c       encoding of the messages        cm_states.c   calls allowed in each state
 *   cm_event.c     event channels and events       cm_device.c   the context behind id->verbs
 *   cm_id.c        ids: create, destroy, options   cm_address.c  addresses: bind, resolve
 *   cm_link.c      timers, retransmission          cm_listen.c   listeners, the backlog
 *   cm_active.c    rdma_connect, rdma_establish    cm_passive.c  rdma_accept, rdma_reject
 *   cm_qp.c        the queue pair's states         cm_create.c   queue pairs and SRQs of an id
 *   cm_connection.c  connected, disconnected       cm_endpoint.c rdma_create_ep, rdma_get_request
 *   cm_lookup.c    names                           cm_multicast.c multicast groups
 *   cm_sidr_request.c  datagram services: client   cm_sidr_service.c  datagram services: server
 *
 * Carriers: cm_stream.c carries connections over TCP; cm_sidr_request.c and cm_sidr_service.c carry
 * datagram services over UDP; cm_gsi.c carries both in MADs, whose encoding is in cm_mad.c.
 *
 * Unless stated otherwise, all functions are called with the engine's lock held, and an int result
 * is 0 or an errno value. Asynchronous events (a message, the end of a stream, a timeout) are
 * handled in the engine's steps. The application may destroy an id at any time, because both sides
 * hold the lock.
 */
#pragma once

#include "cm.h"
#include "cm_mad.h"
#include "cm_states.h"
#include "fair_rate.h"
#include "objects/objects.h"

/* Timeouts for the other side, and limits of half-open handshakes. They are variables so that tests
 * need not wait as long as a slow network may take. */
struct soft_cm_limits {
	uint32_t response_ms; /* from rdma_connect to the first message of the other side */
	uint32_t refused_ms;  /* how long a port without a listener is retried */
	uint32_t service_ms;  /* then until its application responds; also from REP to RTU */
	uint32_t request_ms;  /* listener: from the TCP connection to the complete REQ */
	uint32_t timewait_ms; /* from DISCONNECTED to TIMEWAIT_EXIT */
	uint32_t linger_ms; /* how long an ended exchange answers repetitions */
	uint32_t half_open; /* maximum of half-open handshakes and of lingering links */
};

enum { SOFT_GSI_BUCKETS = 256 };

struct soft_cm {
	/* The carriers of connections, of requests for datagram services, and of their
	 * responses. */
	const struct soft_cm_carrier *carrier, *asking, *answering;
	struct soft_cm_limits limits;

	/* cm_device.c */
	pthread_mutex_t opening;
	bool device_stays;
	struct soft_cm_device {
		bool is_open;
		struct soft_context own; /* the context behind id->verbs */
		struct ibv_pd *pd;
		unsigned holds;
	} devices[SOFT_HCAS_MOST];
	struct soft_node attached; /* list of soft_cm_id.on_device */

	/* cm_event.c */
	pthread_mutex_t acknowledge; /* soft_cm_id.acked; never waits for the engine */
	pthread_cond_t acknowledged;
	struct soft_cm_channel *remains; /* last destroyed channel; a thread may still enter it */

	/* cm_connection.c: ids that know the other side's queue pair, and whose stream no queue
	 * pair has taken over yet */
	struct soft_node agreed;
	struct soft_places half_open; /* cm_stream.c: connections of all listeners */
	struct soft_places lingering; /* cm_link.c: links without an owner */

	/* cm_gsi.c */
	struct soft_gsi {
		const struct soft_gsi_calls *calls;
		struct soft_table ids; /* by communication ID */
		struct soft_node conversations, listeners;
		/* Hash tables of the conversations by the peer's identifiers. */
		struct soft_node by_remote_id[SOFT_GSI_BUCKETS], by_peer_qpn[SOFT_GSI_BUCKETS];
		uint64_t seed; /* for soft_hash */
		struct soft_fair_rate strangers; /* limits messages that any host can send */
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
	struct rdma_event_channel channel; /* used by the application; first member */
	unsigned fork_generation; /* soft_engine_fork_generation() at its creation */
	struct soft_channel wake;
	struct soft_node events; /* soft_cm_event.node, oldest first */
	struct soft_node ids; /* soft_cm_id.in_channel */
	unsigned inside; /* threads in rdma_get_cm_event */
	bool destroyed; /* while threads are inside; the last one frees it */
};

static inline struct soft_cm_channel *soft_cm_channel_of(struct rdma_event_channel *channel)
{
	return soft_container(channel, struct soft_cm_channel, channel);
}

struct soft_cm_event {
	struct rdma_cm_event event; /* used by the application; first member */
	struct soft_node node;
	struct soft_cm_id *owner; /* whose rdma_destroy_id waits until the event is acknowledged */
	uint8_t private_data[SOFT_CM_PRIVATE_MAX];
};

/* Queue an event of the id with the parameters and private data of `message`, which may be NULL.
 * Returns 0 or ENOMEM. In the latter case the event is lost, and the call that it would have
 * completed fails, if there is one. Nothing is reported about a request that has not been accepted,
 * because its id may not have the application's context yet. As with the kernel, rdma_accept fails
 * if the request is over. */
int soft_cm_report(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		   const struct soft_cm_message *message);
/* Queue an event about a multicast group with the destination in `ud`. If it has private data
 * without a length, the data is the application's context pointer (rdma_join_multicast(3)). */
int soft_cm_report_ud(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		      const struct rdma_ud_param *ud);
/* Queue the CONNECT_REQUEST event of a connection or datagram service. It belongs to the
 * listener. */
int soft_cm_report_request(struct soft_cm_id *listener, struct soft_cm_id *request,
			   const struct soft_cm_message *message);
bool soft_cm_has_event(const struct soft_cm_id *id);
/* Drop the id's queued events. If `group` is not NULL, drop only events about joining that group.
 * Requests that the application has not seen are moved to `orphans` (linked by in_channel) for
 * soft_cm_free_orphans. */
void soft_cm_drop_events(struct soft_cm_id *id, const union ibv_gid *group,
			 struct soft_node *orphans);
/* Acknowledge the event that a synchronous call has left in id->event, if any. The caller must not
 * hold the lock. */
void soft_cm_forget_event(struct soft_cm_id *id);
/* Wait until all events taken from the id have been acknowledged. The caller must not hold the
 * lock. */
void soft_cm_wait_acknowledged(struct soft_cm_id *id);

/* ---- cm_device.c --------------------------------------------------------------------------- */

/* Open the devices for the connection manager if necessary, and hold them. The caller must not hold
 * the lock. Returns 0 or an errno value. */
int soft_cm_device_get(void);
/* Release the devices. The caller must not hold the lock. */
void soft_cm_device_put(void);
/* Returns ENODEV if the device with this address has been removed, otherwise 0. */
int soft_cm_device_error(const struct sockaddr *address);
/* Hold the device, which must be open, and notify the id if it is removed. If `device` is NULL,
 * this applies to all devices. */
void soft_cm_device_attach(struct soft_cm_id *id, struct soft_cm_device *device);
void soft_cm_device_detach(struct soft_cm_id *id);
/* Attach the id to the device that has its address, and set id->verbs, id->pd and id->port_num. */
void soft_cm_device_bind(struct soft_cm_id *id);
/* Call `what` for each id attached to the devices with these ports. */
void soft_cm_device_each(uint32_t ports, void (*what)(struct soft_cm_id *id));

/* ---- cm_id.c ------------------------------------------------------------------------------- */

struct soft_cm_id {
	struct rdma_cm_id id; /* used by the application; first member */
	unsigned fork_generation; /* soft_engine_fork_generation() at its creation */
	struct soft_node in_channel;
	enum soft_cm_state state;
	bool synchronous; /* the id owns its channel */
	unsigned reported, acked; /* events delivered and acknowledged (cm_event.c) */
	bool bound; /* bound to a device */
	bool attached; /* bound to a device, or listening on all addresses */
	struct soft_cm_device *device; /* device it is attached to; NULL for all devices */
	struct soft_node on_device; /* node in soft_cm.attached */
	bool waits;

	/* address */
	int sock; /* bound but not yet connected socket that reserves the port, or -1 */
	bool reuse;
	bool v6_only;
	uint8_t tos;
	uint8_t ack_timeout;
	bool ack_timeout_set;

	struct soft_cm_listener *listener; /* set in state LISTENING */
	unsigned untaken, backlog; /* requests reported but not taken, and their limit */
	struct soft_cm_id *request_of; /* listener, until the application sees the request */
	bool unaccepted; /* request that has not been accepted; see soft_cm_report */

	struct soft_node groups; /* groups joined by a datagram id (cm_multicast.c) */

	/* The exchange with the other side, until a queue pair takes over its stream. */
	struct soft_cm_link *link;
	struct soft_cm_ece local_ece, remote_ece;
	bool early; /* rdma_notify reported ESTABLISHED before RTU arrived */
	uint32_t made_qpn; /* number of id->qp if rdma_create_qp created it */
	uint32_t qpn; /* this side's number, as sent to the other side */
	uint32_t psn; /* first PSN sent by the other side (IBTA 12.7.31) */
	uint32_t remote_qpn;
	uint32_t remote_psn; /* first PSN sent by this side */
	uint8_t responder_resources; /* as set in this side's queue pair */
	uint8_t initiator_depth;
	uint8_t retry_count;
	uint8_t rnr_retry_count;
	uint8_t path_mtu; /* enum ibv_mtu; 0 if the carrier does not transmit it */

	/* Attributes of the queue pairs that rdma_get_request creates, or NULL. */
	struct ibv_qp_init_attr *request_attr;
	struct ibv_pd *request_pd;

	/* The other side's port for shared memory, if it is on this host and both sides can use
	 * shared memory. If 0, only the stream can be used. */
	uint16_t shm_port;
	uint16_t path_port; /* the accepting side's port; 0 if the stream is always used */
	bool opens_chan;

	struct soft_node agreed; /* node in soft_cm.agreed (soft_cm_agreed) */
	bool held; /* the stream waits for the queue pair */
	struct soft_timer timewait;
};

static inline struct soft_cm_id *soft_cm_id_of(struct rdma_cm_id *id)
{
	return soft_container(id, struct soft_cm_id, id);
}

/* Returns whether the id is for a datagram service, which resolves addresses but has no
 * connection. */
static inline bool soft_cm_datagrams(const struct soft_cm_id *id)
{
	return id->id.qp_type == IBV_QPT_UD;
}

/* Create an id in state IDLE that is not in any channel's list yet. Returns NULL without memory. */
struct soft_cm_id *soft_cm_id_new(enum rdma_port_space port_space, void *context);
void soft_cm_id_join(struct soft_cm_id *id, struct soft_cm_channel *channel);
void soft_cm_id_leave(struct soft_cm_id *id);
/* Set whether the id waits for the other side. While it does, the engine serves the application's
 * channel without delay (soft_channel.wanted). */
void soft_cm_id_waits(struct soft_cm_id *id, bool waits);

/* End whatever the id is doing, notify the other side, and drop the id's events. The id is then in
 * state FAILED and reports nothing more. */
void soft_cm_id_silence(struct soft_cm_id *id, struct soft_node *orphans);
void soft_cm_free_orphans(struct soft_node *orphans);

/* Set errno. Returns -1. */
int soft_cm_fail(int error);
/* Begin an application's call: acquire the lock. Returns the id, or NULL with errno set if
 * `application` is NULL. */
struct soft_cm_id *soft_cm_enter(struct rdma_cm_id *application);
/* End an application's call: release the lock. Returns the result of the call, with errno set. */
int soft_cm_leave(int error);
/* Begin a call that needs the device, which stays open until soft_cm_leave_device. Returns the id,
 * or NULL with errno set. */
struct soft_cm_id *soft_cm_enter_device(struct rdma_cm_id *application);
int soft_cm_leave_device(int error);

/* Create an id for a request. Returns NULL without memory. */
struct soft_cm_id *soft_cm_request_new(struct soft_cm_id *listener);
/* Add the id to the listener's channel and to its device after the request has been reported. */
void soft_cm_request_join(struct soft_cm_id *id);

/* ---- cm_address.c -------------------------------------------------------------------------- */

/* Returns the size of an IPv4 or IPv6 socket address in bytes, or 0 for any other family. */
socklen_t soft_cm_address_length(const struct sockaddr *address);
/* Returns whether an IPv4 or IPv6 address is the wildcard. */
bool soft_cm_is_any(const struct sockaddr *address);
/* Bind the port of an id in state IDLE. The caller binds the id to its device. */
int soft_cm_bind(struct soft_cm_id *id, const struct sockaddr *address);
/* Returns the error that the kernel's rdma_cm uses for a taken port: EADDRNOTAVAIL instead of
 * EADDRINUSE if one of the two sockets is bound to all addresses. Returns other errors
 * unchanged. */
int soft_cm_port_error(const struct sockaddr *address, int type, int error);
void soft_cm_apply_tos(int fd, uint8_t tos);
/* Set the id's addresses and GIDs from the carrier of its link. IPv4-mapped addresses are converted
 * to IPv4. */
void soft_cm_take_addresses(struct soft_cm_id *id);
/* Change V6ONLY of an id that is already bound. */
int soft_cm_rebind(struct soft_cm_id *id, bool v6_only);

/* ---- carriers ------------------------------------------------------------------------------ */

/* A transport for messages to the other side. States and timers are independent of sockets: a
 * carrier creates links and passes them what it receives (soft_cm_link_received,
 * soft_cm_link_failed, soft_cm_asked). */
struct soft_cm_carrier {
	bool loses; /* may lose, duplicate or delay messages; unanswered ones are repeated */
	/* Open a link to the id's destination without sending anything. It takes over the id's
	 * socket if it needs one. Returns NULL and sets `*error` on failure. */
	struct soft_cm_link *(*connect)(struct soft_cm_id *id, int *error);
	/* Listen at the id's port. Returns NULL and sets `*error` on failure. */
	struct soft_cm_listener *(*listen)(struct soft_cm_id *id, int *error);
	void (*unlisten)(struct soft_cm_listener *listener); /* frees it */
	/* Send a message. Returns 0, or an errno value after which nothing can be sent any more. */
	int (*send)(struct soft_cm_link *link, const struct soft_cm_message *message);
	void (*end)(struct soft_cm_link *link); /* frees it; no callback follows */
	/* Get both addresses. An address that is not known is left unchanged. */
	void (*who)(const struct soft_cm_link *link, struct sockaddr_storage *local,
		    struct sockaddr_storage *peer);
	void (*apply_tos)(struct soft_cm_link *link, uint8_t tos);
	/* Turn the link of a connected id into the queue pair's stream, and free the link. If `qp`
	 * is NULL, stop reading and wait for the queue pair. The function is NULL if the link stays
	 * with the id, for DREQ. */
	int (*hand_over)(struct soft_cm_id *id, struct soft_qp *qp);
};

extern const struct soft_cm_carrier soft_cm_stream, soft_cm_gsi, soft_cm_asking, soft_cm_answering;

void soft_cm_gsi_stop(void); /* called when the engine stops (cm_gsi.c) */

/* ---- cm_link.c ----------------------------------------------------------------------------- */

struct soft_cm_link_calls {
	/* Handle a message. Returns false if the link may have been freed. */
	bool (*message)(struct soft_cm_link *link, const struct soft_cm_message *message);
	/* Handle the end of the carrier or bytes that are not a CM message, with an errno value.
	 * ETIMEDOUT means that the deadline has passed. The link still exists, and the callee must
	 * end it. */
	void (*failed)(struct soft_cm_link *link, int error);
};

/* One exchange of messages with the other side's connection manager. Carriers embed it. */
struct soft_cm_link {
	const struct soft_cm_carrier *carrier;
	const struct soft_cm_link_calls *calls; /* NULL if it has no owner */
	void *owner;
	struct soft_cm_message said; /* last message sent by this side */
	struct soft_cm_message request; /* passive side: the REQ */
	struct soft_place place; /* passive side: while it is half open or parked */
	unsigned heard; /* highest message type received; 0 if none */
	struct soft_timer timer; /* the deadline, or an earlier repetition */
	uint64_t deadline; /* 0 if none */
	uint64_t begun_at;
	uint64_t pause_ns; /* time until the next repetition; doubles each time */
};

void soft_cm_link_init(struct soft_cm_link *link, const struct soft_cm_carrier *carrier);
/* Stop the timer and release the place of a link that a carrier ends. */
void soft_cm_link_stop(struct soft_cm_link *link);
/* Send a message and remember it for repetitions. Returns 0 or an errno value. */
int soft_cm_link_say(struct soft_cm_link *link, const struct soft_cm_message *message);
/* Send the first message of an id (REQ or SIDR_REQ) over a new link, and start the link's timers.
 * Returns 0 or an errno value. The id has a link even after an error, if one could be created. */
int soft_cm_link_ask(struct soft_cm_id *id, const struct soft_cm_carrier *carrier,
		     const struct soft_cm_link_calls *calls, const struct soft_cm_message *message);
/* Wait for a response until the deadline. On a lossy carrier, the last message is repeated in the
 * meantime. */
void soft_cm_link_expect(struct soft_cm_link *link, uint32_t milliseconds);
void soft_cm_link_expect_nothing(struct soft_cm_link *link);
/* Detach the owner from the link, which may linger to repeat its last message. */
void soft_cm_link_leave(struct soft_cm_link *link);
/* Reject a REQ for which no id is created, and end the link. Nothing is kept, because a repeated
 * REQ is simply rejected again. */
void soft_cm_link_refuse(struct soft_cm_link *link, uint16_t reason);
/* Give the link's peer one of `most` places, which are shared fairly (fair_share.h). Returns the
 * link that loses its place, which is never this one, or NULL. */
struct soft_cm_link *soft_cm_link_place(struct soft_cm_link *link, struct soft_places *places,
					unsigned most);
/* Handle a message received by the carrier. Returns false if the link may have been freed. */
bool soft_cm_link_received(struct soft_cm_link *link, const struct soft_cm_message *message);
/* Fail the link with an errno value. */
void soft_cm_link_failed(struct soft_cm_link *link, int error);
/* Retry the request if the carrier finds no listener at the port. Returns whether it will be
 * retried. */
bool soft_cm_link_insist(struct soft_cm_link *link);

/* ---- cm_listen.c --------------------------------------------------------------------------- */

struct soft_cm_listener {
	const struct soft_cm_carrier *carrier;
	struct soft_cm_id *id;
	struct soft_places parked; /* requests for which the backlog has no space */
};

/* Handle a REQ that the carrier received over a link without an owner. Returns false if the link
 * has been freed. */
bool soft_cm_asked(struct soft_cm_listener *listener, struct soft_cm_link *link,
		   const struct soft_cm_message *request);
/* Close the id's listener, if any. Safe to repeat. */
void soft_cm_listener_close(struct soft_cm_id *id);
/* Report the next requests after the application has taken one from a listener. */
void soft_cm_listener_taken(struct soft_cm_id *id);
/* Returns the maximum number of handshakes without a complete REQ, and of lingering links. */
static inline unsigned soft_cm_half_open(void)
{
	return soft_places_limit(soft_device.cm->limits.half_open);
}

/* ---- cm_passive.c -------------------------------------------------------------------------- */

/* Create an id for a request received over `link`, and report it. Takes ownership of the link, even
 * on failure. */
int soft_cm_request(struct soft_cm_id *listener, struct soft_cm_link *link);

/* ---- cm_sidr_request.c, cm_sidr_service.c ---------------------------------------------------- */

/* Handle rdma_connect of a datagram id. */
int soft_cm_sidr_request(struct soft_cm_id *id, const struct rdma_conn_param *parameters);
/* Handle rdma_accept of a request for a datagram service. */
int soft_cm_service_accept(struct soft_cm_id *id, const struct rdma_conn_param *parameters);
/* Handle rdma_reject of a request for a datagram service. */
int soft_cm_service_reject(struct soft_cm_id *id, const void *private_data, uint8_t length);
/* Handle a SIDR_REQ that the carrier received over a new link. Returns false if the link has been
 * freed. */
bool soft_cm_service_asked(struct soft_cm_listener *listener, struct soft_cm_link *link,
			   const struct soft_cm_message *request);

/* ---- cm_multicast.c ------------------------------------------------------------------------ */

/* Attach the queue pair to the group when the application takes the event of a join. The caller
 * must not hold the lock. */
int soft_cm_multicast_joined(struct soft_cm_id *id, const union ibv_gid *gid);
/* Forget the id's groups. */
void soft_cm_leave_groups(struct soft_cm_id *id);
/* Detach the queue pair from all groups before it is destroyed, which fails while it is attached.
 * The caller must not hold the lock. */
void soft_cm_detach_groups(struct soft_cm_id *id);

/* ---- cm_endpoint.c ------------------------------------------------------------------------- */

/* Wait for the event that completes the call, and leave it in id->event. This applies only to ids
 * without an application's channel (synchronous operation, rdma_create_id(3)). The caller must not
 * hold the lock. Returns 0, or -1 with errno set. */
int soft_cm_complete(struct soft_cm_id *id);

/* ---- cm_qp.c ------------------------------------------------------------------------------- */

/* Check the parameters of rdma_connect or rdma_accept for a message of this type. */
int soft_cm_check_parameters(const struct soft_cm_id *id, const struct rdma_conn_param *parameters,
			     enum soft_cm_type type);
/* Returns id->qp, or NULL if there is none or the application has destroyed it without the id. */
struct ibv_qp *soft_cm_qp(const struct soft_cm_id *id);
/* Fill in the common fields of REQ and REP from the id and the application's parameters, which may
 * be NULL. */
void soft_cm_fill_message(const struct soft_cm_id *id, const struct rdma_conn_param *parameters,
			  struct soft_cm_message *message);
/* Returns `wanted`, or `otherwise` if it is RDMA_MAX_RESP_RES, limited to the device's maximum. */
uint8_t soft_cm_depth(uint8_t wanted, uint8_t otherwise);
/* Move the queue pair to INIT, or through INIT to RTS if it is for datagrams or `agreed` is set
 * after REQ and REP. INIT is repeated because the other side's access rights are known only
 * then. */
int soft_cm_qp_start(struct soft_cm_id *id, struct ibv_qp *qp, bool agreed);
/* Fill in the address vector of the other side from the id's addresses. */
void soft_cm_fill_vector(const struct soft_cm_id *id, struct ibv_ah_attr *vector);
/* Move the queue pair to ERR, if there is one. */
void soft_cm_qp_error(struct soft_cm_id *id);
uint32_t soft_cm_random_psn(void);

/* ---- cm_connection.c ----------------------------------------------------------------------- */

/* Complete the handshake and move the id to CONNECTED. If `established` is not NULL, report
 * ESTABLISHED with its contents. The stream is given to the queue pair, or held until the queue
 * pair is in RTR. Returns ENOTCONN without changing the id if the queue pair is in error. */
int soft_cm_established(struct soft_cm_id *id, const struct soft_cm_message *established);
/* Remember the id after REQ or REP has carried the other side's queue pair number. When this side's
 * queue pair moves to RTR for that number, it gets the id's stream (soft_cm_offer). */
void soft_cm_agreed(struct soft_cm_id *id);
/* Reserve the stream for the application's own queue pair, which may already be in RTR with other
 * PSNs than the id's. */
void soft_cm_claim(const struct soft_cm_id *id);
/* Fail an id before it is CONNECTED: leave the link, move the id to FAILED, and report the
 * event. */
void soft_cm_failed(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		    const struct soft_cm_message *message);
/* Send REJ and leave the id's link. */
void soft_cm_reject(struct soft_cm_id *id, uint16_t reason, const void *private_data,
		    uint8_t private_data_len);
/* Leave the id's link, and unregister the id from its queue pair. */
void soft_cm_forget(struct soft_cm_id *id);
/* End a connection and notify the other side. No event is reported. */
void soft_cm_close(struct soft_cm_id *id);

/* Close the CM's device contexts that are no longer used. The caller must not hold the lock
 * (cm_device.c). */
void soft_cm_device_sweep(void);
