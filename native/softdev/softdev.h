/* The embedded device: its calls, and the order of its folders.
 *
 *   engine   the lock, the epoll set, the thread, timers, channels
 *   trace    the trace, a hook that every folder above may call
 *   inject   fault injection, likewise
 *   objects  what the application holds: contexts, memory, queues, queue pairs
 *   rc, ud   reliable and unreliable connections; datagrams
 *   shm      peers on this host: shared segments, rings, cross-memory attach
 *   wire     links between queue pairs, over TCP or a channel in shared memory
 *   cm       the connection manager
 *
 * A folder calls those above it in this list and none below; where it has to, it goes through a
 * table that softdev.c gives to it.  Its interface is the header that has its name.  `make folders`
 * lists who calls whom and fails on a call against the order. docs/embedded-device.md has the
 * locks.
 *
 * Nothing here includes Python or calls libibverbs.
 */
#ifndef AIORDMA_SOFTDEV_H
#define AIORDMA_SOFTDEV_H

#include "embedded.h"

/* Every call of the table is a function soft_<name>; the table is put together in softdev.c.  They
 * alone are visible outside: the library of preload.c gives each of them the public name of the
 * call. */
#define CALL(library, result, name, arguments)                                                     \
	__attribute__((visibility("default"))) result soft_##name arguments;
#include "abi/calls.h"
#undef CALL

#endif
