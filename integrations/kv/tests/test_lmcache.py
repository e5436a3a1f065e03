"""The adapter for LMCache. A stand-in replaces LMCache if it is not installed."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import importlib.util
import inspect
import mmap
import os
import select
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiordma_kv import Client

import aiordma
from conftest import HOST, PAGE, Process, Served, serve, wait_connected

STAND_INS = Path(__file__).parent / "stand_ins"
sys.path.append(str(STAND_INS))  # at the end, so that an installed LMCache is preferred

with warnings.catch_warnings():
    # LMCache uses a deprecated class of OpenTelemetry.
    warnings.simplefilter("ignore", DeprecationWarning)
    import lmcache
    from aiordma_kv.lmcache import KEY_FIELDS, L2Adapter
    from lmcache import lmcache_native
    from lmcache.v1 import memory_management, platform
    from lmcache.v1.distributed import api, internal_api
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
    from lmcache.v1.distributed.l2_adapters import base
    from lmcache.v1.platform import consume_fd

KEY = b"0123456789abcdef0123456789abcdef"
SIZE = 1000  # of an object, which occupies one page of a server

StartProcess = Callable[..., Process]


def key(number: int, salt: str = "") -> ObjectKey:
    return ObjectKey(number.to_bytes(16, "big"), "model", 0, cache_salt=salt)


def keys(*numbers: int) -> list[ObjectKey]:
    return [key(number) for number in numbers]


class Object(memory_management.MemoryObj):
    """An object at an address, with a view of its memory as LMCache makes it."""

    def __init__(self, address: int, data: bytes, owner: object = None) -> None:
        self._memory = (ctypes.c_ubyte * len(data)).from_address(address)
        ctypes.memmove(address, data, len(data))
        self._owner = owner

    def get_size(self) -> int:
        return len(self._memory)

    @property
    def byte_array(self) -> Any:
        return memoryview(self._memory)

    @property
    def data(self) -> bytes:
        return bytes(self._memory)


Object.__abstractmethods__ = frozenset()  # LMCache's objects have more methods


def objects(*numbers: int, size: int = SIZE) -> list[Any]:
    """Return objects outside LMCache's L1 memory, each filled with a number."""
    owners = [(ctypes.c_ubyte * size)() for _ in numbers]
    return [
        Object(ctypes.addressof(owner), bytes([number]) * size, owner)
        for number, owner in zip(numbers, owners, strict=True)
    ]


class Listener(L2AdapterListener):
    """A record of what LMCache hears about objects."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[int]]] = []

    def _record(self, event: str, keys: Sequence[ObjectKey]) -> None:
        self.events.append((event, [int.from_bytes(each.chunk_hash, "big") for each in keys]))

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._record("stored", keys)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self._record("accessed", keys)

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self._record("deleted", keys)


def is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


async def wait_readable(descriptor: int) -> None:
    """Wait for an event descriptor and reset it."""
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, readable.set)
    await readable.wait()
    loop.remove_reader(descriptor)
    consume_fd(descriptor)


class Engine:
    """What LMCache's controllers do with an adapter."""

    def __init__(self, adapter: L2Adapter) -> None:
        self.adapter = adapter
        self.listener = Listener()
        adapter.register_listener(self.listener)

    async def store(self, keys: list[ObjectKey], objects: list[Any]) -> L2StoreResult:
        task = self.adapter.submit_store_task(keys, objects)
        await wait_readable(self.adapter.get_store_event_fd())
        results = self.adapter.pop_completed_store_tasks()
        assert list(results) == [task]
        return results[task]

    async def look_up(self, keys: list[ObjectKey]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        await wait_readable(self.adapter.get_lookup_and_lock_event_fd())
        bitmap = self.adapter.query_lookup_and_lock_result(task)
        assert bitmap is not None
        assert bitmap.size() == len(keys)
        assert self.adapter.query_lookup_and_lock_result(task) is None
        return [bitmap.test(i) for i in range(len(keys))]

    async def load(self, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        await wait_readable(self.adapter.get_load_event_fd())
        bitmap = self.adapter.query_load_result(task)
        assert bitmap is not None
        assert bitmap.size() == len(keys)
        assert self.adapter.query_load_result(task) is None
        return [bitmap.test(i) for i in range(len(keys))]

    async def delete(self, keys: list[ObjectKey]) -> None:
        await asyncio.to_thread(self.adapter.delete, keys)

    def used(self) -> tuple[int, dict[str, int]]:
        usage = self.adapter.get_usage()
        return usage.total_bytes_used, dict(usage.bytes_by_cache_salt)

    async def in_client(self, work: Callable[[Client], Any]) -> Any:
        """Call a coroutine function with the adapter's client, in its thread."""
        return await asyncio.wrap_future(self.adapter._client.submit(work))


async def connect(
    stack: AsyncExitStack, server: str, l1: L1MemoryDesc | None = None, **params: Any
) -> Engine:
    adapter = await asyncio.to_thread(L2Adapter, {"servers": [server], **params}, l1)
    stack.push_async_callback(asyncio.to_thread, adapter.close)
    return Engine(adapter)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.message for it in caplog.records if it.levelname == "ERROR"]


def locked_bytes(served: Served) -> int:
    locked: int = served.store.arena.stats()["locked_bytes"]
    return locked


@pytest.mark.parametrize("encrypt", [False, True])
async def test_objects_make_a_round_trip(
    stack: AsyncExitStack, tmp_path: Path, encrypt: bool
) -> None:
    served = await serve(stack, auth=KEY, encrypt=encrypt)
    (tmp_path / "key").write_bytes(KEY)
    engine = await connect(stack, served.name, auth_file=str(tmp_path / "key"), encrypt=encrypt)
    assert await engine.store(keys(1, 2), objects(1, 2)) == 2 * SIZE
    assert await engine.look_up(keys(1, 2)) == [True, True]
    targets = objects(0, 0)
    assert await engine.load(keys(2, 1), targets) == [True, True]
    assert [target.data for target in targets] == [b"\2" * SIZE, b"\1" * SIZE]
    engine.adapter.submit_unlock(keys(1, 2))
    await engine.delete(keys(1))
    assert await engine.look_up(keys(1, 2)) == [False, True]


async def test_another_adapter_finds_stored_objects(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    writer, reader = await connect(stack, served.name), await connect(stack, served.name)
    await writer.store(keys(1), objects(1))
    assert await reader.look_up(keys(1)) == [True]
    target = objects(0)
    assert await reader.load(keys(1), target) == [True]
    assert target[0].data == b"\1" * SIZE


async def test_bitmaps_tell_partial_hits(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    await engine.store(keys(1, 3), objects(1, 3))
    assert await engine.look_up(keys(0, 1, 2, 3, 4)) == [False, True, False, True, False]
    targets = objects(0, 0, 0)
    assert await engine.load(keys(1, 2, 3), targets) == [True, False, True]
    assert [target.data[0] for target in targets] == [1, 0, 3]
    assert engine.listener.events == [("stored", [1, 3]), ("accessed", [1, 3])]


@pytest.mark.parametrize(
    "other",
    [
        ObjectKey(b"2", "model", 0),
        ObjectKey(b"1", "other", 0),
        ObjectKey(b"1", "model", 1),
        ObjectKey(b"1", "model", 0, 1),
        ObjectKey(b"1", "model", 0, 0, "salt"),
        ObjectKey(b"1", "model" * 1000, 0),
    ],
)
async def test_keys_that_differ_in_a_field_have_their_own_objects(
    stack: AsyncExitStack, other: ObjectKey
) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    both = [ObjectKey(b"1", "model", 0), other]
    assert (await engine.store(both, objects(1, 2))).is_successful()
    targets = objects(0, 0)
    assert await engine.load(both, targets) == [True, True]
    assert [target.data[0] for target in targets] == [1, 2]


async def test_lookup_locks_objects_until_unlock(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    await engine.store(keys(1, 2), objects(1, 2))
    await engine.look_up(keys(1, 2))
    assert locked_bytes(served) == 2 * PAGE
    engine.adapter.submit_unlock(keys(1, 2, 3))
    await engine.in_client(Client.stats)  # is handled after the unlock
    assert locked_bytes(served) == 0


async def test_load_finds_objects_that_are_not_locked(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    await engine.store(keys(1, 2), objects(1, 2))
    await engine.look_up(keys(1))
    targets = objects(0, 0, 0)
    assert await engine.load(keys(1, 2, 3), targets) == [True, True, False]
    assert [target.data[0] for target in targets] == [1, 2, 0]
    assert locked_bytes(served) == PAGE  # only the object that the lookup has locked


async def test_load_retries_only_objects_that_are_not_locked(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[bytes]] = []
    get = Client.get

    async def record(self: Client, keys: list[bytes], targets: list[Any]) -> list[bool]:
        calls.append(keys)
        return await get(self, keys, targets)

    monkeypatch.setattr(Client, "get", record)
    served = await serve(stack)
    engine = await connect(stack, served.name)
    await engine.store(keys(1, 2, 3), objects(1, 2, 3))
    await engine.look_up(keys(1, 3))
    assert await engine.load(keys(1, 2, 3, 4), objects(0, 0, 0, 0)) == [True, True, True, False]
    assert calls == [calls[0], [calls[0][1]]]


async def test_load_misses_objects_of_another_size(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    await engine.store(keys(1), objects(1))
    assert await engine.load(keys(1), objects(0, size=SIZE + 1)) == [False]


async def test_store_fails_if_one_object_has_no_room(stack: AsyncExitStack) -> None:
    served = await serve(stack, pages=4)
    engine = await connect(stack, served.name)
    result = await engine.store(keys(1, 2), [*objects(1), *objects(2, size=3 * PAGE)])
    assert not result.is_successful()
    assert engine.used() == (SIZE, {"": SIZE})
    assert await engine.look_up(keys(1, 2)) == [True, False]


async def test_usage_counts_each_object_once(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    assert await engine.store(keys(1, 2), objects(1, 2)) == 2 * SIZE
    assert await engine.store([*keys(2), key(3, "salt")], objects(2, 3)) == SIZE
    assert engine.used() == (3 * SIZE, {"": 2 * SIZE, "salt": SIZE})
    assert engine.adapter.get_usage().total_capacity_bytes == 16 * PAGE
    assert engine.listener.events == [("stored", [1, 2]), ("stored", [2, 3])]


async def test_delete_subtracts_the_sizes_of_objects(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    await engine.store([*keys(1, 2), key(3, "salt")], [*objects(1, 2), *objects(3, size=10)])
    await engine.delete([*keys(1, 4), key(3, "salt")])
    assert engine.used() == (SIZE, {"": SIZE})
    assert engine.listener.events[1:] == [("deleted", [1, 3])]
    assert served.store.arena.stats()["blocks"] == 1


def test_delete_returns_when_objects_are_deleted(start_process: StartProcess) -> None:
    server = start_process("--size", "1M")
    adapter = L2Adapter({"servers": [server.name]})
    try:
        adapter.submit_store_task(keys(1), objects(1))
        select.select([adapter.get_store_event_fd()], [], [])
        assert adapter.get_usage().total_bytes_used == SIZE
        adapter.delete(keys(1))
        assert adapter.get_usage().total_bytes_used == 0
    finally:
        adapter.close()


async def test_usage_drops_objects_that_lookups_miss(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    engine, other = await connect(stack, served.name), await connect(stack, served.name)
    await engine.store(keys(1, 2), objects(1, 2))
    await other.delete(keys(1))
    assert engine.used() == (2 * SIZE, {"": 2 * SIZE})
    assert await engine.look_up(keys(1, 2, 3)) == [False, True, False]
    assert engine.used() == (SIZE, {"": SIZE})
    assert engine.listener.events[1:] == [("deleted", [1])]


async def test_usage_drops_the_least_recently_used_objects_beyond_the_capacity(
    stack: AsyncExitStack,
) -> None:
    served = await serve(stack, pages=4)
    engine = await connect(stack, served.name)
    size = PAGE - 100
    for number in (1, 2, 3, 4):
        assert await engine.store(keys(number), objects(number, size=size)) == size
    assert await engine.load(keys(1), objects(0, size=size)) == [True]
    assert await engine.store(keys(2), objects(2, size=size)) == 0  # is not a use for the server
    assert await engine.store(keys(5), objects(5, size=size)) == size
    assert engine.used() == (4 * size, {"": 4 * size})
    assert engine.listener.events[4:] == [
        ("accessed", [1]), ("stored", [2]), ("stored", [5]), ("deleted", [2])
    ]  # fmt: skip
    assert await engine.look_up(keys(1, 2, 3, 4, 5)) == [True, False, True, False, False]


async def test_listener_errors_do_not_change_results(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("planned")

    served = await serve(stack)
    engine, other = await connect(stack, served.name), await connect(stack, served.name)
    for event in ("stored", "accessed", "deleted"):
        monkeypatch.setattr(engine.listener, f"on_l2_keys_{event}", fail)
    assert await engine.store(keys(1, 2), objects(1, 2)) == 2 * SIZE
    await other.delete(keys(2))
    assert await engine.look_up(keys(1, 2)) == [True, False]
    assert await engine.load(keys(1), objects(0)) == [True]
    await engine.delete(keys(1))
    assert engine.used() == (0, {})
    assert errors(caplog) == ["a listener failed"] * 4


async def test_invalid_objects_fail_the_task(
    stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    assert not (await engine.store(keys(1), objects(1, size=0))).is_successful()
    assert await engine.load(keys(1), objects(1, size=0)) == [False]
    assert errors(caplog) == ["task failed"] * 2


async def test_event_descriptors_are_readable_only_when_there_are_results(
    stack: AsyncExitStack,
) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    adapter = engine.adapter
    descriptors = [
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    ]
    assert len(set(descriptors)) == 3
    # The server runs in the thread of this test, so it cannot answer before the next await.
    store = adapter.submit_store_task(keys(1), objects(1))
    assert adapter.pop_completed_store_tasks() == {}
    assert [is_readable(each) for each in descriptors] == [False, False, False]
    await wait_readable(descriptors[0])
    assert adapter.pop_completed_store_tasks() == {store: SIZE}
    assert adapter.pop_completed_store_tasks() == {}

    lookup = adapter.submit_lookup_and_lock_task(keys(1), {})
    assert adapter.query_lookup_and_lock_result(lookup) is None
    assert [is_readable(each) for each in descriptors] == [False, False, False]
    await wait_readable(descriptors[1])
    assert adapter.query_lookup_and_lock_result(lookup) is not None

    load = adapter.submit_load_task(keys(2), objects(0))
    assert adapter.query_load_result(load) is None
    assert [is_readable(each) for each in descriptors] == [False, False, False]
    await wait_readable(descriptors[2])
    assert adapter.query_load_result(load) is not None
    assert [is_readable(each) for each in descriptors] == [False, False, False]


async def test_results_of_several_tasks_are_kept_apart(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    await engine.store(keys(1), objects(1))
    lookups = [engine.adapter.submit_lookup_and_lock_task(keys(number), {}) for number in range(3)]
    found: dict[int, bool] = {}
    while len(found) < len(lookups):
        await wait_readable(engine.adapter.get_lookup_and_lock_event_fd())
        for task in lookups:
            if (bitmap := engine.adapter.query_lookup_and_lock_result(task)) is not None:
                found[task] = bitmap.test(0)
    assert [found[task] for task in lookups] == [False, True, False]


async def test_lost_server_fails_stores_and_misses_objects(
    stack: AsyncExitStack, start_process: StartProcess
) -> None:
    server = start_process("--size", "1M")
    engine = await connect(stack, server.name)
    await engine.store(keys(1), objects(1))
    assert await engine.look_up(keys(1)) == [True]
    assert engine.adapter.report_status() == {
        "is_healthy": True, "type": "aiordma_kv", "servers": {server.name: True}
    }  # fmt: skip
    server.end()
    assert await engine.load(keys(1), objects(0)) == [False]
    engine.adapter.submit_unlock(keys(1))
    assert await engine.look_up(keys(1)) == [False]
    assert not (await engine.store(keys(2), objects(2))).is_successful()
    await engine.delete(keys(1))
    assert engine.adapter.report_status()["is_healthy"] is False
    assert engine.used() == (0, {})

    start_process("--size", "1M", port=server.port)
    await engine.in_client(wait_connected)
    assert await engine.store(keys(1), objects(1)) == SIZE
    assert await engine.load(keys(1), objects(0)) == [True]
    assert engine.adapter.report_status()["is_healthy"] is True
    assert all(numbers for _, numbers in engine.listener.events)


async def test_adapter_starts_without_its_server(stack: AsyncExitStack) -> None:
    engine = await connect(stack, f"{HOST}:1")
    assert engine.adapter.report_status()["is_healthy"] is False
    assert engine.adapter.get_usage().total_capacity_bytes == 0
    assert not (await engine.store(keys(1), objects(1))).is_successful()


async def test_adapter_rejects_a_wrong_key(stack: AsyncExitStack, tmp_path: Path) -> None:
    served = await serve(stack, auth=KEY)
    (tmp_path / "key").write_bytes(KEY[::-1])
    with pytest.raises(aiordma.AuthenticationError):
        await connect(stack, served.name, auth_file=str(tmp_path / "key"))


async def test_adapter_ignores_servers_with_an_invalid_size(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stats(*_: object) -> dict[str, Any]:
        return {"size": -1}

    monkeypatch.setattr("aiordma_kv.server.ClientSession.stats", stats)
    served = await serve(stack)
    engine = await connect(stack, served.name)
    assert engine.adapter.get_usage().total_capacity_bytes == 0
    await engine.in_client(wait_connected)
    assert await engine.store(keys(1), objects(1)) == SIZE


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "no servers given"),
        ({"servers": f"{HOST}:1"}, "servers must be a list of HOST:PORT, not a string"),
        ({"servers": [f"{HOST}:1"], "auth": ""}, r"params \['auth'\]: expected \['servers'"),
    ],
)
def test_adapter_names_invalid_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        L2Adapter(params)


def test_adapter_names_a_key_file_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ValueError, match=f"invalid key file {tmp_path}"):
        L2Adapter({"servers": [f"{HOST}:1"], "auth_file": str(tmp_path / "key")})


async def test_adapter_rejects_an_empty_path_of_the_key() -> None:
    with pytest.raises(OSError, match="directory"):
        L2Adapter({"servers": [f"{HOST}:1"], "auth_file": ""})


async def test_adapter_that_cannot_start_closes_its_connections(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("no descriptors")

    monkeypatch.setattr("aiordma_kv.lmcache.create_event_notifier", fail)
    served = await serve(stack)
    with pytest.raises(OSError, match="no descriptors"):
        await connect(stack, served.name)
    await served.end_sessions()


async def test_adapter_leaves_its_parameters_unchanged(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    served = await serve(stack, auth=KEY)
    (tmp_path / "key").write_bytes(KEY)
    params = {"servers": [served.name], "auth_file": str(tmp_path / "key")}
    before = params.copy()
    adapter = await asyncio.to_thread(L2Adapter, params)
    stack.push_async_callback(asyncio.to_thread, adapter.close)
    assert params == before


@pytest.mark.parametrize("encrypt", [False, True])
async def test_l1_memory_can_grow_after_registration(
    stack: AsyncExitStack, tmp_path: Path, encrypt: bool
) -> None:
    served = await serve(stack, auth=KEY, encrypt=encrypt)
    (tmp_path / "key").write_bytes(KEY)
    with mmap.mmap(-1, 4 * PAGE) as memory:
        exported = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(exported)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        grown = ctypes.c_void_p(start + 2 * PAGE)
        assert protect(grown, ctypes.c_size_t(2 * PAGE), 0) == 0
        l1 = L1MemoryDesc(start, 4 * PAGE, PAGE, stable_registration_size=2 * PAGE)
        engine = await connect(
            stack, served.name, l1, auth_file=str(tmp_path / "key"), encrypt=encrypt
        )
        assert protect(grown, ctypes.c_size_t(2 * PAGE), mmap.PROT_READ | mmap.PROT_WRITE) == 0
        offsets = [0, 2 * PAGE - SIZE, 2 * PAGE - SIZE // 2, 3 * PAGE]
        sources = [Object(start + offsets[i], bytes([i + 1]) * SIZE) for i in (0, 1, 3)]
        assert await engine.store(keys(1, 2, 4), sources) == 3 * SIZE
        straddling: list[Any] = [Object(start + offsets[2], b"\3" * SIZE)]
        assert await engine.store(keys(3), straddling) == SIZE
        targets = [Object(start + offset, bytes(SIZE)) for offset in offsets]
        for i, target in enumerate(targets):
            assert await engine.load(keys(i + 1), [target]) == [True]
            assert target.data == bytes([i + 1]) * SIZE
        await stack.aclose()
        del exported


async def test_l1_memory_is_registered_up_to_its_stable_size(stack: AsyncExitStack) -> None:
    served = await serve(stack)
    memory = (ctypes.c_ubyte * (4 * PAGE))()
    address = ctypes.addressof(memory)
    for stable, registered in ((2 * PAGE, 2 * PAGE), (None, 4 * PAGE)):
        engine = await connect(stack, served.name, L1MemoryDesc(address, 4 * PAGE, 1, stable))
        session = engine.adapter._client._client._sessions[served.name]
        assert session.memory is not None
        assert (session.memory.address, len(session.memory)) == (address, registered)


async def test_close_finishes_tasks(
    stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(stack)
    engine = await connect(stack, served.name)
    adapter = engine.adapter
    descriptors = [
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    ]
    store = adapter.submit_store_task(keys(1), objects(1))
    await asyncio.to_thread(adapter.close)
    assert adapter.pop_completed_store_tasks() == {store: SIZE}
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert served.store.arena.stats()["blocks"] == 1
    assert "exception" not in caplog.text


def import_adapter() -> ModuleType:
    """Run the module of the adapter again, without replacing the module."""
    spec = importlib.util.find_spec("aiordma_kv.lmcache")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def add_abstract_method(patch: pytest.MonkeyPatch) -> None:
    interface = base.L2AdapterInterface
    method = abstractmethod(lambda self: None)
    names = interface.__abstractmethods__ | {"migrate"}
    patch.setattr(interface, "migrate", method, raising=False)
    patch.setattr(interface, "__abstractmethods__", names)


def add_key_field(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(api, "ObjectKey", dataclasses.make_dataclass("ObjectKey", [*KEY_FIELDS, "lora"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patch: patch.setitem(sys.modules, "lmcache", None), "importing it failed.*lmcache"),
        (lambda patch: patch.delattr(internal_api, "L2StoreResult"), "L2StoreResult"),
        (lambda patch: patch.setattr(lmcache, "__version__", "0.5.5"), "version 0.5.5 is inst"),
        (lambda patch: patch.setattr(lmcache, "__version__", "0.4.10"), "version 0.4.10 is inst"),
        (lambda patch: patch.delattr(base.L2AdapterInterface, "get_usage"), "differs.*get_usage"),
        (add_abstract_method, "differs.*migrate"),
        (add_key_field, "differs.*lora"),
    ],
)
def test_import_rejects_an_unsuitable_lmcache(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    change(monkeypatch)
    with pytest.raises(ImportError, match=message) as caught:
        import_adapter()
    assert "tested with LMCache 0.5.6" in str(caught.value)
    assert "pip install lmcache==0.5.6" in str(caught.value)


@pytest.mark.parametrize("version", ["0.5.6", "0.5.10", "0.6.0.dev3+g123", "1.0"])
def test_import_accepts_newer_versions_with_the_same_interface(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(lmcache, "__version__", version)
    assert import_adapter().L2Adapter is not L2Adapter


def load_stand_in(module: ModuleType) -> ModuleType:
    """Load the stand-in for a module of the LMCache that is installed."""
    path = STAND_INS / Path(*module.__name__.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"stand_in_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    stand_in = importlib.util.module_from_spec(spec)
    sys.modules[stand_in.__name__] = stand_in  # dataclasses look for their module
    spec.loader.exec_module(stand_in)
    return stand_in


def parameters(function: Callable[..., Any]) -> list[tuple[str, object, object]]:
    signature = inspect.signature(function)
    return [(it.name, it.kind, it.default) for it in signature.parameters.values()]


@pytest.mark.skipif(STAND_INS in Path(lmcache.__file__).parents, reason="LMCache is not installed")
def test_stand_in_has_the_interface_of_lmcache() -> None:
    interface = load_stand_in(base)
    assert lmcache.__version__ == "0.5.6"
    assert (
        interface.L2AdapterInterface.__abstractmethods__
        == base.L2AdapterInterface.__abstractmethods__
    )
    pairs = [
        (interface.L2AdapterInterface, base.L2AdapterInterface),
        (load_stand_in(memory_management).MemoryObj, memory_management.MemoryObj),
        (load_stand_in(internal_api).L2StoreResult, internal_api.L2StoreResult),
        (load_stand_in(internal_api).L2AdapterListener, internal_api.L2AdapterListener),
        (load_stand_in(platform).EventNotifier, platform.EventNotifier),
        (load_stand_in(platform), platform),
    ]
    for stand_in, real in pairs:
        for name, value in vars(stand_in).items():
            if inspect.isfunction(value) and name != "__init__":
                assert parameters(value) == parameters(getattr(real, name)), name
            assert not isinstance(value, property) or isinstance(getattr(real, name), property)
    for name in ("set", "test", "size"):
        assert callable(getattr(lmcache_native.Bitmap, name))
    for stand_in, real in (
        (interface.AdapterUsage, base.AdapterUsage),
        (load_stand_in(api).ObjectKey, api.ObjectKey),
        (load_stand_in(internal_api).L1MemoryDesc, internal_api.L1MemoryDesc),
    ):
        names = [[field.name for field in dataclasses.fields(each)] for each in (stand_in, real)]
        assert names[0] == names[1]
