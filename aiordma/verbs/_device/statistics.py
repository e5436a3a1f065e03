"""Device, completion channel and completion queue statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from .resource import Node


class DeviceStatistics(NamedTuple):
    """The number of open objects on a context, and of failures and events since it was opened."""

    device: str
    """The device's name."""
    open: Mapping[str, int]
    """The number of open objects of each class: ``{"MemoryRegion": 3, "QueuePair": 2, ...}``."""
    failures: Mapping[str, int]
    """The number of failed completions by status: ``{"REM_ACCESS_ERR": 1, "WR_FLUSH_ERR": 7}``."""
    events: Mapping[str, int]
    """The number of asynchronous events received, by type: ``{"QP_FATAL": 1}``."""


class ChannelStatistics(NamedTuple):
    """A completion channel's counters. A drain polls all queues of the channel in a single call."""

    queues: int
    """The number of completion queues on the channel."""
    events: int
    """The number of completion events received."""
    drains: int
    """The number of times the event loop has drained the channel."""
    completions: int
    """The number of completions found while draining."""


class CQStatistics(NamedTuple):
    """A completion queue's size and counters. Drains of its channel are not counted."""

    entries: int
    """The maximum number of completions the queue can hold."""
    reserved: int
    """The number of entries reserved by queue pairs."""
    polls: int
    """The number of times the queue was polled."""
    completions: int
    """The number of completions found by these polls."""
    arms: int
    """The number of times the queue was armed (``req_notify``)."""


def count_open(node: Node[Any]) -> dict[str, int]:
    """Return the number of open objects of each class below a node, counting each object once."""
    descendants = {*node.descendants()} - {node}
    return dict(
        sorted(Counter(child.kind for child in descendants if child.pointer is not None).items())
    )
