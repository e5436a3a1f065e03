/* Tests of simulated hosts (sim/sim.c). Two hosts exchange requests, and one of them is killed
 * and rebooted. The same seed must produce the same history, and a simulation must release all its
 * resources. */
#include <malloc.h>

#include "leaks.h"
#include "verbs_side.h"

enum {
	HOSTS = 2,
	LENGTH = 20000, /* request length, which takes many datagrams */
	SEEDS = 20,
	WARM_UP = 10 * SEEDS, /* simulations before memory is measured */
};

#define MS UINT64_C(1000000)

enum { HOST_GID, LOOPBACK_GID }; /* GID indexes */

static void set_links(void)
{
	for (int i = 0; i < HOSTS * HOSTS; i++)
		*aiordma_sim_way(0, i / HOSTS, i % HOSTS) =
			(struct aiordma_sim_link){.latency_ns = 5000,
						  .jitter_ns = 5000,
						  .ps_per_byte = 80,
						  .loss = 10000,
						  .duplicate = 10000,
						  .late = 20000,
						  .late_ns = MS};
}

/* Create and destroy an event channel. It must leave no state in the device. */
static void use_event_channel(void)
{
	struct rdma_event_channel *channel = verbs->rdma_create_event_channel();

	CHECK(channel);
	verbs->rdma_destroy_event_channel(channel);
}

static void connect_hosts(struct side sides[], const int machines[])
{
	struct address addresses[HOSTS];

	for (int i = 0; i < HOSTS; i++) {
		aiordma_sim_enter(machines[i]);
		addresses[i] = address_of_side(&sides[i]);
	}
	for (int i = 0; i < HOSTS; i++) {
		aiordma_sim_enter(machines[i]);
		bring_up(&sides[i], &addresses[1 - i]);
	}
}

static enum ibv_wc_status wait_for_completion(struct side *side, int machine)
{
	struct ibv_wc wc;

	for (;;) {
		aiordma_sim_enter(machine);
		if (poll_cq(side, 1, &wc))
			return wc.status;
		aiordma_sim_run(aiordma_sim_next());
	}
}

static void write_to(struct side *from, int machine, struct side *to)
{
	memset(from->memory, 1 + *to->memory, LENGTH);
	aiordma_sim_enter(machine);
	POST(from, IBV_WR_RDMA_WRITE, .length = LENGTH, REMOTE(to, 0));
}

/* A queue pair with a loopback address cannot connect to another host. */
static void expect_loopback_refused(struct side *from, int machine, struct side *to, int target)
{
	aiordma_sim_enter(target);
	struct address there = address_of_side(to);

	aiordma_sim_enter(machine);
	CHECK_OK(to_init(from));
	from->options.gid = LOOPBACK_GID;
	CHECK_EQUAL(to_rtr(from, &there), ENETUNREACH);
	from->options.gid = HOST_GID;
	enter_state(from, IBV_QPS_RESET);
}

/* Kill host 1 while requests and datagrams are in flight, and stop host 0 for a while. Returns a
 * hash of the history. */
static uint64_t simulate(uint64_t seed)
{
	struct side sides[HOSTS], dead;
	int machines[HOSTS];

	CHECK_OK(aiordma_sim_begin(seed));
	set_links();
	for (int i = 0; i < HOSTS; i++) {
		machines[i] = aiordma_sim_boot(i);
		use_event_channel();
		OPEN(&sides[i], .gid = gid_at(HOST_GID), .timeout = 10);
	}
	CHECK_EQUAL(aiordma_sim_begin(seed), EBUSY);
	expect_loopback_refused(&sides[0], machines[0], &sides[1], machines[1]);
	connect_hosts(sides, machines);
	for (int i = 0; i < HOSTS; i++) {
		write_to(&sides[i], machines[i], &sides[1 - i]);
		CHECK_EQUAL(wait_for_completion(&sides[i], machines[i]), IBV_WC_SUCCESS);
		CHECK(!memcmp(sides[0].memory, sides[1].memory, LENGTH));
	}

	write_to(&sides[1], machines[1], &sides[0]);
	aiordma_sim_set_state(machines[0], AIORDMA_SIM_STOPPED);
	aiordma_sim_run(aiordma_sim_now() + 1 * MS);
	CHECK(memcmp(sides[0].memory, sides[1].memory, LENGTH));
	aiordma_sim_set_state(machines[0], AIORDMA_SIM_UP);
	CHECK_EQUAL(wait_for_completion(&sides[1], machines[1]), IBV_WC_SUCCESS);

	for (int i = 0; i < HOSTS; i++)
		write_to(&sides[i], machines[i], &sides[1 - i]);
	aiordma_sim_run(aiordma_sim_next());
	aiordma_sim_set_state(machines[1], AIORDMA_SIM_DEAD);
	CHECK_EQUAL(wait_for_completion(&sides[0], machines[0]), IBV_WC_RETRY_EXC_ERR);
	dead = sides[1];
	machines[1] = aiordma_sim_boot(1);
	OPEN(&sides[1], .gid = gid_at(HOST_GID), .timeout = 10);
	enter_state(&sides[0], IBV_QPS_RESET);
	connect_hosts(sides, machines);
	write_to(&sides[1], machines[1], &sides[0]);
	CHECK_EQUAL(wait_for_completion(&sides[1], machines[1]), IBV_WC_SUCCESS);

	write_to(&sides[0], machines[0], &sides[1]);
	aiordma_sim_set_state(machines[1], AIORDMA_SIM_STOPPED);
	aiordma_sim_run(aiordma_sim_now() + 1 * MS); /* the host never processes this data */
	uint64_t trace = aiordma_sim_trace();

	aiordma_sim_enter(1); /* the first machine of host 1 */
	close_side(&dead);
	for (int i = 0; i < HOSTS; i++) {
		aiordma_sim_enter(machines[i]);
		close_side(&sides[i]);
	}
	CHECK_OK(aiordma_sim_end());
	return trace;
}

static size_t allocated_bytes(void)
{
	return mallinfo2().uordblks; /* always 0 under a sanitizer, which detects leaks itself */
}

static void same_seed_produces_the_same_history(void)
{
	CHECK_EQUAL(simulate(1), simulate(1));
	CHECK(simulate(1) != simulate(2));
}

/* Check that repeated simulations do not leak memory. Memory in malloc's caches counts as used, and
 * it has taken up to 80 simulations to fill these caches. A leak takes at least 32 bytes per
 * simulation, the size of the smallest allocation. */
static void simulation_frees_its_memory(void)
{
	size_t used = 0;

	for (uint64_t seed = 0; seed < WARM_UP + SEEDS; seed++) {
		if (seed == WARM_UP)
			used = allocated_bytes();
		simulate(seed % SEEDS);
	}
	CHECK(allocated_bytes() < used + SEEDS * 32);
}

int main(void)
{
	int before = count_resources();

	limit_seconds(60);
	CHECK_OK(setenv("AIORDMA_EMBEDDED_LINKS", "roce", 1));
	STEP(same_seed_produces_the_same_history());
	STEP(simulation_frees_its_memory());
	CHECK_EQUAL(count_resources(), before);
	return 0;
}
