"""A rail as its user sees it, with dates for people: nothing here decides by a clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from .._core.snapshot_types import RailState as RailFigures
from ..errors import cause_text

Shown = Literal["lead", "up", "connecting", "down"]


def date_and_time(when: float) -> str:
    """Of a time of `time.monotonic`, in UTC."""
    at = datetime.fromtimestamp(time.time() - time.monotonic() + when, UTC)
    return at.isoformat(" ", "milliseconds").removesuffix("+00:00")


@dataclass(frozen=True, slots=True)
class RailStatus:
    """A rail as it was when `Connection.rails` was asked for."""

    device: str
    """The name of this side's device."""
    state: Shown
    """"lead": carries the messages; "up", "connecting", or "down"."""
    since: float
    """The time at which it came into that state, by `time.monotonic`."""
    error: BaseException | None
    """The reason why it is down; of one that is not, why the latest before it was."""
    bytes_sent: int
    """Bytes of messages to the peer that were sent while this was the lead.  The peer reads long
    ones, and by which rails is known there alone (`bytes_received`)."""
    bytes_received: int
    """Bytes of messages from the peer that rails on this device have carried."""
    error_at: float = 0.0
    """The time of the error, by `time.monotonic`."""

    @property
    def since_text(self) -> str:
        """`since` as a date and time, in UTC."""
        return date_and_time(self.since)

    @property
    def error_text(self) -> str:
        """The error with its date and time, in UTC; empty: there was none."""
        error = self.error
        return "" if error is None else f"{date_and_time(self.error_at)}: {cause_text(error)}"

    def figures(self, now: float) -> RailFigures:
        """Its part of `aiordma.snapshot`."""
        return {
            "device": self.device,
            "state": self.state,
            "age": now - self.since,
            "error": self.error_text or None,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
        }
