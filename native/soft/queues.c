/* The rings behind a queue pair: all memory that its work requests will ever need, made at once. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "objects.h"

/* Slots for `count` requests: a power of two, because the indices count up and wrap as 32 bits. */
static uint32_t slots_for(uint32_t count)
{
	uint32_t slots = 1;

	while (slots < count)
		slots *= 2;
	return slots;
}

int soft_queues_create(struct soft_qp *qp)
{
	uint32_t sends = slots_for(qp->cap.max_send_wr);
	uint32_t receives = slots_for(qp->cap.max_recv_wr);

	qp->sq.mask = sends - 1;
	qp->rq.mask = receives - 1;
	qp->sq.slots = calloc(sends, sizeof(*qp->sq.slots));
	qp->sq.sges = calloc((size_t)sends * qp->cap.max_send_sge + 1, sizeof(*qp->sq.sges));
	qp->sq.inline_data = malloc((size_t)sends * qp->cap.max_inline_data + 1);
	qp->rq.slots = calloc(receives, sizeof(*qp->rq.slots));
	qp->rq.sges = calloc((size_t)receives * qp->cap.max_recv_sge + 1, sizeof(*qp->rq.sges));
	if (qp->sq.slots && qp->sq.sges && qp->sq.inline_data && qp->rq.slots && qp->rq.sges)
		return 0;
	soft_queues_destroy(qp);
	return ENOMEM;
}

void soft_queues_destroy(struct soft_qp *qp)
{
	free(qp->sq.slots);
	free(qp->sq.sges);
	free(qp->sq.inline_data);
	free(qp->rq.slots);
	free(qp->rq.sges);
	free(qp->responder.responses);
}

/* RESET: what was posted is forgotten without completions (IBTA 10.3.1.1). */
void soft_queues_reset(struct soft_qp *qp)
{
	qp->sq.oldest = qp->sq.next = qp->sq.next_offset = qp->sq.tail = qp->sq.reads = 0;
	qp->rq.head = qp->rq.tail = 0;
	free(qp->responder.responses);
	memset(&qp->responder, 0, sizeof(qp->responder));
}
