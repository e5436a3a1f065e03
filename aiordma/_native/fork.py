"""Resets in the child of a fork, before any other code of it runs: the package's only fork hook.

A child inherits its parent's pointers, locks and sockets and may use none of them.  A module
registers the function that resets its own state; they run in the order of registration, each of
them also when one before it has failed.  This stands in the lowest package because `verbs`
registers here too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress

_resets: list[Callable[[], None]] = []
_generation = 0
_sockets: dict[int, int] = {}  # inode number -> descriptor


def reset_in_child(reset: Callable[[], None]) -> None:
    """Calls `reset` in every child of a fork from now on."""
    _resets.append(reset)


def generation() -> int:
    """The number of forks between the first process and this one."""
    return _generation


def add_socket(fd: int) -> int:
    """Has the socket replaced in children.  Returns what `remove_socket` takes after its close.

    A peer does not see the end of a connected socket, and the port of a listening one stays taken,
    as long as any process has it open.  A child does not close it, since an object that it has
    inherited may close that number again when it is another file's: /dev/null takes its place.
    """
    inode = os.fstat(fd).st_ino
    _sockets[inode] = fd
    return inode


def remove_socket(inode: int) -> None:
    """The socket has been closed.  A second call does nothing."""
    _sockets.pop(inode, None)


def _replace_sockets() -> None:
    if not _sockets:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for inode, fd in _sockets.items():
        with suppress(OSError):  # closed a moment ago
            if os.fstat(fd).st_ino == inode:
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _sockets.clear()


def _after_fork_in_child() -> None:
    global _generation  # noqa: PLW0603 - a fact about the process
    _generation += 1
    with ExitStack() as resets:  # it calls the last one first, and all of them
        for reset in reversed(_resets):
            resets.callback(reset)
        resets.callback(_replace_sockets)


os.register_at_fork(after_in_child=_after_fork_in_child)
