/* See cma_descriptor.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "shm/shm_internal.h"
#include "cma_descriptor.h"

/* Within a process, where one copy takes the place of two by the same core. */
enum {
	LEAST_WITHIN = 8 * 1024
};

uint32_t soft_reference_least = 128 * 1024; /* bench_cma.c */
uint64_t soft_references_given;

static struct soft_node reaches = {&reaches, &reaches};

static struct soft_reach *reach_of(const struct soft_link *link)
{
	return link->way.neighbour ? link->way.neighbour->reach : NULL;
}

/* ---- neighbours ---------------------------------------------------------------------------- */

/* Without it everything goes through the rings. */
void soft_references_meet(struct soft_neighbour *neighbour)
{
	struct soft_reach *reach = malloc(sizeof(*reach));

	if (!reach)
		return;
	if (soft_reach_init(reach, (struct soft_reach_page *)(void *)neighbour->own_area,
			    (struct soft_reach_page *)(void *)neighbour->their_area)) {
		free(reach);
		return;
	}
	neighbour->reach = reach;
	soft_list_append(&reaches, &reach->node);
}

void soft_references_part(struct soft_neighbour *neighbour)
{
	if (!neighbour->reach)
		return;
	soft_list_remove(&neighbour->reach->node);
	soft_reach_end(neighbour->reach);
	free(neighbour->reach);
	neighbour->reach = NULL;
}

void soft_references_probe(struct soft_neighbour *neighbour)
{
	if (neighbour->reach && !neighbour->reach->probed)
		soft_reach_probe(neighbour->reach, soft_neighbour_pid(neighbour));
}

/* ---- giving -------------------------------------------------------------------------------- */

uint32_t soft_reference_most(const struct soft_link *link, uint32_t *least)
{
	const struct soft_reach *reach = reach_of(link);

	*least = reach && soft_neighbour_is_self(link->way.neighbour) ? LEAST_WITHIN
								      : soft_reference_least;
	/* A UC queue pair is done with its memory when a frame has been sent; and where frames are
	 * sent again, they shall be the same ones. */
	return reach && link->qp->ibv.qp_type == IBV_QPT_RC && !link->lossy &&
			       soft_reach_is_open(reach)
		       ? SOFT_REFERENCE_MAX
		       : 0;
}

uint32_t soft_frame_share(const struct soft_plan *plan, uint32_t left, bool *refers)
{
	uint32_t most;

	*refers = plan->refers_to && left >= plan->refers_from;
	most = *refers ? plan->refers_to : plan->most;
	return left < most ? left : most;
}

static const struct soft_response *response_at(const struct soft_qp *qp, uint32_t index)
{
	return &qp->responder.responses[index & qp->responder.response_mask];
}

/* It is not needed, but the other side has not said so: the link has gone, or a frame was lost and the
 * request has been answered all the same. */
static bool is_over(const struct soft_grant *grant, const void *unused)
{
	(void)unused;
	return !grant->link ||
	       (!grant->answer && (int32_t)(grant->index - grant->link->qp->sq.oldest) < 0);
}

bool soft_reference_give(struct soft_link *link, struct soft_outgoing *out,
			 const struct iovec *pieces, int count, uint8_t *at)
{
	struct soft_reach *reach = reach_of(link);
	struct soft_reference reference = {.count = (uint32_t)count};
	struct soft_grant lost[SOFT_REACH_SLOTS];

	for (int i = 0; i < count; i++) {
		reference.pieces[i].address = (uintptr_t)pieces[i].iov_base;
		reference.pieces[i].length = pieces[i].iov_len;
		reference.length += (uint32_t)pieces[i].iov_len;
	}
	if (reference.length != out->frame.length || soft_reach_rests(reach))
		return false; /* in too many pieces; or it does not pay */
	struct soft_grant *grant = soft_reach_grant(reach);

	if (!grant && soft_reach_take_back(reach, is_over, NULL, lost))
		grant = soft_reach_grant(reach);
	if (!grant)
		return false;
	grant->link = link;
	grant->index = out->index;
	grant->psn = out->frame.psn;
	grant->answer = out->frame.opcode == SOFT_READ_DATA;
	if (grant->answer)
		grant->rkey = response_at(link->qp, out->index)->rkey;
	reference.slot = grant->slot;
	reference.generation = grant->generation;
	soft_reference_encode(at, &reference);
	out->frame.pieces = (uint8_t)count;
	soft_references_given++;
	return true;
}

/* ---- taking -------------------------------------------------------------------------------- */

static void request_failed(struct soft_qp *qp, const struct soft_frame *frame,
			   enum soft_reached reached)
{
	if (reached == SOFT_REACH_UNWRITABLE)
		soft_request_unwritable(qp, frame);
	else
		soft_responder_fail(qp, SOFT_NAK_REQUESTERS_MEMORY, frame->psn);
}

static void answer_failed(struct soft_qp *qp, enum soft_reached reached)
{
	soft_requester_fail(qp, reached == SOFT_REACH_UNWRITABLE ? IBV_WC_LOC_PROT_ERR
								 : IBV_WC_REM_ACCESS_ERR);
}

/* The kernel has allowed it before, and now does not: as if the frame had been lost.  It will be sent
 * again, and through the ring, because the other side knows that too. */
static void lost(struct soft_link *link)
{
	soft_link_loses(link);
	if (link->frame.opcode < SOFT_ACK)
		soft_responder_missed(link->qp);
	else
		soft_requester_missed(link->qp);
}

static void failed(struct soft_link *link, enum soft_reached reached)
{
	link->sink = SOFT_SINK_DISCARD;
	if (reached == SOFT_REACH_GONE)
		soft_link_finish(link, ECONNRESET);
	else if (reached == SOFT_REACH_FORBIDDEN)
		lost(link);
	else if (link->frame.opcode < SOFT_ACK)
		request_failed(link->qp, &link->frame, reached);
	else
		answer_failed(link->qp, reached);
}

static bool may_refer(const struct soft_link *link)
{
	switch (link->frame.opcode) {
	case SOFT_SEND:
	case SOFT_WRITE:
	case SOFT_READ_DATA:
		return reach_of(link) && link->qp->ibv.qp_type == IBV_QPT_RC;
	default:
		return false;
	}
}

bool soft_reference_take(struct soft_link *link, const uint8_t *bytes)
{
	const struct soft_frame *frame = &link->frame;
	struct soft_reach *reach = reach_of(link);
	struct soft_reference reference;
	uint8_t copy[SOFT_REFERENCE_MOST];

	link->referred += frame->length;
	if (!may_refer(link) || link->referred >= 2 * SOFT_REFERENCE_MAX)
		return false;
	memcpy(copy, bytes, soft_frame_rest(frame));
	if (!soft_reference_decode(copy, frame->pieces, frame->length, &reference))
		return false;
	while (link->left && link->state == SOFT_LINK_UP) {
		struct iovec iov[SOFT_MAX_SGE];
		uint32_t length = link->left < SOFT_FRAME_MAX ? link->left : SOFT_FRAME_MAX;
		int count = soft_link_place(link, length, iov, SOFT_MAX_SGE);

		if (count == 0) {
			soft_reach_done(reach, &reference);
			break;
		}
		enum soft_reached reached =
			soft_reach_copy(reach, &reference, link->taken, iov, count);

		if (reached != SOFT_REACH_COPIED) {
			failed(link, reached);
			break;
		}
		for (length = 0; count; count--)
			length += (uint32_t)iov[count - 1].iov_len;
		soft_link_placed(link, length);
	}
	link->left = 0;
	return true;
}

/* ---- taking back --------------------------------------------------------------------------- */

/* IBTA 9.7.4.1.5: as if the READ had been refused; it is the first one that was not answered. */
static void answer_lost(const struct soft_grant *grant)
{
	struct soft_link *link = grant->link;
	struct soft_qp *qp = link ? link->qp : NULL;

	if (!qp || link->state != SOFT_LINK_UP || qp->responder.failed)
		return;
	qp->responder.response_tail = qp->responder.response_head;
	qp->responder.response_offset = 0;
	soft_responder_fail(qp, SOFT_NAK_REMOTE_ACCESS, grant->psn);
}

static bool opened_by(const struct soft_grant *grant, const void *what)
{
	uint32_t key = *(const uint32_t *)what;

	if (grant->answer || is_over(grant, NULL))
		return grant->answer && grant->rkey == key;
	const struct soft_qp *qp = grant->link->qp;
	const struct ibv_sge *sges = soft_send_sges(qp, grant->index);

	for (uint32_t i = 0; i < soft_send_at(qp, grant->index)->num_sge; i++)
		if (sges[i].lkey == key)
			return true;
	return false;
}

void soft_references_withdraw(uint32_t key)
{
	struct soft_grant lost[SOFT_REACH_SLOTS];

	for (struct soft_node *node = reaches.next; node != &reaches; node = node->next) {
		struct soft_reach *reach = soft_list_entry(node, struct soft_reach, node);
		unsigned count = soft_reach_take_back(reach, opened_by, &key, lost);

		/* Of a request the other side says that it cannot have the memory. */
		for (unsigned i = 0; i < count; i++)
			if (lost[i].answer)
				answer_lost(&lost[i]);
	}
}

static bool request_on_link(const struct soft_grant *grant, const void *what)
{
	return grant->link == what && !grant->answer;
}

static void take_requests_back(const struct soft_link *link)
{
	struct soft_grant lost[SOFT_REACH_SLOTS];

	for (struct soft_node *node = reaches.next; node != &reaches; node = node->next)
		soft_reach_take_back(soft_list_entry(node, struct soft_reach, node),
				     request_on_link, link, lost);
}

void soft_references_flush(const struct soft_qp *qp)
{
	if (qp->link)
		take_requests_back(qp->link);
}

/* Answers that have been given may still be on their way: they stand until their key is withdrawn. */
void soft_references_forget(const struct soft_link *link)
{
	take_requests_back(link);
	for (struct soft_node *node = reaches.next; node != &reaches; node = node->next) {
		struct soft_reach *reach = soft_list_entry(node, struct soft_reach, node);

		for (unsigned slot = 0; slot < SOFT_REACH_SLOTS && reach->used; slot++)
			if (reach->grants[slot].link == link)
				reach->grants[slot].link = NULL;
	}
}
