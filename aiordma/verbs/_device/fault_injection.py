"""Fault injection, for :mod:`aiordma.testing`."""

from __future__ import annotations

from typing import NamedTuple


class FaultCounts(NamedTuple):
    """The number of injected faults and retransmissions. Counts can be subtracted."""

    lost: int = 0
    """The number of incoming frames and datagrams dropped."""
    duplicated: int = 0
    """The number of incoming frames and datagrams processed twice."""
    delayed: int = 0
    """The number of incoming frames and datagrams delayed."""
    cut: int = 0
    """The number of connections broken."""
    not_ready: int = 0
    """The number of requests rejected with an RNR NAK, as if no receive had been posted."""
    overruns: int = 0
    """The number of completions handled as if their completion queue were full."""
    registrations: int = 0
    """The number of memory registrations rejected."""
    handshakes: int = 0
    """The number of connection manager messages dropped."""
    retried: int = 0
    """The number of packets retransmitted because they were presumed lost."""

    def __sub__(self, other: FaultCounts) -> FaultCounts:
        """Return the counts since ``other``."""
        return FaultCounts(
            *(current - earlier for current, earlier in zip(self, other, strict=True))
        )
