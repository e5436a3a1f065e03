/* The rsockets of librdmacm are not supported: each call (exports.txt) fails with EOPNOTSUPP, and
 * the first one of a process writes a line to standard error.
 *
 * rsockets are a separate protocol of librdmacm above verbs. The message is needed because most
 * programs continue silently: librspreload, which runs TCP programs over rsockets, uses the
 * kernel's TCP if rsocket() fails, so a test that was meant to use RDMA would pass without it.
 */
#include <errno.h>
#include <stdatomic.h>
#include <unistd.h>

#include "preload.h"

long preload_refuse_rsocket(void)
{
	static const char line[] = "aiordma run: the embedded device has no rsockets, so rsocket() "
				   "and related functions "
				   "fail with EOPNOTSUPP; if the program continues, it uses the "
				   "kernel's TCP instead of "
				   "RDMA: run it on SoftRoCE or a card\n";
	static atomic_flag reported = ATOMIC_FLAG_INIT;
	ssize_t written = 0;

	if (!atomic_flag_test_and_set(&reported))
		written = write(STDERR_FILENO, line, sizeof(line) - 1);
	(void)written; /* standard error may be closed; errno is set in any case */
	errno = EOPNOTSUPP;
	return -1;
}
