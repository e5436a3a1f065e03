"""Where an object may be used: in its own event loop, the thread of that, and its own process.

Nothing here takes a lock for the user's objects: a call from another thread would corrupt what the
loop is in the middle of, and the child of a fork would write to what is its parent's. Both are
refused. Ending an object is not refused in the child of a fork, so that a child that unwinds its
parent's `async with` can leave; it does nothing, because there is nothing that is the child's.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from asyncio import _get_running_loop

from .errors import WrongLoopError

_forks = 0  # from the first process to this one

_OURS = os.path.dirname(__file__) + os.sep
_ASYNCIO = os.path.dirname(asyncio.__file__) + os.sep


def _after_fork_in_child() -> None:
    global _forks  # noqa: PLW0603 - a fact about the process
    _forks += 1


os.register_at_fork(after_in_child=_after_fork_in_child)


class Home:
    """Taken by an object when it is made, in its running loop."""

    __slots__ = ("_forks", "_thread", "loop", "made_at")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._forks = _forks
        self.made_at = _caller()

    @property
    def is_parents(self) -> bool:
        """This is the child of a fork, and the object its parent's."""
        return self._forks != _forks

    def check(self, what: object) -> None:
        """WrongLoopError unless this is the place. Without a loop that runs, its thread is."""
        here = _get_running_loop()
        if here is not self.loop:
            self._elsewhere(what, here)

    def _elsewhere(self, what: object, here: asyncio.AbstractEventLoop | None) -> None:
        if self.is_parents:
            raise WrongLoopError(
                f"{what!r} was made before fork() and belongs to the parent process; "
                f"a child makes connections of its own"
            )
        if here is not None:
            where = "another event loop"
        elif threading.get_ident() != self._thread:
            where = f"thread {threading.current_thread().name!r}"
        else:
            return
        raise WrongLoopError(
            f"{what!r} was used in {where}: it belongs to the event loop in which it was made"
            f"{self.made()}; asyncio.run_coroutine_threadsafe() runs a coroutine there"
        )

    def made(self) -> str:
        """Where it was made, to be added to a sentence; empty where that is not the user's code."""
        return f" ({self.made_at})" if self.made_at else ""


def _caller() -> str:
    """The file and line of the nearest code that is not aiordma's; empty if the loop called it."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_ASYNCIO):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
