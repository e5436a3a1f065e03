/* Paths that send records through the rings shared with a local peer (shm.h). */
#include <sys/uio.h>
#include <unistd.h>

#include "shm_internal.h"

enum {
	/* Limits of a record. Frames are short so that the peer can copy one out of the ring while
	 * this side copies the next one in. The number of frames is limited so that the peer does
	 * not wait for many small frames before it can handle the first one. */
	MAX_FRAME = 32 * 1024,
	MAX_FRAMES = 24,
	MAX_RECORD = 4 * MAX_FRAME,
};

/* ---- local peers ---------------------------------------------------------------------------- */

static void flush(struct soft_deferred *deferred);
static const struct soft_path_calls ring_calls;

static struct soft_shm_peer *peer_of(const struct soft_path *path)
{
	return soft_container(path, struct soft_shm_peer, path);
}

struct soft_shm_peer *soft_shm_peer_create(void)
{
	struct soft_shm_peer *peer = soft_list_count(&soft_device.shm->peers) < SOFT_SHM_MAX_PEERS
					     ? calloc(1, sizeof(*peer))
					     : NULL;

	if (!peer)
		return NULL;
	soft_attach_init(peer);
	soft_path_init(&peer->path, &ring_calls, flush);
	soft_list_init(&peer->poll_set);
	soft_list_init(&peer->unidentified);
	soft_list_append(&soft_device.shm->peers, &peer->node);
	return peer;
}

void soft_shm_peer_release(struct soft_shm_peer *peer)
{
	if (--peer->use_count || !peer->path.dead)
		return;
	soft_segment_unmap(peer);
	free(peer);
}

/* Report the data records that the peer did not read to the channels that sent them. The peer
 * chooses the channel numbers. If two channels have the same number, only one of them gets the
 * report. Returns 0 on success. */
static int report_unread(struct soft_shm_peer *peer)
{
	struct soft_table by_number = {0};
	struct soft_ring rest;
	struct soft_record record;
	int rc = soft_ring_view_unread(&peer->out, &rest) ? 0 : EPROTO;

	soft_list_each (struct soft_chan, chan, &peer->path.chans, node)
		if (!rc && chan->remote_id && !soft_table_find(&by_number, chan->remote_id))
			rc = soft_table_put(&by_number, chan->remote_id, chan);
	while (!rc) {
		int next = soft_ring_next_unread(&rest, &record);

		if (next != 1) { /* no more records, or an invalid one */
			rc = next;
			break;
		}
		struct soft_chan *chan = soft_table_find(&by_number, record.to);

		if (chan && record.kind == SOFT_RECORD_DATA)
			chan->calls->report_unread(chan, record.payload, record.length);
	}
	free(by_number.slots);
	return rc;
}

enum { MAY_BE_RUNNING = false, HAS_EXITED = true };

/* End a peer and its channels. `exited` is true if the peer's process has ended and its unread
 * records have been reported. */
static void finish(struct soft_shm_peer *peer, int error, bool exited)
{
	soft_assert_locked();
	if (peer->path.dead)
		return;
	peer->path.dead = true;
	soft_list_remove(&peer->node);
	soft_wakeup_remove(peer);
	soft_attach_end(peer);
	peer->use_count++;
	soft_path_finish(&peer->path, error, exited ? 0 : SOFT_UNREAD_UNKNOWN);
	soft_shm_peer_release(peer);
}

void soft_shm_peer_finish(struct soft_shm_peer *peer, int error)
{
	finish(peer, error, MAY_BE_RUNNING);
}

/* Handle the peer's last records before finishing it, in particular the ENDs of its channels. The
 * peer may still be running and may write more, so this reads at most one full ring. */
void soft_shm_peer_drain_and_finish(struct soft_shm_peer *peer)
{
	peer->use_count++;
	soft_shm_peer_receive(peer, SOFT_RING_SIZE);
	if (!peer->is_attached)
		soft_shm_peer_finish(peer, ECONNREFUSED);
	else if (!peer->path.dead && report_unread(peer)) /* the set of unread records is unknown */
		finish(peer, EPROTO, MAY_BE_RUNNING);
	else
		finish(peer, ECONNRESET, HAS_EXITED);
	soft_shm_peer_release(peer);
}

bool soft_shm_path_is_self(const struct soft_path *path)
{
	return soft_path_is_local(path) && peer_of(path)->is_self;
}

struct soft_cma *soft_shm_path_cma(const struct soft_path *path)
{
	return path && soft_path_is_local(path) ? peer_of(path)->cma : NULL;
}

void soft_cma_probe_path(struct soft_path *path)
{
	if (soft_path_is_local(path))
		soft_cma_probe_peer(peer_of(path));
}

/* ---- the path ------------------------------------------------------------------------------ */

static ssize_t room(struct soft_path *path, size_t min_room)
{
	ssize_t room = soft_ring_room(&peer_of(path)->out, min_room);

	return room < MAX_RECORD ? room : MAX_RECORD;
}

/* Write one record to the ring to the peer, and measure how long that takes
 * (soft_path_calls.put). */
static int put(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
	       const struct iovec *iov, const struct soft_record_end *ends, int count)
{
	struct soft_shm_peer *peer = peer_of(path);
	size_t bytes = ends[0].bytes;
	uint64_t start_ns = soft_cma_ring_start(bytes);

	soft_ring_put(&peer->out,
		      &(struct soft_record){
			      .kind = kind, .to = to, .from = from, .length = (uint32_t)bytes},
		      iov, ends[0].iovecs);
	if (peer->cma && kind == SOFT_RECORD_DATA)
		soft_cma_ring_wrote(peer->cma, start_ns, bytes);
	(void)count; /* room() limits this to one record */
	return 1;
}

static const struct soft_path_calls ring_calls = {
	.name = AIORDMA_WIRE_SHARED_MEMORY,
	.max_frame = MAX_FRAME,
	.max_frames = MAX_FRAMES,
	.max_record = MAX_RECORD,
	.room = room,
	.put = put,
};

bool soft_shm_peer_request_room(struct soft_shm_peer *peer)
{
	if (!soft_path_has_waiting(&peer->path))
		return false;
	ssize_t free = soft_ring_request_room(&peer->out);

	if (free < 0)
		soft_path_schedule_failure(&peer->path, EPROTO);
	return free >= soft_path_min_room(&peer->path);
}

/* ---- receiving ----------------------------------------------------------------------------- */

/* Returns how many bytes, up to `budget`, may be read from this process's own ring. Handling a
 * record may add new ones, so all reads until the lock is released share the limit of
 * SOFT_STEP_BYTES. */
static size_t limit_own_ring_budget(struct soft_shm_peer *peer, size_t budget)
{
	if (peer->last_unlock_count != soft_unlock_count()) {
		peer->last_unlock_count = soft_unlock_count();
		peer->remaining_budget = SOFT_STEP_BYTES;
	}
	return budget < peer->remaining_budget ? budget : peer->remaining_budget;
}

bool soft_shm_peer_receive(struct soft_shm_peer *peer, size_t budget)
{
	soft_assert_locked();
	struct soft_record record;
	size_t consumed = 0;

	if (peer->is_self)
		budget = limit_own_ring_budget(peer, budget);
	while (consumed < budget && !peer->path.dead && peer->is_attached &&
	       !(soft_ports_down & peer->path.ports)) {
		int rc = soft_ring_next(&peer->in, &record);
		uint64_t copied_before = soft_device.shm->cma_copied_bytes;
		uint64_t start_ns = rc > 0 ? soft_cma_ring_start(record.length) : 0;

		if (rc == 0)
			break;
		if (rc > 0)
			consumed += record.length;
		consumed += SOFT_RECORD_HEADER;
		if (rc < 0 || !soft_path_receive(&peer->path, record.kind, record.to, record.from,
						 record.payload, record.length)) {
			soft_shm_peer_finish(peer, EPROTO);
			break;
		}
		if (peer->path.dead)
			break;
		size_t cma_bytes = (size_t)(soft_device.shm->cma_copied_bytes - copied_before);

		/* A record with a descriptor does not measure the ring. */
		if (peer->cma && !cma_bytes)
			soft_cma_ring_read(peer->cma, start_ns, record.length);
		soft_ring_release(&peer->in, &record);
		consumed += cma_bytes;
	}
	peer->remaining_budget -=
		consumed < peer->remaining_budget ? consumed : peer->remaining_budget;
	return consumed;
}

/* ---- loopback ------------------------------------------------------------------------------ */

/* Get the peer for connections within this process between the devices with these port bits, and
 * create it on first use. Returns NULL on failure. */
static struct soft_shm_peer *self_peer(uint32_t ports)
{
	soft_list_each (struct soft_shm_peer, peer, &soft_device.shm->peers, node)
		if (peer->is_self && peer->path.ports == ports)
			return peer;
	struct soft_shm_peer *peer = soft_shm_peer_create();

	if (!peer)
		return NULL;
	if (soft_segment_private(peer)) {
		soft_shm_peer_finish(peer, 0);
		return NULL;
	}
	peer->path.ports = ports;
	peer->pid = getpid();
	peer->is_attached = true;
	peer->is_self = true;
	return peer;
}

int soft_shm_chan_to_self(struct soft_chan *chan, uint32_t own_port)
{
	soft_assert_locked();
	struct soft_shm_peer *peer = self_peer(own_port);
	int rc = peer ? soft_chan_attach(chan, &peer->path, 0, 0) : ENOMEM;

	chan->remote_id = chan->id;
	return rc;
}

static struct soft_path *path_of(struct soft_shm_peer *peer)
{
	return peer ? &peer->path : NULL;
}

struct soft_path *soft_shm_path_at(uint16_t ip_port, uint32_t own_port, int hca_number)
{
	soft_assert_locked();
	if (!ip_port)
		return NULL;
	if (ip_port == soft_ip_port())
		return path_of(self_peer(own_port | soft_hca_at(hca_number)->port_bit));
	soft_list_each (struct soft_shm_peer, peer, &soft_device.shm->peers, node) {
		if (peer->port == ip_port && peer->path.ports == own_port &&
		    peer->path.peer_hca == hca_number)
			return &peer->path;
	}
	return path_of(soft_attach_begin(ip_port, own_port, hca_number));
}

/* Notify the peer of new records before the lock is released. If the peer is this process, read the
 * records immediately instead. */
static void flush(struct soft_deferred *deferred)
{
	struct soft_shm_peer *peer = soft_container(deferred, struct soft_shm_peer, path.flush);

	if (peer->path.pending_error) {
		soft_shm_peer_finish(peer, peer->path.pending_error);
	} else if (peer->is_self) {
		soft_wakeup_visit(peer);
	} else {
		bool must_notify = soft_ring_flush(&peer->out);

		if (must_notify)
			soft_notify_pipe_notify(&peer->pipe);
		soft_engine_count_write(must_notify);
		if (soft_shm_peer_request_room(peer))
			soft_wakeup_poll_or_arm(peer);
	}
}

/* ---- the end ------------------------------------------------------------------------------- */

static void stop(void)
{
	soft_list_drain (struct soft_shm_peer, peer, &soft_device.shm->peers, node)
		soft_shm_peer_finish(peer, ECONNRESET);
}

/* Free all peers in a forked child without using the rings, which are not mapped in the child.
 * Detach the channels first, because inherited links may still end them. */
static void forked(void)
{
	struct soft_shm *shm = soft_device.shm;

	soft_list_drain (struct soft_shm_peer, peer, &shm->peers, node) {
		soft_list_remove(&peer->node);
		soft_wakeup_remove(peer);
		soft_path_forget(&peer->path);
		soft_cma_detach(peer);
		soft_notify_pipe_close(&peer->pipe);
		free(peer);
	}
	soft_list_init(&shm->unidentified);
}

static void port_changed(enum soft_port_change change, uint32_t ports)
{
	(void)ports; /* resuming the rings of other ports is harmless */
	if (change == SOFT_PORT_UP)
		soft_shm_resume();
}

static void create(void)
{
	struct soft_shm *shm = soft_device.shm = soft_alloc_part(sizeof(*shm));

	soft_list_init(&shm->peers);
	soft_list_init(&shm->unidentified);
	soft_list_init(&shm->poll_set);
	soft_list_init(&shm->cmas);
	shm->acceptor.watch.fd = -1;
	shm->min_slow_copy_ns = 50000; /* 21 GB/s */
}

const struct soft_subsystem soft_shm_subsystem = {
	.create = create,
	.stop = stop,
	.forked = forked,
	.port_changed = port_changed,
	.poll = soft_shm_poll,
	.has_input = soft_shm_has_input,
	.set_need_notify = soft_shm_set_need_notify,
};
