/* Tests of process limits (setrlimit(2)) that restrict the device. */
#include <sys/resource.h>

#include "verbs_side.h"

/* Check that processes use TCP if RLIMIT_FSIZE is too small for the files behind their shared
 * memory. */
static void no_long_files(void)
{
	struct process process = split();
	struct rlimit before, none;
	struct side side;

	CHECK_OK(getrlimit(RLIMIT_FSIZE, &before));
	none = (struct rlimit){0, before.rlim_max};
	CHECK_OK(setrlimit(RLIMIT_FSIZE, &none));
	OPEN(&side);
	struct address peer = exchange(&process, &side);

	bring_up(&side, &peer);
	receive_at(&side, 1, 4096, 4096);
	fill(side.memory, 4096, process.child != 0);
	process_barrier(&process);
	POST(&side, IBV_WR_SEND, .wr_id = 2, .length = 4096);
	for (int i = 0; i < 2; i++)
		CHECK_EQUAL(next_wc(&side).status, IBV_WC_SUCCESS);
	CHECK(filled(side.memory + 4096, 4096, process.child == 0));
	process_barrier(&process);
	close_side(&side);
	CHECK_OK(setrlimit(RLIMIT_FSIZE, &before)); /* coverage tools write files */
	join(&process);
}

int main(void)
{
	limit_seconds(60);
	STEP(no_long_files());
	return 0;
}
