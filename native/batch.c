/* Many receives or completions per crossing from Python into C; post_send.c has the sends,
 * completion.c what a completion is.
 *
 * A crossing costs more than a post (measured: 190 ns per completion when each field is read from
 * Python, 50 ns when packed here), so Python hands over arrays and gets arrays.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>

#include "native.h"

/* Chains are built on the stack; 64 requests with their 64 pointers stay below 10 KiB. */
enum {
	BLOCK = 64
};

/* How long a spin may take at most, and how long if the device makes progress all the time: other
 * tasks of the event loop wait meanwhile. */
enum {
	SPIN_AT_MOST_US = 1000,
	BUSY_AT_MOST_US = 200
};

enum {
	ROOM = sizeof(((struct aiordma_drain *)NULL)->ready) / sizeof(struct ibv_cq *)
};

/* To a queue pair, or to a shared receive queue where there is one. */
static int post_recvs(struct ibv_qp *qp, struct ibv_srq *srq, const struct aiordma_recv *recvs,
		      uint32_t count, const struct ibv_sge *sges, uint32_t *posted)
{
	*posted = 0;
	while (*posted < count) {
		struct ibv_recv_wr chain[BLOCK];
		struct ibv_recv_wr *bad = NULL;
		uint32_t length = count - *posted < BLOCK ? count - *posted : BLOCK;

		for (uint32_t i = 0; i < length; i++) {
			const struct aiordma_recv *recv = &recvs[*posted + i];

			chain[i] = (struct ibv_recv_wr){
				.wr_id = recv->wr_id,
				.next = i + 1 < length ? &chain[i + 1] : NULL,
				.sg_list = (struct ibv_sge *)&sges[recv->first_sge],
				.num_sge = (int)recv->num_sge,
			};
		}
		int rc = srq ? srq->context->ops.post_srq_recv(srq, chain, &bad)
			     : qp->context->ops.post_recv(qp, chain, &bad);
		if (rc) {
			*posted += bad ? (uint32_t)(bad - chain) : 0;
			return rc;
		}
		*posted += length;
	}
	return 0;
}

int aiordma_post_recv(struct ibv_qp *qp, const struct aiordma_recv *recvs, uint32_t count,
		      const struct ibv_sge *sges, uint32_t *posted)
{
	return post_recvs(qp, NULL, recvs, count, sges, posted);
}

int aiordma_post_srq_recv(struct ibv_srq *srq, const struct aiordma_recv *recvs, uint32_t count,
			  const struct ibv_sge *sges, uint32_t *posted)
{
	return post_recvs(NULL, srq, recvs, count, sges, posted);
}

int aiordma_post_recv_one(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t length,
			  uint32_t lkey)
{
	struct ibv_sge sge = {.addr = addr, .length = length, .lkey = lkey};
	struct aiordma_recv recv = {.wr_id = wr_id, .num_sge = length ? 1 : 0};
	uint32_t posted;

	return aiordma_post_recv(qp, &recv, 1, &sge, &posted);
}

int aiordma_req_notify(struct ibv_cq *cq, int solicited_only)
{
	return cq->context->ops.req_notify_cq(cq, solicited_only);
}

/* Take events until there are none, note each CQ once, acknowledge.  A CQ beyond the table's room
 * leaves its event in the channel, whose fd then stays readable. */
static int take_events(struct aiordma_drain *drain)
{
	while (drain->ready_count < ROOM) {
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
		/* Arm before polling: a completion between the two then makes a new event. */
		int rc = aiordma_req_notify(cq, 0);
		if (rc)
			return -rc;
		/* A CQ makes one event for each arming, so of a single one there is no other, but for
		 * what has just come, which the fd tells.  To ask would cost as much again. */
		if (drain->channel->refcnt == 1)
			return 0;
	}
	return 0;
}

static uint64_t microseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static unsigned progress(const struct aiordma_device_calls *device)
{
	return device->progress ? device->progress() : 0;
}

static void hold_polling(struct aiordma_drain *drain, int holds)
{
	const struct aiordma_device_calls *device = drain->calls->device;

	if (device->hold_polling && (holds || drain->holds))
		device->hold_polling(holds - drain->holds);
	drain->holds = holds;
}

/* Polls for `spin_us` more, and for as long as the device is moving bytes, since a long transfer would
 * otherwise go round the caller's event loop with every buffer that fills.  A spin that ends in a
 * timeout counts as a miss: otherwise two processes on one core starve each other. */
static int spin(struct aiordma_drain *drain)
{
	const struct aiordma_device_calls *device = drain->calls->device;
	uint64_t now = microseconds();
	uint64_t spin_us = drain->spin_us < SPIN_AT_MOST_US ? drain->spin_us : SPIN_AT_MOST_US;
	uint64_t end = now + spin_us;
	uint64_t latest = now + (spin_us > BUSY_AT_MOST_US ? spin_us : BUSY_AT_MOST_US);
	unsigned before = progress(device);
	int rc;

	if (device->busy_poll)
		device->busy_poll(1);
	do {
		unsigned after;

		rc = take_events(drain);
		now = microseconds();
		after = progress(device);
		if (after != before) {
			before = after;
			end = now + spin_us;
		}
	} while (!rc && !drain->ready_count && now < end && now < latest);
	drain->busy = !rc && !drain->ready_count && now < end;
	hold_polling(drain, drain->polls_again && (drain->ready_count || drain->busy));
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
	drain->busy = !rc && !drain->ready_count && progress(device) != before;
	if (!rc && !drain->ready_count && drain->spin_us)
		rc = spin(drain);
	if (rc)
		return rc;
	while (drain->ready_count && total < capacity) {
		struct ibv_cq *cq = drain->ready[drain->ready_count - 1];
		int n = aiordma_poll(cq, out + total, capacity - total);

		if (n < 0)
			return total ? total : n;
		total += n;
		if (total < capacity)
			drain->ready_count--;
	}
	*more = drain->ready_count > 0;
	if (device->notify_version)
		drain->notify_fds_changed = device->notify_version() != drain->notify_version;
	if ((total || drain->busy) && drain->polls_again && !drain->holds)
		hold_polling(drain, 1);
	return total;
}

int aiordma_notify_fds(struct aiordma_drain *drain, int fds[AIORDMA_NOTIFY_FDS])
{
	const struct aiordma_device_calls *device = drain->calls->device;

	return device->notify_fds
		       ? device->notify_fds(drain->channel->fd, fds, &drain->notify_version)
		       : 0;
}

int aiordma_watch_fds(const struct aiordma_calls *calls, int fd, int fds[2])
{
	return calls->device->watch_fds ? calls->device->watch_fds(fd, fds) : 0;
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

	take_events(drain);
	for (uint32_t i = 0; i < drain->ready_count; i++)
		if (drain->ready[i] != cq)
			drain->ready[kept++] = drain->ready[i];
	drain->ready_count = kept;
}

int aiordma_set_nonblocking(const struct aiordma_calls *calls, int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return errno;
	if (calls->device->wake_early)
		calls->device->wake_early(fd);
	return 0;
}
