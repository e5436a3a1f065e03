"""The credits of a connection (docs/messages.md, "Flow control"), for one side and both directions.

The compiled class is `Credits` of aiordma/_datapath/frames.pyx.
"""

from __future__ import annotations

from aiordma._core.frames import (
    MAX_CONTROL_RECEIVES,
    MAX_DATA_RECEIVES,
    MIN_CONTROL_RECEIVES,
    MIN_DATA_RECEIVES,
    FrameKind,
)
from aiordma.errors import InternalError, ProtocolError

from .frames import MESSAGES

RESERVE = 2
"""Control credits that only CREDIT frames may use."""

_CREDIT = FrameKind.CREDIT


def _checked(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ValueError(f"{name} must be within {low}..{high}, not {value}")
    return value


class Credits:
    """The credit account of one side of a connection, for both directions.

    ``data_receives`` and ``control_receives`` are what this side has posted before the first
    frame can arrive, ``peer_...`` what the peer said that it has. Every number stays within
    what the header of a frame can carry.
    """

    def __init__(
        self,
        *,
        data_receives: int,
        control_receives: int,
        peer_data_receives: int,
        peer_control_receives: int,
    ) -> None:
        data_bounds = (MIN_DATA_RECEIVES, MAX_DATA_RECEIVES)
        control_bounds = (MIN_CONTROL_RECEIVES, MAX_CONTROL_RECEIVES)
        self._data_receives = _checked("data_receives", data_receives, *data_bounds)
        self._control_receives = _checked("control_receives", control_receives, *control_bounds)
        self._data_limit = _checked("peer_data_receives", peer_data_receives, *data_bounds)
        self._control_limit = _checked(
            "peer_control_receives", peer_control_receives, *control_bounds
        )
        self._data_threshold = max(1, data_receives // 2)
        # What this side may send.
        self._data = peer_data_receives
        self._control = peer_control_receives
        # What has arrived and is not yet posted again, and what is posted again but not yet told.
        self._held_data = self._held_control = 0
        self._owed_data = self._owed_control = 0

    def __repr__(self) -> str:
        return (
            f"<Credits data {self._data}/{self._data_limit} control {self._control}/"
            f"{self._control_limit}, owes data {self._owed_data} control {self._owed_control}, "
            f"holds data {self._held_data} control {self._held_control}>"
        )

    # Sending. Each spend_... answers the credits for the frame's header: (control, data).

    @property
    def data_credits(self) -> int:
        """How many frames with messages may be sent now."""
        return self._data

    @property
    def control_credits(self) -> int:
        """How many CONTROL frames may be sent now; the reserve is not counted."""
        return max(0, self._control - RESERVE)

    @property
    def credit_frame_due(self) -> bool:
        """A CREDIT frame should be sent now, and may be.

        Look again after every :meth:`received` and ``reposted_...``, as the last thing of a turn,
        so that a frame that is sent anyway takes the credits along.
        """
        if self._owed_control >= 2:
            return self._control >= 1
        if self._owed_data >= self._data_threshold:
            return self._control >= (1 if self._owed_control else 2)
        return False

    def spend_data(self) -> tuple[int, int]:
        """A frame with messages is sent now. InternalError without a credit: look before."""
        if not self._data:
            raise InternalError("a message without a data credit")
        self._data -= 1
        return self._give_back()

    def spend_data_without_header(self) -> None:
        """Something that uses up a receive but has no header is sent: a write with immediate."""
        if not self._data:
            raise InternalError("a write with immediate without a data credit")
        self._data -= 1

    def spend_control(self) -> tuple[int, int]:
        """A CONTROL frame is sent now. InternalError without a credit beyond the reserve."""
        if self._control <= RESERVE:
            raise InternalError("a CONTROL frame without a credit")
        self._control -= 1
        return self._give_back()

    def spend_credit(self) -> tuple[int, int]:
        """A CREDIT frame is sent now. InternalError when none is due."""
        if not self.credit_frame_due:
            raise InternalError("a CREDIT frame that is not due")
        self._control -= 1
        return self._give_back()

    def _give_back(self) -> tuple[int, int]:
        back = self._owed_control, self._owed_data
        self._owed_control = self._owed_data = 0
        return back

    # Receiving.

    def received(self, kind: FrameKind, control: int = 0, data: int = 0) -> None:
        """A frame has arrived, with these credits in its header. Call before it is looked into.

        A write with immediate counts as DATA with none. Raises ProtocolError when the peer sent
        without a credit, gave back more than was used, or sent a CREDIT frame with nothing in it.
        """
        if control or data:
            if self._control + control > self._control_limit:
                raise ProtocolError(f"the peer gave back {control} control credits that it has not")
            if self._data + data > self._data_limit:
                raise ProtocolError(f"the peer gave back {data} data credits that it has not")
            self._control += control
            self._data += data
        elif kind is _CREDIT:
            raise ProtocolError("the peer sent a CREDIT frame that gives nothing back")
        if kind in MESSAGES:
            if self._held_data + self._owed_data >= self._data_receives:
                raise ProtocolError(f"the peer sent a {kind.name} frame without a credit")
            self._held_data += 1
        else:
            if self._held_control + self._owed_control >= self._control_receives:
                raise ProtocolError(f"the peer sent a {kind.name} frame without a credit")
            self._held_control += 1

    def reposted_data(self, count: int = 1) -> None:
        """The user has taken ``count`` messages and their receives are posted again."""
        if not 0 <= count <= self._held_data:
            raise InternalError(f"{count} data receives posted again, {self._held_data} were used")
        self._held_data -= count
        self._owed_data += count

    def reposted_control(self, count: int = 1) -> None:
        """``count`` CONTROL or CREDIT frames are dealt with, their receives posted again."""
        if not 0 <= count <= self._held_control:
            raise InternalError(
                f"{count} control receives posted again, {self._held_control} were used"
            )
        self._held_control -= count
        self._owed_control += count
