/* Shared memory with local peers: the other processes of this host that have the device, and this
 * process itself.
 *
 * Two processes of one user attach to each other once (attach.c) and from then on share two rings
 * (ring.h).  All links between them are channels through these rings: a channel has no file
 * descriptor, only a number at each end, so that queue pairs cost memory and nothing else.  A
 * channel carries records: blocks of bytes that arrive whole, in order, or not at all.
 *
 * What comes from a peer is not trusted: a peer that breaks the format loses all of its own
 * channels and no others.  Everything here is called with the engine's lock.
 */
#ifndef AIORDMA_SOFTDEV_SHM_H
#define AIORDMA_SOFTDEV_SHM_H

#include <sys/types.h>

#include "cma.h"
#include "copy.h"
#include "objects/objects.h"

struct iovec;
struct soft_shm_peer;
struct soft_shm_chan;

/* Callbacks of a channel to its owner.  Each may end this channel or others, and free its owner. */
struct soft_shm_chan_ops {
	/* The other side has accepted what soft_shm_chan_open asked for. */
	void (*accepted)(struct soft_shm_chan *chan, const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
	/* One record, as it was written; memory that the other side can change meanwhile. */
	void (*data)(struct soft_shm_chan *chan, const uint8_t *bytes, size_t length);
	/* There was no room, and now there is.  Channels that wait are called in turns. */
	void (*writable)(struct soft_shm_chan *chan);
	/* The other side's process has gone and has not read this record, one of those that were
	 * written here.  After the last of them comes `gone`. */
	void (*unread)(struct soft_shm_chan *chan, const uint8_t *bytes, size_t length);
	/* The channel is no more; do not end it. 0: the other side has ended or refused it.
	 * ECONNRESET: its process is gone, and had read all but what `unread` was told of.
	 * ECONNREFUSED: it refused to attach.  EPROTO: it broke the format.  ENOMEM: a control
	 * record could not be queued. */
	void (*gone)(struct soft_shm_chan *chan, int error);
};

/* One end of a link's channel; zeroed, with nothing but `calls` set, it is one that is not open. */
struct soft_shm_chan {
	const struct soft_shm_chan_ops *calls;
	struct soft_shm_peer *peer; /* NULL: not open */
	uint32_t id; /* ours */
	uint32_t remote_id; /* theirs; 0 until accepted */
	struct soft_node node; /* of the peer's channels */
	struct soft_node waiting; /* for room */
	size_t least; /* that is of use to it */
	uint32_t round; /* in which it began to wait */
};

/* The peer with that port in this network namespace, attached or attaching; this process for its
 * own.  NULL: there is none, or it is of another user, or has no shared memory: there is only TCP.
 */
struct soft_shm_peer *soft_shm_peer_at(uint16_t port);
bool soft_shm_peer_is_self(const struct soft_shm_peer *peer);

/* NULL if there was no memory for it: then everything goes through the rings. */
struct soft_cma *soft_shm_peer_cma(const struct soft_shm_peer *peer);
/* Of every peer, one after the other: that after `cma`, NULL the first; NULL: no more. */
struct soft_cma *soft_cma_next(const struct soft_cma *cma);
/* A link to the peer is up, so both sides have the segment: find out what can be copied. */
void soft_cma_probe_peer(struct soft_shm_peer *peer);

/* Ask the other side for a channel.  `accepted` or `gone` follows, never at once. 0 or an errno
 * value, and then it is not open. */
int soft_shm_chan_open(struct soft_shm_chan *chan, struct soft_shm_peer *peer,
		       const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);

/* A channel that begins and ends here, open at once.  0 or an errno value. */
int soft_shm_chan_to_self(struct soft_shm_chan *chan);

/* Callbacks of a higher folder (wire) for a peer's requests; softdev.c sets them. */
struct soft_shm_acceptor {
	/* The peer asks for a channel, under its number: answer with soft_shm_chan_accept or
	 * soft_shm_peer_refuse, now or later. */
	void (*requested)(struct soft_shm_peer *peer, uint32_t remote_id,
			  const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
	/* It takes that back, or has gone (0: everything that it has asked for). */
	void (*withdrawn)(struct soft_shm_peer *peer, uint32_t remote_id);
};

void soft_shm_use(const struct soft_shm_acceptor *acceptor);
extern const struct soft_subsystem soft_shm_subsystem;

/* Let peers attach at this port; no more.  False (EADDRINUSE): its name is taken.  Should anything
 * else fail, no process can attach to this one, and links use TCP. */
bool soft_attach_listen(uint16_t port);
void soft_attach_unlisten(void);

/* 0 or an errno value, and then the other side has been refused. */
int soft_shm_chan_accept(struct soft_shm_chan *chan, struct soft_shm_peer *peer, uint32_t remote_id,
			 const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
void soft_shm_peer_refuse(struct soft_shm_peer *peer, uint32_t remote_id);

/* Bytes that one record may carry now; 0: less than `least`, and `writable` will be called (or
 * `accepted`, before which there is no room).  `least` is at most SOFT_SHM_CHAN_LEAST. */
enum {
	SOFT_SHM_CHAN_LEAST = 64 * 1024
};
size_t soft_shm_chan_room(struct soft_shm_chan *chan, size_t least);
/* There is room, but it is for others to use it first: `writable` will be called in another step.
 * Nothing when it will be called anyway. */
void soft_shm_chan_wait(struct soft_shm_chan *chan);
/* One record, copied.  At least 1 byte, at most what soft_shm_chan_room has just returned. */
void soft_shm_chan_write(struct soft_shm_chan *chan, const struct iovec *iov, int count,
			 size_t bytes);
/* Send END after all that was written, and forget the channel.  Safe to repeat. */
void soft_shm_chan_end(struct soft_shm_chan *chan);

#endif
