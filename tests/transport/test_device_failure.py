"""The device reports a failure: every await ends at once, and the report is the root cause."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable

import pytest

from aiordma import Connection, ConnectionBrokenError
from aiordma._loop.device_events import EventRouter
from aiordma._native import lib
from aiordma.errors import DeviceEventError
from aiordma.verbs import AsyncEvent, EventType

from .connection_factory import ConnectionFactory, check_alive
from .marks import by_tcp, one_loop


def causes(error: BaseException) -> list[BaseException]:
    """An exception with all that led to it, the root last."""
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


async def broken(waiting: Awaitable[object]) -> list[BaseException]:
    with pytest.raises(ConnectionBrokenError) as caught:
        await waiting
    return causes(caught.value)


def waits(conn: Connection) -> list[asyncio.Task[object]]:
    """One of each kind of wait, under way."""

    async def of_recv() -> object:
        return await conn.recv()

    async def of_region() -> object:
        return await conn.recv_region()

    return [asyncio.create_task(wait()) for wait in (of_recv, of_recv, of_region)]


@pytest.mark.parametrize("kind", [EventType.QP_FATAL, EventType.CQ_ERR, EventType.DEVICE_FATAL])
async def test_every_wait_ends_with_the_report(factory: ConnectionFactory, kind: EventType) -> None:
    async with factory.pair() as (client, server):
        waiting = waits(client)
        await asyncio.sleep(0)
        side = client._endpoint
        assert side.qp is not None
        event = {
            EventType.QP_FATAL: AsyncEvent(kind, side.qp),
            EventType.CQ_ERR: AsyncEvent(kind, side.cq),
            EventType.DEVICE_FATAL: AsyncEvent(kind),
        }[kind]
        EventRouter.of(side.driver.context).deliver(event)
        for task in waiting:
            *_, root = await broken(task)
            assert isinstance(root, DeviceEventError)
            assert root.event == kind.name
            assert root.device == factory.device
        *_, root = await broken(client.send(b"too late"))
        assert isinstance(root, DeviceEventError)
        await broken(server.recv())


@one_loop
@by_tcp
async def test_the_device_really_fails(factory: ConnectionFactory) -> None:
    """The embedded device can be made to. What it flushes comes with the reason, not before it."""
    if factory.device != "embedded0":
        assert lib.aiordma_embedded_raise(EventType.QP_FATAL) == errno.EINVAL  # not to be made
        return
    async with factory.pair() as (client, server):
        waiting = [*waits(client), *waits(server)]
        await asyncio.sleep(0)
        assert lib.aiordma_embedded_raise(EventType.DEVICE_FATAL) == 0
        for task in waiting:
            *_, root = await broken(task)
            assert isinstance(root, DeviceEventError), root
            assert root.event == "DEVICE_FATAL"
            assert "close everything on it and open it again" in str(root)
    async with factory.pair() as (client, server):  # on the device opened anew
        await check_alive(client, server)
