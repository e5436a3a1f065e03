/* Paths: connections to other processes that carry the frames of many queue pairs.
 *
 * Each kind of path has a folder: rings shared by two processes of one host (shm/), TCP streams
 * (tcp/), and RoCE v2 packets (roce/), for which sim/ simulates a network. A path accepts records
 * from the channels of queue pairs and delivers the records it receives. Rings and TCP streams
 * connect two processes, and each record arrives whole and in order, or not at all. A RoCE v2 path
 * connects a device with all others, and records may be lost, duplicated and delayed (`loses`). Its
 * channels are entered, not opened, and the rc/ folder retransmits. A channel is the part of one
 * queue pair: a number at each end. A queue pair therefore costs memory only.
 *
 * Peers are not trusted. A peer that violates the format loses all of its own channels, but no
 * others. All functions require the engine's lock.
 */
#pragma once

#include <sys/types.h>

#include "objects/objects.h"

struct iovec;
struct soft_path;
struct soft_chan;

/* The response to OPEN is ACCEPT or END; END has no response. A side that has sent OPEN and has no
 * response yet withdraws it with an END to number 0 and its own number in `from`, which ends the
 * channel if it has been accepted in the meantime. An ACCEPT to an unknown number is answered with
 * END. DATA to a number that no longer exists has crossed the END of its channel and is dropped. An
 * END without numbers only shows that the path exists. */
enum soft_record_kind {
	SOFT_RECORD_OPEN = 1, /* `from`: number for the response; contains a handshake */
	SOFT_RECORD_ACCEPT, /* `to`, and `from`: number at the other end; contains a handshake */
	SOFT_RECORD_DATA, /* `to` */
	SOFT_RECORD_END, /* `to` */
};

enum {
	SOFT_CHAN_LEAST = 64 * 1024,
	/* Maximum numbers passed to a path in one call. */
	SOFT_PATH_FRAMES = 128,
	SOFT_PATH_IOVECS = 256,
	SOFT_PATH_RECORDS = SOFT_STEP_BYTES / SOFT_FRAME_MAX + 2,
	SOFT_DIRECT_MIN = 4096, /* shorter payload is copied, which costs no more than an iovec */
};

/* Callbacks of a channel to its owner. Each may end this channel or others, and free its owner. */
struct soft_chan_ops {
	/* The peer has accepted the channel that soft_chan_open requested. The handshake is a
	 * copy. */
	void (*accepted)(struct soft_chan *chan, const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
	/* The next bytes of a record, of which `rest` bytes follow. The peer may change the memory
	 * at any time. Rings deliver whole records. */
	void (*data)(struct soft_chan *chan, const uint8_t *bytes, size_t length, size_t rest);
	/* For a path that stores payload itself. `place` returns iovecs for at most `length` of the
	 * next bytes, or 0. `placed` reports that they have been stored. */
	int (*place)(struct soft_chan *chan, size_t length, struct iovec *iov, int room);
	void (*placed)(struct soft_chan *chan, size_t length, size_t rest);
	/* There is room again. Waiting channels are called in turns. */
	void (*writable)(struct soft_chan *chan);
	/* The peer's process has ended. `unread` reports each record from here that it had not
	 * read, and `exited` that all of these have been reported or are among the last `missing`
	 * bytes written here. `gone` follows. */
	void (*unread)(struct soft_chan *chan, const uint8_t *bytes, size_t length);
	void (*exited)(struct soft_chan *chan, uint64_t missing);
	/* Returns whether to probe the other machine for this channel: while something waits for a
	 * response although the kernel there has everything that was sent, or always. */
	bool (*probes)(struct soft_chan *chan, bool waiting);
	/* The other machine has been silent for longer than `patience`. The callback must end the
	 * channel. */
	void (*silent)(struct soft_chan *chan);
	/* The channel no longer exists and must not be ended. `error` is 0 if the peer ended or
	 * refused it, ECONNRESET if its process has ended, ECONNREFUSED if it refused to attach,
	 * EPROTO if it violated the format, and ENOMEM if a control record could not be queued. */
	void (*gone)(struct soft_chan *chan, int error);
};

/* One end of a channel. A zeroed channel with `calls` set is not open. */
struct soft_chan {
	const struct soft_chan_ops *calls;
	struct soft_path *path; /* NULL if not open */
	uint32_t id; /* local number */
	uint32_t remote_id; /* peer's number; 0 until accepted */
	struct soft_node node; /* in the path's list of channels */
	struct soft_node waiting; /* in the list of channels that wait for room */
	size_t least; /* minimum room that is useful */
	uint32_t round; /* round in which it began to wait */
	uint64_t position; /* position of the path after the channel's last record */
	uint64_t patience; /* ns of silence to tolerate; 0 for no limit */
};

/* The end of one of several records that are passed to a path together, as the cumulative number of
 * iovecs, frames and bytes. */
struct soft_record_end {
	int iovecs, frames;
	size_t bytes;
};

struct soft_path_calls {
	enum aiordma_wire name; /* also tells which struct contains the path */
	uint32_t frame_most; /* maximum payload of a frame in bytes */
	int frames_most; /* maximum number of frames per call */
	size_t record_most; /* maximum length of a record; longer runs of frames are split */
	bool loses; /* whether DATA may be lost, duplicated or delayed */
	/* Returns the number of bytes of records that may be written now, or a negative value if
	 * the peer has broken the path. A result below `least` is up to date. */
	ssize_t (*room)(struct soft_path *path, size_t least);
	/* Write records; there is room for the first one. Returns how many have been accepted, each
	 * as a whole; at least one. */
	int (*put)(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
		   const struct iovec *iov, const struct soft_record_end *ends, int count);
	/* The last channel has ended, on the peer's initiative if `by_peer` is set. NULL if the
	 * path stays. */
	void (*idle)(struct soft_path *path, bool by_peer);
	/* The patience of a channel has changed. NULL if the path cannot become silent. */
	void (*watch)(struct soft_path *path);
};

struct soft_path {
	const struct soft_path_calls *calls;
	struct soft_table numbers; /* numbers of the channels */
	struct soft_node chans;
	struct soft_node waiting; /* channels that wait for room */
	uint32_t round; /* number of the current round of offering room */
	uint64_t position; /* bytes written, without headers */
	struct soft_deferred flush; /* scheduled after writing */
	struct soft_chan *receiving; /* channel whose record has arrived in part */
	struct soft_ctrl_record *ctrl_records; /* control records that wait for room */
	uint32_t ctrl_count, ctrl_room;
	/* Ports of the devices at this end; nothing passes while one of them is down. The device at
	 * the other end, as in soft_gid_hca_number. */
	uint32_t ports;
	int peer_hca;
	bool dead;
	int broken; /* errno value with which `flush` will end the path */
};

/* ---- for links ----------------------------------------------------------------------------- */

/* Request a channel. `accepted` or `gone` is called later, never from this function. Returns 0, or
 * an errno value if the channel is not open. */
int soft_chan_open(struct soft_chan *chan, struct soft_path *path,
		   const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
/* Accept a requested channel. Returns 0, or an errno value after refusing the request. */
int soft_chan_accept(struct soft_chan *chan, struct soft_path *path, uint32_t remote_id,
		     const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
void soft_path_refuse(struct soft_path *path, uint32_t remote_id);
/* Open a channel whose numbers both sides have agreed on elsewhere. Returns 0 or an errno value. */
int soft_chan_enter(struct soft_chan *chan, struct soft_path *path, uint32_t id,
		    uint32_t remote_id);

/* Returns the number of bytes that may be written now. Returns 0 if that is less than `least`;
 * `writable` is called when there is more room. Before `accepted` there is no room. `least` is at
 * most SOFT_CHAN_LEAST and a header. */
size_t soft_chan_room(struct soft_chan *chan, size_t least);
/* Let other channels use the room first: `writable` is called in another step. Does nothing if it
 * will be called anyway. */
void soft_chan_wait(struct soft_chan *chan);
/* Write records with a copy of their payload, up to the number of bytes that soft_chan_room has
 * just returned. Returns the number of records written, which is smaller if the path has no more
 * room. */
int soft_chan_write(struct soft_chan *chan, const struct iovec *iov,
		    const struct soft_record_end *ends, int count);
/* Send END after everything written so far, and forget the channel. Safe to repeat. */
void soft_chan_end(struct soft_chan *chan);

/* Callbacks of the link folder for requests of peers. */
struct soft_path_acceptor {
	/* The peer requests a channel under its number. Respond with soft_chan_accept or
	 * soft_path_refuse, now or later. The handshake is a copy. */
	void (*requested)(struct soft_path *path, uint32_t remote_id,
			  const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
	/* The peer withdraws its request or has ended. A number of 0 means all of its requests. */
	void (*withdrawn)(struct soft_path *path, uint32_t remote_id);
};

struct soft_paths {
	const struct soft_path_acceptor *acceptor;
	/* For tests in virtual time: returns the path to the process with this port. */
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
/* Handle a record, or the header of a DATA record. Returns false after a protocol error. */
bool soft_path_take(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
		    const uint8_t *payload, size_t length);
/* End all channels. `missing` is the number of the last bytes written that a process had not read
 * when it ended, or negative if unknown. */
void soft_path_finish(struct soft_path *path, int error, int64_t missing);
/* Free the channels in the child of a fork without notifying anyone. */
void soft_path_forget(struct soft_path *path);
/* Serve channels that wait for room. soft_path_waits() returns whether there are any, and
 * soft_path_least() the minimum room that they need. */
void soft_path_offer_room(struct soft_path *path);
bool soft_path_waits(const struct soft_path *path);
ssize_t soft_path_least(const struct soft_path *path);
/* End a path that cannot continue when the lock is released. */
void soft_path_give_up(struct soft_path *path, int error);
