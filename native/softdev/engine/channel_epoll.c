/* The list of channels (channel.c has the rest): which of them have the engine's epoll set nested
 * in their fds, and what a loop may watch in place of such an fd. */
#include <fcntl.h>
#include <sys/epoll.h>

#include "engine_internal.h"

enum {
	NESTED_CHANNELS = 32
};

static struct soft_node channels = {&channels, &channels};

/* Channels of completions have it nested if any asks for early wake-ups, because their threads do
 * all of the device's work; other channels only when there is none of those, or one frame would
 * wake an application twice.  Their number is bounded: the kernel allows 100 paths of three epoll
 * instances from a file to a waiter (fs/eventpoll.c, path_limits), and beyond that refuses the
 * application's own epoll_ctl. */
static void update_nesting(void)
{
	int leaders = 0, nested = 0;

	for (struct soft_node *node = channels.next; node != &channels; node = node->next) {
		struct soft_channel *channel = soft_list_entry(node, struct soft_channel, node);

		leaders += channel->early && channel->completions;
	}
	for (struct soft_node *node = channels.next; node != &channels; node = node->next) {
		struct soft_channel *channel = soft_list_entry(node, struct soft_channel, node);
		struct epoll_event event = {.events = EPOLLIN};
		bool wanted = channel->early && (channel->completions || !leaders) &&
			      nested < NESTED_CHANNELS;
		bool inside = wanted && channel->shared_fd < 0;

		nested += wanted;
		/* Should the kernel refuse, the channel is signalled later than it could be. */
		if (inside != channel->inside &&
		    epoll_ctl(channel->fd, inside ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, engine.epoll_fd,
			      &event))
			continue;
		channel->inside = inside;
		soft_hint_set(&channel->nested, wanted);
	}
}

void soft_engine_add_channel(struct soft_channel *channel)
{
	soft_list_append(&channels, &channel->node);
}

void soft_engine_remove_channel(struct soft_channel *channel)
{
	soft_list_remove(&channel->node);
	update_nesting();
	soft_notify_fds_settle();
}

bool soft_channels_depend_on_engine(void)
{
	for (struct soft_node *node = channels.next; node != &channels; node = node->next) {
		struct soft_channel *channel = soft_list_entry(node, struct soft_channel, node);

		if (soft_counter_get(&channel->wanted) && !soft_hint_get(&channel->nested) &&
		    !soft_counter_get(&channel->sleepers))
			return true;
	}
	return false;
}

void soft_channels_reset_after_fork(void)
{
	soft_list_init(&channels);
}

static struct soft_channel *channel_of(int fd)
{
	for (struct soft_node *node = channels.next; node != &channels; node = node->next) {
		struct soft_channel *channel = soft_list_entry(node, struct soft_channel, node);

		if (channel->fd == fd)
			return channel;
	}
	return NULL;
}

void soft_wake_early(int fd)
{
	soft_lock();
	struct soft_channel *channel = channel_of(fd);

	if (channel) {
		soft_hint_set(&channel->early, true);
		update_nesting();
	}
	soft_unlock();
}

int soft_watch_fds(int fd, int fds[2])
{
	soft_lock();
	struct soft_channel *channel = channel_of(fd);
	int count = 0;

	/* Nested once, a channel of completions stays so: those before it only become fewer. */
	if (channel && channel->completions && channel->nested) {
		/* Another number for it: a child of a fork closes the engine's, and makes new ones. */
		if (channel->shared_fd < 0) {
			channel->shared_fd = fcntl(engine.shared_epoll_fd, F_DUPFD_CLOEXEC, 0);
			update_nesting();
			soft_notify_fds_changed();
		}
		if (channel->shared_fd >= 0) {
			fds[0] = channel->shared_fd;
			fds[1] = channel->event_fd;
			count = 2;
		}
	}
	soft_unlock();
	return count;
}

bool soft_channels_know_notify_fds(unsigned change)
{
	bool any = false;

	for (struct soft_node *node = channels.next; node != &channels; node = node->next) {
		struct soft_channel *channel = soft_list_entry(node, struct soft_channel, node);

		if (channel->shared_fd < 0)
			continue;
		if (channel->notify_fds != change)
			return false;
		any = true;
	}
	return any;
}

int soft_notify_fds(int fd, int fds[AIORDMA_NOTIFY_FDS], unsigned *change)
{
	soft_lock();
	struct soft_channel *channel = channel_of(fd);
	int count = channel && channel->shared_fd >= 0 ? soft_notify_fds_open(channel, fds) : 0;

	*change = soft_notify_version();
	soft_unlock();
	return count;
}
