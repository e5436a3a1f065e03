from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L2AdapterListener, L2StoreResult
    from lmcache.v1.memory_management import MemoryObj

L2TaskId = int


@dataclass(frozen=True)
class AdapterUsage:
    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: Mapping[str, int]


class L2AdapterInterface(ABC):
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self._listeners: list[L2AdapterListener] = []
        self._max_capacity_bytes = max_capacity_bytes
        self._bytes_by_cache_salt: Counter[str] = Counter()

    @abstractmethod
    def get_store_event_fd(self) -> int: ...

    @abstractmethod
    def get_lookup_and_lock_event_fd(self) -> int: ...

    @abstractmethod
    def get_load_event_fd(self) -> int: ...

    @abstractmethod
    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId: ...

    @abstractmethod
    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]: ...

    @abstractmethod
    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId: ...

    @abstractmethod
    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None: ...

    @abstractmethod
    def submit_unlock(self, keys: list[ObjectKey]) -> None: ...

    @abstractmethod
    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId: ...

    @abstractmethod
    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None: ...

    @abstractmethod
    def close(self) -> None: ...

    def register_listener(self, listener: L2AdapterListener) -> None:
        self._listeners.append(listener)

    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            self._bytes_by_cache_salt[key.cache_salt] += size
        for listener in self._listeners:
            listener.on_l2_keys_stored(keys, sizes)

    def _notify_keys_accessed(self, keys: list[ObjectKey]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_accessed(keys)

    def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            self._bytes_by_cache_salt[key.cache_salt] -= size
        for listener in self._listeners:
            listener.on_l2_keys_deleted(keys)

    def delete(self, keys: list[ObjectKey]) -> None:  # noqa: B027 (optional)
        pass

    def get_usage(self) -> AdapterUsage:
        used = +self._bytes_by_cache_salt  # without salts that have no bytes
        return AdapterUsage(used.total(), self._max_capacity_bytes, used)

    def report_status(self) -> dict[str, Any]:
        return {"is_healthy": True}
