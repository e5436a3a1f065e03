/* The end of the peer's process: what it had received counts as acknowledged.
 *
 * A card acknowledges what has reached the memory of its host, whatever becomes of the process there.
 * Here the process acknowledges, a little later (acks.c), and may be killed before that.  But the
 * path knows what the process has read: of a ring what lies before the reader's position, and of a
 * socket what its kernel has confirmed if that ends without a reset, which there would be for unread
 * data, and of a living process that gives a link up.  What it has read is in its memory, or was
 * refused: it refuses a record before it moves the position, and what comes by a socket a few
 * microseconds after reading it, in the same step; its refusals have been read here before its end
 * is.  So what it has read and not refused is done, up to the first request that is answered with
 * data.
 *
 * Not on a link that loses frames: there, to have read is not to have taken in.  What the other side
 * delays by its fault spec counts as taken in.
 */
#include "link_internal.h"

/* Everything before that PSN was taken in; a READ is not done by that. */
static void taken_in(struct soft_link *link, uint32_t psn)
{
	struct soft_qp *qp = link->qp;

	for (uint32_t i = qp->sq.oldest; i != qp->sq.next; i++) {
		if (soft_send_is_read(soft_send_at(qp, i))) {
			uint32_t read = soft_send_psn(qp, i);

			psn = soft_psn_before(read, psn) ? read : psn;
			break;
		}
	}
	(void)soft_acknowledged(qp, soft_psn_add(psn, SOFT_PSN_MASK));
}

static bool is_exact(const struct soft_link *link)
{
	return link->base.state == SOFT_LINK_UP && !link->base.loses && !link->delay_queue &&
	       !soft_qp_is_uc(link->qp) && link->qp->sq.oldest != link->qp->sq.next;
}

void soft_peer_exit_unread(struct soft_link *link, const uint8_t *bytes, size_t length)
{
	struct soft_frame frame;

	while (length >= SOFT_FRAME_HEADER && soft_frame_decode(bytes, &frame)) {
		size_t size = SOFT_FRAME_HEADER + soft_frame_rest(&frame);

		/* Not just the first one: after an RNR NAK, what was sent behind the refused request
		 * lies before that request, which has been sent again. */
		if (frame.opcode < SOFT_ACK &&
		    (!link->unread || soft_psn_before(frame.psn, link->unread_psn))) {
			link->unread = true;
			link->unread_psn = frame.psn;
		}
		if (size > length)
			return;
		bytes += size;
		length -= size;
	}
}

void soft_peer_exit_shm(struct soft_link *link)
{
	if (is_exact(link))
		taken_in(link, link->unread ? link->unread_psn
					    : soft_send_psn(link->qp, link->qp->sq.next));
}

/* Of a request that has been refused and sent again, the peer may have ended between reading and
 * refusing it once more.
 *
 * What was sent after a message is at least its successors' frames: if no more than that is not
 * confirmed, the message itself is. */
void soft_peer_exit_tcp(struct soft_link *link, uint64_t missing)
{
	const struct soft_qp *qp = link->qp;
	uint64_t behind = 0;

	if (!is_exact(link) || qp->rnr_refused)
		return;
	uint32_t end = qp->sq.next;

	for (; end != qp->sq.oldest && behind < missing; end--) {
		const struct soft_send_wqe *send = soft_send_at(qp, end - 1);

		if (!send->local)
			behind +=
				SOFT_FRAME_HEADER + (soft_send_is_counted(send) ? 0 : send->length);
	}
	taken_in(link, soft_send_psn(qp, end));
}
