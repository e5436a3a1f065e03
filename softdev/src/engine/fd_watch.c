/* Manages the descriptors in the engine's epoll set. While a port is down, its descriptors are
 * removed from the set. */
#define _GNU_SOURCE /* struct ucred */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine_internal.h"

static bool is_down(const struct soft_fd_watch *watch, uint32_t down_ports)
{
	return watch->ports && !(watch->ports & ~down_ports);
}

static int control_epoll(int operation, struct soft_fd_watch *watch, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = watch};

	return epoll_ctl(soft_device.engine->epoll_fd, operation, watch->fd, &event) ? errno : 0;
}

void soft_close_fd(int *fd)
{
	const int error = errno;

	if (*fd >= 0 && !soft_device.engine->descriptors_lost)
		close(*fd);
	*fd = -1;
	errno = error;
}

int soft_set_option(int fd, int level, int option, int value)
{
	return setsockopt(fd, level, option, &value, sizeof(value)) ? errno : 0;
}

static void set_buffer(int fd, int option, int privileged_option, int size)
{
	if (soft_set_option(fd, SOL_SOCKET, privileged_option, size))
		soft_set_option(fd, SOL_SOCKET, option, size);
}

void soft_set_receive_buffer(int fd, int size)
{
	set_buffer(fd, SO_RCVBUF, SO_RCVBUFFORCE, size);
}

void soft_set_send_buffer(int fd, int size)
{
	set_buffer(fd, SO_SNDBUF, SO_SNDBUFFORCE, size);
}

void soft_put_control(struct msghdr *message, int level, int type, const void *data, size_t length)
{
	struct cmsghdr *header =
		(void *)((uint8_t *)message->msg_control + message->msg_controllen);

	header->cmsg_level = level;
	header->cmsg_type = type;
	header->cmsg_len = CMSG_LEN(length);
	memcpy(CMSG_DATA(header), data, length);
	message->msg_controllen += CMSG_SPACE(length);
}

/* Returns the overflow user ID, which stands for all users that are not mapped into this user
 * namespace. */
static uid_t overflow_uid(void)
{
	char text[16] = "65534"; /* the kernel's DEFAULT_OVERFLOWUID */
	int fd = open("/proc/sys/kernel/overflowuid", O_RDONLY | O_CLOEXEC);

	if (fd >= 0) {
		(void)!read(fd, text, sizeof(text) - 1);
		close(fd);
	}
	return (uid_t)strtoul(text, NULL, 10);
}

bool soft_is_same_user(int fd, pid_t *pid)
{
	struct ucred credentials;
	socklen_t length = sizeof(credentials);

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) ||
	    credentials.uid != geteuid() || credentials.uid == overflow_uid())
		return false;
	*pid = credentials.pid;
	return true;
}

int soft_watch(struct soft_fd_watch *watch, uint32_t events)
{
	soft_assert_locked();
	int rc = 0;

	if (watch->watched && watch->interest == events)
		return 0;
	if (!is_down(watch, soft_device.engine->down_ports))
		rc = control_epoll(watch->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, watch, events);
	if (rc)
		return rc;
	if (!watch->watched) {
		watch->watched = true;
		soft_list_append(&soft_device.engine->watches, &watch->node);
	}
	watch->interest = events;
	return 0;
}

/* Drop the watch's event if the current step has collected but not yet served it. */
static void drop_event(const struct soft_fd_watch *watch)
{
	for (int i = 0; i < soft_device.engine->event_count; i++)
		if (soft_device.engine->events[i].data.ptr == watch)
			soft_device.engine->events[i].data.ptr = NULL;
}

void soft_unwatch(struct soft_fd_watch *watch)
{
	soft_assert_locked();
	if (!watch->watched)
		return;
	if (!is_down(watch, soft_device.engine->down_ports))
		control_epoll(EPOLL_CTL_DEL, watch, 0);
	watch->watched = false;
	watch->interest = 0;
	soft_list_remove(&watch->node);
	drop_event(watch);
}

void soft_watch_close(struct soft_fd_watch *watch)
{
	soft_unwatch(watch);
	soft_close_fd(&watch->fd);
}

void soft_watches_set_down_ports(uint32_t ports)
{
	soft_assert_locked();
	soft_list_each (struct soft_fd_watch, watch, &soft_device.engine->watches, node) {
		bool was_down = is_down(watch, soft_device.engine->down_ports);

		if (is_down(watch, ports) == was_down)
			continue;
		/* Adding the descriptor is not expected to fail, because the epoll set normally
		 * contained it until the port went down. */
		control_epoll(was_down ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, watch, watch->interest);
		if (!was_down)
			drop_event(watch);
	}
	soft_device.engine->down_ports = ports;
}
