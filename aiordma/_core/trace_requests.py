"""The fate of each work request of a run, found by matching posts and completions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from aiordma._core.arguments import instance
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
    """It has a completion, whose status says whether it succeeded."""
    IMPLICIT = "implicit"
    """It was unsignaled and succeeded, because a later request of its queue has completed."""
    LOST = "lost"
    """Its completion did not fit into the completion queue."""
    FORGOTTEN = "forgotten"
    """Its queue pair was reset or destroyed, so it will never complete."""
    OPEN = "open"
    """The trace ends before the request does."""


@dataclass(slots=True)
class Request:
    """A work request from its post to its end."""

    posted: Posted | None
    """The post, or None if the request was posted before the trace began."""
    outcome: Outcome = Outcome.OPEN
    completion: Completion | None = None
    ended: int | None = None
    """The time of the end.

    For an implicit end it is the time of the later completion that implies it.
    """
    qp_num: int | None = None
    """The queue pair, or None for a receive of a shared queue that no queue pair has used."""

    @property
    def operation(self) -> str:
        """The opcode of the post; ``RECV`` for receives."""
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
        """The number that the application assigned to it."""
        known = self.posted or self.completion
        return known.wr_id if known else 0

    @property
    def status(self) -> str:
        """The status of its completion; SUCCESS if that is implied, otherwise the outcome."""
        if self.completion is not None:
            return self.completion.status
        return "SUCCESS" if self.outcome is Outcome.IMPLICIT else self.outcome.name

    @property
    def failed(self) -> bool:
        """Whether it completed with an error, which includes a flush."""
        return self.completion is not None and self.completion.status != "SUCCESS"

    @property
    def took(self) -> int | None:
        """The nanoseconds from post to completion; None unless both are known exactly."""
        if self.posted is None or self.completion is None:
            return None
        return self.completion.t - self.posted.t

    @property
    def bytes(self) -> int:
        """The bytes it transferred or would have; those received for a receive; 0 if unknown."""
        if self.completion is not None and self.completion.byte_len is not None:
            return self.completion.byte_len
        if self.is_receive or self.posted is None:
            return 0
        return self.posted.length

    @property
    def began(self) -> int:
        """The time of the post, or of the first known event of the request."""
        if self.posted is not None:
            return self.posted.t
        return self.ended or 0


def requests(run: Run) -> list[Request]:
    """Return every request of the run, in the order of their posts.

    Requests and completions are matched by number. A send queue completes in order, so the
    completion of a signaled request implies the completion of all requests posted to that queue
    before it.
    """
    instance("run", run, Run, "a Run, one element of trace.read()")
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
