/* A channel: the file descriptor that tells an application "look into your queue of events".
 *
 * The fd is an epoll instance with an eventfd inside.  An application that waits with its own
 * poll() and takes a readable fd as the promise of an event (as the example of ibv_get_cq_event(3)
 * does) gets exactly that.  An application that says it can live with "nothing there" (ours does,
 * see soft_wake_early) gets the engine's epoll instance nested into the fd as well: the arrival
 * of data at any stream then wakes its thread directly, and the call that looks for an event does
 * the device's work on the way.  A thread that blocks in ibv_get_cq_event has that in any case; one
 * that waits for rare events (of the CM, asynchronous ones) has not, or every frame would wake it.
 *
 * The eventfd is written only when the queue stops being empty, and not at all when the thread that
 * makes the event is the one that will look for it.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine_internal.h"

enum { NESTED_CHANNELS = 32 };

/* Channels of completions have it nested if any asks for early wake-ups, because their threads do
 * all of the device's work; other channels only when there is none of those, or one frame would
 * wake an application twice.  Their number is bounded: the kernel allows 100 paths of three epoll
 * instances from a file to a waiter (fs/eventpoll.c, path_limits), and beyond that refuses the
 * application's own epoll_ctl. */
static void update_nesting(void)
{
	int leaders = 0, nested = 0;

	soft_list_each (struct soft_channel, channel, &soft_device.engine->channels, node)
		leaders += channel->early && channel->completions;
	soft_list_each (struct soft_channel, channel, &soft_device.engine->channels, node) {
		struct epoll_event event = {.events = EPOLLIN};
		bool wanted = channel->early && (channel->completions || !leaders) &&
			      nested < NESTED_CHANNELS;

		nested += wanted;
		/* Should the kernel refuse, the channel is signalled later than it could be. */
		if (wanted != channel->nested &&
		    !epoll_ctl(channel->fd, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL,
			       soft_device.engine->epoll_fd, &event))
			soft_hint_set(&channel->nested, wanted);
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
	channel->losses = soft_device.engine->losses;
	soft_list_append(&soft_device.engine->channels, &channel->node);
	soft_unlock();
	return 0;
}

bool soft_channel_lost(const struct soft_channel *channel)
{
	soft_lock();
	bool lost = channel->losses != soft_device.engine->losses;

	soft_unlock();
	return lost;
}

void soft_channel_destroy(struct soft_channel *channel)
{
	soft_lock();
	soft_list_remove(&channel->node);
	update_nesting();
	soft_unlock();
	if (soft_channel_lost(channel))
		return;
	close(channel->fd);
	close(channel->event_fd);
}

static void write_event(struct soft_channel *channel)
{
	const uint64_t one = 1;

	if (!channel->signalled)
		channel->signalled = write(channel->event_fd, &one, sizeof(one)) == sizeof(one);
	channel->deferred = false;
}

void soft_channel_signal(struct soft_channel *channel)
{
	soft_assert_locked();
	if (channel->signalled)
		return;
	if (soft_channel_is_current(channel))
		channel->deferred = true;
	else
		write_event(channel);
}

void soft_channel_announce(struct soft_channel *channel)
{
	if (channel->deferred)
		write_event(channel);
}

void soft_channel_consume(struct soft_channel *channel)
{
	uint64_t count;

	if (channel->signalled)
		channel->signalled =
			read(channel->event_fd, &count, sizeof(count)) != sizeof(count);
	channel->deferred = false;
}

bool soft_channel_nonblocking(const struct soft_channel *channel)
{
	/* soft_wake_early implies it. */
	return soft_hint_get(&channel->early) || fcntl(channel->fd, F_GETFL) & O_NONBLOCK;
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
		rc = EBADF; /* the program has closed them: it would never sleep again */
	soft_counter_add(&channel->sleepers, -1u);
	return rc;
}

bool soft_channels_depend_on_engine(void)
{
	bool led = false;

	soft_list_each (struct soft_channel, channel, &soft_device.engine->channels, node)
		led |= channel->completions && soft_hint_get(&channel->nested);
	/* The threads that do the device's work signal the others on the way. */
	soft_list_each (struct soft_channel, channel, &soft_device.engine->channels, node)
		if (soft_counter_get(&channel->wanted) && !soft_hint_get(&channel->nested) &&
		    !soft_counter_get(&channel->sleepers) && !(led && channel->early))
			return true;
	return false;
}

static struct soft_channel *channel_of(int fd)
{
	soft_list_each (struct soft_channel, channel, &soft_device.engine->channels, node)
		if (channel->fd == fd)
			return channel;
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
