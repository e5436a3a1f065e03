"""A received message: a zero-copy view of registered memory, leased from the pool."""

from __future__ import annotations

from types import TracebackType
from typing import ClassVar, Self

from ..errors import BufferStateError
from ..mr_pool import Block


class SharedBlock:
    """A block with several messages in it, given back when the last of them is."""

    __slots__ = ("_block", "_left", "view")

    def __init__(self, block: Block, messages: int) -> None:
        self._block = block
        self._left = messages
        self.view = block.view

    def export(self, start: int, stop: int) -> memoryview:
        return self._block.export(start, stop)

    def release(self) -> None:
        self._left -= 1
        if not self._left:
            self._block.release()


class Message:
    """What `recv` returns.  `bytes(message)` copies; `message.data` is the memory itself.

    The memory is yours until `release`, the end of its `with`, or until the message is garbage;
    after that the message is inert (BufferStateError), while views taken before keep showing the
    same bytes for as long as they live.  `imm` is the sender's immediate data, or None.
    `written` is None, but for the message, empty itself, that tells of a write with immediate
    data: then it is the number of bytes that the last piece of that write had.
    """

    __slots__ = ("_block", "_length", "_offset", "imm", "written")

    def __init__(
        self,
        block: Block | SharedBlock | None,
        offset: int,
        length: int,
        imm: int | None,
        written: int | None = None,
    ) -> None:
        self._block = block
        self._offset = offset
        self._length = length
        self.imm = imm
        self.written = written

    def __repr__(self) -> str:
        imm = "" if self.imm is None else f" imm={self.imm:#x}"
        state = "" if self._block is not None else " released"
        return f"<Message of {self._length} bytes{imm}{state}>"

    def _open(self) -> Block | SharedBlock:
        if self._block is None:
            raise BufferStateError(f"{self!r} cannot be read any more")
        return self._block

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return self._open().view[self._offset : self._offset + self._length].tobytes()

    def __eq__(self, other: object) -> bool:
        """Equal to bytes, a bytearray, a memoryview or a message with the same contents."""
        mine = self._open().view[self._offset : self._offset + self._length]
        if isinstance(other, Message):
            return mine == other._open().view[other._offset : other._offset + other._length]
        if isinstance(other, bytes | bytearray | memoryview):
            return mine == other
        return NotImplemented

    __hash__: ClassVar[None]  # type: ignore[assignment]  # as typeshed says it of unhashables

    @property
    def data(self) -> memoryview:
        """The bytes where they were received; writable, and of no use to the sender."""
        return self._open().export(self._offset, self._offset + self._length)

    def release(self) -> None:
        """Gives the memory back; a second call does nothing."""
        block, self._block = self._block, None
        if block is not None:
            block.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()
