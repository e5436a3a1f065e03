/* The device context behind id->verbs and the protection domain behind id->pd: one for all ids.
 *
 * librdmacm opens a device once and keeps it for the life of the process, so applications keep
 * id->verbs longer than the id, or what rdma_get_devices told longer than the list: as the key of
 * what they have made on it, or to make more.  For programs (soft_cm_device_stays) that holds here;
 * else it is open (and with it the engine and its thread) as long as an id or anything made on it is
 * there.  It is always the same struct, so that a pointer to it is never a dangling one.
 *
 * Holds are counted under the engine's lock, so that a request can be bound in the engine's step;
 * opening and closing, which cannot be done under that lock, have a lock of their own around it.
 */
#include "cm_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "objects/objects.h"

pthread_mutex_t soft_cm_opening = PTHREAD_MUTEX_INITIALIZER;
bool soft_cm_device_stays;
static struct soft_context own;
static struct ibv_pd *pd;
static bool is_open;
static unsigned holds;
static struct soft_node attached = {&attached, &attached}; /* soft_cm_id.on_device */

static int open_context(void)
{
	struct ibv_device **list = soft_ibv_get_device_list(NULL);
	int error;

	if (!list)
		return errno;
	memset(&own, 0, sizeof(own));
	error = soft_context_start(&own, list[0]);
	soft_ibv_free_device_list(list);
	if (error)
		return error;
	own.only_pd_left = soft_cm_device_sweep;
	pd = soft_ibv_alloc_pd(&own.extended.context);
	if (!pd) {
		soft_context_stop(&own);
		return ENOMEM;
	}
	is_open = true;
	return 0;
}

int soft_cm_device_get(void)
{
	int error = 0;

	pthread_mutex_lock(&soft_cm_opening);
	if (is_open && own.fork_generation != soft_engine_fork_generation()) {
		is_open = false; /* the parent's, before a fork */
		holds = 0;
		soft_list_init(&attached);
	}
	if (!is_open)
		error = open_context();
	else if (own.fatal)
		error = ENODEV; /* until everything on what was removed is closed */
	if (!error) {
		soft_lock();
		holds++;
		soft_unlock();
	}
	pthread_mutex_unlock(&soft_cm_opening);
	return error;
}

void soft_cm_device_put(void)
{
	soft_lock();
	holds--;
	soft_unlock();
	soft_cm_device_sweep();
}

void soft_cm_device_sweep(void)
{
	bool unused;

	soft_engine_check_descriptors(); /* before the mutex, which it takes as well */
	pthread_mutex_lock(&soft_cm_opening);
	soft_lock();
	unused = is_open && (!soft_cm_device_stays || own.fatal) && !holds && own.children == 1 &&
		 !soft_container(pd, struct soft_pd, ibv)->users &&
		 own.fork_generation == soft_engine_fork_generation();
	if (unused)
		soft_async_forget(&own, NULL);
	soft_unlock();
	if (unused) {
		is_open = false;
		soft_ibv_dealloc_pd(pd);
		soft_context_stop(&own);
	}
	pthread_mutex_unlock(&soft_cm_opening);
}

void soft_cm_device_attach(struct soft_cm_id *id)
{
	soft_assert_locked();
	holds++;
	id->attached = true;
	soft_list_append(&attached, &id->on_device);
}

void soft_cm_device_bind(struct soft_cm_id *id)
{
	soft_cm_device_attach(id);
	id->bound = true;
	id->id.verbs = &own.extended.context;
	id->id.pd = pd;
	id->id.port_num = 1;
}

void soft_cm_device_detach(struct soft_cm_id *id)
{
	id->attached = id->bound = false;
	soft_list_remove(&id->on_device);
	holds--;
}

void soft_cm_device_each(void (*what)(struct soft_cm_id *id))
{
	struct soft_node *node = attached.next;

	while (node != &attached) {
		struct soft_cm_id *id = soft_list_entry(node, struct soft_cm_id, on_device);

		node = node->next;
		what(id);
	}
}

/* ---- rdma_get_devices(3) --------------------------------------------------------------------- */

/* There is one device; it is open until the list is freed. */
struct ibv_context **soft_rdma_get_devices(int *num_devices)
{
	struct ibv_context **list = calloc(2, sizeof(*list)); /* ends with NULL */
	int error;

	if (!list)
		return NULL;
	error = soft_cm_device_get();
	if (error) {
		free(list);
		errno = error;
		return NULL;
	}
	list[0] = &own.extended.context;
	if (num_devices)
		*num_devices = 1;
	return list;
}

void soft_rdma_free_devices(struct ibv_context **list)
{
	if (!list)
		return;
	free(list);
	soft_cm_device_put();
}
