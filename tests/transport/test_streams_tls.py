"""Test TLS over streams, with asyncio's own TLS protocol."""

from __future__ import annotations

import asyncio
import io
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trustme

from aiordma import Config, Connection, ConnectionBrokenError, streams
from aiordma.errors import host_port

from .connection_factory import (
    SMALL,
    ConnectionFactory,
    ends,
    pattern,
    when_limits_pass,
    yield_loop,
)
from .marks import one_loop

pytestmark = pytest.mark.any_device

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def serving(authority: trustme.CA, peer_host: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(peer_host, "server.example").configure_cert(context)
    return context


@pytest.fixture
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echo all data until the client closes."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@asynccontextmanager
async def server(
    factory: ConnectionFactory, context: ssl.SSLContext | None, config: Config = SMALL
) -> AsyncIterator[int]:
    """Run an echo server and yield its port."""
    made = await streams.start_stream_server(
        echo, factory.host, config=config, ssl=context, **factory.there
    )
    async with made:
        try:
            yield made.address[1]
        finally:
            made.abort_clients()


async def dialled(factory: ConnectionFactory, port: int, **tls: Any) -> Streams:
    return await streams.open_connection(factory.host, port, config=SMALL, **tls, **factory.where)


async def exchange_data(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for size in (1, 1000, 300_000):
        data = pattern(size)
        writer.write(data)
        assert await reader.readexactly(size) == data


async def read_until_closed(reader: asyncio.StreamReader) -> None:
    """Read until the other side closes or resets the connection. It may send an alert first."""
    with suppress(ConnectionError):
        while await reader.read(4096):
            pass


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def test_tls_stream_transfers_encrypted_data(
    factory: ConnectionFactory, serving: ssl.SSLContext, trusting: ssl.SSLContext
) -> None:
    async with server(factory, serving) as port:
        reader, writer = await dialled(factory, port, ssl=trusting)
        tls = writer.get_extra_info("ssl_object")
        assert tls.version() == "TLSv1.3"
        assert ("IP Address", factory.host) in tls.getpeercert()["subjectAltName"]
        conn = writer.get_extra_info("connection")
        assert isinstance(conn, Connection)
        before = conn.statistics().bytes_sent
        await exchange_data(reader, writer)
        assert conn.statistics().bytes_sent - before > 301_001  # including the TLS overhead
        with pytest.raises(ValueError, match="not supported on TLS streams"):
            await streams.sendfile(writer.transport, io.BytesIO())
        await hang_up(writer)


async def test_untrusted_server_raises_certificate_error(
    factory: ConnectionFactory, serving: ssl.SSLContext, trusting: ssl.SSLContext
) -> None:
    """The server must continue to serve other clients."""
    async with server(factory, serving) as port:
        for wrong in (
            {"ssl": True},
            {"ssl": ssl.create_default_context()},
            {"ssl": trusting, "server_hostname": "another.example"},
        ):
            await ends(dialled(factory, port, **wrong), ssl.SSLCertVerificationError)
        for right in ({"ssl": trusting}, {"ssl": trusting, "server_hostname": "server.example"}):
            reader, writer = await dialled(factory, port, **right)
            await exchange_data(reader, writer)
            await hang_up(writer)


NO_TLS = (
    "the server of this stream uses TLS, but its client does not: "
    "pass ssl= on both sides or on neither"
)


@one_loop
@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"x", b"\x15\x03\x01"])
async def test_ssl_server_reports_missing_tls_to_both_sides_on_plain_text(
    factory: ConnectionFactory,
    serving: ssl.SSLContext,
    caplog: pytest.LogCaptureFixture,
    data: bytes,
) -> None:
    async with server(factory, serving) as port:
        reader, writer = await dialled(factory, port)
        writer.write(data)
        error = await ends(reader.read(), ConnectionBrokenError)
        writer.close()
    assert str(error).endswith(f"the peer aborted the connection (code 2): {NO_TLS}")
    assert f"open>: {NO_TLS}" in caplog.text


@one_loop
async def test_ssl_server_reports_missing_tls_when_handshake_times_out(
    factory: ConnectionFactory, serving: ssl.SSLContext
) -> None:
    async with await streams.start_stream_server(
        echo, factory.host, config=SMALL, ssl=serving, **factory.there
    ) as made:
        reader, writer = await dialled(factory, made.address[1])
        while not made._transports:
            await yield_loop(1)
        error = await when_limits_pass(ends(reader.read(), ConnectionBrokenError))
        writer.close()
    assert str(error).endswith(f"the peer aborted the connection (code 2): {NO_TLS}")


async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 server.example\r\n")
    writer.close()


async def leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@one_loop
@pytest.mark.parametrize("handler", [echo, greet, leave])
async def test_ssl_client_error_mentions_ssl_mismatch_for_plain_server(
    factory: ConnectionFactory, trusting: ssl.SSLContext, handler: Any
) -> None:
    async with await streams.start_stream_server(
        handler, factory.host, config=SMALL, **factory.there
    ) as made:
        port = made.address[1]
        error = await ends(
            dialled(factory, port, ssl=trusting),
            ssl.SSLError,
            ConnectionResetError,
            ConnectionBrokenError,
        )
        made.abort_clients()
    where = re.escape(host_port((factory.host, port)))
    assert re.fullmatch(
        rf"the TLS handshake with {where} failed: .+; pass ssl= on both sides or on neither",
        str(error),
    )


@one_loop
async def test_ssl_client_error_mentions_ssl_mismatch_when_server_is_silent(
    factory: ConnectionFactory, trusting: ssl.SSLContext
) -> None:
    connected = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await read_until_closed(reader)
        writer.close()

    async with await streams.start_stream_server(
        wait, factory.host, config=SMALL, **factory.there
    ) as made:
        dialling = dialled(factory, made.address[1], ssl=trusting)
        ending = asyncio.create_task(ends(dialling, ConnectionAbortedError))
        await connected.wait()
        error = await when_limits_pass(ending)
        made.abort_clients()
    assert str(error).endswith("aborting the connection; pass ssl= on both sides or on neither")


@one_loop
async def test_invalid_ssl_context_raises_before_connecting(factory: ConnectionFactory) -> None:
    for wrong in ("yes", 1):
        await ends(dialled(factory, 1, ssl=wrong), TypeError)
    with pytest.raises(TypeError, match="certificate"):
        await streams.create_server(asyncio.Protocol, factory.host, ssl=True)
    for none in (None, False):
        error = await ends(
            dialled(factory, 1, ssl=none, server_hostname="server.example"), ValueError
        )
        assert "server_hostname 'server.example'" in str(error)
