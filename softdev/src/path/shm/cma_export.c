/* The exporting side of cross-memory attach: creates and revokes exports (cma.h). */

#include "objects/objects.h"
#include "cma.h"

enum {
	SPINS = 200, /* checks of the busy mark before the first sleep */
	MAX_TIMEOUTS = 8, /* number of timed-out revocations after which exporting stops */
};

#define PAUSE_NS 20000u
#define REVOKE_NS 5000000u /* much longer than an uninterrupted copy */

bool soft_cma_is_open(const struct soft_cma *cma)
{
	/* Stop exporting after MAX_TIMEOUTS revocations have timed out. The peer would continue to
	 * delay the deregistration of memory. */
	return cma->timeouts < MAX_TIMEOUTS && soft_observe(&cma->peer->can_copy);
}

static bool is_done(const struct soft_cma *cma, const struct soft_cma_export *export)
{
	return soft_observe(&cma->peer->done[export->slot]) == export->generation;
}

struct soft_cma_export *soft_cma_export_new(struct soft_cma *cma)
{
	/* Exports end approximately in order of creation, so the next slot is probably free. */
	for (unsigned i = 0; i < SOFT_CMA_SLOTS; i++) {
		uint32_t slot = (cma->next_slot + i) % SOFT_CMA_SLOTS;
		struct soft_cma_export *export = &cma->exports[slot];

		if (export->used && !is_done(cma, export))
			continue;
		cma->used_slots += !export->used;
		*export = (struct soft_cma_export){
			.used = true,
			.slot = slot,
			.generation = export->generation + 1,
			.order = cma->next_order++,
		};
		soft_publish(&cma->own->generation[slot], export->generation);
		cma->next_slot = slot + 1;
		return export;
	}
	return NULL;
}

/* Revoke an export. The generation of a slot only increases, so that messages about an old export
 * are not mistaken for messages about a new one. */
static void withdraw(struct soft_cma *cma, struct soft_cma_export *export)
{
	soft_publish(&cma->own->generation[export->slot], ++export->generation);
	export->used = false;
	cma->used_slots--;
}

/* Wait until the peer is not busy with any of these slots, for at most REVOKE_NS. */
static void wait_while_busy(struct soft_cma *cma, const bool revoked[SOFT_CMA_SLOTS])
{
	const struct timespec pause = {.tv_nsec = PAUSE_NS};
	uint64_t deadline = 0;

	if (cma->own == cma->peer)
		return; /* this process copies under the same lock */
	for (unsigned checks = 0;; checks++) {
		uint32_t busy = soft_observe(&cma->peer->busy);

		if (busy == 0 || busy > SOFT_CMA_SLOTS || !revoked[busy - 1])
			return;
		if (checks < SPINS)
			continue;
		if (!deadline)
			deadline = soft_now() + REVOKE_NS;
		if (soft_now() >= deadline) {
			cma->timeouts++;
			return;
		}
		nanosleep(&pause, NULL);
	}
}

/* Sort by `order`. Insertion sort is fast here because few elements are out of order. */
static void sort(struct soft_cma_export *exports, unsigned count)
{
	for (unsigned i = 1; i < count; i++) {
		struct soft_cma_export export = exports[i];
		unsigned at = i;

		for (; at && exports[at - 1].order > export.order; at--)
			exports[at] = exports[at - 1];
		exports[at] = export;
	}
}

unsigned soft_cma_revoke(struct soft_cma *cma,
			 bool (*must_revoke)(const struct soft_cma_export *export,
					     const void *context),
			 const void *context, struct soft_cma_export unfinished[SOFT_CMA_SLOTS])
{
	bool revoked[SOFT_CMA_SLOTS] = {false};
	unsigned count = 0;

	for (unsigned slot = 0; slot < SOFT_CMA_SLOTS && cma->used_slots; slot++) {
		struct soft_cma_export *export = &cma->exports[slot];

		if (!export->used)
			continue;
		if (is_done(cma, export)) {
			export->used = false;
			cma->used_slots--;
		} else if (must_revoke(export, context)) {
			revoked[slot] = true;
			unfinished[count++] = *export;
			withdraw(cma, export);
		}
	}
	if (!count)
		return 0;
	/* Read the busy mark only after the new generations are visible (see soft_cma_copy). */
	soft_total_barrier();
	wait_while_busy(cma, revoked);

	unsigned unfinished_count = 0;

	for (unsigned i = 0; i < count; i++)
		if (!is_done(cma, &unfinished[i]))
			unfinished[unfinished_count++] = unfinished[i];
	sort(unfinished, unfinished_count);
	return unfinished_count;
}
