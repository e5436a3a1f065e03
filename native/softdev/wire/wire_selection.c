/* The CM's stream, or a way through shared memory?
 *
 * Where both sides have named their LIDs in the handshake, the side that asked for the connection
 * tries to open a way, and sends nothing else before it knows.  The other side waits for what comes
 * first: HELLO by a way, which it answers with WELCOME, or bytes on the stream.  So there is one wire
 * at any time, and both know which.  What the first side says on the stream when there is no way is
 * an acknowledgement of nothing.  A side that ends the link before that does so on the stream.
 */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "link.h"

bool soft_choice_is_open(const struct soft_link *link)
{
	return link->state == SOFT_LINK_CHOOSING && !link->way.neighbour;
}

int soft_choice_begin(struct soft_link *link, struct soft_qp *qp, uint16_t lid, bool opens)
{
	int rc = soft_watch(&link->source, EPOLLIN);

	if (rc)
		return rc;
	link->state = SOFT_LINK_CHOOSING;
	link->qp = qp;
	qp->link = link;
	if (!opens)
		soft_greeting_look(qp);
	else if (!soft_link_open_way(link, qp, lid))
		soft_choice_stream(link, true);
	return 0;
}

static void up(struct soft_link *link)
{
	int rc = soft_link_up(link, link->qp);

	if (rc)
		soft_link_finish(link, rc);
}

void soft_choice_stream(struct soft_link *link, bool tell)
{
	uint8_t bytes[SOFT_FRAME_HEADER];
	struct iovec first = {.iov_base = bytes, .iov_len = sizeof(bytes)};

	soft_way_end(&link->way);
	link->wire = &soft_socket_wire;
	soft_frame_encode(bytes, &(struct soft_frame){.opcode = SOFT_ACK});
	if (tell) /* should that fail, the stream tells when it is read */
		(void)link->wire->send(link, &first, 1);
	up(link);
}

/* The stream has something to say. */
void soft_choice_ready(struct soft_link *link)
{
	uint8_t byte;
	ssize_t n = recv(link->source.fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n > 0)
		soft_choice_stream(link, false);
	else if (link->way.neighbour)
		soft_unwatch(&link->source); /* WELCOME may be on its way; else the way ends too */
	else
		soft_link_finish(link, n ? errno : ECONNRESET);
}

void soft_choice_welcome(struct soft_link *link)
{
	if (link->greeting.kind != SOFT_GREETING_WELCOME ||
	    !soft_greeting_agrees(&link->greeting, link->qp)) {
		soft_choice_stream(link, true);
		return;
	}
	soft_link_close_socket(link);
	up(link);
}

void soft_choice_way(struct soft_link *link, struct soft_link *stranger)
{
	if (!soft_link_answer_way(link, stranger, link->qp)) {
		link->wire = &soft_socket_wire; /* which it will fall back to */
		return;
	}
	link->greeting = stranger->greeting;
	link->greeted = true;
	soft_link_close_socket(link);
	up(link);
}
