"""Test that every call that takes memory accepts buffers, tensors, and memory of other devices."""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import pytest

from aiordma import BufferStateError, Config, Connection, DmabufRegion, VerbsError
from aiordma._native import failure
from aiordma.errors import LocalProtectionError, RemoteAccessError, UnsupportedError
from aiordma.verbs import bytes_of
from tests.dlpack import BFLOAT, CUDA, OwnTensor

from .connection_factory import ConnectionFactory, ends, exchange, give, pattern, shared, yield_loop
from .marks import one_loop

LONG = 1 << 17  # too long for staging or eager sends
SIZES = (64, LONG)

MAKE: dict[str, Callable[[int], Any]] = {
    "bytearray": bytearray,
    "numpy": lambda size: np.zeros((size // 8, 2), ">i4"),
    "array": lambda size: array.array("H", bytes(size)),
    "mmap": lambda size: mmap.mmap(-1, size),
    "memoryview": lambda size: memoryview(bytearray(size)).cast("d"),
    "ctypes": lambda size: (ctypes.c_double * (size // 8))(),
    "tensor": lambda size: OwnTensor(bytearray(size), (size // 4, 2), code=BFLOAT, bits=16),
}


@one_loop
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
async def test_every_operation_accepts_all_memory_types(
    factory: ConnectionFactory, make: Callable[[int], Any]
) -> None:
    async with factory.pair(Config()) as (client, server):
        for size in SIZES:
            data = pattern(size)
            full, empty = make(size), make(size)
            bytes_of(full)[:] = data
            async with shared(server, client, size) as (buffer, remote):
                await client.write(full, remote[:])
                assert buffer.view == data
                await client.read(remote[:], empty)
                assert bytes_of(empty) == data
                bytes_of(empty)[:] = bytes(size)
                async with client.batch() as batch:
                    batch.write(full, remote[:])
                    batch.read(remote[:], empty)
                assert bytes_of(empty) == data
            bytes_of(empty)[:] = bytes(size)
            receiving = asyncio.create_task(server.recv_into(empty))
            await yield_loop(1)
            await client.send(full)
            assert (await receiving).length == size
            assert bytes_of(empty) == data
            bytes_of(empty)[:] = bytes(size)
            with client.register(full) as region:
                share, remote = await give(client, server, region)
                with share:
                    await server.read(remote[:], empty)
                assert region.view == bytes_of(empty) == data


async def test_tensor_is_kept_alive_until_send_completes(factory: ConnectionFactory) -> None:
    async with factory.pair(Config(fetch_ahead=0)) as (client, server):
        tensor = OwnTensor(bytearray(pattern(LONG)), (LONG,))
        sending = asyncio.create_task(client.send(tensor))
        await yield_loop(3)
        assert tensor.out == 1
        sending.cancel()
        await asyncio.wait([sending])
        gc.collect()
        assert tensor.out == 1  # offered, and readable by the peer
        with await server.recv() as message:
            assert message == pattern(LONG)
        await exchange(server, client, b"and has said so")
        assert tensor.out == 0


async def test_array_cannot_be_resized_during_send_and_recv_into(
    factory: ConnectionFactory,
) -> None:
    """The exported buffer must prevent this even when numpy is told not to check references."""

    def stays(array: np.ndarray[Any, Any]) -> None:
        with pytest.raises(ValueError, match="resize"):
            array.resize(4 * LONG, refcheck=False)

    views: list[Callable[[Any], Any]] = [lambda array: array, memoryview]
    async with factory.pair(Config(fetch_ahead=0)) as (client, server):
        for view_of in views:
            full, empty = np.frombuffer(pattern(LONG), "u1").copy(), np.zeros(LONG, "u1")
            sending = asyncio.create_task(client.send(view_of(full)))
            await yield_loop(3)
            stays(full)
            receiving = asyncio.create_task(server.recv_into(view_of(empty)))
            await asyncio.wait([sending, receiving])
            assert empty.tobytes() == pattern(LONG)
            receiving = asyncio.create_task(server.recv_into(view_of(empty)))
            await yield_loop(3)
            stays(empty)
            await client.send(b"the last")
            await receiving
            await exchange(server, client, b"and its acknowledgement has been handled")
            del sending, receiving
            full.resize(4 * LONG, refcheck=False)
            empty.resize(4 * LONG, refcheck=False)


async def test_cancelled_read_releases_the_tensor_after_completion(
    factory: ConnectionFactory,
) -> None:
    async with factory.sharing(LONG, config=Config()) as (client, _, buffer, remote):
        buffer.view[:] = pattern(LONG)
        for count in factory.cancel_points:
            tensor = OwnTensor(bytearray(LONG), (LONG,))
            reading = asyncio.create_task(client.read(remote[:], tensor))
            await yield_loop(count)
            reading.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                assert bytes_of(tensor) == pattern(LONG)
            await client.read(remote[:8], bytearray(8))  # earlier requests have completed
            del reading
            assert tensor.out == 0


@one_loop
async def test_unusable_memory_is_rejected_without_side_effects(factory: ConnectionFactory) -> None:
    async with factory.sharing(64, config=Config()) as (client, server, _, remote):
        objects: Any = np.zeros(8, object)
        wrong: list[tuple[Any, type[Exception], str]] = [
            (np.zeros((8, 8))[:, ::2], BufferError, "contiguous"),
            (OwnTensor(bytearray(64), (8, 8), strides=(1, 8)), BufferError, "contiguous"),
            (OwnTensor(bytearray(64), (64,), device=CUDA), UnsupportedError, "dmabuf"),
            ("text", TypeError, "neither the buffer protocol nor DLPack"),
            (np.zeros(LONG, object), TypeError, "addresses in this process"),
            (objects.data, TypeError, "addresses in this process"),
            (memoryview(objects).cast("B")[4:], TypeError, "addresses in this process"),
        ]
        for memory, kind, text in wrong:
            for use in (
                client.send(memory),
                client.send([b"header", memory]),
                client.recv_into(memory),
                client.write(memory, remote[:]),
                client.read(remote[:], memory),
            ):
                with pytest.raises(kind, match=text):
                    await use
            with pytest.raises(kind, match=text):
                client.register(memory)
        tensor = OwnTensor(bytearray(64), (64,), read_only=True)
        for memory in (tensor, bytes(64), memoryview(bytes(64))):
            with pytest.raises(ValueError, match="read-only"):
                await client.recv_into(memory)
        with pytest.raises(ValueError, match="read-only"):
            await client.read(remote[:], tensor)
        await client.write(tensor, remote[:])
        await exchange(client, server, b"as if nothing had happened")


# ---- of other devices ------------------------------------------------------------------------


@pytest.fixture
def file() -> Iterator[int]:
    """Provide a memfd as a substitute for a dma-buf, which only device drivers can export."""
    fd = os.memfd_create("aiordma-test")
    os.truncate(fd, 4 * LONG)
    yield fd
    os.close(fd)


@pytest.mark.needs("dma-buf")
async def test_dmabuf_regions_are_read_written_and_shared(
    factory: ConnectionFactory, file: int
) -> None:
    async with factory.pair(Config()) as (client, server):
        data = pattern(LONG)
        os.pwrite(file, data, LONG)
        with (
            client.register_dmabuf(file, LONG, offset=LONG) as near,
            server.register_dmabuf(file, 2 * LONG, offset=2 * LONG) as far,
        ):
            share, remote = await give(server, client, far[:LONG])
            await client.write(near, remote[:])
            assert os.pread(file, LONG, 2 * LONG) == data
            await client.read(remote[100:200], near[:100])
            assert os.pread(file, 100, LONG) == data[100:200]
            async with client.batch() as batch:
                batch.write(near[:8], remote[-8:])
            assert os.pread(file, 8, 3 * LONG - 8) == data[100:108]
            await client.fetch_and_add(remote[:8], 1)
            share.revoke()
        assert os.pread(file, LONG, 3 * LONG) == bytes(LONG)  # not shared, so unchanged


@one_loop
@pytest.mark.needs("dma-buf")
@pytest.mark.parametrize("end", ["the owner's", "the user's"])
async def test_truncated_dmabuf_file_breaks_only_its_connection(
    factory: ConnectionFactory, file: int, end: str
) -> None:
    """The file itself is registered, so its pages vanish when it is truncated.

    The connection ends with an error on both sides, but the process survives.
    """
    async with factory.pair(Config()) as (client, server):
        with server.register_dmabuf(file, LONG) as region, client.alloc(LONG) as buffer:
            if end == "the owner's":
                _, remote = await give(server, client, region)
                os.truncate(file, 0)
                await ends(client.read(remote, buffer), RemoteAccessError)
            else:
                _, remote = await give(client, server, buffer)
                os.truncate(file, 0)
                await ends(server.read(remote, region), LocalProtectionError)
            await client.wait_closed()
            await server.wait_closed()
    async with factory.pair(Config()) as (client, server):
        await exchange(client, server, b"as if nothing had happened")


@one_loop
@pytest.mark.needs("dma-buf")
async def test_dmabuf_region_rejects_unsupported_uses(
    factory: ConnectionFactory, file: int
) -> None:
    async with factory.sharing(64, config=Config()) as (client, _, _, remote):
        region = client.register_dmabuf(file, 64, writable=False)
        for use in (client.send, client.recv_into):
            with pytest.raises(BufferStateError, match="read, write or send_region"):
                await use(region)
        with pytest.raises(ValueError, match="read-only"):
            await client.read(remote[:], region)
        part = region[:8]
        region.close()
        region.close()
        for late in (lambda: region.view, lambda: region[:8], lambda: client.share(part)):
            with pytest.raises(BufferStateError, match="was closed"):
                late()
        with pytest.raises(VerbsError, match="cannot register"):
            client.register_dmabuf(file, 5 * LONG)
        with pytest.warns(ResourceWarning, match="was not closed"):
            forget(client, file)


def forget(conn: Connection, file: int) -> None:
    assert isinstance(conn.register_dmabuf(file, 64), DmabufRegion)


@one_loop
async def test_register_dmabuf_raises_unsupported_error_when_device_lacks_it(
    factory: ConnectionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with factory.pair(Config()) as (client, server):

        def refuse(*arguments: object) -> NoReturn:
            raise failure("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP)

        calls = client._endpoint.driver.context.library.calls
        monkeypatch.setattr(calls, "ibv_reg_dmabuf_mr", refuse)
        with pytest.raises(UnsupportedError, match="dma-buf") as caught:
            client.register_dmabuf(0, 4096)
        assert caught.value.device == client.device
        await exchange(client, server, b"as if nothing had happened")
