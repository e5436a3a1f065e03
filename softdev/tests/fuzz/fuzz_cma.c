/* Fuzz cross-memory attach. The fuzzer plays a local peer, which can write anything to its
 * descriptors and to the page that it shares with us. The peer is actually this process, identified
 * by its own PID.
 *
 * Whatever the peer writes, copying must change only the destination, and inconsistent descriptors
 * must be rejected. A slot in use must not be exported again until the peer has marked it as done.
 * Revoking memory must take a bounded time.
 */
#define _GNU_SOURCE /* memmem */
#include <sys/uio.h>

#include "arena.h"

#include "objects/objects.h"
#include "path/shm/cma.h"

static struct world {
	struct soft_cma cma;
	uint8_t *own, *peer; /* shared pages */
	bool given[SOFT_CMA_SLOTS];
	uint32_t generations[SOFT_CMA_SLOTS];
} world;

static struct soft_cma_page *peer_page(void)
{
	return (struct soft_cma_page *)(void *)world.peer;
}

/* Copy from a descriptor of the peer. Bytes of `r`: 1 slot, 2 error in the generation, 3 number of
 * pieces, 4 error in the total length, 5 source address, 6-7 length of each piece, 8-9 offset at
 * which the copy starts, 10 destination address. */
static void refer(const uint8_t *r)
{
	uint8_t bytes[SOFT_CMA_DESC_HEAD + 32 * SOFT_CMA_DESC_PIECE] = {0};
	uint32_t slot = r[1] & 0x80 ? (uint32_t)r[1] << 20 : r[1] % (SOFT_CMA_SLOTS + 1u);
	uint32_t count = r[3] % 20u, each = fuzz16(r + 6) & 0x3ff, sum = count * each;
	uint32_t length = sum + (uint32_t)(int8_t)r[4], offset;
	struct soft_cma_desc desc;
	enum soft_cma_result reached;

	soft_put32(bytes, slot);
	soft_put32(bytes + 4,
		   peer_page()->generation[slot % SOFT_CMA_SLOTS] + (uint32_t)(int8_t)r[2]);
	for (uint32_t i = 0; i < count; i++) {
		uint8_t *piece = bytes + SOFT_CMA_DESC_HEAD + i * SOFT_CMA_DESC_PIECE;

		/* Use an address in AREA_READ, or one where no memory is mapped. */
		soft_put64(piece, r[5] & 1 && i == count / 2u
					  ? (uint64_t)r[5] << 12
					  : (uintptr_t)area_at(AREA_READ) + (r[5] >> 1));
		soft_put64(piece + 8, each + (r[5] & 0x80 && i == 1 ? UINT64_C(1) << 32 : 0));
	}
	if (!soft_cma_desc_decode(bytes, count, length, &desc))
		return;
	CHECK_EQUAL(length, sum);
	CHECK(slot < SOFT_CMA_SLOTS && count <= SOFT_CMA_PIECES && each);
	offset = fuzz16(r + 8) % (length + 1);
	uint32_t first = (length - offset) / 3u;
	struct iovec to[2] = {
		{area_at(AREA_OPEN) + r[10], first},
		{area_at(AREA_OPEN) + OPEN_SIZE - (length - offset - first),
		 length - offset - first},
	};

	reached = soft_cma_copy(&world.cma, &desc, offset, to, 2);
	CHECK(reached <= SOFT_CMA_GONE);
	CHECK(r[2] == 0 || reached == SOFT_CMA_REVOKED);
	CHECK_EQUAL(world.cma.own->busy, 0);
}

static void export(void)
{
	struct soft_cma_export *given = soft_cma_export_new(&world.cma);

	if (!given)
		return;
	CHECK(given->slot < SOFT_CMA_SLOTS);
	CHECK(!world.given[given->slot] ||
	      peer_page()->done[given->slot] == world.generations[given->slot]);
	CHECK_EQUAL(world.cma.own->generation[given->slot], given->generation);
	world.given[given->slot] = true;
	world.generations[given->slot] = given->generation;
}

static bool concerned(const struct soft_cma_export *given, const void *what)
{
	return given->slot % 4u == *(const uint8_t *)what % 4u;
}

static void take_back(const uint8_t *r)
{
	struct soft_cma_export lost[SOFT_CMA_SLOTS];
	unsigned count = soft_cma_revoke(&world.cma, concerned, r + 1, lost);

	for (unsigned i = 0; i < count; i++) {
		CHECK(i == 0 || lost[i - 1].order < lost[i].order);
		CHECK(concerned(&lost[i], r + 1) && world.given[lost[i].slot]);
	}
	for (uint32_t slot = r[1] % 4u; slot < SOFT_CMA_SLOTS; slot += 4) {
		CHECK(!world.cma.exports[slot].used);
		/* The generation must have changed unless the peer has marked the export as
		 * done. */
		CHECK(!world.given[slot] ||
		      world.cma.own->generation[slot] != world.generations[slot] ||
		      peer_page()->done[slot] == world.generations[slot]);
		world.given[slot] = false;
	}
}

static void execute_record(const uint8_t *r)
{
	switch (r[0] & 7) {
	case 0:
	case 1:
	case 2:
		refer(r);
		break;
	case 3:
		export();
		break;
	case 4:
		take_back(r);
		break;
	case 5: /* write arbitrary bytes to the peer's page */
		memcpy(world.peer + fuzz16(r + 1) % (sizeof(struct soft_cma_page) - 8), r + 4, 8);
		break;
	case 6: /* mark a slot as done */
		peer_page()->done[r[1] % SOFT_CMA_SLOTS] =
			world.cma.own->generation[r[1] % SOFT_CMA_SLOTS];
		break;
	case 7:
		soft_cma_is_open(&world.cma);
		peer_page()->busy = r[1];
		break;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	arena_prepare(fuzz_seed(data, size));
	fuzz_clock_step_ns = 1000000; /* time passes while the device waits */
	world = (struct world){
		.own = calloc(1, SOFT_CMA_PAGE),
		.peer = calloc(1, SOFT_CMA_PAGE),
	};
	CHECK(world.own && world.peer);
	CHECK_OK(soft_cma_init(&world.cma, (void *)world.own, (void *)world.peer));
	/* Make the peer's page equal to ours, so that the probe accepts this process as the
	 * peer. */
	memcpy(world.peer, world.own, sizeof(struct soft_cma_page));
	world.cma.peer_secret_at = (uintptr_t)world.cma.secret;
	CHECK(soft_cma_probe(&world.cma, getpid()));
	for (size_t at = 0; at + RECORD <= size; at += RECORD)
		execute_record(data + at);
	soft_cma_end(&world.cma);
	free(world.own);
	free(world.peer);
	arena_check_unharmed();
	return 0;
}
