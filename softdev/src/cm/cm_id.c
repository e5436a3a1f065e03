/* Ids: rdma_create_id(3), rdma_destroy_id(3), rdma_set_option(3). Also handles device removal and
 * fork. */
#include "cm_internal.h"

#include <unistd.h>

int soft_cm_fail(int error)
{
	errno = error;
	return -1;
}

struct soft_cm_id *soft_cm_enter(struct rdma_cm_id *application)
{
	if (!application)
		return soft_fail_create(EINVAL);
	soft_lock();
	return soft_cm_id_of(application);
}

int soft_cm_leave(int error)
{
	soft_unlock();
	return error ? soft_cm_fail(error) : 0;
}

struct soft_cm_id *soft_cm_enter_device(struct rdma_cm_id *application)
{
	int error = application ? soft_cm_device_get() : EINVAL;

	return error ? soft_fail_create(error) : soft_cm_enter(application);
}

int soft_cm_leave_device(int error)
{
	soft_unlock();
	soft_cm_device_put();
	return error ? soft_cm_fail(error) : 0;
}

static void timewait_expired(struct soft_timer *timer)
{
	struct soft_cm_id *id = soft_container(timer, struct soft_cm_id, timewait);

	soft_cm_report(id, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0, NULL);
}

struct soft_cm_id *soft_cm_id_new(enum rdma_port_space port_space, void *context)
{
	struct soft_cm_id *id = calloc(1, sizeof(*id));

	if (!id)
		return NULL;
	id->id.context = context;
	id->id.ps = port_space;
	id->id.qp_type = port_space == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC;
	id->fork_generation = soft_engine_fork_generation();
	id->sock = -1;
	id->timewait.expired = timewait_expired;
	soft_list_init(&id->in_channel);
	soft_list_init(&id->awaiting_adoption);
	soft_list_init(&id->on_device);
	soft_list_init(&id->groups);
	return id;
}

void soft_cm_id_join(struct soft_cm_id *id, struct soft_cm_channel *channel)
{
	id->id.channel = &channel->channel;
	soft_list_append(&channel->ids, &id->in_channel);
	if (id->awaits_peer)
		soft_counter_add(&channel->wake.armed_sources, 1);
}

void soft_cm_id_leave(struct soft_cm_id *id)
{
	bool waits = id->awaits_peer;

	/* Subtract the id from the channel's armed_sources. The id still waits for its peer, so
	 * soft_cm_id_join must count it in the next channel. */
	soft_cm_id_set_awaits_peer(id, false);
	id->awaits_peer = waits;
	soft_list_remove(&id->in_channel);
}

void soft_cm_id_set_awaits_peer(struct soft_cm_id *id, bool waits)
{
	soft_assert_locked();
	if (!id->id.channel || id->awaits_peer == waits)
		return;
	soft_counter_add(&soft_cm_channel_of(id->id.channel)->wake.armed_sources, waits ? 1u : -1u);
	id->awaits_peer = waits;
}

int soft_rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context,
			enum rdma_port_space ps)
{
	struct soft_cm_id *made;

	if (!id)
		return soft_cm_fail(EINVAL);
	if (ps == RDMA_PS_IPOIB) /* this port space needs IP over InfiniBand */
		return soft_cm_fail(EPROTONOSUPPORT);
	if (ps != RDMA_PS_TCP && ps != RDMA_PS_UDP && ps != RDMA_PS_IB)
		return soft_cm_fail(EINVAL);
	made = soft_cm_id_new(ps, context);
	if (!made)
		return soft_cm_fail(ENOMEM);
	made->synchronous = !channel;
	if (!channel)
		channel = soft_rdma_create_event_channel();
	if (!channel) {
		free(made);
		return -1;
	}
	soft_lock();
	soft_cm_id_join(made, soft_cm_channel_of(channel));
	soft_unlock();
	*id = &made->id;
	return 0;
}

struct soft_cm_id *soft_cm_request_new(struct soft_cm_id *listener)
{
	struct soft_cm_id *id = soft_cm_id_new(listener->id.ps, listener->id.context);

	if (!id)
		return NULL;
	id->request_listener = listener;
	id->unaccepted = true;
	id->state = SOFT_CM_REQUESTED;
	id->tos = listener->tos;
	id->ack_timeout = listener->ack_timeout;
	id->ack_timeout_set = listener->ack_timeout_set;
	return id;
}

void soft_cm_request_join(struct soft_cm_id *id)
{
	soft_cm_device_bind(id);
	soft_cm_id_join(id, soft_cm_channel_of(id->request_listener->id.channel));
}

/* ---- destroying and removing -------------------------------------------------------------- */

/* Move an id that has been cancelled, or whose device has been removed, to FAILED, and release its
 * listener, link and port. */
static void fail_id(struct soft_cm_id *id)
{
	soft_timer_stop(&id->timewait);
	soft_cm_listener_close(id);
	if (soft_cm_is_datagram_id(id)) /* reject a pending request (IBTA 12.11) */
		(void)soft_cm_service_reject(id, NULL, 0);
	soft_cm_detach(id);
	if (id->sock >= 0)
		close(id->sock);
	id->sock = -1;
	id->state = SOFT_CM_FAILED;
	soft_cm_id_set_awaits_peer(id, false);
}

/* Notify the peer as the kernel's ib_cm does (IBTA 12.9). An established connection is closed.
 * During the handshake, an active side that waits for REP sends REJ with reason "timeout". Any
 * other id with a link sends REJ with reason "rejected by the consumer". */
void soft_cm_id_cancel(struct soft_cm_id *id, struct soft_node *dropped_requests)
{
	bool awaits_rep = id->state == SOFT_CM_CONNECTING;

	soft_assert_locked();
	if (id->state == SOFT_CM_CONNECTED && !soft_cm_is_datagram_id(id))
		soft_cm_close(id);
	else if (id->link && !soft_cm_is_datagram_id(id))
		soft_cm_reject(id, awaits_rep ? SOFT_CM_REASON_TIMEOUT : SOFT_CM_REASON_CONSUMER,
			       NULL, 0);
	fail_id(id);
	soft_cm_leave_groups(id);
	soft_cm_drop_events(id, NULL, dropped_requests);
	if (id->attached)
		soft_cm_device_detach(id);
}

/* Fail the id because its device has been removed, and report DEVICE_REMOVAL as its last event.
 * Events already queued are kept. After that, the application can only destroy the id. */
static void remove_id(struct soft_cm_id *id)
{
	fail_id(id);
	soft_cm_report(id, RDMA_CM_EVENT_DEVICE_REMOVAL, 0, NULL);
}

static void report_address_change(struct soft_cm_id *id)
{
	if (id->bound && id->state != SOFT_CM_FAILED)
		soft_cm_report(id, RDMA_CM_EVENT_ADDR_CHANGE, 0, NULL);
}

/* Report the change to the ids attached to the devices in the bit mask `ports`. */
static void port_changed(enum soft_port_change change, uint32_t ports)
{
	if (change == SOFT_PORT_FATAL)
		soft_cm_device_each(ports, remove_id);
	else if (change == SOFT_PORT_LID)
		soft_cm_device_each(ports, report_address_change);
}

/* Initialise the connection manager's state. In a forked child, this discards the state inherited
 * from the parent. */
static void reset_state(void)
{
	struct soft_cm *cm = soft_device.cm;

	for (int i = 0; i < SOFT_MAX_HCAS; i++) {
		cm->devices[i].is_open = false;
		cm->devices[i].holds = 0;
	}
	soft_list_init(&cm->attached);
	soft_list_init(&cm->awaiting_adoption);
	soft_places_init(&cm->half_open);
	soft_places_init(&cm->lingering);
	soft_list_init(&cm->gsi.conversations);
	soft_list_init(&cm->gsi.listeners);
	for (int i = 0; i < SOFT_GSI_BUCKETS; i++) {
		soft_list_init(&cm->gsi.by_remote_id[i]);
		soft_list_init(&cm->gsi.by_peer_qpn[i]);
	}
	cm->gsi.ids = (struct soft_table){0};
}

static const struct soft_cm_limits limits = {
	.response_ms = 10 * 1000, /* SYN is retransmitted after 1, 3 and 7 s */
	.no_listener_ms = 100, /* estimated time for a program to reopen its listener */
	.service_ms = 60 * 1000, /* similar to InfiniBand, with 15 retries of 4.3 s (IBTA 12.9) */
	.request_ms = 2 * 1000, /* a peer sends REQ as soon as it is connected */
	.timewait_ms = 20,
	.linger_ms = 10 * 1000,
	.half_open = 1024,
};

/* Create the connection manager's part of a device. */
static void create(void)
{
	soft_device.cm = soft_alloc_part(sizeof(struct soft_cm));
	*soft_device.cm = (struct soft_cm){.limits = limits,
					   .open_mutex = PTHREAD_MUTEX_INITIALIZER,
					   .ack_mutex = PTHREAD_MUTEX_INITIALIZER,
					   .ack_cond = PTHREAD_COND_INITIALIZER};
	soft_cm_use_gsi(NULL);
	reset_state();
}

static pthread_mutex_t *outer(void)
{
	return &soft_device.cm->open_mutex;
}

static pthread_mutex_t *leaf(void)
{
	return &soft_device.cm->ack_mutex;
}

static void destroy(void)
{
	free(soft_device.cm->last_destroyed);
}

const struct soft_subsystem soft_cm_subsystem = {
	.create = create,
	.stop = soft_cm_gsi_stop,
	.destroy = destroy,
	.forked = reset_state,
	.port_changed = port_changed,
	.outer = outer,
	.leaf = leaf,
};

void soft_cm_free_dropped_requests(struct soft_node *dropped_requests)
{
	soft_list_drain (struct soft_cm_id, request, dropped_requests, in_channel) {
		soft_cm_id_cancel(request, dropped_requests);
		soft_list_remove(&request->in_channel);
		free(request);
	}
}

/* Destroy the id. This is allowed in any state and cancels operations in progress. */
int soft_rdma_destroy_id(struct rdma_cm_id *application)
{
	struct soft_cm_id *id;
	struct soft_node dropped_requests;

	if (!application)
		return soft_cm_fail(EINVAL);
	id = soft_cm_id_of(application);
	/* Do not close a descriptor that the application has closed and may have reused. */
	soft_engine_handle_lost_descriptors();
	if (id->fork_generation != soft_engine_fork_generation())
		return 0; /* a forked child must not free its parent's id */
	soft_list_init(&dropped_requests);
	soft_lock();
	soft_cm_id_cancel(id, &dropped_requests);
	soft_list_remove(&id->in_channel);
	soft_cm_free_dropped_requests(&dropped_requests);
	soft_unlock();
	soft_cm_ack_event(id);
	soft_cm_wait_acknowledged(id);
	if (id->synchronous)
		soft_rdma_destroy_event_channel(id->id.channel);
	free(id->request_attr);
	free(id);
	soft_cm_device_close_unused();
	return 0;
}

/* ---- options ------------------------------------------------------------------------------- */

static int set_tos(struct soft_cm_id *id, uint8_t tos)
{
	id->tos = tos;
	if (id->sock >= 0)
		soft_cm_apply_tos(id->sock, tos);
	if (id->link && id->link->carrier->apply_tos)
		id->link->carrier->apply_tos(id->link, tos);
	return 0;
}

static int set_reuse(struct soft_cm_id *id, bool reuse)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_SET_REUSEADDR);

	/* The option can be cleared only before the id is bound. */
	if (error || (!reuse && id->state != SOFT_CM_IDLE))
		return EINVAL;
	id->reuse = reuse;
	return id->sock >= 0 && !soft_cm_is_datagram_id(id)
		       ? soft_set_option(id->sock, SOL_SOCKET, SO_REUSEADDR, reuse)
		       : 0;
}

static int set_v6_only(struct soft_cm_id *id, bool only)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_SET_AFONLY);

	if (error)
		return error;
	if (id->sock >= 0 && id->id.route.addr.src_addr.sa_family == AF_INET6)
		return soft_cm_rebind(id, only);
	id->v6_only = only;
	return 0;
}

/* Set the ACK timeout to 4.096 us * 2^exponent. An exponent of 0 disables the timeout (IBTA
 * 9.7.6.1.3). */
static int set_ack_timeout(struct soft_cm_id *id, uint8_t exponent)
{
	if (exponent > 31)
		return EINVAL;
	id->ack_timeout = exponent;
	id->ack_timeout_set = true;
	return 0;
}

/* Set an option of level RDMA_OPTION_ID. Returns ENOSYS if the option is unknown. RDMA_OPTION_IB,
 * the level for InfiniBand path records, is not supported because the device uses the host's IP
 * routes. */
static int set_option(struct soft_cm_id *id, int option, const void *value, size_t length)
{
	bool is_byte = option == RDMA_OPTION_ID_TOS || option == RDMA_OPTION_ID_ACK_TIMEOUT;
	uint8_t byte = 0;
	int number = 0;

	if (!is_byte && option != RDMA_OPTION_ID_REUSEADDR && option != RDMA_OPTION_ID_AFONLY)
		return ENOSYS;
	if (length != (is_byte ? sizeof(byte) : sizeof(number)))
		return EINVAL;
	memcpy(is_byte ? (void *)&byte : &number, value, length);
	switch (option) {
	case RDMA_OPTION_ID_TOS:
		return set_tos(id, byte);
	case RDMA_OPTION_ID_REUSEADDR:
		return set_reuse(id, number != 0);
	case RDMA_OPTION_ID_AFONLY:
		return set_v6_only(id, number != 0);
	default:
		return set_ack_timeout(id, byte);
	}
}

int soft_rdma_set_option(struct rdma_cm_id *application, int level, int optname, void *optval,
			 size_t optlen)
{
	struct soft_cm_id *id;

	if (!application || !optval)
		return soft_cm_fail(EINVAL);
	if (level != RDMA_OPTION_ID)
		return soft_cm_fail(ENOSYS);
	id = soft_cm_enter(application);
	return soft_cm_leave(set_option(id, optname, optval, optlen));
}

/* ---- enhanced connection establishment ----------------------------------------------------- */

/* ECE lets two devices negotiate vendor options that are not part of the standard
 * (rdma_set_local_ece(3)). The embedded device does not have vendor options. REQ and REP therefore
 * contain options only if the application manages the queue pair itself and has called
 * rdma_set_local_ece(3). */

int soft_rdma_set_local_ece(struct rdma_cm_id *application, struct ibv_ece *ece)
{
	if (!application || application->qp || !ece || !ece->vendor_id || ece->comp_mask)
		return soft_cm_fail(EINVAL);
	soft_cm_enter(application)->local_ece = (struct soft_cm_ece){ece->vendor_id, ece->options};
	return soft_cm_leave(0);
}

int soft_rdma_get_remote_ece(struct rdma_cm_id *application, struct ibv_ece *ece)
{
	const struct soft_cm_id *id;

	if (!application || application->qp || !ece)
		return soft_cm_fail(EINVAL);
	id = soft_cm_enter(application);
	*ece = (struct ibv_ece){.vendor_id = id->remote_ece.vendor_id,
				.options = id->remote_ece.options};
	return soft_cm_leave(0);
}
