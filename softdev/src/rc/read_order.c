/* Keep the order of READs and later writes when responses are sent late.
 *
 * Requests execute in PSN order, but the bytes of a READ are copied when its response is sent.
 * Until then, a SEND, a WRITE or an atomic that follows it may change them. The specification
 * allows this (a fence prevents it, IBTA 10.8.3.3), and a repeated READ reads the memory again.
 * Cards nevertheless execute requests in order, and Open MPI 4.1 relies on it. Bytes that are about
 * to be overwritten are therefore copied, for short READs only and up to a limit for each queue
 * pair. The copy is sent only while the key is valid.
 *
 * Responses that are descriptors of memory (link/cma_descriptor.h) are not covered: the requester
 * copies the bytes when it handles the descriptor.
 */
#include <sys/uio.h>

#include "rc.h"

enum { MAX_COPIED_BYTES = 64 * 1024 };

static bool overlaps(const uint8_t *memory, size_t length, const struct iovec *iov, int count)
{
	for (int i = 0; i < count; i++) {
		const uint8_t *other = iov[i].iov_base;

		if (memory < other + iov[i].iov_len && other < memory + length)
			return true;
	}
	return false;
}

/* Copy the data of a queued READ response if `iov`, which is about to be written, overlaps it. The
 * response is left as it is if it is long or memory is short. */
static void copy_response(struct soft_qp *qp, struct soft_response *response,
			  const struct iovec *iov, int count)
{
	struct soft_responder *responder = &qp->responder;
	const uint8_t *memory;

	if (response->opcode != SOFT_READ_DATA || response->copy || !response->length ||
	    response->length > MAX_COPIED_BYTES - responder->copied_bytes)
		return;
	memory = soft_remote_memory(qp, soft_remote_pd(qp, response->srq_num), response->rkey,
				    response->address, response->length, IBV_ACCESS_REMOTE_READ);
	if (!memory || !overlaps(memory, response->length, iov, count))
		return;
	response->copy = malloc(response->length);
	if (!response->copy)
		return;
	memcpy(response->copy, memory, response->length);
	response->copy_length = response->length;
	responder->copied_bytes += response->length;
}

void soft_responder_copy_reads(struct soft_qp *qp, const struct iovec *iov, int count)
{
	struct soft_responder *responder = &qp->responder;

	for (uint32_t i = responder->response_head; i != responder->response_tail; i++)
		copy_response(qp, soft_response_at(qp, i), iov, count);
}

void soft_responder_free_copy(struct soft_responder *responder, struct soft_response *response)
{
	if (response->opcode != SOFT_READ_DATA || !response->copy)
		return;
	free(response->copy);
	response->copy = NULL;
	responder->copied_bytes -= response->copy_length;
}
