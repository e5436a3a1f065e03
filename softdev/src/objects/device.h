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

/* The limits of the device, reported by ibv_query_device(3) and enforced by the create calls. */
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
/* soft_table_put() uses a given key, which must be free and not 0. soft_table_add() uses a new
 * random key from 1 to `mask`. Both return 0 or an errno value. */
int soft_table_put(struct soft_table *table, uint32_t key, void *object);
int soft_table_add(struct soft_table *table, void *object, uint32_t mask, uint32_t *key);
void soft_table_remove(struct soft_table *table, uint32_t key);

/* ---- device.c, pd.c ------------------------------------------------------------------------ */

struct soft_context {
	struct verbs_context extended; /* the application's pointer is to its last member */
	unsigned fork_generation; /* fork generation of the engine that it holds */
	bool closed;
	/* callback of the connection manager or NULL, called without the lock when only its own PD
	 * is left */
	void (*only_pd_left)(void);
	unsigned children; /* objects that refer to it; the last one frees a closed context */
	struct soft_channel async;
	struct soft_node async_events;
	struct soft_node qps;
	struct soft_node of_hca; /* in the list of all open contexts (port.c) */
	dev_t command_device; /* identity of the file cmd_fd, unless that is -1 (import.c) */
	ino_t command_inode;
	bool fatal; /* the device has failed and nothing works any more */
};

struct soft_pd {
	struct ibv_pd ibv;
	struct soft_node node; /* in the list of all PDs (pd.c) */
	unsigned users;
	/* for parent domains and imported domains */
	struct soft_pd *of; /* the domain that it stands for */
	bool imported;
	bool unimported; /* whether it was unimported while in use */
	struct soft_td *td;
	/* allocator of a parent domain, or NULL, and its argument (queue_memory.c) */
	void *(*alloc)(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment,
		       uint64_t resource_type);
	void (*free)(struct ibv_pd *pd, void *pd_context, void *ptr, uint64_t resource_type);
	void *pd_context;
};

static inline struct soft_pd *soft_pd_of(struct ibv_pd *pd)
{
	return soft_container(pd, struct soft_pd, ibv);
}

/* Returns the domain to compare: a parent domain counts as the domain that it was made from. */
static inline const struct ibv_pd *soft_pd_root(const struct ibv_pd *ibv)
{
	const struct soft_pd *pd = soft_container(ibv, struct soft_pd, ibv);

	return pd->of ? &pd->of->ibv : ibv;
}

static inline struct soft_context *soft_context_of(struct ibv_context *context)
{
	return soft_container(context, struct soft_context, extended.context);
}

/* Returns whether this is the child of a fork and the context belongs to its parent. Its objects
 * may only be dropped (ibv_fork_init(3)), because threads that do not exist here may hold their
 * locks or owe acknowledgements. */
static inline bool soft_context_inherited(const struct soft_context *context)
{
	return context->fork_generation != soft_engine_fork_generation();
}

/* Returns ENODEV in the child of a fork, where no device would serve new objects; otherwise 0. */
static inline int soft_context_error(const struct ibv_context *context)
{
	const struct soft_context *own =
		soft_container(context, const struct soft_context, extended.context);

	return soft_context_inherited(own) ? soft_refuse(ENODEV, "FORKED") : 0;
}

/* Begin a call that creates an object: returns zeroed memory for an object of the context. Returns
 * NULL if *rc is already an errno value, and sets it if there is no memory or this is the child of
 * a fork. */
static inline void *soft_object(const struct ibv_context *context, size_t size, int *rc)
{
	if (!*rc)
		*rc = soft_context_error(context);
	void *object = *rc ? NULL : calloc(1, size);

	if (!*rc && !object)
		*rc = ENOMEM;
	return object;
}

/* End a call that creates an object: returns its first member, which the application sees. For an
 * errno value, frees the memory, sets errno and returns NULL. */
static inline void *soft_made(int rc, void *object)
{
	if (!rc)
		return object;
	free(object);
	errno = rc;
	return NULL;
}

/* Hold a context while an object refers to it. soft_context_release() frees a closed context with
 * its last child after unlocking, so it is called without the lock. */
void soft_context_hold(struct soft_context *context);
void soft_context_release(struct soft_context *context);

/* Open a context in a zeroed or stopped struct, and close it. Called without the lock. */
int soft_context_start(struct soft_context *context, struct ibv_device *of);
void soft_context_stop(struct soft_context *context);

/* ---- queue_memory.c ------------------------------------------------------------------------ */

/* The resource types passed to an allocator. */
enum soft_resource { SOFT_SEND_QUEUE = 1, SOFT_RECEIVE_QUEUE, SOFT_COMPLETION_QUEUE };

/* Allocate zeroed memory for a queue. `pd` may be NULL. Returns NULL if there is none. Both
 * functions are called without the lock, because an allocator belongs to the application. */
void *soft_queue_alloc(struct ibv_pd *pd, size_t count, size_t size, enum soft_resource resource);
void soft_queue_free(void *memory); /* may be NULL */

/* ---- import.c ------------------------------------------------------------------------------ */

/* Open the cmd_fd of an open context. Returns 0 or an errno value. */
int soft_context_open_command_file(struct soft_context *context);
/* Returns whether objects of one context may be imported into the other. */
bool soft_contexts_related(struct ibv_context *a, struct ibv_context *b);

/* ---- gid.c --------------------------------------------------------------------------------- */

struct soft_gid {
	union ibv_gid gid;
	uint32_t ifindex;
	int mtu; /* MTU of the interface; 0 if unknown */
};

/* Get the entry at an index. Returns 0 or EINVAL. */
int soft_gid_at(const struct soft_hca *hca, int index, struct soft_gid *gid);
/* Read the host's addresses again. Returns whether anything has changed. */
bool soft_gid_refresh(struct soft_hca *hca);
void soft_gid_forget(struct soft_hca *hca);
int soft_gid_index(const struct soft_hca *hca,
		   const union ibv_gid *gid); /* returns -1 if not in the table */
/* Get the entry at an index if packets can be sent from it to `to`. Returns 0, EINVAL between IPv4
 * and IPv6, or the routing table's error (ENETUNREACH, EHOSTUNREACH) if there is no route to
 * another host. */
int soft_gid_source(const struct soft_hca *hca, int index, const union ibv_gid *to,
		    struct soft_gid *gid);
/* Returns the number of the device that owns the address in a process with the maximum number of
 * devices. 127.0.0.2 belongs to device 1, and other addresses to the first device whose table
 * contains them, or else to device 0. */
int soft_gid_hca_number(const union ibv_gid *gid);
uint32_t soft_gid_port(const union ibv_gid *gid); /* port of this process's device that owns it */
/* Look for a route from a local address to another address of the same family, or to a group.
 * Returns 0 or the routing table's error, which is ENETUNREACH from a loopback address to another
 * host. */
int soft_gid_route(const union ibv_gid *own, const union ibv_gid *to);
/* Bind a socket to a local address. Returns 0 or an errno value. */
int soft_gid_bind(int fd, const union ibv_gid *own);
bool soft_gid_is_local(const union ibv_gid *gid); /* in the GID table of one of our devices */
/* Returns whether the address belongs to one of our devices or is in 127.0.0.0/8. Debian resolves
 * its own name to 127.0.1.1, which no interface has. */
bool soft_gid_is_of_host(const union ibv_gid *gid);
/* Returns whether the address is in 127.0.0.0/8 or ::1. */
bool soft_gid_is_loopback(const union ibv_gid *gid);
bool soft_gid_is_multicast(const union ibv_gid *gid);
bool soft_gid_is_ipv4(const union ibv_gid *gid);
/* Returns the GID of an IPv4 address, given as four bytes. */
union ibv_gid soft_gid_of_ipv4(const void *address);
/* Convert a socket address to a GID. Returns false, with a GID of zeros, for other families. */
bool soft_gid_from(union ibv_gid *gid, const struct sockaddr *address);
/* Returns the interface of a link-local address relative to our entry `own`; otherwise 0. */
uint32_t soft_gid_scope(const union ibv_gid *gid, const union ibv_gid *own);
/* Convert a GID to a socket address relative to our entry `own`. `port` is in host byte order.
 * Returns its length. */
socklen_t soft_gid_address(const union ibv_gid *gid, const union ibv_gid *own, uint16_t port,
			   struct sockaddr_storage *address);
extern const union ibv_gid soft_gid_loopback; /* of the first device: 127.0.0.1 */
/* Returns a device's loopback GID, which an address vector without a GID refers to. */
union ibv_gid soft_gid_loopback_of(const struct soft_hca *hca);
int soft_gid_loopback_index(const struct soft_hca *hca);

/* ---- port.c: the devices, and what can happen to them and their ports ------------------------------------ */

/* Register an open context for port events. Called without the lock. */
void soft_port_attach(struct soft_context *context);
void soft_port_detach(struct soft_context *context);
/* Returns the number of devices of this process. The first call reads AIORDMA_EMBEDDED_DEVICES. */
int soft_hca_count(void);
struct soft_hca *soft_hca_at(int number); /* returns the first device for an invalid number */
/* Returns whether the port of the queue pair, or of its peer in this process, is down. */
bool soft_qp_is_silent(const struct soft_qp *qp);
extern const struct soft_subsystem soft_port_subsystem;

/* ---- async.c: asynchronous events of a context --------------------------------------------- */

/* Queue an event. `element` is the CQ, queue pair or port concerned. */
void soft_async_event(struct soft_context *context, const struct ibv_async_event *event);
/* Drop the pending events of an object before it is destroyed. */
void soft_async_forget(struct soft_context *context, const void *element);
/* Wait, without the lock, until the application has acknowledged all events of an object that it
 * has taken (ibv_get_async_event(3), ibv_get_cq_event(3)). The arguments are members of the
 * object. */
void soft_async_wait(const struct soft_context *context, pthread_mutex_t *mutex,
		     pthread_cond_t *cond, const uint32_t *acknowledged, const uint32_t *taken);
