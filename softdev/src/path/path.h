/* Paths: connections to other processes that carry the frames of many queue pairs.
 *
 * Each kind of path has a folder: rings shared by two processes of one host (shm/), TCP streams
 * (tcp/), and RoCE v2 packets (roce/), for which sim/ simulates a network. A path accepts records
 * from the channels of queue pairs and delivers the records it receives. Rings and TCP streams
 * connect two processes, and each record arrives whole and in order, or not at all. A RoCE v2 path
 * connects a device with all others, and records may be lost, duplicated and delayed (`is_lossy`).
 * Its channels are opened with soft_chan_attach(), and rc/ retransmits lost records. A channel
 * belongs to one queue pair and has a number at each end, so another queue pair costs only memory.
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

/* A side responds to OPEN with ACCEPT or END. END has no response. To withdraw an OPEN, a side
 * sends END with 0 in `to` and its own number in `from`. If the peer has already accepted the
 * channel, this END ends the channel. A side responds with END to an ACCEPT for an unknown number.
 * It drops DATA for an unknown number, because the peer may have sent the data before it received
 * the END of the channel. An END with 0 in both fields has no effect on channels. It only shows the
 * peer that this side uses the path. */
enum soft_record_kind {
	SOFT_RECORD_OPEN = 1, /* `from`: sender's number; contains a handshake */
	SOFT_RECORD_ACCEPT, /* `to`; `from`: sender's number; contains a handshake */
	SOFT_RECORD_DATA, /* `to` */
	SOFT_RECORD_END, /* `to`, or `from` to withdraw an OPEN */
};

enum {
	SOFT_CHAN_MIN_ROOM = 64 * 1024,
	SOFT_PATH_FRAMES = 128, /* maximum frames per call to a path */
	SOFT_PATH_IOVECS = 256, /* maximum iovecs per call to a path */
	SOFT_PATH_RECORDS = SOFT_STEP_BYTES / SOFT_FRAME_MAX + 2,
	SOFT_DIRECT_MIN = 4096, /* minimum bytes to store directly; copying fewer is as cheap */
};

enum { SOFT_UNREAD_UNKNOWN = -1 }; /* see soft_path_finish() */

/* Callbacks from a channel to its owner. Each callback may end any channel and free the owner. */
struct soft_chan_ops {
	/* Called when the peer has accepted the channel that soft_chan_open() requested. The
	 * handshake is a copy. */
	void (*accepted)(struct soft_chan *chan, const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
	/* Handle the next `length` bytes of a record. `rest` more bytes of it will follow. The peer
	 * may change the memory at any time. Rings always deliver whole records. */
	void (*data)(struct soft_chan *chan, const uint8_t *bytes, size_t length, size_t rest);
	/* Fill `iov` with the memory in which the path should store the next bytes of the payload,
	 * at most `length`. Returns the number of iovecs, or 0 to receive the bytes through
	 * `data`. */
	int (*map_payload)(struct soft_chan *chan, size_t length, struct iovec *iov, int room);
	/* Called when the path has stored `length` bytes of a record in the memory from
	 * `map_payload`. `rest` more bytes of the record will follow. */
	void (*payload_stored)(struct soft_chan *chan, size_t length, size_t rest);
	/* Called when there is room again. Waiting channels take turns. */
	void (*writable)(struct soft_chan *chan);
	/* Called for each record from this side that the peer's process left unread when it
	 * ended. */
	void (*report_unread)(struct soft_chan *chan, const uint8_t *bytes, size_t length);
	/* Called when the peer's process has ended, before `closed`. Records that it had not read
	 * were passed to `report_unread` or lie within the last `missing` bytes that this side
	 * wrote to the channel. */
	void (*peer_exited)(struct soft_chan *chan, uint64_t missing);
	/* Returns whether to probe the other machine even though its kernel has acknowledged all
	 * data. If `waiting` is set, returns true while the channel expects a response. Otherwise,
	 * returns true only if the channel needs probes even while idle. */
	bool (*needs_probe)(struct soft_chan *chan, bool waiting);
	/* Called when the other machine has been silent for `silence_limit_ns`. The callback must
	 * end the channel. */
	void (*end_after_silence)(struct soft_chan *chan);
	/* Called when the channel no longer exists, so the owner must not end it. `error` is 0 if
	 * the peer ended or refused the channel, ECONNRESET if its process has ended, ECONNREFUSED
	 * if it refused to attach, EPROTO if it violated the format, and ENOMEM if a control record
	 * could not be queued. */
	void (*closed)(struct soft_chan *chan, int error);
};

/* One end of a channel. A zeroed channel with `calls` set is not open. */
struct soft_chan {
	const struct soft_chan_ops *calls;
	struct soft_path *path; /* NULL if not open */
	uint32_t id; /* local number */
	uint32_t remote_id; /* peer's number; 0 until accepted */
	struct soft_node node; /* in the path's list of channels */
	struct soft_node waiting; /* in the list of channels waiting for room */
	size_t min_room; /* minimum useful room in bytes */
	uint32_t wait_round; /* path->offer_round when the channel began to wait */
	uint64_t position; /* path->position after the channel's last record */
	uint64_t silence_limit_ns; /* how long the other machine may be silent; 0 for no limit */
};

/* The end of one record in a batch for a path, as cumulative numbers of iovecs, frames and
 * bytes. */
struct soft_record_end {
	int iovecs, frames;
	size_t bytes;
};

struct soft_path_calls {
	enum aiordma_wire name; /* also identifies the struct that contains the path */
	uint32_t max_frame; /* maximum payload of a frame in bytes */
	int max_frames; /* maximum number of frames per call */
	size_t max_record; /* maximum length of a record; longer runs of frames are split */
	bool is_lossy; /* whether DATA may be lost, duplicated or delayed */
	/* Returns the number of record bytes that may be written now, or a negative value if the
	 * peer has broken the path. A cached value is good enough if it is at least `min_room`, the
	 * number of bytes that the caller needs. */
	ssize_t (*room)(struct soft_path *path, size_t min_room);
	/* Write records, of which at least the first must fit. Returns the number of records
	 * accepted, at least 1. No record is accepted in part. */
	int (*put)(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
		   const struct iovec *iov, const struct soft_record_end *ends, int count);
	/* Called when the last channel has ended. `by_peer` is set if the peer ended it. May be
	 * NULL if the path stays open without channels. */
	void (*idle)(struct soft_path *path, bool by_peer);
	/* Called when a channel's `silence_limit_ns` has changed. NULL if the path cannot become
	 * silent. */
	void (*silence_limit_changed)(struct soft_path *path);
};

struct soft_path {
	const struct soft_path_calls *calls;
	struct soft_table chans_by_id; /* channels by local number */
	struct soft_node chans;
	struct soft_node waiting; /* channels waiting for room */
	uint32_t offer_round; /* current round of soft_path_offer_room() */
	uint64_t position; /* bytes written, excluding record headers */
	struct soft_deferred flush; /* scheduled after writing */
	struct soft_chan *receiving; /* channel of a partially received record */
	struct soft_ctrl_record *ctrl_records; /* control records waiting for room */
	uint32_t ctrl_count, ctrl_capacity;
	/* Local ports that the path uses. The path carries no data while any of them is down. */
	uint32_t ports;
	int peer_hca; /* number of the peer's device, from soft_gid_hca_number() */
	bool dead;
	int pending_error; /* errno value with which `flush` ends the path; 0 if intact */
};

/* ---- for links ----------------------------------------------------------------------------- */

/* Request a channel. `accepted` or `closed` is called later, never from this function. Returns 0,
 * or an errno value if the request failed. */
int soft_chan_open(struct soft_chan *chan, struct soft_path *path,
		   const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
/* Accept a requested channel. Returns 0, or an errno value after refusing the request. */
int soft_chan_accept(struct soft_chan *chan, struct soft_path *path, uint32_t remote_id,
		     const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
/* Refuse the channel that the peer has requested with the number `remote_id`. */
void soft_path_refuse(struct soft_path *path, uint32_t remote_id);
/* Open a channel without a handshake, because both sides already know its numbers. If `id` is 0, a
 * local number is assigned. Returns 0 or an errno value. */
int soft_chan_attach(struct soft_chan *chan, struct soft_path *path, uint32_t id,
		     uint32_t remote_id);

/* Returns the number of bytes that may be written now, or 0 if fewer than `min_room` bytes fit. In
 * this case, `writable` is called when there is more room. There is no room before `accepted`.
 * `min_room` may be at most SOFT_CHAN_MIN_ROOM and a header. */
size_t soft_chan_room(struct soft_chan *chan, size_t min_room);
/* Put the channel behind the channels that are already waiting for room. A channel that is itself
 * waiting keeps its place. `writable` is called later, never from this function. */
void soft_chan_wait(struct soft_chan *chan);
/* Write records and copy their payload, at most as many bytes as soft_chan_room() has just
 * returned. Returns the number of records written, which is smaller than `count` if the path runs
 * out of room. */
int soft_chan_write(struct soft_chan *chan, const struct iovec *iov,
		    const struct soft_record_end *ends, int count);
/* Send END after everything written so far, and forget the channel. Safe to repeat. */
void soft_chan_end(struct soft_chan *chan);

/* Callbacks to link/ for requests from peers. */
struct soft_path_acceptor {
	/* Handle a request for a channel with the number `remote_id` at the peer. Respond with
	 * soft_chan_accept() or soft_path_refuse(), now or later. The handshake is a copy. */
	void (*requested)(struct soft_path *path, uint32_t remote_id,
			  const uint8_t handshake[SOFT_HANDSHAKE_SIZE]);
	/* Handle the withdrawal of a request, or of all requests on the path if `remote_id` is
	 * 0. */
	void (*withdrawn)(struct soft_path *path, uint32_t remote_id);
};

struct soft_paths {
	const struct soft_path_acceptor *acceptor;
	/* Returns the path to the process with this port, for tests in virtual time. */
	struct soft_path *(*simulated)(uint16_t port);
};

extern const struct soft_subsystem soft_paths_subsystem;

static inline bool soft_path_is_local(const struct soft_path *path)
{
	return path->calls->name == AIORDMA_WIRE_SHARED_MEMORY;
}

/* ---- for the kinds of paths ---------------------------------------------------------------- */

/* Initialize a path without channels. `flush` sends its output before the lock is released. */
void soft_path_init(struct soft_path *path, const struct soft_path_calls *calls,
		    void (*flush)(struct soft_deferred *deferred));
/* Handle a received record. For DATA, `payload` is NULL if only the header has arrived. Returns
 * false after a protocol error. */
bool soft_path_receive(struct soft_path *path, enum soft_record_kind kind, uint32_t to,
		       uint32_t from, const uint8_t *payload, size_t length);
/* End all channels. If the peer's process has ended, `missing` is the number of bytes at the end of
 * the output that may be unread, apart from records passed to `report_unread`. It is
 * SOFT_UNREAD_UNKNOWN if this number is unknown or the process has not ended. */
void soft_path_finish(struct soft_path *path, int error, int64_t missing);
/* Discard all channels in a forked child without notifying their owners or the peer. */
void soft_path_forget(struct soft_path *path);
/* Send queued control records, and then serve the channels waiting for room. */
void soft_path_offer_room(struct soft_path *path);
/* Returns whether control records or channels wait for room. */
bool soft_path_has_waiting(const struct soft_path *path);
/* Returns the minimum room that is needed next. Something must be waiting. */
ssize_t soft_path_min_room(const struct soft_path *path);
/* Schedule the end of a path that cannot continue. The path ends when the lock is released. */
void soft_path_schedule_failure(struct soft_path *path, int error);
