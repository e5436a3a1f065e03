/* Two hosts in one process, each with its own engine, and a wire between them in virtual time. The
 * wire delays frames, and loses, duplicates and reorders them as the seed determines.
 *
 * The wire is a path of each engine. An engine's own calls ask the wire for room and pass it
 * records. `wire_step` delivers the frames to the other host when they are due. There are no
 * threads, and nothing blocks. The test must enter a host (`enter`) before it calls the host's
 * device.
 *
 * A flow is the frames of one connection. Each fault in a flow may cost each side one retry. Until
 * a side makes progress (wire_progress), the wire causes fewer faults than the side has tries. A
 * request that runs out of tries therefore reveals a bug in the device.
 *
 * A stopped host takes no steps. Its timers and the frames sent to it wait until it continues.
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
	UNIT = 256, /* path MTU, and unit of the maximum frame payload */
	UNIT_MOST = 4096, /* maximum path MTU with RoCE */
	FRAME_MOST = 4 * UNIT,
	BATCH = 8, /* maximum frames in one record */
	WINDOW = 16, /* maximum frames in flight to one side */
	FLIGHTS = 4096, /* enough for RoCE packets, their duplicates and control records */
	RECORD_MOST = BATCH * (SOFT_FRAME_HEADER + FRAME_MOST),
	LATE_NS = 300000, /* maximum extra delay, shorter than any timeout */
	BLOCKED_NS = 100000,
	FLOWS = 4,
};

#define SECOND UINT64_C(1000000000)
#define HELD (UINT64_C(1) << 63) /* flag in `due` of a frame held until wire_heal */

struct flight {
	uint64_t due;
	int to; /* receiving host; -1 if the slot is free */
	int flow;
	enum soft_record_kind kind;
	uint32_t to_chan, request_chan, length;
	/* datagrams only */
	uint16_t port;
	bool is_strange; /* not sent from the peer's address */
	uint8_t bytes[UNIT_MOST + 128];
};

/* RNR timer values by code, in units of 10 us (IBTA 9.7.5.2.8). */
static const uint32_t rnr_timer_units[32] = {
	65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,    32,
	48,    64,   96,   128,  192,  256,   384,   512,   768,   1024,  1536,
	2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
};

static struct wire {
	struct host {
		struct soft_device device; /* saved while the other host is entered */
		uint64_t alarm_ns;
		uint64_t stopped_until;
		struct soft_path path; /* to the other host */
	} hosts[SIDES];
	int entered;
	uint64_t begun;
	bool swapped; /* whether host 1 has the lower port, and so connects first */
	bool roce, ipv6; /* see datagrams.h */
	struct flight flights[FLIGHTS], *flights_end;
	uint64_t last_due[SIDES];
	uint64_t blocked_until[SIDES];
	int flows; /* at most FLOWS */
	/* Returns the flow of a host's channel, or a negative number if the channel is exempt from
	 * faults. The pointer is NULL if there is only one flow. */
	int (*flow_of)(int host, uint32_t chan);
	/* Carries a datagram in place of the wire. The pointer is NULL if unused. */
	void (*carry)(const struct flight *what, const uint8_t *bytes);
	bool in_order[FLOWS]; /* for UC: frames may be lost, but not delayed or duplicated */
	/* Number of faults in each flow since each side last made progress, and the limit for each
	 * number. */
	int faults[FLOWS][SIDES], faults_most;
	uint64_t fault_count; /* total */
	int per_mille; /* faults per thousand frames */
	int window;
	uint64_t ns_per_byte;
	bool stopped; /* whether a host was stopped, perhaps for longer than its peer waits */
	bool cut; /* whether DATA records are lost and other records wait for wire_heal */
	uint64_t secret; /* eight bytes that no frame may contain; 0 if none */
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

/* Trace an event with its time. Two runs of a seed must have the same trace. */
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
	.name = AIORDMA_WIRE_NONE, /* none of the wires that applications know */
	.max_record = RECORD_MOST,
	.room = wire_room,
	.put = wire_put,
};

/* Fail the test if the path is broken. No test breaks a path on purpose. */
static void wire_flush(struct soft_deferred *deferred)
{
	CHECK_EQUAL(soft_container(deferred, struct soft_path, flush)->pending_error, 0);
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

/* Set a host's port without listening on it, so that other programs cannot find the host. */
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
	*path = (struct soft_path){.ports = 1}; /* embedded0 on both sides */
	soft_path_init(path, &calls, wire_flush);
}

/* Copy memory that restarting a host overwrites. The pointers in the copy let the leak sanitizer
 * still find the allocations of the host's previous engine. */
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

/* Start a host with a new engine and a new path, without any earlier state. */
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

/* Returns the number of DATA frames in flight to a host. Control records do not count, because a
 * cut wire holds them back. */
static int under_way(int to)
{
	int count = 0;

	EACH_FLIGHT(flight)
	count += flight->to == to && flight->kind == SOFT_RECORD_DATA;
	return count;
}

/* Put a frame in flight. Returns the copy of its bytes. */
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

/* Trace a frame. With -v, its header is printed but not traced. */
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

/* Count a fault for every flow. Returns false if a flow cannot tolerate one. */
static bool all_err(void)
{
	for (int flow = 0; flow < wire.flows; flow++)
		if (!may_err(flow))
			return false;
	for (int flow = 0; flow < wire.flows; flow++)
		count_fault(flow);
	return true;
}

/* Send a frame, perhaps with a fault. A `reliable` frame arrives intact and in order, because the
 * hosts' kernels would retransmit it. */
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

/* Returns the number of record bytes that may be written now. Records up to the size of a handshake
 * always fit, so that connections can end. */
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
		.to = 1 - wire.entered, .kind = kind, .to_chan = to, .request_chan = from};
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

/* Change the properties of the wire for the frames sent from now on. */
static inline void wire_vary(bool loses)
{
	calls.max_frame = (1 + draw(FRAME_MOST / UNIT)) * UNIT;
	calls.max_frames = 1 + (int)draw(BATCH);
	calls.is_lossy = loses;
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

/* Restart a host. If `told`, also end the peer's path to it with ECONNRESET, as the host's kernel
 * would do. A RoCE peer is never told. */
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

static inline void wire_stop(int host, uint64_t ns)
{
	note("host %c is stopped", "ab"[host]);
	wire.hosts[host].stopped_until = fuzz_now_ns + ns;
}

static bool is_stopped(int host)
{
	return fuzz_now_ns < wire.hosts[host].stopped_until;
}

/* Returns `then`, or the end of the host's stop if that is later. */
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

/* Returns whether a host is waiting for room. */
static bool waits(int host)
{
	const struct soft_device *device =
		host == wire.entered ? &soft_device : &wire.hosts[host].device;

	return wire.roce ? device->roce->blocked : soft_path_has_waiting(&wire.hosts[host].path);
}

/* Returns the time of the next event, or UINT64_MAX if none is pending. */
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
		CHECK(soft_path_receive(path, flight->kind, flight->to_chan, flight->request_chan,
					flight->bytes, flight->length));
		flight->to = -1;
	}
	if (waits(host) && has_room(host) && wire.roce)
		soft_roce_unblocked();
	else if (waits(host) && has_room(host))
		soft_path_offer_room(path);
	soft_unlock();
}

/* Advance to the next event, and run a step of each host that is not stopped. */
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
