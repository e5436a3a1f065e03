/* Notify fds that event loops watch themselves.
 *
 * An event loop that watches what is inside a channel's fd (channel_epoll.c) can also watch the
 * pipes by which local peers notify this process: a byte then wakes it without an epoll set of the
 * device in between, which takes half a microsecond off a round trip.  Peers come and go, and loops
 * learn of that in their next drain.  So a notify fd is in the set that such loops watch anyway
 * (engine.shared_epoll_fd) until every such loop has asked for the fds since the last change; with
 * the next change all fds are in that set again.  The engine's own set has them all the time.
 *
 * A loop has duplicates of the descriptors, so that none is closed under it; the duplicate of a
 * closed pipe shows its end, and the next drain removes it.
 */
#include <fcntl.h>
#include <unistd.h>

#include "engine_internal.h"

static struct soft_node notify_fds = {&notify_fds, &notify_fds};
static unsigned change; /* atomic */

/* The first AIORDMA_NOTIFY_FDS of them are those that loops are given. */
void soft_notify_fds_settle(void)
{
	bool direct = !engine.silent && soft_channels_know_notify_fds(change);
	int told = 0;

	for (struct soft_node *node = notify_fds.next; node != &notify_fds; node = node->next)
		soft_watch_set_direct(&soft_list_entry(node, struct soft_notify_fd, node)->watch,
				      direct && told++ < AIORDMA_NOTIFY_FDS);
}

void soft_notify_fds_changed(void)
{
	soft_counter_bump(&change);
	soft_notify_fds_settle();
}

void soft_notify_fds_add(struct soft_notify_fd *notify)
{
	soft_list_append(&notify_fds, &notify->node);
	soft_notify_fds_changed();
}

void soft_notify_fds_remove(struct soft_notify_fd *notify)
{
	if (soft_list_empty(&notify->node))
		return;
	soft_list_remove(&notify->node);
	soft_notify_fds_changed();
}

unsigned soft_notify_version(void)
{
	return soft_counter_get(&change);
}

static bool copy(int fds[AIORDMA_NOTIFY_FDS], int *count)
{
	struct soft_node *node = notify_fds.next;

	for (*count = 0; node != &notify_fds && *count < AIORDMA_NOTIFY_FDS; node = node->next) {
		const struct soft_notify_fd *notify =
			soft_list_entry(node, struct soft_notify_fd, node);
		int fd = fcntl(notify->watch.fd, F_DUPFD_CLOEXEC, 0);

		if (fd < 0)
			return false;
		fds[(*count)++] = fd;
	}
	return true;
}

/* Should there be no descriptors left, all goes on as if it had not been asked. */
int soft_notify_fds_open(struct soft_channel *channel, int fds[AIORDMA_NOTIFY_FDS])
{
	int count = 0;

	if (engine.silent)
		return 0;
	if (copy(fds, &count)) {
		channel->notify_fds = change;
		soft_notify_fds_settle();
		return count;
	}
	while (count)
		close(fds[--count]);
	return 0;
}
