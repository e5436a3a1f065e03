"""A Redis client against a Redis server, which knows nothing of RDMA: a relay stands before it.

client -- RDMA --> relay -- TCP --> redis-server
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

import aiordma
from aiordma import streams


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    """The TCP port of a Redis server without persistence, on loopback."""
    program = shutil.which("redis-server")
    assert program, "redis-server is not installed; on Debian: apt-get install redis-server"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    with subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "eady to accept connections" in line:
                break
        else:
            raise AssertionError("redis-server ended before it was ready")
        yield port
        server.terminate()
        server.stdout.read()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(256 << 10):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Relay both directions until both have ended."""
    plain = socket.socket()
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
    onward_reader, onward_writer = await asyncio.open_connection(sock=plain)
    try:
        await asyncio.gather(copy(reader, onward_writer), copy(onward_reader, writer))
    finally:
        for one in (onward_writer, writer):
            one.close()
            await one.wait_closed()


async def test_commands_pipelines_and_large_values(
    host: str, device_name: str, redis_port: int
) -> None:
    relays: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        relays.add(task)
        await relay(reader, writer, redis_port)

    async with await streams.start_stream_server(serve, host, device=device_name) as server:
        client = redis.asyncio.Redis(host=host, port=server.address[1])
        assert await client.ping()
        value = bytes(range(256)) * 20_000
        await client.set("large", value)
        assert await client.get("large") == value
        async with client.pipeline() as pipeline:
            for number in range(500):
                pipeline.incrby("sum", number)
            results = await pipeline.execute()
        assert results[-1] == sum(range(500))
        with pytest.raises(ResponseError):
            await client.incr("large")
        pool: Any = client.connection_pool
        connection = await pool.get_connection()
        carrier = connection._writer.transport.get_extra_info("connection")
        assert isinstance(carrier, aiordma.Connection)
        await pool.release(connection)
        await client.aclose()
    await asyncio.gather(*relays)  # each ends a little later than its connection
