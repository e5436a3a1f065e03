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

/* How long a look may take, whatever it is asked for, and how long when the device is at work all the
 * time: others of the event loop wait. */
enum {
	LOOK_AT_MOST_US = 1000,
	WORK_AT_MOST_US = 200
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

static void stay(struct aiordma_drain *drain, int stays)
{
	if (stays || drain->stays)
		aiordma_embedded_stay(stays - drain->stays);
	drain->stays = stays;
}

/* Changes with each step that has found something, and with each part of a message that went out. */
static unsigned work_done(void)
{
	return aiordma_embedded_steps() + aiordma_embedded_parts();
}

/* Nothing yet: look for `spin_us` more, and for as long as the embedded device is moving bytes, since
 * a long transfer would otherwise go round the caller's event loop with every buffer that fills.  A look
 * that had to wait for more in vain is one for nothing, whatever came before: else who shares his
 * processor with the peer would never find out that it is he who keeps the peer from it. */
static int look_again(struct aiordma_drain *drain)
{
	uint64_t now = microseconds();
	uint64_t spin = drain->spin_us < LOOK_AT_MOST_US ? drain->spin_us : LOOK_AT_MOST_US;
	uint64_t end = now + spin;
	uint64_t latest = now + (spin > WORK_AT_MOST_US ? spin : WORK_AT_MOST_US);
	unsigned work = work_done();
	int rc;

	aiordma_embedded_spin(1);
	do {
		rc = take_events(drain);
		now = microseconds();
		if (work_done() != work) {
			work = work_done();
			end = now + spin;
		}
	} while (!rc && !drain->ready_count && now < end && now < latest);
	drain->busy = !rc && !drain->ready_count && now < end;
	stay(drain, drain->returns && (drain->ready_count || drain->busy));
	aiordma_embedded_spin(0);
	return rc;
}

int aiordma_drain(struct aiordma_drain *drain, struct aiordma_completion *out, int capacity,
		  int *more)
{
	int total = 0;
	unsigned work = work_done();
	int rc = take_events(drain);

	*more = 0;
	drain->busy = !rc && !drain->ready_count && work_done() != work;
	if (!rc && !drain->ready_count && drain->spin_us)
		rc = look_again(drain);
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
	drain->bells_changed = aiordma_embedded_bells_changed() != drain->bells;
	if ((total || drain->busy) && drain->returns && !drain->stays)
		stay(drain, 1);
	return total;
}

int aiordma_drain_bells(struct aiordma_drain *drain, int fds[AIORDMA_BELLS])
{
	return aiordma_embedded_bells(drain->channel->fd, fds, &drain->bells);
}

void aiordma_drain_end(struct aiordma_drain *drain)
{
	stay(drain, 0);
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

int aiordma_set_nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return errno;
	aiordma_wake_early(fd);
	return 0;
}
