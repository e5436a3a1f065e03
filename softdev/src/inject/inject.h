/* Fault injection: the fault spec of this process, and the points in other folders that ask for it.
 *
 * The spec says how likely each kind of fault is, or which occurrence of it shall be.  Whether the
 * k-th frame of the n-th connection gets lost is a function of the seed, n and k alone: so the same
 * seed gives the same faults, whatever the threads and the other connections do meanwhile.
 */
#pragma once

#include "engine/engine.h"

struct soft_datagram;
struct soft_qp;

enum soft_fault {
	SOFT_FAULT_LOSS, /* of a frame or datagram that comes in */
	SOFT_FAULT_DUPLICATE, /* it comes twice */
	SOFT_FAULT_JITTER, /* only to draw numbers for it */
	SOFT_FAULT_RNR, /* a request that needs a receive gets an RNR NAK */
	SOFT_FAULT_DISCONNECT, /* a connection breaks */
	SOFT_FAULT_OVERRUN, /* a completion finds its queue full */
	SOFT_FAULT_REGISTER, /* a registration finds no memory */
	SOFT_FAULT_HANDSHAKE, /* a message of the connection manager gets lost */
	SOFT_FAULTS,
};

/* Occurrences count from 1. */
struct soft_fault_when {
	double probability; /* 0: never */
	uint64_t first, last;
};

enum soft_fault_frames { SOFT_FAULT_REQUESTS = 1 << 0, SOFT_FAULT_ANSWERS = 1 << 1 };

struct soft_fault_spec {
	uint64_t seed;
	struct soft_fault_when when[SOFT_FAULTS];
	uint64_t delay_ns;
	uint64_t jitter_ns;
	uint64_t rate; /* bytes that the device takes in per second; 0: no limit */
	uint64_t cut_after; /* bytes that a connection has taken in before it breaks */
	unsigned frames; /* that may be lost or doubled: enum soft_fault_frames */
	uint32_t qp_num; /* 0: all */
	uint32_t cq; /* handle; 0: all */
	uint32_t ports; /* of devices; 0: all */
};

/* Callbacks of higher folders for faults; softdev.c sets them. */
struct soft_fault_hooks {
	int (*devices)(void); /* how many there are */
	/* There is another spec, or none. */
	void (*spec_changed)(void);
	/* Is the queue pair's peer told that there is no receive? */
	bool (*refuses)(struct soft_qp *qp);
	/* The datagram is kept, to be received later or never; false: it is to be received at once. */
	bool (*keeps_datagram)(const struct soft_qp *qp, const struct soft_datagram *datagram,
			       const uint8_t *payload, uint32_t length);
};

struct soft_inject {
	bool set; /* there is a spec */
	bool asked; /* the environment has been, for one */
	struct soft_fault_spec spec;
	struct aiordma_fault_counts counts;
	uint64_t seen[SOFT_FAULTS]; /* of what is counted in the process, since there is a spec */
	const struct soft_fault_hooks *hooks;
};

#define soft_faults_set (soft_device.inject->set)
#define soft_faults (soft_device.inject->spec)
#define soft_fault_counts (soft_device.inject->counts)

extern const struct soft_subsystem soft_inject_subsystem;

/* fault_spec.c.  0, or EINVAL and what is wrong with which part. */
int soft_fault_parse(const char *text, struct soft_fault_spec *spec, char *error, size_t room);
/* Applies the spec of the environment, once: 0, or EINVAL after a line on stderr. */
int soft_faults_of_environment(void);

/* fault.c.  The number that the seed has for this place, from 0 up to 1. */
double soft_fault_number(enum soft_fault fault, uint64_t connection, unsigned stream,
			 uint64_t occurrence);
bool soft_fault_strikes(enum soft_fault fault, uint64_t connection, unsigned stream, uint64_t draw,
			uint64_t occurrence);
/* Does OVERRUN, REGISTER or HANDSHAKE strike the next one, at the device with that port?  Each is counted in the
 * process; `cq`: of OVERRUN. */
bool soft_fault_next(enum soft_fault fault, uint32_t port, uint32_t cq);
/* Is the spec about that device? */
bool soft_fault_is_of(uint32_t port);

static inline bool soft_fault_not_ready(struct soft_qp *qp)
{
	return soft_faults_set && soft_device.inject->hooks->refuses(qp);
}

static inline bool soft_fault_keeps_datagram(const struct soft_qp *qp,
					     const struct soft_datagram *datagram,
					     const uint8_t *payload, uint32_t length)
{
	return soft_faults_set &&
	       soft_device.inject->hooks->keeps_datagram(qp, datagram, payload, length);
}
