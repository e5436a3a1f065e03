"""What is still open when its event loop ends, and goes with it.

`asyncio.run` ends the asynchronous generators of its loop before it closes it, which is the only
word that a loop gives of its end. So one generator per loop waits for that, as long as anything is
open there, and then ends what is left, with a ResourceWarning for each. A loop that is closed
without that word is noticed when another one comes to be used.
"""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import Protocol

from .home import Home


class Ending(Protocol):
    """Something of a loop that has to be closed."""

    @property
    def _home(self) -> Home: ...

    async def _end_with_loop(self) -> None:
        """The loop is about to be closed: give everything back."""

    def _end_without_loop(self) -> None:
        """The loop has been closed already: give back what can be."""


class LoopEnd:
    """What is open on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: dict[int, weakref.ref[Ending]] = {}
        self._kept: dict[int, Ending] = {}
        self._over = False
        self._word = self._wait()
        step(self._word.asend(None))  # to its first step, where the loop gets to know of it

    def add(self, thing: Ending, *, keep: bool = False) -> None:
        """Until `remove`; `keep`: the loop has it, also when nobody else does."""
        self._open[id(thing)] = weakref.ref(thing)
        if keep:
            self._kept[id(thing)] = thing

    def remove(self, thing: Ending) -> None:
        """It has been closed, or is about to vanish."""
        self._open.pop(id(thing), None)
        self._kept.pop(id(thing), None)
        if not self._open and not self._over:
            self._forget()
            step(self._word.aclose())

    def _left(self) -> list[Ending]:
        return [thing for ref in list(self._open.values()) if (thing := ref()) is not None]

    def _forget(self) -> None:
        self._over = True
        with _lock:
            if _ends.get(self._loop) is self:
                del _ends[self._loop]

    async def _wait(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if not self._over:
                self._forget()
                texts = self._texts()
                for thing in self._left():
                    await thing._end_with_loop()
                warn(texts)

    def _texts(self) -> list[str]:
        return [
            f"{thing!r}{thing._home.made()} was not closed before its event loop"
            for thing in self._left()
        ]

    def disown(self) -> None:
        """In the child of a fork, where the loop is the parent's and must not be touched."""
        self._over = True
        with suppress(RuntimeError):  # it was in the middle of it
            step(self._word.aclose())

    def finish(self) -> None:
        """The loop was closed without a word."""
        self._over = True
        texts = self._texts()
        for thing in self._left():
            thing._end_without_loop()
        warn(texts)


def warn(texts: list[str]) -> None:
    """Last, since a warning may be an error."""
    for text in texts:
        warnings.warn(text, ResourceWarning, stacklevel=1)


def step(awaitable: Awaitable[object]) -> None:
    """Something of a generator that waits for nothing."""
    with suppress(StopIteration, StopAsyncIteration):
        awaitable.__await__().send(None)


_ends: dict[asyncio.AbstractEventLoop, LoopEnd] = {}
_lock = threading.Lock()


def of_running_loop() -> LoopEnd:
    """Of the loop that runs here."""
    loop = asyncio.get_running_loop()
    end = _ends.get(loop)
    if end is None:
        clear_closed()
        end = LoopEnd(loop)
        with _lock:
            _ends[loop] = end
    return end


def clear_closed() -> None:
    """Ends what loops have left behind that are closed."""
    with _lock:
        closed = [loop for loop in _ends if loop.is_closed()]
        gone = [_ends.pop(loop) for loop in closed]
    for end in gone:
        end.finish()


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held it while this one forked
    _lock = threading.Lock()
    for end in _ends.values():
        end.disown()
    _ends.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
