"""Test that broken rails come back, and that a rail whose path is dead is found.

The tests replace the loop's timers and decide when they fire.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from aiordma import (
    Connection,
    ConnectionBrokenError,
    DeviceEventError,
    RDMAError,
    connect,
    listen,
    transport,
)
from aiordma._core.protocol import RailReady
from aiordma._datapath.rail import SendQueue
from aiordma._datapath.work_queue import RailObserver
from aiordma._event_loop import device_failures
from aiordma._native import lib
from aiordma._transport import rails
from aiordma._transport.keep_alive import Probe
from aiordma._transport.rails import AnsweringRails, RailSlot
from aiordma.cli.tables import amount
from aiordma.cli.top import tables
from aiordma.metrics import METRICS
from aiordma.monitoring import snapshot
from aiordma.verbs import AsyncEvent, EventType, QueuePair, find_device
from tests.transport.connection_factory import (
    SMALL,
    ConnectionFactory,
    check_alive,
    ends,
    pattern,
    yield_loop,
)
from tests.transport.marks import by_tcp, one_loop

from .joining import HOST, TWO, Later, both, further, joined, lose, until_rails

CABLE = ConnectionBrokenError("its cable")
FIRST, LONGEST = 0.25, 5.0


@pytest.fixture(autouse=True)
def later(monkeypatch: pytest.MonkeyPatch, no_rail_comes_back_by_itself: None) -> Iterator[Later]:
    it = Later()
    monkeypatch.setattr(rails, "FIRST_DELAY", FIRST)
    monkeypatch.setattr(rails, "MAX_DELAY", LONGEST)
    monkeypatch.setattr(rails, "RailSlot", lambda device, offer, _: RailSlot(device, offer, it))
    yield it
    assert not it.waiting


@contextmanager
def port_down(name: bytes = b"embedded1") -> Iterator[None]:
    assert lib.aiordma_embedded_raise_on(name, EventType.PORT_ERR) == 0
    try:
        yield
    finally:
        assert lib.aiordma_embedded_raise_on(name, EventType.PORT_ACTIVE) == 0


def break_rail(conn: Connection) -> None:
    queue = further(conn).queue
    assert queue is not None
    queue.rail_broke(CABLE)


async def until_waiting(later: Later) -> None:
    while not later.waiting:
        await yield_loop(1)


# ---- when ----------------------------------------------------------------------------------------


async def test_retry_delay_doubles_until_rail_stays_up_long_enough(later: Later) -> None:
    offered: list[RailSlot] = []
    slot = RailSlot(None, offered.append, later)  # type: ignore[arg-type]
    for delay in (0.25, 0.5, 1, 2, 4, 5, 5):
        slot.retry_later(100.0)
        assert later.asked[-1] == delay
        later.fire()
    assert offered == [slot] * 7
    for seconds, delay in ((LONGEST - 0.1, 5), (LONGEST, FIRST), (0, 2 * FIRST)):
        slot.on_rail_up(100.0)
        slot.retry_later(100.0 + seconds)
        assert later.asked[-1] == delay
        later.fire()


async def test_active_port_event_retries_the_rail_immediately(later: Later) -> None:
    offered: list[RailSlot] = []
    slot = RailSlot(None, offered.append, later)  # type: ignore[arg-type]
    slot._on_event(AsyncEvent(EventType.PORT_ACTIVE, port_num=1))
    assert not offered  # a rail is there, or under way
    for _ in range(4):
        slot.retry_later(100.0)
        later.fire()
    slot.retry_later(100.0)
    offered.clear()
    slot._on_event(AsyncEvent(EventType.PORT_ERR, port_num=1))
    assert not offered
    slot._on_event(AsyncEvent(EventType.PORT_ACTIVE, port_num=1))
    assert offered == [slot]
    assert not later.waiting
    slot.retry_later(100.0)
    assert later.asked[-1] == FIRST
    slot.close()


# ---- that it does --------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=["here", "there", "both at once"])
async def test_broken_rail_reconnects_with_its_counters(
    factory: ConnectionFactory, later: Later, which: tuple[int, ...]
) -> None:
    async with joined(factory.via) as conns:
        await until_rails(conns)
        read = 0
        for number in range(1, 4):
            data = pattern(4 << 20)
            while conns[1].rails[1].bytes_received == read:  # one rail may have been quicker
                sending = conns[0].send_nowait(data)
                with await conns[1].recv() as message:
                    assert message == data
                await sending
            read = conns[1].rails[1].bytes_received
            for side in which:
                break_rail(conns[side])
            await until_waiting(later)
            assert conns[0].rails[1].state == "down"
            later.fire()
            await until_rails(conns)
            assert further(conns[0]).number == number + 1
            assert conns[1].rails[1].bytes_received == read
            assert sum(rail.bytes_received for rail in conns[1].rails) == (
                conns[1].statistics().bytes_received
            )
            for side, conn in enumerate(conns):
                assert ("its cable" in str(conn.rails[1].error)) == (side in which)
        await check_alive(*conns)


@one_loop
async def test_rail_follows_its_port_down_and_up(factory: ConnectionFactory, later: Later) -> None:
    """The rail reacts to the events of the port, and needs no timer to come back."""
    async with joined(factory.via) as conns:
        for _ in range(3):
            await until_rails(conns)
            with port_down():
                await until_rails(conns, ("lead", "down"))
                await until_waiting(later)
                for conn in conns:
                    assert isinstance(error := conn.rails[1].error, DeviceEventError)
                    assert error.event == "PORT_ERR"
                await check_alive(*conns)
        await until_rails(conns)


@one_loop
async def test_connecting_rail_goes_down_with_its_port(
    factory: ConnectionFactory, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(monkeypatch, RailReady)
    async with joined(factory.via) as conns:
        await until_rails(conns[:1])
        assert conns[1].rails[1].state == "connecting"
        queue = further(conns[0]).queue
        assert queue is not None
        queue.number = 0  # this side does not hear of it
        with port_down():
            await until_rails(conns, ("lead", "down"))
            await until_waiting(later)
            assert isinstance(error := conns[1].rails[1].error, DeviceEventError)
            assert error.event == "PORT_ERR"


@one_loop
async def test_retries_on_a_down_port_are_logged_once_as_warning(
    factory: ConnectionFactory, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    with port_down(), caplog.at_level(logging.INFO, "aiordma.rails"):
        async with joined(factory.via) as conns:
            since = conns[0].rails[1].since
            for _ in range(3):
                assert later.waiting == 1
                later.fire()
            assert conns[0].rails[1].since == since
        told = [
            record.levelname for record in caplog.records if "cannot be created" in record.message
        ]
        assert told == ["WARNING", "INFO", "INFO", "INFO"]


@one_loop
async def test_lead_moves_when_its_port_goes_down_and_is_logged(
    factory: ConnectionFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """Another rail becomes the lead immediately.

    The log has the cause first, then one line with the duration for each move of the lead, and one
    for each rail that is back.
    """
    caplog.set_level(logging.WARNING, "aiordma")
    before = snapshot()["leads_moved"].get("embedded0", 0)
    async with joined(factory.via) as conns:
        await until_rails(conns)
        with port_down(b"embedded0"):
            await until_rails(conns, ("down", "lead"))
            await check_alive(*conns)
        await until_rails(conns, ("up", "lead"))
        await check_alive(*conns)
    assert snapshot()["leads_moved"]["embedded0"] == before + 2
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "PORT_ERR event on embedded0, port 1"
    assert re.fullmatch(r"rail 0 to .* on embedded0 broke: device 'embedded0' .*PORT_ERR", told[1])
    [moved, _] = [text for text in told if "lead" in text]
    assert re.search(
        r"^rail 1 to .* on embedded1 is the new lead, [\d.e+]+ ms after embedded0 "
        r"broke; retransmitting \d+ frames and requests$",
        moved,
    )
    back = [text for text in told if "is up again" in text]
    assert len(back) == 2
    assert re.search(r"rail 2 to .* on embedded0 is up again, [\d.]+ s after it broke$", back[0])


@one_loop
async def test_failed_device_is_reopened_for_its_rail(
    factory: ConnectionFactory, later: Later
) -> None:
    async with joined(factory.via) as conns:
        await until_rails(conns)
        before = further(conns[0]).endpoint
        assert before is not None
        driver = before.driver
        assert lib.aiordma_embedded_raise_on(b"embedded1", EventType.DEVICE_FATAL) == 0
        await until_rails(conns, ("lead", "down"))
        await until_waiting(later)
        later.fire()
        await until_rails(conns)
        after = further(conns[0]).endpoint
        assert after is not None
        assert after.driver is not before.driver
        assert driver._closed
        with port_down():  # and the new one is watched
            await until_rails(conns, ("lead", "down"))
            await until_waiting(later)
        await until_rails(conns)


async def test_refused_rail_is_retried_after_another_rail_breaks(
    factory: ConnectionFactory, later: Later
) -> None:
    """The listener has two devices, so it refuses the third rail until another one has ended."""
    async with joined(factory.via, here="all") as conns:
        await until_rails(conns[:1], ["lead", "up", "down"])
        await yield_loop(3)
        assert not later.waiting
        assert conns[0]._rails is not None
        first = conns[0]._rails.rails[1].queue
        assert first is not None
        first.rail_broke(CABLE)
        while later.waiting < 2:
            await yield_loop(1)
        later.fire()
        await until_rails(conns[1:])
        while sorted(rail.state for rail in conns[0].rails) != ["down", "lead", "up"]:
            await yield_loop(1)


async def test_broken_rail_reconnects_only_on_its_own_device(
    factory: ConnectionFactory, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new rail may use the lead's device in place of one that is missing on the other side.

    A returning rail waits for its own device.
    """
    make = AnsweringRails._create_endpoint
    gone = True

    def make_elsewhere(self: AnsweringRails, device: Any, to: Any) -> Any:
        if gone and device.name == "embedded1":
            raise RDMAError("no address yet")
        return make(self, device, to)

    monkeypatch.setattr(AnsweringRails, "_create_endpoint", make_elsewhere)
    async with joined(factory.via) as conns:
        await until_rails(conns, ("lead", "up"))
        assert [rail.device for rail in conns[1].rails] == ["embedded0"] * 2
    gone = False
    async with joined(factory.via) as conns:
        await until_rails(conns)
        gone = True
        break_rail(conns[0])
        await until_waiting(later)
        later.fire()
        await until_waiting(later)
        assert "no address yet" in str(conns[0].rails[1].error)
        gone = False
        later.fire()
        await until_rails(conns)
        assert [rail.device for rail in conns[1].rails] == TWO


async def test_closing_connection_does_not_retry_broken_rails(
    factory: ConnectionFactory, later: Later
) -> None:
    async with joined(factory.via) as conns:
        await until_rails(conns)
        break_rail(conns[0])
        await until_waiting(later)
        closing = asyncio.create_task(conns[0].close())
        await yield_loop(1)
        later.fire()
        assert len(conns[0].rails) == 2
        assert further(conns[0]).number == 1
        await closing


# ---- a rail without traffic ----------------------------------------------------------------------


async def test_keep_alive_detects_dead_rail_without_closing_connection(
    factory: ConnectionFactory, later: Later
) -> None:
    """Each side with `Config.keep_alive` probes each of its rails."""
    async with joined(factory.via, config=replace(SMALL, keep_alive=1000.0)) as conns:
        await until_rails(conns)
        for conn in conns:
            asked, rail = further(conn).keep_alive, further(conn)
            assert asked is not None
            assert rail.queue is not None
            asked._timer.cancel()
            asked._seen_completions = rail.queue.completions
            asked._check()
            assert any(isinstance(work, Probe) for work in rail.queue.outstanding_work())
            asked._timer.cancel()
            asked._seen_completions = rail.queue.completions
            asked._give_up()
            await until_waiting(later)
            assert "keep_alive" in str(conn.rails[1].error)
            assert asked._timer.cancelled()
            later.fire()
            await until_rails(conns)
        asked = further(conns[0]).keep_alive
        assert asked is not None
        await check_alive(*conns)
    assert asked._timer.cancelled()


# ---- the end of one ------------------------------------------------------------------------------


# ---- the listener --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1])
async def test_broken_rail_fails_its_queue_pair_before_closing_memory_windows(
    factory: ConnectionFactory, later: Later, monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    """A READ of memory whose window is already closed would break the connection."""
    steps: list[Any] = []
    to_error = QueuePair.to_error

    class Spy(RailObserver):
        def rail_removed(self, rail: SendQueue) -> None:
            steps.append(("windows", rail.qp))

    def told(qp: QueuePair) -> None:
        steps.append(("queue pair", qp))
        to_error(qp)

    async with joined(factory.via) as conns:
        await until_rails(conns)
        pairs = []
        for conn in conns:
            assert conn._rails is not None
            monkeypatch.setattr(conn._rails, "observers", (Spy(), *conn._rails.observers))
            queue = further(conn).queue
            assert queue is not None
            pairs.append(queue.qp)
        monkeypatch.setattr(QueuePair, "to_error", told)
        break_rail(conns[side])
        await until_waiting(later)
        for qp in pairs:
            assert [what for what, whose in steps if whose is qp] == ["queue pair", "windows"]


@one_loop
@by_tcp
async def test_listener_accepts_while_at_least_one_device_works() -> None:
    """A device that has been opened again since its failure counts as working.

    Open connections continue, too.
    """

    async def serves() -> None:
        await check_alive(*rails)
        conns = await both(listener, device="embedded2", via="tcp")
        async with conns[0], conns[1]:
            assert conns[1].device == "embedded0"
            await check_alive(*conns)

    def fail() -> None:
        assert lib.aiordma_embedded_raise_on(b"embedded0", EventType.DEVICE_FATAL) == 0

    async with await listen(HOST, device=TWO, via="tcp", config=SMALL) as listener:
        rails = await both(listener, device=TWO, via="tcp")
        async with rails[0], rails[1]:
            await until_rails(rails)
            for _ in range(2):
                await serves()
                fail()
                await yield_loop(3)
            await serves()
            device_failures.report(asyncio.get_running_loop(), "embedded1", CABLE)
            await serves()
            fail()
            await ends(listener.accept(), DeviceEventError)
            await check_alive(*rails)


@one_loop
@by_tcp
async def test_listener_uses_the_next_device_when_the_first_is_missing() -> None:
    devices = replace(find_device("embedded0"), name="gone0"), find_device("embedded1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "choose_devices", lambda _: (devices, None))
        listener = await listen("127.0.0.3", device=TWO, via="tcp", config=SMALL)
    async with listener:
        accepting = asyncio.create_task(listener.accept())
        client = await connect("127.0.0.3", listener.port, device="embedded0", via="tcp")
        async with client, await accepting as server:
            assert server.device == "embedded1"


# ---- as it is shown ------------------------------------------------------------------------------


@one_loop
@by_tcp
async def test_rails_appear_in_snapshots_metrics_and_tables(later: Later) -> None:
    async with joined("tcp") as conns:
        await until_rails(conns)
        data = pattern(4 << 20)
        before = snapshot()
        while not conns[1].rails[1].bytes_received:
            sending = conns[0].send_nowait(data)
            (await conns[1].recv()).release()
            await sending
        broken = further(conns[1]).queue
        assert broken is not None
        broken.rail_broke(CABLE)
        await until_waiting(later)
        taken = snapshot()
        lead, other = conns[1].rails
        (shown,) = [each["rails"] for each in taken["connections"] if each["accepted"]]
        assert shown[0]["bytes_received"] == lead.bytes_received
        assert shown[1]["bytes_received"] == other.bytes_received > 0
        assert [rail["state"] for rail in shown] == ["lead", "down"]
        assert shown[0]["error"] is None
        assert re.fullmatch(
            r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}: its cable", shown[1]["error"] or ""
        )
        assert shown[0]["age"] > shown[1]["age"] >= 0
        metrics = {metric.name: metric.values(taken) for metric in METRICS}
        assert metrics["aiordma_rails"] == {("embedded0", "lead"): 2, ("embedded1", "down"): 2}
        assert metrics["aiordma_rail_sent_bytes"]["embedded0",] == conns[0].rails[0].bytes_sent
        broke = (taken["rail_failures"]["embedded1"], before["rail_failures"].get("embedded1", 0))
        assert broke[0] - broke[1] == 2
        assert metrics["aiordma_rail_failures"]["embedded1",] == broke[0]
        taken["rail_failures"] = taken["leads_moved"] = {}
        for name in "rail_failures", "leads_moved":
            (metric,) = [metric for metric in METRICS if metric.name == f"aiordma_{name}"]
            assert metric.values(taken) == {("embedded0",): 0, ("embedded1",): 0}
        assert metrics["aiordma_rail_received_bytes"] == {
            ("embedded0",): lead.bytes_received, ("embedded1",): other.bytes_received,
        }  # fmt: skip
        taken["time"] = before["time"] + 2
        console = Console(file=(text := io.StringIO()), width=200)
        console.print(tables({"1": taken}, {"1": before}, 0, 200))
        read = f"{amount(other.bytes_received)} ({amount(other.bytes_received / 2)}/s)"
        amounts = rf"0 B \(0 B/s\) +{re.escape(read)}"
        pattern_of_row = rf"embedded1 +down +0 s +{amounts} +20[-\d]+ [:.\d]+: its cable"
        assert re.search(pattern_of_row, text.getvalue()), text.getvalue()
