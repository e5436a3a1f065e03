"""An adapter that lets LMCache keep its objects in block stores.

--l2-adapter '{"type": "plugin", "module_path": "aiordma_kv.lmcache", "class_name": "L2Adapter",
               "adapter_params": {"servers": ["127.0.0.1:7480"]}}'
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import fields
from hashlib import blake2b
from itertools import compress, count
from typing import Any, ParamSpec

from . import Client, ThreadClient
from .common import read_key

TESTED_VERSION = "0.5.6"
KEY_FIELDS = {"chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"}
PARAMETERS = ["servers", "auth_file", "encrypt", "device", "timeout"]


def _unsupported(reason: str) -> ImportError:
    return ImportError(
        f"aiordma_kv.lmcache was tested with LMCache {TESTED_VERSION}, but {reason}: "
        f"pip install lmcache=={TESTED_VERSION}"
    )


try:
    import lmcache
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.memory_management import MemoryObj
    from lmcache.v1.platform import create_event_notifier
except ImportError as error:
    raise _unsupported(f"importing it failed ({error})") from error

P = ParamSpec("P")

logger = logging.getLogger("aiordma_kv.lmcache")


class _Tasks:
    """The tasks of one kind, with the notifier that announces their results."""

    _numbers = count()

    def __init__(self, client: ThreadClient) -> None:
        self.notifier = create_event_notifier()
        self._client = client
        self._results: dict[int, Any] = {}

    def start(self, work: Callable[[Client], Coroutine[Any, Any, Any]], failed: Any) -> int:
        """Call `work` in the client's thread. Its result is `failed` if it raises an exception."""
        task = next(self._numbers)

        def complete(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                logger.error("task failed", exc_info=error)
            self._results[task] = future.result() if error is None else failed
            self.notifier.notify()

        self._client.submit(work).add_done_callback(complete)
        return task

    def pop(self, task: int) -> Any:
        return self._results.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        return {task: self._results.pop(task) for task in list(self._results)}


class L2Adapter(L2AdapterInterface):
    """A client of block stores as an L2 adapter of LMCache.

    With a lost, slow or full server, stores fail and lookups miss, but nothing raises an exception.

    The capacity is the total size of the servers that are connected at the start, or 0 (unknown).
    Usage counts the objects that this adapter has stored and not deleted. Servers do not report
    what they evict, so the adapter stops counting an object if a lookup does not find it, and the
    least recently used objects if their total size exceeds the capacity.

    Args:
        params: The arguments of `ThreadClient`. Instead of `auth`, pass `auth_file`, the path of a
            file with the pre-shared key.
        l1_memory_desc: LMCache's L1 memory. The part that is allocated now is registered. Objects
            outside this part are registered for each transfer.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        if unknown := sorted(params.keys() - PARAMETERS):
            raise ValueError(f"unknown adapter_params {unknown}: expected {PARAMETERS}")
        options = {"servers": [], **params}
        options["auth"] = read_key(options.pop("auth_file", None))
        if l1_memory_desc is not None:
            size = l1_memory_desc.stable_registration_size or l1_memory_desc.size
            options["memory"] = (ctypes.c_char * size).from_address(l1_memory_desc.ptr)
        self._client = ThreadClient(**options)
        try:
            found = self._client.stats().result().values()
            self._capacity: int = sum(stats["size"] for stats in found if stats is not None)
            super().__init__(self._capacity)
            self._stores, self._lookups, self._loads = [_Tasks(self._client) for _ in range(3)]
        except BaseException:
            self._client.close()
            raise
        # The least recently used key is the first. Only the client's thread uses this.
        self._sizes: dict[ObjectKey, int] = {}

    def get_store_event_fd(self) -> int:
        """Return the descriptor that becomes readable when a store has completed."""
        return self._stores.notifier.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that becomes readable when a lookup has completed."""
        return self._lookups.notifier.fileno()

    def get_load_event_fd(self) -> int:
        """Return the descriptor that becomes readable when a load has completed."""
        return self._loads.notifier.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Start storing objects. The task succeeds if all of them are stored."""

        async def store(client: Client) -> L2StoreResult:
            names = [_name(key) for key in keys]
            stored = await client.put(names, [each.byte_array for each in objects])
            added = {
                key: 0 if key in self._sizes else each.get_size()
                for key, each in compress(zip(keys, objects, strict=True), stored)
            }
            self._sizes |= {key: size for key, size in added.items() if size}
            if added:
                _report(self._notify_keys_stored, list(added), list(added.values()))
            while self._capacity and self.get_usage().total_bytes_used > self._capacity:
                self._forget([next(iter(self._sizes))])
            return L2StoreResult(all(stored), sum(added.values()))

        return self._stores.start(store, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the results of all completed stores, and forget them."""
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Start looking up objects, and lock those that are found until `submit_unlock`."""

        async def look_up(client: Client) -> Bitmap:
            found = await client.locate([_name(key) for key in keys])
            self._forget(compress(keys, [not each for each in found]))
            return _bitmap(found)

        return self._lookups.start(look_up, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return the result of a lookup and forget it, or return None if it has not completed."""
        found: Bitmap | None = self._lookups.pop(task_id)
        return found

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Start releasing one lock of each key."""
        self._client.unlock([_name(key) for key in keys])

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Start loading objects. Those that are not locked are looked up first."""

        async def load(client: Client) -> Bitmap:
            names = [_name(key) for key in keys]
            targets = [each.byte_array for each in objects]
            loaded = await client.get(names, targets)
            missed = [i for i, is_loaded in enumerate(loaded) if not is_loaded]
            located = list(compress(missed, await client.locate([names[i] for i in missed])))
            retried = [names[i] for i in located]
            results = await client.get(retried, [targets[i] for i in located])
            await client.unlock(retried)
            for i, is_loaded in zip(located, results, strict=True):
                loaded[i] = is_loaded
            if accessed := list(compress(keys, loaded)):
                self._sizes |= {key: self._sizes.pop(key) for key in accessed if key in self._sizes}
                _report(self._notify_keys_accessed, accessed)
            return _bitmap(loaded)

        return self._loads.start(load, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return the result of a load and forget it, or return None if it has not completed."""
        loaded: Bitmap | None = self._loads.pop(task_id)
        return loaded

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, and wait until this is done or the servers are lost."""

        async def delete(client: Client) -> None:
            await client.delete([_name(key) for key in keys])
            self._forget(keys)

        self._client.submit(delete).result()

    def report_status(self) -> dict[str, Any]:
        """Return whether each server is connected. The adapter is healthy if any of them is."""
        connected = self._client.connected
        return {"is_healthy": any(connected.values()), "type": "aiordma_kv", "servers": connected}

    def close(self) -> None:
        """Finish all tasks, close the connections, and then close the event descriptors."""
        self._client.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.notifier.close()

    def _forget(self, keys: Iterable[ObjectKey]) -> None:
        """Stop counting objects, and report them as deleted."""
        sizes = {key: self._sizes.pop(key) for key in keys if key in self._sizes}
        if sizes:
            _report(self._notify_keys_deleted, list(sizes), list(sizes.values()))


def _name(key: ObjectKey) -> bytes:
    """Return the key of a block: a digest, because the name of a model may be longer than a key."""
    # LMCache rejects "@" in names of models and salts, so different keys have different digests.
    head = f"{key.model_name}@{key.kv_rank}@{key.object_group_id}@{key.cache_salt}@"
    return blake2b(head.encode() + key.chunk_hash, digest_size=32).digest()


def _report(notify: Callable[P, None], *args: P.args, **options: P.kwargs) -> None:
    """Notify LMCache's listeners. Their errors must not fail a task, which may hold locks."""
    try:
        notify(*args, **options)
    except Exception:
        logger.exception("a listener failed")


def _bitmap(bits: list[bool]) -> Bitmap:
    bitmap = Bitmap(len(bits))
    for i in compress(count(), bits):
        bitmap.set(i)
    return bitmap


def _check_interface() -> None:
    """Raise ImportError if the adapter does not fit this version of LMCache."""
    version: str = lmcache.__version__
    numbers = [int(part) for part in version.split(".")[:3] if part.isdecimal()]
    if numbers < [int(part) for part in TESTED_VERSION.split(".")]:
        raise _unsupported(f"version {version} is installed")
    needed = {"get_usage", "_notify_keys_stored", "_notify_keys_accessed", "_notify_keys_deleted"}
    changes = L2Adapter.__abstractmethods__ | needed.difference(dir(L2AdapterInterface))
    # A field that is missing in the names of blocks would mix up the objects of different keys.
    changes |= {it.name for it in fields(ObjectKey)} ^ KEY_FIELDS
    if changes:
        raise _unsupported(f"the interface of version {version} differs: {sorted(changes)}")


_check_interface()
