"""The results of the receiving methods of a connection."""

from __future__ import annotations

from typing import Any, NamedTuple


class Received(NamedTuple):
    """The result of `recv_into`."""

    length: int
    """The length of the message in bytes."""
    imm: int | None
    """The sender's immediate data, or None."""


class ReceivedMemory(NamedTuple):
    """The result of `recv_with`."""

    memory: Any
    """The memory returned by `allocate`. The message is in its first `length` bytes."""
    length: int
    """The length of the message in bytes."""
    imm: int | None
    """The sender's immediate data, or None."""
