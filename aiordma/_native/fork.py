"""Resets in the child of a fork, before any other code runs there.

A child inherits its parent's pointers, locks and sockets but must not use them. Each module
registers a function that resets its own state. The functions run in the order of registration, even
if an earlier one has failed. This is the package's only fork hook, and it is in the lowest package
because `verbs` uses it too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress

_resets: list[Callable[[], None]] = []
_generation = 0
_sockets: dict[int, int] = {}  # inode number -> descriptor


def reset_in_child(reset: Callable[[], None]) -> None:
    """Register a function to be called in every forked child."""
    _resets.append(reset)


def generation() -> int:
    """Return the number of forks between the first process and this one."""
    return _generation


def register_socket(fd: int) -> int:
    """Register a socket to be replaced by /dev/null in forked children.

    If a child kept a copy of a connected socket, the peer would not notice when the parent closes
    the connection. A copy of a listening socket would keep the port in use. The child must not
    close the descriptor, because an inherited object may close it again later, when its number may
    belong to another file.

    Returns:
        The argument for `unregister_socket`.
    """
    inode = os.fstat(fd).st_ino
    _sockets[inode] = fd
    return inode


def unregister_socket(inode: int) -> None:
    """Unregister a socket that has been closed. Further calls have no effect."""
    _sockets.pop(inode, None)


def _replace_sockets() -> None:
    if not _sockets:
        return
    null_device = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for inode, fd in _sockets.items():
        with suppress(OSError):  # the descriptor has been closed already
            if os.fstat(fd).st_ino == inode:
                os.dup2(null_device, fd, inheritable=False)
    os.close(null_device)
    _sockets.clear()


def _after_fork_in_child() -> None:
    global _generation  # noqa: PLW0603 - a fact about the process
    _generation += 1
    with ExitStack() as resets:  # runs all of them in reverse order of their addition
        for reset in reversed(_resets):
            resets.callback(reset)
        resets.callback(_replace_sockets)


os.register_at_fork(after_in_child=_after_fork_in_child)
