"""The rail status that users see. Its dates are for display only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from .._core.snapshot_types import RailState as RailFigures
from .._datapath.rail import SendQueue
from ..errors import cause_text

PublicState = Literal["lead", "up", "connecting", "down"]


def date_and_time(when: float) -> str:
    """Format a `time.monotonic` value as a date and time in UTC."""
    at = datetime.fromtimestamp(time.time() - time.monotonic() + when, UTC)
    return at.isoformat(" ", "milliseconds").removesuffix("+00:00")


class Transfers(NamedTuple):
    """The byte counts of a rail's completed one-sided operations."""

    bytes_read: int = 0
    bytes_written: int = 0
    peer_bytes_read: int | None = None
    peer_bytes_written: int | None = None

    def plus(self, queue: SendQueue) -> Transfers:
        """Return these counts plus those of `queue`."""
        return Transfers(
            self.bytes_read + queue.transfer_bytes_read,
            self.bytes_written + queue.transfer_bytes_written,
            add_counts(self.peer_bytes_read, queue.served.bytes_read),
            add_counts(self.peer_bytes_written, queue.served.bytes_written),
        )


NO_TRANSFERS = Transfers()


def add_counts(one: int | None, other: int | None) -> int | None:
    """Return the sum of two counts, either of which may be unknown (None)."""
    return None if one is None and other is None else (one or 0) + (other or 0)


@dataclass(frozen=True, slots=True)
class RailStatus:
    """The status of a rail at the time when `Connection.rails` was read."""

    device: str
    """The name of this side's device."""
    state: PublicState
    """The state: "lead" (up, and carries the messages), "up", "connecting" or "down"."""
    since: float
    """The time at which the rail entered this state, by `time.monotonic`."""
    error: BaseException | None
    """The reason why the rail is down, or why it was last down; None if it never was."""
    bytes_sent: int
    """The number of bytes of messages sent while this rail was the lead.

    The peer reads long messages, and only the peer knows which rails it uses for that
    (`bytes_received`).
    """
    bytes_received: int
    """The number of bytes of messages received over rails on this device."""
    error_at: float = 0.0
    """The time of the error, by `time.monotonic`."""
    bytes_read: int = 0
    """The number of bytes that this side's `read` has transferred over rails on this device."""
    bytes_written: int = 0
    """The number of bytes that this side's `write` has transferred over rails on this device."""
    peer_bytes_read: int | None = None
    """The number of bytes that the peer's `read` has transferred over rails on this device.

    None means that the device does not count them.
    """
    peer_bytes_written: int | None = None
    """The number of bytes that the peer's `write` has transferred over rails on this device.

    None means that the device does not count them.
    """

    @property
    def since_text(self) -> str:
        """`since` as a date and time, in UTC."""
        return date_and_time(self.since)

    @property
    def error_text(self) -> str:
        """The error with its date and time, in UTC, or an empty string if there was none."""
        error = self.error
        return "" if error is None else f"{date_and_time(self.error_at)}: {cause_text(error)}"

    def figures(self, now: float) -> RailFigures:
        """Return the entry for `aiordma.snapshot`."""
        return {
            "device": self.device,
            "state": self.state,
            "age": now - self.since,
            "error": self.error_text or None,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "peer_bytes_read": self.peer_bytes_read,
            "peer_bytes_written": self.peer_bytes_written,
        }
