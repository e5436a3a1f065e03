/* Fault injection: the fault spec of this process, and the functions with which other folders query
 * it.
 *
 * The spec gives the probability of each kind of fault, or which occurrences fail. Whether the k-th
 * frame of the n-th connection is lost depends on the seed, n and k only. The same seed therefore
 * causes the same faults, regardless of other threads and connections.
 */
#pragma once

#include "engine/engine.h"

struct soft_datagram;
struct soft_qp;

enum soft_fault {
	SOFT_FAULT_LOSS, /* of an incoming frame or datagram */
	SOFT_FAULT_DUPLICATE, /* an incoming frame or datagram arrives twice */
	SOFT_FAULT_JITTER, /* only used to draw numbers */
	SOFT_FAULT_RNR, /* a request that needs a receive gets an RNR NAK */
	SOFT_FAULT_DISCONNECT, /* a connection breaks */
	SOFT_FAULT_OVERRUN, /* a completion finds its queue full */
	SOFT_FAULT_REGISTER, /* a registration fails with ENOMEM */
	SOFT_FAULT_HANDSHAKE, /* a message of the connection manager is lost */
	SOFT_FAULTS,
};

/* When a fault occurs. Occurrences count from 1. */
struct soft_fault_when {
	double probability; /* 0 if never */
	uint64_t first, last;
};

enum soft_fault_frames { SOFT_FAULT_REQUESTS = 1 << 0, SOFT_FAULT_ANSWERS = 1 << 1 };

struct soft_fault_spec {
	uint64_t seed;
	struct soft_fault_when when[SOFT_FAULTS];
	uint64_t delay_ns;
	uint64_t jitter_ns;
	uint64_t rate; /* maximum bytes that the device receives per second; 0 if unlimited */
	uint64_t cut_after; /* bytes that a connection receives before it breaks */
	unsigned
		frames; /* kinds of frames that may be lost or duplicated: enum soft_fault_frames */
	uint32_t qp_num; /* 0 for all */
	uint32_t cq; /* handle; 0 for all */
	uint32_t ports; /* ports of devices; 0 for all */
};

/* Callbacks into higher folders, set by softdev.c. */
struct soft_fault_hooks {
	int (*devices)(void); /* returns the number of devices */
	/* Called when the spec has been set or removed. */
	void (*spec_changed)(void);
	/* Send an RNR NAK to the queue pair's peer. Returns whether it was sent. */
	bool (*refuses)(struct soft_qp *qp);
	/* Drop a datagram or queue it for later. Returns false if it is to be received
	 * immediately. */
	bool (*keeps_datagram)(const struct soft_qp *qp, const struct soft_datagram *datagram,
			       const uint8_t *payload, uint32_t length);
};

struct soft_inject {
	bool set; /* whether there is a spec */
	bool asked; /* whether the environment has been read */
	struct soft_fault_spec spec;
	struct aiordma_fault_counts counts;
	uint64_t seen[SOFT_FAULTS]; /* occurrences counted per process since the spec was set */
	const struct soft_fault_hooks *hooks;
};

#define soft_faults_set (soft_device.inject->set)
#define soft_faults (soft_device.inject->spec)
#define soft_fault_counts (soft_device.inject->counts)

extern const struct soft_subsystem soft_inject_subsystem;

/* Parse a spec (fault_spec.c). Returns 0, or EINVAL with a message that names the invalid part. */
int soft_fault_parse(const char *text, struct soft_fault_spec *spec, char *error, size_t room);
/* Apply the spec of the environment once. Returns 0, or EINVAL after writing a line to stderr. */
int soft_faults_of_environment(void);

/* Returns the seed's number for an occurrence, from 0 up to but not including 1 (fault.c). */
double soft_fault_number(enum soft_fault fault, uint64_t connection, unsigned stream,
			 uint64_t occurrence);
bool soft_fault_strikes(enum soft_fault fault, uint64_t connection, unsigned stream, uint64_t draw,
			uint64_t occurrence);
/* Count an occurrence of OVERRUN, REGISTER or HANDSHAKE at the device with this port, and return
 * whether it fails. `cq` applies to OVERRUN only. */
bool soft_fault_next(enum soft_fault fault, uint32_t port, uint32_t cq);
/* Returns whether the spec applies to the device with this port. */
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
