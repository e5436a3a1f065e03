"""The client for programs with threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import uvloop

from .client import Client
from .common import disable_polling

P = ParamSpec("P")
T = TypeVar("T")


def _in_loop(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[ThreadClient, P], Future[T]]:
    """Return a method that calls this method of the client in the loop's thread."""

    @wraps(method)
    def submit(self: ThreadClient, /, *args: P.args, **options: P.kwargs) -> Future[T]:
        return self.submit(lambda client: method(client, *args, **options))

    return submit


class ThreadClient:
    """A client for programs with threads: its methods are those of `Client`, and return futures.

    One daemon thread runs an event loop for all calls. Methods can be called from any thread. The
    futures cannot be cancelled. The arguments are those of `Client`, and the constructor waits
    until each server is connected or lost.
    """

    def __init__(self, servers: Sequence[str], **options: Any) -> None:
        self._client = Client(servers, **options)
        self._process = os.getpid()
        self._lock = threading.Lock()  # no call can be scheduled after `close`
        self._closing = False
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=[started], name="aiordma-kv", daemon=True
        )
        self._thread.start()
        started.result()

    def _run(self, started: Future[None]) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: Future[None]) -> None:
        disable_polling()
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        async with self._client, asyncio.TaskGroup() as self._calls:
            started.set_result(None)
            await self._stopped.wait()

    def submit(self, function: Callable[[Client], Coroutine[Any, Any, T]]) -> Future[T]:
        """Call a function with the client in the loop's thread. Returns a future of its result."""
        if os.getpid() != self._process:
            raise RuntimeError("this client belongs to the parent process; create another client")
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        async def call() -> None:
            try:
                future.set_result(await function(self._client))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closing:
                raise RuntimeError("this client is closed; create another client")
            self._loop.call_soon_threadsafe(lambda: self._calls.create_task(call()))
        return future

    @property
    def connected(self) -> dict[str, bool]:
        """Whether each server is connected now."""
        return self._client.connected

    put = _in_loop(Client.put)
    locate = _in_loop(Client.locate)
    get = _in_loop(Client.get)
    unlock = _in_loop(Client.unlock)
    delete = _in_loop(Client.delete)
    contains = _in_loop(Client.contains)
    stats = _in_loop(Client.stats)

    def close(self) -> None:
        """Finish all calls and close the connections.

        In a callback of a future, this returns before the calls have finished.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._closing:
                self._closing = True
                self._loop.call_soon_threadsafe(self._stopped.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
