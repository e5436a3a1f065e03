/* Multicast groups of datagram ids: rdma_join_multicast(3), rdma_leave_multicast(3).
 *
 * The GID of a group is its IP address, with IPv4 mapped to IPv6 as Linux does for RoCE v2. A join
 * does not involve a subnet manager and is complete before the call returns, but applications still
 * get an event. As in librdmacm, the queue pair is attached when the application receives that
 * event.
 */
#include "cm_internal.h"

#include "ud/ud.h"

struct group {
	struct soft_node node; /* node in soft_cm_id.groups, oldest first */
	union ibv_gid gid;
	bool send_only;
	bool attached;
};

static struct group *find_group(struct soft_cm_id *id, const union ibv_gid *gid)
{
	soft_list_each (struct group, group, &id->groups, node)
		if (!memcmp(&group->gid, gid, sizeof(*gid)))
			return group;
	return NULL;
}

static int report_join(struct soft_cm_id *id, const struct group *group, void *context)
{
	struct rdma_ud_param destination = {
		.qp_num = SOFT_MULTICAST_QPN, .qkey = RDMA_UDP_QKEY, .private_data = context};

	soft_cm_fill_address_vector(id, &destination.ah_attr);
	destination.ah_attr.grh.dgid = group->gid;
	return soft_cm_report_ud(id, RDMA_CM_EVENT_MULTICAST_JOIN, 0, &destination);
}

static int join(struct soft_cm_id *id, const struct sockaddr *address, bool send_only,
		void *context)
{
	int error = soft_cm_allowed(id->state, SOFT_CM_CALL_JOIN);
	struct group *group;
	union ibv_gid gid;

	if (error || !soft_cm_is_datagram_id(id) || !id->bound)
		return EINVAL;
	soft_gid_from_sockaddr(&gid, address);
	if (!soft_gid_is_multicast(&gid))
		return EINVAL;
	group = calloc(1, sizeof(*group));
	if (!group)
		return ENOMEM;
	group->gid = gid;
	group->send_only = send_only;
	error = report_join(id, group, context);
	if (error)
		free(group);
	else
		soft_list_append(&id->groups, &group->node);
	return error;
}

int soft_rdma_join_multicast_ex(struct rdma_cm_id *application,
				struct rdma_cm_join_mc_attr_ex *attr, void *context)
{
	const uint32_t needed = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
	struct soft_cm_id *id;

	if (!application || !attr || attr->comp_mask != needed ||
	    attr->join_flags > RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER ||
	    !soft_cm_address_length(attr->addr))
		return soft_cm_fail(EINVAL);
	id = soft_cm_enter(application);
	if (soft_cm_leave(join(id, attr->addr,
			       attr->join_flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, context)))
		return -1;
	return soft_cm_wait_if_synchronous(id);
}

int soft_rdma_join_multicast(struct rdma_cm_id *id, struct sockaddr *addr, void *context)
{
	struct rdma_cm_join_mc_attr_ex attr = {
		.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
		.join_flags = RDMA_MC_JOIN_FLAG_FULLMEMBER,
		.addr = addr,
	};

	return soft_rdma_join_multicast_ex(id, &attr, context);
}

int soft_cm_multicast_joined(struct soft_cm_id *id, const union ibv_gid *gid)
{
	struct ibv_qp *qp = NULL;
	struct group *group;

	soft_lock();
	group = find_group(id, gid);
	if (group && !group->send_only && !group->attached)
		qp = soft_cm_qp(id);
	if (qp)
		group->attached = true;
	soft_unlock();
	return qp ? soft_ibv_attach_mcast(qp, gid, 0) : 0;
}

static void detach(struct soft_cm_id *id, const union ibv_gid *gid)
{
	struct ibv_qp *qp;

	soft_lock();
	qp = soft_cm_qp(id);
	soft_unlock();
	if (qp)
		(void)soft_ibv_detach_mcast(qp, gid, 0); /* may already be detached */
}

int soft_rdma_leave_multicast(struct rdma_cm_id *application, struct sockaddr *addr)
{
	struct soft_cm_id *id;
	struct group *group, *other_join = NULL;
	union ibv_gid gid;
	bool must_detach;

	if (!application || !soft_cm_address_length(addr))
		return soft_cm_fail(EINVAL);
	id = soft_cm_id_of(application);
	soft_gid_from_sockaddr(&gid, addr);
	soft_lock();
	group = find_group(id, &gid);
	must_detach = group && group->attached;
	if (group) {
		soft_list_remove(&group->node);
		other_join = find_group(id, &gid);
		if (!other_join)
			soft_cm_drop_events(id, &gid, NULL); /* no request is dropped */
		if (must_detach && other_join && !other_join->send_only) {
			other_join->attached = true; /* takes over the attachment */
			must_detach = false;
		}
	}
	soft_unlock();
	if (!group)
		return soft_cm_fail(EADDRNOTAVAIL);
	free(group);
	if (must_detach)
		detach(id, &gid);
	return 0;
}

void soft_cm_leave_groups(struct soft_cm_id *id)
{
	soft_list_drain (struct group, group, &id->groups, node) {
		soft_list_remove(&group->node);
		free(group);
	}
}

void soft_cm_detach_groups(struct soft_cm_id *id)
{
	for (;;) {
		struct group *group = NULL;

		soft_lock();
		soft_list_each (struct group, it, &id->groups, node)
			if (it->attached)
				group = it;
		if (group)
			group->attached = false;
		soft_unlock();
		if (!group)
			return;
		detach(id, &group->gid);
	}
}
