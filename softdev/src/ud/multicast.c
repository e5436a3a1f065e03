/* Multicast groups: deliver a message to every attached queue pair (IBTA vol 1, 10.5).
 *
 * Each multicast GID maps to an IPv4 multicast group. ::ffff:224.0.0.0/100 maps to the group
 * itself, as on RoCE, and an IPv6 GID to a group derived from its hash. The header contains the
 * GID. Every process with a member binds a socket to the group's address and a shared port, and
 * joins on every interface that has one of our GIDs. A message is sent to the loopback interface,
 * where each process of the host receives it once, and to the interface of the sender's GID without
 * the kernel's multicast loop.
 */
#include <sys/epoll.h>
#include <unistd.h>

#include "ud.h"

enum {
	MULTICAST_PORT = 14791,     /* below the range of ephemeral ports */
	RECEIVE_BUFFER_BYTES = 4 << 20, /* bytes requested from the kernel */
};

struct group {
	struct soft_fd_watch watch;
	struct soft_node node;
	struct soft_node members; /* attachments */
	union ibv_gid gid;
};

struct attachment {
	struct soft_node group_node;
	struct soft_node qp_node;
	struct group *group;
	struct soft_qp *qp;
	uint16_t lid;
};

/* Returns the IPv4 group of a multicast GID in network byte order. Groups derived from a hash
 * (FNV-1a) are organization-local: 239.192.0.0/14. */
static uint32_t address_of(const union ibv_gid *gid)
{
	uint32_t hash = 2166136261u, address;

	if (gid->raw[0] != 0xff) {
		memcpy(&address, &gid->raw[12], sizeof(address));
		return address;
	}
	for (int i = 0; i < 16; i++)
		hash = (hash ^ gid->raw[i]) * 16777619u;
	return htonl(0xefc00000u | (hash >> 14));
}

/* Returns the index of the loopback interface, through which messages reach the other processes of
 * this host, or 0 if the interface is down. */
static uint32_t loopback_ifindex(void)
{
	/* Every device has a GID on this interface, and every process has device 0. */
	const struct soft_hca *hca = soft_hca_at(0);
	struct soft_gid gid;

	return soft_gid_at(hca, soft_gid_loopback_index(hca), &gid) ? 0 : gid.ifindex;
}

/* ---- sending ------------------------------------------------------------------------------- */

bool soft_multicast_send(const struct soft_datagram *datagram, const struct soft_ud_address *path,
			 const struct iovec *payload, int count)
{
	soft_assert_locked();
	uint32_t address = address_of(&path->destination), loopback = loopback_ifindex();

	/* The loopback interface leads to the members on this host, because the socket's own
	 * multicast loop is disabled. */
	if (soft_datagram_send_to(datagram, address, MULTICAST_PORT, loopback, payload, count) ==
	    EAGAIN)
		return false;
	/* Do not retry if this fails, because members on this host have already received the
	 * message. */
	if (path->ifindex != loopback)
		soft_datagram_send_to(datagram, address, MULTICAST_PORT, path->ifindex, payload,
				      count);
	return true;
}

/* ---- receiving ----------------------------------------------------------------------------- */

static bool is_sent_by(const struct soft_qp *qp, const struct soft_datagram *datagram)
{
	return datagram->src_qpn == qp->ibv.qp_num && soft_gid_is_local(&datagram->source);
}

static void receive_datagram(struct soft_fd_watch *watch, const struct soft_datagram *datagram,
			     const uint8_t *payload, uint32_t length)
{
	struct group *group = soft_container(watch, struct group, watch);

	if (datagram->dest_qpn != SOFT_MULTICAST_QPN ||
	    memcmp(&datagram->destination, &group->gid, sizeof(group->gid))) {
		SOFT_TRACE_DROPPED(.reason = "DESTINATION_GID", .qp_num = datagram->dest_qpn,
				   .remote_qpn = datagram->src_qpn, .remote = &datagram->source);
		return;
	}
	soft_list_each (struct attachment, attachment, &group->members, group_node)
		if (!attachment->qp->block_self_multicast || !is_sent_by(attachment->qp, datagram))
			soft_ud_receive(attachment->qp, datagram, payload, length);
}

static void ready(struct soft_fd_watch *watch)
{
	soft_datagram_read(watch, receive_datagram);
}

/* ---- groups -------------------------------------------------------------------------------- */

/* Join the group on the loopback interface and on every interface that has one of our GIDs. Returns
 * 0 or an errno value. Only the loopback interface, which connects the processes of this host, can
 * cause an error. EADDRINUSE means that the socket is already a member. */
static int join(int fd, uint32_t address)
{
	struct ip_mreqn request = {.imr_multiaddr.s_addr = address,
				   .imr_ifindex = (int)loopback_ifindex()};

	if (setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &request, sizeof(request)) &&
	    errno != EADDRINUSE)
		return errno;
	for (int number = 0; number < soft_hca_count(); number++) {
		const struct soft_hca *hca = soft_hca_at(number);
		struct soft_gid gid;

		for (int i = 0; i < hca->gid_count; i++) {
			if (soft_gid_at(hca, i, &gid))
				continue;
			request.imr_ifindex = (int)gid.ifindex;
			setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &request, sizeof(request));
		}
	}
	return 0;
}

/* Open the socket that receives the messages to the group. Returns 0 or an errno value. */
static int open_socket(struct group *group)
{
	const struct sockaddr_in address = {.sin_family = AF_INET,
					    .sin_port = htons(MULTICAST_PORT),
					    .sin_addr.s_addr = address_of(&group->gid)};
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), rc = 0;

	if (fd < 0)
		return errno;
	soft_set_receive_buffer(fd, RECEIVE_BUFFER_BYTES);
	/* Other processes on this host bind the same address. */
	if (soft_set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1) ||
	    bind(fd, (const struct sockaddr *)&address, sizeof(address)))
		rc = errno;
	if (!rc)
		rc = join(fd, address.sin_addr.s_addr);
	group->watch = (struct soft_fd_watch){.fd = fd, .ready = ready};
	if (!rc)
		rc = soft_watch(&group->watch, EPOLLIN);
	if (rc)
		close(fd);
	return rc;
}

void soft_multicast_rejoin(void)
{
	soft_assert_locked();
	soft_list_each (struct group, group, &soft_device.ud->groups, node)
		join(group->watch.fd, address_of(&group->gid));
}

/* Returns whether the group belongs to the parent of a forked process. The child ignores it. */
static bool is_inherited(const struct group *group)
{
	return soft_list_empty(&group->node);
}

static struct group *find_group(const union ibv_gid *gid)
{
	soft_list_each (struct group, group, &soft_device.ud->groups, node)
		if (!memcmp(&group->gid, gid, sizeof(*gid)))
			return group;
	return NULL;
}

static int group_open(const union ibv_gid *gid, struct group **opened)
{
	struct group *group = soft_list_count(&soft_device.ud->groups) < SOFT_MAX_MCAST_GRP
				      ? calloc(1, sizeof(*group))
				      : NULL;
	int rc;

	if (!group)
		return ENOMEM;
	group->gid = *gid;
	rc = open_socket(group);
	if (rc) {
		free(group);
		return rc;
	}
	soft_list_init(&group->members);
	soft_list_append(&soft_device.ud->groups, &group->node);
	*opened = group;
	return 0;
}

static void group_close(struct group *group)
{
	soft_watch_close(&group->watch);
	soft_list_remove(&group->node);
	free(group);
}

void soft_multicast_reset_after_fork(void)
{
	soft_list_clear(&soft_device.ud->groups);
	soft_device.ud->attachment_count = 0;
}

/* ---- calls --------------------------------------------------------------------------------- */

static struct attachment *find_attachment(const struct soft_qp *qp, const union ibv_gid *gid,
					  uint16_t lid)
{
	soft_list_each (struct attachment, attachment, &qp->attachments, qp_node)
		if (attachment->lid == lid && !memcmp(&attachment->group->gid, gid, sizeof(*gid)))
			return attachment;
	return NULL;
}

static int attach(struct soft_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	struct group *group = find_group(gid);
	struct attachment *attachment;
	int rc = 0;

	if (soft_device.ud->attachment_count == SOFT_MAX_MCAST_ATTACH ||
	    (group && soft_list_count(&group->members) == SOFT_MAX_MCAST_QP))
		return ENOMEM;
	attachment = calloc(1, sizeof(*attachment));
	if (!attachment)
		return ENOMEM;
	if (!group)
		rc = group_open(gid, &group);
	if (rc) {
		free(attachment);
		return rc;
	}
	attachment->group = group;
	attachment->qp = qp;
	attachment->lid = lid;
	soft_list_append(&group->members, &attachment->group_node);
	soft_list_append(&qp->attachments, &attachment->qp_node);
	soft_device.ud->attachment_count++;
	return 0;
}

static void detach(struct attachment *attachment)
{
	soft_list_remove(&attachment->group_node);
	soft_list_remove(&attachment->qp_node);
	if (!is_inherited(attachment->group)) /* a fork resets the count */
		soft_device.ud->attachment_count--;
	if (soft_list_empty(&attachment->group->members))
		group_close(attachment->group);
	free(attachment);
}

/* Implements ibv_attach_mcast(3). Attaching a queue pair twice succeeds, as in the kernel. */
int soft_ibv_attach_mcast(struct ibv_qp *ibv, const union ibv_gid *gid, uint16_t lid)
{
	struct soft_qp *qp = soft_qp_of(ibv);
	int rc = 0;

	if (!soft_qp_is_ud(qp)) {
		rc = soft_refuse_value("QP_TYPE", "qp_type", ibv->qp_type);
	} else if (!soft_gid_is_multicast(gid)) {
		rc = soft_refuse(EINVAL, "MULTICAST");
	} else {
		soft_lock();
		if (!find_attachment(qp, gid, lid))
			rc = attach(qp, gid, lid);
		soft_unlock();
	}
	return soft_call_result("ibv_attach_mcast", "qp_num", ibv->qp_num, rc);
}

int soft_ibv_detach_mcast(struct ibv_qp *ibv, const union ibv_gid *gid, uint16_t lid)
{
	int rc = soft_refuse(EINVAL, "NOT_ATTACHED");

	soft_lock();
	struct attachment *attachment = find_attachment(soft_qp_of(ibv), gid, lid);

	if (attachment) {
		detach(attachment);
		rc = 0;
	}
	soft_unlock();
	return soft_call_result("ibv_detach_mcast", "qp_num", ibv->qp_num, rc);
}
