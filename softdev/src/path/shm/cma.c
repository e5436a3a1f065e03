/* The copying side of cross-memory attach (cma.h). cma_export.c contains the exporting side.
 *
 * A copy between processes is not always faster than the ring. The kernel looks up each page of the
 * other process, so a copy takes up to three times as long as a memcpy. The ring needs two copies.
 * They run at the same time, but they occupy two cores and wake a sleeping side repeatedly. All
 * these times depend on the machine, the page size and the caches, and vary by a factor of five, so
 * both methods are measured. A copy counts as slow if it takes longer than both copies through the
 * ring together. If the application sleeps while it waits, the limit is WAKEUP_FACTOR times as
 * long. After two slow copies in a row, the copying side asks the peer to use the ring for a while
 * (`backoff_until`). Records that arrive through the ring in the meantime update the measured cost
 * of the ring.
 *
 * Costs that the ring would have too must not count as slow. One is page allocation in fresh
 * memory, which takes ten times as long as the copy if a hypervisor has to supply the pages.
 * Another is the time of other threads on a busy machine. The second copy is therefore measured in
 * CPU time, and is ignored if it caused a page fault.
 */
#define _GNU_SOURCE /* process_vm_readv */
#include <sys/resource.h>
#include <sys/uio.h>

#include "objects/objects.h"
#include "shm_internal.h"

#define BACKOFF_NS 250000000u

enum {
	MIN_MEASURED = 32 * 1024, /* minimum length of a measured copy */
	WEIGHT = 8, /* sum of the weights of the mean (7) and a new measurement (1) */
	/* assumed slowdown of the ring while the application sleeps; the measured factor was 10 */
	WAKEUP_FACTOR = 16,
};

int soft_cma_init(struct soft_cma *cma, struct soft_cma_page *own, struct soft_cma_page *peer)
{
	memset(cma, 0, sizeof(*cma));
	if (soft_device.platform->random(cma->secret, sizeof(cma->secret), 0) !=
	    sizeof(cma->secret))
		return errno;
	cma->own = own;
	cma->peer = peer;
	memcpy(own->secret, cma->secret, sizeof(own->secret));
	if (own == peer) /* this process is its own peer, which sends no message with the address */
		cma->peer_secret_at = (uintptr_t)cma->secret;
	return 0;
}

void soft_cma_end(struct soft_cma *cma)
{
	/* The peer verifies the secret with each copy. Erasing it makes all later copies fail. */
	explicit_bzero(cma->secret, sizeof(cma->secret));
}

/* ---- copying ------------------------------------------------------------------------------- */

static size_t total_length(const struct iovec *iov, int count)
{
	size_t bytes = 0;

	for (int i = 0; i < count; i++)
		bytes += iov[i].iov_len;
	return bytes;
}

/* Store iovecs in `rest` that refer to the same memory as `iov`, but without its first `skip`
 * bytes. Returns the number of iovecs stored. */
static int skip_bytes(const struct iovec *iov, int count, size_t skip, struct iovec *rest)
{
	int left = 0;

	for (int i = 0; i < count; i++) {
		size_t part = skip < iov[i].iov_len ? skip : iov[i].iov_len;

		skip -= part;
		if (part == iov[i].iov_len)
			continue;
		rest[left++] = (struct iovec){
			.iov_base = (uint8_t *)iov[i].iov_base + part,
			.iov_len = iov[i].iov_len - part,
		};
	}
	return left;
}

/* Store iovecs in `from` that refer to `length` bytes at `offset` in the descriptor's memory.
 * Returns the number of iovecs. */
static int get_pieces(const struct soft_cma_desc *desc, uint32_t offset, size_t length,
		      struct iovec *from)
{
	int count = 0;

	for (uint32_t i = 0; i < desc->count && length; i++) {
		uint64_t part = desc->pieces[i].length;

		if (offset >= part) {
			offset -= (uint32_t)part;
			continue;
		}
		part -= offset;
		if (part > length)
			part = length;
		from[count++] = (struct iovec){
			.iov_base = (void *)(uintptr_t)(desc->pieces[i].address + offset),
			.iov_len = part,
		};
		length -= part;
		offset = 0;
	}
	return count;
}

/* Copy from `from` in the other process to `to`, skipping the first `skip` bytes. Returns the
 * number of bytes read, or a negative errno value, which is -ESRCH if the process no longer exists.
 *
 * Each call also reads the secret, because the PID may have been reused and the process may have
 * called execve(2). The kernel looks up the process once per call, so a correct secret proves whose
 * memory was read.
 */
static ssize_t read_from_peer(const struct soft_cma *cma, const struct iovec *to, int to_count,
			      const struct iovec *from, int from_count, size_t skip)
{
	uint64_t secret[2], expected[2];
	struct iovec local[SOFT_MAX_SGE + 1] = {{.iov_base = secret, .iov_len = sizeof(secret)}};
	struct iovec remote[SOFT_CMA_PIECES + 1] = {{
		.iov_base = (void *)(uintptr_t)cma->peer_secret_at,
		.iov_len = sizeof(secret),
	}};
	unsigned long local_count = 1u + (unsigned)skip_bytes(to, to_count, skip, local + 1);
	unsigned long remote_count = 1u + (unsigned)skip_bytes(from, from_count, skip, remote + 1);
	ssize_t n = process_vm_readv(cma->pid, local, local_count, remote, remote_count, 0);

	/* The first iovec is for the secret, so EFAULT means that the secret is not mapped. */
	if (n < 0)
		return errno == EFAULT ? -ESRCH : -errno;
	for (int i = 0; i < 2; i++)
		expected[i] = soft_hint_get(&cma->peer->secret[i]);
	if ((size_t)n < sizeof(secret) || memcmp(secret, expected, sizeof(secret)))
		return -ESRCH;
	return n - (ssize_t)sizeof(secret);
}

/* Copy the peer's memory in `from` to `to`, which has the same length. */
static enum soft_cma_result read_all(const struct soft_cma *cma, const struct iovec *to,
				     int to_count, const struct iovec *from, int from_count)
{
	size_t length = total_length(to, to_count), done = 0;

	/* Repeat partial reads. A call that reads nothing has reached a missing page. Errors such
	 * as EPERM and ENOSYS are permanent, and SOFT_CMA_FORBIDDEN makes the peer stop
	 * exporting. */
	while (done < length) {
		ssize_t n = read_from_peer(cma, to, to_count, from, from_count, done);

		if (n < 0)
			return n == -ESRCH ? SOFT_CMA_GONE : SOFT_CMA_FORBIDDEN;
		if (n == 0)
			break;
		done += (size_t)n;
	}
	if (done == length)
		return SOFT_CMA_COPIED;
	/* The kernel does not report on which side the page is missing. */
	for (int i = 0; i < to_count; i++)
		if (soft_pages_fault(to[i].iov_base, to[i].iov_len, true))
			return SOFT_CMA_UNWRITABLE;
	return SOFT_CMA_UNREADABLE;
}

/* Copy between iovecs of this process until an empty iovec in `from`. The source and the
 * destination may overlap. */
static void copy_within_process(const struct iovec *to, const struct iovec *from)
{
	size_t to_done = 0, from_done = 0;

	while (from->iov_len) {
		size_t to_left = to->iov_len - to_done, from_left = from->iov_len - from_done;
		size_t part = to_left < from_left ? to_left : from_left;

		memmove((uint8_t *)to->iov_base + to_done, (uint8_t *)from->iov_base + from_done,
			part);
		to_done += part;
		from_done += part;
		if (to_done == to->iov_len) {
			to++;
			to_done = 0;
		}
		if (from_done == from->iov_len) {
			from++;
			from_done = 0;
		}
	}
}

static uint64_t ns_per_mib(uint64_t ns, size_t length)
{
	return ns * (1024 * 1024) / length;
}

/* Returns the mean updated with a new measurement, which raises it by at most an eighth. The
 * measurement is too high if the thread was interrupted. An error may last for a long time,
 * because the ring is not measured while cross-memory attach copies everything. */
static uint64_t update_mean(uint64_t mean, uint64_t ns, size_t length)
{
	uint64_t measured = ns_per_mib(ns, length);

	if (mean && measured > 2 * mean)
		measured = 2 * mean;
	return mean ? (mean * (WEIGHT - 1) + measured) / WEIGHT : measured;
}

uint64_t soft_cma_ring_start(size_t length)
{
	return length < MIN_MEASURED ? 0 : soft_now();
}

void soft_cma_ring_wrote(struct soft_cma *cma, uint64_t start_ns, size_t length)
{
	if (start_ns)
		soft_hint_set(&cma->own->ring_write_ns,
			      update_mean(soft_hint_get(&cma->own->ring_write_ns),
					  soft_now() - start_ns, length));
}

void soft_cma_ring_read(struct soft_cma *cma, uint64_t start_ns, size_t length)
{
	if (start_ns)
		cma->ring_read_ns = update_mean(cma->ring_read_ns, soft_now() - start_ns, length);
}

/* Returns whether a copy of `length` bytes in `ns` was slower than the ring would have been. */
static bool is_slow(const struct soft_cma *cma, uint64_t ns, size_t length)
{
	/* All times are for 1 MiB. The ring copies twice, once by each side. */
	uint64_t write_ns = soft_hint_get(&cma->peer->ring_write_ns);
	uint64_t ring_ns = write_ns && cma->ring_read_ns ? write_ns + cma->ring_read_ns : 0;
	uint64_t copy_ns = ns_per_mib(ns, length);

	/* While the time of the ring is unknown, each copy above the minimum counts as slow, and the
	 * records that then pass through the ring are measured. */
	return copy_ns > soft_device.shm->min_slow_copy_ns &&
	       copy_ns > ring_ns * (soft_application_polls() ? 1 : WAKEUP_FACTOR);
}

/* CPU time and page faults of this thread so far. */
struct thread_usage {
	uint64_t ns;
	long faults;
};

/* Returns the CPU time and the number of page faults of this thread. */
static struct thread_usage get_thread_usage(void)
{
	struct timespec time;
	struct rusage usage;

	soft_device.platform->clock(CLOCK_THREAD_CPUTIME_ID, &time);
	getrusage(RUSAGE_THREAD, &usage);
	return (struct thread_usage){
		.ns = soft_nanoseconds(&time),
		.faults = usage.ru_minflt + usage.ru_majflt,
	};
}

/* Copy like read_all(), and ask the peer to use the ring for a while after two slow copies in a
 * row. The second one is measured in CPU time, and does not count if it caused page faults. */
static enum soft_cma_result read_measured(struct soft_cma *cma, const struct iovec *to,
					  int to_count, const struct iovec *from, int from_count)
{
	size_t length = total_length(to, to_count);

	if (length < MIN_MEASURED)
		return read_all(cma, to, to_count, from, from_count);
	struct thread_usage before = cma->was_slow ? get_thread_usage() : (struct thread_usage){0};
	uint64_t start_ns = soft_now();
	enum soft_cma_result result = read_all(cma, to, to_count, from, from_count);

	if (result != SOFT_CMA_COPIED)
		return result;
	if (!is_slow(cma, soft_now() - start_ns, length)) {
		cma->was_slow = false;
	} else if (!cma->was_slow) {
		cma->was_slow = true;
	} else {
		struct thread_usage after = get_thread_usage();

		if (after.faults == before.faults && is_slow(cma, after.ns - before.ns, length)) {
			cma->was_slow = false;
			soft_hint_set(&cma->own->backoff_until, soft_now() + BACKOFF_NS);
		}
	}
	return result;
}

bool soft_cma_backs_off(const struct soft_cma *cma)
{
	uint64_t backoff_until = soft_hint_get(&cma->peer->backoff_until);

	/* The peer may be in another time namespace (time_namespaces(7)), so ignore a time too far
	 * in the future. */
	return backoff_until && backoff_until - soft_now() <= BACKOFF_NS;
}

static bool is_current(const struct soft_cma *cma, const struct soft_cma_desc *desc)
{
	return soft_hint_get(&cma->peer->generation[desc->slot]) == desc->generation;
}

void soft_cma_mark_done(struct soft_cma *cma, const struct soft_cma_desc *desc)
{
	soft_publish(&cma->own->done[desc->slot], desc->generation);
}

enum soft_cma_result soft_cma_copy(struct soft_cma *cma, const struct soft_cma_desc *desc,
				   uint32_t offset, const struct iovec *to, int count)
{
	struct iovec from[SOFT_CMA_PIECES + 1] = {0}; /* ends with an empty iovec */
	size_t length = total_length(to, count);
	int from_count = get_pieces(desc, offset, length, from);
	enum soft_cma_result result = SOFT_CMA_COPIED;

	soft_hint_set(&cma->own->busy, desc->slot + 1);
	/* Set the busy mark before checking the generation. Either the owner sees the mark and
	 * waits, or this side sees that the export was revoked. */
	soft_total_barrier();
	if (is_current(cma, desc)) {
		if (cma->own == cma->peer)
			copy_within_process(to, from);
		else
			result = read_measured(cma, to, count, from, from_count);
		soft_total_barrier();
	}
	if (!is_current(cma, desc))
		result = SOFT_CMA_REVOKED;
	else if (result != SOFT_CMA_COPIED || offset + length == desc->length)
		soft_cma_mark_done(cma, desc);
	soft_publish(&cma->own->busy, 0);
	if (result == SOFT_CMA_COPIED)
		soft_device.shm->cma_copied_bytes += length;
	if (result == SOFT_CMA_FORBIDDEN)
		soft_publish(&cma->own->can_copy, 0);
	return result;
}

bool soft_cma_probe(struct soft_cma *cma, pid_t pid)
{
	cma->pid = pid;
	cma->probed = true;
	bool copies =
		cma->own == cma->peer || (pid && read_from_peer(cma, NULL, 0, NULL, 0, 0) == 0);

	soft_publish(&cma->own->can_copy, copies);
	return copies;
}

/* ---- descriptors as bytes ------------------------------------------------------------------- */

uint32_t soft_cma_desc_encode(uint8_t *at, const struct soft_cma_desc *desc)
{
	soft_put32(at, desc->slot);
	soft_put32(at + 4, desc->generation);
	for (uint32_t i = 0; i < desc->count; i++) {
		uint8_t *piece = at + SOFT_CMA_DESC_HEAD + i * SOFT_CMA_DESC_PIECE;

		soft_put64(piece, desc->pieces[i].address);
		soft_put64(piece + 8, desc->pieces[i].length);
	}
	return SOFT_CMA_DESC_HEAD + desc->count * SOFT_CMA_DESC_PIECE;
}

bool soft_cma_desc_decode(const uint8_t *at, uint32_t count, uint32_t length,
			  struct soft_cma_desc *desc)
{
	uint32_t left = length;

	if (count == 0 || count > SOFT_CMA_PIECES)
		return false;
	*desc = (struct soft_cma_desc){
		.slot = soft_get32(at),
		.generation = soft_get32(at + 4),
		.count = count,
		.length = length,
	};
	for (uint32_t i = 0; i < count; i++) {
		const uint8_t *piece = at + SOFT_CMA_DESC_HEAD + i * SOFT_CMA_DESC_PIECE;

		desc->pieces[i].address = soft_get64(piece);
		desc->pieces[i].length = soft_get64(piece + 8);
		if (desc->pieces[i].length == 0 || desc->pieces[i].length > left)
			return false;
		left -= (uint32_t)desc->pieces[i].length;
	}
	return left == 0 && desc->slot < SOFT_CMA_SLOTS;
}

/* ---- peers ---------------------------------------------------------------------------------- */

struct soft_cma *soft_cma_next(const struct soft_cma *cma)
{
	struct soft_node *node = cma ? cma->node.next : soft_device.shm->cmas.next;

	return node == &soft_device.shm->cmas ? NULL : soft_container(node, struct soft_cma, node);
}

/* Set up cross-memory attach with a peer. If this fails, `peer->cma` stays NULL and all data goes
 * through the rings. */
void soft_cma_attach(struct soft_shm_peer *peer)
{
	struct soft_cma *cma = malloc(sizeof(*cma));

	if (!cma)
		return;
	if (soft_cma_init(cma, (struct soft_cma_page *)(void *)peer->own_area,
			  (struct soft_cma_page *)(void *)peer->peer_area)) {
		free(cma);
		return;
	}
	peer->cma = cma;
	soft_list_append(&soft_device.shm->cmas, &cma->node);
}

void soft_cma_detach(struct soft_shm_peer *peer)
{
	if (!peer->cma)
		return;
	soft_list_remove(&peer->cma->node);
	soft_cma_end(peer->cma);
	free(peer->cma);
	peer->cma = NULL;
}

void soft_cma_probe_peer(struct soft_shm_peer *peer)
{
	/* A link may be up before the peer has sent its secret's address. */
	if (peer->cma && peer->cma->peer_secret_at && !peer->cma->probed)
		soft_cma_probe(peer->cma, peer->pid);
}
