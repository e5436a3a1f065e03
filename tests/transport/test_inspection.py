"""Test that a listener's application sees each request with the peer's data, and may refuse it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest

from aiordma import (
    AuthenticationError,
    Config,
    Connection,
    ConnectionRequest,
    Listener,
    Rights,
    reconnect,
    start_server,
)
from aiordma._core import protocol
from aiordma._core.frames import FrameKind
from aiordma._transport.handshake import Action
from aiordma._transport.inspection import OnRequest
from aiordma.errors import ConnectionBrokenError, LimitError, RejectedError
from aiordma.transport import connect, listen

from .connection_factory import SMALL, ConnectionFactory, check_alive, ends, limits_pass
from .marks import by_tcp, one_loop
from .raw_peer import RawPeer, control, frame

KEY = b"the key of these tests of requests"
Keys = pytest.mark.parametrize("auth", [None, KEY], ids=["open", "with a key"])


async def listening(
    factory: ConnectionFactory,
    on_request: OnRequest | None,
    auth: bytes | None = None,
    config: Config = SMALL,
) -> Listener:
    where = replace(factory, auth=auth).where
    return await listen(factory.host, config=config, on_request=on_request, **where)


async def connecting(
    factory: ConnectionFactory,
    listener: Listener,
    data: bytes = b"",
    auth: bytes | None = None,
    config: Config = SMALL,
) -> Connection:
    where = replace(factory, auth=auth).where
    return await connect(factory.host, listener.port, config=config, data=data, **where)


class Guard:
    """Callbacks that refuse requests whose data begins with "no"."""

    def __init__(self) -> None:
        self.seen: list[ConnectionRequest] = []

    def decide(self, request: ConnectionRequest) -> str | None:
        self.seen.append(request)
        return f"{request.data!r} is refused" if request.data.startswith(b"no") else None

    async def decide_later(self, request: ConnectionRequest) -> str | None:
        await asyncio.sleep(0)
        return self.decide(request)


def refused(error: BaseException, reason: str) -> None:
    assert isinstance(error, RejectedError)
    assert error.by_application
    assert reason in str(error)
    assert isinstance(error, ConnectionRefusedError)


@Keys
@pytest.mark.parametrize("later", [False, True], ids=["function", "coroutine"])
async def test_on_request_receives_the_request_data(
    factory: ConnectionFactory, auth: bytes | None, later: bool
) -> None:
    guard = Guard()
    decide = guard.decide_later if later else guard.decide
    async with await listening(factory, decide, auth) as listener:
        client = await connecting(factory, listener, b"yes, please", auth)
        async with client, await listener.accept() as server:
            assert server.request_data == b"yes, please"
            assert client.request_data == b""
            (request,) = guard.seen
            assert request.data == b"yes, please"
            assert request.device == factory.device
            assert request.via == factory.via
            assert request.peer_address == server.peer_address
            await check_alive(client, server)
            async with (
                await connecting(factory, listener, auth=auth) as second,  # in-band, over tcp
                await listener.accept() as other,
            ):
                assert guard.seen[1].data == b"" == other.request_data
                assert guard.seen[1].via == ("in-band" if factory.via == "tcp" else "cm")
                await check_alive(second, other)


@Keys
async def test_connect_raises_the_reason_given_by_on_request(
    factory: ConnectionFactory, auth: bytes | None
) -> None:
    guard = Guard()
    config = replace(SMALL, max_connections=2)
    async with await listening(factory, guard.decide, auth, config) as listener:
        for n in range(4):
            error = await ends(connecting(factory, listener, b"no %d" % n, auth), RejectedError)
            refused(error, f"b'no {n}' is refused")
        client = await connecting(factory, listener, b"yes", auth)
        async with client, await listener.accept() as server:
            error = await ends(connecting(factory, listener, b"no 5", auth), RejectedError)
            refused(error, "b'no 5' is refused")
            await check_alive(client, server)
            assert not listener._ready
        assert len(guard.seen) == 6


async def test_start_server_passes_requests_to_on_request(factory: ConnectionFactory) -> None:
    async def greet(conn: Connection) -> None:
        await conn.send(b"hello " + conn.request_data)

    async with await start_server(
        greet, factory.host, config=SMALL, on_request=Guard().decide, **factory.where
    ) as server:
        where: dict[str, Any] = {**factory.where, "config": SMALL}
        async with await connect(factory.host, server.port, data=b"Ada", **where) as client:
            assert bytes(await client.recv()) == b"hello Ada"


async def test_on_request_is_not_called_for_unauthenticated_peers(
    factory: ConnectionFactory,
) -> None:
    guard = Guard()
    async with await listening(factory, guard.decide, KEY) as listener:
        for auth in (None, b"another key of the same length...."):
            await ends(connecting(factory, listener, b"let me in", auth), AuthenticationError)
        assert not guard.seen


async def test_request_data_is_limited_to_64_bytes(factory: ConnectionFactory) -> None:
    guard = Guard()
    async with await listening(factory, guard.decide) as listener:
        for data in (bytes(64), b"trailing zeros stay\0\0"):
            async with await connecting(factory, listener, data), await listener.accept() as server:
                assert server.request_data == data
        error = await ends(connecting(factory, listener, bytes(65)), LimitError)
        assert (error.amount, error.limit) == (65, 64)
        assert len(guard.seen) == 2


def raise_exception(request: ConnectionRequest) -> str | None:
    raise ZeroDivisionError


def raise_base_exception_group(request: ConnectionRequest) -> str | None:
    raise BaseExceptionGroup("several", [GeneratorExit()])


def return_false(request: ConnectionRequest) -> Any:
    return False


@one_loop
@pytest.mark.parametrize("on_request", [raise_exception, raise_base_exception_group, return_false])
async def test_exception_in_on_request_rejects_the_client_and_is_reported(
    factory: ConnectionFactory, on_request: OnRequest, reported: list[dict[str, Any]]
) -> None:
    """The error is reported on the listener's side, and the peer learns no details of it."""
    async with await listening(factory, on_request) as listener:
        error = await ends(connecting(factory, listener), RejectedError)
        refused(error, "on_request function of the listener failed")
    (context,) = reported
    assert isinstance(context["exception"], ZeroDivisionError | BaseExceptionGroup | TypeError)
    assert "on_request" in context["message"]


async def never(request: ConnectionRequest) -> str | None:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@one_loop
@pytest.mark.parametrize("ignores", [False, True], ids=["never decides", "ignores the deadline"])
async def test_client_is_rejected_when_on_request_exceeds_the_deadline(
    factory: ConnectionFactory, ignores: bool
) -> None:
    """The deadline of the handshake also limits `on_request`, and the peer is told the reason."""

    async def wait(request: ConnectionRequest) -> str | None:
        limits_pass()  # the limits of SMALL, which the client does not use
        with suppress(asyncio.CancelledError) if ignores else nullcontext():
            await never(request)
        return None

    async with await listening(factory, wait) as listener:
        patient = replace(SMALL, connect_timeout=1000)
        error = await ends(connecting(factory, listener, config=patient), RejectedError)
        refused(error, "did not return in time")
        assert not listener._ready


@one_loop
@pytest.mark.parametrize("asked", [False, True], ids=["at once", "during the decision"])
@pytest.mark.parametrize(
    "early",
    [
        control(protocol.RegionRequest(1, 4096, Rights.READ, 0)),
        control(protocol.RegionEnd(0, 1)),
        frame(FrameKind.DATA, b"a message"),
    ],
    ids=["request for memory", "end of a region", "message"],
)
async def test_frames_sent_before_on_request_returns_end_the_connection(
    factory: ConnectionFactory, early: bytes, asked: bool
) -> None:
    seen = asyncio.Event()

    async def decide(request: ConnectionRequest) -> str | None:
        seen.set()
        return await never(request)

    async with (
        await listening(factory, decide) as listener,
        RawPeer.connect(factory, listener.port) as peer,
    ):
        if asked:
            peer.send(control(protocol.ConnectData(0, b"")))
            await seen.wait()
        peer.send(early)
        goodbye = await peer.control()
        assert isinstance(goodbye, protocol.Goodbye)
        assert goodbye.code == protocol.GoodbyeCode.PROTOCOL_ERROR
        assert "before its connection was accepted" in goodbye.text
        assert seen.is_set() == asked


@one_loop
async def test_pending_request_ends_when_the_listener_closes(factory: ConnectionFactory) -> None:
    asked: asyncio.Queue[ConnectionRequest] = asyncio.Queue()
    ended: asyncio.Queue[ConnectionRequest] = asyncio.Queue()

    async def ask(request: ConnectionRequest) -> str | None:
        asked.put_nowait(request)
        try:
            return await never(request)
        except asyncio.CancelledError:
            ended.put_nowait(request)
            raise

    async with await listening(factory, ask) as listener:
        attempt = asyncio.create_task(connecting(factory, listener))
        abandoned = await asked.get()
        attempt.cancel()
        await ends(attempt, asyncio.CancelledError)
        attempt = asyncio.create_task(connecting(factory, listener))
        pending = await asked.get()
        assert ended.empty()
    await ends(attempt, ConnectionBrokenError)
    assert [await ended.get(), await ended.get()] == [abandoned, pending]


@one_loop
@by_tcp
@pytest.mark.parametrize(
    "wrong", [protocol.ConnectAccepted(0), protocol.ConnectData(0, b"again")], ids=["answer", "two"]
)
async def test_unexpected_request_message_breaks_only_its_connection(
    factory: ConnectionFactory, wrong: protocol.Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send_request_data(connection: Connection, data: bytes) -> Connection:
        if isinstance(wrong, protocol.ConnectData):
            connection._handshake.done(Action.INSPECT)
            connection._continue_handshake()
        connection._messages.controls.send(wrong)
        return connection

    async with await listening(factory, Guard().decide) as listener:
        client = await connecting(factory, listener)
        async with client, await listener.accept() as server:
            with monkeypatch.context() as patch:
                patch.setattr("aiordma.transport.send_request_data", send_request_data)
                bad = await connecting(factory, listener)
            await ends(bad.recv(), ConnectionBrokenError)
            await bad.close()
            await check_alive(client, server)


async def test_reconnect_does_not_retry_after_on_request_refusal(
    factory: ConnectionFactory,
) -> None:
    async with await listening(factory, Guard().decide) as listener:

        async def once(data: bytes) -> None:
            async for conn in reconnect(
                factory.host, listener.port, config=SMALL, data=data, **factory.where
            ):
                await conn.close()
                return
            raise AssertionError("reconnect ended without an error")

        refused(await ends(once(b"no"), RejectedError), "b'no' is refused")
        await once(b"yes")
