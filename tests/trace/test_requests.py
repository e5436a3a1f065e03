"""Tests of matching the posts of a trace with their completions."""

from __future__ import annotations

from aiordma._trace.records import PostedSharedReceive
from aiordma._trace.requests import Outcome, Request, requests
from aiordma._trace.runs import parse_runs

from .model import Writer


def found_in(writer: Writer) -> list[Request]:
    (run,) = parse_runs(writer.data(), "file")
    return requests(run)


def test_shared_receives_complete_in_any_order() -> None:
    """Each queue pair completes the receives that it has taken from the shared queue."""
    writer = Writer()
    posts = [
        PostedSharedReceive(
            t=writer.now(), request=writer.number(), wr_id=5, length=64, num_sge=1, srq=9
        )
        for _ in range(3)
    ]
    for posted in posts:
        writer.add(posted)
    writer.complete(posts[1], byte_len=7, qp_num=20)
    writer.complete(posts[0], byte_len=6, qp_num=21)
    found = found_in(writer)
    assert [it.qp_num for it in found] == [21, 20, None]
    assert [it.bytes for it in found] == [6, 7, 0]
    assert [it.operation for it in found] == ["RECV"] * 3
    assert [it.outcome for it in found][2] is Outcome.OPEN


def test_lost_completion_sets_the_request_outcome_to_lost() -> None:
    writer = Writer()
    completion = writer.complete(writer.send(), lost=True)
    (found,) = found_in(writer)
    assert (found.outcome, found.status, found.ended) == (Outcome.LOST, "SUCCESS", completion.t)
