"""A received message: a zero-copy view of registered memory, leased from the pool."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from .._native import Message as NativeMessage
from ..errors import BufferStateError


class Message(NativeMessage):
    """What `recv` returns.  `bytes(message)` copies; `message.data` is the memory itself.

    The memory is yours until `release`, the end of its `with`, or until the message is garbage;
    after that the message is inert (BufferStateError), while views taken before keep showing the
    same bytes for as long as they live.  `imm` is the sender's immediate data, or None.
    `written` is None, but for the message, empty itself, that tells of a write with immediate
    data: then it is the number of bytes that the last piece of that write had.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        imm = "" if self.imm is None else f" imm={self.imm:#x}"
        state = "" if self._block is not None else " released"
        return f"<Message of {len(self)} bytes{imm}{state}>"

    def check(self) -> None:
        """BufferStateError after its release.  Internal to the library."""
        if self._block is None:
            self._inert()

    def _inert(self) -> NoReturn:
        raise BufferStateError(f"{self!r} cannot be read any more")

    def __eq__(self, other: object) -> bool:
        """Equal to bytes, a bytearray, a memoryview or a message with the same contents."""
        mine = self.export()
        if isinstance(other, Message):
            return mine == other.export()
        if isinstance(other, bytes | bytearray | memoryview):
            return mine == other
        return NotImplemented

    __hash__: ClassVar[None]  # type: ignore[assignment]  # as typeshed says it of unhashables

    @property
    def data(self) -> memoryview:
        """The bytes where they were received; writable, and of no use to the sender."""
        return self.export()

    def release(self) -> None:
        """Gives the memory back; a second call does nothing."""
        self.let_go()
