/* The inside of a local peer, for the rooms that make it: peer.c (channels and records), segment.c
 * (what is shared), attach.c (how two processes come to share it, and how they part), wakeup.c
 * (who looks into which ring, and who is woken). */
#ifndef AIORDMA_SOFT_MEETING_H
#define AIORDMA_SOFT_MEETING_H

#include "notify_pipe.h"
#include "shm.h"
#include "ring.h"

enum {
	SOFT_SHM_MAX_PEERS = 4096,
};

struct soft_shm_peer {
	struct soft_node node;
	bool up;       /* both sides have the memory */
	bool dead;
	bool broken; /* it has written nonsense, and will be ended when the lock is given back */
	unsigned busy; /* it must not be freed */
	uint16_t lid;
	pid_t pid;

	/* attach.c */
	struct soft_fd_watch socket;
	struct soft_fd_watch process; /* a pidfd */
	struct soft_notify_pipe pipe;
	struct soft_timer patience;
	struct soft_node stranger; /* it has said nothing yet */

	/* segment.c */
	void *memory; /* what is shared beside the rings */
	uint8_t *own_area, *their_area;
	struct soft_cma *cma; /* cma_descriptor.c; NULL if there was no memory for it */
	struct soft_ring in, out;

	/* peer.c */
	struct soft_node chans;
	struct soft_node waiting; /* channels that wait for room */
	uint32_t round; /* of offering it */
	struct soft_deferred flush; /* something was written */
	unsigned turn; /* of the lock, ourselves: */
	size_t allowance; /* what may still be taken in during it */
	struct soft_ctrl_record *ctrl_records; /* records other than data that found no room */
	uint32_t ctrl_count, ctrl_room;

	/* wakeup.c */
	struct soft_node poll_set;
	unsigned idle_polls; /* looks in a row that found nothing */
	bool armed; /* to ring, and its bell has not been heard */
};

/* ---- segment.c ------------------------------------------------------------------------------ */

/* Make the shared memory: an fd, or -1 and errno; look at that which somebody else has made: 0 or
 * EPROTO; map it, into the local peer: 0 or an errno value (`made`: by us).  The fd is not needed
 * after that. */
int soft_segment_make(void);
int soft_segment_check(int fd);
int soft_segment_map(struct soft_shm_peer *peer, int fd, bool made);
/* What we share with ourselves. */
int soft_segment_private(struct soft_shm_peer *peer);
void soft_segment_unmap(struct soft_shm_peer *peer);

/* ---- peer.c --------------------------------------------------------------------------- */

/* One more, without rings; NULL: out of memory, or too many. */
struct soft_shm_peer *soft_shm_peer_create(void);
/* All its channels are gone; it is freed when nobody is busy with it any more. */
void soft_shm_peer_finish(struct soft_shm_peer *peer, int error);
/* The same once everything has been taken in that it has written. */
void soft_shm_peer_drain_and_finish(struct soft_shm_peer *peer);
void soft_shm_peer_hold(struct soft_shm_peer *peer);
void soft_shm_peer_release(struct soft_shm_peer *peer);
/* Take in at most about `budget` bytes.  Was there anything? */
bool soft_shm_peer_receive(struct soft_shm_peer *peer, size_t budget);
/* There may be room for what waits for it. */
void soft_shm_peer_offer_room(struct soft_shm_peer *peer);
/* Something waits for room.  Ask for it; true if there is some after all. */
bool soft_shm_peer_wants_room(struct soft_shm_peer *peer);
/* Call for each; it may end that one. */
void soft_shm_each_peer(void (*what)(struct soft_shm_peer *peer));

/* ---- attach.c ----------------------------------------------------------------------------- */

/* Go and meet whoever has that LID; NULL: nobody that could be met. */
struct soft_shm_peer *soft_attach_begin(uint16_t lid);
/* Wake it. */
void soft_attach_notify(struct soft_shm_peer *peer);
/* What it rings for has been seen: hear its bell now, if it is there yet.  It may end that one. */
void soft_attach_ack_notify(struct soft_shm_peer *peer);
/* One that has just been made. */
void soft_attach_init(struct soft_shm_peer *peer);
/* Close what is open, of one that is over. */
void soft_attach_end(struct soft_shm_peer *peer);
void soft_attach_reset_after_fork(void);

/* ---- cma.c --------------------------------------------------------------------------------- */

/* The segment is there; or is going. */
void soft_cma_attach(struct soft_shm_peer *peer);
void soft_cma_detach(struct soft_shm_peer *peer);

/* ---- wakeup.c --------------------------------------------------------------------------- */

/* Look into the ring of one that has rung, or of ourselves. */
void soft_wakeup_visit(struct soft_shm_peer *peer);
/* It has no room, or asks for it: somebody must come by again if there is something now. */
void soft_wakeup_rearm(struct soft_shm_peer *peer);
void soft_wakeup_remove(struct soft_shm_peer *peer);
/* soft_subsystem.poll, has_input, need_notify. */
bool soft_shm_poll(void);
bool soft_shm_has_input(void);
void soft_shm_need_notify(bool on);
/* Look into all rings again: the port is up. */
void soft_shm_resume(void);

#endif
