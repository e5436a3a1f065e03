"""Test the tracking of posted work: slots, failures, and the cause of a flush."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import pytest

from aiordma import verbs
from aiordma.errors import (
    PostError,
    QueueFullError,
    RemoteAccessError,
    WorkCompletionError,
    WorkRequestFlushedError,
)
from aiordma.verbs import (
    QPCapabilities,
    QPState,
    QPType,
    SendFlags,
    SendWorkRequest,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from aiordma.verbs._qp.posted_work import PostedWork

if TYPE_CHECKING:
    from aiordma._native import Record
    from conftest import ConnectedPair, Pair

SIGNALED = int(SendFlags.SIGNALED)


def record(wr_id: int, status: int = 0, opcode: int = 0) -> Record:
    return (wr_id, status, opcode, 0, 0, 0, 0x11, 0, 0)


# --- without a device --------------------------------------------------------------------------


class Meanwhile(int):
    """An integer that calls ``turn``, to let another thread run, when it is compared or tested."""

    def __new__(cls, number: int, turn: Callable[[], object]) -> Self:
        self = super().__new__(cls, number)
        self.turn = turn
        return self

    turn: Callable[[], object]

    def __eq__(self, other: object) -> bool:
        self.turn()
        return int(self) == other

    def __bool__(self) -> bool:
        self.turn()
        return int(self) != 0

    __hash__ = int.__hash__


def test_settle_counts_slots_correctly_while_another_thread_posts() -> None:
    work = PostedWork(64)
    for wr_id, signaled in enumerate([False, False, True, False]):
        work.add_send(wr_id, WROpcode.SEND, signaled)

    def post() -> None:
        work.add_send(99, WROpcode.SEND, False)

    assert work.settle(record(Meanwhile(2, post))) is None
    left = 64 - work.free
    assert left > 1
    assert work.unsignaled == left


def test_send_counts_slots_correctly_while_another_thread_polls() -> None:
    work = PostedWork(8)

    def poll() -> None:
        work.settle(record(1))

    work.add_send(0, WROpcode.SEND, False)
    work.add_send(1, WROpcode.SEND, True)
    work.add_send(2, WROpcode.SEND, Meanwhile(0, poll))
    work.add_send(3, WROpcode.SEND, False)
    assert work.unsignaled == 2
    assert work.free == 6


def test_settle_ignores_unknown_completions() -> None:
    work = PostedWork(4)
    work.add_send(1, WROpcode.SEND, True)
    work.settle(record(2))
    work.settle(record(3, opcode=WCOpcode.RECV))
    assert work.free == 3


@pytest.mark.parametrize(
    ("opcode", "text"),
    [
        (WROpcode.SEND_WITH_IMM, "send"),
        (WROpcode.RDMA_WRITE, "write"),
        (WROpcode.RDMA_READ, "read"),
        (WROpcode.ATOMIC_FETCH_AND_ADD, "fetch and add"),
        (WROpcode.BIND_MW, "bind window"),
    ],
)
def test_settle_error_identifies_the_failed_operation(opcode: WROpcode, text: str) -> None:
    work = PostedWork(4)
    work.add_receive(7)  # same number, but receives cannot have this status
    work.add_send(7, opcode, False)
    error = work.settle(record(7, WCStatus.REM_ACCESS_ERR))
    assert isinstance(error, RemoteAccessError)
    assert (error.operation, error.qp_num, error.wr_id) == (text, 0x11, 7)
    assert error.__cause__ is None
    assert work.first_failure is error


def test_settle_removes_completed_receives() -> None:
    """The work of a send must not be taken for that of a receive with the same number."""
    for status in WCStatus.SUCCESS, WCStatus.LOC_LEN_ERR:
        work = PostedWork(4)
        for wr_id in (7, 8):
            work.add_receive(wr_id)
        work.settle(record(7, status, WCOpcode.RECV))
        work.add_send(1, WROpcode.RDMA_WRITE, False)
        for wr_id, operation in ((7, "write"), (8, "receive")):
            work.add_send(7, WROpcode.RDMA_WRITE, True)
            error = work.settle(record(wr_id, WCStatus.WR_FLUSH_ERR))
            assert error is not None
            assert error.operation == operation


def test_failure_frees_all_slots_and_does_not_chain_later_errors() -> None:
    """After a failure, only the device knows whether there is room.

    A later failure is not caused by the first one.
    """
    work = PostedWork(1)
    work.add_send(1, WROpcode.SEND, True)
    assert work.free == 0
    first = work.settle(record(9, WCStatus.LOC_LEN_ERR))
    assert work.free == 1
    second = work.settle(record(2, WCStatus.REM_OP_ERR))
    assert first is work.first_failure
    assert second is not None
    assert second.__cause__ is None


# --- on the device -----------------------------------------------------------------------------


def test_unsignaled_tail_stays_empty_with_sq_sig_all(connected_pair: ConnectedPair) -> None:
    one, two = connected_pair(QPCapabilities(max_send_wr=2), sq_sig_all=True)
    size = one.qp.capabilities.max_send_wr
    for _ in range(3 * size):
        one.post(WROpcode.RDMA_WRITE, two, flags=0)
        assert one.qp.unsignaled_tail == 0
        assert one.completion().ok
    assert one.qp.free_send_slots == size


def test_failed_post_does_not_consume_a_send_slot(pair: Pair) -> None:
    one, _ = pair
    size = one.qp.free_send_slots
    with pytest.raises(TypeError):
        one.qp.post_send_one(1, WROpcode.SEND, 0, None, 8, 0)  # type: ignore[arg-type]
    assert one.qp.free_send_slots == size
    one.qp.to_error()
    one.post(WROpcode.SEND)
    assert one.qp.free_send_slots == size - 1
    one.qp.to_reset()  # discards the request
    assert one.qp.free_send_slots == size
    with pytest.raises(PostError):
        one.qp.post_send_one(1, WROpcode.SEND, 0, 0, 0, 0)  # not allowed in RESET
    assert one.qp.free_send_slots == size


def test_flush_errors_have_the_first_failure_as_their_cause(pair: Pair) -> None:
    one, two = pair
    one.post_recv(5, 64)
    with one.qp.batch() as batch:
        batch.read([one.sge()], two.mr.addr, two.mr.rkey ^ 0x5A5A5A00, wr_id=1)
        batch.write([one.sge()], two.mr.addr, two.mr.rkey, wr_id=2)
    done = {wc.wr_id: wc for wc in one.completions(3)}
    with pytest.raises(RemoteAccessError, match=f"read on queue pair {one.qp.qp_num:#x}") as caught:
        done[1].raise_for_status()
    first = caught.value
    assert first is one.qp.first_failure is done[1].error()
    with pytest.raises(WorkRequestFlushedError, match=r"write on queue pair") as flushed:
        done[2].raise_for_status()
    assert flushed.value.__cause__ is first
    assert str(flushed.value).endswith(f"; the first failure was: {first}")
    receive = done[5].error()
    assert isinstance(receive, WorkCompletionError)
    assert (receive.operation, receive.__cause__) == ("receive", first)
    one.qp.to_reset()
    assert one.qp.first_failure is None


# --- unsignaled requests -----------------------------------------------------------------------


def requests(ends: Pair, flags: SendFlags, count: int = 1) -> list[SendWorkRequest]:
    a, b = ends
    there: Any = {"remote_addr": b.mr.addr, "rkey": b.mr.rkey}
    return [SendWorkRequest(7, WROpcode.RDMA_WRITE, [a.sge()], flags, **there)] * count


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_last_free_slot_requires_a_signaled_request(
    connected_pair: ConnectedPair, together: bool
) -> None:
    """Otherwise no completion could ever free the other slots."""
    ends = connected_pair(QPCapabilities(max_send_wr=8))
    qp = ends[0].qp
    size = qp.capabilities.max_send_wr
    for _ in range(3):
        for count in [size - 1] if together else [1] * (size - 1):
            qp.post_send(requests(ends, SendFlags.NONE, count))
        with pytest.raises(
            QueueFullError, match=f"1 slots needed, 1 of {size} .* none is in flight"
        ):
            qp.post_send(requests(ends, SendFlags.NONE))
        qp.post_send(requests(ends, SendFlags.SIGNALED))
        assert ends[0].completion().ok
        assert qp.free_send_slots == size
    with pytest.raises(QueueFullError, match=f"{size} slots needed, {size} of {size} free"):
        qp.post_send(requests(ends, SendFlags.NONE, size))
    qp.post_send(requests(ends, SendFlags.SIGNALED) + requests(ends, SendFlags.NONE, size - 1))
    assert ends[0].completion().ok


def test_completions_are_returned_once_with_concurrent_post_and_poll(
    connected_pair: ConnectedPair,
) -> None:
    ends = connected_pair(QPCapabilities(max_send_wr=64))
    qp, many = ends[0].qp, 2000
    switches = sys.getswitchinterval()

    def post() -> None:
        for number in range(many):
            flags = SendFlags.SIGNALED if number % 4 == 3 else SendFlags.NONE
            (request,) = requests(ends, flags)
            request.wr_id = number
            while qp.free_send_slots < 2:
                pass
            qp.post_send([request])

    with ThreadPoolExecutor(1) as threads:
        posting_ends = threads.submit(post)
        sys.setswitchinterval(1e-6)
        try:
            found: list[int] = []
            while len(found) < many // 4 and not (posting_ends.done() and posting_ends.exception()):
                found += [wc.wr_id for wc in ends[0].cq.poll()]
        finally:
            sys.setswitchinterval(switches)
        posting_ends.result()
    assert found == list(range(3, many, 4))


def test_datagram_queue_pair_frees_send_slots_after_leaving_sqe(
    context: verbs.Context, pd: verbs.ProtectionDomain, deviations: frozenset[str]
) -> None:
    """The return from SQE to RTS must make free entries count again."""
    with (
        context.create_cq(64) as cq,
        pd.create_qp(cq, capabilities=QPCapabilities(max_send_wr=16), qp_type=QPType.UD) as qp,
        pd.reg_mr(64) as mr,
    ):
        here = qp.endpoint()
        qp.start(here)
        with (way := qp.destination(here, here)).ah:

            def send(number: int, lkey: int) -> None:
                with qp.batch() as batch:
                    piece = verbs.ScatterGatherElement(mr.addr, 8, lkey)
                    batch.send([piece], wr_id=number, to=way, signaled=number % 4 == 0)

            send(0, 0xDEAD)
            assert not cq.wait(spin=math.inf)[0].ok
            if "a failed send of an unreliable queue pair is fatal" in deviations:
                assert qp.query().qp_state is QPState.ERR
                return
            qp.modify(cur_qp_state=QPState.SQE, qp_state=QPState.RTS)
            assert qp.first_failure is None
            for number in range(1, 101):
                send(number, mr.lkey)
                if number % 4 == 0:
                    assert [wc.wr_id for wc in cq.wait(spin=math.inf)] == [number]
            assert qp.free_send_slots == qp.capabilities.max_send_wr
