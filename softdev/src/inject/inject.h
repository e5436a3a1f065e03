/* Fault injection: the fault spec of this process and the functions that query it.
 *
 * For each kind of fault, the spec gives a probability, a range of occurrences, or both. Whether
 * the k-th frame of the n-th connection is lost depends only on the seed, n and k. The same seed
 * therefore causes the same faults, regardless of other threads and connections.
 */
#pragma once

#include "engine/engine.h"

struct soft_datagram;
struct soft_qp;

enum soft_fault {
	SOFT_FAULT_LOSS, /* an incoming frame or datagram is lost */
	SOFT_FAULT_DUPLICATE, /* an incoming frame or datagram is duplicated */
	SOFT_FAULT_JITTER, /* not a fault; selects the random numbers for jitter */
	SOFT_FAULT_RNR, /* a request that requires a posted receive is refused with an RNR NAK */
	SOFT_FAULT_DISCONNECT, /* a connection is broken */
	SOFT_FAULT_OVERRUN, /* a completion overruns its CQ */
	SOFT_FAULT_REGISTER, /* a registration fails with ENOMEM */
	SOFT_FAULT_HANDSHAKE, /* a connection manager message is lost */
	SOFT_FAULTS,
};

/* The probability of a fault at each occurrence from `first` to `last`, numbered from 1. */
struct soft_fault_schedule {
	double probability; /* 0 if never */
	uint64_t first, last;
};

enum soft_fault_frames { SOFT_FAULT_REQUESTS = 1 << 0, SOFT_FAULT_RESPONSES = 1 << 1 };

struct soft_fault_spec {
	uint64_t seed;
	struct soft_fault_schedule schedule[SOFT_FAULTS];
	uint64_t delay_ns;
	uint64_t jitter_ns;
	uint64_t rate; /* maximum bytes received per second; 0 if unlimited */
	uint64_t cut_after; /* bytes a connection receives before it is broken */
	unsigned frames; /* enum soft_fault_frames: kinds that may be lost or duplicated */
	uint32_t qp_num; /* 0 for all */
	uint32_t cq; /* handle; 0 for all */
	uint32_t ports; /* bit mask of device ports; 0 for all */
};

/* Callbacks that higher-level folders implement. Set by softdev.c. */
struct soft_fault_hooks {
	int (*device_count)(void);
	/* Called when the spec has been set or removed. */
	void (*spec_changed)(void);
	/* Count a message that requires a posted receive. Returns whether to refuse it with an RNR
	 * NAK. */
	bool (*should_refuse)(struct soft_qp *qp);
	/* Apply the spec to a datagram. Returns true if the datagram has been queued or dropped, or
	 * false if the spec does not cover it. */
	bool (*intercept_datagram)(const struct soft_qp *qp, const struct soft_datagram *datagram,
				   const uint8_t *payload, uint32_t length);
};

struct soft_inject {
	bool set; /* whether a spec is set */
	bool environment_applied; /* whether the environment's spec has been applied */
	struct soft_fault_spec spec;
	struct aiordma_fault_counts counts;
	uint64_t occurrences[SOFT_FAULTS]; /* occurrences in this process since the spec was set */
	const struct soft_fault_hooks *hooks;
};

#define soft_faults_set (soft_device.inject->set)
#define soft_faults (soft_device.inject->spec)
#define soft_fault_counts (soft_device.inject->counts)

extern const struct soft_subsystem soft_inject_subsystem;

/* Parse a spec (fault_spec.c). Returns 0, or EINVAL or ENOMEM after storing a message in `error`.
 * For EINVAL, the message names the invalid part. `size` is the size of `error`. */
int soft_fault_parse(const char *text, struct soft_fault_spec *spec, char *error, size_t size);
/* Apply the spec from the environment, but only once. Returns 0, or an errno value after writing a
 * message to stderr. */
int soft_faults_apply_environment(void);

/* Returns a pseudorandom number in the range [0, 1) for one occurrence. It depends only on the seed
 * and the arguments (fault.c). */
double soft_fault_random(enum soft_fault fault, uint64_t connection, unsigned stream,
			 uint64_t occurrence);
/* Count a chance for the fault, and return whether it occurs. `occurrence` is compared with the
 * schedule. The random number is selected by `connection`, `draw` and `stream`, which is the kind
 * of packet (delay_queue.c), or 0 for other faults. */
bool soft_fault_occurs(enum soft_fault fault, uint64_t connection, unsigned stream, uint64_t draw,
		       uint64_t occurrence);
/* Count an OVERRUN, REGISTER or HANDSHAKE occurrence on the device with this port. Returns whether
 * to inject the fault. `cq` is the CQ's handle for OVERRUN, and 0 for the other faults. */
bool soft_fault_should_inject(enum soft_fault fault, uint32_t port, uint32_t cq);
/* Returns whether the spec applies to the device with this port. */
bool soft_fault_applies_to(uint32_t port);

/* Call `should_refuse` of the hooks if a spec is set. */
static inline bool soft_fault_should_refuse(struct soft_qp *qp)
{
	return soft_faults_set && soft_device.inject->hooks->should_refuse(qp);
}

/* Call `intercept_datagram` of the hooks if a spec is set. */
static inline bool soft_fault_intercept_datagram(const struct soft_qp *qp,
						 const struct soft_datagram *datagram,
						 const uint8_t *payload, uint32_t length)
{
	return soft_faults_set &&
	       soft_device.inject->hooks->intercept_datagram(qp, datagram, payload, length);
}
