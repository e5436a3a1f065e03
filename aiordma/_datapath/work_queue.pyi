"""Types of work_queue.pyx: work under way."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..verbs import AsyncEvent, EventType, QueuePair, WCStatus

RESERVED_ENTRIES: int
COMPLETIONS_PER_CALL: int
FLUSHED: int
RETRY_EXCEEDED: int
OF_THE_CONNECTION: frozenset[WCStatus]
FATAL_EVENTS: frozenset[EventType]

class WorkRequest:
    """A subclass has `done`, `failed` and `release`."""

    kind: int
    opcode: int
    address: int
    length: int
    lkey: int
    remote_address: int
    rkey: int
    imm: int
    @property
    def entries(self) -> int: ...
    def __init__(
        self,
        kind: int,
        opcode: int,
        address: int,
        length: int,
        lkey: int,
        remote_address: int = 0,
        rkey: int = 0,
        imm: int = 0,
    ) -> None: ...

class WorkRequestTable:
    loop: AbstractEventLoop
    closed: bool
    calling_back: bool
    defers_callbacks: bool
    polls_again: bool
    spin_scheduled: bool
    spin_found: bool
    brief_spin: Callable[[int], object] | None
    brief_spin_us: int
    spin: Callable[[], object] | None
    spin_us: int
    @property
    def taken(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def stray(self) -> int: ...
    def __len__(self) -> int: ...
    def drain(self, state: int, most: int, polls_again: bool) -> int: ...
    def serve(
        self, state: int, most: int, leaving: list[Any], slow: Callable[[int], object]
    ) -> None: ...
    def spin_before_wait(
        self, state: int, most: int, leaving: list[Any], slow: Callable[[int], object], spin_us: int
    ) -> None: ...
    def spin_soon(self) -> None: ...
    def spin_once(
        self, state: int, most: int, leaving: list[Any], slow: Callable[[int], object]
    ) -> None: ...

class FrameHandler: ...

class Driver(Protocol):
    """What a queue needs of the driver of its event loop."""

    table: WorkRequestTable
    def attach(self, qp: QueuePair, sink: SendQueue, /) -> None: ...
    def detach(self, qp: QueuePair, /) -> None: ...
    def take_device_events(self) -> None: ...
    def poll(self) -> bool: ...
    def report(self, sink: SendQueue, error: Exception, /) -> None: ...

class SendQueue:
    table: WorkRequestTable
    user: object
    frame_handler: FrameHandler | None
    qp: QueuePair
    peer: str
    capacity: int
    error: BaseException | None
    failed: bool
    @property
    def backlogged(self) -> bool: ...
    @property
    def free(self) -> int: ...
    @property
    def completions(self) -> int: ...
    @property
    def control_room(self) -> int: ...
    @property
    def outstanding(self) -> int: ...
    def __init__(
        self,
        driver: Driver,
        qp: QueuePair,
        on_failure: Callable[[BaseException], object],
        waiter_error: Callable[[BaseException, str], BaseException],
    ) -> None: ...
    def post(self, work: WorkRequest) -> None: ...
    def post_frame(self, work: WorkRequest) -> None: ...
    def withdraw(self, works: Iterable[WorkRequest]) -> bool: ...
    def watch_room(self, on_room: Callable[[], object]) -> None: ...
    def device_event(self, event: AsyncEvent) -> None: ...
    def under_way(self) -> list[WorkRequest]: ...
    def fail(self, error: BaseException) -> None: ...
    def refuse(self, error: BaseException) -> None: ...
    def stop(self, error: BaseException) -> None: ...
    def close(self) -> None: ...
