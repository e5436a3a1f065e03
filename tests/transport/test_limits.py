"""Test listeners that accept a limited number of connections, and the peers they turn away."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from aiordma import AuthenticationError, Config, Connection, listen, start_server
from aiordma._core import protocol
from aiordma._transport.acceptor import Acceptor, ConnectionLimitError
from aiordma._transport.auth import NO_SECURITY
from aiordma._transport.inspection import ConnectionMethod
from aiordma.errors import (
    BusyError,
    ConnectionBrokenError,
    MessageTooLongError,
    RDMAError,
    RejectedError,
    RequestRefusedError,
)

from .connection_factory import SMALL, ConnectionFactory, check_alive, ends, yield_loop
from .marks import one_loop

pytestmark = pytest.mark.any_device

TWO = replace(SMALL, max_connections=2)


async def rejection_reason(factory: ConnectionFactory, port: int) -> str:
    """Connect and return the reason for the rejection."""
    error = await ends(factory.connect(port), RejectedError)
    return str(error)


async def test_connections_beyond_max_connections_are_refused(factory: ConnectionFactory) -> None:
    """The refusal states the reason, and a connection that has ended no longer counts."""
    async with await factory.listen(TWO) as listener:
        first, second = await factory.both(listener), await factory.both(listener)
        for _ in range(3):
            assert "its limit of 2 connections" in await rejection_reason(factory, listener.port)
        await check_alive(*first)
        await second[0].close()
        await second[1].wait_closed()
        third = await factory.both(listener)
        await rejection_reason(factory, listener.port)
        first[1].abort()
        await first[1].wait_closed()
        fourth = await factory.both(listener)
        await check_alive(*fourth)
        for end in (*first, *third, *fourth):
            await end.close()


@one_loop
async def test_connect_is_refused_when_the_limit_is_reached_during_key_proof(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key, a connection takes its place only after the proof."""
    factory = replace(factory, auth=bytes(range(16)))
    async with await factory.listen(replace(SMALL, max_connections=1)) as listener:
        client = await factory.connect(listener.port)
        async with client, await listener.accept() as server:
            limits = listener._acceptor._limits
            before_proof = iter([None])
            check = limits.check
            monkeypatch.setattr(
                limits, "check", lambda host: next(before_proof, host) and check(host)
            )

            async def late() -> None:
                config = replace(SMALL, in_band=False)
                async with await factory.connect(listener.port, config) as other:
                    assert factory.via == "cm", "the bootstrap refuses the connection itself"
                    await other.recv()

            assert "its limit of 1 connections" in str(await ends(late(), RejectedError))
            await check_alive(client, server)
            assert limits._reserved_places.total() == 1


class Asks:
    """A peer that never finishes its handshake."""

    via: ConnectionMethod = "tcp"

    def __init__(self, host: str) -> None:
        self.peer_address = (host, 1)
        self.error: BaseException | None = None

    def check_ticket_or_challenge(self, acceptor: Acceptor) -> bool:
        return True

    async def handshake(self, acceptor: Acceptor) -> Connection:
        acceptor.reserve_place_of_peer()
        await asyncio.Event().wait()
        raise AssertionError

    def give_up(self, error: BaseException) -> None:
        self.error = error


async def rejection_errors(config: Config, *hosts: str) -> list[BaseException | None]:
    """Return the error with which each peer was rejected, or None if it was admitted."""
    acceptor = Acceptor(config, NO_SECURITY, (), lambda _: None)
    peers = [Asks(host) for host in hosts]
    for peer in peers:
        acceptor.admit(peer)
    await yield_loop(2)
    errors = [peer.error for peer in peers]
    await acceptor.close()
    return errors


@one_loop
async def test_ipv6_network_counts_as_one_host() -> None:
    """Otherwise a host could have as many connections as its network has addresses."""
    config = Config(max_connections_per_host=1)
    first, second, other = await rejection_errors(
        config, "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"
    )
    assert (first, other) == (None, None)
    assert isinstance(second, ConnectionLimitError)


async def share_unaccepted_regions(client: Connection, server: Connection, count: int) -> None:
    """Send regions that the server never receives. Raise the error that closes its connection."""
    with client.alloc(8) as buffer:
        for _ in range(count):
            await client.send_region(buffer)
        await server.wait_closed()
    cause = server._close_cause
    assert cause is not None
    raise cause


async def request_regions(client: Connection, server: Connection, count: int) -> None:
    kept = [await client.request_region(1) for _ in range(count)]
    assert not kept


BEYOND: dict[str, Callable[[Connection, Connection, int], Awaitable[object]]] = {
    "pool_limit": lambda client, _, size: client.lease(size),
    "lend_quota": lambda client, _, size: client.request_region(size),
    "max_message": lambda client, _, size: client.send(bytes(size)),
    "max_regions": request_regions,
    "max_regions ": share_unaccepted_regions,
}


@one_loop
@pytest.mark.parametrize("limit", BEYOND)
async def test_limit_error_contains_the_setting_and_its_value(
    factory: ConnectionFactory, limit: str
) -> None:
    """The user needs both to know what to change, and on which side."""
    setting = limit.strip()
    config = replace(SMALL, max_message=1 << 16, pool_limit=16 << 20)
    value = getattr(config, setting)
    async with factory.pair(config) as (client, server):
        with pytest.raises((RDMAError, OSError)) as refused:
            await BEYOND[limit](client, server, value + 1)
        assert f"Config.{setting}" in str(refused.value)
        assert f"{value}" in str(refused.value)


@one_loop
@pytest.mark.parametrize("limit", ["lend_quota", "max_regions"])
async def test_owner_logs_the_setting_that_refused_a_region_request(
    factory: ConnectionFactory, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aiordma.connection")
    value = getattr(SMALL, limit)
    async with factory.pair() as (client, server):
        with pytest.raises(RequestRefusedError) as refused:
            await BEYOND[limit](client, server, value + 1)
        (line,) = [text for text in caplog.messages if "rejecting a memory request" in text]
        assert line.endswith(refused.value.text)
        assert f"the owner's Config.{limit}" in line
        assert f"{value}" in line


@one_loop
async def test_receiver_error_contains_message_size_and_limit(factory: ConnectionFactory) -> None:
    async with factory.pair(replace(SMALL, max_message=10_000)) as (client, server):
        with pytest.raises(
            MessageTooLongError, match=r"10001 .* 10000 \(Config\.max_message of the"
        ):
            async with client:
                await client.send(bytes(10_001))
        error = await ends(server.recv(), ConnectionBrokenError)
        assert str(error).endswith(
            "the peer's program ended the connection with MessageTooLongError: it sent a "
            "message of 10001 "
            "bytes, and this side accepts at most 10000 (Config.max_message here)"
        )


@pytest.mark.parametrize("text", ["1 of 100", "101 of 99", "101", "x of 100", "101 of 100 of 1"])
@pytest.mark.any_device
def test_goodbye_with_implausible_sizes_is_reported_without_a_limit(text: str) -> None:
    goodbye = protocol.Goodbye(0, protocol.GoodbyeCode.FAILED, f"MessageTooLongError {text}")
    assert protocol.describe_failure(goodbye, 100).endswith(
        "the data that it sent may be incomplete"
    )


@one_loop
@pytest.mark.parametrize(
    "setting", ["max_handshakes", "max_connections_per_host", "max_connections"]
)
async def test_rejection_reason_contains_the_exceeded_setting(setting: str) -> None:
    config = Config(**{setting: 1})  # type: ignore[arg-type]
    errors = await rejection_errors(config, "10.0.0.1", "10.0.0.1")
    (error,) = [error for error in errors if error is not None]
    assert isinstance(error, BusyError | ConnectionLimitError)
    assert f"Config.{setting}" in str(error)
    assert "1" in str(error)
    assert len(str(error)) <= 144  # the maximum length in a rejection


@one_loop
async def test_concurrent_handshakes_are_capped_by_file_descriptor_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (80, 80))
    errors = await rejection_errors(Config(), *(f"10.0.0.{host}" for host in range(11)))
    (error,) = [error for error in errors if error is not None]
    assert isinstance(error, BusyError)


@one_loop
async def test_unaccepted_connections_count_towards_the_limit(factory: ConnectionFactory) -> None:
    """A connection that waits for `accept` costs as much as any other."""
    async with await factory.listen(TWO) as listener:
        clients = [await factory.connect(listener.port) for _ in range(2)]
        await rejection_reason(factory, listener.port)
    for client in clients:
        await client.wait_closed()


@one_loop
async def test_backlog_drops_connections_closed_before_accept(factory: ConnectionFactory) -> None:
    """A slow listener must not accumulate them.

    Connections that are still open are accepted in order.
    """
    async with await listen(factory.host, 0, backlog=4, config=SMALL, **factory.where) as listener:
        first = await factory.connect(listener.port)
        for _ in range(20):
            other = await factory.connect(listener.port)
            await other.close()
        assert len(listener._ready) <= 10
        last = await factory.connect(listener.port)
        async with first, last:
            async with await listener.accept() as server:
                await check_alive(first, server)
            while (server := await listener.accept()).closed:
                pass
            async with server:
                await check_alive(last, server)


async def test_failed_handshake_does_not_count_towards_max_connections(
    factory: ConnectionFactory,
) -> None:
    key = bytes(range(16))

    async def wait(conn: Connection) -> None:
        await conn.wait_closed()

    server = await start_server(
        wait, factory.host, config=replace(SMALL, max_connections=1), auth=key, **factory.where
    )

    async def with_key(auth: bytes) -> Connection:
        """Connect, retrying until the listener has noticed that the last connection has ended."""
        while True:
            with suppress(RejectedError):
                return await replace(factory, auth=auth).connect(server.port)

    async with server:
        for _ in range(3):
            await ends(with_key(bytes(16)), AuthenticationError)
            async with await with_key(key):
                pass
