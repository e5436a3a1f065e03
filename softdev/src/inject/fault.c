/* Keeps the fault spec, and injects faults that take effect immediately. delay_queue.c injects
 * faults into incoming frames and datagrams. */
#include <string.h>

#include "inject.h"
#include "trace/trace.h"

/* ---- random numbers ------------------------------------------------------------------------ */

/* Returns a hash of `x`. Adjacent values of `x` have unrelated hashes. The function is one step of
 * splitmix64, and a bijection (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
 * 2014). */
static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

double soft_fault_random(enum soft_fault fault, uint64_t connection, unsigned stream,
			 uint64_t occurrence)
{
	uint64_t x = mix(soft_faults.seed);

	x = mix(x ^ ((uint64_t)fault << 8 | stream));
	x = mix(x ^ connection);
	x = mix(x ^ occurrence);
	return (double)(x >> 11) / (double)(UINT64_C(1) << 53);
}

bool soft_fault_occurs(enum soft_fault fault, uint64_t connection, unsigned stream, uint64_t draw,
		       uint64_t occurrence)
{
	const struct soft_fault_schedule *schedule = &soft_faults.schedule[fault];

	if (schedule->probability <= 0)
		return false;
	soft_fault_counts.chances++;
	return occurrence >= schedule->first && occurrence <= schedule->last &&
	       soft_fault_random(fault, connection, stream, draw) < schedule->probability;
}

/* ---- immediate faults ---------------------------------------------------------------------- */

bool soft_fault_applies_to(uint32_t port)
{
	return !soft_faults.ports || soft_faults.ports & port;
}

bool soft_fault_should_inject(enum soft_fault fault, uint32_t port, uint32_t cq)
{
	static const char *const names[] = {
		[SOFT_FAULT_OVERRUN] = "OVERRUN",
		[SOFT_FAULT_REGISTER] = "REGISTER",
		[SOFT_FAULT_HANDSHAKE] = "HANDSHAKE",
	};
	uint64_t *const counts[] = {
		[SOFT_FAULT_OVERRUN] = &soft_fault_counts.overruns,
		[SOFT_FAULT_REGISTER] = &soft_fault_counts.registrations,
		[SOFT_FAULT_HANDSHAKE] = &soft_fault_counts.handshakes,
	};

	if (!soft_faults_set || !soft_fault_applies_to(port) ||
	    (cq && soft_faults.cq && soft_faults.cq != cq))
		return false;
	uint64_t seen = ++soft_device.inject->occurrences[fault];

	if (!soft_fault_occurs(fault, 0, 0, seen, seen))
		return false;
	++*counts[fault];
	SOFT_TRACE(fault, names[fault], 0, cq);
	return true;
}

/* ---- setting ------------------------------------------------------------------------------- */

static void set_spec(const struct soft_fault_spec *spec)
{
	soft_faults_set = spec;
	if (spec)
		soft_faults = *spec;
	memset(soft_device.inject->occurrences, 0, sizeof(soft_device.inject->occurrences));
	soft_device.inject->hooks->spec_changed();
}

int aiordma_embedded_faults(const char *text, char *error, size_t room)
{
	struct soft_fault_spec spec;

	soft_lock();
	int rc = text ? soft_fault_parse(text, &spec, error, error ? room : 0) : 0;

	if (!rc)
		set_spec(text ? &spec : NULL);
	soft_unlock();
	return rc;
}

void aiordma_embedded_fault_counts(struct aiordma_fault_counts *counts)
{
	soft_lock();
	*counts = soft_fault_counts;
	soft_unlock();
}

int64_t aiordma_embedded_fault_count(const char *name)
{
#define COUNT(member)                                                                              \
	{                                                                                          \
		#member, offsetof(struct aiordma_fault_counts, member)                             \
	}
	static const struct {
		const char *name;
		size_t offset;
	} members[] = {
		COUNT(lost),          COUNT(duplicated), COUNT(delayed),
		COUNT(cut),           COUNT(not_ready),  COUNT(overruns),
		COUNT(registrations), COUNT(handshakes), COUNT(retried),
	};
#undef COUNT
	struct aiordma_fault_counts counts;

	aiordma_embedded_fault_counts(&counts);
	for (size_t i = 0; i < sizeof(members) / sizeof(members[0]); i++)
		if (name && !strcmp(name, members[i].name))
			return (int64_t)*(uint64_t *)((char *)&counts + members[i].offset);
	return -1;
}

static void create(void)
{
	soft_device.inject = soft_alloc_part(sizeof(struct soft_inject));
}

const struct soft_subsystem soft_inject_subsystem = {
	.create = create,
	.start = soft_faults_apply_environment,
};
