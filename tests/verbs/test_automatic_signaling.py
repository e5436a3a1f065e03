"""Unsignaled sends without care: every n-th is signaled, and a full queue polls for itself."""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from aiordma import verbs
from aiordma.errors import BusyError, QueueFullError, RemoteAccessError
from aiordma.verbs import (
    AccessFlags,
    MWType,
    QPCapabilities,
    QPState,
    QPType,
    ScatterGatherElement,
    SendFlags,
    WROpcode,
)
from aiordma.verbs._qp import posting
from tests.conftest import ConnectedPair, End

MANY = 10_000
DEPTH = 64
UNSIGNALED = SendFlags(0)


@pytest.fixture
def ends(connected_pair: ConnectedPair) -> tuple[End, End]:
    return connected_pair(QPCapabilities(max_send_wr=DEPTH))


def write(ends: tuple[End, End], number: int, flags: SendFlags = UNSIGNALED) -> None:
    a, b = ends
    at = number % 1000 * 8
    a.mr.buf[at : at + 8] = number.to_bytes(8, "little")
    a.qp.post_send_one(
        number, WROpcode.RDMA_WRITE, flags, a.mr.addr + at, 8, a.mr.lkey, b.mr.addr + at, b.mr.rkey
    )


def request(ends: tuple[End, End], number: int, flags: SendFlags) -> verbs.SendWorkRequest:
    a, b = ends
    piece = ScatterGatherElement(a.mr.addr, 8, a.mr.lkey)
    return verbs.SendWorkRequest(
        number, WROpcode.RDMA_WRITE, (piece,), flags, remote_addr=b.mr.addr, rkey=b.mr.rkey
    )


@pytest.mark.parametrize("every", [1, 16, DEPTH])
def test_ten_thousand_writes_through_a_queue_of_64(ends: tuple[End, End], every: int) -> None:
    a, b = ends
    a.qp.signal_every = every
    for number in range(MANY):
        write(ends, number)
    write(ends, MANY, SendFlags.SIGNALED)
    last = a.completion()
    assert (last.wr_id, last.ok) == (MANY, True)
    assert not a.cq.poll()
    assert a.qp.free_send_slots == a.qp.capabilities.max_send_wr
    for number in (*range(MANY - 999, MANY), MANY):
        at = number % 1000 * 8
        assert int.from_bytes(b.mr.buf[at : at + 8], "little") == number


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_without_it_polling_frees_a_queue_of_unsignaled_requests(
    ends: tuple[End, End], together: bool
) -> None:
    a, _ = ends
    size = a.qp.capabilities.max_send_wr
    for _ in range(10):
        if together:
            a.qp.post_send([request(ends, 0, UNSIGNALED)] * size)
        else:
            for number in range(size):
                write(ends, number)
        while a.qp.free_send_slots < size:
            assert not a.cq.poll()


def test_several_at_a_time(ends: tuple[End, End]) -> None:
    """And with numbers that are all the same."""
    a, _ = ends
    a.qp.signal_every = 16
    for _ in range(300):
        a.qp.post_send([request(ends, 0, UNSIGNALED)] * 30)
    a.qp.post_send([request(ends, 0, UNSIGNALED), request(ends, 1, SendFlags.SIGNALED)])
    assert a.completion().wr_id == 1
    assert not a.cq.poll()


def test_completions_that_were_asked_for_are_kept(ends: tuple[End, End]) -> None:
    """Those that posting finds are returned by `poll`, in order; by nothing else."""
    a, b = ends
    a.qp.signal_every = 8
    b.qp.post_recv_one(1, b.mr.addr, 8, b.mr.lkey)
    asked = []
    for number in range(500):
        if number % 100 == 7:
            write(ends, number, SendFlags.SIGNALED)
            asked.append(number)
        else:
            write(ends, number)
    if a.cq.fields is not None:  # that of a classic queue polls
        with a.cq.start_poll() as cursor, pytest.raises(BusyError, match="take them with poll"):
            list(cursor)
    assert [wc.wr_id for wc in a.completions(len(asked))] == asked
    assert not list(a.cq.start_poll())


def test_a_cursor_hides_what_was_not_asked_for(ends: tuple[End, End]) -> None:
    a, _ = ends
    a.qp.signal_every = 4
    for number in range(10):
        write(ends, number)
    write(ends, 10, SendFlags.SIGNALED)
    found: list[int] = []
    while not found:
        with a.cq.start_poll() as cursor:
            found = [completion.wr_id for completion in cursor]
    assert found == [10]
    assert a.qp.free_send_slots == a.qp.capabilities.max_send_wr


def test_posting_collects_while_another_thread_polls(ends: tuple[End, End]) -> None:
    """Each completion is returned once, in order."""
    a, _ = ends
    a.qp.signal_every = 16
    asked = range(3, MANY, 4)
    switches = sys.getswitchinterval()

    def post() -> None:
        for number in range(MANY):
            write(ends, number, SendFlags.SIGNALED if number in asked else UNSIGNALED)

    with ThreadPoolExecutor(1) as threads:
        posting_ends = threads.submit(post)
        sys.setswitchinterval(1e-6)
        try:
            found: list[int] = []
            while len(found) < len(asked) and not (
                posting_ends.done() and posting_ends.exception()
            ):
                found += [wc.wr_id for wc in a.cq.poll()]
        finally:
            sys.setswitchinterval(switches)
        posting_ends.result()
    assert found == list(asked)


def test_posting_finds_room_while_another_thread_waits(ends: tuple[End, End]) -> None:
    """That thread polls all the time, and what it settles makes room."""
    a, _ = ends
    a.qp.signal_every = 16
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(a.cq.wait, 1, spin=math.inf)
        for number in range(MANY):
            write(ends, number)
        write(ends, MANY, SendFlags.SIGNALED)
        assert [wc.wr_id for wc in waiting.result()] == [MANY]


def test_a_failure_is_returned(ends: tuple[End, End]) -> None:
    a, b = ends
    a.qp.signal_every = 2
    for number in (1, 2):
        a.qp.post_send_one(
            number, WROpcode.RDMA_WRITE, UNSIGNALED, a.mr.addr, 8, a.mr.lkey, b.mr.addr, 12345
        )
    first = a.completion()
    assert (first.wr_id, first.status) == (1, verbs.WCStatus.REM_ACCESS_ERR)
    assert isinstance(a.qp.first_failure, RemoteAccessError)


def test_a_peer_that_takes_nothing(
    connected_pair: ConnectedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing completes: posting gives up."""
    a, _ = connected_pair(QPCapabilities(max_send_wr=8), rnr_retry=7)
    monkeypatch.setattr(posting, "ROOM_TIMEOUT", 0.05)
    a.qp.signal_every = 4
    most = a.qp.capabilities.max_send_wr
    for number in range(most):
        a.qp.post_send_one(number, WROpcode.SEND, UNSIGNALED, a.mr.addr, 8, a.mr.lkey)
    with pytest.raises(QueueFullError, match=f"1 wanted, 0 of {most} slots free"):
        a.qp.post_send_one(most, WROpcode.SEND, UNSIGNALED, a.mr.addr, 8, a.mr.lkey)
    assert a.qp.state is QPState.RTS


def test_a_number_that_does_not_fit(ends: tuple[End, End]) -> None:
    a, _ = ends
    assert a.qp.signal_every == 0
    most = a.qp.capabilities.max_send_wr
    for wrong in (-1, most + 1):
        with pytest.raises(ValueError, match=f"signal_every must be 0 to {most}, not {wrong}"):
            a.qp.signal_every = wrong


def test_a_request_too_many_says_what_frees_the_others(ends: tuple[End, End]) -> None:
    a, _ = ends
    a.qp.signal_every = 16
    write(ends, 0)
    with pytest.raises(QueueFullError, match="post a signaled one to free them"):
        a.qp.post_send([request(ends, 1, UNSIGNALED)] * DEPTH)
    write(ends, 1, SendFlags.SIGNALED)
    assert a.completion().wr_id == 1
    a.qp.post_send([request(ends, 1, UNSIGNALED)] * DEPTH)
    write(ends, 2, SendFlags.SIGNALED)
    assert a.completion().wr_id == 2


def test_draining_tells_of_what_is_kept(
    connected_pair: ConnectedPair, channel: verbs.CompletionChannel
) -> None:
    """As a cursor does: only `poll` returns it."""
    ends = connected_pair(QPCapabilities(max_send_wr=DEPTH), channel=channel)
    a, _ = ends
    a.qp.signal_every = 16
    write(ends, 7, SendFlags.SIGNALED)
    for number in range(DEPTH):
        write(ends, number)
    with pytest.raises(BusyError, match="take them with poll"):
        channel.drain()
    assert [wc.wr_id for wc in a.cq.poll()] == [7]
    channel.drain()


def test_binding_windows(ends: tuple[End, End], pd: verbs.ProtectionDomain) -> None:
    """Binds of type 1, which have a call of their own, free their entries as well."""
    a, _ = ends
    a.qp.signal_every = 4
    rights = AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND
    with pd.reg_mr(64, rights) as region, pd.alloc_mw(MWType.TYPE_1) as window:
        for number in range(2 * DEPTH):
            window.bind(a.qp, region, AccessFlags.REMOTE_READ, wr_id=number, send_flags=UNSIGNALED)
        write(ends, MANY, SendFlags.SIGNALED)
        assert a.completion().wr_id == MANY
        assert a.qp.free_send_slots == a.qp.capabilities.max_send_wr


def test_going_on_after_a_failed_datagram(
    context: verbs.Context, pd: verbs.ProtectionDomain, deviations: frozenset[str]
) -> None:
    """From SQE back to RTS, free entries count again: the queue does not overrun."""
    with (
        context.create_cq(2 * DEPTH) as cq,
        pd.create_qp(cq, capabilities=QPCapabilities(max_send_wr=16), qp_type=QPType.UD) as qp,
        pd.reg_mr(64) as mr,
    ):
        here = qp.endpoint()
        qp.start(here)
        way = qp.destination(here, here)
        with way.ah:

            def send(number: int, flags: SendFlags, lkey: int) -> None:
                qp.post_send_one(
                    number, WROpcode.SEND, flags, mr.addr, 8, lkey,
                    way.ah.address, way.remote_qpn, 0, way.remote_qkey,
                )  # fmt: skip

            qp.signal_every = 4
            send(0, SendFlags.SIGNALED, 0xDEAD)
            assert not cq.wait(spin=math.inf)[0].ok
            if "a failed send of an unreliable queue pair is fatal" in deviations:
                assert qp.query().qp_state is QPState.ERR
                return
            qp.modify(cur_qp_state=QPState.SQE, qp_state=QPState.RTS)
            assert qp.first_failure is None
            for number in range(10 * DEPTH):
                send(number, UNSIGNALED, mr.lkey)
            send(MANY, SendFlags.SIGNALED, mr.lkey)
            assert [wc.wr_id for wc in cq.wait(spin=math.inf)] == [MANY]
