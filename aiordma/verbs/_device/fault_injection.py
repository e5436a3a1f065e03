"""Fault injection, for :mod:`aiordma.testing`."""

from __future__ import annotations

from typing import NamedTuple


class FaultCounts(NamedTuple):
    """The number of faults injected and the number of their effects. Counts can be subtracted."""

    lost: int = 0
    """The number of incoming frames and datagrams that were dropped."""
    duplicated: int = 0
    """The number of incoming frames and datagrams that were processed twice."""
    delayed: int = 0
    """The number of incoming frames and datagrams that were processed with a delay."""
    cut: int = 0
    """The number of connections that were broken."""
    not_ready: int = 0
    """The number of requests that were answered with an RNR NAK, as if no receive were posted."""
    overruns: int = 0
    """The number of completions that were treated as if their completion queue were full."""
    registrations: int = 0
    """The number of memory registrations that were refused."""
    handshakes: int = 0
    """The number of connection manager messages that were dropped."""
    retried: int = 0
    """The number of retransmissions of packets that were considered lost."""

    def __sub__(self, other: FaultCounts) -> FaultCounts:
        """Return the counts since ``other``."""
        return FaultCounts(*(mine - earlier for mine, earlier in zip(self, other, strict=True)))
