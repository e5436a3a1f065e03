"""Memory that is registered once and used by many calls: the user's regions, and the kept ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pytest

from aiordma import BufferStateError, Config, Connection, RDMAError, mr_pool, verbs
from aiordma._core.frames import FrameKind
from aiordma._datapath import keys
from aiordma.verbs._memory.memory_region import reg_mr

from .connection_factory import SMALL, ConnectionFactory, pattern, yield_loop
from .inside import figures
from .marks import one_loop
from .raw_peer import frame
from .test_hostile import victim

LONG = 200_000  # neither staged nor eager
CONFIG = Config(max_eager_size=8 << 10)


@dataclass
class Opened:
    """For the peer to read, by a window on it."""

    access: verbs.AccessFlags


Registered: TypeAlias = verbs.MemoryRegion | Opened


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> list[Registered]:
    """Every registration of memory that was not the library's own, as it is made.

    It is as where pages are pinned: there is no quick way to register.
    """
    made: list[Registered] = []

    def counted(call: Callable[..., verbs.MemoryRegion]) -> Callable[..., verbs.MemoryRegion]:
        def count(self: object, memory: object, *args: Any, **keywords: Any) -> verbs.MemoryRegion:
            mr = call(self, memory, *args, **keywords)
            if mr.length in (LONG, LONG // 2):
                made.append(mr)
            return mr

        return count

    for name in ("reg_mr", "reg_pointer"):
        monkeypatch.setattr(
            verbs.ProtectionDomain, name, counted(getattr(verbs.ProtectionDomain, name))
        )

    def opened(*args: Any, **keywords: Any) -> Any:
        found = reg_mr(*args, **keywords)
        _, _, length, access, _ = args
        if length in (LONG, LONG // 2):
            made.append(Opened(access))
        return found

    monkeypatch.setattr(keys, "reg_mr", opened)
    monkeypatch.setattr(mr_pool, "reg_local_dma", lambda _: None)
    return made


def rights(registrations: list[Registered]) -> list[verbs.AccessFlags]:
    return [mr.access for mr in registrations]


async def receive_into(
    client: Connection, server: Connection, data: bytes, memory: memoryview
) -> None:
    """A message for a receiver that has brought memory."""
    receiving = asyncio.create_task(server.recv_into(memory))
    await yield_loop(1)
    await client.send(data)
    assert (await receiving).length == len(data)
    assert memory == data


async def test_regions_are_not_registered_again(
    factory: ConnectionFactory, registrations: list[Registered]
) -> None:
    """By `recv_into`, `read`, `write` and batches.  A long `send` shows the peer its own bytes."""
    async with factory.sharing(LONG, config=CONFIG) as (client, server, _, remote):
        data, memory = pattern(LONG), np.zeros(LONG, np.uint8)
        with client.register(bytearray(data)) as source, server.register(memory.data) as sink:
            registrations.clear()
            for part in (slice(0, LONG), slice(0, LONG // 2), slice(5, 105)):
                memory[:] = 0
                expected = data[part]
                receiving = asyncio.create_task(server.recv_into(sink[part]))
                await yield_loop(1)
                await client.send(source[part], imm=7)
                assert await receiving == (len(expected), 7)
                assert memory[part].tobytes() == expected
            assert rights(registrations) == [verbs.AccessFlags.MW_BIND] * 2
            registrations.clear()
            with client.register(bytearray(LONG)) as back:
                await client.write(source, remote[:])
                await client.read(remote[:], back)
                async with client.batch() as batch:
                    batch.write(back, remote[:])
                    batch.read(remote[:], back)
                assert back.view == data
                del registrations[:1]
            assert not registrations


async def test_registered_memory_of_any_kind_can_be_sent(factory: ConnectionFactory) -> None:
    async with factory.pair(SMALL) as (client, server):
        with client.alloc(5000) as buffer, client.register(pattern(5000)) as region:
            buffer.view[:] = pattern(5000)
            for memory in (buffer, region, buffer[10:100], region[:2000], region[7:7]):
                receiving = asyncio.create_task(server.recv())
                await client.send(memory)
                with await receiving as message:
                    assert message == memory.view.tobytes()
                receiving = asyncio.create_task(server.recv())
                await client.send_nowait(memory)
                with await receiving as message:
                    assert message == memory.view.tobytes()
        with pytest.raises(BufferStateError, match="released"):
            await client.send(buffer)


async def test_a_region_closed_while_it_is_sent(factory: ConnectionFactory) -> None:
    async with factory.pair(CONFIG) as (client, server):
        memory = bytearray(pattern(LONG))
        region = client.register(memory)
        sending = client.send_nowait(region)
        region.close()
        with pytest.raises(BufferError):
            memory.append(1)
        with await server.recv() as message:
            assert message == memory
        await sending
        memory.append(1)


async def test_a_view_is_registered_once(
    factory: ConnectionFactory, registrations: list[Registered]
) -> None:
    async with factory.sharing(LONG, config=CONFIG) as (client, server, _, remote):
        memory = bytearray(LONG)
        view = memoryview(memory)
        registrations.clear()
        for number in range(3):
            data = pattern(LONG, number)
            await receive_into(client, server, data, view)
            assert memory == data
            await client.write(view, remote[:])
            memory[:] = bytes(LONG)
            await client.read(remote[:], view)
            assert memory == data
            async with client.batch() as batch:
                batch.read(remote[:], view)
        assert rights(registrations).count(verbs.AccessFlags.LOCAL_WRITE) == 1
        statistics = client.registration_statistics()
        assert (statistics.registrations, statistics.bytes) == (1, LONG)
        # What one key opens is received without a registration.
        found = 8 if client._endpoint.driver.pool.local_dma_lkey else 11
        assert (statistics.found, statistics.made) == (found, 1)
        view.release()
        memory.append(1)


async def test_what_is_sent_is_never_kept(
    factory: ConnectionFactory, registrations: list[Registered]
) -> None:
    """The peer knows the key, and must not read what the memory holds after the message."""
    async with factory.pair(CONFIG) as (client, server):
        memory = bytearray(pattern(LONG))
        view = memoryview(memory)
        registrations.clear()
        for _ in range(3):
            receiving = asyncio.create_task(server.recv())
            await client.send(view)
            (await receiving).release()
        assert rights(registrations).count(verbs.AccessFlags.MW_BIND) == 3
        assert client.registration_statistics().made == 0
        assert not figures(client)["rendezvous"]
        view.release()
        memory.append(1)


@one_loop
async def test_the_end_of_the_connection_lets_go(factory: ConnectionFactory) -> None:
    async with factory.pair(CONFIG) as (client, server):
        memory = bytearray(LONG)
        view = memoryview(memory)
        await receive_into(client, server, pattern(LONG), view)
        waiting = asyncio.create_task(server.recv_into(view))
        await asyncio.sleep(0)
        server.abort()
        await asyncio.wait([waiting])
        waiting.exception()
        view.release()
        await server.wait_closed()
        memory.append(1)


@one_loop
async def test_nothing_is_kept_if_told_so(factory: ConnectionFactory) -> None:
    async with factory.pair(replace(CONFIG, cached_registrations=0)) as (client, server):
        view = memoryview(bytearray(LONG))
        for _ in range(2):
            await receive_into(client, server, pattern(LONG), view)
        assert client.registration_statistics().made == 0


@pytest.mark.parametrize("aborted", [False, True])
@one_loop
async def test_the_end_lets_go_of_what_is_offered(
    factory: ConnectionFactory, aborted: bool
) -> None:
    """Whether C has registered it or Python, and whether a task still waits."""
    async with victim(factory) as (conn, peer):
        several = [bytearray(5000) for _ in range(3)]
        numbers = np.frombuffer(several[2], np.uint8)
        sending = [conn.send_nowait(data) for data in (several[0], several[1], numbers)]
        sending[0].cancel()
        for _ in several:
            async with factory.within(1):
                kind, _ = await peer.frames.get()
            assert kind is FrameKind.RNDV_RTS
        assert figures(conn)["rendezvous"] == 3
        del numbers
        for memory in several:
            with pytest.raises(BufferError):
                memory.append(0)
        if aborted:
            conn.abort()
        else:
            peer.send(frame(0x55))
        async with factory.within(5):
            await conn.wait_closed()
        assert figures(conn)["rendezvous"] == 0
        assert sending[0].cancelled()
        for future in sending[1:]:
            assert isinstance(future.exception(), RDMAError)
        for memory in several:
            memory.append(0)
