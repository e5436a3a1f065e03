/* Two hosts of one process, each with an engine of its own, and a wire between them in virtual time: it
 * delays frames, and loses, doubles and reorders them by a seed.
 *
 * The wire is a path of each engine.  An engine asks it for room and gives it records, from inside its
 * own calls; `wire_step` gives their frames to the other host when their time has come.  There are no
 * threads, and nothing waits.  Before a call into the device its host is entered (`enter`).
 *
 * Each frame that the wire treats badly is a fault that each side of its flow, the frames of one
 * connection, may have to answer with one try again.  The wire makes fewer of them than the side has
 * tries, until the side has completed something (wire_progress): so a request that fails for want of
 * tries is a mistake of the device.
 *
 * A host that is stopped takes no step: its timers and what is sent to it wait until it goes on.
 */
#pragma once

#define _GNU_SOURCE /* memmem */
#include <stdarg.h>

#include "path/roce/roce_internal.h"
#include "link/link_internal.h"
#include "../fuzz/virtual_time.h"
#include "../soft/verbs_side.h"

enum {
	SIDES = 2,
	UNIT = 256, /* the path MTU: all frames of a message but the last have whole units */
	UNIT_MOST = 4096, /* with RoCE */
	FRAME_MOST = 4 * UNIT,
	BATCH = 8, /* frames that it takes together, at most */
	WINDOW = 16, /* frames under way to one side beyond which it takes no more, at most */
	FLIGHTS = 4096, /* a frame of RoCE is many, and each may be doubled; and control records */
	RECORD_MOST = BATCH * (SOFT_FRAME_HEADER + FRAME_MOST),
	LATE_NS = 300000, /* less than any timeout */
	BLOCKED_NS = 100000,
	FLOWS = 4,
};

#define SECOND UINT64_C(1000000000)
#define HELD (UINT64_C(1) << 63) /* until the wire is healed */

struct flight {
	uint64_t due;
	int to; /* -1: this place is free */
	int flow;
	enum soft_record_kind kind;
	uint32_t to_chan, from_chan, length;
	/* of a datagram */
	uint16_t port;
	bool is_strange; /* from another address */
	uint8_t bytes[UNIT_MOST + 128];
};

/* What a code of the RNR timer means, in 10 us: IBTA 9.7.5.2.8. */
static const uint32_t rnr_timer_units[32] = {
	65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,    32,
	48,    64,   96,   128,  192,  256,   384,   512,   768,   1024,  1536,
	2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
};

static struct wire {
	struct host {
		struct soft_device device; /* while another one is entered */
		uint64_t alarm_ns;
		uint64_t stopped_until;
		struct soft_path path; /* to the other one */
	} hosts[SIDES];
	int entered;
	uint64_t begun;
	bool swapped; /* the ports: the one with the smaller number connects first */
	bool roce, ipv6; /* datagrams.h */
	struct flight flights[FLIGHTS], *flights_end;
	uint64_t last_due[SIDES];
	uint64_t blocked_until[SIDES];
	int flows; /* FLOWS at most */
	/* Of the host's channel with that number; NULL: there is one flow.  Negative: nothing befalls it. */
	int (*flow_of)(int host, uint32_t chan);
	/* Takes each datagram in place of the wire; NULL: it is the wire's. */
	void (*carry)(const struct flight *what, const uint8_t *bytes);
	bool in_order[FLOWS]; /* it only loses frames, as UC expects it */
	int faults[FLOWS][SIDES], faults_most; /* since its last progress */
	uint64_t fault_count; /* in all */
	int per_mille; /* frames that have a fault */
	int window;
	uint64_t ns_per_byte;
	bool stopped; /* a host has been, for longer than its peer may wait */
	bool cut; /* DATA gets lost, other records wait (wire_heal) */
	uint64_t secret; /* eight bytes that no frame may contain; 0: none */
	uint64_t random;
	uint64_t trace_hash;
	bool verbose;
} wire;

#define EACH_FLIGHT(flight)                                                                        \
	for (struct flight *flight = wire.flights; flight < wire.flights_end; flight++)

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
			      (unsigned long long)(fuzz_now_ns - wire.begun));

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

/* No other program of this machine must find it at the port that it has in the simulation. */
static void take_port(int host)
{
	soft_device.links->port = port_of_host(host);
	soft_device.links->listening_count = 1;
	soft_device.links->listening[0] =
		(struct soft_listening){.gid = soft_gid_loopback, .acceptor.watch.fd = -1};
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

/* A copy of what the next life of a host overwrites: so the leak sanitizer finds all that the dead host had. */
static void bury(const void *what, size_t length)
{
	static struct grave {
		struct grave *before;
		uint8_t bytes[];
	} *graves;
	struct grave *grave = malloc(sizeof(*grave) + length);

	CHECK(grave);
	grave->before = graves;
	memcpy(grave->bytes, what, length);
	graves = grave;
}

/* With an engine and a path that know nothing of what was before. */
static void boot(int host)
{
	const struct soft_platform *platform = soft_device.platform;

	enter(host);
	bury(&soft_device, sizeof(soft_device));
	bury(&wire.hosts[host].path, sizeof(wire.hosts[host].path));
	soft_device = (struct soft_device){.platform = platform};
	fuzz_alarm_ns = 0;
	soft_device_make();
	take_port(host);
	soft_device.paths->simulated = path_to;
	renew(&wire.hosts[host].path);
}

/* ---- frames ---------------------------------------------------------------------------------- */

/* Frames: other records, which a cut wire holds, take no room from them. */
static int under_way(int to)
{
	int count = 0;

	EACH_FLIGHT(flight)
	count += flight->to == to && flight->kind == SOFT_RECORD_DATA;
	return count;
}

/* Its bytes. */
static uint8_t *take_off(struct flight what, const uint8_t *bytes, uint64_t due)
{
	struct flight *flight = wire.flights;

	while (flight < wire.flights_end && flight->to >= 0)
		flight++;
	CHECK(flight < wire.flights + FLIGHTS);
	if (flight == wire.flights_end)
		wire.flights_end++;
	memcpy(flight, &what, offsetof(struct flight, bytes));
	flight->due = due;
	return memcpy(flight->bytes, bytes, what.length);
}

/* For a reader, with -v: the trace does not depend on what is in a frame. */
static void tell_frame(const char *what, int host, const struct flight *flight,
		       const uint8_t *bytes)
{
	struct soft_frame frame;

	note("%c %s %u bytes", "ab"[host], what, flight->length);
	if (wire.verbose && flight->kind != SOFT_RECORD_DATA)
		fprintf(stderr, "%*crecord %d\n", 20, ' ', flight->kind);
	else if (wire.verbose && !wire.roce && soft_frame_decode(bytes, &frame))
		fprintf(stderr, "%*copcode %u, PSN %u\n", 20, ' ', frame.opcode, frame.psn);
}

static bool may_err(int flow)
{
	return flow >= 0 && wire.faults[flow][0] < wire.faults_most &&
	       wire.faults[flow][1] < wire.faults_most;
}

static void count_fault(int flow)
{
	wire.faults[flow][0]++;
	wire.faults[flow][1]++;
	wire.fault_count++;
}

/* What befalls all flows: is it one fault of each, which they can bear? */
static bool all_err(void)
{
	for (int flow = 0; flow < wire.flows; flow++)
		if (!may_err(flow))
			return false;
	for (int flow = 0; flow < wire.flows; flow++)
		count_fault(flow);
	return true;
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
	if (!reliable && may_err(what.flow) && chance((unsigned)wire.per_mille)) {
		static const char *const faults[] = {"lost", "doubled", "late", "changed"};
		uint32_t fault = wire.in_order[what.flow] ? 0 : draw(3);
		uint32_t bit = wire.roce && chance(250) ? draw(8 * what.length) : 0;

		fault = bit ? 3 : fault;

		count_fault(what.flow);
		note("  %s on the way to %c", faults[fault], "ab"[what.to]);
		if (bit)
			take_off(what, bytes, due)[bit / 8] ^= (uint8_t)(1 << bit % 8);
		else if (fault)
			take_off(what, bytes, due + draw(LATE_NS));
		if (fault != 1)
			return;
	}
	wire.last_due[what.to] = due;
	take_off(what, bytes, due | (wire.cut ? HELD : 0));
}

/* ---- as engines know it ---------------------------------------------------------------------- */

static bool has_room(int from)
{
	return under_way(1 - from) < wire.window && fuzz_now_ns >= wire.blocked_until[from];
}

static void may_block(void)
{
	if (chance((unsigned)wire.per_mille / 4) && all_err())
		wire.blocked_until[wire.entered] = fuzz_now_ns + draw(BLOCKED_NS);
}

/* The end of a connection always finds room. */
static ssize_t wire_room(struct soft_path *path, size_t least)
{
	(void)path;
	if (least > SOFT_HANDSHAKE_SIZE) {
		may_block();
		if (!has_room(wire.entered))
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
	if (wire.flow_of)
		what.flow = wire.flow_of(what.to, to);
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
static inline void wire_vary(bool loses)
{
	calls.frame_most = (1 + draw(FRAME_MOST / UNIT)) * UNIT;
	calls.frames_most = 1 + (int)draw(BATCH);
	calls.loses = loses;
	wire.window = 3 + (int)draw(WINDOW - 2);
	wire.ns_per_byte = draw(4);
	wire.per_mille = loses && chance(800) ? (int)draw(250) : 0;
	memset(wire.faults, 0, sizeof(wire.faults));
}

static void wire_begin(void)
{
	wire.flights_end = wire.flights;
	wire.swapped = chance(500);
	wire.flows = 1;
	for (int i = 0; i < SIDES; i++)
		boot(i);
}

/* The host begins anew, and its kernel says so, or not. */
static inline void die(int host, bool told)
{
	struct soft_path *path = &wire.hosts[1 - host].path;

	boot(host);
	if (!told || wire.roce)
		return;
	enter(1 - host);
	soft_lock();
	soft_path_finish(path, ECONNRESET, -1);
	renew(path);
	soft_unlock();
}

static inline void wire_heal(void)
{
	wire.cut = false;
	EACH_FLIGHT(flight)
	flight->due &= ~HELD;
}

static inline void wire_progress(int flow, int side)
{
	wire.faults[flow][side] = 0;
}

/* The host takes no step for so long. */
static inline void wire_stop(int host, uint64_t ns)
{
	note("host %c is stopped", "ab"[host]);
	wire.hosts[host].stopped_until = fuzz_now_ns + ns;
}

static bool is_stopped(int host)
{
	return fuzz_now_ns < wire.hosts[host].stopped_until;
}

/* When it can do what it could do then. */
static uint64_t awake(int host, uint64_t then)
{
	uint64_t until = wire.hosts[host].stopped_until;

	return then < until ? until : then;
}

static inline bool is_up(const struct side *side)
{
	const struct soft_link *link = soft_link_of(soft_qp_of(side->qp));

	return link && link->base.state == SOFT_LINK_UP;
}

static bool is_before(const struct flight *flight, const struct flight *other)
{
	uint64_t here = awake(flight->to, flight->due), there = awake(other->to, other->due);

	return here < there || (here == there && flight->due < other->due);
}

static struct flight *next_flight(void)
{
	struct flight *next = NULL;

	EACH_FLIGHT(flight)
	if (flight->to >= 0 && !(flight->due & HELD) && (!next || is_before(flight, next)))
		next = flight;
	return next;
}

static uint64_t *alarm_of(int host)
{
	return host == wire.entered ? &fuzz_alarm_ns : &wire.hosts[host].alarm_ns;
}

/* Does it wait for room? */
static bool waits(int host)
{
	const struct soft_device *device =
		host == wire.entered ? &soft_device : &wire.hosts[host].device;

	return wire.roce ? device->roce->blocked : soft_path_waits(&wire.hosts[host].path);
}

/* When something happens by itself; UINT64_MAX: never. */
static uint64_t wire_next(void)
{
	const struct flight *flight = next_flight();
	uint64_t next = flight ? awake(flight->to, flight->due) : UINT64_MAX;

	for (int i = 0; i < SIDES; i++) {
		if (is_stopped(i) && wire.hosts[i].stopped_until < next)
			next = wire.hosts[i].stopped_until;
		if (*alarm_of(i) && awake(i, *alarm_of(i)) < next)
			next = awake(i, *alarm_of(i));
		if (waits(i) && under_way(1 - i) < wire.window &&
		    awake(i, wire.blocked_until[i]) < next)
			next = awake(i, wire.blocked_until[i]);
	}
	return next < fuzz_now_ns ? fuzz_now_ns : next;
}

#include "datagrams.h"

static void step_of(int host, struct flight *flight)
{
	struct soft_path *path = &wire.hosts[host].path;

	enter(host);
	soft_lock();
	if (fuzz_alarm_ns && fuzz_alarm_ns <= fuzz_now_ns) {
		fuzz_alarm_ns = 0;
		soft_timers_run();
	}
	if (flight && wire.roce) {
		take_datagrams(flight);
	} else if (flight) {
		tell_frame("gets", host, flight, flight->bytes);
		CHECK(soft_path_take(path, flight->kind, flight->to_chan, flight->from_chan,
				     flight->bytes, flight->length));
		flight->to = -1;
	}
	if (waits(host) && has_room(host) && wire.roce)
		soft_roce_unblocked();
	else if (waits(host) && has_room(host))
		soft_path_offer_room(path);
	soft_unlock();
}

/* The first of those things happens. */
static inline void wire_step(void)
{
	struct flight *flight;

	fuzz_now_ns = wire_next();
	flight = next_flight();
	for (int i = 0; i < SIDES; i++)
		if (!is_stopped(i))
			step_of(i, flight && flight->to == i && flight->due <= fuzz_now_ns ? flight
											   : NULL);
}
