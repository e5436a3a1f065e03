"""Test peers that are not aiordma at all: plain TCP clients and servers, closed ports, missing
hosts.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from aiordma import ConnectionManagerError, ProtocolError, connect, listen, verbs
from aiordma._transport.connect_tcp import MAGIC, MESSAGE_SIZE, READY
from aiordma.errors import AddressError, DeviceNotFoundError

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    ends,
    hello,
    limits_pass,
    pattern,
    when_limits_pass,
)
from .marks import by_cm, by_tcp, one_loop

pytestmark = pytest.mark.any_device

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_raw_client(factory: ConnectionFactory, port: int) -> Streams | None:
    """Open a TCP connection to a listener's port. Return None if the device does not use TCP.

    The connection manager of a card has a separate port space, which TCP cannot reach.
    """
    try:
        return await asyncio.open_connection(factory.host, port)
    except ConnectionRefusedError:
        assert factory.via == "cm"
        assert factory.device != "embedded0"
        return None


async def read_until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return the data received until the other side closes."""
    said = b""
    with suppress(ConnectionError):
        while data := await reader.read(4096):
            said += data
    return said


# ---- strangers at our listener -------------------------------------------------------------------

NOISE = {
    "random bytes": pattern(4096),
    "a web browser": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "one byte": b"a",
    "a lot": pattern(1 << 20),
}


@pytest.mark.parametrize("noise", NOISE)
@one_loop
async def test_listener_disconnects_clients_that_send_invalid_data(
    factory: ConnectionFactory, noise: str
) -> None:
    """The stranger is disconnected as soon as its data is invalid.

    A single byte may be the start of anything.

    A client of another protocol, such as Dask's tcp://, would take a refusal for its answer.
    """
    async with factory.witness() as witness, await factory.listen() as listener:
        streams = await open_raw_client(factory, listener.port)
        if streams is not None:
            reader, writer = streams
            writer.write(NOISE[noise])
            if noise == "one byte":
                writer.write_eof()
            assert await read_until_closed(reader) == b"" or factory.via == "cm"
            writer.close()
        await witness.check()
        await factory.works(listener)


@one_loop
async def test_listener_evicts_silent_clients_beyond_max_handshakes(
    factory: ConnectionFactory,
) -> None:
    """Some strangers are evicted when there are too many, so that no honest peer is turned away."""
    limits = replace(SMALL, max_handshakes=3)
    async with factory.witness(), await factory.listen(limits) as listener:
        clients = [await open_raw_client(factory, listener.port) for _ in range(8)]
        remaining = {
            asyncio.create_task(read_until_closed(streams[0])) for streams in clients if streams
        }
        if factory.via == "tcp":
            while len(remaining) > 3:
                _, remaining = await asyncio.wait(remaining, return_when=asyncio.FIRST_COMPLETED)
            assert len(remaining) == 3
        await factory.works(listener)
        if factory.via == "tcp":
            assert sum(task.done() for task in remaining) <= 1  # one may be evicted for the client
            await when_limits_pass(asyncio.gather(*remaining))
        for task in remaining:
            task.cancel()
        for streams in clients:
            if streams is not None:
                streams[1].close()


@one_loop
async def test_listener_close_disconnects_silent_clients(factory: ConnectionFactory) -> None:
    listener = await factory.listen()
    clients = [await open_raw_client(factory, listener.port) for _ in range(3)]
    await listener.close()
    for streams in clients:
        if streams is not None:
            await read_until_closed(streams[0])
            streams[1].close()


# ---- half an exchange over TCP -------------------------------------------------------------------

ENDPOINT = verbs.Endpoint(gid=bytes(15) + b"\1", qp_num=77, psn=1, lid=1, mtu=5).pack()
OFFER = MAGIC + ENDPOINT + hello().pack()
assert len(OFFER) == MESSAGE_SIZE

BAD_OFFERS = {
    "another greeting": b"aiordma\x02" + OFFER[8:],
    "another endpoint": OFFER[:8] + b"XXXX" + OFFER[12:],
    "a datagram queue pair": OFFER[:14] + b"\x04" + OFFER[15:],
    "nothing in the hello": OFFER[: 8 + len(ENDPOINT)] + bytes(len(hello().pack())),
}


@asynccontextmanager
async def rejected_client(
    factory: ConnectionFactory, said: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a client that has sent `said`, and check that the listener disconnects it.

    Other connections and the listener must not be affected.
    """
    async with factory.witness(), await factory.listen() as listener:
        reader, writer = await asyncio.open_connection(factory.host, listener.port)
        writer.write(said)
        yield reader, writer
        await read_until_closed(reader)
        writer.close()
        await factory.works(listener)


@pytest.mark.parametrize("kind", BAD_OFFERS)
@one_loop
@by_tcp
async def test_listener_disconnects_client_after_invalid_offer(
    factory: ConnectionFactory, kind: str
) -> None:
    async with rejected_client(factory, BAD_OFFERS[kind]):
        pass


@pytest.mark.parametrize("length", [1, 7, 8, 9, MESSAGE_SIZE - 1])
@pytest.mark.parametrize("end", ["hangs up", "falls silent"])
@one_loop
@by_tcp
async def test_listener_disconnects_client_after_truncated_offer(
    factory: ConnectionFactory, length: int, end: str
) -> None:
    async with rejected_client(factory, OFFER[:length]) as (reader, writer):
        if end == "hangs up":
            writer.write_eof()
        else:
            await when_limits_pass(read_until_closed(reader))


@pytest.mark.parametrize("end", ["hangs up", "falls silent", "is not ready"])
@one_loop
@by_tcp
async def test_listener_disconnects_client_offering_an_unknown_queue_pair(
    factory: ConnectionFactory, end: str
) -> None:
    """All messages are well-formed, but the connection is never established."""
    gid = verbs.GID.from_ip(factory.host)
    offer = MAGIC + verbs.Endpoint(gid=gid.raw, qp_num=77, psn=1, lid=1, mtu=3).pack()
    async with rejected_client(factory, offer + hello().pack()) as (reader, writer):
        await reader.readexactly(MESSAGE_SIZE)
        if end == "hangs up":
            writer.write_eof()
        elif end == "is not ready":
            writer.write(b"steady".ljust(len(READY)))
        else:
            limits_pass()


# ---- our client at strangers ---------------------------------------------------------------------


@asynccontextmanager
async def tcp_server(
    factory: ConnectionFactory,
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Run a plain TCP server and yield its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await answer(reader, writer)
        except (asyncio.CancelledError, ConnectionError):
            pass  # a client that hangs up with bytes unread resets the connection
        finally:
            writer.close()

    server = await asyncio.start_server(serve, factory.host, 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks)


async def closes_immediately(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


async def resets_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.transport.abort()


async def sends_garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(pattern(4096))
    await reader.read()


async def sends_magic_and_closes(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    writer.write(MAGIC)


async def echoes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(4096):
        writer.write(data)


@pytest.mark.parametrize(
    "server", [closes_immediately, resets_connection, sends_garbage, sends_magic_and_closes, echoes]
)
@one_loop
async def test_connect_fails_when_the_server_speaks_another_protocol(
    factory: ConnectionFactory,
    server: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    """An echo server returns this side's own offer, which must not be accepted either."""
    async with factory.witness(), tcp_server(factory, server) as port:
        await ends(factory.connect(port), ProtocolError, ConnectionManagerError)


@one_loop
async def test_unknown_host_raises_address_error(factory: ConnectionFactory) -> None:
    with pytest.raises(AddressError, match="no-such-host"):
        await connect("no-such-host.invalid", 1, **factory.where)


@one_loop
async def test_unknown_device_raises_device_not_found_error(factory: ConnectionFactory) -> None:
    async with factory.witness():
        attempts: list[Callable[[], Awaitable[object]]] = [
            lambda: connect(factory.host, 1, device="mlx9_0", via=factory.via),
            lambda: listen(factory.host, device="mlx9_0", via=factory.via),
        ]
        for attempt in attempts:
            with pytest.raises(DeviceNotFoundError) as caught:
                await attempt()
            assert caught.value.name == "mlx9_0"
            assert factory.device in caught.value.known


@one_loop
@by_cm
async def test_connect_and_listen_reject_an_unknown_via_argument(
    factory: ConnectionFactory,
) -> None:
    with pytest.raises(ValueError, match="pigeon"):
        await connect(factory.host, 1, via="pigeon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pigeon"):
        await listen(factory.host, via="pigeon")  # type: ignore[arg-type]


@pytest.mark.parametrize("port", [-1, 1 << 16, 70_000])
@one_loop
@by_cm
async def test_port_out_of_range_raises_value_error(factory: ConnectionFactory, port: int) -> None:
    with pytest.raises(ValueError, match=str(port)):
        await factory.connect(port)
    with pytest.raises(ValueError, match=str(port)):
        await listen(factory.host, port, **factory.where)


@one_loop
@pytest.mark.parametrize("anywhere", [(), (0,), (1,), (0, 1)])
async def test_port_in_use_raises_address_error(
    factory: ConnectionFactory, anywhere: tuple[int, ...]
) -> None:
    """`anywhere` has the numbers of the listeners that use all addresses."""
    first, second = ("" if it in anywhere else factory.host for it in range(2))
    async with await listen(first, 0, **factory.where) as listener:
        with pytest.raises(OSError, match=r".*") as caught:
            await listen(second, listener.port, **factory.where)
        assert caught.value.errno == errno.EADDRINUSE
        assert isinstance(caught.value, AddressError)
