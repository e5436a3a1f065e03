"""Tests of the connection classes with a real server: commands, values, pub/sub, disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio
import valkey.asyncio
import valkey_aiordma.redis
import valkey_aiordma.valkey
from valkey.asyncio.retry import Retry
from valkey.backoff import NoBackoff
from valkey.exceptions import ConnectionError as ValkeyConnectionError
from valkey.exceptions import ResponseError
from valkey_aiordma import stream

from .conftest import HOST, Server


@asynccontextmanager
async def client(server: Server, **options: Any) -> AsyncIterator[Any]:
    pool = valkey.asyncio.ConnectionPool(
        connection_class=valkey_aiordma.valkey.RDMAConnection,
        host=HOST,
        port=server.port,
        **{"socket_timeout": None, **options},
    )
    client = valkey.asyncio.Valkey.from_pool(pool)
    try:
        yield client
    finally:
        await client.aclose()


def value(size: int, number: int) -> bytes:
    """Return `size` bytes of numbered records, so that misplaced data is detected."""
    pattern = b"".join(b"%07x " % (number * 1_000_003 + i) for i in range(1024))
    return (pattern * (size // len(pattern) + 1))[:size]


@pytest.mark.parametrize("protocol", [2, 3])
async def test_client_runs_commands_with_resp2_and_resp3(server: Server, protocol: int) -> None:
    async with client(server, protocol=protocol, decode_responses=True) as one:
        assert await one.ping()
        assert await one.set("key", "value")
        assert await one.get("key") == "value"
        await one.hset("hash", mapping={"a": 1, "b": 2})
        assert await one.hgetall("hash") == {"a": "1", "b": "2"}
        with pytest.raises(ResponseError):
            await one.incr("key")
        clients = await one.client_list()
        assert [it["lib-name"] for it in clients] == ["valkey-py"]


async def test_redis_py_runs_commands_over_rdma_connections(server: Server) -> None:
    pool = redis.asyncio.ConnectionPool(
        connection_class=valkey_aiordma.redis.RDMAConnection, host=HOST, port=server.port
    )
    one: Any = redis.asyncio.Redis.from_pool(pool)
    large = value(3 << 20, 7)
    await one.set("large", large)
    assert await one.get("large") == large
    async with one.pipeline() as pipeline:
        results = await pipeline.incr("n").incr("n").get("n").execute()
    assert results == [1, 2, b"2"]
    await one.aclose()


async def test_pipelines_return_every_result(server: Server) -> None:
    async with client(server) as one:
        async with one.pipeline(transaction=False) as pipeline:
            for number in range(5000):
                pipeline.incrby("sum", number)
            assert (await pipeline.execute())[-1] == sum(range(5000))
        async with one.pipeline(transaction=True) as pipeline:
            for number in range(50):
                pipeline.set(f"key{number}", value(20_000, number))
            assert all(await pipeline.execute())
        async with one.pipeline(transaction=False) as pipeline:
            for number in range(50):
                pipeline.get(f"key{number}")
            assert await pipeline.execute() == [value(20_000, n) for n in range(50)]


async def test_pipeline_larger_than_both_buffers_completes(server: Server) -> None:
    """The client writes the whole pipeline before it starts reading the responses."""
    async with client(server) as one, one.pipeline(transaction=False) as pipeline:
        values = [value(200, number) for number in range(8000)]
        assert sum(map(len, values)) > stream.RECEIVE_BUFFER_SIZE + 4 * stream.HIGH_WATER
        for each in values:
            pipeline.echo(each)
        assert await pipeline.execute() == values


async def test_values_that_straddle_buffers_round_trip(server: Server) -> None:
    """Each value is one byte longer than the last, so that several values straddle two buffers."""
    async with client(server) as one:
        sizes = [(64 << 10) + number for number in range(50)]
        assert sum(sizes) > 3 * stream.RECEIVE_BUFFER_SIZE
        for number, size in enumerate(sizes):
            await one.set("key", value(size, number))
            assert await one.get("key") == value(size, number)


@pytest.mark.parametrize("size", [stream.MAX_WRITE_SIZE, stream.RECEIVE_BUFFER_SIZE, 20_000_001])
async def test_large_values_round_trip(server: Server, size: int) -> None:
    async with client(server) as one:
        for number in range(3):
            await one.set("large", value(size, number))
            assert await one.get("large") == value(size, number)


async def test_concurrent_connections_read_back_their_own_values(server: Server) -> None:
    async with client(server) as one:

        async def work(number: int) -> None:
            for size in (10, 70_000, 300_000):
                await one.set(f"key{number}", value(size, number))
                assert await one.get(f"key{number}") == value(size, number)

        await asyncio.gather(*map(work, range(30)))


async def test_subscriber_receives_published_messages(server: Server) -> None:
    async with client(server) as one, one.pubsub() as subscriber:
        await subscriber.subscribe("news")
        assert (await subscriber.get_message(timeout=None))["type"] == "subscribe"
        for number in range(20):
            assert await one.publish("news", value(100_000, number)) == 1
        for number in range(20):
            message = await subscriber.get_message(timeout=None)
            assert message["data"] == value(100_000, number)


@pytest.mark.parametrize("read", ["get_message", "listen"])
@pytest.mark.parametrize("end", ["disconnect", "error", "killed"])
async def test_subscriber_reconnects_and_subscribes_again(
    server: Server, read: str, end: str
) -> None:
    async with client(server) as one, one.pubsub() as subscriber:

        async def next_message() -> Any:
            if read == "get_message":
                return await subscriber.get_message(timeout=None)
            return await anext(subscriber.listen())

        async def message() -> Any:
            try:
                return await next_message()
            except ValkeyConnectionError:  # without retries, the client reports the disconnect once
                return await next_message()

        await subscriber.subscribe("news")
        assert (await message())["type"] == "subscribe"
        if end == "disconnect":
            await subscriber.connection.disconnect()
        elif end == "error":
            subscriber.connection._writer.transport._disconnect(OSError("of the device"))
        else:
            assert await one.client_kill_filter(_type="pubsub") == 1
        assert (await message())["type"] == "subscribe"  # over a new connection
        assert await one.publish("news", "after") == 1
        assert (await message())["data"] == b"after"


async def test_stream_pauses_when_the_subscriber_is_slow(server: Server) -> None:
    """The server buffers 8 MiB of messages until the subscriber starts reading."""
    async with client(server) as one, one.pubsub() as subscriber:
        await subscriber.subscribe("news")
        for number in range(16):
            await one.publish("news", value(512 << 10, number))
        transport = subscriber.connection._writer.transport
        assert not transport._reading  # paused by the stream reader's limit
        assert (
            len(subscriber.connection._reader._buffer)
            <= stream.RECEIVE_BUFFER_SIZE + 2 * stream.HIGH_WATER
        )
        assert (await subscriber.get_message(timeout=None))["type"] == "subscribe"
        for number in range(16):
            message = await subscriber.get_message(timeout=None)
            assert message["data"] == value(512 << 10, number)


async def test_cancelled_command_is_withdrawn_from_the_server(server: Server) -> None:
    """The client drops the connection, and opens another one for the next command."""
    async with client(server) as one, client(server) as other:
        number = await one.client_id()
        waiting = asyncio.create_task(one.blpop("nothing"))
        while not int((await other.info("clients"))["blocked_clients"]):
            pass
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while int((await other.info("clients"))["blocked_clients"]):
            pass
        await other.rpush("nothing", "an element")
        assert await one.lpop("nothing") == b"an element"
        assert await one.client_id() != number


@pytest.mark.parametrize("blocked", [True, False], ids=["waiting", "idle"])
async def test_connection_closed_by_the_server_is_replaced(server: Server, blocked: bool) -> None:
    async with client(server) as one, client(server) as other:
        number = await one.client_id()
        (connection,) = one.connection_pool._available_connections
        ended = asyncio.create_task(connection._writer.wait_closed())
        waiting = asyncio.create_task(one.blpop("nothing")) if blocked else None
        if waiting is not None:
            while not int((await other.info("clients"))["blocked_clients"]):
                pass
        await other.client_kill_filter(_id=str(number))
        if waiting is not None:
            with pytest.raises(ValkeyConnectionError):
                await waiting
        await ended
        assert await one.ping()  # over a new connection
        assert await one.client_id() != number


async def test_client_reconnects_after_a_server_restart(server: Server) -> None:
    async with client(server, retry=Retry(NoBackoff(), 3)) as one:
        await one.set("key", "value")
        waiting = asyncio.create_task(one.blpop("nothing"))
        while not int((await one.info("clients"))["blocked_clients"]):
            pass
        server.kill()
        with pytest.raises(ValkeyConnectionError):
            await waiting
        with pytest.raises(ValkeyConnectionError):
            await one.ping()
        server.start()
        assert await one.ping()
        assert await one.get("key") is None


async def test_connection_error_includes_the_server_address(server: Server) -> None:
    server.kill()
    async with client(server) as one:
        with pytest.raises(ValkeyConnectionError, match=f"{HOST}:{server.port}"):
            await one.ping()
    server.start()


async def test_streams_exchange_raw_commands_with_the_server(server: Server) -> None:
    reader, writer = await stream.open_connection(HOST, server.port)
    writer.write(b"SET a 1\r\nGET a\r\n")
    assert await reader.readexactly(12) == b"+OK\r\n$1\r\n1\r\n"
    assert writer.get_extra_info("peername") == (HOST, server.port)
    large = value(4 << 20, 1)
    writer.write(b"*2\r\n$4\r\nECHO\r\n$%d\r\n" % len(large) + large + b"\r\n")
    assert not reader.at_eof()
    writer.close()  # sends the written data before closing
    assert writer.is_closing()
    await reader.readline()
    await writer.wait_closed()
