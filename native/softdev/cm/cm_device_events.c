/* What happens to the device, as ids are told of it: rdma_get_cm_event(3), DEVICE_REMOVAL and
 * ADDR_CHANGE. */
#include "cm_internal.h"

#include <unistd.h>

#include "objects/objects.h"

/* The id is over: nothing more comes of it, and it can only be destroyed.  What has been reported
 * before stays. */
static void remove_id(struct soft_cm_id *id)
{
	soft_timer_stop(&id->timewait);
	if (id->listener)
		soft_cm_listener_close(id);
	soft_cm_service_close(id);
	soft_cm_sidr_request_end(id);
	soft_cm_sidr_client_end(id);
	soft_cm_stream_forget(id);
	if (id->link)
		soft_cm_link_free(id->link);
	id->link = NULL;
	if (id->sock >= 0)
		close(id->sock);
	id->sock = -1;
	id->state = SOFT_CM_FAILED;
	soft_cm_id_waits(id, false);
	soft_cm_report(id, RDMA_CM_EVENT_DEVICE_REMOVAL, 0, NULL);
}

static void removed(void)
{
	soft_cm_device_each(remove_id);
}

static void change_address(struct soft_cm_id *id)
{
	if (id->bound && id->state != SOFT_CM_FAILED)
		soft_cm_report(id, RDMA_CM_EVENT_ADDR_CHANGE, 0, NULL);
}

static void moved(void)
{
	soft_cm_device_each(change_address);
}

static void port_changed(enum soft_port_change change)
{
	if (change == SOFT_PORT_FATAL)
		removed();
	else if (change == SOFT_PORT_LID)
		moved();
}

const struct soft_subsystem soft_cm_subsystem = {
	.port_changed = port_changed,
	.outer = &soft_cm_opening,
	.leaf = &soft_cm_acknowledge,
};
