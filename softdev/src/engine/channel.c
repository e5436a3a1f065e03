/* Channels: file descriptors on which applications wait for the events in their queues.
 *
 * The fd is an epoll instance with an eventfd inside. An application may wait with its own poll()
 * and, as in the example in ibv_get_cq_event(3), expect an event whenever the fd is readable. This
 * holds by default. An application may also declare that it accepts wake-ups without an event
 * (soft_wake_early), as aiordma does. Its fd then contains the engine's epoll instance as well.
 * Data that arrives on any stream wakes the application's thread directly, and the call that looks
 * for an event also does the device's work. A thread that blocks in ibv_get_cq_event always works
 * like this. A thread that waits for rare events (CM events, asynchronous events) does not, because
 * every frame would wake it.
 *
 * The eventfd is written only when the queue becomes non-empty, and never if the thread that queues
 * the event is about to check the queue itself.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine_internal.h"

enum { NESTED_CHANNELS = 32 };

/* Choose the channels that contain the engine's epoll instance. If any completion channel asks for
 * early wake-ups, only completion channels contain it, because their threads do all of the device's
 * work. Adding it to the other channels as well would wake the application twice per frame. The
 * number of these channels is limited, because the kernel allows at most 100 paths of three epoll
 * instances from a file to a waiter (fs/eventpoll.c, path_limits). Beyond this limit, it would
 * reject the application's own epoll_ctl. */
static void update_nesting(void)
{
	int early_completion_channels = 0, nested = 0;

	soft_list_each (struct soft_channel, channel, &soft_device.engine->channels, node)
		early_completion_channels += channel->accepts_early_wakeup && channel->completions;
	soft_list_each (struct soft_channel, channel, &soft_device.engine->channels, node) {
		struct epoll_event event = {.events = EPOLLIN};
		bool should_nest = channel->accepts_early_wakeup &&
				   (channel->completions || !early_completion_channels) &&
				   nested < NESTED_CHANNELS;

		nested += should_nest;
		/* Ignore failures. A channel that is not nested is still signalled, but a little
		 * later and by another thread. */
		if (should_nest != channel->nested &&
		    !epoll_ctl(channel->fd, should_nest ? EPOLL_CTL_ADD : EPOLL_CTL_DEL,
			       soft_device.engine->epoll_fd, &event))
			soft_hint_set(&channel->nested, should_nest);
	}
}

int soft_channel_init(struct soft_channel *channel)
{
	struct epoll_event event = {.events = EPOLLIN};
	int rc;

	*channel = (struct soft_channel){.fd = epoll_create1(EPOLL_CLOEXEC)};
	channel->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (channel->fd < 0 || channel->event_fd < 0 ||
	    epoll_ctl(channel->fd, EPOLL_CTL_ADD, channel->event_fd, &event)) {
		rc = errno;
		if (channel->fd >= 0)
			close(channel->fd);
		if (channel->event_fd >= 0)
			close(channel->event_fd);
		return rc;
	}
	soft_lock();
	channel->descriptor_losses = soft_device.engine->descriptor_losses;
	soft_list_append(&soft_device.engine->channels, &channel->node);
	soft_unlock();
	return 0;
}

bool soft_channel_has_lost_descriptors(const struct soft_channel *channel)
{
	soft_lock();
	bool lost = channel->descriptor_losses != soft_device.engine->descriptor_losses;

	soft_unlock();
	return lost;
}

void soft_channel_destroy(struct soft_channel *channel)
{
	soft_lock();
	soft_list_remove(&channel->node);
	update_nesting();
	soft_unlock();
	if (soft_channel_has_lost_descriptors(channel))
		return;
	close(channel->fd);
	close(channel->event_fd);
}

static void write_event(struct soft_channel *channel)
{
	const uint64_t one = 1;

	if (!channel->signalled)
		channel->signalled = write(channel->event_fd, &one, sizeof(one)) == sizeof(one);
	channel->signal_deferred = false;
}

void soft_channel_signal(struct soft_channel *channel)
{
	soft_assert_locked();
	if (channel->signalled)
		return;
	if (soft_channel_is_current(channel))
		channel->signal_deferred = true;
	else
		write_event(channel);
}

void soft_channel_flush_signal(struct soft_channel *channel)
{
	if (channel->signal_deferred)
		write_event(channel);
}

void soft_channel_clear_signal(struct soft_channel *channel)
{
	uint64_t count;

	if (channel->signalled)
		channel->signalled =
			read(channel->event_fd, &count, sizeof(count)) != sizeof(count);
	channel->signal_deferred = false;
}

bool soft_channel_nonblocking(const struct soft_channel *channel)
{
	/* If the application accepts early wake-ups, its calls must not block, because the fd may
	 * be readable although there is no event. */
	return soft_hint_get(&channel->accepts_early_wakeup) ||
	       fcntl(channel->fd, F_GETFL) & O_NONBLOCK;
}

int soft_channel_wait(struct soft_channel *channel)
{
	struct pollfd fds[2] = {
		{.fd = channel->event_fd, .events = POLLIN},
		{.fd = soft_device.engine->epoll_fd, .events = POLLIN},
	};

	soft_counter_add(&channel->sleepers, 1);
	int rc = poll(fds, channel->completions ? 2 : 1, -1) < 0 ? errno : 0;

	if (!rc && (fds[0].revents | fds[1].revents) & POLLNVAL)
		rc = EBADF; /* the program closed the descriptors, so the caller must give up */
	soft_counter_add(&channel->sleepers, -1u);
	return rc;
}

bool soft_channels_depend_on_engine(void)
{
	bool is_completion_channel_nested = false;

	soft_list_each (struct soft_channel, channel, &soft_device.engine->channels, node)
		is_completion_channel_nested |=
			channel->completions && soft_hint_get(&channel->nested);
	/* If a completion channel is nested, the thread that waits on it runs steps when it wakes
	 * up. These steps also signal the other channels that accept early wake-ups, so those
	 * channels do not need the engine's thread. */
	soft_list_each (struct soft_channel, channel, &soft_device.engine->channels, node)
		if (soft_counter_get(&channel->armed_sources) && !soft_hint_get(&channel->nested) &&
		    !soft_counter_get(&channel->sleepers) &&
		    !(is_completion_channel_nested && channel->accepts_early_wakeup))
			return true;
	return false;
}

static struct soft_channel *find_channel(int fd)
{
	soft_list_each (struct soft_channel, channel, &soft_device.engine->channels, node)
		if (channel->fd == fd)
			return channel;
	return NULL;
}

void soft_wake_early(int fd)
{
	soft_lock();
	struct soft_channel *channel = find_channel(fd);

	if (channel) {
		soft_hint_set(&channel->accepts_early_wakeup, true);
		update_nesting();
	}
	soft_unlock();
}
