/* What the device has of its objects: the part of this folder in soft_device. */
#pragma once

#include <net/if.h>

#include "device.h"
#include "memory.h"

enum {
	SOFT_GIDS = 255, /* an index is a byte: ibv_global_route.sgid_index */
	SOFT_QPN_RESTING = 2048, /* the last numbers that were given back */
	SOFT_HCAS_MOST = 4, /* each is many files of preload/, whose tree.py reads this */
};

/* A device that ibv_get_device_list(3) shows (IBTA: a host channel adapter), with its port. */
struct soft_hca {
	/* First: soft_hca_of.  Libraries of providers look behind the structure for their own mark, to
	 * see whether a device is theirs (mlx5dv_is_supported(3)): zeros there. */
	struct ibv_device device;
	char behind[1024];
	uint32_t port; /* its bit */
	struct soft_node contexts; /* port.c: soft_context.of_hca */
	uint32_t bad_qkeys; /* messages that came with a wrong Q_Key: ibv_query_port(3) */
	struct soft_gid gids[SOFT_GIDS];
	int gid_count;
	char interface[IFNAMSIZ]; /* of the host, whose addresses and state are its own; or "" */
	bool cut; /* the interface does not run, as far as that has been read */
};

struct soft_objects {
	struct soft_hca hcas[SOFT_HCAS_MOST];
	int hca_count; /* 0: the environment has not been asked, */
	bool hcas_wrong; /* and it has said nothing that can be */
	uint32_t ports_down;

	struct {
		uint32_t ah, cq, dm, pd, srq;
	} handles; /* the last ones */
	unsigned ah_count;
	size_t dm_allocated; /* of SOFT_DM_SIZE */
	struct soft_node pds, dms; /* all of them */

	struct soft_fd_watch addresses; /* of the host: rtnetlink */

	/* upper.h; softdev.c sets them */
	const struct soft_transport *connected; /* of RC and UC */
	const struct soft_transport *datagrams; /* of UD */
	const struct soft_link_calls *links;
	struct soft_table qps; /* qp_numbers.c */
	uint32_t resting[SOFT_QPN_RESTING];
	unsigned rested;

	struct soft_node xrc_domains;
	struct soft_table xrc_srqs;

	struct soft_table ranges; /* by the upper 24 bits of their keys */
	/* What a null region gives and takes (ibv_alloc_null_mr(3)): no place is longer, and no other
	 * process copies from it. */
	uint8_t nothing[SOFT_PLACE_MAX], sink[SOFT_PLACE_MAX];
};

static inline struct soft_hca *soft_hca_of(const struct ibv_context *context)
{
	return soft_container(context->device, struct soft_hca, device);
}

#define soft_links (soft_device.objects->links)
#define soft_ports_down (soft_device.objects->ports_down)
