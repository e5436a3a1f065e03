"""The fate of each work request of a run: posts and completions put together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from aiordma._core.trace_records import (
    Completion,
    DestroyedQP,
    Posted,
    PostedReceive,
    PostedSend,
    QPStateChange,
)
from aiordma._core.trace_runs import Run


class Outcome(StrEnum):
    """The fate of a request."""

    COMPLETED = "completed"
    """It has a completion, which says whether it succeeded."""
    IMPLICIT = "implicit"
    """It was not signaled, and a later one of its queue has completed: it had succeeded by then."""
    LOST = "lost"
    """Its completion found no room in the completion queue."""
    FORGOTTEN = "forgotten"
    """Its queue pair was reset or destroyed; it will never have a completion."""
    OPEN = "open"
    """The trace ends before anything became of it."""


@dataclass(slots=True)
class Request:
    """A work request from its post to its end."""

    posted: Posted | None
    """None when it was posted before the trace began."""
    outcome: Outcome = Outcome.OPEN
    completion: Completion | None = None
    ended: int | None = None
    """When; of an implicit one the time of the completion that tells it, which may be later."""
    qp_num: int | None = None
    """None for a receive of a shared queue that no queue pair has taken."""

    @property
    def operation(self) -> str:
        """The opcode it was posted with; ``RECV`` for receives."""
        if isinstance(self.posted, PostedSend):
            return self.posted.opcode
        if self.posted is not None or self.completion is None:
            return "RECV"
        return "RECV" if self.completion.opcode.startswith("RECV") else self.completion.opcode

    @property
    def is_receive(self) -> bool:
        """Whether it is a receive, of a queue pair's own queue or of a shared one."""
        return self.operation == "RECV"

    @property
    def wr_id(self) -> int:
        """The number that the application gave to it."""
        known = self.posted or self.completion
        return known.wr_id if known else 0

    @property
    def status(self) -> str:
        """Status of its completion; without one SUCCESS if that is implied, else the outcome."""
        if self.completion is not None:
            return self.completion.status
        return "SUCCESS" if self.outcome is Outcome.IMPLICIT else self.outcome.name

    @property
    def failed(self) -> bool:
        """Whether it completed with an error, a flush included."""
        return self.completion is not None and self.completion.status != "SUCCESS"

    @property
    def took(self) -> int | None:
        """Nanoseconds from post to completion; None unless both are known exactly."""
        if self.posted is None or self.completion is None:
            return None
        return self.completion.t - self.posted.t

    @property
    def bytes(self) -> int:
        """Bytes that it moved or would have; of a receive, those that came; 0 if unknown."""
        if self.completion is not None and self.completion.byte_len is not None:
            return self.completion.byte_len
        if self.is_receive or self.posted is None:
            return 0
        return self.posted.length

    @property
    def began(self) -> int:
        """When it was posted, or the first that is known of it."""
        if self.posted is not None:
            return self.posted.t
        return self.ended or 0


def requests(run: Run) -> list[Request]:
    """Every request of the run, in the order of their posts.

    Requests and completions belong together by number. A send queue completes in order, so the
    completion of a signaled request tells of all that were posted there before it.
    """
    found: list[Request] = []
    waiting: dict[int, Request] = {}  # by number
    sends: dict[int, deque[Request]] = {}  # by queue pair, in the order of posts
    receives: dict[int, dict[int, Request]] = {}  # by queue pair, then number

    def forget(qp_num: int, t: int) -> None:
        for request in (*sends.pop(qp_num, ()), *receives.pop(qp_num, {}).values()):
            request.outcome, request.ended = Outcome.FORGOTTEN, t
            if request.posted is not None:
                waiting.pop(request.posted.request, None)

    def complete(completion: Completion) -> None:
        request = waiting.pop(completion.request, None)
        if request is None:
            request = Request(None)
            found.append(request)
        request.completion, request.ended = completion, completion.t
        request.outcome = Outcome.LOST if completion.lost else Outcome.COMPLETED
        request.qp_num = completion.qp_num
        posted = request.posted
        if isinstance(posted, PostedReceive):
            receives.get(posted.qp_num, {}).pop(posted.request, None)
        elif isinstance(posted, PostedSend):
            queue = sends[posted.qp_num]
            while (earlier := queue.popleft()) is not request:
                earlier.outcome, earlier.ended = Outcome.IMPLICIT, completion.t
                if earlier.posted is not None:
                    waiting.pop(earlier.posted.request, None)

    for record in run.records:
        match record:
            case Posted():
                request = Request(record)
                found.append(request)
                waiting[record.request] = request
                if isinstance(record, PostedSend):
                    request.qp_num = record.qp_num
                    sends.setdefault(record.qp_num, deque()).append(request)
                elif isinstance(record, PostedReceive):
                    request.qp_num = record.qp_num
                    receives.setdefault(record.qp_num, {})[record.request] = request
            case Completion():
                complete(record)
            case QPStateChange(qp_state="RESET") | DestroyedQP():
                forget(record.qp_num, record.t)
    return found
