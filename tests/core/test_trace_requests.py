"""What became of each request: posts and completions put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma._core.trace_records import Completion, PostedSend, PostedSharedReceive
from aiordma._core.trace_requests import Outcome, Request, requests
from aiordma._core.trace_runs import Run, parse_runs

from .trace_model import Writer, header


def found_in(writer: Writer) -> list[Request]:
    (run,) = parse_runs(writer.data(), "file")
    return requests(run)


def test_from_post_to_completion() -> None:
    writer = Writer()
    posted = writer.send(opcode="RDMA_WRITE", length=100)
    completion = writer.complete(posted, byte_len=100)
    (found,) = found_in(writer)
    assert found == Request(posted, Outcome.COMPLETED, completion, completion.t, 3)
    assert (found.operation, found.status, found.took, found.bytes) == (
        "RDMA_WRITE", "SUCCESS", 1, 100,
    )  # fmt: skip
    assert (found.wr_id, found.began, found.failed, found.is_receive) == (10, 1001, False, False)


def test_unsignaled_requests_a_failure_and_what_it_flushes() -> None:
    writer = Writer()
    silent = [writer.send(signaled=False) for _ in range(2)]
    wrong, after = writer.send(), writer.send(signaled=False)
    receive = writer.receive()
    told = writer.complete(wrong, "REM_ACCESS_ERR")
    writer.complete(after, "WR_FLUSH_ERR")
    writer.complete(receive, "WR_FLUSH_ERR")
    writer.send(signaled=False)
    found = found_in(writer)
    assert [it.posted for it in found[:2]] == silent
    assert [(it.outcome, it.status, it.failed) for it in found] == [
        *[(Outcome.IMPLICIT, "SUCCESS", False)] * 2,
        (Outcome.COMPLETED, "REM_ACCESS_ERR", True),
        *[(Outcome.COMPLETED, "WR_FLUSH_ERR", True)] * 2,
        (Outcome.OPEN, "OPEN", False),
    ]
    assert [it.bytes for it in found] == [8, 8, 8, 8, 0, 8]
    assert [it.ended for it in found[:3]] == [told.t] * 3
    assert [it.took is None for it in found[:3]] == [True, True, False]
    assert found[-1].ended is None


def test_receives_may_complete_in_any_order() -> None:
    """Of a shared queue they do: each queue pair completes its own."""
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


@pytest.mark.parametrize("end", ["RESET", "ERR", "destroyed"])
def test_reset_and_destruction_forget(end: str) -> None:
    """What is posted on another queue pair stays open, and in another state it does too."""
    writer, other = Writer(), Writer(4)
    other.records = writer.records
    writer.send()
    writer.receive()
    other.t, other.request = writer.t, writer.request
    other.send()
    writer.t = other.t
    if end == "destroyed":
        writer.destroy()
    else:
        writer.state("RTS", end)
    found = found_in(writer)
    outcome = Outcome.OPEN if end == "ERR" else Outcome.FORGOTTEN
    assert [it.outcome for it in found] == [outcome, outcome, Outcome.OPEN]
    assert found[0].ended == (None if end == "ERR" else writer.t)
    assert found[0].status == outcome.name


def test_lost_completions() -> None:
    writer = Writer()
    completion = writer.complete(writer.send(), lost=True)
    (found,) = found_in(writer)
    assert (found.outcome, found.status, found.ended) == (Outcome.LOST, "SUCCESS", completion.t)


def test_requests_from_before_the_trace() -> None:
    writer = Writer()
    for opcode in ("RECV", "RECV_RDMA_WITH_IMM", "RDMA_READ"):
        writer.add(
            Completion(
                t=writer.now(), request=0, cq=1, qp_num=3, wr_id=77, status="SUCCESS",
                opcode=opcode, byte_len=5,
            )
        )  # fmt: skip
    found = found_in(writer)
    assert [it.operation for it in found] == ["RECV", "RECV", "RDMA_READ"]
    assert [it.is_receive for it in found] == [True, True, False]
    for it in found:
        assert (it.posted, it.took, it.wr_id, it.bytes) == (None, None, 77, 5)
        assert it.began == it.ended


@given(st.data())
def test_every_request_once_and_as_the_queue_pairs_have_it(data: st.DataObject) -> None:
    """Against queue pairs that know by themselves what became of each request."""
    writers = [Writer(3), Writer(4)]
    expected: dict[int, Outcome] = {}
    queues: dict[int, list[PostedSend]] = {3: [], 4: []}
    shared = Writer()
    for _ in range(data.draw(st.integers(0, 40))):
        writer = data.draw(st.sampled_from(writers))
        writer.records, writer.t, writer.request = shared.records, shared.t, shared.request
        queue = queues[writer.qp_num]
        step = data.draw(st.sampled_from(["post", "post", "complete", "reset"]))
        if step == "post":
            posted = writer.send(signaled=data.draw(st.booleans()))
            queue.append(posted)
            expected[posted.request] = Outcome.OPEN
        elif step == "reset":
            writer.state("RTS", "RESET")
            expected.update((it.request, Outcome.FORGOTTEN) for it in queue)
            queue.clear()
        elif queue:
            done = data.draw(st.integers(0, len(queue) - 1))
            # Before one that is told there are only such that are not.
            while not queue[0].send_flags and done:
                expected[queue.pop(0).request] = Outcome.IMPLICIT
                done -= 1
            posted = queue.pop(0)
            expected[posted.request] = Outcome.COMPLETED
            failed = not posted.send_flags
            writer.complete(posted, "LOC_PROT_ERR" if failed else "SUCCESS")
        shared.t, shared.request = writer.t, writer.request
    found = requests(Run(header(), shared.records))
    outcomes = {it.posted.request: it.outcome for it in found if it.posted}
    assert outcomes == expected
    assert len(found) == len(expected)
    assert [it.began for it in found] == sorted(it.began for it in found)
