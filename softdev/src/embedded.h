/* Public interface of the embedded device: its calls, events, faults, traces and simulation. Must
 * not contain preprocessor directives other than the guard and includes, because cffi reads it
 * (native/lib_source.py). */
#pragma once

#include "abi/abi.h"

/* Returns the calls of the embedded software device, which is always available. The device runs
 * while at least one of its device contexts or event channels is open. */
const struct aiordma_calls *aiordma_embedded_calls(void);

/* ---- events, faults, traces ------------------------------------------------------------------ */

/* Programs under `aiordma run` can look up aiordma_embedded_raise, aiordma_embedded_raise_on,
 * aiordma_embedded_faults and aiordma_embedded_fault_count with dlsym(3)
 * (softdev/docs/ci-without-hardware.md). */

/* Raise an event on this process's embedded devices, for tests. The event is reported to every open
 * context (ibv_get_async_event(3)) and has its full effect:
 *
 *  - IBV_EVENT_PORT_ERR takes the port down (ibv_query_port). No stream is read, written, opened or
 *    accepted. A connected reliable queue pair retries for the time given by its timeout and
 *    retry_cnt, but for at least half a second and at most a minute. A timeout of 0 means forever.
 *    Its requests and those of its peer then fail with IBV_WC_RETRY_EXC_ERR. Messages of the
 *    connection manager still pass. No effect if the port is already down.
 *  - IBV_EVENT_PORT_ACTIVE brings the port up. Queue pairs that have not given up continue. No
 *    effect if the port is already up.
 *  - IBV_EVENT_GID_CHANGE reads the host's addresses again. The device also detects address changes
 *    without this call, and then reports the same event.
 *  - IBV_EVENT_LID_CHANGE is only reported, because LIDs are not used as addresses. Bound ids get
 *    RDMA_CM_EVENT_ADDR_CHANGE.
 *  - IBV_EVENT_DEVICE_FATAL moves every queue pair to the error state, and its peer gets no
 *    responses. In contexts that are already open, creating or modifying a queue pair fails with
 *    EIO, but objects can be destroyed. Contexts opened later work normally. Bound ids get
 *    RDMA_CM_EVENT_DEVICE_REMOVAL and become unusable. The connection manager reopens its own
 *    context after the last object in it has been destroyed.
 *  - IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE and IBV_EVENT_CLIENT_REREGISTER are only reported,
 *    because this device has nothing that could change with them.
 *
 * All ports are up again after the last context and event channel have been closed. Returns 0, or
 * EINVAL for any other event.
 */
int aiordma_embedded_raise(enum ibv_event_type event);
/* Raise an event like aiordma_embedded_raise, but only on the device with this name. NULL means all
 * devices. Returns ENODEV if the device does not exist. */
int aiordma_embedded_raise_on(const char *device, enum ibv_event_type event);

/* Replace the fault spec of this process's embedded devices, for tests. NULL removes the spec. A
 * spec is a comma-separated list of name=value parts (defaults in parentheses):
 *
 *   seed=N         seed of the random numbers; the same seed causes the same faults (0)
 *   loss=WHEN      incoming frames and datagrams are dropped
 *   duplicate=WHEN incoming frames and datagrams arrive twice
 *   frames=WHICH   frames affected by loss and duplicate: requests, answers or all (all)
 *   delay=TIME     delay of incoming frames and datagrams: 10us, 2ms, 1s
 *   jitter=TIME    maximum random additional delay; the order within a connection is kept
 *   rate=BYTES     maximum bytes that the device receives per second: 10MB
 *   cut=WHEN       a connection breaks; existing connections are counted before new ones
 *   cut_after=BYTES  bytes that a connection receives before it breaks (0)
 *   rnr=WHEN       a request that needs a receive gets an RNR NAK
 *   overrun=WHEN   a completion overruns its queue
 *   register=WHEN  a memory registration fails with ENOMEM
 *   handshake=WHEN an incoming connection manager message is dropped
 *   qp=NUMBER      only connections, requests and datagrams of this queue pair are affected
 *   cq=HANDLE      only completions of this completion queue are affected
 *   device=NAME    only this device is affected: embedded1
 *
 * WHEN is a probability (0.01), an occurrence (@3, @3-5, or @3- for the third and all later ones),
 * or both (0.5@3-). Frames, and requests that need a receive, are counted per connection. All other
 * occurrences are counted per process.
 *
 * Delayed data is held in memory, up to 64 MiB per connection. Beyond this limit, the oldest frames
 * are delivered early and datagrams are dropped.
 *
 * If a reliable connection may lose frames, both sides retransmit as defined by InfiniBand until
 * the connection ends. A request is repeated when its timeout of 4.096 us * 2^timeout (at least a
 * millisecond, never if timeout is 0) is over, or immediately when a NAK reports a gap. It is
 * repeated up to retry_cnt times in a row. UC and UD queue pairs do not retransmit.
 *
 * Returns 0, or EINVAL or ENOMEM with a message in `error`. After an error, the previous spec stays
 * in effect. The environment variable AIORDMA_EMBEDDED_FAULTS sets the initial spec. If that is
 * invalid, the reason is printed to stderr and opening the device fails with EINVAL.
 */
int aiordma_embedded_faults(const char *spec, char *error, size_t room);

/* Store the number of faults injected so far in `counts`. */
void aiordma_embedded_fault_counts(struct aiordma_fault_counts *counts);

/* Returns one member of struct aiordma_fault_counts by name, such as "lost", or -1 if the name is
 * unknown. `chances` is not available. The function is for programs under `aiordma run`, which must
 * not depend on the layout of the struct. */
int64_t aiordma_embedded_fault_count(const char *name);

/* Start a trace of this process's embedded devices (docs/trace.md). The trace is appended to the
 * file `path` as lines of JSON. %p in `path` stands for the process ID. If another process is
 * writing to the file, a dot and the process ID are appended to its name. Because a trace contains
 * memory keys, the file must belong to this user and be inaccessible to others.
 *
 * Returns 0 with the name of the file in `used`, or an errno value such as:
 *
 *   EBUSY   a trace is already running; AIORDMA_TRACE starts one when the first device is opened
 *   ELOOP   the file is a symbolic link
 *   EMLINK  the file has other hard links
 *   ESPIPE  the file is not a regular file
 *   EPERM   the file belongs to another user or is accessible to others
 *
 * In the last four cases, `used` contains a message with the reason.
 */
int aiordma_trace_start(const char *path, char *used, size_t size);
/* Stop the trace, if one is running. */
void aiordma_trace_stop(void);

/* ---- simulation ------------------------------------------------------------------------------ */

/* Simulated hosts for aiordma.testing.simulate (sim/sim.c). Each host has its own devices,
 * which communicate by RoCE v2 over a simulated network in virtual time. All functions must be
 * called from a single thread. */

enum {
	/* Maximum numbers of hosts and networks. Device n of each host is attached to network n.
	 * Host h has the address 10.n.0.(h + 1) on this network. */
	AIORDMA_SIM_HOSTS = 64,
	AIORDMA_SIM_NETWORKS = 4
};

enum aiordma_sim_state {
	AIORDMA_SIM_UP,
	AIORDMA_SIM_STOPPED, /* incoming datagrams are held until the machine is up */
	AIORDMA_SIM_DEAD /* final; datagrams from and to the machine are dropped */
};

/* Properties of a network between two hosts, in one direction. */
struct aiordma_sim_link {
	uint64_t latency_ns;
	uint64_t jitter_ns; /* maximum random additional latency */
	uint64_t ps_per_byte;
	uint64_t late_ns; /* maximum extra delay of late datagrams; may reorder them */
	uint32_t loss; /* probability per million, like `duplicate` and `late` */
	uint32_t duplicate;
	uint32_t late;
	uint32_t cut; /* nonzero if the network drops all datagrams */
};

/* The state of the program that runs on a machine. The simulation and the program's scheduler share
 * this struct. */
struct aiordma_sim_program {
	uint64_t busy_until; /* time until which the program does not check for input */
	int has_input; /* nonzero if `fd` is readable */
	int fd; /* epoll instance of the program; -1 if not set yet */
};

/* Begin a simulation. Returns 0, EBUSY if a simulation is already running, or EALREADY if the
 * process's own device is in use. */
int aiordma_sim_begin(uint64_t seed);
/* End the simulation and free all machines. Returns the number of machines whose program has not
 * closed its device. */
int aiordma_sim_end(void);
/* Create a machine for a host, and direct all further calls to it (aiordma_sim_enter). Hosts are
 * numbered from 0. The host's previous machine, if any, must be dead. Returns the number of the new
 * machine. */
int aiordma_sim_boot(int host);
void aiordma_sim_set_state(int machine, enum aiordma_sim_state state);
/* Direct all further calls to the device of this machine, or to the process's own device if
 * `machine` is -1. */
void aiordma_sim_enter(int machine);
struct aiordma_sim_link *aiordma_sim_way(int network, int from, int to);
struct aiordma_sim_program *aiordma_sim_program(int machine);
uint64_t aiordma_sim_now(void); /* virtual time in nanoseconds */
/* Add a program's computing time to the virtual time. */
void aiordma_sim_pass(uint64_t ns);
/* Advance the virtual time by the duration of one poll, so that a program that polls until a
 * deadline eventually reaches the deadline. Returns the new time. */
uint64_t aiordma_sim_look(void);
/* Returns the time of the next event, or UINT64_MAX if none is pending. */
uint64_t aiordma_sim_next(void);
/* Process all events that are due by `until`. Stops earlier if a program has received input and is
 * no longer busy. */
void aiordma_sim_run(uint64_t until);
/* Returns a hash of the history of the simulation. */
uint64_t aiordma_sim_trace(void);
/* Add a value to the history. */
void aiordma_sim_note(uint64_t value);
