/* The streams of queue pairs, and what carries them.
 *
 * A link is a queue pair's stream of frames (link.c, link_input.c, link_output.c).  Below the
 * frames is a wire: a socket (tcp_wire.c) or a channel through shared memory (shm_wire.c).  Which
 * side connects, and over which wire, is in active_connect.c and handshake.c, with the CM in
 * wire_selection.c.
 */
#ifndef AIORDMA_SOFTDEV_WIRE_LINK_H
#define AIORDMA_SOFTDEV_WIRE_LINK_H

#include <sys/types.h>

#include "engine/engine.h"
#include "shm/shm.h"
#include "rc/rc.h"
#include "wire.h"

struct soft_link;

enum {
	SOFT_LINK_FRAMES = 128,
	SOFT_LINK_IOVECS = 256, /* in one `send` */
};

/* Each is called for a link that has the wire; those without a remark cannot fail. */
struct soft_wire {
	/* Take in from now on; 0 or an errno value. */
	int (*up)(struct soft_link *link);
	/* Bytes that the next `send` can take; 0: less than `least`, then `wait`. */
	size_t (*room)(struct soft_link *link, size_t least);
	/* Bytes taken of these, after the rest that it has kept; or a negative errno value.  If that
	 * ends in the middle of a frame, `keep` follows. */
	ssize_t (*send)(struct soft_link *link, struct iovec *iov, int count);
	/* Copy these bytes, the rest of that frame: 0, or an errno value.  NULL: it takes frames
	 * whole. */
	int (*keep)(struct soft_link *link, const struct iovec *iov, size_t from, size_t length);
	/* Call soft_link_writable when there is room; 0 or an errno value. */
	int (*wait)(struct soft_link *link);
	/* Everything has been sent: finishes the link now, or when the other side has ended too. */
	void (*end)(struct soft_link *link);
	enum aiordma_wire name;
	uint32_t frame_most; /* bytes of payload in one frame */
	int frames_most;     /* given to it together, at most SOFT_LINK_FRAMES */
};

struct soft_link {
	struct soft_qp_link base; /* first: soft_link_of */
	const struct soft_wire *wire;
	struct soft_fd_watch watch; /* a socket */
	/* of liveness.c */
	struct soft_timer liveness_timer;
	uint64_t liveness_limit; /* ns; 0: there is no path to be watched */
	uint64_t liveness_since; /* something has been under way */
	/* a channel */
	struct soft_shm_chan chan;
	bool heard;   /* data has come through it */
	bool refused; /* the other process refused to attach: TCP next time */
	bool to_self; /* a queue pair's that talks to itself */
	/* the other process has ended without reading this request, the earliest one */
	bool unread;
	uint32_t unread_psn;
	struct soft_shm_peer *from_peer; /* a pending link: the peer that asks for a channel, */
	uint32_t from_chan; /* and under which number */

	bool busy; /* its input is being served: it must not be freed */
	struct soft_delay_queue *delay_queue; /* delay_queue.c: NULL without a fault spec */
	struct soft_qp *qp; /* NULL: not known yet, or left behind */
	struct soft_node node;
	struct soft_timer timer; /* retry, timeout of a handshake, lingering */
	unsigned attempts;
	struct soft_place pending; /* of handshake.c */
	bool hello_valid; /* `peer_hello` has come, and is one of this protocol */
	struct soft_hello peer_hello; /* the HELLO or HELLO_ACK of the other side */

	/* input */
	uint8_t header[SOFT_HANDSHAKE_SIZE]; /* the beginning of a header or handshake */
	uint32_t header_have;
	struct soft_frame frame; /* the frame whose payload is being taken in */
	uint32_t taken;          /* of the payload */
	uint32_t left;           /* of the payload */
	uint32_t cma_bytes; /* covered by the descriptors of one record (cma_descriptor.c) */
	enum soft_sink sink;
	uint8_t small[SOFT_ATOMIC_ARGUMENTS];
	bool bulk; /* long payloads come: read their headers alone, so that they need no copy */

	/* acknowledgements that wait for company (acks.c) */
	struct soft_node delayed;
	uint64_t delayed_since;
	int replies;
	bool reply_expected;
	uint32_t unacknowledged; /* messages that completed a receive */

	/* output */
	bool ended; /* DISCONNECT has been sent */
	uint8_t *rest; /* of a frame that the socket has taken in part; or NULL */
	size_t rest_length, rest_sent;
};

/* The queue pair's, or NULL. */
static inline struct soft_link *soft_link_of(const struct soft_qp *qp)
{
	return qp->link ? soft_container(qp->link, struct soft_link, base) : NULL;
}

/* There may be something to send. */
static inline void soft_link_output(struct soft_link *link)
{
	soft_qp_link_output(&link->base);
}

/* link.c */
/* With a connected socket, or -1. */
struct soft_link *soft_link_create(int fd, enum soft_link_state state);
int soft_link_up(struct soft_link *link, struct soft_qp *qp);
/* There is another fault spec. */
void soft_links_fault_spec_changed(void);
/* The wire has ended without DISCONNECT.  The link is finished when all is taken in. */
void soft_link_lost(struct soft_link *link, int error);
/* Close the wires now, tell the queue pair, free (when it is busy, soft_link_release does that). */
void soft_link_finish(struct soft_link *link, int error);
void soft_link_close_wires(struct soft_link *link);
/* The queue pair goes without its link; that closes orderly. */
void soft_link_leave(struct soft_link *link);
/* Its input may get lost from now on; LOSES tells the other side (req_retransmit.c). */
void soft_link_loses(struct soft_link *link);
/* Send now. */
void soft_link_flush(struct soft_link *link);
/* Is output deferred to the end of the step?  Send it now. */
bool soft_link_is_due(const struct soft_link *link);
void soft_link_output_now(struct soft_link *link);
/* The wire has room again. */
void soft_link_writable(struct soft_link *link);

/* acks.c */
void soft_ack_later(struct soft_qp_link *link); /* a receive has completed */
void soft_ack_settled(struct soft_link *link); /* nothing is delayed any more */
void soft_ack_replied(struct soft_link *link); /* a request goes out */
void soft_acks_send(uint64_t age_ns); /* soft_subsystem.send_delayed */
void soft_acks_reset_after_fork(void);

/* delay_queue.c: what frames and datagrams go through before they are taken in */
void soft_delay_attach(struct soft_link *link); /* it is up, or there is another fault spec */
/* It is up no more.  True: the other side's end had come already. */
bool soft_delay_detach(struct soft_link *link);
void soft_delay_input(struct soft_link *link, const uint8_t *data, size_t length);
/* The stream has ended; true if frames are still under way, after which the link is finished. */
bool soft_delay_outlives(struct soft_link *link, int error);
void soft_delay_stop(void); /* datagrams that are under way */

/* link_input.c */
/* Bytes of the stream, however they are cut.  The link may be finished, and is then freed. */
void soft_link_take(struct soft_link *link, const uint8_t *data, size_t length);
/* For a wire that brings payload to its place itself; it sets `busy` before and releases the link
 * after. place: where the next of the payload under way belongs, at most `length` bytes, as iovecs;
 * their number, or 0. placed: so many bytes are there now. */
int soft_link_place(struct soft_link *link, uint32_t length, struct iovec *iov, int room);
void soft_link_placed(struct soft_link *link, uint32_t length);
void soft_link_parse(struct soft_link *link, const uint8_t *data, size_t length);
/* The same behind all faults. */
void soft_link_frames(struct soft_link *link, const uint8_t *data, size_t length);
void soft_link_release(struct soft_link *link);

/* link_output.c */
void soft_link_write(struct soft_link *link);
void soft_link_write_end(struct soft_link *link);

/* tcp_wire.c */
extern const struct soft_wire soft_tcp_wire;
void soft_link_over_socket(struct soft_link *link, int fd); /* the wire is that, or will be: -1 */
void soft_link_close_socket(struct soft_link *link);
/* Before it is closed: what comes in on it is not taken in, so the other side must not believe that
 * it was (peer_exit.c). */
void soft_link_reset_socket(struct soft_link *link);

/* liveness.c: a socket to another machine */
/* How long a path may be silent, in ns. */
uint64_t soft_liveness_limit(void);
/* The link is up, or its queue pair has got another timeout. */
void soft_liveness_watch(struct soft_link *link);
/* The link has sent something. */
void soft_liveness_sent(struct soft_link *link);

/* shm_wire.c */
/* Ask the process with that port for a channel; false: there is none to be had. */
bool soft_link_open_chan(struct soft_link *link, const struct soft_qp *qp, uint16_t port);
/* Give the link the channel that the pending link asks for; false: it has been refused. */
bool soft_link_accept_chan(struct soft_link *link, struct soft_link *pending_link,
			   const struct soft_qp *qp);
int soft_link_over_itself(struct soft_link *link);

/* wire_selection.c: with the CM */
/* 0 or an errno value; the link is the queue pair's. */
int soft_wire_selection_begin(struct soft_link *link, struct soft_qp *qp, uint16_t port,
			      bool opens);
bool soft_wire_selection_is_open(const struct soft_link *link); /* a channel may be asked for */
void soft_wire_selection_received(struct soft_link *link);
void soft_wire_selection_answered(struct soft_link *link); /* `peer_hello` is the answer */
void soft_wire_selection_use_tcp(struct soft_link *link, bool tell);
void soft_wire_selection_use_shm(struct soft_link *link, struct soft_link *pending_link);

/* peer_exit.c: the other process has ended, and this is what it had not read; after that, complete
 * what it had.  The link is `busy`, and may be finished. */
void soft_peer_exit_unread(struct soft_link *link, const uint8_t *bytes, size_t length);
void soft_peer_exit_shm(struct soft_link *link);
void soft_peer_exit_tcp(struct soft_link *link);

/* handshake.c: without the CM */
void soft_handshake_accepted(int fd, const struct sockaddr_storage *peer);
void soft_handshake_drop_pending(void); /* all pending links are gone */
void soft_handshake_received(struct soft_link *link);
/* Has the peer the same path MTU, as far as it has said?  Else that is told, and the queue pair will
 * get no stream. */
bool soft_handshake_mtu_fits(const struct soft_link *link, struct soft_qp *qp);
/* RTS: now both PSNs are known. */
void soft_handshake_check(struct soft_qp *qp);
/* A queue pair has become ready: is its peer waiting already? */
void soft_handshake_find_pending(struct soft_qp *qp);
void soft_handshake_write(uint8_t *at, const struct soft_qp *qp, enum soft_hello_kind kind);
bool soft_handshake_send(struct soft_link *link, const struct soft_qp *qp,
			 enum soft_hello_kind kind);
/* False if type, QP number or PSN contradict; PSNs not yet known are checked at RTS. */
bool soft_hello_matches(const struct soft_hello *hello, const struct soft_qp *qp);

/* active_connect.c */
void soft_connect_begin(struct soft_qp *qp);
void soft_connect_again(struct soft_qp *qp); /* UC: the link is gone */
void soft_connect_established(struct soft_link *link);
void soft_connect_answered(struct soft_link *link); /* `peer_hello` is the answer */
void soft_connect_later(struct soft_link *link);
/* It may take us for its peer, but we are leaving: an orderly end. */
void soft_connect_abandon(struct soft_link *link);

/* listener.c */
/* The port at which peers reach this process's queue pairs, which the first call takes; 0 and errno
 * if there is none to be had. */
uint16_t soft_listener_port(void);
/* Accept at that address of this host as well. */
void soft_listener_open(const union ibv_gid *gid);
void soft_listener_stop(void);

int soft_liveness_configure(void);

#endif
