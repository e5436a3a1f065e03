"""The event loop, thread and process that an object belongs to, and the refusal of all others.

Nothing here locks the user's objects: a call from another thread would corrupt what the loop is in
the middle of, and the child of a fork would write to its parent's connection.  Both are refused.
Closing an object in the child of a fork does nothing instead, so that a child can unwind its
parent's `async with`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from asyncio import _get_running_loop

from .._native import fork
from ..errors import WrongLoopError

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ASYNCIO = os.path.dirname(asyncio.__file__) + os.sep


class LoopAffinity:
    """Made with the object that it is about, in its running loop."""

    __slots__ = ("_generation", "_thread", "loop", "made_at")

    # Finalizers ask when the globals of this module may be None.
    _current_generation = staticmethod(fork.generation)

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._generation = fork.generation()
        self.made_at = _caller()

    @property
    def is_after_fork(self) -> bool:
        """Whether this is the child of a fork, and the object its parent's."""
        return self._generation != self._current_generation()

    def check(self, what: object) -> None:
        """WrongLoopError outside the loop; where no loop runs, outside its thread."""
        here = _get_running_loop()
        if here is not self.loop:
            self._elsewhere(what, here)

    def _elsewhere(self, what: object, here: asyncio.AbstractEventLoop | None) -> None:
        if self.is_after_fork:
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
        """File and line of its making, to end a sentence; empty where that is not user code."""
        return f" ({self.made_at})" if self.made_at else ""


def _caller() -> str:
    """The file and line of the nearest code outside aiordma; empty if the loop called it."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_ASYNCIO):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
