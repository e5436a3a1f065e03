"""The failure of a device, told to what is not on it: the listeners that would use it again."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable

from .._native import fork

OnFailure = Callable[[Exception], None]


class _OfLoop:
    def __init__(self) -> None:
        self.watches: dict[FailureWatch, OnFailure] = {}
        self.failed: set[str] = set()
        """Devices that have failed, and were not opened since."""


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop] = weakref.WeakKeyDictionary()

# In the child of a fork all of them are its parent's.
fork.reset_in_child(_loops.clear)


class FailureWatch:
    """Calls back, in the running loop, when a device has failed and the others have as well."""

    def __init__(self, devices: Iterable[str], on_failure: OnFailure) -> None:
        self.devices = frozenset(devices)
        self._watches = _of(asyncio.get_running_loop()).watches
        self._watches[self] = on_failure

    def close(self) -> None:
        """Again does nothing."""
        self._watches.pop(self, None)


def _of(loop: asyncio.AbstractEventLoop) -> _OfLoop:
    return _loops.setdefault(loop, _OfLoop())


def report(loop: asyncio.AbstractEventLoop, device: str, error: Exception) -> None:
    """The device has failed, or cannot be opened any more: tells those that watch it."""
    here = _of(loop)
    here.failed.add(device)
    for watch, on_failure in list(here.watches.items()):
        if device in watch.devices <= here.failed:
            on_failure(error)


def opened(loop: asyncio.AbstractEventLoop, device: str) -> None:
    """The device works, perhaps again."""
    _of(loop).failed.discard(device)
