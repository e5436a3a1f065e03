/* The embedded device: its calls, and its folders in order from lowest to highest:
 *
 *   engine       the lock, the epoll set, the thread, timers, channels
 *   trace        the trace, which every higher folder may call
 *   inject       fault injection, likewise
 *   objects      what the application holds: contexts, memory, queues, queue pairs
 *   path         connections to other processes: channels of queue pairs, and records
 *   path/shm, path/tcp, path/roce, rc, ud
 *                the kinds of paths; reliable and unreliable connections; datagrams. These folders
 *                do not call each other
 *   link         links between queue pairs, each in a channel of a path
 *   cm           the connection manager
 *   path/sim     simulated hosts, each with a device, and the network between them
 *
 * A folder calls only lower ones. It calls a higher one through a table that it gets from
 * softdev.c. The interface of a folder is the header named after it. tests/test_includes.py
 * enforces the order. engine/engine.h describes the locks.
 *
 * The device does not include Python or call libibverbs.
 */
#pragma once

#include "embedded.h"

/* Every call of the table is a function soft_<name>; softdev.c builds the table. The functions are
 * visible, because preload/ gives each of them the public name of the call. */
#define CALL(library, result, name, arguments)                                                     \
	__attribute__((visibility("default"))) result soft_##name arguments;
#include "abi/calls.h"
#undef CALL

/* Functions of embedded.h that programs under `aiordma run` look up. */
#define VISIBLE(name) extern __typeof__(name) name __attribute__((visibility("default")))
VISIBLE(aiordma_embedded_raise);
VISIBLE(aiordma_embedded_raise_on);
VISIBLE(aiordma_embedded_faults);
VISIBLE(aiordma_embedded_fault_count);
#undef VISIBLE
