/* The public part of the embedded device: its table of calls, events, faults and traces. cffi reads
 * it too: nothing of the preprocessor but the guard. */
#pragma once

#include "abi/abi.h"

/* The embedded software device, always there; it starts working when a device or an event channel
 * is opened and stops when the last one is closed. */
const struct aiordma_calls *aiordma_embedded_calls(void);

/* ---- events, faults, traces ------------------------------------------------------------------ */

/* Of these, a program under `aiordma run` finds aiordma_embedded_raise, aiordma_embedded_raise_on,
 * aiordma_embedded_faults and aiordma_embedded_fault_count by dlsym(3): docs/ci-without-hardware.md. */

/* For tests: brings an event about in the embedded devices of this process, and tells it to every open
 * context (ibv_get_async_event(3)).  What the event says really happens:
 *  - IBV_EVENT_PORT_ERR: the port is down (ibv_query_port).  No stream is read, written, made or
 *    accepted.  A reliable queue pair that is connected goes on trying for as long as its timeout
 *    and retry_cnt say (never for ever unless timeout is 0; at least half a second); then its
 *    requests fail with IBV_WC_RETRY_EXC_ERR, and so do those of its peer.  The connection manager's
 *    own messages still pass.  Nothing happens if it is down.
 *  - IBV_EVENT_PORT_ACTIVE: the port is up; queue pairs that have not given up continue.  Nothing
 *    happens if it is up.
 *  - IBV_EVENT_GID_CHANGE: the host's addresses are read again.  (A change of them is noticed, and
 *    tells this event, without this call too.)
 *  - IBV_EVENT_LID_CHANGE: only told, since nothing is reached by a LID; ids that are bound get
 *    RDMA_CM_EVENT_ADDR_CHANGE.
 *  - IBV_EVENT_DEVICE_FATAL: every queue pair goes to the error state, its peer gets no answer, and in
 *    the contexts that are open now none can be made or modified any more (EIO); what is there can
 *    be destroyed.  Contexts opened later are healthy.  Ids that are bound get
 *    RDMA_CM_EVENT_DEVICE_REMOVAL and are over; when the last thing of the connection manager's own
 *    context is closed, that too is opened anew.
 *  - IBV_EVENT_PKEY_CHANGE, IBV_EVENT_SM_CHANGE, IBV_EVENT_CLIENT_REREGISTER: this device has
 *    nothing that could change with them; only told.
 * When the last context is closed the port is up again.  Returns 0; EINVAL for any other event. */
int aiordma_embedded_raise(enum ibv_event_type event);
/* The same in one device, by its name; NULL for all, as above.  ENODEV: there is none of that name. */
int aiordma_embedded_raise_on(const char *device, enum ibv_event_type event);

/* For tests: faults of the embedded device, and of its connections, in this process from now on;
 * NULL for none.  The fault spec is a list of name=value:
 *
 *  seed=N         of the random numbers: the same seed, the same faults (0)
 *  loss=WHEN      what comes in gets lost: frames of connections, datagrams
 *  duplicate=WHEN what comes in comes twice
 *  frames=WHICH   that loss and duplicate are about: requests, answers or all (all)
 *  delay=TIME     what comes in is late by so much: 10us, 2ms, 1s
 *  jitter=TIME    and by up to so much more; what belongs together keeps its order
 *  rate=BYTES     the device takes in no more than this in a second: 10MB
 *  cut=WHEN       a connection breaks: those that there are are counted first, then new ones
 *  cut_after=BYTES  when so much has come in by it (0)
 *  rnr=WHEN       a request that needs a receive is told that there is none
 *  overrun=WHEN   a completion finds its queue full
 *  register=WHEN  a registration of memory fails with ENOMEM
 *  handshake=WHEN a message of the connection manager that comes in gets lost
 *  qp=NUMBER      connections, requests and datagrams of this queue pair alone
 *  cq=HANDLE      completions of this queue alone
 *  device=NAME    what is of this device alone: embedded1
 *
 * WHEN is a probability (0.01), or which occurrence (@3, @3-5, @3- for that one and all later
 * ones), or both (0.5@3-).  Frames, and requests that need a receive, are counted for each
 * connection.
 *
 * What is late waits in memory: of a connection at most 64 MiB, beyond which the oldest is taken in
 * early.
 *
 * A connection on which something may get lost keeps to the protocol that InfiniBand has for this,
 * on both sides and until it ends: requests are sent again after 4.096 us * 2^timeout (not if
 * timeout is 0), or at once when a gap is told, up to retry_cnt times in a row.  What UC and UD
 * queue pairs lose is lost.
 *
 * Returns 0, or EINVAL and in `error` what is wrong with the spec; then the one before stays.
 * The variable AIORDMA_EMBEDDED_FAULTS is a spec from the start; a wrong one is reported on stderr,
 * and the device cannot be opened (EINVAL). */
int aiordma_embedded_faults(const char *spec, char *error, size_t room);

/* Fills `counts` with the faults injected so far. */
void aiordma_embedded_fault_counts(struct aiordma_fault_counts *counts);

/* One of them by its name, "lost" or any other member of the structure; -1 when there is none of
 * that name.  For programs under `aiordma run`: with another version of the structure, too. */
int64_t aiordma_embedded_fault_count(const char *name);

/* The trace of the embedded device in this process (docs/trace.md): lines of JSON behind what is in
 * the file `path`, in which %p stands for the number of the process; when another process is
 * writing there, the file has that number at the end of its name.  Others may neither access the
 * file nor have chosen it.  Returns 0, and the name in `used`, or an errno value: EBUSY when there
 * is a trace already (AIORDMA_TRACE begins one with the first device that is opened); ELOOP for a
 * symbolic link, EMLINK for a file with other names, ESPIPE for one that is not regular, and EPERM for
 * one of another user or with rights for others, each with the reason in words in `used`. */
int aiordma_trace_start(const char *path, char *used, size_t size);
/* Nothing happens if there is none. */
void aiordma_trace_stop(void);

/* ---- simulation ------------------------------------------------------------------------------ */

/* For aiordma.testing.simulate: hosts in this process, each with a device of its own, which speak RoCE v2
 * over a network of the simulation, in virtual time (path/sim/sim.c).  Everything is done in one thread. */

enum {
	/* At most.  The address of host h on network n, where each of them has its device n, is 10.n.0.(h + 1). */
	AIORDMA_SIM_HOSTS = 64,
	AIORDMA_SIM_NETWORKS = 4
};

enum aiordma_sim_state {
	AIORDMA_SIM_UP,
	AIORDMA_SIM_STOPPED, /* what comes waits */
	AIORDMA_SIM_DEAD /* for good: what comes is lost, nothing goes out */
};

/* The way of datagrams from one host to another. */
struct aiordma_sim_link {
	uint64_t latency_ns;
	uint64_t jitter_ns; /* up to so much more */
	uint64_t ps_per_byte;
	uint64_t late_ns; /* at most, of those that others overtake */
	uint32_t loss; /* per million, as the next two */
	uint32_t duplicate;
	uint32_t late;
	uint32_t cut; /* nothing passes */
};

/* What a scheduler knows of a machine and the device does not, and the other way round. */
struct aiordma_sim_program {
	uint64_t busy_until; /* it does not look what has come before that */
	int has_input; /* its descriptor can be read: something has come for it, not for the device alone */
	int fd; /* of epoll_create(2), with all that it waits for; -1: none yet */
};

/* 0; EBUSY: there is a simulation; EALREADY: the process's own device is in use. */
int aiordma_sim_begin(uint64_t seed);
/* How many machines still have something open: it leaks. */
int aiordma_sim_end(void);
/* A new machine for host 0 and so on, which takes the place of one that is dead.  It is entered. */
int aiordma_sim_boot(int host);
void aiordma_sim_set_state(int machine, enum aiordma_sim_state state);
/* Calls are for the device of that machine from now on; -1: for the process's. */
void aiordma_sim_enter(int machine);
struct aiordma_sim_link *aiordma_sim_way(int network, int from, int to);
struct aiordma_sim_program *aiordma_sim_program(int machine);
uint64_t aiordma_sim_now(void); /* nanoseconds */
void aiordma_sim_pass(uint64_t ns); /* a program has taken so long */
uint64_t aiordma_sim_look(void); /* now, for a poll, which takes a moment */
uint64_t aiordma_sim_next(void); /* when something happens next; UINT64_MAX: never */
/* What is due by then happens, up to the first program that has input and is not busy. */
void aiordma_sim_run(uint64_t until);
/* A hash of what has happened, and something more that has. */
uint64_t aiordma_sim_trace(void);
void aiordma_sim_note(uint64_t what);
