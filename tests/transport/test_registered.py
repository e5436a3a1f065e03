"""Test memory registered once and used by many calls: the user's regions and cached ones."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import pytest

from aiordma import Config, Connection, Rights, mr_pool, verbs
from aiordma._datapath import keys
from aiordma._event_loop import per_loop_resource
from aiordma.errors import VerbsError
from aiordma.verbs._memory.memory_region import reg_mr

from .connection_factory import ConnectionFactory, give, pattern, yield_loop
from .inside import figures
from .marks import one_loop

LONG = 200_000  # too long for staging or eager sends
CONFIG = Config(max_eager_size=8 << 10)


@dataclass
class Opened:
    """Memory that the peer reads through a memory window."""

    access: verbs.AccessFlags


Registered: TypeAlias = verbs.MemoryRegion | Opened


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> list[Registered]:
    """Collect the registrations of memory that the library did not allocate.

    The key that covers all local memory is disabled, as on a device that pins pages.
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
    """Send a message to a receiver that supplies the memory."""
    receiving = asyncio.create_task(server.recv_into(memory))
    await yield_loop(1)
    await client.send(data)
    assert (await receiving).length == len(data)
    assert memory == data


async def test_registered_regions_are_not_registered_again(
    factory: ConnectionFactory, registrations: list[Registered]
) -> None:
    """This holds for `recv_into`, `read`, `write` and batches.

    A long `send` registers the memory again, because the peer may access only the bytes of the
    message.
    """
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


async def test_sharing_does_not_register_registered_memory_again(
    factory: ConnectionFactory, registrations: list[Registered], deviations: frozenset[str]
) -> None:
    async with factory.pair(CONFIG) as (client, server):
        with server.register(bytearray(pattern(LONG))) as region, server.alloc(LONG) as buffer:
            buffer.view[:] = region.view
            registrations.clear()
            for memory in (region, region[: LONG // 2], buffer, buffer[LONG // 2 :]):
                share, remote = await give(server, client, memory)
                with client.alloc(len(memory)) as got:
                    await client.read(remote[:], got)
                    assert got.view == memory.view
                share.revoke()
            # A buffer is a part of the pool's region.
            parts = 3 if "a window reaches as far as its region" in deviations else 0
            assert len(registrations) == parts


@one_loop
async def test_memory_is_registered_when_it_does_not_support_windows(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not allow windows on read-only memory. A share uses a region key instead."""
    reg = verbs.ProtectionDomain.reg_mr

    def refuse(self: verbs.ProtectionDomain, memory: Any, access: Any = None) -> Any:
        if access is not None and access & verbs.AccessFlags.MW_BIND:
            raise VerbsError(errno.EFAULT, "ibv_reg_mr")
        return reg(self, memory, access)

    async with factory.pair() as (client, server):
        monkeypatch.setattr(verbs.ProtectionDomain, "reg_mr", refuse)
        with server.register(pattern(64)) as region:
            share, remote = await give(server, client, region, Rights.READ)
            got = bytearray(64)
            await client.read(remote[:], got)
            assert got == pattern(64)
            share.revoke()
        refuse_all = mock.Mock(side_effect=VerbsError(errno.ENOMEM, "ibv_reg_mr"))
        monkeypatch.setattr(verbs.ProtectionDomain, "reg_mr", refuse_all)
        with pytest.raises(VerbsError):
            server.register(bytearray(64))
        assert refuse_all.call_count == 1


@one_loop
async def test_region_works_on_connections_opened_after_its_own_has_closed(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open region keeps the device open, even while there is no connection."""
    monkeypatch.setattr(per_loop_resource, "IDLE_TIMEOUT", 0)
    before = verbs.live()
    memory = bytearray(LONG)
    async with factory.pair(CONFIG) as (client, _):
        region = client.register(memory)
    await yield_loop(3)
    with pytest.raises(BufferError):
        memory.extend(b"!")
    async with factory.pair(CONFIG) as (client, server):
        with server.alloc(LONG) as buffer:
            buffer.view[:] = pattern(LONG)
            _, remote = await give(server, client, buffer)
            await client.read(remote[:], region)
            assert memory == pattern(LONG)
            share, own = await give(client, server, region)
            await server.write(bytes(8), own[:8])
            assert memory[:9] == bytes(8) + pattern(LONG)[8:9]
            share.revoke()
    region.close()
    await yield_loop(3)
    memory.extend(b"!")
    assert verbs.live() == before


async def test_memoryview_is_registered_once_for_repeated_transfers(
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
        assert (statistics.found, statistics.made) == (11, 1)
        view.release()
        memory.append(1)


async def test_send_does_not_cache_memory_registrations(
    factory: ConnectionFactory, registrations: list[Registered]
) -> None:
    """The peer knows the key, but must not read what the memory holds after the message."""
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
async def test_registrations_are_not_cached_when_disabled(factory: ConnectionFactory) -> None:
    async with factory.pair(replace(CONFIG, cached_registrations=0)) as (client, server):
        view = memoryview(bytearray(LONG))
        for _ in range(2):
            await receive_into(client, server, pattern(LONG), view)
        assert client.registration_statistics().made == 0
