"""The user's memory that `recv_into` receives a message in."""

from __future__ import annotations

import contextlib

from .._memory.registration_cache import KeptMemory
from ..mr_pool import LocalMemory, Region
from .memory import Memory

NOTHING = memoryview(b"")


class Target:
    """Where `recv_into` wants its message: the bytes, and registered memory once it is needed.

    `refused` is why the device would not register it, where nothing else can be done.
    """

    __slots__ = ("_data", "_own", "_plain", "memory", "refused", "view")

    def __init__(self, view: memoryview, memory: LocalMemory | None, data: object = None) -> None:
        self.view = view
        self.memory = memory
        self._data = data
        self.refused: Exception | None = None
        self._own: Region | KeptMemory | None = None
        self._plain = memory is None

    def registered(self, memory: Memory) -> LocalMemory:
        if self.memory is None:
            self.memory = self._own = memory.register(self._data, self.view)
        return self.memory

    def close(self) -> None:
        """Deregisters what was registered for it, once no read is under way there."""
        if self._own is not None:
            self._own.close()
        self._data = None
        if self._plain:
            # An exception may keep our frame, and with it this object: the memory is the caller's,
            # as soon as no read is under way there and the region has let go of the view.
            view, self.view = self.view, NOTHING
            with contextlib.suppress(BufferError):
                view.release()
