"""The clock and the chance of this process, while it simulates hosts."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from .._loop import coarse_timers, driver
from .._native import ffi, lib
from .._transport import connect_tcp, lease_thread, tcp_link
from ..verbs._device import device
from . import sockets

SECOND = 1_000_000_000
EPOCH = 1_800_000_000  # of the wall clock, as of the devices' (sim.c)

ENVIRONMENT = {"AIORDMA_DEVICE": "embedded0", "AIORDMA_EMBEDDED_LINKS": "roce"}
WITHOUT = ("AIORDMA_EMBEDDED_FAULTS", "AIORDMA_TRACE")


class Timers(coarse_timers.CoarseTimers):
    """Whose descriptor becomes readable in virtual time."""

    _alarm: asyncio.TimerHandle | None = None

    def _open(self) -> int:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def _arm(self, when: float) -> None:
        self._disarm()
        self._alarm = self._loop.call_at(when, os.eventfd_write, self.fd, 1)

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def close(self) -> None:
        self._disarm()
        super().close()


class Leases:
    """Ends leases in the loop that grants them, in place of the thread."""

    ident = None
    ending = False

    def add(self, deadline: lease_thread.Deadline) -> None:
        deadline._threads.append(self)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_at(deadline.when, deadline.run)

    def cancelled(self) -> None:
        """It is in the loop until its time."""

    def start(self) -> None:
        """There is no thread."""


chance: random.Random | None = None
"""What programs draw, while a simulation is on."""
injected: str | None = None
"""The plan of the block of `testing.faults` that is open."""


def monotonic() -> float:
    return lib.aiordma_sim_look() / SECOND


def wall() -> float:
    return EPOCH + monotonic()


def wall_ns() -> int:
    return EPOCH * SECOND + lib.aiordma_sim_look()


def sleep(seconds: float) -> None:
    lib.aiordma_sim_pass(round(seconds * SECOND))


def urandom(size: int) -> bytes:
    assert chance is not None
    return chance.randbytes(size)


def while_on(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """The simulated function while a simulation is on, and the real one otherwise.

    A module that is first imported in a simulation, and takes the name, has this one for good.
    """
    return lambda *args: real(*args) if chance is None else simulated(*args)


@contextmanager
def simulated(seed: int, devices: int) -> Iterator[None]:
    """The simulation answers programs, and this package, in place of the machine."""
    global chance  # noqa: PLW0603 - one for the process
    of_programs: list[tuple[Any, str, Any]] = [
        (time, "monotonic", monotonic),
        (time, "monotonic_ns", lib.aiordma_sim_look),
        (time, "perf_counter", monotonic),
        (time, "perf_counter_ns", lib.aiordma_sim_look),
        (time, "time", wall),
        (time, "time_ns", wall_ns),
        (time, "sleep", sleep),
        (os, "urandom", urandom),
        (random, "_urandom", urandom),  # of `secrets`
    ]
    replaced: list[tuple[Any, str, Any]] = [
        *((at, name, while_on(value, getattr(at, name))) for at, name, value in of_programs),
        (lease_thread, "_LeaseThread", Leases),
        (lease_thread, "_thread", None),
        (device, "_embedded_devices", cache(device._embedded_devices.__wrapped__)),
        (driver, "CoarseTimers", Timers),
        (tcp_link, "connected_socket", sockets.connected_socket),
        (connect_tcp, "listening_socket", sockets.listening_socket),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    drawn, collects = random.getstate(), gc.isenabled()
    clock = ffi.cast("uintptr_t", ffi.addressof(lib, "aiordma_sim_look"))
    try:
        with patch.dict(os.environ, ENVIRONMENT, AIORDMA_EMBEDDED_DEVICES=str(devices)):
            for name in WITHOUT:
                os.environ.pop(name, None)
            for place, name, value in replaced:
                setattr(place, name, value)
            lib.aiordma_use_clock(int(clock))
            chance = random.Random(f"programs {seed}")
            random.seed(seed)
            gc.disable()  # at times of its own, it would be chance
            gc.freeze()  # what is there already is not searched again and again
            yield
    finally:
        chance = None
        for place, name, value in before:
            setattr(place, name, value)
        lib.aiordma_use_clock(0)
        random.setstate(drawn)
        gc.collect()  # what is left is old from now on, and such objects are seldom searched
        gc.unfreeze()
        if collects:
            gc.enable()
