/* Delayed acknowledgements: they wait a little for a frame to ride on.
 *
 * An application that answers what it receives sends a frame anyway, a few microseconds after it
 * has taken the completion; an acknowledgement of its own before that is a system call here and a
 * wake-up there.  So where a queue pair's application has been seen to answer (`replies`), the
 * acknowledgement of a message that completed a receive is delayed for a while.  It goes out
 *  - with the next frame, which is the usual case;
 *  - at once when many messages are unacknowledged: the sender has a window;
 *  - when an application thread makes a step and it has been delayed for some time, or before that
 *    thread sleeps in ibv_get_cq_event;
 *  - by the engine's thread at one of its ticks; when that is not ticking, nothing is delayed.
 * In the last two cases the application did not answer: then nothing is delayed for a good while.
 */
#include "link_internal.h"

enum {
	TRUST = 4,      /* answers seen before an acknowledgement is delayed */
	DISTRUST = -64, /* after one that had to be sent alone */
	MOST = 8,       /* messages that one acknowledgement is delayed for */
};

void soft_ack_later(struct soft_qp_link *base)
{
	soft_assert_locked();
	struct soft_link *link = soft_container(base, struct soft_link, base);

	link->reply_expected = true;
	if (++link->unacknowledged >= MOST || link->replies < TRUST || !soft_engine_ticks()) {
		soft_link_output(link);
		return;
	}
	if (!soft_list_empty(&link->delayed))
		return;
	link->delayed_since = soft_now();
	soft_list_append(&soft_device.links->delayed, &link->delayed);
	soft_engine_set_delayed(true);
}

void soft_ack_settled(struct soft_link *link)
{
	soft_assert_locked();
	soft_list_remove(&link->delayed);
	soft_engine_set_delayed(!soft_list_empty(&soft_device.links->delayed) ||
				!soft_list_empty(&soft_device.tcp->delayed));
}

void soft_ack_replied(struct soft_link *link)
{
	soft_assert_locked();
	if (link->reply_expected && link->replies < TRUST)
		link->replies++;
	link->reply_expected = false;
}

void soft_acks_send(uint64_t age_ns)
{
	soft_assert_locked();
	uint64_t latest = soft_now() - age_ns;

	soft_tcp_paths_send_delayed();
	soft_engine_set_delayed(!soft_list_empty(&soft_device.links->delayed));
	soft_list_drain (struct soft_link, link, &soft_device.links->delayed, delayed) {
		if (link->delayed_since > latest)
			return;
		soft_ack_settled(link);
		link->replies = DISTRUST;
		soft_link_output(link);
	}
}
