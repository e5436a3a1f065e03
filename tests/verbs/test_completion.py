"""Test that completion queues and channels lose no completion and report no event twice."""

from __future__ import annotations

import math
import os
import select
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

from aiordma import verbs
from aiordma.errors import BufferStateError, BusyError
from aiordma.verbs import SendFlags, WCFields, WCOpcode, WCStatus, WorkCompletion, WROpcode
from conftest import LACKS, kind_of
from tests.verbs.draining import drain

if TYPE_CHECKING:
    from aiordma._native import Record
    from conftest import ConnectedPair, End, Pair

SIGNALED = SendFlags.SIGNALED


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with both kinds of completion queues if the device supports both."""
    if "extended" in metafunc.fixturenames:
        lacks = LACKS.get(kind_of(str(metafunc.config.getoption("--device"))), frozenset())
        kinds = [False] if "extended completion queues" in lacks else [False, True]
        names = ["extended" if extended else "classic" for extended in kinds]
        metafunc.parametrize("extended", kinds, ids=names)


@pytest.fixture
def context(
    device: verbs.Device, extended: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[verbs.Context]:
    with device.open() as context:
        make = partial(context.create_cq, extended=extended)
        monkeypatch.setattr(context, "create_cq", make)
        yield context


def wait(channel: verbs.CompletionChannel) -> None:
    """Wait until the fd is readable, and fail after 30 seconds."""
    assert select.select([channel.fd], [], [], 30)[0], "the fd did not become readable in 30 s"


def next_event(channel: verbs.CompletionChannel) -> verbs.CompletionQueue:
    """Return the next event's queue. A readable fd does not guarantee an event."""
    while (queue := channel.get_event()) is None:
        wait(channel)
    return queue


def drain_some(channel: verbs.CompletionChannel, capacity: int) -> tuple[list[Record], bool]:
    """Wait until `drain` finds a completion, and return its result."""
    while True:
        found, more = drain(channel, capacity)
        if found:
            return found, more
        assert not more
        wait(channel)


def send(source: End, target: End, wr_id: int = 1, flags: int = SIGNALED) -> None:
    """Post an 8-byte message and the receive for it."""
    target.post_recv(wr_id, 64)
    source.post(WROpcode.SEND_WITH_IMM, wr_id=wr_id, flags=flags, imm_data=wr_id)


def test_create_cq_grants_requested_size_and_rejects_invalid_sizes(context: verbs.Context) -> None:
    with context.create_cq(100) as cq:
        assert cq.cqe >= 100
        assert cq.poll() == []
        assert cq.channel is None
    most = context.query_device().max_cqe
    for wrong in (0, -1, most + 1):
        with pytest.raises(ValueError, match=f"between 1 and {most}"):
            context.create_cq(wrong)


def test_poll_returns_completions_in_order(pair: Pair) -> None:
    one, two = pair
    for wr_id in range(8):
        send(one, two, wr_id)
    sent = one.completions(8)
    received = two.completions(5)
    more = two.completions(2)
    assert len(more) == 2  # no more than requested
    received += more + two.completions(1)
    assert [wc.wr_id for wc in sent] == [wc.wr_id for wc in received] == list(range(8))
    assert [wc.imm_data for wc in received] == list(range(8))
    assert all(wc.ok and wc.opcode is WCOpcode.SEND for wc in sent)
    assert all(wc.ok and wc.opcode is WCOpcode.RECV and wc.byte_len == 8 for wc in received)
    assert all(wc.qp_num == two.qp.qp_num for wc in received)
    assert one.cq.poll() == two.cq.poll() == []


def test_armed_completion_queue_reports_one_event(
    heard: Pair, channel: verbs.CompletionChannel
) -> None:
    one, two = heard
    assert not os.get_blocking(channel.fd)
    assert channel.get_event() is None
    two.cq.req_notify()
    send(one, two)
    assert next_event(channel) is two.cq
    assert channel.get_event() is None
    assert channel.events == 1
    assert two.completion().opcode is WCOpcode.RECV
    assert one.completion().opcode is WCOpcode.SEND
    assert channel.get_event() is None


def test_req_notify_solicited_only_ignores_unsolicited_completions(
    connected_pair: ConnectedPair, channel: verbs.CompletionChannel
) -> None:
    one, two = connected_pair(channel=channel)
    two.cq.req_notify(solicited_only=True)
    send(one, two)
    two.completion()
    assert channel.get_event() is None
    send(one, two, flags=SIGNALED | SendFlags.SOLICITED)
    two.completion()
    assert next_event(channel) is two.cq
    one.completions(2)


def test_drain_returns_every_completion_and_rearms_the_queues(
    heard: Pair, channel: verbs.CompletionChannel
) -> None:
    one, two = heard
    for end in (one, two):
        end.cq.req_notify()
        end.qp.untrack()
    assert drain(channel) == ([], False)
    expected = set()
    for wr_id in range(40):
        send(one, two, wr_id)
        expected |= {(wr_id, one.qp.qp_num), (wr_id, two.qp.qp_num)}
        if wr_id % 8 != 7:
            continue
        while expected:
            found, more = drain_some(channel, 5)
            assert more == (len(found) == 5)
            for record in found:
                assert record[1] == WCStatus.SUCCESS
                expected.remove((record[0], record[6]))
    assert drain(channel)[0] == []
    assert channel.events >= 10


def test_completion_queue_closes_with_events_pending(
    context: verbs.Context, pd: verbs.ProtectionDomain, connected_pair: ConnectedPair
) -> None:
    channel = context.create_comp_channel()
    one, two = connected_pair(channel=channel)
    for end in (one, two):
        end.cq.req_notify()
    send(one, two)
    two.completion()
    one.cq.close()
    two.cq.close()
    assert drain(channel)[0] == []
    assert channel.get_event() is None
    channel.close()


def test_closing_a_completion_queue_preserves_other_queues_events(
    context: verbs.Context, connected_pair: ConnectedPair, channel: verbs.CompletionChannel
) -> None:
    other = context.create_cq(8, channel)
    one, two = connected_pair(channel=channel)
    two.cq.req_notify()
    send(one, two)
    one.completion()
    while not select.select([channel.fd], [], [], 0)[0]:
        pass
    other.close()
    assert channel.get_event() is two.cq
    two.completion()


def test_wait_returns_when_another_queue_on_the_channel_is_closed(
    context: verbs.Context,
    connected_pair: ConnectedPair,
    channel: verbs.CompletionChannel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = context.create_cq(8, channel)
    one, two = connected_pair(channel=channel)
    sleep_for = channel._sleep_for

    def close_and_sleep(queue: verbs.CompletionQueue, seen: int, end: float) -> None:
        send(one, two)
        one.completion()
        while not select.select([channel.fd], [], [], 0)[0]:
            pass
        other.close()
        sleep_for(queue, seen, end)

    monkeypatch.setattr(channel, "_sleep_for", close_and_sleep)
    assert len(two.cq.wait(timeout=60)) == 1
    assert two.cq._events_taken == 1


def test_poll_accepts_max_zero_but_wait_rejects_it(connected_pair: ConnectedPair) -> None:
    """A program may have computed the number."""
    one, two = connected_pair()
    send(one, two)
    assert two.cq.poll(0) == []
    with pytest.raises(ValueError, match="max must be at least 1"):
        two.cq.wait(0, spin=math.inf)
    one.completion()
    two.completion()


def test_drain_skips_completion_queue_closed_between_drains(
    heard: Pair, channel: verbs.CompletionChannel
) -> None:
    one, two = heard
    one.cq.req_notify()
    for wr_id in range(8):
        send(one, two, wr_id)
    two.completions(8)
    found, _ = drain_some(channel, 1)
    assert [record[0] for record in found] == [0]
    one.cq.close()
    records, more = drain(channel)
    assert records == []
    assert not more


def test_drain_returns_completions_when_channel_table_overflows(
    context: verbs.Context, connected_pair: ConnectedPair, channel: verbs.CompletionChannel
) -> None:
    ends = [end for _ in range(35) for end in connected_pair(channel=channel)]
    expected = set()
    for end in ends:
        end.cq.req_notify()
    for one, two in zip(ends[::2], ends[1::2], strict=True):
        send(one, two)
        expected |= {one.qp.qp_num, two.qp.qp_num}
    while expected:
        found, _ = drain_some(channel, 16)
        for record in found:
            expected.remove(record[6])


def test_resizing_a_completion_queue_preserves_completions(
    context: verbs.Context, connected_pair: ConnectedPair
) -> None:
    one, two = connected_pair()
    send(one, two)
    two.completion()
    while not (first := one.cq.poll()):
        os.sched_yield()
    assert first[0].ok
    send(one, two, wr_id=2)
    two.completion()
    one.cq.resize(1000)
    assert one.cq.cqe >= 1000
    assert one.completion().wr_id == 2  # kept by the resize
    one.cq.resize(100)
    assert one.cq.cqe >= 100
    send(one, two, wr_id=3)
    assert one.completion().wr_id == 3
    two.completion()


def test_reserve_and_release_count_completion_entries(cq: verbs.CompletionQueue) -> None:
    cq.reserve(cq.cqe - 10)
    assert cq.available == 10
    with pytest.raises(BusyError, match="11 are needed"):
        cq.reserve(11)
    with pytest.raises(ValueError, match="reserved"):
        cq.resize(8)
    cq.reserve(10)
    assert cq.available == 0
    cq.release(cq.cqe - 15)
    cq.release_when_empty(10)
    assert (cq.reserved, cq.in_use) == (15, 5)
    with pytest.raises(ValueError, match="cannot release 6 entries, because only 5 are reserved"):
        cq.release(6)
    assert cq.poll() == []
    assert (cq.reserved, cq.in_use) == (5, 5)


@pytest.mark.parametrize("field", [None, *WCFields], ids=lambda field: field and field.name)
def test_completion_has_only_the_requested_fields(field: WCFields | None) -> None:
    """Completions of classic queues (`None`) have some of the fields as well."""
    record = (5, 0, WCOpcode.RECV, 0, 8, 3, 0x11, 4, 0)
    wc = WorkCompletion.from_record(record, None, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), field)
    told = {
        None: {"slid": 4, "sl": 6, "dlid_path_bits": 7, "pkey_index": 5},
        WCFields.WITH_COMPLETION_TIMESTAMP: {"timestamp": 1},
        WCFields.WITH_COMPLETION_TIMESTAMP_WALLCLOCK: {"wallclock_ns": 2},
        WCFields.WITH_TM_INFO: {"tm_tag": 3, "tm_priv": 10},
        WCFields.WITH_SLID: {"slid": 4},
        WCFields.WITH_SL: {"sl": 6},
        WCFields.WITH_DLID_PATH_BITS: {"dlid_path_bits": 7},
        WCFields.WITH_CVLAN: {"cvlan": 8},
        WCFields.WITH_FLOW_TAG: {"flow_tag": 9},
    }.get(field, {})
    assert {name: wc._asdict()[name] for name in WorkCompletion._fields[11:]} == {
        **dict.fromkeys(WorkCompletion._fields[11:]),
        **told,
    }


def test_closed_completion_queue_and_channel_raise_buffer_state_error(
    context: verbs.Context,
) -> None:
    channel = context.create_comp_channel()
    cq = context.create_cq(16, channel)
    channel.close()
    uses: list[tuple[str, Callable[[], object]]] = [
        ("CompletionQueue", cq.poll),
        ("CompletionQueue", cq.req_notify),
        ("CompletionChannel", lambda: drain(channel)),
        ("CompletionChannel", channel.get_event),
        ("CompletionChannel", lambda: context.create_cq(16, channel)),
    ]
    for closed, use in uses:
        with pytest.raises(BufferStateError, match=f"{closed} is closed"):
            use()
