/* The plan of faults, and the kinds of them that are decided on the spot (fault_line.c has those of
 * the way that frames take).
 */
#include <errno.h>
#include <string.h>

#include "fault.h"
#include "link.h"
#include "trace.h"

bool soft_faults_set;
struct soft_fault_plan soft_faults;
struct aiordma_fault_counts soft_fault_counts;

/* Of this process, since there is a plan. */
static uint64_t completions, registrations;

/* ---- chance -------------------------------------------------------------------------------- */

/* A bijection under which neighbours are strangers: the finalizer of splitmix64 (Steele, Lea, Flood:
 * Fast splittable pseudorandom number generators, 2014). */
static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

double soft_fault_number(enum soft_fault fault, uint64_t connection, unsigned stream,
			 uint64_t occurrence)
{
	uint64_t x = mix(soft_faults.seed);

	x = mix(x ^ ((uint64_t)fault << 8 | stream));
	x = mix(x ^ connection);
	x = mix(x ^ occurrence);
	return (double)(x >> 11) / (double)(UINT64_C(1) << 53);
}

bool soft_fault_strikes(enum soft_fault fault, uint64_t connection, unsigned stream, uint64_t draw,
			uint64_t occurrence)
{
	const struct soft_fault_when *when = &soft_faults.when[fault];

	return when->probability > 0 && occurrence >= when->first && occurrence <= when->last &&
	       soft_fault_number(fault, connection, stream, draw) < when->probability;
}

/* ---- on the spot --------------------------------------------------------------------------- */

bool soft_fault_overrun(const struct soft_cq *cq)
{
	if (!soft_faults_set || !(soft_faults.when[SOFT_FAULT_OVERRUN].probability > 0) ||
	    (soft_faults.cq && soft_faults.cq != cq->ibv.handle))
		return false;
	completions++;
	if (!soft_fault_strikes(SOFT_FAULT_OVERRUN, 0, 0, completions, completions))
		return false;
	soft_fault_counts.overruns++;
	SOFT_TRACE(fault, "OVERRUN", 0, cq->ibv.handle);
	return true;
}

bool soft_fault_registration(void)
{
	if (!soft_faults_set)
		return false;
	registrations++;
	if (!soft_fault_strikes(SOFT_FAULT_REGISTER, 0, 0, registrations, registrations))
		return false;
	soft_fault_counts.registrations++;
	SOFT_TRACE(fault, "REGISTER", 0, 0);
	return true;
}

/* ---- setting ------------------------------------------------------------------------------- */

static void set(const struct soft_fault_plan *plan)
{
	soft_faults_set = plan;
	if (plan)
		soft_faults = *plan;
	completions = registrations = 0;
	soft_faults_begin();
	soft_links_plan();
}

int aiordma_embedded_faults(const char *text, char *error, size_t room)
{
	struct soft_fault_plan plan;
	int rc = text ? soft_fault_parse(text, &plan, error, room) : 0;

	if (rc)
		return rc;
	soft_lock();
	set(text ? &plan : NULL);
	soft_unlock();
	return 0;
}

void aiordma_embedded_fault_counts(struct aiordma_fault_counts *counts)
{
	soft_lock();
	*counts = soft_fault_counts;
	soft_unlock();
}
