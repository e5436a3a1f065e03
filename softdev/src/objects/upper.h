/* Callbacks of higher folders for queue pairs: transports and links. */
#pragma once

#include "queue_pair.h"
#include "state.h"

/* The transport of a queue pair's type (rc/, ud/); what may be NULL says so. */
struct soft_transport {
	void (*created)(void); /* or NULL: one more of these queue pairs, and one less */
	void (*destroyed)(void); /* or NULL */
	/* INIT to RTR, or NULL: READs and atomics that the peer may have under way, the first PSN
	 * that is expected. 0 or an errno value. */
	int (*prepare)(struct soft_qp *qp, uint32_t depth, uint32_t psn);
	/* The peer may have another number of READs and atomics under way, or NULL.  0 or an errno
	 * value. */
	int (*resize)(struct soft_qp *qp, uint32_t depth);
	void (*forget)(struct soft_qp *qp); /* or NULL: the reverse, safe to repeat */
	void (*output)(struct soft_qp *qp); /* send what may be sent now */
	/* UC: nothing can be sent; everything in the send queue counts as sent. */
	void (*lose)(struct soft_qp *qp);
	void (*retry_expired)(struct soft_timer *timer); /* soft_qp.retry_timer */
};

/* Links between queue pairs (link/). */
struct soft_link_calls {
	/* The queue pair has come to RTR: connect, or wait for the peer; 0 or an errno value.  UC: the
	 * link is gone, likewise. */
	int (*begin)(struct soft_qp *qp);
	void (*again)(struct soft_qp *qp);
	/* The queue pair has come to RTS, from RTR (`first`) or SQD: PSNs and the timeout are
	 * known. */
	void (*ready)(struct soft_qp *qp, bool first);
	/* The queue pair is in error, with or without a link: send what must still go, then end. */
	void (*close)(struct soft_qp *qp);
	/* The queue pair goes without its link, if it has one, which closes. */
	void (*leave)(struct soft_qp *qp);
	/* An acknowledgement is due, at once or with company. */
	void (*acknowledge)(struct soft_qp_link *link);
	/* How long a path to another machine may be silent, in ns. */
	uint64_t (*silence_limit)(void);
	/* The requests of the queue pair complete without being answered; the key is invalidated or
	 * rebound: on return no peer copies from the memory that was exported for them. */
	void (*revoke_requests)(const struct soft_qp *qp);
	void (*revoke_key)(uint32_t key);
	/* The largest path MTU that every network of the device carries. */
	enum ibv_mtu (*active_mtu)(const struct soft_hca *hca);
	/* The port's LID, which no packet carries (ah.c): one of this device alone; 0 for RoCE. */
	uint16_t (*lid)(struct soft_hca *hca);
	/* The TCP and UDP port of this process; 0 and errno if there is none to be had. */
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

/* The queue pair's own GID, as its address has it; 0 or EINVAL. */
static inline int soft_qp_gid(const struct soft_qp *qp, struct soft_gid *gid)
{
	const struct ibv_ah_attr *ah = &qp->attr.ah_attr;
	const struct soft_hca *hca = soft_qp_hca(qp);

	return soft_gid_at(hca, ah->is_global ? ah->grh.sgid_index : soft_gid_loopback_index(hca),
			   gid);
}

/* And its peer's: an address without a GID is one of the same device. */
static inline union ibv_gid soft_qp_peer_gid(const struct soft_qp *qp)
{
	return qp->attr.ah_attr.is_global ? qp->attr.ah_attr.grh.dgid
					  : soft_gid_loopback_of(soft_qp_hca(qp));
}

static inline uint16_t soft_ip_port(void)
{
	return soft_links->ip_port();
}
