/* Paths over a TCP stream. */
#pragma once

#include "path/path.h"

enum { SOFT_TCP_RECORD_HEADER = 12 };

enum soft_tcp_state {
	SOFT_TCP_CONNECTING,
	SOFT_TCP_HELLO, /* waiting for the handshake */
	SOFT_TCP_UP,
	SOFT_TCP_CLOSING, /* sends the last bytes and then waits for the peer's end */
};

struct soft_tcp_ends {
	union ibv_gid own, peer;
	uint64_t port;
};

struct soft_tcp_path {
	struct soft_path path;
	struct soft_node node;
	struct soft_fd_watch watch;
	enum soft_tcp_state state;
	unsigned busy; /* must not be freed */
	bool connects; /* this side has connected, so it knows the peer */
	bool of_cm; /* whether the stream was created by the CM */
	uint16_t path_port; /* peer's port if this side has requested it; otherwise 0 */
	struct soft_tcp_ends ends;
	struct soft_tcp_ends names; /* addresses of the socket */
	struct soft_place place; /* while the stream has no channel */
	struct soft_timer timer; /* for connecting, the handshake and lingering */

	/* input */
	uint8_t input[SOFT_HANDSHAKE_SIZE]; /* a header or a handshake; `have` bytes are valid */
	uint32_t have;
	enum soft_record_kind kind; /* kind of the record being received */
	uint32_t left, to, from;
	bool bulk; /* whether long payloads arrive */

	uint64_t guessed_until; /* for guessed queue pair numbers (link/handshake.c) */

	/* output that the socket has not accepted */
	uint8_t *output;
	size_t output_length, output_sent, output_room;
	bool blocked; /* whether the socket is full */
	struct soft_node delayed; /* in the list of streams whose output waits for the next step */
	bool due; /* whether the next step has come */
	unsigned since; /* see soft_engine_may_gather */

	/* liveness.c */
	bool watched; /* whether the peer can disappear without a sign */
	bool stale; /* silent for too long; not used for more queue pairs */
	struct soft_timer liveness_timer;
	uint64_t liveness_limit; /* ns; the shortest limit of its links */
	uint64_t liveness_since; /* since when something has been in flight */
	uint32_t liveness_probes; /* unanswered probes of the kernel at the last check */
};

struct soft_tcp {
	struct soft_node streams;
	struct soft_places silent; /* accepted streams without a channel */
	struct soft_node delayed; /* streams with delayed output */
	uint64_t liveness_seconds; /* how long a stream may be silent */
	bool version_told; /* whether another protocol version has been reported */
};

extern const struct soft_subsystem soft_tcp_subsystem;

/* Returns NULL if the path is of another kind. */
struct soft_tcp_path *soft_tcp_path_of(const struct soft_path *path);
/* Returns a path to this port, or NULL if it cannot be reached now. */
struct soft_tcp_path *soft_tcp_path_to(const struct soft_tcp_ends *ends);
void soft_tcp_path_accepted(int fd, const struct sockaddr_storage *peer);
/* Adopt a connected socket whose ends have been introduced. Returns NULL after closing it if there
 * is no memory. */
struct soft_tcp_path *soft_tcp_path_adopt(int fd);
/* Free the path if it has ended and is no longer busy. */
void soft_tcp_path_release(struct soft_tcp_path *tcp);
/* Returns the path to the process with this port that a stream between the same addresses has
 * become, or NULL. */
struct soft_tcp_path *soft_tcp_path_beside(int fd, uint16_t path_port);
/* Returns whether the path was a CM stream from the address from which the socket comes. */
bool soft_tcp_path_is_beside(const struct soft_tcp_path *tcp, int fd);
/* Handle bytes that have already been read from the stream. */
void soft_tcp_path_take(struct soft_tcp_path *tcp, const void *bytes, size_t length);
void soft_tcp_paths_send_delayed(void);

/* ---- liveness.c: of a stream to another machine ------------------------------------------------ */

int soft_liveness_configure(void); /* implements soft_subsystem.start */
/* Returns how long a path may be silent, in ns. */
uint64_t soft_liveness_limit(void);
void soft_liveness_watch(struct soft_path *path); /* implements soft_path_calls.watch */
/* Called after the stream has sent something. */
void soft_liveness_sent(struct soft_tcp_path *tcp);
void soft_liveness_check(struct soft_timer *timer);
