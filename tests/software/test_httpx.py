"""Tests of an HTTP server (uvicorn) and client (httpx, on anyio)."""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import trustme
import uvicorn

from aiordma import streams
from tests.transport.connection_factory import yield_loop


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Respond with the digest of the request body and the client's address."""
    assert scope["type"] == "http"
    whole, more = hashlib.sha256(), True
    while more:
        message = await receive()
        whole.update(message.get("body", b""))
        more = message.get("more_body", False)
    text = f"{whole.hexdigest()} {scope['client'][0]} {scope['client'][1]}"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": text.encode()})


@asynccontextmanager
async def serving(host: str, **options: Any) -> AsyncIterator[int]:
    """Run a server and provide its port."""
    config = uvicorn.Config(application, host, 0, lifespan="off", log_config=None, **options)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    (listening,) = server.servers
    assert isinstance(listening, streams.StreamServer)
    try:
        yield listening.address[1]
    finally:
        await server.shutdown()


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_httpx_reuses_a_single_connection_for_requests(
    host: str, scheme: str, http: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {}
    trusting = ssl.create_default_context()
    if scheme == "https":
        authority = trustme.CA()
        certificate = authority.issue_cert(host)
        authority.configure_trust(trusting)
        key, chain = tmp_path / "key", tmp_path / "chain"
        certificate.private_key_pem.write_to_path(key)
        for pem in certificate.cert_chain_pems:
            pem.write_to_path(chain, append=True)
        options = {"ssl_keyfile": str(key), "ssl_certfile": str(chain)}
    seen = set()
    async with (
        serving(host, http=http, **options) as port,
        httpx.AsyncClient(trust_env=False, timeout=None, verify=trusting) as client,
    ):
        for size in (0, 1, 10_000, 5_000_000):
            body = random.Random(size).randbytes(size)
            answer = await client.post(f"{scheme}://{host}:{port}/", content=body)
            digest, *peer = answer.text.split()
            assert digest == hashlib.sha256(body).hexdigest()
            seen.add(tuple(peer))
    ((peer_host, _),) = seen  # all requests used the same connection
    assert peer_host == host


async def test_httpx_detects_that_an_idle_connection_was_closed(host: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        async with serving(host) as port:
            await client.get(f"http://{host}:{port}/")
            used = client._transport._pool.connections[0]  # type: ignore[attr-defined]
            assert not used.has_expired()
        while not used.has_expired():
            await yield_loop(1)


async def test_anyio_stream_delivers_sent_data_before_closing(host: str) -> None:
    """anyio's `aclose` aborts the transport."""
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.put_nowait(await reader.read())
        writer.close()

    async with await asyncio.start_server(serve, host, 0) as server:
        port = server.sockets[0].getsockname()[1]
        for size in (5, 100_000):
            stream = await anyio.connect_tcp(host, port)
            assert stream.extra(anyio.abc.SocketAttribute.remote_address) == (host, port)
            await stream.send(bytes(size))
            await stream.aclose()
            assert await got.get() == bytes(size)
