"""A message in the order of arrival, and how one that was only offered is read."""

from __future__ import annotations

import contextlib
from typing import Protocol

from .. import verbs
from .._core import protocol
from .._core.operations import OperationKind
from ..mr_pool import Block, LocalMemory, Region
from ..registration_cache import KeptMemory
from .memory import Memory
from .message import Message
from .work_queue import Work

READ = int(verbs.WROpcode.RDMA_READ)

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
        """What was registered for it goes, when no read is under way there any more."""
        if self._own is not None:
            self._own.close()
        self._data = None
        if self._plain:
            # An exception may keep our frame, and with it this object: the memory is the caller's,
            # as soon as no read is under way there and the region has let go of the view.
            view, self.view = self.view, NOTHING
            with contextlib.suppress(BufferError):
                view.release()


class Incoming:
    """A message that was offered, in its place in the order of arrival, and is to be read.

    `landing` is the target that it is being read into, instead of the pool.
    """

    __slots__ = ("landing", "message", "offer", "reads_left", "started")

    def __init__(self, offer: protocol.Rendezvous) -> None:
        self.message: Message | None = None
        self.offer = offer
        self.landing: Target | None = None
        self.started = False
        self.reads_left = 0

    @property
    def ready(self) -> bool:
        return not self.reads_left and (self.message is not None or self.landing is not None)

    def __len__(self) -> int:
        return self.offer.length


class Reader(Protocol):
    """Who hears that all of a message is here."""

    def fetched(self, incoming: Incoming) -> None: ...


class Fetch(Work):
    """One RDMA read of an offered message."""

    __slots__ = ("incoming", "memory", "reader")

    def __init__(
        self,
        reader: Reader,
        incoming: Incoming,
        memory: Block | LocalMemory,
        offset: int,
        length: int,
    ) -> None:
        offer = incoming.offer
        super().__init__(
            OperationKind.READ,
            READ,
            memory.address + offset,
            length,
            memory.lkey,
            offer.address + offset,
            offer.rkey,
        )
        self.reader = reader
        self.incoming = incoming
        self.memory = memory
        memory.pin()

    def done(self, byte_len: int) -> None:
        self.memory.unpin()
        self.incoming.reads_left -= 1
        if not self.incoming.reads_left:
            self.reader.fetched(self.incoming)

    def failed(self, error: BaseException) -> None:
        pass  # the queue pair has failed, and with it everybody who waits for the message

    def release(self) -> None:
        self.memory.unpin()
