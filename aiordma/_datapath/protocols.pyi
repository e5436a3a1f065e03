"""The Python types that the data path uses. The build writes the types of its own modules."""

from collections.abc import Callable
from typing import Any, Protocol

from .._core import protocol
from .._native.handles import AnyMemory
from ..errors import ProtocolError
from ..verbs import ProtectionDomain, QueuePair
from .memory import Local, PoolBlock
from .message import Message
from .rail import SendQueue
from .work_queue import WorkRequestTable

Sendable = Message | Local | AnyMemory
"""The types of data that can be sent."""

class Waiter(Protocol):
    """The methods of a future that a drain calls."""

    def done(self) -> bool: ...
    def set_result(self, result: None, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...

class Pool(Protocol):
    """The members of the memory pool used here, besides those of a BlockCache."""

    @property
    def pd(self) -> ProtectionDomain: ...
    def _block(self, size: int, /) -> PoolBlock: ...
    def _require_spare(self, size: int, /) -> None: ...
    def require_possible(self, size: int, /) -> None: ...

class BlockSource(Protocol):
    """A source of blocks for requests that are served in order."""

    @property
    def waiting(self) -> bool: ...
    def block(self, size: int, /) -> PoolBlock | None: ...

class Memory(Protocol):
    """The connection's access to memory."""

    @property
    def pool(self) -> Pool: ...
    @property
    def pd(self) -> ProtectionDomain: ...
    @property
    def staging_limit(self) -> int: ...
    def register(self, data: object, view: memoryview, /) -> Any: ...
    def block_source(
        self, on_memory: Callable[[], None], /, *, internal: bool, exempt: bool = False
    ) -> BlockSource: ...

class Room(Protocol):
    """The limits of one side: its receives and the size of its messages."""

    @property
    def data_receives(self) -> int: ...
    @property
    def control_receives(self) -> int: ...
    @property
    def eager_size(self) -> int: ...
    @property
    def max_message(self) -> int: ...

class Config(Room, Protocol):
    @property
    def max_eager_size(self) -> int: ...
    @property
    def send_queue(self) -> int: ...
    @property
    def fetch_ahead(self) -> int: ...

class Keys(Protocol):
    def next_cipher(self) -> Any: ...
    def resume_cipher(self) -> Any: ...

class Suite(Protocol):
    @property
    def InvalidTag(self) -> type[Exception]: ...
    @property
    def payload_sealer(self) -> Callable[[bytes], Any]: ...
    @property
    def payload_opener(self) -> Callable[[bytes, bytes], Any]: ...

class Owner(Protocol):
    """The part of a connection that its data path calls."""

    on_early: Callable[[], object] | None
    """The function to call for a frame that arrives before `start`."""
    @property
    def peer_name(self) -> str:
        """The name of the peer in errors."""
    @property
    def name(self) -> str:
        """The text that identifies the connection in logs: its addresses and queue pair."""
    def control(self, message: protocol.Message, /) -> object: ...
    def violated(self, error: ProtocolError, /) -> object:
        """End the connection because the peer has violated the protocol."""
    def error_for(self, cause: BaseException, text: str = "", /) -> BaseException:
        """Return a new error for one waiter. `text` describes what it was waiting for."""
    def broken(self, error: BaseException, /) -> object:
        """Report, once, that a queue pair has failed.

        This may be called in the middle of a post, so the connection ends later: in the loop's next
        iteration, or before the next event of the connection.
        """
    def early(self) -> object:
        """Report that a frame has arrived before `start`."""
    def emptied(self) -> object:
        """Report that no work is in progress any more after `SendQueue.retire`."""
    def check(self) -> object:
        """Raise if the connection has ended or is being closed, or this is the wrong loop."""
    def check_loop(self) -> object:
        """Raise if this is the wrong loop."""

class Driver(Protocol):
    """The methods of an event loop's driver that a queue calls."""

    table: WorkRequestTable
    @property
    def pool(self) -> Pool: ...
    def attach(self, qp: QueuePair, sink: SendQueue, /) -> None: ...
    def detach(self, qp: QueuePair, /) -> None: ...
    def take_device_events(self) -> None: ...
    def poll(self) -> bool: ...
    def report(self, sink: SendQueue, error: Exception, /) -> None: ...
