/* Checks whether the kernel denies system calls that the device needs. Seccomp filters of
 * containers and services may deny a call with any errno value.
 *
 * A filter inspects a call before the kernel executes it, so each call is tried with arguments that
 * have no effect. Calls with a fallback (memfd_create, pidfd_open, process_vm_readv) and calls that
 * only shared-memory links need are not checked. getrandom is checked together with its fallback.
 */
#define _GNU_SOURCE /* accept4, sendmmsg */
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include "engine_internal.h"

int soft_open_identity(const char *name)
{
	int fd = memfd_create(name, MFD_CLOEXEC);

	return fd >= 0 ? fd : socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
}

ssize_t soft_read_random(void *to, size_t length, unsigned flags)
{
	ssize_t got = getrandom(to, length, flags);

	if (got >= 0 || (errno != ENOSYS && errno != EPERM && errno != EACCES))
		return got;
	const int error = errno; /* restored below, so that callers report why getrandom failed */
	int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);

	if (fd >= 0) {
		got = read(fd, to, length);
		close(fd);
	}
	errno = error;
	return got;
}

/* Check whether the kernel denies the call, unless an earlier call has been denied. */
#define TRY(name, call) rc = rc ? rc : soft_check_call(name, call)

/* Check whether the kernel denies socket(2), by opening and closing a socket. */
static int try_socket(void)
{
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int rc = soft_check_call("socket(AF_INET)", fd);

	soft_close_fd(&fd);
	return rc;
}

int soft_check_calls(void)
{
	static const struct itimerspec never;
	struct sockaddr_storage address = {.ss_family = AF_INET};
	struct sockaddr *const at = (struct sockaddr *)&address;
	socklen_t length = sizeof(address), size = sizeof(int);
	struct msghdr message = {0};
	struct epoll_event event = {0};
	uint8_t byte = 0;
	struct iovec vector = {.iov_base = &byte, .iov_len = sizeof(byte)};
	int value = 0, rc = try_socket();

	/* A permitted call fails with EBADF because of the descriptor -1 and has no effect. */
	TRY("epoll_ctl", epoll_ctl(-1, EPOLL_CTL_ADD, -1, &event));
	TRY("epoll_wait or epoll_pwait", epoll_wait(-1, &event, 1, 0));
	TRY("poll or ppoll", poll(NULL, 0, 0));
	TRY("timerfd_settime", timerfd_settime(-1, 0, &never, NULL));
	TRY("fcntl", fcntl(-1, F_GETFL));
	TRY("getrandom", soft_read_random(&byte, sizeof(byte), 0));
	TRY("setsockopt", setsockopt(-1, SOL_SOCKET, SO_REUSEADDR, &value, size));
	TRY("getsockopt", getsockopt(-1, SOL_SOCKET, SO_ERROR, &value, &size));
	TRY("bind", bind(-1, at, length));
	TRY("listen", listen(-1, 1));
	TRY("connect", connect(-1, at, length));
	TRY("accept4", accept4(-1, at, &length, SOCK_CLOEXEC));
	TRY("getsockname", getsockname(-1, at, &length));
	TRY("getpeername", getpeername(-1, at, &length));
	TRY("sendto", send(-1, &byte, sizeof(byte), 0));
	TRY("recvfrom", recv(-1, &byte, sizeof(byte), 0));
	TRY("sendmsg", sendmsg(-1, &message, 0));
	TRY("recvmsg", recvmsg(-1, &message, 0));
	TRY("readv", readv(-1, &vector, 1));
	return rc;
}

int soft_check_packet_calls(void)
{
	struct mmsghdr message = {0};
	struct ifreq request = {0};
	int rc = 0;

	/* A permitted call fails with EBADF because of the descriptor -1 and has no effect. */
	TRY("sendmmsg", sendmmsg(-1, &message, 1, 0));
	TRY("recvmmsg", recvmmsg(-1, &message, 1, 0, NULL));
	TRY("ioctl", ioctl(-1, SIOCGIFMTU, &request));
	return rc;
}
