/* Carrier for connections. Each handshake uses its own TCP connection to the service's port.
 *
 * Data from a socket is not trusted. At most INPUT_CAPACITY bytes are buffered, and bytes that are
 * not part of a message end the connection. Reading stops with the handshake, because the data
 * after it belongs to the queue pair.
 *
 * Any process can connect to the port. A connection is half open until its complete REQ arrives,
 * and only then is it passed to the listener. The number and duration of half-open connections are
 * limited, and each uses about a kilobyte. If there are too many, one is evicted (fair_share.h). A
 * peer that follows the protocol sends REQ immediately and thereby releases its place.
 */
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "cm_internal.h"
#include "inject/inject.h"
#include "link/link.h"

enum {
	INPUT_CAPACITY = 2 * SOFT_MAD_SIZE,
	MAYBE_FREED = -1, /* result of handling a message after which the stream must not be used */
};

struct listener {
	struct soft_cm_listener listener;
	struct soft_acceptor acceptor;
};

struct stream {
	struct soft_cm_link link;
	struct soft_fd_watch watch;
	bool connecting;
	bool retry_pending; /* between two attempts to connect, or before the first one */
	bool handshake_done; /* whether reading has stopped after the handshake */
	struct listener *listener; /* NULL unless half open */
	struct sockaddr_storage peer; /* set only for an accepted connection */
	size_t input_length;
	uint8_t input[INPUT_CAPACITY];
};

static const uint32_t read_events = EPOLLIN | EPOLLRDHUP;

static struct stream *stream_of(const struct soft_cm_link *link)
{
	return soft_container(link, struct stream, link);
}

/* Free the stream without closing its socket. Returns the socket, which is no longer watched. */
static int release_socket(struct stream *stream)
{
	int fd = stream->watch.fd;

	soft_cm_link_stop(&stream->link);
	soft_unwatch(&stream->watch);
	free(stream);
	return fd;
}

static void end(struct soft_cm_link *link)
{
	close(release_socket(stream_of(link)));
}

/* ---- messages ------------------------------------------------------------------------------ */

/* Report an error to the stream's owner. A half-open stream has no owner, so it is closed. */
static void failed(struct stream *stream, int error)
{
	/* Tell the peer if a REQ has an unsupported protocol version. Other invalid input gets no
	 * response. */
	if (stream->listener && error == EPROTONOSUPPORT)
		soft_cm_link_reject(&stream->link, SOFT_CM_REASON_INVALID_VERSION);
	else
		soft_cm_link_failed(&stream->link, error);
}

/* Handle one message. Returns 0, an errno value if the stream has failed, or MAYBE_FREED. */
static int handle_message(struct stream *stream, const struct soft_cm_message *message)
{
	struct listener *listener = stream->listener;

	/* Reject repeated messages and unexpected types. A peer could otherwise make this process
	 * read meaningless messages forever. */
	if (listener
		    ? message->type != SOFT_CM_REQ
		    : message->type > SOFT_CM_REJ || message->type <= stream->link.highest_received)
		return EPROTO;
	if (!listener)
		return soft_cm_link_received(&stream->link, message) ? 0 : MAYBE_FREED;
	stream->listener = NULL;
	soft_place_release(&stream->link.place);
	soft_cm_link_clear_deadline(&stream->link);
	return soft_cm_request_received(&listener->listener, &stream->link, message) ? 0
										     : MAYBE_FREED;
}

/* Returns whether the fault spec drops a message received by the device at the stream's local
 * address. */
static bool is_lost(const struct stream *stream)
{
	struct sockaddr_storage local = {0}, peer = {0};
	union ibv_gid gid;

	if (!soft_faults_set)
		return false;
	stream->link.carrier->get_addresses(&stream->link, &local, &peer);
	soft_gid_from_sockaddr(&gid, (struct sockaddr *)&local);
	return soft_fault_should_inject(SOFT_FAULT_HANDSHAKE, soft_gid_port_bit(&gid), 0);
}

/* Handle the complete messages in the input. Returns 0, an errno value if the stream has failed, or
 * MAYBE_FREED. */
static int handle_messages(struct stream *stream)
{
	struct soft_cm_message message;
	int error;

	while (stream->input_length) {
		error = soft_cm_decode(stream->input, stream->input_length, &message);
		if (error)
			return error == EAGAIN ? 0 : error;
		stream->input_length -= SOFT_MAD_SIZE;
		memmove(stream->input, stream->input + SOFT_MAD_SIZE, stream->input_length);
		error = is_lost(stream) ? 0 : handle_message(stream, &message);
		if (error)
			return error;
	}
	return 0;
}

static void read_messages(struct stream *stream)
{
	int error = 0;

	while (!error) {
		ssize_t got = recv(stream->watch.fd, stream->input + stream->input_length,
				   sizeof(stream->input) - stream->input_length, 0);

		if (got < 0 && errno == EAGAIN)
			return;
		if (got > 0) {
			stream->input_length += (size_t)got;
			error = handle_messages(stream);
		} else if (!got || errno != EINTR) {
			error = got ? errno : ECONNRESET;
		}
	}
	if (error != MAYBE_FREED)
		failed(stream, error);
}

static int try_connecting(struct stream *stream)
{
	const struct soft_cm_id *id = stream->link.owner;
	const struct sockaddr *to = &id->id.route.addr.dst_addr;
	int error;

	stream->retry_pending = false;
	do /* on Linux, the first connect() after a failure only reports ECONNABORTED */
		error = connect(stream->watch.fd, to, soft_cm_address_length(to)) ? errno : 0;
	while (error == ECONNABORTED);
	if (error && error != EINPROGRESS && error != ECONNREFUSED)
		return error;
	/* EPOLLOUT is reported as soon as the attempt has succeeded or failed. */
	return soft_watch(&stream->watch, EPOLLOUT);
}

/* Send a message. While the stream is connecting, a REQ only starts the next attempt to connect and
 * is sent afterwards. Each side sends at most three MADs per handshake. These fit into any send
 * buffer, so a socket that does not accept them is broken. */
static int send_message(struct soft_cm_link *link, const struct soft_cm_message *message)
{
	struct stream *stream = stream_of(link);
	uint8_t bytes[SOFT_MAD_SIZE];
	ssize_t sent;

	if (stream->connecting)
		return stream->retry_pending && message->type == SOFT_CM_REQ
			       ? try_connecting(stream)
			       : 0;
	soft_cm_encode(message, bytes);
	do
		sent = send(stream->watch.fd, bytes, sizeof(bytes), MSG_NOSIGNAL | MSG_DONTWAIT);
	while (sent < 0 && errno == EINTR);
	if (sent < 0)
		return errno == EAGAIN ? ENOBUFS : errno;
	return sent == sizeof(bytes) ? 0 : ENOBUFS;
}

/* ---- connecting ---------------------------------------------------------------------------- */

static void finish_connecting(struct stream *stream)
{
	struct sockaddr_storage local = {0}, peer = {0};
	socklen_t local_length = sizeof(local), peer_length = sizeof(peer);
	int error = 0;
	socklen_t length = sizeof(error);

	if (getsockopt(stream->watch.fd, SOL_SOCKET, SO_ERROR, &error, &length))
		error = errno;
	if (!error && (getpeername(stream->watch.fd, (struct sockaddr *)&peer, &peer_length) ||
		       getsockname(stream->watch.fd, (struct sockaddr *)&local, &local_length)))
		error = errno == ENOTCONN ? ECONNRESET : errno; /* closed after the check above */
	if ((error == ECONNREFUSED || error == ECONNRESET) && soft_cm_link_retry(&stream->link)) {
		soft_unwatch(&stream->watch);
		stream->retry_pending = true;
		return;
	}
	/* TCP connects a socket to itself if its local port equals the destination port
	 * (simultaneous open, RFC 9293). In this case the port has no listener. */
	if (!error && local_length == peer_length && !memcmp(&local, &peer, local_length))
		error = ECONNREFUSED;
	if (!error)
		error = soft_watch(&stream->watch, read_events);
	if (!error) {
		stream->connecting = false;
		error = send_message(&stream->link, &stream->link.last_sent);
	}
	if (error)
		failed(stream, error);
}

static void ready(struct soft_fd_watch *watch)
{
	struct stream *stream = soft_container(watch, struct stream, watch);

	if (stream->connecting)
		finish_connecting(stream);
	else if (!stream->handshake_done)
		read_messages(stream);
	else if (watch->events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
		/* Ignore unread messages. A closed stream counts as an orderly shutdown unless the
		 * socket reports an error. */
		failed(stream, watch->events & EPOLLERR ? ECONNRESET : 0);
}

/* Create a stream and take ownership of the non-blocking `fd`, which is closed on failure. Returns
 * NULL if there is not enough memory. */
static struct stream *stream_new(int fd)
{
	struct stream *stream = calloc(1, sizeof(*stream));

	if (!stream) {
		close(fd);
		return NULL;
	}
	/* Every frame is a complete request or response, so Nagle's algorithm would only delay
	 * it. */
	(void)soft_set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
	soft_cm_link_init(&stream->link, &soft_cm_stream);
	stream->watch.fd = fd;
	stream->watch.ready = ready;
	return stream;
}

/* Create a stream for the id, which takes over the id's socket. send_message connects it when it
 * sends REQ. */
static struct soft_cm_link *start_connecting(struct soft_cm_id *id, int *error)
{
	struct stream *stream = stream_new(id->sock);

	id->sock = -1;
	*error = ENOMEM;
	if (!stream)
		return NULL;
	/* Let a listener bind the port even while this connection exists or is in TIME_WAIT. */
	(void)soft_set_option(stream->watch.fd, SOL_SOCKET, SO_REUSEADDR, 1);
	stream->connecting = stream->retry_pending = true;
	return &stream->link;
}

/* ---- accepting ----------------------------------------------------------------------------- */

/* Accept a connection, and wait for its REQ. If too many connections are half open now, close one
 * of them (fair_share.h). */
static void accept_stream(struct soft_acceptor *acceptor, int fd,
			  const struct sockaddr_storage *peer)
{
	struct soft_place *evicted;
	struct stream *stream = stream_new(fd);

	if (!stream)
		return;
	if (soft_watch(&stream->watch, read_events)) {
		end(&stream->link);
		return;
	}
	stream->listener = soft_container(acceptor, struct listener, acceptor);
	stream->peer = *peer;
	soft_places_add(&soft_device.cm->half_open, &stream->link.place, peer);
	soft_cm_link_set_deadline(&stream->link, soft_device.cm->limits.request_ms);
	evicted = soft_places_find_victim(&soft_device.cm->half_open, soft_cm_max_half_open());
	if (evicted)
		end(soft_container(evicted, struct soft_cm_link, place));
}

/* Close the oldest half-open connection when there is no descriptor for a new one
 * (soft_acceptor.release_descriptor). Returns whether a connection was closed. */
static bool release_descriptor(void)
{
	struct soft_place *oldest = soft_places_oldest(&soft_device.cm->half_open);

	if (oldest)
		end(soft_container(oldest, struct soft_cm_link, place));
	return oldest;
}

static struct soft_cm_listener *start_listening(struct soft_cm_id *id, int *error)
{
	struct listener *listener = calloc(1, sizeof(*listener));

	*error = ENOMEM;
	if (!listener)
		return NULL;
	listener->acceptor.release_descriptor = release_descriptor;
	/* Let another listener bind the port while connections accepted by this listener still
	 * exist (cm_address.c). The accept queue has the maximum length, because the application's
	 * backlog limits connection requests, not TCP connections. */
	if (soft_set_option(id->sock, SOL_SOCKET, SO_REUSEADDR, 1) || listen(id->sock, SOMAXCONN))
		*error = soft_cm_port_error(&id->id.route.addr.src_addr, SOCK_STREAM, errno);
	else
		*error = soft_accept_start(&listener->acceptor, id->sock, 0, accept_stream);
	if (*error) {
		free(listener);
		return NULL;
	}
	id->sock = -1; /* owned by the listener now */
	return &listener->listener;
}

static void stop_listening(struct soft_cm_listener *base)
{
	struct listener *listener = soft_container(base, struct listener, listener);

	soft_accept_stop(&listener->acceptor);
	soft_list_each_safe (struct stream, stream, &soft_device.cm->half_open.peers,
			     link.place.node)
		if (stream->listener == listener)
			end(&stream->link);
	free(listener);
}

/* ---- after the handshake ------------------------------------------------------------------ */

static void get_addresses(const struct soft_cm_link *link, struct sockaddr_storage *local,
			  struct sockaddr_storage *peer)
{
	const struct stream *stream = stream_of(link);
	socklen_t length = sizeof(*local);

	(void)getsockname(stream->watch.fd, (struct sockaddr *)local, &length);
	if (stream->peer.ss_family != AF_UNSPEC) /* an accepted connection */
		*peer = stream->peer;
}

static void apply_tos(struct soft_cm_link *link, uint8_t tos)
{
	soft_cm_apply_tos(stream_of(link)->watch.fd, tos);
}

static int hand_over(struct soft_cm_id *id, struct soft_qp *qp)
{
	struct stream *stream = stream_of(id->link);
	uint8_t unprocessed_input[INPUT_CAPACITY];
	size_t length = stream->input_length;
	int fd;

	/* The queue pair has not reached RTR. Until it does, leave the peer's data in the socket,
	 * and watch only for the end of the stream. */
	if (!qp) {
		stream->handshake_done = true;
		return soft_watch(&stream->watch, EPOLLRDHUP);
	}
	memcpy(unprocessed_input, stream->input, length);
	fd = release_socket(stream);
	/* If the peer has already sent data on the stream, it has selected the stream as the path.
	 * The queue pair must then adopt the stream instead of using another path. */
	return (id->shm_port || id->path_port) && !length
		       ? soft_qp_adopt_or_attach(qp, fd, id->shm_port, id->path_port,
						 id->is_initiator)
		       : soft_qp_adopt(qp, fd, unprocessed_input, length);
}

const struct soft_cm_carrier soft_cm_stream = {
	.connect = start_connecting,
	.listen = start_listening,
	.unlisten = stop_listening,
	.send = send_message,
	.end = end,
	.get_addresses = get_addresses,
	.apply_tos = apply_tos,
	.hand_over = hand_over,
};
