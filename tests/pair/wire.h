/* A wire in virtual time between two queue pairs of one process: it delays frames, and loses, doubles
 * and reorders them by a seed.
 *
 * The device asks it for room and gives it whole frames, from inside its own calls; `wire_step` gives
 * them to the other side when their time has come.  There are no threads, and nothing waits.
 *
 * Each frame that the wire treats badly is a fault that each side may have to answer with one try
 * again.  The wire makes fewer of them than the side has tries, until the side has completed
 * something (wire_progress): so a request that fails for want of tries is a mistake of the device.
 */
#ifndef AIORDMA_TESTS_PAIR_WIRE_H
#define AIORDMA_TESTS_PAIR_WIRE_H

#define _GNU_SOURCE /* memmem */
#include <stdarg.h>

#include "wire/link.h"
#include "../fuzz/virtual_time.h"
#include "../soft/verbs_side.h"

enum {
	SIDES = 2,
	UNIT = 256, /* the path MTU: all frames of a message but the last have whole units */
	FRAME_MOST = 4 * UNIT,
	BATCH = 8, /* frames that it takes together, at most */
	WINDOW = 16, /* frames under way to one side beyond which it takes no more, at most */
	FLIGHTS = 2 * SIDES * (WINDOW + BATCH), /* and each may be doubled */
	RECORD_MOST = BATCH * (SOFT_FRAME_HEADER + FRAME_MOST),
	LATE_NS = 300000, /* less than any timeout */
	BLOCKED_NS = 100000,
	NS_PER_S = 1000000000,
};

struct flight {
	uint64_t due;
	int to; /* -1: this place is free */
	uint32_t length;
	uint8_t bytes[SOFT_FRAME_HEADER + FRAME_MOST];
};

static struct wire {
	struct side *sides[SIDES];
	struct soft_path paths[SIDES];
	struct soft_link *links[SIDES]; /* of the life of the connection that is now */
	struct flight flights[FLIGHTS];
	uint64_t last_due[SIDES];
	uint64_t blocked_until[SIDES];
	int faults[SIDES], faults_most; /* since its last progress */
	uint64_t fault_count; /* in all */
	int per_mille; /* frames that have a fault */
	int window; /* of this life */
	bool cut; /* nothing arrives any more */
	uint64_t secret; /* eight bytes that no frame may contain; 0: none */
	uint64_t random;
	uint64_t trace_hash;
	bool verbose;
} wire;

/* ---- chance, and the trace ------------------------------------------------------------------- */

static inline uint32_t draw(uint32_t below)
{
	return (uint32_t)(fuzz_next(&wire.random) % below);
}

static inline bool chance(unsigned per_mille)
{
	return draw(1000) < per_mille;
}

/* What happens, with its time: two runs of a seed say the same. */
__attribute__((format(printf, 1, 2))) static inline void note(const char *format, ...)
{
	char line[160];
	va_list arguments;
	int length = snprintf(line, sizeof(line), "%10llu ns  ",
			      (unsigned long long)(fuzz_now_ns - (UINT64_C(1) << 60)));

	va_start(arguments, format);
	length += vsnprintf(line + length, sizeof(line) - (size_t)length, format, arguments);
	va_end(arguments);
	for (int i = 0; i < length; i++)
		wire.trace_hash = (wire.trace_hash ^ (uint8_t)line[i]) * UINT64_C(0x100000001b3);
	if (wire.verbose)
		fprintf(stderr, "%s\n", line);
}

/* ---- frames ---------------------------------------------------------------------------------- */

static int under_way(int to)
{
	int count = 0;

	for (int i = 0; i < FLIGHTS; i++)
		count += wire.flights[i].to == to;
	return count;
}

static void take_off(int to, const uint8_t *bytes, uint32_t length, uint64_t due)
{
	for (int i = 0; i < FLIGHTS; i++) {
		struct flight *flight = &wire.flights[i];

		if (flight->to >= 0)
			continue;
		flight->due = due;
		flight->to = to;
		flight->length = length;
		memcpy(flight->bytes, bytes, length);
		return;
	}
	CHECK(!"a frame too many is under way");
}

/* For a reader, with -v: the trace does not depend on what is in a frame. */
static void tell_frame(const char *what, int side, const uint8_t *bytes, uint32_t length)
{
	struct soft_frame frame;

	note("%c %s %u bytes", "ab"[side], what, length);
	if (wire.verbose && soft_frame_decode(bytes, &frame))
		fprintf(stderr, "%*copcode %u, PSN %u\n", 20, ' ', frame.opcode, frame.psn);
}

static bool may_err(void)
{
	return wire.faults[0] < wire.faults_most && wire.faults[1] < wire.faults_most;
}

static void count_fault(const char *what, int to)
{
	wire.faults[0]++;
	wire.faults[1]++;
	wire.fault_count++;
	note("  %s on the way to %c", what, "ab"[to]);
}

static void transmit(int to, const uint8_t *bytes, uint32_t length, bool is_last)
{
	uint64_t due = fuzz_now_ns + 2000 + draw(4000);

	tell_frame("sends", 1 - to, bytes, length);
	CHECK(!wire.secret || !memmem(bytes, length, &wire.secret, sizeof(wire.secret)));
	if (wire.cut)
		return;
	if (due <= wire.last_due[to])
		due = wire.last_due[to] + 1;
	if (!is_last && may_err() && chance((unsigned)wire.per_mille)) {
		switch (draw(3)) {
		case 0:
			count_fault("lost", to);
			return;
		case 1:
			count_fault("doubled", to);
			take_off(to, bytes, length, due + draw(LATE_NS));
			break;
		default:
			count_fault("late", to);
			take_off(to, bytes, length, due + draw(LATE_NS));
			return;
		}
	}
	wire.last_due[to] = due;
	take_off(to, bytes, length, due);
}

/* ---- as links know it ------------------------------------------------------------------------ */

static int side_of(const struct soft_path *path)
{
	return path == &wire.paths[1];
}

static bool has_room(int from)
{
	return under_way(1 - from) < wire.window && fuzz_now_ns >= wire.blocked_until[from];
}

/* The end of a connection always finds room. */
static ssize_t wire_room(struct soft_path *path, size_t least)
{
	int from = side_of(path);

	if (least > SOFT_HANDSHAKE_SIZE) {
		if (may_err() && chance((unsigned)wire.per_mille / 4)) {
			count_fault("blocked", 1 - from);
			wire.blocked_until[from] = fuzz_now_ns + draw(BLOCKED_NS);
		}
		if (!has_room(from))
			return 0;
	}
	return RECORD_MOST;
}

static void wire_put(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
		     const struct iovec *iov, int count, size_t bytes)
{
	static uint8_t record[RECORD_MOST];
	int side = side_of(path);
	size_t length = 0;

	(void)to;
	(void)from;
	if (kind == SOFT_RECORD_END) { /* DISCONNECT has said it */
		wire.links[side] = NULL;
		return;
	}
	CHECK(bytes <= sizeof(record));
	for (int i = 0; i < count; length += iov[i++].iov_len)
		memcpy(record + length, iov[i].iov_base, iov[i].iov_len);
	for (size_t at = 0, part; at < length; at += part) {
		struct soft_frame frame;

		CHECK(soft_frame_decode(record + at, &frame));
		part = SOFT_FRAME_HEADER + frame.length;
		transmit(1 - side, record + at, (uint32_t)part, frame.opcode == SOFT_DISCONNECT);
	}
}

static void wire_flush(struct soft_deferred *deferred)
{
	(void)deferred;
}

static struct soft_path_calls calls = {
	.name = AIORDMA_WIRE_TCP,
	.record_most = RECORD_MOST,
	.room = wire_room,
	.put = wire_put,
};

/* ---- what the test calls --------------------------------------------------------------------- */

/* Joins the two queue pairs, in RTS; what was under way is gone. */
static void wire_join(bool loses)
{
	calls.frame_most = (1 + draw(FRAME_MOST / UNIT)) * UNIT;
	calls.frames_most = 1 + (int)draw(BATCH);
	wire.window = 3 + (int)draw(WINDOW - 2);
	wire.per_mille = loses && chance(800) ? (int)draw(250) : 0;
	for (int i = 0; i < FLIGHTS; i++)
		wire.flights[i].to = -1;
	soft_lock();
	for (int i = 0; i < SIDES; i++) {
		wire.faults[i] = 0;
		if (!wire.paths[i].calls)
			soft_path_init(&wire.paths[i], &calls, wire_flush);
		wire.blocked_until[i] = wire.last_due[i] = 0;
		soft_qp_await_adoption(soft_qp_of(wire.sides[i]->qp));
		CHECK(wire.links[i] = soft_link_create(SOFT_LINK_CONNECTING));
		CHECK_EQUAL(soft_link_enter(wire.links[i], &wire.paths[i]), 0);
		CHECK_EQUAL(soft_link_up(wire.links[i], soft_qp_of(wire.sides[i]->qp)), 0);
		wire.links[i]->base.loses = loses;
	}
	soft_unlock();
}

static void wire_progress(int side)
{
	wire.faults[side] = 0;
}

/* The link of that side, if it is still the queue pair's. */
static struct soft_link *link_of(int side)
{
	struct soft_link *link = soft_link_of(soft_qp_of(wire.sides[side]->qp));

	return link && link == wire.links[side] && link->base.state == SOFT_LINK_UP ? link : NULL;
}

static struct flight *next_flight(void)
{
	struct flight *next = NULL;

	for (int i = 0; i < FLIGHTS; i++)
		if (wire.flights[i].to >= 0 && (!next || wire.flights[i].due < next->due))
			next = &wire.flights[i];
	return next;
}

/* When something happens by itself; UINT64_MAX: never. */
static uint64_t wire_next(void)
{
	const struct flight *flight = next_flight();
	uint64_t next = flight ? flight->due : UINT64_MAX;

	if (fuzz_alarm_ns && fuzz_alarm_ns < next)
		next = fuzz_alarm_ns;
	for (int i = 0; i < SIDES; i++)
		if (soft_path_waits(&wire.paths[i]) && under_way(1 - i) < wire.window &&
		    wire.blocked_until[i] < next)
			next = wire.blocked_until[i];
	return next < fuzz_now_ns ? fuzz_now_ns : next;
}

/* The first of those things happens. */
static void wire_step(void)
{
	struct flight *flight;

	fuzz_now_ns = wire_next();
	soft_lock();
	if (fuzz_alarm_ns && fuzz_alarm_ns <= fuzz_now_ns) {
		fuzz_alarm_ns = 0;
		soft_timers_run();
	}
	flight = next_flight();
	if (flight && flight->due <= fuzz_now_ns) {
		struct soft_link *link = link_of(flight->to);

		tell_frame("gets", flight->to, flight->bytes, flight->length);
		if (link)
			CHECK(soft_path_take(&wire.paths[flight->to], SOFT_RECORD_DATA,
					     link->chan.id, 0, flight->bytes, flight->length));
		flight->to = -1;
	}
	for (int i = 0; i < SIDES; i++)
		if (soft_path_waits(&wire.paths[i]) && has_room(i))
			soft_path_offer_room(&wire.paths[i]);
	soft_unlock();
}

#endif
