"""Test that objects dropped without being closed are closed with a warning, and that closed objects
are freed immediately.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiordma import (
    AsyncConnectionId,
    AsyncQueuePair,
    Connection,
    ConnectionBrokenError,
    Rights,
    device_events,
    start_server,
)
from aiordma._event_loop import per_loop_resource
from aiordma._event_loop.driver import Driver
from aiordma.errors import RejectedError
from aiordma.mr_pool import Region
from aiordma.verbs import ProtectionDomain, live, open_device

from .connection_factory import ConnectionFactory, check_alive, echo, ends, yield_loop
from .marks import one_loop


@pytest.fixture(autouse=True)
def nothing_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release idle per-loop resources immediately, so that no later connection reuses them."""
    monkeypatch.setattr(per_loop_resource, "IDLE_TIMEOUT", 0)


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the cycle collector, so that objects are freed only by reference counting."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def drop(kept: list[Any]) -> None:
    """Drop the last references and collect any cycles."""
    kept.clear()
    gc.collect()


async def test_dropped_connection_warns_and_is_closed(factory: ConnectionFactory) -> None:
    before = live()
    async with await factory.listen() as listener:
        with without_collector():
            client, server = await factory.both(listener)
            await check_alive(client, server)
            gone = weakref.ref(client)
            kept = [client]
            del client
            with pytest.warns(
                ResourceWarning, match=r"connection_factory\.py:\d+\) was not closed"
            ):
                kept.clear()
            await ends(server.recv(), ConnectionBrokenError)
            await server.close()
            await yield_loop(3)
            assert gone() is None
    assert live() == before


@one_loop
async def test_connection_dropped_with_work_in_flight_is_freed(factory: ConnectionFactory) -> None:
    """A message to the connection is in flight, it has shared and borrowed memory, and a buffer is
    still held.
    """
    before = live()
    async with await factory.listen() as listener:
        client, server = await factory.both(listener)
        buffer = client.alloc(4096)
        share = await client.send_region(buffer, access=Rights.READ)
        remote = await server.recv_region()
        borrowed = await client.request_region(64)
        sending = server.send_nowait(bytes(100_000))
        kept = [client, borrowed]
        del client, borrowed
        with pytest.warns(ResourceWarning, match="was not closed"):
            drop(kept)
        await ends(sending, ConnectionBrokenError)
        await server.close()
        buffer.release()
        del share, remote, sending
        await yield_loop(3)
    assert live() == before


@one_loop
async def test_connection_garbage_collected_in_another_thread_is_closed(
    factory: ConnectionFactory,
) -> None:
    """The garbage collector may run in any thread."""
    async with await factory.listen() as listener:
        client, server = await factory.both(listener)
        kept = [client]
        del client
        with pytest.warns(ResourceWarning, match="was not closed"):
            await asyncio.to_thread(kept.clear)
        await ends(server.recv(), ConnectionBrokenError)
        await server.close()


@one_loop
async def test_region_garbage_collected_in_another_thread_is_closed(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is released in the loop's thread."""
    release, threads = Driver.release, set()

    def record(driver: Driver) -> None:
        threads.add(threading.get_ident())
        release(driver)

    monkeypatch.setattr(Driver, "release", record)
    before = live()
    memory = bytearray(64)
    async with factory.pair() as (client, _):
        kept = [client.register(memory)]
    with pytest.warns(ResourceWarning, match="Region of 64 bytes .* was not closed"):
        await asyncio.to_thread(kept.clear)
    memory.extend(b"!")
    await yield_loop(3)
    assert live() == before
    assert threads == {threading.get_ident()}


def test_open_region_ends_with_its_loop(factory: ConnectionFactory) -> None:
    memory = bytearray(64)

    async def main() -> Region:
        async with factory.pair() as (client, _):
            return client.register(memory)

    before = live()
    region = asyncio.run(main())
    memory.extend(b"!")
    assert live() == before
    region.close()


async def test_dropped_listener_frees_its_port_and_disconnects_pending_clients(
    factory: ConnectionFactory,
) -> None:
    before = live()
    listener = await factory.listen()
    port = listener.port
    client = await factory.connect(port)
    kept = [listener]
    del listener
    with pytest.warns(ResourceWarning, match=r"<Listener on .*was not closed"):
        drop(kept)
    await ends(client.recv(), ConnectionBrokenError)
    await client.close()
    await ends(factory.connect(port), RejectedError)
    while live() != before:  # the side that was dropped has an end of its own
        await yield_loop(1)


OF_VERBS: dict[str, Callable[[ProtectionDomain], object]] = {
    "queue pair": AsyncQueuePair,
    "id": lambda pd: AsyncConnectionId(pd.context.name),
    "events": lambda pd: device_events(pd.context),
}


@one_loop
@pytest.mark.parametrize("what", OF_VERBS)
async def test_dropped_verbs_object_warns_and_is_freed(
    factory: ConnectionFactory, what: str
) -> None:
    with open_device(factory.device) as context, context.alloc_pd() as pd:
        before = live()
        kept = [OF_VERBS[what](pd)]
        with pytest.warns(ResourceWarning, match=r"test_dropped\.py:\d+\) was not closed"):
            drop(kept)
        while live() != before:
            await yield_loop(1)


@one_loop
async def test_connection_id_stays_open_while_its_queue_pair_is_referenced(
    factory: ConnectionFactory,
) -> None:
    """The connection stays up until its queue pair is dropped as well."""
    async with AsyncConnectionId(factory.device) as listener:
        listener.id.bind_addr((factory.host, 0))
        listener.listen()
        assert listener.id.local_address is not None
        id = AsyncConnectionId(factory.device)
        await id.resolve_addr(listener.id.local_address)
        await id.resolve_route()
        kept = [id.create_qp()]
        connecting = asyncio.create_task(id.connect())
        async with await listener.get_request() as other:
            other.create_qp()
            await asyncio.gather(other.accept(), connecting)
            del id, connecting
            gc.collect()
            await yield_loop(3)
            assert not kept[0].qp.closed
            with pytest.warns(ResourceWarning, match=r"<AsyncConnectionId .*was not closed"):
                drop(kept)
            await other.wait_disconnected()


@one_loop
async def test_unreferenced_server_keeps_serving(factory: ConnectionFactory) -> None:
    """Like a server of asyncio, it serves until its loop ends. `test_loops.py` tests the end."""

    server = await start_server(echo, factory.host, **factory.where)
    port, gone = server.port, weakref.ref(server)
    del server
    gc.collect()
    async with await factory.connect(port) as conn:
        await conn.send(b"x")
        assert bytes(await conn.recv()) == b"x"
    kept = gone()
    assert kept is not None
    await kept.close()


async def pair_of(factory: ConnectionFactory) -> tuple[Connection, Connection]:
    async with await factory.listen() as listener:
        return await factory.both(listener)
