/* Path selection with the CM, which uses an existing path or turns the stream of the CM's handshake
 * into one.
 *
 * The side that requested the connection tries to open a channel. It uses shared memory if both
 * sides have named their ports in the handshake. Otherwise, it uses a path that was created from an
 * earlier stream to the same port of the same process. It sends nothing else until it knows the
 * result. The other side waits for a HELLO through a channel, to which it responds with HELLO_ACK,
 * or for bytes on the stream, whichever comes first. Only one path is thus in use at any time, and
 * both sides agree on it. If no channel is available, the first side announces this by sending
 * SOFT_RECORD_END for channel 0 on the stream. A side that ends the link before the selection is
 * complete does so on the stream.
 */
#include <sys/epoll.h>

#include "link_internal.h"

bool soft_selection_is_open(const struct soft_link *link)
{
	return link->base.state == SOFT_LINK_SELECTING && !link->chan.path;
}

/* Handle input on the CM's socket while no path has been selected. The first byte from the peer
 * means that the peer has selected the socket itself. */
static void handle_stream_input(struct soft_fd_watch *watch)
{
	struct soft_link *link = soft_container(watch, struct soft_link, watch);
	uint8_t byte;
	ssize_t n = recv(watch->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n > 0)
		soft_selection_use_tcp(link, false);
	else if (link->chan.path)
		/* The end of the stream does not matter while this side waits for a channel. Either
		 * HELLO_ACK arrives through the channel, or the channel ends too. */
		soft_unwatch(watch);
	else
		soft_link_finish(link, n ? errno : ECONNRESET);
}

/* Returns the existing path on which to request a channel: shared memory, or a TCP stream that
 * connects the same processes as the CM's socket. Returns NULL if there is none. */
static struct soft_path *path_to(const struct soft_link *link, const struct soft_qp *qp,
				 uint16_t shm_port)
{
	struct soft_tcp_path *tcp;

	if (shm_port && soft_links_may_use_shm())
		return soft_link_shm_path(qp, shm_port);
	tcp = soft_tcp_path_find_shared(link->watch.fd, link->path_port);
	return tcp ? &tcp->path : NULL;
}

int soft_selection_begin(struct soft_link *link, struct soft_qp *qp, int fd, uint16_t shm_port)
{
	link->watch = (struct soft_fd_watch){
		.fd = fd, .ready = handle_stream_input, .ports = soft_qp_hca(qp)->port_bit};
	int rc = soft_watch(&link->watch, EPOLLIN);

	if (rc)
		return rc;
	link->base.state = SOFT_LINK_SELECTING;
	link->qp = qp;
	qp->link = &link->base;
	if (!link->is_initiator)
		soft_handshake_accept_pending(qp);
	else if (!soft_link_open_chan(link, qp, path_to(link, qp, shm_port)))
		soft_selection_use_tcp(link, true);
	else
		soft_link_set_liveness_limit(link);
	return 0;
}

static void bring_up(struct soft_link *link)
{
	int rc = soft_link_up(link, link->qp);

	if (rc)
		soft_link_finish(link, rc);
}

void soft_selection_use_tcp(struct soft_link *link, bool notify_peer)
{
	int fd = link->watch.fd, rc;

	soft_chan_end(&link->chan);
	soft_unwatch(&link->watch);
	link->watch.fd = -1;
	rc = soft_link_over_stream(link, fd);
	if (rc) {
		soft_link_finish(link, rc);
		return;
	}
	soft_tcp_path_of(link->chan.path)->path_port = link->is_initiator ? link->path_port : 0;
	/* Unless this side announces its choice, it has seen data from the peer or closes the
	 * link. The peer must then end the stream with DISCONNECT (channel_closed). */
	link->has_received = !notify_peer;
	if (notify_peer)
		soft_path_refuse(link->chan.path, 0); /* an END for channel 0 announces TCP */
	bring_up(link);
}

void soft_selection_response_received(struct soft_link *link)
{
	if (link->peer_hello.kind != SOFT_HELLO_ACK ||
	    !soft_hello_matches(&link->peer_hello, link->qp)) {
		soft_selection_use_tcp(link, true);
		return;
	}
	soft_watch_close(&link->watch);
	bring_up(link);
}

void soft_selection_use_chan(struct soft_link *link, struct soft_link *pending_link)
{
	if (!soft_link_accept_chan(link, pending_link, link->qp))
		return; /* the peer will fall back to the stream */
	link->peer_hello = pending_link->peer_hello;
	link->hello_valid = true;
	soft_watch_close(&link->watch);
	bring_up(link);
}
