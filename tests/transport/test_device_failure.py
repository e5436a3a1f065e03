"""Test that every await ends when the device reports a failure, with that as its root cause."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from unittest import mock

import pytest

from aiordma import (
    Connection,
    ConnectionBrokenError,
    Listener,
    open_connection,
    start_server,
    start_stream_server,
    testing,
    transport,
)
from aiordma._core import protocol
from aiordma._core.connection_states import ConnectionState
from aiordma._event_loop.driver import ContextEvents
from aiordma._native import lib
from aiordma._transport.handshake import _SEND, Handshake, Message
from aiordma._transport.lifecycle import ConnectionLifecycle, ConnectionOwner, Link
from aiordma.errors import DeviceEventError, DeviceNotFoundError, RDMAError
from aiordma.verbs import AsyncEvent, EventType, find_device

from .connection_factory import SMALL, ConnectionFactory, check_alive, echo, ends, yield_loop
from .marks import by_cm, by_tcp, one_loop


def causes(error: BaseException) -> list[BaseException]:
    """Return the exception and its chain of causes, ending with the root cause."""
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


async def broken(waiting: Awaitable[object]) -> list[BaseException]:
    with pytest.raises(ConnectionBrokenError) as caught:
        await waiting
    return causes(caught.value)


def waits(conn: Connection) -> list[asyncio.Task[object]]:
    """Start tasks that wait for messages and for a region."""

    async def of_recv() -> object:
        return await conn.recv()

    async def of_region() -> object:
        return await conn.recv_region()

    return [asyncio.create_task(wait()) for wait in (of_recv, of_recv, of_region)]


@pytest.mark.parametrize("kind", [EventType.QP_FATAL, EventType.CQ_ERR, EventType.DEVICE_FATAL])
async def test_pending_waits_fail_with_device_event_error(
    factory: ConnectionFactory, kind: EventType
) -> None:
    async with factory.pair() as (client, server):
        waiting = waits(client)
        await asyncio.sleep(0)
        side = client._endpoint
        assert side.qp is not None
        event = {
            EventType.QP_FATAL: AsyncEvent(kind, side.qp),
            EventType.CQ_ERR: AsyncEvent(kind, side.cq),
            EventType.DEVICE_FATAL: AsyncEvent(kind),
        }[kind]
        ContextEvents.deliver(side.driver.context, event)
        for task in waiting:
            *_, root = await broken(task)
            assert isinstance(root, DeviceEventError)
            assert root.event == kind.name
            assert root.device == factory.device
        *_, root = await broken(client.send(b"too late"))
        assert isinstance(root, DeviceEventError)
        await broken(server.recv())


@one_loop
@by_tcp
async def test_device_fatal_event_is_the_cause_of_every_failure(factory: ConnectionFactory) -> None:
    """Only the embedded device can be made to fail.

    Its flushed work completes with the failure as the reason, not before the failure is known.
    """
    if factory.device != "embedded0":
        assert lib.aiordma_embedded_raise(EventType.QP_FATAL) == errno.EINVAL  # not supported
        return
    async with factory.pair() as (client, server):
        waiting = [*waits(client), *waits(server)]
        await asyncio.sleep(0)
        assert lib.aiordma_embedded_raise(EventType.DEVICE_FATAL) == 0
        for task in waiting:
            *_, root = await broken(task)
            assert isinstance(root, DeviceEventError), root
            assert root.event == "DEVICE_FATAL"
            assert "close all objects that use the device, then open it again" in str(root)
    async with factory.pair() as (client, server):  # on the reopened device
        await check_alive(client, server)


# ---- between the failure and the end -------------------------------------------------------------

FAILURE = ConnectionBrokenError("the first failure")


async def test_post_failure_ends_the_connection_in_the_next_iteration(
    factory: ConnectionFactory,
) -> None:
    """The connection ends in the loop's next iteration, but appears closed immediately."""
    async with factory.pair() as (client, _):
        waiting = waits(client)
        await yield_loop(1)
        client._queue.rail_broke(FAILURE)
        assert client._state is ConnectionState.OPEN
        assert client.closed
        assert client._is_ending
        await yield_loop(1)
        assert client._close_cause is FAILURE
        for task in waiting:
            assert "the first failure" in str((await broken(task))[-1])


EVENTS: dict[str, Callable[[Connection], object]] = {
    "abort": Connection.abort,
    "close": lambda conn: asyncio.ensure_future(conn.close()),
    "goodbye": lambda conn: conn._process_control(
        protocol.Goodbye(0, protocol.GoodbyeCode.NORMAL, "")
    ),
    "disconnect": lambda conn: conn._on_disconnected("too late"),
    "timeout": lambda conn: conn._finish(),
}


@pytest.mark.parametrize("event", EVENTS)
@one_loop
async def test_first_failure_remains_the_root_cause(factory: ConnectionFactory, event: str) -> None:
    async with factory.pair() as (client, _):
        if event == "close":  # the close starts in the next iteration, before the failure
            EVENTS[event](client)
        client._queue.rail_broke(FAILURE)
        if event != "close":
            EVENTS[event](client)
        assert "the first failure" in str((await broken(client.recv()))[-1])


@one_loop
@by_cm
@pytest.mark.parametrize("when", ["start", "proof"])
async def test_failure_during_the_handshake_is_raised_by_connect(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    take_link, send_proof = ConnectionLifecycle._take_link, _SEND[Message.AUTH_PROOF]
    clients = []

    def fail_and_take_link(conn: Connection, link: Link) -> None:
        if conn._handshake.client:
            clients.append(conn)
            if when == "start":
                conn._queue.rail_broke(FAILURE)
        take_link(conn, link)

    def fail_and_send(handshake: Handshake) -> bytes | protocol.Message:
        clients[0]._queue.rail_broke(FAILURE)
        return send_proof(handshake)

    monkeypatch.setattr(ConnectionLifecycle, "_take_link", fail_and_take_link)
    steps = {**_SEND, Message.AUTH_PROOF: fail_and_send}
    monkeypatch.setattr("aiordma._transport.handshake._SEND", steps)
    factory = dataclasses.replace(factory, auth=b"a key of thirty-two bytes.......")
    async with await factory.listen() as listener:
        assert "the first failure" in str((await broken(factory.connect(listener.port)))[-1])


@pytest.mark.any_device
def test_failure_after_the_loop_closed_is_ignored() -> None:
    """The end of a loop has already released everything."""
    loop = asyncio.new_event_loop()
    loop.close()
    connection = mock.Mock(_loop=loop)
    ConnectionOwner(connection).broken(FAILURE)  # call_soon() would raise on the closed loop


# ---- listeners -----------------------------------------------------------------------------------


@pytest.fixture
def fails(device_name: str) -> bool:
    """Return whether a test can make the device fail. Only the embedded device allows it."""
    if device_name == "embedded0":
        return True
    assert lib.aiordma_embedded_raise(EventType.QP_FATAL) == errno.EINVAL  # not supported
    return False


async def accept(listener: Listener) -> object:
    return await listener.accept()


async def iterate(listener: Listener) -> object:
    return [conn async for conn in listener]


@pytest.mark.parametrize("wait", [accept, iterate])
@pytest.mark.parametrize("anywhere", [False, True])
async def test_listener_raises_device_event_error_when_its_device_fails(
    factory: ConnectionFactory,
    wait: Callable[[Listener], Coroutine[Any, Any, object]],
    anywhere: bool,
    fails: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The listener reports the failure.

    It must not keep the device from being reopened before the listener is closed.
    """
    if not fails:
        return
    listener = await factory.listen(host="" if anywhere else None)
    client, server = await factory.both(listener)
    waiting = [asyncio.create_task(wait(listener)) for _ in range(2)]
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR, "aiordma.transport"):
        assert lib.aiordma_embedded_raise(EventType.DEVICE_FATAL) == 0
        for task in waiting:
            error = await ends(task, DeviceEventError)
            assert error.device == factory.device
            assert repr(listener) in str(error)
            assert error.__cause__ is not None
        (record,) = (one for one in caplog.records if one.name == "aiordma.transport")
        assert "device" in record.getMessage()
    await ends(listener.accept(), DeviceEventError)
    await client.close()
    await server.close()
    async with factory.pair() as (client, server):  # on the reopened device
        await check_alive(client, server)
    await listener.close()


async def test_server_can_be_restarted_after_its_device_failed(
    factory: ConnectionFactory, fails: bool
) -> None:
    """This is the loop shown in docs/connecting.md."""
    if not fails:
        return
    up: asyncio.Queue[int] = asyncio.Queue()
    failed: list[str] = []

    async def serve_again() -> None:
        while True:
            try:
                async with await start_server(
                    echo, factory.host, config=SMALL, **factory.where
                ) as server:
                    up.put_nowait(server.port)
                    await server.serve_forever()
            except DeviceEventError as error:
                failed.append(error.device)

    serving = asyncio.create_task(serve_again())
    for _ in range(3):
        async with await factory.connect(await up.get()) as client:
            await client.send(b"x")
            assert bytes(await client.recv()) == b"x"
            assert lib.aiordma_embedded_raise(EventType.DEVICE_FATAL) == 0
            await broken(client.recv())
    await up.get()
    assert failed == 3 * [factory.device]
    serving.cancel()
    await ends(serving, asyncio.CancelledError)


async def test_serve_forever_raises_device_event_error_when_the_device_fails(
    factory: ConnectionFactory, fails: bool
) -> None:
    if not fails:
        return
    server = await start_stream_server(
        lambda _, writer: writer.close(), factory.host, **factory.where
    )
    serving = asyncio.create_task(server.serve_forever())
    reader, writer = await open_connection(factory.host, server.address[1], **factory.where)
    assert not await reader.read()
    writer.close()
    assert lib.aiordma_embedded_raise(EventType.DEVICE_FATAL) == 0
    await ends(serving, DeviceEventError)
    await server.wait_closed()


@one_loop
@by_tcp
async def test_accept_raises_device_event_error_when_the_device_was_removed(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device was removed while nothing was connected, so the next peer finds out."""
    gone = dataclasses.replace(find_device(factory.device), name="gone0")
    with monkeypatch.context() as patch:
        patch.setattr(transport, "choose_devices", lambda _: ((gone,), (gone.name,)))
        listener = await factory.listen()
    async with listener:
        waiting = asyncio.create_task(listener.accept())
        await ends(factory.connect(listener.port), RDMAError)
        error = await ends(waiting, DeviceEventError)
        assert isinstance(error.__cause__, DeviceNotFoundError)


@pytest.mark.any_device
@by_tcp
@one_loop
async def test_new_connections_work_after_a_completion_queue_overrun(
    factory: ConnectionFactory,
) -> None:
    """The listener keeps the driver and its overrun completion queue alive."""
    async with await factory.listen() as listener:
        client, server = await factory.both(listener)
        with testing.faults(overrun="@1"):
            await ends(client.send(b"one completion too many"), ConnectionBrokenError)
        client.abort()
        server.abort()
        client, server = await factory.both(listener)
        async with client, server:
            await check_alive(client, server)
