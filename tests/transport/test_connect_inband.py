"""Test connections opened in-band, and failures of the connection that carries the request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from aiordma import (
    Config,
    Connection,
    ConnectionBrokenError,
    ConnectionClosedError,
    Listener,
    ProtocolError,
    connect,
    listen,
)
from aiordma._core import protocol
from aiordma._transport import connect_inband
from aiordma._transport.connection_group import ConnectionGroup, GroupMember
from aiordma._transport.lifecycle import ControlChannel
from aiordma.errors import RejectedError

from .connection_factory import (
    NEVER,
    SMALL,
    ConnectionFactory,
    barrier,
    cancelled_after,
    check_alive,
    ends,
    hello,
    when_limits_pass,
    yield_loop,
)
from .marks import by_tcp, one_loop
from .raw_peer import RawPeer, control
from .test_other_processes import Child

pytestmark = [by_tcp, pytest.mark.any_device]

KEY = bytes(range(16))


def group(conn: Connection) -> ConnectionGroup | None:
    link = conn._link
    return link.group if isinstance(link, GroupMember) else None


def share_a_group(*conns: Connection) -> bool:
    first = group(conns[0])
    return first is not None and all(group(conn) is first for conn in conns)


async def until(there: Callable[[], bool]) -> None:
    while not there():
        await yield_loop(1)


@asynccontextmanager
async def first(
    factory: ConnectionFactory, config: Config = SMALL
) -> AsyncIterator[tuple[Listener, Connection, Connection]]:
    """Yield a listener and a connection to it."""
    async with await factory.listen(config) as listener:
        client, server = await factory.both(listener, config)
        async with client, server:
            yield listener, client, server


async def next_of(factory: ConnectionFactory, listener: Listener) -> tuple[Connection, Connection]:
    """Open another connection, and close any abandoned connections that are accepted first."""
    client = await factory.connect(listener.port, replace(SMALL, connect_timeout=1000))
    while True:
        server = await listener.accept()
        with suppress(ConnectionBrokenError, ConnectionClosedError):
            await check_alive(client, server)
            return client, server
        await server.close()


# ---- together ------------------------------------------------------------------------------------


@one_loop
async def test_inband_connection_uses_its_own_message_size_limits(
    factory: ConnectionFactory,
) -> None:
    async with await factory.listen(replace(SMALL, max_message=70_000)) as listener:
        client, server = await factory.both(listener)
        other, its_server = await factory.both(listener, replace(SMALL, max_message=50_000))
        async with client, server, other, its_server:
            assert share_a_group(client, other)
            assert (client.max_message, other.max_message) == (70_000, 70_000)
            assert (server.max_message, its_server.max_message) == (SMALL.max_message, 50_000)


@pytest.mark.parametrize("side", [0, 1], ids=["client", "server"])
async def test_closing_one_inband_connection_does_not_affect_others(
    factory: ConnectionFactory, side: int
) -> None:
    """The connections end in order or without notice, and the other side learns of each end.

    The next connection is opened in-band again.
    """
    async with await factory.listen() as listener:
        pairs = [await factory.both(listener) for _ in range(4)]
        assert share_a_group(*(pair[0] for pair in pairs))
        await pairs[0][side].close()
        pairs[1][side].abort()
        assert await ends(pairs[0][1 - side].recv(), ConnectionClosedError)
        assert await ends(pairs[1][1 - side].recv(), ConnectionBrokenError)
        await check_alive(*pairs[2])
        pairs.append(await factory.both(listener))
        assert share_a_group(pairs[4][0], pairs[2][0])
        for pair in pairs[2:]:
            await check_alive(*pair)
            await pair[side].close()
            assert (await ends(pair[1 - side].recv(), ConnectionClosedError)).by_peer


@one_loop
async def test_shared_socket_closes_after_its_last_connection(factory: ConnectionFactory) -> None:
    async with await factory.listen() as listener:
        pairs = [await factory.both(listener) for _ in range(3)]
        known = [group(conn) for conn in pairs[0]]
        sockets = [one._link._transport for one in known if one is not None]

        async def close_when_told(client: Connection) -> None:
            with await client.recv():
                pass
            await client.close()

        for some in (pairs[:2], pairs[2:]):
            assert not any(one is None or one.is_closing() for one in sockets)
            closing = [asyncio.create_task(close_when_told(pair[0])) for pair in some]
            await yield_loop(5)
            for pair in some:
                pair[1].send_nowait(b"x")
            await asyncio.gather(*closing)
            for pair in some:
                await pair[1].wait_closed()
        await until(lambda: not any(one is None or list(one) for one in known))
        assert len(sockets) == 2
        assert all(one is not None and one.is_closing() for one in sockets)


async def test_inband_connects_fall_back_to_sockets_when_credits_run_out(
    factory: ConnectionFactory,
) -> None:
    async with first(factory) as (listener, client, server):
        clients = await asyncio.gather(*(factory.connect(listener.port) for _ in range(20)))
        servers = [await listener.accept() for _ in clients]
        assert any(share_a_group(client, other) for other in clients)
        assert not all(share_a_group(client, other) for other in clients)
        for number, other in enumerate(clients):
            await other.send(str(number).encode())
        said = {bytes(await its_server.recv()) for its_server in servers}
        assert said == {str(number).encode() for number in range(20)}
        await check_alive(client, server)
        await asyncio.gather(*(conn.close() for conn in (*clients, *servers)))


@one_loop
async def test_inband_handler_is_installed_only_on_open_connections(
    factory: ConnectionFactory,
) -> None:
    factory = replace(factory, auth=KEY)
    async with first(factory) as (listener, client, _):
        known = group(client)
        assert known is not None
        connecting = asyncio.create_task(factory.connect(listener.port))
        while not connecting.done():
            await yield_loop(1)
            for member in known:
                if member.channel is not None and member.channel.handler is not None:
                    assert member.channel.is_open
        async with await connecting as other:
            assert share_a_group(client, other)
            assert other._inband is not None


# ---- which connection takes the request ----------------------------------------------------------


@one_loop
async def test_either_side_can_disable_inband_connections(factory: ConnectionFactory) -> None:
    """Connecting from a different source address does not use in-band either."""
    alone = replace(SMALL, in_band=False)
    async with first(factory) as (listener, client, _):
        other, its_server = await factory.both(listener, alone)
        async with other, its_server:
            assert group(other) is None
            assert not share_a_group(client, other)
        elsewhere = await connect(
            factory.host, listener.port, device=factory.device, via="tcp", config=SMALL,
            source=(factory.host, 0),
        )  # fmt: skip
        async with elsewhere, await listener.accept():
            assert not share_a_group(client, elsewhere)
    async with first(factory, alone) as (listener, client, _):
        other, its_server = await factory.both(listener)
        async with other, its_server:
            assert group(other) is None


@one_loop
async def test_inband_connect_with_a_wrong_key_is_refused(factory: ConnectionFactory) -> None:
    """A connection with the right key must not let in a request with another key."""

    factory = replace(factory, auth=KEY)
    async with await factory.listen() as listener:
        pairs = [await factory.both(listener) for _ in range(2)]
        assert share_a_group(*(pair[0] for pair in pairs))
        for key in (None, bytes(16)):
            other = replace(factory, auth=key)
            await ends(other.connect(listener.port), ConnectionRefusedError)
        for pair in pairs:
            assert pair[0]._handshake.peer_authenticated
            await check_alive(*pair)
            await asyncio.gather(*(conn.close() for conn in pair))


@one_loop
async def test_inband_connect_is_rejected_after_the_listener_closed(
    factory: ConnectionFactory,
) -> None:
    """The open connection must not hide the next listener on the same port."""
    async with first(factory) as (listener, client, server):
        port = listener.port
        await listener.close()
        for _ in range(2):
            await ends(factory.connect(port), RejectedError)
        await check_alive(client, server)
        async with await listen(
            factory.host, port, device=factory.device, via="tcp", config=SMALL
        ) as following:
            other, its_server = await factory.both(following)
            async with other, its_server:
                assert not share_a_group(client, other)
                third, its_third = await factory.both(following)
                async with third, its_third:
                    assert share_a_group(other, third)


async def never_arrives(channel: ControlChannel, member: GroupMember) -> None:
    """Wait forever, as a replacement for `wait_first_message`."""
    await asyncio.Event().wait()


@one_loop
async def test_inband_connect_falls_back_when_max_handshakes_is_reached(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An in-band handshake is limited in time like one on a socket, and does not keep out peers
    that connect by a socket.
    """
    async with first(factory, replace(SMALL, max_handshakes=1)) as (listener, client, server):
        with monkeypatch.context() as patched:
            patched.setattr(connect_inband, "wait_first_message", never_arrives)
            other = await factory.connect(listener.port)
            assert share_a_group(client, other)
            third, its_server = await factory.both(listener)
            async with third, its_server:
                assert not share_a_group(client, third)
                await check_alive(third, its_server)
            receiving = asyncio.create_task(ends(other.recv(), ConnectionBrokenError))
            assert await when_limits_pass(receiving)
        other, its_server = await factory.both(listener)
        async with other, its_server:
            assert share_a_group(client, other)
        await check_alive(client, server)


@one_loop
async def test_inband_connect_falls_back_when_the_listener_is_silent(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the time limit is left for the socket.

    The client does not wait for a silent listener twice, and a late answer makes in-band
    connections possible again.
    """
    asked: list[tuple[connect_inband.Responder, protocol.ConnectRequest]] = []
    answer = connect_inband.Responder._on_request
    monkeypatch.setattr(connect_inband, "REPLY_SHARE", 0.1 / NEVER)
    monkeypatch.setattr(
        connect_inband.Responder, "_on_request", lambda self, ask: asked.append((self, ask))
    )
    async with first(factory) as (listener, client, server):
        for _ in range(2):
            other = await factory.connect(listener.port)
            its_server = await listener.accept()
            async with other, its_server:
                assert not share_a_group(client, other)
                await check_alive(other, its_server)
        assert len(asked) == 1
        monkeypatch.undo()
        answer(*asked[0])
        known = group(client)
        assert known is not None
        await until(lambda: known.usable)
        await until(lambda: len(list(known)) == 1)
        other, its_server = await next_of(factory, listener)
        async with other, its_server:
            assert share_a_group(client, other)
        await check_alive(client, server)


# ---- the end of the connection of the request, and of the requester ------------------------------


def connections_counted(listener: Listener) -> int:
    return listener._acceptor._limits._reserved_places.total()


ENDS: dict[str, Callable[[Connection, Connection], Coroutine[Any, Any, None] | None]] = {
    "closed": lambda client, server: client.close(),
    "closed by the peer": lambda client, server: server.close(),
    "aborted": lambda client, server: client.abort(),
    "aborted by the peer": lambda client, server: server.abort(),
}


@pytest.mark.parametrize("how", ENDS)
async def test_inband_connect_succeeds_when_the_existing_connection_ends(
    factory: ConnectionFactory, how: str
) -> None:
    """The carrying connection may end at any step of the handshake."""
    async with await factory.listen() as listener:
        for count in factory.cancel_points:
            client, server = await factory.both(listener)
            connecting = asyncio.create_task(next_of(factory, listener))
            await yield_loop(count)
            ending = ENDS[how](client, server)
            if ending is not None:
                await ending
            other, its_server = await connecting
            async with other, its_server:
                await check_alive(other, its_server)
            await asyncio.gather(client.wait_closed(), server.wait_closed())
        await until(lambda: connections_counted(listener) == 0)


async def test_cancelled_inband_connect_leaves_no_connection_behind(
    factory: ConnectionFactory,
) -> None:
    """This holds on both sides and at every step of the handshake."""
    async with first(factory) as (listener, client, server):
        accepting = asyncio.create_task(abandon(listener))
        for count in factory.cancel_points:
            made = await cancelled_after(count, lambda: factory.connect(listener.port))
            for other in made:
                assert share_a_group(client, other)
                await other.close()
            await until(lambda: connections_counted(listener) == 1)
            for conn in (client, server):
                known = group(conn)
                assert known is not None
                await until(lambda known=known: len(list(known)) == 1)  # type: ignore[misc]
            await check_alive(client, server)
        accepting.cancel()


async def abandon(listener: Listener) -> None:
    async for conn in listener:
        await conn.close()


@one_loop
async def test_inband_connect_does_not_hang_when_the_listener_closes(
    factory: ConnectionFactory,
) -> None:
    """The client is told immediately, at whatever step the listener is closed."""
    patient = replace(SMALL, connect_timeout=1000)

    async def first_message(connecting: Awaitable[Connection]) -> object:
        async with await connecting as client:
            return await client.recv()

    for count in factory.cancel_points:
        async with await factory.listen() as listener:
            client, server = await factory.both(listener)
            async with client, server:
                connecting = asyncio.create_task(factory.connect(listener.port, patient))
                await yield_loop(count)
                await listener.close()
                await ends(
                    first_message(connecting),
                    RejectedError,
                    ConnectionClosedError,
                    ConnectionBrokenError,
                )
                await check_alive(client, server)


@one_loop
async def test_peer_death_is_detected_after_the_first_connection_closes(
    factory: ConnectionFactory,
) -> None:
    """The connections that still share the socket notice immediately, although none of them opened
    it.
    """
    async with Child.connected(factory, "stay") as child:
        assert child.conn.peer_address is not None
        others = [await factory.connect(child.conn.peer_address[1]) for _ in range(3)]
        assert share_a_group(child.conn, *others)
        await child.conn.close()
        for other in others:
            await barrier(other)
        child.signal(signal.SIGKILL)
        for other in others:
            error = await ends(other.recv(), ConnectionBrokenError)
            # Either the socket or the device can report the process's death first.
            assert ": its process" in str(error)


# ---- hostile peers -------------------------------------------------------------------------------

ENDPOINT = bytes(range(40))
REQUEST = protocol.ConnectRequest(1, 1, ENDPOINT, hello().pack())


def ask(peer: RawPeer, request_id: int, number: int) -> bytes:
    local = peer.qp.endpoint(max_rd_atomic=4, max_dest_rd_atomic=4)
    return control(protocol.ConnectRequest(request_id, number, local.pack(), hello().pack()))


INVALID_MESSAGES: dict[str, Callable[[RawPeer], list[bytes]]] = {
    "no endpoint": lambda peer: [control(REQUEST)],
    "no hello": lambda peer: [
        control(REQUEST._replace(endpoint=peer.qp.endpoint().pack(), hello=bytes(32)))
    ],
    "the number of the first": lambda peer: [ask(peer, 1, 0)],
    "a number twice": lambda peer: [ask(peer, 1, 5), ask(peer, 2, 5)],
    "an answer": lambda peer: [control(protocol.ConnectReply(1, ENDPOINT, hello().pack()))],
    "ready": lambda peer: [control(protocol.ReadyToUse(0))],
}


@pytest.mark.parametrize("violation", INVALID_MESSAGES)
@one_loop
async def test_invalid_inband_message_to_the_listener_ends_the_connection(
    factory: ConnectionFactory, violation: str
) -> None:
    async with first(factory) as (listener, client, server):
        async with RawPeer.connect(factory, listener.port) as peer, await listener.accept() as conn:
            peer.send(*INVALID_MESSAGES[violation](peer))
            await ends(conn.recv(), ProtocolError)
        await until(lambda: connections_counted(listener) == 1)
        await check_alive(client, server)


@pytest.mark.parametrize(
    "message", [REQUEST, protocol.ConnectReply(1, *REQUEST[2:]), protocol.ReadyToUse(0)]
)
@one_loop
async def test_invalid_inband_message_to_the_client_ends_the_connection(
    factory: ConnectionFactory, message: protocol.Message
) -> None:
    async with first(factory) as (_, client, server):
        server._messages.controls.send(message)
        await ends(client.recv(), ProtocolError)


@one_loop
async def test_inband_requests_beyond_max_handshakes_are_refused(
    factory: ConnectionFactory,
) -> None:
    """In-band requests have the same limit as handshakes on sockets, and each is answered."""
    async with await factory.listen(replace(SMALL, max_handshakes=3)) as listener:
        async with RawPeer.connect(factory, listener.port) as peer, await listener.accept():
            answers = []
            for number in range(1, 11):
                peer.send_control(protocol.decode(ask(peer, number, number)[8:]))
                answers.append(await peer.control())
            assert [type(answer) for answer in answers[:3]] == [protocol.ConnectReply] * 3
            for answer in answers[3:]:
                assert isinstance(answer, protocol.Error)
                assert answer.code == protocol.ErrorCode.BUSY
            assert connections_counted(listener) == 4
        await until(lambda: connections_counted(listener) == 0)


INVALID_RESPONSES: dict[str, Callable[[protocol.ConnectRequest], protocol.Message]] = {
    "what it was told": lambda ask: protocol.ConnectReply(ask.request_id, ask.endpoint, ask.hello),
    "no endpoint": lambda ask: protocol.ConnectReply(ask.request_id, ENDPOINT, ask.hello),
    "no hello": lambda ask: protocol.ConnectReply(ask.request_id, ask.endpoint, bytes(32)),
}


@pytest.mark.parametrize("answer", INVALID_RESPONSES)
@one_loop
async def test_invalid_inband_response_fails_only_the_new_connection(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    def say(self: connect_inband.Responder, ask: protocol.ConnectRequest) -> None:
        self.channel.send(INVALID_RESPONSES[answer](ask))

    monkeypatch.setattr(connect_inband.Responder, "_on_request", say)
    async with first(factory) as (listener, client, server):
        await ends(factory.connect(listener.port), ProtocolError)
        await check_alive(client, server)


@one_loop
async def test_inband_refusal_text_is_escaped(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: connect_inband.Responder, ask: protocol.ConnectRequest) -> None:
        self.channel.send(protocol.Error(ask.request_id, protocol.ErrorCode.QUOTA, "no\x1b[2J"))

    monkeypatch.setattr(connect_inband.Responder, "_on_request", refuse)
    async with first(factory) as (listener, client, server):
        error = await ends(factory.connect(listener.port), RejectedError)
        assert r"no\x1b[2J" in str(error)
        await check_alive(client, server)


@one_loop
async def test_connection_breaks_when_the_peer_stops_reading_its_socket(
    factory: ConnectionFactory,
) -> None:
    """The numbers of ended connections would otherwise pile up for this peer."""
    async with await factory.listen() as listener:
        client, server = await factory.both(listener)
        async with server:
            known = group(client)
            assert known is not None
            transport = group(server)._link._transport  # type: ignore[union-attr]
            assert transport is not None
            transport.pause_reading()
            while not client.closed:
                known._link.send_ended([7] * 4096)
                await yield_loop(1)
            await ends(client.recv(), ConnectionBrokenError)


@one_loop
async def test_end_notice_affects_only_connections_sharing_its_socket(
    factory: ConnectionFactory,
) -> None:
    async with first(factory) as (listener, client, server):
        pairs = [await factory.both(listener, replace(SMALL, in_band=False)) for _ in range(2)]
        other, its_server = await factory.both(listener)
        assert share_a_group(client, other)
        known = group(client)
        assert known is not None
        known._link.send_ended([2, 3, 4, 0xFFFFFFFF])
        await check_alive(other, its_server)
        known._link.send_ended([1])
        assert await ends(its_server.recv(), ConnectionBrokenError)
        for pair in ((client, server), *pairs):
            await check_alive(*pair)
            await pair[0].close()
        other.abort()  # the connection has announced its end
        await other.wait_closed()
