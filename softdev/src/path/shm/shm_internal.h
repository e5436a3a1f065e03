/* Internal interface of the parts of a shared-memory peer: path.c implements the path, segment.c
 * maps the shared memory, attach.c starts and stops sharing, and wakeup.c polls rings and requests
 * notifications. */
#pragma once

#include "notify_pipe.h"
#include "shm.h"
#include "ring.h"

enum { SOFT_SHM_MAX_PEERS = 4096, SOFT_SHM_AREA = 8192 };

struct soft_shm_peer {
	struct soft_path path; /* not usable until `is_attached` is set */
	struct soft_node node;
	bool is_attached; /* whether both sides have mapped the memory */
	unsigned use_count; /* not freed while nonzero */
	bool is_self; /* whether the peer is this process */
	uint16_t port;
	pid_t pid; /* 0 if the peer's PID is not visible in this PID namespace */

	/* attach.c */
	struct soft_fd_watch socket;
	struct soft_fd_watch process; /* pidfd */
	struct soft_notify_pipe pipe;
	struct soft_timer timeout;
	struct soft_node unidentified; /* list entry until the peer sends its first message */

	/* segment.c */
	void *memory; /* mapped segment without its rings */
	/* Two areas of SOFT_SHM_AREA bytes for data outside the rings, initially zero. Both sides
	 * can write to both areas, but each side writes only to its own. If `is_self` is set, both
	 * pointers refer to the same area. NULL until the segment is mapped. */
	uint8_t *own_area, *peer_area;
	struct soft_cma *cma; /* NULL if the allocation failed */
	struct soft_ring in, out;

	/* path.c */
	unsigned last_unlock_count; /* soft_unlock_count() at the last read, if `is_self` is set */
	size_t remaining_budget; /* bytes that may be read until the next unlock */

	/* wakeup.c */
	struct soft_node poll_set;
	unsigned idle_polls; /* consecutive polls without input */
	bool may_be_notified; /* whether a notification may arrive or is still in the pipe */
};

struct soft_shm {
	/* path.c */
	struct soft_node peers;

	/* attach.c */
	struct soft_acceptor acceptor;
	uint16_t own_port;
	struct soft_node unidentified; /* unidentified peers in connection order */

	/* wakeup.c */
	struct soft_node poll_set;
	unsigned polled_count; /* number of peers in the poll set */
	bool need_notify;

	/* cma.c */
	struct soft_node cmas;
	uint64_t cma_copied_bytes; /* total bytes; copies count toward the step budget */
	uint64_t min_slow_copy_ns; /* time in ns per MiB up to which no copy counts as slow */
};

/* ---- segment.c ------------------------------------------------------------------------------ */

/* Create a segment. Returns its fd, or -1 with errno set. */
int soft_segment_make(void);
/* Check a segment that another process has created. Returns 0 or EPROTO. */
int soft_segment_check(int fd);
enum soft_segment_side { SOFT_SEGMENT_CREATOR, SOFT_SEGMENT_RECEIVER };
/* Map a segment for the peer. `side` says whether this process created the segment. The caller may
 * close `fd` afterwards. Returns 0 or an errno value. */
int soft_segment_map(struct soft_shm_peer *peer, int fd, enum soft_segment_side side);
/* Create and map a segment that this process shares with itself. Returns 0 or an errno value. */
int soft_segment_private(struct soft_shm_peer *peer);
void soft_segment_unmap(struct soft_shm_peer *peer);

/* ---- path.c --------------------------------------------------------------------------- */

/* Create a peer without rings. Returns NULL if memory is short or the limit of SOFT_SHM_MAX_PEERS
 * is reached. */
struct soft_shm_peer *soft_shm_peer_create(void);
/* End all channels of the peer, and free the peer unless it is in use. */
void soft_shm_peer_finish(struct soft_shm_peer *peer, int error);
/* Handle all records that the peer has written, then finish the peer. */
void soft_shm_peer_drain_and_finish(struct soft_shm_peer *peer);
/* Decrement `use_count`, and free a finished peer that is no longer in use. */
void soft_shm_peer_release(struct soft_shm_peer *peer);
/* Handle records of up to about `budget` bytes. Returns whether any records were available. */
bool soft_shm_peer_receive(struct soft_shm_peer *peer, size_t budget);
/* If any channels wait for room, ask the peer to notify this side when it makes room. Returns
 * whether there is already enough room for them. */
bool soft_shm_peer_request_room(struct soft_shm_peer *peer);

/* ---- attach.c ----------------------------------------------------------------------------- */

/* Start attaching to the process at `ip_port`. The arguments are those of soft_shm_path_at().
 * Returns NULL on failure. */
struct soft_shm_peer *soft_attach_begin(uint16_t ip_port, uint32_t own_port, int hca_number);
/* Acknowledge a notification by emptying the notify pipe. If the peer has closed its end of the
 * pipe, finish the peer and return false. */
bool soft_attach_ack_notify(struct soft_shm_peer *peer);
/* Initialize the descriptors of a new peer without opening any. */
void soft_attach_init(struct soft_shm_peer *peer);
/* Close the descriptors of a finished peer. */
void soft_attach_end(struct soft_shm_peer *peer);

/* ---- cma.c --------------------------------------------------------------------------------- */

/* Check whether this process can copy the peer's memory. Does nothing until the peer has sent the
 * address of its secret. */
void soft_cma_probe_peer(struct soft_shm_peer *peer);
/* Set up CMA after mapping the segment. If this fails, all data passes through the rings. */
void soft_cma_attach(struct soft_shm_peer *peer);
/* Release the peer's CMA state before the segment is unmapped. */
void soft_cma_detach(struct soft_shm_peer *peer);

/* ---- wakeup.c --------------------------------------------------------------------------- */

/* Handle the input from a peer, for example after it has sent a notification. */
void soft_wakeup_visit(struct soft_shm_peer *peer);
/* Keep polling a peer if it has sent more input or has made room for waiting channels. Otherwise,
 * arm its ring unless a thread polls it. */
void soft_wakeup_poll_or_arm(struct soft_shm_peer *peer);
/* Remove the peer from the poll set, so that no step polls its ring. Safe to repeat. */
void soft_wakeup_remove(struct soft_shm_peer *peer);
/* Handle the input from all peers in the poll set. Returns whether there was any. Implements
 * soft_subsystem.poll. */
bool soft_shm_poll(void);
/* Returns whether a ring of the poll set has input or room that a channel waits for. Implements
 * soft_subsystem.has_input. */
bool soft_shm_has_input(void);
/* Arm all rings of the poll set if `on` is set, so that their peers notify this process. Otherwise
 * disarm them, because a thread polls. Implements soft_subsystem.set_need_notify. */
void soft_shm_set_need_notify(bool on);
/* Poll all rings again after a port has come up. */
void soft_shm_resume(void);
