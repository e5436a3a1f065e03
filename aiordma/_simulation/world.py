"""The world of a simulation: its hosts, the network, the scheduler and the faults."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import random
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import product
from typing import Any, TypeVar, overload
from unittest.mock import patch

from .._core.arguments import U64_MAX, host_name, instance, integer, real, refusal, seconds, truth
from .._event_loop.futures import settle
from .._event_loop.virtual_loop import StalledError, describe_waiting_tasks
from .._native import softdev
from ..errors import BusyError
from ..verbs._device.environment import report_unknown_variables
from . import process
from .faults import MAIN, MAX_TIME_OR_RATE, Fault, FaultPlan, Link, fault_schedule
from .loop import NEVER
from .machine import Machine, check_program
from .seeds import (
    VARIABLE,
    Seeds,
    minimize_faults,
    rerun_command,
    run_seeds,
    seeds_from_environment,
)
from .sockets import is_loopback

T = TypeVar("T")
Program = Callable[..., Coroutine[Any, Any, T]]
Hosts = Mapping[str, Callable[[], Coroutine[Any, Any, Any]]]

TURNS_PER_COLLECTION = 2000  # loop iterations between two garbage collections
GRACE = 120.0  # simulated seconds in which other programs must end after the main program
NO_MACHINE = -1  # lets softdev.sim_enter return to the process's own device
MAX_LINES = 40  # maximum lines for the timeline in an error's note, and for the waiting tasks
# These exceptions end a search over several seeds. Any other BaseException, such as CancelledError
# or a failure in pytest, only fails the current seed.
ENDING_EXCEPTIONS = KeyboardInterrupt, SystemExit

logger = logging.getLogger("aiordma.simulation")

_simulates = threading.Lock()
"""The lock held while this process runs a simulation. Threads never wait for it."""


class KilledError(RuntimeError):
    """The host of a program was killed."""


class TimeLimitError(AssertionError):
    """The simulation exceeded its time limit."""


class Host:
    """A simulated host, returned by `World.host`."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world = world
        self.name: str = name
        self.number = number
        self._addresses = [f"10.{network}.0.{number + 1}" for network in world._networks]
        self.address: str = self._addresses[0]
        """The IP address, to which `name` resolves on every host."""
        self._slowness = 1.0
        self._services: list[tuple[Program[Any], tuple[Any, ...]]] = []
        self._machine = Machine(self)

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address}>"

    @property
    def alive(self) -> bool:
        """Whether the host has booted and has not been killed."""
        return self._machine.alive

    @property
    def slowness(self) -> float:
        """The factor by which the host's programs are slowed down. Changes apply immediately."""
        return self._slowness

    @slowness.setter
    def slowness(self, times: float) -> None:
        if not 0 < real("slowness", times) <= MAX_TIME_OR_RATE:
            raise ValueError(
                f"slowness must be positive and at most {MAX_TIME_OR_RATE:g}, not {times}"
            )
        self._slowness = float(times)

    def serve(self, program: Program[Any], *args: Any) -> None:
        """Start a program on the host now, and again whenever the host boots.

        If the program raises an exception, the simulation ends with this exception.
        """
        self._start_service(program, args)
        self._services.append((program, args))

    def _start_service(self, program: Program[Any], args: tuple[Any, ...]) -> None:
        """Start a program of `serve`. If it fails, the simulation ends."""
        machine = self._machine
        task = machine.start(program, args)
        machine.services.add(task)
        task.add_done_callback(machine.services.discard)
        task.add_done_callback(self.world._on_service_end)

    async def run(self, program: Program[T], *args: Any) -> T:
        """Run a program on the host and return its result, or raise its exception.

        Cancelling the call cancels the program.

        Raises:
            KilledError: If the host has been killed, or is killed while the program runs.
        """
        machine, caller_loop = self._machine, asyncio.get_running_loop()
        if not machine.alive:
            raise KilledError(f"cannot run a program on {self!r}: the host was killed")
        # The program runs in another loop, so await a future of this loop instead of the task. If
        # the host is killed, the task never ends, and `_kill` ends the wait.
        program_ended: asyncio.Future[None] = caller_loop.create_future()
        task = machine.start(program, args)
        task.add_done_callback(lambda _: caller_loop.call_soon(settle, program_ended))
        machine.awaited[program_ended] = None
        try:
            await program_ended
        finally:
            del machine.awaited[program_ended]
            if not task.done() and machine.alive:
                machine.loop.call_soon(task.cancel)
        return task.result()

    def kill(self) -> None:
        """Kill the host immediately. Its programs stop, and its peers receive no notification."""
        if self.name == MAIN:
            raise ValueError(f"cannot kill {MAIN!r}, the host of the main program")
        self._machine.will_reboot = False
        if self._machine.alive:
            self.world._record_event(f"{self.name} is killed by the program")
            self._kill()

    def _kill(self) -> None:
        """Kill the host, and fail the calls of `run` that await its programs."""
        machine = self._machine
        machine.kill()
        for program_ended in machine.awaited:
            killed = KilledError(f"{self!r} was killed")
            program_ended.get_loop().call_soon(settle, program_ended, None, killed)

    def boot(self) -> None:
        """Boot a killed host. It keeps its address, and its `serve` programs start again."""
        if self.alive:
            raise RuntimeError(f"{self!r} is already running")
        self.world._record_event(f"{self.name} boots")
        self._boot()

    def _boot(self) -> None:
        """Boot the host as a new machine, and start the programs of `serve` again."""
        self.world._old_machines.append(self._machine)
        self._machine = self.world._without_switching_machine(lambda: Machine(self))
        for service in self._services:
            self._start_service(*service)

    def pause(self) -> None:
        """Pause the host until `resume`. Packets and connection requests are queued until then."""
        self.world._record_event(f"{self.name} is paused")
        self._machine.pause(self)

    def resume(self) -> None:
        """Resume the host after `pause`."""
        self.world._record_event(f"{self.name} continues")
        self._machine.resume(self)


def _network_suffix(network: int | None) -> str:
    return "" if network is None else f" on network {network}"


class World:
    """A running simulation, which is passed to the main program."""

    def __init__(self, seed: int, plan: FaultPlan, devices: int) -> None:
        self.seed = seed
        self._networks = range(devices)
        self.random: random.Random = random.Random(seed)
        """A random number generator for the test, initialized with the simulation's seed."""
        self.hosts: dict[str, Host] = {}
        self._old_machines: list[Machine] = []
        self._turns = 0
        self._plan = plan
        self._numbers = 0
        self._links: dict[tuple[str, str], Link] = {}
        self._cut_links: set[tuple[int, str, str]] = set()
        """The links that the program has cut: the network, the sender and the receiver."""
        self._partitioned_hosts: set[tuple[int, str]] = set()
        """The networks and hosts that the program has cut off, even from hosts that boot later."""
        self._planned_cuts: Counter[tuple[int, str]] = Counter()
        """The number of active planned faults that cut off a host, by network and host."""
        self._fault_schedule = fault_schedule(plan, seed, devices)
        self._next_fault = next(self._fault_schedule, None)
        self._fault_ends: list[tuple[float, int, Fault, Callable[[], object]]] = []
        """A heap of the faults in progress and the functions that end them, ordered by end time."""
        self._timeline: list[tuple[float, Fault | str]] = []
        self._failure: BaseException | None = None
        self._entered_machine = NO_MACHINE
        self._start_ns: int = softdev.sim_now()

    def __repr__(self) -> str:
        return f"<World seed {self.seed}, {self.now:.6f} s, hosts {', '.join(self.hosts)}>"

    @property
    def now(self) -> float:
        """The number of seconds since the simulation began."""
        return (softdev.sim_now() - self._start_ns) / 1e9

    @property
    def trace(self) -> str:
        """A hash of all events so far. Equal runs have equal hashes."""
        return f"{softdev.sim_trace():016x}"

    def host(self, name: str) -> Host:
        """Return the host with this name, booting it on the first call."""
        if host_name("the name of a host", name, "text") not in self.hosts:
            if name in ("", "localhost"):
                why = "every host resolves it to itself" if name else "it must not be empty"
                raise ValueError(f"invalid host name {name!r}: {why}")
            number = len(self.hosts)
            if number == softdev.SIM_HOSTS:
                raise ValueError(f"cannot create host {name!r}: too many hosts (maximum {number})")
            new_host = self.hosts[name] = self._without_switching_machine(
                lambda: Host(self, name, number)
            )
            for network, isolated in self._partitioned_hosts:
                self._cut_links |= {(network, name, isolated), (network, isolated, name)}
            for other in self.hosts.values():
                self._update_link(new_host, other)
                self._update_link(other, new_host)
        return self.hosts[name]

    def _host_at(self, address: str, here: Host) -> tuple[Host, int] | None:
        """Return the host that `here` reaches at `address`, with its network number, or None."""
        if is_loopback(address):
            return here, 0
        for host in self.hosts.values():
            if address in host._addresses:
                return host, host._addresses.index(address)
        return None

    # ---- the network ---------------------------------------------------------------------

    def link(self, one: str, other: str, **changes: float) -> None:
        """Change fields of the `Link` between two hosts, in both directions."""
        self._check_hosts((one, other))
        if one == other:
            raise ValueError(f"cannot link host {one!r} to itself")
        for names in ((one, other), (other, one)):
            self._links[names] = replace(self._links.get(names, self._plan.link), **changes)
            self._update_link(self.hosts[names[0]], self.hosts[names[1]])

    def partition(self, *names: str, network: int | None = None) -> None:
        """Cut these hosts off from all others until `heal`.

        `network` limits the partition to one network. For example, network 1 connects the
        "embedded1" devices of all hosts.
        """
        if not names:
            raise ValueError("partition requires the name of at least one host")
        self._check_hosts(names)
        if self.hosts.keys() <= {*names}:
            raise ValueError("a partition of all hosts has no effect; name fewer hosts")
        numbers = self._network_numbers(network)
        self._record_event(f"{', '.join(names)}: cut off{_network_suffix(network)} by the program")
        for one, other in product(self.hosts, repeat=2):
            if (one in names) != (other in names):
                self._cut_links |= {(number, one, other) for number in numbers}
        self._partitioned_hosts |= set(product(numbers, names))
        self._update_links()

    def heal(self, *names: str, network: int | None = None) -> None:
        """End the partitions that `partition` created for these hosts.

        Without names, the partitions of all hosts end. Without `network`, they end on all networks.
        Partitions of a `FaultPlan` are not affected.
        """
        self._check_hosts(names)
        healed = self._network_numbers(network)
        self._record_event(
            f"{', '.join(names or ['all hosts'])}: partitions healed{_network_suffix(network)}"
        )
        self._cut_links = {
            (number, one, other)
            for number, one, other in self._cut_links
            if number not in healed or (names and not {one, other} & set(names))
        }
        self._partitioned_hosts -= set(product(healed, names or self.hosts))
        self._update_links()

    def _check_hosts(self, names: Collection[str]) -> None:
        for name in names:
            if instance("each name", name, str, "the name of a host") not in self.hosts:
                known_hosts = ", ".join(self.hosts)
                raise ValueError(
                    f"host not found: {name!r} (hosts: {known_hosts}); call World.host to create it"
                )

    def _network_numbers(self, network: int | None) -> range:
        if network is None:
            return self._networks
        _check_network(integer("network", network), len(self._networks))
        return range(network, network + 1)

    def _is_cut(self, one: Host, other: Host, network: int = 0) -> bool:
        planned = self._planned_cuts[network, one.name] + self._planned_cuts[network, other.name]
        by_program = (network, one.name, other.name) in self._cut_links
        return by_program or (planned > 0 and one is not other)

    def _latency(self, one: Host, other: Host) -> float:
        """Return a random latency for one TCP segment, in seconds."""
        link = self._link_between(one, other)
        return link.latency + self.random.uniform(0, link.jitter)

    def _link_between(self, one: Host, other: Host) -> Link:
        inside = one is other
        return Link() if inside else self._links.get((one.name, other.name), self._plan.link)

    def _update_links(self) -> None:
        for one in self.hosts.values():
            for other in self.hosts.values():
                self._update_link(one, other)

    def _update_link(self, one: Host, other: Host) -> None:
        """Pass the parameters of the link from `one` to `other` to the simulated devices."""
        link = self._link_between(one, other)
        for network in self._networks:
            # The devices take probabilities in millionths. `late` is the probability that a packet
            # gets an extra delay of up to `late_ns`.
            way = softdev.sim_way(network, one.number, other.number)
            way.latency_ns, way.jitter_ns = round(link.latency * 1e9), round(link.jitter * 1e9)
            way.ps_per_byte, way.late_ns = round(1e12 / link.rate), round(link.late * 1e9)
            way.loss, way.duplicate = round(link.loss * 1e6), round(link.duplicate * 1e6)
            way.late, way.cut = round(link.reorder * 1e6), self._is_cut(one, other, network)

    # ---- the scheduler -------------------------------------------------------------------

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _without_switching_machine(self, make: Callable[[], T]) -> T:
        """Call `make`. If it enters another machine, switch back to the current one."""
        try:
            return make()
        finally:
            softdev.sim_enter(self._entered_machine)

    def _on_service_end(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()

    def _run(self, done: Callable[[], bool], limit: float) -> None:
        """Process events until `done()` is true. Raises TimeLimitError after `limit` seconds."""
        deadline = self._start_ns + round(limit * 1e9)
        while not done():
            if self._failure is not None:
                raise self._failure
            machines = [host._machine for host in self.hosts.values()]
            due = [machine.next_due_time() for machine in machines]
            next_turn, next_event = min(due), softdev.sim_next()
            fault_time = self._next_fault_time()
            if next_turn == next_event == fault_time == NEVER:
                raise StalledError(
                    "all programs are waiting and no event is pending; a simulation does not wait "
                    f"for other threads or processes:\n{self._waiting()}"
                )
            if min(next_turn, next_event, fault_time) > deadline:
                raise TimeLimitError(
                    f"the simulation did not end within {limit} s:\n{self._waiting()}"
                )
            softdev.sim_run(min(next_turn, fault_time))
            now = softdev.sim_now()
            if fault_time <= now:
                self._apply_due_faults()
                continue
            # Besides the machines that were due, a datagram may just have reached another one.
            ready = [
                machine
                for machine, when in zip(machines, due, strict=True)
                if when <= now or (machine.sim_state.has_input and machine.next_due_time() <= now)
            ]
            if ready:
                machine = self.random.choice(ready)
                self._entered_machine = machine.number
                machine.turn()
                self._turns += 1
                if self._turns % TURNS_PER_COLLECTION == 0:
                    gc.collect()

    def _waiting(self) -> str:
        """Describe the waiting tasks of all hosts, except for idle servers."""
        machines = [host._machine for host in self.hosts.values() if host.alive]
        texts = [text for it in machines if (text := describe_waiting_tasks(it.loop, it.is_idle))]
        return "\n".join(texts) or "only idle servers"

    # ---- faults, and the end -------------------------------------------------------------

    def _apply_due_faults(self) -> None:
        """End the planned faults that have expired, and begin the faults that are due."""
        now = softdev.sim_now()
        while self._fault_ends and self._device_time(self._fault_ends[0][0]) <= now:
            _, _, ended, end = heappop(self._fault_ends)
            end()
            logger.info("fault ends: %s", ended)
        while (due := self._next_fault) and self._device_time(due[0]) <= now:
            alive = [name for name, host in self.hosts.items() if host.alive and name != MAIN]
            if fault := due[1](alive):
                end = self._begin_fault(fault)
                self._record_event(fault)
                heappush(self._fault_ends, (fault.end, self._next_number(), fault, end))
            self._next_fault = next(self._fault_schedule, None)

    def _next_fault_time(self) -> int:
        times = [entry[0] for entry in (*self._fault_ends[:1], self._next_fault) if entry]
        return self._device_time(min(times, default=math.inf))

    def _device_time(self, when: float) -> int:
        """Convert a fault's time in seconds to nanoseconds of the devices' clock."""
        return self._start_ns + math.ceil(when * 1e9) if when <= MAX_TIME_OR_RATE else NEVER

    def _begin_fault(self, fault: Fault) -> Callable[[], object]:
        """Begin a fault, and return the function that ends it."""
        host = self.hosts[fault.host]
        machine = host._machine
        match fault.kind:
            case "pause":
                machine.pause(fault)
                return lambda: machine.resume(fault)
            case "kill":
                host._kill()
                machine.will_reboot = True

                def boot() -> None:
                    # The program may have killed or booted the host in the meantime.
                    if machine.will_reboot and host._machine is machine:
                        host._boot()

                return boot
        # A cable fault cuts the host off on one network, and a partition on all networks.
        cut_networks = [fault.network] if fault.kind == "cable" else self._networks

        def count_cuts(change: int) -> None:
            for network in cut_networks:
                self._planned_cuts[network, host.name] += change
            self._update_links()

        count_cuts(1)
        return lambda: count_cuts(-1)

    def _record_event(self, what: Fault | str) -> None:
        self._timeline.append((self.now, what))
        logger.info("fault begins: %s" if isinstance(what, Fault) else "%s", what)

    @property
    def faults(self) -> list[Fault]:
        """The faults of the plan that have begun, in order."""
        return [it for _, it in self._timeline if isinstance(it, Fault)]

    def _add_note(self, error: BaseException) -> None:
        """List the faults, the other events and the waiting tasks in a note on the error."""
        note = f"simulate(seed={self.seed}), at {self.now:.6f} s, trace {self.trace}"
        plan = self._plan
        if plan.exactly is not None or plan._rates:
            note += f"\nfaults: {plan._describe_counts(self.faults, self.now)}"
        left_out = max(0, len(self._timeline) - MAX_LINES)
        lines = [
            f"{it}" if isinstance(it, Fault) else f"{when:.2f} s: {it}"
            for when, it in self._timeline
        ]
        if left_out:
            lines[:left_out] = [f"{left_out} earlier events; see World.faults"]
        note += "".join(f"\n  {line}" for line in lines)
        if not isinstance(error, StalledError | TimeLimitError):  # their messages list the tasks
            waits = self._waiting().splitlines()
            if len(waits) > MAX_LINES:
                waits[MAX_LINES:] = ["..."]
            note += "\nwaiting tasks:" + "".join(f"\n  {line}" for line in waits)
        error.add_note(note)

    def _end(self) -> None:
        """Cancel all tasks on the running hosts and wait for them, as `asyncio.run` does."""
        self._failure = self._next_fault = None
        ends = []
        for host in self.hosts.values():
            host._services.clear()
            host._machine.pauses.clear()
            host._machine.resume(host)
            if host.alive:
                ends.append(host._machine.loop.create_task(host._machine.loop.end()))
        self._run(lambda: all(task.done() for task in ends), self.now + GRACE)

    def _close(self) -> None:
        """Close the machines of all hosts, including those from before a reboot."""
        machines = [*self._old_machines, *(host._machine for host in self.hosts.values())]
        self.hosts.clear()
        self._old_machines.clear()
        # Closing a machine interrupts its programs at arbitrary points. Ignore the warnings about
        # their open resources and coroutines.
        with warnings.catch_warnings(), patch.object(sys, "unraisablehook", lambda _: None):
            for kind in (ResourceWarning, RuntimeWarning):
                warnings.simplefilter("ignore", kind)
            while machines:
                machines.pop().close()  # enters the machine
                # Objects in reference cycles may use the entered machine's device when they are
                # freed. Free those of this machine before the next one is entered.
                gc.collect()
        softdev.sim_enter(NO_MACHINE)


@overload
def simulate(
    main: Program[T], *, seed: int | None = None, hosts: Hosts | None = None,
    faults: FaultPlan | None = None, devices: int = 1, limit: float = 86_400,
) -> T: ...  # fmt: skip


@overload
def simulate(
    main: Program[Any], *, seeds: Iterable[int], stop: bool = True, hosts: Hosts | None = None,
    faults: FaultPlan | None = None, devices: int = 1, limit: float = 86_400,
) -> Seeds: ...  # fmt: skip


def simulate(
    main: Program[T],
    *,
    seed: int | None = None,
    seeds: Iterable[int] | None = None,
    stop: bool = True,
    hosts: Hosts | None = None,
    faults: FaultPlan | None = None,
    devices: int = 1,
    limit: float = 86_400,
) -> T | Seeds:
    """Run programs on simulated hosts in virtual time, and return the result of `main`.

    Each host has an event loop, an IP address and an embedded device that speaks RoCE v2 over a
    simulated network. All programs run in this thread, and waiting takes no real time. The seed
    determines the order of events, all times and all faults, so a seed repeats a run exactly (see
    `World.trace`). When `main` ends, the other programs are cancelled.

    The notes of an exception contain the seed, the faults, the waiting tasks, and the command that
    repeats the run.

    With several `seeds`, one process per core runs them, and a terminal shows a progress bar. If a
    seed fails and `stop` is true, this process runs the seed again and raises its exception. A note
    of this exception lists a subset of the faults that is sufficient for the failure.

    The environment variable AIORDMA_SIMULATION_SEEDS ("61" or "0:1000") replaces `seeds`, or the
    missing `seed`.

    Args:
        main: The main program. It runs on the host "main" and is called with the `World`.
        seed: The seed. By default, it is random.
        seeds: Several seeds to run. The result is then a `Seeds` object.
        stop: Whether the first failing seed ends the run and raises its exception.
        hosts: The programs of other hosts by host name. They start before `main`, and again
            whenever their host boots. If one of them raises an exception, the simulation ends.
        faults: The plan of faults. By default, no faults happen.
        devices: The number of devices of each host, up to 4. Each device of a host is on a separate
            network; see `World.partition`.
        limit: The maximum number of simulated seconds until `main` ends.

    Raises:
        StalledError: If all programs are waiting and no event is pending. The message lists the
            waiting tasks.
        TimeLimitError: If `main` does not end within `limit`. The message lists the waiting tasks.
        NotSimulatedError: In a program that uses a thread, a process or something else that is not
            simulated.
        ValueError: If an argument is invalid, or the plan cannot cause any fault.
        BusyError: If a simulation or a `testing.faults` block is active, AIORDMA_EMBEDDED_FAULTS is
            set, or this process uses its embedded device.
    """
    _check_main(main)
    _check_programs(hosts)
    if not truth("stop", stop) and seeds is None:
        raise TypeError(
            "stop=False requires several seeds, as in simulate(seeds=range(1000), stop=False)"
        )
    plan = FaultPlan() if faults is None else instance("faults", faults, FaultPlan, "a FaultPlan")
    seconds("limit", limit)
    integer("devices", devices, 1, softdev.SIM_NETWORKS)
    if plan.cables and devices == 1:
        raise ValueError("FaultPlan.cables requires several devices; use simulate(devices=2)")
    for fault in plan.exactly or ():
        _check_network(fault.network, devices)
    if injected := process.injected or os.environ.get("AIORDMA_EMBEDDED_FAULTS"):
        raise BusyError(
            f"testing.faults and AIORDMA_EMBEDDED_FAULTS ({injected}) have no effect on simulated "
            "hosts; use World.link or a FaultPlan instead"
        )
    report_unknown_variables()
    run = partial(_run, main, hosts or {}, devices, limit)
    if seed is not None:
        if seeds is not None:
            raise TypeError("seed and seeds cannot be combined")
        return run(plan, integer("seed", seed), rerun_command())
    given = None if seeds is None else _check_seeds(seeds)
    if several := seeds_from_environment() or given:
        done = _search(run, plan, several, stop)
        return run(plan, several[0]) if seeds is None else done
    drawn = random.SystemRandom().getrandbits(32)
    return run(plan, drawn, _rerun_with_seed(drawn))


def _check_main(main: object) -> None:
    hint = "write `async def main(world)`, and simulate(main)"
    where = f"simulate(main): the program of host {MAIN!r}"
    check_program(main, (None,), where, "one argument, the World", hint)


def _check_programs(hosts: object) -> None:
    if hosts is None:
        return
    if not isinstance(hosts, Mapping):
        raise TypeError(refusal("hosts", "a mapping of names to programs", hosts))
    for name, program in hosts.items():
        instance("each name in hosts", name, str, "the name of a host")
        if name == MAIN:
            raise ValueError(f"the host {MAIN!r} is reserved for the main program")
        where = f"simulate(hosts): the program of host {name!r}"
        hint = "pass the function without calling it, or functools.partial(function, ...)"
        check_program(program, (), where, "no arguments", hint)


def _check_seeds(seeds: object) -> list[int]:
    if not isinstance(seeds, Iterable) or isinstance(seeds, str | bytes):
        hint = f"write range({seeds})" if isinstance(seeds, int) and seeds > 0 else ""
        raise TypeError(refusal("seeds", "several ints, such as range(1000)", seeds, hint))
    if checked_seeds := [integer("each seed", it) for it in seeds]:
        return checked_seeds
    raise ValueError("seeds must not be empty; pass several, such as range(1000)")


def _check_network(number: int, devices: int) -> None:
    if number >= devices:
        raise ValueError(f"network {number} requires simulate(devices={number + 1})")


def _rerun_with_seed(seed: int) -> str:
    return f"{VARIABLE}={seed} {rerun_command()}" if rerun_command() else ""


def _search(run: Callable[..., Any], plan: FaultPlan, seeds: Sequence[int], stop: bool) -> Seeds:
    """Run the seeds.

    With `stop`, end at the first failed seed, and run it again in this process to raise its error.
    """

    def attempt(seed: int, plan: FaultPlan = plan) -> BaseException | None:
        """Run one seed, and return its exception, or None if the seed passed."""
        with patch.dict(os.environ, {process.LOG: ""}):  # only the final run writes the log
            try:
                run(plan, seed)
            except ENDING_EXCEPTIONS:
                raise
            except BaseException as error:
                return error.with_traceback(None)
        return None

    results = run_seeds(attempt, seeds, stop)
    if not (stop and results.failed):
        return results
    [(seed, text)] = results.failed.items()
    begun_faults: list[Fault] = []
    try:
        run(plan, seed, _rerun_with_seed(seed), begun_faults)
    except ENDING_EXCEPTIONS:
        raise
    except BaseException as error:
        # A subset of the faults may have fewer than `at_least`, which must not be the failure.
        kind, plan = type(error), replace(plan, at_least=0)
        kept = minimize_faults(
            lambda subset: type(attempt(seed, replace(plan, exactly=subset))) is kind, begun_faults
        )
        if begun_faults:
            error.add_note(
                f"replay with {len(kept)} of {len(begun_faults)} faults: simulate(..., "
                f"seed={seed}, faults=dataclasses.replace(plan, exactly={kept}))"
            )
        raise
    raise RuntimeError(
        f"seed {seed} failed in a child process ({text}), but passed when repeated in the parent: "
        "the programs depend on something that is not simulated"
    )


def _run(
    main: Program[T],
    hosts: Hosts,
    devices: int,
    limit: float,
    plan: FaultPlan,
    seed: int,
    rerun: str = "",
    begun_faults: list[Fault] | None = None,
) -> T:
    """Run one simulation, and append its faults to `begun_faults`.

    If it fails, the error gets a note with `rerun`, the command that repeats the run.
    """
    if not _simulates.acquire(blocking=False):
        raise BusyError("this process is already running a simulation")
    with ExitStack() as ends:
        ends.callback(_simulates.release)
        if softdev.sim_begin(seed & U64_MAX):  # the devices take a 64-bit seed
            raise BusyError(
                "cannot start a simulation while this process is using its embedded device; close "
                "all connections and the event loop first (an event loop keeps the device open for "
                "a second after closing its last connection)"
            )
        ends.callback(_end_devices)
        ends.enter_context(process.simulated(seed, devices))
        world = World(seed, plan, devices)
        try:
            result = _simulate(world, main, hosts, limit)
        except BaseException as error:
            if rerun:
                error.add_note(f"repeat: {rerun}")
            raise
        finally:
            if begun_faults is not None:
                begun_faults += world.faults
            world._close()
    return result


def _end_devices() -> None:
    if softdev.sim_end():
        warnings.warn("a simulated host did not close its device", ResourceWarning, 1)


def _simulate(world: World, main: Program[T], hosts: Hosts, limit: float) -> T:
    """Run all programs until `main` ends, and check that the fault plan had an effect."""
    main_machine = world.host(MAIN)._machine
    for name in hosts:
        world.host(name)
    for name, program in hosts.items():
        world.host(name).serve(program)
    task = main_machine.start(main, (world,))
    try:
        world._run(task.done, limit)
        result = task.result()
        if missing := world._plan._names - world.hosts.keys():
            names, known_hosts = ", ".join(sorted(missing)), ", ".join(world.hosts)
            raise ValueError(
                f"the FaultPlan names hosts that never booted: {names} (hosts: {known_hosts})"
            )
        if world._plan._rates and len(world.hosts) == 1:
            raise ValueError(
                f"the FaultPlan has no effect: faults do not affect {MAIN!r}, the only host"
            )
        if (begun := len(world.faults)) < world._plan.at_least:
            counts = world._plan._describe_counts(world.faults, world.now)
            raise AssertionError(
                f"the number of faults, {begun}, is below at_least={world._plan.at_least}: {counts}"
            )
    except BaseException as error:
        world._add_note(error)
        if isinstance(error, Exception):
            with suppress(Exception):  # the first error is the one to report
                world._end()
        raise
    world._end()
    return result
