"""The outcome of each work request in a run, found by matching posts with completions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from aiordma._core.arguments import instance
from aiordma._trace.records import (
    Completion,
    DestroyedQP,
    Posted,
    PostedReceive,
    PostedSend,
    QPStateChange,
)
from aiordma._trace.runs import Run


class Outcome(StrEnum):
    """The outcome of a request."""

    COMPLETED = "completed"
    """The request has a completion. Its status shows whether the request succeeded."""
    IMPLICIT = "implicit"
    """The request was unsignaled. Its success is implied by a later completion of its queue."""
    LOST = "lost"
    """The completion was lost because the completion queue was full."""
    FORGOTTEN = "forgotten"
    """The queue pair was reset or destroyed, so the request will never complete."""
    OPEN = "open"
    """The trace ends before the request does."""


@dataclass(slots=True)
class Request:
    """A work request, with its completion and its outcome."""

    posted: Posted | None
    """The record of posting the request, or None if that was before the trace began."""
    outcome: Outcome = Outcome.OPEN
    completion: Completion | None = None
    ended: int | None = None
    """The time at which the request ended.

    If the success is only implied, it is the time of the completion that implies it.
    """
    qp_num: int | None = None
    """The queue pair number, or None for a shared receive that no queue pair has consumed."""

    @property
    def operation(self) -> str:
        """The opcode of the request, which is ``RECV`` for all receives."""
        if isinstance(self.posted, PostedSend):
            return self.posted.opcode
        if self.posted is not None or self.completion is None:
            return "RECV"
        # The post was not traced. The completion of a receive may have a longer opcode, such as
        # RECV_RDMA_WITH_IMM.
        return "RECV" if self.completion.opcode.startswith("RECV") else self.completion.opcode

    @property
    def is_receive(self) -> bool:
        """Whether the request is a receive, including one from a shared receive queue."""
        return self.operation == "RECV"

    @property
    def wr_id(self) -> int:
        """The number that the application assigned to the request."""
        known = self.posted or self.completion
        return known.wr_id if known else 0

    @property
    def status(self) -> str:
        """The completion status (SUCCESS if implied), or the outcome's name if there is none."""
        if self.completion is not None:
            return self.completion.status
        return "SUCCESS" if self.outcome is Outcome.IMPLICIT else self.outcome.name

    @property
    def failed(self) -> bool:
        """Whether the request completed with an error, including a flush error."""
        return self.completion is not None and self.completion.status != "SUCCESS"

    @property
    def took(self) -> int | None:
        """The time from post to completion in nanoseconds, or None unless both were traced."""
        if self.posted is None or self.completion is None:
            return None
        return self.completion.t - self.posted.t

    @property
    def bytes(self) -> int:
        """The length of the transfer in bytes, whether complete or not, or 0 if unknown."""
        if self.completion is not None and self.completion.byte_len is not None:
            return self.completion.byte_len
        if self.is_receive or self.posted is None:
            return 0
        return self.posted.length

    @property
    def began(self) -> int:
        """The time of the post, or the end time if the post was not traced."""
        if self.posted is not None:
            return self.posted.t
        return self.ended or 0


def requests(run: Run) -> list[Request]:
    """Return all requests of the run, in the order in which they were posted.

    Completions are matched with requests by number. A send queue completes in order, so the
    completion of a signaled request implies that all earlier requests in its queue have completed.
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
