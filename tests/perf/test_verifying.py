"""Tests that wrong data is reported, when one side uses other bytes than it announces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

import aiordma
from aiordma.perf import contents, ends, memory, messages, wire
from aiordma.perf.client import PerfClient, receive_response
from aiordma.perf.server import Limits, PerfServer

from .test_measuring import measured, one_loop, settings

pytestmark = pytest.mark.any_device


def other(data: bytes) -> bytes:
    """Return the data with its last bit flipped."""
    return data[:-1] + bytes([data[-1] ^ 1])


# The operation, the queue pair type, the metric, and whether the wrong bytes are the server's. If
# not, they are the client's. The server sends bytes only for reads and in latency measurements.
WRONG = [
    (operation, qp, metric, serving)
    for operation in ("send", "write", "read", "stream")
    for qp in (("",) if operation == "stream" else ("", "rc"))
    for metric in ("lat", "bw")
    for serving in (False, True)
    if (serving if operation == "read" else not serving or metric == "lat")
]


@one_loop
@pytest.mark.parametrize(("operation", "qp", "metric", "serving"), WRONG)
async def test_corrupted_byte_is_reported_as_a_mismatch(
    device_name: str,
    host: str,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    qp: str,
    metric: str,
    serving: bool,
) -> None:
    made = ends.Load.of

    def wrong_here(*arguments: Any, serving: bool, here: bool = serving) -> ends.Load:
        load = made(*arguments, serving=serving)
        return replace(load, sent=other(load.sent)) if serving is here else load

    monkeypatch.setattr(ends.Load, "of", wrong_here)
    (result,) = await measured(device_name, host, replace(settings(operation, metric), qp=qp))
    assert result is not None
    assert "byte 99 is 0x" in result.mismatch


@one_loop
@pytest.mark.parametrize(("operation", "metric"), [("send", "bw"), ("stream", "bw")])
async def test_verify_all_detects_a_mismatch_in_a_middle_operation(
    device_name: str, host: str, monkeypatch: pytest.MonkeyPatch, operation: str, metric: str
) -> None:
    count = 0

    def fifth_differs(got: bytes | memoryview, expected: bytes) -> str:
        nonlocal count
        count += 1
        return "it differs" if count == 5 else contents.difference(got, expected)

    monkeypatch.setattr(messages, "difference", fifth_differs)
    asked = replace(settings(operation, metric), warm_up=0, iterations=8)
    first_and_last = await measured(device_name, host, asked)
    assert [result and result.mismatch for result in first_and_last] == [""]
    count = 0
    every_one = await measured(device_name, host, replace(asked, verify_all=True))
    assert [result and result.mismatch for result in every_one] == ["operation 4: it differs"]


@one_loop
async def test_incorrect_atomic_sum_is_reported_as_a_mismatch(
    device_name: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        memory.Atomics, "operate", lambda self, number: self._conn.fetch_and_add(self.remote, 2)
    )
    (result,) = await measured(device_name, host, replace(settings("atomic", "lat"), warm_up=0))
    assert result is not None
    assert result.mismatch == "the sum of 12 additions of 1 is 24"


@one_loop
@pytest.mark.parametrize(
    ("operation", "metric"), [("send", "bw"), ("write", "bw"), ("send", "lat")]
)
async def test_wrong_immediate_data_is_reported(
    device_name: str, host: str, monkeypatch: pytest.MonkeyPatch, operation: str, metric: str
) -> None:
    connection = aiordma.Connection
    for name in ("send", "send_nowait", "write"):
        original: Callable[..., object] = getattr(connection, name)

        def shifted(
            *arguments: object, imm: int | None = None, original: Callable[..., object] = original
        ) -> object:
            return original(*arguments, imm=None if imm is None else imm + 1)

        monkeypatch.setattr(connection, name, shifted)
    asked = replace(settings(operation, metric), imm=True, warm_up=0)
    (result,) = await measured(device_name, host, asked)
    assert result is not None
    assert result.mismatch == "operation 0: immediate data 1 instead of 0"


# ---- clients that are none ----------------------------------------------------------------------

OPEN = wire.Open(wire.VERSION, "write", 1, False, "", 1, 0, 1)
BEGIN = wire.Begin("flood", 64, 1, False, [b""])


async def opened(
    control: aiordma.Connection, device_name: str, server: PerfServer
) -> aiordma.Connection:
    """Open a session, attach a connection to it, and return that connection."""
    await control.send(wire.pack(OPEN))
    response = await receive_response(control, wire.Opened)
    other = await aiordma.connect(server.listening.host, server.listening.port, device=device_name)
    await other.send(wire.pack(wire.Attach(response.key, 0)))
    return other


@one_loop
@pytest.mark.parametrize(
    ("attached", "said", "reason"),
    [
        (False, b"nonsense", "message is not valid msgpack"),
        (False, wire.pack(wire.Reached(0, 0)), "began a connection with Reached"),
        (False, wire.pack(wire.Attach(bytes(16), 0)), "an unknown measurement"),
        (True, wire.pack(wire.Finish([1])), "began a part with Finish"),
        (True, wire.pack(BEGIN), "token"),
        (True, wire.pack(replace(BEGIN, tokens=[])), "0 tokens for 1 connections"),
        (True, wire.pack(replace(BEGIN, size=0)), "which only send supports"),
    ],
)
async def test_server_accepts_clients_after_a_protocol_violation(
    device_name: str,
    host: str,
    caplog: pytest.LogCaptureFixture,
    attached: bool,
    said: bytes,
    reason: str,
) -> None:
    async with await PerfServer.start(host, 0, device=device_name) as server:
        async with await aiordma.connect(
            host, server.listening.port, device=device_name
        ) as control:
            connections = [control]
            if attached:
                connections.append(await opened(control, device_name, server))
            await control.send(said)
            for connection in connections:
                await connection.wait_closed()
        asked = settings("send", "lat")
        connecting = PerfClient.connect(asked, host, server.listening.port, device=device_name)
        async with connecting as client:
            assert await client.measure(100) is not None
    [reported] = [record.message for record in caplog.records if record.name == "aiordma.perf"]
    assert reason in reported  # nothing is reported for the valid client


@one_loop
async def test_server_refuses_a_different_protocol_version(device_name: str, host: str) -> None:
    async with (
        await PerfServer.start(host, 0, device=device_name, limits=Limits()) as server,
        await aiordma.connect(host, server.listening.port, device=device_name) as control,
    ):
        await control.send(msgpack.packb(["Open", {"version": 1, "of another version": 0}]))
        with await control.recv() as message:
            answered = wire.unpack(bytes(message))
    assert answered == wire.Refused(
        "the server uses protocol version 2, but the client uses 1; install the same version of "
        "aiordma on both sides"
    )


@one_loop
async def test_server_accepts_a_new_client_after_an_aborted_one(
    device_name: str, host: str
) -> None:
    async with await PerfServer.start(host, 0, device=device_name) as server:
        async with await aiordma.connect(
            host, server.listening.port, device=device_name
        ) as control:
            await control.send(wire.pack(OPEN))
            await receive_response(control, wire.Opened)
            control.abort()
        asked = settings("read", "lat")
        connecting = PerfClient.connect(asked, host, server.listening.port, device=device_name)
        async with connecting as client:
            assert await client.measure(100) is not None
