"""Test what software relies on with TCP, on asyncio's own transports and on those over RDMA.

TCP is the reference: an expectation that TCP does not meet is wrong.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import trustme

from aiordma import streams

from .connection_factory import SMALL, ConnectionFactory, ends, pattern, yield_loop
from .marks import one_loop

pytestmark = pytest.mark.any_device

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None] | None]
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Wire:
    """Stream servers and clients over TCP or RDMA."""

    name: str
    factory: ConnectionFactory

    @property
    def options(self) -> dict[str, Any]:
        if self.name == "tcp":
            return {}
        return {"device": self.factory.device, "via": self.factory.via, "config": SMALL}

    async def serve(self, handler: Handler) -> Any:
        start: Any = asyncio.start_server if self.name == "tcp" else streams.start_stream_server
        return await start(handler, self.factory.host, 0, **self.options)

    async def open(self, server: Any) -> Ends:
        name = server.sockets[0].getsockname()
        opening: Any = asyncio if self.name == "tcp" else streams
        reader, writer = await opening.open_connection(*name[:2], **self.options)
        return reader, writer


@pytest.fixture(params=["tcp", "rdma"])
def wire(request: pytest.FixtureRequest, factory: ConnectionFactory) -> Wire:
    return Wire(request.param, factory)


class Collector:
    """A handler that reads until EOF. `got` holds the data or the error type of each stream."""

    def __init__(self) -> None:
        self.got: asyncio.Queue[bytes | type[Exception]] = asyncio.Queue()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.got.put_nowait(await reader.read())
        except ConnectionError as error:
            self.got.put_nowait(type(error))
        writer.close()


@pytest.mark.parametrize("end", ["close", "abort", "write_eof close abort", "write_eof abort"])
@pytest.mark.parametrize("size", [0, 5, 40_000])
async def test_data_written_before_close_or_abort_is_delivered(
    wire: Wire, size: int, end: str
) -> None:
    collector = Collector()
    async with await wire.serve(collector) as server:
        _, writer = await wire.open(server)
        writer.write(pattern(size))
        await writer.drain()
        for step in end.split():
            getattr(writer.transport, step)()
            await asyncio.sleep(0)
        assert await collector.got.get() == pattern(size)


@one_loop
async def test_drain_after_close_raises_connection_reset_error(wire: Wire) -> None:
    collector = Collector()
    async with await wire.serve(collector) as server:
        _, writer = await wire.open(server)
        writer.write(b"first")
        writer.close()
        await ends(writer.drain(), ConnectionResetError)
        assert await collector.got.get() == b"first"


@one_loop
@pytest.mark.parametrize("shape", [(2, 0), (0, 2), (2, 3), ()])
async def test_write_accepts_multidimensional_views(
    factory: ConnectionFactory, shape: tuple[int, ...]
) -> None:
    """The length of these views is not their number of bytes.

    asyncio's own transport fails with some of them.
    """
    wire, collector = Wire("rdma", factory), Collector()
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    async with await wire.serve(collector) as server:
        _, writer = await wire.open(server)
        writer.write(array.data)
        writer.write(pattern(300_000))
        writer.close()
        assert await collector.got.get() == array.tobytes() + pattern(300_000)


OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_ERROR),
    (socket.SOL_SOCKET, socket.SO_TYPE),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY),
]


@one_loop
async def test_stream_socket_reports_addresses_and_options(wire: Wire) -> None:
    collector = Collector()
    async with await wire.serve(collector) as server:
        assert server.sockets[0].type == socket.SOCK_STREAM
        await ends(asyncio.to_thread(server.sockets[0].getpeername), OSError)
        _, writer = await wire.open(server)
        sock = writer.get_extra_info("socket")
        assert sock.getpeername() == writer.get_extra_info("peername")
        assert sock.getpeername() == server.sockets[0].getsockname()
        assert sock.getsockname() == writer.get_extra_info("sockname")
        assert sock.family == server.sockets[0].family
        assert sock.family in (socket.AF_INET, socket.AF_INET6)
        assert (sock.type, sock.proto) == (socket.SOCK_STREAM, socket.IPPROTO_TCP)
        assert [sock.getsockopt(*option) for option in OPTIONS] == [0, socket.SOCK_STREAM, 0, 1]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        for no_option in (0x7FFF, 0x7FFE):
            with pytest.raises(OSError, match=r"option|available") as raised:
                sock.getsockopt(socket.IPPROTO_TCP, no_option)
            assert raised.value.errno == errno.ENOPROTOOPT
            with pytest.raises(OSError, match=r"option|available"):
                sock.setsockopt(socket.IPPROTO_TCP, no_option, 1)
        assert not sock.get_inheritable()
        sock.setblocking(False)
        with pytest.raises(ValueError, match="blocking"):
            sock.setblocking(True)
        assert not hasattr(sock, "close")
        writer.close()
        await writer.wait_closed()
        assert sock.fileno() == -1
        await collector.got.get()


@one_loop
async def test_rdma_stream_socket_rejects_shutdown_and_dup(factory: ConnectionFactory) -> None:
    wire, collector = Wire("rdma", factory), Collector()
    async with await wire.serve(collector) as server:
        _, writer = await wire.open(server)
        sock = writer.get_extra_info("socket")
        with pytest.raises(OSError, match="write_eof"):
            sock.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match="no socket"):
            sock.dup()
        writer.close()
        await collector.got.get()


def readable(sock: Any) -> bool:
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(0))


@one_loop
@pytest.mark.parametrize("event", ["data", "eof", "close"])
async def test_idle_stream_socket_becomes_readable_on_data_or_close(wire: Wire, event: str) -> None:
    """HTTP clients pause reading while a connection is idle, and check its socket before they use
    it again.
    """
    proceed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await proceed.wait()
        if event == "data":
            writer.write(b"unexpected")
        elif event == "eof":
            writer.write_eof()
        else:
            writer.close()
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        finished.set()

    finished = asyncio.Event()
    async with await wire.serve(serve) as server:
        _, writer = await wire.open(server)
        transport: Any = writer.transport
        transport.pause_reading()
        sock = writer.get_extra_info("socket")
        assert not readable(sock)
        proceed.set()
        while not readable(sock):
            await yield_loop(1)
        writer.close()
        await finished.wait()


@one_loop
async def test_start_tls_uses_tls_data_already_in_the_reader_buffer(
    factory: ConnectionFactory,
) -> None:
    """TLS data directly follows a header in clear text. asyncio's own transport loses that data."""
    if "uvloop" in type(asyncio.get_running_loop()).__module__:
        return  # asyncio's start_tls accepts only asyncio transports
    authority = trustme.CA()
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trusting = ssl.create_default_context()
    authority.issue_cert("server.example").configure_cert(serving)
    authority.configure_trust(trusting)
    wire = Wire("rdma", factory)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readline() == b"PROXY\n"
        buffered = vars(reader)["_buffer"]
        while not buffered:
            await yield_loop(1)
        await writer.start_tls(serving)
        writer.write(await reader.readline())
        writer.close()

    async with await wire.serve(serve) as server:
        reader, writer = await wire.open(server)
        writer.write(b"PROXY\n")
        await writer.start_tls(trusting, server_hostname="server.example")
        writer.write(b"secret\n")
        assert await reader.readline() == b"secret\n"
        writer.close()
