/* Which bells are watched by who sleeps.
 *
 * An event loop that watches what is inside a channel's fd (channel_epoll.c) can watch the bells of
 * neighbours too: then a ring wakes it without any epoll set of ours in between, which takes half a
 * microsecond off a round trip.  Neighbours come and go, and loops learn of that when they next look.
 * So a bell is in the set that such loops watch anyway (engine.rest_fd), until every one of them has
 * asked for the bells since the last change; with the next change all of them are in that set again.
 * The engine's own set has them all the time.
 *
 * A loop has descriptors of its own, so that none is closed under it; one whose bell is gone shows its
 * end, and the look that follows tells.
 */
#include <fcntl.h>
#include <unistd.h>

#include "shm/notify_pipe.h"
#include "engine_internal.h"

static struct soft_node bells = {&bells, &bells};
static unsigned change; /* atomic */

/* Those that a loop is told of come first. */
void soft_bells_settle(void)
{
	bool apart = !engine.silent && soft_channels_know_bells(change);
	int told = 0;

	for (struct soft_node *node = bells.next; node != &bells; node = node->next)
		soft_source_set_apart(&soft_list_entry(node, struct soft_bell, node)->source,
				      apart && told++ < AIORDMA_BELLS);
}

void soft_bells_changed(void)
{
	__atomic_store_n(&change, change + 1, __ATOMIC_RELAXED);
	soft_bells_settle();
}

void soft_bells_add(struct soft_bell *bell)
{
	soft_list_append(&bells, &bell->node);
	soft_bells_changed();
}

void soft_bells_remove(struct soft_bell *bell)
{
	if (soft_list_empty(&bell->node))
		return;
	soft_list_remove(&bell->node);
	soft_bells_changed();
}

unsigned aiordma_embedded_bells_changed(void)
{
	return __atomic_load_n(&change, __ATOMIC_RELAXED);
}

static bool copy(int fds[AIORDMA_BELLS], int *count)
{
	struct soft_node *node = bells.next;

	for (*count = 0; node != &bells && *count < AIORDMA_BELLS; node = node->next) {
		const struct soft_bell *bell = soft_list_entry(node, struct soft_bell, node);
		int fd = fcntl(bell->source.fd, F_DUPFD_CLOEXEC, 0);

		if (fd < 0)
			return false;
		fds[(*count)++] = fd;
	}
	return true;
}

/* Should there be no descriptors left, all goes on as if it had not been asked. */
int soft_bells_open(struct soft_channel *channel, int fds[AIORDMA_BELLS])
{
	int count = 0;

	if (engine.silent)
		return 0;
	if (copy(fds, &count)) {
		channel->bells = change;
		soft_bells_settle();
		return count;
	}
	while (count)
		close(fds[--count]);
	return 0;
}
