"""The results of the receiving methods of a connection."""

from __future__ import annotations

from typing import Any, NamedTuple


class Received(NamedTuple):
    """The result of `recv_into`."""

    length: int
    """Bytes of the message."""
    imm: int | None
    """The sender's immediate data."""


class ReceivedMemory(NamedTuple):
    """The result of `recv_with`."""

    memory: Any
    """The memory from the caller's `allocate`; the message is its first `length` bytes."""
    length: int
    """Bytes of the message."""
    imm: int | None
    """The sender's immediate data."""
