/* The answer of a READ that waits has the bytes from before the requests behind it.
 *
 * Requests are carried out in the order of their PSNs, but the bytes of a READ are taken when its
 * answer goes out, and until then a SEND, a WRITE or an atomic may have come in that changes them.
 * The specification lets it (IBTA 10.8.3.3: a fence prevents it), since an answer that was lost is
 * read anew; but cards answer in order, and Open MPI 4.1 relies on it.  So what is about to be
 * overwritten is copied: short READs only, and a bounded number of bytes for each queue pair.  The
 * copy goes out only as long as the key works.
 *
 * An answer that is a descriptor of the memory (link/cma_descriptor.h) is no part of this: its bytes
 * are those of the moment when the requester copies them.
 */
#include <sys/uio.h>

#include "rc.h"

enum { MOST_KEPT = 64 * 1024 };

static bool overlaps(const uint8_t *memory, size_t length, const struct iovec *iov, int count)
{
	for (int i = 0; i < count; i++) {
		const uint8_t *other = iov[i].iov_base;

		if (memory < other + iov[i].iov_len && other < memory + length)
			return true;
	}
	return false;
}

static void keep(struct soft_qp *qp, struct soft_response *response, const struct iovec *iov,
		 int count)
{
	struct soft_responder *responder = &qp->responder;
	const uint8_t *memory;

	if (response->opcode != SOFT_READ_DATA || response->kept || !response->length ||
	    response->length > MOST_KEPT - responder->kept)
		return;
	memory = soft_remote_memory(qp, soft_remote_pd(qp, response->srq_num), response->rkey,
				    response->address, response->length, IBV_ACCESS_REMOTE_READ);
	if (!memory || !overlaps(memory, response->length, iov, count))
		return;
	response->kept = malloc(response->length);
	if (!response->kept)
		return;
	memcpy(response->kept, memory, response->length);
	response->kept_length = response->length;
	responder->kept += response->length;
}

void soft_responder_keep_reads(struct soft_qp *qp, const struct iovec *iov, int count)
{
	struct soft_responder *responder = &qp->responder;

	for (uint32_t i = responder->response_head; i != responder->response_tail; i++)
		keep(qp, soft_response_at(qp, i), iov, count);
}

void soft_responder_unkeep(struct soft_responder *responder, struct soft_response *response)
{
	if (response->opcode != SOFT_READ_DATA || !response->kept)
		return;
	free(response->kept);
	response->kept = NULL;
	responder->kept -= response->kept_length;
}
