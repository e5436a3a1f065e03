"""Statistics of devices, completion channels and completion queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from .resource import Node


class DeviceStatistics(NamedTuple):
    """The open objects of a context, and the failures since it was opened."""

    device: str
    """The name of the device."""
    open: Mapping[str, int]
    """Open objects by class: ``{"MemoryRegion": 3, "QueuePair": 2, ...}``."""
    failures: Mapping[str, int]
    """Failed completions by status: ``{"REM_ACCESS_ERR": 1, "WR_FLUSH_ERR": 7}``."""
    events: Mapping[str, int]
    """Asynchronous events received, by type: ``{"QP_FATAL": 1}``."""


class ChannelStatistics(NamedTuple):
    """Counters of a completion channel, whose queues an event loop may drain together."""

    queues: int
    """The number of its completion queues."""
    events: int
    """The number of completion events received."""
    drains: int
    """The number of ``drain`` calls, which event loops make in and between iterations."""
    completions: int
    """The number of completions found by ``drain``."""


class CQStatistics(NamedTuple):
    """The size and counters of a completion queue. ``drain`` calls of its channel do not count."""

    entries: int
    """The number of completions that the queue can hold."""
    reserved: int
    """The number of entries that queue pairs have reserved."""
    polls: int
    """The number of polls."""
    completions: int
    """The number of completions found by these polls."""
    arms: int
    """The number of ``req_notify`` calls."""


def count_open(node: Node[Any]) -> dict[str, int]:
    """Return the number of open objects below a node by class, counting each object once."""
    below = {*node.below()} - {node}
    return dict(sorted(Counter(child.kind for child in below if child.pointer is not None).items()))
