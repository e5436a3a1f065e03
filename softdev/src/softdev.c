/* Assembly of the device. This file defines the device's call table, and registers callbacks with
 * which lower layers call higher ones. */
#include "softdev.h"

#include "cm/cm.h"
#include "inject/inject.h"
#include "rc/rc.h"
#include "path/roce/roce.h"
#include "path/shm/shm.h"
#include "path/tcp/tcp.h"
#include "trace/trace.h"
#include "ud/ud.h"
#include "link/link.h"

static const struct soft_roce_datagram_ops datagram_ops = {
	.datagram = soft_ud_dispatch,
	.mad = soft_cm_mad_received,
};

static const struct soft_ud_packets packets = {
	.hold_addresses = soft_roce_hold_addresses,
	.release_addresses = soft_roce_release_addresses,
	.send = soft_roce_send_datagram,
};

static const struct soft_gsi_calls gsi = {
	.hold = soft_roce_hold_addresses,
	.release = soft_roce_release_addresses,
	.is_shared = soft_roce_is_shared,
	.send = soft_roce_send_mad,
};

/* Select how datagrams and MADs are sent. Called at every start of the engine, because a forked
 * child may use a different kind of link. */
static int select_datagram_transport(void)
{
	soft_ud_set_packets(soft_links_are_roce() ? &packets : NULL);
	soft_cm_use_gsi(soft_links_are_roce() ? &gsi : NULL);
	return soft_links_are_roce() ? soft_check_packet_calls() : 0;
}

static const struct soft_subsystem datagram_transport_subsystem = {
	.start = select_datagram_transport};

/* The engine calls the subsystems in this order. */
static const struct soft_subsystem *const subsystems[] = {
	&soft_cm_subsystem,
	&soft_links_subsystem,
	&soft_tcp_subsystem,
	&soft_shm_subsystem,
	&soft_roce_subsystem,
	&soft_ud_subsystem,
	&datagram_transport_subsystem,
	&soft_paths_subsystem,
	&soft_port_subsystem,
	&soft_inject_subsystem,
	&soft_trace_subsystem,
	NULL,
};

static const struct soft_path_acceptor acceptor = {
	.requested = soft_handshake_requested,
	.withdrawn = soft_handshake_withdrawn,
};

void soft_device_make(void)
{
	soft_engine_set_subsystems(subsystems);
	soft_device.inject->hooks = &soft_delay_hooks;
	soft_device.objects->connected = &soft_rc_transport;
	soft_device.objects->datagrams = &soft_ud_transport;
	soft_device.objects->links = &soft_links_calls;
	soft_device.paths->acceptor = &acceptor;
	soft_roce_set_datagram_ops(&datagram_ops);
	soft_links_use_cm(soft_cm_handle_rtr);
}

/* Create the device before any call to it, and before the constructors in preload/ run. GCC ignores
 * the priority if an earlier declaration of the function lacks it. */
__attribute__((constructor(101))) static void create_device_early(void)
{
	soft_device_make();
}

/* Register the whole address space. */
static struct ibv_mr *reg_local_dma(struct ibv_pd *pd)
{
	return soft_reg_own_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
}

static int same_host(const uint8_t gid[16], const uint8_t peer[16])
{
	union ibv_gid one, other;

	memcpy(one.raw, gid, sizeof(one.raw));
	memcpy(other.raw, peer, sizeof(other.raw));
	soft_lock();
	bool same = !memcmp(&one, &other, sizeof(one)) ||
		    (soft_gid_is_on_this_host(&one) && soft_gid_is_on_this_host(&other));
	soft_unlock();
	return same;
}

static const struct aiordma_device_calls device = {
	.progress = soft_engine_progress_count,
	.busy_poll = soft_busy_poll,
	.hold_polling = soft_announce_poll,
	.peer_wakeups = soft_peer_wakeups,
	.wake_early = soft_wake_early,
	.reg_own_mr = soft_reg_own_mr,
	.reg_local_dma = reg_local_dma,
	.wire = soft_qp_wire,
	.end_with_peer = soft_qp_end_with_peer,
	.same_host = same_host,
	.withdrawn = soft_cm_withdrawn,
	.set_faults = aiordma_embedded_faults,
	.fault_counts = aiordma_embedded_fault_counts,
	.start_failure = soft_start_failure,
	.count_served = soft_qp_count_served,
	.release_served = soft_served_release,
	.exclude_from_served = soft_exclude_from_served,
};

static const struct aiordma_calls table = {
#define CALL(library, result, name, arguments) .name = soft_##name,
#include "abi/calls.h"
#undef CALL
	.device = &device,
};

const struct aiordma_calls *aiordma_embedded_calls(void)
{
	return &table;
}
