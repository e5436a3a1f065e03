"""Tracking of a queue pair's outstanding work and its first failure.

This module records posted requests and their order, because the device does not report enough:

- A send queue entry becomes free only once the completion of its request, or of a later signaled
  request, has been polled (ibv_post_send(3); IBTA volume 1, clause 10.8.6).
- A successful unsignaled request does not generate a completion.
- A failed completion does not identify the failed operation (ibv_poll_cq(3)).
- After the first failure, all other requests are flushed. Their completions do not report the cause
  of the failure (IBTA volume 1, clause 10.3.1.7).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress

from aiordma._native import Record
from aiordma._native.calls import shortage_hint
from aiordma.errors import WorkCompletionError, work_completion_error

from .._device.enums import WCOpcode, WCStatus, WROpcode
from .transport_rules import OPERATIONS

_RECV = int(WCOpcode.RECV)

# The elements of each tuple in `PostedWork._sends`. Plain tuples are faster than named tuples.
_WR_ID, _OPCODE, _SIGNALED = range(3)

# Error statuses reported only for sends (IBTA volume 1, clause 11.6.2).
_SEND_ONLY_STATUSES = frozenset(
    {
        WCStatus.MW_BIND_ERR,
        WCStatus.BAD_RESP_ERR,
        WCStatus.REM_INV_REQ_ERR,
        WCStatus.REM_ACCESS_ERR,
        WCStatus.REM_OP_ERR,
        WCStatus.RETRY_EXC_ERR,
        WCStatus.RNR_RETRY_EXC_ERR,
    }
)


class PostedWork:
    """The outstanding requests of a queue pair.

    One thread may post while another thread polls. Posting appends requests on the right, and
    removes them again if the device rejects them. Polling removes completed requests on the left.
    Loops use indexes instead of iterators, because the other thread can change the deques.
    """

    __slots__ = ("__weakref__", "_failures", "_receives", "_sends", "first_failure", "max_send_wr")

    def __init__(self, max_send_wr: int, failures: Counter[int] | None = None) -> None:
        """Initialize the object. ``failures`` counts failed completions by status."""
        self._failures = Counter() if failures is None else failures
        self.max_send_wr: int = max_send_wr
        self.first_failure: WorkCompletionError | None = None
        self._sends: deque[tuple[int, int, int]] = deque()  # wr_id, opcode, signaled
        self._receives: deque[int] = deque()

    @property
    def free(self) -> int:
        """The number of free send queue entries.

        After a failure, all entries count as free, because the missing completions may never
        arrive.
        """
        return self.max_send_wr if self.first_failure else self.max_send_wr - len(self._sends)

    @property
    def unsignaled(self) -> int:
        """The number of requests posted since the last signaled request."""
        sends, count = self._sends, 0
        with suppress(IndexError):  # no send is signaled
            while not sends[-1 - count][_SIGNALED]:
                count += 1
        return count

    @property
    def is_stuck(self) -> bool:
        """Whether all outstanding sends are unsignaled. On success, they free no entries."""
        return self.unsignaled == len(self._sends)

    def has_room(self, signaled: Sequence[bool]) -> bool:
        """Return whether the requests can be posted without blocking the send queue forever.

        If the requests fill the queue, at least one new or outstanding send must be signaled.
        Otherwise, no completion could ever free an entry.
        """
        # Read `is_stuck` before `free`. In the other order, the queue would look stuck and full if
        # another thread polled the last signaled send's completion between the two reads.
        stuck = self.is_stuck
        free = self.free - len(signaled)
        return free > 0 or (free == 0 and (any(signaled) or not stuck))

    def add_send(self, wr_id: int, opcode: int, signaled: int) -> None:
        """Add a send. Do this before posting it, because another thread may poll its completion."""
        self._sends.append((wr_id, opcode, signaled))

    def add_receive(self, wr_id: int) -> None:
        """Add a receive. Do this before posting it, as for `add_send`."""
        self._receives.append(wr_id)

    def withdraw_sends(self, count: int) -> None:
        """Remove the last ``count`` sends after failing to post them."""
        for _ in range(count):
            self._sends.pop()

    def withdraw_receives(self, count: int) -> None:
        """Remove the last ``count`` receives after failing to post them."""
        for _ in range(count):
            self._receives.pop()

    def clear(self) -> None:
        """Discard all work and the recorded failure. Call this after resetting the queue pair."""
        self._sends.clear()
        self._receives.clear()
        self.first_failure = None

    def resume(self) -> None:
        """Discard the recorded failure. Call this after returning the queue pair to RTS."""
        self.first_failure = None

    def settle(self, record: Record) -> WorkCompletionError | None:
        """Remove the requests finished by a completion. Return the completion's error, if any."""
        wr_id, status, opcode = record[:3]
        if not status:
            if opcode & _RECV:
                if self._receives:
                    self._receives.popleft()
            elif (sends := self._sends) and sends[0][_WR_ID] == wr_id and sends[0][_SIGNALED]:
                sends.popleft()  # the common case, in which every send is signaled
            else:
                self._remove_sends_through(wr_id, include_unsignaled=False)
            return None
        vendor_err, qp_num = record[3], record[6]
        self._failures[status] += 1
        first_failure, detail = None, ""
        if status == WCStatus.WR_FLUSH_ERR:
            first_failure = self.first_failure
        elif status == WCStatus.RETRY_EXC_ERR:
            # On the embedded device, the process may have too few file descriptors for its sockets.
            detail = shortage_hint()
        error = work_completion_error(
            status,
            operation=self._remove_failed(wr_id, status),
            qp_num=qp_num,
            wr_id=wr_id,
            vendor_err=vendor_err,
            detail=f"the first failure was: {first_failure}" if first_failure else detail,
            cause=first_failure,
        )
        if self.first_failure is None:
            self.first_failure = error
        return error

    def _remove_sends_through(self, wr_id: int, *, include_unsignaled: bool) -> int | None:
        """Remove the first send with this `wr_id` and all earlier ones, which are also complete.

        Skip unsignaled sends with this `wr_id` unless `include_unsignaled` is true.

        Returns:
            The send's opcode, or None if no send matches.
        """
        sends = self._sends
        with suppress(IndexError):  # another thread has withdrawn sends
            for position in range(len(sends)):
                posted_wr_id, opcode, signaled = sends[position]
                if posted_wr_id == wr_id and (signaled or include_unsignaled):
                    for _ in range(position + 1):
                        sends.popleft()
                    return opcode
        return None

    def _remove_failed(self, wr_id: int, status: int) -> str:
        """Remove the failed request and return its operation's name.

        If the oldest send and the oldest receive both have this `wr_id`, assume that the send
        failed.
        """
        is_receive = bool(self._receives) and self._receives[0] == wr_id
        is_first_send = bool(self._sends) and self._sends[0][_WR_ID] == wr_id
        if is_first_send or not is_receive or status in _SEND_ONLY_STATUSES:
            opcode = self._remove_sends_through(wr_id, include_unsignaled=True)
            if opcode is not None:
                return OPERATIONS[WROpcode(opcode)].text
        if is_receive:
            self._receives.popleft()
        return "receive"
