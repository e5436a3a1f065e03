"""Counts of devices, completion channels and completion queues, from what is counted anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from .resource import Node


class DeviceStatistics(NamedTuple):
    """Counts of what is open on a context, and of what has failed there since it was opened."""

    device: str
    """The name of the device."""
    open: Mapping[str, int]
    """Open objects by class: ``{"MemoryRegion": 3, "QueuePair": 2, ...}``."""
    failures: Mapping[str, int]
    """Failed completions by status: ``{"REM_ACCESS_ERR": 1, "WR_FLUSH_ERR": 7}``."""
    events: Mapping[str, int]
    """Asynchronous events that were taken, by type: ``{"QP_FATAL": 1}``."""


class ChannelStatistics(NamedTuple):
    """The work of a completion channel, whose queues an event loop may drain as one."""

    queues: int
    """Its completion queues."""
    events: int
    """Completion events taken, after each of which the queue was armed or polled."""
    drains: int
    """Calls of ``drain``: iterations of an event loop, and polls between them."""
    completions: int
    """Completions that they found."""


class CQStatistics(NamedTuple):
    """Room and use of a completion queue; ``drain`` of its channel is not in it."""

    entries: int
    """Completions that it can hold."""
    reserved: int
    """Entries that queue pairs have set aside."""
    polls: int
    """Calls that polled it."""
    completions: int
    """Completions that they found."""
    arms: int
    """Calls of ``req_notify``."""


def count_open(node: Node[Any]) -> dict[str, int]:
    """Open objects below a node, by class; each once, though it has several parents."""
    below = {*node.below()} - {node}
    return dict(sorted(Counter(child.kind for child in below if child.pointer is not None).items()))
