/* Address handles: ibv_create_ah(3), ibv_create_ah_from_wc(3). */
#include "ud_side.h"
#include "link/link_internal.h"

#include <arpa/inet.h>

static void create_ah_validates_attributes_and_limit(struct side *side)
{
	struct ibv_device_attr device;
	struct ibv_ah_attr attr;

	struct address address = address_of_side(side);
	const struct ibv_ah_attr good = {
		.grh = {.dgid = address.gid}, .dlid = ANY_DLID, .is_global = 1, .port_num = 1};

	CHECK_OK(verbs->ibv_query_device(side->context, &device));
	CHECK(device.max_ah > 0 && device.max_mcast_grp > 0 && device.max_mcast_qp_attach > 0 &&
	      device.max_total_mcast_qp_attach > 0);
	attr = good;
	attr.port_num = 2;
	REFUSED(verbs->ibv_create_ah(side->pd, &attr), EINVAL);
	attr = good;
	attr.grh.sgid_index = 254;
	REFUSED(verbs->ibv_create_ah(side->pd, &attr), EINVAL);
	attr = good;
	struct ibv_ah *ah = verbs->ibv_create_ah(side->pd, &attr);

	CHECK(ah && ah->pd == side->pd && ah->context == side->context);
	destroy_qp(side);
	dereg_own(side);
	CHECK_EQUAL(verbs->ibv_dealloc_pd(side->pd), EBUSY); /* ibv_alloc_pd(3) */
	CHECK_OK(verbs->ibv_destroy_ah(ah));

	/* The device supports exactly `max_ah` address handles. */
	struct ibv_ah **all = calloc((size_t)device.max_ah, sizeof(*all));

	CHECK(all);
	for (int i = 0; i < device.max_ah; i++)
		CHECK(all[i] = verbs->ibv_create_ah(side->pd, &attr));
	REFUSED(verbs->ibv_create_ah(side->pd, &attr), ENOMEM);
	for (int i = 0; i < device.max_ah; i++)
		CHECK_OK(verbs->ibv_destroy_ah(all[i]));
	free(all);
}

static void expect_modify_to_rtr(struct ibv_ah_attr path, struct options options, bool allowed)
{
	struct side side;

	open_side(&side, options);
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = side.qp->qp_num,
		.rq_psn = side.psn,
		.ah_attr = path,
	};

	CHECK_OK(to_init(&side));
	CHECK_EQUAL(verbs->ibv_modify_qp(side.qp, &attr,
					 IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
						 IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						 (options.uc ? 0
							     : IBV_QP_MAX_DEST_RD_ATOMIC |
								       IBV_QP_MIN_RNR_TIMER)),
		    allowed ? 0 : EINVAL);
	if (allowed) {
		CHECK_OK(to_rts(&side));
		DO(&side, IBV_WR_RDMA_WRITE, .length = 8, .remote = (uintptr_t)side.memory + 8,
		   .rkey = side.mr->rkey);
	}
	close_side(&side);
}

/* Check addresses with a LID but no GRH, which InfiniBand applications use. Only the port's own LID
 * is valid. With RoCE, the port has no LID, so every LID is rejected. */
static void only_the_ports_own_lid_is_a_valid_address(void)
{
	struct side a, b;
	struct ibv_port_attr port;

	UD_OPEN(&a);
	UD_OPEN(&b);
	CHECK_OK(verbs->ibv_query_port(a.context, 1, (void *)&port));
	CHECK_EQUAL(!port.lid, soft_device.links->roce);
	for (uint16_t other = 0; other < 3; other++) {
		struct ibv_ah_attr path = {.dlid = other == 2 ? 0 : port.lid + other,
					   .port_num = 1};
		const bool allowed = path.dlid && !other;

		expect_modify_to_rtr(path, (struct options){0}, allowed);
		expect_modify_to_rtr(path, (struct options){.uc = true}, allowed);
		if (!allowed) {
			REFUSED(verbs->ibv_create_ah(a.pd, &path), EINVAL);
			continue;
		}
		struct ibv_ah *ah = verbs->ibv_create_ah(a.pd, &path);

		CHECK(ah);
		post_receive_at(&b, 1, 0, GRH);
		UD_POST(&a, .ah = ah, .qpn = b.qp->qp_num, .qkey = QKEY);
		CHECK_EQUAL(poll_one(&b).byte_len, GRH);
		CHECK_OK(verbs->ibv_destroy_ah(ah));
	}
	close_pair(&a, &b);
}

/* ibv_init_ah_from_wc(3). */
static void init_ah_from_wc_reverses_the_grh(struct side *side)
{
	struct ibv_grh grh = {.version_tclass_flow = htonl(6u << 28 | 7 << 20 | 9), .hop_limit = 3};
	struct ibv_wc wc = {.slid = 77, .sl = 5, .wc_flags = IBV_WC_GRH, .dlid_path_bits = 2};
	struct ibv_ah_attr attr;

	CHECK_OK(verbs->ibv_query_gid(side->context, 1, 0, &grh.dgid));
	fill(grh.sgid.raw, 16, 1);
	grh.sgid.raw[12] = 0x45; /* like an IPv4 header, but with a wrong checksum */
	CHECK_OK(verbs->ibv_init_ah_from_wc(side->context, 1, &wc, &grh, &attr));
	const struct ibv_ah_attr expected = {
		.grh = {.dgid = grh.sgid, .flow_label = 9, .hop_limit = 3, .traffic_class = 7},
		.dlid = 77,
		.sl = 5,
		.src_path_bits = 2,
		.is_global = 1,
		.port_num = 1,
	};

	CHECK(!memcmp(&attr, &expected, sizeof(attr)));
	/* The call rejects a foreign destination, a multicast destination, and a header that is not
	 * IPv4 or IPv6. */
	for (int wrong = 0; wrong < 3; wrong++) {
		struct ibv_grh bad = grh;

		if (wrong == 0)
			bad.dgid.raw[15] = 99;
		if (wrong == 1)
			bad.dgid.raw[0] = 0xff;
		if (wrong == 2)
			bad.version_tclass_flow = 0;
		CHECK_FAILS(verbs->ibv_init_ah_from_wc(side->context, 1, &wc, &bad, &attr),
			    wrong == 2 ? EPROTONOSUPPORT : EINVAL);
		CHECK(!verbs->ibv_create_ah_from_wc(side->pd, &wc, &bad, 1));
	}
	wc.wc_flags = 0;
	CHECK_OK(verbs->ibv_init_ah_from_wc(side->context, 1, &wc, NULL, &attr));
	CHECK_EQUAL(attr.is_global, 0);
	CHECK_EQUAL(attr.dlid, 77);
}

int main(void)
{
	limit_seconds(60);
	SIDE(create_ah_validates_attributes_and_limit, .ud = true);
	STEP(only_the_ports_own_lid_is_a_valid_address());
	SIDE(init_ah_from_wc_reverses_the_grh, .ud = true);
	return 0;
}
