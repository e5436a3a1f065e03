/* The rsockets of librdmacm, refused: each call (exports.txt) fails with EOPNOTSUPP, and the first one of a
 * process says so on standard error.
 *
 * rsockets are a protocol of librdmacm's own above verbs.  The line is there because most programs
 * go on without a word: librspreload, which puts rsockets under programs for TCP, takes the kernel's
 * TCP wherever rsocket() fails, and what was meant as a test of RDMA would pass without any.
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
	static atomic_flag told = ATOMIC_FLAG_INIT;
	ssize_t written = 0;

	if (!atomic_flag_test_and_set(&told))
		written = write(STDERR_FILENO, line, sizeof(line) - 1);
	(void)written; /* standard error may be closed: the errno value is told in any case */
	errno = EOPNOTSUPP;
	return -1;
}
