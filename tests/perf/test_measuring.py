"""Tests of measurements, with client and server in this process on the device under test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from aiordma import Config
from aiordma.async_queue_pair import Completed
from aiordma.errors import LimitError
from aiordma.perf.client import Part, PerfClient, RefusedError, Result
from aiordma.perf.memory import OneSided
from aiordma.perf.queue_pairs import QueuePair
from aiordma.perf.server import Limits, PerfServer
from aiordma.perf.settings import MAX_ITERATIONS, METRICS, OPERATIONS, Settings, default_depth

pytestmark = pytest.mark.any_device

FEW = 12

one_loop = pytest.mark.one_loop


def settings(operation: str, metric: str, size: int = 100) -> Settings:
    return Settings(
        operation=operation,
        metric=metric,
        sizes=(8 if operation == "atomic" else size,),
        iterations=FEW,
        warm_up=2,
        depth=min(4, default_depth(operation, metric)),
    )


async def measured(
    device_name: str, host: str, asked: Settings, limits: Limits | None = None
) -> list[Result | None]:
    async with (
        await PerfServer.start(host, 0, device=device_name, limits=limits or Limits()) as server,
        PerfClient.connect(asked, host, server.listening.port, device=device_name) as client,
    ):
        return [await client.measure(size) for size in asked.sizes]


@pytest.mark.parametrize(("polling", "us"), [(None, 200), (0.0, 0), (50e-6, 50)])
async def test_server_reports_its_polling(
    device_name: str, host: str, polling: float | None, us: int
) -> None:
    config = Config(polling=polling)
    asked, device = settings("send", "lat"), device_name
    async with (
        await PerfServer.start(host, 0, device=device, config=config) as server,
        PerfClient.connect(
            asked, host, server.listening.port, device=device, config=config
        ) as client,
    ):
        assert client.server.polling_us == us


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_each_operation_and_metric_can_be_measured(
    device_name: str, host: str, operation: str, metric: str
) -> None:
    asked = settings(operation, metric)
    (result,) = await measured(device_name, host, asked)
    assert result is not None
    assert result.mismatch == ""
    assert result.operations == FEW
    assert result.seconds > 0
    assert all(used > 0 for used in result.cpu)
    assert not result.interrupted
    if metric != "lat":
        assert result.latency is None
        return
    assert result.latency is not None
    assert result.latency.count == FEW
    assert (result.completion is None) is (operation == "stream")
    if operation in ("read", "atomic"):
        assert result.completion == result.latency
    elif result.completion is not None:
        assert result.completion.count == FEW
    # The latencies cannot add up to more than the total time. A halved latency covers only one
    # direction of a round trip.
    ways = 2 if asked.halved else 1
    assert ways * result.latency.mean * FEW <= result.seconds


@pytest.mark.parametrize(
    "asked",
    [
        replace(settings("write", "rate"), batch=4),
        replace(settings("read", "rate"), batch=3, depth=6),
        replace(settings("atomic", "rate"), batch=2, connections=3),
        replace(settings("send", "bw"), imm=True, connections=2, verify_all=True),
        replace(settings("send", "lat"), imm=True, verify_all=True),
        replace(settings("write", "lat"), imm=True, connections=2),
        replace(settings("send", "rate"), bidirectional=True, connections=2, imm=True),
        replace(settings("write", "bw"), bidirectional=True, iterations=None, duration=0.01),
        replace(settings("stream", "lat", 100_000), connections=2, verify_all=True),
        replace(settings("send", "lat"), sizes=(0, 1, 100_000), warm_up=0),
        replace(settings("send", "rate"), iterations=None, duration=0.01),
        replace(settings("write", "lat"), iterations=None, duration=1e-9),
        replace(settings("read", "bw"), iterations=None, duration=1e-9),
    ],
    ids=lambda asked: f"{asked.operation}-{asked.metric}",
)
@one_loop
async def test_measurements_succeed_with_non_default_settings(
    device_name: str, host: str, asked: Settings
) -> None:
    results = await measured(device_name, host, asked)
    assert [result is not None and result.size for result in results] == list(asked.sizes)
    for result in results:
        assert result is not None
        assert result.mismatch == ""
        if asked.iterations is not None:
            assert result.operations >= asked.iterations


@pytest.mark.parametrize("operation", OPERATIONS)
@one_loop
async def test_progress_reaches_one_when_a_latency_is_measured(
    device_name: str, host: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_part = PerfClient._run_warm_up_and_part

    async def report_end(
        client: PerfClient, kind: str, size: int, progress: Callable[[float], None]
    ) -> Part | None:
        part = await run_part(client, kind, size, progress)
        progress(1.0)
        return part

    monkeypatch.setattr(PerfClient, "_run_warm_up_and_part", report_end)
    reported = [0.0]
    asked = settings(operation, "lat")
    async with (
        await PerfServer.start(host, 0, device=device_name) as server,
        PerfClient.connect(asked, host, server.listening.port, device=device_name) as client,
    ):
        await client.measure(asked.sizes[0], reported.append)
    assert reported == sorted(reported)
    assert reported[-1] == 1.0


def queue_pairs() -> Iterator[Settings]:
    """Yield settings for each type of plain queue pair and the operations it supports."""
    operations = {"rc": ("send", "write", "read"), "uc": ("send", "write"), "ud": ("send",)}
    for qp, possible in operations.items():
        for operation in possible:
            inline = 0 if operation == "read" else 32
            yield replace(settings(operation, "lat", 32), qp=qp, inline=inline)
            yield replace(settings(operation, "bw", 1000), qp=qp, moderation=4)
            if operation != "read":
                yield replace(settings(operation, "rate"), qp=qp, bidirectional=True)
    yield replace(settings("send", "lat"), qp="rc", imm=True, verify_all=True)
    yield replace(settings("write", "bw"), qp="rc", imm=True, connections=2)
    yield replace(settings("send", "rate"), qp="rc", moderation=3, iterations=None, duration=0.01)


@pytest.mark.parametrize(
    "asked", list(queue_pairs()), ids=lambda asked: f"{asked.qp}-{asked.operation}-{asked.metric}"
)
@one_loop
async def test_measurements_succeed_on_plain_queue_pairs(
    device_name: str, host: str, asked: Settings
) -> None:
    (result,) = await measured(device_name, host, asked)
    assert result is not None
    assert result.mismatch == ""
    # Only a few messages are in flight, so a receive is always posted and no message is lost.
    assert result.lost == 0
    if asked.iterations is not None:
        assert result.operations == FEW * (2 if asked.bidirectional else 1)
    if asked.metric == "lat":
        assert result.latency is not None
        assert result.completion is not None


@pytest.mark.parametrize("moderation", [1, 4, 64])
@one_loop
async def test_moderation_reduces_the_number_of_completions(
    device_name: str, host: str, monkeypatch: pytest.MonkeyPatch, moderation: int
) -> None:
    made = []

    class Counted(QueuePair):
        def release(self) -> None:
            made.append(self.queue.qp.send_cq.statistics().completions)
            super().release()

    monkeypatch.setattr("aiordma.perf.client.QueuePair", Counted)
    asked = replace(settings("write", "bw"), qp="rc", depth=64, moderation=moderation, warm_up=0)
    await measured(device_name, host, replace(asked, iterations=128))
    assert made[0] == 128 // moderation


@one_loop
async def test_datagram_of_several_packets_raises_limit_error(device_name: str, host: str) -> None:
    with pytest.raises(LimitError, match=r"a datagram on .* can be at most "):
        await measured(device_name, host, replace(settings("send", "lat", 4097), qp="ud"))


@one_loop
async def test_lost_datagrams_are_counted_by_the_server(
    device_name: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own figures count the datagrams that it has sent."""
    original = QueuePair.post

    def every_other(self: QueuePair, numbers: range) -> object:
        to = self._destination
        if numbers[0] % 2 and to is not None:
            # The peer's queue pair rejects a datagram with a wrong Q_Key.
            self._destination = to._replace(remote_qkey=to.remote_qkey ^ 1)
        try:
            return original(self, numbers)
        finally:
            self._destination = to

    monkeypatch.setattr(QueuePair, "post", every_other)
    (result,) = await measured(device_name, host, replace(settings("send", "bw"), qp="ud"))
    assert result is not None
    assert (result.operations, result.lost, result.mismatch) == (FEW, FEW // 2, "")


@one_loop
async def test_lost_response_raises_timeout_error(
    device_name: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(QueuePair):
        def post(self, numbers: range) -> list[Completed]:
            """Send nothing, so that the completion never arrives."""
            return [asyncio.get_running_loop().create_future()]

    monkeypatch.setattr("aiordma.perf.server.QueuePair", Silent)
    monkeypatch.setattr("aiordma.perf.client.LOST_AFTER", 0.05)
    for asked in (settings("send", "lat"), replace(settings("send", "bw"), bidirectional=True)):
        with pytest.raises(TimeoutError, match="message 0 or its response was lost"):
            await measured(device_name, host, replace(asked, qp="ud"))


@pytest.mark.parametrize(
    ("asked", "limits", "text"),
    [
        (settings("send", "bw", 100), Limits(size=99), "100 bytes exceeds .* limit of 99"),
        (
            replace(settings("write", "bw", 60), connections=2),
            Limits(memory=119),
            "60 bytes on 2 connections exceed the server's limit of 119",
        ),
        (
            replace(settings("send", "bw"), connections=2),
            Limits(connections=1),
            "2 connections exceed the server's limit of 1",
        ),
    ],
)
@one_loop
async def test_server_refuses_settings_that_exceed_its_limits(
    device_name: str, host: str, asked: Settings, limits: Limits, text: str
) -> None:
    with pytest.raises(RefusedError, match=text):
        await measured(device_name, host, asked, limits)


@one_loop
async def test_second_client_waits_for_the_first(device_name: str, host: str) -> None:
    async with await PerfServer.start(host, 0, device=device_name) as server:
        asked, port = settings("send", "lat"), server.listening.port

        async def second() -> bool:
            async with PerfClient.connect(asked, host, port, device=device_name) as client:
                assert await client.measure(100) is not None
            return gone

        async with PerfClient.connect(asked, host, port, device=device_name) as client:
            gone, waiting = False, asyncio.create_task(second())
            assert await client.measure(100) is not None
            gone = True
        assert await waiting


@one_loop
async def test_stopped_measurement_returns_partial_results(device_name: str, host: str) -> None:
    asked = replace(settings("send", "lat"), iterations=MAX_ITERATIONS)
    async with (
        await PerfServer.start(host, 0, device=device_name) as server,
        PerfClient.connect(asked, host, server.listening.port, device=device_name) as client,
    ):
        # Progress is reported from the first timed operation on.
        result = await client.measure(100, lambda part: client.stop() if part > 0 else None)
    assert result is not None
    assert result.interrupted
    assert result.latency is not None
    assert result.latency.count == result.operations > 0
    assert result.mismatch == ""


@one_loop
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("operation", ["write", "read", "atomic"])
async def test_aborted_connection_raises_a_single_connection_error(
    device_name: str, host: str, operation: str, batch: int
) -> None:
    """The pending operations do not raise an error each."""
    asked = replace(settings(operation, "bw"), batch=batch, iterations=MAX_ITERATIONS)
    async with await PerfServer.start(host, 0, device=device_name) as server:
        connecting = PerfClient.connect(asked, host, server.listening.port, device=device_name)
        async with connecting as client:

            def end(part: float) -> None:
                (measured_end,) = client._ends
                assert isinstance(measured_end, OneSided)
                measured_end._conn.abort()

            with pytest.raises(ConnectionError):
                await client.measure(asked.sizes[0], end)
