"""An HTTP server and client (aiohttp).

The server is given to `create_server`, which is all that aiohttp needs.  Its client connects by
what it calls a connector, whose one method says how.
"""

from __future__ import annotations

import hashlib
import io
import random
import ssl
from typing import Any

import pytest
import trustme
from aiohttp import BaseConnector, ClientSession, ClientTimeout, web
from aiohttp.client_exceptions import ClientConnectionError

import aiordma

from .conftest import PATIENT


class RDMAConnector(BaseConnector):
    async def _create_connection(self, req: Any, *others: Any) -> Any:
        _, protocol = await aiordma.create_connection(
            self._factory,
            req.url.host,
            req.url.port,
            device=self.device,
            config=PATIENT,
            ssl=self.tls,
        )
        return protocol

    device: str
    tls: ssl.SSLContext | None = None


@pytest.fixture
def application() -> web.Application:
    async def digest(request: web.Request) -> web.Response:
        whole = hashlib.sha256()
        async for part in request.content.iter_any():
            whole.update(part)
        return web.json_response({"sha256": whole.hexdigest(), "host": request.remote})

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
async def test_uploads_and_downloads(
    host: str, device_name: str, application: web.Application, scheme: str
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
    assert runner.server is not None
    server = await aiordma.create_server(
        runner.server, host, device=device_name, config=PATIENT, ssl=serving
    )
    url = f"{scheme}://{host}:{server.address[1]}"
    connector = RDMAConnector(limit=4)
    connector.device, connector.tls = device_name, trusting
    async with ClientSession(connector=connector, timeout=ClientTimeout()) as session:
        for size in (0, 1, 10_000, 5_000_000):
            body = random.Random(size).randbytes(size)
            async with session.post(f"{url}/digest", data=io.BytesIO(body)) as response:
                answer = await response.json()
            assert answer["sha256"] == hashlib.sha256(body).hexdigest()
            assert answer["host"] == host
            async with session.get(f"{url}/download/{size}") as response:
                received = await response.read()
            source = random.Random(size)
            expected = b"".join(
                source.randbytes(min(100_000, size - start)) for start in range(0, size, 100_000)
            )
            assert received == expected
        async with session.get(f"{url}/nowhere") as response:
            assert response.status == 404
        server.close()
        await runner.cleanup()
        await server.wait_closed()
        with pytest.raises((ClientConnectionError, ConnectionError)):
            await session.get(f"{url}/download/1")
