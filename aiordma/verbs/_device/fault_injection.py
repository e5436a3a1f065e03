"""Fault injection, for :mod:`aiordma.testing`."""

from __future__ import annotations

from typing import NamedTuple


class FaultCounts(NamedTuple):
    """Counts of faults injected in this process, and of what followed. Two can be subtracted."""

    lost: int = 0
    """Frames and datagrams that came in and were dropped."""
    duplicated: int = 0
    """Frames and datagrams that came in once and were processed twice."""
    delayed: int = 0
    """Frames and datagrams that were processed later than they came in."""
    cut: int = 0
    """Connections that were broken."""
    not_ready: int = 0
    """Requests that were answered as if there were no receive (RNR NAK)."""
    overruns: int = 0
    """Completions that found their queue full."""
    registrations: int = 0
    """Registrations of memory that were refused."""
    handshakes: int = 0
    """Messages of the connection manager that were dropped."""
    retried: int = 0
    """Retries by requesters, after packets that they took for lost."""

    def __sub__(self, other: FaultCounts) -> FaultCounts:
        """The counts since ``other``."""
        return FaultCounts(*(mine - earlier for mine, earlier in zip(self, other, strict=True)))
