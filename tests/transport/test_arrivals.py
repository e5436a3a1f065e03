"""Test `async for` on a connection, one step at a time, and that no step loses a message."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from .connection_factory import ConnectionFactory, barrier, ends
from .marks import on_pair

pytestmark = on_pair


async def test_unawaited_anext_does_not_consume_a_message(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        messages = aiter(server)
        await client.send(b"kept")
        await barrier(client)
        anext(messages)
        never = asyncio.ensure_future(anext(messages))
        never.cancel()
        with pytest.raises(asyncio.CancelledError):
            await never
        closed = cast("Any", anext(messages))
        closed.close()
        with pytest.raises(RuntimeError, match="already"):
            await closed
        with pytest.raises(LookupError, match="thrown"):
            cast("Any", anext(messages)).throw(LookupError("thrown"))
        with await anext(messages) as message:
            assert message == b"kept"


async def test_manually_driven_anext_consumes_exactly_one_message(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        messages = aiter(server)
        assert aiter(messages) is messages
        for content in (b"send", b"next"):
            await client.send(content)
            await barrier(client)
            step = cast("Any", anext(messages))
            assert step.__await__() is step
            assert iter(step) is step
            with pytest.raises(StopIteration) as end:
                step.send(None) if content == b"send" else next(step)
            with end.value.value as message:
                assert message == content
            for again, what in ((step.send, None), (step.throw, LookupError())):
                with pytest.raises(RuntimeError, match="already"):
                    again(what)
            step.close()


async def test_anext_raises_stop_async_iteration_each_time_after_close(
    factory: ConnectionFactory,
) -> None:
    async with factory.pair() as (client, server):
        messages = aiter(server)
        await client.send(b"last")
        await client.close()
        with await anext(messages) as message:
            assert message == b"last"
        for _ in range(2):
            await ends(anext(messages), StopAsyncIteration)
