"""`async for` on a connection: its steps, and that none of them loses a message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from aiordma import Connection, Message

from .connection_factory import SMALL, ConnectionFactory, barrier, yield_loop
from .marks import on_pair

pytestmark = on_pair


def begun(messages: AsyncIterator[Message]) -> Any:
    """A step that waits, as a task has it."""
    step = cast("Any", anext(messages))
    step.send(None)
    return step


async def received(server: Connection) -> bytes:
    with await server.recv() as message:
        return bytes(message)


async def test_all_that_came_before_the_end(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):

        async def send() -> None:
            await asyncio.gather(*(client.send(bytes([n])) for n in range(100)))
            await client.close()

        sending = asyncio.create_task(send())
        assert [bytes(message) async for message in server] == [bytes([n]) for n in range(100)]
        await sending


async def test_a_step_that_is_not_awaited_has_taken_nothing(factory: ConnectionFactory) -> None:
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


async def test_a_step_that_is_left_in_the_middle_loses_nothing(factory: ConnectionFactory) -> None:
    async with factory.pair(SMALL) as (client, server):
        messages = aiter(server)
        begun(messages).close()
        with pytest.raises(LookupError, match="thrown"):
            begun(messages).throw(LookupError("thrown"))
        waiting = asyncio.ensure_future(anext(messages))
        await yield_loop(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.send(b"kept")
        assert await received(server) == b"kept"


async def test_a_step_is_one_message_by_whatever_it_is_driven(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        messages = aiter(server)
        assert aiter(messages) is messages
        for content in (b"send", b"next"):
            await client.send(content)
            await barrier(client)
            step = cast("Any", anext(messages))
            assert iter(step) is step
            with pytest.raises(StopIteration) as end:
                step.send(None) if content == b"send" else next(step)
            with end.value.value as message:
                assert message == content
            for again, what in ((step.send, None), (step.throw, LookupError())):
                with pytest.raises(RuntimeError, match="already"):
                    again(what)
            step.close()


async def test_the_end_comes_again_and_again(factory: ConnectionFactory) -> None:
    async with factory.pair() as (client, server):
        messages = aiter(server)
        await client.send(b"last")
        await client.close()
        with await anext(messages) as message:
            assert message == b"last"
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(messages)
