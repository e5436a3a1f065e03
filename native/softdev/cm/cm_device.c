/* The device context behind id->verbs and the protection domain behind id->pd: one for all ids.
 *
 * librdmacm opens a device once and keeps it for the life of the process, so applications keep
 * id->verbs longer than the id, or what rdma_get_devices told longer than the list: as the key of
 * what they have made on it, or to make more.  For programs (soft_cm_keep_device) that holds here;
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

void soft_cm_keep_device(bool keep)
{
	soft_device.cm->device_stays = keep;
}

static int open_context(void)
{
	struct ibv_device **list = soft_ibv_get_device_list(NULL);
	int error;

	if (!list)
		return errno;
	memset(&soft_device.cm->own, 0, sizeof(soft_device.cm->own));
	error = soft_context_start(&soft_device.cm->own, list[0]);
	soft_ibv_free_device_list(list);
	if (error)
		return error;
	soft_device.cm->own.only_pd_left = soft_cm_device_sweep;
	soft_device.cm->pd = soft_ibv_alloc_pd(&soft_device.cm->own.extended.context);
	if (!soft_device.cm->pd) {
		soft_context_stop(&soft_device.cm->own);
		return ENOMEM;
	}
	soft_device.cm->is_open = true;
	return 0;
}

int soft_cm_device_get(void)
{
	int error = 0;

	pthread_mutex_lock(&soft_device.cm->opening);
	if (!soft_device.cm->is_open)
		error = open_context();
	else if (soft_device.cm->own.fatal)
		error = ENODEV; /* until everything on what was removed is closed */
	if (!error) {
		soft_lock();
		soft_device.cm->holds++;
		soft_unlock();
	}
	pthread_mutex_unlock(&soft_device.cm->opening);
	return error;
}

void soft_cm_device_put(void)
{
	soft_lock();
	soft_device.cm->holds--;
	soft_unlock();
	soft_cm_device_sweep();
}

void soft_cm_device_sweep(void)
{
	bool unused;

	soft_engine_check_descriptors(); /* before the mutex, which it takes as well */
	pthread_mutex_lock(&soft_device.cm->opening);
	soft_lock();
	unused = soft_device.cm->is_open &&
		 (!soft_device.cm->device_stays || soft_device.cm->own.fatal) &&
		 !soft_device.cm->holds && soft_device.cm->own.children == 1 &&
		 !soft_container(soft_device.cm->pd, struct soft_pd, ibv)->users;
	if (unused)
		soft_async_forget(&soft_device.cm->own, NULL);
	soft_unlock();
	if (unused) {
		soft_device.cm->is_open = false;
		soft_ibv_dealloc_pd(soft_device.cm->pd);
		soft_context_stop(&soft_device.cm->own);
	}
	pthread_mutex_unlock(&soft_device.cm->opening);
}

void soft_cm_device_attach(struct soft_cm_id *id)
{
	soft_assert_locked();
	soft_device.cm->holds++;
	id->attached = true;
	soft_list_append(&soft_device.cm->attached, &id->on_device);
}

void soft_cm_device_bind(struct soft_cm_id *id)
{
	soft_cm_device_attach(id);
	id->bound = true;
	id->id.verbs = &soft_device.cm->own.extended.context;
	id->id.pd = soft_device.cm->pd;
	id->id.port_num = 1;
}

void soft_cm_device_detach(struct soft_cm_id *id)
{
	id->attached = id->bound = false;
	soft_list_remove(&id->on_device);
	soft_device.cm->holds--;
}

void soft_cm_device_each(void (*what)(struct soft_cm_id *id))
{
	struct soft_node *node = soft_device.cm->attached.next;

	while (node != &soft_device.cm->attached) {
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
	list[0] = &soft_device.cm->own.extended.context;
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
