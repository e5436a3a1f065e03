/* Drains all completion queues of a channel in one call from Python.
 *
 * Reading the fields of a completion one by one from Python takes 190 ns (measured). Packing all of
 * them here takes 50 ns, so the completions are passed to Python as an array.
 */
#include <errno.h>

#include "boundary.h"

/* A spin takes at most MAX_SPIN_US. While the device makes progress, a shorter spin continues,
 * but not beyond MAX_BUSY_SPIN_US. Both limits are short because the event loop's other tasks wait
 * during a spin. */
enum { MAX_SPIN_US = 1000, MAX_BUSY_SPIN_US = 200 };

enum { CAPACITY = sizeof(((struct aiordma_drain *)NULL)->ready) / sizeof(struct ibv_cq *) };

int aiordma_req_notify(struct ibv_cq *cq, int solicited_only)
{
	return cq->context->ops.req_notify_cq(cq, solicited_only);
}

/* Take the channel's events and acknowledge them. Add each CQ to `ready` once and arm it again. If
 * `ready` is full, the remaining events stay in the channel, and its fd stays readable. Returns 0
 * or a negative errno value. */
static int take_events(struct aiordma_drain *drain)
{
	while (drain->ready_count < CAPACITY) {
		struct ibv_cq *cq;
		void *context;
		uint32_t i;

		if (drain->calls->ibv_get_cq_event(drain->channel, &cq, &context)) {
			if (errno == EINTR)
				continue;
			return errno == EAGAIN ? 0 : -errno;
		}
		drain->events++;
		drain->calls->ibv_ack_cq_events(cq, 1);
		for (i = 0; i < drain->ready_count && drain->ready[i] != cq; i++)
			;
		if (i == drain->ready_count)
			drain->ready[drain->ready_count++] = cq;
		/* Arm before polling, so that a completion in between creates another event. */
		int rc = aiordma_req_notify(cq, 0);
		if (rc)
			return -rc;
		/* A CQ creates one event per arming, so the channel of a single CQ has no other
		 * event, unless it has just arrived, in which case the fd reports it. Checking
		 * would cost as much again. */
		if (drain->channel->refcnt == 1)
			return 0;
	}
	return 0;
}

static unsigned progress(const struct aiordma_device_calls *device)
{
	return device->progress ? device->progress() : 0;
}

/* Announce to the device that another poll follows soon if `holds` is 1, or withdraw the
 * announcement if it is 0. */
static void hold_polling(struct aiordma_drain *drain, int holds)
{
	const struct aiordma_device_calls *device = drain->calls->device;

	if (device->hold_polling && (holds || drain->holds))
		device->hold_polling(holds - drain->holds);
	drain->holds = holds;
}

/* Poll for events until one arrives or the device has made no progress for `spin_us`.
 * MAX_SPIN_US and MAX_BUSY_SPIN_US limit the total time. A spin continues while the device makes
 * progress, because a long transfer would otherwise need an iteration of the caller's event loop
 * for every buffer.
 *
 * Set `busy` if no event arrived but the device was still making progress. A spin without progress
 * must count as a miss. Otherwise, two processes on one core would starve each other. Returns 0 or
 * a negative errno value.
 */
static int spin(struct aiordma_drain *drain)
{
	const struct aiordma_device_calls *device = drain->calls->device;
	uint64_t now = aiordma_microseconds();
	uint64_t spin_us = drain->spin_us < MAX_SPIN_US ? drain->spin_us : MAX_SPIN_US;
	uint64_t spin_end = now + spin_us;
	uint64_t spin_limit = now + (spin_us > MAX_BUSY_SPIN_US ? spin_us : MAX_BUSY_SPIN_US);
	unsigned before = progress(device);
	int rc;

	if (device->busy_poll)
		device->busy_poll(1);
	do {
		unsigned after;

		rc = take_events(drain);
		now = aiordma_microseconds();
		after = progress(device);
		if (after != before) {
			before = after;
			spin_end = now + spin_us;
		}
	} while (!rc && !drain->ready_count && now < spin_end && now < spin_limit);
	drain->busy = !rc && !drain->ready_count && now < spin_end;
	int found_work = drain->ready_count || drain->busy;

	/* The caller polls again soon if work was found (1) or in any case (2). */
	hold_polling(drain, found_work ? drain->polls_again > 0 : drain->polls_again > 1);
	if (device->busy_poll)
		device->busy_poll(0);
	return rc;
}

int aiordma_drain(struct aiordma_drain *drain, struct aiordma_completion *out, int capacity,
		  int *more)
{
	const struct aiordma_device_calls *device = drain->calls->device;
	int total = 0;
	unsigned before = progress(device);
	int rc = take_events(drain);

	*more = 0;
	drain->drains++;
	drain->busy = !rc && !drain->ready_count && progress(device) != before;
	if (!rc && !drain->ready_count && drain->spin_us)
		rc = spin(drain);
	if (rc)
		return rc;
	while (drain->ready_count && total < capacity) {
		struct ibv_cq *cq = drain->ready[drain->ready_count - 1];
		int n = aiordma_poll(cq, out + total, NULL, capacity - total, 0);

		if (n < 0)
			return total ? total : n;
		total += n;
		drain->completions += (uint64_t)n;
		if (total < capacity) /* the CQ is empty */
			drain->ready_count--;
	}
	*more = drain->ready_count > 0;
	/* Work was found, so the caller polls again soon. spin() may have announced this already. */
	if ((total || drain->busy) && drain->polls_again && !drain->holds)
		hold_polling(drain, 1);
	return total;
}

uint64_t aiordma_peer_wakeups(const struct aiordma_calls *calls)
{
	return calls->device->peer_wakeups ? calls->device->peer_wakeups() : 0;
}

void aiordma_drain_end(struct aiordma_drain *drain)
{
	hold_polling(drain, 0);
}

void aiordma_drain_forget(struct aiordma_drain *drain, struct ibv_cq *cq)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; i < drain->ready_count; i++)
		if (drain->ready[i] != cq)
			drain->ready[kept++] = drain->ready[i];
	drain->ready_count = kept;
}
