"""Notification of device failures to listeners, which have no queue pair on the device."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable

from .._native import fork

OnFailure = Callable[[Exception], None]


class _LoopFailures:
    def __init__(self) -> None:
        self.watches: dict[FailureWatch, OnFailure] = {}
        self.failed: set[str] = set()
        """The devices that have failed and have not been opened since."""


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopFailures] = (
    weakref.WeakKeyDictionary()
)

# In a forked child, all loops in this dictionary belong to the parent.
fork.reset_in_child(_loops.clear)


class FailureWatch:
    """A callback that is called in the current loop once all of the given devices have failed."""

    def __init__(self, devices: Iterable[str], on_failure: OnFailure) -> None:
        self.devices = frozenset(devices)
        self._watches = _failures_of(asyncio.get_running_loop()).watches
        self._watches[self] = on_failure

    def close(self) -> None:
        """Stop watching. Further calls have no effect."""
        self._watches.pop(self, None)


def _failures_of(loop: asyncio.AbstractEventLoop) -> _LoopFailures:
    return _loops.setdefault(loop, _LoopFailures())


def report(loop: asyncio.AbstractEventLoop, device: str, error: Exception) -> None:
    """Notify the watchers that a device has failed or can no longer be opened."""
    failures = _failures_of(loop)
    failures.failed.add(device)
    for watch, on_failure in list(failures.watches.items()):
        all_have_failed = watch.devices <= failures.failed
        if device in watch.devices and all_have_failed:
            on_failure(error)


def opened(loop: asyncio.AbstractEventLoop, device: str) -> None:
    """Record that the device has been opened, which clears an earlier failure."""
    _failures_of(loop).failed.discard(device)
