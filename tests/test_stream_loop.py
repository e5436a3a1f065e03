"""A loop whose connections use RDMA: which do, and which do not."""

from __future__ import annotations

import asyncio
import io
import socket
import ssl
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop

import aiordma
from aiordma import streams
from aiordma.streams import StreamTransport


class Loop(streams.EventLoop):
    def applies(self, host: str | None, port: int) -> bool:
        return host != "localhost"


# Not a class statement, because uvloop's type stubs contradict asyncio's.
UVLoop: Any = type("UVLoop", (streams.OverRDMA, uvloop.Loop), {"applies": Loop.applies})


def run_on(kind: Any, device_name: str, main: Coroutine[Any, Any, None]) -> None:
    def make() -> asyncio.AbstractEventLoop:
        loop: Any = kind()
        loop.device = device_name
        assert isinstance(loop, asyncio.AbstractEventLoop)
        return loop

    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(main)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.readexactly(3))
    writer.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read())
    writer.close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether a transport uses RDMA."""
    writer.write(b"abc")
    assert await reader.read() == b"abc"
    writer.close()
    await writer.wait_closed()
    return isinstance(writer.transport, StreamTransport)


@pytest.mark.parametrize("kind", [Loop, UVLoop])
def test_addresses_that_are_not_meant_stay_tcp(
    kind: Any, device_name: str, host: str, tmp_path: Path
) -> None:
    async def main() -> None:
        for address, expected in ((host, True), ("localhost", False)):
            server = await asyncio.start_server(answer, address, 0)
            async with server:
                port = server.sockets[0].getsockname()[1]
                assert await ask(*await asyncio.open_connection(address, port)) is expected
        made_here = socket.create_server(("127.0.0.1", 0))
        async with await asyncio.start_server(answer, sock=made_here):
            port = made_here.getsockname()[1]
            dialled = socket.create_connection(("127.0.0.1", port))
            assert not await ask(*await asyncio.open_connection(sock=dialled))
        path = str(tmp_path / "socket")
        async with await asyncio.start_unix_server(answer, path):
            assert not await ask(*await asyncio.open_unix_connection(path))

    run_on(kind, device_name, main())


@pytest.mark.parametrize("kind", [streams.EventLoop, UVLoop])
def test_tls_is_that_of_the_stream(kind: Any, device_name: str, host: str) -> None:
    authority = trustme.CA()
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("server.example").configure_cert(serving)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def main() -> None:
        async with await asyncio.start_server(answer, host, 0, ssl=serving) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(
                host, port, ssl=trusting, server_hostname="server.example"
            )
            assert isinstance(writer.get_extra_info("connection"), aiordma.Connection)
            writer.write(b"abc")
            assert await reader.read() == b"abc"
            writer.close()
            await writer.wait_closed()

    run_on(kind, device_name, main())


@pytest.mark.parametrize("kind", [streams.EventLoop, UVLoop])
@pytest.mark.parametrize("paused", [False, True])
def test_a_task_that_is_cancelled_at_the_end_still_hears(
    kind: Any, device_name: str, host: str, paused: bool
) -> None:
    """With TCP, asyncio.run cancels the program's tasks and not its connections."""
    heard = bytearray()
    tasks = []

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(data)

    async def wait(ready: asyncio.Event) -> None:
        async with await asyncio.get_running_loop().create_server(Echo, host, 0) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(host, port)
            transport: Any = writer.transport
            if paused:
                transport.pause_reading()
            ready.set()
            try:
                await reader.read()
            finally:
                writer.write(b"a")
                transport.resume_reading()
                heard.extend(await reader.readexactly(1))
                writer.close()
                await writer.wait_closed()

    async def main() -> None:
        ready = asyncio.Event()
        tasks.append(asyncio.create_task(wait(ready)))
        await ready.wait()

    run_on(kind, device_name, main())
    assert heard == b"a"


@pytest.mark.parametrize("kind", [streams.EventLoop, UVLoop])
def test_the_loop_sends_files(kind: Any, device_name: str, host: str, tmp_path: Path) -> None:
    """Over RDMA, and over TCP as the loop does without it."""
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with await asyncio.start_server(answer, host, 0) as server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(host, port)
            with closing(writer), path.open("rb") as file:
                assert await loop.sendfile(writer.transport, file, 2, 3) == 3
                assert file.tell() == 5
                assert await reader.read() == b"234"
                writer.close()
                with pytest.raises(RuntimeError, match="is closing"):
                    await loop.sendfile(writer.transport, file)
            await writer.wait_closed()
        if kind is UVLoop:
            return  # it has no sendfile
        made_here = socket.create_server(("127.0.0.1", 0))
        async with await asyncio.start_server(answer, sock=made_here):
            dialled = socket.create_connection(made_here.getsockname())
            reader, writer = await asyncio.open_connection(sock=dialled)
            with path.open("rb") as file:
                assert await loop.sendfile(writer.transport, file, 2, 3) == 3
            assert await reader.read() == b"234"
            writer.close()
            await writer.wait_closed()

    run_on(kind, device_name, main())


def test_the_loop_copies_what_is_no_regular_file(device_name: str, host: str) -> None:
    data = bytes(range(256)) * 3000  # several parts

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with await asyncio.start_server(echo, host, 0) as server:
            port = server.sockets[0].getsockname()[1]
            for count, length in ((None, len(data) - 2), (300_000, 300_000)):
                reader, writer = await asyncio.open_connection(host, port)
                with closing(writer):
                    with pytest.raises(asyncio.SendfileNotAvailableError, match="no regular file"):
                        await loop.sendfile(writer.transport, io.BytesIO(data), fallback=False)
                    file = io.BytesIO(data)
                    assert await loop.sendfile(writer.transport, file, 2, count) == length
                    assert file.tell() == 2 + length
                    writer.write_eof()
                    assert await reader.read() == data[2 : 2 + length]
                await writer.wait_closed()

    run_on(streams.EventLoop, device_name, main())


def test_options_that_asyncio_refuses(device_name: str, host: str) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        for function in (loop.create_connection, loop.create_server):
            with pytest.raises(TypeError, match="argument 'time_out'"):
                await function(asyncio.Protocol, host, 1, time_out=3)
            with pytest.raises(ValueError, match="ssl_handshake_timeout"):
                await function(asyncio.Protocol, host, 1, ssl_handshake_timeout=3)
        async with await loop.create_server(asyncio.Protocol, host, 0, reuse_address=True) as it:
            port = it.sockets[0].getsockname()[1]
            transport, _ = await loop.create_connection(
                asyncio.Protocol, host, port, family=socket.AF_INET, ssl_handshake_timeout=None
            )
            transport.abort()

    run_on(streams.EventLoop, device_name, main())


def test_a_server_without_a_port_picks_one(device_name: str, host: str) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with await loop.create_server(asyncio.Protocol, host) as server:
            assert isinstance(server, streams.StreamServer)
            assert server.address[1]
        with pytest.raises(ValueError, match="Neither host/port nor sock"):
            await loop.create_server(asyncio.Protocol)

    run_on(streams.EventLoop, device_name, main())
