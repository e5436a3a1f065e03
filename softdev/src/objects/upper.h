/* Callbacks that transports (rc/, ud/) and link/ implement for queue pairs. */
#pragma once

#include "queue_pair.h"
#include "state.h"

/* The callbacks of a transport (rc/, ud/). Members may be NULL where noted. */
struct soft_transport {
	void (*qp_created)(void); /* called after a queue pair is created; may be NULL */
	void (*qp_destroyed)(void); /* called when a queue pair is destroyed; may be NULL */
	/* Prepare the transition from INIT to RTR. The peer may have up to `depth` READs and
	 * atomics outstanding, and `psn` is the first expected PSN. Returns 0 or an errno value.
	 * May be NULL. */
	int (*prepare_rtr)(struct soft_qp *qp, uint32_t depth, uint32_t psn);
	/* Change the maximum number of READs and atomics that the peer may have outstanding.
	 * Returns 0 or an errno value. May be NULL. */
	int (*resize)(struct soft_qp *qp, uint32_t depth);
	/* Free what `prepare_rtr` has allocated. Safe to repeat. May be NULL. */
	void (*undo_prepare_rtr)(struct soft_qp *qp);
	void (*output)(struct soft_qp *qp); /* sends the requests that can be sent now */
	/* Complete all requests of a UC queue pair that cannot send, as if they had been sent. */
	void (*discard_sends)(struct soft_qp *qp);
	void (*retry_expired)(struct soft_timer *timer); /* callback of soft_qp.retry_timer */
};

/* Callbacks that link/ implements for links between queue pairs. */
struct soft_link_calls {
	/* Start connecting a queue pair that has entered RTR, or RTS if it is of type XRC_SEND. The
	 * peer may connect first. Returns 0 or an errno value. */
	int (*connect)(struct soft_qp *qp);
	/* Connect a UC queue pair again after it has lost its link. */
	void (*reconnect)(struct soft_qp *qp);
	/* Called when the queue pair has entered RTS, from RTR if `first` is set. Its PSNs and
	 * timeout are known now. */
	void (*entered_rts)(struct soft_qp *qp, bool first);
	/* Send the last frames of a queue pair in ERR, and then close its link, if any. */
	void (*close)(struct soft_qp *qp);
	/* Detach the queue pair from its link, if any, and close the link. */
	void (*detach)(struct soft_qp *qp);
	/* Schedule an acknowledgement, which may wait for a frame that can carry it. */
	void (*acknowledge)(struct soft_qp_link *link);
	/* Returns how long a path to another machine may stay silent, in ns. */
	uint64_t (*silence_limit)(void);
	/* Revoke the memory exported for the queue pair's requests, because the requests complete
	 * without a response. On return, the peer discards whatever it copies from this memory. */
	void (*revoke_requests)(const struct soft_qp *qp);
	/* Revoke the memory exported under a key that has been invalidated or rebound. On return,
	 * peers discard whatever they copy from this memory. */
	void (*revoke_key)(uint32_t key);
	/* Returns the largest path MTU that all networks of the device support. */
	enum ibv_mtu (*active_mtu)(const struct soft_hca *hca);
	/* Returns the port's LID, or 0 for RoCE. The LID is unique to the device and is not sent in
	 * packets (ah.c). */
	uint16_t (*lid)(struct soft_hca *hca);
	/* Returns the port number that this process uses for TCP and UDP, reserving one if
	 * necessary. Returns 0 with errno set on failure. */
	uint16_t (*ip_port)(void);
};

static inline struct soft_hca *soft_qp_hca(const struct soft_qp *qp)
{
	return soft_hca_of(qp->ibv.context);
}

static inline bool soft_port_is_down(const struct soft_qp *qp)
{
	return soft_ports_down && soft_qp_has_port_down(qp);
}

/* Store the local GID that the queue pair's address vector selects. Returns 0 or EINVAL. */
static inline int soft_qp_gid(const struct soft_qp *qp, struct soft_gid *gid)
{
	const struct ibv_ah_attr *ah = &qp->attr.ah_attr;
	const struct soft_hca *hca = soft_qp_hca(qp);

	return soft_gid_at(hca, ah->is_global ? ah->grh.sgid_index : soft_gid_loopback_index(hca),
			   gid);
}

/* Returns the peer's GID. An address vector without a GRH refers to the same device. */
static inline union ibv_gid soft_qp_peer_gid(const struct soft_qp *qp)
{
	return qp->attr.ah_attr.is_global ? qp->attr.ah_attr.grh.dgid
					  : soft_gid_loopback_of(soft_qp_hca(qp));
}

static inline uint16_t soft_ip_port(void)
{
	return soft_links->ip_port();
}
