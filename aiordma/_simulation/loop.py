"""The event loop of a simulated host."""

from __future__ import annotations

import asyncio
import math
import select
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from .._loop.virtual_loop import VirtualLoop
from .._native import lib
from .sockets import connected_socket, listening_socket

if TYPE_CHECKING:
    from .machine import Machine

T = TypeVar("T")

NEVER = (1 << 64) - 1
# Of `finally` blocks of one task that are closed; each of their awaits refuses it once.
MOST_AWAITS = 100


class Future(asyncio.Future[Any]):
    """Futures and tasks have numbers for hashes: sets of them have the same order in each run."""

    number: int

    def __hash__(self) -> int:
        return self.number


class Task(asyncio.Task[Any]):
    number: int

    def __hash__(self) -> int:
        return self.number


class HostLoop(VirtualLoop):
    """Makes one turn at a time, which the scheduler calls."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.machine = machine
        self.set_task_factory(self._new_task)  # type: ignore[arg-type]
        self._epoll: select.epoll = self._selector._selector  # type: ignore[attr-defined]
        self.fd: int = self._epoll.fileno()

    def time(self) -> float:
        return lib.aiordma_sim_now() / 1e9

    def create_future(self) -> asyncio.Future[Any]:
        future = Future.__new__(Future)
        future.number = self.machine.world._next_number()
        Future.__init__(future, loop=self)
        return future

    def _new_task(
        self, _: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task = Task.__new__(Task)
        task.number = self.machine.world._next_number()
        Task.__init__(task, work, loop=self, **options)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """In this thread: there are no others in a simulation."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        self.call_soon(_run_for, future, function, args)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        """Knows the names of hosts, and looks up no others."""
        found = self.machine.world.hosts.get(host)
        address = found.address if found else "127.0.0.1" if host == "localhost" else host
        options["flags"] = options.get("flags", 0) | socket.AI_NUMERICHOST
        return socket.getaddrinfo(address, port, **options)

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: str | None = None, port: int = 0, **options: Any
    ) -> Any:
        """Over a simulated stream (sockets.py)."""
        source = options.pop("local_addr", None)
        if options.get("sock") is None:
            [*_, (*_, address)] = await self.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            options["sock"] = await connected_socket(address[:2], source)
            if options.get("ssl") and options.get("server_hostname") is None:
                options["server_hostname"] = host
        return await super().create_connection(factory, **options)

    async def create_server(  # type: ignore[override]
        self, factory: Any, host: str | None = None, port: int = 0, **options: Any
    ) -> asyncio.Server:
        if options.get("sock") is None:
            options["sock"] = listening_socket((host or "0.0.0.0", port))
        return await super().create_server(factory, **options)

    # ---- for the scheduler ---------------------------------------------------------------

    def due(self) -> int:
        """When it has something to do, in nanoseconds, without a look at its descriptors."""
        if self._ready:  # type: ignore[attr-defined]
            return 0
        timers = self._scheduled  # type: ignore[attr-defined]
        return math.ceil(timers[0].when() * 1e9) if timers else NEVER

    def has_input(self) -> bool:
        """Whether a descriptor is ready: what comes for the device alone wakes no loop."""
        return bool(self._epoll.poll(0, 1))

    def turn(self) -> None:
        """One iteration."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(
            firstiter=self._asyncgen_firstiter_hook,  # type: ignore[attr-defined]
            finalizer=self._asyncgen_finalizer_hook,  # type: ignore[attr-defined]
        )
        self._thread_id: int | None = threading.get_ident()
        around = asyncio._get_running_loop()  # whose program calls `simulate`
        asyncio._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(around)
            self._thread_id = None
            sys.set_asyncgen_hooks(*hooks)

    async def end(self) -> None:
        """As `asyncio.run` ends."""
        tasks = asyncio.all_tasks(self) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.shutdown_asyncgens()

    def abandon(self) -> None:
        """Ends what is left, now: a traceback may hold it for longer."""
        around = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            for _ in range(MOST_AWAITS):
                with suppress(BaseException):
                    task.get_coro().close()
                    break
        asyncio._set_running_loop(around)
        self.close()


def _run_for(future: asyncio.Future[Any], function: Callable[..., Any], args: Any) -> None:
    if future.cancelled():
        return
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
