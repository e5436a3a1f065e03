"""Test extended completion queues: when they are chosen, their timestamps, and lazy reading."""

from __future__ import annotations

import itertools
import math
import select
import time
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma._native import ffi
from aiordma.errors import RemoteAccessError, UnsupportedError
from aiordma.verbs import CQFlags, SendFlags, WCFields, WCOpcode, WCStatus, WROpcode

if TYPE_CHECKING:
    from aiordma._native import handles as h
    from conftest import ConnectedPair, End, Pair

EXTENDED = pytest.mark.needs("extended completion queues")
TIMES = WCFields.WITH_COMPLETION_TIMESTAMP | WCFields.WITH_COMPLETION_TIMESTAMP_WALLCLOCK


def write(one: End, two: End, imm: int | None = None, *, rkey: int | None = None) -> None:
    """Write 8 bytes to the peer's memory. Immediate data consumes a receive at the peer."""
    two.qp.post_recv_one(7, 0, 0, 0)
    opcode = WROpcode.RDMA_WRITE if imm is None else WROpcode.RDMA_WRITE_WITH_IMM
    one.post(opcode, two, wr_id=5, rkey=rkey, imm_data=imm or 0)


def test_create_cq_requests_all_supported_fields_by_default(context: verbs.Context) -> None:
    with context.create_cq(16) as cq:
        assert cq.fields == context.cq_fields
        assert ("extended" in repr(cq)) is (cq.fields is not None)
    with context.create_cq(16, extended=False) as cq:
        assert cq.fields is None
        assert "extended" not in repr(cq)


@EXTENDED
def test_create_cq_uses_requested_fields_and_flags(context: verbs.Context) -> None:
    with context.create_cq(16, extended=True) as cq:
        assert cq.fields is not None
        assert cq.fields & TIMES == TIMES
    with context.create_cq(16, fields=WCFields.WITH_QP_NUM, flags=CQFlags.SINGLE_THREADED) as cq:
        assert cq.fields == WCFields.WITH_QP_NUM
        assert cq.flags == CQFlags.SINGLE_THREADED
        assert cq.poll() == []


@pytest.mark.parametrize("fields", [WCFields.WITH_TM_INFO, WCFields.WITH_CVLAN])
def test_create_cq_reports_the_unsupported_field(context: verbs.Context, fields: WCFields) -> None:
    with pytest.raises(UnsupportedError, match=f"{context.name}.*extended.*{fields.name}"):
        context.create_cq(16, fields=fields)


def test_classic_completion_queue_rejects_extended_options(context: verbs.Context) -> None:
    for option in ({"fields": WCFields.WITH_QP_NUM}, {"flags": CQFlags.IGNORE_OVERRUN}):
        with pytest.raises(ValueError, match="require an extended completion queue"):
            context.create_cq(16, extended=False, **option)


def test_create_cq_rejects_comp_vector_out_of_range(context: verbs.Context) -> None:
    beyond = context.num_comp_vectors
    for vector in (-1, beyond):
        with pytest.raises(ValueError, match=f"between 0 and {beyond - 1} on {context.name}"):
            context.create_cq(16, comp_vector=vector)
    with context.create_cq(16, comp_vector=beyond - 1) as cq:
        assert cq.poll() == []


def test_cq_fields_exclude_unsupported_timestamps(
    context: verbs.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supported fields are found by asking for fewer of them until the device agrees."""
    if context.cq_fields is None:
        with pytest.raises(UnsupportedError, match="extended completion queues"):
            context.create_cq(16, extended=True)
        return
    make = context.library.calls.ibv_create_cq_ex
    asked = []

    def no_time_of_day(pointer: h.ibv_context, attr: h.ibv_cq_init_attr_ex) -> h.ibv_cq_ex:
        asked.append(WCFields(attr.wc_flags))
        if attr.wc_flags & WCFields.WITH_COMPLETION_TIMESTAMP_WALLCLOCK:
            raise UnsupportedError("ibv_create_cq_ex")
        return make(pointer, attr)

    monkeypatch.setattr(context.library.calls, "ibv_create_cq_ex", no_time_of_day)
    monkeypatch.setattr(context, "_cq_fields", None)
    assert context.cq_fields is not None
    assert context.cq_fields & TIMES == WCFields.WITH_COMPLETION_TIMESTAMP
    assert len(asked) == 2


# --- what they tell ----------------------------------------------------------------------------


@EXTENDED
def test_completion_timestamps_increase_with_the_device_clock(
    context: verbs.Context, connected_pair: ConnectedPair
) -> None:
    before, wall_before = context.query_rt_values_ex(), time.time_ns()
    one, two = connected_pair()
    stamps = []
    for _ in range(3):
        write(one, two)
        wc = one.completion()
        assert wc.timestamp is not None
        assert wc.wallclock_ns is not None
        stamps.append((wc.timestamp, wc.wallclock_ns))
    after, wall_after = context.query_rt_values_ex(), time.time_ns()
    assert [before, *(ticks for ticks, _ in stamps), after] == sorted(
        [before, *(ticks for ticks, _ in stamps), after]
    )
    walls = [wall_before, *(wall for _, wall in stamps), wall_after]
    # Allow 10 ms, because completions may use a less precise wall clock than time.time_ns().
    assert all(later - earlier > -10_000_000 for earlier, later in itertools.pairwise(walls))
    assert context.query_device_ex().seconds(after - before) < 60


def test_write_with_immediate_completion_has_every_field(pair: Pair) -> None:
    one, two = pair
    write(one, two, imm=0xABCD1234)
    sent, received = one.completion(), two.completion()
    assert (sent.wr_id, sent.opcode, sent.qp_num) == (5, WCOpcode.RDMA_WRITE, one.qp.qp_num)
    assert sent.imm_data is None
    assert (received.wr_id, received.opcode) == (7, WCOpcode.RECV_RDMA_WITH_IMM)
    assert received.qp_num == two.qp.qp_num
    assert received.imm_data == 0xABCD1234
    assert received.byte_len == 8
    assert received.invalidated_rkey is None
    assert received.slid is not None
    assert received.sl == 0
    assert received.dlid_path_bits is not None
    # The remaining fields depend on the kind of completion queue.
    assert (received.pkey_index is None) is (two.cq.fields is not None)
    assert (received.timestamp is None) is (two.cq.fields is None)
    assert received.cvlan is received.flow_tag is received.tm_tag is received.tm_priv is None


def test_undefined_fields_of_failed_completion_are_none(pair: Pair) -> None:
    one, two = pair
    write(one, two, rkey=two.mr.rkey ^ 0x55)
    wc = one.completion()
    assert (wc.wr_id, wc.status, wc.qp_num) == (5, WCStatus.REM_ACCESS_ERR, one.qp.qp_num)
    assert wc.opcode is wc.timestamp is wc.imm_data is wc.slid is None
    assert isinstance(wc.error(), RemoteAccessError)


# --- one by one --------------------------------------------------------------------------------


def steps(end: End, count: int) -> list[tuple[object, ...]]:
    """Poll `count` completions with a cursor and return the main fields of each."""
    found: list[tuple[object, ...]] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        with end.cq.start_poll() as cursor:
            found += [
                (wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.imm_data, wc.qp_num)
                for wc in cursor
            ]
        assert time.monotonic() < deadline, found
    return found


def test_iterating_over_start_poll_returns_completions(pair: Pair) -> None:
    one, two = pair
    for imm in (1, None, 3):
        write(one, two, imm)
    one.completions(3)
    recv = WCOpcode.RECV_RDMA_WITH_IMM
    assert steps(two, 2) == [(7, WCStatus.SUCCESS, recv, 8, imm, two.qp.qp_num) for imm in (1, 3)]
    assert two.cq.poll() == []


def test_cursor_reads_optional_fields_and_rejects_unsupported_ones(pair: Pair) -> None:
    one, two = pair
    write(one, two, 4)
    one.completion()
    with two.cq.start_poll() as cursor:
        while (at := next(iter(cursor), None)) is None:
            pass
        assert at is cursor
        assert at.sl == 0
        assert at.vendor_err == 0
        assert at.invalidated_rkey is None
        assert at.failure is None
        assert at.slid >= 0
        assert at.dlid_path_bits >= 0
        assert at.src_qp >= 0
        if two.cq.fields is None:
            with pytest.raises(UnsupportedError, match="the completion field timestamp"):
                at.timestamp  # noqa: B018
        else:
            assert at.timestamp > 0
            assert at.wallclock_ns > 0
        for name in ("cvlan", "flow_tag"):
            with pytest.raises(UnsupportedError, match=f"the completion field {name}") as caught:
                getattr(at, name)
            assert str(caught.value).count(name) == 1


def test_cursor_leaves_completions_unread_after_break(pair: Pair) -> None:
    one, two = pair
    for imm in range(3):
        write(one, two, imm)
    one.completions(3)
    with two.cq.start_poll() as cursor:
        for wc in cursor:
            assert wc.imm_data == 0
            break
    assert [wc.imm_data for wc in two.completions(2)] == [1, 2]


def test_cursor_raises_runtime_error_when_queue_is_empty(cq: verbs.CompletionQueue) -> None:
    with cq.start_poll() as cursor:
        assert list(cursor) == []
        with pytest.raises(RuntimeError, match="not positioned on a completion"):
            cursor.wr_id  # noqa: B018
        with pytest.raises(RuntimeError, match="not positioned on a completion"):
            cursor.byte_len  # noqa: B018


def test_cursor_reports_the_failed_operation(pair: Pair) -> None:
    """Reading with a cursor must have the same effects as polling."""
    one, two = pair
    write(one, two, rkey=two.mr.rkey ^ 0x55)
    failures: list[tuple[WCStatus, object]] = []
    deadline = time.monotonic() + 30
    while not failures:
        with one.cq.start_poll() as cursor:
            failures += [(wc.status, wc.failure) for wc in cursor]
        assert time.monotonic() < deadline
    status, failure = failures[0]
    assert status is WCStatus.REM_ACCESS_ERR
    assert isinstance(failure, RemoteAccessError)
    assert failure.operation == "write"


# --- moderation --------------------------------------------------------------------------------


@pytest.mark.needs("moderation")
def test_moderation_delays_the_event_of_a_single_completion(
    connected_pair: ConnectedPair, channel: verbs.CompletionChannel
) -> None:
    one, two = connected_pair(channel=channel)
    period = 0.06
    two.cq.modify(cq_count=2, cq_period=period)
    is_in_time = False
    while not is_in_time:  # a busy machine may take longer than the period
        two.cq.req_notify()
        began = time.monotonic()
        write(one, two, 1)
        one.completion()
        two.completion()
        early = event = channel.get_event()
        is_in_time = time.monotonic() - began < period
        while event is None:  # the embedded device may make `fd` readable before there is an event
            assert select.select([channel.fd], [], [], 30)[0]
            event = channel.get_event()
        delay = time.monotonic() - began
        assert event is two.cq
    assert early is None
    assert delay >= period
    two.cq.modify(cq_count=0, cq_period=0)


@pytest.mark.needs("moderation")
def test_modify_cq_rejects_moderation_values_out_of_range(
    context: verbs.Context, cq: verbs.CompletionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, period in ((1 << 16, 0.0), (0, 1.0), (-1, 0.0)):
        with pytest.raises(ValueError, match=f"invalid moderation .*: cq_count={count} .maximum"):
            cq.modify(cq_count=count, cq_period=period)
    with pytest.raises(
        ValueError, match="cq_period must be a finite non-negative number of seconds"
    ):
        cq.modify(cq_count=0, cq_period=-0.5)


def test_modify_cq_raises_unsupported_error_without_moderation(
    context: verbs.Context, cq: verbs.CompletionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = verbs.ExtendedDeviceAttributes.read(ffi.new("struct ibv_device_attr_ex *"))
    monkeypatch.setattr(context, "query_device_ex", lambda: empty)
    with pytest.raises(UnsupportedError, match=f"{context.name}.*moderation"):
        cq.modify(cq_count=1, cq_period=0)


@EXTENDED
def test_send_slots_are_freed_regardless_of_requested_cq_fields(
    context: verbs.Context, pd: verbs.ProtectionDomain
) -> None:
    """Work is found by the number of its queue pair.

    The queue reports that number in addition to the requested fields.
    """
    with (
        context.create_cq(64, fields=WCFields.WITH_BYTE_LEN) as cq,
        pd.create_qp(cq) as one,
        pd.create_qp(cq) as two,
    ):
        here, there = one.endpoint(), two.endpoint()
        one.connect(here, there)
        two.connect(there, here)
        for number in range(one.free_send_slots + 1):
            two.post_recv_one(0, 0, 0, 0)
            one.post_send_one(number, WROpcode.SEND, SendFlags.SIGNALED, 0, 0, 0)
            found = cq.wait(1, spin=math.inf) + cq.wait(1, spin=math.inf)
            assert len(found) == 2
            for wc in found:
                assert wc.timestamp is wc.slid is wc.sl is wc.wallclock_ns is None
        assert one.free_send_slots == one.capabilities.max_send_wr
