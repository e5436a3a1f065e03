"""Test an HTTP server and client (aiohttp).

The client connects its own sockets by `loop.sock_connect`, for which the loop makes streams.
"""

from __future__ import annotations

import hashlib
import io
import random
import ssl

import pytest
import trustme
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from aiohttp.client_exceptions import ClientConnectionError


@pytest.fixture
def application() -> web.Application:
    async def digest(request: web.Request) -> web.Response:
        whole = hashlib.sha256()
        async for part in request.content.iter_any():
            whole.update(part)
        assert request.transport is not None
        over = type(request.transport.get_extra_info("connection")).__name__
        return web.json_response(
            {"sha256": whole.hexdigest(), "host": request.remote, "over": over}
        )

    async def download(request: web.Request) -> web.StreamResponse:
        size = int(request.match_info["size"])
        response = web.StreamResponse()
        await response.prepare(request)
        source = random.Random(size)
        for start in range(0, size, 100_000):
            await response.write(source.randbytes(min(100_000, size - start)))
        await response.write_eof()
        return response

    application = web.Application(client_max_size=1 << 30)
    application.router.add_post("/digest", digest)
    application.router.add_get("/download/{size}", download)
    return application


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_aiohttp_uploads_and_downloads_over_rdma(
    host: str, application: web.Application, scheme: str
) -> None:
    serving = trusting = None
    if scheme == "https":
        authority = trustme.CA()
        serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(host).configure_cert(serving)
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)

    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, host, 0, ssl_context=serving)
    await site.start()
    url = f"{scheme}://{host}:{runner.addresses[0][1]}"
    connector = TCPConnector(limit=4, ssl=trusting or True)
    async with ClientSession(connector=connector, timeout=ClientTimeout()) as session:
        for size in (0, 1, 10_000, 5_000_000):
            body = random.Random(size).randbytes(size)
            async with session.post(f"{url}/digest", data=io.BytesIO(body)) as response:
                answer = await response.json()
            assert answer["sha256"] == hashlib.sha256(body).hexdigest()
            assert answer == {**answer, "host": host, "over": "Connection"}
            async with session.get(f"{url}/download/{size}") as response:
                received = await response.read()
            source = random.Random(size)
            expected = b"".join(
                source.randbytes(min(100_000, size - start)) for start in range(0, size, 100_000)
            )
            assert received == expected
        async with session.get(f"{url}/nowhere") as response:
            assert response.status == 404
        await runner.cleanup()
        with pytest.raises((ClientConnectionError, ConnectionError)):
            await session.get(f"{url}/download/1")
