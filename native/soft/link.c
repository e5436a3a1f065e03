/* The stream of a queue pair: its life, from a connected socket to the last byte.
 *
 * A stream ends in one of two ways.  Orderly: the side that stops (its queue pair went to ERR, was
 * reset or destroyed) sends what it still owes (an acknowledgement, a NAK), a DISCONNECT frame and
 * the end of its direction, then waits for the other side's end, so that unread data does not turn
 * its last words into a reset.  Broken: everything else, a process that was killed above all.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fault.h"
#include "link.h"

#define LINGER_NS 2000000000u

static struct soft_node links = {&links, &links};

static void lingered(struct soft_timer *timer)
{
	soft_link_finish(soft_container(timer, struct soft_link, timer), 0);
}

static void output(struct soft_deferred *deferred)
{
	struct soft_link *link = soft_container(deferred, struct soft_link, output);

	if (link->state == SOFT_LINK_CLOSING)
		soft_link_write_end(link);
	else if (!soft_port_is_down())
		soft_link_write(link);
}

struct soft_link *soft_link_create(int fd, enum soft_link_state state)
{
	struct soft_link *link = calloc(1, sizeof(*link));

	if (!link)
		return NULL;
	soft_link_over_socket(link, fd);
	link->state = state;
	soft_list_init(&link->owed);
	soft_list_init(&link->output.node);
	link->output.run = output;
	soft_list_append(&links, &link->node);
	return link;
}

int soft_link_up(struct soft_link *link, struct soft_qp *qp)
{
	int rc = link->wire->up(link);

	if (rc)
		return rc;
	soft_timer_stop(&link->timer);
	link->timer.expired = lingered;
	link->state = SOFT_LINK_UP;
	link->qp = qp;
	qp->link = link;
	qp->unheard = false;
	soft_path_watch(link);
	soft_timer_stop(&qp->reach_timer);
	if (soft_faults_set)
		soft_fault_attach(link);
	soft_qp_kick(qp);
	return 0;
}

int soft_link_up_to_self(struct soft_qp *qp)
{
	struct soft_link *link;
	int fds[2], rc;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds))
		return errno;
	link = soft_link_create(fds[0], SOFT_LINK_CONNECTING);
	if (!link) {
		close(fds[0]);
		close(fds[1]);
		return ENOMEM;
	}
	link->out.fd = fds[1];
	rc = soft_link_up(link, qp);
	if (rc)
		soft_link_finish(link, rc);
	return rc;
}

void soft_links_plan(void)
{
	for (struct soft_node *node = links.next; node != &links; node = node->next) {
		struct soft_link *link = soft_list_entry(node, struct soft_link, node);

		if (link->state == SOFT_LINK_UP)
			soft_fault_attach(link);
	}
}

void soft_link_lost(struct soft_link *link, int error)
{
	if (!soft_fault_outlives(link, error))
		soft_link_finish(link, error);
}

void soft_link_finish(struct soft_link *link, int error)
{
	struct soft_qp *qp = link->qp;
	bool was_up = link->state == SOFT_LINK_UP || link->state == SOFT_LINK_CLOSING;

	if (link->state == SOFT_LINK_DEAD)
		return;
	link->state = SOFT_LINK_DEAD;
	soft_timer_stop(&link->timer);
	soft_deferred_cancel(&link->output);
	soft_ack_settled(link);
	soft_list_remove(&link->node);
	soft_fault_detach(link);
	link->wire->close(link);
	if (qp) {
		link->qp = NULL;
		qp->link = NULL;
		if (was_up)
			soft_qp_link_gone(qp, error);
	}
	if (!link->busy)
		free(link);
}

void soft_link_close(struct soft_link *link)
{
	if (link->state == SOFT_LINK_CLOSING || link->state == SOFT_LINK_DEAD)
		return;
	/* A frame that has been sent in part cannot be finished once its memory is the
	 * application's again, and nothing can be said in the middle of it. */
	bool over = soft_fault_detach(link); /* what is under way means nothing any more */

	if (link->state != SOFT_LINK_UP || link->partial || over || link->out.fd != link->in.fd) {
		soft_link_finish(link, 0);
		return;
	}
	link->state = SOFT_LINK_CLOSING;
	soft_ack_settled(link); /* DISCONNECT tells it too */
	link->sent = 0;
	soft_timer_start(&link->timer, soft_now() + LINGER_NS);
	soft_defer(&link->output);
}

void soft_link_leave(struct soft_link *link)
{
	struct soft_qp *qp = link->qp;

	/* What is owed to the other side is said now, while the queue pair knows it. */
	soft_link_close(link);
	link = qp->link;
	if (!link)
		return;
	soft_deferred_cancel(&link->output);
	soft_link_write_end(link);
	link = qp->link;
	if (!link)
		return;
	link->qp = NULL;
	qp->link = NULL;
}

void soft_link_output(struct soft_link *link)
{
	if (link->state == SOFT_LINK_UP && !link->blocked)
		soft_defer(&link->output);
}

void soft_link_writable(struct soft_link *link)
{
	link->blocked = false;
	soft_defer(&link->output);
}

void soft_links_resume(void)
{
	for (struct soft_node *node = links.next; node != &links; node = node->next) {
		struct soft_link *link = soft_list_entry(node, struct soft_link, node);

		if (link->state == SOFT_LINK_UP && link->qp) {
			soft_timer_stop(&link->qp->reach_timer);
			soft_link_output(link);
		}
	}
}

/* The engine stops: what still lingers has had its last words given to the kernel. */
void soft_links_shutdown(void)
{
	soft_greeting_forget();
	while (!soft_list_empty(&links))
		soft_link_finish(soft_list_entry(links.next, struct soft_link, node), 0);
}

/* The inherited ones belong to inherited queue pairs, which may still be destroyed. */
void soft_links_forget(void)
{
	soft_greeting_forget();
	while (!soft_list_empty(&links))
		soft_list_remove(links.next);
}

int soft_qp_adopt(struct soft_qp *qp, int fd, const void *already_read, size_t length)
{
	struct soft_link *link = NULL;
	int rc = 0;

	if (qp->ibv.state != IBV_QPS_RTR && qp->ibv.state != IBV_QPS_RTS)
		rc = EINVAL;
	else if (qp->link || qp->stream_lost)
		rc = EISCONN;
	if (!rc) {
		link = soft_link_create(fd, SOFT_LINK_CONNECTING);
		rc = link ? 0 : ENOMEM;
	}
	if (rc) {
		close(fd);
		return rc;
	}
	rc = soft_link_up(link, qp);
	if (rc)
		soft_link_finish(link, rc);
	else if (length)
		soft_link_take(link, already_read, length);
	return rc;
}
