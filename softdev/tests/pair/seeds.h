/* Run a randomized test with many seeds.
 *
 *   TEST [-r] [-v] FIRST [COUNT]    run COUNT seeds (default 1); -v prints the events
 *   TEST [-r] -m SEED               SEED or one of the seeds 1 to 1,000 must fail
 *
 * -r selects RoCE v2 (datagrams.h), if the test supports it.
 *
 * Each seed runs in its own process, so its behavior does not depend on the seeds before it. Some
 * seeds run twice, and both runs must produce the same trace.
 */
#pragma once

#include "wire.h"

enum { MUTANT_SEEDS = 1000 };

static struct {
	void (*run)(void);
	unsigned twice; /* divisor of the seeds that run twice */
} seeds;

/* Run a seed in a child process, which stores the hash of its trace in `hash`. Returns the child's
 * wait status. */
static int run_alone(uint64_t seed, uint64_t *hash, bool quiet)
{
	/* The machine's uptime is 0, 300 days or 36 years. */
	static const uint64_t begins_s[] = {0, 26000000, 1152921504};
	pid_t child = fork();
	int status;

	CHECK(child >= 0);
	if (!child) {
		if (quiet)
			CHECK(freopen("/dev/null", "w", stderr));
		limit_seconds(2);
		wire.random = fuzz_random = seed;
		wire.begun = fuzz_now_ns = begins_s[seed % 3] * SECOND;
		wire_begin();
		seeds.run();
		*hash = wire.trace_hash;
		exit(0);
	}
	CHECK_EQUAL(waitpid(child, &status, 0), child);
	return status;
}

static void must_pass(uint64_t seed, uint64_t hashes[2])
{
	int status = run_alone(seed, &hashes[0], false);

	if (!status && seed % seeds.twice == 0) {
		status = run_alone(seed, &hashes[1], false);
		if (!status && hashes[0] != hashes[1]) {
			fprintf(stderr, "another run of the seed has another trace: ");
			status = 1;
		}
	}
	if (!status)
		return;
	fprintf(stderr, "seed %llu has failed; again: %s%s -v %llu\n", (unsigned long long)seed,
		program_invocation_name, wire.roce ? " -r" : "", (unsigned long long)seed);
	(void)!system(
		"git -c safe.directory='*' log -1 --format='on commit %h, or a change of it' >&2");
	exit(1);
}

/* Check that a device with a planted bug fails. Try `seed`, which found the bug in an earlier run,
 * and then the seeds from 1 to MUTANT_SEEDS. */
static void must_fail(uint64_t seed, uint64_t hashes[2])
{
	uint64_t found = seed;

	if (!run_alone(seed, hashes, true))
		for (found = 1; !run_alone(found, hashes, true); found++)
			CHECK(found < MUTANT_SEEDS);
	printf("found by seed %llu%s\n", (unsigned long long)found,
	       found == seed ? "" : ", which belongs into tests/pair/meson.build");
}

static int run_seeds(void (*run)(void), unsigned twice, int argc, char **argv)
{
	uint64_t *hashes =
		mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	wire.roce = argc > 1 && !strcmp(argv[1], "-r");
	if (wire.roce)
		argv++, argc--;
	const char *option = argc > 1 && *argv[1] == '-' ? argv[1] : "";

	CHECK(hashes != MAP_FAILED);
	CHECK_OK(setenv("AIORDMA_EMBEDDED_LINKS", wire.roce ? "roce" : "shared", 1));
	if (*option)
		argv++, argc--;
	CHECK(argc == 2 || argc == 3);
	uint64_t first = strtoull(argv[1], NULL, 10);
	uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;

	seeds.run = run;
	seeds.twice = twice;
	wire.verbose = !strcmp(option, "-v");
	if (!strcmp(option, "-m")) {
		must_fail(first, hashes);
		return 0;
	}
	for (uint64_t seed = first; seed < first + count; seed++)
		must_pass(seed, hashes);
	printf("%llu seeds from %llu on\n", (unsigned long long)count, (unsigned long long)first);
	return 0;
}
