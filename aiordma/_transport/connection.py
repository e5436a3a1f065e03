"""A connection: the user's interface."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple, Self

from .._core import connection_states, protocol
from .._core.async_only import AsyncContext, AsyncIteration
from .._core.connection_states import CLOSING, LifecycleEvent
from .._core.finalizers import finalizer
from .._core.handshake import Hello
from .._core.snapshot_types import ConnectionState, traffic
from .._loop.shutdown import EXITS, background
from ..cm.address import Address
from ..errors import ConnectionClosedError, RDMAError, host_port
from ..verbs import QueuePair
from . import observation
from .endpoint import RailEndpoint
from .memory_methods import MemoryMethods
from .observation import Statistics
from .rail_status import NO_TRANSFERS, RailStatus


class Begun(NamedTuple):
    """The facts of a connection from the moment when its user gets it."""

    since: float
    accepted: bool


class Connection(MemoryMethods, AsyncContext, AsyncIteration):
    """One RDMA connection.  Made by `connect`, a `Listener` or `start_server`, never directly.

    Belongs to the event loop it was made in; not thread-safe.  Every await may be cancelled: what
    was posted to the device is then finished by the device, its memory held until that moment,
    and order is kept.  What has not been posted is not done.

    A message comes after those before it, and after all writes whose calls began before its own,
    awaited or not; so do the regions that are handed over or released, but that a write with
    immediate data, if it waits for the peer's room then, is refused.  Operations on the peer's
    memory begin in the order of their calls, and may pass messages that wait for the peer's room,
    or others that wait for memory of the pool.  What a read or an atomic sees may be from after a
    later write: await it first.

    After the end every call raises ConnectionClosedError (closed in order, by
    this side or by the peer's goodbye) or ConnectionBrokenError (its text says why).
    """

    def __init__(self, endpoint: RailEndpoint, hello: Hello) -> None:
        super().__init__(endpoint, hello)
        self._begun: Begun | None = None
        self._statistics = Statistics()
        self._request_data = b""
        self._messages.outbox.counts = self._statistics
        self._queue.count_in(self._statistics)
        self._set_session(self._messages)
        observation.register(self._statistics)
        self._wire_seen: str | None = None
        self._wire_requested = False

    def _begin(self, *, accepted: bool) -> None:
        """Tells counts and hooks that its user is about to get it; it may have ended meanwhile."""
        self._begun = Begun(self._sharing.clock.now(), accepted)
        observation.begun(self, self._queue.peer, accepted=accepted)
        if self._state is connection_states.ConnectionState.CLOSED:
            self._report_end()
        elif self._rails is not None:
            self._rails.begin()

    def _report_end(self) -> None:
        if self._begun is not None:
            error, accepted = self._close_cause, self._begun.accepted
            assert error is not None
            observation.ended(self, self._queue.peer, error, accepted=accepted)

    @finalizer
    def __del__(self) -> None:
        """Ends an open connection that was dropped as `abort` does.  In any thread, at any time."""
        super().__del__()
        if (counted := getattr(self, "_statistics", None)) is not None:
            observation.finalized(counted)

    # ---- what it is ----------------------------------------------------------------------

    def __repr__(self) -> str:
        if self._close_cause is not None:
            state = "closed" if isinstance(self._close_cause, ConnectionClosedError) else "broken"
        elif self._state in CLOSING:
            state = "closing"
        else:
            state = self._state.name.lower().replace("_", " ")
        return f"<Connection on {self.device} with {self._owner.name}, {state}>"

    @property
    def device(self) -> str:
        """The name of the device that carries it."""
        return self._of_lead.driver.context.name

    @property
    def _of_lead(self) -> RailEndpoint:
        lead = self._rails.lead if self._rails is not None else None
        return self._endpoint if lead is None or lead.endpoint is None else lead.endpoint

    @property
    def wire(self) -> str | None:
        """The medium of the bytes: "roce", "infiniband", "iwarp", or with the embedded device,
        which is software, "shared memory" or "tcp".

        None while the embedded device is still choosing, at most until the first message has
        arrived, and after the end.
        """
        qp = self._of_lead.qp
        return qp.wire if qp is not None and not qp.closed else None

    @property
    def local_address(self) -> Address | None:
        """(host, port) of this side; None when the link has none."""
        return self._link.local_address if self._link else None

    @property
    def peer_address(self) -> Address | None:
        """(host, port) of the peer; None when the link has none."""
        return self._link.peer_address if self._link else None

    @property
    def queue_pair(self) -> QueuePair:
        """Its queue pair, to look at, and for its raw handles (docs/raw-handles.md).

        What is posted or changed there breaks the connection: the connection keeps the account.
        """
        assert self._of_lead.qp is not None
        return self._of_lead.qp

    @property
    def rails(self) -> tuple[RailStatus, ...]:
        """Its queue pairs on this side's devices, as they are now, first that of the handshake.

        Where `connect` was given several devices there are others, one for each.  `device`, `wire`
        and `queue_pair` are those of the lead.
        """
        assert self._begun is not None
        if self._rails is not None:
            return tuple(self._rails.status())
        counts = self._statistics
        state: Literal["down", "lead"] = "down" if self.closed else "lead"
        since, error = self._begun.since, self._close_cause
        sent, received = counts.bytes_sent, counts.bytes_received
        transfers = NO_TRANSFERS.plus(self._queue)._asdict()
        return (RailStatus(self.device, state, since, error, sent, received, **transfers),)

    @property
    def closed(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._close_cause is not None or (self._queue.failed and not self._queue.suspended)

    @property
    def request_data(self) -> bytes:
        """Data of the peer's `connect(data=...)`; b"" unless this listener has `on_request`."""
        return self._request_data

    @property
    def max_message(self) -> int:
        """The longest message that the peer takes, in bytes."""
        assert self._handshake.peer is not None
        return self._handshake.peer.max_message

    def statistics(self) -> Statistics:
        """Counts of messages, bytes and operations so far; the object goes on counting."""
        return self._statistics

    def _figures(self) -> ConnectionState:
        """Its part of `aiordma.snapshot`, since it has begun. Any thread may ask."""
        assert self._begun is not None
        queue = self._queue
        messages, memory = self._messages.figures(), self._sharing.figures()
        local, now = self.local_address, self._sharing.clock.now()
        return {
            "device": self.device,
            "loop": id(self._loop),
            "wire": self._wire_seen,
            "state": self._state.name,
            "accepted": self._begun.accepted,
            "local": host_port(local) if local is not None else None,
            "peer": queue.peer or None,
            "qp_num": queue.qp.qp_num,
            "age": now - self._begun.since,
            "traffic": traffic(partial(getattr, self._statistics)),
            "send_queue": queue.capacity,
            "outstanding": queue.outstanding,
            "messages_waiting": messages["messages_waiting"],
            "waiting_for_credits": 0 if messages["credits"] else messages["messages_waiting"],
            "waiting_for_send_queue": queue.outstanding - (queue.capacity - queue.free),
            "messages_unread": messages.get("arrived", 0),
            "shared_regions": memory["shared_regions"],
            "lent_bytes": memory["lent_bytes"],
            "remote_regions": memory["remote_regions"],
            "rails": [rail.figures(now) for rail in self.rails],
        }

    def _request_wire(self) -> asyncio.AbstractEventLoop | None:
        """The loop that is to call `_read_wire`; None if the wire is known or was requested."""
        if self._wire_seen is not None or self._wire_requested:
            return None
        self._wire_requested = True  # a loop that is stuck is asked once
        return self._loop

    def _read_wire(self) -> None:
        """In the thread of its loop, since it asks the device."""
        self._wire_requested = False
        with suppress(RDMAError, OSError):  # its device has failed
            self._wire_seen = self.wire

    # ---- the end --------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends the connection in order: waits for work under way, sends a goodbye, disconnects.

        Waits at most `Config.close_timeout` for the peer.  Messages that have arrived can still
        be received: all those whose `send` has returned at the peer, but for those behind a long
        one that this side has not read.  A second call waits for the first.  Cancelled, it aborts.
        """
        await self._close(protocol.GOODBYE)

    async def _close(self, goodbye: protocol.Goodbye) -> None:
        """As `close`; `goodbye` is what the peer is told."""
        if self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        if self._advance(LifecycleEvent.CLOSE):
            self._messages.outbox.closing = True
            try:
                await self._messages.drained()
                if self._advance(LifecycleEvent.DRAINED):
                    await self._sharing.tell(goodbye)
                    self._finish(at_once=True)
            except RDMAError:
                pass  # the peer is gone, or does not read: it will see the disconnect
            finally:
                self._finish()
        await self._closed.wait()

    def _close_at_exit(self, error: BaseException) -> None:
        """Closes it without waiting, as the end of the loop does.

        An exception that ends the program leaves at once: what the peer, or a task that sees the
        end, does meanwhile could end the program otherwise.
        """
        if self._closed.is_set() or self._affinity.is_after_fork:
            return

        async def close() -> None:
            await asyncio.sleep(0)  # uvloop runs what is ready before the exception leaves it
            await self._close(protocol.failed(error))

        self._loop_shutdown.closing(self)
        self._closing_at_exit = background(self._loop, close())

    def abort(self) -> None:
        """Ends the connection now: work under way is dropped, the peer sees a broken connection.

        The resources are given back in the next iteration of the loop, which `wait_closed` waits
        for.
        """
        if not self._affinity.is_after_fork:
            self._affinity.check(self)
            self._end(ConnectionClosedError("the connection was aborted"))

    async def wait_closed(self) -> None:
        """Waits until the connection has ended, in whatever way, and given back its resources."""
        if not self._affinity.is_after_fork:
            self._affinity.check(self)
            await self._closed.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, exc: BaseException | None, traceback: object) -> None:
        """Closes it; if an exception leaves the block, the peer gets ConnectionBrokenError.

        The peer is told the type of the exception, not its text.  SystemExit and KeyboardInterrupt,
        which end the program, do not wait for that: the end of the loop does.
        """
        # An asynchronous generator whose user needs no more of it ends with GeneratorExit.
        if exc is None or isinstance(exc, GeneratorExit):
            await self.close()
        elif isinstance(exc, EXITS):
            self._close_at_exit(exc)
        else:
            await self._close(protocol.failed(exc))
