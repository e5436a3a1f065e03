"""The connection class that users see."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple, Self

from .._core import connection_states, protocol
from .._core.arguments import instance
from .._core.async_only import AsyncContext, AsyncIteration
from .._core.connection_states import CLOSING, LifecycleEvent
from .._core.finalizers import finalizer
from .._core.snapshot_types import ConnectionState, traffic
from .._event_loop.shutdown import EXITS, background
from ..cm.address import Address
from ..errors import ConnectionClosedError, ProtocolError, RDMAError, host_port
from ..verbs import QueuePair
from . import observation
from .endpoint import RailEndpoint
from .handshake import Handshake
from .memory_methods import MemoryMethods
from .observation import Statistics
from .rail_status import NO_TRANSFERS, RailStatus


class ConnectionStart(NamedTuple):
    """The time when the user got the connection, and whether a listener accepted it."""

    since: float
    accepted: bool


class Connection(MemoryMethods, AsyncContext, AsyncIteration):
    """An RDMA connection. Created by `connect`, a `Listener` or `start_server`, never directly.

    A connection belongs to the event loop in which it was created. It is not thread-safe.

    Every await can be cancelled. An operation that has been posted to the device still completes,
    and its memory is in use until then. An operation that has not been posted is dropped. The order
    of other operations does not change.

    Messages arrive in the order in which they were sent. A message also arrives after all writes
    that were started before it, even if you did not await them. A region is released or handed over
    in the same order. However, if a write with immediate data to the region still waits for room at
    the peer, that write is refused.

    Operations on the peer's memory start in the order of the calls. They may overtake messages that
    wait for room at the peer, and operations that wait for memory from the pool. A read or an
    atomic operation may see the result of a later write, so await the read before you write.

    After the connection has ended, every call raises ConnectionClosedError if one side closed the
    connection, or ConnectionBrokenError with the reason if the connection failed.
    """

    def __init__(self, endpoint: RailEndpoint, handshake: Handshake) -> None:
        super().__init__(endpoint, handshake)
        self._start_info: ConnectionStart | None = None
        self._statistics = Statistics()
        self._request_data = b""
        self._messages.outbox.counts = self._statistics
        self._queue.count_in(self._statistics)
        self._set_session(self._messages)
        observation.register(self._statistics)
        self._cached_wire: str | None = None
        self._wire_requested = False

    def _begin(self, *, accepted: bool) -> None:
        """Report a new connection to counters and hooks just before the user gets it.

        If the connection has already ended, report its end as well.
        """
        self._start_info = ConnectionStart(self._sharing.clock.now(), accepted)
        observation.connection_began(self, self._queue.peer, accepted=accepted)
        if self._state is connection_states.ConnectionState.CLOSED:
            self._report_end()
        elif self._rails is not None:
            self._rails.begin()

    def _report_end(self) -> None:
        if self._start_info is not None:
            error, accepted = self._close_cause, self._start_info.accepted
            assert error is not None
            observation.connection_ended(self, self._queue.peer, error, accepted=accepted)

    @finalizer
    def __del__(self) -> None:
        """Abort a connection that the user dropped without closing it. May run in any thread."""
        super().__del__()
        if (counted := getattr(self, "_statistics", None)) is not None:
            observation.connection_finalized(counted)

    # ---- properties ----------------------------------------------------------------------

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
        """The name of the device that carries the connection."""
        return self._lead_endpoint.driver.context.name

    @property
    def _lead_endpoint(self) -> RailEndpoint:
        lead = self._rails.lead_rail if self._rails is not None else None
        return self._endpoint if lead is None or lead.endpoint is None else lead.endpoint

    @property
    def wire(self) -> str | None:
        """The medium of the connection: "roce", "infiniband" or "iwarp".

        On the embedded device, it is "shared memory", "tcp" or, if selected, "roce". This is None
        while the embedded device is still choosing, at most until the first message has arrived,
        and after the connection has ended.
        """
        qp = self._lead_endpoint.qp
        return qp.wire if qp is not None and not qp.closed else None

    @property
    def local_address(self) -> Address | None:
        """The (host, port) of this side, or None if the link has none."""
        return self._link.local_address if self._link else None

    @property
    def peer_address(self) -> Address | None:
        """The (host, port) of the peer, or None if the link has none."""
        return self._link.peer_address if self._link else None

    @property
    def queue_pair(self) -> QueuePair:
        """The queue pair, for inspection and for its raw handles (docs/raw-handles.md).

        Do not post to it or modify it. This would break the connection, which keeps track of all
        work requests.
        """
        assert self._lead_endpoint.qp is not None
        return self._lead_endpoint.qp

    @property
    def rails(self) -> tuple[RailStatus, ...]:
        """The current state of the queue pairs on this side's devices.

        The first one is the queue pair of the handshake. If several devices were passed to
        `connect`, the others follow. `device`, `wire` and `queue_pair` are those of the lead.
        """
        assert self._start_info is not None
        if self._rails is not None:
            return tuple(self._rails.status())
        counts = self._statistics
        state: Literal["down", "lead"] = "down" if self.closed else "lead"
        since, error = self._start_info.since, self._close_cause
        sent, received = counts.bytes_sent, counts.bytes_received
        transfers = NO_TRANSFERS.plus(self._queue)._asdict()
        return (RailStatus(self.device, state, since, error, sent, received, **transfers),)

    @property
    def closed(self) -> bool:
        """Whether the connection has ended for any reason."""
        # Another rail takes over the work of a suspended queue.
        return self._close_cause is not None or (self._queue.failed and not self._queue.suspended)

    @property
    def request_data(self) -> bytes:
        """The data that the peer passed to `connect(data=...)`.

        It is b"" unless this side's listener has `on_request`.
        """
        return self._request_data

    @property
    def max_message(self) -> int:
        """The maximum length of a message that the peer accepts, in bytes."""
        return self._handshake.peer.max_message

    def statistics(self) -> Statistics:
        """Return the counters of messages, bytes and operations. The object keeps counting."""
        return self._statistics

    def _figures(self) -> ConnectionState:
        """Return the entry for `aiordma.snapshot`. Only valid after `_begin`. Thread-safe."""
        assert self._start_info is not None
        queue = self._queue
        messages, memory = self._messages.figures(), self._sharing.figures()
        local, now = self.local_address, self._sharing.clock.now()
        return {
            "device": self.device,
            "loop": id(self._loop),
            "wire": self._cached_wire,
            "state": self._state.name,
            "accepted": self._start_info.accepted,
            "local": host_port(local) if local is not None else None,
            "peer": queue.peer or None,
            "qp_num": queue.qp.qp_num,
            "age": now - self._start_info.since,
            "traffic": traffic(partial(getattr, self._statistics)),
            "send_queue": queue.capacity,
            "outstanding": queue.outstanding,
            "messages_waiting": messages["messages_waiting"],
            "waiting_for_credits": 0 if messages["credits"] else messages["messages_waiting"],
            "waiting_for_send_queue": len(queue.backlog),
            "messages_unread": messages.get("arrived", 0),
            "shared_regions": memory["shared_regions"],
            "lent_bytes": memory["lent_bytes"],
            "remote_regions": memory["remote_regions"],
            "rails": [rail.figures(now) for rail in self.rails],
        }

    def _request_wire(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop that must call `_read_wire`, or None if no call is needed."""
        if self._cached_wire is not None or self._wire_requested:
            return None
        self._wire_requested = True  # ask a blocked loop only once
        return self._loop

    def _read_wire(self) -> None:
        """Cache `wire`. Must run in the loop's thread, because it queries the device."""
        self._wire_requested = False
        with suppress(RDMAError, OSError):  # the device may have failed
            self._cached_wire = self.wire

    # ---- the end --------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the connection in order: finish the work in progress, say goodbye, and disconnect.

        This waits for the peer for at most `Config.close_timeout` seconds. If you cancel the call,
        the connection is aborted. A second call only waits for the first one.

        Messages that have arrived can still be received afterwards. They include every message for
        which `send` has returned at the peer, unless it follows a long message that this side has
        not read.
        """
        await self._close(protocol.GOODBYE)

    async def _close(self, goodbye: protocol.Goodbye) -> None:
        """Close the connection like `close`, but with the given goodbye message."""
        if self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        if self._advance(LifecycleEvent.CLOSE):
            self._messages.outbox.closing = True
            try:
                await self._messages.drained()
                if self._advance(LifecycleEvent.DRAINED):
                    await self._sharing.send(goodbye)
                    self._finish(at_once=True)
            except RDMAError:
                pass  # the peer has failed or does not read; the disconnect informs it
            finally:
                self._finish()
        await self._closed.wait()

    def _close_at_exit(self, error: BaseException) -> None:
        """Close the connection in the background, because `error` is ending the program.

        The exception must propagate immediately. If it waited for the close, the peer or another
        task could react to the close and end the program differently. The loop's shutdown waits
        for the close instead.
        """
        if self._closed.is_set() or self._affinity.is_after_fork:
            return

        async def close() -> None:
            await asyncio.sleep(0)  # uvloop runs ready callbacks before the exception propagates
            await self._close(protocol.failure_goodbye(error))

        self._loop_shutdown.mark_closing(self)
        self._closing_at_exit = background(self._loop, close())

    def abort(self, error: ProtocolError | None = None) -> None:
        """End the connection immediately.

        Work in progress is dropped, and the peer sees a broken connection. The resources are
        released in the next iteration of the event loop; `wait_closed` waits for that.

        Args:
            error: The reason, if the peer violated the protocol that you run over the connection.
                Operations on this side raise a copy of it instead of ConnectionClosedError. The
                peer's ConnectionBrokenError contains the first 256 bytes of its text. It is logged
                as a warning.
        """
        if self._affinity.is_after_fork:
            return
        self._affinity.check(self)
        if error is not None:
            instance("error", error, ProtocolError, "an aiordma.ProtocolError")
        if error is None or self.closed:
            self._end(ConnectionClosedError("the connection was aborted"))
        else:
            self._end_and_report(error)

    async def wait_closed(self) -> None:
        """Wait until the connection has ended for any reason and has released its resources."""
        if not self._affinity.is_after_fork:
            self._affinity.check(self)
            await self._closed.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, exc: BaseException | None, traceback: object) -> None:
        """Close the connection. If the block raised, the peer gets ConnectionBrokenError.

        The peer is told the type of the exception, but not its text. SystemExit and
        KeyboardInterrupt, which end the program, do not wait until the connection is closed. The
        shutdown of the event loop does.
        """
        # GeneratorExit is not a failure. It means that the consumer of an asynchronous generator
        # has stopped.
        if exc is None or isinstance(exc, GeneratorExit):
            await self.close()
        elif isinstance(exc, EXITS):
            self._close_at_exit(exc)
        else:
            await self._close(protocol.failure_goodbye(exc))
