/* See cma_descriptor.h. */
#include <sys/uio.h>

#include "cma_descriptor.h"

/* minimum payload in bytes within a process, where one core may do both of the ring's copies */
enum { MIN_WITHIN_PROCESS = 8 * 1024 };

static struct soft_cma *cma_of(const struct soft_link *link)
{
	return soft_shm_path_cma(link->chan.path);
}

/* ---- giving -------------------------------------------------------------------------------- */

uint32_t soft_cma_desc_max(const struct soft_link *link, uint32_t *min_payload)
{
	const struct soft_cma *cma = cma_of(link);

	*min_payload = cma && soft_shm_path_is_self(link->chan.path) ? MIN_WITHIN_PROCESS
								     : SOFT_CMA_DESC_MIN_PAYLOAD;
	/* The memory must not change before the peer has copied it. A UC request completes as soon
	 * as it has been sent. On a link that duplicates or delays frames, a frame may arrive after
	 * its request has completed. */
	return cma && soft_qp_is_reliable(link->qp) && !link->base.is_lossy && soft_cma_is_open(cma)
		       ? SOFT_CMA_FRAME_MAX
		       : 0;
}

/* Returns whether an export is no longer needed although the peer has not marked it as done. The
 * link may be gone, or the request may have completed although its frame was lost. */
static bool is_export_obsolete(const struct soft_cma_export *export, const void *unused)
{
	(void)unused;
	return !export->link ||
	       (!export->is_response && (int32_t)(export->index - export->link->qp->sq.oldest) < 0);
}

bool soft_cma_desc_send(struct soft_link *link, struct soft_tx_packet *out,
			const struct iovec *pieces, int count, uint8_t *at)
{
	soft_assert_locked();
	struct soft_cma *cma = cma_of(link);
	struct soft_cma_desc desc = {.count = (uint32_t)count};
	struct soft_cma_export revoked[SOFT_CMA_SLOTS];

	for (int i = 0; i < count; i++) {
		desc.pieces[i].address = (uintptr_t)pieces[i].iov_base;
		desc.pieces[i].length = pieces[i].iov_len;
		desc.length += (uint32_t)pieces[i].iov_len;
	}
	if (desc.length != out->frame.length || soft_cma_backs_off(cma))
		return false; /* too many pieces, or copying is slower than the ring */
	struct soft_cma_export *export = soft_cma_export_new(cma);

	if (!export && soft_cma_revoke(cma, is_export_obsolete, NULL, revoked))
		export = soft_cma_export_new(cma);
	if (!export)
		return false;
	export->link = link;
	export->index = out->index;
	export->psn = out->frame.psn;
	export->is_response = out->frame.opcode == SOFT_READ_DATA;
	/* The export of a response covers only the part that this frame carries. */
	if (export->is_response) {
		const struct soft_response *response = soft_response_at(link->qp, out->index);

		export->response = *response;
		export->response.address +=
			soft_message_offset(link->qp, out->frame.psn, response->psn);
		export->response.length = out->frame.length;
	}
	desc.slot = export->slot;
	desc.generation = export->generation;
	soft_cma_desc_encode(at, &desc);
	out->frame.pieces = (uint8_t)count;
	soft_device.links->descriptors_sent++;
	return true;
}

/* ---- copying ------------------------------------------------------------------------------- */

/* Refuse the request whose payload could not be copied. The NAK says on which side the memory is
 * missing. */
static void fail_request(struct soft_qp *qp, const struct soft_frame *frame,
			 enum soft_cma_result copy_result)
{
	if (copy_result == SOFT_CMA_UNWRITABLE)
		soft_request_refuse_unwritable(qp, frame);
	else
		soft_responder_fail(qp, SOFT_NAK_REQUESTERS_MEMORY, qp->responder.expected_psn);
}

/* Fail the READ whose response could not be copied. If the export has been revoked, the reason is
 * not known here. If the key was invalidated, the owner's queue pair sends a NAK, which completes
 * the READ. If the owner's queue pair is in error, it does not respond, as on a hardware adapter.
 * The link then ends, and the READ completes after its retry time. */
static void fail_read(struct soft_qp *qp, enum soft_cma_result copy_result)
{
	if (copy_result == SOFT_CMA_REVOKED)
		soft_requester_await_nak(qp);
	else
		soft_send_fail(qp, copy_result == SOFT_CMA_UNWRITABLE ? IBV_WC_LOC_PROT_ERR
								      : IBV_WC_REM_ACCESS_ERR);
}

/* Treat the frame as lost because the kernel no longer allows the copy. The peer detects the loss
 * and sends the payload through the ring. */
static void treat_frame_as_lost(struct soft_link *link)
{
	soft_link_set_lossy(link);
	if (soft_is_request(&link->frame))
		soft_responder_report_gap(link->qp);
	else
		soft_requester_implied_nak(link->qp);
}

/* Discard the rest of the frame whose payload could not be copied, and react to the cause. */
static void handle_copy_failure(struct soft_link *link, enum soft_cma_result copy_result)
{
	link->sink = SOFT_SINK_DISCARD;
	if (copy_result == SOFT_CMA_GONE)
		soft_link_finish(link, ECONNRESET);
	else if (copy_result == SOFT_CMA_FORBIDDEN)
		treat_frame_as_lost(link);
	else if (soft_is_request(&link->frame))
		fail_request(link->qp, &link->frame, copy_result);
	else
		fail_read(link->qp, copy_result);
}

bool soft_cma_desc_allowed(const struct soft_link *link)
{
	switch (link->frame.opcode) {
	case SOFT_SEND:
	case SOFT_WRITE:
	case SOFT_READ_DATA:
		return cma_of(link) && soft_qp_is_reliable(link->qp);
	default:
		return false;
	}
}

bool soft_cma_desc_receive(struct soft_link *link, const uint8_t *bytes)
{
	soft_assert_locked();
	const struct soft_frame *frame = &link->frame;
	struct soft_cma *cma = cma_of(link);
	struct soft_cma_desc desc;
	uint8_t copy[SOFT_CMA_DESC_MAX];

	link->cma_bytes += frame->length;
	if (!soft_cma_desc_allowed(link) || link->cma_bytes >= 2 * SOFT_CMA_FRAME_MAX)
		return false;
	memcpy(copy, bytes, soft_frame_body_size(frame));
	if (!soft_cma_desc_decode(copy, frame->pieces, frame->length, &desc))
		return false;
	if (frame->skip)
		soft_link_payload_consumed(link, frame->skip);
	while (link->remaining && link->base.state == SOFT_LINK_UP) {
		struct iovec iov[SOFT_MAX_SGE];
		uint32_t length =
			link->remaining < SOFT_PLACE_MAX ? link->remaining : SOFT_PLACE_MAX;
		int count = soft_link_map_payload(link, length, iov, SOFT_MAX_SGE);

		if (count == 0) { /* the payload has no destination and is discarded */
			soft_cma_mark_done(cma, &desc);
			break;
		}
		enum soft_cma_result copy_result =
			soft_cma_copy(cma, &desc, link->received, iov, count);

		if (copy_result != SOFT_CMA_COPIED) {
			handle_copy_failure(link, copy_result);
			break;
		}
		uint32_t copied = 0;

		for (int i = 0; i < count; i++)
			copied += (uint32_t)iov[i].iov_len;
		soft_link_payload_consumed(link, copied);
	}
	link->remaining = 0; /* a descriptor has no more bytes, even if the payload is discarded */
	return true;
}

/* ---- taking back --------------------------------------------------------------------------- */

/* Refuse the READ whose response was revoked (IBTA 9.7.4.1.5), unless an earlier request has been
 * refused. A NAK for a later request cannot complete the READ (IBTA 9.7.5.1.2). A queue pair in
 * error sends no NAK (IBTA 10.3.1.7), so the READ fails when the requester's retries are exhausted
 * (IBTA 9.7.6.1.3). */
static void refuse_read(const struct soft_cma_export *export)
{
	struct soft_link *link = export->link;
	struct soft_qp *qp = link ? link->qp : NULL;

	if (!qp || link->base.state != SOFT_LINK_UP ||
	    !soft_psn_before(export->psn, qp->responder.expected_psn))
		return;
	soft_responder_withdraw(qp, qp->responder.response_head, export->psn, &export->response);
}

/* Returns whether the export contains memory of the key `*wanted_key`. */
static bool uses_key(const struct soft_cma_export *export, const void *wanted_key)
{
	uint32_t key = *(const uint32_t *)wanted_key;

	/* Do not access the link or the work request of an obsolete export, because the link may
	 * be gone and the work request may have been reused. */
	if (export->is_response || is_export_obsolete(export, NULL))
		return export->is_response && export->response.rkey == key;
	const struct soft_qp *qp = export->link->qp;
	const struct ibv_sge *sges = soft_send_sges(qp, export->index);

	for (uint32_t i = 0; i < soft_send_at(qp, export->index)->num_sge; i++)
		if (sges[i].lkey == key)
			return true;
	return false;
}

void soft_cma_revoke_key(uint32_t key)
{
	soft_assert_locked();
	struct soft_cma_export revoked[SOFT_CMA_SLOTS];

	for (struct soft_cma *cma = soft_cma_next(NULL); cma; cma = soft_cma_next(cma)) {
		unsigned count = soft_cma_revoke(cma, uses_key, &key, revoked);

		/* Only responses need a NAK from this side. If a request was revoked, the peer
		 * cannot read its payload and sends SOFT_NAK_REQUESTERS_MEMORY. */
		for (unsigned i = 0; i < count; i++)
			if (revoked[i].is_response)
				refuse_read(&revoked[i]);
	}
}

static bool is_request_on_link(const struct soft_cma_export *export, const void *wanted_link)
{
	return export->link == wanted_link && !export->is_response;
}

/* Revoke the exports of all requests that were sent on the link. */
static void revoke_requests(const struct soft_link *link)
{
	struct soft_cma_export revoked[SOFT_CMA_SLOTS];

	for (struct soft_cma *cma = soft_cma_next(NULL); cma; cma = soft_cma_next(cma))
		soft_cma_revoke(cma, is_request_on_link, link, revoked);
}

void soft_cma_flush(const struct soft_qp *qp)
{
	if (soft_link_of(qp))
		revoke_requests(soft_link_of(qp));
}

void soft_cma_forget_link(const struct soft_link *link)
{
	soft_assert_locked();
	revoke_requests(link);
	/* The exports of responses remain, and must not refer to the link. */
	for (struct soft_cma *cma = soft_cma_next(NULL); cma; cma = soft_cma_next(cma)) {
		if (!cma->used_slots)
			continue;
		for (unsigned slot = 0; slot < SOFT_CMA_SLOTS; slot++)
			if (cma->exports[slot].link == link)
				cma->exports[slot].link = NULL;
	}
}
