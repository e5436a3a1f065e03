/* Wire selection with the CM: its stream, or a channel through shared memory.
 *
 * Where both sides have named their ports in the handshake, the side that asked for the connection
 * tries to open a channel, and sends nothing else before it knows.  The other side waits for what
 * comes first: HELLO by a channel, which it answers with HELLO_ACK, or bytes on the stream.  So
 * there is one wire at any time, and both know which.  If there is no channel, the first
 * side sends an acknowledgement of nothing on the stream.  A side that ends the link before that
 * does so on the stream.
 */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "link.h"

bool soft_wire_selection_is_open(const struct soft_link *link)
{
	return link->base.state == SOFT_LINK_SELECTING && !link->chan.peer;
}

int soft_wire_selection_begin(struct soft_link *link, struct soft_qp *qp, uint16_t port, bool opens)
{
	int rc = soft_watch(&link->watch, EPOLLIN);

	if (rc)
		return rc;
	link->base.state = SOFT_LINK_SELECTING;
	link->qp = qp;
	qp->link = &link->base;
	if (!opens)
		soft_handshake_find_pending(qp);
	else if (!soft_link_open_chan(link, qp, port))
		soft_wire_selection_use_tcp(link, true);
	return 0;
}

static void up(struct soft_link *link)
{
	int rc = soft_link_up(link, link->qp);

	if (rc)
		soft_link_finish(link, rc);
}

void soft_wire_selection_use_tcp(struct soft_link *link, bool tell)
{
	uint8_t bytes[SOFT_FRAME_HEADER];
	struct iovec first = {.iov_base = bytes, .iov_len = sizeof(bytes)};

	soft_shm_chan_end(&link->chan);
	link->wire = &soft_tcp_wire;
	soft_frame_encode(
		bytes, &(struct soft_frame){.opcode = SOFT_ACK, .psn = link->qp->responder.acked});
	if (tell) /* should that fail, reading the stream reports it */
		(void)link->wire->send(link, &first, 1);
	up(link);
}

/* The stream is readable. */
void soft_wire_selection_received(struct soft_link *link)
{
	uint8_t byte;
	ssize_t n = recv(link->watch.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n > 0)
		soft_wire_selection_use_tcp(link, false);
	else if (link->chan.peer)
		soft_unwatch(
			&link->watch); /* HELLO_ACK may be on its way; else the channel ends too */
	else
		soft_link_finish(link, n ? errno : ECONNRESET);
}

void soft_wire_selection_answered(struct soft_link *link)
{
	if (link->peer_hello.kind != SOFT_HELLO_ACK ||
	    !soft_hello_matches(&link->peer_hello, link->qp)) {
		soft_wire_selection_use_tcp(link, true);
		return;
	}
	soft_link_close_socket(link);
	up(link);
}

void soft_wire_selection_use_shm(struct soft_link *link, struct soft_link *pending_link)
{
	if (!soft_link_accept_chan(link, pending_link, link->qp)) {
		link->wire = &soft_tcp_wire; /* which it will fall back to */
		return;
	}
	link->peer_hello = pending_link->peer_hello;
	link->hello_valid = true;
	soft_link_close_socket(link);
	up(link);
}
