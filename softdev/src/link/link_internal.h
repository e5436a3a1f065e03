/* The streams of queue pairs, and what carries them.
 *
 * A link is a queue pair's stream of frames (link.c, link_input.c, link_output.c), in a channel of a
 * path (link_chan.c): of rings, a TCP stream or RoCE v2.  Which side
 * connects, and over which path, is in active_connect.c and handshake.c, with the CM in
 * selection.c.
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
	SOFT_LISTENING_MOST = 32, /* addresses */
};

struct soft_link {
	struct soft_qp_link base; /* first: soft_link_of */
	struct soft_chan chan;
	struct soft_fd_watch watch; /* the socket of the CM, while a path is selected, and */
	uint16_t path_port; /* the process that has accepted it */
	bool opens;     /* this side has asked for it */
	bool heard;   /* data has come through it */
	bool refused; /* the other process refused to attach: TCP next time */
	bool over_tcp; /* this time */
	bool to_self; /* a queue pair's that talks to itself */
	bool drop_traced; /* soft_handshake_dropped */
	bool psn_refused; /* this side leaves because the peer expects another PSN */
	/* the other process has ended without reading this request, the earliest one */
	bool unread;
	uint32_t unread_psn;
	struct soft_path *from_path; /* a pending link: on which a channel is asked for, */
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
	uint8_t header[SOFT_FRAME_HEADER]; /* its beginning; the last one that goes out */
	uint32_t header_have;
	struct soft_frame frame; /* the frame whose payload is being taken in */
	uint32_t taken;          /* of the payload */
	uint32_t left;           /* of the payload */
	uint32_t cma_bytes; /* covered by the descriptors of one record (cma_descriptor.c) */
	enum soft_sink sink;
	uint8_t small[SOFT_ATOMIC_ARGUMENTS];

	/* acknowledgements that wait for company (acks.c) */
	struct soft_node delayed;
	uint64_t delayed_since;
	int replies;
	bool reply_expected;
	uint32_t unacknowledged; /* messages that completed a receive */
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

/* The state of links between queue pairs. */
struct soft_links_state {
	struct soft_node links; /* link.c: all of them */
	bool may_use_shm; /* where that is possible */
	bool roce; /* and nothing else, but with the CM and from a queue pair to itself */
	struct soft_node delayed; /* acks.c: the longest delayed first */
	bool (*cm_offer)(struct soft_qp *qp); /* soft_links_use_cm */
	struct soft_places held; /* handshake.c: pending links */
	uint64_t descriptors_sent; /* cma_descriptor.c: so far, by all */

	/* listener.c */
	int reserved; /* -1: none */
	uint16_t port; /* 0: none */
	struct soft_listening {
		struct soft_acceptor acceptor;
		union ibv_gid gid;
	} listening[SOFT_LISTENING_MOST];
	int listening_count;

	/* delay_queue.c */
	uint64_t connections;    /* since there is a spec */
	uint64_t device_free_at; /* with a rate: when it has taken in all that came before */
	struct soft_delay_queue *datagrams;
};

/* link.c */
struct soft_link *soft_link_create(enum soft_link_state state);
int soft_link_up(struct soft_link *link, struct soft_qp *qp);
/* There is another fault spec. */
void soft_links_fault_spec_changed(void);
/* The path has ended without DISCONNECT.  The link is finished when all is taken in. */
void soft_link_lost(struct soft_link *link, int error);
/* Close what carries it now, tell the queue pair, free (when it is busy, soft_link_release does that). */
void soft_link_finish(struct soft_link *link, int error);
void soft_link_detach(struct soft_link *link);
/* The queue pair goes without its link; that closes orderly. */
void soft_link_leave(struct soft_qp *qp);
/* Its input may get lost from now on; LOSES tells the other side (req_retransmit.c). */
void soft_link_loses(struct soft_link *link);
/* Send now. */
void soft_link_flush(struct soft_link *link);
/* Is output deferred to the end of the step?  Send it now. */
bool soft_link_is_due(const struct soft_link *link);
void soft_link_output_now(struct soft_link *link);

/* acks.c */
void soft_ack_later(struct soft_qp_link *link); /* a receive has completed */
void soft_ack_settled(struct soft_link *link); /* nothing is delayed any more */
void soft_ack_replied(struct soft_link *link); /* a request goes out */
void soft_acks_send(uint64_t age_ns); /* soft_subsystem.send_delayed */

/* delay_queue.c: what frames and datagrams go through before they are taken in */
void soft_delay_create(void);
void soft_delay_attach(struct soft_link *link); /* it is up, or there is another fault spec */
/* It is up no more.  True: the other side's end had come already. */
bool soft_delay_detach(struct soft_link *link);
void soft_delay_input(struct soft_link *link, const uint8_t *data, size_t length);
/* The stream has ended; true if frames are still under way, after which the link is finished. */
bool soft_delay_outlives(struct soft_link *link, int error);
void soft_delay_stop(void); /* datagrams that are under way */

/* link_input.c */
/* place: where the next of the payload under way belongs, at most `length` bytes, as iovecs; their
 * number, or 0. placed: so many bytes are there now.  The link is `busy`. */
int soft_link_place(struct soft_link *link, uint32_t length, struct iovec *iov, int room);
void soft_link_placed(struct soft_link *link, uint32_t length);
/* Bytes of the stream, however they are cut. */
void soft_link_parse(struct soft_link *link, const uint8_t *data, size_t length);
/* The same behind all faults. */
void soft_link_frames(struct soft_link *link, const uint8_t *data, size_t length);
void soft_link_release(struct soft_link *link);

/* link_output.c */
void soft_link_write(struct soft_link *link);
void soft_link_write_end(struct soft_link *link);

/* link_chan.c */
extern const struct soft_chan_ops soft_link_chan_calls;
/* The link is up or being introduced, or its queue pair has got another timeout: how long it bears
 * that its peer's machine is silent. */
void soft_link_watch(struct soft_link *link);
/* Ask for a channel of that path; false: there is none to be had. */
bool soft_link_open_chan(struct soft_link *link, const struct soft_qp *qp, struct soft_path *path);
/* Give the link the channel that the pending link asks for; false: it has been refused. */
bool soft_link_accept_chan(struct soft_link *link, struct soft_link *pending_link,
			   const struct soft_qp *qp);
/* The only channel of a stream whose ends have been introduced: 0 or an errno value. */
int soft_link_over_stream(struct soft_link *link, int fd);
/* Between the queue pair's device and its peer's, in the process at that port; or NULL. */
struct soft_path *soft_link_shm_path(const struct soft_qp *qp, uint16_t ip_port);

/* selection.c: with the CM */
/* 0 or an errno value; the link is the queue pair's. */
int soft_selection_begin(struct soft_link *link, struct soft_qp *qp, int fd, uint16_t shm_port);
bool soft_selection_is_open(const struct soft_link *link); /* a channel may be asked for */
void soft_selection_answered(struct soft_link *link); /* `peer_hello` is the answer */
void soft_selection_use_tcp(struct soft_link *link, bool tell);
void soft_selection_use_chan(struct soft_link *link, struct soft_link *pending_link);

/* peer_exit.c: the other process has ended, and this is what it had not read; after that, complete
 * what it had.  The link is `busy`, and may be finished. */
void soft_peer_exit_unread(struct soft_link *link, const uint8_t *bytes, size_t length);
void soft_peer_exit_shm(struct soft_link *link);
void soft_peer_exit_tcp(struct soft_link *link, uint64_t missing);

/* handshake.c: without the CM */
/* Has the peer the same path MTU, as far as it has said?  Else that is told, and the queue pair will
 * get no stream. */
bool soft_handshake_mtu_fits(struct soft_link *link, struct soft_qp *qp);
/* RTS: now both PSNs are known. */
void soft_handshake_check(struct soft_qp *qp);
/* A queue pair has become ready: is its peer waiting already? */
bool soft_handshake_find_pending(struct soft_qp *qp);
void soft_handshake_write(uint8_t *at, const struct soft_qp *qp, enum soft_hello_kind kind);
/* False if type, QP number or PSN contradict; PSNs not yet known are checked at RTS. */
bool soft_hello_matches(const struct soft_hello *hello, const struct soft_qp *qp);
/* Returns why the handshake is not that of the queue pair's peer, as the trace names it, or NULL. */
const char *soft_hello_objection(const struct soft_hello *hello, const struct soft_qp *qp);
/* Trace, once for each link, that its handshake with that queue pair or NULL is dropped, and why. */
void soft_handshake_dropped(struct soft_link *link, const struct soft_qp *qp, const char *reason);

/* active_connect.c */
int soft_connect_begin(struct soft_qp *qp); /* 0 or an errno value */
bool soft_connects_first(const struct soft_qp *qp);
void soft_connect_again(struct soft_qp *qp); /* UC: the link is gone */
void soft_connect_answered(struct soft_link *link); /* `peer_hello` is the answer */
void soft_connect_later(struct soft_link *link);

/* listener.c */
/* The port at which peers reach this process's queue pairs, which the first call takes; 0 and errno
 * if there is none to be had. */
uint16_t soft_listener_port(void);
/* Accept at that address of this host as well. */
void soft_listener_open(const union ibv_gid *gid);
void soft_listener_stop(void);
