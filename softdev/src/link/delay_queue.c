/* The delay queue. While a fault spec is set, it holds incoming frames and datagrams until they are
 * due.
 *
 * The queue holds whole frames, so it does not depend on the kind of link. It preserves the order
 * of the frames: a delayed frame also delays all frames behind it. Control frames (DISCONNECT,
 * LOSES) are delayed like the others, but never lost or duplicated.
 */

#include "inject/inject.h"
#include "link_internal.h"
#include "ud/ud.h"
#include "trace/trace.h"

struct packet {
	struct packet *next;
	uint64_t due; /* soft_now() time at which to handle the packet; 0 means immediately */
	uint32_t length;
	uint32_t charged_length; /* length including the payload that a descriptor covers */
	uint8_t bytes[];
};

/* Maximum number of bytes in a queue. If a queue exceeds it, the oldest packets are handled early,
 * and new datagrams are dropped. */
#define MAX_QUEUED (64u << 20)

/* Each stream has its own count of occurrences. The number of acknowledgements depends on timing,
 * and must not affect which requests and responses are lost or duplicated. */
enum stream { REQUESTS, RESPONSES, ACKNOWLEDGEMENTS, STREAM_COUNT };

struct soft_delay_queue {
	struct soft_link *link; /* NULL in the datagram queue, and once the link is gone */
	bool busy;
	bool spec_applies; /* whether the spec covers this link; if not, the queue is drained */
	bool will_disconnect;
	bool ended; /* whether the stream has ended */
	int error; /* errno value that ended the stream; 0 after an orderly close */
	uint64_t connection_number;
	uint64_t bytes_received;
	uint64_t packets_seen[STREAM_COUNT];
	uint64_t frame_count; /* frames covered by the spec, except acknowledgements */
	uint64_t message_count; /* messages that required a posted receive */
	uint64_t last_due; /* due time of the last packet */
	uint64_t bytes_queued; /* bytes in the queue */
	struct packet *first, **tail;
	/* the frame being received */
	uint8_t header[SOFT_FRAME_HEADER];
	uint32_t collected;
	struct packet *packet;
	struct soft_timer timer;
};

/* Header that precedes the payload of a queued datagram. */
struct envelope {
	uint32_t qp_num;
	struct soft_datagram datagram;
};

/* ---- packets of a queue -------------------------------------------------------------------- */

static struct packet *new_packet(uint32_t length)
{
	struct packet *packet = malloc(sizeof(*packet) + length);

	if (packet)
		*packet = (struct packet){.length = length, .charged_length = length};
	return packet;
}

static struct packet *pop_first(struct soft_delay_queue *queue)
{
	struct packet *packet = queue->first;

	queue->first = packet->next;
	if (!queue->first)
		queue->tail = &queue->first;
	queue->bytes_queued -= packet->charged_length;
	return packet;
}

static void append(struct soft_delay_queue *queue, struct packet *packet)
{
	packet->next = NULL;
	*queue->tail = packet;
	queue->tail = &packet->next;
	queue->bytes_queued += packet->charged_length;
}

static void clear_queue(struct soft_delay_queue *queue)
{
	soft_timer_stop(&queue->timer);
	while (queue->first)
		free(pop_first(queue));
	free(queue->packet);
	queue->packet = NULL;
}

/* Remove and return the first packet if it is due. Otherwise, return NULL. */
static struct packet *pop_due(struct soft_delay_queue *queue)
{
	struct packet *packet = queue->first;

	return packet && (!packet->due || queue->bytes_queued > MAX_QUEUED ||
			  packet->due <= soft_now())
		       ? pop_first(queue)
		       : NULL;
}

/* ---- faults -------------------------------------------------------------------------------- */

static uint64_t compute_due_time(struct soft_delay_queue *queue, uint32_t length,
				 enum stream stream)
{
	uint64_t due = 0;

	if (soft_faults.rate || soft_faults.delay_ns || soft_faults.jitter_ns)
		due = soft_now();
	if (soft_faults.rate) {
		uint64_t *free_at = &soft_device.links->device_free_at;

		if (*free_at < due)
			*free_at = due;
		*free_at += (uint64_t)((double)length * 1e9 / (double)soft_faults.rate);
		due = *free_at;
	}
	due += soft_faults.delay_ns;
	if (soft_faults.jitter_ns)
		due += (uint64_t)((double)soft_faults.jitter_ns *
				  soft_fault_random(SOFT_FAULT_JITTER, queue->connection_number,
						    stream, queue->packets_seen[stream]));
	if (due < queue->last_due && queue->first)
		due = queue->last_due; /* keep the order */
	queue->last_due = due;
	return due;
}

/* Returns the number of the queue pair that receives the packet, or 0 if unknown. */
static uint32_t qp_num_of(const struct soft_delay_queue *queue, const struct packet *packet)
{
	struct envelope envelope;

	if (queue->link)
		return queue->link->qp ? queue->link->qp->ibv.qp_num : 0;
	memcpy(&envelope, packet->bytes, sizeof(envelope));
	return envelope.qp_num;
}

/* Drop, queue or duplicate a packet, taking ownership of it. Returns false if the duplicate cannot
 * be allocated. */
static bool apply_faults(struct soft_delay_queue *queue, struct packet *packet, enum stream stream)
{
	unsigned kind = stream == REQUESTS ? SOFT_FAULT_REQUESTS : SOFT_FAULT_RESPONSES;
	struct packet *copy = NULL;
	uint64_t draw = ++queue->packets_seen[stream];

	/* Acknowledgements do not advance the frame counter, because the number of acknowledgements
	 * depends on timing. */
	if (soft_faults.frames & kind) {
		uint64_t frame =
			stream == ACKNOWLEDGEMENTS ? queue->frame_count : ++queue->frame_count;

		if (soft_fault_occurs(SOFT_FAULT_LOSS, queue->connection_number, stream, draw,
				      frame)) {
			soft_fault_counts.lost++;
			SOFT_TRACE(fault, "LOSS", qp_num_of(queue, packet), 0);
			free(packet);
			return true;
		}
		if (soft_fault_occurs(SOFT_FAULT_DUPLICATE, queue->connection_number, stream, draw,
				      frame)) {
			copy = new_packet(packet->length);
			if (!copy) {
				free(packet);
				return false;
			}
			copy->charged_length = packet->charged_length;
			memcpy(copy->bytes, packet->bytes, packet->length);
			soft_fault_counts.duplicated++;
			SOFT_TRACE(fault, "DUPLICATE", qp_num_of(queue, packet), 0);
		}
	}
	packet->due = compute_due_time(queue, packet->charged_length, stream);
	soft_fault_counts.delayed += packet->due != 0;
	append(queue, packet);
	if (copy) {
		copy->due = packet->due;
		append(queue, copy);
	}
	return true;
}

/* ---- links --------------------------------------------------------------------------------- */

/* Handle a frame as if it had just arrived on the link. */
static void deliver(struct soft_delay_queue *queue, struct packet *packet)
{
	struct soft_link *link = queue->link;
	bool busy = link->busy;

	link->busy = true;
	soft_link_parse_frames(link, packet->bytes, packet->length);
	if (!busy)
		soft_link_release(link);
}

/* Handle the due packets of a busy queue. */
static void handle_due(struct soft_delay_queue *queue)
{
	struct packet *packet;

	while (queue->link && (packet = pop_due(queue)) != NULL) {
		deliver(queue, packet);
		free(packet);
	}
}

/* Handle the due packets. May free the queue. */
static void run_queue(struct soft_delay_queue *queue)
{
	queue->busy = true;
	handle_due(queue);
	queue->busy = false;
	if (!queue->link) {
		clear_queue(queue);
		free(queue);
	} else if (queue->first) {
		soft_timer_start(&queue->timer, queue->first->due);
	} else if (queue->ended) {
		soft_link_finish(queue->link, queue->error);
	} else if (!queue->spec_applies && !queue->collected && !queue->packet) {
		queue->link->delay_queue = NULL;
		clear_queue(queue);
		free(queue);
	}
}

/* Inject a broken connection into a busy queue after handling the due packets. */
static void disconnect(struct soft_delay_queue *queue)
{
	handle_due(queue);
	if (!queue->link)
		return;
	soft_fault_counts.cut++;
	SOFT_TRACE(fault, "CUT", queue->link->qp ? queue->link->qp->ibv.qp_num : 0, 0);
	soft_link_finish(queue->link, ECONNRESET);
}

static void link_timer_expired(struct soft_timer *timer)
{
	struct soft_delay_queue *queue = soft_container(timer, struct soft_delay_queue, timer);

	queue->busy = true;
	if (queue->will_disconnect && queue->bytes_received >= soft_faults.cut_after)
		disconnect(queue);
	run_queue(queue);
}

/* Apply the fault spec to a complete frame, and queue the frame unless it is lost. */
static void handle_frame(struct soft_delay_queue *queue, struct packet *packet)
{
	uint8_t opcode = packet->bytes[0];

	queue->bytes_received += packet->charged_length;
	if (queue->spec_applies && queue->will_disconnect &&
	    queue->bytes_received >= soft_faults.cut_after) {
		free(packet);
		disconnect(queue);
	} else if (queue->spec_applies && opcode < SOFT_DISCONNECT) {
		if (!apply_faults(queue, packet,
				  opcode < SOFT_ACK    ? REQUESTS
				  : opcode == SOFT_ACK ? ACKNOWLEDGEMENTS
						       : RESPONSES))
			soft_link_finish(queue->link, ENOMEM);
	} else {
		/* DISCONNECT and LOSES are never lost, but they stay behind the frames before
		 * them. */
		packet->due = queue->first ? queue->last_due : 0;
		append(queue, packet);
	}
}

/* Collect received bytes into a frame, and apply the fault spec to the frame once it is complete.
 * Returns the number of bytes consumed, at most the rest of one header or one payload. */
static size_t collect(struct soft_delay_queue *queue, const uint8_t *data, size_t length)
{
	struct soft_frame frame;
	size_t part = length;

	if (!queue->packet) {
		if (part > SOFT_FRAME_HEADER - queue->collected)
			part = SOFT_FRAME_HEADER - queue->collected;
		memcpy(queue->header + queue->collected, data, part);
		queue->collected += (uint32_t)part;
		if (queue->collected < SOFT_FRAME_HEADER)
			return part;
		/* Keep only the header of an invalid frame. Handling that frame ends the link. */
		bool is_valid = soft_frame_decode(queue->header, &frame);

		queue->packet = new_packet(SOFT_FRAME_HEADER +
					   (is_valid ? soft_frame_body_size(&frame) : 0));
		if (!queue->packet) {
			soft_link_finish(queue->link, ENOMEM);
			return part;
		}
		if (is_valid)
			queue->packet->charged_length = SOFT_FRAME_HEADER + frame.length;
		memcpy(queue->packet->bytes, queue->header, SOFT_FRAME_HEADER);
	} else {
		if (part > queue->packet->length - queue->collected)
			part = queue->packet->length - queue->collected;
		memcpy(queue->packet->bytes + queue->collected, data, part);
		queue->collected += (uint32_t)part;
	}
	if (queue->collected == queue->packet->length) {
		struct packet *packet = queue->packet;

		queue->packet = NULL;
		queue->collected = 0;
		handle_frame(queue, packet);
	}
	return part;
}

void soft_delay_input(struct soft_link *link, const uint8_t *data, size_t length)
{
	struct soft_delay_queue *queue = link->delay_queue;

	queue->busy = true;
	/* If the fault spec was set in the middle of a frame, handle the rest of that frame without
	 * faults. */
	while (length && queue->link && (link->remaining || link->header_received)) {
		size_t part = link->remaining ? link->remaining
					      : SOFT_FRAME_HEADER - link->header_received;

		if (part > length)
			part = length;
		soft_link_parse_frames(link, data, part);
		data += part;
		length -= part;
	}
	while (length && queue->link) {
		size_t part = collect(queue, data, length);

		data += part;
		length -= part;
	}
	run_queue(queue);
}

bool soft_delay_postpone_end(struct soft_link *link, int error)
{
	struct soft_delay_queue *queue = link->delay_queue;

	if (!queue || !queue->first)
		return false;
	queue->ended = true;
	queue->error = error;
	link->base.blocked = true; /* output can no longer reach the peer */
	soft_link_detach(link);
	return true;
}

static bool injects_loss(const struct soft_fault_spec *spec)
{
	return spec->schedule[SOFT_FAULT_LOSS].probability > 0 ||
	       spec->schedule[SOFT_FAULT_DUPLICATE].probability > 0;
}

/* Returns whether the fault spec contains any fault that is injected with a delay queue. */
static bool needs_queues(const struct soft_fault_spec *spec)
{
	return injects_loss(spec) || spec->schedule[SOFT_FAULT_RNR].probability > 0 ||
	       spec->schedule[SOFT_FAULT_DISCONNECT].probability > 0 || spec->delay_ns ||
	       spec->jitter_ns || spec->rate;
}

static struct soft_delay_queue *new_queue(struct soft_link *link)
{
	struct soft_delay_queue *queue = calloc(1, sizeof(*queue));

	if (!queue)
		return NULL;
	queue->link = link;
	queue->tail = &queue->first;
	queue->timer.expired = link_timer_expired;
	link->delay_queue = queue;
	return queue;
}

void soft_delay_attach(struct soft_link *link)
{
	const struct soft_fault_spec *spec = &soft_faults;
	struct soft_delay_queue *queue = link->delay_queue;
	bool is_covered = soft_faults_set && needs_queues(spec) &&
			  (!spec->qp_num || spec->qp_num == link->qp->ibv.qp_num) &&
			  soft_fault_applies_to(soft_qp_hca(link->qp)->port_bit);

	if (!is_covered) {
		if (queue) {
			/* Deliver what the queue still holds. */
			queue->spec_applies = queue->will_disconnect = false;
			if (!queue->first) /* let the timer free the empty queue */
				soft_timer_start(&queue->timer, soft_now());
		}
		return;
	}
	if (!queue)
		queue = new_queue(link);
	if (!queue)
		return;
	queue->spec_applies = true;
	queue->connection_number = ++soft_device.links->connections;
	queue->bytes_received = queue->frame_count = queue->message_count = 0;
	memset(queue->packets_seen, 0, sizeof(queue->packets_seen));
	queue->will_disconnect = soft_fault_occurs(
		SOFT_FAULT_DISCONNECT, 0, 0, queue->connection_number, queue->connection_number);
	if (queue->will_disconnect && !spec->cut_after) /* do not wait for the first frame */
		soft_timer_start(&queue->timer, soft_now());
	if (injects_loss(spec))
		soft_link_set_lossy(link);
}

bool soft_delay_detach(struct soft_link *link)
{
	struct soft_delay_queue *queue = link->delay_queue;

	if (!queue)
		return false;
	bool ended = queue->ended;

	link->delay_queue = NULL;
	queue->link = NULL;
	if (!queue->busy) {
		clear_queue(queue);
		free(queue);
	}
	return ended;
}

/* Count a message that requires a posted receive. Returns whether to refuse it with an injected RNR
 * NAK, as if no receive were posted. */
static bool should_refuse(struct soft_qp *qp)
{
	struct soft_delay_queue *queue = soft_link_of(qp)->delay_queue;

	if (!queue || !queue->spec_applies || soft_qp_is_uc(qp))
		return false;
	queue->message_count++;
	if (!soft_fault_occurs(SOFT_FAULT_RNR, queue->connection_number, 0, queue->message_count,
			       queue->message_count))
		return false;
	soft_fault_counts.not_ready++;
	SOFT_TRACE(fault, "RNR", qp->ibv.qp_num, 0);
	return true;
}

/* ---- datagrams ----------------------------------------------------------------------------- */

/* Deliver the queued datagrams that are due. */
static void run_datagrams(void)
{
	struct soft_delay_queue *queue = soft_device.links->datagrams;
	struct packet *packet;

	/* Avoid recursion: handling a packet may cause a response that arrives here. */
	if (queue->busy)
		return;
	queue->busy = true;
	while ((packet = pop_due(queue)) != NULL) {
		struct envelope envelope;

		memcpy(&envelope, packet->bytes, sizeof(envelope));
		struct soft_qp *qp = soft_qp_find(envelope.qp_num);

		if (qp)
			soft_ud_deliver(qp, &envelope.datagram, packet->bytes + sizeof(envelope),
					packet->length - (uint32_t)sizeof(envelope));
		free(packet);
	}
	queue->busy = false;
	if (queue->first)
		soft_timer_start(&queue->timer, queue->first->due);
}

static void datagram_timer_expired(struct soft_timer *timer)
{
	(void)timer;
	run_datagrams();
}

void soft_delay_create(void)
{
	struct soft_delay_queue *queue = soft_alloc_part(sizeof(*queue));

	queue->tail = &queue->first;
	queue->timer.expired = datagram_timer_expired;
	soft_device.links->datagrams = queue;
}

/* Apply the fault spec to a received datagram. Returns true if this queue has taken the datagram,
 * which it delivers later or drops, or false if the fault spec does not cover the datagram. */
static bool intercept_datagram(const struct soft_qp *qp, const struct soft_datagram *datagram,
			       const uint8_t *payload, uint32_t length)
{
	struct envelope envelope = {.qp_num = qp->ibv.qp_num, .datagram = *datagram};

	if (!needs_queues(&soft_faults) || !soft_fault_applies_to(soft_qp_hca(qp)->port_bit) ||
	    (soft_faults.qp_num && soft_faults.qp_num != qp->ibv.qp_num))
		return false;
	struct soft_delay_queue *queue = soft_device.links->datagrams;
	struct packet *packet = queue->bytes_queued > MAX_QUEUED
					? NULL
					: new_packet((uint32_t)sizeof(envelope) + length);

	if (!packet) { /* a datagram may always be lost */
		SOFT_TRACE_DROPPED(.reason = "NO_ROOM", .qp_num = qp->ibv.qp_num,
				   .remote_qpn = datagram->src_qpn, .remote = &datagram->source);
		return true;
	}
	memcpy(packet->bytes, &envelope, sizeof(envelope));
	memcpy(packet->bytes + sizeof(envelope), payload, length);
	apply_faults(queue, packet, REQUESTS);
	run_datagrams();
	return true;
}

/* ---- callbacks ----------------------------------------------------------------------------- */

/* Restart all counts when the fault spec changes, so that a spec injects the same faults each
 * time. */
static void reset_counters(void)
{
	struct soft_links_state *links = soft_device.links;

	links->connections = 0;
	links->device_free_at = 0;
	links->datagrams->frame_count = 0;
	memset(links->datagrams->packets_seen, 0, sizeof(links->datagrams->packets_seen));
}

void soft_delay_stop(void)
{
	clear_queue(soft_device.links->datagrams);
}

static void spec_changed(void)
{
	reset_counters();
	soft_links_fault_spec_changed();
}

const struct soft_fault_hooks soft_delay_hooks = {
	.device_count = soft_hca_count,
	.spec_changed = spec_changed,
	.should_refuse = should_refuse,
	.intercept_datagram = intercept_datagram,
};
