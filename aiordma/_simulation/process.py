"""The clock, the random numbers and the system calls of this process during a simulation."""

from __future__ import annotations

import _posixsubprocess
import _thread
import asyncio
import gc
import logging
import os
import platform
import random
import select
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import get_ident
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from .._event_loop.virtual_loop import StalledError
from .._native import service_thread, softdev
from ..verbs._cq import completion
from ..verbs._device import device
from .sockets import Socket, current_machine, getaddrinfo, refuse

SECOND = 1_000_000_000
EPOCH = 1_800_000_000  # start of the wall clock, as for the devices (sim.c)
MAX_CLOCK_READS = 1_000_000
"""How often programs may read the clock at one virtual time.

A program that reads it more often is waiting for a time that will not come.
"""

ENVIRONMENT = {"AIORDMA_DEVICE": "embedded0", "AIORDMA_EMBEDDED_LINKS": "roce"}
THREADS = "threads", "use asyncio.to_thread, which runs a function in the simulation's thread"
SIGNALS = "signals", "use loop.add_signal_handler"
PROCESSES = "processes", "start a program on another host (World.host)"
SOCKETS = "real sockets", "create the socket in a program of the host"
RESOLVER = "blocking name resolution", "use loop.getaddrinfo"
LOG = "AIORDMA_SIMULATION_LOG"
LOG_LINE = "%(simulated_time)12.6f %(simulated_host)s %(levelname)s %(name)s: %(message)s"
UUID_NODE = 0x020000000000  # a hardware address for uuid.uuid1


random_source: random.Random | None = None
"""The source of random numbers for programs during a simulation."""
simulation_thread: int | None = None
"""The thread of the simulation. Other threads use the machine's clock and random numbers."""
last_clock_read, clock_reads = 0, 0
"""A virtual time, and how often programs have read the clock at that time."""
injected: str | None = None
"""The plan of the active `testing.faults` block."""


# ---- the clock and random numbers ----------------------------------------------------------------


def monotonic_ns() -> int:
    """Return the virtual time. Reading it does not advance it, so logging does not affect a run."""
    global last_clock_read, clock_reads  # noqa: PLW0603 - one for the process
    if last_clock_read != (now := softdev.sim_now()):
        last_clock_read, clock_reads = now, 0
    clock_reads += 1
    if clock_reads > MAX_CLOCK_READS:
        raise StalledError(
            f"a program has read the clock {MAX_CLOCK_READS} times in a row, but virtual time "
            "passes only while programs wait; use asyncio.sleep"
        )
    return now


def wall_ns() -> int:
    return EPOCH * SECOND + monotonic_ns()


def in_seconds(clock: Callable[[], int]) -> Callable[[], float]:
    return lambda: clock() / SECOND


def clock_gettime_ns(clock: int) -> int:
    return wall_ns() if clock == time.CLOCK_REALTIME else monotonic_ns()


def sleep(length: float) -> None:
    if length < 0:
        raise ValueError("sleep length must be non-negative")
    softdev.sim_pass(round(length * SECOND))


def urandom(size: int, flags: int = 0) -> bytes:
    assert random_source is not None
    return random_source.randbytes(size)


def set_handler(number: int, handler: Any, real: Callable[..., Any] = signal.signal) -> Any:
    """Set a handler for SIGINT, which debuggers rely on. Other signals are refused."""
    return real(number, handler) if number == signal.SIGINT else refuse(*SIGNALS)


def seed_generator(
    generator: random.Random,
    a: Any = None,
    version: int = 2,
    seed: Callable[..., None] = random.Random.seed,
) -> None:
    """Seed a generator with `a`, or from the simulation's random source if `a` is None."""
    seed(generator, urandom(32) if a is None else a, version)


# ---- replacements --------------------------------------------------------------------------------

Replacement = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and the replacement of that attribute."""

CLOCKS: dict[str, Callable[[], int]] = {
    "time": wall_ns,
    **dict.fromkeys(("monotonic", "perf_counter", "process_time", "thread_time"), monotonic_ns),
}

# These operations would leave the simulation or block all hosts. Each entry consists of an object,
# the names of its functions, the unsupported feature, and an alternative. If the object is None,
# the names are Python audit events, which are also raised for functions imported by name.
REFUSED_FUNCTIONS: list[tuple[Any, str, str, str]] = [
    (threading.Thread, "start", *THREADS),
    (_thread, "start_new_thread", *THREADS),
    (
        service_thread,
        "in_service_thread",
        "threads (aiordma.blocking)",
        "use the asynchronous functions of aiordma",
    ),
    (None, "subprocess.Popen os.fork os.forkpty os.posix_spawn os.system os.exec", *PROCESSES),
    (_posixsubprocess, "fork_exec", *PROCESSES),
    (None, "socket.bind socket.connect socket.sendto", *SOCKETS),
    (None, "socket.gethostbyname socket.gethostbyaddr socket.getnameinfo", *RESOLVER),
    (signal, "setitimer alarm set_wakeup_fd", *SIGNALS),
    (select, "poll select", "select.select and select.poll", "use asyncio"),
    (asyncio.BaseEventLoop, "connect_read_pipe connect_write_pipe", "pipes", "use streams"),
]
REFUSED_EVENTS = {
    event: (what, instead)
    for place, events, what, instead in REFUSED_FUNCTIONS
    if place is None
    for event in events.split()
}


@cache
def watch_events() -> None:
    """Install the audit hook that rejects operations leaving the simulation.

    Audit hooks cannot be removed, so it stays for the life of the process.
    """

    def hook(event: str, _: object) -> None:
        if event in REFUSED_EVENTS and simulation_thread == get_ident():
            refuse(*REFUSED_EVENTS[event])

    sys.addaudithook(hook)


def refusing_function(what: str, instead: str) -> Callable[..., Any]:
    return lambda *_, **__: refuse(what, instead)


def defaulting_to_now(name: str, before: int, now: Callable[[], Any]) -> Replacement:
    """Return the row that replaces a `time` function whose time argument defaults to now.

    `before` is the number of arguments before the time, and `now` returns the default.
    """
    real = getattr(time, name)

    def call(*args: Any) -> Any:
        given = args[before:] not in ((), (None,))
        return real(*args) if given else real(*args[:before], now())

    return time, name, call


def only_in_simulation(
    simulated: Callable[..., Any], real: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls `simulated` in a simulation's thread, and `real` elsewhere.

    The thread is checked at each call, because a module that is first imported during a simulation
    may keep the returned function after the simulation has ended.
    """

    def call(*args: Any, **options: Any) -> Any:
        return (simulated if simulation_thread == get_ident() else real)(*args, **options)

    return call


# A simulation replaces these functions in their own modules. `imported_copies` covers the modules
# that have imported them by name (`from time import time`).
FUNCTIONS: list[Replacement] = [
    *((time, name, in_seconds(clock)) for name, clock in CLOCKS.items()),
    *((time, f"{name}_ns", clock) for name, clock in CLOCKS.items()),
    *(defaulting_to_now(name, 0, in_seconds(wall_ns)) for name in ("gmtime", "localtime", "ctime")),
    *(
        defaulting_to_now(name, before, lambda: time.localtime(wall_ns() / SECOND))
        for name, before in (("asctime", 0), ("strftime", 1))
    ),
    (time, "clock_gettime", lambda clock: clock_gettime_ns(clock) / SECOND),
    (time, "clock_gettime_ns", clock_gettime_ns),
    (time, "sleep", sleep),
    (os, "urandom", urandom),
    (os, "getrandom", urandom),
    (ssl, "RAND_bytes", urandom),
    (random, "_urandom", urandom),  # used by `secrets`
    (random, "seed", lambda *args, **named: random.Random.seed(random._inst, *args, **named)),
    (random.Random, "seed", seed_generator),
    (socket, "getaddrinfo", getaddrinfo),
    (socket, "gethostbyname", lambda name: getaddrinfo(name, None, socket.AF_INET)[0][4][0]),
    (signal, "signal", set_handler),
    (socket, "getfqdn", lambda name="": name or current_machine().host.name),  # type: ignore[union-attr]
    (socket, "gethostname", lambda: current_machine().host.name),  # type: ignore[union-attr]
    *(
        (place, name, refusing_function(what, instead))
        for place, names, what, instead in REFUSED_FUNCTIONS
        if place is not None
        for name in names.split()
    ),
]
REPLACED: list[Replacement] = [
    *(
        (place, name, only_in_simulation(value, getattr(place, name)))
        for place, name, value in FUNCTIONS
    ),
    (socket, "socket", Socket),
]
# This maps the id() of each original function to its replacement. Class attributes are omitted,
# because modules cannot import them by name.
REPLACEMENT_BY_ID = {
    id(getattr(place, name)): value
    for place, name, value in REPLACED
    if isinstance(place, ModuleType)
}
# These modules keep the real clock, because they measure how long they wait for other threads.
REAL_CLOCK_MODULES = {"threading", "queue"}


def imported_copies() -> list[Replacement]:
    """Return replacements for the copies that modules got with `from time import time`, say."""
    return [
        (module, name, REPLACEMENT_BY_ID[id(value)])
        for module_name, module in list(sys.modules.items())
        if module_name not in REAL_CLOCK_MODULES
        and not module_name.startswith(__package__)
        and not REPLACEMENT_BY_ID.keys().isdisjoint(
            map(id, getattr(module, "__dict__", {}).values())
        )
        for name, value in list(vars(module).items())
        if id(value) in REPLACEMENT_BY_ID
    ]


def host_record_factory(
    started_at: int, make: Callable[..., logging.LogRecord]
) -> Callable[..., logging.LogRecord]:
    """Return a log record factory that calls `make` and adds the simulated host and time."""

    def with_host(*args: Any, **options: Any) -> logging.LogRecord:
        record, machine = make(*args, **options), current_machine()
        record.simulated_host = machine.host.name if machine else "-"
        record.simulated_time = (softdev.sim_now() - started_at) / SECOND
        return record

    return with_host


@contextmanager
def host_logging() -> Iterator[None]:
    """Add `simulated_host` and `simulated_time` to log records. The time is 0 now.

    If AIORDMA_SIMULATION_LOG is set, the records are also written to the file that it names, or to
    standard error if it is "-".
    """
    root, started_at = logging.getLogger(), softdev.sim_now()
    previous_level, previous_factory = root.level, logging.getLogRecordFactory()
    handler: logging.Handler | None = None
    if name := os.environ.get(LOG):
        try:
            handler = logging.StreamHandler() if name == "-" else logging.FileHandler(name, "w")
        except OSError as error:
            reason = f"cannot write the log that {LOG} requests: {error.strerror}"
            raise OSError(error.errno, reason, name) from None
        handler.setFormatter(logging.Formatter(LOG_LINE))
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
    logging.setLogRecordFactory(host_record_factory(started_at, previous_factory))
    try:
        yield
    finally:
        logging.setLogRecordFactory(previous_factory)
        if handler:
            root.setLevel(previous_level)
            root.removeHandler(handler)
            handler.close()


@contextmanager
def simulated(seed: int, devices: int) -> Iterator[None]:
    """Replace the clock, random numbers, network and devices with those of the simulation."""
    global random_source, simulation_thread  # noqa: PLW0603 - one for the process
    watch_events()
    generators: list[tuple[Any, Any, Any]] = [(random.seed, random.setstate, random.getstate())]
    with suppress(OSError):
        # Fill these caches before the simulation begins. The first call of gettempdir() draws
        # random names, and the first call of processor() runs a program.
        tempfile.gettempdir()
        platform.processor()
    with suppress(ImportError):
        from numpy import random as numpy_random  # noqa: PLC0415 - optional

        generators.append((numpy_random.seed, numpy_random.set_state, numpy_random.get_state()))
    replaced: list[Replacement] = [
        *REPLACED,
        *imported_copies(),
        # Replace these cached values. They come from the machine or from earlier calls, so they
        # would make runs differ.
        (tempfile, "_name_sequence", None),
        (uuid, "_node", UUID_NODE),
        (uuid, "_generate_time_safe", None),
        *((uuid, name, None) for name in vars(uuid) if name.startswith("_last_timestamp")),
        (device, "_embedded_devices", cache(device._embedded_devices.__wrapped__)),
        # Each read of this clock advances virtual time. Polling until a deadline would otherwise
        # never end.
        (completion, "_MAX_BUSY_POLL", 0),
        (completion, "time", SimpleNamespace(monotonic=in_seconds(softdev.sim_look))),
    ]
    originals = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    gc_was_enabled = gc.isenabled()
    try:
        with (
            host_logging(),
            patch.dict(os.environ, ENVIRONMENT, AIORDMA_EMBEDDED_DEVICES=str(devices)),
        ):
            os.environ.pop("AIORDMA_TRACE", None)
            for place, name, value in replaced:
                setattr(place, name, value)
            random_source = random.Random(f"programs {seed}")
            for set_seed, *_ in generators:
                set_seed(seed % (1 << 32))  # numpy accepts no more than 32 bits
            simulation_thread = get_ident()
            gc.disable()  # automatic collections would make runs differ
            gc.freeze()  # exclude existing objects from every collection
            yield
    finally:
        random_source = simulation_thread = None
        for place, name, value in originals:
            setattr(place, name, value)
        for _, restore_state, state in generators:
            restore_state(state)
        gc.collect()  # move the survivors to the oldest generation, which is rarely collected
        gc.unfreeze()
        if gc_was_enabled:
            gc.enable()
