/* Calls that only return information: rates, strings, indices, fork support, and missing
 * features. */
#include "extended_side.h"

static void rates_convert_both_ways(void)
{
	/* ibv_rate_to_mult(3), ibv_rate_to_mbps(3), IBTA table 75. Rates from 14 Gb/s use 64b/66b
	 * encoding. */
	static const struct {
		enum ibv_rate rate;
		int mult, mbps;
	} known[] = {
		{IBV_RATE_2_5_GBPS, 1, 2500},     {IBV_RATE_5_GBPS, 2, 5000},
		{IBV_RATE_40_GBPS, 16, 40000},    {IBV_RATE_120_GBPS, 48, 120000},
		{IBV_RATE_14_GBPS, -1, 14062},    {IBV_RATE_100_GBPS, -1, 103125},
		{IBV_RATE_28_GBPS, 11, 28125},    {IBV_RATE_50_GBPS, 20, 53125},
		{IBV_RATE_400_GBPS, 160, 425000}, {IBV_RATE_MAX, -1, -1},
		{(enum ibv_rate)99, -1, -1},
	};

	FOR_EACH (i, known) {
		CHECK_EQUAL(verbs->ibv_rate_to_mult(known[i].rate), known[i].mult);
		CHECK_EQUAL(verbs->ibv_rate_to_mbps(known[i].rate), known[i].mbps);
	}
	for (int rate = IBV_RATE_2_5_GBPS; rate <= IBV_RATE_1200_GBPS; rate++) {
		int mult = verbs->ibv_rate_to_mult((enum ibv_rate)rate);

		CHECK_EQUAL(verbs->mbps_to_ibv_rate(verbs->ibv_rate_to_mbps((enum ibv_rate)rate)),
			    rate);
		if (mult > 0)
			CHECK_EQUAL(verbs->mult_to_ibv_rate(mult), rate);
	}
	CHECK_EQUAL(verbs->mult_to_ibv_rate(0), IBV_RATE_MAX);
	CHECK_EQUAL(verbs->mult_to_ibv_rate(3), IBV_RATE_MAX);
	CHECK_EQUAL(verbs->mbps_to_ibv_rate(1), IBV_RATE_MAX);
}

static void strings_describe_enum_values(void)
{
	/* The cases cover values from both ends of each enumeration, and values outside it. */
	const struct {
		const char *found, *expected;
	} cases[] = {
		{verbs->ibv_node_type_str(IBV_NODE_CA), "InfiniBand channel adapter"},
		{verbs->ibv_node_type_str(IBV_NODE_UNSPECIFIED), "unspecified"},
		{verbs->ibv_node_type_str((enum ibv_node_type)0), "unknown"},
		{verbs->ibv_node_type_str((enum ibv_node_type)8), "unknown"},
		{verbs->ibv_port_state_str(IBV_PORT_DOWN), "down"},
		{verbs->ibv_port_state_str(IBV_PORT_ACTIVE_DEFER), "active defer"},
		{verbs->ibv_port_state_str((enum ibv_port_state)6), "unknown"},
		{verbs->ibv_port_state_str((enum ibv_port_state) - 1), "unknown"},
		{verbs->ibv_wc_status_str(IBV_WC_SUCCESS), "success"},
		{verbs->ibv_wc_status_str(IBV_WC_TM_RNDV_INCOMPLETE),
		 "tag matching rendezvous incomplete"},
		{verbs->ibv_wc_status_str((enum ibv_wc_status)24), "unknown status"},
		{verbs->ibv_event_type_str(IBV_EVENT_CQ_ERR), "completion queue error"},
		{verbs->ibv_event_type_str(IBV_EVENT_WQ_FATAL), "fatal work queue error"},
		{verbs->ibv_event_type_str((enum ibv_event_type)20), "unknown event"},
		{verbs->rdma_event_str(RDMA_CM_EVENT_ADDR_RESOLVED), "RDMA_CM_EVENT_ADDR_RESOLVED"},
		{verbs->rdma_event_str(RDMA_CM_EVENT_TIMEWAIT_EXIT), "RDMA_CM_EVENT_TIMEWAIT_EXIT"},
		{verbs->rdma_event_str((enum rdma_cm_event_type)16), "UNKNOWN EVENT"},
	};

	FOR_EACH (i, cases)
		CHECK_OK(strcmp(cases[i].found, cases[i].expected));
}

static void index_pkey_and_ece_queries_return_fixed_results(struct side *a)
{
	struct ibv_ece ece = {1, 2, 3};

	CHECK_EQUAL(verbs->ibv_get_device_index(a->context->device), -1);
	CHECK_OK(verbs->ibv_get_pkey_index(a->context, 1, 0xffff));
	CHECK_EQUAL(verbs->ibv_get_pkey_index(a->context, 1, 0x7fff), -1);
	CHECK_EQUAL(verbs->ibv_get_pkey_index(a->context, 2, 0xffff), -1);
	CHECK_OK(verbs->ibv_query_qp_data_in_order(a->qp, IBV_WR_RDMA_WRITE, 0));
	/* ECE is not supported. A failed query stores zeros (ibv_query_ece(3), ibv_set_ece(3)). */
	CHECK_EQUAL(verbs->ibv_query_ece(a->qp, &ece), EOPNOTSUPP);
	CHECK_EQUAL(ece.vendor_id | ece.options | ece.comp_mask, 0);
	CHECK_EQUAL(verbs->ibv_set_ece(a->qp, &ece), EOPNOTSUPP);
}

/* Check that the device finds pages that fork has made copy-on-write (IBV_FORK_UNNEEDED). */
static void device_finds_pages_copied_after_fork(void)
{
	struct side a, b;

	CHECK_OK(verbs->ibv_fork_init());
	CHECK_EQUAL(verbs->ibv_is_fork_initialized(), IBV_FORK_UNNEEDED);
	OPEN_PAIR(&a, &b);
	fill(a.memory, 8192, 1);
	pid_t child = fork_asleep();

	CHECK(child >= 0);
	if (!child) {
		pause(); /* keeps the pages shared */
		_exit(0);
	}
	fill(a.memory, 8192, 2); /* replaces the registered page with a copy */
	DO(&a, IBV_WR_RDMA_WRITE, .wr_id = 1, .length = 8192, REMOTE(&b, 0));
	CHECK(is_filled(b.memory, 8192, 2));
	CHECK_OK(kill(child, SIGKILL));
	CHECK_EQUAL(waitpid(child, NULL, 0), child);
	close_pair(&a, &b);
}

int main(void)
{
	limit_seconds(60);
	STEP(rates_convert_both_ways());
	STEP(strings_describe_enum_values());
	SIDE(index_pkey_and_ece_queries_return_fixed_results);
	STEP(device_finds_pages_copied_after_fork());
	return 0;
}
