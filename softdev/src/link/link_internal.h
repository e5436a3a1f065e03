/* Streams of queue pairs and their channels.
 *
 * A link is a queue pair's stream of frames (link.c, link_input.c, link_output.c). It uses a
 * channel (link_chan.c) of a path: shared-memory rings, a TCP stream, or RoCE v2. active_connect.c
 * and handshake.c decide which side connects and over which path. With the CM, selection.c makes
 * this decision.
 */
#pragma once

#include <sys/types.h>

#include "engine/engine.h"
#include "path/shm/shm.h"
#include "rc/rc.h"
#include "path/roce/roce.h"
#include "path/tcp/tcp.h"
#include "link.h"

enum {
	SOFT_MAX_LISTENING = 32, /* maximum number of addresses */
};

struct soft_link {
	struct soft_qp_link base; /* must be first (soft_link_of) */
	struct soft_chan chan;
	struct soft_fd_watch watch; /* the CM's socket while a path is selected */
	uint16_t path_port; /* port of the process that accepted the socket */
	bool is_initiator;     /* whether this side has requested the link */
	bool has_received;   /* whether data has been received */
	bool attach_refused; /* the peer's process refused to attach, so TCP is used next time */
	bool over_tcp; /* whether the current attempt uses TCP */
	bool to_self; /* whether the queue pair is its own peer */
	bool drop_traced; /* see soft_handshake_trace_drop */
	bool psn_refused; /* whether the link is closed because the first PSNs do not match */
	/* earliest request that the peer's process left unread when it ended */
	bool has_unread_request;
	uint32_t unread_psn;
	struct soft_path *request_path; /* path on which the peer requested a pending link */
	uint32_t request_chan; /* number of the requested channel */

	bool busy; /* whether input is being handled, which prevents freeing the link */
	struct soft_delay_queue *delay_queue; /* NULL without a fault spec */
	struct soft_qp *qp; /* NULL if unknown or detached */
	struct soft_node node;
	struct soft_timer timer; /* retries, handshake timeout, lingering */
	unsigned attempts; /* determines the next pause (active_connect.c) */
	struct soft_place pending; /* entry of a pending link in `pending_links` (handshake.c) */
	bool hello_valid; /* whether `peer_hello` has been received and is valid */
	struct soft_hello peer_hello; /* HELLO or HELLO_ACK of the peer */

	/* input */
	uint8_t header[SOFT_FRAME_HEADER]; /* partial input header or unsent DISCONNECT frame */
	uint32_t header_received;
	struct soft_frame frame; /* the frame whose payload is being received */
	uint32_t received; /* payload bytes received */
	uint32_t remaining; /* payload bytes missing */
	uint32_t cma_bytes; /* payload described in the current record (cma_descriptor.c) */
	enum soft_sink sink;
	uint8_t small_payload[SOFT_ATOMIC_ARGUMENTS];

	/* delayed acknowledgements (acks.c) */
	struct soft_node delayed; /* entry in soft_links_state.delayed */
	uint64_t delayed_since; /* soft_now() time */
	/* replies seen, up to a limit; negative after an acknowledgement was delayed in vain */
	int reply_score;
	bool reply_expected; /* whether no request has been sent since the peer's last message */
	uint32_t unacknowledged; /* unacknowledged messages that completed a receive */
};

/* Returns the queue pair's link, or NULL. */
static inline struct soft_link *soft_link_of(const struct soft_qp *qp)
{
	return qp->link ? soft_container(qp->link, struct soft_link, base) : NULL;
}

/* Schedule output. Called when there may be frames to send. */
static inline void soft_link_output(struct soft_link *link)
{
	soft_qp_link_output(&link->base);
}

/* State shared by all links. */
struct soft_links_state {
	struct soft_node links; /* all links (link.c) */
	bool may_use_shm; /* whether shared memory may be used */
	bool roce; /* whether links use RoCE v2, unless the CM sets them up or `to_self` is set */
	struct soft_node delayed; /* links with delayed acknowledgements, oldest first (acks.c) */
	bool (*cm_handle_rtr)(struct soft_qp *qp); /* see soft_links_use_cm */
	struct soft_places pending_links; /* pending links (handshake.c) */
	uint64_t descriptors_sent; /* descriptors sent by all links (cma_descriptor.c) */

	/* listener.c */
	int reserved; /* socket that reserves the port; -1 if none */
	uint16_t port; /* 0 if none */
	struct soft_listening {
		struct soft_acceptor acceptor;
		union ibv_gid gid;
	} listening[SOFT_MAX_LISTENING];
	int listening_count;

	/* delay_queue.c */
	uint64_t connections; /* connections since the spec was set */
	uint64_t device_free_at; /* soft_now() time at which the rate limit allows more input */
	struct soft_delay_queue *datagrams;
};

/* link.c */
/* Create a link without a queue pair and add it to the list of links. Returns NULL if there is not
 * enough memory. */
struct soft_link *soft_link_create(enum soft_link_state state);
/* Make the link the queue pair's stream, and let the queue pair start sending. The link's channel
 * is open and both sides have agreed on it. Returns 0 or an errno value. */
int soft_link_up(struct soft_link *link, struct soft_qp *qp);
/* Apply a new fault spec to all links. */
void soft_links_fault_spec_changed(void);
/* Handle a channel that ended without DISCONNECT. The link is finished after its input has been
 * handled. */
void soft_link_lost(struct soft_link *link, int error);
/* Close the channel, notify the queue pair, and free the link. If the link is busy,
 * soft_link_release() frees it. */
void soft_link_finish(struct soft_link *link, int error);
/* Close the CM's socket and end the channel, but keep the link. */
void soft_link_detach(struct soft_link *link);
/* Start an orderly close of the queue pair's link, and detach the queue pair from it. */
void soft_link_close(struct soft_qp *qp);
/* Record that the link may lose frames, and notify the peer with LOSES (req_retransmit.c). */
void soft_link_set_lossy(struct soft_link *link);
/* Write pending frames unless the path's port is down. Writes DISCONNECT on a closing link. */
void soft_link_flush(struct soft_link *link);
/* Returns whether output is deferred until the lock is released. */
bool soft_link_has_output(const struct soft_link *link);
/* Send deferred output without waiting until the lock is released. */
void soft_link_output_now(struct soft_link *link);

/* acks.c */
/* Acknowledge a message that has completed a receive. The acknowledgement is delayed if the
 * application usually replies, because its next request can then carry the acknowledgement. */
void soft_ack_delay(struct soft_qp_link *link);
/* Remove the link from the list of links with delayed acknowledgements. Safe to repeat. */
void soft_ack_cancel(struct soft_link *link);
/* Record that the application has sent a request. If it follows a message from the peer, it counts
 * as a reply and raises `reply_score`. */
void soft_ack_request_sent(struct soft_link *link);
/* Send the acknowledgements that have been delayed for at least `age_ns` because the application
 * has not replied. Implements soft_subsystem.send_delayed. */
void soft_acks_send(uint64_t age_ns);

/* delay_queue.c */
/* Create the delay queue for the datagrams of all UD queue pairs. */
void soft_delay_create(void);
/* Create the link's delay queue if the fault spec covers the link. Otherwise, stop injecting
 * faults. Called when the link comes up and when the fault spec changes. */
void soft_delay_attach(struct soft_link *link);
/* Detach the delay queue from the link. Returns whether the end of the stream has been received. */
bool soft_delay_detach(struct soft_link *link);
/* Collect stream input into frames, and pass them on when the fault spec says so. */
void soft_delay_input(struct soft_link *link, const uint8_t *data, size_t length);
/* Postpone the end of the stream until the queued frames have been handled. Returns false if none
 * are queued. */
bool soft_delay_postpone_end(struct soft_link *link, int error);
/* Drop the queued datagrams. */
void soft_delay_stop(void);

/* link_input.c */
/* Store iovecs for up to `length` bytes of the payload being received in `iov`, which has `room`
 * entries. Returns the number of iovecs, or 0 if the payload cannot be stored. The caller has set
 * `busy` and reports the bytes it stores with soft_link_payload_consumed(). */
int soft_link_map_payload(struct soft_link *link, uint32_t length, struct iovec *iov, int room);
/* Record that `length` more bytes of the payload have been stored or skipped. The last byte
 * completes the frame. */
void soft_link_payload_consumed(struct soft_link *link, uint32_t length);
/* Handle stream input, which may end in the middle of a frame. */
void soft_link_input(struct soft_link *link, const uint8_t *data, size_t length);
/* Handle stream input without injecting faults. */
void soft_link_parse_frames(struct soft_link *link, const uint8_t *data, size_t length);
/* Clear `busy`, and free the link if it was finished while busy. */
void soft_link_release(struct soft_link *link);

/* link_output.c */
/* Write pending frames to the channel in batches, until none is pending, the path has no room, or
 * other links must have a turn. */
void soft_link_write(struct soft_link *link);
/* Send DISCONNECT, end the channel and finish the link. While the path has no room, the frame stays
 * in link->header. */
void soft_link_write_end(struct soft_link *link);

/* link_chan.c */
extern const struct soft_chan_ops soft_link_chan_calls;
/* Set how long the peer's machine may be silent before the link fails. Called when the handshake
 * starts, when the link comes up, and when the queue pair's timeout is set. */
void soft_link_set_liveness_limit(struct soft_link *link);
/* Request a channel on `path`, which may be NULL. Returns false if no channel is available. */
bool soft_link_open_chan(struct soft_link *link, const struct soft_qp *qp, struct soft_path *path);
/* Accept the channel that a pending link requested, and give it to `link`. Returns false if the
 * request was refused. */
bool soft_link_accept_chan(struct soft_link *link, struct soft_link *pending_link,
			   const struct soft_qp *qp);
/* Turn the CM's socket into a TCP path, and attach the link to the path's first channel, which
 * needs no handshake. Returns 0 or an errno value. */
int soft_link_over_stream(struct soft_link *link, int fd);
/* Returns the shared-memory path between the devices of the queue pair and its peer, whose process
 * listens at `ip_port`, or NULL. */
struct soft_path *soft_link_shm_path(const struct soft_qp *qp, uint16_t ip_port);

/* selection.c: with the CM */
/* Start selecting a path. On success, the queue pair owns the link. Returns 0 or an errno value. */
int soft_selection_begin(struct soft_link *link, struct soft_qp *qp, int fd, uint16_t shm_port);
/* Returns whether this side still waits for the peer to request a channel. */
bool soft_selection_is_open(const struct soft_link *link);
/* Handle the peer's response to the requested channel, which is in `peer_hello`. */
void soft_selection_response_received(struct soft_link *link);
/* End the selection by turning the CM's socket into the link's TCP path. If `notify_peer` is set,
 * the peer learns that no channel could be opened. Otherwise, the peer already uses the socket, or
 * the link is about to be closed. */
void soft_selection_use_tcp(struct soft_link *link, bool notify_peer);
/* End the selection by accepting the channel that the peer has requested with `pending_link`. */
void soft_selection_use_chan(struct soft_link *link, struct soft_link *pending_link);

/* peer_exit.c */
/* Record the earliest request that the peer's process had not read when it ended. Called for each
 * unread record. */
void soft_peer_exit_unread(struct soft_link *link, const uint8_t *bytes, size_t length);
/* Complete the requests that the peer's process had read from shared memory when it ended. This may
 * finish the link, so the caller must set `busy` to keep it allocated. */
void soft_peer_exit_shm(struct soft_link *link);
/* Complete the requests that the peer's process had read from a TCP stream when it ended. The
 * peer's kernel has not confirmed the last `missing` bytes. This may finish the link, so the caller
 * must set `busy` to keep it allocated. */
void soft_peer_exit_tcp(struct soft_link *link, uint64_t missing);

/* handshake.c: without the CM */
/* Check that the peer's path MTU is unknown or equal to the queue pair's. Otherwise, report the
 * error, let the queue pair's requests fail as if the peer did not respond, and return false. */
bool soft_handshake_check_mtu(struct soft_link *link, struct soft_qp *qp);
/* Check that the peer expects the queue pair's first send PSN, which is not known before RTS.
 * Closes the link if the peer expects a different PSN. */
void soft_handshake_check_psn(struct soft_qp *qp);
/* Accept a pending link from the peer of a queue pair that has become ready. Returns whether one
 * was accepted. */
bool soft_handshake_accept_pending(struct soft_qp *qp);
/* Encode a HELLO or HELLO_ACK of the queue pair to `at`. */
void soft_handshake_write(uint8_t *at, const struct soft_qp *qp, enum soft_hello_kind kind);
/* Returns whether the HELLO has the expected type, queue pair numbers and PSNs. A PSN that is still
 * unknown is checked in RTS. */
bool soft_hello_matches(const struct soft_hello *hello, const struct soft_qp *qp);
/* Returns the trace reason why the HELLO does not come from the queue pair's peer, or NULL if it
 * does. */
const char *soft_hello_mismatch(const struct soft_hello *hello, const struct soft_qp *qp);
/* Trace once per link that its handshake was dropped, with the reason. `qp` may be NULL. */
void soft_handshake_trace_drop(struct soft_link *link, const struct soft_qp *qp,
			       const char *reason);

/* active_connect.c */
/* Start connecting a queue pair that has entered RTR. Returns an errno value if a connection
 * without a handshake fails. Other failures are treated like an unreachable peer, so requests fail
 * later. */
int soft_connect_begin(struct soft_qp *qp);
/* Returns whether this side of a connection without the CM connects first. Both sides compare the
 * queue pair numbers, or the GIDs if the numbers are equal, so they agree on the answer. */
bool soft_connects_first(const struct soft_qp *qp);
/* Reconnect a UC queue pair whose link is gone. This begins with a pause, so that two sides whose
 * connections keep failing do not reconnect in a tight loop. The peer may connect first, during the
 * pause. */
void soft_reconnect(struct soft_qp *qp);
/* Handle the peer's response to a HELLO, which is in `peer_hello`. Brings the link up if the
 * response comes from the queue pair's peer. */
void soft_connect_response_received(struct soft_link *link);
/* End a failed attempt to connect, and make the next one after a pause. */
void soft_connect_retry_later(struct soft_link *link);

/* listener.c */
/* Returns the port at which peers reach this process's queue pairs. The first call binds the port.
 * Returns 0 and sets errno if no port can be bound. */
uint16_t soft_listener_port(void);
/* Listen at another address of this host. */
void soft_listener_open(const union ibv_gid *gid);
/* Stop listening and release the port. */
void soft_listener_stop(void);
