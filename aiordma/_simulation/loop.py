"""The event loop of a simulated host."""

from __future__ import annotations

import asyncio
import math
import select
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .._event_loop.virtual_loop import VirtualLoop
from .process import monotonic_ns
from .sockets import check_simulated, getaddrinfo, refuse

if TYPE_CHECKING:
    from .machine import Machine

T = TypeVar("T")

NEVER = (1 << 64) - 1
# Closing a coroutine fails once for each await in its `finally` blocks. This constant limits the
# number of attempts.
MAX_CLOSE_ATTEMPTS = 100


class Future(asyncio.Future[Any]):
    """A future whose hash is its serial number, so that the order of sets is reproducible."""

    number: int

    def __hash__(self) -> int:
        return self.number


class Task(asyncio.Task[Any]):
    """A task whose hash is its serial number, as for `Future`. Its name begins with the host."""

    number: int
    host: str

    def __hash__(self) -> int:
        return self.number

    def set_name(self, value: object) -> None:
        super().set_name(f"{self.host}: {value}")


class HostLoop(VirtualLoop):
    """An event loop that runs one iteration each time the scheduler calls it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.machine = machine
        self.set_task_factory(self._new_task)  # type: ignore[arg-type]
        self._epoll: select.epoll = self._selector._selector  # type: ignore[attr-defined]
        self.fd: int = self._epoll.fileno()

    def time(self) -> float:
        return monotonic_ns() / 1e9

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future with a serial number, because asyncio's futures hash by their address."""
        future = Future.__new__(Future)
        future.number = self.machine.world._next_number()
        Future.__init__(future, loop=self)
        return future

    def _new_task(
        self, _: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        """Create a task with a serial number, because asyncio's names and hashes differ per run."""
        task = Task.__new__(Task)
        task.number = self.machine.world._next_number()
        task.host = self.machine.host.name
        given = options.pop("name", None)
        Task.__init__(task, work, loop=self, **options)
        task.set_name(
            given or f"{getattr(work, '__qualname__', type(work).__name__)}-{task.number}"
        )
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run the function in this thread, because simulated hosts do not have other threads."""
        if not isinstance(executor, ThreadPoolExecutor | None):
            refuse("executors other than thread pools", "pass None as the executor")
        future: asyncio.Future[T] = self.create_future()
        self.call_soon(_settle_with_result, future, function, args)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        return getaddrinfo(host, port, **options)

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """Connect a socket. If nothing listens at the address, add the reason to the error."""
        try:
            await super().sock_connect(sock, address)
        except ConnectionRefusedError as error:
            raise ConnectionRefusedError(error.errno, f"{error.strerror}{sock.hint}") from None

    def _make_socket_transport(self, sock: Any, *args: Any, **options: Any) -> Any:
        check_simulated(sock)
        return super()._make_socket_transport(sock, *args, **options)  # type: ignore[misc]

    def _start_serving(self, factory: Any, sock: Any, *args: Any) -> None:
        check_simulated(sock)
        super()._start_serving(factory, sock, *args)  # type: ignore[misc]

    def _add_reader(self, fd: Any, *args: Any) -> Any:
        if sys.__stdin__ is not None and fd in (0, sys.__stdin__, sys.stdin):
            refuse("reading from standard input", "pass arguments to the program")
        return super()._add_reader(fd, *args)  # type: ignore[misc]

    async def _sendfile_native(self, _: Any, file: Any, offset: int, *__: Any) -> NoReturn:
        """Make asyncio read the file instead, because sendfile(2) would bypass the simulation."""
        file.seek(offset)
        raise asyncio.SendfileNotAvailableError

    _sock_sendfile_native = _sendfile_native

    def add_signal_handler(self, sig: int, callback: Any, *_: Any) -> None:  # type: ignore[override]
        """Store the handler but never call it, because simulated hosts do not receive signals."""
        self._signal_handlers[sig] = callback  # type: ignore[attr-defined]

    def remove_signal_handler(self, sig: int) -> bool:
        return self._signal_handlers.pop(sig, None) is not None  # type: ignore[attr-defined]

    # ---- for the scheduler ---------------------------------------------------------------

    def next_due_time(self) -> int:
        """Return when the next callback is due in nanoseconds, or NEVER if none is scheduled."""
        if self._ready:  # type: ignore[attr-defined]
            return 0
        timers = self._scheduled  # type: ignore[attr-defined]
        return math.ceil(timers[0].when() * 1e9) if timers else NEVER

    def has_input(self) -> bool:
        """Return whether a descriptor that the loop watches is ready.

        A packet that only the device handles does not count as input.
        """
        return bool(self._epoll.poll(0, 1))

    def turn(self) -> None:
        """Run one iteration of the loop."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(
            firstiter=self._asyncgen_firstiter_hook,  # type: ignore[attr-defined]
            finalizer=self._asyncgen_finalizer_hook,  # type: ignore[attr-defined]
        )
        self._thread_id: int | None = threading.get_ident()
        outer_loop = asyncio._get_running_loop()  # the event loop that called `simulate`, if any
        asyncio._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(outer_loop)
            self._thread_id = None
            sys.set_asyncgen_hooks(*hooks)

    async def end(self) -> None:
        """Cancel all tasks and wait for them, as `asyncio.run` does."""
        tasks = asyncio.all_tasks(self) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.shutdown_asyncgens()

    def abandon(self) -> None:
        """Close the loop and its remaining coroutines, which tracebacks might keep alive."""
        outer_loop = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            # `close` fails if the coroutine awaits something in a `finally` block. Repeat it until
            # the coroutine has passed all of these blocks.
            for _ in range(MAX_CLOSE_ATTEMPTS):
                with suppress(BaseException):
                    task.get_coro().close()
                    break
        asyncio._set_running_loop(outer_loop)
        self.close()


def _settle_with_result(
    future: asyncio.Future[Any], function: Callable[..., Any], args: Any
) -> None:
    if future.cancelled():
        return
    try:
        future.set_result(function(*args))
    except BaseException as error:  # as executors do
        future.set_exception(error)
