/* Device contexts, protection domains, ports with their GIDs, and asynchronous events. */
#pragma once

#include <errno.h>
#include <stdlib.h>

#include "engine/engine.h"
#include "frame.h"
#include "trace/trace.h"

struct iovec;
struct soft_hca;
struct soft_qp;

/* Device limits, which ibv_query_device(3) reports and the create calls enforce. */
enum {
	SOFT_MAX_QP = 12288, /* see qp_numbers.c */
	SOFT_MAX_QP_WR = 16384,
	SOFT_MAX_SRQ_WR = 65536,
	SOFT_MAX_SGE = 32,
	SOFT_MAX_INLINE = 512,
	SOFT_MAX_CQE = 1 << 20,
	SOFT_MAX_RD_ATOMIC = 128,
	SOFT_MAX_OBJECTS = 1 << 20, /* PDs, CQs, MRs, MWs, SRQs */
	SOFT_MAX_AH = 65536,
	SOFT_MAX_MCAST_GRP = 256,
	SOFT_MAX_MCAST_QP = 256,       /* per group */
	SOFT_MAX_MCAST_ATTACH = 16384, /* in total */
};

/* ---- table.c: 32-bit numbers to objects ---------------------------------------------------- */

struct soft_table {
	struct soft_table_slot {
		uint32_t key; /* 0 if empty */
		void *object;
	} *slots;
	uint32_t capacity; /* a power of two, or 0 */
	uint32_t count;
};

void *soft_table_find(const struct soft_table *table, uint32_t key);
/* Add an object with the given key, which must not be 0 or in use. Returns 0 or an errno value. */
int soft_table_put(struct soft_table *table, uint32_t key, void *object);
/* Add an object with a new random key from 1 to `mask`, and store the key in `*key`. Returns 0 or
 * an errno value. */
int soft_table_add(struct soft_table *table, void *object, uint32_t mask, uint32_t *key);
void soft_table_remove(struct soft_table *table, uint32_t key);

/* ---- device.c, pd.c ------------------------------------------------------------------------ */

struct soft_context {
	struct verbs_context extended; /* ends with the application's ibv_context */
	unsigned fork_generation; /* engine's fork generation when the context was started */
	bool closed;
	/* callback of the connection manager, or NULL; called without the lock when the connection
	 * manager's PD is the only remaining object */
	void (*on_only_cm_pd_left)(void);
	unsigned children; /* number of objects; destroying the last one frees a closed context */
	struct soft_channel async;
	struct soft_node async_events;
	struct soft_node qps;
	struct soft_node hca_node; /* in soft_hca.contexts (port.c) */
	dev_t command_device; /* device number of the cmd_fd file (import.c) */
	ino_t command_inode;
	bool fatal; /* whether the device has failed permanently */
};

struct soft_pd {
	struct ibv_pd ibv;
	struct soft_node node; /* in the list of all PDs (pd.c) */
	unsigned users;
	/* members used only by parent domains and imported domains */
	struct soft_pd *underlying; /* underlying domain */
	bool imported;
	bool unimported; /* whether it was unimported while in use */
	struct soft_td *td;
	/* custom allocator of a parent domain (queue_memory.c), or NULL */
	void *(*alloc)(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment,
		       uint64_t resource_type);
	void (*free)(struct ibv_pd *pd, void *pd_context, void *ptr, uint64_t resource_type);
	void *pd_context;
};

static inline struct soft_pd *soft_pd_of(struct ibv_pd *pd)
{
	return soft_container(pd, struct soft_pd, ibv);
}

/* Returns the underlying domain of a parent or imported domain. For any other domain, returns the
 * domain itself. Two domains count as equal if this function returns the same domain for both. */
static inline const struct ibv_pd *soft_pd_root(const struct ibv_pd *ibv)
{
	const struct soft_pd *pd = soft_container(ibv, struct soft_pd, ibv);

	return pd->underlying ? &pd->underlying->ibv : ibv;
}

static inline struct soft_context *soft_context_of(struct ibv_context *context)
{
	return soft_container(context, struct soft_context, extended.context);
}

/* Returns whether the context was inherited by a forked child. The child may only destroy the
 * context's objects (ibv_fork_init(3)). It must not wait for their locks or for the acknowledgement
 * of their events, because the threads responsible for these may exist only in the parent. */
static inline bool soft_context_is_inherited(const struct soft_context *context)
{
	return context->fork_generation != soft_engine_fork_generation();
}

/* Refuse with ENODEV if the context was inherited, because the device does not run in a forked
 * child and therefore cannot serve new objects. Otherwise returns 0. */
static inline int soft_refuse_if_inherited(const struct ibv_context *context)
{
	const struct soft_context *own =
		soft_container(context, const struct soft_context, extended.context);

	return soft_context_is_inherited(own) ? soft_refuse(ENODEV, "FORKED") : 0;
}

/* Allocate a zeroed object for a create call. Returns NULL without allocating if `*rc` is already
 * an errno value. On failure, sets `*rc` to ENOMEM, or to ENODEV in a forked child. */
static inline void *soft_alloc_unless_failed(const struct ibv_context *context, size_t size,
					     int *rc)
{
	if (!*rc)
		*rc = soft_refuse_if_inherited(context);
	void *object = *rc ? NULL : calloc(1, size);

	if (!*rc && !object)
		*rc = ENOMEM;
	return object;
}

/* Finish a create call. If `rc` is 0, returns `object`, whose first member the application sees.
 * Otherwise frees `object`, sets errno to `rc` and returns NULL. */
static inline void *soft_finish_create(int rc, void *object)
{
	if (!rc)
		return object;
	free(object);
	errno = rc;
	return NULL;
}

/* Fail a create call before its object has been allocated. Sets errno to `rc` and returns NULL. */
static inline void *soft_fail_create(int rc)
{
	errno = rc;
	return NULL;
}

/* Take a reference to a context for a new object. */
void soft_context_hold(struct soft_context *context);
/* Release an object's reference. The last reference to a closed context frees it. Called without
 * the lock. */
void soft_context_release(struct soft_context *context);

/* Initialise a struct as an open context. The struct must be zeroed, or must have been passed to
 * soft_context_stop(). Called without the lock. Returns 0 or an errno value. */
int soft_context_start(struct soft_context *context, struct ibv_device *device);
/* Close a context without freeing its struct. Called without the lock. */
void soft_context_stop(struct soft_context *context);

/* ---- queue_memory.c ------------------------------------------------------------------------ */

/* The resource types passed to an allocator. Their upper 32 bits contain the driver ID, which is 0
 * here (RDMA_DRIVER_UNKNOWN). */
enum soft_resource { SOFT_SEND_QUEUE = 1, SOFT_RECEIVE_QUEUE, SOFT_COMPLETION_QUEUE };

/* Allocate zeroed memory for a queue, using the allocator of the parent domain `domain` if it has
 * one. `domain` may also be NULL or a plain protection domain. Returns NULL if no memory is
 * available. Called without the lock, because it may call the application's allocator. */
void *soft_queue_alloc(struct ibv_pd *domain, size_t count, size_t size,
		       enum soft_resource resource);
/* Free the memory of a queue, which may be NULL. Called without the lock, because it may call the
 * application's allocator. */
void soft_queue_free(void *memory);

/* ---- import.c ------------------------------------------------------------------------------ */

/* Create the cmd_fd that identifies a context. Returns 0 or an errno value. */
int soft_context_open_command_file(struct soft_context *context);
/* Returns whether objects of one context may be imported into the other. */
bool soft_contexts_related(struct ibv_context *a, struct ibv_context *b);

/* ---- gid.c --------------------------------------------------------------------------------- */

struct soft_gid {
	union ibv_gid gid;
	uint32_t ifindex;
	int mtu; /* MTU of the interface; 0 if unknown */
};

/* Copy the GID table entry at `index` to `*gid`. Returns 0, or EINVAL if the entry does not
 * exist. */
int soft_gid_at(const struct soft_hca *hca, int index, struct soft_gid *gid);
/* Update the GID table from the host's addresses. Returns whether the table has changed. */
bool soft_gid_refresh(struct soft_hca *hca);
void soft_gid_clear(struct soft_hca *hca);
int soft_gid_index(const struct soft_hca *hca,
		   const union ibv_gid *gid); /* returns -1 if not in the table */
/* Get the GID table entry at `index` and check whether it can be the source of packets to `to`.
 * Returns EINVAL if the index is invalid or the GIDs belong to different address families. Returns
 * ENETUNREACH or EHOSTUNREACH if no route exists. Returns 0 otherwise. If `to` is a multicast GID,
 * only the index is checked. */
int soft_gid_source(const struct soft_hca *hca, int index, const union ibv_gid *to,
		    struct soft_gid *gid);
/* Returns the number of the device that owns the address. 127.0.0.2 belongs to device 1 and so on,
 * even if this process has fewer devices. Any other address belongs to the first device whose table
 * contains it, or else to device 0. */
int soft_gid_hca_number(const union ibv_gid *gid);
/* Returns the local device that owns the address, or device 0 if this process lacks that device. */
const struct soft_hca *soft_gid_hca(const union ibv_gid *gid);
uint32_t soft_gid_port_bit(const union ibv_gid *gid); /* port bit of the GID's local device */
/* Check whether a route exists from the local address `own` to `to`. Unless `to` is a multicast
 * address, both must belong to the same address family. Returns 0, or the error of the routing
 * table. If `own` is a loopback address and `to` is on another host, the error is ENETUNREACH. */
int soft_gid_route(const union ibv_gid *own, const union ibv_gid *to);
/* Bind a socket to a local address. Returns 0 or an errno value. */
int soft_gid_bind(int fd, const union ibv_gid *own);
bool soft_gid_is_local(const union ibv_gid *gid); /* whether a device of this process has the GID */
/* Returns whether the address belongs to a device of this process or is in 127.0.0.0/8. The whole
 * block counts because Debian resolves its own host name to 127.0.1.1, which no interface has. */
bool soft_gid_is_on_this_host(const union ibv_gid *gid);
/* Returns whether the address is in 127.0.0.0/8 or ::1. */
bool soft_gid_is_loopback(const union ibv_gid *gid);
bool soft_gid_is_multicast(const union ibv_gid *gid);
bool soft_gid_is_ipv4(const union ibv_gid *gid);
/* Returns the GID of an IPv4 address (four bytes in network byte order). */
union ibv_gid soft_gid_of_ipv4(const void *address);
/* Convert an IPv4 or IPv6 socket address to a GID. Returns false and clears `*gid` for any other
 * address family. */
bool soft_gid_from_sockaddr(union ibv_gid *gid, const struct sockaddr *address);
/* Returns the interface index of the local GID `own` if `gid` is link-local, or else 0. */
uint32_t soft_gid_scope_id(const union ibv_gid *gid, const union ibv_gid *own);
/* Convert a GID to a socket address. A link-local GID gets the interface of the local GID `own`.
 * `port` is in host byte order. Returns the length of the address. */
socklen_t soft_gid_to_sockaddr(const union ibv_gid *gid, const union ibv_gid *own, uint16_t port,
			       struct sockaddr_storage *address);
extern const union ibv_gid soft_gid_loopback; /* device 0: 127.0.0.1 */
/* Returns a device's loopback GID. Address vectors without a GID refer to it. */
union ibv_gid soft_gid_loopback_of(const struct soft_hca *hca);
int soft_gid_loopback_index(const struct soft_hca *hca);

/* ---- port.c: devices, ports and their events ----------------------------------------------- */

/* Register an open context for port events. Called without the lock. */
void soft_port_attach(struct soft_context *context);
void soft_port_detach(struct soft_context *context);
/* Returns the number of devices of this process. The first call reads AIORDMA_EMBEDDED_DEVICES. */
int soft_hca_count(void);
int soft_hca_number(const struct soft_hca *hca);
struct soft_hca *soft_hca_at(int number); /* returns device 0 if `number` is too high */
/* Returns whether the queue pair's port is down. If the peer is in this process, the peer's port
 * counts as well. Ports of other processes are not known. */
bool soft_qp_has_port_down(const struct soft_qp *qp);
extern const struct soft_subsystem soft_port_subsystem;

/* ---- async.c: asynchronous events of a context --------------------------------------------- */

/* Queue an event for the application, unless the context is closed or no memory is available. */
void soft_async_queue_event(struct soft_context *context, const struct ibv_async_event *event);
/* Drop an object's pending events before it is destroyed, or all events if `element` is NULL. */
void soft_async_drop_events(struct soft_context *context, const void *element);
/* Wait until the application has acknowledged all events of an object that it has read
 * (ibv_get_async_event(3), ibv_get_cq_event(3)). The last four arguments are members of the object.
 * Called without the lock. */
void soft_async_await_acks(const struct soft_context *context, pthread_mutex_t *mutex,
			   pthread_cond_t *cond, const uint32_t *acknowledged,
			   const uint32_t *retrieved);
