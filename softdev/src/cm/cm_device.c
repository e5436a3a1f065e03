/* The device contexts in id->verbs and the protection domains in id->pd. Each device has one
 * context and one protection domain, which all ids share.
 *
 * librdmacm opens the devices once and never closes them. Applications therefore use id->verbs
 * after destroying the id, and the contexts from rdma_get_devices after freeing the list. They use
 * them to create objects, or as keys for objects created earlier.
 *
 * After soft_cm_keep_device(true), as in programs, the devices also stay open until the process
 * ends. Otherwise they stay open while an id or an object created on them exists. The same applies
 * to the engine and its thread. The struct of a device never moves, so pointers to it remain valid.
 *
 * The engine's lock protects the hold counts, so that a step of the engine can bind a request to a
 * device. Devices cannot be opened or closed under that lock. `open_mutex` serialises
 * these operations and is acquired before the engine's lock.
 */
#include "cm_internal.h"

void soft_cm_keep_device(bool keep)
{
	soft_device.cm->keep_device = keep;
}

/* Open the device's context and allocate its protection domain. Once only this protection domain is
 * left in the context, soft_cm_device_close_unused can close it. */
static int open_context(struct soft_cm_device *device, struct ibv_device *ibv_device)
{
	memset(&device->own, 0, sizeof(device->own));
	int error = soft_context_start(&device->own, ibv_device);

	if (error)
		return error;
	device->own.on_only_cm_pd_left = soft_cm_device_close_unused;
	device->pd = soft_ibv_alloc_pd(&device->own.extended.context);
	if (!device->pd) {
		soft_context_stop(&device->own);
		return ENOMEM;
	}
	device->is_open = true;
	return 0;
}

/* Open all devices that are not open yet. Returns the number of devices or a negative errno
 * value. */
static int open_all(void)
{
	int count = 0, failed_count = 0, error = 0;
	struct ibv_device **list = soft_ibv_get_device_list(&count);

	if (!list)
		return -errno;
	for (int i = 0; i < count && !error; i++) {
		struct soft_cm_device *device = &soft_device.cm->devices[i];

		if (!device->is_open)
			error = open_context(device, list[i]);
		else
			failed_count += device->own.fatal;
	}
	soft_ibv_free_device_list(list);
	/* A failed device can be used again only after its context has been closed, and objects on
	 * it still keep the context open. Fail if this applies to all devices. There is at least
	 * one device (soft_hca_count). */
	if (!error && failed_count == count)
		error = ENODEV;
	return error ? -error : count;
}

/* Add `change` to the hold counts of the first `count` devices. The caller must hold the lock. */
static void hold_all(int count, int change)
{
	for (int i = 0; i < count; i++)
		soft_device.cm->devices[i].holds += (unsigned)change;
}

int soft_cm_device_get(void)
{
	pthread_mutex_lock(&soft_device.cm->open_mutex);
	int count = open_all();

	if (count > 0) {
		soft_lock();
		hold_all(count, 1);
		soft_unlock();
	}
	pthread_mutex_unlock(&soft_device.cm->open_mutex);
	if (count > 0)
		return 0;
	soft_cm_device_close_unused(); /* close the devices opened before the error */
	return -count;
}

void soft_cm_device_put(void)
{
	soft_lock();
	hold_all(soft_hca_count(), -1);
	soft_unlock();
	soft_cm_device_close_unused();
}

/* Close the device's context if nothing uses it, that is, if its only child is the connection
 * manager's own protection domain. */
static void close_if_unused(struct soft_cm_device *device)
{
	bool unused;

	soft_lock();
	unused = device->is_open && (!soft_device.cm->keep_device || device->own.fatal) &&
		 !device->holds && device->own.children == 1 &&
		 !soft_container(device->pd, struct soft_pd, ibv)->users;
	if (unused)
		soft_async_drop_events(&device->own, NULL);
	soft_unlock();
	if (unused) {
		device->is_open = false;
		soft_ibv_dealloc_pd(device->pd);
		soft_context_stop(&device->own);
	}
}

void soft_cm_device_close_unused(void)
{
	soft_engine_handle_lost_descriptors(); /* acquires the mutex itself */
	pthread_mutex_lock(&soft_device.cm->open_mutex);
	for (int i = 0; i < SOFT_MAX_HCAS; i++)
		if (soft_device.cm->devices[i].is_open)
			close_if_unused(&soft_device.cm->devices[i]);
	pthread_mutex_unlock(&soft_device.cm->open_mutex);
}

static struct soft_cm_device *device_at(const struct sockaddr *address)
{
	union ibv_gid gid;

	soft_gid_from_sockaddr(&gid, address);
	return &soft_device.cm->devices[soft_hca_number(soft_gid_hca(&gid))];
}

int soft_cm_device_error(const struct sockaddr *address)
{
	return device_at(address)->own.fatal ? ENODEV : 0;
}

void soft_cm_device_attach(struct soft_cm_id *id, struct soft_cm_device *device)
{
	soft_assert_locked();
	if (device)
		device->holds++;
	else
		hold_all(soft_hca_count(), 1);
	id->attached = true;
	id->device = device;
	soft_list_append(&soft_device.cm->attached, &id->on_device);
}

void soft_cm_device_bind(struct soft_cm_id *id)
{
	struct soft_cm_device *device = device_at(&id->id.route.addr.src_addr);

	soft_cm_device_attach(id, device);
	id->bound = true;
	id->id.verbs = &device->own.extended.context;
	id->id.pd = device->pd;
	id->id.port_num = 1;
}

void soft_cm_device_detach(struct soft_cm_id *id)
{
	id->attached = id->bound = false;
	soft_list_remove(&id->on_device);
	if (id->device)
		id->device->holds--;
	else
		hold_all(soft_hca_count(), -1);
}

/* Returns whether all devices outside the bit mask `ports` have been removed. */
static bool are_others_removed(uint32_t ports)
{
	for (int i = 0; i < soft_hca_count(); i++)
		if (!(ports & 1u << i) && !soft_device.cm->devices[i].own.fatal)
			return false;
	return true;
}

void soft_cm_device_each(uint32_t ports, void (*callback)(struct soft_cm_id *id))
{
	soft_list_each_safe (struct soft_cm_id, id, &soft_device.cm->attached, on_device) {
		if (id->device ? ports & 1u << (id->device - soft_device.cm->devices)
			       : are_others_removed(ports))
			callback(id);
	}
}

/* ---- rdma_get_devices(3) --------------------------------------------------------------------- */

/* Returns a list of the device contexts, which stay open until the list is freed. */
struct ibv_context **soft_rdma_get_devices(int *num_devices)
{
	struct ibv_context **list = calloc(SOFT_MAX_HCAS + 1, sizeof(*list)); /* NULL-terminated */
	int error, count = 0;

	if (!list)
		return NULL;
	error = soft_cm_device_get();
	if (error)
		return soft_finish_create(error, list);
	for (; count < SOFT_MAX_HCAS && soft_device.cm->devices[count].is_open; count++)
		list[count] = &soft_device.cm->devices[count].own.extended.context;
	if (num_devices)
		*num_devices = count;
	return list;
}

void soft_rdma_free_devices(struct ibv_context **list)
{
	if (!list)
		return;
	free(list);
	soft_cm_device_put();
}
