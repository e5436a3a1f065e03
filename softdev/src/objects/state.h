/* The state that objects/ keeps in soft_device. */
#pragma once

#include <net/if.h>

#include "device.h"
#include "memory.h"

enum {
	SOFT_GIDS = 255, /* limited by the 8-bit ibv_global_route.sgid_index */
	SOFT_QPN_QUARANTINE = 2048, /* number of released queue pair numbers kept from reuse */
	SOFT_MAX_HCAS = 4, /* maximum number of devices; preload/tree.py reads it */
};

/* A device listed by ibv_get_device_list(3) and its single port. IBTA calls a device a host channel
 * adapter (HCA). */
struct soft_hca {
	/* `provider_marker` must immediately follow `device`. Provider libraries recognize their
	 * own devices by a marker after struct ibv_device (mlx5dv_is_supported(3)). The zeros in
	 * this field match no library's marker. */
	struct ibv_device device;
	char provider_marker[1024];
	uint32_t port_bit; /* single bit that represents the port in port masks */
	struct soft_node contexts; /* open contexts (soft_context.hca_node) */
	uint32_t bad_qkeys; /* number of messages received with a wrong Q_Key (ibv_query_port(3)) */
	struct soft_gid gids[SOFT_GIDS];
	int gid_count;
	char interface[IFNAMSIZ]; /* host interface that provides addresses and state, or "" */
	bool link_down; /* whether the interface was down when last read */
};

struct soft_objects {
	struct soft_hca hcas[SOFT_MAX_HCAS];
	int hca_count; /* 0 until the environment has been read */
	bool hcas_invalid; /* whether the environment contained an invalid value */
	uint32_t ports_down;

	struct {
		uint32_t ah, cq, dm, pd, srq;
	} handles; /* last handles assigned */
	unsigned ah_count;
	size_t dm_allocated; /* bytes, at most SOFT_DM_SIZE */
	struct soft_node pds, dms; /* all protection domains and all device memory */

	struct soft_fd_watch address_watch; /* rtnetlink socket for changes of host addresses */

	/* The callbacks are declared in upper.h. softdev.c sets them. */
	const struct soft_transport *connected; /* RC and UC */
	const struct soft_transport *datagrams; /* UD */
	const struct soft_link_calls *links;
	struct soft_table qps; /* qp_numbers.c */
	uint32_t quarantined_qpns[SOFT_QPN_QUARANTINE];
	unsigned quarantined_count;

	struct soft_node xrc_domains;
	struct soft_table xrc_srqs;

	struct soft_table ranges; /* memory ranges, indexed by the upper 24 bits of their keys */
	/* Reads of null regions (ibv_alloc_null_mr(3)) return bytes of `zeros`, and writes go to
	 * `sink`. Each array is as large as the largest single access. Other processes never copy
	 * from this memory. */
	uint8_t zeros[SOFT_PLACE_MAX], sink[SOFT_PLACE_MAX];
};

static inline struct soft_hca *soft_hca_of(const struct ibv_context *context)
{
	return soft_container(context->device, struct soft_hca, device);
}

#define soft_links (soft_device.objects->links)
#define soft_ports_down (soft_device.objects->ports_down)
