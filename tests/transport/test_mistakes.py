"""Test common mistakes and the errors that users get for them."""

from __future__ import annotations

import asyncio
import errno
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
from aiordma import Config, Connection, RemoteRegion, streams
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
    """A connection, memory of both sides, and the ports that accept connections."""

    factory: ConnectionFactory
    conn: Connection
    local: Region
    remote: RemoteRegion
    ports: dict[str, int]

    def at(self, call: Callable[..., Awaitable[object]], *more: Any, **options: Any) -> Any:
        """Call `call` with the scene's host and device. `options` override the defaults."""
        where: dict[str, Any] = {"device": self.factory.device, "config": PATIENT}
        return call(self.factory.host, *more, **(where | options))

    def serve(self, call: Callable[..., Awaitable[object]], what: Any, **options: Any) -> Any:
        """Start a server that passes its connections to `what`."""
        return call(what, self.factory.host, device=self.factory.device, **options)

    def attach(self, factory: Any) -> Any:
        return self.at(partial(aiordma.create_connection, factory), self.ports["stream cm"])

    async def sendfile(self, file: Any, *part: Any) -> None:
        transport, _ = await self.attach(asyncio.Protocol)
        try:
            await streams.sendfile(transport, file, *part)
        finally:
            transport.abort()

    async def register(self, memory: Any) -> None:
        self.conn.register(memory)

    async def batch(self, add: Callable[[Any], object]) -> None:
        async with self.conn.batch() as batch:
            add(batch)


class Series:
    """The part of a pandas or polars column that `send` inspects."""

    def to_numpy(self) -> None:
        """Do nothing. `send` only checks that this method exists."""


NOT_REMOTE = (
    "the peer's memory must be a RemoteRegion (recv_region, request_region, open_region) or a "
    "slice of one, not local memory: {local!r}"
)
NO_MEMORY = (
    "… cannot be used as memory, because it supports neither the buffer protocol nor DLPack; "
)
NOT_LOCAL = f"an …{NO_MEMORY}the memory belongs to the peer; use Connection.read or write"
TEXT = f"a str{NO_MEMORY}encode it with text.encode()"
NO_PORT = "port must be an int from 0 to 65535, not "
NO_FACTORY = (
    "protocol_factory must be a function that returns a protocol, such as a subclass of "
    "asyncio.Protocol, not "
)
OTHER_CM = '…; is an aiordma listener running there, with via="cm" and not "tcp"?'
OTHER_TCP = '…; is an aiordma listener running there, with via="tcp" and not "cm"?'
STREAMS = "byte streams (open_connection, create_connection, start_stream_server, create_server)"
MESSAGES = "messages (connect, listen, start_server)"
WRONG = (TypeError, ValueError)
Use = Callable[[Any], Awaitable[object]]
Kinds = type[BaseException] | tuple[type[BaseException], ...]


def sends(memory: Any) -> Use:
    return lambda s: s.conn.send(memory)


def connects(port: Any, *kinds: str, **options: Any) -> Use:
    call = aiordma.open_connection if "stream" in kinds else aiordma.connect
    return lambda s: s.at(call, s.ports.get(port, port), **options)


# Each entry lists the mistake, its exception types and its message. `…` matches any text.
MISTAKES: dict[str, tuple[Use, Kinds, str]] = {
    # ---- memory of the wrong side ----
    "write to local": (lambda s: s.conn.write(b"x" * 64, s.local), TypeError, NOT_REMOTE),
    "read from local": (lambda s: s.conn.read(s.local, s.local), TypeError, NOT_REMOTE),
    "swap, local": (lambda s: s.conn.compare_and_swap(s.local, 0, 1), TypeError, NOT_REMOTE),
    "add, local": (lambda s: s.conn.fetch_and_add(s.local, 1), TypeError, NOT_REMOTE),
    "batch of a local write": (
        lambda s: s.batch(lambda batch: batch.write(s.local, s.local)),
        TypeError,
        NOT_REMOTE,
    ),
    "hand over local": (lambda s: s.conn.hand_over(s.local), TypeError, NOT_REMOTE),
    "write from remote": (lambda s: s.conn.write(s.remote, s.remote), TypeError, NOT_LOCAL),
    "send remote": (lambda s: s.conn.send(s.remote), TypeError, NOT_LOCAL),
    "share remote": (
        lambda s: s.conn.send_region(s.remote),
        TypeError,
        "{remote!r} is not registered local memory (from Connection.register or alloc); use "
        "hand_over to return borrowed memory",
    ),
    # ---- no memory at all ----
    "register text": (lambda s: s.register("text"), TypeError, TEXT),
    "write text": (lambda s: s.conn.write("text", s.remote), TypeError, TEXT),
    **{
        f"send {name}": (sends(data), TypeError, f"{name}{NO_MEMORY}{hint}")
        for name, data, hint in (
            ("a str", "text", "encode it with text.encode()"),
            ("an int", 5, "pack it with number.to_bytes(8, 'little') or struct.pack('<d', number)"),
            ("a NoneType", None, "use b'' for an empty message"),
            ("a dict", {"a": 1}, "serialize it with json.dumps(value).encode() or …"),
            ("a pathlib.PosixPath", Path("/etc/hosts"), "read the file with path.read_bytes()"),
            ("a _io.BytesIO", io.BytesIO(b"x"), "pass the result of getbuffer()"),
            ("a builtin_function_or_method", io.BytesIO().read, "call it and pass the result"),
            ("a type", bytes, "pass an object instead of its class"),
            ("a tests.transport.test_mistakes.Series", Series(), "pass the result of to_numpy()"),
        )
    },
    # ---- addresses ----
    "port as text": (
        connects("7471"),
        TypeError,
        "port must be an int from 1 to 65535, not str '7471'",
    ),
    "listen at a port as text": (
        lambda s: s.at(aiordma.listen, "7471"),
        TypeError,
        f"{NO_PORT}str '7471'",
    ),
    "no host": (
        lambda s: aiordma.connect(None, 5, device=s.factory.device),  # type: ignore[arg-type]
        TypeError,
        "host must be a str such as '192.0.2.1' or 'server.example', not None",
    ),
    "source without a port": (
        connects("cm", source="127.0.0.1"),
        TypeError,
        "source must be a local (host, port) such as ('192.0.2.1', 0), not str '127.0.0.1'",
    ),
    "port in use": (
        lambda s: s.at(aiordma.listen, s.ports["cm"]),
        AddressError,
        "[Errno 98] cannot … {host}:{ports[cm]}: …: Address already in use",
    ),
    "port in use, tcp": (
        lambda s: s.at(aiordma.listen, s.ports["tcp"], via="tcp"),
        AddressError,
        "[Errno 98] cannot listen on {host}:{ports[tcp]}: Address already in use",
    ),
    # ---- streams ----
    "limit of a stream": (
        connects("cm", "stream", limit=0),
        WRONG,
        "limit must be an int from 1 to 2^64 - 1, not 0",
    ),
    "limit of a server": (
        lambda s: s.serve(aiordma.start_stream_server, noop, limit="5"),
        WRONG,
        "limit must be an int from 1 to 2^64 - 1, not str '5'",
    ),
    "factory of a client": (lambda s: s.attach(5), TypeError, f"{NO_FACTORY}int 5"),
    "factory of a server": (
        lambda s: s.serve(aiordma.create_server, asyncio.Protocol()),
        TypeError,
        f"{NO_FACTORY}Protocol …",
    ),
    "factory of no protocol": (
        lambda s: s.attach(object),
        TypeError,
        "the result of protocol_factory must be an asyncio protocol, not object …",
    ),
    "handler of streams, none": (
        lambda s: s.serve(aiordma.start_stream_server, None),
        TypeError,
        "the handler must be a function of a reader and a writer, not None",
    ),
    "handler of a connection": (
        lambda s: s.serve(aiordma.start_stream_server, answer_alone),
        TypeError,
        "the handler <function answer_alone …> must accept a reader and a writer: too many "
        "positional arguments",
    ),
    "start_serving as text": (
        lambda s: s.serve(aiordma.create_server, asyncio.Protocol, start_serving="no"),
        TypeError,
        "start_serving must be True or False, not str 'no'",
    ),
    "host of a certificate": (
        connects("stream cm", "stream", ssl=True, server_hostname=5),
        TypeError,
        "server_hostname must be a str, the name in the server's certificate, not int 5",
    ),
    "sendfile, bytes": (
        lambda s: s.sendfile(io.BytesIO(b"x")),
        ValueError,
        "<…> is not a regular file; read it and use write() instead",
    ),
    "sendfile, offset": (
        lambda s: s.sendfile(None, "0"),
        TypeError,
        "offset must be an int from 0 to 2^64 - 1, not str '0'",
    ),
    "sendfile, count": (
        lambda s: s.sendfile(None, 0, 0),
        ValueError,
        "count must be an int from 1 to 2^64 - 1, not 0",
    ),
    # ---- another kind of peer ----
    "tcp at a listener of cm": (
        connects("cm", via="tcp"),
        (ProtocolError, RejectedError),
        OTHER_TCP,
    ),
    # The listener may reject the request or disconnect. RejectedError is a ConnectionManagerError.
    "cm at a listener of tcp": (connects("tcp"), ConnectionManagerError, OTHER_CM),
    "web server, tcp": (
        connects("web", via="tcp"),
        ProtocolError,
        "{host}:{ports[web]} does not use the aiordma bootstrap: a web server responded; it sent "
        'b\'HTTP/1.1\'; is an aiordma listener running there, with via="tcp" and not "cm"?',
    ),
    "web server, cm": (connects("web"), ConnectionManagerError, OTHER_CM),
    **{
        f"{kind} at {port}": (
            connects(port, kind, via=port[-3:].strip()),
            ProtocolError,
            f"{{host}}:{{ports[{port}]}} uses {there}, but this side uses {here}: use the "
            "same interface on both sides",
        )
        for kind, port, there, here in (
            ("messages", "stream cm", STREAMS, MESSAGES),
            ("messages", "stream tcp", STREAMS, MESSAGES),
            ("stream", "cm", MESSAGES, STREAMS),
            ("stream", "tcp", MESSAGES, STREAMS),
        )
    },
}


async def answer_alone(conn: Connection) -> None:
    """Do nothing, with the signature of a message handler."""


async def answer_in_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    writer.close()


@asynccontextmanager
async def scene(factory: ConnectionFactory) -> AsyncIterator[Scene]:
    host = factory.host
    where: Callable[..., Any] = partial(dict, device=factory.device)
    async with (
        await aiordma.listen(host, **where(via="cm")) as cm,
        await aiordma.listen(host, **where(via="tcp")) as tcp,
        await aiordma.start_stream_server(noop, host, **where(via="cm")) as stream_cm,
        await aiordma.start_stream_server(noop, host, **where(via="tcp")) as stream_tcp,
        await asyncio.start_server(answer_in_http, host) as web,
        factory.sharing(64) as (client, _, _, remote),
    ):
        ports = {
            "cm": cm.port,
            "tcp": tcp.port,
            "web": web.sockets[0].getsockname()[1],
            "stream cm": stream_cm.address[1],
            "stream tcp": stream_tcp.address[1],
        }
        with client.register(bytearray(64)) as local:
            yield Scene(factory, client, local, remote, ports)


def noop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Do nothing."""


def matches(expected: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, expected.split("…"))), text) is not None


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_common_mistake_raises_an_error_with_advice(
    factory: ConnectionFactory, mistake: str
) -> None:
    make, kinds, expected = MISTAKES[mistake]
    async with scene(factory) as here:
        with pytest.raises(kinds) as raised:
            await make(here)
        text = str(raised.value)
        host = host_port((factory.host, 0)).removesuffix(":0")
        expected = expected.format(**here._asdict(), host=host)
        assert matches(expected, text), text
        assert text.count("[Errno") <= 1
        await here.conn.send(b"")  # no mistake breaks the connection


NO_HOSTS = [
    *("..", ".", "a..b", "x" * 64, "\xfc" * 63, "\ud800", "a\0b", "127.0.0.1\n", "[::1]"),
    *("fe80::1%", "fe80::1%nowhere7", "fe80::1%4294967296", "fe80::1%\u0663"),
]


@pytest.mark.parametrize("host", NO_HOSTS, ids=ascii)
async def test_invalid_host_raises_address_error(factory: ConnectionFactory, host: str) -> None:
    """Every function that takes a host raises the same kind of error."""
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


async def test_connect_raises_address_error_when_source_family_differs(
    factory: ConnectionFactory,
) -> None:
    other = "127.0.0.1" if ":" in factory.host else "::1"
    for via in ("cm", "tcp"):
        connecting = aiordma.connect(
            factory.host, 1, source=(other, 0), device=factory.device, via=via
        )
        assert "Address family for hostname" in str(await ends(connecting, AddressError))


@pytest.mark.parametrize("port", ["\u0663", "no-such-service", b"\xff", "\ud800", "1\0"])
async def test_invalid_stream_port_raises_address_error(
    factory: ConnectionFactory, port: Any
) -> None:
    opening = aiordma.open_connection(factory.host, port, device=factory.device)
    assert f"invalid port {port!r}: expected a number or" in str(await ends(opening, AddressError))


# ---- running out of something --------------------------------------------------------------------


def no_memory(*_: object, **__: object) -> Any:
    raise VerbsError(errno.ENOMEM, "ibv_reg_mr")


async def test_recv_can_be_retried_after_registration_runs_out_of_memory(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver gets the error and may try again."""
    data = pattern(3 << 20)
    async with factory.pair(PATIENT) as (client, server):
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
async def test_client_error_reports_that_the_listener_ran_out_of_memory(
    factory: ConnectionFactory, via: Via, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client must not be told that the protocol was violated."""
    host, device = factory.host, factory.device
    async with await aiordma.listen(host, device=device, via=via) as listener:
        monkeypatch.setattr(Acceptor, "reserve_place", no_memory)
        refused = await ends(
            aiordma.connect(host, listener.port, device=device, via=via, config=PATIENT),
            RejectedError,
        )
        text = "the listener's host failed: ibv_reg_mr: Cannot allocate memory"
        assert text in str(refused), refused
        assert str(refused).count("[Errno") == 1


async def test_connect_error_reports_the_open_files_limit(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiordma._transport.tcp_link.socket.socket", no_files)
    connecting = aiordma.connect(factory.host, 1, device=factory.device, via="tcp")
    error = await ends(connecting, VerbsError)
    host = host_port((factory.host, 1))
    assert str(error).startswith(
        f"[Errno 24] socket: Too many open files; to {host}; the limit on open files "
    )


async def test_connect_timeout_reports_exhausted_file_descriptors(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the timeout is visible here, whether the device or the kernel needed the descriptor."""
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
    assert "within 0.01 seconds; this process cannot open more files: " in str(with_hint)


def no_files(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
