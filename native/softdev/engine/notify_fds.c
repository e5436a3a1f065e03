/* Which bells are watched by who sleeps.
 *
 * An event loop that watches what is inside a channel's fd (channel_epoll.c) can watch the bells of
 * local peers too: then a ring wakes it without any epoll set of ours in between, which takes half a
 * microsecond off a round trip.  Local peers come and go, and loops learn of that when they next look.
 * So a bell is in the set that such loops watch anyway (engine.rest_fd), until every one of them has
 * asked for the bells since the last change; with the next change all of them are in that set again.
 * The engine's own set has them all the time.
 *
 * A loop has descriptors of its own, so that none is closed under it; one whose bell is gone shows its
 * end, and the look that follows tells.
 */
#include <fcntl.h>
#include <unistd.h>

#include "engine_internal.h"

static struct soft_node notify_fds = {&notify_fds, &notify_fds};
static unsigned change; /* atomic */

/* Those that a loop is told of come first. */
void soft_notify_fds_settle(void)
{
	bool direct = !engine.silent && soft_channels_know_notify_fds(change);
	int told = 0;

	for (struct soft_node *node = notify_fds.next; node != &notify_fds; node = node->next)
		soft_watch_set_direct(&soft_list_entry(node, struct soft_notify_fd, node)->watch,
				      direct && told++ < AIORDMA_BELLS);
}

void soft_notify_fds_changed(void)
{
	__atomic_store_n(&change, change + 1, __ATOMIC_RELAXED);
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

unsigned aiordma_embedded_bells_changed(void)
{
	return __atomic_load_n(&change, __ATOMIC_RELAXED);
}

static bool copy(int fds[AIORDMA_BELLS], int *count)
{
	struct soft_node *node = notify_fds.next;

	for (*count = 0; node != &notify_fds && *count < AIORDMA_BELLS; node = node->next) {
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
int soft_notify_fds_open(struct soft_channel *channel, int fds[AIORDMA_BELLS])
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
