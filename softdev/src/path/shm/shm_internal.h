/* The inside of a peer: path.c (the path), segment.c (the shared memory), attach.c (how
 * two processes come to share it, and how they part), wakeup.c (which rings are polled, which peers
 * notify). */
#pragma once

#include "notify_pipe.h"
#include "shm.h"
#include "ring.h"

enum { SOFT_SHM_MAX_PEERS = 4096, SOFT_SHM_AREA = 8192 };

struct soft_shm_peer {
	struct soft_path path; /* it cannot be used before `up` */
	struct soft_node node;
	bool up; /* both sides have the memory */
	unsigned busy; /* it must not be freed */
	bool self; /* it is this process, with one or two of its devices */
	uint16_t port;
	pid_t pid; /* 0: not known, because it lives in another process namespace */

	/* attach.c */
	struct soft_fd_watch socket;
	struct soft_fd_watch process; /* a pidfd */
	struct soft_notify_pipe pipe;
	struct soft_timer timeout;
	struct soft_node unidentified; /* it has sent nothing yet */

	/* segment.c */
	void *memory; /* what is shared beside the rings */
	/* SOFT_SHM_AREA bytes that both can write, for what is agreed upon beside the rings: by
	 * convention we write to our own and read theirs.  Of ourselves, both are the same.  Zeros
	 * at the beginning; NULL while attaching. */
	uint8_t *own_area, *their_area;
	struct soft_cma *cma; /* cma.c; NULL if there was no memory for it */
	struct soft_ring in, out;

	/* path.c */
	unsigned turn; /* of the lock, ourselves: */
	size_t allowance; /* what may still be taken in during it */

	/* wakeup.c */
	struct soft_node poll_set;
	unsigned idle_polls; /* polls in a row that found nothing */
	bool armed; /* its ring is, and the pipe has not been emptied since */
};

struct soft_shm {
	/* path.c */
	struct soft_node peers;

	/* attach.c */
	struct soft_acceptor acceptor;
	uint16_t own_port;
	struct soft_node unidentified; /* peers, in the order in which they connected */

	/* wakeup.c */
	struct soft_node poll_set;
	unsigned polled; /* peers in it */
	bool need_notify;

	/* cma.c */
	struct soft_node cmas;
	uint64_t copied; /* bytes so far, by all: for sharing out the time of a step */
	uint64_t slow; /* nanoseconds for a MiB up to which no copy is slow */
};

/* ---- segment.c ------------------------------------------------------------------------------ */

/* Make the segment: an fd, or -1 and errno.  Check one that another process has made: 0 or EPROTO.
 * Map it, into the peer: 0 or an errno value (`made`: by us); the fd is not needed after that. */
int soft_segment_make(void);
int soft_segment_check(int fd);
int soft_segment_map(struct soft_shm_peer *peer, int fd, bool made);
/* A segment that this process shares with itself. */
int soft_segment_private(struct soft_shm_peer *peer);
void soft_segment_unmap(struct soft_shm_peer *peer);

/* ---- path.c --------------------------------------------------------------------------- */

/* One more, without rings; NULL: out of memory, or too many. */
struct soft_shm_peer *soft_shm_peer_create(void);
/* All its channels are gone; it is freed unless it is busy. */
void soft_shm_peer_finish(struct soft_shm_peer *peer, int error);
/* The same once everything has been taken in that it has written. */
void soft_shm_peer_drain_and_finish(struct soft_shm_peer *peer);
/* It is busy no more: free it if it is over. */
void soft_shm_peer_release(struct soft_shm_peer *peer);
/* Take in at most about `budget` bytes.  Was there anything? */
bool soft_shm_peer_receive(struct soft_shm_peer *peer, size_t budget);
/* Something waits for room.  Ask for it; true if there is some after all. */
bool soft_shm_peer_wants_room(struct soft_shm_peer *peer);
/* Call for each; none may end. */

/* ---- attach.c ----------------------------------------------------------------------------- */

/* Attach to the process with that port, as soft_shm_path_at; NULL: there is none that can be attached
 * to. */
struct soft_shm_peer *soft_attach_begin(uint16_t ip_port, uint32_t own_port, int hca_number);
/* Empties the notify pipe, once its cause has been seen.  False: the peer has closed its end, and is
 * finished. */
bool soft_attach_ack_notify(struct soft_shm_peer *peer);
/* One that has just been made. */
void soft_attach_init(struct soft_shm_peer *peer);
/* Close what is open, of one that is over. */
void soft_attach_end(struct soft_shm_peer *peer);

/* ---- cma.c --------------------------------------------------------------------------------- */

/* Once both sides have the segment and know the other's secret: find out what can be copied. */
void soft_cma_probe_peer(struct soft_shm_peer *peer);
/* The segment is there; or is going. */
void soft_cma_attach(struct soft_shm_peer *peer);
void soft_cma_detach(struct soft_shm_peer *peer);

/* ---- wakeup.c --------------------------------------------------------------------------- */

/* Read the ring of a peer that has notified, or of this process. */
void soft_wakeup_visit(struct soft_shm_peer *peer);
/* The peer has no room, or asks for it: poll it again if there is something now, or arm its ring.
 */
void soft_wakeup_rearm(struct soft_shm_peer *peer);
void soft_wakeup_remove(struct soft_shm_peer *peer);
/* soft_subsystem.poll, has_input, need_notify. */
bool soft_shm_poll(void);
bool soft_shm_has_input(void);
void soft_shm_need_notify(bool on);
/* Poll all rings again: the port is up. */
void soft_shm_resume(void);
