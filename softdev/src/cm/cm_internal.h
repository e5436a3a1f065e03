/* Internal declarations of the connection manager.
 *
 *   cm_mad.c       message encoding                cm_states.c   calls allowed in each state
 *   cm_event.c     event channels and events       cm_device.c   device contexts (id->verbs)
 *   cm_id.c        ids: create, destroy, options   cm_address.c  addresses: bind, resolve
 *   cm_link.c      timers, retransmission          cm_listen.c   listeners, backlog
 *   cm_active.c    rdma_connect, rdma_establish    cm_passive.c  rdma_accept, rdma_reject
 *   cm_qp.c        queue pair state transitions    cm_create.c   queue pairs and SRQs of an id
 *   cm_connection.c  established connections       cm_endpoint.c rdma_create_ep, rdma_get_request
 *   cm_lookup.c    name resolution                 cm_multicast.c multicast groups
 *   cm_sidr_request.c  datagram services: client   cm_sidr_service.c  datagram services: server
 *
 * Carriers: cm_stream.c carries connections over TCP. cm_sidr_request.c and cm_sidr_service.c carry
 * datagram service requests and responses over UDP. cm_gsi.c carries both kinds in MADs, which
 * cm_mad.c encodes.
 *
 * Unless stated otherwise, the caller of a function must hold the engine's lock, and an int result
 * is 0 or an errno value. The engine's steps handle asynchronous events, such as messages, closed
 * streams and timeouts. These steps also hold the lock, so the application may destroy an id at
 * any time.
 */
#pragma once

#include "cm.h"
#include "cm_mad.h"
#include "cm_states.h"
#include "fair_rate.h"
#include "objects/objects.h"

/* Timeouts while waiting for the peer, and limits for half-open handshakes. Tests change these
 * values to avoid long waits. */
struct soft_cm_limits {
	uint32_t response_ms; /* from rdma_connect to the peer's first message */
	uint32_t no_listener_ms;  /* total time for retrying a port without a listener */
	uint32_t service_ms;  /* from MRA to the application's response; also from REP to RTU */
	uint32_t request_ms; /* listener: from accepting a connection to the last byte of its REQ */
	uint32_t timewait_ms; /* from DISCONNECTED to TIMEWAIT_EXIT */
	uint32_t linger_ms; /* time for which an ended exchange responds to duplicates */
	uint32_t half_open; /* maximum number of half-open handshakes and of lingering links */
};

enum { SOFT_GSI_BUCKETS = 256 };

struct soft_cm {
	/* Carriers for connections, for datagram service requests, and for responses to these
	 * requests. */
	const struct soft_cm_carrier *carrier, *sidr_client, *sidr_server;
	struct soft_cm_limits limits;

	/* cm_device.c */
	pthread_mutex_t open_mutex;
	bool keep_device;
	struct soft_cm_device {
		bool is_open;
		struct soft_context own; /* context in id->verbs */
		struct ibv_pd *pd;
		unsigned holds; /* soft_cm_device_get calls and attached ids that keep it open */
	} devices[SOFT_MAX_HCAS];
	struct soft_node attached; /* list of soft_cm_id.on_device */

	/* cm_event.c */
	pthread_mutex_t ack_mutex; /* leaf lock that protects soft_cm_id.acked */
	pthread_cond_t ack_cond;
	struct soft_cm_channel *last_destroyed; /* a thread may still enter it */

	/* cm_connection.c: ids that have received the peer's queue pair number but have not handed
	 * over their stream yet */
	struct soft_node awaiting_adoption;
	struct soft_places half_open; /* cm_stream.c: half-open connections of all listeners */
	struct soft_places lingering; /* cm_link.c: links without an owner */

	/* cm_gsi.c */
	struct soft_gsi {
		const struct soft_gsi_calls *calls;
		struct soft_table ids; /* by communication ID */
		struct soft_node conversations, listeners;
		/* Conversations hashed by the peer's communication ID and queue pair number. */
		struct soft_node by_remote_id[SOFT_GSI_BUCKETS], by_peer_qpn[SOFT_GSI_BUCKETS];
		uint64_t seed; /* for soft_hash */
		struct soft_fair_rate request_rate; /* rate limit for unauthenticated messages */
	} gsi;
};

static inline uint64_t soft_cm_deadline(uint32_t milliseconds)
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
	unsigned fork_generation; /* soft_engine_fork_generation() at creation */
	struct soft_channel wake;
	struct soft_node events; /* soft_cm_event.node, oldest first */
	struct soft_node ids; /* soft_cm_id.in_channel */
	unsigned active_readers; /* threads in rdma_get_cm_event */
	bool destroyed; /* whether the last reader must free the channel */
};

static inline struct soft_cm_channel *soft_cm_channel_of(struct rdma_event_channel *channel)
{
	return soft_container(channel, struct soft_cm_channel, channel);
}

struct soft_cm_event {
	struct rdma_cm_event event; /* used by the application; first member */
	struct soft_node node;
	struct soft_cm_id *owner; /* id that cannot be destroyed until the event is acknowledged */
	uint8_t private_data[SOFT_CM_PRIVATE_MAX];
};

/* Queue an event for the id, with the parameters and private data of `message`, which may be NULL.
 * Returns 0 or ENOMEM. After ENOMEM the event is lost, and a call that depends on it must fail.
 * Requests that have not been accepted report no events, because the application may not have set
 * the id's context yet. As with the kernel, rdma_accept fails if such a request has ended. */
int soft_cm_report(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		   const struct soft_cm_message *message);
/* Queue a multicast event with the destination in `ud`. If ud->private_data_len is 0,
 * ud->private_data is the application's context pointer (rdma_join_multicast(3)). */
int soft_cm_report_ud(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		      const struct rdma_ud_param *ud);
/* Queue a CONNECT_REQUEST event for a connection or a datagram service. The event belongs to the
 * listener. */
int soft_cm_report_request(struct soft_cm_id *listener, struct soft_cm_id *request,
			   const struct soft_cm_message *message);
bool soft_cm_has_event(const struct soft_cm_id *id);
/* Drop the id's queued events. If `group` is not NULL, drop only the join events of that group.
 * Append the ids of CONNECT_REQUEST events, which the application has never seen, to
 * `dropped_requests` (linked by in_channel). The caller must pass the list to
 * soft_cm_free_dropped_requests. */
void soft_cm_drop_events(struct soft_cm_id *id, const union ibv_gid *group,
			 struct soft_node *dropped_requests);
/* If a synchronous call has stored an event in id->event, acknowledge the event and set id->event
 * to NULL. The caller must not hold the lock. */
void soft_cm_ack_event(struct soft_cm_id *id);
/* Wait until the application has acknowledged all events delivered for the id. The caller must not
 * hold the lock. */
void soft_cm_wait_acknowledged(struct soft_cm_id *id);

/* ---- cm_device.c --------------------------------------------------------------------------- */

/* Open all devices that are not open yet, and keep all devices open until soft_cm_device_put. The
 * caller must not hold the lock. Returns 0 or an errno value. */
int soft_cm_device_get(void);
/* Undo soft_cm_device_get, and close the devices that are no longer used. The caller must not hold
 * the lock. */
void soft_cm_device_put(void);
/* Returns ENODEV if the device with this address has been removed, otherwise 0. */
int soft_cm_device_error(const struct sockaddr *address);
/* Attach the id to an open device, which stays open until soft_cm_device_detach. The id is notified
 * if the device is removed. If `device` is NULL, attach the id to all devices, which must be open.
 * The id is then notified when the last device is removed. */
void soft_cm_device_attach(struct soft_cm_id *id, struct soft_cm_device *device);
void soft_cm_device_detach(struct soft_cm_id *id);
/* Attach the id to the device that owns its source address, and set id->verbs, id->pd and
 * id->port_num. */
void soft_cm_device_bind(struct soft_cm_id *id);
/* Call `callback` for each id attached to a device in the bit mask `ports`. An id attached to all
 * devices is included only if every device outside the mask has been removed. */
void soft_cm_device_each(uint32_t ports, void (*callback)(struct soft_cm_id *id));

/* ---- cm_id.c ------------------------------------------------------------------------------- */

struct soft_cm_id {
	struct rdma_cm_id id; /* used by the application; first member */
	unsigned fork_generation; /* soft_engine_fork_generation() at creation */
	struct soft_node in_channel;
	enum soft_cm_state state;
	bool synchronous; /* the id owns its channel */
	unsigned delivered, acked; /* numbers of delivered and acknowledged events (cm_event.c) */
	bool bound; /* bound to a device */
	bool attached; /* bound to a device, or listening on all addresses */
	struct soft_cm_device *device; /* attached device; NULL for all devices */
	struct soft_node on_device; /* node in soft_cm.attached */
	bool awaits_peer;

	/* address */
	int sock; /* bound socket that reserves the port; -1 if none */
	bool reuse;
	bool v6_only;
	uint8_t tos;
	uint8_t ack_timeout;
	bool ack_timeout_set;

	struct soft_cm_listener *listener; /* set in state LISTENING */
	unsigned undelivered, backlog; /* requests in the event queue, and their limit */
	struct soft_cm_id *request_listener; /* NULL once the request has been delivered */
	bool unaccepted; /* request not accepted yet; see soft_cm_report */

	struct soft_node groups; /* multicast groups joined by a datagram id (cm_multicast.c) */

	/* Link to the peer until the queue pair adopts its stream. */
	struct soft_cm_link *link;
	struct soft_cm_ece local_ece, remote_ece;
	bool established_early; /* rdma_notify reported ESTABLISHED before RTU arrived */
	uint32_t created_qpn; /* number of id->qp; 0 unless rdma_create_qp created it */
	uint32_t qpn; /* local queue pair number, as sent to the peer */
	uint32_t psn; /* first PSN expected from the peer (IBTA 12.7.31) */
	uint32_t remote_qpn;
	uint32_t remote_psn; /* first PSN sent to the peer */
	uint8_t responder_resources; /* as set in the local queue pair */
	uint8_t initiator_depth;
	uint8_t retry_count;
	uint8_t rnr_retry_count;
	uint8_t path_mtu; /* enum ibv_mtu; 0 if the carrier does not send it */

	/* Attributes of the queue pairs that rdma_get_request creates, or NULL. */
	struct ibv_qp_init_attr *request_attr;
	struct ibv_pd *request_pd;

	/* The peer's port for shared memory. It is 0 if the peer is on another host or if either
	 * side cannot use shared memory. */
	uint16_t shm_port;
	uint16_t path_port; /* identifies TCP paths to the accepting process; 0 if unknown */
	bool is_initiator;

	struct soft_node awaiting_adoption; /* node in soft_cm.awaiting_adoption */
	bool keeps_link; /* whether the handshake is over, but the id still has its link */
	struct soft_timer timewait;
};

static inline struct soft_cm_id *soft_cm_id_of(struct rdma_cm_id *id)
{
	return soft_container(id, struct soft_cm_id, id);
}

/* Returns whether the id is for a datagram service. Such an id resolves addresses but has no
 * connection. */
static inline bool soft_cm_is_datagram_id(const struct soft_cm_id *id)
{
	return id->id.qp_type == IBV_QPT_UD;
}

/* Create an id in state IDLE. The caller must add it to a channel with soft_cm_id_join. Returns
 * NULL if out of memory. */
struct soft_cm_id *soft_cm_id_new(enum rdma_port_space port_space, void *context);
/* Add the id to a channel. An id that waits for its peer is counted in the channel's
 * armed_sources. */
void soft_cm_id_join(struct soft_cm_id *id, struct soft_cm_channel *channel);
/* Remove the id from its channel. The caller must then add it to another channel with
 * soft_cm_id_join. */
void soft_cm_id_leave(struct soft_cm_id *id);
/* Set whether the id waits for the peer. As long as any id of a channel waits, the engine serves
 * the channel without delay (soft_channel.armed_sources). */
void soft_cm_id_set_awaits_peer(struct soft_cm_id *id, bool waits);

/* Cancel the id's operations, notify the peer, drop the id's events, and move the id to state
 * FAILED. The id reports no further events. If the id is a listener, the ids of its undelivered
 * requests are appended to `dropped_requests`. */
void soft_cm_id_cancel(struct soft_cm_id *id, struct soft_node *dropped_requests);
/* Cancel and free the ids of requests that the application has never seen, because their listener
 * or its channel has been destroyed. */
void soft_cm_free_dropped_requests(struct soft_node *dropped_requests);

/* Set errno to `error`. Returns -1. */
int soft_cm_fail(int error);
/* Begin an API call by acquiring the lock. Returns the id, or NULL with errno set if `application`
 * is NULL. */
struct soft_cm_id *soft_cm_enter(struct rdma_cm_id *application);
/* End an API call by releasing the lock. Returns 0, or -1 with errno set if `error` is not 0. */
int soft_cm_leave(int error);
/* Begin an API call that needs the devices, which stay open until soft_cm_leave_device. Returns the
 * id, or NULL with errno set. */
struct soft_cm_id *soft_cm_enter_device(struct rdma_cm_id *application);
int soft_cm_leave_device(int error);

/* Create an id for a request, with the options of the listener. Returns NULL if out of memory. */
struct soft_cm_id *soft_cm_request_new(struct soft_cm_id *listener);
/* Add the id to the listener's channel and to its device after the request has been reported. */
void soft_cm_request_join(struct soft_cm_id *id);

/* ---- cm_address.c -------------------------------------------------------------------------- */

/* Returns the size of an IPv4 or IPv6 socket address in bytes, or 0 for any other family. */
socklen_t soft_cm_address_length(const struct sockaddr *address);
/* Returns whether an IPv4 or IPv6 address is the wildcard. */
bool soft_cm_is_any(const struct sockaddr *address);
/* Bind an id in state IDLE to the address and reserve the port. Unless the address is the wildcard,
 * the caller must also call soft_cm_device_bind. */
int soft_cm_bind(struct soft_cm_id *id, const struct sockaddr *address);
/* Convert a bind or listen error to the error that the kernel's rdma_cm returns. EADDRINUSE becomes
 * EADDRNOTAVAIL if either of the conflicting sockets is bound to the wildcard address. Other errors
 * are returned unchanged. */
int soft_cm_port_error(const struct sockaddr *address, int type, int error);
void soft_cm_apply_tos(int fd, uint8_t tos);
/* Set the id's addresses and GIDs to those of its link. IPv4-mapped addresses are converted to
 * IPv4. */
void soft_cm_update_addresses(struct soft_cm_id *id);
/* Change IPV6_V6ONLY of a bound id by replacing its socket. Returns EIO if another process takes
 * the port in the meantime, which leaves the id unusable. */
int soft_cm_rebind(struct soft_cm_id *id, bool v6_only);

/* ---- carriers ------------------------------------------------------------------------------ */

/* A transport for connection manager messages. A carrier creates links, and reports their events
 * with soft_cm_link_received, soft_cm_link_failed and soft_cm_request_received. The state machines
 * and timers do not depend on the carrier. */
struct soft_cm_carrier {
	bool is_lossy; /* may lose, duplicate or delay messages, so links retransmit them */
	/* Open a link to the id's destination without sending anything. The carrier may take over
	 * the id's socket. Returns NULL and sets `*error` on failure. */
	struct soft_cm_link *(*connect)(struct soft_cm_id *id, int *error);
	/* Listen on the id's port. Returns NULL and sets `*error` on failure. */
	struct soft_cm_listener *(*listen)(struct soft_cm_id *id, int *error);
	void (*unlisten)(struct soft_cm_listener *listener); /* frees the listener */
	/* Send a message. Returns 0 or an errno value. After an error, the link cannot send any
	 * more messages. */
	int (*send)(struct soft_cm_link *link, const struct soft_cm_message *message);
	void (*end)(struct soft_cm_link *link); /* frees the link; no callback follows */
	/* Get the addresses of the link. An unknown address is left unchanged. */
	void (*get_addresses)(const struct soft_cm_link *link, struct sockaddr_storage *local,
			      struct sockaddr_storage *peer);
	void (*apply_tos)(struct soft_cm_link *link, uint8_t tos);
	/* Hand the stream of a connected id's link over to the queue pair, and free the link. If
	 * `qp` is NULL, stop reading until a queue pair is ready. `hand_over` is NULL if ids keep
	 * their links for DREQ. */
	int (*hand_over)(struct soft_cm_id *id, struct soft_qp *qp);
};

/* Without RoCE v2, each connection uses a TCP stream, and datagram service requests use UDP. With
 * RoCE v2, both use MADs. soft_cm_use_gsi chooses between them. */
extern const struct soft_cm_carrier soft_cm_stream; /* cm_stream.c */
extern const struct soft_cm_carrier soft_cm_sidr_client; /* cm_sidr_request.c */
extern const struct soft_cm_carrier soft_cm_sidr_server; /* cm_sidr_service.c */
extern const struct soft_cm_carrier soft_cm_gsi; /* cm_gsi.c */

void soft_cm_gsi_stop(void); /* called when the engine stops (cm_gsi.c) */

/* ---- cm_link.c ----------------------------------------------------------------------------- */

struct soft_cm_link_calls {
	/* Handle a message. Returns false if the link may have been freed. */
	bool (*message)(struct soft_cm_link *link, const struct soft_cm_message *message);
	/* Handle a failed link, for example after the peer has closed the connection or sent
	 * invalid data. ETIMEDOUT means that the deadline has passed. The callee must call
	 * soft_cm_link_leave. */
	void (*failed)(struct soft_cm_link *link, int error);
};

/* A message exchange with the peer's connection manager. Carriers embed this struct in larger
 * structs with their own data. */
struct soft_cm_link {
	const struct soft_cm_carrier *carrier;
	const struct soft_cm_link_calls *calls; /* NULL if the link has no owner */
	void *owner;
	struct soft_cm_message last_sent; /* last message sent by this side */
	struct soft_cm_message request; /* passive side: the REQ */
	struct soft_place place; /* place of a half-open, parked or lingering link */
	unsigned highest_received; /* highest message type received; 0 if none */
	struct soft_timer timer; /* for the next retransmission or the deadline */
	uint64_t deadline; /* 0 if none */
	uint64_t started_at;
	uint64_t pause_ns; /* time until the next retransmission; doubled each time */
};

void soft_cm_link_init(struct soft_cm_link *link, const struct soft_cm_carrier *carrier);
/* Stop the link's timer and release its place. Carriers call this before they free a link. */
void soft_cm_link_stop(struct soft_cm_link *link);
/* Send a message and keep a copy for retransmission. Returns 0 or an errno value. */
int soft_cm_link_send(struct soft_cm_link *link, const struct soft_cm_message *message);
/* Open a link for the id, send the first message (REQ or SIDR_REQ), and start the link's timers.
 * Returns 0 or an errno value. If the link was opened but the message could not be sent, id->link
 * is set although the call fails. */
int soft_cm_link_connect(struct soft_cm_id *id, const struct soft_cm_carrier *carrier,
			 const struct soft_cm_link_calls *calls,
			 const struct soft_cm_message *message);
/* Set the deadline for a response. On a lossy carrier, the last message is retransmitted until
 * then. */
void soft_cm_link_set_deadline(struct soft_cm_link *link, uint32_t milliseconds);
void soft_cm_link_clear_deadline(struct soft_cm_link *link);
/* Detach the owner from the link. On a lossy carrier, a link whose exchange has ended lingers to
 * respond to duplicates. Any other link is freed. */
void soft_cm_link_leave(struct soft_cm_link *link);
/* Send REJ on a link whose request has no id yet, and end the link. The link need not linger,
 * because a retransmitted REQ will be rejected again. */
void soft_cm_link_reject(struct soft_cm_link *link, uint16_t reason);
/* Assign one of `max_places` places to the link. Networks get fair shares of the places
 * (fair_share.h). Returns the link evicted to make room, or NULL. The caller must end the evicted
 * link, which is never `link`. */
struct soft_cm_link *soft_cm_link_assign_place(struct soft_cm_link *link,
					       struct soft_places *places, unsigned max_places);
/* Handle a message received by the carrier. Returns false if the link may have been freed. */
bool soft_cm_link_received(struct soft_cm_link *link, const struct soft_cm_message *message);
/* Report a failure to the link's owner, or end the link if it has no owner. */
void soft_cm_link_failed(struct soft_cm_link *link, int error);
/* Schedule another attempt after the peer has refused a request because the port has no listener.
 * Returns false if it is too late for another attempt. */
bool soft_cm_link_retry(struct soft_cm_link *link);

/* ---- cm_listen.c --------------------------------------------------------------------------- */

struct soft_cm_listener {
	const struct soft_cm_carrier *carrier;
	struct soft_cm_id *id;
	struct soft_places parked; /* requests that cannot be reported yet */
};

/* Handle a REQ received on a link that has no owner. Returns false if the link has been freed. */
bool soft_cm_request_received(struct soft_cm_listener *listener, struct soft_cm_link *link,
			      const struct soft_cm_message *request);
/* Close the id's listener, if any. Safe to call repeatedly. */
void soft_cm_listener_close(struct soft_cm_id *id);
/* Report parked requests after the application has received a request from the listener. */
void soft_cm_request_delivered(struct soft_cm_id *id);
/* Returns the maximum number of half-open handshakes. A handshake is half open until the whole REQ
 * has arrived. The same limit applies to lingering links. */
static inline unsigned soft_cm_max_half_open(void)
{
	return soft_places_limit(soft_device.cm->limits.half_open);
}

/* ---- cm_passive.c -------------------------------------------------------------------------- */

/* Create an id for the REQ in link->request, and report the request to the listener. Takes
 * ownership of the link, even on failure. */
int soft_cm_create_request(struct soft_cm_id *listener, struct soft_cm_link *link);

/* ---- cm_sidr_request.c, cm_sidr_service.c ---------------------------------------------------- */

/* Send the SIDR_REQ of a datagram id (rdma_connect(3)). */
int soft_cm_sidr_request(struct soft_cm_id *id, const struct rdma_conn_param *parameters);
/* Accept a datagram service request (rdma_accept(3)). */
int soft_cm_service_accept(struct soft_cm_id *id, const struct rdma_conn_param *parameters);
/* Reject a datagram service request (rdma_reject(3)). */
int soft_cm_service_reject(struct soft_cm_id *id, const void *private_data, uint8_t length);
/* Handle a SIDR_REQ received on a new link. Returns false if the link has been freed. */
bool soft_cm_sidr_request_received(struct soft_cm_listener *listener, struct soft_cm_link *link,
				   const struct soft_cm_message *request);

/* ---- cm_multicast.c ------------------------------------------------------------------------ */

/* Attach the queue pair to the group when the application receives the join event. The caller must
 * not hold the lock. */
int soft_cm_multicast_joined(struct soft_cm_id *id, const union ibv_gid *gid);
/* Free the id's list of groups without detaching the queue pair. */
void soft_cm_leave_groups(struct soft_cm_id *id);
/* Detach the queue pair from all groups. The queue pair cannot be destroyed while it is attached.
 * The caller must not hold the lock. */
void soft_cm_detach_groups(struct soft_cm_id *id);

/* ---- cm_endpoint.c ------------------------------------------------------------------------- */

/* If the id is synchronous (rdma_create_id(3)), wait for the event that completes the call, and
 * store the event in id->event. The caller must not hold the lock. Returns 0, or -1 with errno
 * set. */
int soft_cm_wait_if_synchronous(struct soft_cm_id *id);

/* ---- cm_qp.c ------------------------------------------------------------------------------- */

/* Check the parameters of rdma_connect or rdma_accept, which a message of this type will carry.
 * `parameters` may be NULL if the id has a queue pair. Returns 0 or EINVAL. */
int soft_cm_check_parameters(const struct soft_cm_id *id, const struct rdma_conn_param *parameters,
			     enum soft_cm_type type);
/* Returns id->qp, or NULL if the id has no queue pair or the application has destroyed the queue
 * pair with ibv_destroy_qp. */
struct ibv_qp *soft_cm_qp(const struct soft_cm_id *id);
/* Fill in the fields that REQ and REP have in common, from the id and the application's parameters.
 * `parameters` may be NULL. */
void soft_cm_fill_message(const struct soft_cm_id *id, const struct rdma_conn_param *parameters,
			  struct soft_cm_message *message);
/* Returns the number of outstanding reads and atomics to allow. This is `wanted`, or `fallback` if
 * `wanted` is RDMA_MAX_RESP_RES, but never more than the device's maximum. */
uint8_t soft_cm_depth(uint8_t wanted, uint8_t fallback);
/* Move the queue pair to INIT, and continue through RTR to RTS if it is a datagram queue pair or
 * `peer_known` is set. The caller sets `peer_known` once REQ or REP has arrived. A connected queue
 * pair is then already in INIT. Moving it to INIT again enables the remote access agreed in the
 * handshake. */
int soft_cm_qp_start(struct soft_cm_id *id, struct ibv_qp *qp, bool peer_known);
/* Fill in the address vector of the path to the peer, from the id's addresses. */
void soft_cm_fill_address_vector(const struct soft_cm_id *id, struct ibv_ah_attr *vector);
/* Move the id's queue pair, if any, to ERR. */
void soft_cm_qp_error(struct soft_cm_id *id);
uint32_t soft_cm_random_psn(void);

/* ---- cm_connection.c ----------------------------------------------------------------------- */

/* Complete the handshake and move the id to CONNECTED. If `established` is not NULL, report
 * ESTABLISHED with its parameters. If the queue pair has reached RTR, it adopts the stream
 * immediately. Otherwise, it adopts the stream when it moves to RTR. Returns ENOTCONN without
 * changing the id's state if the queue pair is in an error state (ERR or SQE). */
int soft_cm_established(struct soft_cm_id *id, const struct soft_cm_message *established);
/* Register the id after REQ or REP has provided the peer's queue pair number. When a local queue
 * pair moves to RTR with that number, it adopts the id's stream (soft_cm_handle_rtr). */
void soft_cm_await_adoption(struct soft_cm_id *id);
/* Stop the id's queue pair from connecting to the peer itself, so that it uses the id's stream once
 * the handshake is complete. A queue pair that moves to RTR connects to its peer unless
 * soft_cm_handle_rtr finds an id for it. It finds none if the application moves the queue pair to
 * RTR before it accepts the request, and the queue pair expects a different PSN. */
void soft_cm_reserve_stream(const struct soft_cm_id *id);
/* End the id's handshake after an error. Detach the id from its link, move the id to FAILED, and
 * report the event. */
void soft_cm_failed(struct soft_cm_id *id, enum rdma_cm_event_type type, int status,
		    const struct soft_cm_message *message);
/* Send REJ and leave the id's link. */
void soft_cm_reject(struct soft_cm_id *id, uint16_t reason, const void *private_data,
		    uint8_t private_data_len);
/* Detach the id from its link and its queue pair. */
void soft_cm_detach(struct soft_cm_id *id);
/* Close the connection and notify the peer, without reporting an event. */
void soft_cm_close(struct soft_cm_id *id);

/* Close the device contexts that the connection manager no longer uses (cm_device.c). The caller
 * must not hold the lock. */
void soft_cm_device_close_unused(void);
