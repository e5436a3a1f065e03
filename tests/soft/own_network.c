/* A network namespace for a test with RoCE, whose UDP port one process at a time can have.  Where that is
 * not allowed, the test goes on without. */
#define _GNU_SOURCE /* unshare */
#include <net/if.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

__attribute__((constructor)) static void own_network(void)
{
	struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP};
	const char *links = getenv("AIORDMA_EMBEDDED_LINKS");

	if (!links || strcmp(links, "roce") ||
	    (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET)))
		return;
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &loopback))
		abort();
	close(fd);
}
