/* The embedded device: its calls, and its folders from lowest to highest:
 *
 *   engine       the lock, the epoll set, the thread, timers, channels
 *   trace        the trace, which every higher folder may call
 *   inject       fault injection, which every higher folder may call
 *   objects      the application's objects: contexts, memory, queues, queue pairs
 *   path         connections to other processes, with a channel for each queue pair
 *   path/shm, path/tcp, path/roce, rc, ud
 *                the kinds of paths; reliable and unreliable connections; datagrams. These folders
 *                do not call each other
 *   link         links between queue pairs, each in a channel of a path
 *   cm           the connection manager
 *   sim          simulated hosts, each with a device, and the network between them
 *
 * A folder calls lower folders directly, and higher folders only through tables that softdev.c
 * installs. The interface of a folder is the header named after it. tests/test_includes.py enforces
 * the order. engine/engine.h describes the locks.
 *
 * The device does not include Python or call libibverbs.
 */
#pragma once

#include "embedded.h"

/* Declare soft_<name>() for every call in the table that softdev.c builds. The functions are
 * visible, because preload/ gives each of them its call's public name. */
#define CALL(library, result, name, arguments)                                                     \
	__attribute__((visibility("default"))) result soft_##name arguments;
#include "abi/calls.h"
#undef CALL

/* Functions of embedded.h that programs look up at run time under `aiordma run`. */
#define VISIBLE(name) extern __typeof__(name) name __attribute__((visibility("default")))
VISIBLE(aiordma_embedded_raise);
VISIBLE(aiordma_embedded_raise_on);
VISIBLE(aiordma_embedded_faults);
VISIBLE(aiordma_embedded_fault_count);
#undef VISIBLE
