/* Completion channels and completion queues. */
#pragma once

#include "device.h"

/* ---- comp_channel.c, cq.c ------------------------------------------------------------------ */

struct soft_comp_channel {
	struct ibv_comp_channel ibv;
	struct soft_channel channel;
	pthread_mutex_t mutex; /* protects the following members; taken inside a CQ's lock */
	struct soft_node ready; /* CQs with pending events */
	bool any; /* atomic hint, read without the mutex: whether `ready` is not empty */
};

enum soft_armed { SOFT_UNARMED, SOFT_ARMED_SOLICITED, SOFT_ARMED };

/* The time of a completion: CLOCK_MONOTONIC, which is the device's clock, and CLOCK_REALTIME. */
struct soft_stamp {
	uint64_t clock_ns;
	uint64_t wallclock_ns;
};

struct soft_cq {
	union { /* both begin alike; `ex` is complete if created by create_cq_ex */
		struct ibv_cq ibv;
		struct ibv_cq_ex ex;
	};
	pthread_mutex_t lock; /* protects the ring, `armed` and the moderation */
	struct ibv_wc *ring;
	struct soft_stamp *stamps; /* times of the entries in the ring, if the CQ has timestamps */
	uint32_t capacity;
	uint32_t first;
	uint32_t count; /* also read without the lock to find an empty ring */
	enum soft_armed armed;
	bool just_armed; /* atomic */
	unsigned empty_polls; /* atomic */
	bool overrun;
	bool ignore_overrun; /* the oldest completions are dropped without an event */
	unsigned users; /* send and receive queues that complete here */
	struct soft_deferred overrun_work;
	struct ibv_moderate_cq moderation;
	uint32_t held_back; /* completions whose event the moderation has held back */
	struct soft_timer moderation_timer;
	struct soft_cq_reader *reader; /* see cq_ex.c; NULL if created by create_cq */
	struct ibv_pd *parent_domain; /* or NULL */
	/* protected by the completion channel's mutex */
	struct soft_node ready_node;
	uint32_t events_waiting;
	uint32_t events_taken;
	/* protected by ibv.mutex */
	uint32_t async_events_taken;
};

static inline struct soft_cq *soft_cq_of(struct ibv_cq *cq)
{
	return soft_container(cq, struct soft_cq, ibv);
}

/* Create a completion queue, or return NULL and set errno. `stamped` adds timestamps, and `pd` is a
 * parent domain or NULL. The application learns of it in soft_cq_publish. */
struct soft_cq *soft_cq_make(struct ibv_context *context, int cqe, struct ibv_comp_channel *channel,
			     int comp_vector, bool stamped, struct ibv_pd *pd);
void soft_cq_publish(struct soft_cq *cq, void *cq_context);
/* Take up to `room` completions, and their times unless `stamps` is NULL. Returns their number, or
 * -1 for a CQ that has overflowed. Performs a step of the device's work if there are none. */
int soft_cq_take(struct soft_cq *cq, int room, struct ibv_wc *wc, struct soft_stamp *stamps);
int soft_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
/* Add a completion. Returns false if it is lost because the queue has overflowed. `solicited` is
 * explained in ibv_req_notify_cq(3). */
bool soft_cq_push(struct soft_cq *cq, const struct ibv_wc *wc, bool solicited);
/* Remove a queue pair's completions that the application has not polled. */
void soft_cq_forget(struct soft_cq *cq, uint32_t qp_num);
int soft_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
int soft_req_notify_cq(struct ibv_cq *cq, int solicited_only);

void soft_comp_channel_event(struct soft_comp_channel *channel, struct soft_cq *cq);
void soft_comp_channel_forget(struct soft_comp_channel *channel, struct soft_cq *cq);
