"""The event loop, thread and process that an object belongs to.

The library does not lock the user's objects. A call from another thread could corrupt the state of
a running operation, and the child of a fork would write to its parent's connection. Both are
rejected. Closing an object in the child of a fork does nothing, so that a child can leave its
parent's `async with` blocks.
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
    """The loop, thread and process in which an object was created."""

    __slots__ = ("_generation", "_thread", "loop", "made_at")

    # Finalizers call this function, possibly when the globals of this module are already None.
    _current_generation = staticmethod(fork.generation)

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._generation = fork.generation()
        self.made_at = _caller()

    @property
    def is_after_fork(self) -> bool:
        """Whether this process is a forked child of the process that created the object."""
        return self._generation != self._current_generation()

    def check(self, what: object) -> None:
        """Raise WrongLoopError unless the object can be used here.

        It can be used while its loop is running. While no loop is running, it can be used in the
        thread that created it, but not in a forked child.
        """
        here = _get_running_loop()
        if here is not self.loop:
            self._raise_wrong_loop(what, here)

    def _raise_wrong_loop(self, what: object, here: asyncio.AbstractEventLoop | None) -> None:
        if self.is_after_fork:
            raise WrongLoopError(
                f"{what!r} was created before fork() and belongs to the parent process; "
                f"create new connections in the child process"
            )
        if here is not None:
            where = "another event loop"
        elif threading.get_ident() != self._thread:
            where = f"thread {threading.current_thread().name!r}"
        else:
            return
        raise WrongLoopError(
            f"{what!r} was used in {where}, but belongs to the event loop in which it was created"
            f"{self.creation_site()}; use asyncio.run_coroutine_threadsafe() to run code in that "
            "loop"
        )

    def creation_site(self) -> str:
        """Return where the object was created as " (file:line)", or an empty string if unknown."""
        return f" ({self.made_at})" if self.made_at else ""


def _caller() -> str:
    """Return "file:line" of the innermost caller outside aiordma, or "" if asyncio calls it."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_ASYNCIO):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
