/* The path that is a TCP stream. */
#pragma once

#include "path/path.h"

enum { SOFT_TCP_RECORD_HEADER = 12 };

enum soft_tcp_state {
	SOFT_TCP_CONNECTING,
	SOFT_TCP_HELLO, /* it is awaited */
	SOFT_TCP_UP,
	SOFT_TCP_CLOSING, /* the last bytes go out, then it waits for the other side's end */
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
	unsigned busy; /* it must not be freed */
	bool connects; /* this side does: so it knows where it leads */
	bool of_cm; /* it was the CM's stream, */
	uint16_t path_port; /* to that process, asked for by this side; or 0 */
	struct soft_tcp_ends ends;
	struct soft_tcp_ends names; /* of the socket */
	struct soft_place place; /* as long as it has no channel */
	struct soft_timer timer; /* of connecting, the handshake, lingering */

	/* input */
	uint8_t input[SOFT_HANDSHAKE_SIZE]; /* of a header or a handshake, so much: */
	uint32_t have;
	enum soft_record_kind kind; /* of the record that comes in */
	uint32_t left, to, from;
	bool bulk; /* long payloads come */

	uint64_t
		guessed_until; /* link/handshake.c: numbers of queue pairs that expect no such peer */

	/* output that the socket has not taken */
	uint8_t *output;
	size_t output_length, output_sent, output_room;
	bool blocked; /* it takes no more */
	struct soft_node delayed; /* what is gathered goes out with the next step */
	bool due; /* that is now */
	unsigned since; /* soft_engine_may_gather */

	/* liveness.c */
	bool watched; /* it can be lost without a sign */
	bool stale; /* it has been silent for too long: for no more queue pairs */
	struct soft_timer liveness_timer;
	uint64_t liveness_limit; /* ns: the shortest of its links */
	uint64_t liveness_since; /* something has been under way */
	uint32_t liveness_probes; /* of the kernel's, unanswered at the latest check */
};

struct soft_tcp {
	struct soft_node streams;
	struct soft_places silent; /* of those that have come and have no channel */
	struct soft_node delayed; /* whose output is */
	uint64_t liveness_seconds; /* how long one may be silent */
	bool version_told; /* a peer has another one */
};

extern const struct soft_subsystem soft_tcp_subsystem;

/* NULL: it is another path. */
struct soft_tcp_path *soft_tcp_path_of(const struct soft_path *path);
/* To that port; NULL: it cannot be reached now. */
struct soft_tcp_path *soft_tcp_path_to(const struct soft_tcp_ends *ends);
void soft_tcp_path_accepted(int fd, const struct sockaddr_storage *peer);
/* A connected socket, whose two ends have been introduced.  NULL: no memory; it has been closed. */
struct soft_tcp_path *soft_tcp_path_adopt(int fd);
/* It is busy no more: free it if it is over. */
void soft_tcp_path_release(struct soft_tcp_path *tcp);
/* The one that a stream between the same addresses has become, to a process with that port; or NULL. */
struct soft_tcp_path *soft_tcp_path_beside(int fd, uint16_t path_port);
/* Was it a stream of the CM from the address from which that socket comes? */
bool soft_tcp_path_is_beside(const struct soft_tcp_path *tcp, int fd);
/* What has been read of it already. */
void soft_tcp_path_take(struct soft_tcp_path *tcp, const void *bytes, size_t length);
void soft_tcp_paths_send_delayed(void);

/* ---- liveness.c: of a stream to another machine ------------------------------------------------ */

int soft_liveness_configure(void); /* of soft_subsystem */
/* How long a path may be silent, in ns. */
uint64_t soft_liveness_limit(void);
void soft_liveness_watch(struct soft_path *path); /* of soft_path_calls */
/* The stream has sent something. */
void soft_liveness_sent(struct soft_tcp_path *tcp);
void soft_liveness_check(struct soft_timer *timer);
