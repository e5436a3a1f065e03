"""Test an unchanged WebSocket server and client (websockets) on a loop with RDMA."""

from __future__ import annotations

import random
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosedOK

from aiordma import Connection

NO_LIMITS: Any = {"open_timeout": None, "ping_timeout": None, "close_timeout": None}


async def test_websockets_exchanges_messages_of_every_size(host: str) -> None:
    async def handler(socket: ServerConnection) -> None:
        async for message in socket:
            await socket.send(message)

    data = random.Random(1)
    async with serve(handler, host, 0, max_size=None, **NO_LIMITS) as server:
        (listening,) = server.sockets
        port = listening.getsockname()[1]
        async with connect(f"ws://{host}:{port}", max_size=None, proxy=None, **NO_LIMITS) as socket:
            carrier = socket.transport.get_extra_info("connection")
            assert isinstance(carrier, Connection)
            for size in (0, 1, 125, 126, 65535, 65536, 3_000_000):
                message = data.randbytes(size)
                await socket.send(message)
                assert await socket.recv() == message
            await socket.send("text é")
            assert await socket.recv() == "text é"
            await (await socket.ping())
            await socket.close()
            assert carrier.statistics().messages_sent > 0
            with pytest.raises(ConnectionClosedOK):
                await socket.recv()
