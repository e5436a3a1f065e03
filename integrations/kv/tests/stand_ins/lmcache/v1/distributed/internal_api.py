from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey


@dataclass(frozen=True)
class L1MemoryDesc:
    ptr: int
    size: int
    align_bytes: int
    stable_registration_size: int | None = None


class L2StoreResult(int):
    """The number of bytes transferred, or -1 after a failure."""

    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self) -> bool:
        return self >= 0

    def bytes_transferred(self) -> int:
        return max(self, 0)


class L2AdapterListener:
    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None: ...

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None: ...

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None: ...
