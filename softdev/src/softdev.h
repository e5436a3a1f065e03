/* The embedded device: its calls, and the order of its folders, from the lowest to the highest:
 *
 *   engine       the lock, the epoll set, the thread, timers, channels
 *   trace        the trace, a hook that every higher folder may call
 *   inject       fault injection, likewise
 *   objects      what the application holds: contexts, memory, queues, queue pairs
 *   path         what joins this process with others: channels of queue pairs, and records
 *   path/shm, path/tcp, path/roce, rc, ud
 *                the kinds of paths; reliable and unreliable connections; datagrams: they do not
 *                call each other
 *   link         links between queue pairs, each in a channel of a path
 *   cm           the connection manager
 *   path/sim     simulated hosts, each with a device, and the network between them
 *
 * A folder calls lower ones only; what it needs of a higher one it calls through a table that
 * softdev.c gives to it.  Its interface is the header that has its name.  tests/test_includes.py
 * fails on a call against the order.  engine/engine.h has the locks.
 *
 * Nothing here includes Python or calls libibverbs.
 */
#pragma once

#include "embedded.h"

/* Every call of the table is a function soft_<name>; the table is put together in softdev.c.  They
 * are visible outside: preload/ gives each of them the public name of the call. */
#define CALL(library, result, name, arguments)                                                     \
	__attribute__((visibility("default"))) result soft_##name arguments;
#include "abi/calls.h"
#undef CALL

/* And of embedded.h what programs under `aiordma run` look up. */
#define VISIBLE(name) extern __typeof__(name) name __attribute__((visibility("default")))
VISIBLE(aiordma_embedded_raise);
VISIBLE(aiordma_embedded_raise_on);
VISIBLE(aiordma_embedded_faults);
VISIBLE(aiordma_embedded_fault_count);
#undef VISIBLE
