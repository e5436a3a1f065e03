/* Two hosts of one process, each with an engine of its own, and a wire between them in virtual time: it
 * delays frames, and loses, doubles and reorders them by a seed.
 *
 * The wire is a path of each engine.  An engine asks it for room and gives it records, from inside its
 * own calls; `wire_step` gives their frames to the other host when their time has come.  There are no
 * threads, and nothing waits.  Before a call into the device its host is entered (`enter`).
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
	FLIGHTS = 4 * SIDES * (WINDOW + BATCH), /* and each may be doubled; and control records */
	RECORD_MOST = BATCH * (SOFT_FRAME_HEADER + FRAME_MOST),
	LATE_NS = 300000, /* less than any timeout */
	BLOCKED_NS = 100000,
	NS_PER_S = 1000000000,
	BOOTS = 8,
};

#define HELD (UINT64_C(1) << 63) /* until the wire is healed */

struct flight {
	uint64_t due;
	int to; /* -1: this place is free */
	enum soft_record_kind kind;
	uint32_t to_chan, from_chan, length;
	uint8_t bytes[SOFT_FRAME_HEADER + FRAME_MOST];
};

static struct wire {
	struct host {
		struct soft_device device; /* while another one is entered */
		uint64_t alarm_ns;
		struct soft_path path; /* to the other one */
	} hosts[SIDES];
	int entered;
	bool swapped; /* the ports: the one with the smaller number connects first */
	struct {
		struct soft_device device;
		struct soft_path path;
	} dead[BOOTS]; /* which the hosts had before */
	int boots;
	struct flight flights[FLIGHTS];
	uint64_t last_due[SIDES];
	uint64_t blocked_until[SIDES];
	int faults[SIDES], faults_most; /* since its last progress */
	uint64_t fault_count; /* in all */
	int per_mille; /* frames that have a fault */
	int window;
	uint64_t ns_per_byte;
	bool cut; /* DATA gets lost, other records wait (wire_heal) */
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

/* ---- hosts ----------------------------------------------------------------------------------- */

static ssize_t wire_room(struct soft_path *path, size_t least);
static int wire_put(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
		    const struct iovec *iov, const struct soft_record_end *ends, int count);

static struct soft_path_calls calls = {
	.name = AIORDMA_WIRE_NONE, /* of those that applications know */
	.record_most = RECORD_MOST,
	.room = wire_room,
	.put = wire_put,
};

/* Nothing here breaks a path. */
static void wire_flush(struct soft_deferred *deferred)
{
	CHECK_EQUAL(soft_container(deferred, struct soft_path, flush)->broken, 0);
}

static void enter(int host)
{
	if (host == wire.entered)
		return;
	wire.hosts[wire.entered].device = soft_device;
	wire.hosts[wire.entered].alarm_ns = fuzz_alarm_ns;
	wire.entered = host;
	soft_device = wire.hosts[host].device;
	fuzz_alarm_ns = wire.hosts[host].alarm_ns;
}

static uint16_t port_of_host(int host)
{
	return (uint16_t)(FIRST_PORT + (host ^ wire.swapped));
}

static struct soft_path *path_to(uint16_t port)
{
	return port == port_of_host(1 - wire.entered) ? &wire.hosts[wire.entered].path : NULL;
}

static void renew(struct soft_path *path)
{
	*path = (struct soft_path){.ports = 1}; /* of embedded0, here and there */
	soft_path_init(path, &calls, wire_flush);
}

/* With an engine and a path that know nothing of what was before. */
static void boot(int host)
{
	const struct soft_platform *platform = soft_device.platform;

	enter(host);
	CHECK(wire.boots < BOOTS);
	wire.dead[wire.boots].device = soft_device;
	wire.dead[wire.boots++].path = wire.hosts[host].path;
	soft_device = (struct soft_device){.platform = platform};
	fuzz_alarm_ns = 0;
	soft_device_make();
	soft_device.wire->port = port_of_host(host);
	soft_device.paths->simulated = path_to;
	renew(&wire.hosts[host].path);
}

/* ---- frames ---------------------------------------------------------------------------------- */

static int under_way(int to)
{
	int count = 0;

	for (int i = 0; i < FLIGHTS; i++)
		count += wire.flights[i].to == to;
	return count;
}

static void take_off(struct flight what, const uint8_t *bytes, uint64_t due)
{
	for (int i = 0; i < FLIGHTS; i++) {
		struct flight *flight = &wire.flights[i];

		if (flight->to >= 0)
			continue;
		*flight = what;
		flight->due = due;
		memcpy(flight->bytes, bytes, what.length);
		return;
	}
	CHECK(!"a frame too many is under way");
}

/* For a reader, with -v: the trace does not depend on what is in a frame. */
static void tell_frame(const char *what, int host, const struct flight *flight,
		       const uint8_t *bytes)
{
	struct soft_frame frame;

	note("%c %s %u bytes", "ab"[host], what, flight->length);
	if (wire.verbose && flight->kind != SOFT_RECORD_DATA)
		fprintf(stderr, "%*crecord %d\n", 20, ' ', flight->kind);
	else if (wire.verbose && soft_frame_decode(bytes, &frame))
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

/* `reliable`: what the hosts' kernels would send again until it arrives, and in order. */
static void transmit(struct flight what, const uint8_t *bytes, bool reliable)
{
	uint64_t due = fuzz_now_ns + 2000 + draw(4000);

	tell_frame("sends", 1 - what.to, &what, bytes);
	CHECK(!wire.secret || !memmem(bytes, what.length, &wire.secret, sizeof(wire.secret)));
	if (wire.cut && what.kind == SOFT_RECORD_DATA)
		return;
	if (due <= wire.last_due[what.to])
		due = wire.last_due[what.to] + 1;
	due += what.length * wire.ns_per_byte;
	if (!reliable && may_err() && chance((unsigned)wire.per_mille)) {
		switch (draw(3)) {
		case 0:
			count_fault("lost", what.to);
			return;
		case 1:
			count_fault("doubled", what.to);
			take_off(what, bytes, due + draw(LATE_NS));
			break;
		default:
			count_fault("late", what.to);
			take_off(what, bytes, due + draw(LATE_NS));
			return;
		}
	}
	wire.last_due[what.to] = due;
	take_off(what, bytes, due | (wire.cut ? HELD : 0));
}

/* ---- as engines know it ---------------------------------------------------------------------- */

static bool has_room(int from)
{
	return under_way(1 - from) < wire.window && fuzz_now_ns >= wire.blocked_until[from];
}

/* The end of a connection always finds room. */
static ssize_t wire_room(struct soft_path *path, size_t least)
{
	int from = wire.entered;

	(void)path;
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

static int wire_put(struct soft_path *path, enum soft_record_kind kind, uint32_t to, uint32_t from,
		    const struct iovec *iov, const struct soft_record_end *ends, int count)
{
	static uint8_t record[RECORD_MOST];
	struct flight what = {
		.to = 1 - wire.entered, .kind = kind, .to_chan = to, .from_chan = from};
	size_t length = 0;

	(void)path;
	CHECK(count == 1 && ends[0].bytes <= sizeof(record));
	for (int i = 0; i < ends[0].iovecs; length += iov[i++].iov_len)
		memcpy(record + length, iov[i].iov_base, iov[i].iov_len);
	what.length = (uint32_t)length;
	if (kind != SOFT_RECORD_DATA)
		transmit(what, record, true);
	for (size_t at = 0; kind == SOFT_RECORD_DATA && at < length; at += what.length) {
		struct soft_frame frame;

		CHECK(soft_frame_decode(record + at, &frame));
		what.length = SOFT_FRAME_HEADER + frame.length;
		transmit(what, record + at, frame.opcode == SOFT_DISCONNECT);
	}
	return 1;
}

/* ---- what the test calls --------------------------------------------------------------------- */

/* Another wire, for what is sent from now on. */
static void wire_vary(bool loses)
{
	calls.frame_most = (1 + draw(FRAME_MOST / UNIT)) * UNIT;
	calls.frames_most = 1 + (int)draw(BATCH);
	calls.loses = loses;
	wire.window = 3 + (int)draw(WINDOW - 2);
	wire.ns_per_byte = draw(4);
	wire.per_mille = loses && chance(800) ? (int)draw(250) : 0;
	wire.faults[0] = wire.faults[1] = 0;
}

static void wire_begin(void)
{
	for (int i = 0; i < FLIGHTS; i++)
		wire.flights[i].to = -1;
	wire.swapped = chance(500);
	for (int i = 0; i < SIDES; i++)
		boot(i);
}

/* The host begins anew, and its kernel says so, or not. */
static void die(int host, bool told)
{
	struct soft_path *path = &wire.hosts[1 - host].path;

	boot(host);
	if (!told)
		return;
	enter(1 - host);
	soft_lock();
	soft_path_finish(path, ECONNRESET, -1);
	renew(path);
	soft_unlock();
}

static void wire_heal(void)
{
	wire.cut = false;
	for (int i = 0; i < FLIGHTS; i++)
		wire.flights[i].due &= ~HELD;
}

static inline void wire_progress(int side)
{
	wire.faults[side] = 0;
}

static bool is_up(const struct side *side)
{
	const struct soft_link *link = soft_link_of(soft_qp_of(side->qp));

	return link && link->base.state == SOFT_LINK_UP;
}

static struct flight *next_flight(void)
{
	struct flight *next = NULL;

	for (int i = 0; i < FLIGHTS; i++)
		if (wire.flights[i].to >= 0 && !(wire.flights[i].due & HELD) &&
		    (!next || wire.flights[i].due < next->due))
			next = &wire.flights[i];
	return next;
}

static uint64_t *alarm_of(int host)
{
	return host == wire.entered ? &fuzz_alarm_ns : &wire.hosts[host].alarm_ns;
}

/* When something happens by itself; UINT64_MAX: never. */
static uint64_t wire_next(void)
{
	const struct flight *flight = next_flight();
	uint64_t next = flight ? flight->due : UINT64_MAX;

	for (int i = 0; i < SIDES; i++) {
		if (*alarm_of(i) && *alarm_of(i) < next)
			next = *alarm_of(i);
		if (soft_path_waits(&wire.hosts[i].path) && under_way(1 - i) < wire.window &&
		    wire.blocked_until[i] < next)
			next = wire.blocked_until[i];
	}
	return next < fuzz_now_ns ? fuzz_now_ns : next;
}

static void step_of(int host, struct flight *flight)
{
	struct soft_path *path = &wire.hosts[host].path;

	enter(host);
	soft_lock();
	if (fuzz_alarm_ns && fuzz_alarm_ns <= fuzz_now_ns) {
		fuzz_alarm_ns = 0;
		soft_timers_run();
	}
	if (flight) {
		tell_frame("gets", host, flight, flight->bytes);
		CHECK(soft_path_take(path, flight->kind, flight->to_chan, flight->from_chan,
				     flight->bytes, flight->length));
		flight->to = -1;
	}
	if (soft_path_waits(path) && has_room(host))
		soft_path_offer_room(path);
	soft_unlock();
}

/* The first of those things happens. */
static void wire_step(void)
{
	struct flight *flight;

	fuzz_now_ns = wire_next();
	flight = next_flight();
	for (int i = 0; i < SIDES; i++)
		step_of(i, flight && flight->to == i && flight->due <= fuzz_now_ns ? flight : NULL);
}

#endif
