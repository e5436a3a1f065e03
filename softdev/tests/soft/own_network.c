/* Gives a test with RoCE its own network namespace, because only one process can bind its UDP
 * port. Where that is not permitted, these tests take turns: each locks this file until its
 * process ends. */
#define _GNU_SOURCE /* unshare */
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

__attribute__((constructor)) static void own_network(void)
{
	struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP};
	const char *links = getenv("AIORDMA_EMBEDDED_LINKS");

	if (!links || strcmp(links, "roce"))
		return;
	if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET)) {
		if (flock(open("own_network.c", O_RDONLY | O_CLOEXEC), LOCK_EX))
			abort();
		return;
	}
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &loopback))
		abort();
	close(fd);
}
