/* Paths: what joins this process with another one, and carries the frames of many queue pairs.
 *
 * A path is of one kind, with a folder here: the two rings that processes of one host share (shm/), a TCP
 * stream (tcp/), or the packets of RoCE v2 (roce/), for which sim/ is a network too.  It takes records from the
 * channels of queue pairs, and gives them what comes.  The first two join two processes, and each record
 * arrives whole, in order, or not at all.  That of RoCE v2 joins a device with all others, and what it
 * carries may be lost, doubled and late (`loses`): there a channel is entered, not opened, and the rc/
 * folder sends again.  A channel is the part of one queue pair in it: a number at each end, so that
 * queue pairs cost memory and nothing else.
 *
 * What comes from a peer is not trusted: a peer that breaks the format loses all of its own channels
 * and no others.  Everything here is called with the engine's lock.
 */
#pragma once

#include <sys/types.h>

#include "objects/objects.h"

struct iovec;
struct soft_path;
struct soft_chan;

/* OPEN is answered with ACCEPT, or with END; END is not answered.  A side that has sent OPEN and has no
 * answer yet withdraws it by an END to number 0, with its own number in `from`, which ends the channel
 * if it has been accepted meanwhile; an ACCEPT to no number is answered with END.  DATA to a number
 * that is no more has crossed the END of its channel, and is dropped.  An END without numbers means
 * nothing: it says that the path is there. */
enum soft_record_kind {
	SOFT_RECORD_OPEN = 1, /* `from`: where the answer shall go; a handshake */
	SOFT_RECORD_ACCEPT, /* `to`, and `from`: the number at the other end; a handshake */
	SOFT_RECORD_DATA, /* `to` */
	SOFT_RECORD_END, /* `to` */
};

enum {
	SOFT_CHAN_LEAST = 64 * 1024,
	/* Given to a path together. */
	SOFT_PATH_FRAMES = 128,
	SOFT_PATH_IOVECS = 256,
	SOFT_PATH_RECORDS = SOFT_STEP_BYTES / SOFT_FRAME_MAX + 2,
	SOFT_DIRECT_MIN = 4096, /* less payload is copied: an iovec costs as much */
};

/* Callbacks of a channel to its owner.  Each may end this channel or others, and free its owner. */
struct soft_chan_ops {
	/* The other side has accepted what soft_chan_open asked for.  The handshake is a copy. */
	void (*accepted)(struct soft_chan *chan, const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
	/* The next bytes of a record, of which `rest` more are to come; memory that the other side
	 * may change meanwhile.  Rings bring whole records. */
	void (*data)(struct soft_chan *chan, const uint8_t *bytes, size_t length, size_t rest);
	/* For a path that brings payload to its place itself.  place: where at most `length` of the
	 * next bytes belong; the number of iovecs, or 0.  placed: they are there. */
	int (*place)(struct soft_chan *chan, size_t length, struct iovec *iov, int room);
	void (*placed)(struct soft_chan *chan, size_t length, size_t rest);
	/* There was no room, and now there is.  Channels that wait are called in turns. */
	void (*writable)(struct soft_chan *chan);
	/* The other side's process has gone.  unread: it has not read this record of those that were
	 * written here.  exited: what it had not read has been told, or is among the last `missing`
	 * bytes that were written here; after that comes `gone`. */
	void (*unread)(struct soft_chan *chan, const uint8_t *bytes, size_t length);
	void (*exited)(struct soft_chan *chan, uint64_t missing);
	/* Is the other machine to be asked for a sign of life, for its sake: while something waits for
	 * an answer, though the kernel there has all that was sent, or always? */
	bool (*probes)(struct soft_chan *chan, bool waiting);
	/* That machine has been silent for longer than `patience`: end it. */
	void (*silent)(struct soft_chan *chan);
	/* The channel is no more; do not end it. 0: the other side has ended or refused it.
	 * ECONNRESET: its process is gone.  ECONNREFUSED: it refused to attach.  EPROTO: it broke
	 * the format.  ENOMEM: a control record could not be queued. */
	void (*gone)(struct soft_chan *chan, int error);
};

/* One end of a channel; zeroed, with nothing but `calls` set, it is one that is not open. */
struct soft_chan {
	const struct soft_chan_ops *calls;
	struct soft_path *path; /* NULL: not open */
	uint32_t id; /* ours */
	uint32_t remote_id; /* theirs; 0 until accepted */
	struct soft_node node; /* of the path's channels */
	struct soft_node waiting; /* for room */
	size_t least; /* that is of use to it */
	uint32_t round; /* in which it began to wait */
	uint64_t position; /* of the path, after its last record */
	uint64_t patience; /* ns, with a silent machine; 0: without end */
};

/* Where one of several records ends that are given to a path together: so many iovecs, frames and
 * bytes are in it and those before it. */
struct soft_record_end {
	int iovecs, frames;
	size_t bytes;
};

struct soft_path_calls {
	enum aiordma_wire name; /* and which struct the path is in */
	uint32_t frame_most; /* bytes of payload in one frame */
	int frames_most; /* given to it together */
	size_t record_most; /* a longer run of frames is several records */
	bool loses; /* DATA may be lost, doubled, late */
	/* Bytes of records that it may be given now, what is less than `least` is up to date;
	 * negative: the peer has broken the path. */
	ssize_t (*room)(struct soft_path *path, size_t least);
	/* Records, for the first of which there is room.  How many of them it has taken, each whole;
	 * at least that one. */
	int (*put)(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
		   const struct iovec *iov, const struct soft_record_end *ends, int count);
	/* Its last channel has ended; `by_peer`: the other side has said so.  NULL: it stays. */
	void (*idle)(struct soft_path *path, bool by_peer);
	/* The patience of a channel has changed.  NULL: the path does not get silent. */
	void (*watch)(struct soft_path *path);
};

struct soft_path {
	const struct soft_path_calls *calls;
	struct soft_table numbers; /* of the channels */
	struct soft_node chans;
	struct soft_node waiting; /* channels that wait for room */
	uint32_t round; /* of offering it */
	uint64_t position; /* bytes written, headers apart */
	struct soft_deferred flush; /* something was written */
	struct soft_chan *receiving; /* whose record has come in part */
	struct soft_ctrl_record *ctrl_records; /* control records that found no room */
	uint32_t ctrl_count, ctrl_room;
	/* Of the devices at our end: nothing passes while one of them is down.  And which device is at
	 * the other end, as soft_gid_hca_number. */
	uint32_t ports;
	int peer_hca;
	bool dead;
	int broken; /* it will be ended by `flush` with this errno value */
};

/* ---- for links ----------------------------------------------------------------------------- */

/* Ask the other side for a channel.  `accepted` or `gone` follows, never at once. 0 or an errno
 * value, and then it is not open. */
int soft_chan_open(struct soft_chan *chan, struct soft_path *path,
		   const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
/* The other side has asked: 0 or an errno value, and then it has been refused. */
int soft_chan_accept(struct soft_chan *chan, struct soft_path *path, uint32_t remote_id,
		     const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
void soft_path_refuse(struct soft_path *path, uint32_t remote_id);
/* Open at once, as both sides have agreed elsewhere: 0 or an errno value. */
int soft_chan_enter(struct soft_chan *chan, struct soft_path *path, uint32_t id,
		    uint32_t remote_id);

/* Bytes that may be written now; 0: less than `least`, and `writable` will be called (or
 * `accepted`, before which there is no room).  `least` is at most SOFT_CHAN_LEAST and a header. */
size_t soft_chan_room(struct soft_chan *chan, size_t least);
/* There is room, but it is for others to use it first: `writable` will be called in another step.
 * Nothing when it will be called anyway. */
void soft_chan_wait(struct soft_chan *chan);
/* Writes records: a copy of their payload, at most as many bytes as soft_chan_room has just returned.
 * Returns how many records were written: not all, if the path has no more room. */
int soft_chan_write(struct soft_chan *chan, const struct iovec *iov,
		    const struct soft_record_end *ends, int count);
/* Send END after all that was written, and forget the channel.  Safe to repeat. */
void soft_chan_end(struct soft_chan *chan);

/* Callbacks of a higher folder (link) for a peer's requests. */
struct soft_path_acceptor {
	/* The peer asks for a channel, under its number: answer with soft_chan_accept or
	 * soft_path_refuse, now or later.  The handshake is a copy. */
	void (*requested)(struct soft_path *path, uint32_t remote_id,
			  const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
	/* It takes that back, or has gone (0: everything that it has asked for). */
	void (*withdrawn)(struct soft_path *path, uint32_t remote_id);
};

struct soft_paths {
	const struct soft_path_acceptor *acceptor;
	/* Of tests in virtual time: the path to the process with that port. */
	struct soft_path *(*simulated)(uint16_t port);
};

extern const struct soft_subsystem soft_paths_subsystem;

static inline bool soft_path_is_local(const struct soft_path *path)
{
	return path->calls->name == AIORDMA_WIRE_SHARED_MEMORY;
}

/* ---- for what is a path -------------------------------------------------------------------- */

void soft_path_init(struct soft_path *path, const struct soft_path_calls *calls,
		    void (*flush)(struct soft_deferred *deferred));
/* A record has come, of DATA the header; false: a protocol error. */
bool soft_path_take(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
		    const uint8_t *payload, size_t length);
/* All its channels are gone.  `missing`: so many of the last bytes written have not been read by a
 * process that has ended; negative: that is not known. */
void soft_path_finish(struct soft_path *path, int error, int64_t missing);
/* In the child of a fork: the same, and nothing is told. */
void soft_path_forget(struct soft_path *path);
/* There may be room for what waits for it; does anything; how much that needs at least. */
void soft_path_offer_room(struct soft_path *path);
bool soft_path_waits(const struct soft_path *path);
ssize_t soft_path_least(const struct soft_path *path);
/* The path cannot go on: it is ended when the lock is given back. */
void soft_path_give_up(struct soft_path *path, int error);
