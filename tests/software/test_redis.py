"""Test a Redis client with a Redis server behind an RDMA relay.

The server does not use RDMA:

    client -- RDMA --> relay -- Unix socket --> redis-server
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

import aiordma
from aiordma import streams

from .conftest import PATIENT


@pytest.fixture
def redis_socket(tmp_path: Path) -> Iterator[Path]:
    """Provide the Unix socket of a Redis server. A TCP port might already be in use."""
    program = shutil.which("redis-server")
    assert program, "redis-server is not installed; on Debian: apt-get install redis-server"
    path = tmp_path / "redis"
    with subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "eady to accept connections" in line:
                break
        else:
            raise AssertionError("redis-server ended before it was ready")
        yield path
        server.terminate()
        server.stdout.read()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(256 << 10):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to: Path) -> None:
    """Relay data in both directions until both streams end."""
    onward_reader, onward_writer = await asyncio.open_unix_connection(to)
    try:
        await asyncio.gather(copy(reader, onward_writer), copy(onward_reader, writer))
    finally:
        for one in (onward_writer, writer):
            one.close()
            await one.wait_closed()


async def test_redis_client_works_through_the_rdma_relay(
    host: str, device_name: str, redis_socket: Path
) -> None:
    relays: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        relays.add(task)
        await relay(reader, writer, redis_socket)

    async with await streams.start_stream_server(
        serve, host, device=device_name, config=PATIENT
    ) as server:
        client = redis.asyncio.Redis(
            host=host, port=server.address[1], socket_timeout=None, socket_connect_timeout=None
        )
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
    await asyncio.gather(*relays)  # a relay ends slightly later than its connection
