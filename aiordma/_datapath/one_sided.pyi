"""Types of one_sided.pyx: reads, writes and atomics."""

from .._native.handles import AnyMemory
from .futures import OpFuture, Waiter
from .memory import Local, Pinned, Remote
from .work_queue import SendQueue, WorkRequest

TRANSFER_SIZE: int

class WRChain(WorkRequest):
    user: object
    waiter: Waiter | None
    partial: bool
    @property
    def lengths(self) -> list[int]: ...
    def __init__(self, user: object, kind: int, waiter: Waiter | None = None) -> None: ...
    def __len__(self) -> int: ...
    def write(self, local_memory: object, remote_memory: object) -> bool: ...
    def read(self, local_memory: object, remote_memory: object) -> bool: ...
    def put(
        self,
        opcode: int,
        pinned: Pinned,
        address: int,
        length: int,
        lkey: int,
        remote: Remote,
        remote_address: int,
        imm: int,
        compare_add: int = 0,
        swap: int = 0,
    ) -> None: ...
    def part(self, count: int) -> WRChain: ...
    def failed(self, error: BaseException) -> None: ...
    def release(self) -> None: ...

class Batch:
    """The subclass has `_write` and `_read`, for what needs more than one request."""

    _transfer: WRChain | None
    _writes: int
    _reads: int
    def write(self, source: Local | AnyMemory, target: Remote) -> None: ...
    def read(self, source: Remote, target: Local | AnyMemory) -> None: ...

def write(queue: SendQueue, local_memory: object, remote_memory: object) -> OpFuture | None: ...
def read(queue: SendQueue, local_memory: object, remote_memory: object) -> OpFuture | None: ...
