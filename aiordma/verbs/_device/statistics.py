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
    """Asynchronous events taken, by type: ``{"QP_FATAL": 1}``."""


class ChannelStatistics(NamedTuple):
    """The work of a completion channel, whose queues an event loop may drain together."""

    queues: int
    """The number of its completion queues."""
    events: int
    """Completion events taken; after each one, the queue was armed or polled."""
    drains: int
    """Calls of ``drain``: iterations of an event loop, and polls between them."""
    completions: int
    """Completions found by these calls."""


class CQStatistics(NamedTuple):
    """The size and use of a completion queue, without calls of ``drain`` on its channel."""

    entries: int
    """The number of completions that it can hold."""
    reserved: int
    """Entries that queue pairs have reserved."""
    polls: int
    """Calls that polled it."""
    completions: int
    """Completions found by these calls."""
    arms: int
    """Calls of ``req_notify``."""


def count_open(node: Node[Any]) -> dict[str, int]:
    """Return the number of open objects below a node by class, counting each object once."""
    below = {*node.below()} - {node}
    return dict(sorted(Counter(child.kind for child in below if child.pointer is not None).items()))
