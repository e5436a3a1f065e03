/* Callbacks of higher folders for queue pairs: transports and links. */
#pragma once

#include "queue_pair.h"
#include "state.h"

/* The transport of a queue pair type (rc/, ud/). Members may be NULL where noted. */
struct soft_transport {
	void (*created)(void); /* a queue pair was created; may be NULL */
	void (*destroyed)(void); /* a queue pair was destroyed; may be NULL */
	/* Prepare the transition from INIT to RTR for `depth` outstanding READs and atomics of the
	 * peer and the first expected PSN. Returns 0 or an errno value. May be NULL. */
	int (*prepare)(struct soft_qp *qp, uint32_t depth, uint32_t psn);
	/* Change the number of outstanding READs and atomics of the peer. Returns 0 or an errno
	 * value. May be NULL. */
	int (*resize)(struct soft_qp *qp, uint32_t depth);
	void (*forget)(struct soft_qp *qp); /* reverses `prepare`; safe to repeat; may be NULL */
	void (*output)(struct soft_qp *qp); /* sends what may be sent now */
	/* Complete everything in the send queue of a UC queue pair that cannot send, as if it had
	 * been sent. */
	void (*lose)(struct soft_qp *qp);
	void (*retry_expired)(struct soft_timer *timer); /* callback of soft_qp.retry_timer */
};

/* Callbacks to links between queue pairs (link/). */
struct soft_link_calls {
	/* `begin` connects a queue pair that has entered RTR, or waits for its peer, and returns 0
	 * or an errno value. `again` does the same for a UC queue pair whose link is gone. */
	int (*begin)(struct soft_qp *qp);
	void (*again)(struct soft_qp *qp);
	/* The queue pair has entered RTS from RTR (`first`) or SQD. PSNs and the timeout are known
	 * now. */
	void (*ready)(struct soft_qp *qp, bool first);
	/* The queue pair is in error, with or without a link. Send what is still owed and end the
	 * link. */
	void (*close)(struct soft_qp *qp);
	/* Detach the queue pair from its link, if it has one, which closes. */
	void (*leave)(struct soft_qp *qp);
	/* An acknowledgement is due, and may wait for a frame that can carry it. */
	void (*acknowledge)(struct soft_qp_link *link);
	/* Returns how long a path to another machine may be silent, in ns. */
	uint64_t (*silence_limit)(void);
	/* Revoke the memory exported for a queue pair's requests, which complete without a
	 * response, or for a key that is invalidated or rebound. On return, no peer copies from
	 * it. */
	void (*revoke_requests)(const struct soft_qp *qp);
	void (*revoke_key)(uint32_t key);
	/* Returns the largest path MTU that all networks of the device support. */
	enum ibv_mtu (*active_mtu)(const struct soft_hca *hca);
	/* Returns the port's LID, which is unique to the device and is not sent in packets (ah.c).
	 * 0 for RoCE. */
	uint16_t (*lid)(struct soft_hca *hca);
	/* Returns the TCP and UDP port of this process, or 0 with errno set if there is none. */
	uint16_t (*ip_port)(void);
};

static inline struct soft_hca *soft_qp_hca(const struct soft_qp *qp)
{
	return soft_hca_of(qp->ibv.context);
}

static inline bool soft_port_is_down(const struct soft_qp *qp)
{
	return soft_ports_down && soft_qp_is_silent(qp);
}

/* Get the queue pair's own GID from its address vector. Returns 0 or EINVAL. */
static inline int soft_qp_gid(const struct soft_qp *qp, struct soft_gid *gid)
{
	const struct ibv_ah_attr *ah = &qp->attr.ah_attr;
	const struct soft_hca *hca = soft_qp_hca(qp);

	return soft_gid_at(hca, ah->is_global ? ah->grh.sgid_index : soft_gid_loopback_index(hca),
			   gid);
}

/* Returns the GID of the peer. An address vector without a GID refers to the same device. */
static inline union ibv_gid soft_qp_peer_gid(const struct soft_qp *qp)
{
	return qp->attr.ah_attr.is_global ? qp->attr.ah_attr.grh.dgid
					  : soft_gid_loopback_of(soft_qp_hca(qp));
}

static inline uint16_t soft_ip_port(void)
{
	return soft_links->ip_port();
}
