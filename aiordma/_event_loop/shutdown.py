"""The shutdown of objects that are still open when their event loop ends.

`asyncio.run` closes the asynchronous generators of its loop before it closes the loop. Each loop
with open objects therefore has a generator that waits for this moment. It then closes the objects
and issues a ResourceWarning for each of them.

If a loop is closed in another way, it drops its readers and timers without running them. Readers of
the library therefore refer to a `LoopEnd`, to which nothing else refers. When the `LoopEnd` is
finalized and the loop is closed, the resources of the loop are released immediately. Objects that
were dropped too late for the loop to end them are ended in the same way.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import ExitStack, suppress
from functools import partial
from types import MethodType
from typing import Any, Protocol, Self, TypeVar

from .._core.async_only import AsyncContext
from .._core.finalizers import finalizer
from .._native import fork
from .affinity import LoopAffinity
from .per_loop_resource import PerLoopResource

T = TypeVar("T")

# Exceptions that end the program if a callback or a task raises them, as in asyncio.
EXITS = (SystemExit, KeyboardInterrupt)

# Exceptions that end the program, cancel a task, or close a coroutine. Code that awaits user code
# must let them propagate. Any other exception is a failure of the user code.
UNWINDING = (*EXITS, asyncio.CancelledError, GeneratorExit)


def background(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Create a task that is not in `asyncio.all_tasks()`.

    Many programs cancel all tasks when they end, as `asyncio.run` does. A connection must outlive
    the cancelled tasks to send their last data, as a TCP connection does. The task begins in a
    later iteration of the loop, even if the loop has an eager task factory.
    """
    task = asyncio.Task(work, loop=loop)
    asyncio._unregister_task(task)
    # Suppress asyncio's warning about a pending task, because the task's owner issues its own.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return task


def weak_method(method: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls a bound method without keeping its object alive."""
    # weakref.WeakMethod is written in Python, and is five times slower than this function.
    assert isinstance(method, MethodType)
    ref, function = weakref.ref(method.__self__), method.__func__

    def call(*args: object) -> None:
        owner = ref()
        if owner is not None:
            function(owner, *args)

    return call


class Closable(Protocol):
    """An object that must be closed before its event loop ends."""

    @property
    def _affinity(self) -> LoopAffinity: ...

    async def _end_with_loop(self) -> None:
        """Close the object before its loop is closed."""

    def _end_without_loop(self) -> None:
        """Release the resources of an object whose loop is closed, without setting any futures."""


class EndsWhenDropped:
    """A base class that closes objects and issues a ResourceWarning if they are dropped open."""

    _affinity: LoopAffinity
    _loop_shutdown: LoopShutdown

    def _is_open(self) -> bool:
        return self._loop_shutdown.is_open(self)

    def _drop(self) -> None:
        """Close the object. This is called in its loop."""
        raise NotImplementedError

    async def _end_with_loop(self) -> None:
        raise NotImplementedError

    def _end_without_loop(self) -> None:
        raise NotImplementedError

    @finalizer
    def __del__(self) -> None:
        """Make the loop close the object if it is open. This may run in any thread at any time."""
        loop_shutdown: LoopShutdown | None = getattr(self, "_loop_shutdown", None)
        if loop_shutdown is None or self._affinity.is_after_fork or not self._is_open():
            return
        text = f"{self!r}{self._affinity.creation_site()} was not closed"
        loop_shutdown.keep_dropped(self)
        try:
            self._affinity.loop.call_soon_threadsafe(self._drop)
        except RuntimeError:  # the loop has been closed
            loop_shutdown.remove(self)
            self._end_without_loop()
        warnings.warn(text, ResourceWarning, source=self, stacklevel=1)


class ClosesAtExit(EndsWhenDropped, AsyncContext):
    """A base class for objects with a `close` method that does not wait.

    `close` is called at the end of `async with`, when the loop ends, and when the object is
    dropped.
    """

    def close(self) -> None:
        raise NotImplementedError

    def _drop(self) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _end_with_loop(self) -> None:
        self.close()


class LoopShutdown:
    """The open objects of one loop, which are closed when the loop ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: dict[int, weakref.ref[Closable]] = {}
        self._strong_references: dict[int, Closable] = {}
        self._dropped: dict[int, Closable] = {}  # dropped while open, and not closed yet
        self._closing: set[int] = set()
        self._finished = False
        self._generator = self._close_at_loop_end()
        run_step(self._generator.asend(None))  # the first step registers it with the loop

    def add(self, thing: Closable, *, keep: bool = False) -> None:
        """Track an object until `remove`, through a weak reference unless `keep` is True."""
        self._open[id(thing)] = weakref.ref(thing)
        if keep:
            self._strong_references[id(thing)] = thing

    def is_open(self, thing: Closable) -> bool:
        """Return whether `thing` has been added but not yet removed or finalized."""
        return id(thing) in self._open

    def take_over(self, thing: Closable, part: Closable) -> None:
        """Track `thing` through a weak reference, and stop tracking `part`, which it will close."""
        self.add(thing)
        self._open.pop(id(part), None)

    def mark_closing(self, thing: Closable) -> None:
        """Keep a closing object alive until `remove`, and do not warn if the loop ends first."""
        self._closing.add(id(thing))
        self.add(thing, keep=True)

    def remove(self, thing: Closable) -> None:
        self._open.pop(id(thing), None)
        self._strong_references.pop(id(thing), None)
        self._dropped.pop(id(thing), None)
        self._closing.discard(id(thing))
        if not self._open and not self._dropped and not self._finished:
            self._unregister()
            run_step(self._generator.aclose())

    def keep_dropped(self, thing: Closable) -> None:
        """Keep a dropped object alive until it has been closed. This may run in any thread.

        The object asks its loop to close it, but the loop itself may be closed first.
        """
        self._dropped[id(thing)] = thing
        self._open.pop(id(thing), None)

    def open_objects(self) -> list[Closable]:
        return [thing for ref in list(self._open.values()) if (thing := ref()) is not None]

    def _unregister(self) -> None:
        self._finished = True
        if _shutdowns.get(self._loop) is self:
            _shutdowns.pop(self._loop, None)

    async def _close_at_loop_end(self) -> AsyncGenerator[None, None]:
        """Wait until asyncio closes the loop's async generators, then close all open objects."""
        try:
            yield
        finally:
            if not self._finished:
                self._unregister()
                texts = self._warning_texts()
                things = [*self.open_objects(), *self._dropped.values()]
                # Close the objects concurrently, because each one may wait for its peer.
                await asyncio.gather(*(thing._end_with_loop() for thing in things))
                warn(texts)

    def _warning_texts(self) -> list[str]:
        return [
            f"{thing!r}{thing._affinity.creation_site()} was not closed before its event loop was"
            for thing in self.open_objects()
            if id(thing) not in self._closing
        ]

    def reset_after_fork(self) -> None:
        """Stop tracking objects in a forked child, which must not touch its parent's loop."""
        self._finished = True
        with suppress(RuntimeError):  # the generator is running
            run_step(self._generator.aclose())

    def finish(self) -> None:
        """Release all objects of a loop that was closed without running its async generators."""
        self._finished = True
        texts = self._warning_texts()
        with ExitStack() as steps:  # runs all steps in reverse order, even if one fails
            steps.callback(warn, texts)
            # As in `_close_at_loop_end`, the open objects end first, in order of creation.
            for thing in [*self._dropped.values(), *reversed(self.open_objects())]:
                steps.callback(thing._end_without_loop)
        self._open.clear()
        self._dropped.clear()


class LoopEnd:
    """An object that is finalized with its loop, because only the loop's callbacks refer to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def bind_callback(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Wrap a reader's callback in a function that keeps this object alive."""
        return partial(_call, callback, self)

    @finalizer
    def __del__(self) -> None:
        if self._loop.is_closed():
            finish_loop(self._loop)


def _call(callback: Callable[[], None], end: LoopEnd) -> None:
    del end  # a stored exception of the callback would refer to this frame
    callback()


def warn(texts: list[str]) -> None:
    """Issue the warnings. Call this last, because a filter may turn a warning into an exception."""
    for text in texts:
        warnings.warn(text, ResourceWarning, stacklevel=1)


def run_step(awaitable: Awaitable[object]) -> None:
    """Run one step of an async generator. The step must not wait for anything."""
    with suppress(StopIteration, StopAsyncIteration):
        awaitable.__await__().send(None)


# Access this dictionary only with atomic operations. A lock could cause a deadlock, because a
# finalizer can run at any point, even in the thread that holds the lock.
_shutdowns: dict[asyncio.AbstractEventLoop, LoopShutdown] = {}


def for_running_loop() -> LoopShutdown:
    loop = asyncio.get_running_loop()
    shutdown = _shutdowns.get(loop)
    if shutdown is None:
        # Without this, the objects of a loop without readers would never be released.
        finish_closed_loops()
        shutdown = _shutdowns[loop] = LoopShutdown(loop)
    return shutdown


def all_open() -> list[Closable]:
    """Return the open objects of every loop. Any thread may call this."""
    return [thing for shutdown in list(_shutdowns.values()) for thing in shutdown.open_objects()]


# Maps the id of each loop to its LoopEnd. The LoopEnd keeps the loop alive, so the id is not
# reused.
_loop_ends: weakref.WeakValueDictionary[int, LoopEnd] = weakref.WeakValueDictionary()


def loop_end(loop: asyncio.AbstractEventLoop) -> LoopEnd:
    found = _loop_ends.get(id(loop))
    if found is None:
        found = _loop_ends[id(loop)] = LoopEnd(loop)
    return found


def finish_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Release the objects of a closed loop, and then the resources that they share."""
    with ExitStack() as steps:  # runs all steps in reverse order, even if one fails
        steps.callback(PerLoopResource.end_all, loop)
        if (shutdown := _shutdowns.pop(loop, None)) is not None:
            steps.callback(shutdown.finish)


def finish_closed_loops() -> None:
    """Release the open objects of closed loops.

    Only loops without readers need this. The other loops have a `LoopEnd`, which does the same.
    """
    for loop in list(_shutdowns):
        if loop.is_closed():
            finish_loop(loop)


def _reset_after_fork() -> None:
    for shutdown in _shutdowns.values():
        shutdown.reset_after_fork()
    _shutdowns.clear()


fork.reset_in_child(_reset_after_fork)
