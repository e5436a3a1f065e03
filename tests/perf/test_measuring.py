"""Client and server of measurements, both in this process, on the device under test."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from aiordma.perf.client import PerfClient, RefusedError, Result
from aiordma.perf.client_memory import OneSided
from aiordma.perf.server import Limits, PerfServer
from aiordma.perf.settings import (
    METRICS,
    MOST_ITERATIONS,
    OPERATIONS,
    Settings,
    default_depth,
)

pytestmark = pytest.mark.any_device

FEW = 12

# What does not depend on the event loop.
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


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_every_operation_and_metric(
    device_name: str, host: str, operation: str, metric: str
) -> None:
    asked = settings(operation, metric)
    (result,) = await measured(device_name, host, asked)
    assert result is not None
    assert result.mismatch == ""
    assert result.operations == FEW
    assert result.seconds > 0
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
    # All of it happened within the time, a half of each where there and back was taken.
    ways = 2 if asked.halved else 1
    assert ways * result.latency.mean * FEW <= result.seconds


@pytest.mark.parametrize(
    "asked",
    [
        replace(settings("write", "rate"), batch=4),
        replace(settings("read", "rate"), batch=3, depth=6),
        replace(settings("atomic", "rate"), batch=2, connections=3),
        replace(settings("send", "bw"), imm=True, connections=2, verify_all=True),
        replace(settings("write", "bw"), imm=True),
        replace(settings("send", "lat"), imm=True, verify_all=True),
        replace(settings("write", "lat"), imm=True, connections=2),
        replace(settings("stream", "lat"), connections=2, verify_all=True),
        replace(settings("send", "lat"), sizes=(0, 1, 100_000)),
        replace(settings("send", "bw"), sizes=(0, 100_000), warm_up=0),
        replace(settings("stream", "bw", 100_000), verify_all=True),
        replace(settings("send", "rate"), iterations=None, duration=0.01),
        replace(settings("write", "lat"), iterations=None, duration=1e-9),
        replace(settings("read", "bw"), iterations=None, duration=1e-9),
    ],
    ids=lambda asked: f"{asked.operation}-{asked.metric}",
)
@one_loop
async def test_other_settings(device_name: str, host: str, asked: Settings) -> None:
    results = await measured(device_name, host, asked)
    assert [result is not None and result.size for result in results] == list(asked.sizes)
    for result in results:
        assert result is not None
        assert result.mismatch == ""
        if asked.iterations is not None:
            assert result.operations >= asked.iterations


@pytest.mark.parametrize(
    ("asked", "limits", "text"),
    [
        (settings("send", "bw", 100), Limits(size=99), "100 bytes exceed .* limit of 99"),
        (
            replace(settings("write", "bw", 60), connections=2),
            Limits(memory=119),
            "2 times 60 bytes exceed the server's limit of 119",
        ),
        (
            replace(settings("send", "bw"), connections=2),
            Limits(connections=1),
            "2 connections exceed the server's limit of 1",
        ),
    ],
)
@one_loop
async def test_more_than_the_server_allows(
    device_name: str, host: str, asked: Settings, limits: Limits, text: str
) -> None:
    with pytest.raises(RefusedError, match=text):
        await measured(device_name, host, asked, limits)


@one_loop
async def test_one_client_after_another(device_name: str, host: str) -> None:
    """The second client waits until the first one has disconnected."""
    told: list[str] = []
    async with await PerfServer.start(host, 0, device=device_name) as server:

        async def one(name: str, meanwhile: asyncio.Event | None) -> None:
            asked = settings("send", "lat")
            connecting = PerfClient.connect(asked, host, server.listening.port, device=device_name)
            async with connecting as client:
                told.append(f"{name} is served")
                if meanwhile is not None:
                    meanwhile.set()
                assert await client.measure(100) is not None
                told.append(f"{name} is done")

        served = asyncio.Event()
        first = asyncio.create_task(one("first", served))
        await served.wait()
        await one("second", None)
        await first

    assert told == [
        "first is served",
        "first is done",
        "second is served",
        "second is done",
    ]


@one_loop
async def test_stopping_keeps_what_was_measured(device_name: str, host: str) -> None:
    asked = replace(settings("send", "lat"), iterations=MOST_ITERATIONS)
    async with (
        await PerfServer.start(host, 0, device=device_name) as server,
        PerfClient.connect(asked, host, server.listening.port, device=device_name) as client,
    ):
        # From the first operation that is timed on, it is told how far it is.
        result = await client.measure(100, lambda part: client.stop() if part > 0 else None)
    assert result is not None
    assert result.interrupted
    assert result.latency is not None
    assert result.latency.count == result.operations > 0
    assert result.mismatch == ""


@one_loop
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("operation", ["write", "read", "atomic"])
async def test_a_connection_that_ends_is_one_error(
    device_name: str, host: str, operation: str, batch: int
) -> None:
    """And not one of each operation under way."""
    asked = replace(settings(operation, "bw"), batch=batch, iterations=MOST_ITERATIONS)
    async with await PerfServer.start(host, 0, device=device_name) as server:
        connecting = PerfClient.connect(asked, host, server.listening.port, device=device_name)
        async with connecting as client:

            def end(part: float) -> None:
                (measured_end,) = client._ends
                assert isinstance(measured_end, OneSided)
                measured_end._conn.abort()

            with pytest.raises(ConnectionError):
                await client.measure(asked.sizes[0], end)
