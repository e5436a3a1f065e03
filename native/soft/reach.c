/* See reach.h.  Grants are in grants.c, this is the side that copies. */
#define _GNU_SOURCE /* process_vm_readv */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/uio.h>

#include "objects.h"
#include "reach.h"

uint64_t soft_reach_copied;

int soft_reach_init(struct soft_reach *reach, struct soft_reach_page *own,
		    struct soft_reach_page *peer, pid_t pid)
{
	memset(reach, 0, sizeof(*reach));
	if (getrandom(reach->secret, sizeof(reach->secret), 0) != sizeof(reach->secret))
		return errno;
	reach->own = own;
	reach->peer = peer;
	reach->pid = pid;
	memcpy(own->secret, reach->secret, sizeof(own->secret));
	own->secret_at = (uintptr_t)reach->secret;
	return 0;
}

int soft_reach_init_self(struct soft_reach *reach)
{
	struct soft_reach_page *page = calloc(1, sizeof(*page));
	int rc = page ? soft_reach_init(reach, page, page, 0) : ENOMEM;

	if (rc) {
		free(page);
		memset(reach, 0, sizeof(*reach));
		return rc;
	}
	page->copies = true;
	return 0;
}

void soft_reach_end(struct soft_reach *reach)
{
	if (reach->own && reach->own == reach->peer)
		free(reach->own);
	/* The secret too: whoever should still copy finds that this is not what it was. */
	memset(reach, 0, sizeof(*reach));
}

/* ---- copying ------------------------------------------------------------------------------- */

static size_t bytes_of(const struct iovec *iov, int count)
{
	size_t bytes = 0;

	for (int i = 0; i < count; i++)
		bytes += iov[i].iov_len;
	return bytes;
}

/* Without the first `skip` bytes; the number that is left. */
static int rest_of(const struct iovec *iov, int count, size_t skip, struct iovec *rest)
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

/* `length` bytes from `offset` of what is referred to. */
static int pieces_of(const struct soft_reference *reference, uint32_t offset, size_t length,
		     struct iovec *from)
{
	int count = 0;

	for (uint32_t i = 0; i < reference->count && length; i++) {
		uint64_t part = reference->pieces[i].length;

		if (offset >= part) {
			offset -= (uint32_t)part;
			continue;
		}
		part -= offset;
		if (part > length)
			part = length;
		from[count++] = (struct iovec){
			.iov_base = (void *)(uintptr_t)(reference->pieces[i].address + offset),
			.iov_len = part,
		};
		length -= part;
		offset = 0;
	}
	return count;
}

/* The number may be another process's by now, or the process have become another program
 * (execve(2)): so each call begins with the secret, which makes it certain whose memory it is, because
 * the kernel looks the process up once in a call. */
static ssize_t read_some(const struct soft_reach *reach, const struct iovec *to, int to_count,
			 const struct iovec *from, int from_count, size_t skip)
{
	uint64_t secret[2], expected[2];
	struct iovec local[SOFT_MAX_SGE + 1] = {{.iov_base = secret, .iov_len = sizeof(secret)}};
	struct iovec remote[SOFT_REACH_PIECES + 1] = {{
		.iov_base = (void *)(uintptr_t)__atomic_load_n(&reach->peer->secret_at,
							       __ATOMIC_RELAXED),
		.iov_len = sizeof(secret),
	}};
	unsigned long local_count = 1u + (unsigned)rest_of(to, to_count, skip, local + 1);
	unsigned long remote_count = 1u + (unsigned)rest_of(from, from_count, skip, remote + 1);
	ssize_t n = process_vm_readv(reach->pid, local, local_count, remote, remote_count, 0);

	/* Nothing at all has been read, not even the secret. */
	if (n < 0)
		return errno == EFAULT ? -ESRCH : -errno;
	for (int i = 0; i < 2; i++)
		expected[i] = __atomic_load_n(&reach->peer->secret[i], __ATOMIC_RELAXED);
	if ((size_t)n < sizeof(secret) || memcmp(secret, expected, sizeof(secret)))
		return -ESRCH;
	return n - (ssize_t)sizeof(secret);
}

static enum soft_reached read_all(const struct soft_reach *reach, const struct iovec *to,
				  int to_count, const struct iovec *from, int from_count)
{
	size_t length = bytes_of(to, to_count), done = 0;

	/* A call ends early at the first page that is not there.  EPERM, ENOSYS and whatever else
	 * the kernel should say: then it shall not be asked again. */
	while (done < length) {
		ssize_t n = read_some(reach, to, to_count, from, from_count, done);

		if (n < 0)
			return n == -ESRCH ? SOFT_REACH_GONE : SOFT_REACH_FORBIDDEN;
		if (n == 0)
			break;
		done += (size_t)n;
	}
	if (done == length)
		return SOFT_REACH_COPIED;
	/* The kernel does not say on which side. */
	for (int i = 0; i < to_count; i++)
		if (soft_pages_fault(to[i].iov_base, to[i].iov_len, true))
			return SOFT_REACH_UNWRITABLE;
	return SOFT_REACH_UNREADABLE;
}

/* Within this process.  The memory may be the same on both sides. */
static void move(const struct iovec *to, const struct iovec *from)
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

static bool is_current(const struct soft_reach *reach, const struct soft_reference *reference)
{
	return __atomic_load_n(&reach->peer->generation[reference->slot], __ATOMIC_RELAXED) ==
	       reference->generation;
}

void soft_reach_done(struct soft_reach *reach, const struct soft_reference *reference)
{
	__atomic_store_n(&reach->own->done[reference->slot], reference->generation,
			 __ATOMIC_RELEASE);
}

enum soft_reached soft_reach_copy(struct soft_reach *reach, const struct soft_reference *reference,
				  uint32_t offset, const struct iovec *to, int count)
{
	struct iovec from[SOFT_REACH_PIECES + 1] = {0};
	size_t length = bytes_of(to, count);
	int from_count = pieces_of(reference, offset, length, from);
	enum soft_reached reached = SOFT_REACH_COPIED;

	__atomic_store_n(&reach->own->busy, reference->slot + 1, __ATOMIC_RELAXED);
	/* Before the generation is looked at: either the owner sees the mark and waits, or we see
	 * that it has taken back. */
	__sync_synchronize();
	if (is_current(reach, reference)) {
		if (reach->pid)
			reached = read_all(reach, to, count, from, from_count);
		else
			move(to, from);
		__sync_synchronize();
	}
	if (!is_current(reach, reference))
		reached = SOFT_REACH_TAKEN_BACK;
	else if (reached != SOFT_REACH_COPIED || offset + length == reference->length)
		soft_reach_done(reach, reference);
	__atomic_store_n(&reach->own->busy, 0, __ATOMIC_RELEASE);
	soft_reach_copied += length;
	if (reached == SOFT_REACH_FORBIDDEN)
		__atomic_store_n(&reach->own->copies, 0, __ATOMIC_RELEASE);
	return reached;
}

bool soft_reach_probe(struct soft_reach *reach)
{
	bool copies = read_some(reach, NULL, 0, NULL, 0, 0) == 0;

	__atomic_store_n(&reach->own->copies, copies, __ATOMIC_RELEASE);
	return copies;
}

/* ---- references as bytes ------------------------------------------------------------------- */

uint32_t soft_reference_encode(uint8_t *at, const struct soft_reference *reference)
{
	soft_put32(at, reference->slot);
	soft_put32(at + 4, reference->generation);
	for (uint32_t i = 0; i < reference->count; i++) {
		uint8_t *piece = at + SOFT_REFERENCE_HEAD + i * SOFT_REFERENCE_PIECE;

		soft_put64(piece, reference->pieces[i].address);
		soft_put64(piece + 8, reference->pieces[i].length);
	}
	return SOFT_REFERENCE_HEAD + reference->count * SOFT_REFERENCE_PIECE;
}

bool soft_reference_decode(const uint8_t *at, uint32_t count, uint32_t length,
			   struct soft_reference *reference)
{
	uint32_t left = length;

	if (count == 0 || count > SOFT_REACH_PIECES)
		return false;
	*reference = (struct soft_reference){
		.slot = soft_take32(at),
		.generation = soft_take32(at + 4),
		.count = count,
		.length = length,
	};
	for (uint32_t i = 0; i < count; i++) {
		const uint8_t *piece = at + SOFT_REFERENCE_HEAD + i * SOFT_REFERENCE_PIECE;

		reference->pieces[i].address = soft_take64(piece);
		reference->pieces[i].length = soft_take64(piece + 8);
		if (reference->pieces[i].length == 0 || reference->pieces[i].length > left)
			return false;
		left -= (uint32_t)reference->pieces[i].length;
	}
	return left == 0 && reference->slot < SOFT_REACH_SLOTS;
}
