/* Test process limits (setrlimit(2)) that restrict the device. */
#include <sys/resource.h>

#include "verbs_side.h"

/* Check that processes use TCP if RLIMIT_FSIZE is too small for the files behind their shared
 * memory. */
static void peers_communicate_when_file_size_limit_prevents_shm(void)
{
	struct process process = process_split();
	struct rlimit before, none;
	struct side side;

	CHECK_OK(getrlimit(RLIMIT_FSIZE, &before));
	none = (struct rlimit){0, before.rlim_max};
	CHECK_OK(setrlimit(RLIMIT_FSIZE, &none));
	OPEN(&side);
	struct address peer = exchange_addresses(&process, &side);

	bring_up(&side, &peer);
	post_receive_at(&side, 1, 4096, 4096);
	fill(side.memory, 4096, process.child != 0);
	process_barrier(&process);
	POST(&side, IBV_WR_SEND, .wr_id = 2, .length = 4096);
	for (int i = 0; i < 2; i++)
		CHECK_EQUAL(next_wc(&side).status, IBV_WC_SUCCESS);
	CHECK(is_filled(side.memory + 4096, 4096, process.child == 0));
	process_barrier(&process);
	close_side(&side);
	CHECK_OK(setrlimit(RLIMIT_FSIZE, &before)); /* coverage tools write files */
	process_join(&process);
}

int main(void)
{
	limit_seconds(60);
	STEP(peers_communicate_when_file_size_limit_prevents_shm());
	return 0;
}
