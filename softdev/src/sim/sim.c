/* Simulated hosts in one process and in virtual time, for aiordma.testing.simulate and tests/pair.
 *
 * Each host runs on a machine with its own device. Entering a machine replaces the process's device
 * with the machine's device. A simulated network delivers datagrams between the machines, and may
 * lose, duplicate or delay each of them. Rebooting a host creates a new machine, while the old
 * machine keeps the objects that its program has open. One seed determines all random numbers, and
 * the caller's thread executes all steps. The same calls therefore produce the same history, and
 * `trace` is a hash of this history.
 */
#include "sim/sim.h"

#include <poll.h>
#include <stdio.h>
#include <sys/un.h>
#include <unistd.h>

#include "path/roce/roce.h"

enum {
	FRAME_HEADER_ROOM = 64, /* bytes reserved for a frame header before a datagram */
	FIRST_PORT = 32768, /* first ephemeral port, as on Linux */
	PORTS = 28232,
	POLL_NS = 100, /* virtual time per poll, so that busy loops reach their deadline */
};

#define WALL_CLOCK_S 1800000000 /* wall-clock time at virtual time 0 */
#define TRACE_BEGIN UINT64_C(0xcbf29ce484222325) /* FNV-1a offset basis */

/* The kinds of events in the history. */
enum event { EVENT_SEND = 1, EVENT_SET_STATE, EVENT_DELIVER, EVENT_TIMERS };

/* A datagram in flight. */
struct flight {
	uint64_t due_ns;
	uint64_t number; /* datagrams that are due at the same time arrive in this order */
	struct machine *to;
	union ibv_gid from_gid, to_gid;
	uint16_t port; /* source port */
	size_t length;
	uint8_t bytes[]; /* FRAME_HEADER_ROOM bytes, followed by the datagram */
};

struct machine {
	struct soft_device device; /* copy of the device while the machine is not entered */
	int number, host;
	enum aiordma_sim_state state;
	struct aiordma_sim_program program;
	uint64_t alarm_ns; /* deadline of the next timer; 0 if none */
	struct flight **held; /* datagrams that arrived while the machine was stopped */
	size_t held_count;
};

static struct {
	struct soft_device process; /* copy of the process's device while a machine is entered */
	struct machine **machines;
	int machine_count, entered; /* `entered` is -1 if no machine is entered */
	struct flight **heap; /* min-heap by due time */
	size_t flight_count;
	uint64_t now_ns; /* virtual time */
	uint64_t random; /* state of the random number generator */
	uint64_t trace; /* hash of the history */
	uint64_t scheduled; /* number of datagrams put in flight so far */
	struct link_state {
		struct aiordma_sim_link properties;
		uint64_t last_due_ns;
	} links[AIORDMA_SIM_NETWORKS][AIORDMA_SIM_HOSTS][AIORDMA_SIM_HOSTS];
} sim = {.entered = -1};

/* ---- random numbers, time, the history ------------------------------------------------------- */

uint64_t soft_sim_random(void)
{
	uint64_t z = sim.random += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */

	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	return z ^ z >> 31;
}

static uint64_t random_below(uint64_t limit)
{
	return limit ? soft_sim_random() % limit : 0;
}

static bool occurs(uint32_t per_million)
{
	return per_million && random_below(1000000) < per_million;
}

void aiordma_sim_note(uint64_t value)
{
	for (int i = 0; i < 64; i += 8)
		sim.trace = (sim.trace ^ (value >> i & 255)) * UINT64_C(0x100000001b3);
}

/* Add an event with the current time to the history. */
static void record_event(enum event event, uint64_t details)
{
	aiordma_sim_note(sim.now_ns);
	aiordma_sim_note((uint64_t)event << 56 | details);
}

uint64_t aiordma_sim_trace(void)
{
	return sim.trace;
}

uint64_t aiordma_sim_now(void)
{
	return sim.now_ns;
}

uint64_t aiordma_sim_look(void)
{
	return sim.now_ns += POLL_NS;
}

void aiordma_sim_pass(uint64_t ns)
{
	sim.now_ns += ns;
}

static void *check_allocated(void *memory)
{
	if (memory)
		return memory;
	fputs("aiordma: not enough memory for the simulation\n", stderr);
	abort();
}

/* Double the array when its element count reaches a power of two. */
static void *grow(void *array, size_t count, size_t size)
{
	return count & (count - 1)
		       ? array
		       : check_allocated(realloc(array, (count ? 2 * count : 1) * size));
}

/* ---- datagrams in flight --------------------------------------------------------------------- */

static bool is_before(const struct flight *a, const struct flight *b)
{
	return a->due_ns < b->due_ns || (a->due_ns == b->due_ns && a->number < b->number);
}

static void heap_push(struct flight *flight)
{
	size_t at = sim.flight_count;

	sim.heap = grow(sim.heap, at, sizeof(struct flight *));
	sim.flight_count++;
	while (at) {
		size_t above = (at - 1) / 2;

		if (!is_before(flight, sim.heap[above]))
			break;
		sim.heap[at] = sim.heap[above];
		at = above;
	}
	sim.heap[at] = flight;
}

static struct flight *heap_pop(void)
{
	struct flight *first = sim.heap[0], *last = sim.heap[--sim.flight_count];
	size_t at = 0;

	for (size_t below; (below = 2 * at + 1) < sim.flight_count; at = below) {
		/* Compare with the earlier of the two entries below. */
		if (below + 1 < sim.flight_count && is_before(sim.heap[below + 1], sim.heap[below]))
			below++;
		if (!is_before(sim.heap[below], last))
			break;
		sim.heap[at] = sim.heap[below];
	}
	sim.heap[at] = last;
	return first;
}

static void schedule_datagram(struct flight datagram, const uint8_t *bytes)
{
	struct flight *flight =
		check_allocated(malloc(sizeof(datagram) + FRAME_HEADER_ROOM + datagram.length));

	*flight = datagram;
	flight->number = sim.scheduled++;
	memcpy(flight->bytes + FRAME_HEADER_ROOM, bytes, datagram.length);
	heap_push(flight);
}

/* ---- machines -------------------------------------------------------------------------------- */

static int host_of_gid(const union ibv_gid *gid)
{
	static const uint8_t prefix[13] = {[10] = 0xff, [11] = 0xff, [12] = 10};
	const bool is_simulated = !memcmp(gid->raw, prefix, sizeof(prefix)) && !gid->raw[14] &&
				  gid->raw[13] < AIORDMA_SIM_NETWORKS &&
				  gid->raw[15] <= AIORDMA_SIM_HOSTS;

	return is_simulated ? gid->raw[15] - 1 : -1;
}

/* Returns the host's current machine if it is running or stopped, or NULL if it is dead. */
static struct machine *machine_of(int host)
{
	for (int i = sim.machine_count - 1; i >= 0; i--)
		if (sim.machines[i]->host == host)
			return sim.machines[i]->state == AIORDMA_SIM_DEAD ? NULL : sim.machines[i];
	return NULL;
}

static struct machine *current_machine(void)
{
	return sim.machines[sim.entered];
}

static int clock_of_machine(clockid_t clock, struct timespec *now)
{
	const uint64_t ns = sim.now_ns; /* reading the clock does not advance it */

	now->tv_sec = (time_t)(ns / 1000000000) + (clock == CLOCK_REALTIME ? WALL_CLOCK_S : 0);
	now->tv_nsec = (long)(ns % 1000000000);
	return 0;
}

static ssize_t random_of_machine(void *to, size_t length, unsigned flags)
{
	uint8_t *at = to;

	(void)flags;
	for (size_t i = 0; i < length; i++)
		at[i] = (uint8_t)soft_sim_random();
	return (ssize_t)length;
}

static void set_alarm(uint64_t deadline_ns)
{
	current_machine()->alarm_ns = deadline_ns;
}

static union ibv_gid own_address(int device)
{
	return (union ibv_gid){.raw = {[10] = 0xff,
				       0xff,
				       10,
				       (uint8_t)device,
				       0,
				       (uint8_t)(1 + current_machine()->host)}};
}

static int device_to(const union ibv_gid *gid)
{
	return host_of_gid(gid) < 0 ? -1 : gid->raw[13];
}

/* Send a datagram from a device of the entered machine over the simulated link to the destination
 * host, which may lose, delay or duplicate the datagram. */
static void send_datagram(const union ibv_gid *from, uint16_t port, const union ibv_gid *to,
			  const uint8_t *bytes, size_t length)
{
	const bool is_loopback = soft_gid_is_on_this_host(to);
	const int source = current_machine()->host, target = is_loopback ? source : host_of_gid(to);
	const int network = is_loopback ? 0 : device_to(to);
	struct machine *machine = target < 0    ? NULL
				  : is_loopback ? current_machine()
						: machine_of(target);
	struct link_state *link;
	struct flight flight = {
		.to = machine, .from_gid = *from, .to_gid = *to, .port = port, .length = length};

	record_event(EVENT_SEND, (uint64_t)source << 48 | (uint64_t)(target & 0xff) << 40 |
					 (uint64_t)(network & 0xff) << 32 | length);
	/* A device is connected only to its own network. */
	if (current_machine()->state == AIORDMA_SIM_DEAD || !machine ||
	    (!is_loopback && device_to(from) != network))
		return;
	link = &sim.links[network][source][target];
	if (link->properties.cut || occurs(link->properties.loss))
		return;
	flight.due_ns = sim.now_ns + link->properties.latency_ns +
			random_below(link->properties.jitter_ns + 1);
	/* Keep the order of datagrams, except for those that are late. */
	flight.due_ns = flight.due_ns > link->last_due_ns ? flight.due_ns : link->last_due_ns + 1;
	flight.due_ns += length * link->properties.ps_per_byte / 1000;
	link->last_due_ns = flight.due_ns;
	if (occurs(link->properties.duplicate))
		schedule_datagram(flight, bytes);
	if (occurs(link->properties.late))
		flight.due_ns += random_below(link->properties.late_ns + 1);
	schedule_datagram(flight, bytes);
}

/* Reserve the port in `address` for the socket type `type`. If the port is 0, choose a free one and
 * store it in `address`. A port is reserved by binding a Unix socket to an abstract name that
 * contains the machine and the port, because the kernel rejects a name that is already in use.
 * Returns the fd, or a negative errno value. */
static int reserve(struct sockaddr *address, int type)
{
	uint16_t *port = &((struct sockaddr_in *)(void *)address)
				  ->sin_port; /* same offset in struct sockaddr_in6 */
	const bool any_port = !*port;
	int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
	int error = fd < 0 ? errno : EADDRINUSE; /* EADDRINUSE enters the loop */

	for (int i = 0; error == EADDRINUSE && i < (any_port ? PORTS : 1); i++) {
		const uint16_t number =
			any_port ? htons((uint16_t)(FIRST_PORT + random_below(PORTS))) : *port;
		struct sockaddr_un name = {.sun_family = AF_UNIX};
		const int length = snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1,
					    "aiordma-sim %d %d %d %d", (int)getpid(), sim.entered,
					    type, ntohs(number));

		error = bind(fd, (struct sockaddr *)&name,
			     (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length))
				? errno
				: 0;
		if (!error)
			*port = number;
	}
	if (error)
		soft_close_fd(&fd);
	return error ? -error : fd;
}

static const struct soft_network network = {
	.address = own_address,
	.device_to = device_to,
	.send = send_datagram,
	.reserve = reserve,
};

static const struct soft_platform platform = {
	.clock = clock_of_machine,
	.random = random_of_machine,
	.alarm = set_alarm,
	.network = &network,
};

void aiordma_sim_enter(int machine)
{
	if (machine == sim.entered)
		return;
	*(sim.entered < 0 ? &sim.process : &current_machine()->device) = soft_device;
	sim.entered = machine;
	soft_device = machine < 0 ? sim.process : current_machine()->device;
}

int aiordma_sim_boot(int host)
{
	struct machine *machine = check_allocated(calloc(1, sizeof(*machine)));

	machine->number = sim.machine_count;
	machine->host = host;
	machine->program.fd = -1;
	machine->device.platform = &platform;
	sim.machines = grow(sim.machines, (size_t)sim.machine_count, sizeof(struct machine *));
	sim.machines[sim.machine_count] = machine;
	aiordma_sim_enter(sim.machine_count++);
	soft_device_make();
	return sim.entered;
}

void aiordma_sim_set_state(int number, enum aiordma_sim_state state)
{
	struct machine *machine = sim.machines[number];

	record_event(EVENT_SET_STATE, (uint64_t)number << 8 | state);
	machine->state = state;
	if (state == AIORDMA_SIM_STOPPED)
		return;
	/* Deliver the datagrams that arrived while the machine was stopped. A dead machine drops
	 * them (deliver). */
	for (size_t i = 0; i < machine->held_count; i++) {
		machine->held[i]->due_ns = sim.now_ns;
		heap_push(machine->held[i]);
	}
	free(machine->held);
	machine->held = NULL;
	machine->held_count = 0;
}

struct aiordma_sim_program *aiordma_sim_program(int machine)
{
	return &sim.machines[machine]->program;
}

struct aiordma_sim_link *aiordma_sim_way(int network, int from, int to)
{
	return &sim.links[network][from][to].properties;
}

/* ---- running --------------------------------------------------------------------------------- */

int aiordma_sim_begin(uint64_t seed)
{
	/* Simulate uptimes of 0 seconds, 1,000 seconds and 300 days. */
	static const uint64_t uptimes_s[] = {0, 1000, 26000000};

	if (sim.machine_count)
		return EBUSY;
	if (soft_engine_is_used())
		return EALREADY;
	sim.random = seed;
	sim.trace = TRACE_BEGIN;
	sim.now_ns = uptimes_s[seed % 3] * 1000000000;
	sim.scheduled = 0;
	memset(sim.links, 0, sizeof(sim.links));
	return 0;
}

int aiordma_sim_end(void)
{
	int still_used = 0;

	for (int i = 0; i < sim.machine_count; i++) {
		struct machine *machine = sim.machines[i];

		aiordma_sim_enter(i);
		still_used += soft_engine_is_used();
		aiordma_sim_set_state(i, AIORDMA_SIM_DEAD);
		soft_device_free();
		aiordma_sim_enter(-1);
		free(machine);
	}
	while (sim.flight_count)
		free(sim.heap[--sim.flight_count]);
	free(sim.heap);
	free(sim.machines);
	sim.heap = NULL;
	sim.machines = NULL;
	sim.machine_count = 0;
	return still_used;
}

/* Returns the running machine whose timer expires first, or NULL. */
static struct machine *first_alarm(void)
{
	struct machine *first = NULL;

	for (int i = 0; i < sim.machine_count; i++) {
		struct machine *machine = sim.machines[i];

		if (machine->alarm_ns && machine->state == AIORDMA_SIM_UP &&
		    (!first || machine->alarm_ns < first->alarm_ns))
			first = machine;
	}
	return first;
}

uint64_t aiordma_sim_next(void)
{
	const struct machine *alarm = first_alarm();
	const uint64_t flight = sim.flight_count ? sim.heap[0]->due_ns : UINT64_MAX;

	return alarm && alarm->alarm_ns < flight ? alarm->alarm_ns : flight;
}

static void deliver(struct flight *flight)
{
	struct machine *machine = flight->to;

	record_event(EVENT_DELIVER, (uint64_t)machine->number << 40 | flight->length);
	if (machine->state == AIORDMA_SIM_STOPPED) {
		machine->held = grow(machine->held, machine->held_count, sizeof(struct flight *));
		machine->held[machine->held_count++] = flight;
		return;
	}
	if (machine->state == AIORDMA_SIM_UP) {
		aiordma_sim_enter(machine->number);
		soft_lock();
		soft_roce_receive_simulated(&flight->to_gid, &flight->from_gid, flight->port,
					    flight->bytes + FRAME_HEADER_ROOM, flight->length);
		soft_unlock();
	}
	free(flight);
}

static void run_timers(struct machine *machine)
{
	record_event(EVENT_TIMERS, (uint64_t)machine->number);
	aiordma_sim_enter(machine->number);
	machine->alarm_ns = 0;
	soft_lock();
	soft_timers_run();
	soft_unlock();
}

/* Process the next event, which is due at `when`. Returns the machine affected by the event. */
static struct machine *process_next_event(uint64_t when)
{
	const bool arrives = sim.flight_count && sim.heap[0]->due_ns == when;
	struct machine *machine = arrives ? sim.heap[0]->to : first_alarm();

	if (arrives)
		deliver(heap_pop());
	else
		run_timers(machine);
	return machine;
}

static bool program_has_input(const struct machine *machine)
{
	struct pollfd waits = {.fd = machine->program.fd, .events = POLLIN};

	return poll(&waits, 1, 0) > 0;
}

void aiordma_sim_run(uint64_t until)
{
	uint64_t next;

	while ((next = aiordma_sim_next()) <= until && next != UINT64_MAX) {
		sim.now_ns = next > sim.now_ns ? next : sim.now_ns;
		struct machine *machine = process_next_event(next);

		if (machine->state != AIORDMA_SIM_UP || !program_has_input(machine))
			continue;
		machine->program.has_input = true;
		/* Stop when the program next checks for input. */
		if (machine->program.busy_until < until)
			until = machine->program.busy_until;
	}
	if (until > sim.now_ns && until != UINT64_MAX) /* no further event before `until` */
		sim.now_ns = until;
}
