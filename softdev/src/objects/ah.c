/* Address handles, which contain the destination of a UD message (IBTA vol 1, 10.2.2.2). An address
 * handle can also be created from a received message to send a reply. */

#include "objects.h"
#include "trace/trace.h"

enum { DEFAULT_HOP_LIMIT = 64 };

/* Layout of a 40-byte GRH whose last 20 bytes are an IPv4 header. */
enum {
	IPV4_OFFSET = 20,
	IPV4_HEADER = 20,
	IPV4_TOS = 1,
	IPV4_TTL = 8,
	IPV4_SOURCE = 12,
	IPV4_DESTINATION = 16
};

static int get_global_source(const struct soft_hca *hca, const struct ibv_global_route *route,
			     struct soft_gid *own)
{
	if (soft_gid_at(hca, route->sgid_index, own))
		return soft_refuse_value("SGID_INDEX", "sgid_index", route->sgid_index);
	int rc = soft_gid_source(hca, route->sgid_index, &route->dgid, own);

	return rc ? soft_refuse(rc, rc == EINVAL ? "GID_FAMILY" : "ROUTE") : 0;
}

int soft_ah_get_source(struct soft_hca *hca, const struct ibv_ah_attr *attr, struct soft_gid *own)
{
	if (attr->port_num != 1)
		return soft_refuse_value("PORT", "port_num", attr->port_num);
	if (attr->is_global)
		return get_global_source(hca, &attr->grh, own);
	/* RoCE packets always have a GRH (Annex A16), and the kernel rejects an address without one
	 * (drivers/infiniband/core/verbs.c, rdma_check_ah_attr). As an exception, a device with a
	 * LID accepts its own LID as a destination, so that software for InfiniBand works. */
	return attr->dlid && attr->dlid == soft_links->lid(hca)
		       ? soft_gid_at(hca, soft_gid_loopback_index(hca), own)
		       : soft_refuse(EINVAL, "GRH");
}

static int resolve_path(struct soft_hca *hca, const struct ibv_ah_attr *attr,
			struct soft_ud_address *path)
{
	struct soft_gid own = {0};
	int rc = soft_ah_get_source(hca, attr, &own);

	if (rc)
		return rc;
	/* Without a GRH, the destination is this device itself (soft_ah_get_source). */
	*path = (struct soft_ud_address){
		.destination = own.gid,
		.hop_limit = DEFAULT_HOP_LIMIT,
	};
	if (attr->is_global) {
		path->destination = attr->grh.dgid;
		if (attr->grh.hop_limit)
			path->hop_limit = attr->grh.hop_limit;
		path->traffic_flow = (uint32_t)attr->grh.traffic_class << SOFT_CLASS_SHIFT |
				     (attr->grh.flow_label & 0xfffff);
	}
	path->source = own.gid;
	path->ifindex = own.ifindex;
	return 0;
}

struct ibv_ah *soft_ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct soft_objects *objects = soft_device.objects;
	int rc = 0;
	struct soft_ah *ah = soft_alloc_unless_failed(pd->context, sizeof(*ah), &rc);

	soft_lock();
	if (!rc)
		rc = objects->ah_count < SOFT_MAX_AH
			     ? resolve_path(soft_hca_of(pd->context), attr, &ah->path)
			     : ENOMEM;
	if (!rc) {
		ah->ibv = (struct ibv_ah){
			.context = pd->context, .pd = pd, .handle = ++objects->handles.ah};
		soft_pd_of(pd)->users++;
		objects->ah_count++;
	}
	soft_unlock();
	return soft_call_pointer_result("ibv_create_ah", "pd", soft_pd_root(pd)->handle,
					soft_finish_create(rc, ah));
}

/* Destroy an address handle. Posted requests have their own copy of its path. */
int soft_ibv_destroy_ah(struct ibv_ah *ibv)
{
	soft_lock();
	soft_pd_of(ibv->pd)->users--;
	soft_device.objects->ah_count--;
	soft_unlock();
	free(soft_container(ibv, struct soft_ah, ibv));
	return 0;
}

/* ---- answering ----------------------------------------------------------------------------- */

uint16_t soft_ipv4_sum(const uint8_t *header)
{
	uint32_t sum = 0;

	for (int i = 0; i < IPV4_HEADER; i += 2)
		sum += (uint32_t)header[i] << 8 | header[i + 1];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return (uint16_t)sum;
}

/* Returns whether the last 20 of the 40 bytes are an IPv4 header. The first 20 bytes are
 * undefined in that case, so only a valid checksum distinguishes an IPv4 header from a GRH
 * (IBTA annex A17.4.5). */
static bool is_ipv4(const uint8_t *grh)
{
	return grh[IPV4_OFFSET] == 0x45 && soft_ipv4_sum(grh + IPV4_OFFSET) == 0xffff;
}

/* Derive the route back to the sender of a message from the header in its receive buffer. Returns 0
 * or an errno value. */
static int read_grh(const struct soft_hca *hca, const struct ibv_grh *grh,
		    struct ibv_global_route *route)
{
	const uint8_t *bytes = (const uint8_t *)grh;
	union ibv_gid own;

	if (is_ipv4(bytes)) {
		own = soft_gid_of_ipv4(bytes + IPV4_OFFSET + IPV4_DESTINATION);
		route->dgid = soft_gid_of_ipv4(bytes + IPV4_OFFSET + IPV4_SOURCE);
		route->traffic_class = bytes[IPV4_OFFSET + IPV4_TOS];
		route->hop_limit = bytes[IPV4_OFFSET + IPV4_TTL];
	} else if (bytes[0] >> 4 == 6) {
		uint32_t word = (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 |
				(uint32_t)bytes[2] << 8 | bytes[3];

		own = grh->dgid;
		route->dgid = grh->sgid;
		route->traffic_class = (uint8_t)(word >> SOFT_CLASS_SHIFT);
		route->flow_label = word & 0xfffff;
		route->hop_limit = grh->hop_limit;
	} else {
		return EPROTONOSUPPORT;
	}
	int index = soft_gid_index(hca, &own);

	if (index < 0)
		return EINVAL; /* multicast GID: the application must choose the source */
	route->sgid_index = (uint8_t)index;
	return 0;
}

/* Fill in the address of the sender of a message, like ibv_create_ah_from_wc(3). Returns 0, or -1
 * and sets errno. */
int soft_ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port_num, struct ibv_wc *wc,
			     struct ibv_grh *grh, struct ibv_ah_attr *ah_attr)
{
	int rc = 0;

	*ah_attr = (struct ibv_ah_attr){
		.dlid = wc->slid,
		.sl = wc->sl,
		.src_path_bits = wc->dlid_path_bits,
		.port_num = port_num,
	};
	if (!(wc->wc_flags & IBV_WC_GRH))
		return 0;
	ah_attr->is_global = 1;
	soft_lock();
	rc = read_grh(soft_hca_of(context), grh, &ah_attr->grh);
	soft_unlock();
	if (!rc)
		return 0;
	errno = rc;
	return -1;
}

struct ibv_ah *soft_ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh,
					  uint8_t port_num)
{
	struct ibv_ah_attr attr;

	if (soft_ibv_init_ah_from_wc(pd->context, port_num, wc, grh, &attr))
		return NULL;
	return soft_ibv_create_ah(pd, &attr);
}
