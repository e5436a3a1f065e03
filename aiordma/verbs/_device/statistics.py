"""Counts of devices, completion channels and completion queues, from what is counted anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from .enums import WCStatus
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


def failures_by_name(failures: Counter[int]) -> dict[str, int]:
    """Counts of completion statuses by their names."""
    return {WCStatus(status).name: count for status, count in sorted(failures.items())}


def count_open(node: Node[Any]) -> dict[str, int]:
    """Open objects below a node, by class; each once, though it has several parents."""
    seen: set[Node[Any]] = set()
    below = list(node.children)
    while below:
        child = below.pop()
        if child not in seen:
            seen.add(child)
            below += child.children
    kinds = Counter(child.kind for child in seen if child.pointer is not None)
    return dict(sorted(kinds.items()))
