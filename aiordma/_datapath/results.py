"""What the receiving methods of a connection answer."""

from __future__ import annotations

from typing import Any, NamedTuple


class Received(NamedTuple):
    """What `recv_into` has put there."""

    length: int
    """Bytes of the message."""
    imm: int | None
    """The sender's immediate data."""


class ReceivedMemory(NamedTuple):
    """What `recv_with` has received."""

    memory: Any
    """What the caller's `allocate` returned; the message is its first `length` bytes."""
    length: int
    """Bytes of the message."""
    imm: int | None
    """The sender's immediate data."""
