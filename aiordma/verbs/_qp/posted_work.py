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

# Failures that only senders can have (IBTA volume 1, clause 11.6.2).
_OF_A_SEND = frozenset(
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
    """The work posted to a queue pair. Posting adds to it, and polling completions removes from it.

    One thread may post while another one polls. Posting appends requests at one end, and withdraws
    them from the same end if they could not be posted. Polling removes requests from the other end.
    Loops therefore use indexes instead of iterators.
    """

    __slots__ = ("__weakref__", "_failures", "_receives", "_sends", "first_failure", "max_send_wr")

    def __init__(self, max_send_wr: int, failures: Counter[int] | None = None) -> None:
        """Initialize the tracking. ``failures`` counts failed completions by status."""
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
        with suppress(IndexError):
            while not sends[-1 - count][2]:
                count += 1
        return count

    @property
    def is_stuck(self) -> bool:
        """Whether no outstanding send is signaled, so that no completion can free an entry."""
        return self.unsignaled == len(self._sends)

    def has_room(self, signaled: Sequence[bool]) -> bool:
        """Return whether the requests fit without filling the send queue permanently.

        If the requests use up the last free entry, at least one signaled send must be among them or
        already outstanding. Otherwise, no completion could ever free an entry.
        """
        # Read this first, because another thread may poll the completion that frees entries.
        stuck = self.is_stuck
        free = self.free - len(signaled)
        return free > 0 or (free == 0 and (any(signaled) or not stuck))

    def send(self, wr_id: int, opcode: int, signaled: int) -> None:
        """Add a send. Call this before posting, because its completion may be polled first."""
        self._sends.append((wr_id, opcode, signaled))

    def receive(self, wr_id: int) -> None:
        """Add a receive. Call this before posting it."""
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
        """Discard all work and the first failure after the queue pair has been reset."""
        self._sends.clear()
        self._receives.clear()
        self.first_failure = None

    def resume(self) -> None:
        """Discard the first failure after the queue pair has returned to RTS."""
        self.first_failure = None

    def settle(self, record: Record) -> WorkCompletionError | None:
        """Remove the work finished by a polled completion, and return its exception if any."""
        wr_id, status, opcode = record[:3]
        if not status:
            if opcode & _RECV:
                if self._receives:
                    self._receives.popleft()
            elif (sends := self._sends) and sends[0][0] == wr_id and sends[0][2]:
                sends.popleft()  # the common case: all are signaled
            else:
                self._end_send(wr_id, unsignaled=False)
            return None
        self._failures[status] += 1
        first, detail = None, ""
        if status == WCStatus.WR_FLUSH_ERR:
            first = self.first_failure
        elif status == WCStatus.RETRY_EXC_ERR:
            # The embedded device uses sockets, so it may have run out of file descriptors.
            detail = shortage_hint()
        error = work_completion_error(
            status,
            operation=self._failed(wr_id, status),
            qp_num=record[6],
            wr_id=wr_id,
            vendor_err=record[3],
            detail=f"the first failure was: {first}" if first else detail,
            cause=first,
        )
        if self.first_failure is None:
            self.first_failure = error
        return error

    def _end_send(self, wr_id: int, *, unsignaled: bool) -> int | None:
        """Remove the first request with that number, and all earlier ones, which are complete.

        Only signaled requests are considered, unless `unsignaled` is true.

        Returns:
            The opcode of the request, or None if it is unknown.
        """
        sends = self._sends
        with suppress(IndexError):  # withdrawn in the meantime
            for position in range(len(sends)):
                posted, opcode, signaled = sends[position]
                if posted == wr_id and (signaled or unsignaled):
                    for _ in range(position + 1):
                        sends.popleft()
                    return opcode
        return None

    def _failed(self, wr_id: int, status: int) -> str:
        """Return the name of the failed operation; a send takes precedence over a receive."""
        receive = bool(self._receives) and self._receives[0] == wr_id
        first = bool(self._sends) and self._sends[0][0] == wr_id
        if first or not receive or status in _OF_A_SEND:
            opcode = self._end_send(wr_id, unsignaled=True)
            if opcode is not None:
                return OPERATIONS[WROpcode(opcode)].text
        if receive:
            self._receives.popleft()
        return "receive"
