/* State of the objects folder in soft_device. */
#pragma once

#include <net/if.h>

#include "device.h"
#include "memory.h"

enum {
	SOFT_GIDS = 255, /* an index is a byte (ibv_global_route.sgid_index) */
	SOFT_QPN_RESTING = 2048, /* number of released queue pair numbers that are not reused yet */
	SOFT_HCAS_MOST = 4, /* each needs many files of preload/, whose tree.py reads this */
};

/* A device in the list of ibv_get_device_list(3), which IBTA calls a host channel adapter, with its
 * port. */
struct soft_hca {
	/* Must be first (soft_hca_of). Provider libraries look for their own mark behind the
	 * structure to recognize their devices (mlx5dv_is_supported(3)), and find zeros here. */
	struct ibv_device device;
	char behind[1024];
	uint32_t port; /* bit of the port */
	struct soft_node contexts; /* open contexts (soft_context.of_hca) */
	uint32_t bad_qkeys; /* messages received with a wrong Q_Key (ibv_query_port(3)) */
	struct soft_gid gids[SOFT_GIDS];
	int gid_count;
	char interface[IFNAMSIZ]; /* host interface whose addresses and state it has, or "" */
	bool cut; /* the interface was not running when last read */
};

struct soft_objects {
	struct soft_hca hcas[SOFT_HCAS_MOST];
	int hca_count; /* 0 until the environment has been read */
	bool hcas_wrong; /* the environment contained an invalid value */
	uint32_t ports_down;

	struct {
		uint32_t ah, cq, dm, pd, srq;
	} handles; /* last handles assigned */
	unsigned ah_count;
	size_t dm_allocated; /* out of SOFT_DM_SIZE */
	struct soft_node pds, dms; /* lists of all of them */

	struct soft_fd_watch addresses; /* changes of the host's addresses (rtnetlink) */

	/* callbacks (upper.h), set by softdev.c */
	const struct soft_transport *connected; /* RC and UC */
	const struct soft_transport *datagrams; /* UD */
	const struct soft_link_calls *links;
	struct soft_table qps; /* qp_numbers.c */
	uint32_t resting[SOFT_QPN_RESTING];
	unsigned rested;

	struct soft_node xrc_domains;
	struct soft_table xrc_srqs;

	struct soft_table ranges; /* ranges by the upper 24 bits of their keys */
	/* Memory for reads and writes of null regions (ibv_alloc_null_mr(3)). No access is longer,
	 * and other processes do not copy from it. */
	uint8_t nothing[SOFT_PLACE_MAX], sink[SOFT_PLACE_MAX];
};

static inline struct soft_hca *soft_hca_of(const struct ibv_context *context)
{
	return soft_container(context->device, struct soft_hca, device);
}

#define soft_links (soft_device.objects->links)
#define soft_ports_down (soft_device.objects->ports_down)
