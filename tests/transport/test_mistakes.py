"""Common mistakes, each with the error that its user reads."""

from __future__ import annotations

import asyncio
import errno
import functools
import io
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import AsyncMock

import pytest

import aiordma
from aiordma import Config, Connection, RemoteRegion, Rights, streams
from aiordma._transport.acceptor import Acceptor
from aiordma.errors import (
    AddressError,
    ConnectionManagerError,
    ProtocolError,
    RejectedError,
    UnreachableError,
    VerbsError,
    host_port,
)
from aiordma.mr_pool import Region
from aiordma.transport import Via
from aiordma.verbs import ProtectionDomain

from .connection_factory import BUSY, ConnectionFactory, ends, exchange, pattern
from .marks import by_cm, one_loop

pytestmark = [one_loop, by_cm]

PATIENT = Config(connect_timeout=BUSY, handshake_timeout=BUSY)


class Scene(NamedTuple):
    """A pair of connections, with memory of this side and of the peer."""

    factory: ConnectionFactory
    conn: Connection
    local: Region
    remote: RemoteRegion
    ports: dict[str, int]

    def connect(self, host: Any = "", port: Any = None, **options: Any) -> Awaitable[object]:
        options.setdefault("config", PATIENT)
        return aiordma.connect(
            self.factory.host if host == "" else host,
            self.ports["cm"] if port is None else port,
            device=self.factory.device,
            **options,
        )

    def open_stream(self, port: Any, via: Any = "cm", **options: Any) -> Awaitable[object]:
        return aiordma.open_connection(
            self.factory.host, port, device=self.factory.device, via=via, config=PATIENT, **options
        )

    def stream_server(self, handler: Any, **options: Any) -> Awaitable[object]:
        return aiordma.start_stream_server(
            handler, self.factory.host, device=self.factory.device, **options
        )

    def serve(self, factory: Any, **options: Any) -> Awaitable[object]:
        return aiordma.create_server(
            factory, self.factory.host, device=self.factory.device, **options
        )

    def attach(self, factory: Any) -> Awaitable[object]:
        return aiordma.create_connection(
            factory,
            self.factory.host,
            self.ports["stream cm"],
            device=self.factory.device,
            config=PATIENT,
        )

    async def sendfile(self, file: Any, *part: Any) -> None:
        made: Any = await self.attach(asyncio.Protocol)
        transport: asyncio.WriteTransport = made[0]
        try:
            await streams.sendfile(transport, file, *part)
        finally:
            transport.abort()

    def listen(self, port: Any, via: Any = "cm") -> Awaitable[object]:
        return aiordma.listen(self.factory.host, port, device=self.factory.device, via=via)

    async def send(self, data: Any) -> None:
        await self.conn.send(data)

    async def register(self, memory: Any) -> None:
        self.conn.register(memory)

    async def batch(self, add: Callable[[Any], object]) -> None:
        async with self.conn.batch() as batch:
            add(batch)


class Series:
    """A column of pandas or polars, as far as `send` looks at it."""

    def to_numpy(self) -> None:
        """Never called."""


class Mistake(NamedTuple):
    """`…` in the text stands for anything."""

    name: str
    make: Callable[[Any], Awaitable[object]]
    error: type[BaseException] | tuple[type[BaseException], ...]
    text: str


NOT_REMOTE = (
    "the peer's memory is a RemoteRegion (recv_region, request_region, open_region) or a slice of "
    "one, not memory of this side: {local!r}"
)
NOT_LOCAL = (
    "an aiordma._transport.remote_memory.RemoteRegion has no memory to use: neither the buffer "
    "protocol nor DLPack; it is the peer's memory: read or write it (Connection.read, write)"
)
TEXT = (
    "a str has no memory to use: neither the buffer protocol nor DLPack; encode it: text.encode()"
)
OTHER_CM = '…; is an aiordma listener running there, with via="cm" and not "tcp"?'
OTHER_TCP = '…; is an aiordma listener running there, with via="tcp" and not "cm"?'
STREAMS = "byte streams (open_connection, create_connection, start_stream_server, create_server)"
MESSAGES = "messages (connect, listen, start_server)"

MISTAKES = [
    # ---- memory of the wrong side ----
    Mistake("write to local", lambda s: s.conn.write(b"x" * 64, s.local), TypeError, NOT_REMOTE),
    Mistake("write to local, 2", lambda s: s.conn.write(s.local, s.local), TypeError, NOT_REMOTE),
    Mistake("read from local", lambda s: s.conn.read(s.local, s.local), TypeError, NOT_REMOTE),
    Mistake(
        "read from bytes",
        lambda s: s.conn.read(b"x" * 8, bytearray(8)),
        TypeError,
        NOT_REMOTE.partition("not ")[0] + "not bytes",
    ),
    Mistake(
        "compare and swap, local",
        lambda s: s.conn.compare_and_swap(s.local, 0, 1),
        TypeError,
        NOT_REMOTE,
    ),
    Mistake("add, local", lambda s: s.conn.fetch_and_add(s.local, 1), TypeError, NOT_REMOTE),
    Mistake(
        "batch of a local write",
        lambda s: s.batch(lambda batch: batch.write(s.local, s.local)),
        TypeError,
        NOT_REMOTE,
    ),
    Mistake(
        "batch of a local read",
        lambda s: s.batch(lambda batch: batch.read(s.local, s.local)),
        TypeError,
        NOT_REMOTE,
    ),
    Mistake("hand over local", lambda s: s.conn.hand_over(s.local), TypeError, NOT_REMOTE),
    Mistake("write from remote", lambda s: s.conn.write(s.remote, s.remote), TypeError, NOT_LOCAL),
    Mistake("read into remote", lambda s: s.conn.read(s.remote, s.remote), TypeError, NOT_LOCAL),
    Mistake("send remote", lambda s: s.send(s.remote), TypeError, NOT_LOCAL),
    Mistake(
        "share remote",
        lambda s: s.conn.send_region(s.remote),
        TypeError,
        "{remote!r} is not registered memory of this side (Connection.register, alloc); borrowed "
        "memory goes back by hand_over",
    ),
    # ---- no memory at all ----
    Mistake("send text", lambda s: s.send("text"), TypeError, TEXT),
    Mistake("register text", lambda s: s.register("text"), TypeError, TEXT),
    Mistake("write text", lambda s: s.conn.write("text", s.remote), TypeError, TEXT),
    *(
        Mistake(
            f"send {name}",
            functools.partial(lambda s, data: s.send(data), data=data),
            TypeError,
            f"{name} has no memory to use: neither the buffer protocol nor DLPack; {hint}",
        )
        for name, data, hint in (
            ("an int", 5, "pack it: number.to_bytes(8, 'little'), or struct.pack('<d', number)"),
            ("a NoneType", None, "an empty message is b''"),
            ("a dict", {"a": 1}, "make bytes of it: json.dumps(value).encode(), or …"),
            ("a pathlib.PosixPath", Path("/etc/hosts"), "read the file: path.read_bytes()"),
            ("a _io.BytesIO", io.BytesIO(b"x"), "take its memory: .getbuffer()"),
            ("a builtin_function_or_method", io.BytesIO().read, "call it: what it returns …"),
            ("a type", bytes, "give an object, not its class"),
            ("a tests.transport.test_mistakes.Series", Series(), "take its memory: .to_numpy()"),
        )
    ),
    # ---- addresses ----
    Mistake(
        "port as text",
        lambda s: s.connect(port="7471"),
        TypeError,
        "port is an int from 0 to 65535, not str '7471'",
    ),
    Mistake(
        "listen at a port as text",
        lambda s: s.listen("7471"),
        TypeError,
        "port is an int from 0 to 65535, not str '7471'",
    ),
    Mistake(
        "port as float",
        lambda s: s.connect(port=5.0),
        TypeError,
        "port is an int from 0 to 65535, not float 5.0; round it, as with int()",
    ),
    Mistake(
        "no host",
        lambda s: s.connect(None, 5),
        TypeError,
        "host is a str, as '192.0.2.1' or 'server.example', not None",
    ),
    Mistake(
        "host as bytes",
        lambda s: s.connect(b"127.0.0.1", 5),
        TypeError,
        "host is a str, as '192.0.2.1' or 'server.example', not bytes b'127.0.0.1'",
    ),
    Mistake(
        "source without a port",
        lambda s: s.connect(source="127.0.0.1"),
        TypeError,
        "source is a local (host, port), as ('192.0.2.1', 0), not str '127.0.0.1'",
    ),
    Mistake(
        "port in use",
        lambda s: s.listen(s.ports["cm"]),
        AddressError,
        "[Errno 98] cannot … {host}:{ports[cm]}: …: Address already in use",
    ),
    Mistake(
        "port in use, tcp",
        lambda s: s.listen(s.ports["tcp"], "tcp"),
        AddressError,
        "[Errno 98] cannot listen on {host}:{ports[tcp]}: Address already in use",
    ),
    # ---- streams ----
    Mistake(
        "port of no service",
        lambda s: s.open_stream("no-such-service"),
        AddressError,
        "[Errno 99] port 'no-such-service' is neither a number nor a known service",
    ),
    *(
        Mistake(
            f"{name}, {said}",
            functools.partial(make, value=value),
            (TypeError, ValueError),
            f"limit is an int from 1 to 2^64 - 1, not {said}",
        )
        for name, make in (
            ("limit of a stream", lambda s, value: s.open_stream(s.ports["cm"], limit=value)),
            ("limit of a server", lambda s, value: s.stream_server(noop, limit=value)),
        )
        for value, said in (("5", "str '5'"), (0, "0"), (2.5, "float 2.5…"), (None, "None"))
    ),
    *(
        Mistake(
            f"{name}, {said}",
            functools.partial(make, value=value),
            TypeError,
            "protocol_factory is a function that returns a protocol, as a class of "
            f"asyncio.Protocol, not {said}",
        )
        for name, make in (
            ("factory of a client", lambda s, value: s.attach(value)),
            ("factory of a server", lambda s, value: s.serve(value)),
        )
        for value, said in ((5, "int 5"), (None, "None"), (asyncio.Protocol(), "Protocol …"))
    ),
    Mistake(
        "factory of no protocol",
        lambda s: s.attach(object),
        TypeError,
        "what the factory returns is a protocol of asyncio, not object …",
    ),
    Mistake(
        "handler of streams, none",
        lambda s: s.stream_server(None),
        TypeError,
        "the handler is a function of a reader and a writer, not None",
    ),
    Mistake(
        "handler of a connection",
        lambda s: s.stream_server(answer_alone),
        TypeError,
        "the handler <function answer_alone …> is called with a reader and a writer: too many "
        "positional arguments",
    ),
    Mistake(
        "start_serving as text",
        lambda s: s.serve(asyncio.Protocol, start_serving="no"),
        TypeError,
        "start_serving is True or False, not str 'no'",
    ),
    Mistake(
        "host of a certificate",
        lambda s: s.open_stream(s.ports["stream cm"], ssl=True, server_hostname=5),
        TypeError,
        "server_hostname is a str, the name in the server's certificate, not int 5",
    ),
    *(
        Mistake(
            f"sendfile, {text:.12}",
            functools.partial(lambda s, part: s.sendfile(*part), part=part),
            (TypeError, ValueError),
            text,
        )
        for part, text in (
            (("name",), "'name' is no regular file: read it, and use write()"),
            ((io.BytesIO(b"x"),), "<…> is no regular file: read it, and use write()"),
            ((None, "0"), "offset is an int from 0 to 2^64 - 1, not str '0'"),
            ((None, 0, 0), "count is an int from 1 to 2^64 - 1, not 0"),
        )
    ),
    # ---- another kind of peer ----
    Mistake(
        "tcp at a listener of cm",
        lambda s: s.connect(port=s.ports["cm"], via="tcp"),
        (ProtocolError, RejectedError),
        OTHER_TCP,
    ),
    Mistake(
        "cm at a listener of tcp",
        lambda s: s.connect(port=s.ports["tcp"], via="cm"),
        ConnectionManagerError,  # also RejectedError: whether the listener answers or hangs up
        OTHER_CM,
    ),
    Mistake(
        "web server, tcp",
        lambda s: s.connect(port=s.ports["web"], via="tcp"),
        ProtocolError,
        "{host}:{ports[web]} does not speak aiordma's bootstrap: a web server answers; it sent "
        'b\'HTTP/1.1\'; is an aiordma listener running there, with via="tcp" and not "cm"?',
    ),
    Mistake(
        "web server, cm",
        lambda s: s.connect(port=s.ports["web"], via="cm"),
        ConnectionManagerError,
        OTHER_CM,
    ),
    *(
        mistake
        for via in ("cm", "tcp")
        for mistake in (
            Mistake(
                f"messages at a stream server, {via}",
                functools.partial(
                    lambda s, via: s.connect(port=s.ports[f"stream {via}"], via=via), via=via
                ),
                ProtocolError,
                f"{{host}}:{{ports[stream {via}]}} has {STREAMS}, this side {MESSAGES}: use the "
                f"same kind on both",
            ),
            Mistake(
                f"stream at a message server, {via}",
                functools.partial(lambda s, via: s.open_stream(s.ports[via], via), via=via),
                ProtocolError,
                f"{{host}}:{{ports[{via}]}} has {MESSAGES}, this side {STREAMS}: use the same kind "
                f"on both",
            ),
        )
    ),
]


async def answer_alone(conn: Connection) -> None:
    """A handler of messages."""


async def answer_in_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    writer.close()


@asynccontextmanager
async def scene(factory: ConnectionFactory) -> AsyncIterator[Scene]:
    host, device = factory.host, factory.device
    async with (
        await aiordma.listen(host, device=device, via="cm") as by_cm,
        await aiordma.listen(host, device=device, via="tcp") as by_tcp,
        await aiordma.start_stream_server(noop, host, device=device, via="cm") as streams_cm,
        await aiordma.start_stream_server(noop, host, device=device, via="tcp") as streams_tcp,
        await asyncio.start_server(answer_in_http, host) as web,
        factory.pair() as (client, server),
    ):
        with client.register(bytearray(64)) as local, server.register(bytearray(64)) as shared:
            await server.send_region(shared, access=Rights.READ | Rights.WRITE)
            ports = {
                "cm": by_cm.port,
                "tcp": by_tcp.port,
                "web": web.sockets[0].getsockname()[1],
                "stream cm": streams_cm.address[1],
                "stream tcp": streams_tcp.address[1],
            }
            yield Scene(factory, client, local, await client.recv_region(), ports)


def noop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A handler that does nothing."""


def matches(expected: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, expected.split("…"))), text) is not None


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
async def test_the_error_says_what_to_do(factory: ConnectionFactory, mistake: Mistake) -> None:
    async with scene(factory) as here, factory.within(5):
        with pytest.raises(mistake.error) as raised:
            await mistake.make(here)
        text = str(raised.value)
        host = host_port((factory.host, 0)).removesuffix(":0")
        expected = mistake.text.format(
            local=here.local, remote=here.remote, ports=here.ports, host=host
        )
        assert matches(expected, text), text
        assert text.count("[Errno") <= 1
        await here.conn.send(b"")  # none of them costs the connection


NO_HOSTS = [
    *("..", ".", "a..b", "x" * 64, "\xfc" * 63, "\ud800", "a\0b", "127.0.0.1\n", "[::1]"),
    *("fe80::1%", "fe80::1%nowhere7", "fe80::1%4294967296", "fe80::1%\u0663"),
]


@pytest.mark.parametrize("host", NO_HOSTS, ids=ascii)
async def test_what_cannot_be_a_host(factory: ConnectionFactory, host: str) -> None:
    """One kind of error, however the name is used."""
    where: Any = {"device": factory.device, "config": PATIENT}
    handler: Any = noop
    for use in (
        partial(aiordma.connect, host, 1),
        partial(aiordma.connect, factory.host, 1, source=(host, 0)),
        partial(aiordma.listen, host),
        partial(aiordma.start_server, AsyncMock(), host),
        partial(aiordma.start_stream_server, handler, host, 0),
        partial(aiordma.open_connection, host, 1),
        partial(aiordma.prepare_connection, address=host),
    ):
        error = await ends(use(**where), AddressError)
        assert repr(host) in str(error)


async def test_a_source_of_the_other_family(factory: ConnectionFactory) -> None:
    other = "127.0.0.1" if ":" in factory.host else "::1"
    for via in ("cm", "tcp"):
        connecting = aiordma.connect(
            factory.host, 1, source=(other, 0), device=factory.device, via=via
        )
        assert "Address family for hostname" in str(await ends(connecting, AddressError))


@pytest.mark.parametrize("port", ["\u0663", "no-such-service", b"\xff", "\ud800", "1\0"])
async def test_what_cannot_be_the_port_of_a_stream(factory: ConnectionFactory, port: Any) -> None:
    opening = aiordma.open_connection(factory.host, port, device=factory.device)
    assert f"port {port!r} is neither a number nor" in str(await ends(opening, AddressError))


# ---- running out of something --------------------------------------------------------------------


def no_memory(*_: object, **__: object) -> Any:
    raise VerbsError(errno.ENOMEM, "ibv_reg_mr")


async def test_no_memory_for_a_long_message_is_no_fault_of_the_peer(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver is told; message and connection stay."""
    data = pattern(3 << 20)
    async with factory.pair(PATIENT) as (client, server), factory.within(5):
        with client.register(data) as region:
            sending = client.send_nowait(region)
            with monkeypatch.context() as patch:
                patch.setattr(ProtectionDomain, "reg_mr", no_memory)
                for _ in range(2):
                    failed = await ends(server.recv(), VerbsError)
                    assert str(failed) == "[Errno 12] ibv_reg_mr: Cannot allocate memory"
            with await server.recv() as message:
                assert message == data
            await sending
        await exchange(server, client, b"goes on")


@pytest.mark.parametrize("via", ["cm", "tcp"])
async def test_no_memory_at_the_listener_is_its_failure(
    factory: ConnectionFactory, via: Via, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads what has happened there, and not that the protocol was violated."""
    host, device = factory.host, factory.device
    async with await aiordma.listen(host, device=device, via=via) as listener, factory.within(5):
        monkeypatch.setattr(Acceptor, "take_place", no_memory)
        refused = await ends(
            aiordma.connect(host, listener.port, device=device, via=via, config=PATIENT),
            RejectedError,
        )
        text = "the listener's machine failed: ibv_reg_mr: Cannot allocate memory"
        assert text in str(refused), refused
        assert str(refused).count("[Errno") == 1


async def test_no_more_files_is_not_the_way_to_the_peer(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma._transport.tcp_link.socket.socket", no_files)
    connecting = aiordma.connect(factory.host, 1, device=factory.device, via="tcp")
    error = await ends(connecting, VerbsError)
    host = host_port((factory.host, 1))
    assert str(error).startswith(
        f"[Errno 24] socket: Too many open files; to {host}; this process may have "
    )


async def test_a_timeout_says_that_there_are_no_more_files(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever failed because of that, in the device or the kernel: the timeout alone is seen."""
    silent = socket.create_server((factory.host, 0))
    brief = Config(connect_timeout=0.01)
    port = silent.getsockname()[1]
    with silent:
        without = await ends(
            aiordma.connect(factory.host, port, device=factory.device, via="tcp", config=brief),
            UnreachableError,
        )
        assert "open no more files" not in str(without)
        monkeypatch.setattr(os, "open", no_files)
        with_hint = await ends(
            aiordma.connect(factory.host, port, device=factory.device, via="tcp", config=brief),
            UnreachableError,
        )
    assert "within 0.01 seconds; this process can open no more files: " in str(with_hint)


def no_files(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
