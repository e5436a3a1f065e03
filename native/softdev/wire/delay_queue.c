/* The way that frames and datagrams take before they are taken in, when there is a plan of faults.
 *
 * It begins where whole frames are known, so it is the same for every wire.  What belongs together
 * keeps its order: a frame that is late makes those behind it late.  What a stream says of itself
 * (DISCONNECT, LOSSY) comes late with the rest, but is neither lost nor doubled.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "inject/inject.h"
#include "link.h"
#include "trace/trace.h"

struct packet {
	struct packet *next;
	uint64_t due; /* of soft_now(); 0: at once */
	uint32_t length;
	uint32_t weight; /* the same, but with what it refers to */
	uint8_t bytes[];
};

/* Bytes that wait in one line: beyond this the oldest are taken in early, datagrams dropped. */
#define LINE_MOST (64u << 20)

/* Occurrences are counted apart: how many acknowledgements come depends on who is quicker. */
enum stream {
	REQUESTS,
	ANSWERS,
	ACKNOWLEDGEMENTS,
	STREAMS
};

struct soft_fault_line {
	struct soft_link *link; /* NULL: gone; of datagrams there is one line, without a link */
	bool busy;
	bool judged; /* by the plan; else it only brings to its end what is under way */
	bool doomed;
	bool ended; /* no more is coming... */
	int error;  /* ...for this reason */
	uint64_t number; /* of the connection */
	uint64_t input;  /* bytes so far */
	uint64_t seen[STREAMS];
	uint64_t frames; /* that the plan means */
	uint64_t messages; /* that needed a receive */
	uint64_t due;    /* of the last one */
	uint64_t waiting; /* bytes */
	struct packet *first, **last;
	/* of the frame that is coming in */
	uint8_t header[SOFT_FRAME_HEADER];
	uint32_t have;
	struct packet *packet;
	struct soft_timer timer;
};

/* In front of a datagram's payload. */
struct envelope {
	uint32_t qp_num;
	struct soft_datagram datagram;
};

static uint64_t connections;    /* since there is a plan */
static uint64_t device_free_at; /* with a rate: when it has taken in all that came before */

static void datagrams_due(struct soft_timer *timer);

static struct soft_fault_line datagrams = {.last = &datagrams.first,
					   .timer.expired = datagrams_due};

/* ---- lines --------------------------------------------------------------------------------- */

static struct packet *new_packet(uint32_t length)
{
	struct packet *packet = malloc(sizeof(*packet) + length);

	if (packet)
		*packet = (struct packet){.length = length, .weight = length};
	return packet;
}

static struct packet *take_first(struct soft_fault_line *line)
{
	struct packet *packet = line->first;

	line->first = packet->next;
	if (!line->first)
		line->last = &line->first;
	line->waiting -= packet->weight;
	return packet;
}

static void append(struct soft_fault_line *line, struct packet *packet)
{
	packet->next = NULL;
	*line->last = packet;
	line->last = &packet->next;
	line->waiting += packet->weight;
}

static void empty(struct soft_fault_line *line)
{
	soft_timer_stop(&line->timer);
	while (line->first)
		free(take_first(line));
	free(line->packet);
	line->packet = NULL;
}

/* The first one, if it is time to take it in. */
static struct packet *take_due_one(struct soft_fault_line *line)
{
	struct packet *packet = line->first;

	return packet && (!packet->due || line->waiting > LINE_MOST || packet->due <= soft_now())
		       ? take_first(line)
		       : NULL;
}

/* ---- judging ------------------------------------------------------------------------------- */

static uint64_t due_at(struct soft_fault_line *line, uint32_t length, enum stream stream)
{
	uint64_t due = 0;

	if (soft_faults.rate || soft_faults.delay_ns || soft_faults.jitter_ns)
		due = soft_now();
	if (soft_faults.rate) {
		if (device_free_at < due)
			device_free_at = due;
		device_free_at += (uint64_t)((double)length * 1e9 / (double)soft_faults.rate);
		due = device_free_at;
	}
	due += soft_faults.delay_ns;
	if (soft_faults.jitter_ns)
		due += (uint64_t)((double)soft_faults.jitter_ns *
				  soft_fault_number(SOFT_FAULT_JITTER, line->number, stream,
						    line->seen[stream]));
	if (due < line->due && line->first)
		due = line->due; /* the order is kept */
	line->due = due;
	return due;
}

/* Whose it is that comes in here. */
static uint32_t qp_num_of(const struct soft_fault_line *line, const struct packet *packet)
{
	struct envelope envelope;

	if (line->link)
		return line->link->qp ? line->link->qp->ibv.qp_num : 0;
	memcpy(&envelope, packet->bytes, sizeof(envelope));
	return envelope.qp_num;
}

/* Takes the packet; false: there is no memory for its double. */
static bool judge(struct soft_fault_line *line, struct packet *packet, enum stream stream)
{
	unsigned meant = stream == REQUESTS ? SOFT_FAULT_REQUESTS : SOFT_FAULT_ANSWERS;
	struct packet *copy = NULL;
	uint64_t draw = ++line->seen[stream];

	/* An acknowledgement counts for the draws of its own stream alone. */
	if (soft_faults.frames & meant) {
		uint64_t frame = stream == ACKNOWLEDGEMENTS ? line->frames : ++line->frames;

		if (soft_fault_strikes(SOFT_FAULT_LOSS, line->number, stream, draw, frame)) {
			soft_fault_counts.lost++;
			SOFT_TRACE(fault, "LOSS", qp_num_of(line, packet), 0);
			free(packet);
			return true;
		}
		if (soft_fault_strikes(SOFT_FAULT_DUPLICATE, line->number, stream, draw, frame)) {
			copy = new_packet(packet->length);
			if (!copy) {
				free(packet);
				return false;
			}
			copy->weight = packet->weight;
			memcpy(copy->bytes, packet->bytes, packet->length);
			soft_fault_counts.duplicated++;
			SOFT_TRACE(fault, "DUPLICATE", qp_num_of(line, packet), 0);
		}
	}
	packet->due = due_at(line, packet->weight, stream);
	soft_fault_counts.delayed += packet->due != 0;
	append(line, packet);
	if (copy) {
		copy->due = packet->due;
		append(line, copy);
	}
	return true;
}

/* ---- of a link ----------------------------------------------------------------------------- */

static void deliver(struct soft_fault_line *line, struct packet *packet)
{
	struct soft_link *link = line->link;
	bool busy = link->busy;

	link->busy = true;
	soft_link_frames(link, packet->bytes, packet->length);
	if (!busy)
		soft_link_release(link);
}

/* What is due is taken in, by a busy line. */
static void take_due(struct soft_fault_line *line)
{
	struct packet *packet;

	while (line->link && (packet = take_due_one(line)) != NULL) {
		deliver(line, packet);
		free(packet);
	}
}

/* The line may be gone after this. */
static void run(struct soft_fault_line *line)
{
	line->busy = true;
	take_due(line);
	line->busy = false;
	if (!line->link) {
		empty(line);
		free(line);
	} else if (line->first) {
		soft_timer_start(&line->timer, line->first->due);
	} else if (line->ended) {
		soft_link_finish(line->link, line->error);
	} else if (!line->judged && !line->have && !line->packet) {
		line->link->line = NULL;
		empty(line);
		free(line);
	}
}

/* By a busy line: what has come before is not undone. */
static void cut(struct soft_fault_line *line)
{
	take_due(line);
	if (!line->link)
		return;
	soft_fault_counts.cut++;
	SOFT_TRACE(fault, "CUT", line->link->qp ? line->link->qp->ibv.qp_num : 0, 0);
	soft_link_finish(line->link, ECONNRESET);
}

static void link_due(struct soft_timer *timer)
{
	struct soft_fault_line *line = soft_container(timer, struct soft_fault_line, timer);

	line->busy = true;
	if (line->doomed && line->input >= soft_faults.cut_after)
		cut(line);
	run(line);
}

/* A whole frame. */
static void arrived(struct soft_fault_line *line, struct packet *packet)
{
	uint8_t opcode = packet->bytes[0];

	line->input += packet->weight;
	if (line->judged && line->doomed && line->input >= soft_faults.cut_after) {
		free(packet);
		cut(line);
	} else if (line->judged && opcode < SOFT_DISCONNECT) {
		if (!judge(line, packet,
			   opcode < SOFT_ACK    ? REQUESTS
			   : opcode == SOFT_ACK ? ACKNOWLEDGEMENTS
						: ANSWERS))
			soft_link_finish(line->link, ENOMEM);
	} else {
		packet->due = line->first ? line->due : 0;
		append(line, packet);
	}
}

static size_t collect(struct soft_fault_line *line, const uint8_t *data, size_t length)
{
	struct soft_frame frame;
	size_t part = length;

	if (!line->packet) {
		if (part > SOFT_FRAME_HEADER - line->have)
			part = SOFT_FRAME_HEADER - line->have;
		memcpy(line->header + line->have, data, part);
		line->have += (uint32_t)part;
		if (line->have < SOFT_FRAME_HEADER)
			return part;
		/* What is no frame has no payload either, and ends the link when it is taken in. */
		bool whole = soft_frame_decode(line->header, &frame);

		line->packet =
			new_packet(SOFT_FRAME_HEADER + (whole ? soft_frame_rest(&frame) : 0));
		if (!line->packet) {
			soft_link_finish(line->link, ENOMEM);
			return part;
		}
		if (whole)
			line->packet->weight = SOFT_FRAME_HEADER + frame.length;
		memcpy(line->packet->bytes, line->header, SOFT_FRAME_HEADER);
	} else {
		if (part > line->packet->length - line->have)
			part = line->packet->length - line->have;
		memcpy(line->packet->bytes + line->have, data, part);
		line->have += (uint32_t)part;
	}
	if (line->have == line->packet->length) {
		struct packet *packet = line->packet;

		line->packet = NULL;
		line->have = 0;
		arrived(line, packet);
	}
	return part;
}

void soft_fault_input(struct soft_link *link, const uint8_t *data, size_t length)
{
	struct soft_fault_line *line = link->line;

	line->busy = true;
	/* The plan came in the middle of a frame. */
	while (length && line->link && (link->left || link->header_have)) {
		size_t part = link->left ? link->left : SOFT_FRAME_HEADER - link->header_have;

		if (part > length)
			part = length;
		soft_link_frames(link, data, part);
		data += part;
		length -= part;
	}
	while (length && line->link) {
		size_t part = collect(line, data, length);

		data += part;
		length -= part;
	}
	run(line);
}

bool soft_fault_outlives(struct soft_link *link, int error)
{
	struct soft_fault_line *line = link->line;

	if (!line || !line->first)
		return false;
	line->ended = true;
	line->error = error;
	link->blocked = true; /* nobody would hear it */
	soft_link_close_wires(link);
	return true;
}

static bool wants_lines(const struct soft_fault_plan *plan)
{
	return plan->when[SOFT_FAULT_LOSS].probability > 0 ||
	       plan->when[SOFT_FAULT_DUPLICATE].probability > 0 ||
	       plan->when[SOFT_FAULT_RNR].probability > 0 ||
	       plan->when[SOFT_FAULT_CUT].probability > 0 || plan->delay_ns || plan->jitter_ns ||
	       plan->rate;
}

static bool makes_lossy(const struct soft_fault_plan *plan)
{
	return plan->when[SOFT_FAULT_LOSS].probability > 0 ||
	       plan->when[SOFT_FAULT_DUPLICATE].probability > 0;
}

static struct soft_fault_line *new_line(struct soft_link *link)
{
	struct soft_fault_line *line = calloc(1, sizeof(*line));

	if (!line)
		return NULL;
	line->link = link;
	line->last = &line->first;
	line->timer.expired = link_due;
	link->line = line;
	return line;
}

void soft_fault_attach(struct soft_link *link)
{
	const struct soft_fault_plan *plan = &soft_faults;
	struct soft_fault_line *line = link->line;
	bool wanted = soft_faults_set && wants_lines(plan) &&
		      (!plan->qp_num || plan->qp_num == link->qp->ibv.qp_num);

	if (!wanted) {
		if (line) {
			line->judged = line->doomed = false;
			if (!line->first) /* where nothing else is under way that it could end */
				soft_timer_start(&line->timer, soft_now());
		}
		return;
	}
	if (!line)
		line = new_line(link);
	if (!line)
		return;
	line->judged = true;
	line->number = ++connections;
	line->input = line->frames = line->messages = 0;
	memset(line->seen, 0, sizeof(line->seen));
	line->doomed = soft_fault_strikes(SOFT_FAULT_CUT, 0, 0, line->number, line->number);
	if (line->doomed && !plan->cut_after)
		soft_timer_start(&line->timer, soft_now());
	if (makes_lossy(plan))
		soft_link_loses(link);
}

bool soft_fault_detach(struct soft_link *link)
{
	struct soft_fault_line *line = link->line;

	if (!line)
		return false;
	bool ended = line->ended;

	link->line = NULL;
	line->link = NULL;
	if (!line->busy) {
		empty(line);
		free(line);
	}
	return ended;
}

bool soft_fault_refuses(struct soft_qp *qp)
{
	struct soft_fault_line *line = qp->link->line;

	if (!line || !line->judged || soft_qp_is_uc(qp))
		return false;
	line->messages++;
	if (!soft_fault_strikes(SOFT_FAULT_RNR, line->number, 0, line->messages, line->messages))
		return false;
	soft_fault_counts.not_ready++;
	SOFT_TRACE(fault, "RNR", qp->ibv.qp_num, 0);
	return true;
}

/* ---- of datagrams -------------------------------------------------------------------------- */

static void run_datagrams(void)
{
	struct packet *packet;

	/* What is received may be answered, and comes in here again. */
	if (datagrams.busy)
		return;
	datagrams.busy = true;
	while ((packet = take_due_one(&datagrams)) != NULL) {
		struct envelope envelope;

		memcpy(&envelope, packet->bytes, sizeof(envelope));
		struct soft_qp *qp = soft_qp_find(envelope.qp_num);

		if (qp)
			soft_ud_take(qp, &envelope.datagram, packet->bytes + sizeof(envelope),
				     packet->length - (uint32_t)sizeof(envelope));
		free(packet);
	}
	datagrams.busy = false;
	if (datagrams.first)
		soft_timer_start(&datagrams.timer, datagrams.first->due);
}

static void datagrams_due(struct soft_timer *timer)
{
	(void)timer;
	run_datagrams();
}

bool soft_fault_datagram(const struct soft_qp *qp, const struct soft_datagram *datagram,
			 const uint8_t *payload, uint32_t length)
{
	struct envelope envelope = {.qp_num = qp->ibv.qp_num, .datagram = *datagram};

	if (!wants_lines(&soft_faults) ||
	    (soft_faults.qp_num && soft_faults.qp_num != qp->ibv.qp_num))
		return false;
	struct packet *packet = datagrams.waiting > LINE_MOST
					? NULL
					: new_packet((uint32_t)sizeof(envelope) + length);

	if (!packet)
		return true; /* one may always get lost */
	memcpy(packet->bytes, &envelope, sizeof(envelope));
	memcpy(packet->bytes + sizeof(envelope), payload, length);
	judge(&datagrams, packet, REQUESTS);
	run_datagrams();
	return true;
}

/* ---- the process --------------------------------------------------------------------------- */

void soft_faults_begin(void)
{
	connections = 0;
	device_free_at = 0;
	datagrams.frames = 0;
	memset(datagrams.seen, 0, sizeof(datagrams.seen));
}

void soft_faults_forget(void)
{
	empty(&datagrams);
}
