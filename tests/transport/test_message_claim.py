"""Test `Connection.claim_messages` and `abort(error)`, the basis of protocols over a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiordma
from aiordma import Connection, blocking
from aiordma.errors import (
    BufferStateError,
    BusyError,
    ConnectionBrokenError,
    ConnectionClosedError,
    MessageTooLongError,
    ProtocolError,
    WrongLoopError,
)
from aiordma.transport import MessageClaim

from .connection_factory import SMALL, ConnectionFactory, ends, pattern, yield_loop
from .inside import figures
from .marks import one_loop
from .test_dropped import drop, pair_of

LONG = pattern(100_000)  # is sent by rendezvous


async def receive(claim: MessageClaim) -> bytes:
    with await anext(claim) as message:
        return bytes(message)


async def test_claims_on_both_sides_exchange_messages_in_order(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        with client.claim_messages("a client") as ours, server.claim_messages("a server") as theirs:
            sent = ours.send_nowait([b"he", b"llo"], imm=7)
            sending = asyncio.create_task(ours.send((b"long", LONG)))
            await sent
            with await anext(theirs) as message:
                assert (bytes(message), message.imm) == (b"hello", 7)
            assert await receive(theirs) == b"long" + LONG
            await sending
            await theirs.send(b"reply", imm=8)
            with await anext(ours) as message:
                assert (bytes(message), message.imm) == (b"reply", 8)


async def iterate(conn: Connection) -> object:
    return await anext(aiter(conn))


async def write_with_imm(conn: Connection, shared: aiordma.RemoteRegion) -> None:
    await conn.write(b"12345678", shared, imm=1)


async def send_nowait(conn: Connection) -> None:
    await conn.send_nowait(b"x")


RECEIVERS: dict[str, Callable[[Connection], Awaitable[object]]] = {
    "recv": Connection.recv,
    "recv_into": lambda conn: conn.recv_into(bytearray(9)),
    "recv_with": lambda conn: conn.recv_with(bytearray),
    "async for": iterate,
}
SENDERS: dict[str, Callable[[Connection], Awaitable[object]]] = {
    "send": lambda conn: conn.send(b"x"),
    "send_nowait": send_nowait,
}


@pytest.mark.parametrize("use", [*RECEIVERS, *SENDERS])
async def test_other_calls_raise_busy_error_while_messages_are_claimed(
    factory: ConnectionFactory, use: str
) -> None:
    async with factory.pair() as (client, server):
        call = {**RECEIVERS, **SENDERS}[use]
        before = client.recv(), client.send(b"x")  # not awaited until the messages are claimed
        with client.claim_messages("a chat") as claim:
            error = await ends(call(client), BusyError)
            assert ": it is in use by a chat; use another connection" in str(error)
            assert ("cannot send a message" in str(error)) == (use in SENDERS)
            for operation in before:
                await ends(operation, BusyError)
            await claim.send(b"ours")
            assert bytes(await server.recv()) == b"ours"
            await server.send(b"theirs")
            assert await receive(claim) == b"theirs"


async def test_only_writes_with_immediate_data_raise_busy_error_while_messages_are_claimed(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        with await server.lease(8) as memory, client.claim_messages("a chat"):
            rights = aiordma.Rights.READ | aiordma.Rights.WRITE
            shared = client.open_region(server.share(memory, access=rights).token)
            await ends(write_with_imm(client, shared), BusyError)
            await client.write(b"12345678", shared)
            target = bytearray(8)
            await client.read(shared, target)
            assert target == b"12345678"


async def test_claim_messages_raises_busy_error_if_the_messages_are_in_use(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        with client.claim_messages("a chat") as claim:
            with pytest.raises(BusyError, match=r"^a game cannot .*: it is in use by a chat; use"):
                client.claim_messages("a game")
            await claim.send(b"still ours")
            assert bytes(await server.recv()) == b"still ours"
        receiving = asyncio.create_task(server.recv())
        await yield_loop(1)
        with pytest.raises(BusyError, match=r"a game .* by a task that waits in recv"):
            server.claim_messages("a game")
        sending = client.send_nowait(b"for the task")
        while not figures(server)["arrived"]:
            server._endpoint.driver.poll()  # wakes the task, but does not run it
        with pytest.raises(BusyError, match="by a task that waits in recv"):
            server.claim_messages("a game")
        await sending
        assert bytes(await receiving) == b"for the task"
        server.claim_messages("a game").close()


def end_by_close(kept: list[MessageClaim]) -> None:
    kept[0].close()
    kept[0].close()  # has no effect


def end_by_with(kept: list[MessageClaim]) -> None:
    with kept[0]:
        pass


@pytest.mark.parametrize("end", [end_by_close, end_by_with, drop])
async def test_messages_are_available_after_a_claim_has_ended(
    factory: ConnectionFactory, end: Callable[[list[Any]], None]
) -> None:
    async with factory.pair() as (client, server):
        kept = [client.claim_messages("a chat")]
        await server.send(b"first")
        assert await receive(kept[0]) == b"first"
        end(kept)
        await client.send(b"hello")
        assert bytes(await server.recv()) == b"hello"
        await server.send(b"second")
        assert bytes(await client.recv()) == b"second"
        with client.claim_messages("a chat") as again:
            while kept:
                kept.pop().close()  # nothing that the old claim does may end the new claim
            await ends(client.send(b"x"), BusyError)
            await again.send(b"by the new owner")
            assert bytes(await server.recv()) == b"by the new owner"


async def test_operations_of_a_closed_claim_raise_an_error(factory: ConnectionFactory) -> None:
    """Operations that were created before `close`, but not started, raise the same error."""
    async with factory.pair() as (client, server):
        claim = client.claim_messages("a chat")
        before = claim.send(b"x"), anext(claim)
        claim.close()
        await server.send(b"not lost")
        text = f"with {factory.host}:.*: a chat has closed its claim on the messages"
        for operation in (*before, claim.send(b"x"), anext(claim)):
            with pytest.raises(BufferStateError, match=text):
                await operation
        with pytest.raises(BufferStateError, match=r"cannot send .* a chat has closed its claim"):
            claim.send_nowait(b"x")
        with client.claim_messages("a chat"):  # has the same name, but is another owner
            for operation in claim.send(b"x"), anext(claim):
                await ends(operation, BusyError)
            with pytest.raises(BusyError):
                claim.send_nowait(b"x")
        assert bytes(await client.recv()) == b"not lost"


async def test_task_waiting_for_a_message_gets_it_after_the_claim_is_closed(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        claim = client.claim_messages("a chat")
        receiving = asyncio.create_task(receive(claim))
        await yield_loop(1)
        claim.close()
        await server.send(b"the last one")
        assert await receiving == b"the last one"


async def test_claim_ends_with_its_connection(factory: ConnectionFactory) -> None:
    """Messages that arrived before the end can still be received."""
    async with factory.pair() as (client, server):
        claim, peers = client.claim_messages("a chat"), server.claim_messages("a chat")
        with pytest.raises(MessageTooLongError):
            await claim.send(bytes(SMALL.max_message + 1))
        await peers.send(b"the last one")
        await server.close()
        await client.wait_closed()
        assert [bytes(message) async for message in claim] == [b"the last one"]
        for used in claim, peers:
            await ends(used.send(b"x"), ConnectionClosedError)
            with pytest.raises(ConnectionClosedError):
                used.send_nowait(b"x")
            await ends(anext(used), StopAsyncIteration)


async def test_claim_does_not_keep_its_connection_alive(factory: ConnectionFactory) -> None:
    async with factory.pair() as (_, end):
        conn, server = await pair_of(factory)
        kept, claim = [conn], conn.claim_messages("a chat")
        receiving = asyncio.create_task(receive(claim))
        await yield_loop(1)
        del conn
        with pytest.warns(ResourceWarning, match="was not closed"):
            drop(kept)
        await ends(receiving, StopAsyncIteration)
        await ends(claim.send(b"x"), ConnectionClosedError)
        await ends(server.recv(), ConnectionBrokenError)
        await server.close()
        await end.close()


@one_loop
async def test_claim_messages_rejects_other_loops_and_invalid_names(
    factory: ConnectionFactory,
) -> None:
    async def claim(conn: Connection) -> None:
        conn.claim_messages("a chat")

    async with factory.pair() as (client, _):
        await ends(asyncio.to_thread(lambda: asyncio.run(claim(client))), WrongLoopError)
        with pytest.raises(TypeError, match="owner must be a str, not"):
            client.claim_messages(5)  # type: ignore[arg-type]
        client.claim_messages("a chat").close()


async def test_abort_with_an_error_reports_it_on_both_sides(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        await server.send(b"arrived before")
        claim = client.claim_messages("a chat")
        assert await receive(claim) == b"arrived before"
        receiving = asyncio.create_task(receive(claim))
        await yield_loop(1)
        error = ProtocolError("the peer sent an unknown command")
        client.abort(error)
        for operation in receiving, claim.send(b"x"), anext(claim):
            raised = await ends(operation, ProtocolError)
            assert raised is not error
            assert "the peer sent an unknown command" in str(raised)
        told = await ends(server.recv(), ConnectionBrokenError)
        assert "the peer aborted the connection" in str(told)
        assert "the peer sent an unknown command" in str(told)
        await client.wait_closed()


@one_loop
async def test_abort_rejects_other_errors_and_ignores_errors_after_the_end(
    factory: ConnectionFactory, caplog: pytest.LogCaptureFixture
) -> None:
    async with factory.pair() as (client, server):
        with pytest.raises(TypeError, match=r"error must be an aiordma.ProtocolError, not"):
            client.abort(ValueError("no"))  # type: ignore[arg-type]
        await client.send(b"still open")
        assert bytes(await server.recv()) == b"still open"
        client.abort()
        client.abort(ProtocolError("too late"))
        await ends(client.recv(), ConnectionClosedError)
        assert "too late" not in str(await ends(server.recv(), ConnectionBrokenError))
        assert "too late" not in caplog.text


@one_loop
async def test_abort_with_an_error_sends_a_long_text_in_part(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        client.abort(ProtocolError("é" * 1000))
        told = str(await ends(server.recv(), ConnectionBrokenError))
        assert told.endswith(": " + "é" * 128)


def test_blocking_abort_passes_the_error_to_the_peer(host: str, device_name: str) -> None:
    try:
        with (
            blocking.listen(host, 0, device=device_name) as listener,
            blocking.connect(*listener.address, device=device_name) as client,
            listener.accept() as server,
        ):
            client.abort(ProtocolError("the peer sent an unknown command"))
            with pytest.raises(ConnectionBrokenError, match="the peer sent an unknown command"):
                server.recv()
    finally:
        blocking.stop()
