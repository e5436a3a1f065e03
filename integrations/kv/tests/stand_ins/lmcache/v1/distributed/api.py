from dataclasses import dataclass
from typing import Any

MemoryLayoutDesc = Any


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""
