"""A helper that drains a channel into a list, as the driver of an event loop does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiordma._native import CompletionArray, ffi, lib

if TYPE_CHECKING:
    from aiordma import verbs
    from aiordma._native import Record


class _Table:
    def __init__(self, spin_us: int) -> None:
        self._spin_us = spin_us
        self.found: list[Record] = []

    def drain(self, state: int, most: int, polls_again: bool, /) -> int:
        untyped: Any = ffi
        drain = untyped.cast("struct aiordma_drain *", state)
        drain.spin_us, drain.polls_again = self._spin_us, polls_again
        array, more = CompletionArray(most), ffi.new("int *")
        count = lib.aiordma_drain(drain, array.pointer, most, more)
        if count < 0:
            return count
        self.found += [record for record, _ in array.records(count)]
        return bool(count) | bool(more[0]) << 1


def drain(
    channel: verbs.CompletionChannel, capacity: int = 256, spin_us: int = 0
) -> tuple[list[Record], bool]:
    """Return the completions of all queues of a channel, and whether more may be available."""
    table = _Table(spin_us)
    _, more = channel._drain_to(table, capacity, False)
    return table.found, more
