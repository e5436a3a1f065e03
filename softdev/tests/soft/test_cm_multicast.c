/* Test multicast groups of an id: joining, attaching and leaving them, and invalid joins. */
#include "cm_side.h"

#include "cm/cm_internal.h"

static struct side open_side_with_qp(void)
{
	struct side side = open_bound_side(RDMA_PS_UDP, "127.0.0.1", 0);
	struct ibv_qp_init_attr attr;

	side_memory(&side);
	attr = side_attributes(&side);
	attr.qp_type = IBV_QPT_UD;
	CHECK_OK(rdma->rdma_create_qp(side.id, side.pd, &attr));
	return side;
}

/* Wait for MULTICAST_JOIN, which is reported once the queue pair is attached. Returns the group's
 * GID. */
static union ibv_gid expect_joined(struct side *side, void *context)
{
	struct rdma_cm_event *event = expect(side->channel, RDMA_CM_EVENT_MULTICAST_JOIN, side->id);
	union ibv_gid gid = event->param.ud.ah_attr.grh.dgid;

	CHECK_EQUAL(event->status, 0);
	CHECK(event->param.ud.private_data == context);
	CHECK_EQUAL(event->param.ud.private_data_len, 0);
	CHECK_EQUAL(event->param.ud.qp_num, 0xffffff);
	CHECK_EQUAL(event->param.ud.qkey, RDMA_UDP_QKEY);
	CHECK_EQUAL(event->param.ud.ah_attr.is_global, 1);
	acknowledge(event);
	return gid;
}

static void queue_pair_is_attached_while_id_is_joined(const char *text)
{
	struct side side = open_side_with_qp();
	union address group = address_of(text, 0);
	union ibv_gid gid;

	CHECK_OK(rdma->rdma_join_multicast(side.id, &group.any, &side));
	gid = expect_joined(&side, &side);
	CHECK_EQUAL(rdma->ibv_destroy_qp(side.id->qp), EBUSY); /* still attached */
	CHECK_OK(rdma->rdma_leave_multicast(side.id, &group.any));
	CHECK_EQUAL(rdma->ibv_detach_mcast(side.id->qp, &gid, 0), EINVAL); /* no longer attached */
	CHECK_FAILS(rdma->rdma_leave_multicast(side.id, &group.any), EADDRNOTAVAIL);
	side_close(&side);
}

static void group_joined_twice_must_be_left_twice(void)
{
	struct side side = open_side_with_qp();
	union address group = address_of("239.1.2.3", 0);

	CHECK_OK(rdma->rdma_join_multicast(side.id, &group.any, NULL));
	CHECK_OK(rdma->rdma_join_multicast(side.id, &group.any, NULL));
	(void)expect_joined(&side, NULL);
	(void)expect_joined(&side, NULL);
	CHECK_OK(rdma->rdma_leave_multicast(side.id, &group.any));
	CHECK_EQUAL(rdma->ibv_destroy_qp(side.id->qp), EBUSY);
	CHECK_OK(rdma->rdma_leave_multicast(side.id, &group.any));
	side_close(&side);
}

static void leaving_drops_the_unread_join_event(void)
{
	struct side side = open_bound_side(RDMA_PS_UDP, "127.0.0.1", 0);
	union address group = address_of("239.1.2.3", 0), other = address_of("239.1.2.4", 0);

	CHECK_OK(rdma->rdma_join_multicast(side.id, &group.any, NULL));
	CHECK_OK(rdma->rdma_join_multicast(side.id, &other.any, &other));
	CHECK_OK(rdma->rdma_leave_multicast(side.id, &group.any));
	(void)expect_joined(&side, &other);
	expect_nothing(side.channel);
	side_close(&side); /* still a member of the other group */
}

static void queue_pair_can_be_destroyed_while_joined(void)
{
	struct side side = open_side_with_qp();
	union address group = address_of("239.1.2.3", 0);

	CHECK_OK(rdma->rdma_join_multicast(side.id, &group.any, NULL));
	(void)expect_joined(&side, NULL);
	rdma->rdma_destroy_qp(side.id);
	CHECK_OK(rdma->ibv_destroy_cq(side.cq)); /* not used by a queue pair any more */
	side.cq = NULL;
	side_close(&side);
}

static void invalid_multicast_calls_fail(void)
{
	struct side unbound = side_of(RDMA_PS_UDP),
		    side = open_bound_side(RDMA_PS_UDP, "127.0.0.1", 0);
	struct side connection = listen_at(host, 0);
	union address group = address_of("239.1.2.3", 0), absent = address_of("10.1.2.3", 0);
	struct rdma_cm_join_mc_attr_ex attr = {.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS,
					       .join_flags = RDMA_MC_JOIN_FLAG_FULLMEMBER,
					       .addr = &group.any};

	CHECK_FAILS(rdma->rdma_join_multicast(unbound.id, &group.any, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_join_multicast(connection.id, &group.any, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_join_multicast(side.id, &absent.any, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_join_multicast(side.id, NULL, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_join_multicast_ex(side.id, &attr, NULL), EINVAL);
	attr.comp_mask |= RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
	attr.join_flags = 7;
	CHECK_FAILS(rdma->rdma_join_multicast_ex(side.id, &attr, NULL), EINVAL);
	CHECK_FAILS(rdma->rdma_leave_multicast(side.id, NULL), EINVAL);
	side_close(&connection);
	side_close(&unbound);
	side_close(&side);
}

int main(void)
{
	int before;

	cm_begin(60);
	STEP(invalid_multicast_calls_fail());
	before = count_resources();
	STEP(queue_pair_is_attached_while_id_is_joined("239.1.2.3"));
	STEP(queue_pair_is_attached_while_id_is_joined("ff05::17"));
	STEP(group_joined_twice_must_be_left_twice());
	STEP(leaving_drops_the_unread_join_event());
	STEP(queue_pair_can_be_destroyed_while_joined());
	expect_resources(before);
	return 0;
}
