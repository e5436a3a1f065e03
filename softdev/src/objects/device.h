/* Device contexts, protection domains, the port with its GIDs, and asynchronous events. */
#pragma once

#include <errno.h>
#include <stdlib.h>

#include "engine/engine.h"
#include "frame.h"
#include "trace/trace.h"

struct iovec;
struct soft_hca;
struct soft_qp;

/* The limits of the device; ibv_query_device(3) tells them, the create calls enforce them. */
enum {
	SOFT_MAX_QP = 12288, /* qp_numbers.c */
	SOFT_MAX_QP_WR = 16384,
	SOFT_MAX_SRQ_WR = 65536,
	SOFT_MAX_SGE = 32,
	SOFT_MAX_INLINE = 512,
	SOFT_MAX_CQE = 1 << 20,
	SOFT_MAX_RD_ATOMIC = 128,
	SOFT_MAX_OBJECTS = 1 << 20, /* PDs, CQs, MRs, MWs, SRQs */
	SOFT_MAX_AH = 65536,
	SOFT_MAX_MCAST_GRP = 256,
	SOFT_MAX_MCAST_QP = 256,       /* in one group */
	SOFT_MAX_MCAST_ATTACH = 16384, /* in all */
};

/* ---- table.c: 32-bit numbers to objects ---------------------------------------------------- */

struct soft_table {
	struct soft_table_slot {
		uint32_t key; /* 0: empty */
		void *object;
	} *slots;
	uint32_t capacity; /* a power of two, or 0 */
	uint32_t count;
};

void *soft_table_find(const struct soft_table *table, uint32_t key);
/* Under a key from 1 on that is free, or a new random one from 1 to `mask`; 0 or an errno value. */
int soft_table_put(struct soft_table *table, uint32_t key, void *object);
int soft_table_add(struct soft_table *table, void *object, uint32_t mask, uint32_t *key);
void soft_table_remove(struct soft_table *table, uint32_t key);

/* ---- device.c, pd.c ------------------------------------------------------------------------ */

struct soft_context {
	struct verbs_context extended; /* the application's pointer is to its last member */
	unsigned fork_generation; /* of the engine that it holds */
	bool closed;
	/* of the connection manager, or NULL: nothing but its own PD is left; without the lock */
	void (*only_pd_left)(void);
	unsigned children; /* objects that point here; the last one frees a closed context */
	struct soft_channel async;
	struct soft_node async_events;
	struct soft_node qps;
	struct soft_node of_hca; /* port.c: every one that is open */
	dev_t command_device; /* import.c: the file of cmd_fd, if that is not -1 */
	ino_t command_inode;
	bool fatal; /* the device has failed: nothing works here any more */
};

struct soft_pd {
	struct ibv_pd ibv;
	struct soft_node node; /* pd.c: all of them */
	unsigned users;
	/* of a parent domain, and of an imported one: */
	struct soft_pd *of; /* the domain that it stands for */
	bool imported;
	bool unimported; /* while it was in use */
	struct soft_td *td;
	/* its allocator, or NULL, and what that is called with: queue_memory.c */
	void *(*alloc)(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment,
		       uint64_t resource_type);
	void (*free)(struct ibv_pd *pd, void *pd_context, void *ptr, uint64_t resource_type);
	void *pd_context;
};

static inline struct soft_pd *soft_pd_of(struct ibv_pd *pd)
{
	return soft_container(pd, struct soft_pd, ibv);
}

/* The domain to compare: a parent domain counts as the one that it was made of. */
static inline const struct ibv_pd *soft_pd_root(const struct ibv_pd *ibv)
{
	const struct soft_pd *pd = soft_container(ibv, struct soft_pd, ibv);

	return pd->of ? &pd->of->ibv : ibv;
}

static inline struct soft_context *soft_context_of(struct ibv_context *context)
{
	return soft_container(context, struct soft_context, extended.context);
}

/* Is this the child of a fork, and the context its parent's?  What hangs on that may only be
 * dropped (ibv_fork_init(3)): threads that are not here may hold its locks, or owe
 * acknowledgements. */
static inline bool soft_context_inherited(const struct soft_context *context)
{
	return context->fork_generation != soft_engine_fork_generation();
}

/* Nothing is made with it in the child of a fork, where no device would serve it: ENODEV; else 0. */
static inline int soft_context_error(const struct ibv_context *context)
{
	const struct soft_context *own =
		soft_container(context, const struct soft_context, extended.context);

	return soft_context_inherited(own) ? soft_refuse(ENODEV, "FORKED") : 0;
}

/* How every call begins that makes something: zeroed memory for an object of that context.  NULL
 * without memory, in the child of a fork, and if *rc was an errno value already, which it is then. */
static inline void *soft_object(const struct ibv_context *context, size_t size, int *rc)
{
	if (!*rc)
		*rc = soft_context_error(context);
	void *object = *rc ? NULL : calloc(1, size);

	if (!*rc && !object)
		*rc = ENOMEM;
	return object;
}

/* And how it ends: with the object's first member, which is the application's; or, for an errno value,
 * with NULL, and the memory is freed. */
static inline void *soft_made(int rc, void *object)
{
	if (!rc)
		return object;
	free(object);
	errno = rc;
	return NULL;
}

/* Release frees a closed context with its last child, after unlocking: so it is called without the
 * lock. */
void soft_context_hold(struct soft_context *context);
void soft_context_release(struct soft_context *context);

/* Make a zeroed or stopped struct an open context, and the reverse; not under the lock. */
int soft_context_start(struct soft_context *context, struct ibv_device *of);
void soft_context_stop(struct soft_context *context);

/* ---- queue_memory.c ------------------------------------------------------------------------ */

/* The resource type that an allocator is told. */
enum soft_resource { SOFT_SEND_QUEUE = 1, SOFT_RECEIVE_QUEUE, SOFT_COMPLETION_QUEUE };

/* Zeroed memory for a queue of the domain, which may be NULL; NULL without memory.  Both are called
 * without the lock, because an allocator is the application's. */
void *soft_queue_alloc(struct ibv_pd *pd, size_t count, size_t size, enum soft_resource resource);
void soft_queue_free(void *memory); /* may be NULL */

/* ---- import.c ------------------------------------------------------------------------------ */

/* Give an open context its cmd_fd; 0 or an errno value. */
int soft_context_open_command_file(struct soft_context *context);
/* May objects of the one be imported into the other? */
bool soft_contexts_related(struct ibv_context *a, struct ibv_context *b);

/* ---- gid.c --------------------------------------------------------------------------------- */

struct soft_gid {
	union ibv_gid gid;
	uint32_t ifindex;
	int mtu; /* of the interface; 0: not known */
};

/* The entry at an index; 0 or EINVAL. */
int soft_gid_at(const struct soft_hca *hca, int index, struct soft_gid *gid);
/* Read the host's addresses again; has anything changed? */
bool soft_gid_refresh(struct soft_hca *hca);
void soft_gid_forget(struct soft_hca *hca);
int soft_gid_index(const struct soft_hca *hca, const union ibv_gid *gid); /* -1: not of it */
/* The source at an index, if packets can go from there to `to`: EINVAL between IPv4 and IPv6, and
 * the error of the routing table (ENETUNREACH, EHOSTUNREACH) where it has no route to another host. */
int soft_gid_source(const struct soft_hca *hca, int index, const union ibv_gid *to,
		    struct soft_gid *gid);
/* The number of the device to which that address belongs in a process with all that there can be:
 * 127.0.0.2 is number 1's, the first device's that has it, or, if it is in no table, number 0's. */
int soft_gid_hca_number(const union ibv_gid *gid);
uint32_t soft_gid_port(const union ibv_gid *gid); /* of the device of this process that has it */
/* Look for a route from an address of this host to one of the same family, or to a group.  Returns 0 or
 * the error of the routing table; ENETUNREACH from a loopback address to another host. */
int soft_gid_route(const union ibv_gid *own, const union ibv_gid *to);
/* Bind a socket to an address of this host; 0 or an errno value. */
int soft_gid_bind(int fd, const union ibv_gid *own);
bool soft_gid_is_local(const union ibv_gid *gid); /* one of ours */
/* One of ours, or any of 127.0.0.0/8: a Debian finds itself at 127.0.1.1, which no interface has.
 */
bool soft_gid_is_of_host(const union ibv_gid *gid);
/* Returns whether it is in 127.0.0.0/8, or ::1. */
bool soft_gid_is_loopback(const union ibv_gid *gid);
bool soft_gid_is_multicast(const union ibv_gid *gid);
bool soft_gid_is_ipv4(const union ibv_gid *gid);
/* The GID of the IPv4 address whose four bytes are there. */
union ibv_gid soft_gid_of_ipv4(const void *address);
/* The GID of a socket address; false: it has none, and the GID is zeros. */
bool soft_gid_from(union ibv_gid *gid, const struct sockaddr *address);
/* The interface that a link-local address is on, as seen from our entry `own`; else 0. */
uint32_t soft_gid_scope(const union ibv_gid *gid, const union ibv_gid *own);
/* The socket address that a GID stands for, as seen from there; port in host order.  Returns its
 * length. */
socklen_t soft_gid_address(const union ibv_gid *gid, const union ibv_gid *own, uint16_t port,
			   struct sockaddr_storage *address);
extern const union ibv_gid soft_gid_loopback; /* of the first device: 127.0.0.1 */
/* The loopback GID of a device, which an address without a GID means. */
union ibv_gid soft_gid_loopback_of(const struct soft_hca *hca);
int soft_gid_loopback_index(const struct soft_hca *hca);

/* ---- port.c: the devices, and what can happen to them and their ports ------------------------------------ */

/* An open context is told; not under the lock. */
void soft_port_attach(struct soft_context *context);
void soft_port_detach(struct soft_context *context);
/* The devices of this process: what AIORDMA_EMBEDDED_DEVICES says when the first call asks. */
int soft_hca_count(void);
struct soft_hca *soft_hca_at(int number); /* the first one for a number that there is not */
/* Its port is down, or that of its peer in this process. */
bool soft_qp_is_silent(const struct soft_qp *qp);
extern const struct soft_subsystem soft_port_subsystem;

/* ---- async.c: asynchronous events of a context --------------------------------------------- */

/* Queue an event; element is the CQ, QP or port it is about. */
void soft_async_event(struct soft_context *context, const struct ibv_async_event *event);
/* Forget those that the application has not taken yet, before their object goes. */
void soft_async_forget(struct soft_context *context, const void *element);
/* Wait, without the lock, until the application has acknowledged all events that it has taken of an
 * object, whose members these are: ibv_get_async_event(3), ibv_get_cq_event(3). */
void soft_async_wait(const struct soft_context *context, pthread_mutex_t *mutex,
		     pthread_cond_t *cond, const uint32_t *acknowledged, const uint32_t *taken);
