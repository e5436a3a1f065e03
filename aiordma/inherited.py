"""Sockets that the child of a fork shall not hold open.

As long as any process has a connected socket open its peer does not see the end of it, and as long
as one has a listening socket its port is taken. A child that outlives its parent must do neither.
It does not close them, since objects that it has inherited may do that once more, when the number
is another file's: something that says nothing takes their place.
"""

from __future__ import annotations

import os
from contextlib import suppress

_sockets: dict[int, int] = {}  # inode number -> descriptor


def add(fd: int) -> int:
    """This process opened it. Returns what `remove` is to be given when it has been closed."""
    inode = os.fstat(fd).st_ino
    _sockets[inode] = fd
    return inode


def remove(inode: int) -> None:
    """It has been closed; again does nothing."""
    _sockets.pop(inode, None)


def _after_fork_in_child() -> None:
    if _sockets:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for inode, fd in _sockets.items():
            with suppress(OSError):  # closed a moment ago
                if os.fstat(fd).st_ino == inode:
                    os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)
        _sockets.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
