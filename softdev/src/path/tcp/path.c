/* Paths over a TCP stream, or over a pair of sockets in tests.
 *
 *   record  u32 kind << 24 | length of the payload; u32 to; u32 from (path.h), little-endian
 *
 * A stream that was not created by the connection manager begins with a handshake in each direction
 * (frame.h, STREAM). The connecting side sends nothing else before the response arrives, because
 * the listener may not be this device. It then uses the stream for all queue pairs that it connects
 * from the same address to the same port. The accepting side does not reuse the stream, because it
 * only knows that the queue pairs introduced on the stream are genuine. A stream without channels
 * is closed.
 *
 * Output: short records of all queue pairs are copied and sent together. They are sent when the
 * lock is released, or in the next step if a thread is about to run one. Long records are sent
 * directly from the application's memory, several per system call. If the socket accepts only part
 * of a record, the rest is copied, so the path accepts each record as a whole or not at all.
 *
 * Input: one recv reads many small records into the engine's scratch memory, and their payload is
 * copied from there. A long payload is received directly into its destination. One readv fills the
 * application's memory, and then scratch memory with the bytes that follow. While long payloads
 * arrive, only headers are read ahead, so that the next payload needs no copy either.
 */
#include <netinet/tcp.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>
#include <linux/sockios.h>

#include "tcp.h"

enum {
	RECORD_HEADER = SOFT_TCP_RECORD_HEADER,
	MAX_RECORD = 2 * (SOFT_FRAME_HEADER + SOFT_FRAME_MAX) -
		1, /* maximum payload of a record; also the room offered while channels wait */
	MAX_BATCH = SOFT_STEP_BYTES + MAX_RECORD,
	MAX_GATHERED = 64 * 1024, /* bytes of short records sent together */
	MAX_COPIED = 4096, /* longer records are not copied */
	MAX_UNVERIFIED_STREAMS = 256, /* maximum number of accepted streams without a channel */
};

#define CONNECTING_NS 20000000000u
#define FIRST_BYTES_NS 2000000000u
#define INTRODUCED_NS 12000000000u /* longer than a HELLO is held (link/handshake.c) */
#define LINGER_NS 2000000000u

struct soft_tcp_path *soft_tcp_path_of(const struct soft_path *path)
{
	return path && path->calls->name == AIORDMA_WIRE_TCP
		       ? soft_container(path, struct soft_tcp_path, path)
		       : NULL;
}

static bool get_socket_addresses(int fd, struct soft_tcp_addresses *addresses)
{
	struct sockaddr_storage own, peer;
	socklen_t own_length = sizeof(own), peer_length = sizeof(peer);

	memset(addresses, 0, sizeof(*addresses));
	if (getsockname(fd, (struct sockaddr *)&own, &own_length) ||
	    getpeername(fd, (struct sockaddr *)&peer, &peer_length))
		return false;
	addresses->port = ((struct sockaddr_in *)&peer)->sin_port; /* same offset in IPv6 */
	return soft_gid_from_sockaddr(&addresses->own, (struct sockaddr *)&own) &&
	       soft_gid_from_sockaddr(&addresses->peer, (struct sockaddr *)&peer);
}

static size_t gathered(const struct soft_tcp_path *tcp)
{
	return tcp->output_length - tcp->output_sent;
}

/* ---- the end ------------------------------------------------------------------------------- */

void soft_tcp_path_release(struct soft_tcp_path *tcp)
{
	if (--tcp->use_count || tcp->watch.fd >= 0 || !tcp->path.dead)
		return;
	free(tcp->output);
	free(tcp);
}

/* Returns how many bytes of our output the peer had not read when it closed the stream, or
 * SOFT_UNREAD_UNKNOWN. The peer has read all acknowledged bytes, because closing a socket with
 * unread input would have reset the connection. */
static int64_t unread_by_peer(const struct soft_tcp_path *tcp)
{
	int unconfirmed;

	if (ioctl(tcp->watch.fd, SIOCOUTQ, &unconfirmed) || unconfirmed < 0)
		return SOFT_UNREAD_UNKNOWN;
	return unconfirmed + (int64_t)gathered(tcp);
}

/* End the path and close the socket. `unread` is the number of bytes at the end of the output that
 * the peer had not read when it closed the stream, or SOFT_UNREAD_UNKNOWN. */
static void finish(struct soft_tcp_path *tcp, int error, int64_t unread)
{
	const struct linger reset_on_close = {.l_onoff = 1};

	soft_assert_locked();
	if (tcp->path.dead)
		return;
	tcp->use_count++;
	/* Reset the connection if any data is discarded. After a regular close, the peer would
	 * assume that this side has handled everything. */
	bool resets = tcp->state == SOFT_TCP_UP
			      ? error != 0
			      : gathered(tcp) || soft_path_has_waiting(&tcp->path);

	soft_timer_stop(&tcp->timer);
	soft_timer_stop(&tcp->liveness_timer);
	soft_list_remove(&tcp->delayed);
	soft_place_release(&tcp->place);
	soft_list_remove(&tcp->node);
	soft_path_finish(&tcp->path, error, unread);
	if (resets)
		setsockopt(tcp->watch.fd, SOL_SOCKET, SO_LINGER, &reset_on_close,
			   sizeof(reset_on_close));
	soft_watch_close(&tcp->watch);
	soft_tcp_path_release(tcp);
}

/* Close a path that has not come up or has not been given a channel in time, or that has lingered
 * long enough. */
static void timed_out(struct soft_timer *timer)
{
	struct soft_tcp_path *tcp = soft_container(timer, struct soft_tcp_path, timer);

	if (tcp->state != SOFT_TCP_UP || soft_list_empty(&tcp->path.chans))
		finish(tcp, tcp->state == SOFT_TCP_CLOSING ? 0 : ETIMEDOUT, SOFT_UNREAD_UNKNOWN);
}

/* Close an idle stream after sending its last frames and ENDs. The socket stays open until the peer
 * has closed its side, because closing a socket with unread data would reset the connection. */
static void idle(struct soft_path *path, bool by_peer)
{
	struct soft_tcp_path *tcp = soft_tcp_path_of(path);

	if (tcp->state == SOFT_TCP_CLOSING)
		return;
	if (by_peer && !gathered(tcp)) { /* neither side has anything left to send */
		finish(tcp, 0, SOFT_UNREAD_UNKNOWN);
		return;
	}
	soft_place_release(&tcp->place);
	soft_timer_start(&tcp->timer, soft_now() + (tcp->state == SOFT_TCP_UP ? LINGER_NS : 0));
	tcp->state = SOFT_TCP_CLOSING;
	soft_defer(&path->flush);
}

/* ---- sending ------------------------------------------------------------------------------- */

/* Send the gathered records, followed by `bytes` bytes from iov[1] to iov[count - 1]. The caller
 * leaves iov[0] free for the gathered records. Returns how many of the `bytes` bytes the socket has
 * accepted. */
static size_t send_with_gathered(struct soft_tcp_path *tcp, struct iovec *iov, int count,
				 size_t bytes)
{
	size_t before = gathered(tcp);
	struct msghdr message = {.msg_iov = iov + !before, .msg_iovlen = (size_t)(count - !before)};
	ssize_t n = 0;

	if (before)
		iov[0] = (struct iovec){tcp->output + tcp->output_sent, before};
	/* Send nothing once the path is broken. If a record was lost for lack of memory, the peer
	 * would mistake later bytes for the missing ones. */
	if (!(soft_ports_down & tcp->path.ports) && !tcp->path.pending_error)
		do
			n = sendmsg(tcp->watch.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
		while (n < 0 && errno == EINTR);
	/* Do not report a closed stream here. It may still contain records from the peer, and the
	 * end is detected after reading them. */
	if (n < 0 && errno != EAGAIN && errno != EPIPE && errno != ECONNRESET)
		soft_path_schedule_failure(&tcp->path, errno);
	size_t sent = n > 0 ? (size_t)n : 0;

	tcp->blocked = sent < before + bytes;
	if (sent)
		soft_liveness_sent(tcp);
	if (sent < before) {
		tcp->output_sent += sent;
		return 0;
	}
	tcp->output_sent = tcp->output_length = 0;
	return sent - before;
}

/* Copy bytes to the gathered output. */
static void append(struct soft_tcp_path *tcp, const void *bytes, size_t length)
{
	size_t capacity = tcp->output_capacity;

	if (tcp->output_length + length > capacity) {
		while (capacity < tcp->output_length + length)
			capacity = capacity ? 2 * capacity : MAX_COPIED;
		uint8_t *output = realloc(tcp->output, capacity);

		if (!output) {
			soft_path_schedule_failure(&tcp->path, ENOMEM);
			return;
		}
		tcp->output = output;
		tcp->output_capacity = capacity;
	}
	memcpy(tcp->output + tcp->output_length, bytes, length);
	tcp->output_length += length;
}

static void send_gathered(struct soft_tcp_path *tcp)
{
	struct iovec iov[1];

	if (tcp->blocked || !gathered(tcp) || tcp->state == SOFT_TCP_CONNECTING)
		return;
	send_with_gathered(tcp, iov, 1, 0);
	/* Free a buffer that has grown for a long record. */
	if (!gathered(tcp) && tcp->output_capacity > MAX_GATHERED) {
		free(tcp->output);
		tcp->output = NULL;
		tcp->output_capacity = 0;
	}
}

/* Returns the number of record bytes that may be written, after sending the gathered records if
 * they have reached their limit (soft_path_calls.room). */
static ssize_t room(struct soft_path *path, size_t min_room)
{
	struct soft_tcp_path *tcp = soft_tcp_path_of(path);

	(void)min_room;
	if (gathered(tcp) >= MAX_GATHERED)
		send_gathered(tcp);
	if (tcp->state < SOFT_TCP_UP || tcp->blocked || gathered(tcp) >= MAX_GATHERED)
		return 0;
	/* While channels wait, each of them writes a single record in turn. */
	return soft_path_has_waiting(path) ? MAX_RECORD : MAX_BATCH;
}

/* Gather short records for one send, or send long ones immediately from the caller's memory
 * (soft_path_calls.put). */
static int put(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
	       const struct iovec *iov, const struct soft_record_end *ends, int count)
{
	struct soft_tcp_path *tcp = soft_tcp_path_of(path);
	uint8_t headers[SOFT_PATH_RECORDS][RECORD_HEADER];
	struct iovec all[1 + SOFT_PATH_RECORDS + SOFT_PATH_IOVECS];
	size_t sent = 0, accepted = 0, bytes = 0;
	int used = 1, accepted_count = 0; /* send_with_gathered() needs all[0] */

	for (int i = 0, at = 0; i < count; bytes = ends[i++].bytes) {
		soft_put32(headers[i], (uint32_t)kind << 24 | (uint32_t)(ends[i].bytes - bytes));
		soft_put32(headers[i] + 4, to);
		soft_put32(headers[i] + 8, from);
		all[used++] = (struct iovec){headers[i], RECORD_HEADER};
		while (at < ends[i].iovecs)
			all[used++] = iov[at++];
	}
	if (bytes > MAX_COPIED && !tcp->blocked)
		sent = send_with_gathered(tcp, all, used, bytes + (size_t)count * RECORD_HEADER);
	/* Accept every record of which a part was sent, because the rest of it must follow. Accept
	 * at least one record, because room() has promised room for it. */
	do
		accepted += RECORD_HEADER + ends[accepted_count].bytes -
			    (accepted_count ? ends[accepted_count - 1].bytes : 0);
	while (++accepted_count < count && accepted < sent);
	/* Gather the part of the accepted records that the socket has not accepted. */
	size_t to_skip = sent, to_gather = accepted - sent;

	for (int i = 1; to_gather; i++) {
		size_t skip = to_skip < all[i].iov_len ? to_skip : all[i].iov_len;
		size_t part = all[i].iov_len - skip < to_gather ? all[i].iov_len - skip : to_gather;

		if (part)
			append(tcp, (uint8_t *)all[i].iov_base + skip, part);
		to_skip -= skip;
		to_gather -= part;
	}
	path->position += (size_t)accepted_count * RECORD_HEADER;
	return accepted_count;
}

static const struct soft_path_calls tcp_calls = {
	.name = AIORDMA_WIRE_TCP,
	.max_frame = SOFT_FRAME_MAX,
	.max_frames = SOFT_PATH_FRAMES,
	.max_record = MAX_RECORD,
	.room = room,
	.put = put,
	.idle = idle,
	.silence_limit_changed = soft_liveness_update,
};

/* Returns whether output may be delayed until the next step. This reduces the number of system
 * calls if the application handles completions of many queue pairs between two polls. */
static bool may_delay(struct soft_tcp_path *tcp)
{
	return tcp->state == SOFT_TCP_UP && gathered(tcp) && gathered(tcp) < MAX_GATHERED &&
	       !tcp->blocked && !soft_path_has_waiting(&tcp->path) &&
	       soft_engine_may_delay_output(&tcp->last_step_unlocks);
}

/* Send gathered output before the lock is released or after the socket has become writable. */
static void flush(struct soft_deferred *deferred)
{
	struct soft_tcp_path *tcp = soft_container(deferred, struct soft_tcp_path, path.flush);

	if (tcp->path.pending_error) {
		finish(tcp, tcp->path.pending_error, SOFT_UNREAD_UNKNOWN);
		return;
	}
	if (tcp->state == SOFT_TCP_CONNECTING)
		return;
	if (!tcp->must_flush && may_delay(tcp)) {
		if (soft_list_empty(&tcp->delayed))
			soft_list_append(&soft_device.tcp->delayed, &tcp->delayed);
		soft_engine_set_has_delayed_output(true);
		return;
	}
	tcp->must_flush = false;
	send_gathered(tcp);
	bool waits =
		gathered(tcp) || (tcp->state >= SOFT_TCP_UP && soft_path_has_waiting(&tcp->path));

	if (tcp->state == SOFT_TCP_CLOSING && !waits)
		shutdown(tcp->watch.fd, SHUT_WR);
	int rc = soft_watch(&tcp->watch, EPOLLIN | (waits ? EPOLLOUT : 0u));

	if (rc)
		finish(tcp, rc, SOFT_UNREAD_UNKNOWN);
}

void soft_tcp_paths_send_delayed(void)
{
	soft_list_drain (struct soft_tcp_path, tcp, &soft_device.tcp->delayed, delayed) {
		soft_list_remove(&tcp->delayed);
		tcp->must_flush = true;
		soft_defer(&tcp->path.flush);
	}
}

/* Send pending output after the socket has become writable. */
static void writable(struct soft_tcp_path *tcp)
{
	tcp->blocked = false;
	send_gathered(tcp);
	uint64_t begin = tcp->path.position;
	bool has_written = true;

	/* Let each waiting channel write one record, and repeat while there is room. */
	while (!tcp->blocked && tcp->state >= SOFT_TCP_UP && has_written &&
	       tcp->path.position - begin < SOFT_STEP_BYTES) {
		uint64_t before = tcp->path.position;

		soft_path_offer_room(&tcp->path);
		has_written = tcp->path.position != before;
	}
	soft_defer(&tcp->path.flush);
}

/* ---- receiving ----------------------------------------------------------------------------- */

/* Choose the buffers for the next read, and store their total size in `length`. The first `direct`
 * bytes of the input go directly to the payload's destination. Returns the number of iovecs. */
static int choose_read_buffers(struct soft_tcp_path *tcp, size_t budget, struct iovec *iov,
			       size_t *direct, size_t *length)
{
	struct soft_chan *chan = tcp->path.receiving;
	size_t read_ahead = SOFT_STAGING_SIZE;
	int count = 0;

	*direct = 0;
	if (chan && tcp->remaining >= SOFT_DIRECT_MIN) {
		count = chan->calls->map_payload(
			chan, tcp->remaining < budget ? tcp->remaining : budget, iov, SOFT_MAX_SGE);
		if (tcp->path.receiving != chan) /* the call has ended the channel */
			count = 0;
		for (int i = 0; i < count; i++)
			*direct += iov[i].iov_len;
	}
	/* While long payloads arrive, read only the header that follows a payload. The next payload
	 * then stays in the socket until it can be received directly. */
	if (*direct)
		tcp->receiving_bulk = true;
	if (*direct && *direct < tcp->remaining)
		read_ahead = SOFT_FRAME_HEADER;
	else if (*direct || (tcp->receiving_bulk && !tcp->remaining))
		read_ahead = RECORD_HEADER + SOFT_FRAME_HEADER - tcp->input_length;
	iov[count++] = (struct iovec){.iov_base = soft_scratch()->input, .iov_len = read_ahead};
	*length = *direct + read_ahead;
	return count;
}

/* Handle the header of a record. Returns false after a protocol error. */
static bool receive_header(struct soft_tcp_path *tcp)
{
	uint32_t word = soft_get32(tcp->input);

	tcp->input_length = 0;
	tcp->kind = (enum soft_record_kind)(word >> 24);
	tcp->remaining = word & 0xffffff;
	tcp->to = soft_get32(tcp->input + 4);
	tcp->from = soft_get32(tcp->input + 8);
	if (tcp->kind == SOFT_RECORD_DATA) {
		tcp->receiving_bulk &= tcp->remaining >= SOFT_DIRECT_MIN;
		return tcp->remaining <= MAX_RECORD &&
		       soft_path_receive(&tcp->path, tcp->kind, tcp->to, tcp->from, NULL,
					 tcp->remaining);
	}
	/* A control record is empty or contains a handshake. */
	return tcp->remaining == 0
		       ? soft_path_receive(&tcp->path, tcp->kind, tcp->to, tcp->from, NULL, 0)
		       : tcp->remaining == SOFT_HANDSHAKE_SIZE;
}

/* Handle the next payload bytes of a record. Returns false after a protocol error. */
static bool receive_payload(struct soft_tcp_path *tcp, const uint8_t *data, size_t length)
{
	tcp->remaining -= (uint32_t)length;
	if (tcp->kind == SOFT_RECORD_DATA) {
		struct soft_chan *chan = tcp->path.receiving;

		if (chan)
			chan->calls->data(chan, data, length, tcp->remaining);
		return true;
	}
	memcpy(tcp->input + tcp->input_length, data, length);
	tcp->input_length += (uint32_t)length;
	if (tcp->remaining)
		return true;
	tcp->input_length = 0;
	return soft_path_receive(&tcp->path, tcp->kind, tcp->to, tcp->from, tcp->input,
				 SOFT_HANDSHAKE_SIZE);
}

/* Handle received bytes, which may end in the middle of a header or a payload. */
static void parse(struct soft_tcp_path *tcp, const uint8_t *data, size_t length)
{
	while (length && tcp->state == SOFT_TCP_UP && !tcp->path.dead) {
		size_t part = tcp->remaining ? tcp->remaining : RECORD_HEADER - tcp->input_length;
		bool whole = part <= length, valid = true;

		if (!whole)
			part = length;
		if (tcp->remaining) {
			valid = receive_payload(tcp, data, part);
		} else {
			memcpy(tcp->input + tcp->input_length, data, part);
			tcp->input_length += (uint32_t)part;
			if (whole)
				valid = receive_header(tcp);
		}
		if (!valid)
			finish(tcp, EPROTO, SOFT_UNREAD_UNKNOWN);
		data += part;
		length -= part;
	}
}

/* Read and handle input until the socket is empty or this step's byte limit is reached. */
static void read_input(struct soft_tcp_path *tcp)
{
	size_t budget = soft_step_byte_budget();

	while (budget && tcp->state >= SOFT_TCP_UP && !tcp->path.dead) {
		struct iovec iov[SOFT_MAX_SGE + 1];
		size_t direct, length;
		int count = choose_read_buffers(tcp, budget, iov, &direct, &length);
		ssize_t n = readv(tcp->watch.fd, iov, count);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n <= 0) {
			/* A process closes a stream only when the stream has no channels left. If
			 * channels remain, the peer's process has ended. */
			finish(tcp, n ? errno : ECONNRESET,
			       n ? SOFT_UNREAD_UNKNOWN : unread_by_peer(tcp));
			break;
		}
		budget -= (size_t)n < budget ? (size_t)n : budget;
		size_t placed = (size_t)n < direct ? (size_t)n : direct;

		if (placed) {
			struct soft_chan *chan = tcp->path.receiving;

			tcp->remaining -= (uint32_t)placed;
			chan->calls->payload_stored(chan, placed, tcp->remaining);
		}
		parse(tcp, soft_scratch()->input, (size_t)n - placed);
		if ((size_t)n < length)
			break; /* epoll reports further input */
	}
}

void soft_tcp_path_input(struct soft_tcp_path *tcp, const void *bytes, size_t length)
{
	soft_assert_locked();
	tcp->use_count++;
	parse(tcp, bytes, length);
	soft_tcp_path_release(tcp);
}

/* ---- the handshake ------------------------------------------------------------------------- */

static void send_hello(struct soft_tcp_path *tcp)
{
	uint8_t bytes[SOFT_HANDSHAKE_SIZE];

	soft_hello_encode(bytes, &(struct soft_hello){.kind = SOFT_HELLO_STREAM});
	append(tcp, bytes, sizeof(bytes));
	soft_defer(&tcp->path.flush);
}

/* Let channels use the path, because both sides have sent the handshake or the CM has created the
 * stream. */
static void handshake_done(struct soft_tcp_path *tcp)
{
	tcp->state = SOFT_TCP_UP;
	/* Equal addresses mean that both ends are on this host. Nothing is lost on such a stream,
	 * so it needs no liveness checks. */
	tcp->needs_liveness_checks = !soft_set_option(tcp->watch.fd, IPPROTO_TCP, TCP_NODELAY, 1) &&
				     get_socket_addresses(tcp->watch.fd, &tcp->socket_addresses) &&
				     memcmp(&tcp->socket_addresses.own, &tcp->socket_addresses.peer,
					    sizeof(tcp->socket_addresses.own));
	tcp->path.peer_hca = soft_gid_hca_number(&tcp->socket_addresses.peer);
	soft_path_offer_room(&tcp->path);
	soft_defer(&tcp->path.flush);
	soft_liveness_update(&tcp->path);
}

static void report_version(uint32_t version)
{
	if (soft_device.tcp->version_reported)
		return;
	soft_device.tcp->version_reported = true;
	fprintf(stderr,
		"aiordma: a peer's embedded device uses protocol version %u, but this device uses "
		"version %d; install the same version of aiordma on both sides\n",
		version, SOFT_WIRE_VERSION);
}

static void receive_hello(struct soft_tcp_path *tcp)
{
	struct soft_hello hello;
	/* Do not read beyond the handshake, because records follow it. */
	ssize_t n = recv(tcp->watch.fd, tcp->input + tcp->input_length,
			 SOFT_HANDSHAKE_SIZE - tcp->input_length, 0);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		finish(tcp, n ? errno : ECONNRESET, SOFT_UNREAD_UNKNOWN);
		return;
	}
	tcp->input_length += (uint32_t)n;
	if (tcp->input_length < SOFT_HANDSHAKE_SIZE)
		return;
	tcp->input_length = 0;
	bool valid = soft_hello_decode(tcp->input, &hello) && hello.kind == SOFT_HELLO_STREAM;
	uint32_t version = soft_hello_version(tcp->input);

	if (version && version != SOFT_WIRE_VERSION)
		report_version(version);
	/* Respond to another version too, so that the peer can report the mismatch. */
	if (version && !tcp->is_initiator)
		send_hello(tcp);
	if (!valid) {
		send_gathered(tcp);
		finish(tcp, EPROTONOSUPPORT, SOFT_UNREAD_UNKNOWN);
		return;
	}
	if (tcp->is_initiator)
		soft_timer_stop(&tcp->timer);
	else
		soft_timer_start(&tcp->timer, soft_now() + INTRODUCED_NS);
	handshake_done(tcp);
}

/* Start the handshake after connect(2) has succeeded. */
static void connected(struct soft_tcp_path *tcp)
{
	int error = 0;
	socklen_t length = sizeof(error);

	if (getsockopt(tcp->watch.fd, SOL_SOCKET, SO_ERROR, &error, &length))
		error = errno;
	if (error) {
		finish(tcp, error, SOFT_UNREAD_UNKNOWN);
		return;
	}
	tcp->state = SOFT_TCP_HELLO;
	send_hello(tcp);
}

static void ready(struct soft_fd_watch *watch)
{
	struct soft_tcp_path *tcp = soft_container(watch, struct soft_tcp_path, watch);

	tcp->use_count++;
	if (tcp->state == SOFT_TCP_CONNECTING) {
		connected(tcp);
	} else {
		if (watch->events & EPOLLOUT)
			writable(tcp);
		if (watch->events & ~(uint32_t)EPOLLOUT && !tcp->path.dead) {
			if (tcp->state == SOFT_TCP_HELLO)
				receive_hello(tcp);
			else
				read_input(tcp); /* also detects errors */
		}
	}
	soft_tcp_path_release(tcp);
}

/* ---- creating paths ------------------------------------------------------------------------ */

/* Returns the port bit of the device to which the socket's local address belongs. */
static uint32_t port_of(int fd)
{
	struct sockaddr_storage own = {0};
	socklen_t length = sizeof(own);
	union ibv_gid gid;

	(void)!getsockname(fd, (struct sockaddr *)&own, &length);
	soft_gid_from_sockaddr(&gid, (struct sockaddr *)&own);
	return soft_gid_port_bit(&gid);
}

/* Create a path over `fd`, taking ownership of it, and watch the socket. Returns NULL if `fd` is -1
 * or on another failure. */
static struct soft_tcp_path *create(int fd, enum soft_tcp_state state, uint32_t events)
{
	struct soft_tcp_path *tcp = calloc(1, sizeof(*tcp));

	if (!tcp || fd < 0) {
		free(tcp);
		soft_close_fd(&fd);
		return NULL;
	}
	soft_path_init(&tcp->path, &tcp_calls, flush);
	tcp->path.ports = port_of(fd);
	tcp->watch = (struct soft_fd_watch){.fd = fd, .ready = ready, .ports = tcp->path.ports};
	tcp->state = state;
	tcp->timer.expired = timed_out;
	tcp->liveness_timer.expired = soft_liveness_check;
	soft_list_init(&tcp->place.node);
	soft_list_init(&tcp->delayed);
	soft_list_append(&soft_device.tcp->streams, &tcp->node);
	if (soft_watch(&tcp->watch, events)) {
		finish(tcp, ENOMEM, SOFT_UNREAD_UNKNOWN);
		return NULL;
	}
	return tcp;
}

void soft_tcp_path_accepted(int fd, const struct sockaddr_storage *peer)
{
	soft_assert_locked();
	struct soft_tcp_path *tcp = create(fd, SOFT_TCP_HELLO, EPOLLIN);
	uint64_t now = soft_now();

	if (!tcp)
		return;
	soft_places_add(&soft_device.tcp->unverified_streams, &tcp->place, peer);
	tcp->guesses_paid_at = now;
	soft_timer_start(&tcp->timer, now + FIRST_BYTES_NS);
	struct soft_place *evicted = soft_places_find_victim(
		&soft_device.tcp->unverified_streams, soft_places_limit(MAX_UNVERIFIED_STREAMS));

	if (evicted)
		finish(soft_container(evicted, struct soft_tcp_path, place), ECONNRESET,
		       SOFT_UNREAD_UNKNOWN);
}

struct soft_tcp_path *soft_tcp_path_adopt(int fd)
{
	soft_assert_locked();
	struct soft_tcp_path *tcp = create(fd, SOFT_TCP_UP, EPOLLIN);

	if (!tcp)
		return NULL;
	tcp->created_by_cm = true;
	handshake_done(tcp);
	return tcp;
}

struct soft_tcp_path *soft_tcp_path_find_shared(int fd, uint16_t path_port)
{
	struct soft_tcp_addresses addresses;

	if (!path_port || !get_socket_addresses(fd, &addresses))
		return NULL;
	soft_list_each (struct soft_tcp_path, tcp, &soft_device.tcp->streams, node)
		if (tcp->path_port == path_port && tcp->state == SOFT_TCP_UP && !tcp->stale &&
		    !memcmp(&tcp->socket_addresses, &addresses, sizeof(addresses)))
			return tcp;
	return NULL;
}

bool soft_tcp_path_has_addresses_of(const struct soft_tcp_path *tcp, int fd)
{
	struct soft_tcp_addresses addresses;

	return get_socket_addresses(fd, &addresses) &&
	       !memcmp(&tcp->socket_addresses.own, &addresses.own, sizeof(addresses.own)) &&
	       !memcmp(&tcp->socket_addresses.peer, &addresses.peer, sizeof(addresses.peer));
}

struct soft_tcp_path *soft_tcp_path_to(const struct soft_tcp_addresses *ends)
{
	soft_assert_locked();
	struct sockaddr_storage address;
	socklen_t length;

	soft_list_each (struct soft_tcp_path, tcp, &soft_device.tcp->streams, node)
		if (tcp->is_initiator && tcp->state <= SOFT_TCP_UP && !tcp->stale &&
		    !memcmp(&tcp->requested_addresses, ends, sizeof(*ends)))
			return tcp;
	length = soft_gid_to_sockaddr(&ends->peer, &ends->own, ends->port, &address);
	int fd = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	/* Bind to the queue pair's own address, so that the connection uses the same network. */
	if (fd >= 0 && (soft_gid_bind(fd, &ends->own) ||
			(connect(fd, (struct sockaddr *)&address, length) && errno != EINPROGRESS)))
		soft_close_fd(&fd);
	struct soft_tcp_path *tcp = create(fd, SOFT_TCP_CONNECTING, EPOLLOUT);

	if (!tcp)
		return NULL;
	tcp->is_initiator = true;
	tcp->requested_addresses = *ends;
	soft_timer_start(&tcp->timer, soft_now() + CONNECTING_NS);
	return tcp;
}

/* Close all streams after passing as much pending output to the kernel as it accepts. */
static void stop(void)
{
	soft_list_drain (struct soft_tcp_path, tcp, &soft_device.tcp->streams, node) {
		send_gathered(tcp);
		finish(tcp, 0, SOFT_UNREAD_UNKNOWN);
	}
}

static void port_changed(enum soft_port_change change, uint32_t ports)
{
	(void)ports;
	if (change != SOFT_PORT_UP)
		return;
	soft_list_each (struct soft_tcp_path, tcp, &soft_device.tcp->streams, node) {
		tcp->blocked = false;
		soft_defer(&tcp->path.flush);
	}
}

/* Free the paths in a forked child, which must not send anything on its parent's streams. */
static void forget(void)
{
	soft_list_drain (struct soft_tcp_path, tcp, &soft_device.tcp->streams, node) {
		soft_list_remove(&tcp->node);
		soft_path_forget(&tcp->path);
		soft_list_remove(&tcp->delayed);
		free(tcp->output);
		free(tcp);
	}
	soft_places_init(&soft_device.tcp->unverified_streams);
}

static void create_part(void)
{
	soft_device.tcp = soft_alloc_part(sizeof(struct soft_tcp));
	soft_list_init(&soft_device.tcp->streams);
	soft_list_init(&soft_device.tcp->delayed);
	soft_places_init(&soft_device.tcp->unverified_streams);
}

const struct soft_subsystem soft_tcp_subsystem = {
	.create = create_part,
	.start = soft_liveness_configure,
	.stop = stop,
	.forked = forget,
	.port_changed = port_changed,
};
