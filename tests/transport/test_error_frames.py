"""Test that the traceback frames of an error hold none of the memory that the failed call was
given.

A program may keep an error, and that must not pin its memory. A cffi buffer must not be in a frame
at all: before Python 3.12.7 the garbage collector crashes when it finds one together with the
memoryview of it.
"""

from __future__ import annotations

import gc
import inspect
import mmap
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from aiordma import Connection, RemoteRegion, Rights, cm, testing, verbs
from aiordma._native import ffi
from aiordma.errors import LimitError, LocalRangeError, UnsupportedError, VerbsError
from aiordma.verbs import AccessFlags

from .connection_factory import ConnectionFactory, give
from .marks import one_loop

LONG = 1 << 17  # too long for staging or eager sends


class Given(NamedTuple):
    client: Connection
    remote: RemoteRegion
    pd: verbs.ProtectionDomain
    id: cm.ConnectionId
    region: verbs.MemoryRegion


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def buffers_of_cffi(error: BaseException) -> list[str]:
    """Release all cffi buffers in the locals of the error's frames, and return their names."""
    found: list[str] = []
    for one in chain(error):
        for frame, _ in traceback.walk_tb(one.__traceback__):
            for value in frame.f_locals.values():
                for item in value if type(value) is tuple else (value,):
                    if isinstance(item, ffi.CData) and "buffer len" in repr(item):
                        found.append(repr(item))
                        ffi.release(item)
    return found


async def called(use: Callable[[Given, Any], Any], given: Given, memory: object) -> None:
    result = use(given, memory)
    if inspect.isawaitable(result):
        await result


async def pinned_by_errors(
    use: Callable[[Given, Any], Any],
    given: Given,
    size: int,
    kinds: tuple[type[Exception], ...],
    access: int = mmap.ACCESS_WRITE,
) -> list[str]:
    """Call `use` with an mmap and with a view of one. Return what the errors keep alive."""
    errors: list[str] = []
    for view_of in (lambda memory: memory, memoryview):
        memory = mmap.mmap(-1, size, access=access)
        passed: mmap.mmap | memoryview = view_of(memory)
        with pytest.raises(kinds) as caught:
            await called(use, given, passed)
        errors += buffers_of_cffi(caught.value)
        try:
            if isinstance(passed, memoryview):
                passed.release()
            memory.close()
        except BufferError as error:
            errors.append(f"{type(passed).__name__}: {error}")
    return errors


async def in_a_batch(given: Given, add: Callable[[Any], None]) -> None:
    async with given.client.batch() as batch:
        add(batch)


# Calls that fail if memory cannot be registered.
UNREGISTERED: dict[str, Callable[[Given, Any], Any]] = {
    "send": lambda given, memory: given.client.send(memory),
    "send several": lambda given, memory: given.client.send([b"header", memory]),
    "write": lambda given, memory: given.client.write(memory, given.remote[:]),
    "read": lambda given, memory: given.client.read(given.remote[:], memory),
    "write in a batch": lambda given, memory: in_a_batch(
        given, lambda batch: batch.write(memory, given.remote[:])
    ),
    "read in a batch": lambda given, memory: in_a_batch(
        given, lambda batch: batch.read(given.remote[:], memory)
    ),
    "register": lambda given, memory: given.client.register(memory),
    "reg_mr": lambda given, memory: given.pd.reg_mr(memory),
    "iova": lambda given, memory: given.pd.reg_mr(memory, iova=0),
}

# Calls that are rejected before they have any effect.
REFUSED: dict[str, tuple[int, Callable[[Given, Any], Any]]] = {
    "too short": (100, UNREGISTERED["write"]),
    "too short, long": (LONG, lambda given, memory: given.client.write(memory, given.remote[:9])),
    "read of another length": (100, UNREGISTERED["read"]),
    "read into a long one": (
        LONG,
        lambda given, memory: given.client.read(given.remote[:9], memory),
    ),
    "batch": (100, UNREGISTERED["read in a batch"]),
    "rights": (100, lambda given, memory: given.pd.reg_mr(memory, AccessFlags.REMOTE_WRITE)),
    "other rights": (
        100,
        lambda given, memory: given.region.rereg(memory, AccessFlags.REMOTE_WRITE),
    ),
    "private data": (
        10,
        lambda given, memory: given.id.connect(cm.ConnectionParameters(private_data=memory)),
    ),
    "too much private data": (500, lambda given, memory: given.id.reject(memory)),
    "private data of a refusal": (10, lambda given, memory: given.id.reject(memory)),
}


@pytest.fixture
async def given(factory: ConnectionFactory) -> Any:
    async with factory.pair() as (client, server):
        with server.alloc(LONG) as buffer:
            share, remote = await give(server, client, buffer, Rights.READ | Rights.WRITE)
            pd = client._endpoint.driver.pd
            with (
                share,
                pd.reg_mr(64) as region,
                cm.EventChannel(pd.context.library) as events,
                events.create_id() as id,
            ):
                yield Given(client, remote, pd, id, region)


@one_loop
@pytest.mark.needs("faults")
@pytest.mark.parametrize("use", UNREGISTERED.values(), ids=UNREGISTERED)
async def test_registration_error_does_not_keep_buffers_alive(
    given: Given, device_name: str, use: Callable[[Given, Any], Any]
) -> None:
    with testing.faults(register=1, device=device_name):
        assert await pinned_by_errors(use, given, LONG, (VerbsError,)) == []
    gc.collect()


@one_loop
@pytest.mark.parametrize(("size", "use"), REFUSED.values(), ids=REFUSED)
async def test_rejected_call_error_does_not_keep_buffers_alive(
    given: Given, size: int, use: Callable[[Given, Any], Any]
) -> None:
    kinds = (ValueError, VerbsError, LimitError, UnsupportedError)
    assert await pinned_by_errors(use, given, size, kinds) == []


@one_loop
async def test_read_only_target_error_does_not_keep_buffers_alive(given: Given) -> None:
    uses: list[Callable[[Given, Any], Any]] = [
        lambda given, memory: given.client.read(given.remote[:100], memory),
        lambda given, memory: given.client.recv_into(memory),
        lambda given, memory: given.pd.reg_mr(memory, AccessFlags.LOCAL_WRITE),
    ]
    for use in uses:
        assert await pinned_by_errors(use, given, 100, (ValueError,), mmap.ACCESS_READ) == []


@one_loop
@pytest.mark.needs("device memory")
async def test_device_memory_error_does_not_keep_buffers_alive(given: Given) -> None:
    with given.pd.context.alloc_dm(4096) as dm:
        uses: list[Callable[[Given, Any], Any]] = [
            lambda _, memory: dm.write(memory, 4000),
            lambda _, memory: dm.write(memory, 1),
        ]
        for use in uses:
            assert await pinned_by_errors(use, given, 100, (LocalRangeError, VerbsError)) == []
        with pytest.raises(VerbsError) as caught:
            dm.read(100, 1)
        assert buffers_of_cffi(caught.value) == []
