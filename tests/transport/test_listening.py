"""Test that a listener on a host name listens on every address of it, with one port number."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from aiordma import (
    Listener,
    open_connection,
    snapshot,
    start_server,
    start_stream_server,
    transport,
)
from aiordma._transport import listening
from aiordma.errors import AddressError, ConnectionClosedError
from aiordma.transport import Address, connect, listen

from .connection_factory import SMALL, ConnectionFactory, check_alive, ends, yield_loop
from .marks import one_loop

HERE = ("127.0.0.1", "127.0.0.2", "::1")


@pytest.fixture
def hosts(device_name: str, host: str) -> tuple[str, ...]:
    """Provide this machine's addresses on the device."""
    return (*HERE, host) if device_name == "embedded0" else (host,)


@pytest.fixture
def name(hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> str:
    """Provide a name that resolves to all `hosts`, one of them twice, and to a remote address."""

    async def resolve(host: str, port: int, **hints: Any) -> list[Address]:
        if host == "several.example":
            return [(host, port) for host in (hosts[0], *hosts, "203.0.113.9")]
        return await unpatched(host, port, **hints)

    unpatched = transport.resolve
    monkeypatch.setattr(transport, "resolve", resolve)
    return "several.example"


async def check(factory: ConnectionFactory, listener: Listener, hosts: tuple[str, ...]) -> None:
    assert listener.addresses == tuple((host, listener.port) for host in hosts)
    assert listener.address == listener.addresses[0]
    for host in hosts:
        client = await connect(host, listener.port, config=SMALL, **factory.where)
        async with client, await listener.accept() as server:
            await check_alive(client, server)


async def test_listener_on_a_host_name_binds_every_local_address(
    factory: ConnectionFactory, name: str, hosts: tuple[str, ...]
) -> None:
    """Addresses of other machines are left out."""
    async with await factory.listen(host=name) as listener:
        await check(factory, listener, hosts)
        assert all(f":{listener.port}" in repr(listener) for _ in hosts)
        port = listener.port
    async with await listen(name, port, config=SMALL, **factory.where) as listener:
        assert listener.port == port  # the port is free again at each address
        await check(factory, listener, hosts)


async def test_stopping_a_listener_frees_its_port_immediately(factory: ConnectionFactory) -> None:
    """The port is free before the loop runs again.

    Accepted connections continue, and `close` may follow.
    """
    listener = await factory.listen()
    where = listener.address
    client = await factory.connect(listener.port)
    server = await listener.accept()
    listener.stop()
    listener.stop()
    async with await listen(*where, config=SMALL, **factory.where) as second:
        assert second.address == where
        await ends(listener.accept(), ConnectionClosedError)
        await listener.close()
        await listener.close()
        async with client, server:
            await check_alive(client, server)


async def test_servers_on_a_host_name_bind_every_local_address(
    factory: ConnectionFactory, name: str, hosts: tuple[str, ...]
) -> None:
    accepted: asyncio.Queue[None] = asyncio.Queue()

    async def count(_: object) -> None:
        accepted.put_nowait(None)

    async with await start_server(count, name, config=SMALL, **factory.where) as server:
        assert server.addresses == tuple((host, server.port) for host in hosts)
        for host, port in server.addresses:
            async with await connect(host, port, **factory.where):
                await accepted.get()
    async with await start_stream_server(
        lambda _, writer: writer.close(), name, **factory.where
    ) as streams:
        assert [socket.getsockname()[0] for socket in streams.sockets] == list(hosts)
        for socket in streams.sockets:
            reader, writer = await open_connection(*socket.getsockname()[:2], **factory.where)
            assert await reader.read() == b""
            writer.close()


@one_loop
async def test_listen_fails_when_the_port_is_in_use_on_any_address(
    factory: ConnectionFactory, name: str, hosts: tuple[str, ...]
) -> None:
    """The other addresses of the name must be free again immediately."""
    async with await factory.listen(host=hosts[-1]) as other:
        for _ in range(2):
            error = await ends(listen(name, other.port, **factory.where), AddressError)
            assert error.errno == errno.EADDRINUSE
    async with await listen(name, other.port, config=SMALL, **factory.where) as listener:
        await check(factory, listener, hosts)


@pytest.mark.parametrize("in_use", [1, 5])
def test_open_ports_retries_with_another_number_when_a_port_is_in_use(
    in_use: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Address] = []

    class Port:
        def __init__(self, address: Address) -> None:
            host, port = address
            if not port:
                tries.append(address)
            self.address = host, port or 1000 + len(tries)
            if host == "second" and len(tries) <= in_use:
                raise AddressError("in use", status=-errno.EADDRINUSE)

        def release(self) -> None:
            pass

    ports = listening.open_ports(Port, [("first", 0), ("second", 0)])
    number = 1001 + in_use
    assert [port.address for port in ports] == [("first", number), ("second", number)]
    tries.clear()
    with pytest.raises(AddressError):  # this port number was requested
        listening.open_ports(Port, [("first", 7), ("second", 7)])
    monkeypatch.setattr(listening, "TRIES", in_use)
    with pytest.raises(AddressError):
        listening.open_ports(Port, [("first", 0), ("second", 0)])


@one_loop
async def test_listener_is_registered_when_the_last_object_closes_during_listen(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop must know the listener to close it when the loop ends."""
    other = await factory.listen()

    async def resolve(host: str, port: int, **hints: Any) -> list[Address]:
        await other.close()
        return await unpatched(host, port, **hints)

    unpatched = transport.resolve
    monkeypatch.setattr(transport, "resolve", resolve)
    async with await factory.listen():
        assert len(snapshot()["listeners"]) == 1


@one_loop
async def test_handshakes_do_not_use_the_task_factory(factory: ConnectionFactory) -> None:
    """An eager task factory (Python 3.12) would run the handshake before the listener knows about
    it.
    """

    def no_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        assert getattr(work, "__name__", "") != "_serve"
        return asyncio.Task(work, loop=loop, **options)

    for each in (no_task, getattr(asyncio, "eager_task_factory", no_task)):
        asyncio.get_running_loop().set_task_factory(each)
        async with factory.pair() as (client, server):
            await check_alive(client, server)


async def test_handshake_continues_when_all_tasks_are_cancelled(factory: ConnectionFactory) -> None:
    """`asyncio.run` cancels all tasks at its end. The client may already have its connection."""
    async with await factory.listen() as listener:
        connecting = asyncio.create_task(factory.connect(listener.port))
        while not listener._acceptor.handshakes:
            await yield_loop(1)
        for task in asyncio.all_tasks() - {asyncio.current_task(), connecting}:
            task.cancel()
        async with await connecting as client, await listener.accept() as server:
            await check_alive(client, server)
