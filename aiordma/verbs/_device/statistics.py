"""Statistics of devices, completion channels and completion queues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from .resource import Node


class DeviceStatistics(NamedTuple):
    """The open objects of a context, and the failures and events since the context was opened."""

    device: str
    """The name of the device."""
    open: Mapping[str, int]
    """The number of open objects of each class: ``{"MemoryRegion": 3, "QueuePair": 2, ...}``."""
    failures: Mapping[str, int]
    """The number of failed completions by status: ``{"REM_ACCESS_ERR": 1, "WR_FLUSH_ERR": 7}``."""
    events: Mapping[str, int]
    """The number of asynchronous events received, by type: ``{"QP_FATAL": 1}``."""


class ChannelStatistics(NamedTuple):
    """Counters of a completion channel. An event loop can drain all of its queues in one call."""

    queues: int
    """The number of completion queues on the channel."""
    events: int
    """The number of completion events received."""
    drains: int
    """The number of times that the event loop has drained the channel."""
    completions: int
    """The number of completions found while draining."""


class CQStatistics(NamedTuple):
    """The size and the counters of a completion queue. Draining the channel is not counted."""

    entries: int
    """The number of completions that the queue can hold."""
    reserved: int
    """The number of entries that queue pairs have reserved."""
    polls: int
    """The number of times that the queue was polled."""
    completions: int
    """The number of completions found by these polls."""
    arms: int
    """The number of times that the queue was armed (``req_notify``)."""


def count_open(node: Node[Any]) -> dict[str, int]:
    """Return the number of open objects of each class below a node, counting each object once."""
    below = {*node.below()} - {node}
    return dict(sorted(Counter(child.kind for child in below if child.pointer is not None).items()))
