/* Completion channels and completion queues. */
#pragma once

#include "device.h"

/* ---- comp_channel.c, cq.c ------------------------------------------------------------------ */

struct soft_comp_channel {
	struct ibv_comp_channel ibv;
	struct soft_channel channel;
	pthread_mutex_t mutex; /* protects what follows; taken inside a CQ's lock */
	struct soft_node ready; /* CQs with events that have not been taken */
	bool any; /* atomic: are there?  Read without the mutex: a hint */
};

enum soft_armed { SOFT_UNARMED, SOFT_ARMED_SOLICITED, SOFT_ARMED };

/* When a completion came: CLOCK_MONOTONIC, which is the device's clock, and CLOCK_REALTIME. */
struct soft_stamp {
	uint64_t clock_ns;
	uint64_t wallclock_ns;
};

struct soft_cq {
	union { /* one begins as the other; `ex` is whole if made by create_cq_ex */
		struct ibv_cq ibv;
		struct ibv_cq_ex ex;
	};
	pthread_mutex_t lock; /* protects the ring, `armed` and the moderation */
	struct ibv_wc *ring;
	struct soft_stamp *stamps; /* of what is in the ring, if the CQ has timestamps */
	uint32_t capacity;
	uint32_t first;
	uint32_t count; /* also read without the lock, to see that it is empty */
	enum soft_armed armed;
	bool just_armed; /* atomic */
	unsigned empty_polls; /* atomic */
	bool overrun;
	bool ignore_overrun; /* the oldest completions are lost, without an event */
	unsigned users; /* send and receive queues that complete here */
	struct soft_deferred overrun_work;
	struct ibv_moderate_cq moderation;
	uint32_t held_back; /* completions that would have made an event but for the moderation */
	struct soft_timer moderation_timer;
	struct soft_cq_reader *reader; /* cq_ex.c; NULL if made by create_cq */
	struct ibv_pd *parent_domain; /* or NULL */
	/* under the comp channel's mutex: */
	struct soft_node ready_node;
	uint32_t events_waiting;
	uint32_t events_taken;
	/* under ibv.mutex: */
	uint32_t async_events_taken;
};

static inline struct soft_cq *soft_cq_of(struct ibv_cq *cq)
{
	return soft_container(cq, struct soft_cq, ibv);
}

/* A completion queue that is not published yet, or NULL and errno; `stamped`: with timestamps; `pd`:
 * a parent domain, or NULL.  The application knows it from soft_cq_publish on. */
struct soft_cq *soft_cq_make(struct ibv_context *context, int cqe, struct ibv_comp_channel *channel,
			     int comp_vector, bool stamped, struct ibv_pd *pd);
void soft_cq_publish(struct soft_cq *cq, void *cq_context);
/* Take up to `room` completions, with their times if wanted; their number, or -1 for a CQ that has
 * overflowed.  Does a step of the device's work if there are none. */
int soft_cq_take(struct soft_cq *cq, int room, struct ibv_wc *wc, struct soft_stamp *stamps);
int soft_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
/* Add a completion; false when it is lost, because the queue has overflowed.  `solicited` as in
 * ibv_req_notify_cq(3). */
bool soft_cq_push(struct soft_cq *cq, const struct ibv_wc *wc, bool solicited);
/* Take back completions of a queue pair that the application has not polled. */
void soft_cq_forget(struct soft_cq *cq, uint32_t qp_num);
int soft_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
int soft_req_notify_cq(struct ibv_cq *cq, int solicited_only);

void soft_comp_channel_event(struct soft_comp_channel *channel, struct soft_cq *cq);
void soft_comp_channel_forget(struct soft_comp_channel *channel, struct soft_cq *cq);
