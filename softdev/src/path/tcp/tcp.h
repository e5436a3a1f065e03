/* Paths over a TCP stream. */
#pragma once

#include "path/path.h"

enum { SOFT_TCP_RECORD_HEADER = 12 };

enum soft_tcp_state {
	SOFT_TCP_CONNECTING,
	SOFT_TCP_HELLO, /* waiting for the handshake */
	SOFT_TCP_UP,
	SOFT_TCP_CLOSING, /* sending the last bytes, then waiting for the peer to close */
};

struct soft_tcp_addresses {
	union ibv_gid own, peer;
	uint64_t port;
};

struct soft_tcp_path {
	struct soft_path path;
	struct soft_node node;
	struct soft_fd_watch watch;
	enum soft_tcp_state state;
	unsigned use_count; /* not freed while nonzero */
	bool is_initiator; /* whether this side chose the peer and opened the connection */
	bool created_by_cm; /* whether the connection manager created the stream */
	uint16_t path_port; /* peer's port if this side opens channels on a CM stream, else 0 */
	/* argument of soft_tcp_path_to(), if `is_initiator` is set */
	struct soft_tcp_addresses requested_addresses;
	struct soft_tcp_addresses socket_addresses; /* addresses reported by the socket */
	struct soft_place place; /* used while the stream has no channel */
	/* timeout for connecting, the handshake, the first channel and closing */
	struct soft_timer timer;

	/* input */
	uint8_t input
		[SOFT_HANDSHAKE_SIZE]; /* first `input_length` bytes of a handshake or record header */
	uint32_t input_length;
	/* the record being received; `remaining` is the number of missing payload bytes */
	enum soft_record_kind kind;
	uint32_t remaining, to, from;
	bool receiving_bulk; /* whether long payloads are arriving */

	/* soft_now() time at which the cost of the peer's wrong guesses so far is paid off
	 * (link/handshake.c) */
	uint64_t guesses_paid_at;

	/* output not yet accepted by the socket */
	uint8_t *output;
	size_t output_length, output_sent, output_capacity;
	bool blocked; /* whether the socket's send buffer is full */
	struct soft_node delayed; /* list entry while output waits for the next step */
	bool must_flush; /* whether delayed output must be sent now */
	unsigned last_step_unlocks; /* see soft_engine_may_delay_output */

	/* liveness.c */
	bool needs_liveness_checks; /* whether the peer can disappear without closing the stream */
	bool stale; /* silent for too long to be used for new channels */
	struct soft_timer liveness_timer;
	uint64_t liveness_limit_ns; /* lowest `silence_limit_ns` of its channels in ns; 0 if none */
	uint64_t silence_start_ns; /* time from which silence counts */
	uint32_t unanswered_probes; /* number of unanswered kernel probes at the last check */
};

struct soft_tcp {
	struct soft_node streams;
	struct soft_places unverified_streams; /* accepted streams without a channel */
	struct soft_node delayed; /* streams with delayed output */
	uint64_t liveness_seconds; /* time limit in seconds for a silent stream */
	bool version_reported; /* whether a version mismatch has been reported */
};

extern const struct soft_subsystem soft_tcp_subsystem;

/* Returns the TCP path that contains `path`, or NULL if `path` is of another kind. */
struct soft_tcp_path *soft_tcp_path_of(const struct soft_path *path);
/* Find a path to `ends`, or open a new connection if none exists. Returns NULL on failure. */
struct soft_tcp_path *soft_tcp_path_to(const struct soft_tcp_addresses *ends);
/* Create a path over an accepted socket, and wait for the handshake. The peer is not verified yet,
 * so the number of these paths is limited, and another one may be closed. */
void soft_tcp_path_accepted(int fd, const struct sockaddr_storage *peer);
/* Create a path over a socket that the connection manager has connected, taking ownership of `fd`.
 * Returns NULL, with `fd` closed, if there is not enough memory. */
struct soft_tcp_path *soft_tcp_path_adopt(int fd);
/* Decrement `use_count`, and free a finished path that is no longer in use. */
void soft_tcp_path_release(struct soft_tcp_path *tcp);
/* Find a path that was created from a CM stream to port `path_port` and connects the same addresses
 * as the socket. Returns NULL if none exists. */
struct soft_tcp_path *soft_tcp_path_find_shared(int fd, uint16_t path_port);
/* Returns whether the path connects the same two addresses as the socket. */
bool soft_tcp_path_has_addresses_of(const struct soft_tcp_path *tcp, int fd);
/* Handle bytes that the caller has already read from the stream. */
void soft_tcp_path_input(struct soft_tcp_path *tcp, const void *bytes, size_t length);
/* Send the output of all paths that delay it. The data is written when the lock is released. */
void soft_tcp_paths_send_delayed(void);

/* ---- liveness.c: streams to another machine ---------------------------------------------- */

/* Read the time limit for silent streams from the environment. Implements soft_subsystem.start. */
int soft_liveness_configure(void);
/* Returns the default time in ns for which the peer of a path may be silent. */
uint64_t soft_liveness_limit(void);
/* Apply the lowest limit of the stream's channels to its liveness checks. Implements
 * soft_path_calls.silence_limit_changed. */
void soft_liveness_update(struct soft_path *path);
/* Start the liveness timer after the stream has sent data. */
void soft_liveness_sent(struct soft_tcp_path *tcp);
/* Fail all channels whose peer has been silent for too long while data is in flight. Any segment
 * from the peer, such as a response to a probe, ends the silence. */
void soft_liveness_check(struct soft_timer *timer);
