/* The end of the peer's process: requests that the process had read count as acknowledged.
 *
 * A hardware adapter acknowledges data that has reached its host's memory, regardless of what
 * happens to the process there. Here, the process acknowledges a little later (acks.c), and may be
 * killed before it does. The path, however, knows how much the process has read. In a ring, this is
 * everything before the reader's position. On a socket, it is everything that the kernel has
 * confirmed, if the socket ends without a reset (which unread data would cause) or if a living
 * process gives up the link.
 *
 * Everything that the process has read is in its memory or was refused. On a ring, the process
 * refuses a record before it advances its position. On a socket, it does so a few microseconds
 * after reading, in the same step. Its refusals arrive here before its end. All requests that were
 * read and not refused are therefore done, up to the first one that is answered with data.
 *
 * This does not apply to a link that loses frames, where a frame may have been read but not
 * handled. Frames in the delay queue of the peer's fault spec count as handled.
 */
#include "link_internal.h"

/* Complete all requests before `psn`, but stop at the first request whose response contains data,
 * because that data has not arrived. */
static void complete_requests(struct soft_link *link, uint32_t psn)
{
	struct soft_qp *qp = link->qp;

	for (uint32_t i = qp->sq.oldest; i != qp->sq.next; i++) {
		if (soft_send_expects_data(soft_send_at(qp, i))) {
			uint32_t read_psn = soft_send_psn(qp, i);

			psn = soft_psn_before(read_psn, psn) ? read_psn : psn;
			break;
		}
	}
	(void)soft_complete_acknowledged(qp, soft_psn_prev(psn));
}

static bool is_read_position_reliable(const struct soft_link *link)
{
	return link->base.state == SOFT_LINK_UP && !link->base.is_lossy && !link->delay_queue &&
	       !soft_qp_is_uc(link->qp) && link->qp->sq.oldest != link->qp->sq.next;
}

void soft_peer_exit_unread(struct soft_link *link, const uint8_t *bytes, size_t length)
{
	struct soft_frame frame;

	while (length >= SOFT_FRAME_HEADER && soft_frame_decode(bytes, &frame)) {
		size_t size = SOFT_FRAME_HEADER + soft_frame_body_size(&frame);

		/* Find the unread request with the lowest PSN, which may not be the first in the
		 * stream. After an RNR NAK, the refused request is retransmitted behind requests
		 * that have higher PSNs. */
		if (soft_is_request(&frame) &&
		    (!link->has_unread_request || soft_psn_before(frame.psn, link->unread_psn))) {
			link->has_unread_request = true;
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
	if (is_read_position_reliable(link))
		complete_requests(link, link->has_unread_request
						? link->unread_psn
						: soft_send_psn(link->qp, link->qp->sq.next));
}

/* Complete all requests except the newest ones that together contain the last `missing` bytes of
 * the stream. The peer's kernel has confirmed all bytes before them.
 *
 * Nothing is completed after an RNR NAK, because the peer may have read the retransmission but
 * ended before refusing it again.
 */
void soft_peer_exit_tcp(struct soft_link *link, uint64_t missing)
{
	const struct soft_qp *qp = link->qp;
	uint64_t counted_bytes = 0;

	if (!is_read_position_reliable(link) || qp->rnr_nak_since_progress)
		return;
	uint32_t end = qp->sq.next;

	for (; end != qp->sq.oldest && counted_bytes < missing; end--) {
		const struct soft_send_wqe *send = soft_send_at(qp, end - 1);

		/* Count the minimum that each request has sent. If this is too little, more requests
		 * than necessary are left out, which is safe. Local requests send nothing. */
		if (!send->local)
			counted_bytes +=
				SOFT_FRAME_HEADER + (soft_send_is_counted(send) ? 0 : send->length);
	}
	complete_requests(link, soft_send_psn(qp, end));
}
