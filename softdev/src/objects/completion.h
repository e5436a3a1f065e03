/* Completion channels and completion queues. */
#pragma once

#include "device.h"

/* ---- comp_channel.c, cq.c ------------------------------------------------------------------ */

struct soft_comp_channel {
	struct ibv_comp_channel ibv;
	struct soft_channel channel;
	pthread_mutex_t mutex; /* protects the following members; nested inside a CQ's lock */
	struct soft_node ready; /* CQs with pending events */
	bool has_ready; /* atomic hint whether `ready` has entries, read without the mutex */
};

enum soft_armed { SOFT_UNARMED, SOFT_ARMED_SOLICITED, SOFT_ARMED };

/* Timestamps of a completion: CLOCK_MONOTONIC (the device's clock) and CLOCK_REALTIME. */
struct soft_stamp {
	uint64_t clock_ns;
	uint64_t wallclock_ns;
};

struct soft_cq {
	union { /* `ex` starts with the members of `ibv`; only create_cq_ex sets the rest */
		struct ibv_cq ibv;
		struct ibv_cq_ex ex;
	};
	pthread_mutex_t lock; /* protects the ring, `armed` and the moderation state */
	struct ibv_wc *ring;
	struct soft_stamp *stamps; /* timestamps of the ring's entries; NULL if not requested */
	uint32_t capacity;
	uint32_t first;
	uint32_t count; /* also read without the lock to find an empty ring */
	enum soft_armed armed;
	bool just_armed; /* atomic: whether the next empty poll runs no step (poll_device) */
	unsigned empty_polls; /* atomic: number of polls that found the CQ empty */
	bool overrun;
	bool ignore_overrun; /* whether a full CQ drops its oldest completions silently */
	unsigned users; /* number of send and receive queues that use this CQ */
	struct soft_deferred overrun_work;
	struct ibv_moderate_cq moderation;
	uint32_t moderated_count; /* completions held back by moderation */
	struct soft_timer moderation_timer;
	struct soft_cq_reader *reader; /* see cq_ex.c; NULL if created by create_cq */
	struct ibv_pd *parent_domain; /* or NULL */
	/* members protected by the completion channel's mutex */
	struct soft_node ready_node;
	uint32_t events_pending;
	uint32_t events_retrieved;
	/* member protected by ibv.mutex */
	uint32_t async_events_retrieved;
};

static inline struct soft_cq *soft_cq_of(struct ibv_cq *cq)
{
	return soft_container(cq, struct soft_cq, ibv);
}

/* Create a completion queue, which stays hidden from the application until soft_cq_publish().
 * `with_timestamps` adds timestamps, and `pd` is a parent domain or NULL. Returns NULL and sets errno
 * on failure. */
struct soft_cq *soft_cq_make(struct ibv_context *context, int cqe, struct ibv_comp_channel *channel,
			     int comp_vector, bool with_timestamps, struct ibv_pd *pd);
/* Make a CQ visible: set its context and handle, and count it as a user of its channel, parent
 * domain and device context. Cannot fail. */
void soft_cq_publish(struct soft_cq *cq, void *cq_context);
/* Take up to `room` completions, with their timestamps unless `stamps` is NULL. Runs a step if the
 * CQ is empty. Returns the number of completions, or -1 if there are none because the CQ has
 * overflowed. */
int soft_cq_pop(struct soft_cq *cq, int room, struct ibv_wc *wc, struct soft_stamp *stamps);
int soft_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
/* Add a completion. Returns false if the completion is lost because the CQ has overflowed. For
 * `solicited`, see ibv_req_notify_cq(3). */
bool soft_cq_push(struct soft_cq *cq, const struct ibv_wc *wc, bool solicited);
/* Discard a queue pair's completions that the application has not polled yet. */
void soft_cq_discard(struct soft_cq *cq, uint32_t qp_num);
int soft_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
int soft_req_notify_cq(struct ibv_cq *cq, int solicited_only);

void soft_comp_channel_queue_event(struct soft_comp_channel *channel, struct soft_cq *cq);
void soft_comp_channel_remove_cq(struct soft_comp_channel *channel, struct soft_cq *cq);
