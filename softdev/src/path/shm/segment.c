/* The memory shared by two local peers: a memfd of fixed size.
 *
 *   offset     0  u8[8] magic
 *              8  u32   version   of this layout, the rings and their contents
 *           4096  positions of ring 0, then of ring 1, each aligned to 256
 *           8192  area 0, area 1
 *          24576  ring 0, then ring 1
 *
 * The side that creates the memory writes to ring 0 and owns area 0. The memfd is sealed against
 * growing and shrinking. If the other side could shrink it, accesses beyond its end would raise
 * SIGBUS.
 */
#define _GNU_SOURCE /* memfd_create, F_ADD_SEALS */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shm_internal.h"

enum {
	VERSION = 3,
	POSITIONS = 4096,
	POSITIONS_EACH = 256,
	AREAS = 8192,
	RINGS = AREAS + 2 * SOFT_SHM_AREA,
	SEGMENT_SIZE = RINGS + 2 * SOFT_RING_SIZE,
	SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL,
};

_Static_assert(sizeof(struct soft_ring_shared) <= POSITIONS_EACH, "positions have their place");

static const struct beginning {
	char magic[8];
	uint32_t version;
} beginning = {"aiordma", VERSION};

static struct soft_ring_shared *positions(const struct soft_shm_peer *peer, int ring)
{
	return (struct soft_ring_shared *)(void *)((uint8_t *)peer->memory + POSITIONS +
						   ring * POSITIONS_EACH);
}

static uint8_t *area(const struct soft_shm_peer *peer, int index)
{
	return (uint8_t *)peer->memory + AREAS + index * SOFT_SHM_AREA;
}

/* Returns whether RLIMIT_FSIZE allows this length. The limit applies to a memfd too, and exceeding
 * it would raise SIGXFSZ (setrlimit(2)). */
static bool limit_allows(off_t length)
{
	struct rlimit limit;

	return getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur >= (rlim_t)length;
}

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u /* since Linux 6.3; may be required by the sysctl vm.memfd_noexec */
#endif

int soft_segment_make(void)
{
	static const char name[] = "aiordma-shm";

	if (!limit_allows(SEGMENT_SIZE)) {
		errno = EFBIG;
		return -1;
	}
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_NOEXEC_SEAL);

	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -1;
	if (ftruncate(fd, SEGMENT_SIZE) || fcntl(fd, F_ADD_SEALS, SEALS) ||
	    pwrite(fd, &beginning, sizeof(beginning), 0) != (ssize_t)sizeof(beginning))
		soft_close_fd(&fd);
	return fd;
}

int soft_segment_check(int fd)
{
	struct beginning found;
	struct stat stat;
	int seals = fcntl(fd, F_GET_SEALS);

	if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &stat) ||
	    stat.st_size != SEGMENT_SIZE ||
	    pread(fd, &found, sizeof(found), 0) != (ssize_t)sizeof(found) ||
	    memcmp(&found, &beginning, sizeof(found)))
		return EPROTO;
	return 0;
}

/* Map the segment and its rings. This side writes to ring `own_ring` and reads from ring
 * `peer_ring`, which are the same if the peer is this process. Returns 0 or an errno value. */
static int map(struct soft_shm_peer *peer, int fd, int own_ring, int peer_ring)
{
	void *front = mmap(NULL, RINGS, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	uint8_t *bytes[2] = {NULL, NULL};

	if (front == MAP_FAILED)
		return errno;
	madvise(front, RINGS, MADV_DONTFORK);
	peer->memory = front;
	for (int index = 0; index < 2; index++) {
		if (index != own_ring && index != peer_ring)
			continue;
		bytes[index] = soft_ring_map(fd, RINGS + (off_t)index * SOFT_RING_SIZE);
		if (!bytes[index]) {
			int rc = errno;

			if (bytes[0])
				soft_ring_unmap(bytes[0]);
			soft_segment_unmap(peer);
			return rc;
		}
	}
	soft_ring_init(&peer->out, positions(peer, own_ring), bytes[own_ring]);
	soft_ring_init(&peer->in, positions(peer, peer_ring), bytes[peer_ring]);
	peer->own_area = area(peer, own_ring);
	peer->peer_area = area(peer, peer_ring);
	soft_cma_attach(peer);
	return 0;
}

int soft_segment_map(struct soft_shm_peer *peer, int fd, enum soft_segment_side side)
{
	/* The creator writes to ring 0. */
	return side == SOFT_SEGMENT_CREATOR ? map(peer, fd, 0, 1) : map(peer, fd, 1, 0);
}

int soft_segment_private(struct soft_shm_peer *peer)
{
	int fd = soft_segment_make();

	if (fd < 0)
		return errno;
	int rc = map(peer, fd, 0, 0);

	close(fd);
	return rc;
}

void soft_segment_unmap(struct soft_shm_peer *peer)
{
	soft_cma_detach(peer);
	if (peer->in.bytes)
		soft_ring_unmap(peer->in.bytes);
	if (peer->out.bytes && peer->out.bytes != peer->in.bytes)
		soft_ring_unmap(peer->out.bytes);
	if (peer->memory)
		munmap(peer->memory, RINGS);
	peer->in.bytes = peer->out.bytes = NULL;
	peer->memory = NULL;
}
