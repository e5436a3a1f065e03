/* Delayed acknowledgements, which wait for a frame that can carry them.
 *
 * An application that responds to a message usually sends a frame within a few microseconds of the
 * completion. A separate acknowledgement before that frame costs a system call here and a wake-up
 * at the peer. Once the application has been seen to respond (`reply_score`), the acknowledgement
 * of a message that completed a receive is therefore delayed. It is sent
 *
 *  - usually with the next frame
 *  - immediately if many messages are unacknowledged, because the sender's window is limited
 *  - by an application thread that drives the engine, after a minimum delay or before the thread
 *    sleeps in ibv_get_cq_event
 *  - at a tick of the engine's thread; nothing is delayed unless that thread ticks
 *
 * In the last two cases the application did not respond, so nothing is delayed for a while.
 */
#include "link_internal.h"

enum {
	MIN_REPLY_SCORE = 4, /* responses seen before acknowledgements are delayed */
	NO_REPLY_SCORE = -64, /* `reply_score` after an acknowledgement was delayed in vain */
	MAX_UNACKNOWLEDGED = 8, /* unacknowledged messages that force an acknowledgement */
};

void soft_ack_delay(struct soft_qp_link *base)
{
	soft_assert_locked();
	struct soft_link *link = soft_container(base, struct soft_link, base);

	link->reply_expected = true;
	if (++link->unacknowledged >= MAX_UNACKNOWLEDGED || link->reply_score < MIN_REPLY_SCORE ||
	    !soft_engine_ticks()) {
		soft_link_output(link);
		return;
	}
	if (!soft_list_empty(&link->delayed))
		return;
	link->delayed_since = soft_now();
	soft_list_append(&soft_device.links->delayed, &link->delayed);
	soft_engine_set_has_delayed_output(true);
}

void soft_ack_cancel(struct soft_link *link)
{
	soft_assert_locked();
	soft_list_remove(&link->delayed);
	soft_engine_set_has_delayed_output(!soft_list_empty(&soft_device.links->delayed) ||
					   !soft_list_empty(&soft_device.tcp->delayed));
}

void soft_ack_request_sent(struct soft_link *link)
{
	soft_assert_locked();
	if (link->reply_expected && link->reply_score < MIN_REPLY_SCORE)
		link->reply_score++;
	link->reply_expected = false;
}

void soft_acks_send(uint64_t age_ns)
{
	soft_assert_locked();
	uint64_t latest = soft_now() - age_ns;

	soft_tcp_paths_send_delayed();
	soft_engine_set_has_delayed_output(!soft_list_empty(&soft_device.links->delayed));
	soft_list_drain (struct soft_link, link, &soft_device.links->delayed, delayed) {
		if (link->delayed_since > latest)
			return;
		soft_ack_cancel(link);
		link->reply_score = NO_REPLY_SCORE;
		soft_link_output(link);
	}
}
