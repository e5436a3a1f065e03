"""Types of windows.pyx: memory windows of type 2."""

from ..verbs import MemoryRegion, MemoryWindow
from .work_queue import WorkRequest

class Window:
    def __init__(self, window: MemoryWindow) -> None: ...
    @property
    def rkey(self) -> int: ...
    def close(self) -> None: ...

class BindRequest(WorkRequest):
    """A subclass has `done`, `failed` and `release`."""

    expired: bool
    def __init__(
        self,
        kind: int,
        window: Window,
        mr: MemoryRegion,
        address: int,
        length: int,
        access: int,
    ) -> None: ...
    @property
    def was_posted(self) -> bool: ...
    @property
    def next_key(self) -> int: ...
