/* The parts of a peer: path.c (the path), segment.c (the shared memory), attach.c (start and end of
 * sharing), wakeup.c (which rings are polled, and which peers notify). */
#pragma once

#include "notify_pipe.h"
#include "shm.h"
#include "ring.h"

enum { SOFT_SHM_MAX_PEERS = 4096, SOFT_SHM_AREA = 8192 };

struct soft_shm_peer {
	struct soft_path path; /* unusable before `up` */
	struct soft_node node;
	bool up; /* whether both sides have the memory */
	unsigned busy; /* must not be freed */
	bool self; /* whether it is this process, with one or two of its devices */
	uint16_t port;
	pid_t pid; /* 0 if unknown because it lives in another PID namespace */

	/* attach.c */
	struct soft_fd_watch socket;
	struct soft_fd_watch process; /* a pidfd */
	struct soft_notify_pipe pipe;
	struct soft_timer timeout;
	struct soft_node unidentified; /* for peers that have not sent anything yet */

	/* segment.c */
	void *memory; /* shared memory except the rings */
	/* SOFT_SHM_AREA bytes for data outside of the rings, initially zeros. Both sides can write
	 * to both, but each writes only to its own. Both are the same for this process. NULL while
	 * attaching. */
	uint8_t *own_area, *their_area;
	struct soft_cma *cma; /* NULL if there was no memory for it */
	struct soft_ring in, out;

	/* path.c */
	unsigned turn; /* for this process: last turn of the lock */
	size_t allowance; /* bytes that may still be read in that turn */

	/* wakeup.c */
	struct soft_node poll_set;
	unsigned idle_polls; /* consecutive polls that found nothing */
	bool armed; /* its ring was armed, and the pipe has not been emptied since */
};

struct soft_shm {
	/* path.c */
	struct soft_node peers;

	/* attach.c */
	struct soft_acceptor acceptor;
	uint16_t own_port;
	struct soft_node unidentified; /* peers in the order in which they connected */

	/* wakeup.c */
	struct soft_node poll_set;
	unsigned polled; /* number of peers in the poll set */
	bool need_notify;

	/* cma.c */
	struct soft_node cmas;
	uint64_t copied; /* bytes copied so far, for sharing the time of a step */
	uint64_t slow; /* ns per MiB below which no copy is slow */
};

/* ---- segment.c ------------------------------------------------------------------------------ */

/* Create a segment: returns an fd, or -1 and sets errno. Check a segment created by another
 * process: returns 0 or EPROTO. Map a segment into the peer (`made` if created by us): returns 0 or
 * an errno value, and the fd is not needed afterwards. */
int soft_segment_make(void);
int soft_segment_check(int fd);
int soft_segment_map(struct soft_shm_peer *peer, int fd, bool made);
/* Create a segment that this process shares with itself. */
int soft_segment_private(struct soft_shm_peer *peer);
void soft_segment_unmap(struct soft_shm_peer *peer);

/* ---- path.c --------------------------------------------------------------------------- */

/* Create a peer without rings. Returns NULL if there are too many, or no memory. */
struct soft_shm_peer *soft_shm_peer_create(void);
/* End all channels, and free the peer unless it is busy. */
void soft_shm_peer_finish(struct soft_shm_peer *peer, int error);
/* Finish the peer after handling everything that it has written. */
void soft_shm_peer_drain_and_finish(struct soft_shm_peer *peer);
/* Free the peer if it has ended and is no longer busy. */
void soft_shm_peer_release(struct soft_shm_peer *peer);
/* Handle about `budget` bytes at most. Returns whether there was anything. */
bool soft_shm_peer_receive(struct soft_shm_peer *peer, size_t budget);
/* Request room for what waits. Returns true if there is some already. */
bool soft_shm_peer_wants_room(struct soft_shm_peer *peer);
/* Iterate over peers, none of which may end. */

/* ---- attach.c ----------------------------------------------------------------------------- */

/* Attach to the process with this port (see soft_shm_path_at). Returns NULL if that is not
 * possible. */
struct soft_shm_peer *soft_attach_begin(uint16_t ip_port, uint32_t own_port, int hca_number);
/* Empty the notify pipe when the cause of a notification has been seen. Returns false if the peer
 * has closed its end and is finished. */
bool soft_attach_ack_notify(struct soft_shm_peer *peer);
/* Initialize a new peer. */
void soft_attach_init(struct soft_shm_peer *peer);
/* Close the descriptors of a peer that has ended. */
void soft_attach_end(struct soft_shm_peer *peer);

/* ---- cma.c --------------------------------------------------------------------------------- */

/* Find out what can be copied, when both sides have the segment and know the other's secret. */
void soft_cma_probe_peer(struct soft_shm_peer *peer);
/* Called when the segment has been mapped, and before it is unmapped. */
void soft_cma_attach(struct soft_shm_peer *peer);
void soft_cma_detach(struct soft_shm_peer *peer);

/* ---- wakeup.c --------------------------------------------------------------------------- */

/* Read the ring of a peer that has notified, or of this process. */
void soft_wakeup_visit(struct soft_shm_peer *peer);
/* The peer has no room, or requests it: poll it again if there is input now, or arm its ring. */
void soft_wakeup_rearm(struct soft_shm_peer *peer);
void soft_wakeup_remove(struct soft_shm_peer *peer);
/* implement soft_subsystem.poll, has_input and need_notify */
bool soft_shm_poll(void);
bool soft_shm_has_input(void);
void soft_shm_need_notify(bool on);
/* Poll all rings again because the port is up. */
void soft_shm_resume(void);
