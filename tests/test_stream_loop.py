"""Tests of a loop whose connections use RDMA, and of which connections do not."""

from __future__ import annotations

import asyncio
import gc
import io
import socket
import ssl
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import closing, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any
from warnings import catch_warnings

import pytest
import trustme
import uvloop

import aiordma
from aiordma import streams
from aiordma.config import Config
from aiordma.streams import StreamTransport


class Loop(streams.EventLoop):
    def applies(self, host: str | None, port: int) -> bool:
        return host != "localhost"


# A class statement would fail type checking, because uvloop's type stubs contradict asyncio's.
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
    """Exchange data and return whether the transport uses RDMA."""
    writer.write(b"abc")
    assert await reader.read() == b"abc"
    writer.close()
    await writer.wait_closed()
    return isinstance(writer.transport, StreamTransport)


@pytest.mark.parametrize("kind", [Loop, UVLoop])
def test_hosts_and_sockets_without_rdma_use_tcp(
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
def test_tls_runs_over_rdma(kind: Any, device_name: str, host: str) -> None:
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
def test_protocol_receives_data_after_its_task_is_cancelled(
    kind: Any, device_name: str, host: str, paused: bool
) -> None:
    """`asyncio.run` cancels the program's tasks, but its TCP connections stay open."""
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
def test_server_accepts_connections_after_all_tasks_are_cancelled(
    kind: Any, device_name: str, host: str
) -> None:
    """`asyncio.run` cancels all tasks at its end. Earlier connections must still be served."""

    class Echo(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"a")

    async def main() -> None:
        async with await asyncio.get_running_loop().create_server(Echo, host, 0) as server:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection(host, port)
            assert await reader.readexactly(1) == b"a"
            writer.close()
            await writer.wait_closed()

    run_on(kind, device_name, main())


@pytest.mark.parametrize("kind", [streams.EventLoop, UVLoop])
def test_loop_sendfile_sends_file_range_over_rdma_and_tcp(
    kind: Any, device_name: str, host: str, tmp_path: Path
) -> None:
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
            return  # uvloop has no sendfile
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


def test_loop_sendfile_copies_in_memory_files(device_name: str, host: str) -> None:
    data = bytes(range(256)) * 3000  # sent in several parts

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with await asyncio.start_server(echo, host, 0) as server:
            port = server.sockets[0].getsockname()[1]
            for offset, count in ((2, None), (2, 300_000), (0, None), (0, 300_000)):
                length = len(data) - offset if count is None else count
                reader, writer = await asyncio.open_connection(host, port)
                with closing(writer):
                    with pytest.raises(
                        asyncio.SendfileNotAvailableError, match="not a regular file"
                    ):
                        await loop.sendfile(writer.transport, io.BytesIO(data), fallback=False)
                    with pytest.raises(ValueError, match="count must be"):
                        await loop.sendfile(writer.transport, io.BytesIO(data), 0, 0)
                    file = io.BytesIO(data)
                    file.seek(5)  # ignored in favor of `offset`
                    assert await loop.sendfile(writer.transport, file, offset, count) == length
                    assert file.tell() == offset + length
                    writer.write_eof()
                    assert await reader.read() == data[offset : offset + length]
                await writer.wait_closed()

    run_on(streams.EventLoop, device_name, main())


# ---- as on asyncio's own loop --------------------------------------------------------------------


def run_by_tcp(kind: Any, device_name: str, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=kind.__bases__[-1]) as runner:
        runner.run(main)


WIRES = pytest.mark.parametrize("run", [run_by_tcp, run_on], ids=["tcp", "rdma"])
Everywhere: Any = type("Everywhere", (streams.OverRDMA, uvloop.Loop), {})
KINDS = pytest.mark.parametrize("kind", [streams.EventLoop, Everywhere], ids=["asyncio", "uvloop"])

# Options of create_connection (CONNECT) and create_server (SERVE), and the type of the expected
# error, if any. Python 3.11 has all of these options. uvloop lacks those in NOT_OF_UVLOOP.
CONNECT: list[tuple[dict[str, Any], type[Exception] | None]] = [
    ({}, None),
    ({"port": str}, None),
    ({"host": "localhost", "family": socket.AF_INET}, None),
    ({"host": "localhost", "flags": socket.AI_NUMERICHOST}, OSError),
    ({"host": "127.0.0.1", "family": socket.AF_INET6}, OSError),
    ({"host": "127.0.0.1", "flags": socket.AI_NUMERICHOST}, None),
    ({"proto": socket.IPPROTO_TCP}, None),
    ({"local_addr": ("127.0.0.1", 0)}, None),
    ({"happy_eyeballs_delay": 0.25}, None),
    ({"interleave": 1}, None),
    ({"ssl": None, "server_hostname": None, "ssl_handshake_timeout": None}, None),
    ({"server_hostname": "server.example"}, ValueError),
    ({"ssl_handshake_timeout": 3}, ValueError),
    ({"ssl_shutdown_timeout": 3}, ValueError),
    ({"time_out": 3}, TypeError),
    ({"port": lambda _: 1}, OSError),
    ({"port": lambda _: "no service"}, OSError),
    ({"sock": socket.socket}, ValueError),
]
SERVE: list[tuple[dict[str, Any], type[Exception] | None]] = [
    ({}, None),
    ({"port": None}, None),
    ({"port": "0"}, None),
    ({"host": ["127.0.0.1", "127.0.0.2"]}, None),
    ({"host": ("127.0.0.1", "127.0.0.1")}, None),
    ({"host": ""}, None),
    ({"host": None}, None),
    ({"host": None, "port": None}, ValueError),
    ({"host": "localhost", "family": socket.AF_INET}, None),
    ({"host": "127.0.0.1", "family": socket.AF_INET6}, OSError),
    ({"flags": socket.AI_PASSIVE | socket.AI_NUMERICHOST}, None),
    ({"backlog": 0}, None),
    ({"backlog": 1}, None),
    ({"reuse_address": True}, None),
    ({"reuse_port": True}, None),
    ({"start_serving": False}, None),
    ({"ssl": None, "ssl_handshake_timeout": None, "ssl_shutdown_timeout": None}, None),
    ({"ssl_handshake_timeout": 3}, ValueError),
    ({"ssl": True}, TypeError),
    ({"time_out": 3}, TypeError),
    ({"host": "203.0.113.9"}, OSError),
    ({"port": "no service"}, OSError),
    ({"sock": socket.socket}, ValueError),
]
NOT_OF_UVLOOP = {"happy_eyeballs_delay", "interleave"}


async def outcome(function: Any, *arguments: Any, **options: Any) -> Any:
    """Return the function's result, or the exception that it raises."""
    try:
        return await function(*arguments, **options)
    except Exception as error:
        return error


def wanted(given: Any, expected: type[Exception] | None, options: dict[str, Any]) -> None:
    kind = type(None) if expected is None else expected
    got = given if isinstance(given, Exception) else None
    assert isinstance(got, kind), f"{options} gave {given!r}"


@pytest.mark.any_device
@WIRES
@KINDS
def test_create_connection_options_match_asyncio(run: Any, kind: Any, device_name: str) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with await loop.create_server(asyncio.Protocol, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            for options, expected in CONNECT:
                if run is run_by_tcp and kind is Everywhere and NOT_OF_UVLOOP & options.keys():
                    continue
                given = {"host": "127.0.0.1", **options, "port": port}
                if (choose := options.get("port")) is not None:
                    given["port"] = choose(port)
                with closing(socket.socket()) as sock:
                    if "sock" in options:
                        given["sock"] = sock
                    got = await outcome(loop.create_connection, asyncio.Protocol, **given)
                wanted(got, expected, options)
                if expected is None:
                    got[0].abort()

    run(kind, device_name, main())


@pytest.mark.any_device
@WIRES
@KINDS
def test_create_server_options_match_asyncio(run: Any, kind: Any, device_name: str) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        for options, expected in SERVE:
            given = {"host": "127.0.0.1", "port": 0, **options}
            with closing(socket.socket()) as sock:
                if "sock" in options:
                    given["sock"] = sock
                server = await outcome(loop.create_server, asyncio.Protocol, **given)
            wanted(server, expected, options)
            if expected is None:
                async with server:
                    await server.start_serving()
                    names = [each.getsockname() for each in server.sockets]
                    hosts = options.get("host", "127.0.0.1")
                    if isinstance(hosts, list):
                        assert {name[0] for name in names} == set(hosts)
                    transport, _ = await loop.create_connection(asyncio.Protocol, *names[0][:2])
                    transport.abort()

    run(kind, device_name, main())


@KINDS
def test_rdma_loop_supports_reuse_port_keep_alive_and_all_errors(
    kind: Any, device_name: str, host: str
) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        options = {"reuse_port": True, "keep_alive": True}
        async with await loop.create_server(asyncio.Protocol, host, **options) as server:
            port = server.address[1]
            error = await outcome(loop.create_server, asyncio.Protocol, host, port, reuse_port=True)
            assert isinstance(error, OSError)
            assert "one listener" in error.__notes__[0]
            with pytest.raises(ValueError, match="positive"):
                await loop.create_connection(
                    asyncio.Protocol, host, port, ssl=True, ssl_handshake_timeout=0
                )
        for all_errors in (True, False):
            error = await outcome(
                loop.create_connection, asyncio.Protocol, host, port, all_errors=all_errors
            )
            if all_errors:
                assert isinstance(error, ExceptionGroup)
                (error,) = error.exceptions
            assert isinstance(error, ConnectionRefusedError)
        with pytest.raises(ValueError, match="empty"):
            await loop.create_server(asyncio.Protocol, [])

    run_on(kind, device_name, main())


def test_server_on_rdma_and_tcp_hosts_is_rejected(device_name: str) -> None:
    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        with pytest.raises(ValueError, match="for only some of these hosts"):
            await loop.create_server(asyncio.Protocol, ["127.0.0.1", "localhost"], 0)

    run_on(Loop, device_name, main())


@pytest.mark.parametrize("kind", [Loop, UVLoop])
def test_sock_connect_prepares_rdma_or_falls_back_to_tcp(
    kind: Any, device_name: str, host: str
) -> None:
    """`create_connection` uses the socket. TCP is used if there is no RDMA listener."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with await asyncio.start_server(answer, host, 0) as server:
            name = server.sockets[0].getsockname()
            for source in (None, (host, 0)):
                sock = socket.socket(server.sockets[0].family)
                sock.setblocking(False)
                if source is not None:
                    sock.bind(source)
                await loop.sock_connect(sock, name)
                reader, writer = await asyncio.open_connection(sock=sock)
                assert writer.get_extra_info("peername") == name
                assert await ask(reader, writer)
                assert sock.fileno() == -1
            dropped = socket.socket(server.sockets[0].family)
            dropped.setblocking(False)
            await loop.sock_connect(dropped, name)
            dropped.close()
            del dropped  # closes its connection
            refused = socket.socket(server.sockets[0].family)
            refused.setblocking(False)
        with closing(refused), pytest.raises(ConnectionRefusedError):
            await loop.sock_connect(refused, name)
        loop.config = Config(connect_timeout=0.01)  # for a server that does not respond
        with closing(socket.create_server((host, 0))) as here, closing(socket.socket()) as plain:
            plain.setblocking(False)
            await loop.sock_connect(plain, here.getsockname())
            assert plain.getpeername() == here.getsockname()

    run_on(kind, device_name, main())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_exit_exception_in_protocol_callback_stops_the_program(
    kind: type[BaseException], device_name: str, host: str
) -> None:
    """The program is waiting for its connection to end."""

    class Exiting(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            raise kind(3)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with await loop.create_server(Exiting, host, 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with closing(writer):
                writer.write(b"x")
                await reader.read()

    with pytest.raises(kind):
        run_on(streams.EventLoop, device_name, main())


@KINDS
@WIRES
@pytest.mark.parametrize("size", [5, 300_000])
@pytest.mark.parametrize("end", ["close", "write_eof", "abort"])
def test_data_written_before_program_exit_is_delivered(
    run: Any, kind: Any, end: str, size: int, device_name: str, host: str
) -> None:
    """The program drains its writer, but does not wait for the connection to end."""
    port: Future[int] = Future()
    got: Future[bytes] = Future()

    async def serve() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                got.set_result(await reader.read())
            except ConnectionError as error:
                got.set_exception(error)
            writer.close()
            over.set()

        over = asyncio.Event()
        async with await asyncio.start_server(handle, host, 0) as server:
            port.set_result(server.sockets[0].getsockname()[1])
            await over.wait()

    async def program() -> None:
        _, writer = await asyncio.open_connection(host, port.result())
        writer.write(bytes(size))
        await writer.drain()
        getattr(writer.transport, end)()

    serving = Thread(target=run, args=(kind, device_name, serve()))
    serving.start()
    # Before Python 3.11.5, only transports emit this warning, and not if they have already received
    # the peer's EOF.
    unclosed = (
        pytest.warns(ResourceWarning)
        if hasattr(asyncio.StreamWriter, "__del__")
        else catch_warnings(action="ignore", category=ResourceWarning)
    )
    with unclosed if end == "write_eof" else nullcontext():
        run(kind, device_name, program())
        gc.collect()
    assert got.result() == bytes(size)
    serving.join()
