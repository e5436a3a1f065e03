"""Where the CPU time of a connection goes: of connecting and closing, both ends, item by item.

Both ends are in one process on one event loop. An item is the time inside its functions, without
that of other items. What no item has is Python's and asyncio's: tasks, timers, futures, and the
polling of a loop that waits.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import uvloop
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import aiordma
from aiordma.transport import Via

Way = tuple[Via, bool]

WAYS: dict[str, Way] = {
    "in-band": ("tcp", True),
    "a socket each": ("tcp", False),
    "CM": ("cm", True),
}
"""Name, `via` and `Config.in_band`; CM: the connection manager."""

TRANSPORT = "aiordma._transport."
ITEMS: dict[str, tuple[str, ...]] = {
    "make the queue pair": (
        "aiordma.verbs._device.protection_domain:ProtectionDomain.create_qp",
        "aiordma.cm.connection_id:ConnectionId.create_qp",
    ),
    "choose the GID": (
        "aiordma.verbs._device.context:Context.find_gid",
        "aiordma.verbs._device.context:Context.choose_gid",
    ),
    "bring it up to RTS": ("aiordma.verbs._qp.queue_pair:QueuePair.connect",),
    "the rest of the endpoint": (
        TRANSPORT + "endpoint:LocalEndpoint.__init__",
        TRANSPORT + "endpoint:AddressedEndpoint.__init__",
        TRANSPORT + "endpoint:AddressedEndpoint.connect",
    ),
    "make the connection": (TRANSPORT + "connection:Connection.__init__",),
    "post the receives": (TRANSPORT + "connection:Connection._post_receives",),
    "endpoints and hellos": (
        "aiordma._core.handshake:Endpoint.pack",
        "aiordma._core.handshake:Endpoint.unpack",
        "aiordma._core.handshake:Hello.pack",
        "aiordma._core.handshake:Hello.unpack",
    ),
    "sockets": (
        TRANSPORT + "tcp_link:TCPLink.write",
        TRANSPORT + "tcp_link:TCPLink.release",
        TRANSPORT + "tcp_link:TCPLink.data_received",
        TRANSPORT + "tcp_link:TCPLink.connection_made",
        TRANSPORT + "connect_tcp:TCPListener._accept",
    ),
    "the connection manager": (
        "aiordma.cm.connection_id:ConnectionId.resolve_addr",
        "aiordma.cm.connection_id:ConnectionId.resolve_route",
        "aiordma.cm.connection_id:ConnectionId.connect",
        "aiordma.cm.connection_id:ConnectionId.accept",
        "aiordma.cm.connection_id:ConnectionId.disconnect",
        "aiordma.cm.connection_id:ConnectionId.close",
        "aiordma._loop.driver:EventDriver.take",
    ),
    "completions": (
        "aiordma._loop.driver:Driver._on_completions",
        "aiordma._loop.driver:Driver._on_spin_end",
    ),
    "control messages": (
        TRANSPORT + "connection:Connection._take_control",
        TRANSPORT + "lifecycle:ControlChannel.send",
        TRANSPORT + "lifecycle:ControlChannel.send_now",
    ),
    "end, destroy the queue pair": (
        TRANSPORT + "connection:Connection._finish",
        TRANSPORT + "connection:Connection._tear_down",
    ),
}

REST = "asyncio, the rest of Python"
THREAD = "the device's thread"


class Stopwatch:
    """The CPU time of this thread by item; an item inside another one stops the outer one."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._items = [REST]
        self._since = time.thread_time_ns()

    def stop(self) -> None:
        """What is under way counts up to now."""
        now = time.thread_time_ns()
        self.spent[self._items[-1]] += now - self._since
        self._since = now

    def timed(self, item: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.stop()
            self._items.append(item)
            try:
                return function(*args, **kwargs)
            finally:
                self.stop()
                self._items.pop()

        return run

    def watch(self, stack: ExitStack) -> None:
        """Times the functions of all items, until the stack ends."""
        for item, names in ITEMS.items():
            for name in names:
                module, _, path = name.partition(":")
                owner, _, function = path.partition(".")
                found = getattr(importlib.import_module(module), owner)
                kind = vars(found).get(function)
                timed = self.timed(item, getattr(found, function))
                wrap = staticmethod if isinstance(kind, (classmethod, staticmethod)) else _same
                stack.enter_context(mock.patch.object(found, function, wrap(timed)))


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


async def connect_and_close(listener: aiordma.Listener, way: Way, count: int) -> None:
    via, in_band = way
    config = aiordma.Config(in_band=in_band)
    for _ in range(count):
        client, server = await asyncio.gather(
            aiordma.connect("127.0.0.1", listener.port, via=via, config=config), listener.accept()
        )
        await asyncio.gather(client.close(), server.close())


async def measure(way: Way, count: int) -> Counter[str]:
    """Nanoseconds of `count` connections, by item."""
    via, in_band = way
    config = aiordma.Config(in_band=in_band)
    with ExitStack() as stack:
        stopwatch = Stopwatch()
        stopwatch.watch(stack)  # first: the event loop is given methods that are timed
        async with await aiordma.listen("127.0.0.1", 0, via=via, config=config) as listener:
            client, server = await asyncio.gather(
                aiordma.connect("127.0.0.1", listener.port, via=via, config=config),
                listener.accept(),
            )
            await connect_and_close(listener, way, 20)  # what is loaded or cached once
            stopwatch.stop()
            stopwatch.spent.clear()
            process = time.process_time_ns()
            await connect_and_close(listener, way, count)
            stopwatch.stop()
            process = time.process_time_ns() - process
            spent = stopwatch.spent.copy()
            await asyncio.gather(client.close(), server.close())
    spent[THREAD] = max(0, process - spent.total())
    return spent


def table(spent: dict[str, Counter[str]], count: int) -> Table:
    caption = f"us of CPU per connection, both ends; {count} connections"
    shown = Table(box=SIMPLE_HEAD, caption=caption)
    shown.add_column("of connecting and closing")
    for way in spent:
        shown.add_column(way, justify="right")
    for item in (*ITEMS, REST, THREAD):
        shown.add_row(item, *(f"{times[item] / count / 1e3:.0f}" for times in spent.values()))
    shown.add_row("all", *(f"{times.total() / count / 1e3:.0f}" for times in spent.values()))
    return shown


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench connecting", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="connections (%(default)s)")
    count: int = parser.parse_args(arguments).count
    spent = {name: uvloop.run(measure(way, count)) for name, way in WAYS.items()}
    Console().print(table(spent, count))
