"""The failure of a device, told to what is not on it: the listeners that would use it again."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

from .._native import fork

OnFailure = Callable[[Exception], None]

_watched: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[str, dict[object, OnFailure]]
] = weakref.WeakKeyDictionary()

# In the child of a fork all of them are its parent's.
fork.reset_in_child(_watched.clear)


class FailureWatch:
    """Calls back, in the running loop, when its driver of a device has failed."""

    def __init__(self, device: str, on_failure: OnFailure) -> None:
        loop = asyncio.get_running_loop()
        self._callbacks = _watched.setdefault(loop, {}).setdefault(device, {})
        self._callbacks[self] = on_failure

    def close(self) -> None:
        """Again does nothing."""
        self._callbacks.pop(self, None)


def report(loop: asyncio.AbstractEventLoop, device: str, error: Exception) -> None:
    """The device has failed, or cannot be opened any more: tells those that watch it."""
    if device in (watched := _watched.get(loop, {})):
        for on_failure in list(watched[device].values()):
            on_failure(error)
